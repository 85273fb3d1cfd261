// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/plugin"
)

// source serves one resource of the desk to its device plugin: it translates
// the desk's words into the plugin's and decides nothing.
type source struct {
	desk     *desk.Desk
	domain   string
	resource string
	// granted is called after every grant, before the kubelet has its answer: it
	// must not take long.
	granted func(*desk.Claim)

	// The plugin has one goroutine that lists. It knows a list that it has sent
	// before by the slice.
	of  []desk.Device
	out []plugin.Device
}

func (s *source) List() ([]plugin.Device, <-chan struct{}) {
	devs, changed := s.desk.List(s.resource)
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

func (s *source) Prefer(available, must []string, n int) ([]string, error) {
	return s.desk.Prefer(s.resource, available, must, n)
}

func (s *source) Allocate(ids []string) (plugin.Grant, error) {
	c, err := s.desk.Allocate(s.resource, ids)
	if err != nil {
		return plugin.Grant{}, err
	}
	record, err := json.Marshal(c.Record())
	if err != nil {
		return plugin.Grant{}, err
	}
	s.granted(&c)
	return plugin.Grant{
		CDI: []string{cdi.DeviceName(s.domain, c.Key)},
		// The key is in the name: of two values under one name the kubelet
		// would keep one.
		Annotations: map[string]string{cdi.AnnotationName(s.domain, c.Key): string(record)},
	}, nil
}

func (s *source) Prepare(ctx context.Context, ids []string) error {
	return s.desk.Prepare(ctx, s.resource, ids)
}
