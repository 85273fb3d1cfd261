// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// capabilityMode is the mode that the driver gives to the device nodes of instances. A container
// that has the node may use the instance.
const capabilityMode = 0o444

// capabilities finds and makes the device nodes that give access to MIG instances.
type capabilities struct{ *session }

func (c *capabilities) Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error) {
	what := fmt.Sprintf("find the capability nodes of GPU instance %d, compute instance %d of nvidia%d", gi, ci, minor)
	wanted := []string{
		fmt.Sprintf("gpu%d/gi%d/access", minor, gi),
		fmt.Sprintf("gpu%d/gi%d/ci%d/access", minor, gi, ci),
	}
	numbers, err := c.capabilityMinors(wanted)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	var edits specs.ContainerEdits
	for _, number := range numbers {
		name := fmt.Sprintf("nvidia-cap%d", number)
		if err := c.capabilityNode(name, number); err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		mode := os.FileMode(capabilityMode)
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{
			Path: "/dev/nvidia-caps/" + name, HostPath: filepath.Join(c.opts.capsDir(), name),
			FileMode: &mode, Permissions: "rwm",
		})
	}
	return c.seenByHost(edits).DeviceNodes, nil
}

// capsDir is the directory of these nodes.
func (o Options) capsDir() string { return filepath.Join(o.devDir(), "nvidia-caps") }

// capabilityMinors returns the minor numbers of capabilities, from the driver's list. Each line
// of the list is a name and a number.
func (c *capabilities) capabilityMinors(wanted []string) ([]int, error) {
	file := filepath.Join(c.opts.ProcRoot, "driver/nvidia-caps/mig-minors")
	list, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w; is this the host's procfs, and the driver loaded? (--proc-root)",
			gpu.ErrNotSupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", gpu.ErrDriver, err)
	}
	numbers := make([]int, len(wanted))
	for i, name := range wanted {
		if numbers[i], err = lineNumber(list, name+" "); err != nil {
			return nil, fmt.Errorf("%s has no %s: %w", file, name, err)
		}
	}
	return numbers, nil
}

// lineNumber returns the number after prefix, from the first line that begins with it.
func lineNumber(list []byte, prefix string) (int, error) {
	for line := range bytes.Lines(list) {
		if number, ok := bytes.CutPrefix(line, []byte(prefix)); ok {
			n, err := strconv.ParseUint(string(bytes.TrimSpace(number)), 10, 20)
			if err != nil {
				return 0, fmt.Errorf("a number: %w: %w", gpu.ErrNotFound, err)
			}
			return int(n), nil
		}
	}
	return 0, gpu.ErrNotFound
}

// capabilityNode makes a device node unless it exists with the right numbers.
func (c *capabilities) capabilityNode(name string, minor int) error {
	major, err := c.capabilityMajor()
	if err != nil {
		return err
	}
	path := filepath.Join(c.opts.capsDir(), name)
	device := unix.Mkdev(major, uint32(minor))
	if right, err := isDevice(path, device); right || err != nil {
		return err
	}
	if err := makeNode(path, device); err != nil {
		return fmt.Errorf("make %s (character device %d:%d): %w: %w; "+
			"give the agent CAP_MKNOD and %s to write in, or have nvidia-modprobe make it",
			path, major, minor, gpu.ErrNoPermission, err, c.opts.capsDir())
	}
	return nil
}

// capabilityMajor reads the major number that the kernel gave to nvidia-caps.
func (c *capabilities) capabilityMajor() (uint32, error) {
	file := filepath.Join(c.opts.ProcRoot, "devices")
	list, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", gpu.ErrNotSupported, err)
	}
	characters, _, _ := strings.Cut(string(list), "Block devices:")
	for line := range strings.Lines(characters) {
		if number, ok := strings.CutSuffix(strings.TrimSpace(line), " nvidia-caps"); ok {
			if n, err := strconv.ParseUint(number, 10, 12); err == nil {
				return uint32(n), nil
			}
		}
	}
	return 0, fmt.Errorf("%s has no character device nvidia-caps: %w; is the driver loaded?", file, gpu.ErrNotSupported)
}

// isDevice reports whether a path is a character device with these numbers. It is false for a
// node with the numbers of a kernel module that was loaded before, and for a missing one. It
// fails if the path is no character device or cannot be read.
func isDevice(path string, device uint64) (bool, error) {
	var node unix.Stat_t
	err := unix.Lstat(path, &node)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at %s: %w: %w", path, gpu.ErrNoPermission, err)
	}
	if node.Mode&unix.S_IFMT != unix.S_IFCHR {
		return false, fmt.Errorf("%s is not a character device: %w; remove it", path, gpu.ErrInvalid)
	}
	return node.Rdev == device, nil
}

// makeNode creates a device node. It replaces an old one in a single step, because a container
// may be starting with it.
func makeNode(path string, device uint64) error {
	dir := filepath.Dir(path)
	if err := os.Mkdir(dir, 0o755); err == nil {
		// The driver's tools give it this mode, so the umask must not change it.
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return err
	}
	temp := filepath.Join(dir, fmt.Sprintf(".%s.%d", filepath.Base(path), os.Getpid()))
	_ = os.Remove(temp) // left by a process that had this PID
	if err := unix.Mknod(temp, unix.S_IFCHR|capabilityMode, int(device)); err != nil {
		return &fs.PathError{Op: "mknod", Path: temp, Err: err}
	}
	err := os.Chmod(temp, capabilityMode)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}
