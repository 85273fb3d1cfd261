// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// InitOptions are those of Init.
type InitOptions struct {
	// Supervisor is the arguments of the supervisor's process, with the program's path first.
	Supervisor []string
	// Last ends the daemons when ctx has ended and the supervisor too, as Stop does. Nil leaves them to the end of the pod.
	Last func(ctx context.Context) error
	// Pause is the time before a supervisor is started again; 100 ms if zero. It doubles up to
	// LongestPause while supervisors end soon after their start.
	Pause, LongestPause time.Duration
	Logger              *slog.Logger
}

// Init is the first process of the pod. It starts the supervisor and starts it again when it ends,
// and it reaps daemons, which are its children, and processes that lost their parent. It returns
// when ctx has ended and the supervisor too; before that only if it cannot be the parent of
// anything. It waits for all children of this process, so nothing else in it may start any.
func Init(ctx context.Context, opts InitOptions) error {
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphaned processes: %w", err)
	}
	first, last := cmp.Or(opts.Pause, 100*time.Millisecond), cmp.Or(opts.LongestPause, 5*time.Second)
	pause := first
	for ctx.Err() == nil {
		began := time.Now()
		how, err := supervise(ctx, opts.Supervisor)
		if ctx.Err() != nil {
			break
		}
		if time.Since(began) > steady {
			pause = first
		}
		log.Warn("the supervisor of MPS has ended; it is started again", "how", how, "err", err, "pause", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, last)
	}
	if opts.Last == nil {
		return nil
	}
	if err := opts.Last(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("end the daemons of MPS: %w", err)
	}
	return nil
}

// supervise starts the supervisor and returns how it has ended. At the end of ctx it is told to
// end.
func supervise(ctx context.Context, args []string) (string, error) {
	p, err := os.StartProcess(args[0], args, &os.ProcAttr{
		Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return "", fmt.Errorf("start the supervisor of MPS: %w", err)
	}
	pid := p.Pid
	defer context.AfterFunc(ctx, func() { _ = p.Signal(syscall.SIGTERM) })()
	defer func() { _ = p.Release() }()
	for {
		var status unix.WaitStatus
		child, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return "", fmt.Errorf("wait for the supervisor of MPS: %w", err)
		case child == pid && (status.Exited() || status.Signaled()):
			if status.Signaled() {
				return "signal " + status.Signal().String(), nil
			}
			return fmt.Sprintf("exit %d", status.ExitStatus()), nil
		}
	}
}
