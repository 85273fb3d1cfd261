// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	memory = "example.com/gpu-mem"
	whole  = "example.com/gpu"
	small  = "example.com/mig-1g.10gb"
	half   = "example.com/mig-3g.40gb"
	full   = "example.com/mig-7g.80gb"
)

// cluster is a provider's nodes, with the real books.
type cluster struct {
	*placer.Books
	t      *testing.T
	status map[string]*gpunode.Status
	cpu    string
}

func newCluster(t *testing.T) *cluster {
	return &cluster{Books: placer.New(), t: t, status: map[string]*gpunode.Status{}, cpu: "64"}
}

// units is a node with GPUs of so many units.
func (c *cluster) units(name string, free ...int) {
	s := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for i, n := range free {
		s.GPUs = append(s.GPUs, gpunode.GPU{UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: i, API: string(ledger.DevicePlugin), Kind: piece.KindUnits, Resource: memory, Total: n,
			Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}})
	}
	c.set(name, s)
}

// onDemand is a node with one card, with MIG on demand of these profiles.
func (c *cluster) onDemand(name string, profiles ...string) {
	text, err := os.ReadFile("../../tests/testdata/h100-80.json")
	inv := new(gpu.Inventory)
	if err == nil {
		err = json.Unmarshal(text, inv)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	card := gpunode.CardOf(&inv.GPUs[0])
	m := &gpunode.MIG{Card: card.Name, OnDemand: true}
	for _, p := range card.Profiles {
		if slices.Contains(profiles, p.Name) {
			var at []string
			for _, start := range p.Starts {
				at = append(at, fmt.Sprint(start))
			}
			m.Offers = append(m.Offers, gpunode.Offer{Profile: p.Name, Resource: "example.com/mig-" + p.Name, Placements: at, Free: at})
		}
	}
	c.set(name, &gpunode.Status{Cards: []gpunode.Card{*card}, Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}},
		GPUs: []gpunode.GPU{{UUID: "GPU-" + name, API: string(ledger.DevicePlugin), Kind: piece.KindPlacement, MIG: m,
			Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}}}})
}

func (c *cluster) set(name string, s *gpunode.Status) {
	s.Sum()
	c.status[name] = s
	c.SetNode(name, s, true)
}

func (c *cluster) gone(name string) {
	delete(c.status, name)
	c.DeleteNode(name)
}

func (c *cluster) Keep(id string, want map[string]int) map[string]int {
	return c.Books.Keep(id, want, nil)
}

func (c *cluster) Kept(id string) ([]placer.Part, map[string]int, []string) {
	parts, short := c.Books.Kept(id)
	nodes := c.MembersOn(id)
	for _, p := range parts {
		nodes = append(nodes, p.Node)
	}
	slices.Sort(nodes)
	return parts, short, slices.Compact(nodes)
}

func (c *cluster) Labels(nodes []string) map[string]string {
	return map[string]string{"example.com/gpu.node": "true", "example.com/gpu.model": strings.Join(nodes, "-")}
}

func (c *cluster) Lendable() (map[string]int, corev1.ResourceList) {
	devices := map[string]int{}
	for _, s := range c.status {
		for _, r := range s.Resources {
			devices[r.Name] += r.Total
		}
	}
	return devices, corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(c.cpu), corev1.ResourceMemory: resource.MustParse("1Ti"),
		corev1.ResourcePods: resource.MustParse("1000"), corev1.ResourceEphemeralStorage: resource.MustParse("1Ti")}
}

// peers is Liqo's side: slices and tenants.
type peers struct {
	t       *testing.T
	cluster *cluster
	grants  *Grants
	slices  map[string]*unstructured.Unstructured
	tenants map[string]*Tenant
	now     time.Time
	version int
}

func newPeers(t *testing.T) *peers {
	c := newCluster(t)
	return &peers{t: t, cluster: c, grants: NewGrants("example.com", "example.com", c), slices: map[string]*unstructured.Unstructured{},
		tenants: map[string]*Tenant{}, now: time.Unix(1e9, 0)}
}

// ask makes a slice, or changes what it asks for. Liqo accepts whoever asks.
func (p *peers) ask(consumer string, want map[string]any) {
	p.t.Helper()
	p.version++
	o := p.slices[consumer]
	if o == nil {
		o = &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": "gpus", "namespace": "liqo-tenant-" + consumer, "uid": consumer,
				"creationTimestamp": p.now.Add(time.Duration(p.version) * time.Second).UTC().Format(time.RFC3339),
				"labels":            map[string]any{replicatedLabel: "true", originLabel: consumer}},
			"spec":   map[string]any{"consumerClusterID": consumer, "class": Class},
			"status": map[string]any{"conditions": []any{map[string]any{"type": authentication, "status": accepted}}, "authParams": map[string]any{"ca": "x"}},
		}}
		p.slices[consumer] = o
		p.tenants[consumer] = &Tenant{Cluster: consumer, Namespace: "liqo-tenant-" + consumer, Condition: active}
	}
	o = o.DeepCopy()
	o.Object["spec"].(map[string]any)["resources"] = want
	o.SetResourceVersion(fmt.Sprint(p.version))
	p.slices[consumer] = o
}

// change changes an object as others do.
func (p *peers) change(consumer string, by func(o map[string]any)) {
	p.version++
	o := p.slices[consumer].DeepCopy()
	by(o.Object)
	o.SetResourceVersion(fmt.Sprint(p.version))
	p.slices[consumer] = o
}

func (p *peers) read(consumer string) *Slice {
	s, err := ReadSlice(p.slices[consumer])
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

// decide decides, and returns for whom something is to be written.
func (p *peers) decide() (out map[string]*Status) {
	var all []*Slice
	for name := range p.slices {
		all = append(all, p.read(name))
	}
	out = map[string]*Status{}
	for _, d := range p.grants.Decide(all, slices.Collect(maps.Values(p.tenants)), p.now) {
		if d.Status != nil {
			out[d.Slice.Consumer] = d.Status
		}
	}
	return out
}

// write writes what was decided for one.
func (p *peers) write(consumer string, w *Status) {
	o := p.read(consumer).with(w, p.now)
	p.version++
	o.SetResourceVersion(fmt.Sprint(p.version))
	p.slices[consumer] = o
}

// rest decides and writes until nothing is to be written.
func (p *peers) rest() {
	p.t.Helper()
	for range 20 {
		todo := p.decide()
		if len(todo) == 0 {
			return
		}
		for consumer, w := range todo {
			p.write(consumer, w)
		}
	}
	p.t.Fatalf("there is always something to write: %v", p.decide())
}

// later lets time go by.
func (p *peers) later(d time.Duration) {
	p.t.Helper()
	p.now = p.now.Add(d)
	p.rest()
}

// wants wants a slice to say this: "Accepted Granted gpu-mem=40", names without the domain.
func (p *peers) wants(consumer, want string) {
	p.t.Helper()
	s := p.read(consumer)
	got := s.Resources.Status + " " + s.Resources.Reason
	for _, name := range slices.Sorted(maps.Keys(s.Granted)) {
		if short, ours := strings.CutPrefix(string(name), "example.com/"); ours {
			amount := s.Granted[name]
			got += fmt.Sprintf(" %s=%s", short, amount.String())
		}
	}
	if got != want {
		p.t.Fatalf("%s is told %q: %s\nwant %q", consumer, got, s.Resources.Message, want)
	}
}
