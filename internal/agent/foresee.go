// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// basis is the input of the loop's last plan, without the allocations, for other plans. It is
// immutable.
type basis struct {
	plan.Input
	// on has the facts about the node, beside its GPUs, that a partition depends on.
	on config.Node
	// halted is why no work on the hardware can begin now, zero if it can. closed is why nothing
	// can be given out, empty if it can.
	halted  status.Cause
	closed  string
	cordons cordons
}

// basis returns a copy of the present input of a plan.
func (l *loop) basis(allocations []ledger.Allocation) *basis {
	b := &basis{Input: l.planInput(allocations, time.Now()), on: l.partitions.on,
		closed: l.gates.driverFiles.closed(), cordons: l.partitions.cordons}
	b.Allocations, b.MIG.Made = nil, l.executor.made()
	past := make(map[gpu.UUID][]plan.Past, len(b.Past))
	for u, of := range b.Past {
		past[u] = slices.Clone(of)
	}
	if b.Past = past; l.reader.letGoNext != "" || !l.reader.usable() {
		b.halted = l.reader.absent()
	}
	return b
}

// foresight answers what partitions would change, on this agent's node or on one that is known only
// by its inventory.
type foresight struct {
	// snap has a basis.
	snap        *Snapshot
	allocations []ledger.Allocation
	names       *deviceplugin.Names
	domain      string
	drain       bool
	caps        memcap.Level
	unknown     []string
}

// foresee is Agent.Foresee.
func (y *display) foresee(q status.Question) (status.Answer, error) {
	snap := y.latest()
	if snap.basis == nil || !snap.hardware.Answered {
		return status.Answer{}, errors.New(
			"this agent has just started and has not read the driver yet: ask again in a while")
	}
	if len(q.Partitions) > status.MostAsked {
		return status.Answer{}, errors.New("too many partitions in one question")
	}
	file, err := config.Parse("partitions", q.File)
	if err != nil {
		return status.Answer{Mistakes: mistakes(err)}, nil
	}
	if q.UnitMiB > 0 || q.API != "" {
		b := *snap.basis
		b.on.Unit, b.on.API = cmp.Or(gpu.MiB(q.UnitMiB), b.on.Unit), cmp.Or(ledger.FrontEnd(q.API), b.on.API)
		b.Unit = b.on.Unit
		s := *snap
		s.basis = &b
		snap = &s
	}
	f := &foresight{snap: snap, allocations: y.ledger.Allocations(), names: y.names, domain: y.domain,
		drain: y.drain, caps: y.caps}
	if y.claimed() {
		f.unknown = []string{"claims that were allocated to pods but are not prepared yet: " +
			"the agent asks the API server for them before it takes anything away"}
	}
	own, unset := y.choice(file)
	out := status.Answer{Found: foundIn(snap.found)}
	for _, name := range q.Partitions {
		p := f.plan(file, name, q.Brief)
		p.Own = unset == (status.Cause{}) && name == own
		out.Plans = append(out.Plans, p)
	}
	switch {
	case len(q.Partitions) > 0:
	case unset != (status.Cause{}):
		out.Plans = []status.Plan{{Own: true, State: string(Pending), Reason: unset.Reason, Message: unset.Message,
			Conditions: []status.Condition{unset.Condition(status.Pending, "")},
			GPUs:       []status.PlannedGPU{}, Offers: []status.PlannedOffer{}}}
	default:
		p := f.plan(file, own, q.Brief)
		p.Own = true
		out.Plans = []status.Plan{p}
	}
	return out, nil
}

// ForeseeFrom answers the same for a node that is known only by its inventory. A MIG instance that
// the inventory calls busy is held by the holder that it names, or else by an unknown process. All
// other instances count as the agent's own. odd lists what the inventory says but ForeseeFrom
// cannot use.
func ForeseeFrom(inv *gpu.Inventory, on config.Node, domain string, file *config.File,
	partition string) (p status.Plan, odd error) {
	b := &basis{on: on, Input: plan.Input{Unit: on.Unit,
		Layouts: map[gpu.UUID]plan.Layout{}, Others: map[gpu.UUID]string{},
		MIG: plan.MIGInput{Cards: map[gpu.UUID]*mig.Card{}, Made: map[gpu.UUID]map[mig.Placement]bool{}}}}
	f := &foresight{snap: &Snapshot{basis: b}, names: deviceplugin.ResourceNames(domain), domain: domain,
		drain: true, caps: memcap.API,
		unknown: []string{
			"which pods hold something of these GPUs, but for the MIG instances that the inventory calls busy",
			"how the GPUs are laid out now, apart from MIG", "the partition that the node's label chooses"}}
	copied := *inv
	copied.GPUs = slices.Clone(inv.GPUs)
	b.Inventory = &copied
	for i := range copied.GPUs {
		d := &copied.GPUs[i]
		if d.MIG.Capable {
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				odd = errors.Join(odd, status.Why(status.MIGUnsupported, "%s: %v", d.Name(), err))
			}
			b.MIG.Cards[d.UUID] = card
		}
		f.stand(d)
	}
	return f.plan(file, partition, false), odd
}

// stand takes in the MIG instances of an inventory, which a person may have written.
func (f *foresight) stand(d *gpu.Device) {
	made := map[mig.Placement]bool{}
	var instances []gpu.Instance
	for i, s := range mig.Stand(&d.MIG) {
		in := gpu.Instance{Profile: s.Profile.String(), Placement: gpu.Placement{Start: s.Start, Size: s.Size},
			CIStart: s.CI, GI: i + 1, Busy: s.Pinned}
		switch {
		case s.Profile == (mig.Name{}):
			in.Profile = s.Reason // no valid name, so no plan is made
		case s.Empty:
			in.CI = -1
		case s.Pinned && s.Holder != "":
			in.Busy = false
			namespace, name, _ := strings.Cut(s.Holder, "/")
			if name == "" {
				namespace, name = "", s.Holder
			}
			f.allocations = append(f.allocations, ledger.Allocation{
				ID:    cdi.Key(s.Holder, []string{mig.ID(d.UUID, s.Placement)}),
				Owner: ledger.DevicePlugin, Phase: ledger.Open,
				Resource: f.names.OfProfile(s.Profile),
				Holder:   ledger.Holder{Pod: workload.Pod{Namespace: namespace, Name: name}},
				Grants:   []ledger.Grant{{GPU: d.UUID, Piece: piece.Instance(s.Placement)}}})
		}
		made[s.Placement] = true
		instances = append(instances, in)
	}
	d.MIG.Instances = instances
	f.snap.basis.MIG.Made[d.UUID] = made
}

// plan returns what a partition of a file would change.
func (f *foresight) plan(file *config.File, name string, brief bool) status.Plan {
	out := status.Plan{Partition: name, Unknown: f.unknown,
		GPUs: []status.PlannedGPU{}, Offers: []status.PlannedOffer{}}
	in := f.snap.basis.Input
	in.Allocations = f.allocations
	want, err := file.Desire(name, in.Inventory, f.snap.basis.on)
	if err != nil {
		why := status.CauseOf(err, status.PartitionUnfit)
		out.State, out.Reason, out.Message, out.Mistakes = string(Invalid), why.Reason, why.Message, mistakes(err)
		out.Elsewhere = file.Elsewhere(name, in.Inventory)
		return out
	}
	if f.unknown != nil && slices.ContainsFunc(want.GPUs, func(w config.Want) bool { return w.Compute.MPS }) {
		out.Unknown = append(slices.Clone(f.unknown), "whether a supervisor keeps MPS daemons on the node")
	}
	out.Open = mistakes(file.Prove(want, in.Inventory))
	in.Wanted = want.GPUs
	then := plan.Foresee(in, f.snap.basis.halted)
	end := f.end(&then, want.GPUs)
	o := &end.Outcome
	out.State, out.Reason, out.Message = string(o.State), o.Reason, o.Message
	out.Conditions = slices.Clone(end.Conditions)
	slices.SortStableFunc(out.Conditions, status.Condition.Compare)
	for i := range want.GPUs {
		out.GPUs = append(out.GPUs, f.gpu(&then.Inventory.GPUs[i], &want.GPUs[i], &then))
	}
	if !brief {
		out.Offers = f.offers(&then, end)
	}
	return out
}

// end returns the snapshot that the round after the last plan would leave.
func (f *foresight) end(then *plan.Forecast, wanted []config.Want) *Snapshot {
	s := &Snapshot{At: f.snap.At, asked: asked{Wanted: wanted},
		hardware: readout{Inventory: then.Inventory, Answered: true, Hangs: f.snap.hardware.Hangs},
		shape: shape{Layouts: then.Changes.Layouts, Others: f.snap.basis.Others, Made: then.Made,
			Leaving: then.Changes.Leaving, Failing: map[mig.Place]status.Cause{}}}
	for at, why := range f.snap.shape.Failing {
		if len(then.Steps[at.GPU]) == 0 { // otherwise something was made there since, and it is tried again
			s.shape.Failing[at] = why
		}
	}
	for _, v := range f.snap.hardware.Verdicts {
		// A fault of an instance ends with the instance.
		if placements, _ := placementsOf(v.Subject, then.Inventory); v.GI < 0 || len(placements) > 0 {
			s.hardware.Verdicts = append(s.hardware.Verdicts, v)
		}
	}
	of := findings{changes: &then.Changes}
	if halted := f.snap.basis.halted; halted.Reason == status.DriverLetGo {
		of.note = halted
	}
	for _, u := range sortedKeys(then.Waits) {
		of.work = append(of.work, then.Waits[u].Condition(status.Pending, string(u)))
	}
	if slices.EqualFunc(wanted, f.snap.asked.Wanted, config.Want.Equal) {
		// The partition stays the same, so what has failed is tried again later.
		for _, c := range f.snap.Conditions {
			failed := c.Reason == status.GPUChangeFailed || c.Reason == status.ResetDue
			if failed && len(then.Steps[gpu.UUID(c.Subject)]) > 0 {
				of.work = append(of.work, c)
			}
		}
	}
	of.judge(s, f.snap.lasting)
	return s
}

// gpu returns the steps of one GPU to its partition. d is the GPU at the end.
func (f *foresight) gpu(d *gpu.Device, w *config.Want, then *plan.Forecast) status.PlannedGPU {
	g := status.PlannedGPU{Index: d.Index, UUID: string(d.UUID), Model: d.Model, Wanted: describeWant(w),
		Fault: d.Fault, Untold: then.Untold[d.UUID],
		From: f.snap.basis.Layouts[d.UUID].Words(), To: then.Changes.Layouts[d.UUID].Words(),
		Steps: []status.PlannedStep{}, Result: []status.PlannedInstance{}, Blocked: []status.InTheWay{}}
	if w.API == ledger.DRA {
		g.API = string(ledger.DRA)
	}
	for _, s := range then.Steps[d.UUID] {
		of := status.PlannedStep{Op: string(s.Op), Reset: s.Reset}
		if s.Placement != (mig.Placement{}) {
			of.PlannedInstance = planned(s.Placement)
		} else {
			g.ResetUnknown = g.ResetUnknown || d.ComputeCapability == ""
		}
		g.Steps = append(g.Steps, of)
	}
	var stands []mig.Placement
	for i := range d.MIG.Instances {
		if p, err := mig.PlacementOf(&d.MIG.Instances[i]); err == nil && d.MIG.Instances[i].CI >= 0 {
			stands = append(stands, p)
		}
	}
	slices.SortFunc(stands, mig.ComparePlacements)
	for _, p := range stands {
		g.Result = append(g.Result, planned(p))
	}
	for _, b := range then.Changes.Blocked {
		if b.GPU != d.UUID {
			continue
		}
		for _, s := range b.In {
			at := planned(s.Placement)
			g.Blocked = append(g.Blocked,
				status.InTheWay{PlannedInstance: &at, Reason: status.Reason(s.Reason), Holder: s.Holder})
		}
		if len(b.In) == 0 {
			for _, who := range b.Holders {
				g.Blocked = append(g.Blocked, status.InTheWay{Reason: b.Reason, Holder: who})
			}
		}
	}
	return g
}

func planned(p mig.Placement) status.PlannedInstance {
	out := status.PlannedInstance{Profile: p.Profile.String(), Start: p.Start}
	if p.Profile.Compute != 0 {
		out.CI = &p.CI
	}
	return out
}

// offers returns what pods can ask for in the end.
func (f *foresight) offers(then *plan.Forecast, end *Snapshot) []status.PlannedOffer {
	// The front-end works out what is free beside the present allocations.
	books := ledger.New(func() {}, time.Now)
	for i := range f.allocations {
		a := &f.allocations[i]
		_, _ = books.Found(a.ID, a.Record(), a.Given) // each was in a ledger, or has one grant
	}
	front := deviceplugin.New(books, time.Now)
	front.Publish(func(held []ledger.Allocation) *deviceplugin.Offer {
		return deviceplugin.Build(deviceplugin.Input{Inventory: then.Inventory, Changes: &then.Changes, Held: held,
			Names: f.names, Cards: f.snap.basis.MIG.Cards, Failing: end.shape.Failing,
			Drain: f.drain, Others: f.snap.basis.Others, Cordoned: f.snap.basis.cordons.gpus,
			Closed: f.snap.basis.closed})
	})
	front.SetFaults(faultsIn(end.hardware.Verdicts, end.hardware.Inventory))
	end.Conditions = slices.Concat(end.Conditions, end.leaves(),
		f.snap.basis.cordons.conditions(f.domain, then.Inventory))
	at := newScene(end, f.names, f.domain, f.snap.basis.on.Unit, front.Offer(), f.allocations)
	return offersOf(at.gpuNode(gpunode.InPods, f.caps), f.names, f.domain)
}

// offersOf returns what pods can ask for of a node, through either front-end. Memory by claims has no
// resource, and has the name of its DeviceClass in domain.
func offersOf(n *gpunode.Status, names *deviceplugin.Names, domain string) []status.PlannedOffer {
	type key struct{ resource, api string }
	sum := map[key]status.PlannedOffer{}
	unit := map[string]int{}
	add := func(resource, api string, total, free, largest int, onOne bool) {
		k := key{resource, api}
		o := sum[k]
		o.Resource, o.API, o.UnitMiB, o.Total, o.Free = resource, api, unit[resource], o.Total+total, o.Free+free
		if onOne { // a request must fit on one GPU
			o.Largest = max(o.Largest, largest)
		} else {
			o.Largest += largest
		}
		sum[k] = o
	}
	for _, r := range n.Resources {
		add(r.Name, "", r.Total, r.Free, r.Largest, false)
	}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		if g.API != string(ledger.DRA) {
			continue
		}
		if g.Mode == string(config.Dynamic) {
			idle := 0
			if g.Free == g.Total {
				idle = 1
			}
			for _, k := range piece.Kinds() {
				if k.Dynamic() && k.Alone() {
					add(names.Of(k, mig.Name{}), g.API, 1, idle, idle, false)
				}
			}
		}
		if k := g.Kind.Counted(); g.Total > 0 {
			name := names.Of(k, mig.Name{})
			if k.Class() != k.Short() {
				name = k.Class() + "." + domain
				unit[name] = n.MemoryUnitMiB
			}
			add(name, g.API, g.Total, g.Free, g.Largest, k.Together())
		}
		if g.MIG == nil {
			continue
		}
		for _, o := range g.MIG.Offers {
			if p, err := mig.Parse(o.Profile); err == nil && o.Resource == "" {
				add(names.OfProfile(p), g.API, len(o.Placements), len(o.Free), o.Largest, false)
			}
		}
	}
	out := []status.PlannedOffer{}
	byName := func(a, b key) int { return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.api, b.api)) }
	for _, k := range slices.SortedFunc(maps.Keys(sum), byName) {
		if o := sum[k]; o.Total > 0 {
			out = append(out, o)
		}
	}
	return out
}

// mistakes returns the mistakes in a partition file that an error lists.
func mistakes(err error) (out []status.Mistake) {
	all, ok := errors.AsType[config.Errors](err)
	if !ok && err != nil {
		return []status.Mistake{{Line: 1, Message: err.Error()}}
	}
	for _, e := range all {
		out = append(out, status.Mistake{Line: e.Line, Message: e.Msg})
	}
	return out
}

// describeWant describes in a few words what a GPU is to become.
func describeWant(w *config.Want) (text string) {
	switch {
	case w.Mode == config.Keep:
		return "as it is"
	case w.Mode != config.MIG:
		if text = string(w.Mode); w.Compute.MPS {
			text += ", " + w.Compute.String()
		}
	case w.OnDemand:
		text = "mig, on demand"
	default:
		text = "mig, " + mig.DescribeCounts(w.Geometry)
	}
	if w.API == ledger.DRA {
		text += ", through dra"
	}
	switch {
	case w.Spot.On && w.Spot.Most > 0:
		text += fmt.Sprintf(", spot up to %d", w.Spot.Most)
	case w.Spot.On:
		text += ", spot"
	}
	return text
}
