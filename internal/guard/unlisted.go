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
	// unlistedGrace is for how long lists of containers must have lacked one before
	// that is told: a container may be about to come or to go.
	unlistedGrace = 5 * time.Second
	// unlistedEvery is how old the list of containers may be while it lacks one, after
	// that time.
	unlistedEvery = 2 * time.Second
	// podOnly begins the name of what is in a pod's cgroup and in no container's.
	podOnly = "pod "
)

// unlisted looks at the containers on a GPU that the runtime does not list: how many
// processes they have, and what those of them may have that can be judged.
//
// What such a container was given nobody says. But the cgroup is the kubelet's and
// tells the pod. Who has more of a GPU than all containers of its pod may have
// together is over the cap, whichever of them it is; less than that is not judged, and
// neither is one of a pod of which not everything is known.
func (e *eye) unlisted(
	d *gpu.Device, sums map[string]*sum, held allocations, at time.Time,
) (procs int, judged []memcap.Allowance) {
	for _, id := range slices.Sorted(maps.Keys(sums)) {
		t, p := sums[id], place{id, d.UUID}
		if e.containers[id] != nil {
			continue
		}
		s := e.strays[p]
		if s == nil {
			s = &stray{first: at, podUID: t.podUID}
			e.strays[p] = s
		}
		s.seen, s.procs = at, t.procs
		// Both by when the list was asked for.
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
		if !s.told {
			s.told = true
			e.tellUnlisted(d, id, t, pod, bytes, sure)
		}
	}
	maps.DeleteFunc(e.strays, func(p place, s *stray) bool { return p.gpu == d.UUID && !s.seen.Equal(at) })
	return procs, judged
}

// tellUnlisted says that a container is not listed: on its pod, if anybody knows that.
func (e *eye) tellUnlisted(d *gpu.Device, id string, t *sum, pod *node.Container, bytes uint64, sure bool) {
	what := "a container that the container runtime does not list (" + id + ")"
	if t.pid == 0 {
		what = "a process in the pod's cgroup and in none of its containers'"
	}
	message := fmt.Sprintf("%s uses %s of GPU %d (%s)", what, amount(t.bytes), d.Index, d.UUID)
	switch {
	case sure:
		message += fmt.Sprintf("; it is held to %s, what all containers of its pod may have together", amount(bytes))
	default:
		message += "; nobody can tell what it may have, so it is held to nothing"
	}
	e.voice.log.Warn("a container is not listed",
		"what", message, "reason", unlistedReason, "container", id, "uid", t.podUID)
	if pod != nil {
		e.hand.tell(pod, agentkube.Warning, unlistedReason, message)
		return
	}
	e.hand.tellNode(agentkube.Warning, unlistedReason,
		fmt.Sprintf("%s; it is of a pod with the UID %s", message, t.podUID))
}
