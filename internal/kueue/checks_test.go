// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/placer"
)

const (
	memory     = "example.com/gpu-mem"
	spotMemory = memory + ".spot"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// cluster is a cluster's nodes, with the real books.
type cluster struct {
	*placer.Books
	t      *testing.T
	labels map[string]map[string]string
	nodes  map[string]*gpunode.Status
	pods   map[string]placer.Pod // by UID
	// view is what Kueue's objects say.
	view View
	*Checks
}

// newCluster has nodes with GPUs of so many units on-prem, and one in the cloud.
func newCluster(t *testing.T, nodes map[string][]int) *cluster {
	c := &cluster{Books: placer.New(), t: t, labels: map[string]map[string]string{}, nodes: map[string]*gpunode.Status{}, pods: map[string]placer.Pod{}}
	c.Checks = NewChecks("example.com", c)
	for name, gpus := range nodes {
		site := "on-prem"
		if strings.HasPrefix(name, "cloud") {
			site = "cloud"
		}
		c.labels[name] = map[string]string{"site": site, corev1.LabelHostname: name}
		s := &gpunode.Status{HoldersIn: gpunode.InPods, Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
		for i, n := range gpus {
			s.GPUs = append(s.GPUs, gpunode.GPU{UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: i, API: string(ledger.DevicePlugin), Kind: piece.KindUnits, Resource: memory, Total: n,
				Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}})
		}
		s.Sum()
		c.nodes[name] = s
		c.SetNode(name, s, true)
	}
	c.view = View{
		Flavors: map[string]*Flavor{"here": {Name: "here", Labels: map[string]string{"site": "on-prem"}}, "there": {Name: "there", Labels: map[string]string{"site": "cloud"}}},
		Checks:  map[string]*Check{"room": {Name: "room", Controller: "example.com/gpu-placer"}, "full": {Name: "full", Controller: "example.com/gpu-placer-cloud"}, "other": {Name: "other", Controller: "somebody"}},
	}
	return c
}

// restart begins a new process, which knows what the API says.
func (c *cluster) restart() {
	c.Books = placer.New()
	c.Checks = NewChecks("example.com", c)
	for name, s := range c.nodes {
		c.SetNode(name, s, true)
	}
	for _, p := range c.pods {
		c.SetPod(p)
	}
}

func (c *cluster) Asks(p *corev1.PodSpec) (out []placer.Container, plain placer.Amounts) {
	cpu := map[string]int64{}
	for _, one := range p.Containers {
		for _, name := range []corev1.ResourceName{memory, spotMemory} {
			if n, asks := one.Resources.Requests[name]; asks {
				out = append(out, placer.Container{Requests: map[string]int{string(name): int(n.Value())}})
			}
		}
		cpu["cpu"] += one.Resources.Requests.Cpu().MilliValue()
	}
	return out, placer.NewAmounts(cpu)
}

func (c *cluster) Nodes() (out []*corev1.Node) {
	for _, name := range slices.Sorted(maps.Keys(c.labels)) {
		out = append(out, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: c.labels[name]}})
	}
	return out
}

func (c *cluster) Stuck(string) []string { return nil }

func (c *cluster) Members(id string) (pods, placed, owned int) {
	for _, p := range c.pods {
		if p.Hold != id || p.Ending || p.Done {
			continue
		}
		if pods++; p.Node != "" {
			placed++
		}
	}
	return pods, placed, pods
}

func (c *cluster) Hold(id, name string, groups []placer.Group) ([][]string, *placer.Refusal) {
	for _, g := range groups {
		if namespace, _, _ := strings.Cut(name, "/"); g.Namespace == "" || g.Namespace != namespace {
			c.t.Errorf("room for pods of the namespace %q is looked for under the name %s", g.Namespace, name)
		}
	}
	at, err := c.Books.Hold(id, name, groups, start)
	no := new(placer.Refusal)
	if errors.As(err, &no) {
		return nil, no
	}
	return at, nil
}

func (c *cluster) Open(id, name string, groups []placer.Group, guests []placer.Guest) ([]string, [][]string, *placer.Refusal) {
	ends, at, err := c.Books.Open(id, name, groups, guests, start)
	no := new(placer.Refusal)
	if errors.As(err, &no) {
		return nil, nil, no
	}
	return ends, at, nil
}

func (c *cluster) Might(groups []placer.Group, stay func(string) bool) bool {
	return c.Books.Might(groups, stay, start)
}

// job adds a workload with quota of a flavor and a check, whose sets have so many pods of so many
// units each.
func (c *cluster) job(name, flavor, check string, sets ...[2]int) *Workload {
	w := &Workload{UID: "u-" + name, Namespace: "train", Name: name, Created: start.Add(time.Duration(len(c.view.Workloads)) * time.Second), Reserved: true,
		Checks: []CheckState{{Name: check, State: Pending, LastTransitionTime: metav1.NewTime(start)}, {Name: "other", State: Pending}}}
	for i, s := range sets {
		pod := corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}
		if s[1] > 0 {
			pod.Containers[0].Resources.Requests = corev1.ResourceList{memory: *resource.NewQuantity(int64(s[1]), resource.DecimalSI)}
		}
		w.Sets = append(w.Sets, Set{Name: fmt.Sprint("set-", i), N: s[0], Pod: pod, Flavors: []string{flavor}})
	}
	c.view.Workloads = append(c.view.Workloads, w)
	return w
}

// decide has workloads told, as the API server would note it, and returns who was told what.
func (c *cluster) decide(after time.Duration) (told []string) {
	now := start.Add(after)
	for _, a := range c.Decide(&c.view, now) {
		w, says := a.Workload, a.Workload.Name
		if a.Changes {
			if w.Annotations == nil {
				w.Annotations = map[string]string{}
			}
			for key, value := range c.annotations(&c.view, w, a.Refuses) {
				if delete(w.Annotations, key); value != nil {
					w.Annotations[key] = *value
				}
			}
		}
		if w.Woken = a.Wakes != ""; w.Woken {
			says += " woken"
		}
		for i := range w.Checks {
			if w.Checks[i].Name == a.State.Name {
				w.Checks[i] = a.State
				says += " " + a.State.State
			}
		}
		told = append(told, says)
	}
	return told
}

// place places a pod of so many units.
func (c *cluster) place(uid string, is metav1.ObjectMeta, units int) (at string, err error) {
	p := placer.Pod{
		UID: uid, Hold: HoldOf("example.com")(&corev1.Pod{ObjectMeta: is}),
		Containers: []placer.Container{{Requests: map[string]int{memory: units}}},
	}
	return c.Place(c.t.Context(), p, slices.Sorted(maps.Keys(c.nodes)), start)
}

func (c *cluster) want(w *Workload, state, message string) {
	c.t.Helper()
	if s := w.Checks[0]; s.State != state || !strings.Contains(s.Message, message) {
		c.t.Fatalf("%s is %s: %q, want %s: %q", w.Name, s.State, s.Message, state, message)
	}
	if s := w.Checks[1]; s.State != Pending || s.Message != "" {
		c.t.Fatalf("somebody else's check of %s was answered: %+v", w.Name, s)
	}
}

// quota is what Kueue does: it gives a workload quota of a flavor, with its check. Where the flavor is
// empty, it takes the quota and the checks away.
func (c *cluster) quota(w *Workload, flavor, check string) {
	c.t.Helper()
	if allowed, limited := w.Annotations[allowedFlavors]; limited && flavor != "" && !slices.Contains(strings.Split(allowed, ","), flavor) {
		c.t.Fatalf("%s may have %q, not %s", w.Name, allowed, flavor)
	}
	w.Reserved, w.Evicted, w.Woken, w.Admitted, w.Checks = flavor != "", false, false, false, nil
	for i := range w.Sets {
		w.Sets[i].Flavors = nil
	}
	if flavor == "" {
		return
	}
	w.Checks = []CheckState{{Name: check, State: Pending, LastTransitionTime: metav1.NewTime(start)}, {Name: "other", State: Pending}}
	for i := range w.Sets {
		w.Sets[i].Flavors = []string{flavor}
	}
}

func TestAdmittedMeansPlaceable(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79, 79}, "b": {79}, "cloud-1": {79, 79}})
	one := c.job("one", "here", "room", [2]int{2, 50})
	two := c.job("two", "here", "room", [2]int{1, 50}, [2]int{2, 20})
	three := c.job("three", "here", "room", [2]int{1, 50})
	none := c.job("none", "here", "room", [2]int{3, 0})
	c.decide(0)
	c.want(one, Ready, "there is room: ")
	c.want(two, Ready, "there is room: ")
	c.want(three, Retry, "the largest free block of example.com/gpu-mem is 29")
	c.want(none, Ready, "asks for nothing")
	if told := c.decide(0); told != nil {
		t.Errorf("told again: %q", told)
	}
	// Kueue takes its quota away, and sets its check back.
	three.Evicted, three.Checks[0].State = true, Pending
	if told := c.decide(0); told != nil {
		t.Errorf("while it is evicted, told: %q", told)
	}
	// It is kept from the flavor, and so has no quota there while it waits.
	if is := three.Annotations; is["example.com/gpu.refused-flavors"] != "here" || is[allowedFlavors] != "there" {
		t.Errorf("it says %v", is)
	}
	c.quota(three, "", "")
	if told := c.decide(0); told != nil {
		t.Errorf("without room, told: %q", told)
	}
	// Room is held for it before it has quota.
	one.Over = true
	if told := c.decide(0); !slices.Equal(told, []string{"three woken"}) {
		t.Errorf("told: %q", told)
	}
	if _, limited := three.Annotations[allowedFlavors]; limited {
		t.Errorf("it is kept from %v", three.Annotations)
	}
	four := c.job("four", "here", "room", [2]int{2, 50})
	c.decide(time.Second)
	c.want(four, Retry, "room for 1 of 2 pods")
	c.quota(three, "here", "room")
	c.decide(2 * time.Second)
	c.want(three, Ready, "there is room: ")
	one.Over, one.Checks[0].State = false, Pending
	c.decide(2 * time.Second)
	c.want(one, Retry, "room for 1 of 2 pods")
}

// What is held early is given up where no quota comes, and meanwhile Kueue is asked again. A new
// process asks once more, as nobody knows whether Kueue has heard.
func TestEarlyHold(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}})
	first := c.job("first", "here", "room", [2]int{1, 50})
	second := c.job("second", "here", "room", [2]int{1, 50})
	third := c.job("third", "here", "room", [2]int{1, 50})
	c.decide(0)
	for _, w := range []*Workload{second, third} {
		c.want(w, Retry, "none of 1 nodes")
		c.quota(w, "", "")
	}
	first.Over = true
	says := false
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{
		{0, []string{"second woken"}}, {again - time.Second, nil}, {again, []string{"second woken"}}, {2 * again, []string{"second woken"}},
		{early - time.Second, []string{"second woken"}}, {early, []string{"third woken"}}, {early + time.Second, nil},
	} {
		if told := c.decide(step.after); !slices.Equal(told, step.want) {
			t.Fatalf("after %s: told %q, want %q", step.after, told, step.want)
		}
		// What Kueue takes for the like of it may be passed over, so it is told in two ways by turns.
		if _, named := second.Annotations[allowedFlavors]; len(step.want) > 0 && step.want[0] == "second woken" {
			if named != says {
				t.Errorf("after %s its flavors are named: %v, want %v", step.after, named, says)
			}
			says = !says
		}
	}
	third.Woken = false
	c.Checks = NewChecks("example.com", c)
	if told := c.decide(early + 2*time.Second); !slices.Equal(told, []string{"third woken"}) {
		t.Errorf("a new process tells: %q", told)
	}
}

// Which flavors a workload may have somebody else says: Kueue of its variants. And without its
// feature gate Kueue does not listen. Such a workload is tried again later.
func TestFlavorsThatAreNotKept(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {20}, "cloud-1": {79}})
	variant := c.job("variant", "here", "room", [2]int{1, 50})
	variant.Annotations = map[string]string{allowedFlavors: "here"}
	deaf := c.job("deaf", "here", "room", [2]int{1, 50})
	c.decide(0)
	c.want(variant, Retry, "none of 1 nodes")
	if is := variant.Annotations; len(is) != 1 || is[allowedFlavors] != "here" {
		t.Errorf("it says %v", is)
	}
	// The workload had changed when its state was to be written, so that it has the same quota yet.
	deaf.Checks[0] = CheckState{Name: "room", State: Pending}
	c.decide(0)
	c.want(deaf, Retry, "the largest free block of example.com/gpu-mem is 20, on a")
	if s := deaf.Checks[0]; s.RequeueAfterSeconds != nil || strings.Contains(s.Message, "feature gate") {
		t.Errorf("after a state that was not written it is told %+v", s)
	}
	deaf.Checks[0], deaf.QuotaAt = CheckState{Name: "room", State: Pending}, start.Add(time.Second)
	c.decide(time.Second)
	c.want(deaf, Retry, "is its feature gate ConcurrentAdmission on?")
	for _, w := range []*Workload{variant, deaf} {
		if after := w.Checks[0].RequeueAfterSeconds; after == nil || *after != int32(later.Seconds()) {
			t.Errorf("%s is tried again after %v s", w.Name, after)
		}
	}
}

// A set of pods has its room or no other one has, and pods use what is held for their
// workload alone.
func TestPodsOfAHold(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	one := c.job("one", "here", "room", [2]int{1, 60}, [2]int{1, 60})
	c.decide(0)
	c.want(one, Ready, "a × 1, b × 1")
	u := one.Checks[0].PodSetUpdates
	if len(u) != 2 || u[0].Annotations["example.com/gpu.hold"] != "u-one" || u[0].NodeSelector[corev1.LabelHostname] == u[1].NodeSelector[corev1.LabelHostname] {
		t.Errorf("pods get %+v", u)
	}
	place := func(uid string, meta metav1.ObjectMeta) string {
		at, _ := c.place(uid, meta, 60)
		return at
	}
	if at := place("p-1", metav1.ObjectMeta{Namespace: "train"}); at != "" {
		t.Errorf("a pod of nobody has room on %s", at)
	}
	told := map[string]string{"example.com/gpu.hold": "u-one"}
	if at := place("p-2", metav1.ObjectMeta{Namespace: "web", Annotations: told}); at != "" {
		t.Errorf("a pod of another namespace has room on %s", at)
	}
	first := place("p-3", metav1.ObjectMeta{Namespace: "train", Annotations: told})
	second := place("p-4", metav1.ObjectMeta{Namespace: "train", Annotations: told})
	if first == "" || second == "" || first == second {
		t.Errorf("its own pods are on %q and %q", first, second)
	}
}

// A process that begins anew holds what workloads say, before anything is answered.
func TestHoldsOutliveTheProcess(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	one := c.job("one", "here", "room", [2]int{2, 50})
	c.decide(0)
	c.want(one, Ready, "there is room")
	before := c.view
	next := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	next.view = before
	two := next.job("two", "here", "room", [2]int{1, 50})
	next.Follow(&next.view, start)
	if ids := next.Books.Holds(); !slices.Equal(ids, []string{"kueue/train/u-one"}) || next.Books.Lost(ids[0]) != nil {
		t.Errorf("held are %v", ids)
	}
	next.decide(0)
	next.want(two, Retry, "the largest free block")
	next.want(one, Ready, "there is room")
	one.Reserved = false
	next.quota(two, "", "")
	next.decide(0)
	next.quota(two, "here", "room")
	next.decide(0)
	next.want(two, Ready, "there is room")
}

// A cloud is for what has no room on-prem.
func TestCloud(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79, 79}})
	large := c.job("large", "there", "full", [2]int{2, 50})
	c.decide(0)
	c.want(large, Ready, "room for 1 of 2 pods")

	// There is room and no quota. Nobody else gets that room for a while.
	poor := c.job("poor", "there", "full", [2]int{1, 50})
	other := c.job("other", "there", "full", [2]int{1, 50})
	c.decide(0)
	c.want(poor, Pending, "there is room on-prem, and no quota yet")
	c.want(other, Ready, "on-prem, none of 1 nodes has room")
	c.decide(pause)
	c.want(poor, Retry, "begins again with the first flavor")
	c.quota(poor, "", "")
	c.decide(pause)
	c.quota(poor, "there", "full")
	c.decide(forQuota)
	c.want(poor, Ready, "there is room and no quota")
	if ids := c.Books.Holds(); len(ids) > 0 {
		t.Errorf("held are %q", ids)
	}

	// There was none, and now there is.
	late := c.job("late", "there", "full", [2]int{1, 50})
	late.Annotations = map[string]string{"example.com/gpu.refused-flavors": "here", allowedFlavors: "there"}
	c.decide(0)
	c.want(late, Retry, "begins again with the first flavor")
	c.quota(late, "here", "room")
	c.decide(0)
	c.want(late, Ready, "there is room: a × 1")
}

// Room in another cloud does not keep a workload off this one.
func TestTwoClouds(t *testing.T) {
	for cloud, want := range map[bool]string{true: Ready, false: Retry} {
		c := newCluster(t, map[string][]int{"a": {20}, "cloud-1": {79}, "other": {79}})
		c.labels["other"]["site"] = "other"
		c.view.Flavors["elsewhere"] = &Flavor{Name: "elsewhere", Labels: map[string]string{"site": "other"}, Cloud: cloud}
		w := c.job("one", "there", "full", [2]int{1, 50})
		w.Annotations = map[string]string{"example.com/gpu.refused-flavors": "here", allowedFlavors: "there,elsewhere"}
		c.decide(0)
		if got := w.Checks[0].State; got != want {
			t.Errorf("where the other one is a cloud, %v, it is %s, want %s", cloud, got, want)
		}
	}
}

// Nodes are those of the flavors, and of the pods' own word.
func TestNodesOfAWorkload(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	w := c.job("one", "here", "room", [2]int{1, 50})
	w.Sets[0].Pod.NodeSelector = map[string]string{corev1.LabelHostname: "b"}
	c.decide(0)
	c.want(w, Ready, "there is room: b × 1")
	v := c.job("two", "here", "room", [2]int{1, 50})
	v.Sets[0].Pod.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"a"}}}}}}}}
	c.decide(0)
	c.want(v, Retry, "none of 1 nodes")
}

// What is read of objects, and what is written, leaves the rest as it is.
func TestObjects(t *testing.T) {
	object := func(of map[string]any) *unstructured.Unstructured { return &unstructured.Unstructured{Object: of} }
	o := object(map[string]any{
		"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
		"metadata": map[string]any{"namespace": "train", "name": "w", "uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-01-02T03:04:05Z",
			"ownerReferences": []any{map[string]any{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job", "controller": true}}},
		"spec": map[string]any{"active": true, "podSets": []any{map[string]any{"name": "main", "count": int64(5), "template": map[string]any{"spec": map[string]any{
			"containers": []any{map[string]any{"name": "main", "resources": map[string]any{"requests": map[string]any{memory: "40"}}}}}}}}},
		"status": map[string]any{
			"conditions": []any{map[string]any{"type": "QuotaReserved", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}},
			"admission": map[string]any{"clusterQueue": "q", "podSetAssignments": []any{map[string]any{"name": "main", "count": int64(4),
				"flavors": map[string]any{memory: "here", "cpu": "here"}}}},
			"reclaimablePods": []any{map[string]any{"name": "main", "count": int64(1)}},
			"admissionChecks": []any{map[string]any{"name": "other", "state": "Ready", "message": "m", "lastTransitionTime": "2026-01-02T03:04:05Z"},
				map[string]any{"name": "room", "state": "Pending", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}}}})
	w, err := ReadWorkload(o)
	if err != nil {
		t.Fatal(err)
	}
	if s := w.Sets[0]; !w.Reserved || w.Admitted || w.Over || s.N != 3 || !slices.Equal(s.Flavors, []string{"here"}) || len(w.Checks) != 2 {
		t.Errorf("read %+v", w)
	}
	if again, err := w.woken("there is room", start); err != nil {
		t.Error(err)
	} else if again, err := ReadWorkload(again); err != nil || !again.Woken || !again.Reserved || w.Woken {
		t.Errorf("%+v, %v", again, err)
	}
	seconds := int32(15)
	next, err := w.with(CheckState{Name: "room", State: Retry, Message: "no", LastTransitionTime: metav1.NewTime(start), RequeueAfterSeconds: &seconds})
	if err != nil {
		t.Fatal(err)
	}
	checks, _, _ := unstructured.NestedSlice(next.Object, "status", "admissionChecks")
	if len(checks) != 2 || checks[0].(map[string]any)["state"] != "Ready" || checks[1].(map[string]any)["state"] != "Retry" || fmt.Sprint(checks[1].(map[string]any)["requeueAfterSeconds"]) != "15" {
		t.Errorf("written are %v", checks)
	}
	unstructured.RemoveNestedField(next.Object, "status", "admissionChecks")
	before := o.DeepCopy()
	unstructured.RemoveNestedField(before.Object, "status", "admissionChecks")
	if !maps.EqualFunc(next.Object, before.Object, func(x, y any) bool { return fmt.Sprint(x) == fmt.Sprint(y) }) || next.GetResourceVersion() != "7" {
		t.Errorf("the rest became %v", next.Object)
	}
	c, err := ReadCheck(object(map[string]any{"kind": "AdmissionCheck", "metadata": map[string]any{"name": "room"}, "spec": map[string]any{"controllerName": "example.com/gpu-placer"}}))
	if err != nil || c.Active {
		t.Fatalf("%+v, %v", c, err)
	}
	if now, err := c.active(start); err != nil {
		t.Error(err)
	} else if c, err = ReadCheck(now); err != nil || !c.Active {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := ReadWorkload(object(map[string]any{"kind": "Workload", "metadata": map[string]any{"namespace": "a", "name": "b"}, "spec": "?"})); err == nil || !strings.Contains(err.Error(), "Workload a/b") {
		t.Errorf("nonsense was read: %v", err)
	}
}

// A workload that runs in the cloud comes back when there is room, if its pods say that they
// checkpoint, and no other does.
func TestCheckpointingWorkloadComesBack(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79, 79}})
	local := c.job("local", "here", "room", [2]int{1, 60})
	movable := c.job("movable", "there", "full", [2]int{1, 50})
	second := c.job("second", "there", "full", [2]int{1, 20})
	fixed := c.job("fixed", "there", "full", [2]int{1, 40})
	for _, w := range []*Workload{movable, second} {
		w.Sets[0].Labels = map[string]string{"example.com/gpu.checkpoints": "true"}
	}
	c.decide(0)
	c.want(local, Ready, "a × 1")
	for _, w := range []*Workload{movable, second, fixed} {
		c.want(w, Ready, "on-prem, none of 1 nodes has room")
		w.Admitted = true
	}
	for _, step := range []struct {
		what  string
		after time.Duration
		do    func()
		want  []string
	}{
		{"on-prem is full for the one, and the other has not been away for long", stay - time.Second, func() {}, nil},
		{"there is room for both, and still too soon", stay - time.Second, func() { local.Over = true }, nil},
		{"somebody else has the room first", stay, func() { c.job("next", "here", "room", [2]int{1, 60}) }, []string{"next Ready"}},
		{"it has ended, and both come back", stay, func() { c.view.Workloads[4].Over = true }, []string{"movable Retry", "second Retry"}},
		{"their room is theirs while their pods end", stay + early - time.Second, func() {
			movable.Evicted, movable.Checks[0].State, second.Evicted, second.Checks[0].State = true, Pending, true, Pending
		}, nil},
		{"for as long as that takes", stay + 2*early - 2*time.Second, func() { c.job("late", "here", "room", [2]int{1, 60}) }, []string{"late Retry"}},
		{"and until they have quota", stay + 2*early - time.Second, func() { c.quota(movable, "", "") }, []string{"movable woken"}},
		{"which they get", stay + 2*early, func() { c.quota(movable, "here", "room") }, []string{"movable Ready"}},
		{"who does not checkpoint stays", time.Hour, func() { movable.Over, second.Over = true, true; c.view.Workloads[5].Over = true }, nil},
	} {
		step.do()
		if told := c.decide(step.after); !slices.Equal(told, step.want) {
			t.Fatalf("%s: told %q, want %q", step.what, told, step.want)
		}
	}
	c.want(fixed, Ready, "on-prem, none of 1 nodes has room")
}

// dropping counts holds that are given up.
type dropping struct {
	*cluster
	n int
}

func (d *dropping) Drop(id string) {
	d.n++
	d.cluster.Drop(id)
}

// TestUnknownOutcome has an answer sent of which nobody knows whether the server took it. Until the
// workload is told of in another version its room is not given up, not even for a moment: others
// could have it, and the workload turn out to have been told that it has.
func TestUnknownOutcome(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}})
	books := &dropping{cluster: c}
	checks := NewChecks("example.com", books)
	tell := func(version, state string) []Answer {
		o := queued("one", 79)
		o.SetResourceVersion(version)
		w, err := ReadWorkload(o)
		if err != nil {
			t.Fatal(err)
		}
		w.Checks[0].State = state
		return checks.Decide(&View{Workloads: []*Workload{w}, Flavors: c.view.Flavors, Checks: c.view.Checks}, start)
	}
	for range 2 {
		if out := tell("1", Pending); len(out) != 1 || out[0].State.State != Ready {
			t.Fatalf("it is answered %+v", out)
		}
	}
	if out := tell("2", Ready); len(out) != 0 || books.n != 0 {
		t.Errorf("it was carried out, and the answer is %+v; given up %d times", out, books.n)
	}
	// It was not, and somebody else has written the workload.
	checks = NewChecks("example.com", books)
	tell("1", Pending)
	if tell("2", Pending); books.n != 1 {
		t.Errorf("given up %d times, want once", books.n)
	}
}
