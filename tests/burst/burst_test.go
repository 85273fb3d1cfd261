// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

var (
	long  = flag.Bool("long", false, "30 Jobs in each arm, which takes half an hour, and the table of docs/bursting.md")
	seeds = flag.Int("seeds", 0, "30 Jobs of each of so many seeds, with checks, which takes five minutes each")
	built = flag.Bool("built", false, "everything that the nodes need stands in the cache already")
	waits = flag.Duration("patience", 0, "how long Jobs wait for room on-prem before the cloud is paid, with checks")
	plots = flag.String("plots", "", "a `directory` for each arm's plot, and what kept on-prem idle")
)

// name is that of the cluster.
const name = "burst"

// Two real nodes stand for two sites, and the real Kueue decides which Job runs where. With the
// placer's checks no Job is admitted to a site that cannot hold it, and no pod is refused; the
// cloud takes what on-prem cannot, and new Jobs and those that checkpoint come back.
func TestBurst(t *testing.T) {
	if testing.Short() {
		t.Skip("two nodes take the whole machine for a while, and -short is given")
	}
	if missing := lab.Missing(); missing != "" {
		t.Skip("this machine lacks ", missing)
	}
	c := start(t)
	checks := Checks
	checks.Flags = append(slices.Clone(checks.Flags), "--patience", waits.String())
	runs := []run{{checks.Name, checks, Short()}}
	switch {
	case *seeds > 0:
		runs = nil
		for _, load := range Full.Seeds(*seeds) {
			runs = append(runs, run{fmt.Sprintf("seed-%d", load.Seed), checks, load.Draw()})
		}
	case *long:
		runs = nil
		for _, arm := range []Arm{Quota, Topology, checks, Claims} {
			runs = append(runs, run{arm.Name, arm, Full.Draw()})
		}
	}
	table := []string{"| run | stuck on-prem | refused pods | on-prem / cloud / both | on-prem GiB·h | paid GPU·s | " +
		"against a plan | median and longest wait | unfinished |"}
	var names []string
	var records []*Record
	var jobs [][]Job
	for _, of := range runs {
		t.Run(of.name, func(t *testing.T) {
			if err := c.Set(t.Context(), of.arm); err != nil {
				t.Fatal(err)
			}
			r, err := c.Run(t.Context(), of.jobs, 6*time.Minute+*waits, nil)
			if err != nil {
				t.Fatal(err)
			}
			n := r.Count()
			demands := Demands(of.jobs)
			planned, bound := Planned(demands, Own, Patience), Bound(demands, Own, Patience)
			table = append(table, row(of.name, n, planned, bound))
			names, records, jobs = append(names, of.name), append(records, r), append(jobs, of.jobs)
			for _, h := range r.Jobs {
				t.Log(h)
			}
			if *plots != "" {
				name := filepath.Join(*plots, of.name)
				err := errors.Join(os.WriteFile(name+".svg", r.Plot(Title(len(of.jobs)), Has), 0o644),
					os.WriteFile(name+"-idle.csv", r.IdleCSV(), 0o644))
				if err != nil {
					t.Error(err)
				}
			}
			if of.arm.Checks {
				judge(t, r, n)
			}
		})
	}
	t.Logf("a plan knows all run times and has each Job wait for up to %s; none pays less than the bound\n%s",
		Patience, strings.Join(table, "\n"))
	t.Log(IdleTable(names, records))
	t.Log(FillTable(names, records, jobs))
}

// run is some Jobs in an arm.
type run struct {
	name string
	arm  Arm
	jobs []Job
}

// judge says what the arm with checks has to reach.
func judge(t *testing.T, r *Record, n Counts) {
	t.Helper()
	if n.Stuck != 0 || n.Refused != 0 || n.Unfinished != 0 {
		t.Errorf("%d Jobs were admitted to on-prem and did not run there within %s, %d pods were refused, and %d Jobs have not ended; want none of them", n.Stuck, Patience, n.Refused, n.Unfinished)
	}
	var burst time.Duration // when the cloud was first used
	var later, back []string
	for _, h := range r.Jobs {
		for _, p := range h.Pods {
			if p.Site == Cloud && p.From != 0 && (burst == 0 || p.From < burst) {
				burst = p.From
			}
		}
	}
	for _, h := range r.Jobs {
		if _, ok := h.Return(); ok {
			back = append(back, h.Name)
			if !h.Checkpoints {
				t.Errorf("%s was moved, and does not checkpoint", h.Name)
			}
		}
		if h.Came > burst && len(h.Pods) > 0 && h.Pods[0].Site == OnPrem {
			later = append(later, h.Name)
		}
	}
	if burst == 0 || len(later) == 0 || len(back) == 0 {
		t.Errorf("the cloud was first used at %s; of the Jobs that came later %q ran on-prem, and %q came back from the cloud; want some of each", burst, later, back)
	}
}

func row(name string, n Counts, planned, bound time.Duration) string {
	ratio := "–"
	if planned > 0 {
		ratio = fmt.Sprintf("× %.2f of %.0f s (bound %.0f s)",
			n.Paid.Seconds()/planned.Seconds(), planned.Seconds(), bound.Seconds())
	}
	return fmt.Sprintf("| %s | %d | %d | %d / %d / %d | %.2f | %.0f | %s | %.0f s, %.0f s | %d |", name,
		n.Stuck, n.Refused, n.Ran[OnPrem], n.Ran[Cloud], n.Moved, n.Held, n.Paid.Seconds(), ratio,
		n.MedianWait.Seconds(), n.LongestWait.Seconds(), n.Unfinished)
}

// start starts the cluster, which ends with the test.
func start(t *testing.T) *Cluster {
	t.Helper()
	kit, err := lab.NewKit(t.Output())
	if err != nil {
		t.Fatal(err)
	}
	var steps []lab.Step
	if !*built {
		steps = append(kit.Steps(), lab.Step{Name: "Kueue", Run: kit.BuildKueue})
	}
	t.Cleanup(func() { // the test's context has ended by then
		if err := kit.Down(context.Background(), NodeNames(name)[OnPrem]); err != nil {
			t.Error(err)
		}
	})
	c := &Cluster{}
	for _, s := range append(steps, c.Steps(kit, name, true)...) {
		began := time.Now()
		if err := s.Run(t.Context()); err != nil {
			t.Fatalf("%s: %v", s.Name, err)
		}
		t.Logf("%5.1f s  %s", time.Since(began).Seconds(), s.Name)
	}
	return c
}
