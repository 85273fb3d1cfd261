// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"context"
	"errors"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

var pluginProgram = sync.OnceValues(func() (string, error) {
	kit, err := lab.NewKit(nil)
	if err != nil {
		return "", err
	}
	return kit.Bin(peers.DevicePlugin.Name), peers.DevicePlugin.Build(context.Background(), kit)
})

// kubeletDir is compiled into the plugin.
const kubeletDir = "/var/lib/kubelet"

// devicePlugin is NVIDIA's device plugin while it runs.
type devicePlugin struct {
	api.DevicePluginClient
	devices []*api.Device // of its first list
	ended   chan struct{}
	said    *strings.Builder // all of it once it has ended
}

// plugin starts NVIDIA's device plugin with the settings of its own manifest.
func (n *node) plugin() *devicePlugin {
	n.t.Helper()
	program, err := pluginProgram()
	if err != nil {
		n.t.Fatal(err)
	}
	const lib = "/var/lib"
	if err := unix.Mount("peers", lib, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		n.t.Fatalf("make room for a kubelet: %v", err)
	}
	n.t.Cleanup(func() { unix.Unmount(lib, unix.MNT_DETACH) })
	kubelet, err := fakes.StartKubelet(fakes.KubeletOptions{Dir: kubeletDir})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(kubelet.Stop)

	config := n.write("version: v1\n")
	cmd := exec.Command(program, "--config-file", config, "--driver-root-ctr-path", n.root, "--nvidia-driver-root", n.root)
	said := new(strings.Builder)
	cmd.Stdout, cmd.Stderr = said, said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // the death signal is that of the thread's death
		defer runtime.UnlockOSThread()
		defer close(ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
		if n.t.Failed() {
			n.t.Logf("%s said:\n%s", peers.DevicePlugin.Name, said.String())
		}
	})

	ctx, cancel := context.WithTimeoutCause(n.t.Context(), 2*time.Minute, errors.New("the plugin has not registered in 2 minutes"))
	defer cancel()
	ctx, gone := context.WithCancelCause(ctx)
	go func() {
		<-ended
		gone(errors.New("the plugin has ended"))
	}()
	var e fakes.Endpoint
	if err := kubelet.Await(ctx, func(all map[string]fakes.Endpoint) error {
		if e = all["nvidia.com/gpu"]; !e.Serves() {
			return errors.New("no list of nvidia.com/gpu")
		}
		return nil
	}); err != nil {
		n.t.Fatal(err, context.Cause(ctx))
	}
	return &devicePlugin{e.Client, e.Devices, ended, said}
}

// NVIDIA's device plugin and GPU Feature Discovery run on every machine that the
// emulator knows, and find there what the machine has. The plugin does not outlive its
// first choice among GPUs whose links are not the same from both ends.
func TestPeersRunOnEveryMachine(t *testing.T) {
	for _, name := range emulator.Topologies() {
		t.Run(name, func(t *testing.T) {
			n := start(t, emulator.Spec{Topology: name})
			st := n.world.State()
			labels := n.gfd("")
			machine := strings.ReplaceAll(st.Board.Machine, " ", "-")
			for key, want := range map[string]string{
				"nvidia.com/gpu.count": strconv.Itoa(len(st.GPUs)), "nvidia.com/gpu.machine": machine,
				"nvidia.com/gpu.memory": strconv.FormatUint(st.GPUs[0].MemoryMiB, 10), "nvidia.com/gpu.mode": "compute",
				"nvidia.com/gpu.clique": map[bool]string{true: "6ba61ed5-2c6b-4b6f-9f0b-5f6d6a9b1c72.32766"}[name == "nvl72"],
			} {
				if labels[key] != want {
					t.Errorf("%s is %q, want %q", key, labels[key], want)
				}
			}

			plugin := n.plugin()
			if len(plugin.devices) != len(st.GPUs) {
				t.Fatalf("the plugin lists %d devices of %d GPUs", len(plugin.devices), len(st.GPUs))
			}
			var ids []string
			for _, d := range plugin.devices {
				at := slices.IndexFunc(st.GPUs, func(g emulator.GPUState) bool { return g.UUID == d.ID })
				if at < 0 || d.Health != api.Healthy || len(d.GetTopology().GetNodes()) != 1 || d.Topology.Nodes[0].ID != int64(st.GPUs[at].NUMA) {
					t.Errorf("device %v", d)
				}
				ids = append(ids, d.ID)
			}
			resp, err := plugin.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: ids, AllocationSize: 2},
			}})
			if name == "asymmetric" { // it has no word for ends that disagree
				<-plugin.ended
				if err == nil || !strings.Contains(plugin.said.String(), "should be bidirectional") {
					t.Errorf("the plugin does not end: %v, %v", resp, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			chosen := resp.ContainerResponses[0].DeviceIDs
			if len(chosen) != 2 || chosen[0] == chosen[1] {
				t.Fatalf("the plugin prefers %v", chosen)
			}
			// What it can see: links to the GPU itself, and the bus.
			var joined bool
			for i, g := range st.GPUs {
				if g.UUID == chosen[0] {
					for _, l := range st.Board.Links[i] {
						joined = joined || l.To >= 0 && st.GPUs[l.To].UUID == chosen[1]
					}
				}
			}
			if direct := slices.ContainsFunc(slices.Concat(st.Board.Links...), func(l emulator.LinkState) bool { return l.To >= 0 }); direct && !joined {
				t.Errorf("the plugin prefers %v, which no link joins", chosen)
			}
			alloc, err := plugin.Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: chosen}}})
			if err != nil || len(alloc.ContainerResponses) != 1 {
				t.Errorf("allocate: %v, %v", alloc, err)
			}
		})
	}
}
