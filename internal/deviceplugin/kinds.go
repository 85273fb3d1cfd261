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

// row is how the kubelet's protocol has pieces of one kind.
type row struct {
	// ids are the devices that a piece of a GPU is.
	ids func(u gpu.UUID, p piece.Piece) []string
	// all are the devices of a GPU that is divided so.
	all func(u gpu.UUID, of piece.Division) []string
	// read returns the piece that a device is, nil where join makes pieces. The error wraps gpu.ErrInvalid.
	read func(id string) (gpu.UUID, piece.Piece, error)
	// join makes one piece of the devices that a request has of one GPU, by their numbers, ascending; nil where each
	// device is a piece.
	join func(numbers []int) piece.Piece
	// prefer chooses devices for a request.
	prefer func(p *preference) ([]string, error)
	// together checks that devices make sense together, which could be had each for itself.
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
			return out, s.told(p.of, err)
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
			return out, s.told(p.of, err)
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
			out, err := s.replicas(p.n, rank(p.front.ledger, p.offer, p.of))
			return out, s.told(p.of, err)
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

// readWhole reads the ID of a whole GPU, which is its UUID.
func readWhole(id string) (gpu.UUID, piece.Piece, error) {
	if !strings.HasPrefix(id, "GPU-") || strings.Contains(id, "::") {
		return "", nil, fmt.Errorf("device ID %q is not a GPU's: %w", id, gpu.ErrInvalid)
	}
	return gpu.UUID(id), piece.Whole{}, nil
}

// numbered are the IDs of devices that are told apart by their numbers.
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

// Names are the resource names that a node offers.
type Names struct {
	// before is what stands before a short name.
	before string
}

// ResourceNames returns the names below a resource domain.
func ResourceNames(domain string) *Names { return &Names{domain + "/"} }

// Fixed is every name that does not depend on what GPUs there are: Ours tells
// those of MIG profiles too.
func (n *Names) Fixed() (out []string) {
	for _, k := range piece.Kinds() {
		if k.Short() != "" {
			out = append(out, n.Of(k, mig.Name{}))
		}
	}
	return out
}

// Ours reports whether a resource is one that the node offers or could offer.
func (n *Names) Ours(resource string) bool {
	_, ok := n.Kind(resource)
	return ok
}

// Of is the name of the resource that a piece is of; p is the profile of a MIG instance.
func (n *Names) Of(k piece.Kind, p mig.Name) string {
	if k.InMIG() {
		return n.OfProfile(p)
	}
	return n.before + k.Short()
}

// OfProfile is the name of the resource of a MIG profile's instances.
func (n *Names) OfProfile(p mig.Name) string { return n.before + p.Resource() }

// Kind is what the devices of a resource stand for, if it is one that the node
// offers or could offer.
func (n *Names) Kind(resource string) (piece.Kind, bool) {
	short, ok := strings.CutPrefix(resource, n.before)
	if !ok {
		return "", false
	}
	var instances piece.Kind
	for _, k := range piece.Kinds() {
		switch {
		case k.InMIG():
			instances = k
		case k.Short() == short:
			return k, true
		}
	}
	if _, err := mig.ParseResource(short); err != nil {
		return "", false
	}
	return instances, true
}

// KindOf is what the devices of a resource stand for by its short name, whatever its
// domain: the names of a node's resources can have changed.
func KindOf(resource string) (piece.Kind, bool) {
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

// parse returns what IDs stand for, as far as they say, in the order of the IDs: those of one
// GPU together, where its kind has them so, and all others each alone.
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

// joined is parse of a kind whose devices of one GPU are one piece. A request may have thousands of them.
func (r *row) joined(ids []string) ([]ledger.Grant, error) {
	var of []gpu.UUID // a request is mostly of one GPU
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

// grantOf is a grant of a piece of which no more is known yet.
func grantOf(u gpu.UUID, p piece.Piece) ledger.Grant {
	g := ledger.Grant{GPU: u}
	g.Piece, g.Cap = p.In(piece.Share{})
	return g
}

// IDs are the devices that grants came from, sorted; of a kind that this version does not
// know they are none.
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

// pieceIDs are the devices that a piece of a GPU is to the kubelet.
func pieceIDs(u gpu.UUID, p piece.Piece) []string {
	if row, ok := rows[p.Kind()]; ok {
		return row.ids(u, p)
	}
	return nil
}

// DivisionIDs are the device IDs of a GPU that is divided so.
func DivisionIDs(of piece.Division, u gpu.UUID) []string {
	if row, ok := rows[of.Kind]; ok {
		return row.all(u, of)
	}
	return nil
}
