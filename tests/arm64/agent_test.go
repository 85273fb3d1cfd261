// SPDX-License-Identifier: Apache-2.0

package arm64

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/plane"
)

const model = "A100-SXM4-80GB"

// TestAgent runs the program that an arm64 node has, with its libraries of caps.
func TestAgent(t *testing.T) {
	k := tools(t)
	program := k.agent(t)
	sizes := []string{large}
	if *long {
		sizes = append(sizes, small)
	}
	for _, page := range sizes {
		t.Run("pages of "+page, func(t *testing.T) {
			k.use(t, page)
			t.Run("version", func(t *testing.T) {
				out, err := emulib.Run(t.Context(), "", k.qemu, program, "version")
				if err != nil || !strings.HasSuffix(out, "linux/arm64)\n") {
					t.Errorf("%q, %v", out, err)
				}
			})
			t.Run("inventory", func(t *testing.T) { k.reads(t, program) })
			t.Run("node", func(t *testing.T) { k.serves(t, program) })
		})
	}
}

// agent builds the program. The libraries of caps that it carries are arm64's, whatever the
// checkout has.
func (k kit) agent(t *testing.T) string {
	t.Helper()
	t.Setenv("CC", k.cc)
	caps, err := capsule.Library(t.Context(), lib.Root)
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Abs(checkout)
	if err != nil {
		t.Fatal(err)
	}
	replace := map[string]string{}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		replace[filepath.Join(top, "pkg/memcap/lib/built", name)] = filepath.Join(caps, name)
	}
	dir := t.TempDir()
	if err := lib.BuildHide(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	replace[filepath.Join(top, "pkg/memcap/lib/built/hide.gz")] = filepath.Join(dir, "hide.gz")
	text, err := json.Marshal(map[string]any{"Replace": replace})
	overlay, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "gpu-agent")
	if err == nil {
		err = os.WriteFile(overlay, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	k.build(t, program, "build", "-tags", "netgo,osusergo,grpcnotrace", "-overlay", overlay, "./cmd/gpu-agent")
	// It stands beside the program, and the agent looks for it.
	k.build(t, filepath.Join(dir, "nvidia-cdi-hook"), "build", "-tags", "netgo,osusergo", "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook")
	return program
}

// reads has the program read the emulated driver once.
func (k kit) reads(t *testing.T, program string) {
	m, err := capsule.Start(t.Context(), t.TempDir(), emulator.Spec{Model: model, Count: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	out, err := emulib.Run(t.Context(), "", k.qemu, program, "inventory", "--driver-root", m.Driver, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	inv, err := config.ReadInventory([]byte(out))
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i, g := range m.World.State().GPUs {
		if i >= len(inv.GPUs) || string(inv.GPUs[i].UUID) != g.UUID || uint64(inv.GPUs[i].Memory) != g.MemoryMiB || inv.GPUs[i].Model != g.Model || inv.GPUs[i].Fault != "" {
			t.Fatalf("GPU %d is %+v, and it reads\n%s", i, g, out)
		}
	}
}

// serves has the program offer two GPUs to a kubelet, which gives out memory of the one, and of
// the other an instance that the program makes.
func (k kit) serves(t *testing.T, program string) {
	if os.Geteuid() != 0 {
		t.Skip("a hollow node needs root, to make device nodes")
	}
	s := plane.Start(t)
	n := hollow.Start(t, s, hollow.Options{
		Name: "arm", Model: model, GPUs: 2, Kubelet: "v1.36.3", Under: []string{k.qemu}, Agent: program,
		Entries: []string{"{devices: [0], mode: shared}", "{devices: [1], mode: mig}"},
	})
	const memory, instance = "example.com/gpu-mem", "example.com/mig-3g.40gb"
	s.Await(t, "the agent offers its GPUs", func() error {
		if has := n.Offered(); has[memory] != 79 || has[instance] == 0 {
			return fmt.Errorf("it offers %v", has)
		}
		return nil
	})
	uuid, _, _ := strings.Cut(n.Available(instance)[0], "::")
	for resource, count := range map[string]int{memory: 24, instance: 1} {
		pod := fakes.Pod{UID: resource, Namespace: "default", Name: "train-" + filepath.Base(resource)}
		if err := n.Admit(t.Context(), pod, map[string]int{resource: count}); err != nil {
			t.Fatalf("%s: %v", resource, err)
		}
	}
	if left := len(n.Available(memory)); left != 79-24 {
		t.Errorf("%d of %s are left, want %d", left, memory, 79-24)
	}
	if g, ok := n.GPU(uuid); !ok || len(g.MIG.Instances) != 1 || g.MIG.Instances[0].Profile != "3g.40gb" || len(g.MIG.Instances[0].Compute) != 1 {
		t.Errorf("%s is %+v, want one instance of 3g.40gb", uuid, g.MIG)
	}
}
