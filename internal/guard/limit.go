// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// limitUnable is how long the guard asks for no limits on a GPU whose driver cannot limit
	// containers. limitRetry is how long it waits after an attempt for one container failed.
	limitUnable = time.Hour
	limitRetry  = 10 * time.Second
	// limitEvery is how often a confirmed limit is set again: a driver that was loaded anew has
	// forgotten it.
	limitEvery = time.Minute
	// learnEvery is the time between two readings of what hooks have set.
	learnEvery = time.Second
	// limitGone is for how many attempts in a row a container may be gone while it is still seen on
	// the GPU. It takes a while to end. After that the guard logs the error.
	limitGone = 3
)

// Limiter asks the driver to limit the memory of containers.
type Limiter interface {
	// Limit keeps all processes of a container together within so many bytes of a GPU; lib.None
	// removes the limit. If it returns nil, the driver has confirmed the limit. The error is
	// gpu.ErrNotSupported if the GPU's driver or the kernel cannot do it, node.ErrNoDmem if the
	// node's cgroups lack the controller, and gpu.ErrNotFound if the container is gone.
	Limit(ctx context.Context, u gpu.UUID, o node.Owner, bytes uint64) error
}

// Outcomes tells what hooks have set before the first instruction of containers. HookOutcomes does the
// work.
type Outcomes interface {
	// Outcomes returns those of all containers that live. It returns what it can also beside an
	// error.
	Outcomes() ([]lib.Outcome, error)
}

// note is the limit that hooks have set for a container on a GPU, and read back.
type note struct {
	bytes  uint64 // for all of its allocations together
	keys   []string
	cgroup string
}

// limit is the limit of one container on one GPU.
type limit struct {
	asked uint64    // bytes; lib.None removes the limit
	at    time.Time // of the last request; zero: never asked
	holds uint64    // bytes that the driver has confirmed; zero: none
	gone  int       // for how many requests in a row the container was gone
	unfit bool      // the node's cgroups lack the controller
}

// limits has the limits of all containers on each GPU.
type limits struct {
	limiter  Limiter  // nil if the driver is not to be asked for limits
	outcomes Outcomes // nil if there are no hooks
	log      *guardLog
	of       map[place]*limit
	// unable maps each GPU whose driver rejected memory limits to the time of that rejection.
	unable map[gpu.UUID]time.Time
	// noted has the limits that hooks have set. learnt is the time of the last reading.
	noted  map[place]*note
	learnt time.Time
}

// learn reads what hooks have set for containers that have started since. It reports whether that is
// anything new.
func (ls *limits) learn(now time.Time) (news bool) {
	if ls.outcomes == nil || now.Sub(ls.learnt) < learnEvery {
		return false
	}
	ls.learnt = now
	all, err := ls.outcomes.Outcomes()
	if err != nil {
		ls.log.once("outcomes", "cannot read all of what hooks have set; "+
			"the watchdog sets these limits when it sees the container", "err", err)
	}
	noted := map[place]*note{}
	for i := range all {
		o := &all[i]
		if o.Failed != "" {
			ls.log.once("hook "+o.Container+o.Key, "the driver does not limit the memory of a container from its start on",
				"container", o.Container, "allocation", o.Key, "err", o.Failed)
		}
		for _, l := range o.Limits {
			at := place{o.Container, l.GPU}
			if noted[at] == nil {
				noted[at] = &note{cgroup: o.Cgroup}
			}
			n := noted[at]
			n.bytes, n.keys = max(n.bytes, l.Sum), append(n.keys, o.Key) // each hook adds to those before it
		}
	}
	for at, n := range noted {
		if old := ls.noted[at]; old != nil && old.bytes == n.bytes && len(old.keys) == len(n.keys) {
			continue
		}
		ls.of[at], news = &limit{asked: n.bytes, at: now, holds: n.bytes}, true
	}
	for at := range ls.noted {
		if noted[at] == nil {
			delete(ls.of, at)
			news = true
		}
	}
	ls.noted = noted
	return news
}

// renew sets the limits of hooks again when that is due, also of containers that no look has found on
// the GPU. It reports whether the driver confirms more or less than before.
func (ls *limits) renew(ctx context.Context, now time.Time) (news bool) {
	for at, n := range ls.noted {
		if l := ls.of[at]; l != nil && l.asked == n.bytes && now.Sub(l.at) >= limitRetry {
			before := l.holds
			ls.hold(ctx, at, node.Owner{ID: at.container, Cgroup: n.cgroup, V2: true}, n.bytes, now)
			news = news || ls.holds(at) != before
		}
	}
	return news
}

// started returns the containers of an allocation for which hooks have set a limit on a GPU.
func (ls *limits) started(key string, u gpu.UUID) (containers []string) {
	for at, n := range ls.noted {
		if at.gpu == u && slices.Contains(n.keys, key) {
			containers = append(containers, at.container)
		}
	}
	return containers
}

// hold asks the driver to limit a container to its cap, from the first look that finds it on the
// GPU. An uncapped container needs no limit.
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
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
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
		ls.log.Debug("the driver cannot limit the memory of containers; the library in them and the watchdog do",
			"gpu", at.gpu, "err", err)
	case errors.Is(err, node.ErrNoDmem):
		// Log this once for the node: its containers all lack the controller.
		l.unfit = true
		ls.log.once("dmem", "the driver cannot limit the memory of containers; "+
			"the library in them and the watchdog do", "gpu", at.gpu, "err", err)
	case errors.Is(err, gpu.ErrNotFound) && l.gone < limitGone:
		l.gone++ // it is about to end
	default:
		ls.log.once("limit "+at.container, "the driver does not limit the memory of a container; "+
			"the library in it and the watchdog do", "container", at.container, "gpu", at.gpu, "err", err)
	}
}

// holds returns the limit of a container that the driver has confirmed, in bytes; 0 means none.
func (ls *limits) holds(at place) uint64 {
	if l := ls.of[at]; l != nil {
		return l.holds
	}
	return 0
}

// forget drops the limits of containers that are gone.
func (ls *limits) forget(gone func(place) bool) {
	maps.DeleteFunc(ls.of, func(p place, _ *limit) bool { return ls.noted[p] == nil && gone(p) })
}

// level returns how strongly an allocation's cap is enforced for a container. holds is the limit
// that the driver has confirmed, or 0; bytes is the cap.
func level(holds uint64, t *tally, bytes uint64) memcap.Level {
	switch {
	case holds != 0 && holds == bytes:
		return memcap.Driver
	case t != nil && t.missing:
		return memcap.Watchdog
	}
	return memcap.API
}
