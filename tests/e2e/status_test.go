// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// What the kubelet is set to where nobody sets anything, and so on most users'
// nodes (k8s.io/kubernetes, pkg/kubelet/apis/config/v1beta1/defaults.go).
const (
	usersUpdate = 10 * time.Second
	usersReport = 5 * time.Minute
)

var prompt = flag.Bool("prompt", false, "leave the kubelet as one that looks at its node every second, to compare figures")

// usersStatus gives the kubelet the users' settings for the rest of the test. The
// node of all tests has a kubelet that looks at its node every second, since most
// tests merely wait for what it offers. A figure that depends on when the scheduler
// hears of a change would be too good on such a node: pods that are refused, the
// time until an edit is in allocatable. What prints or asserts one calls this.
func (b *bench) usersStatus() {
	b.Helper()
	if *prompt {
		b.Log("the kubelet looks at its node every second: the figures are no user's")
		return
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := node.PromptStatus(ctx); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	b.must(node.UsersStatus(b.ctx))
	b.kubeletLooks(usersUpdate, usersReport)
}

// looks is what to say beside a figure that depends on usersStatus in a test that
// mostly waits: without -long it is spared that, and says so.
func (b *bench) looks() string {
	b.Helper()
	if *long {
		b.usersStatus()
		return "the kubelet looks at its node every ten seconds, as users' do"
	}
	return "the kubelet looks at its node every second; users' do every ten"
}

// kubeletLooks checks how often the kubelet looks at its node, by its own word.
func (b *bench) kubeletLooks(update, report time.Duration) {
	b.Helper()
	s, err := node.KubeletSettings(b.ctx)
	b.must(err)
	if s.NodeStatusUpdate != update || s.NodeStatusReport != report {
		b.Fatalf("the kubelet looks at its node every %v and reports every %v, want %v and %v", s.NodeStatusUpdate, s.NodeStatusReport, update, report)
	}
}

// An edit is in the node's allocatable, where the scheduler reads, when the kubelet
// looks at its node the next time. How long that takes is measured with the
// settings that users' kubelets have.
func TestFiguresComeFromUsersKubelet(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	b.kubeletLooks(time.Second, time.Minute)
	b.usersStatus()
	b.offers(map[string]int{lab.Memory: gpus * units})
	r := b.record()
	b.hears(r, lab.Memory)
	rng := rand.New(rand.NewPCG(seedOf(b), 13))
	var streams, allocatable []time.Duration
	for n := range count(2, 20) {
		file, resource, devices := allShared, lab.Memory, gpus*units
		if n%2 == 0 {
			file, resource, devices = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n", lab.GPU, gpus
		}
		// Edits come at any moment between two looks.
		b.must(lab.Holds(b.ctx, time.Duration(rng.Int64N(int64(usersUpdate))), "before an edit", func(context.Context) error { return nil }))
		edited := time.Now()
		b.partitions(file)
		var heard time.Time
		b.must(lab.Await(b.ctx, time.Minute, "the edit in the kubelet's stream", func(context.Context) error {
			healthy := 0
			for _, turn := range r.Turns(edited) {
				if turn.Resource == resource && turn.To == "Healthy" {
					healthy, heard = healthy+1, turn.At
				}
			}
			if healthy != devices {
				return fmt.Errorf("%d devices of %d are new", healthy, devices)
			}
			return nil
		}))
		there, err := lab.Moment(b.ctx, time.Minute, 20*time.Millisecond, "the edit in allocatable", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err == nil && s.Allocatable[resource] != devices {
				err = fmt.Errorf("the node offers %v", s.Allocatable)
			}
			return err
		})
		b.must(err)
		streams, allocatable = append(streams, heard.Sub(edited)), append(allocatable, there.Sub(edited))
		b.state("applied")
	}
	b.Logf("from the edit to the kubelet's stream: %s", spread(streams))
	b.Logf("from the edit to the node's allocatable: %s", spread(allocatable))
}

// spread is the least, the middle and the most of some durations.
func spread(d []time.Duration) string {
	d = slices.Sorted(slices.Values(d))
	ms := func(i int) int64 { return d[i].Milliseconds() }
	return fmt.Sprintf("%d ms to %d ms, median %d ms, of %d", ms(0), ms(len(d)-1), ms(len(d)/2), len(d))
}
