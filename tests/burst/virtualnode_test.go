// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/tests/lab"
)

// host is a site's node with its agent, which chooses devices as the agent does.
type host struct {
	name, site string
	told       *gpunode.Card
	card       *mig.Card
	chips      []chip
	// written is the GPUNode, and due when it is written next, zero if it need not be.
	written *gpunode.Status
	due     time.Time
}

// chip is a GPU of a kind. Held has the Job of each device.
type chip struct {
	kind *Kind
	uuid gpu.UUID
	held map[string]string
}

// newHosts has the GPUs of both sites, half of each kind.
func newHosts(t *testing.T) (hosts [2]*host) {
	t.Helper()
	inv := new(gpu.Inventory)
	text, err := os.ReadFile("../testdata/a100-80.json")
	if err == nil {
		err = json.Unmarshal(text, inv)
	}
	if err != nil {
		t.Fatal(err)
	}
	card, err := mig.NewCard(&inv.GPUs[0].MIG)
	if err != nil {
		t.Fatal(err)
	}
	for site, n := range gpus {
		h := &host{name: Sites[site] + "-1", site: Sites[site], told: gpunode.CardOf(&inv.GPUs[0]), card: card}
		for i := range n {
			kind := []*Kind{Shares, Instances}[2*i/n]
			uuid := gpu.UUID(fmt.Sprintf("GPU-%s-%d", Sites[site], i))
			h.chips = append(h.chips, chip{kind, uuid, map[string]string{}})
		}
		hosts[site] = h
	}
	return hosts
}

func (h *host) node() *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: h.name, Labels: map[string]string{
		corev1.LabelHostname: h.name, lab.Domain + "/gpu.site": h.site}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return n
}

// placements are a GPU's placements that pods have, and free those that can be had.
func (h *host) placements(c *chip) (standing, free []mig.Placement) {
	for _, p := range h.card.Placements() {
		if c.held[mig.ID(c.uuid, p)] != "" {
			standing = append(standing, p)
		}
	}
	for _, p := range h.card.Placements() {
		if h.card.Fits(standing, p) {
			free = append(free, p)
		}
	}
	return standing, free
}

func resourceOf(p mig.Placement) string {
	return "mig-" + strings.ReplaceAll(p.Profile.String(), "+", ".")
}

// admit has the agent choose devices for a Job's pod. The error is why it refuses.
func (h *host) admit(job string, of Piece) (ids []string, err error) {
	var units []string
	var offers []mig.Offer
	var places []mig.Place
	for i := range h.chips {
		c := &h.chips[i]
		if c.kind == Shares {
			for n := range UnitsPerGPU {
				if id := timeslice.ID(c.uuid, n); c.held[id] == "" {
					units = append(units, id)
				}
			}
			continue
		}
		standing, free := h.placements(c)
		offers = append(offers, mig.Offer{GPU: c.uuid, Card: h.card, Pinned: standing})
		for _, p := range free {
			if resourceOf(p) == of.Resource {
				places = append(places, mig.Place{GPU: c.uuid, Placement: p})
			}
		}
	}
	if of.Kind == Shares {
		ids, err = timeslice.PreferUnits(units, nil, of.Count, nil)
	} else if places, err = mig.Prefer(offers, places, nil, of.Count); err == nil {
		for _, p := range places {
			ids = append(ids, mig.ID(p.GPU, p.Placement))
		}
	}
	for _, id := range ids {
		for i := range h.chips {
			if strings.HasPrefix(id, string(h.chips[i].uuid)+"::") {
				h.chips[i].held[id] = job
			}
		}
	}
	return ids, err
}

// end takes everything from a Job.
func (h *host) end(job string) {
	for i := range h.chips {
		for id, of := range h.chips[i].held {
			if of == job {
				delete(h.chips[i].held, id)
			}
		}
	}
}

// used is how many GPUs somebody has a part of.
func (h *host) used() (n int) {
	for _, c := range h.chips {
		if len(c.held) > 0 {
			n++
		}
	}
	return n
}

// holders are the Jobs with a piece, and where it begins, as of an agent's status.
func (h *host) holders() map[string]int {
	has := map[string]int{}
	for i := range h.chips {
		for id, job := range h.chips[i].held {
			has[job] = -1
			for _, p := range h.card.Placements() {
				if mig.ID(h.chips[i].uuid, p) == id {
					has[job] = p.Start
				}
			}
		}
	}
	return has
}

// says is what the agent would write into the GPUNode.
func (h *host) says() *gpunode.Status {
	s := &gpunode.Status{HoldersIn: gpunode.InPods, Cards: []gpunode.Card{*h.told},
		Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for i := range h.chips {
		c := &h.chips[i]
		g := gpunode.GPU{UUID: string(c.uuid), Index: i, Mode: "mig", API: "device-plugin", Kind: piece.KindPlacement,
			Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}}
		if c.kind == Instances {
			g.MIG = h.instances(c)
		} else {
			var used []int
			for n := range UnitsPerGPU {
				if c.held[timeslice.ID(c.uuid, n)] != "" {
					used = append(used, n)
				}
			}
			g.Mode, g.Kind, g.Resource = "shared", piece.KindUnits, lab.Memory
			g.Total, g.Used = UnitsPerGPU, piece.SetOf(used)
			g.Free, g.Largest = UnitsPerGPU-len(used), UnitsPerGPU-len(used)
		}
		s.GPUs = append(s.GPUs, g)
	}
	s.Sum()
	return s
}

// instances is what the GPUNode says of a GPU with MIG.
func (h *host) instances(c *chip) *gpunode.MIG {
	m := &gpunode.MIG{Card: h.told.Name, OnDemand: true}
	standing, free := h.placements(c)
	for _, p := range standing {
		m.Used = append(m.Used, p.String())
	}
	for _, p := range h.card.Placements() {
		profile, at := p.Profile.String(), fmt.Sprint(p.Start)
		i := slices.IndexFunc(m.Offers, func(o gpunode.Offer) bool { return o.Profile == profile })
		if i < 0 {
			i = len(m.Offers)
			m.Offers = append(m.Offers, gpunode.Offer{Profile: profile, Resource: lab.Domain + "/" + resourceOf(p)})
		}
		o := &m.Offers[i]
		if o.Placements = append(o.Placements, at); slices.Contains(free, p) {
			o.Free, o.Largest = append(o.Free, at), 1
		}
	}
	return m
}

// changed has the agent write its GPUNode, as soon as the change is worth it.
func (w *world) changed(h *host) {
	wait := time.Minute
	switch h.says().Since(h.written, time.Now()) {
	case gpunode.Same:
		return
	case gpunode.News:
		wait = 1500 * time.Millisecond
	case gpunode.Occupancy:
	}
	if at := time.Now().Add(wait); h.due.IsZero() || at.Before(h.due) {
		h.due = at
		w.exactly(wait, func() {
			if h.due.Equal(at) {
				w.publish(h)
			}
		})
	}
}

// publish writes the GPUNode.
func (w *world) publish(h *host) {
	now := h.says()
	now.Since(h.written, time.Now())
	h.due, h.written = time.Time{}, now
	if err := w.fleet.SetGPUNode(h.name, now); err != nil {
		w.t.Error(err)
	}
}
