// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// TestStartupTaint: a pod waits behind the taint that its node was registered with. The base
// leaves that alone; with the component startup-taint the agent takes it away, and the pod
// runs, with the real kubelet's word in between.
func TestStartupTaint(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	const key = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-agent"
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		_, err := node.Kubectl(ctx, nil, "taint", "node", node.Name, key+"-")
		if err != nil && strings.Contains(err.Error(), "not found") {
			err = nil
		}
		var again error
		if agent, again = deploy(ctx, lab.DeployOptions{Partitions: allShared}); errors.Join(err, again) != nil {
			b.Errorf("clean up: %v", errors.Join(err, again))
		}
	})
	_, err := node.Kubectl(b.ctx, nil, "taint", "node", node.Name, key+"=pending:NoSchedule")
	b.must(err)
	pod := b.pod("waits", lab.Memory, 8)
	says, err := pod.Unschedulable(b.ctx)
	b.must(err)
	if !strings.Contains(says, "untolerated taint") {
		t.Errorf("the pod waits because of %q, want the taint", says)
	}

	began := time.Now()
	agent, err = deploy(b.ctx, lab.DeployOptions{Partitions: allShared, Components: []string{"startup-taint"}})
	b.must(err)
	b.must(lab.Await(b.ctx, waitLong, "the taint to go", func(ctx context.Context) error {
		var n struct {
			Spec struct {
				Taints []struct{ Key, Effect string }
			}
			Status struct {
				Conditions []struct{ Type, Status, Reason string }
			}
		}
		if err := node.Read(ctx, "/api/v1/nodes/"+node.Name, &n); err != nil {
			return err
		}
		if slices.ContainsFunc(n.Spec.Taints, func(t struct{ Key, Effect string }) bool { return t.Key == key }) {
			return errors.New("it is there")
		}
		if !slices.Contains(n.Status.Conditions, struct{ Type, Status, Reason string }{lab.Domain + "/GPUReady", "True", "Offered"}) {
			return fmt.Errorf("it has gone, and the node has the conditions %v: %w", n.Status.Conditions, lab.ErrNever)
		}
		return nil
	}))
	b.must(pod.Running(b.ctx))
	t.Logf("the pod runs %.1f s after the new agent was applied", time.Since(began).Seconds())
}
