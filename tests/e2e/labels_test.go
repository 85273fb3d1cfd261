// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const (
	nvidiaDomain = "nvidia.com"
	productLabel = nvidiaDomain + "/gpu.product"
	joinedLabel  = lab.Domain + "/gpu.joined"
	lanesLabel   = lab.Domain + "/gpu.nvlink"
	modeLabel    = lab.Domain + "/gpu.mode"
	countLabel   = lab.Domain + "/gpu.count"
)

// labelLife is the labels of a node from an event to the next, as a watch saw them.
type labelLife struct {
	*bench
	recording *lab.LabelRecording
	seen      int // turns that an event was held responsible for
}

// operators are labels of our domain that people set, and the one that says how
// far a change has come, which is there to change.
var operators = []string{lab.NodeLabel, lab.PartitionLabel, lab.StateLabel}

// newTurns are those since the last event, without the operators'.
func (l *labelLife) newTurns() []lab.LabelTurn {
	return slices.DeleteFunc(l.recording.Turns()[l.seen:], func(t lab.LabelTurn) bool { return slices.Contains(operators, t.Name) })
}

// event lets something happen, waits for the labels that are to come of it, and
// checks that nothing else came: each label that may change did so once, all in
// one write, and no other for a moment.
func (l *labelLife) event(what string, act func(), may func(name string) bool, want map[string]string) []lab.LabelTurn {
	l.Helper()
	began := time.Now()
	act()
	l.must(lab.Await(l.ctx, waitLong, "the labels after "+what, func(context.Context) error {
		has := l.recording.Labels()
		var wrong []string
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if has[name] != want[name] {
				wrong = append(wrong, fmt.Sprintf("%s is %q, not %q", name, has[name], want[name]))
			}
		}
		if len(wrong) > 0 {
			return errors.New(strings.Join(wrong, ", "))
		}
		return l.recording.Err()
	}))
	turns := l.newTurns()
	l.seen = len(l.recording.Turns())
	times, writes := map[string]int{}, map[string]bool{}
	for _, t := range turns {
		times[t.Name]++
		writes[t.Version] = true
		if !may(t.Name) {
			l.Errorf("%s: a label that it does not concern has changed: %s", what, t)
		}
		if times[t.Name] > 1 {
			l.Errorf("%s: a label flickers: %s", what, t)
		}
	}
	if len(writes) > 1 {
		l.Errorf("%s: %d labels have changed in %d writes: %v", what, len(times), len(writes), turns)
	}
	l.Logf("%s: %d labels have changed, in %d writes, after %.1f s", what, len(times), len(writes), time.Since(began).Seconds())
	return turns
}

func anyLabel(string) bool { return true }

func noLabel(string) bool { return false }

func labels(names ...string) func(string) bool {
	return func(name string) bool { return slices.Contains(names, name) }
}

// ofPartition are the labels that follow what the partition makes of the GPUs.
func ofPartition(name string) bool {
	rest, ours := strings.CutPrefix(name, lab.Domain+"/gpu.")
	if ours {
		return slices.Contains([]string{"mode", "joined", "nvlink"}, rest)
	}
	rest = strings.TrimPrefix(name, nvidiaDomain+"/")
	return strings.HasPrefix(rest, "mig") || slices.Contains([]string{"gpu.replicas", "gpu.sharing-strategy", "gpu.count",
		"gpu.memory", "gpu.multiprocessors", "gpu.slices.ci", "gpu.slices.gi", "gpu.engines.copy", "gpu.engines.decoder",
		"gpu.engines.encoder", "gpu.engines.jpeg", "gpu.engines.ofa"}, rest)
}

// Labels over the life of a node, by a watch that misses nothing: from the agent's
// first word to its clean-up no label flickers, one that somebody else has set
// stays his, one that somebody takes away comes back, and at the end none is left.
func TestNodeLabels(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepare(t)
	b.swap(machine("dgx-h100"))
	b.must(agent.SetPartitions(b.ctx, allWhole))
	state, err := node.State(b.ctx)
	b.must(err)
	const foreign = "Of-Somebody-Else"
	first := map[string]string{productLabel: foreign}
	for name := range state.Labels {
		if domain, _, _ := strings.Cut(name, "/"); domain == lab.Domain || domain == nvidiaDomain {
			first[name] = ""
		}
	}
	first[productLabel] = foreign
	b.must(node.Label(b.ctx, first))
	b.Cleanup(func() {
		if err := node.Label(context.Background(), map[string]string{productLabel: ""}); err != nil {
			b.Error(err)
		}
	})
	ctx, cancel := context.WithCancel(b.ctx)
	recording, err := node.RecordLabels(ctx, lab.Domain, nvidiaDomain)
	b.must(err)
	b.Cleanup(func() {
		cancel()
		if err := recording.Wait(); err != nil {
			b.Error(err)
		}
	})
	l := &labelLife{bench: b, recording: recording}

	l.event("the agent's start", func() { b.must(agent.Reset(b.ctx, allWhole)) }, anyLabel, map[string]string{
		countLabel: "8", modeLabel: "whole", joinedLabel: "8", lanesLabel: "18", lab.StateLabel: "applied",
		lab.Domain + "/gpu.partition.active": "default", lab.Domain + "/gpu.rdma": "infiniband",
		nvidiaDomain + "/gpu.count": "8", nvidiaDomain + "/gpu.replicas": "1", productLabel: foreign,
	})
	full := recording.Labels()
	l.event("an edit: replicas", func() {
		b.partitions(head + "    - devices: all\n      mode: shared\n      replicas: 4\n")
		b.offersAll(map[string]int{lab.Replicas: 4 * gpus})
	}, ofPartition, map[string]string{modeLabel: "shared", nvidiaDomain + "/gpu.replicas": "4", lab.StateLabel: "applied"})
	l.event("an edit: instances", func() {
		b.partitions(head + "    - devices: [0, 1]\n      mode: mig\n      geometry: {3g.40gb: 1, 1g.10gb: 4}\n    - devices: [2, 3, 4, 5, 6, 7]\n      mode: whole\n")
		b.offersAll(map[string]int{lab.GPU: gpus - 2, lab.MIG("3g.40gb"): 2, lab.MIG("1g.10gb"): 8})
	}, ofPartition, map[string]string{modeLabel: "mixed", joinedLabel: "6", nvidiaDomain + "/mig-3g.40gb.count": "2", lab.StateLabel: "applied"})
	l.event("an edit: whole again", func() {
		b.partitions(allWhole)
		b.offersAll(map[string]int{lab.GPU: gpus})
	}, ofPartition, map[string]string{modeLabel: "whole", joinedLabel: "8", nvidiaDomain + "/mig-3g.40gb.count": "", lab.StateLabel: "applied"})
	if now := recording.Labels(); !maps.Equal(now, full) {
		b.Errorf("after edits to and fro the labels are %v, and were %v", now, full)
	}

	l.event("the agent's kill", func() { b.must(agent.Kill(b.ctx)) }, noLabel, full)
	l.event("the kubelet's restart", func() {
		b.must(node.RestartKubelet(b.ctx))
		b.offersAll(map[string]int{lab.GPU: gpus})
	}, noLabel, full)
	l.event("a lane's failure", func() { b.must(driver.Link(b.ctx, 3, 5, false)) }, labels(lanesLabel), map[string]string{lanesLabel: "17", joinedLabel: "8"})
	s, err := agent.Status(b.ctx)
	b.must(err)
	if !slices.ContainsFunc(s.Topology.Weak, func(w string) bool { return strings.Contains(w, "GPU 3") }) {
		b.Errorf("the status calls weak %q, want GPU 3", s.Topology.Weak)
	}
	l.event("the lane's return", func() { b.must(driver.Link(b.ctx, 3, 5, true)) }, labels(lanesLabel), full)

	// What people do to labels, and the agent then: both of it are changes of that
	// label alone.
	hand := func(what, name, to string, then ...string) {
		b.Helper()
		b.must(node.Label(b.ctx, map[string]string{name: to}))
		want := append([]string{to}, then...)
		var got []string
		b.must(lab.Await(b.ctx, waitLong, what, func(context.Context) error {
			got = nil
			for _, t := range l.newTurns() {
				if t.Name != name {
					return fmt.Errorf("another label has changed: %s: %w", t, lab.ErrNever)
				}
				got = append(got, t.To)
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("%s has become %q, want %q", name, got, want)
			}
			return recording.Err()
		}))
		l.seen = len(recording.Turns())
		b.Logf("%s: %s has become %q", what, name, got)
	}
	const memoryLabel = nvidiaDomain + "/gpu.memory"
	hand("somebody else's value of a label of NVIDIA's", memoryLabel, "4711")
	hand("a label of ours, taken away", countLabel, "", "8")
	hand("somebody else's value of a label of ours", countLabel, "4711", "8")
	hand("a label of NVIDIA's, given back", memoryLabel, "", full[memoryLabel])
	hand("a label that was never ours, given up", productLabel, "", strings.ReplaceAll(driver.GPUs[0].Model, " ", "-"))

	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		err := agent.EndUninstall(ctx)
		if err == nil {
			agent, err = deploy(ctx, lab.DeployOptions{Partitions: allShared})
		}
		if err != nil {
			b.Errorf("deploy the agent again: %v", err)
		}
	})
	gone := map[string]string{}
	for name := range recording.Labels() {
		if name != lab.NodeLabel {
			gone[name] = ""
		}
	}
	l.event("the clean-up", func() {
		b.must(agent.Uninstall(b.ctx))
		b.must(lab.Await(b.ctx, waitLong, "the clean-up", func(ctx context.Context) error {
			clean, says, err := agent.Uninstalled(ctx)
			if err == nil && !clean {
				err = fmt.Errorf("it says %q", says)
			}
			return err
		}))
	}, anyLabel, gone)
}
