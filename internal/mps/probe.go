// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
)

// probeWait is how long a program may be in cuInit. It takes some 0.3 s, or 2 s on a busy node.
const probeWait = 5 * time.Second

// Probed is what became of a probe: a short-lived program that begins CUDA as a client.
type Probed string

// Outcomes of a probe.
const (
	// Answered: CUDA has begun, or has refused to.
	Answered Probed = "answered"
	// Hangs: it was still in cuInit after some seconds, and was ended. So are all programs that come.
	Hangs Probed = "hangs"
)

// Probe has a short-lived program begin CUDA as a client of the GPU's server, as a container's program
// does, and returns what becomes of it within some seconds. So a server is found that says it is active
// and serves nobody. The program takes one of the server's places for clients.
//
// The error wraps gpu.ErrNotFound for a GPU without a daemon, gpu.ErrInUse while another probe of the
// GPU runs, and gpu.ErrNotSupported if there is no program.
func (s *Supervisor) Probe(ctx context.Context, u gpu.UUID) (Probed, error) {
	if !uuid.MatchString(string(u)) {
		return "", fmt.Errorf("probe the MPS server of GPU %.64q: want the UUID of a GPU: %w", u, gpu.ErrInvalid)
	}
	s.mu.Lock()
	r := s.rounds[u]
	s.mu.Unlock()
	if len(s.opts.Probe) == 0 {
		return "", fmt.Errorf("probe the MPS server of %s: no program is there for that: %w", u, gpu.ErrNotSupported)
	}
	if r == nil || !r.snapshot().Open {
		return "", fmt.Errorf("probe the MPS server of %s: it has no MPS daemon that takes programs: %w", u, gpu.ErrNotFound)
	}
	if !r.probing.TryLock() {
		return "", fmt.Errorf("probe the MPS server of %s: a probe of it runs: %w", u, gpu.ErrInUse)
	}
	defer r.probing.Unlock()
	outcome, err := r.probe(ctx, s.opts.Probe)
	if err != nil {
		return "", fmt.Errorf("probe the MPS server of %s: %w", u, err)
	}
	return outcome, nil
}

// probe runs the program. It gets the directory that containers get.
func (k *keeper) probe(ctx context.Context, program []string) (Probed, error) {
	limited, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	cmd := exec.CommandContext(limited, program[0], program[1:]...)
	cmd.Dir, cmd.WaitDelay = "/", grace
	cmd.Env = append(os.Environ(), pipeVariable+"="+k.files.pipe())
	if len(k.driver.Libraries) > 0 {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+k.files.libraries())
	}
	out := &bounded{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	began := time.Now()
	err := cmd.Run()
	said := brief.Cut(strings.ToValidUTF8(strings.TrimSpace(out.text.String()), "?"), 200)
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(limited.Err(), context.DeadlineExceeded):
		k.log.Warn("a probe of the MPS server hangs", "gpu", k.gpu, "after", probeWait.String())
		return Hangs, nil
	case err != nil:
		return "", fmt.Errorf("run %s: %w: %s", strings.Join(program, " "), err, said)
	}
	k.log.Info("a probe of the MPS server was answered", "gpu", k.gpu, "result", said,
		"took", time.Since(began).Round(time.Millisecond).String())
	return Answered, nil
}
