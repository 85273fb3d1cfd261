// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/internal/workload"
)

// Kind is a kind of object that is followed.
type Kind = string

// Kinds, in the API's words.
const (
	Nodes    Kind = "nodes"
	Pods     Kind = "pods"
	GPUNodes Kind = gpunode.Plural
)

// Fleet is a cluster's nodes and pods as the books have them. Its methods may be called from
// several goroutines.
type Fleet struct {
	prefix string
	now    func() time.Time

	mu    sync.Mutex // guards what follows
	books *placer.Books
	// says and ready are what is known of nodes; counts has of each of the agent's
	// resources in a Node's allocatable whether there is any. Passed are nodes whose GPUNode
	// says what cannot be, and why.
	says   map[string]*gpunode.Status
	passed map[string]error
	ready  map[string]bool
	counts map[string]map[string]bool
	// asks are the pods without a node, by UID. Shown is closed when there is another pod.
	asks  map[string]*asking
	shown chan struct{}
	// dra are the nodes that offer something through DRA.
	dra map[string]bool
	// missing are the kinds of which no list has come yet.
	missing []Kind
	// complete is closed when there are none.
	complete chan struct{}
	leading
	waiting
	gangs map[string]*gang // by group
	lending
	sites *Sites // nil where nobody counts
}

// New returns a fleet of which nothing is known. The resource domain is the prefix of the
// agent's resources, for example "example.com".
func New(resourceDomain string, now func() time.Time) *Fleet {
	return &Fleet{
		prefix: resourceDomain + "/", now: now, books: placer.New(),
		says: map[string]*gpunode.Status{}, passed: map[string]error{}, ready: map[string]bool{}, counts: map[string]map[string]bool{}, dra: map[string]bool{}, asks: map[string]*asking{}, shown: make(chan struct{}),
		missing: []Kind{GPUNodes, Nodes, Pods}, complete: make(chan struct{}), leading: newLeading(), waiting: newWaiting(), gangs: map[string]*gang{}, lending: newLending(),
	}
}

// Ready is nil while questions are answered.
func (f *Fleet) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.listed(context.Background())
}

// Listed notes that all objects of a kind have been told.
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

// WaitListed waits until each kind has been listed once; its error is that of ctx.
func (f *Fleet) WaitListed(ctx context.Context) error {
	select {
	case <-f.complete:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// SetNode notes a Node. Whether pods may be put there at all is the scheduler's business;
// here it counts whether its kubelet is ready to start them, and has devices of the agent's.
func (f *Fleet) SetNode(n *corev1.Node) {
	ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	counts := map[string]bool{}
	for name, amount := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), f.prefix) {
			counts[string(name)] = !amount.IsZero()
		}
	}
	a := aboutNode(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	if was, known := f.ready[n.Name]; known && was == ready && maps.Equal(f.counts[n.Name], counts) && a.equal(f.about[n.Name]) {
		return // a Node is written every few minutes, and says nothing else here
	}
	f.about[n.Name], f.nodes = a, nil
	f.changes++
	f.ready[n.Name], f.counts[n.Name] = ready, counts
	f.told(n.Name)
}

// silent reports whether a node's kubelet has lost the agent, whose GPUNode cannot say so:
// then all that it offers through the kubelet is unhealthy, devices that are held
// included, and so counts nothing. A Node that has never had these resources says nothing.
func (f *Fleet) silent(name string) bool {
	known := false
	for _, r := range f.says[name].Resources {
		if any, counted := f.counts[name][r.Name]; any {
			return false
		} else if counted && r.Total > 0 {
			known = true
		}
	}
	return known
}

// DeleteNode notes that there is no such Node any more.
func (f *Fleet) DeleteNode(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.ready, name)
	delete(f.counts, name)
	delete(f.about, name)
	f.nodes = nil
	f.changes++
	f.told(name)
	if f.says[name] == nil {
		f.unnumber(name)
	}
}

// SetGPUNode notes what a GPUNode says, which the caller may not change any more. Nil says
// that there is no such object any more, or none that can be read. Where it says what cannot be
// ([gpunode.Status.Check]), the node is passed over until it says something else; the error is
// why.
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

// PassedOver is how many nodes say what cannot be.
func (f *Fleet) PassedOver() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.passed)
}

// told writes in the books what is known of a node.
func (f *Fleet) told(name string) {
	f.sites.count(name)
	f.touch(name)
	delete(f.dra, name)
	if says := f.says[name]; says != nil {
		if f.ready[name] && gpunode.Is(says.Conditions, gpunode.Ready) &&
			slices.ContainsFunc(says.GPUs, func(g gpunode.GPU) bool { return g.API == string(workload.DRA) }) {
			f.dra[name] = true
		}
		f.books.SetNode(name, says, f.ready[name] && !f.silent(name))
	} else if wrong := f.passed[name]; wrong != nil {
		f.books.PassOver(name, fmt.Sprintf("its GPUNode says what cannot be: %v", wrong))
	} else {
		f.books.DeleteNode(name)
	}
}

// SetPod notes a pod. One that asks for none of the agent's resources and has none is
// nothing to the books.
func (f *Fleet) SetPod(p *corev1.Pod) {
	entry := f.read(p)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(entry.Containers) == 0 && len(entry.Devices) == 0 {
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

// DeletePod notes that there is no pod with this UID any more.
func (f *Fleet) DeletePod(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, at := f.books.Pod(uid)
	f.books.DeletePod(uid)
	f.touch(at)
	f.forget(uid)
}

// errUnknown says that a pod is not known yet, so that a scheduler is to ask again.
var errUnknown = errors.New("the API server has not shown this pod yet")

// Known waits until the API server has shown a pod, as long as ctx allows. Its error says that
// it has not.
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

// asked is a pod as the API has it.
func (f *Fleet) asked(uid string) (*asking, error) {
	if a := f.asks[uid]; a != nil {
		return a, nil
	}
	if p, _ := f.books.Pod(uid); p.UID != "" {
		return &asking{Pod: p}, nil
	}
	return nil, errUnknown
}

// Place picks one of some nodes for a pod, named by its UID, and reserves there. What the pod
// asks for is what the API says: a pod that it has not shown has no place. Where no node can take
// it by the books, it picks the first that offers the rest through DRA. Otherwise node is empty,
// and refused has the reason of each.
func (f *Fleet) Place(ctx context.Context, uid string, among []string) (node string, refused map[string]string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.listed(ctx); err != nil {
		return "", nil, err
	}
	p, err := f.asked(uid)
	if err != nil {
		return "", nil, err
	}
	delete(f.doubtful, uid) // what it was told before is void
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
	f.found(p, known, no)
	if no == nil {
		f.satisfied(uid)
		f.answers[uid] = answer{node, f.now(), f.refusals}
	} else {
		f.refused(p.Pod, known, f.now())
		delete(f.answers, uid)
		refused = no.Nodes
	}
	if at != node {
		f.touch(at) // it had a reservation there
	}
	return node, refused, nil
}

// known are those of some nodes that there are.
func (f *Fleet) known(among []string) []string {
	return slices.DeleteFunc(slices.Clone(among), func(name string) bool {
		_, there := f.ready[name]
		return !there && f.says[name] == nil
	})
}

// place asks the books, and then looks at what goes through DRA.
func (f *Fleet) place(ctx context.Context, entry placer.Pod, among []string) (node string, no *placer.Refusal, err error) {
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

// Fits says whether a node could take a pod without some others; all are named by their UIDs.
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

// withoutDRA leaves out of a pod what a node offers through DRA, also under the names of
// extended resources. The scheduler has found room for that by itself, and the books know
// nothing of it. Less says that there was something. Of a node that is not ready nobody
// knows what it will offer how.
func (f *Fleet) withoutDRA(p placer.Pod, name string) (rest placer.Pod, less bool) {
	if !f.dra[name] {
		return p, false
	}
	says := f.says[name]
	rest = p
	rest.Containers = nil
	for _, c := range p.Containers {
		requests := maps.Clone(c.Requests)
		maps.DeleteFunc(requests, func(of string, _ int) bool {
			return !slices.ContainsFunc(says.Resources, func(r gpunode.Resource) bool { return r.Name == of })
		})
		less = less || len(requests) < len(c.Requests)
		if c.Requests = requests; len(requests) > 0 {
			rest.Containers = append(rest.Containers, c)
		}
	}
	return rest, less
}

// listed is an error while something is missing or another process leads, or when nobody waits for the answer any
// more: then nothing is to be reserved.
func (f *Fleet) listed(ctx context.Context) error {
	if len(f.missing) > 0 {
		return fmt.Errorf("the API server has not listed %v yet", f.missing)
	}
	if f.leads != nil {
		if err := f.leads(); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// read makes an entry of the books from a pod.
func (f *Fleet) read(p *corev1.Pod) placer.Pod {
	out := placer.Pod{
		UID: string(p.UID), Namespace: p.Namespace, Name: p.Name,
		Node: p.Spec.NodeName, Nominated: p.Status.NominatedNodeName,
		Done:   p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		Ending: p.DeletionTimestamp != nil,
	}
	for _, of := range f.holdOf {
		out.Hold = cmp.Or(out.Hold, of(p))
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		f.container(&out, c, placer.Container{Init: !sidecar, Sidecar: sidecar})
	}
	for i := range p.Spec.Containers {
		f.container(&out, &p.Spec.Containers[i], placer.Container{})
	}
	for _, statuses := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range statuses {
			for _, r := range statuses[i].AllocatedResourcesStatus {
				if !strings.HasPrefix(string(r.Name), f.prefix) {
					continue // "claim:…" is a device of DRA's
				}
				for _, device := range r.Resources {
					out.Devices = append(out.Devices, string(device.ResourceID))
				}
			}
		}
	}
	slices.Sort(out.Devices)
	out.Devices = slices.Compact(out.Devices) // an init container's go to another one
	return out
}

// container adds a container that asks for something of the agent's.
func (f *Fleet) container(to *placer.Pod, from *corev1.Container, c placer.Container) {
	requests := corev1.ResourceList{}
	maps.Copy(requests, from.Resources.Limits) // a template need not say both
	maps.Copy(requests, from.Resources.Requests)
	for name, amount := range requests {
		if n := amount.Value(); strings.HasPrefix(string(name), f.prefix) && n > 0 {
			if c.Requests == nil {
				c.Requests = map[string]int{}
			}
			c.Requests[string(name)] = int(min(n, math.MaxInt32)) // sums of which cannot overflow
		}
	}
	if c.Requests != nil {
		to.Containers = append(to.Containers, c)
	}
}
