// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What the other machine's driver is called.
const (
	version = "999.99"
	library = "poison.so"
	minors  = "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu0/gi7/ci0/access 67\n"
	numbers = "195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n236 nvidia-caps\n511 nvidia-uvm\n"
	gpuInfo = "Model: \t\t NVIDIA Foreign\nGPU UUID: \t GPU-ffffffff-ffff-ffff-ffff-ffffffffffff\nBus Location: \t 0000:0b:00.0\nDevice Minor: \t 0\n"
)

// nodes are its device nodes. These numbers are the real ones, but for the majors
// that the kernel chooses.
var nodes = map[string][2]uint32{
	"nvidiactl": {195, 255}, "nvidia0": {195, 0}, "nvidia-modeset": {195, 254}, "nvidia-uvm": {511, 0},
	"nvidia-caps/nvidia-cap1": {236, 1}, "nvidia-caps/nvidia-cap2": {236, 2},
}

// lay puts the driver over the mount namespace of this process, and nowhere else.
// What is made lies in memory, and goes with the namespace.
func lay(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts to this process: %w", err)
	}
	poison, err := os.ReadFile(filepath.Join(dir, library))
	if err != nil {
		return err
	}
	if err := unix.Mount("foreign", dir, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	return errors.Join(layDevices(filepath.Join(dir, "dev")), layFiles(dir, poison))
}

// layDevices puts the nodes beside what /dev has.
func layDevices(dev string) error {
	have, err := os.ReadDir("/dev")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dev, "nvidia-caps"), 0o755); err != nil {
		return err
	}
	for _, e := range have {
		from, to := filepath.Join("/dev", e.Name()), filepath.Join(dev, e.Name())
		switch {
		case e.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(from)
			if err == nil {
				err = os.Symlink(target, to)
			}
			if err != nil {
				return err
			}
			continue
		case e.IsDir():
			err = os.Mkdir(to, 0o755)
		default:
			err = os.WriteFile(to, nil, 0o600)
		}
		if err == nil {
			err = unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
		}
		if err != nil {
			return fmt.Errorf("keep %s: %w", from, err)
		}
	}
	for name, n := range nodes {
		if err := unix.Mknod(filepath.Join(dev, name), unix.S_IFCHR|0o666, int(unix.Mkdev(n[0], n[1]))); err != nil {
			return fmt.Errorf("make /dev/%s: %w", name, err)
		}
	}
	if err := unix.Mount(dev, "/dev", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	return nil
}

// layFiles puts libraries and a program where they are found, and what the kernel
// module shows.
func layFiles(dir string, poison []byte) error {
	devices, err := os.ReadFile("/proc/devices")
	if err != nil {
		return err
	}
	files := map[string]string{
		"proc/driver/nvidia/version":                       "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " + version + "\n",
		"proc/driver/nvidia/params":                        "ModifyDeviceFiles: 1\n",
		"proc/driver/nvidia/gpus/0000:0b:00.0/information": gpuInfo,
		"proc/driver/nvidia/capabilities/mig/config":       "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
		"proc/driver/nvidia-caps/mig-minors":               minors,
		"proc/devices":                                     strings.Replace(string(devices), "Character devices:\n", "Character devices:\n"+numbers, 1),
		"bin/nvidia-smi":                                   "#!/bin/sh\necho \"the machine's own nvidia-smi is run\" >&2\nexit 99\n",
	}
	for _, name := range []string{"libnvidia-ml.so", "libcuda.so"} {
		for _, end := range []string{"", ".1", "." + version} {
			files["lib/"+name+end] = string(poison)
		}
	}
	for name, text := range files {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(at, []byte(text), 0o755); err != nil {
			return err
		}
	}
	for from, to := range map[string]string{"proc/driver": "/proc/driver", "proc/devices": "/proc/devices"} {
		if err := unix.Mount(filepath.Join(dir, from), to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount over %s: %w", to, err)
		}
	}
	for from, to := range map[string]string{"lib": "/usr/lib/x86_64-linux-gnu", "bin": "/usr/bin"} {
		work := filepath.Join(dir, from+".work")
		if err := os.Mkdir(work, 0o755); err != nil {
			return err
		}
		layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", to, filepath.Join(dir, from), work)
		if err := unix.Mount("overlay", to, "overlay", 0, layers); err != nil {
			return fmt.Errorf("lay files into %s: %w", to, err)
		}
	}
	return nil
}
