// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
	"example.com/gpu-agent/tests/recorded"
)

// agentRole is set where this program was started to read an inventory as the
// agent does: a process can open one driver library only.
const agentRole = "GPU_TESTS_READ_INVENTORY"

func becomeAgent() {
	root := os.Getenv(agentRole)
	if root == "" {
		return
	}
	err := func() error {
		d, err := nvml.Open(context.Background(), nvml.Options{DriverRoot: root})
		if err != nil {
			return err
		}
		defer d.Close()
		inv, err := d.Inventory(context.Background())
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(&inv)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// inventory is what the agent reads of the machine that mig-parted and GPU Feature
// Discovery see.
func (n *node) inventory() *gpu.Inventory {
	n.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(n.t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), agentRole+"="+n.root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		n.t.Fatalf("read the inventory: %v\n%s", err, said.String())
	}
	inv, err := config.ReadInventory(out)
	if err != nil {
		n.t.Fatal(err)
	}
	return inv
}

var gfdProgram = sync.OnceValues(func() (string, error) {
	kit, err := lab.NewKit(nil)
	if err != nil {
		return "", err
	}
	return kit.Bin(peers.GPUFeatureDiscovery.Name), peers.GPUFeatureDiscovery.Build(context.Background(), kit)
})

// gfd is what GPU Feature Discovery writes for the machine.
func (n *node) gfd(config string, args ...string) map[string]string {
	n.t.Helper()
	program, err := gfdProgram()
	if err != nil {
		n.t.Fatal(err)
	}
	if config != "" {
		args = append(args, "--config-file", n.write(config))
	}
	labels, err := peers.GFD{Program: program, Root: n.root}.Labels(n.t.Context(), n.t.TempDir(), args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return labels
}

// ours is what the agent makes of the same machine when it follows a partition.
func (n *node) ours(inv *gpu.Inventory, partition string) map[string]string {
	n.t.Helper()
	file, err := config.Parse("partitions", []byte("version: v1\npartitions:\n  p:\n"+partition))
	if err != nil {
		n.t.Fatal(err)
	}
	desired, err := file.Desire("p", inv, config.Node{Unit: 1024})
	if err != nil {
		n.t.Fatal(err)
	}
	return label.NVIDIA(label.Node{Inventory: inv, Graph: topology.New(inv), Partition: "p", Wanted: desired.GPUs})
}

// compare names every entry in which two sets differ.
func compare(ours, theirs map[string]string) []string {
	var out []string
	keys := maps.Clone(theirs)
	maps.Copy(keys, ours)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, we := ours[key]
		b, they := theirs[key]
		switch {
		case we && !they:
			out = append(out, fmt.Sprintf("%s: ours %q, theirs absent", key, a))
		case they && !we:
			out = append(out, fmt.Sprintf("%s: ours absent, theirs %q", key, b))
		case a != b:
			out = append(out, fmt.Sprintf("%s: ours %q, theirs %q", key, a, b))
		}
	}
	return out
}

// mixed is a GPU Feature Discovery that looks at MIG instances, replicas one that
// was told of four time slices a GPU.
const (
	mixed    = "--mig-strategy=mixed"
	replicas = `
version: v1
sharing:
  timeSlicing:
    resources: [{name: nvidia.com/gpu, replicas: 4}]
`
)

// TestLabelsOfGPUFeatureDiscovery holds the agent's labels against those of GPU
// Feature Discovery, unmodified, on the same machine, entry by entry. What differs
// on purpose is named here; internal/label says why.
func TestLabelsOfGPUFeatureDiscovery(t *testing.T) {
	inMIG := func(indices ...int) (gpus []emulator.GPUSpec) {
		for _, i := range indices {
			gpus = append(gpus, emulator.GPUSpec{Index: i, MIG: true})
		}
		return gpus
	}
	whole := "    - {devices: all, mode: whole}\n"
	for _, test := range []struct {
		name      string
		spec      emulator.Spec
		instances map[int]string // "1g.10gb@0 …" by index
		partition string
		config    string
		args      []string
		// meant are the prefixes of what may differ, besides the timestamp.
		meant []string
		// has are entries that both must have: that the comparison is of something.
		has map[string]string
	}{
		{name: "A100, whole", spec: emulator.Spec{Topology: "dgx-a100"}, partition: whole,
			has: map[string]string{"gpu.product": "NVIDIA-A100-SXM4-80GB", "gpu.count": "8", "gpu.mode": "compute", "gpu.family": "ampere", "gpu.machine": "DGXA100-920-23687-2530-000"}},
		{name: "H100, whole", spec: emulator.Spec{Topology: "dgx-h100"}, partition: whole,
			has: map[string]string{"gpu.family": "hopper", "gpu.memory": "81559"}},
		{name: "V100, whole", spec: emulator.Spec{Topology: "dgx-1"}, partition: whole,
			has: map[string]string{"gpu.family": "volta", "mig.capable": "false"}},
		{name: "A30, whole", spec: emulator.Spec{Model: "A30", Count: 2}, partition: whole},
		{name: "B200, whole", spec: emulator.Spec{Model: "B200", Count: 2}, partition: whole,
			has: map[string]string{"gpu.family": "blackwell"}},
		{name: "RTX PRO 6000, whole", spec: emulator.Spec{Model: "RTX-PRO-6000", Count: 2}, partition: whole},
		{name: "16 GPUs", spec: emulator.Spec{Topology: "dgx-2"}, partition: whole, has: map[string]string{"gpu.count": "16"}},
		{name: "a fabric beyond the node", spec: emulator.Spec{Topology: "nvl72"}, partition: whole,
			has: map[string]string{"gpu.clique": "6ba61ed5-2c6b-4b6f-9f0b-5f6d6a9b1c72.32766"}},
		{name: "a cloud's machine", spec: emulator.Spec{Topology: "p5"}, partition: whole},
		{name: "off", spec: emulator.Spec{Model: "A30", Count: 2}, partition: "    - {devices: all, mode: off}\n"},
		{name: "memory units", spec: emulator.Spec{Model: "A100-SXM4-40GB", Count: 2}, partition: "    - {devices: all, mode: shared}\n"},
		{name: "replicas", spec: emulator.Spec{Model: "H100-80GB", Count: 2}, config: replicas,
			partition: "    - {devices: all, mode: shared, replicas: 4}\n",
			has:       map[string]string{"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", "gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}},
		{name: "replicas on V100", spec: emulator.Spec{Topology: "dgx-1"}, config: replicas,
			partition: "    - {devices: all, mode: shared, replicas: 4}\n"},
		{name: "fixed MIG beside whole", spec: emulator.Spec{Model: "A100-SXM4-80GB", Count: 4, GPUs: inMIG(0, 1)}, args: []string{mixed},
			instances: map[int]string{0: "3g.40gb@4 1g.10gb@0 1g.10gb@1 1g.10gb+me@2", 1: "7g.80gb@0"},
			partition: "    - {devices: [0], mode: mig, geometry: {3g.40gb: 1, 1g.10gb: 2, 1g.10gb+me: 1}}\n    - {devices: [1], mode: mig, geometry: {7g.80gb: 1}}\n    - {devices: [2, 3], mode: whole}\n",
			has:       map[string]string{"mig.strategy": "mixed", "mig-1g.10gb.count": "2", "mig-3g.40gb.slices.gi": "3", "gpu.count": "4", "gpu.replicas": "1"}},
		{name: "fixed MIG on all, H100", spec: emulator.Spec{Model: "H100-80GB", Count: 2, GPUs: inMIG(0, 1)}, args: []string{mixed},
			instances: map[int]string{0: "2g.20gb@0 2g.20gb@2 1g.20gb@4", 1: "2g.20gb@0 2g.20gb@2 1g.20gb@4"},
			partition: "    - {devices: all, mode: mig, geometry: {2g.20gb: 2, 1g.20gb: 1}}\n",
			has:       map[string]string{"mig-2g.20gb.count": "4", "gpu.replicas": "0"}},
		{name: "fixed MIG on all, A30", spec: emulator.Spec{Model: "A30", Count: 2, GPUs: inMIG(0, 1)}, args: []string{mixed},
			instances: map[int]string{0: "2g.12gb@0 1g.6gb@2", 1: "4g.24gb@0"},
			partition: "    - {devices: [0], mode: mig, geometry: {2g.12gb: 1, 1g.6gb: 1}}\n    - {devices: [1], mode: mig, geometry: {4g.24gb: 1}}\n",
			has:       map[string]string{"mig-2g.12gb.engines.decoder": "2"}},
		{name: "split compute instances", spec: emulator.Spec{Model: "A100-SXM4-80GB", Count: 1, GPUs: inMIG(0)}, args: []string{mixed},
			instances: map[int]string{0: "1c.3g.40gb@0 1c.3g.40gb@0 1c.3g.40gb@0"},
			partition: "    - {devices: all, mode: mig, geometry: {1c.3g.40gb: 3}}\n",
			has:       map[string]string{"mig-1c.3g.40gb.slices.ci": "1"}},
		{name: "graphics instances", spec: emulator.Spec{Model: "RTX-PRO-6000", Count: 1, GPUs: inMIG(0)}, args: []string{mixed},
			instances: map[int]string{0: "2g.48gb+gfx@0 2g.48gb@6"},
			partition: "    - {devices: all, mode: mig, geometry: {2g.48gb+gfx: 1, 2g.48gb: 1}}\n",
			// "NVIDIA RTX PRO 6000 Blackwell Server Edition" and the profile still fit.
			has: map[string]string{"mig-2g.48gb.gfx.count": "1"}},
		// Instances that pods have made are not the node's.
		{name: "MIG on demand", spec: emulator.Spec{Model: "H100-80GB", Count: 1, GPUs: inMIG(0)}, args: []string{mixed},
			instances: map[int]string{0: "1g.10gb@0 3g.40gb@4"},
			partition: "    - {devices: all, mode: mig}\n",
			meant:     []string{"mig-1g.10gb.", "mig-3g.40gb."},
			has:       map[string]string{"mig.strategy": "mixed", "gpu.replicas": "0"}},
		// On the way to a partition the agent says what is wanted.
		{name: "before the change", spec: emulator.Spec{Model: "A100-SXM4-80GB", Count: 1}, args: []string{mixed},
			partition: "    - {devices: all, mode: mig, geometry: {3g.40gb: 2}}\n",
			meant:     []string{"mig-3g.40gb.", "gpu.replicas"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := start(t, test.spec)
			n.make(test.instances)
			inv := n.inventory()
			ours, theirs := n.ours(inv, test.partition), n.gfd(test.config, test.args...)
			for key, value := range test.has {
				if key = "nvidia.com/" + key; theirs[key] != value {
					t.Errorf("GPU Feature Discovery writes %s=%q, want %q", key, theirs[key], value)
				}
			}
			if len(test.args) > 0 && theirs["nvidia.com/mig.strategy"] == "" {
				t.Error("GPU Feature Discovery does not look at MIG")
			}
			judgeLabels(t, ours, theirs, test.meant...)
			if t.Failed() {
				file, _ := json.MarshalIndent(theirs, "", " ")
				t.Logf("GPU Feature Discovery: %s", file)
			}
		})
	}
}

// TestLabelsOfVirtualGPU is the same in a virtual machine that a hypervisor has given
// parts of GPUs to: their PCI configuration says so, and of which driver.
func TestLabelsOfVirtualGPU(t *testing.T) {
	n := start(t, emulator.Spec{Model: "A30", Count: 2})
	// A capability of the vendor's (9), 27 bytes of it, a virtual GPU's ("VF"), with
	// record 0, of 22 bytes: the version and the branch of the host's driver.
	space := make([]byte, 256)
	space[0x06], space[0x34] = 0x10, 0x68
	copy(space[0x68:], "\x09\x00\x1bVF\x00\x16570.133.20r570_00\x00\x00\x00")
	for _, d := range n.inventory().GPUs {
		file := filepath.Join("/sys/bus/pci/devices", strings.TrimPrefix(d.PCI, "0000"), "config")
		if err := os.WriteFile(file, space, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	theirs := n.gfd("")
	if theirs["nvidia.com/vgpu.present"] != "true" || theirs["nvidia.com/vgpu.host-driver-version"] != "570.133.20" {
		t.Errorf("GPU Feature Discovery sees no virtual GPU: %v", theirs)
	}
	judgeLabels(t, n.ours(n.inventory(), "    - {devices: all, mode: whole}\n"), theirs)
}

// judgeLabels names every entry that differs, but for the timestamp and those whose
// names begin as it is meant, which must differ.
func judgeLabels(t *testing.T, ours, theirs map[string]string, meant ...string) {
	t.Helper()
	meant = append(meant, "gfd.timestamp")
	seen := map[string]bool{}
	for _, line := range compare(ours, theirs) {
		i := slices.IndexFunc(meant, func(p string) bool { return strings.HasPrefix(line, "nvidia.com/"+p) })
		if i < 0 {
			t.Error(line)
			continue
		}
		seen[meant[i]] = true
	}
	for _, p := range meant {
		if !seen[p] {
			t.Errorf("%s does not differ any more", p)
		}
	}
}

// make makes instances by hand, as recorded.Machine has them, but for processes.
func (n *node) make(instances map[int]string) {
	n.t.Helper()
	for _, i := range slices.Sorted(maps.Keys(instances)) {
		for word := range strings.FieldsSeq(instances[i]) {
			word, _, _ = strings.Cut(word, "!")
			word, empty := strings.CutPrefix(word, "-")
			profile, at, _ := strings.Cut(word, "@")
			start, err := strconv.Atoi(at)
			if err == nil {
				err = n.world.CreateInstance(i, profile, start, empty)
			}
			if err != nil {
				n.t.Fatal(err)
			}
		}
	}
	if err := n.machine.Sync(n.world); err != nil {
		n.t.Fatal(err)
	}
}

// TestLabelsOfRecordedMachines makes labels of the inventories that are recorded,
// and lets GPU Feature Discovery look at the very machines. What stands there is
// taken for what is wanted.
func TestLabelsOfRecordedMachines(t *testing.T) {
	for _, m := range recorded.Machines {
		t.Run(strings.TrimSuffix(m.File, ".json"), func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("../testdata", m.File))
			if err != nil {
				t.Fatal(err)
			}
			inv, err := config.ReadInventory(text)
			if err != nil {
				t.Fatal(err)
			}
			n := start(t, m.Spec)
			n.make(m.Instances)
			var wanted []config.Want
			for _, d := range inv.GPUs {
				if d.MIG.Enabled {
					wanted = append(wanted, config.Want{GPU: d.UUID, Mode: config.MIG, Geometry: standing(t, &d)})
				} else {
					wanted = append(wanted, config.Want{GPU: d.UUID, Mode: config.Whole})
				}
			}
			var args []string
			if slices.ContainsFunc(wanted, func(w config.Want) bool { return w.Mode == config.MIG }) {
				args = append(args, mixed)
			}
			theirs := n.gfd("", args...)
			if theirs["nvidia.com/gpu.count"] != strconv.Itoa(len(inv.GPUs)) {
				t.Fatalf("GPU Feature Discovery sees %s GPUs, %d are recorded: not the same machine", theirs["nvidia.com/gpu.count"], len(inv.GPUs))
			}
			judgeLabels(t, label.NVIDIA(label.Node{Inventory: inv, Graph: topology.New(inv), Wanted: wanted}), theirs)
		})
	}
}

// standing counts a GPU's compute instances by profile.
func standing(t *testing.T, d *gpu.Device) []mig.Count {
	t.Helper()
	counts := map[mig.Name]int{}
	for _, in := range d.MIG.Instances {
		name, err := mig.Parse(in.Profile)
		if err != nil {
			t.Fatal(err)
		}
		if in.CI >= 0 {
			counts[name]++
		}
	}
	var out []mig.Count
	for _, name := range slices.SortedFunc(maps.Keys(counts), mig.Compare) {
		out = append(out, mig.Count{Profile: name, N: counts[name]})
	}
	return out
}
