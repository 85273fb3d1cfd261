// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
)

// A GPU counts as long as anybody holds a piece of it, once, for the site of its node.
func TestUseOfSites(t *testing.T) {
	now := start
	f := New("example.com", func() time.Time { return now })
	sites := CountSites(f, "site")
	at := func(name, site string, used ...bool) {
		n := node(name, corev1.ConditionTrue)
		n.Labels = map[string]string{"site": site}
		s := says(first, second)
		for i, yes := range used {
			if yes {
				s.GPUs[i].Used = piece.SetOf([]int{3, 4})
			}
		}
		f.SetNode(n)
		f.SetGPUNode(name, s)
	}
	want := func(want map[string]Use) {
		t.Helper()
		if got := sites.Use(); !maps.Equal(got, want) {
			t.Fatalf("in use are %v, want %v", got, want)
		}
	}
	at("a", "on-prem", true, false)
	at("c", "cloud", false, false)
	want(map[string]Use{"on-prem": {1, 0}, "cloud": {}})
	now = now.Add(time.Minute)
	at("c", "cloud", true, true)
	now = now.Add(time.Minute)
	want(map[string]Use{"on-prem": {1, 2 * time.Minute}, "cloud": {2, 2 * time.Minute}})
	at("c", "cloud", false, true)
	now = now.Add(time.Minute)
	at("c", "elsewhere", false, true)
	want(map[string]Use{"on-prem": {1, 3 * time.Minute}, "cloud": {0, 3 * time.Minute}, "elsewhere": {1, 0}})
	s := says(first)
	s.GPUs[0].MIG = &gpunode.MIG{Used: []string{"1g.10gb@0"}}
	f.SetGPUNode("a", s)
	f.SetGPUNode("c", nil)
	now = now.Add(time.Minute)
	want(map[string]Use{"on-prem": {1, 4 * time.Minute}, "cloud": {0, 3 * time.Minute}, "elsewhere": {}})
}
