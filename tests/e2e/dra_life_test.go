// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/tests/lab"
)

// lifeOfClaims has whole GPUs on 0 and 1, MIG on 2 and memory on 3.
const lifeOfClaims = `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: whole, api: dra}
    - {devices: [2], mode: mig, api: dra}
    - {devices: [3], mode: shared, api: dra}
    - {devices: [4, 5, 6, 7], mode: off}
`

const (
	wholeClass    = "gpu.example.com"
	memoryClass   = "gpu-memory.example.com"
	instanceClass = "mig-3g.40gb.example.com"
)

// TestClaimsLastOut has claims held while kubelets restart, slices vanish, a GPU has a fault
// and programs go over the cap of a claim. The figures that it takes are printed.
func TestClaimsLastOut(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	b.must(agent.Reset(b.ctx, lifeOfClaims))
	b.state("applied")
	share, whole, instance := b.claimPod("share", memoryClass, 24), b.claimPod("whole", wholeClass, 0), b.claimPod("instance", instanceClass, 0)
	b.must(node.CreateClaim(b.ctx, lab.Claim{Name: "deaf", Class: wholeClass}))
	deaf := b.create(lab.Pod{Name: "deaf", Containers: []lab.Container{{Claims: []string{"deaf"}, Then: lab.Deaf}}})
	held := []*lab.RunningPod{share, whole, instance, deaf}
	for _, pod := range held {
		b.comes(pod)
		b.prepared(pod)
	}
	before, lives := b.processes(held...), b.life(held...)
	b.sub("kubelet restarts", func(b *bench) { claimsOutliveKubelets(b, held) })
	b.sub("a wipe of slices that comes late", lateWipe)
	b.sub("an Xid", func(b *bench) { faultReachesClaims(b, share, whole) })
	if err := hurt(before); err != nil {
		t.Error(err)
	}
	b.lives(lives, held...)
	b.sub("one claim, two containers and two pods", oneClaimForMany)
	b.sub("a pod that was deleted by force", func(b *bench) { successorOf(b, deaf) })
}

// published waits until the driver's slices are as wanted, and returns when that was.
func (b *bench) published(what string, ok func([]lab.Slice) error) time.Time {
	b.Helper()
	at, err := lab.Moment(b.ctx, waitLong, pace, what, func(ctx context.Context) error {
		now, err := node.Slices(ctx, draDriver)
		if err != nil {
			return err
		}
		return ok(now)
	})
	b.must(err)
	return at
}

// again says whether all slices were made anew since before.
func again(before []lab.Slice) func([]lab.Slice) error {
	return func(now []lab.Slice) error {
		same := func(a, b lab.Slice) bool { return a.Name == b.Name && reflect.DeepEqual(a.Devices, b.Devices) }
		if !slices.EqualFunc(now, before, same) {
			return fmt.Errorf("there are %+v, want %+v", now, before)
		}
		for i := range now {
			if now[i].UID == before[i].UID {
				return fmt.Errorf("slice %s is not made anew", now[i].Name)
			}
		}
		return nil
	}
}

func (b *bench) slices() []lab.Slice {
	b.Helper()
	out, err := node.Slices(b.ctx, draDriver)
	b.must(err)
	return out
}

// claimsOutliveKubelets restarts the kubelet again and again, by turns asked to and killed.
// Each time it has wiped the slices; they are there again soon after it has the driver, and
// nothing that is held is lost or changes.
func claimsOutliveKubelets(b *bench, held []*lab.RunningPod) {
	account := func() witness.DRAState {
		b.Helper()
		s, err := witness.ReadDRAState(node.File("/var/lib/kubelet"))
		b.must(err)
		slices.SortFunc(s.Claims, func(x, y witness.PreparedClaim) int { return strings.Compare(x.UID, y.UID) })
		return s
	}
	files, err := agent.CDIFiles(b.ctx)
	b.must(err)
	was, processes := account(), b.processes(held...)
	var took []time.Duration
	for round := range count(3, 20) {
		before := b.slices()
		restart := node.RestartKubelet
		if round%2 == 1 {
			restart = node.CrashKubelet
		}
		back := make(chan time.Time, 1)
		go func() { back <- b.published("the slices are there again", again(before)) }()
		b.must(restart(b.ctx))
		at := <-back
		took = append(took, at.Sub(b.lastRegistered()))
		if err := hurt(processes); err != nil {
			b.Fatalf("restart %d: %v", round, err)
		}
		if now := account(); !reflect.DeepEqual(now, was) {
			b.Fatalf("restart %d: the kubelet has prepared %+v, had %+v", round, now, was)
		}
		if now, err := agent.CDIFiles(b.ctx); err != nil || !slices.Equal(now, files) {
			b.Fatalf("restart %d: CDI files %v (%v), were %v", round, now, err, files)
		}
	}
	slices.Sort(took)
	b.Logf("from the registration of the driver to all slices, %d restarts: median %d ms, longest %d ms", len(took), took[len(took)/2].Milliseconds(), took[len(took)-1].Milliseconds())
}

// lastRegistered is when the kubelet last had the driver, by the agent's log.
func (b *bench) lastRegistered() time.Time {
	b.Helper()
	var last time.Time
	b.must(lab.Await(b.ctx, time.Minute, "the agent's log", func(ctx context.Context) error {
		log, err := agent.Log(ctx) // by way of the kubelet, which has just started
		if err != nil {
			return err
		}
		for line := range strings.Lines(log) {
			if strings.Contains(line, "msg=registered driver="+draDriver) {
				stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
				if last, err = time.Parse(time.RFC3339Nano, stamp); err != nil {
					return err
				}
			}
		}
		if last.IsZero() {
			return fmt.Errorf("it does not say that the driver was registered: %s", log)
		}
		return nil
	}))
	return last
}

// lateWipe deletes the slices long after the driver was registered, as a kubelet does that
// could not reach the API server before, while a pod is on its way.
func lateWipe(b *bench) {
	before := b.slices()
	pod := b.claimPod("wiped", memoryClass, 1)
	b.must(node.DeleteSlices(b.ctx, draDriver))
	wiped := time.Now()
	at := b.published("the slices are there again", again(before))
	b.comes(pod)
	b.prepared(pod)
	b.Logf("slices that somebody deleted were there again after %d ms", at.Sub(wiped).Milliseconds())
}

// prepared checks that no Prepare for a pod has failed.
func (b *bench) prepared(pod *lab.RunningPod) {
	b.Helper()
	events, err := node.Events(b.ctx, "Pod", lab.PodNamespace, pod.Name)
	b.must(err)
	for _, e := range events {
		if e.Reason != "FailedPrepareDynamicResources" {
			continue
		}
		if unasked(e.Message) {
			b.Logf("%s waited, since the API server did not let the kubelet read its claim yet", pod)
			continue
		}
		b.Errorf("%s: %s", pod, e.Message)
	}
}

// faultReachesClaims has a fault on the GPU of hit: its devices are tainted, its pod says so
// and others do not, until the fault is over.
func faultReachesClaims(b *bench, hit, spared *lab.RunningPod) {
	const index = 3
	tainted := func(want bool) func([]lab.Slice) error {
		return func(now []lab.Slice) error {
			for _, s := range now {
				for _, d := range s.Devices {
					on := slices.ContainsFunc(d.Taints, func(t string) bool { return strings.HasPrefix(t, "example.com/unhealthy=") })
					if on != (want && d.GPU == index) {
						return fmt.Errorf("device %s of GPU %d has the taints %v", d.Name, d.GPU, d.Taints)
					}
				}
			}
			return nil
		}
	}
	health := func(pod *lab.RunningPod, want string) time.Time {
		at, err := lab.Moment(b.ctx, waitLong, pace, fmt.Sprintf("%s has %s devices", pod, want), func(ctx context.Context) error {
			s, err := pod.State(ctx)
			if err != nil {
				return err
			}
			of := s.Containers["main"].Health
			for id, is := range of {
				if is != want {
					return fmt.Errorf("%s is %s", id, is)
				}
			}
			if len(of) == 0 {
				return errors.New("it says nothing of its devices")
			}
			return nil
		})
		b.must(err)
		return at
	}
	health(hit, "Healthy")
	health(spared, "Healthy")
	for _, now := range []struct {
		fault bool
		word  string
		do    func() error
	}{{true, "Unhealthy", func() error { return driver.Xid(b.ctx, index, 95) }}, {false, "Healthy", func() error { return driver.Reset(b.ctx, index) }}} {
		began := time.Now()
		b.must(now.do())
		var status time.Time
		var both sync.WaitGroup
		both.Go(func() { status = health(hit, now.word) })
		taint := b.published("the taints", tainted(now.fault))
		both.Wait()
		b.Logf("%s: at the API after %d ms, in the pod's status after %d ms", now.word, taint.Sub(began).Milliseconds(), status.Sub(began).Milliseconds())
		health(spared, "Healthy")
	}
}

// oneClaimForMany has a claim of 24 GiB used by two containers of a pod and by another pod:
// together they get that and no more, and whoever goes round the library is ended, alone.
func oneClaimForMany(b *bench) {
	const limit, index = 24 * giB, 3
	b.must(node.CreateClaim(b.ctx, lab.Claim{Name: "joint", Class: memoryClass, GiB: limit / giB}))
	container := func(name string) lab.Container {
		c := b.container(name, nil)
		c.Claims = []string{"joint"}
		return c
	}
	pair := b.create(lab.Pod{Name: "pair", Containers: []lab.Container{container("one"), container("two")}})
	third := b.create(lab.Pod{Name: "third", Containers: []lab.Container{container("one")}})
	b.comes(pair)
	b.comes(third)
	users := []struct {
		pod       *lab.RunningPod
		container string
		probe     *lab.Probe
	}{{pod: pair, container: "one"}, {pod: pair, container: "two"}, {pod: third, container: "one"}}
	for i := range users {
		users[i].probe = b.probe(users[i].pod, users[i].container, nil)
	}
	const size = 128 * miB
	total := func() (sum uint64) {
		for i := range users {
			sum += b.used(users[i].pod, users[i].container, index)
		}
		return sum
	}
	for round := range count(2, 20) {
		first, got := make([]uint64, len(users)), make([]uint64, len(users))
		b.must(each([]int{0, 1, 2}, func(i int) error {
			a, err := users[i].probe.Ask("take cuMemAlloc_v2 %d 100000", size)
			if err == nil && a.Result() != lab.OutOfMemory {
				err = fmt.Errorf("%s %s: %s, want to be refused", users[i].pod, users[i].container, a)
			}
			first[i], got[i] = a.Bytes("id"), a.Bytes("count")
			return err
		}))
		sum := total()
		if sum > limit || sum < limit-limit/8 {
			b.Errorf("round %d: together they have %d MiB, %v pieces of %d MiB, want at most %d", round, sum/miB, got, size/miB, limit/miB)
		}
		for i := range users {
			for id := first[i]; id < first[i]+got[i]; id++ {
				if a := b.ask(users[i].probe, "give %d", id); a.Result() != lab.Success {
					b.Errorf("freed: %s", a)
				}
			}
		}
	}
	// One takes half of it by the library, another all of it past the library.
	b.take(users[0].probe, giB, 12)
	others := []lab.Process{}
	for _, of := range []int{0, 2} {
		p, err := users[of].pod.Process(b.ctx, users[of].container)
		b.must(err)
		others = append(others, p)
	}
	took := b.breach(pair, "two", limit)
	b.Logf("from the breach of a claim's cap to the end of the container: %d ms", took.Milliseconds())
	for _, p := range others {
		if !node.Lives(p) {
			b.Errorf("%s was ended, though another container was over", p)
		}
	}
}

// successorOf deletes a pod by force whose container takes ten seconds to die. The next pod
// has to have the same GPU: its Prepare waits, and does not fail.
func successorOf(b *bench, deaf *lab.RunningPod) {
	old, err := deaf.Process(b.ctx, "")
	b.must(err)
	letGo := b.heldBack(old)
	b.must(deaf.ForceDelete(b.ctx))
	next := b.claimPod("next", wholeClass, 0)
	b.must(lab.Holds(b.ctx, 10*time.Second, "beside the container of a pod that was deleted by force", func(ctx context.Context) error {
		if !node.Lives(old) {
			return errors.New("it has ended, though its runtime cannot end it")
		}
		if p, err := next.Process(ctx, ""); err == nil {
			return fmt.Errorf("the next holder runs as %s beside the previous one, %s", p, old)
		}
		return nil
	}))
	b.must(letGo())
	_, ended, err := node.End(b.ctx, time.Minute, old)
	b.must(err)
	b.comes(next)
	b.prepared(next)
	p, err := next.Process(b.ctx, "")
	b.must(err)
	began, err := node.StartTime(p)
	b.must(err)
	b.Logf("the next container started %d ms after the end of the one before", began.Sub(ended).Milliseconds())
}

// TestPodsByNameAfterAMove: a name that the kubelet had from the device plugin moves to DRA,
// and pods that ask by it run there, without one that is refused.
func TestPodsByNameAfterAMove(t *testing.T) {
	if !*long {
		t.Skip("-long is not set: a name takes a minute to move")
	}
	b := prepareDRA(t)
	b.must(agent.Reset(b.ctx, strings.ReplaceAll(lifeOfClaims, "mode: whole, api: dra", "mode: whole")))
	b.state("applied")
	b.offers(map[string]int{lab.GPU: 2})
	first, _ := b.running("first", lab.GPU, 2)
	b.must(first.Delete(b.ctx))
	b.partitions(lifeOfClaims)
	b.state("applied")
	b.offers(nil)
	moved := time.Now()
	pods := []*lab.RunningPod{b.pod("named-1", lab.GPU, 1), b.pod("named-2", lab.GPU, 1)}
	for _, pod := range pods {
		b.comes(pod)
		events, err := node.Events(b.ctx, "Pod", lab.PodNamespace, pod.Name)
		b.must(err)
		for _, e := range events {
			if e.Type == "Warning" && e.Reason != "FailedScheduling" && !unasked(e.Message) {
				t.Errorf("%s: %s: %s", pod, e.Reason, e.Message)
			}
		}
		if g := b.one(b.inside(pod, "")); g.Index > 1 {
			t.Errorf("%s has GPU %d", pod, g.Index)
		}
	}
	t.Logf("pods by a name that has moved ran %.0f s after the move", time.Since(moved).Seconds())

	// And back.
	for _, pod := range pods {
		b.must(pod.Delete(b.ctx))
	}
	b.partitions(strings.ReplaceAll(lifeOfClaims, "mode: whole, api: dra", "mode: whole"))
	b.state("applied")
	b.offers(map[string]int{lab.GPU: 2})
	b.running("back", lab.GPU, 2)
}
