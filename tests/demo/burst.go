// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/tests/burst"
	"example.com/gpu-agent/tests/lab"
)

// burstName is what the cluster of `demo burst` is called.
const burstName = "burst-demo"

// show is `demo burst` in progress.
type show struct {
	*screen
	kit     *lab.Kit
	cluster *burst.Cluster
}

// showBurst shows Jobs on two sites: on-prem first, then the cloud, and back.
func showBurst(ctx context.Context) (err error) {
	s := &screen{out: os.Stdout, began: time.Now()}
	kit, err := lab.NewKit(s)
	if err != nil {
		return err
	}
	d := &show{screen: s, kit: kit, cluster: &burst.Cluster{}}
	fmt.Println("Two real Kubernetes nodes on this machine stand for two sites, on-prem and a cloud; the GPUs are emulated at the")
	fmt.Println("driver's interface. Kueue decides which Job runs where, and gpu-placer tells it where there is room.")
	fmt.Printf("Everything is kept in %s.\n", kit.Cache)
	steps := append(kit.Steps(), lab.Step{Name: "Kueue", Run: kit.BuildKueue})
	for i := range steps {
		steps[i].Name = "Build what is missing: " + steps[i].Name
	}
	steps = append(steps, lab.Step{Name: "End what an earlier run has left", Run: func(ctx context.Context) error { return kit.Down(ctx, burst.NodeNames(burstName)[burst.OnPrem]) }})
	steps = append(steps, d.cluster.Steps(kit, burstName, false)...)
	steps = append(steps, lab.Step{Name: "Start Kueue, the placer, and the queues of `gpu-agent export kueue --checks`",
		Run: func(ctx context.Context) error { return d.cluster.Set(ctx, burst.Checks) }})
	defer func() {
		if err != nil {
			fmt.Println("\nThe nodes may still run, to be looked at. make burst-down ends them.")
		}
	}()
	for _, b := range steps {
		if err := d.step(b.Name, func() error { return b.Run(ctx) }); err != nil {
			return err
		}
	}
	var record *burst.Record
	title := fmt.Sprintf("%d Jobs come, each of which asks for GPU memory or for a MIG instance", burst.Full.Jobs)
	if err := d.step(title, func() error { record, err = d.run(ctx); return err }); err != nil {
		return err
	}
	return d.step("What it comes to", func() error { return d.summary(record) })
}

// run has the Jobs come, and shows how the sites fill and empty.
func (d *show) run(ctx context.Context) (*burst.Record, error) {
	d.say("A line every two seconds, and what has happened since the last.")
	d.say("")
	d.say("  time  on-prem: %d GiB               cloud: paid GPUs    waiting", burst.Has[burst.OnPrem])
	var last time.Duration
	told := map[string]bool{}
	return d.cluster.Run(ctx, burst.Full.Draw(), 6*time.Minute, func(r *burst.Record) {
		s := r.Samples[len(r.Samples)-1]
		if s.At-last < 2*time.Second {
			return
		}
		last = s.At
		own, cloud := s.Sites[burst.OnPrem], s.Sites[burst.Cloud]
		d.say("%4.0f s  %s %3d GiB  %s %d, %3d GiB   %s %s", s.At.Seconds(), bar(own.GiB, burst.Has[burst.OnPrem], 20), own.GiB,
			bar(cloud.GPUs, 8, 8), cloud.GPUs, cloud.GiB, bar(s.Waiting, 6, 6), strings.Join(news(r, told), ", "))
	})
}

// bar is so much of a whole, in characters.
func bar(part, whole, width int) string {
	n := min((part*width+whole-1)/whole, width)
	return strings.Repeat("█", n) + strings.Repeat("░", width-n)
}

// news is what has not been told yet of the Jobs.
func news(r *burst.Record, told map[string]bool) (out []string) {
	tell := func(what, key string) {
		if !told[key] {
			told[key] = true
			out = append(out, what)
		}
	}
	for _, h := range r.Jobs {
		for i, p := range h.Pods {
			if p.From == 0 {
				continue
			}
			what := map[burst.Site]string{burst.OnPrem: "on-prem", burst.Cloud: "in the CLOUD"}[p.Site]
			if _, back := h.Return(); back && p.Site == burst.OnPrem {
				what = "comes BACK"
			}
			tell(fmt.Sprintf("%s (%s) %s", h.Name, h.Piece, what), fmt.Sprint(h.Name, i))
		}
	}
	return out
}

// summary says what was reached, and draws it.
func (d *show) summary(r *burst.Record) error {
	n := r.Count()
	demands, onPrem := burst.Demands(burst.Full.Draw()), burst.Own
	planned, bound := burst.Planned(demands, onPrem, burst.Patience), burst.Bound(demands, onPrem, burst.Patience)
	d.say("%d Jobs ran on-prem and %d in the cloud, of which %d came back.", n.Ran[burst.OnPrem], n.Ran[burst.Cloud], n.Moved)
	d.say("%d were admitted to on-prem and did not run there within a minute; %d pods were refused.", n.Stuck, n.Refused)
	d.say("Cloud GPUs were paid for %.0f s. A planner that knows all run times, and lets each Job wait for up to a", n.Paid.Seconds())
	d.say("minute, pays %.0f s, and none pays less than %.0f s.", planned.Seconds(), bound.Seconds())
	d.say("What kept room on-prem idle:\n%s", burst.IdleTable([]string{"GiB·s"}, []*burst.Record{r}))
	plot := filepath.Join(d.kit.Cache, "burst.svg")
	if err := os.WriteFile(plot, r.Plot(burst.Title(len(r.Jobs)), burst.Has), 0o644); err != nil {
		return err
	}
	d.say("%s shows both sites over time.", plot)
	d.say("The nodes stay up, to be looked at: %s get workloads -A. make burst-down ends them.", d.cluster.Nodes[burst.OnPrem].KubectlCommand())
	if n.Stuck+n.Refused+n.Unfinished > 0 {
		return errors.New("it is not as it should be: no Job is to be stuck on-prem or unfinished, and no pod refused")
	}
	return nil
}
