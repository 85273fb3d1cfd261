// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

const (
	// mostAnswer bounds what one run of the control program can print.
	mostAnswer = 64 << 10
	// busyPause is the time between two tries while another control program speaks to the daemon.
	busyPause = 30 * time.Millisecond
	// deadline bounds one question, with all its tries: a client may be refused when the heartbeat
	// is two seconds old.
	deadline = 1200 * time.Millisecond
	// grace is how long a control program's pipes may stay open after it was killed.
	grace = 200 * time.Millisecond
)

// ask has one run of the control program give commands to the daemon, and returns the lines of each
// answer. An answer is whole: the daemon has refused the mark behind it.
//
// A daemon speaks to one control program at a time. It closes the connection of a second, which
// then prints nothing, and may exit with 0. So ask tries again as long as nothing was answered.
func (v v2) ask(ctx context.Context, f files, commands ...string) ([][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, v.patience)
	defer cancel()
	marks := make([]string, len(commands))
	var input strings.Builder
	for i, c := range commands {
		marks[i] = fmt.Sprintf("end-%s-%d", rand.Text(), i)
		fmt.Fprintf(&input, "%s\n%s\n", c, marks[i])
	}
	for {
		said, err := v.run(ctx, f, input.String())
		if err != nil {
			return nil, err
		}
		if said != "" {
			return split(said, marks)
		}
		select {
		case <-ctx.Done():
			return nil, &Problem{Silent, fmt.Sprintf("%s: the daemon has not answered within %v: "+
				"another control program speaks to it, or it is about to end", commands[0], v.patience)}
		case <-time.After(busyPause):
		}
	}
}

// split splits what a control program has printed at the marks.
func split(said string, marks []string) ([][]string, error) {
	answers := make([][]string, 0, len(marks))
	var answer []string
	for line := range strings.Lines(said) {
		line = strings.TrimSuffix(line, "\n")
		if len(answers) == len(marks) {
			return nil, unreadable([]string{line}, errors.New("it is behind the last answer"))
		}
		if line == fmt.Sprintf("Unknown command %q", marks[len(answers)]) {
			answers, answer = append(answers, answer), nil
			continue
		}
		answer = append(answer, line)
	}
	if len(answers) < len(marks) {
		return nil, unreadable(answer, fmt.Errorf("%d of %d answers are whole", len(answers), len(marks)))
	}
	return answers, nil
}

// run runs the control program once and returns what it has printed.
func (v v2) run(ctx context.Context, f files, input string) (string, error) {
	cmd := exec.CommandContext(ctx, v.program.path)
	cmd.Env, cmd.Dir = v.environment(f), "/"
	cmd.Stdin = strings.NewReader(input)
	out := &bounded{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = grace
	// It must not outlive a supervisor that is killed: it would keep the daemon's one place.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	said := out.text.String()
	switch {
	case ctx.Err() != nil:
		return "", &Problem{Silent, fmt.Sprintf("%s: the daemon has not answered in time", firstLine(input))}
	case out.over:
		return "", unreadable([]string{said[:100]}, fmt.Errorf("more than %d bytes", mostAnswer))
	case strings.HasPrefix(said, "Cannot find MPS control daemon process"):
		return "", &Problem{Unreachable, fmt.Sprintf("%s: no daemon listens in %s", firstLine(input), f.control())}
	case strings.HasPrefix(said, "Cannot send command to MPS control daemon process"):
		return "", nil // it was not heard
	case strings.HasPrefix(said, "Cannot authenticate or connect"):
		return "", nil
	}
	// Its exit status tells nothing: 0 for commands that were refused or not heard, 1 for quit.
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		return "", &Problem{NoProgram, fmt.Sprintf("run %s: %v", v.program.path, err)}
	}
	return said, nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// bounded takes up to mostAnswer bytes and drops the rest.
type bounded struct {
	text bytes.Buffer
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	room := mostAnswer - b.text.Len()
	if len(p) > room {
		b.over = true
	}
	b.text.Write(p[:min(len(p), room)])
	return len(p), nil
}
