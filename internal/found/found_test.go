// SPDX-License-Identifier: Apache-2.0

package found

import (
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

func yes() *bool { return new(true) }
func no() *bool  { return new(false) }

// untouched is a node with one GPU, as the driver's installation leaves it.
func untouched() Node {
	return Node{Driver: "580.95.05", GPUs: []GPU{{
		Device: gpu.Device{Index: 3, UUID: "GPU-3", MIG: gpu.MIG{Capable: true}},
		Mode:   status.Shared,
		Setup: gpu.Setup{
			Compute: gpu.ComputeDefault, Persistence: yes(), Accounting: no(), ECC: yes(), ECCPending: yes(), ECCDefault: yes(),
			Power: gpu.Setting{Now: 700_000, Default: 700_000}, Clock: gpu.Setting{Now: 1980, Default: 1980},
			Fabric: gpu.FabricCompleted, Recovery: gpu.RecoveryNone, Processes: []gpu.Client{{PID: 7, Name: "python3"}},
		},
	}}}
}

var daemon = gpu.Client{PID: 1234, Name: "nvidia-cuda-mps"}

// changes has, for each kind, a node that has it and no other one, and the words that its message must have.
var changes = map[status.Reason]struct {
	change func(*Node, *GPU)
	says   []string
}{
	status.ComputeModeSet: {func(_ *Node, g *GPU) {
		g.Setup.Compute, g.Owners = gpu.ComputeExclusiveProcess, []gpu.Client{{PID: 42, Name: "trainer"}}
	}, []string{"EXCLUSIVE_PROCESS", "42 (trainer)", "nvidia-smi -i 3 -c DEFAULT"}},
	status.RecoveryDue: {func(_ *Node, g *GPU) { g.Setup.Recovery = gpu.RecoveryReset }, []string{"reset", "nvidia-smi -i 3 --gpu-reset"}},
	status.FabricNotReady: {func(_ *Node, g *GPU) { g.Setup.Fabric = gpu.FabricInProgress },
		[]string{"in progress", "802", "nvidia-fabricmanager"}},
	status.DriverTooOld: {func(n *Node, g *GPU) { n.Driver, g.Mode = "470.256.02", status.InMIG }, []string{"470.256.02", "R510"}},
	status.ResetBlocked: {func(_ *Node, g *GPU) {
		g.Mode, g.Clients = status.InMIG, []gpu.Client{{PID: 9, Name: "nv-hostengine"}}
	}, []string{"9 (nv-hostengine)", "systemctl stop"}},
	status.MPSElsewhere: {func(_ *Node, g *GPU) { g.Setup.Processes = append(g.Setup.Processes, daemon) },
		[]string{"1234 (nvidia-cuda-mps)", "echo quit"}},
	status.MPSDaemonElsewhere: {func(n *Node, _ *GPU) { n.MPS = []gpu.Client{daemon} }, []string{"the node", "1234 (nvidia-cuda-mps)"}},
	status.LimitElsewhere: {func(_ *Node, g *GPU) {
		g.Setup.Limits = []gpu.CgroupLimit{{Cgroup: "/kubepods", Limit: gpu.MemoryLimit{Bytes: 8 << 30, Guaranteed: 1 << 30}, Pods: true},
			{Cgroup: "/x", Limit: gpu.MemoryLimit{Bytes: ^uint64(0), Guaranteed: 2 << 20}}}
	}, []string{"/kubepods (at most 8192 MiB, 1024 MiB guaranteed, of pods), /x (2 MiB guaranteed)", "reboot"}},
	status.ECCPending: {func(_ *Node, g *GPU) { g.Setup.ECCPending = no() }, []string{"ECC off after", "nvidia-smi -i 3 -e 1"}},
	status.ECCOff: {func(_ *Node, g *GPU) { g.Setup.ECC, g.Setup.ECCPending = no(), no() },
		[]string{"ECC off", "nvidia-smi -i 3 -e 1"}},
	status.PersistenceOff: {func(_ *Node, g *GPU) { g.Setup.Persistence = no() }, []string{"nvidia-smi -i 3 -pm 1"}},
	status.PowerCapped: {func(_ *Node, g *GPU) { g.Setup.Power.Now = 350_500 },
		[]string{"350.5 W of 700 W", "nvidia-smi -i 3 -pl 700"}},
	status.ClocksLowered: {func(_ *Node, g *GPU) { g.Setup.Clock.Now = 1200 }, []string{"1200 of 1980 MHz", "nvidia-smi -i 3 -rgc"}},
	status.AccountingOn:  {func(_ *Node, g *GPU) { g.Setup.Accounting = yes() }, []string{"accounting", "nvidia-smi -i 3 -am 0"}},
	status.ModesetOn:     {func(n *Node, _ *GPU) { n.Modeset = true }, []string{"nvidia_drm", "modeset=0"}},
}

// A daemon of MPS whose process is not seen is found by its sockets; both are told together.
func TestMPSByItsSockets(t *testing.T) {
	n := untouched()
	n.MPSDirs = []string{"/tmp/nvidia-mps", "/a\nb", "/c", "/d", "/e"}
	got := Look(n)
	if len(got) != 1 || got[0].Reason != status.MPSDaemonElsewhere || !strings.Contains(got[0].Message, "in /tmp/nvidia-mps, /a?b, /c, /d and 1 more") {
		t.Errorf("%+v", got)
	}
	n.MPS = []gpu.Client{daemon}
	if got := Look(n); len(got) != 1 || !strings.Contains(got[0].Message, "1234 (nvidia-cuda-mps), and has sockets") {
		t.Errorf("%+v", got)
	}
}

// Each kind is found where it is, alone, with what to do; and a node with none of them says nothing.
func TestEachKindThereAndGone(t *testing.T) {
	if got := Look(untouched()); len(got) > 0 {
		t.Errorf("a node that nobody has changed has %+v", got)
	}
	if got := Look(Node{GPUs: []GPU{{Mode: status.Shared}, {Mode: status.InMIG, Device: gpu.Device{MIG: gpu.MIG{Capable: true}}}}}); len(got) > 0 {
		t.Errorf("a driver that reports nothing has %+v", got)
	}
	// A model that comes with ECC off is untouched too.
	n := untouched()
	n.GPUs[0].Setup.ECC, n.GPUs[0].Setup.ECCPending, n.GPUs[0].Setup.ECCDefault = no(), no(), no()
	if got := Look(n); len(got) > 0 {
		t.Errorf("a card that comes with ECC off has %+v", got)
	}
	for i := range kinds {
		code := kinds[i].code
		c, ok := changes[code]
		if !ok {
			t.Errorf("no node here has %s", code)
			continue
		}
		n := untouched()
		c.change(&n, &n.GPUs[0])
		got := Look(n)
		if len(got) != 1 || got[0].Reason != code || got[0].Do == "" || !strings.HasSuffix(got[0].Message, got[0].Do) {
			t.Errorf("%s: found %+v", code, got)
			continue
		}
		if want := "GPU-3"; kinds[i].ofNode && got[0].Subject != "" || !kinds[i].ofNode && got[0].Subject != want {
			t.Errorf("%s: the subject is %q", code, got[0].Subject)
		}
		for _, word := range c.says {
			if !strings.Contains(got[0].Message, word) {
				t.Errorf("%s: the message lacks %q: %s", code, word, got[0].Message)
			}
		}
	}
	if len(changes) != len(kinds) {
		t.Errorf("%d kinds, and nodes for %d", len(kinds), len(changes))
	}
}

// What matters for which layout: the types of conditions by mode, in the order unset, off, whole, shared, mig, dynamic.
func TestWhatMattersForWhichLayout(t *testing.T) {
	modes := []status.Mode{status.Unset, status.Off, status.Whole, status.Shared, status.InMIG, status.Dynamic}
	const remark = status.Noted
	want := map[status.Reason][]status.Type{
		status.ComputeModeSet: {remark, remark, status.Failed, status.Failed, remark, status.Failed},
		status.RecoveryDue:    {remark, remark, status.Unhealthy, status.Unhealthy, status.Unhealthy, status.Unhealthy},
		status.FabricNotReady: {remark, remark, status.Unhealthy, status.Unhealthy, status.Unhealthy, status.Unhealthy},
		status.DriverTooOld:   {remark, remark, remark, remark, status.Refused, status.Refused},
		status.ResetBlocked:   {"", "", "", "", status.Blocked, status.Blocked},
	}
	for code, c := range changes {
		for i, mode := range modes {
			n := untouched()
			c.change(&n, &n.GPUs[0])
			n.GPUs[0].Mode = mode
			var got status.Type
			if list := Look(n); len(list) > 0 {
				got = list[0].Type
			}
			expected := remark
			if of, ok := want[code]; ok {
				expected = of[i]
			}
			if got != expected {
				t.Errorf("%s with mode %q: %q, want %q", code, mode, got, expected)
			}
		}
	}
}

func TestPutRight(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Node, *GPU)
		want   bool
	}{
		"nobody has it":                {func(*Node, *GPU) {}, true},
		"old exclusive mode":           {func(_ *Node, g *GPU) { g.Setup.Compute = gpu.ComputeExclusiveThread }, true},
		"prohibited":                   {func(_ *Node, g *GPU) { g.Setup.Compute = gpu.ComputeProhibited }, true},
		"a whole GPU":                  {func(_ *Node, g *GPU) { g.Mode = status.Whole }, true},
		"a process has it":             {func(_ *Node, g *GPU) { g.Owners = []gpu.Client{{PID: 42}} }, false},
		"a daemon without clients":     {func(n *Node, _ *GPU) { n.MPS = []gpu.Client{daemon} }, false},
		"the mode is as it should be":  {func(_ *Node, g *GPU) { g.Setup.Compute = gpu.ComputeDefault }, false},
		"the mode is not known":        {func(_ *Node, g *GPU) { g.Setup.Compute = gpu.ComputeUnknown }, false},
		"the partition leaves it off":  {func(_ *Node, g *GPU) { g.Mode = status.Off }, false},
		"no partition is in force yet": {func(_ *Node, g *GPU) { g.Mode = status.Unset }, false},
		"instances have it":            {func(_ *Node, g *GPU) { g.Mode = status.InMIG }, false},
	} {
		n := untouched()
		n.GPUs[0].Setup.Compute = gpu.ComputeExclusiveProcess
		c.change(&n, &n.GPUs[0])
		if got := PutRight(&n.GPUs[0], n.MPS); got != c.want {
			t.Errorf("%s: put right is %v, want %v", name, got, c.want)
		}
	}
}

// Processes and the driver choose texts: none of them makes a message long, or writes to a terminal.
func TestTextsAreBounded(t *testing.T) {
	long := strings.Repeat("\x1b[2J", 1000)
	n := untouched()
	g := &n.GPUs[0]
	for pid := range 10_000 {
		g.Owners = append(g.Owners, gpu.Client{PID: pid + 1, Name: long})
		n.MPS = append(n.MPS, gpu.Client{PID: pid + 1, Name: "nvidia-cuda-mps" + long})
	}
	g.Setup.Processes, g.Clients, g.Mode = n.MPS, n.MPS, status.InMIG
	g.Setup.Compute, g.Setup.Recovery, g.Setup.Fabric = gpu.ComputeProhibited, gpu.Recovery(long), gpu.FabricState(long)
	n.Driver = "470." + long
	got := Look(n)
	if len(got) < 7 {
		t.Fatalf("found %d", len(got))
	}
	for _, f := range got {
		if len(f.Message) > brief.Message || strings.Contains(f.Message, "\x1b") {
			t.Errorf("%s: %d bytes: %q", f.Reason, len(f.Message), f.Message)
		}
	}
}

// The order does not depend on the order in which processes were read.
func TestTheGravestComesFirst(t *testing.T) {
	n := untouched()
	for _, code := range []status.Reason{status.ModesetOn, status.PowerCapped, status.FabricNotReady, status.ComputeModeSet} {
		changes[code].change(&n, &n.GPUs[0])
	}
	var got []status.Reason
	for _, f := range Look(n) {
		got = append(got, f.Reason)
	}
	want := []status.Reason{status.ComputeModeSet, status.FabricNotReady, status.PowerCapped, status.ModesetOn}
	if !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
}
