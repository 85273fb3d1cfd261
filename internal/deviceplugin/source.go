// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"encoding/json"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/plugin"
)

// Source serves one resource of a front-end to its device plugin. It translates between the types
// of the two, and decides nothing.
type Source struct {
	Front *FrontEnd
	// Domain is used in the names of CDI devices and annotations.
	Domain   string
	Resource string
	// Granted is called after every grant, before the kubelet gets the answer. It must return
	// quickly.
	Granted func(*ledger.Allocation)
	// Refused is called for each refused request for n devices, with the IDs that the kubelet
	// named. Nil if it is not needed.
	Refused func(resource string, n int, ids []string, err error)

	// Only one goroutine of the plugin calls List. The plugin recognizes a list that it has sent
	// before by its slice.
	of  []Device
	out []plugin.Device
}

// List implements plugin.Source.
func (s *Source) List() ([]plugin.Device, <-chan struct{}) {
	devs, changed := s.Front.List(s.Resource)
	if s.out != nil && len(devs) == len(s.of) && (len(devs) == 0 || &devs[0] == &s.of[0]) {
		return s.out, changed
	}
	s.of, s.out = devs, make([]plugin.Device, len(devs))
	for i := range devs {
		s.out[i] = plugin.Device{ID: devs[i].ID, Healthy: devs[i].Healthy}
		if n := devs[i].NUMA; n.Known {
			s.out[i].NUMA = []int{n.Node}
		}
	}
	return s.out, changed
}

// Prefer implements plugin.Source.
func (s *Source) Prefer(available, must []string, n int) ([]string, error) {
	ids, err := s.Front.Prefer(s.Resource, available, must, n)
	return ids, s.refused(n, must, err)
}

// refused adds a reason to an error and reports it through Refused. It returns nil for nil.
func (s *Source) refused(n int, ids []string, err error) error {
	if err = withReason(err); err != nil && s.Refused != nil {
		s.Refused(s.Resource, n, ids, err)
	}
	return err
}

// Allocate implements plugin.Source.
func (s *Source) Allocate(ids []string) (plugin.Grant, error) {
	a, err := s.Front.Allocate(s.Resource, ids)
	if err != nil {
		return plugin.Grant{}, s.refused(len(ids), ids, err)
	}
	record, err := json.Marshal(a.Record())
	if err != nil {
		return plugin.Grant{}, err
	}
	s.Granted(&a)
	return plugin.Grant{
		CDI: []string{cdi.DeviceName(s.Domain, a.ID)},
		// The name has the ID, because of two values under one name the kubelet keeps only one.
		Annotations: map[string]string{cdi.AnnotationName(s.Domain, a.ID): string(record)},
	}, nil
}

// Prepare implements plugin.Source.
func (s *Source) Prepare(ctx context.Context, ids []string) error {
	return withReason(s.Front.Prepare(ctx, s.Resource, ids))
}
