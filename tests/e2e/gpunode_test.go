// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/lab"
)

// gpuNode is the node's object.
type gpuNode struct {
	Metadata struct {
		OwnerReferences []struct{ Kind, Name string }
	}
	Status gpunode.Status
}

func (b *bench) gpuNode(ctx context.Context) (out gpuNode, err error) {
	return out, node.Read(ctx, "/apis/example.com/v1alpha1/gpunodes/"+node.Name, &out)
}

// gpuNodes waits until `kubectl get gpunodes` shows these words of the node, and returns the
// object.
func (b *bench) gpuNodes(what string, words ...string) gpuNode {
	b.Helper()
	began := time.Now()
	var shown string
	b.must(lab.Await(b.ctx, 90*time.Second, "kubectl get gpunodes to show "+what, func(ctx context.Context) error {
		out, err := node.Kubectl(ctx, nil, "get", "gpunodes", "--no-headers")
		if err != nil {
			return err
		}
		shown = string(out)
		for _, word := range append([]string{node.Name}, words...) {
			if !strings.Contains(strings.Join(strings.Fields(shown), " "), word) {
				return fmt.Errorf("%q is not in %q", word, shown)
			}
		}
		return nil
	}))
	b.Logf("%s, after %.1f s:\n%s", what, time.Since(began).Seconds(), shown)
	is, err := b.gpuNode(b.ctx)
	b.must(err)
	return is
}

// TestGPUNode looks at the object by which the node tells what its GPUs have left, as a person
// would, and at what a pod's status says of the same. What the object says, and when, is for
// internal/agent and internal/kube/agentkube.
func TestGPUNode(t *testing.T) {
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	is := b.gpuNodes("eight shared GPUs", "8 8 shared gpu-mem 632/632 gpu-mem 79 0 0 True")
	if o := is.Metadata.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != node.Name {
		t.Errorf("it belongs to %v", o)
	}
	if is.Status.HoldersIn != gpunode.InPods {
		t.Errorf("on this kubelet holders are told in %s", is.Status.HoldersIn)
	}
	if testing.Short() {
		return
	}

	b.must(agent.Reset(b.ctx, `version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [2], mode: whole}
    - {devices: [3], mode: mig}
    - {devices: [1, 4, 5, 6, 7], mode: off}
`))
	b.state("applied")
	b.gpuNodes("the edit", "8 1 whole, 1 shared, 1 mig, 5 off gpu 1/1, gpu-mem 79/79, mig 8/8 memory slices gpu 1, gpu-mem 79, mig 7g.80gb 0 0 True")

	// A pod's status and the object name the same.
	three := b.pod("three", lab.MIG("3g.40gb"), 1)
	b.must(three.Running(b.ctx))
	is = b.gpuNodes("an instance", "mig 4/8 memory slices")
	var pod struct {
		Status struct {
			ContainerStatuses []struct {
				AllocatedResourcesStatus []struct {
					Resources []struct{ ResourceID string }
				}
			}
		}
	}
	b.must(lab.Await(b.ctx, waitLong, "the pod's status to name its device", func(ctx context.Context) error {
		if err := node.Read(ctx, "/api/v1/namespaces/"+lab.PodNamespace+"/pods/three", &pod); err != nil {
			return err
		}
		if s := pod.Status.ContainerStatuses; len(s) != 1 || len(s[0].AllocatedResourcesStatus) != 1 || len(s[0].AllocatedResourcesStatus[0].Resources) != 1 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	}))
	device := pod.Status.ContainerStatuses[0].AllocatedResourcesStatus[0].Resources[0].ResourceID
	i := slices.IndexFunc(is.Status.GPUs, func(g gpunode.GPU) bool { return g.Mode == "mig" })
	if g := is.Status.GPUs[i]; len(g.MIG.Used) != 1 || g.UUID+"::"+g.MIG.Used[0] != device {
		t.Errorf("the pod has %s, and the object says %v of %s", device, g.MIG.Used, g.UUID)
	}
}
