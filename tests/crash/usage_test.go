// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
	"example.com/gpu-agent/tests/emulator"
)

// journalDiffers compares the usage journal with what the kubelet and the runtime hold: what
// is open in it is what they have, under their pods' names, and nothing is there twice.
func (n *node) journalDiffers(held map[string]holding) error {
	book := usage.NewBook(nil)
	begun, ended := map[uint64]usage.Record{}, map[uint64]bool{}
	var twice error
	err := segments.Read(filepath.Join(n.state, "usage"), time.Time{}, func(r *usage.Record) {
		book.Apply(r)
		switch before := begun[r.Grant]; {
		case r.Event == usage.Allocated && before.Grant != 0:
			twice = fmt.Errorf("grant %d began twice, for %s and %s", r.Grant, before.Allocation, r.Allocation)
		case r.Event == usage.Allocated:
			begun[r.Grant] = *r
		case r.Event == usage.Released && ended[r.Grant]:
			twice = fmt.Errorf("grant %d ended twice", r.Grant)
		case r.Event == usage.Released:
			ended[r.Grant] = true
		}
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // no agent has run here yet
	}
	if err := errors.Join(err, twice); err != nil {
		return err
	}
	var want, got []string
	for key, h := range held {
		want = append(want, fmt.Sprintf("%s of %s/%s", key, h.namespace, h.pod))
	}
	for _, g := range book.Open() {
		got = append(got, fmt.Sprintf("%s of %s/%s", g.Allocation, g.Namespace, g.Pod))
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("open in the usage journal are %q, want %q", got, want)
	}
	return nil
}

// The usage journal is on a disk that fills up: pods come and go as ever, and the node says so.
// When there is room again, the journal has them.
func TestFullJournal(t *testing.T) {
	t.Parallel()
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	ctx := inOrder(t)
	n, err := settled(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.state, "usage")
	t.Cleanup(func() {
		n.end()
		_ = unix.Unmount(dir, 0)
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	n.end()
	kept, err := os.ReadFile(filepath.Join(dir, "0000000001.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	// One page for what was there, one that is taken, and none beside.
	size := (len(kept)+2<<10)/4096*4096 + 8192
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "0000000001.jsonl"), kept, 0o600), os.WriteFile(filepath.Join(dir, "others"), make([]byte, 4096), 0o600)); err != nil {
		t.Fatal(err)
	}
	n.begin(0)
	says := func() bool {
		st, err := n.status(ctx)
		return err == nil && slices.ContainsFunc(st.Conditions, func(c status.Condition) bool { return c.Reason == status.UsageUnwritten })
	}
	n.fullJournal = true
	pods := 0
	for ; !says(); pods++ {
		if pods == 40 {
			t.Fatalf("after %d pods the journal is not full\n%s", pods, n.said())
		}
		p, err := n.admit(ctx, 2, "main")
		if err == nil {
			err = n.run(ctx, p)
		}
		if err != nil {
			t.Fatal(err)
		}
		n.stop(p)
	}
	// It serves on.
	last, err := n.admit(ctx, 4, "main")
	if err == nil {
		err = n.run(ctx, last)
	}
	if err == nil {
		err = n.settle(ctx)
	}
	if err != nil {
		t.Fatalf("with a full disk: %v\n%s", err, n.said())
	}
	if text, err := n.metrics(ctx); err != nil || !strings.Contains(text, "\ngpu_agent_usage_journal_up 0\n") {
		t.Errorf("the metrics do not say that the journal cannot be written: %v", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=1m"); err != nil {
		t.Fatal(err)
	}
	n.fullJournal = false
	if err := n.settle(ctx); err != nil {
		t.Fatalf("with room again: %v\n%s", err, n.said())
	}
	if err := poll(ctx, "the end of the condition", func() error {
		if says() {
			return errors.New("it is still there")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	n.stop(last)
	if wrong := n.complaints(); len(wrong) > 0 {
		t.Error(strings.Join(wrong, "\n"))
	}
	t.Logf("the journal was full after %d pods", pods)
}
