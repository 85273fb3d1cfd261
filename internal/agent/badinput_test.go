// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	faked "example.com/gpu-agent/tests/fakes/claims"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
)

// givenWrong has an agent that offers two GPUs through DRA, in a way, one of which has a
// claim. It reports whether anything has changed since.
func givenWrong(t *testing.T, o *outside, entry, device string, gib int64) (b *bench, unchanged func(what string)) {
	o.dra = newScheduled()
	b = start(t, o, t.TempDir(), throughDRA(entry))
	time.Sleep(time.Minute) // a geometry is cut
	synctest.Wait()
	if _, err := o.dra.prepare(t.Context(), o.dra.allocate(t, "before", device, gib)); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	held, ops, published := b.ledger.Allocations(), len(o.ops), o.dra.Slices()
	return b, func(what string) {
		t.Helper()
		for i, a := range b.ledger.Allocations() {
			if i >= len(held) || !reflect.DeepEqual(a.Grants, held[i].Grants) || !a.IsOpen() {
				t.Errorf("%s changes what is held: %+v", what, a)
			}
		}
		if len(b.ledger.Allocations()) != len(held) || len(o.ops) != ops {
			t.Errorf("%s changes something: %+v, %v", what, b.ledger.Allocations(), o.ops[ops:])
		}
		if !reflect.DeepEqual(o.dra.Slices(), published) {
			t.Errorf("%s changes slices:\n%+v\nwere\n%+v", what, o.dra.Slices(), published)
		}
	}
}

// consumed is what a claim has of a capacity of a device.
func consumed(name resourcev1.QualifiedName, n int64) map[resourcev1.QualifiedName]resource.Quantity {
	return map[resourcev1.QualifiedName]resource.Quantity{name: *resource.NewQuantity(n, resource.BinarySI)}
}

// configured is a claim's configuration for the driver.
func configured(text string) []resourcev1.DeviceAllocationConfiguration {
	return []resourcev1.DeviceAllocationConfiguration{{DeviceConfiguration: resourcev1.DeviceConfiguration{
		Opaque: &resourcev1.OpaqueDeviceConfiguration{Driver: draDriver, Parameters: apiruntime.RawExtension{Raw: []byte(text)}}}}}
}

// A claim that cannot be prepared is refused with the reason, which the kubelet puts into
// an Event of its pod; one that never can be has an Event of ours and a condition, too.
// Nothing else changes by it.
func TestBadClaims(t *testing.T) {
	type result = resourcev1.DeviceRequestAllocationResult
	of := func(r result) func(*agentkube.Claim) {
		return func(c *agentkube.Claim) { c.Results = []result{r} }
	}
	amount := func(bytes int64) func(*agentkube.Claim) {
		return func(c *agentkube.Claim) { c.Results[0].ConsumedCapacity = consumed("memory", bytes) }
	}
	config := func(text string, class bool) func(*agentkube.Claim) {
		return func(c *agentkube.Claim) {
			c.Configs = configured(text)
		}
	}
	for name, c := range map[string]struct {
		change func(*agentkube.Claim)
		want   string
		lasts  status.Reason // empty where it may pass
	}{
		"of another node's pool":              {of(result{Request: "gpu", Driver: draDriver, Pool: "node-2/a100", Device: "gpu-0"}), "only devices of its own pools", status.ClaimRefused},
		"of a pool that is not there":         {func(c *agentkube.Claim) { c.Results[0].Pool = "NODE/h100" }, "this node has no device", status.ClaimOutdated},
		"of a pool by the node's bare name":   {func(c *agentkube.Claim) { c.Results[0].Pool = "NODE" }, "only devices of its own pools", status.ClaimRefused},
		"of a GPU that is not there":          {func(c *agentkube.Claim) { c.Results[0].Device = "gpu-0000000f-shared" }, "this node has no device", status.ClaimOutdated},
		"of an older layout":                  {func(c *agentkube.Claim) { c.Results[0].Device = "gpu-00000001" }, "this node has no device", status.ClaimOutdated},
		"of an older layout, a MIG device":    {func(c *agentkube.Claim) { c.Results[0].Device = "gpu-00000001-mig-1g10gb-0" }, "this node has no device", status.ClaimOutdated},
		"without capacity":                    {func(c *agentkube.Claim) { c.Results[0].ConsumedCapacity = nil }, "0 bytes", status.ClaimRefused},
		"with a capacity of another name":     {func(c *agentkube.Claim) { c.Results[0].ConsumedCapacity = consumed("gpus", 1<<30) }, "0 bytes", status.ClaimRefused},
		"with half a unit":                    {amount(1 << 29), "an amount is 1 to 4 times 1024 MiB", status.ClaimRefused},
		"with a unit and a byte":              {amount(1<<30 + 1), "an amount is", status.ClaimRefused},
		"with nothing":                        {amount(0), "an amount is", status.ClaimRefused},
		"with less than nothing":              {amount(-1 << 30), "an amount is", status.ClaimRefused},
		"with more than there is":             {amount(5 << 30), "an amount is", status.ClaimRefused},
		"with the largest number there is":    {amount(1<<63 - 1), "an amount is", status.ClaimRefused},
		"of 32 devices, one of them outdated": {func(c *agentkube.Claim) { c.Results = thirtyTwo(c.Results[0]) }, "this node has no device", status.ClaimOutdated},
		"of another driver":                   {func(c *agentkube.Claim) { c.Results[0].Driver = "gpu.nvidia.com" }, "nothing of driver", status.ClaimRefused},
		"not allocated any more":              {func(c *agentkube.Claim) { c.Results = nil }, "nothing of driver", status.ClaimRefused},
		"configuration of unknown kind":       {config(`{"apiVersion":"v7","kind":"Wonder"}`, false), `kind "Wonder", "v7"`, status.ClaimUnsupported},
		"configuration with unknown fields":   {config(`{"apiVersion":"gpus.example.com/v1","kind":"GpuConfig","color":"red"}`, false), `kind "GpuConfig"`, status.ClaimUnsupported},
		"configuration with MPS":              {config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`, false), `kind "GpuConfig", "resource.nvidia.com/v1beta1"`, status.ClaimUnsupported},
		"configuration of the class":          {config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`, true), `kind "MigDeviceConfig"`, status.ClaimUnsupported},
		"configuration that is no object":     {config(`["GpuConfig"]`, false), `kind ""`, status.ClaimUnsupported},
		"configuration that is no JSON":       {config(`{"kind":`, false), `kind ""`, status.ClaimUnsupported},
		"replaced under its name":             {func(c *agentkube.Claim) { c.UID = "another" }, "is another one now", ""},
		"deleted meanwhile":                   {func(c *agentkube.Claim) { c.Name = "renamed" }, gpu.ErrNotFound.Error(), ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(2)
				b, unchanged := givenWrong(t, o, "mode: shared", "00000000-shared", 1)
				defer b.end()
				b.with(func() { o.pods = append(o.pods, workload.Pod{Namespace: "ns", Name: "p"}) })
				at, _ := o.dra.Device("00000001-shared")
				bad := agentkube.Claim{Namespace: "ns", Name: "bad", UID: "uid-bad", Pods: []workload.Pod{{Namespace: "ns", Name: "p", UID: "uid-p"}}, Results: []result{
					{Request: "gpu", Driver: draDriver, Pool: at, Device: "gpu-00000001-shared", ShareID: faked.Share("s"), ConsumedCapacity: consumed("memory", 1<<30)}}}
				c.change(&bad)
				for i := range bad.Results { // the node's name is the bench's
					node, _, _ := strings.Cut(at, "/")
					bad.Results[i].Pool = strings.Replace(bad.Results[i].Pool, "NODE", node, 1)
				}
				o.dra.Put(bad)
				events := func() (out []string) {
					b.with(func() { out = slices.Clone(b.events) })
					return out
				}
				began, before := time.Now(), len(events())
				_, err := o.dra.prepare(t.Context(), kubelet.Claim{Namespace: "ns", Name: "bad", UID: "uid-bad"})
				if synctest.Wait(); err == nil || !strings.Contains(err.Error(), c.want) || time.Since(began) > time.Second {
					t.Errorf("%v after %v; want %q", err, time.Since(began), c.want)
				}
				time.Sleep(time.Second - time.Since(began))
				synctest.Wait()
				said, conditions := strings.Join(events()[before:], "\n"), b.Status().Conditions
				told := slices.ContainsFunc(conditions, func(k status.Condition) bool { return k.Subject == "ns/"+bad.Name && k.Reason == c.lasts })
				if c.lasts != "" && (!told || !strings.HasPrefix(said, "p Warning "+string(c.lasts)+": ")) || c.lasts == "" && (said != "" || len(conditions) > 0) {
					t.Errorf("within a second the pod is told %q, and the conditions are %+v; want %s", said, conditions, c.lasts)
				}
				if b.state() != "applied" {
					t.Errorf("a tenant's claim makes the node %s: %s", b.state(), b.message())
				}
				unchanged("a claim " + name)
			})
		})
	}
}

// thirtyTwo are as many results as a claim may have; the last is of an older layout.
func thirtyTwo(r resourcev1.DeviceRequestAllocationResult) (out []resourcev1.DeviceRequestAllocationResult) {
	for range 31 {
		out = append(out, r)
	}
	r.Device = "gpu-00000001"
	return append(out, r)
}

// What an operator, somebody else on the cluster or the cluster itself does wrong stands on
// the node within a second, and nobody who has something is touched.
func TestBadNodes(t *testing.T) {
	file := func(text string) func(*bench, *outside) {
		return func(b *bench, _ *outside) { b.SetFile("p.yaml", []byte(text)) }
	}
	server := func(err error) func(*bench, *outside) {
		return func(_ *bench, o *outside) {
			o.dra.Refuse(err)
			o.dra.Wipe()
		}
	}
	meddle := func(change func([]resourcev1.ResourceSlice) []resourcev1.ResourceSlice) func(*bench, *outside) {
		return func(_ *bench, o *outside) { o.dra.Meddle(change) }
	}
	for name, c := range map[string]struct {
		do     func(*bench, *outside)
		state  string
		reason status.Reason
		want   string
		none   bool // there are no slices then
	}{
		"an unknown field beside it":      {file(throughDRA("mode: shared, unit: x")), "invalid", status.PartitionsInvalid, "p.yaml:4", false},
		"an unknown api":                  {file("version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, api: csi}\n"), "invalid", status.PartitionsInvalid, "p.yaml:4", false},
		"an api where nothing is offered": {file(throughDRA("mode: off")), "invalid", status.PartitionsInvalid, "p.yaml:4", false},
		"splits":                          {file(throughDRA("mode: mig, geometry: {1c.3g.40gb: 2}")), "invalid", status.PartitionUnfit, "cannot offer parts of a GPU instance", false},
		"MPS without its daemons":         {file(throughDRA("mode: shared, compute: mps")), "invalid", status.PartitionUnfit, "no supervisor keeps MPS daemons on this node", false},
		"a name through both": {file("version: v1\npartitions:\n  default:\n    - {devices: [0], mode: whole, api: dra}\n    - {devices: [1], mode: whole}\n"), "invalid", status.PartitionUnfit,
			"gpu would be offered through", false},
		"an API server below 1.36.2":   {server(fmt.Errorf("%w: it is Kubernetes v1.36.1, and 1.36.2 is needed", agentkube.ErrUnfit)), "failed", status.APIServerUnfit, "1.36.2 is needed", true},
		"a gate off":                   {server(fmt.Errorf("%w (taints)", agentkube.ErrDropped)), "failed", status.APIServerUnfit, "(taints)", true},
		"slices that somebody deletes": {func(_ *bench, o *outside) { o.dra.Wipe() }, "applied", status.SlicesChanged, "writes them again", false},
		"slices that somebody edits": {meddle(func(all []resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			all[len(all)-1].Spec.Devices = nil
			return all
		}), "applied", status.SlicesChanged, "writes them again", false},
		"slices of two agents": {meddle(func(all []resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			return append(all, resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "00009-theirs"},
				Spec: resourcev1.ResourceSliceSpec{Pool: resourcev1.ResourcePool{Name: "node-1/theirs", ResourceSliceCount: 1}}})
		}), "applied", status.SlicesChanged, "00009-theirs", false},
		"two agents on one node": {func(_ *bench, o *outside) {
			o.dra.lose(true, errors.New("another process listens at gpus.example.com-reg.sock"))
		}, "failed", status.NotRegistered,
			"another process listens", false},
		"a kubelet that refuses the driver": {func(_ *bench, o *outside) {
			o.dra.lose(true, errors.New("the kubelet refuses it: a plugin of this name"))
		}, "failed", status.NotRegistered,
			"the kubelet refuses it", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(2)
				b, unchanged := givenWrong(t, o, "mode: shared", "00000000-shared", 1)
				defer b.end()
				c.do(b, o)
				time.Sleep(time.Second)
				synctest.Wait()
				var onNode, events string
				b.with(func() {
					onNode, events = b.annotations["example.com/gpu.partition.reason"], strings.Join(b.events, "\n")
				})
				if s := b.Status(); b.state() != c.state || onNode != string(c.reason) || s.Partition.Reason != c.reason || !strings.Contains(b.message(), c.want) || !strings.Contains(events, c.want) {
					t.Errorf("the node is %s for %q (%s); want %s for %s with %q. Events:\n%s", b.state(), onNode, b.message(), c.state, c.reason, c.want, events)
				}
				if c.none {
					if len(o.dra.Slices()) > 0 {
						t.Errorf("slices that the server cannot hold: %+v", o.dra.Slices())
					}
					o.dra.Refuse(nil)
					time.Sleep(time.Minute)
					synctest.Wait()
				}
				unchanged(name)
			})
		})
	}
}

// TestAnotherTeamsFile puts what another team keeps in ConfigMaps in the place of the partitions. Whatever it is,
// what was on offer stays on offer, a pod keeps what it has, and the next good file is in force.
func TestAnotherTeamsFile(t *testing.T) {
	for name, c := range map[string]struct {
		text  string
		state string
		want  string
	}{
		"nothing": {"", "invalid", "p.yaml:1"},
		"a manifest with the partitions in it": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: gpu-partitions}\ndata:\n" +
			"  config.yaml: |\n    version: v1\n    partitions:\n      default:\n        - {devices: all, mode: whole}\n", "invalid", "p.yaml:"},
		"a Deployment": {"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {replicas: 3}\n", "invalid", "p.yaml:"},
		"the file of NVIDIA's device plugin": {"version: v1\nflags:\n  migStrategy: none\nsharing:\n  timeSlicing:\n" +
			"    resources:\n      - {name: nvidia.com/gpu, replicas: 10}\n", "invalid", "p.yaml:"},
		"the file of NVIDIA's MIG manager": {"version: v1\nmig-configs:\n  all-disabled:\n    - {devices: all, mig-enabled: false}\n" +
			"  all-1g.10gb:\n    - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}\n", "pending", "all-disabled"},
		"HAMi's file": {"nvidia:\n  resourceCountName: nvidia.com/gpu\n  deviceSplitCount: 10\n", "invalid", "p.yaml:"},
		"JSON":        {`{"log": {"level": "info"}}`, "invalid", "p.yaml:"},
		"no text":     {"\x1f\x8b\x08\x00\x00\xff", "invalid", "p.yaml"},
		"a partition of other models": {"version: v1\npartitions:\n  default:\n    - {devices: {model: \"NVIDIA L4\"}, mode: whole}\n",
			"invalid", "no entry for GPUs 0 and 1"},
		"partitions of other nodes": {"version: v1\npartitions:\n  inference:\n    - {devices: all, mode: whole}\n", "pending", "inference"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(2), t.TempDir()
				b := start(t, o, dir, allShared)
				b.want("applied", fourUnits, "")
				b.hold("tenant", memResource, string(uuid(0))+"::1")
				files, held := b.files(), b.Allocations()
				same := func(when string) {
					t.Helper()
					b.want(c.state, fourUnits, "")
					if m := b.message(); !strings.Contains(m, c.want) {
						t.Errorf("%s: the node says %q, want %q", when, m, c.want)
					}
					if now := b.Allocations(); len(now) != 1 || !reflect.DeepEqual(now[0].Grants, held[0].Grants) {
						t.Errorf("%s: allocations are %+v, were %+v", when, now, held)
					}
					if now := b.files(); !slices.Equal(now, files) {
						t.Errorf("%s: CDI files are %v, were %v", when, now, files)
					}
				}
				b.SetFile("p.yaml", []byte(c.text))
				same("at once")
				time.Sleep(time.Hour)
				same("an hour later")
				b.SetFile("p.yaml", []byte(strings.Replace(allShared, "all", "[1]", 1)+"    - {devices: [0], mode: shared}\n"))
				b.want("applied", fourUnits, "")
				b.end()
			})
		})
	}
}
