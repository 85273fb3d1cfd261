// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Alternative is a partition that was tried.
type Alternative struct {
	// Name describes it in a word or two. Present is true if the node has this partition now. Plain
	// is true if all GPUs are whole, shared by memory, dynamic, or have MIG on demand.
	Name           string
	Present, Plain bool
	// Wants has the wanted layout of each GPU, in the node's order.
	Wants []config.Want
	Outcome
}

// Advice is the result of a search.
type Advice struct {
	// Tried are the alternatives, the best first.
	Tried []Alternative
	// All is true if every partition was tried. A partition has each GPU whole, in memory units, or
	// with any set of MIG instances of the profiles that matter, fixed or on demand. Possible is
	// the number of partitions. If that is within Limits.Tries, it counts each assignment of
	// layouts to like GPUs. Otherwise it counts only one of these assignments.
	All      bool
	Possible int
	// Notes tell people what was left out.
	Notes []string
}

// Better compares two partitions by their results, and is negative if a is better. The criteria, in
// this order: the most requests served, the fewest refused or never served, the shortest wait, the
// fewest pods that must ask for another resource, the present partition, the most idle GPUs.
func Better(a, b *Alternative) int {
	present := func(x *Alternative) int {
		if x.Present {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(b.Served, a.Served),
		cmp.Compare(a.Refused+a.Never, b.Refused+b.Never),
		cmp.Compare(a.Wait, b.Wait),
		cmp.Compare(a.Renamed, b.Renamed),
		cmp.Compare(present(a), present(b)),
		-cmp.Compare(a.Idle, b.Idle),
	)
}

// Limits bound a search.
type Limits struct {
	// Tries is the largest number of partitions that are replayed.
	Tries int
	// Dynamic is true if the cluster supports dynamic GPUs. The search then also tries a partition
	// with all GPUs dynamic.
	Dynamic bool
}

// Search tries partitions on a node. It begins with those that have the same layout on all GPUs
// that can have it. Then it tries every mixture, or if there are more than the limit, those that it
// reaches from the best by changing some GPUs at a time. It fails if the node cannot have the
// present partition or any other.
func Search(on Node, present []config.Want, d *Demand, rules Rules, limits Limits) (*Advice, error) {
	s := &search{node: on, demand: d, rules: rules, left: limits.Tries, seen: map[string]bool{}}
	if err := s.list(present); err != nil {
		return nil, err
	}
	if present != nil {
		if err := s.try("present", present, true); err != nil {
			return nil, fmt.Errorf("the present partition: %w", err)
		}
	}
	if s.Possible, s.ordered = s.count(true), true; s.Possible > limits.Tries {
		s.Possible, s.ordered = s.count(false), false
	}
	s.All = s.Possible <= limits.Tries
	s.uniform()
	if limits.Dynamic {
		s.dynamic()
	}
	if s.All {
		s.every(0, make([]int, len(on.Inventory.GPUs)))
	} else {
		s.climb()
	}
	if len(s.Tried) == 0 {
		return nil, fmt.Errorf("these %d GPUs can have none of the partitions that were tried", len(on.Inventory.GPUs))
	}
	slices.SortStableFunc(s.Tried, func(a, b Alternative) int { return Better(&a, &b) })
	return &s.Advice, nil
}

// search is a search that runs now.
type search struct {
	Advice
	node   Node
	demand *Demand
	rules  Rules
	left   int
	// group has for each GPU the index of the first GPU like it, and options the layouts that it
	// can have.
	group   []int
	options [][]option
	seen    map[string]bool
	// ordered is true if partitions count as different when like GPUs swap their layouts.
	ordered bool
}

// option is a layout that a GPU can have.
type option struct {
	name string
	config.Want
}

// Names of options.
const (
	whole    = "whole"
	shared   = "shared by memory"
	onDemand = "mig on demand"
)

// list finds out the options of each GPU. A GPU that is shared keeps how present shares the SMs of GPUs like
// it, since advice is about memory alone.
func (s *search) list(present []config.Want) error {
	gpus := s.node.Inventory.GPUs
	if len(gpus) == 0 {
		return fmt.Errorf("there are no GPUs")
	}
	for i := range gpus {
		like := slices.IndexFunc(gpus[:i], func(o gpu.Device) bool { return alike(&o, &gpus[i]) })
		if like >= 0 {
			s.group, s.options = append(s.group, like), append(s.options, s.options[like])
			continue
		}
		options := s.optionsOf(&gpus[i])
		for o := range options {
			if of := &options[o].Want; of.Mode == config.Shared {
				of.Compute = sharingOf(gpus, &gpus[i], present)
			}
		}
		s.group, s.options = append(s.group, i), append(s.options, options)
	}
	return nil
}

// sharingOf returns how present shares the SMs of the first GPU like d that has other than time slices.
func sharingOf(gpus []gpu.Device, d *gpu.Device, present []config.Want) (of compute.Sharing) {
	for i := range gpus {
		w := slices.IndexFunc(present, func(w config.Want) bool { return w.GPU == gpus[i].UUID })
		if w >= 0 && present[w].Compute.MPS && alike(&gpus[i], d) {
			return present[w].Compute
		}
	}
	return of
}

// alike reports whether two GPUs can have the same layouts.
func alike(a, b *gpu.Device) bool {
	same := func(p, q gpu.Profile) bool {
		return p.Name == q.Name && p.Memory == q.Memory && p.Max == q.Max && slices.Equal(p.Placements, q.Placements)
	}
	return a.Model == b.Model && a.Memory == b.Memory && a.Reserved == b.Reserved && a.Fault == b.Fault &&
		a.MIG.Capable == b.MIG.Capable && slices.EqualFunc(a.MIG.Profiles, b.MIG.Profiles, same)
}

// mostProfiles and mostGeometries bound what is tried of a card.
const (
	mostProfiles   = 5
	mostGeometries = 400
)

// optionsOf returns the layouts that a GPU can have.
func (s *search) optionsOf(d *gpu.Device) []option {
	if d.Fault != "" {
		return []option{{"off", config.Want{Mode: config.Off}}}
	}
	out := []option{
		{whole, config.Want{Mode: config.Whole, API: ledger.DevicePlugin}},
		{shared, config.Want{
			Mode: config.Shared, API: ledger.DevicePlugin,
			TimeSlice: gpu.TimeSliceDefault,
		}},
	}
	if !d.MIG.Capable || len(d.MIG.Profiles) == 0 {
		return out
	}
	card, _ := mig.NewCard(&d.MIG)
	if !card.Known() {
		s.Notes = append(s.Notes, fmt.Sprintf("MIG is left out for GPUs like %d: their driver lists placements only "+
			"in MIG mode. Record the inventory of such a GPU in MIG mode.", d.Index))
		return out
	}
	out = append(out, option{onDemand, config.Want{Mode: config.MIG, API: ledger.DevicePlugin, OnDemand: true}})
	for _, g := range s.geometries(d, card) {
		out = append(out, option{
			"mig " + mig.DescribeCounts(g), config.Want{Mode: config.MIG, API: ledger.DevicePlugin, Geometry: g},
		})
	}
	return out
}

// profiles returns the profiles that matter: those that requests ask for, and the smallest ones
// that hold what requests ask for.
func (s *search) profiles(d *gpu.Device) (out []mig.Name) {
	n := &node{inv: &gpu.Inventory{GPUs: []gpu.Device{*d}}}
	var all []mig.Name
	for _, p := range d.MIG.Profiles {
		if name, err := mig.Parse(p.Name); err == nil {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, mig.Compare)
	weight := map[mig.Name]int{}
	for i := range s.demand.Requests {
		for _, a := range s.demand.Requests[i].Asks {
			if a.Kind.InMIG() && slices.Contains(all, a.Profile) {
				weight[a.Profile]++
				continue
			}
			each, enough := n.needs(a)
			at := slices.IndexFunc(all, func(p mig.Name) bool { return n.serves(a, each, enough, p) })
			if at >= 0 {
				weight[all[at]]++
			}
		}
	}
	for _, p := range all {
		if weight[p] > 0 {
			out = append(out, p)
		}
	}
	if len(out) > mostProfiles { // keep those that are asked for most
		slices.SortStableFunc(out, func(a, b mig.Name) int { return cmp.Compare(weight[b], weight[a]) })
		out = out[:mostProfiles]
		slices.SortFunc(out, mig.Compare)
	}
	return out
}

// geometries returns all sets of instances of the profiles that matter that a card can have.
func (s *search) geometries(d *gpu.Device, card *mig.Card) (out [][]mig.Count) {
	profiles := s.profiles(d)
	var grow func(from int, has []mig.Count)
	grow = func(from int, has []mig.Count) {
		for i := from; i < len(profiles) && len(out) < mostGeometries; i++ {
			for n := 1; ; n++ {
				next := append(slices.Clone(has), mig.Count{Profile: profiles[i], N: n})
				if card.Feasible(next) != nil {
					break
				}
				out = append(out, next)
				grow(i+1, next)
			}
		}
	}
	grow(0, nil)
	return out
}

// try replays the demand on a partition, unless it was tried before or the limit is reached.
func (s *search) try(name string, wants []config.Want, present bool) error {
	key := s.key(wants)
	if s.seen[key] || s.left <= 0 && !s.All && !present {
		return nil
	}
	s.seen[key] = true
	s.left--
	out, err := Replay(s.node, wants, s.demand, s.rules)
	if err != nil {
		return err
	}
	s.Tried = append(s.Tried, Alternative{
		Name: name, Present: present, Plain: slices.Contains([]string{whole, shared, onDemand, "dynamic"}, name),
		Wants: wants, Outcome: out,
	})
	return nil
}

// key returns the same text for equal partitions. Without ordered, it does so also for those that
// give the same layouts to as many GPUs of each kind.
func (s *search) key(wants []config.Want) string {
	words := make([]string, len(wants))
	for i := range wants {
		w := wants[i]
		words[i] = fmt.Sprintf("%d %s %s %d %s %v %t %v %v",
			s.group[i], w.Mode, w.API, w.Replicas, w.TimeSlice, w.Compute, w.OnDemand, w.Geometry, w.Profiles)
	}
	if !s.ordered {
		slices.Sort(words)
	}
	return strings.Join(words, "\n")
}

// choice tries the partition with these options.
func (s *search) choice(pick []int) {
	wants := make([]config.Want, len(pick))
	for i, o := range pick {
		wants[i] = s.options[i][o].Want
		wants[i].GPU = s.node.Inventory.GPUs[i].UUID
	}
	_ = s.try(s.name(pick), wants, false) // a partition that a card cannot have is left out
}

// name describes a partition: "whole", or "GPU 0-1 whole, 2 mig 7x1g.10gb".
func (s *search) name(pick []int) string {
	of := func(i int) string { return s.options[i][pick[i]].name }
	var parts []string
	for i := 0; i < len(pick); {
		j := i
		for j+1 < len(pick) && of(j+1) == of(i) {
			j++
		}
		at := fmt.Sprint(s.node.Inventory.GPUs[i].Index)
		if j > i {
			at += fmt.Sprint("-", s.node.Inventory.GPUs[j].Index)
		}
		parts = append(parts, at+" "+of(i))
		if i = j + 1; i == len(pick) && len(parts) == 1 {
			return of(0)
		}
	}
	return "GPU " + strings.Join(parts, ", ")
}

// uniform tries each option on all GPUs that can have it. The other GPUs are whole.
func (s *search) uniform() {
	var done []string
	for g := range s.options {
		for _, o := range s.options[g] {
			if slices.Contains(done, o.name) {
				continue
			}
			done = append(done, o.name)
			pick := make([]int, len(s.options))
			for i := range pick {
				pick[i] = max(0, slices.IndexFunc(s.options[i], func(p option) bool { return p.name == o.name }))
			}
			s.choice(pick)
		}
	}
}

// dynamic tries all GPUs dynamic.
func (s *search) dynamic() {
	var wants []config.Want
	for i := range s.options {
		if !slices.ContainsFunc(s.options[i], func(o option) bool { return o.name == onDemand }) {
			return
		}
		wants = append(wants, config.Want{
			GPU: s.node.Inventory.GPUs[i].UUID, Mode: config.Dynamic, API: ledger.DRA, OnDemand: true,
		})
	}
	_ = s.try("dynamic", wants, false)
}

// most bounds the result of count.
const most = 1 << 30

// count returns the number of partitions. Without ordered, it counts those that only swap the
// layouts of like GPUs once.
func (s *search) count(ordered bool) int {
	all := 1
	for g := range s.group {
		if s.group[g] != g {
			continue
		}
		n, k := 0, len(s.options[g])
		for _, o := range s.group {
			if o == g {
				n++
			}
		}
		sets := 1
		for i := 1; i <= n; i++ {
			if sets *= k; !ordered { // (k+n-1 choose n)
				sets = sets / k * (k + i - 1) / i
			}
			if sets > most {
				return most
			}
		}
		if all *= sets; all > most {
			return most
		}
	}
	return all
}

// every tries all options of the GPUs from an index on.
func (s *search) every(from int, pick []int) {
	if from == len(pick) {
		s.choice(pick)
		return
	}
	least := 0
	for i := range from { // the order of like GPUs does not matter
		if !s.ordered && s.group[i] == s.group[from] {
			least = pick[i]
		}
	}
	for o := least; o < len(s.options[from]); o++ {
		pick[from] = o
		s.every(from+1, pick)
	}
}

// climb tries the neighbours of the best alternative, as long as one of them is better.
func (s *search) climb() {
	for {
		best := slices.MinFunc(s.Tried, func(a, b Alternative) int { return Better(&a, &b) })
		if !s.around(&best) {
			return
		}
	}
}

// around tries the neighbours of a partition: they change some of the GPUs that are alike and have
// the same layout. It reports whether one of them is better. Changing one GPU is not enough: once a
// name is offered, all requests for that name go there.
func (s *search) around(of *Alternative) bool {
	before := len(s.Tried)
	var done []int
	for i := range of.Wants {
		var same []int
		for j := i; j < len(of.Wants) && !slices.Contains(done, i); j++ {
			if w := of.Wants[j]; s.group[j] == s.group[i] {
				if w.GPU = of.Wants[i].GPU; w.Equal(of.Wants[i]) {
					same = append(same, j)
				}
			}
		}
		done = append(done, same...)
		for o := range s.options[i] {
			next := slices.Clone(of.Wants)
			for _, j := range same {
				next[j] = s.options[j][o].Want
				next[j].GPU = of.Wants[j].GPU
				_ = s.try(s.describe(next), slices.Clone(next), false) // see choice
			}
		}
	}
	return slices.ContainsFunc(s.Tried[before:], func(a Alternative) bool { return Better(&a, of) < 0 })
}

// describe names a partition of options, or one that has a part of the present partition.
func (s *search) describe(wants []config.Want) string {
	pick := make([]int, len(wants))
	for i := range wants {
		pick[i] = slices.IndexFunc(s.options[i],
			func(o option) bool { o.GPU = wants[i].GPU; return o.Want.Equal(wants[i]) })
		if pick[i] < 0 {
			return "the present one, changed"
		}
	}
	return s.name(pick)
}
