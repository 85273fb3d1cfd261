// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// ableEvery is for how long an answer of Limits is believed: an operator may enable the
	// controller dmem. ablePatience is how long the loop waits for it.
	ableEvery    = time.Minute
	ablePatience = 2 * time.Second
)

// holder decides for which containers a hook has the driver limit the memory. It belongs to the
// loop's goroutine. Use newHolder.
type holder struct {
	world Limits // nil if the driver is not to be asked for limits
	log   *slog.Logger
	// answers has the last answer of world for each GPU, and said the reasons that the log has.
	answers map[gpu.UUID]ableAnswer
	said    map[string]bool
}

type ableAnswer struct {
	err error
	at  time.Time
}

func newHolder(w Limits, log *slog.Logger) *holder {
	return &holder{world: w, log: log, answers: map[gpu.UUID]ableAnswer{}, said: map[string]bool{}}
}

// hook returns the hook for an allocation, or nil if the driver can limit it on no GPU. Where the
// driver cannot do it, the library in the container and the watchdog enforce the cap, as with older
// drivers. Where it can, the container does not start without it, unless h.Open is true.
func (r *holder) hook(kit lib.Kit, h lib.Hold) []specs.Hook {
	if r.world == nil {
		return nil
	}
	able := map[gpu.UUID]uint64{}
	for u, bytes := range h.Limits {
		if err := r.able(u); err != nil {
			r.say(err.Error(), u)
			continue
		}
		able[u] = bytes
	}
	if len(able) == 0 {
		return nil
	}
	if kit.Hold == "" {
		r.say(kit.NoHold, "")
		return nil
	}
	h.Limits = able
	return []specs.Hook{kit.HoldHook(h)}
}

func (r *holder) able(u gpu.UUID) error {
	now := time.Now()
	if a, ok := r.answers[u]; ok && now.Sub(a.at) < ableEvery {
		return a.err
	}
	ctx, cancel := context.WithTimeout(context.Background(), ablePatience)
	defer cancel()
	err := r.world.Able(ctx, u)
	r.answers[u] = ableAnswer{err, now}
	return err
}

// say logs each reason once.
func (r *holder) say(why string, u gpu.UUID) {
	if len(r.said) > 1000 {
		clear(r.said)
	}
	if !r.said[why] {
		r.said[why] = true
		r.log.Info("the driver does not limit the memory of containers from their start on; "+
			"the library in them and the watchdog do", "gpu", u, "why", why)
	}
}
