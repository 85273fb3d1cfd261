// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func upCommand(ctx context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("up", "")
	labels := fs.String("label", "", "labels of the Node: k=v,...")
	maxPods := fs.Int("max-pods", 110, "how many pods the Node takes")
	prompt := fs.Bool("prompt-status", false, "have the kubelet look at its node every second, not every ten as by default: "+
		"who waits for a change of what the node offers then waits for a second, and sees what no user does")
	join := fs.String("join", "", "the node whose cluster this one is to be of: it has no control plane of its own then, and ends with the other")
	withParent := fs.Bool("with-parent", false, "end the node when the calling process ends")
	kubernetes := fs.String("kubernetes", "", "another `VERSION` of Kubernetes: "+strings.Join(otherKubernetes, ", ")+"; 'cluster build --with kubernetes-VERSION' builds it")
	runtime := fs.String("runtime", "", "another `PART` as container runtime: "+strings.Join(otherRuntimes, ", ")+"; 'cluster build --with PART' builds it")
	timeout := fs.Duration("timeout", 3*time.Minute, "how long the node may take to be Ready")
	var binds list
	fs.Var(&binds, "bind", "directory of the host that is there inside, writable, at the same path; repeatable")
	if _, err := fs.parse(args, 0, 0); err != nil {
		return err
	}
	if !nodeName.MatchString(*name) {
		return fmt.Errorf("name %q: a node's name has up to 32 lower-case letters, digits and hyphens", *name)
	}
	spec := Spec{Name: *name, Cache: l.cache, Labels: *labels, MaxPods: *maxPods, PromptStatus: *prompt}
	if err := spec.choose(*kubernetes, *runtime); err != nil {
		return err
	}
	for _, b := range binds {
		dir, err := filepath.Abs(b)
		if err != nil {
			return fmt.Errorf("bind %s: %w", b, err)
		}
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			return fmt.Errorf("bind %s: it is no directory", dir)
		}
		spec.Binds = append(spec.Binds, dir)
	}
	if *withParent {
		parent, err := identify(os.Getppid())
		if err != nil {
			return fmt.Errorf("find the calling process: %w", err)
		}
		spec.EndsWith = append(spec.EndsWith, parent)
	}
	if *join != "" {
		if err := joinTo(l, *join, &spec); err != nil {
			return fmt.Errorf("join: %w", err)
		}
	}
	if err := checkRights(); err != nil {
		return err
	}
	if err := checkBuilt(l, spec.others()...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	return up(ctx, l, spec)
}

// joinTo makes spec one that joins a node that runs.
func joinTo(l Layout, name string, spec *Spec) error {
	n, err := l.running(name)
	if err != nil {
		return err
	}
	other, err := n.spec()
	if err != nil {
		return err
	}
	state, err := n.state()
	if err != nil {
		return err
	}
	if other.Join != nil {
		return fmt.Errorf("node %s has no control plane of its own; join %s, as it has", name, other.Join.Name)
	}
	spec.Join = &Joined{Name: name, NodeIP: other.nodeIP(), Init: state.Init, APIPort: state.APIPort}
	spec.EndsWith = append(spec.EndsWith, state.Init)
	return nil
}

// up starts a node and returns when it is Ready. Whatever it started is gone
// again when it returns an error; the logs stay.
func up(ctx context.Context, l Layout, spec Spec) (err error) {
	n := l.node(spec.Name)
	unlock, err := l.lock(spec.Name)
	if err != nil {
		return err
	}
	defer unlock()
	if state, err := n.state(); err == nil && state.alive() {
		return fmt.Errorf("node %s runs already; 'cluster down --name %s' ends it", n.name, n.name)
	}
	// What a node that was killed left behind.
	if err := end(l, n); err != nil {
		return err
	}
	if err := os.RemoveAll(n.dir); err != nil {
		return fmt.Errorf("clear %s: %w", n.dir, err)
	}
	for _, dir := range []string{"root", "runtime", "etcd", "logs/pods", "etc"} {
		if err := os.MkdirAll(n.path(dir), 0o755); err != nil {
			return fmt.Errorf("make the node's directory: %w", err)
		}
	}
	if spec.Links, err = links(l, n, spec); err != nil {
		return err
	}
	if err := takeSlot(l, n, &spec); err != nil {
		return err
	}
	admin, err := writeConfig(n, l, spec)
	if err != nil {
		return fmt.Errorf("write the node's configuration: %w", err)
	}

	p := newProgress("node " + spec.Name)
	keeper, err := spawnKeeper(n)
	if err != nil {
		return err
	}
	keeperEnded := make(chan struct{})
	go func() {
		_ = keeper.Wait() // its log says why
		close(keeperEnded)
	}()
	defer func() {
		if err != nil {
			_ = keeper.Process.Signal(syscall.SIGTERM) // ended by itself: as wanted
			<-keeperEnded
			err = errors.Join(err, end(l, n))
		}
	}()
	b := &bringUp{n: n, l: l, spec: spec, progress: p, keeperEnded: keeperEnded}
	if err := b.run(ctx, admin); err != nil {
		return fmt.Errorf("start node %s: %w", n.name, err)
	}
	return nil
}

// takeSlot gives spec the lowest slot that no other node has, and writes it
// down, which is what takes it.
func takeSlot(l Layout, n Node, spec *Spec) error {
	unlock, err := l.lock("slots")
	if err != nil {
		return err
	}
	defer unlock()
	nodes, err := l.nodes()
	if err != nil {
		return err
	}
	taken := map[int]bool{}
	for _, other := range nodes {
		if s, err := other.spec(); err == nil && other.name != n.name {
			taken[s.Slot] = true
		}
	}
	for taken[spec.Slot] {
		spec.Slot++
	}
	if spec.Slot > 254 {
		return errors.New("all 255 subnets belong to nodes; 'cluster list' names them and 'cluster down' ends them")
	}
	return writeJSON(n.path("spec.json"), *spec)
}

// bringUp is one node on its way to Ready.
type bringUp struct {
	n           Node
	l           Layout
	spec        Spec
	progress    *progress
	keeperEnded <-chan struct{}
	state       State
	api         *apiClient
}

func (b *bringUp) run(ctx context.Context, a admin) error {
	if err := b.await(ctx, "the node's first process", func() error {
		_, err := b.n.ask(request{Op: "ps"})
		return err
	}); err != nil {
		return err
	}
	var err error
	if b.state, err = b.n.state(); err != nil {
		return err
	}
	port := b.state.APIPort
	if b.spec.Join != nil {
		port = b.spec.Join.APIPort
	}
	server := fmt.Sprintf("https://127.0.0.1:%d", port)
	if err := b.n.writeKubeconfig(server, a); err != nil {
		return err
	}
	if b.api, err = newAPIClient(server, a); err != nil {
		return err
	}
	b.progress.step("namespaces, root and network stand")

	commands := nodeProcesses(b.spec)
	// start starts those of these names that the node has.
	start := func(names ...string) error {
		for _, c := range commands {
			if !slices.Contains(names, c.Name) {
				continue
			}
			if _, err := b.n.ask(request{Op: "start", Process: c}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := start(procEtcd, b.spec.runtime().process, procAPI); err != nil {
		return err
	}
	runtime, images := make(chan error, 1), make(chan error, 1)
	go func() {
		err := b.awaitRuntime(ctx)
		runtime <- err
		if err == nil {
			images <- b.loadImages(ctx)
		}
	}()

	if err := b.await(ctx, procAPI, func() error { return b.api.get(ctx, "/livez", nil) }); err != nil {
		return err
	}
	b.progress.step("kube-apiserver answers")
	// A kubelet ends where there is no runtime yet. In a cluster that is joined the API server
	// answers first.
	if err := <-runtime; err != nil {
		return err
	}
	if err := start(procKubelet, procController, procScheduler); err != nil {
		return err
	}
	if err := <-images; err != nil {
		return err
	}
	if err := b.await(ctx, procKubelet, func() error { return b.nodeReady(ctx) }); err != nil {
		return err
	}
	if err := b.await(ctx, procController, func() error {
		return b.api.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", nil)
	}); err != nil {
		return err
	}
	// Until now an end is a failure to come up, and told.
	if _, err := b.n.ask(request{Op: "supervise"}); err != nil {
		return err
	}
	b.progress.step("the Node is Ready")
	return nil
}

func (b *bringUp) awaitRuntime(ctx context.Context) error {
	// Seen from here, the node's files are below its first process's root.
	runtime := b.spec.runtime()
	socket := fmt.Sprintf("/proc/%d/root%s", b.state.Init.PID, runtime.socket)
	if err := b.await(ctx, runtime.process, func() error {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err
	}); err != nil {
		return err
	}
	b.progress.step("%s answers", runtime.process)
	return nil
}

func (b *bringUp) loadImages(ctx context.Context) error {
	if err := b.n.load(ctx, b.l, b.l.path("images", "base.tar")); err != nil {
		return fmt.Errorf("%w\n%s", err, tail(b.n.log(b.spec.runtime().process)))
	}
	b.progress.step("images are loaded")
	return nil
}

// nodeReady returns nil when the Node is Ready and takes pods, by the word of the kubelet
// that was started: a cluster that the node was of before remembers an older one's.
func (b *bringUp) nodeReady(ctx context.Context) error {
	var node struct {
		Spec struct {
			Taints []struct{ Key, Effect string }
		}
		Status struct {
			Conditions []struct {
				Type, Status, Message string
				LastHeartbeatTime     time.Time
			}
		}
	}
	if err := b.api.get(ctx, "/api/v1/nodes/"+b.spec.Name, &node); err != nil {
		return err
	}
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type != "Ready":
		case c.Status != "True":
			return fmt.Errorf("the Node is not Ready: %s", c.Message)
		case c.LastHeartbeatTime.Before(b.progress.start.Truncate(time.Second)):
			return fmt.Errorf("the Node is Ready by the word of another kubelet, of %s", c.LastHeartbeatTime.Format(time.TimeOnly))
		}
	}
	if len(node.Status.Conditions) == 0 || len(node.Spec.Taints) > 0 {
		return fmt.Errorf("the Node is not open to pods yet: taints %v", node.Spec.Taints)
	}
	return nil
}

// await calls probe until it returns nil. It fails when any process of the node
// ended by itself, or when ctx ends, with the end of the log that tells most:
// the ended process's, else that of the one waited for.
func (b *bringUp) await(ctx context.Context, process string, probe func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := probe()
		if err == nil {
			return nil
		}
		if failure := b.processEnded(); failure != nil {
			return failure
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; last: %w\n%s", process, ctx.Err(), err, tail(b.n.log(process)))
		case <-b.keeperEnded:
			return fmt.Errorf("the node ended\n%s", tail(b.n.log("keeper")))
		case <-tick.C:
		}
	}
}

func (b *bringUp) processEnded() error {
	states, err := b.n.ask(request{Op: "ps"})
	if err != nil {
		return nil // the keeper's end says more
	}
	for _, s := range states {
		if s.Unexpected {
			return fmt.Errorf("%s: %s\n%s", s.Name, s.State, tail(b.n.log(s.Name)))
		}
	}
	return nil
}

// tail returns the end of a log with a heading, at most 30 lines and 8 KiB.
func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	const size, count = 8 << 10, 30
	if len(b) > size {
		b = b[len(b)-size:]
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if len(lines) > count {
		lines = lines[len(lines)-count:]
	}
	return fmt.Sprintf("--- end of %s ---\n%s", file, bytes.Join(lines, []byte("\n")))
}

// apiClient reads from the API server as its administrator.
type apiClient struct {
	server, token string
	http          http.Client
}

func newAPIClient(server string, a admin) (*apiClient, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(a.ca) {
		return nil, errors.New("read the node's authority: no certificate in it")
	}
	return &apiClient{server: server, token: a.token, http: http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true},
	}}, nil
}

// get decodes the answer into v unless v is nil.
func (c *apiClient) get(ctx context.Context, path string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.server+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %.200s", path, resp.Status, body)
	}
	if v == nil {
		return nil
	}
	return json.Unmarshal(body, v)
}

func downCommand(_ context.Context, l Layout, args []string) error {
	flags, name := nodeFlags("down", "")
	if _, err := flags.parse(args, 0, 0); err != nil {
		return err
	}
	if !nodeName.MatchString(*name) {
		return fmt.Errorf("name %q: no node is called so", *name)
	}
	if err := checkRights(); err != nil {
		return err
	}
	n := l.node(*name)
	p := newProgress("node " + n.name)
	// Not under the node's lock: down also ends a node on its way up.
	ran := true
	if _, err := n.state(); errors.Is(err, fs.ErrNotExist) {
		ran = false
	}
	if err := end(l, n); err != nil {
		return err
	}
	if !ran {
		p.step("did not run; no process, mount, cgroup, namespace or interface is there")
		return nil
	}
	p.step("ended; no process, mount, cgroup, namespace or interface is left")
	return nil
}

// end ends a node, however little of it there is, removes what takes space,
// and returns an error that names whatever is left. Its logs stay.
func end(l Layout, n Node) error {
	spec := Spec{Name: n.name, Cache: l.cache}
	if s, err := n.spec(); err == nil {
		spec = s
	}
	nodes, err := l.nodes()
	if err != nil {
		return err
	}
	// Those that have joined it end with it; what they leave is looked for all the same.
	for _, other := range nodes {
		if s, err := other.spec(); err == nil && s.Join != nil && s.Join.Name == n.name {
			if err := end(l, other); err != nil {
				return err
			}
		}
	}
	state, err := n.lastState()
	if err != nil {
		return fmt.Errorf("end node %s: %w", n.name, err)
	}
	if state.Init.PID != 0 {
		state.Keeper.signal(syscall.SIGTERM)
		if !waitGone(state.Keeper, 30*time.Second) {
			state.Keeper.signal(syscall.SIGKILL)
		}
		// Only a keeper that was killed leaves this one to us.
		state.Init.signal(syscall.SIGKILL)
		if !waitGone(state.Init, 10*time.Second) {
			return fmt.Errorf("end node %s: its first process %d does not end", n.name, state.Init.PID)
		}
		if err := n.recordEnd(); err != nil {
			return fmt.Errorf("end node %s: %w", n.name, err)
		}
	}
	if err := endCgroups(spec); err != nil {
		return fmt.Errorf("end node %s: %w", n.name, err)
	}
	// What was entered from outside may take a moment to notice.
	var left []string
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		var running []State
		for _, other := range nodes {
			if s, err := other.state(); err == nil && other.name != n.name && s.alive() {
				running = append(running, s)
			}
		}
		if left, err = leftovers(n, spec, running); err != nil {
			return fmt.Errorf("look for what node %s left: %w", n.name, err)
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("end node %s: left behind: %s", n.name, strings.Join(left, "; "))
	}
	for _, name := range []string{"runtime", "etcd", "etc", "kubectl", "root", "kubeconfig", "control", "spec.json", "state.json", "namespaces.json"} {
		if err := os.RemoveAll(n.path(name)); err != nil {
			return fmt.Errorf("end node %s: %w", n.name, err)
		}
	}
	return nil
}

// progress prints steps with the seconds since the start.
type progress struct {
	what  string
	start time.Time
}

func newProgress(what string) *progress { return &progress{what, time.Now()} }

func (p *progress) step(format string, args ...any) {
	fmt.Printf("%s: %6.1f s  %s\n", p.what, time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}
