// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// migNode has two cards: GPU 0, whose minor is 1, in MIG mode with instances at
// some memory slices, and GPU 1 whole.
func migNode(t *testing.T, instances map[int]string) (*node, map[int]emulator.GPUInstanceState) {
	t.Helper()
	n := start(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	err := n.world.SetMIG(0, true)
	for at, profile := range instances {
		err = errors.Join(err, n.world.CreateInstance(0, profile, at, false))
	}
	if err != nil {
		t.Fatal(err)
	}
	stand := map[int]emulator.GPUInstanceState{}
	for _, gi := range n.world.State().GPUs[0].MIG.Instances {
		stand[gi.Start] = gi
	}
	return n, stand
}

// visible is the UUID of the one device that a program has after cuInit, without
// its first four characters, and its memory in MiB.
func visible(t *testing.T, p *probe) (uuid string, mib uint64) {
	t.Helper()
	p.must("cuInit 0; cuDeviceGetCount &n; cuDeviceGetUuid_v2 &u 0; cuDeviceTotalMem_v2 &m 0")
	want(t, "devices", p.vars["n"], 1)
	b := binary.LittleEndian.AppendUint64(nil, p.vars["u"])
	return hex.EncodeToString(b), p.vars["m"] / (1 << 20)
}

// short is what visible gives of a UUID.
func short(uuid string) string { return strings.ReplaceAll(uuid[4:], "-", "")[:16] }

func TestCUDAChoosesAMIGDevice(t *testing.T) {
	n, at := migNode(t, map[int]string{0: "1g.10gb", 4: "3g.40gb"})
	gpus := n.world.State().GPUs
	small, large := at[0].Compute[0], at[4].Compute[0]
	first, firstMiB := small, uint64(9728)
	if large.Index < small.Index {
		first, firstMiB = large, 40192
	}
	for list, c := range map[string]struct {
		uuid string // empty: no device
		mib  uint64
	}{
		"unset":                       {first.UUID, firstMiB}, // and no whole GPU beside it
		"0":                           {first.UUID, firstMiB},
		"1":                           {gpus[1].UUID, 81920 - 590},
		"1,0":                         {first.UUID, firstMiB},
		"2":                           {},
		gpus[0].UUID:                  {first.UUID, firstMiB},
		gpus[1].UUID:                  {gpus[1].UUID, 81920 - 590},
		small.UUID:                    {small.UUID, 9728},
		large.UUID:                    {large.UUID, 40192},
		large.UUID[:12]:               {large.UUID, 40192},
		"MIG-":                        {},
		"MIG-00000000-no":             {},
		small.UUID + "," + large.UUID: {small.UUID, 9728},
		fmt.Sprintf("MIG-%s/%d/0", gpus[0].UUID, at[4].ID):  {large.UUID, 40192},
		fmt.Sprintf("MIG-%s/%d/1", gpus[0].UUID, at[4].ID):  {},
		fmt.Sprintf("MIG-%s/%d/0x", gpus[0].UUID, at[4].ID): {},
	} {
		t.Run(list, func(t *testing.T) {
			var env []string
			if list != "unset" {
				env = []string{"CUDA_VISIBLE_DEVICES=" + list}
			}
			p := startProbe(t, probeWith{env: env})
			if c.uuid == "" {
				want(t, "cuInit", p.do("cuInit 0"), cudaNoDevice)
				return
			}
			uuid, mib := visible(t, p)
			want(t, "UUID", uuid, short(c.uuid))
			want(t, "memory", mib, c.mib)
		})
	}
}

// In a container a program has what it has device nodes for.
func TestCUDAInAContainerHasItsMIGDevice(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making device nodes in a mount namespace needs root")
	}
	n, at := migNode(t, map[int]string{0: "1g.10gb", 4: "3g.40gb", 1: "1g.10gb"})
	library := openLibrary(t)
	contained := func(minors ...int) *probe {
		return startProbe(t, probeWith{
			library: library,
			env:     []string{"ABI_TEST_CAPABILITIES=" + strings.Trim(fmt.Sprint(minors), "[]")},
			jail:    &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS},
		})
	}
	gi := at[4]
	ci := gi.Compute[0]
	for what, minors := range map[string][]int{
		"no capability":                     nil,
		"the GPU instance's alone":          {gi.Minor},
		"the compute instance's alone":      {ci.Minor},
		"of one and the other":              {gi.Minor, at[0].Compute[0].Minor},
		"the one that is for looking at it": {2},
	} {
		want(t, "cuInit with "+what, contained(minors...).do("cuInit 0"), cudaNoDevice)
	}

	p := contained(gi.Minor, ci.Minor)
	uuid, mib := visible(t, p)
	want(t, "UUID", uuid, short(ci.UUID))
	want(t, "memory", mib, 40192)
	p.must("cuDeviceGetName &name 64 0; cuDeviceGetAttribute &sms 16 0; cuDeviceGetUuid &g 0")
	want(t, "multiprocessors", p.vars["sms"], 42)
	want(t, "the GPU's UUID", hex.EncodeToString(binary.LittleEndian.AppendUint64(nil, p.vars["g"])), short(n.world.State().GPUs[0].UUID))

	// What it takes is taken of the instance, and of no other.
	p.must("cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 1073741824; cuMemGetInfo_v2 &free &total")
	want(t, "total", p.vars["total"], 40192*mibBytes)
	want(t, "free", p.vars["free"], (40192-1024-300)*mibBytes)
	want(t, "more than the instance has", p.do("cuMemAlloc_v2 &b %d", 40000*mibBytes), cudaOutOfMemory)
	other := contained(at[0].Minor, at[0].Compute[0].Minor)
	other.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemGetInfo_v2 &free &total")
	want(t, "free on another instance", other.vars["free"], (9728-300)*mibBytes)

	state := n.world.State()
	want(t, "processes", len(state.Processes), 2)
	for _, q := range state.Processes {
		if q.PID == p.pid && (q.GI != gi.ID || q.CI != ci.ID || q.MiB != 1324) {
			t.Errorf("the process is listed as %+v, want it on %d.%d with 1324 MiB", q, gi.ID, ci.ID)
		}
	}
	if err := n.world.DestroyInstance(0, 4); !errors.Is(err, emulator.InUse) {
		t.Errorf("destroy an instance that a program is on: %v", err)
	}
	if err := n.world.DestroyInstance(0, 1); err != nil {
		t.Errorf("destroy an idle instance beside it: %v", err)
	}
	p.kill()
	eventually(t, "the instance is idle", func() bool { return n.world.DestroyInstance(0, 4) == nil })
	other.must("cuMemAlloc_v2 &a 4096")
}

// Compute instances of one GPU instance have its memory together.
func TestCUDAOnPartsOfAGPUInstance(t *testing.T) {
	n, _ := migNode(t, nil)
	for range 3 {
		if err := n.world.CreateInstance(0, "1c.3g.40gb", 0, false); err != nil {
			t.Fatal(err)
		}
	}
	gi := n.world.State().GPUs[0].MIG.Instances[0]
	want(t, "compute instances", len(gi.Compute), 3)
	var ps []*probe
	for _, ci := range gi.Compute[:2] {
		p := startProbe(t, probeWith{env: []string{"CUDA_VISIBLE_DEVICES=" + ci.UUID}})
		uuid, mib := visible(t, p)
		want(t, "UUID", uuid, short(ci.UUID))
		want(t, "memory", mib, 40192)
		p.must("cuCtxCreate_v2 &c 0 0")
		ps = append(ps, p)
	}
	ps[0].must("cuMemAlloc_v2 &a 1073741824")
	ps[1].must("cuMemGetInfo_v2 &free &total")
	want(t, "free, beside another's", ps[1].vars["free"], (40192-1024-2*300)*mibBytes)
	ps[0].must("cuMemFree_v2 a")
	ps[1].must("cuMemGetInfo_v2 &free &total")
	want(t, "free after it", ps[1].vars["free"], (40192-2*300)*mibBytes)
}

const mibBytes = uint64(mib)
