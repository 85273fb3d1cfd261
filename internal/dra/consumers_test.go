// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"

	resourcev1 "k8s.io/api/resource/v1"
)

// gang is a PodGroup, for which claims are reserved by Kubernetes 1.37.
var gang = resourcev1.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "g"}

// The names of consumers are for people.
func TestConsumers(t *testing.T) {
	thing := resourcev1.ResourceClaimConsumerReference{Resource: "things", Name: "thing"}
	c := agentkube.Claim{Namespace: "ns", Pods: []workload.Pod{podOf("p", 1)},
		Others: []resourcev1.ResourceClaimConsumerReference{gang, thing}}
	if got, want := consumers(&c), "pod ns/p, podgroups.scheduling.k8s.io ns/gang, things ns/thing"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// forGang makes a claim that is reserved for what is no pod.
func (w *world) forGang(name string, results ...result) (c agentkube.Claim) {
	w.claim(name, results...)
	w.cluster.Edit("ns", name, func(o *agentkube.Claim) { o.Others = []resourcev1.ResourceClaimConsumerReference{gang}; c = *o })
	return c
}

// A claim that is reserved for a PodGroup counted as reserved for nobody: when its last pod here
// had ended, an edit could take its instance away from the group's next one.
func TestClaimOfAPodGroupIsPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		c := w.forGang("a", result{Device: migDevice})
		claim := w.kubelets(c)
		w.kubeletPrepares(claim)
		if held := w.ledger.Allocations(); held[0].Who() != "podgroups.scheduling.k8s.io ns/gang" {
			t.Errorf("it is held for %q", held[0].Who())
		}
		w.kubeletGivesBack(claim)
		w.lay(whole) // an edit
		if _, err := w.Settle(t.Context()); err != nil || !w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
		w.remove("a") // with the group
		for range 3 {
			w.look()
			time.Sleep(sweepEvery)
		}
		if w.ledger.Held() {
			t.Errorf("the group is gone: %+v", w.ledger.Allocations())
		}
	})
}

// The process does not end at once where a PodGroup has been given something that its pod is
// yet to have prepared.
func TestLeaveWaitsForThePodsOfAPodGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		c := w.forGang("a", result{Device: migDevice})
		left := make(chan error)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		go func() { left <- w.Leave(ctx) }()
		time.Sleep(time.Second)
		select {
		case err := <-left:
			t.Fatalf("it ends, and the claim is not prepared: %v", err)
		default:
		}
		if _, err := w.cluster.Prepare(t.Context(), w.FrontEnd, w.kubelets(c)); err != nil {
			t.Fatal(err)
		}
		if err := <-left; err != nil {
			t.Error(err)
		}
	})
}

// A claim that can never be prepared and is reserved for a PodGroup was forgotten: nobody was
// told any more.
func TestRefusedClaimOfAPodGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		c := w.forGang("a", result{Device: wholeDevice})
		w.cluster.Edit("ns", "a", func(o *agentkube.Claim) {
			o.Configs = []resourcev1.DeviceAllocationConfiguration{configured(json.RawMessage(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`))}
		})
		if _, err := w.Prepare(t.Context(), w.kubelets(c)); err == nil {
			t.Fatal("prepared")
		}
		time.Sleep(3 * endAfter)
		synctest.Wait()
		if said := w.Refused(); len(said) != 1 || !strings.Contains(said[0].Message, "of podgroups.scheduling.k8s.io ns/gang: ") {
			t.Errorf("%+v", said)
		}
	})
}

// A claim of two pods, of which one has run and ended, is promised to the other, although both were
// named when it was taken.
func TestClaimThatItsSecondPodIsYetToHave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		claim := w.claim("a", result{Device: migDevice})
		w.reserve("a", podOf("p", 1))
		w.cluster.Refer(claim) // the kubelet has it for this pod alone
		w.reserve("a", podOf("p", 1), podOf("q", 1))
		w.prepares(claim)
		w.kubeletGivesBack(claim)
		w.lay(whole)
		if _, err := w.Settle(t.Context()); err != nil || !w.ledger.Held() {
			t.Errorf("the second pod is to have it: %v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A claim that was given back and has something else since is promised that.
func TestClaimThatWasGivenBackAndAllocatedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, onDemand)
		defer w.run(onDemand)()
		claim := w.claim("a", result{Device: migDevice})
		w.reserve("a", podOf("p", 1))
		w.kubeletPrepares(claim)
		w.kubeletGivesBack(claim)
		if _, err := w.Settle(t.Context()); err != nil || w.ledger.Held() {
			t.Errorf("given back: %v, %+v", err, w.ledger.Allocations())
		}
		w.reallocate("a", []workload.Pod{podOf("p", 1)}, result{Device: "gpu-00000001-mig-3g40gb-4"})
		if _, err := w.Settle(t.Context()); err != nil || !w.ledger.Held() {
			t.Errorf("allocated anew: %v, %+v", err, w.ledger.Allocations())
		}
	})
}

// Kubelets up to 1.36.3 ask to give a claim back when a pod ends for which they never had it
// prepared. Between two starts of a container of the pod that has it, that was done, and the
// kubelet forgot the claim: no container of that pod could be made any more.
func TestUnprepareBetweenTwoStartsOfAContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.reserve("a", podOf("p", 1))
		w.kubeletPrepares(claim)
		w.locked(func() { w.sandboxes = []workload.Pod{podOf("other", 1), podOf("p", 1)} })
		if err := w.cluster.Unprepare(t.Context(), w.FrontEnd, claim); err == nil || !strings.Contains(err.Error(), "ns/p ") || !w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
		w.locked(func() { w.sandboxes = w.sandboxes[:1] }) // it has ended
		if err := w.cluster.Unprepare(t.Context(), w.FrontEnd, claim); err != nil || w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// Also where the kubelet's account does not name that pod: it had lost it.
func TestUnprepareOfAClaimThatAPodHasWhichTheKubeletDoesNotName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.reserve("a", podOf("p", 1))
		w.prepares(claim)
		w.locked(func() { w.sandboxes = []workload.Pod{podOf("p", 1)} })
		if err := w.Unprepare(t.Context(), claim); err == nil || !w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// An allocation of the other front-end on the same device hid that a claim has it, and the device left
// its slice: the scheduler would have given its counters to somebody else.
func TestHeldDeviceStaysBesideAnotherFrontEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice, AdminAccess: new(true)})
		w.prepares(claim)
		// The ID comes after the claim's.
		if _, err := w.ledger.Take(ledger.Request{ID: "zz", Owner: ledger.DevicePlugin, Grants: []ledger.Grant{{GPU: w.in.Inventory.GPUs[0].UUID, Piece: piece.Whole{}}}}); err != nil {
			t.Fatal(err)
		}
		w.cluster.Know(claim)
		w.remove("a") // by force
		w.lay(shared)
		time.Sleep(2 * sweepEvery)
		if synctest.Wait(); w.named(wholeDevice) == nil {
			t.Error("a claim has it, and it has left its slice")
		}
	})
}

// An account that says that a claim was prepared says so of the devices that it names. After a
// start without records it was taken for what the claim has now, beside whoever has that.
func TestStartWithAnAccountOfBefore(t *testing.T) {
	for name, inUse := range map[string]bool{"by the account": false, "by a container": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, whole)
				claim, before := w.claim("a", result{Device: wholeDevice}), w.claim("before", result{Device: "gpu-00000001"})
				w.reserve("a", podOf("p", 1))
				w.cluster.Know(claim, before)
				w.reallocate("a", []workload.Pod{podOf("p", 2)}, result{Device: "gpu-00000001"})
				if inUse {
					w.containers = []node.Container{containerOf(podOf("p", 1), keyOf(claim, "r0"))}
				}
				defer w.run(whole)()
				if held := w.ledger.Allocations(); len(held) != 1 || held[0].ID != keyOf(before, "r0") {
					t.Errorf("one GPU, and these have it: %+v", held)
				}
				w.remove("before")
				w.kubeletGivesBack(before)
				if inUse {
					if _, err := w.within(time.Second, claim); !errors.Is(err, ledger.ErrHeld) {
						t.Errorf("a container has what it had before: %v", err)
					}
					w.locked(func() { w.containers = nil })
					w.look()
				}
				if devices, err := w.within(2*impatience, claim); err != nil || devices[0].Name != "gpu-00000001" {
					t.Errorf("%+v, %v", devices, err)
				}
			})
		})
	}
}
