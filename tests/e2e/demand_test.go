// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/lab"
)

// demandGPUs are cut as pods ask; the others are off, so that room is short.
const demandGPUs = 3

const demandPartitions = head + `    - devices: [0, 1, 2]
      mode: mig
    - devices: [3, 4, 5, 6, 7]
      mode: off
`

// tables are the profiles of migModel, as its driver was recorded to tell them.
var tables = sync.OnceValue(func() map[string]emulator.MIGProfile {
	out, err := emulator.Profiles(migModel)
	if err != nil {
		panic(err) // it is part of this module
	}
	return out
})

// placements is every placement of every profile on so many GPUs.
func placements(gpus int) map[string]int {
	out := map[string]int{}
	for name, p := range tables() {
		out[lab.MIG(name)] = gpus * len(p.Starts)
	}
	return out
}

// demand is a crowd of pods that ask for instances. One goroutine makes and ends
// them; another looks, without rest, what containers see, against the kubelet's
// word on who has what and the hardware's on what there is.
type demand struct {
	*bench
	rng     *rand.Rand
	runtime *witness.Runtime
	began   time.Time
	name    string // of this crowd's pods
	crowdOptions
	order []string // of those that have run, by their first moments
	// told are the pods of Jobs that were refused, of which the account tells.
	told map[string]bool

	mu    sync.Mutex // guards what follows
	pods  map[string]*demandPod
	seen  map[string]*demandContainer // by container ID, those that run
	given map[string]walkAllocation   // by key, as the kubelet gave them out
	uids  map[string]bool
	stamp witness.Stamp
	wrong []string
	lines []string
	done  map[string]int
}

// meetWithin is how much longer a pod runs where it has not been looked at.
const meetWithin = 20 * time.Second

// crowdOptions say what is special about a crowd.
type crowdOptions struct {
	// disturb goes on beside it until its context ends.
	disturb func(context.Context) error
	// rough says that the kubelet starts anew meanwhile, which may cost a pod that
	// has to be judged again.
	rough bool
	// fails says that pods of Jobs fail by themselves, too, and not only where they
	// are refused; a Job waits ten seconds and more before it makes the next.
	fails bool
	// first is what the first pod asks for, a plain one.
	first map[string]int
	// byClaims says that pods ask by claims of their own, not by a resource's name.
	byClaims bool
	// dynamic says that they ask for whole GPUs and for memory too.
	dynamic bool
	// seed is this crowd's, whatever that of the test is; none where it is 0.
	seed uint64
}

type demandPod struct {
	*lab.RunningPod
	kind string
	job  bool
	// ends says that its containers end by themselves.
	ends   bool
	deaf   bool
	doomed bool
	made   time.Time
	until  time.Time // when its end is asked for, once it runs
	ran    bool
	met    bool // it was looked at
	init   bool
	// lost is a container that ended though nobody had asked for it.
	lost   *demandContainer
	lostAt time.Time
}

// demandContainer is a container that runs, and what it runs on.
type demandContainer struct {
	witness.Container
	process lab.Process
	has     []instance
}

func (c *demandContainer) String() string { return c.Pod + "/" + c.Name }

func (d *demand) say(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sayLocked(format, args...)
}

func (d *demand) sayLocked(format string, args ...any) {
	d.lines = append(d.lines, fmt.Sprintf("%6.1f s  ", time.Since(d.began).Seconds())+fmt.Sprintf(format, args...))
}

func (d *demand) breakLocked(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if !slices.Contains(d.wrong, line) {
		d.wrong = append(d.wrong, line)
		d.sayLocked("WRONG: %s", line)
	}
}

// look checks what must be true at any moment: each container that runs sees the
// nodes of the instances that it was given, these stand for as long as it runs,
// and nobody else has them.
func (d *demand) look(ctx context.Context) {
	d.readCheckpoint()
	if d.byClaims {
		d.readClaims(ctx)
	}
	list, err := d.runtime.Containers(ctx)
	if err != nil {
		return
	}
	stands, err := driver.Look(ctx)
	if err != nil {
		return
	}
	all := instancesOf(stands)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.done["looks"]++
	for _, c := range list {
		if c.Namespace != lab.PodNamespace {
			continue
		}
		d.uids[c.PodUID] = true
		if _, known := d.seen[c.ID]; !known && c.Running && len(c.Annotations)+len(c.CDI) > 0 {
			d.meetLocked(c, all)
		}
	}
	users := map[uint64]*demandContainer{}
	for _, id := range slices.Sorted(maps.Keys(d.seen)) {
		c := d.seen[id]
		if !node.Lives(c.process) {
			delete(d.seen, id)
			if p := d.podLocked(c.Pod); p != nil && !p.doomed && !p.ends && c.Name != "init" {
				p.lost, p.lostAt = c, time.Now()
			}
			continue
		}
		for _, i := range c.has {
			if !slices.ContainsFunc(all, func(o instance) bool { return o.compute.Serial == i.compute.Serial && o.gpu.UUID == i.gpu.UUID }) {
				// The list is older than the look at the process.
				d.breakLocked("%s runs, and its instance, %s, is gone", c, i)
			}
			if o := users[i.compute.Serial]; o != nil && o.PodUID != c.PodUID {
				d.breakLocked("%s and %s run side by side on %s", o, c, i)
			}
			users[i.compute.Serial] = c
		}
	}
	d.done["most instances in use at once"] = max(d.done["most instances in use at once"], len(users))
}

func (d *demand) podLocked(name string) *demandPod {
	if p := d.pods[name]; p != nil {
		return p
	}
	if i := strings.LastIndexByte(name, '-'); i >= 0 { // a Job's
		return d.pods[name[:i]]
	}
	return nil
}

func (d *demand) readCheckpoint() {
	dir := node.File("/var/lib/kubelet")
	stamp := witness.CheckpointStamp(dir)
	if stamp == d.stamp {
		return
	}
	file, err := witness.ReadCheckpoint(dir)
	if err != nil {
		return // it is being written
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stamp = file.Stamp
	for _, e := range file.Entries {
		d.given[cdi.Key(e.Resource, e.IDs)] = walkAllocation{e.Resource, e.IDs}
	}
}

// meetLocked looks from inside at a container that was not seen before.
func (d *demand) meetLocked(c witness.Container, all []instance) {
	process, err := node.InitProcess(c.ID)
	if err != nil {
		return // it has ended already
	}
	sees, ok := nvidiaNodes(process)
	if !ok {
		return // it ends, or is looked at again
	}
	met := &demandContainer{Container: c, process: process}
	var want []string
	for _, key := range cdi.Keys(lab.Domain, c.Annotations, c.CDI) {
		allocation, known := d.given[key]
		if !known {
			return // the checkpoint is read again before the next look
		}
		for _, id := range allocation.ids {
			s, err := parsePlacement(id)
			if err != nil {
				d.breakLocked("%s: %v", met, err)
				return
			}
			i, stands := find(all, s)
			if !stands {
				// The hardware was looked at after the list of those that run.
				if node.Lives(process) {
					d.breakLocked("%s runs with %s, which does not stand", met, id)
				}
				return
			}
			if profile := strings.TrimPrefix(allocation.resource, lab.Domain+"/mig-"); lab.MIG(i.compute.Profile) != allocation.resource {
				d.breakLocked("%s has asked for %s and has %s", met, profile, i)
			}
			met.has = append(met.has, i)
			want = append(want, i.nodes()...)
		}
	}
	slices.Sort(want)
	if want = slices.Compact(want); !slices.Equal(sees, want) {
		d.breakLocked("%s sees %v, want %v of %v", met, sees, want, met.has)
	}
	d.seen[c.ID] = met
	if p := d.podLocked(c.Pod); p != nil && c.Name != "init" {
		p.met = true
	}
	d.done["containers"]++
	d.done["instances of containers"] += len(met.has)
	d.sayLocked("  %s runs on %v", met, met.has)
}

// nvidiaNodes are the driver's device nodes that a process sees, but for those
// that all containers with a GPU have. A process that ends has no root any more
// before it is dead, so its /dev is there before and after, or it does not count.
func nvidiaNodes(p lab.Process) (nodes []string, ok bool) {
	for _, dir := range []string{"/dev", "/dev/nvidia-caps", "/dev"} {
		entries, err := os.ReadDir(node.File(filepath.Join("/proc", fmt.Sprint(p.PID), "root", dir)))
		if err != nil && (dir == "/dev" || !errors.Is(err, os.ErrNotExist)) {
			return nil, false
		}
		for _, e := range entries {
			if path := filepath.Join(dir, e.Name()); strings.HasPrefix(e.Name(), "nvidia") && !e.IsDir() && !slices.Contains(lab.ControlDevices, path) {
				nodes = append(nodes, path)
			}
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), node.Lives(p)
}

// wants is what a container asks for.
func (d *demand) wants() map[string]int {
	if d.dynamic {
		switch n := d.rng.IntN(8); {
		case n < 1:
			return map[string]int{lab.GPU: 1}
		case n < 4:
			return map[string]int{lab.Memory: shares[d.rng.IntN(len(shares))]}
		}
	}
	one := lab.MIG("1g.10gb")
	switch n := d.rng.IntN(20); {
	case n < 7:
		return map[string]int{one: 1}
	case n < 8:
		return map[string]int{one: 2}
	case n < 9:
		return map[string]int{lab.MIG("1g.10gb+me"): 1}
	case n < 10:
		return map[string]int{lab.MIG("1g.20gb"): 1}
	case n < 13:
		return map[string]int{lab.MIG("2g.20gb"): 1}
	case n < 16:
		return map[string]int{lab.MIG("3g.40gb"): 1}
	case n < 17:
		return map[string]int{lab.MIG("4g.40gb"): 1}
	case n < 18:
		return map[string]int{lab.MIG("7g.80gb"): 1}
	case n < 19:
		return map[string]int{one: 1, lab.MIG("2g.20gb"): 1}
	default:
		return map[string]int{one: 1, lab.MIG("3g.40gb"): 1}
	}
}

// make makes a pod of a random kind.
func (d *demand) make(n int) {
	p := &demandPod{kind: "plain", made: time.Now()}
	spec := lab.Pod{Name: fmt.Sprintf("%s-%d", d.name, n), Containers: []lab.Container{{Resources: d.wants()}}}
	retries := 0
	switch k := d.rng.IntN(10); {
	case n == 0 && d.first != nil:
		spec.Containers[0].Resources = d.first
	case k < 4:
	case k < 6:
		p.kind, p.job, p.ends, retries = "of a Job with retries", true, true, 12
		spec.Containers[0].Then = "sleep 1; exit 0\n"
		if d.fails {
			// A ninth of its pods, by their names' random ends.
			spec.Containers[0].Then = "sleep 1; case $(hostname) in *[bcd]) exit 1 ;; esac; exit 0\n"
		}
	case k < 8:
		p.kind, p.init = "with an init container", true
		spec.Init = []lab.Container{{Name: "init", Resources: d.wants(), Then: "sleep 0.5\n"}}
	default:
		p.kind, p.deaf = "deaf", true
		spec.Containers[0].Then = lab.Deaf
		spec.Grace = 20 * time.Second
	}
	d.say("make %s, %s, for %v", spec.Name, p.kind, asked(spec))
	if d.byClaims {
		byTemplate(&spec)
	}
	d.mu.Lock()
	d.pods[spec.Name] = p
	d.done["pods"]++
	d.done["pods "+p.kind]++
	d.mu.Unlock()
	if p.job {
		p.RunningPod = &lab.RunningPod{Name: spec.Name}
		d.must(node.CreateRetried(d.ctx, spec, retries))
		return
	}
	pod, err := node.CreatePod(d.ctx, spec)
	d.must(err)
	p.RunningPod = pod
}

func asked(spec lab.Pod) string {
	var out []string
	for _, c := range append(slices.Clone(spec.Init), spec.Containers...) {
		for _, name := range slices.Sorted(maps.Keys(c.Resources)) {
			out = append(out, fmt.Sprintf("%d %s", c.Resources[name], strings.TrimPrefix(name, lab.Domain+"/mig-")))
		}
	}
	return strings.Join(out, ", ")
}

// step looks at all pods and ends those whose time has come. It says how many are
// not done with.
func (d *demand) step() (left int) {
	list, err := node.Pods(d.ctx, "")
	if err != nil {
		return len(d.pods) // the API server is asked again
	}
	now := map[string]lab.ListedPod{}
	for _, p := range list {
		now[p.Name] = p
	}
	for _, name := range slices.Sorted(maps.Keys(d.pods)) {
		d.mu.Lock()
		p := d.pods[name]
		doomed, met, lost, lostAt := p.doomed, p.met, p.lost, p.lostAt
		d.mu.Unlock()
		if doomed {
			continue
		}
		left++
		if p.job {
			d.stepJob(name, p, list)
			continue
		}
		s, there := now[name]
		switch {
		case !there:
			continue // made a moment ago
		case lost != nil && s.Phase == "Failed" && s.Reason == "UnexpectedAdmissionError" && p.init && d.rough:
			// A kubelet that starts anew asks again for the devices of a pod with a
			// container that has ended.
			d.end(p, "lost: "+s.Message)
			d.count("lost with the kubelet")
			d.must(p.Delete(d.ctx))
		case lost != nil && time.Since(lostAt) > 5*time.Second:
			d.mu.Lock()
			d.breakLocked("%s, %s, was ended by nobody: %s", lost, lost.process, s)
			d.mu.Unlock()
		case lost != nil:
		case s.Phase == "Failed":
			d.end(p, "refused: "+s.Reason+" "+s.Message)
			d.count("refused")
			d.Logf("%s, %s, was refused: %s", p.Name, p.kind, s.Message)
			d.must(p.Delete(d.ctx))
		case !s.Containers["main"].Running:
		case !p.ran:
			d.order = append(d.order, name)
			p.ran, p.until = true, time.Now().Add(time.Duration(d.rng.IntN(3000))*time.Millisecond)
			d.count("ran")
		case time.Now().Before(p.until):
		case !met && !d.dynamic && time.Since(p.until) < meetWithin:
			// On a busy machine a look takes longer than it lives.
		case p.deaf:
			d.end(p, "delete by force")
			d.count("deleted by force")
			d.must(p.ForceDelete(d.ctx))
		default:
			d.end(p, "delete")
			d.must(p.Delete(d.ctx))
		}
	}
	return left
}

func (d *demand) count(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.done[what]++
}

func (d *demand) end(p *demandPod, how string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p.doomed = true
	d.sayLocked("%s: %s", p.Name, how)
}

func (d *demand) stepJob(name string, p *demandPod, list []lab.ListedPod) {
	for _, pod := range list {
		if strings.HasPrefix(pod.Name, name+"-") && pod.Phase == "Failed" && pod.Reason != "" && !d.told[pod.Name] {
			d.told[pod.Name] = true
			d.mu.Lock()
			d.sayLocked("%s: refused: %s %s", pod.Name, pod.Reason, pod.Message)
			d.mu.Unlock()
		}
	}
	s, err := node.JobState(d.ctx, name)
	if err != nil || s.Ended == "" {
		return
	}
	for _, pod := range list {
		if strings.HasPrefix(pod.Name, name+"-") {
			d.count("pods of Jobs")
			if pod.Phase == "Failed" && pod.Reason != "" {
				d.count("refused of Jobs")
			}
		}
	}
	if s.Ended != "Complete" {
		d.mu.Lock()
		d.breakLocked("job %s has failed after %d pods", name, s.FailedPods)
		d.mu.Unlock()
	}
	d.end(p, fmt.Sprintf("job %s after %d failed pods", s.Ended, s.FailedPods))
	d.count("ran")
	d.must(node.DeleteJob(d.ctx, name))
}

// crowd lets so many pods come and go. When all are gone nothing may be left.
func (b *bench) crowd(n int, o crowdOptions) *demand {
	b.Helper()
	seed := o.seed
	if seed == 0 {
		seed = seedOf(b)
	}
	d := &demand{bench: b, rng: rand.New(rand.NewPCG(seed, 5)), began: time.Now(), crowdOptions: o,
		name: "d" + strings.ReplaceAll(strings.ToLower(b.short()), "_", "-"),
		runtime: witness.NewRuntime(witness.RuntimeOptions{
			Endpoint: node.File("/run/containerd/containerd.sock"), AnnotationPrefix: cdi.AnnotationName(lab.Domain, ""),
			DRA: func() bool { return o.byClaims },
		}),
		pods: map[string]*demandPod{}, seen: map[string]*demandContainer{}, given: map[string]walkAllocation{}, uids: map[string]bool{}, done: map[string]int{}, told: map[string]bool{}}
	ctx, quit := context.WithCancel(context.Background())
	var others sync.WaitGroup
	others.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			d.look(ctx)
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	})
	disturbing, enough := context.WithCancel(ctx)
	var disturbed error
	disturbance := make(chan struct{})
	others.Go(func() {
		defer close(disturbance)
		if o.disturb != nil {
			disturbed = o.disturb(disturbing)
		}
	})
	b.Cleanup(func() {
		quit()
		others.Wait()
		if b.Failed() {
			b.Logf("the account of the crowd:\n%s", strings.Join(d.lines, "\n"))
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		errs := []error{d.runtime.Close(), driver.ClearFaults(ctx)}
		for name, p := range d.pods {
			if p.job {
				errs = append(errs, node.DeleteJob(ctx, name))
			}
		}
		if err := errors.Join(append(errs, node.DeletePods(ctx))...); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})

	made := 0
	for left, limit := 0, time.Now().Add(4*time.Minute); made < n || left > 0; {
		if made < n && left < 14 {
			d.make(made)
			made++
		}
		b.must(lab.Holds(b.ctx, time.Duration(d.rng.IntN(600))*time.Millisecond, "while nothing is done", func(context.Context) error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if len(d.wrong) > 0 {
				return errors.New(strings.Join(d.wrong, "\n"))
			}
			return nil
		}))
		left = d.step()
		if time.Now().After(limit) && !*long {
			var stuck []string
			for name, p := range d.pods {
				if !p.doomed {
					stuck = append(stuck, fmt.Sprintf("%s (%s, ran %v)", name, p.kind, p.ran))
				}
			}
			b.Fatalf("after four minutes these pods have not come to their end: %v", stuck)
		}
	}
	enough()
	<-disturbance
	b.must(disturbed)
	b.must(driver.ClearFaults(b.ctx))
	d.empty()
	d.mu.Lock()
	defer d.mu.Unlock()
	refused, pods := d.refused(), d.sent()
	b.Logf("%.0f s: %d of %d pods were refused, %.1f %%; %v", time.Since(d.began).Seconds(), refused, pods, 100*float64(refused)/float64(max(1, pods)), d.done)
	// Those with MIG instances, which are half of a dynamic crowd.
	if d.done["containers"] < n/2 && !d.dynamic {
		b.Errorf("only %d containers were looked at: %v", d.done["containers"], d.done)
	}
	return d
}

// sent is how many pods there were, those of Jobs one by one, and refused how many of them
// the kubelet did not take.
func (d *demand) sent() int {
	return d.done["pods"] - d.done["pods of a Job with retries"] + d.done["pods of Jobs"]
}

func (d *demand) refused() int { return d.done["refused"] + d.done["refused of Jobs"] }

// seedOf is the seed of a crowd: without -long always the same.
func seedOf(b *bench) uint64 {
	seed := *walkSeed
	if seed == 0 {
		if seed = 1; *long {
			seed = uint64(time.Now().UnixNano())
		}
	}
	b.Logf("seed %d", seed)
	return seed
}

// empty waits until nothing is left of the pods: no allocation, no CDI file, no
// cgroup, and every placement on offer.
func (d *demand) empty() {
	d.Helper()
	d.must(node.DeletePods(d.ctx))
	d.must(agent.Ready(d.ctx))
	d.allocationsBecome(0)
	d.must(lab.Await(d.ctx, waitLong, "the end of CDI files and cgroups", func(ctx context.Context) error {
		left, err := agent.CDIFiles(ctx)
		if err != nil {
			return err
		}
		dirs, err := node.Cgroups()
		if err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, dir := range dirs {
			if uid, ok := strings.CutPrefix(filepath.Base(dir), "pod"); ok && d.uids[uid] {
				left = append(left, dir)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("there are %v", left)
		}
		return nil
	}))
	if !d.byClaims {
		d.offersAll(placements(demandGPUs))
	}
	if d.dynamic {
		return // what stands depends on what was asked last
	}
	// What stands is warm, and the agent knows of each.
	d.must(agent.AwaitStatus(d.ctx, 30*time.Second, "all instances to be warm", func(s lab.Status) error {
		stands, err := driver.Look(d.ctx)
		if err != nil {
			return err
		}
		var errs []error
		for _, g := range s.GPUs[:demandGPUs] {
			if g.MIG == nil || !g.MIG.OnDemand {
				return fmt.Errorf("GPU %d is not cut on demand", g.Index)
			}
			var says, has []string
			for _, w := range g.MIG.In("warm") {
				says = append(says, fmt.Sprintf("%s@%d", w.Profile, w.Start))
			}
			for _, i := range instancesOf(stands) {
				if i.gpu.Index == g.Index {
					has = append(has, fmt.Sprintf("%s@%d", i.compute.Profile, i.in.Start))
				}
			}
			slices.Sort(says)
			slices.Sort(has)
			if !slices.Equal(says, has) || len(g.MIG.In("held")) > 0 {
				errs = append(errs, fmt.Errorf("GPU %d has %v, and the agent says %v are warm and %v held", g.Index, has, says, g.MIG.In("held")))
			}
		}
		return errors.Join(errs...)
	}))
}

// needless finds instances that were destroyed though what was made there next
// could have stood beside them.
func needless(ops []lab.MIGOp) (out []string) {
	for n, gone := range ops {
		if gone.Op != "destroy" || gone.CI >= 0 {
			continue
		}
		i := slices.IndexFunc(ops[n:], func(o lab.MIGOp) bool { return o.Op == "create" && o.GPU == gone.GPU && o.CI < 0 })
		if i < 0 {
			out = append(out, fmt.Sprintf("%s@%d of GPU %d, and nothing was made there", gone.Profile, gone.Start, gone.GPU))
			continue
		}
		made := ops[n+i]
		end := func(o lab.MIGOp) int { return o.Start + int(tables()[o.Profile].Size) }
		apart := end(made) <= gone.Start || end(gone) <= made.Start
		media := strings.HasSuffix(made.Profile, "+me") && strings.HasSuffix(gone.Profile, "+me")
		if apart && !media {
			out = append(out, fmt.Sprintf("%s@%d of GPU %d, for %s@%d", gone.Profile, gone.Start, gone.GPU, made.Profile, made.Start))
		}
	}
	return out
}

// Pods of mixed profiles come and go: each container sees its own instance and
// nothing else, no two share one, none that runs loses its own, no idle one is
// destroyed but for one that needs its room, and nothing is left. All of it also
// while the agent is killed, driver calls fail, the kubelet starts anew, and a
// creation takes longer than the kubelet waits.
func TestMIGOnDemand(t *testing.T) {
	world := migWorld
	world.World += "gpus:\n"
	for index := range demandGPUs {
		world.World += fmt.Sprintf("  - {index: %d, mig: true}\n", index)
	}
	b := beginMIG(t, world, demandPartitions, placements(demandGPUs))
	calm := crowdOptions{fails: true}
	pods := count(30, 200)
	if testing.Short() {
		// A Job whose pod fails makes the next one after ten seconds.
		calm.fails, pods = false, 12
	} else {
		// How many pods are refused depends on how old the scheduler's picture is.
		b.usersStatus()
		b.offersAll(placements(demandGPUs))
	}
	every := func(span time.Duration, times int, do func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			for range times {
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(span):
				}
				// What has begun is ended: a kubelet that is down would stay down.
				if err := do(context.WithoutCancel(ctx)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	b.sub("calm", func(b *bench) {
		b.wishes("one after the other", func() {
			for _, profile := range []string{"3g.40gb", "2g.20gb", "1g.10gb"} {
				pod := b.pod("alone-"+profile, lab.MIG(profile), 1)
				b.must(pod.Running(b.ctx))
				b.insideMIG(pod, "")
				b.must(pod.Delete(b.ctx))
			}
		})
		ops := b.wishes("all at once, each behind others on its GPU", func() { b.crowd(pods, calm) })
		for _, line := range needless(ops) {
			b.Errorf("needlessly destroyed: %s", line)
		}
	})
	b.rest("agent-killed", func(b *bench) {
		b.crowd(count(12, 200), crowdOptions{disturb: every(5*time.Second, count(8, 1000), agent.Crash)})
	})
	b.rest("calls-fail", func(b *bench) {
		for _, call := range []string{"nvml*Create*Instance*", "nvml*InstanceDestroy"} {
			b.must(driver.FailEvery(b.ctx, 10, call, 999))
		}
		// A look at one GPU alone is dozens of these: more would blind the agent.
		b.must(driver.FailEvery(b.ctx, 150, "nvmlGpuInstanceGet*", 999))
		b.crowd(count(14, 200), crowdOptions{fails: true})
	})
	b.rest("kubelet-restarts", func(b *bench) {
		// Not for ever: a kubelet that is killed between a container's making and its
		// start leaves a made one of a pod that is gone, which stays the holder of
		// what others wait for until a kubelet has lived for the minute after which
		// it collects such.
		restarts := 0
		b.crowd(count(10, 200), crowdOptions{rough: true, disturb: every(6*time.Second, count(2, 40), func(ctx context.Context) error {
			if restarts++; restarts%2 == 0 {
				return node.RestartKubelet(ctx)
			}
			return node.CrashKubelet(ctx)
		})})
	})
	b.rest("slow-creation", func(b *bench) {
		// The first pod asks for what stands nowhere.
		absence := func() (absent string) {
			stands := b.instances()
			for _, name := range slices.Sorted(maps.Keys(tables())) {
				if !slices.ContainsFunc(stands, func(i instance) bool { return i.compute.Profile == name }) {
					absent = name
				}
			}
			return absent
		}
		absent := absence()
		if absent == "" { // a long crowd leaves something of everything
			pod := b.pod("alone-on-all", lab.MIG("7g.80gb"), demandGPUs)
			b.must(pod.Running(b.ctx))
			b.must(pod.Delete(b.ctx))
			absent = absence()
		}
		b.must(driver.Slow(b.ctx, "nvmlDeviceCreateGpuInstance*", -1, 40*time.Second, 1))
		d := b.crowd(count(8, 60), crowdOptions{first: map[string]int{lab.MIG(absent): 1}})
		if len(d.order) < 2 || d.order[0] == d.name+"-0" || !slices.Contains(d.order, d.name+"-0") {
			b.Errorf("the pods have run in the order %v: nobody ran while the first, of %s, had to wait", d.order, absent)
		}
	})
}

// wishes logs how long containers have waited for their instances while f was
// called, and how long the hardware worked for all of them. It returns what the
// hardware did.
func (b *bench) wishes(what string, f func()) []lab.MIGOp {
	b.Helper()
	look := func() (sum, n float64, ops []lab.MIGOp) {
		m, err := agent.Metrics(b.ctx)
		b.must(err)
		for name, value := range m {
			switch {
			case strings.HasPrefix(name, "gpu_agent_mig_wish_duration_seconds_sum"):
				sum += value
			case strings.HasPrefix(name, "gpu_agent_mig_wish_duration_seconds_count"):
				n += value
			}
		}
		ops, err = driver.MIGOps(b.ctx)
		b.must(err)
		return sum, n, ops
	}
	sum, n, before := look()
	f()
	sumNow, nNow, ops := look()
	ops = slices.DeleteFunc(ops, func(o lab.MIGOp) bool { return slices.Contains(before, o) })
	if sum, n = sumNow-sum, nNow-n; n == 0 {
		b.Errorf("%s: the agent has counted no wish", what)
		return ops
	}
	b.Logf("%s: from the wish to the open gate %.0f ms on average of %.0f, of which the hardware has worked %.0f ms",
		what, 1000*sum/n, n, 1000*operation.Seconds()/2*float64(len(ops))/n)
	return ops
}

func TestNeedless(t *testing.T) {
	op := func(gpu int, what, profile string, start int) lab.MIGOp {
		return lab.MIGOp{GPU: gpu, Op: what, Profile: profile, Start: start, CI: -1}
	}
	for _, c := range []struct {
		name string
		ops  []lab.MIGOp
		want int
	}{
		{"made only", []lab.MIGOp{op(0, "create", "1g.10gb", 0)}, 0},
		{"for one that needs its room", []lab.MIGOp{op(0, "destroy", "1g.10gb", 3), op(0, "create", "3g.40gb", 0)}, 0},
		{"for one that stands beside it", []lab.MIGOp{op(0, "destroy", "1g.10gb", 4), op(0, "create", "3g.40gb", 0)}, 1},
		{"for one of another GPU", []lab.MIGOp{op(0, "destroy", "1g.10gb", 0), op(1, "create", "3g.40gb", 0)}, 1},
		{"for nothing", []lab.MIGOp{op(0, "create", "1g.10gb", 0), op(0, "destroy", "1g.10gb", 0)}, 1},
		{"for the media engine", []lab.MIGOp{op(0, "destroy", "1g.10gb+me", 5), op(0, "create", "1g.10gb+me", 2)}, 0},
	} {
		if got := needless(c.ops); len(got) != c.want {
			t.Errorf("%s: it finds %v, want %d", c.name, got, c.want)
		}
	}
}
