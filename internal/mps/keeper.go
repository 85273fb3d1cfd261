// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// startWait is how long a new daemon may take until it listens. It takes some 20 ms.
	startWait = 5 * time.Second
	// force is after how many seconds a daemon that quits ends servers with clients by force, and
	// endWait how long it may take to end.
	force   = 2 * time.Second
	endWait = 4 * time.Second
	// firstPause and lastPause are the pauses before a daemon is started again.
	firstPause = 500 * time.Millisecond
	lastPause  = 30 * time.Second
	// serverWait is how long a round waits for a server that it has started. A later round finds one
	// that takes longer.
	serverWait = time.Second
	// steady is how long a daemon or a server lives that is no reason for a pause when it ends.
	steady = time.Minute
)

// keeper keeps one GPU's daemon.
type keeper struct {
	gpu      gpu.UUID
	files    files
	driver   Driver
	versions *versions
	log      *slog.Logger
	// make makes the back end for a control program.
	make func(program) control
	// siblings has daemons be children of this process's parent.
	siblings bool
	// at and patience are as in Options.
	at       func(step string)
	patience time.Duration

	// turn is of size 1 and full while a round or a detach speaks to the daemon.
	turn chan struct{}

	// What follows is used during a turn alone.
	process process // the daemon; zero if there is none
	beat    heartbeat
	// endOrphans is Want.EndOrphans of this round.
	endOrphans bool
	control    control // how to speak to the daemon
	began      time.Time
	pause      time.Duration
	notTill    time.Time
	// stood is when the server was first seen that stands, and serveAt when the next one may be
	// started after one that ended soon; both are times since boot, zero if there is none.
	// servePause is the pause before that.
	stood, serveAt, servePause time.Duration
	// refused is the program that has no multi-user mode. It is not started again.
	refused identity

	probing sync.Mutex // held while a probe runs

	mu    sync.Mutex // guards what follows
	state Daemon
}

// snapshot returns the state after the last round.
func (k *keeper) snapshot() Daemon {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.state
	d.Servers = slices.Clone(d.Servers)
	return d
}

func (k *keeper) update(f func(d *Daemon)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(&k.state)
}

// round makes the GPU as wanted, as far as that can be done now, and notes what is. A want of nil
// is that no daemon shall be. It reports whether nothing of the GPU is left.
func (k *keeper) round(ctx context.Context, want *Want) (gone bool) {
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	var err error
	if want == nil {
		if err = k.end(ctx); err == nil {
			return true
		}
	} else {
		err = k.keep(ctx, *want)
	}
	if ctx.Err() == nil { // what fails because this process ends is no news
		k.note(err)
	}
	return false
}

// note puts the outcome of a round into the state.
func (k *keeper) note(err error) {
	var p *Problem
	if err != nil && !errors.As(err, &p) {
		p = &Problem{Files, err.Error()}
	}
	if p != nil {
		p = &Problem{p.Code, brief.Cut(fmt.Sprintf("%s: %s", k.gpu, strings.ToValidUTF8(p.Text, "?")), brief.Text)}
	}
	was := k.snapshot().Problem
	if p != nil && (was == nil || was.Code != p.Code) {
		k.log.Warn("the MPS daemon is not as wanted", "gpu", k.gpu, "code", p.Code, "err", p.Text)
	}
	k.update(func(d *Daemon) {
		d.Problem, d.Open = p, k.files.isOpen()
		d.PID, d.Start = k.process.pid, k.process.start
		d.Serving, d.ServeAt = k.stood > 0, k.serveAt
		if k.process == (process{}) {
			d.Version, d.Percent = "", 0
			if p == nil || p.Code != Orphans && p.Code != Unreachable {
				d.Servers = nil // otherwise the servers are of a daemon that is not this keeper's
			}
		}
	})
}

// keep finds or starts the daemon, asks it what is, and sets what is different.
func (k *keeper) keep(ctx context.Context, want Want) error {
	program, missing := k.driver.find(k.versions)
	if missing != nil && !k.process.alive() {
		k.lost()
		return missing
	}
	k.endOrphans = want.EndOrphans
	err := k.find(program)
	for try := 0; try < 3 && errors.Is(err, Starting); try++ {
		time.Sleep(busyPause)
		err = k.find(program)
	}
	switch {
	case err != nil:
		return err
	case k.process == (process{}):
		if err := k.start(ctx, program); err != nil {
			return err
		}
	case missing == nil:
		k.control = k.make(program) // it may have moved
	}
	if want.Retire == (Identity{k.process.pid, k.process.start}) {
		return k.retire(ctx)
	}
	if err := k.match(ctx, want); err != nil {
		return err
	}
	if err := k.files.trim(); err != nil {
		return &Problem{Files, fmt.Sprintf("truncate what the daemon has printed: %v", err)}
	}
	if d := k.snapshot(); missing == nil && d.Version != program.version {
		return &Problem{Outdated, fmt.Sprintf("the daemon is of version %s, and %s is of %s: "+
			"take the GPU out of MPS when its last client has ended", d.Version, program.path, program.version)}
	}
	return nil
}

// retire keeps new clients out, and ends the daemon when it has none. The next round starts another.
// A daemon that does not answer is ended if it has no server, and so no client.
func (k *keeper) retire(ctx context.Context) error {
	if err := k.shut(); err != nil {
		return &Problem{Files, err.Error()}
	}
	k.at("shut to retire")
	pid := k.process.pid
	s, err := k.control.look(ctx, k.files)
	if err == nil {
		k.update(func(d *Daemon) { d.Percent, d.Servers, d.Answered = s.percent, s.servers, sinceBoot() })
		d := k.snapshot()
		if n := d.Clients(); n > 0 {
			return &Problem{Retiring, fmt.Sprintf("the daemon %d is replaced when its %d clients have ended", pid, n)}
		}
	} else {
		all, unread := relatives(k.files.control())
		if servers := pids(all, aServer); unread != nil || len(servers) > 0 && !k.endOrphans {
			return &Problem{Retiring, fmt.Sprintf("the daemon %d is to be replaced, and does not tell the clients of "+
				"its servers %v: %v", pid, servers, err)}
		}
	}
	if err := k.stop(ctx); err != nil {
		return err
	}
	k.log.Info("ended the MPS daemon, to start another", "gpu", k.gpu, "pid", pid)
	k.pause = 0
	return &Problem{Retiring, fmt.Sprintf("the daemon %d has ended, and the next one is started", pid)}
}

// lost forgets a daemon that has ended, and shuts the door behind it.
func (k *keeper) lost() {
	if k.process != (process{}) {
		k.log.Warn("the MPS daemon has ended", "gpu", k.gpu, "pid", k.process.pid)
		if !k.began.IsZero() && time.Since(k.began) < steady {
			k.later()
		} else {
			k.pause = 0
		}
	}
	k.process, k.control = process{}, nil
	k.stood, k.serveAt, k.servePause = 0, 0, 0 // the next daemon begins anew
	if err := k.shut(); err != nil {
		k.log.Warn("remove the links to an ended MPS daemon", "gpu", k.gpu, "err", err)
	}
}

// shut keeps new clients from the daemon, and tells the processes of containers that it is gone.
func (k *keeper) shut() error { return errors.Join(k.beat.stop(k.files.beat()), k.files.shut()) }

// later puts the next start off.
func (k *keeper) later() {
	k.pause = min(max(2*k.pause, firstPause), lastPause)
	k.notTill = time.Now().Add(k.pause)
}

// find finds the daemon that lives, and adopts it if this keeper does not know it. Without an error
// and without a process, a daemon may be started.
func (k *keeper) find(p program) error {
	if k.process.alive() {
		return k.reachable()
	}
	if k.process != (process{}) {
		k.lost()
	}
	pid, err := listener(k.files.socket())
	if err == nil {
		// Until it is known that this is not the GPU's daemon, its clients are not kept out: a
		// supervisor that has just been restarted finds it so.
		if err := k.adopt(pid, p); err != nil {
			k.lost()
			return err
		}
		return nil
	}
	k.lost()
	if errors.Is(err, errNotListening) {
		return k.remains()
	}
	return &Problem{Silent, err.Error()}
}

// reachable fails if the daemon lives and its sockets are gone. Without servers it is ended, so
// that the next round starts another.
func (k *keeper) reachable() error {
	if pid, err := listener(k.files.socket()); err != nil && !errors.Is(err, errNotListening) || pid == k.process.pid {
		return nil // the question after this one is whether it answers
	} else if err == nil {
		return &Problem{Foreign, fmt.Sprintf("process %d listens at %s, and the GPU's daemon is process %d: "+
			"end process %[1]d", pid, k.files.socket(), k.process.pid)}
	}
	return k.endUnreachable(k.process)
}

// endUnreachable ends a daemon that has lost its socket, unless it has servers that may have clients.
func (k *keeper) endUnreachable(p process) error {
	if err := k.shut(); err != nil {
		return &Problem{Files, err.Error()}
	}
	all, err := relatives(k.files.control())
	if err != nil {
		return &Problem{Files, err.Error()}
	}
	servers := pids(all, aServer)
	if len(servers) > 0 && !k.endOrphans {
		k.servers(servers)
		return &Problem{Unreachable, fmt.Sprintf("the socket of the daemon %d is gone, and its servers %v live: "+
			"it is replaced when their clients have ended", p.pid, servers)}
	}
	if err := p.kill(); err != nil {
		return &Problem{NotEnded, fmt.Sprintf("end the daemon %d, which has lost its socket: %v", p.pid, err)}
	}
	if !p.ended(endWait) {
		return &Problem{NotEnded, fmt.Sprintf("the daemon %d was killed and lives", p.pid)}
	}
	for _, r := range all {
		if r.role == aServer && (r.kill() != nil || !r.ended(endWait)) {
			return &Problem{NotEnded, fmt.Sprintf("the MPS server %d was killed and lives", r.pid)}
		}
	}
	k.lost()
	return nil
}

// startTurn is how long a round waits for a daemon that an earlier supervisor has started. A later round goes
// on waiting, until the daemon has had startWait.
const startTurn = 500 * time.Millisecond

// remains looks for what there is of MPS in the directory while no process listens. It waits for a
// daemon that a supervisor has started that has ended since. One that has a server has listened before.
func (k *keeper) remains() error {
	all, err := relatives(k.files.control())
	if err != nil {
		return &Problem{Files, fmt.Sprintf("look for the daemon among the processes: %v", err)}
	}
	for _, r := range all {
		if r.role != aDaemon {
			continue
		}
		left := startWait - r.age()
		if len(pids(all, aServer)) > 0 {
			left = 0
		}
		for end := time.Now().Add(min(left, startTurn)); r.alive() && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			if pid, err := listener(k.files.socket()); err == nil {
				return &Problem{Starting, fmt.Sprintf("the daemon %d has just begun to listen", pid)}
			}
		}
		if left > startTurn && r.alive() {
			return &Problem{Starting, fmt.Sprintf("the daemon %d does not listen yet; "+
				"it is ended if it does not %v after its start", r.pid, startWait)}
		}
		if err := k.endUnreachable(r.process); err != nil {
			return err
		}
	}
	if err := k.files.clear(); err != nil {
		return &Problem{Files, fmt.Sprintf("remove the socket of a daemon that has ended: %v", err)}
	}
	if k.endOrphans {
		all = slices.DeleteFunc(all, func(r relative) bool {
			return r.role == aServer && r.kill() == nil && r.ended(endWait)
		})
	}
	servers := pids(all, aServer)
	k.servers(servers)
	if len(servers) > 0 {
		return &Problem{Orphans, fmt.Sprintf("the servers %v of a daemon that has ended live: "+
			"no daemon is started beside them; it is when their clients have ended", servers)}
	}
	return nil
}

func pids(all []relative, of role) []int {
	var list []int
	for _, r := range all {
		if r.role == of {
			list = append(list, r.pid)
		}
	}
	slices.Sort(list)
	return list
}

// servers notes servers that no daemon has listed.
func (k *keeper) servers(pids []int) {
	k.update(func(d *Daemon) {
		d.Servers = nil
		for _, pid := range pids {
			d.Servers = append(d.Servers, Server{PID: pid})
		}
	})
}

// adopt takes the process that listens as the GPU's daemon, if it is one.
func (k *keeper) adopt(pid int, p program) error {
	found, err := processOf(pid)
	if err != nil {
		return &Problem{Starting, fmt.Sprintf("the process %d that listens is about to end: %v", pid, err)}
	}
	c := k.make(p)
	foreign := func(err error) error {
		return &Problem{Foreign, fmt.Sprintf("process %d listens at %s and is not the GPU's daemon: %v; "+
			"end it, or take the GPU out of MPS", pid, k.files.socket(), err)}
	}
	if err := c.ours(k.files, k.gpu, pid); err != nil {
		return foreign(err)
	}
	version, err := k.versions.running(pid)
	if err != nil {
		return foreign(err)
	}
	if again, err := listener(k.files.socket()); err != nil || again != pid || !found.alive() {
		return &Problem{Starting, fmt.Sprintf("process %d listened, and has stopped", pid)}
	}
	k.process, k.control, k.began = found, c, time.Time{}
	k.update(func(d *Daemon) { d.Version = version })
	k.log.Info("found the MPS daemon", "gpu", k.gpu, "pid", pid, "version", version)
	return nil
}

// start starts a daemon and adopts it when it listens.
func (k *keeper) start(ctx context.Context, p program) error {
	if p.file == k.refused {
		return &Problem{NoMultiUser, fmt.Sprintf("%s of driver %s has no %s: use a driver of R555 or later",
			p.path, p.version, multiUserOption)}
	}
	if wait := time.Until(k.notTill); wait > 0 {
		return &Problem{NotStarted, fmt.Sprintf("the daemon has ended; it is started again in %v",
			wait.Round(100*time.Millisecond))}
	}
	if err := k.files.prepare(); err != nil {
		return &Problem{Files, fmt.Sprintf("prepare %s: %v", k.files.base, err)}
	}
	if err := k.driver.link(k.files.libraries()); err != nil {
		return &Problem{NoProgram, fmt.Sprintf("prepare the driver's libraries for %s: %v", p.path, err)}
	}
	k.at("prepared")
	output, err := os.OpenFile(k.files.output(), os.O_WRONLY|os.O_CREATE|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return &Problem{Files, err.Error()}
	}
	defer output.Close()
	c := k.make(p)
	cmd := c.daemon(k.files, k.gpu)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if k.siblings {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_PARENT
	}
	k.log.Info("start the MPS daemon", "gpu", k.gpu, "program", p.path, "version", p.version)
	if err := cmd.Start(); err != nil {
		k.later()
		return &Problem{NotStarted, fmt.Sprintf("start %s: %v", p.path, err)}
	}
	k.at("started")
	k.update(func(d *Daemon) { d.Starts++ })
	k.began = time.Now()
	pid := cmd.Process.Pid
	if err := k.listens(ctx, cmd); err != nil {
		k.later()
		text := k.files.printed()
		if code := c.refusal(text); code == NoMultiUser {
			k.refused = p.file
			return &Problem{code, fmt.Sprintf("%s of driver %s has no %s (it says %q): use a driver of R555 or later",
				p.path, p.version, multiUserOption, text)}
		}
		return &Problem{NotStarted, fmt.Sprintf("start %s: %v; it says %q", p.path, err, text)}
	}
	k.at("listens")
	began := k.began
	err = k.adopt(pid, p)
	k.began = began
	return err
}

// listens waits until the new daemon listens. It ends one that does not.
func (k *keeper) listens(ctx context.Context, cmd *exec.Cmd) error {
	reaped := make(chan struct{})
	pid := cmd.Process.Pid
	if k.siblings { // the parent reaps it
		_ = cmd.Process.Release()
	} else {
		go func() { _ = cmd.Wait(); close(reaped) }()
	}
	self, err := processOf(pid)
	if err != nil {
		return fmt.Errorf("it has ended: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	for {
		if listening, err := listener(k.files.socket()); err == nil && listening == pid {
			return nil
		}
		if !self.alive() {
			return errors.New("it has ended")
		}
		select {
		case <-reaped:
			return errors.New("it has ended")
		case <-ctx.Done():
			_ = self.signal(unix.SIGKILL)
			return fmt.Errorf("it does not listen after %v, and was ended", startWait)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// isSet reports whether a percentage is what was set: daemons print one digit behind the point.
func isSet(read float64, percent int) bool { return math.Abs(read-float64(percent)) < 0.05 }

// match makes the daemon's percentages those that are wanted, and opens the door when they are.
func (k *keeper) match(ctx context.Context, want Want) error {
	if err := errors.Join(directory(k.files.pipe(), 0o755), k.beat.open(k.files.beat())); err != nil {
		return &Problem{Files, fmt.Sprintf("make the daemon's heartbeat for containers: %v", err)}
	}
	s, err := k.look(ctx)
	if err != nil {
		return err
	}
	if !isSet(s.percent, want.Percent) {
		if err := k.control.setDefault(ctx, k.files, want.Percent); err != nil {
			return err
		}
	}
	k.at("set")
	other := false
	for _, server := range s.servers {
		if server.stands() && !isSet(server.Percent, want.Percent) {
			other = true
			if err := k.control.setServer(ctx, k.files, server.PID, want.Percent); err != nil {
				return err
			}
		}
	}
	if other || !isSet(s.percent, want.Percent) {
		if s, err = k.look(ctx); err != nil {
			return err
		}
	}
	if !isSet(s.percent, want.Percent) {
		return &Problem{NotTaken, fmt.Sprintf("set the default percentage to %d: the daemon says %.1f",
			want.Percent, s.percent)}
	}
	for _, server := range s.servers {
		if server.stands() && !isSet(server.Percent, want.Percent) {
			return &Problem{NotTaken, fmt.Sprintf("set the percentage of server %d to %d: the daemon says %.1f",
				server.PID, want.Percent, server.Percent)}
		}
	}
	k.at("read back")
	if err := k.files.open(); err != nil {
		return &Problem{Files, fmt.Sprintf("link the daemon's socket for containers: %v", err)}
	}
	k.at("opened")
	k.beat.stamp(k.snapshot().Answered)
	return k.serve(ctx, want, s)
}

// serve starts the server if none stands, and fails as long as none does. It comes after the
// percentage: a server is made with the daemon's.
func (k *keeper) serve(ctx context.Context, want Want, s sight) (err error) {
	if stands := k.stands(s); stands || !want.Serve {
		return nil
	}
	if len(s.servers) == 0 {
		if wait := k.serveAt - sinceBoot(); wait > 0 {
			return &Problem{NoServer, fmt.Sprintf("the MPS server has ended; it is started again in %v",
				wait.Round(100*time.Millisecond))}
		}
		if err := k.control.startServer(ctx, k.files); err != nil {
			return err
		}
		k.at("server started")
	}
	for end := time.Now().Add(serverWait); ; time.Sleep(relist) {
		switch s, err = k.look(ctx); {
		case err != nil:
			return err
		case k.stands(s):
			return nil
		case len(s.servers) == 0:
			k.serveLater()
			return &Problem{NoServer, fmt.Sprintf("an MPS server was started and has ended; it is started again in %v: "+
				"does another process hold the GPU? The daemon prints to %s", k.servePause, k.files.output())}
		case time.Now().After(end):
			return &Problem{NoServer, fmt.Sprintf("the MPS server %d is about to start", s.servers[0].PID)}
		}
	}
}

// serveLater puts the next start of a server off.
func (k *keeper) serveLater() {
	k.servePause = min(max(2*k.servePause, firstPause), lastPause)
	k.serveAt = sinceBoot() + k.servePause
}

// stands notes whether a server stands. After one that stood for long, the next may be started at
// once.
func (k *keeper) stands(s sight) bool {
	now := sinceBoot()
	is := slices.ContainsFunc(s.servers, func(s Server) bool { return s.stands() })
	switch {
	case is && k.stood == 0:
		k.stood, k.serveAt = now, 0
	case !is && k.stood > 0:
		k.log.Warn("the MPS server has ended", "gpu", k.gpu, "stood", (now - k.stood).Round(time.Second))
		if now-k.stood < steady {
			k.serveLater()
		} else {
			k.servePause = 0
		}
		k.stood = 0
	}
	return is
}

// look asks the daemon for all that is, and notes it.
func (k *keeper) look(ctx context.Context) (sight, error) {
	s, err := k.control.look(ctx, k.files)
	if err != nil {
		if !k.process.alive() {
			pid := k.process.pid
			k.lost()
			return s, &Problem{NotStarted, fmt.Sprintf("the daemon %d has ended", pid)}
		}
		k.update(func(d *Daemon) { d.Percent = 0 })
		return s, err
	}
	k.update(func(d *Daemon) { d.Percent, d.Servers = s.percent, s.servers })
	k.heard()
	return s, nil
}

// heard notes that the daemon has answered now.
func (k *keeper) heard() {
	answered := sinceBoot()
	// A program that finds a heartbeat and no door would run without MPS.
	if k.files.isOpen() {
		k.beat.stamp(answered)
	}
	k.update(func(d *Daemon) { d.Answered = answered })
}
