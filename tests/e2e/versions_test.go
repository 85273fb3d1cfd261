// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/lab"
)

// The short form of what the other tests are about, for nodes of other versions: see -kubernetes
// and -runtime. A pod has its piece of a GPU and is held to it, an instance is made when a
// container starts and goes when its room is wanted, containers keep their devices while the
// kubelet, the agent and the container runtime start anew, claims are served where the API server
// can have them, and the clean-up leaves nothing.
func TestVersions(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	s, err := node.State(b.ctx)
	b.must(err)
	is, err := version.ParseGeneric(s.Kubelet)
	b.must(err)
	name, release, _ := strings.Cut(s.Runtime, "://")
	row := fmt.Sprintf("| %s | %s %s ", is, name, strings.TrimPrefix(release, "v"))
	b.Logf("this node is %s", row)
	if doc, err := os.ReadFile(filepath.Join(kit.Root, "docs", "support.md")); err != nil || !strings.Contains(string(doc), "\n"+row) {
		b.Errorf("docs/support.md has no row %s (%v)", row, err)
	}

	b.must(agent.Reset(b.ctx, `version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1], mode: shared, replicas: 2}
    - {devices: [2], mode: mig}
    - {devices: [3], mode: whole, api: dra}
    - {devices: [4, 5, 6, 7], mode: off}
`))
	small, large := lab.MIG("1g.10gb"), lab.MIG("7g.80gb")
	offers := map[string]int{lab.Memory: units, lab.Replicas: 2, small: 7, large: 1}
	b.offers(offers)

	// A piece of memory, its cap, a replica, and an instance that was not there.
	const limit = 8 * giB
	memory := b.tenant("memory", limit/giB)
	replica, has := b.running("replica", lab.Replicas, 1)
	if g := b.one(has); g.Index != 1 {
		b.Errorf("a replica is of GPU %d, want 1", g.Index)
	}
	b.stands(map[int]string{2: ""})
	instance := b.pod("instance", small, 1)
	b.must(instance.Running(b.ctx))
	// works looks at what the containers have, by programs that have just started.
	works := func(b *bench) {
		b.Helper()
		if g := b.one(b.inside(memory, "")); g.Index != 0 {
			b.Errorf("the memory is of GPU %d, want 0", g.Index)
		}
		k := b.probe(memory, "", nil)
		b.take(k, limit/2, 1)
		if a := b.ask(k, "take cuMemAlloc_v2 %d 1", uint64(limit/2)); a.Result() != lab.OutOfMemory {
			b.Errorf("more than the cap of %d MiB: %s", limit/miB, a)
		}
		b.must(k.Close())
		if all := b.insideMIG(instance, ""); len(all) != 1 || all[0].compute.Profile != "1g.10gb" || all[0].gpu.Index != 2 {
			b.Errorf("the pod of an instance sees %v", all)
		}
	}
	works(b)
	offers[large] = 0 // its room is in use

	tenants := []*lab.RunningPod{memory, replica, instance}
	before := b.processes(tenants...)
	if len(before) != len(tenants) {
		b.Fatalf("there run %v, want %d containers", before, len(tenants))
	}
	for _, restarted := range []struct {
		what    string
		restart func(context.Context) error
	}{
		{"kubelet", node.RestartKubelet},
		{"agent", agent.Kill},
		{"runtime", node.RestartRuntime},
	} {
		b.sub(restarted.what+" starts anew", func(b *bench) {
			b.must(restarted.restart(b.ctx))
			b.offers(offers)
			for _, p := range []*lab.RunningPod{b.pod("more", lab.Memory, 2), b.pod("another", small, 1)} {
				b.must(p.Running(b.ctx))
				b.must(p.Delete(b.ctx))
				b.must(p.Gone(b.ctx))
			}
			b.must(hurt(before))
			works(b)
		})
	}
	b.must(memory.RestartContainer(b.ctx, ""))
	works(b)

	b.sub("claims", func(b *bench) {
		object, err := b.gpuNode(b.ctx)
		b.must(err)
		want := gpunode.InObject
		if is.AtLeast(version.MustParseGeneric("1.36.0")) {
			want = gpunode.InPods
		}
		if object.Status.HoldersIn != want {
			b.Errorf("holders are told in %s, want %s", object.Status.HoldersIn, want)
		}
		if !is.AtLeast(version.MustParseGeneric("1.36.2")) {
			says, err := agent.AwaitWord(b.ctx, "failed", "1.36.2")
			b.must(err)
			b.Logf("no claims on this version: %s", says)
			return
		}
		b.state("applied")
		pod := b.claimPod("claim", "gpu.example.com", 0)
		b.comes(pod)
		if g := b.one(b.inside(pod, "")); g.Index != 3 {
			b.Errorf("a claim is of GPU %d, want 3", g.Index)
		}
		b.must(pod.Delete(b.ctx))
		b.must(pod.Gone(b.ctx))
		b.must(node.DeleteClaims(b.ctx))
	})

	// The instance stays warm until its room is wanted.
	b.must(instance.Delete(b.ctx))
	b.must(instance.Gone(b.ctx))
	all := b.pod("all", large, 1)
	b.must(all.InState(b.ctx, waitLong, "to run", func(s lab.PodState) error {
		if s.Phase != "Running" {
			return errors.New(s.String())
		}
		return nil
	}))
	b.stands(map[int]string{2: "7g.80gb@0"})

	b.must(agent.Uninstall(b.ctx))
	b.must(node.DeletePods(b.ctx))
	b.cleanedUp()
	b.must(agent.EndUninstall(b.ctx))
}
