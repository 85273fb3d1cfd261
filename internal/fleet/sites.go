// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"time"

	"example.com/gpu-agent/internal/gpunode"
)

// Use is how many GPUs of a site are in use, and for how long all of them together have been
// since the process began. A GPU is in use while anybody holds any piece of it: it is paid for
// as a whole then.
type Use struct {
	GPUs int
	Time time.Duration
}

// Sites count the GPUs in use by what a label of their nodes says.
type Sites struct {
	f     *Fleet
	label string
	// of has each node's part of use, which is as of a moment. The fleet's mutex guards all.
	of  map[string]siteUse
	use map[string]Use
	as  time.Time
}

type siteUse struct {
	site string
	gpus int
}

// CountSites has GPUs of a fleet that are in use counted by a label of Nodes. It is called before
// the fleet is told of anything.
func CountSites(f *Fleet, label string) *Sites {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sites = &Sites{f: f, label: label, of: map[string]siteUse{}, use: map[string]Use{}, as: f.now()}
	return f.sites
}

// Use is what is in use, by the value of the label.
func (s *Sites) Use() map[string]Use {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.accrue()
	return maps.Clone(s.use)
}

// accrue adds the time since the last moment.
func (s *Sites) accrue() {
	now := s.f.now()
	for site, u := range s.use {
		u.Time += time.Duration(u.GPUs) * now.Sub(s.as)
		s.use[site] = u
	}
	s.as = now
}

// count notes what a node says now.
func (s *Sites) count(node string) {
	if s == nil {
		return
	}
	var is siteUse
	says := s.f.says[node]
	if says != nil {
		is.site = s.f.about[node].labels[s.label]
		for i := range says.GPUs {
			if inUse(&says.GPUs[i]) {
				is.gpus++
			}
		}
	}
	was, known := s.of[node]
	if known && was == is {
		return
	}
	s.accrue()
	add := func(of siteUse, sign int) {
		u := s.use[of.site]
		u.GPUs += sign * of.gpus
		s.use[of.site] = u
	}
	if known {
		add(was, -1)
	}
	if delete(s.of, node); says != nil {
		s.of[node] = is
		add(is, 1)
	}
}

// inUse reports whether anybody holds a piece of a GPU.
func inUse(g *gpunode.GPU) bool {
	return g.Used.Len() > 0 || g.MIG != nil && len(g.MIG.Used) > 0
}
