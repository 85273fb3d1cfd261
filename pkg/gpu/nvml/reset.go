// SPDX-License-Identifier: Apache-2.0

package nvml

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

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// resetWait ends a reset that hangs. A reset takes seconds.
	resetWait = 2 * time.Minute
	// othersWait bounds how long a reset waits for MIG work that is under way. Other work waits
	// behind the reset.
	othersWait = time.Minute
	// reinitialiseWait bounds the attempts to initialise the driver after a reset, and
	// reinitialisePause is the pause between two.
	reinitialiseWait  = 10 * time.Second
	reinitialisePause = 100 * time.Millisecond
	// mostClients bounds how many clients of a GPU an error lists.
	mostClients = 8
)

func (m *modes) Reset(ctx context.Context, u gpu.UUID) error {
	what := "reset " + string(u)
	m.hurry()
	if _, err := m.tool("nvidia-smi"); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	soon, cancel := context.WithTimeout(ctx, othersWait)
	defer cancel()
	if err := m.locks.handles.Lock(soon); err != nil {
		return fmt.Errorf("%s: %w: %s", what, err, m.locks.inFlight())
	}
	if err := m.locks.waiting.Lock(ctx); err != nil {
		m.locks.handles.Unlock()
		return fmt.Errorf("%s: stop waiting for events: %w", what, err)
	}
	release := func() {
		m.locks.waiting.Unlock()
		m.locks.handles.Unlock()
	}
	return m.explained(m.exclusive(ctx, what, release, func() error {
		if m.stopped.Err() != nil {
			return fmt.Errorf("%s: %w", what, errClosed)
		}
		return m.reset(what, u)
	}))
}

// reset resets a GPU. All locks are held, so no other call of the library runs.
func (m *modes) reset(what string, u gpu.UUID) error {
	h, err := m.handle(u)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	minor, ret := h.GetMinorNumber()
	if ret != nvml.SUCCESS {
		minor = -1 // a broken GPU may be reset too
	}
	if err := m.shutdown(what + ": shut the driver down"); err != nil {
		return errors.Join(err, m.reinitialise(what))
	}
	ctx, cancel := context.WithTimeout(context.Background(), resetWait)
	defer cancel()
	err = m.smi(ctx, what, resetMeaning, "--gpu-reset", "-i", string(u))
	if errors.Is(err, gpu.ErrInUse) {
		err = fmt.Errorf("%w; %s", err, m.clients(minor))
	}
	return errors.Join(err, m.reinitialise(what))
}

// reinitialise initialises the driver after a reset. It tries for reinitialiseWait: the card may
// not be ready at once, and without a driver all GPUs of the node are down.
func (m *modes) reinitialise(what string) error {
	var err error
	for began := time.Now(); ; {
		if err = m.initialised(); err == nil {
			return nil
		}
		if m.stopped.Err() != nil || time.Since(began) > reinitialiseWait {
			return fmt.Errorf("%s: %w", what, err)
		}
		m.log.Warn("cannot initialise the driver after a reset; trying again", "err", err)
		select {
		case <-m.stopped.Done():
		case <-time.After(reinitialisePause):
		}
	}
}

// resetMeaning returns the error of package gpu for nvidia-smi's refusal of a reset. For a GPU in
// use, nvidia-smi prints so, and exits with NVML's code for that or with a general one.
func resetMeaning(status int, said string) error {
	said = strings.ToLower(said)
	if status == int(nvml.ERROR_IN_USE) || strings.Contains(said, "in use") || strings.Contains(said, "being used") {
		return gpu.ErrInUse
	}
	if status == 2 || status == 3 || strings.Contains(said, "not supported") {
		return gpu.ErrNotSupported
	}
	if err := toolMeaning(status, said); !errors.Is(err, gpu.ErrNotSupported) {
		return err
	}
	return gpu.ErrDriver
}

// clients lists the processes that have the node of a GPU open, as far as they can be seen. The
// driver's list would not do: it has only processes that compute or draw, and monitors block a
// reset too.
func (m *modes) clients(minor int) string {
	const unseen = "end the processes that have it open"
	pids, path := m.holders(minor)
	if path == "" {
		return unseen
	}
	if len(pids) == 0 {
		return unseen + "; the agent sees none of them (hostPID, --proc-root)"
	}
	var named []string
	for _, pid := range pids {
		named = append(named, fmt.Sprintf("%d (%s)", pid, m.nameOf(pid)))
	}
	if more := len(named) - mostClients; more > 0 {
		named = append(named[:mostClients], fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("%s is open in %s: end them", path, strings.Join(named, ", "))
}

// holders returns the processes, other than this one, that have the node of a GPU open, and the
// node's path. They are sorted. The path is empty if the node cannot be found.
func (s *session) holders(minor int) (pids []int, path string) {
	if minor < 0 {
		return nil, ""
	}
	var node unix.Stat_t
	path = filepath.Join(s.opts.devDir(), fmt.Sprintf("nvidia%d", minor))
	if err := unix.Stat(path, &node); err != nil || node.Mode&unix.S_IFMT != unix.S_IFCHR {
		return nil, ""
	}
	for _, name := range names(s.opts.ProcRoot) {
		if pid, err := strconv.Atoi(name); err == nil && pid != os.Getpid() && s.hasOpen(name, node.Rdev) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, path
}

// hasOpen reports whether a process has a device open.
func (s *session) hasOpen(pid string, device uint64) bool {
	dir := filepath.Join(s.opts.ProcRoot, pid, "fd")
	for _, fd := range names(dir) {
		file := filepath.Join(dir, fd)
		// Most descriptors are not of the driver's devices, and reading the link is cheaper than
		// stat.
		if link, err := os.Readlink(file); err != nil || !strings.Contains(link, "nvidia") {
			continue
		}
		var open unix.Stat_t
		if err := unix.Stat(file, &open); err == nil && open.Mode&unix.S_IFMT == unix.S_IFCHR && open.Rdev == device {
			return true
		}
	}
	return false
}
