// SPDX-License-Identifier: Apache-2.0

package park

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

const (
	mib     = 1 << 20
	cardMiB = 1000
)

// program is a process on the emulated card. Its words are what must be in its memory.
type program struct {
	pid   int
	start uint64
	s     *emulator.Session
	bytes uint64
	words map[uint64]uint64
}

// world is a node of files, an emulated card, programs, and a Keeper that may be killed at any step.
type world struct {
	t        testing.TB
	w        *emulator.World
	dir      string // the state directory
	proc     string
	cgroup   string // of the container; its parent is the pod's, and dir/cg the root
	k        *Keeper
	programs map[int]*program
	nextPID  int
	now      time.Time
	// dies is called at each point of a child's work. It may panic: with killed, all ends there, with
	// childKilled only the child.
	dies func(point string)
	most uint64
}

// killed is the panic of a kill -9.
type killed struct{ at string }

func newWorld(t testing.TB) *world {
	t.Helper()
	w, err := emulator.New(emulator.Spec{Count: 1, CUDA: "12.8", GPUs: []emulator.GPUSpec{{MemoryMiB: cardMiB + 48, ReservedMiB: 48}}})
	if err != nil {
		t.Fatal(err)
	}
	n := &world{t: t, w: w, dir: t.TempDir(), proc: t.TempDir(), programs: map[int]*program{}, nextPID: 100,
		now: time.Unix(1e9, 0), most: 1 << 40}
	root := t.TempDir()
	n.cgroup = filepath.Join(root, "pod", "container")
	n.write(filepath.Join(n.proc, "sys/kernel/random/boot_id"), "a-boot\n")
	n.write(filepath.Join(n.proc, "meminfo"), "MemTotal: 1 kB\nMemAvailable:   1048576000 kB\n")
	for _, dir := range []string{n.cgroup, filepath.Dir(n.cgroup)} {
		for file, text := range map[string]string{"memory.max": "max", "memory.high": "max", "memory.current": "0",
			"memory.stat": "anon 0\ninactive_file 0"} {
			n.write(filepath.Join(dir, file), text+"\n")
		}
	}
	n.open()
	t.Cleanup(func() { _ = n.k.Close() })
	return n
}

func (n *world) write(path, text string) {
	n.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		n.t.Fatal(err)
	}
}

// open is the start of an agent.
func (n *world) open() {
	n.t.Helper()
	if n.k != nil {
		_ = n.k.Close()
	}
	k, err := Open(Options{Dir: n.dir, Most: n.most, ProcRoot: n.proc, LockFor: 2 * time.Millisecond,
		Now: func() time.Time { n.now = n.now.Add(time.Millisecond); return n.now }})
	if err != nil {
		n.t.Fatal(err)
	}
	k.child, k.pause = n.child, time.Microsecond
	n.k = k
}

// child does what a child process does, in this process.
func (n *world) child(_ context.Context, r request, _ time.Duration) (map[int]answer, error) {
	n.at("before " + r.Verb)
	s := n.w.Open(emulator.Opening{PID: 50})
	defer s.Close()
	if r := s.Init(); r != emulator.Success {
		return nil, r
	}
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = func() (err error) {
		defer func() {
			if r := recover(); r == (childKilled{}) {
				err = errors.New("signal: killed")
			} else if r != nil {
				panic(r)
			}
		}()
		return Serve(bytes.NewReader(body), &out, n.proc, func() (Library, error) { return library{n, s}, nil })
	}()
	answers := map[int]answer{}
	for lines := json.NewDecoder(&out); ; {
		var a answer
		if lines.Decode(&a) != nil {
			break
		}
		answers[a.PID] = a
	}
	n.at("after " + r.Verb)
	return answers, err
}

func (n *world) at(point string) {
	if n.dies != nil {
		n.dies(point)
	}
}

// library is the emulated driver.
type library struct {
	n *world
	s *emulator.Session
}

// code is what a Return is as an error of CUDA.
func code(r emulator.Return) int {
	switch r {
	case emulator.OutOfMemory:
		return codeOutOfMemory
	case emulator.NotSupported:
		return 801
	case emulator.InvalidArgument:
		return 1
	}
	return int(r)
}

func (l library) do(verb string, pid int, call func(int) emulator.Return) int {
	l.n.at("in " + verb)
	r := call(pid)
	l.n.at("in " + verb)
	return code(r)
}

// childKilled is the panic of a child's kill -9.
type childKilled struct{}

func (l library) State(pid int) (State, int) {
	state, r := l.s.CheckpointState(pid)
	return State(state), code(r)
}
func (l library) Lock(pid int, d time.Duration) int {
	return l.do("lock", pid, func(pid int) emulator.Return { return l.s.Lock(pid, d) })
}
func (l library) Checkpoint(pid int) int { return l.do("checkpoint", pid, l.s.Checkpoint) }
func (l library) Restore(pid int) int    { return l.do("restore", pid, l.s.Restore) }
func (l library) Unlock(pid int) int     { return l.do("unlock", pid, l.s.Unlock) }

// --- programs ---------------------------------------------------------------

// begin starts a program with so much memory, and nothing else on a full card.
func (n *world) begin(size uint64, random *rand.Rand) *program {
	n.t.Helper()
	n.nextPID++
	p := &program{pid: n.nextPID, start: uint64(n.nextPID) * 7, bytes: size, words: map[uint64]uint64{}}
	n.write(filepath.Join(n.proc, strconv.Itoa(p.pid), "stat"),
		fmt.Sprintf("%d (a) b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 %d 20 21\n", p.pid, p.start))
	p.s = n.w.Open(emulator.Opening{PID: p.pid})
	if r := p.s.Init(); r != emulator.Success {
		n.t.Fatal(r)
	}
	if r := p.s.Charge("cuMemAlloc_v2", 0, int64(size)); r != emulator.Success {
		n.t.Fatalf("a program has no room that is there: %v", r)
	}
	for range 4 {
		address, word := random.Uint64N(size), random.Uint64()
		if r := p.s.Store(address, word); r != emulator.Success {
			n.t.Fatal(r)
		}
		p.words[address] = word
	}
	n.programs[p.pid] = p
	return p
}

// end is a program's death.
func (n *world) end(p *program) {
	n.t.Helper()
	p.s.Close()
	delete(n.programs, p.pid)
	if err := os.RemoveAll(filepath.Join(n.proc, strconv.Itoa(p.pid))); err != nil {
		n.t.Fatal(err)
	}
}

func (n *world) stateOf(p *program) State {
	n.t.Helper()
	s := n.w.Open(emulator.Opening{PID: 51})
	defer s.Close()
	if r := s.Init(); r != emulator.Success {
		n.t.Fatal(r)
	}
	state, r := s.CheckpointState(p.pid)
	if r != emulator.Success {
		n.t.Fatalf("state of %d: %v", p.pid, r)
	}
	return State(state)
}

// runs says whether a program is as if nothing had ever happened to it.
func (n *world) runs(p *program) {
	n.t.Helper()
	if state := n.stateOf(p); state != Running {
		n.t.Fatalf("process %d is in state %d, it should run", p.pid, state)
	}
	for address, want := range p.words {
		if got, r := p.s.Load(address); r != emulator.Success || got != want {
			n.t.Fatalf("process %d has %#x at %#x, want %#x (%v)", p.pid, got, address, want, r)
		}
	}
}

func (n *world) set(key string, of ...*program) Set {
	s := Set{Key: key, Cgroup: n.cgroup, CgroupRoot: filepath.Dir(filepath.Dir(n.cgroup))}
	for _, p := range of {
		s.Processes = append(s.Processes, Process{p.pid, p.start})
		s.Bytes += p.bytes
	}
	return s
}

// used is what the card has given, in bytes.
func (n *world) used() uint64 { return n.w.State().GPUs[0].UsedMiB * mib }

func (n *world) phase(key string) Phase {
	for _, r := range n.k.Sets() {
		if r.Key == key {
			return r.Phase
		}
	}
	return ""
}
