// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// samples is where the tests of internal/status keep a Status or two.
const samples = "../../status/testdata/"

// sample has one GPU of each kind that a reader meets, and a topology.
func sample() status.Status { return read("statusz.json") }

// cards has one MIG GPU of each kind.
func cards() status.Status { return read("statusz-mig.json") }

func read(name string) (s status.Status) {
	data, err := os.ReadFile(samples + name)
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err != nil {
		panic(err)
	}
	return s
}

func mib(n uint64) *uint64 { return &n }

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

func used() *Metrics {
	m := NewMetrics("v0.1.0")
	m.Called("example.com/gpu-mem", "Allocate", 40*time.Microsecond, nil)
	m.Called("example.com/gpu-mem", "Allocate", 2*time.Second, nil)
	m.DriverCall("DeviceGetMemoryInfo", "ok", time.Millisecond)
	m.Round(nil, time.Millisecond)
	m.Round(errors.New("x"), time.Millisecond)
	m.APIError("watch", "configmaps")
	m.APIAnswered()
	m.Registered("example.com/gpu", errors.New("x"))
	m.Registered("example.com/gpu", nil)
	m.Lowered("list")
	m.Refused("example.com/gpu-mem", status.Why(status.NotOneGPU, "24 units asked for"))
	m.Event("sent")
	m.GPUEvent(gpu.Event{GPU: "GPU-5e0f8c1a-0000-1111-2222-333344440001", Kind: "xid", Xid: 79})
	m.GPUEvent(gpu.Event{GPU: "GPU-1", Kind: "xid", Xid: 79})
	m.Ended(memcap.Over, 700*time.Millisecond)
	m.Ended(memcap.Intruder, 9*time.Second)
	m.Evicted()
	m.MIGStep("create", "1g.10gb", time.Second, nil)
	m.Wish("1g.10gb", time.Second)
	m.Yielded("ended", 21*time.Second)
	return m
}

// leftBehind is what earlier owners have left on a GPU and on the node.
func leftBehind() []status.Condition {
	return []status.Condition{
		{Type: status.Failed, Cause: status.Cause{Reason: status.ComputeModeSet}, Subject: "GPU-1"},
		{Type: status.Noted, Cause: status.Cause{Reason: status.ModesetOn}},
	}
}

// What earlier owners have left is there as long as the status has it.
func TestMetricsOfWhatIsFound(t *testing.T) {
	var found []status.Condition
	addr := serve(t, Options{Status: func() status.Status { return status.Status{Found: found} }})
	if _, body := get(t, addr, "/metrics"); strings.Contains(body, "gpu_agent_left_behind{") {
		t.Errorf("a node with nothing has\n%s", body)
	}
	found = leftBehind()
	_, body := get(t, addr, "/metrics")
	for _, want := range []string{
		`gpu_agent_left_behind{code="ComputeModeSet",gpu="GPU-1",matters="true"} 1`,
		`gpu_agent_left_behind{code="ModesetOn",gpu="",matters="false"} 1`,
	} {
		if !strings.Contains(body, want+"\n") {
			t.Errorf("no line %s", want)
		}
	}
}

// Every metric has a help text, follows Prometheus' naming, and stands in the
// package comment's table, which has no other.
func TestMetricNames(t *testing.T) {
	families, err := used().registry(&Options{Account: sampleAccount(), Status: func() status.Status {
		s := sample()
		s.GPUs = append(s.GPUs, cards().GPUs...)
		s.Found = leftBehind()
		return s
	}}).Gather()
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
		documented[obs.Prefix+name] = labels
	}
	for _, f := range families {
		name := f.GetName()
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		if !strings.HasPrefix(name, obs.Prefix) {
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
		`gpu_agent_allocations 6`,
		`gpu_agent_resource_free{resource="example.com/gpu-mem"} 110`,
		`gpu_agent_resource_largest_request{resource="example.com/gpu-mem"} 79`,
		`gpu_agent_saturation_ratio 0.61`,
		`gpu_agent_plugin_registered{resource="example.com/gpu"} 0`,
		`gpu_agent_plugin_registered{resource="example.com/gpu-mem"} 1`,
		`gpu_agent_plugin_registration_errors_total{resource="example.com/gpu"} 1`,
		`gpu_agent_plugin_refusals_total{reason="NotOneGPU",resource="example.com/gpu-mem"} 1`,
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
		`gpu_agent_plugin_refusals_total{reason="NoRoom",resource="example.com/gpu"} 0`,
		`gpu_agent_events_total{outcome="sent"} 1`,
		`gpu_agent_gpu_events_total{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440001",kind="xid",xid="79"} 1`,
		`gpu_agent_container_memory_cap_bytes{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",guarantee="api",namespace="train",pod="job-1"} 2.5769803776e+10`,
		`gpu_agent_container_compute_percent{container="main",gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",guarantee="ceiling",namespace="train",pod="job-1"} 31`,
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
		`# TYPE gpu_agent_mps_detaches_total counter`,
		`gpu_agent_mps_detaches_total{outcome="detached"} 5`,
		`gpu_agent_mps_detaches_total{outcome="unanswered"} 1`,
		`gpu_agent_policy_in_force{policy="gpu-agent"} 1`,
		`gpu_agent_policy_in_force{policy="gpu-agent-events"} 0`,
		`gpu_agent_unallocated_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440003",kind="intruder"} 1`,
		`gpu_agent_unallocated_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440003",kind="no-pod"} 2`,
		`gpu_agent_unallocated_processes{gpu="GPU-5e0f8c1a-0000-1111-2222-333344440000",kind="intruder"} 0`,
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
	for _, s := range []status.Status{
		{},
		{Found: append(leftBehind(), leftBehind()...)},
		{Driver: "bad \xff", GPUs: []status.GPU{{UUID: "GPU-a", Model: "\xfe"}, {UUID: "GPU-a"}, {}, {}}},
		{Watchdog: status.Watchdog{State: status.WatchdogRunning}, GPUs: []status.GPU{{UUID: "GPU-a"}, {UUID: "GPU-a", NoPod: 1}}},
		// A container that started again, seen twice; and one of every word a
		// tenant might have a hand in.
		{Containers: []status.Container{
			{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-a", CapMiB: mib(1), UsedMiB: mib(1), PeakMiB: 1},
			{Namespace: "n", Pod: "p", Container: "c", GPU: "GPU-a", CapMiB: mib(2), UsedMiB: mib(2), PeakMiB: 2},
			{Namespace: "n", Pod: "\xff", GPU: "GPU-a", PeakMiB: 1<<64 - 1, Refusals: 1<<64 - 1},
			{Namespace: "n", Pod: "\xfe", GPU: "GPU-a", PeakMiB: 1},
			{}, {},
		}},
	} {
		// The page goes on without what cannot be gathered: here everything can.
		if _, err := NewMetrics("v").registry(&Options{Status: func() status.Status { return s }}).Gather(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
		addr := serve(t, Options{Status: func() status.Status { return s }})
		code, body := get(t, addr, "/metrics")
		if code != http.StatusOK || !strings.Contains(body, "gpu_agent_allocations 0") {
			t.Errorf("%+v: %d: %.300s", s, code, body)
		}
		// A rate needs a zero to start from.
		for _, reason := range KillReasons {
			if !strings.Contains(body, `gpu_agent_cap_kills_total{reason="`+string(reason)+`"} 0`) {
				t.Errorf("no line for kills for %s before the first", reason)
			}
		}
	}
}

// A container that is gone leaves no series behind, and neither does a watchdog
// that has stopped.
func TestMetricsOfContainersThatAreGone(t *testing.T) {
	var now atomic.Pointer[status.Status]
	show := func(s status.Status) { now.Store(&s) }
	show(sample())
	addr := serve(t, Options{Status: func() status.Status { return *now.Load() }})
	has := func(part string) bool {
		t.Helper()
		code, body := get(t, addr, "/metrics")
		if code != http.StatusOK {
			t.Fatalf("%d: %s", code, body)
		}
		return strings.Contains(body, part)
	}
	if !has(`pod="job-1"`) || !has("gpu_agent_unallocated_processes{") {
		t.Fatal("there is nothing to lose")
	}
	s := sample()
	s.Containers = s.Containers[5:]
	s.GPUs[0].Holders = nil
	s.Watchdog = status.Watchdog{State: status.WatchdogOff, Reason: "x"}
	show(s)
	if has(`pod="job-1"`) || has("gpu_agent_unallocated_processes{") || !has(`pod="big"`) || !has("gpu_agent_watchdog_up 0") {
		t.Error("series of what is gone stay, or others went with them")
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

// The JSON is a contract.
func TestStatusJSON(t *testing.T) {
	want, err := os.ReadFile(samples + "statusz.json")
	if err != nil {
		t.Fatal(err)
	}
	if _, got := get(t, serve(t, Options{}), "/statusz"); got != string(want) {
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

// A GPU without memory of its own has no size: 0 bytes would be one.
func TestNoMemoryIsNoSize(t *testing.T) {
	addr := serve(t, Options{Status: func() status.Status {
		return status.Status{GPUs: []status.GPU{{UUID: "GPU-a", MemoryMiB: 1024}, {UUID: "GPU-b"}}}
	}})
	_, body := get(t, addr, "/metrics")
	if !strings.Contains(body, `gpu_agent_gpu_memory_bytes{gpu="GPU-a"} 1.073741824e+09`) || strings.Contains(body, `gpu_agent_gpu_memory_bytes{gpu="GPU-b"}`) ||
		!strings.Contains(body, `gpu_agent_gpu_info{gpu="GPU-b"`) {
		t.Errorf("metrics:\n%s", body)
	}
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
