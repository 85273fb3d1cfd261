// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

// TestCUDACheckpoint: one program takes another off the card and puts it back, as NVIDIA's drivers do from CUDA
// 12.8 on. Meanwhile no call of the other returns, not even one that asks the card nothing.
func TestCUDACheckpoint(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1, CUDA: "12.8", ContextMiB: 100})
	p, by := startProbe(t, probeWith{}), startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 67108864; poke buffer 0 8 4711; cuMemcpyHtoD_v2 a &buffer 8; poke buffer 0 8 0")
	used := func() uint64 { return n.world.State().GPUs[0].UsedMiB }
	about := func(call, more string) int { return by.do("cuCheckpointProcess%s %d%s", call, p.pid, more) }
	want(t, "before cuInit", about("Lock", " 0"), cudaNotInitialized)
	by.must("cuInit 0")
	want(t, "unlock a running process", about("Unlock", " 0"), 401)
	by.must(fmt.Sprintf("poke args 0 8 1000; cuCheckpointProcessLock %d &args; cuCheckpointProcessGetState %d &state", p.pid, p.pid))
	want(t, "state", by.vars["state"], uint64(emulator.Locked))
	by.must("poke args 0 8 0; poke args 16 8 1")
	want(t, "an argument that must be 0", about("Checkpoint", " &args"), cudaInvalid)

	// A call that waits: its answer comes once the process is unlocked.
	fmt.Fprintln(p.in, "cuCtxGetCurrent &now")
	answer := make(chan string, 1)
	go func() { answer <- p.line() }()
	want(t, "checkpoint", about("Checkpoint", " 0"), 0)
	want(t, "MiB of a checkpointed process", used(), 0)
	select {
	case said := <-answer:
		t.Fatalf("a call of a checkpointed process returns: %s", said)
	case <-time.After(50 * time.Millisecond):
	}
	want(t, "restore", about("Restore", " 0"), 0)
	want(t, "MiB of a restored process", used(), 164)
	want(t, "unlock", about("Unlock", " 0"), 0)
	if said := <-answer; said[0] != '0' {
		t.Errorf("the call that waited: %s", said)
	}
	p.must("cuMemcpyDtoH_v2 &buffer a 8")
	want(t, "what is in the memory", p.do("peek buffer 0 8"), 4711)
}
