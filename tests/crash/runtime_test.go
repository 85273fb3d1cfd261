// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"example.com/gpu-agent/tests/fakes"
)

// criRuntime is a container runtime that makes a container only while a CDI file
// defines the devices that the kubelet names.
type criRuntime struct {
	*fakes.Runtime
	cdiDir string

	mu sync.Mutex
	// Guarded by mu:
	serial     int
	containers map[string]*container // by ID
}

// container is one, with the CDI files that its devices came from.
type container struct {
	*cri.Container // its state is the runtime's
	pod            fakes.Pod
	ids            []string          // of its devices
	devices        []string          // of CDI
	files          map[string]string // contents by name
}

func startRuntime(socket, cdiDir string) (*criRuntime, error) {
	r, err := fakes.StartRuntime(socket, agentPod)
	if err != nil {
		return nil, err
	}
	return &criRuntime{Runtime: r, cdiDir: cdiDir, containers: map[string]*container{}}, nil
}

// create makes a container with what Allocate gave for it, or says why a runtime
// would not.
func (r *criRuntime) create(a fakes.Allocation) (id string, err error) {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(r.cdiDir), cdilib.WithAutoRefresh(false))
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.serial++
	c := &container{pod: a.Pod, ids: a.IDs, files: map[string]string{}, Container: &cri.Container{
		Id:       fmt.Sprintf("%s-%s-%d", a.Pod.Name, a.Container, r.serial),
		Metadata: &cri.ContainerMetadata{Name: a.Container}, State: cri.ContainerState_CONTAINER_CREATED,
		Annotations: maps.Clone(a.Answer.Annotations),
	}}
	for _, d := range a.Answer.CdiDevices {
		device := cache.GetDevice(d.Name)
		if device == nil {
			return "", fmt.Errorf("CreateContainerError: unresolvable CDI device %s", d.Name)
		}
		data, err := os.ReadFile(device.GetSpec().GetPath())
		if err != nil {
			return "", err
		}
		c.devices = append(c.devices, d.Name)
		c.files[filepath.Base(device.GetSpec().GetPath())] = string(data)
	}
	r.SetDevices(c.Id, c.devices...)
	r.containers[c.Id] = c
	r.Put(a.Pod, c.Container, cri.ContainerEventType_CONTAINER_CREATED_EVENT)
	return c.Id, nil
}

func (r *criRuntime) start(id string) {
	r.Set(id, cri.ContainerState_CONTAINER_RUNNING, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
}

func (r *criRuntime) exit(id string) {
	r.Set(id, cri.ContainerState_CONTAINER_EXITED, cri.ContainerEventType_CONTAINER_STOPPED_EVENT)
}

// remove forgets a pod's containers.
func (r *criRuntime) remove(p fakes.Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.containers, func(_ string, c *container) bool { return c.pod == p })
	r.Remove(p.UID, cri.ContainerEventType_CONTAINER_DELETED_EVENT)
}

// living returns the pod's containers that are created or running; those of all
// pods with devices for none.
func (r *criRuntime) living(p fakes.Pod) (out []container) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		if c := r.containers[id]; (p == fakes.Pod{} && len(c.files) > 0 || c.pod == p) && r.State(id) != cri.ContainerState_CONTAINER_EXITED {
			out = append(out, *c)
		}
	}
	return out
}
