// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/plugin"
)

// offering has what the node offers through both front-ends. It belongs to the loop's goroutine,
// except setFaults.
type offering struct {
	names *deviceplugin.Names
	// drain is the opposite of Options.KeepOffering, and align is Options.Align.
	drain  bool
	align  deviceplugin.Alignment
	front  *deviceplugin.FrontEnd
	claims *claims
	served *served
	log    *slog.Logger
}

func newOffering(o *Options, w *Worlds, l *ledger.Ledger, granted func(*ledger.Allocation), wake func()) *offering {
	front := deviceplugin.New(l, time.Now)
	return &offering{names: deviceplugin.ResourceNames(o.ResourceDomain), drain: !o.KeepOffering, align: o.Align,
		log: o.Log, front: front, claims: newClaims(o, w, l, granted, wake),
		served: &served{plugins: w.Plugins, of: map[string]plugin.Source{},
			source: func(resource string) plugin.Source {
				return &deviceplugin.Source{Front: front, Domain: o.Domain, Resource: resource,
					Granted: granted, Refused: refusals(w)}
			}}}
}

// refusals returns what is called for each request that is refused. A spot pod that was refused since a guaranteed
// one was given its room a moment before is named in an Event of the Node: the kubelet tells no name.
func refusals(w *Worlds) func(resource string, n int, ids []string, err error) {
	return func(resource string, n int, ids []string, err error) {
		w.Account.refused(resource, n, ids, err)
		if why := status.CauseOf(err, status.NotOffered); why.Reason == status.SpotRefused && w.Cluster != nil {
			w.Cluster.Event(workload.Pod{}, agentkube.Normal, string(why.Reason),
				fmt.Sprintf("a pod that asks for %d of %s is refused: %s", n, resource, why.Message))
		}
	}
}

// publish completes in, and publishes the offer made from it.
func (o *offering) publish(in *deviceplugin.Input) *deviceplugin.Offer {
	in.Names, in.Drain, in.Aligned = o.names, o.drain, o.align
	return o.front.Publish(func(allocations []ledger.Allocation) *deviceplugin.Offer {
		in.Held = allocations
		return deviceplugin.Build(*in)
	})
}

// publishClaims publishes the same through the DRA front-end. allocatable is as in input.
func (o *offering) publishClaims(in *deviceplugin.Input, offer *deviceplugin.Offer, allocatable []string,
	refused map[mig.Place]status.Cause) {
	o.claims.publish(in, o.kept(offer, allocatable), refused)
}

// kept returns a function that reports whether pods that ask for a device by its resource name may
// still be sent to the device plugin. They may if the Node's allocatable still has the name, which
// is up to ten seconds old, or if the kubelet still lists other devices of that name, as it does
// for a minute.
func (o *offering) kept(offer *deviceplugin.Offer, allocatable []string) func(dra.Device) bool {
	names := map[string]bool{}
	for _, name := range allocatable {
		names[name] = true
	}
	for i := range offer.Resources {
		names[offer.Resources[i].Name] = names[offer.Resources[i].Name] || len(offer.Resources[i].Devices) > 0
	}
	return func(d dra.Device) bool {
		// Claims for memory units have no resource name.
		return !d.Kind.Together() && names[o.names.Of(d.Kind, d.Placement.Profile)]
	}
}

// setFaults tells both front-ends which GPUs are unhealthy, and which placements on other GPUs. Any
// goroutine may call it.
func (o *offering) setFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	o.front.SetFaults(gpus, placements)
	o.claims.setFaults(gpus, placements)
}

// unregistered reports whether the kubelet lacks something that is served.
func (o *offering) unregistered() bool {
	_, _, missing := o.claims.unregistered()
	return missing || slices.ContainsFunc(o.served.plugins.Status(), func(s plugin.Status) bool {
		return !s.Registered && !s.Since.IsZero()
	})
}

// takeOver adds an allocation of an earlier process to the ledger, through its front-end if that
// must know it, too.
func (o *offering) takeOver(l *ledger.Ledger, id string, r ledger.Record, given, file time.Time) error {
	switch r.Owner {
	case ledger.DevicePlugin:
		return o.front.Found(id, r, given, file)
	case ledger.DRA:
		if o.claims.front != nil {
			return o.claims.found(id, r, given)
		}
	default:
		o.log.Warn("an allocation belongs to a front-end that this version does not know; no other pod gets its GPUs; "+
			"run the version that wrote it, or end its pod and remove the allocation's files",
			"allocation", id, "front_end", r.Owner)
	}
	_, err := l.Found(id, r, given)
	return err
}

// served has the resources with a device plugin at the kubelet. It belongs to the loop's goroutine.
type served struct {
	plugins Plugins
	// source returns the source of a resource's plugin.
	source func(resource string) plugin.Source
	of     map[string]plugin.Source
	// unknown is as Snapshot.Unknown. The map is replaced, never changed.
	unknown map[string]time.Time
}

// set starts the device plugins of resources that are offered for the first time. It stops none:
// see deviceplugin.Offer.
func (s *served) set(v *deviceplugin.Offer) error {
	if len(v.Resources) == len(s.of) {
		return nil
	}
	of := maps.Clone(s.of)
	for _, r := range v.Resources {
		if of[r.Name] == nil {
			of[r.Name] = s.source(r.Name)
		}
	}
	if err := s.plugins.Set(of); err != nil {
		return err
	}
	s.of = of
	return nil
}

// expected returns the resources that should have devices at the kubelet.
func (s *served) expected(v *deviceplugin.Offer) (names []string) {
	for _, r := range v.Resources {
		healthy := func(d deviceplugin.Device) bool { return d.Healthy }
		if s.of[r.Name] != nil && slices.ContainsFunc(r.Devices, healthy) {
			names = append(names, r.Name)
		}
	}
	return names
}

// suspect checks whether the kubelet gives out what the agent offers. allocatable is what it can
// give out, nil if it did not answer.
func (s *served) suspect(expected []string, allocatable map[string][]string, now time.Time) {
	unknown := map[string]time.Time{}
	for _, name := range expected {
		if allocatable == nil || len(allocatable[name]) > 0 {
			continue
		}
		s.plugins.Suspect(name)
		if unknown[name] = now; !s.unknown[name].IsZero() {
			unknown[name] = s.unknown[name]
		}
	}
	s.unknown = unknown
}
