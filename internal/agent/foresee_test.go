// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	faked "example.com/gpu-agent/tests/fakes/claims"
	resourcev1 "k8s.io/api/resource/v1"
)

var foreseeSeed = flag.Int("foresee.seed", -1, "the one seed of TestForeseen")

// foreseen is a node about whose future an agent is asked.
type foreseen struct {
	*bench
	rng  *rand.Rand
	gpus int
	pods int
	met  map[string]int
}

// partitions is a file with two partitions, in a good part of which some GPUs are offered
// through DRA.
func (f *foreseen) partitions() string {
	api := func() string { return []string{"", "", ", api: dra"}[f.rng.IntN(3)] }
	whole, replicas, instances := api(), api(), api()
	if f.rng.IntN(3) == 0 {
		whole, instances = ", api: dra", ", api: dra"
	}
	var b strings.Builder
	b.WriteString("version: v1\npartitions:\n")
	for _, name := range []string{"default", "other"} {
		fmt.Fprintf(&b, "  %s:\n", name)
		for i := range f.gpus {
			layouts := []string{"{mode: shared" + api() + "}", "{mode: shared" + api() + "}", "{mode: whole" + whole + "}", "{mode: shared, replicas: " + fmt.Sprint(2+f.rng.IntN(2)) + replicas + "}", "{mode: off}"}
			for _, l := range []string{demand, demand, sevenSmall, twoLarge, "{mode: mig, geometry: {1g.10gb: 3, 3g.40gb: 1}}", "{mode: mig, geometry: {2g.20gb: 1}}", "{mode: mig, profiles: [1g.10gb, 3g.40gb]}"} {
				layouts = append(layouts, strings.TrimSuffix(l, "}")+instances+"}")
			}
			layouts = append(layouts, "{mode: mig, geometry: {}}")
			if whole != "" && instances != "" {
				layouts = append(layouts, "{mode: dynamic, api: dra}", "{mode: dynamic, api: dra}", "{mode: dynamic, api: dra}")
			}
			if f.rng.IntN(40) == 0 {
				layouts = []string{"{mode: mig, geometry: {1g.10gb: 5, 3g.40gb: 1}}"} // there is no room for it
			}
			fmt.Fprintf(&b, "    - {devices: [%d], %s\n", i, layouts[f.rng.IntN(len(layouts))][1:])
		}
	}
	return b.String()
}

// holders has pods and claims come, each of something that is on offer.
func (f *foreseen) holders() {
	for range f.rng.IntN(5) {
		f.pods++
		name := fmt.Sprint("pod-", f.pods)
		if f.rng.IntN(3) == 0 {
			f.claim(name)
			continue
		}
		type choice struct {
			resource string
			of       deviceplugin.Device
		}
		var all []choice
		for _, r := range f.front.Offer().Resources {
			for _, d := range r.Devices {
				if d.Healthy && !d.Leaving && !slices.ContainsFunc(f.Allocations(), func(a ledger.Allocation) bool {
					return slices.Contains(deviceplugin.IDs(a.Grants), d.ID) && a.Resource == r.Name
				}) {
					all = append(all, choice{r.Name, d})
				}
			}
		}
		if len(all) == 0 {
			continue
		}
		c := all[f.rng.IntN(len(all))]
		f.met["pod of "+c.resource]++
		if f.rng.IntN(3) > 0 {
			f.hold(name, c.resource, c.of.ID)
			continue
		}
		// Its container has not started: the kubelet alone has it.
		grant, err := f.source(c.resource).Allocate([]string{c.of.ID})
		if err != nil {
			f.t.Fatal(err)
		}
		f.with(func() {
			maps.Copy(f.outside.granted, grant.Annotations)
			f.made[cdi.Key(c.resource, []string{c.of.ID})] = time.Now().Add(time.Nanosecond)
			f.holdings = append(f.holdings, node.Holding{Namespace: "ns", Pod: name, Container: "c", Resource: c.resource, IDs: []string{c.of.ID}})
		})
	}
}

func (f *foreseen) claim(name string) {
	skip := f.rng.IntN(6)
	c, err := f.dra.Schedule("ns", name, faked.Request{Name: "gpu", Memory: 1 << 30, Fits: func(*resourcev1.Device) bool { skip--; return skip < 0 }})
	if err != nil {
		return // nothing is offered that way
	}
	if _, err := f.dra.prepare(f.t.Context(), c); err != nil {
		f.t.Errorf("claim %s: %v", name, err)
	}
	f.met["claim"]++
}

// trouble is what else may be so on a node.
func (f *foreseen) trouble() {
	d := func() *gpu.Device { return &f.outside.inv.GPUs[f.rng.IntN(f.gpus)] }
	annotations := map[string]string{}
	switch f.rng.IntN(8) {
	case 0: // somebody else gives a GPU out
		f.met["another plugin"]++
		f.with(func() { f.allocatable = map[string][]string{"nvidia.com/gpu": {string(d().UUID)}} })
	case 1: // a process is on an instance
		f.with(func() {
			of := d()
			of.MIG.Instances = slices.Clone(of.MIG.Instances)
			for i := range of.MIG.Instances {
				of.MIG.Instances[i].Busy = true
				f.met["a process"]++
			}
		})
	case 2:
		f.met["a cordon"]++
		annotations["example.com/"+CordonAnnotation] = fmt.Sprint(f.rng.IntN(f.gpus))
	case 3:
		f.met["a fault"]++
		f.with(func() { d().Fault = "GPU is lost" })
	}
	f.SetNode(agentkube.Node{Annotations: annotations})
	f.loop.reader.stale.Store(true)
	f.waker.wake()
	f.LookAtCheckpoint()
}

// did is what was done to each GPU, in the driver's words.
func did(steps []status.PlannedStep, resets bool) (out []string) {
	for i := range steps {
		switch s := &steps[i]; s.Op {
		case string(mig.Enable), string(mig.Disable):
			out = append(out, fmt.Sprint("mode ", s.Op == string(mig.Enable)))
			if s.Reset && resets {
				out = append(out, "reset")
			}
		default:
			out = append(out, fmt.Sprintf("%s %s@%d", s.Op, s.Profile, s.Start))
		}
	}
	return out
}

// now is how the node is, in the words of a plan.
func (f *foreseen) now(wanted []string) (out status.Plan) {
	snap := f.loop.reporter.last()
	out.State = string(snap.Outcome.State)
	for i := range snap.hardware.Inventory.GPUs {
		d := &snap.hardware.Inventory.GPUs[i]
		g := status.PlannedGPU{Index: d.Index, Wanted: wanted[i], To: snap.shape.Layouts[d.UUID].Words()}
		for at := range strings.FieldsSeq(f.standing(i)) {
			g.Result = append(g.Result, status.PlannedInstance{Profile: at})
		}
		out.GPUs = append(out.GPUs, g)
	}
	out.Offers = offersOf(f.GPUNode(gpunode.InPods), names, "example.com")
	return out
}

// TestForeseen asks what another partition would come to, on nodes with holders of every kind,
// and then has the node follow it: state, layouts, instances, each step on the hardware, who is
// in the way and what pods can ask for are as it was said. What check says of the file agrees.
func TestForeseen(t *testing.T) {
	met, nodes, enough := map[string]int{}, 200, 3
	if testing.Short() {
		nodes, enough = 60, 1
	}
	for seed := range nodes {
		if *foreseeSeed >= 0 && seed != *foreseeSeed {
			continue
		}
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { foresee(t, uint64(seed), met) })
		})
	}
	t.Logf("met: %v", met)
	if *foreseeSeed >= 0 {
		return
	}
	for _, what := range []string{"applied", "blocked", "pending", "failed", "invalid", "claim", "another plugin", "a process", "a foreign instance", "a cordon", "a fault", "reset", "left to an operator",
		"pod of example.com/gpu", "pod of example.com/gpu-mem", "pod of example.com/gpu.shared", "pod of example.com/mig-1g.10gb", "dynamic"} {
		if met[what] < enough {
			t.Errorf("%d of %d nodes meet %q: the test shows little of it", met[what], nodes, what)
		}
	}
}

func foresee(t *testing.T, seed uint64, met map[string]int) {
	rng := rand.New(rand.NewPCG(seed, 11))
	const gpus = 3
	o := migMachine(gpus)
	o.dra, o.ampere, o.took, o.memory = newScheduled(), rng.IntN(2) == 0, 100*time.Millisecond, newMemory()
	o.neverReset, o.reclaim, o.keepOffering = rng.IntN(4) == 0, rng.IntN(3) == 0, rng.IntN(3) == 0
	for i := range o.inv.GPUs {
		d := &o.inv.GPUs[i]
		d.ComputeCapability = map[bool]string{true: "8.0", false: "9.0"}[o.ampere]
		if d.MIG.Enabled = rng.IntN(3) == 0; d.MIG.Enabled && rng.IntN(2) == 0 {
			o.gi++
			d.MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: rng.IntN(7), Size: 1}, GI: o.gi, UUID: gpu.UUID(fmt.Sprint("MIG-foreign-", i))}}
			met["a foreign instance"]++
		}
	}
	b := start(t, o, "", "")
	defer b.end()
	f := &foreseen{bench: b, rng: rng, gpus: gpus, met: met}
	f.SetFile("p.yaml", []byte(f.partitions()))
	wait := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
	settle := func() { wait(2 * plan.Linger) } // longer than a device lingers
	settle()
	f.holders()
	wait(2 * holdersEvery)
	f.trouble()
	wait(othersLinger)
	f.holders()
	wait(2 * holdersEvery)

	file, label := f.partitions(), []string{"", "other"}[rng.IntN(2)]
	labels := map[string]string{}
	if label != "" {
		labels["example.com/"+PartitionLabel] = label
	}
	annotations := map[string]string{"example.com/" + CordonAnnotation: b.mail.latest().cordon}
	q := status.Question{File: []byte(file)}
	if label != "" && rng.IntN(2) == 0 {
		q.Partitions = []string{label}
	} else {
		b.SetNode(agentkube.Node{Labels: labels, Annotations: annotations}) // and follows that one of the file before
		settle()
	}
	answer, err := b.Foresee(q)
	if err != nil || len(answer.Plans) != 1 {
		t.Fatalf("%+v, %v", answer, err)
	}
	want := answer.Plans[0]
	q.Brief, q.Partitions = true, []string{want.Partition}
	check, err := b.Foresee(q)
	if err != nil || len(check.Plans) != 1 || check.Plans[0].State != want.State || !cmp.Equal(check.Plans[0].Mistakes, want.Mistakes) {
		t.Errorf("plan says %s %v, and check %+v, %v", want.State, want.Mistakes, check, err)
	}
	b.operations()
	before := f.now(make([]string, gpus))

	parsed, err := config.Parse("p.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	b.mail.hear(func(in *input) { in.file, in.chosen = parsed, label }) // at one moment
	settle()
	met[want.State]++
	done := make([][]string, gpus)
	for op := range strings.SplitSeq(b.operations(), ", ") {
		var i int
		if at, what, ok := strings.Cut(op, ": "); ok {
			fmt.Sscan(at, &i)
			done[i] = append(done[i], what)
		}
	}
	complain := func(format string, args ...any) {
		t.Helper()
		t.Errorf(format+"\nfile: %s\nnode: %s, %s\nallocations: %v", append(args, file, b.state(), b.message(), b.Allocations())...)
	}
	if want.Partition != b.loop.reporter.last().Outcome.Partition {
		complain("the plan is of partition %q, and the node follows %q", want.Partition, b.loop.reporter.last().Outcome.Partition)
	}
	if want.State == "invalid" {
		after := f.now(make([]string, gpus))
		if before.State = "invalid"; !cmp.Equal(before, after) || b.state() != "invalid" {
			complain("a partition that is invalid changes the node: %s", cmp.Diff(before, after))
		}
		return
	}
	var wanted []string
	for i := range want.GPUs {
		g := &want.GPUs[i]
		if o.neverReset {
			done[i] = slices.Compact(done[i]) // it is tried again and again
		}
		if diff := cmp.Diff(did(g.Steps, !o.neverReset), done[i]); diff != "" {
			complain("GPU %d: -foreseen +done: %s", i, diff)
		}
		said := b.Status().GPUs[i].Blocked
		for _, who := range g.Blocked {
			if !strings.Contains(said, who.Holder) {
				complain("GPU %d is said to wait for %s, and waits: %q", i, &who, said)
			}
		}
		if len(g.Blocked) > 0 != (said != "") {
			complain("GPU %d is said to wait for %v, and waits: %q", i, g.Blocked, said)
		}
		if strings.HasPrefix(g.Wanted, "dynamic") {
			met["dynamic"]++
		}
		for _, s := range g.Steps {
			if s.Reset && o.neverReset {
				met["left to an operator"]++
			} else if s.Reset {
				met["reset"]++
			}
		}
		wanted = append(wanted, g.Wanted)
	}
	for i := range want.GPUs {
		g := &want.GPUs[i]
		to := status.PlannedGPU{Index: g.Index, Wanted: g.Wanted, To: g.To}
		for j := range g.Result {
			to.Result = append(to.Result, status.PlannedInstance{Profile: g.Result[j].String()})
		}
		want.GPUs[i] = to
	}
	want = status.Plan{State: want.State, GPUs: want.GPUs, Offers: want.Offers}
	if diff := cmp.Diff(want, f.now(wanted)); diff != "" {
		complain("-foreseen +the node: %s", diff)
	}
}

// ask asks about the one partition that a node would follow.
func (b *bench) ask(file string, partitions ...string) status.Plan {
	b.t.Helper()
	synctest.Wait()
	answer, err := b.Foresee(status.Question{File: []byte(file), Partitions: partitions})
	if err != nil || len(answer.Plans) != 1 {
		b.t.Fatalf("%+v, %v", answer, err)
	}
	return answer.Plans[0]
}

// What plan was silent about, on a node whose agent knows it.
func TestPlanOfALiveNode(t *testing.T) {
	t.Run("pods on shared GPUs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, newOutside(2), t.TempDir(), allShared)
			defer b.end()
			b.hold("train-3", memResource, string(uuid(0))+"::1")
			time.Sleep(holdersEvery)
			p := b.ask(allWhole)
			if g := p.GPUs[0]; p.State != "blocked" || p.Reason != status.HeldByPods || len(g.Blocked) != 1 || g.Blocked[0].Holder != "ns/train-3" || g.From != g.To {
				t.Errorf("%s: %+v", p.State, g)
			}
			if g := p.GPUs[1]; g.From != "shared (units of 1024 MiB)" || g.To != "whole" || len(g.Blocked) > 0 {
				t.Errorf("%+v", g)
			}
			if want := []status.PlannedOffer{{Resource: wholeResource, Total: 1, Free: 1, Largest: 1}, {Resource: memResource, Total: 4}}; !cmp.Equal(p.Offers, want) {
				t.Errorf("pods can ask for %+v, want %+v", p.Offers, want)
			}
		})
	})
	t.Run("an instance under a grant, on an A100", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			o := migMachine(3, 0, 1)
			o.ampere = true
			for i := range o.inv.GPUs {
				o.inv.GPUs[i].ComputeCapability = "8.0"
			}
			b := start(t, o, t.TempDir(), migPartition(sevenSmall, sevenSmall, "{mode: whole}"))
			defer b.end()
			time.Sleep(time.Second)
			b.hold("train-3", small, migID(1, "1g.10gb@5"))
			time.Sleep(holdersEvery)
			readings, before := b.readings, len(b.done())
			p := b.ask(migPartition(twoLarge, twoLarge, twoLarge))
			if g := p.GPUs[1]; p.State != "blocked" || len(g.Steps) > 0 || len(g.Blocked) != 1 || g.Blocked[0].String() != "1g.10gb@5 (ns/train-3)" || len(g.Result) != 7 {
				t.Errorf("%s: %+v", p.State, g)
			}
			if g := p.GPUs[0]; len(g.Steps) != 9 || len(g.Result) != 2 {
				t.Errorf("%+v", g)
			}
			if g := p.GPUs[2]; len(g.Steps) != 3 || g.Steps[0].String() != "enable MIG mode, with a reset of the GPU" {
				t.Errorf("%+v", g)
			}
			if b.readings != readings || len(b.done()) != before {
				t.Error("a question reaches the hardware")
			}
			var text strings.Builder
			if err := status.WritePlan(&text, p); err != nil || !strings.Contains(text.String(), "these must end first:\n    1g.10gb@5 (ns/train-3)\n") {
				t.Errorf("%v:\n%s", err, &text)
			}
		})
	})
	t.Run("the partition of the node's label", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			o := newOutside(1)
			o.unheard = true
			b := start(t, o, t.TempDir(), allShared)
			defer b.end()
			const two = "version: v1\npartitions:\n  day:\n    - {devices: all, mode: whole}\n  night:\n    - {devices: all, mode: shared}\n"
			if p := b.ask(two); p.Partition != "" || p.State != "pending" || p.Reason != status.NodeUnknown {
				t.Errorf("before the node was heard of: %+v", p)
			}
			b.node(nil, false)
			if p := b.ask(two); p.Partition != "" || p.State != "pending" || p.Reason != status.PartitionUnset ||
				!strings.Contains(p.Message, "no label example.com/gpu.partition,") || !strings.Contains(p.Message, "one of the file's partitions: day, night") {
				t.Errorf("without a label: %+v", p)
			}
			b.node(map[string]string{"example.com/" + PartitionLabel: "night"}, false)
			if p := b.ask(two); p.Partition != "night" || !p.Own || p.State != "applied" {
				t.Errorf("by the label: %+v", p)
			}
			if p := b.ask(two, "day"); p.Partition != "day" || p.Own || p.GPUs[0].To != "whole" {
				t.Errorf("by name: %+v", p)
			}
			if p := b.ask(allShared); p.Partition != "night" || p.State != "invalid" || len(p.Mistakes) != 1 || p.Mistakes[0].Line != 3 {
				t.Errorf("the label names one that the file lacks: %+v", p)
			}
		})
	})
	t.Run("a second tier", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, newOutside(2), t.TempDir(), allShared)
			defer b.end()
			b.hold("train-3", memResource, string(uuid(0))+"::1")
			time.Sleep(holdersEvery)
			p := b.ask("version: v1\npartitions:\n  default:\n    - {devices: [0], mode: shared, spot: {most: 2}}\n    - {devices: [1], mode: shared, spot: true}\n")
			want := []status.PlannedOffer{{Resource: memResource, Total: 8, Free: 7, Largest: 4}, {Resource: memResource + ".spot", Total: 6, Free: 6, Largest: 4}}
			if !cmp.Equal(p.Offers, want) || p.State != "applied" || p.GPUs[0].Wanted != "shared, spot up to 2" || p.GPUs[1].Wanted != "shared, spot" {
				t.Errorf("%s: pods can ask for %+v, want %+v; wanted %q and %q", p.State, p.Offers, want, p.GPUs[0].Wanted, p.GPUs[1].Wanted)
			}
		})
	})
	t.Run("another unit", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, newOutside(1), t.TempDir(), allShared)
			defer b.end()
			answer, err := b.Foresee(status.Question{File: []byte(allShared), UnitMiB: 2048})
			if err != nil || answer.Plans[0].GPUs[0].To != "shared (units of 2048 MiB)" || answer.Plans[0].Offers[0].Total != 2 {
				t.Errorf("%+v, %v", answer, err)
			}
			if answer, err = b.Foresee(status.Question{File: []byte(allShared), UnitMiB: 1 << 32}); err != nil || answer.Plans[0].State != "invalid" {
				t.Errorf("%+v, %v", answer, err)
			}
			if p := b.ask(allShared); p.GPUs[0].From != p.GPUs[0].To {
				t.Errorf("asking changes the unit: %+v", p)
			}
		})
	})
	t.Run("a driver that does not answer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, migMachine(1, 0), t.TempDir(), migPartition(sevenSmall))
			defer b.end()
			hang := make(chan struct{})
			b.with(func() { b.hang = hang })
			time.Sleep(inventoryEvery + 2*driverPatience)
			if p := b.ask(migPartition(twoLarge)); p.State != "pending" || len(p.GPUs[0].Steps) > 0 {
				t.Errorf("%s: %+v", p.State, p.GPUs[0])
			}
			b.with(func() { b.hang = nil })
			close(hang)
		})
	})
	t.Run("a driver that was not read yet", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			o := newOutside(1)
			o.err = fmt.Errorf("open: %w", gpu.ErrNoDriver)
			b := start(t, o, t.TempDir(), allShared)
			defer b.end()
			if answer, err := b.Foresee(status.Question{File: []byte(allShared)}); err == nil {
				t.Errorf("%+v", answer)
			}
		})
	})
}

// Questions beside rounds (run with -race): what an answer is made of is nobody else's.
func TestForeseeBesideRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		o.took, o.dra, o.memory = time.Second, newScheduled(), newMemory()
		b := start(t, o, "", migPartition(demand, demand))
		defer b.end()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 300 {
				if _, err := b.Foresee(status.Question{File: []byte(migPartition(sevenSmall, "{mode: shared}"))}); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Second)
			}
		}()
		b.hold("a", small, migID(0, "1g.10gb@2"))
		for i := range 20 {
			b.SetFile("p.yaml", []byte(migPartition([]string{sevenSmall, demand, twoLarge, "{mode: whole}"}[i%4], []string{"{mode: shared}", demand}[i%2])))
			time.Sleep(10 * time.Second)
		}
		<-done
	})
}
