// SPDX-License-Identifier: Apache-2.0

package release

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// dirs are where a program that was installed could leave files, and others those of the
// kubelet, the runtime and the network below them, which come and go with pods. The empty
// directory /run/cdi stays: it belongs to all who write CDI files.
var (
	dirs   = []string{"/etc", "/opt", "/usr/local", "/var/lib", "/run", "/dev"}
	others = []string{"/var/lib/kubelet/allocated_pods_state", "/var/lib/kubelet/actuated_pods_state",
		"/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "/var/lib/kubelet/pods", "/var/lib/kubelet/image_manager", "/var/lib/containerd", "/run/containerd", "/run/netns", "/var/lib/cni", "/dev/pts", "/dev/shm"}
)

// everything is what the API server has, what the Node says, and the files and mounts of
// the node, each in words.
func (b *bench) everything() map[string]bool {
	b.Helper()
	all := map[string]bool{}
	kinds := slices.DeleteFunc(strings.Fields(b.kubectl("api-resources", "--verbs=list", "-o", "name")), func(kind string) bool {
		// Events tell what has been, and leases are renewed under names of their own.
		return strings.HasPrefix(kind, "events") || strings.HasPrefix(kind, "leases") || kind == "componentstatuses"
	})
	for line := range strings.Lines(b.kubectl("get", strings.Join(kinds, ","), "-A", "-o",
		`jsonpath={range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name}{"\n"}{end}`)) {
		all[strings.TrimSpace(line)] = true
	}
	s, err := b.node.State(b.Context())
	must(b.T, err)
	for key, value := range s.Labels {
		all["the Node's label "+key+"="+value] = true
	}
	for key := range s.Annotations {
		all["the Node's annotation "+key] = true
	}
	for kind := range s.Conditions {
		all["the Node's condition "+kind] = true
	}
	for resource, n := range s.Allocatable {
		if n > 0 { // the kubelet keeps the name, and for five minutes the capacity
			all["the Node's "+resource] = true
		}
	}
	for _, dir := range dirs {
		b.files(all, dir)
	}
	b.mounts(all)
	return all
}

func (b *bench) files(all map[string]bool, dir string) {
	b.Helper()
	root := b.node.File("")
	err := filepath.WalkDir(root+dir, func(path string, d fs.DirEntry, err error) error {
		file := strings.TrimPrefix(path, root)
		switch {
		case errors.Is(err, fs.ErrNotExist): // gone meanwhile
			return nil
		case err != nil:
			return err
		case slices.Contains(others, file):
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if file != "/run/cdi" {
			all["file "+file] = true
		}
		return nil
	})
	must(b.T, err)
}

func (b *bench) mounts(all map[string]bool) {
	b.Helper()
	data, err := os.ReadFile(b.node.File("/proc/1/mountinfo"))
	must(b.T, err)
	for line := range strings.Lines(string(data)) {
		at := strings.Fields(line)[4]
		if !slices.ContainsFunc(others, func(dir string) bool { return strings.HasPrefix(at, dir+"/") }) {
			all["mount "+at] = true
		}
	}
}

// differences are what is there and was not, and what is not any more.
func differences(before, after map[string]bool) (out []string) {
	for what := range after {
		if !before[what] {
			out = append(out, "left behind: "+what)
		}
	}
	for what := range before {
		if !after[what] {
			out = append(out, "gone: "+what)
		}
	}
	slices.Sort(out)
	return out
}
