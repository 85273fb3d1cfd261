// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

func readme(t *testing.T) string { return string(read(t, "../README.md")) }

func reference(t *testing.T) string { return string(read(t, "../docs/reference.md")) }

// agentPage is an agent's /metrics with every metric: of two GPUs, of which one has failed.
func agentPage(t *testing.T) string {
	t.Helper()
	metrics := agentobs.NewMetrics("test")
	metrics.Called("r", "m", 0, nil)
	metrics.Refused("r", errors.New("x"))
	metrics.DriverCall("c", "ok", 0)
	metrics.Round(nil, 0)
	metrics.APIError("list", "nodes")
	metrics.APIAnswered()
	metrics.Registered("r", errors.New("x"))
	metrics.Lowered("list")
	metrics.Event("sent")
	metrics.GPUEvent(gpu.Event{GPU: "GPU-1", Kind: gpu.EventXid, Xid: 79})
	metrics.MIGStep("create", "1g.10gb", 0, nil)
	metrics.Wish("1g.10gb", 0)
	metrics.Yielded("ended", 0)
	good := func() error { return nil }
	return page(t, agentobs.New(agentobs.Options{
		Logger: slog.New(slog.DiscardHandler), Healthy: good, Ready: good, Metrics: metrics,
		Account: &agentobs.Account{Usage: func() usage.Shown {
			k := usage.Key{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-1"}
			return usage.Shown{Series: []usage.Series{{Key: k, Amounts: usage.Amounts{Known: true, SMKnown: true, LentGPU: 1, LentMiB: 1}}}, Now: []usage.Part{{Key: k}}, Idle: []usage.Idle{{Key: k, For: 2 * time.Hour}}}
		}},
		Status: func() status.Status {
			return status.Status{
				SaturationPercent: new(int),
				Driver:            "580", CUDA: "13.0", Partition: status.Partition{Name: "default", State: "applied"},
				Watchdog:  status.Watchdog{State: status.WatchdogRunning},
				Policies:  []status.Policy{{Name: "gpu-agent", State: status.PolicyHeld}},
				Found:     []status.Condition{{Type: status.Noted, Cause: status.Cause{Reason: status.AccountingOn}, Subject: "GPU-1"}},
				Resources: []status.Resource{{Name: "r", Registered: true, Free: 3, Largest: 2}},
				Containers: []status.Container{{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-1", CapMiB: new(uint64(4)), UsedMiB: new(uint64(3)), Guarantee: "api",
					ComputePercent: 26, Compute: &compute.Held{Guarantee: compute.Ceiling, Ceiling: 26}}},
				GPUs: []status.GPU{{UUID: "GPU-1", Health: status.Healthy, Mode: "shared", Resource: "example.com/gpu-mem", Total: 1, Free: 1, MemoryMiB: 1,
					MIG: &status.MIG{Placements: []status.Placement{{Profile: "1g.10gb", State: status.PlacementWarm, UUID: "MIG-1"}}}},
					{UUID: "GPU-2", Class: "lost", Mode: "whole", MemoryMiB: 1}},
			}
		},
	}))
}

// page is what a program serves as /metrics.
func page(t *testing.T, of *obs.Server) string {
	t.Helper()
	answer := httptest.NewRecorder()
	of.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	return answer.Body.String()
}

// names are what a pattern captures, each once.
func names(pattern, text string) []string {
	var out []string
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func TestDocsNameEveryMetric(t *testing.T) {
	have := names(`(?m)^# HELP (gpu_agent_\w+)`, agentPage(t))
	if got := names("`(gpu_agent_\\w+)`", string(read(t, "../docs/metrics.md"))); !slices.Equal(got, have) {
		t.Errorf("docs/metrics.md has the metrics\n%q, the agent serves\n%q", got, have)
	}
}

// Whatever document names a metric names one that there is, or that a rule records.
func TestEveryMetricThatIsNamedExists(t *testing.T) {
	files, err := filepath.Glob("../docs/*.md")
	if err != nil || len(files) == 0 {
		t.Fatalf("find the documents: %v, %v", files, err)
	}
	served := servedMetrics(t)
	_, records := alertsAndRecords(t)
	found := 0
	for _, f := range append(files, "../README.md") {
		for _, m := range regexp.MustCompile(`(?:\w+:)?\bgpu_agent[_:][\w:]*\w`).FindAllString(string(read(t, f)), -1) {
			found++
			// An adapter for the HorizontalPodAutoscaler takes no colons.
			recorded := slices.ContainsFunc(records, func(r string) bool { return r == m || strings.ReplaceAll(r, ":", "_") == m })
			if !served[m] && !recorded {
				t.Errorf("%s names the metric %s, which nobody serves or records", f, m)
			}
		}
	}
	if found < 100 {
		t.Errorf("only %d metrics are named: this test does not look where they are", found)
	}
}

// The partitions that the documents show can be had.
func TestShownPartitions(t *testing.T) {
	for _, test := range []struct {
		file, node string
		not        []string // partitions for a node with another number of GPUs
	}{
		{"../README.md", "a30-24gb", nil},
		{"../README.md", "a100-80gb", nil},
		{"../docs/install.md", "a100-80gb", nil},
		{"../docs/reference.md", "a30-24gb", nil},
		{"../docs/reference.md", "a100-80gb", []string{"mixed"}},
		{"../docs/migrate-from-nvidia.md", "a100-80gb", nil},
	} {
		inv, err := config.ReadInventory(read(t, "../tests/testdata/inventories/"+test.node+".json"))
		if err != nil {
			t.Fatal(err)
		}
		files := regexp.MustCompile("(?s)```yaml\n(version: .*?)```").FindAllStringSubmatch(string(read(t, test.file)), -1)
		for _, text := range shownConfigMaps(t, test.file) {
			files = append(files, []string{"", partitionsIn(t, documents(t, test.file, []byte(text)))})
		}
		if len(files) == 0 {
			t.Errorf("%s shows no partitions", test.file)
		}
		for _, f := range files {
			file, err := config.Parse(test.file, []byte(f[1]))
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range file.Names() {
				if slices.Contains(test.not, p) {
					continue
				}
				if _, err := file.Desire(p, inv, config.Node{Unit: 1024}); err != nil {
					t.Errorf("on %s: %v", test.node, err)
				}
			}
		}
	}
}

// shownConfigMaps are the texts of those in a document, between fences or indented.
func shownConfigMaps(t *testing.T, file string) (all []string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^( *)apiVersion: v1\n *kind: ConfigMap\n(?: *[^\s`+"`"+`].*\n)+`).FindAllStringSubmatch(string(read(t, file)), -1) {
		all = append(all, strings.ReplaceAll("\n"+m[0], "\n"+m[1], "\n"))
	}
	return all
}

// partitionsIn is the partition file in the ConfigMap gpu-partitions among objects.
func partitionsIn(t *testing.T, objects []object) string {
	t.Helper()
	o := one(t, objects, "ConfigMap", "gpu-partitions")
	if o.Metadata.Namespace != name {
		t.Errorf("the ConfigMap gpu-partitions is in the namespace %q", o.Metadata.Namespace)
	}
	text, ok := as[configMap](t, o).Data["config.yaml"]
	if !ok {
		t.Fatal("the ConfigMap gpu-partitions has no config.yaml")
	}
	return text
}

// The drawings of a MIG GPU are what gpu-agent status prints.
func TestShownStatus(t *testing.T) {
	const u = "GPU-7d1e2f3a-0000-1111-2222-333344440000"
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) *time.Time { at := now.Add(-d); return &at }
	placement := func(profile string, start, size int, state, uuid, pod string) status.Placement {
		s := status.Placement{Profile: profile, Start: start, Size: size, State: state, UUID: uuid, Resource: "example.com/mig-" + profile}
		if pod != "" {
			s.Namespace, s.Pod, s.Container = "work", pod, "main"
		}
		return s
	}
	s := status.Status{GPUs: []status.GPU{{
		UUID: u, Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: "mig", Health: status.Healthy,
		Holders: []status.Holder{
			{Namespace: "work", Pod: "web-1", Container: "main", Resource: "example.com/mig-1g.10gb", Units: 1, Since: ago(3 * time.Hour)},
			{Namespace: "work", Pod: "train-x2k4p", Container: "main", Resource: "example.com/mig-3g.40gb", Units: 1, Since: ago(time.Second)},
		},
		MIG: &status.MIG{Enabled: true, OnDemand: true, Size: 8, Placements: []status.Placement{
			placement("1g.10gb", 0, 1, status.PlacementHeld, "MIG-1", "web-1"),
			placement("1g.10gb", 1, 1, status.PlacementWarm, "MIG-2", ""),
			placement("1g.10gb", 2, 1, status.PlacementFree, "", ""),
			placement("1g.10gb", 3, 1, status.PlacementFree, "", ""),
			placement("1g.20gb", 2, 2, status.PlacementFree, "", ""),
			placement("2g.20gb", 2, 2, status.PlacementFree, "", ""),
			placement("3g.40gb", 0, 4, status.PlacementCovered, "", ""),
			placement("3g.40gb", 4, 4, status.PlacementMaking, "", "train-x2k4p"),
		}},
	}}}
	for _, test := range []struct {
		file, work string
		width      int
	}{
		{"../docs/reference.md", "", 80},
		{"../docs/mig.md", "create 3g.40gb@4 since 2026-03-01T11:59:59Z", 100},
	} {
		s.GPUs[0].MIG.Work = test.work
		var out strings.Builder
		if err := status.WriteText(&out, s, status.TextOptions{Width: test.width, Now: now}); err != nil {
			t.Fatal(err)
		}
		_, want, ok := strings.Cut(out.String(), "\nGPU 0 ")
		if !ok {
			t.Fatalf("no GPU is drawn:\n%s", out.String())
		}
		want = strings.ReplaceAll("\nGPU 0 "+want, "\n", "\n    ")
		if text := string(read(t, test.file)); !strings.Contains(text, strings.TrimRight(want, " ")) {
			t.Errorf("%s does not show\n%s", test.file, want)
		}
	}
}

// The plans and refusals that are shown are what the program prints: for one
// GPU of seven small instances, of which a pod has one.
func TestShownPlans(t *testing.T) {
	inv, err := config.ReadInventory(read(t, "../tests/testdata/a100-80.json"))
	if err != nil {
		t.Fatal(err)
	}
	inv.GPUs = inv.GPUs[:1]
	m := &inv.GPUs[0].MIG
	m.Enabled, m.Pending, m.Instances = true, nil, nil
	for i := range 7 {
		m.Instances = append(m.Instances, gpu.Instance{Profile: "1g.10gb", Placement: gpu.Placement{Start: i, Size: 1}})
	}
	m.Instances[5].Busy, m.Instances[5].Holder = true, "train/train-3"
	node, err := json.Marshal(inv)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	partitions := `version: v1
partitions:
  three:
    - devices: all
      mode: mig
      geometry: {3g.40gb: 1, 1g.10gb: 3}
  halves:
    - devices: all
      mode: mig
      geometry: {3g.40gb: 2}
  mixed:
    - devices: all
      mode: mig
      geometry: {3g.40gb: 2, 1g.10gb: 1}
`
	program := program(t)
	for name, text := range map[string][]byte{"node.json": node, "partitions.yaml": []byte(partitions)} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// prints runs the program and returns what it prints as a document shows it.
	prints := func(args string) string {
		cmd := exec.CommandContext(t.Context(), program, strings.Fields(args)...)
		cmd.Dir = dir
		out, _ := cmd.CombinedOutput() // its exit status is part of what it says
		return "    " + strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n    ") + "\n"
	}
	manual := string(read(t, "../docs/mig.md"))
	for _, partition := range []string{"three", "halves"} {
		args := "plan --inventory node.json --config partitions.yaml --partition " + partition
		if want := "    $ gpu-agent " + args + "\n" + prints(args); !strings.Contains(manual, want) {
			t.Errorf("docs/mig.md does not show\n%s", want)
		}
	}
	read, refused, _ := strings.Cut(prints("check --config partitions.yaml --inventory node.json --partition mixed"), "\n")
	refused, _, _ = strings.Cut(refused, "\n") // a count follows
	if shown := read + "\n" + refused; !strings.Contains(manual, shown) {
		t.Errorf("docs/mig.md does not show\n%s", shown)
	}
	// The agent's own answer is of a file on its standard input.
	if _, says, _ := strings.Cut(refused, ":12: "); !strings.Contains(reference(t), "    standard input:12: "+says) {
		t.Errorf("docs/reference.md does not show that standard input has in line 12: %s", says)
	}
}

// headings are the anchors of a document.
func headings(text string) []string {
	var out []string
	for _, m := range regexp.MustCompile("(?m)^#+ (.*)$").FindAllStringSubmatch(text, -1) {
		anchor := strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")
		out = append(out, regexp.MustCompile("[^a-z0-9_-]").ReplaceAllString(anchor, ""))
	}
	return out
}

// Every link in a document leads to a file, and to a heading in it.
func TestLinks(t *testing.T) {
	docs, err := filepath.Glob("../docs/*.md")
	if err != nil || len(docs) == 0 {
		t.Fatalf("find the documents: %v, %v", docs, err)
	}
	top, err := filepath.Glob("../*.md")
	if err != nil || len(top) < 4 {
		t.Fatalf("find README and its neighbours: %v, %v", top, err)
	}
	for _, f := range slices.Concat(docs, top) {
		text := string(read(t, f))
		for _, m := range regexp.MustCompile(`\]\(([^)#]*)#?([^)]*)\)`).FindAllStringSubmatch(text, -1) {
			target, anchor := f, m[2]
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(f), m[1])
			}
			there, err := os.ReadFile(target)
			if err != nil {
				t.Errorf("%s: a link leads nowhere: %v", f, err)
			} else if anchor != "" && !slices.Contains(headings(string(there)), anchor) {
				t.Errorf("%s: %s has no heading %s", f, target, anchor)
			}
		}
	}
}

// Every document that code, a manifest or a test names is there, with the section that it names.
func TestNamedDocuments(t *testing.T) {
	pattern := regexp.MustCompile(`\bdocs/([a-z-]+\.md)(?:#([a-z0-9_-]+))?`)
	found := 0
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "stages"): // the test of stages makes documents of its own
			return fs.SkipDir
		case d.IsDir() || !slices.Contains([]string{".go", ".yaml", ".json", ".c", ".h"}, filepath.Ext(path)):
			return nil
		}
		for _, m := range pattern.FindAllStringSubmatch(string(read(t, path)), -1) {
			found++
			if text, err := os.ReadFile(filepath.Join("../docs", m[1])); err != nil {
				t.Errorf("%s names a document that is not there: %v", path, err)
			} else if m[2] != "" && !slices.Contains(headings(string(text)), m[2]) {
				t.Errorf("%s names %s, and docs/%s has no such heading", path, m[0], m[1])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 60 {
		t.Errorf("%d documents are named: this test does not look where they are", found)
	}
}

// A page takes ten minutes to read at most, but for those where people look things up; what users of
// pods read first fits on two screens.
func TestPagesAreShort(t *testing.T) {
	const most = 2300
	long := []string{"architecture.md", "bursting.md", "reference.md", "runbooks.md"}
	files, err := filepath.Glob("../docs/*.md")
	if err != nil || len(files) < 20 {
		t.Fatalf("find the documents: %v, %v", files, err)
	}
	for _, f := range files {
		text := string(read(t, f))
		words := len(strings.Fields(regexp.MustCompile("(?s)```.*?```|\\n    [^\\n]*").ReplaceAllString(text, "")))
		if words > most && !slices.Contains(long, filepath.Base(f)) {
			t.Errorf("%s has %d words, want at most %d: divide it", f, words, most)
		}
	}
	if lines := strings.Count(string(read(t, "../docs/pods.md")), "\n"); lines > 150 {
		t.Errorf("docs/pods.md has %d lines, want two screens", lines)
	}
}

func TestReadmePaths(t *testing.T) {
	text := readme(t)
	if lines := strings.Count(text, "\n"); lines > 150 {
		t.Errorf("README has %d lines: what does not fit on two screens belongs into docs", lines)
	}
	for _, m := range regexp.MustCompile("[ `](deployments/[a-z/-]+)").FindAllStringSubmatch(text+string(read(t, "../docs/install.md")), -1) {
		if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
			t.Errorf("README or docs/install.md names %s: %v", m[1], err)
		}
	}
	targets := string(read(t, "../Makefile"))
	for _, m := range regexp.MustCompile("(?m)(?:^    |`)make ([a-z-]+)").FindAllStringSubmatch(text, -1) {
		if !strings.Contains(targets, "\n"+m[1]+":") {
			t.Errorf("README says make %s, and the Makefile has no such target", m[1])
		}
	}
}
