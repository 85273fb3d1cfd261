// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"encoding/json"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/plugin"
)

// Source serves one resource of a front-end to its device plugin: it translates
// the front-end's words into the plugin's and decides nothing.
type Source struct {
	Front *FrontEnd
	// Domain names CDI devices and annotations.
	Domain   string
	Resource string
	// Granted is called after every grant, before the kubelet has its answer: it
	// must not take long.
	Granted func(*ledger.Allocation)
	// Refused is told of each request for n devices that is refused, with those that were
	// named; nil where nobody wants to know.
	Refused func(resource string, n int, ids []string, err error)

	// The plugin has one goroutine that lists. It knows a list that it has sent
	// before by the slice.
	of  []Device
	out []plugin.Device
}

// List is plugin.Source's.
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

// Prefer is plugin.Source's.
func (s *Source) Prefer(available, must []string, n int) ([]string, error) {
	ids, err := s.Front.Prefer(s.Resource, available, must, n)
	return ids, s.refused(n, must, err)
}

// refused gives an error a reason, and tells of it; nil stays nil.
func (s *Source) refused(n int, ids []string, err error) error {
	if err = withReason(err); err != nil && s.Refused != nil {
		s.Refused(s.Resource, n, ids, err)
	}
	return err
}

// Allocate is plugin.Source's.
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
		// The ID is in the name: of two values under one name the kubelet
		// would keep one.
		Annotations: map[string]string{cdi.AnnotationName(s.Domain, a.ID): string(record)},
	}, nil
}

// Prepare is plugin.Source's.
func (s *Source) Prepare(ctx context.Context, ids []string) error {
	return withReason(s.Front.Prepare(ctx, s.Resource, ids))
}
