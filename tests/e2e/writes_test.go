// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// storm is a pod of the storm, and whether its status is written again and again.
type storm struct {
	pod  lab.Pod
	size int // devices of its largest container
}

func storms() []storm {
	of := func(name string, counts ...int) storm {
		s := storm{pod: lab.Pod{Name: name}, size: slices.Max(counts)}
		for i, n := range counts {
			s.pod.Containers = append(s.pod.Containers, lab.Container{Name: fmt.Sprintf("c%d", i), Resources: map[string]int{lab.Memory: n}})
		}
		return s
	}
	return []storm{of("one", 1), of("two-of-one", 1, 1), of("two", 2), of("six", 6), of("some", 24), of("whole-card", units)}
}

// The kubelet writes the IDs of a container's devices into the pod's status in
// another order each time, and each time counts as a change (kubernetes#142293): a
// pod with more than one device in a container is written at the kubelet's every
// look at it, every 60 to 90 seconds. That is so with the feature gate
// ResourceHealthStatus, which is on by default from 1.36 on; docs/health.md says
// what it costs and what to do. The agent cannot help it: this test is for the docs,
// and fails when a kubelet does it no more.
//
// The kubelet looks every other second; the long form takes the figures, with the
// kubelet's settings as users have them.
func TestPodStatusStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if err := errors.Join(node.DeletePods(ctx), node.SetKubelet(ctx, "")); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	often, span := "syncFrequency: 2s\n", 12*time.Second
	if *long {
		often, span = "", 10*time.Minute
		b.usersStatus()
	}
	b.sub("gate-on", func(b *bench) { b.storm("", often, span) })
	b.sub("gate-off", func(b *bench) {
		// The one gate cannot be without the other.
		b.storm("featureGates: {ResourceHealthStatus: false, ResourceHealthStatusMessage: false}\n", often, span)
	})
}

// storm counts how often pods are written that do nothing.
func (b *bench) storm(gates, often string, span time.Duration) {
	b.Helper()
	b.must(node.SetKubelet(b.ctx, gates+often))
	settings, err := node.KubeletSettings(b.ctx)
	b.must(err)
	b.Logf("the kubelet's gates are %v", settings.FeatureGates)
	b.offers(map[string]int{lab.Memory: gpus * units})
	ctx, cancel := context.WithCancel(b.ctx)
	r, err := node.RecordPods(ctx)
	b.must(err)
	defer r.Wait()
	defer cancel()
	var pods []*lab.RunningPod
	for _, s := range storms() {
		pods = append(pods, b.create(s.pod))
	}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	// The last of what the kubelet has to say of their start.
	quiet := func() bool {
		for _, s := range storms() {
			for _, w := range r.Writes(s.pod.Name, time.Now().Add(-5*time.Second)) {
				if !w.OrderOnly {
					return false
				}
			}
		}
		return true
	}
	began := time.Now()
	b.must(lab.Await(b.ctx, time.Minute, "the pods' start to be written", func(context.Context) error {
		if time.Since(began) < 5*time.Second || !quiet() {
			return errors.New("their status changes still")
		}
		return nil
	}))
	began = time.Now()
	b.must(lab.Holds(b.ctx, span, "while the kubelet looks at its pods", func(context.Context) error { return r.Err() }))
	took := time.Since(began)

	table := &strings.Builder{}
	lines := tabwriter.NewWriter(table, 0, 8, 2, ' ', 0)
	fmt.Fprintln(lines, "POD\tDEVICES\tWRITES\tOF THE ORDER\tPER HOUR\tBYTES OF THE POD")
	for _, s := range storms() {
		writes := r.Writes(s.pod.Name, began)
		order, size := 0, 0
		for _, w := range writes {
			if size = w.Bytes; w.OrderOnly {
				order++
			} else { // at the first look after a pod's start the kubelet fills in resources
				b.Logf("pod %s was written for %v", w.Pod, w.Differs)
			}
		}
		fmt.Fprintf(lines, "%s\t%d\t%d\t%d\t%.0f\t%d\n", s.pod.Name, s.size, len(writes), order, float64(len(writes))/took.Hours(), size)
		switch stormy := gates == "" && s.size > 1; {
		case !stormy && order > 0:
			b.Errorf("pod %s, of %d devices a container, was written %d times in %.0f s: the docs say that it is not", s.pod.Name, s.size, order, took.Seconds())
		case stormy && s.size > 8 && order == 0:
			b.Errorf("pod %s, of %d devices, was not written in %.0f s: the docs say that it is", s.pod.Name, s.size, took.Seconds())
		}
	}
	lines.Flush()
	b.Logf("in %.0f s:\n%s", took.Seconds(), table)
	b.must(node.DeletePods(b.ctx))
}
