// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"example.com/gpu-agent/internal/placer"
)

// Books hold room, and know the nodes.
type Books interface {
	Asks(*corev1.PodSpec) []placer.Container
	// Nodes are the labels of nodes by name: of those that take new pods, and of the others.
	Nodes() (open, closed map[string]map[string]string)
	Hold(id, name string, groups []placer.Group) (at [][]string, no *placer.Refusal)
	SetHold(id, name string, groups []placer.Group, at [][]string)
	Room(groups []placer.Group) *placer.Refusal
	Drop(id string)
	Lost(id string) []string
}

const (
	// later is after how long a workload without room is tried again.
	later = 15 * time.Second
	// patience is how often a workload begins again for which there is room on-prem and, as
	// Kueue chooses the cloud each time, no quota.
	patience = 3
	// settled is how long a variant waits for quota on-prem where there is room. It may be used
	// by others for which there is no room, and who give it back.
	settled = 30 * time.Second
	// stay is how long a workload is left in a cloud before it may come back, and apart what
	// lies between one that comes back and the next: only then it shows how much room is left.
	stay  = time.Minute
	apart = 15 * time.Second

	// Names of controllers and annotations, after the domain.
	onPremName = "gpu-placer"
	cloudName  = "gpu-placer-cloud"
	// holdName is the key of the hold, and nodesName where its pods have their room.
	holdName  = "gpu.hold"
	nodesName = "gpu.hold-nodes"
	// checkpoints is the label of pods that may be ended at any time, as others go on where
	// they were.
	checkpoints = "gpu.checkpoints"
)

// View is what is known of Kueue's objects, flavors and checks by name.
type View struct {
	Workloads []*Workload
	Flavors   map[string]*Flavor
	Checks    map[string]*Check
}

// Checks decides on admission checks. It is pure but for the books, which it asks to hold room.
// Its methods are not for several goroutines.
type Checks struct {
	domain string
	books  Books
	held   map[string]*held // by ID
	// moved is when a workload was last told to come back from a cloud.
	moved time.Time
}

// held is what a hold is for.
type held struct {
	by    string // UID of a workload
	shape string // of its groups
	// version is that of the workload to which Ready was sent and that has not said so yet. Whether
	// a request that failed was carried out shows when the workload has another version.
	version string
	// waits says that another variant has quota yet, see alone.
	waits bool
}

// Answer is another state of a workload's check.
type Answer struct {
	Workload *Workload
	State    CheckState
}

// NewChecks returns what has held nothing. Domain is that of controllers and annotations.
func NewChecks(domain string, books Books) *Checks {
	return &Checks{domain: domain, books: books, held: map[string]*held{}}
}

// id is the hold of a namespace's owner.
func id(namespace, key string) string { return "kueue/" + namespace + "/" + key }

// HoldOf says of a pod for which hold it is, if there is one.
func HoldOf(domain string) func(*corev1.Pod) string {
	return func(p *corev1.Pod) string {
		key := p.Annotations[domain+"/"+holdName]
		if by := metav1.GetControllerOf(p); key == "" && by != nil {
			key = string(by.UID)
		}
		if key == "" {
			return ""
		}
		return id(p.Namespace, key)
	}
}

// key is what the hold of a workload goes by: the controller of its pods. Variants of one
// workload have one.
func (v *View) key(w *Workload) string {
	for _, parent := range v.Workloads {
		if parent.UID == w.Owner && parent.Namespace == w.Namespace {
			w = parent
			break
		}
	}
	return cmp.Or(w.Owner, w.UID)
}

// is reports whether a check asks a question.
func (c *Checks) is(v *View, check, question string) bool {
	k := v.Checks[check]
	return k != nil && k.Controller == c.domain+"/"+question
}

// Inactive are the checks of which nobody has said that they are answered.
func (c *Checks) Inactive(v *View) (out []*Check) {
	for _, name := range slices.Sorted(maps.Keys(v.Checks)) {
		if k := v.Checks[name]; !k.Active && (c.is(v, name, onPremName) || c.is(v, name, cloudName)) {
			out = append(out, k)
		}
	}
	return out
}

// Follow holds what workloads say that is held for them, and gives up the rest. It decides
// nothing.
func (c *Checks) Follow(v *View) {
	there := map[string]bool{}
	for _, w := range sorted(v.Workloads) {
		for _, s := range w.Checks {
			if !c.is(v, s.Name, onPremName) || s.State != Ready && s.State != Pending || !w.Reserved || w.Over {
				continue
			}
			hold := id(w.Namespace, v.key(w))
			if s.State == Pending {
				h := c.held[hold]
				there[hold] = there[hold] || h != nil && h.by == w.UID && (h.waits || h.version != "" && h.version == w.version())
				continue
			}
			if h := c.held[hold]; h == nil && len(s.PodSetUpdates) > 0 {
				groups, _ := c.groups(w, v)
				c.books.SetHold(hold, w.Namespace+"/"+w.Name, groups, c.nodes(w, s.PodSetUpdates))
				c.held[hold] = &held{by: w.UID, shape: fmt.Sprint(groups)}
			}
			there[hold] = there[hold] || c.held[hold] != nil && c.held[hold].by == w.UID
		}
	}
	for hold := range c.held {
		if !there[hold] {
			c.drop(hold)
		}
	}
}

func (c *Checks) drop(hold string) {
	c.books.Drop(hold)
	delete(c.held, hold)
}

// sorted are workloads as they came.
func sorted(all []*Workload) []*Workload {
	return slices.SortedFunc(slices.Values(all), func(x, y *Workload) int {
		return cmp.Or(x.Created.Compare(y.Created), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
}

// Decide says what to tell of each check, those of older workloads first. What makes one Ready is
// held from then on.
func (c *Checks) Decide(v *View, now time.Time) (out []Answer) {
	c.Follow(v)
	for _, question := range []string{onPremName, cloudName} { // the second goes by the first
		for _, w := range sorted(v.Workloads) {
			for i := range w.Checks {
				s := &w.Checks[i]
				if !c.is(v, s.Name, question) || !w.Reserved || w.Over {
					continue
				}
				answer := c.onPrem
				if question == cloudName {
					answer = c.cloud
				}
				if next := c.alone(w, s, answer(w, s, v, now), v); next != nil && (next.State != s.State || next.Message != s.Message) {
					if next.LastTransitionTime = s.LastTransitionTime; next.State != s.State {
						next.LastTransitionTime = metav1.NewTime(now)
					}
					next.Name, next.RetryCount = s.Name, s.RetryCount
					out = append(out, Answer{w, *next})
				}
			}
		}
	}
	return out
}

// alone has variants of a workload admitted one at a time: Ready waits until no other one has
// quota, and those give it back for which there is no use while the first has room. Kueue 0.19
// ends a workload that it has just admitted where another variant has quota at that moment.
func (c *Checks) alone(w *Workload, s, next *CheckState, v *View) *CheckState {
	if next == nil || next.State == Retry || s.State != Pending {
		return next
	}
	h := c.held[id(w.Namespace, v.key(w))]
	for _, o := range sorted(v.Workloads) {
		if o.UID == w.UID || o.UID == w.Owner || o.Namespace != w.Namespace || v.key(o) != v.key(w) || !o.Reserved || o.Over {
			continue
		}
		switch {
		case h != nil && h.by == o.UID:
			return again("there is room on-prem, held for " + o.Name)
		case next.State == Ready:
			if h != nil && h.by == w.UID {
				h.waits = true
			}
			return &CheckState{State: Pending, Message: clip(o.Name + " still has quota: then " + next.Message)}
		}
	}
	return next
}

// onPrem answers whether there is room; nil where the check stays as it is.
func (c *Checks) onPrem(w *Workload, s *CheckState, v *View, _ time.Time) *CheckState {
	groups, asks := c.groups(w, v)
	hold := id(w.Namespace, v.key(w))
	shape := fmt.Sprint(groups)
	h := c.held[hold]
	switch {
	case !asks && s.State == Pending:
		return &CheckState{State: Ready, Message: "it asks for nothing that the GPU agents offer"}
	case !asks, s.State != Pending && s.State != Ready:
		return nil
	case h != nil && h.by != w.UID && s.State == Pending:
		return &CheckState{State: Pending, Message: "room is held for another variant of the same workload"}
	case h != nil && h.by != w.UID:
		return nil
	case s.State == Ready && h != nil && h.shape == shape && c.books.Lost(hold) == nil:
		return nil
	}
	at, no := c.books.Hold(hold, w.Namespace+"/"+w.Name, groups)
	switch {
	case no == nil:
		c.held[hold] = &held{by: w.UID, shape: shape, version: w.version()}
		if s.State == Ready {
			return nil // its pods have been told
		}
		return &CheckState{State: Ready, Message: "there is room: " + places(at), PodSetUpdates: c.updates(w, v, at)}
	case s.State == Ready && w.Admitted:
		return nil // the scheduler has the last word
	}
	c.drop(hold)
	return again(no.Error())
}

// cloud answers whether on-prem is full.
func (c *Checks) cloud(w *Workload, s *CheckState, v *View, now time.Time) *CheckState {
	groups, asks := c.groups(w, v)
	switch {
	case s.State == Ready && asks && c.mayReturn(w, s, v, now):
		if c.elsewhere(w, v, groups) != nil {
			return nil
		}
		c.moved = now
		return &CheckState{State: Retry, Message: "there is room on-prem, and it checkpoints: it comes back"}
	case s.State != Pending:
		return nil
	}
	if !asks {
		return &CheckState{State: Ready, Message: "it asks for nothing that the GPU agents offer"}
	}
	// Variants of the same workload, for other flavors, may still have room on-prem.
	variants, untried := 0, ""
	for _, o := range v.Workloads {
		if o.UID == w.UID || o.Namespace != w.Namespace || o.Owner != w.Owner || o.Over ||
			slices.ContainsFunc(o.Checks, func(s CheckState) bool { return c.is(v, s.Name, cloudName) }) {
			continue
		}
		if h := c.held[id(o.Namespace, v.key(o))]; h != nil && h.by == o.UID {
			return &CheckState{State: Pending, Message: "there is room on-prem, held for " + o.Name}
		}
		if variants++; o.Refused == "" {
			untried = o.Name
		}
	}
	if no := c.elsewhere(w, v, groups); no != nil {
		return &CheckState{State: Ready, Message: clip("on-prem, " + no.Error())}
	}
	switch {
	case untried != "":
		return &CheckState{State: Pending, Message: "there is room on-prem, and " + untried + " may have it"}
	case variants > 0 && now.Sub(s.LastTransitionTime.Time) < settled:
		return &CheckState{State: Pending, Message: "there is room on-prem, and no quota yet"}
	case variants > 0, w.Retries >= patience:
		return &CheckState{State: Ready, Message: "on-prem, there is room and no quota"}
	}
	return again("there is room on-prem, and another flavor was chosen: it begins again with the first one")
}

// elsewhere is why there is no room for a workload on other nodes than those of its flavors; nil
// where there is some.
func (c *Checks) elsewhere(w *Workload, v *View, groups []placer.Group) *placer.Refusal {
	for i := range groups {
		groups[i].Among, groups[i].Closed = c.among(&w.Sets[i], func(labels map[string]string) bool {
			of := v.labels(&w.Sets[i])
			return len(of) == 0 || !has(labels, of)
		})
	}
	return c.books.Room(groups)
}

// mayReturn reports whether a workload in a cloud may be moved now: its pods say that they
// checkpoint, it has been there for a while, and nobody else is about to take the room.
func (c *Checks) mayReturn(w *Workload, s *CheckState, v *View, now time.Time) bool {
	label := c.domain + "/" + checkpoints
	if !w.Admitted || now.Sub(s.LastTransitionTime.Time) < stay || now.Sub(c.moved) < apart ||
		slices.ContainsFunc(w.Sets, func(s Set) bool { return s.Labels[label] != "true" }) {
		return false
	}
	for _, o := range v.Workloads {
		for _, s := range o.Checks {
			if c.is(v, s.Name, onPremName) && s.State == Pending && o.Reserved && !o.Over {
				return false
			}
		}
	}
	return true
}

// again has a workload give its quota back, and tried later. Kueue 0.19 takes the quota only when
// that time is over, so it is not made longer with each try.
func again(why string) *CheckState {
	seconds := int32(later.Seconds())
	return &CheckState{State: Retry, Message: clip(why), RequeueAfterSeconds: &seconds}
}

// clip keeps a message within what Kueue takes.
func clip(text string) string {
	const most = 1024
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// groups are a workload's sets of pods, with the nodes on which they may be by their own word
// and by their flavors'. Asks says that one of them asks for something.
func (c *Checks) groups(w *Workload, v *View) (out []placer.Group, asks bool) {
	for i := range w.Sets {
		s := &w.Sets[i]
		g := placer.Group{Containers: c.books.Asks(&s.Pod), N: s.N}
		if len(g.Containers) == 0 {
			g.N = 0
		} else {
			asks = true
		}
		of := v.labels(s)
		g.Among, g.Closed = c.among(s, func(labels map[string]string) bool { return has(labels, of) })
		out = append(out, g)
	}
	return out, asks
}

// labels are those of the nodes of a set's flavors.
func (v *View) labels(s *Set) map[string]string {
	out := map[string]string{}
	for _, name := range s.Flavors {
		if f := v.Flavors[name]; f != nil {
			maps.Copy(out, f.Labels)
		}
	}
	return out
}

func has(labels, want map[string]string) bool {
	for key, value := range want {
		if is, there := labels[key]; !there || is != value {
			return false
		}
	}
	return true
}

// among are the nodes that pods of a set may be on, and of which a condition holds: those that
// take new pods, and the others.
func (c *Checks) among(s *Set, of func(labels map[string]string) bool) (open, closed []string) {
	required := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: s.Pod})
	those := func(nodes map[string]map[string]string) (out []string) {
		for _, name := range slices.Sorted(maps.Keys(nodes)) {
			node := &corev1.Node{}
			node.Name, node.Labels = name, nodes[name]
			if ok, err := required.Match(node); ok && err == nil && of(nodes[name]) {
				out = append(out, name)
			}
		}
		return out
	}
	yes, no := c.books.Nodes()
	return those(yes), those(no)
}

// count counts nodes, in order, as "a:2,b:1".
func count(at []string) string {
	n := map[string]int{}
	for _, name := range at {
		n[name]++
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(n)) {
		out = append(out, name+":"+strconv.Itoa(n[name]))
	}
	return strings.Join(out, ",")
}

// uncount reads what count has written; what it has not is left out.
func uncount(text string) (at []string) {
	for one := range strings.SplitSeq(text, ",") {
		name, n, _ := strings.Cut(one, ":")
		if k, err := strconv.Atoi(n); err == nil && name != "" {
			for range min(k, 1<<16) {
				at = append(at, name)
			}
		}
	}
	return at
}

// places are for people: on which nodes there is room for how many pods.
func places(at [][]string) string {
	return clip(strings.ReplaceAll(strings.ReplaceAll(count(slices.Concat(at...)), ",", ", "), ":", " × "))
}

// updates are what pods are told of their room.
func (c *Checks) updates(w *Workload, v *View, at [][]string) (out []Update) {
	nodes, _ := c.books.Nodes()
	for i, of := range at {
		if len(of) == 0 {
			continue
		}
		u := Update{Name: w.Sets[i].Name, Annotations: map[string]string{c.domain + "/" + holdName: v.key(w), c.domain + "/" + nodesName: count(of)}}
		if host := nodes[of[0]][corev1.LabelHostname]; host != "" && !slices.ContainsFunc(of, func(name string) bool { return name != of[0] }) {
			u.NodeSelector = map[string]string{corev1.LabelHostname: host}
		}
		out = append(out, u)
	}
	return out
}

// nodes are those of each set's pods, by what updates has written.
func (c *Checks) nodes(w *Workload, updates []Update) (at [][]string) {
	for i := range w.Sets {
		var of []string
		for _, u := range updates {
			if u.Name == w.Sets[i].Name {
				of = uncount(u.Annotations[c.domain+"/"+nodesName])
			}
		}
		at = append(at, of)
	}
	return at
}
