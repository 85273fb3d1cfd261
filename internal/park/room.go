// SPDX-License-Identifier: Apache-2.0

package park

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// cgroupRoom returns how many bytes a cgroup can still be charged: the least of what its own limits and
// those of its ancestors leave. Page cache that was not used lately counts as room, since the kernel drops
// it first; the kubelet counts the same way.
func cgroupRoom(dir, root string) (uint64, error) {
	rel, err := filepath.Rel(root, dir)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") || dir == "" || root == "" {
		return 0, fmt.Errorf("cgroup %q is not in the hierarchy at %q", dir, root)
	}
	least := uint64(math.MaxUint64)
	for at := dir; ; at = filepath.Dir(at) {
		room, err := roomAt(at)
		if errors.Is(err, fs.ErrNotExist) && at == root {
			return least, nil // the root of the hierarchy has no limits
		} else if err != nil {
			return 0, fmt.Errorf("read memory limits of cgroup %s: %w", at, err)
		}
		least = min(least, room)
		if at == root {
			return least, nil
		}
	}
}

// files are what a hierarchy of one version calls the limits and what is charged, and the field of memory.stat with the
// page cache that was not used lately, that of cgroups below it included.
type files struct {
	limits      []string
	used, cache string
}

var (
	unifiedFiles = files{[]string{"memory.max", "memory.high"}, "memory.current", "inactive_file"}
	firstFiles   = files{[]string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"} // version 1
)

// unlimited is less than what version 1 calls no limit: the most that a counter of pages can have.
const unlimited = 1 << 62

func roomAt(dir string) (uint64, error) {
	of := unifiedFiles
	if _, err := os.Stat(filepath.Join(dir, firstFiles.limits[0])); err == nil {
		of = firstFiles
	}
	limit := uint64(math.MaxUint64)
	for _, file := range of.limits {
		n, err := readAmount(filepath.Join(dir, file))
		if err != nil {
			return 0, err
		}
		limit = min(limit, n)
	}
	if limit >= unlimited {
		return math.MaxUint64, nil
	}
	used, err := readAmount(filepath.Join(dir, of.used))
	if err != nil {
		return 0, err
	}
	cache, err := readField(filepath.Join(dir, "memory.stat"), of.cache)
	if err != nil {
		return 0, err
	}
	used -= min(used, cache)
	return limit - min(limit, used), nil
}

// readAmount reads a file with one number, or max.
func readAmount(path string) (uint64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(string(data))
	if text == "max" {
		return math.MaxUint64, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s says %.40q", path, text)
	}
	return n, nil
}

// readField reads the number after a name in a file with one of each on a line.
func readField(path, name string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) >= 2 && strings.TrimSuffix(fields[0], ":") == name {
			return strconv.ParseUint(fields[1], 10, 64)
		}
	}
	return 0, errors.Join(fmt.Errorf("%s has no %s", path, name), lines.Err())
}

// nodeRoom returns how many bytes of the node's memory are available, beyond what is spared.
func nodeRoom(procRoot string, spare uint64) (uint64, error) {
	kib, err := readField(filepath.Join(procRoot, "meminfo"), "MemAvailable")
	if err != nil {
		return 0, err
	}
	room := kib << 10
	return room - min(room, spare), nil
}
