// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	planner "example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// errBlocked says that busy instances are in the way of a plan that was printed. It has
// an exit status of its own.
var errBlocked = errors.New("blocked")

// partitionDefault is the one that a node without a label has.
const partitionDefault = "default"

// gpuPlan is one GPU's way to its partition.
type gpuPlan struct {
	*gpu.Device
	want config.Want
	mig.Plan
}

// The JSON of a plan. No list in it is null; where something is blocked there is
// no step, and the result is what exists now.
type (
	planJSON struct {
		GPUs []gpuPlanJSON `json:"gpus"`
	}
	gpuPlanJSON struct {
		UUID gpu.UUID `json:"uuid"`
		// API is absent where that is the device plugin, or nothing is offered.
		API     ledger.FrontEnd `json:"api,omitempty"`
		Steps   []stepJSON      `json:"steps"`
		Result  []placementJSON `json:"result"`
		Blocked []blockedJSON   `json:"blocked"`
	}
	// placementJSON is an instance at its place. Only parts of a GPU instance have a
	// ci: the first of its compute slices that is theirs.
	placementJSON struct {
		Profile string `json:"profile"`
		Start   int    `json:"start"`
		CI      *int   `json:"ci,omitempty"`
	}
	// stepJSON of turning MIG on or off has no profile.
	stepJSON struct {
		Op mig.Op `json:"op"`
		placementJSON
	}
	blockedJSON struct {
		placementJSON
		Reason string `json:"reason"`
		Holder string `json:"holder,omitempty"`
	}
)

func plan(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "plan", "", "Prints what would be done to the GPUs of this node, or of --inventory, to make a\npartition of them: which MIG instances go and which are made, and where. It does\nnothing. The exit status is 3 if busy instances are in the way on some GPU.")
	var d driverFlags
	d.register(fs)
	var from, file, partition string
	fs.StringVar(&from, "inventory", "", inventoryUsage)
	fs.StringVar(&file, "config", "", "partition `file`; - for the standard input")
	fs.StringVar(&partition, "partition", partitionDefault, "`name` of the partition")
	var of partitionFlags
	of.register(fs)
	format := choice{"text", []string{"text", "json"}}
	fs.Var(&format, "o", "output `format`: text or json")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	if file == "" {
		fmt.Fprintln(c.err, "gpu-agent plan: --config is missing: it names the partition file")
		return errUsage
	}
	f, err := readPartitions(c, file)
	if err != nil {
		return err
	}
	inv, err := inventoryFrom(ctx, c, &d, from)
	if err != nil {
		return err
	}
	want, err := f.Desire(partition, inv, of.node())
	if err != nil {
		return err
	}
	plans, err := planAll(c, inv, want)
	if err != nil {
		return err
	}
	if format.value == "json" {
		err = printJSON(c.out, planAsJSON(plans))
	} else {
		err = printPlan(c.out, plans)
	}
	if err == nil && slices.ContainsFunc(plans, func(g gpuPlan) bool { return len(g.Blocked) > 0 }) {
		err = errBlocked
	}
	return err
}

// planAll plans each GPU of an inventory, in its order.
func planAll(c console, inv *gpu.Inventory, want config.Desired) ([]gpuPlan, error) {
	plans := make([]gpuPlan, len(inv.GPUs))
	for i := range inv.GPUs {
		g := gpuPlan{Device: &inv.GPUs[i], want: want.GPUs[i]}
		var odd, err error
		if g.Plan, odd, err = planner.Bare(g.Device, g.want); err != nil {
			return nil, fmt.Errorf("plan GPU %d (%s): %w", g.Index, g.UUID, err)
		}
		if odd != nil {
			fmt.Fprintf(c.err, "GPU %d (%s): %v\n", g.Index, g.UUID, odd)
		}
		plans[i] = g
	}
	return plans, nil
}

func planAsJSON(plans []gpuPlan) planJSON {
	at := func(s mig.Placement) placementJSON {
		out := placementJSON{Start: s.Start}
		if s.Profile != (mig.Name{}) {
			out.Profile = s.Profile.String()
		}
		if s.Profile.Compute != 0 {
			out.CI = &s.CI
		}
		return out
	}
	out := planJSON{GPUs: make([]gpuPlanJSON, len(plans))}
	for i, p := range plans {
		g := gpuPlanJSON{UUID: p.UUID, Steps: []stepJSON{}, Result: []placementJSON{}, Blocked: []blockedJSON{}}
		if p.want.API == ledger.DRA {
			g.API = ledger.DRA
		}
		for _, s := range p.Steps {
			g.Steps = append(g.Steps, stepJSON{s.Op, at(s.Placement)})
		}
		for _, s := range p.Result {
			g.Result = append(g.Result, at(s))
		}
		for _, b := range p.Blocked {
			g.Blocked = append(g.Blocked, blockedJSON{at(b.Placement), b.Reason, b.Holder})
		}
		out.GPUs[i] = g
	}
	return out
}

// printPlan is the plan for people: a line for each GPU, below it what is to be
// done or what is in the way, and what exists then.
func printPlan(out io.Writer, plans []gpuPlan) error {
	var b strings.Builder
	for i := range plans {
		p := &plans[i]
		fmt.Fprintf(&b, "GPU %d  %s  %s: %s\n", p.Index, p.UUID, cmp.Or(p.Model, "unknown model"), describeWant(&p.want))
		switch {
		case p.Fault != "":
			fmt.Fprintf(&b, "  nothing can be done: %s\n", p.Fault)
		case len(p.Blocked) > 0:
			fmt.Fprintln(&b, "  blocked; these must end first:")
			for _, s := range p.Blocked {
				fmt.Fprintf(&b, "    %s\n", describeStanding(s))
			}
		case len(p.Steps) == 0:
			fmt.Fprintln(&b, "  nothing to do")
		}
		for _, s := range p.Steps {
			fmt.Fprintf(&b, "  %s\n", s)
		}
		if len(p.Result) > 0 {
			names := make([]string, len(p.Result))
			for j, s := range p.Result {
				names[j] = s.String()
			}
			fmt.Fprintf(&b, "  = %s\n", strings.Join(names, " "))
		}
		if p.want.Unproven && p.Fault == "" {
			fmt.Fprintln(&b, "  this driver tells placements once MIG is on: plan again then")
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// describeStanding is an instance and why it is in the way.
func describeStanding(s mig.Standing) string {
	parts := slices.DeleteFunc([]string{s.Reason, s.Holder}, func(p string) bool { return p == "" })
	if len(parts) == 0 {
		return s.Placement.String()
	}
	return s.Placement.String() + " (" + strings.Join(parts, ", ") + ")"
}

// describeWant is what a GPU is to become, in a few words.
func describeWant(w *config.Want) (text string) {
	switch {
	case w.Mode == config.Keep:
		return "as it is"
	case w.Mode != config.MIG:
		text = string(w.Mode)
	case w.OnDemand:
		text = "mig, on demand"
	default:
		text = "mig, " + mig.DescribeCounts(w.Geometry)
	}
	if w.API == ledger.DRA {
		text += ", through dra"
	}
	return text
}
