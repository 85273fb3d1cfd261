// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Plan is what a partition would do to a node. `gpu-agent plan -o json` prints it:
// new versions add fields and never rename one. Lists are never null, except where it is noted.
type Plan struct {
	// Partition is the partition's name. Own is true if the node follows it: its label names
	// it, or it is "default" and there is no label.
	Partition string `json:"partition"`
	Own       bool   `json:"own,omitempty"`
	// State is the state that the node's partition would reach, one of PartitionStates. It
	// assumes that no pod comes or ends, and that the driver does as it is told. Reason and
	// Message are as in Partition.
	State   string `json:"state"`
	Reason  Reason `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Conditions are the facts that State follows from, the gravest first; absent if there are
	// none.
	Conditions []Condition `json:"conditions,omitempty"`
	// Mistakes are the faults that make State "invalid". Open are those that are still
	// undecided: a driver may report only in MIG mode whether a geometry fits. Both are ordered
	// by line of the partition file, and absent if there are none.
	Mistakes []Mistake `json:"mistakes,omitempty"`
	Open     []Mistake `json:"open,omitempty"`
	// Elsewhere is true if the partition is for other nodes: it names models alone, and no GPU of this
	// node is of any of them. State is "invalid" then, since the node cannot have it.
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Unknown lists what was not known for the answer; absent if that is nothing.
	Unknown []string `json:"unknown,omitempty"`
	// GPUs is sorted by index; empty if State is "invalid".
	GPUs []PlannedGPU `json:"gpus"`
	// Offers lists what pods can ask for afterwards, sorted by resource and API; empty if that
	// was not asked.
	Offers []PlannedOffer `json:"offers"`
}

// Mistake is a fault in a partition file, with its line.
type Mistake struct {
	Line    int    `json:"line"`
	Message string `json:"message"`
}

// PlannedGPU is a GPU and how it gets to its partition.
type PlannedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model,omitempty"`
	// Wanted is the layout that the partition asks for, in words.
	Wanted string `json:"wanted"`
	// API is "dra" if it is to be offered through dynamic resource allocation.
	API string `json:"api,omitempty"`
	// From and To are its layouts before and after, in words. They are equal if the layout
	// stays, and empty if nothing is known of it.
	From string `json:"from,omitempty"`
	To   string `json:"to,omitempty"`
	// Steps are what is done to its hardware, in order; empty if something is in the way.
	Steps []PlannedStep `json:"steps"`
	// Result are the MIG instances that exist afterwards.
	Result []PlannedInstance `json:"result"`
	// Blocked are the holders that must end before anything is done.
	Blocked []InTheWay `json:"blocked"`
	// Fault is why the driver cannot describe the GPU; nothing is done to it then.
	Fault string `json:"fault,omitempty"`
	// Untold is true if the driver reports placements only in MIG mode. What comes after Steps
	// is then not known.
	Untold bool `json:"untold,omitempty"`
	// ResetUnknown is true if the MIG mode changes and the GPU's architecture is not known. The
	// change may then take a reset.
	ResetUnknown bool `json:"resetUnknown,omitempty"`
}

// PlannedInstance is a MIG instance at its place. CI is set only for a part of a GPU instance:
// its first compute slice there.
type PlannedInstance struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
	CI      *int   `json:"ci,omitempty"`
}

// PlannedStep is one change of a GPU's hardware. A change of the MIG mode has no profile.
type PlannedStep struct {
	// Op is "destroy", "create", "enable" or "disable".
	Op string `json:"op"`
	PlannedInstance
	// Reset is true if the GPU is reset for it.
	Reset bool `json:"reset,omitempty"`
}

// InTheWay is a holder that must end. It holds a MIG instance, or, if PlannedInstance is nil,
// the GPU in its present layout.
type InTheWay struct {
	*PlannedInstance
	Reason Reason `json:"reason"`
	Holder string `json:"holder,omitempty"`
}

// PlannedOffer is what pods can ask for.
type PlannedOffer struct {
	// Resource is the full name. API is "dra" if pods ask for it by claims. Memory that claims ask for
	// has no resource: its name is that of its DeviceClass, and UnitMiB the size of its devices, which
	// is 0 otherwise.
	Resource string `json:"resource"`
	API      string `json:"api,omitempty"`
	UnitMiB  int    `json:"unitMiB,omitempty"`
	// Total is the number of devices, and Free the number of those that are free. Largest is
	// the largest request of one container that fits beside the holders. MIG devices on demand
	// exclude each other.
	Total   int `json:"total"`
	Free    int `json:"free"`
	Largest int `json:"largest"`
}

// String returns "3g.40gb@4", or "1c.3g.40gb@4.1" for a part of a GPU instance.
func (p *PlannedInstance) String() string {
	if p.CI != nil {
		return fmt.Sprintf("%s@%d.%d", p.Profile, p.Start, *p.CI)
	}
	return fmt.Sprintf("%s@%d", p.Profile, p.Start)
}

// String returns "create 3g.40gb@4", or "enable MIG mode, with a reset of the GPU".
func (s *PlannedStep) String() string {
	switch {
	case s.Profile != "":
		return s.Op + " " + s.PlannedInstance.String()
	case s.Reset:
		return s.Op + " MIG mode, with a reset of the GPU"
	}
	return s.Op + " MIG mode"
}

// String returns the holder, and the instance that it has.
func (b *InTheWay) String() string {
	if b.PlannedInstance == nil {
		return b.Holder
	}
	return b.PlannedInstance.String() + " (" + cmp.Or(b.Holder, string(b.Reason)) + ")"
}

// Of reports whether the plan has a condition of one of these types.
func (p *Plan) Of(types ...Type) bool {
	return slices.ContainsFunc(p.Conditions, func(c Condition) bool { return slices.Contains(types, c.Type) })
}

// WritePlan writes a plan for people: its result, the steps and obstacles of each GPU, what
// pods can ask for afterwards, and what is not known. The only errors are those of w.
func WritePlan(w io.Writer, p Plan) error {
	var b strings.Builder
	switch {
	case p.Partition == "":
		fmt.Fprintf(&b, "without a partition the node is %s\n", p.State)
	case p.Own:
		fmt.Fprintf(&b, "partition %s, which the node follows, would be %s\n", p.Partition, p.State)
	default:
		fmt.Fprintf(&b, "partition %s would be %s\n", p.Partition, p.State)
	}
	for _, c := range p.Conditions {
		if !slices.ContainsFunc(p.GPUs, func(g PlannedGPU) bool { return g.UUID == c.Subject }) {
			fmt.Fprintf(&b, "  %s\n", c.Message)
		}
	}
	for i := range p.GPUs {
		p.GPUs[i].write(&b, p.Conditions)
	}
	if len(p.Offers) > 0 {
		fmt.Fprintln(&b, "pods can then ask for")
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, o := range p.Offers {
			name := o.Resource
			if o.API != "" {
				name += " (" + o.API + ")"
			}
			figure := &GPU{UnitMiB: uint64(max(o.UnitMiB, 0))}
			fmt.Fprintf(t, "  %s\t%s of %s%s free\tat most %s%s in one container\n", name,
				measure(figure, o.Free), measure(figure, o.Total), unitName(figure, o.Total),
				measure(figure, o.Largest), unitName(figure, o.Largest))
		}
		t.Flush()
	}
	if len(p.Unknown) > 0 {
		fmt.Fprintf(&b, "not known here: %s\n", strings.Join(p.Unknown, "; "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// mostInTheWay is how many holders of one GPU are listed. A GPU with many units may have
// hundreds.
const mostInTheWay = 20

func (g *PlannedGPU) write(b *strings.Builder, conditions []Condition) {
	fmt.Fprintf(b, "GPU %d  %s  %s: %s\n", g.Index, g.UUID, cmp.Or(g.Model, "unknown model"), g.Wanted)
	idle := true
	line := func(format string, args ...any) { idle = false; fmt.Fprintf(b, "  "+format+"\n", args...) }
	if g.Fault != "" {
		line("nothing can be done: %s", g.Fault)
	}
	for _, c := range conditions {
		if c.Subject == g.UUID && c.Type != Blocked {
			line("%s: %s", strings.ToLower(string(c.Type)), c.Message)
		}
	}
	if len(g.Blocked) > 0 {
		line("blocked; these must end first:")
		for i := range min(len(g.Blocked), mostInTheWay) {
			line("  %s", &g.Blocked[i])
		}
		if more := len(g.Blocked) - mostInTheWay; more > 0 {
			line("  and %d more", more)
		}
	}
	for i := range g.Steps {
		line("%s", &g.Steps[i])
	}
	if g.From != g.To && g.From != "" {
		line("layout changes from %[2]s to %[1]s", g.To, g.From)
	}
	if idle {
		line("nothing to do")
	}
	if len(g.Result) > 0 {
		names := make([]string, len(g.Result))
		for i := range g.Result {
			names[i] = g.Result[i].String()
		}
		line("= %s", strings.Join(names, " "))
	}
	if g.ResetUnknown {
		line("its architecture is not known: on Ampere, a change of the MIG mode needs a reset of the GPU")
	}
	if g.Untold {
		line("this driver reports placements only in MIG mode: plan again once MIG is on")
	}
}

// Question asks an agent what partitions would do to its node.
type Question struct {
	// File is a partition file, and Partitions are those to plan. If Partitions is empty, the
	// plan is for the partition that the node follows.
	File       []byte
	Partitions []string
	// UnitMiB and API replace the agent's --memory-unit and --api, unless they are zero.
	UnitMiB uint64
	API     string
	// Brief is true if the answer is to be without Plan.Offers.
	Brief bool
}

// MostAsked is the largest number of partitions in one question.
const MostAsked = 64

// Answer has the plans in the order of the question, or the mistakes of a file that cannot be
// read.
type Answer struct {
	Mistakes []Mistake `json:"mistakes,omitempty"`
	Plans    []Plan    `json:"plans,omitempty"`
	// Found is as in Status.
	Found []Condition `json:"found,omitempty"`
}
