// SPDX-License-Identifier: Apache-2.0

package park

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// tries is how often a step is made again after its child has died.
	tries = 3
	// patience is how long a set may stay half checkpointed while no child answers.
	patience = 2 * time.Minute
)

// Park parks a set. It returns nil once no process of it has memory on a GPU; a set that is parked already
// stays so, and one that was being restored is parked again. It refuses with ErrNoRoom where the host has
// no memory for it. An error that wraps ErrBroken means that the set's container must be ended. After any
// other error no process of the set is locked, or Settle goes on with it.
//
// From the first checkpoint on, the end of ctx no longer matters: what has begun is completed.
func (k *Keeper) Park(ctx context.Context, of Set) error {
	if !plainName(of.Key) {
		return fmt.Errorf("park: key %q is not a plain name", of.Key)
	}
	if err := checkProcesses(of.Processes); err != nil {
		return fmt.Errorf("park allocation %s: %w", of.Key, err)
	}
	for {
		fresh := &set{turn: make(chan struct{}, 1), r: Record{Version: recordVersion, Boot: k.boot, Key: of.Key,
			Processes: of.Processes, Bytes: of.Bytes, Began: k.o.Now()}}
		s, err := k.enter(ctx, of.Key, fresh)
		if err != nil {
			return fmt.Errorf("park allocation %s: %w", of.Key, err)
		}
		again, err := k.park(ctx, s, s == fresh, of)
		s.leave()
		if !again {
			return err
		}
	}
}

// park parks a set in its turn. fresh is false if there was an earlier step; again is true if that is
// settled and the set is forgotten.
func (k *Keeper) park(ctx context.Context, s *set, fresh bool, of Set) (again bool, _ error) {
	if fresh {
		return false, k.parkFresh(ctx, s, of)
	}
	if err := k.settle(ctx, s); err != nil {
		return false, fmt.Errorf("park allocation %s: %w", of.Key, err)
	}
	if !k.knows(s) {
		return true, nil
	}
	switch s.r.Phase {
	case Broken:
		return false, fmt.Errorf("park allocation %s: %w: %s", of.Key, ErrBroken, s.r.Why)
	case Restoring:
		// Some of its processes run. They are locked first, as in a new park, but a failure leaves
		// others checkpointed.
		if err := k.lockRest(ctx, s); err != nil {
			return false, fmt.Errorf("park allocation %s again: %w", of.Key, err)
		}
		return false, k.checkpoint(context.WithoutCancel(ctx), s, nil)
	case Locking, Saving:
		return false, fmt.Errorf("park allocation %s: it is still %s", of.Key, s.r.Phase)
	case Parked:
	}
	return false, nil
}

func (k *Keeper) parkFresh(ctx context.Context, s *set, of Set) error {
	states, err := k.begin(ctx, s, of)
	if err != nil {
		k.mu.Lock()
		k.stats.Refused++
		k.mu.Unlock()
		return fmt.Errorf("park allocation %s: %w", of.Key, err)
	}
	if err := k.checkpoint(context.WithoutCancel(ctx), s, states); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stats.Parks++
	k.stats.Bytes += of.Bytes
	k.stats.ParkTime += k.o.Now().Sub(s.r.Began)
	return nil
}

// begin finds room for a new set and locks it. It returns the states of its processes. After an error the
// set is forgotten, or in Locking.
func (k *Keeper) begin(ctx context.Context, s *set, of Set) (map[int]State, error) {
	if err := k.admit(s, of); err != nil {
		return nil, errors.Join(err, k.forget(s))
	}
	if err := k.save(s, func(r *Record) { r.Phase = Locking }); err != nil {
		return nil, errors.Join(err, k.forget(s))
	}
	answers, err := k.do(ctx, s, verbLock, s.r.Processes, k.o.LockFor)
	pid, code := failed(answers, s.r.Processes)
	if code != 0 {
		err = errors.Join(err, fmt.Errorf("lock process %d: %w", pid, refusal(code)))
	}
	if err == nil {
		err = ctx.Err()
	}
	if errors.Is(err, errIdle) {
		return nil, errors.Join(err, k.forget(s))
	}
	if err != nil {
		// Settle does it again if it fails now.
		return nil, errors.Join(err, k.unlockAll(context.WithoutCancel(ctx), s))
	}
	return s.after(answers), nil
}

// refusal puts a driver's code into words.
func refusal(code int) error {
	switch code {
	case codeOutOfMemory:
		return fmt.Errorf("the driver answers %d (out of memory): %w", code, ErrNoRoom)
	case codeNotReady:
		return fmt.Errorf("the driver answers %d (a call of the process did not end in time)", code)
	case 801:
		return fmt.Errorf("the driver answers %d (it cannot checkpoint this process)", code)
	}
	return fmt.Errorf("the driver answers %d", code)
}

// admit returns ErrNoRoom if the host has no memory for a set.
func (k *Keeper) admit(s *set, of Set) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all, coming uint64
	for _, other := range k.sets {
		if other == s || other.r.Phase == "" {
			continue
		}
		all += other.r.Bytes
		if other.r.Phase == Locking || other.r.Phase == Saving {
			coming += other.r.Bytes // the host will have less by that
		}
	}
	if all+of.Bytes < all || all+of.Bytes > k.o.Most {
		return fmt.Errorf("%d bytes, and %d are parked of %d that may be: %w", of.Bytes, all, k.o.Most, ErrNoRoom)
	}
	in, err := cgroupRoom(of.Cgroup, of.CgroupRoot)
	if err != nil {
		return err
	}
	on, err := nodeRoom(k.o.ProcRoot, k.o.Spare)
	if err != nil {
		return fmt.Errorf("read the node's available memory: %w", err)
	}
	if room := min(in, on); of.Bytes+coming > room {
		return fmt.Errorf("%d bytes, and %d of others are on their way; its cgroup has room for %d, the node for %d: %w",
			of.Bytes, coming, in, on, ErrNoRoom)
	}
	// From here on others count it.
	s.r.Phase = Locking
	return nil
}

// unlockAll unlocks the processes of a set that are locked, and forgets the set.
func (k *Keeper) unlockAll(ctx context.Context, s *set) error {
	states, err := k.states(ctx, s)
	if err != nil {
		return err
	}
	locked := s.in(states, Locked)
	answers, err := k.do(ctx, s, verbUnlock, locked, 0)
	if err != nil {
		return fmt.Errorf("unlock allocation %s: %w", s.r.Key, err)
	}
	if pid, code := failed(answers, locked); code != 0 {
		return k.breaks(s, fmt.Errorf("unlock process %d: %w", pid, refusal(code)))
	}
	if list := append(s.in(states, Failed), s.in(states, Checkpointed)...); len(list) > 0 {
		return k.breaks(s, fmt.Errorf("process %d was only to be locked, and it is in state %d",
			list[0].PID, states[list[0].PID]))
	}
	return k.forget(s)
}

// lockRest locks those processes of a set that run.
func (k *Keeper) lockRest(ctx context.Context, s *set) error {
	states, err := k.states(ctx, s)
	if err != nil {
		return err
	}
	running := s.in(states, Running)
	answers, err := k.do(ctx, s, verbLock, running, k.o.LockFor)
	if err != nil {
		return err
	}
	if pid, code := failed(answers, running); code != 0 {
		return fmt.Errorf("lock process %d: %w", pid, refusal(code))
	}
	return nil
}

// checkpoint moves the memory of a set to the host, where each of its processes is locked or checkpointed
// already. states are theirs, or nil if they are unknown.
func (k *Keeper) checkpoint(ctx context.Context, s *set, states map[int]State) error {
	if err := k.save(s, func(r *Record) { r.Phase = Saving }); err != nil {
		// Nothing was moved yet, or a successor goes on from the record that stands.
		return fmt.Errorf("park allocation %s: %w", s.r.Key, errors.Join(err, k.rollBack(ctx, s)))
	}
	var last error
	for range tries {
		var err error
		if states == nil {
			states, err = k.states(ctx, s)
		}
		if err == nil {
			var done bool
			if done, err = k.checkpointRest(ctx, s, states); done || errors.Is(err, ErrBroken) {
				return err
			}
		}
		states, last = nil, err
		time.Sleep(k.pause)
	}
	// The driver may be away for a moment, as at the start of a node. But nothing stays locked for ever.
	began := s.r.Began
	if k.opened.After(began) {
		began = k.opened
	}
	if k.o.Now().Sub(began) < patience {
		return fmt.Errorf("park allocation %s: its checkpoint has not ended: %w", s.r.Key, last)
	}
	return k.breaks(s, fmt.Errorf("its checkpoint has not ended after %v: %w", patience, last))
}

// rollBack unlocks a set that could not be recorded as Saving.
func (k *Keeper) rollBack(ctx context.Context, s *set) error {
	if s.r.Phase != Locking {
		return nil
	}
	return k.unlockAll(ctx, s)
}

func (k *Keeper) checkpointRest(ctx context.Context, s *set, states map[int]State) (done bool, err error) {
	if list := s.in(states, Failed); len(list) > 0 {
		return false, k.breaks(s, fmt.Errorf("process %d has failed", list[0].PID))
	}
	if list := s.in(states, Running); len(list) > 0 {
		return false, k.breaks(s, fmt.Errorf("process %d was unlocked by another program", list[0].PID))
	}
	locked := s.in(states, Locked)
	answers, err := k.do(ctx, s, verbCheckpoint, locked, 0)
	if pid, code := failed(answers, locked); code != 0 {
		return false, k.breaks(s, fmt.Errorf("checkpoint process %d: %w", pid, refusal(code)))
	}
	if err != nil {
		return false, err // the next try asks for the states
	}
	if len(s.in(states, Checkpointed))+len(locked) < len(s.r.Processes) {
		return false, fmt.Errorf("the driver is still moving memory of allocation %s", s.r.Key)
	}
	return true, k.save(s, func(r *Record) {
		r.Phase = Parked
		if r.Parked.IsZero() {
			r.Parked = k.o.Now()
		}
	})
}

// Restore puts a set back onto its GPUs and unlocks it. The caller has seen that the room is free. It
// returns nil if the set is not parked, and ErrNoRoom if the driver finds no room: then the set is parked
// as before. An error that wraps ErrBroken means that its container must be ended. After any other error
// the set is in Restoring; Restore can be called again, or Park.
func (k *Keeper) Restore(ctx context.Context, key string) error {
	s, err := k.enter(ctx, key, nil)
	if err != nil {
		return fmt.Errorf("restore allocation %s: %w", key, err)
	}
	if s == nil {
		return nil
	}
	defer s.leave()
	ctx = context.WithoutCancel(ctx)
	began := k.o.Now()
	if err := k.settle(ctx, s); err != nil {
		return fmt.Errorf("restore allocation %s: %w", key, err)
	}
	switch {
	case !k.knows(s):
		return nil
	case s.r.Phase == Broken:
		return fmt.Errorf("restore allocation %s: %w: %s", key, ErrBroken, s.r.Why)
	}
	if err := k.save(s, func(r *Record) { r.Phase = Restoring }); err != nil {
		return fmt.Errorf("restore allocation %s: %w", key, err)
	}
	parked := s.r.Parked
	if err := k.restore(ctx, s); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stats.Restores++
	k.stats.RestoreTime += k.o.Now().Sub(began)
	k.stats.ParkedTime += max(0, k.o.Now().Sub(parked))
	return nil
}

// restore restores and unlocks a set in Restoring.
func (k *Keeper) restore(ctx context.Context, s *set) error {
	var last error
	for range tries {
		states, err := k.states(ctx, s)
		if err != nil {
			last = err
			time.Sleep(k.pause)
			continue
		}
		done, err := k.restoreRest(ctx, s, states)
		if done || errors.Is(err, ErrBroken) || errors.Is(err, ErrNoRoom) {
			return err
		}
		last = err
		time.Sleep(k.pause)
	}
	return fmt.Errorf("restore allocation %s: %w", s.r.Key, last)
}

func (k *Keeper) restoreRest(ctx context.Context, s *set, states map[int]State) (done bool, err error) {
	if list := s.in(states, Failed); len(list) > 0 {
		return false, k.breaks(s, fmt.Errorf("process %d has failed", list[0].PID))
	}
	if list := append(s.in(states, Checkpointing), s.in(states, RestoringMemory)...); len(list) > 0 {
		return false, fmt.Errorf("the driver is still moving memory of process %d", list[0].PID)
	}
	off := s.in(states, Checkpointed)
	answers, err := k.do(ctx, s, verbRestore, off, 0)
	if pid, code := failed(answers, off); code == codeOutOfMemory && stays(answers[pid], Checkpointed) {
		return false, k.noRoom(ctx, s)
	} else if code != 0 {
		return false, k.breaks(s, fmt.Errorf("restore process %d: %w", pid, refusal(code)))
	}
	if err != nil {
		return false, err
	}
	on := append(s.in(states, Locked), off...)
	answers, err = k.do(ctx, s, verbUnlock, on, 0)
	if err != nil {
		return false, err
	}
	if pid, code := failed(answers, on); code != 0 {
		return false, k.breaks(s, fmt.Errorf("unlock process %d: %w", pid, refusal(code)))
	}
	return true, k.forget(s)
}

func stays(a answer, want State) bool { return a.State != nil && *a.State == want }

// noRoom parks a set again. The driver may have had room for some of its processes.
func (k *Keeper) noRoom(ctx context.Context, s *set) error {
	err := k.lockRest(ctx, s)
	if err == nil {
		err = k.checkpoint(ctx, s, nil)
	}
	return errors.Join(fmt.Errorf("restore allocation %s: %w on its GPUs", s.r.Key, ErrNoRoom), err)
}

// Settle goes on from what a process before this one has left, and forgets sets whose processes have all
// ended. It is cheap while there is nothing to do. Where the driver does not answer,
// it returns an error that names the sets, and is to be called again.
func (k *Keeper) Settle(ctx context.Context) error {
	var errs []error
	for _, r := range k.Sets() {
		s := k.enterNow(r.Key)
		if s == nil {
			continue // a step of it is under way
		}
		if err := k.settle(ctx, s); err != nil && !errors.Is(err, ErrBroken) {
			errs = append(errs, err)
		}
		s.leave()
	}
	return errors.Join(errs...)
}

func (k *Keeper) settle(ctx context.Context, s *set) error {
	if s.r.Phase == "" {
		return nil
	}
	alive := s.r.Boot == k.boot
	if alive {
		alive = false
		for _, p := range s.r.Processes {
			alive = alive || StartOf(k.o.ProcRoot, p.PID) == p.Start
		}
	}
	if !alive {
		return k.forget(s)
	}
	switch s.r.Phase {
	case Locking:
		return k.unlockAll(ctx, s)
	case Saving:
		return k.checkpoint(ctx, s, nil)
	case Parked:
		return k.settleParked(ctx, s)
	case Restoring:
		states, err := k.states(ctx, s)
		if err == nil && len(s.in(states, Running)) == len(s.r.Processes) {
			return k.forget(s)
		}
		return err
	case Broken:
	}
	return nil
}

// settleParked asks once whether all processes of a parked set are checkpointed.
func (k *Keeper) settleParked(ctx context.Context, s *set) error {
	if !s.asks {
		return nil
	}
	states, err := k.states(ctx, s)
	if err != nil || len(s.in(states, Checkpointed)) == len(s.r.Processes) {
		return err
	}
	return k.checkpoint(ctx, s, nil)
}
