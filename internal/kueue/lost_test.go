// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/fleet"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// site is a cluster as the placer's process sees it: the API's nodes and pods, the real books, and checks.
type site struct {
	t     *testing.T
	fleet *fleet.Fleet
	*Checks
	nodes map[string]*corev1.Node
	view  View
	now   time.Time
	seq   int
}

// newSite has nodes with one GPU of 79 units each, on-prem or, by their names, in a cloud.
func newSite(t *testing.T, nodes ...string) *site {
	s := &site{t: t, nodes: map[string]*corev1.Node{}, now: start}
	for _, name := range nodes {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Labels = map[string]string{"site": "on-prem", corev1.LabelHostname: name}
		if strings.HasPrefix(name, "cloud") {
			n.Labels["site"] = "cloud"
		}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		s.nodes[name] = n
	}
	s.view = View{
		Flavors: map[string]*Flavor{
			"here":  {Name: "here", Labels: map[string]string{"site": "on-prem"}},
			"there": {Name: "there", Labels: map[string]string{"site": "cloud"}, Cloud: true},
		},
		Checks: map[string]*Check{
			"room": {Name: "room", Controller: "example.com/gpu-placer"},
			"full": {Name: "full", Controller: "example.com/gpu-placer-cloud"},
		},
	}
	s.begin()
	return s
}

// begin begins a process, which knows what the API says.
func (s *site) begin() {
	s.fleet = fleet.New("example.com", func() time.Time { return s.now })
	holder := fleet.HoldFor(s.fleet, HoldOf("example.com"))
	s.Checks = NewChecks("example.com", holder)
	for name := range s.nodes {
		s.rise(name, s.nodes[name])
	}
	for _, k := range []fleet.Kind{fleet.Nodes, fleet.Pods, fleet.GPUNodes} {
		s.fleet.Listed(k)
	}
	holder.Listed()
}

// rise has a node, and an agent that is ready.
func (s *site) rise(name string, n *corev1.Node) {
	s.nodes[name] = n
	s.fleet.SetNode(n)
	s.agent(name, gpunode.True)
}

// agent writes a GPUNode with one GPU.
func (s *site) agent(name string, ready gpunode.ConditionStatus) {
	gpu := gpunode.GPU{
		UUID: "GPU-" + name, API: string(ledger.DevicePlugin), Kind: piece.KindUnits, Resource: memory, Total: 79,
		Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}},
	}
	says := &gpunode.Status{
		HoldersIn: gpunode.InPods, GPUs: []gpunode.GPU{gpu},
		Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: ready}},
	}
	says.Sum()
	if err := s.fleet.SetGPUNode(name, says); err != nil {
		s.t.Fatal(err)
	}
}

// job adds a workload with quota, whose sets have so many pods of 60 units each.
func (s *site) job(name string, sets ...int) *Workload {
	main := corev1.Container{Name: "main"}
	main.Resources.Requests = corev1.ResourceList{memory: resource.MustParse("60")}
	w := &Workload{
		UID: "u-" + name, Namespace: "train", Name: name, Reserved: true,
		Created: start.Add(time.Duration(len(s.view.Workloads)) * time.Second),
		Checks:  []CheckState{{Name: "room", State: Pending, LastTransitionTime: metav1.NewTime(start)}},
	}
	for i, n := range sets {
		pod := corev1.PodSpec{Containers: []corev1.Container{main}}
		w.Sets = append(w.Sets, Set{Name: fmt.Sprint("set-", i), N: n, Pod: pod, Flavors: []string{"here"}})
	}
	s.view.Workloads = append(s.view.Workloads, w)
	return w
}

// decide has workloads told after a while, and returns who was told what. Who is Ready is admitted, and who is
// Retry loses its quota, as Kueue does it.
func (s *site) decide(after time.Duration) (told []string) {
	s.now = s.now.Add(after)
	for _, a := range s.Decide(&s.view, s.now) {
		a.Workload.Checks[0] = a.State
		a.Workload.Admitted = a.State.State == Ready
		a.Workload.Evicted = a.State.State == Retry
		told = append(told, a.Workload.Name+" "+a.State.State)
	}
	return told
}

// admit gives a workload that was evicted its quota again.
func (s *site) admit(w *Workload) {
	w.Evicted, w.Checks[0] = false, CheckState{Name: "room", State: Pending, LastTransitionTime: metav1.NewTime(s.now)}
}

// pod makes a pod of a workload's first set, which its node selector may keep to one node, and asks for a place
// among the nodes that a scheduler would ask for. Where there is none, the scheduler says so. A pod has its
// devices at once.
func (s *site) pod(w *Workload) *corev1.Pod {
	s.t.Helper()
	s.seq++
	u := w.Checks[0].PodSetUpdates[0]
	p := &corev1.Pod{Spec: *w.Sets[0].Pod.DeepCopy()}
	p.Name, p.Namespace, p.Annotations = fmt.Sprint(w.Name, "-", s.seq), w.Namespace, u.Annotations
	p.UID, p.Spec.NodeSelector = types.UID(p.Name), u.NodeSelector
	s.fleet.SetPod(p)
	var among []string
	for name, n := range s.nodes {
		if !n.Spec.Unschedulable && n.Spec.Taints == nil && has(n.Labels, u.NodeSelector) {
			among = append(among, name)
		}
	}
	slices.Sort(among)
	at, _, err := s.fleet.Place(s.t.Context(), string(p.UID), among)
	if err != nil {
		s.t.Fatal(err)
	}
	p = p.DeepCopy()
	if p.Spec.NodeName = at; at == "" {
		p.Status = noNode()
	} else {
		of := corev1.ResourceStatus{Name: memory}
		for i := range 60 {
			id := timeslice.ID(gpu.UUID("GPU-"+at), i)
			of.Resources = append(of.Resources, corev1.ResourceHealth{ResourceID: corev1.ResourceID(id)})
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{AllocatedResourcesStatus: []corev1.ResourceStatus{of}}}
	}
	s.fleet.SetPod(p)
	return p
}

// noNode is what a scheduler says of a pod for which it has none.
func noNode() corev1.PodStatus {
	return corev1.PodStatus{Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable},
	}}
}

// want wants a check to be in a state, with a part in its message.
func (s *site) want(w *Workload, state, message string) {
	s.t.Helper()
	if c := w.Checks[0]; c.State != state || !strings.Contains(c.Message, message) {
		s.t.Fatalf("%s is %s: %q, want %s: %q", w.Name, c.State, c.Message, state, message)
	}
}

// change writes a Node.
func (s *site) change(name string, to func(*corev1.Node)) {
	n := s.nodes[name].DeepCopy()
	to(n)
	s.nodes[name] = n
	s.fleet.SetNode(n)
}

func taint(effect corev1.TaintEffect) func(*site) {
	return func(s *site) {
		taints := []corev1.Taint{{Key: "maintenance", Effect: effect}}
		s.change("a", func(n *corev1.Node) { n.Spec.Taints = taints })
	}
}

// falls are the ways in which the node "a" stops to take pods.
var falls = map[string]func(*site){
	"cordoned":           func(s *site) { s.change("a", func(n *corev1.Node) { n.Spec.Unschedulable = true }) },
	"tainted NoSchedule": taint(corev1.TaintEffectNoSchedule),
	"tainted NoExecute":  taint(corev1.TaintEffectNoExecute),
	"gone": func(s *site) {
		delete(s.nodes, "a")
		s.fleet.DeleteNode("a")
		if err := s.fleet.SetGPUNode("a", nil); err != nil {
			s.t.Error(err)
		}
	},
	"without its agent": func(s *site) { s.agent("a", gpunode.False) },
}

// A node that takes no pods any more loses the seats that nobody sits on, whether its pods are to come, or
// were drained: they are looked for elsewhere, and kept there. A new process does the same.
func TestSeatsLeaveANode(t *testing.T) {
	for name, fall := range falls {
		for when, drained := range map[string]bool{"before its pods come": false, "and drained": true} {
			for who, again := range map[string]bool{"one process": false, "a new process": true} {
				t.Run(name+", "+when+", "+who, func(t *testing.T) {
					s := newSite(t, "a", "b", "c")
					w := s.job("wide", 2)
					s.decide(0)
					s.want(w, Ready, "there is room: a × 1, b × 1")
					told := fmt.Sprint(w.Checks[0].PodSetUpdates)
					var pods []*corev1.Pod
					if drained {
						pods = []*corev1.Pod{s.pod(w), s.pod(w)}
					}
					if fall(s); again && !drained {
						s.begin()
						fall(s)
					}
					s.decide(time.Second)
					for _, p := range pods {
						if p.Spec.NodeName == "a" {
							s.fleet.DeletePod(string(p.UID))
						}
					}
					s.decide(time.Second)
					s.want(w, Ready, "there is room: b × 1, c × 1")
					if is := fmt.Sprint(w.Checks[0].PodSetUpdates); is != told {
						t.Errorf("Kueue refuses another word to pods: %s, and before %s", is, told)
					}
					other := s.job("other", 1)
					s.decide(time.Second)
					s.want(other, Retry, "has room")
					says := strings.Contains(other.Checks[0].Message, "; 1 nodes are cordoned, or have taints")
					if says != (name != "gone" && name != "without its agent") {
						t.Errorf("it is told %q", other.Checks[0].Message)
					}
					if p := s.pod(w); p.Spec.NodeName != "c" && drained {
						t.Errorf("its next pod is on %q", p.Spec.NodeName)
					}
				})
			}
		}
	}
}

// A pod that may go to one node alone, by what it was told, has no place once that takes none: its job
// begins again after a while, elsewhere. One whose pods all run is left alone, and so is one whose node
// comes back.
func TestStrandedJobBeginsAgain(t *testing.T) {
	for name, fall := range falls {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, "a", "b")
			w := s.job("one", 1)
			s.decide(0)
			s.want(w, Ready, "there is room: a × 1")
			p := s.pod(w)
			before := s.nodes["a"]
			fall(s)
			for range 3 {
				if told := s.decide(strand); told != nil {
					t.Fatalf("its pod runs, and it is told %q", told)
				}
			}
			s.fleet.DeletePod(string(p.UID))
			if told := s.decide(strand); told != nil {
				t.Fatalf("no pod of it waits, and it is told %q", told)
			}
			if p = s.pod(w); p.Spec.NodeName != "" {
				t.Fatalf("its next pod is on %s", p.Spec.NodeName)
			}
			s.decide(0)
			if told := s.decide(strand - time.Second); told != nil {
				t.Fatalf("after a moment it is told %q", told)
			}
			s.rise("a", before)
			s.decide(time.Second)
			fall(s)
			s.decide(time.Second)
			if told := s.decide(strand - time.Second); told != nil {
				t.Fatalf("a moment after its node was back it is told %q", told)
			}
			if told := s.decide(time.Second); !slices.Equal(told, []string{"one Retry"}) {
				t.Fatalf("it is told %q", told)
			}
			s.want(w, Retry, "it begins again")
			if after := w.Checks[0].RequeueAfterSeconds; after != nil || w.Annotations != nil {
				t.Errorf("it waits for %v s, and may have %v", after, w.Annotations)
			}
			s.fleet.DeletePod(string(p.UID))
			s.admit(w)
			s.decide(time.Second)
			s.want(w, Ready, "there is room: b × 1")
			if p := s.pod(w); p.Spec.NodeName != "b" {
				t.Errorf("its pod is on %q", p.Spec.NodeName)
			}
		})
	}
}

// A job of which pods have ended is told nothing: what is left is where it was.
func TestFewerPodsAreNoNews(t *testing.T) {
	s := newSite(t, "a", "b", "c")
	w := s.job("wide", 2)
	s.decide(0)
	w.Sets[0].N = 1
	for range 2 {
		if told := s.decide(time.Second); told != nil {
			t.Errorf("it is told %q", told)
		}
	}
}

// What a scheduler finds no node for though its room is there is the scheduler's business, also where other
// pods of the job have lost theirs.
func TestStuckIsNotStranded(t *testing.T) {
	s := newSite(t, "a", "b", "c")
	w := s.job("two", 1, 2)
	s.decide(0)
	s.want(w, Ready, "a × 1, b × 1, c × 1")
	p := s.pod(w).DeepCopy()
	host := p.Spec.NodeName
	p.Spec.NodeName = ""
	p.Status = noNode()
	s.fleet.SetPod(p)
	for _, name := range []string{"", "a", "b", "c"} {
		if name == host {
			continue
		}
		if name != "" {
			s.change(name, func(n *corev1.Node) { n.Spec.Unschedulable = true })
		}
		for range 3 {
			if told := s.decide(strand); told != nil {
				t.Fatalf("%q is cordoned, and it is told %q", name, told)
			}
		}
	}
}

// Nodes whose taints pods do not stand are none for them.
func TestTaintsOfNodes(t *testing.T) {
	stands := []corev1.Toleration{{Key: "maintenance", Operator: corev1.TolerationOpExists}}
	const closed = "no other node is left: 1 nodes are cordoned, or have taints"
	for _, test := range []struct {
		name, key    string
		effect       corev1.TaintEffect
		pod, flavor  []corev1.Toleration
		want, saying string
	}{
		{"nobody stands it", "maintenance", corev1.TaintEffectNoSchedule, nil, nil, Retry, closed},
		{"the pods stand it", "maintenance", corev1.TaintEffectNoSchedule, stands, nil, Ready, "a × 1"},
		{"their flavor has them", "maintenance", corev1.TaintEffectNoExecute, nil, stands, Ready, "a × 1"},
		{"others are better", "maintenance", corev1.TaintEffectPreferNoSchedule, nil, nil, Ready, "a × 1"},
		{"it is for what they ask for", memory, corev1.TaintEffectNoSchedule, nil, nil, Ready, "a × 1"},
		{"it is for something else", "example.com/gpu", corev1.TaintEffectNoSchedule, nil, nil, Retry, closed},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSite(t, "a")
			s.view.Flavors["here"].Tolerations = test.flavor
			taints := []corev1.Taint{{Key: test.key, Effect: test.effect}}
			s.change("a", func(n *corev1.Node) { n.Spec.Taints = taints })
			w := s.job("one", 1)
			w.Sets[0].Pod.Tolerations = test.pod
			s.decide(0)
			s.want(w, test.want, test.saying)
		})
	}
}
