// SPDX-License-Identifier: Apache-2.0

// Package status is what people and programs are told of a node, as values, and
// the two forms in which people see it: a text and a page.
//
// A [Status] is one snapshot. The agent fills it in, /statusz shows it as JSON,
// and the metrics are counted from it, so none of them disagrees with another one:
//
//	s := agent.Status()
//	err := status.WriteText(os.Stdout, s, status.TextOptions{Width: 100, Now: now})
//
// # Text
//
// [WriteText] draws the Status for a terminal of 80 columns or more: a block a
// GPU, with a bar of what is held and a line for each holder; then a table of
// the containers' memory. A GPU that MIG cuts has its memory slots as a row of
// cells instead of the bar,
//
//	┌0─────────┬1─────────┬2─────────┬3─────────┬4──────────────────────────────────────────┐
//	│1g.10gb   │1g.10gb   │·         │·         │3g.40gb                                    │
//	│held      │warm      │·         │·         │making                                     │
//	│notebook-1│          │·         │·         │train-8                                    │
//	└──────────┴──────────┴──────────┴──────────┴───────────────────────────────────────────┘
//
// then a line for each device that stands or is held, and the places where more
// could be made.
//
// # Page
//
// [WriteHTML] draws it for a browser: what needs a look, a drawing of the node with its NUMA nodes, GPUs, network
// cards and NVLinks, what is on offer, a card a GPU with who holds what of it and
// the memory of each, and the matrix of `nvidia-smi topo -m`.
//
// The page needs nothing but itself. It has no script, and its policy lets none
// run, nor anything be loaded: what somebody gets into a pod's name, a model's or
// an error stays a text. It is made by [strings.Builder] and not by html/template,
// with which the linker can drop no method of anything (4 MB of the program); so
// that nothing is forgotten, markup is written in one place, put, which
// escapes every value. As a style attribute is refused by the policy too,
// whatever has a measure is SVG, or a cell that spans columns.
//
// Each figure has its unit, each colour a word beside it, and each drawing a
// table that says the same. tests/page looks at all of it in a browser.
//
// The package has no clock and no network, and does not know where a figure comes
// from. What time it is is an argument.
package status
