// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// row is how the device-plugin API represents pieces of one kind.
type row struct {
	// ids returns the devices that make up a piece of a GPU.
	ids func(u gpu.UUID, p piece.Piece) []string
	// all returns the devices of a GPU that is divided like this.
	all func(u gpu.UUID, of piece.Division) []string
	// read returns the piece of one device. It is nil if join makes pieces of several devices. The
	// error wraps gpu.ErrInvalid.
	read func(id string) (gpu.UUID, piece.Piece, error)
	// join makes one piece of all the devices that a request has on one GPU, by their numbers in
	// ascending order. It is nil if each device is a piece by itself.
	join   func(numbers []int) piece.Piece
	prefer func(p *preference) ([]string, error)
	// together returns an error if devices that may be given out one by one may not be given out
	// together.
	together func(f *FrontEnd, r *Resource, ids []string) error
}

// rows has a row for each kind of piece.
//
//exhaustive:enforce
var rows = map[piece.Kind]row{
	piece.KindWhole: {
		ids:  func(u gpu.UUID, _ piece.Piece) []string { return []string{string(u)} },
		all:  func(u gpu.UUID, _ piece.Division) []string { return []string{string(u)} },
		read: readWhole,
		prefer: func(p *preference) ([]string, error) {
			s := p.supply()
			out, err := s.whole(p.n, p.offer.Topology, untouched(p.front.ledger, p.of))
			return out, s.explain(p.of, err)
		},
		together: func(*FrontEnd, *Resource, []string) error { return nil },
	},
	piece.KindUnits: {
		ids:  numbered,
		all:  allNumbered,
		join: func(numbers []int) piece.Piece { return piece.Units{Set: piece.SetOf(numbers)} },
		prefer: func(p *preference) ([]string, error) {
			s := p.supply()
			out, err := s.units(p.n, rank(p.front.ledger, p.offer, p.of))
			return out, s.explain(p.of, err)
		},
		together: func(_ *FrontEnd, r *Resource, ids []string) error {
			_, err := timeslice.OneGPU(ids)
			return r.withCapacity(err)
		},
	},
	piece.KindReplica: {
		ids: numbered,
		all: allNumbered,
		read: func(id string) (gpu.UUID, piece.Piece, error) {
			u, n, err := timeslice.ParseID(id)
			return u, piece.Replica{Number: n}, err
		},
		prefer: func(p *preference) ([]string, error) {
			s := p.supply()
			if p.n > 1 {
				if err := s.apart(p.offer.Compute); err != nil {
					return nil, err
				}
			}
			out, err := s.replicas(p.n, rank(p.front.ledger, p.offer, p.of))
			return out, s.explain(p.of, err)
		},
		together: func(_ *FrontEnd, r *Resource, ids []string) error {
			_, err := timeslice.DistinctGPUs(ids)
			return r.withCapacity(err)
		},
	},
	piece.KindPlacement: {
		ids: func(u gpu.UUID, p piece.Piece) []string { return []string{mig.ID(u, piece.At(p))} },
		all: func(u gpu.UUID, of piece.Division) []string {
			out := make([]string, len(of.Placements))
			for i, at := range of.Placements {
				out[i] = mig.ID(u, at)
			}
			return out
		},
		read: func(id string) (gpu.UUID, piece.Piece, error) {
			u, profile, start, ci, err := mig.ParseID(id)
			return u, piece.Instance(mig.Placement{Profile: profile, Start: start, CI: ci}), err
		},
		prefer: func(p *preference) ([]string, error) {
			return p.front.preferPlacements(p.offer, p.of, p.available, p.must, p.n)
		},
		together: func(f *FrontEnd, r *Resource, ids []string) error {
			if len(ids) < 2 {
				return nil
			}
			return fitTogether(f.ledger, r, ids)
		},
	},
}

// readWhole reads the ID of a whole GPU, which is the GPU's UUID.
func readWhole(id string) (gpu.UUID, piece.Piece, error) {
	if !strings.HasPrefix(id, "GPU-") || strings.Contains(id, "::") {
		return "", nil, fmt.Errorf("device ID %q is not a GPU's: %w", id, gpu.ErrInvalid)
	}
	return gpu.UUID(id), piece.Whole{}, nil
}

func numbered(u gpu.UUID, p piece.Piece) []string { return idsOf(u, p.Numbers()) }

func allNumbered(u gpu.UUID, of piece.Division) []string {
	if len(of.Alone) > 0 {
		return idsOf(u, of.Alone)
	}
	if of.N <= 0 {
		return nil
	}
	return idsOf(u, piece.Set{{First: 0, Last: of.N - 1}})
}

func idsOf(u gpu.UUID, numbers piece.Set) []string {
	out := make([]string, 0, numbers.Len())
	for n := range numbers.All() {
		out = append(out, timeslice.ID(u, n))
	}
	return out
}

// Names gives the resource names of a node.
type Names struct {
	// prefix is the resource domain with a slash, for example "example.com/".
	prefix string
}

// ResourceNames returns the names in a resource domain.
func ResourceNames(domain string) *Names { return &Names{domain + "/"} }

// InTier returns the name by which pods ask for a resource's devices in a tier.
func InTier(resource string, t ledger.Tier) string {
	if t == ledger.Spot {
		return piece.InSpot(resource)
	}
	return resource
}

// TierOf returns the tier of a resource, and the name of the same devices in the guaranteed tier.
func TierOf(resource string) (t ledger.Tier, guaranteed string) {
	if name, spot := piece.OfSpot(resource); spot {
		return ledger.Spot, name
	}
	return ledger.Guaranteed, resource
}

// HasSpot reports whether pieces of a kind can be offered to spot pods.
func HasSpot(k piece.Kind) bool { return k.HasSpot() }

// Fixed returns the names that do not depend on the node's GPUs: all but those of MIG profiles,
// which Ours knows too.
func (n *Names) Fixed() (out []string) {
	for _, k := range piece.Kinds() {
		if k.Short() == "" {
			continue
		}
		out = append(out, n.Of(k, mig.Name{}))
		if HasSpot(k) {
			out = append(out, InTier(n.Of(k, mig.Name{}), ledger.Spot))
		}
	}
	return out
}

// Ours reports whether a resource is one that this agent offers or could offer.
func (n *Names) Ours(resource string) bool {
	_, ok := n.Kind(resource)
	return ok
}

// Of returns the name of the guaranteed resource for a kind of piece. p is the profile of a MIG instance.
func (n *Names) Of(k piece.Kind, p mig.Name) string {
	if k.InMIG() {
		return n.OfProfile(p)
	}
	return n.prefix + k.Short()
}

// OfProfile returns the name of the resource for a MIG profile's instances.
func (n *Names) OfProfile(p mig.Name) string { return n.prefix + p.Resource() }

// Kind returns the kind of a resource's devices. ok is false if the node does not and could not
// offer the resource.
func (n *Names) Kind(resource string) (piece.Kind, bool) {
	short, ok := strings.CutPrefix(resource, n.prefix)
	if !ok {
		return "", false
	}
	tier, short := TierOf(short)
	var instances piece.Kind
	for _, k := range piece.Kinds() {
		switch {
		case k.InMIG():
			instances = k
		case k.Short() == short:
			return k, tier == ledger.Guaranteed || HasSpot(k)
		}
	}
	if _, err := mig.ParseResource(short); err != nil {
		return "", false
	}
	return instances, true
}

// KindOf returns the kind of a resource's devices from its short name, in any domain: the domain of
// a node's resources may have changed.
func KindOf(resource string) (piece.Kind, bool) {
	_, short, _ := strings.Cut(resource, "/")
	return ResourceNames("").Kind("/" + short)
}

// RecordOf returns a record made from device IDs alone. It lacks what IDs do not tell, such as the
// memory limit. The error wraps gpu.ErrInvalid if the IDs are not the agent's.
func RecordOf(resource string, ids []string) (ledger.Record, error) {
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	kind, ok := KindOf(resource)
	if !ok {
		return ledger.Record{}, fmt.Errorf("%s is not a resource of GPUs: %w", resource, gpu.ErrInvalid)
	}
	grants, err := parse(kind, sorted)
	tier, _ := TierOf(resource)
	return ledger.Record{Owner: ledger.DevicePlugin, Tier: tier, Resource: resource, Grants: grants}, err
}

// parse returns the grants for device IDs, as far as the IDs tell. If the kind joins the devices of
// one GPU, there is one grant for each GPU. Otherwise there is one for each ID, in their order.
func parse(kind piece.Kind, ids []string) ([]ledger.Grant, error) {
	if len(ids) == 0 {
		return nil, fmt.Errorf("no device was named: %w", gpu.ErrInvalid)
	}
	row, ok := rows[kind]
	if !ok {
		return nil, fmt.Errorf("%w: %w", piece.UnknownKind{Word: kind}, gpu.ErrInvalid)
	}
	if row.join != nil {
		return row.joined(ids)
	}
	var out []ledger.Grant
	for _, id := range ids {
		u, p, err := row.read(id)
		if err != nil {
			return nil, err
		}
		out = append(out, grantOf(u, p))
	}
	return out, nil
}

// joined is parse for kinds that join the devices of one GPU into one piece. A request may have
// thousands of devices.
func (r *row) joined(ids []string) ([]ledger.Grant, error) {
	var of []gpu.UUID // mostly a single one
	numbers := make([][]int, 0, 1)
	for _, id := range ids {
		u, n, err := timeslice.ParseID(id)
		if err != nil {
			return nil, err
		}
		i := slices.Index(of, u)
		if i < 0 {
			i, of, numbers = len(of), append(of, u), append(numbers, make([]int, 0, len(ids)))
		}
		numbers[i] = append(numbers[i], n)
	}
	out := make([]ledger.Grant, len(of))
	for i := range of {
		slices.Sort(numbers[i])
		out[i] = grantOf(of[i], r.join(slices.Compact(numbers[i])))
	}
	return out, nil
}

// grantOf returns a grant for a piece whose size and memory limit are not known yet.
func grantOf(u gpu.UUID, p piece.Piece) ledger.Grant {
	g := ledger.Grant{GPU: u}
	g.Piece, g.Cap = p.In(piece.Share{})
	return g
}

// IDs returns the devices that grants came from, sorted. A grant of a kind that this version does
// not know adds none.
func IDs(grants []ledger.Grant) []string {
	var out []string
	for i := range grants {
		out = append(out, pieceIDs(grants[i].GPU, grants[i].Piece)...)
	}
	slices.Sort(out)
	return out
}

// known reports whether this version knows the kinds of all grants.
func known(grants []ledger.Grant) bool {
	return !slices.ContainsFunc(grants, func(g ledger.Grant) bool { return !g.Kind().Known() })
}

func pieceIDs(u gpu.UUID, p piece.Piece) []string {
	if row, ok := rows[p.Kind()]; ok {
		return row.ids(u, p)
	}
	return nil
}

// DivisionIDs returns the device IDs of a GPU that is divided like this.
func DivisionIDs(of piece.Division, u gpu.UUID) []string {
	if row, ok := rows[of.Kind]; ok {
		return row.all(u, of)
	}
	return nil
}
