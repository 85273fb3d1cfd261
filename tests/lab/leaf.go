// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MakeLeaves gives each container that starts from now on a cgroup in the unified hierarchy, where the
// machine has cgroups of both versions and the runtime makes none there. It returns what it has to
// say about that. restore ends it.
func (n *Node) MakeLeaves(ctx context.Context) (says string, restore func(context.Context) error, err error) {
	out, err := n.cluster(ctx, nil, "leaves", "make")
	return strings.TrimSpace(string(out)), func(ctx context.Context) error {
		_, err := n.cluster(ctx, nil, "leaves", "none")
		return err
	}, err
}

// Started is a container that has started, by the runtime's word.
type Started struct {
	ID, Pod, Name string
	// Took is how long its start took: its hooks are a part of that.
	Took time.Duration
}

// Started are the containers of the lab's pods that have started, also those that have ended
// since.
func (n *Node) Started(ctx context.Context) ([]Started, error) {
	socket := "/run/containerd/containerd.sock"
	if n.runtime == CRIO {
		socket = "/run/crio/crio.sock"
	}
	conn, err := grpc.NewClient("unix://"+n.File(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	runtime := cri.NewRuntimeServiceClient(conn)
	list, err := runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	var out []Started
	for _, c := range list.Containers {
		if c.Labels["io.kubernetes.pod.namespace"] != PodNamespace {
			continue
		}
		s, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			continue // it was removed since
		}
		if s.Status.StartedAt == 0 {
			continue
		}
		out = append(out, Started{ID: c.Id, Pod: c.Labels["io.kubernetes.pod.name"], Name: c.Labels["io.kubernetes.container.name"],
			Took: time.Duration(s.Status.StartedAt - s.Status.CreatedAt)})
	}
	return out, nil
}

// Book is the most that a container has had of a GPU, in bytes, by the emulated driver's own books.
type Book struct {
	Container string
	GPU       int
	Peak      uint64
}

// Books are those of all containers that have ever had memory.
func (d *Driver) Books(ctx context.Context) ([]Book, error) {
	out, err := d.control(ctx, "show")
	if err != nil {
		return nil, err
	}
	state, err := decode[struct{ Books []Book }](out, "the emulated driver's state")
	return state.Books, err
}

// RunJob makes a Job of so many pods in all, so many of them at the same time, whose failed pods are
// made anew.
func (n *Node) RunJob(ctx context.Context, p Pod, pods, atOnce, retries int) error {
	p.Once = true
	o := object{"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": p.Name},
		"spec": object{"parallelism": atOnce, "completions": pods, "backoffLimit": retries, "template": object{"metadata": object{"labels": p.Labels}, "spec": n.podSpec(p)}}}
	if err := n.api.create(ctx, jobsPath, o); err != nil {
		return fmt.Errorf("make job %s: %w", p.Name, err)
	}
	return nil
}

// AwaitJob waits until a Job has ended, and fails if it failed.
func (n *Node) AwaitJob(ctx context.Context, name string, limit time.Duration) error {
	return Await(ctx, limit, "job "+name, func(ctx context.Context) error {
		s, err := n.JobState(ctx, name)
		switch {
		case err != nil:
			return err
		case s.Ended != "Complete":
			return fmt.Errorf("it has %d failed pods, and its end is %q", s.FailedPods, s.Ended)
		}
		return nil
	})
}
