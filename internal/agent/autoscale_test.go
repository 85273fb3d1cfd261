// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/plugin"
)

// wantReadies checks all that GPUReady has been so far.
func (b *bench) wantReadies(when string, want ...string) {
	b.t.Helper()
	synctest.Wait()
	b.with(func() {
		if got := strings.Join(b.readies, ", "); got != strings.Join(want, ", ") {
			b.t.Errorf("%s: GPUReady was %s, want %s", when, got, strings.Join(want, ", "))
		}
	})
}

// Pods are sent to a node once the kubelet has its devices, and not while none of its GPUs
// can be had. A new process does not take back what the one before it said, unless it
// does not come to it itself.
func TestGPUReadyOverTheLifeOfANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		o.fares = []plugin.Status{{Resource: memResource, Since: time.Now()}}
		b := start(t, o, dir, allShared)
		b.want("applied", fourUnits, "")
		b.wantReadies("the kubelet does not have the list yet")
		b.with(func() { b.fares[0] = plugin.Status{Resource: memResource, Registered: true} })
		b.LookAtPlugins()
		const is = "True Offered"
		b.wantReadies("it has the list", is)
		b.with(func() { b.fares[0].Registered = false })
		b.LookAtPlugins()
		time.Sleep(time.Hour)
		b.wantReadies("the kubelet is away, which is for the kubelet to say", is)

		sick := func(index int) {
			b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(index), Xid: 79, GI: -1, CI: -1}
			synctest.Wait()
		}
		b.with(func() { b.outside.inv.GPUs[0].Fault, b.outside.inv.GPUs[0].Lost = "GPU is lost", true })
		sick(0)
		b.wantReadies("one of two is lost", is)
		b.with(func() { b.outside.inv.GPUs[1].Fault, b.outside.inv.GPUs[1].Lost = "GPU is lost", true })
		sick(1)
		b.wantReadies("both are", is, "False GPUUnhealthy")
		b.with(func() { b.outside.inv = machine(2) })
		time.Sleep(inventoryEvery + testHold)
		b.wantReadies("both are back", is, "False GPUUnhealthy", is)
		b.SetNode(agentkube.Node{Labels: map[string]string{"example.com/gpu.driver-release": "true"}, Unschedulable: true})
		b.wantReadies("the driver is let go", is, "False GPUUnhealthy", is, "False DriverLetGo")
		b.end()

		// The next one has a driver, and a kubelet that comes a little later.
		o.with(func() { o.readies, o.fares = nil, []plugin.Status{{Resource: memResource, Since: time.Now()}} })
		b = start(t, o, dir, allShared)
		time.Sleep(silentFor / 2)
		b.wantReadies("a new process that is not ready yet")
		time.Sleep(silentFor)
		b.wantReadies("one that does not become it", "False Starting")
		b.with(func() { b.fares[0].Registered = true })
		b.LookAtPlugins()
		b.wantReadies("one that does", "False Starting", is)
		b.end()
	})
}

// Cluster Autoscaler counts none of our resources, so a full node is idle to it. It is told
// while pods have something, where that is asked for, and a new process knows it too.
func TestScaleDownIsHeldWhilePiecesAreInUse(t *testing.T) {
	for _, hold := range []bool{true, false} {
		t.Run(fmt.Sprint(hold), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(2), t.TempDir()
				o.hold = hold
				is := func(when string, held bool) {
					t.Helper()
					synctest.Wait()
					o.with(func() {
						if got := o.guests[HoldAnnotation] == "true"; got != (held && hold) || len(o.guests) > 1 {
							t.Errorf("%s: annotations %v", when, o.guests)
						}
					})
				}
				b := start(t, o, dir, allShared)
				b.want("applied", fourUnits, "")
				is("nobody has anything", false)
				b.hold("train-3", memResource, string(uuid(0))+"::1")
				time.Sleep(holdersEvery)
				is("a pod has a unit", true)
				b.end()
				o.with(func() { o.guests = nil })
				b = start(t, o, dir, allShared)
				defer b.end()
				b.want("applied", fourUnits, "")
				is("a new process", true)
				o.with(func() { o.holdings = nil })
				time.Sleep(2*holdersEvery + deviceplugin.LookSoon)
				is("it has ended", false)
			})
		})
	}
}

// The taint that a node was registered with goes once the kubelet has the devices, if the
// Node shows them, and not before. A refusal is told, and tried again.
func TestStartupTaintGoesOncePodsCanCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.unheard = true
		o.fares = []plugin.Status{{Resource: memResource, Since: time.Now()}}
		o.untaintErr = errors.New("the admission policy says no")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		asked := 0
		want := func(when string, more bool, conditions ...status.Reason) {
			t.Helper()
			synctest.Wait()
			var got []status.Reason
			for _, c := range b.Status().Conditions {
				if c.Reason == status.StartupTaintKept {
					got = append(got, c.Reason)
				}
			}
			o.with(func() {
				if (len(o.untaints) > asked) != more || !slices.Equal(got, conditions) {
					t.Errorf("%s: asked %d times and then %d times, conditions %v, want more: %v and %v", when, asked, len(o.untaints), got, more, conditions)
				}
				for _, resources := range o.untaints[asked:] {
					if resources != memResource {
						t.Errorf("%s: asked once there is some of %q, want %s", when, resources, memResource)
					}
				}
				asked = len(o.untaints)
			})
		}
		node := agentkube.Node{StartupTaint: true}
		b.SetNode(node)
		want("the kubelet has no devices", false)
		b.with(func() { b.fares[0] = plugin.Status{Resource: memResource, Registered: true} })
		b.LookAtPlugins()
		want("it has them, and that is refused", true, status.StartupTaintKept)
		b.wantReadies("it is ready all the same", "True Offered")
		time.Sleep(time.Minute)
		want("it is tried again", true, status.StartupTaintKept)
		o.with(func() { o.untaintErr = nil })
		time.Sleep(time.Minute)
		want("it is not refused any more", true)
		node.StartupTaint = false
		b.SetNode(node)
		want("it is gone", false)

		// The Node is made anew while no GPU can be had.
		for i := range 2 {
			b.with(func() { b.outside.inv.GPUs[i].Fault, b.outside.inv.GPUs[i].Lost = "GPU is lost", true })
			b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(i), Xid: 79, GI: -1, CI: -1}
		}
		synctest.Wait()
		node.StartupTaint = true
		b.SetNode(node)
		want("no GPU can be had", false)
		b.with(func() { b.outside.inv = machine(2) })
		time.Sleep(inventoryEvery + testHold)
		want("they are back", true)
	})
}
