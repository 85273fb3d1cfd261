// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// The whole ladder, as it is exported: a guaranteed job is on-prem, a spot job in the room that is left there, and the
// next one in the cloud, since its nodes offer spot room, too. A guaranteed job is admitted on-prem although a spot pod
// has the room.
func TestLadder(t *testing.T) {
	const spot = memory + ".spot"
	tiers := []string{"{devices: all, mode: shared, spot: true}"}
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", tiers}, {"cloud-1", "cloud", tiers}},
		export: []string{"--cloud", "cloud=158GiB", "--checks"},
	})
	flavor := func(job, want string) {
		t.Helper()
		c.Await(t, job+" is admitted", func() error {
			w, err := c.workload(job)
			if err != nil {
				return err
			}
			var flavors []string
			if w.Status.Admission != nil {
				for _, of := range w.Status.Admission.PodSetAssignments {
					for _, name := range of.Flavors {
						flavors = append(flavors, name)
					}
				}
			}
			slices.Sort(flavors)
			if flavors = slices.Compact(flavors); !w.is("Admitted") || len(flavors) != 1 || !strings.HasPrefix(flavors[0], want) {
				return fmt.Errorf("it has %v, want %s…; %s", flavors, want, c.says(job))
			}
			if is := strings.HasSuffix(flavors[0], "-spot"); is != strings.HasSuffix(want, "-spot") {
				return fmt.Errorf("it has %v, want %s", flavors, want)
			}
			return nil
		})
	}
	c.send(job{name: "day", asks: map[string]int{memory: 60, "cpu": 1}})
	c.awaitAt("day", "on-prem", 1)
	flavor("day", "on-prem-a100-sxm4-80gb-shared")
	c.send(job{name: "night", asks: map[string]int{spot: 60, "cpu": 1}})
	c.awaitAt("night", "on-prem", 1)
	flavor("night", "on-prem-a100-sxm4-80gb-shared-spot")
	c.send(job{name: "late", asks: map[string]int{spot: 60, "cpu": 1}})
	c.awaitAt("late", "cloud", 1)
	flavor("late", "cloud-a100-sxm4-80gb-shared")
	c.send(job{name: "wants", asks: map[string]int{memory: 79, "cpu": 1}})
	flavor("wants", "on-prem-a100-sxm4-80gb-shared")
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.refused) > 0 {
		t.Errorf("kubelets refused %q", c.refused)
	}
}
