// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// toolGrace is how long a program may keep its output open after it was told to end.
const toolGrace = time.Second

// steps are the arguments of nvidia-smi compute-policy --set-timeslice, by their number.
var steps = []gpu.TimeSlice{gpu.TimeSliceDefault, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong}

func (m *modes) SetTimeSlice(ctx context.Context, u gpu.UUID, slice gpu.TimeSlice) error {
	what := fmt.Sprintf("set the time slice of %s to %q", u, slice)
	if m.stopped.Err() != nil {
		return fmt.Errorf("%s: %w", what, errClosed)
	}
	step := slices.Index(steps, slice)
	if step < 0 {
		return fmt.Errorf("%s: want one of %q: %w", what, steps, gpu.ErrInvalid)
	}
	if err := m.locks.handles.RLock(ctx); err != nil { // the program is a client too
		return fmt.Errorf("%s: %w: the driver is being initialised anew, or a GPU reset", what, err)
	}
	defer m.locks.handles.RUnlock()
	return m.smi(ctx, what, toolMeaning, "compute-policy", "-i", string(u), "--set-timeslice", fmt.Sprint(step))
}

// smi runs the driver's nvidia-smi. If that fails, the error has the program's output, and wraps
// what meaning returns for exit status and output.
func (s *session) smi(
	ctx context.Context, what string, meaning func(status int, said string) error, args ...string,
) error {
	tool, err := s.tool("nvidia-smi")
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	cmd := exec.CommandContext(ctx, tool, args...)
	cmd.WaitDelay = toolGrace
	if filepath.IsAbs(s.library) {
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(s.library))
	}
	output, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %s: %w: %w", what, tool, gpu.ErrTimeout, context.Cause(ctx))
	}
	said := strings.Join(strings.Fields(string(output)), " ")
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return fmt.Errorf("%s: run %s: %w: %v", what, tool, gpu.ErrNotSupported, err)
	}
	return fmt.Errorf("%s: %w (%s: %v: %q)", what, meaning(exit.ExitCode(), said), tool, exit, said)
}

// toolMeaning returns the error of package gpu for an exit status of nvidia-smi, as its manual
// page lists them.
func toolMeaning(status int, _ string) error {
	switch status {
	case 4:
		return gpu.ErrNoPermission
	case 6:
		return gpu.ErrNotFound
	case 9, 12:
		return gpu.ErrNoDriver
	case 15:
		return gpu.ErrLost
	}
	// 2: this nvidia-smi has no compute-policy; 3: the card cannot; 13: the library cannot. For
	// all others, the reason is in its output.
	return gpu.ErrNotSupported
}

// tool finds one of the driver's programs.
func (s *session) tool(name string) (string, error) {
	programs, _ := gpu.DriverPlaces(s.opts.DriverRoot)
	for _, dir := range programs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s below %s: %w", name, s.opts.DriverRoot, gpu.ErrNotSupported)
}
