// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"maps"
	"slices"
	"sort"
	"strings"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// room is what is free on a node, and the pods and seats that are about to take some of it.
type room struct {
	gpus []space
	// at is each GPU's index in gpus by its UUID. passed and has are the node's, empty of an unknown one.
	at     map[string]int
	passed string
	has    map[string]int
	// taken counts the steps of all trials.
	taken *int
	// kinds has the resources that the node offers.
	kinds map[string]piece.Kind
	// pending are the pods that have not reported all their devices, in the order of their UIDs. seats
	// are the open ones, oldest first.
	pending []*ask
	seats   []*seat
	// settled is what is left after the agent's packing has given the pending pods their devices.
	// grouped is what is left after the seats of groups got theirs, too, and expected after all seats
	// did; stands are the seats that found room. All are nil until after or expect is called; rest is how
	// many steps expect left over.
	settled, grouped, expected *trial
	stands                     []*seat
	rest                       int
	// verdicts, blocks and chunks remember answers: of judge, of block and of chunk.
	verdicts       map[verdictKey]verdict
	blocks, chunks map[string]int
	// tenants is what node.tenants returns, nil until that is asked for.
	tenants map[string]map[string]bool
}

// verdictKey is what a verdict depends on besides the room: what a pod asks for, the hold whose room it
// may use there, and what may lose its room for it; or that it is a seat's.
type verdictKey struct {
	shape, hold string
	yield       yielding
	seat        bool
}

// verdict is the answer to a pod: why there is no room, or how bad a choice the node is.
type verdict struct {
	why          string
	waits, held  bool
	spoilt, left int
	// yields is how many devices spot pods lose there.
	yields int
	// lack is what the node lacks of the plain resources, where that is why.
	lack Lack
}

// maxVerdicts and maxShape bound what a room remembers: a pod's shape is as long as its list of
// containers.
const (
	maxVerdicts = 200
	maxShape    = 1 << 10
)

// remember finds a verdict once.
func (r *room) remember(key verdictKey, find func() verdict) verdict {
	v, known := r.verdicts[key]
	if known {
		return v
	}
	v = find()
	if r.verdicts == nil || len(r.verdicts) >= maxVerdicts {
		r.verdicts = map[verdictKey]verdict{}
	}
	if len(key.shape) <= maxShape {
		r.verdicts[key] = v
	}
	return v
}

// space is what is free of a GPU. Copies share slices and maps; call alter before changing these.
type space struct {
	own      bool // true if the slices and maps are not shared
	uuid     gpu.UUID
	rank     int
	kind     piece.Kind
	resource string
	// spot is the index of the space with what spot pods can have of the GPU, 0 if there is none. inSpot is
	// true for that space. There, unheld counts the devices that are not held, and most is how many more of
	// them spot pods may have; free is the smaller one.
	spot         int
	inSpot       bool
	unheld, most int
	// lent has the numbers of devices there that guaranteed pods have and lend, and lentFree counts those of them
	// that no spot pod has.
	// lentPlaces are such MIG devices.
	lent       map[int]bool
	lentFree   int
	lentPlaces map[mig.Placement]bool
	// yielding has the numbers there of devices that spot pods are to give back or have given back, and yieldingFree
	// counts those of them that no guaranteed pod has. yieldingPlaces are such MIG devices.
	yielding       map[int]bool
	yieldingFree   int
	yieldingPlaces []mig.Placement
	// mps is true if the GPU is shared through MPS, and single if it has replicas then: a container with one of them
	// has no other one.
	mps, single bool
	// total is how many devices the GPU has, held tells which of them are held, and free
	// counts the others. Of a GPU that gives out nothing new, all are held.
	total, free int
	held        []bool
	// lowest is a number below which all are held.
	lowest int
	// MIG: standing instances may not be destroyed, warm ones exist and are free. places are the
	// free placements by resource, and all are the card's.
	of             *cardOf
	card           *mig.Card
	onDemand       bool
	standing, warm []mig.Placement
	places, all    map[string][]mig.Placement
}

// alter copies what a space may share with others.
func (s *space) alter() {
	if !s.own {
		s.own = true
		s.held, s.standing, s.places = slices.Clone(s.held), slices.Clone(s.standing), maps.Clone(s.places)
	}
}

// shared are copies of spaces.
func shared(of []space) []space {
	out := slices.Clone(of)
	for i := range out {
		out[i].own = false
	}
	return out
}

// roomOf is the room of a node as if the pods named by without were gone, and some devices free.
func (b *Books) roomOf(n *node, without map[string]bool, free ...string) *room {
	gone := map[string]bool{} // devices
	for _, id := range free {
		gone[id] = true
	}
	for uid := range without {
		if e := n.here[uid]; e != nil {
			for _, id := range n.devices(&e.Pod) {
				gone[id] = true
			}
		}
	}
	r := &room{passed: n.passed, has: n.has, taken: &b.taken}
	if len(gone) > 0 {
		r.gpus, r.at, r.kinds = n.spaces(gone)
	} else {
		if n.kinds == nil {
			n.empty, n.at, n.kinds = n.spaces(nil)
		}
		r.gpus, r.at, r.kinds = shared(n.empty), n.at, n.kinds
	}
	if len(r.kinds) == 0 {
		return r
	}
	r.seats = n.seats
	if len(without) > 0 {
		r.seats = slices.DeleteFunc(slices.Clone(n.seats), func(s *seat) bool { return without[s.UID] })
	}
	for _, uid := range slices.Sorted(maps.Keys(n.here)) {
		e := n.here[uid]
		if without[uid] {
			continue
		}
		ids := n.devices(&e.Pod)
		for _, id := range ids {
			r.hold(id)
		}
		// A pod that asks for more than the node can have gets nothing, or has its devices already.
		if !r.reported(e.ask, ids) && e.beyond(n.has) == "" {
			r.pending = append(r.pending, e.ask)
		}
	}
	slices.SortStableFunc(r.pending, func(a, b *ask) int { return last(a.spotOnly(), b.spotOnly()) })
	return r
}

// last orders what is false before what is true.
func last(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// spaces returns the node's GPUs by its GPUNode, each GPU's index by UUID, and the kinds of the resources
// that they offer. Devices that are gone count as free, although the GPUNode counts them as held. A
// node that is not ready has none.
func (n *node) spaces(gone map[string]bool) (gpus []space, at map[string]int, kinds map[string]piece.Kind) {
	at, kinds = map[string]int{}, map[string]piece.Kind{}
	if !n.known || !n.ready || !gpunode.Is(n.status.Conditions, gpunode.Ready) {
		return nil, at, kinds
	}
	for i := range n.status.GPUs {
		g := &n.status.GPUs[i]
		if g.API != string(workload.DevicePlugin) {
			continue
		}
		s := space{own: true, uuid: gpu.UUID(g.UUID), rank: g.Index, kind: g.Kind, resource: g.Resource,
			mps: g.Compute == gpunode.Through, single: g.Compute == gpunode.Through && !g.Kind.Together()}
		open := gpunode.Is(g.Conditions, gpunode.Available) && !g.Cordoned
		if g.Kind == piece.KindPlacement {
			n.placements(&s, g, open, gone)
		} else {
			s.numbers(g, open, gone)
			kinds[g.Resource] = g.Kind
		}
		for name := range s.places {
			kinds[name] = piece.KindPlacement
		}
		at[g.UUID] = len(gpus)
		if g.Spot == nil {
			gpus = append(gpus, s)
			continue
		}
		s.spot = len(gpus) + 1
		second := n.spotSpace(&s, g, open, gone)
		gpus = append(gpus, s, second)
		if second.resource != "" && !s.kind.InMIG() {
			kinds[second.resource] = g.Kind
		}
		for name := range second.places {
			kinds[name] = s.kind
		}
	}
	return gpus, at, kinds
}

// devices are those of a pod, by its own status or by the node's word.
func (n *node) devices(p *Pod) []string {
	if n.status.HoldersIn != gpunode.InObject {
		return p.Devices
	}
	out := slices.Concat(p.Devices, n.held[podName{p.Namespace, p.Name}])
	slices.Sort(out)
	return slices.Compact(out)
}

// used are the IDs of the devices that the GPUNode counts as held.
func (n *node) used() map[string]bool {
	out := map[string]bool{}
	for i := range n.status.GPUs {
		g := &n.status.GPUs[i]
		if g.API == string(workload.DRA) {
			continue
		}
		s := space{uuid: gpu.UUID(g.UUID), kind: g.Kind}
		for number := range g.Used.All() {
			out[s.id(number)] = true
		}
		if g.MIG != nil {
			for _, place := range g.MIG.Used {
				out[g.UUID+"::"+place] = true
			}
		}
		if g.Spot == nil {
			continue
		}
		for number := range g.Spot.Used.All() {
			out[SpotDevice(s.id(number))] = true
		}
		for number := range g.Spot.Yielding.All() {
			out[SpotDevice(s.id(number))] = true
		}
		for _, place := range slices.Concat(g.Spot.UsedPlacements, g.Spot.YieldingPlacements) {
			out[SpotDevice(g.UUID+"::"+place)] = true
		}
	}
	return out
}

// numbers fills in the devices of a GPU that have numbers.
func (s *space) numbers(g *gpunode.GPU, open bool, gone map[string]bool) {
	s.total = g.Total
	s.held = make([]bool, g.Total)
	if open {
		s.free = g.Total
	} else {
		for i := range s.held {
			s.held[i] = true
		}
	}
	for number := range g.Used.All() {
		if number < s.total && !s.held[number] && !gone[s.id(number)] {
			s.held[number] = true
			s.free--
		}
	}
}

// id is the ID of a device that has a number.
func (s *space) id(number int) string {
	id := string(s.uuid)
	if s.kind != piece.KindWhole {
		id = timeslice.ID(s.uuid, number)
	}
	if s.inSpot {
		return SpotDevice(id)
	}
	return id
}

// placements fills in what a GPU with MIG has.
func (n *node) placements(s *space, g *gpunode.GPU, open bool, gone map[string]bool) {
	s.places = map[string][]mig.Placement{}
	if g.MIG == nil {
		return
	}
	s.onDemand = g.MIG.OnDemand
	kind := n.cards[g.MIG.Card]
	for _, o := range g.MIG.Offers {
		if o.Resource != "" {
			s.places[o.Resource] = nil
		}
	}
	if kind == nil {
		return
	}
	s.of, s.card, s.all = kind, kind.card, map[string][]mig.Placement{}
	for _, o := range g.MIG.Offers {
		s.all[o.Resource] = kind.profiles[o.Profile]
	}
	read := kind.read
	freed := map[mig.Placement]bool{}
	for _, text := range g.MIG.Used {
		if p, ok := read(text); ok {
			if freed[p] = gone[mig.ID(s.uuid, p)]; !freed[p] {
				s.standing = append(s.standing, p)
			}
		}
	}
	for _, text := range g.MIG.Blocked {
		if p, ok := read(text); ok {
			s.standing = append(s.standing, p)
		}
	}
	for _, text := range g.MIG.Warm {
		if p, ok := read(text); ok {
			s.warm = append(s.warm, p)
		}
	}
	if !open {
		return
	}
	for _, o := range g.MIG.Offers {
		for _, at := range o.Placements {
			p, ok := read(o.Profile + "@" + at)
			// What is not free now may be so once others have gone.
			if ok && o.Resource != "" && (slices.Contains(o.Free, at) || len(gone) > 0 && s.opens(g, p, freed)) {
				s.places[o.Resource] = append(s.places[o.Resource], p)
			}
		}
	}
	s.narrow()
}

// opens reports whether a placement that is not free has its room from what is freed.
func (s *space) opens(g *gpunode.GPU, p mig.Placement, freed map[mig.Placement]bool) bool {
	if !s.onDemand {
		return freed[p]
	}
	before := slices.Clone(s.standing)
	for q, yes := range freed {
		if yes {
			before = append(before, q)
		}
	}
	return !s.card.Fits(before, p) && s.card.Fits(s.standing, p)
}

// narrow takes out placements that cannot stand beside what does.
func (s *space) narrow() {
	for name, of := range s.places {
		s.places[name] = slices.DeleteFunc(slices.Clone(of), func(p mig.Placement) bool {
			return s.onDemand && !s.card.Fits(s.standing, p) || !s.onDemand && slices.Contains(s.standing, p)
		})
	}
}

// hold notes that a device is held. A device that its GPU cannot have now is of a layout
// before this one, which is going.
func (r *room) hold(id string) {
	device, bySpot := strings.CutSuffix(id, spotMark)
	uuid, rest, pieced := strings.Cut(device, "::")
	i, known := r.at[uuid]
	if !known {
		return
	}
	of := []int{i}
	switch second := r.gpus[i].spot; {
	case bySpot && second == 0: // the GPU has nothing for spot pods now
		return
	case bySpot:
		of = []int{second}
	case second != 0:
		of = append(of, second)
	}
	took := false // from the space of guaranteed pods
	for _, i := range of {
		s := &r.gpus[i]
		take := func(number int) {
			before := s.free
			if s.holdNumber(number, bySpot); !s.inSpot {
				took = s.free < before
			} else if took {
				s.yielded(number)
			}
		}
		switch {
		case s.kind == piece.KindPlacement:
			if s.card == nil {
				continue
			}
			if p, err := gpunode.Placement(s.card, rest); err == nil {
				s.holdPlacement(p, bySpot)
			}
		case !pieced:
			take(0)
		default:
			if _, number, err := timeslice.ParseID(device); err == nil {
				take(number)
			}
		}
	}
}

// reported reports whether a pod's devices are all that it has asked for of the node.
func (r *room) reported(p *ask, ids []string) bool {
	for name, need := range p.needs {
		if _, ours := r.kinds[name]; ours && (len(ids) < need || r.count(name, ids) < need) {
			return false
		}
	}
	return true
}

// count is how many of the devices are of a resource.
func (r *room) count(resource string, ids []string) (n int) {
	of, spot := piece.OfSpot(resource)
	_, short, _ := strings.Cut(of, "/")
	profile, err := mig.ParseResource(short)
	for _, id := range ids {
		device, bySpot := strings.CutSuffix(id, spotMark)
		if bySpot != spot {
			continue
		}
		uuid, rest, _ := strings.Cut(device, "::")
		i, known := r.at[uuid]
		switch {
		case r.kinds[resource] == piece.KindPlacement:
			if _, p, _, _, bad := mig.ParseID(device); err == nil && bad == nil && p == profile {
				n++
			}
		case !known || strings.Contains(rest, "@"):
		case r.gpus[i].resource == of && (!spot || r.gpus[i].spot != 0):
			n++
		}
	}
	return n
}

// needs are the numbers of devices that a pod has at least, by resource: app containers are
// given again what init containers had.
func (p *Pod) needs() map[string]int {
	most, sum := map[string]int{}, map[string]int{}
	for i := range p.Containers {
		c := &p.Containers[i]
		for name, n := range c.Requests {
			if c.Init {
				most[name] = max(most[name], n+sum[name]) // sidecars before it go on
			} else {
				sum[name] += n
			}
		}
	}
	for name, n := range most {
		sum[name] = max(sum[name], n)
	}
	maps.DeleteFunc(sum, func(_ string, n int) bool { return n <= 0 })
	return sum
}

// pinned reports whether it is not enough to know what a pod's containers ask for one by
// one: init containers' devices come again, and split compute instances share.
func (p *Pod) pinned() bool {
	for i := range p.Containers {
		c := &p.Containers[i]
		for name, n := range c.Requests {
			name, _ := piece.OfSpot(name)
			_, short, _ := strings.Cut(name, "/")
			profile, err := mig.ParseResource(short)
			if n > 0 && (c.Init || err == nil && profile.Compute != 0) {
				return true
			}
		}
	}
	return false
}

// family is the resources that compete with one: MIG profiles of a tier all with each other. Guaranteed ones
// compete with those of the spot tier, too, but not the other way round.
func (r *room) family(resource string) string {
	if r.kinds[resource] != piece.KindPlacement {
		return resource
	}
	if _, spot := piece.OfSpot(resource); spot {
		return piece.InSpot("mig")
	}
	return "mig"
}

// sorted are the names of resources in order.
func sorted(requests map[string]int) []string { return slices.Sorted(maps.Keys(requests)) }

// block is what largest would be once those who are about to have devices, or are to come, have
// them.
func (r *room) block(resource string) int {
	if len(r.pending) == 0 && len(r.seats) == 0 {
		return r.largest(resource)
	}
	return (&room{gpus: r.expect().gpus}).largest(resource)
}

// chunk is the largest amount of a resource that still finds room beside those.
func (r *room) chunk(resource string) int {
	if n, known := r.chunks[resource]; known {
		return n
	}
	t := r.expect()
	n := sort.Search(r.block(resource), func(i int) bool {
		_, ok := t.anew().take(resource, i+1, nil)
		return !ok
	})
	if r.chunks == nil {
		r.chunks = map[string]int{}
	}
	r.chunks[resource] = n
	return n
}

// largest is the largest request for a resource that one container could have, and of a
// MIG profile how many free placements there are.
func (r *room) largest(resource string) (n int) {
	if n, known := r.blocks[resource]; known {
		return n
	}
	defer func() {
		if r.blocks == nil {
			r.blocks = map[string]int{}
		}
		r.blocks[resource] = n
	}()
	alone := 0
	for i := range r.gpus {
		s := &r.gpus[i]
		switch {
		case s.kind == piece.KindPlacement:
			n += len(s.places[resource])
		case s.resource != resource:
		case s.kind == piece.KindUnits:
			n = max(n, s.free)
		case s.single:
			alone = max(alone, min(s.free, 1))
		default:
			n += min(s.free, 1)
		}
	}
	return max(n, alone)
}
