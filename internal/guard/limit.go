// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// limitUnable is how long a GPU is left alone whose driver cannot limit
	// containers, and limitRetry how long a container for which it failed.
	limitUnable = time.Hour
	limitRetry  = 10 * time.Second
	// limitEvery is how often a limit is set again that stands: a driver that was
	// loaded anew has forgotten it.
	limitEvery = time.Minute
	// limitGone is how often in a row a container that is still seen on the GPU may be
	// gone: it takes a while to end, but not longer.
	limitGone = 3
)

// Limiter has the driver itself limit the memory of containers.
type Limiter interface {
	// Limit keeps all processes of a container together within so many bytes of a
	// GPU; lib.None undoes it. Without an error the driver has confirmed it. An
	// error answers to gpu.ErrNotSupported where that GPU's driver or this kernel
	// cannot, to node.ErrNoDmem where the node's cgroups are not made for it, and to
	// gpu.ErrNotFound where the container is gone.
	Limit(ctx context.Context, u gpu.UUID, o node.Owner, bytes uint64) error
}

// limit is what the driver was asked to hold a container to.
type limit struct {
	asked uint64    // bytes; lib.None undoes
	at    time.Time // zero: never asked
	holds uint64    // bytes that the driver has confirmed; zero: none
	gone  int       // how often in a row there was no such container
	unfit bool      // the node's cgroups are not made for it
}

// limit has the driver hold a container to its cap from the first look that finds
// it on the GPU. A container that may have all of it needs none.
func (g *Guard) limit(ctx context.Context, at place, o node.Owner, bytes uint64, now time.Time) {
	l := &g.seen[at].limit
	if g.w.Limiter == nil || bytes == lib.None && l.at.IsZero() {
		return
	}
	if since, ok := g.unable[at.gpu]; ok && now.Sub(since) < limitUnable {
		return
	}
	again := limitRetry
	if l.holds == bytes || bytes == lib.None && l.holds == 0 || l.unfit {
		again = limitEvery
	}
	if l.asked == bytes && !l.at.IsZero() && now.Sub(l.at) < again {
		return
	}
	*l = limit{asked: bytes, at: now, gone: l.gone}
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	switch err := g.w.Limiter.Limit(ctx, at.gpu, o, bytes); {
	case err == nil:
		l.gone = 0
		if bytes != lib.None {
			l.holds = bytes
		}
	case errors.Is(err, gpu.ErrNotSupported), errors.Is(err, gpu.ErrNoPermission):
		g.unable[at.gpu] = now
		for p, s := range g.seen {
			if p.gpu == at.gpu {
				s.limit = limit{}
			}
		}
		g.voice.log.Debug("the driver cannot limit the memory of containers; the library in them and the watchdog do", "gpu", at.gpu, "err", err)
	case errors.Is(err, node.ErrNoDmem):
		// One line for the node: what one container lacks, all do.
		l.unfit = true
		g.voice.once("dmem", "the driver cannot limit the memory of containers; the library in them and the watchdog do", "gpu", at.gpu, "err", err)
	case errors.Is(err, gpu.ErrNotFound) && l.gone < limitGone:
		l.gone++ // it is on its way out
	default:
		g.voice.once("limit "+at.container, "the driver does not limit the memory of a container; the library in it and the watchdog do", "container", at.container, "gpu", at.gpu, "err", err)
	}
}

// level is how strongly a container is held to its allocation's cap.
func (s *sight) level(t *tally, bytes uint64) memcap.Level {
	switch {
	case s.limit.holds != 0 && s.limit.holds == bytes:
		return memcap.Driver
	case t != nil && t.missing:
		return memcap.Watchdog
	}
	return memcap.API
}
