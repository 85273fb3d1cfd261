// SPDX-License-Identifier: Apache-2.0

package arm64

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/memcap/probe"
)

const (
	mib = 1 << 20
	// promised is how often programs are told that somebody reads: one that is out of room waits for a
	// reading twice as long before it is refused. These tests run beside others, with the lowest
	// priority and on an emulated processor, and so does their reader.
	promised = 5 * time.Second
)

// TestCap has programs for arm64 take GPU memory in a container that holds an allocation.
func TestCap(t *testing.T) {
	k := tools(t)
	if lack := capsule.Missing(); lack != "" {
		t.Skip(lack)
	}
	for _, page := range []string{small, large} {
		t.Run("pages of "+page, func(t *testing.T) {
			k.use(t, page)
			h := k.hold(t, 4096*mib)
			alone := h.run(t, nil, "info", "take cuMemAlloc_v2 1073741824", "take cuMemAllocAsync 1073741824", "take cuMemAlloc_v2 2147483648",
				"give 0", "take cuMemAlloc_v2 1073741824", "nvml")
			// 2 is CUDA_ERROR_OUT_OF_MEMORY.
			if want := `^info result=0 free=\d+ total=4294967296 device-total=4294967296 failure=
took id=0 count=1 result=0 failure=
took id=1 count=1 result=0 failure=
took id=2 count=0 result=2 failure=cuMemAlloc_v2
gave id=0 result=0
took id=2 count=1 result=0 failure=
nvml result=0 count=1
nvml-device .* total=4294967296 used=\d+ free=\d+ result=0 .*
end
$`; !regexp.MustCompile(want).MatchString(alone) {
				t.Errorf("got\n%s\nwant\n%s", alone, want)
			}
			// Beside a context each, there is room for 109 requests.
			together := h.run(t, []string{"-processes", "2", "-threads", "2"}, "fill cuMemAlloc_v2 33554432 3665821696 0")
			if want := `^ready workers=4
row call=cuMemAlloc_v2 unit=33554432 first=3657433088 .* highest=3657433088 .* early=0 .* failure=
$`; !regexp.MustCompile(want).MatchString(together) {
				t.Errorf("got\n%s\nwant\n%s", together, want)
			}
			if peak, err := h.m.World.PeakUsed(0); err != nil || peak > 4096*mib {
				t.Errorf("a peak of %d MiB beside a cap of 4096, %v", peak/mib, err)
			}
			k.walks(t)
		})
	}
}

// walks has two processes make every call at random. For the moment of an undo they may have a
// request more than the cap, of 128 MiB at most, and a piece by which a pool grows.
func (k kit) walks(t *testing.T) {
	t.Helper()
	const room, seed = 1624 * mib, 1
	steps := 1000
	if *long {
		steps = 20000
	}
	h := k.hold(t, room)
	out := h.run(t, nil, fmt.Sprintf("walk %d %d %d %s", seed, steps, room, lib.RealCUDA))
	if !regexp.MustCompile(`(?m)^walked steps=\d{4,} granted=\d{3,} refused=\d{2,} .* failure=$`).MatchString(out) {
		t.Errorf("a walk ends with\n%s", out)
	}
	if peak, err := h.m.World.PeakUsed(0); err != nil || peak > room+(128+32)*mib {
		t.Errorf("a peak of %d MiB in a walk beside a cap of %d, %v", peak/mib, room/mib, err)
	}
}

// held is a container with an allocation of memory.
type held struct {
	*capsule.Container
	m *capsule.Machine
}

// hold makes a container for arm64 programs, and a reader in the agent's place.
func (k kit) hold(t *testing.T, bytes uint64) held {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := capsule.Start(t.Context(), t.TempDir(), emulator.Spec{Model: model, Count: 1, ContextMiB: 300})
	must(err)
	t.Cleanup(func() { must(m.Close()) })
	built, err := capsule.Library(t.Context(), lib.Root)
	must(err)
	programs, err := probe.Cached(t.Context())
	must(err)
	dir := t.TempDir()
	pages, err := lib.OpenPages(dir)
	must(err)
	t.Cleanup(func() { must(lib.Unmount(dir)) })
	const key = "0123456789abcdef"
	uuid := gpu.UUID(m.World.State().GPUs[0].UUID)
	files, err := pages.Write(key, promised, []lib.Limit{{GPU: uuid, Bytes: bytes, Context: 300 * mib}})
	must(err)
	caps := filepath.Join(dir, "caps")
	must(os.CopyFS(caps, os.DirFS(built)))
	kit := lib.Kit{CUDA: filepath.Join(caps, "libcuda.so.1"), NVML: filepath.Join(caps, "libnvidia-ml.so.1")}
	must(errors.Join(emulib.Pad(kit.CUDA), emulib.Pad(kit.NVML)))

	edits, image := m.Plain(0)
	edits = capsule.Allocation{Key: key, Pages: files, Kit: kit}.Apply(edits)
	for from, to := range map[string]string{programs: "/probe", k.qemu: "/qemu", k.libs: "/arm64"} {
		capsule.Bind(&edits, from, to)
	}
	c, err := m.Open(t.Context(), edits, image)
	must(err)
	t.Cleanup(func() { must(c.Close()) })
	reader := &capsule.Reader{Driver: m, Container: c, Pages: pages, Key: key, GPU: uuid, Every: 10 * time.Millisecond}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- reader.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		must(<-ended)
	})
	return held{c, m}
}

// run gives commands to a probe, and returns what it says.
func (h held) run(t *testing.T, args []string, commands ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "commands")
	if err := os.WriteFile(file, []byte(strings.Join(commands, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, status, err := h.Run(t.Context(), capsule.Program{
		Args: append([]string{"/qemu", "/probe/probe"}, args...), Stdin: in,
		Env: []string{"QEMU_LD_PREFIX=/arm64", "QEMU_PAGESIZE=" + os.Getenv("QEMU_PAGESIZE")},
	})
	if err != nil || status != 0 {
		t.Fatalf("the probe ends with %#x, %v\n%s", uint32(status), err, out)
	}
	return out
}
