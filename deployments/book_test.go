// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	extender "k8s.io/kube-scheduler/extender/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/tests/plane"
)

var bookSeed = flag.Uint64("book.seed", 1, "of the rounds of TestOneBook")

// Who asks for the GPU.
const (
	byScheduler = "extender"
	byKueue     = "kueue"
	byLiqo      = "liqo"
)

// all is the whole GPU.
const all = 79

// ending is what becomes of the placer in a round.
type ending int

const (
	lives ending = iota
	// killed is at any moment from the first question on, killedAfter just when kube-scheduler has
	// got a place for its pod and has not bound it yet.
	killed
	killedAfter
)

// book is a cluster with one GPU, and the placer with all of its doors.
type book struct {
	*apiServer
	t       *testing.T
	program string
	door    string
	p       *plane.Placer
	r       *rand.Rand
	// probe asks for all that there is, and more for more.
	probe, more *corev1.Pod

	mu sync.Mutex // guards what follows
	// given has who was told in each round that the GPU is theirs.
	given map[string]map[string]bool
}

// TestOneBook has kube-scheduler, Kueue and Liqo ask the real program for the only GPU at the same
// moment, at the real API server. In every other round it is killed, at a random moment or when a
// pod has a place and is not bound yet, and started again. The GPU is given once: nobody else was
// ever told that they have it, and one has it in the end.
//
// A pod that gets no answer asks again. (As it is shown, kube-scheduler goes on without the placer
// then, and so binds pods that the placer has not placed.) There is no lease, so that the next
// process begins at once and not 15 s later.
func TestOneBook(t *testing.T) {
	rounds := 40
	switch {
	case *long:
		rounds = 1000
	case testing.Short():
		rounds = 3
	}
	b := newBook(t)
	won, kills, late := map[string]int{}, 0, 0
	for i := range rounds {
		// A quarter is left alone, half is killed at any moment, and a quarter before a pod is bound.
		how := []ending{lives, killed, killed, killedAfter}[b.r.IntN(4)]
		if testing.Short() {
			how = []ending{lives, killed, killedAfter}[i%3]
		}
		who, ended := b.round(fmt.Sprint("round-", i), how)
		won[who]++
		if ended {
			kills++
			if how == killedAfter {
				late++
			}
		}
	}
	t.Logf("seed %d: %d rounds, %d with a kill, %d of them between a pod's answer and its binding; it was given to %v", *bookSeed, rounds, kills, late, won)
	for round, who := range b.given {
		if len(who) != 1 {
			t.Errorf("%s: the only GPU was given to %v", round, slices.Sorted(maps.Keys(who)))
		}
	}
	if testing.Short() {
		return // so few rounds say nothing of how they are distributed
	}
	if kills < rounds/4 || late == 0 {
		t.Errorf("the placer was killed %d times, %d of them before a pod was bound", kills, late)
	}
	for _, who := range []string{byScheduler, byKueue, byLiqo} {
		if won[who] < rounds/20 {
			t.Errorf("%s has got it %d times of %d: they do not ask at the same moment", who, won[who], rounds)
		}
	}
}

func newBook(t *testing.T) *book {
	s := startAPIServer(t)
	s.install(t)
	s.serveKueue(t)
	s.serveLiqo(t)
	for _, o := range render(t, withComponent(t, "placer", "placer/kueue", "placer/liqo")) {
		s.apply(t, o, false)
	}
	s.namespace(t, "train")
	s.consumer(t, "milan")
	s.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "1000", "ephemeral-storage": "1Ti", unitsName: fmt.Sprint(all)})
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/gpu-1", merge, fields{"metadata": fields{"labels": fields{"example.com/gpu.site": "on-prem"}}}, nil); err != nil {
		t.Fatal(err)
	}
	s.create(t, gpuNodes, aGPUNode("gpu-1"))
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True))
	s.flavor(t, "on-prem")
	b := &book{apiServer: s, t: t, program: placerProgram(t), r: rand.New(rand.NewPCG(*bookSeed, 0)), door: plane.FreeAddress(t), given: map[string]map[string]bool{},
		probe: podOf("", "", all), more: podOf("", "", all+1)}
	b.show(t, b.probe)
	b.show(t, b.more)
	b.start()
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	t.Cleanup(func() { cancel(); done.Wait() })
	for path, who := range map[string]string{workloads: byKueue, authentication + "/namespaces/liqo-tenant-milan/resourceslices": byLiqo} {
		done.Go(func() {
			for ctx.Err() == nil { // the server ends a watch after half an hour or more
				_ = s.Watch(ctx, path+"?resourceVersion=0", func(event []byte) { b.saw(who, event) })
			}
		})
	}
	return b
}

func (b *book) start() {
	b.p = b.startPlacer(b.t, b.program, b.door, "--doors=extender,kueue,liqo", "--lease=")
}

// verdicts are what an object says of the GPU.
type verdicts struct {
	Metadata struct{ Name string }
	Spec     struct{ NodeName string }
	Status   struct {
		AdmissionChecks []struct{ State string }
		Resources       map[string]string
		Conditions      []struct{ Type, Status string }
	}
}

// has reports whether the object says that it has it, and answered whether it was told either way.
func (v *verdicts) has(who string) (has, answered bool) {
	if who == byKueue {
		return v.Status.AdmissionChecks[0].State == "Ready", v.Status.AdmissionChecks[0].State != "Pending"
	}
	answered = slices.ContainsFunc(v.Status.Conditions, func(c struct{ Type, Status string }) bool { return c.Type == "Resources" })
	n := v.Status.Resources[unitsName]
	return n != "" && n != "0", answered
}

// saw notes who was told that they have it.
func (b *book) saw(who string, event []byte) {
	var e struct {
		Type   string
		Object verdicts
	}
	if err := json.Unmarshal(event, &e); err != nil || e.Type != "ADDED" && e.Type != "MODIFIED" || who == byKueue && len(e.Object.Status.AdmissionChecks) == 0 {
		return
	}
	if has, _ := e.Object.has(who); has {
		b.give(e.Object.Metadata.Name, who)
	}
}

func (b *book) give(round, who string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.given[round] == nil {
		b.given[round] = map[string]bool{}
	}
	b.given[round][who] = true
}

// upTo is a random time.
func (b *book) upTo(most time.Duration) time.Duration { return time.Duration(b.r.Int64N(int64(most))) }

// round has all ask, and returns who has got it, and whether the placer was ended.
func (b *book) round(name string, how ending) (who string, ended bool) {
	t := b.t
	b.ask(t, name, all)
	var made struct{ Metadata struct{ UID string } }
	if err := b.do(t, nil, http.MethodGet, trainPods+name, "", nil, &made); err != nil {
		t.Fatal(err)
	}
	b.queue(t, name, 1, all)
	l := lent{b.apiServer, "milan", name}
	l.request(t, liqo.Class, all)

	pod := &scheduling{pod: podOf(name, made.Metadata.UID, all), placed: make(chan struct{}), bind: make(chan struct{})}
	if how != killedAfter {
		close(pod.bind)
	}
	// Nobody is first in most rounds because of how long its way to the placer is.
	const spread = 60 * time.Millisecond
	heads, kill, rest := [3]time.Duration{b.upTo(spread), b.upTo(spread), b.upTo(spread)}, b.upTo(2*spread), b.upTo(5*spread)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	errs := make(chan error, 3)
	for i, ask := range []func() error{
		func() error { return b.schedule(ctx, name, pod) },
		func() error { return b.giveQuota(t, name, "on-prem", "gpu-placer", 1) },
		func() error { return l.authenticate(t) },
	} {
		go func() { time.Sleep(heads[i]); errs <- ask() }()
	}
	switch how {
	case killed:
		time.Sleep(kill)
		ended = true
	case killedAfter:
		ended = b.awaitPlacedOrGiven(name, pod)
	}
	if ended {
		b.p.Kill()
		b.start()
	}
	if how == killedAfter {
		time.Sleep(rest) // its binding is slow, and others have all that time
		close(pod.bind)
	}
	who = b.settle(name, pod, l)
	cancel()
	for range 3 {
		if err := <-errs; err != nil && !errors.Is(err, context.Canceled) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	b.clear(name, l)
	return who, ended
}

// awaitPlacedOrGiven waits until the pod has a place, which is true, or somebody else has the GPU.
func (b *book) awaitPlacedOrGiven(name string, pod *scheduling) bool {
	for {
		select {
		case <-pod.placed:
			return true
		case <-time.After(10 * time.Millisecond):
		}
		b.mu.Lock()
		n := len(b.given[name])
		b.mu.Unlock()
		if n > 0 {
			select {
			case <-pod.placed:
				return true
			default:
				return false
			}
		}
	}
}

// scheduling is what kube-scheduler does with a pod.
type scheduling struct {
	pod *corev1.Pod
	// placed is closed when the placer has named a node, and bind when it may be bound there.
	placed, bind chan struct{}

	mu sync.Mutex // guards what follows
	// refused is the last answer, until the next question.
	refused bool
}

func (s *scheduling) say(refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = refused
}

// schedule asks for a place until there is one, and binds the pod there.
func (b *book) schedule(ctx context.Context, name string, s *scheduling) error {
	for {
		bounded, cancel := context.WithTimeout(ctx, 250*time.Millisecond) // as it is shown to users
		placed, err := filter(bounded, b.door, s.pod)
		cancel()
		if placed {
			break
		}
		s.say(err == nil)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	s.say(false)
	b.give(name, byScheduler)
	close(s.placed)
	<-s.bind
	return b.do(b.t, nil, http.MethodPost, trainPods+name+"/binding", asJSON, fields{"apiVersion": "v1", "kind": "Binding", "metadata": fields{"name": name},
		"target": fields{"apiVersion": "v1", "kind": "Node", "name": "gpu-1"}}, nil)
}

// settle waits until all have their answers, and returns who has the GPU.
func (b *book) settle(name string, s *scheduling, l lent) (who string) {
	b.await(b.t, name+": all have their answers", func() error {
		var pod, workload, slice verdicts
		for path, into := range map[string]*verdicts{trainPods + name: &pod, workloads + "/" + name: &workload, l.path(): &slice} {
			if err := b.do(b.t, nil, http.MethodGet, path, "", nil, into); err != nil {
				return err
			}
		}
		var have []string
		s.mu.Lock()
		open := !s.refused
		s.mu.Unlock()
		if pod.Spec.NodeName != "" {
			have, open = append(have, byScheduler), false
		}
		if len(workload.Status.AdmissionChecks) == 0 {
			return errors.New("the workload has no quota yet")
		}
		for who, v := range map[string]*verdicts{byKueue: &workload, byLiqo: &slice} {
			has, answered := v.has(who)
			open = open || !answered
			if has {
				have = append(have, who)
			}
		}
		if len(have) > 1 {
			b.t.Fatalf("%s: the only GPU is had by %v", name, have)
		}
		if open || len(have) == 0 {
			return fmt.Errorf("%v has it, and somebody has no answer", have)
		}
		who = have[0]
		return nil
	})
	return who
}

// clear takes all of a round away, and waits until the placer knows it.
func (b *book) clear(name string, l lent) {
	for _, path := range []string{trainPods + name, workloads + "/" + name, l.path()} {
		if err := b.do(b.t, nil, http.MethodDelete, path+"?gracePeriodSeconds=0", "", nil, nil); err != nil && !strings.Contains(err.Error(), "NotFound") {
			b.t.Fatal(err)
		}
	}
	b.await(b.t, name+": the GPU is free again", func() error {
		var answer extender.ExtenderPreemptionResult
		err := askDoor(b.t.Context(), b.door, "preempt", extender.ExtenderPreemptionArgs{Pod: b.probe, NodeNameToMetaVictims: map[string]*extender.MetaVictims{"gpu-1": {}}}, &answer)
		if err == nil && len(answer.NodeNameToMetaVictims) == 0 {
			// Nobody has room for more than all, and is told why.
			var why extender.ExtenderFilterResult
			err = errors.Join(errors.New("it is not"), askDoor(b.t.Context(), b.door, "filter", extender.ExtenderArgs{Pod: b.more, NodeNames: &[]string{"gpu-1"}}, &why),
				fmt.Errorf("%v", why.FailedNodes))
		}
		return err
	})
}
