// SPDX-License-Identifier: Apache-2.0

package found

import (
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// kind is a kind of finding.
type kind struct {
	code status.Reason
	// ofNode is true if the finding is the node's. Then the functions get nil for the GPU.
	ofNode bool
	// find returns what was found, as the end of a sentence about the GPU or the node; empty if
	// there is nothing.
	find func(*Node, *GPU) string
	// means is what follows from it.
	means string
	// matters maps the layouts that it concerns to the type of the condition. For all others it is a remark.
	matters map[status.Mode]status.Type
	// do returns what ends it.
	do func(*GPU) string
}

// Layouts that findings concern.
var (
	containers = []status.Mode{status.Whole, status.Shared, status.Dynamic}
	inMIG      = []status.Mode{status.InMIG, status.Dynamic}
	offered    = []status.Mode{status.Whole, status.Shared, status.InMIG, status.Dynamic}
)

// firstWithMIG is the first branch of the driver that reports MIG profiles in the form that the
// agent reads.
const firstWithMIG = 510

// kinds are all kinds, the gravest first.
var kinds = []kind{
	{
		code: status.ComputeModeSet,
		find: func(n *Node, g *GPU) string {
			if !computeModeSet(g) {
				return ""
			}
			what := "is in compute mode " + text(g.Setup.Compute)
			if held := owners(g, n.MPS); len(held) > 0 {
				what += ", and these processes have it: " + processes(held)
			}
			if g.Refused != "" {
				what += ", and the driver does not let the agent change it (" + text(g.Refused) + ")"
			}
			return what
		},
		means: "in EXCLUSIVE_PROCESS, CUDA refuses each process but the first one, and in PROHIBITED all of them " +
			"(whole and shared GPUs need DEFAULT)",
		matters: as(status.Failed, containers),
		do:      smi("end these processes, if there are any, and run: nvidia-smi -i %d -c DEFAULT"),
	},
	{
		code: status.RecoveryDue,
		find: func(_ *Node, g *GPU) string {
			if !g.Setup.Recovery.Needed() {
				return ""
			}
			return "needs a recovery (" + text(g.Setup.Recovery) + ")"
		},
		means:   "the driver may refuse new work until then",
		matters: as(status.Unhealthy, offered),
		do:      smi("end its processes and run: nvidia-smi -i %d --gpu-reset; or reboot the node"),
	},
	{
		code: status.FabricNotReady,
		find: func(_ *Node, g *GPU) string {
			if s := g.Setup.Fabric; s != gpu.FabricNone && s != gpu.FabricCompleted {
				return "has not joined its NVLink fabric (" + text(s) + ")"
			}
			return ""
		},
		means:   "CUDA fails with error 802 (system not yet initialized)",
		matters: as(status.Unhealthy, offered),
		do:      always("start NVIDIA's fabric manager in the driver's version: systemctl restart nvidia-fabricmanager"),
	},
	{
		code: status.DriverTooOld,
		find: func(n *Node, g *GPU) string {
			word, _, _ := strings.Cut(n.Driver, ".")
			if branch, err := strconv.Atoi(word); err != nil || branch >= firstWithMIG || !g.Device.MIG.Capable {
				return ""
			}
			return "has driver " + text(n.Driver)
		},
		means:   "MIG layouts need driver R510 or later",
		matters: as(status.Refused, inMIG),
		do:      always("install driver R510 or later"),
	},
	{
		code: status.ResetBlocked,
		find: func(n *Node, g *GPU) string {
			if !Resets(g) || len(g.Clients) == 0 {
				return ""
			}
			return "is open in these processes: " + processes(g.Clients)
		},
		means:   "MIG mode has to be switched on, and if the card needs a reset for that, each of them prevents it",
		matters: as(status.Blocked, inMIG),
		do:      always("end them first; of NVIDIA's services: systemctl stop nvidia-dcgm nvsm nvidia-persistenced"),
	},
	{
		code: status.MPSElsewhere,
		find: func(n *Node, g *GPU) string {
			var on []gpu.Client
			for _, c := range g.Setup.Processes {
				if IsMPS(c) {
					on = append(on, c)
				}
			}
			if len(on) == 0 {
				return ""
			}
			return "has servers of MPS that are not the agent's: " + processes(on)
		},
		means: "their clients compute beside the agent's containers, and one client's fault can end the others",
		do: always("end the daemon that started them: " +
			"echo quit | CUDA_MPS_PIPE_DIRECTORY=DIRECTORY nvidia-cuda-mps-control"),
	},
	{
		code:   status.MPSDaemonElsewhere,
		ofNode: true,
		find: func(n *Node, _ *GPU) string {
			var what []string
			if len(n.MPS) > 0 {
				what = append(what, "runs programs of MPS that are not the agent's: "+processes(n.MPS))
			}
			if len(n.MPSDirs) > 0 {
				dirs := make([]string, len(n.MPSDirs)) // as of processes
				for i, dir := range n.MPSDirs[:min(len(dirs), mostNamed)] {
					dirs[i] = text(dir)
				}
				what = append(what, "has sockets of MPS that are not the agent's, in "+brief.List(dirs, mostNamed))
			}
			return strings.Join(what, ", and ")
		},
		means: "such a daemon may set the GPUs' compute mode to EXCLUSIVE_PROCESS",
		do: always("take the program that started them off the node, or run: " +
			"echo quit | CUDA_MPS_PIPE_DIRECTORY=DIRECTORY nvidia-cuda-mps-control"),
	},
	{
		code: status.LimitElsewhere,
		find: func(_ *Node, g *GPU) string {
			names := make([]string, len(g.Setup.Limits)) // as of processes
			for i, l := range g.Setup.Limits[:min(len(names), mostNamed)] {
				names[i] = fmt.Sprintf("%s (%s)", text(l.Cgroup), limitWords(l))
			}
			if len(names) == 0 {
				return ""
			}
			return "has memory limits in the driver that are not the agent's: " + brief.List(names, mostNamed)
		},
		means: "the processes of such a cgroup have no more together, whatever each container was granted, " +
			"and what is guaranteed to them others cannot have",
		do: always("take the program that set them off the node; the end of a cgroup ends its limit, " +
			"and so does a reboot"),
	},
	{
		code: status.ECCPending,
		find: func(_ *Node, g *GPU) string {
			on, next := g.Setup.ECC, g.Setup.ECCPending
			if on == nil || next == nil || *on == *next {
				return ""
			}
			return "will have ECC " + word(*next) + " after its next reset"
		},
		means: "the size of its memory may change with that, and a change of its MIG mode may bring it about",
		do: func(g *GPU) string {
			if g.Setup.ECC != nil && *g.Setup.ECC {
				return smi("nvidia-smi -i %d -e 1")(g)
			}
			return smi("nvidia-smi -i %d -e 0")(g)
		},
	},
	{
		code: status.ECCOff,
		find: func(_ *Node, g *GPU) string {
			on, usual := g.Setup.ECC, g.Setup.ECCDefault
			if on == nil || *on || usual != nil && !*usual { // some models come with ECC off
				return ""
			}
			return "has ECC off"
		},
		means: "errors of its memory are neither corrected nor seen",
		do:    smi("nvidia-smi -i %d -e 1, and then a reset"),
	},
	{
		code:  status.PersistenceOff,
		find:  off("has persistence mode off", func(s *gpu.Setup) *bool { return s.Persistence }),
		means: "when the last program closes it, the driver forgets settings, and the next start takes seconds longer",
		do:    smi("start nvidia-persistenced, or run: nvidia-smi -i %d -pm 1"),
	},
	{
		code: status.PowerCapped,
		find: func(_ *Node, g *GPU) string {
			if p := g.Setup.Power; p.Lowered() {
				return fmt.Sprintf("is limited to %s of %s", watts(p.Now), watts(p.Default))
			}
			return ""
		},
		means: "it computes more slowly than others of its model",
		do: func(g *GPU) string {
			return fmt.Sprintf("nvidia-smi -i %d -pl %d", g.Device.Index, g.Setup.Power.Default/1000)
		},
	},
	{
		code: status.ClocksLowered,
		find: func(_ *Node, g *GPU) string {
			switch c := g.Setup.Clock; {
			case c.Lowered():
				return fmt.Sprintf("has its clock set to %d of %d MHz", c.Now, c.Default)
			case g.Setup.ClockHeld:
				return "is slowed down by a clock that was set"
			}
			return ""
		},
		means: "it computes more slowly than others of its model",
		do:    smi("nvidia-smi -i %[1]d -rac; nvidia-smi -i %[1]d -rgc"),
	},
	{
		code: status.AccountingOn,
		find: func(_ *Node, g *GPU) string {
			if on := g.Setup.Accounting; on == nil || !*on {
				return ""
			}
			return "keeps an account of ended processes (accounting mode)"
		},
		means: "each tenant that can ask the driver sees the PIDs and the figures of the others",
		do:    smi("nvidia-smi -i %d -am 0"),
	},
	{
		code:   status.ModesetOn,
		ofNode: true,
		find: func(n *Node, _ *GPU) string {
			if !n.Modeset {
				return ""
			}
			return "has loaded nvidia_drm with modeset=1"
		},
		means: "the kernel itself holds the GPUs, so that they may not be reset and the driver not be unloaded",
		do:    always("echo options nvidia_drm modeset=0 >/etc/modprobe.d/nvidia-drm.conf, and then a reboot"),
	},
}

// as returns the same type for several layouts.
func as(t status.Type, modes []status.Mode) map[status.Mode]status.Type {
	out := map[status.Mode]status.Type{}
	for _, m := range modes {
		out[m] = t
	}
	return out
}

// always returns a kind's do that is the same for each GPU.
func always(do string) func(*GPU) string { return func(*GPU) string { return do } }

// smi returns a kind's do whose format gets the GPU's index, which is nvidia-smi's.
func smi(format string) func(*GPU) string {
	return func(g *GPU) string { return fmt.Sprintf(format, g.Device.Index) }
}

// off returns a kind's find for a setting that is known to be off.
func off(what string, of func(*gpu.Setup) *bool) func(*Node, *GPU) string {
	return func(_ *Node, g *GPU) string {
		if on := of(&g.Setup); on == nil || *on {
			return ""
		}
		return what
	}
}

func word(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// limitWords says what a limit is, and whether pods are below it.
func limitWords(l gpu.CgroupLimit) string {
	var words []string
	if l.Limit.Bytes != ^uint64(0) {
		words = append(words, fmt.Sprintf("at most %d MiB", l.Limit.Bytes>>20))
	}
	if l.Limit.Guaranteed > 0 {
		words = append(words, fmt.Sprintf("%d MiB guaranteed", l.Limit.Guaranteed>>20))
	}
	if l.Pods {
		words = append(words, "of pods")
	}
	return strings.Join(words, ", ")
}

// watts writes milliwatts as watts.
func watts(milli uint32) string { return strconv.FormatFloat(float64(milli)/1000, 'f', -1, 64) + " W" }
