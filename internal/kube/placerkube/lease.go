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

// Times of a lease, those of client-go. A holder that cannot renew takes itself for none
// five seconds before another one may take the lease.
const (
	leaseFor     = 15 * time.Second
	renewWithin  = 10 * time.Second
	leaseRetries = 2 * time.Second
)

// leaseTiming is apart so that tests need not wait.
type leaseTiming struct{ lasts, renew, retry time.Duration }

// Lease is a Lease of the API server's (coordination.k8s.io) by which one of several
// processes leads. The rules are those of client-go's leader election, which takes the typed
// clients: a record that somebody else holds is respected until it has not changed for as
// long as it says, by the clock of the one who looks. Clocks of different machines are never
// compared.
type Lease struct {
	cluster         *Cluster
	namespace, name string
	identity        string
	timing          leaseTiming
	// took is told, before Leads says so, of the last word of who held the lease before, and
	// whether that was this process.
	took func(before time.Time, own bool)

	// What the server said last, and when by our clock it was first seen so. Run's alone.
	object *unstructured.Unstructured
	record coordinationv1.LeaseSpec
	seen   time.Time

	mu    sync.Mutex
	until time.Time // guarded by mu: when this process must have renewed
}

// NewLease prepares a lease, which [Lease.Run] then tries to get and keep. The identity is
// this process's alone. Took is called each time that it has been got, before Leads says so,
// with the last word of who held it before, by that one's clock; zero where there was none.
// Own says that it was this process, and nobody else since.
func (c *Cluster) NewLease(namespace, name, identity string, took func(before time.Time, own bool)) *Lease {
	return &Lease{cluster: c, namespace: namespace, name: name, identity: identity, took: took,
		timing: leaseTiming{leaseFor, renewWithin, leaseRetries}}
}

// Leads is nil while this process holds the lease, and sure of it: it has renewed it within
// the last ten seconds, counted from before the request.
func (l *Lease) Leads() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cluster.server.Now().Before(l.until) {
		return nil
	}
	return fmt.Errorf("this process does not hold the lease %s/%s", l.namespace, l.name)
}

// Run tries to get the lease and keeps it until ctx ends, whose error it returns. Then it
// gives the lease up, so that another one need not wait for its end.
func (l *Lease) Run(ctx context.Context) error {
	for {
		bounded, cancel := context.WithTimeout(ctx, l.timing.renew)
		err := l.try(bounded)
		cancel()
		if errors.Is(err, errTaken) {
			err = nil // somebody else was faster
		}
		l.cluster.server.Note(ctx, "update", leases.Resource, l.namespace+"/"+l.name, err)
		if !kube.Sleep(ctx, kube.Around(l.timing.retry)) {
			l.giveUp()
			return ctx.Err()
		}
	}
}

// errTaken says that somebody else has written the lease in between.
var errTaken = errors.New("somebody else has written the lease")

// try gets or renews the lease, where that can be.
func (l *Lease) try(ctx context.Context) error {
	led := l.Leads() == nil
	if !led || l.object == nil { // who leads needs to look only after a conflict
		if err := l.look(ctx); err != nil {
			return err
		}
	}
	now := l.cluster.server.Now()
	own := l.holder() == l.identity
	lasts := time.Duration(ptr.Deref(l.record.LeaseDurationSeconds, 0)) * time.Second
	if !own && l.holder() != "" && now.Before(l.seen.Add(lasts)) {
		l.set(time.Time{})
		return nil
	}
	next, transitions := l.record, ptr.Deref(l.record.LeaseTransitions, 0)
	next.HolderIdentity, next.RenewTime = &l.identity, new(metav1.NewMicroTime(now))
	next.LeaseDurationSeconds = new(int32((l.timing.lasts + time.Second - 1) / time.Second))
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
		l.took(before, own)
	}
	l.set(now.Add(l.timing.renew))
	return nil
}

// holder is who has the lease by the server's last word, empty for nobody.
func (l *Lease) holder() string { return ptr.Deref(l.record.HolderIdentity, "") }

// set notes until when this process leads.
func (l *Lease) set(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if until.IsZero() && !l.until.IsZero() {
		l.cluster.server.Log.Warn("not leading any more", "lease", l.namespace+"/"+l.name, "holder", l.holder())
	}
	l.until = until
}

// look asks what the lease says.
func (l *Lease) look(ctx context.Context) error {
	object, err := l.cluster.server.API.Resource(leases).Namespace(l.namespace).Get(ctx, l.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		l.object, l.record = nil, coordinationv1.LeaseSpec{}
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the lease %s/%s: %w", l.namespace, l.name, err)
	}
	return l.saw(object)
}

// saw notes what the lease says. One that cannot be read is nobody's.
func (l *Lease) saw(object *unstructured.Unstructured) error {
	var record coordinationv1.LeaseSpec
	if err := kube.Decode(object, "spec", &record); err != nil {
		return fmt.Errorf("read the lease %s/%s: %w", l.namespace, l.name, err)
	}
	if l.object == nil || !equality.Semantic.DeepEqual(record, l.record) {
		l.seen = l.cluster.server.Now()
	}
	l.object, l.record = object, record
	return nil
}

// write makes the lease say something, unless somebody has written it since it was seen.
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
		// It is looked at before the next try. Until then nothing is known of it.
		l.object = nil
		return errTaken
	}
	if err != nil {
		return fmt.Errorf("write the lease %s/%s: %w", l.namespace, l.name, err)
	}
	return l.saw(object)
}

// giveUp says that nobody holds the lease any more, if this process does.
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
		l.cluster.server.Log.Warn("the lease was not given up; another process waits for its end", "err", err)
	}
}
