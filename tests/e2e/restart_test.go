// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

var long = flag.Bool("long", false, "the full counts, as make soak has them")

// count is how often something is done: the first in make test-all, the second in
// the long form.
func count(short, full int) int {
	if *long {
		return full
	}
	return short
}

// processes are the first processes of all containers of these pods that run.
func (b *bench) processes(pods ...*lab.RunningPod) map[string]lab.Process {
	b.Helper()
	out := map[string]lab.Process{}
	for _, pod := range pods {
		s, err := pod.State(b.ctx)
		b.must(err)
		for name, c := range s.Containers {
			if p, err := node.InitProcess(c.ID); err == nil {
				out[pod.Name+"/"+name] = p
			}
		}
	}
	return out
}

// hurt says which of the containers' processes are not those any more.
func hurt(before map[string]lab.Process) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if !node.Lives(before[name]) {
			errs = append(errs, fmt.Errorf("container %s does not run any more as %s", name, before[name]))
		}
	}
	return errors.Join(errs...)
}

// kubelet is the kubelet's process and how often it was started.
func (b *bench) kubelet() (lab.Process, int) {
	b.Helper()
	p, starts, err := node.ServerProcess(b.ctx, lab.Kubelet)
	b.must(err)
	if p.PID == 0 {
		b.Fatalf("the kubelet does not run; it was started %d times", starts)
	}
	return p, starts
}

// kubeletLives checks that the kubelet is the one that it was: it would not be
// started again by itself.
func (b *bench) kubeletLives(was lab.Process) {
	b.Helper()
	if now, starts := b.kubelet(); now != was {
		b.Fatalf("the kubelet was %s and is %s, started %d times: it has died", was, now, starts)
	}
}

// initRuns waits until a pod's init container runs.
func (b *bench) initRuns(pod *lab.RunningPod, container string) {
	b.Helper()
	b.must(pod.InState(b.ctx, time.Minute, "to have its init container running", func(s lab.PodState) error {
		if !s.Containers[container].Running {
			return fmt.Errorf("container %s does not run", container)
		}
		return nil
	}))
}

// decided makes a pod that looks around and ends, past the scheduler, and waits
// until it has. A kubelet that has just started judges the pods that it finds
// before this one.
func (b *bench) decided(name string) {
	b.Helper()
	pod := b.create(lab.Pod{Name: name, Once: true, Pinned: true,
		Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 1}, Then: "exit 0"}}})
	b.must(pod.InState(b.ctx, time.Minute, "to have been judged", func(s lab.PodState) error {
		switch s.Phase {
		case "Succeeded":
			return nil
		case "Failed":
			return fmt.Errorf("%w", lab.ErrNever)
		}
		return errors.New("it is not")
	}))
	b.must(pod.Delete(b.ctx))
}

// One pod of each kind, and the kubelet starts anew again and again, by turns
// asked to and killed. No container that runs is hurt, all is on offer again
// each time, and each new kubelet lives. Of a pod with a container that does not run,
// one in back-off, an init container that has ended or a container that waits for one,
// the kubelet asks whether that container's resource is there. Such a pod lives on if the
// agent's list has come before the kubelet looks at it, which is counted.
func TestTwentyKubeletRestarts(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	looks := b.looks()
	b.offers(mixedOffers)
	memory := func(n int, then string) lab.Container {
		return lab.Container{Resources: map[string]int{lab.Memory: n}, Then: then}
	}
	named := func(name string, c lab.Container) []lab.Container {
		c.Name = name
		return []lab.Container{c}
	}
	// pods whose end is no fault, made anew by a number
	crash := func(n int) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: fmt.Sprintf("crash-%d", n), Containers: []lab.Container{memory(4, lab.Crash)}})
		b.must(pod.InState(b.ctx, time.Minute, "to be in back-off", func(s lab.PodState) error {
			if !strings.Contains(s.Containers["main"].Waiting, "CrashLoopBackOff") {
				return errors.New("it is not")
			}
			return nil
		}))
		return pod
	}
	other := func(n int) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: fmt.Sprintf("init-other-%d", n),
			Init: []lab.Container{{Name: "init", Resources: map[string]int{lab.Replicas: 1}}}, Containers: []lab.Container{memory(4, "")}})
		b.must(pod.Running(b.ctx))
		return pod
	}
	ended := func(n int) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: fmt.Sprintf("init-ended-%d", n), Init: named("init", memory(4, "")), Containers: []lab.Container{memory(8, "")}})
		b.must(pod.Running(b.ctx))
		return pod
	}
	waits := func(n int) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: fmt.Sprintf("init-runs-%d", n), Init: named("init", memory(4, lab.Wait)), Containers: []lab.Container{memory(8, "")}})
		b.initRuns(pod, "init")
		return pod
	}
	static, err := node.StaticPod(b.ctx, lab.Pod{Name: "static", Containers: []lab.Container{memory(4, "")}})
	b.must(err)
	kinds := []struct {
		name string
		pod  *lab.RunningPod
		anew func(int) *lab.RunningPod // nil where the pod has to live
	}{
		{"plain, memory", b.pod("memory", lab.Memory, 24), nil},
		{"plain, replica", b.pod("replica", lab.Replicas, 1), nil},
		{"plain, whole GPU", b.pod("whole", lab.GPU, 1), nil},
		{"beside a sidecar", b.create(lab.Pod{Name: "beside", Init: []lab.Container{{Name: "sidecar", Sidecar: true, Resources: map[string]int{lab.Memory: 2}, Then: lab.Wait}}, Containers: []lab.Container{memory(4, "")}}), nil},
		{"init container ended", ended(0), ended},
		{"init container ended, of another resource", other(0), other},
		{"static", static, nil},
		{"init container runs", waits(0), waits},
		{"CrashLoopBackOff", crash(0), crash},
	}
	for _, k := range kinds {
		if k.anew == nil {
			b.must(k.pod.Running(b.ctx))
		}
	}

	rounds := count(5, 20)
	survived := make([]int, len(kinds))
	lost := make([]bool, len(kinds))
	var took time.Duration
	_, starts := b.kubelet()
	for round := range rounds {
		var pods []*lab.RunningPod
		for i, k := range kinds {
			if !lost[i] {
				pods = append(pods, k.pod)
			}
		}
		before := b.processes(pods...)
		for _, k := range kinds {
			if k.anew != nil {
				maps.DeleteFunc(before, func(name string, _ lab.Process) bool { return strings.HasPrefix(name, k.pod.Name+"/") })
			}
		}
		restart, how := node.RestartKubelet, "asked to end"
		if round%2 == 1 {
			restart, how = node.CrashKubelet, "killed"
		}
		began := time.Now()
		b.must(restart(b.ctx))
		started, again := b.kubelet()
		if again != starts+round+1 {
			b.Fatalf("the kubelet was started %d times, want %d", again, starts+round+1)
		}
		b.offers(mixedOffers)
		back := time.Since(began)
		took += back
		b.decided(fmt.Sprintf("probe-%d", round))
		b.kubeletLives(started)
		if err := hurt(before); err != nil {
			b.Errorf("round %d, kubelet %s: %v", round+1, how, err)
		}
		for i, k := range kinds {
			if lost[i] {
				continue
			}
			s, err := k.pod.State(b.ctx)
			b.must(err)
			if s.Phase != "Failed" && s.Phase != "Succeeded" {
				survived[i]++
				continue
			}
			b.Logf("round %d, kubelet %s: pod %s is lost: %s", round+1, how, k.name, s)
			if lost[i] = k.anew == nil; lost[i] {
				b.Errorf("pod %s, which needed nothing of the kubelet, is lost", k.name)
			} else { // the next round needs one
				b.must(k.pod.Delete(b.ctx))
				kinds[i].pod = k.anew(round + 1)
			}
		}
		b.Logf("round %d, kubelet %s: all is on offer again after %.1f s", round+1, how, back.Seconds())
	}
	for i, k := range kinds {
		b.Logf("survived %2d of %d restarts: %s", survived[i], rounds, k.name)
	}
	b.Logf("until all is on offer again: %.1f s on average, the kubelet's own end and start included; %s", took.Seconds()/float64(rounds), looks)
	// The pods are still served: a container that starts anew finds its GPU.
	b.must(kinds[0].pod.RestartContainer(b.ctx, ""))
	b.one(b.inside(kinds[0].pod, ""))
}

// The kubelet and the agent start anew while the API server is away and an init
// container runs on a GPU: nobody knows the pods then but the runtime and the
// kubelet's checkpoint. Nothing is let go, pruned or ended, for longer than
// any allocation is young; and when the API server is back, all goes on.
func TestEverythingRestartsWithoutAPI(t *testing.T) {
	b := begin(t, mixed, mixedOffers)
	plain := b.pod("plain", lab.Memory, 24)
	pod := b.create(lab.Pod{Name: "init",
		Init:       []lab.Container{{Name: "init", Resources: map[string]int{lab.GPU: 1}, Then: lab.UntilTold}},
		Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 8}}}})
	b.must(plain.Running(b.ctx))
	b.initRuns(pod, "init")
	before := b.processes(plain, pod)
	if len(before) != 2 {
		b.Fatalf("there run %v, want a container and an init container", before)
	}
	files, err := agent.CDIFiles(b.ctx)
	b.must(err)
	was := b.allocations()

	down := false
	stopAPI := func() {
		b.must(node.Stop(b.ctx, lab.APIServer))
		down = true
	}
	startAPI := func(ctx context.Context) error {
		if !down {
			return nil
		}
		down = false
		return node.StartAPI(ctx)
	}
	b.Cleanup(func() {
		if err := startAPI(context.Background()); err != nil {
			b.Error(err)
		}
	})
	stopAPI()
	intact := func(ctx context.Context) error {
		if err := hurt(before); err != nil {
			return err
		}
		now, err := agent.CDIFiles(ctx)
		if err != nil {
			return err
		}
		if !slices.Equal(now, files) {
			return fmt.Errorf("the CDI files are %v, want those from before, %v", now, files)
		}
		return nil
	}
	// The old kubelet starts the new agent: a new one without the API server
	// does not know the agent's pod.
	old, err := agent.Process()
	b.must(err)
	b.must(agent.Strike(b.ctx))
	b.must(lab.Await(b.ctx, time.Minute, "a new agent without the API server", func(ctx context.Context) error {
		p, err := agent.Process()
		if err != nil {
			return err
		}
		if p == old {
			return errors.New("it is the old one")
		}
		s, err := agent.Status(ctx)
		if err != nil {
			return err
		}
		if s.Allocations < was {
			return fmt.Errorf("it knows %d allocations, want %d", s.Allocations, was)
		}
		return nil
	}))
	b.must(node.Kill(b.ctx, lab.Kubelet))
	b.must(node.StartAgain(b.ctx, lab.Kubelet))
	kubelet, _ := b.kubelet()
	// An allocation is not judged in the first 30 s after it was given or found. In the short form
	// internal/deviceplugin alone has allocations that are older.
	span := 36 * time.Second
	if testing.Short() {
		span = 5 * time.Second
	}
	b.must(lab.Holds(b.ctx, span, "while kubelet and agent are new and the API server is away", func(ctx context.Context) error {
		if err := intact(ctx); err != nil {
			return err
		}
		s, err := agent.Status(ctx)
		if err != nil {
			return err
		}
		if s.Allocations < was {
			return fmt.Errorf("the agent knows %d allocations, want %d", s.Allocations, was)
		}
		return nil
	}))
	b.kubeletLives(kubelet)

	b.must(startAPI(b.ctx))
	b.must(agent.Ready(b.ctx))
	b.offers(mixedOffers)
	b.must(intact(b.ctx))
	b.allocationsBecome(was)
	if g := b.one(b.inside(pod, "init")); g.Index != 4 && g.Index != 5 {
		b.Errorf("the init container sees GPU %d, want a whole one", g.Index)
	}
	b.must(pod.Tell(b.ctx, "init"))
	b.must(pod.Running(b.ctx))
	b.one(b.inside(pod, "main"))
	if testing.Short() {
		return
	}

	// Once more, both in one moment. This agent stays away as long as the API
	// server does, for a new kubelet knows its pod from there; so what it admits
	// before that has no plugin. It asks for none for containers that run; a pod
	// with one that does not, an init container that has ended is enough, it
	// ends. No agent can help that pod, so it is not looked at here.
	stopAPI()
	b.must(agent.Strike(b.ctx))
	b.must(node.Kill(b.ctx, lab.Kubelet))
	b.must(node.StartAgain(b.ctx, lab.Kubelet))
	b.must(startAPI(b.ctx))
	b.must(agent.Ready(b.ctx))
	b.must(hurt(map[string]lab.Process{"plain/main": before["plain/main"]}))
	b.offers(mixedOffers)
	b.must(plain.RestartContainer(b.ctx, ""))
	b.one(b.inside(plain, ""))
}

// allocations is how many the agent knows, by its own word.
func (b *bench) allocations() int {
	b.Helper()
	s, err := agent.Status(b.ctx)
	b.must(err)
	return s.Allocations
}

// allocationsBecome waits for a number of allocations.
func (b *bench) allocationsBecome(want int) {
	b.Helper()
	b.must(agent.AwaitStatus(b.ctx, waitLong, fmt.Sprintf("%d allocations", want), func(s lab.Status) error {
		if s.Allocations != want {
			return fmt.Errorf("there are %d", s.Allocations)
		}
		return nil
	}))
}

// The container runtime and the API server go and come back, and pods see nothing of it.
func TestOthersGoAndComeBack(t *testing.T) {
	b := begin(t, mixed, mixedOffers)
	pods := b.tenants()
	before := b.processes(pods...)
	if len(before) != len(pods) {
		b.Fatalf("there run %v, want %d containers", before, len(pods))
	}
	intact := func(b *bench) {
		b.Helper()
		if err := hurt(before); err != nil {
			b.Error(err)
		}
		if got := b.allocations(); got != len(pods) {
			b.Errorf("there are %d allocations, want %d", got, len(pods))
		}
		b.offers(mixedOffers)
	}
	// works proves that the whole way of a pod is open, and its allocation ends.
	works := func(b *bench, name string) {
		b.Helper()
		pod, _ := b.running(name, lab.Memory, 2)
		b.must(pod.Delete(b.ctx))
		b.must(pod.Gone(b.ctx))
		b.allocationsBecome(len(pods))
	}

	b.sub("containerd", func(b *bench) {
		kubelet, _ := b.kubelet()
		b.must(node.Stop(b.ctx, lab.Containerd))
		b.must(lab.Holds(b.ctx, 3*time.Second, "without containerd", func(ctx context.Context) error {
			s, err := agent.Status(ctx)
			if err == nil && s.Allocations != len(pods) {
				err = fmt.Errorf("there are %d allocations, want %d", s.Allocations, len(pods))
			}
			return errors.Join(err, hurt(before))
		}))
		b.must(node.StartAgain(b.ctx, lab.Containerd))
		b.must(lab.Await(b.ctx, time.Minute, "the node to be ready", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err == nil && !s.Ready {
				err = fmt.Errorf("it is %s", s.Conditions["Ready"])
			}
			return err
		}))
		works(b, "after-containerd")
		intact(b)
		b.kubeletLives(kubelet)
	})

	// It answers nothing, which is worse than being away; a container that must
	// start again meanwhile finds its GPU all the same.
	b.rest("a frozen API server", func(b *bench) {
		api, _, err := node.ServerProcess(b.ctx, lab.APIServer)
		b.must(err)
		b.must(node.Signal(b.ctx, api, "STOP"))
		thaw := func() { b.must(node.Signal(context.Background(), api, "CONT")) }
		b.Cleanup(func() { thaw() })
		memory := pods[0]
		b.must(node.Signal(b.ctx, before["memory/main"], "KILL"))
		var again lab.Process
		b.must(lab.Await(b.ctx, time.Minute, "the container to run again", func(ctx context.Context) (err error) {
			if again, err = memory.Process(ctx, ""); err == nil && again == before["memory/main"] {
				err = errors.New("it is the old one")
			}
			return err
		}))
		before["memory/main"] = again
		b.must(lab.Holds(b.ctx, 10*time.Second, "while the API server is frozen", func(ctx context.Context) error {
			s, err := agent.Status(ctx)
			if err == nil && s.Allocations != len(pods) {
				err = fmt.Errorf("there are %d allocations, want %d", s.Allocations, len(pods))
			}
			return errors.Join(err, hurt(before))
		}))
		thaw()
		b.must(lab.Await(b.ctx, time.Minute, "the API server", func(ctx context.Context) error {
			_, err := node.State(ctx)
			return err
		}))
		if g := b.one(b.inside(memory, "")); g.Index != 0 {
			b.Errorf("the container sees GPU %d, want 0", g.Index)
		}
		works(b, "after-the-frost")
		intact(b)
	})
}

// The partition changes to and fro while pods are given devices: the kubelet
// ends if an ID leaves its list in the middle of an Allocate, and it must not.
func TestWithdrawalDuringAllocate(t *testing.T) {
	const whole = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n"
	const replicas = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 3\n"
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	kubelet, _ := b.kubelet()
	granted, refused := 0, 0
	rounds := count(3, 60)
	if testing.Short() {
		rounds = 2
	}
	for round := range rounds {
		var pods []*lab.RunningPod
		for i := range 12 {
			if i%4 == 2 {
				b.partitions([]string{whole, replicas, allShared}[(round+i)%3])
			}
			c := lab.Container{Resources: map[string]int{[]string{lab.Memory, lab.GPU, lab.Replicas}[i%3]: 1}, Then: "exit 0"}
			pods = append(pods, b.create(lab.Pod{Name: fmt.Sprintf("p-%d-%d", round, i), Once: true, Pinned: true, Containers: []lab.Container{c}}))
		}
		b.must(each(pods, func(p *lab.RunningPod) error {
			return p.InState(b.ctx, time.Minute, "to end, or to be refused", func(s lab.PodState) error {
				if s.Phase != "Succeeded" && s.Phase != "Failed" {
					return errors.New("it has not")
				}
				return nil
			})
		}))
		for _, p := range pods {
			if s, err := p.State(b.ctx); err != nil {
				b.Fatal(err)
			} else if s.Phase == "Succeeded" {
				granted++
			} else if refused++; s.Reason != "UnexpectedAdmissionError" && !strings.Contains(s.Reason, "OutOf") {
				b.Errorf("%s failed otherwise than by a refusal: %s", p, s)
			}
		}
		b.must(node.DeletePods(b.ctx))
		b.kubeletLives(kubelet)
	}
	b.Logf("%d pods were granted devices in the midst of changes, %d refused; the kubelet is still %s", granted, refused, kubelet)
	if granted == 0 || refused == 0 {
		b.Errorf("%d granted and %d refused: the changes did not come into the midst of anything", granted, refused)
	}
	b.partitions(allShared)
	b.offers(map[string]int{lab.Memory: gpus * units})
}

// A GPU's partition changes while pods hold parts of it, and the kubelet starts
// anew: held IDs are still listed, so pods are admitted again and containers
// restart; and when the holders end the change finishes by itself.
func TestHeldIDAfterPartitionChange(t *testing.T) {
	b := begin(t, mixed, mixedOffers)
	pods := b.tenants()
	// Its finished init container has the kubelet look at its devices again.
	init := b.create(lab.Pod{Name: "init",
		Init:       []lab.Container{{Name: "init", Resources: map[string]int{lab.Memory: 8}}},
		Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 4}}}})
	b.must(init.Running(b.ctx))
	pods = append(pods, init)
	before := b.processes(pods...)
	// Every GPU that somebody holds is to be something else.
	b.partitions(`version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: whole
    - devices: [2, 3, 4, 5]
      mode: shared
    - devices: [6, 7]
      mode: off
`)
	if message := b.state("blocked"); !strings.Contains(message, "work/whole") && !strings.Contains(message, "work/memory") {
		b.Errorf("the node says %q, want the holders' names", message)
	}
	for round := range count(1, 10) {
		b.must(node.CrashKubelet(b.ctx))
		kubelet, _ := b.kubelet()
		// 0 is memory's and init's, 2 replica's, 4 whole's: what nobody holds of
		// them is withdrawn. 1, 3 and 5 are what they are to be.
		b.offers(map[string]int{lab.GPU: 2, lab.Memory: 2*units + 32, lab.Replicas: 1})
		if err := hurt(before); err != nil {
			b.Fatalf("round %d: %v", round+1, err)
		}
		b.kubeletLives(kubelet)
	}
	b.must(each(pods[:3], func(p *lab.RunningPod) error { return p.RestartContainer(b.ctx, "") }))
	for i, want := range []int{0, 2, 4} {
		if g := b.one(b.inside(pods[i], "")); g.Index != want {
			b.Errorf("after the restart of its container %s is on GPU %d, want %d", pods[i], g.Index, want)
		}
	}
	b.must(node.DeletePods(b.ctx))
	b.state("applied")
	b.offers(map[string]int{lab.GPU: 2, lab.Memory: 4 * units})
}
