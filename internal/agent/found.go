// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// setupsEvery is the age at which the setup of GPUs is read again, beside a reading of the GPUs.
// Probes of faulty GPUs, and GPU events, do not read it.
const setupsEvery = inventoryEvery

// setups are the last reading of how earlier owners have set the GPUs.
type setups struct {
	of     map[gpu.UUID]gpu.Setup
	around gpu.Surroundings
	// load and at are the loading of the driver and the time of the reading. at is zero before the
	// first one.
	load string
	at   time.Time
}

// readSetups returns the setups of the GPUs of an inventory: before, if they are not due. A figure
// that cannot be read is no finding. If the driver does not answer in time, the other GPUs keep
// what was read before.
func readSetups(ctx context.Context, w Setups, inv *gpu.Inventory, before setups, now time.Time, log *slog.Logger) setups {
	if w == nil {
		return before
	}
	full := before.at.IsZero() || before.load != inv.Load || now.Sub(before.at) >= setupsEvery
	after := setups{of: map[gpu.UUID]gpu.Setup{}, around: before.around, load: inv.Load, at: before.at}
	if full {
		after.at = now
		var err error
		if after.around, err = w.Surroundings(ctx); err != nil {
			log.Debug("cannot read what the kernel shows of the GPUs' owners", "err", err)
		}
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		old, known := before.of[d.UUID]
		if d.Fault != "" || d.UUID == "" {
			continue
		}
		if known && !full || ctx.Err() != nil {
			after.of[d.UUID] = old
			continue
		}
		s, err := w.Setup(ctx, d.UUID)
		if err != nil {
			log.Debug("cannot read all of how a GPU is set", "gpu", d.UUID, "err", err)
		}
		if errors.Is(err, gpu.ErrTimeout) {
			s = old
		}
		after.of[d.UUID] = s
	}
	return after
}

// finder judges how earlier owners have left the GPUs, and puts their compute modes right. It
// belongs to the loop's goroutine. Use newFinder.
type finder struct {
	world Setups
	podOf func(pid int) string
	log   *slog.Logger
	// stateDir is the agent's own directory.
	stateDir string
	event    func(workload.Pod, agentkube.EventType, string, string)
	// refused is why a compute mode could not be set, by GPU. It ends with the next reading, whose
	// time is readAt.
	refused map[gpu.UUID]string
	readAt  time.Time
	// ours reports whether a process is a daemon or a server of MPS that the agent has had started.
	ours func(pid int) bool
}

func newFinder(o *Options, w *Worlds) *finder {
	f := &finder{world: w.Setups, podOf: w.PodOf, log: o.Log, stateDir: o.StateDir, refused: map[gpu.UUID]string{},
		event: func(workload.Pod, agentkube.EventType, string, string) {}}
	if w.Cluster != nil {
		f.event = w.Cluster.Event
	}
	return f
}

// look returns the findings. It sets compute modes to DEFAULT where package found permits that, and
// notes in s what it has read then. others are the GPUs that other owners give out: they decide.
func (f *finder) look(ctx context.Context, inv *gpu.Inventory, s *setups, layouts map[gpu.UUID]plan.Layout,
	others map[gpu.UUID]string, allocations []ledger.Allocation, ours func(pid int) bool, usable bool) []found.Finding {
	if f.world == nil {
		return nil
	}
	f.ours = ours
	if !f.readAt.Equal(s.at) {
		f.readAt = s.at
		clear(f.refused)
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if g := f.gpu(d, s, layouts, others, allocations); usable && found.PutRight(&g, f.foreign(s.around.MPS)) && g.Refused == "" {
			f.putRight(ctx, d, s, g.Mode, allocations)
		}
	}
	n := found.Node{Driver: inv.Driver, Modeset: s.around.Modeset, MPS: f.foreign(s.around.MPS), MPSDirs: f.foreignDirs(s.around.MPSDirs)}
	for i := range inv.GPUs {
		n.GPUs = append(n.GPUs, f.gpu(&inv.GPUs[i], s, layouts, others, allocations))
	}
	return found.Look(n)
}

// gpu returns what is known of a GPU. The recovery that the driver asks for is left out: package
// health judges it.
func (f *finder) gpu(d *gpu.Device, s *setups, layouts map[gpu.UUID]plan.Layout, others map[gpu.UUID]string,
	allocations []ledger.Allocation) found.GPU {
	g := found.GPU{Device: *d, Setup: s.of[d.UUID], Refused: f.refused[d.UUID]}
	g.Setup.Recovery, g.Setup.Processes = gpu.RecoveryUnknown, f.foreign(g.Setup.Processes)
	if underMPS(layouts[d.UUID]) {
		g.Setup.Compute = gpu.ComputeUnknown // it is the agent's: see mpsDaemons
	}
	if l := layouts[d.UUID]; l.Known && others[d.UUID] == "" {
		g.Mode = status.Mode(l.Mode())
	}
	if c := g.Setup.Compute; c != gpu.ComputeUnknown && c != gpu.ComputeDefault {
		g.Owners = f.owners(d.UUID, g.Setup.Processes, allocations)
	}
	return g
}

// foreign returns the processes that are no daemons and servers of MPS of the agent's own.
func (f *finder) foreign(all []gpu.Client) []gpu.Client {
	return slices.DeleteFunc(slices.Clone(all), func(c gpu.Client) bool { return f.ours(c.PID) })
}

// foreignDirs returns the directories that are not those of the agent's own daemons.
func (f *finder) foreignDirs(all []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(dir string) bool { return mps.Owns(f.stateDir, dir) })
}

// owners returns the processes that belong to no pod with an allocation on the GPU.
func (f *finder) owners(u gpu.UUID, all []gpu.Client, allocations []ledger.Allocation) (out []gpu.Client) {
	pods := podsOn(allocations, u)
	for _, c := range all {
		uid := ""
		if f.podOf != nil {
			uid = f.podOf(c.PID)
		}
		holds := func(p workload.Pod) bool { return p.UID == uid }
		if uid == "" || found.IsMPS(c) || !slices.ContainsFunc(pods, holds) {
			out = append(out, c)
		}
	}
	return out
}

// putRight sets a GPU's compute mode to DEFAULT. The last reading may be minutes old, so it first
// reads again whether the mode has an owner, and it reads back what it has set.
func (f *finder) putRight(ctx context.Context, d *gpu.Device, s *setups, mode status.Mode, allocations []ledger.Allocation) {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	fresh, err := f.world.Setup(ctx, d.UUID)
	around, kernelErr := f.world.Surroundings(ctx)
	if err = errors.Join(err, kernelErr); err == nil {
		s.of[d.UUID], s.around = fresh, around
		g := found.GPU{Device: *d, Setup: fresh, Mode: mode, Owners: f.owners(d.UUID, fresh.Processes, allocations)}
		if !found.PutRight(&g, f.foreign(around.MPS)) {
			return
		}
		if err = f.world.ResetComputeMode(ctx, d.UUID); err == nil {
			var back gpu.Setup
			if back, err = f.world.Setup(ctx, d.UUID); err == nil {
				s.of[d.UUID] = back
				if back.Compute != gpu.ComputeDefault {
					err = fmt.Errorf("it is %s after that: %w", back.Compute, gpu.ErrDriver)
				}
			}
		}
	}
	if err != nil {
		f.refused[d.UUID] = err.Error()
		f.log.Warn("cannot set the compute mode to DEFAULT", "gpu", d.UUID, "mode", string(fresh.Compute), "err", err)
		return
	}
	f.log.Info("the compute mode is DEFAULT again", "gpu", d.UUID, "was", string(fresh.Compute))
	f.event(workload.Pod{}, agentkube.Normal, string(status.ComputeModeReset),
		fmt.Sprintf("%s was left in compute mode %s by an owner that is gone; the agent has set DEFAULT",
			d.Name(), brief.Cut(string(fresh.Compute), brief.Reason)))
}

// conditionsOf returns the findings as conditions: those that decide the state of the partition,
// and the others.
func conditionsOf(findings []found.Finding) (deciding, others []status.Condition) {
	for _, f := range findings {
		if _, decides := states[f.Type]; decides {
			deciding = append(deciding, f.Condition)
		} else {
			others = append(others, f.Condition)
		}
	}
	return deciding, others
}

// sameFindings reports whether two lists have the same findings in the same words.
func sameFindings(a, b []found.Finding) bool { return slices.Equal(a, b) }

// tellFound sends an Event for each kind of finding that is new, has changed or is over. Several
// GPUs with the same kind share an Event.
func (h *announcer) tellFound(c Cluster, inv *gpu.Inventory, before, now []found.Finding) {
	news, over := lessFindings(now, before, false), lessFindings(before, now, true)
	for _, of := range byReason(news) {
		kind := agentkube.Normal
		if of[0].Type != status.Noted {
			kind = agentkube.Warning
		}
		c.Event(workload.Pod{}, kind, string(of[0].Reason), brief.Cut(of[0].Message+alsoOn(inv, of[1:]), brief.Message))
	}
	for _, of := range byReason(over) {
		names := "the node"
		if of[0].Subject != "" {
			names = numbers(inv, subjects(of))
		}
		c.Event(workload.Pod{}, agentkube.Normal, string(status.FoundGone),
			brief.Cut(fmt.Sprintf("%s: no longer %s", names, of[0].Reason), brief.Message))
	}
}

// lessFindings returns the findings that other lacks. loose compares only kind and subject.
func lessFindings(list, other []found.Finding, loose bool) []found.Finding {
	return slices.DeleteFunc(slices.Clone(list), func(f found.Finding) bool {
		return slices.ContainsFunc(other, func(o found.Finding) bool {
			return f.Reason == o.Reason && f.Subject == o.Subject && (loose || f.Type == o.Type && f.Message == o.Message)
		})
	})
}

// byReason groups findings by kind, in their order.
func byReason(all []found.Finding) (out [][]found.Finding) {
	for _, f := range all {
		i := slices.IndexFunc(out, func(g []found.Finding) bool { return g[0].Reason == f.Reason })
		if i < 0 {
			out = append(out, []found.Finding{f})
			continue
		}
		out[i] = append(out[i], f)
	}
	return out
}

// alsoOn returns the end of a sentence that names further GPUs; empty if there are none.
func alsoOn(inv *gpu.Inventory, of []found.Finding) string {
	if len(of) == 0 {
		return ""
	}
	return "; also found on " + numbers(inv, subjects(of))
}

func subjects(of []found.Finding) (out []gpu.UUID) {
	for _, f := range of {
		out = append(out, gpu.UUID(f.Subject))
	}
	return out
}
