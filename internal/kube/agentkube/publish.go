// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/version"

	"example.com/gpu-agent/internal/amount"
	"example.com/gpu-agent/internal/kube"
)

// ErrUnfit means that this API server, as it is, cannot have the node's slices.
var ErrUnfit = errors.New("the API server cannot do what the node's slices need")

// ErrDropped means that the API server has stored a slice without some of its fields, since a
// feature gate is off. It is an ErrUnfit.
var ErrDropped = fmt.Errorf("%w: it has dropped fields that it does not know", ErrUnfit)

// leastServer is the oldest supported server. The schedulers before it give out MIG instances and
// shares of one GPU at the same time (kubernetes#139034).
var leastServer = version.MustParseGeneric("1.36.2")

// dropsAgain is the time after which a server that dropped fields is tried again.
const dropsAgain = time.Minute

// ourSlices are the ResourceSlices that the agent publishes for its node.
type ourSlices struct {
	*ourNode

	mu sync.Mutex
	// Guarded by mu. unkept has the slices that the server did not store as sent, by name;
	// otherwise they would be written again and again. kept has the spec of each slice as it was
	// last seen or written, by name. Its values are nil after a failed request; the map is nil
	// before the first publication. fit is true if the server is known to be new enough.
	unkept map[string]exchange
	kept   map[string][]byte
	fit    bool
}

// exchange is a slice as it was sent, as the server stored it, and the time of that.
type exchange struct {
	sent, kept []byte
	at         time.Time
}

// PublishSlices makes a driver's ResourceSlices of this node equal to want. It reads what the
// server has and writes only what differs, each slice by itself. A pool that has as many slices as
// before keeps its generation, so that the scheduler goes on using it while one slice changes. If
// the number of slices changes, all slices of the pool get a new generation. An error with one
// slice does not stop the others.
//
// meddled are the slices that others have created, changed or deleted since the last call, sorted.
// It is empty for the first call.
//
// The error wraps ErrUnfit while the server is too old, or does not store all of a slice.
// PublishSlices then deletes such a slice: without its counters or taints the scheduler would give
// out devices that are not free. Calls a minute later try again.
func (s *ourSlices) PublishSlices(
	ctx context.Context, driver string, want []resourcev1.ResourceSlice,
) (meddled []string, err error) {
	node, err := s.lastNode(ctx)
	if err == nil && node == nil {
		err = errors.New("the API server has no Node of this name")
	}
	if err == nil {
		err = s.checkServer(ctx)
	}
	var have map[string]*resourcev1.ResourceSlice
	if err == nil {
		have, err = s.listOwn(ctx, driver)
	}
	if err != nil {
		return nil, fmt.Errorf("publish the slices of node %s: %w", s.options.NodeName, err)
	}
	meddled = s.compare(have)
	want = slices.Clone(want)
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if hopeless(have[name]) {
			errs = append(errs, s.deleteSlice(ctx, have[name]))
			delete(have, name)
		}
	}
	generations(want, have)
	for i := range want {
		if err := s.writeSlice(ctx, node, &want[i], have[want[i].Name]); err != nil {
			errs = append(errs, fmt.Errorf("publish ResourceSlice %s: %w", want[i].Name, err))
		}
		delete(have, want[i].Name)
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		errs = append(errs, s.deleteSlice(ctx, have[name]))
	}
	return meddled, errors.Join(errs...)
}

// checkServer returns an ErrUnfit if the server is too old. It returns nil if the server does not
// tell its version; the fields that the server drops will then show it.
func (s *ourSlices) checkServer(ctx context.Context) error {
	s.mu.Lock()
	fit := s.fit
	s.mu.Unlock()
	if fit {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, s.server.Timing.Request)
	defer cancel()
	text, err := s.server.Version(bounded)
	if err != nil {
		return nil
	}
	// Providers append words to the number; these have no order.
	if is, err := version.ParseGeneric(text); err == nil && is.LessThan(leastServer) {
		return fmt.Errorf("%w: it is Kubernetes %s, and %s is needed", ErrUnfit, text, leastServer)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fit = true
	return nil
}

// hopeless reports whether a slice cannot be updated: it could not be read, or its pool cannot have
// a newer generation.
func hopeless(slice *resourcev1.ResourceSlice) bool {
	return slice.Spec.Pool.Generation < 1 || slice.Spec.Pool.Generation == math.MaxInt64
}

// compare returns the names of the slices that differ from how this agent left them, sorted. It
// records what the server has now. On the first call it returns none.
func (s *ourSlices) compare(have map[string]*resourcev1.ResourceSlice) (others []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		s.kept = map[string][]byte{}
		for name := range have { // slices of an agent before this one
			s.kept[name] = specJSON(have[name])
		}
		return nil
	}
	for name, left := range s.kept {
		if now, there := have[name]; left != nil && (!there || !bytes.Equal(specJSON(now), left)) {
			others = append(others, name)
		}
	}
	for name := range have {
		if _, ours := s.kept[name]; !ours {
			others = append(others, name)
		}
	}
	clear(s.kept)
	for name, now := range have {
		s.kept[name] = specJSON(now)
	}
	slices.Sort(others)
	return others
}

// specJSON returns the spec of a slice as JSON.
func specJSON(slice *resourcev1.ResourceSlice) []byte {
	out, err := json.Marshal(&slice.Spec)
	if err != nil {
		panic(err) // every field can be encoded as JSON
	}
	return out
}

// deleteSlice deletes a slice. The server refuses it if the slice has changed since it was read. It
// is no error if the slice is gone.
func (s *ourSlices) deleteSlice(ctx context.Context, slice *resourcev1.ResourceSlice) error {
	o := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &slice.ResourceVersion}}
	err := s.request(ctx, "delete", slice.Name, func(ctx context.Context) error {
		return s.server.API.Resource(resourceSlices).Delete(ctx, slice.Name, o)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		s.recordSpec(slice.Name, nil)
		return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.kept, slice.Name)
	return nil
}

// generations sets the generation of each pool in want. A pool that has as many slices as before
// keeps its generation, so that the scheduler goes on using it while one slice is written.
func generations(want []resourcev1.ResourceSlice, have map[string]*resourcev1.ResourceSlice) {
	wanted := map[string]bool{} // names
	for i := range want {
		wanted[want[i].Name] = true
	}
	next := map[string]int64{}
	for i := range want {
		pool := &want[i].Spec.Pool
		if next[pool.Name] == 0 {
			newest, same := int64(0), true
			for name := range have {
				h := &have[name].Spec.Pool
				if h.Name != pool.Name {
					continue
				}
				same = same && wanted[name] && h.ResourceSliceCount == pool.ResourceSliceCount &&
					(newest == 0 || newest == h.Generation)
				newest = max(newest, h.Generation)
			}
			if !same || newest == 0 {
				newest++
			}
			next[pool.Name] = newest
		}
		pool.Generation = next[pool.Name]
	}
}

// writeSlice writes one slice, unless the server has it already. have is nil if the server has none
// of this name.
func (s *ourSlices) writeSlice(ctx context.Context, node *Node, want, have *resourcev1.ResourceSlice) error {
	sent := specJSON(want)
	if have != nil && bytes.Equal(specJSON(have), sent) {
		return nil
	}
	s.mu.Lock()
	before := s.unkept[want.Name]
	s.mu.Unlock()
	again := bytes.Equal(before.sent, sent)
	partly := again && dropped(sent, before.kept) != ""
	if partly && s.server.Now().Sub(before.at) < dropsAgain ||
		again && have != nil && bytes.Equal(before.kept, specJSON(have)) {
		return notKept(sent, before.kept)
	}
	whole := *want
	whole.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: s.options.NodeName, UID: node.uid, Controller: new(true)},
	}
	if have != nil {
		whole.ResourceVersion = have.ResourceVersion
	}
	if partly { // a dry run first: no reader should see a slice that the server keeps in part
		back, err := s.send(ctx, &whole, true)
		if err == nil {
			_, err = s.recordAnswer(want.Name, sent, back)
		}
		if err != nil {
			return err
		}
	}
	var kept []byte
	back, err := s.send(ctx, &whole, false)
	if err == nil {
		kept, err = s.recordAnswer(want.Name, sent, back)
	}
	s.recordSpec(want.Name, kept)
	if errors.Is(err, ErrDropped) {
		return errors.Join(err, s.deleteSlice(ctx, back))
	}
	return err
}

// send creates a slice, or updates the version that slice names. If dry is true, it only asks what
// the server would store. It returns what the server has stored.
func (s *ourSlices) send(
	ctx context.Context, slice *resourcev1.ResourceSlice, dry bool,
) (*resourcev1.ResourceSlice, error) {
	var dryRun []string
	if dry {
		dryRun = []string{metav1.DryRunAll}
	}
	object, err := sliceObject(slice)
	if err != nil {
		return nil, err
	}
	api, verb := s.server.API.Resource(resourceSlices), "create"
	if slice.ResourceVersion != "" {
		verb = "update"
	}
	if err = s.request(ctx, verb, slice.Name, func(ctx context.Context) (err error) {
		if slice.ResourceVersion == "" {
			object, err = api.Create(ctx, object, metav1.CreateOptions{DryRun: dryRun})
		} else {
			object, err = api.Update(ctx, object, metav1.UpdateOptions{DryRun: dryRun})
		}
		return err
	}); err != nil {
		return nil, err
	}
	return readSlice(object)
}

// sliceObject returns a slice as the dynamic client sends it.
func sliceObject(slice *resourcev1.ResourceSlice) (*unstructured.Unstructured, error) {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(slice)
	if err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{Object: fields}
	object.SetGroupVersionKind(resourceSlices.GroupVersion().WithKind("ResourceSlice"))
	return object, nil
}

// recordAnswer records what the server has stored of a slice, and returns it. The error names the fields
// that the server did not keep.
func (s *ourSlices) recordAnswer(name string, sent []byte, back *resourcev1.ResourceSlice) (kept []byte, err error) {
	kept = specJSON(back)
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Equal(kept, sent) {
		delete(s.unkept, name)
		return kept, nil
	}
	s.unkept[name] = exchange{sent, kept, s.server.Now()}
	return kept, notKept(sent, kept)
}

// recordSpec records the spec of a slice after a write; nil means unknown, since a request failed.
func (s *ourSlices) recordSpec(name string, text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept[name] = text
}

// gated are the fields of a slice that the server drops if a feature gate is off.
var gated = []string{"sharedCounters", "consumesCounters", "allowMultipleAllocations", "requestPolicy", "taints"}

// dropped returns the names of the gated fields that the server did not keep.
func dropped(sent, kept []byte) string {
	var names []string
	for _, name := range gated {
		if key := []byte(`"` + name + `"`); bytes.Contains(sent, key) && !bytes.Contains(kept, key) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// notKept returns an error that names what the server did not keep.
func notKept(sent, kept []byte) error {
	if what := dropped(sent, kept); what != "" {
		return fmt.Errorf("%w (%s): it needs DRAPartitionableDevices, DRAConsumableCapacity and DRADeviceTaints, "+
			"the feature gates that are on by default from Kubernetes 1.36 on", ErrDropped, what)
	}
	return errors.New("the API server has stored something else")
}

// request makes one request for a ResourceSlice.
func (s *ourSlices) request(ctx context.Context, verb, name string, do func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, s.server.Timing.Request)
	defer cancel()
	err := do(bounded)
	s.server.Note(ctx, verb, resourceSlices.Resource, name, err)
	return err
}

func (s *ourSlices) chosen(driver string) kube.Target {
	return kube.Target{Resource: resourceSlices, Chosen: fields.Set{
		resourcev1.ResourceSliceSelectorNodeName: s.options.NodeName, resourcev1.ResourceSliceSelectorDriver: driver}}
}

// listOwn returns a driver's slices of this node, by name.
func (s *ourSlices) listOwn(ctx context.Context, driver string) (map[string]*resourcev1.ResourceSlice, error) {
	var list *unstructured.UnstructuredList
	o := metav1.ListOptions{FieldSelector: s.chosen(driver).Selector()}
	if err := s.request(ctx, "list", s.options.NodeName, func(ctx context.Context) (err error) {
		list, err = s.server.API.Resource(resourceSlices).List(ctx, o)
		return err
	}); err != nil {
		return nil, err
	}
	return s.readOwn(list), nil
}

// readOwn reads slices, by name. One that cannot be read gets an empty spec.
func (s *ourSlices) readOwn(list *unstructured.UnstructuredList) map[string]*resourcev1.ResourceSlice {
	out := map[string]*resourcev1.ResourceSlice{}
	for i := range list.Items {
		slice, err := readSlice(&list.Items[i])
		if err != nil {
			s.server.Log.Warn("replacing a ResourceSlice of this node that cannot be read",
				"slice", slice.Name, "err", err)
			slice.Spec = resourcev1.ResourceSliceSpec{}
		}
		out[slice.Name] = slice
	}
	return out
}

// readSlice reads the part of a slice that the agent writes. It leaves out the times of taints,
// which the server sets.
func readSlice(o *unstructured.Unstructured) (*resourcev1.ResourceSlice, error) {
	out := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), ResourceVersion: o.GetResourceVersion()},
	}
	spec, _ := o.Object["spec"].(map[string]any)
	// Only these fields have amounts. The node's name may look like an amount that takes long to
	// parse.
	err := amount.Check([]any{spec["devices"], spec["sharedCounters"]})
	if err == nil {
		err = kube.Decode(o, "spec", &out.Spec)
	}
	if err != nil {
		return out, fmt.Errorf("read ResourceSlice %s: %w", out.Name, err)
	}
	for i := range out.Spec.Devices {
		for j := range out.Spec.Devices[i].Taints {
			out.Spec.Devices[i].Taints[j].TimeAdded = nil
		}
	}
	return out, nil
}

// WatchSlices calls changed whenever a driver's ResourceSlices of this node may differ from what
// was written. Others may have changed or deleted one: a kubelet deletes them when it starts. It
// also calls changed for the agent's own writes. It returns when ctx ends, with the error of ctx.
func (s *ourSlices) WatchSlices(ctx context.Context, driver string, changed func()) error {
	return s.server.Follow(ctx, s.chosen(driver), func(*unstructured.Unstructured) { changed() })
}
