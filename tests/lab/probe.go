// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/tests/memcap/probe"
)

// probePath is where containers have the probe.
const probePath = "/probe/"

// ProbeMount shows a container the programs of tests/memcap/probe, which take
// GPU memory when they are told to. They are built where they are not.
func ProbeMount(ctx context.Context) (Mount, error) {
	dir, err := probe.Cached(ctx)
	if err != nil {
		return Mount{}, fmt.Errorf("build the probe: %w", err)
	}
	return Mount{Host: dir, Path: probePath}, nil // the cache is at the same place inside nodes
}

// ProbeProgram is the probe's path in containers that have ProbeMount.
const ProbeProgram = probePath + probe.Program

// Probe is a probe that runs in a container, by kubectl exec, until Close: it is
// one of the container's processes. What it can be told stands at the top of
// its main.c.
type Probe struct {
	what  string
	cmd   *exec.Cmd
	in    *os.File
	out   *os.File
	lines *bufio.Reader
	errs  bytes.Buffer
}

// Answer is a line of the probe's: its first word, and values by their keys.
type Answer struct {
	Verb   string
	Values map[string]string
	text   string
}

// ParseAnswer reads a line that a probe has printed elsewhere.
func ParseAnswer(line string) Answer {
	line, _, _ = strings.Cut(strings.TrimSpace(line), "\n")
	a := Answer{Values: map[string]string{}, text: line}
	for i, w := range strings.Fields(line) {
		key, value, ok := strings.Cut(w, "=")
		if i == 0 {
			a.Verb = w
		} else if ok {
			a.Values[key] = value
		}
	}
	return a
}

func (a Answer) String() string { return a.text }

// Bytes is a value that is a number, and 2^64-1 where there is none.
func (a Answer) Bytes(key string) uint64 {
	v, err := strconv.ParseUint(a.Values[key], 10, 64)
	if err != nil {
		return ^uint64(0)
	}
	return v
}

// Result is what CUDA has answered, by its number.
func (a Answer) Result() string { return a.Values["result"] }

// What CUDA answers.
const (
	Success     = "0"
	OutOfMemory = "2"
)

// Probe starts a probe in a container that has ProbeMount, with variables
// beside the container's own.
func (p *RunningPod) Probe(ctx context.Context, container string, env []string, args ...string) (*Probe, error) {
	if container == "" {
		container = "main"
	}
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		in.Close()
		return nil, err
	}
	defer theirOut.Close()
	command := []string{"kubectl", "--name", p.node.Name, "--", "exec", "-i", "-n", PodNamespace, p.Name, "-c", container, "--", "env"}
	command = append(append(append(command, env...), ProbeProgram), args...)
	k := &Probe{what: fmt.Sprintf("the probe in %s of pod %s", container, p.Name), in: in, out: out, lines: bufio.NewReader(out)}
	k.cmd = p.node.kit.command(ctx, nil, p.node.kit.Bin("cluster"), command...)
	k.cmd.Stdin, k.cmd.Stdout, k.cmd.Stderr = theirIn, theirOut, &k.errs
	if err := k.cmd.Start(); err != nil {
		in.Close()
		out.Close()
		return nil, fmt.Errorf("start %s: %w", k.what, err)
	}
	return k, nil
}

// ErrEnded is what a probe's container comes to: the probe answers nothing more.
var ErrEnded = errors.New("it has ended")

// line reads an answer.
func (k *Probe) line() (Answer, error) {
	if err := k.out.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		return Answer{}, err
	}
	text, err := k.lines.ReadString('\n')
	if errors.Is(err, io.EOF) {
		err = ErrEnded
	}
	if err != nil {
		return Answer{}, err
	}
	return ParseAnswer(text), nil
}

// Ask gives a command and returns the answer.
func (k *Probe) Ask(format string, args ...any) (Answer, error) {
	command := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(k.in, command); err != nil {
		return Answer{}, fmt.Errorf("tell %s to %s: %w", k.what, command, err)
	}
	a, err := k.line()
	if err != nil {
		return a, fmt.Errorf("tell %s to %s: %w", k.what, command, err)
	}
	return a, nil
}

// List gives a command that is answered by several lines, the last of which
// says end.
func (k *Probe) List(command string) ([]Answer, error) {
	var all []Answer
	for a, err := k.Ask("%s", command); ; a, err = k.line() {
		if err != nil {
			return all, fmt.Errorf("tell %s to %s: %w", k.what, command, err)
		}
		if a.Verb == "end" {
			return all, nil
		}
		all = append(all, a)
	}
}

// Close ends the probe's input, which ends it, and returns how it ended.
func (k *Probe) Close() error {
	k.in.Close()
	err := k.cmd.Wait()
	k.out.Close()
	if err != nil {
		return fmt.Errorf("%s: %w%s", k.what, err, lastLines(k.errs.Bytes()))
	}
	return nil
}
