// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/lib"
)

// Socket is where the daemon listens, below the driver root. nvcdi mounts a
// socket of this name into every container, so workloads reach it too.
const Socket = "run/nvidia-persistenced/socket"

// folders is where Debian has libraries, by the processor that they are for.
var folders = map[elf.Machine]string{elf.EM_X86_64: "usr/lib/x86_64-linux-gnu", elf.EM_AARCH64: "usr/lib/aarch64-linux-gnu"}

// Libraries is where, below the driver root, Debian has the libraries of a folder that
// lib.Build filled.
func Libraries(built string) (string, error) {
	f, err := elf.Open(filepath.Join(built, lib.NVML))
	if err != nil {
		return "", fmt.Errorf("find the libraries' processor: %w", err)
	}
	defer f.Close()
	at := folders[f.Machine]
	if at == "" {
		return "", fmt.Errorf("%s: the emulated driver is not for %v", built, f.Machine)
	}
	return at, nil
}

// Programs is where, below the driver root, the driver's programs are.
const Programs = "usr/bin"

// mpsPrograms are those of MPS, which package mps lays there. Each ends with its driver's version as
// a string.
var mpsPrograms = []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}

const firmware = "lib/firmware/nvidia"

// Device numbers. The first is the driver's own; the two that the kernel would
// hand out are taken from the end of its range, where no driver of this
// machine is likely to be.
const (
	majorGPU   = 195
	minorCtl   = 255
	minorModes = 254
	majorUVM   = 511
	// MajorCapabilities is the major of the nodes in /dev/nvidia-caps.
	MajorCapabilities = 510
)

// fillers are driver libraries that need only be there to be mounted.
var fillers = []string{"libnvidia-cfg.so", "libnvidia-gpucomp.so", "libnvidia-nvvm.so", "libnvidia-ptxjitcompiler.so"}

// Driver lays the driver's files below dir, the driver root: built is the
// folder that lib.Build filled. What is there already is replaced.
func Driver(dir, built string, w *emulator.World) error {
	libraries, err := Libraries(built)
	if err != nil {
		return err
	}
	err = versioned(dir, libraries, w.DriverVersion(), func(name string) ([]byte, error) {
		if slices.Contains(fillers, name) {
			name = lib.Other
		}
		data, err := os.ReadFile(filepath.Join(built, name))
		if err == nil && name == lib.CUDA {
			data, err = lib.OfVersion(data, w.State().CUDA)
		}
		return data, err
	})
	if err != nil {
		return err
	}
	const smi = "usr/bin/nvidia-smi"
	data, err := os.ReadFile(filepath.Join(built, lib.SMI))
	if err == nil {
		err = replace(filepath.Join(dir, smi), data)
	}
	if err != nil {
		return fmt.Errorf("install %s: %w", smi, err)
	}
	return os.MkdirAll(filepath.Join(dir, filepath.Dir(Socket)), 0o755)
}

// trailer ends a library's file, after all that the loader looks at: as with
// real drivers, no two versions have the same library.
func trailer(v string) []byte { return fmt.Appendf(nil, "\ndriver %s\n", v) }

// versioned lays what carries the driver's version in its name: firmware, and
// libraries as they were built, in their folder.
func versioned(dir, libraries, v string, built func(library string) ([]byte, error)) error {
	links := map[string]string{lib.CUDA: lib.CUDA + ".1"}
	for _, name := range append([]string{lib.NVML, lib.CUDA}, fillers...) {
		to := filepath.Join(libraries, name+"."+v)
		data, err := built(name)
		if err == nil {
			err = replace(filepath.Join(dir, to), append(data, trailer(v)...))
		}
		if err != nil {
			return fmt.Errorf("install %s: %w", to, err)
		}
		links[name+".1"] = name + "." + v
	}
	for at, target := range links {
		if err := link(filepath.Join(dir, libraries, at), target); err != nil {
			return fmt.Errorf("install %s: %w", at, err)
		}
	}
	files := map[string]string{}
	for _, f := range []string{"gsp_ga10x.bin", "gsp_tu10x.bin"} {
		files[filepath.Join(firmware, v, f)] = "firmware of the emulated driver\n"
	}
	return write(dir, files)
}

// upgrade puts version v in place of the one that is installed, as a package
// does: new files, links that lead to them, and the old files gone. Programs
// that have those loaded keep them.
func upgrade(dir, v string) error {
	var libraries, target string
	for _, at := range folders {
		if to, err := os.Readlink(filepath.Join(dir, at, lib.NVML+".1")); err == nil {
			libraries, target = at, to
		} else if !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("find the installed version: %w", err)
		}
	}
	old, ok := strings.CutPrefix(target, lib.NVML+".")
	if !ok {
		return fmt.Errorf("find the installed version: %s.1 leads to %s", lib.NVML, target)
	}
	if old == v {
		return nil
	}
	at := func(library string) string { return filepath.Join(dir, libraries, library+"."+old) }
	err := versioned(dir, libraries, v, func(library string) ([]byte, error) {
		data, err := os.ReadFile(at(library))
		return bytes.TrimSuffix(data, trailer(old)), err
	})
	if err != nil {
		return err
	}
	for _, name := range mpsPrograms {
		data, err := os.ReadFile(filepath.Join(dir, Programs, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = replace(filepath.Join(dir, Programs, name), append(bytes.TrimSuffix(data, []byte(old+"\x00")), v+"\x00"...))
		}
		if err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
	}
	gone := []string{filepath.Join(dir, firmware, old)}
	for _, name := range append([]string{lib.NVML, lib.CUDA}, fillers...) {
		gone = append(gone, at(name))
	}
	if err := removeAll(gone...); err != nil {
		return fmt.Errorf("remove driver %s: %w", old, err)
	}
	return nil
}

// replace writes a program or library by way of a temporary name, so that
// programs which have the old one mapped keep it whole.
func replace(to string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	tmp := to + ".tmp"
	if err := os.WriteFile(tmp, data, 0o755); err != nil {
		return err
	}
	return os.Rename(tmp, to)
}

// link points a link elsewhere, or makes it; there is no moment without it.
func link(at, target string) error {
	if now, err := os.Readlink(at); err == nil && now == target {
		return nil
	}
	if err := os.RemoveAll(at + ".tmp"); err != nil {
		return err
	}
	if err := os.Symlink(target, at+".tmp"); err != nil {
		return err
	}
	return os.Rename(at+".tmp", at)
}

// Nodes makes the driver's device nodes in dir, such as /dev, open to all, and
// takes away those of GPUs that are not plugged in, or all if the driver is not
// loaded.
func Nodes(dir string, w *emulator.World) error {
	st := w.State()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make device folder: %w", err)
	}
	type number struct{ major, minor uint32 }
	nodes := map[string]number{
		"nvidiactl":        {majorGPU, minorCtl},
		"nvidia-modeset":   {majorGPU, minorModes},
		"nvidia-uvm":       {majorUVM, 0},
		"nvidia-uvm-tools": {majorUVM, 1},
	}
	gone := map[string]bool{}
	for _, g := range st.GPUs {
		name := fmt.Sprintf("nvidia%d", g.Minor)
		nodes[name] = number{majorGPU, uint32(g.Minor)}
		gone[name] = g.Unplugged
	}
	for name, n := range nodes {
		path := filepath.Join(dir, name)
		if gone[name] || !st.Loaded {
			if err := removeAll(path); err != nil {
				return fmt.Errorf("remove device node: %w", err)
			}
			continue
		}
		if err := node(path, n.major, n.minor, 0o666); err != nil {
			return err
		}
	}
	return capabilityNodes(dir, st)
}

// node makes a device node, in place of one that is another.
func node(path string, major, minor, mode uint32) error {
	var now unix.Stat_t
	if unix.Lstat(path, &now) == nil && now.Mode == unix.S_IFCHR|mode && now.Rdev == unix.Mkdev(major, minor) {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("make device node: %w", err)
	}
	if err := unix.Mknod(path, unix.S_IFCHR|mode, int(unix.Mkdev(major, minor))); err != nil {
		return fmt.Errorf("make device node %s: %w", path, err)
	}
	// Whatever the umask was.
	if err := os.Chmod(path, os.FileMode(mode)); err != nil {
		return fmt.Errorf("make device node: %w", err)
	}
	return nil
}

// Kernel writes what the kernel module shows, as plain files, below dir/proc
// and dir/sys. devices is the text of the machine's own /proc/devices, where the
// driver's lines take the place of a real driver's.
//
// The files of the cards and the processors of another machine go.
func Kernel(dir, devices string, w *emulator.World) error {
	st := w.State()
	t, err := sysfs(st)
	if err != nil {
		return fmt.Errorf("install sysfs: %w", err)
	}
	if err := t.sweep(dir); err != nil {
		return fmt.Errorf("remove the files of another machine: %w", err)
	}
	return kernel(dir, devices, st, func(string) bool { return true })
}

// modules is what /proc/modules says of the driver.
const modules = "nvidia_uvm 1888256 0 - Live 0x0000000000000000\n" +
	"nvidia 14372864 1 nvidia_uvm, Live 0x0000000000000000\n"

// kernel is Kernel, for those files alone that laid allows, by their path on
// the emulated machine.
func kernel(dir, devices string, st emulator.State, laid func(path string) bool) error {
	const heading = "Character devices:\n"
	devices = withoutDriver(devices)
	numbers := fmt.Sprintf("%d nvidia\n%d nvidia-modeset\n%d nvidiactl\n%d nvidia-uvm\n%d nvidia-caps\n",
		majorGPU, majorGPU, majorGPU, majorUVM, MajorCapabilities)
	files := map[string]string{
		"proc/devices": strings.Replace(devices, heading, heading+numbers, 1),
		"proc/modules": modules,
		"proc/driver/nvidia/version": fmt.Sprintf(
			"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build\n", st.Driver),
		// 0, as on nodes where udev makes the device nodes. With 1, NVIDIA's hook
		// lays a file of its own over this one inside containers, whose fresh
		// procfs has it only where a kernel module put it.
		"proc/driver/nvidia/params":                   "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\nModifyDeviceFiles: 0\n",
		"proc/driver/nvidia/capabilities/mig/config":  capability(CapabilityConfig),
		"proc/driver/nvidia/capabilities/mig/monitor": capability(capabilityMonitor),
		"proc/driver/nvidia-caps/mig-minors":          migMinors(),
		"sys/module/nvidia/version":                   st.Driver + "\n",
		"sys/module/nvidia/initstate":                 "live\n",
	}
	var gone []string
	if !st.Loaded {
		// What is not the driver's own stays, without it.
		files = map[string]string{"proc/devices": devices, "proc/modules": ""}
		gone = []string{"proc/driver/nvidia", "proc/driver/nvidia-caps", "sys/module/nvidia", "sys/bus/pci/drivers/nvidia"}
		if laid("/sys/module/nvidia") {
			setAside(dir)
		}
	}
	t, err := sysfs(st)
	if err != nil {
		return fmt.Errorf("install sysfs: %w", err)
	}
	maps.Copy(files, t.files)
	for i, g := range st.GPUs {
		address := strings.ToLower(g.PCI[4:])
		at := "sys/devices/" + st.Board.Paths[i]
		switch {
		case g.Unplugged:
			gone = append(gone, "proc/driver/nvidia/gpus/"+address, "sys/bus/pci/devices/"+address, at)
		case st.Loaded:
			files["proc/driver/nvidia/gpus/"+address+"/information"] = fmt.Sprintf(
				"Model: \t\t %s\nIRQ:   \t\t %d\nGPU UUID: \t %s\nBus Type: \t PCIe\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n",
				g.Model, 64+g.Index, g.UUID, address, g.Minor)
		default:
			gone = append(gone, at+"/driver")
		}
	}
	for _, at := range st.Board.Switches {
		if !st.Loaded {
			gone = append(gone, "sys/devices/"+at+"/driver")
		}
	}
	maps.DeleteFunc(files, func(name, _ string) bool { return !laid("/" + name) })
	if err := write(dir, files); err != nil {
		return err
	}
	for name := range t.drivers {
		if drivers := "sys/bus/pci/drivers/" + name; laid("/" + drivers) {
			if err := os.MkdirAll(filepath.Join(dir, drivers), 0o755); err != nil {
				return fmt.Errorf("install sysfs: %w", err)
			}
		}
	}
	for at, target := range t.links {
		if !laid("/" + at) {
			continue
		}
		err := os.MkdirAll(filepath.Join(dir, filepath.Dir(at)), 0o755)
		if err == nil {
			err = link(filepath.Join(dir, at), target)
		}
		if err != nil {
			return fmt.Errorf("install sysfs: %w", err)
		}
	}
	for _, name := range gone {
		if !laid("/" + name) {
			continue
		}
		if err := removeAll(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("remove kernel files: %w", err)
		}
	}
	if !laid("/" + capabilitiesDir) {
		return nil
	}
	return instances(dir, st)
}

// setAside keeps the directory of the module that is unloaded until the next is: sysfs gives no
// two of them one inode number, and a file system would give the next one the same.
func setAside(dir string) {
	modules := filepath.Join(dir, "sys/module")
	aside := filepath.Join(modules, ".unloaded")
	if _, err := os.Stat(filepath.Join(modules, "nvidia")); err == nil {
		_ = os.RemoveAll(aside)
		_ = os.Rename(filepath.Join(modules, "nvidia"), aside) // not that of a mount
	}
}

// withoutDriver takes the lines of NVIDIA's drivers out of the text of a
// /proc/devices: this one's, and those of a real one that the machine has.
func withoutDriver(devices string) string {
	var rest strings.Builder
	for line := range strings.Lines(devices) {
		if f := strings.Fields(line); len(f) != 2 || !strings.HasPrefix(f[1], "nvidia") {
			rest.WriteString(line)
		}
	}
	return rest.String()
}

func write(dir string, files map[string]string) error {
	for name, text := range files {
		path := filepath.Join(dir, name)
		if now, err := os.ReadFile(path); err == nil && string(now) == text {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
	}
	return nil
}

// mounts are the places that Mount lays files over, where they exist; a place comes
// before one that it is in.
var mounts = []string{
	"/proc/driver", "/proc/devices", "/proc/modules", "/sys/bus/pci", "/sys/module/nvidia",
	"/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/devices", "/sys/class",
}

// merged are those of them that keep what the running kernel shows there.
var merged = []string{"/sys/devices", "/sys/class"}

const mountSource = "gpu-emulator"

// Mount shows what Kernel writes at /proc and /sys of the calling process's
// mount namespace, in the place of what an earlier call has shown. It refuses the
// namespace that the machine itself runs in. Everything goes with the namespace.
//
// CPUs and NUMA nodes stay those of the machine itself, but for worlds that
// describe theirs.
func Mount(w *emulator.World) error {
	if err := Guard(); err != nil {
		return err
	}
	if err := unmount(); err != nil {
		return err
	}
	devices, err := os.ReadFile("/proc/devices")
	if err != nil {
		return fmt.Errorf("read device numbers: %w", err)
	}
	// The files live on a tmpfs that only the binds out of it keep alive.
	tmp, err := os.MkdirTemp("", "gpu-emulator-")
	if err != nil {
		return fmt.Errorf("stage kernel files: %w", err)
	}
	defer os.Remove(tmp)
	if err := unix.Mount(mountSource, tmp, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("stage kernel files: %w", err)
	}
	defer unix.Unmount(tmp, unix.MNT_DETACH)
	// Where mounts are shared, as on nodes, what is taken away here at the end would
	// go from the places too.
	if err := unix.Mount("", tmp, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("stage kernel files: %w", err)
	}
	if err := Kernel(tmp, string(devices), w); err != nil {
		return err
	}
	err = os.Rename(filepath.Join(tmp, "sys/devices/system"), filepath.Join(tmp, stagedSystem))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("stage CPUs: %w", err)
	}
	for _, at := range merged {
		if err := merge(at, filepath.Join(tmp, at)); err != nil {
			return fmt.Errorf("stage %s: %w", at, err)
		}
	}
	for _, at := range slices.Backward(mounts) {
		from := filepath.Join(tmp, at)
		if name, is := strings.CutPrefix(at, "/sys/devices/system/"); is {
			from = filepath.Join(tmp, stagedSystem, name)
		}
		if _, err := os.Stat(from); errors.Is(err, os.ErrNotExist) {
			continue // not in this world
		}
		if _, err := os.Stat(at); errors.Is(err, os.ErrNotExist) {
			continue // neither procfs nor sysfs lets anyone make a file
		}
		if err := unix.Mount(from, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount over %s: %w", at, err)
		}
	}
	return nil
}

// unmount takes away what an earlier Mount has laid over the mount namespace.
func unmount() error {
	for _, at := range mounts {
		for {
			ours, err := topmost(at)
			if err != nil {
				return fmt.Errorf("find what is mounted at %s: %w", at, err)
			}
			if !ours {
				break
			}
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", at, err)
			}
		}
	}
	return nil
}

// topmost says whether the last thing mounted at a place is of Mount's making.
func topmost(at string) (bool, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	ours := false
	for line := range strings.Lines(string(data)) {
		mount, what, _ := strings.Cut(line, " - ")
		fields, of := strings.Fields(mount), strings.Fields(what)
		if len(fields) > 4 && len(of) > 1 && fields[4] == at {
			ours = of[1] == mountSource
		}
	}
	return ours, nil
}

// stagedSystem is where Mount finds the emulated CPUs and NUMA nodes: their folder
// is the kernel's own in what it lays over /sys/devices.
const stagedSystem = "system"

// merge binds what the kernel shows in a folder beside what is staged there.
func merge(at, staged string) error {
	entries, err := os.ReadDir(at)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(at, e.Name()), filepath.Join(staged, e.Name())
		if _, err := os.Lstat(to); err == nil {
			continue // the world's own
		}
		switch {
		case e.IsDir():
			err = os.MkdirAll(to, 0o755)
		case e.Type()&os.ModeSymlink != 0:
			var target string
			if target, err = os.Readlink(from); err == nil {
				err = os.Symlink(target, to)
			}
			if err != nil {
				return err
			}
			continue
		default:
			err = os.WriteFile(to, nil, 0o644)
		}
		if err == nil {
			err = unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
		}
		if err == nil {
			// Else what is mounted in one of the two shows in the other, and goes
			// with it.
			err = unix.Mount("", to, "", unix.MS_PRIVATE|unix.MS_REC, "")
		}
		if err != nil {
			return fmt.Errorf("bind %s: %w", from, err)
		}
	}
	return nil
}

// ErrHost says that something would change the machine itself.
var ErrHost = errors.New("this is the machine's own mount namespace; run it inside unshare --mount")

// The names that Linux gives to the first PID namespace, and newer kernels to
// the first mount namespace.
const (
	firstPID   = "pid:[4026531836]"
	firstMount = "mnt:[4026531832]"
)

// Guard refuses, with ErrHost, where a change would be one to the machine
// itself and not to a mount namespace made for a test.
func Guard() error {
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return fmt.Errorf("read mount namespace: %w", err)
	}
	pid, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return fmt.Errorf("read PID namespace: %w", err)
	}
	// In a PID namespace of its own, PID 1 may share the mounts that a test
	// node has made for itself. Where PID 1 may not be looked at, the name of
	// the first mount namespace has to do.
	first, err := os.Readlink("/proc/1/ns/mnt")
	if err != nil {
		first = firstMount
	}
	if self == firstMount || self == first && pid == firstPID {
		return ErrHost
	}
	return nil
}
