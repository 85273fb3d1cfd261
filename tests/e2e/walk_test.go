// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/lab"
)

var (
	walkSeed  = flag.Uint64("walk.seed", 0, "seed of TestWalk; 0 is 1, and of the clock with -long")
	walkSteps = flag.Int("walk.steps", 0, "random steps of TestWalk; 0 is the form's own number")
)

// walkFiles are the partitions that the walk edits to and fro. The last two are
// refused, and leave the one before in force: one has more devices than fit, the
// other cannot be read.
var walkFiles = []string{
	mixed,
	faultPartitions,
	allShared,
	"version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n",
	`version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: whole
    - devices: [2, 3]
      mode: shared
    - devices: [4, 5]
      mode: shared
      replicas: 3
    - devices: [6, 7]
      mode: off
`,
	tooMany,
	"version: v1\npartitions: [\n",
}

// walkRefused is how many of them are refused.
const walkRefused = 2

// walk is a random walk over the node. One goroutine steps; another looks, ten
// times a second, whether the rules hold. What is chosen depends on the seed and
// on what was chosen before, not on what came of it.
type walk struct {
	*bench
	rng     *rand.Rand
	began   time.Time
	runtime *witness.Runtime

	// Of the goroutine that steps.
	next      int            // number of the next pod
	live      []*walkPod     // made, and not deleted yet
	faults    map[int]string // GPUs with something wrong, -1 is the driver
	held      []heldContainer
	kills     int // of the agent's since it was made anew: the kubelet waits longer after each
	restarted time.Time
	attack    walkAttack

	mu          sync.Mutex // guards what follows
	step        int        // only one goroutine writes it, and reads it as it likes
	lines       []walkLine
	wrong       []string
	pods        map[string]*walkPod // all there ever were, by name
	containers  map[string]*walkContainer
	gone        []*walkContainer
	excused     map[lab.Process]bool // those that the walk ends itself
	kubelet     lab.Process
	agent       lab.Process
	agentSince  time.Time
	allocations map[string]walkAllocation // by key, as the kubelet gave them out
	stamp       witness.Stamp
	sick        map[string]time.Time // GPUs by UUID, until when files may be missing
	// rough says that the kubelet has started anew while the agent could not help
	// pods that must be judged again.
	rough bool
	done  map[string]int
}

type walkPod struct {
	*lab.RunningPod
	job  string         // the name of its Job
	asks map[string]int // what its main container asks for
	// foreign has its GPU from another device plugin.
	foreign bool
	// judged again by a kubelet that starts anew: not all of its containers run.
	judged bool
	ends   map[string]bool // containers that end by themselves
	deaf   bool
	doomed bool // guarded by walk.mu
}

// walkLine is a line of the account, and the step that it belongs to.
type walkLine struct {
	step int
	text string
}

type walkAllocation struct {
	resource string
	ids      []string
}

type walkContainer struct {
	witness.Container
	process lab.Process
	keys    []string
}

func (c *walkContainer) String() string { return c.Pod + "/" + c.Name }

// heldContainer cannot end for some steps.
type heldContainer struct {
	until int
	letGo func(context.Context) error
}

// say puts a line into the account of the walk.
func (w *walk) say(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sayLocked(format, args...)
}

func (w *walk) sayLocked(format string, args ...any) {
	text := fmt.Sprintf("%7.1f s  step %3d  ", time.Since(w.began).Seconds(), w.step) + fmt.Sprintf(format, args...)
	w.lines = append(w.lines, walkLine{w.step, text})
}

// breakLocked notes that a rule is broken.
func (w *walk) breakLocked(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if !slices.Contains(w.wrong, line) {
		w.wrong = append(w.wrong, line)
		w.sayLocked("WRONG: %s", line)
	}
}

func (w *walk) count(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done[what]++
}

func gpuOf(id string) string {
	u, _, _ := strings.Cut(id, "::")
	return u
}

func (c walkAllocation) gpus() []string {
	var out []string
	for _, id := range c.ids {
		out = append(out, gpuOf(id))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// look checks what must be true at any moment.
func (w *walk) look(ctx context.Context) {
	w.readCheckpoint()
	w.servers()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	list, err := w.runtime.Containers(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.done["looks without the runtime"]++ // a calm needs one
	}
	w.done["looks"]++
	for _, c := range list {
		if _, known := w.containers[c.ID]; !known && c.Running && c.Namespace == lab.PodNamespace && !w.podLocked(c.Pod).foreign {
			w.meetLocked(c)
		}
	}
	alive := map[string]*walkContainer{}
	for _, id := range slices.Sorted(maps.Keys(w.containers)) {
		c := w.containers[id]
		if node.Lives(c.process) {
			alive[id] = c
			continue
		}
		delete(w.containers, id)
		w.gone = append(w.gone, c)
		w.sayLocked("  %s has ended", c)
	}
	w.apartLocked(alive)
	w.filesLocked(alive, err == nil)
}

// readCheckpoint learns what the kubelet has given to whom, and judges each grant.
func (w *walk) readCheckpoint() {
	dir := node.File("/var/lib/kubelet")
	stamp := witness.CheckpointStamp(dir)
	if stamp == w.stamp {
		return
	}
	file, err := witness.ReadCheckpoint(dir)
	if err != nil {
		return // it is being written
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stamp = file.Stamp
	for _, e := range file.Entries {
		if !strings.HasPrefix(e.Resource, lab.Domain+"/") {
			continue
		}
		key := cdi.Key(e.Resource, e.IDs)
		if _, known := w.allocations[key]; known {
			continue
		}
		c := walkAllocation{e.Resource, e.IDs}
		w.allocations[key] = c
		if n := len(c.gpus()); e.Resource == lab.Memory && n != 1 || e.Resource != lab.Memory && n != len(e.IDs) {
			w.breakLocked("the kubelet has given %v of %s to container %s of pod %s: they lie on %d GPUs", e.IDs, e.Resource, e.Container, e.PodUID, n)
		}
	}
}

// servers looks whether the kubelet and the agent are those that they were.
func (w *walk) servers() {
	w.mu.Lock()
	kubelet, agentWas := w.kubelet, w.agent
	w.mu.Unlock()
	died := func(p lab.Process) bool { return p.PID != 0 && !node.Lives(p) }
	kubeletDied, agentDied := died(kubelet), died(agentWas)
	now := agentWas
	if agentDied || agentWas.PID == 0 {
		now, _ = agent.Process() // none while the kubelet waits before it starts the next
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if kubeletDied && kubelet == w.kubelet && !w.excused[kubelet] {
		w.breakLocked("the kubelet, %s, has died", kubelet)
	}
	if agentDied && !w.excused[agentWas] {
		w.breakLocked("the agent, %s, has died", agentWas)
	}
	if now != agentWas {
		w.agent, w.agentSince = now, time.Now()
	}
}

// meetLocked looks from inside at a container that runs and was not seen before:
// it must see the GPUs that its pod was given, and no others.
func (w *walk) meetLocked(c witness.Container) {
	process, err := node.InitProcess(c.ID)
	if err != nil {
		return // it has ended already
	}
	entries, err := os.ReadDir(node.File(filepath.Join("/proc", strconv.Itoa(process.PID), "root", "dev")))
	if err != nil || !node.Lives(process) {
		return
	}
	var sees, want []string
	for _, e := range entries {
		if digits, ok := strings.CutPrefix(e.Name(), "nvidia"); ok {
			if _, err := strconv.Atoi(digits); err == nil {
				sees = append(sees, "/dev/"+e.Name())
			}
		}
	}
	met := &walkContainer{Container: c, process: process}
	has := []string{}
	for name := range c.Annotations {
		key := strings.TrimPrefix(name, cdi.AnnotationName(lab.Domain, ""))
		allocation, known := w.allocations[key]
		if !known {
			w.breakLocked("%s runs on allocation %s, which the kubelet has given to nobody", met, key)
			return
		}
		met.keys = append(met.keys, key)
		has = append(has, fmt.Sprintf("%d of %s", len(allocation.ids), allocation.resource))
		for _, g := range driver.GPUs {
			if slices.Contains(allocation.gpus(), g.UUID) {
				want = append(want, g.Device())
			}
		}
	}
	slices.Sort(sees)
	slices.Sort(want)
	slices.Sort(has)
	w.containers[c.ID] = met
	w.done["containers"]++
	if p := w.podLocked(c.Pod); len(met.keys)+len(sees) == 0 && p.RunningPod != nil && p.doomed {
		// The kubelet frees a pod's devices when the pod is deleted by force. If that
		// comes between PreStartContainer and the making of the container, the kubelet
		// (1.36.3, "pod deleted from activePods, skip to reAllocate") makes it without any.
		w.sayLocked("  %s runs with nothing: its pod has been deleted", met)
		w.done["containers without their devices"]++
		return
	}
	w.sayLocked("  %s runs with %s on %v", met, strings.Join(has, " and "), sees)
	if len(want) == 0 || !slices.Equal(sees, want) {
		w.breakLocked("%s sees %v, want %v", met, sees, want)
	}
}

// apartLocked checks that no two pods run on the same unit, nor on one GPU as if
// it were cut in two ways.
func (w *walk) apartLocked(alive map[string]*walkContainer) {
	users, cuts := map[string]*walkContainer{}, map[string]map[string]*walkContainer{}
	for _, id := range slices.Sorted(maps.Keys(alive)) {
		c := alive[id]
		for _, key := range c.keys {
			allocation := w.allocations[key]
			for _, device := range allocation.ids {
				if o := users[allocation.resource+" "+device]; o != nil && o.PodUID != c.PodUID {
					w.breakLocked("%s and %s run side by side on %s", o, c, device)
				}
				users[allocation.resource+" "+device] = c
				by := cuts[gpuOf(device)]
				if by == nil {
					by = map[string]*walkContainer{}
					cuts[gpuOf(device)] = by
				}
				by[allocation.resource] = c
			}
		}
	}
	w.done["most GPUs in use at once"] = max(w.done["most GPUs in use at once"], len(cuts))
	for u, by := range cuts {
		if len(by) > 1 {
			w.breakLocked("GPU %s is in use as %v at once, by %v", u, slices.Sorted(maps.Keys(by)), slices.Collect(maps.Values(by)))
		}
	}
}

// filesLocked checks that what runs on healthy GPUs has its CDI file: with it the
// allocation would be gone, or the container's next start fail.
func (w *walk) filesLocked(alive map[string]*walkContainer, runtime bool) {
	if !runtime {
		return
	}
	for _, c := range alive {
		for _, key := range c.keys {
			if slices.ContainsFunc(w.allocations[key].gpus(), func(u string) bool { return time.Now().Before(w.sick[u]) }) {
				continue
			}
			_, err := os.Stat(node.File("/run/cdi/" + cdi.FileName(lab.Domain, key)))
			if errors.Is(err, os.ErrNotExist) && node.Lives(c.process) && !w.mayEndLocked(c) {
				w.breakLocked("%s runs and the CDI file of its allocation %s is gone", c, key)
			}
		}
	}
}

// podLocked is the pod of a name, which for a Job's is the Job's and a suffix.
func (w *walk) podLocked(name string) *walkPod {
	if p := w.pods[name]; p != nil {
		return p
	}
	if i := strings.LastIndexByte(name, '-'); i >= 0 && w.pods[name[:i]] != nil {
		return w.pods[name[:i]]
	}
	return &walkPod{doomed: true} // not one of the walk's
}

// mayEndLocked says whether nobody need ask why a container has ended.
func (w *walk) mayEndLocked(c *walkContainer) bool {
	p := w.podLocked(c.Pod)
	return p.doomed || p.ends[c.Name]
}

// cutOff says whether the kubelet never learnt that it had started a container,
// as the runtime was stopped before it could answer: it starts another.
func (w *walk) cutOff(c *walkContainer) bool {
	w.mu.Lock()
	stopped := w.done["containerds"] > 0
	w.mu.Unlock()
	if !stopped {
		return false
	}
	events, err := node.Events(w.ctx, "Pod", lab.PodNamespace, c.Pod)
	cut := err == nil && slices.ContainsFunc(events, func(e lab.Event) bool {
		return e.Reason == "Failed" && strings.Contains(e.Message, "error reading from server: EOF")
	})
	if cut {
		w.count("starts that the runtime's end cut off")
		w.say("  the kubelet does not know that it had started %s", c)
	}
	return cut
}

// settle asks why containers have ended, and reads the agent's own account.
func (w *walk) settle() {
	w.Helper()
	w.mu.Lock()
	gone := w.gone
	w.gone = nil
	w.mu.Unlock()
	w.nextAfterHung()
	for _, c := range gone {
		w.mu.Lock()
		pod := w.podLocked(c.Pod)
		fine := w.mayEndLocked(c) || w.excused[c.process]
		rough := w.rough
		w.mu.Unlock()
		if fine || w.cutOff(c) {
			continue
		}
		var state lab.PodState
		err := pod.InState(w.ctx, 10*time.Second, "to say why it ended", func(s lab.PodState) error {
			// A pod that the kubelet rejects when it starts anew is Failed at first. Once
			// its containers have ended by the kubelet's signal, without an error, it is
			// Succeeded, with the reason of before or with none: then its Events tell,
			// which the error has.
			if state = s; s.Phase != "Failed" && s.Reason == "" {
				return errors.New("it does not")
			}
			return nil
		})
		w.mu.Lock()
		const rejected = "UnexpectedAdmissionError"
		if pod.judged && rough && (state.Reason == rejected || err != nil && state.Phase == "Succeeded" && strings.Contains(err.Error(), rejected)) {
			w.done["pods lost with the kubelet's and the agent's restart"]++
			w.sayLocked("  %s is lost: %s", c, cmp.Or(state.Message, "rejected"))
		} else {
			w.breakLocked("%s, %s, was ended by nobody: %s (%v)", c, c.process, state, err)
		}
		w.mu.Unlock()
	}

	ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
	defer cancel()
	w.mu.Lock()
	keys := map[string]bool{}
	for _, c := range w.containers {
		if !w.mayEndLocked(c) {
			for _, key := range c.keys {
				keys[key] = true
			}
		}
	}
	before, since := w.agent, w.agentSince
	w.mu.Unlock()
	s, err := agent.Status(ctx)
	if err != nil || before.PID == 0 || !node.Lives(before) || time.Since(since) < 5*time.Second {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done["agent's accounts"]++
	if s.Allocations < len(keys) {
		w.breakLocked("the agent knows %d allocations, and containers run on %d: %s", s.Allocations, len(keys), s)
	}
	for _, g := range s.GPUs {
		if g.Used > g.Total {
			w.breakLocked("the agent says that of %d pieces of GPU %d %d are in use", g.Total, g.Index, g.Used)
		}
	}
}

// some says yes in so many cases of a hundred.
func (w *walk) some(percent int) bool { return w.rng.IntN(100) < percent }

// makePod makes a pod of a random kind.
func (w *walk) makePod() {
	w.next++
	name := fmt.Sprintf("p-%d", w.next)
	want := func() map[string]int {
		switch w.rng.IntN(8) {
		case 0, 1:
			return map[string]int{lab.GPU: 1}
		case 2, 3:
			return map[string]int{lab.Replicas: 1 + w.rng.IntN(2)}
		case 4:
			return map[string]int{lab.Memory: 1 + w.rng.IntN(20), lab.GPU: 1}
		default:
			return map[string]int{lab.Memory: 1 + w.rng.IntN(60)}
		}
	}
	p := &walkPod{ends: map[string]bool{}}
	spec := lab.Pod{Name: name, Pinned: w.some(50), Containers: []lab.Container{{Resources: want()}}}
	kind := "plain"
	switch n := w.rng.IntN(100); {
	case n < 40:
	case n < 55:
		kind, p.judged, p.ends["init"] = "with an init container", true, true
		spec.Init = []lab.Container{{Name: "init", Resources: want(), Then: "sleep 1\n"}}
	case n < 62:
		kind, p.judged = "with an init container that does not end", true
		spec.Init = []lab.Container{{Name: "init", Resources: want(), Then: lab.Wait}}
	case n < 77:
		kind, p.deaf = "deaf", true
		spec.Containers[0].Then = lab.Deaf
		spec.Grace = time.Duration(1+w.rng.IntN(10)) * time.Second
	case n < 84:
		kind, p.ends["main"] = "that runs once", true
		spec.Once, spec.Containers[0].Then = true, "sleep 1\n"
	case n < 90:
		kind, p.ends["main"] = "that crashes", true
		spec.Containers[0].Then = lab.Crash
	default:
		kind, p.ends["main"], p.job = "of a Job", true, name
		spec.Once, spec.Containers[0].Then = true, "sleep 3\n"
	}
	asks := fmt.Sprint(spec.Containers[0].Resources)
	if len(spec.Init) > 0 {
		asks = fmt.Sprint(spec.Init[0].Resources, " and then ", asks)
	}
	w.say("make %s, %s, for %s, pinned: %v", name, kind, strings.ReplaceAll(asks, lab.Domain+"/", ""), spec.Pinned)
	p.asks = spec.Containers[0].Resources
	w.put(p, spec)
	w.count("pods " + kind)
}

// put makes a pod one of the walk's.
func (w *walk) put(p *walkPod, spec lab.Pod) {
	create := node.CreatePod
	if p.job != "" {
		create = node.CreateJob
	}
	w.mu.Lock()
	w.pods[spec.Name] = p
	w.mu.Unlock()
	pod, err := create(w.ctx, spec)
	w.must(err)
	w.mu.Lock()
	p.RunningPod = pod
	w.mu.Unlock()
	w.live = append(w.live, p)
}

// pick takes a pod that lives, or none.
func (w *walk) pick(which func(*walkPod) bool) *walkPod {
	var of []*walkPod
	for _, p := range w.live {
		if which(p) {
			of = append(of, p)
		}
	}
	if len(of) == 0 {
		return nil
	}
	return of[w.rng.IntN(len(of))]
}

func anyPod(*walkPod) bool { return true }

// doom says that the pod's containers may end, and the pod is not chosen again.
func (w *walk) doom(p *walkPod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.doomed = true
	w.live = slices.DeleteFunc(w.live, func(o *walkPod) bool { return o == p })
}

// endPod ends a pod in one of the ways that there are. One whose containers do
// not hear may have the runtime's hand on it held too, as if it were stuck in a
// driver.
func (w *walk) endPod(force bool) {
	which := anyPod
	if force && w.some(70) {
		which = func(p *walkPod) bool { return p.deaf }
	}
	hold, steps := w.some(50), 1+w.rng.IntN(4)
	p := w.pick(which)
	if p == nil {
		return
	}
	w.doom(p)
	switch {
	case p.job != "":
		w.say("delete the Job of %s", p.Name)
		w.must(node.DeleteJob(w.ctx, p.job))
	case !force:
		w.say("delete %s", p.Name)
		w.must(p.Delete(w.ctx))
	default:
		if process := w.process(p); p.deaf && hold && process.PID != 0 {
			if shim, err := node.Shim(process); err == nil && node.Signal(w.ctx, shim, "STOP") == nil {
				w.say("hold %s for %d steps", p.Name, steps)
				w.held = append(w.held, heldContainer{w.step + steps, func(ctx context.Context) error {
					if !node.Lives(shim) {
						return nil
					}
					return node.Signal(ctx, shim, "CONT")
				}})
				w.count("held")
			}
		}
		w.say("delete %s by force", p.Name)
		w.must(p.ForceDelete(w.ctx))
	}
	w.count(map[bool]string{false: "deleted", true: "deleted by force"}[force && p.job == ""])
}

// container is the pod's that runs, nil if none was seen.
func (w *walk) container(p *walkPod) *walkContainer {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.containers {
		if c.Pod == p.Name {
			return c
		}
	}
	return nil
}

// process is that container's.
func (w *walk) process(p *walkPod) lab.Process {
	if c := w.container(p); c != nil {
		return c.process
	}
	return lab.Process{}
}

// letGo lets the containers go whose time has come, or all.
func (w *walk) letGo(ctx context.Context, all bool) error {
	var errs []error
	w.held = slices.DeleteFunc(w.held, func(h heldContainer) bool {
		if !all && h.until > w.step {
			return false
		}
		errs = append(errs, h.letGo(ctx))
		return true
	})
	return errors.Join(errs...)
}

func (w *walk) excuse(p lab.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.excused[p] = true
}

// strike kills the agent, or has it made anew where the kubelet would wait too
// long before it starts it again.
func (w *walk) strike() {
	if w.kills++; w.kills > 2 {
		w.renew(w.ctx)
		return
	}
	p, err := agent.Process()
	if err != nil {
		w.say("the agent is away: %v", err)
		return
	}
	w.say("kill the agent")
	w.excuse(p)
	w.roughen()
	w.must(node.Signal(w.ctx, p, "KILL"))
	w.count("agents killed")
}

// renew ends the agent's pod, as an upgrade does, and makes another.
func (w *walk) renew(ctx context.Context) {
	w.kills = 0
	w.say("end the agent and start another")
	if p, err := agent.Process(); err == nil {
		w.excuse(p)
	}
	w.roughen()
	w.must(agent.Stop(ctx))
	w.must(agent.Start(ctx))
	w.count("agents ended")
}

// roughen is called when the agent goes: a kubelet that has just started may not
// have judged its pods yet.
func (w *walk) roughen() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.restarted) < 10*time.Second {
		w.rough = true
	}
}

// restartKubelet starts the kubelet anew, with the agent killed in the same
// moment or not.
func (w *walk) restartKubelet(both bool) {
	restart, how := node.RestartKubelet, "end"
	if w.some(50) {
		restart, how = node.CrashKubelet, "kill"
	}
	if both {
		w.strike()
	}
	old, starts := w.bench.kubelet()
	w.mu.Lock()
	// A kubelet asks for the devices of a container that does not run, whether it
	// ran before or not; it takes unfit ones and ones of no plugin for none.
	w.rough = both || len(w.faults) > 0 || w.agent.PID == 0 || !node.Lives(w.agent) || time.Since(w.agentSince) < 10*time.Second
	w.sayLocked("%s the kubelet, and start another; rough: %v", how, w.rough)
	w.excused[old] = true
	w.mu.Unlock()
	w.must(restart(w.ctx))
	w.restarted = time.Now()
	now, again := w.bench.kubelet()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kubelet = now
	w.done["kubelets"]++
	if again != starts+1 {
		w.breakLocked("the kubelet was started %d times, want %d", again, starts+1)
	}
}

// restartContainerd takes the runtime away for a moment.
func (w *walk) restartContainerd() {
	w.must(w.letGo(w.ctx, true)) // a runtime that starts gives up what does not answer it
	end, how := node.Stop, "stop"
	if w.some(50) {
		end, how = node.Kill, "kill"
	}
	w.say("%s containerd, and start it again", how)
	w.must(end(w.ctx, lab.Containerd))
	w.must(node.StartAgain(w.ctx, lab.Containerd))
	w.must(w.ready(w.ctx))
	w.count("containerds")
}

func (w *walk) ready(ctx context.Context) error {
	return lab.Await(ctx, time.Minute, "the node to be ready", func(ctx context.Context) error {
		s, err := node.State(ctx)
		if err == nil && !s.Ready {
			err = fmt.Errorf("it is %s", s.Conditions["Ready"])
		}
		return err
	})
}

// ail lets a GPU fail, or the driver.
func (w *walk) ail() {
	i, kind := w.rng.IntN(gpus), w.rng.IntN(12)
	if kind >= 10 {
		i = -1
	}
	if len(w.faults) == 2 || w.faults[i] != "" {
		w.mend(w.ctx, false)
		return
	}
	xids := []int{13, 31, 48, 63, 64, 79, 94, 95}
	var what string
	var do func() error
	switch {
	case kind < len(xids):
		what, do = fmt.Sprint("Xid ", xids[kind]), func() error { return driver.Xid(w.ctx, i, xids[kind]) }
	case kind == 8:
		what, do = "loss", func() error { return driver.Lose(w.ctx, i) }
	case kind == 9:
		what, do = "unplugging", func() error { return driver.Unplug(w.ctx, i) }
	case kind == 10:
		what, do = "errors", func() error { return driver.Fail(w.ctx, "nvml*", 9) }
	default:
		what, do = "hanging calls", func() error { return driver.Hang(w.ctx, "nvmlDevice*", -1) }
	}
	w.say("%s on GPU %d", what, i)
	if kind > 1 { // Xid 13 and 31 are an application's
		w.faults[i] = what
		w.ails(i, 24*time.Hour)
	}
	w.must(do())
	w.count("faults")
}

// ails says for how long a GPU, or each, may be unfit.
func (w *walk) ails(index int, span time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range driver.GPUs {
		if index < 0 || index == g.Index {
			w.sick[g.UUID] = time.Now().Add(span)
		}
	}
}

// mend repairs what is wrong with one GPU, or all that is.
func (w *walk) mend(ctx context.Context, all bool) {
	broken := slices.Sorted(maps.Keys(w.faults))
	if !all && len(broken) > 0 {
		broken = []int{broken[w.rng.IntN(len(broken))]}
	}
	for _, i := range broken {
		w.say("mend the %s on GPU %d", w.faults[i], i)
		delete(w.faults, i)
		if i < 0 {
			if err := driver.ClearFaults(ctx); err != nil {
				w.Error(err)
			}
		} else {
			// Most of these are refused: there is nothing of the kind to repair.
			_ = driver.Plug(ctx, i)
			_ = driver.Restore(ctx, i)
			_ = driver.SetHealth(ctx, i, `{"remapFailed": false}`)
			_ = driver.Reset(ctx, i)
		}
		w.ails(i, 20*time.Second) // until a probe has found it in order for the hold
	}
	// One that is mended while another still hurts all.
	for i := range w.faults {
		w.ails(i, 24*time.Hour)
	}
}

// moves are what a step may do, and how often of a hundred steps in the long
// form. Else each of the first thirteen is done once, and pods are made before.
func (w *walk) moves() []walkMove {
	return []walkMove{
		{27, func() {
			for range 1 + w.rng.IntN(3) {
				w.makePod()
			}
		}},
		{10, func() { w.endPod(false) }},
		{8, func() { w.endPod(true) }},
		{6, w.killContainer},
		{6, w.strike},
		{4, func() { w.restartKubelet(false) }},
		{3, w.restartContainerd},
		{6, w.edit},
		{9, w.ail},
		{6, func() { w.mend(w.ctx, false) }},
		{4, w.hang},
		{2, func() { w.giveAway() }},
		{2, w.askTooMuch},
		{2, func() { w.restartKubelet(true) }},
		{5, w.decided},
	}
}

type walkMove struct {
	often int
	do    func()
}

// deck is a hundred moves of the long form, or each of the others once, in a random
// order.
func (w *walk) deck() (deck []func()) {
	for i, m := range w.moves() {
		switch {
		case *long:
			deck = append(deck, slices.Repeat([]func(){m.do}, m.often)...)
		case i < 13:
			deck = append(deck, m.do)
		}
	}
	w.rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
	if !*long {
		deck = append(slices.Repeat([]func(){w.makePod}, 5), deck...)
	}
	return deck
}

// killContainer ends a container that is to start again, on what it has.
func (w *walk) killContainer() {
	p := w.pick(func(p *walkPod) bool { return len(p.ends) == 0 && !p.judged })
	if p == nil {
		return
	}
	if process := w.process(p); process.PID != 0 {
		w.say("kill the container of %s", p.Name)
		w.excuse(process)
		// It may have ended by itself, which is judged later.
		_ = node.Signal(w.ctx, process, "KILL")
		w.count("containers killed")
	}
}

// decided waits until a pod has run, or will not.
func (w *walk) decided() {
	p := w.pick(anyPod)
	if p == nil {
		return
	}
	w.say("wait for %s", p.Name)
	// It may have to wait for others, or be refused.
	if err := p.InState(w.ctx, 5*time.Second, "to be decided", func(s lab.PodState) error {
		if s.Phase == "Pending" {
			return errors.New("it is not")
		}
		return nil
	}); err == nil {
		w.count("waited for")
	}
}

// pass lets some time go by, or none.
func (w *walk) pass() {
	span := time.Duration(w.rng.IntN(count(3000, 4000))) * time.Millisecond
	w.must(lab.Holds(w.ctx, span, "while nothing is done", func(context.Context) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.wrong) > 0 {
			return errors.New(w.wrong[0])
		}
		return nil
	}))
}

// calm ends everything and waits: then nothing may be left, and all be there.
func (w *walk) calm() {
	w.Helper()
	w.say("calm")
	w.count("calms")
	w.must(w.letGo(w.ctx, true))
	w.mend(w.ctx, true)
	w.partitions(mixed)
	w.clear(w.ctx)
	if *long && w.some(50) {
		w.renew(w.ctx)
	}
	w.must(w.ready(w.ctx))
	w.must(agent.Ready(w.ctx))
	w.backFromOthers()
	if _, err := agent.AwaitState(w.ctx, "applied"); err != nil {
		w.Fatal(err)
	}
	w.healthy()
	w.empty()
	if !*long {
		return
	}
	// And who comes now is served.
	w.tenants()
	w.must(node.DeletePods(w.ctx))
	w.empty()
}

// clear ends all pods.
func (w *walk) clear(ctx context.Context) {
	w.Helper()
	for _, p := range slices.Clone(w.live) {
		w.doom(p)
		if p.job != "" {
			if err := node.DeleteJob(ctx, p.job); err != nil {
				w.Error(err)
			}
		}
	}
	if err := node.DeletePods(ctx); err != nil {
		w.Error(err)
	}
}

// empty waits until nobody has anything.
func (w *walk) empty() {
	w.Helper()
	w.allocationsBecome(0)
	w.offers(mixedOffers)
	w.must(lab.Await(w.ctx, waitLong, "the end of all containers and CDI files", func(ctx context.Context) error {
		files, err := agent.CDIFiles(ctx)
		if err != nil {
			return err
		}
		list, err := w.runtime.Containers(ctx)
		if err != nil {
			return err
		}
		for _, c := range list {
			if c.Namespace == lab.PodNamespace {
				files = append(files, "container "+c.Pod+"/"+c.Name)
			}
		}
		if len(files) > 0 {
			return fmt.Errorf("there are %v", files)
		}
		return nil
	}))
}

// tenants are pods of the walk's too, to those who look.
func (w *walk) tenants() {
	w.Helper()
	w.mu.Lock()
	for _, name := range []string{"memory", "replica", "whole"} {
		w.pods[name] = &walkPod{ends: map[string]bool{}, doomed: true}
	}
	w.mu.Unlock()
	w.bench.tenants()
}

// A random walk: pods of every kind, ended in every way, restarts of the agent,
// the kubelet and the runtime, edits of the partitions, faults, and the attacks of
// walk_attack_test.go. Never do two pods
// run on one unit, does a container end for no reason, the kubelet or the agent
// die by itself, or a grant lie over two GPUs; and in a calm nothing is left. It
// is what TestStorm of internal/agent is, on a real node.
func TestWalk(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	seed := *walkSeed
	if seed == 0 {
		if seed = 1; *long {
			seed = uint64(time.Now().UnixNano())
		}
	}
	steps, limit := count(18, 600), 45*time.Minute
	if *walkSteps > 0 {
		steps = *walkSteps
	}
	runtime := witness.NewRuntime(witness.RuntimeOptions{
		Endpoint: node.File("/run/containerd/containerd.sock"), AnnotationPrefix: cdi.AnnotationName(lab.Domain, ""),
	})
	w := &walk{
		bench: b, rng: rand.New(rand.NewPCG(seed, 3)), began: time.Now(), runtime: runtime, faults: map[int]string{},
		pods: map[string]*walkPod{}, containers: map[string]*walkContainer{}, excused: map[lab.Process]bool{},
		allocations: map[string]walkAllocation{}, sick: map[string]time.Time{}, done: map[string]int{},
		attack: walkAttack{foreign: map[string]bool{}, edited: time.Now()},
	}
	w.kubelet, _ = b.kubelet()
	if *long {
		b.unalarmed()
	}

	looking, quit := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-looking.Done():
				return
			case <-tick.C:
				w.look(looking)
			}
		}
	}()
	// Whatever came of it, the next test finds the node as this one did.
	t.Cleanup(func() {
		quit()
		<-ended
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		t.Logf("seed %d, %d steps in %.0f s: %v", seed, w.step, time.Since(w.began).Seconds(), w.done)
		if t.Failed() {
			account := ""
			for _, l := range w.lines {
				if l.step > w.step-30 {
					account += l.text + "\n"
				}
			}
			t.Logf("the last 30 steps of the walk with -walk.seed=%d:\n%s", seed, account)
		}
		errs := []error{runtime.Close(), w.letGo(ctx, true)}
		w.mend(ctx, true)
		for _, name := range []string{lab.Containerd, lab.Kubelet} {
			if p, _, err := node.ServerProcess(ctx, name); err != nil || p.PID == 0 {
				errs = append(errs, err, node.StartAgain(ctx, name))
			}
		}
		errs = append(errs, node.Label(ctx, map[string]string{lab.NodeLabel: "true"}))
		w.clear(ctx)
		if err := errors.Join(errs...); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})

	var deck []func()
	for i := 0; i < steps && time.Since(w.began) < limit; i++ {
		w.mu.Lock()
		w.step = i
		w.mu.Unlock()
		if len(deck) == 0 {
			deck = w.deck()
		}
		w.must(w.letGo(w.ctx, false))
		for len(w.live) > 14 {
			w.endPod(false)
		}
		deck[0]()
		deck = deck[1:]
		w.pass()
		w.settle()
		w.judge()
		if i%60 == 59 && i != steps-1 {
			w.calm()
			w.judge()
		}
	}
	w.calm()
	w.judge()
	if w.done["containers"] == 0 || w.done["agent's accounts"] == 0 {
		t.Errorf("nothing was looked at: %v", w.done)
	}
}

// judge ends the walk where a rule is broken.
func (w *walk) judge() {
	w.Helper()
	w.mu.Lock()
	wrong := slices.Clone(w.wrong)
	w.mu.Unlock()
	if len(wrong) > 0 {
		w.Fatalf("step %d:\n%s", w.step, strings.Join(wrong, "\n"))
	}
}
