// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// view is how one process sees the PIDs of others.
type view struct {
	proc  string
	ns    nsID
	depth int // levels between the daemon's namespace and this one
}

type nsID struct{ dev, ino uint64 }

// newView reads the PID namespace of a process. The PID, like all of a view's
// input, is one of the namespace that proc was mounted in.
func newView(proc string, pid int) (*view, error) {
	pids, err := nsPIDs(proc, pid)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(proc, strconv.Itoa(pid), "ns/pid"), &st); err != nil {
		return nil, fmt.Errorf("read PID namespace of %d: %w", pid, err)
	}
	return &view{proc: proc, ns: nsID{st.Dev, st.Ino}, depth: len(pids) - 1}, nil
}

// see gives the PID that the viewer knows a process by; false if the process
// lives outside the viewer's namespace and those below it, or is gone.
func (v *view) see(pid int) (int, bool) {
	pids, err := nsPIDs(v.proc, pid)
	if err != nil || len(pids) <= v.depth {
		return 0, false
	}
	fd, err := unix.Open(filepath.Join(v.proc, strconv.Itoa(pid), "ns/pid"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	// Climb to the viewer's level; the namespace there must be the viewer's.
	for range len(pids) - 1 - v.depth {
		up, err := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
		unix.Close(fd)
		if err != nil {
			return 0, false
		}
		fd = up
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || (nsID{st.Dev, st.Ino}) != v.ns {
		return 0, false
	}
	return pids[v.depth], true
}

// nsPIDs are a process's PIDs, from the namespace of proc down to its own.
func nsPIDs(proc string, pid int) ([]int, error) {
	data, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "status"))
	if err != nil {
		return nil, fmt.Errorf("read PIDs of %d: %w", pid, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		list, ok := strings.CutPrefix(lines.Text(), "NSpid:")
		if !ok {
			continue
		}
		var pids []int
		for _, f := range strings.Fields(list) {
			n, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("read PIDs of %d: %w", pid, err)
			}
			pids = append(pids, n)
		}
		if len(pids) > 0 {
			return pids, nil
		}
	}
	return nil, fmt.Errorf("read PIDs of %d: no NSpid line", pid)
}
