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

// texts are attributes with text values, by name.
type texts = map[resourcev1.QualifiedName]string

// row describes how DRA presents the pieces of one kind.
type row struct {
	// name returns a device's name in its pool, a DNS label. short is the short name of its GPU.
	name func(of *Device, short string) string
	// kind is the value of the attribute "type". NVIDIA's driver has no value of its own for a GPU
	// that several claims share.
	kind string
	// attributes returns the attributes that other kinds do not have. Empty ones are left out.
	attributes func(in *Input, d *gpu.Device, of Device) texts
	// capacity sets what a device has, and whether several claims can have a share of it. division
	// is that of its GPU.
	capacity func(d *gpu.Device, of Device, division piece.Division, out *resourcev1.Device)
	// grant returns the piece that a result of a claim gets.
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
			// Like NVIDIA's driver: the most that any profile has. For an A100 that is 98 of its
			// 108 multiprocessors. A GPU without MIG has none of these capacities.
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
				// A claim that names no amount gets all of the GPU. The smallest share would be a
				// surprise at the program's first allocation of memory.
				out.Capacity[memory] = resourcev1.DeviceCapacity{Value: total,
					RequestPolicy: &resourcev1.CapacityRequestPolicy{Default: &total,
						ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: &unit, Max: &total, Step: &unit}}}
			}
		},
		grant: func(q *question) (piece.Piece, error) {
			amount, unit := q.Amount, int64(q.of.Unit)<<20
			if unit <= 0 || amount <= 0 || amount%unit != 0 || amount/unit > int64(q.of.N) {
				return nil, permanent(status.ClaimRefused, fmt.Errorf("%d bytes of device %s: "+
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
				// One to a claim, since two replicas of one GPU are worth the same as one. The
				// device has no capacity "memory": a claim takes of each capacity of a shared
				// device.
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
			// NVIDIA's names for the memory slices that it is on. They are left out if the card has
			// so many that the device would exceed the API's limit.
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

// sharing returns the attributes of a GPU that several claims have a part of.
func sharing(how string) func(*Input, *gpu.Device, Device) texts {
	return func(_ *Input, d *gpu.Device, _ Device) texts {
		return texts{"uuid": string(d.UUID), "sharing": how}
	}
}

// everyPiece returns the devices of one GPU: for each kind that it is divided into, one device for
// all numbers together, or one for each placement. into returns the GPU's division into a kind.
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

// question is a result of a claim, with the division of its GPU.
type question struct {
	*want
	of piece.Division
	// free returns the n lowest free numbers.
	free func(n int) ([]int, error)
}

// grant returns the grant for a result, with the lowest free numbers. beside are the other requests
// of the claim. The error wraps ledger.ErrHeld if too few numbers are free now. It is permanent if
// the claim can never be met as it is.
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
		return g, permanent(status.ClaimOutdated,
			fmt.Errorf("device %s: %w: %w", w.Device, piece.UnknownKind{Word: d.Kind}, gpu.ErrInvalid))
	case w.Admin && !d.Kind.InMIG():
		row = rows[piece.KindWhole]
	case w.Admin:
		// No instance is made for admin access, since it takes no room.
		if mig.Find(on.MIG.Instances, d.Placement) == nil {
			return g, permanent(status.ClaimUnsupported, fmt.Errorf("device %s has no instance at present, "+
				"and none is made for admin access: %w", w.Device, gpu.ErrNotFound))
		}
	case d.Kind.Shared() && !has:
		return g, permanent(status.ClaimOutdated, fmt.Errorf("device %s is no longer in its GPU's layout: "+
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
	return g, putCompute(&g, w, o.Changes.Layouts[g.GPU])
}
