// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"slices"

	"example.com/gpu-agent/pkg/mig/internal/fill"
)

// split lists the ways to fill GPU instances of one profile with the compute instances that
// want[from:to] counts. Existing ones may stay where they are. New ones go to the first free
// compute slices, larger ones first. Ways with more compute instances come first, so that of
// equal targets the one is found that fills GPU instances in turn.
func (p *planner) split(from, to int) {
	name := p.want[from].Profile.GPUInstance()
	k := p.c.index(name)
	gis := p.c.profiles[k].placements
	for i := range p.standing {
		gi := p.standing[i].GPUInstance()
		if gi.Profile == name && p.masks[i] != 0 && !slices.Contains(gis, gi) && first(p.standing, i) {
			gis = append(slices.Clip(gis), gi)
		}
	}
	total := 0
	for _, w := range p.want[from:to] {
		total = min(total+w.N, fill.MaxStates)
	}
	d := len(p.Dims)
	p.Dims = append(p.Dims, fill.Dim{N: min(total, len(gis))})
	p.splits = append(p.splits, splitDim{k, d})
	for _, gi := range gis {
		f := filler{p: p, gi: gi, want: p.want[from:to], from: from, before: len(p.Parts)}
		f.left = make([]int, len(f.want))
		for i := range f.left {
			f.left[i] = f.want[i].N
		}
		for i, o := range p.standing {
			if !o.Empty && o.Profile.Compute != 0 && o.sameGI(gi) && first(p.standing, i) {
				f.have = append(f.have, i)
			}
		}
		f.stay(0, 0)
	}
}

// filler lists the ways to fill one GPU instance, for the last of the planner's splits.
type filler struct {
	p       *planner
	gi      Placement
	want    []Count // of its profiles; want[0] is planner.want[from]
	from    int
	left    []int // how many of each of want are still to be placed
	have    []int // indices into standing: what is in this GPU instance
	devices []Placement
	before  int // number of parts before this GPU instance's
}

func (f *filler) as() splitDim { return f.p.splits[len(f.p.splits)-1] }

// stay decides for each existing compute instance, from the i-th on, whether it stays.
func (f *filler) stay(i int, taken uint64) {
	f.p.Work++
	if f.p.Work > fill.MaxWork || len(f.p.Parts) > fill.MaxParts {
		return
	}
	if i == len(f.have) {
		f.add(len(f.want)-1, taken)
		return
	}
	o := f.p.standing[f.have[i]]
	w := slices.IndexFunc(f.want, func(c Count) bool { return c.Profile == o.Profile })
	if w >= 0 && f.left[w] > 0 && taken&o.compute() == 0 {
		f.left[w]--
		f.devices = append(f.devices, o.Placement)
		f.stay(i+1, taken|o.compute())
		f.devices = f.devices[:len(f.devices)-1]
		f.left[w]++
	}
	if !f.p.fixed[f.have[i]] {
		f.stay(i+1, taken)
	}
}

// add adds new compute instances of want[w], and then of the smaller profiles before it.
func (f *filler) add(w int, taken uint64) {
	f.p.Work++
	if f.p.Work > fill.MaxWork || len(f.p.Parts) > fill.MaxParts {
		return
	}
	if w < 0 {
		f.close()
		return
	}
	n := len(f.devices)
	f.place(w, taken, 0)
	f.devices = f.devices[:n]
}

// place tries each free compute slice from at on for one more compute instance of want[w], and
// then goes on to the next profile.
func (f *filler) place(w int, taken uint64, at int) {
	name := f.want[w].Profile
	if f.left[w] > 0 {
		profile := &f.p.c.profiles[f.as().profile]
		block := align(name.Compute)
		for ci := (at + block - 1) / block * block; profile.holds(name.Compute, ci); ci += block {
			s := Placement{Profile: name, Start: f.gi.Start, Size: f.gi.Size, CI: ci}
			if taken&s.compute() != 0 {
				continue
			}
			f.left[w]--
			f.devices = append(f.devices, s)
			f.place(w, taken|s.compute(), ci+block)
			f.devices = f.devices[:len(f.devices)-1]
			f.left[w]++
		}
	}
	f.add(w-1, taken)
}

// close makes a part of the chosen devices.
func (f *filler) close() {
	if len(f.devices) == 0 {
		return
	}
	from := len(f.p.Uses)
	for w := range f.want {
		if n := f.want[w].N - f.left[w]; n > 0 {
			f.p.Use(fill.Use{Dim: f.from + w, N: n})
		}
	}
	f.p.Use(fill.Use{Dim: f.as().dim, N: 1})
	uses := f.p.Uses[from:len(f.p.Uses):len(f.p.Uses)]
	// Keep only the first of several ways with the same counts and value.
	n := len(f.p.Parts)
	f.p.part(f.gi, slices.Clone(f.devices), uses)
	if len(f.p.Parts) == n {
		return
	}
	for _, o := range f.p.Parts[f.before:n] {
		if o.Value == f.p.Parts[n].Value && slices.Equal(o.Uses, uses) {
			f.p.Parts, f.p.holds = f.p.Parts[:n], f.p.holds[:n]
			return
		}
	}
}
