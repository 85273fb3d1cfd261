// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/meter"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
)

// usageDir is the usage journal's directory, in the agent's own.
const usageDir = "usage"

// mostLabels is how many labels of each pod are recorded.
const mostLabels = 8

// usageFlags are the flags for the account of what is granted and used.
type usageFlags struct {
	size   boundFlag
	idle   time.Duration
	labels string
	dcgm   bool
	keys   []string
}

// boundFlag is an amount of memory, or 0 for none.
type boundFlag memoryFlag

// Type returns the value's name in help.
func (b *boundFlag) Type() string { return "memory" }

func (b *boundFlag) String() string {
	if *b == 0 {
		return "0"
	}
	return (*memoryFlag)(b).String()
}

func (b *boundFlag) Set(s string) error {
	if s == "0" {
		*b = 0
		return nil
	}
	return (*memoryFlag)(b).Set(s)
}

func (f *usageFlags) register(fs *pflag.FlagSet) {
	f.size = segments.DefaultMax >> 20
	fs.Var(&f.size, "usage-size",
		"the most `memory` on disk for the usage journal; its oldest records go first; 0 keeps none, and no account")
	fs.StringVar(&f.labels, "usage-labels", "",
		"`keys` of pods' labels that the usage journal records, with commas between them")
	fs.DurationVar(&f.idle, "idle-after", meter.DefaultIdle,
		"`time` after which a grant that no process has used is reported; 0 is never")
	fs.BoolVar(&f.dcgm, "dcgm-names", false,
		"serve what containers use under dcgm-exporter's names, too; not beside a dcgm-exporter")
}

func (f *usageFlags) complete() error {
	if f.idle < 0 {
		return command.Usagef("--idle-after must not be negative")
	}
	for key := range strings.SplitSeq(f.labels, ",") {
		if key = strings.TrimSpace(key); key == "" {
			continue
		}
		if problems := validation.IsQualifiedName(key); len(problems) > 0 {
			return command.Usagef("--usage-labels: %q is not the key of a label: %s", key, strings.Join(problems, "; "))
		}
		f.keys = append(f.keys, key)
	}
	if len(f.keys) > mostLabels {
		return command.Usagef("--usage-labels: %d keys, and at most %d are kept", len(f.keys), mostLabels)
	}
	return nil
}

// account returns the account, with its journal in the agent's directory; nil if --usage-size
// is 0. A journal that cannot be opened does not keep the agent from starting: the node's
// conditions report it.
func (f *usageFlags) account(stateDir string, runtime *node.Runtime, watchdog func() *guard.Guard) *agent.Account {
	if f.size == 0 {
		return nil
	}
	a := &agent.Account{
		Journal: &segments.Late{
			Dir:     filepath.Join(stateDir, usageDir),
			Options: segments.Options{Max: int64(f.size) << 20},
		},
		Used: func() []status.Container { return watchdog().State().Containers },
		Sampled: func(ctx context.Context, since time.Time) []status.Container {
			return watchdog().Sampled(ctx, since)
		},
		Keys: f.keys, IdleAfter: f.idle, Version: version(),
	}
	if len(f.keys) > 0 {
		a.Labels = runtime.Labels
	}
	return a
}

// metrics returns the account's metrics; nil if there is no account.
func (f *usageFlags) metrics(node string, of *agent.Account, show func() status.Status) *agentobs.Account {
	if of == nil {
		return nil
	}
	a := &agentobs.Account{Node: node, Usage: of.Usage}
	if f.dcgm {
		a.Status = show
	}
	return a
}

// usageReport are the flags of `gpu-agent usage`.
type usageReport struct {
	by, since, until, at, gpu, format string
	dir                               string
	now                               time.Time
	// price and spotPrice are prices of a GPU hour. priced is true if costs are to be printed.
	price, spotPrice float64
	priced           bool
}

// newUsage makes `gpu-agent usage`: it reads the journal, also where no agent runs.
func newUsage() *cobra.Command {
	var r usageReport
	var stateDir string
	var output *command.Choice
	c := &cobra.Command{
		Use:   "usage",
		Short: "print how much of this node's GPUs each namespace was granted and used, or who held them at a time",
		Long: `Prints who was granted how much of this node's GPUs and used it, or with --at who held them
then. It reads the journal that the agent keeps in --state-dir.

` + timesUsage,
		Example: "gpu-agent usage --at 2026-11-03T12:00:00Z --gpu 3",
		RunE: func(c *cobra.Command, _ []string) error {
			r.now, r.dir, r.format = time.Now(), filepath.Join(stateDir, usageDir), output.Value
			if r.priced = c.Flags().Changed("price"); !c.Flags().Changed("spot-price") {
				r.spotPrice = r.price
			} else if !r.priced {
				return command.Usagef("--spot-price goes with --price")
			}
			if !(r.price >= 0 && r.spotPrice >= 0) {
				return command.Usagef("--price and --spot-price are 0 or more")
			}
			if r.at != "" {
				return r.presence(consoleOf(c))
			}
			if r.gpu != "" {
				return command.Usagef("--gpu goes with --at: write --at TIME --gpu %s", r.gpu)
			}
			return r.sums(consoleOf(c))
		},
	}
	fs := c.Flags()
	fs.StringVar(&r.by, "by", "namespace",
		"what makes a `line`: namespace, pod, or label=KEY, a key that the agent's --usage-labels has")
	timeFlags(fs, &r.since, &r.until)
	fs.StringVar(&r.at, "at", "", "print who held something at this `time`")
	fs.StringVar(&r.gpu, "gpu", "", "with --at: only of the GPU with this `index` or UUID")
	fs.Float64Var(&r.price, "price", 0, "`price` of a granted GPU hour; with it the costs are printed, in the same currency")
	fs.Float64Var(&r.spotPrice, "spot-price", 0, "`price` of a GPU hour that was granted in the spot tier (default: --price)")
	command.StateDir(fs, &stateDir)
	output = outputFlag(fs, "text", "csv", "json")
	_ = c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions(
		[]cobra.Completion{"namespace", "pod", "label="},
		cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace))
	return c
}

// timeFlags adds --since and --until.
func timeFlags(fs *pflag.FlagSet, since, until *string) {
	fs.StringVar(since, "since", "", "`time` to begin at (default: the beginning)")
	fs.StringVar(until, "until", "", "`time` to end at (default: the end)")
}

// moment reads a time.
func (r *usageReport) moment(flag, text string, otherwise time.Time) (time.Time, error) {
	return moment(flag, text, otherwise, r.now)
}

// timesUsage is help for times.
const timesUsage = `Times are durations before now (24h), or in UTC: 2026-03-01, 2026-03-01T12:00,
2026-03-01T12:00:00Z, or 12:00 of today.`

// moment reads a time as people write it, from a flag.
func moment(flag, text string, otherwise, now time.Time) (time.Time, error) {
	if text == "" {
		return otherwise, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04", "2006-01-02 15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, text, time.UTC); err == nil {
			return t, nil
		}
	}
	if t, err := time.Parse("15:04", text); err == nil {
		y, m, d := now.UTC().Date()
		return time.Date(y, m, d, t.Hour(), t.Minute(), 0, 0, time.UTC), nil
	}
	return time.Time{}, command.Usagef("--%s %q is not a time: write 24h, 2026-03-01, 2026-03-01T12:00 or 12:00",
		flag, text)
}

// naming returns the function that gives a grant its line's name.
func (r *usageReport) naming() (func(*account.Grant) string, error) {
	key, isLabel := strings.CutPrefix(r.by, "label=")
	switch {
	case r.by == "namespace":
		return func(g *account.Grant) string { return g.Namespace }, nil
	case r.by == "pod":
		return func(g *account.Grant) string {
			if g.Pod == "" {
				return ""
			}
			return g.Namespace + "/" + g.Pod
		}, nil
	case isLabel && key != "":
		return func(g *account.Grant) string { return g.Labels[key] }, nil
	}
	return nil, command.Usagef("--by %q: write namespace, pod or label=KEY", r.by)
}

// granted returns what was granted and used, and writes notes on what the journal lacks.
func (r *usageReport) granted(notes io.Writer) ([]account.Sum, error) {
	by, err := r.naming()
	if err != nil {
		return nil, err
	}
	from, err := r.moment("since", r.since, time.Time{})
	if err != nil {
		return nil, err
	}
	to, err := r.moment("until", r.until, r.now)
	if err != nil {
		return nil, err
	}
	if !to.After(from) {
		return nil, command.Usagef("--until is not after --since")
	}
	report := account.NewReport(from, to, by)
	book := account.NewBook(report)
	left := account.Dropped{}
	if err := readJournal(r.dir, from, left.Noting(book.Apply)); err != nil {
		return nil, err
	}
	printRemoved(notes, left, from)
	sums := report.Sum(book)
	if r.priced {
		account.Price(sums, r.price, r.spotPrice)
	}
	return sums, nil
}

// sums prints what was granted and used.
func (r *usageReport) sums(c console) error {
	sums, err := r.granted(c.err)
	if err != nil {
		return err
	}
	heads := []string{
		strings.ToUpper(r.by), "GRANTS",
		"GPU-HOURS GRANTED", "USED", "GiB-HOURS GRANTED", "USED", "SM-HOURS", "TIER", "GiB-HOURS LENT", "COST",
		"PARKS", "HOURS PARKED", "GiB-HOURS ON HOST",
	}
	if r.format == "csv" {
		heads = []string{
			"name", "grants",
			"granted_gpu_hours", "used_gpu_hours", "granted_gib_hours", "used_gib_hours", "sm_hours",
			"tier", "lent_gib_hours", "cost", "parks", "parked_hours", "parked_gib_hours",
		}
	}
	// For people, what no line has is left out.
	tiers := slices.ContainsFunc(sums, func(s account.Sum) bool { return s.Tier == account.Spot })
	parks := slices.ContainsFunc(sums, func(s account.Sum) bool { return s.ParkedHours > 0 })
	columns := []bool{true, true, true, true, true, true, true, tiers, tiers, r.priced, parks, parks, parks}
	if r.format == "csv" {
		columns = nil
	}
	var rows [][]string
	for i := range sums {
		s := &sums[i]
		rows = append(rows, []string{
			s.Name, strconv.Itoa(s.Grants),
			r.hours(&s.GrantedGPUHours), r.hours(s.UsedGPUHours),
			r.hours(&s.GrantedGiBHours), r.hours(s.UsedGiBHours), r.hours(s.SMHours),
			s.Tier, r.hours(&s.LentGiBHours), r.hours(s.Cost),
			strconv.Itoa(s.Parks), r.hours(&s.ParkedHours), r.hours(&s.ParkedGiBHours),
		})
	}
	if columns != nil {
		heads = only(heads, columns)
		for i := range rows {
			rows[i] = only(rows[i], columns)
		}
	}
	return r.print(c.out, sums, heads, rows)
}

// only returns the cells of some columns.
func only(row []string, columns []bool) (out []string) {
	for i, cell := range row {
		if columns[i] {
			out = append(out, cell)
		}
	}
	return out
}

// hours returns a figure as text, rounded if it is for people.
func (r *usageReport) hours(h *float64) string {
	switch {
	case h == nil && r.format == "text":
		return "-"
	case h == nil:
		return ""
	case r.format == "text":
		return strconv.FormatFloat(*h, 'f', 2, 64)
	}
	return strconv.FormatFloat(*h, 'f', -1, 64)
}

// readJournal reads the journal in a directory. If there is none, the error has the remedy.
func readJournal(dir string, since time.Time, apply func(*account.Record)) error {
	err := segments.Read(dir, since, apply)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; the agent of a node keeps one in its --state-dir, unless it runs with --usage-size 0: "+
			"run this in the agent's pod, or name the directory that holds usage with --state-dir", err)
	}
	return err
}

// mostLeft is how many owners tellLeft names.
const mostLeft = 10

// printRemoved prints the owners whose records since a time were removed from the journal.
func printRemoved(out io.Writer, left account.Dropped, from time.Time) {
	told := 0
	for _, o := range slices.SortedFunc(maps.Keys(left), account.Owner.Compare) {
		l := left[o]
		if o.Refused || l.Before.Before(from) {
			continue
		}
		if told++; told > mostLeft {
			fmt.Fprintln(out, "note: others had too many records, too")
			return
		}
		whose := "namespace " + printable(o.Namespace)
		if o.Namespace == "" {
			whose = "no namespace"
		}
		fmt.Fprintf(out, "note: %d records of %s, from before %s, were removed from the journal: "+
			"they exceeded its share of --usage-size\n",
			l.Records, whose, l.Before.UTC().Format(time.RFC3339))
	}
}

// had returns who held something at a time, and writes notes on what the journal lacks.
func (r *usageReport) had(notes io.Writer) ([]account.Had, error) {
	at, err := r.moment("at", r.at, r.now)
	if err != nil {
		return nil, err
	}
	who := account.NewPresence(at, r.gpu)
	book := account.NewBook(who)
	left := account.Dropped{}
	if err := readJournal(r.dir, at, left.Noting(book.Apply)); err != nil {
		return nil, err
	}
	printRemoved(notes, left, at)
	return who.Who(book), nil
}

// presence prints who held something at a time.
func (r *usageReport) presence(c console) error {
	had, err := r.had(c.err)
	if err != nil {
		return err
	}
	stamp := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.UTC().Format(time.RFC3339)
	}
	heads := []string{"GPU", "UUID", "PIECE", "SHARE", "NAMESPACE", "POD", "CONTAINER", "SINCE", "UNTIL", "TIER"}
	if r.format == "csv" {
		heads = []string{"gpu", "uuid", "piece", "share", "namespace", "pod", "container", "since", "until", "tier"}
	}
	var rows [][]string
	for i := range had {
		h := &had[i]
		rows = append(rows, []string{
			strconv.Itoa(h.Index), string(h.GPU), h.Piece, strconv.FormatFloat(h.Share, 'g', 4, 64),
			h.Namespace, h.Pod, h.Container, stamp(h.Since), stamp(h.Until), h.Tier,
		})
	}
	return r.print(c.out, had, heads, rows)
}

// print prints rows, or values as JSON.
func (r *usageReport) print(out io.Writer, values any, heads []string, rows [][]string) error {
	switch r.format {
	case "json":
		return command.PrintJSON(out, values)
	case "csv":
		w := csv.NewWriter(out)
		_ = w.WriteAll(append([][]string{heads}, rows...))
		return w.Error()
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{heads}, rows...) {
		row = slices.Clone(row)
		for i := range row {
			row[i] = cmp.Or(printable(row[i]), "-")
		}
		fmt.Fprintln(w, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	return w.Flush()
}

// printable replaces characters that could move a terminal's cursor: tenants choose these
// names.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
