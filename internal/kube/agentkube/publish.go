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

// ErrUnfit says that nothing can be published at this API server as it is.
var ErrUnfit = errors.New("the API server cannot do what the node's slices need")

// ErrDropped says that the API server has taken a slice without some of its fields: a
// feature gate is off. It is an ErrUnfit.
var ErrDropped = fmt.Errorf("%w: it has dropped what it does not know", ErrUnfit)

// leastServer is the oldest server that will do. The schedulers before it give MIG
// instances and shares of one GPU out at the same time (kubernetes#139034).
var leastServer = version.MustParseGeneric("1.36.2")

// dropsAgain is after how long a server that has dropped fields is tried again.
const dropsAgain = time.Minute

// ourSlices are the ResourceSlices that the agent publishes of its node.
type ourSlices struct {
	*ourNode

	mu sync.Mutex
	// Guarded by mu: the slices of which the server has not kept all, by name, without
	// which they would be written again and again; how each was left, where that is
	// known, nil before the first publication; and whether the server is known to be new
	// enough.
	unkept map[string]exchange
	kept   map[string][]byte
	fit    bool
}

// exchange is a slice as it was sent, what the server made of that, and when.
type exchange struct {
	sent, kept []byte
	at         time.Time
}

// PublishSlices makes a driver's ResourceSlices of this node what want says. It reads
// what there is, and writes what differs and nothing else: each slice is a change of its
// own, unless a pool's number of slices changes, for which all of it gets a new
// generation. The error of one slice does not keep back the others.
//
// meddled are the slices that somebody else has made, changed or deleted since the last
// call, sorted; of the first call it is empty.
//
// ErrUnfit is in the error while the server is too old, or does not keep what a slice
// says. It has none of such a slice then: without its counters or taints the scheduler
// would give out what cannot be had. It is tried again by calls a minute later.
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

// checkServer refuses a server that is too old, as long as it is not known to be new
// enough. Where it does not tell, what it drops will show.
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
	// Providers put words behind the number, which no rule orders.
	if is, err := version.ParseGeneric(text); err == nil && is.LessThan(leastServer) {
		return fmt.Errorf("%w: it is Kubernetes %s, and %s is needed", ErrUnfit, text, leastServer)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fit = true
	return nil
}

// hopeless says that a slice cannot be made what it should be: nobody can read it, or its pool
// can have no newer generation.
func hopeless(slice *resourcev1.ResourceSlice) bool {
	return slice.Spec.Pool.Generation < 1 || slice.Spec.Pool.Generation == math.MaxInt64
}

// compare returns the slices that are not as they were left.
func (s *ourSlices) compare(have map[string]*resourcev1.ResourceSlice) (others []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		s.kept = map[string][]byte{}
		for name := range have { // a predecessor's
			s.kept[name] = says(have[name])
		}
		return nil
	}
	for name, left := range s.kept {
		if now, there := have[name]; left != nil && (!there || !bytes.Equal(says(now), left)) {
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
		s.kept[name] = says(now)
	}
	slices.Sort(others)
	return others
}

// says is what a slice says, in the API's JSON.
func says(slice *resourcev1.ResourceSlice) []byte {
	out, err := json.Marshal(&slice.Spec)
	if err != nil {
		panic(err) // it has nothing that JSON does not
	}
	return out
}

// deleteSlice takes a slice back, unless somebody has changed it since.
func (s *ourSlices) deleteSlice(ctx context.Context, slice *resourcev1.ResourceSlice) error {
	o := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &slice.ResourceVersion}}
	err := s.request(ctx, "delete", slice.Name, func(ctx context.Context) error {
		return s.server.API.Resource(resourceSlices).Delete(ctx, slice.Name, o)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		s.leave(slice.Name, nil)
		return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.kept, slice.Name)
	return nil
}

// generations completes pools. A pool whose slices are as many as before keeps its
// generation: the scheduler goes on with it while one of them is written.
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

// writeSlice writes one slice, if the server has another one. have is nil where it has none.
func (s *ourSlices) writeSlice(ctx context.Context, node *Node, want, have *resourcev1.ResourceSlice) error {
	sent := says(want)
	if have != nil && bytes.Equal(says(have), sent) {
		return nil
	}
	s.mu.Lock()
	before := s.unkept[want.Name]
	s.mu.Unlock()
	again := bytes.Equal(before.sent, sent)
	partly := again && dropped(sent, before.kept) != ""
	if partly && s.server.Now().Sub(before.at) < dropsAgain ||
		again && have != nil && bytes.Equal(before.kept, says(have)) {
		return lost(sent, before.kept)
	}
	whole := *want
	whole.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: s.options.NodeName, UID: node.uid, Controller: new(true)},
	}
	if have != nil {
		whole.ResourceVersion = have.ResourceVersion
	}
	if partly { // nobody is to see it before the server keeps it
		back, err := s.send(ctx, &whole, true)
		if err == nil {
			_, err = s.took(want.Name, sent, back)
		}
		if err != nil {
			return err
		}
	}
	var kept []byte
	back, err := s.send(ctx, &whole, false)
	if err == nil {
		kept, err = s.took(want.Name, sent, back)
	}
	s.leave(want.Name, kept)
	if errors.Is(err, ErrDropped) {
		return errors.Join(err, s.deleteSlice(ctx, back))
	}
	return err
}

// send creates a slice, or updates the one of its version, or only asks what the server would
// make of that.
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

// sliceObject is a slice as the dynamic client sends it.
func sliceObject(slice *resourcev1.ResourceSlice) (*unstructured.Unstructured, error) {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(slice)
	if err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{Object: fields}
	object.SetGroupVersionKind(resourceSlices.GroupVersion().WithKind("ResourceSlice"))
	return object, nil
}

// took is what the server has made of a slice; the error says what it has not kept.
func (s *ourSlices) took(name string, sent []byte, back *resourcev1.ResourceSlice) (kept []byte, err error) {
	kept = says(back)
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Equal(kept, sent) {
		delete(s.unkept, name)
		return kept, nil
	}
	s.unkept[name] = exchange{sent, kept, s.server.Now()}
	return kept, lost(sent, kept)
}

// leave notes how a slice was left; nil is unknown, since a request failed.
func (s *ourSlices) leave(name string, text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept[name] = text
}

// gated are the fields of a slice that a feature gate can take away.
var gated = []string{"sharedCounters", "consumesCounters", "allowMultipleAllocations", "requestPolicy", "taints"}

// dropped names the fields that the server did not keep.
func dropped(sent, kept []byte) string {
	var names []string
	for _, name := range gated {
		if key := []byte(`"` + name + `"`); bytes.Contains(sent, key) && !bytes.Contains(kept, key) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// lost says what the server did not keep.
func lost(sent, kept []byte) error {
	if what := dropped(sent, kept); what != "" {
		return fmt.Errorf("%w (%s): it needs DRAPartitionableDevices, DRAConsumableCapacity and DRADeviceTaints on, "+
			"as they are by default from Kubernetes 1.36 on", ErrDropped, what)
	}
	return errors.New("the API server has made something else of it")
}

// request makes one request of a ResourceSlice.
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

// listOwn returns what the server has of a driver of this node, by name.
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

// readOwn reads slices, by name. One that nobody can read says nothing.
func (s *ourSlices) readOwn(list *unstructured.UnstructuredList) map[string]*resourcev1.ResourceSlice {
	out := map[string]*resourcev1.ResourceSlice{}
	for i := range list.Items {
		slice, err := readSlice(&list.Items[i])
		if err != nil {
			s.server.Log.Warn("replacing a ResourceSlice of this node that nobody can read",
				"slice", slice.Name, "err", err)
			slice.Spec = resourcev1.ResourceSliceSpec{}
		}
		out[slice.Name] = slice
	}
	return out
}

// readSlice reads what the agent writes of a slice: since when it has its taints is the server's.
func readSlice(o *unstructured.Unstructured) (*resourcev1.ResourceSlice, error) {
	out := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), ResourceVersion: o.GetResourceVersion()},
	}
	spec, _ := o.Object["spec"].(map[string]any)
	// Only these have amounts: the node's name may look like one that takes long to read.
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

// WatchSlices calls changed whenever a driver's ResourceSlices of this node may differ
// from what was written: somebody else changed or deleted one, as a kubelet does that
// starts. What the agent writes itself is told too. It returns when ctx ends, with its
// error.
func (s *ourSlices) WatchSlices(ctx context.Context, driver string, changed func()) error {
	return s.server.Follow(ctx, s.chosen(driver), func(*unstructured.Unstructured) { changed() })
}
