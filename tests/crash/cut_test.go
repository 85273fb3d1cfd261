// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Of a state file, sampled: so many lengths in all, and this many bytes at its
// start and at its end, where the format is.
const (
	sampled = 64
	edge    = 16
	// program is a size in bytes that no state file has: what is as large is a
	// program that the agent has put there.
	program = 1 << 20
)

// lengths are those that a file of so many bytes is cut to.
func lengths(size int) (out []int) {
	switch {
	case size >= program:
		return []int{0, 1, size / 2, size - 1}
	case *long || size <= sampled+2*edge:
		for n := range size {
			out = append(out, n)
		}
		return out
	}
	for i := range edge {
		out = append(out, i, size-1-i)
	}
	for i := range sampled {
		out = append(out, i*size/sampled)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// TestStateCutAtEachByte cuts each file of the state directory of an agent that
// was killed, and starts the agent again.
func TestStateCutAtEachByte(t *testing.T) {
	m := startMachine(t)
	ctx := inOrder(t)
	n := cutNode(ctx, t, m)
	n.end()
	files, err := names(n.state)
	if err != nil {
		t.Fatal(err)
	}
	whole := map[string][]byte{}
	for _, name := range files {
		if whole[name], err = os.ReadFile(filepath.Join(n.state, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range files {
		began, failures := time.Now(), 0
		cuts := lengths(len(whole[name]))
		for _, size := range cuts {
			if err := n.restartWith(ctx, whole, name, size); err != nil {
				t.Errorf("%s cut to %d of %d bytes: %v\n%s", name, size, len(whole[name]), err, n.said())
				if failures++; failures == maxFailures {
					t.Errorf("%s: given up after %d failures", name, failures)
					break
				}
			}
			n.end()
		}
		t.Logf("%s, %d bytes: cut to %d lengths, %.1f s", name, len(whole[name]), len(cuts), time.Since(began).Seconds())
	}
}

// cutNode is a node of which the agent has everything to remember: a claim of a
// running container, one of a container that is still to be made, a change that
// is done and one that waits for holders.
func cutNode(ctx context.Context, t *testing.T, m *machine) *node {
	t.Helper()
	n := settled(ctx, t, m)
	_, err := n.admit(ctx, 3, "init", "main")
	if err != nil {
		t.Fatal(err)
	}
	at := n.heldIndex()
	n.modes[at], n.modes[(at+1)%gpus] = "whole", "whole"
	if err := errors.Join(n.edit(), n.settle(ctx)); err != nil {
		t.Fatalf("%v\n%s", err, n.said())
	}
	if wrong := n.complaints(); len(wrong) > 0 {
		t.Fatal(strings.Join(wrong, "\n"))
	}
	// An agent that has lost its memory cannot know what was on offer once.
	n.kubelet.mu.Lock()
	n.kubelet.forgets = true
	n.kubelet.mu.Unlock()
	return n
}

// restartWith starts the agent with its files as they were, but for one that is
// cut short.
func (n *node) restartWith(ctx context.Context, whole map[string][]byte, name string, size int) error {
	there, err := names(n.state)
	if err != nil {
		return err
	}
	for _, other := range there {
		if _, kept := whole[other]; !kept {
			if err := os.Remove(filepath.Join(n.state, other)); err != nil {
				return err
			}
		}
	}
	for other, data := range whole {
		path := filepath.Join(n.state, other)
		if other == name {
			data = data[:size]
		}
		if now, err := os.ReadFile(path); err == nil && string(now) == string(data) {
			continue // programs are large
		}
		info, err := os.Stat(path)
		mode := os.FileMode(0o600)
		if err == nil {
			mode = info.Mode()
		}
		if err := os.WriteFile(path, data, mode); err != nil {
			return err
		}
	}
	n.begin(0)
	err = n.settle(ctx)
	if wrong := n.complaints(); len(wrong) > 0 {
		err = errors.Join(err, fmt.Errorf("on the way: %s", strings.Join(wrong, "; ")))
	}
	return err
}
