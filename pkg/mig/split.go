// SPDX-License-Identifier: Apache-2.0

package mig

import "slices"

// split lists the ways to fill GPU instances of one profile with the compute
// instances that want[from:to] counts. Those that exist may stay where they
// are; new ones go to the first compute slices that are free, larger ones
// first. Ways that take more come first, so that of equals GPU instances are
// filled in turn.
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
		total = min(total+w.N, maxStates)
	}
	d := len(p.dims)
	p.dims = append(p.dims, dim{n: min(total, len(gis))})
	p.splits = append(p.splits, splitDim{k, d})
	for _, gi := range gis {
		f := filler{p: p, gi: gi, giDim: d, from: from, to: to, profile: &p.c.profiles[k], before: len(p.parts)}
		f.left = make([]int, to-from)
		for i := range f.left {
			f.left[i] = p.want[from+i].N
		}
		for i, o := range p.standing {
			if !o.Empty && o.Profile.Compute != 0 && o.sameGI(gi) && first(p.standing, i) {
				f.have = append(f.have, i)
			}
		}
		f.stay(0, 0)
	}
}

// filler goes through the ways to fill one GPU instance.
type filler struct {
	p        *planner
	gi       Placement
	profile  *profile
	giDim    int
	from, to int
	left     []int // of each wanted profile
	have     []int // of standing, what is in this GPU instance
	devices  []Placement
	before   int // parts before this GPU instance's
}

// stay decides for each that exists whether it stays.
func (f *filler) stay(i int, taken uint64) {
	f.p.work++
	if f.p.work > maxWork || len(f.p.parts) > maxParts {
		return
	}
	if i == len(f.have) {
		f.add(f.to-1, taken)
		return
	}
	o := f.p.standing[f.have[i]]
	if w := slices.IndexFunc(f.p.want[f.from:f.to], func(c Count) bool { return c.Profile == o.Profile }); w >= 0 &&
		f.left[w] > 0 && taken&o.compute() == 0 {
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

// add decides how many new ones of each wanted profile come in, the largest
// profile first.
func (f *filler) add(w int, taken uint64) {
	f.p.work++
	if f.p.work > maxWork || len(f.p.parts) > maxParts {
		return
	}
	if w < f.from {
		f.close()
		return
	}
	n := len(f.devices)
	f.place(w, taken, 0)
	f.devices = f.devices[:n]
}

// place puts one more of a profile at the first compute slice that leaves a way
// on, or goes on to the next profile. Compute slices below at were tried.
func (f *filler) place(w int, taken uint64, at int) {
	name := f.p.want[w].Profile
	if f.left[w-f.from] > 0 {
		block := align(name.Compute)
		for ci := (at + block - 1) / block * block; f.profile.holds(name.Compute, ci); ci += block {
			s := Placement{Profile: name, Start: f.gi.Start, Size: f.gi.Size, CI: ci}
			if taken&s.compute() != 0 {
				continue
			}
			f.left[w-f.from]--
			f.devices = append(f.devices, s)
			f.place(w, taken|s.compute(), ci+block)
			f.devices = f.devices[:len(f.devices)-1]
			f.left[w-f.from]++
		}
	}
	f.add(w-1, taken)
}

// close makes a part of what was chosen.
func (f *filler) close() {
	if len(f.devices) == 0 {
		return
	}
	from := len(f.p.uses)
	for w := f.from; w < f.to; w++ {
		if n := f.p.want[w].N - f.left[w-f.from]; n > 0 {
			f.p.use(use{w, n})
		}
	}
	f.p.use(use{f.giDim, 1})
	uses := f.p.uses[from:len(f.p.uses):len(f.p.uses)]
	// Where the same would be there and be saved, the first way will do.
	n := len(f.p.parts)
	f.p.part(f.gi, slices.Clone(f.devices), uses)
	if len(f.p.parts) == n {
		return
	}
	for _, o := range f.p.parts[f.before:n] {
		if o.value == f.p.parts[n].value && slices.Equal(o.uses, uses) {
			f.p.parts = f.p.parts[:n]
			return
		}
	}
}
