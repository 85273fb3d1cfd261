// SPDX-License-Identifier: Apache-2.0

package lab

import (
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

	"go.yaml.in/yaml/v4"
)

// What the manifests of deployments/ call things.
const (
	Domain         = "example.com"
	AgentNamespace = "gpu-agent"
	configMap      = "gpu-partitions"
	configKey      = "config.yaml"

	// NodeLabel is the label of nodes that the agent runs on.
	NodeLabel = Domain + "/gpu.node"
	// PartitionLabel chooses a node's partition.
	PartitionLabel = Domain + "/gpu.partition"
	// StateLabel and MessageAnnotation are where the agent says what became of
	// it.
	StateLabel        = Domain + "/gpu.partition.state"
	MessageAnnotation = Domain + "/gpu.partition.message"

	// Resources.
	GPU      = Domain + "/gpu"
	Memory   = Domain + "/gpu-mem"
	Replicas = Domain + "/gpu.shared"
)

// MIG is the resource of a MIG profile, such as 1g.10gb or 1g.10gb+me.
func MIG(profile string) string { return Domain + "/mig-" + strings.ReplaceAll(profile, "+", ".") }

// Agent is the product on a node, as its DaemonSet, which a cluster has one of: partitions
// and what [DeployOptions] says are for all nodes, the rest is about the one.
type Agent struct {
	node *Node
	// pod is the agent's pod that was seen last.
	pod string
}

// DeployOptions say how the agent is deployed.
type DeployOptions struct {
	// Overlay names a directory of deployments/overlays; empty is the base.
	Overlay string
	// Components name directories of deployments/components. What one brings
	// beside the agent stays until RemoveComponent.
	Components []string
	// Partitions is the partition file; empty leaves the sample.
	Partitions string
	// Env is set beside what the manifests set; the flags' twins are meant.
	Env map[string]string
}

// Deploy applies the manifests that users apply, changed in three things only:
// the image is never pulled, as there is no registry, /proc is looked at where
// the emulated driver has its files, and what o says is the caller's. It labels the node for the agent, and waits until the agent
// that has these options is ready. It may be called again with others. Of a cluster of
// several nodes it is called for each that is to have the agent, with the same options.
func (n *Node) Deploy(ctx context.Context, o DeployOptions) (*Agent, error) {
	dir, err := n.Dir("deploy")
	if err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	manifests := func(path ...string) (string, error) { // kustomize takes no absolute path
		return filepath.Rel(dir, filepath.Join(append([]string{n.kit.Root, "deployments"}, path...)...))
	}
	source, err := manifests("base")
	if o.Overlay != "" {
		source, err = manifests("overlays", o.Overlay)
	}
	if err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	components := []string{}
	for _, name := range o.Components {
		component, err := manifests("components", name)
		if err != nil {
			return nil, fmt.Errorf("deploy the agent: %w", err)
		}
		components = append(components, component)
	}
	type patch struct {
		Target map[string]string `json:"target"`
		Patch  string            `json:"patch"`
	}
	container := object{"name": "gpu-agent", "imagePullPolicy": "Never"}
	// The driver's files of /proc are laid over the node's; a container's own
	// /proc has what this kernel's drivers put there, and this driver is none.
	vars := map[string]string{"GPU_AGENT_PROC_ROOT": "/host/proc"}
	maps.Copy(vars, o.Env)
	var env []object
	for _, name := range sortedKeys(vars) {
		env = append(env, object{"name": name, "value": vars[name]})
	}
	container["env"] = env
	spec := object{"containers": []object{container}}
	// Merged by names, so that a variable that a component sets is there once.
	data, err := json.Marshal(object{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": object{"name": "gpu-agent"},
		"spec": object{"template": object{"spec": spec}}})
	if err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	patches := []patch{{map[string]string{"kind": "DaemonSet", "name": "gpu-agent"}, string(data)}}
	if o.Partitions != "" {
		data, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/data", "value": map[string]string{configKey: o.Partitions}}})
		if err != nil {
			return nil, fmt.Errorf("deploy the agent: %w", err)
		}
		patches = append(patches, patch{map[string]string{"kind": "ConfigMap", "name": configMap}, string(data)})
	}
	kustomization, err := json.MarshalIndent(map[string]any{ // JSON is YAML too
		"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
		"resources": []string{source}, "components": components, "patches": patches,
	}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), append(kustomization, '\n'), 0o644); err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	if err := n.Label(ctx, map[string]string{NodeLabel: "true"}); err != nil {
		return nil, err
	}
	if _, err := n.Kubectl(ctx, nil, "apply", "-k", dir); err != nil {
		return nil, fmt.Errorf("deploy the agent: %w", err)
	}
	a := &Agent{node: n}
	return a, a.Ready(ctx)
}

// RemoveComponent deletes what a component has brought beside the agent, which
// is deployed without it already.
func (n *Node) RemoveComponent(ctx context.Context, name string) error {
	dir := filepath.Join(n.kit.Root, "deployments", "components", name)
	data, err := os.ReadFile(filepath.Join(dir, "kustomization.yaml"))
	if err != nil {
		return fmt.Errorf("remove the component %s: %w", name, err)
	}
	var k struct{ Resources []string }
	if err := yaml.Unmarshal(data, &k); err != nil {
		return fmt.Errorf("remove the component %s: %w", name, err)
	}
	args := []string{"delete", "--ignore-not-found"}
	for _, file := range k.Resources {
		args = append(args, "-f", filepath.Join(dir, file))
	}
	if _, err := n.Kubectl(ctx, nil, args...); err != nil {
		return fmt.Errorf("remove the component %s: %w", name, err)
	}
	return nil
}

// mpsName is the DaemonSet and the label of the pods of MPS daemons.
const mpsName = "gpu-agent-mps"

const agentPods = "/api/v1/namespaces/" + AgentNamespace + "/pods"

// Ready waits until the node's one pod, of the DaemonSet's newest form, is ready.
func (a *Agent) Ready(ctx context.Context) error {
	return Await(ctx, 90*time.Second, "the agent to be ready", func(ctx context.Context) error {
		var set struct {
			Metadata struct{ Generation int }
			Status   struct {
				ObservedGeneration                                          int
				DesiredNumberScheduled, UpdatedNumberScheduled, NumberReady int
			}
		}
		if err := a.node.api.get(ctx, "/apis/apps/v1/namespaces/"+AgentNamespace+"/daemonsets/gpu-agent", &set); err != nil {
			return err
		}
		pods, err := a.pods(ctx)
		if err != nil {
			return err
		}
		var seen []string
		for _, p := range pods {
			seen = append(seen, p.String())
		}
		s := set.Status
		if s.ObservedGeneration != set.Metadata.Generation || s.DesiredNumberScheduled == 0 || s.UpdatedNumberScheduled != s.DesiredNumberScheduled ||
			len(pods) != 1 || pods[0].deleted || !pods[0].ready {
			return fmt.Errorf("the DaemonSet wants %d pods, %d are up to date, %d are ready: %s",
				s.DesiredNumberScheduled, s.UpdatedNumberScheduled, s.NumberReady, strings.Join(seen, "; "))
		}
		a.pod = pods[0].name
		return nil
	})
}

type agentPod struct {
	name, phase, waiting string
	ready, deleted       bool
	restarts             int
}

func (p agentPod) String() string {
	return fmt.Sprintf("%s %s, ready %v, %d restarts %s", p.name, p.phase, p.ready, p.restarts, p.waiting)
}

// pods are the agent's on this node.
func (a *Agent) pods(ctx context.Context) ([]agentPod, error) {
	var list struct {
		Items []struct {
			Metadata struct{ Name, DeletionTimestamp string }
			Status   struct {
				Phase             string
				ContainerStatuses []struct {
					Ready        bool
					RestartCount int
					State        struct {
						Waiting *struct{ Reason, Message string }
					}
					LastState struct {
						Terminated *struct{ Reason, Message string }
					}
				}
				InitContainerStatuses []struct {
					State, LastState struct {
						Terminated *struct{ Reason, Message string }
					}
				}
			}
		}
	}
	if err := a.node.api.get(ctx, agentPods+"?labelSelector=app.kubernetes.io%2Fname%21%3D"+mpsName+
		"&fieldSelector=spec.nodeName%3D"+a.node.Name, &list); err != nil {
		return nil, err
	}
	var out []agentPod
	for _, item := range list.Items {
		p := agentPod{name: item.Metadata.Name, phase: item.Status.Phase, deleted: item.Metadata.DeletionTimestamp != ""}
		for _, c := range item.Status.InitContainerStatuses {
			for _, t := range []*struct{ Reason, Message string }{c.State.Terminated, c.LastState.Terminated} {
				if t != nil && t.Message != "" {
					p.waiting = t.Reason + " " + t.Message
				}
			}
		}
		for _, c := range item.Status.ContainerStatuses {
			p.ready, p.restarts = c.Ready, c.RestartCount
			if w := c.State.Waiting; w != nil {
				p.waiting = strings.TrimSpace(p.waiting + " " + w.Reason + " " + w.Message)
			}
			if t := c.LastState.Terminated; t != nil && !c.Ready {
				p.waiting += " last ended: " + t.Reason + " " + t.Message
			}
		}
		out = append(out, p)
	}
	return out, nil
}

// SetPartitions writes the ConfigMap, and does not wait for what follows.
func (a *Agent) SetPartitions(ctx context.Context, file string) error {
	data := map[string]string{configKey: file}
	err := a.node.api.patch(ctx, configMaps+"/"+configMap, object{"data": data})
	if isNotFound(err) {
		err = a.node.api.create(ctx, configMaps, object{"metadata": object{"name": configMap}, "data": data})
	}
	if err != nil {
		return fmt.Errorf("edit the partitions: %w", err)
	}
	return nil
}

const configMaps = "/api/v1/namespaces/" + AgentNamespace + "/configmaps"

// Status is the agent's own view, as /statusz shows it.
type Status struct {
	Version, Driver string
	Allocations     int
	Partition       struct {
		Name, State, Message, Source string
		Generation                   int
	}
	GPUs []GPUStatus
	// Containers is the memory of containers by GPU.
	Containers []ContainerStatus
	Watchdog   struct {
		State, Reason    string
		Kills, Intruders int
	}
}

// ContainerStatus is a container's memory on one GPU.
type ContainerStatus struct {
	Namespace, Pod, Container, GPU string
	Index                          int
	// CapMiB is nil where there is no cap, UsedMiB where nobody knows.
	CapMiB, UsedMiB              *int
	PeakMiB, Refusals, Processes int
	Guarantee                    string
	// ComputePercent is its share of the SMs, 0 where there is none; Compute is how strongly that is held.
	ComputePercent int
	Compute        struct {
		Guarantee, Reason string
		Ceiling           int
	}
}

func (c ContainerStatus) String() string {
	amount := func(mib *int) string {
		if mib == nil {
			return "-"
		}
		return strconv.Itoa(*mib)
	}
	return fmt.Sprintf("%s/%s on GPU %d: cap %s, used %s, peak %d MiB, guarantee %q, %d refusals, %d processes",
		c.Pod, c.Container, c.Index, amount(c.CapMiB), amount(c.UsedMiB), c.PeakMiB, c.Guarantee, c.Refusals, c.Processes)
}

// GPUStatus is one GPU of a Status.
type GPUStatus struct {
	Index                        int
	UUID, Mode, Resource         string
	Total, Used, Free, Unhealthy int
	Health, Reason, Class, Needs string
	Blocked                      string
	// MIG is nil on a GPU that is not cut into instances, MPS on one whose containers take turns.
	MIG *MIGStatus
	MPS *struct {
		Percent, Clients int
		Trouble          string
	}
	// Intruders and NoPod are how many processes of containers without an allocation,
	// and of no pod, use the GPU.
	Intruders, NoPod int
	Holders          []struct {
		Namespace, Pod, Container, Resource string
		Units                               int
		Lending                             string
	}
}

// MIGStatus is how the agent sees a GPU's instances.
type MIGStatus struct {
	Enabled, OnDemand bool
	Pending           *bool
	Size              int
	Work              string
	Slots             []SlotStatus
}

// SlotStatus is one instance that stands, is made, or could be.
type SlotStatus struct {
	Device, Resource, Profile         string
	Start, Size                       int
	State, UUID                       string
	Namespace, Pod, Container, Reason string
}

// In are the slots in a state, such as held, warm or free.
func (m *MIGStatus) In(state string) []SlotStatus {
	var out []SlotStatus
	for _, s := range m.Slots {
		if s.State == state {
			out = append(out, s)
		}
	}
	return out
}

// String is the status in few words, for the message of a failed wait.
func (s Status) String() string {
	out := fmt.Sprintf("partition %q %s, %d allocations", s.Partition.Name, s.Partition.State, s.Allocations)
	if s.Partition.Message != "" {
		out += " (" + s.Partition.Message + ")"
	}
	for _, g := range s.GPUs {
		out += fmt.Sprintf("; GPU %d %s %d/%d free", g.Index, g.Mode, g.Free, g.Total)
		if g.Health != "healthy" {
			out += " " + g.Health + ": " + g.Reason
		}
		if g.MIG == nil {
			continue
		}
		for _, slot := range g.MIG.Slots {
			if slot.State != "free" && slot.State != "covered" {
				out += fmt.Sprintf(" %s@%d %s", slot.Profile, slot.Start, slot.State)
			}
		}
		if g.MIG.Work != "" {
			out += " (" + g.MIG.Work + ")"
		}
	}
	return out
}

// Status reads the agent's view, inside its pod, as nobody else is shown it. It
// does without the API server.
func (a *Agent) Status(ctx context.Context) (Status, error) {
	p, err := a.Process()
	if err != nil {
		return Status{}, fmt.Errorf("read the agent's status: %w", err)
	}
	code, body, err := a.node.Get(ctx, p, "http://127.0.0.1:9500/statusz")
	if err != nil {
		return Status{}, fmt.Errorf("read the agent's status: %w", err)
	}
	if code != http.StatusOK {
		return Status{}, fmt.Errorf("read the agent's status: %d: %.300s", code, body)
	}
	return decode[Status](body, "the agent's status")
}

// AwaitStatus waits until the agent's view passes check, which says what is
// wrong with it.
func (a *Agent) AwaitStatus(ctx context.Context, limit time.Duration, what string, check func(Status) error) error {
	return Await(ctx, limit, what, func(ctx context.Context) error {
		s, err := a.Status(ctx)
		if err != nil {
			return err
		}
		if err := check(s); err != nil {
			return fmt.Errorf("%w; the agent says: %s", err, s)
		}
		return nil
	})
}

// HTTP reads a page of the agent's, through the API server.
func (a *Agent) HTTP(ctx context.Context, page string) ([]byte, error) {
	var out []byte
	err := a.node.api.get(ctx, agentPods+"/"+url.PathEscape(a.pod+":9500")+"/proxy/"+page, &out)
	return out, err
}

// Command runs a command of the agent's program beside the running one.
func (a *Agent) Command(ctx context.Context, args ...string) ([]byte, error) {
	return a.node.Kubectl(ctx, nil, append([]string{"exec", "-n", AgentNamespace, a.pod, "--", "gpu-agent"}, args...)...)
}

// Restarts is how often the agent's container was started anew.
func (a *Agent) Restarts(ctx context.Context) (int, error) {
	pods, err := a.pods(ctx)
	if err != nil {
		return 0, err
	}
	for _, p := range pods {
		if p.name == a.pod {
			return p.restarts, nil
		}
	}
	return 0, fmt.Errorf("the agent's pod %s is gone", a.pod)
}

// Kill ends the agent's process with SIGKILL and waits until the kubelet has
// started another in the same pod, and that one is ready.
func (a *Agent) Kill(ctx context.Context) error {
	before, err := a.Restarts(ctx)
	if err != nil {
		return err
	}
	if err := a.Strike(ctx); err != nil {
		return err
	}
	return Await(ctx, time.Minute, "the kubelet to start the agent again", func(ctx context.Context) error {
		pods, err := a.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) != 1 || pods[0].restarts != before+1 || !pods[0].ready {
			return fmt.Errorf("there are %v", pods)
		}
		return nil
	})
}

// Strike ends the agent's process with SIGKILL and waits for nothing. It does
// without the API server.
func (a *Agent) Strike(ctx context.Context) error {
	p, err := a.Process()
	if err != nil {
		return fmt.Errorf("kill the agent: %w", err)
	}
	return a.node.Signal(ctx, p, "KILL")
}

// Crash ends the agent's process with SIGKILL, and its pod too, so that the
// DaemonSet makes another at once: a container that ends again and again is
// started by the kubelet after ever longer pauses. It returns when another runs.
func (a *Agent) Crash(ctx context.Context) error {
	// One that has not come up yet is struck by its pod's end.
	_ = a.Strike(ctx)
	if err := a.replace(ctx, "?gracePeriodSeconds=0"); err != nil {
		return fmt.Errorf("crash the agent: %w", err)
	}
	return nil
}

// Replace has the kubelet tell the agent to end, with the grace period of its pod, as an update of
// the DaemonSet does. It returns when another runs.
func (a *Agent) Replace(ctx context.Context) error {
	if err := a.replace(ctx, ""); err != nil {
		return fmt.Errorf("replace the agent: %w", err)
	}
	return nil
}

// replace deletes the agent's pod and returns when another runs.
func (a *Agent) replace(ctx context.Context, query string) error {
	old := a.pod
	if err := a.node.api.remove(ctx, agentPods+"/"+old+query); err != nil {
		return err
	}
	return Await(ctx, time.Minute, "the next agent", func(ctx context.Context) error {
		pods, err := a.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) != 1 || pods[0].name == old || pods[0].phase != "Running" {
			return fmt.Errorf("there are %v", pods)
		}
		a.pod = pods[0].name
		return nil
	})
}

// Process is the agent's, found by its program and command, of which the node
// has one.
func (a *Agent) Process() (Process, error) { return a.process("gpu-agent", "run") }

// Supervisor is the process that keeps the node's MPS daemons.
func (a *Agent) Supervisor() (Process, error) { return a.process("gpu-agent-mps", "supervise") }

// process is the node's only one that runs a command of one of the image's programs.
func (a *Agent) process(program, command string) (Process, error) {
	dirs, err := filepath.Glob(a.node.File("/proc/[0-9]*"))
	if err != nil {
		return Process{}, err
	}
	var found []Process
	for _, dir := range dirs {
		// A process may end while it is looked at.
		exe, _ := os.Readlink(filepath.Join(dir, "exe"))
		line, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if args := strings.Split(string(line), "\x00"); filepath.Base(exe) != program || len(args) < 2 || args[1] != command {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return Process{}, err
		}
		if p, err := a.node.process(pid); err == nil {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		return Process{}, fmt.Errorf("the node has %d processes of %s, want 1: %v", len(found), program+" "+command, found)
	}
	return found[0], nil
}

// Uninstall goes the documented way: the DaemonSet is deleted, and that of
// deployments/cleanup applied in its place. Uninstalled says how that stands.
func (a *Agent) Uninstall(ctx context.Context) error {
	dir, err := a.node.Dir("cleanup")
	if err != nil {
		return fmt.Errorf("uninstall the agent: %w", err)
	}
	source, err := filepath.Rel(dir, filepath.Join(a.node.kit.Root, "deployments", "cleanup"))
	if err != nil {
		return fmt.Errorf("uninstall the agent: %w", err)
	}
	never := func(list string) object {
		return object{"op": "replace", "path": "/spec/template/spec/" + list + "/0/imagePullPolicy", "value": "Never"}
	}
	patch, err := json.Marshal([]object{never("initContainers"), never("containers")})
	if err != nil {
		return fmt.Errorf("uninstall the agent: %w", err)
	}
	kustomization, err := json.Marshal(object{
		"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": []string{source},
		"patches": []object{{"target": object{"kind": "DaemonSet"}, "patch": string(patch)}},
	})
	if err != nil {
		return fmt.Errorf("uninstall the agent: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), kustomization, 0o644); err != nil {
		return fmt.Errorf("uninstall the agent: %w", err)
	}
	for _, args := range [][]string{{"delete", "daemonset", "-n", AgentNamespace, "gpu-agent"}, {"apply", "-k", dir}} {
		if _, err := a.node.Kubectl(ctx, nil, args...); err != nil {
			return fmt.Errorf("uninstall the agent: %w", err)
		}
	}
	return nil
}

// Uninstalled says whether the node is clean, and else what the cleaning one
// says, which is empty while it has not spoken.
func (a *Agent) Uninstalled(ctx context.Context) (clean bool, says string, err error) {
	pods, err := a.pods(ctx)
	if err != nil {
		return false, "", err
	}
	for _, p := range pods {
		if strings.HasPrefix(p.name, "gpu-agent-cleanup-") {
			clean, says = p.ready, p.waiting
		}
	}
	return clean, says, nil
}

// EndUninstall takes the cleaning DaemonSet away; Deploy may come again.
func (a *Agent) EndUninstall(ctx context.Context) error {
	dir, err := a.node.Dir("cleanup")
	if err != nil {
		return err
	}
	if _, err := a.node.Kubectl(ctx, nil, "delete", "--ignore-not-found", "--wait", "-k", dir); err != nil {
		return fmt.Errorf("end the clean-up: %w", err)
	}
	return a.stop(ctx)
}

// Stop takes the agent off the node, as an upgrade or an administrator does, and
// waits until it has ended.
func (a *Agent) Stop(ctx context.Context) error { return a.stop(ctx) }

// Start brings it back and waits until it answers.
func (a *Agent) Start(ctx context.Context) error {
	if err := a.node.Label(ctx, map[string]string{NodeLabel: "true"}); err != nil {
		return err
	}
	return a.answers(ctx)
}

// Reset makes the node one where nobody has asked for a GPU yet: no pod of the
// lab, the given partitions, no label that chooses one, and an agent that has
// just started and knows of no allocation. Waiting for the agent to let ended
// allocations go would come to the same, half a minute later.
func (a *Agent) Reset(ctx context.Context, partitions string) error {
	if err := a.node.DeletePods(ctx); err != nil {
		return err
	}
	if err := a.node.Label(ctx, map[string]string{PartitionLabel: ""}); err != nil {
		return err
	}
	if err := a.SetPartitions(ctx, partitions); err != nil {
		return err
	}
	if err := a.stop(ctx); err != nil {
		return err
	}
	files, err := a.CDIFiles(ctx)
	if err != nil {
		return err
	}
	for _, name := range files {
		if err := os.Remove(a.node.File(cdiDir + name)); err != nil {
			return fmt.Errorf("remove the allocations of earlier pods: %w", err)
		}
	}
	for _, name := range []string{"state.json", "allocations.journal"} {
		if err := os.Remove(a.node.File(StateDir + name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove what the agent remembers: %w", err)
		}
	}
	return a.Start(ctx)
}

// answers waits until an agent answers, which is seconds before the kubelet's
// next probe finds it ready.
func (a *Agent) answers(ctx context.Context) error {
	return Await(ctx, time.Minute, "the agent to answer", func(ctx context.Context) error {
		pods, err := a.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) != 1 || pods[0].deleted || pods[0].phase != "Running" {
			return fmt.Errorf("its pods are %v", pods)
		}
		a.pod = pods[0].name
		_, err = a.Status(ctx)
		return err
	})
}

// Log is the end of what the agent has logged.
func (a *Agent) Log(ctx context.Context) (string, error) {
	var out []byte
	err := a.node.api.get(ctx, agentPods+"/"+a.pod+"/log?tailLines=80", &out)
	return string(out), err
}

// stop takes the agent off the node by the label that it needs.
func (a *Agent) stop(ctx context.Context) error {
	if err := a.node.Label(ctx, map[string]string{NodeLabel: ""}); err != nil {
		return err
	}
	return Await(ctx, time.Minute, "the agent's end", func(ctx context.Context) error {
		pods, err := a.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) > 0 {
			return fmt.Errorf("there is %v", pods)
		}
		return nil
	})
}

// cdiDir is what /var/run/cdi leads to: a link with an absolute path leads out of
// the node when it is followed from outside.
const cdiDir = "/run/cdi/"

// StateDir is the agent's own directory on the node.
const StateDir = "/var/lib/gpu-agent/"

// CDIFiles lists the agent's CDI files on the node, sorted.
func (a *Agent) CDIFiles(context.Context) ([]string, error) {
	entries, err := os.ReadDir(a.node.File(cdiDir))
	if err != nil {
		return nil, fmt.Errorf("list CDI files: %w", err)
	}
	var files []string
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, Domain+"-gpu-") && strings.HasSuffix(name, ".json") {
			files = append(files, name)
		}
	}
	return files, nil
}

// AwaitState waits for the node's label that says how its partition stands,
// and returns the annotation beside it.
func (a *Agent) AwaitState(ctx context.Context, state string) (message string, err error) {
	return a.AwaitWord(ctx, state, "")
}

// AwaitWord is AwaitState where the partition may be in that state already, for
// another reason: it waits until the annotation contains a word of this one.
func (a *Agent) AwaitWord(ctx context.Context, state, word string) (message string, err error) {
	err = Await(ctx, time.Minute, strings.TrimSpace("the node's partition to be "+state+" "+word), func(ctx context.Context) error {
		s, err := a.node.State(ctx)
		if err != nil {
			return err
		}
		message = s.Annotations[MessageAnnotation]
		if got := s.Labels[StateLabel]; got != state || !strings.Contains(message, word) {
			return fmt.Errorf("it is %s (%s)", strconv.Quote(got), message)
		}
		return nil
	})
	return message, err
}

// Metrics are the samples of the agent's /metrics: by name and labels, as they are written
// there.
func (a *Agent) Metrics(ctx context.Context) (map[string]float64, error) {
	data, err := a.HTTP(ctx, "metrics")
	if err != nil {
		return nil, err
	}
	return metrics(data)
}

// metrics reads a page of metrics.
func metrics(page []byte) (map[string]float64, error) {
	out := map[string]float64{}
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		at := strings.LastIndexByte(line, ' ')
		if at < 0 {
			return nil, fmt.Errorf("read metrics: line %q has no value", line)
		}
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("read metrics: line %q: %w", line, err)
		}
		out[line[:at]] = value
	}
	if len(out) == 0 {
		return nil, errors.New("read metrics: the page is empty")
	}
	return out, nil
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
