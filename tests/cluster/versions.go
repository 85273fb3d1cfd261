// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Parts of other container runtimes.
const (
	containerd17Part = "containerd-1.7"
	crioPart         = "crio-1.34"
)

// A node is made of one version of Kubernetes and of one container runtime. Those of parts
// have their programs in bin/, others theirs in a directory of bin/ that has the part's name
// and comes first in the node's PATH.

// kubernetes is the part of a version of Kubernetes. The programs of all versions have one
// source, in the directory kubernetes; other versions have a go.mod of their own below it.
func (l Layout) kubernetes(source, goVersion, version string) part {
	const variable = "k8s.io/component-base/version."
	minor := strings.Split(version, ".")[1]
	flags := []string{"-ldflags=-s -w -X " + variable + "gitVersion=" + version + " -X " + variable + "gitTreeState=clean -X " +
		variable + "gitMajor=1 -X " + variable + "gitMinor=" + minor}
	outputs := []string{"kubernetes", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"}
	name, module := "Kubernetes", ""
	if version != kubernetesVersion {
		name, module = "kubernetes-1."+minor, "v1."+minor
		flags = append(flags, "-modfile="+module+"/go.mod")
		outputs = below(name, outputs)
	}
	p := l.goPart(source, goVersion, name+" "+version, "kubernetes", 6, "takes about 5 minutes on 2 cores", outputs, append(flags, ".")...)
	if module != "" {
		p.inputs = append(p.inputs, filepath.Join(source, "kubernetes", module))
	}
	return p
}

// containerd is the part of a version of containerd.
func (l Layout) containerd(source, goVersion, version string) part {
	name, module, packages := "containerd", "containerd", "github.com/containerd/containerd/v2"
	outputs := []string{"containerd", "containerd-shim-runc-v2", "ctr"}
	if version == containerd17 {
		name, module, packages = containerd17Part, "containerd/v1.7", "github.com/containerd/containerd"
		outputs = below(name, outputs)
	}
	return l.goPart(source, goVersion, name+" "+version, module, 2, "takes a minute or two on 2 cores", outputs,
		"-tags=osusergo netgo static_build urfave_cli_no_docs", "-ldflags=-s -w -X "+packages+"/version.Version="+version,
		packages+"/cmd/containerd", packages+"/cmd/containerd-shim-runc-v2", packages+"/cmd/ctr")
}

// What CRI-O needs of Debian's, below crioDebian: what holds a container, and its libraries.
const (
	crioDebian    = "debian-crio"
	conmonProgram = "usr/bin/conmon"
)

var crioPackages = []string{"conmon", "libglib2.0-0", "libpcre2-8-0"}

// crio is the part of CRI-O: its own program, the one of its tests that copies images, pinns,
// which is C source in its module, and Debian's conmon. It knows no seccomp, which would take a
// library of C.
func (l Layout) crio(source, goVersion string) part {
	const module = "github.com/cri-o/cri-o"
	outputs := below(crioPart, []string{"crio", "copyimg"})
	p := l.goPart(source, goVersion, crioPart+" "+crioVersion, "crio", 3, "takes a few minutes on 2 cores", outputs,
		"-tags=containers_image_openpgp exclude_graphdriver_btrfs", "-ldflags=-s -w", module+"/cmd/crio", module+"/test/copyimg")
	p.needs = append(p.needs, "gcc", "apt-get", "dpkg")
	p.args = append(append(p.args, debianRelease()), crioPackages...)
	p.outputs = append(p.outputs, "bin/"+crioPart+"/pinns", crioDebian+"/"+conmonProgram)
	build := p.build
	p.build = func(ctx context.Context, p *part) error {
		if err := build(ctx, p); err != nil {
			return err
		}
		list := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
		list.Dir = filepath.Join(source, "crio")
		dir, err := list.Output()
		if err != nil {
			return fmt.Errorf("find the source of pinns: %w", err)
		}
		files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "pinns", "src", "*.c"))
		if err != nil {
			return err
		}
		if err := l.output(crioPart+"/pinns", func(file string) error {
			return command(ctx, "", nil, "gcc", append([]string{"-std=c99", "-Os", "-static", "-o", file}, files...)...)
		}); err != nil {
			return err
		}
		return l.unpackDebian(ctx, l.path(crioDebian), crioPackages)
	}
	return p
}

func below(dir string, names []string) (out []string) {
	for _, name := range names {
		out = append(out, dir+"/"+name)
	}
	return out
}

// What up can be told, beside nothing for the usual ones.
var (
	otherKubernetes = []string{"1.34", "1.37"}
	otherRuntimes   = []string{containerd17Part, crioPart}
)

// choose takes what up is told of versions to the names of parts.
func (s *Spec) choose(kubernetes, runtime string) error {
	if kubernetes != "" && !slices.Contains(otherKubernetes, kubernetes) {
		return fmt.Errorf("kubernetes %q: beside the usual %s there are %s", kubernetes, kubernetesVersion, strings.Join(otherKubernetes, ", "))
	}
	if runtime != "" && !slices.Contains(otherRuntimes, runtime) {
		return fmt.Errorf("runtime %q: beside the usual containerd %s there are %s", runtime, containerdVersion, strings.Join(otherRuntimes, ", "))
	}
	s.Runtime = runtime
	if kubernetes != "" {
		s.Kubernetes = "kubernetes-" + kubernetes
	}
	return nil
}

// others are the parts that a node is made of beside the usual ones.
func (s Spec) others() []string {
	return slices.DeleteFunc([]string{s.Kubernetes, s.Runtime}, func(name string) bool { return name == "" })
}

// Where a node's PATH has the programs of other versions.
const (
	kubernetesLink = "/run/node/kubernetes"
	programsLink   = "/run/node/runtime"
)

// links are those of a node.
func links(l Layout, n Node, spec Spec) (map[string]string, error) {
	all, err := libraryLinks(l.path("debian"), "usr/sbin/runc")
	if err != nil {
		return nil, err
	}
	if spec.Kubernetes != "" {
		all[kubernetesLink] = l.bin(spec.Kubernetes)
	}
	if spec.Runtime != "" {
		all[programsLink] = l.bin(spec.Runtime)
	}
	if spec.Runtime == crioPart {
		self := n.path("runc-for-crio")
		if err := copySelf(self); err != nil {
			return nil, err
		}
		more, err := libraryLinks(l.path(crioDebian), conmonProgram)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, more)
		all[crioRunc] = self
	}
	return all, nil
}
