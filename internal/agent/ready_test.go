// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// wantReady checks what /readyz says: words of the reason, none where it is ready.
func (b *bench) wantReady(words ...string) {
	b.t.Helper()
	synctest.Wait()
	err := b.Ready()
	if (err == nil) != (len(words) == 0) {
		b.t.Fatalf("ready: %v, want %q", err, words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			b.t.Errorf("not ready: %v, want %q in it", err, w)
		}
	}
}

// An agent that cannot open the driver was ready on what the one before it had
// written down, and a rolling update went on to the next node.
func TestNotReadyOnAPredecessorsInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		start(t, o, dir, allShared).end()
		o.with(func() { o.err = fmt.Errorf("open it: %w", gpu.ErrNoDriver) })
		b := start(t, o, dir, allShared)
		defer b.end()
		for range 60 {
			b.wantReady("has not read the driver", "open it")
			if err := b.Healthy(); err != nil {
				t.Fatalf("the wait for a driver is no reason to restart: %v", err)
			}
			time.Sleep(time.Minute)
		}
		o.with(func() { o.err = nil })
		time.Sleep(readPauseMax)
		b.wantReady()
		// What comes later does not take it back.
		o.with(func() { o.err = gpu.ErrNoDriver })
		time.Sleep(inventoryEvery)
		b.wantState("failed")
		b.wantReady()
		b.SetFile("p.yaml", []byte("version: v1\n"))
		b.wantState("invalid")
		b.wantReady()
	})
}

// An agent whose first partition is invalid was ready with nothing on offer.
func TestNotReadyWithAnInvalidFirstPartition(t *testing.T) {
	const bad = "version: v1\npartitions:\n  default:\n    - devices: [7]\n      mode: whole\n"
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, "")
		b.wantReady("partitions are not known yet")
		b.SetFileMissing(errors.New("there is no ConfigMap gpu/p"))
		b.wantReady("no valid partition", "there is no ConfigMap gpu/p")
		b.SetFile("p.yaml", []byte(bad))
		b.wantReady("no valid partition", "p.yaml:4")
		b.SetFile("p.yaml", []byte(allShared))
		b.wantReady()
		b.end()
		// What the one before it offered goes on: this one works as well as that.
		b = start(t, o, dir, bad)
		defer b.end()
		b.want("invalid", fourUnits, "")
		b.wantReady()
	})
}

// An agent that may not read its ConfigMap told nobody but its log.
func TestRefusedPartitionsAreTold(t *testing.T) {
	forbidden := errors.New(`configmaps "p" is forbidden: User "x" cannot list resource "configmaps"`)
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, "")
		b.SetRefused("list configmaps gpu/p", forbidden)
		b.wantReady("partitions are not known yet", "list configmaps gpu/p", "cannot list resource", "rbac.yaml")
		b.wantState("") // it may pass: an API server that starts does so
		time.Sleep(silentFor)
		b.wantState("failed")
		if m := b.message(); !strings.Contains(m, "refuses to list configmaps gpu/p") || !strings.Contains(m, "rbac.yaml") {
			t.Errorf("message %q", m)
		}
		if s := b.Status().Partition; s.State != "failed" || !strings.Contains(s.Message, "gpu/p") {
			t.Errorf("status %+v", s)
		}
		if n := b.eventsWith("GPUPartitionFailed"); n != 1 {
			t.Errorf("%d Events", n)
		}
		b.SetRefused("list configmaps gpu/p", nil)
		b.SetFile("p.yaml", []byte(allShared))
		b.want("applied", fourUnits, "")
		b.wantReady()
		// Later on, what is in force stays.
		b.SetRefused("watch configmaps gpu/p", forbidden)
		time.Sleep(silentFor / 2)
		b.want("applied", fourUnits, "")
		time.Sleep(silentFor / 2)
		b.want("failed", fourUnits, "")
		b.wantReady()
		b.SetRefused("watch configmaps gpu/p", nil)
		b.want("applied", fourUnits, "")
		b.end()

		// The label on the node is heard of in the same way.
		b = start(t, o, dir, allShared)
		b.mail.hear(func(in *input) { in.labelKnown = false })
		b.SetRefused("list nodes n", forbidden)
		time.Sleep(silentFor)
		b.wantState("failed")
		b.end()
	})
}

// Without the driver's files no container can start: that is not ready either.
func TestNotReadyWithoutParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.partsErr = errors.New("the hook program is missing")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.wantReady("which driver files containers need", "the hook program is missing")
		b.with(func() { b.outside.partsErr = nil })
		time.Sleep(backOffMax)
		b.wantReady()
	})
}
