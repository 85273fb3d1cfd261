// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/tests/emulator/lib"
)

// Driver is an emulated driver in a node: its files below a root, and the
// daemon that plays the kernel's part.
type Driver struct {
	// Root is where the driver's files are in the node.
	Root string
	// GPUs is what the driver has, by index.
	GPUs []GPUInfo
	// Version is the driver's.
	Version string

	node                  *Node
	daemon, socket, world string
}

// GPUInfo is a GPU as the emulated hardware knows it.
type GPUInfo struct {
	Index, Minor int
	UUID, Model  string
	// MemoryMiB is the card's, ReservedMiB the driver's own part of it.
	MemoryMiB, ReservedMiB int
	Lost                   bool
	// NUMA is the node that the GPU is of.
	NUMA int
	// Path is where the GPU hangs on the PCI bus: the host bridge, other bridges,
	// itself, with slashes between them.
	Path string `json:"-"`
	// Links are its NVLink lanes.
	Links []Link `json:"-"`
	// MIG is nil on a GPU that cannot have it.
	MIG *MIGInfo
}

// Link is an NVLink lane of a GPU's.
type Link struct {
	// To is the GPU at the other end, -1 where that is an NVSwitch or nobody.
	To         int
	Switch, Up bool
}

// MIGInfo is how a GPU is cut, as the emulated hardware knows it.
type MIGInfo struct {
	// Enabled is the mode that is in force, Pending the one after a reset.
	Enabled, Pending bool
	Instances        []GPUInstance
}

// GPUInstance is a GPU instance and its compute instances.
type GPUInstance struct {
	ID      int `json:"gi"`
	Profile string
	// Start and Size are in memory slices.
	Start, Size int
	// Minor is of the node of its capability.
	Minor int
	// Serial is of this creation alone: IDs and UUIDs come back.
	Serial  uint64
	Compute []ComputeInstance `json:"computes"`
}

// ComputeInstance is what a container gets.
type ComputeInstance struct {
	ID            int `json:"ci"`
	Profile, UUID string
	// Start and Size are in compute slices of its GPU instance.
	Start, Size int
	Minor       int
	Serial      uint64
}

// MIGOp is something that was done to a GPU's MIG side: create, destroy, enable,
// disable or reset.
type MIGOp struct {
	Serial      uint64
	GPU         int
	Op, Profile string
	// Seconds is what it took by the clock.
	Seconds float64
	// Start is the GPU instance's memory slice, CI the compute instance's first
	// slice, -1 where the GPU instance itself is meant.
	Start, CI int
}

// ComputeMode is the GPU's compute mode, as the emulated driver writes its name.
func (d *Driver) ComputeMode(ctx context.Context, index int) (string, error) {
	out, err := d.control(ctx, "show")
	if err != nil {
		return "", err
	}
	state, err := decode[struct {
		GPUs []struct{ Setup struct{ Compute string } }
	}](out, "the emulated driver's state")
	if err == nil && index >= len(state.GPUs) {
		err = fmt.Errorf("the emulated driver has %d GPUs", len(state.GPUs))
	}
	if err != nil {
		return "", err
	}
	return state.GPUs[index].Setup.Compute, nil
}

// OutsideMPS is the processes that compute on a GPU and are neither its MPS server nor one of its clients.
func (d *Driver) OutsideMPS(ctx context.Context, index int) (pids []int, err error) {
	out, err := d.control(ctx, "show")
	if err != nil {
		return nil, err
	}
	state, err := decode[struct {
		Processes []struct {
			PID, GPU int
			Kind     string
		}
		MPS []struct {
			PID     int
			Clients []int
		}
	}](out, "the emulated driver's state")
	if err != nil {
		return nil, err
	}
	inside := map[int]bool{}
	for _, s := range state.MPS {
		inside[s.PID] = true
		for _, c := range s.Clients {
			inside[c] = true
		}
	}
	for _, p := range state.Processes {
		if p.GPU == index && p.Kind == "compute" && !inside[p.PID] {
			pids = append(pids, p.PID)
		}
	}
	return pids, nil
}

// Device is the path of the GPU's device node. Minors differ from indices, so
// that mix-ups show.
func (g GPUInfo) Device() string { return fmt.Sprintf("/dev/nvidia%d", g.Minor) }

// ControlDevices are the nodes that a container with any GPU has besides.
var ControlDevices = []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}

// DriverOptions say what driver a node gets.
type DriverOptions struct {
	// Root is "/" for a driver that is installed on the node, or the directory
	// that a driver container would have filled.
	Root string
	// Model is the product's name in the emulator, Count how many there are. Both
	// may be left to a topology of World's.
	Model string
	Count int
	// World is further YAML of the emulator's world.
	World string
}

func (o DriverOptions) spec(seed string) []byte {
	spec := fmt.Appendf(nil, "seed: %s\n", seed)
	if o.Model != "" {
		spec = fmt.Appendf(spec, "model: %s\n", o.Model)
	}
	if o.Count > 0 {
		spec = fmt.Appendf(spec, "count: %d\n", o.Count)
	}
	return append(spec, o.World...)
}

// LayDriver lays a driver into the node and starts its daemon.
func (n *Node) LayDriver(ctx context.Context, o DriverOptions) (*Driver, error) {
	dir, err := n.Dir("driver")
	if err != nil {
		return nil, fmt.Errorf("lay the driver: %w", err)
	}
	name := "driver" + strings.ReplaceAll(strings.TrimSuffix(o.Root, "/"), "/", "-")
	world := filepath.Join(dir, name+".yaml")
	if err := os.WriteFile(world, o.spec(n.Name+name), 0o644); err != nil {
		return nil, fmt.Errorf("lay the driver: %w", err)
	}
	d := &Driver{Root: o.Root, node: n, daemon: name, world: world, socket: filepath.Join(o.Root, "run/nvidia-persistenced/socket")}
	if err := d.install(ctx); err != nil {
		return nil, err
	}
	// The cache is at the same place inside the node.
	if err := n.Start(ctx, name, n.kit.Bin("gpu-emulator"), "serve", "--world", world, "--socket", d.socket); err != nil {
		return nil, fmt.Errorf("start the driver's daemon: %w", err)
	}
	err = Await(ctx, 20*time.Second, "the emulated driver", func(ctx context.Context) error { return d.refresh(ctx) })
	return d, err
}

// install lays the driver's files, and those of the kernel about its machine.
func (d *Driver) install(ctx context.Context) error {
	libraries, err := lib.Cached(ctx)
	if err != nil {
		return fmt.Errorf("lay the driver: %w", err)
	}
	command := []string{d.node.kit.Bin("gpu-emulator"), "install", "--root", "/", "--prefix", d.Root, "--libraries", libraries, "--world", d.world}
	if d.Root == "/" {
		command = append(command, "--proc") // the kernel's files have no other place
	}
	if _, err := d.node.Exec(ctx, command...); err != nil {
		return fmt.Errorf("lay the driver at %s: %w", d.Root, err)
	}
	return nil
}

// Swap puts other hardware in the place of what there is, with UUIDs of its own,
// and shows the node the PCI bus and, where the world describes them, the CPUs and
// NUMA nodes of its machine. Nobody may use the driver meanwhile.
func (d *Driver) Swap(ctx context.Context, o DriverOptions) error {
	if err := d.node.Stop(ctx, d.daemon); err != nil {
		return fmt.Errorf("swap the GPUs: %w", err)
	}
	if err := os.WriteFile(d.world, o.spec(d.node.Name+d.daemon+o.Model), 0o644); err != nil {
		return fmt.Errorf("swap the GPUs: %w", err)
	}
	if err := d.install(ctx); err != nil {
		return fmt.Errorf("swap the GPUs: %w", err)
	}
	if err := d.node.StartAgain(ctx, d.daemon); err != nil {
		return fmt.Errorf("swap the GPUs: %w", err)
	}
	return Await(ctx, 20*time.Second, "the other GPUs", d.refresh)
}

// Remove ends the daemon and takes the driver's files away. A driver at / cannot
// be removed: it goes with its node.
func (d *Driver) Remove(ctx context.Context) error {
	if d.Root == "/" {
		return errors.New("remove the driver: it is installed at /")
	}
	if err := d.node.Stop(ctx, d.daemon); err != nil {
		return err
	}
	if _, err := d.node.Exec(ctx, "rm", "-r", d.Root); err != nil {
		return fmt.Errorf("remove the driver: %w", err)
	}
	return nil
}

// refresh reads what the hardware is now.
func (d *Driver) refresh(ctx context.Context) error {
	state, err := d.show(ctx)
	if err != nil {
		return err
	}
	d.GPUs, d.Version = state.GPUs, state.Driver
	return nil
}

// Look reads what the hardware is now and leaves GPUs as it is: it may be called
// beside any other method.
func (d *Driver) Look(ctx context.Context) ([]GPUInfo, error) {
	state, err := d.show(ctx)
	return state.GPUs, err
}

// MIGOps is what was done to the GPUs' MIG side, in the order of its doing.
func (d *Driver) MIGOps(ctx context.Context) ([]MIGOp, error) {
	state, err := d.show(ctx)
	return state.MIGOps, err
}

type driverState struct {
	Driver string
	GPUs   []GPUInfo
	MIGOps []MIGOp
	Board  struct {
		Paths []string
		Links [][]Link
	}
}

func (d *Driver) show(ctx context.Context) (driverState, error) {
	out, err := d.control(ctx, "show")
	if err != nil {
		return driverState{}, err
	}
	state, err := decode[driverState](out, "the emulated driver's state")
	if err == nil && len(state.GPUs) == 0 {
		err = errors.New("the emulated driver has no GPU")
	}
	if b := state.Board; err == nil && (len(b.Paths) != len(state.GPUs) || len(b.Links) != len(state.GPUs)) {
		err = fmt.Errorf("the emulated driver has %d GPUs, %d paths and the links of %d", len(state.GPUs), len(b.Paths), len(b.Links))
	}
	if err != nil {
		return state, err
	}
	for i := range state.GPUs {
		state.GPUs[i].Path, state.GPUs[i].Links = state.Board.Paths[i], state.Board.Links[i]
	}
	return state, nil
}

func (d *Driver) control(ctx context.Context, command string, args ...string) ([]byte, error) {
	return d.node.Exec(ctx, append([]string{d.node.kit.Bin("gpu-emulator"), command, "--socket", d.socket}, args...)...)
}

// Read reads what the hardware is now into GPUs.
func (d *Driver) Read(ctx context.Context) error { return d.refresh(ctx) }

// Used is what processes have on a GPU together, in bytes: all there are, or
// those that are named.
func (d *Driver) Used(ctx context.Context, index int, of ...Process) (uint64, error) {
	out, err := d.control(ctx, "show")
	if err != nil {
		return 0, err
	}
	state, err := decode[struct {
		Processes []struct {
			PID, GPU int
			Bytes    uint64
		}
	}](out, "the emulated driver's state")
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, p := range state.Processes {
		named := slices.ContainsFunc(of, func(o Process) bool { return o.PID == p.PID })
		if p.GPU == index && (named || len(of) == 0) {
			sum += p.Bytes
		}
	}
	return sum, nil
}

// Occupy starts a process of no pod that has memory on a GPU.
func (d *Driver) Occupy(ctx context.Context, index, mib int) (Process, error) {
	out, err := d.process(ctx, "start", "--gpu", strconv.Itoa(index), "--memory", strconv.Itoa(mib))
	if err != nil {
		return Process{}, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		return Process{}, fmt.Errorf("start a process on GPU %d: %w", index, err)
	}
	return d.node.process(pid)
}

// Vacate ends a process that Occupy has started.
func (d *Driver) Vacate(ctx context.Context, p Process) error {
	_, err := d.process(ctx, "stop", strconv.Itoa(p.PID))
	return err
}

func (d *Driver) process(ctx context.Context, command string, args ...string) ([]byte, error) {
	return d.node.Exec(ctx, append([]string{d.node.kit.Bin("gpu-emulator"), "proc", command, "--socket", d.socket}, args...)...)
}

// Lose drops a GPU off the bus.
func (d *Driver) Lose(ctx context.Context, index int) error {
	_, err := d.control(ctx, "lose", "--gpu", strconv.Itoa(index))
	return err
}

// Restore brings a lost GPU back.
func (d *Driver) Restore(ctx context.Context, index int) error {
	_, err := d.control(ctx, "restore", "--gpu", strconv.Itoa(index))
	return err
}

// Xid raises an Xid, a fault of the driver's numbering, on a GPU.
func (d *Driver) Xid(ctx context.Context, index, xid int) error {
	_, err := d.control(ctx, "xid", "--gpu", strconv.Itoa(index), strconv.Itoa(xid))
	return err
}

// Reset resets a GPU, which must be idle.
func (d *Driver) Reset(ctx context.Context, index int) error {
	_, err := d.control(ctx, "reset", "--gpu", strconv.Itoa(index))
	return err
}

// SetHealth sets figures of a GPU's health, in JSON as the emulator shows them.
func (d *Driver) SetHealth(ctx context.Context, index int, figures string) error {
	_, err := d.control(ctx, "health", "--gpu", strconv.Itoa(index), figures)
	return err
}

// KeepBusy has a process compute on a GPU from now on, with so many percent of its multiprocessors. One that ends so
// takes the other clients of its MPS server with it.
func (d *Driver) KeepBusy(ctx context.Context, index int, p Process, percent int) error {
	_, err := d.control(ctx, "busy", "--pid", strconv.Itoa(p.PID), "--gpu", strconv.Itoa(index), strconv.Itoa(percent))
	return err
}

// Setup changes how a GPU is set, as an earlier owner would have left it: JSON, with what differs.
func (d *Driver) Setup(ctx context.Context, index int, settings string) error {
	_, err := d.control(ctx, "setup", "--gpu", strconv.Itoa(index), settings)
	return err
}

// Unplug takes a GPU out of the machine, its device node with it.
func (d *Driver) Unplug(ctx context.Context, index int) error {
	_, err := d.control(ctx, "unplug", "--gpu", strconv.Itoa(index))
	return err
}

// Plug puts a GPU back that was unplugged.
func (d *Driver) Plug(ctx context.Context, index int) error {
	_, err := d.control(ctx, "plug", "--gpu", strconv.Itoa(index))
	return err
}

// Unload unloads the driver, which it refuses while anybody uses it.
func (d *Driver) Unload(ctx context.Context) error {
	_, err := d.control(ctx, "unload")
	return err
}

// LoadDriver loads the driver again, another version of it where one is named.
func (d *Driver) LoadDriver(ctx context.Context, version string) error {
	var args []string
	if version != "" {
		args = []string{"--driver", version}
	}
	if _, err := d.control(ctx, "load", args...); err != nil {
		return err
	}
	return d.refresh(ctx)
}

// Hang keeps calls of a name, or of a pattern such as nvmlDevice*, until
// ClearFaults. A GPU of -1 is any.
func (d *Driver) Hang(ctx context.Context, call string, index int) error {
	args := []string{"--call", call, "--for", "forever"}
	if index >= 0 {
		args = append(args, "--gpu", strconv.Itoa(index))
	}
	_, err := d.control(ctx, "slow", args...)
	return err
}

// Fail makes calls answer an error of NVML's by its number, until ClearFaults.
func (d *Driver) Fail(ctx context.Context, call string, code int) error {
	_, err := d.control(ctx, "fail", "--call", call, "--code", strconv.Itoa(code))
	return err
}

// FailEvery makes each n-th call of a name, or of a pattern, answer an error of
// NVML's by its number, until ClearFaults.
func (d *Driver) FailEvery(ctx context.Context, n int, call string, code int) error {
	_, err := d.control(ctx, "fail", "--call", call, "--code", strconv.Itoa(code), "--every", strconv.Itoa(n))
	return err
}

// Slow makes calls take so much longer, so often, or until ClearFaults where
// times is 0. A GPU of -1 is any.
func (d *Driver) Slow(ctx context.Context, call string, index int, by time.Duration, times int) error {
	args := []string{"--call", call, "--for", by.String(), "--count", strconv.Itoa(times)}
	if index >= 0 {
		args = append(args, "--gpu", strconv.Itoa(index))
	}
	_, err := d.control(ctx, "slow", args...)
	return err
}

// ClearFaults ends what Hang, Fail, FailEvery and Slow began.
func (d *Driver) ClearFaults(ctx context.Context) error {
	_, err := d.control(ctx, "clear")
	return err
}

// Reboot does to the GPUs what the machine's end and new start do: no instance is
// left, and the mode only where the card keeps it.
func (d *Driver) Reboot(ctx context.Context) error {
	_, err := d.control(ctx, "reboot")
	return err
}

// ByMinor returns the GPU that a device node belongs to.
func (d *Driver) ByMinor(minor int) (GPUInfo, error) {
	for _, g := range d.GPUs {
		if g.Minor == minor {
			return g, nil
		}
	}
	return GPUInfo{}, fmt.Errorf("no GPU has /dev/nvidia%d", minor)
}
