// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// TestOutOfMemoryInALoop kills the agent again and again, mostly before it is ready, as the kernel
// does with one whose memory limit is too low. Pods come and go meanwhile, by a kubelet that knows
// no better. Nothing that runs may notice, and when the agent is left alone the node is as its
// surroundings say.
func TestOutOfMemoryInALoop(t *testing.T) {
	t.Parallel()
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	ctx := inOrder(t)
	n, err := settled(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	lives := 12
	if !testing.Short() {
		lives = 100
	}
	random := rand.New(rand.NewPCG(*seed, 0))
	var pods []*pod
	for life := range lives {
		// Some lives end before the agent has registered, others in the middle of a pod's start.
		lifetime := time.Duration(random.Int64N(int64(1500 * time.Millisecond)))
		begun := time.Now()
		brief, cancel := context.WithTimeout(ctx, lifetime)
		if p, err := n.admit(brief, 1, "main"); err == nil && n.run(brief, p) == nil {
			pods = append(pods, p)
		}
		if len(pods) > 3 {
			n.stop(pods[0])
			pods = pods[1:]
		}
		<-brief.Done()
		cancel()
		n.end()
		if time.Since(begun) > lifetime+time.Minute {
			t.Fatalf("life %d took %s", life, time.Since(begun))
		}
		n.begin(0)
	}
	n.forgetUnborn()
	if err := n.settle(ctx); err != nil {
		t.Errorf("after %d lives: %v\n%s", lives, err, n.said())
	}
	for _, p := range pods {
		n.stop(p)
	}
	if err := n.settle(ctx); err != nil {
		t.Errorf("when the pods have ended: %v\n%s", err, n.said())
	}
	if wrong := n.complaints(); len(wrong) > 0 {
		t.Error(strings.Join(wrong, "\n"))
	}
	t.Logf("%d lives", lives)
}

// forgetUnborn ends the pods that were admitted and have no container: their start was given up.
func (n *node) forgetUnborn() {
	for _, a := range n.kubelet.Allocations() {
		if len(n.runtime.living(a.Pod)) == 0 {
			n.kubelet.Finish(a.Pod.UID)
		}
	}
}

// TestNoDescriptorsAtEachChange does operations again and again. At the first change, then at the
// second, and so on, the agent can open no more files and accept no more connections, for so long
// as an outage.
func TestNoDescriptorsAtEachChange(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("skipped: with -short no descriptors run out")
	}
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	nodes := newPool(lendable, freshNode(m))
	for _, make := range operations() {
		if make().start {
			continue // a process that begins has few, and ends with the reason if it can have none
		}
		killAtEach(t, func() operation {
			op := make()
			op.name = "no descriptors: " + op.name
			op.strike = (*node).noDescriptors
			return op
		}, nodes)
	}
}

// noDescriptors takes the agent's right to more open files for so long as an outage.
func (n *node) noDescriptors() {
	n.mu.Lock()
	pid := n.process.pid
	n.mu.Unlock()
	var was unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was)
	if err == nil {
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}, nil)
	}
	if err != nil {
		n.mu.Lock()
		n.wrong = append(n.wrong, fmt.Sprintf("take the agent's descriptors: %v", err))
		n.mu.Unlock()
		return
	}
	n.disk.fail(unix.EMFILE)
	time.AfterFunc(outage, func() { _ = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &was, nil) }) // it may have ended
}
