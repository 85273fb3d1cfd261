// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// numberOf is a device node's number: the edits' own, or that of the machine's node, whose
// root is at old.
func numberOf(old string, d *specs.DeviceNode) (int, error) {
	if d.Major != 0 || d.Minor != 0 {
		return int(unix.Mkdev(uint32(d.Major), uint32(d.Minor))), nil
	}
	var st unix.Stat_t
	from := cmp.Or(d.HostPath, d.Path)
	if err := unix.Stat(filepath.Join(old, from), &st); err != nil {
		return 0, fmt.Errorf("look at device node %s: %w", from, err)
	}
	return int(st.Rdev), nil
}

// Hides reports whether a hook is the agent's own, which hides driver libraries of the image.
func Hides(h *specs.Hook) bool { return len(h.Args) > 0 && h.Args[0] == "hide" }

// hooks does inside the container what the agent's hook and NVIDIA's do there, of those that
// make the driver's libraries loadable: links, and the loader's cache with more folders. Others,
// which keep programs from loading modules or changing nodes, change nothing for a test.
func hooks(all []*specs.Hook) error {
	var folders []string
	for _, h := range all {
		if Hides(h) {
			if err := hide(h.Args[1:]); err != nil {
				return err
			}
			continue
		}
		for i := 1; i < len(h.Args); i++ {
			flag, value, ok := strings.Cut(h.Args[i], "=")
			if !ok && i+1 < len(h.Args) {
				value = h.Args[i+1]
			}
			switch {
			case flag == "--folder" && slices.Contains(h.Args, "update-ldcache"):
				folders = append(folders, value)
			case flag == "--link" && slices.Contains(h.Args, "create-symlinks"):
				target, at, _ := strings.Cut(value, "::")
				if err := place(at); err != nil {
					return err
				}
				if err := os.Symlink(target, at); err != nil {
					return fmt.Errorf("make link: %w", err)
				}
			}
		}
	}
	if len(folders) == 0 {
		return nil
	}
	if out, err := exec.Command("/sbin/ldconfig", folders...).CombinedOutput(); err != nil {
		return fmt.Errorf("make the loader's cache: %w\n%s", err, out)
	}
	return nil
}

// hide covers folders of the image, as pkg/memcap/lib/hide does before the container's root is its
// own.
func hide(patterns []string) error {
	for _, p := range patterns {
		names, err := filepath.Glob(p)
		if err != nil {
			return fmt.Errorf("hide %s: %w", p, err)
		}
		for _, name := range names {
			if err := unix.Mount("hidden", name, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0555,size=4k"); err != nil {
				return fmt.Errorf("hide %s: %w", name, err)
			}
		}
	}
	return nil
}
