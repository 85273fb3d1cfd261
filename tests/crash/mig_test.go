// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/lab"
)

// hit is what happens at the k-th call.
type hit string

const (
	// fails: the driver answers an error, and nothing was done.
	fails hit = "the call fails"
	// before: the agent dies, and nothing was done.
	before hit = "the agent dies before the call"
	// within: the agent dies while the hardware is at it, and that is done.
	within hit = "the agent dies during the call"
)

// changingCalls are those by which the hardware is changed.
var changingCalls = []string{
	"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "gpuEmulatorReset",
}

const (
	// anyCall is all calls of the driver, readings too.
	anyCall = "nvml*"
	// fileChange is no call of the driver: a change of the agent's own files.
	fileChange = "change of its files"
)

// point is a k, of one call or of all.
type point struct {
	call string
	k    int
	hit  hit
	back bool // on the way back
}

func (p point) String() string {
	way := "there"
	if p.back {
		way = "back"
	}
	if p.call == fileChange {
		return fmt.Sprintf("%s, %s %d: the agent dies before it", way, p.call, p.k)
	}
	return fmt.Sprintf("%s, call %d of %s: %s", way, p.k, p.call, p.hit)
}

// migChange is a change of the hardware, there and back.
type migChange struct {
	name string
	spec emulator.Spec
	// modes are those before and after it, waits the GPUs that cannot follow.
	modes [2][]string
	waits [2]map[int]bool
	// residents are the resources of which a pod has one device through it all.
	residents []string
	// guests are pods of which one comes, there and back, after the other has gone:
	// so many devices of a resource.
	guests [2]struct {
		resource string
		n        int
	}
	// splits says that GPU instances hold several compute instances.
	splits bool
	// slow changes are tried at fewer points without -long.
	slow bool
}

// quietly reports whether the agent may go on without a word where a call fails: a
// reading may be made again, and so may what a container waits for; and where a
// GPU instance is to hold several compute instances, the driver's refusal to make
// another one there is expected.
func (c *migChange) quietly(call string) bool {
	return call == anyCall || c.guests[0].n > 0 || c.splits && call == "nvmlDeviceCreateGpuInstanceWithPlacement"
}

// stepSeconds is what the emulated hardware takes for a step; a fifth of quiet.
const stepSeconds = 0.02

func migSpec(model string, on ...int) emulator.Spec {
	s := emulator.Spec{Model: model, Count: gpus,
		MIG: emulator.MIGSpec{CreateSeconds: stepSeconds, DestroySeconds: stepSeconds, ModeSeconds: stepSeconds}}
	for _, i := range on {
		s.GPUs = append(s.GPUs, emulator.GPUSpec{Index: i, MIG: true})
	}
	return s
}

const migPrefix = domain + "/mig-"

// migResource is the resource of a MIG device, by its ID.
func migResource(id string) string {
	_, device, _ := strings.Cut(id, "::")
	profile, _, _ := strings.Cut(device, "@")
	return migPrefix + strings.ReplaceAll(profile, "+", ".")
}

var migChanges = []migChange{
	{
		// The second GPU keeps an instance that a pod is on; the third waits for its
		// pod, there.
		name: "edit of geometries", spec: migSpec("A100-SXM4-80GB", 0, 1, 2),
		modes: [2][]string{
			{"mig {1g.10gb: 7}", "mig {3g.40gb: 1, 2g.20gb: 1, 1g.20gb: 1}", "mig {7g.80gb: 1}"},
			{"mig {3g.40gb: 2}", "mig {1g.10gb: 5, 1g.20gb: 1}", "mig {1g.10gb: 7}"},
		},
		waits:     [2]map[int]bool{nil, {2: true}},
		residents: []string{migPrefix + "1g.20gb", migPrefix + "7g.80gb"},
	},
	{
		name: "edit of splits", splits: true, spec: migSpec("A100-SXM4-80GB", 0, 1),
		modes: [2][]string{
			{"mig {1c.3g.40gb: 3, 1c.4g.40gb: 2}", "mig {2g.20gb: 3, 1g.10gb: 1}", "shared"},
			{"mig {7g.80gb: 1}", "mig {1c.2g.20gb: 2, 2c.3g.40gb: 1, 1g.10gb: 2}", "shared"},
		},
		residents: []string{memory},
	},
	{
		name: "edit of modes", spec: migSpec("H100-80GB", 1),
		modes: [2][]string{
			{"whole", "mig {2g.20gb: 2, 1g.10gb: 3}", "shared"},
			{"mig {4g.40gb: 1, 3g.40gb: 1}", "shared", "shared"},
		},
		residents: []string{memory},
	},
	{
		// A reset lets go of the driver, which takes a while.
		name: "edit of modes with resets", slow: true, spec: migSpec("A100-SXM4-80GB", 1),
		modes: [2][]string{
			{"whole", "mig {2g.20gb: 2, 1g.10gb: 3}", "shared"},
			{"mig {4g.40gb: 1, 3g.40gb: 1}", "shared", "shared"},
		},
		residents: []string{memory},
	},
	{
		// What stands idle makes way for what a pod asks for, on both GPUs.
		name: "instances on demand", spec: migSpec("H100-80GB", 0, 1),
		modes:     [2][]string{{"mig", "mig", "shared"}, {"mig", "mig", "shared"}},
		residents: []string{memory},
		guests: [2]struct {
			resource string
			n        int
		}{{migPrefix + "2g.20gb", 6}, {migPrefix + "3g.40gb", 4}},
	},
}

// counts is the geometry that a mode of the partition file names; ok is false
// where it names none.
func counts(mode string) (want map[string]int, ok bool) {
	_, text, ok := strings.Cut(mode, " ")
	if !ok {
		return nil, false
	}
	if err := yaml.Unmarshal([]byte(text), &want); err != nil {
		panic(err) // it is written in this file
	}
	return want, true
}

// instance is one that stands.
type instance struct {
	id, profile string
	start, size int
	serial      uint64
	minors      [2]int // of the nodes that give access to it
}

// standing is what stands on a GPU. empty says that a GPU instance is without a
// compute instance.
func standing(g emulator.GPUState) (out []instance, empty bool) {
	if g.MIG == nil {
		return nil, false
	}
	for _, gi := range g.MIG.Instances {
		empty = empty || len(gi.Compute) == 0
		for _, ci := range gi.Compute {
			id := fmt.Sprintf("%s::%s@%d", g.UUID, ci.Profile, gi.Start)
			if ci.Profile != gi.Profile {
				id += fmt.Sprintf(".%d", ci.Start)
			}
			out = append(out, instance{id, ci.Profile, gi.Start, gi.Size, ci.Serial, [2]int{gi.Minor, ci.Minor}})
		}
	}
	return out, empty
}

// geometry is what a GPU is, in a line.
func geometry(g emulator.GPUState) string {
	if g.MIG == nil || !g.MIG.Enabled {
		return "MIG off"
	}
	all, empty := standing(g)
	var ids []string
	for _, i := range all {
		_, device, _ := strings.Cut(i.id, "::")
		ids = append(ids, device)
	}
	slices.Sort(ids)
	if empty {
		ids = append(ids, "and an empty GPU instance")
	}
	return "MIG " + strings.Join(ids, " ")
}

// becomes reports whether a GPU is as a mode of the partition file names it.
func becomes(g emulator.GPUState, mode string) bool {
	want, fixed := counts(mode)
	if !fixed {
		return g.MIG.Enabled == strings.HasPrefix(mode, "mig")
	}
	all, empty := standing(g)
	got := map[string]int{}
	for _, i := range all {
		got[i.profile]++
	}
	return g.MIG.Enabled && !empty && maps.Equal(got, want)
}

// devices are the devices that are to be on offer of a GPU with MIG, beside those
// that are held.
func (n *node) devices(at int, held map[string]holding) (ids []string, err error) {
	g := n.world.State().GPUs[at]
	if !becomes(g, n.modes[at]) {
		return nil, fmt.Errorf("GPU %d is %s, want %s", at, geometry(g), n.modes[at])
	}
	if _, fixed := counts(n.modes[at]); fixed {
		all, _ := standing(g)
		for _, i := range all {
			ids = append(ids, i.id)
		}
		return ids, nil
	}
	// On demand: whatever has room beside what is held.
	model, err := emulator.LoadModel(n.model)
	if err != nil {
		return nil, err
	}
	type place struct {
		profile     *emulator.MIGProfile
		start, size int
	}
	var taken []place
	var all []place
	for i := range model.MIG.Profiles {
		p := &model.MIG.Profiles[i]
		for _, start := range p.Starts {
			all = append(all, place{p, int(start), int(p.Size)})
		}
	}
	id := func(p place) string { return fmt.Sprintf("%s::%s@%d", g.UUID, p.profile.Name, p.start) }
	for _, p := range all {
		for _, h := range held {
			if slices.Contains(h.ids, id(p)) {
				taken = append(taken, p)
			}
		}
	}
	for _, p := range all {
		same, media, room := 0, 0, true
		for _, t := range taken {
			room = room && (p.start >= t.start+t.size || t.start >= p.start+p.size)
			if t.profile == p.profile {
				same++
			}
			if strings.HasSuffix(t.profile.Name, "+me") {
				media++
			}
		}
		if room && same < int(p.profile.Max) && (media == 0 || !strings.HasSuffix(p.profile.Name, "+me")) {
			ids = append(ids, id(p))
		}
	}
	return ids, nil
}

var capNode = regexp.MustCompile(`/nvidia-cap(\d+)"`)

// instancesDiffer says which running container does not have exactly the device
// nodes of its instances.
func (n *node) instancesDiffer() error {
	stands := map[string]instance{}
	for _, g := range n.world.State().GPUs {
		all, _ := standing(g)
		for _, i := range all {
			stands[i.id] = i
		}
	}
	for _, c := range n.runtime.living(fakes.Pod{}) {
		want := map[string]bool{}
		for _, id := range c.ids {
			if !strings.Contains(id, "@") {
				continue
			}
			i, ok := stands[id]
			if !ok {
				return fmt.Errorf("container %s runs, and its %s does not stand", c.Id, id)
			}
			for _, minor := range i.minors {
				want[fmt.Sprint(minor)] = true
			}
		}
		got := map[string]bool{}
		for _, contents := range c.files {
			for _, m := range capNode.FindAllStringSubmatch(contents, -1) {
				got[m[1]] = true
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("container %s has the nodes %v of instances, want %v", c.Id, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
	}
	return nil
}

// migNode is a node that is put through a change, on a machine of its own.
type migNode struct {
	*node
	change *migChange
	guest  *pod
	armed  *tracee // the process that the change began with
	// changes are those of its files in a change without a kill.
	changes []change
	looks   *atomic.Int64 // at what a failed call has left
	// serials are the instances that residents have.
	serials map[string]uint64
	// old is what each GPU was before the change, of what stood on it.
	old [gpus]string
	was [gpus][]instance
}

// startMIG is a new node as it is before the change.
func startMIG(ctx context.Context, dir string, change *migChange, looks *atomic.Int64) (n *migNode, stop func() error, err error) {
	m, off, err := newMachine(dir, change.spec)
	if err != nil {
		return nil, nil, err
	}
	inner, err := startNode(m, change.modes[0]...)
	if err != nil {
		return nil, nil, errors.Join(err, off())
	}
	inner.model = change.spec.Model
	n = &migNode{node: inner, change: change, looks: looks, serials: map[string]uint64{}}
	stop = func() error { return errors.Join(n.close(), off()) }
	for _, resource := range change.residents {
		if err == nil {
			_, err = n.bring(ctx, resource, 1)
		}
	}
	if err == nil && change.guests[0].n > 0 {
		n.guest, err = n.bring(ctx, change.guests[0].resource, change.guests[0].n)
	}
	if err == nil {
		err = n.settle(ctx)
	}
	if wrong := n.complaints(); err != nil || len(wrong) > 0 {
		err = fmt.Errorf("a new node: %w; %s\n%s", err, strings.Join(wrong, "; "), n.said())
		return nil, nil, errors.Join(err, stop())
	}
	for _, h := range n.held() {
		for _, g := range n.world.State().GPUs {
			all, _ := standing(g)
			for _, i := range all {
				if slices.Contains(h.ids, i.id) && (n.guest == nil || h.pod != n.guest.Name) {
					n.serials[i.id] = i.serial
				}
			}
		}
	}
	return n, stop, nil
}

// bring has a pod's container run.
func (n *migNode) bring(ctx context.Context, resource string, count int) (*pod, error) {
	p, err := n.admitWith(ctx, resource, count, "main")
	if err != nil {
		return nil, err
	}
	return p, n.run(ctx, p)
}

// pass makes the change once, or the one back, with what p says. reached is false
// where there was no such call.
func (n *migNode) pass(ctx context.Context, p point, faults ...emulator.Fault) (reached bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*patience)
	defer cancel()
	to := 1
	if p.back {
		to = 0
	}
	if n.guest != nil {
		n.stop(n.guest)
		if err := n.settle(ctx); err != nil {
			return false, fmt.Errorf("after the guest before: %w", err)
		}
	}
	for i, g := range n.world.State().GPUs {
		n.old[i] = geometry(g)
		n.was[i], _ = standing(g)
	}
	for _, f := range faults {
		if err := n.world.Inject(f); err != nil {
			return false, err
		}
	}
	kill := 0
	if p.call == fileChange {
		kill = p.k
	}
	n.armed = n.arm(kill)
	since := len(n.logSince(0))
	n.modes, n.waits = n.change.modes[to], n.change.waits[to]
	var guest sync.WaitGroup
	var came error
	arrived := make(chan struct{})
	guest.Go(func() {
		defer close(arrived)
		if g := n.change.guests[to]; g.n > 0 {
			n.guest, came = n.bring(ctx, g.resource, g.n)
		}
	})
	defer guest.Wait()
	if err := n.edit(); err != nil {
		return false, err
	}
	over := func() error {
		select {
		case <-arrived:
			return n.differs(ctx)
		default:
			return errors.New("a pod's container does not run yet")
		}
	}
	// The agent tries again after a second what has failed, so the call may not be
	// missed for long.
	polls := 0
	err = often(ctx, "the call, or the end of the change", func() error {
		switch {
		case p.call == fileChange:
			_, reached = n.armed.seen()
		case p.k > 0:
			reached = len(n.world.Faults()) == 0
		}
		if reached {
			return nil
		}
		if polls++; polls%10 > 0 {
			return errors.New("not asked")
		}
		return over()
	})
	switch {
	case err != nil || !reached || p.call == fileChange: // the tracer has killed it
	case p.hit == fails:
		err = n.hear(ctx, p, since, over)
	default:
		n.end()
		n.begin(0)
	}
	if err == nil {
		err = poll(ctx, "the change", over)
	}
	guest.Wait()
	if !reached {
		n.changes, _ = n.armed.seen()
		n.armed.arm(0, nil)
	}
	if err = errors.Join(err, came); err == nil {
		err = n.settle(ctx)
	}
	if err == nil {
		err = n.spared()
	}
	wrong := n.complaints()
	if p.hit == fails {
		wrong = excuse(wrong, n.logSince(since))
	}
	if len(wrong) > 0 {
		err = errors.Join(err, fmt.Errorf("on the way: %s", strings.Join(wrong, "; ")))
	}
	return reached, err
}

// often is poll where a moment counts.
func often(ctx context.Context, what string, ok func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("in vain awaited %s: %w", what, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// spared says which instance of a resident is not the one that it was.
func (n *migNode) spared() error {
	now := n.standing()
	for _, id := range slices.Sorted(maps.Keys(n.serials)) {
		if now[id] != n.serials[id] {
			return fmt.Errorf("%s has been made anew under its container: it is number %d, and was %d", id, now[id], n.serials[id])
		}
	}
	return nil
}

const (
	// quiet is for how long nothing has happened to hardware that nobody works on.
	quiet = 100 * time.Millisecond
	// failure is how the driver's answer is said.
	failure = "Unknown Error"
)

// hear waits until the agent says that the call has failed, and looks then at what
// it has left: each GPU as it was or as it is to be, before anything is tried
// again.
func (n *migNode) hear(ctx context.Context, p point, since int, over func() error) error {
	said, done, polls := "", false, 0
	err := often(ctx, "word of the failure", func() error {
		st, err := n.status(ctx)
		if err != nil {
			return err
		}
		if said = complaint(&st); said != "" {
			return nil
		}
		if polls++; polls%10 > 0 {
			return errors.New("not asked")
		}
		if err = over(); err == nil {
			done = true
			return nil
		}
		return fmt.Errorf("the partition is %s, %q: %w", st.Partition.State, st.Partition.Message, err)
	})
	switch {
	case err != nil:
		return err
	case done && !n.change.quietly(p.call) && !n.failed(since):
		return errors.New("the change is complete and the agent has not said that a call of it failed")
	case done:
		return nil // that was missed
	}
	began := time.Now()
	for layout := n.world.Layout(); ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(quiet):
		}
		now := n.world.Layout()
		if now == layout {
			break
		}
		layout = now
	}
	st, err := n.status(ctx)
	if err != nil {
		return err
	}
	if complaint(&st) == "" || time.Since(began) > 900*time.Millisecond {
		return nil // it has been tried again already: what was left is past
	}
	n.looks.Add(1)
	for i, g := range n.world.State().GPUs {
		if m := st.GPUs[i].MIG; m != nil && m.Work != "" {
			continue // what failed was not here
		}
		if err := n.left(i, g); err != nil {
			return fmt.Errorf("GPU %d was %s, was to be %s, and is left as %s: %w\nthe agent says: %s", i, n.old[i], n.modes[i], geometry(g), err, said)
		}
	}
	return nil
}

// failed reports whether the agent has said that a partition failed, or what the
// driver answered, since its log was so long: a reset that fails leaves the partition
// pending.
func (n *migNode) failed(since int) bool {
	for line := range bytes.Lines(n.logSince(since)) {
		var l struct{ Msg, State, Message string }
		if json.Unmarshal(line, &l) == nil && l.Msg == "partition" && (l.State == "failed" || strings.Contains(l.Message, failure)) {
			return true
		}
	}
	return false
}

// logSince is what the newest process has said since its log was so long.
func (n *node) logSince(since int) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	data, _ := os.ReadFile(n.logFile(n.starts))
	return data[min(since, len(data)):] // it is another one's where that ended by itself
}

// complaint is what the agent says of a call that failed.
func complaint(st *status.Status) string {
	if st.Partition.State == "failed" {
		return st.Partition.Message
	}
	for i := range st.GPUs {
		if unread(st.GPUs[i].Class, st.GPUs[i].Reason) {
			return st.GPUs[i].Reason
		}
		if m := st.GPUs[i].MIG; m != nil {
			for _, s := range m.Placements {
				if strings.Contains(s.Reason, failure) {
					return s.Reason
				}
			}
		}
	}
	return ""
}

// unread reports whether the call that failed was one of those that read a GPU and
// its health. Such a reading is due now and then, also while a change is made. It
// withdraws the GPU for a while, with all that is held of it, as any error of a
// GPU does (see package health).
func unread(class, reason string) bool {
	return class == string(health.ClassUnreadable) && strings.Contains(reason, failure)
}

// excuse leaves out of wrong that what is held of a GPU was withdrawn where the log
// says that the call that failed was a reading of that GPU. The status says so too,
// but not for longer than the GPU is withdrawn, which a busy machine misses.
func excuse(wrong []string, log []byte) []string {
	for line := range bytes.Lines(log) {
		var l struct{ Msg, GPU, Class, Reason string }
		if json.Unmarshal(line, &l) == nil && l.Msg == "GPU is unhealthy" && unread(l.Class, l.Reason) {
			wrong = slices.DeleteFunc(wrong, func(w string) bool {
				return strings.HasPrefix(w, l.GPU+"::") && strings.Contains(w, "is listed Unhealthy while")
			})
		}
	}
	return wrong
}

// TestOnlyAnUnreadGPUIsExcused: the status said of a GPU that it could not be read
// for a second, which a busy machine missed, and what followed counted as wrong.
func TestOnlyAnUnreadGPUIsExcused(t *testing.T) {
	const of = " of example.com/mig-7g.80gb is listed Unhealthy while pod-2 holds it"
	wrong := []string{"GPU-1::7g.80gb@0" + of, "GPU-2::7g.80gb@0" + of, "the list of example.com/gpu-mem lacks GPU-1::1, which pod-2 holds"}
	line := func(msg, class, reason string) string {
		return fmt.Sprintf(`{"level":"WARN","msg":%q,"gpu":"GPU-1","gi":-1,"ci":-1,"class":%q,"reason":%q}`+"\n", msg, class, reason)
	}
	for _, test := range []struct {
		log  string
		want []string
	}{
		{line("GPU is unhealthy", "unreadable", "unreadable: Unknown Error"), wrong[1:]},
		{line("GPU is unhealthy", "unreadable", "unreadable: Timeout"), wrong},
		{line("GPU is unhealthy", "lost", "lost: Unknown Error"), wrong},
		{line("work failed", "unreadable", "Unknown Error"), wrong},
		{"", wrong},
	} {
		if got := excuse(slices.Clone(wrong), []byte(test.log)); !slices.Equal(got, test.want) {
			t.Errorf("after the log %q %q is wrong, want %q", test.log, got, test.want)
		}
	}
}

// left judges what a failed change has left of a GPU.
func (n *migNode) left(i int, g emulator.GPUState) error {
	if geometry(g) == n.old[i] {
		return nil
	}
	if n.waits[i] {
		return errors.New("it was to wait")
	}
	if _, fixed := counts(n.modes[i]); fixed || !strings.HasPrefix(n.modes[i], "mig") {
		if becomes(g, n.modes[i]) {
			return nil
		}
		return errors.New("that is neither")
	}
	// On demand: what stands is of before or a pod's, and what stood and does not is
	// where a pod's is now.
	all, empty := standing(g)
	if empty {
		return errors.New("a GPU instance is empty")
	}
	held := map[string]bool{}
	for _, h := range n.held() {
		for _, id := range h.ids {
			held[id] = true
		}
	}
	now := map[string]instance{}
	for _, in := range all {
		now[in.id] = in
		if !held[in.id] && !slices.ContainsFunc(n.was[i], func(o instance) bool { return o.id == in.id }) {
			return fmt.Errorf("%s was not there and nobody has it", in.id)
		}
	}
	for _, o := range n.was[i] {
		if _, stands := now[o.id]; stands {
			continue
		}
		if !slices.ContainsFunc(all, func(in instance) bool {
			return held[in.id] && in.start < o.start+o.size && o.start < in.start+in.size
		}) {
			return fmt.Errorf("%s is gone and nothing has its place", o.id)
		}
	}
	return nil
}

// never is a fault that only counts the calls that it lets pass.
func never(call string) emulator.Fault {
	return emulator.Fault{Call: call, Code: emulator.Unknown, Skip: 1 << 30}
}

// count makes the change, there and back, and counts the calls of it. It returns the changes
// of files besides.
func (n *migNode) count(ctx context.Context) (counts [2]map[string]int, files [2][]change, err error) {
	for way := range counts {
		var faults []emulator.Fault
		for _, call := range append(slices.Clone(changingCalls), anyCall) {
			faults = append(faults, never(call))
		}
		if _, err := n.pass(ctx, point{back: way == 1}, faults...); err != nil {
			return counts, files, err
		}
		counts[way] = map[string]int{}
		for _, f := range n.world.Faults() {
			if passed := 1<<30 - f.Skip; passed > 0 {
				counts[way][f.Call] = passed
			}
		}
		n.world.Clear()
		counts[way][fileChange], files[way] = len(n.changes), n.changes
	}
	return counts, files, nil
}

// points are all k of a change, or a sample of them; with -short those of the sample that are
// chosen. files are the changes of files.
func (c *migChange) points(chosen choice, counts [2]map[string]int, files [2][]change, rng *rand.Rand) (out [2][]point) {
	for way := range counts {
		var changing, any, ofFiles []point
		for _, call := range slices.Sorted(maps.Keys(counts[way])) {
			for k := 1; k <= counts[way][call]; k++ {
				for _, h := range []hit{fails, before, within} {
					p := point{call, k, h, way == 1}
					switch {
					case call == fileChange && h == before:
						ofFiles = append(ofFiles, p)
					case call == fileChange:
					case call != anyCall:
						changing = append(changing, p)
					case h != within: // a reading takes no time
						any = append(any, p)
					}
				}
			}
		}
		if !*long {
			sample := func(all []point, n int) []point {
				rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				if c.slow {
					n = (n + 1) / 3
				}
				return all[:min(n, len(all))]
			}
			changing, any, ofFiles = sample(changing, sampledChanging), sample(any, sampledAny), sample(ofFiles, sampledFiles)
		}
		for i, p := range slices.Concat(changing, ofFiles, any) {
			of := hardwareKind
			switch p.call {
			case anyCall:
				of = readingKind
			case fileChange:
				of = kindOf(files[way][p.k-1])
			}
			// The same of both directions, which are made in turn.
			if chosen.tries(c.name, i+1, of) {
				out[way] = append(out[way], p)
			}
		}
	}
	return out
}

// Of the points of one change, in one direction, without -long and -short.
const (
	sampledChanging = 6
	sampledAny      = 2
	sampledFiles    = 1
)

// fault is what has a point happen.
func (p point) fault() emulator.Fault {
	f := emulator.Fault{Call: p.call, Skip: p.k - 1, Count: 1}
	switch p.hit {
	case fails:
		f.Code = emulator.Unknown
	case before:
		f.Delay = 2 * time.Second // unless the caller dies
	case within:
		f.Delay = time.Nanosecond // the call goes on, and that is known
	}
	return f
}

// TestHardwareChangeCutAtEachCall has the k-th call of a change fail, or the agent
// die there.
func TestHardwareChangeCutAtEachCall(t *testing.T) {
	t.Parallel()
	trace(t)
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	triesPoints(t)
	t.Logf("seed %d", *seed)
	for i := range migChanges {
		change := &migChanges[i]
		t.Run(strings.ReplaceAll(change.name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			began, ctx := time.Now(), inOrder(t)
			var tried, looks, failures atomic.Int64
			first := shortDir(t)
			n, stop, err := startMIG(ctx, first, change, &looks)
			if err != nil {
				t.Fatal(err)
			}
			counts, files, err := n.count(ctx)
			if err != nil {
				t.Fatal(errors.Join(fmt.Errorf("the change without a fault: %w\n%s", err, n.said()), stop()))
			}
			for way := range files {
				knowsKinds(t, files[way])
			}
			todo := change.points(chosen(), counts, files, rand.New(rand.NewPCG(*seed, uint64(i))))
			var all sync.WaitGroup
			workers := fewer(migWorkers)
			for w := range workers {
				c := migCutter{change: change, dir: first, node: n, stop: stop}
				if w > 0 {
					c = migCutter{change: change, dir: shortDir(t)}
				}
				all.Go(func() {
					if err := c.cut(ctx, t, todo, w, workers, sums{&tried, &looks, &failures}); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			t.Logf("calls there %v, back %v; %d points of %d, %d looks at what a failed call left, %.1f s", counts[0], counts[1],
				tried.Load(), len(todo[0])+len(todo[1]), looks.Load(), time.Since(began).Seconds())
		})
	}
}

const migWorkers = 2

// sums are of all workers of a change: points, looks at what a failed call has
// left, failures.
type sums struct{ tried, looks, failures *atomic.Int64 }

// migCutter tries points of a change on a node, which it starts in a directory where there is
// none. At first the node is as it is before the change.
type migCutter struct {
	change *migChange
	dir    string
	node   *migNode
	stop   func() error
}

func (c *migCutter) end() (err error) {
	if c.node != nil {
		err = c.stop()
		c.node = nil
	}
	return errors.Join(err, empty(c.dir))
}

// cut tries the points of the w-th of so many workers, in both directions in turn. After a
// failure it goes on with a new node.
func (c *migCutter) cut(ctx context.Context, t *testing.T, todo [2][]point, w, workers int, s sums) error {
	for i := w; i < max(len(todo[0]), len(todo[1])); i += workers {
		for way := range todo {
			p := point{back: way == 1} // where one direction has more points
			var faults []emulator.Fault
			if i < len(todo[way]) {
				p = todo[way][i]
			}
			if p.k > 0 && p.call != fileChange {
				faults = append(faults, p.fault())
			}
			if c.node == nil {
				var err error
				if c.node, c.stop, err = startMIG(ctx, c.dir, c.change, s.looks); err != nil {
					return err
				}
				if p.back { // it is one of there
					if _, err := c.node.pass(ctx, point{}); err != nil {
						return errors.Join(fmt.Errorf("there, without a fault: %w\n%s", err, c.node.said()), c.end())
					}
				}
			}
			reached, err := c.node.pass(ctx, p, faults...)
			c.node.world.Clear()
			if reached {
				s.tried.Add(1)
			}
			if err == nil {
				continue
			}
			t.Errorf("%s: %v\n%s", p, err, c.node.said())
			if err := c.end(); err != nil {
				return err
			}
			if s.failures.Add(1) >= maxFailures {
				return errors.New("the rest is not tried")
			}
		}
	}
	return c.end()
}
