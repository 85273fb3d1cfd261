// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// Names are the resource names that a node offers.
type Names struct {
	Whole, Units, Replicas string
	// instances is what stands before the name of a MIG profile's resource.
	instances string
}

// ResourceNames returns the names below a resource domain.
func ResourceNames(domain string) *Names {
	return &Names{Whole: domain + "/gpu", Units: domain + "/gpu-mem", Replicas: domain + "/gpu.shared", instances: domain + "/"}
}

// Fixed is every name that does not depend on what GPUs there are: Ours tells
// those of MIG profiles too.
func (n *Names) Fixed() []string { return []string{n.Whole, n.Units, n.Replicas} }

// Ours reports whether a resource is one that the node offers or could offer.
func (n *Names) Ours(resource string) bool {
	_, ok := n.Kind(resource)
	return ok
}

// Of is the name of the resource that a piece is of; p is the profile of a placement.
func (n *Names) Of(k ledger.Kind, p mig.Name) string {
	switch k {
	case ledger.Units:
		return n.Units
	case ledger.Replica:
		return n.Replicas
	case ledger.Placement:
		return n.instances + p.Resource()
	default:
		return n.Whole
	}
}

// Kind is what the devices of a resource stand for, if it is one that the node
// offers or could offer.
func (n *Names) Kind(resource string) (ledger.Kind, bool) {
	switch resource {
	case n.Whole:
		return ledger.Whole, true
	case n.Units:
		return ledger.Units, true
	case n.Replicas:
		return ledger.Replica, true
	}
	if short, ok := strings.CutPrefix(resource, n.instances); ok {
		if _, err := mig.ParseResource(short); err == nil {
			return ledger.Placement, true
		}
	}
	return "", false
}

// KindOf is what the devices of a resource stand for by its short name, whatever its
// domain: the names of a node's resources can have changed.
func KindOf(resource string) (ledger.Kind, bool) {
	_, short, _ := strings.Cut(resource, "/")
	return ResourceNames("").Kind("/" + short)
}

// RecordOf returns the record of devices of which nothing is known but their IDs:
// how much memory their holder may have is not. An error wraps gpu.ErrInvalid: the
// IDs are not of our making.
func RecordOf(resource string, ids []string) (ledger.Record, error) {
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	kind, ok := KindOf(resource)
	if !ok {
		return ledger.Record{}, fmt.Errorf("%s is not a resource of GPUs: %w", resource, gpu.ErrInvalid)
	}
	grants, err := parse(kind, sorted)
	return ledger.Record{Owner: ledger.DevicePlugin, Resource: resource, Grants: grants}, err
}

// parse returns what IDs stand for, as far as they say: units of one GPU together,
// all others each alone, in the order of the IDs.
func parse(kind ledger.Kind, ids []string) ([]ledger.Grant, error) {
	if len(ids) == 0 {
		return nil, fmt.Errorf("no device was named: %w", gpu.ErrInvalid)
	}
	var out []ledger.Grant
	units := map[gpu.UUID][]int{}
	for _, id := range ids {
		g := ledger.Grant{Piece: ledger.Piece{Kind: kind}}
		var err error
		switch kind {
		case ledger.Placement:
			g.GPU, g.Placement.Profile, g.Placement.Start, g.Placement.CI, err = mig.ParseID(id)
			g.Cap = ledger.NoCap
		case ledger.Units:
			var n int
			if g.GPU, n, err = timeslice.ParseID(id); err == nil {
				if units[g.GPU] = append(units[g.GPU], n); len(units[g.GPU]) > 1 {
					continue
				}
			}
		case ledger.Replica:
			g.GPU, g.Replica, err = timeslice.ParseID(id)
		default:
			g.GPU, g.Cap = gpu.UUID(id), ledger.NoCap
			if !strings.HasPrefix(id, "GPU-") || strings.Contains(id, "::") {
				err = fmt.Errorf("device ID %q is not a GPU's: %w", id, gpu.ErrInvalid)
			}
		}
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	for i := range out {
		if n := units[out[i].GPU]; n != nil {
			slices.Sort(n)
			out[i].Units = ledger.SetOf(slices.Compact(n))
		}
	}
	return out, nil
}

// IDs are the devices that grants came from, sorted.
func IDs(grants []ledger.Grant) []string {
	var out []string
	for i := range grants {
		out = append(out, PieceIDs(grants[i].GPU, &grants[i].Piece)...)
	}
	slices.Sort(out)
	return out
}

// PieceIDs are the devices that a piece of a GPU is to the kubelet.
func PieceIDs(u gpu.UUID, p *ledger.Piece) []string {
	switch p.Kind {
	case ledger.Placement:
		return []string{mig.ID(u, p.Placement)}
	case ledger.Units:
		out := make([]string, 0, p.Units.Len())
		for n := range p.Units.All() {
			out = append(out, timeslice.ID(u, n))
		}
		return out
	case ledger.Replica:
		return []string{timeslice.ID(u, p.Replica)}
	default:
		return []string{string(u)}
	}
}
