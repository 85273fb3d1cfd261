// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// reader reads the hardware, beside the loop where that takes long, and knows it as it
// was last seen. stale may be set by anybody, and again called; everything else is for the
// loop's goroutine. Use newReader.
type reader struct {
	driver Driver
	health *health.Monitor
	// told is told of what a reading says, when health has been.
	told judge
	log  *slog.Logger
	// wake has a round come, when a reading has ended that none waits for.
	wake  func()
	links *links
	// stale says that the driver is to be read anew in the next round.
	stale atomic.Bool

	// The rest belongs to the loop's goroutine.

	inv      *gpu.Inventory   // nil before anything is known
	topology *topology.Graph  // of inv
	matrix   *topology.Matrix // of topology
	// epoch counts the drivers and the sets of GPUs that were seen: each may have
	// forgotten what was set before, and needs other files in containers.
	epoch    uint64
	reading  *pending  // one is under way
	readAt   time.Time // when the last one ended
	answered bool      // one has succeeded
	readErr  error     // why that failed
	readRest rest      // how long it is not tried again
	letGo    string    // why the driver was let go
	letting  string    // why it is to be let go when no work is under way
	cards    cards     // of inv
}

// judge turns what is known of the GPUs' health into what the front-ends are told; faults does.
type judge interface {
	// stands takes in what stands on the GPUs, by which a fault of an instance is understood.
	stands(*gpu.Inventory)
	// apply tells the front-ends.
	apply()
	// isBlind reports whether the driver tells of no events.
	isBlind() bool
}

// firstEpoch is the reader's before it has read anything.
const firstEpoch = 1

func newReader(o *Options, w *Worlds, monitor *health.Monitor, wake func()) *reader {
	r := &reader{driver: w.Driver, health: monitor, log: o.Log, wake: wake, epoch: firstEpoch,
		cards: cards{of: map[gpu.UUID]*mig.Card{}, profiles: map[gpu.UUID][]gpu.Profile{}}}
	r.links = &links{driver: w.Driver, every: o.LinksEvery, changed: r.again}
	if r.links.every <= 0 {
		r.links.every = inventoryEvery
	}
	return r
}

// again has the hardware read anew, in a round that comes at once. It may be called by anybody.
func (r *reader) again() {
	r.stale.Store(true)
	r.wake()
}

// wereReset takes in when an operator says that GPUs were reset.
func (r *reader) wereReset(at map[gpu.UUID]time.Time) {
	for u, at := range at {
		if r.health.WasReset(u, at) {
			r.log.Info("an operator says that a GPU was reset", "gpu", string(u), "at", at)
			r.again()
		}
	}
}

// wasReset takes in that the agent itself has reset a GPU. It may be called by anybody.
func (r *reader) wasReset(u gpu.UUID) {
	r.health.WasReset(u, time.Now())
	r.again()
}

// restore takes over the GPUs that the process before this one knew.
func (r *reader) restore(gpus []gpu.Device) {
	r.inv = &gpu.Inventory{GPUs: gpus}
	r.setTopology()
	for i := range gpus {
		r.health.Know(gpus[i].UUID)
	}
}

// reading is one look at the hardware.
type reading struct {
	began  time.Time
	inv    gpu.Inventory
	health map[gpu.UUID]health.GPUReading
	err    error
}

// read asks the driver for everything. It runs beside the loop, for as long as
// the driver takes.
func (r *reader) read(ctx context.Context) reading {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	inv, err := r.driver.Inventory(ctx)
	if err != nil {
		return reading{err: status.Because(status.DriverFailed, fmt.Errorf("read the inventory: %w", err))}
	}
	got := reading{began: began, inv: inv, health: map[gpu.UUID]health.GPUReading{}}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if d.Fault != "" || d.UUID == "" {
			continue
		}
		h, err := r.driver.Health(ctx, d.UUID)
		switch {
		case err == nil:
			got.health[d.UUID] = health.GPUReading{Health: &h}
		case errors.Is(err, gpu.ErrTimeout):
			return reading{err: status.Because(status.DriverFailed, err)}
		default:
			got.health[d.UUID] = health.GPUReading{Err: err}
		}
	}
	return got
}

// pending is a reading under way. One round waits for its result; after that round has
// gone on, the loop is woken for it.
type pending struct {
	box  chan reading // of size 1
	late atomic.Bool  // no round waits for it
}

// look takes in the hardware as it is. Where a reading is due it begins one and
// waits for it, but not for long and not twice: while the driver hangs, the
// loop goes on with what it knows. It reports whether there is news of the hardware,
// and the error of the last reading.
//
// unsettled tells of which GPUs a reading that began then is not to be believed.
func (r *reader) look(ctx context.Context, unsettled func(u gpu.UUID, began time.Time) bool) (news bool, err error) {
	if r.letGo != "" {
		return false, r.readErr
	}
	if r.reading == nil {
		if !r.readDue(time.Now()) {
			return false, r.readErr
		}
		r.stale.Store(false)
		p := &pending{box: make(chan reading, 1)}
		r.reading = p
		go func() {
			if p.box <- r.read(ctx); p.late.Load() {
				r.wake()
			}
		}()
	}
	p := r.reading
	if !p.late.Load() {
		select {
		case got := <-p.box:
			return r.take(got, unsettled, time.Now()), r.lookErr()
		case <-time.After(lookPatience):
		case <-ctx.Done():
		}
		p.late.Store(true)
	}
	select { // it may have come before it could know that it is late
	case got := <-p.box:
		return r.take(got, unsettled, time.Now()), r.lookErr()
	default:
		return false, r.lookErr()
	}
}

// lookErr is why the hardware is not known as it is now: what the last reading
// failed of, or that the first one takes its time.
func (r *reader) lookErr() error {
	if r.inv == nil && r.readErr == nil {
		return fmt.Errorf("read the inventory: %w", gpu.ErrTimeout)
	}
	return r.readErr
}

// readDue says whether the hardware is to be read anew.
func (r *reader) readDue(now time.Time) bool {
	return r.stale.Load() || !now.Before(r.nextReading(now))
}

// nextReading is when the hardware is to be read if nothing happens.
func (r *reader) nextReading(now time.Time) time.Time {
	if r.readAt.IsZero() {
		return now
	}
	if r.readErr != nil {
		return r.readRest.until
	}
	next := r.readAt.Add(inventoryEvery)
	if r.told.isBlind() {
		next = r.readAt.Add(blindEvery)
	}
	if probe := r.health.Due(now); !probe.IsZero() && probe.Before(next) {
		next = probe
	}
	return next
}

// take makes a reading the present one, and reports whether it has succeeded. A failed
// one changes only what is known of the GPUs' health.
func (r *reader) take(got reading, unsettled func(gpu.UUID, time.Time) bool, now time.Time) bool {
	r.reading = nil
	defer r.told.apply()
	r.readAt = now
	if got.err != nil {
		r.health.Reading(health.Reading{Err: got.err}, now)
		r.readErr = got.err
		r.readRest.fail(got.err, 0, readPauseMax, now)
		return false
	}
	r.readErr, r.readRest, r.answered = nil, rest{}, true
	inv := r.withMissing(got.inv)
	if r.inv == nil || r.inv.Driver != inv.Driver || !sameGPUs(r.inv, inv) {
		r.epoch++
	}
	for i := range inv.GPUs {
		// What was seen in the middle of a change is not believed.
		if d := &inv.GPUs[i]; r.inv != nil && unsettled(d.UUID, got.began) {
			if old := r.inv.ByUUID(d.UUID); old != nil {
				d.MIG = old.MIG
			}
		}
	}
	r.inv = inv
	r.setTopology()
	r.told.stands(inv)
	r.cards.follow(inv, r.log)
	// As merged: a GPU that the driver cannot name has its name here.
	seen := health.Reading{Load: inv.Load}
	for i := range inv.GPUs {
		g := got.health[inv.GPUs[i].UUID]
		g.Device = inv.GPUs[i]
		seen.GPUs = append(seen.GPUs, g)
	}
	r.health.Reading(seen, now)
	return true
}

// setMIG takes in the MIG side of one GPU, as it is now.
func (r *reader) setMIG(u gpu.UUID, m gpu.MIG) {
	inv := *r.inv
	inv.GPUs = slices.Clone(inv.GPUs)
	inv.ByUUID(u).MIG = m
	r.inv = &inv
	r.told.stands(r.inv)
	r.cards.follow(r.inv, r.log)
	if slices.ContainsFunc(r.health.Verdicts(), func(v health.Verdict) bool { return v.GPU == u && v.GI >= 0 }) {
		r.stale.Store(true) // re-read, so that health drops what it says of a removed instance
	}
}

// setTopology draws up how the GPUs of the inventory are joined.
func (r *reader) setTopology() {
	r.topology = topology.New(r.inv)
	m := r.topology.Matrix()
	r.matrix = &m
	linked := func(d gpu.Device) bool { return d.Lanes > 0 || len(d.Links) > 0 }
	r.links.some.Store(slices.ContainsFunc(r.inv.GPUs, linked))
}

// sameGPUs reports whether two readings have the same GPUs, each as well
// described as in the other.
func sameGPUs(a, b *gpu.Inventory) bool {
	return slices.EqualFunc(a.GPUs, b.GPUs, func(x, y gpu.Device) bool {
		return x.UUID == y.UUID && x.Minor == y.Minor && (x.Fault == "") == (y.Fault == "")
	})
}

// withMissing adds the GPUs that were there before and are not now, with
// that as their fault: their devices must turn unhealthy, not vanish. One that the
// driver lists and cannot name is the one that was at that index.
//
// They stay until the machine boots anew: nothing tells a GPU that was taken out
// from one that fell off the bus. As long as one is missing, the others keep the
// indices that they had, by which partitions may name them: the driver has
// numbered those that are left anew.
func (r *reader) withMissing(inv gpu.Inventory) *gpu.Inventory {
	const gone = "the driver does not list this GPU any more"
	if r.inv != nil {
		for _, d := range r.inv.GPUs {
			if inv.ByUUID(d.UUID) != nil {
				continue
			}
			same := func(n gpu.Device) bool { return n.UUID == "" && n.Index == d.Index }
			if i := slices.IndexFunc(inv.GPUs, same); i >= 0 {
				d.Fault, d.Lost = inv.GPUs[i].Fault, inv.GPUs[i].Lost
				inv.GPUs[i] = d
				continue
			}
			d.Fault, d.Gone = gone, true
			inv.GPUs = append(inv.GPUs, d)
		}
	}
	// Never seen working, so never offered: nothing can be said of it.
	inv.GPUs = slices.DeleteFunc(inv.GPUs, func(d gpu.Device) bool { return d.UUID == "" })
	if r.inv != nil && slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return d.Gone }) {
		keepIndices(r.inv, &inv)
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
func letGoReason(n *agentkube.Node, domain string) string {
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

// mind lets the driver go while the node says so: why is the reason, empty where it may
// be used. To take it back needs a new process: the old driver's library cannot be
// unloaded. The error wraps gpu.ErrReloaded then. Work that is under way comes to its
// end before, and none is begun: a GPU must not be left in the middle of a change.
func (r *reader) mind(why string, working bool) error {
	was := r.letting
	r.letting = ""
	switch {
	case r.letGo == "" && why != "" && working:
		if r.letting = why; was == "" {
			r.log.Info("let the driver go after the work that is under way", "because", why)
		}
	case r.letGo == "" && why != "":
		if err := r.driver.LetGo(); err != nil {
			r.letting = why // nothing is begun meanwhile
			return status.Because(status.DriverFailed, fmt.Errorf("let the driver go: %w", err))
		}
		r.log.Info("let the driver go", "because", why)
		r.letGo = why
		r.readErr = fmt.Errorf("the driver was let go, since %s: %w", why, gpu.ErrNoDriver)
		r.health.Reading(health.Reading{Err: r.readErr}, time.Now())
		r.told.apply()
	case r.letGo != "" && why == "":
		return fmt.Errorf("the driver may be used again: %w", gpu.ErrReloaded)
	}
	return nil
}

// hardware is what is known of the GPUs now.
func (r *reader) hardware() readout {
	return readout{Inventory: r.inv, Topology: r.topology, Matrix: r.matrix, Answered: r.answered,
		Verdicts: r.health.Verdicts(), Hangs: r.hangs()}
}

// usable says whether there is any point in asking the driver for more.
func (r *reader) usable() bool { return r.inv != nil && r.letGo == "" && r.hangs() == "" }

// hangs says since when the driver has not answered, empty while it does. The
// words stay the same for as long as it does not.
func (r *reader) hangs() string {
	what, since := r.health.Waiting()
	if what == "" {
		return ""
	}
	return "the driver has not answered since " + since.UTC().Format(time.RFC3339)
}

// absent says why the driver is not to be had now, zero where it is.
func (r *reader) absent() (none status.Cause) {
	switch {
	case r.letGo != "":
		return status.Why(status.DriverLetGo, "the driver was let go, since %s", r.letGo)
	case r.letting != "":
		return status.Why(status.DriverLetGo, "the driver is to be let go, since %s", r.letting)
	case r.hangs() != "":
		return status.Why(status.GPUDriverHangs, "%s", r.hangs())
	case r.readErr != nil:
		return status.CauseOf(r.readErr, status.DriverFailed)
	}
	return none
}

// links asks for the states of NVLinks, of which the driver tells in no event. follow runs
// beside the loop.
type links struct {
	driver Driver
	// every is Options.LinksEvery.
	every time.Duration
	// some says that some GPUs have NVLinks, up or down.
	some atomic.Bool
	// changed is called when links have failed or come back.
	changed func()
}

// follow looks at the links until ctx ends.
func (l *links) follow(ctx context.Context) error {
	every := time.NewTicker(l.every)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-every.C:
		}
		if !l.some.Load() {
			continue
		}
		asking, cancel := context.WithTimeout(ctx, driverPatience)
		if changed, err := l.driver.LinksChanged(asking); err == nil && changed {
			l.changed()
		}
		cancel()
	}
}

// cards is what can stand on each GPU, of profiles as they were then.
type cards struct {
	of       map[gpu.UUID]*mig.Card // replaced by follow, not changed
	profiles map[gpu.UUID][]gpu.Profile
}

// follow keeps what can stand on each GPU in step with what its driver says.
func (c *cards) follow(inv *gpu.Inventory, log *slog.Logger) {
	of := map[gpu.UUID]*mig.Card{}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if !d.MIG.Capable {
			continue
		}
		if old, ok := c.of[d.UUID]; ok && sameProfiles(c.profiles[d.UUID], d.MIG.Profiles) {
			of[d.UUID] = old
			continue
		}
		card, err := mig.NewCard(&d.MIG)
		if err != nil { // the profiles that are understood may be had
			log.Warn("the driver has MIG profiles that this version does not understand", "gpu", d.UUID, "err", err)
		}
		if old := c.of[d.UUID]; old != nil && old.Known() && !card.Known() {
			// A driver that tells placements only with MIG on: they do not change.
			of[d.UUID] = old
			continue
		}
		of[d.UUID] = card
		c.profiles[d.UUID] = d.MIG.Profiles
	}
	c.of = of
}

func sameProfiles(a, b []gpu.Profile) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Profile) bool {
		return x.Name == y.Name && x.ID == y.ID && x.Max == y.Max && x.Slices == y.Slices &&
			slices.Equal(x.Placements, y.Placements)
	})
}
