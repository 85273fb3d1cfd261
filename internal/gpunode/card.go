// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Card has the MIG profiles of GPUs of one kind, as their driver reports them.
type Card struct {
	// Name is the model of the GPUs. A second table of the same model has the name "… (2)".
	Name string `json:"name" max:"256"`
	// MemorySlices is the number of the GPU's memory slices.
	MemorySlices int `json:"memorySlices" max:"64"`
	// Profiles are sorted by name.
	Profiles []Profile `json:"profiles" max:"64"`
}

// Profile is a kind of GPU instance.
type Profile struct {
	// Name is the driver's name, for example "1g.10gb+me".
	Name string `json:"name" max:"63"`
	// ComputeSlices and MemorySlices are the size of an instance.
	ComputeSlices int `json:"computeSlices" max:"64"`
	MemorySlices  int `json:"memorySlices" max:"64"`
	// Starts are the memory slices at which an instance can begin.
	Starts []int `json:"starts" max:"64" each:"63"`
	// Max is how many instances can exist at a time. 0 if only room limits that.
	Max int `json:"max,omitempty" max:"64"`
	// Engines are the media engines of an instance. Their sum over all instances is at most what
	// the GPU has. Nil if the driver does not report them.
	Engines *Engines `json:"engines,omitempty"`
}

// Engines counts media engines: decoders, encoders, JPEG units and optical-flow
// accelerators.
type Engines struct {
	Decode int `json:"decode,omitempty" max:"64"`
	Encode int `json:"encode,omitempty" max:"64"`
	JPEG   int `json:"jpeg,omitempty" max:"64"`
	OFA    int `json:"ofa,omitempty" max:"64"`
}

// CardOf returns the card of a GPU, or nil if its driver reports no placements. If the instances of
// a profile had several sizes, which no driver is known to report, the card would have those of the
// first size.
func CardOf(d *gpu.Device) *Card {
	c := &Card{Name: d.Model}
	for i := range d.MIG.Profiles {
		from := &d.MIG.Profiles[i]
		if len(from.Placements) == 0 {
			continue
		}
		p := Profile{Name: from.Name, ComputeSlices: from.Slices, MemorySlices: from.Placements[0].Size, Max: from.Max}
		for _, at := range from.Placements {
			if at.Size == p.MemorySlices {
				p.Starts = append(p.Starts, at.Start)
				c.MemorySlices = max(c.MemorySlices, at.Start+at.Size)
			}
		}
		slices.Sort(p.Starts)
		if e := from.Engines; e != nil {
			p.Engines = &Engines{Decode: e.Decode, Encode: e.Encode, JPEG: e.JPEG, OFA: e.OFA}
		}
		c.Profiles = append(c.Profiles, p)
	}
	if c.Profiles == nil {
		return nil
	}
	slices.SortFunc(c.Profiles, func(a, b Profile) int { return cmp.Compare(a.Name, b.Name) })
	return c
}

// Read returns the rules of the card, by which the agent itself places instances. The error wraps
// gpu.ErrInvalid and names the profiles that are not valid. The returned card has the others.
func (c *Card) Read() (*mig.Card, error) {
	m := gpu.MIG{Capable: true}
	for i := range c.Profiles {
		p := &c.Profiles[i]
		to := gpu.Profile{Name: p.Name, Slices: p.ComputeSlices, Max: p.Max}
		for _, start := range p.Starts {
			to.Placements = append(to.Placements, gpu.Placement{Start: start, Size: p.MemorySlices})
		}
		if e := p.Engines; e != nil {
			to.Engines = &gpu.Engines{Decode: e.Decode, Encode: e.Encode, JPEG: e.JPEG, OFA: e.OFA}
		}
		m.Profiles = append(m.Profiles, to)
	}
	card, err := mig.NewCard(&m)
	if err != nil {
		return card, fmt.Errorf("read the MIG profiles of %s: %w", c.Name, err)
	}
	return card, nil
}

// Placement reads a placement as it is written in [MIG], "3g.40gb@4". The error wraps
// gpu.ErrInvalid: the text is not a placement, or the card does not have it.
func Placement(of *mig.Card, text string) (mig.Placement, error) {
	_, profile, start, ci, err := mig.ParseID("GPU-0::" + text)
	if err != nil {
		return mig.Placement{}, fmt.Errorf("%q is not a placement: %w", text, gpu.ErrInvalid)
	}
	p, ok := of.Placement(profile, start, ci)
	if !ok {
		return mig.Placement{}, fmt.Errorf("the card has no placement %s: %w", text, gpu.ErrInvalid)
	}
	return p, nil
}
