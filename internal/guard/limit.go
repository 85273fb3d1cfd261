// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"maps"
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

// limits are those of all containers on each GPU.
type limits struct {
	limiter Limiter // nil where the driver is not to be asked for limits
	voice   *voice
	of      map[place]*limit
	// unable maps each GPU whose driver cannot limit anybody to the time at which it said so.
	unable map[gpu.UUID]time.Time
}

// hold has the driver hold a container to its cap from the first look that finds
// it on the GPU. A container that may have all of it needs none.
func (ls *limits) hold(ctx context.Context, at place, o node.Owner, bytes uint64, now time.Time) {
	l := ls.of[at]
	if l == nil {
		l = &limit{}
		ls.of[at] = l
	}
	if ls.limiter == nil || bytes == lib.None && l.at.IsZero() {
		return
	}
	if since, ok := ls.unable[at.gpu]; ok && now.Sub(since) < limitUnable {
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
	switch err := ls.limiter.Limit(ctx, at.gpu, o, bytes); {
	case err == nil:
		l.gone = 0
		if bytes != lib.None {
			l.holds = bytes
		}
	case errors.Is(err, gpu.ErrNotSupported), errors.Is(err, gpu.ErrNoPermission):
		ls.unable[at.gpu] = now
		for p, other := range ls.of {
			if p.gpu == at.gpu {
				*other = limit{}
			}
		}
		ls.voice.log.Debug("the driver cannot limit the memory of containers; the library in them and the watchdog do",
			"gpu", at.gpu, "err", err)
	case errors.Is(err, node.ErrNoDmem):
		// One line for the node: what one container lacks, all do.
		l.unfit = true
		ls.voice.once("dmem", "the driver cannot limit the memory of containers; "+
			"the library in them and the watchdog do", "gpu", at.gpu, "err", err)
	case errors.Is(err, gpu.ErrNotFound) && l.gone < limitGone:
		l.gone++ // it is on its way out
	default:
		ls.voice.once("limit "+at.container, "the driver does not limit the memory of a container; "+
			"the library in it and the watchdog do", "container", at.container, "gpu", at.gpu, "err", err)
	}
}

// holds is how many bytes the driver has confirmed that it holds a container to; 0 is none.
func (ls *limits) holds(at place) uint64 {
	if l := ls.of[at]; l != nil {
		return l.holds
	}
	return 0
}

// forget drops the limits of containers that are gone.
func (ls *limits) forget(gone func(place) bool) {
	maps.DeleteFunc(ls.of, func(p place, _ *limit) bool { return gone(p) })
}

// level is how strongly a container is held to its allocation's cap, where the driver holds it
// to so many bytes.
func level(holds uint64, t *tally, bytes uint64) memcap.Level {
	switch {
	case holds != 0 && holds == bytes:
		return memcap.Driver
	case t != nil && t.missing:
		return memcap.Watchdog
	}
	return memcap.API
}
