// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/pkg/plugin"
)

// served is the resources that have a device plugin at the kubelet. It belongs to the
// loop's goroutine, but for lowering.
type served struct {
	plugins Plugins
	// lowering is nil where the scheduler hears of devices from the kubelet alone.
	lowering *Lowering
	// source makes the source of a resource's plugin.
	source func(resource string) plugin.Source
	of     map[string]plugin.Source
	// unknown is since when the kubelet has not known resources that are offered it; the
	// map is not changed but replaced.
	unknown map[string]time.Time
}

// set starts the device plugins of resources that are on offer for the first
// time. None is ever stopped: see deviceplugin.Offer.
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

// expected are the resources of which the kubelet should give out devices.
func (s *served) expected(v *deviceplugin.Offer) (names []string) {
	for _, r := range v.Resources {
		if s.of[r.Name] != nil && slices.ContainsFunc(r.Devices, func(d deviceplugin.Device) bool { return d.Healthy }) {
			names = append(names, r.Name)
		}
	}
	return names
}

// suspect looks whether the kubelet gives out what we offer it: allocatable is what it
// would, nil where it did not answer.
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
