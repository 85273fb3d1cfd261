// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"strings"
	"testing"
	"testing/fstest"
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
