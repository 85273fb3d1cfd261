// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// able is a driver that can limit containers, but for those GPUs that have an error.
type able struct {
	mu    sync.Mutex
	err   map[gpu.UUID]error
	asked int
}

func (a *able) Able(_ context.Context, u gpu.UUID) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	return a.err[u]
}

// hooksOf are the hooks of an allocation's CDI file with this name.
func hooksOf(t *testing.T, b *bench, key, name string) (out []specs.Hook) {
	t.Helper()
	spec, err := b.Agent.loop.gates.files.Read(key)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range spec.Devices[0].ContainerEdits.Hooks {
		if h.HookName == name {
			out = append(out, *h)
		}
	}
	return out
}

// TestDriverLimitsBeforeTheFirstInstruction: the CDI file of a share has the hook that sets the driver's limit, with
// the cap and the policy, where the driver can; that of a whole GPU has none.
func TestDriverLimitsBeforeTheFirstInstruction(t *testing.T) {
	for _, open := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			o := newOutside(4)
			o.openCaps = open
			u := func(i int) gpu.UUID { return o.inv.GPUs[i].UUID }
			o.able = &able{err: map[gpu.UUID]error{u(3): fmt.Errorf("an older card: %w", gpu.ErrNotSupported)}}
			b := start(t, o, t.TempDir(), `
version: v1
partitions:
  default:
    - {devices: [0, 3], mode: shared}
    - {devices: [1], mode: shared, replicas: 4}
    - {devices: [2], mode: whole}
`)
			defer b.end()
			half := uint64(o.inv.GPUs[1].Usable()/4) << 20
			for i, c := range []struct {
				resource string
				ids      []string
				limits   map[gpu.UUID]uint64
			}{
				{"example.com/gpu-mem", []string{string(u(0)) + "::0", string(u(0)) + "::1"}, map[gpu.UUID]uint64{u(0): 2 * uint64(unit) << 20}},
				{"example.com/gpu.shared", []string{string(u(1)) + "::2"}, map[gpu.UUID]uint64{u(1): half}},
				{"example.com/gpu", []string{string(u(2))}, nil},
				{"example.com/gpu-mem", []string{string(u(3)) + "::0"}, nil},
			} {
				b.hold(fmt.Sprint("pod-", i), c.resource, c.ids...)
				key := cdi.Key(c.resource, c.ids)
				var want []specs.Hook
				if c.limits != nil {
					want = []specs.Hook{testKit.HoldHook(lib.Hold{Key: key, Limits: c.limits, Open: open})}
				}
				if got := hooksOf(t, b, key, "createRuntime"); !reflect.DeepEqual(got, want) {
					t.Errorf("open: %v, %s: hooks %+v, want %+v", open, c.resource, got, want)
				}
			}
			if n := strings.Count(b.log.String(), "an older card"); n != 1 {
				t.Errorf("it was said %d times that a card cannot, want once", n)
			}
		})
	}
}

// TestDriverThatCannotYet: an answer is believed for a minute, so a node whose cgroups are put right has the hook
// then; a node that cannot run the hook has none, and says so.
func TestDriverThatCannotYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		u := o.inv.GPUs[0].UUID
		o.able = &able{err: map[gpu.UUID]error{u: gpu.ErrNotSupported}}
		b := start(t, o, t.TempDir(), "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared}\n")
		defer b.end()
		has := func(n int) bool {
			ids := []string{fmt.Sprintf("%s::%d", u, n)}
			b.hold(fmt.Sprint("pod-", n), "example.com/gpu-mem", ids...)
			return slices.ContainsFunc(hooksOf(t, b, cdi.Key("example.com/gpu-mem", ids), "createRuntime"),
				func(h specs.Hook) bool { return h.Path == testKit.Hold })
		}
		if has(0) {
			t.Error("a driver that cannot has the hook")
		}
		o.able.mu.Lock()
		delete(o.able.err, u)
		asked := o.able.asked
		o.able.mu.Unlock()
		if has(1) || o.able.asked != asked {
			t.Errorf("it was asked %d times again within a minute", o.able.asked-asked)
		}
		time.Sleep(ableEvery)
		if !has(2) {
			t.Error("a driver that can by now has no hook")
		}
		none := testKit
		none.Hold, none.NoHold = "", "no loader on this host"
		o.caps.mu.Lock()
		o.caps.kit = &none
		o.caps.mu.Unlock()
		b.with(func() { b.outside.inv = &gpu.Inventory{Driver: "615.2", GPUs: b.outside.inv.GPUs} })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		synctest.Wait()
		if has(3) || !strings.Contains(b.log.String(), "no loader on this host") {
			t.Error("a host that cannot run the hook has it, or does not say so")
		}
	})
}
