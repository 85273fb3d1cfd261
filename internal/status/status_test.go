// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/pkg/compute"
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
		Node: "gpu-node-1", Version: "v0.1.0", Driver: "580.159.03", CUDA: "13.0", Allocations: 6,
		Partition: Partition{Name: "research", State: "blocked", Reason: HeldByPods, Source: "configmap gpu/gpu-partitions", Generation: 3,
			Message: "GPU 2: train/train-3 holds 40 units of gpu-mem; the GPU becomes whole when the pod has ended"},
		Conditions: []Condition{
			{Blocked, Cause{HeldByPods, "GPU 2: train/train-3 holds 40 units of gpu-mem"}, "GPU-5e0f8c1a-0000-1111-2222-333344440002", noon.Add(-time.Hour)},
			{Leaving, Cause{NotInPartition, "the node's partition does not keep it"}, "GPU-5e0f8c1a-0000-1111-2222-333344440002::1g.10gb@5", time.Time{}},
		},
		SaturationPercent: new(61),
		Resources: []Resource{
			{"example.com/gpu", 2, false, ago(5 * time.Minute), "register with the kubelet at /k/kubelet.sock: refused", 0, 0},
			{"example.com/gpu-mem", 237, true, nil, "", 110, 79},
			{"example.com/gpu.shared", 4, false, ago(time.Second), "", 3, 1},
		},
		GPUs: []GPU{
			{Index: 0, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440000", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu-mem", Compute: "mps", UnitMiB: 1024, Total: 79, Used: 48, Free: 31, Health: Healthy,
				Holders: []Holder{
					{"train", "job-1", "main", "example.com/gpu-mem", false, 24, ago(3 * time.Hour), "", nil, false, "", nil, nil, "", ""},
					{"train", "job-2-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "a-container", "example.com/gpu-mem", false, 8, ago(5 * time.Second), "", []string{"train/job-2-b", "train/job-2-c"}, false, "", nil, nil, "", ""},
					{"", "", "", "example.com/gpu-mem", false, 16, ago(time.Second), "train/job-0", nil, false, "", nil, nil, "", ""},
				}},
			{Index: 1, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440001", Model: h100, MemoryMiB: 81559, Mode: "whole",
				Resource: "example.com/gpu", Total: 1, Unhealthy: 1, Health: "unhealthy", Reason: "Xid 79: GPU has fallen off the bus",
				Class: "lost", Since: ago(2 * time.Hour), Needs: "reset"},
			{Index: 2, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440002", Model: h100, MemoryMiB: 81559, Mode: "whole",
				Resource: "example.com/gpu", Total: 1, Free: 0, Unhealthy: 1, Health: Healthy,
				Blocked: "train/train-3 holds 40 units of gpu-mem",
				Holders: []Holder{{"train", "train-3", "main", "example.com/gpu-mem", false, 40, ago(50 * time.Hour), "", nil, false, "", nil, nil, "", ""}}},
			{Index: 3, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440003", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu.shared", Total: 4, Used: 1, Free: 2, Unhealthy: 1, Health: Healthy, Intruders: 1, NoPod: 2, Unlisted: 3,
				Holders: []Holder{{"dev", "notebook", "jupyter", "example.com/gpu.shared", false, 1, nil, "", nil, true, "", nil, nil, "", ""}}},
			{Index: 4, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440004", Model: h100, MemoryMiB: 81559, Mode: "shared",
				Resource: "example.com/gpu-mem", UnitMiB: 512, Total: 158, Used: 158, Health: Healthy,
				Holders: []Holder{{"dev", "big", "main", "example.com/gpu-mem", false, 158, ago(7 * time.Minute), "", nil, false, "", nil, nil, "", ""}}},
			{Index: 15, UUID: "GPU-5e0f8c1a-0000-1111-2222-333344440015", MemoryMiB: 24576, Mode: "off", Health: Healthy},
		},
		Watchdog: Watchdog{State: WatchdogRunning, Kills: 2, Intruders: 1, Detached: 5, Undetached: 1},
		Policies: []Policy{{"gpu-agent", PolicyHeld, ""},
			{"gpu-agent-events", PolicyMissing, "the API server would take a write to events that the admission policy gpu-agent-events must refuse: apply it"},
			{"gpu-agent-evict", PolicyUnknown, "whether the admission policy gpu-agent-evict is in force is not known: no answer"}},
		Containers: []Container{
			{"", "", "", "5a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440000", 0, mib(16 * 1024), nil, 0, "api", 0, 0, 0, 0, nil, 0, nil},
			{"train", "job-1", "main", "2a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440000", 0,
				mib(24 * 1024), mib(3277), 20000, "api", 12, 2, 3, 32, nil, 31, &compute.Held{Guarantee: compute.Ceiling, Ceiling: 31}},
			{"train", "job-2-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "a-container", "3a1b2c3d4e5f6071",
				"GPU-5e0f8c1a-0000-1111-2222-333344440000", 0, mib(8 * 1024), mib(0), 1 << 43, "api", 1<<64 - 1, 1, 0, 0, nil, 11, new(compute.NoneFor("no process yet"))},
			{"train", "train-3", "main", "4a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440002", 2,
				nil, mib(70000), 71000, "hardware", 0, 1, 0, 0, nil, 0, nil},
			{"dev", "notebook", "jupyter", "1a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440003", 3,
				mib(20242), nil, 0, "api", 0, 0, 0, 0, nil, 0, nil},
			{"dev", "big", "main", "0a1b2c3d4e5f6071", "GPU-5e0f8c1a-0000-1111-2222-333344440004", 4,
				mib(79 * 1024), mib(80 * 1024), 78 * 1024, "watchdog", 3, 8, 0, 0, nil, 0, nil},
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
	s.Containers[3].Container = "first\n\x1b[31msecond\tword\u202e"
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
				if strings.ContainsAny(line, "\x1b\t\u202e") || strings.HasSuffix(line, " ") {
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

// No text of a Status reaches the terminal as a control sequence, and none makes a
// line of its own.
func TestTextControlsNoTerminal(t *testing.T) {
	s := wired()
	s.GPUs = append(s.GPUs, cards().GPUs...)
	say(&s, "one\x1b[2J\rtwo\u009b1A\nthree")
	got := text(t, s, TextOptions{Now: noon})
	for _, line := range strings.Split(got, "\n") {
		if strings.ContainsAny(line, "\x1b\r\u009b") || strings.HasPrefix(line, "three") {
			t.Errorf("a text controls the terminal: %q", line)
		}
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

// What /statusz says is a contract, and survives the way. The tests of internal/obs/agentobs
// read these files.
func TestJSON(t *testing.T) {
	for name, want := range map[string]Status{"statusz.json": wired(), "statusz-mig.json": cards()} {
		body, err := json.MarshalIndent(want, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, string(body)+"\n")
		var got Status
		if err := json.Unmarshal(body, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s came back as %+v, %v", name, got, err)
		}
	}
}

// A holder of the spot tier is shown with its tier, and to whom it gives its room, by when.
func TestTierOfAHolder(t *testing.T) {
	now := time.Unix(1e9, 0)
	spot := Holder{Namespace: "ns", Pod: "batch", Container: "c", Resource: "example.com/gpu-mem.spot", Units: 2, Tier: "spot"}
	for _, c := range []struct {
		name  string
		yield *Yield
		want  string
	}{
		{"kept", nil, "in the spot tier"},
		{"wanted", &Yield{To: "prod/api", By: now.Add(12 * time.Second)}, "gives its room to prod/api, within 12s"},
		{"overdue", &Yield{To: "prod/api", By: now.Add(-time.Minute)}, "gives its room to prod/api, within 0s"},
		{"a layout", &Yield{By: now.Add(time.Second)}, "gives its room back, since the GPU's layout changes, within 1s"},
		{"given", &Yield{To: "prod/api", Out: true}, "has given its room to prod/api; it starts again when its room is free"},
	} {
		spot.Yield = c.yield
		s := Status{GPUs: []GPU{{UUID: "GPU-1", Mode: Shared, Resource: "example.com/gpu-mem", UnitMiB: 1024, Total: 8, Holders: []Holder{spot}}}}
		var text strings.Builder
		if err := WriteText(&text, s, TextOptions{Width: 200, Now: now}); err != nil {
			t.Fatal(err)
		}
		if text := text.String(); !strings.Contains(text, "2 gpu-mem.spot") || !strings.Contains(text, "in the spot tier\n") || !strings.Contains(text, c.want+"\n") {
			t.Errorf("%s: want %q in\n%s", c.name, c.want, text)
		}
	}
}

// A holder that is or was parked is shown with how long, how much and how often.
func TestParkedHolder(t *testing.T) {
	now := time.Unix(1e9, 0)
	since := now.Add(-5 * time.Minute)
	given := &Yield{To: "prod/api", Out: true}
	for _, c := range []struct {
		name  string
		parks *Parks
		yield *Yield
		want  string
	}{
		{"never", nil, nil, "in the spot tier\n"},
		{"now", &Parks{Times: 1, Since: &since, MiB: 24 << 10, Seconds: 300}, given,
			"has given its room to prod/api; it goes on when its room is free\n         is parked for 5m, with 24.0 GiB on the host\n"},
		{"again", &Parks{Times: 3, Since: &since, MiB: 24 << 10, Seconds: 7260}, given,
			"is parked for 5m, with 24.0 GiB on the host; 3 times so far, for 2h in all\n"},
		{"before", &Parks{Times: 2, MiB: 1536, Seconds: 90}, nil, "was parked 2 times, for 1m in all, with 1.5 GiB the last time\n"},
		{"once before", &Parks{Times: 1, MiB: 1536, Seconds: 59}, nil, "was parked once, for 59s in all, with 1.5 GiB the last time\n"},
	} {
		h := Holder{Namespace: "ns", Pod: "batch", Container: "c", Resource: "example.com/gpu-mem.spot", Units: 2, Tier: "spot",
			Parks: c.parks, Yield: c.yield}
		s := Status{GPUs: []GPU{{UUID: "GPU-1", Mode: Shared, Resource: "example.com/gpu-mem", UnitMiB: 1024, Total: 8, Holders: []Holder{h}}}}
		var text strings.Builder
		if err := WriteText(&text, s, TextOptions{Width: 200, Now: now}); err != nil {
			t.Fatal(err)
		}
		if got := text.String(); !strings.Contains(got, c.want) || strings.Contains(got, "parked") != (c.parks != nil) {
			t.Errorf("%s: want %q in\n%s", c.name, c.want, got)
		}
		if page := htmlOf(t, s); strings.Contains(page, "parked") != (c.parks != nil) {
			t.Errorf("%s: the page has\n%s", c.name, page)
		}
	}
}

// A mode that this version does not know is named, and is no other one's.
func TestModeThatIsNotKnown(t *testing.T) {
	g := GPU{Mode: "paged", Total: 7, Used: 3}
	if got := modeName(&g); got != "mode paged, which is not known" {
		t.Errorf("it is called %q", got)
	}
	if got := measure(&g, g.Total) + unitName(&g, g.Total); got != "7 of mode paged" {
		t.Errorf("it has %q", got)
	}
}
