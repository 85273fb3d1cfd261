// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/placer"
)

// Kind is a kind of object that a Fleet must be told of before it answers.
type Kind = string

// Kinds, by their names in the API.
const (
	Nodes    Kind = "nodes"
	Pods     Kind = "pods"
	GPUNodes Kind = gpunode.Plural
)

// Fleet is a cluster's nodes and pods as the books have them. Its methods may be called from
// several goroutines.
type Fleet struct {
	now func() time.Time
	reader

	mu    sync.Mutex // guards what follows
	books *placer.Books
	// asks are the pods that have no node, by UID.
	asks map[string]*asking
	// shown is closed and replaced when the caller reports a new pod.
	shown chan struct{}
	nodes
	beside  others
	members members
	readiness
	leading
	waiting
	sites *Sites // nil if the GPUs in use are not counted
}

// New returns a fleet that knows nothing yet. The resource domain is the prefix of the
// agent's resources, for example "example.com".
func New(resourceDomain string, now func() time.Time) *Fleet {
	return &Fleet{
		reader: reader{prefix: resourceDomain + "/"}, now: now, books: placer.New(),
		asks: map[string]*asking{}, shown: make(chan struct{}), nodes: newNodes(), beside: newOthers(),
		members:   newMembers(),
		readiness: readiness{missing: []Kind{GPUNodes, Nodes, Pods}, complete: make(chan struct{})},
		leading:   newLeading(), waiting: newWaiting(),
	}
}

// KeepApart has pods of different namespaces kept apart on MPS GPUs, where that costs no place
// ([placer.Books.KeepApart]). Call it before the fleet is told of anything.
func (f *Fleet) KeepApart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.books.KeepApart()
}

// readiness decides whether questions are answered. A Fleet's lock guards it.
type readiness struct {
	// missing are the kinds that are not listed yet.
	missing []Kind
	// complete is closed when missing becomes empty.
	complete chan struct{}
	// leads returns an error while another process answers. It is nil if this process is the only one.
	leads func() error
}

// listed returns nil if a question may be answered. It returns an error while a kind is missing or another process
// leads, and after ctx has ended: nothing may be reserved for an asker that has gone.
func (r *readiness) listed(ctx context.Context) error {
	if len(r.missing) > 0 {
		return fmt.Errorf("the API server has not listed %v yet", r.missing)
	}
	if r.leads != nil {
		if err := r.leads(); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// Ready returns nil if questions are answered, and otherwise the reason why they are not.
func (f *Fleet) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.listed(context.Background())
}

// Listed notes that the caller has told of all objects of a kind.
func (f *Fleet) Listed(k Kind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := len(f.missing)
	f.missing = slices.DeleteFunc(f.missing, func(m Kind) bool { return m == k })
	if before == 0 || len(f.missing) > 0 {
		return
	}
	if close(f.complete); f.leads == nil {
		f.lead(time.Time{}, false)
	}
}

// WaitListed waits until each kind has been listed. If ctx ends first, it returns the error of ctx.
func (f *Fleet) WaitListed(ctx context.Context) error {
	select {
	case <-f.complete:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// SetNode notes a Node. The scheduler decides whether the node's taints and labels allow a pod. The books need
// to know only whether its kubelet can start pods and has the agent's devices.
func (f *Fleet) SetNode(n *corev1.Node) {
	a := aboutNode(n, f.prefix)
	f.mu.Lock()
	defer f.mu.Unlock()
	if was, known := f.about[n.Name]; known && a.equal(was) {
		return // the kubelet writes its Node every few minutes, mostly without a change that matters here
	}
	f.about[n.Name], f.list = a, nil
	f.changes++
	f.told(n.Name)
}

// DeleteNode notes that a Node has been deleted.
func (f *Fleet) DeleteNode(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.about, name)
	f.list = nil
	f.changes++
	f.told(name)
	if f.says[name] == nil {
		f.unnumber(name)
	}
}

// SetGPUNode notes the status of a GPUNode, which the caller may not change afterwards. says is nil if the object
// was deleted or cannot be read. If the status is not valid ([gpunode.Status.Check]), SetGPUNode returns the error,
// and no pod is placed on the node until it has another status.
func (f *Fleet) SetGPUNode(name string, says *gpunode.Status) error {
	var wrong error
	if says != nil {
		if wrong = says.Check(); wrong != nil {
			says = nil
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.passed, name)
	if wrong != nil {
		f.passed[name] = wrong
	}
	if says == nil {
		delete(f.says, name)
	} else {
		f.says[name] = says
	}
	f.told(name)
	return wrong
}

// PassedOver returns how many nodes have a GPUNode that is not valid.
func (f *Fleet) PassedOver() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.passed)
}

// told follows news of a node: it counts the GPUs in use, has waiting pods looked at, and updates the books.
func (f *Fleet) told(name string) {
	f.sites.count(name)
	f.touch(name)
	f.enter(f.books, name)
	f.enterPlain(f.books, name, f.beside.use[name])
}

// SetPod notes a pod. Of a pod that asks for none of the agent's resources, and has none, it notes what it takes of
// its node's other resources.
func (f *Fleet) SetPod(p *corev1.Pod) {
	entry := f.read(p)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members.set(p, entry.Hold, entry.Done || entry.Ending)
	if len(entry.Containers) == 0 && len(entry.Devices) == 0 {
		if node := f.beside.set(p, entry.Plain); node != "" {
			f.enterPlain(f.books, node, f.beside.use[node])
		}
		return
	}
	was, at := f.books.Pod(entry.UID)
	f.books.SetPod(entry)
	if was.UID == "" {
		close(f.shown)
		f.shown = make(chan struct{})
	}
	if _, is := f.books.Pod(entry.UID); at != is || entry.Done || len(was.Devices) != len(entry.Devices) {
		f.touch(at)
		f.touch(is)
	}
	f.bind(&entry, p)
}

// DeletePod notes that the pod with this UID has been deleted.
func (f *Fleet) DeletePod(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members.forget(uid)
	if node := f.beside.forget(uid); node != "" {
		f.enterPlain(f.books, node, f.beside.use[node])
		return
	}
	_, at := f.books.Pod(uid)
	f.books.DeletePod(uid)
	f.touch(at)
	f.forget(uid)
}

// errUnknown is the error for a pod that the caller has not told of yet. The scheduler asks again later.
var errUnknown = errors.New("the API server has not shown this pod yet")

// Known waits until the caller has told of a pod. It returns an error if ctx ends first.
func (f *Fleet) Known(ctx context.Context, uid string) error {
	for {
		f.mu.Lock()
		if p, _ := f.books.Pod(uid); p.UID != "" {
			f.mu.Unlock()
			return nil
		}
		shown := f.shown
		f.mu.Unlock()
		select {
		case <-shown:
		case <-ctx.Done():
			return errUnknown
		}
	}
}

// asked returns a pod as the API has it, or errUnknown.
func (f *Fleet) asked(uid string) (*asking, error) {
	if a := f.asks[uid]; a != nil {
		return a, nil
	}
	if p, _ := f.books.Pod(uid); p.UID != "" {
		return &asking{Pod: p}, nil
	}
	return nil, errUnknown
}

// Place picks one of some nodes for the pod with a UID, and reserves room there. The pod's requests are those that
// the API has, and it is an error if the API has not shown the pod. If no node has room by the books, Place picks
// the first node where the pod fits without the requests that the node serves through DRA. If there is none either,
// node is empty, and refused has the reason of each node.
func (f *Fleet) Place(
	ctx context.Context, uid string, among []string,
) (node string, refused map[string]string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.listed(ctx); err != nil {
		return "", nil, err
	}
	p, err := f.asked(uid)
	if err != nil {
		return "", nil, err
	}
	delete(f.doubtful, uid) // the scheduler asks again, so it does not bind the pod where it was placed before
	known := f.known(among)
	if why := f.hopeless(p, known); why != "" {
		f.leave(p)
		f.refused(p.Pod, known, f.now())
		return "", each(among, why), nil
	}
	_, at := f.books.Pod(uid)
	node, no, err := f.place(ctx, p.Pod, among)
	if err != nil {
		return "", nil, err
	}
	f.found(p, known, no, f.now())
	if no == nil {
		f.satisfied(uid)
		f.answers[uid] = answer{node, f.now(), f.refusals}
	} else {
		f.refused(p.Pod, known, f.now())
		delete(f.answers, uid)
		refused = no.Nodes
	}
	if at != node {
		f.touch(at) // the pod had a reservation there
	}
	return node, refused, nil
}

// place asks the books, first for all of a pod's requests, and then node by node without those that go through DRA.
func (f *Fleet) place(
	ctx context.Context, entry placer.Pod, among []string,
) (node string, no *placer.Refusal, err error) {
	node, err = f.books.Place(ctx, entry, among, f.now())
	if !errors.As(err, &no) {
		return node, nil, err
	}
	for _, name := range among {
		rest, less := f.withoutDRA(entry, name)
		if !less {
			continue
		}
		if len(rest.Containers) == 0 {
			return name, nil, nil
		}
		if node, err := f.books.Place(ctx, rest, []string{name}, f.now()); err == nil {
			return node, nil, nil
		}
	}
	return "", no, nil
}

// Fits reports whether a node had room for a pod if some other pods were gone. All pods are named by their UIDs.
func (f *Fleet) Fits(ctx context.Context, uid, node string, without []string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.listed(ctx); err != nil {
		return false, err
	}
	p, err := f.asked(uid)
	if err != nil {
		return false, err
	}
	entry, _ := f.withoutDRA(p.Pod, node)
	if len(entry.Containers) == 0 {
		return true, nil
	}
	err = f.books.Fits(entry, node, without, f.now())
	if no := new(placer.Refusal); errors.As(err, &no) {
		return false, nil
	}
	return err == nil, err
}
