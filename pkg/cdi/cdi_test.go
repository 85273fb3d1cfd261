// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	domain = "example.com"
	gpuA   = gpu.UUID("GPU-0a111111-1111-1111-1111-111111111111")
	gpuB   = gpu.UUID("GPU-0b222222-2222-2222-2222-222222222222")
)

func TestKeyIsTheDocumentedHash(t *testing.T) {
	ids := []string{"GPU-b::2", "GPU-a::10", "GPU-a::9"}
	before := slices.Clone(ids)
	got := cdi.Key("example.com/gpu-mem", ids)

	sum := sha256.Sum256([]byte("example.com/gpu-mem\x00GPU-a::10\x00GPU-a::9\x00GPU-b::2"))
	if want := hex.EncodeToString(sum[:8]); got != want {
		t.Errorf("Key = %s, want %s", got, want)
	}
	if !slices.Equal(ids, before) {
		t.Errorf("Key changed its argument to %q", ids)
	}
	slices.Reverse(ids)
	if again := cdi.Key("example.com/gpu-mem", ids); again != got {
		t.Errorf("in another order the key is %s, not %s", again, got)
	}
	if !cdi.ValidKey(got) {
		t.Errorf("ValidKey(%q) = false", got)
	}
}

func TestKeysOfAContainer(t *testing.T) {
	const one, two, three = "0123456789abcdef", "1123456789abcdef", "2123456789abcdef"
	got := cdi.Keys(domain, map[string]string{
		cdi.AnnotationName(domain, two):              "its record",
		cdi.AnnotationName("other.org", three):       "",
		cdi.AnnotationName(domain, "0123456789ABCD"): "",
		"io.kubernetes.container.hash":               one,
	}, []string{cdi.DeviceName(domain, two), cdi.DeviceName(domain, one), cdi.DeviceName(domain, one), cdi.DeviceName("other.org", three),
		"example.com/net=" + three, cdi.DeviceName(domain, three+"0"), cdi.DeviceName(domain, ""), one})
	if want := []string{one, two}; !slices.Equal(got, want) {
		t.Errorf("keys %q, want %q", got, want)
	}
	if got := cdi.Keys(domain, nil, nil); got != nil {
		t.Errorf("keys of nothing: %q", got)
	}
}

func TestKeysOfDifferentAllocationsDiffer(t *testing.T) {
	allocations := []struct {
		resource string
		ids      []string
	}{
		{"example.com/gpu", []string{"a", "b"}},
		{"example.com/gpu", []string{"ab"}},
		{"example.com/gpu", []string{"a"}},
		{"example.com/gpua", []string{"b"}},
		{"example.com/gpu", nil},
		{"example.com/gpu", []string{""}},
	}
	seen := map[string]string{}
	for _, c := range allocations {
		name := fmt.Sprintf("%s %q", c.resource, c.ids)
		key := cdi.Key(c.resource, c.ids)
		if other, ok := seen[key]; ok {
			t.Errorf("%s and %s have one key, %s", name, other, key)
		}
		seen[key] = name
	}
}

func TestNames(t *testing.T) {
	const key = "0123456789abcdef"
	for got, want := range map[string]string{
		cdi.DeviceName(domain, key):     "example.com/gpu=0123456789abcdef",
		cdi.FileName(domain, key):       "example.com-gpu-0123456789abcdef.json",
		cdi.AnnotationName(domain, key): "example.com/gpu-allocation.0123456789abcdef",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if _, _, _, err := parser.ParseQualifiedName(cdi.DeviceName(domain, key)); err != nil {
		t.Errorf("the CDI library refuses the device's name: %v", err)
	}
	if got, ok := cdi.ParseFileName(domain, cdi.FileName(domain, key)); !ok || got != key {
		t.Errorf("ParseFileName = %q, %v", got, ok)
	}
	for _, foreign := range []string{
		"", "nvidia.yaml", "example.com-gpu.json", "example.com-gpu-.json",
		"example.com-gpu-0123456789abcdeF.json", "example.com-gpu-0123456789abcdef.yaml",
		"example.com-gpu-0123456789abcde.json", "example.com-gpu-0123456789abcdef0.json",
		"xexample.com-gpu-0123456789abcdef.json", "other.org-gpu-0123456789abcdef.json",
		"example.com-gpu-../../etc/passwd.json", "example.com-gpu-0123456789abcdef.json.tmp",
	} {
		if got, ok := cdi.ParseFileName(domain, foreign); ok {
			t.Errorf("ParseFileName(%q) = %q: not an allocation's file", foreign, got)
		}
	}
}

// parts is what a node with two GPUs and a driver at its root would have.
func parts() cdi.Parts {
	mode := fs.FileMode(0o666)
	hook := "/var/lib/gpu-agent/hooks/0123456789abcdef/nvidia-cdi-hook"
	return cdi.Parts{
		Common: specs.ContainerEdits{
			Env: []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu", "NVIDIA_VISIBLE_DEVICES=all"},
			DeviceNodes: []*specs.DeviceNode{
				{Path: "/dev/nvidiactl", Permissions: "rw", FileMode: &mode},
				{Path: "/dev/nvidia-uvm", Permissions: "rw", FileMode: &mode},
			},
			Mounts: []*specs.Mount{
				{HostPath: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.03", ContainerPath: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.03", Options: []string{"ro", "bind"}},
				{HostPath: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03", ContainerPath: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03", Options: []string{"ro", "bind"}},
			},
			Hooks: []*specs.Hook{
				{HookName: "createContainer", Path: hook, Args: []string{"nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"}},
			},
		},
		Devices: map[gpu.UUID]specs.ContainerEdits{
			gpuA: {
				DeviceNodes: []*specs.DeviceNode{
					{Path: "/dev/nvidia1", Permissions: "rw", FileMode: &mode},
					{Path: "/dev/dri/card0", Permissions: "rw"},
				},
				Hooks: []*specs.Hook{
					{HookName: "createContainer", Path: hook, Args: []string{"nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"}},
				},
			},
			gpuB: {
				DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", Permissions: "rw", FileMode: &mode}},
			},
		},
	}
}

func TestSpecGolden(t *testing.T) {
	elsewhere := parts()
	for _, m := range elsewhere.Common.Mounts {
		m.HostPath = "/run/nvidia/driver" + m.HostPath
	}
	for _, d := range elsewhere.Devices {
		for _, n := range d.DeviceNodes {
			n.HostPath = "/run/nvidia/driver" + n.Path
		}
	}
	groups := parts()
	groups.Common.AdditionalGIDs = []uint32{44, 27, 44}

	for _, c := range []struct {
		name    string
		parts   cdi.Parts
		gpus    []gpu.UUID
		over    cdi.Overlay
		version string
	}{
		{"one", parts(), []gpu.UUID{gpuB}, cdi.Overlay{}, "0.3.0"},
		{"two", parts(), []gpu.UUID{gpuB, gpuA, gpuB}, cdi.Overlay{}, "0.3.0"},
		{"elsewhere", elsewhere, []gpu.UUID{gpuA}, cdi.Overlay{}, "0.5.0"},
		{"groups", groups, []gpu.UUID{gpuA}, cdi.Overlay{}, "0.7.0"},
		{"overlaid", parts(), []gpu.UUID{gpuB}, overlay(), "0.4.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Keys that begin with a letter: a digit alone would ask for 0.5.0.
			spec, err := cdi.Spec(domain, "abcdef0123456789", c.parts, c.gpus, c.over)
			if err != nil {
				t.Fatal(err)
			}
			if spec.Version != c.version {
				t.Errorf("version %s, want the oldest that can say it, %s", spec.Version, c.version)
			}
			got, err := json.MarshalIndent(spec, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			file := filepath.Join("testdata", c.name+".json")
			if *update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s differs (-update writes it anew); got:\n%s", file, got)
			}
		})
	}
}

// overlay puts a library in place of CUDA's, and adds a file system.
func overlay() cdi.Overlay {
	return cdi.Overlay{
		Overrides: []cdi.Override{{Library: "libcuda.so", HostPath: "/var/lib/gpu-agent/cap/0123456789abcdef/libcuda.so.1", Real: "/usr/lib/gpu-agent/driver/libcuda.so.1"}},
		Mounts:    []specs.Mount{{HostPath: "tmpfs", ContainerPath: "/usr/lib/gpu-agent/usage", Type: "tmpfs", Options: []string{"nosuid", "size=32m"}}},
	}
}

// TestSpecNeedsWhatItReplaces: without the library, a container would run
// uncapped.
func TestSpecNeedsWhatItReplaces(t *testing.T) {
	over := overlay()
	over.Overrides[0].Library = "libother.so"
	if spec, err := cdi.Spec(domain, "abcdef0123456789", parts(), []gpu.UUID{gpuA}, over); !errors.Is(err, gpu.ErrNotFound) || spec != nil {
		t.Errorf("got %v, %v, want ErrNotFound", spec, err)
	}
}

func TestSpecSharesNothingWithItsParts(t *testing.T) {
	p, over := parts(), overlay()
	spec, err := cdi.Spec(domain, "abcdef0123456789", p, []gpu.UUID{gpuA, gpuB}, over)
	if err != nil {
		t.Fatal(err)
	}
	edits := &spec.Devices[0].ContainerEdits
	edits.Env[0] = "changed"
	for _, n := range edits.DeviceNodes {
		n.Path = "changed"
		if n.FileMode != nil {
			*n.FileMode = 0
		}
	}
	for _, m := range edits.Mounts {
		m.Options[0] = "changed"
	}
	for _, h := range edits.Hooks {
		h.Args[0] = "changed"
	}
	if !reflect.DeepEqual(p, parts()) || !reflect.DeepEqual(over, overlay()) {
		t.Error("a change of the spec changed what it was made from")
	}
}

func TestSpecRefuses(t *testing.T) {
	const key = "abcdef0123456789"
	for _, c := range []struct {
		name, domain, key string
		gpus              []gpu.UUID
		want              error
	}{
		{"a domain that CDI does not know as a vendor", "3m.com", key, []gpu.UUID{gpuA}, gpu.ErrInvalid},
		{"a key that is none", domain, "../x", []gpu.UUID{gpuA}, gpu.ErrInvalid},
		{"no GPU", domain, key, nil, gpu.ErrInvalid},
		{"an unknown GPU", domain, key, []gpu.UUID{gpuA, "GPU-other"}, gpu.ErrNotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec, err := cdi.Spec(c.domain, c.key, parts(), c.gpus, cdi.Overlay{})
			if !errors.Is(err, c.want) || spec != nil {
				t.Errorf("got %v, %v, want %v", spec, err, c.want)
			}
		})
	}
}

// readBack is what a runtime does with an allocation's file: the CDI library parses
// it strictly and validates every part.
func readBack(t *testing.T, spec *specs.Spec) *cdilib.Spec {
	t.Helper()
	data, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "spec.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := cdilib.ReadSpec(file, 0)
	if err != nil {
		t.Fatalf("the CDI library refuses the spec: %v\n%s", err, data)
	}
	return got
}

// FuzzSpecIsValidAndDeterministic makes parts out of random but well-formed
// pieces, many of them repeated, and holds the allocation's spec against the CDI
// library and against itself with the GPUs in another order.
func FuzzSpecIsValidAndDeterministic(f *testing.F) {
	for seed := range uint64(64) {
		f.Add(seed, uint8(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, n uint8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		p := cdi.Parts{Common: randomEdits(rng), Devices: map[gpu.UUID]specs.ContainerEdits{}}
		var gpus []gpu.UUID
		for i := range int(n%16) + 1 {
			u := gpu.UUID(fmt.Sprintf("GPU-%08x", rng.Uint32()+uint32(i)))
			p.Devices[u] = randomEdits(rng)
			gpus = append(gpus, u)
		}
		key := cdi.Key("example.com/gpu", []string{fmt.Sprint(seed)})
		spec, err := cdi.Spec(domain, key, p, gpus, cdi.Overlay{})
		if err != nil {
			t.Fatal(err)
		}
		read := readBack(t, spec)
		if read.GetDevice(key) == nil {
			t.Fatalf("the spec has no device %s", key)
		}
		if err := specs.ValidateVersion(spec); err != nil {
			t.Error(err)
		}

		rng.Shuffle(len(gpus), func(i, j int) { gpus[i], gpus[j] = gpus[j], gpus[i] })
		again, err := cdi.Spec(domain, key, p, gpus, cdi.Overlay{})
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(spec, again) {
			t.Error("another order of the GPUs gives another spec")
		}

		edits := spec.Devices[0].ContainerEdits
		if last := edits.Env[len(edits.Env)-1]; last != "NVIDIA_VISIBLE_DEVICES=void" {
			t.Errorf("the environment ends in %q", last)
		}
		for _, u := range gpus {
			for _, want := range p.Devices[u].DeviceNodes {
				same := 0
				for _, got := range edits.DeviceNodes {
					if reflect.DeepEqual(got, want) {
						same++
					}
				}
				if same != 1 {
					t.Errorf("device node %+v of %s stands %d times in the spec", *want, u, same)
				}
			}
		}
	})
}

func randomEdits(rng *rand.Rand) specs.ContainerEdits {
	some := func() string { return string(rune('a' + rng.IntN(5))) }
	var e specs.ContainerEdits
	for range rng.IntN(3) {
		e.Env = append(e.Env, []string{"NVIDIA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES_X=", "LIBDIR="}[rng.IntN(3)]+some())
	}
	for range rng.IntN(4) {
		n := &specs.DeviceNode{Path: "/dev/" + some(), Permissions: []string{"", "r", "rw", "rwm"}[rng.IntN(4)]}
		if rng.IntN(2) == 0 {
			n.HostPath = "/host/dev/" + some()
		}
		if rng.IntN(2) == 0 {
			m := fs.FileMode(rng.IntN(0o1000))
			n.FileMode = &m
		}
		e.DeviceNodes = append(e.DeviceNodes, n)
	}
	for range rng.IntN(4) {
		m := &specs.Mount{HostPath: "/host/" + some(), ContainerPath: "/" + some(), Options: []string{"ro", "bind"}}
		if rng.IntN(4) == 0 {
			m.Type = "tmpfs"
		}
		e.Mounts = append(e.Mounts, m)
	}
	for range rng.IntN(3) {
		e.Hooks = append(e.Hooks, &specs.Hook{
			HookName: []string{"createContainer", "createRuntime", "startContainer"}[rng.IntN(3)],
			Path:     "/" + some(), Args: []string{some(), some()},
		})
	}
	for range rng.IntN(3) {
		e.AdditionalGIDs = append(e.AdditionalGIDs, uint32(1+rng.IntN(4)))
	}
	return e
}
