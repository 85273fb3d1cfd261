// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/hardware/ask"
)

// questions are all of them, the one that is worth most first, and what may hang or break a
// card last.
func (k *kit) questions() []ask.Question {
	return slices.Concat(k.basics(), []ask.Question{k.conformance()}, k.caps()[:1], k.parallel(), k.checkpoints(), k.behind(), k.mapped(), k.code(), k.mig(),
		k.switches(), k.caps()[1:], k.faults(), []ask.Question{k.daemonKilled()})
}

// basics are about the driver and the card alone.
func (k *kit) basics() []ask.Question {
	return []ask.Question{
		{
			Name: "driver", Asks: "Which version of CUDA does the driver have?", Limit: 20 * time.Second, Within: -1,
			Ask: k.on(func(_ context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				version, ret := c.lib.SystemGetDriverVersion()
				room.Note("nvmlSystemGetDriverVersion", int(ret), version)
				api, ret := c.lib.SystemGetNVMLVersion()
				room.Note("nvmlSystemGetNVMLVersion", int(ret), api)
				cuda, ret := c.lib.SystemGetCudaDriverVersion_v2()
				room.Note("nvmlSystemGetCudaDriverVersion_v2", int(ret), cuda)
				if ret != nvml.SUCCESS {
					return ask.Answer{}, fmt.Errorf("nvmlSystemGetCudaDriverVersion_v2: %s", nvml.ErrorString(ret))
				}
				name, ret := c.GetName()
				room.Note("nvmlDeviceGetName", int(ret), name)
				major, minor, ret := c.GetCudaComputeCapability()
				room.Note("nvmlDeviceGetCudaComputeCapability", int(ret), []int{major, minor})
				mode, ret := c.GetComputeMode()
				room.Note("nvmlDeviceGetComputeMode", int(ret), mode)
				return ask.Count(float64(cuda)/1000, "CUDA", "driver %s on %s", version, name), nil
			}),
		},
		{
			Name: "context-memory", Asks: "How much memory does a context take, by NVML?", Limit: 30 * time.Second, Within: 0.25,
			Code: []string{"pkg/gpu/capability.go", "tests/emulator/model.go"},
			Ask: k.withProgram(func(ctx context.Context, c *card, t *talker) (ask.Answer, error) {
				has, err := t.has(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				if has < 0 {
					return ask.CouldNotTell("NVML lists no process %d", t.pid), nil
				}
				return ask.Count(has, "MiB", "of the process, before it has allocated anything"), nil
			}),
		},
		{
			Name: "multiprocessors", Asks: "On how many multiprocessors do a program's blocks run?", Limit: 30 * time.Second, Within: -1,
			NotEmulated: "its kernels do nothing but take time",
			Ask: k.withProgram(func(_ context.Context, _ *card, t *talker) (ask.Answer, error) {
				r, err := t.all("attribute 16", "sms")
				if err != nil {
					return ask.Answer{}, err
				}
				return ask.Count(r.number(0), "multiprocessors", "by what 4,096 blocks said"), nil
			}),
		},
	}
}

// mapped are about memory that one process has made and others have mapped.
func (k *kit) mapped() []ask.Question {
	const mib, importers = 512, 2
	return []ask.Question{{
		Name: "mapped-memory", Asks: "Does NVML count memory once that other processes have mapped?", Limit: 60 * time.Second,
		Code: []string{"internal/guard", "pkg/memcap/lib/c/export.c"},
		Ask: k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
			socket := filepath.Join(room.Dir, "s")
			owner, err := k.talk(ctx, room, "exporter", c)
			if err != nil {
				return ask.Answer{}, err
			}
			defer owner.end()
			if _, err := owner.all("context", fmt.Sprintf("export %d", mib)); err != nil {
				return ask.Answer{}, err
			}
			share := fmt.Sprintf("share %d %s", importers, socket)
			if _, err := owner.do(share); err != nil { // it listens
				return ask.Answer{}, err
			}
			var others []*talker
			var before []float64
			for i := range importers {
				t, err := k.talk(ctx, room, fmt.Sprintf("importer %d", i+1), c)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				if _, err := t.do("context"); err != nil {
					return ask.Answer{}, err
				}
				has, err := t.has(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				others, before = append(others, t), append(before, has)
			}
			all, err := settled(ctx, func() (float64, error) { return used(room, c) })
			if err != nil {
				return ask.Answer{}, err
			}
			for _, t := range others {
				if _, err := t.do("import 0 " + socket); err != nil {
					return ask.Answer{}, err
				}
			}
			if _, err := owner.hear(share); err != nil {
				return ask.Answer{}, err
			}
			after, err := settled(ctx, func() (float64, error) { return used(room, c) })
			if err != nil {
				return ask.Answer{}, err
			}
			var more []float64
			for i, t := range others {
				has, err := taken(room, c, t.pid)
				if err != nil {
					return ask.Answer{}, err
				}
				if has < 0 {
					return ask.CouldNotTell("NVML does not list the importers"), nil
				}
				more = append(more, has-before[i])
			}
			once := slices.Max(more) < mib/2
			return ask.Tell(once, "%d MiB that %d processes map: the card has %.0f MiB more of them, and NVML counts %v MiB more of the importers", mib, importers, after-all, more), nil
		}),
	}}
}

// code are about what takes memory beside allocations.
func (k *kit) code() []ask.Question {
	return []ask.Question{
		{
			Name: "lazy-code", Asks: "Is a module's code loaded before something of it runs?", Limit: 30 * time.Second,
			Code: []string{"pkg/memcap/lib/c/module.c", "tests/emulator/lib/c/cuda_module.c"},
			Ask: k.withProgram(func(ctx context.Context, c *card, t *talker) (ask.Answer, error) {
				var has [3]float64
				for i, line := range []string{"memory", "code", "run"} {
					if _, err := t.do(line); err != nil {
						return ask.Answer{}, err
					}
					var err error
					if has[i], err = t.has(ctx, c); err != nil {
						return ask.Answer{}, err
					}
				}
				if has[2] <= has[0] {
					return ask.CouldNotTell("the module takes no memory that NVML shows"), nil
				}
				return ask.Tell(has[1] > has[0], "%.0f MiB more once it is loaded, and %.0f MiB once it has run", has[1]-has[0], has[2]-has[0]), nil
			}),
		},
		{
			Name: "green-context", Asks: "How much memory does a green context take, by NVML?", Limit: 30 * time.Second, Within: 0.25,
			Code: []string{"pkg/memcap/lib/c/context.c", "tests/emulator/lib/c/cuda_green.c"},
			Ask: k.withProgram(func(ctx context.Context, c *card, t *talker) (ask.Answer, error) {
				before, err := t.has(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				if _, err := t.do("green 8"); err != nil {
					return ask.Answer{}, err
				}
				after, err := t.has(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				return ask.Count(after-before, "MiB", "of 8 multiprocessors, beside the primary context"), nil
			}),
		},
	}
}
