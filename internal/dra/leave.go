// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"
)

// leavePace is how often is looked whether the kubelet has what it was promised. Nobody
// says when its account is written.
const leavePace = 20 * time.Millisecond

// Leave is for the end of the process, and is called while everything still runs. It has
// all devices tainted, so that the scheduler sends nobody here while nobody prepares
// claims, and waits for the pods that it has sent before that: until the kubelet's account
// has what their claims were allocated. The next process takes the taints away.
func (f *FrontEnd) Leave(ctx context.Context) error {
	f.mu.Lock()
	if f.offer == nil || !f.publisher.published() {
		f.mu.Unlock()
		return nil // nobody is sent here
	}
	f.leaves = true
	f.showLocked()
	f.mu.Unlock()
	if err := f.publisher.settled(ctx); err != nil {
		return err
	}
	claims, err := f.API.Claims(ctx, f.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	claims = slices.DeleteFunc(claims, func(c agentkube.Claim) bool { return !c.HasConsumers() || len(wants(&c, f.Driver, f.Node)) == 0 })
	for {
		state, err := f.Kubelet.DRAState()
		if err != nil && !errors.Is(err, gpu.ErrNotFound) {
			return fmt.Errorf("read what the kubelet has prepared: %w", err)
		}
		claims = slices.DeleteFunc(claims, func(c agentkube.Claim) bool { return answered(&state, f.Driver, c.UID) })
		if len(claims) == 0 {
			return nil
		}
		select {
		case <-time.After(leavePace):
		case <-ctx.Done():
			return fmt.Errorf("the kubelet has not had claim %s/%s prepared", claims[0].Namespace, claims[0].Name)
		}
	}
}
