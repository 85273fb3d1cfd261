// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// API is the API server.
type API interface {
	// Read reads all objects of a resource as they are now, not as they were when some cache
	// saw them.
	Read(ctx context.Context, of schema.GroupVersionResource, see func(*unstructured.Unstructured)) error
	// WriteStatus writes an object's status, if the server still has the object in its version.
	// Otherwise it writes nothing, and changed is true.
	WriteStatus(ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured) (
		now *unstructured.Unstructured, changed bool, err error)
	// Annotate sets an object's annotations, and removes those that are nil, under the same condition.
	Annotate(
		ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured,
		annotations map[string]*string,
	) (now *unstructured.Unstructured, changed bool, err error)
}

// Options are what a Door needs beside the books.
type Options struct {
	API API
	// Domain is that of controllers and annotations.
	Domain string
	// Leads is an error while another process decides, or nothing new is to be given. Listed is
	// called once all that was held is in the books.
	Leads  func() error
	Listed func()
	Logger *slog.Logger
	Now    func() time.Time
}

// Door is told of Kueue's objects, and answers checks. Its methods may be called from several
// goroutines.
type Door struct {
	o      Options
	checks *Checks
	news   chan struct{}

	mu        sync.Mutex // guards what follows
	workloads map[string]*Workload
	flavors   map[string]*Flavor // by UID
	known     map[string]*Check  // by UID
	versions  map[string]string  // of workloads and checks
	gone      map[string]bool    // UIDs, which never come back
	listed    map[schema.GroupVersionResource]bool
	counts    map[string]int
}

// New returns a door to some books.
func New(books Books, o Options) *Door {
	return &Door{o: o, checks: NewChecks(o.Domain, books), news: make(chan struct{}, 1),
		workloads: map[string]*Workload{}, flavors: map[string]*Flavor{}, known: map[string]*Check{},
		versions: map[string]string{}, gone: map[string]bool{},
		listed: map[schema.GroupVersionResource]bool{}, counts: map[string]int{}}
}

// Set notes an object. One that cannot be read is as if it were not there.
func (d *Door) Set(of schema.GroupVersionResource, o *unstructured.Unstructured) {
	d.mu.Lock()
	defer d.mu.Unlock()
	uid := string(o.GetUID())
	if d.gone[uid] || older(o.GetResourceVersion(), d.versions[uid]) {
		return // an answer of WriteStatus may come after the object's end, or be newer
	}
	d.versions[uid] = o.GetResourceVersion()
	var err error
	switch of {
	case Workloads:
		if d.workloads[uid], err = ReadWorkload(o); err != nil {
			delete(d.workloads, uid)
		}
	case ResourceFlavors:
		var f *Flavor
		if f, err = ReadFlavor(o, d.o.Domain); f != nil {
			d.flavors[uid] = f
		} else {
			delete(d.flavors, uid)
		}
	case AdmissionChecks:
		if d.known[uid], err = ReadCheck(o); err != nil {
			delete(d.known, uid)
		}
	}
	if err != nil {
		d.o.Logger.Error("ignoring the malformed part of an object",
			"kind", o.GetKind(), "namespace", o.GetNamespace(), "name", o.GetName(), "err", err)
	}
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

// Delete notes that the object with this UID is gone.
func (d *Door) Delete(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.workloads, uid)
	delete(d.flavors, uid)
	delete(d.known, uid)
	delete(d.versions, uid)
	if len(d.gone) > mostGone {
		clear(d.gone) // no answer takes that long
	}
	d.gone[uid] = true
	d.wake()
}

// Listed notes that all objects of a resource have been told.
func (d *Door) Listed(of schema.GroupVersionResource) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.listed[of] = true
	d.wake()
}

func (d *Door) wake() {
	select {
	case d.news <- struct{}{}:
	default:
	}
}

// States are what State counts.
var States = []string{Pending, Ready, Retry}

// State is how many checks of workloads with quota there are, by their state.
func (d *Door) State() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.counts)
}

// view is what is known now; ok is false while something is missing.
func (d *Door) view() (v *View, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v = &View{
		Workloads: slices.Collect(maps.Values(d.workloads)), Flavors: map[string]*Flavor{}, Checks: map[string]*Check{},
	}
	for _, f := range d.flavors {
		v.Flavors[f.Name] = f
	}
	for _, c := range d.known {
		v.Checks[c.Name] = c
	}
	d.counts = d.checks.count(v)
	return v, d.listed[Workloads] && d.listed[ResourceFlavors] && d.listed[AdmissionChecks]
}

// Run decides, at news and every second, until ctx ends, whose error it returns.
func (d *Door) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	led, restored := false, false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.news:
		case <-tick.C:
		}
		v, ok := d.view()
		if !ok {
			continue
		}
		if !restored {
			d.checks.Follow(v, d.o.Now())
			d.o.Listed()
			restored = true
		}
		if d.o.Leads() != nil {
			led = false
			d.checks.Follow(v, d.o.Now())
			continue
		}
		if !led {
			// Who led before may have answered what no watch has told yet.
			see := func(o *unstructured.Unstructured) { d.Set(Workloads, o) }
			if err := d.o.API.Read(ctx, Workloads, see); err != nil {
				d.o.Logger.Error("cannot read which workloads have room held for them", "err", err)
				continue
			}
			v, _ = d.view()
			led = true
		}
		d.decide(ctx, v)
	}
}

// decide decides once, and writes.
func (d *Door) decide(ctx context.Context, v *View) {
	for _, c := range d.checks.Inactive(v) {
		o, err := c.active(d.o.Now())
		if err == nil {
			_, err = d.write(ctx, AdmissionChecks, o)
		}
		if err != nil {
			d.o.Logger.Error("cannot tell Kueue that the placer answers a check", "check", c.Name, "err", err)
		}
	}
	for _, a := range d.checks.Decide(v, d.o.Now()) {
		if d.o.Leads() != nil {
			return
		}
		changed, err := d.tell(ctx, v, a)
		switch log := d.o.Logger.With("namespace", a.Workload.Namespace, "workload", a.Workload.Name); {
		case changed: // it will be told, and decided on again
		case err != nil:
			log.Error("cannot write the answer to a workload", "check", a.State.Name, "err", err)
		case a.State.Name != "":
			log.Info("a workload was answered",
				"check", a.State.Name, "state", a.State.State, "message", a.State.Message)
		default:
			log.Info("a workload may be tried again", "message", a.Wakes)
		}
	}
}

// tell writes what a workload is told. Changed is true if the workload has changed since it was read.
func (d *Door) tell(ctx context.Context, v *View, a Answer) (changed bool, err error) {
	w := a.Workload
	if a.Changes {
		now, changed, err := d.o.API.Annotate(ctx, Workloads, w.object, d.checks.annotations(v, w, a.Refuses))
		if err != nil || changed {
			return changed, err
		}
		d.Set(Workloads, now)
		if w, err = ReadWorkload(now); err != nil {
			return false, err
		}
	}
	var o *unstructured.Unstructured
	if a.State.Name != "" {
		o, err = w.with(a.State)
	} else {
		o, err = w.woken(a.Wakes, d.o.Now())
	}
	if err != nil {
		return false, err
	}
	return d.write(ctx, Workloads, o)
}

// write writes a status, and notes the object as it is then.
func (d *Door) write(
	ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured,
) (changed bool, err error) {
	now, changed, err := d.o.API.WriteStatus(ctx, of, o)
	if err == nil && !changed {
		d.Set(of, now)
	}
	return changed, err
}
