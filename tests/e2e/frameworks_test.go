// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/frameworks"
	"example.com/gpu-agent/tests/lab"
)

// TestPodsOfFrameworks runs what all frameworks bring at once, as tests/frameworks has it: pods, Jobs, StatefulSets
// and Deployments, through Kubernetes' own controllers. Each container that asks for a piece has it on one GPU, under
// a cap of that size, and sees one GPU. The containers beside it, before it and in other pods see none.
func TestPodsOfFrameworks(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		const kinds = "deployments,statefulsets,jobs"
		if _, err := node.Kubectl(ctx, nil, "delete", "-n", lab.PodNamespace, kinds, "--all"); err != nil {
			b.Error(err)
		}
	})
	pods, want := 0, map[string]int{} // units by the framework and the container
	for _, shape := range frameworks.Shapes(t) {
		for _, o := range shape.Made {
			spec, n := frameworks.PodSpec(o)
			standIn(spec)
			meta := podMeta(o)
			labels, _ := meta["labels"].(frameworks.Object)
			if labels == nil {
				labels = frameworks.Object{}
				meta["labels"] = labels
			}
			labels["shape"] = shape.Name
			pods += n
			for _, c := range frameworks.Containers(spec, "containers") {
				if of := frameworks.Units(c); of > 0 {
					want[shape.Name+" "+c["name"].(string)] = of
				}
			}
			text, err := json.Marshal(o)
			b.must(err)
			_, err = node.Kubectl(b.ctx, bytes.NewReader(text), "apply", "-n", lab.PodNamespace, "-f", "-")
			b.must(err)
		}
	}
	var list core.PodList
	b.must(lab.Await(b.ctx, 3*time.Minute, "all pods of the frameworks to run", func(ctx context.Context) error {
		list = core.PodList{}
		const selected = "/api/v1/namespaces/" + lab.PodNamespace + "/pods?labelSelector=shape"
		if err := node.Read(ctx, selected, &list); err != nil {
			return err
		}
		var errs []error
		if len(list.Items) != pods {
			errs = append(errs, fmt.Errorf("there are %d pods, want %d", len(list.Items), pods))
		}
		for i := range list.Items {
			p := &list.Items[i]
			ready := slices.ContainsFunc(p.Status.Conditions, func(c core.PodCondition) bool {
				return c.Type == core.PodReady && c.Status == core.ConditionTrue
			})
			if !ready {
				errs = append(errs, fmt.Errorf("%s is %s: %s", p.Name, p.Status.Phase, p.Status.Message))
			}
		}
		return errors.Join(errs...)
	}))
	asking := 0
	for i := range list.Items {
		p := &list.Items[i]
		for _, c := range p.Spec.Containers {
			out, err := node.Kubectl(b.ctx, nil, "exec", "-n", p.Namespace, p.Name, "-c", c.Name, "--", "sh", "-c",
				"ls /dev | grep -c '^nvidia[0-9]' || true")
			b.must(err)
			sees := string(bytes.TrimSpace(out))
			switch of := want[p.Labels["shape"]+" "+c.Name]; {
			case of == 0 && sees != "0":
				b.Errorf("%s/%s asks for nothing and sees %s GPUs", p.Name, c.Name, sees)
			case of > 0 && sees != "1":
				b.Errorf("%s/%s asks for %d units and sees %s GPUs", p.Name, c.Name, of, sees)
			}
		}
	}
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "each container to have its cap", func(s lab.Status) error {
		asking = 0
		for i := range list.Items {
			p := &list.Items[i]
			for _, c := range p.Spec.Containers {
				of := want[p.Labels["shape"]+" "+c.Name]
				at := slices.IndexFunc(s.Containers, func(is lab.ContainerStatus) bool {
					return is.Pod == p.Name && is.Container == c.Name
				})
				switch {
				case of == 0 && at >= 0:
					return fmt.Errorf("%s/%s asks for nothing: %s", p.Name, c.Name, s.Containers[at])
				case of > 0 && (at < 0 || s.Containers[at].CapMiB == nil || *s.Containers[at].CapMiB != of<<10):
					return fmt.Errorf("%s/%s has not a cap of %d GiB", p.Name, c.Name, of)
				}
				if of > 0 {
					asking++
				}
			}
		}
		if s.Allocations != asking {
			return fmt.Errorf("there are %d allocations, want %d", s.Allocations, asking)
		}
		return nil
	}))
	b.Logf("%d pods run, %d containers of which have a piece of a GPU under its cap", pods, asking)
}

// standIn puts the test's image and a wait into the place of the framework's, whose probes would find nobody.
func standIn(spec frameworks.Object) {
	const waits = "trap 'exit 0' TERM\n" + lab.Wait
	for field, does := range map[string]string{"initContainers": "true", "containers": waits} {
		for _, c := range frameworks.Containers(spec, field) {
			c["image"], c["imagePullPolicy"] = lab.TestImage, "Never"
			c["command"] = []string{"/bin/sh", "-c", does}
			for _, of := range []string{"args", "readinessProbe", "livenessProbe"} {
				delete(c, of)
			}
		}
	}
	spec["terminationGracePeriodSeconds"] = 1
}

// podMeta is the metadata of the pods that an object is or makes.
func podMeta(o frameworks.Object) frameworks.Object {
	if o["kind"] != "Pod" {
		o = o["spec"].(frameworks.Object)["template"].(frameworks.Object)
	}
	return o["metadata"].(frameworks.Object)
}
