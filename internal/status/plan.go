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

// Plan is what a partition would make of a node. `gpu-agent plan -o json` prints it: fields
// are added, never renamed. But for those that say so no list is null.
type Plan struct {
	// Partition is its name, and Own says that it is the one that the node follows: by its
	// label, or "default" where there is none.
	Partition string `json:"partition"`
	Own       bool   `json:"own,omitempty"`
	// State is what the state of the node's partition would come to, one of PartitionStates,
	// if no pod came or ended and the driver did as it is told. Reason and Message are as in
	// Partition.
	State   string `json:"state"`
	Reason  Reason `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Conditions are the facts that State follows from, the gravest first; absent where there
	// are none.
	Conditions []Condition `json:"conditions,omitempty"`
	// Mistakes are why State is "invalid", and Open what would be one if it were not unknown:
	// whether a geometry fits of which the driver tells only in MIG mode. Both are by line of
	// the partition file, and absent where there are none.
	Mistakes []Mistake `json:"mistakes,omitempty"`
	Open     []Mistake `json:"open,omitempty"`
	// Unknown is what the answer does without; absent where that is nothing.
	Unknown []string `json:"unknown,omitempty"`
	// GPUs is sorted by index; empty where State is "invalid".
	GPUs []PlannedGPU `json:"gpus"`
	// Offers is what pods can ask for then, sorted by resource and API; empty where that was
	// not asked.
	Offers []PlannedOffer `json:"offers"`
}

// Mistake is what is wrong with a partition file.
type Mistake struct {
	Line    int    `json:"line"`
	Message string `json:"message"`
}

// PlannedGPU is one GPU's way to its partition.
type PlannedGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model,omitempty"`
	// Wanted is what the partition makes of it, in words.
	Wanted string `json:"wanted"`
	// API is "dra" where it is to be offered through dynamic resource allocation.
	API string `json:"api,omitempty"`
	// From and To are its layouts before and then, in words; the same where it is not laid out
	// anew, and empty where nothing is known of it.
	From string `json:"from,omitempty"`
	To   string `json:"to,omitempty"`
	// Steps are done to its hardware, in order: none where something is in the way.
	Steps []PlannedStep `json:"steps"`
	// Result are the MIG instances that exist then.
	Result []PlannedInstance `json:"result"`
	// Blocked are those that must end before anything is done.
	Blocked []InTheWay `json:"blocked"`
	// Fault is why the driver cannot describe it, and nothing is done to it.
	Fault string `json:"fault,omitempty"`
	// Untold says that its driver tells only in MIG mode what can stand on it: what comes after
	// Steps is not known.
	Untold bool `json:"untold,omitempty"`
	// ResetUnknown says that the MIG mode changes, and that nobody knows whether that takes a
	// reset, since the GPU's architecture is not known.
	ResetUnknown bool `json:"resetUnknown,omitempty"`
}

// PlannedInstance is a MIG instance at its place. Only parts of a GPU instance have a CI: the
// first of its compute slices that is theirs.
type PlannedInstance struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
	CI      *int   `json:"ci,omitempty"`
}

// PlannedStep is something that is done to a GPU's hardware. A change of the MIG mode has no
// profile.
type PlannedStep struct {
	// Op is "destroy", "create", "enable" or "disable".
	Op string `json:"op"`
	PlannedInstance
	// Reset says that the GPU is reset for it.
	Reset bool `json:"reset,omitempty"`
}

// InTheWay is a holder that must end: of a MIG instance, or without one of the GPU as it is
// laid out.
type InTheWay struct {
	*PlannedInstance
	Reason Reason `json:"reason"`
	Holder string `json:"holder,omitempty"`
}

// PlannedOffer is what pods can ask for.
type PlannedOffer struct {
	// Resource is the full name. API is "dra" where it is asked for by claims.
	Resource string `json:"resource"`
	API      string `json:"api,omitempty"`
	// Total is how many devices there are, Free how many can be had, and Largest how many one
	// container can have, beside those who hold some. MIG devices on demand exclude each other.
	Total   int `json:"total"`
	Free    int `json:"free"`
	Largest int `json:"largest"`
}

// String is "3g.40gb@4", of a part of a GPU instance "1c.3g.40gb@4.1".
func (p *PlannedInstance) String() string {
	if p.CI != nil {
		return fmt.Sprintf("%s@%d.%d", p.Profile, p.Start, *p.CI)
	}
	return fmt.Sprintf("%s@%d", p.Profile, p.Start)
}

// String is "create 3g.40gb@4", or "enable MIG mode, with a reset of the GPU".
func (s *PlannedStep) String() string {
	switch {
	case s.Profile != "":
		return s.Op + " " + s.PlannedInstance.String()
	case s.Reset:
		return s.Op + " MIG mode, with a reset of the GPU"
	}
	return s.Op + " MIG mode"
}

// String names the holder, and what it has.
func (b *InTheWay) String() string {
	if b.PlannedInstance == nil {
		return b.Holder
	}
	return b.PlannedInstance.String() + " (" + cmp.Or(b.Holder, string(b.Reason)) + ")"
}

// Of reports whether a fact of one of these types stands among its conditions.
func (p *Plan) Of(types ...Type) bool {
	return slices.ContainsFunc(p.Conditions, func(c Condition) bool { return slices.Contains(types, c.Type) })
}

// WritePlan writes a plan for people: what it comes to, each GPU with what is done or in the
// way, what pods can ask for then, and what is not known. The only errors are those of w.
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
			fmt.Fprintf(t, "  %s\t%d of %d free\tat most %d in one container\n", name, o.Free, o.Total, o.Largest)
		}
		t.Flush()
	}
	if len(p.Unknown) > 0 {
		fmt.Fprintf(&b, "not known here: %s\n", strings.Join(p.Unknown, "; "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// mostInTheWay is how many holders of one GPU are listed: one of many units may have hundreds.
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
		line("laid out as %s, which was %s", g.To, g.From)
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
		line("its architecture is not known here: on Ampere the MIG mode changes with a reset of the GPU")
	}
	if g.Untold {
		line("this driver tells placements once MIG is on: plan again then")
	}
}

// Question asks an agent what partitions would make of its node.
type Question struct {
	// File is a partition file, and Partitions are those of it that are asked for; none stands
	// for the one that the node follows.
	File       []byte
	Partitions []string
	// UnitMiB and API take the place of the agent's --memory-unit and --api where they are set.
	UnitMiB uint64
	API     string
	// Brief leaves out Plan.Offers.
	Brief bool
}

// MostAsked is how many partitions one question asks for.
const MostAsked = 64

// Answer has the plans in the order of the question, or why the file cannot be read.
type Answer struct {
	Mistakes []Mistake `json:"mistakes,omitempty"`
	Plans    []Plan    `json:"plans,omitempty"`
}
