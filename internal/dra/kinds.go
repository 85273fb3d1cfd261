// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// texts are attributes, by name.
type texts = map[resourcev1.QualifiedName]string

// row is how dynamic resource allocation has pieces of one kind.
type row struct {
	// name is a device's in its pool, a DNS label; short is its GPU's.
	name func(of *Device, short string) string
	// kind is the value of the attribute "type". NVIDIA's driver has no other for a GPU that
	// several claims share.
	kind string
	// attributes are those that other kinds do not have. An empty one is left out.
	attributes func(in *Input, d *gpu.Device, of Device) texts
	// capacity says what a device has, and whether several claims can have of it; division
	// is its GPU's.
	capacity func(d *gpu.Device, of Device, division piece.Division, out *resourcev1.Device)
	// grant is the piece that a result of a claim stands for.
	grant func(q *question) (piece.Piece, error)
}

// rows has a row for each kind of piece.
//
//exhaustive:enforce
var rows = map[piece.Kind]row{
	piece.KindWhole: {
		name: func(_ *Device, short string) string { return "gpu-" + short },
		kind: "gpu",
		attributes: func(_ *Input, d *gpu.Device, _ Device) texts {
			return texts{"uuid": string(d.UUID)}
		},
		capacity: func(d *gpu.Device, _ Device, _ piece.Division, out *resourcev1.Device) {
			// As NVIDIA's driver has it, the most that any profile has: of an A100 that is 98 of
			// its 108 multiprocessors. A GPU without MIG tells of none.
			out.Capacity = capacity(d.Memory, d.MIG.Profiles...)
		},
		grant: func(*question) (piece.Piece, error) { return piece.Whole{}, nil },
	},
	piece.KindUnits: {
		name:       func(_ *Device, short string) string { return "gpu-" + short + "-shared" },
		kind:       "gpu",
		attributes: sharing("memory"),
		capacity: func(_ *gpu.Device, _ Device, of piece.Division, out *resourcev1.Device) {
			out.AllowMultipleAllocations = new(true)
			if of.N > 0 {
				total, unit := bytes(of.Unit*gpu.MiB(of.N)), bytes(of.Unit)
				// A claim that names no amount gets all: a silent share of the least size
				// would be a surprise at the first allocation.
				out.Capacity[memory] = resourcev1.DeviceCapacity{Value: total,
					RequestPolicy: &resourcev1.CapacityRequestPolicy{Default: &total,
						ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: &unit, Max: &total, Step: &unit}}}
			}
		},
		grant: func(q *question) (piece.Piece, error) {
			amount, unit := q.Amount, int64(q.of.Unit)<<20
			if unit <= 0 || amount <= 0 || amount%unit != 0 || amount/unit > int64(q.of.N) {
				return nil, never(status.ClaimRefused, fmt.Errorf("%d bytes of device %s: "+
					"an amount is 1 to %d times %d MiB: make the claim anew: %w",
					amount, q.Device, q.of.N, q.of.Unit, gpu.ErrInvalid))
			}
			free, err := q.free(int(amount / unit))
			return piece.Units{Set: piece.SetOf(free)}, err
		},
	},
	piece.KindReplica: {
		name:       func(_ *Device, short string) string { return "gpu-" + short + "-replicas" },
		kind:       "gpu",
		attributes: sharing("replicas"),
		capacity: func(_ *gpu.Device, _ Device, of piece.Division, out *resourcev1.Device) {
			out.AllowMultipleAllocations = new(true)
			if of.Kind != "" {
				// One to a claim: two replicas of one GPU are no more than one. The device
				// has no memory, since a claim takes of every capacity of such a device.
				out.Capacity["replicas"] = resourcev1.DeviceCapacity{Value: count(of.N),
					RequestPolicy: &resourcev1.CapacityRequestPolicy{Default: new(count(1)),
						ValidValues: []resource.Quantity{count(1)}}}
			}
		},
		grant: func(q *question) (piece.Piece, error) {
			free, err := q.free(1)
			if err != nil {
				return nil, err
			}
			return piece.Replica{Number: free[0]}, nil
		},
	},
	piece.KindPlacement: {
		name: func(of *Device, short string) string {
			// As in NVIDIA's names: 1g.10gb+me at memory slice 3 is mig-1g10gb-me-3.
			p := of.Placement.Profile
			attr := strings.NewReplacer("+", "-", "-", "-no-", ".", "-", "_", "-").Replace(p.Attr)
			return fmt.Sprintf("gpu-%s-mig-%dg%dgb%s-%d", short, p.Slices, p.GB, attr, of.Placement.Start)
		},
		kind: "mig",
		attributes: func(in *Input, d *gpu.Device, of Device) texts {
			out := texts{"parentUUID": string(d.UUID), "profile": of.Placement.Profile.String()}
			if one := mig.Find(d.MIG.Instances, of.Placement); one != nil && in.Fixed[d.UUID] {
				out["uuid"] = string(one.UUID)
			}
			return out
		},
		capacity: func(d *gpu.Device, of Device, _ piece.Division, out *resourcev1.Device) {
			if p := profile(d, of.Placement.Profile); p != nil {
				out.Capacity = capacity(p.Memory, *p)
			}
			// NVIDIA's names of the memory slices that it is on. A card with more than others
			// leaves them out where they would be too many.
			if len(out.Attributes)+len(out.Capacity)+of.Placement.Size <=
				resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
				for i := range of.Placement.Size {
					name := resourcev1.QualifiedName("memorySlice" + strconv.Itoa(of.Placement.Start+i))
					out.Capacity[name] = resourcev1.DeviceCapacity{Value: count(1)}
				}
			}
		},
		grant: func(q *question) (piece.Piece, error) { return piece.Instance(q.device.Placement), nil },
	},
}

// sharing are the attributes of a GPU that several claims have a part of.
func sharing(how string) func(*Input, *gpu.Device, Device) texts {
	return func(_ *Input, d *gpu.Device, _ Device) texts {
		return texts{"uuid": string(d.UUID), "sharing": how}
	}
}

// everyPiece are the devices of one GPU: of each kind that it is divided into, one for all
// numbers together, and one for each placement.
func everyPiece(u gpu.UUID, into func(piece.Kind) (piece.Division, bool)) (out []Device) {
	for _, k := range piece.Kinds() {
		of, ok := into(k)
		switch {
		case !ok:
		case k.InMIG():
			for _, at := range of.Placements {
				out = append(out, Device{GPU: u, Kind: k, Placement: at})
			}
		default:
			out = append(out, Device{GPU: u, Kind: k})
		}
	}
	return out
}

// question is what a result of a claim asks of its GPU, which is divided so.
type question struct {
	*want
	of piece.Division
	// free are the lowest numbers, so many, that nobody has.
	free func(n int) ([]int, error)
}

// grant makes the grant that a result stands for, with the lowest numbers that are
// free. The error wraps ledger.ErrHeld where there are too few now, and gpu.ErrInvalid
// where the claim cannot be met. beside is what the claim asks for besides.
func grant(l *ledger.Ledger, o *Offer, w *want, beside []ledger.Request) (ledger.Grant, error) {
	d := w.device
	g := ledger.Grant{GPU: d.GPU, NoRoom: w.Admin}
	if err := putSlice(l, &g, w, beside); err != nil {
		return g, err
	}
	on := o.Inventory.ByUUID(g.GPU)
	of, has := o.Changes.Layouts[g.GPU].Of(d.Kind)
	row, known := rows[d.Kind]
	switch {
	case !known:
		return g, never(status.ClaimOutdated,
			fmt.Errorf("device %s: %w: %w", w.Device, piece.UnknownKind{Word: d.Kind}, gpu.ErrInvalid))
	case w.Admin && !d.Kind.InMIG():
		row = rows[piece.KindWhole]
	case w.Admin:
		// It takes no room, so nothing is made for it.
		if mig.Find(on.MIG.Instances, d.Placement) == nil {
			return g, never(status.ClaimUnsupported, fmt.Errorf("device %s is no instance at present, "+
				"and none is made for access that takes nothing: %w", w.Device, gpu.ErrNotFound))
		}
	case d.Kind.Shared() && !has:
		return g, never(status.ClaimOutdated, fmt.Errorf("device %s is not what its GPU is laid out as any more: "+
			"make the claim anew: %w", w.Device, gpu.ErrInvalid))
	}
	p, err := row.grant(&question{w, of, func(n int) ([]int, error) {
		free, err := freeNumbers(l, d, of.N, n, beside)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", w.Device, err)
		}
		return free, nil
	}})
	if err != nil {
		return g, err
	}
	share := piece.Share{Division: of}
	if on != nil {
		share.Usable = on.Usable()
	}
	g.Piece, g.Cap = p.In(share)
	return g, nil
}
