// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
)

// nodes are the device nodes of this driver that a process has. They are looked at
// whenever somebody asks.
//
// A process without the control node has none at all: it runs where only the
// library was laid, and sees every GPU. So does one whose /dev is the daemon's own,
// that of the machine, unless this driver's nodes were laid there, as they are on a
// test node: what else is there is a real driver's, and says nothing of this one.
type nodes struct {
	dev string // the process's /dev
	// ours is the /dev that the daemon has; laid says that its nodes are this
	// driver's.
	ours directory
	laid bool
}

// directory is which one it is, under whatever name.
type directory struct{ device, inode uint64 }

func find(path string) (directory, bool) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return directory{uint64(st.Dev), st.Ino}, err == nil
}

func (s *Server) nodes(pid int) nodes {
	n := nodes{dev: filepath.Join(s.Proc, strconv.Itoa(pid), "root/dev")}
	n.ours, _ = find("/dev")
	if m, err := install.Find(s.Driver); s.Driver != "" && err == nil {
		dev, ok := find(m.Dev)
		n.laid = ok && dev == n.ours
	}
	return n
}

// none says that the process has no nodes of this driver.
func (n nodes) none() bool {
	if now, ok := find(n.dev); ok && now == n.ours && !n.laid {
		return true
	}
	return !n.has("nvidiactl", nvidiaMajor, nvidiaControl)
}

// gpu says whether the process sees the GPU of a minor.
func (n nodes) gpu(minor int) bool {
	return n.has("nvidia"+strconv.Itoa(minor), nvidiaMajor, minor) || n.none()
}

// capability says what the process reaches of MIG: an instance whose node it has;
// where it has the node that is for changing MIG, or no nodes at all, every
// instance. Such a process may also change MIG (gi and ci are negative).
func (n nodes) capability(gpuMinor, gi, ci int) bool {
	has := func(minor int) bool {
		return n.has(install.CapabilityNode(minor), install.MajorCapabilities, minor)
	}
	return gi >= 0 && has(emulator.CapabilityMinor(gpuMinor, gi, ci)) || has(install.CapabilityConfig) || n.none()
}

func (n nodes) has(name string, major, minor int) bool {
	var st unix.Stat_t
	err := unix.Lstat(filepath.Join(n.dev, name), &st)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(uint32(major), uint32(minor))
}

// The driver's device numbers, which are fixed.
const (
	nvidiaMajor   = 195
	nvidiaControl = 255
)
