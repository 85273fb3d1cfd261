// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// Errors of a plan that was printed, and says why. Each has an exit status of its own.
var (
	errBlocked    = errors.New("blocked")
	errNotApplied = errors.New("not applied")
)

// asking are the flags of commands that ask what a partition would come to: the agent on this
// node, or where there is none an inventory.
type asking struct {
	driver    driverFlags
	inventory string
	stateDir  string
	domain    string
	of        partitionFlags
	// given are the flags of the command line, and asked says that an agent has answered.
	given map[string]bool
	asked bool
}

func (a *asking) register(fs *flag.FlagSet) {
	a.driver.register(fs)
	fs.StringVar(&a.inventory, "inventory", "", inventoryUsage)
	fs.StringVar(&a.stateDir, "state-dir", "/var/lib/gpu-agent", "`directory` of the files of this node's agent, which is asked at its socket there")
	fs.StringVar(&a.domain, "resource-domain", "example.com", "`domain` of the resources, where no agent is asked")
	a.of.register(fs)
}

// parse reads flags, and which of them the command line has.
func (a *asking) parse(fs *flag.FlagSet, args []string) (rest []string, err error) {
	rest, err = parse(fs, args)
	a.given = map[string]bool{}
	fs.Visit(func(f *flag.Flag) { a.given[f.Name] = true })
	return rest, err
}

// patience is how long a command waits for the agent.
const patience = time.Minute

// agent asks the agent on this node. It is false where there is none, or the question is of
// an inventory.
func (a *asking) agent(ctx context.Context, c console, q status.Question) (answer status.Answer, asked bool, err error) {
	if a.inventory != "" {
		return answer, false, nil
	}
	// The agent has flags of its own; those of this command line ask what if it had others.
	if a.given["memory-unit"] {
		q.UnitMiB = uint64(a.of.unit)
	}
	if a.given["api"] {
		q.API = a.of.api.value
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err = agentobs.AskDoor(ctx, filepath.Join(a.stateDir, state.Socket), q)
	if errors.Is(err, agentobs.ErrNoAgent) {
		fmt.Fprintf(c.err, "%v: the driver alone is asked\n", err)
		return answer, false, nil
	}
	if errors.Is(err, os.ErrPermission) {
		err = fmt.Errorf("%w: its socket is for root alone; name a recorded inventory with --inventory to go without the agent", err)
	}
	a.asked = err == nil
	return answer, true, err
}

// partitionFile is a partition file that parsed, what messages call it, and its text.
type partitionFile struct {
	*config.File
	name string
	data []byte
}

// readPartitions reads a partition file, and - from the standard input: in the agent's
// container, where there is no file, and the GPUs are.
func readPartitions(c console, file string) (f partitionFile, err error) {
	if f.name = file; file == "-" {
		f.name = "standard input"
		if f.data, err = io.ReadAll(io.LimitReader(c.in, maxInput)); err != nil {
			return f, fmt.Errorf("read the standard input: %w", err)
		}
	} else if f.data, err = os.ReadFile(file); err != nil {
		return f, err
	}
	f.File, err = config.Parse(f.name, f.data)
	return f, err
}

// maxInput is more than any partition file may have, and how much of one is read.
const maxInput = 2 << 20

// mistaken prints mistakes of a partition file as file:line: reason.
func mistaken(c console, name string, of []status.Mistake) {
	for _, m := range of {
		fmt.Fprintf(c.err, "%s:%d: %s\n", name, m.Line, m.Message)
	}
}

func plan(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "plan", "", `Prints what this node's GPUs would become by a partition: layouts, each step on the
hardware, whom they wait for, and what pods can ask for then. It does nothing. The
agent on this node answers; without one, and with --inventory, holders are not known.
The exit status is 0 if the partition would be applied, 3 if holders are in the way on
some GPU, 4 if it would be pending or failed for another reason, and 1 if it is wrong.`)
	var a asking
	a.register(fs)
	var file, partition string
	fs.StringVar(&file, "config", "", "partition `file`; - for the standard input")
	fs.StringVar(&partition, "partition", "", "`name` of the partition (default: the one that the node's label chooses; without an agent, default)")
	format := choice{"text", []string{"text", "json"}}
	fs.Var(&format, "o", "output `format`: text or json")
	rest, err := a.parse(fs, args)
	switch {
	case err != nil:
		return err
	case len(rest) > 0:
		return fmt.Errorf("%s: unexpected argument %q", fs.Name(), rest[0])
	case file == "":
		fmt.Fprintln(c.err, "gpu-agent plan: --config is missing: it names the partition file")
		return errUsage
	}
	f, err := readPartitions(c, file)
	if err != nil {
		return err
	}
	q := status.Question{File: f.data}
	if partition != "" {
		q.Partitions = []string{partition}
	}
	answer, asked, err := a.agent(ctx, c, q)
	if err != nil {
		return err
	}
	if !asked {
		p, err := a.without(ctx, c, f.File, cmp.Or(partition, agent.DefaultPartition))
		if err != nil {
			return err
		}
		answer.Plans = []status.Plan{p}
	}
	if len(answer.Mistakes) > 0 || len(answer.Plans) != 1 {
		mistaken(c, f.name, answer.Mistakes)
		return fmt.Errorf("%s: the agent on this node does not take it", f.name)
	}
	p := answer.Plans[0]
	if p.State == string(agent.Invalid) {
		mistaken(c, f.name, p.Mistakes)
		return fmt.Errorf("%s: partition %s cannot be had on these GPUs", f.name, p.Partition)
	}
	if format.value == "json" {
		err = printJSON(c.out, p)
	} else {
		err = status.WritePlan(c.out, p)
	}
	switch {
	case err != nil:
		return err
	case p.State == string(agent.Applied):
		return nil
	case p.State == string(agent.Blocked):
		return errBlocked
	default:
		return errNotApplied
	}
}

// without answers from an inventory, where there is no agent to ask.
func (a *asking) without(ctx context.Context, c console, f *config.File, partition string) (status.Plan, error) {
	inv, err := inventoryFrom(ctx, c, &a.driver, a.inventory)
	if err != nil {
		return status.Plan{}, err
	}
	return a.from(c, inv, f, partition), nil
}

func (a *asking) from(c console, inv *gpu.Inventory, f *config.File, partition string) status.Plan {
	p, odd := agent.ForeseeFrom(inv, a.of.node(), a.domain, f, partition)
	if odd != nil {
		fmt.Fprintln(c.err, odd)
	}
	return p
}

func check(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "check", " FILE", `Reads a partition file, or the standard input where it is -, and holds each of its
partitions against this node, or against --inventory. The agent on this node answers, and
says what a partition would wait for; without one, and with --inventory, holders are not
known. What is wrong goes to standard error as file:line: reason, and the exit status is
1. A partition that fits and would wait for holders is not wrong.`)
	var a asking
	a.register(fs)
	var partition string
	fs.StringVar(&partition, "partition", "", "check only the partition of this `name`")
	rest, err := a.parse(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		fs.Usage()
		return errUsage
	}
	f, err := readPartitions(c, rest[0])
	if err != nil {
		return err
	}
	names := f.Names()
	if partition != "" {
		names = []string{partition}
	}
	plans, err := a.all(ctx, c, &f, names)
	if err != nil {
		return err
	}
	bad := 0
	for i := range plans {
		if !tellFit(c, f.name, rest[0], &plans[i]) {
			bad++
		}
	}
	if bad > 0 {
		return fmt.Errorf("%s: %d of %d partitions cannot be had on these GPUs", rest[0], bad, len(names))
	}
	if !a.asked && len(plans) > 0 {
		fmt.Fprintf(c.out, "not known here: %s\n", strings.Join(plans[0].Unknown, "; "))
	}
	return nil
}

// all are the plans of several partitions, in brief.
func (a *asking) all(ctx context.Context, c console, f *partitionFile, names []string) (plans []status.Plan, err error) {
	for part := range slices.Chunk(names, status.MostAsked) {
		answer, asked, err := a.agent(ctx, c, status.Question{File: f.data, Partitions: part, Brief: true})
		if err != nil {
			return nil, err
		}
		if !asked {
			break
		}
		if mistaken(c, f.name, answer.Mistakes); len(answer.Plans) != len(part) {
			return nil, fmt.Errorf("%s: the agent on this node does not take it", f.name)
		}
		plans = append(plans, answer.Plans...)
	}
	if len(plans) == len(names) {
		return plans, nil
	}
	inv, err := inventoryFrom(ctx, c, &a.driver, a.inventory)
	if err != nil {
		return nil, err
	}
	plans = nil
	for _, partition := range names {
		plans = append(plans, a.from(c, inv, f.File, partition))
	}
	return plans, nil
}

// tellFit says whether a partition fits, and reports that it does.
func tellFit(c console, name, file string, p *status.Plan) bool {
	wrong := slices.Concat(p.Mistakes, p.Open)
	mistaken(c, name, wrong)
	refused := false
	for _, k := range p.Conditions {
		if k.Type == status.Refused {
			fmt.Fprintf(c.err, "%s: partition %s: %s\n", name, p.Partition, k.Message)
			refused = true
		}
	}
	if len(wrong) > 0 || refused {
		return false
	}
	own, waits := "", ""
	if p.Own {
		own = ", the node's own,"
	}
	if p.State != string(agent.Applied) {
		waits = fmt.Sprintf("; now it would be %s: %s", p.State, p.Message)
	}
	fmt.Fprintf(c.out, "%s: partition %s%s fits%s%s\n", file, p.Partition, own, throughDRA(p.GPUs), waits)
	return true
}

// throughDRA says how many of these GPUs are to be offered through DRA, if any are.
func throughDRA(of []status.PlannedGPU) string {
	n := 0
	for i := range of {
		if of[i].API != "" {
			n++
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d of %d GPUs through dra)", n, len(of))
}
