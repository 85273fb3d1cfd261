// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
)

// stateOf is the state directory of an agent that answers questions. What it was asked is in
// asked.
func stateOf(t *testing.T, answer func(status.Question) (status.Answer, error)) (dir string, asked func() []status.Question) {
	t.Helper()
	dir, err := os.MkdirTemp("", "state") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var all []status.Question // guarded by mu
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	door := agentobs.Door{Path: filepath.Join(dir, state.Socket), Logger: slog.New(slog.DiscardHandler), Foresee: func(q status.Question) (status.Answer, error) {
		mu.Lock()
		all = append(all, q)
		mu.Unlock()
		return answer(q)
	}}
	go func() { _ = door.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done; os.RemoveAll(dir) })
	for {
		if _, err := os.Lstat(door.Path); err == nil {
			return dir, func() []status.Question {
				mu.Lock()
				defer mu.Unlock()
				out := all
				all = nil
				return out
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// On a node the agent answers: the commands say what it says, and their exit status is what
// the partition would come to.
func TestTheAgentIsAsked(t *testing.T) {
	file := write(t, "p.yaml", "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole}\n  night:\n    - {devices: all, mode: shared}\n")
	gpus := []status.PlannedGPU{{Index: 0, UUID: "GPU-0", Model: "NVIDIA H100", Wanted: "shared", From: "whole", To: "whole", Steps: []status.PlannedStep{}, Result: []status.PlannedInstance{},
		Blocked: []status.InTheWay{{Reason: status.HeldByPods, Holder: "train/train-3"}}}}
	of := func(state string, conditions ...status.Condition) status.Plan {
		p := status.Plan{Partition: "night", Own: true, State: state, Message: "because", Conditions: conditions, GPUs: gpus, Offers: []status.PlannedOffer{{Resource: "example.com/gpu", Total: 1}}}
		if state == "invalid" {
			p.Mistakes, p.GPUs, p.Offers = []status.Mistake{{Line: 6, Message: "it would offer nothing"}}, nil, nil
		}
		return p
	}
	refused := status.Why(status.OtherOwner, "GPU 0 is not offered").Condition(status.Refused, "GPU-0")
	for _, c := range []struct {
		plan        status.Plan
		plans       int // exit status of plan
		checks      int // and of check
		says, fits  string
		wrong, told string // on standard error
	}{
		{of("applied"), 0, 0, "partition night, which the node follows, would be applied\n", "partition night, the node's own, fits\n", "", ""},
		{of("blocked"), 3, 0, "these must end first:\n    train/train-3\n", "fits; now it would be blocked: because\n", "", ""},
		{of("pending"), 4, 0, "would be pending\n", "fits; now it would be pending: because\n", "", ""},
		{of("failed", refused), 4, 5, "  refused: GPU 0 is not offered\n", "", "", "partition night: GPU 0 is not offered\n"},
		{of("invalid"), 5, 5, "", "", file + ":6: it would offer nothing\n", file + ":6: it would offer nothing\n"},
	} {
		dir, asked := stateOf(t, func(q status.Question) (status.Answer, error) {
			a := status.Answer{}
			for range max(1, len(q.Partitions)) {
				a.Plans = append(a.Plans, c.plan)
			}
			return a, nil
		})
		out, said, status := program(t, "plan", "--config", file, "--state-dir", dir)
		if q := asked(); status != c.plans || !strings.Contains(out, c.says) || !strings.Contains(said, c.wrong) || len(q) != 1 || q[0].Partitions != nil || q[0].UnitMiB != 0 || q[0].API != "" || len(q[0].File) == 0 {
			t.Errorf("plan, %s: exit status %d, want %d\nout: %s\nerr: %s\nasked: %+v", c.plan.State, status, c.plans, out, said, q)
		}
		out, said, status = program(t, "check", "--config", file, "--partition", "night", "--state-dir", dir)
		if q := asked(); status != c.checks || !strings.Contains(out, c.fits) || !strings.Contains(said, c.told) || len(q) != 1 || !slices.Equal(q[0].Partitions, []string{"night"}) || !q[0].Brief {
			t.Errorf("check, %s: exit status %d, want %d\nout: %s\nerr: %s\nasked: %+v", c.plan.State, status, c.checks, out, said, q)
		}
		// What the command line says takes the place of the agent's own flags.
		program(t, "plan", "--config", file, "--state-dir", dir, "--partition", "default", "--memory-unit", "2GiB", "--api", "dra")
		if q := asked(); len(q) != 1 || !slices.Equal(q[0].Partitions, []string{"default"}) || q[0].UnitMiB != 2048 || q[0].API != "dra" {
			t.Errorf("asked: %+v", q)
		}
		// An inventory is another node's.
		if out, said, status := program(t, "plan", "--config", file, "--state-dir", dir, "--inventory", h100); status != 0 || len(asked()) > 0 || !strings.Contains(out, "not known here: ") {
			t.Errorf("with an inventory: %d, %s%s", status, out, said)
		}
	}
}

// A file with more partitions than one question has is asked about in parts, and an agent
// that cannot answer is no node without one.
func TestTheAgentIsAskedInParts(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: v1\npartitions:\n")
	for i := range 150 {
		b.WriteString("  p" + strings.Repeat("x", i/26) + string(rune('a'+i%26)) + ":\n    - {devices: all, mode: whole}\n")
	}
	file := write(t, "many.yaml", b.String())
	dir, asked := stateOf(t, func(q status.Question) (a status.Answer, _ error) {
		for _, name := range q.Partitions {
			a.Plans = append(a.Plans, status.Plan{Partition: name, State: "applied"})
		}
		return a, nil
	})
	out, said, err := execute(t, "check", "--config", file, "--state-dir", dir)
	if q := asked(); err != nil || strings.Count(out, " fits\n") != 150 || len(q) != 3 {
		t.Errorf("%v, %d questions\n%s%s", err, len(q), out, said)
	}
	dir, _ = stateOf(t, func(status.Question) (a status.Answer, _ error) { return a, os.ErrDeadlineExceeded })
	for _, args := range [][]string{{"check", "--config", file}, {"plan", "--config", file}} {
		if out, _, err := execute(t, append(args, "--state-dir", dir)...); err == nil || !strings.Contains(err.Error(), "does not answer") || out != "" {
			t.Errorf("%q: %v, %s", args, err, out)
		}
	}
}

// Without an agent the commands say what is not known.
func TestWithoutAnAgent(t *testing.T) {
	var told strings.Builder
	a := planFlags{stateDir: "/nowhere", flags: &pflag.FlagSet{}}
	if _, asked, err := a.agent(t.Context(), console{err: &told}, status.Question{}); asked || err != nil || told.String() != "no agent answers at /nowhere/agent.sock: asking the driver alone\n" {
		t.Errorf("asked: %v, %v, %s", asked, err, &told)
	}
	file := write(t, "p.yaml", "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole}\n")
	for _, args := range [][]string{{"plan", "--config", file}, {"check", "--config", file}} {
		out, said, err := execute(t, append(args, "--inventory", h100)...)
		if err != nil || said != "" || !strings.Contains(out, "not known here: which pods hold something") || !strings.Contains(out, "the node's label") {
			t.Errorf("%q: %v\n%s%s", args, err, out, said)
		}
	}
}
