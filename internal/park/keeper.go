// SPDX-License-Identifier: Apache-2.0

package park

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/atomicfile"
)

// Options of a Keeper. Dir, Most and Command are needed.
type Options struct {
	// Dir is the agent's state directory. The records are in Dir/park.
	Dir string
	// Most is the memory, in bytes, that all parked sets may have on the host together. 0: nothing is
	// parked.
	Most uint64
	// Spare is how many bytes of the node's available memory are left alone, for the kubelet's eviction
	// threshold and for what else starts.
	Spare uint64
	// Command makes a process that calls Serve with its standard input and output.
	Command func(context.Context) *exec.Cmd
	// ProcRoot is the /proc of the caller's PID namespace; empty means /proc.
	ProcRoot string
	// LockFor is how long locking a set may take; 0 means 5 s.
	LockFor time.Duration
	// Now is the clock; nil means time.Now.
	Now func() time.Time
	// Logger may be nil.
	Logger *slog.Logger
}

const (
	suffix = ".json"
	half   = ".new-"
	lock   = ".lock-"
)

// Keeper parks sets and knows those that are parked. It is safe for several goroutines; steps of one set
// follow each other. Only one process at a time may use a directory.
type Keeper struct {
	o    Options
	boot string
	dir  *os.Root
	// opened is when the records were read.
	opened time.Time
	// pause is the time before a step is made again.
	pause time.Duration
	// child is ask, or in tests something that takes its place.
	child func(context.Context, request, time.Duration) (map[int]answer, error)

	mu    sync.Mutex // guards what follows
	sets  map[string]*set
	stats Stats
}

// set is a set and what its steps need.
type set struct {
	turn chan struct{} // has an element while a step is under way
	// Guarded by Keeper.mu:
	r Record
	// asks is true until the driver has been asked for the states of the processes: at the start, and
	// after a child that did not answer.
	asks bool
}

// Stats counts what a Keeper has done since it was opened.
type Stats struct {
	Parks, Restores int           // that have succeeded
	Refused         int           // parks that have changed nothing
	Broken          int           // sets that were broken
	Bytes           uint64        // that succeeding parks have moved to the host
	ParkTime        time.Duration // that succeeding parks have taken together
	RestoreTime     time.Duration // likewise
	ParkedTime      time.Duration // between a park and the end of its restore, together
}

// Open reads the records. A record that cannot be read is removed, with an error in the log: what it
// named is unknown, as after a crash of the machine. Settle must be called before anything else.
func Open(o Options) (*Keeper, error) {
	o.ProcRoot = cmp.Or(o.ProcRoot, "/proc")
	o.LockFor = cmp.Or(o.LockFor, 5*time.Second)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	boot, err := os.ReadFile(filepath.Join(o.ProcRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return nil, fmt.Errorf("open the records of parked containers: %w", err)
	}
	path := filepath.Join(o.Dir, "park")
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("open the records of parked containers: %w", err)
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("open the records of parked containers: %w", err)
	}
	k := &Keeper{o: o, boot: strings.TrimSpace(string(boot)), dir: dir, opened: o.Now(), pause: 100 * time.Millisecond, sets: map[string]*set{}}
	k.child = k.ask
	if err := k.readAll(path); err != nil {
		return nil, errors.Join(fmt.Errorf("open the records of parked containers: %w", err), dir.Close())
	}
	return k, nil
}

// Close closes the directory. Records and parked processes stay.
func (k *Keeper) Close() error { return k.dir.Close() }

func (k *Keeper) readAll(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, half):
			err = k.dir.RemoveAll(name)
		case strings.HasSuffix(name, suffix) && name[0] != '.':
			err = k.readOne(name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *Keeper) readOne(name string) error {
	var r Record
	data, err := k.dir.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err == nil {
		err = r.check(name)
	}
	if err != nil {
		k.o.Logger.Error("removing the record of a parked container that cannot be read", "file", name, "err", err)
		return k.dir.RemoveAll(name)
	}
	k.sets[r.Key] = &set{turn: make(chan struct{}, 1), r: r, asks: true}
	return nil
}

// Sets returns the records, by key.
func (k *Keeper) Sets() []Record {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]Record, 0, len(k.sets))
	for _, s := range k.sets {
		r := s.r
		r.Processes = slices.Clone(r.Processes)
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b Record) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// Stats returns what was done so far.
func (k *Keeper) Stats() Stats {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.stats
}

// --- records ---------------------------------------------------------------

// save writes a set's record and keeps it. Nothing is done that is not recorded.
func (k *Keeper) save(s *set, change func(*Record)) error {
	r := s.r
	r.Processes = slices.Clone(r.Processes)
	change(&r)
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	err = atomicfile.Write(k.dir, r.Key+suffix, half+r.Key, 0o600, atomicfile.Unflushed, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
	if err != nil {
		return fmt.Errorf("record that allocation %s is %s: %w", r.Key, r.Phase, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s.r = r
	return nil
}

// forget removes a set's record.
func (k *Keeper) forget(s *set) error {
	if err := k.dir.Remove(s.r.Key + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget that allocation %s was parked: %w", s.r.Key, err)
	}
	_ = k.dir.Remove(lock + s.r.Key) // the next child makes another one
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.sets, s.r.Key)
	return nil
}

// breaks records that a set is broken, and returns ErrBroken with the reason.
func (k *Keeper) breaks(s *set, why error) error {
	if s.r.Phase != Broken {
		k.mu.Lock()
		k.stats.Broken++
		k.mu.Unlock()
	}
	k.o.Logger.Warn("a process may be broken by its checkpoint, so its container has to be ended", "allocation", s.r.Key, "err", why)
	err := k.save(s, func(r *Record) {
		r.Phase = Broken
		r.Why = cmp.Or(r.Why, fmt.Sprintf("%.300s", why.Error()))
	})
	return errors.Join(fmt.Errorf("allocation %s: %w: %w", s.r.Key, ErrBroken, why), err)
}

// enter waits for a set's turn. If there is none, fresh becomes the set, which may be nil.
func (k *Keeper) enter(ctx context.Context, key string, fresh *set) (*set, error) {
	for {
		k.mu.Lock()
		s := k.sets[key]
		if s == nil && fresh != nil {
			fresh.turn <- struct{}{}
			k.sets[key] = fresh
		}
		k.mu.Unlock()
		if s == nil {
			return fresh, nil
		}
		select {
		case s.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		k.mu.Lock()
		same := k.sets[key] == s
		k.mu.Unlock()
		if same {
			return s, nil
		}
		<-s.turn // it was forgotten meanwhile
	}
}

// enterNow is enter for a set without a step under way. It returns nil if there is none.
func (k *Keeper) enterNow(key string) *set {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.sets[key]
	if s == nil {
		return nil
	}
	select {
	case s.turn <- struct{}{}:
		return s
	default:
		return nil
	}
}

func (s *set) leave() { <-s.turn }

// knows reports whether a set has not been forgotten.
func (k *Keeper) knows(s *set) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.sets[s.r.Key] == s
}

// --- what the driver says ---------------------------------------------------

// within bounds a step's child: the driver has no time limit of its own for moving memory.
func within(bytes uint64) time.Duration {
	const slowest = 100 << 20 // bytes a second
	return 30*time.Second + time.Duration(bytes/slowest)*time.Second
}

// do has a child carry out a step for some processes of a set. It drops those of the set's processes that
// have ended.
func (k *Keeper) do(ctx context.Context, s *set, verb string, of []Process, limit time.Duration) (map[int]answer, error) {
	if len(of) == 0 {
		return nil, nil
	}
	r := request{Verb: verb, Processes: of, Lock: filepath.Join(k.dir.Name(), lock+s.r.Key), Timeout: limit}
	answers, err := k.child(ctx, r, limit+within(s.r.Bytes))
	gone := func(p Process) bool {
		return answers[p.PID].Gone || StartOf(k.o.ProcRoot, p.PID) != p.Start
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s.r.Processes = slices.DeleteFunc(slices.Clone(s.r.Processes), gone)
	s.asks = s.asks || err != nil
	return answers, err
}

// after returns the states of a set's processes by the answers to a step that had all of them; nil if one
// is unknown.
func (s *set) after(answers map[int]answer) map[int]State {
	out := map[int]State{}
	for _, p := range s.r.Processes {
		a := answers[p.PID]
		if a.State == nil {
			return nil
		}
		out[p.PID] = *a.State
	}
	return out
}

// states asks for the states of all processes of a set that live.
func (k *Keeper) states(ctx context.Context, s *set) (map[int]State, error) {
	answers, err := k.do(ctx, s, verbState, s.r.Processes, 0)
	if err != nil {
		return nil, fmt.Errorf("ask for the states of allocation %s: %w", s.r.Key, err)
	}
	out := s.after(answers)
	if out == nil {
		return nil, fmt.Errorf("ask for the states of allocation %s: the driver does not tell all: %+v", s.r.Key, answers)
	}
	k.mu.Lock()
	s.asks = false
	k.mu.Unlock()
	return out, nil
}

// in returns the processes of a set that are in a state.
func (s *set) in(states map[int]State, want State) (list []Process) {
	for _, p := range s.r.Processes {
		if state, ok := states[p.PID]; ok && state == want {
			list = append(list, p)
		}
	}
	return list
}

// failed returns the first process that a driver's call failed for, and the code; 0 if there is none.
func failed(answers map[int]answer, of []Process) (pid, code int) {
	for _, p := range of {
		if a := answers[p.PID]; a.Code != 0 && !a.Gone {
			return p.PID, a.Code
		}
	}
	return 0, 0
}
