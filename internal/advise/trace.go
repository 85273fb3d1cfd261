// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Trace has the pods and Events that the API server had.
type Trace struct {
	pods map[string]*pod
	// warned has the UIDs of pods with an Event that the scheduler found no room for them. last is
	// the latest time in the trace.
	warned map[string]bool
	last   time.Time
}

// pod has what is needed of a pod.
type pod struct {
	name, node              string
	created, started, ended time.Time
	asks                    []wish
	// refused is true if the kubelet has refused the pod, claims if it names ResourceClaims, and
	// inits if its init containers ask for devices.
	refused, claims, inits bool
}

// wish is the amount of a resource that a container asks for. It is negative if the amount is not a
// whole number.
type wish struct {
	resource string
	n        int
}

// The parts of Kubernetes objects that are needed.
type (
	object struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Namespace         string     `json:"namespace"`
			Name              string     `json:"name"`
			UID               string     `json:"uid"`
			CreationTimestamp time.Time  `json:"creationTimestamp"`
			DeletionTimestamp *time.Time `json:"deletionTimestamp"`
		} `json:"metadata"`
		Spec struct {
			NodeName       string            `json:"nodeName"`
			Containers     []container       `json:"containers"`
			InitContainers []container       `json:"initContainers"`
			ResourceClaims []json.RawMessage `json:"resourceClaims"`
		} `json:"spec"`
		Status struct {
			Phase             string      `json:"phase"`
			Reason            string      `json:"reason"`
			StartTime         *time.Time  `json:"startTime"`
			ContainerStatuses []container `json:"containerStatuses"`
		} `json:"status"`
		// Items are those of a List. Type and Object are those of a watch event.
		Items  []json.RawMessage `json:"items"`
		Type   string            `json:"type"`
		Object json.RawMessage   `json:"object"`
		// These are an Event's.
		Reason         string     `json:"reason"`
		LastTimestamp  *time.Time `json:"lastTimestamp"`
		EventTime      *time.Time `json:"eventTime"`
		InvolvedObject struct {
			Kind string `json:"kind"`
			UID  string `json:"uid"`
		} `json:"involvedObject"`
	}
	container struct {
		Resources struct {
			Limits, Requests map[string]json.RawMessage
		} `json:"resources"`
		RestartPolicy string `json:"restartPolicy"`
		State         struct {
			Terminated *struct {
				FinishedAt time.Time `json:"finishedAt"`
			} `json:"terminated"`
		} `json:"state"`
	}
)

// ReadTrace reads the output of `kubectl get pods,events -A -o json`, also with --watch or
// --output-watch-events. It may have any number of JSON documents, each a List, a Pod or an Event.
// Of a pod that comes twice, the last version counts. Other kinds are ignored. It fails if there is
// no document, or one that is invalid.
func ReadTrace(in io.Reader) (*Trace, error) {
	t := &Trace{pods: map[string]*pod{}, warned: map[string]bool{}}
	dec := json.NewDecoder(in)
	for n := 1; ; n++ {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) && n > 1 {
			return t, nil
		}
		if err == nil {
			err = t.take(raw, "", 0)
		}
		if err != nil {
			return nil, fmt.Errorf("read the trace: document %d: "+
				"%w (expected is what `kubectl get pods,events -A -o json` prints)", n, err)
		}
	}
}

// mostNested is the largest depth of an object: a watch event may have a List, which has the
// object.
const mostNested = 3

// resolution is that of Kubernetes' times. A pod was created within the second that begins at its
// creationTimestamp. The replay lets it come at the end of that second, or at its allocation if
// that is earlier. So pods that ended in the same second have ended.
const resolution = time.Second

// take takes in an object. event is the type of its watch event, or "".
func (t *Trace) take(raw json.RawMessage, event string, depth int) error {
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return err
	}
	switch {
	case depth > mostNested:
		return errors.New("its lists are nested too deep")
	case o.Kind == "" && len(o.Object) > 0:
		return t.take(o.Object, o.Type, depth+1)
	case o.Kind == "Pod" && o.Metadata.UID == "":
		return fmt.Errorf("pod %s/%s has no uid", o.Metadata.Namespace, o.Metadata.Name)
	case o.Kind == "Pod":
		return t.pod(&o, event == "DELETED")
	case o.Kind == "Event":
		t.event(&o)
		return nil
	case o.Kind == "":
		return errors.New("it has no kind")
	}
	for _, item := range o.Items {
		if err := t.take(item, event, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (t *Trace) see(times ...time.Time) {
	for _, at := range times {
		if at.After(t.last) {
			t.last = at
		}
	}
}

func (t *Trace) event(o *object) {
	if o.LastTimestamp != nil {
		t.see(*o.LastTimestamp)
	}
	if o.EventTime != nil {
		t.see(*o.EventTime)
	}
	if o.Reason == "FailedScheduling" && o.InvolvedObject.Kind == "Pod" {
		t.warned[o.InvolvedObject.UID] = true
	}
}

// pod takes in a pod.
func (t *Trace) pod(o *object, deleted bool) error {
	p := &pod{
		name: o.Metadata.Namespace + "/" + o.Metadata.Name, node: o.Spec.NodeName,
		created: o.Metadata.CreationTimestamp.Add(resolution), claims: len(o.Spec.ResourceClaims) > 0,
	}
	if o.Metadata.CreationTimestamp.IsZero() {
		return fmt.Errorf("pod %s has no creationTimestamp", p.name)
	}
	for i := range o.Spec.InitContainers {
		wishes := o.Spec.InitContainers[i].wishes()
		if o.Spec.InitContainers[i].RestartPolicy == "Always" { // a sidecar
			p.asks = append(p.asks, wishes...)
		} else {
			p.inits = p.inits || len(wishes) > 0
		}
	}
	for i := range o.Spec.Containers {
		p.asks = append(p.asks, o.Spec.Containers[i].wishes()...)
	}
	p.refused = o.Status.Phase == "Failed" && o.Status.Reason == "UnexpectedAdmissionError"
	if o.Status.StartTime != nil {
		p.started = *o.Status.StartTime
	}
	over := o.Status.Phase == "Succeeded" || o.Status.Phase == "Failed"
	for i := range o.Status.ContainerStatuses {
		if end := o.Status.ContainerStatuses[i].State.Terminated; over && end != nil && end.FinishedAt.After(p.ended) {
			p.ended = end.FinishedAt
		}
	}
	if at := o.Metadata.DeletionTimestamp; p.ended.IsZero() && at != nil && (deleted || over || p.node == "") {
		p.ended = *at
	}
	t.see(p.created, p.started, p.ended)
	t.pods[o.Metadata.UID] = p
	return nil
}

// wishes returns what a container asks for, by name. It has only resources with a domain, as
// devices have.
func (c *container) wishes() (out []wish) {
	asked := maps.Clone(c.Resources.Requests)
	if asked == nil {
		asked = map[string]json.RawMessage{}
	}
	maps.Copy(asked, c.Resources.Limits)
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		text := string(asked[name])
		if unquoted, err := strconv.Unquote(text); err == nil {
			text = unquoted
		}
		n, err := strconv.Atoi(text)
		if err != nil {
			n = -1
		}
		if strings.Contains(name, "/") && n != 0 {
			out = append(out, wish{name, n})
		}
	}
	return out
}

// span returns the times at which the trace begins and ends.
func (t *Trace) span() (first, last time.Time) {
	for _, p := range t.pods {
		if made := p.created.Add(-resolution); first.IsZero() || made.Before(first) {
			first = made
		}
	}
	return first, t.last
}

// others adds the pods of the trace that the journal does not have: those that never came to the
// node, those that it refused, and those that it had before the journal began.
func (g *gathering) others(j *Journal) {
	g.matched = map[int]bool{}
	if g.trace == nil {
		return
	}
	node := g.nodes()
	var elsewhere, odd int
	for _, uid := range slices.Sorted(maps.Keys(g.trace.pods)) {
		p := g.trace.pods[uid]
		asks, ok := g.asks(p)
		switch {
		case g.seen[uid] || len(asks) == 0 && !p.inits && ok:
			continue
		case p.node != "" && !node(p.node):
			elsewhere++
			continue
		case !ok || len(asks) == 0 || p.inits:
			odd++
			if len(asks) == 0 {
				continue
			}
		}
		switch {
		case p.refused:
			if at := g.match(j, p, asks); !at.IsZero() && at.Before(p.created) {
				p.created = at
			}
			if !p.created.Before(g.End) || p.created.Before(g.Begin) {
				continue
			}
			if g.Refused++; !g.Back {
				g.unseen = append(g.unseen, unseen{Request{Name: p.name, Asks: asks}, p.created})
			}
		case p.started.IsZero(): // it waits, or gave up
			if p.created.Before(g.End) && (p.ended.IsZero() || p.ended.After(g.Begin)) {
				g.Pending++
				g.unseen = append(g.unseen, unseen{Request{Name: p.name, Asks: asks}, p.created})
			}
		case g.add(p.name, p.created, p.started, p.ended, asks):
			g.Granted++
		}
	}
	if elsewhere > 0 {
		g.Notes = append(g.Notes, fmt.Sprintf("Pods of the trace on other nodes are left out: %d.", elsewhere))
	}
	if odd > 0 {
		g.Notes = append(g.Notes, fmt.Sprintf("What init containers and claims of pods in the trace ask for is left "+
			"out where the journal does not have the pod: %d pods.", odd))
	}
	gone := 0
	for uid := range g.trace.warned {
		if g.trace.pods[uid] == nil {
			gone++
		}
	}
	if gone > 0 {
		g.Notes = append(g.Notes, fmt.Sprintf("Pods whose Events report that they found no room, but that are not in "+
			"the trace, are left out, since what they asked for is not known: %d.", gone))
	}
}

// nodes returns a function that reports whether a node is this one: the named one, or else the node
// of the pods that the journal has. If the trace has none of these, all nodes are.
func (g *gathering) nodes() func(string) bool {
	ours := map[string]bool{}
	if g.Node != "" {
		ours[g.Node] = true
	} else {
		for uid := range g.seen {
			if p := g.trace.pods[uid]; p != nil && p.node != "" {
				ours[p.node] = true
			}
		}
	}
	return func(name string) bool { return len(ours) == 0 || ours[name] }
}

// asks returns what a pod asks for of the node's resources. ok is false if a part is left out.
func (g *gathering) asks(p *pod) (out []Ask, ok bool) {
	ok = !p.claims
	for _, w := range p.asks {
		if domain, _, _ := strings.Cut(w.resource, "/"); domain != g.Domain {
			continue
		}
		a, known := g.ask(w.resource, w.n)
		if !known || w.n < 0 {
			ok = false
			continue
		}
		out = append(out, a)
	}
	return out, ok
}

// near is the largest difference between the times of a refusal in the journal and of its pod.
const near = time.Minute

// match finds the journal's refusal of a pod of the trace, so that it is counted once. Of the
// refusals of the same ask it takes the nearest in time. It returns the time of the refusal, or
// zero if there is none.
func (g *gathering) match(j *Journal, p *pod, asks []Ask) (at time.Time) {
	best, apart := -1, near
	for i, r := range j.refused {
		a, ok := g.ask(r.resource, r.count)
		if !ok || g.matched[i] || !slices.Contains(asks, a) {
			continue
		}
		if d := r.at.Sub(p.started).Abs(); d < apart {
			best, apart = i, d
		}
	}
	if best >= 0 {
		g.matched[best], at = true, j.refused[best].at
	}
	return at
}
