// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

// reader reads the hardware and keeps the last reading. A slow reading runs beside the loop. Any
// goroutine may set stale and call again and wasReset; everything else belongs to the loop's
// goroutine. Use newReader.
type reader struct {
	driver Driver
	health *health.Monitor
	// setupWorld is nil if setups are not read.
	setupWorld Setups
	// faults is informed of each reading, after health.
	faults healthListener
	log    *slog.Logger
	// wake starts a round when a reading has ended that no round waits for.
	wake  func()
	links *links
	// stale is true if the next round must read the driver.
	stale atomic.Bool

	// The rest belongs to the loop's goroutine.

	inv      *gpu.Inventory   // nil before anything is known
	topology *topology.Graph  // of inv
	matrix   *topology.Matrix // of topology
	// epoch counts the distinct drivers and sets of GPUs that were read. A new driver may have
	// forgotten earlier settings, and containers may need other files of it.
	epoch     uint64
	reading   *pending  // the one that runs now; nil if none does
	readAt    time.Time // when the last one ended; zero before the first
	answered  bool      // true once one has succeeded
	readErr   error     // why the last one failed, or why the driver was let go; nil otherwise
	readRest  rest      // the pause after failures
	letGo     string    // why the driver was let go; empty while it is not
	letGoNext string    // why it will be let go once no job runs; empty otherwise
	cards     cards     // of inv
	setups    setups    // how the GPUs of inv are set
}

// healthListener is told of each reading, and tells the front-ends about the GPUs' health. faults
// implements it.
type healthListener interface {
	// setInventory takes in the inventory, which tells the instance that a fault's number means.
	setInventory(*gpu.Inventory)
	// apply tells the front-ends the present verdicts.
	apply()
	// isBlind reports whether the driver sends no events.
	isBlind() bool
}

// firstEpoch is the reader's epoch before the first reading.
const firstEpoch = 1

func newReader(o *Options, w *Worlds, monitor *health.Monitor, wake func()) *reader {
	r := &reader{driver: w.Driver, setupWorld: w.Setups, health: monitor, log: o.Log, wake: wake, epoch: firstEpoch,
		cards: cards{of: map[gpu.UUID]*mig.Card{}, profiles: map[gpu.UUID][]gpu.Profile{}}}
	r.links = &links{driver: w.Driver, every: o.LinksEvery, changed: r.again}
	if r.links.every <= 0 {
		r.links.every = inventoryEvery
	}
	return r
}

// again starts a round that reads the hardware. Any goroutine may call it.
func (r *reader) again() {
	r.stale.Store(true)
	r.wake()
}

// wereReset takes in the times at which an operator reset GPUs.
func (r *reader) wereReset(at map[gpu.UUID]time.Time) {
	for u, at := range at {
		if r.health.WasReset(u, at) {
			r.log.Info("an operator reports that a GPU was reset", "gpu", string(u), "at", at)
			r.again()
		}
	}
}

// wasReset takes in that the agent itself has reset a GPU. Any goroutine may call it.
func (r *reader) wasReset(u gpu.UUID) {
	r.health.WasReset(u, time.Now())
	r.again()
}

// restore takes over the GPUs that the last process knew.
func (r *reader) restore(gpus []gpu.Device) {
	r.inv = &gpu.Inventory{GPUs: gpus}
	r.setTopology()
	for i := range gpus {
		r.health.Know(gpus[i].UUID)
	}
}

// reading is the result of reading the hardware once.
type reading struct {
	began  time.Time
	inv    gpu.Inventory
	health map[gpu.UUID]health.GPUReading
	setups setups
	err    error
}

// read asks the driver for everything, for at most driverPatience. It runs beside the loop. before
// are the setups of the last reading, which are renewed more rarely than the rest: from world, if it
// is not nil.
func (r *reader) read(ctx context.Context, before setups, world Setups) reading {
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
	got.setups = readSetups(ctx, world, &inv, before, began, r.log)
	return got
}

// pending is a reading that runs now. The round that began it waits for the result. If that round
// gives up waiting, the end of the reading starts another round.
type pending struct {
	box  chan reading // of size 1
	late atomic.Bool  // true once no round waits for it
}

// look takes in the present hardware. If a reading is due it begins one and waits up to
// lookPatience. It waits for one reading only once: while the driver hangs, the loop goes on with
// the last reading. look reports whether there was a new reading, and returns the error of the last
// one.
//
// unsettled reports whether a reading of a GPU that began at that time is unreliable.
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
		before := r.setups
		before.of = maps.Clone(before.of) // the loop may change its own
		world := r.setupWorld
		if !r.answered {
			world = nil // the kubelet waits for the first offer; take makes a second reading follow
		}
		go func() {
			if p.box <- r.read(ctx, before, world); p.late.Load() {
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
	select { // it may have ended just before late was set
	case got := <-p.box:
		return r.take(got, unsettled, time.Now()), r.lookErr()
	default:
		return false, r.lookErr()
	}
}

// lookErr returns why the present hardware is not known: the error of the last reading, or a
// timeout while the first one runs.
func (r *reader) lookErr() error {
	if r.inv == nil && r.readErr == nil {
		return fmt.Errorf("read the inventory: %w", gpu.ErrTimeout)
	}
	return r.readErr
}

// readDue reports whether the hardware must be read now.
func (r *reader) readDue(now time.Time) bool {
	return r.stale.Load() || !now.Before(r.nextReading(now))
}

// nextReading returns when the hardware is read next if there is no event.
func (r *reader) nextReading(now time.Time) time.Time {
	if r.readAt.IsZero() {
		return now
	}
	if r.readErr != nil {
		return r.readRest.until
	}
	next := r.readAt.Add(inventoryEvery)
	if r.faults.isBlind() {
		next = r.readAt.Add(blindEvery)
	}
	if probe := r.health.Due(now); !probe.IsZero() && probe.Before(next) {
		next = probe
	}
	return next
}

// take puts a reading in force and reports whether it succeeded. A failed one changes only the
// known health of the GPUs.
func (r *reader) take(got reading, unsettled func(gpu.UUID, time.Time) bool, now time.Time) bool {
	r.reading = nil
	defer r.faults.apply()
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
		// A GPU that was read during a change keeps its last MIG state.
		if d := &inv.GPUs[i]; r.inv != nil && unsettled(d.UUID, got.began) {
			if old := r.inv.ByUUID(d.UUID); old != nil {
				d.MIG = old.MIG
			}
		}
	}
	r.inv, r.setups = inv, got.setups
	if r.setupWorld != nil && r.setups.at.IsZero() {
		r.again()
	}
	r.setTopology()
	r.faults.setInventory(inv)
	r.cards.follow(inv, r.log)
	// These are the merged GPUs: a GPU that the driver cannot name has its name here.
	seen := health.Reading{Load: inv.Load}
	for i := range inv.GPUs {
		g := got.health[inv.GPUs[i].UUID]
		g.Device = inv.GPUs[i]
		seen.GPUs = append(seen.GPUs, g)
	}
	r.health.Reading(seen, now)
	return true
}

// setMIG takes in the present MIG state of one GPU.
func (r *reader) setMIG(u gpu.UUID, m gpu.MIG) {
	inv := *r.inv
	inv.GPUs = slices.Clone(inv.GPUs)
	inv.ByUUID(u).MIG = m
	r.inv = &inv
	r.faults.setInventory(r.inv)
	r.cards.follow(r.inv, r.log)
	if slices.ContainsFunc(r.health.Verdicts(), func(v health.Verdict) bool { return v.GPU == u && v.GI >= 0 }) {
		r.stale.Store(true) // read again, so that health drops its verdicts on a removed instance
	}
}

// setTopology works out how the GPUs of the inventory are connected.
func (r *reader) setTopology() {
	r.topology = topology.New(r.inv)
	m := r.topology.Matrix()
	r.matrix = &m
	linked := func(d gpu.Device) bool { return d.Lanes > 0 || len(d.Links) > 0 }
	r.links.some.Store(slices.ContainsFunc(r.inv.GPUs, linked))
}

// sameGPUs reports whether two readings have the same GPUs: equal UUIDs and minor numbers, and each
// with a fault in both or in neither.
func sameGPUs(a, b *gpu.Inventory) bool {
	return slices.EqualFunc(a.GPUs, b.GPUs, func(x, y gpu.Device) bool {
		return x.UUID == y.UUID && x.Minor == y.Minor && (x.Fault == "") == (y.Fault == "")
	})
}

// withMissing adds the GPUs of the last reading that inv lacks, marked as gone: their devices must
// turn unhealthy, not vanish. If the driver lists a GPU but cannot name it, it is the one that had
// that index before.
//
// Missing GPUs stay until the machine boots again, since a GPU that was taken out looks like one
// that fell off the bus. While one is missing, the driver numbers the others anew. The
// agent then gives the others their earlier indices, because partitions may name GPUs by index.
func (r *reader) withMissing(inv gpu.Inventory) *gpu.Inventory {
	const gone = "the driver no longer lists this GPU"
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
	// The agent never saw these GPUs work, so it never offered them, and knows nothing about them.
	inv.GPUs = slices.DeleteFunc(inv.GPUs, func(d gpu.Device) bool { return d.UUID == "" })
	if r.inv != nil && slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return d.Gone }) {
		keepIndices(r.inv, &inv)
	}
	return &inv
}

// keepIndices gives known GPUs their earlier indices, and new ones the next free indices.
func keepIndices(old, inv *gpu.Inventory) {
	taken := map[int]bool{}
	for _, d := range old.GPUs {
		taken[d.Index] = true
	}
	next := 0
	moved := map[int]int{} // from the driver's index to ours, for GPUs that it lists
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
			d.Links = nil // they are unknown
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

// Labels and values by which NVIDIA's GPU operator announces that a node's driver is about to be
// unloaded. Its upgrade controller sets the first label. Its driver manager pauses each component
// that has the driver open, in labels with the second prefix: of a value other than "true" it makes
// <value>_paused-for-driver-upgrade, so that it can restore it.
const (
	upgradeLabel  = "nvidia.com/gpu-driver-upgrade-state"
	operandPrefix = "nvidia.com/gpu.deploy."
	operandPaused = "paused-for-driver-upgrade"
)

var upgradeStates = []string{"drain-required", "node-maintenance-required", "pod-restart-required"}

// letGoReason returns why the driver must be let go, or "" if it may be used.
func letGoReason(n *agentkube.Node, domain string) string {
	if v := n.Labels[upgradeLabel]; slices.Contains(upgradeStates, v) {
		return fmt.Sprintf("the node's label %s is %s", upgradeLabel, v)
	}
	for _, k := range sortedKeys(n.Labels) {
		if v := n.Labels[k]; strings.HasPrefix(k, operandPrefix) && strings.Contains(v, operandPaused) {
			return fmt.Sprintf("the node's label %s is %s", k, v)
		}
	}
	if own := domain + "/" + ReleaseLabel; n.Unschedulable && n.Labels[own] == "true" {
		return "the node is cordoned and its label " + own + " is true"
	}
	return ""
}

// followLetGo lets the driver go if why is not empty. If jobs run, it waits for their end, since a
// GPU must not be left in the middle of a change, and no new ones begin. When why is empty again it
// returns an error that wraps gpu.ErrReloaded: a process cannot unload the old driver's library, so
// only a new one can use the driver. It also fails if the driver cannot be let go.
func (r *reader) followLetGo(why string, working bool) error {
	was := r.letGoNext
	r.letGoNext = ""
	switch {
	case r.letGo == "" && why != "" && working:
		if r.letGoNext = why; was == "" {
			r.log.Info("let the driver go after the work that is under way", "because", why)
		}
	case r.letGo == "" && why != "":
		if err := r.driver.LetGo(); err != nil {
			r.letGoNext = why // no job begins meanwhile
			return status.Because(status.DriverFailed, fmt.Errorf("let the driver go: %w", err))
		}
		r.log.Info("let the driver go", "because", why)
		r.letGo = why
		r.readErr = fmt.Errorf("the driver was let go, since %s: %w", why, gpu.ErrNoDriver)
		r.health.Reading(health.Reading{Err: r.readErr}, time.Now())
		r.faults.apply()
	case r.letGo != "" && why == "":
		return fmt.Errorf("the driver may be used again: %w", gpu.ErrReloaded)
	}
	return nil
}

// hardware returns what is known of the GPUs now.
func (r *reader) hardware() readout {
	return readout{Inventory: r.inv, Topology: r.topology, Matrix: r.matrix, Answered: r.answered,
		Verdicts: r.health.Verdicts(), Hangs: r.hangs()}
}

// usable reports whether the driver can be expected to answer.
func (r *reader) usable() bool { return r.inv != nil && r.letGo == "" && r.hangs() == "" }

// hangs returns since when the driver has not answered, or "" while it does. The text stays the
// same as long as it does not.
func (r *reader) hangs() string {
	what, since := r.health.Waiting()
	if what == "" {
		return ""
	}
	return "the driver has not answered since " + since.UTC().Format(time.RFC3339)
}

// absent returns why the driver cannot be used now, or zero if it can.
func (r *reader) absent() (none status.Cause) {
	switch {
	case r.letGo != "":
		return status.Why(status.DriverLetGo, "the driver was let go, since %s", r.letGo)
	case r.letGoNext != "":
		return status.Why(status.DriverLetGo, "the driver is to be let go, since %s", r.letGoNext)
	case r.hangs() != "":
		return status.Why(status.GPUDriverHangs, "%s", r.hangs())
	case r.readErr != nil:
		return status.CauseOf(r.readErr, status.DriverFailed)
	}
	return none
}

// links watches the states of NVLinks. The driver sends no events for these. follow runs beside the
// loop.
type links struct {
	driver Driver
	// every is Options.LinksEvery.
	every time.Duration
	// some is true if a GPU has NVLinks, up or down.
	some atomic.Bool
	// changed is called when links have failed or recovered.
	changed func()
}

// follow checks the links until ctx ends.
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

// cards has, for each GPU, which MIG instances can exist side by side.
type cards struct {
	of       map[gpu.UUID]*mig.Card // follow replaces it and never changes it
	profiles map[gpu.UUID][]gpu.Profile
}

// follow updates the cards of GPUs whose MIG profiles have changed.
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
		if err != nil { // the profiles that it understands can be used
			log.Warn("the driver has MIG profiles that this version does not understand", "gpu", d.UUID, "err", err)
		}
		if old := c.of[d.UUID]; old != nil && old.Known() && !card.Known() {
			// This driver reports placements only while MIG is on. They do not change.
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
