// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/lab"
)

// subject is a program that is measured.
type subject struct {
	name string
	// shared and whole are its resources for shares of GPUs and for whole ones.
	shared, whole string
	// kubelet is whom it registers with, and gpus how many GPUs it finds.
	kubelet *kubelet
	gpus    int
	// begin starts it with a number of devices on each GPU, 0 for whole GPUs.
	begin func(perGPU int) (*process, error)
}

const (
	agentName     = "gpu-agent"
	agentFileName = "gpu-agent-file"
	watchName     = "gpu-agent-watch-on"
	unwatchedName = "gpu-agent-watch-off"
	emptyName     = "empty"

	watchHTTP = ":9502"

	wholeGPUs  = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n"
	sharedGPUs = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n"

	// usableMiB is what a GPU of gpuModel has for workloads.
	usableMiB = 81559 - 551
)

// machine is all that subjects need to run.
type machine struct {
	kit    *lab.Kit
	work   string // a directory of the run's own
	driver *driver
	api    *apiServer
	// hold is how long a GPU must be without complaint before the agent offers
	// it again, and five times how often it looks; zero for what it does by
	// itself, which is minutes.
	hold time.Duration
}

// newAgent is the agent as its manifests run it: partitions from a ConfigMap,
// the node watched, outcomes patched and Events sent.
func (m *machine) newAgent(k *kubelet) *subject {
	return m.newAgentOf(nodeName, agentName, ":9500", k)
}

// newAgentOf is the agent of a node, which has to be there.
func (m *machine) newAgentOf(node, name, http string, k *kubelet, args ...string) *subject {
	return m.agent(name, http, k, func(partitions string) ([]string, error) {
		m.api.setPartitions(partitions)
		kubeconfig := filepath.Join(m.work, "kubeconfig")
		return append([]string{"--configmap", agentPod.Namespace + "/" + agentConfig, "--node-name", node, "--kubeconfig", kubeconfig}, args...),
			m.api.kubeconfig(kubeconfig)
	})
}

// newFileAgent is the agent with a partition file and without an API server.
func (m *machine) newFileAgent(name, http string, k *kubelet, args ...string) *subject {
	return m.agent(name, http, k, func(partitions string) ([]string, error) {
		file := filepath.Join(m.work, name+".yaml")
		return append([]string{"--config", file}, args...), os.WriteFile(file, []byte(partitions), 0o644)
	})
}

func (m *machine) agent(name, http string, k *kubelet, source func(partitions string) ([]string, error)) *subject {
	return &subject{name: name, shared: lab.Memory, whole: lab.GPU, kubelet: k, gpus: m.driver.gpus, begin: func(perGPU int) (*process, error) {
		partitions, unit := wholeGPUs, 1024
		if perGPU > 0 {
			partitions, unit = sharedGPUs, usableMiB/perGPU
		}
		args, err := source(partitions)
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", name, err)
		}
		return m.startAgent(name, http, k, unit, args...)
	}}
}

// startAgent starts the agent as a program that finds nothing of an earlier one.
func (m *machine) startAgent(name, http string, k *kubelet, unit int, args ...string) (*process, error) {
	if m.hold > 0 {
		args = append(args, "--health-hold", m.hold.String(), "--health-probe", (m.hold / 5).String())
	}
	dir := filepath.Join(m.work, name)
	for _, left := range []string{"cdi", "state/state.json", "state/allocations.journal"} {
		if err := os.RemoveAll(filepath.Join(dir, left)); err != nil {
			return nil, fmt.Errorf("start %s: %w", name, err)
		}
	}
	return start(m.work, name, m.kit.Bin("gpu-agent"), append([]string{"run",
		"--driver-root", m.driver.root, "--kubelet-dir", k.dir, "--pod", agentPod.Namespace + "/" + agentPod.Name,
		"--runtime-endpoint", k.socket(), "--memory-unit", fmt.Sprintf("%dMiB", unit),
		"--state-dir", filepath.Join(dir, "state"), "--cdi-dir", filepath.Join(dir, "cdi"), "--http", http}, args...)...)
}

// newPeer is NVIDIA's device plugin with the settings of its own manifest. Its
// replicas are what it calls time slicing.
func (m *machine) newPeer(k *kubelet) *subject {
	return &subject{name: peerName, shared: "nvidia.com/gpu", whole: "nvidia.com/gpu", kubelet: k, gpus: m.driver.gpus, begin: func(perGPU int) (*process, error) {
		config := "version: v1\n"
		if perGPU > 0 {
			config += fmt.Sprintf("sharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: %d\n", perGPU)
		}
		file := filepath.Join(m.work, "nvidia.yaml")
		if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
			return nil, fmt.Errorf("start %s: %w", peerName, err)
		}
		return start(m.work, peerName, m.kit.Bin(peerName), "--config-file", file,
			"--driver-root-ctr-path", m.driver.root, "--nvidia-driver-root", m.driver.root)
	}}
}

// running is a subject that has registered.
type running struct {
	*subject
	proc *process
	// plugin is as it was when all its devices had come.
	plugin fakes.Endpoint
}

// run starts a subject with a number of devices on each GPU, 0 for whole GPUs,
// and waits until the kubelet has them all.
func (s *subject) run(ctx context.Context, perGPU int) (*running, error) {
	resource, want := s.shared, s.gpus*perGPU
	if perGPU == 0 {
		resource, want = s.whole, s.gpus
	}
	if err := s.kubelet.forget(s.shared, s.whole); err != nil {
		return nil, err
	}
	p, err := s.begin(perGPU)
	if err != nil {
		return nil, err
	}
	e, err := s.kubelet.await(ctx, resource, fmt.Sprintf("%d healthy devices", want), func(e fakes.Endpoint) bool {
		return len(e.Healthy()) == want
	})
	if err != nil {
		p.kill()
		return nil, p.explain(err)
	}
	onGPU := map[string]int{}
	for _, d := range e.Devices {
		onGPU[gpuOf(d.ID)]++
	}
	if len(onGPU) != s.gpus {
		p.kill()
		return nil, fmt.Errorf("%s offers devices of %d GPUs, and there are %d", s.name, len(onGPU), s.gpus)
	}
	return &running{s, p, e}, nil
}

// prefer asks for n of the free devices, where the plugin has an opinion.
func (r *running) prefer(ctx context.Context, free []string, n int) ([]string, error) {
	if !r.plugin.Options.GetGetPreferredAllocationAvailable() {
		return free[:n], nil
	}
	resp, err := r.plugin.Client.GetPreferredAllocation(ctx, preferredRequest(free, n))
	if err != nil {
		return nil, r.proc.explain(fmt.Errorf("%s: prefer %d of %d devices: %w", r.name, n, len(free), err))
	}
	if len(resp.ContainerResponses) != 1 || len(resp.ContainerResponses[0].DeviceIDs) != n {
		return nil, fmt.Errorf("%s: asked which %d devices it prefers, it answers %v", r.name, n, resp)
	}
	return resp.ContainerResponses[0].DeviceIDs, nil
}

func (r *running) allocate(ctx context.Context, ids []string) (*api.ContainerAllocateResponse, error) {
	resp, err := r.plugin.Client.Allocate(ctx, allocateRequest(ids))
	if err != nil {
		return nil, r.proc.explain(fmt.Errorf("%s: allocate %d devices: %w", r.name, len(ids), err))
	}
	if len(resp.ContainerResponses) != 1 || len(resp.ContainerResponses[0].CdiDevices)+len(resp.ContainerResponses[0].Envs) == 0 {
		return nil, fmt.Errorf("%s: Allocate gives a container nothing: %v", r.name, resp)
	}
	return resp.ContainerResponses[0], nil
}

// prepare is the call before a container starts, to plugins that want it.
func (r *running) prepare(ctx context.Context, ids []string) error {
	if !r.plugin.Options.GetPreStartRequired() {
		return nil
	}
	if _, err := r.plugin.Client.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: ids}); err != nil {
		return r.proc.explain(fmt.Errorf("%s: prepare a container: %w", r.name, err))
	}
	return nil
}

// give asks for both calls that a container has before it starts.
func (r *running) give(ctx context.Context, ids []string) error {
	if _, err := r.allocate(ctx, ids); err != nil {
		return err
	}
	return r.prepare(ctx, ids)
}
