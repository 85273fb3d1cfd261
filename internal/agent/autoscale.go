// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// usable has the facts that decide whether pods that ask for GPUs can be sent to the node.
type usable struct {
	// absent is why the driver cannot be used, zero if it can.
	absent status.Cause
	// began is when this process finished its first round. offered is true once the kubelet has
	// received the offer since then.
	began   time.Time
	offered bool
}

// follow takes over what stays from the last round.
func (u *usable) follow(old usable, delivered bool, now time.Time) {
	if u.began = old.began; u.began.IsZero() {
		u.began = now
	}
	u.offered = old.offered || delivered
}

// delivered reports whether the kubelet has received all that is on offer.
func delivered(plugins Plugins, c remarks) bool {
	for _, s := range plugins.Status() {
		if !s.Registered {
			return false
		}
	}
	_, _, missing := c.unregistered()
	return !missing
}

// readyCondition returns the condition GPUReady: whether pods that ask for GPUs can be sent to the
// node. It is for controllers that turn conditions into taints. A node whose GPUs are all in use,
// cordoned or being changed is ready. So is one whose GPUs are all off or another owner's: no pod
// that asks for this agent's devices would come, and a taint would keep the others away.
//
// The message counts the GPUs that are offered, and gives the reason for each of the others. The reason of a node
// that is ready and offers no GPU is that of its first one.
//
// known is false while this process starts, for up to silentFor. Then the condition of the last
// process stays, or a taint would come and go with every update of the agent.
func readyCondition(domain string, snap *Snapshot, now time.Time) (c agentkube.Condition, known bool) {
	c = agentkube.Condition{Type: domain + "/" + ReadyCondition, Status: agentkube.False}
	say := func(why status.Reason, format string, args ...any) {
		c.Reason, c.Message = string(why), fmt.Sprintf(format, args...)
	}
	well, given, offered := 0, 0, 0
	var none []string
	var lacks status.Reason // why a GPU that is to have something has nothing
	var first status.Reason // why the first healthy GPU that is not offered is not
	for i := range snap.hardware.Inventory.GPUs {
		d := &snap.hardware.Inventory.GPUs[i]
		now := snap.notOffered(d)
		if now == (status.Cause{}) {
			offered++
		} else {
			text := now.Message
			if !strings.HasPrefix(text, d.Name()) {
				text = fmt.Sprintf("GPU %d: %s", d.Index, text)
			}
			none = append(none, text)
		}
		if snap.sick(d.UUID) {
			continue
		}
		well++
		first = cmp.Or(first, now.Reason)
		why := snap.offersNothing(d.UUID)
		if why == (status.Cause{}) || snap.changes(d.UUID) {
			given++
		} else if why.Reason != status.NotOffered && why.Reason != status.OtherOwner {
			lacks = cmp.Or(lacks, why.Reason)
		}
	}
	switch all := len(snap.hardware.Inventory.GPUs); {
	case snap.usable.absent != (status.Cause{}) && snap.hardware.Hangs == "":
		say(snap.usable.absent.Reason, "%s", snap.usable.absent.Message)
	case !snap.usable.offered:
		say(status.Starting, "%s", cmp.Or(snap.Missing, "the kubelet does not have the node's devices yet"))
		if snap.Outcome.State == Invalid {
			c.Reason = string(snap.Outcome.Reason)
		}
		return c, now.Sub(snap.usable.began) >= silentFor
	case all == 0:
		say(status.GPUMissing, "the driver has no GPUs")
	case well == 0:
		say(status.GPUUnhealthy, "all %d GPUs are unhealthy", all)
	case given == 0 && lacks != "":
		say(lacks, "none of %d GPUs is offered; %s", all, brief.List(none, mostNamed))
	default:
		c.Status = agentkube.True
		why := status.Offered
		if offered == 0 {
			why = first
		}
		say(why, "%s", sentences(fmt.Sprintf("offered: %d of %d GPUs", offered, all), brief.List(none, mostNamed)))
	}
	return c, true
}

// mostNamed is the number of GPUs whose reasons a condition names. A node has up to 16, and most
// have the same reason.
const mostNamed = 4

// offersNothing returns why a GPU has nothing that a pod could get if the GPU were idle; zero if it
// has something. It ignores faults, cordons and holders.
func (s *Snapshot) offersNothing(u gpu.UUID) (none status.Cause) {
	layout := s.shape.Layouts[u]
	if layout.Offers && layout.N > 0 && s.shape.Others[u] == "" {
		return none
	}
	held := []status.Type{status.Failed, status.Refused, status.Blocked, status.Pending}
	for _, c := range s.Conditions { // the gravest first
		if c.Subject == string(u) && slices.Contains(held, c.Type) {
			return c.Cause
		}
	}
	switch {
	case s.shape.Others[u] != "":
		return status.Why(status.OtherOwner, "another program gives the GPU out: %s", s.shape.Others[u])
	case !layout.Known:
		return status.Why(status.PartitionUnset, "no partition is in force")
	default:
		return status.Why(status.NotOffered, "the node's partition does not offer it")
	}
}

// notOffered returns why new pods can get nothing of a GPU now, even if it had no holders; zero if they
// can get something.
func (s *Snapshot) notOffered(d *gpu.Device) status.Cause {
	for _, v := range s.hardware.Verdicts {
		if v.GPU == d.UUID && v.GI < 0 {
			return status.Why(status.GPUUnhealthy, "%s", v.Reason)
		}
	}
	if d.Gone {
		return status.Why(status.GPUUnhealthy, "the driver no longer has it")
	}
	if why := s.offersNothing(d.UUID); why != (status.Cause{}) {
		return why
	}
	if s.cordoned(d.UUID) {
		return status.Why(status.GPUCordoned, "an operator keeps new pods off the GPU")
	}
	layout := s.shape.Layouts[d.UUID]
	withdrawn := s.shape.Drained[d.UUID]
	if layout.InMIG() && !layout.Dynamic { // those placements stay that the change keeps
		withdrawn = !slices.ContainsFunc(layout.Placements, func(p mig.Placement) bool {
			return s.shape.Leaving[d.UUID][p] == (status.Cause{}) &&
				s.shape.Failing[mig.Place{GPU: d.UUID, Placement: p}] == (status.Cause{})
		})
	}
	if !withdrawn {
		return status.Cause{}
	}
	for _, c := range s.Conditions {
		if c.Subject == string(d.UUID) && (c.Type == status.Blocked || c.Type == status.Pending) {
			return c.Cause
		}
	}
	return status.Why(status.GPUChange, "what it has is withdrawn")
}

// cordoned reports whether an operator keeps new pods off a GPU.
func (s *Snapshot) cordoned(u gpu.UUID) bool {
	return slices.ContainsFunc(s.Conditions, func(c status.Condition) bool {
		return c.Reason == status.GPUCordoned && c.Subject == string(u)
	})
}

// changes reports whether a GPU is being changed now, or waits only for the kubelet's lists. In
// both cases what it is to offer comes without further action.
func (s *Snapshot) changes(u gpu.UUID) bool {
	return s.shape.Work[u] != "" || slices.ContainsFunc(s.Conditions, func(c status.Condition) bool {
		return c.Subject == string(u) && c.Type == status.Pending &&
			(c.Reason == status.GPUChange || c.Reason == status.ListsFull)
	})
}

// sick reports whether a GPU has nothing to give because of its faults.
func (s *Snapshot) sick(u gpu.UUID) bool {
	for _, v := range s.hardware.Verdicts {
		if v.GPU == u && v.GI < 0 {
			return true
		}
	}
	d := s.hardware.Inventory.ByUUID(u)
	return d == nil || d.Gone
}

// removeStartupTaint removes the startup taint once the node is ready and the Node shows the
// resources. The kubelet writes these some seconds after it has received the devices. If the taint
// went earlier, autoscalers would take the node for one that waiting GPU pods do not fit on.
func (h *announcer) removeStartupTaint(ctx context.Context, ready agentkube.Condition) error {
	node := h.node.Load()
	var err error
	if node.StartupTaint {
		if ready.Status != agentkube.True {
			return nil
		}
		err = h.cluster.RemoveStartupTaint(ctx, givenOut(h.offer()))
	}
	var why *status.Cause
	if err != nil {
		c := status.Why(status.StartupTaintKept, "%v", err)
		why = &c
	}
	if was := h.kept.Swap(why); (was == nil) != (why == nil) {
		if err != nil {
			h.log.Error("the node keeps the taint that it was registered with", "err", err)
		}
		h.wake()
	}
	return err
}

// givenOut returns the resources with devices that the kubelet can give out.
func givenOut(offer *deviceplugin.Offer) (names []string) {
	for _, of := range offer.Resources {
		if slices.ContainsFunc(of.Devices, func(d deviceplugin.Device) bool { return d.Healthy && !d.Leaving }) {
			names = append(names, of.Name)
		}
	}
	return names
}

// conditions returns a condition if the startup taint could not be removed.
func (h *announcer) conditions() []status.Condition {
	if why := h.kept.Load(); why != nil {
		return []status.Condition{why.Condition(status.Noted, "")}
	}
	return nil
}

// holdAnnotation returns the annotation that keeps Cluster Autoscaler from removing the node, if
// asked and while pods have something of its GPUs. Cluster Autoscaler does not count such devices,
// and would take a full node for an idle one.
func (s *Snapshot) holdAnnotation(asked bool) map[string]string {
	if !asked || !s.inUse {
		return nil
	}
	return map[string]string{HoldAnnotation: "true"}
}
