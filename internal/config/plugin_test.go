// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/compute"

	"github.com/google/go-cmp/cmp"
)

// theirs are configurations of NVIDIA's device plugin, the first as its README has them, with the entry of the
// partition that does the same, or with all that is wrong.
var theirs = []struct {
	name, in string
	entry    string
	notes    int
	mistakes []string
}{
	{"time slices", "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 10\n", "mode: shared\n      replicas: 10\n", 1, nil},
	{"all that there is", "version: v1\nflags:\n  migStrategy: none\n  plugin: {passDeviceSpecs: true}\nresources: {gpus: []}\nsharing:\n  timeSlicing:\n    renameByDefault: false\n    failRequestsGreaterThanOne: true\n    resources:\n    - {name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, devices: all, replicas: 4}\n",
		"mode: shared\n      replicas: 4\n", 3, nil},
	{"MPS", "version: v1\nsharing:\n  mps:\n    renameByDefault: true\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 10\n", "mode: shared\n      replicas: 10\n      compute: mps\n", 3, nil},
	{"only flags", "version: v1\nflags:\n  migStrategy: mixed\n", "mode: whole\n", 1, nil},
	{"no sharing", "version: v1\nflags: {}\nsharing:\n", "mode: whole\n", 1, nil},
	{"both ways", "version: v1\nsharing:\n  timeSlicing: {}\n  mps: {}\n", "", 0, []string{"f:4: sharing has timeSlicing or mps, not both"}},
	{"more clients than there can be", "version: v1\nsharing:\n  mps:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 49\n", "", 0, []string{`f:6: replicas of "nvidia.com/gpu" is at most 48, not 49`}},
	{"replicas of instances", "version: v1\nsharing:\n  mps:\n    resources:\n    - name: nvidia.com/mig-1g.5gb\n      replicas: 2\n", "", 0, []string{`f:5: replicas of MIG instances ("nvidia.com/mig-1g.5gb") do not exist here: a container has an instance alone`}},
	{"another version", "version: v2\nsharing: {}\n", "", 0, []string{"f:1: the version is not `version: v1`, the only one that NVIDIA's device plugin has"}},
	{"halves", "version: v1\nsharing:\n  mps:\n    percent: 3\n    resources:\n    - replicas: 2\n    - {name: nvidia.com/gpu, devices: [0], replicas: x}\n    - {name: nvidia.com/gpu}\n    - {name: nvidia.com/tpu}\n", "", 0, []string{
		`f:4: unknown key "percent": mps has renameByDefault, failRequestsGreaterThanOne and resources`,
		"f:6: the resource has no name",
		"f:7: devices other than all are not translated: write an entry for each kind of GPUs",
		`f:7: replicas of "nvidia.com/gpu" is a whole number, not the text "x"`,
		`f:8: the resource "nvidia.com/gpu" is already on line 7`,
		"f:9: the resource has no replicas",
		`f:9: the resource "nvidia.com/tpu" is not one of NVIDIA's device plugin`}},
	{"no resources", "version: v1\nsharing:\n  mps: {}\n", "", 0, []string{"f:3: mps has no resources"}},
	{"sharing of text", "version: v1\nsharing: mps\n", "", 0, []string{`f:2: sharing is a mapping, not the text "mps"`}},
}

// A configuration of NVIDIA's device plugin is translated, and its translation is a partition file with what it
// says. To Parse it is a mistake, which names the command that translates.
func TestFromDevicePlugin(t *testing.T) {
	for _, c := range theirs {
		got, is, err := FromDevicePlugin("f", []byte(c.in))
		if !is {
			t.Errorf("%s: it is not taken for one", c.name)
			continue
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if diff := cmp.Diff(strings.Join(c.mistakes, "\n"), text); diff != "" {
			t.Errorf("%s: -want +got:\n%s", c.name, diff)
		}
		const head = "version: v1\npartitions:\n  default:\n    - devices: all\n      "
		if err == nil && (got.Text != head+c.entry || len(got.Notes) != c.notes) {
			t.Errorf("%s: %s%q, want %s and %d notes", c.name, got.Text, got.Notes, c.entry, c.notes)
		}
		if _, err := Parse("f", []byte(c.in)); err == nil || !strings.HasPrefix(err.Error(), "f:1: this is a configuration of NVIDIA's device plugin") {
			t.Errorf("%s: Parse says %v", c.name, err)
		}
	}
	got, _, _ := FromDevicePlugin("f", []byte(theirs[2].in))
	d, err := mustParse(t, got.Text).Desire("default", node("x"), Node{Unit: 1024})
	if err != nil || d.GPUs[0].Compute != (compute.Sharing{MPS: true}) || d.GPUs[0].Replicas != 10 {
		t.Errorf("%+v, %v", d, err)
	}
	for _, other := range []string{"", "- a\n", "version: v1\npartitions: {}\nflags: {}\n", "version: v1\nmig-configs: {}\nsharing: {}\n", "version: v1\n", "version: [v1\n"} {
		if _, is, err := FromDevicePlugin("f", []byte(other)); is || err != nil {
			t.Errorf("%q is taken for one: %v", other, err)
		}
	}
}

// FuzzFromDevicePlugin: a translation without a mistake is a partition file, and mistakes are as Parse's.
func FuzzFromDevicePlugin(f *testing.F) {
	for _, c := range theirs {
		f.Add([]byte(c.in))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, is, err := FromDevicePlugin("f", data)
		switch {
		case !is:
			if err != nil {
				t.Fatalf("it is none, and wrong: %v", err)
			}
		case err != nil:
			checkErrors(t, data, err)
		default:
			file, err := Parse("g", []byte(got.Text))
			if err != nil {
				t.Fatalf("%s: %v", got.Text, err)
			}
			if _, err := file.Desire("default", node(), Node{Unit: 1024}); err != nil {
				t.Fatal(err)
			}
		}
	})
}
