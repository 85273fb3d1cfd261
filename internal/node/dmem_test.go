// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

	"example.com/gpu-agent/pkg/gpu"
)

// TestCheckDmem: a cgroup without the kernel's controller of device memory is told
// from one that is gone, and what is to be done is said.
func TestCheckDmem(t *testing.T) {
	const own = "/kubepods.slice/kubepods-pod1.slice/cri-containerd-a.scope"
	tree := func(controllers string, enabled ...string) fstest.MapFS {
		fs := fstest.MapFS{"cgroup.controllers": {Data: []byte(controllers + "\n")}}
		for i, dir := range []string{"", "kubepods.slice/", "kubepods.slice/kubepods-pod1.slice/"} {
			fs[dir+"cgroup.subtree_control"] = &fstest.MapFile{Data: []byte(enabled[i] + "\n")}
		}
		return fs
	}
	has := tree("cpu dmem", "cpu dmem", "dmem", "dmem")
	has[strings.TrimPrefix(own, "/")+"/dmem.max"] = &fstest.MapFile{}
	for name, c := range map[string]struct {
		root fstest.MapFS
		want string // of the error; empty is none
	}{
		"a kernel without it": {tree("cpu memory", "cpu", "cpu", "cpu"), ""},
		"it has it":           {has, ""},
		"enabled nowhere": {tree("cpu dmem", "cpu", "cpu", "cpu"),
			"write +dmem to the file cgroup.subtree_control of /, /kubepods.slice, /kubepods.slice/kubepods-pod1.slice, in this order"},
		"not by the pod": {tree("cpu dmem", "cpu dmem", "cpu dmem", "cpu"),
			"cgroup.subtree_control of /kubepods.slice/kubepods-pod1.slice, in this order"},
		"by all": {tree("cpu dmem", "dmem", "dmem", "dmem"), "threaded"},
	} {
		err := checkDmem(c.root, own)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, ErrNoDmem) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if err := checkDmem(fstest.MapFS{}, own); err == nil || errors.Is(err, ErrNoDmem) {
		t.Errorf("a hierarchy that cannot be read: %v", err)
	}
}

// TestPodsCgroup: where the kubelet makes pods' cgroups in the unified hierarchy, and what keeps the driver from
// limiting those there.
func TestPodsCgroup(t *testing.T) {
	tree := func(controllers string, dirs ...string) fstest.MapFS {
		out := fstest.MapFS{"cgroup.controllers": {Data: []byte(controllers + "\n")}}
		for _, dir := range dirs {
			dir, on, _ := strings.Cut(dir, "=")
			out[dir+"/cgroup.subtree_control"] = &fstest.MapFile{Data: []byte(on + "\n")}
		}
		return out
	}
	many := tree("cpu")
	for i := range mostCgroups {
		many[fmt.Sprintf("a%d/x", i)] = &fstest.MapFile{}
	}
	many["kubepods/x"] = &fstest.MapFile{}
	for name, c := range map[string]struct {
		root fstest.MapFS
		only bool
		dir  string
		is   error
	}{
		"systemd":                    {tree("cpu", "kubepods.slice=cpu"), true, "/at/kubepods.slice", nil},
		"cgroupfs, beside version 1": {tree("", "kubepods="), false, "/at/kubepods", nil},
		"kind":                       {tree("cpu", "kubelet.slice/kubelet-kubepods.slice="), true, "/at/kubelet.slice/kubelet-kubepods.slice", nil},
		"a root of its own":          {tree("cpu", "a/b/kubepods="), false, "/at/a/b/kubepods", nil},
		"too deep, but where else":   {tree("cpu", "a/b/c/kubepods="), true, "/at", nil},
		"of version 1 alone":         {tree("cpu", "system.slice="), false, "", gpu.ErrNotSupported},
		"too many to find it":        {many, false, "", gpu.ErrNotSupported},
		"enabled for all": {tree("cpu dmem", "kubepods=cpu dmem", "kubepods/besteffort=dmem", "kubepods/burstable=dmem"),
			true, "/at/kubepods", nil},
		"not enabled":          {tree("dmem", "kubepods=cpu"), true, "", ErrNoDmem},
		"not for besteffort":   {tree("dmem", "kubepods=dmem", "kubepods/besteffort=cpu", "kubepods/burstable=dmem"), true, "", ErrNoDmem},
		"a pod's cgroup lacks": {tree("dmem", "kubepods=dmem", "kubepods/pod1="), true, "/at/kubepods", nil},
	} {
		dir, err := podsCgroup(c.root, "/at", c.only)
		if dir != c.dir || !errors.Is(err, c.is) {
			t.Errorf("%s: %q, %v, want %q, %v", name, dir, err, c.dir, c.is)
		}
		if c.is == ErrNoDmem && (err == nil || !strings.Contains(err.Error(), "write +dmem")) {
			t.Errorf("%s: %v does not say what to do", name, err)
		}
	}
	if _, err := NewRuntime(RuntimeOptions{}).PodsCgroup(); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("without a view of cgroups: %v", err)
	}
	if _, err := NewRuntime(RuntimeOptions{Cgroups: t.TempDir()}).PodsCgroup(); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("without a hierarchy: %v", err)
	}
}

// TestOtherCgroups: those of services, of the kubelet and of pods; none of a container, and nothing that a pod makes.
func TestOtherCgroups(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	root := fstest.MapFS{}
	for _, dir := range []string{"system.slice/a.service", "kubepods/besteffort/pod1/" + id + "/inner", "kubepods/besteffort/pod1/own",
		"kubepods.slice/kubepods-pod2.slice/cri-containerd-" + id + ".scope", "a/b/c/d/e"} {
		root[dir+"/cgroup.procs"] = &fstest.MapFile{}
	}
	var got []string
	for _, c := range otherCgroups(root, "/at") {
		if c.Dir != "/at"+c.Path {
			t.Errorf("%+v", c)
		}
		got = append(got, fmt.Sprintf("%s %v", c.Path, c.Pods))
	}
	want := "/a false, /a/b false, /a/b/c false, /a/b/c/d false, /kubepods true, /kubepods/besteffort true, /kubepods/besteffort/pod1 true, " +
		"/kubepods.slice true, /kubepods.slice/kubepods-pod2.slice true, /system.slice false, /system.slice/a.service false"
	if strings.Join(got, ", ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ", "), want)
	}
	for i := range 2 * mostOthers {
		root[fmt.Sprintf("x%d/y", i)] = &fstest.MapFile{}
	}
	if n := len(otherCgroups(root, "/at")); n != mostOthers {
		t.Errorf("of many there are %d", n)
	}
	if all := NewRuntime(RuntimeOptions{}).OtherCgroups(); all != nil {
		t.Errorf("without a view of cgroups: %v", all)
	}
}
