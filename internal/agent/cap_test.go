// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

var testKit = lib.Kit{CUDA: "/kit/libcuda.so.1", NVML: "/kit/libnvidia-ml.so.1", Empty: "/kit/empty", Mark: "/kit/open"}

// driverParts is what the emulated drivers of these tests say that containers
// need.
func driverParts(inv *gpu.Inventory) cdi.Parts {
	p := cdi.Parts{Devices: map[gpu.UUID]specs.ContainerEdits{}}
	for _, lib := range []string{"libcuda.so.580.1", "libnvidia-ml.so.580.1"} {
		p.Common.Mounts = append(p.Common.Mounts, &specs.Mount{HostPath: "/lib/" + lib, ContainerPath: "/lib/" + lib})
	}
	for _, d := range inv.GPUs {
		p.Devices[d.UUID] = specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", d.Minor)}}}
	}
	return p
}

// pages is limit pages in memory. It outlives agents.
type pages struct {
	mu sync.Mutex
	// Guarded by mu:
	limits map[string]map[gpu.UUID]uint64
}

func (p *pages) Write(key string, limits []lib.Limit) (map[gpu.UUID]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limits == nil {
		p.limits = map[string]map[gpu.UUID]uint64{}
	}
	paths := map[gpu.UUID]string{}
	if p.limits[key] == nil {
		p.limits[key] = map[gpu.UUID]uint64{}
	}
	for _, l := range limits {
		p.limits[key][l.GPU], paths[l.GPU] = l.Bytes, "/limits/"+key+"/"+string(l.GPU)
	}
	return paths, nil
}

func (p *pages) Limit(key string, u gpu.UUID) (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes, ok := p.limits[key][u]; ok {
		return bytes, nil
	}
	return 0, gpu.ErrNotFound
}

func (p *pages) Remove(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.limits, key)
	return nil
}

func (p *pages) List() ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.limits)), nil
}

func (p *pages) Prune() error { return nil }

// mountAt is the host path that a claim's container has at a path.
func mountAt(t *testing.T, b *bench, key, path string) string {
	t.Helper()
	spec, err := b.Agent.files.Read(key)
	if err != nil {
		t.Fatal(err)
	}
	at := ""
	for _, m := range spec.Devices[0].ContainerEdits.Mounts {
		if m.ContainerPath == path {
			at = m.HostPath
		}
	}
	return at
}

// TestCapsOfClaims: what containers may have, and what they get for it.
func TestCapsOfClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(3)
		b := start(t, o, t.TempDir(), `
version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1], mode: shared, replicas: 4}
    - {devices: [2], mode: whole}
`)
		u := func(i int) gpu.UUID { return o.inv.GPUs[i].UUID }
		units := []string{string(u(0)) + "::0", string(u(0)) + "::1", string(u(0)) + "::2"}
		cases := []struct {
			resource string
			ids      []string
			gpu      gpu.UUID
			want     uint64
		}{
			{"example.com/gpu-mem", units, u(0), 3 * uint64(unit) << 20},
			{"example.com/gpu.shared", []string{string(u(1)) + "::2"}, u(1), uint64(o.inv.GPUs[1].Usable()/4) << 20},
			{"example.com/gpu", []string{string(u(2))}, u(2), lib.None},
		}
		for i, c := range cases {
			b.hold(fmt.Sprint("pod-", i), c.resource, c.ids...)
			key := cdi.Key(c.resource, c.ids)
			if got, err := o.caps.Limit(key, c.gpu); err != nil || got != c.want {
				t.Errorf("%s: a page with %d, %v, want %d", c.resource, got, err, c.want)
			}
			for path, want := range map[string]string{
				"/lib/libcuda.so.580.1":             testKit.CUDA,
				"/lib/libnvidia-ml.so.580.1":        testKit.NVML,
				lib.RealCUDA:                        "/lib/libcuda.so.580.1",
				lib.RealNVML:                        "/lib/libnvidia-ml.so.580.1",
				lib.UsageDir:                        "tmpfs",
				lib.LimitsDir + "/" + string(c.gpu): "/limits/" + key + "/" + string(c.gpu),
				lib.OpenMark:                        "",
			} {
				if got := mountAt(t, b, key, path); got != want {
					t.Errorf("%s: %q stands at %s, want %q", c.resource, got, path, want)
				}
			}
			compat := testKit.Empty
			if c.want == lib.None {
				compat = "" // who has all of a GPU may bring what libraries he likes
			}
			if got := mountAt(t, b, key, lib.CompatDir); got != compat {
				t.Errorf("%s: %q stands at %s, want %q", c.resource, got, lib.CompatDir, compat)
			}
		}
		if got := b.Offered(); len(got) != 3 {
			t.Errorf("%d GPUs are offered, want 3", len(got))
		}
		var caps []string
		for _, c := range b.Claims() {
			for _, l := range b.Caps(&c) {
				caps = append(caps, fmt.Sprint(c.Resource, " ", l.Bytes))
			}
		}
		slices.Sort(caps)
		var want []string
		for _, c := range cases {
			want = append(want, fmt.Sprint(c.resource, " ", c.want))
		}
		slices.Sort(want)
		if !slices.Equal(caps, want) {
			t.Errorf("caps\n%s, want\n%s", strings.Join(caps, "\n"), strings.Join(want, "\n"))
		}
		b.end()
	})
}
