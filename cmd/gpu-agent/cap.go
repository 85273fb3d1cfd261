// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// capFlags say how containers are held to their memory.
type capFlags struct {
	policy, intruders choice
	evictAfter        int
	every             time.Duration
}

func (f *capFlags) register(fs *flag.FlagSet) {
	f.policy = choice{"closed", []string{"closed", "open"}}
	fs.Var(&f.policy, "cap-policy", "what an allocation meets where the cap in the process cannot do its work: closed (out of memory) or open (uncounted)")
	f.intruders = choice{"report", []string{"report", "end"}}
	fs.Var(&f.intruders, "intruders", "what becomes of containers that use a GPU without a claim on it: report or end")
	fs.IntVar(&f.evictAfter, "evict-after", 0, "`number` of offences within an hour after which a pod is evicted; 0 is never")
	fs.DurationVar(&f.every, "watch-every", guard.DefaultEvery, "`time` between the watchdog's looks at a shared GPU; 0 turns it off")
}

func (f *capFlags) complete() error {
	switch {
	case f.evictAfter < 0:
		return errors.New("--evict-after must not be negative")
	case f.every < 0 || f.every > 0 && f.every < 10*time.Millisecond:
		return errors.New("--watch-every must be 10ms or more, or 0 for none")
	}
	return nil
}

// caps is the agent's files for caps, on behalf of the loop and the watchdog.
type caps struct {
	*lib.Pages
	dir   string
	every time.Duration
	// seen is where this process sees a file of the driver that the host has at a
	// path.
	seen func(host string) string
	// kit serves any driver, fitted the one whose parts were learnt last.
	kit, fitted lib.Kit
}

func openCaps(dir string, every time.Duration, seen func(host string) string) (*caps, error) {
	kit, err := lib.Install(dir)
	if err != nil {
		return nil, err
	}
	pages, err := lib.OpenPages(dir)
	if err != nil {
		return nil, err
	}
	return &caps{Pages: pages, dir: dir, every: every, seen: seen, kit: kit, fitted: kit}, nil
}

func (c *caps) Write(key string, limits []lib.Limit) (map[gpu.UUID]lib.Page, error) {
	return c.Pages.Write(key, c.every, limits)
}

// Fit is for the loop alone, as Prune is.
func (c *caps) Fit(parts cdi.Parts) (lib.Kit, error) {
	library := func(name string) string {
		for _, m := range parts.Common.Mounts {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), name+".") {
				return c.seen(m.HostPath)
			}
		}
		return name // and its absence is what is said
	}
	fitted, err := lib.Fit(c.dir, library("libcuda.so"), library("libnvidia-ml.so"))
	if err != nil {
		fitted = c.kit
	}
	c.fitted = fitted
	return fitted, err
}

// Prune is for when every claim's CDI file names the present libraries.
func (c *caps) Prune() error {
	return lib.Prune(c.dir, func(version string) bool { return version == c.fitted.Version() })
}

// meters opens the counters of claims.
type meters struct{ *caps }

func (m meters) Meter(key string, u gpu.UUID) (guard.Meter, error) {
	usage, err := m.OpenUsage(key, u)
	if err != nil {
		return nil, err
	}
	meter, err := m.Pages.Meter(key, u, usage)
	if err != nil {
		_ = usage.Close()
		return nil, err
	}
	return counters{meter, usage}, nil
}

// counters are a meter and the page that it reads, which ends with it.
type counters struct {
	*lib.Meter
	usage *lib.Usage
}

func (c counters) Close() error { return errors.Join(c.Meter.Close(), c.usage.Close()) }

// processes finds who is on the GPUs.
type processes struct {
	*node.Proc
	runtime *node.Runtime
}

func (p processes) Check() error { return p.SeesNode(p.runtime) }

// limiter has the driver itself hold containers to their memory, by their cgroups.
type limiter struct {
	driver  *lateDriver
	runtime *node.Runtime
}

func (l limiter) Limit(ctx context.Context, u gpu.UUID, o node.Owner, bytes uint64) error {
	dir, err := l.runtime.CgroupDir(o)
	if err != nil {
		return err
	}
	if err := l.driver.SetMemoryLimit(ctx, u, dir, bytes); errors.Is(err, gpu.ErrNotFound) {
		return cmp.Or(l.runtime.CheckDmem(o), err)
	} else if err != nil || bytes == nvml.NoLimit {
		return err
	}
	limit, err := l.driver.MemoryLimit(ctx, u, dir)
	if err == nil && limit.Bytes > bytes { // it may have rounded down
		err = fmt.Errorf("limit the memory of cgroup %q on %s: %w: it says %d bytes after it was told %d", dir, u, gpu.ErrDriver, limit.Bytes, bytes)
	}
	return err
}

func (l *lateDriver) Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error) {
	return timed(ctx, l, "processes", func(d *nvml.Driver) ([]gpu.Process, error) { return d.Processes(ctx, u) })
}

func (l *lateDriver) Memory(ctx context.Context, u gpu.UUID) (gpu.Memory, error) {
	return timed(ctx, l, "memory", func(d *nvml.Driver) (gpu.Memory, error) { return d.Memory(ctx, u) })
}

func (o observer) Ended(kind memcap.Kind, after time.Duration) { o.m.CapKill(string(kind), after) }
func (o observer) Evicted()                                    { o.m.CapEviction() }

// show puts what the watchdog saw into the status.
func show(s *status.Status, st *guard.State) {
	s.Watchdog = status.Watchdog{State: status.WatchdogRunning, Reason: st.Off, Kills: st.Kills, Intruders: st.Found}
	if st.Off != "" {
		s.Watchdog.State = status.WatchdogOff
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		u := gpu.UUID(g.UUID)
		g.Intruders, g.NoPod, g.Unlisted = st.Intruders[u], st.Strangers[u], st.Unlisted[u]
	}
	mib := func(n uint64) uint64 { return (n + 1<<20 - 1) >> 20 }
	for i := range st.Containers {
		c := &st.Containers[i]
		out := status.Container{
			Namespace: c.Namespace, Pod: c.Pod, Container: c.Holder.Container, Claim: c.Claim,
			GPU: string(c.GPU), Index: c.Index, PeakMiB: mib(c.Peak),
			Guarantee: string(c.Level), Refusals: c.Refusals, Uncounted: c.Uncounted, UndoneMiB: mib(c.Undone), Processes: c.Processes,
		}
		if c.Cap != lib.None {
			limit := mib(c.Cap)
			out.CapMiB = &limit
		}
		if used := mib(c.Used); c.Known {
			out.UsedMiB = &used
		}
		s.Containers = append(s.Containers, out)
	}
}
