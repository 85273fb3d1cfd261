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
// loop's goroutine.
type served struct {
	plugins Plugins
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

// suspect looks whether the kubelet gives out what we offer it: allocatable is what it
// would, nil where it did not answer.
func (s *served) suspect(v *deviceplugin.Offer, allocatable map[string][]string, now time.Time) {
	unknown := map[string]time.Time{}
	for _, r := range v.Resources {
		healthy := slices.ContainsFunc(r.Devices, func(d deviceplugin.Device) bool { return d.Healthy })
		if allocatable == nil || !healthy || len(allocatable[r.Name]) > 0 || s.of[r.Name] == nil {
			continue
		}
		s.plugins.Suspect(r.Name)
		if unknown[r.Name] = now; !s.unknown[r.Name].IsZero() {
			unknown[r.Name] = s.unknown[r.Name]
		}
	}
	s.unknown = unknown
}
