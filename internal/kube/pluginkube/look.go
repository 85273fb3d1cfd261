// SPDX-License-Identifier: Apache-2.0

package pluginkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// agentSelector chooses the agent's pods, and agentContainer is the agent's container in one, as the
// manifests have them.
const (
	agentSelector  = "app.kubernetes.io/name=gpu-agent"
	agentContainer = "gpu-agent"
)

// Subject names what a question is about.
type Subject struct {
	// Kind is "pod", "job" or "node". Empty means the first of these that exists with this name.
	Kind            string
	Namespace, Name string
}

// Agent is a pod of the agent.
type Agent struct {
	diagnosis.Agent
	// Image is the image of its container, and Port the port of its pages.
	Image string
	Port  int
	// Restarts counts how often its container was started again.
	Restarts int
}

// Look reads what a diagnosis of a subject follows from. The error wraps ErrNotFound if there is no
// such object.
func (c *Client) Look(ctx context.Context, s Subject) (diagnosis.Facts, error) {
	f := diagnosis.Facts{Domain: c.o.Domain, Resources: c.o.ResourceDomain}
	kinds := []string{s.Kind}
	if s.Kind == "" {
		kinds = []string{"pod", "job", "node"}
	}
	var refused error
	for _, kind := range kinds {
		var err error
		switch kind {
		case "pod":
			err = c.lookAtPod(ctx, &f, s)
		case "job":
			err = c.lookAtJob(ctx, &f, s)
		case "node":
			err = c.lookAtNode(ctx, &f, s)
		default:
			return f, fmt.Errorf("there is no kind %q: write pod/NAME, job/NAME or node/NAME", kind)
		}
		switch {
		case err == nil:
			return f, nil
		case len(kinds) == 1:
			return f, err
		case !errors.Is(err, ErrNotFound) && refused == nil:
			refused = err
		}
	}
	if refused != nil {
		return f, refused
	}
	return f, fmt.Errorf("there is no pod or Job %s in namespace %s, and no node of that name: %w",
		s.Name, s.Namespace, ErrNotFound)
}

func (c *Client) lookAtPod(ctx context.Context, f *diagnosis.Facts, s Subject) error {
	o, err := c.get(ctx, kube.Pods, s.Namespace, s.Name)
	if err != nil {
		return err
	}
	p, err := into[corev1.Pod](o)
	if err != nil {
		return fmt.Errorf("read pod %s/%s: %w", s.Namespace, s.Name, err)
	}
	pod := readPod(p)
	f.Pod = &pod
	c.lookAround(ctx, f)
	c.addEvents(ctx, f, s.Namespace, string(p.UID))
	if len(pod.Gates) > 0 {
		owners := []string{string(p.UID)} // a workload of a plain pod is the pod's own
		for _, r := range p.OwnerReferences {
			owners = append(owners, string(r.UID))
		}
		c.addWorkload(ctx, f, s.Namespace, owners)
	}
	c.addLogs(ctx, f)
	return nil
}

func (c *Client) lookAtJob(ctx context.Context, f *diagnosis.Facts, s Subject) error {
	o, err := c.get(ctx, jobsResource, s.Namespace, s.Name)
	if err != nil {
		return err
	}
	j, err := into[batchv1.Job](o)
	if err != nil {
		return fmt.Errorf("read job %s/%s: %w", s.Namespace, s.Name, err)
	}
	f.Job = readJob(j)
	own := selectors{labels: batchv1.ControllerUidLabel + "=" + string(j.UID)}
	items, err := c.list(ctx, kube.Pods, s.Namespace, own)
	f.Unseen = unseen(f.Unseen, "pods of the Job", err)
	var pods []diagnosis.Pod
	uids := map[string]string{}
	for i := range items {
		p, err := into[corev1.Pod](&items[i])
		if err != nil {
			return fmt.Errorf("read pod %s/%s: %w", s.Namespace, items[i].GetName(), err)
		}
		pods = append(pods, readPod(p))
		uids[p.Name] = string(p.UID)
	}
	f.Pod = diagnosis.Worst(pods)
	c.lookAround(ctx, f)
	c.addEvents(ctx, f, s.Namespace, string(j.UID))
	if f.Pod != nil {
		c.addEvents(ctx, f, s.Namespace, uids[f.Pod.Name])
	}
	if f.Job.Suspended || f.Job.Queue != "" {
		c.addWorkload(ctx, f, s.Namespace, []string{string(j.UID)})
	}
	c.addLogs(ctx, f)
	return nil
}

func (c *Client) lookAtNode(ctx context.Context, f *diagnosis.Facts, s Subject) error {
	f.Node = s.Name
	c.lookAround(ctx, f)
	there := func(name string) bool { return name == s.Name }
	if !slices.ContainsFunc(f.GPUNodes, func(n diagnosis.GPUNode) bool { return there(n.Name) }) &&
		!slices.ContainsFunc(f.Nodes, func(n diagnosis.Node) bool { return there(n.Name) }) {
		f.Node = ""
		if len(f.Unseen) > 0 {
			return fmt.Errorf("node %s was not seen: %s: %s", s.Name, f.Unseen[0].What, f.Unseen[0].Why)
		}
		return fmt.Errorf("node %s: %w", s.Name, ErrNotFound)
	}
	// The agent's Events about its node have the node's name in place of its UID.
	c.addEvents(ctx, f, "default", s.Name)
	return nil
}

// Fleet reads the GPUNodes of the cluster, and what else is known of the nodes.
func (c *Client) Fleet(ctx context.Context) (diagnosis.Facts, error) {
	f := diagnosis.Facts{Domain: c.o.Domain, Resources: c.o.ResourceDomain}
	c.lookAround(ctx, &f)
	for _, u := range f.Unseen {
		if u.What == gpuNodes {
			return f, fmt.Errorf("%s could not be read: %s; the ClusterRole gpu-agent-view allows it", u.What, u.Why)
		}
	}
	return f, nil
}

// gpuNodes is how GPUNodes are named among what was not seen.
const gpuNodes = "GPUNodes"

// lookAround reads the nodes of the cluster, as far as the person may.
func (c *Client) lookAround(ctx context.Context, f *diagnosis.Facts) {
	items, err := c.list(ctx, kube.GPUNodes(c.o.Domain), "", selectors{})
	f.Unseen = unseen(f.Unseen, gpuNodes, err)
	for i := range items {
		f.GPUNodes = append(f.GPUNodes, readGPUNode(&items[i]))
	}
	items, err = c.list(ctx, kube.Nodes, "", selectors{})
	f.Unseen = unseen(f.Unseen, "Nodes", err)
	for i := range items {
		if n, err := into[corev1.Node](&items[i]); err == nil {
			f.Nodes = append(f.Nodes, readNode(n, c.o.Domain))
		}
	}
	agents, err := c.Agents(ctx, "")
	if err == nil && len(agents) == 0 && slices.ContainsFunc(f.GPUNodes, isReady) {
		// The agents are in another namespace more likely than all gone without a word.
		err = fmt.Errorf("there are none in namespace %s: name theirs with --agent-namespace", c.o.AgentNamespace)
	}
	f.Unseen = unseen(f.Unseen, "pods of the agent", err)
	if err == nil {
		f.Agents = make([]diagnosis.Agent, 0, len(agents))
		for _, a := range agents {
			f.Agents = append(f.Agents, a.Agent)
		}
	}
}

// isReady reports whether a GPUNode says that its agent works.
func isReady(n diagnosis.GPUNode) bool {
	return n.Status != nil && gpunode.Is(n.Status.Conditions, gpunode.Ready)
}

// Agents returns the agent's pods, or those on one node.
func (c *Client) Agents(ctx context.Context, node string) ([]Agent, error) {
	s := selectors{labels: agentSelector}
	if node != "" {
		s.fields = "spec.nodeName=" + node
	}
	items, err := c.list(ctx, kube.Pods, c.o.AgentNamespace, s)
	if err != nil {
		return nil, err
	}
	var out []Agent
	for i := range items {
		p, err := into[corev1.Pod](&items[i])
		if err != nil {
			return nil, fmt.Errorf("read pod %s/%s: %w", items[i].GetNamespace(), items[i].GetName(), err)
		}
		out = append(out, readAgent(p))
	}
	slices.SortFunc(out, func(a, b Agent) int { return strings.Compare(a.Node+" "+a.Name, b.Node+" "+b.Name) })
	return out, nil
}

// AgentOn returns the agent's pod on a node, one that is not being replaced if there are two.
func (c *Client) AgentOn(ctx context.Context, node string) (Agent, error) {
	agents, err := c.Agents(ctx, node)
	if err != nil {
		return Agent{}, err
	}
	if len(agents) == 0 {
		return Agent{}, fmt.Errorf("node %s has no pod of the agent in namespace %s (--agent-namespace): "+
			"kubectl gpu why node/%[1]s says why: %[3]w", node, c.o.AgentNamespace, ErrNotFound)
	}
	best := slices.IndexFunc(agents, func(a Agent) bool { return a.NotReady == "" })
	return agents[max(0, best)], nil
}

// addEvents adds the Events about an object.
func (c *Client) addEvents(ctx context.Context, f *diagnosis.Facts, namespace, uid string) {
	if uid == "" {
		return
	}
	items, err := c.list(ctx, eventsResource, namespace, selectors{fields: "involvedObject.uid=" + uid})
	f.Unseen = unseen(f.Unseen, "Events", err)
	for i := range items {
		if e, err := into[corev1.Event](&items[i]); err == nil {
			f.Events = append(f.Events, readEvent(e))
		}
	}
}

// addWorkload adds Kueue's Workload of an object. A cluster without Kueue has none.
func (c *Client) addWorkload(ctx context.Context, f *diagnosis.Facts, namespace string, owners []string) {
	var err error
	for _, of := range workloads {
		var items []unstructured.Unstructured
		if items, err = c.list(ctx, of, namespace, selectors{}); errors.Is(err, ErrNotFound) {
			continue
		}
		for i := range items {
			var w workload
			body, err := json.Marshal(items[i].Object)
			if err != nil || json.Unmarshal(body, &w) != nil {
				continue
			}
			for _, r := range w.Metadata.OwnerReferences {
				if slices.Contains(owners, r.UID) {
					f.Workload = w.facts()
					return
				}
			}
		}
		break
	}
	if !errors.Is(err, ErrNotFound) {
		f.Unseen = unseen(f.Unseen, "Workloads", err)
	}
}

// logTail bounds what is read of a container's log.
const (
	logLines = 60
	logBytes = 32 << 10
)

// addLogs adds the end of the log of each container that has ended with an error.
func (c *Client) addLogs(ctx context.Context, f *diagnosis.Facts) {
	if f.Pod == nil {
		return
	}
	for i := range f.Pod.Containers {
		of := &f.Pod.Containers[i]
		if of.Ended == nil || of.Ended.Exit == 0 {
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, c.o.Timeout)
		// Once the kubelet starts it again, the run that ended is the previous one.
		text, err := c.tail(bounded, f.Pod, of.Name, of.Running || of.Waiting != "")
		cancel()
		f.Unseen = unseen(f.Unseen, "the log of container "+of.Name, err)
		of.Log = text
	}
}

func (c *Client) tail(ctx context.Context, p *diagnosis.Pod, container string, previous bool) (string, error) {
	body, err := c.Log(ctx, p.Namespace, p.Name,
		LogOptions{Container: container, Previous: previous, Tail: logLines, Most: logBytes})
	if err != nil {
		return "", err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, logBytes))
	return string(text), err
}

// unseen adds to what was not seen, unless err is nil.
func unseen(to []diagnosis.Unseen, what string, err error) []diagnosis.Unseen {
	if err == nil {
		return to
	}
	why := err.Error()
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		why = "you may not read them"
		if strings.HasPrefix(what, "the ") {
			why = "you may not read it"
		}
	case errors.Is(err, ErrNotFound):
		why = "the cluster has no such resource"
	}
	return append(to, diagnosis.Unseen{What: what, Why: why})
}

// mostNames is how many names a shell is given.
const mostNames = 200

// Names returns names of objects of a kind, for a shell that completes them: of pods and Jobs in a
// namespace, and of nodes that have a GPUNode. It asks for one page alone.
func (c *Client) Names(ctx context.Context, kind, namespace string) (out []string, err error) {
	of, ok := map[string]schema.GroupVersionResource{
		"pod": kube.Pods, "job": jobsResource, "node": kube.GPUNodes(c.o.Domain)}[kind]
	if !ok {
		return nil, fmt.Errorf("there are no objects %q", kind)
	}
	if kind == "node" {
		namespace = ""
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	page, err := c.in(of, namespace).List(ctx, metav1.ListOptions{Limit: mostNames})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", of.Resource, err)
	}
	for i := range page.Items {
		out = append(out, page.Items[i].GetName())
	}
	return out, nil
}
