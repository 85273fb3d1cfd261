// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
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
# It would take iptables or nftables, and no pod has a port of the node's.
disable_hostport_mapping = true
pinns_path = %[3]q
[crio.runtime.runtimes.runc]
runtime_path = %[4]q
runtime_root = "/run/runc"
monitor_path = %[5]q
monitor_cgroup = "pod"
`, pauseImage, l.cniPrograms(), l.bin(crioPart+"/pinns"), crioRunc, l.path(crioDebian, conmonProgram)),
	}
}

// crioLoad are the commands that load an archive's images into the storage of CRI-O, each with
// the archive as its input.
func crioLoad(file string) ([][]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// What names the images in the two kinds of archives; one may be of both.
	var docker []struct{ RepoTags []string }
	var oci struct {
		Manifests []struct{ Annotations map[string]string }
	}
	files := map[string]any{"manifest.json": &docker, "index.json": &oci}
	archive := tar.NewReader(f)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if v, ok := files[header.Name]; ok {
			if err := json.NewDecoder(archive).Decode(v); err != nil {
				return nil, fmt.Errorf("read its %s: %w", header.Name, err)
			}
		}
	}
	transport, names := "docker-archive", []string(nil)
	for _, image := range docker {
		names = append(names, image.RepoTags...)
	}
	if len(names) == 0 {
		transport = "oci-archive"
		for _, m := range oci.Manifests {
			names = append(names, m.Annotations["org.opencontainers.image.ref.name"])
		}
	}
	if len(names) == 0 {
		return nil, errors.New("it has no image with a name, neither as docker nor as OCI has it")
	}
	var commands [][]string
	for _, name := range names {
		commands = append(commands, []string{"copyimg", "--image-name", name, "--import-from", transport + ":/dev/stdin:" + name})
	}
	return commands, nil
}

// CRI-O gives runc what containerd keeps back where a machine cannot have it. It starts what this
// link leads to: this program, which is runc but for that.
const crioRunc = "/run/node/runc-for-crio"

// crioRuncMain takes out of a container's configuration what may be too much, and becomes what
// makes the node's containers.
func crioRuncMain(args []string) error {
	if command, bundle := runcCommand(args); command == "create" || command == "run" {
		file := filepath.Join(bundle, "config.json")
		old, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read the container's configuration: %w", err)
		}
		config, err := modest(old)
		if err == nil {
			err = os.WriteFile(file, config, 0o600)
		}
		if err != nil {
			return fmt.Errorf("change %s: %w", file, err)
		}
	}
	if err := syscall.Exec(runtimeLink, append([]string{runtimeLink}, args...), os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", runtimeLink, err)
	}
	return nil
}

// modest is a container's configuration without an out-of-memory score and without
// CAP_SYS_RESOURCE, which it takes to lower one and which nobody can give who lacks it, and without
// limits of huge pages, whose controller may not be mounted.
func modest(data []byte) ([]byte, error) {
	var config struct {
		Process struct{ Capabilities map[string][]string }
	}
	var all map[string]any
	numbers := json.NewDecoder(bytes.NewReader(data))
	numbers.UseNumber() // some are too large for a float
	if err := errors.Join(json.Unmarshal(data, &config), numbers.Decode(&all)); err != nil {
		return nil, err
	}
	capabilities := config.Process.Capabilities
	for set, names := range capabilities {
		capabilities[set] = slices.DeleteFunc(names, func(name string) bool { return name == "CAP_SYS_RESOURCE" })
	}
	if process, ok := all["process"].(map[string]any); ok {
		delete(process, "oomScoreAdj")
		process["capabilities"] = capabilities
	}
	if linux, ok := all["linux"].(map[string]any); ok {
		if resources, ok := linux["resources"].(map[string]any); ok {
			delete(resources, "hugepageLimits")
		}
	}
	return json.Marshal(all)
}
