// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// claims is the front-end of the GPUs that are offered through DRA. Nothing of it runs
// before there is such a GPU, or an allocation by way of it. All of it may be used by
// several goroutines. Use newClaims.
type claims struct {
	front *dra.FrontEnd // nil where there is no API server
	serve func(*dra.FrontEnd) (DRADriver, error)
	caps  memcap.Level
	begin sync.Once
	begun chan struct{} // closed when there is something to do
}

func newClaims(o *Options, w *Worlds, l *ledger.Ledger, granted func(*ledger.Allocation), wake func()) *claims {
	c := &claims{caps: memcap.API, begun: make(chan struct{})}
	if o.OpenCaps {
		c.caps = memcap.Watchdog
	}
	if w.DRA != nil {
		c.serve = w.DRA.Serve
		c.front = dra.New(dra.Options{Domain: o.Domain, Driver: "gpus." + o.Domain, Node: o.Node, Ledger: l, API: w.DRA.API, Kubelet: w.DRA.Kubelet, Runtime: w.Runtime,
			Granted: granted, Wake: wake, Now: time.Now, Log: o.Log})
	}
	return c
}

// inUse reports whether there is, or has been, anything through DRA.
func (c *claims) inUse() bool {
	select {
	case <-c.begun:
		return true
	default:
		return false
	}
}

// Claims reports whether GPUs are, or have been, offered through DRA.
func (a *Agent) Claims() bool { return a.claims.inUse() }

// run serves the kubelet and publishes, once there is something to publish.
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
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.front.Run(ctx) })
	g.Go(func() error { return server.Run(ctx) })
	return g.Wait()
}

// found takes over an allocation from its record.
func (c *claims) found(id string, r ledger.Record, taken time.Time) error {
	c.begin.Do(func() { close(c.begun) })
	return c.front.Found(id, r, taken)
}

// publish says what the loop says to the other front-end.
func (c *claims) publish(in *deviceplugin.Input) {
	if c.front == nil {
		return
	}
	if !c.inUse() {
		if !offers(in.Changes, ledger.DRA) {
			return
		}
		c.begin.Do(func() { close(c.begun) })
	}
	c.front.Publish(dra.Offer{Inventory: in.Inventory, Changes: in.Changes, Changing: in.Changing, Cards: in.Cards, Failing: in.Failing, Drain: in.Drain,
		Others: in.Others, Closed: in.Closed, Guarantee: string(c.caps)})
}

// offers reports whether a GPU is offered through a front-end.
func offers(changes *plan.Changes, through ledger.FrontEnd) bool {
	for _, l := range changes.Layouts {
		if l.Through(through) {
			return true
		}
	}
	return false
}

// offered reports whether something of a GPU is in the node's slices.
func (c *claims) offered(u gpu.UUID) bool { return c.inUse() && c.front.Offers(u) }

func (c *claims) setFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	if c.front != nil {
		c.front.SetFaults(gpus, placements)
	}
}

// settlePatience bounds the wait for the API server before something is taken away.
const settlePatience = 2 * time.Second

// settle makes sure that whoever was promised something through DRA that is withdrawn now is
// in the ledger.
func (c *claims) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settlePatience)
	defer cancel()
	if err := c.front.Settle(ctx); err != nil {
		return status.Because(status.HoldersUnknown, fmt.Errorf("nothing that is offered through DRA is taken away before it is known who was promised it: %w", err))
	}
	return nil
}

// observe says which allocations containers have.
func (c *claims) observe(holders map[string]ledger.Holder, asked time.Time) {
	if c.inUse() {
		c.front.Observe(holders, asked)
	}
}
