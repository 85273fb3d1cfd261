// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"cmp"
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Kind is the kind of a piece. Records, annotations and the GPUNode object contain its values. The
// empty Kind is that of a GPU that offers nothing.
type Kind string

// Kinds of pieces.
const (
	KindWhole     Kind = "whole"
	KindUnits     Kind = "units"
	KindReplica   Kind = "replica"
	KindPlacement Kind = "placement"
)

// all are all kinds. A GPU that has several offers them in this order.
var all = []*kind{&whole, &units, &replica, &placement}

var kinds = func() map[Kind]*kind {
	out := map[Kind]*kind{}
	for _, k := range all {
		out[k.kind] = k
	}
	return out
}()

// kind describes a kind of pieces.
type kind struct {
	kind Kind
	// mode is the partition's mode for a GPU that is divided into such pieces.
	mode string
	// short is the name of a device in summaries, and of its resource below the domain; empty if
	// devices have the names of their MIG profiles.
	short string
	// class is the name of the DeviceClass whose claims ask for such pieces, below the domain; empty if
	// it is that of short.
	class string
	// several is the plural for people.
	several string
	// alone is true if the holder has the GPU alone. shared is true if several pieces exist on a
	// GPU at once, are told apart by their numbers and separated by caps. inMIG is true if the GPU
	// is in MIG mode, and the hardware separates the pieces. Exactly one of the three is true.
	alone, shared, inMIG bool
	// together is true if the devices of one request must be on one GPU.
	together bool
	// dynamic is true if a dynamic GPU offers this kind.
	dynamic bool
	// read reads a piece from the fields of a record.
	read func(record []byte) (Piece, error)
	// divide returns the division that a wish means; ok is false if it means another kind.
	divide func(w Wish, d *gpu.Device) (of Division, ok bool)
	// wish adds to a wish what it says besides the mode; nil if the mode is all.
	wish func(of Division, w *Wish)
	// infer is Infer for pieces of the kind.
	infer func(pieces []Piece, d *gpu.Device, wish Division, unit gpu.MiB) Division
	// words describes a division for people; nil if the kind says it all.
	words func(of Division) string
}

// Kinds returns all kinds, in the order that a GPU that has several offers them in.
func Kinds() []Kind {
	out := make([]Kind, len(all))
	for i, k := range all {
		out[i] = k.kind
	}
	return out
}

// about returns the description of a kind; that of an unknown kind is empty.
func (k Kind) about() *kind {
	if a := kinds[k]; a != nil {
		return a
	}
	return new(kind)
}

// Known reports whether this version knows the kind.
func (k Kind) Known() bool { return kinds[k] != nil }

// Mode returns the partition's mode for a GPU that is divided into such pieces; empty if the kind
// is not known.
func (k Kind) Mode() string { return k.about().mode }

// Short returns the name of a device in summaries, and of its resource below the domain; empty for
// MIG instances, which have the names of their profiles.
func (k Kind) Short() string { return k.about().short }

// Class returns the name of the DeviceClass whose claims ask for such pieces, without the domain;
// empty for MIG instances, whose classes have the names of their profiles.
func (k Kind) Class() string { return cmp.Or(k.about().class, k.about().short) }

// Several returns the plural for people: "memory units".
func (k Kind) Several() string { return k.about().several }

// Alone reports whether the holder of such a piece has its GPU alone.
func (k Kind) Alone() bool { return k.about().alone }

// Shared reports whether several such pieces exist on a GPU at once, told apart by their numbers
// and separated by caps.
func (k Kind) Shared() bool { return k.about().shared }

// InMIG reports whether such pieces are MIG instances, whose GPU is in MIG mode.
func (k Kind) InMIG() bool { return k.about().inMIG }

// Together reports whether the devices of one request must be on one GPU.
func (k Kind) Together() bool { return k.about().together }

// Dynamic reports whether a dynamic GPU offers this kind.
func (k Kind) Dynamic() bool { return k.about().dynamic }

// OfDynamic is the kind of the shared pieces of a dynamic GPU, and of the devices that it is
// counted in.
const OfDynamic = KindUnits

// Counted returns the kind of the devices that a GPU of this kind is counted in: OfDynamic for a
// dynamic GPU, whose kind is that of MIG instances, and otherwise the same kind.
func (k Kind) Counted() Kind {
	if k.InMIG() {
		return OfDynamic
	}
	return k
}

// UnknownKind is the error of a kind that this version does not know.
type UnknownKind struct {
	// Word is the unknown kind.
	Word Kind
}

func (e UnknownKind) Error() string {
	return fmt.Sprintf("this version does not know pieces of kind %q: "+
		"run the version that wrote it, or end the pods that have it", string(e.Word))
}

// Check returns an [UnknownKind] error if the kind is neither empty nor known.
func (k Kind) Check() error {
	if k != "" && !k.Known() {
		return UnknownKind{k}
	}
	return nil
}
