// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	resourcev1 "k8s.io/api/resource/v1"
)

// refusedWorld is one in which pod p has a claim that can never be prepared.
type refusedWorld struct {
	*world
	evicted []string // guarded by mu
	fails   error    // guarded by mu: why nobody is evicted
}

func (w *refusedWorld) evict(_ context.Context, p workload.Pod) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.evicted = append(w.evicted, p.Name+" "+p.UID); w.fails != nil {
		return w.fails
	}
	return nil
}

// says is what has come of the claim: Events, evictions, and whether a taint ends pods.
func (w *refusedWorld) says() string {
	synctest.Wait()
	out := []string{}
	for _, s := range w.cluster.Slices() {
		for _, d := range s.Spec.Devices {
			if i := slices.IndexFunc(d.Taints, func(t resourcev1.DeviceTaint) bool { return t.Effect == agentkube.NoExecute }); i >= 0 {
				out = append(out, d.Name+" "+d.Taints[i].Key+"="+d.Taints[i].Value)
			}
		}
	}
	w.locked(func() {
		slices.Sort(w.events)
		out = append(out, slices.Compact(slices.Clone(w.events))...)
		for _, e := range slices.Compact(slices.Clone(w.evicted)) {
			out = append(out, "evicted "+e)
		}
	})
	return strings.Join(out, ", ")
}

// elsewhere is a device of another node's pool, for which a claim is refused.
var elsewhere = result{Request: "x", Driver: driver, Pool: "node-2/a100", Device: "gpu-1"}

// A claim that can never be prepared is told at once and ended half a minute later: by a
// taint where its device has nobody else, else by eviction; and nobody who runs is.
func TestClaimsThatCanNeverBePreparedHungForEver(t *testing.T) {
	ours := workload.Pod{Namespace: "ns", Name: "p", UID: "uid-of-p"}
	whole1 := result{Device: wholeDevice}
	share := result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}
	for name, c := range map[string]struct {
		layout  string
		result  result
		noEvict bool
		before  func(*refusedWorld)
		half    string // after half a minute
		after   string // another one later
	}{
		"a whole GPU": {"whole", whole1, false, nil, "gpu-00000000 example.com/claim-refused=ClaimRefused, p ClaimEnded, p ClaimRefused",
			"p ClaimEnded, p ClaimRefused, evicted p uid-of-p"},
		"without component evict": {"whole", whole1, true, nil, "gpu-00000000 example.com/claim-refused=ClaimRefused, p ClaimEnded, p ClaimRefused", "p ClaimEnded, p ClaimRefused"},
		"a device that another claim names": {"whole", whole1, false, func(w *refusedWorld) { w.claim("b", whole1) }, "p ClaimEnded, p ClaimRefused, evicted p uid-of-p",
			"p ClaimEnded, p ClaimRefused, evicted p uid-of-p"},
		"a share, which others may get":   {"shared", share, false, nil, "p ClaimEnded, p ClaimRefused, evicted p uid-of-p", "p ClaimEnded, p ClaimRefused, evicted p uid-of-p"},
		"a share without component evict": {"shared", share, true, nil, "p ClaimRefused", "p ClaimRefused"},
		"no device of this node": {"whole", result{Pool: "node-2/a100", Device: "gpu-1"}, false, nil, "p ClaimEnded, p ClaimRefused, evicted p uid-of-p",
			"p ClaimEnded, p ClaimRefused, evicted p uid-of-p"},
		"a budget forbids it": {"shared", share, false, func(w *refusedWorld) { w.fails = agentkube.ErrBudget }, "p ClaimRefused, evicted p uid-of-p", "p ClaimRefused, evicted p uid-of-p"},
		"a pod that runs": {"whole", whole1, false, func(w *refusedWorld) {
			w.containers = []node.Container{{ID: "c", Name: "main", Namespace: "ns", Pod: "p", PodUID: ours.UID, Running: true}}
		}, "", ""},
		"a pod of another node":       {"whole", whole1, false, func(w *refusedWorld) { w.pods = nil }, "", ""},
		"what runs is not to be told": {"whole", whole1, false, func(w *refusedWorld) { w.cluster.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = nil }) }, "", ""},
		"the API server is away": {"whole", whole1, false, func(w *refusedWorld) {
			time.AfterFunc(time.Second, func() { w.cluster.Away(errors.New("no route to host")) })
		}, "p ClaimRefused", "p ClaimRefused"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				layout := whole
				if c.layout == "shared" {
					layout = shared
				}
				w := &refusedWorld{world: newWorld(t, 1, layout)}
				if w.pods = []workload.Pod{{Namespace: "ns", Name: "p"}}; !c.noEvict {
					w.options().Evict = w.evict
				}
				defer w.run(layout)()
				claim := w.claim("a", c.result)
				w.cluster.Edit("ns", "a", func(o *agentkube.Claim) { o.Pods, o.Results = []workload.Pod{ours}, append(o.Results, elsewhere) })
				if c.before != nil {
					c.before(w)
				}
				if _, err := w.Prepare(t.Context(), claim); err == nil {
					t.Fatal("prepared")
				}
				synctest.Wait()
				if said := w.Refused(); len(said) != 1 || said[0].Reason != status.ClaimRefused || said[0].Subject != "ns/a" {
					t.Errorf("the status says %+v", said)
				}
				time.Sleep(endAfter)
				if got := w.says(); got != c.half {
					t.Errorf("after half a minute: %s\nwant %s", got, c.half)
				}
				time.Sleep(endAfter + taintLook)
				if got := w.says(); got != c.after {
					t.Errorf("after a minute: %s\nwant %s", got, c.after)
				}
				w.cluster.Away(nil)
				w.remove("a")
				time.Sleep(2 * endAfter)
				if synctest.Wait(); len(w.Refused()) > 0 || strings.Contains(w.says(), "claim-refused") {
					t.Errorf("the claim is gone: %+v; %s", w.Refused(), w.says())
				}
			})
		})
	}
}

// A claim that asks for what this driver has not made its pod go round in circles: its pod was
// ended, made anew with the same words, and refused again, and each time it had a GPU. It is
// told, and left; when it has become possible, it is prepared.
func TestClaimsThatWouldBeMadeAnewAlikeChurned(t *testing.T) {
	const peers = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`
	for name, c := range map[string]struct {
		layout func(*gpu.Device, *mig.Card) plan.Layout
		result result
		config []resourcev1.DeviceAllocationConfiguration
	}{
		"configuration":           {whole, result{Device: wholeDevice}, []resourcev1.DeviceAllocationConfiguration{configured(json.RawMessage(peers))}},
		"configuration of class":  {whole, result{Device: wholeDevice}, []resourcev1.DeviceAllocationConfiguration{ofClass(configured(json.RawMessage(peers), "r0"))}},
		"a slice of an instance":  {onDemand, result{Device: migDevice}, []resourcev1.DeviceAllocationConfiguration{configured(sliced("Long"), "r0")}},
		"access to what is not":   {onDemand, result{Device: migDevice, AdminAccess: new(true)}, nil},
		"a slice for such access": {whole, result{Device: wholeDevice, AdminAccess: new(true)}, []resourcev1.DeviceAllocationConfiguration{configured(sliced("Long"), "r0")}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &refusedWorld{world: newWorld(t, 1, c.layout)}
				w.pods, w.options().Evict = []workload.Pod{{Namespace: "ns", Name: "p"}}, w.evict
				defer w.run(c.layout)()
				claim := w.claim("a", c.result)
				w.cluster.Edit("ns", "a", func(o *agentkube.Claim) {
					o.Pods, o.Configs = []workload.Pod{{Namespace: "ns", Name: "p", UID: "u"}}, c.config
				})
				// What the loop takes before it withdraws something is no way around it.
				if _, err := w.Settle(t.Context()); err != nil || w.ledger.Held() {
					t.Errorf("%v: %+v", err, w.ledger.Allocations())
				}
				for range 10 {
					if _, err := w.Prepare(t.Context(), claim); err == nil || w.ledger.Held() {
						t.Fatalf("%v: %+v", err, w.ledger.Allocations())
					}
					time.Sleep(endAfter)
				}
				if got := w.says(); got != "p ClaimUnsupported" {
					t.Errorf("it is said: %s", got)
				}
				if said := w.Refused(); len(said) != 1 || said[0].Reason != status.ClaimUnsupported || said[0].Subject != "ns/a" {
					t.Errorf("the status says %+v", said)
				}
				w.cluster.Edit("ns", "a", func(o *agentkube.Claim) { o.Configs = nil })
				w.in.Inventory.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, UUID: "MIG-a"}}
				w.lay(c.layout)
				time.Sleep(endAfter)
				if synctest.Wait(); len(w.Refused()) > 0 {
					t.Errorf("it has become possible, and the status says %+v", w.Refused())
				}
				if _, err := w.Prepare(t.Context(), claim); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// However many claims are left as they are, there is room for those whose pods are ended.
func TestClaimsThatAreLeftTakeNoRoomFromOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &refusedWorld{world: newWorld(t, 1, shared)}
		w.options().Evict = w.evict
		defer w.run(shared)()
		for i := range 3 * mostRefused {
			name := fmt.Sprintf("p-%03d", i)
			claim := w.claim(name, result{Device: shareDevice})
			w.cluster.Edit("ns", name, func(o *agentkube.Claim) {
				o.Pods, o.Configs = []workload.Pod{{Namespace: "ns", Name: name, UID: "u"}}, []resourcev1.DeviceAllocationConfiguration{configured(json.RawMessage(`{}`))}
			})
			if _, err := w.Prepare(t.Context(), claim); err == nil {
				t.Fatal("prepared")
			}
		}
		w.locked(func() { w.pods = []workload.Pod{{Namespace: "ns", Name: "p"}} })
		claim := w.claim("a", result{Device: wholeDevice})
		w.cluster.Edit("ns", "a", func(o *agentkube.Claim) { o.Pods = []workload.Pod{{Namespace: "ns", Name: "p", UID: "u"}} })
		if _, err := w.Prepare(t.Context(), claim); err == nil {
			t.Fatal("prepared")
		}
		time.Sleep(endAfter)
		if got := w.says(); got != "p ClaimEnded, p ClaimOutdated, evicted p u" || len(w.Refused()) != mostLeft+1 {
			t.Errorf("of %d refused it is said: %s", len(w.Refused()), got)
		}
	})
}

// A claim of a placement that the driver refuses to make is given up while it waits, with all
// that it has, and refused until the driver is asked again. One whose containers may be there
// keeps what it has.
func TestPlacementThatTheDriverRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		before func(*refusedWorld, dra.Claim)
		keeps  bool
	}{
		"it waits":                    {func(*refusedWorld, dra.Claim) {}, false},
		"the kubelet has it prepared": {func(w *refusedWorld, c dra.Claim) { w.cluster.Know(c) }, true},
		"a container has it": {func(w *refusedWorld, c dra.Claim) {
			w.locked(func() {
				w.containers = []node.Container{{CDI: []string{"example.com/gpu=" + cdi.Key("claim/"+c.UID, []string{"r0#0"})}}}
			})
		}, true},
		"a container has nobody knows what": {func(w *refusedWorld, c dra.Claim) {
			w.locked(func() { w.containers = []node.Container{{CDIUnknown: true}} })
		}, true},
		"it stands": {func(w *refusedWorld, c dra.Claim) { w.open() }, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &refusedWorld{world: newWorld(t, 2, onDemand)}
				w.ledger = ledger.New(func() {}, time.Now) // the loop opens nothing
				w.restart()
				w.pods = []workload.Pod{{Namespace: "ns", Name: "p"}}
				defer w.run(onDemand)()
				claim := w.claim("a", result{Device: migDevice}, result{Device: "gpu-00000001-mig-1g10gb-0"})
				w.cluster.Edit("ns", "a", func(o *agentkube.Claim) { o.Pods = []workload.Pod{{Namespace: "ns", Name: "p", UID: "u"}} })
				answer := make(chan error, 1)
				ask := func() {
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
						defer cancel()
						_, err := w.Prepare(ctx, claim)
						answer <- err
					}()
				}
				ask()
				time.Sleep(time.Second)
				c.before(w, claim)
				w.refuses = map[mig.Place]status.Cause{{GPU: w.in.Inventory.GPUs[0].UUID, Placement: w.shelf().now().devices[DeviceName{poolName(w.in.Node, w.in.Inventory.GPUs[0].Model), migDevice}].Placement}: status.Why(status.GPUInstanceFailed, "no room")}
				w.lay(onDemand)
				began := time.Now()
				err := <-answer
				if c.keeps {
					if time.Since(began) > time.Minute || len(w.ledger.Allocations()) != 2 || len(w.Refused()) > 0 {
						t.Errorf("%v: %+v, %+v", err, w.ledger.Allocations(), w.Refused())
					}
					return
				}
				for range 2 {
					if err == nil || !strings.Contains(err.Error(), "the GPU's driver refuses device "+migDevice) || !strings.Contains(err.Error(), "no room") || w.ledger.Held() {
						t.Errorf("%v: %+v", err, w.ledger.Allocations())
					}
					if _, err := w.Settle(t.Context()); err != nil || w.ledger.Held() { // takes it no more
						t.Errorf("%v: %+v", err, w.ledger.Allocations())
					}
					ask()
					err = <-answer
				}
				if !time.Now().Equal(began) {
					t.Errorf("it waited for %v", time.Since(began))
				}
				time.Sleep(endAfter)
				if got := w.says(); got != migDevice+" example.com/claim-refused=ClaimRefused, p ClaimEnded, p ClaimRefused" {
					t.Errorf("it is said: %s", got)
				}
				if d := w.named(migDevice); !slices.Contains(d.Taints, resourcev1.DeviceTaint{Key: "example.com/withdrawn", Value: "GPUInstanceFailed", Effect: agentkube.NoSchedule}) {
					t.Errorf("the next claim is sent there: %+v", d.Taints)
				}
				// The driver is to be asked again.
				w.refuses = nil
				w.lay(onDemand)
				time.Sleep(endAfter)
				if synctest.Wait(); len(w.Refused()) > 0 || len(w.named(migDevice).Taints) > 0 {
					t.Errorf("%+v, %+v", w.Refused(), w.named(migDevice).Taints)
				}
			})
		})
	}
}

// What was refused and has become possible ends nobody, and is not told any more.
func TestRefusedThatBecomesPossible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &refusedWorld{world: newWorld(t, 1, whole)}
		w.pods, w.options().Evict = []workload.Pod{{Namespace: "ns", Name: "p"}}, w.evict
		defer w.run(whole)()
		claim := w.claim("a", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		w.cluster.Edit("ns", "a", func(o *agentkube.Claim) { o.Pods = []workload.Pod{{Namespace: "ns", Name: "p", UID: "u"}} })
		if _, err := w.Prepare(t.Context(), claim); err == nil {
			t.Fatal("prepared")
		}
		if got := w.says(); got != "p ClaimOutdated" {
			t.Errorf("it is said: %s", got)
		}
		w.lay(shared)
		time.Sleep(2 * endAfter)
		if got := w.says(); got != "p ClaimOutdated" || len(w.Refused()) > 0 {
			t.Errorf("it is said: %s; %+v", got, w.Refused())
		}
		if _, err := w.Prepare(t.Context(), claim); err != nil {
			t.Error(err)
		}
	})
}

// A claim of an older layout whose room others have is not waited for without end.
func TestClaimThatComesTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &refusedWorld{world: newWorld(t, 1, whole)}
		w.pods, w.options().Evict = []workload.Pod{{Namespace: "ns", Name: "p"}}, w.evict
		defer w.run(whole)()
		late := w.claim("late", result{Device: wholeDevice})
		w.cluster.Edit("ns", "late", func(o *agentkube.Claim) { o.Pods = []workload.Pod{{Namespace: "ns", Name: "p", UID: "u"}} })
		w.lay(shared)
		synctest.Wait()
		if _, err := w.Prepare(t.Context(), w.claim("other", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
		defer cancel()
		if _, err := w.Prepare(ctx, late); err == nil || !strings.Contains(err.Error(), "others have its room") {
			t.Errorf("%v", err)
		}
		time.Sleep(endAfter)
		if got := w.says(); got != "gpu-00000000 example.com/claim-refused=ClaimOutdated, p ClaimEnded, p ClaimOutdated" {
			t.Errorf("it is said: %s", got)
		}
		// The cluster ends the pod, and its kubelet gives the claim back.
		w.remove("late")
		if err := w.Unprepare(t.Context(), late); err != nil {
			t.Error(err)
		}
		if got := w.says(); strings.Contains(got, "example.com") || len(w.Refused()) > 0 {
			t.Errorf("it is said: %s; %+v", got, w.Refused())
		}
	})
}

// Pods that are made again and again with the same mistake are not ended in a hurry.
func TestEndingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &refusedWorld{world: newWorld(t, 1, shared)}
		w.options().Evict = w.evict
		defer w.run(shared)()
		for i := range 3 * mostRefused {
			name := fmt.Sprintf("p-%03d", i)
			w.locked(func() { w.pods = append(w.pods, workload.Pod{Namespace: "ns", Name: name}) })
			claim := w.claim(name, result{Device: shareDevice})
			w.cluster.Edit("ns", name, func(o *agentkube.Claim) { o.Pods = []workload.Pod{{Namespace: "ns", Name: name, UID: "u"}} })
			if _, err := w.Prepare(t.Context(), claim); err == nil {
				t.Fatal("prepared")
			}
		}
		time.Sleep(endAfter)
		synctest.Wait()
		if len(w.Refused()) != mostRefused || len(w.evicted) > 15 {
			t.Errorf("%d refused, %d evicted", len(w.Refused()), len(w.evicted))
		}
	})
}
