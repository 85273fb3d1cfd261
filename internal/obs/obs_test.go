// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

var update = flag.Bool("update", false, "write the golden files anew")

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *time.Time {
	at := noon.Add(-d)
	return &at
}

// sample has one GPU of each kind that a reader meets.
func sample() Status {
	const h100 = "NVIDIA H100 80GB HBM3"
	return Status{
		Node: "gpu-node-1", Version: "v0.1.0", Driver: "580.159.03", CUDA: "13.0", Claims: 6,
		Partition: Partition{Name: "research", State: "blocked", Source: "configmap gpu/gpu-partitions", Generation: 3,
			Message: "GPU 2: train/train-3 holds 40 units of gpu-mem; the GPU becomes whole when the pod has ended"},
		Resources: []ResourceStatus{
			{"example.com/gpu", 2, false, ago(5 * time.Minute), "register with the kubelet at /k/kubelet.sock: refused"},
			{"example.com/gpu-mem", 237, true, nil, ""},
			{"example.com/gpu.shared", 4, false, ago(time.Second), ""},
		},
		GPUs: []GPUStatus{
			{Index: 0, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440000", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu-mem", UnitMiB: 1024, Total: 79, Used: 48, Free: 31, Health: Healthy,
				Holders: []Holder{
					{"train", "job-1", "main", "example.com/gpu-mem", 24, ago(3 * time.Hour), ""},
					{"train", "job-2-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "a-container", "example.com/gpu-mem", 8, ago(5 * time.Second), ""},
					{"", "", "", "example.com/gpu-mem", 16, ago(time.Second), "train/job-0"},
				}},
			{Index: 1, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440001", Model: h100, MemoryMiB: 81559, Mode: "whole",
				Resource: "example.com/gpu", Total: 1, Unhealthy: 1, Health: "unhealthy", Reason: "Xid 79: GPU has fallen off the bus",
				Class: "lost", Since: ago(2 * time.Hour), Needs: "reset"},
			{Index: 2, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440002", Model: h100, MemoryMiB: 81559, Mode: "whole",
				Resource: "example.com/gpu", Total: 1, Free: 0, Unhealthy: 1, Health: Healthy,
				Blocked: "train/train-3 holds 40 units of gpu-mem",
				Holders: []Holder{{"train", "train-3", "main", "example.com/gpu-mem", 40, ago(50 * time.Hour), ""}}},
			{Index: 3, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440003", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu.shared", Total: 4, Used: 1, Free: 2, Unhealthy: 1, Health: Healthy, Intruders: 1, NoPod: 2, Unlisted: 3,
				Holders: []Holder{{"dev", "notebook", "jupyter", "example.com/gpu.shared", 1, nil, ""}}},
			{Index: 4, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440004", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu-mem", UnitMiB: 512, Total: 158, Used: 158, Health: Healthy,
				Holders: []Holder{{"dev", "big", "main", "example.com/gpu-mem", 158, ago(7 * time.Minute), ""}}},
			{Index: 15, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440015", MemoryMiB: 24576, Mode: "off", Health: Healthy},
		},
		Watchdog: Watchdog{State: WatchdogRunning, Kills: 2, Intruders: 1},
		Policies: []PolicyStatus{{"gpu-agent", PolicyHeld, ""},
			{"gpu-agent-events", PolicyMissing, "the API server would take a write to events that the admission policy gpu-agent-events must refuse: apply it"},
			{"gpu-agent-evict", PolicyUnknown, "whether the admission policy gpu-agent-evict is in force is not known: no answer"}},
		Containers: []ContainerStatus{
			{"", "", "", "5a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440000", 0, mib(16 * 1024), nil, 0, "api", 0, 0, 0, 0},
			{"train", "job-1", "main", "2a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440000", 0,
				mib(24 * 1024), mib(3277), 20000, "api", 12, 2, 3, 32},
			{"train", "job-2-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "a-container", "3a1b2c3d4e5f6071",
				"GPU-5e0f8c1a-0000-1111-2222-333344440000", 0, mib(8 * 1024), mib(0), 1 << 43, "api", 1<<64 - 1, 1, 0, 0},
			{"train", "train-3", "main", "4a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440002", 2,
				nil, mib(70000), 71000, "hardware", 0, 1, 0, 0},
			{"dev", "notebook", "jupyter", "1a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440003", 3,
				mib(20242), nil, 0, "api", 0, 0, 0, 0},
			{"dev", "big", "main", "0a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440004", 4,
				mib(79 * 1024), mib(80 * 1024), 78 * 1024, "watchdog", 3, 8, 0, 0},
		},
	}
}

func mib(n uint64) *uint64 { return &n }

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); got:\n%s", name, got)
	}
}

func text(t *testing.T, s Status, o TextOptions) string {
	t.Helper()
	var out strings.Builder
	if err := WriteText(&out, s, o); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestText(t *testing.T) {
	golden(t, "status.txt", text(t, sample(), TextOptions{Now: noon}))
	golden(t, "status-ascii-60.txt", text(t, sample(), TextOptions{Width: 60, ASCII: true}))
	golden(t, "status-color-100.txt", text(t, sample(), TextOptions{Width: 100, Color: true, Now: noon}))
	golden(t, "status-nothing.txt", text(t, Status{Node: "gpu-node-1", Version: "v0.1.0"}, TextOptions{}))
	golden(t, "status-watchdog-off.txt", text(t, Status{Node: "gpu-node-1", Version: "v0.1.0", Watchdog: Watchdog{State: WatchdogOff,
		Reason: "the agent is not in the initial PID namespace, so the driver would hide processes from it; set hostPID: true"}}, TextOptions{}))
}

func TestTextFits(t *testing.T) {
	s := sample()
	s.GPUs = append(s.GPUs, cards().GPUs...)
	s.Node = strings.Repeat("node", 60)
	s.GPUs[0].Model = strings.Repeat("model ", 30)
	s.GPUs[0].Resource = strings.Repeat("long", 20) + ".example.com/gpu-mem"
	s.Containers[2].Pod = strings.Repeat("pod-", 40)
	s.Containers[3].Container = "first\n\x1b[31msecond\tword"
	s.Watchdog = Watchdog{State: WatchdogOff, Reason: strings.Repeat("reason ", 40)}
	s.GPUs[1].Reason = "first line\n\x1b[31msecond\tline"
	for _, width := range []int{0, 60, 80, 133} {
		limit := width
		if limit == 0 {
			limit = 80
		}
		for _, ascii := range []bool{false, true} {
			got := text(t, s, TextOptions{Width: width, ASCII: ascii, Now: noon})
			for _, line := range strings.Split(got, "\n") {
				if n := utf8.RuneCountInString(line); n > limit {
					t.Errorf("width %d: %d columns: %q", width, n, line)
				}
				if strings.ContainsAny(line, "\x1b\t") || strings.HasSuffix(line, " ") {
					t.Errorf("control character or trailing space in %q", line)
				}
			}
			if ascii && len(got) != utf8.RuneCountInString(got) {
				t.Errorf("width %d: ASCII text has other characters:\n%s", width, got)
			}
		}
	}
}

// Colour adds to the text and takes nothing away.
func TestTextColor(t *testing.T) {
	s := sample()
	s.GPUs = append(s.GPUs, cards().GPUs...)
	plain := text(t, s, TextOptions{Now: noon})
	colored := text(t, s, TextOptions{Now: noon, Color: true})
	for _, code := range []string{bold, faint, red, green, yellow, "0"} {
		colored = strings.ReplaceAll(colored, "\x1b["+code+"m", "")
	}
	if plain != colored {
		t.Errorf("without its codes the coloured text is\n%s\nand the plain one\n%s", colored, plain)
	}
}

func TestShare(t *testing.T) {
	for _, test := range []struct{ part, whole, want int }{
		{0, 79, 0}, {1, 79, 1}, {79, 79, 24}, {78, 79, 23}, {40, 80, 12}, {5, 0, 0}, {9, 8, 24},
	} {
		if got := share(test.part, test.whole, 24); got != test.want {
			t.Errorf("%d of %d is %d cells, want %d", test.part, test.whole, got, test.want)
		}
	}
}

// serve runs a Server on a loopback port until the test ends.
func serve(t *testing.T, o Options) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, listener, o)
}

// serveOn is serve on a listener of the test's.
func serveOn(t *testing.T, listener net.Listener, o Options) string {
	t.Helper()
	if o.Metrics == nil {
		o.Metrics = NewMetrics("v0.1.0")
	}
	if o.Status == nil {
		o.Status = sample
	}
	ok := func() error { return nil }
	if o.Healthy == nil {
		o.Healthy = ok
	}
	if o.Ready == nil {
		o.Ready = ok
	}
	o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- New(o).Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("server ended with %v", err)
		}
	})
	return listener.Addr().String()
}

func get(t *testing.T, addr, page string) (int, string) {
	t.Helper()
	response, err := http.Get("http://" + addr + page)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func used() *Metrics {
	m := NewMetrics("v0.1.0")
	m.PluginRequest("example.com/gpu-mem", "Allocate", "OK", 40*time.Microsecond)
	m.PluginRequest("example.com/gpu-mem", "Allocate", "OK", 2*time.Second)
	m.DriverCall("DeviceGetMemoryInfo", "ok", time.Millisecond)
	m.Round(nil, time.Millisecond)
	m.Round(errors.New("x"), time.Millisecond)
	m.APIError("watch", "configmaps")
	m.RegistrationError("example.com/gpu")
	m.Event("sent")
	m.GPUEvent("GPU-5e0f8c1a-0000-1111-2222-333344440001", "xid", 79)
	m.GPUEvent("GPU-1", "xid", 79)
	m.CapKill("over", 700*time.Millisecond)
	m.CapKill("intruder", 9*time.Second)
	m.CapEviction()
	m.MIGStep("create", "1g.10gb", time.Second, nil)
	m.Wish("1g.10gb", time.Second)
	return m
}

// Every metric has a help text, follows Prometheus' naming, and stands in the
// package comment's table, which has no other.
func TestMetricNames(t *testing.T) {
	families, err := used().registry(func() Status {
		s := sample()
		s.GPUs = append(s.GPUs, cards().GPUs...)
		return s
	}).Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	source, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(source), "// # Metrics")
	table, _, _ = strings.Cut(table, "// # Joining")
	documented := map[string]string{}
	for _, line := range strings.Split(table, "\n") {
		entry, ok := strings.CutPrefix(line, "//\t")
		if !ok {
			continue
		}
		entry, _, _ = strings.Cut(entry, " ")
		name, labels, _ := strings.Cut(strings.TrimSuffix(entry, "}"), "{")
		documented[prefix+name] = labels
	}
	for _, f := range families {
		name := f.GetName()
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		labels, ok := documented[name]
		if !ok {
			t.Errorf("%s is not in the package comment", name)
			continue
		}
		delete(documented, name)
		want := map[string]bool{}
		for _, l := range strings.Split(labels, ",") {
			want[l] = true
		}
		got := map[string]bool{}
		for _, l := range f.GetMetric()[0].GetLabel() {
			got[l.GetName()] = true
		}
		if len(got) == 0 {
			got[""] = true
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s has labels %v, documented %v", name, got, want)
		}
	}
	for name := range documented {
		t.Errorf("%s is documented and not there", name)
	}
}

func TestMetricsPage(t *testing.T) {
	addr := serve(t, Options{Metrics: used()})
	code, body := get(t, addr, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("%d: %s", code, body)
	}
	lines := map[string]bool{}
	for _, line := range strings.Split(body, "\n") {
		lines[line] = true
	}
	for _, want := range []string{
		`gpu_agent_claims 6`,
		`gpu_agent_plugin_registered{resource="example.com/gpu"} 0`,
		`gpu_agent_plugin_registered{resource="example.com/gpu-mem"} 1`,
		`gpu_agent_plugin_registration_errors_total{resource="example.com/gpu"} 1`,
		`gpu_agent_devices{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",resource="example.com/gpu-mem",state="held"} 48`,
		`gpu_agent_devices{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",resource="example.com/gpu-mem",state="free"} 31`,
		`gpu_agent_devices{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440003",resource="example.com/gpu.shared",state="unhealthy"} 1`,
		`gpu_agent_gpu_memory_bytes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440015"} 2.5769803776e+10`,
		`gpu_agent_gpu_healthy{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440001"} 0`,
		`gpu_agent_gpu_healthy{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440002"} 1`,
		`gpu_agent_gpu_blocked{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440002"} 1`,
		`gpu_agent_partition_state{partition="research",state="blocked"} 1`,
		`gpu_agent_partition_state{partition="research",state="applied"} 0`,
		`gpu_agent_partition_generation 3`,
		`gpu_agent_plugin_request_duration_seconds_bucket{code="OK",method="Allocate",resource="example.com/gpu-mem",le="5e-05"} 1`,
		`gpu_agent_plugin_request_duration_seconds_count{code="OK",method="Allocate",resource="example.com/gpu-mem"} 2`,
		`gpu_agent_round_duration_seconds_count{result="error"} 1`,
		`gpu_agent_api_errors_total{resource="configmaps",verb="watch"} 1`,
		`gpu_agent_events_total{outcome="sent"} 1`,
		`gpu_agent_gpu_events_total{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440001",kind="xid",xid="79"} 1`,
		`gpu_agent_container_memory_cap_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",guarantee="api",namespace="train",pod="job-1"} 2.5769803776e+10`,
		`gpu_agent_container_memory_used_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",namespace="train",pod="job-1"} 3.436183552e+09`,
		`gpu_agent_container_memory_peak_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",namespace="train",pod="job-1"} 2.097152e+10`,
		`gpu_agent_container_memory_refusals_total{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",namespace="train",pod="job-1"} 12`,
		`# TYPE gpu_agent_container_memory_refusals_total counter`,
		`gpu_agent_container_memory_used_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440002",namespace="train",pod="train-3"} 7.340032e+10`,
		`gpu_agent_cap_kills_total{reason="over"} 1`,
		`gpu_agent_cap_kills_total{reason="intruder"} 1`,
		`gpu_agent_cap_evictions_total 1`,
		`gpu_agent_cap_breach_to_end_seconds_bucket{le="0.75"} 1`,
		`gpu_agent_cap_breach_to_end_seconds_count 1`,
		`gpu_agent_watchdog_up 1`,
		`gpu_agent_policy_in_force{policy="gpu-agent"} 1`,
		`gpu_agent_policy_in_force{policy="gpu-agent-events"} 0`,
		`gpu_agent_unclaimed_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440003",kind="intruder"} 1`,
		`gpu_agent_unclaimed_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440003",kind="no-pod"} 2`,
		`gpu_agent_unclaimed_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",kind="intruder"} 0`,
	} {
		if !lines[want] {
			t.Errorf("no line %s", want)
		}
	}
	for _, line := range []struct{ part, why string }{
		{`memory_cap_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440002"`, "a whole GPU has no cap"},
		{`memory_refusals_total{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440002"`, "a whole GPU refuses nothing"},
		{`memory_used_bytes{container="jupyter"`, "what is unknown is not zero"},
		{`policy="gpu-agent-evict"`, "what is unknown is neither"},
		{`memory_peak_bytes{container="jupyter"`, "it was never seen"},
		{`pod=""`, "nobody can use a series of nobody"},
	} {
		if strings.Contains(body, line.part) {
			t.Errorf("there is a line with %s: %s", line.part, line.why)
		}
	}
	if !strings.Contains(body, "\nprocess_resident_memory_bytes ") || !strings.Contains(body, "\ngo_goroutines ") {
		t.Error("the process's own metrics are missing")
	}
	if n := strings.Count(body, "\n# TYPE go_"); n > 10 {
		t.Errorf("%d metrics of the Go runtime", n)
	}
}

// What the hardware answers in bad days must not cost the scrape.
func TestMetricsOfOddStatus(t *testing.T) {
	for _, s := range []Status{
		{},
		{Driver: "bad \xff", GPUs: []GPUStatus{{UUID: "GPU-a", Model: "\xfe"}, {UUID: "GPU-a"}, {}, {}}},
		{Watchdog: Watchdog{State: WatchdogRunning}, GPUs: []GPUStatus{{UUID: "GPU-a"}, {UUID: "GPU-a", NoPod: 1}}},
		// A container that started again, seen twice; and one of every word a
		// tenant might have a hand in.
		{Containers: []ContainerStatus{
			{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-a", CapMiB: mib(1), UsedMiB: mib(1), PeakMiB: 1},
			{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-a", CapMiB: mib(2), UsedMiB: mib(2), PeakMiB: 2},
			{Namespace: "n", Pod: "\xff", GPU: "GPU-a", PeakMiB: 1<<64 - 1, Refusals: 1<<64 - 1},
			{Namespace: "n", Pod: "\xfe", GPU: "GPU-a", PeakMiB: 1},
			{}, {},
		}},
	} {
		// The page goes on without what cannot be gathered: here everything can.
		if _, err := NewMetrics("v").registry(func() Status { return s }).Gather(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
		addr := serve(t, Options{Status: func() Status { return s }})
		code, body := get(t, addr, "/metrics")
		if code != http.StatusOK || !strings.Contains(body, "gpu_agent_claims 0") {
			t.Errorf("%+v: %d: %.300s", s, code, body)
		}
		// A rate needs a zero to start from.
		for _, reason := range KillReasons {
			if !strings.Contains(body, `gpu_agent_cap_kills_total{reason="`+reason+`"} 0`) {
				t.Errorf("no line for kills for %s before the first", reason)
			}
		}
	}
}

// A container that is gone leaves no series behind, and neither does a watchdog
// that has stopped.
func TestMetricsOfContainersThatAreGone(t *testing.T) {
	var now atomic.Pointer[Status]
	show := func(s Status) { now.Store(&s) }
	show(sample())
	addr := serve(t, Options{Status: func() Status { return *now.Load() }})
	has := func(part string) bool {
		t.Helper()
		code, body := get(t, addr, "/metrics")
		if code != http.StatusOK {
			t.Fatalf("%d: %s", code, body)
		}
		return strings.Contains(body, part)
	}
	if !has(`pod="job-1"`) || !has("gpu_agent_unclaimed_processes{") {
		t.Fatal("there is nothing to lose")
	}
	s := sample()
	s.Containers = s.Containers[5:]
	s.GPUs[0].Holders = nil
	s.Watchdog = Watchdog{State: WatchdogOff, Reason: "x"}
	show(s)
	if has(`pod="job-1"`) || has("gpu_agent_unclaimed_processes{") || !has(`pod="big"`) || !has("gpu_agent_watchdog_up 0") {
		t.Error("series of what is gone stay, or others went with them")
	}
}

func TestProbes(t *testing.T) {
	var sick, busy atomic.Bool
	check := func(b *atomic.Bool, reason string) func() error {
		return func() error {
			if b.Load() {
				return errors.New(reason)
			}
			return nil
		}
	}
	addr := serve(t, Options{Healthy: check(&sick, "loop stands still"), Ready: check(&busy, "no driver yet")})
	for _, test := range []struct {
		sick, busy bool
		page, body string
		code       int
	}{
		{false, false, "/healthz", "ok\n", 200},
		{false, false, "/readyz", "ok\n", 200},
		{true, false, "/healthz", "loop stands still\n", 503},
		{true, false, "/readyz", "ok\n", 200},
		{false, true, "/healthz", "ok\n", 200},
		{false, true, "/readyz", "no driver yet\n", 503},
	} {
		sick.Store(test.sick)
		busy.Store(test.busy)
		if code, body := get(t, addr, test.page); code != test.code || body != test.body {
			t.Errorf("%+v: %d %q", test, code, body)
		}
	}
	for _, page := range []string{"/debug/pprof/", "/nothing"} {
		if code, _ := get(t, addr, page); code != http.StatusNotFound {
			t.Errorf("%s: %d", page, code)
		}
	}
	response, err := http.Post("http://"+addr+"/healthz", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %s", response.Status)
	}
}

func TestFetch(t *testing.T) {
	addr := serve(t, Options{})
	got, err := Fetch(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, sample()) {
		t.Errorf("got %+v", got)
	}
	_, port, _ := net.SplitHostPort(addr)
	if _, err := Fetch(t.Context(), ":"+port); err != nil {
		t.Errorf("without a host: %v", err)
	}
}

func TestFetchFails(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello") }))
	defer other.Close()
	missing := httptest.NewServer(http.NotFoundHandler())
	defer missing.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, test := range []struct{ addr, want string }{
		{other.Listener.Addr().String(), "decode"},
		{missing.Listener.Addr().String(), "404"},
		{closed.Addr().String(), "--http"},
		{"bad host:x", "status"},
	} {
		if _, err := Fetch(t.Context(), test.addr); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want an error with %q", test.addr, err, test.want)
		}
	}
}

// The field names of /statusz are a contract.
func TestStatusJSON(t *testing.T) {
	body, err := json.MarshalIndent(sample(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "statusz.json", string(body)+"\n")
	addr := serve(t, Options{})
	if _, got := get(t, addr, "/statusz"); got != string(body)+"\n" {
		t.Errorf("/statusz gives\n%s", got)
	}
}

func TestRun(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	options := Options{Addr: taken.Addr().String(), Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Status: sample, Metrics: NewMetrics("v")}
	if err := New(options).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "--http") {
		t.Errorf("%v, want an error that names the flag", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	options.Addr = ""
	options.Metrics = NewMetrics("v")
	if err := New(options).Run(ctx); err != context.Canceled {
		t.Errorf("without an address: %v", err)
	}
}
