// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"fmt"
	"testing"
)

// shared is the layout of a node whose GPUs are shared by memory.
var shared = []string{"{devices: all, mode: shared}"}

// A Job that names the exported queue is admitted, to on-prem first, and to the cloud when
// on-prem's quota is used up: with Kueue as it is, and what is exported.
func TestExportedQueuesAdmit(t *testing.T) {
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}, {"cloud-1", "cloud", shared}},
		export: []string{"--cloud", "cloud=79GiB"},
	})
	c.send(job{name: "one", asks: map[string]int{memory: 79, "cpu": 1}})
	c.send(job{name: "two", asks: map[string]int{memory: 79, "cpu": 1}})
	c.awaitAt("one", "on-prem", 1)
	c.awaitAt("two", "on-prem", 1)
	c.send(job{name: "three", asks: map[string]int{memory: 60, "cpu": 1}})
	c.awaitAt("three", "cloud", 1)
	c.send(job{name: "four", asks: map[string]int{memory: 60, "cpu": 1}})
	c.Await(t, "four waits for quota", func() error {
		own, err := c.workload("four")
		if err != nil {
			return err
		}
		if own.is("QuotaReserved") || len(own.Status.Conditions) == 0 {
			return fmt.Errorf("it says %s", c.says("four"))
		}
		return nil
	})
	c.end("one")
	c.awaitAt("four", "on-prem", 1)
}
