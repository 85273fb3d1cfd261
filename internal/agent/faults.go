// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// faults receives the driver's events. It marks as Unhealthy in the kubelet's lists what events or
// readings have found unhealthy. Any goroutine may use it.
type faults struct {
	driver   Driver
	monitor  *health.Monitor
	observer Observer
	log      *slog.Logger
	ration   *brief.Ration
	// tell passes the unhealthy GPUs, and unhealthy placements on other GPUs, to the front-ends.
	tell func(map[gpu.UUID]string, map[mig.Place]string)
	// ofMPS takes a fault that an application has caused, and reports whether the GPU is under MPS.
	ofMPS func(u gpu.UUID, why string) bool
	// wake starts a round, and look one that reads the hardware.
	wake, look func()
	// instances is the last inventory that this process has read. It tells which instance a number
	// in an event means. It is nil before the first reading.
	instances atomic.Pointer[gpu.Inventory]
	// blind is true if the driver sends no events.
	blind atomic.Bool
	mu    sync.Mutex // held while verdicts go to the lists
}

func newFaults(o *Options, w *Worlds, monitor *health.Monitor, ration *brief.Ration,
	tell func(map[gpu.UUID]string, map[mig.Place]string), wake, look func()) *faults {
	return &faults{driver: w.Driver, monitor: monitor, observer: w.Observer, log: o.Log, ration: ration,
		tell: tell, wake: wake, look: look}
}

func (f *faults) setInventory(inv *gpu.Inventory) { f.instances.Store(inv) }

func (f *faults) isBlind() bool { return f.blind.Load() }

// onEvent is called by the driver for each event, beside the loop. A fault is in the kubelet's
// lists before the loop wakes.
func (f *faults) onEvent(e gpu.Event) {
	f.observer.GPUEvent(e)
	if what := health.Application(e); what != "" && f.ofMPS(e.GPU, what) {
		f.logEvent(e, false)
		return // it is the fault of all clients of the GPU's MPS server, and none of the GPU's
	}
	changed := f.monitor.Event(e, time.Now())
	if changed {
		f.apply()
	}
	f.logEvent(e, changed)
	if changed || e.Kind != gpu.EventXid {
		f.look()
	}
}

// logEvent logs an event of the driver. A program on a GPU can cause the same event a thousand
// times a second, so the log is limited for each GPU; the metric counts all events. An event that
// changes a verdict is always logged, since it cannot be repeated.
func (f *faults) logEvent(e gpu.Event, changed bool) {
	if changed {
		f.log.Warn("GPU event", "kind", string(e.Kind), "gpu", string(e.GPU), "xid", e.Xid, "condemns", true)
		return
	}
	level := slog.LevelWarn
	if f.monitor.Ignores(e) {
		level = slog.LevelDebug
	}
	f.ration.Log(level, "GPU event", []any{"kind", string(e.Kind), "gpu", string(e.GPU)},
		"xid", e.Xid, "condemns", false)
}

// apply tells the front-ends which GPUs and which MIG instances are unhealthy. The hardware
// isolates instances from each other, so a fault of one withdraws only the devices of that one.
func (f *faults) apply() {
	// The lock keeps two verdicts in order.
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tell(faultsIn(f.monitor.Verdicts(), f.instances.Load()))
}

// faultsIn returns the GPUs of an inventory that have nothing to give because of their faults, and
// the unhealthy MIG devices on other GPUs, each with the reasons. inv is nil before the first
// reading.
func faultsIn(verdicts []health.Verdict, inv *gpu.Inventory) (gpus map[gpu.UUID]string,
	placements map[mig.Place]string) {
	reasons := map[gpu.UUID][]string{}
	ofPlacements := map[mig.Place][]string{}
	for _, v := range verdicts {
		placements, known := placementsOf(v.Subject, inv)
		if !known {
			reasons[v.GPU] = append(reasons[v.GPU], v.Reason)
		}
		for _, s := range placements {
			at := mig.Place{GPU: v.GPU, Placement: s}
			ofPlacements[at] = append(ofPlacements[at], v.Reason)
		}
	}
	gpus, placements = map[gpu.UUID]string{}, map[mig.Place]string{}
	for u, why := range reasons {
		gpus[u] = strings.Join(slices.Compact(why), "; ")
	}
	for at, why := range ofPlacements {
		placements[at] = strings.Join(slices.Compact(why), "; ")
	}
	return gpus, placements
}

// placementsOf returns the MIG devices that a fault of an instance concerns; none if the instance
// is gone. known is false for a fault of the whole GPU, and if the GPU's instances are not known
// yet.
func placementsOf(s health.Subject, inv *gpu.Inventory) (placements []mig.Placement, known bool) {
	if s.GI < 0 || inv == nil {
		return nil, false
	}
	d := inv.ByUUID(s.GPU)
	if d == nil || !d.MIG.Enabled {
		return nil, false
	}
	for i := range d.MIG.Instances {
		in := &d.MIG.Instances[i]
		if placement, err := mig.PlacementOf(in); err == nil && in.GI == s.GI && (s.CI < 0 || in.CI == s.CI) {
			placements = append(placements, placement)
		}
	}
	return placements, true
}

// follow receives the driver's events until ctx ends. If the driver does not support events, the
// loop reads the hardware every blindEvery.
func (f *faults) follow(ctx context.Context) error {
	pause := backOff(readPauseMax)
	for {
		err := f.driver.Events(ctx, f.onEvent)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			f.log.Warn("the driver sends no events; faults are seen only at the next reading",
				"err", err, "every", blindEvery.String())
			f.blind.Store(true)
			f.wake()
			<-ctx.Done()
			return ctx.Err()
		}
		again := pause.Step()
		if err != nil && !errors.Is(err, gpu.ErrNoDriver) { // the next reading reports ErrNoDriver
			f.log.Warn("lost the driver's events", "err", err, "again_in", again.String())
		}
		if !elapse(ctx, again) {
			return ctx.Err()
		}
	}
}
