// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// migModel are the GPUs of the tests of MIG, whose mode takes a reset to change.
const migModel = "A100-SXM4-80GB"

// beginMIG is begin with other GPUs than the other tests have.
func beginMIG(t *testing.T, o lab.DriverOptions, partitions string, offers map[string]int) *bench {
	t.Helper()
	b := prepare(t)
	b.swap(o)
	b.must(agent.Reset(b.ctx, partitions))
	b.offersAll(offers)
	b.state("applied")
	return b
}

// swap gives the test other GPUs, and takes them away at its end. The agent is
// away afterwards, and those who come next start it.
func (b *bench) swap(o lab.DriverOptions) {
	b.Helper()
	change := func(ctx context.Context, o lab.DriverOptions) error {
		if err := node.DeletePods(ctx); err != nil {
			return err
		}
		if err := agent.Stop(ctx); err != nil {
			return err
		}
		return driver.Swap(ctx, o)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if b.Failed() {
			b.tell(ctx)
		}
		err := driver.ClearFaults(ctx)
		if err := errors.Join(err, change(ctx, lab.DriverOptions{Model: model, Count: gpus})); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	b.must(change(b.ctx, o))
}

// offersAll waits until the node offers exactly these resources of ours, and
// none of another name.
func (b *bench) offersAll(want map[string]int) {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, fmt.Sprintf("the node to offer %v", want), func(ctx context.Context) error {
		s, err := node.State(ctx)
		if err != nil {
			return err
		}
		got := map[string]int{}
		for name, count := range s.Allocatable {
			if strings.HasPrefix(name, lab.Domain+"/") && count > 0 {
				got[name] = count
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("it offers %v, and its partition is %s: %s", got, s.Labels[lab.StateLabel], s.Annotations[lab.MessageAnnotation])
		}
		return nil
	}))
}

// placement is a place for an instance, as device IDs name it. It is read here by a
// reader of the tests' own.
type placement struct {
	gpu     string // by UUID
	profile string
	start   int
	ci      int // -1 where the instance is not split
}

func parsePlacement(id string) (placement, error) {
	s := placement{ci: -1}
	u, rest, ok := strings.Cut(id, "::")
	profile, at, ok2 := strings.Cut(rest, "@")
	if !ok || !ok2 {
		return s, fmt.Errorf("%q is not the ID of a placement", id)
	}
	s.gpu, s.profile = u, profile
	at, ci, split := strings.Cut(at, ".")
	var err error
	if s.start, err = strconv.Atoi(at); err == nil && split {
		s.ci, err = strconv.Atoi(ci)
	}
	if err != nil {
		return s, fmt.Errorf("%q is not the ID of a placement: %w", id, err)
	}
	return s, nil
}

// instance is a compute instance as the emulated hardware has it, and the nodes
// that a container of it sees.
type instance struct {
	gpu     lab.GPUInfo
	in      lab.GPUInstance
	compute lab.ComputeInstance
}

func (i instance) String() string {
	return fmt.Sprintf("GPU %d %s@%d (instance %d, compute instance %d)", i.gpu.Index, i.compute.Profile, i.in.Start, i.in.ID, i.compute.ID)
}

// nodes are the device nodes of the instance, the GPU's own among them.
func (i instance) nodes() []string {
	return []string{i.gpu.Device(), capability(i.in.Minor), capability(i.compute.Minor)}
}

func capability(minor int) string { return fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor) }

// instances are all that stand, as the hardware has it.
func (b *bench) instances() []instance {
	b.Helper()
	b.must(driver.Read(b.ctx))
	return instancesOf(driver.GPUs)
}

func instancesOf(all []lab.GPUInfo) (out []instance) {
	for _, g := range all {
		if g.MIG == nil {
			continue
		}
		for _, in := range g.MIG.Instances {
			for _, c := range in.Compute {
				out = append(out, instance{g, in, c})
			}
		}
	}
	return out
}

// find is the instance in a placement.
func find(all []instance, s placement) (instance, bool) {
	i := slices.IndexFunc(all, func(i instance) bool {
		return i.gpu.UUID == s.gpu && i.in.Start == s.start && i.compute.Profile == s.profile && (s.ci < 0 || i.compute.Start == s.ci)
	})
	if i < 0 {
		return instance{}, false
	}
	return all[i], true
}

// stand checks how a GPU is cut: threes, in order of the starts;
// "off" where MIG is.
func stand(index int, want string) error {
	g := driver.GPUs[index]
	if g.MIG == nil {
		return fmt.Errorf("GPU %d cannot have MIG", index)
	}
	var all []instance
	for _, i := range instancesOf(driver.GPUs) {
		if i.gpu.Index == index {
			all = append(all, i)
		}
	}
	slices.SortFunc(all, func(a, b instance) int { return a.in.Start*100 + a.compute.Start - b.in.Start*100 - b.compute.Start })
	var has []string
	for _, i := range all {
		has = append(has, fmt.Sprintf("%s@%d", i.compute.Profile, i.in.Start))
	}
	got := strings.Join(has, " ")
	if !g.MIG.Enabled {
		got = "off"
	}
	if got != want || g.MIG.Pending != g.MIG.Enabled {
		return fmt.Errorf("GPU %d has %q (MIG %v, then %v), want %q", index, got, g.MIG.Enabled, g.MIG.Pending, want)
	}
	return nil
}

// stands waits until the hardware has these GPUs cut so.
func (b *bench) stands(want map[int]string) {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, "the GPUs to be cut", func(ctx context.Context) error {
		if err := driver.Read(ctx); err != nil {
			return err
		}
		var errs []error
		for _, index := range slices.Sorted(maps.Keys(want)) {
			errs = append(errs, stand(index, want[index]))
		}
		return errors.Join(errs...)
	}))
}

// insideMIG looks from inside a container, which must see the driver and of
// GPUs nothing but instances that stand, whole; these it returns.
func (b *bench) insideMIG(pod *lab.RunningPod, container string) []instance {
	b.Helper()
	seen, err := pod.Inside(b.ctx, container)
	b.must(err)
	want := slices.Clone(lab.ControlDevices)
	var out []instance
	for _, i := range b.instances() {
		if slices.Contains(seen.Devices, capability(i.compute.Minor)) {
			out = append(out, i)
			want = append(want, i.nodes()...)
		}
	}
	slices.Sort(want)
	want = slices.Compact(want)
	if len(out) == 0 || !slices.Equal(seen.Devices, want) {
		b.Fatalf("%s %s sees the nodes %v, want %v, which are of %v", pod, container, seen.Devices, want, out)
	}
	return out
}

// record begins a recording, which ends with the test.
func (b *bench) record() *lab.Recording {
	b.Helper()
	ctx, cancel := context.WithCancel(b.ctx)
	r := node.Record(ctx)
	b.Cleanup(func() {
		cancel()
		r.Wait()
	})
	return r
}

// hears waits until a recording has heard of these resources and returns.
func (b *bench) hears(r *lab.Recording, resources ...string) {
	b.Helper()
	b.must(lab.Await(b.ctx, 30*time.Second, fmt.Sprintf("the lists of %v", resources), func(context.Context) error {
		has := r.Devices()
		for _, name := range resources {
			if len(has[name]) == 0 {
				return fmt.Errorf("there are the lists of %v", slices.Sorted(maps.Keys(has)))
			}
		}
		return nil
	}))
}

// operation is how long the emulated hardware takes for an instance's creation
// or its end, of which its GPU instance and its compute instance have half each.
const operation = 200 * time.Millisecond

// migWorld is hardware that takes the time that real one takes.
var migWorld = lab.DriverOptions{Model: migModel, Count: gpus,
	World: fmt.Sprintf("mig: {createSeconds: %[1]v, destroySeconds: %[1]v, modeSeconds: 0.5}\n", operation.Seconds()/2)}

// A change of geometries while pods come, run and go: the GPUs of which nothing
// is held change, the one with a holder waits for it by name, no device of any
// other GPU turns for a moment, and nobody is started anew.
func TestMIGLive(t *testing.T) {
	const whole = "mode: whole\n"
	partitions := func(changing string, five, six string) string {
		return head + "    - devices: [0, 1]\n      mode: mig\n      geometry: " + changing +
			"\n    - devices: [2, 3]\n      mode: mig\n      geometry: {3g.40gb: 1, 1g.10gb: 3}\n" +
			"    - devices: [4]\n      mode: mig\n      profiles: [2g.20gb]\n" +
			"    - devices: [5]\n      " + five + "    - devices: [6]\n      " + six + "    - devices: [7]\n      mode: shared\n"
	}
	before, after := partitions("{1g.10gb: 7}", whole, whole), partitions("{3g.40gb: 2}", whole, whole)
	one, two, three := lab.MIG("1g.10gb"), lab.MIG("2g.20gb"), lab.MIG("3g.40gb")
	began := time.Now()
	b := beginMIG(t, migWorld, before,
		map[string]int{one: 20, two: 3, three: 2, lab.GPU: 2, lab.Memory: units})
	b.Logf("from whole GPUs to five with MIG, on offer: %.1f s, the node's own swap and the agent's start included", time.Since(began).Seconds())
	const sevens = "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"
	const threes = "3g.40gb@0 3g.40gb@4"
	b.must(driver.Read(b.ctx))
	for index := range gpus {
		switch {
		case index < 2:
			b.must(stand(index, sevens))
		case index < 4:
			b.must(cut(index, map[string]int{"3g.40gb": 1, "1g.10gb": 3}))
		case index > 4:
			b.must(stand(index, "off"))
		}
	}
	kubelet, _ := b.kubelet()
	self, err := agent.Process()
	b.must(err)

	// A holder on one of the two GPUs that are to change, none on the other, and
	// holders on all others.
	pods := map[string]*lab.RunningPod{
		"three": b.pod("three", three, 1),
		"two":   b.pod("two", two, 1),
		"whole": b.pod("whole", lab.GPU, 1),
		"share": b.pod("share", lab.Memory, 24),
	}
	holder, holds := b.holder("holder", one, func(i instance) bool { return i.gpu.Index < 2 })
	busy, free := holds.gpu, driver.GPUs[0]
	if busy.UUID == free.UUID {
		free = driver.GPUs[1]
	}
	bystander, _ := b.holder("bystander", one, func(i instance) bool { return i.gpu.Index > 1 })
	all := append(slices.Collect(maps.Values(pods)), holder, bystander)
	b.must(each(all, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	if got := b.insideMIG(pods["three"], ""); len(got) != 1 || got[0].compute.Profile != "3g.40gb" {
		b.Errorf("a pod of 3g.40gb sees %v", got)
	}
	lives := b.processes(all...)
	idle, switched := driver.GPUs[5], "mode: mig\n      geometry: {2g.20gb: 3, 1g.10gb: 1}\n"
	toMIG := partitions("{3g.40gb: 2}", switched, whole)
	if b.one(b.inside(pods["whole"], "")).Index == 5 {
		idle, toMIG = driver.GPUs[6], partitions("{3g.40gb: 2}", whole, switched)
	}
	r := b.record()
	b.hears(r, one, two, three, lab.GPU, lab.Memory)

	// New pods keep coming, for what both cuts have.
	coming, stop := context.WithCancel(b.ctx)
	stream := make(chan error, 1)
	came, refused := 0, 0
	go func() { stream <- b.keepComing(coming, one, &came, &refused) }()
	b.Cleanup(stop)

	mark := b.lastOp()
	edited := time.Now()
	b.partitions(after)
	turned := b.await(r, edited, three, free.UUID, 2)
	b.Logf("edit to the kubelet's stream: %d ms, of which the hardware had %d (seven ends and two creations)",
		turned.Sub(edited).Milliseconds(), b.spent(free, mark).Milliseconds())
	says := b.state("blocked")
	for _, want := range []string{holder.String(), busy.UUID} {
		if !strings.Contains(says, want) {
			b.Errorf("the node says %q, want %s named", says, want)
		}
	}
	b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, "names who is in the way", func(e lab.Event) bool {
		return strings.Contains(e.Message, holder.String()) && strings.Contains(e.Message, busy.UUID)
	}))
	b.stands(map[int]string{free.Index: threes, busy.Index: sevens})
	// What the busy one keeps for its holder stays, what the target has not goes.
	b.must(lab.Await(b.ctx, 30*time.Second, "the busy GPU's idle instances to be withdrawn", func(context.Context) error {
		for id, health := range r.Devices()[one] {
			if s, err := parsePlacement(id); err != nil || s.gpu == busy.UUID && (health == "Healthy") != (s.start == holds.in.Start) {
				return fmt.Errorf("%s is %s, and %s is held (%v)", id, health, holds, err)
			}
		}
		return nil
	}))
	// A pod of the new kind finds its instance, of the GPU that is free.
	b.running3g("three-new", three, free)
	b.still(r, edited, busy, free)

	mark = b.lastOp()
	ends := time.Now()
	b.must(holder.Delete(b.ctx))
	turned = b.await(r, ends, three, busy.UUID, 2)
	b.Logf("the holder's end, from its deletion, to the kubelet's stream: %d ms, of which the hardware had %d", turned.Sub(ends).Milliseconds(), b.spent(busy, mark).Milliseconds())
	b.state("applied")
	b.stands(map[int]string{free.Index: threes, busy.Index: threes})
	b.still(r, edited, busy, free)

	// An idle GPU that was whole is given MIG, by a reset of its own.
	mark = b.lastOp()
	switching := time.Now()
	b.partitions(toMIG)
	turned = b.await(r, switching, two, idle.UUID, 3)
	b.Logf("edit of a whole GPU to the kubelet's stream, mode and reset included: %d ms, of which the hardware had %d", turned.Sub(switching).Milliseconds(), b.spent(idle, mark).Milliseconds())
	b.state("applied")
	b.must(driver.Read(b.ctx))
	b.must(cut(idle.Index, map[string]int{"2g.20gb": 3, "1g.10gb": 1}))
	b.still(r, switching, idle)

	stop()
	if err := <-stream; err != nil {
		b.Errorf("of the pods that kept coming: %v", err)
	}
	b.Logf("%d pods came meanwhile, %d of them were refused; %d lists were sent", came, refused, r.Lists())
	if refused > 2 {
		b.Errorf("%d pods were refused: more than one for each edit", refused)
	}
	if came == 0 {
		b.Error("no pod came meanwhile")
	}
	if broken := r.Broken(); len(broken) > 0 {
		b.Errorf("streams to the kubelet have ended: %v", broken)
	}
	delete(lives, holder.Name+"/main")
	if err := hurt(lives); err != nil {
		b.Error(err)
	}
	b.kubeletLives(kubelet)
	if now, err := agent.Process(); err != nil || now != self {
		b.Errorf("the agent was %s and is %s (%v)", self, now, err)
	}
}

// lastOp is the serial of what was done last to the GPUs' MIG side.
func (b *bench) lastOp() (last uint64) {
	b.Helper()
	ops, err := driver.MIGOps(b.ctx)
	b.must(err)
	for _, op := range ops {
		last = max(last, op.Serial)
	}
	return last
}

// spent is what the hardware took, by the clock, for all that was done to a GPU
// since an operation.
func (b *bench) spent(gpu lab.GPUInfo, since uint64) time.Duration {
	b.Helper()
	ops, err := driver.MIGOps(b.ctx)
	b.must(err)
	var sum float64
	for _, op := range ops {
		if op.GPU == gpu.Index && op.Serial > since {
			sum += op.Seconds
		}
	}
	return time.Duration(sum * float64(time.Second))
}

// cut checks how many instances of each profile a GPU has, and no others.
func cut(index int, want map[string]int) error {
	got := map[string]int{}
	for _, i := range instancesOf(driver.GPUs) {
		if i.gpu.Index == index {
			got[i.compute.Profile]++
		}
	}
	if !maps.Equal(got, want) {
		return fmt.Errorf("GPU %d has the instances %v, want %v", index, got, want)
	}
	return nil
}

// holder makes pods of one instance each until one has an instance that will do,
// and ends the others.
func (b *bench) holder(name, resource string, does func(instance) bool) (*lab.RunningPod, instance) {
	b.Helper()
	var others []*lab.RunningPod
	defer func() {
		for _, p := range others {
			b.must(p.Delete(b.ctx))
		}
		for _, p := range others {
			b.must(p.Gone(b.ctx))
		}
	}()
	for n := range 24 {
		pod := b.pod(fmt.Sprintf("%s-%d", name, n), resource, 1)
		b.must(pod.Running(b.ctx))
		has := b.insideMIG(pod, "")
		if len(has) == 1 && does(has[0]) {
			return pod, has[0]
		}
		others = append(others, pod)
	}
	b.Fatalf("none of 24 pods of %s has an instance that would do", resource)
	return nil, instance{}
}

// keepComing makes pods of one device each, one after the other, which look
// around and end, until ctx does. All must run, but for those that were given a
// device in the moment of its withdrawal.
func (b *bench) keepComing(ctx context.Context, resource string, came, refused *int) error {
	for n := 0; ; n++ {
		pod, err := node.CreatePod(ctx, lab.Pod{Name: fmt.Sprintf("coming-%d", n), Once: true,
			Containers: []lab.Container{{Resources: map[string]int{resource: 1}, Then: "exit 0\n"}}})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		err = pod.InState(ctx, time.Minute, "to have run", func(s lab.PodState) error {
			switch s.Phase {
			case "Succeeded":
				return nil
			case "Failed":
				if strings.Contains(s.Message, "withdrawn") {
					*refused++
					return nil
				}
				return fmt.Errorf("%w", lab.ErrNever)
			}
			return errors.New("it has not")
		})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		*came++
		if err := pod.Delete(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// await waits until so many devices of a GPU are Healthy in a resource's list
// that were not, and returns when the last became it.
func (b *bench) await(r *lab.Recording, since time.Time, resource, gpu string, count int) (last time.Time) {
	b.Helper()
	b.must(lab.Await(b.ctx, 90*time.Second, fmt.Sprintf("%d devices of %s on %s", count, resource, gpu), func(context.Context) error {
		healthy := 0
		for id, health := range r.Devices()[resource] {
			if strings.HasPrefix(id, gpu+"::") && health == "Healthy" {
				healthy++
			}
		}
		if healthy != count {
			return fmt.Errorf("there are %d", healthy)
		}
		return nil
	}))
	for _, t := range r.Turns(since) {
		if t.Resource == resource && t.To == "Healthy" && strings.HasPrefix(t.ID, gpu+"::") {
			last = t.At
		}
	}
	if last.IsZero() {
		b.Fatalf("no device of %s on %s has become Healthy since %s", resource, gpu, since.Format(time.TimeOnly))
	}
	return last
}

// still checks that since a moment no device of any other GPU has turned.
func (b *bench) still(r *lab.Recording, since time.Time, but ...lab.GPUInfo) {
	b.Helper()
	for _, t := range r.Turns(since) {
		u, _, _ := strings.Cut(t.ID, "::")
		if !slices.ContainsFunc(but, func(g lab.GPUInfo) bool { return g.UUID == u }) {
			b.Errorf("a device of a GPU that nothing was to change has turned: %s", t)
		}
	}
}

// running3g starts a pod and checks that its one instance is on a GPU.
func (b *bench) running3g(name, resource string, on lab.GPUInfo) {
	b.Helper()
	pod := b.pod(name, resource, 1)
	b.must(pod.Running(b.ctx))
	if has := b.insideMIG(pod, ""); len(has) != 1 || has[0].gpu.UUID != on.UUID {
		b.Errorf("%s has %v, want one on GPU %d", pod, has, on.Index)
	}
	b.must(pod.Delete(b.ctx))
	b.must(pod.Gone(b.ctx))
}
