// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const head = "version: v1\npartitions:\n  default:\n"

// A node moves from NVIDIA's device plugin to the agent (docs/migrate-from-nvidia.md):
// the GPUs come over a while after the plugin has gone, those that its pods have
// when these end. The kubelet rewrites its checkpoint for neither: its entry of a
// pod that has ended stays for five minutes, or for good.
func TestMigration(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const peer, theirs = "nvidia-device-plugin", "nvidia.com/gpu"
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	program, err := kit.BuildPeer(b.ctx)
	b.must(err)
	b.must(node.Start(b.ctx, peer, program, "--driver-root-ctr-path", "/", "--nvidia-driver-root", "/"))
	stop := sync.OnceValue(func() error { return node.Stop(context.Background(), peer) })
	b.Cleanup(func() {
		if err := stop(); err != nil {
			b.Error(err)
		}
	})
	b.must(node.AwaitAllocatable(b.ctx, map[string]int{theirs: gpus}))
	ended, stays := b.pod("ended", theirs, 2), b.pod("stays", theirs, 1)
	b.must(ended.Running(b.ctx))
	b.must(stays.Running(b.ctx))
	b.offers(nil)
	b.must(ended.Delete(b.ctx))
	b.must(ended.Gone(b.ctx))

	comeOver := func(after string, want int) {
		b.Helper()
		began := time.Now()
		at, err := lab.Moment(b.ctx, 4*time.Minute, time.Second, "the GPUs to come over", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err == nil && s.Allocatable[lab.Memory] != want*units {
				err = fmt.Errorf("the node offers %d units, want %d", s.Allocatable[lab.Memory], want*units)
			}
			return err
		})
		b.must(err)
		b.Logf("%s, the node offers the units of %d GPUs after %.0f s", after, want, at.Sub(began).Seconds())
	}
	b.must(stop())
	comeOver("after the end of NVIDIA's plugin", gpus-1)
	if message := b.state("failed"); !strings.Contains(message, stays.String()+" has it as "+theirs) {
		b.Errorf("the node says %q, want whose GPU the last one is", message)
	}
	b.must(stays.Delete(b.ctx))
	b.must(stays.Gone(b.ctx))
	comeOver("after the end of the pod that was left", gpus)
	b.state("applied")
}

// cleanedUp waits for the clean-up, which must leave nothing of the agent but what its
// operator has set.
func (b *bench) cleanedUp() {
	b.Helper()
	b.must(lab.Await(b.ctx, waitLong, "the clean-up", func(ctx context.Context) error {
		clean, says, err := agent.Uninstalled(ctx)
		if err == nil && !clean {
			err = fmt.Errorf("it says %q", says)
		}
		return err
	}))
	if files, err := agent.CDIFiles(b.ctx); err != nil || len(files) > 0 {
		b.Errorf("the CDI files are %v (%v), want none", files, err)
	}
	for _, dir := range []string{lab.StateDir, "/var/lib/kubelet/device-plugins/"} {
		names, err := node.ListFiles(dir)
		b.must(err)
		for _, name := range names {
			if dir == lab.StateDir || strings.HasPrefix(name, lab.Domain) {
				b.Errorf("%s%s is left behind", dir, name)
			}
		}
	}
	s, err := node.State(b.ctx)
	b.must(err)
	operators := map[string]bool{lab.NodeLabel: true, lab.PartitionLabel: true}
	for key, value := range s.Labels {
		if strings.HasPrefix(key, lab.Domain+"/") != operators[key] {
			b.Errorf("the node has the label %s=%s: of ours only the operator's should be there", key, value)
		}
	}
	for key, value := range s.Annotations {
		if strings.HasPrefix(key, lab.Domain+"/") {
			b.Errorf("the node has the annotation %s=%s", key, value)
		}
	}
	for kind, c := range s.Conditions {
		if strings.HasPrefix(kind, lab.Domain+"/") {
			b.Errorf("the node has the condition %s: %s", kind, c)
		}
	}
}
