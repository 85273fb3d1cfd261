// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"example.com/gpu-agent/internal/status"
)

// LookAtPlugins makes the loop check again whether the kubelet has the resources. It is called when
// something has changed between a plugin and the kubelet.
func (a *Agent) LookAtPlugins() { a.waker.wake() }

// resourcesOf returns the state of the served resources at the kubelet. unknown is since when the
// kubelet has not named the devices of some, although it may have their lists. A restart of the
// kubelet is no failure, so an error appears only after silentFor.
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
				"if that lasts a minute, restart the kubelet"
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

// unregistered returns conditions for the resources that the kubelet has not had for silentFor.
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
