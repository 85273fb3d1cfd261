// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
)

var agentPod = fakes.Pod{UID: "agent", Namespace: "gpu-agent", Name: "gpu-agent-test"}

// pod is one container with n devices of a resource after another, the last of
// them the app container.
type pod struct {
	fakes.Pod
	containers []string
	resource   string
	n          int
}

// bind brings a pod to the kubelet once the node has enough for the scheduler to
// send it here. An error is final for the pod.
func (n *node) bind(ctx context.Context, p *pod) error {
	var e fakes.Endpoint
	if err := n.kubelet.Await(ctx, func(all map[string]fakes.Endpoint) error {
		e = all[p.resource]
		if free := n.kubelet.Available(p.resource); !e.Serves() || len(free) < p.n {
			return fmt.Errorf("%d devices of %s are free, and %d wanted", len(free), p.resource, p.n)
		}
		return nil
	}); err != nil {
		return err
	}
	err := n.kubelet.Admit(ctx, p.Pod, p.containers, p.resource, p.n)
	if err != nil {
		n.leave(ctx, &e, err)
		return err
	}
	for _, name := range p.containers {
		if a := n.allocation(p, name); len(a.Answer.GetCdiDevices()) == 0 {
			return fmt.Errorf("Allocate gives %s nothing: %v", p.Name, a.Answer)
		}
	}
	return nil
}

// allocation is what a container was given.
func (n *node) allocation(p *pod, container string) fakes.Allocation {
	for _, a := range n.kubelet.Allocations() {
		if a.Pod == p.Pod && a.Container == container {
			return a
		}
	}
	return fakes.Allocation{}
}

// prepare is the call before each start of a container, once a plugin serves its
// resource.
func (n *node) prepare(ctx context.Context, a fakes.Allocation) error {
	var e fakes.Endpoint
	if err := n.kubelet.Await(ctx, func(all map[string]fakes.Endpoint) error {
		if e = all[a.Resource]; !e.Serves() {
			return fmt.Errorf("no plugin serves %s", a.Resource)
		}
		return nil
	}); err != nil {
		return err
	}
	err := n.kubelet.PreStart(ctx, a)
	switch {
	case err == nil:
	case strings.Contains(err.Error(), ledger.ErrNotOpen.Error()):
		// The agent lives, and says what the container waits for. It is started again, as by the
		// kubelet. That has the same code as a plugin that has ended.
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	default:
		n.leave(ctx, &e, err)
	}
	return err
}

// leave waits, after a call that failed because the plugin's process has ended,
// until that is known. An error of another kind is the plugin's own word; what the
// kubelet has against a pod is not.
func (n *node) leave(ctx context.Context, e *fakes.Endpoint, err error) {
	switch code := status.Code(err); {
	case errors.Is(err, fakes.ErrRefused), over(ctx): // the caller sees the context's end itself
	case code == codes.Unavailable || code == codes.Canceled:
		_ = n.kubelet.Await(ctx, func(all map[string]fakes.Endpoint) error {
			if now := all[e.Resource]; now.Gone == nil && now.Registrations == e.Registrations {
				return errors.New("the plugin's stream is open")
			}
			return nil
		})
	case n.disk.explains(err):
		time.Sleep(100 * time.Millisecond) // the controller's next pod does not come at once
	default:
		n.mu.Lock()
		defer n.mu.Unlock()
		n.wrong = append(n.wrong, fmt.Sprintf("a call of the kubelet's failed: %v", err))
	}
}

// over reports whether a context has ended, or is about to: the server of a call may see its deadline
// a moment before the caller does.
func over(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && time.Until(end) < 100*time.Millisecond
}

// outlived is an entry of the checkpoint for each GPU, of a pod that another plugin
// has given it to and that is no more. It names GPUs as NVIDIA's plugin, its
// replicas and HAMi's do.
func outlived(gpus []emulator.GPUState) (out []fakes.Allocation) {
	for i := range gpus {
		out = append(out, fakes.Allocation{Pod: fakes.Pod{UID: fmt.Sprintf("00000000-0000-4000-9000-%012d", i)}, Container: "main",
			Resource: "nvidia.com/gpu", IDs: []string{gpus[i].UUID + []string{"", "::1", "-0"}[i%3]}})
	}
	return out
}
