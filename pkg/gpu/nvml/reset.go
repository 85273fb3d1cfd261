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
	// resetWait ends a reset that does not. One takes seconds.
	resetWait = 2 * time.Minute
	// othersWait bounds how long a reset waits for work on MIG that is under way:
	// what comes after it waits as well.
	othersWait = time.Minute
	// takeUpWait bounds, and takeUpPause spaces, attempts to initialise the driver
	// after a reset.
	takeUpWait  = 10 * time.Second
	takeUpPause = 100 * time.Millisecond
	// mostClients bounds how many clients of a GPU an error names.
	mostClients = 8
)

// Reset resets a GPU alone, with the driver's own nvidia-smi (see SetTimeSlice):
// a MIG mode that is pending comes into force, a row of memory is replaced, and
// all instances are gone. No process may have the GPU open. This one has, as long
// as it has the driver initialised, so the driver is let go of meanwhile: Events
// ends its wait first (Options.EventWait), work on MIG is waited for, and all
// other calls wait until the driver has been initialised again. Other processes
// on other GPUs notice nothing. Events goes on by itself; what happens meanwhile
// goes unheard.
//
// A caller that leaves (gpu.ErrTimeout) does not end a reset that has begun.
//
// Errors: gpu.ErrInUse, with the program's words and the clients that have the
// GPU's node open as far as they can be seen; gpu.ErrNotSupported where there is no
// such program or the GPU cannot be reset alone; gpu.ErrNoPermission without root;
// gpu.ErrNotFound for a UUID that the driver does not know; gpu.ErrNoDriver where
// the driver cannot be initialised again: Events goes on trying.
func (d *Driver) Reset(ctx context.Context, u gpu.UUID) error {
	what := "reset " + string(u)
	d.hurry()
	if _, err := d.tool("nvidia-smi"); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	soon, cancel := context.WithTimeout(ctx, othersWait)
	defer cancel()
	if err := d.outside.Seize(soon); err != nil {
		return fmt.Errorf("%s: %w: %s", what, err, d.inFlight())
	}
	if err := d.sets.Seize(ctx); err != nil {
		d.outside.Yield()
		return fmt.Errorf("%s: stop waiting for events: %w", what, err)
	}
	release := func() {
		d.sets.Yield()
		d.outside.Yield()
	}
	return d.explained(d.alone(ctx, what, release, func() error {
		if d.stopped.Err() != nil {
			return fmt.Errorf("%s: %w", what, errClosed)
		}
		return d.reset(what, u)
	}))
}

// reset has the library to itself.
func (d *Driver) reset(what string, u gpu.UUID) error {
	h, err := d.handle(u)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	minor, ret := h.GetMinorNumber()
	if ret != nvml.SUCCESS {
		minor = -1 // a GPU that is broken may be reset
	}
	if err := d.shutdown(what + ": let go of the driver"); err != nil {
		return errors.Join(err, d.takeUp(what))
	}
	ctx, cancel := context.WithTimeout(context.Background(), resetWait)
	defer cancel()
	err = d.smi(ctx, what, resetMeaning, "--gpu-reset", "-i", string(u))
	if errors.Is(err, gpu.ErrInUse) {
		err = fmt.Errorf("%w; %s", err, d.clients(minor))
	}
	return errors.Join(err, d.takeUp(what))
}

// takeUp initialises the driver after a reset, and tries for a while: the card may not
// be ready at once, and without a driver every GPU of the node is down.
func (d *Driver) takeUp(what string) error {
	var err error
	for began := time.Now(); ; {
		if err = d.initialised(); err == nil {
			return nil
		}
		if d.stopped.Err() != nil || time.Since(began) > takeUpWait {
			return fmt.Errorf("%s: %w", what, err)
		}
		d.log.Warn("cannot initialise the driver after a reset; trying again", "err", err)
		select {
		case <-d.stopped.Done():
		case <-time.After(takeUpPause):
		}
	}
}

// resetMeaning is the sentinel for nvidia-smi's refusal of a reset. nvidia-smi says in
// words that a GPU is in use, and exits with NVML's code for that or a general one.
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

// clients says which processes have the node of a GPU open, as far as they can be
// seen: the driver lists those that compute or draw, and monitors are in the way
// of a reset too.
func (d *Driver) clients(minor int) string {
	const unseen = "end the processes that have it open"
	if minor < 0 {
		return unseen
	}
	var node unix.Stat_t
	path := filepath.Join(d.opts.devDir(), fmt.Sprintf("nvidia%d", minor))
	if err := unix.Stat(path, &node); err != nil || node.Mode&unix.S_IFMT != unix.S_IFCHR {
		return unseen
	}
	var pids []int
	for _, name := range names(d.opts.ProcRoot) {
		if pid, err := strconv.Atoi(name); err == nil && pid != os.Getpid() && d.hasOpen(name, node.Rdev) {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		return unseen + "; none is seen from here (hostPID, --proc-root)"
	}
	slices.Sort(pids)
	var named []string
	for _, pid := range pids {
		comm, _ := os.ReadFile(filepath.Join(d.opts.ProcRoot, strconv.Itoa(pid), "comm"))
		named = append(named, fmt.Sprintf("%d (%s)", pid, strings.TrimSpace(string(comm))))
	}
	if more := len(named) - mostClients; more > 0 {
		named = append(named[:mostClients], fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("%s is open in %s: end them", path, strings.Join(named, ", "))
}

// hasOpen says whether a process has a device open.
func (d *Driver) hasOpen(pid string, device uint64) bool {
	dir := filepath.Join(d.opts.ProcRoot, pid, "fd")
	for _, fd := range names(dir) {
		file := filepath.Join(dir, fd)
		// Most descriptors are no device of the driver's: their names are cheaper.
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
