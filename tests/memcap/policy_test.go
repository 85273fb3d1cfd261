// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// Where the cap cannot do its work, the policy decides: closed refuses every
// allocation as CUDA refuses it and lets all else work, open lets it pass.
func TestPolicies(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	page, usage := lib.LimitPath(r.uuid(0), "policy"), lib.UsagePath(r.uuid(0), "policy")
	without := func(edits *specs.ContainerEdits, at string) {
		edits.Mounts = slices.DeleteFunc(edits.Mounts, func(m *specs.Mount) bool { return m.ContainerPath == at })
	}
	// instead puts a file of some content in the limit page's place.
	instead := func(data []byte) func(*testing.T, *specs.ContainerEdits, *capsule.Image) {
		return func(t *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) {
			without(edits, page)
			file := filepath.Join(t.TempDir(), "page")
			if err := os.WriteFile(file, data, 0o644); err != nil {
				t.Fatal(err)
			}
			capsule.Bind(edits, file, page)
		}
	}
	for _, c := range []struct {
		name   string
		change func(*testing.T, *specs.ContainerEdits, *capsule.Image)
	}{
		{"no limit page", func(_ *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) { without(edits, page) }},
		{"an empty limit page", instead(nil)},
		{"a short limit page", instead(append([]byte("GPUCAP01"), make([]byte, 100)...))},
		{"a limit page of another version", instead(append([]byte("GPUCAP99"), make([]byte, 4088)...))},
		{"a limit page of noise", instead(slices.Repeat([]byte{0xa5, 0x17, 0xff, 0x00}, 1024))},
		{"a folder for a limit page", func(t *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) {
			without(edits, page)
			capsule.Bind(edits, t.TempDir(), page)
		}},
		{"a limit page that can be written", func(_ *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) {
			m := mountOf(edits, page)
			m.Options = slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o == "ro" })
		}},
		{"a usage page that is read-only", func(_ *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) {
			m := mountOf(edits, usage)
			m.Options = append(slices.Clone(m.Options), "ro")
		}},
		{"no usage page", func(_ *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) { without(edits, usage) }},
		{"another usage page", func(t *testing.T, edits *specs.ContainerEdits, _ *capsule.Image) {
			mountOf(edits, usage).HostPath = usagePage(t)
		}},
	} {
		for _, open := range []bool{false, true} {
			policy := map[bool]string{false: "closed", true: "open"}[open]
			t.Run(c.name+"/"+policy, func(t *testing.T) {
				b := r.allocate(t, "policy", []share{{gpu: 0, bytes: GiB}}, open,
					func(edits *specs.ContainerEdits, image *capsule.Image) { c.change(t, edits, image) })
				defer b.close(t)
				k := b.tool(t, "probe", nil)
				want := map[bool]string{false: "2", true: "0"}[open]
				for _, call := range []string{"cuMemAlloc_v2", "cuMemAllocManaged", "cuMemCreate", "cuMemAllocAsync", "cuArrayCreate_v2"} {
					f := k.ask("took", "take %s %d", call, 32*MiB)
					if f["result"] != want || want == "2" && f["failure"] != call {
						t.Errorf("%q, want result %s of the call itself", k.said, want)
					}
				}
				// More than the cap, where nothing can count.
				if f := k.ask("took", "take cuMemAlloc_v2 %d", 2*GiB); f["result"] != want {
					t.Errorf("%q, want result %s", k.said, want)
				}
				if f := k.ask("info", "info"); f["result"] != "0" {
					t.Errorf("views fail: %q", k.said)
				}
				if f := k.ask("took", "take cuMemHostAlloc %d", 1*MiB); f["result"] != "0" {
					t.Errorf("host memory is refused: %q", k.said)
				}
				k.quit()
			})
		}
	}
}

// A GPU without a limit needs nothing that could be missing: nobody counts there.
func TestWholeGPUNeedsNothing(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	b := r.allocate(t, "whole", []share{{gpu: 0, bytes: lib.None}}, false, func(edits *specs.ContainerEdits, _ *capsule.Image) {
		if slices.ContainsFunc(edits.Mounts, func(m *specs.Mount) bool { return m.ContainerPath == lib.UsagePath(r.uuid(0), "whole") }) {
			t.Error("counters are mounted where nobody counts")
		}
	})
	k := b.tool(t, "probe", nil)
	if f := k.ask("took", "take cuMemAlloc_v2 %d 2", 16*GiB); f["result"] != "0" {
		t.Errorf("%q", k.said)
	}
	if f := k.ask("info", "info"); f.n("total") != r.card(0) {
		t.Errorf("%q, want a total of %d", k.said, r.card(0))
	}
	k.quit()
}

// usagePage is a usage page that is nobody's.
func usagePage(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "usage")
	if err := os.WriteFile(file, []byte("GPUUSE02\x01"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 4096+16384*64); err != nil {
		t.Fatal(err)
	}
	return file
}

func mountOf(edits *specs.ContainerEdits, at string) *specs.Mount {
	i := slices.IndexFunc(edits.Mounts, func(m *specs.Mount) bool { return m.ContainerPath == at })
	return edits.Mounts[i]
}
