// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
)

// Node is what the agent needs of its Node.
type Node struct {
	Labels map[string]string
	// Annotations are those under Options.Domain.
	Annotations map[string]string
	// Unschedulable says that the node is cordoned.
	Unschedulable bool
	// StartupTaint says that it has the taint Options.StartupTaint.
	StartupTaint bool
	// Conditions are those whose type is under Options.Domain, sorted by it.
	Conditions []Condition
	// PodsTellDevices says that by the kubelet's version the status of each pod names the
	// devices that it has (containerStatuses[].allocatedResourcesStatus; the gate
	// ResourceHealthStatus is on by default from 1.36 on).
	PodsTellDevices bool
	// Allocatable are the names of the extended resources of which the scheduler may give
	// out something, sorted.
	Allocatable []string

	uid     types.UID
	version string
	// amounts are how much there is of each extended resource, also of those of which
	// there is nothing.
	amounts map[string]resource.Quantity
	// labels and annotations have the managers of each key.
	labels, annotations owners
	taints              []taint
}

// WatchKey follows one key of a ConfigMap until ctx ends, which is the only error it
// returns besides that of an empty name. fn is called with the first answer of the
// server, and then whenever it differs from the last: with the key's text, or with an
// error that says what is missing. Calls never overlap.
func (c *Client) WatchKey(ctx context.Context, namespace, name, key string, fn func(data []byte, err error)) error {
	if namespace == "" || name == "" {
		return fmt.Errorf("watch ConfigMap %q in namespace %q: both names are needed", name, namespace)
	}
	type answer struct{ text, missing string }
	var last *answer
	return c.follow(ctx, target{resource: configMaps, namespace: namespace, name: name}, func(object *unstructured.Unstructured) {
		var now answer
		if object == nil {
			now.missing = fmt.Sprintf("there is no ConfigMap %s/%s: create it with the key %s", namespace, name, key)
		} else if text, found, err := unstructured.NestedString(object.Object, "data", key); err != nil {
			// The API server validates this field; a proxy in between may not.
			c.log.Error("ignoring a malformed ConfigMap", "namespace", namespace, "name", name, "err", err)
			return
		} else if now.text = text; !found {
			now.missing = fmt.Sprintf("ConfigMap %s/%s has no key %s", namespace, name, key)
		}
		if last != nil && now == *last {
			return
		}
		last = &now
		if now.missing != "" {
			fn(nil, errors.New(now.missing))
			return
		}
		fn([]byte(now.text), nil)
	})
}

// WatchNode follows the agent's Node until ctx ends, which is the only error
// that it returns. fn is called with the first answer of the server, and
// then whenever a label, an annotation or a condition under the domain, the scheduling of
// the node, its startup taint, or which extended resources it has, differs from the last call's. Changes made through Mark
// and SetCondition are such changes. A Node that is not there is not reported: a
// kubelet that is alive makes it again. fn must not change what it is given.
func (n *ourNode) WatchNode(ctx context.Context, fn func(Node)) error {
	var last Node
	told := false
	name := n.options.NodeName
	return n.follow(ctx, target{resource: nodes, name: name}, func(object *unstructured.Unstructured) {
		if object == nil {
			n.see(nil)
			n.log.Warn("the API server has no Node of this name; what was seen last stays in force", "node", name)
			return
		}
		whole := readNode(object)
		n.see(&whole)
		n.allocatable(&whole)
		now := whole
		now.StartupTaint = n.tainted(&whole)
		now.Annotations = maps.Clone(whole.Annotations)
		maps.DeleteFunc(now.Annotations, func(key, _ string) bool { return n.mayWrite(key) != nil })
		now.Conditions = slices.DeleteFunc(slices.Clone(whole.Conditions), func(c Condition) bool { return n.mayWrite(c.Type) != nil })
		slices.SortFunc(now.Conditions, func(a, b Condition) int { return strings.Compare(a.Type, b.Type) })
		if told && now.Unschedulable == last.Unschedulable && now.StartupTaint == last.StartupTaint && now.PodsTellDevices == last.PodsTellDevices && maps.Equal(now.Labels, last.Labels) &&
			maps.Equal(now.Annotations, last.Annotations) && slices.Equal(now.Allocatable, last.Allocatable) && slices.EqualFunc(now.Conditions, last.Conditions, Condition.says) {
			return
		}
		last, told = now, true
		fn(now)
	})
}

func readNode(object *unstructured.Unstructured) Node {
	unschedulable, _, _ := unstructured.NestedBool(object.Object, "spec", "unschedulable")
	n := Node{Labels: object.GetLabels(), Annotations: object.GetAnnotations(),
		Unschedulable: unschedulable, Conditions: readConditions(object), amounts: readAmounts(object), taints: readTaints(object), uid: object.GetUID(), version: object.GetResourceVersion()}
	for name, amount := range n.amounts {
		if !amount.IsZero() {
			n.Allocatable = append(n.Allocatable, name)
		}
	}
	slices.Sort(n.Allocatable)
	n.labels, n.annotations = readOwners(object)
	kubelet, _, _ := unstructured.NestedString(object.Object, "status", "nodeInfo", "kubeletVersion")
	if is, err := version.ParseGeneric(kubelet); err == nil { // providers put words behind the number
		n.PodsTellDevices = is.AtLeast(tellsDevices)
	}
	return n
}

// tellsDevices is the first kubelet that names devices in the status of pods unless it is
// told otherwise.
var tellsDevices = version.MustParseGeneric("1.36.0")

// target names one object.
type target struct {
	resource        schema.GroupVersionResource
	namespace, name string
	chosen          fields.Set
	// all, if set, is told of each object instead: then the target is a whole resource.
	all *census
	// missing, if set, is told why the object cannot be followed where the server does not
	// know the resource, or does not allow it: nothing else depends on it. It is tried again
	// when an object would be read anew.
	missing func(error)
}

func (t target) in(api dynamic.Interface) dynamic.ResourceInterface {
	if t.namespace == "" {
		return api.Resource(t.resource)
	}
	return api.Resource(t.resource).Namespace(t.namespace)
}

func (t target) String() string {
	if t.all != nil {
		return "of the cluster"
	}
	if t.chosen != nil {
		return t.selector()
	}
	if t.namespace == "" {
		return t.name
	}
	return t.namespace + "/" + t.name
}

func (t target) selector() string {
	if t.all != nil {
		return t.all.chosen
	}
	if t.chosen != nil {
		return fields.SelectorFromSet(t.chosen).String()
	}
	return fields.OneTermEqualSelector("metadata.name", t.name).String()
}

// Ends of a watch that are not failures of the server.
var (
	errPeriod = errors.New("time to list again")
	// errShort: the stream ended at once and empty. The client library makes
	// such a stream of a connection that timed out, so only a list can tell
	// whether the server is there.
	errShort = errors.New("watch ended at once")
)

// follow calls see with the object after every list and every event, and with
// nil when it is not there. Of several objects it tells each event, and with nil each
// list; of a census, that is told instead.
func (s *apiServer) follow(ctx context.Context, t target, see func(*unstructured.Unstructured)) error {
	retry := s.backOff(s.timing.pauseMax)
	for {
		version, err := s.list(ctx, t, see)
		if t.missing != nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
			if t.missing(err); !sleep(ctx, around(s.timing.relist)) {
				return ctx.Err()
			}
			continue
		}
		s.note(ctx, "list", t.resource.Resource, t.String(), err)
		until := s.now().Add(around(s.timing.relist))
		for err == nil {
			began, events := s.now(), 0
			version, events, err = s.watch(ctx, t, version, until, see)
			stood := events > 0 || s.now().Sub(began) >= s.timing.lived
			switch {
			case failure(err) != nil:
				s.note(ctx, "watch", t.resource.Resource, t.String(), err)
			case stood:
				s.note(ctx, "watch", t.resource.Resource, t.String(), nil)
				retry = s.backOff(s.timing.pauseMax)
			case err == nil:
				err = errShort
			}
			if err == nil && !sleep(ctx, retry.Step()) {
				return ctx.Err()
			}
		}
		if !sleep(ctx, retry.Step()) {
			return ctx.Err()
		}
	}
}

// allowed tells Options.Refused where the server has changed its mind about a
// request. An error of another kind says nothing about that.
func (s *apiServer) allowed(verb string, t target, err error) {
	refused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	if s.options.Refused == nil || t.missing != nil || err != nil && !refused {
		return
	}
	request := verb + " " + t.resource.Resource + " " + t.String()
	s.mu.Lock()
	news := s.refused[request] != refused
	s.refused[request] = refused
	s.mu.Unlock()
	if news {
		s.options.Refused(request, err)
	}
}

// failure is nil for the ends of a watch that belong to its life.
func failure(err error) error {
	if errors.Is(err, errPeriod) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return nil
	}
	return err
}

// list reads the object and returns the version to watch from.
func (s *apiServer) list(ctx context.Context, t target, see func(*unstructured.Unstructured)) (string, error) {
	if t.all != nil {
		return s.listAll(ctx, t)
	}
	ctx, cancel := context.WithTimeout(ctx, s.timing.request)
	defer cancel()
	list, err := t.in(s.api).List(ctx, metav1.ListOptions{FieldSelector: t.selector()})
	s.allowed("list", t, err)
	if err != nil {
		return "", err
	}
	for i := range list.Items {
		if t.chosen == nil && list.Items[i].GetName() == t.name {
			see(&list.Items[i])
			return list.GetResourceVersion(), nil
		}
	}
	see(nil)
	return list.GetResourceVersion(), nil
}

// watch follows one stream to its end and returns the version to resume from
// and the number of events that came. A nil error means that the stream ended
// without a complaint, as a server does after the time it was asked for, and
// as a cut connection looks.
func (s *apiServer) watch(ctx context.Context, t target, version string, until time.Time, see func(*unstructured.Unstructured)) (string, int, error) {
	left := until.Sub(s.now())
	if left <= 0 {
		return version, 0, errPeriod
	}
	span := min(left, s.timing.watch)
	// The server ends the watch; the context is for one that does not.
	ctx, cancel := context.WithTimeout(ctx, span+s.timing.grace)
	defer cancel()
	seconds := int64(span/time.Second) + 1
	stream, err := t.in(s.api).Watch(ctx, metav1.ListOptions{
		FieldSelector: t.selector(), ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
	s.allowed("watch", t, err)
	if err != nil {
		return version, 0, err
	}
	defer stream.Stop()
	for count := 0; ; {
		select {
		case <-ctx.Done():
			return version, count, nil
		case e, ok := <-stream.ResultChan():
			if !ok {
				return version, count, nil
			}
			if e.Type == watch.Error {
				return version, count, apierrors.FromObject(e.Object)
			}
			object, ok := e.Object.(*unstructured.Unstructured)
			if !ok {
				return version, count, fmt.Errorf("watch event of unexpected type %T", e.Object)
			}
			if v := object.GetResourceVersion(); v != "" {
				version = v
			}
			count++
			if t.all != nil {
				t.all.saw(e.Type, object)
				continue
			}
			if e.Type == watch.Bookmark || t.chosen == nil && object.GetName() != t.name {
				continue
			}
			if e.Type == watch.Deleted {
				object = nil
			}
			see(object)
		}
	}
}

// answered tells an error that the server gave from one of reaching it.
func answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}
