// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Kind is what a piece of a GPU is. The words stand in records, in annotations and in the
// GPUNode object. The empty Kind is of nothing: a GPU that offers nothing has it.
type Kind string

// Kinds of pieces.
const (
	KindWhole     Kind = "whole"
	KindUnits     Kind = "units"
	KindReplica   Kind = "replica"
	KindPlacement Kind = "placement"
)

// all are the kinds that there are, in the order in which a GPU that has several offers them.
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
	// mode is the partition's word for a GPU that is divided into them.
	mode string
	// short is what one device is called in summaries, and below the domain in the name of its
	// resource; empty where the name of its MIG profile stands there.
	short string
	// several is what people call more than one.
	several string
	// alone says that its holder has the GPU alone, shared that pieces lie beside each other,
	// are told apart by their numbers and held apart by caps, and inMIG that the GPU is in
	// MIG mode, and the hardware holds them apart. One of these is true.
	alone, shared, inMIG bool
	// together says that the devices of one request lie on one GPU.
	together bool
	// dynamic says that a dynamic GPU is offered so, too.
	dynamic bool
	// read reads one from the fields of a record.
	read func(record []byte) (Piece, error)
	// divide is the division that a wish means; ok is false where it means another kind.
	divide func(w Wish, d *gpu.Device) (of Division, ok bool)
	// wish adds to a wish for a division of the kind what it says besides the mode; nil where
	// the mode is all.
	wish func(of Division, w *Wish)
	// infer is how a GPU must be divided for these pieces to be there, where wish is how it
	// is to be divided, and unit is the size that memory units have on the node.
	infer func(pieces []Piece, d *gpu.Device, wish Division, unit gpu.MiB) Division
	// words is into what a GPU is divided, for people; nil where that goes without saying.
	words func(of Division) string
}

// Kinds are all that there are, in the order in which a GPU that has several offers them.
func Kinds() []Kind {
	out := make([]Kind, len(all))
	for i, k := range all {
		out[i] = k.kind
	}
	return out
}

// about is what is known of a kind; of one that is not known, nothing.
func (k Kind) about() *kind {
	if a := kinds[k]; a != nil {
		return a
	}
	return new(kind)
}

// Known reports whether this version knows the kind.
func (k Kind) Known() bool { return kinds[k] != nil }

// Mode is the partition's word for a GPU that is divided into such pieces; empty where the
// kind is not known.
func (k Kind) Mode() string { return k.about().mode }

// Short is what one device is called in summaries, and below the domain in the name of its
// resource; empty for MIG instances, which have the names of their profiles.
func (k Kind) Short() string { return k.about().short }

// Several is what people call more than one: "memory units".
func (k Kind) Several() string { return k.about().several }

// Alone reports whether the holder of such a piece has its GPU alone.
func (k Kind) Alone() bool { return k.about().alone }

// Shared reports whether such pieces lie beside each other on a GPU, are told apart by their
// numbers and held apart by caps.
func (k Kind) Shared() bool { return k.about().shared }

// InMIG reports whether such pieces are MIG instances, whose GPU is in MIG mode.
func (k Kind) InMIG() bool { return k.about().inMIG }

// Together reports whether the devices of one request lie on one GPU.
func (k Kind) Together() bool { return k.about().together }

// Dynamic reports whether a dynamic GPU is offered so, too.
func (k Kind) Dynamic() bool { return k.about().dynamic }

// OfDynamic is the kind in which a dynamic GPU is shared, and by which it is counted.
const OfDynamic = KindUnits

// Counted is the kind of the devices by which a GPU of this kind is counted: a dynamic one,
// which has the kind of MIG instances, by OfDynamic, and all others by their own.
func (k Kind) Counted() Kind {
	if k.InMIG() {
		return OfDynamic
	}
	return k
}

// UnknownKind is the error of a kind that this version does not know.
type UnknownKind struct {
	// Word is the kind's.
	Word Kind
}

func (e UnknownKind) Error() string {
	return fmt.Sprintf("%q is no kind of piece that this version knows: "+
		"run the version that wrote it, or end what has it", string(e.Word))
}

// Check returns an [UnknownKind] where the kind is neither empty nor known.
func (k Kind) Check() error {
	if k != "" && !k.Known() {
		return UnknownKind{k}
	}
	return nil
}
