// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// reading is one look at the hardware.
type reading struct {
	began  time.Time
	inv    gpu.Inventory
	health []health.GPUReading
	err    error
}

// read asks the driver for everything. It runs beside the loop, for as long as
// the driver takes.
func (a *Agent) read(ctx context.Context) reading {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	inv, err := a.driver.Inventory(ctx)
	if err != nil {
		return reading{err: fmt.Errorf("read the inventory: %w", err)}
	}
	r := reading{began: began, inv: inv}
	for i := range inv.GPUs {
		g := health.GPUReading{Device: inv.GPUs[i]}
		if g.Device.Fault == "" && g.Device.UUID != "" {
			var h gpu.Health
			if h, g.Err = a.driver.Health(ctx, g.Device.UUID); g.Err == nil {
				g.Health = &h
			}
			if errors.Is(g.Err, gpu.ErrTimeout) {
				return reading{err: g.Err}
			}
		}
		r.health = append(r.health, g)
	}
	return r
}

// pending is a reading under way. Its result is handed to the round that waits for
// it; after that round has gone on (late is closed), it lies in box, and the loop
// is woken for it.
type pending struct {
	now, box chan reading
	late     chan struct{}
	waited   bool
}

// look takes in the hardware as it is. Where a reading is due it begins one and
// waits for it, but not for long and not twice: while the driver hangs, the
// loop goes on with what it knows. The error is that of the last reading.
func (a *Agent) look(ctx context.Context) error {
	if a.letGo != "" {
		return a.readErr
	}
	if a.reading == nil {
		if !a.readDue(time.Now()) {
			return a.readErr
		}
		a.stale.Store(false)
		p := &pending{now: make(chan reading), box: make(chan reading, 1), late: make(chan struct{})}
		a.reading = p
		go func() {
			r := a.read(ctx)
			select {
			case p.now <- r:
			case <-p.late:
				p.box <- r
				a.wake()
			}
		}()
	}
	p := a.reading
	if p.waited {
		select {
		case r := <-p.box:
			a.reading = nil
			a.take(r, time.Now())
		default:
		}
		return a.lookErr()
	}
	timer := time.NewTimer(lookPatience)
	defer timer.Stop()
	select {
	case r := <-p.now:
		a.reading = nil
		a.take(r, time.Now())
		return a.readErr
	case <-timer.C:
	case <-ctx.Done():
	}
	p.waited = true
	close(p.late)
	return a.lookErr()
}

// lookErr is why the hardware is not known as it is now: what the last reading
// failed of, or that the first one takes its time.
func (a *Agent) lookErr() error {
	if a.inv == nil && a.readErr == nil {
		return fmt.Errorf("read the inventory: %w", gpu.ErrTimeout)
	}
	return a.readErr
}

// readDue says whether the hardware is to be read anew.
func (a *Agent) readDue(now time.Time) bool {
	return a.stale.Load() || !now.Before(a.nextReading(now))
}

// nextReading is when the hardware is to be read if nothing happens.
func (a *Agent) nextReading(now time.Time) time.Time {
	if a.readAt.IsZero() {
		return now
	}
	if a.readErr != nil {
		return a.readRest.until
	}
	next := a.readAt.Add(inventoryEvery)
	if a.linked {
		next = a.readAt.Add(min(a.opts.LinksEvery, inventoryEvery))
	}
	if a.blind.Load() {
		next = a.readAt.Add(blindEvery)
	}
	if probe := a.health.Due(now); !probe.IsZero() && probe.Before(next) {
		next = probe
	}
	return next
}

// take makes a reading the present one. A failed one changes what is known of the
// GPUs' health, and nothing else.
func (a *Agent) take(r reading, now time.Time) {
	defer a.applyFaults()
	a.readAt = now
	if r.err != nil {
		a.health.Reading(health.Reading{Err: r.err}, now)
		a.readErr = r.err
		a.readRest.fail(r.err, 0, readPauseMax, now)
		return
	}
	a.readErr, a.readRest, a.answered = nil, rest{}, true
	inv := a.withMissing(r.inv)
	if a.inv == nil || a.inv.Driver != inv.Driver || !sameGPUs(a.inv, inv) {
		a.partsDue = true
		for u, s := range a.slices { // a driver that was loaded again has lost them
			s.unsure = true
			a.slices[u] = s
		}
	}
	a.keepMIG(inv, r.began)
	a.inv = inv
	a.setTopology()
	a.instances.Store(inv)
	a.setCards()
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; d.Fault == "" && d.MIG.Capable && a.executor.jobs[d.UUID] == nil {
			a.executor.disown(d)
		}
	}
	// As merged: a GPU that the driver cannot name has its name here.
	seen := health.Reading{}
	for i := range inv.GPUs {
		g := health.GPUReading{Device: inv.GPUs[i]}
		if j := slices.IndexFunc(r.health, func(o health.GPUReading) bool { return o.Device.UUID == g.Device.UUID }); j >= 0 {
			g.Health, g.Err = r.health[j].Health, r.health[j].Err
		}
		seen.GPUs = append(seen.GPUs, g)
	}
	a.health.Reading(seen, now)
}

// takeResults takes in what jobs came to: what is true of their GPUs now, and what
// follows from failures.
func (a *Agent) takeResults(now time.Time) {
	results := a.executor.ended(now)
	for i := range results {
		r := &results[i]
		if a.inv.ByUUID(r.GPU) == nil {
			continue
		}
		if r.read != nil {
			a.stale.Store(true)
		} else {
			a.setMIG(r.GPU, r.mig)
		}
		a.executor.learn(r, a.inv.ByUUID(r.GPU), a.wantedGen, now)
	}
}

// setMIG takes in the MIG side of one GPU, as it is now.
func (a *Agent) setMIG(u gpu.UUID, m gpu.MIG) {
	inv := *a.inv
	inv.GPUs = slices.Clone(inv.GPUs)
	inv.ByUUID(u).MIG = m
	a.inv = &inv
	a.instances.Store(a.inv)
	a.setCards()
	if slices.ContainsFunc(a.health.Verdicts(), func(v health.Verdict) bool { return v.GPU == u && v.GI >= 0 }) {
		a.stale.Store(true) // re-read, so that health drops what it says of a removed instance
	}
}

// setTopology draws up how the GPUs of the inventory are joined.
func (a *Agent) setTopology() {
	a.topology = topology.New(a.inv)
	m := a.topology.Matrix()
	a.matrix = &m
	a.linked = slices.ContainsFunc(a.inv.GPUs, func(d gpu.Device) bool { return d.Lanes > 0 || len(d.Links) > 0 })
}

// keepMIG keeps what is known of GPUs on which something is being done, or was when
// the reading began: it saw them in the middle of that.
func (a *Agent) keepMIG(inv *gpu.Inventory, began time.Time) {
	if a.inv == nil {
		return
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if old := a.inv.ByUUID(d.UUID); old != nil && a.executor.unsettled(d.UUID, began) {
			d.MIG = old.MIG
		}
	}
}

// sameGPUs reports whether two readings have the same GPUs, each as well
// described as in the other.
func sameGPUs(a, b *gpu.Inventory) bool {
	return slices.EqualFunc(a.GPUs, b.GPUs, func(x, y gpu.Device) bool {
		return x.UUID == y.UUID && x.Minor == y.Minor && (x.Fault == "") == (y.Fault == "")
	})
}

// withMissing adds the GPUs that were there before and are not any more, with
// that as their fault: their devices must turn unhealthy, not vanish. One that the
// driver lists and cannot name is the one that was at that index.
//
// They stay until the machine boots anew: nothing tells a GPU that was taken out
// from one that fell off the bus. As long as one is missing, the others keep the
// indices that they had, by which partitions may name them: the driver has
// numbered those that are left anew.
func (a *Agent) withMissing(inv gpu.Inventory) *gpu.Inventory {
	const gone = "the driver does not list this GPU any more"
	if a.inv != nil {
		for _, d := range a.inv.GPUs {
			if inv.ByUUID(d.UUID) != nil {
				continue
			}
			if i := slices.IndexFunc(inv.GPUs, func(n gpu.Device) bool { return n.UUID == "" && n.Index == d.Index }); i >= 0 {
				d.Fault = inv.GPUs[i].Fault
				inv.GPUs[i] = d
				continue
			}
			d.Fault, d.Gone = gone, true
			inv.GPUs = append(inv.GPUs, d)
		}
	}
	// Never seen working, so never offered: nothing can be said of it.
	inv.GPUs = slices.DeleteFunc(inv.GPUs, func(d gpu.Device) bool { return d.UUID == "" })
	if a.inv != nil && slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return d.Gone }) {
		keepIndices(a.inv, &inv)
	}
	return &inv
}

// keepIndices gives the GPUs that were there before the indices that they had,
// and those that are new the next free ones.
func keepIndices(old, inv *gpu.Inventory) {
	taken := map[int]bool{}
	for _, d := range old.GPUs {
		taken[d.Index] = true
	}
	next := 0
	moved := map[int]int{} // by the driver's number, of GPUs that it lists
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if was := old.ByUUID(d.UUID); was != nil {
			if !d.Gone {
				moved[d.Index] = was.Index
			}
			d.Index = was.Index
			continue
		}
		for taken[next] {
			next++
		}
		moved[d.Index] = next
		d.Index, taken[next] = next, true
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if d.Gone {
			d.Links = nil // nothing is known of them
		}
		links := make([]gpu.Link, 0, len(d.Links))
		for _, l := range d.Links {
			to, listed := moved[l.To]
			if !l.Switch {
				l.To = to
			}
			if listed || l.Switch {
				links = append(links, l)
			}
		}
		d.Links = links
	}
	slices.SortStableFunc(inv.GPUs, func(a, b gpu.Device) int { return a.Index - b.Index })
}

// onEvent is called by the driver for each event, beside the loop. What it means
// for the kubelet's lists is in them before the loop wakes.
func (a *Agent) onEvent(e gpu.Event) {
	a.observer.GPUEvent(e)
	changed := a.health.Event(e, time.Now())
	if changed {
		a.applyFaults()
	}
	a.logEvent(e, changed)
	if changed || e.Kind != gpu.EventXid {
		a.stale.Store(true)
		a.wake()
	}
}

// logEvent logs what the driver reported. A program on a GPU can have it report the
// same a thousand times a second, so it is rationed for each GPU; the metric counts
// all. What changes the verdict on a GPU is always logged, since that cannot be
// repeated.
func (a *Agent) logEvent(e gpu.Event, changed bool) {
	if changed {
		a.log.Warn("GPU event", "kind", string(e.Kind), "gpu", string(e.GPU), "xid", e.Xid, "condemns", true)
		return
	}
	level := slog.LevelWarn
	if a.health.Ignores(e) {
		level = slog.LevelDebug
	}
	a.ration.Log(level, "GPU event", []any{"kind", string(e.Kind), "gpu", string(e.GPU)}, "xid", e.Xid, "condemns", false)
}

// applyFaults tells the desk which GPUs are unhealthy, and which MIG instances:
// the hardware keeps those apart, so that what hits one is no reason to take the
// others away.
func (a *Agent) applyFaults() {
	// Two verdicts must not overtake each other on their way.
	a.faultsMu.Lock()
	defer a.faultsMu.Unlock()
	reasons := map[gpu.UUID][]string{}
	ofSlots := map[mig.Place][]string{}
	for _, v := range a.health.Verdicts() {
		slots, known := a.slotsOf(v.Subject)
		if !known {
			reasons[v.GPU] = append(reasons[v.GPU], v.Reason)
		}
		for _, s := range slots {
			at := mig.Place{GPU: v.GPU, Slot: s}
			ofSlots[at] = append(ofSlots[at], v.Reason)
		}
	}
	faults := map[gpu.UUID]string{}
	for u, why := range reasons {
		faults[u] = strings.Join(slices.Compact(why), "; ")
	}
	slots := map[mig.Place]string{}
	for at, why := range ofSlots {
		slots[at] = strings.Join(slices.Compact(why), "; ")
	}
	a.desk.SetFaults(faults, slots)
}

// slotsOf finds the MIG devices that a fault of an instance concerns: none where
// that has gone since. It is false for a fault of the whole GPU, and where nobody
// knows yet what stands on it.
func (a *Agent) slotsOf(s health.Subject) (slots []mig.Slot, known bool) {
	inv := a.instances.Load()
	if s.GI < 0 || inv == nil {
		return nil, false
	}
	d := inv.ByUUID(s.GPU)
	if d == nil || !d.MIG.Enabled {
		return nil, false
	}
	for i := range d.MIG.Instances {
		in := &d.MIG.Instances[i]
		if slot, err := mig.SlotOf(in); err == nil && in.GI == s.GI && (s.CI < 0 || in.CI == s.CI) {
			slots = append(slots, slot)
		}
	}
	return slots, true
}

// followDriver passes the driver's events on. Where the driver cannot tell of
// events, the slow tick must do.
func (a *Agent) followDriver(ctx context.Context) error {
	pause := backOff(readPauseMax)
	for {
		err := a.driver.Events(ctx, a.onEvent)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			a.log.Warn("the driver tells of no events; faults are seen at the next reading", "err", err, "every", blindEvery.String())
			a.blind.Store(true)
			a.wake()
			<-ctx.Done()
			return ctx.Err()
		}
		again := pause.Step()
		if err != nil && !errors.Is(err, gpu.ErrNoDriver) { // the next reading says that
			a.log.Warn("lost the driver's events", "err", err, "again_in", again.String())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(again):
		}
	}
}

// Labels and values by which NVIDIA's GPU operator says that a node's driver is
// about to be unloaded: its upgrade controller in the first, its driver manager,
// which pauses whatever has the driver open, in labels with the second prefix.
const (
	upgradeLabel  = "nvidia.com/gpu-driver-upgrade-state"
	operandPrefix = "nvidia.com/gpu.deploy."
	operandPaused = "paused-for-driver-upgrade"
)

var upgradeStates = []string{"drain-required", "node-maintenance-required", "pod-restart-required"}

// letGoReason says why the driver is to be let go, empty where it is not.
func letGoReason(n *kube.Node, domain string) string {
	if v := n.Labels[upgradeLabel]; slices.Contains(upgradeStates, v) {
		return fmt.Sprintf("the node's label %s is %s", upgradeLabel, v)
	}
	for _, k := range sortedKeys(n.Labels) {
		if strings.HasPrefix(k, operandPrefix) && n.Labels[k] == operandPaused {
			return fmt.Sprintf("the node's label %s is %s", k, operandPaused)
		}
	}
	if own := domain + "/" + ReleaseLabel; n.Unschedulable && n.Labels[own] == "true" {
		return "the node is cordoned and its label " + own + " is true"
	}
	return ""
}

// mindDriver lets the driver go while the node says so. To take it back needs a
// new process: the old driver's library cannot be unloaded. The error wraps
// gpu.ErrReloaded then. Work that is under way comes to its end before, and none is
// begun: a GPU must not be left in the middle of a change.
func (a *Agent) mindDriver(in *input) error {
	was := a.letting
	a.letting = a.letGo == "" && in.letGo != "" && len(a.executor.jobs) > 0
	switch {
	case a.letting:
		if !was {
			a.log.Info("let the driver go after the work that is under way", "because", in.letGo)
		}
	case a.letGo == "" && in.letGo != "":
		if err := a.driver.LetGo(); err != nil {
			a.letting = true // nothing is begun meanwhile
			return fmt.Errorf("let the driver go: %w", err)
		}
		a.log.Info("let the driver go", "because", in.letGo)
		a.letGo = in.letGo
		a.readErr = fmt.Errorf("the driver was let go, since %s: %w", in.letGo, gpu.ErrNoDriver)
		a.health.Reading(health.Reading{Err: a.readErr}, time.Now())
		a.applyFaults()
	case a.letGo != "" && in.letGo == "":
		return fmt.Errorf("the driver may be used again: %w", gpu.ErrReloaded)
	}
	return nil
}

// setCards keeps what can stand on each GPU in step with what its driver says.
func (a *Agent) setCards() {
	cards := map[gpu.UUID]*mig.Card{}
	for i := range a.inv.GPUs {
		d := &a.inv.GPUs[i]
		if !d.MIG.Capable {
			continue
		}
		if old, ok := a.cards[d.UUID]; ok && sameProfiles(a.profiles[d.UUID], d.MIG.Profiles) {
			cards[d.UUID] = old
			continue
		}
		c, err := mig.NewCard(&d.MIG)
		if err != nil { // the profiles that are understood may be had
			a.log.Warn("the driver has MIG profiles that this version does not understand", "gpu", d.UUID, "err", err)
		}
		cards[d.UUID] = c
		a.profiles[d.UUID] = d.MIG.Profiles
	}
	a.cards = cards
}

func sameProfiles(a, b []gpu.Profile) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Profile) bool {
		return x.Name == y.Name && x.ID == y.ID && x.Max == y.Max && x.Slices == y.Slices && slices.Equal(x.Placements, y.Placements)
	})
}
