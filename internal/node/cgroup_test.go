// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"os"
	"os/exec"
	"path"
	"strconv"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestCgroupDir(t *testing.T) {
	const own = "/kubepods/besteffort/pod1/" + offender
	at := func(root string) *Runtime {
		r := NewRuntime(RuntimeOptions{Cgroups: root})
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	for name, c := range map[string]struct {
		root string
		o    Owner
		want error
	}{
		"of v1":                        {"/sys/fs/cgroup", Owner{ID: offender, Cgroup: own}, gpu.ErrNotSupported},
		"without a path":               {"/sys/fs/cgroup", Owner{ID: offender, V2: true}, gpu.ErrNotSupported},
		"no place is given":            {"", Owner{ID: offender, V2: true, Cgroup: own}, gpu.ErrNotSupported},
		"no hierarchy":                 {t.TempDir(), Owner{ID: offender, V2: true, Cgroup: own}, gpu.ErrNotSupported},
		"a neighbour's by way of dots": {"/sys/fs/cgroup", Owner{ID: offender, V2: true, Cgroup: own + "/../" + neighbour}, gpu.ErrInvalid},
		"below its own":                {"/sys/fs/cgroup", Owner{ID: offender, V2: true, Cgroup: own + "/x"}, gpu.ErrInvalid},
	} {
		if dir, err := at(c.root).CgroupDir(c.o); !errors.Is(err, c.want) || dir != "" {
			t.Errorf("%s: %q, %v, want %v", name, dir, err, c.want)
		}
	}

	mount, top := hierarchy(t)
	o := Owner{ID: offender, V2: true, Cgroup: top + own}
	r := at("/sys/fs/cgroup")
	if dir, err := r.CgroupDir(o); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("that is gone: %q, %v, want ErrNotFound", dir, err)
	}
	if err := os.MkdirAll(mount+o.Cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	if dir, err := r.CgroupDir(o); err != nil || dir != mount+o.Cgroup {
		t.Errorf("%q, %v, want %s", dir, err, mount+o.Cgroup)
	}
	// A cgroup may stay for a while when its container has ended.
	if has, err := r.HasProcesses(o); err != nil || has {
		t.Errorf("without processes: %v, %v", has, err)
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	if err := os.WriteFile(mount+o.Cgroup+"/cgroup.procs", []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	if has, err := r.HasProcesses(o); err != nil || !has {
		t.Errorf("with a process: %v, %v", has, err)
	}
	o.Cgroup = o.Cgroup[:len(o.Cgroup)-1]
	if has, err := r.HasProcesses(o); err == nil || has {
		t.Errorf("of no container: %v, %v", has, err)
	}
}

// The memory controller may be in another hierarchy than the unified one.
func TestMemoryCgroup(t *testing.T) {
	const own = "/kubepods/besteffort/pod1/" + offender
	r := NewRuntime(RuntimeOptions{Cgroups: "/sys/fs/cgroup"})
	t.Cleanup(func() { _ = r.Close() })
	mount, top := hierarchy(t)
	o, root := Owner{ID: offender, V2: true, Cgroup: top + own}, mount
	if mount != "/sys/fs/cgroup" { // both versions
		root = "/sys/fs/cgroup/memory"
		o.V2 = false // a process's line of version 1
		t.Cleanup(func() {
			for dir := root + o.Cgroup; dir != path.Dir(root+top); dir = path.Dir(dir) {
				if err := os.Remove(dir); err != nil {
					t.Error(err)
				}
			}
		})
	}
	if err := os.MkdirAll(root+o.Cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	if dir, at, err := r.MemoryCgroup(o); err != nil || dir != root+o.Cgroup || at != root {
		t.Errorf("%q in %q, %v, want %s in %s", dir, at, err, root+o.Cgroup, root)
	}
	if _, err := os.Stat(root + o.Cgroup + "/cgroup.procs"); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		o    Owner
		want error
	}{
		"that is gone":             {Owner{ID: neighbour, V2: o.V2, Cgroup: top + "/kubepods/besteffort/pod1/" + neighbour}, gpu.ErrNotFound},
		"a neighbour's, with dots": {Owner{ID: offender, V2: o.V2, Cgroup: o.Cgroup + "/../" + neighbour}, gpu.ErrInvalid},
		"below its own":            {Owner{ID: offender, V2: o.V2, Cgroup: o.Cgroup + "/x"}, gpu.ErrInvalid},
		"a path that is not known": {Owner{ID: offender, V2: o.V2}, gpu.ErrNotSupported},
	} {
		if dir, at, err := r.MemoryCgroup(c.o); !errors.Is(err, c.want) || dir != "" && at == root {
			t.Errorf("%s: %q in %q, %v, want %v", name, dir, at, err, c.want)
		}
	}
	blind := NewRuntime(RuntimeOptions{Cgroups: t.TempDir()})
	t.Cleanup(func() { _ = blind.Close() })
	if dir, _, err := blind.MemoryCgroup(o); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("no hierarchy: %q, %v", dir, err)
	}
}
