// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"time"

	"example.com/gpu-agent/internal/gpunode"
)

// Use is the use of a site's GPUs. A GPU is in use while a pod holds any piece of it, since the whole GPU is paid for.
type Use struct {
	// GPUs is how many are in use now.
	GPUs int
	// Time is the sum, over all GPUs, of the time that each has been in use since the process began.
	Time time.Duration
}

// Sites counts the GPUs in use by site. A node's site is the value of one of its labels.
type Sites struct {
	f     *Fleet
	label string
	// of is each node's part of use, by the node's name. The Fleet's lock guards it, and what follows.
	of map[string]siteUse
	// use is each site's, up to the time as.
	use map[string]Use
	as  time.Time
}

// siteUse is how many GPUs of a node are in use, and the node's site.
type siteUse struct {
	site string
	gpus int
}

// CountSites has a fleet's GPUs in use counted by a label of Nodes. Call it before the fleet is told of anything.
func CountSites(f *Fleet, label string) *Sites {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sites = &Sites{f: f, label: label, of: map[string]siteUse{}, use: map[string]Use{}, as: f.now()}
	return f.sites
}

// Use returns the use of each site, by the value of the label.
func (s *Sites) Use() map[string]Use {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.accrue()
	return maps.Clone(s.use)
}

// accrue brings use up to the present.
func (s *Sites) accrue() {
	now := s.f.now()
	for site, u := range s.use {
		u.Time += time.Duration(u.GPUs) * now.Sub(s.as)
		s.use[site] = u
	}
	s.as = now
}

// count counts a node anew after news of it.
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

// inUse reports whether a pod holds a piece of a GPU.
func inUse(g *gpunode.GPU) bool {
	return g.Used.Len() > 0 || g.MIG != nil && len(g.MIG.Used) > 0
}
