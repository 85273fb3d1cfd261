// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// want is what an ask becomes on a node with a given layout: a number of devices of a resource.
type want struct {
	resource string
	n        int
	// memory is the size of all of them together. own is true if it is the resource that was asked
	// for.
	memory gpu.MiB
	own    bool
}

// describe describes what a container must ask for.
func (n *node) describe(w want) string {
	if n.dynamic && !w.own {
		return "a claim of gpu-memory with " + size(w.memory)
	}
	_, short, _ := strings.Cut(w.resource, "/")
	return fmt.Sprintf("%s: %d", short, w.n)
}

// translate finds what each ask becomes on an empty node. It stays as it is if the node offers that
// resource and could serve the ask. Otherwise it becomes the resource with the least memory that
// has enough of it. fits is false if an empty node cannot serve them all. Then out has the
// resources that were asked for, or is nil if the node does not offer one of these.
func (n *node) translate(asks []Ask) (out []want, fits bool) {
	var had []ledger.Allocation
	defer func() {
		for i := range had {
			n.put(&had[i])
		}
	}()
	fits = true
	for _, a := range asks {
		ways, found := n.ways(a), false
		for _, w := range ways {
			if held, ok := n.take(w.resource, w.n); ok {
				had, out, found = append(had, held), append(out, w), true
				break
			}
		}
		switch {
		case found:
		case len(ways) > 0 && ways[0].own:
			out, fits = append(out, ways[0]), false
		default:
			return nil, false
		}
	}
	return out, fits
}

// ways returns the ways to serve an ask, the best first.
func (n *node) ways(a Ask) (out []want) {
	if n.dynamic {
		return n.claims(a)
	}
	for i := range n.offer.Resources {
		r := &n.offer.Resources[i]
		if len(r.Devices) == 0 {
			continue
		}
		if w, ok := n.as(a, r.Kind, r.Devices[0].Placement.Profile); ok {
			w.resource = r.Name
			w.own = r.Kind == a.Kind && r.Name == names.Of(a.Kind, a.Profile)
			out = append(out, w)
		}
	}
	last := func(w want) int {
		if w.own {
			return 0
		}
		return 1
	}
	slices.SortFunc(out, func(x, y want) int {
		return cmp.Or(cmp.Compare(last(x), last(y)), cmp.Compare(x.memory, y.memory),
			strings.Compare(x.resource, y.resource))
	})
	return out
}

// claims returns the ways if GPUs are dynamic: whole GPUs and MIG instances keep their names, and
// memory becomes a claim.
func (n *node) claims(a Ask) []want {
	kind := a.Kind
	if !kind.Dynamic() {
		kind = piece.OfDynamic
	}
	w, ok := n.as(a, kind, a.Profile)
	if !ok {
		return nil
	}
	w.resource, w.own = names.Of(kind, a.Profile), kind != piece.OfDynamic
	return []want{w}
}

// as returns how many devices of a kind an ask needs. ok is false if that kind cannot serve it.
func (n *node) as(a Ask, kind piece.Kind, profile mig.Name) (w want, ok bool) {
	if kind == a.Kind && profile == a.Profile && !kind.Together() {
		return want{n: a.Count, memory: gpu.MiB(a.Count) * n.least(kind, profile)}, true
	}
	each, enough := n.needs(a)
	has := n.least(kind, profile)
	switch {
	case kind.Together(): // all on one GPU
		unit := n.unit()
		if a.Kind.Alone() && a.Count > 1 || !enough || unit == 0 {
			return w, false
		}
		w.n = int((each*gpu.MiB(a.Count) + unit - 1) / unit)
		if a.Kind.Alone() { // all that one GPU has
			w.n = int(each / unit)
		}
		w.memory = gpu.MiB(w.n) * unit
		return w, w.n > 0
	case kind.InMIG():
		return want{n: a.Count, memory: gpu.MiB(a.Count) * has}, n.serves(a, each, enough, profile)
	default:
		return want{n: a.Count, memory: gpu.MiB(a.Count) * has}, enough && has >= each
	}
}

// needs returns how much memory each device of an ask has on this node. enough is false if that is
// not known.
func (n *node) needs(a Ask) (each gpu.MiB, enough bool) {
	switch {
	case a.Kind.Alone():
		for i := range n.inv.GPUs {
			each = max(each, n.inv.GPUs[i].Usable())
		}
	case a.Kind.InMIG():
		each = n.instance(a.Profile)
	default:
		each = a.Memory
	}
	return each, each > 0
}

// serves reports whether instances of a profile can serve each device of an ask. Only the largest
// instance can serve a whole GPU.
func (n *node) serves(a Ask, each gpu.MiB, enough bool, profile mig.Name) bool {
	most := mig.Name{}
	for i := range n.inv.GPUs {
		for _, p := range n.inv.GPUs[i].MIG.Profiles {
			if name, err := mig.Parse(p.Name); err == nil && name.Slices > most.Slices {
				most = name
			}
		}
	}
	switch {
	case profile.Compute != 0:
		return false // parts of an instance share its memory
	case a.Kind.Alone():
		return profile.Attr == "" && profile.Slices == most.Slices
	case a.Kind.InMIG() && profile.Attr != a.Profile.Attr && a.Profile.Attr != "-me",
		!a.Kind.InMIG() && profile.Attr != "":
		return false
	}
	return enough && n.instance(profile) >= each && profile.Slices >= a.Profile.Slices
}

// instance returns the memory of an instance of a profile on this node, 0 if no GPU has it.
func (n *node) instance(profile mig.Name) (memory gpu.MiB) {
	for i := range n.inv.GPUs {
		for _, p := range n.inv.GPUs[i].MIG.Profiles {
			if p.Name == profile.GPUInstance().String() && (memory == 0 || p.Memory < memory) {
				memory = p.Memory
			}
		}
	}
	return memory
}

// least returns the memory that every device of a kind has at least.
func (n *node) least(kind piece.Kind, profile mig.Name) (memory gpu.MiB) {
	switch {
	case kind.InMIG():
		return n.instance(profile)
	case kind.Together():
		return n.unit()
	}
	for i := range n.inv.GPUs {
		d := &n.inv.GPUs[i]
		layout := n.input.Changes.Layouts[d.UUID]
		if layout.Offers && layout.Kind == kind {
			if has := d.Usable() / gpu.MiB(max(1, layout.N)); memory == 0 || has < memory {
				memory = has
			}
		}
	}
	return memory
}

func (n *node) unit() gpu.MiB { return n.plan.Unit }
