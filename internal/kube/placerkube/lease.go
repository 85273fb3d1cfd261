// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"example.com/gpu-agent/internal/kube"
)

// The times of a lease are those of client-go. A holder that cannot renew its lease stops
// leading after renewWithin. Another process may take the lease five seconds later. A lease that
// names a longer duration than longestLease was not written by a placer, and counts as one of
// longestLease.
const (
	leaseFor     = 15 * time.Second
	renewWithin  = 10 * time.Second
	leaseRetries = 2 * time.Second
	longestLease = 10 * time.Minute
)

// leaseTiming holds the times of a lease; tests shorten them.
type leaseTiming struct{ lasts, renew, retry time.Duration }

// Lease elects the leader of several processes by a Lease object of the API server
// (coordination.k8s.io). It follows the rules of client-go's leader election, which needs the
// typed clients and so is not used here. A process respects another holder until the lease's spec
// has not changed for the duration that it names, at most ten minutes. If the spec cannot be read,
// that is 15 seconds: a lease that was spoilt by hand must not keep all placers from leading. The
// process measures this by its own clock, from when it first saw the spec. So the clocks of two
// machines are never compared.
type Lease struct {
	cluster         *Cluster
	namespace, name string
	identity        string
	timing          leaseTiming
	// onLead is called each time that this process becomes the leader; see NewLease.
	onLead func(before time.Time, own bool)

	// The fields below are what the server answered last, and when this process first saw that
	// spec, by its own clock. record is the spec, or a substitute for one that cannot be read: see
	// store. Only Run's goroutine uses them.
	object *unstructured.Unstructured
	record coordinationv1.LeaseSpec
	seen   time.Time

	mu    sync.Mutex
	until time.Time // guarded by mu: this process leads until then; zero or past while it does not
}

// NewLease prepares a lease. [Lease.Run] then tries to get and keep it. No other process may
// have the same identity.
//
// Run calls onLead each time that this process becomes the leader, before Leads returns nil.
// Before is the time at which the lease was last renewed or given up, by its holder's clock. If
// the lease could not be read, it is the time at which this process first saw that. It is zero if
// there was no lease. Own is true if that holder was this process.
func (c *Cluster) NewLease(namespace, name, identity string, onLead func(before time.Time, own bool)) *Lease {
	return &Lease{cluster: c, namespace: namespace, name: name, identity: identity, onLead: onLead,
		timing: leaseTiming{leaseFor, renewWithin, leaseRetries}}
}

// Leads returns nil while this process surely holds the lease: it renewed the lease within the
// last ten seconds, counted from before the request. Otherwise it returns an error.
func (l *Lease) Leads() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cluster.server.Now().Before(l.until) {
		return nil
	}
	return fmt.Errorf("this process does not hold the lease %s/%s", l.namespace, l.name)
}

// Run tries to get the lease, and keeps it until ctx ends; it returns the error of ctx. Then it
// gives the lease up, so that another process need not wait until it expires.
func (l *Lease) Run(ctx context.Context) error {
	for {
		bounded, cancel := context.WithTimeout(ctx, l.timing.renew)
		err := l.try(bounded)
		cancel()
		if errors.Is(err, errTaken) {
			err = nil // another process was faster
		}
		l.cluster.server.Note(ctx, "update", leases.Resource, l.namespace+"/"+l.name, err)
		if !kube.Sleep(ctx, kube.Around(l.timing.retry)) {
			l.giveUp()
			return ctx.Err()
		}
	}
}

// errTaken means that another process has written the lease since this one read it.
var errTaken = errors.New("another process has written the lease")

// try gets or renews the lease, unless another process holds it. It returns errTaken if another
// process was faster, and other errors of the API server.
func (l *Lease) try(ctx context.Context) error {
	led := l.Leads() == nil
	if !led || l.object == nil { // the leader reads it again only after a conflict
		if err := l.read(ctx); err != nil {
			return err
		}
	}
	now := l.cluster.server.Now()
	own := l.holder() == l.identity
	lasts := min(time.Duration(ptr.Deref(l.record.LeaseDurationSeconds, 0))*time.Second, longestLease)
	if !own && l.holder() != "" && now.Before(l.seen.Add(lasts)) {
		l.set(time.Time{})
		return nil
	}
	next, transitions := l.record, ptr.Deref(l.record.LeaseTransitions, 0)
	next.HolderIdentity, next.RenewTime = &l.identity, new(metav1.NewMicroTime(now))
	next.LeaseDurationSeconds = l.seconds()
	if !own {
		next.AcquireTime = next.RenewTime
		if l.object != nil {
			transitions++
		}
	}
	next.LeaseTransitions = &transitions
	before := ptr.Deref(l.record.RenewTime, metav1.MicroTime{}).Time
	if err := l.write(ctx, next); err != nil {
		return err
	}
	if l.Leads() != nil {
		l.cluster.server.Log.Info("leading", "lease", l.namespace+"/"+l.name, "identity", l.identity, "before", before)
		l.onLead(before, own)
	}
	l.set(now.Add(l.timing.renew))
	return nil
}

// holder returns the identity of the lease's holder, as the server answered last; empty if
// there is none.
func (l *Lease) holder() string { return ptr.Deref(l.record.HolderIdentity, "") }

// seconds returns the duration of this process's own leases, rounded up.
func (l *Lease) seconds() *int32 { return new(int32((l.timing.lasts + time.Second - 1) / time.Second)) }

// set records until when this process leads; zero if it does not.
func (l *Lease) set(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if until.IsZero() && !l.until.IsZero() {
		l.cluster.server.Log.Warn("no longer leading", "lease", l.namespace+"/"+l.name, "holder", l.holder())
	}
	l.until = until
}

// read asks the server for the lease. No lease is not an error.
func (l *Lease) read(ctx context.Context) error {
	object, err := l.cluster.server.API.Resource(leases).Namespace(l.namespace).Get(ctx, l.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		l.object, l.record = nil, coordinationv1.LeaseSpec{}
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the lease %s/%s: %w", l.namespace, l.name, err)
	}
	l.store(object)
	return nil
}

// unreadable is the holder of a lease whose spec cannot be read.
const unreadable = "not known, since the lease cannot be read"

// store keeps the lease that the server returned. If its spec cannot be read, it counts as the
// record of another holder, with the duration of this process's own leases.
func (l *Lease) store(object *unstructured.Unstructured) {
	same := l.object != nil && equality.Semantic.DeepEqual(object.Object["spec"], l.object.Object["spec"])
	l.object = object
	if same {
		return
	}
	l.seen, l.record = l.cluster.server.Now(), coordinationv1.LeaseSpec{}
	if err := kube.Decode(object, "spec", &l.record); err != nil {
		l.record = coordinationv1.LeaseSpec{HolderIdentity: new(unreadable), LeaseDurationSeconds: l.seconds(),
			RenewTime: new(metav1.NewMicroTime(l.seen))}
		l.cluster.server.Log.Warn("cannot read the lease; taking it over if it does not change",
			"lease", l.namespace+"/"+l.name, "wait", l.timing.lasts, "err", err)
	}
}

// write creates or updates the lease with the spec next. It returns errTaken if another process
// has written or deleted the lease since it was read.
func (l *Lease) write(ctx context.Context, next coordinationv1.LeaseSpec) error {
	spec, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&next)
	if err != nil {
		return err
	}
	in := l.cluster.server.API.Resource(leases).Namespace(l.namespace)
	var object *unstructured.Unstructured
	if l.object == nil {
		object = &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
		object.SetGroupVersionKind(leases.GroupVersion().WithKind("Lease"))
		object.SetName(l.name)
		object.SetNamespace(l.namespace)
		object, err = in.Create(ctx, object, metav1.CreateOptions{FieldManager: placerManager})
	} else {
		object = l.object.DeepCopy()
		object.Object["spec"] = spec
		object, err = in.Update(ctx, object, metav1.UpdateOptions{FieldManager: placerManager})
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) {
		// Before the next try, this process reads it again.
		l.object = nil
		return errTaken
	}
	if err != nil {
		return fmt.Errorf("write the lease %s/%s: %w", l.namespace, l.name, err)
	}
	l.store(object)
	return nil
}

// giveUp clears the holder of the lease, if this process leads.
func (l *Lease) giveUp() {
	if l.Leads() != nil || l.object == nil {
		return
	}
	l.set(time.Time{})
	ctx, cancel := context.WithTimeout(context.Background(), leaseRetries)
	defer cancel()
	next := l.record
	next.HolderIdentity, next.LeaseDurationSeconds = new(""), new(int32(1))
	next.RenewTime = new(metav1.NewMicroTime(l.cluster.server.Now()))
	if err := l.write(ctx, next); err != nil {
		l.cluster.server.Log.Warn("cannot give up the lease; the next leader waits until it expires", "err", err)
	}
}
