// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"

	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

var update = flag.Bool("update", false, "write components/dra/classes.yaml anew")

const (
	classesFile = "components/dra/classes.yaml"
	classesHead = `# SPDX-License-Identifier: Apache-2.0

# DeviceClasses for the devices that agents publish. Written by
# "go test ./deployments -run TestDeviceClasses -update": one for each profile of a card that
# is recorded or of which NVIDIA tells the profiles. mig.example.com is any MIG instance, for
# claims that say in a selector which ones they take, and for profiles that are not here.
#
# extendedResourceName is a resource that the device plugin has too. So a pod that asks for
# it runs unchanged on either kind of node: where a node's kubelet has the resource, the
# scheduler counts that; elsewhere it makes a claim of the class. There is none for gpu-mem:
# n units would silently become n shares on n GPUs. Such a pod stays with the device plugin,
# or names a claim of gpu-memory.example.com with the amount that it wants:
#
#   requests:
#     - name: gpu
#       exactly:
#         deviceClassName: gpu-memory.example.com
#         capacity: {requests: {memory: 24Gi}}   # without it, all of the GPU's memory
#
# gpu.shared: 2 is replicas of two GPUs: within a request the scheduler takes no device
# twice.
#
# Another --domain changes "example.com" in all of this file; --resource-domain changes it
# in extendedResourceName alone.
#
# Every expression first asks whose device it is, and whether there is such an attribute:
# the scheduler evaluates it for the devices of all drivers, and an error stops it for
# every node.
`
)

// unrecorded are the profiles of cards that no recorded node has, as NVIDIA's MIG manager
// lists them (mig-parted's config-default.yaml, and the GPU operator's).
var unrecorded = map[string]string{
	"H100 NVL":         "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb",
	"H100 96GB, GH200": "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
	"H20":              "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
	"GH200 144GB":      "1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb",
	"GB200":            "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb",
	"GB200 189GB":      "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.95gb 4g.95gb 7g.189gb",
	"B300":             "1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb",
	"GB300":            "1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb",
}

// unrecordedProfiles are the same, read.
func unrecordedProfiles(t *testing.T) map[mig.Name]bool {
	t.Helper()
	out := map[mig.Name]bool{}
	for card, all := range unrecorded {
		for _, text := range strings.Fields(all) {
			p, err := mig.Parse(text)
			if err != nil {
				t.Fatal(card, err)
			}
			out[p] = true
		}
	}
	return out
}

// deviceClass is how a class is written: what devices are its own, and the resource that
// stands for it.
type deviceClass struct{ name, resource, expression string }

func (c *deviceClass) yaml() string {
	resource := ""
	if c.resource != "" {
		resource = "  extendedResourceName: " + c.resource + "\n"
	}
	return fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: %s
spec:
%s  selectors:
    - cel:
        expression: >-
          %s
`, c.name, resource, strings.ReplaceAll(c.expression, "\n", "\n          "))
}

// deviceClasses are those that the manifests should have.
func deviceClasses(t *testing.T) []deviceClass {
	t.Helper()
	domain := programFlags(t)["domain"]
	of := func(kind, more string) string {
		return fmt.Sprintf("device.driver == \"gpus.%[1]s\" &&\ncel.bind(of, device.attributes[\"gpus.%[1]s\"],\nhas(of.type) && of.type == %[2]q%[3]s)", domain, kind, more)
	}
	out := []deviceClass{
		{"gpu." + domain, domain + "/gpu", of("gpu", " && !has(of.sharing)")},
		{"gpu.shared." + domain, domain + "/gpu.shared", of("gpu", ` && has(of.sharing) && of.sharing == "replicas"`)},
		{"gpu-memory." + domain, "", of("gpu", ` && has(of.sharing) && of.sharing == "memory"`)},
		{"mig." + domain, "", of("mig", "")},
	}
	profiles := unrecordedProfiles(t)
	for _, file := range recorded(t) {
		inv, err := config.ReadInventory(read(t, file))
		if err != nil {
			t.Fatal(file, err)
		}
		for i := range inv.GPUs {
			card, err := mig.NewCard(&inv.GPUs[i].MIG)
			if err != nil {
				t.Fatal(file, err)
			}
			for _, p := range card.Placements() {
				profiles[p.Profile] = true
			}
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(profiles), mig.Compare) {
		out = append(out, deviceClass{p.Resource() + "." + domain, domain + "/" + p.Resource(),
			of("mig", fmt.Sprintf(" && has(of.profile) && of.profile == %q", p))})
	}
	return out
}

// The manifests have a class for each resource of the device plugin that can be had
// through DRA, in the words of the agent's own slices and domain.
func TestDeviceClasses(t *testing.T) {
	var parts []string
	for _, c := range deviceClasses(t) {
		parts = append(parts, c.yaml())
	}
	want := classesHead + strings.Join(parts, "---\n")
	if *update {
		if err := os.WriteFile(classesFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if string(read(t, classesFile)) != want {
		t.Errorf("%s is not what it should be: go test ./deployments -run TestDeviceClasses -update", classesFile)
	}
	if n := len(parts); n < 40 {
		t.Errorf("%d classes: this test does not look where the profiles are", n)
	}
}

// classes are those of the manifests, as the scheduler has them.
type classes map[string]*resource.DeviceClass

func readClasses(t *testing.T) classes {
	t.Helper()
	out := classes{}
	for _, o := range documents(t, classesFile, read(t, classesFile)) {
		var object any
		if err := o.node.Decode(&object); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		c := new(resource.DeviceClass)
		if err := json.Unmarshal(text, c); err != nil {
			t.Fatal(err)
		}
		out[c.Name] = c
	}
	return out
}

func (c classes) List() ([]*resource.DeviceClass, error) { return slices.Collect(maps.Values(c)), nil }

func (c classes) Get(name string) (*resource.DeviceClass, error) {
	if of := c[name]; of != nil {
		return of, nil
	}
	return nil, fmt.Errorf("no class %q", name)
}

// Each device that an agent publishes is of exactly one class, the one of its kind, and a MIG
// instance of that of any instance besides; and no class fails on a device of whomever: one
// error stops the scheduler for every node.
func TestDeviceClassesChooseTheirDevices(t *testing.T) {
	all := readClasses(t)
	compiled := map[string]cel.CompilationResult{}
	for name, c := range all {
		if len(c.Spec.Selectors) != 1 || c.Spec.Selectors[0].CEL == nil {
			t.Fatalf("class %s has the selectors %+v", name, c.Spec.Selectors)
		}
		compiled[name] = cel.GetCompiler(cel.Features{}).CompileCELExpression(c.Spec.Selectors[0].CEL.Expression, cel.Options{})
		if err := compiled[name].Error; err != nil {
			t.Fatalf("class %s: %v", name, err)
		}
	}
	chosen := func(what string, d cel.Device) (names []string) {
		t.Helper()
		for name, c := range compiled {
			matches, _, err := c.DeviceMatches(t.Context(), d)
			if err != nil {
				t.Errorf("class %s fails on %s: %v", name, what, err)
			}
			if matches {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	const anyInstance = "mig.example.com"
	had, ways := map[string]bool{}, 6
	if testing.Short() {
		ways = 1 // the first GPU is divided, and one of the others is what else there is
	}
	for _, file := range recorded(t) {
		for first := range ways {
			published := publishedOf(t, file, first)
			for i := range published.Slices {
				s := &published.Slices[i]
				for _, d := range s.Spec.Devices {
					of := published.Devices[dra.DeviceName{Pool: s.Spec.Pool.Name, Name: d.Name}]
					want := []string{map[piece.Kind]string{piece.KindWhole: "gpu.example.com", piece.KindUnits: "gpu-memory.example.com", piece.KindReplica: "gpu.shared.example.com"}[of.Kind]}
					if of.Kind == piece.KindPlacement {
						want = []string{of.Placement.Profile.Resource() + ".example.com", anyInstance}
					}
					for _, name := range want {
						had[name] = true
					}
					ours := cel.Device{Driver: s.Spec.Driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity}
					if got := chosen(d.Name, ours); !slices.Equal(got, want) {
						t.Errorf("%s of %s is of the classes %q, want %q", d.Name, file, got, want)
					}
					theirs := ours
					theirs.Driver = "gpu.example.org"
					if got := chosen("a like device of another driver", theirs); len(got) > 0 {
						t.Fatalf("a device of another driver is of the classes %q", got)
					}
				}
			}
		}
	}
	instance := "mig"
	for p := range unrecordedProfiles(t) {
		profile, want := p.String(), []string{p.Resource() + ".example.com", anyInstance}
		had[want[0]] = true
		device := cel.Device{Driver: "gpus.example.com", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"type": {StringValue: &instance}, "profile": {StringValue: &profile}}}
		if got := chosen("a "+profile, device); !slices.Equal(got, want) {
			t.Errorf("%s is of the classes %q, want %q", profile, got, want)
		}
	}
	for name := range all {
		if !had[name] {
			t.Errorf("no card has a device of class %s", name)
		}
	}
	text, otherwise, number := "gpu", "otherwise", int64(7)
	if got := chosen("an instance without a profile", cel.Device{Driver: "gpus.example.com", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"type": {StringValue: &instance}}}); !slices.Equal(got, []string{anyInstance}) {
		t.Errorf("an instance without a profile is of the classes %q", got)
	}
	for what, d := range map[string]cel.Device{
		"a device of ours without attributes":             {Driver: "gpus.example.com"},
		"one without a type":                              {Driver: "gpus.example.com", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"profile": {StringValue: &text}}},
		"a GPU that is shared in a way to come":           {Driver: "gpus.example.com", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"type": {StringValue: &text}, "sharing": {StringValue: &otherwise}}},
		"one whose attributes are of another kind":        {Driver: "gpus.example.com", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"type": {IntValue: &number}, "profile": {IntValue: &number}}},
		"a device of another driver without attributes":   {Driver: "nic.example.org"},
		"one that says of itself what ours say of theirs": {Driver: "gpu.example.org", Attributes: map[resource.QualifiedName]resource.DeviceAttribute{"gpus.example.com/type": {StringValue: &text}}},
	} {
		if got := chosen(what, d); len(got) > 0 {
			t.Errorf("%s is of the classes %q", what, got)
		}
	}
}

// What the scheduler's allocator makes of the classes: as many devices as are asked for
// and are there, and within a request never one of them twice, replicas included. Several
// requests may share a GPU.
func TestDeviceClassesInTheScheduler(t *testing.T) {
	all := readClasses(t)
	published := publishedOf(t, "../tests/testdata/inventories/h100-80gb.json", 0)
	var list []*resource.ResourceSlice
	for i := range published.Slices {
		s := &published.Slices[i]
		for j := range s.Spec.Devices {
			s.Spec.Devices[j].Taints = nil
		}
		list = append(list, s)
	}
	cache := cel.NewCache(100, cel.Features{})
	ask := func(class string, counts ...int64) (devices []string) {
		t.Helper()
		features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}
		of, err := structured.NewAllocator(t.Context(), features, structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}, all, list, cache)
		if err != nil {
			t.Fatal(err)
		}
		claim := &resource.ResourceClaim{ObjectMeta: meta.ObjectMeta{Name: "c", Namespace: "ns", UID: "uid"}}
		for i, n := range counts {
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resource.DeviceRequest{Name: fmt.Sprint("r-", i),
				Exactly: &resource.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resource.DeviceAllocationModeExactCount, Count: n}})
		}
		got, err := of.Allocate(t.Context(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: "node-1"}}, []*resource.ResourceClaim{claim})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range got {
			for _, r := range a.Devices.Results {
				devices = append(devices, r.Device)
			}
		}
		return devices
	}
	for _, test := range []struct {
		class    string
		counts   []int64 // of requests
		devices  int     // how many there are in the answer, and how many different ones
		distinct int
	}{
		{"gpu.example.com", []int64{2}, 2, 2},
		{"gpu.example.com", []int64{1, 1}, 2, 2},
		{"gpu.example.com", []int64{3}, 0, 0},
		{"mig-1g.10gb.example.com", []int64{14}, 14, 14},
		{"mig-7g.80gb.example.com", []int64{2}, 2, 2},
		{"mig-7g.80gb.example.com", []int64{3}, 0, 0},
		{"mig-1g.5gb.example.com", []int64{1}, 0, 0}, // another card's
		{"mig.example.com", []int64{1, 2}, 3, 3},
		{"gpu-memory.example.com", []int64{1, 1}, 2, 2},
		{"gpu-memory.example.com", []int64{1, 1, 1}, 0, 0}, // each has all of a GPU
		{"gpu.shared.example.com", []int64{2}, 2, 2},
		{"gpu.shared.example.com", []int64{3}, 0, 0},
		{"gpu.shared.example.com", []int64{1, 1}, 2, 1},
		{"gpu.shared.example.com", []int64{2, 2, 2, 2}, 8, 2},
		{"gpu.shared.example.com", []int64{2, 2, 2, 2, 1}, 0, 0},
	} {
		if got := ask(test.class, test.counts...); len(got) != test.devices || sets.New(got...).Len() != test.distinct {
			t.Errorf("%v of %s: %q, want %d, of them %d different ones", test.counts, test.class, got, test.devices, test.distinct)
		}
	}
}
