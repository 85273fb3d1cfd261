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

// TestCUDASmallMemoryHasItsOwnIPCHandle: what is allocated where something was that had
// an IPC handle is not that.
func TestCUDASmallMemoryHasItsOwnIPCHandle(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	a, b := startProbe(t, probeWith{}), startProbe(t, probeWith{})
	a.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &k 4096; cuMemAlloc_v2 &p 4096; cuIpcGetMemHandle &ipc p; cuMemFree_v2 p")
	a.must("cuMemAlloc_v2 &q 4096; cuIpcGetMemHandle &ipc q")
	want(t, "the same place", a.vars["q"], a.vars["p"])
	b.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	copyBytes(t, a, b, "ipc", 64)
	b.must("cuIpcOpenMemHandle_v2 &p 1 @ipc; cuIpcCloseMemHandle p")
}

// TestCUDAPoolsOfOtherProcesses: a pool is opened by its descriptor and its allocations
// by what was exported of them, which hold the memory that they are part of; an imported
// pool gives no memory of its own.
func TestCUDAPoolsOfOtherProcesses(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	used := func() uint64 { return n.world.State().GPUs[0].UsedMiB }
	a, b := startProbe(t, probeWith{}), startProbe(t, probeWith{})
	for _, p := range []*probe{a, b} {
		p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; poke props 0 4 1; poke props 8 4 1; poke keep 0 8 0")
	}
	a.must("cuMemPoolCreate &plain &props; poke props 4 4 1; cuMemPoolCreate &pool &props; cuMemAllocFromPoolAsync &p 33554432 pool 0")
	want(t, "to export a pool that is not for it", a.do("cuMemPoolExportToShareableHandle &out plain 1 0"), cudaInvalid)
	want(t, "to export of a pool that nobody can have", a.do("cuMemPoolExportPointer &data p"), cudaInvalid)
	a.must("cuMemPoolExportToShareableHandle &out pool 1 0; cuMemPoolExportPointer &data p; cuMemAllocAsync &q 4096 0")
	want(t, "to export of another pool", a.do("cuMemPoolExportPointer &data q"), cudaInvalid)
	a.must("cuMemFreeAsync q 0; cuCtxSynchronize")
	want(t, "MiB of both", used(), 632)

	b.must(fmt.Sprintf("take %d %d; cuMemPoolImportFromShareableHandle &pool fd 1 0", a.pid, int32(a.vars["out"])))
	want(t, "memory by the descriptor of a pool", b.do("cuMemImportFromShareableHandle &h fd 1"), cudaInvalid)
	b.must("close fd")
	want(t, "to allocate from an imported pool", b.do("cuMemAllocFromPoolAsync &p 4096 pool 0"), cudaInvalid)
	want(t, "to make it the current one", b.do("cuDeviceSetMemPool 0 pool"), cudaInvalid)
	copyBytes(t, a, b, "data", 64)
	b.must("cuMemPoolImportPointer &p pool &data; cuMemPoolImportPointer &q pool &data; cuMemPoolGetAttribute pool 7 &used")
	// "resource usage stat attribute queries only reflect the allocations imported into the process"
	want(t, "bytes used of an imported pool", b.vars["used"], uint64(2*33554432))
	want(t, "MiB with two imports", used(), 632)
	b.must("cuMemFreeAsync q 0")

	// Freed and destroyed by its owner, it is there as long as anybody has it open.
	a.must("cuMemFreeAsync p 0; cuStreamSynchronize 0; cuMemPoolDestroy pool; close out")
	want(t, "MiB of an import", used(), 632)
	b.must("cuMemPoolDestroy pool")
	want(t, "of a destroyed pool", b.do("cuMemPoolImportPointer &q pool &data"), cudaInvalid)
	b.must("cuMemFree_v2 p")
	want(t, "MiB without it", used(), 600)

	// The same with an exporter that dies.
	a.must("cuMemPoolCreate &pool &props; cuMemAllocFromPoolAsync &p 33554432 pool 0; cuMemPoolExportToShareableHandle &out pool 1 0; cuMemPoolExportPointer &data p")
	b.must(fmt.Sprintf("take %d %d; cuMemPoolImportFromShareableHandle &pool fd 1 0", a.pid, int32(a.vars["out"])))
	copyBytes(t, a, b, "data", 64)
	b.must("cuMemPoolImportPointer &p pool &data")
	a.kill()
	eventually(t, "the exporter is dead", func() bool { return used() == 332 })
	b.must("cuMemFree_v2 p; cuMemPoolDestroy pool")
	want(t, "MiB", used(), 300)
}

// TestCUDASparseArrays: memory that is mapped into a sparse array lives as long as
// it is mapped there, whatever became of its handle.
func TestCUDASparseArrays(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	// A description of 4096 x 4096 floats, sparse, and memory for tiles.
	const begin = `cuInit 0; cuCtxCreate_v2 &c 0 0; poke d 0 8 4096; poke d 8 8 4096; poke d 24 4 32; poke d 28 4 1; poke d 32 4 64;
		poke prop 0 4 1; poke prop 8 4 1; cuCtxCreate_v2 &x 0 0`
	p.must(begin)
	play(t, n, p, []step{
		{"cuArray3DCreate_v2 &a &d", 0, 600},
		{"cuMemCreate &h 67108864 &prop 0; poke i 8 8 a; poke i 56 4 1; poke i 64 8 h", 0, 664},
		{"cuMemMapArrayAsync &i 1 0", cudaInvalid, 664}, // which was not made for it
		{"cuMemRelease h", 0, 600},
	})
	p.must("poke prop 26 2 1") // CU_MEM_CREATE_USAGE_TILE_POOL
	play(t, n, p, []step{
		{"cuMemCreate &h 67108864 &prop 0; poke i 8 8 a; poke i 64 8 h; poke i 56 4 1; poke i 80 4 1; cuMemMapArrayAsync &i 1 0", 0, 664},
		{"cuMemRelease h", 0, 664},
		{"cuMemCreate &h 33554432 &prop 0; poke i 64 8 h; cuMemMapArrayAsync_ptsz &i 1 0", 0, 632}, // takes the place of the first
		{"cuMemRelease h; poke i 24 4 1; cuMemCreate &h 33554432 &prop 0; poke i 64 8 h; cuMemMapArrayAsync &i 1 0; cuMemRelease h", 0, 664},
		{"cuMemMapArrayAsync &i 1 0", cudaInvalid, 664}, // the handle is gone
		{"poke i 64 8 0; poke i 56 4 2; cuMemMapArrayAsync &i 1 0", 0, 632},
		{"cuArrayDestroy a", 0, 600},
		{"cuMemMapArrayAsync &i 1 0", cudaInvalidHandle, 600},
		{"cuArray3DCreate_v2 &a &d; poke i 8 8 a; poke i 56 4 1; cuMemCreate &h 33554432 &prop 0; poke i 64 8 h; cuMemMapArrayAsync &i 1 0; cuMemRelease h", 0, 632},
		{"cuCtxDestroy_v2 x", 0, 300},
	})
}
