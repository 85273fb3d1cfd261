// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// containerRuntime is what tells one container runtime from another on a node.
type containerRuntime struct {
	// process is the name of its process and of its program.
	process string
	command []string
	socket  string
	// state is where it keeps images and layers, as the node sees it.
	state string
	// config are the files that it reads, by their paths below /etc; overlays says whether its
	// layers can be mounted on each other.
	config func(l Layout, overlays bool) map[string]string
}

// runtime is the node's.
func (s Spec) runtime() containerRuntime {
	if s.Runtime == crioPart {
		return containerRuntime{
			process: procCRIO, command: []string{procCRIO, "--config=/etc/crio/crio.conf", "--config-dir="},
			socket: "/run/crio/crio.sock", state: "/var/lib/containers", config: crioConfig,
		}
	}
	config := containerdConfig
	if s.Runtime == containerd17Part {
		config = containerd17Config
	}
	return containerRuntime{
		process: procContainerd, command: []string{procContainerd, "--config=/etc/containerd/config.toml"},
		socket: "/run/containerd/containerd.sock", state: "/var/lib/containerd",
		config: func(l Layout, overlays bool) map[string]string {
			snapshotter := "native"
			if overlays {
				snapshotter = "overlayfs"
			}
			return map[string]string{"containerd/config.toml": config(l, snapshotter)}
		},
	}
}

// etc are the directories below /etc that the node has of its own.
func (r containerRuntime) etc() (dirs []string) {
	for name := range r.config(Layout{}, true) {
		dirs = append(dirs, filepath.Dir(name))
	}
	return append(dirs, "cni", "kubernetes")
}

// cniPrograms are Debian's.
func (l Layout) cniPrograms() string { return l.path("debian", "usr", "lib", "cni") }

func containerdConfig(l Layout, snapshotter string) string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = %[1]q

[plugins."io.containerd.cri.v1.images"]
  snapshotter = %[2]q
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %[3]q

[plugins."io.containerd.cri.v1.runtime"]
  # Lowering a score takes CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = [%[4]q]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = %[5]q
  SystemdCgroup = false
`, "/run/containerd/containerd.sock", snapshotter, pauseImage, l.cniPrograms(), runtimeLink)
}

// containerd17Config is in the format that containerd had before 2.0.
func containerd17Config(l Layout, snapshotter string) string {
	return fmt.Sprintf(`version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = %[1]q

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %[3]q
  # Lowering a score takes CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  # Off in this version unless it is told.
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = %[4]q
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = %[2]q
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = %[5]q
  SystemdCgroup = false
`, "/run/containerd/containerd.sock", snapshotter, pauseImage, l.cniPrograms(), runtimeLink)
}

// crioConfig leaves all that it can to CRI-O and to containers/storage, which the program that
// loads images has in common with it.
func crioConfig(l Layout, overlays bool) map[string]string {
	driver := "vfs"
	if overlays {
		driver = "overlay"
	}
	return map[string]string{
		"containers/policy.json": `{"default": [{"type": "insecureAcceptAnything"}]}`,
		"containers/storage.conf": fmt.Sprintf(`[storage]
driver = %q
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
`, driver),
		"crio/crio.conf": fmt.Sprintf(`[crio.image]
pause_image = %[1]q

[crio.network]
network_dir = "/etc/cni/net.d"
plugin_dirs = [%[2]q]

[crio.runtime]
cgroup_manager = "cgroupfs"
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
default_runtime = "runc"
pinns_path = %[3]q
[crio.runtime.runtimes.runc]
runtime_path = %[4]q
runtime_root = "/run/runc"
monitor_path = %[5]q
monitor_cgroup = "pod"
`, pauseImage, l.cniPrograms(), l.bin(crioPart+"/pinns"), unscoredLink, l.path(crioDebian, conmonProgram)),
	}
}

// crioLoad are the commands that load an archive's images into the storage of CRI-O, each with
// the archive as its input.
func crioLoad(file string) ([][]string, error) {
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(file) })
	if err != nil {
		return nil, err
	}
	var commands [][]string
	for _, image := range manifest {
		for _, tag := range image.RepoTags {
			commands = append(commands, []string{"copyimg", "--image-name", tag, "--import-from", "docker-archive:/dev/stdin:" + tag})
		}
	}
	return commands, nil
}

// CRI-O gives runc what the kubelet asks for of a container's out-of-memory score, and lowering
// a score takes CAP_SYS_RESOURCE. It starts what this link leads to: this program, which is runc
// but for that score.
const unscoredLink = "/run/node/runc-unscored"

// unscoredMain takes the score out of what runc is told of a container, and becomes what makes
// the node's containers.
func unscoredMain(args []string) error {
	if command, bundle := runcCommand(args); command == "create" || command == "run" {
		if err := editConfig(bundle, []string{"oomScoreAdj"}, "process"); err != nil {
			return fmt.Errorf("take the out-of-memory score out: %w", err)
		}
	}
	if err := syscall.Exec(runtimeLink, append([]string{runtimeLink}, args...), os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", runtimeLink, err)
	}
	return nil
}
