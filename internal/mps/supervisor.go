// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/atomicfile"
	"example.com/gpu-agent/pkg/gpu"
)

// Options are a supervisor's.
type Options struct {
	// StateDir is the agent's state directory, with the same path here as on the host.
	StateDir string
	Driver   Driver
	// Siblings has daemons be children of this process's parent, which must be Init. Otherwise they
	// are children of this process.
	Siblings bool
	// Beat is the time between two rounds of a keeper; half a second if zero.
	Beat time.Duration
	// Probe is the program that calls cuInit and ends, with its arguments; empty if there is none. It
	// prints the result.
	Probe  []string
	Logger *slog.Logger
	// singleUser starts daemons without multi-user mode, for tests with drivers that lack it.
	singleUser bool
	// at is called at each step that leaves something behind, for tests that kill the supervisor
	// there.
	at func(step string)
	// patience replaces deadline, for tests on slow machines.
	patience time.Duration
}

// beat is the usual time between two rounds: clients may be refused when the heartbeat is two
// seconds old.
const beat = 500 * time.Millisecond

// Supervisor keeps the daemons. Make it with New; Run must run before the other methods answer.
type Supervisor struct {
	opts     Options
	root     *os.Root // <state directory>/mps
	lock     *os.File
	versions versions

	mu     sync.Mutex // guards what follows
	known  bool
	wants  map[gpu.UUID]Want
	rounds map[gpu.UUID]*rounds
	// begin has a keeper make rounds; nil while Run does not run.
	begin func(*rounds)
}

// rounds are the rounds of one keeper.
type rounds struct {
	*keeper
	wake chan struct{} // of size 1
	// Guarded by Supervisor.mu: how often a round was asked for, how often one has ended that began
	// after that, and what is closed at the end of a round.
	asked, done int
	ended       chan struct{}
}

// New takes the state directory, which no other supervisor may have. The error wraps gpu.ErrInUse
// if one has it.
func New(opts Options) (*Supervisor, error) {
	opts.Beat = cmp.Or(opts.Beat, beat)
	opts.patience = cmp.Or(opts.patience, deadline)
	if opts.at == nil {
		opts.at = func(string) {}
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	dir := filepath.Join(opts.StateDir, rootDir)
	longest := files{filepath.Join(dir, "GPU-00000000-0000-0000-0000-000000000000")}
	if err := longest.fits(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of MPS: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open the directory of MPS: %w", err)
	}
	s := &Supervisor{
		opts: opts, root: root, wants: map[gpu.UUID]Want{}, rounds: map[gpu.UUID]*rounds{},
	}
	if err := errors.Join(s.take(), s.load()); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// lockWait is how long a new supervisor waits for the lock. A process that the former one was just
// starting when it was killed has the lock, too, until it executes its program.
const lockWait = time.Second

// take takes the lock, which the kernel frees at the end of the process.
func (s *Supervisor) take() (err error) {
	if s.lock, err = s.root.OpenFile("lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return fmt.Errorf("open the lock of MPS: %w", err)
	}
	for end := time.Now().Add(lockWait); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end) {
			continue
		}
		return fmt.Errorf("lock %s: %v: %w by another supervisor",
			filepath.Join(s.root.Name(), "lock"), err, gpu.ErrInUse)
	}
}

// Close frees the state directory. It ends no daemon.
func (s *Supervisor) Close() error {
	var errs []error
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(append(errs, s.root.Close())...)
}

// wantFile has what an agent has said last.
const wantFile = "want.json"

// said is the form of wantFile.
type said struct {
	Version int    `json:"version"`
	Want    []Want `json:"want"`
}

const saidVersion = 1

// load reads what an agent has told a predecessor. With a broken file nothing is known, until an
// agent says it again.
func (s *Supervisor) load() error {
	data, err := s.root.ReadFile(wantFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read what the agent has said: %w", err)
	}
	wants, err := parse(data)
	if err != nil {
		s.opts.Logger.Warn("what the agent has said cannot be read: daemons stay as they are until it says it again",
			"file", filepath.Join(s.root.Name(), wantFile), "err", err)
		return nil
	}
	s.adoptWantsLocked(wants)
	return nil
}

func parse(data []byte) ([]Want, error) {
	var file said
	if err := strict(data, &file); err != nil {
		return nil, err
	}
	if file.Version != saidVersion {
		return nil, fmt.Errorf("it has version %d, want %d", file.Version, saidVersion)
	}
	return check(file.Want)
}

func (s *Supervisor) save(wants []Want) error {
	data, err := json.MarshalIndent(said{saidVersion, wants}, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(s.root, wantFile, "."+wantFile, 0o600, atomicfile.Unflushed, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	}); err != nil {
		return fmt.Errorf("write what the agent says: %w; check free space in %s", err, s.root.Name())
	}
	return nil
}

// strict decodes one JSON value without unknown fields.
func strict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if d.More() {
		return errors.New("there is more than one value")
	}
	return nil
}

func (s *Supervisor) adoptWantsLocked(wants []Want) {
	s.known = true
	clear(s.wants)
	for _, w := range wants {
		s.wants[w.GPU] = w
	}
}

// Run keeps the daemons, and serves agents, until ctx ends. It ends no daemon then.
func (s *Supervisor) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	errs := make(chan error, 1)
	running.Go(func() { errs <- s.serve(ctx) })
	s.mu.Lock()
	s.begin = func(r *rounds) { running.Go(func() { s.keep(ctx, r) }) }
	s.beginLocked()
	s.mu.Unlock()
	defer s.rest()
	select {
	case <-ctx.Done():
		return nil
	case err := <-errs:
		return err
	}
}

// rest forgets the keepers at the end of Run.
func (s *Supervisor) rest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin = nil
	for _, r := range s.rounds {
		r.done = r.asked
		close(r.ended)
		r.ended = make(chan struct{})
	}
	clear(s.rounds)
}

// beginLocked has a keeper for each GPU that is wanted, or has a directory. Until an agent has said
// what shall be, nothing is touched.
func (s *Supervisor) beginLocked() {
	if !s.known || s.begin == nil {
		return
	}
	for u := range s.allLocked() {
		if s.rounds[u] == nil {
			s.rounds[u] = s.newRounds(u)
			s.begin(s.rounds[u])
		}
	}
}

// allLocked returns the GPUs that are wanted or have a directory.
func (s *Supervisor) allLocked() map[gpu.UUID]Want {
	all := maps.Clone(s.wants)
	entries, err := fs.ReadDir(s.root.FS(), ".")
	if err != nil {
		s.opts.Logger.Warn("look for GPUs that have had MPS", "err", err)
	}
	for _, e := range entries {
		if u := gpu.UUID(e.Name()); e.IsDir() && uuid.MatchString(e.Name()) && len(all) < 2*mostGPUs {
			if _, wanted := all[u]; !wanted {
				all[u] = Want{}
			}
		}
	}
	return all
}

func (s *Supervisor) newRounds(u gpu.UUID) *rounds {
	return &rounds{wake: make(chan struct{}, 1), ended: make(chan struct{}), keeper: &keeper{
		gpu: u, files: files{filepath.Join(s.opts.StateDir, rootDir, string(u))},
		driver: s.opts.Driver, versions: &s.versions, log: s.opts.Logger, siblings: s.opts.Siblings,
		at: s.opts.at, patience: s.opts.patience,
		make:  func(p program) control { return v2{p, s.opts.Driver, !s.opts.singleUser, s.opts.patience} },
		turn:  make(chan struct{}, 1),
		state: Daemon{GPU: u},
	}}
}

// keep makes rounds for one GPU until it is not wanted and nothing is left of it.
func (s *Supervisor) keep(ctx context.Context, r *rounds) {
	tick := time.NewTicker(s.opts.Beat)
	defer tick.Stop()
	defer func() {
		r.turn <- struct{}{}
		r.beat.close()
		<-r.turn
	}()
	for {
		s.mu.Lock()
		asked := r.asked
		var want *Want
		if w, is := s.wants[r.gpu]; is {
			want = &w
		}
		s.mu.Unlock()
		gone := r.round(ctx, want)
		s.mu.Lock()
		if _, wanted := s.wants[r.gpu]; gone && !wanted {
			asked = r.asked // this round answers those who asked meanwhile, too
			delete(s.rounds, r.gpu)
		} else {
			gone = false
		}
		r.done = asked
		close(r.ended)
		r.ended = make(chan struct{})
		s.mu.Unlock()
		if gone {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-tick.C:
		}
	}
}
