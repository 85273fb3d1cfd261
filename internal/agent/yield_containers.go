// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
)

// yieldListed is how old the list of containers may be: the loop can make many rounds in a second.
const yieldListed = 500 * time.Millisecond

// spotContainers finds out which containers have spot allocations. It belongs to the yielder's goroutine.
type spotContainers struct {
	runtime deviceplugin.Runtime
	uses    interface {
		Uses([]node.Container) []deviceplugin.Use
		Knows([]node.Container) bool
		Stranger() error
	}
	belongs func(deviceplugin.Use) bool
	// listed is the runtime's last answer, and asked is when it gave that; zero before the first one.
	listed []node.Container
	asked  time.Time
}

// ask returns the containers of the runtime. The answer is new if due is true: a container may have to be ended.
func (s *spotContainers) ask(ctx context.Context, due bool, now time.Time) ([]node.Container, error) {
	if !due && !s.asked.IsZero() && now.Sub(s.asked) < yieldListed {
		return s.listed, nil
	}
	ctx, cancel := context.WithTimeout(ctx, deviceplugin.RuntimePatience)
	defer cancel()
	list, err := s.runtime.Containers(ctx)
	if err == nil && !s.uses.Knows(list) {
		err = s.uses.Stranger()
	}
	if err != nil {
		return nil, err
	}
	s.listed, s.asked = list, now
	return list, nil
}

// using is a container that has an allocation, with all allocations that it has.
type using struct {
	*node.Container
	has []string
}

// sort returns the containers of each spot allocation that belong to its holder, and the pods that have something
// that is guaranteed, or that this ledger does not know.
func (s *spotContainers) sort(list []node.Container, byID map[string]*ledger.Allocation) (of map[string][]using,
	guaranteed map[workload.Pod]bool) {
	of, guaranteed = map[string][]using{}, map[workload.Pod]bool{}
	named := func(p workload.Pod) workload.Pod { return workload.Pod{Namespace: p.Namespace, Name: p.Name} }
	for _, a := range byID {
		if a.Tier != ledger.Spot {
			for _, p := range a.Pods() {
				guaranteed[named(p)] = true
			}
		}
	}
	for i := range list {
		c := &list[i]
		if c.CDIUnknown {
			guaranteed[named(c.InPod())] = true // it may have anything
		}
		found := s.uses.Uses(list[i : i+1])
		var has []string
		for _, u := range found {
			has = append(has, u.Key)
		}
		for _, u := range found {
			switch a := byID[u.Key]; {
			case a == nil || a.Tier != ledger.Spot:
				guaranteed[named(c.InPod())] = true
			case s.belongs(u):
				of[a.ID] = append(of[a.ID], using{c, has})
			}
		}
	}
	return of, guaranteed
}
