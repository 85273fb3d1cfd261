// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/extender"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

var _ extender.Books = (*Fleet)(nil)

const (
	memory = "example.com/gpu-mem"
	first  = "GPU-00000000-0000-0000-0000-000000000001"
	second = "GPU-00000000-0000-0000-0000-000000000002"
)

var start = time.Unix(1e9, 0)

// place has the API tell of a pod, and then asks for its place.
func place(ctx context.Context, f *Fleet, p *corev1.Pod, among []string) (string, map[string]string, error) {
	f.SetPod(p)
	return f.Place(ctx, string(p.UID), among)
}

// fits has the API tell of a pod, and then asks whether a node could take it.
func fits(ctx context.Context, f *Fleet, p *corev1.Pod, node string, without []string) (bool, error) {
	f.SetPod(p)
	return f.Fits(ctx, string(p.UID), node, without)
}

// says is a node with GPUs of 79 memory units, of which nothing is held.
func says(uuids ...string) *gpunode.Status {
	out := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for i, uuid := range uuids {
		out.GPUs = append(out.GPUs, gpunode.GPU{
			UUID: uuid, Index: i, Mode: "shared", API: "device-plugin",
			Resource: memory, Kind: piece.KindUnits, Total: 79, Free: 79, Largest: 79,
			Conditions: []gpunode.Condition{{Type: gpunode.Healthy, Status: gpunode.True},
				{Type: gpunode.Available, Status: gpunode.True}},
		})
	}
	return out
}

func node(name string, ready corev1.ConditionStatus) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	return n
}

// asks is a pod with one container that asks for memory units.
func asks(name, units string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name, UID: types.UID(name)}}
	p.Spec.Containers = []corev1.Container{container(memory, units)}
	return p
}

func container(of, n string) corev1.Container {
	requests := corev1.ResourceList{corev1.ResourceName(of): resource.MustParse(n)}
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: requests}}
}

// bound is the pod on a node, with n units of a GPU once it has reported.
func bound(p *corev1.Pod, on, uuid string, n int) *corev1.Pod {
	p = p.DeepCopy()
	p.Spec.NodeName = on
	has := corev1.ResourceStatus{Name: memory}
	for i := range n {
		has.Resources = append(has.Resources,
			corev1.ResourceHealth{ResourceID: corev1.ResourceID(timeslice.ID(gpu.UUID(uuid), i))})
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{AllocatedResourcesStatus: []corev1.ResourceStatus{has}}}
	return p
}

// known is a fleet of which all is listed.
func known(nodes ...string) *Fleet {
	f := New("example.com", func() time.Time { return start })
	for _, name := range nodes {
		f.SetNode(node(name, corev1.ConditionTrue))
		f.SetGPUNode(name, says(first, second))
	}
	for _, k := range []Kind{Nodes, Pods, GPUNodes} {
		f.Listed(k)
	}
	return f
}

// wantPlaced wants a pod on a node; where that is empty, a refusal with a part in its reason
// for node a.
func wantPlaced(t *testing.T, f *Fleet, p *corev1.Pod, on, part string) {
	t.Helper()
	got, refused, err := place(context.Background(), f, p, []string{"a"})
	if err != nil || got != on || !strings.Contains(refused["a"], part) {
		t.Fatalf("%s was placed on %q, refused %q, error %v; want %q and a reason with %q", p.Name, got, refused, err,
			on, part)
	}
}

func TestNothingIsAnsweredBeforeAllIsListed(t *testing.T) {
	f := New("example.com", func() time.Time { return start })
	f.SetNode(node("a", corev1.ConditionTrue))
	f.SetGPUNode("a", says(first))
	for _, k := range []Kind{Nodes, GPUNodes, Pods} {
		if on, _, err := place(context.Background(), f, asks("1", "8"), []string{"a"}); err == nil ||
			!strings.Contains(err.Error(), string(k)) {
			t.Errorf("before %s are listed: %q, error %v", k, on, err)
		}
		if _, err := fits(context.Background(), f, asks("1", "8"), "a", nil); err == nil {
			t.Errorf("before %s are listed Fits answers", k)
		}
		f.Listed(k)
	}
	wantPlaced(t, f, asks("1", "8"), "a", "")
}

func TestNothingIsReservedForARequestThatIsOver(t *testing.T) {
	f := known("a")
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if on, _, err := place(over, f, asks("1", "50"), []string{"a"}); err == nil {
		t.Errorf("placed on %q", on)
	}
	wantPlaced(t, f, asks("2", "79"), "a", "")
	wantPlaced(t, f, asks("3", "79"), "a", "")
}

// TestThirdPodWaitsForTheEndOfOne goes through the extender's protocol.
func TestThirdPodWaitsForTheEndOfOne(t *testing.T) {
	f := known("a")
	handler := extender.New(f, extender.Options{Deadline: time.Minute})
	filter := func(p *corev1.Pod) (nodes []string, failed map[string]string) {
		t.Helper()
		f.SetPod(p)
		body, err := json.Marshal(map[string]any{"pod": p, "nodenames": []string{"a"}})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest("POST", "/filter", bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		var said struct {
			NodeNames   []string
			FailedNodes map[string]string
		}
		if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || w.Code != 200 {
			t.Fatalf("answered %d %s: %v", w.Code, w.Body, err)
		}
		return said.NodeNames, said.FailedNodes
	}
	one, two, three := asks("1", "50"), asks("2", "50"), asks("3", "50")
	for i, p := range []*corev1.Pod{one, two} {
		if nodes, failed := filter(p); !reflect.DeepEqual(nodes, []string{"a"}) {
			t.Fatalf("pod %s: %v, %v", p.Name, nodes, failed)
		}
		f.SetPod(bound(p, "a", []string{first, second}[i], 50))
	}
	if nodes, failed := filter(three); len(nodes) != 0 || !strings.Contains(failed["a"], "largest free block is 29") {
		t.Fatalf("the third pod: %v, %v", nodes, failed)
	}
	if fits, err := fits(context.Background(), f, three, "a", []string{"2"}); !fits || err != nil {
		t.Errorf("with one evicted: %v, %v", fits, err)
	}
	if fits, err := fits(context.Background(), f, three, "a", nil); fits || err != nil {
		t.Errorf("with nobody evicted: %v, %v", fits, err)
	}
	ended := bound(two, "a", second, 50)
	ended.Status.Phase = corev1.PodSucceeded
	f.SetPod(ended)
	if nodes, failed := filter(three); len(nodes) != 1 {
		t.Fatalf("after an end: %v, %v", nodes, failed)
	}
}

// TestNodesInAnyOrder tells a Node and its GPUNode in both orders, and takes each away.
func TestNodesInAnyOrder(t *testing.T) {
	ready := func(f *Fleet) { f.SetNode(node("a", corev1.ConditionTrue)) }
	reports := func(f *Fleet) { f.SetGPUNode("a", says(first)) }
	for name, c := range map[string]struct {
		news []func(*Fleet)
		on   string
	}{
		"the Node first":    {[]func(*Fleet){ready, reports}, "a"},
		"the GPUNode first": {[]func(*Fleet){reports, ready}, "a"},
		"no GPUNode":        {[]func(*Fleet){ready}, ""},
		"no Node":           {[]func(*Fleet){reports}, ""},
		"the Node goes":     {[]func(*Fleet){ready, reports, func(f *Fleet) { f.DeleteNode("a") }}, ""},
		"the GPUNode goes":  {[]func(*Fleet){ready, reports, func(f *Fleet) { f.SetGPUNode("a", nil) }}, ""},
		"the kubelet is silent": {[]func(*Fleet){ready, reports,
			func(f *Fleet) { f.SetNode(node("a", corev1.ConditionUnknown)) }}, ""},
		"and comes back": {[]func(*Fleet){ready, reports,
			func(f *Fleet) { f.SetNode(node("a", corev1.ConditionUnknown)) },
			ready}, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			f := known()
			for _, tell := range c.news {
				tell(f)
			}
			part := ""
			if c.on == "" {
				part = "does not offer"
			}
			wantPlaced(t, f, asks("1", "8"), c.on, part)
		})
	}
}

// TestWhatGoesThroughDRAIsTheSchedulers has a node with one GPU through each API, where whole
// GPUs are extended resources of DRA.
func TestWhatGoesThroughDRAIsTheSchedulers(t *testing.T) {
	mixed := says(first, second)
	mixed.GPUs[1].API, mixed.GPUs[1].Resource, mixed.GPUs[1].Kind = "dra", "", ""
	mixed.Resources = []gpunode.Resource{{Name: memory, Total: 79, Free: 79, Largest: 79}}
	whole := asks("whole", "79")
	whole.Spec.Containers = []corev1.Container{container("example.com/gpu", "1")}
	both := asks("both", "79")
	both.Spec.Containers = append(both.Spec.Containers, container("example.com/gpu", "1"))
	f := known("a")
	wantPlaced(t, f, whole, "", "does not offer")
	f.SetGPUNode("a", mixed)
	wantPlaced(t, f, whole, "a", "")
	wantPlaced(t, f, both, "a", "")
	wantPlaced(t, f, asks("late", "1"), "", "is not known yet")
	both = bound(both, "a", first, 79)
	f.SetPod(both)
	wantPlaced(t, f, asks("late", "1"), "", "none is free")
	other := both.DeepCopy()
	other.UID = "other"
	other.Spec.NodeName = ""
	wantPlaced(t, f, other, "", "")
	for p, want := range map[*corev1.Pod]bool{whole: true, other: false, asks("late", "1"): false} {
		if fits, err := fits(context.Background(), f, p, "a", nil); fits != want || err != nil {
			t.Errorf("%s fits: %v, %v", p.UID, fits, err)
		}
	}
	wantPlaced(t, f, whole, "a", "")
	f.SetNode(node("a", corev1.ConditionUnknown))
	wantPlaced(t, f, whole, "", "not ready")
	f.SetNode(node("a", corev1.ConditionTrue))
	unready := *mixed
	unready.Conditions = nil
	f.SetGPUNode("a", &unready)
	wantPlaced(t, f, whole, "", "not ready")
}

// TestSuccessorKnowsWhatTheAPIKnows has a pod bound, a pod nominated and a pod that has
// ended. A fleet that is made anew refuses and takes the same.
func TestSuccessorKnowsWhatTheAPIKnows(t *testing.T) {
	starting, nominated, ended := asks("1", "79"), asks("2", "79"), bound(asks("3", "79"), "a", first, 79)
	starting.Spec.NodeName = "a"
	nominated.Status.NominatedNodeName = "a"
	ended.Status.Phase = corev1.PodFailed
	for _, pods := range [][]*corev1.Pod{{starting, nominated, ended}, {ended, nominated, starting}} {
		f := known("a")
		for _, p := range pods {
			f.SetPod(p)
		}
		wantPlaced(t, f, asks("4", "1"), "", "is not known yet")
		f.DeletePod("2")
		wantPlaced(t, f, asks("4", "1"), "a", "")
	}
}

func TestReadPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	p := bound(asks("1", "2"), "a", first, 2)
	sidecar := container("example.com/gpu", "1")
	sidecar.RestartPolicy = &always
	p.Spec.InitContainers = []corev1.Container{container(memory, "3"), sidecar, container("nvidia.com/gpu", "1")}
	p.Spec.Containers = append(p.Spec.Containers, container("cpu", "2"), container(memory, "0"))
	p.Status.NominatedNodeName = "b"
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{AllocatedResourcesStatus: []corev1.ResourceStatus{
		{Name: memory, Resources: []corev1.ResourceHealth{{ResourceID: first + "::1"}, {ResourceID: first + "::2"}}},
		{Name: "claim:x/y", Resources: []corev1.ResourceHealth{{ResourceID: "gpus.example.com/a/gpu-0"}}},
		{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: "0"}}},
	}}}
	want := placer.Pod{
		UID: "1", Namespace: "x", Name: "1", Node: "a", Nominated: "b",
		Containers: []placer.Container{
			{Init: true, Requests: map[string]int{memory: 3}},
			{Sidecar: true, Requests: map[string]int{"example.com/gpu": 1}},
			{Requests: map[string]int{memory: 2}},
		},
		Devices: []string{first + "::0", first + "::1", first + "::2"},
		Plain:   placer.Amounts{{Name: "cpu", N: 2000}, {Name: "nvidia.com/gpu", N: 1}, {Name: "pods", N: 1}},
	}
	if got := known().read(p); !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v\nwant %+v", got, want)
	}
	for phase, done := range map[corev1.PodPhase]bool{corev1.PodPending: false, corev1.PodRunning: false,
		corev1.PodSucceeded: true, corev1.PodFailed: true} {
		p.Status.Phase = phase
		if got := known().read(p); got.Done != done {
			t.Errorf("a pod that is %s: done is %v", phase, got.Done)
		}
	}
}

// An agent that was killed leaves its GPUNode as it was. Its kubelet has lost the devices,
// and a Node shows that.
func TestNothingIsPlacedWhereTheKubeletHasLostTheAgent(t *testing.T) {
	f := known("a")
	object := says(first, second)
	object.Resources = []gpunode.Resource{{Name: memory, Total: 158, Free: 158, Largest: 79}}
	f.SetGPUNode("a", object)
	counts := func(amounts map[string]string) {
		n := node("a", corev1.ConditionTrue)
		n.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("64")}
		for name, amount := range amounts {
			n.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse(amount)
		}
		f.SetNode(n)
	}
	wantPlaced(t, f, asks("1", "8"), "a", "")
	counts(map[string]string{memory: "158"})
	wantPlaced(t, f, asks("2", "8"), "a", "")
	counts(map[string]string{memory: "0", "nvidia.com/gpu": "4"})
	wantPlaced(t, f, asks("3", "8"), "", "not ready")
	counts(map[string]string{memory: "0", "example.com/gpu": "1"}) // a resource that the GPUNode does not name
	wantPlaced(t, f, asks("3", "8"), "", "not ready")
	counts(map[string]string{memory: "1"}) // it is back, and nearly all of its devices are withdrawn
	wantPlaced(t, f, asks("3", "8"), "a", "")
	counts(nil)
	wantPlaced(t, f, asks("4", "8"), "a", "")

	// What is left of an API that nothing is offered by any more says nothing.
	object = says(first)
	object.Resources = nil
	f.SetGPUNode("a", object)
	counts(map[string]string{memory: "0"})
	wantPlaced(t, f, asks("5", "8"), "a", "")
}

// TestOnlyTheUIDCounts: whoever reaches the door may name any pod, and say of it what he likes.
func TestOnlyTheUIDCounts(t *testing.T) { synctest.Test(t, onlyTheUIDCounts) }

func onlyTheUIDCounts(t *testing.T) {
	f := known("n")
	f.SetGPUNode("n", says(first))
	handler := extender.New(f, extender.Options{Deadline: 300 * time.Millisecond})
	post := func(p *corev1.Pod, nodes ...string) string {
		t.Helper()
		body, err := json.Marshal(map[string]any{"pod": p, "nodenames": nodes})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest("POST", "/filter", bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return strconv.Itoa(w.Code) + " " + w.Body.String()
	}
	want := func(what, got, part string) {
		t.Helper()
		if !strings.Contains(got, part) {
			t.Errorf("%s: %s, want %q", what, got, part)
		}
	}
	// A pod that there is not, bound with all devices.
	want("a pod that is made up", post(bound(asks("ghost", "79"), "n", first, 79), "n"), "503 "+errUnknown.Error())
	if _, at := f.books.Pod("ghost"); at != "" || len(f.refusedPods) > 0 {
		t.Errorf("the books have it on %q, and %d wait", at, len(f.refusedPods))
	}
	waits := asks("waits", "79")
	f.SetPod(waits)
	want("the pod", post(waits, "n"), `"NodeNames":["n"]`)
	// The same UID, and another pod.
	none := asks("waits", "1")
	none.Spec.Containers = nil
	for what, p := range map[string]*corev1.Pod{"without containers": none, "that asks for less": asks("waits", "1"),
		"that is bound": bound(asks("waits", "79"), "n", first, 79)} {
		want("the same UID on a pod "+what, post(p, "n"), `"NodeNames":["n"]`)
		f.SetPod(asks("other", "1"))
		want("beside it", post(asks("other", "1"), "n"), `"NodeNames":[]`)
	}
	// It is known while the request waits.
	late := asks("late", "1")
	answered := make(chan string)
	f.DeletePod("waits")
	go func() { answered <- post(late, "n") }()
	synctest.Wait() // until it waits
	f.SetPod(late)
	want("a pod that is shown meanwhile", <-answered, `"NodeNames":["n"]`)
}

// TestInvalidGPUNode: no pod is placed on a node until its GPUNode is valid, and the other nodes are not affected.
func TestInvalidGPUNode(t *testing.T) {
	f := known("a", "b")
	wrong := says(first)
	wrong.GPUs[0].Total = 1<<31 - 1
	if err := f.SetGPUNode("a", wrong); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if n := f.PassedOver(); n != 1 {
		t.Errorf("%d nodes are passed over", n)
	}
	on, refused, err := place(t.Context(), f, asks("1", "80"), []string{"a", "b"})
	if on != "" || err != nil || !strings.Contains(refused["a"], "gpus[0].total: 2147483647, and the most is") {
		t.Errorf("on %q, %v, %v", on, refused, err)
	}
	wantPlaced(t, f, asks("2", "79"), "", "is not valid")
	if on, _, err := place(t.Context(), f, asks("3", "79"), []string{"a", "b"}); on != "b" {
		t.Errorf("on %q, %v", on, err)
	}
	if err := f.SetGPUNode("a", says(first)); err != nil || f.PassedOver() != 0 {
		t.Errorf("%v, %d", err, f.PassedOver())
	}
	wantPlaced(t, f, asks("4", "79"), "a", "")
}

// The status of a spot pod names the same devices as a guaranteed one's would. It takes nothing from guaranteed pods.
func TestSpotPodsDevices(t *testing.T) {
	f := known()
	s := says(first)
	s.GPUs[0].Spot = &gpunode.Spot{Resource: memory + ".spot", Total: 79}
	f.SetNode(node("a", corev1.ConditionTrue))
	f.SetGPUNode("a", s)
	spot := func(name, units string) *corev1.Pod {
		p := asks(name, units)
		p.Spec.Containers = []corev1.Container{container(memory+".spot", units)}
		return p
	}
	has := bound(spot("s", "79"), "a", first, 79)
	has.Status.ContainerStatuses[0].AllocatedResourcesStatus[0].Name = memory + ".spot"
	f.SetPod(has)
	wantPlaced(t, f, spot("t", "1"), "", "none is free")
	wantPlaced(t, f, asks("g", "79"), "a", "")
}
