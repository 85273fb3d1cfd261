// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/door"
)

const (
	// eventGrace is how long Events waits for a wait that outlasts its own
	// time before it calls that a hang.
	eventGrace = 5 * time.Second
	// registerWait bounds the registration of all GPUs.
	registerWait = 30 * time.Second
	// retryMost spaces attempts while the driver fails, or Options.Rearm does
	// where that is less.
	retryMost = 5 * time.Second
	// lookWait bounds the look at which GPUs are lost, once the driver has said
	// that some are.
	lookWait = time.Second
	// renewWait bounds how long a new initialisation waits for a call that is
	// inside the door. Nothing is heard meanwhile.
	renewWait = time.Second
	// hurriedWait is the longest wait for events for hurryFor after somebody had to
	// wait for one.
	hurriedWait = 250 * time.Millisecond
	hurryFor    = time.Minute
	// nameWait bounds the question which GPU an event is about, where the driver
	// names it by a handle that was not registered.
	nameWait = 100 * time.Millisecond
)

// Events calls report for each critical error (Xid) that the driver reports of
// any GPU, one after the other, until ctx ends or the Driver is closed; then it
// returns nil. A GPU that cannot report events is logged once and left out. What
// happens while GPUs are registered again, some milliseconds, goes unheard.
//
// Where the driver itself says that it lost a GPU, report is called at once with
// a gpu.EventLost for each GPU of which it says so when asked; so it is for each
// that is found lost when the GPUs are registered. Where the driver says so of
// none, or fails altogether, or cannot tell the name of a lost GPU any more, the
// event names no GPU: the inventory tells more. Events goes on with what is left,
// and tries again later.
//
// Where GPUs have come or gone, or the driver answers again, the driver is
// initialised anew and report is called with a gpu.EventChanged: an inventory
// read from then on has them. That takes as long as the wait that is under way
// (Options.EventWait) and less than a second more.
//
// Calls of the Driver's other methods delay none of this, not even if they hang,
// but for a new initialisation.
//
// It returns an error that wraps gpu.ErrTimeout if a wait inside the driver
// hangs when it should end, and one that wraps gpu.ErrNotSupported if the driver has no
// events: faults, and GPUs that come and go, are then found by reading. Only one Events
// runs at a time; another waits for the first one's end.
func (d *Driver) Events(ctx context.Context, report func(gpu.Event)) error {
	d.watching.Lock()
	defer d.watching.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	changes := d.follow(ctx, d.seen)
	defer func() {
		cancel()
		for range changes { // until it has ended
		}
	}()
	defer context.AfterFunc(d.stopped, cancel)()

	retryAfter := min(retryMost, d.opts.Rearm)
	w := watch{Driver: d, report: report, changes: changes, told: d.seen}
	var lastFailure time.Time
	for ctx.Err() == nil {
		now, before := w.seen, w.gpus
		if w.anew {
			now = d.hardware()
		}
		renewed, err := w.arm(ctx)
		if ctx.Err() != nil || w.stopped.Err() != nil {
			if err == nil {
				d.disarm(w.armed)
			}
			break
		}
		if renewed {
			d.seen = now
		}
		// Another call may stand in the way of a new initialisation: the GPUs that
		// were known are watched meanwhile.
		w.putOff = w.anew && !renewed && err == nil
		if w.changed && !w.putOff || err == nil && w.started && grown(before, w.gpus) {
			w.tell(now)
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			return fmt.Errorf("watch the GPUs for errors: %w", err)
		}
		if err != nil {
			// What was watched before does not count: it is news when it answers.
			w.anew, w.armed, w.started = true, armed{}, true
			d.log.Warn("cannot watch the GPUs for errors; trying again", "err", d.explained(err), "after", retryAfter)
			w.pause(ctx, retryAfter)
			continue
		}
		w.started = true
		w.tellLost()
		why, err := w.run(ctx)
		if err != nil {
			return err
		}
		d.disarm(w.armed)
		if errors.Is(why.failure, gpu.ErrNotSupported) {
			return fmt.Errorf("watch the GPUs for errors: %w", why.failure)
		}
		// A driver that fails for another reason than a lost GPU may have been
		// loaded again under us.
		otherwise := why.failure != nil && !errors.Is(why.failure, gpu.ErrLost)
		w.anew = otherwise || w.changed || why.due && (w.putOff || d.stale.Load())
		if why.due || why.asked || w.anew {
			w.lost = nil // try all of them
		}
		if why.failure != nil && ctx.Err() == nil {
			d.log.Warn("the driver failed while watching the GPUs", "err", d.explained(why.failure), "lost", why.lost)
			// The first time, and as long as it can be said which GPU it is, the
			// others are watched again at once: one loss must not hide what happens
			// to them.
			if len(why.lost) == 0 && time.Since(lastFailure) < retryAfter {
				w.pause(ctx, retryAfter)
			}
			lastFailure = time.Now()
		}
	}
	return nil
}

// grown says whether GPUs are watched that were not before.
func grown(before, now map[nvml.Device]gpu.UUID) bool {
	had := slices.Collect(maps.Values(before))
	for _, u := range now {
		if !slices.Contains(had, u) {
			return true
		}
	}
	return false
}

// armed is a set of GPUs that the driver reports events of.
type armed struct {
	set     nvml.EventSet
	gpus    map[nvml.Device]gpu.UUID
	order   []nvml.Device // of gpus, by index
	missing bool          // some GPU that may report events later is not in it
	absent  []loss        // of those, the ones that the driver says it lost, by index
}

// loss is a GPU that the driver says is lost: by its UUID, or by its index if the UUID
// is not known.
type loss struct {
	gpu   gpu.UUID
	index int
}

// watch is what Events knows from one registration of the GPUs to the next.
type watch struct {
	*Driver
	armed
	report  func(gpu.Event)
	changes <-chan string // what the hardware has become
	told    string        // the hardware at the last gpu.EventChanged

	started bool              // the GPUs have been registered before, or could not be
	anew    bool              // the driver is to be initialised anew before the next registration
	putOff  bool              // that could not be done
	changed bool              // the hardware is another since told
	lost    map[gpu.UUID]bool // left out of the next registration
	gone    map[loss]bool     // reported as lost, and not registered since
}

// tellLost reports the GPUs that were found lost when they were to be
// registered, each once: what happened while nothing was heard of them.
func (w *watch) tellLost() {
	gone := map[loss]bool{}
	for _, l := range w.absent {
		if gone[l] = true; !w.gone[l] {
			w.report(gpu.Event{Kind: gpu.EventLost, GPU: l.gpu, GI: -1, CI: -1})
		}
	}
	w.gone = gone
}

// tell reports that the hardware changed, and is now so.
func (w *watch) tell(now string) {
	w.changed, w.told = false, now
	w.report(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
}

// pause waits, but not when the hardware changes.
func (w *watch) pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	case now, ok := <-w.changes:
		w.anew, w.changed = true, w.changed || ok && now != w.told
	}
}

// arm registers all GPUs but those known to be lost, in the room of those who
// wait: another call that hangs does not keep it out. Only a new initialisation
// must wait for that call, and is left out if that takes long. Whoever has the
// library alone is waited for.
func (w *watch) arm(ctx context.Context) (renewed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	const what = "watch the GPUs"
	d, lost := w.Driver, w.lost
	if w.anew {
		if renewed, err = d.tryRenew(ctx); err != nil {
			return renewed, err
		}
	}
	for {
		// The place is taken inside the door: there it is known whether what
		// follows happens, also when this caller has left.
		if err := d.sets.Join(ctx); err != nil {
			return renewed, fmt.Errorf("%s: %w", what, err)
		}
		d.sets.Part()
		var a armed
		a, err = door.Through(ctx, d.waits, what, open(d.session, what, func() (armed, error) {
			if !d.sets.TryJoin() {
				return armed{}, errNotAlone
			}
			a, err := d.register(lost)
			if err != nil {
				d.sets.Part()
			}
			return a, err
		}), func(a armed) {
			a.set.Free()
			d.sets.Part()
		})
		if errors.Is(err, errNotAlone) {
			continue
		}
		if err == nil {
			w.armed = a
		}
		return renewed, err
	}
}

// errNotAlone says that somebody else has the library alone.
var errNotAlone = errors.New("somebody has the library alone")

// tryRenew initialises the driver anew if it can enter the door soon.
func (d *Driver) tryRenew(ctx context.Context) (renewed bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var inside atomic.Bool
	defer time.AfterFunc(renewWait, func() {
		if !inside.Load() {
			cancel()
		}
	}).Stop()
	const what = "initialise the driver anew"
	const asBefore = "cannot initialise the driver anew; watching the GPUs as they were known"
	if !d.outside.TrySeize() { // there are handles that would end
		d.log.Warn(asBefore, "why", d.inFlight())
		return false, nil
	}
	var held error
	err = d.alone(ctx, what, d.outside.Yield, func() (err error) {
		inside.Store(true)
		if d.stopped.Err() != nil {
			return fmt.Errorf("%s: %w", what, errClosed)
		}
		held, err = d.renew()
		return err
	})
	if !inside.Load() && errors.Is(err, gpu.ErrTimeout) {
		d.log.Warn(asBefore, "err", err)
		return false, nil
	}
	if err != nil { // what is inside may go on, and held is its own
		return false, err
	}
	if held != nil {
		d.log.Warn(asBefore, "err", held)
	}
	return held == nil, nil
}

// renew initialises the driver anew. It never says by itself that a GPU came
// back, or that there is another one. Nothing may be registered. held is why the
// driver could not be let go of before: then it is initialised once more, which
// finds nothing new.
func (d *Driver) renew() (held, err error) {
	held = d.shutdown("shut the driver down")
	if errors.Is(held, gpu.ErrNoDriver) {
		held = nil // what is gone has let go of itself
	}
	return held, d.initialised()
}

// initialised takes up the driver after it was let go of.
func (d *Driver) initialised() error {
	if err := nvmlInit.failed("initialise the driver", d.lib.Init()); err != nil {
		return err
	}
	d.stale.Store(false)
	for _, own := range d.links.known {
		own.anew = true // cards may have been exchanged
	}
	return nil
}

func (d *Driver) register(lost map[gpu.UUID]bool) (armed, error) {
	a := armed{gpus: map[nvml.Device]gpu.UUID{}}
	at := map[int]gpu.UUID{}
	count, ret := d.lib.DeviceGetCount()
	if err := nvmlDeviceGetCount.failed("count the GPUs", ret); err != nil {
		return a, err
	}
	if a.set, ret = d.lib.EventSetCreate(); ret != nvml.SUCCESS {
		return a, nvmlEventSetCreate.failed("make an event set", ret)
	}
	for i := range count {
		h, u, err := d.registerOne(a.set, i, lost)
		if u != "" {
			at[i] = u
		}
		if err == nil {
			a.gpus[h], a.order = u, append(a.order, h)
			delete(d.said, i)
			continue
		}
		if text := err.Error(); d.said[i] != text {
			d.said[i] = text
			d.log.Warn("a GPU cannot report events", "index", i, "err", err)
		}
		if !errors.Is(err, gpu.ErrNotSupported) {
			a.missing = true
		}
		if errors.Is(err, gpu.ErrLost) {
			d.stale.Store(true)
			a.absent = append(a.absent, loss{u, i})
		}
	}
	for n, l := range a.absent {
		// The one that was there before, unless it has moved.
		if was := d.at[l.index]; l.gpu == "" && !slices.Contains(slices.Collect(maps.Values(at)), was) {
			l.gpu, at[l.index] = was, was
		}
		if l.gpu != "" {
			l.index = 0
		}
		a.absent[n] = l
	}
	d.at = at
	return a, nil
}

// registerOne adds the GPU at an index to a set.
func (d *Driver) registerOne(
	set nvml.EventSet, index int, lost map[gpu.UUID]bool,
) (h nvml.Device, u gpu.UUID, err error) {
	if h, u, err = d.byIndex(index); err != nil {
		return h, "", err
	}
	if lost[u] {
		return h, u, fmt.Errorf("watch %s: %w", u, gpu.ErrLost)
	}
	supported, ret := h.GetSupportedEventTypes()
	if err := nvmlDeviceGetSupportedEventTypes.failed("read the event types of "+string(u), ret); err != nil {
		return h, u, err
	}
	if supported&nvml.EventTypeXidCriticalError == 0 {
		return h, u, fmt.Errorf("watch %s for critical errors: %w", u, gpu.ErrNotSupported)
	}
	ret = h.RegisterEvents(nvml.EventTypeXidCriticalError, set)
	return h, u, nvmlDeviceRegisterEvents.failed("watch "+string(u), ret)
}

// disarm frees the set. No wait on it is under way.
func (d *Driver) disarm(a armed) {
	defer d.sets.Part()
	ctx, cancel := context.WithTimeout(context.Background(), eventGrace)
	defer cancel()
	// Not open: Close has begun, perhaps, and waits for this.
	if _, err := door.Through(ctx, d.waits, "free an event set", func() (struct{}, error) {
		_, err := nvmlEventSetFree.told("free an event set", a.set.Free())
		return struct{}{}, err
	}, nil); err != nil {
		d.log.Warn("an event set is left behind", "err", err)
	}
}

// ending is why a watch has ended.
type ending struct {
	due     bool       // it is time to try GPUs again that are not watched
	asked   bool       // the GPUs are to be registered again, or not to be for a while
	failure error      // what the driver said, nil where it did not fail
	lost    []gpu.UUID // which GPUs are lost, where failure says that some are
}

// run reports events until ctx ends, the driver fails, the hardware changes or
// it is time to register the GPUs again. Nothing waits on the set any more when
// it returns, unless err says that a wait hangs.
func (w *watch) run(ctx context.Context) (why ending, err error) {
	l := w.listen()
	defer l.leave()
	period := w.opts.Rearm
	switch {
	case w.putOff:
		period = min(period, retryMost)
	case !w.missing && !w.stale.Load():
		period = max(period, w.opts.Look) // nothing to try: each wake costs
	}
	rearm := time.NewTicker(period)
	defer rearm.Stop()
	sought := w.sets.Wanted()
	for over := false; !over; {
		select {
		case <-ctx.Done():
			over = true
		case <-sought:
			why.asked, over = true, true
		case <-w.again:
			why.asked, over = true, true
		case <-rearm.C:
			why.due = w.missing || w.putOff || w.stale.Load()
			over = why.due
		case now, ok := <-w.changes:
			switch {
			case !ok || now == w.told:
			case now == w.seen: // initialised since
				w.tell(now)
			default:
				w.changed, over = true, true
			}
		case n := <-l.heard:
			if n.ret == nvml.SUCCESS {
				w.report(w.event(ctx, n.data))
				break
			}
			over, why.failure = true, nvmlEventSetWait.failed("wait for events", n.ret)
			if errors.Is(why.failure, gpu.ErrNotSupported) {
				break // nothing has happened
			}
			if errors.Is(why.failure, gpu.ErrLost) {
				why.lost = w.reportLost(ctx)
			}
			if len(why.lost) == 0 {
				w.report(gpu.Event{Kind: gpu.EventLost, GI: -1, CI: -1})
			}
		}
	}
	return why, w.end(ctx, l)
}

// reportLost reports the GPUs that answer that they are lost, each as soon as it
// does.
func (w *watch) reportLost(ctx context.Context) (lost []gpu.UUID) {
	most := time.NewTimer(lookWait)
	defer most.Stop()
	found := w.findLost(w.armed)
	for {
		select {
		case u, ok := <-found:
			if !ok {
				return lost
			}
			lost = append(lost, u)
			if w.lost == nil {
				w.lost = map[gpu.UUID]bool{}
			}
			w.lost[u] = true
			w.gone[loss{gpu: u}] = true
			w.stale.Store(true)
			w.report(gpu.Event{Kind: gpu.EventLost, GPU: u, GI: -1, CI: -1})
		case <-most.C:
			return lost
		case <-ctx.Done():
			return lost
		}
	}
}

// findLost asks each GPU of a set, in index order, for what the driver has to
// ask the card. It does so outside the door: a call that hangs there must not
// keep a loss from being told. It may hang itself, and then finds nothing until
// that has ended.
func (d *Driver) findLost(a armed) <-chan gpu.UUID {
	found := make(chan gpu.UUID, len(a.order)) // the receiver may have left
	select {
	case <-d.look:
	default:
		close(found)
		return found
	}
	if !d.outside.TryJoin() {
		d.look <- struct{}{}
		close(found)
		return found
	}
	go func() {
		defer close(found)
		defer func() {
			d.outside.Part()
			d.look <- struct{}{}
		}()
		for _, h := range a.order {
			if _, ret := h.GetMemoryInfo(); meaning(ret) == gpu.ErrLost {
				found <- a.gpus[h]
			}
		}
	}()
	return found
}

// end waits until the wait for events that is under way has ended.
func (w *watch) end(ctx context.Context, l *listener) error {
	close(l.stop)
	grace := time.NewTimer(w.opts.EventWait + eventGrace)
	defer grace.Stop()
	for {
		select {
		case <-l.done:
			return nil
		case n := <-l.heard:
			// It came into the wait that is about to end.
			if n.ret == nvml.SUCCESS && ctx.Err() == nil {
				w.report(w.event(ctx, n.data))
			}
		case <-grace.C:
			go func() { // until then the library cannot be initialised anew
				<-l.done
				w.sets.Part()
			}()
			return fmt.Errorf("end the watch of the GPUs: %w: a wait of %s has not returned",
				gpu.ErrTimeout, w.opts.EventWait)
		}
	}
}

// listener is the wait for events of a set, in a goroutine of its own.
type listener struct {
	heard chan news
	stop  chan struct{} // closed: begin no other wait
	left  chan struct{} // closed: nobody receives from heard
	done  chan struct{} // closed: no wait is under way
}

// news is what a wait ended with.
type news struct {
	data nvml.EventData
	ret  nvml.Return
}

func (l *listener) leave() { close(l.left) }

// listen waits for events until it is told to stop or the driver fails.
func (w *watch) listen() *listener {
	l := &listener{
		heard: make(chan news),
		stop:  make(chan struct{}), left: make(chan struct{}), done: make(chan struct{}),
	}
	a, d := w.armed, w.Driver
	go func() {
		defer close(l.done)
		for {
			// Xids without a GPU in the set could come only from GPUs that
			// cannot report them: wait, but not in the driver.
			if len(a.gpus) == 0 {
				<-l.stop
				return
			}
			n := news{ret: nvml.ERROR_TIMEOUT}
			n.data, n.ret = a.set.Wait(uint32(d.eventWait().Milliseconds()))
			if n.ret != nvml.ERROR_TIMEOUT {
				select {
				case l.heard <- n:
				case <-l.left:
					return
				}
			}
			if n.ret != nvml.SUCCESS && n.ret != nvml.ERROR_TIMEOUT {
				return
			}
			select {
			case <-l.stop:
				return
			default:
			}
		}
	}()
	return l
}

// hurry makes the next waits for events short: one GPU's mode or reset has to wait
// for them, and others may follow.
func (d *Driver) hurry() { d.hurried.Store(time.Now().Add(hurryFor).UnixNano()) }

// eventWait is how long the next wait for events may take.
func (d *Driver) eventWait() time.Duration {
	if time.Now().UnixNano() < d.hurried.Load() {
		return min(d.opts.EventWait, hurriedWait)
	}
	return d.opts.EventWait
}

// event puts the driver's report in our words. The handle in it is the one
// that was registered; where a driver gives another one, it is asked for its
// UUID, and where that fails too the event names no GPU.
func (w *watch) event(ctx context.Context, data nvml.EventData) gpu.Event {
	e := gpu.Event{
		Kind: gpu.EventXid, Xid: data.EventData,
		GI: instance(data.GpuInstanceId), CI: instance(data.ComputeInstanceId),
	}
	var known bool
	if e.GPU, known = w.gpus[data.Device]; known || data.Device == nil {
		return e
	}
	ctx, cancel := context.WithTimeout(ctx, nameWait)
	defer cancel()
	const what = "read the UUID of a GPU with an error"
	u, err := door.Through(ctx, w.waits, what, func() (gpu.UUID, error) {
		uuid, ret := data.Device.GetUUID()
		return gpu.UUID(uuid), nvmlDeviceGetUUID.failed(what, ret)
	}, nil)
	if err != nil {
		w.ration.Log(slog.LevelWarn, "the driver reports an error and does not say of which GPU",
			nil, "xid", e.Xid, "err", err)
	}
	e.GPU = u
	return e
}
