// SPDX-License-Identifier: Apache-2.0

// Package status describes a node for people and programs: as values, as a text, and as a web
// page.
//
// # Values
//
// A [Status] is one snapshot: the node's partition, its GPUs with their holders and MIG devices,
// the memory of each container, and how the GPUs are connected. The agent fills it in, serves
// it as JSON at /statusz, and counts the metrics from it, so that they all agree:
//
//	s := agent.Status()
//	err := status.WriteText(os.Stdout, s, status.TextOptions{Width: 100, Now: now})
//
// The JSON is a contract with other versions of `gpu-agent status` and with other programs: new
// versions add fields and never rename one. A reader may get the Status of an agent that is
// older, newer or broken. So this package trusts no number in it: it bounds sizes, checks
// indexes, and shows a dash for what is unknown.
//
// # Conditions
//
// A [Condition] is a fact that needs attention: something was refused, is blocked, has failed, is
// waited for, or is leaving. It has a type, a stable reason, a subject, a time and a message.
// Other packages begin with a [Cause], which is a reason with its message. A cause can also be
// an error:
//
//	return status.Why(status.MIGUnsupported, "%s cannot do MIG", d.Name())
//	errs = append(errs, status.Because(status.HoldersUnknown, err))
//
// The caller that knows the subject makes the condition. [SortConditions] keeps the time at
// which it was first seen. Reasons are constants in reason.go; docs/conditions.md explains
// each one and what to do.
//
// # Text and page
//
// Both show the same notes and rows (rows.go). A note is about the node or a GPU, and needs
// attention. A row is a holder, with its part of a GPU and its memory.
//
// [WriteText] writes the Status for a terminal of 60 columns or more: one block for each GPU,
// with a bar of what is held and a line for each holder; then a table of the containers'
// memory. A GPU in MIG mode has a row of cells instead of the bar,
// each as wide as its share of the memory slices,
//
//	┌0─────────┬1─────────┬2─────────┬3─────────┬4──────────────────────────────────────────┐
//	│1g.10gb   │1g.10gb   │·         │·         │3g.40gb                                    │
//	│held      │warm      │·         │·         │making                                     │
//	│notebook-1│          │·         │·         │train-8                                    │
//	└──────────┴──────────┴──────────┴──────────┴───────────────────────────────────────────┘
//
// then a line for each device that exists or is held, and the placements where more could be
// created.
//
// [WriteHTML] writes it as a web page: what needs attention; a drawing of the node with its NUMA
// nodes, GPUs, network cards and NVLinks; what is on offer; a card for each GPU with its
// holders and their memory; and the matrix of `nvidia-smi topo -m`. Each figure has its unit,
// each colour a word beside it, and each drawing a table with the same facts.
//
// The page is made in two steps. First, page.go computes what it shows: cards, notes and offers;
// drawing.go computes the drawing as rectangles, paths and labels. Then parts.go writes the
// tags, with one function for each part of the page. The policy ([PagePolicy]) refuses style
// attributes, so anything with a size is SVG, or a table cell that spans columns.
//
// Pod names, models and errors are texts from outside. A tag is a constant of the program, with
// holes for values (markup.go):
//
//	m.put(`<p class="say {}">{}</p>`, n.Tone, n.Text)
//
// Each value is escaped. A test holds that each hole is where escaping is enough: in text or
// within the double quotes of an attribute, and in a link only behind #gpu-. sanitize replaces
// control, invalid and bidirectional characters. The page has no script, and its policy runs
// none and loads nothing. The page is XML as well as HTML, so that a test can read it with a
// strict parser; tests/page looks at it in a browser.
//
// The page is not a template of html/template or text/template. These call methods by name, so
// the linker would keep every exported method of the program, and the agent would need 5 MB
// more on each node.
//
// # Limits
//
// The package has no clock, no network and no state. It does not know where a figure comes from,
// nor what to do about it.
package status
