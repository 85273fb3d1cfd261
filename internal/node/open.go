// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// mostNamed bounds the processes that OpenBy names: it is for a sentence.
const mostNamed = 10

// OpenBy names the processes that have a device node open, by the path that it has
// in their own mount namespaces: "nvidia-persiste (PID 812)", with the pod's UID
// where it is of a pod. Processes that the kernel does not show are not among them.
func OpenBy(procRoot, path string) []string {
	proc := NewProc(procRoot)
	defer proc.Close()
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		fds := filepath.Join(procRoot, e.Name(), "fd")
		open, err := os.ReadDir(fds)
		if err == nil && slices.ContainsFunc(open, func(f os.DirEntry) bool {
			to, err := os.Readlink(filepath.Join(fds, f.Name()))
			return err == nil && to == path
		}) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	var out []string
	for i, pid := range pids {
		if i == mostNamed {
			out = append(out, fmt.Sprintf("and %d more", len(pids)-i))
			break
		}
		who := "a process"
		if comm, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "comm")); err == nil {
			// A program may call itself what it likes.
			who = strings.Map(func(r rune) rune {
				if r < ' ' || r > '~' {
					return -1
				}
				return r
			}, string(comm))
		}
		where := ""
		if owner, err := proc.Container(pid); err == nil {
			where = ", pod " + owner.PodUID
		}
		out = append(out, fmt.Sprintf("%s (PID %d%s)", who, pid, where))
	}
	return out
}
