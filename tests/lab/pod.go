// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// PodNamespace is where the pods of demo and tests live.
const PodNamespace = "work"

// TestImage is the image of containers that do not name one: glibc, its tools
// and busybox.
const TestImage = "localhost/glibc:test"

// Pod is a pod to make. Its containers print what they see and wait.
type Pod struct {
	Name string
	// Init containers see and end, one after the other.
	Init       []Container
	Containers []Container
	// Labels are further labels, and Annotations those of a pod that is made alone.
	Labels      map[string]string
	Annotations map[string]string
	// Once leaves the containers ended when they end; else they run anew.
	Once bool
	// Grace is how long a container may take to end when it is asked to; one
	// second where it is zero.
	Grace time.Duration
	// Pinned puts the pod on the node without asking the scheduler, so that the
	// kubelet alone judges it, and at once.
	Pinned bool
	// Stays leaves the pod on a node that is unreachable. Otherwise Kubernetes deletes it
	// after five minutes on such a node.
	Stays bool
}

// Container is one container of a Pod.
type Container struct {
	// Name is "main" where it is empty.
	Name string
	// Image is TestImage where it is empty.
	Image string
	// Resources are extended resources and how many of each.
	Resources map[string]int
	// Claims are ResourceClaims that it has all devices of, by name.
	Claims []string
	// Templates are ResourceClaimTemplates, by name: it has all devices of a claim of its
	// own of each.
	Templates []string
	// Then is a shell script: what the container does when it has looked around.
	// Where it is empty, an init container ends, and another waits for its end.
	Then string
	// Pull lets the kubelet pull an image that the node lacks.
	Pull bool
	// Mounts are files and directories of the node's that the container sees.
	Mounts []Mount
	// Privileged gives it all of the node's devices, as no allocation would.
	Privileged bool
	// Sidecar has an init container stay beside the others.
	Sidecar bool
}

// Mount shows a container what the node has at a path, at the same or another.
type Mount struct {
	Host, Path string
	ReadOnly   bool
}

// Scripts for Container.Then.
const (
	// Wait waits for the container's end: what containers do of themselves, for
	// an init container that is not to end.
	Wait = "sleep 1000000 & wait\n"
	// UntilTold ends when RunningPod.Tell says so.
	UntilTold = "until [ -s /told ]; do sleep 0.1; done; while [ -e /proc/$(cat /told) ]; do sleep 0.1; done\n"
	// Crash fails at once.
	Crash = "exit 1\n"
	// Deaf hears no request to end.
	Deaf = "trap '' TERM\nwhile :; do sleep 1; done\n"
)

// look is what containers run first. dlopen-check, of the image, loads a library
// by its name as any program would, and prints the file that was found.
const look = `
for d in /dev/nvidia* /dev/nvidia-caps/*; do [ -c "$d" ] && echo "device $d"; done
dlopen-check libcuda.so.1 2>&1 | while read -r line; do echo "libcuda $line"; done
while read -r id parent dev root target rest; do
  case "$target" in *nvidia* | *libcuda*) echo "mount $target $root" ;; esac
done < /proc/self/mountinfo
echo "visible ${NVIDIA_VISIBLE_DEVICES:-unset}"
echo seen
`

// CreatePod makes a pod and does not wait for anything.
func (n *Node) CreatePod(ctx context.Context, p Pod) (*RunningPod, error) {
	if err := n.api.create(ctx, podsPath, n.PodObject(p)); err != nil {
		return nil, fmt.Errorf("make pod %s: %w", p.Name, err)
	}
	return &RunningPod{Name: p.Name, node: n, spec: p}, nil
}

// PodObject is the pod that CreatePod makes, for another cluster to send here.
func (n *Node) PodObject(p Pod) map[string]any {
	return object{"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": p.Name, "labels": p.Labels, "annotations": p.Annotations}, "spec": n.podSpec(p)}
}

// CreateJob makes a Job of one pod and returns that pod, which stays when the
// Job is done. DeletePods leaves Jobs alone: DeleteJob is the caller's.
func (n *Node) CreateJob(ctx context.Context, p Pod) (*RunningPod, error) {
	if err := n.CreateRetried(ctx, p, 0); err != nil {
		return nil, err
	}
	pod := &RunningPod{node: n, spec: p}
	return pod, Await(ctx, time.Minute, "the pod of job "+p.Name, func(ctx context.Context) error {
		var list struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		if err := n.api.get(ctx, podsPath+"?labelSelector=job-name%3D"+p.Name, &list); err != nil {
			return err
		}
		if len(list.Items) != 1 {
			return fmt.Errorf("it has %d pods", len(list.Items))
		}
		pod.Name = list.Items[0].Metadata.Name
		return nil
	})
}

// CreateRetried makes a Job whose pod is made anew when it fails, so many times.
// JobDone says how it stands.
func (n *Node) CreateRetried(ctx context.Context, p Pod, retries int) error {
	return n.CreateParallel(ctx, p, 1, retries)
}

// CreateParallel is CreateRetried of a Job of several pods at once.
func (n *Node) CreateParallel(ctx context.Context, p Pod, pods, retries int) error {
	p.Once = true
	o := object{"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": p.Name},
		"spec": object{"parallelism": pods, "completions": pods, "backoffLimit": retries, "template": object{"metadata": object{"labels": p.Labels}, "spec": n.podSpec(p)}}}
	if err := n.api.create(ctx, jobsPath, o); err != nil {
		return fmt.Errorf("make job %s: %w", p.Name, err)
	}
	return nil
}

// JobState is what Kubernetes says of a Job: how many of its pods have failed,
// and Complete or Failed once it has ended.
type JobState struct {
	FailedPods int
	Ended      string
}

// JobState reads a Job.
func (n *Node) JobState(ctx context.Context, name string) (JobState, error) {
	var o struct {
		Status struct {
			Failed     int
			Conditions []struct{ Type, Status string }
		}
	}
	if err := n.api.get(ctx, jobsPath+"/"+name, &o); err != nil {
		return JobState{}, err
	}
	s := JobState{FailedPods: o.Status.Failed}
	for _, c := range o.Status.Conditions {
		if c.Status == "True" && (c.Type == "Complete" || c.Type == "Failed") {
			s.Ended = c.Type
		}
	}
	return s, nil
}

// CreateReplicas makes a ReplicaSet that keeps so many pods of a kind. DeletePods
// leaves it alone: DeleteReplicas is the caller's.
func (n *Node) CreateReplicas(ctx context.Context, p Pod, replicas int) error {
	labels := map[string]string{"replicas": p.Name}
	maps.Copy(labels, p.Labels)
	o := object{"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": object{"name": p.Name},
		"spec": object{"replicas": replicas, "selector": object{"matchLabels": object{"replicas": p.Name}},
			"template": object{"metadata": object{"labels": labels}, "spec": n.podSpec(p)}}}
	if err := n.api.create(ctx, replicasPath, o); err != nil {
		return fmt.Errorf("make replica set %s: %w", p.Name, err)
	}
	return nil
}

// DeleteReplicas deletes a ReplicaSet and its pods.
func (n *Node) DeleteReplicas(ctx context.Context, name string) error {
	if err := n.api.remove(ctx, replicasPath+"/"+name+"?propagationPolicy=Background"); err != nil {
		return fmt.Errorf("delete replica set %s: %w", name, err)
	}
	return nil
}

// Pods are the lab's pods that a label chooses, or all where it is empty, and how
// they stand, in the order of their names.
func (n *Node) Pods(ctx context.Context, label string) ([]ListedPod, error) {
	var list struct{ Items []podObject }
	if err := n.api.get(ctx, podsPath+"?labelSelector="+url.QueryEscape(label), &list); err != nil {
		return nil, err
	}
	var out []ListedPod
	for _, o := range list.Items {
		out = append(out, ListedPod{&RunningPod{Name: o.Metadata.Name, node: n}, o.state()})
	}
	return out, nil
}

// ListedPod is a pod that the lab did not make itself.
type ListedPod struct {
	*RunningPod
	PodState
}

// String is the pod's name and how it stands.
func (p ListedPod) String() string { return p.Name + ": " + p.PodState.String() }

// DeleteJob deletes a Job and the pod with it.
func (n *Node) DeleteJob(ctx context.Context, name string) error {
	if err := n.api.remove(ctx, jobsPath+"/"+name+"?propagationPolicy=Background"); err != nil {
		return fmt.Errorf("delete job %s: %w", name, err)
	}
	return nil
}

// StaticPod gives the kubelet a pod by a file, past the API server, which has a
// mirror of it only. Its name gets the node's as a suffix. It goes with
// RunningPod.Delete.
func (n *Node) StaticPod(ctx context.Context, p Pod) (*RunningPod, error) {
	o := object{"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": p.Name, "namespace": PodNamespace, "labels": p.Labels, "annotations": p.Annotations}, "spec": n.podSpec(p)}
	data, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("make static pod %s: %w", p.Name, err)
	}
	// The kubelet passes over names that begin with a dot.
	file, temporary := n.File(manifests+p.Name+".json"), n.File(manifests+"."+p.Name)
	if err := os.WriteFile(temporary, data, 0o644); err != nil {
		return nil, fmt.Errorf("make static pod %s: %w", p.Name, err)
	}
	if err := os.Rename(temporary, file); err != nil {
		return nil, fmt.Errorf("make static pod %s: %w", p.Name, err)
	}
	return &RunningPod{Name: p.Name + "-" + n.Name, node: n, spec: p, file: file}, nil
}

const (
	podsPath     = "/api/v1/namespaces/" + PodNamespace + "/pods"
	jobsPath     = "/apis/batch/v1/namespaces/" + PodNamespace + "/jobs"
	replicasPath = "/apis/apps/v1/namespaces/" + PodNamespace + "/replicasets"
	manifests    = "/etc/kubernetes/manifests/"
)

// object is one of Kubernetes', in JSON.
type object = map[string]any

func (n *Node) podSpec(p Pod) object {
	volumes, claims := []any{}, []any{}
	containers := func(list []Container, prelude, then string) (out []any) {
		for _, c := range list {
			limits := map[string]string{}
			for name, count := range c.Resources {
				limits[name] = strconv.Itoa(count)
			}
			image, pull, script := TestImage, "Never", then
			if c.Image != "" {
				image = c.Image
			}
			if c.Pull {
				pull = "IfNotPresent"
			}
			if c.Then != "" {
				script = c.Then
			}
			var mounts []any
			for _, m := range c.Mounts {
				volume := fmt.Sprintf("host-%d", len(volumes))
				volumes = append(volumes, object{"name": volume, "hostPath": object{"path": m.Host}})
				mounts = append(mounts, object{"name": volume, "mountPath": m.Path, "readOnly": m.ReadOnly})
			}
			var of []any
			for _, name := range c.Claims {
				of = append(of, object{"name": name})
				if claim := (object{"name": name, "resourceClaimName": name}); !slices.ContainsFunc(claims, func(o any) bool { return o.(object)["name"] == name }) {
					claims = append(claims, claim)
				}
			}
			for _, template := range c.Templates {
				name := fmt.Sprintf("claim-%d", len(claims))
				of = append(of, object{"name": name})
				claims = append(claims, object{"name": name, "resourceClaimTemplateName": template})
			}
			container := object{
				"name": c.name(), "image": image, "imagePullPolicy": pull,
				"command":         []string{"/bin/sh", "-c", prelude + look + script},
				"resources":       object{"limits": limits, "claims": of},
				"volumeMounts":    mounts,
				"securityContext": object{"privileged": c.Privileged},
			}
			if c.Sidecar {
				container["restartPolicy"] = "Always"
			}
			out = append(out, container)
		}
		return out
	}
	// A shell that is PID 1 ends by a signal only if it asks for it.
	const obedient = "trap 'exit 0' TERM\n"
	spec := object{
		"restartPolicy":                 "Always",
		"terminationGracePeriodSeconds": max(1, int(p.Grace/time.Second)),
		"automountServiceAccountToken":  false,
		"enableServiceLinks":            false,
		"initContainers":                containers(p.Init, obedient, ""),
		"containers":                    containers(p.Containers, obedient, Wait),
	}
	spec["volumes"], spec["resourceClaims"] = volumes, claims // which the containers above have asked for
	if p.Once {
		spec["restartPolicy"] = "Never"
	}
	if p.Stays {
		spec["tolerations"] = []object{{"operator": "Exists", "effect": "NoExecute"}}
	}
	if p.Pinned {
		spec["nodeName"] = n.Name
	}
	return spec
}

// RunningPod is a pod that was made.
type RunningPod struct {
	Name string
	node *Node
	spec Pod
	// file is a static pod's.
	file string
}

// PodState is what Kubernetes says of a pod.
type PodState struct {
	UID                    string
	Phase, Reason, Message string
	// Containers has every container, init ones too, by name.
	Containers map[string]ContainerState
	Condition  map[string]string // why a condition that is not true is not
}

// ContainerState is how one container of a pod stands.
type ContainerState struct {
	// ID is the runtime's for the newest container.
	ID       string
	Ready    bool
	Running  bool
	Restarts int
	Waiting  string // why it does not run
	// Ended says how it ended, "Completed" or "Error", where it has.
	Ended string
	// LastExit is the exit code of the one before the newest.
	LastExit int
	// Health has, for each device ID that the kubelet says the container has,
	// what it says of it: Healthy, Unhealthy or Unknown.
	Health map[string]string
}

func (s PodState) String() string {
	out := "phase " + s.Phase
	if s.Reason != "" || s.Message != "" {
		out += fmt.Sprintf(" (%s: %s)", s.Reason, s.Message)
	}
	for _, name := range sortedKeys(s.Containers) {
		if c := s.Containers[name]; c.Waiting != "" {
			out += fmt.Sprintf(", container %s waits: %s", name, c.Waiting)
		}
	}
	for _, kind := range sortedKeys(s.Condition) {
		out += fmt.Sprintf(", not %s: %s", kind, s.Condition[kind])
	}
	return out
}

func (p *RunningPod) path() string { return podsPath + "/" + p.Name }

// String is the pod's name as people write it: namespace/name.
func (p *RunningPod) String() string { return PodNamespace + "/" + p.Name }

// podObject is a pod as the API server has it.
type podObject struct {
	Metadata struct{ Name, UID string }
	Status   struct {
		Phase, Reason, Message                   string
		ContainerStatuses, InitContainerStatuses []containerStatus
		Conditions                               []struct{ Type, Status, Reason, Message string }
	}
}

type containerStatus struct {
	Name, ContainerID string
	Ready             bool
	RestartCount      int
	State             struct {
		Waiting    *struct{ Reason, Message string }
		Running    *struct{}
		Terminated *struct{ Reason string }
	}
	LastState struct {
		Terminated *struct{ ExitCode int }
	}
	AllocatedResourcesStatus []struct {
		Resources []struct{ ResourceID, Health string }
	}
}

// State reads the pod.
func (p *RunningPod) State(ctx context.Context) (PodState, error) {
	var o podObject
	if err := p.node.api.get(ctx, p.path(), &o); err != nil {
		return PodState{}, err
	}
	return o.state(), nil
}

func (o *podObject) state() PodState {
	s := PodState{UID: o.Metadata.UID, Phase: o.Status.Phase, Reason: o.Status.Reason, Message: o.Status.Message,
		Containers: map[string]ContainerState{}, Condition: map[string]string{}}
	for _, c := range append(o.Status.InitContainerStatuses, o.Status.ContainerStatuses...) {
		_, id, _ := strings.Cut(c.ContainerID, "://")
		cs := ContainerState{ID: id, Ready: c.Ready, Running: c.State.Running != nil, Restarts: c.RestartCount, Health: map[string]string{}}
		if t := c.State.Terminated; t != nil {
			cs.Ended = t.Reason
		}
		if t := c.LastState.Terminated; t != nil {
			cs.LastExit = t.ExitCode
		}
		for _, a := range c.AllocatedResourcesStatus {
			for _, r := range a.Resources {
				cs.Health[r.ResourceID] = r.Health
			}
		}
		if w := c.State.Waiting; w != nil {
			cs.Waiting = strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
		}
		s.Containers[c.Name] = cs
	}
	for _, c := range o.Status.Conditions {
		if c.Status != "True" && c.Message != "" {
			s.Condition[c.Type] = c.Message
		}
	}
	return s
}

// Running waits until all containers run.
func (p *RunningPod) Running(ctx context.Context) error {
	err := Await(ctx, time.Minute, "pod "+p.Name+" to run", func(ctx context.Context) error {
		s, err := p.State(ctx)
		if err != nil {
			return err
		}
		if s.Phase == "Failed" || s.Phase == "Succeeded" {
			return fmt.Errorf("%s: %w", s, ErrNever)
		}
		for _, c := range p.spec.Containers {
			if !s.Containers[c.name()].Ready {
				return errors.New(s.String())
			}
		}
		return nil
	})
	return p.explain(ctx, err)
}

func (c Container) name() string {
	if c.Name == "" {
		return "main"
	}
	return c.Name
}

// explain adds what the pod's Events say to an error of a wait. It is not for each look: the
// API server goes through all Events of the namespace to find the pod's.
func (p *RunningPod) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	events, failed := p.node.Events(ctx, "Pod", PodNamespace, p.Name)
	if failed != nil {
		return err
	}
	for _, e := range events {
		if e.Type == "Warning" {
			err = fmt.Errorf("%w; %s: %s", err, e.Reason, e.Message)
		}
	}
	return err
}

// Refused waits until the kubelet has refused the pod for good, and returns
// its state, whose message is what the user reads.
func (p *RunningPod) Refused(ctx context.Context) (PodState, error) {
	var s PodState
	err := Await(ctx, time.Minute, "pod "+p.Name+" to be refused", func(ctx context.Context) (err error) {
		if s, err = p.State(ctx); err != nil {
			return err
		}
		if s.Phase == "Failed" {
			return nil
		}
		if s.Phase == "Running" {
			return fmt.Errorf("it runs: %w", ErrNever)
		}
		return errors.New(s.String())
	})
	return s, err
}

// Unschedulable waits until the scheduler has found no room for the pod, and
// returns what it says.
func (p *RunningPod) Unschedulable(ctx context.Context) (string, error) {
	var message string
	err := Await(ctx, time.Minute, "pod "+p.Name+" to find no room", func(ctx context.Context) error {
		s, err := p.State(ctx)
		if err != nil {
			return err
		}
		message = s.Condition["PodScheduled"]
		switch {
		case message != "":
			return nil
		case s.Phase != "Pending":
			return fmt.Errorf("%s: %w", s, ErrNever)
		}
		return errors.New(s.String())
	})
	return message, err
}

// InState waits until check, which says what is wrong with it, finds the pod in
// order.
func (p *RunningPod) InState(ctx context.Context, limit time.Duration, what string, check func(PodState) error) error {
	err := Await(ctx, limit, "pod "+p.Name+" "+what, func(ctx context.Context) error {
		s, err := p.State(ctx)
		if err != nil {
			return err
		}
		if err := check(s); err != nil {
			return fmt.Errorf("%w: %s", err, s)
		}
		return nil
	})
	return p.explain(ctx, err)
}

// Tell lets a container that runs UntilTold go on, once what tells it has ended: a container
// that ended before would kill that.
func (p *RunningPod) Tell(ctx context.Context, container string) error {
	_, err := p.Exec(ctx, container, "sh", "-c", "echo $$ > /told")
	return err
}

// ForceDelete takes the pod out of the API at once, whatever its containers do.
func (p *RunningPod) ForceDelete(ctx context.Context) error {
	if err := p.node.api.remove(ctx, p.path()+"?gracePeriodSeconds=0"); err != nil {
		return fmt.Errorf("delete pod %s by force: %w", p.Name, err)
	}
	return nil
}

// Delete asks for the pod's end.
func (p *RunningPod) Delete(ctx context.Context) error {
	if p.file != "" {
		if err := os.Remove(p.file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("delete static pod %s: %w", p.Name, err)
		}
		return nil
	}
	if err := p.node.api.remove(ctx, p.path()); err != nil {
		return fmt.Errorf("delete pod %s: %w", p.Name, err)
	}
	return nil
}

// Gone waits until there is no such pod.
func (p *RunningPod) Gone(ctx context.Context) error {
	return Await(ctx, time.Minute, "the end of pod "+p.Name, func(ctx context.Context) error {
		s, err := p.State(ctx)
		if isNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return errors.New(s.String())
	})
}

// DeletePods ends all pods of the lab and waits until they are gone.
func (n *Node) DeletePods(ctx context.Context) error {
	static, err := filepath.Glob(n.File(manifests + "*.json"))
	if err != nil {
		return err
	}
	for _, file := range static {
		if err := os.Remove(file); err != nil {
			return fmt.Errorf("delete all pods: %w", err)
		}
	}
	if err := n.api.do(ctx, http.MethodDelete, podsPath, "", nil, nil); err != nil {
		return fmt.Errorf("delete all pods: %w", err)
	}
	return Await(ctx, time.Minute, "the end of all pods", func(ctx context.Context) error {
		var list struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		if err := n.api.get(ctx, podsPath, &list); err != nil {
			return err
		}
		var names []string
		for _, item := range list.Items {
			names = append(names, item.Metadata.Name)
		}
		if len(names) > 0 {
			return fmt.Errorf("there are %s", strings.Join(names, ", "))
		}
		return nil
	})
}

// Inside is what a container sees of GPUs.
type Inside struct {
	// Devices are the paths /dev/nvidia*, sorted.
	Devices []string
	// CUDA is the file that the loader finds for libcuda.so.1, links followed;
	// empty if it finds none, and then CUDAError says why.
	CUDA, CUDAError string
	// Mounts maps each mounted file of the driver to its path on the file
	// system that it comes from.
	Mounts map[string]string
	// Visible is NVIDIA_VISIBLE_DEVICES, "unset" where it is not set.
	Visible string
}

// GPUMinors are the minors of the GPUs among the devices, in ascending order.
func (i Inside) GPUMinors() []int {
	var minors []int
	for _, d := range i.Devices {
		if minor, err := strconv.Atoi(strings.TrimPrefix(d, "/dev/nvidia")); err == nil {
			minors = append(minors, minor)
		}
	}
	slices.Sort(minors)
	return minors
}

// Inside waits until a container has looked around, and returns what it saw.
func (p *RunningPod) Inside(ctx context.Context, container string) (Inside, error) {
	if container == "" {
		container = "main"
	}
	seen := Inside{Mounts: map[string]string{}}
	var log []byte
	err := Await(ctx, time.Minute, fmt.Sprintf("what container %s of pod %s sees", container, p.Name), func(ctx context.Context) error {
		if err := p.node.api.get(ctx, p.path()+"/log?container="+container, &log); err != nil {
			if s, serr := p.State(ctx); serr == nil && s.Phase == "Failed" {
				return fmt.Errorf("%s: %w", s, ErrNever)
			}
			return err
		}
		if !bytes.HasSuffix(log, []byte("seen\n")) {
			return fmt.Errorf("its log is %q", log)
		}
		return nil
	})
	if err != nil {
		return seen, err
	}
	lines := bufio.NewScanner(bytes.NewReader(log))
	for lines.Scan() {
		kind, rest, _ := strings.Cut(lines.Text(), " ")
		switch kind {
		case "device":
			seen.Devices = append(seen.Devices, rest)
		case "libcuda":
			if file, ok := strings.CutPrefix(rest, "libcuda.so.1 => "); ok {
				seen.CUDA = file
			} else {
				seen.CUDAError = rest
			}
		case "mount":
			target, from, _ := strings.Cut(rest, " ")
			seen.Mounts[target] = from
		case "visible":
			seen.Visible = rest
		case "seen":
		default:
			return seen, fmt.Errorf("container %s of pod %s printed %q", container, p.Name, lines.Text())
		}
	}
	slices.Sort(seen.Devices)
	return seen, nil
}

// RestartContainer ends a container and waits until the kubelet has started it
// anew, as it does at once the first time.
func (p *RunningPod) RestartContainer(ctx context.Context, container string) error {
	if container == "" {
		container = "main"
	}
	var before PodState
	var process Process
	if err := Await(ctx, time.Minute, fmt.Sprintf("container %s of pod %s to run", container, p.Name), func(ctx context.Context) (err error) {
		if before, err = p.State(ctx); err == nil {
			process, err = p.node.InitProcess(before.Containers[container].ID)
		}
		return err
	}); err != nil {
		return err
	}
	// Not by exec: a kubelet that is new may not know the pod yet.
	if err := p.node.Signal(ctx, process, "TERM"); err != nil {
		return err
	}
	want := before.Containers[container].Restarts + 1
	err := Await(ctx, time.Minute, fmt.Sprintf("container %s of pod %s to run anew", container, p.Name), func(ctx context.Context) error {
		s, err := p.State(ctx)
		if err != nil {
			return err
		}
		if c := s.Containers[container]; c.Restarts < want || !c.Ready {
			return fmt.Errorf("%s, %d restarts", s, c.Restarts)
		}
		return nil
	})
	return p.explain(ctx, err)
}

// Log is what a container has printed since it was started last.
func (p *RunningPod) Log(ctx context.Context, container string) (string, error) {
	if container == "" {
		container = "main"
	}
	var log []byte
	err := p.node.api.get(ctx, p.path()+"/log?container="+container, &log)
	return string(log), err
}

// Exec runs a command in a container and returns what it prints.
func (p *RunningPod) Exec(ctx context.Context, container string, command ...string) ([]byte, error) {
	if container == "" {
		container = "main"
	}
	return p.node.Kubectl(ctx, nil, append([]string{"exec", "-n", PodNamespace, p.Name, "-c", container, "--"}, command...)...)
}
