// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// unlistedGrace is for how long the runtime's lists must lack a container before the guard
	// reports it: the container may be about to start or to end.
	unlistedGrace = 5 * time.Second
	// unlistedEvery is how old the list of containers may be after that, while it still lacks one.
	unlistedEvery = 2 * time.Second
	// podOnly begins the ID of what is in a pod's cgroup, but in none of its containers' cgroups.
	podOnly = "pod "
)

// unlisted finds the containers on a GPU that the runtime does not list. It returns how many
// processes they have, and the allowances of those that can be judged.
//
// The runtime does not say what such a container was given. But the kubelet makes its cgroup, which
// names the pod. A container that has more than all containers of its pod may use together is over
// its cap, whichever of them it is. With less it is not judged. Nor is it judged if not all caps of
// its pod are known.
func (e *examiner) unlisted(
	d *gpu.Device, sums map[string]*sum, held allocations, at time.Time,
) (procs int, judged []memcap.Allowance) {
	for _, id := range slices.Sorted(maps.Keys(sums)) {
		t, p := sums[id], place{id, d.UUID}
		if e.containers[id] != nil {
			continue
		}
		s := e.missing[p]
		if s == nil {
			s = &unlistedContainer{first: at, podUID: t.podUID}
			e.missing[p] = s
		}
		s.seen, s.procs = at, t.procs
		// The list is as old as the request for it.
		lacks := e.listed.Sub(s.first)
		if lacks <= 0 {
			continue
		}
		procs += t.procs
		if lacks < unlistedGrace || at.Sub(e.listed) > unlistedGrace {
			continue
		}
		pod, bytes, sure := e.podHas(t.podUID, d.UUID, held)
		if pod != nil && e.isOwn(pod) || e.allocations.Open(d.UUID) || sure && bytes == lib.None {
			continue
		}
		if sure && t.pid != 0 {
			judged = append(judged, memcap.Allowance{Container: id, GPU: d.UUID, Cap: bytes})
		}
		if !s.reported {
			s.reported = true
			e.tellUnlisted(d, id, t, pod, bytes, sure)
		}
	}
	maps.DeleteFunc(e.missing, func(p place, s *unlistedContainer) bool { return p.gpu == d.UUID && !s.seen.Equal(at) })
	return procs, judged
}

// tellUnlisted reports a container that is not listed: in an Event on its pod if that is known,
// otherwise on the node.
func (e *examiner) tellUnlisted(d *gpu.Device, id string, t *sum, pod *node.Container, bytes uint64, sure bool) {
	what := "a container that the container runtime does not list (" + id + ")"
	if t.pid == 0 {
		what = "a process in the pod's cgroup and in none of its containers'"
	}
	message := fmt.Sprintf("%s uses %s of GPU %d (%s)", what, amount(t.bytes), d.Index, d.UUID)
	switch {
	case sure:
		message += fmt.Sprintf("; its limit is %s, the sum of what all containers of its pod may use", amount(bytes))
	default:
		message += "; what it may use is not known, so it has no limit"
	}
	e.log.Warn("a container is not listed",
		"what", message, "reason", unlistedReason, "container", id, "uid", t.podUID)
	if pod != nil {
		e.handler.tell(pod, agentkube.Warning, unlistedReason, message)
		return
	}
	e.handler.tellNode(agentkube.Warning, unlistedReason,
		fmt.Sprintf("%s; its pod has the UID %s", message, t.podUID))
}
