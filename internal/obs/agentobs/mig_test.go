// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

func TestMIGMetrics(t *testing.T) {
	m := NewMetrics("v")
	m.MIGStep("create", "3g.40gb", 300*time.Millisecond, nil)
	m.MIGStep("enable", "", time.Second, fmt.Errorf("enable MIG: %w", gpu.ErrInUse))
	m.Wish("3g.40gb", 400*time.Millisecond)
	addr := serve(t, Options{Status: cards, Metrics: m})
	code, body := get(t, addr, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("%d: %s", code, body)
	}
	lines := map[string]bool{}
	for _, line := range strings.Split(body, "\n") {
		lines[line] = true
	}
	const uuid = "GPU-7d1e2f3a-0000-1111-2222-33334444000"
	for _, want := range []string{
		`gpu_agent_mig_enabled{gpu="` + uuid + `0"} 1`,
		`gpu_agent_mig_enabled{gpu="` + uuid + `4"} 0`,
		`gpu_agent_mig_pending{gpu="` + uuid + `0"} 0`,
		`gpu_agent_mig_pending{gpu="` + uuid + `4"} 1`,
		`gpu_agent_mig_pending{gpu="` + uuid + `5"} 1`,
		`gpu_agent_mig_slots{gpu="` + uuid + `0",profile="1g.10gb",state="held"} 1`,
		`gpu_agent_mig_slots{gpu="` + uuid + `0",profile="1g.10gb",state="covered"} 2`,
		`gpu_agent_mig_slots{gpu="` + uuid + `0",profile="1g.10gb",state="failed"} 0`,
		`gpu_agent_mig_slots{gpu="` + uuid + `1",profile="1g.10gb",state="leaving"} 7`,
		`gpu_agent_devices{gpu="` + uuid + `0",resource="example.com/mig-1g.10gb",state="free"} 1`,
		`gpu_agent_devices{gpu="` + uuid + `0",resource="example.com/mig-1g.10gb",state="held"} 1`,
		`gpu_agent_devices{gpu="` + uuid + `0",resource="example.com/mig-1g.10gb",state="unhealthy"} 2`,
		// A device that leaves and is held is held.
		`gpu_agent_devices{gpu="` + uuid + `1",resource="example.com/mig-1g.10gb",state="held"} 1`,
		`gpu_agent_devices{gpu="` + uuid + `1",resource="example.com/mig-1g.10gb",state="unhealthy"} 6`,
		`gpu_agent_devices{gpu="` + uuid + `5",resource="example.com/gpu",state="unhealthy"} 1`,
		// What stands, held or not; the split by its GPU instance's profile, as
		// dcgm-exporter has it; what somebody has of a GPU that is not cut yet.
		`gpu_agent_device_info{GPU_I_ID="13",GPU_I_PROFILE="1g.10gb",UUID="` + uuid + `0",container="jupyter",device="` + uuid + `0::1g.10gb@0",mig_uuid="MIG-00000000-0000-0000-0000-000000000013",namespace="dev",pod="notebook-1",resource="example.com/mig-1g.10gb"} 1`,
		`gpu_agent_device_info{GPU_I_ID="9",GPU_I_PROFILE="1g.10gb",UUID="` + uuid + `0",container="",device="` + uuid + `0::1g.10gb@1",mig_uuid="MIG-00000000-0000-0000-0000-000000000009",namespace="",pod="",resource="example.com/mig-1g.10gb"} 1`,
		`gpu_agent_device_info{GPU_I_ID="1",GPU_I_PROFILE="3g.40gb",UUID="` + uuid + `2",container="app",device="` + uuid + `2::2c.3g.40gb@0.1",mig_uuid="MIG-two",namespace="web",pod="web-1",resource="example.com/mig-2c.3g.40gb"} 1`,
		`gpu_agent_device_info{GPU_I_ID="",GPU_I_PROFILE="",UUID="` + uuid + `0",container="main",device="` + uuid + `0",mig_uuid="",namespace="dev",pod="old",resource="example.com/gpu"} 1`,
		`gpu_agent_mig_step_duration_seconds_bucket{op="create",outcome="ok",profile="3g.40gb",le="0.5"} 1`,
		`gpu_agent_mig_step_duration_seconds_count{op="enable",outcome="in_use",profile=""} 1`,
		`gpu_agent_mig_wish_duration_seconds_count{profile="3g.40gb"} 1`,
	} {
		if !lines[want] {
			t.Errorf("no line %s", want)
		}
	}
	for _, line := range []struct{ part, why string }{
		{`device="` + uuid + `0::3g.40gb@4"`, "its instance does not stand yet: it would join the whole GPU's figures"},
		{`device="` + uuid + `2::1g.10gb@6"`, "it is free"},
		{`gpu_agent_devices{gpu="` + uuid + `2",resource=""`, "a foreign instance is not on offer"},
	} {
		if strings.Contains(body, line.part) {
			t.Errorf("there is a line with %s: %s", line.part, line.why)
		}
	}
	// The devices of GPUs that are not cut, by holder: units are not counted out.
	_, body = get(t, serve(t, Options{}), "/metrics")
	if n := strings.Count(body, "gpu_agent_device_info{"); n != 5 {
		t.Errorf("%d series of devices, want one for each GPU and container that has a name", n)
	}
}

// Whatever a driver, or an agent of another version, says of its placements, the scrape
// has no series twice.
func TestMetricsOfOddPlacements(t *testing.T) {
	draw := rand.New(rand.NewPCG(5, 5))
	pick := func(list ...string) string { return list[draw.IntN(len(list))] }
	rounds := 500
	if testing.Short() {
		rounds = 100 // make test-all has all
	}
	for range rounds {
		m := &status.MIG{Enabled: true}
		for range draw.IntN(12) {
			m.Placements = append(m.Placements, status.Placement{
				Device: pick("d", "e\xff", "e\xfe"), Resource: pick("", "example.com/mig-1g.10gb", "example.com/gpu"),
				Profile: pick("1g.10gb", "3g.40gb", "1c.3g.40gb", "2c.3g.40gb", "1c.99g.1gb", "", "\xff", "\xfe", "a\nb"),
				State:   pick(append(status.PlacementStates, "", "new\x1bword of later")...),
				UUID:    pick("", "MIG-1", "MIG-2"), GI: draw.IntN(9), Pod: pick("", "pod", strings.Repeat("long", 30)),
			})
		}
		s := status.Status{GPUs: []status.GPU{{UUID: "GPU-1", Health: status.Healthy, Resource: pick("", "example.com/gpu"), MIG: m,
			Holders: []status.Holder{{Pod: "pod", Resource: "example.com/gpu"}, {Pod: "pod", Resource: "example.com/gpu"}, {Resource: "example.com/mig-1g.10gb"}}}}}
		if _, err := NewMetrics("v").registry(&Options{Status: func() status.Status { return s }}).Gather(); err != nil {
			t.Fatalf("%+v: %v", m.Placements, err)
		}
	}
}
