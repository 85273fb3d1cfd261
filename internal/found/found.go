// SPDX-License-Identifier: Apache-2.0

package found

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// Node is what was read of a node. The zero value is a node without GPUs.
type Node struct {
	// Driver is the driver's version.
	Driver string
	// Modeset is true if the kernel's display driver (nvidia_drm) holds the GPUs.
	Modeset bool
	// MPS are the MPS control daemons and servers that run on the node, by PID.
	MPS []gpu.Client
	// MPSDirs are the directories with their sockets.
	MPSDirs []string
	GPUs    []GPU
}

// GPU is what was read of one GPU, and what it is to be.
type GPU struct {
	Device gpu.Device
	Setup  gpu.Setup
	// Mode is the layout that the partition wants. Unset makes all findings remarks.
	Mode status.Mode
	// Owners are the processes in Setup.Processes that belong to no pod with an allocation on the
	// GPU.
	Owners []gpu.Client
	// Refused is why the agent could not set the compute mode; empty if it did not try, or could.
	Refused string
	// Clients are the processes, other than the agent, that have the device node open. It may be
	// nil if no reset is due.
	Clients []gpu.Client
}

// Finding is something that was found. Its Subject is a GPU's UUID, or empty for the node.
type Finding struct {
	status.Condition
	// Do is what an operator can do about it; a command if there is one.
	Do string
}

// What returns the message without what to do.
func (f *Finding) What() string { return strings.TrimSuffix(f.Message, doBefore+f.Do) }

// doBefore is between the two in a message.
const doBefore = "; to end it: "

// mostNamed is how many processes a sentence names. mostText bounds a process's name and other
// text from outside, in bytes.
const (
	mostNamed = 4
	mostText  = 100
)

// Look returns the findings of a node, the gravest first.
func Look(n Node) (out []Finding) {
	add := func(k *kind, g *GPU, subject, name string) {
		what := k.find(&n, g)
		if what == "" {
			return
		}
		grave, do := status.Noted, k.do(g)
		if g != nil {
			if t, matters := k.matters[g.Mode]; matters {
				grave = t
			}
		}
		c := status.Why(k.code, "%s %s: %s%s%s", name, what, k.means, doBefore, do).Condition(grave, subject)
		out = append(out, Finding{c, do})
	}
	for i := range kinds {
		k := &kinds[i]
		if k.ofNode {
			add(k, nil, "", "the node")
			continue
		}
		for j := range n.GPUs {
			if g := &n.GPUs[j]; g.Device.Fault == "" {
				add(k, g, string(g.Device.UUID), g.Device.Name())
			}
		}
	}
	slices.SortStableFunc(out, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(slices.Index(status.Types, a.Type), slices.Index(status.Types, b.Type)),
			cmp.Compare(codeIndex(a.Reason), codeIndex(b.Reason)))
	})
	return out
}

// PutRight reports whether the agent may set a GPU's compute mode to DEFAULT: the layout needs
// that, and the mode has no living owner. mps are the node's daemons of MPS.
func PutRight(g *GPU, mps []gpu.Client) bool {
	_, matters := kinds[codeIndex(status.ComputeModeSet)].matters[g.Mode]
	return matters && computeModeSet(g) && len(owners(g, mps)) == 0
}

// Resets reports whether the layout may need a reset of the GPU: its MIG mode has to be switched on.
func Resets(g *GPU) bool { return slices.Contains(inMIG, g.Mode) && !g.Device.MIG.Enabled }

// computeModeSet reports whether a GPU's compute mode is known and other than DEFAULT.
func computeModeSet(g *GPU) bool {
	return g.Setup.Compute != gpu.ComputeUnknown && g.Setup.Compute != gpu.ComputeDefault
}

// owners returns the processes that may have set a GPU's compute mode.
func owners(g *GPU, mps []gpu.Client) []gpu.Client {
	out := slices.Concat(g.Owners, mps)
	slices.SortFunc(out, func(a, b gpu.Client) int { return cmp.Compare(a.PID, b.PID) })
	return slices.Compact(out)
}

// IsMPS reports whether a process calls itself a control daemon or a server of MPS. The kernel
// keeps 15 bytes of a name.
func IsMPS(c gpu.Client) bool { return strings.HasPrefix(c.Name, "nvidia-cuda-mps") }

func codeIndex(r status.Reason) int {
	return slices.IndexFunc(kinds, func(k kind) bool { return k.code == r })
}

// processes names processes: "1234 (nv-hostengine), 77 (python3)".
func processes(of []gpu.Client) string {
	names := make([]string, len(of)) // the list counts those after the first ones, without their names
	for i, c := range of[:min(len(of), mostNamed)] {
		if names[i] = fmt.Sprint(c.PID); c.Name != "" {
			names[i] += " (" + text(c.Name) + ")"
		}
	}
	return brief.List(names, mostNamed)
}

// text bounds a text from outside, and replaces what is not a printable ASCII character.
func text[T ~string](of T) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, brief.Cut(string(of), mostText))
}
