// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/plugin"
	"example.com/gpu-agent/pkg/timeslice"
)

// How often the loop looks when nobody wakes it, and how long it waits for
// others.
const (
	// inventoryEvery is how long a reading of the driver is believed. Events
	// and changes of the partition cut it short.
	inventoryEvery = time.Minute
	// holdersEvery is how often the kubelet is asked who holds what, while
	// anybody does; the device-plugin API has no word for "freed".
	holdersEvery = 5 * time.Second
	// holdersSoon is the same while a change waits for a holder to end.
	holdersSoon = time.Second
	// driverPatience bounds a reading of the driver. Look-ups take up to five
	// seconds on a B200 with many instances.
	driverPatience = 10 * time.Second
	// kubeletPatience bounds a PodResources call.
	kubeletPatience = 2 * time.Second
	// answerTime is what the kubelet gets of the processor after a grant, before
	// the claim's file is written. Nobody waits for it: the sandbox is made
	// first, and then PreStartContainer wakes the loop at once.
	answerTime = 20 * time.Millisecond
	// backOffMin and backOffMax bound the pause after a failed round.
	backOffMin, backOffMax = time.Second, 30 * time.Second
)

// Driver is what the loop needs of the hardware. pkg/gpu/nvml has it.
type Driver interface {
	Inventory(context.Context) (gpu.Inventory, error)
	Parts(context.Context) (cdi.Parts, error)
	// Events blocks and calls back for every event until ctx ends.
	Events(context.Context, func(gpu.Event)) error
	// SetTimeSlice wraps gpu.ErrNotSupported where the card or the driver's
	// tool cannot.
	SetTimeSlice(context.Context, gpu.UUID, gpu.TimeSlice) error
}

// Files is the directory of CDI files. pkg/cdi/dir has it.
type Files interface {
	Write(key string, spec *specs.Spec) error
	Remove(key string) error
	List() ([]string, error)
	Read(key string) (*specs.Spec, error)
}

// Kubelet lists holders. internal/node has it.
type Kubelet interface {
	List(context.Context) (node.Listing, error)
}

// Plugins serves resources to the kubelet. plugin.Kubelet is one.
type Plugins interface {
	// Set makes these the resources that are served.
	Set(map[string]plugin.Source) error
}

// State is the outcome of a partition on the node.
type State string

// States, as the node's label has them.
const (
	Applied State = "applied"
	Pending State = "pending"
	Waiting State = "blocked"
	Failed  State = "failed"
	Invalid State = "invalid"
)

// Outcome is what the loop reports of the partition in force.
type Outcome struct {
	Partition string
	State     State
	// Message says what blocks or failed, with file and line where the file is
	// at fault. Empty when applied without a remark.
	Message string
}

// Observer is told of what happens; it must not block. internal/obs stands
// behind it.
type Observer interface {
	// GPUEvent is called for every event of the driver.
	GPUEvent(gpu.Event)
	// Round is called after every round.
	Round(err error, took time.Duration)
}

// Options configure an Agent.
type Options struct {
	// Domain names labels, annotations and the CDI vendor.
	Domain string
	// ResourceDomain names the resources.
	ResourceDomain string
	// MemoryUnit is the size of one gpu-mem unit.
	MemoryUnit gpu.MiB
	// KeepOffering leaves idle devices of a GPU whose change waits for holders
	// on offer (--when-busy wait).
	KeepOffering bool
	// Pod is the agent's own. A listing that lacks it is not believed when it
	// comes to ending claims. Empty outside a pod: then any listing that names
	// some pod is believed.
	Pod node.PodName
	// Cluster, if set, is told of the outcome.
	Cluster  Cluster
	Plugins  Plugins
	Observer Observer
	Log      *slog.Logger
}

// Agent is the loop and what it remembers. Use [New].
type Agent struct {
	opts    Options
	names   *Names
	driver  Driver
	files   Files
	kubelet Kubelet
	desk    *desk.Desk
	log     *slog.Logger

	// trigger holds at most one token: somebody wants a round.
	trigger chan struct{}
	// soon says that wakeSoon has a round coming.
	soon atomic.Bool
	// news wakes report; it holds at most one token.
	news chan struct{}
	// stale says that the driver is to be read anew in the next round.
	stale atomic.Bool

	inputMu sync.Mutex
	input   input // guarded by inputMu

	// snapshot is what Status shows: what the last round left.
	snapshot atomic.Pointer[Snapshot]

	// The rest belongs to the loop's goroutine.

	inv       *gpu.Inventory
	invAt     time.Time
	parts     *cdi.Parts
	partsErr  error
	partsDue  bool      // the driver or its GPUs are not those that parts are of
	usedAt    time.Time // when the kubelet was last asked who holds what
	wanted    []config.Want
	wantedGen uint64
	partition string
	cuts      map[gpu.UUID]Cut
	past      map[gpu.UUID][]pastCut
	slices    map[gpu.UUID]slice
	serving   map[string]plugin.Source
	outcome   Outcome
	heard     bool // see Snapshot.Heard
	swept     bool
}

// input is the news from outside, by value.
type input struct {
	// source is the newest file's name, whether it parsed or not.
	source string
	// file is the newest partition file that parsed; nil before the first.
	file *config.File
	// fileErr is why the newest one did not.
	fileErr error
	// chosen is the node label's value; "" where there is none.
	chosen string
	// labelKnown is false until the node has been seen, where there is one.
	labelKnown bool
}

// Snapshot is what a round left, for status and metrics. It is immutable.
type Snapshot struct {
	Inventory *gpu.Inventory
	Cuts      map[gpu.UUID]Cut
	Wanted    []config.Want
	Blocked   []Blocked
	Outcome   Outcome
	// Source is where the partition file came from; Generation counts the
	// changes of what is wanted since the start.
	Source     string
	Generation uint64
	At         time.Time
	// Heard says that partitions and label have been heard of, if only that
	// there are none: from then on the outcome is worth telling.
	Heard bool
	// Err is what went wrong in the round, nil if nothing did.
	Err error
}

// New returns an agent that has not looked at anything yet. waitForLabel says
// that somebody will call SetNodeLabel: until then no partition is chosen.
func New(o Options, driver Driver, files Files, kubelet Kubelet, waitForLabel bool) *Agent {
	a := &Agent{
		opts:    o,
		names:   ResourceNames(o.ResourceDomain),
		driver:  driver,
		files:   files,
		kubelet: kubelet,
		log:     o.Log,
		trigger: make(chan struct{}, 1),
		news:    make(chan struct{}, 1),
		input:   input{labelKnown: !waitForLabel},
		cuts:    map[gpu.UUID]Cut{},
		past:    map[gpu.UUID][]pastCut{},
		slices:  map[gpu.UUID]slice{},
		serving: map[string]plugin.Source{},
		outcome: Outcome{State: Pending, Message: "starting"},
	}
	a.desk = desk.New(a.wake, time.Now)
	a.snapshot.Store(&Snapshot{Inventory: &gpu.Inventory{}, Outcome: a.outcome})
	return a
}

// wake asks for a round.
func (a *Agent) wake() {
	select {
	case a.trigger <- struct{}{}:
	default:
	}
}

// wakeSoon asks for a round after answerTime, for all who ask meanwhile, unless
// PreStartContainer has had one by then.
func (a *Agent) wakeSoon() {
	if a.soon.CompareAndSwap(false, true) {
		time.AfterFunc(answerTime, func() {
			a.soon.Store(false)
			if a.desk.Waiting() {
				a.wake()
			}
		})
	}
}

// SetFile hands in the partition file as it now is. A file that does not parse
// changes nothing but the outcome: the last good one stays in force.
func (a *Agent) SetFile(name string, data []byte) {
	f, err := config.Parse(name, data)
	a.setInput(func(in *input) {
		in.source, in.fileErr = name, err
		if err == nil {
			in.file = f
		}
	})
}

// SetFileMissing says that there is no partition file, and why. What was in
// force stays.
func (a *Agent) SetFileMissing(err error) {
	a.setInput(func(in *input) { in.fileErr = err })
}

// SetNodeLabel says which partition the node's label chooses, "" for none.
func (a *Agent) SetNodeLabel(partition string) {
	a.setInput(func(in *input) { in.chosen, in.labelKnown = partition, true })
	a.tell() // a node that was made anew has lost what we wrote on it
}

func (a *Agent) setInput(change func(*input)) {
	a.inputMu.Lock()
	change(&a.input)
	a.inputMu.Unlock()
	a.wake()
}

// Claims returns the claims as they are now, in key order.
func (a *Agent) Claims() []desk.Claim { return a.desk.Claims() }

// View returns what the kubelet is told of now.
func (a *Agent) View() *desk.View { return a.desk.View() }

// Run is the loop. It returns the error of ctx when that ends.
func (a *Agent) Run(ctx context.Context) error {
	a.adoptFiles()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// Not waited for at the end: a wait inside the driver cannot be cut
		// short, and the process may end without it.
		ended := make(chan error, 1)
		go func() { ended <- a.followDriver(ctx) }()
		select {
		case err := <-ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if a.opts.Cluster != nil {
		g.Go(func() error { return a.report(ctx, a.opts.Cluster) })
	}
	g.Go(func() error {
		pause := backOffMin
		for {
			began := time.Now()
			err := a.round(ctx)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			a.opts.Observer.Round(err, time.Since(began))
			wait := a.nextLook(time.Now())
			if err != nil {
				a.log.Error("round failed", "err", err, "again_in", pause.String())
				wait = pause // and not sooner: what failed may be what makes wait short
				pause = min(2*pause, backOffMax)
			} else {
				pause = backOffMin
			}
			timer := time.NewTimer(wait)
			select {
			case <-ctx.Done():
				timer.Stop()
				return ctx.Err()
			case <-a.trigger:
				timer.Stop()
			case <-timer.C:
			}
		}
	})
	return g.Wait()
}

// nextLook says how long the loop may sleep if nobody wakes it.
func (a *Agent) nextLook(now time.Time) time.Duration {
	wait := inventoryEvery - now.Sub(a.invAt)
	if a.desk.Held() {
		wait = min(wait, holdersEvery-now.Sub(a.usedAt))
	}
	if len(a.snapshot.Load().Blocked) > 0 {
		wait = min(wait, holdersSoon-now.Sub(a.usedAt))
	}
	for _, cuts := range a.past {
		for _, p := range cuts {
			wait = min(wait, p.until.Sub(now))
		}
	}
	return max(wait, 0)
}

// holdersDue says whether the kubelet is to be asked who holds what: always
// before a GPU is cut anew, and now and then. A round that a claim has woken
// does without: it has the claim.
func (a *Agent) holdersDue(now time.Time, changes *Changes) bool {
	switch since := now.Sub(a.usedAt); {
	case len(changes.Recut) > 0, a.usedAt.IsZero():
		return true
	case len(changes.Blocked) > 0:
		return since >= holdersSoon
	default:
		return a.desk.Held() && since >= holdersEvery
	}
}

// followDriver passes the driver's events on. Where the driver cannot tell of
// events, the slow tick must do.
func (a *Agent) followDriver(ctx context.Context) error {
	pause := backOffMin
	for {
		err := a.driver.Events(ctx, func(e gpu.Event) {
			a.log.Warn("GPU event", "kind", string(e.Kind), "gpu", string(e.GPU), "xid", e.Xid)
			a.opts.Observer.GPUEvent(e)
			a.stale.Store(true)
			a.wake()
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			a.log.Warn("the driver tells of no events; faults are seen at the next reading", "err", err, "every", inventoryEvery.String())
			<-ctx.Done()
			return ctx.Err()
		}
		a.log.Warn("lost the driver's events", "err", err, "again_in", pause.String())
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, backOffMax)
	}
}

// round is one look at everything and what follows from it.
func (a *Agent) round(ctx context.Context) error {
	in := a.heardSoFar()
	a.heard = in.labelKnown && (in.file != nil || in.fileErr != nil)
	var errs []error
	if err := a.look(ctx); err != nil {
		errs = append(errs, err)
	}
	if a.inv == nil {
		a.finish(nil, Outcome{Partition: a.partition, State: Failed, Message: errors.Join(errs...).Error()}, errors.Join(errs...))
		return errors.Join(errs...)
	}
	note, configErr := a.resolve()
	claims := a.desk.Claims()
	changes := a.plan(claims)
	if a.holdersDue(time.Now(), &changes) {
		if err := a.reconcile(ctx); err != nil {
			errs = append(errs, err)
		}
		claims = a.desk.Claims()
		changes = a.plan(claims)
	}
	if a.offersAny(changes.Recut) {
		// Withdraw first, then look again: whoever claimed before the
		// withdrawal keeps the GPU as it is.
		a.publish(viewInput{changes: &Changes{Cuts: a.cuts, Blocked: changes.Blocked}, recutting: changes.Recut})
		claims = a.desk.Claims()
		changes = a.plan(claims)
	}
	a.settle(&changes)
	// Not before somebody can need them: the partitions may arrive meanwhile.
	if a.partsDue && (a.wanted != nil || a.desk.Held()) {
		// It takes a while to learn the parts. A fault is told before that, and
		// so is what a new process offers: a container that comes meanwhile
		// waits for its claim's file.
		if err := a.serve(a.publish(viewInput{changes: &changes})); err != nil {
			errs = append(errs, err)
		}
		if err := a.learnParts(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	hwNote, err := a.setTimeSlices(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	if err := a.writeClaims(a.desk.Claims()); err != nil {
		errs = append(errs, err)
	}
	v := a.publish(viewInput{changes: &changes})
	if err := a.serve(v); err != nil {
		errs = append(errs, err)
	}
	if err := a.sweep(); err != nil {
		errs = append(errs, err)
	}

	err = errors.Join(errs...)
	a.finish(changes.Blocked, a.judge(note, hwNote, configErr, err, &changes), err)
	return err
}

// look reads the driver if the last reading is old or something happened. On
// failure the last reading stays.
func (a *Agent) look(ctx context.Context) error {
	now := time.Now()
	stale := a.stale.Swap(false)
	if a.inv != nil && !stale && now.Sub(a.invAt) < inventoryEvery {
		return nil
	}
	cctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	inv, err := a.driver.Inventory(cctx)
	if err != nil {
		a.stale.Store(true)
		return fmt.Errorf("read the inventory: %w", err)
	}
	if err := timeslice.CheckUnit(a.opts.MemoryUnit, inv.GPUs); err != nil {
		return err
	}
	if a.inv == nil || a.inv.Driver != inv.Driver || !sameGPUs(a.inv, &inv) {
		a.partsDue = true
	}
	a.inv, a.invAt = keepMissing(a.inv, inv), now
	return nil
}

// learnParts asks the driver what containers need of it. On failure what was
// learnt before stays, and the next round asks again.
func (a *Agent) learnParts(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	parts, err := a.driver.Parts(ctx)
	if a.partsErr = err; err != nil {
		return fmt.Errorf("learn which driver files containers need: %w", err)
	}
	a.parts, a.partsDue = &parts, false
	for _, c := range a.desk.Claims() {
		a.desk.Shut(c.Key) // written again below, if the files differ
	}
	return nil
}

// sameGPUs reports whether two readings have the same GPUs, each as healthy as
// in the other.
func sameGPUs(a, b *gpu.Inventory) bool {
	return slices.EqualFunc(a.GPUs, b.GPUs, func(x, y gpu.Device) bool {
		return x.UUID == y.UUID && x.Minor == y.Minor && (x.Fault == "") == (y.Fault == "")
	})
}

// keepMissing adds the GPUs that were there before and are not any more, with
// that as their fault: their devices must turn unhealthy, not vanish.
func keepMissing(old *gpu.Inventory, inv gpu.Inventory) *gpu.Inventory {
	if old != nil {
		for _, d := range old.GPUs {
			if inv.ByUUID(d.UUID) == nil {
				d.Fault = "the driver does not list this GPU any more"
				inv.GPUs = append(inv.GPUs, d)
			}
		}
	}
	return &inv
}

// resolve works out what is wanted. note is a remark for the outcome; err says
// why the newest word is not in force.
func (a *Agent) resolve() (note string, err error) {
	in := a.heardSoFar()
	if in.file == nil {
		return "no partition file yet: nothing is offered", in.fileErr
	}
	if !in.labelKnown {
		return "waiting for the node's labels", nil
	}
	name := in.chosen
	if name == "" {
		if !slices.Contains(in.file.Names(), "default") {
			return "the node has no partition label and the file no partition \"default\": nothing changes", in.fileErr
		}
		name = "default"
	}
	a.partition = name
	d, err := in.file.Desire(name, a.inv)
	if err != nil {
		return "", errors.Join(in.fileErr, err)
	}
	if !slices.EqualFunc(a.wanted, d.GPUs, config.Want.Equal) {
		a.wantedGen++
	}
	a.wanted = d.GPUs
	return "", in.fileErr
}

func (a *Agent) heardSoFar() input {
	a.inputMu.Lock()
	defer a.inputMu.Unlock()
	return a.input
}

func (a *Agent) plan(claims []desk.Claim) Changes {
	return Plan(a.inv, claims, a.wanted, a.cuts, a.names, a.opts.MemoryUnit)
}

// offersAny reports whether any of these GPUs has devices to withdraw.
func (a *Agent) offersAny(gpus []gpu.UUID) bool {
	return slices.ContainsFunc(gpus, func(u gpu.UUID) bool { return a.cuts[u].Offers })
}

// settle makes the planned cuts the ones in force, and remembers what they
// replace until the kubelet may forget it.
func (a *Agent) settle(changes *Changes) {
	now := time.Now()
	for _, u := range changes.Recut {
		old := a.cuts[u]
		if old.Offers {
			a.past[u] = append(a.past[u], pastCut{cut: old, until: now.Add(Linger)})
		}
		a.log.Info("cut", "gpu", u, "from", old.mode(), "to", changes.Cuts[u].mode(), "devices", changes.Cuts[u].N)
	}
	for u, cuts := range a.past {
		if cuts = slices.DeleteFunc(cuts, func(p pastCut) bool { return !p.until.After(now) }); len(cuts) > 0 {
			a.past[u] = cuts
		} else {
			delete(a.past, u)
		}
	}
	a.cuts = changes.Cuts
}

func (a *Agent) publish(in viewInput) *desk.View {
	in.inv, in.past, in.names, in.drain = a.inv, a.past, a.names, !a.opts.KeepOffering
	if a.parts == nil && a.partsErr != nil {
		in.closed = a.partsErr.Error()
	}
	return a.desk.Publish(func(claims []desk.Claim) *desk.View {
		in.claims = claims
		return buildView(in)
	})
}

// serve starts the device plugins of resources that are on offer for the first
// time. None is ever stopped: see desk.View.
func (a *Agent) serve(v *desk.View) error {
	if len(v.Resources) == len(a.serving) {
		return nil
	}
	for _, r := range v.Resources {
		if a.serving[r.Name] == nil {
			a.serving[r.Name] = &source{desk: a.desk, domain: a.opts.Domain, resource: r.Name, granted: a.wakeSoon}
		}
	}
	return a.opts.Plugins.Set(a.serving)
}

// judge puts the round into one word and a sentence.
func (a *Agent) judge(note, hwNote string, configErr, err error, changes *Changes) Outcome {
	o := Outcome{Partition: a.partition, State: Applied, Message: hwNote}
	switch {
	case configErr != nil:
		o.State, o.Message = Invalid, configErr.Error()
		if a.wanted != nil {
			o.Message += "; the last good partition stays in force"
		}
	case err != nil:
		o.State, o.Message = Failed, err.Error()
	case len(changes.Refused) > 0:
		o.State, o.Message = Failed, strings.Join(changes.Refused, "; ")
	case len(changes.Blocked) > 0:
		o.State = Waiting
		parts := make([]string, len(changes.Blocked))
		for i, b := range changes.Blocked {
			parts[i] = b.String()
		}
		o.Message = strings.Join(parts, "; ")
	case note != "":
		o.State, o.Message = Pending, note
	}
	return o
}

// finish publishes what people see.
func (a *Agent) finish(blocked []Blocked, o Outcome, err error) {
	changed := o != a.outcome || a.heard != a.snapshot.Load().Heard
	a.outcome = o
	inv := a.inv
	if inv == nil {
		inv = &gpu.Inventory{}
	}
	a.snapshot.Store(&Snapshot{Inventory: inv, Cuts: a.cuts, Wanted: a.wanted, Blocked: blocked, Outcome: o,
		Source: a.heardSoFar().source, Generation: a.wantedGen, At: time.Now(), Heard: a.heard, Err: err})
	if changed {
		a.log.Info("partition", "name", o.Partition, "state", string(o.State), "message", o.Message)
		a.tell()
	}
}
