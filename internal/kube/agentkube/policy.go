// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
)

// PolicyOptions say which policies there should be beside those of the base.
type PolicyOptions struct {
	// Evictions is true if evictions are on, so that the component evict should be applied.
	Evictions bool
	// DRA reports whether DRA is on, so that the component dra should be applied; nil is never. The
	// answer may change.
	DRA func() bool
	// GPUNodes is true if the agent writes GPUNodes, as far as the cluster has them.
	GPUNodes bool
	// Pod is the agent's own. WatchPolicies uses it to check the policy on a pod's node. It needs
	// no UID. Without a name, that policy is not checked.
	Pod workload.Pod
}

const (
	// dryRunName is the name of the objects in the dry runs. No real object has it.
	dryRunName = "gpu-agent-policy-check"
	// noUID is a UID that no pod has.
	noUID = "00000000-0000-4000-8000-000000000000"
	// missesToReport is the number of checks in a row, within about five seconds, that must find a policy
	// missing before WatchPolicies reports it. When manifests are applied, a permission may come
	// into force before its policy.
	missesToReport = 6
)

// attempt is a write that a policy must refuse.
type attempt struct {
	policy         string
	verb, resource string
	write          func(context.Context) error
	// past, if set, reports whether an error shows that the write got past the policy.
	past func(error) bool
}

// WatchPolicies sends writes that the admission policies must refuse, as server-side dry runs, now
// and about every hour. It returns when ctx ends, with the error of ctx. A policy that is missing,
// or that matches another account than the agent's, lets everything through without any error. fn
// is called with the first result, and whenever the result changes. If a policy is missing, or the
// server does not answer, WatchPolicies tries again with growing pauses, up to Options.Relist.
//
// A dry run changes nothing. Each write would also be harmless if it were carried out:
//
//   - a label without a meaning, and an Event,
//   - the eviction of a pod that does not exist, or by a wrong UID,
//   - a ResourceSlice without devices, of a driver and a node that do not exist,
//   - an empty GPUNode of such a node.
func (c *Client) WatchPolicies(ctx context.Context, o PolicyOptions, fn func([]status.Policy)) error {
	most := max(c.options.Relist, c.server.Timing.PauseMax)
	retry := c.server.BackOff(most)
	var last []status.Policy
	for missing := 0; ; {
		attempts := c.attempts(o)
		now := make([]status.Policy, len(attempts))
		worst := status.PolicyHeld
		for i, a := range attempts {
			now[i] = c.tryPolicy(ctx, a)
			if s := now[i].State; s == status.PolicyMissing || s == status.PolicyUnknown && worst == status.PolicyHeld {
				worst = s
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if worst == status.PolicyMissing {
			missing++
		} else {
			missing = 0
		}
		if (missing == 0 || missing >= missesToReport) && !slices.Equal(now, last) {
			c.logPolicies(last, now)
			fn(slices.Clone(now))
			last = now
		}
		pause := kube.Around(c.timing.recheck)
		if worst == status.PolicyHeld {
			retry = c.server.BackOff(most)
		} else {
			pause = retry.Step()
		}
		if !kube.Sleep(ctx, pause) {
			return ctx.Err()
		}
	}
}

// attempts returns the writes to try, one for each policy.
func (c *Client) attempts(o PolicyOptions) []attempt {
	dry := []string{metav1.DryRunAll}
	create := metav1.CreateOptions{FieldManager: manager, DryRun: dry}
	notFound := apierrors.IsNotFound
	evict := func(p workload.Pod, labels map[string]any) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := c.server.API.Resource(kube.Pods).Namespace(p.Namespace).
				Create(ctx, evictionOf(p, labels, nil), metav1.CreateOptions{DryRun: dry}, "eviction")
			return err
		}
	}
	list := []attempt{
		{"gpu-agent", "patch", kube.Nodes.Resource, func(ctx context.Context) error {
			body := fmt.Sprintf(`{"metadata":{"labels":{%q:"dry-run"}}}`, c.options.Domain+"/"+dryRunName)
			_, err := c.server.API.Resource(kube.Nodes).Patch(ctx, c.options.NodeName, types.MergePatchType,
				[]byte(body), metav1.PatchOptions{FieldManager: manager, DryRun: dry})
			return err
		}, nil},
		{"gpu-agent-events", "create", events.Resource, func(ctx context.Context) error {
			dryRun := event{kind: Normal, reason: "PolicyCheck", message: "a dry run", at: c.server.Now()}
			e := dryRun.object(c.options.NodeName, c.options.Domain)
			e.SetName(dryRunName)
			e.Object["reportingComponent"] = dryRunName
			_, err := c.server.API.Resource(events).Namespace(e.GetNamespace()).Create(ctx, e, create)
			return err
		}, apierrors.IsAlreadyExists},
	}
	if o.DRA != nil && o.DRA() {
		list = append(list, attempt{"gpu-agent-dra", "create", resourceSlices.Resource, func(
			ctx context.Context,
		) error {
			object, err := sliceObject(&resourcev1.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: dryRunName},
				Spec: resourcev1.ResourceSliceSpec{Driver: dryRunName, NodeName: new(dryRunName),
					Pool: resourcev1.ResourcePool{Name: dryRunName, Generation: 1, ResourceSliceCount: 1}},
			})
			if err == nil {
				_, err = c.server.API.Resource(resourceSlices).Create(ctx, object, create)
			}
			return err
		}, apierrors.IsAlreadyExists})
	}
	if o.GPUNodes && !c.lacksGPUNodes() {
		list = append(list, attempt{"gpu-agent-gpunodes", "create", gpunode.Plural, func(ctx context.Context) error {
			object := &unstructured.Unstructured{Object: map[string]any{}}
			object.SetGroupVersionKind(c.gpuNodes().GroupVersion().WithKind(gpunode.Kind))
			object.SetName(dryRunName)
			_, err := c.server.API.Resource(c.gpuNodes()).Create(ctx, object, create)
			return err
		}, apierrors.IsAlreadyExists})
	}
	if o.Evictions {
		list = append(list, attempt{"gpu-agent-evict", "create", kube.Pods.Resource + "/eviction",
			evict(workload.Pod{Namespace: metav1.NamespaceDefault, Name: dryRunName}, nil), notFound})
		if o.Pod.Name != "" {
			own := o.Pod
			own.UID = noUID
			list = append(list, attempt{"gpu-agent-evict-node", "create", kube.Pods.Resource + "/eviction",
				evict(own, evictionLabels), func(err error) bool { return notFound(err) || apierrors.IsConflict(err) }})
		}
	}
	return list
}

// tryPolicy makes one attempt.
func (c *Client) tryPolicy(ctx context.Context, a attempt) status.Policy {
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	err := a.write(bounded)
	held, taken := byPolicy(err, ""), err == nil || a.past != nil && a.past(err)
	switch {
	case held:
		c.server.Note(ctx, a.verb, a.resource, dryRunName, nil)
		return status.Policy{Name: a.policy, State: status.PolicyHeld}
	case taken:
		c.server.Note(ctx, a.verb, a.resource, dryRunName, nil)
		return status.Policy{Name: a.policy, State: status.PolicyMissing, Reason: fmt.Sprintf(
			"the API server would take a write to %s that the admission policy %s must refuse: "+
				"apply admission.yaml of the manifests, with its binding, and see that its pattern fits "+
				"the name of the agent's service account", a.resource, a.policy)}
	}
	c.server.Note(ctx, a.verb, a.resource, dryRunName, err)
	return status.Policy{Name: a.policy, State: status.PolicyUnknown, Reason: fmt.Sprintf(
		"whether the admission policy %s is in force is not known: %v", a.policy, err)}
}

// logPolicies logs what has changed between two results.
func (c *Client) logPolicies(before, now []status.Policy) {
	for i, p := range now {
		was := status.PolicyUnknown
		if i < len(before) {
			was = before[i].State
		}
		switch {
		case p.State == was:
		case p.State == status.PolicyMissing:
			c.server.Log.Error("an admission policy is not in force", "policy", p.Name, "reason", p.Reason)
		case p.State == status.PolicyHeld:
			c.server.Log.Info("an admission policy is in force", "policy", p.Name)
		}
	}
}

// ourPolicies matches the name of one of the agent's admission policies in a refusal, also with a prefix
// and a suffix from an overlay.
var ourPolicies = regexp.MustCompile(`ValidatingAdmissionPolicy '[^']*gpu-agent[^']*'`)

// byPolicy reports whether err is a refusal by one of the agent's admission policies and contains
// words.
func byPolicy(err error, words string) bool {
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) || answer.Status().Code/100 != 4 {
		return false
	}
	message := answer.Status().Message
	return ourPolicies.MatchString(message) && strings.Contains(message, words)
}
