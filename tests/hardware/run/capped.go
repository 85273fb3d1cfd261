// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/hardware"
	"example.com/gpu-agent/tests/hardware/ask"
	"example.com/gpu-agent/tests/hardware/capped"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// kitDir is where a container has the kit's programs.
const kitDir = "/test-gpu"

// behindCap has a question asked of a container with a cap of so many MiB on an idle card, and of
// a program in it.
func (k *kit) behindCap(mib uint64, f func(ctx context.Context, room *ask.Room, c *card, in *capped.Room, t *talker) (ask.Answer, error), more func(room *ask.Room) ([]string, []capped.Mount)) func(context.Context, *ask.Room) ask.Answer {
	return k.on(func(ctx context.Context, room *ask.Room, c *card) (_ ask.Answer, err error) {
		dir := filepath.Join(room.Dir, "cap")
		if err := os.Mkdir(dir, 0o700); err != nil {
			return ask.Answer{}, err
		}
		held, err := capped.Open(ctx, capped.Config{Driver: hardware.OptionsOf(k.root), Libraries: filepath.Join(k.dir, suiteDir), Dir: dir, Least: gpu.MiB(mib)})
		if err != nil {
			return ask.Answer{}, err
		}
		defer func() { err = errors.Join(err, held.Close()) }()
		if string(held.GPU.UUID) != c.uuid {
			return ask.Answer{}, errors.New("the card is not the one that is idle")
		}
		env := []string{withoutMPS(room)}
		mounts := []capped.Mount{{From: k.dir, To: kitDir}}
		if more != nil {
			e, m := more(room)
			env, mounts = e, append(mounts, m...)
		}
		in, err := held.Room(ctx, "question", mib<<20, mounts...)
		if err != nil {
			return ask.Answer{}, err
		}
		defer func() { err = errors.Join(err, in.Close()) }()
		t, err := talkIn(room, in, "program behind the cap", env...)
		if err != nil {
			return ask.Answer{}, err
		}
		defer t.end()
		return f(ctx, room, c, in, t)
	})
}

// talkIn starts a talker in a container.
func talkIn(room *ask.Room, in *capped.Room, name string, env ...string) (*talker, error) {
	theirIn, stdin, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	stdout, theirOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirOut.Close()
	said, err := os.Create(filepath.Join(room.Dir, "said"))
	if err != nil {
		return nil, err
	}
	defer said.Close()
	p, err := in.Start(capsule.Program{
		Args: []string{filepath.Join(kitDir, "talk"), "libcuda.so.1"},
		Env:  append(append(in.Env, ofTalkers...), env...), Stdin: theirIn, Stdout: theirOut, Stderr: said,
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	t := &talker{room: room, name: name, pid: in.HostPID(p.PID), in: stdin, kill: p.Kill, wait: func() error {
		_, status, err := p.Wait(context.Background())
		if err == nil {
			err = fmt.Errorf("status %#x", uint32(status))
		}
		text, _ := os.ReadFile(said.Name())
		return withWords(err, string(text))
	}}
	if t.pid == 0 {
		return nil, fmt.Errorf("start %s: it has no PID outside its container: %w", name, t.wait())
	}
	t.listen(stdout)
	return t, nil
}

// counted is what the cap counts, in MiB, written down.
func counted(room *ask.Room, in *capped.Room) (float64, error) {
	c, err := in.Counters()
	if err != nil {
		room.Note("the cap's usage page", -1, err.Error())
		return 0, err
	}
	room.Note("the cap's usage page", 0, c)
	return float64(c.Bound) / (1 << 20), nil
}

// behind are about programs behind our cap, where others are without one.
func (k *kit) behind() []ask.Question {
	const mib = 2048
	code := []string{"pkg/memcap/lib/c"}
	return []ask.Question{
		{
			Name: "cap-checkpoint", Asks: "Is a program checkpointed and restored behind our cap, with its content and its count?", Limit: 90 * time.Second, Least: 20 * time.Second, NotEmulated: noCheckpoint, Code: code,
			Ask: k.behindCap(2*mib, func(ctx context.Context, room *ask.Room, c *card, in *capped.Room, t *talker) (ask.Answer, error) {
				if _, err := t.all("context", fmt.Sprintf("take %d", mib), "fill 90", "run"); err != nil {
					return ask.Answer{}, err
				}
				var counts []string
				count := func(when string) error {
					n, err := settled(ctx, func() (float64, error) { return counted(room, in) })
					counts = append(counts, fmt.Sprintf("%.0f %s", n, when))
					return err
				}
				if err := count("before"); err != nil {
					return ask.Answer{}, err
				}
				for _, what := range []string{"lock", "checkpoint", "restore", "unlock"} {
					took, err := k.step(ctx, room, what, t.pid)
					if errors.Is(err, errNoCall) {
						return ask.Answer{}, err
					}
					if err != nil {
						return ask.Tell(false, "%v; the cap counts, in MiB: %s", err, strings.Join(counts, ", ")), nil
					}
					if what == "lock" {
						continue
					}
					if _, err := used(room, c); err != nil {
						return ask.Answer{}, err
					}
					if err := count(fmt.Sprintf("after %s, which took %.2f s", what, took.Seconds())); err != nil {
						return ask.Answer{}, err
					}
				}
				same, err := t.all("run", "check 90", fmt.Sprintf("take %d", mib/2))
				if err != nil {
					return ask.Tell(false, "after the restore: %v; the cap counts, in MiB: %s", err, strings.Join(counts, ", ")), nil
				}
				_, err = t.do(fmt.Sprintf("take %d", mib))
				return ask.Tell(err != nil, "what goes beyond the cap afterwards: %v; the cap counts, in MiB: %s; %v", err, strings.Join(counts, ", "), same.words), nil
			}, nil),
		},
		{
			Name: "cap-mps", Asks: "Is a client of MPS held to our cap?", Limit: time.Minute, Least: 10 * time.Second, Code: code,
			Ask: func(ctx context.Context, room *ask.Room) ask.Answer {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				var d *mpsDaemon
				a := k.on(func(_ context.Context, room *ask.Room, c *card) (_ ask.Answer, err error) {
					d, err = k.mps(ctx, room, c)
					return ask.Answer{}, err
				})(ctx, room)
				if d == nil {
					return a
				}
				defer d.quit(ctx)
				return k.behindCap(mib, func(ctx context.Context, room *ask.Room, c *card, in *capped.Room, t *talker) (ask.Answer, error) {
					if _, err := t.do("context"); err != nil {
						return ask.Answer{}, err
					}
					if err := d.serves(ctx, t); err != nil {
						return ask.Answer{}, err
					}
					_, first := t.all("run", fmt.Sprintf("take %d", mib/2))
					_, beyond := t.do(fmt.Sprintf("take %d", mib))
					if _, err := t.has(ctx, c); err != nil {
						return ask.Answer{}, err
					}
					has, err := in.Used()
					if err != nil {
						return ask.Answer{}, err
					}
					count, err := counted(room, in)
					if err != nil {
						return ask.Answer{}, err
					}
					return ask.Tell(first == nil && beyond != nil && has <= mib<<20, "half of the cap: %v; beyond it: %v; NVML says %.0f MiB of its processes, the cap counts %.0f", first, beyond, float64(has)/(1<<20), count), nil
				}, func(room *ask.Room) ([]string, []capped.Mount) {
					return d.dirs, []capped.Mount{
						{From: filepath.Join(room.Dir, "pipes"), To: filepath.Join(room.Dir, "pipes"), Writable: true},
						{From: filepath.Join(room.Dir, "logs"), To: filepath.Join(room.Dir, "logs"), Writable: true},
						{From: "/dev/shm", To: "/dev/shm", Writable: true},
					}
				})(ctx, room)
			},
		},
	}
}
