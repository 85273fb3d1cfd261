// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
)

// renewals are the lists that were sent again to have the checkpoint written.
type renewals struct {
	// resent is when each resource's list was last sent again, and stale the keys that it
	// was for.
	resent map[string]time.Time
	stale  map[string]string
}

// due returns the resources whose lists are to be sent again for these keys, and notes that
// they are.
func (r *renewals) due(stale map[string][]string, now time.Time) (due []string) {
	// A resource that is not stale now may become stale again with the same keys.
	maps.DeleteFunc(r.stale, func(resource, _ string) bool { return stale[resource] == nil })
	for _, resource := range slices.Sorted(maps.Keys(stale)) {
		keys := strings.Join(stale[resource], " ")
		if r.stale[resource] == keys && now.Sub(r.resent[resource]) < resendEvery {
			continue // it was asked for, and this is what came
		}
		r.stale[resource], r.resent[resource] = keys, now
		due = append(due, resource)
	}
	return due
}

// podNames are the names of the pods in the last checkpoint.
type podNames struct {
	of    map[string]workload.Pod // by UID
	asked time.Time               // when the runtime was last asked for them
}

// find finds the names of the pods that the checkpoint knows by UID. It calls more where
// some are missing.
func (p *podNames) find(
	t *Observation, containers []node.Container, more func() (map[string]workload.Pod, bool),
) map[string]workload.Pod {
	names := map[string]workload.Pod{}
	for i := range containers {
		names[containers[i].PodUID] = containers[i].InPod()
	}
	missing := false
	for i := range t.Entries {
		uid := t.Entries[i].PodUID
		if _, ok := names[uid]; ok {
			continue
		}
		if old, ok := p.of[uid]; ok {
			names[uid] = old
		} else {
			missing = true
		}
	}
	if missing {
		if pods, ok := more(); ok {
			for uid, pod := range pods {
				if _, ok := names[uid]; !ok {
					names[uid] = pod
				}
			}
		}
	}
	maps.DeleteFunc(names, func(uid string, _ workload.Pod) bool {
		return !slices.ContainsFunc(t.Entries, func(e node.Entry) bool { return e.PodUID == uid })
	})
	p.of = names
	return names
}

// ask asks the runtime for the names of pods, unless it was asked a moment ago.
func (p *podNames) ask(ctx context.Context, r Runtime, now time.Time) (map[string]workload.Pod, bool) {
	if now.Sub(p.asked) < namesEvery {
		return nil, false
	}
	p.asked = now
	pods, err := r.Pods(ctx)
	return pods, err == nil
}

// users are the containers that have allocations.
type users struct {
	// of has them by the allocation's ID, the first one in front, and asked is when the
	// runtime was asked. unsure says that they may not be all.
	of     map[string][]ledger.Holder
	asked  time.Time
	unsure bool
}

// usersOf are those of an observation, to which the runtime has answered with these containers.
func usersOf(t *Observation, containers []node.Container) users {
	out := users{
		of: make(map[string][]ledger.Holder, len(t.Uses)), asked: t.Asked,
		unsure: slices.ContainsFunc(containers, func(c node.Container) bool { return c.CDIUnknown }),
	}
	for _, u := range t.Uses {
		u.Since = u.Created
		out.of[u.Key] = append(out.of[u.Key], u.Holder)
	}
	for _, all := range out.of {
		slices.SortStableFunc(all, func(a, b ledger.Holder) int { return a.Since.Compare(b.Since) })
	}
	return out
}

// silence is that a witness does not answer.
type silence struct {
	since time.Time // zero while both answer
	err   error     // who did not when they were last asked, nil where both did
}

// note takes note of who has not answered, and says so after SilentFor. held says that
// somebody has something.
func (s *silence) note(asked time.Time, full, held bool, log *slog.Logger) error {
	switch {
	case s.err == nil && !full && !s.since.IsZero():
		// Not everybody has been asked: who was silent may be so still.
	case s.err == nil || !held: // nobody to judge
		if !s.since.IsZero() {
			log.Info("the witnesses answer again", "after", asked.Sub(s.since).Round(time.Millisecond).String())
		}
		s.since = time.Time{}
		return nil
	case s.since.IsZero():
		s.since = asked
		log.Warn("a witness does not answer; allocations stay as they are", "err", s.err)
	}
	if s.err == nil || asked.Sub(s.since) < SilentFor {
		return nil
	}
	return status.Because(status.HoldersUnknown, fmt.Errorf("%w (allocations stay as they are)", s.err))
}

// endings is when containers with allocations ended, by allocation, and when the kubelet
// last let go of something: how long each step took is worth a line in the log.
type endings struct {
	mu sync.Mutex
	// Guarded by mu:
	ended map[string]time.Time
	let   time.Time
}

func (e *endings) add(key string, at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended == nil {
		e.ended = map[string]time.Time{}
	}
	maps.DeleteFunc(e.ended, func(_ string, was time.Time) bool { return at.Sub(was) > endingsKept })
	e.ended[key] = at
}

func (e *endings) release(at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.let = at
}

// anyOf reports whether an allocation whose container ended a moment ago is listed.
func (e *endings) anyOf(listed []node.Holding, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(listed, func(h node.Holding) bool {
		at, ok := e.ended[cdi.Key(h.Resource, h.IDs)]
		return ok && now.Sub(at) < releaseWatch
	})
}

// since is how long ago an allocation's container ended, and the kubelet let go of
// something; "unseen" where nobody heard of it.
func (e *endings) since(key string, now time.Time) (container, release string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	container, release = "unseen", "unseen"
	if at, ok := e.ended[key]; ok {
		container = now.Sub(at).Round(time.Millisecond).String()
		if e.let.After(at) {
			release = now.Sub(e.let).Round(time.Millisecond).String()
		}
	}
	return container, release
}
