// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// A program that mounts counters of its own over those of its container, or lays a
// second allocation beside its own, as it may in a user namespace, has no second cap.
func TestOwnMountOverUsage(t *testing.T) {
	const limit, key = 2 * GiB, "mount"
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	u := r.uuid(0)
	dir, usage := filepath.Dir(lib.PagesDir(u, key)), lib.UsagePath(u, key)
	for _, c := range []struct{ name, script string }{
		{"nothing over all of it", "mount -t tmpfs none " + lib.AllocationsDir},
		{"nothing over the allocation", "mount -t tmpfs none " + lib.PagesDir(u, key)},
		{"a fresh page over the page", "mount --bind /own " + usage},
		{"an allocation without a limit beside the allocation", "mkdir " + dir + "/x && cp " + lib.LimitPath(u, key) + " /own " + dir + "/x && mv " + dir + "/x/own " + dir + "/x/usage && " +
			"printf '\\377\\377\\377\\377\\377\\377\\377\\377' | dd of=" + dir + "/x/limit bs=1 seek=8 conv=notrunc 2>/dev/null"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := r.allocate(t, key, []share{{gpu: 0, bytes: limit}}, false, func(_ *specs.ContainerEdits, image *capsule.Image) {
				page, err := os.ReadFile(usagePage(t))
				if err != nil {
					t.Fatal(err)
				}
				image.Files = map[string][]byte{"/own": page}
			})
			defer b.close(t)
			if err := r.m.World.ResetPeak(0); err != nil {
				t.Fatal(err)
			}
			first := b.tool(t, "probe", nil)
			if f := first.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "0" {
				t.Fatalf("%q", first.said)
			}
			second := b.tool(t, "../usr/bin/unshare", []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin"}, "-Um", "-r", "/bin/sh", "-c", c.script+" && exec /probe/probe")
			if f := second.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "2" {
				t.Errorf("%q: it has a second cap", second.said)
			}
			if peak := r.peak(0); peak > limit {
				t.Errorf("%d MiB over the cap", (peak-limit)/MiB)
			}
			first.quit()
			second.quit()
		})
	}
}

// Two containers of one allocation, and two starts of one container, count on one page:
// together they have the cap, and what a container's last start had is the next
// one's at once.
func TestOneAllocationSeveralContainers(t *testing.T) {
	const limit, key = 2 * GiB, "several"
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	a := r.allocate(t, key, []share{{gpu: 0, bytes: limit}}, false, nil)
	pages, err := r.pages.Write(key, promised, []lib.Limit{{GPU: r.uuid(0), Bytes: limit, Context: context300}})
	if err != nil {
		t.Fatal(err)
	}
	another := func() *box {
		t.Helper()
		edits, image := r.m.Plain(0)
		edits = capsule.Allocation{Kit: r.kit, Key: key, Pages: pages}.Apply(edits)
		capsule.Bind(&edits, r.probe, "/probe")
		c, err := r.m.Open(t.Context(), edits, image)
		if err != nil {
			t.Fatal(err)
		}
		return &box{Container: c, r: r}
	}
	end := func(b *box) {
		t.Helper()
		if err := b.Container.Close(); err != nil {
			t.Error(err)
		}
	}
	// The reader of the first container sees that one alone.
	a.readers[0].Blind(true)
	k := a.tool(t, "probe", nil)
	if f := k.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "0" {
		t.Fatalf("%q", k.said)
	}
	const rest = (limit - 1*GiB - 2*context300) / (16 * MiB)
	for start := range 3 {
		b := another()
		second := b.tool(t, "probe", nil)
		if f := second.ask("took", "take cuMemAlloc_v2 %d 1000", 16*MiB); f["result"] != "2" || f.n("count") != rest {
			t.Errorf("start %d: %q, want %d of 16 MiB", start, second.said, rest)
		}
		if f := second.ask("info", "info"); f.n("free") >= 16*MiB {
			t.Errorf("start %d: %q: the other container's memory is shown as free", start, second.said)
		}
		end(b) // with all of it: the kernel ends the process
		if start < 2 {
			await(t, "the driver to have it back", func() bool { return r.used(0) <= 1*GiB+context300 }, func() any { return r.used(0) })
		}
	}
	if peak := r.peak(0); peak > limit {
		t.Errorf("%d MiB over the cap", (peak-limit)/MiB)
	}
	k.quit()
	a.close(t)
}

// A container that holds a share of one GPU and the whole of another has the edits of two CDI devices,
// in whatever order the runtime takes them: each mounts the proxy at the same path. The share is a cap
// in both orders, also for what is linked with -lcuda or opens libcuda.so, and the whole GPU has none.
func TestAShareBesideAWholeGPU(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	r.fit(t)
	dir, libs, err := compiler{tool: "gcc"}.find(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		t.Run(fmt.Sprint("GPUs ", order), func(t *testing.T) {
			var edits specs.ContainerEdits
			var image capsule.Image
			for _, i := range order {
				key, bytes := fmt.Sprint("beside-", i, "-", order[0]), []uint64{1 * GiB, lib.None}[i]
				pages, err := r.pages.Write(key, promised, []lib.Limit{{GPU: r.uuid(i), Bytes: bytes, Context: context300}})
				if err != nil {
					t.Fatal(err)
				}
				var plain specs.ContainerEdits
				plain, image = r.m.Plain(i)
				plain = capsule.Allocation{Kit: r.kit, Key: key, Pages: pages}.Apply(plain)
				edits.DeviceNodes = append(edits.DeviceNodes, plain.DeviceNodes...)
				edits.Mounts = append(edits.Mounts, plain.Mounts...)
				edits.Hooks = append(edits.Hooks, plain.Hooks...)
				edits.Env = append(edits.Env, plain.Env...)
			}
			capsule.Bind(&edits, r.probe, "/probe")
			image.Files = sources
			c, err := r.m.Open(t.Context(), edits, image)
			if err != nil {
				t.Fatal(err)
			}
			b := &box{Container: c, r: r}
			defer func() {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}()
			for device, want := range []string{"2", "0"} {
				k := b.tool(t, "probe", []string{fmt.Sprint("CUDA_VISIBLE_DEVICES=", device)})
				if f := k.ask("took", "take cuMemAlloc_v2 %d", 2*GiB); f["result"] != want {
					t.Errorf("2 GiB of GPU %d: %q, want result %s", device, k.said, want)
				}
				k.quit()
				for _, script := range []string{"gcc -o /tmp/c /src/main.c -lcuda && /tmp/c", "gcc -o /tmp/open /src/open.c -ldl && /tmp/open"} {
					said, status, err := b.Run(t.Context(), capsule.Program{Args: []string{"/bin/sh", "-c", script}, Env: []string{
						"PATH=" + dir + ":/usr/bin:/bin", "LD_LIBRARY_PATH=" + libs, "HOME=/tmp", fmt.Sprint("CUDA_VISIBLE_DEVICES=", device)}})
					if err != nil || status != 0 || said != want+"\n" {
						t.Errorf("%s on GPU %d: %v, status %#x, %q, want %s", script, device, err, uint32(status), said, want)
					}
				}
			}
		})
	}
}
