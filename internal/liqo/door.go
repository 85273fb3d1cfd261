// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// API is the API server.
type API interface {
	// Objects reads all objects of a resource as they are now, not as they were when some
	// cache saw them.
	Objects(ctx context.Context, slices bool, see func(*unstructured.Unstructured)) error
	// Write writes an object's status, if the object still has the same version. changed is true if it has another
	// one, or no longer exists.
	Write(ctx context.Context, o *unstructured.Unstructured) (now *unstructured.Unstructured, changed bool, err error)
}

// Options are what a Door needs beside the books.
type Options struct {
	API API
	// Domain is that of labels, ResourceDomain that of the agent's resources.
	Domain, ResourceDomain string
	// Leads returns an error while another process decides, or while nothing new may be granted. Listed is
	// called once the books keep all that was granted.
	Leads  func() error
	Listed func()
	Logger *slog.Logger
	Now    func() time.Time
}

// Door is told of ResourceSlices and Tenants, and writes what slices are granted. Its methods
// may be called from several goroutines.
type Door struct {
	o      Options
	grants *Grants
	news   chan struct{}
	// asked is the version of each slice at which disputed last read the tenants, by UID. Run alone uses it.
	asked map[string]string

	mu      sync.Mutex // guards what follows
	slices  map[string]*Slice
	tenants map[string]*Tenant
	// listed has whether slices and tenants have been told once.
	listed map[bool]bool
	counts map[string]int
	// gone are UIDs of objects that were deleted, which never come back.
	gone map[string]bool
}

// New returns a door to some books.
func New(books Books, o Options) *Door {
	return &Door{o: o, grants: NewGrants(o.Domain, o.ResourceDomain, books), news: make(chan struct{}, 1),
		slices: map[string]*Slice{}, tenants: map[string]*Tenant{}, listed: map[bool]bool{},
		counts: map[string]int{}, asked: map[string]string{}, gone: map[string]bool{}}
}

// Set notes an object: a ResourceSlice where slice is true, a Tenant where not. One that
// cannot be read is as if it were not there, but for what it was granted.
func (d *Door) Set(slice bool, o *unstructured.Unstructured) {
	d.mu.Lock()
	defer d.mu.Unlock()
	uid := string(o.GetUID())
	if d.gone[uid] {
		return // an answer of Write may come after the object's end
	}
	if !slice {
		t, err := ReadTenant(o)
		if d.tenants[uid] = t; err != nil {
			delete(d.tenants, uid)
			d.o.Logger.Error("ignoring a malformed Tenant",
				"namespace", o.GetNamespace(), "tenant", o.GetName(), "err", err)
		}
		d.wake()
		return
	}
	if was := d.slices[uid]; was != nil && older(o.GetResourceVersion(), was.version) {
		return // what Write has answered is newer
	}
	s, err := ReadSlice(o)
	if err != nil {
		d.o.Logger.Error("ignoring a malformed ResourceSlice", "namespace", s.Namespace, "slice", s.Name, "err", err)
		return
	}
	d.slices[uid] = s
	d.wake()
}

// mostGone bounds what is remembered of objects that are gone.
const mostGone = 10_000

// older compares two versions of an object, which are numbers that grow.
func older(x, y string) bool {
	a, errA := strconv.ParseUint(x, 10, 64)
	b, errB := strconv.ParseUint(y, 10, 64)
	return errA == nil && errB == nil && a < b
}

// Delete notes that the object with this UID has been deleted.
func (d *Door) Delete(slice bool, uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slice {
		delete(d.slices, uid)
	} else {
		delete(d.tenants, uid)
	}
	if len(d.gone) > mostGone {
		clear(d.gone) // no answer takes that long
	}
	d.gone[uid] = true
	d.wake()
}

// Listed notes that all ResourceSlices, or all Tenants, have been told.
func (d *Door) Listed(slice bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.listed[slice] = true
	d.wake()
}

func (d *Door) wake() {
	select {
	case d.news <- struct{}{}:
	default:
	}
}

// States are what State counts.
var States = []string{"accepted", "denied", "waiting", "bypassing"}

// State returns how many ResourceSlices ask for the agents' resources, by their answer: "accepted",
// "denied", "waiting", or "bypassing" for those of Liqo's own class.
func (d *Door) State() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.counts)
}

// view returns all slices and tenants, in no order. ok is false until both have been listed.
func (d *Door) view() (s []*Slice, t []*Tenant, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.listed[true] && d.listed[false]
	return slices.Collect(maps.Values(d.slices)), slices.Collect(maps.Values(d.tenants)), all
}

// Run decides at news and every second. It runs until ctx ends, and returns the error of ctx.
func (d *Door) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	led, restored, told := false, false, map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.news:
		case <-tick.C:
		}
		all, _, ok := d.view()
		if !ok {
			continue
		}
		if !restored {
			d.grants.Follow(all)
			d.o.Listed()
			restored = true
		}
		if d.o.Leads() != nil {
			led = false
			d.grants.Follow(all)
			continue
		}
		if !led {
			// The former leader may have written what the watches have not shown yet.
			if err := errors.Join(d.refresh(ctx, false), d.refresh(ctx, true)); err != nil {
				d.o.Logger.Error("cannot read what clusters were granted", "err", err)
				continue
			}
			led = true
		}
		d.decide(ctx, told)
	}
}

// refresh reads all objects of a resource anew.
func (d *Door) refresh(ctx context.Context, slice bool) error {
	known, there := map[string]bool{}, map[string]bool{}
	d.mu.Lock()
	for uid := range d.slices {
		known[uid] = true
	}
	for uid := range d.tenants {
		known[uid] = true
	}
	d.mu.Unlock()
	if err := d.o.API.Objects(ctx, slice, func(o *unstructured.Unstructured) {
		there[string(o.GetUID())] = true
		d.Set(slice, o)
	}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if slice {
		maps.DeleteFunc(d.slices, func(uid string, _ *Slice) bool { return known[uid] && !there[uid] })
	} else {
		maps.DeleteFunc(d.tenants, func(uid string, _ *Tenant) bool { return known[uid] && !there[uid] })
	}
	return nil
}

// disputed reports whether Liqo denies a slice, as it does for a drained tenant. Liqo may have learned of the drain
// first. So disputed then reads the tenants anew, once for each version of the slice, and the caller decides again. The
// error is that of reading.
func (d *Door) disputed(ctx context.Context, s *Slice) (yes bool, err error) {
	why := s.Resources.Reason
	if s.Resources.Status != denied || why == NoRoom || why == NotOffered || d.asked[s.UID] == s.version {
		return false, nil
	}
	if err := d.refresh(ctx, false); err != nil {
		return true, err
	}
	d.asked[s.UID] = s.version
	d.wake()
	return true, nil
}

// decide decides once, and writes. Told are the slices that have been warned about.
func (d *Door) decide(ctx context.Context, told map[string]bool) {
	all, tenants, _ := d.view()
	decisions := d.grants.Decide(all, tenants, d.o.Now())
	d.count(all, decisions)
	bypass := map[string]bool{}
	for _, c := range decisions {
		s := c.Slice
		if c.Bypass {
			if bypass[s.UID] = true; !told[s.UID] {
				d.o.Logger.Warn("a cluster asks Liqo's class for GPUs, which grants anything",
					"consumer", s.Consumer, "namespace", s.Namespace, "slice", s.Name, "class", s.Class)
			}
			continue
		}
		if d.o.Leads() != nil {
			return
		}
		if yes, err := d.disputed(ctx, s); err != nil {
			d.o.Logger.Error("cannot read whether a tenant is drained", "consumer", s.Consumer, "err", err)
		} else if !yes {
			d.write(ctx, s, c.Status)
		}
	}
	maps.DeleteFunc(d.asked, func(uid, _ string) bool {
		return !slices.ContainsFunc(all, func(s *Slice) bool { return s.UID == uid })
	})
	clear(told)
	maps.Copy(told, bypass)
}

func (d *Door) write(ctx context.Context, s *Slice, w *Status) {
	now, changed, err := d.o.API.Write(ctx, s.with(w, d.o.Now()))
	if changed {
		return // it will be told, and decided on again
	}
	if err != nil {
		d.o.Logger.Error("cannot write what a cluster is granted",
			"namespace", s.Namespace, "slice", s.Name, "err", err)
		return
	}
	if s.Resources.Status != w.Resources.Status || s.Resources.Message != w.Resources.Message {
		d.o.Logger.Info("a cluster was answered", "consumer", s.Consumer, "namespace", s.Namespace, "slice", s.Name,
			"resources", w.Resources.Status, "reason", w.Resources.Reason, "message", w.Resources.Message)
	}
	d.Set(true, now)
}

// count counts slices for State.
func (d *Door) count(all []*Slice, decisions []Decision) {
	counts := map[string]int{"accepted": 0, "denied": 0, "waiting": 0, "bypassing": 0}
	for _, s := range d.grants.sorted(all) {
		switch s.Resources.Status {
		case accepted:
			counts["accepted"]++
		case denied:
			counts["denied"]++
		default:
			counts["waiting"]++
		}
	}
	for _, c := range decisions {
		if c.Bypass {
			counts["bypassing"]++
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts = counts
}
