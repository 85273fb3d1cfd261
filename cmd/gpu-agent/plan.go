// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// Exit codes of a plan that was printed: the output has the reason.
var (
	errBlocked    = &command.Error{Exit: command.Blocked}
	errNotApplied = &command.Error{Exit: command.NotApplied}
)

// invalid returns an error about a partition file that is wrong, or a partition that does not
// fit the GPUs.
func invalid(err error) error { return &command.Error{Exit: command.Invalid, Err: err} }

// planFlags are the flags of commands that ask what a partition would do. The agent on this node
// answers; if there is none, the answer is from an inventory.
type planFlags struct {
	driver    driverFlags
	config    string
	partition string
	inventory string
	stateDir  string
	names     command.Domains
	of        partitionFlags
	// node is true for check --node.
	node bool
	// found is what the agent, or this command, has found on the node, beside a plan.
	found func()
	// flags are all flags of the command. asked is true once an agent has answered.
	flags *pflag.FlagSet
	asked bool
}

func (a *planFlags) register(fs *pflag.FlagSet) {
	a.flags = fs
	a.driver.register(fs)
	configFlag(fs, &a.config)
	partitionFlag(fs, &a.partition)
	inventoryFlag(fs, &a.inventory)
	command.StateDir(fs, &a.stateDir)
	a.names.Register(fs)
	a.of.register(fs)
}

// read checks the flags and reads the partition file.
func (a *planFlags) read(c console) (f partitionFile, err error) {
	if err := a.complete(); err != nil {
		return f, err
	}
	return readPartitions(c, a.config)
}

// complete checks the flags.
func (a *planFlags) complete() error {
	if a.config == "" {
		return command.Usagef("--config is missing: write --config FILE, " +
			"the partition file, or --config - for the standard input")
	}
	return a.names.Complete()
}

// configFlag adds --config, the partition file.
func configFlag(fs *pflag.FlagSet, file *string) {
	fs.StringVar(file, "config", "", "partition `file`; to all but run, - is the standard input")
}

// partitionFlag adds --partition, the name of a partition in the file.
func partitionFlag(fs *pflag.FlagSet, name *string) {
	fs.StringVar(name, "partition", "", "`name` of a partition in the file")
}

// completePartition completes --partition with the names in the file of --config.
func completePartition(c *cobra.Command) {
	names := func(c *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		name := c.Flags().Lookup("config").Value.String()
		if name == "-" { // the shell must not read the standard input
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		f, err := readPartitions(consoleOf(c), name)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		other := func(name string) bool { return !strings.HasPrefix(name, typed) }
		return slices.DeleteFunc(f.Names(), other), cobra.ShellCompDirectiveNoFileComp
	}
	_ = c.RegisterFlagCompletionFunc("partition", names)
}

// patience is how long a command waits for the agent.
const patience = time.Minute

// agent asks the agent on this node. asked is false if there is none, or if --inventory is set.
func (a *planFlags) agent(
	ctx context.Context, c console, q status.Question,
) (answer status.Answer, asked bool, err error) {
	if a.inventory != "" {
		return answer, false, nil
	}
	// The agent answers by its own flags, except for those that this command line has.
	if a.flags.Changed("memory-unit") {
		q.UnitMiB = uint64(a.of.unit)
	}
	if a.flags.Changed("api") {
		q.API = a.of.api.Value
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err = agentobs.AskDoor(ctx, filepath.Join(a.stateDir, state.Socket), q)
	if errors.Is(err, agentobs.ErrNoAgent) {
		fmt.Fprintf(c.err, "%v: asking the driver alone\n", err)
		return answer, false, nil
	}
	if errors.Is(err, os.ErrPermission) {
		err = fmt.Errorf("%w: only root may use its socket; "+
			"name a recorded inventory with --inventory to go without the agent", err)
	}
	a.asked = err == nil
	return answer, true, err
}

// partitionFile is a parsed partition file, its name in messages, and its text. manifest is the name of
// the ConfigMap that it was read from; empty if it was read as it is.
type partitionFile struct {
	*config.File
	name     string
	data     []byte
	manifest string
	// translated is true if the text was made from a configuration of NVIDIA's device plugin.
	translated bool
}

// readPartitions reads a partition file, or the manifest of a ConfigMap that has one, or the standard
// input for -. The latter is for the agent's container, which has the GPUs and no file.
func readPartitions(c console, file string) (f partitionFile, err error) {
	if f, err = readFile(c, file); err != nil {
		return f, err
	}
	if f.File, err = config.Parse(f.name, f.data); err != nil {
		return f, invalid(err)
	}
	return f, nil
}

// readFile reads a file without parsing it.
func readFile(c console, file string) (f partitionFile, err error) {
	if f.name = file; file == "-" {
		f.name = "standard input"
		if f.data, err = io.ReadAll(io.LimitReader(c.in, maxInput)); err != nil {
			return f, fmt.Errorf("read the standard input: %w", err)
		}
	} else if f.data, err = os.ReadFile(file); err != nil {
		return f, err
	}
	if f.data, f.manifest, err = config.Unwrap(f.name, f.data); err != nil {
		return f, invalid(err)
	}
	return f, nil
}

// readOrTranslate is read of a partition file, or of a configuration of NVIDIA's device plugin: then it prints
// the partition file that does the same, and returns that.
func (a *planFlags) readOrTranslate(c console) (f partitionFile, err error) {
	if err := a.complete(); err != nil {
		return f, err
	}
	if f, err = readFile(c, a.config); err != nil {
		return f, err
	}
	of, is, err := config.FromDevicePlugin(f.name, f.data)
	switch {
	case err != nil:
		return f, invalid(err)
	case is:
		fmt.Fprintf(c.out, "%s: read as a configuration of NVIDIA's device plugin; as a partition file it is\n%s", a.config, of.Text)
		for _, note := range of.Notes {
			fmt.Fprintf(c.out, "note: %s\n", note)
		}
		f.name, f.data, f.translated = "the partition file above", []byte(of.Text), true
	}
	if f.File, err = config.Parse(f.name, f.data); err != nil {
		return f, invalid(err)
	}
	return f, nil
}

// maxInput is how many bytes of the standard input are read: more than a partition file may
// have.
const maxInput = 2 << 20

// printMistakes prints the mistakes in a partition file as file:line: reason.
func printMistakes(c console, name string, of []status.Mistake) {
	for _, m := range of {
		fmt.Fprintf(c.err, "%s:%d: %s\n", name, m.Line, m.Message)
	}
}

// newPlan makes `gpu-agent plan`.
func newPlan() *cobra.Command {
	var a planFlags
	var output *command.Choice
	c := &cobra.Command{
		Use:   "plan --config FILE",
		Short: "print what a partition would do to this node or an inventory, and which holders it waits for",
		Long: `Prints what a partition would do to this node's GPUs: layouts, each step on the hardware,
which holders it waits for, and what pods can ask for then. It changes nothing. The
agent on this node answers; without one, and with --inventory, holders are not known.
The partition is --partition, or the one that the node's label chooses; without an
agent, default.
The exit code is 0 if the partition would be applied, 3 if holders are in the way on
some GPU, 4 if it would be pending or failed for another reason, and 5 if it is wrong.`,
		Example: "gpu-agent plan --config partitions.yaml --partition night --inventory node-1.json",
		RunE:    func(c *cobra.Command, _ []string) error { return a.plan(c.Context(), consoleOf(c), output.Value) },
	}
	a.register(c.Flags())
	output = outputFlag(c.Flags(), "text", "json")
	completePartition(c)
	return c
}

func (a *planFlags) plan(ctx context.Context, c console, format string) error {
	f, err := a.read(c)
	if err != nil {
		return err
	}
	q := status.Question{File: f.data}
	if a.partition != "" {
		q.Partitions = []string{a.partition}
	}
	answer, asked, err := a.agent(ctx, c, q)
	if err != nil {
		return err
	}
	if !asked {
		p, err := a.without(ctx, c, f.File, cmp.Or(a.partition, agent.DefaultPartition))
		if err != nil {
			return err
		}
		answer.Plans = []status.Plan{p}
	}
	if len(answer.Mistakes) > 0 || len(answer.Plans) != 1 {
		printMistakes(c, f.name, answer.Mistakes)
		return invalid(fmt.Errorf("%s: the agent on this node does not take it", f.name))
	}
	p := answer.Plans[0]
	if p.State == string(agent.Invalid) {
		printMistakes(c, f.name, p.Mistakes)
		return invalid(fmt.Errorf("%s: partition %s does not fit these GPUs", f.name, p.Partition))
	}
	if format == "json" {
		err = command.PrintJSON(c.out, p)
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

// without returns a plan from an inventory, if there is no agent to ask.
func (a *planFlags) without(ctx context.Context, c console, f *config.File, partition string) (status.Plan, error) {
	inv, err := inventoryFrom(ctx, c, &a.driver, a.inventory)
	if err != nil {
		return status.Plan{}, err
	}
	return a.from(c, inv, f, partition), nil
}

func (a *planFlags) from(c console, inv *gpu.Inventory, f *config.File, partition string) status.Plan {
	p, odd := agent.ForeseeFrom(inv, a.of.node(), a.names.ResourceDomain, f, partition)
	if odd != nil {
		fmt.Fprintln(c.err, odd)
	}
	return p
}

// newCheck makes `gpu-agent check`.
func newCheck() *cobra.Command {
	var a planFlags
	c := &cobra.Command{
		Use:   "check --config FILE | --node",
		Short: "check a partition file, for this node or an inventory; or what earlier owners have left on it",
		Long: `Reads a partition file, or the manifest of a ConfigMap that has one, and checks each of
its partitions, or the one of --partition, for this node or --inventory. The agent on this
node answers, and names the holders that a partition would wait for; without one, and with
--inventory, holders are not known. Mistakes go to standard error as file:line: reason, and
the exit code is 5. A partition that fits and would wait for holders is not wrong. Neither
is one that names only models which this node does not have, unless it is the one of
--partition, or the node's own. Without --inventory it also prints what earlier owners have
left on this node's GPUs.
A configuration of NVIDIA's device plugin (sharing.timeSlicing, sharing.mps) is printed as the
partition file that does the same, and that is checked.
With --node it prints only that, with the commands that end it: before the DaemonSet is
applied, and beside an agent. It reads and changes nothing. It judges by the partition of
--config, and without one as for whole GPUs. The exit code is 4 if something of it keeps
GPUs from being used.`,
		Example: "gpu-agent check --config partitions.yaml --inventory node-1.json --partition default\n" +
			"gpu-agent check --node",
		RunE: func(c *cobra.Command, _ []string) error {
			if a.node {
				return a.checkNode(c.Context(), consoleOf(c))
			}
			return a.check(c.Context(), consoleOf(c))
		},
	}
	a.register(c.Flags())
	c.Flags().BoolVar(&a.node, "node", false, "print only what earlier owners have left on this node")
	c.MarkFlagsMutuallyExclusive("node", "inventory")
	completePartition(c)
	return c
}

func (a *planFlags) check(ctx context.Context, c console) error {
	f, err := a.readOrTranslate(c)
	if err != nil {
		return err
	}
	names := f.Names()
	if a.partition != "" {
		names = []string{a.partition}
	}
	plans, err := a.all(ctx, c, &f, names)
	if err != nil {
		return err
	}
	switch {
	case f.translated: // readOrTranslate has told
	case f.manifest != "":
		fmt.Fprintf(c.out, "%s: read as a manifest: the key %s of the ConfigMap %s\n",
			a.config, config.ManifestKey, printable(f.manifest))
	default:
		fmt.Fprintf(c.out, "%s: read as a partition file\n", a.config)
	}
	bad, elsewhere := 0, 0
	for i := range plans {
		switch p := &plans[i]; {
		case p.Elsewhere && !p.Own && a.partition == "":
			elsewhere++
			fmt.Fprintf(c.out, "%s: partition %s is for other nodes (line %d: %s); "+
				"check it there, or with --inventory\n", a.config, p.Partition, p.Mistakes[0].Line, p.Mistakes[0].Message)
		case !printFit(c, f.name, a.config, p):
			bad++
		}
	}
	if a.found != nil {
		a.found()
	}
	if elsewhere == len(plans) && elsewhere > 0 {
		return invalid(fmt.Errorf("%s: no partition is for this node: all name models that it does not have", a.config))
	}
	if bad > 0 {
		return invalid(fmt.Errorf("%s: %d of %d partitions do not fit these GPUs", a.config, bad, len(names)))
	}
	if !a.asked && len(plans) > 0 {
		var unknown []string
		for i := range plans {
			for _, what := range plans[i].Unknown {
				if !slices.Contains(unknown, what) {
					unknown = append(unknown, what)
				}
			}
		}
		fmt.Fprintf(c.out, "not known here: %s\n", strings.Join(unknown, "; "))
	}
	return nil
}

// all returns the plans of several partitions, without what pods can ask for.
func (a *planFlags) all(
	ctx context.Context, c console, f *partitionFile, names []string,
) (plans []status.Plan, err error) {
	for part := range slices.Chunk(names, status.MostAsked) {
		answer, asked, err := a.agent(ctx, c, status.Question{File: f.data, Partitions: part, Brief: true})
		if err != nil {
			return nil, err
		}
		if !asked {
			break
		}
		if printMistakes(c, f.name, answer.Mistakes); len(answer.Plans) != len(part) {
			return nil, invalid(fmt.Errorf("%s: the agent on this node does not take it", f.name))
		}
		plans = append(plans, answer.Plans...)
		a.found = func() { printConditions(c.out, answer.Found) }
	}
	if len(plans) == len(names) {
		return plans, nil
	}
	inv, err := a.inventoryAndFound(ctx, c, f.File)
	if err != nil {
		return nil, err
	}
	plans = nil
	for _, partition := range names {
		plans = append(plans, a.from(c, inv, f.File, partition))
	}
	return plans, nil
}

// inventoryAndFound returns the inventory that plans are made from. If it is this node's, it also
// keeps what was found there.
func (a *planFlags) inventoryAndFound(ctx context.Context, c console, f *config.File) (*gpu.Inventory, error) {
	if a.inventory != "" {
		return inventoryFrom(ctx, c, &a.driver, a.inventory)
	}
	inv, findings, err := look(ctx, c, &a.driver, a.modes(f))
	if err != nil {
		return nil, errNoInventory(err)
	}
	a.found = func() { printFound(c.out, findings) }
	return inv, nil
}

// printFit prints whether a partition fits, and returns true if it does.
func printFit(c console, name, file string, p *status.Plan) bool {
	wrong := slices.Concat(p.Mistakes, p.Open)
	printMistakes(c, name, wrong)
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

// throughDRA returns in words how many of the GPUs are to be offered through DRA; empty if none
// are.
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
