// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

// The card that is cut, and who cuts which of two of them.
const (
	migModel = "A100-SXM4-80GB"

	ourGPU, theirGPU = 0, 1

	migAgentName = "gpu-agent-mig"
)

// shareBusy is how probable it is that an instance is busy.
const shareBusy = 0.3

// Targets, see the issue that asks for them.
const (
	mostDestroys = 0.65  // of the peer's
	mostEdit     = 100.0 // ms from an edit to the kubelet's list, above the hardware's time
	mostOnDemand = 50.0  // ms of a container's start, above the hardware's time
)

// migWorld is an emulated driver of two cards in MIG mode.
type migWorld struct{ *world }

// startMIGWorld serves a world in which the hardware takes so long for one call that
// makes or takes away a GPU instance or a compute instance: a device is two of them.
func (b *bench) startMIGWorld(operation time.Duration) (*migWorld, error) {
	seconds := operation.Seconds()
	w, err := b.startWorld("mig-driver", emulator.Spec{Model: migModel, Count: 2, Seed: "mig",
		MIG:  emulator.MIGSpec{CreateSeconds: seconds, DestroySeconds: seconds},
		GPUs: []emulator.GPUSpec{{Index: ourGPU, MIG: true}, {Index: theirGPU, MIG: true}}})
	return &migWorld{w}, err
}

// stands is what is on a GPU: sets of places, and whether each has its compute
// instance.
func (w *migWorld) stands(c *migCard, gpu int) (set migSet, whole bool) {
	whole = true
	for _, gi := range w.State().GPUs[gpu].MIG.Instances {
		at := slices.IndexFunc(c.places, func(p migPlace) bool { return p.profile.Name == gi.Profile && int(p.start) == gi.Start })
		set = append(set, c.places[at])
		whole = whole && len(gi.Compute) == 1
	}
	slices.SortFunc(set, func(x, y migPlace) int { return strings.Compare(x.String(), y.String()) })
	return set, whole
}

// lay puts a set on a GPU by hand, in place of what is there.
func (w *migWorld) lay(gpu int, set migSet) error {
	for _, gi := range w.State().GPUs[gpu].MIG.Instances {
		if err := w.DestroyInstance(gpu, gi.Start); err != nil {
			return err
		}
	}
	for _, p := range set {
		if err := w.CreateInstance(gpu, p.profile.Name, int(p.start), false); err != nil {
			return err
		}
	}
	return nil
}

// occupy puts a process on places of a GPU.
func (w *migWorld) occupy(gpu int, busy migSet) error {
	for _, gi := range w.State().GPUs[gpu].MIG.Instances {
		if !slices.ContainsFunc(busy, func(p migPlace) bool { return int(p.start) == gi.Start }) {
			continue
		}
		err := w.AddProcess(emulator.Process{PID: os.Getpid(), GPU: gpu, GI: gi.ID, CI: gi.Compute[0].ID, Kind: emulator.Compute, MiB: 64})
		if err != nil {
			return err
		}
	}
	return nil
}

// work is what was done to a GPU since a change of it.
type work struct {
	destroys, creates int // of GPU instances
	undone            int // creates of what is gone again
	hardware          time.Duration
}

func (w *migWorld) workOn(gpu int, since uint64) (done work) {
	made := map[uint64]bool{}
	for _, op := range w.MIGOps(since) {
		if op.GPU != gpu {
			continue
		}
		done.hardware += time.Duration(op.Seconds * float64(time.Second))
		switch {
		case op.CI >= 0:
		case op.Op == "create":
			done.creates++
			made[op.Serial] = true
		case op.Op == "destroy":
			done.destroys++
			if made[op.Of] {
				done.undone++
			}
		}
	}
	return done
}

// moment is one in the life of a world.
type moment struct {
	at     time.Time
	serial uint64 // of the last thing done to it
	laying time.Duration
}

func (w *migWorld) now() moment {
	m := moment{laying: w.laying()}
	if ops := w.MIGOps(0); len(ops) > 0 {
		m.serial = ops[len(ops)-1].Serial
	}
	m.at = time.Now()
	return m
}

// since is the time that has passed since a moment, and what is left of it without
// the hardware's and the emulator's own. A busy machine oversleeps the one and
// takes its time over the other.
func (w *migWorld) since(m moment, gpu int) (took, above time.Duration) {
	took = time.Since(m.at)
	return took, took - w.workOn(gpu, m.serial).hardware - (w.laying() - m.laying)
}

// cutter changes what stands on a GPU of its own.
type cutter interface {
	// begin is told what stands, which was made by hand, and what of it is busy.
	begin(ctx context.Context, set, busy migSet) error
	// change asks for a geometry and waits for the outcome: that it is there for
	// containers to have, or why not. An error is of the bench.
	change(ctx context.Context, counts string, busy migSet) (refused string, err error)
	// calls are driver calls since begin.
	calls() int
	end()
}

// migTally is what came of a party's changes.
type migTally struct {
	name             string
	possible, failed int // and of those that could be had, how many were not
	impossible       int
	left             map[string]int // by what stood after those that did not come about: old, new, neither
	touched          int            // busy instances
	work             work
	made             []int // GPU instances destroyed by each change, -1 where it did not come about
	calls            int
	took             sample
	above            sample // of changes that were made: what they took above the hardware's time
	example          string
}

// judge adds a change to the tally.
func (t *migTally) judge(w *migWorld, c *migCard, gpu int, before, busy migSet, counts, refused string, since uint64) {
	after, whole := w.stands(c, gpu)
	done := w.workOn(gpu, since)
	t.work.destroys += done.destroys
	t.work.creates += done.creates
	t.work.undone += done.undone
	t.work.hardware += done.hardware
	for _, p := range busy {
		if !slices.Contains(after, p) {
			t.touched++
		}
	}
	state := "neither"
	switch {
	case whole && after.counts() == counts:
		state = "new"
	case whole && sameSet(after, before):
		state = "old"
	}
	can := c.possible(busy, counts)
	if can {
		t.possible++
	} else {
		t.impossible++
	}
	if refused == "" && state == "new" {
		t.made = append(t.made, done.destroys)
		return
	}
	t.made = append(t.made, -1)
	t.left[state]++
	if can {
		t.failed++
		if t.example == "" {
			t.example = fmt.Sprintf("from %v to %s, busy %v: left %v (%s)", before, counts, busy, after, oneLine(refused))
		}
	}
}

func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if n := len(text) - 300; n > 0 {
		text = "…" + text[n:]
	}
	return text
}

// without is the places of a set that are not in another.
func (s migSet) without(o migSet) migSet {
	return slices.DeleteFunc(slices.Clone(s), func(p migPlace) bool { return slices.Contains(o, p) })
}

func sameSet(a, b migSet) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(p migPlace) bool { return !slices.Contains(b, p) })
}

// partedCutter is mig-parted.
type partedCutter struct {
	parted peers.Parted
	file   string
	world  *migWorld
	before int // calls of all programs
}

func (p *partedCutter) begin(context.Context, migSet, migSet) error {
	p.before = total(p.world.Calls(0))
	return nil
}

func (p *partedCutter) change(ctx context.Context, counts string, _ migSet) (refused string, err error) {
	text := fmt.Sprintf("version: v1\nmig-configs:\n  change:\n  - {devices: [%d], mig-enabled: true, mig-devices: %s}\n", theirGPU, counts)
	if err := os.WriteFile(p.file, []byte(text), 0o644); err != nil {
		return "", err
	}
	said, err := p.parted.Run(ctx, "apply", "-f", p.file, "-c", "change")
	if err == nil {
		return "", nil
	}
	if !strings.Contains(said, "level=fatal") {
		return "", fmt.Errorf("%w\n%s", err, said)
	}
	return said, nil
}

func (p *partedCutter) calls() int { return total(p.world.Calls(0)) - p.before }

func (p *partedCutter) end() {}

// agentCutter is the agent, with a watched ConfigMap, started anew for each change.
// It may take away instances that were made by hand, as mig-parted does.
type agentCutter struct {
	*bench
	world   *migWorld
	card    *migCard
	kubelet *kubelet
	uuid    string
	proc    *process
	before  int
}

// start runs the agent on the MIG world with partitions.
func (a *agentCutter) start(partitions string) (err error) {
	if err := a.kubelet.forget(); err != nil {
		return err
	}
	a.api.setPartitions(partitions)
	a.api.putNode(nodeName) // without what an earlier one said
	kubeconfig := filepath.Join(a.work, "kubeconfig")
	if err := a.api.kubeconfig(kubeconfig); err != nil {
		return err
	}
	m := a.machine
	m.driver = &driver{root: a.world.root}
	a.proc, err = m.startAgent(migAgentName, ":9504", a.kubelet, 1024, "--configmap", agentPod.Namespace+"/"+agentConfig, "--node-name", nodeName,
		"--kubeconfig", kubeconfig, "--foreign-instances", "reclaim")
	return err
}

func (a *agentCutter) end() { a.proc.kill() }

// fixed is the partitions with which our GPU has a geometry, and the agent leaves
// the other alone.
func fixed(counts string) string {
	return fmt.Sprintf("version: v1\npartitions:\n  default:\n  - {devices: [%d], mode: mig, geometry: %s}\n  - {devices: [%d], mode: \"off\"}\n", ourGPU, counts, theirGPU)
}

// offered are the healthy placements of our GPU, by profile and place, over all
// resources.
func (k *kubelet) offered(uuid string) (set []string, changed <-chan struct{}) {
	all, changed := k.Endpoints()
	for _, e := range all {
		for _, id := range e.Healthy() {
			if placement, ok := strings.CutPrefix(id, uuid+"::"); ok {
				set = append(set, placement)
			}
		}
	}
	slices.Sort(set)
	return set, changed
}

// await waits until the kubelet has exactly certain numbers of placements on offer and
// the work is done (what is to go is withdrawn before it goes), or the agent says
// one of the states in which it is not at work.
func (a *agentCutter) await(ctx context.Context, counts string, done func() bool, or ...string) (refused string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		set, changed := a.kubelet.offered(a.uuid)
		n := map[string]int{}
		for _, placement := range set {
			profile, _, _ := strings.Cut(placement, "@")
			n[profile]++
		}
		if countsText(n) == counts && done() {
			return "", nil
		}
		state := a.api.nodeLabel(lab.StateLabel)
		if slices.Contains(or, state) {
			return state, nil
		}
		select {
		case <-changed:
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return "", a.proc.explain(fmt.Errorf("wait for %s on offer: %w; there are %v, the state is %q", counts, ctx.Err(), set, state))
		}
	}
}

func (a *agentCutter) begin(ctx context.Context, set, busy migSet) error {
	if err := a.start(fixed(set.counts())); err != nil {
		return err
	}
	if _, err := a.await(ctx, set.without(busy).counts(), func() bool { return true }); err != nil {
		return err
	}
	err := await(ctx, "the agent to say that all is applied", func() (bool, error) {
		state := a.api.nodeLabel(lab.StateLabel)
		return state == "applied" && a.api.watched(), fmt.Errorf("the state is %q", state)
	})
	if err != nil {
		return a.proc.explain(err)
	}
	// What it asks at its start is of no change.
	a.before = total(a.world.Calls(a.proc.pid))
	for quiet := false; !quiet; {
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
		now := total(a.world.Calls(a.proc.pid))
		quiet, a.before = now == a.before, now
	}
	return nil
}

func (a *agentCutter) change(ctx context.Context, counts string, busy migSet) (refused string, err error) {
	// A busy instance that no allocation has is not on offer.
	n := map[string]int{}
	for _, field := range strings.Split(strings.Trim(counts, "{}"), ", ") {
		var count int
		name, number, _ := strings.Cut(field, ": ")
		if _, err := fmt.Sscan(number, &count); err == nil {
			n[name] = count
		}
	}
	for _, p := range busy {
		n[p.profile.Name]--
	}
	a.api.setPartitions(fixed(counts))
	return a.await(ctx, countsText(n), func() bool {
		set, whole := a.world.stands(a.card, ourGPU)
		return whole && set.counts() == counts
	}, "blocked", "failed", "invalid")
}

func (a *agentCutter) calls() int { return total(a.world.Calls(a.proc.pid)) - a.before }

// migChanges lets mig-parted and the agent make the same changes, one after the
// other, each on a card of its own that holds the same instances at the same
// places, of which the same are busy.
func (b *bench) migChanges(ctx context.Context) (err error) {
	card, err := newMIGCard(migModel)
	if err != nil {
		return err
	}
	w, err := b.startMIGWorld(b.operation)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	parties := []struct {
		cutter
		gpu int
		*migTally
	}{
		{&partedCutter{world: w, file: filepath.Join(b.work, "mig-parted.yaml"),
			parted: peers.Parted{Program: b.kit.Bin(peers.MIGParted.Name), Root: w.root}},
			theirGPU, &migTally{name: peers.MIGParted.Name, left: map[string]int{}}},
		{&agentCutter{bench: b, world: w, card: card, kubelet: b.migKubelet, uuid: w.State().GPUs[ourGPU].UUID},
			ourGPU, &migTally{name: agentName, left: map[string]int{}}},
	}
	b.note("%s: %d sets of instances, %d of them maximal; an operation takes the hardware %v, an instance is two", migModel, len(card.sets), len(card.maximal), b.operation)
	random := rand.New(rand.NewPCG(5, 0))
	for range b.changes {
		before, counts := card.maximal[random.IntN(len(card.maximal))], card.maximal[random.IntN(len(card.maximal))].counts()
		var busy migSet
		for _, p := range before {
			if random.Float64() < shareBusy {
				busy = append(busy, p)
			}
		}
		w.EndProcess(os.Getpid())
		for _, p := range parties {
			if err := errors.Join(w.lay(p.gpu, before), w.occupy(p.gpu, busy)); err != nil {
				return err
			}
		}
		for _, p := range parties {
			if err := b.migChange(ctx, w, card, p.cutter, p.gpu, p.migTally, before, busy, counts); err != nil {
				return fmt.Errorf("%s: from %v to %s, busy %v: %w", p.name, before, counts, busy, err)
			}
		}
	}
	for _, p := range parties {
		b.migFigures(p.migTally, p.migTally == parties[1].migTally)
	}
	var both, theirs, ours int
	for i, n := range parties[0].made {
		if m := parties[1].made[i]; n >= 0 && m >= 0 {
			both, theirs, ours = both+1, theirs+n, ours+m
		}
	}
	b.note("%d changes came about with both: %d instances destroyed by %s, %d by the agent", both, theirs, peers.MIGParted.Name, ours)
	b.figure("mig_destroys_where_both/gpu-agent-to-peer", float64(ours)/float64(max(theirs, 1)), "x")
	b.figure("mig_destroys/gpu-agent-to-peer", float64(parties[1].work.destroys)/float64(max(parties[0].work.destroys, 1)), "x",
		target{mostDestroys, "0.65"})
	return nil
}

// migChange makes one change, and judges it.
func (b *bench) migChange(ctx context.Context, w *migWorld, card *migCard, c cutter, gpu int, t *migTally, before, busy migSet, counts string) error {
	if err := c.begin(ctx, before, busy); err != nil {
		return err
	}
	defer c.end()
	began := w.now()
	refused, err := c.change(ctx, counts, busy)
	took, above := w.since(began, gpu)
	if err != nil {
		return err
	}
	t.took = append(t.took, took)
	if refused == "" {
		t.above = append(t.above, above)
	}
	t.calls += c.calls()
	t.judge(w, card, gpu, before, busy, counts, refused, began.serial)
	return nil
}

func (b *bench) migFigures(t *migTally, ours bool) {
	b.figure("mig_possible/"+t.name, float64(t.possible), "changes")
	b.figure("mig_possible_failed/"+t.name, float64(t.failed), "changes", only(ours, 0, "0")...)
	b.figure("mig_impossible/"+t.name, float64(t.impossible), "changes")
	for _, state := range []string{"old", "new", "neither"} {
		b.figure("mig_failed_left_"+state+"/"+t.name, float64(t.left[state]), "changes", only(ours && state == "neither", 0, "0")...)
	}
	b.figure("mig_busy_lost/"+t.name, float64(t.touched), "instances", only(ours, 0, "0")...)
	b.figure("mig_destroys/"+t.name, float64(t.work.destroys), "instances")
	b.figure("mig_creates/"+t.name, float64(t.work.creates), "instances")
	b.figure("mig_created_in_vain/"+t.name, float64(t.work.undone), "instances", only(ours, 0, "0")...)
	b.figure("mig_driver_calls_per_change/"+t.name, float64(t.calls)/float64(len(t.took)), "calls")
	var sum time.Duration
	for _, d := range t.took {
		sum += d
	}
	b.figure("mig_seconds_per_change/"+t.name, sum.Seconds()/float64(len(t.took)), "s")
	b.figure("mig_hardware_seconds_per_change/"+t.name, t.work.hardware.Seconds()/float64(len(t.took)), "s")
	if len(t.above) > 0 {
		b.figure("mig_change_above_hardware_p50/"+t.name, t.above.quantile(0.5), "ms", only(ours, mostEdit, "100 ms")...)
		b.figure("mig_change_above_hardware_p95/"+t.name, t.above.quantile(0.95), "ms")
	}
	if t.example != "" {
		b.note("%s, the first that failed: %s", t.name, t.example)
	}
}
