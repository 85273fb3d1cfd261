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

// faults hears the driver's events, and turns Unhealthy in the kubelet's lists what is
// unhealthy by them and by the readings. All of it may be used by several goroutines.
type faults struct {
	driver   Driver
	monitor  *health.Monitor
	observer Observer
	log      *slog.Logger
	ration   *brief.Ration
	// tell tells the front-ends which GPUs are unhealthy, and which placements on others.
	tell func(map[gpu.UUID]string, map[mig.Place]string)
	// wake has a round come, and look one that reads the hardware anew.
	wake, look func()
	// instances is the inventory as of when this process has read it: for whoever must
	// know what an instance's number stands for.
	instances atomic.Pointer[gpu.Inventory]
	// blind says that the driver tells of no events.
	blind atomic.Bool
	mu    sync.Mutex // held while the verdicts go to the lists
}

func newFaults(o *Options, w *Worlds, monitor *health.Monitor, ration *brief.Ration,
	tell func(map[gpu.UUID]string, map[mig.Place]string), wake, look func()) *faults {
	return &faults{driver: w.Driver, monitor: monitor, observer: w.Observer, log: o.Log, ration: ration,
		tell: tell, wake: wake, look: look}
}

func (f *faults) stands(inv *gpu.Inventory) { f.instances.Store(inv) }

func (f *faults) isBlind() bool { return f.blind.Load() }

// onEvent is called by the driver for each event, beside the loop. What it means
// for the kubelet's lists is in them before the loop wakes.
func (f *faults) onEvent(e gpu.Event) {
	f.observer.GPUEvent(e)
	changed := f.monitor.Event(e, time.Now())
	if changed {
		f.apply()
	}
	f.logEvent(e, changed)
	if changed || e.Kind != gpu.EventXid {
		f.look()
	}
}

// logEvent logs what the driver reported. A program on a GPU can have it report the
// same a thousand times a second, so it is rationed for each GPU; the metric counts
// all. What changes the verdict on a GPU is always logged, since that cannot be
// repeated.
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

// apply tells the front-ends which GPUs are unhealthy, and which MIG instances:
// the hardware keeps those apart, so that what hits one is no reason to take the
// others away.
func (f *faults) apply() {
	// Two verdicts must not overtake each other on their way.
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tell(faultsIn(f.monitor.Verdicts(), f.instances.Load()))
}

// faultsIn says of which GPUs of an inventory nothing can be had for its faults, and of which
// MIG devices on others, each with the reasons. inv is nil where nobody knows yet what stands.
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

// placementsOf finds the MIG devices that a fault of an instance concerns: none where
// that has gone since. It is false for a fault of the whole GPU, and where nobody
// knows yet what stands on it.
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

// follow passes the driver's events on. Where the driver cannot tell of
// events, the slow tick must do.
func (f *faults) follow(ctx context.Context) error {
	pause := backOff(readPauseMax)
	for {
		err := f.driver.Events(ctx, f.onEvent)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrNotSupported) {
			f.log.Warn("the driver tells of no events; faults are seen at the next reading",
				"err", err, "every", blindEvery.String())
			f.blind.Store(true)
			f.wake()
			<-ctx.Done()
			return ctx.Err()
		}
		again := pause.Step()
		if err != nil && !errors.Is(err, gpu.ErrNoDriver) { // the next reading says that
			f.log.Warn("lost the driver's events", "err", err, "again_in", again.String())
		}
		if !elapse(ctx, again) {
			return ctx.Err()
		}
	}
}
