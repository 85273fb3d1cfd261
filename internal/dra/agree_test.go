// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/fakes/claims"
)

// podOf is the nth pod of a name.
func podOf(name string, n int) workload.Pod {
	return workload.Pod{Namespace: "ns", Name: name, UID: fmt.Sprintf("%s-%d", name, n)}
}

// reallocate gives a claim something else, for these pods.
func (w *world) reallocate(name string, pods []workload.Pod, results ...result) {
	w.cluster.Edit("ns", name, func(c *agentkube.Claim) { c.Results, c.Pods = w.results(results), pods })
}

// anew restarts the front-end, with what is in records.
func (w *world) anew() {
	w.t.Helper()
	held := w.ledger.Allocations()
	w.ledger = ledger.New(w.open, time.Now)
	w.restart()
	for i := range held {
		if err := w.Found(held[i].ID, held[i].Record(), time.Time{}); err != nil {
			w.t.Error(err)
		}
	}
}

// within prepares a claim, in less than the kubelet's patience.
func (w *world) within(patience time.Duration, claim dra.Claim) ([]dra.Device, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	return w.Prepare(ctx, claim)
}

// A claim keeps its UID when it is given back and allocated anew. It was prepared as what it had
// before: its container had another GPU, share or amount than the API server says, and the
// claim that was given that in its place could not be prepared.
func TestClaimThatIsAllocatedAnew(t *testing.T) {
	const other = "gpu-00000001"
	for name, c := range map[string]struct {
		layout        func(*gpu.Device, *mig.Card) plan.Layout
		before, after []result
		// next is what another claim was given that this one had before.
		next result
	}{
		"another GPU": {whole, []result{{Device: wholeDevice}}, []result{{Device: other}}, result{Device: wholeDevice}},
		"another GPU's memory": {shared, []result{{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(79)}}, []result{{Device: other + "-shared", ShareID: claims.Share("b"), ConsumedCapacity: memoryOf(79)}},
			result{Device: shareDevice, ShareID: claims.Share("c"), ConsumedCapacity: memoryOf(79)}},
		"another amount": {shared, []result{{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(60)}}, []result{{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(10)}},
			result{Device: shareDevice, ShareID: claims.Share("c"), ConsumedCapacity: memoryOf(69)}},
		"another share": {shared, []result{{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(10)}}, []result{{Device: shareDevice, ShareID: claims.Share("b"), ConsumedCapacity: memoryOf(10)}},
			result{Device: shareDevice, ShareID: claims.Share("c"), ConsumedCapacity: memoryOf(69)}},
		"another instance": {onDemand, []result{{Device: migDevice}}, []result{{Device: wholeDevice + "-mig-1g10gb-0"}}, result{Device: migDevice}},
		"fewer GPUs":       {whole, []result{{Device: wholeDevice}, {Device: other}}, []result{{Device: other}}, result{Device: wholeDevice}},
		"access that takes nothing": {shared, []result{{Device: shareDevice, ConsumedCapacity: memoryOf(79)}}, []result{{Device: shareDevice, ConsumedCapacity: memoryOf(79), AdminAccess: new(true)}},
			result{Device: shareDevice, ShareID: claims.Share("c"), ConsumedCapacity: memoryOf(79)}},
	} {
		for how, learn := range map[string]func(w *world, claim dra.Claim){
			"by Prepare": func(*world, dra.Claim) {},
			"by a sweep": func(w *world, claim dra.Claim) {
				for range 4 { // the kubelet has lost its account, and no container is there
					w.look()
					time.Sleep(sweepEvery)
				}
				w.gave(claim, true)
			},
			"before an edit": func(w *world, claim dra.Claim) {
				for range 2 {
					if _, err := w.Settle(w.t.Context()); err != nil {
						w.t.Error(err)
					}
					synctest.Wait()
				}
				w.gave(claim, true)
			},
			"at a start": func(w *world, claim dra.Claim) {
				w.stop()
				w.anew()
				w.stop = w.run(c.layout)
				w.gave(claim, true)
			},
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, 2, c.layout)
					w.stop = w.run(c.layout)
					defer func() { w.stop() }()
					claim := w.claim("a", c.before...)
					w.reserve("a", podOf("p", 1))
					w.prepares(claim)
					w.reallocate("a", []workload.Pod{podOf("p", 2)}, c.after...)
					learn(w, claim)
					devices, err := w.within(time.Second, claim)
					if err != nil || len(devices) != len(c.after) || devices[0].Name != c.after[0].Device || devices[0].Share != claims.ShareOf(&c.after[0]) {
						t.Errorf("it was given %+v, and is %+v: %v", c.after, devices, err)
					}
					w.gave(claim, true)
					if _, err := w.within(time.Second, w.claim("next", c.next)); err != nil {
						t.Errorf("a claim that was given what it had: %v", err)
					}
				})
			})
		}
	}
}

// gave fails unless what a claim has in the ledger is what it was given, and all of that where
// that is wanted.
func (w *world) gave(claim dra.Claim, all bool) {
	w.t.Helper()
	synctest.Wait()
	now, err := w.cluster.Claim(w.t.Context(), driver, claim.Namespace, claim.Name)
	if err != nil {
		w.t.Fatal(err)
	}
	given := map[string]share{}
	for _, x := range wants(now, driver, w.in.Node) {
		given[x.id()] = x.share
	}
	held := w.ledger.Allocations()
	for i := range held {
		s, err := readShare(held[i].ID, held[i].Ref, held[i].Grants)
		if err != nil {
			w.t.Fatal(err)
		}
		if g, ok := given[s.id()]; s.UID == claim.UID && (!ok || !s.is(&g)) {
			w.t.Errorf("it was given %+v, and has %+v in the ledger", given, s)
		}
		delete(given, s.id())
	}
	if all && len(given) > 0 {
		w.t.Errorf("the ledger lacks %+v", given)
	}
}

// While a container has what its claim had before, that is held for it, and no other is created with it;
// the claim's next pod waits for its end, as for any holder.
func TestClaimThatIsAllocatedAnewWaitsForItsContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, shared)
		defer w.run(shared)()
		claim := w.claim("a", result{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(60)})
		w.reserve("a", podOf("p", 1))
		w.prepares(claim)
		id := keyOf(claim, "r0")
		w.locked(func() { w.containers = []node.Container{containerOf(podOf("p", 1), id)} })
		w.look()
		w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001-shared", ShareID: claims.Share("b"), ConsumedCapacity: memoryOf(20)})
		if devices, err := w.within(10*time.Second, claim); !errors.Is(err, ledger.ErrHeld) || !strings.Contains(err.Error(), "ns/p") || !strings.Contains(err.Error(), shareDevice) {
			t.Errorf("its container runs: %+v, %v", devices, err)
		}
		a, _ := w.ledger.Get(id)
		if a.IsOpen() || a.Phase != ledger.Waiting || piece.Count(a.Grants[0].Piece) != 60 || a.Cap(a.Grants[0].GPU) != piece.CapOf(60<<30) {
			t.Errorf("what the container has: %+v", a)
		}
		next := w.claim("next", result{Device: shareDevice, ShareID: claims.Share("c"), ConsumedCapacity: memoryOf(60)})
		if _, err := w.within(10*time.Second, next); !errors.Is(err, ledger.ErrHeld) {
			t.Errorf("a container has it: %v", err)
		}
		promised, err := w.Settle(t.Context())
		if err != nil || !slices.Contains(promised, w.in.Inventory.GPUs[1].UUID) {
			t.Errorf("the claim was given something of the second GPU: %v, %v", promised, err)
		}
		done := make(chan error)
		go func() {
			devices, err := w.Prepare(t.Context(), claim)
			if err == nil && (len(devices) != 1 || devices[0].Share != "b") {
				err = fmt.Errorf("%+v", devices)
			}
			done <- err
		}()
		synctest.Wait()
		w.locked(func() { w.containers = nil })
		began := time.Now()
		w.look() // as it hears of the end
		if err := <-done; err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		if _, err := w.Prepare(t.Context(), next); err != nil {
			t.Error(err)
		}
		if told := w.ledger.Allocations(); len(told) != 2 {
			t.Errorf("%+v", told)
		}
	})
}

// A claim that is given the same again while a container has it is as it was.
func TestClaimThatIsAllocatedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		w.locked(func() { w.containers = []node.Container{containerOf(podOf("p", 1), keyOf(claim, "r0"))} })
		w.look()
		w.reallocate("a", nil, result{Device: "gpu-00000001"})
		if _, err := w.within(time.Second, claim); !errors.Is(err, ledger.ErrHeld) {
			t.Errorf("its container runs: %v", err)
		}
		w.reallocate("a", nil, result{Device: wholeDevice})
		if devices, err := w.within(time.Second, claim); err != nil || devices[0].Name != wholeDevice {
			t.Errorf("%+v, %v", devices, err)
		}
	})
}

// A kubelet that has had a claim prepared asks for it no more: it gives the CDI devices that it
// was answered to the claim's next pod. These had the GPU of before. Now none is created with it,
// and what the claim was given stands under the same names when the container of before has ended.
func TestKubeletThatTakesAClaimForPrepared(t *testing.T) {
	for name, ends := range map[string]bool{"a container has it": true, "no container has it": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, onDemand)
				defer w.run(onDemand)()
				claim := w.claim("a", result{Device: migDevice})
				w.reserve("a", podOf("p", 1))
				w.kubeletPrepares(claim)
				id := keyOf(claim, "r0")
				if ends {
					w.locked(func() { w.containers = []node.Container{containerOf(podOf("p", 1), id)} })
				}
				w.look()
				w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001-mig-1g10gb-6"})
				began := time.Now()
				w.cluster.Refer(claim) // the second pod comes, and the driver is not asked
				synctest.Wait()
				if a, ok := w.ledger.Get(id); ends && (!ok || a.IsOpen() || a.Grants[0].GPU != w.in.Inventory.GPUs[0].UUID) {
					t.Errorf("its container runs: %+v", a)
				}
				w.locked(func() { w.containers = nil })
				w.look()
				synctest.Wait()
				a, ok := w.ledger.Get(id)
				if !ok || !a.IsOpen() || a.Grants[0].GPU != w.in.Inventory.GPUs[1].UUID || piece.At(a.Grants[0].Piece).Start != 6 || time.Since(began) > 0 {
					t.Errorf("after %s: %+v, %v", time.Since(began), a, ok)
				}
				if told := w.cluster.Told(claim.UID); len(told) != 1 || told[0].Device != "gpu-00000001-mig-1g10gb-6" {
					t.Errorf("the claim says %+v", told)
				}
			})
		})
	}
}

// What a claim was given that is taken from it again, while what it was given has a holder yet, is
// taken when that has ended, although nobody asks for it.
func TestClaimThatIsAllocatedAnewWhereAnotherIsYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		claim, before := w.claim("a", result{Device: wholeDevice}), w.claim("before", result{Device: "gpu-00000001"})
		w.reserve("a", podOf("p", 1))
		for _, c := range []dra.Claim{claim, before} {
			w.kubeletPrepares(c)
		}
		w.remove("before") // by force
		w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001"})
		w.cluster.Refer(claim)
		time.Sleep(2 * sweepEvery)
		if held := w.ledger.Allocations(); len(held) != 1 || held[0].ID != keyOf(before, "r0") {
			t.Errorf("%+v", held)
		}
		w.kubeletGivesBack(before)
		w.gave(claim, true)
	})
}

// The ledger's word stands without the API server for pods of which the API server has said that
// the claim is theirs, and for no others.
func TestPrepareWithoutTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.reserve("a", podOf("p", 1))
		first, err := w.cluster.Prepare(t.Context(), w, claim)
		if err != nil {
			t.Fatal(err)
		}
		w.cluster.Away(errors.New("no route to host"))
		again, err := w.cluster.Prepare(t.Context(), w, claim) // a kubelet that has started anew
		if err != nil || fmt.Sprint(again) != fmt.Sprint(first) {
			t.Errorf("the same pod: %+v, %v", again, err)
		}
		w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001"})
		if got, err := w.cluster.Prepare(t.Context(), w, claim); err == nil {
			t.Errorf("another pod is given what the first one had: %+v", got)
		}
		w.cluster.Away(nil)
		if got, err := w.cluster.Prepare(t.Context(), w, claim); err != nil || got[0].Name != "gpu-00000001" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// A list of claims, or an answer, that is older than what was taken since says nothing of it.
func TestOldWordOfAClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		api := &slowAPI{Cluster: w.cluster}
		w.options().API = api
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		api.slow.Store(int64(5 * time.Second))
		settled := make(chan error)
		go func() { _, err := w.Settle(t.Context()); settled <- err }()
		synctest.Wait()
		w.reallocate("a", nil, result{Device: "gpu-00000001"})
		w.prepares(claim)
		if err := <-settled; err != nil { // with the list from before
			t.Error(err)
		}
		if a, ok := w.ledger.Get(keyOf(claim, "r0")); !ok || a.Superseded || !a.IsOpen() {
			t.Errorf("%+v", a)
		}
	})
}

// What is asked and answered while a claim is allocated anew is of one allocation or the other. Each
// row is a race that a busy node comes upon.
func TestClaimThatIsAllocatedAnewMeanwhile(t *testing.T) {
	const other = "gpu-00000001"
	for name, race := range map[string]func(w *world, api *slowAPI, claim dra.Claim){
		// The answer is of before, and comes after what it says was superseded.
		"an old answer": func(w *world, api *slowAPI, claim dra.Claim) {
			w.locked(func() { w.containers = []node.Container{containerOf(podOf("p", 1), keyOf(claim, "r0"))} })
			w.look()
			late := func() {
				w.reallocate("a", nil, result{Device: other})
				if _, err := w.within(time.Second, claim); !errors.Is(err, ledger.ErrHeld) {
					w.t.Errorf("its container runs: %v", err)
				}
			}
			api.late.Store(&late)
			if devices, err := w.within(5*time.Second, claim); !errors.Is(err, ledger.ErrHeld) {
				w.t.Errorf("%+v, %v", devices, err)
			}
			if a, _ := w.ledger.Get(keyOf(claim, "r0")); !a.Superseded {
				w.t.Errorf("%+v", a)
			}
			w.locked(func() { w.containers = nil })
			w.look()
			synctest.Wait()
			w.gave(claim, true)
		},
		// A call waits for the loop, and what it waits for ends.
		"a call under way": func(w *world, api *slowAPI, claim dra.Claim) {
			w.ledger.Shut(keyOf(claim, "r0"))
			w.shut.Store(true)
			w.reserve("a", podOf("p", 1))
			got, began := make(chan string), time.Now()
			go func() {
				devices, err := w.within(10*time.Second, claim)
				got <- fmt.Sprint(devices, err)
			}()
			synctest.Wait()
			w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: other})
			w.shut.Store(false)
			if devices, err := w.within(5*time.Second, claim); err != nil || devices[0].Name != other {
				w.t.Errorf("%+v, %v", devices, err)
			}
			if said := <-got; !strings.Contains(said, other) || strings.Contains(said, wholeDevice) || time.Since(began) > 0 {
				w.t.Errorf("after %s the first call is answered with %s", time.Since(began), said)
			}
		},
		// The kubelet gives back what the claim had, and it has something else when the runtime has answered.
		"given back": func(w *world, api *slowAPI, claim dra.Claim) {
			again := func() {
				w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: other})
				if _, err := w.within(time.Second, claim); err != nil {
					w.t.Error(err)
				}
			}
			w.asked.Store(&again)
			if err := w.Unprepare(w.t.Context(), claim); err != nil {
				w.t.Error(err)
			}
			w.gave(claim, true)
		},
		// A sweep hears that the claim has nothing, and it has the same again when it ends that.
		"the same again": func(w *world, api *slowAPI, claim dra.Claim) {
			w.cluster.Know() // lost
			w.reallocate("a", nil)
			late := func() {
				w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: wholeDevice})
				if _, err := w.within(time.Second, claim); err != nil {
					w.t.Error(err)
				}
			}
			api.late.Store(&late)
			for range 3 {
				w.look()
				time.Sleep(sweepEvery)
			}
			if api.late.Load() != nil {
				w.t.Error("no sweep has asked")
			}
			w.gave(claim, true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, whole)
				api := &slowAPI{Cluster: w.cluster}
				w.options().API = api
				defer w.run(whole)()
				claim := w.claim("a", result{Device: wholeDevice})
				w.prepares(claim)
				race(w, api, claim)
			})
		})
	}
}

// What was taken anew is opened by the next process, if the one that took it has not come to that:
// the kubelet does not ask for it.
func TestStartOpensWhatWasAllocatedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		w.stop = w.run(whole)
		claim := w.claim("a", result{Device: wholeDevice})
		w.reserve("a", podOf("p", 1))
		w.kubeletPrepares(claim)
		w.shut.Store(true)
		w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001"})
		w.cluster.Refer(claim)
		w.gave(claim, true)
		w.stop()
		w.anew()
		w.shut.Store(false)
		defer w.run(whole)()
		if a, ok := w.ledger.Get(keyOf(claim, "r0")); !ok || !a.IsOpen() || a.Grants[0].GPU != w.in.Inventory.GPUs[1].UUID {
			t.Errorf("%+v, %v", a, ok)
		}
	})
}

// A claim that is given less than before is known for what it has.
func TestClaimThatIsGivenLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice}, result{Device: "gpu-00000001"})
		w.reserve("a", podOf("p", 1))
		w.kubeletPrepares(claim)
		w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: wholeDevice})
		for range 2 {
			if devices, err := w.cluster.Prepare(t.Context(), w.FrontEnd, claim); err != nil || len(devices) != 1 {
				t.Errorf("%+v, %v", devices, err)
			}
			w.cluster.Away(errors.New("no route to host")) // the second time
		}
	})
}

// slowAPI answers a list as it was when it was asked, after a while, and counts its questions.
type slowAPI struct {
	*claims.Cluster
	slow        atomic.Int64 // time.Duration
	lists, asks atomic.Int64
	// late, if set, is called once between an answer for one claim and its coming.
	late atomic.Pointer[func()]
}

func (a *slowAPI) Claims(ctx context.Context, driver string) ([]agentkube.Claim, error) {
	a.lists.Add(1)
	list, err := a.Cluster.Claims(ctx, driver)
	select {
	case <-time.After(time.Duration(a.slow.Load())):
		return list, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (a *slowAPI) Claim(ctx context.Context, driver, namespace, name string) (*agentkube.Claim, error) {
	a.asks.Add(1)
	c, err := a.Cluster.Claim(ctx, driver, namespace, name)
	if f := a.late.Swap(nil); f != nil {
		(*f)()
	}
	return c, err
}

// A claim that was refused and is allocated anew is another matter: its next pod has the same half
// minute, and is told. It was ended at once, for what the claim had before.
func TestRefusedClaimThatIsAllocatedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &refusedWorld{world: newWorld(t, 1, whole)}
		w.pods, w.options().Evict = []workload.Pod{{Namespace: "ns", Name: "p"}, {Namespace: "ns", Name: "q"}}, w.evict
		defer w.run(whole)()
		claim := w.claim("a", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		w.reserve("a", podOf("p", 1))
		if _, err := w.Prepare(t.Context(), claim); err == nil {
			t.Fatal("prepared")
		}
		time.Sleep(endAfter - time.Second)
		w.locked(func() { w.pods = w.pods[1:] })
		w.reallocate("a", []workload.Pod{podOf("q", 1)}, result{Device: "gpu-00000000-replicas"})
		time.Sleep(2 * time.Second)
		if got := w.says(); got != "p ClaimOutdated, q ClaimOutdated" {
			t.Errorf("after two seconds: %s", got)
		}
		time.Sleep(endAfter)
		if got := w.says(); got != "p ClaimOutdated, q ClaimEnded, q ClaimOutdated, evicted q q-1" {
			t.Errorf("after half a minute: %s", got)
		}
		if said := w.Refused(); len(said) != 1 || !strings.Contains(said[0].Message, "replicas") {
			t.Errorf("%+v", said)
		}
	})
}

// What is said in a claim of its devices is of those that it has.
func TestClaimIsToldOfWhatItHasNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		var said [][]agentkube.ClaimDevice
		w.options().API = &tellAPI{w.cluster, func(d []agentkube.ClaimDevice) { w.locked(func() { said = append(said, d) }) }}
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		w.reallocate("a", nil, result{Device: "gpu-00000001"})
		w.prepares(claim) // before the first is told
		time.Sleep(2 * tellAfter)
		synctest.Wait()
		if len(said) != 1 || said[0][0].Device != "gpu-00000001" || said[0][0].Data["gpu"] != string(w.in.Inventory.GPUs[1].UUID) {
			t.Errorf("it is said %+v", said)
		}
	})
}

// tellAPI hears what is said in claims.
type tellAPI struct {
	*claims.Cluster
	tell func([]agentkube.ClaimDevice)
}

func (a *tellAPI) SetClaimDevices(ctx context.Context, driver string, c *agentkube.Claim, devices []agentkube.ClaimDevice) error {
	a.tell(devices)
	return a.Cluster.SetClaimDevices(ctx, driver, c, devices)
}

// All claims of the cluster are listed at the start and before something is taken away. Whether
// one has ended, or is another pod's by now, is asked of that one.
func TestSweepsAskForSingleClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		api := &slowAPI{Cluster: w.cluster}
		w.options().API = api
		defer w.run(whole)()
		mine, gone := w.claim("mine", result{Device: wholeDevice}), w.claim("gone", result{Device: "gpu-00000001"})
		w.reserve("mine", podOf("p", 1))
		for _, c := range []dra.Claim{mine, gone} {
			w.kubeletPrepares(c)
		}
		w.cluster.Know(mine)
		w.remove("gone")
		for range 10 {
			w.look()
			time.Sleep(sweepEvery)
		}
		w.reserve("mine", podOf("p", 1), podOf("q", 1))
		w.cluster.Refer(mine)
		time.Sleep(time.Hour)
		synctest.Wait()
		if held := w.ledger.Allocations(); len(held) != 1 || held[0].ID != keyOf(mine, "r0") {
			t.Errorf("%+v", held)
		}
		// Two by Prepare, one that ended, one of another pod.
		if lists, asks := api.lists.Load(), api.asks.Load(); lists != 1 || asks != 4 {
			t.Errorf("%d lists and %d questions for one claim", lists, asks)
		}
	})
}

// A container that has started since the runtime was last heard keeps its claim's devices: a
// runtime that does not answer says nothing. They went to the next claim.
func TestEndsOnTheRuntimesLastWord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.kubeletPrepares(claim)
		time.Sleep(time.Second)
		w.look()
		w.locked(func() { w.containers = []node.Container{containerOf(podOf("p", 1), keyOf(claim, "r0"))} })
		w.cluster.Know() // lost
		w.remove("a")    // by force
		time.Sleep(5 * time.Minute)
		if synctest.Wait(); !w.ledger.Held() {
			t.Error("its container runs, and it has ended")
		}
		w.locked(func() { w.containers = nil })
		w.look()
		time.Sleep(2 * sweepEvery)
		if synctest.Wait(); w.ledger.Held() {
			t.Error("nobody knows it, and it has not ended")
		}
	})
}

// In a large cluster the list of the claims takes longer than the loop waits. It goes on beside
// it, and the next round has it. Each round began it anew, and no edit ever came to its end.
func TestSettleWithManyClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, onDemand)
		api := &slowAPI{Cluster: w.cluster}
		w.options().API = api
		defer w.run(onDemand)()
		w.claim("promised", result{Device: migDevice})
		api.slow.Store(int64(7 * time.Second))
		w.lay(func(d *gpu.Device, card *mig.Card) plan.Layout {
			if d.Index == 0 {
				return whole(d, card)
			}
			return onDemand(d, card)
		})
		settle := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := w.Settle(ctx)
			return err
		}
		for range 3 {
			if err := settle(); err == nil || w.ledger.Held() {
				t.Fatalf("the list is not there yet: %v, %+v", err, w.ledger.Allocations())
			}
		}
		woken := w.wakes.Load()
		time.Sleep(5 * time.Second)
		if w.wakes.Load() == woken {
			t.Error("the list is there, and nobody is told")
		}
		began := time.Now()
		if err := settle(); err != nil || len(w.ledger.Allocations()) != 1 || time.Since(began) > 0 {
			t.Errorf("after %s: %v, %+v", time.Since(began), err, w.ledger.Allocations())
		}
		// What a list says is used once: the next caller wants to know what has changed.
		api.slow.Store(0)
		w.claim("another", result{Device: "gpu-00000001-mig-1g10gb-6"})
		if err := settle(); err != nil || len(w.ledger.Allocations()) != 2 {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
		// One that was begun before the server had the last taints is no answer.
		api.slow.Store(int64(3 * time.Second))
		if err := settle(); err == nil {
			t.Error("a list that is not there is believed")
		}
		api.slow.Store(0)
		w.SetFaults(map[gpu.UUID]string{w.in.Inventory.GPUs[0].UUID: "Xid 79"}, nil)
		w.claim("third", result{Device: "gpu-00000001-mig-1g10gb-5"})
		synctest.Wait()
		if err := settle(); err != nil || len(w.ledger.Allocations()) != 3 {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A kubelet can give a claim back while it prepares the claim for another pod (kubernetes#140212).
// The call under way waited for what had ended, until its time was up. It takes the claim anew, at
// once, also if another call was faster.
func TestGivenBackWhileItIsPrepared(t *testing.T) {
	for name, calls := range map[string]int{"one call": 1, "two calls": 2} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, whole)
				defer w.run(whole)()
				w.shut.Store(true)
				claim := w.claim("a", result{Device: wholeDevice})
				got := make(chan error)
				for range calls {
					go func() { _, err := w.within(dra.Patience, claim); got <- err }()
				}
				synctest.Wait()
				began := time.Now()
				if err := w.Unprepare(t.Context(), claim); err != nil {
					t.Fatal(err)
				}
				w.shut.Store(false)
				w.open()
				for range calls {
					if err := <-got; err != nil || time.Since(began) > 0 {
						t.Errorf("after %s: %v", time.Since(began), err)
					}
				}
				w.gave(claim, true)
			})
		})
	}
}

// What a claim had may end between a look at it and the wait for it, as a sweep sees that the claim was allocated anew. The
// claim is read then, and Prepare does not fail.
func TestWhatEndsBeforeItIsOpened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		in := w.ClaimsIn.(*intake)
		all := in.book.allocations(claim.UID)
		s, err := readShare(all[0].ID, all[0].Ref, all[0].Grants)
		if err != nil {
			t.Fatal(err)
		}
		w.ledger.Release(ledger.DRA, s.id())
		if devices, err := in.open(t.Context(), []share{s}); !errors.Is(err, errReallocated) {
			t.Errorf("%+v, %v", devices, err)
		}
	})
}
