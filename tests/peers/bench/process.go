// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long anything may take before the run is given up. Nothing
// that is measured comes near it.
const patience = 30 * time.Second

// process is a program that runs.
type process struct {
	name string
	log  string // file with all that it says
	// began is the moment before it was started.
	began time.Time
	pid   int

	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how; readable after done
}

// start runs a program. Its output goes to a file in dir.
func start(dir, name, path string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer out.Close()
	p.cmd = exec.Command(path, args...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/"}
	p.began = time.Now()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.pid = p.cmd.Process.Pid
	go func() {
		defer close(p.done)
		p.err = p.cmd.Wait()
	}()
	return p, nil
}

// kill ends the program at once. What it leaves is on the run's own file system.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

// stop asks the program to end and waits for that.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
	case <-time.After(patience):
		p.kill()
	}
}

// explain adds to an error what the program said last.
func (p *process) explain(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-p.done:
		err = fmt.Errorf("%w (%s has ended: %v)", err, p.name, p.err)
	default:
	}
	data, _ := os.ReadFile(p.log)
	if n := len(data) - 3000; n > 0 {
		data = data[n:]
	}
	return fmt.Errorf("%w\n%s said:\n%s", err, p.name, data)
}

// cpu is the CPU time of the process since its start, of all its threads.
func (p *process) cpu() (time.Duration, error) {
	// The clock of a process: the complement of its PID above three bits, of
	// which 2 is the scheduler's exact count (include/linux/posix-timers.h).
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^p.pid<<3|2), &t); err != nil {
		return 0, p.explain(fmt.Errorf("read the CPU time of %s: %w", p.name, err))
	}
	return time.Duration(t.Nano()), nil
}

// memory is what a process has of it, in bytes.
type memory struct{ resident, anonymous int }

func (p *process) memory() (memory, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", p.pid))
	if err != nil {
		return memory{}, p.explain(fmt.Errorf("read the memory of %s: %w", p.name, err))
	}
	defer f.Close()
	found := map[string]int{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// Rss:               20160 kB
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[2] == "kB" {
			if n, err := strconv.Atoi(fields[1]); err == nil {
				found[fields[0]] = n << 10
			}
		}
	}
	m := memory{found["Rss:"], found["Anonymous:"]}
	if m.resident == 0 {
		return m, p.explain(fmt.Errorf("read the memory of %s: smaps_rollup has no Rss (%w)", p.name, lines.Err()))
	}
	return m, nil
}

// await looks until ready says yes.
func await(ctx context.Context, what string, ready func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, err := ready()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("wait for %s: %w", what, ctx.Err()), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
