// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// adoptFiles takes over the claims of a predecessor from their CDI files.
func (a *Agent) adoptFiles() {
	keys, err := a.files.List()
	if err != nil {
		a.log.Warn("cannot list the CDI files of earlier claims; the kubelet's word must do", "err", err)
		return
	}
	for _, key := range keys {
		spec, err := a.files.Read(key)
		if err == nil {
			var resource string
			var ids []string
			if resource, ids, err = cdi.ReadRecord(spec, a.opts.Domain); err == nil {
				err = a.desk.Adopt(resource, ids)
			}
		}
		if err != nil {
			a.log.Warn("cannot take a claim over from its CDI file; it is made again when its container starts again", "key", key, "err", err)
		}
	}
}

// reconcile asks the kubelet who holds what.
func (a *Agent) reconcile(ctx context.Context) error {
	asked := time.Now()
	a.usedAt = asked
	cctx, cancel := context.WithTimeout(ctx, kubeletPatience)
	defer cancel()
	l, err := a.kubelet.List(cctx)
	if err != nil {
		if len(a.desk.Claims()) == 0 {
			return nil // nobody to judge; a kubelet that is away is its own news
		}
		return fmt.Errorf("ask the kubelet who holds devices (claims stay as they are): %w", err)
	}
	var ours []desk.Holding
	for _, h := range l.Holdings {
		if _, ok := a.names.kind(h.Resource); ok {
			ours = append(ours, desk.Holding{
				Holder:   desk.Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container},
				Resource: h.Resource, IDs: h.IDs,
			})
		}
	}
	trusted := l.Has(a.opts.Pod.Namespace, a.opts.Pod.Name)
	if a.opts.Pod == (node.PodName{}) {
		trusted = len(l.Pods) > 0
	}
	ended := a.desk.Reconcile(desk.Testimony{Asked: asked, Listed: ours, Trusted: trusted, Runtime: true})
	for _, c := range ended {
		a.swept = false
		a.log.Info("claim ended", "claim", c.Key, "resource", c.Resource, "devices", len(c.IDs), "pod", c.Holder.String())
	}
	return nil
}

// writeClaims writes the CDI file of every claim that has none yet, and opens
// its gate. The gate of a claim on a faulty GPU stays shut.
func (a *Agent) writeClaims(claims []desk.Claim) error {
	if a.parts == nil {
		return nil
	}
	var errs []error
	for i := range claims {
		c := &claims[i]
		if c.Ready || slices.ContainsFunc(c.GPUs, a.faulty) {
			continue
		}
		if err := a.writeClaim(c); err != nil {
			errs = append(errs, fmt.Errorf("write the CDI file of claim %s (%s): %w", c.Key, c.Holder, err))
			continue
		}
		a.desk.SetReady(c)
	}
	return errors.Join(errs...)
}

func (a *Agent) writeClaim(c *desk.Claim) error {
	spec, err := cdi.Spec(a.opts.Domain, c.Key, *a.parts, c.GPUs)
	if err != nil {
		return err
	}
	if err := cdi.Record(spec, a.opts.Domain, c.Resource, c.IDs); err != nil {
		return err
	}
	return a.files.Write(c.Key, spec)
}

func (a *Agent) faulty(u gpu.UUID) bool {
	d := a.inv.ByUUID(u)
	return d == nil || d.Fault != ""
}

// sweep removes the CDI files that no claim has, once after claims ended.
func (a *Agent) sweep() error {
	if a.swept {
		return nil
	}
	keys, err := a.files.List()
	if err != nil {
		return err
	}
	claims := a.desk.Claims()
	var errs []error
	for _, key := range keys {
		if _, live := slices.BinarySearchFunc(claims, key, func(c desk.Claim, k string) int { return strings.Compare(c.Key, k) }); !live {
			errs = append(errs, a.files.Remove(key))
		}
	}
	err = errors.Join(errs...)
	a.swept = err == nil
	return err
}
