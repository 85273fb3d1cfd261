// SPDX-License-Identifier: Apache-2.0

package park

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Verbs of requests to a child.
const (
	verbState      = "state"
	verbLock       = "lock"
	verbCheckpoint = "checkpoint"
	verbRestore    = "restore"
	verbUnlock     = "unlock"
)

// A request is one step, for each process in turn. The step ends at the first process that fails, except
// for state and unlock, which go on with the others.
type request struct {
	Verb      string        `json:"verb"`
	Processes []Process     `json:"processes"`
	Timeout   time.Duration `json:"timeout,omitempty"` // of lock, for all processes together
	// Lock is a file that the child holds a lock on while it lives. So a step never begins before the
	// child of an earlier agent has ended.
	Lock string `json:"lock"`
}

// An answer is what became of one process. Gone is true if it has ended. Code is the driver's, 0 for
// success. State is the process's state after the call.
type answer struct {
	PID   int    `json:"pid"`
	Gone  bool   `json:"gone,omitempty"`
	Code  int    `json:"code,omitempty"`
	State *State `json:"state,omitempty"`
}

// A State is the driver's state of a process, with the numbers of CUprocessState.
type State int

// The driver's states. Drivers of CUDA 13.4 and later have two more while memory is moved.
const (
	Running State = iota
	Locked
	Checkpointed
	Failed
	Checkpointing
	RestoringMemory
)

// Codes of the driver that mean something here.
const (
	codeOutOfMemory = 2
	codeNotReady    = 600
)

// Library is the driver's calls, for Serve.
type Library interface {
	State(pid int) (State, int)
	Lock(pid int, timeout time.Duration) int
	Checkpoint(pid int) int
	Restore(pid int) int
	Unlock(pid int) int
}

// Serve carries out one request, which it reads from in, with the driver's library that open returns. It
// is the main function of a child. After each process it writes an answer to out.
func Serve(in io.Reader, out io.Writer, procRoot string, open func() (Library, error)) error {
	const most = 1 << 20
	var r request
	if err := json.NewDecoder(io.LimitReader(in, most)).Decode(&r); err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	if err := checkProcesses(r.Processes); err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	f, err := os.OpenFile(r.Lock, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("lock the set: %w", err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the set: %w", err)
	}
	library, err := open()
	if err != nil {
		return err
	}
	end := time.Now().Add(r.Timeout)
	say := json.NewEncoder(out)
	for _, p := range r.Processes {
		a := answer{PID: p.PID}
		if StartOf(procRoot, p.PID) != p.Start {
			a.Gone = true
		} else if a.Code, err = call(library, r.Verb, p.PID, time.Until(end)); err != nil {
			return err
		}
		if !a.Gone {
			if state, code := library.State(p.PID); code == 0 {
				a.State = &state
			} else if a.Code == 0 {
				a.Code = code
			}
			// A process that ended meanwhile has not failed.
			a.Gone = StartOf(procRoot, p.PID) != p.Start
		}
		if err := say.Encode(a); err != nil {
			return fmt.Errorf("answer: %w", err)
		}
		if a.Code != 0 && !a.Gone && r.Verb != verbState && r.Verb != verbUnlock {
			return nil
		}
	}
	return nil
}

func call(l Library, verb string, pid int, left time.Duration) (code int, err error) {
	switch verb {
	case verbState:
		return 0, nil // Serve asks after each call
	case verbLock:
		return l.Lock(pid, max(left, time.Millisecond)), nil
	case verbCheckpoint:
		return l.Checkpoint(pid), nil
	case verbRestore:
		return l.Restore(pid), nil
	case verbUnlock:
		return l.Unlock(pid), nil
	}
	return 0, fmt.Errorf("read the request: unknown verb %q", verb)
}

// errIdle means that a child has ended by itself, or was not started, and has called nothing: it could not
// load the driver's library, for instance.
var errIdle = errors.New("it has not begun")

// ask has a child carry out a request, and returns its answers by PID. It returns an error if the
// child did not answer for all; the answers that it gave still hold.
func (k *Keeper) ask(ctx context.Context, r request, within time.Duration) (map[int]answer, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var out, said bytes.Buffer
	cmd := k.o.Command(ctx)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(body), &out, &bounded{b: &said}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	answers := map[int]answer{}
	for lines := json.NewDecoder(&out); ; {
		var a answer
		if lines.Decode(&a) != nil {
			break
		}
		answers[a.PID] = a
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited() && len(answers) == 0:
		err = fmt.Errorf("%w: %s", errIdle, bytes.TrimSpace(said.Bytes()))
	case err != nil && cmd.Process == nil:
		err = fmt.Errorf("%w: %w", errIdle, err)
	}
	if err != nil {
		err = fmt.Errorf("%s %d processes by a process of its own: %w", r.Verb, len(r.Processes), cmp.Or(ctx.Err(), err))
	}
	return answers, err
}

// bounded keeps the first KiB that is written.
type bounded struct{ b *bytes.Buffer }

func (w *bounded) Write(p []byte) (int, error) {
	const most = 1 << 10
	w.b.Write(p[:min(len(p), most-min(most, w.b.Len()))])
	return len(p), nil
}
