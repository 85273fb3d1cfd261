// SPDX-License-Identifier: Apache-2.0

package emulator

import "slices"

// Reset makes a GPU begin anew, as nvidia-smi --gpu-reset asks the driver to: no
// instance stands afterwards, and a pending MIG mode is in force. Only root may.
// It answers InUse while another program has the driver open on the GPU, or any
// process has memory there.
func (s *Session) Reset(h Handle) Return {
	_, r := device(s, "gpuEmulatorReset", h, func(g *gpu) (struct{}, Return) {
		w := s.p.w
		var seconds float64
		if g.mig.pending != g.mig.on {
			seconds = w.mig.ModeSeconds
		}
		return struct{}{}, s.operateLocked(g, seconds, func() Return {
			switch {
			case !s.p.root:
				return NoPermission
			case w.unloaded:
				return DriverNotLoaded
			case g.lost || g.unplugged:
				return GPUIsLost
			case w.heldLocked(g, s.p):
				return InUse
			}
			return Success
		}, func() {
			w.noteLocked(MIGOp{GPU: g.slot, Op: "reset", CI: -1, GI: -1})
			w.freshLocked(g, true)
			w.touchLocked()
		})
	})
	return r
}

// heldLocked says whether a program other than one has the driver open on a GPU,
// or a process memory there.
func (w *World) heldLocked(g *gpu, but *process) bool {
	for p := range w.sessions {
		if p != but && p.refs > 0 && slices.Contains(p.gpus, g) && !p.dead[g] && (p.alive == nil || p.alive()) {
			return true
		}
	}
	return slices.ContainsFunc(w.processesLocked(), func(p Process) bool { return p.GPU == g.slot })
}

func init() {
	calls["gpuEmulatorReset"] = call{serve: func(s *Session, f *frame) Return { return s.Reset(f.handle) }}
}
