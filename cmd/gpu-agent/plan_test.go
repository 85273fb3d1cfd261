// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
)

// TestMain lets a test run the program as it is run: see program.
func TestMain(m *testing.M) {
	if os.Getenv("BE_GPU_AGENT") != "" {
		main()
		return
	}
	flag.Parse()
	os.Exit(m.Run())
}

// program runs the real thing and returns its exit status.
func program(t *testing.T, args ...string) (out, err string, status int) {
	t.Helper()
	self, failure := os.Executable()
	if failure != nil {
		t.Fatal(failure)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), "BE_GPU_AGENT=1")
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	var exit *exec.ExitError
	if failure := cmd.Run(); failure != nil && !errors.As(failure, &exit) {
		t.Fatal(failure)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file, or writes it.
func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil { //nolint:gosec // it is part of the source
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(read(t, path)), string(got)); diff != "" {
		t.Errorf("%s, -want +got (-update writes it anew):\n%s", path, diff)
	}
}

const (
	testdata = "../../tests/testdata"

	cut   = testdata + "/a100-80-mig.json" // instances stand, some of them busy
	plain = testdata + "/a100-80.json"
	plans = "testdata/partitions.yaml"
)

// TestPlan compares whole plans with what they were: of a node where some GPUs
// are free to change and busy instances are in the way on others, and of nodes
// where nothing stands.
func TestPlan(t *testing.T) {
	for _, tc := range []struct {
		golden, inventory, partition, format string
		blocked                              bool
	}{
		{"default.txt", cut, "default", "text", true},
		{"default.json", cut, "default", "json", true},
		{"whole.txt", cut, "whole", "text", true},
		{"shared.txt", cut, "shared", "text", true},
		{"mps.txt", plain, "mps", "text", false},
		{"on-demand.txt", cut, "on-demand", "text", false},
		{"on-demand.json", cut, "on-demand", "json", false},
		{"empty.txt", cut, "empty", "text", true},
		{"mixed.txt", cut, "mixed", "text", true},
		{"mixed.json", cut, "mixed", "json", true},
		{"fresh.txt", plain, "mixed", "text", false},
		{"fresh.json", plain, "default", "json", false},
		{"media.txt", testdata + "/rtx-pro-6000-mig.json", "media", "text", true},
		{"nvidia.txt", cut, "nvidia", "text", false},
	} {
		t.Run(tc.golden, func(t *testing.T) {
			file := plans
			if tc.partition == "nvidia" {
				file = "testdata/mig-configs.yaml"
			}
			out, said, err := execute(t, "plan", "--config", file, "--inventory", tc.inventory, "-o", tc.format, "--partition", tc.partition)
			if tc.blocked != errors.Is(err, errBlocked) || !tc.blocked && err != nil {
				t.Fatalf("%v, want blocked: %v", err, tc.blocked)
			}
			if said != "" {
				t.Errorf("on standard error: %s", said)
			}
			golden(t, filepath.Join("testdata", "plan-"+tc.golden), []byte(out))
		})
	}
}

// TestPlanJSON holds what tools rely on: lists that are never null, every GPU in the
// inventory's order, and of a GPU that is blocked no step, and a result that is what stands.
func TestPlanJSON(t *testing.T) {
	inv, err := config.ReadInventory(read(t, cut))
	if err != nil {
		t.Fatal(err)
	}
	file, err := config.Parse(plans, read(t, plans))
	if err != nil {
		t.Fatal(err)
	}
	for _, partition := range file.Names() {
		if partition == "media" || partition == "too-many" {
			continue // for other cards, for none
		}
		out, _, err := execute(t, "plan", "--config", plans, "--inventory", cut, "--partition", partition, "-o", "json")
		if err != nil && !errors.Is(err, errBlocked) {
			t.Fatal(err)
		}
		if strings.Contains(out, "null") {
			t.Errorf("%s: something is null: %s", partition, out)
		}
		var doc status.Plan
		dec := json.NewDecoder(strings.NewReader(out))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&doc); err != nil {
			t.Fatalf("%s: %v", partition, err)
		}
		if len(doc.GPUs) != len(inv.GPUs) || doc.Partition != partition || len(doc.Unknown) == 0 {
			t.Fatalf("%s: %d GPUs of %d, partition %q, unknown: %q", partition, len(doc.GPUs), len(inv.GPUs), doc.Partition, doc.Unknown)
		}
		check := func(s status.PlannedInstance, op string) {
			t.Helper()
			if op == string(mig.Enable) || op == string(mig.Disable) {
				if s != (status.PlannedInstance{}) {
					t.Errorf("%s: %s has a placement", partition, op)
				}
				return
			}
			n, err := mig.Parse(s.Profile)
			if err != nil || (n.Compute != 0) != (s.CI != nil) {
				t.Errorf("%s: %s: %v; ci is there for parts alone", partition, s.Profile, err)
			}
		}
		blocked := false
		for i, g := range doc.GPUs {
			if g.UUID != string(inv.GPUs[i].UUID) || g.Index != i || g.Steps == nil || g.Result == nil || g.Blocked == nil {
				t.Errorf("%s: GPU %d is %+v", partition, i, g)
			}
			for _, s := range g.Steps {
				check(s.PlannedInstance, s.Op)
				changes := s.Profile == "" && (s.Op == string(mig.Enable)) != inv.GPUs[i].MIG.Enabled
				if s.Reset != changes {
					t.Errorf("%s: GPU %d: %s: a change of an A100's MIG mode takes a reset, and nothing else does", partition, i, &s)
				}
			}
			for _, s := range g.Result {
				check(s, string(mig.Create))
			}
			for _, b := range g.Blocked {
				blocked = true
				if off := g.Wanted == "off"; off != (b.PlannedInstance == nil) {
					t.Errorf("%s: GPU %d: %+v", partition, i, b)
				} else if !off {
					check(*b.PlannedInstance, string(mig.Destroy))
				}
				if b.Reason != status.HeldByPods || b.Holder == "" {
					t.Errorf("%s: GPU %d: %+v does not say who holds it", partition, i, b)
				}
			}
			standing := slices.DeleteFunc(mig.Stand(&inv.GPUs[i].MIG), func(s mig.Standing) bool { return s.Empty })
			if len(g.Blocked) > 0 && (len(g.Steps) > 0 || len(g.Result) != len(standing)) {
				t.Errorf("%s: GPU %d is blocked: %+v", partition, i, g)
			}
		}
		if blocked != errors.Is(err, errBlocked) || blocked != (doc.State == "blocked") {
			t.Errorf("%s: %v, state %s, and blocked is %v", partition, err, doc.State, blocked)
		}
	}
}

// TestPlanCommandLine is flags, defaults and what is wrong.
func TestPlanCommandLine(t *testing.T) {
	bare := write(t, "bare.json", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 81920, "mig": {"enabled": true,
		"profiles": [{"name": "3g.40gb", "max": 2, "placements": [{"start": 0, "size": 4}, {"start": 4, "size": 4}]}],
		"instances": [{"profile": "3g.40gb", "start": 4, "size": 4, "busy": true}]}}]}`)
	lost := write(t, "lost.json", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 0, "fault": "GPU is lost", "mig": {}}]}`)
	named := write(t, "named.yaml", "version: v1\npartitions:\n  research:\n    - {devices: all, mode: whole}\n")
	for _, tt := range []struct {
		args   []string
		status int
		out    string
		err    string
	}{
		{[]string{"--config", plans, "--inventory", plain}, 0, "enable MIG mode", ""},
		{[]string{"-o", "json", "--partition=default", "--inventory=" + plain, "--config=" + plans}, 0, `"op": "enable"`, ""},
		{[]string{"--config", plans, "--inventory", cut}, 3, "1g.10gb@5 (train/train-3)", ""},
		{[]string{"--config", plans, "--inventory", cut, "-o", "json"}, 3, `"holder": "train/train-3"`, ""},
		{[]string{"--config", plans, "--inventory", bare}, 0, "create 3g.40gb@0", ""},
		{[]string{"--config", plans, "--inventory", lost}, 0, "nothing can be done: GPU is lost", ""},
		{[]string{"--config", named, "--inventory", plain, "--partition", "research"}, 0, "nothing to do", ""},
		{[]string{"--config", named, "--inventory", plain}, 5, "", named + `:3: no partition is named "default"`},
		{[]string{"--config", plans, "--inventory", plain, "--partition", "too-many"}, 5, "", plans + ":"},
		{[]string{"--config", plans, "--inventory", plans}, 1, "", plans + ": read inventory"},
		{[]string{"--config", "nowhere.yaml", "--inventory", plain}, 1, "", "nowhere.yaml"},
		{[]string{"--config", plans, "--inventory", "nowhere.json"}, 1, "", "nowhere.json"},
		{[]string{"--config", plans, "--inventory", plain, "extra"}, 2, "", `unexpected argument "extra"`},
		{[]string{"--inventory", plain}, 2, "", "--config is missing"},
		{[]string{"--config", named, "--inventory", plain, "--partition", "research", "--api", "dra"}, 0, ": whole, through dra\n  nothing to do", ""},
		{[]string{"--config", named, "--inventory", plain, "--partition", "research", "--api", "dra", "-o", "json"}, 0, `"api": "dra"`, ""},
		{[]string{"--config", plans, "--inventory", plain, "--partition", "mixed", "--api", "dra"}, 5, "", "(1c.3g.40gb and 2c.3g.40gb)"},
		{[]string{"--config", plans, "--inventory", plain, "-o", "yaml"}, 2, "", "want one of text, json"},
	} {
		out, said, status := program(t, append([]string{"plan"}, tt.args...)...)
		if status != tt.status || !strings.Contains(out, tt.out) || !strings.Contains(said, tt.err) {
			t.Errorf("%q: exit status %d\nout: %s\nerr: %s\nwant %d, %q and %q", tt.args, status, out, said, tt.status, tt.out, tt.err)
		}
		if tt.status != 0 && tt.status != 3 && out != "" {
			t.Errorf("%q fails and prints %s", tt.args, out)
		}
	}
}

// TestNothingInfeasiblePasses: check and plan refuse the same, with file, line
// and a reason, and plan prints no step of it.
func TestNothingInfeasiblePasses(t *testing.T) {
	names := []string{"a100-80-mig", "a30", "rtx-pro-6000"}
	if !testing.Short() { // make test-all has all
		names = append(names, "a100-40", "a100-80", "h100-80", "h200", "b200")
	}
	for _, name := range names {
		inventory := testdata + "/" + name + ".json"
		inv, err := config.ReadInventory(read(t, inventory))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range inv.GPUs[0].MIG.Profiles {
			for _, n := range []int{p.Max, p.Max + 1} {
				text := "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: mig\n      geometry: {" + p.Name + ": " + string(rune('0'+n)) + "}\n"
				file := write(t, "p.yaml", text)
				out, said, err := execute(t, "check", "--config", file, "--inventory", inventory)
				steps, _, planErr := execute(t, "plan", "--config", file, "--inventory", inventory)
				if fits := n <= p.Max; fits {
					if err != nil || !strings.Contains(out, "partition default fits") || planErr != nil && !errors.Is(planErr, errBlocked) {
						t.Errorf("%s: %d of %s: %v, %v", name, n, p.Name, err, planErr)
					}
					continue
				}
				if err == nil || !strings.HasPrefix(said, file+":4: ") || !strings.Contains(said, p.Name) {
					t.Errorf("%s: %d of %s passes check, or without a reason: %v, %s", name, n, p.Name, err, said)
				}
				if planErr == nil || errors.Is(planErr, errBlocked) || steps != "" {
					t.Errorf("%s: %d of %s passes plan: %v, %s", name, n, p.Name, planErr, steps)
				}
			}
		}
	}
}

// TestCheckWantsProof: a driver that tells no placements with MIG off leaves
// open what fits, which check refuses and plan does not.
func TestCheckWantsProof(t *testing.T) {
	inventory := write(t, "off.json", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 81920, "mig": {"capable": true, "profiles": [{"name": "3g.40gb", "max": 2}]}}]}`)
	if _, said, err := execute(t, "check", "--config", plans, "--inventory", inventory, "--partition", "default"); err == nil || !strings.HasPrefix(said, plans+":4: GPU 0: the driver reports placements only while MIG is on") {
		t.Errorf("%v, %s", err, said)
	}
	out, _, err := execute(t, "plan", "--config", plans, "--inventory", inventory)
	if err != nil || !strings.Contains(out, "enable MIG mode\n") || strings.Contains(out, "create") || !strings.Contains(out, "plan again once MIG is on") {
		t.Errorf("%v, %s", err, out)
	}
}

// In the agent's container there are the GPUs, and no file: check and plan take it from the
// standard input.
func TestPartitionsAtTheStandardInput(t *testing.T) {
	out, said, err := executeWith(t, "version: v1\npartitions:\n  default:\n    - {devices: all, mode: share}\n", "check", "--config", "-", "--inventory", h100)
	if err == nil || !strings.HasPrefix(err.Error()+said, `standard input:4: mode is whole,`) {
		t.Errorf("%v\n%s%s", err, out, said)
	}
	good := string(read(t, plans))
	if out, said, err := executeWith(t, good, "plan", "--config", "-", "--inventory", h100); err != nil || !strings.Contains(out, "GPU 0") {
		t.Errorf("%v\n%s%s", err, out, said)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
