// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/tests/frameworks"
	"example.com/gpu-agent/tests/plane"
)

const mpiJobs = "/apis/kubeflow.org/v2beta1/namespaces/" + team + "/mpijobs"

// theMPIJob is the one of tests/frameworks, and how many units its pods ask for.
func theMPIJob(t *testing.T) (o object, units int) {
	t.Helper()
	for _, shape := range frameworks.Shapes(t) {
		if shape.Written["kind"] != "MPIJob" {
			continue
		}
		for _, made := range shape.Made {
			spec, pods := frameworks.PodSpec(made)
			for _, container := range frameworks.Containers(spec, "containers") {
				units += pods * frameworks.Units(container)
			}
		}
		return shape.Written, units
	}
	t.Fatal("there is no MPIJob among the shapes")
	return nil, 0
}

// sendMPI makes an MPIJob with a name, in the team's queue.
func (c *cluster) sendMPI(o object, name string) {
	c.t.Helper()
	o = maps.Clone(o)
	o["metadata"] = object{"name": name, "labels": queued}
	c.Await(c.t, name+" is taken", func() error { // once Kueue's webhooks for the kind are there
		return c.Do(c.t, nil, http.MethodPost, mpiJobs, plane.JSON, o, nil)
	})
}

// TestMPIJobIsAdmitted sends an MPIJob, as tests/frameworks has it, to the exported queue with the placer's checks.
// Kueue admits it as a whole: its quota counts the pieces of all its pods, and it lets the operator begin, which does
// not run here. Of more than there is quota for, some wait.
func TestMPIJobIsAdmitted(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it takes the real Kueue")
	}
	c := startCluster(t, options{nodes: []node{{"gpu-1", "on-prem", shared}},
		export: []string{"--cloud", "none", "--checks"}})
	c.MPI(t)
	mpi, units := theMPIJob(t)
	c.sendMPI(mpi, "one")
	c.Await(t, "it is admitted", func() error {
		w, err := c.workloadOf("MPIJob", "one")
		if err == nil && !w.is("Admitted") {
			err = fmt.Errorf("it is %+v, %+v", w.Status.Conditions, w.Status.AdmissionChecks)
		}
		return err
	})
	c.Await(t, "it may begin", func() error {
		var is struct {
			Spec struct{ RunPolicy struct{ Suspend *bool } }
		}
		if err := c.get(mpiJobs+"/one", &is); err != nil {
			return err
		}
		if s := is.Spec.RunPolicy.Suspend; s == nil || *s {
			return errors.New("it is suspended")
		}
		return nil
	})
	c.Await(t, "the quota counts it", func() error { return c.counts(units) })
	for n := range 20 {
		c.sendMPI(mpi, fmt.Sprint("more-", n))
	}
	c.Await(t, "one of twenty more waits for quota", func() error {
		for n := range 20 {
			w, err := c.workloadOf("MPIJob", fmt.Sprint("more-", n))
			if err == nil && !w.is("QuotaReserved") && len(w.Status.Conditions) > 0 {
				return nil
			}
		}
		return errors.New("none does")
	})
}

// With the topology, Kueue 0.19 admits nothing of which some pods ask for no GPU, such as the launcher of an MPIJob:
// docs/bursting.md says so. Where this fails, Kueue has mended it.
func TestTopologyAdmitsNoLauncher(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it takes the real Kueue")
	}
	c := startCluster(t, options{nodes: []node{{"gpu-1", "on-prem", shared}}, export: []string{"--cloud", "none"}})
	c.MPI(t)
	mpi, _ := theMPIJob(t)
	c.sendMPI(mpi, "one")
	c.Await(t, "Kueue says what it lacks", func() error {
		w, err := c.workloadOf("MPIJob", "one")
		if err == nil && !strings.Contains(fmt.Sprint(w.Status.Conditions), "no TAS flavor assigned") {
			err = fmt.Errorf("it is %+v", w.Status.Conditions)
		}
		return err
	})
}

// workloadOf is the workload of an object of a kind.
func (c *cluster) workloadOf(kind, name string) (*workload, error) {
	var list struct{ Items []workload }
	if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		by := meta.GetControllerOf(&list.Items[i].ObjectMeta)
		if by != nil && by.Kind == kind && by.Name == name {
			return &list.Items[i], nil
		}
	}
	return nil, errors.New("there is no workload of it")
}

// counts says whether the team's queue has so many units in use.
func (c *cluster) counts(units int) error {
	var q struct {
		Status struct {
			FlavorsUsage []struct {
				Resources []struct{ Name, Total string }
			}
		}
	}
	if err := c.get(queueing+"/namespaces/"+team+"/localqueues/gpus", &q); err != nil {
		return err
	}
	var all []string
	for _, f := range q.Status.FlavorsUsage {
		for _, r := range f.Resources {
			if r.Name == memory && r.Total == fmt.Sprint(units) {
				return nil
			}
			all = append(all, r.Name+"="+r.Total)
		}
	}
	return fmt.Errorf("it has %v in use, want %d units", all, units)
}
