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

// Trace is what the API server had of pods and Events.
type Trace struct {
	pods map[string]*pod
	// warned are the pods by whose Events the scheduler found no room for them, and last is
	// the time of the last thing told.
	warned map[string]bool
	last   time.Time
}

// pod is what counts of a pod.
type pod struct {
	name, node              string
	created, started, ended time.Time
	asks                    []wish
	// refused says that the kubelet has refused it, claims that it names ResourceClaims, and
	// inits that its init containers ask for something.
	refused, claims, inits bool
}

// wish is an amount of a resource that a container asks for, negative where it is no number
// of devices.
type wish struct {
	resource string
	n        int
}

// The parts of Kubernetes' objects that count.
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
		// Items are a List's, Type and Object of a watch that tells what has happened.
		Items  []json.RawMessage `json:"items"`
		Type   string            `json:"type"`
		Object json.RawMessage   `json:"object"`
		// An Event's.
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

// ReadTrace reads what `kubectl get pods,events -A -o json` prints, or what the same prints
// with --watch, or --output-watch-events too: any number of JSON documents, each a List, a Pod
// or an Event. Of a pod that comes again the last word counts. Other kinds are passed over.
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
				"%w (it is to be what `kubectl get pods,events -A -o json` prints)", n, err)
		}
	}
}

// mostNested is how deep an object of a List of a watch lies.
const mostNested = 3

// resolution is that of Kubernetes' times. A pod was made in the second that begins at its
// creationTimestamp: it is taken to have come at the end of it, or at the moment of its
// allocation if that is earlier, so that what ended in the same second has ended.
const resolution = time.Second

// take takes in an object; event is what a watch says of it.
func (t *Trace) take(raw json.RawMessage, event string, depth int) error {
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return err
	}
	switch {
	case depth > mostNested:
		return errors.New("lists in lists in lists")
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

// wishes are what a container asks for, by name, of resources that have a domain, as those
// of devices have.
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

// span is from when to when the trace tells.
func (t *Trace) span() (first, last time.Time) {
	for _, p := range t.pods {
		if made := p.created.Add(-resolution); first.IsZero() || made.Before(first) {
			first = made
		}
	}
	return first, t.last
}

// others adds the pods of the trace that the journal does not have: those that have never
// come to the node, those that it has refused, and those that it had before the journal began.
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
		g.Notes = append(g.Notes, fmt.Sprintf("Pods that found no room by their Events and are not in the trace are "+
			"left out, since what they asked for is not known: %d.", gone))
	}
}

// nodes tells which nodes are this one: that named, or those of the pods that the journal
// has, or where it has none of them all.
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

// asks are what a pod asks for of the node's resources; ok is false where a part is left out.
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

// near is how far the times of a refusal in the journal and of its pod may be apart.
const near = time.Minute

// match finds the refusal of the journal that a pod of the trace is, so that it is counted
// once: of those that asked for the same, the next in time. It returns when that was.
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
