// SPDX-License-Identifier: Apache-2.0

package capped

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

const (
	// reads is how often the agent reads the driver, and samples how often it is asked here.
	reads   = 250 * time.Millisecond
	samples = 2 * time.Millisecond
)

// ErrNoGPU says that no GPU of the machine can be used.
var ErrNoGPU = errors.New("no GPU is idle, not in MIG mode, and has as much free memory as is needed")

// Config is what a [Card] is opened with.
type Config struct {
	Driver nvml.Options
	// Libraries is a folder with the cap's libcuda.so.1 and libnvidia-ml.so.1, as
	// capsule.Library builds them.
	Libraries string
	// Dir is an empty folder, in which the cap's pages are mounted.
	Dir string
	// Least is how much of the GPU's memory has to be free, in MiB.
	Least gpu.MiB
}

// Card is a GPU on which programs are held to caps.
type Card struct {
	Driver *nvml.Driver
	GPU    gpu.Device

	parts cdi.Parts
	kit   lib.Kit
	pages *lib.Pages
	dir   string
	env   []string // of this process, without its way to the driver
}

// Open opens the driver and lays the cap's files. Its error is ErrNoGPU where the driver has
// none for it.
func Open(ctx context.Context, config Config) (_ *Card, err error) {
	if lack := capsule.Missing(); lack != "" {
		return nil, errors.New(lack)
	}
	// No container here runs it: capsule does as it would.
	config.Driver.Hook = "/usr/bin/nvidia-cdi-hook"
	c := &Card{dir: config.Dir}
	if c.Driver, err = nvml.Open(ctx, config.Driver); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.choose(ctx, config.Least); err != nil {
		return nil, err
	}
	if c.parts, err = c.Driver.Parts(ctx); err != nil {
		return nil, err
	}
	if err := c.install(config); err != nil {
		return nil, err
	}
	if c.pages, err = lib.OpenPages(config.Dir); err != nil {
		return nil, err
	}
	c.env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "LD_LIBRARY_PATH=") })
	return c, nil
}

// Close closes the driver and unmounts the pages.
func (c *Card) Close() error {
	err := c.Driver.Close()
	if c.pages != nil {
		err = errors.Join(err, lib.Unmount(c.dir))
	}
	return err
}

// choose finds a GPU that nobody uses.
func (c *Card) choose(ctx context.Context, least gpu.MiB) error {
	inv, err := c.Driver.Inventory(ctx)
	if err != nil {
		return err
	}
	for _, d := range inv.GPUs {
		memory, err := c.Driver.Memory(ctx, d.UUID)
		if err != nil {
			return err
		}
		running, err := c.Driver.Processes(ctx, d.UUID)
		if !d.MIG.Enabled && err == nil && len(running) == 0 && memory[d.UUID].Free >= least {
			c.GPU = d
			return nil
		}
	}
	return ErrNoGPU
}

// install fits the cap's libraries to the driver.
func (c *Card) install(config Config) error {
	c.kit = lib.Kit{Hide: "/hide", Mark: filepath.Join(c.dir, "mark")} // package capsule hides by itself
	if err := os.WriteFile(c.kit.Mark, nil, 0o644); err != nil {
		return err
	}
	for name, to := range map[string]*string{"libcuda.so": &c.kit.CUDA, "libnvidia-ml.so": &c.kit.NVML} {
		data, err := os.ReadFile(filepath.Join(config.Libraries, name+".1"))
		if err != nil {
			return fmt.Errorf("read the cap's library: %w", err)
		}
		for _, m := range c.parts.Common.Mounts {
			if !strings.HasPrefix(filepath.Base(m.ContainerPath), name+".") {
				continue
			}
			if data, err = lib.FitOne(data, config.Driver.Seen(m.HostPath)); err != nil {
				return err
			}
		}
		*to = filepath.Join(c.dir, name+".1")
		if err := os.WriteFile(*to, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Used is capsule.Driver of the real driver.
func (c *Card) Used(u gpu.UUID, containers ...*capsule.Container) (uint64, bool) {
	list, err := c.Driver.Processes(context.Background(), u)
	if err != nil {
		return 0, false
	}
	var used uint64
	for _, p := range memcap.Merge(list) {
		if slices.ContainsFunc(containers, func(o *capsule.Container) bool { return o.Has(p.PID) }) {
			if !p.Known {
				return 0, false
			}
			used += p.Bytes
		}
	}
	return used, true
}

// Room is a container on the GPU.
type Room struct {
	*capsule.Container
	// Env is that of programs in it.
	Env []string

	card *Card
	key  string // empty without a cap
	stop context.CancelFunc
	busy sync.WaitGroup

	mu   sync.Mutex
	seen Seen  // guarded by mu
	err  error // guarded by mu
}

// Seen is what the driver said of a container's processes.
type Seen struct {
	Peak    uint64 // the most that they had, in bytes
	Samples int    // how often it was asked
	Others  bool   // another's process was on the GPU
}

// Mount is a folder or file of the machine that a container has. Writable ones are shared.
type Mount struct {
	From, To string
	Writable bool
}

// Room makes a container whose programs may have so many bytes; with 0 it has no cap. Whoever
// makes it closes it.
func (c *Card) Room(ctx context.Context, name string, bytes uint64, mounts ...Mount) (*Room, error) {
	r := &Room{card: c}
	var over cdi.Overlay
	key := cdi.Key("example.com/gpu-mem", []string{name})
	options := []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}
	if bytes > 0 {
		r.key = key
		pages, err := c.pages.Write(key, reads, []lib.Limit{{GPU: c.GPU.UUID, Bytes: bytes}})
		if err != nil {
			return nil, err
		}
		over = cdi.Overlay{
			Overrides: []cdi.Override{
				{Library: "libcuda.so", HostPath: c.kit.CUDA, Real: lib.RealCUDA},
				{Library: "libnvidia-ml.so", HostPath: c.kit.NVML, Real: lib.RealNVML},
			},
			Mounts: lib.Mounts(key, pages),
			Hooks:  []specs.Hook{c.kit.Hook()},
		}
	}
	spec, err := cdi.Spec("example.com", key, c.parts, []gpu.UUID{c.GPU.UUID}, over)
	if err != nil {
		return nil, err
	}
	edits := spec.Devices[0].ContainerEdits
	for _, m := range mounts {
		how := options
		if m.Writable {
			how = []string{"rw", "nosuid", "nodev", "rbind", "rprivate"}
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: m.From, ContainerPath: m.To, Options: how})
	}
	r.Env = slices.Concat(c.env, edits.Env)
	if r.Container, err = capsule.Open(ctx, edits, capsule.Image{}); err != nil {
		return nil, err
	}
	ctx, r.stop = context.WithCancel(ctx)
	r.busy.Go(func() { r.sample(ctx) })
	if bytes > 0 {
		reader := &capsule.Reader{Driver: c, Container: r.Container, Pages: c.pages, Key: key, GPU: c.GPU.UUID, Every: reads}
		r.busy.Go(func() {
			if err := reader.Run(ctx); err != nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.err = err
			}
		})
	}
	return r, nil
}

// sample looks all the time at what the container's processes have.
func (r *Room) sample(ctx context.Context) {
	tick := time.NewTicker(samples)
	defer tick.Stop()
	for ctx.Err() == nil {
		list, err := r.card.Driver.Processes(ctx, r.card.GPU.UUID)
		if err == nil {
			r.count(list)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (r *Room) count(list []gpu.Process) {
	var used uint64
	others := false
	for _, p := range memcap.Merge(list) {
		if r.Has(p.PID) {
			used += p.Bytes
		} else if p.Bytes > 0 && syscall.Kill(p.PID, 0) == nil {
			others = true
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = Seen{Peak: max(r.seen.Peak, used), Samples: r.seen.Samples + 1, Others: r.seen.Others || others}
}

// Used is what the driver says that the container's processes have now, in bytes.
func (r *Room) Used() (uint64, error) {
	used, known := r.card.Used(r.card.GPU.UUID, r.Container)
	if !known {
		return 0, errors.New("the driver does not say what processes have")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen.Peak = max(r.seen.Peak, used)
	return used, nil
}

// Seen is what the driver has said so far.
func (r *Room) Seen() Seen {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen
}

// Counters are those of the cap's usage page. There is one once a program has used the GPU.
func (r *Room) Counters() (lib.Counters, error) {
	u, err := r.card.pages.OpenUsage(r.key, r.card.GPU.UUID)
	if err != nil {
		return lib.Counters{}, err
	}
	defer u.Close()
	return u.Read()
}

// Close ends the container and all that runs in it.
func (r *Room) Close() error {
	r.stop()
	r.busy.Wait()
	err := errors.Join(r.err, r.Container.Close())
	if r.key != "" {
		err = errors.Join(err, r.card.pages.Remove(r.key))
	}
	return err
}
