// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// end ends all of the GPU's processes of MPS, and removes its directory.
func (k *keeper) end(ctx context.Context) error {
	if err := k.stop(ctx); err != nil {
		return err
	}
	k.beat.close()
	if err := k.files.remove(); err != nil {
		return &Problem{Files, err.Error()}
	}
	return nil
}

// stop ends all of the GPU's processes of MPS: first the door, then the daemon by its own command,
// and by force what is left. Processes of others are left alone.
func (k *keeper) stop(ctx context.Context) error {
	if err := k.shut(); err != nil {
		return &Problem{Files, err.Error()}
	}
	k.at("shut")
	k.quit(ctx)
	k.at("quit")
	all, err := relatives(k.files.control())
	if err != nil {
		return &Problem{Files, err.Error()}
	}
	for _, r := range all {
		if err := r.kill(); err != nil {
			return &Problem{NotEnded, fmt.Sprintf("end process %d of MPS: %v", r.pid, err)}
		}
	}
	for _, r := range all {
		if !r.ended(endWait) {
			return &Problem{NotEnded, fmt.Sprintf("process %d of MPS was killed and lives", r.pid)}
		}
	}
	k.process = process{}
	k.stood, k.serveAt, k.servePause = 0, 0, 0
	if pid, listens := k.stillListens(); listens {
		return &Problem{Foreign, fmt.Sprintf("process %d listens at %s and is not the GPU's daemon: end it",
			pid, k.files.socket())}
	}
	if err := k.files.clear(); err != nil {
		return &Problem{Files, err.Error()}
	}
	k.at("cleared")
	return nil
}

// stillListens waits for the kernel to close what a killed process had, and returns what listens
// after that.
func (k *keeper) stillListens() (pid int, listens bool) {
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		var err error
		if pid, err = listener(k.files.socket()); err != nil {
			return 0, false
		}
	}
	return pid, true
}

// quit has the daemon end itself and its servers. A daemon that does not is left to be killed.
func (k *keeper) quit(ctx context.Context) {
	program, err := k.driver.find(k.versions)
	if err != nil {
		return // without a program to tell it
	}
	pid, err := listener(k.files.socket())
	if err != nil {
		return
	}
	c := k.make(program)
	if c.ours(k.files, k.gpu, pid) != nil {
		return
	}
	p, err := processOf(pid)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, endWait)
	defer cancel()
	for p.alive() && ctx.Err() == nil { // another control program may have the daemon's one place
		if err := c.quit(ctx, k.files, force); err != nil {
			k.log.Warn("the MPS daemon does not quit", "gpu", k.gpu, "err", err)
		}
		if p.ended(time.Second) {
			break
		}
	}
}

// detach detaches clients, and returns what became of each, in the same order.
func (k *keeper) detach(ctx context.Context, clients []int) []Detached {
	d := detaching{k, make([]Detached, len(clients))}
	for i, pid := range clients {
		d.all[i] = Detached{pid, Unanswered}
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
		if k.control != nil && k.process.alive() {
			d.tell(ctx)
			d.awaitGone(ctx)
		}
	case <-ctx.Done():
	case <-time.After(k.patience): // a round waits for a daemon that is silent
	}
	k.update(func(state *Daemon) {
		for _, one := range d.all {
			switch one.Outcome {
			case Gone:
				state.Detached++
			case Unanswered:
				state.TimedOut++
			case Listed, NoClient:
			}
		}
	})
	return d.all
}

// detaching is one detach, while its keeper has the turn.
type detaching struct {
	*keeper
	all []Detached
}

// tell tells the daemon to detach the clients that it lists, which are Listed then, and the others NoClient. After
// a client that the daemon has not answered for, it tells of no other.
func (d detaching) tell(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, d.patience)
	s, err := d.look(bounded)
	cancel()
	if err != nil {
		return
	}
	for i := range d.all {
		at := s.serverOf(d.all[i].Client)
		if at < 0 {
			d.all[i].Outcome = NoClient
			continue
		}
		if err := d.control.terminate(ctx, d.files, s.servers[at].PID, d.all[i].Client); err != nil {
			return
		}
		d.heard() // many clients take longer than a heartbeat may be old
		d.all[i].Outcome = Listed
	}
}

// relist is the time between two looks for whether clients are still listed.
const relist = 50 * time.Millisecond

// awaitGone waits until the daemon lists none of those that are Listed, which are Gone then.
func (d detaching) awaitGone(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	listed := func(one Detached) bool { return one.Outcome == Listed }
	for slices.ContainsFunc(d.all, listed) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(relist):
		}
		s, err := d.look(ctx)
		if err != nil && ctx.Err() != nil {
			return
		}
		for i := range d.all {
			if !listed(d.all[i]) {
				continue
			}
			if err != nil {
				d.all[i].Outcome = Unanswered
			} else if s.serverOf(d.all[i].Client) < 0 {
				d.all[i].Outcome = Gone
			}
		}
	}
}

// End ends all daemons below a state directory that no supervisor has, and forgets what agents have
// said. It is what a clean-up of the node does. The error wraps gpu.ErrInUse if a supervisor runs.
func End(ctx context.Context, opts Options) error {
	s, err := New(opts)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.save(nil); err != nil {
		return err
	}
	s.adoptWantsLocked(nil)
	if err := s.endAll(ctx, (*keeper).end); err != nil {
		return err
	}
	return s.root.Remove(wantFile)
}

// Stop ends all daemons as End does, and keeps what agents have said and the directories that
// containers have mounted. So the next supervisor goes on, and containers that are still there
// reach its daemons. It is what Init does last.
func Stop(ctx context.Context, opts Options) error {
	s, err := New(opts)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.endAll(ctx, (*keeper).stop)
}

// endAll ends the daemons of all GPUs that are wanted or have a directory.
func (s *Supervisor) endAll(ctx context.Context, end func(*keeper, context.Context) error) error {
	var errs []error
	for u := range s.allLocked() {
		k := s.newRounds(u).keeper
		if err := end(k, ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", u, err))
		}
		k.beat.close()
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("end the daemons of MPS: %w", err)
	}
	return nil
}
