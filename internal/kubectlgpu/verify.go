// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/mig"
)

// Verification is what came of one example pod for each resource and DeviceClass of a node.
type Verification struct {
	Node     string    `json:"node"`
	Examples []Example `json:"examples"`
}

// Example is an example pod. It asks for a resource, or by a claim for a device of a DeviceClass.
type Example struct {
	Resource    string `json:"resource,omitempty"`
	DeviceClass string `json:"deviceClass,omitempty"`
	Amount      int    `json:"amount"`
	// Pod is its name; empty if none was made.
	Pod string `json:"pod,omitempty"`
	// Outcome is "works", "fails" or "skipped".
	Outcome string `json:"outcome"`
	// Says is what the pod saw, or why it fails or was skipped.
	Says string `json:"says"`
	// Finding is the diagnosis of a pod that did not end well; nil otherwise.
	Finding *diagnosis.Finding `json:"finding,omitempty"`
}

// Values of Example.Outcome.
const (
	Works   = "works"
	Fails   = "fails"
	Skipped = "skipped"
)

// VerifyOptions say how to verify.
type VerifyOptions struct {
	// Image is that of the pods, whose command is nvidia-smi. Empty is the agent's, which the node has.
	Image string
	// Timeout is how long one pod may take, from its creation to its end.
	Timeout time.Duration
	// Unique makes the names of the pods unique.
	Unique string
}

// Verify makes a pod for each resource and each DeviceClass that a node offers, one after the other, waits
// for its end and judges what it saw. It deletes each pod, and its claim, also if ctx ends.
func Verify(ctx context.Context, c *pluginkube.Client, node string, o VerifyOptions) (*Verification, error) {
	fleet, err := c.Fleet(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(fleet.GPUNodes, func(n diagnosis.GPUNode) bool { return n.Name == node })
	if i < 0 || fleet.GPUNodes[i].Status == nil {
		return nil, fmt.Errorf("node %s has no GPUNode that can be used: ask kubectl gpu why node/%[1]s", node)
	}
	s := fleet.GPUNodes[i].Status
	if o.Image == "" {
		agent, err := c.AgentOn(ctx, node)
		if err != nil {
			return nil, err
		}
		o.Image = agent.Image
	}
	v := &Verification{Node: node, Examples: []Example{}}
	for n, of := range append(offers(s), claimable(s, c.Domain())...) {
		e := Example{Resource: of.resource, DeviceClass: of.class, Amount: 1, Outcome: Skipped}
		if of.free {
			e.Pod = fmt.Sprintf("gpu-verify-%s-%d", o.Unique, n)
			if err := e.run(ctx, c, node, &o, &of); err != nil {
				v.Examples = append(v.Examples, e)
				return v, err
			}
		} else {
			e.Says = "nothing of it is free"
		}
		v.Examples = append(v.Examples, e)
	}
	if len(v.Examples) == 0 {
		return v, fmt.Errorf("node %s offers nothing: ask kubectl gpu why node/%[1]s", node)
	}
	return v, nil
}

// offer is something that a node offers, and what a pod with one device of it is to see.
type offer struct {
	// resource is the name of a resource, and class that of a DeviceClass. One of them is empty.
	resource, class string
	// free is true if a pod can have one now.
	free bool
	// command is what the pod runs.
	command []string
	// capMiB is the memory that it is to see, and asks for by a claim; 0 if that is not judged.
	capMiB int
	// profile is the MIG profile that it is to see; empty if none.
	profile string
}

// named returns the offer of whole devices of a name: the last part of a resource, or of a DeviceClass.
func named(base string, free bool) offer {
	out := offer{free: free, command: []string{"nvidia-smi", "-L"}}
	if profile, err := mig.ParseResource(base); err == nil {
		out.profile = profile.String()
	}
	return out
}

// ofMemory returns the offer of one unit of memory.
func ofMemory(s *gpunode.Status, free bool) offer {
	return offer{free: free, command: []string{"nvidia-smi"}, capMiB: s.MemoryUnitMiB}
}

// offers returns what a node offers through the device plugin.
func offers(s *gpunode.Status) (out []offer) {
	for i := range s.Resources {
		r := &s.Resources[i]
		if r.Total == 0 {
			continue
		}
		guaranteed, _ := piece.OfSpot(r.Name) // a spot pod sees the same
		_, base, _ := strings.Cut(guaranteed, "/")
		of := named(base, r.Largest > 0)
		memory := func(g gpunode.GPU) bool { return g.Resource == guaranteed && g.Kind.Counted().Together() }
		if slices.ContainsFunc(s.GPUs, memory) {
			of = ofMemory(s, of.free)
		}
		of.resource = r.Name
		out = append(out, of)
	}
	return out
}

// claimable returns what a node offers through DRA: each DeviceClass once.
func claimable(s *gpunode.Status, domain string) (out []offer) {
	add := func(base string, of offer) {
		of.class = base + "." + domain
		i := slices.IndexFunc(out, func(o offer) bool { return o.class == of.class })
		if i < 0 {
			out = append(out, of)
		} else {
			out[i].free = out[i].free || of.free
		}
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.API != string(workload.DRA) {
			continue
		}
		for _, kind := range piece.Kinds() {
			dynamic := g.Mode == "dynamic" && kind.Dynamic()
			switch free := g.Free > 0; {
			case kind.InMIG() || g.Total == 0 || kind != g.Kind && !dynamic:
			case kind.Together():
				add(kind.Class(), ofMemory(s, free))
			case kind.Alone():
				add(kind.Class(), named(kind.Short(), free && g.Free == g.Total))
			default:
				add(kind.Class(), named(kind.Short(), free))
			}
		}
		if g.MIG == nil {
			continue
		}
		for j := range g.MIG.Offers {
			of := &g.MIG.Offers[j]
			profile, err := mig.Parse(of.Profile)
			if err != nil {
				continue // a later version's
			}
			add(profile.Resource(), named(profile.Resource(), len(of.Free) > 0))
		}
	}
	return out
}

// example returns the pod for an offer.
func example(namespace, name, node string, o *VerifyOptions, of *offer) *corev1.Pod {
	no, yes := false, true
	nobody, now, limit := int64(65534), int64(0), int64(max(1, o.Timeout/time.Second))
	amounts := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")}
	var claims []corev1.PodResourceClaim
	var has []corev1.ResourceClaim
	if of.class != "" {
		claims = []corev1.PodResourceClaim{{Name: claimRequest, ResourceClaimName: &name}}
		has = []corev1.ResourceClaim{{Name: claimRequest}}
	} else {
		amounts[corev1.ResourceName(of.resource)] = resource.MustParse("1")
	}
	here := corev1.NodeSelectorRequirement{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
	affinity := &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{here}}}}}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{"app.kubernetes.io/managed-by": "kubectl-gpu"}},
		Spec: corev1.PodSpec{
			// The scheduler places it, so that admission and quota count as for any pod.
			Affinity:      &corev1.Affinity{NodeAffinity: affinity},
			Tolerations:   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			RestartPolicy: corev1.RestartPolicyNever, ActiveDeadlineSeconds: &limit,
			TerminationGracePeriodSeconds: &now,
			AutomountServiceAccountToken:  &no, EnableServiceLinks: &no, ResourceClaims: claims,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &nobody, RunAsGroup: &nobody,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: "main", Image: o.Image, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: of.command, Resources: corev1.ResourceRequirements{Limits: amounts, Claims: has},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}}},
		},
	}
}

// claimRequest is the name of the claim in the pod, and of its request.
const claimRequest = "gpu"

// claim returns the claim for an offer of a DeviceClass.
func claim(namespace, name string, of *offer) *resourcev1.ResourceClaim {
	exactly := &resourcev1.ExactDeviceRequest{DeviceClassName: of.class, Count: 1,
		AllocationMode: resourcev1.DeviceAllocationModeExactCount}
	if of.capMiB > 0 {
		exactly.Capacity = &resourcev1.CapacityRequirements{Requests: map[resourcev1.QualifiedName]resource.Quantity{
			"memory": *resource.NewQuantity(int64(of.capMiB)<<20, resource.BinarySI)}}
	}
	return &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{"app.kubernetes.io/managed-by": "kubectl-gpu"}},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{Name: claimRequest, Exactly: exactly}}}},
	}
}

// run makes the pod, waits for its end and judges it. It fails only if ctx ends.
func (e *Example) run(ctx context.Context, c *pluginkube.Client, node string, o *VerifyOptions, of *offer) error {
	fail := func(format string, args ...any) {
		e.Outcome, e.Says = Fails, printable(fmt.Sprintf(format, args...))
	}
	name := e.Pod // the claim's, too
	remove := func(remove func(ctx context.Context, namespace, name string) error) {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if err := remove(last, c.Namespace(), name); err != nil {
			fail("%s; and it is still there: %v", e.Says, err)
		}
	}
	if of.class != "" {
		if err := c.CreateClaim(ctx, claim(c.Namespace(), name, of)); err != nil {
			e.Pod = ""
			fail("%v", err)
			return nil
		}
		defer remove(c.DeleteClaim)
	}
	if err := c.CreatePod(ctx, example(c.Namespace(), name, node, o, of)); err != nil {
		e.Pod = ""
		fail("%v", err)
		return nil
	}
	defer remove(c.DeletePod)
	phase, err := e.await(ctx, c, o)
	switch {
	case err != nil:
		fail("%v", err)
		return ctx.Err()
	case phase != "Succeeded":
		e.explain(ctx, c)
		if e.Finding == nil {
			fail("the pod is %s after %s", phase, o.Timeout)
			return nil
		}
		fail("%s", e.Finding.Cause)
		return nil
	}
	body, err := c.Log(ctx, c.Namespace(), e.Pod, pluginkube.LogOptions{Container: "main", Most: 64 << 10})
	if err != nil {
		fail("%v", err)
		return nil
	}
	defer body.Close()
	said, err := io.ReadAll(io.LimitReader(body, 64<<10))
	if err != nil {
		fail("read its log: %v", err)
		return nil
	}
	saw, err := of.judge(string(said))
	if err != nil {
		fail("%v", err)
		return nil
	}
	e.Outcome, e.Says = Works, printable(saw)
	return nil
}

// await waits until the pod has ended, and returns its phase; or that after the time.
func (e *Example) await(ctx context.Context, c *pluginkube.Client, o *VerifyOptions) (phase string, err error) {
	limit := time.After(o.Timeout)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		p, err := c.PodPhase(ctx, c.Namespace(), e.Pod)
		if phase = p; err != nil || phase == "Succeeded" || phase == "Failed" {
			return phase, err
		}
		select {
		case <-ctx.Done():
			return phase, ctx.Err()
		case <-limit:
			return phase, nil
		case <-time.After(pause):
		}
	}
}

// explain asks why the pod did not end well.
func (e *Example) explain(ctx context.Context, c *pluginkube.Client) {
	facts, err := c.Look(ctx, pluginkube.Subject{Kind: "pod", Namespace: c.Namespace(), Name: e.Pod})
	if err != nil {
		return
	}
	if d := facts.Explain(); d.Code != diagnosis.Fine && d.Code != diagnosis.Unknown {
		e.Finding = &d.Finding
	}
}

var (
	gpuLine    = regexp.MustCompile(`(?m)^GPU \d+: (.*?) \(UUID: ([^)]+)\)`)
	migLine    = regexp.MustCompile(`(?m)^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: ([^)]+)\)`)
	memoryCell = regexp.MustCompile(`/\s*(\d+)MiB`)
)

// judge returns what a pod saw, by the output of nvidia-smi; or how it differs from what it is to
// see.
func (s *offer) judge(said string) (string, error) {
	if s.capMiB > 0 {
		cells := memoryCell.FindAllStringSubmatch(said, -1)
		if len(cells) != 1 {
			return "", fmt.Errorf("nvidia-smi shows the memory of %d GPUs, and it was given a part of one: %s",
				len(cells), oneLine(said))
		}
		if n, err := strconv.Atoi(cells[0][1]); err != nil || n != s.capMiB {
			return "", fmt.Errorf("nvidia-smi shows %s MiB, and it was given %d: the cap does not hold",
				cells[0][1], s.capMiB)
		}
		return fmt.Sprintf("it sees one GPU of %d MiB", s.capMiB), nil
	}
	gpus := gpuLine.FindAllStringSubmatch(said, -1)
	if len(gpus) != 1 {
		return "", fmt.Errorf("nvidia-smi shows %d GPUs, and it was given one: %s", len(gpus), oneLine(said))
	}
	if s.profile == "" {
		return fmt.Sprintf("it sees %s (%s)", gpus[0][1], gpus[0][2]), nil
	}
	instances := migLine.FindAllStringSubmatch(said, -1)
	if len(instances) != 1 || instances[0][1] != s.profile {
		return "", fmt.Errorf("nvidia-smi shows other MIG devices than one %s: %s", s.profile, oneLine(said))
	}
	return fmt.Sprintf("it sees one MIG %s (%s)", instances[0][1], instances[0][2]), nil
}

// oneLine returns a text on one line, cut.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	return s[:min(len(s), 200)]
}

// ErrVerify means that an example fails.
var ErrVerify = errors.New("not all examples work")

// Err returns ErrVerify with the number of examples that fail, or nil.
func (v *Verification) Err() error {
	n := 0
	for i := range v.Examples {
		if v.Examples[i].Outcome == Fails {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d of %d fail", ErrVerify, n, len(v.Examples))
}

// Write writes the examples as a table.
func (v *Verification) Write(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "RESOURCE OR DEVICECLASS\tAMOUNT\tOUTCOME\tSAYS")
	for i := range v.Examples {
		e := &v.Examples[i]
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", printable(e.Resource+e.DeviceClass), e.Amount, e.Outcome, e.Says)
	}
	return w.Flush()
}
