// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/hardware/ask"
)

// kit is what questions are asked with.
type kit struct {
	dir  string // of the programs
	root string // of the driver
}

// library finds one of the driver's, by the name that programs load.
func (k *kit) library(name string) string {
	if k.root == "/" {
		return name // the loader knows
	}
	for _, dir := range []string{"usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu"} {
		if path := filepath.Join(k.root, dir, name); exists(path) {
			return path
		}
	}
	return name
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// open opens NVML for as long as done is not called.
func (k *kit) open() (lib nvml.Interface, done func(), err error) {
	lib = nvml.New(nvml.WithLibraryPath(k.library("libnvidia-ml.so.1")))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("nvmlInit: %s", nvml.ErrorString(ret))
	}
	return lib, func() { lib.Shutdown() }, nil
}

// card is the one that questions are about: the first that nobody uses, or the first.
type card struct {
	nvml.Device
	lib  nvml.Interface
	uuid string
	idle bool
}

func chooseCard(lib nvml.Interface) (*card, error) {
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("nvmlDeviceGetCount: %s", nvml.ErrorString(ret))
	}
	var first *card
	for i := range n {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		uuid, ret := d.GetUUID()
		if ret != nvml.SUCCESS {
			continue
		}
		running, ret := d.GetComputeRunningProcesses()
		c := &card{d, lib, uuid, ret == nvml.SUCCESS && len(running) == 0}
		if c.idle {
			return c, nil
		}
		if first == nil {
			first = c
		}
	}
	if first == nil {
		return nil, errors.New("NVML lists no GPU that it can be asked about")
	}
	return first, nil
}

// settings is what an owner has set on the cards. What a driver does not support says so, and
// is the same afterwards.
func (k *kit) settings(context.Context) (string, error) {
	lib, done, err := k.open()
	if err != nil {
		return "", err
	}
	defer done()
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return "", fmt.Errorf("nvmlDeviceGetCount: %s", nvml.ErrorString(ret))
	}
	var out strings.Builder
	for i := range n {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			fmt.Fprintf(&out, "GPU %d: %s\n", i, nvml.ErrorString(ret))
			continue
		}
		say := func(name string, ret nvml.Return, values ...any) {
			fmt.Fprintf(&out, "GPU %d %s: %s %v\n", i, name, nvml.ErrorString(ret), values)
		}
		mode, ret := d.GetComputeMode()
		say("compute mode", ret, mode)
		persistence, ret := d.GetPersistenceMode()
		say("persistence mode", ret, persistence)
		now, next, ret := d.GetMigMode()
		say("MIG mode", ret, now, next)
		ecc, pending, ret := d.GetEccMode()
		say("ECC mode", ret, ecc, pending)
		power, ret := d.GetPowerManagementLimit()
		say("power limit", ret, power)
		accounting, ret := d.GetAccountingMode()
		say("accounting mode", ret, accounting)
	}
	return out.String(), nil
}

// talker is a program of programs/talk.c that does what it is told.
type talker struct {
	room *ask.Room
	name string
	pid  int // in our own PID namespace
	in   io.WriteCloser
	out  chan string
	kill func() error
	wait func() error // says what it wrote as errors too
}

// talk starts one on a card, called by a name of the question's own. env is added to its
// environment. It ends with ctx.
func (k *kit) talk(ctx context.Context, room *ask.Room, name string, on *card, env ...string) (*talker, error) {
	return k.talkBehind(ctx, room, nil, name, on, env...)
}

// talkBehind is talk by a command that runs what its arguments say.
func (k *kit) talkBehind(ctx context.Context, room *ask.Room, behind []string, name string, on *card, env ...string) (*talker, error) {
	args := append(slices.Clone(behind), filepath.Join(k.dir, "talk"), k.library("libcuda.so.1"))
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(append(os.Environ(), "CUDA_VISIBLE_DEVICES="+on.uuid), append(ofTalkers, env...)...)
	said := &strings.Builder{}
	cmd.Stderr = said
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	t := &talker{room: room, name: name, pid: cmd.Process.Pid, in: in, kill: cmd.Process.Kill, wait: func() error {
		return withWords(cmd.Wait(), said.String())
	}}
	t.listen(out)
	return t, nil
}

// ofTalkers is in their environment.
var ofTalkers = []string{"CUDA_CACHE_DISABLE=1"}

// withWords adds what a program wrote to how it ended.
func withWords(err error, said string) error {
	if err == nil {
		err = errors.New("exit status 0")
	}
	return fmt.Errorf("%w: %s", err, strings.TrimSpace(said))
}

// listen has what a program says ready to be heard.
func (t *talker) listen(out io.Reader) {
	t.out = make(chan string)
	go func() {
		defer close(t.out)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			t.out <- lines.Text()
		}
	}()
}

// result is what a command came to: CUDA's number, and what was found.
type result struct {
	code  int
	words []string
}

// number is the i-th thing that was found.
func (r result) number(i int) float64 {
	if i >= len(r.words) {
		return 0
	}
	n, _ := strconv.ParseFloat(r.words[i], 64)
	return n
}

// begin has a command done whose answer is not waited for.
func (t *talker) begin(line string) error {
	if _, err := io.WriteString(t.in, line+"\n"); err != nil {
		return fmt.Errorf("%s, told to %s: %w", t.name, line, err)
	}
	return nil
}

// hear waits for the answer to a command.
func (t *talker) hear(line string) (result, error) {
	text, ok := <-t.out
	if !ok {
		err := t.wait()
		t.room.Note(t.name+": "+line, -1, fmt.Sprintf("ended: %v", err))
		return result{code: -1}, fmt.Errorf("%s, told to %s, ended: %w", t.name, line, err)
	}
	words := strings.Fields(text)
	r := result{code: -1}
	if len(words) > 0 {
		if n, err := strconv.Atoi(words[0]); err == nil {
			r = result{n, words[1:]}
		}
	}
	t.room.Note(t.name+": "+line, r.code, strings.Join(r.words, " "))
	return r, nil
}

// do has a command done and waits for its answer. An error is one of the program's or of
// CUDA's.
func (t *talker) do(line string) (result, error) {
	if err := t.begin(line); err != nil {
		return result{code: -1}, err
	}
	r, err := t.hear(line)
	if err == nil && r.code != 0 {
		err = fmt.Errorf("%s, told to %s: CUDA error %d in %s", t.name, line, r.code, strings.Join(r.words, " "))
	}
	return r, err
}

// all has commands done, one after the other, until one fails.
func (t *talker) all(lines ...string) (last result, err error) {
	for _, line := range lines {
		if last, err = t.do(line); err != nil {
			return last, err
		}
	}
	return last, nil
}

// end closes its input and waits for its end.
func (t *talker) end() {
	_ = t.in.Close()
	for range t.out { // what is still said
	}
	_ = t.wait()
}

// used is what the card's driver says is taken of its memory, in MiB.
func used(room *ask.Room, c *card) (float64, error) {
	m, ret := c.GetMemoryInfo_v2()
	room.Note("nvmlDeviceGetMemoryInfo_v2", int(ret), m)
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("nvmlDeviceGetMemoryInfo_v2: %s", nvml.ErrorString(ret))
	}
	return float64(m.Used) / (1 << 20), nil
}

// taken is what NVML says a process has of the card's memory, in MiB; -1 where it says
// nothing.
func taken(room *ask.Room, c *card, pid int) (float64, error) {
	list, ret := c.GetComputeRunningProcesses()
	room.Note("nvmlDeviceGetComputeRunningProcesses_v3", int(ret), list)
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("nvmlDeviceGetComputeRunningProcesses: %s", nvml.ErrorString(ret))
	}
	i := slices.IndexFunc(list, func(p nvml.ProcessInfo) bool { return int(p.Pid) == pid })
	if i < 0 {
		return -1, nil
	}
	return float64(list[i].UsedGpuMemory) / (1 << 20), nil
}

// on has a question asked of the card, with NVML open. Errors are why it could not be told.
func (k *kit) on(f func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error)) func(context.Context, *ask.Room) ask.Answer {
	return func(ctx context.Context, room *ask.Room) ask.Answer {
		lib, done, err := k.open()
		if err != nil {
			return ask.CouldNotTell("%v", err)
		}
		defer done()
		c, err := chooseCard(lib)
		if err != nil {
			return ask.CouldNotTell("%v", err)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel() // what it has started ends
		a, err := f(ctx, room, c)
		if err != nil {
			return ask.CouldNotTell("%v", err)
		}
		return a
	}
}

// withProgram has a question asked of one program that has the card's primary context.
func (k *kit) withProgram(f func(ctx context.Context, c *card, t *talker) (ask.Answer, error)) func(context.Context, *ask.Room) ask.Answer {
	return k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
		t, err := k.talk(ctx, room, "program", c)
		if err != nil {
			return ask.Answer{}, err
		}
		defer t.end()
		if _, err := t.do("context"); err != nil {
			return ask.Answer{}, err
		}
		return f(ctx, c, t)
	})
}

// has is taken for a program, once it stays the same.
func (t *talker) has(ctx context.Context, c *card) (float64, error) {
	return settled(ctx, func() (float64, error) { return taken(t.room, c, t.pid) })
}

// settled waits until a figure stays the same for a while, as a driver's does some time after
// a process has ended.
func settled(ctx context.Context, read func() (float64, error)) (float64, error) {
	last, since := -1.0, time.Now()
	for {
		now, err := read()
		if err != nil {
			return 0, err
		}
		if now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) > 300*time.Millisecond {
			return last, nil
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}
