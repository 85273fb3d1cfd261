// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/meter"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// Account keeps the usage journal. The agent that it is given to tells it what happens. A nil
// Account ignores all of it.
type Account struct {
	Journal meter.Journal
	// Used returns what the watchdog last saw of each container. Sampled returns the same and asks
	// the driver for the present processes. Labels returns the labels of the node's pods, by UID;
	// nil if no labels are wanted. Keys are the wanted labels.
	Used    func() []status.Container
	Sampled func(context.Context, time.Time) []status.Container
	Labels  func(context.Context) (map[string]map[string]string, error)
	Keys    []string
	// IdleAfter is the time after which an unused grant is reported. Zero means never.
	IdleAfter time.Duration
	Version   string

	meter *meter.Meter
	// heard is true once the kubelet and the runtime have both answered who holds what.
	heard atomic.Bool
}

// begin connects the account to an agent.
func (c *Account) begin(l *ledger.Ledger, w *Worlds, latest func() *Snapshot, wake func(), log *slog.Logger) {
	if c == nil {
		return
	}
	o := meter.Options{Ledger: l, Journal: c.Journal, Used: c.Used, Sampled: c.Sampled, Labels: c.Labels,
		Keys: c.Keys, IdleAfter: c.IdleAfter, Version: c.Version,
		Inventory: func() *gpu.Inventory {
			if s := latest(); s.hardware.Answered {
				return s.hardware.Inventory
			}
			return &gpu.Inventory{} // a restored inventory lacks the sizes of MIG instances
		},
		Heard: c.heard.Load, Changed: wake, Now: time.Now, Log: log}
	if w.Cluster != nil {
		o.Tell = func(p workload.Pod, reason, message string) {
			w.Cluster.Event(p, agentkube.Normal, reason, message)
		}
	}
	c.meter = meter.New(o)
}

// run keeps the account until ctx ends.
func (c *Account) run(ctx context.Context) error { return c.meter.Run(ctx) }

// Usage returns the account for one scrape of the metrics.
func (c *Account) Usage() usage.Shown { return c.meter.Scraped() }

// note adds a record.
func (c *Account) note(r usage.Record) {
	if c != nil {
		c.meter.Note(r)
	}
}

// round is called at the end of each round. heard is Witnesses.Heard.
func (c *Account) round(heard bool) {
	if c != nil {
		c.heard.Store(heard)
		c.meter.Round()
	}
}

func (c *Account) conditions() []status.Condition {
	if c == nil {
		return nil
	}
	return c.meter.Conditions()
}

// refused records a request of the kubelet that the agent refused.
func (c *Account) refused(resource string, n int, ids []string, err error) {
	r := usage.Record{Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: resource, Count: n,
		Reason: status.CauseOf(err, status.NotOffered).Reason, Message: err.Error()}
	if len(ids) > 0 {
		u, placement, isPlacement := strings.Cut(ids[0], "::")
		if r.GPU = gpu.UUID(u); isPlacement && strings.Contains(placement, "@") {
			r.Placement = placement
		}
	}
	c.note(r)
}

// refusedClaim records a claim that can never be prepared.
func (c *Account) refusedClaim(claim *agentkube.Claim, why status.Cause) {
	r := usage.Record{Event: usage.Refused, FrontEnd: ledger.DRA, Reason: why.Reason,
		Message: "claim " + claim.Name + ": " + why.Message}
	if r.Namespace = claim.Namespace; len(claim.Pods) > 0 {
		r.Pod, r.UID = claim.Pods[0].Name, claim.Pods[0].UID
	}
	c.note(r)
}

// evicting returns an evict that also records the evicted pods; nil if evict is nil.
func (c *Account) evicting(evict func(context.Context, workload.Pod) error) func(context.Context, workload.Pod) error {
	if evict == nil {
		return nil
	}
	return func(ctx context.Context, p workload.Pod) error {
		err := evict(ctx, p)
		if err == nil {
			c.evicted(p, status.ClaimEnded, "its claim can never be prepared")
		}
		return err
	}
}

func (c *Account) evicted(p workload.Pod, why status.Reason, message string) {
	c.note(usage.Record{Event: usage.Evicted, Reason: why, Message: message,
		Holder: usage.Holder{Namespace: p.Namespace, Pod: p.Name, UID: p.UID}})
}

// killed records a container that the agent has ended.
func (c *Account) killed(k *node.Container, why status.Reason, message string) {
	c.note(usage.Record{Event: usage.Killed, Reason: why, Message: message,
		Holder: usage.Holder{Namespace: k.Namespace, Pod: k.Pod, UID: k.PodUID, Container: k.Name}})
}

// recordStep records a step of a change to a GPU's MIG mode or instances.
func (c *Account) recordStep(u gpu.UUID, s mig.Step, err error) {
	r := usage.Record{Event: usage.Cut, GPU: u, Op: string(s.Op)}
	if s.Placement != (mig.Placement{}) {
		r.Placement = s.Placement.String()
	}
	if err != nil {
		r.Reason, r.Message = status.CauseOf(err, status.GPUChangeFailed).Reason, err.Error()
	}
	c.note(r)
}

// laidOut records a GPU's new layout.
func (c *Account) laidOut(u gpu.UUID, to plan.Layout) {
	as := to.Mode()
	if to.InMIG() && !to.Dynamic {
		as = plan.Names(to.Placements)
	}
	c.note(usage.Record{Event: usage.Cut, GPU: u, Op: "layout", Placement: as})
}

// Offences passes the watchdog's actions against offences on to the metrics and the account.
type Offences struct {
	Metrics interface {
		Ended(kind memcap.Kind, after time.Duration)
		Evicted()
	}
	Account *Account
}

// Ended implements guard.Observer.
func (o Offences) Ended(e guard.End) {
	o.Metrics.Ended(e.Kind, e.After)
	why := status.CapExceeded
	if e.Kind == memcap.Intruder {
		why = status.Intruder
	}
	o.Account.note(usage.Record{Event: usage.Killed, GPU: e.GPU, Reason: why,
		Holder:  usage.Holder{Namespace: e.Pod.Namespace, Pod: e.Pod.Name, UID: e.Pod.UID, Container: e.Container},
		Message: status.Why(why, "it used %d MiB and could have %d", e.Used>>20, e.Cap>>20).Message})
}

// Evicted implements guard.Observer.
func (o Offences) Evicted(p workload.Pod, offences int) {
	o.Metrics.Evicted()
	why := status.Why(status.CapEvicted, "after %d offences within an hour", offences)
	o.Account.evicted(p, status.CapEvicted, why.Message)
}
