// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
)

const (
	// eventGrace is how long a wait for events may outlast its own time before it counts as hung.
	eventGrace = 5 * time.Second
	// registerWait bounds the registration of all GPUs.
	registerWait = 30 * time.Second
	// retryMost is the pause between attempts while the driver fails, unless Options.Rearm is
	// less.
	retryMost = 5 * time.Second
	// lookWait bounds how long Events asks which GPUs are lost, after the driver has reported a
	// loss.
	lookWait = time.Second
	// renewWait bounds how long a new initialisation waits for another call to end. No events are
	// heard meanwhile.
	renewWait = time.Second
	// hurriedWait is the longest wait for events for hurryFor after a change of mode or a reset
	// had to wait for one.
	hurriedWait = 250 * time.Millisecond
	hurryFor    = time.Minute
	// nameWait bounds the call for the UUID of a GPU with an event, if the driver names the GPU
	// by a handle that was not registered.
	nameWait = 100 * time.Millisecond
)

// requests carries requests to Events from the methods that change a GPU's mode.
type requests struct {
	// again makes Events register the GPUs again.
	again chan struct{}
	// hurried is when waits for events may be long again, in nanoseconds since 1970; 0 if no wait
	// had to be short.
	hurried atomic.Int64
}

// events runs Events.
type events struct {
	*session
	*presence
	*requests
	// look holds one token, except while findLost asks the GPUs.
	look chan struct{}
	// said is the last warning about each GPU that cannot report events, by index. at is the
	// UUIDs of the GPUs at their last registration, by index. Both are used only while
	// locks.eventSets is held.
	said map[int]string
	at   map[int]gpu.UUID

	watching sync.Mutex // held by Events and rest
	// seen is the hardware as it was when the driver was last initialised. Guarded by watching.
	seen string
}

func newEvents(s *session, p *presence, b *requests, seen string) *events {
	e := &events{session: s, presence: p, requests: b, look: make(chan struct{}, 1), said: map[int]string{}, seen: seen}
	e.look <- struct{}{}
	return e
}

func (e *events) rest(f func() error) error {
	e.watching.Lock()
	defer e.watching.Unlock()
	return f()
}

func (e *events) Events(ctx context.Context, report func(gpu.Event)) error {
	e.watching.Lock()
	defer e.watching.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	changes := e.follow(ctx, e.seen)
	defer func() {
		cancel()
		for range changes { // until follow has ended
		}
	}()
	defer context.AfterFunc(e.stopped, cancel)()

	retryAfter := min(retryMost, e.opts.Rearm)
	w := watch{events: e, report: report, changes: changes, told: e.seen}
	var lastFailure time.Time
	for ctx.Err() == nil {
		now, before := e.seen, w.gpus
		if w.anew {
			now = e.hardware()
		}
		renewed, err := w.arm(ctx)
		if ctx.Err() != nil || e.stopped.Err() != nil {
			if err == nil {
				e.disarm(w.armed)
			}
			break
		}
		if renewed {
			e.seen = now
		}
		// If another call keeps the driver from being initialised anew, the GPUs that were known
		// are watched meanwhile.
		w.putOff = w.anew && !renewed && err == nil
		if w.changed && !w.putOff || err == nil && w.started && grown(before, w.gpus) {
			w.tell(now)
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			return fmt.Errorf("watch the GPUs for errors: %w", err)
		}
		if err != nil {
			// The GPUs that were watched before count as new when they answer again.
			w.anew, w.armed, w.started = true, armed{}, true
			e.log.Warn("cannot watch the GPUs for errors; trying again", "err", e.explained(err), "after", retryAfter)
			w.pause(ctx, retryAfter)
			continue
		}
		w.started = true
		w.tellLost()
		why, err := w.run(ctx)
		if err != nil {
			return err
		}
		e.disarm(w.armed)
		if errors.Is(why.failure, gpu.ErrNotSupported) {
			return fmt.Errorf("watch the GPUs for errors: %w", why.failure)
		}
		// If the driver fails for another reason than a lost GPU, its kernel module may have been
		// loaded again.
		otherwise := why.failure != nil && !errors.Is(why.failure, gpu.ErrLost)
		w.anew = otherwise || w.changed || why.due && (w.putOff || e.stale.Load())
		if why.due || why.asked || w.anew {
			w.lost = nil // try all GPUs again
		}
		if why.failure != nil && ctx.Err() == nil {
			e.log.Warn("the driver failed while watching the GPUs", "err", e.explained(why.failure), "lost", why.lost)
			// After the first failure, and as long as the lost GPUs are known, the others are
			// watched again at once: one loss must not hide what happens to them.
			if len(why.lost) == 0 && time.Since(lastFailure) < retryAfter {
				w.pause(ctx, retryAfter)
			}
			lastFailure = time.Now()
		}
	}
	return nil
}

// grown reports whether now has a GPU that before lacks.
func grown(before, now map[nvml.Device]gpu.UUID) bool {
	had := slices.Collect(maps.Values(before))
	for _, u := range now {
		if !slices.Contains(had, u) {
			return true
		}
	}
	return false
}

// armed is a set of GPUs whose events the driver reports.
type armed struct {
	set     nvml.EventSet
	gpus    map[nvml.Device]gpu.UUID
	order   []nvml.Device // the keys of gpus, by index
	missing bool          // a GPU that may report events later is not in the set
	absent  []loss        // the missing GPUs that the driver calls lost, by index
}

// loss is a GPU that the driver calls lost. It is known by its UUID, or by its index if the UUID
// is not known.
type loss struct {
	gpu   gpu.UUID
	index int
}

// watch is what Events keeps from one registration of the GPUs to the next.
type watch struct {
	events *events
	armed
	report  func(gpu.Event)
	changes <-chan string // the hardware, each time that it has changed
	told    string        // the hardware at the last gpu.EventChanged

	started bool              // the GPUs have been registered before, or that has failed
	anew    bool              // initialise the driver anew before the next registration
	putOff  bool              // that was not possible
	changed bool              // the hardware has changed since told
	lost    map[gpu.UUID]bool // left out of the next registration
	gone    map[loss]bool     // reported as lost, and not registered since
}

// tellLost reports each GPU that was found lost at registration, once. They were lost while no
// events were heard.
func (w *watch) tellLost() {
	gone := map[loss]bool{}
	for _, l := range w.absent {
		if gone[l] = true; !w.gone[l] {
			w.report(gpu.Event{Kind: gpu.EventLost, GPU: l.gpu, GI: -1, CI: -1})
		}
	}
	w.gone = gone
}

// tell reports that the hardware has changed to now.
func (w *watch) tell(now string) {
	w.changed, w.told = false, now
	w.report(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
}

// pause waits for d, or until the hardware changes.
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

// arm registers all GPUs except those known to be lost. It holds eventSets, not calls, so a call
// that hangs does not delay it. Only a new initialisation must wait for such a call; arm goes on
// without it if that takes too long. If SetMIGMode or Reset holds waiting alone, arm waits.
func (w *watch) arm(ctx context.Context) (renewed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	const what = "watch the GPUs"
	e, lost := w.events, w.lost
	if w.anew {
		if renewed, err = e.tryRenew(ctx); err != nil {
			return renewed, err
		}
	}
	for {
		// Take waiting inside Do, while eventSets is held. Only there it is certain that the
		// registration happens, even if this caller has left.
		if err := e.locks.waiting.RLock(ctx); err != nil {
			return renewed, fmt.Errorf("%s: %w", what, err)
		}
		e.locks.waiting.RUnlock()
		var a armed
		a, err = ctxlock.Do(ctx, e.locks.eventSets, what, open(e.session, what, func() (armed, error) {
			if !e.locks.waiting.TryRLock() {
				return armed{}, errExclusive
			}
			a, err := e.register(lost)
			if err != nil {
				e.locks.waiting.RUnlock()
			}
			return a, err
		}), func(a armed) {
			a.set.Free()
			e.locks.waiting.RUnlock()
		})
		if errors.Is(err, errExclusive) {
			continue
		}
		if err == nil {
			w.armed = a
		}
		return renewed, err
	}
}

// errExclusive makes arm try again: SetMIGMode or Reset holds waiting alone.
var errExclusive = errors.New("the wait for events is not allowed now")

// tryRenew initialises the driver anew, unless other calls hold the locks for longer than
// renewWait. renewed is false if it did not.
func (e *events) tryRenew(ctx context.Context) (renewed bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var inside atomic.Bool
	defer time.AfterFunc(renewWait, func() {
		if !inside.Load() {
			cancel()
		}
	}).Stop()
	const what = "initialise the driver anew"
	const asBefore = "cannot initialise the driver anew; watching only the GPUs known so far"
	if !e.locks.handles.TryLock() { // handles are in use that a shutdown would make invalid
		e.log.Warn(asBefore, "why", e.locks.inFlight())
		return false, nil
	}
	var held error
	err = e.exclusive(ctx, what, e.locks.handles.Unlock, func() (err error) {
		inside.Store(true)
		if e.stopped.Err() != nil {
			return fmt.Errorf("%s: %w", what, errClosed)
		}
		held, err = e.renew()
		return err
	})
	if !inside.Load() && errors.Is(err, gpu.ErrTimeout) {
		e.log.Warn(asBefore, "err", err)
		return false, nil
	}
	if err != nil { // the function may still run, and held is its own
		return false, err
	}
	if held != nil {
		e.log.Warn(asBefore, "err", held)
	}
	return held == nil, nil
}

// renew initialises the driver anew. The driver never reports by itself that a GPU has come back
// or was added. No GPU may be registered. held is why the shutdown failed, or nil. If it failed,
// the driver is initialised once more, which finds nothing new.
func (e *events) renew() (held, err error) {
	held = e.shutdown("shut the driver down")
	if errors.Is(held, gpu.ErrNoDriver) {
		held = nil // without a driver there is nothing to shut down
	}
	return held, e.initialised()
}

func (e *events) register(lost map[gpu.UUID]bool) (armed, error) {
	a := armed{gpus: map[nvml.Device]gpu.UUID{}}
	at := map[int]gpu.UUID{}
	count, ret := e.lib.DeviceGetCount()
	if err := nvmlDeviceGetCount.failed("count the GPUs", ret); err != nil {
		return a, err
	}
	if a.set, ret = e.lib.EventSetCreate(); ret != nvml.SUCCESS {
		return a, nvmlEventSetCreate.failed("create an event set", ret)
	}
	for i := range count {
		h, u, err := e.registerOne(a.set, i, lost)
		if u != "" {
			at[i] = u
		}
		if err == nil {
			a.gpus[h], a.order = u, append(a.order, h)
			delete(e.said, i)
			continue
		}
		if text := err.Error(); e.said[i] != text {
			e.said[i] = text
			e.log.Warn("a GPU cannot report events", "index", i, "err", err)
		}
		if !errors.Is(err, gpu.ErrNotSupported) {
			a.missing = true
		}
		if errors.Is(err, gpu.ErrLost) {
			e.stale.Store(true)
			a.absent = append(a.absent, loss{u, i})
		}
	}
	for n, l := range a.absent {
		// The GPU that had this index before, unless it has another index now.
		if was := e.at[l.index]; l.gpu == "" && !slices.Contains(slices.Collect(maps.Values(at)), was) {
			l.gpu, at[l.index] = was, was
		}
		if l.gpu != "" {
			l.index = 0
		}
		a.absent[n] = l
	}
	e.at = at
	return a, nil
}

// registerOne adds the GPU at an index to a set.
func (e *events) registerOne(
	set nvml.EventSet, index int, lost map[gpu.UUID]bool,
) (h nvml.Device, u gpu.UUID, err error) {
	if h, u, err = e.byIndex(index); err != nil {
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
func (e *events) disarm(a armed) {
	defer e.locks.waiting.RUnlock()
	ctx, cancel := context.WithTimeout(context.Background(), eventGrace)
	defer cancel()
	// It does not check for Close: Close may have begun, and waits for this.
	if _, err := ctxlock.Do(ctx, e.locks.eventSets, "free an event set", func() (struct{}, error) {
		_, err := nvmlEventSetFree.told("free an event set", a.set.Free())
		return struct{}{}, err
	}, nil); err != nil {
		e.log.Warn("cannot free an event set", "err", err)
	}
}

// ending is why a watch has ended.
type ending struct {
	due     bool       // it is time to try the GPUs again that are not watched
	asked   bool       // a mode was changed, or a method needs the wait to end
	failure error      // the driver's failure; nil if it did not fail
	lost    []gpu.UUID // the lost GPUs, if failure is a loss
}

// run reports events until ctx ends, the driver fails, the hardware changes or it is time to
// register the GPUs again. When it returns, no wait uses the set, unless err reports a wait that
// hangs.
func (w *watch) run(ctx context.Context) (why ending, err error) {
	l := w.listen()
	defer l.leave()
	period := w.events.opts.Rearm
	switch {
	case w.putOff:
		period = min(period, retryMost)
	case !w.missing && !w.events.stale.Load():
		period = max(period, w.events.opts.Look) // no GPU to try again: wake less often
	}
	rearm := time.NewTicker(period)
	defer rearm.Stop()
	sought := w.events.locks.waiting.Wanted()
	for over := false; !over; {
		select {
		case <-ctx.Done():
			over = true
		case <-sought:
			why.asked, over = true, true
		case <-w.events.again:
			why.asked, over = true, true
		case <-rearm.C:
			why.due = w.missing || w.putOff || w.events.stale.Load()
			over = why.due
		case now, ok := <-w.changes:
			switch {
			case !ok || now == w.told:
			case now == w.events.seen: // the driver was initialised since
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
				break // the driver has no events; no GPU has failed
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

// reportLost asks the GPUs whether they are lost, and reports each that confirms it, at once.
func (w *watch) reportLost(ctx context.Context) (lost []gpu.UUID) {
	most := time.NewTimer(lookWait)
	defer most.Stop()
	found := w.events.findLost(w.armed)
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
			w.events.stale.Store(true)
			w.report(gpu.Event{Kind: gpu.EventLost, GPU: u, GI: -1, CI: -1})
		case <-most.C:
			return lost
		case <-ctx.Done():
			return lost
		}
	}
}

// findLost asks each GPU of a set, in index order, a question that makes the driver ask the card:
// that takes less than a millisecond for eight GPUs. It does so without the lock calls: a call
// that hangs there must not delay the report of a loss. findLost's own call may hang too; until
// that has ended, later calls of findLost find no GPU.
func (e *events) findLost(a armed) <-chan gpu.UUID {
	found := make(chan gpu.UUID, len(a.order)) // room for all, since the receiver may have left
	select {
	case <-e.look:
	default:
		close(found)
		return found
	}
	if !e.locks.handles.TryRLock() {
		e.look <- struct{}{}
		close(found)
		return found
	}
	go func() {
		defer close(found)
		defer func() {
			e.locks.handles.RUnlock()
			e.look <- struct{}{}
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
	grace := time.NewTimer(w.events.opts.EventWait + eventGrace)
	defer grace.Stop()
	for {
		select {
		case <-l.done:
			return nil
		case n := <-l.heard:
			// The event arrived in the last wait.
			if n.ret == nvml.SUCCESS && ctx.Err() == nil {
				w.report(w.event(ctx, n.data))
			}
		case <-grace.C:
			go func() { // the library cannot be initialised anew until the wait ends
				<-l.done
				w.events.locks.waiting.RUnlock()
			}()
			return fmt.Errorf("end the watch of the GPUs: %w: a wait of %s has not returned",
				gpu.ErrTimeout, w.events.opts.EventWait)
		}
	}
}

// listener is a goroutine that waits for the events of a set.
type listener struct {
	heard chan news
	stop  chan struct{} // closed: begin no further wait
	left  chan struct{} // closed: the receiver of heard has left
	done  chan struct{} // closed: no wait is under way
}

// news is the result of one wait.
type news struct {
	data nvml.EventData
	ret  nvml.Return
}

func (l *listener) leave() { close(l.left) }

// listen waits for events until l.stop is closed or the driver fails.
func (w *watch) listen() *listener {
	l := &listener{
		heard: make(chan news),
		stop:  make(chan struct{}), left: make(chan struct{}), done: make(chan struct{}),
	}
	a, e := w.armed, w.events
	go func() {
		defer close(l.done)
		for {
			// The set is empty, so an Xid could come only from a GPU that cannot report it. Wait
			// for the stop, outside the driver.
			if len(a.gpus) == 0 {
				<-l.stop
				return
			}
			n := news{ret: nvml.ERROR_TIMEOUT}
			n.data, n.ret = a.set.Wait(uint32(e.eventWait().Milliseconds()))
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

// hurry makes the next waits for events short. A change of mode or a reset has to wait for them,
// and others may follow.
func (b *requests) hurry() { b.hurried.Store(time.Now().Add(hurryFor).UnixNano()) }

// eventWait returns how long the next wait for events may take.
func (e *events) eventWait() time.Duration {
	if time.Now().UnixNano() < e.hurried.Load() {
		return min(e.opts.EventWait, hurriedWait)
	}
	return e.opts.EventWait
}

// event converts the driver's report. Its handle is the one that was registered. If a driver
// gives another handle, event reads the UUID by it; if that fails too, the event names no GPU.
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
	u, err := ctxlock.Do(ctx, w.events.locks.eventSets, what, func() (gpu.UUID, error) {
		uuid, ret := data.Device.GetUUID()
		return gpu.UUID(uuid), nvmlDeviceGetUUID.failed(what, ret)
	}, nil)
	if err != nil {
		w.events.ration.Log(slog.LevelWarn, "the driver reports an error without naming its GPU",
			nil, "xid", e.Xid, "err", err)
	}
	e.GPU = u
	return e
}
