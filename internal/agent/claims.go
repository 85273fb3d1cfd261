// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// claims is the front-end for GPUs that are offered through DRA. It runs nothing before there is
// such a GPU or such an allocation. Any goroutine may use it. Use newClaims.
type claims struct {
	front *dra.FrontEnd // nil if there is no API server
	serve func(*dra.FrontEnd) (DRADriver, error)
	log   *slog.Logger
	caps  memcap.Level
	begin sync.Once
	begun chan struct{} // closed when there is something to do
	// driver is nil before the front-end is served.
	driver atomic.Pointer[DRADriver]
}

func newClaims(o *Options, w *Worlds, l *ledger.Ledger, granted func(*ledger.Allocation), wake func()) *claims {
	c := &claims{log: o.Log, caps: memcap.API, begun: make(chan struct{})}
	if o.OpenCaps {
		c.caps = memcap.Watchdog
	}
	if w.DRA != nil {
		c.serve = w.DRA.Serve
		c.front = dra.New(dra.Options{Domain: o.Domain, Driver: dra.DriverName(o.Domain), Node: o.Node, Ledger: l,
			API: w.DRA.API, Kubelet: w.DRA.Kubelet, Runtime: w.Runtime,
			Fault: o.FaultTaint, Granted: granted, RefusedClaim: w.Account.refusedClaim, Wake: wake, Now: time.Now,
			Held: func(id string, u gpu.UUID) compute.Held { return heldIn(w.containers(), id, u) },
			Log:  o.Log, Listing: w.Kubelet.List, Evict: w.Account.evicting(w.DRA.Evict),
			Tell: func(p workload.Pod, kind agentkube.EventType, reason, message string) {
				if w.Cluster != nil {
					w.Cluster.Event(p, kind, reason, message)
				}
			}})
	}
	return c
}

// start starts everything that run runs.
func (c *claims) start() { c.begin.Do(func() { close(c.begun) }) }

// inUse reports whether there is something through DRA, or has been.
func (c *claims) inUse() bool {
	select {
	case <-c.begun:
		return true
	default:
		return false
	}
}

// run waits for start, and then serves the kubelet and publishes until ctx ends.
func (c *claims) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-c.begun:
	}
	server, err := c.serve(c.front)
	if err != nil {
		return err
	}
	c.driver.Store(&server)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.front.Run(ctx) })
	g.Go(func() error { return server.Run(ctx) })
	return g.Wait()
}

// leavePatience bounds what is done for claims at the end.
const leavePatience = 3 * time.Second

// leave stops the scheduler from allocating devices of this node, and waits for the claims that it
// has allocated already. A pod whose claim is not prepared in time waits for a minute or more.
func (c *claims) leave(ctx context.Context) {
	if !c.inUse() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leavePatience)
	defer cancel()
	if err := c.front.Leave(ctx); err != nil {
		c.log.Warn("pods with claims that start before the next agent has started may wait for a minute or more",
			"err", err)
	}
}

// found takes over an allocation from its record.
func (c *claims) found(id string, r ledger.Record, given time.Time) error {
	c.start()
	return c.front.Found(id, r, given)
}

// publish passes the loop's offer to the DRA front-end. kept reports of a device whether the device
// plugin still serves its resource name. refused are the placements that the driver refuses.
func (c *claims) publish(in *deviceplugin.Input, kept func(dra.Device) bool, refused map[mig.Place]status.Cause) {
	if c.front == nil {
		return
	}
	if !c.inUse() {
		if !offersClaims(in.Changes.Layouts) {
			return
		}
		c.start()
	}
	fixed := map[gpu.UUID]bool{}
	for u, l := range in.Changes.Layouts {
		fixed[u] = l.InMIG() && !l.Dynamic && !in.OnDemand(u)
	}
	c.front.Publish(dra.Offer{Inventory: in.Inventory, Changes: in.Changes, Changing: in.Changing, Cards: in.Cards,
		Failing: in.Failing, Refused: refused, Fixed: fixed, Drain: in.Drain,
		Others: in.Others, Cordoned: in.Cordoned, Kept: kept, Closed: in.Closed, Daemons: in.Daemons, Guarantee: string(c.caps)})
}

// offersClaims reports whether a GPU is offered through DRA.
func offersClaims(layouts map[gpu.UUID]plan.Layout) bool {
	for _, l := range layouts {
		if l.Through(ledger.DRA) {
			return true
		}
	}
	return false
}

// offered reports whether something of a GPU is in the node's ResourceSlices.
func (c *claims) offered(u gpu.UUID) bool { return c.inUse() && c.front.Offers(u) }

func (c *claims) setFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	if c.front != nil {
		c.front.SetFaults(gpus, placements)
	}
}

// unregistered reports whether the kubelet has not registered the driver, since when, and why if
// that is known.
func (c *claims) unregistered() (since time.Time, why error, yes bool) {
	if d := c.driver.Load(); d != nil {
		s := (*d).Status()
		return s.Since, s.Err, !s.Registered && !s.Since.IsZero()
	}
	return time.Time{}, nil, false
}

// conditions returns the conditions of the driver: failures and remarks. A restart of the kubelet
// is no failure: that the driver is not registered is reported after silentFor, or at once if there
// is an error.
func (c *claims) conditions(now time.Time) (failed, noted []status.Condition) {
	if !c.inUse() {
		return nil, nil
	}
	for _, k := range c.front.Publisher().Conditions(now) {
		if k.Type == status.Failed {
			failed = append(failed, k)
		} else {
			noted = append(noted, k)
		}
	}
	if since, why, yes := c.unregistered(); yes && (why != nil || now.Sub(since) >= silentFor) {
		if why == nil {
			why = errors.New("the kubelet has not called it")
		}
		k := status.Why(status.NotRegistered, "the DRA driver %s is not registered with the kubelet: %v",
			c.front.Driver, why).Condition(status.Failed, c.front.Driver)
		k.Since = since
		failed = append(failed, k)
	}
	return failed, noted
}

// refused returns the claims that can never be prepared.
func (c *claims) refused() []status.Condition {
	if !c.inUse() {
		return nil
	}
	return c.front.Refused()
}

// settlePatience bounds the wait for the API server before something is taken away.
const settlePatience = 2 * time.Second

// settle makes sure that the ledger has all claims that were allocated devices which are now
// withdrawn. It returns the GPUs with devices that were allocated to a claim but that another
// holder still has.
func (c *claims) settle(ctx context.Context) (promised []gpu.UUID, err error) {
	ctx, cancel := context.WithTimeout(ctx, settlePatience)
	defer cancel()
	if promised, err = c.front.Settle(ctx); err != nil {
		return nil, status.Because(status.HoldersUnknown, fmt.Errorf("devices that are offered through DRA stay "+
			"until it is known which claims they were allocated to: %w", err))
	}
	return promised, nil
}

// observe passes on which containers have which allocations.
func (c *claims) observe(holders map[string][]ledger.Holder, asked time.Time) {
	if c.inUse() {
		c.front.Observe(holders, asked)
	}
}
