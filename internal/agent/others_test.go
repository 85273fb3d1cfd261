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

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// theirs is an entry of the checkpoint that another device plugin's pod has.
func theirs(uid string, ids ...string) node.Entry {
	return node.Entry{PodUID: uid, Container: "c", Resource: "nvidia.com/gpu", IDs: ids}
}

// pause lets the loop do all that is due within that time.
func pause(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

const gpu1Units = "1.0 1.1 1.2 1.3"

// A plugin that went away more than five minutes before its pods ended leaves
// entries in the checkpoint that nobody ever takes out. They keep no GPU off.
func TestDeadPluginsEntryDoesNotKeepTheGPU(t *testing.T) {
	job := workload.Pod{Namespace: "train", Name: "job-1"}
	for name, lives := range map[string]func(*outside, bool){
		"a sandbox": func(o *outside, yes bool) {
			o.sandboxes = map[string]workload.Pod{"uid-1": job}
			if !yes {
				o.sandboxes = map[string]workload.Pod{"uid-2": {Namespace: "train", Name: "job-2"}}
			}
		},
		"a container": func(o *outside, yes bool) {
			o.old = nil
			if yes {
				o.old = []node.Container{{ID: "1", PodUID: "uid-1", Namespace: "train", Pod: "job-1", Running: true}}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(2)
				o.entries = []node.Entry{theirs("uid-1", string(uuid(0)))}
				lives(o, true)
				b := start(t, o, t.TempDir(), allShared)
				defer func() { b.end() }()
				pause(time.Hour)
				b.want("failed", gpu1Units, "")
				if m := b.message(); !strings.Contains(m, "train/job-1 has it as nvidia.com/gpu") {
					t.Errorf("message %q does not name the pod", m)
				}
				b.with(func() { lives(o, false) }) // and the file stays as it is
				pause(othersPresent + othersLinger)
				b.want("applied", fourUnits, "")
				// Neither does it come back with a restart of the agent.
				b.end()
				b = start(t, o, t.TempDir(), allShared)
				b.want("applied", fourUnits, "")
				// After one of the node it is believed until the others have had time
				// to speak.
				b.end()
				b.with(func() { o.deaf = true })
				b = start(t, o, t.TempDir(), allShared)
				b.want("failed", gpu1Units, "")
				pause(othersLinger)
				b.want("applied", fourUnits, "")
			})
		})
	}
}

// An entry is believed while nobody can say that its pod has gone.
func TestForeignEntryIsBelievedWhereTheRuntimeIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.entries = []node.Entry{theirs("uid-1", string(uuid(0)))}
		o.runtimeErr = errors.New("it is starting")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		pause(time.Hour)
		b.want("failed", gpu1Units, "")
		if m := b.message(); !strings.Contains(m, "pod uid-1") || !strings.Contains(m, "it is starting") {
			t.Errorf("message %q says neither who has it nor why that is believed", m)
		}
		b.with(func() { o.runtimeErr, o.stranger = nil, true }) // not the kubelet's
		pause(time.Hour)
		b.want("failed", gpu1Units, "")
		if m := b.message(); !strings.Contains(m, "--runtime-endpoint") {
			t.Errorf("message %q does not say what to do", m)
		}
		b.with(func() { o.stranger = false })
		pause(othersPresent)
		b.want("applied", fourUnits, "")
		// A checkpoint that cannot be read takes nothing back that it said before.
		b.with(func() { o.sandboxes = map[string]workload.Pod{"uid-1": {Namespace: "train", Name: "job-1"}} })
		pause(othersEvery)
		b.with(func() { o.checkpointErr, o.entries = errors.New("half a file"), []node.Entry{theirs("uid-3")} })
		pause(time.Hour)
		b.want("failed", gpu1Units, "")
	})
}

// Between Allocate and the sandbox, only the checkpoint knows of a pod.
func TestForeignEntryIsBelievedUntilItsPodHasASandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.LookAtCheckpoint()
		pause(time.Minute)
		b.want("applied", fourUnits, "")
		b.with(func() {
			o.pods = append(o.pods, workload.Pod{Namespace: "train", Name: "job-1"})
			o.entries = []node.Entry{theirs("uid-1", string(uuid(0)))}
		})
		b.LookAtCheckpoint()
		pause(2 * othersSoon)
		b.want("failed", "0.0x 0.1x 0.2x 0.3x "+gpu1Units, "")
		pause(othersLinger - 3*othersSoon)
		b.want("failed", "0.0x 0.1x 0.2x 0.3x "+gpu1Units, "")
		b.with(func() { o.sandboxes = map[string]workload.Pod{"uid-1": {Namespace: "train", Name: "job-1"}} })
		pause(time.Hour)
		b.want("failed", gpu1Units, "")
	})
}

// The kubelet writes its checkpoint with every list of any plugin, and the dead pods in
// it while it does not know its pods: that brings nobody back to life. What the agent
// offers must not come and go with its own lists.
func TestCheckpointWrittenAgainBringsNoDeadPodBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.entries, o.deaf = []node.Entry{theirs("uid-1", string(uuid(0)))}, true
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", gpu1Units, "")
		pause(othersLinger)
		b.want("applied", fourUnits, "")
		for i := range 20 {
			b.with(func() {
				o.init = []node.Holding{{Namespace: "ns", Pod: fmt.Sprint(i), Resource: "example.com/nic", IDs: []string{"0"}}}
			})
			b.LookAtCheckpoint()
			pause(2 * othersSoon)
			b.want("applied", fourUnits, "")
		}
	})
}

// A GPU that appears is not offered before it is known whether others have it.
func TestGPUThatAppearsMayBeOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.sandboxes = map[string]workload.Pod{"uid-1": {Namespace: "train", Name: "job-1"}}
		o.entries = []node.Entry{theirs("uid-1", string(uuid(1)))}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		b.with(func() { o.inv = machine(2) })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		b.want("failed", "0.0 0.1 0.2 0.3", "")
	})
}

// A GPU that somebody else gives out as well offers nothing new, also where the
// partition wants MIG of it and holders of memory units stand against that.
func TestIdleUnitsOfAGPUThatOthersHaveAreWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.hold("p", memResource, string(uuid(0))+"::1")
		b.SetFile("p.yaml", []byte(migPartition(demand)))
		b.want("blocked", "0.0x 0.1~ 0.2x 0.3x", "")
		b.with(func() {
			o.sandboxes = map[string]workload.Pod{"uid-1": {Namespace: "train", Name: "job-1"}}
			o.entries = []node.Entry{theirs("uid-1", string(uuid(0)))}
		})
		pause(othersEvery)
		b.want("failed", "0.0x 0.1~ 0.2x 0.3x", "")
	})
}

// Other plugins name their devices in other ways.
func TestOtherPluginsDeviceIDs(t *testing.T) {
	inv := machine(2) // of the minors 2 and 1
	inv.GPUs[0].UUID, inv.GPUs[1].UUID = "GPU-3e7c8f1a-5b1d-4c0e-9a52-0f6f4c2d7b10", "GPU-3e7c8f1a-5b1d-4c0e-9a52-0f6f4c2d7b10-7"
	inv.GPUs[1].MIG.Instances = []gpu.Instance{{UUID: "MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b"}, {}}
	first, second := inv.GPUs[0].UUID, inv.GPUs[1].UUID
	for id, want := range map[string]gpu.UUID{
		string(first):                                 first,
		string(first) + "::3":                         first, // NVIDIA's, shared
		string(first) + "-0":                          first, // HAMi's and Volcano's
		string(first) + "-12":                         first,
		string(first) + "-_-1":                        first, // gpushare's
		string(first) + "/x":                          first,
		string(first) + "a":                           "",
		string(first) + "0":                           "",
		string(first)[:30]:                            "",
		string(second):                                second, // the longer of two names
		string(second) + "-1":                         second,
		string(second) + "1":                          first, // the 71st of the first
		"MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b":    second,
		"MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b::0": second,
		"MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b-0":  second,
		"MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b0":   "",
		"nvidia2":           first, // GKE's
		"nvidia1/gi3":       second,
		"nvidia2/vgpu1":     first,
		"nvidia20":          "",
		"nvidia0":           "",
		"x" + string(first): "",
		"eth0":              "",
		"":                  "",
	} {
		got := gpusOf(inv, id)
		if want == "" && len(got) != 0 || want != "" && !slices.Equal(got, []gpu.UUID{want}) {
			t.Errorf("%q is of %q, want %q", id, got, want)
		}
	}
	if got := gpusOf(inv, string(second), "nvidia2", string(first)+"-1"); !slices.Equal(got, []gpu.UUID{second, first}) {
		t.Errorf("several are of %q", got)
	}
}

// A GPU of which HAMi has given out a part is not offered.
func TestHAMisGPUIsNotOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.holdings = []node.Holding{{Namespace: "train", Pod: "job-1", Container: "c", Resource: "nvidia.com/gpu", IDs: []string{string(uuid(0)) + "-3"}}}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", gpu1Units, "")
		if m := b.message(); !strings.Contains(m, "train/job-1 has it as nvidia.com/gpu") {
			t.Errorf("message %q", m)
		}
	})
}

// device is what a DRA driver says of one, by pairs of attribute and value.
func device(driver, name string, attributes ...string) agentkube.Device {
	d := agentkube.Device{Driver: driver, Pool: "node-1", Name: name, Attributes: map[string]string{}}
	for i := 0; i < len(attributes); i += 2 {
		d.Attributes[attributes[i]] = attributes[i+1]
	}
	return d
}

func TestWhichGPUADRADeviceIs(t *testing.T) {
	inv := machine(2)
	inv.GPUs[0].PCI, inv.GPUs[1].PCI = "00000000:3b:00.0", "00000000:af:00.0"
	inv.GPUs[1].MIG.Instances = []gpu.Instance{{UUID: "MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b"}}
	const any = "any"
	const nvidia, hami, nic = "gpu.nvidia.com", "hami-core-gpu.project-hami.io", "nic.example.org"
	for name, test := range map[string]struct {
		device agentkube.Device
		beside []agentkube.Device
		want   string
	}{
		"a whole one":                     {device: device(nvidia, "d", "uuid", string(uuid(1)), "type", "gpu"), want: string(uuid(1))},
		"in the driver's domain":          {device: device(nvidia, "d", "gpu.nvidia.com/uuid", string(uuid(1))), want: string(uuid(1))},
		"a part that is not made yet":     {device: device(nvidia, "d", "parentUUID", string(uuid(1)), "type", "mig", "profile", "1g.10gb"), want: string(uuid(1))},
		"an instance that stands":         {device: device(nvidia, "d", "uuid", "MIG-6d1b2f0c-8a4e-5d77-b0a3-1c2d3e4f5a6b"), want: string(uuid(1))},
		"one that was made meanwhile":     {device: device(nvidia, "d", "uuid", "MIG-00000000-8a4e-5d77-b0a3-1c2d3e4f5a6b"), want: any},
		"that and its parent":             {device: device(nvidia, "d", "uuid", "MIG-00000000-8a4e-5d77-b0a3-1c2d3e4f5a6b", "parentUUID", string(uuid(0))), want: string(uuid(0))},
		"that and an address":             {device: device(nvidia, "d", "uuid", "MIG-00000000-8a4e-5d77-b0a3-1c2d3e4f5a6b", "resource.kubernetes.io/pciBusID", "0000:AF:00.0"), want: string(uuid(1))},
		"that and another address":        {device: device(nvidia, "d", "uuid", "MIG-00000000-8a4e-5d77-b0a3-1c2d3e4f5a6b", "resource.kubernetes.io/pciBusID", "0000:01:00.0"), want: any},
		"by its address":                  {device: device(hami, "d", "resource.kubernetes.io/pciBusID", "0000:3b:00.0"), want: string(uuid(0))},
		"a virtual function of it":        {device: device(hami, "d", "pciBusID", "0000:3b:00.4"), want: string(uuid(0))},
		"by an older name of that":        {device: device(hami, "d", "gpu.nvidia.com/pcieBusID", "0000:3b:00.0"), want: string(uuid(0))},
		"a UUID without its kind":         {device: device(hami, "d", "uuid", strings.TrimPrefix(string(uuid(1)), "GPU-")), want: string(uuid(1))},
		"a GPU that is not there":         {device: device(nvidia, "d", "uuid", "GPU-99999999-0000-0000-0000-000000000000"), want: ""},
		"a GPU that no driver has":        {device: device(nvidia, "d", "type", "vfio", "resource.kubernetes.io/pciBusID", "0000:d8:00.0"), want: ""},
		"a GPU driver's without identity": {device: device(nvidia, "d", "type", "gpu"), want: any},
		"a UUID that is none":             {device: device("gpu.example.org", "d", "uuid", "gpu-0"), want: any},
		"a GPU by its name alone":         {device: device("accelerators.example.org", "gpu-0"), want: any},
		"a GPU by its model alone":        {device: device("accelerators.example.org", "a", "model", "NVIDIA H100"), want: any},
		"beside a GPU of the driver":      {device: device("vendor.example.org", "a"), beside: []agentkube.Device{device("vendor.example.org", "b", "uuid", string(uuid(0)))}, want: any},
		"beside another driver's GPU":     {device: device(nic, "a"), beside: []agentkube.Device{device(nvidia, "b", "uuid", string(uuid(0)))}, want: ""},
		"a network card":                  {device: device(nic, "eth0", "vendor", "NVIDIA Corporation", "resource.kubernetes.io/pciBusID", "0000:3c:00.0"), want: ""},
		"an interface without hardware":   {device: device(nic, "dummy0", "ifName", "dummy0"), want: ""},
		"a processor":                     {device: device("cpu.example.org", "cpu-3", "numaNode", ""), want: ""},
		"one that no slice has":           {beside: []agentkube.Device{device(nvidia, "b", "uuid", string(uuid(0)))}, device: device(nic, ""), want: any},
		"an address that is none":         {device: device(nvidia, "d", "pciBusID", "?"), want: any},
	} {
		p := node.Prepared{Driver: test.device.Driver, Pool: "node-1", Device: test.device.Name}
		if p.Device == "" {
			p.Device = "nobody's"
		}
		u, why := whichGPU(inv, p, append(test.beside, test.device))
		if got := string(u); test.want == any && (u != "" || why == "") || test.want != any && (got != test.want || why != "") {
			t.Errorf("%s: %q (%s), want %q", name, got, why, test.want)
		}
	}
}

// A GPU that a DRA driver has prepared for a pod is that driver's until the claim is
// over, and where nobody says which one it is, it may be any.
func TestGPUOfAnotherDRADriverIsNotOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.prepared = []node.Prepared{
			{Namespace: "train", Pod: "job-1", Claim: "c", Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0"},
			{Namespace: "train", Pod: "job-1", Claim: "c", Driver: "compute-domain.nvidia.com", Pool: "node-1", Device: "channel-0"},
			{Namespace: "train", Pod: "job-2", Claim: "d", Driver: "gpus.example.com", Pool: "node-1", Device: "gpu-1"}, // the agent's own
		}
		o.offered = []agentkube.Device{device("gpu.nvidia.com", "gpu-0", "uuid", string(uuid(0)))}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", gpu1Units, "")
		if m := b.message(); !strings.Contains(m, "train/job-1 has device gpu-0 of pool node-1 of the DRA driver gpu.nvidia.com by the claim c") {
			t.Errorf("message %q", m)
		}
		// What it is stays known while the slices are gone, and no listing that lacks
		// pods takes it back.
		b.with(func() { b.offered = nil })
		pause(time.Hour)
		b.with(func() { b.deaf = true })
		pause(time.Hour)
		b.want("failed", gpu1Units, "")
		if o.offeredAsks != 1 {
			t.Errorf("asked for slices %d times, want once", o.offeredAsks)
		}
		b.with(func() { b.deaf, o.prepared = false, o.prepared[1:] })
		pause(othersPresent + othersLinger)
		b.want("applied", fourUnits, "")
		pause(time.Hour)
		if o.offeredAsks != 1 {
			t.Errorf("asked for slices %d times, the last without a reason", o.offeredAsks)
		}

		// The next one cannot be told, for different reasons.
		p := node.Prepared{Namespace: "train", Pod: "job-3", Claim: "e", Driver: "accelerators.example.org", Pool: "rack-7", Device: "a-0"}
		for _, test := range []struct {
			set  func()
			want string
		}{
			{func() { o.prepared = append(o.prepared, p); b.offeredErr = errors.New("forbidden by RBAC") }, "forbidden by RBAC"},
			{func() { b.offeredErr = nil }, "no ResourceSlice of this node has that device"},
		} {
			b.with(test.set)
			pause(othersEvery + othersPresent)
			pause(plan.Linger)
			b.want("failed", "", "")
			m := b.message()
			for _, part := range []string{"GPU 0", "GPU 1", "train/job-3", "a-0", "rack-7", "accelerators.example.org", "claim e", test.want} {
				if !strings.Contains(m, part) {
					t.Errorf("message %q lacks %q", m, part)
				}
			}
		}
		b.with(func() {
			d := device(p.Driver, p.Device, "resource.kubernetes.io/pciBusID", "0000:01:00.0")
			d.Pool = p.Pool
			b.offered = []agentkube.Device{d}
		})
		pause(othersEvery)
		b.want("applied", fourUnits, "") // it is no GPU
	})
}

// Nobody is asked for slices where there are no devices that they would explain.
func TestSlicesAreReadOnlyForOtherDriversDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		pause(time.Hour)
		if b.want("applied", fourUnits, ""); o.offeredAsks != 0 {
			t.Errorf("asked %d times", o.offeredAsks)
		}
	})
}

// TestNoRoundForACheckpointThatWasRead: where the kubelet has been asked since its
// directory was looked at, no round comes to ask it.
func TestNoRoundForACheckpointThatWasRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		b := start(t, o, t.TempDir(), "version: v1\npartitions: {default: [{devices: all, mode: whole}]}")
		defer b.end()
		pause(othersLinger)
		b.LookAtCheckpoint()
		b.node(map[string]string{migManagerLabel: migManagerIdle}, false) // its round asks
		synctest.Wait()
		before := o.rounds
		pause(othersSoon + time.Second)
		if n := o.rounds - before; n > 0 {
			t.Errorf("%d rounds for nothing", n)
		}
	})
}

// TestKubeletIsNotAskedAboutOurOwnLists: the kubelet writes its checkpoint with every list
// of ours and with every Allocate, and was asked each time what others have.
func TestKubeletIsNotAskedAboutOurOwnLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.allocatable = map[string][]string{"rdma/hca": {"mlx5_0"}}
		b := start(t, o, t.TempDir(), allShared)
		defer func() { b.end() }()
		// written has the kubelet write its checkpoint, and wants to have been asked, or not.
		written := func(what string, want bool, change func()) {
			t.Helper()
			synctest.Wait()
			b.with(func() { o.asks, o.rounds = 0, 0; change() })
			b.LookAtCheckpoint()
			pause(othersSoon + time.Second)
			if asked := o.asks > 0; asked != want || !want && o.rounds > 0 {
				t.Errorf("%s: asked %d times, in %d rounds, want %v", what, o.asks, o.rounds, want)
			}
		}
		b.LookAtCheckpoint()
		pause(othersSoon)
		written("nothing of others", false, func() {
			o.init = []node.Holding{{Namespace: "ns", Pod: "p", Resource: memResource, IDs: []string{"x"}}}
		})
		written("somebody's plugin has other devices", true, func() { o.allocatable = map[string][]string{"rdma/hca": {"mlx5_1"}} })
		written("nothing since", false, func() { o.init = nil })
		written("somebody's pod", true, func() { o.entries = []node.Entry{theirs("uid-1", "mlx5_1")} })
		written("the same pod", false, func() {
			o.init = []node.Holding{{Namespace: "ns", Pod: "p", Resource: memResource, IDs: []string{"x"}}}
		})
		written("it lacks our devices", true, func() { o.forgetful = true })
		b.with(func() { o.forgetful = false })
		pause(silentFor)
		written("it cannot be read", true, func() { o.checkpointErr, o.init = errors.New("torn"), nil })
	})
}
