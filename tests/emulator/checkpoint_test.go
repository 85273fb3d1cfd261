// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

// checkpointed is a world with a program on GPU 0 and one that checkpoints others.
type checkpointed struct {
	*emulator.World
	program, by *emulator.Session
}

const programPID = 10

func newCheckpointed(t *testing.T) checkpointed {
	t.Helper()
	w := newWorld(t, emulator.Spec{Count: 1, CUDA: "12.8", GPUs: []emulator.GPUSpec{{MemoryMiB: 1048, ReservedMiB: 48}}})
	c := checkpointed{w, open(t, w, emulator.Opening{PID: programPID}), open(t, w, emulator.Opening{PID: 11})}
	want(t, "take memory", c.program.Charge("cuMemAlloc_v2", 0, 600<<20), emulator.Success)
	want(t, "store", c.program.Store(0x1000, 7), emulator.Success)
	return c
}

func (c checkpointed) state(t *testing.T, what string, state emulator.CheckpointState, mib uint64) {
	t.Helper()
	got, r := c.by.CheckpointState(programPID)
	want(t, "ask for the state after "+what, r, emulator.Success)
	want(t, "state after "+what, got, state)
	want(t, "used after "+what, c.State().GPUs[0].UsedMiB, mib)
}

// A process is locked, checkpointed, restored and unlocked in this order alone; its memory and what is in
// it come back, and its calls wait meanwhile.
func TestCheckpoint(t *testing.T) {
	const MiB = 1 << 20
	c := newCheckpointed(t)
	illegal := func(what string, calls ...func(int) emulator.Return) {
		t.Helper()
		for _, call := range calls {
			want(t, what, call(programPID), emulator.ErrIllegalState)
		}
	}
	lock := func(pid int) emulator.Return { return c.by.Lock(pid, time.Second) }
	illegal("running", c.by.Checkpoint, c.by.Restore, c.by.Unlock)
	want(t, "lock", lock(programPID), emulator.Success)
	c.state(t, "lock", emulator.Locked, 600)
	illegal("locked", lock, c.by.Restore)

	done := make(chan emulator.Return, 1)
	go func() { done <- c.program.Charge("cuMemAlloc_v2", 0, MiB) }()
	select {
	case r := <-done:
		t.Fatalf("a locked process takes memory: %v", r)
	case <-time.After(20 * time.Millisecond):
	}
	want(t, "checkpoint", c.by.Checkpoint(programPID), emulator.Success)
	c.state(t, "checkpoint", emulator.Checkpointed, 0)
	want(t, "host memory", c.State().Parked[0].Bytes, 600*MiB)
	illegal("checkpointed", lock, c.by.Checkpoint, c.by.Unlock)

	other := open(t, c.World, emulator.Opening{PID: 12})
	want(t, "another takes the room", other.Charge("cuMemAlloc_v2", 0, 500*MiB), emulator.Success)
	want(t, "restore without room", c.by.Restore(programPID), emulator.OutOfMemory)
	c.state(t, "a restore without room", emulator.Checkpointed, 500)
	want(t, "the room is free", other.Charge("cuMemAlloc_v2", 0, -500*MiB), emulator.Success)
	want(t, "restore", c.by.Restore(programPID), emulator.Success)
	c.state(t, "restore", emulator.Locked, 600)
	want(t, "unlock", c.by.Unlock(programPID), emulator.Success)
	want(t, "the call that waited", <-done, emulator.Success)
	c.state(t, "unlock", emulator.Running, 601)
	word, r := c.program.Load(0x1000)
	want(t, "load", r, emulator.Success)
	want(t, "what is in the memory", word, uint64(7))
	want(t, "parked in the end", len(c.State().Parked), 0)
}

// What hardware refuses is refused, and leaves the process as it was.
func TestCheckpointRefusals(t *testing.T) {
	c := newCheckpointed(t)
	want(t, "nobody's PID", c.by.Lock(99, time.Second), emulator.InvalidArgument)
	user := open(t, c.World, emulator.Opening{PID: 13, Unprivileged: true})
	want(t, "not root", user.Lock(programPID, time.Second), emulator.NoPermission)
	if err := c.SetBusy(programPID, true); err != nil {
		t.Fatal(err)
	}
	want(t, "a call that does not return", c.by.Lock(programPID, time.Millisecond), emulator.ErrNotReady)
	c.state(t, "a lock that timed out", emulator.Running, 600)
	if err := c.SetBusy(programPID, false); err != nil {
		t.Fatal(err)
	}

	id, r := c.program.Share("cuIpcGetMemHandle", 0, 100<<20)
	want(t, "share", r, emulator.Success)
	want(t, "lock", c.by.Lock(programPID, 0), emulator.Success)
	want(t, "shared memory", c.by.Checkpoint(programPID), emulator.NotSupported)
	c.state(t, "a checkpoint that was refused", emulator.Locked, 600)
	want(t, "unlock", c.by.Unlock(programPID), emulator.Success)
	want(t, "unshare", c.program.CloseShared("cuIpcCloseMemHandle", id), emulator.Success)

	if err := c.ServeMPS(50, "", 100); err != nil {
		t.Fatal(err)
	}
	client := open(t, c.World, emulator.Opening{PID: 14})
	want(t, "join", client.JoinMPS(50), emulator.Success)
	want(t, "a client of MPS", c.by.Lock(14, time.Second), emulator.NotSupported)

	old := newWorld(t, emulator.Spec{Count: 1, CUDA: "12.4"})
	program, by := open(t, old, emulator.Opening{PID: programPID}), open(t, old, emulator.Opening{PID: 11})
	want(t, "take memory", program.Charge("cuMemAlloc_v2", 0, 1<<20), emulator.Success)
	want(t, "a driver before R570", by.Lock(programPID, time.Second), emulator.NotSupported)
}

// A checkpoint or a restore can break its process: nothing unlocks that any more, and its death frees all.
func TestCheckpointBreaks(t *testing.T) {
	for _, call := range []string{"cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore"} {
		c := newCheckpointed(t)
		if err := c.Inject(emulator.Fault{Call: call, Code: emulator.Unknown}); err != nil {
			t.Fatal(err)
		}
		want(t, "lock", c.by.Lock(programPID, 0), emulator.Success)
		r := c.by.Checkpoint(programPID)
		if call == "cuCheckpointProcessRestore" {
			want(t, "checkpoint", r, emulator.Success)
			r = c.by.Restore(programPID)
		}
		want(t, call, r, emulator.Unknown)
		got, _ := c.by.CheckpointState(programPID)
		want(t, "state", got, emulator.Failed)
		want(t, "unlock what is broken", c.by.Unlock(programPID), emulator.ErrIllegalState)
		want(t, "its calls", c.program.Charge("cuMemAlloc_v2", 0, 1), emulator.ErrLaunch)
		c.program.Close()
		want(t, "used in the end", c.State().GPUs[0].UsedMiB, uint64(0))
	}
}
