// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"example.com/gpu-agent/internal/mps/mpstest"
)

// roleVariable has the role of a process that a test starts of the test's own binary.
const roleVariable = "MPS_TEST_ROLE"

// part is what such a process is to do.
type part struct {
	Role       string // "init", "supervisor", "client" or "probe"
	State      string
	Driver     Driver
	SingleUser bool
	// KillAt is the step at which the supervisor kills itself, at its first time if KillOnce does
	// not exist yet.
	KillAt, KillOnce string
}

func (p part) command(t testing.TB) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{roleVariable + "=" + string(text)}
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	return cmd
}

// role2exit does a part and returns its exit status.
func role2exit(text string) int {
	var p part
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		panic(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	opts := Options{StateDir: p.State, Driver: p.Driver, Beat: 250 * time.Millisecond, singleUser: p.SingleUser,
		Siblings: p.Role == "supervisor", Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), at: p.at}
	var err error
	switch p.Role {
	case "probe": // in the directory that the supervisor gives it
		var c *mpstest.Client
		if c, err = mpstest.Connect(os.Getenv(pipeVariable)); err == nil {
			fmt.Println(0)
			err = c.Close()
		}
	case "client":
		err = beClient(PipeDir(p.State, gpuA))
	case "supervisor":
		err = runOne(ctx, opts)
	case "init":
		p.Role = "supervisor"
		text, _ := json.Marshal(p)
		_ = os.Setenv(roleVariable, string(text))
		err = Init(ctx, InitOptions{Supervisor: []string{"/proc/self/exe"}, Pause: 10 * time.Millisecond, Logger: opts.Logger,
			Last: func(ctx context.Context) error { return Stop(ctx, opts) }})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// beClient is an emulated client that prints its percentage, and "lost" if its context goes before
// standard input ends.
func beClient(dir string) error {
	c, err := mpstest.Connect(dir)
	if err != nil {
		return err
	}
	fmt.Println(c.Percent)
	ended := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(ended) }()
	for c.Connected() {
		select {
		case <-ended:
			return c.Close()
		default:
		}
	}
	fmt.Println("lost")
	<-ended
	return nil
}

func (p part) at(step string) {
	if step != p.KillAt {
		return
	}
	f, err := os.OpenFile(p.KillOnce, os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return // an earlier supervisor was killed there
	}
	_ = f.Close()
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func runOne(ctx context.Context, opts Options) error {
	s, err := New(opts)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Run(ctx)
}
