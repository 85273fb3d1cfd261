// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/node"
)

// Processes of a node, by the names that Stop, Kill and StartAgain know.
const (
	Kubelet    = "kubelet"
	Containerd = "containerd"
	CRIO       = "crio"
	APIServer  = "kube-apiserver"
	Scheduler  = "kube-scheduler"
	// etcd keeps the API server's objects below etcdDir.
	etcd    = "etcd"
	etcdDir = "/var/lib/etcd/"
)

// Node is a node of Kubernetes that runs now, with a control plane or joined to one that has.
type Node struct {
	// Name is the node's, for `cluster` and in Kubernetes.
	Name string
	kit  *Kit
	api  *api
	// root is where this machine sees the node's files.
	root string
	// runtime is the process that makes containers, and part of its socket's name.
	runtime string
	pods    *node.PodResources
}

// NodeOptions say how a node is started.
type NodeOptions struct {
	Name string
	// Join is the name of a node that runs: the new one is of its cluster and ends with
	// it. Without it the node has a control plane of its own.
	Join string
	// WithParent ends the node when this process ends, however it ends.
	WithParent bool
	// PromptStatus has the kubelet look at its node every second. Without it the
	// kubelet does so every ten, as users' kubelets do. It is for who waits for what
	// the node offers and measures nothing that depends on when the scheduler
	// hears of it; who does, calls UsersStatus first.
	PromptStatus bool
	// Kubernetes and Runtime are others than the usual ones, as `cluster up` knows them, such
	// as 1.34 and containerd-1.7.
	Kubernetes, Runtime string
}

// Parts are what `cluster build` has to build for the node beside the usual parts.
func (o NodeOptions) Parts() (parts []string) {
	if o.Kubernetes != "" {
		parts = append(parts, "kubernetes-"+o.Kubernetes)
	}
	if o.Runtime != "" {
		parts = append(parts, o.Runtime)
	}
	return parts
}

// Up starts a node and returns when it is Ready.
func (k *Kit) Up(ctx context.Context, o NodeOptions) (*Node, error) {
	args := []string{"up", "--name", o.Name}
	if o.Join != "" {
		args = append(args, "--join", o.Join)
	}
	if o.WithParent {
		args = append(args, "--with-parent")
	}
	if o.PromptStatus {
		args = append(args, "--prompt-status")
	}
	if o.Kubernetes != "" {
		args = append(args, "--kubernetes", o.Kubernetes)
	}
	if o.Runtime != "" {
		args = append(args, "--runtime", o.Runtime)
	}
	if err := k.Run(ctx, k.Bin("cluster"), args...); err != nil {
		return nil, err
	}
	n, err := k.Attach(ctx, o.Name)
	if err == nil && strings.HasPrefix(o.Runtime, CRIO) {
		n.runtime = CRIO
	}
	return n, err
}

// Attach returns a node that runs already.
func (k *Kit) Attach(ctx context.Context, name string) (*Node, error) {
	n := &Node{Name: name, kit: k, runtime: Containerd}
	config, err := n.Kubectl(ctx, nil, "config", "view", "--raw", "-o", "json")
	if err != nil {
		return nil, err
	}
	if n.api, err = newAPI(config); err != nil {
		return nil, err
	}
	pid, err := k.firstProcess(ctx, name)
	if err != nil {
		return nil, err
	}
	n.root = fmt.Sprintf("/proc/%d/root", pid)
	n.pods = node.NewPodResources(n.File("/var/lib/kubelet"))
	return n, nil
}

// firstProcess finds the PID of a running node's first process.
func (k *Kit) firstProcess(ctx context.Context, name string) (int, error) {
	out, err := k.output(ctx, nil, k.Bin("cluster"), "list")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == name && f[1] == "running" {
			return strconv.Atoi(f[2])
		}
	}
	return 0, fmt.Errorf("node %s does not run", name)
}

// File is the path by which this machine sees a file of the node's. It is there
// while the node lives, and looking at it costs no process. A link in it must not
// be absolute: it would be followed on this machine.
func (n *Node) File(path string) string { return n.root + path }

// Down ends a node and proves that nothing of it is left. That there is none
// is no error.
func (k *Kit) Down(ctx context.Context, name string) error {
	if _, err := os.Stat(k.Bin("cluster")); errors.Is(err, os.ErrNotExist) {
		return nil // without the program there was never a node
	}
	return k.Run(ctx, k.Bin("cluster"), "down", "--name", name)
}

// Dir is a directory for files of a run, inside the cache.
func (n *Node) Dir(name string) (string, error) {
	dir := filepath.Join(n.kit.Cache, "run", n.Name, name)
	return dir, os.MkdirAll(dir, 0o755)
}

func (n *Node) cluster(ctx context.Context, stdin io.Reader, command string, args ...string) ([]byte, error) {
	return n.kit.output(ctx, stdin, n.kit.Bin("cluster"), append([]string{command, "--name", n.Name}, args...)...)
}

// Kubectl runs kubectl as administrator and returns its output.
func (n *Node) Kubectl(ctx context.Context, stdin io.Reader, args ...string) ([]byte, error) {
	return n.cluster(ctx, stdin, "kubectl", append([]string{"--"}, args...)...)
}

// KubectlCommand is how a person types kubectl for this node.
func (n *Node) KubectlCommand() string {
	return fmt.Sprintf("%s kubectl --name %s --", n.kit.Bin("cluster"), n.Name)
}

// Exec runs a command inside the node, where the host's files and the node's
// own are, and returns its output.
func (n *Node) Exec(ctx context.Context, command ...string) ([]byte, error) {
	return n.cluster(ctx, nil, "exec", append([]string{"--"}, command...)...)
}

// Start runs a further process in the node for as long as the node lives.
func (n *Node) Start(ctx context.Context, process string, command ...string) error {
	_, err := n.cluster(ctx, nil, "start", append([]string{process, "--"}, command...)...)
	return err
}

// Stop ends a process of the node: one of Kubernetes, or one of Start's. That
// it never ran is an error, that it has ended is none.
func (n *Node) Stop(ctx context.Context, process string) error {
	_, err := n.cluster(ctx, nil, "stop", process)
	return err
}

// ReadFile reads a file of the node's.
func (n *Node) ReadFile(path string) ([]byte, error) { return os.ReadFile(n.File(path)) }

// ListFiles names what is in a directory of the node's, sorted.
func (n *Node) ListFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(n.File(dir))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// Processes is how the node's processes stand, for people.
func (n *Node) Processes(ctx context.Context) (string, error) {
	out, err := n.cluster(ctx, nil, "ps")
	return string(out), err
}

// LogEnd is the last lines of a process's log.
func (n *Node) LogEnd(ctx context.Context, process string) (string, error) {
	const most = 4 << 10
	out, err := n.cluster(ctx, nil, "logs", process)
	if len(out) > most {
		out = out[len(out)-most:]
		out = out[bytes.IndexByte(out, '\n')+1:]
	}
	return string(out), err
}

// Kill ends a process of the node with SIGKILL; it stays down.
func (n *Node) Kill(ctx context.Context, process string) error {
	_, err := n.cluster(ctx, nil, "kill", process)
	return err
}

// StartAgain starts a process that was stopped or killed.
func (n *Node) StartAgain(ctx context.Context, process string) error {
	_, err := n.cluster(ctx, nil, "start", process)
	return err
}

// StartAPI starts the API server that was stopped, waits until it answers, and
// starts the controllers and the scheduler anew: by themselves they would take
// another minute of back-off to find it again. The kubelet is left to itself.
func (n *Node) StartAPI(ctx context.Context) error {
	if err := n.StartAgain(ctx, APIServer); err != nil {
		return err
	}
	if err := Await(ctx, time.Minute, "the API server", func(ctx context.Context) error {
		_, err := n.State(ctx)
		return err
	}); err != nil {
		return err
	}
	for _, client := range []string{"kube-controller-manager", Scheduler} {
		if _, err := n.cluster(ctx, nil, "restart", client); err != nil {
			return err
		}
	}
	return nil
}

// SaveAPI takes a snapshot of all that the API server has. The server is away meanwhile.
func (n *Node) SaveAPI(ctx context.Context) error {
	return n.changeEtcd(ctx, "rm -rf saved && cp -a data saved")
}

// RestoreAPI puts the API server back to the snapshot that SaveAPI has taken, as is done after a disaster: its clients
// of the control plane and the kubelet start anew, as Kubernetes' documents have it.
func (n *Node) RestoreAPI(ctx context.Context) error {
	if err := n.changeEtcd(ctx, "rm -rf data && cp -a saved data"); err != nil {
		return err
	}
	return errors.Join(n.Stop(ctx, Kubelet), n.StartAgain(ctx, Kubelet))
}

// changeEtcd runs a shell command on etcd's files while neither etcd nor the API server runs.
func (n *Node) changeEtcd(ctx context.Context, command string) error {
	if err := errors.Join(n.Stop(ctx, APIServer), n.Stop(ctx, etcd)); err != nil {
		return err
	}
	_, err := n.Exec(ctx, "sh", "-ec", "cd "+etcdDir+"; "+command)
	return errors.Join(err, n.StartAgain(ctx, etcd), n.StartAPI(ctx))
}

// RestartKubelet restarts the kubelet and waits until the new one has written
// the node's status. What the node offers is then the new one's word.
func (n *Node) RestartKubelet(ctx context.Context) error { return n.restartKubelet(ctx, n.Stop) }

// CrashKubelet is RestartKubelet for a kubelet that could not take its leave.
func (n *Node) CrashKubelet(ctx context.Context) error { return n.restartKubelet(ctx, n.Kill) }

func (n *Node) restartKubelet(ctx context.Context, end func(context.Context, string) error) error {
	if err := end(ctx, Kubelet); err != nil {
		return err
	}
	old, err := n.State(ctx)
	if err != nil {
		return err
	}
	// Heartbeats are whole seconds: the new kubelet's must fall into another.
	if err := Await(ctx, 5*time.Second, "the next second", func(context.Context) error {
		if time.Since(old.Heartbeat) < time.Second {
			return fmt.Errorf("the old kubelet's last word is of %s", old.Heartbeat.Format(time.TimeOnly))
		}
		return nil
	}); err != nil {
		return err
	}
	if err := n.StartAgain(ctx, Kubelet); err != nil {
		return err
	}
	return n.newWord(ctx, old.Heartbeat)
}

// RestartRuntime stops the container runtime, starts it anew and waits until the kubelet says
// that the node is ready with it.
func (n *Node) RestartRuntime(ctx context.Context) error {
	if err := errors.Join(n.Stop(ctx, n.runtime), n.StartAgain(ctx, n.runtime), n.runtimeAnswers(ctx)); err != nil {
		return err
	}
	return Await(ctx, time.Minute, "the node to be ready", func(ctx context.Context) error {
		s, err := n.State(ctx)
		if err == nil && !s.Ready {
			err = fmt.Errorf("it is %s", s.Conditions["Ready"])
		}
		return err
	})
}

// newWord waits for a status of the kubelet's that is newer than another, and
// says that it is ready.
func (n *Node) newWord(ctx context.Context, than time.Time) error {
	return Await(ctx, time.Minute, "the new kubelet's first word", func(ctx context.Context) error {
		s, err := n.State(ctx)
		if err != nil {
			return err
		}
		if !s.Ready || !s.Heartbeat.After(than) {
			return fmt.Errorf("the node's Ready is %v, and its last heartbeat was at %s", s.Ready, s.Heartbeat.Format(time.TimeOnly))
		}
		return nil
	})
}

// Load gives an image archive to the node's containerd.
func (n *Node) Load(ctx context.Context, archive string) error {
	_, err := n.cluster(ctx, nil, "load", archive)
	return err
}

// LateImage makes a registry on the node's loopback that takes a pull and never
// answers, and returns the name of an image there: whoever wants it has it
// pulled without end. It is TestImage, and there, once arrive was called; the
// kubelet sees that when it tries the pull again, some ten seconds later.
func (n *Node) LateImage(ctx context.Context) (image string, arrive func(context.Context) error, err error) {
	const registry, port = "late-registry", "5000"
	image = "127.0.0.1:" + port + "/late:test"
	if err := n.Start(ctx, registry, n.kit.Bin("busybox"), "nc", "-ll", "-p", port, "-e", "sleep", "1000000"); err != nil {
		return "", nil, fmt.Errorf("start a registry: %w", err)
	}
	return image, func(ctx context.Context) error {
		if _, err := n.Exec(ctx, "ctr", "--namespace", "k8s.io", "images", "tag", TestImage, image); err != nil {
			return fmt.Errorf("let the image arrive: %w", err)
		}
		// What it has started for the pull ends with it.
		p, _, err := n.ServerProcess(ctx, registry)
		if err != nil {
			return err
		}
		if _, err := n.Exec(ctx, "pkill", "-KILL", "-P", strconv.Itoa(p.PID)); err != nil {
			return fmt.Errorf("end the pull: %w", err)
		}
		return n.Kill(ctx, registry)
	}, nil
}

// State is what Kubernetes says of the node.
type State struct {
	Labels, Annotations map[string]string
	// Capacity and Allocatable are whole numbers of extended resources; other
	// resources are left out.
	Capacity, Allocatable map[string]int
	// Conditions are the node's, by type.
	Conditions map[string]Condition
	Ready      bool
	// Heartbeat is when the kubelet wrote its status last, in whole seconds.
	Heartbeat time.Time
	// Kubelet and Runtime are the versions that the kubelet tells, such as v1.36.3 and
	// containerd://v2.3.7.
	Kubelet, Runtime string
}

// Condition is one of the Node's.
type Condition struct{ Status, Reason, Message string }

func (c Condition) String() string {
	return strings.TrimRight(fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message), ": ")
}

func (n *Node) path() string { return "/api/v1/nodes/" + n.Name }

// State reads the Node.
func (n *Node) State(ctx context.Context) (State, error) {
	var o struct {
		Metadata struct{ Labels, Annotations map[string]string }
		Status   struct {
			Capacity, Allocatable map[string]string
			NodeInfo              struct{ KubeletVersion, ContainerRuntimeVersion string }
			Conditions            []struct {
				Condition
				Type              string
				LastHeartbeatTime time.Time
			}
		}
	}
	if err := n.api.get(ctx, n.path(), &o); err != nil {
		return State{}, err
	}
	s := State{Labels: o.Metadata.Labels, Annotations: o.Metadata.Annotations, Conditions: map[string]Condition{},
		Kubelet: o.Status.NodeInfo.KubeletVersion, Runtime: o.Status.NodeInfo.ContainerRuntimeVersion}
	var err error
	if s.Capacity, err = extended(o.Status.Capacity); err != nil {
		return State{}, err
	}
	if s.Allocatable, err = extended(o.Status.Allocatable); err != nil {
		return State{}, err
	}
	for _, c := range o.Status.Conditions {
		s.Conditions[c.Type] = c.Condition
		if c.Type == "Ready" {
			s.Ready, s.Heartbeat = c.Status == "True", c.LastHeartbeatTime
		}
	}
	return s, nil
}

// extended keeps the resources with a domain. Kubernetes writes a number of
// thousands as "1k".
func extended(in map[string]string) (map[string]int, error) {
	out := map[string]int{}
	for name, value := range in {
		if !strings.Contains(name, "/") {
			continue
		}
		digits, thousands := strings.CutSuffix(value, "k")
		count, err := strconv.Atoi(digits)
		if err != nil {
			return nil, fmt.Errorf("read the node's %s: %w", name, err)
		}
		if thousands {
			count *= 1000
		}
		out[name] = count
	}
	return out, nil
}

// AwaitAllocatable waits until the node offers exactly these amounts of the
// resources that are named; 0 also means that the node does not name it.
func (n *Node) AwaitAllocatable(ctx context.Context, want map[string]int) error {
	return Await(ctx, time.Minute, "allocatable "+amounts(want), func(ctx context.Context) error {
		s, err := n.State(ctx)
		if err != nil {
			return err
		}
		for name, count := range want {
			if s.Allocatable[name] != count {
				return fmt.Errorf("the node offers %s", amounts(s.Allocatable))
			}
		}
		return nil
	})
}

func amounts(m map[string]int) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s: %d", name, m[name]))
	}
	return "{" + strings.Join(out, ", ") + "}"
}

// Label sets labels of the Node; an empty value removes one.
func (n *Node) Label(ctx context.Context, labels map[string]string) error {
	patch := map[string]*string{}
	for k, v := range labels {
		patch[k] = nil
		if v != "" {
			patch[k] = &v
		}
	}
	err := n.api.patch(ctx, n.path(), map[string]any{"metadata": map[string]any{"labels": patch}})
	if err != nil {
		return fmt.Errorf("label the node: %w", err)
	}
	return nil
}

// Cordon keeps new pods off the node, or lets them come again.
func (n *Node) Cordon(ctx context.Context, on bool) error {
	if err := n.api.patch(ctx, n.path(), object{"spec": object{"unschedulable": on}}); err != nil {
		return fmt.Errorf("cordon the node: %w", err)
	}
	return nil
}

// Event is a Kubernetes Event.
type Event struct{ Type, Reason, Message string }

// Events returns the Events about an object, "Node" or "Pod" and its name.
func (n *Node) Events(ctx context.Context, kind, namespace, name string) ([]Event, error) {
	var list struct{ Items []Event }
	if namespace == "" {
		namespace = "default"
	}
	of := url.Values{"fieldSelector": {"involvedObject.kind=" + kind + ",involvedObject.name=" + name}}
	if err := n.api.get(ctx, "/api/v1/namespaces/"+namespace+"/events?"+of.Encode(), &list); err != nil {
		return nil, err
	}
	return list.Items, nil
}

// AwaitEvent waits for an Event that match accepts.
func (n *Node) AwaitEvent(ctx context.Context, kind, namespace, name, what string, match func(Event) bool) error {
	return Await(ctx, 30*time.Second, "an Event of "+name+" that "+what, func(ctx context.Context) error {
		events, err := n.Events(ctx, kind, namespace, name)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(events, match) {
			return nil
		}
		return fmt.Errorf("its Events are %q", events)
	})
}

// Namespace makes a namespace for pods and waits until pods can be made in it.
func (n *Node) Namespace(ctx context.Context, name string) error {
	err := n.api.create(ctx, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": name}})
	var refused *statusError
	if err != nil && !(errors.As(err, &refused) && refused.Reason == "AlreadyExists") {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	return Await(ctx, 30*time.Second, "the service account of namespace "+name, func(ctx context.Context) error {
		return n.api.get(ctx, "/api/v1/namespaces/"+name+"/serviceaccounts/default", nil)
	})
}

// decode reads JSON that a program of ours printed.
func decode[T any](data []byte, what string) (T, error) {
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("read %s: %w", what, err)
	}
	return v, nil
}
