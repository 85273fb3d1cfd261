// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"example.com/gpu-agent/internal/status"
)

// LookAtPlugins has the loop look again at whether the kubelet has the resources:
// something has changed between a plugin and the kubelet.
func (a *Agent) LookAtPlugins() { a.bell.wake() }

// resourcesOf says how the resources that are served fare at the kubelet. unknown is
// since when it has not named the devices of some, whose streams of lists may be open
// all the same. A kubelet that starts again is no trouble: an error comes after
// silentFor.
func resourcesOf(plugins Plugins, unknown map[string]time.Time) []status.Resource {
	now := time.Now()
	var out []status.Resource
	for _, s := range plugins.Status() {
		r := status.Resource{Name: s.Resource, Devices: s.Devices, Registered: s.Registered}
		since, why := s.Since, ""
		if s.Err != nil {
			why = s.Err.Error()
		}
		if at, not := unknown[s.Resource]; s.Registered && not && now.Sub(at) >= silentFor {
			r.Registered, since = false, at
			why = "its PodResources service names none of the devices, although it has the list; " +
				"where it does not in a minute, restart the kubelet"
		}
		if !r.Registered && !since.IsZero() {
			if r.Since = &since; now.Sub(since) >= silentFor {
				r.Error = why
			}
		}
		out = append(out, r)
	}
	return out
}

// unregistered says which resources the kubelet has not had for a while, and why.
func unregistered(resources []status.Resource) (out []status.Condition) {
	for _, r := range resources {
		if r.Error != "" {
			c := status.Why(status.NotRegistered, "%s is not registered with the kubelet: %s", r.Name, r.Error).
				Condition(status.Failed, r.Name)
			c.Since = *r.Since
			out = append(out, c)
		}
	}
	return out
}
