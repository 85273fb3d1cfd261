// SPDX-License-Identifier: Apache-2.0

package ask

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Run asks questions until its time is over.
type Run struct {
	// Out is the folder. It is made; one that has answers already is refused.
	Out string
	// Budget is the time for all of it.
	Budget time.Duration
	// Questions are in the order in which they are asked.
	Questions []Question
	// Self is the command that asks one, without its name and the folder, which follow: the
	// program calls [One] with them.
	Self []string
	// Settings is what a card's owner has set, as text, without what moves by itself. Nil
	// is nothing. It is read before the first question and after each.
	Settings func(ctx context.Context) (string, error)
	// Tidy takes away what a question that was ended may have left on the machine and no
	// process holds, such as a cgroup. Nil is nothing. It is called after each question.
	Tidy func()
	// Screen is told what was learned, as it comes. Nil is nobody.
	Screen io.Writer
}

// Outcome is what came of a run.
type Outcome struct {
	// Answered are the names of the questions that have an answer, Open of those that were
	// asked and have none, Passed of those for which there was no time.
	Answered, Open, Passed []string
}

// settle is what the end of a run takes.
const settle = 2 * time.Second

// All asks the questions. It returns an error where the folder cannot be written, or where a
// setting of the card has changed: then it asks no further. An end of ctx ends the run as the
// end of its time does.
func (r *Run) All(ctx context.Context) (out Outcome, err error) {
	if r.Screen == nil {
		r.Screen = io.Discard
	}
	if err := os.MkdirAll(r.Out, 0o755); err != nil {
		return out, fmt.Errorf("make the folder for the answers: %w", err)
	}
	if old, err := filepath.Glob(filepath.Join(r.Out, "*"+ending)); err != nil || len(old) > 0 {
		return out, fmt.Errorf("%s has answers already: name another folder", r.Out)
	}
	// The kernel ends a question's process with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	over := time.Now().Add(r.Budget - min(settle, r.Budget/10))
	// What a question leaves behind comes to us when its parent ends. A kernel that cannot
	// do that leaves it to the process group alone.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	before, err := r.settings(ctx)
	if err != nil {
		return out, err
	}
	for i := range r.Questions {
		q := &r.Questions[i]
		left := time.Until(over)
		if left < max(q.Least, 100*time.Millisecond) || ctx.Err() != nil {
			out.Passed = append(out.Passed, q.Name)
			fmt.Fprintf(r.Screen, "%-28s passed over: no time is left\n", q.Name)
			continue
		}
		answer, err := r.one(ctx, q, min(q.Limit, left))
		if r.Tidy != nil {
			r.Tidy()
		}
		if err != nil {
			out.Open = append(out.Open, q.Name)
			fmt.Fprintf(r.Screen, "%-28s %v\n", q.Name, err)
		} else {
			out.Answered = append(out.Answered, q.Name)
			fmt.Fprintf(r.Screen, "%-28s %s %v\n", q.Name, q.Asks, answer)
		}
		after, err := r.settings(ctx)
		if err != nil {
			fmt.Fprintf(r.Screen, "%-28s the card's settings cannot be read: %v\n", "", err)
			continue
		}
		if after != before {
			return out, fmt.Errorf("%s changed a setting of the card, and nothing more is asked: before\n%s\nand after\n%s", q.Name, before, after)
		}
	}
	return out, nil
}

func (r *Run) settings(ctx context.Context) (string, error) {
	if r.Settings == nil {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	text, err := r.Settings(ctx)
	if err != nil {
		return "", fmt.Errorf("read the card's settings: %w", err)
	}
	return text, nil
}

// one has a question asked by a process of its own, and ends all that is left of it.
func (r *Run) one(ctx context.Context, q *Question, limit time.Duration) (Answer, error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.Command(r.Self[0], slices.Concat(r.Self[1:], []string{q.Name, r.Out})...)
	// The process group is ended first, and the process with its parent.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNS // what it mounts goes with it
	}
	scratch, err := os.MkdirTemp("", "ask-")
	if err != nil {
		return Answer{}, fmt.Errorf("ask: %w", err)
	}
	defer os.RemoveAll(scratch)
	cmd.Env = append(os.Environ(), "TMPDIR="+scratch)
	said, err := os.Create(filepath.Join(r.Out, q.Name+".log"))
	if err != nil {
		return Answer{}, fmt.Errorf("ask: %w", err)
	}
	defer said.Close()
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		return Answer{}, fmt.Errorf("ask: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	how := ""
	select {
	case err = <-ended:
		if err != nil {
			how = "its process ended with " + err.Error()
		}
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	case <-ctx.Done():
		how = "it had no answer in " + limit.Round(time.Second/10).String()
		if whole.Err() != nil {
			how = "the run was ended"
		}
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		<-ended
	}
	endOrphans()
	if info, err := said.Stat(); err == nil && info.Size() == 0 {
		_ = os.Remove(said.Name())
	}
	lines, err := Read(r.Out, q.Name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Answer{}, err
	}
	answer, err := AnswerIn(lines)
	if err == nil {
		return answer, nil
	}
	if how == "" {
		how = "its process ended without an answer"
	}
	if err := finish(r.Out, q.Name, how); err != nil {
		return Answer{}, err
	}
	return Answer{}, errors.New(how)
}

// finish says in a question's file what ended it.
func finish(folder, name, how string) error {
	path := filepath.Join(folder, name+ending)
	if data, err := os.ReadFile(path); err == nil {
		// A line in which the process was ended goes.
		if err := os.Truncate(path, int64(bytes.LastIndexByte(data, '\n')+1)); err != nil {
			return fmt.Errorf("write down what ended %s: %w", name, err)
		}
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("write down what ended %s: %w", name, err)
	}
	room := Room{began: time.Now(), file: file, scrub: &Scrub{}}
	room.write(Line{Ended: how})
	return file.Close()
}

// endOrphans ends the processes that have become our children, and theirs, until there are
// none. It is called while we have no other child.
func endOrphans() {
	for range 1000 {
		children := childrenOf(os.Getpid())
		for _, pid := range children {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		reaped := false
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if err != nil || pid <= 0 {
				break
			}
			reaped = true
		}
		if len(children) == 0 && !reaped {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// childrenOf are the processes whose parent is pid.
func childrenOf(pid int) (out []int) {
	list, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range list {
		var child, parent int
		if _, err := fmt.Sscan(e.Name(), &child); err != nil {
			continue
		}
		file, err := os.Open(filepath.Join("/proc", e.Name(), "status"))
		if err != nil {
			continue
		}
		for lines := bufio.NewScanner(file); lines.Scan(); {
			if n, _ := fmt.Sscanf(lines.Text(), "PPid: %d", &parent); n == 1 {
				break
			}
		}
		file.Close()
		if parent == pid {
			out = append(out, child)
		}
	}
	return out
}

// One asks the question of that name, in a process that [Run] has started for it.
func One(ctx context.Context, questions []Question, name, folder string) error {
	i := slices.IndexFunc(questions, func(q Question) bool { return q.Name == name })
	if i < 0 {
		return fmt.Errorf("there is no question %q", name)
	}
	file, err := os.OpenFile(filepath.Join(folder, name+ending), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("ask %s: %w", name, err)
	}
	defer file.Close()
	dir, err := os.MkdirTemp("", "room-") // in a folder that goes, however this ends
	if err != nil {
		return fmt.Errorf("ask %s: %w", name, err)
	}
	defer os.RemoveAll(dir)
	room := &Room{Dir: dir, began: time.Now(), file: file, scrub: &Scrub{}}
	answer := questions[i].Ask(ctx, room)
	if answer.Says == "" {
		return fmt.Errorf("ask %s: it has no answer", name)
	}
	room.write(Line{Answer: &answer})
	return nil
}
