// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/lab"
)

var (
	long  = flag.Bool("long", false, "run the tests that take a node of their own")
	built = flag.Bool("built", false, "everything that the node needs, but the emulator's image, stands in the cache already")
)

const (
	nodeName = "emulated"
	// root is the driver's.
	root = "/run/nvidia/driver"
	gpus = 8
	// theirs is what NVIDIA's device plugin offers.
	theirs = "nvidia.com/gpu"
)

// A node without GPUs is labelled, and has some: our agent gives pieces of them away, MIG
// instances among them, then NVIDIA's plugin gives them whole; at last nothing is left.
func TestOverlay(t *testing.T) {
	if !*long {
		t.Skip("takes a node of its own for minutes: -long runs it")
	}
	if missing := lab.Missing(); missing != "" {
		t.Skip("this machine lacks ", missing)
	}
	ctx := t.Context()
	kit, err := lab.NewKit(t.Output())
	must(t, err)
	if !*built {
		for _, s := range kit.Steps() {
			must(t, s.Run(ctx))
		}
	}
	must(t, kit.Run(ctx, "make", "--no-print-directory", "emulator-image", "CACHE="+kit.Cache))
	must(t, kit.Down(ctx, nodeName))
	t.Cleanup(func() {
		if err := kit.Down(context.Background(), nodeName); err != nil {
			t.Error(err)
		}
	})
	node, err := kit.Up(ctx, lab.NodeOptions{Name: nodeName, WithParent: true, PromptStatus: true})
	must(t, err)
	must(t, node.Load(ctx, kit.AgentArchive()))
	must(t, node.Load(ctx, filepath.Join(kit.Cache, "images", "gpu-emulator.tar")))
	must(t, node.Namespace(ctx, lab.PodNamespace))
	// As kind's nodes have it, and many others.
	_, err = node.Exec(ctx, "mount", "-o", "remount,nosuid,nodev,noexec", "/run")
	must(t, err)
	before, err := traces(node)
	must(t, err)

	must(t, node.Label(ctx, map[string]string{"example.com/gpu-emulator": "true"}))
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := node.Kubectl(ctx, nil, args...)
		if err != nil {
			said, _ := node.Kubectl(ctx, nil, "describe", "pods", "-n", "gpu-emulator")
			t.Fatalf("%v\n%s", err, said)
		}
		return string(out)
	}
	overlay := filepath.Join(kit.Root, "tests", "emulator", "deploy")
	kubectl("kustomize", filepath.Join(overlay, "agent"))
	// A node with a real driver's device node is refused.
	_, err = node.Exec(ctx, "mknod", "/dev/nvidiactl", "c", "195", "255")
	must(t, err)
	kubectl("apply", "-k", overlay)
	must(t, lab.Await(ctx, time.Minute, "a refusal to start", func(context.Context) error {
		said, err := node.Kubectl(ctx, nil, "describe", "pods", "-n", "gpu-emulator")
		if err == nil && !strings.Contains(string(said), "/dev/nvidiactl is there: "+install.ErrReal.Error()) {
			err = fmt.Errorf("the pods are\n%s", said)
		}
		return err
	}))
	_, err = node.Exec(ctx, "rm", "/dev/nvidiactl")
	must(t, err)
	kubectl("delete", "pods", "-n", "gpu-emulator", "--all")

	kubectl("rollout", "status", "-n", "gpu-emulator", "daemonset/gpu-emulator", "--timeout=3m")
	var world emulator.State
	must(t, json.Unmarshal([]byte(kubectl("exec", "-n", "gpu-emulator", "ds/gpu-emulator", "--", "gpu-emulator", "show")), &world))
	if len(world.GPUs) != gpus || world.GPUs[0].UUID == emulatedAnywhere(t) {
		t.Fatalf("the node has the GPUs %v; want %d, with UUIDs of their own", world.GPUs, gpus)
	}

	// Killed, it takes the place of what it left.
	_, err = node.Exec(ctx, "pkill", "-KILL", "-x", "gpu-emulator")
	must(t, err)
	must(t, lab.Await(ctx, time.Minute, "the emulated driver to start again", func(context.Context) error {
		const status = "{.items[0].status.containerStatuses[0]"
		said, err := node.Kubectl(ctx, nil, "get", "pods", "-n", "gpu-emulator", "-o", "jsonpath="+status+".restartCount} "+status+".ready}")
		if err == nil && string(said) != "1 true" {
			err = fmt.Errorf("its restarts and readiness are %s", said)
		}
		return err
	}))
	left, err := traces(node)
	must(t, err)
	if !slices.ContainsFunc(left, func(what string) bool { return strings.HasPrefix(what, "process ") }) || !slices.Contains(left, root) {
		t.Errorf("a driver runs, and its traces would not be found: %q", left)
	}
	left = slices.DeleteFunc(left, func(what string) bool { return !strings.Contains(what, " "+root+" ") })
	if len(left) != 1 {
		t.Errorf("after a kill there are %d mounts at %s, want one: %q", len(left), root, left)
	}

	t.Run("agent", func(t *testing.T) { withAgent(t, node, world) })
	// The GPU in MIG mode is not the plugin's to use: where it looks for the numbers of instances,
	// in /proc, there is no driver. After a boot it is whole.
	kubectl("exec", "-n", "gpu-emulator", "ds/gpu-emulator", "--", "gpu-emulator", "reboot")
	t.Run("plugin", func(t *testing.T) { withPlugin(t, node, kit, world) })

	kubectl("delete", "-k", overlay, "--wait", "--timeout=2m")
	must(t, lab.Await(ctx, time.Minute, "the emulated driver to be gone", func(context.Context) error {
		after, err := traces(node)
		if err == nil && !slices.Equal(after, before) {
			err = fmt.Errorf("the node has %q, and had %q before", after, before)
		}
		return err
	}))
}

// emulatedAnywhere is the UUID of the first GPU where no node has named a seed.
func emulatedAnywhere(t *testing.T) string {
	t.Helper()
	w, err := emulator.New(emulator.Spec{})
	must(t, err)
	return w.State().GPUs[0].UUID
}

// withAgent has the agent give a slice of a GPU's memory, and a MIG instance.
func withAgent(t *testing.T, node *lab.Node, world emulator.State) {
	const units = 79 // of 1 GiB, see DESIGN.md's H100-80GB: 81,559 MiB less the driver's own
	ctx := t.Context()
	agent, err := node.Deploy(ctx, lab.DeployOptions{Overlay: "driver-container", Env: agentEnv(t), Partitions: `version: v1
partitions:
  default:
    - {devices: [0], mode: mig}
    - {devices: [1, 2, 3, 4, 5, 6, 7], mode: shared}
`})
	must(t, err)
	must(t, node.AwaitAllocatable(ctx, map[string]int{lab.Memory: (gpus - 1) * units, lab.MIG("3g.40gb"): 2}))
	said := inside(t, node, lab.Pod{Name: "slice", Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 24}}}}, "nvidia-smi")
	if !strings.Contains(said, "24576MiB") {
		t.Errorf("in a pod with 24 GiB, nvidia-smi says\n%s", said)
	}
	said = inside(t, node, lab.Pod{Name: "instance", Containers: []lab.Container{{Resources: map[string]int{lab.MIG("3g.40gb"): 1}}}}, "nvidia-smi", "-L")
	if !strings.Contains(said, world.GPUs[0].UUID) || strings.Count(said, "MIG 3g.40gb") != 1 {
		t.Errorf("in a pod with an instance of GPU %s, nvidia-smi -L says\n%s", world.GPUs[0].UUID, said)
	}
	must(t, node.DeletePods(ctx))
	must(t, agent.Uninstall(ctx))
	must(t, lab.Await(ctx, 2*time.Minute, "the agent to be uninstalled", func(ctx context.Context) error {
		clean, says, err := agent.Uninstalled(ctx)
		if err == nil && !clean {
			err = errors.New(says)
		}
		return err
	}))
	must(t, agent.EndUninstall(ctx))
}

// agentEnv is what the overlay for the agent sets beside the one that it is made of.
func agentEnv(t *testing.T) map[string]string {
	t.Helper()
	data, err := os.ReadFile("agent/kustomization.yaml")
	must(t, err)
	var overlay struct{ Patches []struct{ Patch string } }
	must(t, yaml.Unmarshal(data, &overlay))
	env := map[string]string{}
	for _, p := range overlay.Patches {
		var set struct {
			Spec struct {
				Template struct {
					Spec struct {
						Containers []struct {
							Env []struct{ Name, Value string }
						}
					}
				}
			}
		}
		must(t, yaml.Unmarshal([]byte(p.Patch), &set))
		for _, c := range set.Spec.Template.Spec.Containers {
			for _, v := range c.Env {
				env[v.Name] = v.Value
			}
		}
	}
	return env
}

// withPlugin has NVIDIA's device plugin, as it is, give a whole GPU.
func withPlugin(t *testing.T, node *lab.Node, kit *lab.Kit, world emulator.State) {
	ctx := t.Context()
	const peer = "nvidia-device-plugin"
	program, err := kit.BuildPeer(ctx)
	must(t, err)
	// By CDI files, since the node has no container runtime of NVIDIA's.
	must(t, node.Start(ctx, peer, program, "--driver-root-ctr-path", root, "--nvidia-driver-root", root,
		"--device-list-strategy", "cdi-cri", "--nvidia-cdi-hook-path", kit.Bin("nvidia-cdi-hook")))
	t.Cleanup(func() {
		if err := node.Stop(context.Background(), peer); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			said, _ := node.LogEnd(context.Background(), peer)
			t.Logf("%s said:\n%s", peer, said)
		}
	})
	must(t, node.AwaitAllocatable(ctx, map[string]int{theirs: gpus}))
	said := inside(t, node, lab.Pod{Name: "whole", Containers: []lab.Container{{Resources: map[string]int{theirs: 1}}}}, "nvidia-smi", "-L")
	named := slices.ContainsFunc(world.GPUs, func(g emulator.GPUState) bool { return strings.Contains(said, g.UUID) })
	if !named || strings.Count(said, "\n") != 1 {
		t.Errorf("in a pod with one GPU, nvidia-smi -L says\n%s", said)
	}
	must(t, node.DeletePods(ctx))
}

// inside runs a command in a pod that it makes.
func inside(t *testing.T, node *lab.Node, p lab.Pod, command ...string) string {
	t.Helper()
	pod, err := node.CreatePod(t.Context(), p)
	must(t, err)
	must(t, pod.Running(t.Context()))
	out, err := pod.Exec(t.Context(), "", command...)
	must(t, err)
	return string(out)
}

// traces are what an emulated driver could leave on a node: its mounts, its processes, device
// nodes and files.
func traces(node *lab.Node) (found []string, err error) {
	mounts, err := os.ReadFile(node.File("/proc/1/mountinfo"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "nvidia") || strings.Contains(line, "gpu-emulator") {
			found = append(found, "mount "+strings.TrimSpace(line))
		}
	}
	for _, pattern := range []string{"/dev/nvidia*", "/run/nvidia/*", "/proc/driver/nvidia*"} {
		files, err := filepath.Glob(node.File(pattern))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			found = append(found, strings.TrimPrefix(f, node.File("")))
		}
	}
	processes, err := filepath.Glob(node.File("/proc/[0-9]*"))
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		// A process may end while it is looked at.
		command, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if name, _, _ := strings.Cut(string(command), "\x00"); filepath.Base(name) == "gpu-emulator" {
			found = append(found, "process "+filepath.Base(p))
		}
	}
	return found, nil
}

// The README names what there is.
func TestREADME(t *testing.T) {
	data, err := os.ReadFile("../README.md")
	must(t, err)
	for _, name := range slices.Concat(emulator.Models(), emulator.Topologies()) {
		if !strings.Contains(string(data), "`"+name+"`") {
			t.Errorf("README.md does not name %s", name)
		}
	}
	dir, err := lib.Cached(t.Context())
	must(t, err)
	newest := 0
	for _, name := range []string{lib.NVML, lib.CUDA, lib.Other, lib.SMI} {
		f, err := elf.Open(filepath.Join(dir, name))
		must(t, err)
		symbols, err := f.ImportedSymbols()
		must(t, errors.Join(err, f.Close()))
		for _, s := range symbols {
			var minor int
			if _, err := fmt.Sscanf(s.Version, "GLIBC_2.%d", &minor); err == nil {
				newest = max(newest, minor)
			}
		}
	}
	if want := fmt.Sprintf("glibc 2.%d", newest); !strings.Contains(string(data), want) {
		t.Errorf("README.md does not name %s, which the libraries need", want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
