// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
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
)

// Events calls report for each critical error (Xid) that the driver reports of
// any GPU, one after the other, until ctx ends or the Driver is closed; then it
// returns nil. A GPU that cannot report events is logged once and left out. What
// happens while GPUs are registered again, some milliseconds, goes unheard.
//
// Where the driver itself says that it lost a GPU, or fails, report is called
// with a gpu.EventLost that names no GPU: the inventory tells which. Events goes
// on with what is left, and tries again later.
//
// It returns an error that wraps gpu.ErrTimeout if a wait inside the driver
// hangs when it should end. Only one Events runs at a time; another waits for
// the first one's end.
func (d *Driver) Events(ctx context.Context, report func(gpu.Event)) error {
	d.watching.Lock()
	defer d.watching.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.stopped, cancel)()

	retryAfter := min(retryMost, d.opts.Rearm)
	var lastFailure time.Time
	anew := false
	for ctx.Err() == nil {
		set, err := d.arm(ctx, anew)
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			anew = true
			d.log.Warn("cannot watch the GPUs for errors; trying again", "err", err, "after", retryAfter)
			pause(ctx, retryAfter)
			continue
		}
		failure, err := d.watch(ctx, set, report)
		if err != nil {
			return err
		}
		d.disarm(set)
		// A driver that fails for another reason than a lost GPU may have been
		// loaded again under us.
		anew = failure != nil && !errors.Is(failure, gpu.ErrLost)
		if failure != nil && ctx.Err() == nil {
			d.log.Warn("the driver failed while watching the GPUs", "err", failure)
			report(gpu.Event{Kind: gpu.EventLost, GI: -1, CI: -1})
			// The first time the other GPUs are watched again at once: one loss
			// must not hide what happens to them.
			if time.Since(lastFailure) < retryAfter {
				pause(ctx, retryAfter)
			}
			lastFailure = time.Now()
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// armed is a set of GPUs that the driver reports events of.
type armed struct {
	set     nvml.EventSet
	gpus    map[nvml.Device]gpu.UUID
	missing bool // some GPU that may report events later is not in it
}

// arm registers all GPUs. A driver that lost one, or failed otherwise (anew), is
// initialised anew first, while nothing is registered: it never says by itself
// that a GPU came back.
func (d *Driver) arm(ctx context.Context, anew bool) (armed, error) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	const what = "watch the GPUs"
	return through(ctx, d.door, what, open(d, what, func() (armed, error) {
		a := armed{gpus: map[nvml.Device]gpu.UUID{}}
		if d.stale || anew {
			// A driver that is gone cannot be shut down; what counts is the rest.
			if err := failed("shut the driver down", d.lib.Shutdown()); err != nil {
				d.log.Debug("initialising the driver anew without a shutdown", "err", err)
			}
			if err := failed("initialise the driver", d.lib.Init()); err != nil {
				return a, err
			}
			d.stale = false
		}
		count, ret := d.lib.DeviceGetCount()
		if err := failed("count the GPUs", ret); err != nil {
			return a, err
		}
		var err error
		if a.set, ret = d.lib.EventSetCreate(); ret != nvml.SUCCESS {
			return a, failed("make an event set", ret)
		}
		for i := range count {
			if err = d.register(a, i); err == nil {
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
			d.stale = d.stale || errors.Is(err, gpu.ErrLost)
		}
		return a, nil
	}), func(a armed) { a.set.Free() })
}

func (d *Driver) register(a armed, index int) error {
	h, ret := d.lib.DeviceGetHandleByIndex(index)
	if err := failed(fmt.Sprintf("find GPU %d", index), ret); err != nil {
		return err
	}
	uuid, ret := h.GetUUID()
	if err := failed(fmt.Sprintf("read the UUID of GPU %d", index), ret); err != nil {
		return err
	}
	supported, ret := h.GetSupportedEventTypes()
	if err := failed("read the event types of "+uuid, ret); err != nil {
		return err
	}
	if supported&nvml.EventTypeXidCriticalError == 0 {
		return fmt.Errorf("watch %s for critical errors: %w", uuid, gpu.ErrNotSupported)
	}
	if err := failed("watch "+uuid, h.RegisterEvents(nvml.EventTypeXidCriticalError, a.set)); err != nil {
		return err
	}
	a.gpus[h] = gpu.UUID(uuid)
	return nil
}

// disarm frees the set.
func (d *Driver) disarm(a armed) {
	ctx, cancel := context.WithTimeout(context.Background(), eventGrace)
	defer cancel()
	// Not call: Close has begun, perhaps, and waits for this.
	if _, err := through(ctx, d.door, "free an event set", func() (struct{}, error) {
		return struct{}{}, failed("free an event set", a.set.Free())
	}, nil); err != nil {
		d.log.Warn("an event set is left behind", "err", err)
	}
}

// watch reports events until ctx ends, the driver fails (failure says how), or
// it is time to register the GPUs again. Nothing waits on the set any more
// when it returns, unless err says that a wait hangs.
func (d *Driver) watch(ctx context.Context, a armed, report func(gpu.Event)) (failure, err error) {
	type news struct {
		data nvml.EventData
		ret  nvml.Return
	}
	heard := make(chan news)
	done := make(chan struct{})
	stop := make(chan struct{})
	left := make(chan struct{}) // nobody hears any more
	defer close(left)
	go func() {
		defer close(done)
		for {
			// Xids without a GPU in the set could come only from GPUs that
			// cannot report them: wait, but not in the driver.
			n := news{ret: nvml.ERROR_TIMEOUT}
			if len(a.gpus) > 0 {
				n.data, n.ret = a.set.Wait(uint32(d.opts.EventWait.Milliseconds()))
			}
			if n.ret == nvml.ERROR_TIMEOUT {
				if len(a.gpus) == 0 {
					<-stop
					return
				}
				select {
				case <-stop:
					return
				default:
					continue
				}
			}
			select {
			case heard <- n:
			case <-left:
				return
			}
			select {
			case <-stop:
				return
			default:
			}
			if n.ret != nvml.SUCCESS {
				return
			}
		}
	}()

	rearm := time.NewTicker(d.opts.Rearm)
	defer rearm.Stop()
	for due := false; !due && failure == nil; {
		select {
		case <-ctx.Done():
			due = true
		case <-rearm.C:
			due = a.missing || d.lostOne(ctx)
		case n := <-heard:
			if n.ret != nvml.SUCCESS {
				failure = failed("wait for events", n.ret)
				break
			}
			report(d.event(ctx, a, n.data))
		}
	}
	close(stop)
	grace := time.NewTimer(d.opts.EventWait + eventGrace)
	defer grace.Stop()
	for {
		select {
		case <-done:
			return failure, nil
		case n := <-heard:
			// It came into the wait that is about to end.
			if n.ret == nvml.SUCCESS && ctx.Err() == nil {
				report(d.event(ctx, a, n.data))
			}
		case <-grace.C:
			return failure, fmt.Errorf("end the watch of the GPUs: %w: a wait of %s has not returned", gpu.ErrTimeout, d.opts.EventWait)
		}
	}
}

// lostOne reports whether a GPU was lost at the last look.
func (d *Driver) lostOne(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	lost, err := call(ctx, d, "look for lost GPUs", func() (bool, error) { return d.stale, nil })
	return err == nil && lost
}

// event puts the driver's report in our words. The handle in it is the one
// that was registered; where a driver gives another one, it is asked for its
// UUID, and where that fails too the event names no GPU.
func (d *Driver) event(ctx context.Context, a armed, data nvml.EventData) gpu.Event {
	e := gpu.Event{Kind: gpu.EventXid, Xid: data.EventData, GI: instance(data.GpuInstanceId), CI: instance(data.ComputeInstanceId)}
	var known bool
	if e.GPU, known = a.gpus[data.Device]; known || data.Device == nil {
		return e
	}
	ctx, cancel := context.WithTimeout(ctx, eventGrace)
	defer cancel()
	u, err := call(ctx, d, "read the UUID of a GPU with an error", func() (gpu.UUID, error) {
		uuid, ret := data.Device.GetUUID()
		return gpu.UUID(uuid), failed("read the UUID of a GPU with an error", ret)
	})
	if err != nil {
		d.log.Warn("the driver reports an error and does not say of which GPU", "xid", e.Xid, "err", err)
	}
	e.GPU = u
	return e
}
