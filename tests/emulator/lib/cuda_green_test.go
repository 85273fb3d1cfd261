// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// TestCUDAGreenContexts: a green context is a part of the multiprocessors in the primary
// context, which it retains, and whose its allocations are.
func TestCUDAGreenContexts(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=green-mib=4"}})
	p.must("cuInit 0; cuDeviceGetDevResource 0 &all 1")
	play(t, n, p, []step{
		{"poke count 0 4 4; cuDevSmResourceSplitByCount &parts &count &all &rest 0 20; cuDevResourceGenerateDesc &desc &parts 1", 0, 0},
		{"cuGreenCtxCreate &g desc 0 0", cudaInvalid, 0}, // "CU_GREEN_CTX_DEFAULT_STREAM is required"
		{"cuGreenCtxCreate &g desc 0 1", 0, 304},         // "This API will retain the primary context"
		{"cuGreenCtxCreate &h desc 0 1", 0, 308},
		{"cuCtxSetCurrent g", cudaInvalidContext, 308}, // "Failing to do so will result in […] CUDA_ERROR_INVALID_CONTEXT"
		{"cuCtxFromGreenCtx &c g; cuCtxSetCurrent c; cuCtxGetCurrent &d; cuMemAlloc_v2 &a 8388608", 0, 316},
		{"cuStreamCreate &s 1; cuStreamGetGreenCtx s &of; cuGreenCtxStreamCreate &u h 1 0; cuMemAllocAsync &b 33554432 u", 0, 348},
		{"cuGreenCtxStreamCreate &v h 0 0", cudaInvalid, 348},
		{"cuCtxDestroy_v2 c", cudaInvalidContext, 348},
		{"cuGreenCtxDestroy g", 0, 344},
		{"cuMemAlloc_v2 &a 4096", cudaDestroyed, 344}, // in a context that is no more
		{"cuGreenCtxGetId g &id", cudaInvalidContext, 344},
		{"cuDevicePrimaryCtxRetain &primary 0; cuCtxSetCurrent primary; cuMemFree_v2 a; cuMemFreeAsync b u; cuStreamSynchronize u", 0, 304},
		{"cuDevicePrimaryCtxRelease_v2 0; cuGreenCtxDestroy h", 0, 0},
	})
	want(t, "the current context", p.vars["d"], p.vars["g"])
	want(t, "the stream's green context", p.vars["of"], p.vars["g"])
	p.must("cuDevicePrimaryCtxRetain &primary 0; cuCtxSetCurrent primary; cuStreamCreate &s 1; cuStreamGetGreenCtx s &of")
	want(t, "the green context of a stream that has none", p.vars["of"], uint64(0))
}
