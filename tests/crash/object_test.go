// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/plane"
)

const (
	startupKey   = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-agent"
	nodesPath    = "/api/v1/nodes"
	gpuNodesPath = "/apis/" + domain + "/" + gpunode.Version + "/" + gpunode.Plural
	// statusEvery stands for the ten seconds between two statuses of a kubelet.
	statusEvery = 300 * time.Millisecond
)

// objectSide is what a node has besides where its Node is written: a way to a real API
// server, the kubelet's reports there, and a record of all that the Node has been.
type objectSide struct {
	*plane.Server
	t    *testing.T
	node *node
	name string
	off  func() error

	door       *door
	kubeconfig string
	stop       context.CancelFunc
	running    sync.WaitGroup
	// ready is what GPUReady is to be, "status reason", and cordoned that all GPUs are.
	ready    string
	cordoned bool
	// cleaned is closed when the node has been cleaned.
	cleaned chan struct{}

	mu sync.Mutex
	// seen are all versions of the Node, in order; guarded by mu.
	seen []sight
}

// sight is a version of the Node.
type sight struct {
	Metadata struct {
		UID                 string
		Labels, Annotations map[string]string
	}
	Spec struct {
		Unschedulable bool
		Taints        []struct{ Key, Effect string }
	}
	Status struct {
		Allocatable map[string]string
		Conditions  []struct{ Type, Status, Reason string }
	}
}

func (s *sight) tainted() bool {
	return slices.ContainsFunc(s.Spec.Taints, func(t struct{ Key, Effect string }) bool { return t.Key == startupKey })
}

// condition is one of the agent's, "status reason".
func (s *sight) condition(kind string) string {
	for _, c := range s.Status.Conditions {
		if c.Type == domain+"/"+kind {
			return c.Status + " " + c.Reason
		}
	}
	return ""
}

// left is what an agent writes and has not taken away.
func (s *sight) left() (out []string) {
	for _, kind := range agent.Written.Conditions {
		if is := s.condition(kind); is != "" {
			out = append(out, "condition "+kind)
		}
	}
	for field, keys := range map[string]map[string]string{"label": s.Metadata.Labels, "annotation": s.Metadata.Annotations} {
		for key := range keys {
			out = append(out, field+" "+key)
		}
	}
	slices.Sort(out)
	return out
}

var objectNodes atomic.Int64

// startObject is a new node, on a machine of its own, whose kubelet has not registered it.
func startObject(t *testing.T, s *plane.Server) (*node, error) {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		return nil, err
	}
	m, off, err := newMachine(filepath.Join(dir, "machine"), emulator.Spec{Model: model, Count: 2})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	o := &objectSide{Server: s, t: t, name: fmt.Sprintf("life-%d", objectNodes.Add(1)), off: off, ready: "True Offered"}
	n := &node{machine: m, dir: dir, cdi: filepath.Join(dir, "cdi"), state: filepath.Join(dir, "state"), modes: []string{"shared", "shared"}, object: o}
	o.node = n
	return n, n.open()
}

// agentOn is the agent's service account with a token of a pod on that node.
func agentOn(node string) http.Header {
	return http.Header{
		"Impersonate-User":  {"system:serviceaccount:gpu-agent:gpu-agent"},
		"Impersonate-Group": {"system:serviceaccounts", "system:serviceaccounts:gpu-agent", "system:authenticated"},
		"Impersonate-Extra-Authentication.kubernetes.io%2fnode-Name": {node},
	}
}

// installManifests applies the base with the component startup-taint, and waits until the
// rights and the policies are in force. Nothing runs in the cluster.
func installManifests(t *testing.T, s *plane.Server) {
	t.Helper()
	dir := t.TempDir()
	up, err := filepath.Abs("../../deployments")
	if err == nil {
		up, err = filepath.Rel(dir, up) // kubectl takes no absolute path
	}
	text := fmt.Sprintf("resources: [%s]\ncomponents: [%s]\n", filepath.Join(up, "base"), filepath.Join(up, "components/startup-taint"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	apply := exec.CommandContext(t.Context(), plane.Program(t, "kubectl"), "--kubeconfig", s.Kubeconfig(t, nil), "apply", "--server-side", "-k", dir)
	if out, err := apply.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", apply.Args, err, out)
	}
	if err := s.Do(t, nil, http.MethodPost, nodesPath, plane.JSON, fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": "elsewhere"}}, nil); err != nil {
		t.Fatal(err)
	}
	s.Await(t, "rights and policies are in force", func() error {
		err := s.Do(t, agentOn("here"), http.MethodPatch, nodesPath+"/elsewhere", plane.Merge, fields{"metadata": fields{"labels": fields{domain + "/a": "b"}}}, nil)
		if err == nil || !strings.Contains(err.Error(), "the node that it runs on") {
			return fmt.Errorf("an agent may write to another node: %v", err)
		}
		return s.Do(t, agentOn("here"), http.MethodGet, gpuNodesPath, "", nil, nil)
	})
}

// begin connects the node with the API server, and registers it.
func (o *objectSide) begin(n *node) (err error) {
	counts := func(path string) bool {
		return strings.HasPrefix(path, nodesPath+"/"+o.name) || strings.HasPrefix(path, gpuNodesPath)
	}
	if o.door, err = openDoor(o.Server, doorway{as: agentOn(o.name), counts: counts, sees: o.judgeReady, meets: n.meets}); err != nil {
		return err
	}
	if o.kubeconfig, err = o.door.kubeconfig(n.dir); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	o.stop = cancel
	o.running.Go(func() {
		err := o.Watch(ctx, nodesPath+"?fieldSelector=metadata.name%3D"+o.name, o.see)
		if ctx.Err() == nil {
			n.breaks("the watch of the Node has ended: %v", err)
		}
	})
	o.running.Go(func() { o.report(ctx) })
	return o.register()
}

func (o *objectSide) close() error {
	if o.stop != nil {
		o.stop()
	}
	o.running.Wait()
	var err error
	if o.door != nil {
		err = o.door.close()
	}
	return errors.Join(err, o.off())
}

// flags are the agent's.
func (o *objectSide) flags() []string {
	return []string{"--kubeconfig", o.kubeconfig, "--node-name", o.name, "--hold-scale-down", "--startup-taint", startupKey}
}

// register makes the Node as a kubelet does that was told to register it with taints. One
// that is there goes first, and its GPUNode with it, as the garbage collector has it.
func (o *objectSide) register() error {
	for _, path := range []string{nodesPath, gpuNodesPath} {
		var there struct{ Metadata struct{ UID string } }
		if o.Do(o.t, nil, http.MethodGet, path+"/"+o.name, "", nil, &there) != nil {
			continue
		}
		if err := o.Do(o.t, nil, http.MethodDelete, path+"/"+o.name, plane.JSON, fields{}, nil); err != nil {
			return err
		}
	}
	taint := func(key, effect string) fields { return fields{"key": key, "value": "pending", "effect": effect} }
	return o.Do(o.t, nil, http.MethodPost, nodesPath, plane.JSON, fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": o.name},
		"spec": fields{"taints": []fields{taint("team.example.org/theirs", "NoSchedule"), taint(startupKey, "NoExecute"), taint(startupKey, "NoSchedule")}}}, nil)
}

// write changes the Node as somebody else does.
func (o *objectSide) write(what fields) error {
	return o.Do(o.t, nil, http.MethodPatch, nodesPath+"/"+o.name, plane.Merge, what, nil)
}

// see takes in an event of the watch.
func (o *objectSide) see(event []byte) {
	var e struct {
		Type   string
		Object sight
	}
	if err := json.Unmarshal(event, &e); err != nil {
		o.node.breaks("an event of the watch: %v", err)
		return
	}
	if e.Type != "ADDED" && e.Type != "MODIFIED" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seen = append(o.seen, e.Object)
}

// last is the newest version of the Node.
func (o *objectSide) last() (sight, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.seen) == 0 {
		return sight{}, false
	}
	return o.seen[len(o.seen)-1], true
}

// await waits for a version of the Node.
func (o *objectSide) await(ctx context.Context, what string, ok func(*sight) bool) error {
	return poll(ctx, what, func() error {
		if now, known := o.last(); !known || !ok(&now) {
			return fmt.Errorf("the Node says %q", now.left())
		}
		return nil
	})
}

// report is the kubelet's status: how many devices of each resource can be given out.
func (o *objectSide) report(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(statusEvery):
		}
		now, known := o.last()
		if !known {
			continue
		}
		endpoints, _ := o.node.kubelet.Endpoints()
		says := fields{}
		for resource, e := range endpoints {
			n := 0
			if e.Serves() {
				n = len(e.Healthy())
			}
			if is := now.Status.Allocatable[resource]; is != strconv.Itoa(n) {
				says[resource] = strconv.Itoa(n)
			}
		}
		if len(says) == 0 {
			continue
		}
		// The Node may just go.
		_ = o.Do(o.t, nil, http.MethodPatch, nodesPath+"/"+o.name+"/status", plane.Strategic, fields{"status": fields{"capacity": says, "allocatable": says}}, nil)
	}
}

// judgeReady looks at a request of the agent's: it may say that pods can be sent here once
// the kubelet has the devices.
func (o *objectSide) judgeReady(r *http.Request) {
	body, err := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	if err != nil {
		return // of an agent that was killed
	}
	var says sight
	if !strings.HasSuffix(r.URL.Path, "/status") || json.Unmarshal(body, &says) != nil || !strings.HasPrefix(says.condition(agent.ReadyCondition), "True") {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	all, _ := o.node.kubelet.Endpoints()
	if e := all[memory]; e.Registrations == 0 || e.Gone != nil {
		o.node.breaks("the agent says that the node is ready, and the kubelet has no plugin (%d registrations, %v)", e.Registrations, e.Gone)
		return
	}
	// A list that was sent is on its way for a moment.
	if err := o.node.kubelet.Await(ctx, func(all map[string]fakes.Endpoint) error {
		if e := all[memory]; !e.Serves() || len(e.Devices) == 0 {
			return errors.New("it has no devices")
		}
		return nil
	}); err != nil && r.Context().Err() == nil {
		o.node.breaks("the agent says that the node is ready, and the kubelet: %v", err)
	}
}

// differs compares the Node and its GPUNode with what they should be, where this is held.
func (o *objectSide) differs(held map[string]holding) error {
	var now sight
	if err := o.Do(o.t, nil, http.MethodGet, nodesPath+"/"+o.name, "", nil, &now); err != nil {
		return err
	}
	var taints []string
	for _, t := range now.Spec.Taints {
		taints = append(taints, t.Key)
	}
	taints = slices.DeleteFunc(taints, func(key string) bool { return strings.HasPrefix(key, "node.kubernetes.io/") })
	if !slices.Equal(taints, []string{"team.example.org/theirs"}) {
		return fmt.Errorf("the Node has the taints %q, want the one that is not the agent's", taints)
	}
	if got := now.condition(agent.ReadyCondition); got != o.ready {
		return fmt.Errorf("GPUReady is %q, want %q", got, o.ready)
	}
	if got := now.Metadata.Annotations[agent.HoldAnnotation] == "true"; got != (len(held) > 0) {
		return fmt.Errorf("%s: %v, while %d allocations are held", agent.HoldAnnotation, got, len(held))
	}
	if now.Metadata.Labels[domain+"/"+agent.StateLabel] == "" || now.condition(agent.HealthCondition) == "" {
		return fmt.Errorf("the Node lacks what the agent says: %q", now.left())
	}
	var object struct{ Status gpunode.Status }
	if err := o.Do(o.t, nil, http.MethodGet, gpuNodesPath+"/"+o.name, "", nil, &object); err != nil {
		return err
	}
	// An agent that starts while the driver is let go knows of no GPU, and says so.
	if !gpunode.Is(object.Status.Conditions, gpunode.Ready) && !slices.ContainsFunc(object.Status.Conditions, func(c gpunode.Condition) bool {
		return c.Type == gpunode.Ready && string(c.Status)+" "+string(c.Reason) == o.ready && c.Reason == status.DriverLetGo
	}) {
		return fmt.Errorf("the GPUNode is not Ready: %+v", object.Status.Conditions)
	}
	for i := range object.Status.GPUs {
		if g := &object.Status.GPUs[i]; g.Cordoned != o.cordoned {
			return fmt.Errorf("GPU %d of the GPUNode: cordoned %v, want %v", i, g.Cordoned, o.cordoned)
		}
	}
	is, want := 0, o.largest(held)
	for _, r := range object.Status.Resources {
		if r.Name == memory {
			is = r.Largest
		}
	}
	if is != want {
		return fmt.Errorf("the largest request that fits is %d by the GPUNode, want %d", is, want)
	}
	return nil
}

// largest is the largest request for units that fits.
func (o *objectSide) largest(held map[string]holding) (most int) {
	if o.cordoned || !strings.HasPrefix(o.ready, "True") {
		return 0
	}
	for _, g := range o.node.gpus {
		left := units
		for _, h := range held {
			if h.gpu() == g.UUID {
				left -= len(h.ids)
			}
		}
		most = max(most, left)
	}
	return most
}

// judge looks at all that each Node has been, and counts the transitions.
func (o *objectSide) judge() (told map[string]int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	told = map[string]int{}
	free, last := map[string]bool{}, map[string]string{}
	for i := range o.seen {
		s := &o.seen[i]
		uid := s.Metadata.UID
		if was := last[uid]; was != s.condition(agent.ReadyCondition) {
			last[uid] = s.condition(agent.ReadyCondition)
			told[was+" → "+last[uid]]++
		}
		if free[uid] && s.tainted() {
			err = errors.Join(err, errors.New("the startup taint has come back"))
		}
		if !s.tainted() && !free[uid] {
			free[uid] = true
			told["taint gone"]++
			if is := s.condition(agent.ReadyCondition); !strings.HasPrefix(is, "True") {
				err = errors.Join(err, fmt.Errorf("the startup taint goes while GPUReady is %q", is))
			}
			if n, _ := strconv.Atoi(s.Status.Allocatable[memory]); n == 0 {
				err = errors.Join(err, fmt.Errorf("the startup taint goes while the Node has the resources %v", s.Status.Allocatable))
			}
		}
	}
	return told, err
}

// clean runs the cleanup, to be killed at its kill-th write, until it has ended well.
func (o *objectSide) clean(n *node, kill int) *tracee {
	n.mu.Lock()
	defer n.mu.Unlock()
	o.cleaned = make(chan struct{})
	args := []string{n.agent, "cleanup", "--kubeconfig", o.kubeconfig, "--node-name", o.name, "--kubelet-dir", filepath.Join(n.dir, "kubelet"),
		"--cdi-dir", n.cdi, "--state-dir", n.state, "--nfd-dir", filepath.Join(n.dir, "nfd"), "--runtime-endpoint", "unix://" + filepath.Join(n.dir, "cri.sock"), "--host-root", "/"}
	start := func(kill int) (*tracee, error) {
		n.starts++
		p, err := n.launch(args, kill)
		if err == nil {
			n.process = p
		}
		return p, err
	}
	first, err := start(kill)
	if err != nil {
		n.wrong = append(n.wrong, err.Error())
		close(o.cleaned)
		return n.process
	}
	n.guard.Go(func() {
		defer close(o.cleaned)
		for p := first; ; {
			if <-p.done; !p.mayEnd() {
				if p.status.ExitStatus() != 0 {
					n.breaks("the cleanup ended with status %#x", p.status)
				}
				return
			}
			n.mu.Lock()
			p, err = start(0)
			n.mu.Unlock()
			if err != nil {
				n.breaks("the cleanup does not start again: %v", err)
				return
			}
		}
	})
	return first
}

// isClean waits for the end of the cleanup, and says what is left.
func (o *objectSide) isClean() error {
	<-o.cleaned
	var is sight
	if err := o.Do(o.t, nil, http.MethodGet, nodesPath+"/"+o.name, "", nil, &is); err != nil {
		return err
	}
	if left := is.left(); len(left) > 0 {
		return fmt.Errorf("the cleanup has left %q on the Node", left)
	}
	if err := o.Do(o.t, nil, http.MethodGet, gpuNodesPath+"/"+o.name, "", nil, nil); err == nil {
		return errors.New("the cleanup has left the GPUNode")
	}
	return nil
}

// counted names counts for people.
func counted(of map[string]int) string {
	var out []string
	for _, what := range slices.Sorted(maps.Keys(of)) {
		out = append(out, fmt.Sprintf("%s: %d", what, of[what]))
	}
	return strings.Join(out, ", ")
}
