// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A workload may be there before its job, which becomes its owner later: prebuilt ones, as MultiKueue
// makes them. Its pods use the room that was held before, whichever process is asked, and also where an
// earlier build has written the owner's UID as the key.
func TestHoldOfAPrebuiltWorkload(t *testing.T) {
	yes := true
	job := []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: "one", UID: "job-1", Controller: &yes}}
	for name, test := range map[string]struct {
		restart bool
		written string // by an earlier build; empty for none
	}{
		"one process":                     {},
		"a new process":                   {restart: true},
		"a new process, of a later build": {restart: true, written: "job-1"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79}})
			o := queued("one", 50)
			decide := func() []Answer {
				w, err := ReadWorkload(o)
				if err != nil {
					t.Fatal(err)
				}
				c.view.Workloads = []*Workload{w}
				return c.Decide(&c.view, start)
			}
			told := decide()
			if len(told) != 1 || told[0].State.State != Ready {
				t.Fatalf("it is told %+v", told)
			}
			s := told[0].State
			if test.written != "" {
				s.PodSetUpdates[0].Annotations["example.com/gpu.hold"] = test.written
			}
			var err error
			if o, err = told[0].Workload.with(s); err != nil {
				t.Fatal(err)
			}
			o.SetOwnerReferences(job)
			if test.restart {
				c.restart()
			}
			for range 2 {
				if told := decide(); told != nil {
					t.Errorf("then it is told %+v", told[0])
				}
			}
			of := metav1.ObjectMeta{Namespace: "train", OwnerReferences: job, Annotations: s.PodSetUpdates[0].Annotations}
			if at, err := c.place("p", of, 50); at != "a" {
				t.Errorf("its pod has no room: %v", err)
			}
		})
	}
}

// The workloads of an elastic job replace each other, as Kueue 0.19 does it, and its pods run on: what is
// held for the next one is for the pods of the first, too.
func TestHoldOfAnElasticJob(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	first := c.job("first", "here", "room", [2]int{1, 50})
	first.Annotations = map[string]string{sliceName: "first"}
	c.decide(0)
	c.want(first, Ready, "there is room")
	first.Admitted = true
	u := first.Checks[0].PodSetUpdates[0]
	if u.Annotations["example.com/gpu.hold"] != "first" || u.NodeSelector != nil {
		t.Fatalf("its pods are told %+v, and are to have other nodes, too, when it grows", u)
	}
	c.pod(first, "a", 0, 50)
	next := c.job("next", "here", "room", [2]int{2, 50})
	next.Annotations = map[string]string{sliceName: "first", replacesName: "train/first"}
	if told := c.decide(0); told != nil {
		t.Errorf("while the first one has quota, told: %q", told)
	}
	first.Over = true
	if told := c.decide(0); len(told) != 1 {
		t.Errorf("told: %q", told)
	}
	c.want(next, Ready, "there is room: a × 1, b × 1")
	if at, err := c.place("p", metav1.ObjectMeta{Namespace: "train", Annotations: u.Annotations}, 50); at != "b" {
		t.Errorf("its next pod has no room: %v", err)
	}
}
