// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/kube"
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

// stray is a container that uses a GPU and that the runtime does not list. A sandboxed
// runtime has the processes of all of a pod's containers in one that it alone knows.
type stray struct {
	// first is when it was first seen, and seen when it was last.
	first, seen time.Time
	told        bool
	procs       int
	podUID      string
}

// unlisted looks at the containers on a GPU that the runtime does not list: how many
// processes they have, and what those of them may have that can be judged.
//
// What such a container was given nobody says. But the cgroup is the kubelet's and
// tells the pod. Who has more of a GPU than all containers of its pod may have
// together is over the cap, whichever of them it is; less than that is not judged, and
// neither is one of a pod of which not everything is known.
func (g *Guard) unlisted(d *gpu.Device, sums map[string]*sum, holders map[string]holder, at time.Time) (procs int, judged []memcap.Holding) {
	for _, id := range slices.Sorted(maps.Keys(sums)) {
		t, p := sums[id], place{id, d.UUID}
		if g.containers[id] != nil {
			continue
		}
		s := g.strays[p]
		if s == nil {
			s = &stray{first: at, podUID: t.podUID}
			g.strays[p] = s
		}
		s.seen, s.procs = at, t.procs
		// Both by when the list was asked for.
		lacks := g.listed.Sub(s.first)
		if lacks <= 0 {
			continue
		}
		procs += t.procs
		if lacks < unlistedGrace || at.Sub(g.listed) > unlistedGrace {
			continue
		}
		pod, bytes, sure := g.podHas(t.podUID, d.UUID, holders)
		if pod != nil && g.isOwn(pod) || g.w.House.Open(d.UUID) || sure && bytes == lib.None {
			continue
		}
		if sure && t.pid != 0 {
			judged = append(judged, memcap.Holding{Container: id, GPU: d.UUID, Cap: bytes})
		}
		if !s.told {
			s.told = true
			g.tellUnlisted(d, id, t, pod, bytes, sure)
		}
	}
	maps.DeleteFunc(g.strays, func(p place, s *stray) bool { return p.gpu == d.UUID && !s.seen.Equal(at) })
	return procs, judged
}

// tellUnlisted says that a container is not listed: on its pod, if anybody knows that.
func (g *Guard) tellUnlisted(d *gpu.Device, id string, t *sum, pod *node.Container, bytes uint64, sure bool) {
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
	g.log.Warn("a container is not listed", "what", message, "reason", unlistedReason, "container", id, "uid", t.podUID)
	switch {
	case g.w.Cluster == nil:
	case pod != nil:
		g.tell(pod, kube.Warning, unlistedReason, message)
	default:
		g.w.Cluster.Event(kube.Regarding{}, kube.Warning, unlistedReason, fmt.Sprintf("%s; it is of a pod with the UID %s", message, t.podUID))
	}
}

// podHas says what all containers of a pod may have of a GPU together, in bytes,
// and which pod it is: one of its containers, nil where none is listed. Unless that
// is sure it may be more, or nothing.
func (g *Guard) podHas(uid string, u gpu.UUID, holders map[string]holder) (pod *node.Container, bytes uint64, sure bool) {
	keys, named := map[string]bool{}, map[string]bool{}
	for _, c := range g.containers {
		for _, key := range g.keys(c) {
			named[key] = true
			keys[key] = keys[key] || c.PodUID == uid
		}
		if c.PodUID == uid && (pod == nil || c.ID < pod.ID) {
			pod = c
		}
	}
	if uid == "" || pod == nil {
		return nil, 0, false
	}
	held := false
	sure = true
	for key, its := range keys {
		if _, known := holders[key]; its && !known {
			sure = false // given out, and what it is is not known
		}
	}
	for key, h := range holders {
		has, on := h.on(u)
		who := h.claim.Holder
		switch {
		case len(h.caps) != len(h.claim.GPUs()):
			sure = sure && !keys[key]
		case !on:
		case keys[key] || who.Namespace == pod.Namespace && who.Pod == pod.Pod:
			held = true
			if has > lib.None-bytes {
				has = lib.None - bytes
			}
			bytes += has
		case who.Pod == "" && !named[key]:
			sure = false // nobody has said whose it is: it may be this pod's
		}
	}
	return pod, bytes, sure && held
}

// strayed says whether a pod has a container on a GPU that the runtime does not list.
func (g *Guard) strayed(podUID string, u gpu.UUID) bool {
	for p, s := range g.strays {
		if p.gpu == u && s.podUID == podUID && g.listed.After(s.first) {
			return true
		}
	}
	return false
}

// offender is whose a container is that the judge has found guilty: also of one that
// the runtime does not list. It is nil where that is not known.
func (g *Guard) offender(p place, holders map[string]holder) *node.Container {
	if c := g.containers[p.container]; c != nil {
		return c
	}
	s := g.strays[p]
	if s == nil {
		return nil
	}
	pod, _, _ := g.podHas(s.podUID, p.gpu, holders)
	if pod == nil {
		return nil
	}
	return &node.Container{ID: p.container, PodUID: pod.PodUID, Namespace: pod.Namespace, Pod: pod.Pod}
}

// relistFor is how old the list of containers may be that lacks this one.
func (g *Guard) relistFor(id string) time.Duration {
	for p, s := range g.strays {
		if p.container == id && g.listed.Sub(s.first) >= unlistedGrace {
			return unlistedEvery
		}
	}
	return 0
}
