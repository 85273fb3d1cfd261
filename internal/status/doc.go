// SPDX-License-Identifier: Apache-2.0

// Package status is what people and programs are told about a node, as values, and
// the two forms in which people read it: a text and a web page.
//
// # Values
//
// A [Status] is one snapshot: the node's partition, its GPUs with their holders and
// MIG devices, the memory of each container, and how GPUs are connected. The agent
// fills it in, /statusz serves it as JSON, and the metrics are counted from it, so
// no two of them disagree:
//
//	s := agent.Status()
//	err := status.WriteText(os.Stdout, s, status.TextOptions{Width: 100, Now: now})
//
// The JSON is a contract with other versions of `gpu-agent status` and with other
// programs: fields are added, never renamed. Whoever reads it may meet the Status
// of an agent that is older, newer or broken, so nothing here trusts a number in it:
// sizes are bounded, indexes are checked, and what is unknown is shown as a dash.
//
// # Conditions
//
// Whatever is refused, blocked, failed, waited for or leaving is a [Condition]: a type,
// a stable reason, a subject, a time and a message. What is found elsewhere begins as a
// [Cause], which is a reason with its message and can be an error too:
//
//	return status.Why(status.MIGUnsupported, "%s cannot do MIG", d.Name())
//	errs = append(errs, status.Because(status.HoldersUnknown, err))
//
// Whoever knows the subject makes the condition; [SortConditions] keeps the time at
// which it was first seen. Reasons are constants in reason.go, and docs/operations.md
// says of each what to do.
//
// # Text and page
//
// Both show the same notes and rows (rows.go): what needs attention on the node and on
// each GPU, and who holds what of a GPU with its memory.
//
// [WriteText] writes the Status for a terminal of 60 columns or more: one block for
// each GPU, with a bar of what is held and a line for each holder; then a table of
// the containers' memory. A GPU in MIG mode has a row of cells instead of the bar,
// each as wide as its share of the memory slices,
//
//	┌0─────────┬1─────────┬2─────────┬3─────────┬4──────────────────────────────────────────┐
//	│1g.10gb   │1g.10gb   │·         │·         │3g.40gb                                    │
//	│held      │warm      │·         │·         │making                                     │
//	│notebook-1│          │·         │·         │train-8                                    │
//	└──────────┴──────────┴──────────┴──────────┴───────────────────────────────────────────┘
//
// then a line for each device that exists or is held, and the placements where more
// could be created.
//
// [WriteHTML] writes it as a web page: what needs attention; a drawing of the node
// with its NUMA nodes, GPUs, network cards and NVLinks; what is on offer; a card for
// each GPU with its holders and their memory; and the matrix of `nvidia-smi topo -m`.
// Each figure has its unit, each colour a word beside it, and each drawing a table
// that says the same.
//
// First it is computed what is shown (page.go): cards, notes, offers, and the drawing as
// rectangles, paths and labels (drawing.go). Then one function for each part of the page
// writes that between its tags and decides next to nothing (parts.go). Because the policy
// ([PagePolicy]) refuses style attributes, whatever has a size is SVG, or a table cell
// that spans columns.
//
// Pod names, models and errors are texts from outside. A tag is a constant of the program,
// with holes for values (markup.go):
//
//	m.put(`<p class="say {}">{}</p>`, n.Tone, n.Text)
//
// Each value is escaped, and a test holds that each hole is where escaping is enough: in
// text or within the double quotes of an attribute, and of a link only behind #gpu-.
// sanitize replaces control, invalid and bidirectional characters. The page has no script,
// and its policy lets none run and nothing be loaded. The page is XML as well as HTML, so
// that a test can read it with a strict parser, and tests/page looks at it in a browser.
//
// The page is not a template of html/template or text/template. Those call methods by
// name, so that the linker keeps every exported method of the whole program, and the agent
// needs 5 MB more on each node.
//
// # Limits
//
// The package has no clock, no network and no state. It does not know where a figure
// comes from, nor what to do about it.
package status
