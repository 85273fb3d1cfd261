// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/tests/hardware/ask"
)

// noCheckpoint is why the emulated driver has no answers to these.
const noCheckpoint = "it has no checkpoint"

// errNoCall says that the driver is older than a call.
var errNoCall = errors.New("this driver has no call")

// step has the driver do one step of a process's checkpoint.
func (k *kit) step(ctx context.Context, room *ask.Room, what string, pid int) (took time.Duration, err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(k.dir, "checkpoint"), k.library("libcuda.so.1"), what, strconv.Itoa(pid))
	out, err := cmd.CombinedOutput()
	code, us, state := 0, int64(0), 0
	if _, scanned := fmt.Sscan(string(out), &code, &us, &state); err == nil {
		err = scanned
	}
	if err != nil {
		room.Note(what, -1, strings.TrimSpace(string(out)))
		return 0, fmt.Errorf("%s: %w: %s", what, err, strings.TrimSpace(string(out)))
	}
	room.Note(what, code, map[string]any{"us": us, "state": state})
	switch {
	case code < 0:
		return 0, fmt.Errorf("%w to %s", errNoCall, what)
	case code > 0:
		return 0, fmt.Errorf("%s: CUDA error %d", what, code)
	}
	return time.Duration(us) * time.Microsecond, nil
}

// rss is the memory of the machine that a process has, in MiB.
func rss(pid int) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), "VmRSS:")
	n, _ := strconv.ParseFloat(strings.Fields(rest + " 0")[0], 64)
	return n / 1024
}

// ourCgroups is how those begin that questions make.
const ourCgroups = "gpu-agent-question-"

// cgroups are the places where a kernel keeps account of memory, with the file that says what is
// charged: version 2 first.
var cgroups = []struct{ root, file string }{
	{"/sys/fs/cgroup", "memory.current"},
	{"/sys/fs/cgroup/memory", "memory.usage_in_bytes"},
}

// cgroup is one that a question has made.
type cgroup struct{ file string }

// joinCgroup puts a process into a cgroup of its own, which goes when no question is asked any
// more.
func joinCgroup(pid int) (*cgroup, error) {
	var why error
	for _, at := range cgroups {
		dir := filepath.Join(at.root, ourCgroups+strconv.Itoa(pid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			why = err
			continue
		}
		if !exists(filepath.Join(dir, at.file)) {
			why = fmt.Errorf("%s keeps no account of memory: %w", at.root, os.Remove(dir))
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return nil, fmt.Errorf("put the program into a cgroup: %w", err)
		}
		return &cgroup{filepath.Join(dir, at.file)}, nil
	}
	return nil, fmt.Errorf("this machine has no cgroup for the program: %w", why)
}

// charged is in MiB.
func (g *cgroup) charged(room *ask.Room) (float64, error) {
	data, err := os.ReadFile(g.file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
	room.Note(filepath.Base(g.file), 0, n)
	return n / (1 << 20), err
}

// removeCgroups takes away those of questions whose processes have ended.
func removeCgroups() {
	for _, at := range cgroups {
		list, err := filepath.Glob(filepath.Join(at.root, ourCgroups+"*"))
		if err != nil {
			continue
		}
		for _, dir := range list {
			// A process that has just been killed is in it for some milliseconds.
			for try := 0; os.Remove(dir) != nil && try < 100; try++ {
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
}

// checkpoints are about programs whose memory goes to the machine and comes back.
func (k *kit) checkpoints() []ask.Question {
	const mib = 4096
	list := []ask.Question{{
		Name: "checkpoint", Asks: "Does a checkpoint give a program's memory back to the card, and a restore the same content?", Limit: 90 * time.Second, Least: 20 * time.Second, NotEmulated: noCheckpoint,
		Ask: k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
			t, err := k.talk(ctx, room, "program", c, withoutMPS(room))
			if err != nil {
				return ask.Answer{}, err
			}
			defer t.end()
			before, err := settled(ctx, func() (float64, error) { return used(room, c) })
			if err != nil {
				return ask.Answer{}, err
			}
			if _, err := t.all("context", fmt.Sprintf("take %d", mib), "fill 90", "run"); err != nil {
				return ask.Answer{}, err
			}
			pid := t.pid
			full, err := used(room, c)
			if err != nil {
				return ask.Answer{}, err
			}
			host := rss(pid)
			var took [4]time.Duration
			var gone, of float64
			for i, what := range []string{"lock", "checkpoint", "restore", "unlock"} {
				if took[i], err = k.step(ctx, room, what, pid); err != nil {
					return ask.Answer{}, err
				}
				if what == "checkpoint" {
					if gone, err = settled(ctx, func() (float64, error) { return used(room, c) }); err != nil {
						return ask.Answer{}, err
					}
					of = rss(pid)
				}
			}
			same, err := t.all("run", "check 90")
			if err != nil {
				return ask.Tell(false, "after the restore: %v", err), nil
			}
			gib := float64(mib) / 1024
			return ask.Tell(same.number(0) == 0 && gone-before < mib/2, "%.2f s a GiB to the machine, %.2f s back; the card had %.0f MiB before, %.0f with it, %.0f while it was away; the process had %.0f MiB of the machine and then %.0f; %.0f bytes differ",
				took[1].Seconds()/gib, took[2].Seconds()/gib, before, full, gone, host, of, same.number(0)), nil
		}),
	}}
	list = append(list, ask.Question{
		Name: "checkpoint-charged", Asks: "Is the machine's memory that a checkpoint takes charged to the program's own cgroup?", Limit: 60 * time.Second, Least: 15 * time.Second, NotEmulated: noCheckpoint,
		Ask: k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
			const mib = 1024
			t, err := k.talk(ctx, room, "program", c, withoutMPS(room))
			if err != nil {
				return ask.Answer{}, err
			}
			defer t.end()
			group, err := joinCgroup(t.pid)
			if err != nil {
				return ask.Answer{}, err
			}
			if _, err := t.all("context", fmt.Sprintf("take %d", mib), "fill 90", "run"); err != nil {
				return ask.Answer{}, err
			}
			before, err := group.charged(room)
			if err != nil {
				return ask.Answer{}, err
			}
			for _, what := range []string{"lock", "checkpoint"} {
				if _, err := k.step(ctx, room, what, t.pid); err != nil {
					return ask.Answer{}, err
				}
			}
			after, err := group.charged(room)
			if err != nil {
				return ask.Answer{}, err
			}
			for _, what := range []string{"restore", "unlock"} {
				if _, err := k.step(ctx, room, what, t.pid); err != nil {
					return ask.Answer{}, err
				}
			}
			back, err := group.charged(room)
			return ask.Tell(after-before > mib/2, "%d MiB of the card went away; the cgroup was charged %.0f MiB before, %.0f meanwhile, %.0f after the restore", mib, before, after, back), err
		}),
	})
	for _, with := range []struct{ name, asks, take string }{
		{"checkpoint-managed", "Is a program with managed memory checkpointed?", "managed 64"},
		{"checkpoint-exporter", "Is a program checkpointed that has exported memory?", "export 64"},
	} {
		list = append(list, ask.Question{Name: with.name, Asks: with.asks, Limit: 40 * time.Second, NotEmulated: noCheckpoint,
			Ask: k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				t, err := k.talk(ctx, room, "program", c, withoutMPS(room))
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				if _, err := t.all("context", with.take, "fill 90", "run"); err != nil {
					return ask.Answer{}, err
				}
				for _, what := range []string{"lock", "checkpoint"} {
					if _, err := k.step(ctx, room, what, t.pid); errors.Is(err, errNoCall) {
						return ask.Answer{}, err
					} else if err != nil {
						return ask.Tell(false, "%v", err), nil
					}
				}
				for _, what := range []string{"restore", "unlock"} {
					if _, err := k.step(ctx, room, what, t.pid); err != nil {
						return ask.Tell(false, "it was, and then: %v", err), nil
					}
				}
				r, err := t.do("check 90")
				if err != nil {
					return ask.Tell(false, "it was and came back, and then: %v", err), nil
				}
				return ask.Tell(r.number(0) == 0, "%.0f bytes differ", r.number(0)), nil
			})})
	}
	return list
}
