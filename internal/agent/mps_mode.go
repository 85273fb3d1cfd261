// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// computeMode is a compute mode that was set. epoch is the reader's epoch at that time: the driver of
// another epoch may have forgotten it.
type computeMode struct {
	is    gpu.ComputeMode
	epoch uint64
	at    time.Time
}

// setModes sets the compute modes. EXCLUSIVE_PROCESS is for a GPU whose daemon has a server, or is to
// start one now, so that its clients alone compute there. In that mode the first process has the card,
// so PROHIBITED is for all other times, also for the pause after a server that has not started; and
// DEFAULT for a GPU that is not under MPS any more. setups may show that another program has changed
// a mode.
func (m *mpsDaemons) setModes(ctx context.Context, inv *gpu.Inventory, epoch uint64, layouts map[gpu.UUID]plan.Layout,
	s *setups) error {
	defer m.serveBy()
	if m.driver == nil {
		return nil
	}
	var errs []error
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		have, ours := m.modes[d.UUID]
		mine := underMPS(layouts[d.UUID])
		if d.Fault != "" || d.MIG.Enabled || !mine && !ours {
			continue
		}
		want := gpu.ComputeDefault
		if mine {
			why, soft := m.daemonTrouble(d.UUID)
			switch {
			case why == (status.Cause{}) && m.serverDue(d.UUID):
				want = gpu.ComputeExclusiveProcess
			case why == (status.Cause{}):
				want = gpu.ComputeProhibited
			case soft && have.is == gpu.ComputeUnknown:
				continue // as the last process left it, until it is known how the daemon is
			case soft:
				want = have.is
			default:
				want = gpu.ComputeProhibited
			}
		}
		read, known := s.of[d.UUID]
		changed := known && s.at.After(have.at) && read.Compute != gpu.ComputeUnknown && read.Compute != have.is
		if have.is == want && have.epoch == epoch && !changed {
			continue
		}
		cctx, cancel := context.WithTimeout(ctx, driverPatience)
		err := m.driver.SetComputeMode(cctx, d.UUID, want)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("set the compute mode of %s to %s: %w", d.Name(), want, err))
			if mine {
				m.modes[d.UUID] = computeMode{} // it is not known what it is
			}
			if errors.Is(err, gpu.ErrTimeout) {
				break // the others would time out, too
			}
			continue
		}
		m.log.Info("compute mode", "gpu", d.UUID, "mode", string(want), "was", string(have.is))
		if known {
			read.Compute = want
			s.of[d.UUID] = read
		}
		if mine {
			m.modes[d.UUID] = computeMode{want, epoch, time.Now()}
		} else {
			delete(m.modes, d.UUID)
		}
	}
	return status.Because(status.ComputeModeFailed, errors.Join(errs...))
}

// serveBy has the supervisor keep a server on the GPUs whose compute mode lets one start.
func (m *mpsDaemons) serveBy() {
	m.mu.Lock()
	defer m.mu.Unlock()
	serve := map[gpu.UUID]bool{}
	for u := range m.wants {
		serve[u] = m.driver == nil || m.modes[u].is == gpu.ComputeExclusiveProcess
	}
	if !maps.Equal(serve, m.serve) {
		m.serve = serve
		poke(m.said)
	}
}

// serverDue reports whether a GPU has a server, or one may be started now.
func (m *mpsDaemons) serverDue(u gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.serverDueLocked(u)
}

func (m *mpsDaemons) serverDueLocked(u gpu.UUID) bool {
	d := m.seen.of[u]
	return d.Serving || len(d.Servers) > 0 || d.ServeAt == 0 || m.supervisor != nil && m.supervisor.Now() >= d.ServeAt
}
