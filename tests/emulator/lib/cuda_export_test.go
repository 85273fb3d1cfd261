// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// TestCUDAExportsHoldMemory: a descriptor of memory holds it after its release, in
// whatever process it is, until the last copy is closed; and what was exported and
// closed is free, however often that is done.
func TestCUDAExportsHoldMemory(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	used := func() uint64 { return n.world.State().GPUs[0].UsedMiB }
	a := startProbe(t, probeWith{})
	a.must("cuInit 0; cuCtxCreate_v2 &c 0 0; poke prop 0 4 1; poke prop 4 4 1; poke prop 8 4 1")

	holder := startProbe(t, probeWith{}) // which never calls CUDA
	var taken []uint64
	for range 4 {
		a.must("cuMemCreate &h 1073741824 &prop 0; cuMemExportToShareableHandle &out h 1 0; cuMemRelease h")
		holder.must(fmt.Sprintf("take %d %d", a.pid, int32(a.vars["out"])))
		taken = append(taken, holder.vars["fd"])
		a.must("close out")
	}
	want(t, "MiB held by another's descriptors", used(), 300+4096)
	holder.must(fmt.Sprintf("close %d", taken[0]))
	eventually(t, "one is closed", func() bool { return used() == 300+3072 })
	holder.kill()
	eventually(t, "their holder is dead", func() bool { return used() == 300 })

	// Register and release, as NCCL does.
	for range 200 {
		a.must("cuMemCreate &h 1073741824 &prop 0; cuMemExportToShareableHandle &out h 1 0; close out; cuMemRelease h")
	}
	eventually(t, "all are closed", func() bool { return used() == 300 })

	// By addresses: of an ordinary allocation, and of a mapping.
	a.must("cuMemAlloc_v2 &p 67108864; cuMemGetHandleForAddressRange &out p 4096 1 0; cuMemFree_v2 p")
	want(t, "MiB held by a DMA_BUF descriptor", used(), 364)
	a.must("close out")
	eventually(t, "it is closed", func() bool { return used() == 300 })
	a.must("cuMemAddressReserve &r 67108864 0 0 0; cuMemCreate &h 67108864 &prop 0; cuMemMap r 67108864 0 h 0; cuMemRelease h")
	a.must("cuMemGetHandleForAddressRange &out r 67108864 1 0; cuMemUnmap r 67108864; cuMemAddressFree r 67108864")
	want(t, "MiB of a mapping held by a descriptor", used(), 364)
	a.must("close out")
	eventually(t, "it is closed", func() bool { return used() == 300 })
	a.must("cuMemAlloc_v2 &p 4194304")
	want(t, "more than there is", a.do("cuMemGetHandleForAddressRange &out p 8388608 1 0"), cudaInvalid)
	want(t, "not the memory of a pool", a.do("cuMemGetHandleForAddressRange &out 4096 4096 1 0"), cudaInvalid)
}
