// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/lab"
)

// The drills are bad days on the real node: what was seen and done in each is in docs/runbooks.md. Each ends
// with nothing lost: no container was hurt, each allocation is there, and the node is as it was.

// lasts is how long a drill's trouble lasts: seconds in make test-all, minutes or an hour in the long form.
func lasts(short, full time.Duration) time.Duration {
	if *long {
		return full
	}
	return short
}

// churn are pods that come, run and end, one after the other.
type churn struct {
	done atomic.Int64
	mu   sync.Mutex
	// slowest is the longest time from a pod's creation until it ran; guarded by mu.
	slowest time.Duration
	over    sync.WaitGroup
	stop    context.CancelFunc
}

// churn lets pods of one unit of memory come and go until the churn or the test ends. A pod that does not run is
// an error of the test.
func (b *bench) churn(name string) *churn {
	ctx, stop := context.WithCancel(b.ctx)
	c := &churn{stop: stop}
	c.over.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			began := time.Now()
			pod, err := node.CreatePod(ctx, lab.Pod{Name: fmt.Sprintf("%s-%d", name, i),
				Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 1}}}})
			if err == nil {
				err = pod.Running(b.ctx)
			}
			c.mu.Lock()
			c.slowest = max(c.slowest, time.Since(began))
			c.mu.Unlock()
			if err == nil { // the last one is to go, too
				err = errors.Join(pod.Delete(b.ctx), pod.Gone(b.ctx))
			}
			if err != nil && ctx.Err() == nil {
				b.Errorf("a pod that came meanwhile: %v", err)
				return
			}
			c.done.Add(1)
		}
	})
	b.Cleanup(c.end)
	return c
}

func (c *churn) end() {
	c.stop()
	c.over.Wait()
}

// goesOn waits until further pods have come, run and ended.
func (b *bench) goesOn(c *churn, pods int64) {
	b.Helper()
	since := c.done.Load()
	b.must(lab.Await(b.ctx, time.Minute, "further pods to come and go", func(context.Context) error {
		if n := c.done.Load() - since; n < pods {
			return fmt.Errorf("%d did", n)
		}
		return nil
	}))
}

// bothWays has GPUs for the device plugin, and others for claims.
const bothWays = `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: shared}
    - {devices: [2, 3], mode: shared, api: dra}
    - {devices: [4, 5, 6, 7], mode: %s}
`

// The API server goes away for the agent, is slow, and refuses with 429, while pods come and go. The kubelet has
// another way to it, so only what the agent does is seen. Pods of the device plugin notice nothing. A claim waits
// as long as the agent cannot read it, and is prepared at the first try where the answer merely takes 10 s. An edit
// is in force soon after the API server is well again.
func TestAPIServerFaresBadly(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepare(t)
	door, err := node.OpenAPIDoor()
	b.must(err)
	b.Cleanup(func() {
		if err := door.Close(); err != nil {
			b.Error(err)
		}
	})
	b = prepareDRA(t)
	agent, err = deploy(b.ctx, lab.DeployOptions{Components: []string{"dra"}, Partitions: allShared, Env: door.Env()})
	b.must(err)
	b.must(agent.Reset(b.ctx, fmt.Sprintf(bothWays, "off")))
	b.state("applied")
	b.offers(map[string]int{lab.Memory: 2 * units})
	if len(door.Asked()) == 0 {
		b.Fatal("the agent does not go through the door: nothing is tried here")
	}
	plain, _ := b.running("plain", lab.Memory, 24)
	claim := b.claimPod("claim", memoryClass, 24)
	b.comes(claim)
	held := []*lab.RunningPod{plain, claim}
	before, lives := b.processes(held...), b.life(held...)
	load := b.churn("load")
	b.Cleanup(func() { door.Set(lab.Weather{}) })
	intact := func(b *bench) {
		b.Helper()
		if err := hurt(before); err != nil {
			b.Error(err)
		}
	}
	// bad has the weather for a while, and returns what the agent has asked in it, and for how long it lasted.
	bad := func(b *bench, w lab.Weather, span time.Duration) (asked map[string]int, lasted time.Duration) {
		b.Helper()
		door.Set(w)
		began := time.Now()
		b.must(lab.Holds(b.ctx, span, "while the API server fares badly", func(context.Context) error {
			return hurt(before)
		}))
		b.goesOn(load, 2)
		asked, lasted = door.Asked(), time.Since(began)
		b.Logf("in %.0f s with %+v the agent asked %v", lasted.Seconds(), w, asked)
		return asked, lasted
	}
	// edited waits until an edit that was made is in force.
	mode := "off"
	edit := func(b *bench) {
		b.Helper()
		mode = map[string]string{"off": "shared", "shared": "off"}[mode]
		b.partitions(fmt.Sprintf(bothWays, mode))
	}
	edited := func(b *bench) {
		b.Helper()
		began := time.Now()
		b.offers(map[string]int{lab.Memory: map[string]int{"off": 2, "shared": 6}[mode] * units})
		b.state("applied")
		b.Logf("the edit is in force %.1f s after that", time.Since(began).Seconds())
	}

	b.sub("away", func(b *bench) {
		bad(b, lab.Weather{Away: true}, lasts(8*time.Second, time.Hour))
		late := b.claimPod("late", memoryClass, 8)
		edit(b)
		b.must(lab.Holds(b.ctx, 5*time.Second, "a claim that the agent cannot read", func(ctx context.Context) error {
			if s, err := late.State(ctx); err != nil || s.Phase != "Pending" {
				return fmt.Errorf("its pod is %s, %w", s, err)
			}
			return nil
		}))
		door.Set(lab.Weather{})
		edited(b)
		b.comes(late)
		b.must(late.Delete(b.ctx))
		intact(b)
	})

	b.sub("busy", func(b *bench) {
		span := lasts(15*time.Second, 3*time.Minute)
		edit(b)
		// The server asks to wait for a second. More would feed the overload.
		asked, lasted := bad(b, lab.Weather{Busy: true}, span)
		for what, times := range asked {
			if most := 2 + 2*lasted.Seconds(); float64(times) > most {
				b.Errorf("the agent asked %q %d times in %s, although it was asked to wait", what, times, lasted)
			}
		}
		door.Set(lab.Weather{})
		edited(b)
		intact(b)
	})

	b.sub("slow", func(b *bench) {
		door.Set(lab.Weather{Slow: 10 * time.Second})
		late := b.claimPod("slow", memoryClass, 8)
		b.must(late.Running(b.ctx))
		if events, err := node.Events(b.ctx, "Pod", lab.PodNamespace, late.Name); err != nil ||
			slices.ContainsFunc(events, func(e lab.Event) bool { return e.Reason == "FailedPrepareDynamicResources" }) {
			b.Errorf("the claim was not prepared at the first try: %q, %v", events, err)
		}
		edit(b)
		bad(b, lab.Weather{Slow: 10 * time.Second}, lasts(15*time.Second, 5*time.Minute))
		edited(b)
		// A new agent has to learn of its partitions, one slow answer after another.
		began := time.Now()
		b.must(agent.Kill(b.ctx))
		b.Logf("an agent that starts meanwhile is ready after %.1f s", time.Since(began).Seconds())
		b.goesOn(load, 2)
		b.must(late.Delete(b.ctx))
		door.Set(lab.Weather{})
		intact(b)
	})

	load.end()
	b.Logf("the slowest pod of the device plugin ran after %.1f s", load.slowest.Seconds())
	b.lives(lives, held...)
	b.must(agent.AwaitStatus(b.ctx, waitLong, "the allocations that are held, and no other", func(s lab.Status) error {
		if s.Allocations != len(held) {
			return fmt.Errorf("there are %d", s.Allocations)
		}
		return nil
	}))
}

// The API server is put back to a snapshot of its etcd, as after a disaster: it has forgotten an edit, a pod and a
// claim, and remembers a pod that has ended. What was there at the snapshot lives on. The node has the partition of
// the snapshot, and its GPUNode and slices say what is true now.
func TestAPIServerIsRestored(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	b.must(agent.Reset(b.ctx, fmt.Sprintf(bothWays, "off")))
	b.state("applied")
	b.offers(map[string]int{lab.Memory: 2 * units})
	plain, _ := b.running("plain", lab.Memory, 24)
	claim := b.claimPod("claim", memoryClass, 24)
	b.comes(claim)
	ended, _ := b.running("ended", lab.Memory, 8)
	before := b.processes(plain, claim)
	if len(before) != 2 {
		b.Fatalf("there run %v, want two containers", before)
	}
	slicesThen := b.slices()
	b.must(node.SaveAPI(b.ctx))

	b.must(ended.Delete(b.ctx))
	b.must(ended.Gone(b.ctx))
	b.partitions(fmt.Sprintf(bothWays, "shared"))
	b.offers(map[string]int{lab.Memory: 6 * units})
	b.running("later", lab.Memory, 16)
	b.comes(b.claimPod("later-claim", memoryClass, 16))
	b.allocationsBecome(4)

	began := time.Now()
	b.must(node.RestoreAPI(b.ctx))
	// The edit is forgotten, and so are two pods: the kubelet ends these. The ended pod is to run, and the kubelet
	// starts it anew.
	b.offers(map[string]int{lab.Memory: 2 * units})
	b.state("applied")
	b.must(ended.Running(b.ctx))
	b.allocationsBecome(3)
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	b.must(lab.Await(b.ctx, 90*time.Second, "the GPUNode to say what is held", func(ctx context.Context) error {
		is, err := b.gpuNode(ctx)
		if err != nil {
			return err
		}
		for index, want := range map[int]int{0: units - 24 - 8, 1: units} {
			i := slices.IndexFunc(is.Status.GPUs, func(g gpunode.GPU) bool { return g.Index == index })
			if i < 0 || is.Status.GPUs[i].Free != want {
				return fmt.Errorf("GPU %d has not %d units free: %+v", index, want, is.Status.GPUs)
			}
		}
		return nil
	}))
	b.published("the slices are those of the snapshot's partition", func(now []lab.Slice) error {
		if len(now) != len(slicesThen) {
			return fmt.Errorf("there are %d, want %d", len(now), len(slicesThen))
		}
		return nil
	})
	b.Logf("all is as it was at the snapshot %.1f s after the restore began", time.Since(began).Seconds())
	// Two GPUs with 79 GiB each have no room for it beside what was forgotten.
	b.comes(b.claimPod("after", memoryClass, units-24-8))
	b.comes(b.claimPod("after-2", memoryClass, units-8))
}

// The kubelet stands still for a while: it answers nothing, and nothing of it has ended. Meanwhile a container
// ends, a GPU fails, the partition is edited and the agent is killed. When the kubelet goes on, the containers are
// those that they were, each pod has what it had, and all of that news has come to the kubelet.
func TestKubeletStandsStill(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	stays := func(name, resource string, n int, once bool) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: name, Stays: true, Once: once,
			Containers: []lab.Container{{Resources: map[string]int{resource: n}}}})
		b.must(pod.Running(b.ctx))
		return pod
	}
	pods := []*lab.RunningPod{stays("memory", lab.Memory, 24, false), stays("replica", lab.Replicas, 1, false),
		stays("whole", lab.GPU, 1, false)}
	ends := stays("ends", lab.Memory, 8, true)
	leaves, _ := b.running("leaves", lab.Memory, 8)
	before := b.processes(pods...)
	gone := b.processes(ends)["ends/main"]
	kubelet, _ := b.kubelet()
	b.must(node.Signal(b.ctx, kubelet, "STOP"))
	goOn := sync.OnceFunc(func() {
		if err := node.Signal(context.Background(), kubelet, "CONT"); err != nil {
			b.Error(err)
		}
	})
	b.Cleanup(goOn)
	b.Cleanup(func() { _ = driver.Restore(context.Background(), 5) }) // refused where there is nothing to repair

	b.must(node.Signal(b.ctx, gone, "KILL"))
	b.must(driver.Lose(b.ctx, 5))
	b.partitions(strings.Replace(mixed, "mode: off", "mode: whole", 1))
	// The kubelet has not said that the container has ended, and it alone may give its units to others.
	was := len(pods) + 2
	began := time.Now()
	span := lasts(40*time.Second, 10*time.Minute)
	b.must(lab.Holds(b.ctx, span, "while the kubelet stands still", func(ctx context.Context) error {
		s, err := agent.Status(ctx)
		if err == nil && s.Allocations != was {
			err = fmt.Errorf("there are %d allocations, want %d", s.Allocations, was)
		}
		return errors.Join(err, hurt(before))
	}))
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "the lost GPU", func(s lab.Status) error {
		if s.GPUs[5].Health != "unhealthy" {
			return fmt.Errorf("it is %s", s.GPUs[5].Health)
		}
		return nil
	}))
	s, err := agent.Status(b.ctx)
	b.must(err)
	b.Logf("after %.0f s without the kubelet the agent says: %s", time.Since(began).Seconds(), s)
	b.must(agent.Strike(b.ctx)) // the kubelet alone starts another
	goOn()
	went := time.Now()
	b.must(agent.Ready(b.ctx))
	// GPU 5 is lost, and 6 and 7 have come.
	b.offers(map[string]int{lab.Memory: 2 * units, lab.Replicas: 4, lab.GPU: 3})
	b.Logf("all is on offer %.1f s after the kubelet went on", time.Since(went).Seconds())
	b.kubeletLives(kubelet)
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	// Kubernetes deletes no pods where all nodes are silent, and this cluster has one.
	b.must(leaves.Delete(b.ctx))
	b.must(leaves.Gone(b.ctx))
	b.allocationsBecome(len(pods)) // that of the ended container has gone, too
	b.must(driver.Restore(b.ctx, 5))
	b.offers(map[string]int{lab.Memory: 2 * units, lab.Replicas: 4, lab.GPU: 4})
	after, _ := b.running("after", lab.Memory, 8)
	b.must(after.Delete(b.ctx))
	for _, pod := range pods {
		if s, err := pod.State(b.ctx); err != nil || s.Phase != "Running" {
			b.Errorf("%s is %s, %v", pod, s, err)
		}
	}
	b.restarts(pods)
}

// The kubelet's client certificate expires: the API server refuses the kubelet, and the node goes silent. Containers
// run on, one that ends starts again on its GPU, and the agent keeps all allocations. In the long form the agent's
// token expires, too, since the kubelet cannot renew it. With a new certificate the node is right again.
func TestKubeletsCertificateExpires(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	var pods []*lab.RunningPod
	for name, resource := range map[string]string{"memory": lab.Memory, "whole": lab.GPU} {
		pods = append(pods, b.create(lab.Pod{Name: name, Stays: true,
			Containers: []lab.Container{{Resources: map[string]int{resource: 1}}}}))
	}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	before := b.processes(pods...)
	const year = 365 * 24 * time.Hour
	renew := sync.OnceValue(func() error { return node.CertifyKubelet(context.Background(), year) })
	b.Cleanup(func() {
		if err := renew(); err != nil {
			b.Error(err)
		}
	})
	b.must(node.CertifyKubelet(b.ctx, 45*time.Second))
	kubelet, _ := b.kubelet()
	b.offers(mixedOffers)
	b.must(lab.Await(b.ctx, 2*time.Minute, "the API server to refuse the kubelet", func(ctx context.Context) error {
		log, err := node.LogEnd(ctx, lab.Kubelet)
		if err == nil && !strings.Contains(log, "Unauthorized") {
			err = errors.New("it does not")
		}
		return err
	}))
	b.must(node.Signal(b.ctx, before["memory/main"], "KILL"))
	memory := pods[slices.IndexFunc(pods, func(p *lab.RunningPod) bool { return p.Name == "memory" })]
	b.must(lab.Await(b.ctx, time.Minute, "the container to run again", func(ctx context.Context) error {
		again, err := memory.Process(ctx, "")
		if err == nil && again == before["memory/main"] {
			err = errors.New("it is the old one")
		}
		if err == nil {
			before["memory/main"] = again
		}
		return err
	}))
	span := lasts(20*time.Second, 15*time.Minute)
	b.must(lab.Holds(b.ctx, span, "while the kubelet is refused", func(ctx context.Context) error {
		s, err := agent.Status(ctx)
		if err == nil && s.Allocations != len(pods) {
			err = fmt.Errorf("there are %d allocations, want %d", s.Allocations, len(pods))
		}
		return errors.Join(err, hurt(before))
	}))
	b.kubeletLives(kubelet)
	began := time.Now()
	b.must(renew())
	b.must(agent.Ready(b.ctx))
	b.offers(mixedOffers)
	b.Logf("the node is right %.1f s after its kubelet has a new certificate", time.Since(began).Seconds())
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	if g := b.one(b.inside(memory, "")); g.Index > 1 {
		b.Errorf("the container is on GPU %d, which is not one of memory", g.Index)
	}
	after, _ := b.running("after", lab.Memory, 8)
	b.must(after.Delete(b.ctx))
	b.must(after.Gone(b.ctx))
	b.allocationsBecome(len(pods))
	b.partitions(strings.Replace(mixed, "mode: off", "mode: whole", 1)) // the agent hears of edits again
	b.offers(map[string]int{lab.Memory: 2 * units, lab.Replicas: 4, lab.GPU: 4})
}

// tenantsOfOne is how many pods share the GPU that dies.
const tenantsOfOne = 20

// A GPU falls off the bus (Xid 79) with twenty tenants. Each of them is told, and none is ended. The other GPUs are
// on offer as before, and new pods go there. A tenant's container that ends waits for the GPU, and runs on it again
// when it is back; what a tenant leaves meanwhile is free then.
func TestGPUDiesUnderTwentyTenants(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	var pods []*lab.RunningPod
	for i := range tenantsOfOne {
		pods = append(pods, b.pod(fmt.Sprintf("tenant-%d", i), lab.Memory, 3))
	}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	dies := b.one(b.inside(pods[0], ""))
	for _, pod := range pods {
		if g := b.one(b.inside(pod, "")); g.Index != dies.Index {
			b.Fatalf("%s is on GPU %d, the first one on %d: they do not share", pod, g.Index, dies.Index)
		}
	}
	before := b.processes(pods...)
	restore := sync.OnceFunc(func() { b.must(driver.Restore(context.Background(), dies.Index)) })
	b.Cleanup(restore)
	began := time.Now()
	b.must(driver.Lose(b.ctx, dies.Index))
	b.offers(map[string]int{lab.Memory: (gpus - 1) * units})
	b.Logf("its units are off the offer after %.1f s", time.Since(began).Seconds())

	f := fault{hits: []int{dies.Index}, says: "79"}
	b.must(lab.Await(b.ctx, 30*time.Second, "the agent to say so", func(ctx context.Context) error {
		return unfit(ctx, f)
	}))
	warns := func(e lab.Event) bool {
		return e.Type == "Warning" && strings.Contains(e.Message, dies.UUID) && strings.Contains(e.Message, f.says)
	}
	b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, "warns of the GPU", warns))
	b.must(each(pods, func(p *lab.RunningPod) error {
		return errors.Join(
			node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, p.Name, "warns of its GPU", warns),
			p.InState(b.ctx, time.Minute, "to have unhealthy devices", func(s lab.PodState) error {
				for id, is := range s.Containers["main"].Health {
					if is != "Unhealthy" {
						return fmt.Errorf("%s is %s", id, is)
					}
				}
				return nil
			}))
	}))
	b.Logf("each of %d tenants has its Event after %.1f s", len(pods), time.Since(began).Seconds())
	b.must(lab.Holds(b.ctx, lasts(10*time.Second, 5*time.Minute), "while the GPU is dead", func(context.Context) error {
		return hurt(before)
	}))

	other, on := b.running("other", lab.Memory, 16)
	if g := b.one(on); g.Index == dies.Index {
		b.Errorf("a new pod is on the GPU that is dead")
	}
	// One tenant's program gives up, as CUDA's do on a lost GPU, and another's pod is deleted.
	b.must(node.Signal(b.ctx, before["tenant-0/main"], "KILL"))
	b.must(pods[1].Delete(b.ctx))
	b.must(pods[1].Gone(b.ctx))
	b.allocationsBecome(tenantsOfOne) // 19 tenants and the new pod
	b.must(pods[0].InState(b.ctx, time.Minute, "to wait for its GPU", func(s lab.PodState) error {
		if c := s.Containers["main"]; c.Running || c.Restarts == 0 && c.Ended == "" && c.Waiting == "" {
			return errors.New("it does not")
		}
		return nil
	}))
	b.must(lab.Holds(b.ctx, 3*time.Second, "a container whose GPU is dead", func(ctx context.Context) error {
		s, err := pods[0].State(ctx)
		if err == nil && s.Containers["main"].Running {
			err = errors.New("it runs")
		}
		return err
	}))
	s, err := pods[0].State(b.ctx)
	b.must(err)
	b.Logf("the tenant whose container has ended is %s", s)

	mended := time.Now()
	restore()
	b.offers(map[string]int{lab.Memory: gpus * units})
	b.healthy()
	b.Logf("all is on offer again %.1f s after the GPU is back", time.Since(mended).Seconds())
	b.must(pods[0].InState(b.ctx, 6*time.Minute, "to run again", func(s lab.PodState) error {
		if !s.Containers["main"].Running {
			return errors.New("it does not")
		}
		return nil
	}))
	if g := b.one(b.inside(pods[0], "")); g.Index != dies.Index {
		b.Errorf("it is on GPU %d, and was on %d", g.Index, dies.Index)
	}
	delete(before, "tenant-0/main")
	delete(before, "tenant-1/main")
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	b.must(other.Delete(b.ctx))
	b.must(other.Gone(b.ctx))
	b.allocationsBecome(tenantsOfOne - 1)
	// The room of the tenant that has gone is free: 79 less 19 times 3.
	_, on = b.running("fills", lab.Memory, units-3*(tenantsOfOne-1))
	if g := b.one(on); g.Index != dies.Index {
		b.Errorf("a pod of just the free units is on GPU %d, want %d", g.Index, dies.Index)
	}
}
