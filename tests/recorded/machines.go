// SPDX-License-Identifier: Apache-2.0

package recorded

import "example.com/gpu-agent/tests/emulator"

// Machine is a node whose inventory stands under tests/testdata.
type Machine struct {
	File string
	Spec emulator.Spec
	// Instances are made on the GPUs before the reading, by index: "1g.10gb@0".
	// With a "-" in front it is a GPU instance without a compute instance, with a "!"
	// a process is on it, of the pod that follows.
	Instances map[int]string
	// Pending GPUs wait for a reset into MIG mode.
	Pending []int
}

// Machines are all of them.
var Machines = []Machine{
	{File: "a100-40.json", Spec: emulator.Spec{Seed: "a100-40", Topology: "dgx-a100", Model: "A100-SXM4-40GB"}},
	{File: "a100-80.json", Spec: emulator.Spec{Seed: "a100-80", Topology: "dgx-a100", Model: "A100-SXM4-80GB"}},
	{File: "a30.json", Spec: emulator.Spec{Seed: "a30", Topology: "pairs", Count: 4}},
	{File: "h100-80.json", Spec: emulator.Spec{Seed: "h100-80", Topology: "dgx-h100"}},
	{File: "h200.json", Spec: emulator.Spec{Seed: "h200", Topology: "dgx-h100", Model: "H200-141GB", Machine: "DGXH200"}},
	{File: "b200.json", Spec: emulator.Spec{Seed: "b200", Topology: "dgx-h100", Model: "B200", Machine: "DGXB200"}},
	{File: "gb200.json", Spec: emulator.Spec{Seed: "gb200", Topology: "nvl72"}},
	{File: "rtx-pro-6000.json", Spec: emulator.Spec{Seed: "rtx-pro-6000", Topology: "pcie"}},
	{File: "v100-dgx1.json", Spec: emulator.Spec{Seed: "v100-dgx1", Topology: "dgx-1"}},
	{File: "v100-dgx2.json", Spec: emulator.Spec{Seed: "v100-dgx2", Topology: "dgx-2"}},
	{
		File: "a100-80-mig.json", Spec: emulator.Spec{Seed: "a100-80-mig", Topology: "dgx-a100", Model: "A100-SXM4-80GB", GPUs: inMIG(0, 1, 2, 3, 4, 5)},
		Instances: map[int]string{
			0: "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
			1: "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5!train/train-3 1g.10gb@6",
			2: "3g.40gb@0 3g.40gb@4!infer/llm-0",
			4: "1c.3g.40gb@0 1c.3g.40gb@0!infer/small-1 1c.3g.40gb@0 2g.20gb@4 1g.10gb@6",
			5: "1g.10gb+me@0!media/encode-7 -2g.20gb@2 1g.20gb@4",
		},
		Pending: []int{6},
	},
	{
		File: "rtx-pro-6000-mig.json", Spec: emulator.Spec{Seed: "rtx-pro-6000-mig", Topology: "pcie", Count: 4, GPUs: inMIG(0, 1, 2)},
		Instances: map[int]string{
			0: "1g.24gb-me@0 1g.24gb-me@3!train/small-0 1g.24gb-me@6 1g.24gb+me.all@9!media/encode-0",
			1: "2g.48gb+gfx@0 2g.48gb@6",
		},
	},
}

func inMIG(indices ...int) []emulator.GPUSpec {
	gpus := make([]emulator.GPUSpec, len(indices))
	for i, x := range indices {
		gpus[i] = emulator.GPUSpec{Index: x, MIG: true}
	}
	return gpus
}
