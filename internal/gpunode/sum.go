// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// Sum fills in what follows from the GPUs: Largest of their MIG devices, Resources and Summary.
// Placements must be sorted. They are read by the GPU's card in Cards.
func (s *Status) Sum() {
	cards := map[string]*mig.Card{}
	for i := range s.Cards {
		cards[s.Cards[i].Name], _ = s.Cards[i].Read() // no placement has a profile that is not valid
	}
	s.Resources = nil
	left := tally{unit: s.MemoryUnitMiB,
		free: map[string]int{}, total: map[string]int{}, largest: map[string]int{}, modes: map[string]int{},
		single: map[string]int{}}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.Resource != "" {
			r := s.resource(g.Resource)
			r.Total, r.Free = r.Total+g.Total, r.Free+g.Free
			if g.Kind.Together() {
				r.Largest = max(r.Largest, g.Largest)
			} else if g.Compute != Through {
				r.Largest += g.Largest
			}
		}
		var card *mig.Card
		if g.MIG != nil {
			card = cards[g.MIG.Card]
			g.MIG.sum(card)
			for _, o := range g.MIG.Offers {
				if o.Resource != "" {
					r := s.resource(o.Resource)
					r.Total, r.Free, r.Largest = r.Total+len(o.Placements), r.Free+len(o.Free), r.Largest+o.Largest
				}
			}
		}
		left.add(g, card)
		if g.Spot != nil {
			s.addSpot(g, card)
			left.addSpot(g, card)
		}
	}
	for i := range s.GPUs { // a container with a share through MPS holds one GPU
		if g := &s.GPUs[i]; g.Resource != "" && g.Compute == Through {
			r := s.resource(g.Resource)
			r.Largest = max(r.Largest, g.Largest)
		}
	}
	slices.SortFunc(s.Resources, func(a, b Resource) int { return cmp.Compare(a.Name, b.Name) })
	s.Summary = left.summary()
}

// resource returns the node's entry for a name, which it adds if need be.
func (s *Status) resource(name string) *Resource {
	i := slices.IndexFunc(s.Resources, func(r Resource) bool { return r.Name == name })
	if i < 0 {
		i, s.Resources = len(s.Resources), append(s.Resources, Resource{Name: name})
	}
	return &s.Resources[i]
}

// addSpot adds to the node's resources what spot pods can have of a GPU.
func (s *Status) addSpot(g *GPU, card *mig.Card) {
	if g.Spot.Resource != "" {
		r := s.resource(g.Spot.Resource)
		r.Total, r.Free = r.Total+g.Spot.Total, r.Free+g.Spot.Free
		if g.Kind.Together() {
			r.Largest = max(r.Largest, g.Spot.Largest)
		} else {
			r.Largest += g.Spot.Largest
		}
	}
	m := g.inSpot()
	m.sum(card)
	for _, o := range m.Offers {
		r := s.resource(o.Resource)
		r.Total, r.Free, r.Largest = r.Total+len(o.Placements), r.Free+len(o.Free), r.Largest+o.Largest
	}
}

// inSpot returns the GPU's MIG devices as spot pods can have them. Its Offers are those of Spot.
func (g *GPU) inSpot() *MIG {
	m := &MIG{Offers: g.Spot.Offers}
	if g.MIG != nil {
		m.OnDemand = g.MIG.OnDemand
		m.Used, m.Blocked = slices.Concat(g.MIG.Used, g.Spot.UsedPlacements), g.MIG.Blocked
	}
	return m
}

// sum fills in how many of each profile can be given out, and the largest profile.
func (m *MIG) sum(card *mig.Card) {
	m.Largest = ""
	most := 0
	for i := range m.Offers {
		o := &m.Offers[i]
		o.Largest = m.room(card, o)
		if o.Largest == 0 || card == nil {
			continue
		}
		p, err := Placement(card, o.Profile+"@"+o.Free[0])
		if size := p.Size; err == nil && size > most {
			m.Largest, most = o.Profile, size
		}
	}
}

// room returns how many free placements of a profile can be given out together. All of them take
// equally many memory slices, so filling the card from left to right finds the most.
func (m *MIG) room(card *mig.Card, o *Offer) (n int) {
	if !m.OnDemand || card == nil { // devices that exist do not exclude each other
		return len(o.Free)
	}
	var standing []mig.Placement
	for _, text := range slices.Concat(m.Used, m.Blocked) {
		if p, err := Placement(card, text); err == nil {
			standing = append(standing, p)
		}
	}
	for _, at := range o.Free {
		if p, err := Placement(card, o.Profile+"@"+at); err == nil && card.Fits(standing, p) {
			standing = append(standing, p)
			n++
		}
	}
	return n
}

// free returns how many memory slices the free placements cover, and how many the card has.
func (m *MIG) free(card *mig.Card) (free, total int) {
	if card == nil {
		return 0, 0
	}
	var covered uint64
	for _, o := range m.Offers {
		for _, at := range o.Free {
			if p, err := Placement(card, o.Profile+"@"+at); err == nil {
				covered |= (1<<p.Size - 1) << p.Start
			}
		}
	}
	for _, p := range card.Placements() {
		total = max(total, p.Start+p.Size)
	}
	return bits.OnesCount64(covered), total
}

// tally adds up the figures of a summary.
type tally struct {
	// unit is the size of a memory unit, in MiB.
	unit                        int
	gpus, sick                  int
	free, total, largest, modes map[string]int
	// single is the largest request for devices of GPUs that are held one at a time.
	single map[string]int
	// profile is the largest MIG profile that may be given out, and size its memory in MiB.
	profile string
	size    int
	// spotProfile and spotSize are the same for spot pods.
	spotProfile string
	spotSize    int
	// memory is that of the GPUs that count, and idle the part of it that may be given out, in MiB.
	memory, idle int
}

func (t *tally) add(g *GPU, card *mig.Card) {
	t.gpus++
	if !Is(g.Conditions, Healthy) {
		t.sick++
	}
	t.modes[cmp.Or(g.Mode, "unset")]++
	if g.Mode == "off" {
		return
	}
	free, total := g.Free, g.Total
	switch counted := g.Kind.Counted(); {
	case g.MIG != nil && g.Mode == "mig":
		free, total = g.MIG.free(card)
		t.free["mig"], t.total["mig"] = t.free["mig"]+free, t.total["mig"]+total
		if size := g.MemoryMiB / max(total, 1) * sizeOf(card, g.MIG.Largest); size > t.size {
			t.profile, t.size = g.MIG.Largest, size
		}
	case counted.Together():
		word := counted.Short()
		if g.API == claims {
			word = counted.Class()
		}
		t.free[word], t.total[word] = t.free[word]+free, t.total[word]+total
		t.largest[word] = max(t.largest[word], g.Largest)
	case counted.Known() && total > 0:
		word := counted.Short()
		t.free[word], t.total[word] = t.free[word]+free, t.total[word]+total
		if g.Compute == Through {
			t.single[word] = max(t.single[word], g.Largest)
		} else {
			t.largest[word] += g.Largest
		}
	}
	t.memory += g.MemoryMiB
	t.idle += g.MemoryMiB * free / max(total, 1)
}

// addSpot adds what spot pods can have of a GPU. It is told beside what guaranteed pods can have, and part of
// no other figure.
func (t *tally) addSpot(g *GPU, card *mig.Card) {
	switch counted := g.Kind.Counted(); {
	case g.MIG != nil && g.Mode == "mig":
		m := g.inSpot()
		m.sum(card)
		free, total := m.free(card)
		word := piece.InSpot("mig")
		t.free[word], t.total[word] = t.free[word]+free, t.total[word]+total
		if size := g.MemoryMiB / max(total, 1) * sizeOf(card, m.Largest); size > t.spotSize {
			t.spotProfile, t.spotSize = m.Largest, size
		}
	case counted.Known() && g.Spot.Total > 0:
		word := piece.InSpot(counted.Short())
		t.free[word], t.total[word] = t.free[word]+g.Spot.Free, t.total[word]+g.Spot.Total
		if counted.Together() {
			t.largest[word] = max(t.largest[word], g.Spot.Largest)
		} else {
			t.largest[word] += g.Spot.Largest
		}
	}
}

// sizeOf returns how many memory slices a profile takes; 0 if that is not known.
func sizeOf(card *mig.Card, profile string) int {
	if name, err := mig.Parse(profile); err == nil && card != nil {
		for _, p := range card.Placements() {
			if p.Profile == name.GPUInstance() {
				return p.Size
			}
		}
	}
	return 0
}

// claims is the API of GPUs that are asked for by claims.
const claims = "dra"

// amount writes memory units as a claim asks for them: "40Gi".
func (t *tally) amount(units int) string {
	if mib := units * t.unit; mib%1024 != 0 {
		return fmt.Sprintf("%dMi", mib)
	}
	return fmt.Sprintf("%dGi", units*t.unit/1024)
}

func (t *tally) summary() Summary {
	s := Summary{GPUs: t.gpus, Unhealthy: t.sick, SaturationPercent: 100}
	if t.memory > 0 {
		s.SaturationPercent = (t.memory - t.idle) * 100 / t.memory
	}
	for word, n := range t.single {
		t.largest[word] = max(t.largest[word], n)
	}
	var modes, free, largest []string
	var words, kinds []string
	amounts := map[string]bool{} // the words whose figures are amounts of memory
	for _, k := range piece.Kinds() {
		words, kinds = append(words, k.Short()), append(kinds, k.Mode())
		if class := k.Class(); class != k.Short() {
			words, amounts[class] = append(words, class), true
		}
		if k.Short() != "" {
			words = append(words, piece.InSpot(k.Short()))
		}
	}
	for _, mode := range append(slices.Compact(kinds), "dynamic", "off", "unset") {
		if n := t.modes[mode]; n > 0 {
			modes = append(modes, fmt.Sprintf("%d %s", n, mode))
		}
	}
	for _, word := range words {
		if total := t.total[word]; total > 0 && amounts[word] {
			free = append(free, fmt.Sprintf("%s %s/%s", word, t.amount(t.free[word]), t.amount(total)))
			largest = append(largest, word+" "+t.amount(t.largest[word]))
		} else if total > 0 {
			free = append(free, fmt.Sprintf("%s %d/%d", word, t.free[word], total))
			largest = append(largest, fmt.Sprintf("%s %d", word, t.largest[word]))
		}
	}
	for _, of := range [][2]string{{"mig", t.profile}, {piece.InSpot("mig"), t.spotProfile}} {
		if word := of[0]; t.total[word] > 0 {
			free = append(free, fmt.Sprintf("%s %d/%d memory slices", word, t.free[word], t.total[word]))
			largest = append(largest, word+" "+cmp.Or(of[1], "0"))
		}
	}
	s.Modes, s.Free, s.Largest = strings.Join(modes, ", "), strings.Join(free, ", "), strings.Join(largest, ", ")
	return s
}
