// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
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
		UID, ResourceVersion string
		OwnerReferences      []struct{ Kind, Name string }
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

// TestGPUNode follows the object by which the node tells what its GPUs have left, as a person
// would, through an edit, a pod, a fault and the end of the pod.
func TestGPUNode(t *testing.T) {
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(driver.ClearFaults(ctx), driver.Reset(ctx, 2)); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	is := b.gpuNodes("eight shared GPUs", "8 8 shared gpu-mem 632/632 gpu-mem 79 0 0 True")
	if o := is.Metadata.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != node.Name {
		t.Errorf("it belongs to %v", o)
	}
	if is.Status.HoldersIn != gpunode.InPods {
		t.Errorf("on this kubelet holders are told in %s", is.Status.HoldersIn)
	}
	if testing.Short() {
		return // what the object says, and when, is for internal/agent and internal/kube
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
	some := b.pod("some", lab.Memory, 24)
	b.must(some.Running(b.ctx))
	is = b.gpuNodes("memory", "gpu-mem 55/79")
	if g := is.Status.GPUs[0]; g.Used.Len() != 24 {
		t.Errorf("the object says %v", g.Used)
	}

	// A fault: the GPU's devices cannot be had, and what is held stays.
	b.must(driver.Xid(b.ctx, 2, 95))
	b.gpuNodes("a fault", "gpu 0/1", " 1 True")
	b.must(driver.Reset(b.ctx, 2))
	b.gpuNodes("that it is over", "gpu 1/1", " 0 True")

	b.must(three.Delete(b.ctx))
	b.gpuNodes("the pod's end", "mig 8/8 memory slices", "mig 7g.80gb")
	b.must(some.Delete(b.ctx))
	is = b.gpuNodes("that all have ended", "gpu-mem 79/79", "gpu-mem 79")

	// Nobody writes it while nothing happens, and it comes back where somebody deletes it.
	b.must(lab.Holds(b.ctx, 10*time.Second, "while nothing happens", func(ctx context.Context) error {
		now, err := b.gpuNode(ctx)
		if err == nil && now.Metadata.ResourceVersion != is.Metadata.ResourceVersion {
			err = fmt.Errorf("it is written, from\n%+v to\n%+v", is.Status, now.Status)
		}
		return err
	}))
	_, err := node.Kubectl(b.ctx, nil, "delete", "gpunode", node.Name)
	b.must(err)
	if again := b.gpuNodes("the same, again", "gpu-mem 79/79"); again.Metadata.UID == is.Metadata.UID {
		t.Error("it was not deleted")
	}

	// Killed without a word, the agent leaves it as it is; the next one has nothing to say.
	is, err = b.gpuNode(b.ctx)
	b.must(err)
	b.must(agent.Crash(b.ctx))
	b.must(agent.Ready(b.ctx))
	b.gpuNodes("the same", "gpu-mem 79/79", "True")
	if now, err := b.gpuNode(b.ctx); err != nil || now.Metadata.UID != is.Metadata.UID {
		t.Errorf("%+v, %v", now, err)
	}
}
