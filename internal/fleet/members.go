// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// members are the pods that name a hold, also those that ask for none of the agent's resources. Pods that are being
// deleted or have ended are not among them. A Fleet's lock guards it.
type members struct {
	// of has the pods of each hold by UID, and hold the hold of each pod.
	of   map[string]map[string]holdPod
	hold map[string]string
}

// holdPod is a pod that names a hold.
type holdPod struct {
	// bound is true if the API has the pod on a node, and owned if a controller makes another pod when it is deleted.
	bound, owned bool
}

func newMembers() members {
	return members{of: map[string]map[string]holdPod{}, hold: map[string]string{}}
}

// set notes a pod. hold is the ID of the hold that it names, empty for none.
func (m *members) set(p *corev1.Pod, hold string, over bool) {
	uid := string(p.UID)
	if m.hold[uid] != hold || over {
		m.forget(uid)
	}
	if hold == "" || over {
		return
	}
	if m.of[hold] == nil {
		m.of[hold] = map[string]holdPod{}
	}
	m.hold[uid] = hold
	m.of[hold][uid] = holdPod{bound: p.Spec.NodeName != "", owned: metav1.GetControllerOfNoCopy(p) != nil}
}

// forget notes that a pod is gone.
func (m *members) forget(uid string) {
	hold := m.hold[uid]
	delete(m.hold, uid)
	if delete(m.of[hold], uid); len(m.of[hold]) == 0 {
		delete(m.of, hold)
	}
}

// Members returns how many pods name a hold, how many of these have a node, and how many have a controller that makes
// another pod when one is deleted. It counts pods that ask for none of the agent's resources, too, but no pods that are
// being deleted or have ended. A pod with a reservation has a node, and so has one that is nominated to it.
func (h *Holder) Members(id string) (pods, placed, owned int) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	for uid, m := range h.f.members.of[id] {
		pods++
		if _, at := h.f.books.Pod(uid); m.bound || at != "" {
			placed++
		}
		if m.owned {
			owned++
		}
	}
	return pods, placed, owned
}
