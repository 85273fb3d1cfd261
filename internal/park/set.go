// SPDX-License-Identifier: Apache-2.0

package park

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ErrBroken means that a process of the set may be broken. Its container must be ended, and is never
// unlocked.
var ErrBroken = errors.New("a process may be broken, so its container must be ended")

// ErrNoRoom means that there is no memory for the set: on the host for Park, on a GPU for Restore. The
// set is as it was.
var ErrNoRoom = errors.New("no memory for it")

// A Process is a process by its PID, in the caller's PID namespace, and its start time in clock ticks
// since boot.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// A Set is processes that are parked together.
type Set struct {
	// Key names the set: letters, digits, dots, dashes and underscores, at most 128, no dot at the
	// beginning.
	Key       string
	Processes []Process
	// Bytes is what the processes have on GPUs.
	Bytes uint64
	// Cgroup is the directory of the container's own cgroup in the hierarchy that has the memory controller,
	// of version 1 or 2, and CgroupRoot that of the hierarchy.
	Cgroup, CgroupRoot string
}

// A Phase is how far a set is.
type Phase string

// The phases of a set.
const (
	Locking   Phase = "locking"   // its processes are being locked
	Saving    Phase = "saving"    // their memory is being moved to the host
	Parked    Phase = "parked"    // no process has memory on a GPU
	Restoring Phase = "restoring" // their memory is being moved back
	Broken    Phase = "broken"    // its container must be ended
)

// A Record is what is known of a set, in a file of its own. Zero times: the set was not so far yet.
type Record struct {
	Version   int       `json:"version"`
	Boot      string    `json:"boot"` // the kernel's boot ID
	Key       string    `json:"key"`
	Phase     Phase     `json:"phase"`
	Processes []Process `json:"processes"`
	Bytes     uint64    `json:"bytes"`
	Began     time.Time `json:"began"`  // when Park was called
	Parked    time.Time `json:"parked"` // when the last process was off its GPU
	// Why is the reason why a set is broken; empty for others.
	Why string `json:"why,omitempty"`
}

const recordVersion = 1

func (r *Record) check(name string) error {
	if r.Version != recordVersion {
		return fmt.Errorf("version %d, this program reads %d", r.Version, recordVersion)
	}
	if !plainName(r.Key) || r.Key+suffix != name {
		return fmt.Errorf("key %q", r.Key)
	}
	switch r.Phase {
	case Locking, Saving, Parked, Restoring, Broken:
	default:
		return fmt.Errorf("phase %q", r.Phase)
	}
	return checkProcesses(r.Processes)
}

// mostProcesses bounds a set.
const mostProcesses = 4096

func checkProcesses(list []Process) error {
	if len(list) > mostProcesses {
		return fmt.Errorf("%d processes, at most %d can be parked together", len(list), mostProcesses)
	}
	for _, p := range list {
		if p.PID <= 1 || p.Start == 0 {
			return fmt.Errorf("process %d with the start time %d", p.PID, p.Start)
		}
	}
	return nil
}

func plainName(s string) bool {
	if s == "" || len(s) > 128 || s[0] == '.' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") == ""
}

// StartOf returns the start time of a process in clock ticks since boot, or 0 if it is gone. A zombie is
// gone: it has no memory left. procRoot is the root of /proc.
func StartOf(procRoot string, pid int) uint64 {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	// The name may contain anything, so the fields are counted from its closing parenthesis on.
	_, rest, found := strings.Cut(string(data[strings.LastIndexByte(string(data), ')')+1:]), " ")
	fields := strings.Fields(rest)
	const state, start = 0, 19
	if !found || len(fields) <= start || strings.ContainsAny(fields[state], "ZXx") {
		return 0
	}
	n, err := strconv.ParseUint(fields[start], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
