// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// card is what CUDA says of a GPU without a cap: what the driver keeps for itself
// is no part of it.
func (r *rig) card(index int) uint64 {
	g := r.state.GPUs[index]
	return (g.MemoryMiB - g.ReservedMiB) * MiB
}

// What CUDA, NVML and nvidia-smi say in a container is its cap and what counts
// against it, while a neighbour on the same GPU has other figures.
func TestViews(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	const limit, held = 4 * GiB, 1 * GiB
	neighbour := r.allocate(t, "neighbour", []share{{gpu: 1, bytes: 20 * GiB}}, false, nil)
	other := neighbour.tool(t, "probe", nil)
	if f := other.ask("took", "take cuMemAlloc_v2 %d", 10*GiB); f["result"] != "0" {
		t.Fatalf("%q", other.said)
	}
	b := r.allocate(t, "views", []share{{gpu: 1, bytes: limit}}, false, nil)
	k := b.tool(t, "probe", nil)
	if f := k.ask("took", "take cuMemAlloc_v2 %d", held); f["result"] != "0" {
		t.Fatalf("%q", k.said)
	}
	used := uint64(held + context300)

	t.Run("cuMemGetInfo", func(t *testing.T) {
		f := k.ask("info", "info")
		if f["result"] != "0" || f.n("total") != limit || f.n("device-total") != limit || f.n("free") != limit-used {
			t.Errorf("%q; want total %d, free %d", k.said, uint64(limit), limit-used)
		}
	})
	t.Run("every device", func(t *testing.T) {
		// Another process, with a context of its own while it asks.
		list := b.tool(t, "probe", nil).list("cuda")
		if len(list) != 2 || list[1]["uuid"] != string(r.uuid(1)) || list[1].n("device-total") != limit ||
			list[1].n("total") != limit || list[1].n("free") != limit-used-context300 {
			t.Errorf("%v", list)
		}
	})
	t.Run("NVML", func(t *testing.T) {
		// While the process of before dies, it is not known for the moment of one
		// reading whether the driver has its memory back.
		f := eventually(t, func() (fields, bool) {
			list := b.tool(t, "probe", nil).list("nvml")
			if len(list) != 2 || list[1]["uuid"] != string(r.uuid(1)) {
				t.Fatalf("%v", list)
			}
			return list[1], list[1].n("used") == used
		})
		for v, want := range map[string]uint64{
			"total": limit, "used": used, "free": limit - used, "result": 0,
			"total2": limit, "free2": limit - used, "result2": 0,
		} {
			if f.n(v) != want {
				t.Errorf("%s: %s, want %d", v, f[v], want)
			}
		}
		if f.n("used2")+f.n("reserved2")+f.n("free2") != limit {
			t.Errorf("version 2 does not add up: %v", f)
		}
	})
	t.Run("nvidia-smi", func(t *testing.T) {
		out, status, err := b.Run(t.Context(), capsule.Program{Args: []string{"/usr/bin/nvidia-smi"}})
		if err != nil || status != 0 || !strings.Contains(out, "/ 4096MiB") {
			t.Errorf("%v, status %#x:\n%s", err, uint32(status), out)
		}
	})
	t.Run("the neighbour", func(t *testing.T) {
		if f := other.ask("info", "info"); f.n("total") != 20*GiB || f.n("free") != 10*GiB-context300 {
			t.Errorf("%q", other.said)
		}
	})
	t.Run("after all is freed", func(t *testing.T) {
		k.ask("gave", "give 0")
		eventually(t, func() (fields, bool) {
			f := k.ask("info", "info")
			return f, f.n("free") == limit-context300
		})
	})
	other.quit()
	k.quit()
}

// eventually waits for a view to be as it should, which takes a few readings at
// most, and returns the last one.
func eventually(t *testing.T, view func() (fields, bool)) fields {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		f, ok := view()
		if ok {
			return f
		}
		if time.Now().After(end) {
			t.Errorf("it stays at %v", f)
			return f
		}
	}
}

// The limit is the right one for each GPU, whatever CUDA calls it: a container
// has a whole GPU and a share, and CUDA_VISIBLE_DEVICES orders and hides them.
// Every start of 50 must be right.
func TestWholeBesideShare(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 3, Minors: "reversed"})
	const limit = 4 * GiB
	b := r.allocate(t, "both", []share{{gpu: 0, bytes: lib.None}, {gpu: 2, bytes: limit}}, false, nil)
	total := map[string]uint64{string(r.uuid(0)): r.card(0), string(r.uuid(2)): limit}
	whole, part := string(r.uuid(0)), string(r.uuid(2))
	orders := []struct {
		visible string
		want    []string
	}{
		{"", []string{whole, part}},
		{"CUDA_VISIBLE_DEVICES=0,1", []string{whole, part}},
		{"CUDA_VISIBLE_DEVICES=1,0", []string{part, whole}},
		{"CUDA_VISIBLE_DEVICES=1", []string{part}},
		{"CUDA_VISIBLE_DEVICES=0", []string{whole}},
		{"CUDA_VISIBLE_DEVICES=" + part, []string{part}},
		{"CUDA_VISIBLE_DEVICES=" + part + "," + whole, []string{part, whole}},
		{"CUDA_VISIBLE_DEVICES=" + whole, []string{whole}},
	}
	const starts, together = 50, 5
	var wg sync.WaitGroup
	for first := range together {
		wg.Go(func() {
			for i := first; i < starts; i += together {
				o := orders[i%len(orders)]
				var env []string
				if o.visible != "" {
					env = []string{o.visible}
				}
				k, err := startTool(t, b.Container, "probe", env)
				if err != nil {
					t.Error(err)
					return
				}
				var got []string
				if _, err := fmt.Fprintln(k.in, "cuda"); err != nil {
					t.Error(err)
				}
				for {
					f, err := k.line()
					if err != nil {
						t.Errorf("start %d, %q: %v", i, o.visible, err)
						return
					}
					if f[""] == "end" {
						break
					}
					if f[""] != "device" {
						continue
					}
					got = append(got, f["uuid"])
					if want := total[f["uuid"]]; f.n("total") != want || f.n("device-total") != want {
						t.Errorf("start %d, %q: %q; want a total of %d", i, o.visible, k.said, want)
					}
				}
				if !slices.Equal(got, o.want) {
					t.Errorf("start %d, %q: GPUs %q, want %q", i, o.visible, got, o.want)
				}
				k.quit()
			}
		})
	}
	wg.Wait()

	// And it is the cap, not only the view: the share ends, the whole one does not.
	for _, o := range []struct {
		env   string
		limit bool
	}{{"CUDA_VISIBLE_DEVICES=1,0", true}, {"CUDA_VISIBLE_DEVICES=" + whole, false}} {
		k := b.tool(t, "probe", []string{o.env})
		f := k.ask("took", "take cuMemAlloc_v2 %d 100", 256*MiB)
		if want := map[bool]string{true: "2", false: "0"}[o.limit]; f["result"] != want {
			t.Errorf("%s: %q, want result %s", o.env, k.said, want)
		}
		if got := f.n("count") * 256 * MiB; o.limit && got > limit {
			t.Errorf("%s: %d MiB granted of %d", o.env, got/MiB, limit/MiB)
		}
		k.quit()
	}
}

// A name that no header knows reaches the real library, which is a driver of
// the future here.
func TestUnknownName(t *testing.T) {
	r := newRig(t, emulator.Spec{Count: 1})
	future := filepath.Join(t.TempDir(), "libcuda.so.1")
	gcc := exec.CommandContext(t.Context(), "gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", future, "-xc", "-")
	gcc.Stdin = strings.NewReader("int cuUnheardOf(void) { return 4711; }\n")
	if out, err := gcc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b := r.allocate(t, "unknown", []share{{gpu: 0, bytes: GiB}}, false, func(edits *specs.ContainerEdits, _ *capsule.Image) {
		mountOf(edits, lib.RealCUDA).HostPath = future
	})
	k := b.tool(t, "probe", nil)
	if f := k.ask("lookup", "lookup cuUnheardOf"); f["found"] != "1" || f["result"] != "4711" {
		t.Errorf("%q", k.said)
	}
	if f := k.ask("lookup", "lookup cuNeitherHasThis"); f["found"] != "0" {
		t.Errorf("%q", k.said)
	}
	k.quit()
}
