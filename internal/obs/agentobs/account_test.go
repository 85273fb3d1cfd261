// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

func sampleAccount() *Account {
	key := func(pod, n string) usage.Key {
		return usage.Key{Namespace: "work", Pod: pod, Container: "main", GPU: gpu.UUID("GPU-" + n)}
	}
	spot := key("unseen", "0")
	spot.Tier = ledger.Spot
	return &Account{Node: "node-1", Usage: func() usage.Shown {
		return usage.Shown{Written: true, Dropped: usage.DroppedRecords{Use: 7, Refused: 9},
			Series: []usage.Series{{Key: key("quarter", "0"), Amounts: usage.Amounts{GrantedGPU: 900, GrantedMiB: 7200, UsedGPU: 450, UsedMiB: 3600, SM: 10, Known: true, SMKnown: true}},
				{Key: key("unseen", "0"), Amounts: usage.Amounts{GrantedGPU: 1, LentGPU: .5, LentMiB: 1}},
				{Key: spot, Amounts: usage.Amounts{GrantedGPU: 30}}},
			Now:  []usage.Part{{Key: key("quarter", "0"), Share: .25}, {Key: key("two", "0"), Share: 1}, {Key: key("two", "1"), Index: 1, Share: 1}},
			Idle: []usage.Idle{{Key: key("quarter", "0"), For: time.Hour}}}
	}}
}

// The account in Prometheus' form. What is not known has no series, and a name that is not
// UTF-8 does not spoil the page.
func TestAccountMetrics(t *testing.T) {
	a := sampleAccount()
	a.Status = func() status.Status {
		return status.Status{GPUs: []status.GPU{{UUID: "GPU-0", Model: "NVIDIA A100"}}, Containers: []status.Container{
			{Namespace: "work", Pod: "quarter", Container: "main", GPU: "GPU-0", UsedMiB: mib(1000)},
			{Namespace: "work", Pod: "quarter", Container: "main", GPU: "GPU-0", UsedMiB: mib(24)},
			{Namespace: "work", Pod: "unseen", Container: "main", GPU: "GPU-0"},
			{Namespace: "work", Pod: "\xff", Container: "main", GPU: "GPU-0", UsedMiB: mib(1)},
		}}
	}
	_, page := get(t, serve(t, Options{Metrics: NewMetrics("v"), Account: a}), "/metrics")
	for _, want := range []string{
		`gpu_agent_container_granted_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="quarter",tier="guaranteed"} 900`,
		`gpu_agent_container_used_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="quarter",tier="guaranteed"} 450`,
		`gpu_agent_container_granted_memory_byte_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="quarter",tier="guaranteed"} 7.5497472e+09`,
		`gpu_agent_container_sm_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="quarter",tier="guaranteed"} 10`,
		`gpu_agent_container_idle_seconds{container="main",gpu="GPU-0",namespace="work",pod="quarter"} 3600`,
		`gpu_agent_container_granted_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="unseen",tier="guaranteed"} 1`,
		`gpu_agent_container_granted_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="unseen",tier="spot"} 30`,
		`gpu_agent_container_lent_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="unseen"} 0.5`,
		`gpu_agent_container_lent_memory_byte_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="unseen"} 1.048576e+06`,
		`container_gpu_allocation{container="main",namespace="work",node="node-1",pod="quarter"} 0.25`,
		`container_gpu_allocation{container="main",namespace="work",node="node-1",pod="two"} 2`,
		`DCGM_FI_DEV_FB_USED{Hostname="node-1",UUID="GPU-0",container="main",device="nvidia0",gpu="0",modelName="NVIDIA A100",namespace="work",pod="quarter"} 1024`,
		"gpu_agent_usage_journal_up 1",
		`gpu_agent_usage_records_dropped_total{of="use"} 7`,
		`gpu_agent_usage_records_dropped_total{of="refused"} 9`,
	} {
		if !strings.Contains(page, want+"\n") {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	for _, not := range []string{`lent_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="quarter"`, `used_gpu_seconds_total{container="main",gpu="GPU-0",namespace="work",pod="unseen"`, `FB_USED{Hostname="node-1",UUID="GPU-0",container="main",device="nvidia0",gpu="0",modelName="NVIDIA A100",namespace="work",pod="unseen"`} {
		if strings.Contains(page, not) {
			t.Errorf("what is not known is served: %s", not)
		}
	}
	if _, page := get(t, serve(t, Options{Metrics: NewMetrics("v"), Account: sampleAccount()}), "/metrics"); strings.Contains(page, "DCGM_") {
		t.Error("dcgm-exporter's names are served though nobody asked for them")
	}
}
