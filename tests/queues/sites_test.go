// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
)

var long = flag.Bool("long", false, "the walk to the cloud and back, which takes minutes")

// refused is the annotation with the flavors that a workload is kept from.
const refused = "example.com/gpu.refused-flavors"

// twoSites are a node on-prem and one in a cloud, whose GPUs are shared by memory.
var twoSites = []node{{"gpu-1", "on-prem", shared}, {"cloud-1", "cloud", shared}}

// A Job that quota admits and no GPU can hold goes to the cloud, and only then. The placer is
// killed at each step. What checkpoints comes back, and what is to stay on-prem waits. The short
// form of it is that of tests/burst, on real nodes.
func TestOnPremThenTheCloudAndBack(t *testing.T) {
	if !*long {
		t.Skip("-long is not set: it takes three minutes, and tests/burst has a short form of it")
	}
	c := startCluster(t, options{nodes: twoSites, export: []string{"--cloud", "cloud=158GiB", "--checks"}})
	kill := func() {
		c.placer.Kill()
		c.placer = c.placerAt(c.placer.Door)
	}
	c.send(job{name: "one", asks: map[string]int{memory: 50, "cpu": 1}})
	c.awaitAt("one", "on-prem", 1)
	kill()
	c.send(job{name: "two", asks: map[string]int{memory: 50}})
	c.awaitAt("two", "on-prem", 1)
	kill()
	// 58 of 158 units are left, 29 on each GPU.
	c.send(job{name: "large", asks: map[string]int{memory: 40}, podLabels: map[string]string{"example.com/gpu.checkpoints": "true"}})
	c.awaitAt("large", "cloud", 1)
	c.hadNoRoom("large", "on-prem-a100-sxm4-80gb-shared")
	c.send(job{name: "wide", pods: 2, asks: map[string]int{memory: 29}})
	c.awaitAt("wide", "on-prem", 2)
	kill()
	c.send(job{name: "more", asks: map[string]int{memory: 29}})
	c.awaitAt("more", "cloud", 1)
	c.hadNoRoom("more", "") // nor quota
	c.send(job{name: "stays", asks: map[string]int{memory: 40}, selector: map[string]string{site: "on-prem"}})
	c.Await(t, "what is to stay on-prem waits, and has no quota", func() error {
		w, err := c.workload("stays")
		if err != nil || len(w.Status.Conditions) == 0 || w.is("QuotaReserved") {
			return fmt.Errorf("%v: %s", err, c.says("stays"))
		}
		return nil
	})
	c.Await(t, "the placer counts what the cloud costs", func() error {
		if n := c.placer.Metric(t, `gpu_agent_placer_site_gpus{site="cloud"}`); n != 1 {
			return fmt.Errorf("%v GPUs of the cloud are in use", n)
		}
		return nil
	})
	kill()
	// Room again: first for who waits, and then for who comes back.
	c.end("one")
	c.awaitAt("stays", "on-prem", 1)
	c.awaitAt("large", "cloud", 1)
	kill()
	c.end("two")
	c.awaitAt("large", "on-prem", 1)
	c.awaitAt("more", "cloud", 1)
	if n := c.placer.Metric(t, `gpu_agent_placer_site_gpu_seconds_total{site="cloud"}`); n == 0 {
		t.Error("the cloud has cost nothing")
	}
	c.noneRefused()
}

// hadNoRoom checks that a Job went to the cloud because the placer had found no room on-prem, and
// which flavors it was kept from.
func (c *cluster) hadNoRoom(name, flavors string) {
	c.t.Helper()
	w, err := c.workload(name)
	if err != nil || w.Annotations[refused] != flavors || len(w.Status.AdmissionChecks) != 1 ||
		!strings.HasPrefix(w.Status.AdmissionChecks[0].Message, "on-prem, none of 1 nodes has room") {
		c.t.Errorf("%s went to the cloud: %v, %s", name, err, c.says(name))
	}
}

// noneRefused checks that no node has refused a pod, and that nothing was given twice.
func (c *cluster) noneRefused() {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.refused {
		c.t.Errorf("refused: %s", one)
	}
}

// Without a cloud a Job that quota admits and no GPU can hold is not admitted, has no quota that
// another one could use, and says why. It runs when there is room, where the placer has held it.
func TestAdmittedMeansPlaceable(t *testing.T) {
	c := startCluster(t, options{nodes: twoSites[:1], export: []string{"--cloud", "none", "--checks"}})
	for _, name := range []string{"one", "two"} {
		c.send(job{name: name, asks: map[string]int{memory: 50}})
		c.awaitAt(name, "on-prem", 1)
	}
	w, err := c.workload("two")
	if err != nil {
		t.Fatal(err)
	}
	if of := w.Status.AdmissionChecks; len(of) != 1 || len(of[0].PodSetUpdates) != 1 || of[0].PodSetUpdates[0].NodeSelector[core.LabelHostname] != "gpu-1" ||
		of[0].PodSetUpdates[0].Annotations["example.com/gpu.hold-nodes"] != "gpu-1:1" {
		t.Errorf("its pods are told %+v", of)
	}
	c.send(job{name: "large", asks: map[string]int{memory: 40}})
	c.Await(t, "large waits", func() error {
		w, err := c.workload("large")
		if err != nil || w.Annotations[refused] == "" || w.is("QuotaReserved") || w.is("Admitted") {
			return fmt.Errorf("%v: %s", err, c.says("large"))
		}
		return nil
	})
	c.send(job{name: "small", asks: map[string]int{memory: 29}})
	c.awaitAt("small", "on-prem", 1)
	c.end("one")
	c.awaitAt("large", "on-prem", 1)
	c.noneRefused()
}
