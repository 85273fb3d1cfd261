// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

// Of a state file, sampled: so many lengths in all, and this many bytes at its
// start and at its end, where the format is.
const (
	sampled = 8
	edge    = 5
	// program is a size in bytes that no state file has: what is as large is a
	// program or a library that the agent has put there, or has room for counters.
	program = 64 << 10
)

// cutters is how many nodes cuts are made on at once.
const cutters = 3

// telling is how often a node says how far it has come: with -long there are
// thousands of lengths.
const telling = 30 * time.Second

// cut is a file of the state directory that is cut short.
type cut struct {
	name string
	size int
}

// cuts are those that are made of some files, of which each has so many bytes; with -short
// those that are chosen.
func (c choice) cuts(sizes map[string]int) (out []cut) {
	var all []cut
	var points []kind
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		for _, size := range lengths(sizes[name]) {
			all, points = append(all, cut{name, size}), append(points, kindOf(change{"cut", "/state/" + name}))
		}
	}
	for _, k := range c.of("cut", points) {
		out = append(out, all[k-1])
	}
	return out
}

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
	t.Parallel()
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	triesPoints(t)
	began, ctx := time.Now(), inOrder(t)
	var all sync.WaitGroup
	tally := make([]map[string]int, fewer(cutters))
	for w := range tally {
		all.Go(func() {
			var err error
			if tally[w], err = cutSome(ctx, t, m, w, len(tally)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	sum := map[string]int{}
	for _, done := range tally {
		for name, cuts := range done {
			sum[name] += cuts
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sum)) {
		t.Logf("%s: cut to %d lengths", name, sum[name])
	}
	t.Logf("all files: %.1f s", time.Since(began).Seconds())
}

// cutSome makes every cut of the w-th of so many that make them, on a node of its own. It
// returns how many there were of each file.
func cutSome(ctx context.Context, t *testing.T, m *machine, w, of int) (done map[string]int, err error) {
	n, err := cutNode(ctx, m)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	n.end()
	n.written = map[string]time.Time{}
	files, err := names(n.state)
	if err != nil {
		return nil, err
	}
	whole, sizes := map[string][]byte{}, map[string]int{}
	for _, name := range files {
		if whole[name], err = os.ReadFile(filepath.Join(n.state, name)); err != nil {
			return nil, err
		}
		sizes[name] = len(whole[name])
	}
	all := chosen().cuts(sizes)
	done, failures, told := map[string]int{}, 0, time.Now()
	for at := w; at < len(all); at += of {
		c := all[at]
		if time.Since(told) >= telling {
			told = time.Now()
			t.Logf("%d of %d lengths, now of %s", at, len(all), c.name)
		}
		if err := n.restartWith(ctx, whole, c.name, c.size); err != nil {
			t.Errorf("%s cut to %d of %d bytes: %v\n%s", c.name, c.size, len(whole[c.name]), err, n.said())
			if failures++; failures == maxFailures {
				return done, errors.New("the rest is not tried")
			}
		}
		n.end()
		done[c.name]++
	}
	return done, nil
}

// cutNode is a node of which the agent has everything to remember: an allocation of a
// running container, one of a container that is still to be made, a change that
// is done and one that waits for holders.
func cutNode(ctx context.Context, m *machine) (*node, error) {
	n, err := settled(ctx, m)
	if err != nil {
		return nil, err
	}
	if _, err = n.admit(ctx, 3, "init", "main"); err == nil {
		err = errors.Join(changeHeld(ctx, n), n.settle(ctx))
	}
	if wrong := n.complaints(); err != nil || len(wrong) > 0 {
		err = fmt.Errorf("a change: %w; %s\n%s", err, strings.Join(wrong, "; "), n.said())
		return nil, errors.Join(err, n.close())
	}
	// An agent that has lost its memory cannot know what was on offer once.
	n.kubelet.Forgive()
	return n, nil
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
		info, err := os.Stat(path)
		if err == nil && other != name && len(data) >= program && info.Size() == int64(len(data)) && n.written[other].Equal(info.ModTime()) {
			continue // it is as it was written last, and large
		}
		if now, err := os.ReadFile(path); err == nil && string(now) == string(data) {
			n.written[other] = info.ModTime()
			continue
		}
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
