// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/advise"
	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// adviceRequest are the flags of `gpu-agent advise`.
type adviceRequest struct {
	stateDir, trace, inventory, config, partition string
	since, until, node                            string
	names                                         command.Domains
	unit                                          memoryFlag
	placer, dynamic                               bool
	lag                                           time.Duration
	refused                                       command.Choice
	output                                        *command.Choice
	tries, top                                    int
	driver                                        driverFlags
}

const adviseUsage = `Replays this node's requests on partitions that it could have. It prints the result of each,
and the best one as a partition file. It changes nothing.

The requests are in the journal that the agent keeps in --state-dir. With --trace the cluster's pods count
too, also those that never came to the node:

  kubectl get pods,events -A -o json > pods.json
  gpu-agent advise --trace pods.json --config partitions.yaml
  gpu-agent advise --since 168h -o partition > better.yaml && gpu-agent check --config better.yaml

The present partition is --partition in the file --config, or without --config the one in
the journal. The printed partition has the name --partition, or default.

` + timesUsage

// newAdvise makes `gpu-agent advise`.
func newAdvise() *cobra.Command {
	var r adviceRequest
	c := &cobra.Command{
		Use:     "advise",
		Short:   "replay this node's requests on other partitions, and print the best",
		Long:    adviseUsage,
		Example: "gpu-agent advise --since 168h --trace pods.json -o partition > better.yaml",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := r.complete(); err != nil {
				return err
			}
			out, err := r.advise(c.Context(), consoleOf(c))
			switch {
			case err != nil:
				return err
			case r.output.Value == "json":
				return command.PrintJSON(c.OutOrStdout(), out)
			case r.output.Value == "partition":
				_, err := io.WriteString(c.OutOrStdout(), out.Partition)
				return err
			}
			return out.print(c.OutOrStdout())
		},
	}
	r.register(c.Flags())
	completePartition(c)
	return c
}

func (r *adviceRequest) register(fs *pflag.FlagSet) {
	r.driver.register(fs)
	command.StateDir(fs, &r.stateDir)
	fs.StringVar(&r.trace, "trace", "",
		"`file` of the cluster's pods and Events, as kubectl get pods,events -A -o json prints them")
	inventoryFlag(fs, &r.inventory)
	configFlag(fs, &r.config)
	partitionFlag(fs, &r.partition)
	timeFlags(fs, &r.since, &r.until)
	nodeNameFlag(fs, &r.node)
	r.names.Register(fs)
	r.unit.register(fs)
	fs.BoolVar(&r.placer, "placer", false,
		"pods are placed by the placer: a pod that does not fit waits, and is not refused")
	fs.BoolVar(&r.dynamic, "dynamic", false,
		"try mode dynamic too; the cluster must have dynamic resource allocation for it")
	fs.DurationVar(&r.lag, "lag", 150*time.Millisecond,
		"`time` until the scheduler knows that an allocation has withdrawn other MIG devices on demand")
	r.refused = command.Choice{Value: "gone", Of: []string{"gone", "back"}}
	fs.Var(&r.refused, "refused", "what happens to a refused pod: it is gone, or it comes back as a Job's does")
	fs.IntVar(&r.tries, "tries", 500,
		"largest `number` of partitions to try, besides those with the same layout on all GPUs")
	fs.IntVar(&r.top, "top", 10, "`number` of partitions to print")
	r.output = outputFlag(fs, "text", "json", "partition")
}

// complete checks the flags together and sets defaults.
func (r *adviceRequest) complete() error {
	r.partition = cmp.Or(r.partition, agent.DefaultPartition)
	if r.tries < 1 || r.top < 0 || r.lag < 0 {
		return command.Usagef("--tries is at least 1, and --top and --lag are not negative")
	}
	return r.names.Complete()
}

// adviceJSON is the output for programs.
type adviceJSON struct {
	Demand demandJSON `json:"demand"`
	// Alternatives are the partitions that are shown, the best first. Tried is how many were
	// tried, out of Possible. All is true if no other was possible.
	Alternatives []alternativeJSON `json:"alternatives"`
	Tried        int               `json:"tried"`
	Possible     int               `json:"possible"`
	All          bool              `json:"all"`
	// Partition is the best one as a partition file, and Assumes its assumptions.
	Partition string   `json:"partition"`
	Assumes   []string `json:"assumes"`
	Notes     []string `json:"notes"`
	// Spot is what a spot tier could have had of the recorded time; nil without a journal.
	Spot *advise.Recovered `json:"spot,omitempty"`

	told string
}

type demandJSON struct {
	Begin    time.Time `json:"begin"`
	End      time.Time `json:"end"`
	Requests int       `json:"requests"`
	// Granted, Refused and Pending are how the requests ended on the node, as recorded.
	Granted int `json:"granted"`
	Refused int `json:"refused"`
	Pending int `json:"pending"`
}

type alternativeJSON struct {
	Name    string `json:"name"`
	Present bool   `json:"present,omitempty"`
	// Ties counts the partitions with the same result that are not shown.
	Ties    int `json:"ties,omitempty"`
	Served  int `json:"served"`
	Refused int `json:"refused"`
	Never   int `json:"never"`
	Waited  int `json:"waited"`
	// Waiting counts those of Waited that waited to the end.
	Waiting int `json:"waiting"`
	// Wait is the sum of all waits, and Longest the longest one, in seconds.
	Wait    float64           `json:"waitSeconds"`
	Longest float64           `json:"longestWaitSeconds"`
	Packed  float64           `json:"packed"`
	Idle    float64           `json:"idle"`
	Renamed int               `json:"renamed"`
	Names   []advise.Renaming `json:"names,omitempty"`
}

// demand reads the requests, and returns them with the journal. Without a journal they are those of the
// trace.
func (r *adviceRequest) demand() (*advise.Demand, *advise.Journal, error) {
	now := time.Now()
	o := advise.Options{
		Back: r.refused.Value == "back", Domain: r.names.ResourceDomain, Unit: gpu.MiB(r.unit), Node: r.node,
	}
	var err error
	if o.Since, err = moment("since", r.since, time.Time{}, now); err != nil {
		return nil, nil, err
	}
	if o.Until, err = moment("until", r.until, time.Time{}, now); err != nil {
		return nil, nil, err
	}
	j := &advise.Journal{}
	journal := filepath.Join(r.stateDir, usageDir)
	missing := readJournal(journal, o.Since, j.Apply)
	if missing != nil && (r.trace == "" || !errors.Is(missing, fs.ErrNotExist)) {
		return nil, nil, missing
	}
	var t *advise.Trace
	if r.trace != "" {
		f, err := os.Open(r.trace)
		if err != nil {
			return nil, nil, err
		}
		defer f.Close()
		if t, err = advise.ReadTrace(f); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", r.trace, err)
		}
	}
	d, err := j.Demand(t, o)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", journal, err)
	}
	if len(d.Requests) == 0 {
		return nil, nil, fmt.Errorf("%s: nothing was asked for from %s to %s, "+
			"so that no partition is better than another: choose another time with --since and --until, or add the cluster's pods with --trace",
			journal, d.Begin.Format(time.RFC3339), d.End.Format(time.RFC3339))
	}
	if missing != nil {
		d.Notes = append(d.Notes, fmt.Sprintf("Only the trace counts: %v.", missing))
	}
	return d, j, nil
}

// present returns the partition that the node has, or nil if it is not known.
func (r *adviceRequest) present(c console, j *advise.Journal, inv *gpu.Inventory) ([]config.Want, error) {
	if r.config == "" {
		wants, _ := j.Present(inv)
		return wants, nil
	}
	f, err := readPartitions(c, r.config)
	if err != nil {
		return nil, err
	}
	want, err := f.Desire(r.partition, inv, config.Node{Unit: gpu.MiB(r.unit)})
	if err != nil {
		return nil, invalid(err)
	}
	return want.GPUs, nil
}

// advise tries the partitions and returns the output.
func (r *adviceRequest) advise(ctx context.Context, c console) (*adviceJSON, error) {
	d, j, err := r.demand()
	if err != nil {
		return nil, err
	}
	inv, err := inventoryFrom(ctx, c, &r.driver, r.inventory)
	if err != nil {
		return nil, err
	}
	present, err := r.present(c, j, inv)
	if err != nil {
		return nil, err
	}
	on := advise.Node{Inventory: inv, Unit: gpu.MiB(r.unit)}
	rules := advise.Rules{Placer: r.placer, Back: r.refused.Value == "back", Lag: r.lag}
	a, err := advise.Search(on, present, d, rules, advise.Limits{Tries: r.tries, Dynamic: r.dynamic})
	if err != nil {
		return nil, err
	}
	best := &a.Tried[0]
	out := &adviceJSON{
		Demand:       demandJSON{d.Begin, d.End, len(d.Requests), d.Granted, d.Refused, d.Pending},
		Alternatives: []alternativeJSON{},
		Tried:        len(a.Tried), Possible: a.Possible, All: a.All,
		Assumes: advise.Assumed(best, d, rules), Notes: a.Notes, told: d.Told(),
	}
	if out.Spot, err = r.recovered(j, d, inv); err != nil {
		return nil, err
	}
	if present == nil {
		out.Notes = append(out.Notes, "The present partition is not among them: the journal does not have all of it. "+
			"Name it with --config and --partition.")
	}
	out.show(a, max(1, r.top))
	comments := append([]string{out.headline(), out.Alternatives[0].told() + ".", "This assumes:"}, out.Assumes...)
	for i := 3; i < len(comments); i++ {
		comments[i] = "- " + comments[i]
	}
	out.Partition, err = advise.File(r.partition, best, comments, on)
	return out, err
}

// recovered returns what a spot tier could have had of the time of a demand that the journal has; nil if it has none.
func (r *adviceRequest) recovered(j *advise.Journal, d *advise.Demand, inv *gpu.Inventory) (*advise.Recovered, error) {
	begin, end := j.Span()
	if begin.Before(d.Begin) {
		begin = d.Begin
	}
	if end.After(d.End) {
		end = d.End
	}
	if !end.After(begin) {
		return nil, nil
	}
	of := advise.NewRecovery(begin, end)
	book := account.NewBook(of)
	if err := readJournal(filepath.Join(r.stateDir, usageDir), begin, book.Apply); err != nil {
		return nil, err
	}
	out := of.Recovered(book, inv, j.Off)
	return &out, nil
}

// show fills in Alternatives: the best top results, each by the first partition that has it, the present
// partition, and those with one layout on all GPUs.
func (a *adviceJSON) show(from *advise.Advice, top int) {
	first := map[string]int{} // index in Alternatives by result
	for i := range from.Tried {
		t := &from.Tried[i]
		to := alternativeJSON{
			Name: t.Name, Present: t.Present, Served: t.Served, Refused: t.Refused, Never: t.Never,
			Waited: t.Waited, Waiting: t.Waiting, Wait: t.Wait.Seconds(), Longest: t.Longest.Seconds(),
			Packed: t.Packed, Idle: t.Idle, Renamed: t.Renamed, Names: t.Names,
		}
		result := strings.Join(to.figures(), " ")
		at, seen := first[result]
		switch {
		case t.Present || t.Plain, !seen && len(first) < top:
			if !seen {
				first[result] = len(a.Alternatives)
			}
			a.Alternatives = append(a.Alternatives, to)
		case seen:
			a.Alternatives[at].Ties++
		}
	}
	if len(a.Alternatives) > 0 && a.Alternatives[0].Ties > 0 && len(first) == 1 && a.same(len(from.Tried)) {
		a.Notes = append(a.Notes, "All partitions that were tried come to the same: "+
			"what was asked for does not tell them apart.")
	}
}

// same reports whether all that were tried are in one line's result.
func (a *adviceJSON) same(tried int) bool {
	for i := range a.Alternatives {
		tried -= 1 + a.Alternatives[i].Ties
	}
	return tried == 0
}

// figures are the cells of an alternative's line, without its name.
func (a *alternativeJSON) figures() []string {
	return []string{strconv.Itoa(a.Served), strconv.Itoa(a.Refused), strconv.Itoa(a.Never), strconv.Itoa(a.Waited),
		a.mean(), seconds(a.Longest), strconv.Itoa(a.Renamed), percent(a.Packed), percent(a.Idle)}
}

func (a *adviceJSON) headline() string {
	of := "all that are possible"
	if !a.All {
		of = fmt.Sprintf("of %d that are possible, so that another may be better", a.Possible)
	}
	return fmt.Sprintf("The best of %d partitions (%s) for %s, by gpu-agent advise.", a.Tried, of, a.told)
}

// told returns an alternative's result in words.
func (a *alternativeJSON) told() string {
	return fmt.Sprintf("%s: %d served, %d refused, %d never to be served; %d waited, %s in the mean; "+
		"in use GPUs are %s full, and %s of their time GPUs are idle",
		a.Name, a.Served, a.Refused, a.Never, a.Waited, a.mean(), percent(a.Packed), percent(a.Idle))
}

func (a *alternativeJSON) mean() string {
	if a.Waited == 0 {
		return "0s"
	}
	return seconds(a.Wait / float64(a.Waited))
}

func seconds(s float64) string {
	return (time.Duration(s*1e9) * time.Nanosecond).Round(time.Second).String()
}

func percent(part float64) string { return strconv.FormatFloat(100*part, 'f', 0, 64) + "%" }

// print prints the output for people.
func (a *adviceJSON) print(out io.Writer) error {
	d := &a.Demand
	fmt.Fprintf(out, "%s: %d were granted, %d refused, %d never came to the node\n\n",
		a.told, d.Granted, d.Refused, d.Pending)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PARTITION\tSERVED\tREFUSED\tNEVER\tWAITED\tMEAN WAIT\tLONGEST\tRENAMED\tPACKED\tIDLE")
	for i := range a.Alternatives {
		t := &a.Alternatives[i]
		name := t.Name
		if t.Ties > 0 {
			name += fmt.Sprintf(" (and %d more)", t.Ties)
		}
		fmt.Fprintln(w, strings.Join(append([]string{name}, t.figures()...), "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if a.Spot != nil {
		fmt.Fprintf(out, "%s\n\n", a.Spot.Lines())
	}
	if len(a.Notes) > 0 {
		fmt.Fprintf(out, "%s\n\n", strings.Join(a.Notes, "\n"))
	}
	_, err := io.WriteString(out, a.Partition)
	return err
}
