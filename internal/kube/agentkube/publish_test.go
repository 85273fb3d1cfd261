// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// sliceOf is a slice of a pool of so many.
func sliceOf(name, pool string, slices int64) resourcev1.ResourceSlice {
	return resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcev1.ResourceSliceSpec{
		Driver: "gpus.example.com", NodeName: new("node-1"),
		Pool: resourcev1.ResourcePool{Name: pool, ResourceSliceCount: slices}}}
}

// slicesOfTwo are slices with a device each.
func slicesOfTwo() (out []resourcev1.ResourceSlice) {
	for _, n := range []string{"0", "1"} {
		s := sliceOf("0000"+n, "node-1/a100", 2)
		memory := resourcev1.Counter{Value: *resource.NewQuantity(80<<30, resource.BinarySI)}
		s.Spec.Devices = []resourcev1.Device{{Name: "gpu-" + n, ConsumesCounters: []resourcev1.DeviceCounterConsumption{
			{CounterSet: "gpu-" + n, Counters: map[string]resourcev1.Counter{"memory": memory}}}}}
		out = append(out, s)
	}
	return out
}

// A server that drops what it does not know has none of such slices, is not written to
// again and again, and has them a minute after the feature gate is on.
func TestServerThatDropsFields(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	now := time.Now()
	c.server.Now = func() time.Time { return now }
	writes := func() (n int) {
		for _, r := range append(s.Asked("create resourceslices"), s.Asked("update resourceslices")...) {
			if !strings.Contains(r, "All") {
				n++
			}
		}
		return n
	}
	publish := func() error {
		meddled, err := c.PublishSlices(t.Context(), "gpus.example.com", slicesOfTwo())
		if len(meddled) > 0 {
			t.Errorf("somebody else has changed %v", meddled)
		}
		return err
	}
	s.Set(func() { s.Gated = "consumesCounters" })
	for range 5 {
		if err := publish(); !errors.Is(err, ErrDropped) || !errors.Is(err, ErrUnfit) || !strings.Contains(err.Error(), "(consumesCounters)") {
			t.Fatalf("%v", err)
		}
		if left := s.All("resourceslices"); len(left) > 0 {
			t.Errorf("the scheduler sees devices without counters: %v", left)
		}
		now = now.Add(dropsAgain)
	}
	if n := writes(); n != 2 {
		t.Errorf("%d writes of two slices of which the server drops a part", n)
	}
	s.Set(func() { s.Gated = "" })
	for range 2 {
		if err := publish(); err != nil {
			t.Fatal(err)
		}
	}
	if n := writes(); n != 4 || len(s.All("resourceslices")) != 2 {
		t.Errorf("%d writes, %v", n, s.All("resourceslices"))
	}
	// A gate that is turned off later.
	s.Set(func() { s.Gated = "taints" })
	want := slicesOfTwo()
	want[1].Spec.Devices[0].Taints = []resourcev1.DeviceTaint{{Key: "example.com/unhealthy", Effect: NoSchedule}}
	if _, err := c.PublishSlices(t.Context(), "gpus.example.com", want); !errors.Is(err, ErrDropped) || len(s.All("resourceslices")) != 1 {
		t.Errorf("%v; %v", err, s.All("resourceslices"))
	}
}

// Nothing is written to a server whose scheduler does it wrong, and everything when it has
// been replaced.
func TestServerThatIsTooOld(t *testing.T) {
	for release, fits := range map[string]bool{
		"v1.33.9": false, "v1.35.4": false, "v1.36.0": false, "v1.36.1+k3s1": false, "v1.36.1-eks-2a3b4c": false,
		"v1.36.2": true, "v1.36.2-gke.100": true, "v1.36.3": true, "v1.40.0": true, "2.0.0": true, "": true, "unknown": true,
	} {
		t.Run(release, func(t *testing.T) {
			s := newServer(t)
			s.Node("node-1", nil, nil)
			s.Set(func() { s.Release = release })
			c, _ := connect(t, s)
			_, err := c.PublishSlices(t.Context(), "gpus.example.com", slicesOfTwo())
			if fits != (err == nil) || fits == errors.Is(err, ErrUnfit) || fits != (len(s.All("resourceslices")) == 2) {
				t.Fatalf("%v; %v", err, s.All("resourceslices"))
			}
			if !fits && !strings.Contains(err.Error(), release+", and 1.36.2 is needed") {
				t.Error(err)
			}
			s.Set(func() { s.Release = "v1.36.3" })
			if _, err := c.PublishSlices(t.Context(), "gpus.example.com", slicesOfTwo()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Slices that somebody else deletes, changes or makes are told by name, once, and are
// again as they shall be.
func TestSlicesThatSomebodyElseChanges(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	publish := func(want ...string) {
		t.Helper()
		for i := range 2 {
			meddled, err := c.PublishSlices(t.Context(), "gpus.example.com", slicesOfTwo())
			if err != nil || !slices.Equal(meddled, want) {
				t.Errorf("%v, %v; want %v", meddled, err, want)
			}
			if want = nil; i > 0 {
				continue
			}
			have := s.All("resourceslices")
			for _, o := range have {
				if d := o["spec"].(map[string]any)["devices"].([]any); len(d) != 1 {
					t.Errorf("%v", o)
				}
			}
			if len(have) != 2 {
				t.Errorf("%v", have)
			}
		}
	}
	publish()
	s.Put("resourceslices", "", "00001", nil)
	publish("00001")
	edited := kubetest.Clone(s.All("resourceslices")[0])
	edited["spec"].(map[string]any)["devices"] = []any{}
	name := edited["metadata"].(map[string]any)["name"].(string)
	s.Put("resourceslices", "", name, edited)
	publish(name)
	another := kubetest.Clone(s.All("resourceslices")[0])
	s.Put("resourceslices", "", "00007", another)
	publish("00007")
	s.Put("resourceslices", "", "00000", nil)
	s.Put("resourceslices", "", "00001", nil)
	publish("00000", "00001")

	// Slices that nothing newer can follow, and that nobody can read.
	last := kubetest.Clone(s.All("resourceslices")[0])
	last["spec"].(map[string]any)["pool"].(map[string]any)["generation"] = math.MaxInt64
	name = last["metadata"].(map[string]any)["name"].(string)
	s.Put("resourceslices", "", name, last)
	odd := kubetest.Clone(last)
	odd["spec"].(map[string]any)["pool"] = "odd"
	s.Put("resourceslices", "", "00008", odd)
	publish(slices.Sorted(slices.Values([]string{name, "00008"}))...)

	// What a predecessor has left is nobody else's.
	s.Put("resourceslices", "", "00009", another)
	c, _ = connect(t, s)
	publish()
}

// What a server adds to a slice by itself, and a node whose name reads like an amount, are no
// reason to write the slice again.
func TestSliceThatTheServerCompletes(t *testing.T) {
	s := newServer(t)
	s.Node("1e123456", nil, nil)
	c, _ := connect(t, s, func(o *Options) { o.NodeName = "1e123456" })
	want := slicesOfTwo()[:1]
	want[0].Spec.NodeName, want[0].Spec.Pool = new("1e123456"), resourcev1.ResourcePool{Name: "1e123456/a100", ResourceSliceCount: 1}
	want[0].Spec.Devices[0].Taints = []resourcev1.DeviceTaint{{Key: "example.com/unhealthy", Effect: NoSchedule}}
	publish := func() {
		t.Helper()
		if meddled, err := c.PublishSlices(t.Context(), "gpus.example.com", want); err != nil || len(meddled) > 0 {
			t.Fatalf("%v, %v", meddled, err)
		}
	}
	publish()
	completed := kubetest.Clone(s.All("resourceslices")[0])
	device := completed["spec"].(map[string]any)["devices"].([]any)[0].(map[string]any)
	device["taints"].([]any)[0].(map[string]any)["timeAdded"] = "2026-01-02T03:04:05Z"
	s.Put("resourceslices", "", "00000", completed)
	publish()
	if n := len(s.Asked("create resourceslices")) + len(s.Asked("update resourceslices")) + len(s.Asked("delete resourceslices")); n != 1 {
		t.Errorf("%d writes of one slice", n)
	}
}

// One slice that cannot be written does not keep back the others.
func TestSliceThatIsRefused(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	refused := false
	s.Set(func() {
		s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
			if verb != "create" || resource != "resourceslices" || refused {
				return false
			}
			refused = true
			kubetest.Refuse(w, 422, "Invalid")
			return true
		}
	})
	want := []resourcev1.ResourceSlice{sliceOf("00000", "p", 2), sliceOf("00001", "p", 2)}
	if _, err := c.PublishSlices(t.Context(), "gpus.example.com", want); err == nil || !strings.Contains(err.Error(), "00000") {
		t.Errorf("%v", err)
	}
	if have := s.All("resourceslices"); len(have) != 1 {
		t.Errorf("%d slices, want the other one", len(have))
	}
}

// A pool gets a new generation when its slices are others or their number changes, since the
// scheduler takes those of one generation for all that there are.
func TestGenerations(t *testing.T) {
	slice := func(name string, slices, generation int64) resourcev1.ResourceSlice {
		s := sliceOf(name, "p", slices)
		s.Spec.Pool.Generation = generation
		return s
	}
	type all = []resourcev1.ResourceSlice
	two := all{slice("a", 2, 3), slice("b", 2, 3)}
	for _, c := range []struct {
		name       string
		have, want all
		generation int64
	}{
		{"the first", nil, all{slice("a", 1, 0)}, 1},
		{"as many", two, all{slice("a", 2, 0), slice("b", 2, 0)}, 3},
		{"one more", two, all{slice("a", 3, 0), slice("b", 3, 0), slice("c", 3, 0)}, 4},
		{"one more, and another name", two, all{slice("b", 3, 0), slice("c", 3, 0), slice("d", 3, 0)}, 4},
		{"one less", two, all{slice("a", 1, 0)}, 4},
		{"another in its place", two, all{slice("a", 2, 0), slice("c", 2, 0)}, 4},
		{"left between two", all{slice("a", 2, 4), slice("b", 2, 3)}, all{slice("a", 2, 0), slice("b", 2, 0)}, 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			other := sliceOf("other", "q", 1)
			other.Spec.Pool.Generation = 9
			have := map[string]*resourcev1.ResourceSlice{"other": &other}
			for i := range c.have {
				have[c.have[i].Name] = &c.have[i]
			}
			generations(c.want, have)
			for _, s := range c.want {
				if s.Spec.Pool.Generation != c.generation {
					t.Errorf("slice %s has generation %d, want %d", s.Name, s.Spec.Pool.Generation, c.generation)
				}
			}
		})
	}
}
