// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	driverlib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/lab"
)

const (
	domain = "example.com"
	whole  = domain + "/gpu"
	memory = domain + "/gpu-mem"

	model = "H100-80GB"
	gpus  = 3
	// unit cuts a GPU of the model into few devices: what is tested does not
	// depend on their number, and the time that it takes does.
	unit  = "8GiB"
	units = 9
	// patience is more than anything takes, the half minute for which an allocation
	// that nobody names is kept included.
	patience = 90 * time.Second
)

// machine is a driver and the programs that are run on it. Nodes share one where
// nothing is done to the hardware.
type machine struct {
	agent string
	flags map[string]bool // that its run command knows
	root  string          // the driver's
	world *emulator.World
	gpus  []emulator.GPUState
	proc  string // the machine's /proc
}

// builds is what machines are made of.
type builds struct {
	agent     string          // the program
	flags     map[string]bool // that its run knows
	libraries string          // the emulated driver's
}

// programs builds them, once and before anything is traced: a tracer waits for
// whatever child its thread has, and a compiler that another test started on that
// thread before would be one of those.
var programs = sync.OnceValues(func() (builds, error) {
	b := builds{agent: *agentProgram, flags: map[string]bool{}}
	ctx := context.Background()
	if b.agent == "" {
		kit, err := lab.NewKit(nil)
		if err != nil {
			return b, err
		}
		if !*built {
			if err := kit.Run(ctx, "make", "--no-print-directory", "-s", "build", "CACHE="+kit.Cache); err != nil {
				return b, fmt.Errorf("build the agent: %w", err)
			}
		}
		b.agent = kit.Bin("gpu-agent")
	}
	usage, err := exec.CommandContext(ctx, b.agent, "run", "--help").Output()
	if err != nil {
		return b, fmt.Errorf("%s run --help: %w", b.agent, err)
	}
	for line := range strings.Lines(string(usage)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--"); ok {
			name, _, _ = strings.Cut(name, " ")
			b.flags[strings.TrimSpace(name)] = true
		}
	}
	if !b.flags["cdi-dir"] {
		return b, fmt.Errorf("%s run --help lists no flags:\n%s", b.agent, usage)
	}
	b.libraries, err = driverlib.Cached(ctx)
	return b, err
})

// startMachine is a machine until the test's end.
func startMachine(t *testing.T, spec emulator.Spec) *machine {
	t.Helper()
	trace(t)
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	dir := shortDir(t)
	m, stop, err := newMachine(dir, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// newMachine serves an emulated driver whose files lie in dir, until it is stopped.
func newMachine(dir string, spec emulator.Spec) (m *machine, stop func() error, err error) {
	made, err := programs()
	if err != nil {
		return nil, nil, err
	}
	m = &machine{agent: made.agent, flags: made.flags, root: filepath.Join(dir, "driver"), proc: filepath.Join(dir, "proc")}
	if m.world, err = emulator.New(spec); err != nil {
		return nil, nil, err
	}
	m.gpus = m.world.State().GPUs
	nodes := filepath.Join(m.root, "dev")
	devices, err := os.ReadFile("/proc/devices")
	if err == nil {
		err = errors.Join(install.Driver(m.root, made.libraries, m.world), install.Nodes(nodes, m.world), install.Kernel(dir, string(devices), m.world),
			install.Machine{Driver: m.root, Dev: nodes, Kernel: dir}.Save())
	}
	boot := filepath.Join(m.proc, "sys/kernel/random/boot_id")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(boot), 0o755)
	}
	if err == nil {
		err = os.WriteFile(boot, []byte("8a6b0a3e-0f5c-4c9d-9d4e-3a1f0c0ffee0\n"), 0o644)
	}
	if err != nil {
		return nil, nil, err
	}
	l, err := daemon.Listen(filepath.Join(m.root, install.Socket))
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&daemon.Server{World: m.world, Driver: m.root}).Serve(ctx, l) }()
	return m, func() error {
		cancel()
		return <-ended
	}, nil
}

// shortDir is a directory for sockets, whose addresses are short. It goes with
// the test.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// node is one agent's surroundings.
type node struct {
	*machine
	dir, cdi, state string
	kubelet         *fakes.Kubelet
	runtime         *criRuntime
	// modes is what the partition file makes of each GPU: its mode and, after a
	// space, its geometry.
	modes []string
	model string // of the GPUs; set where there is MIG
	// waits are the GPUs, by index, whose change to modes waits for a holder; of
	// those with MIG alone, the others are known by what is held.
	waits map[int]bool
	// excess has the partition file ask for more devices than a node may have: it is
	// refused, and modes stay in force.
	excess bool
	edits  int
	serial int // of pods
	// claims is what the node has besides where its GPUs are offered through DRA; nil
	// elsewhere.
	claims *claimSide
	// object is what it has besides where its Node is written; nil elsewhere.
	object *objectSide
	// strike, if set, is what happens instead of the agent's end; see tracee.
	strike func()
	// disk is what the agent's directories lie on.
	disk disk
	// back are the changes that the last operation with a way back made on that.
	back []change
	// fullJournal says that there is no room for the usage journal.
	fullJournal bool
	// written is when files of the state directory were what they are to be, by their names; of
	// a node that files are cut on.
	written map[string]time.Time

	mu      sync.Mutex
	process *tracee // guarded by mu; the newest
	starts  int     // guarded by mu
	serves  string  // guarded by mu: where process serves its pages, once that is known
	ending  bool    // guarded by mu: its end is the test's wish
	wrong   []string
	guard   sync.WaitGroup
}

func startNode(m *machine, modes ...string) (*node, error) {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		return nil, err
	}
	return newNode(m, dir, nil, modes...)
}

// newNode is startNode in a directory of the caller's.
func newNode(m *machine, dir string, claims *claimSide, modes ...string) (*node, error) {
	n := &node{machine: m, dir: dir, cdi: filepath.Join(dir, "cdi"), state: filepath.Join(dir, "state"), modes: modes, claims: claims}
	return n, n.open()
}

// open starts everything of the node. Where that fails it is closed again.
func (n *node) open() error {
	err := errors.Join(os.Mkdir(n.cdi, 0o755), os.Mkdir(n.state, 0o755), n.edit())
	options := fakes.KubeletOptions{Dir: filepath.Join(n.dir, "kubelet"), Agent: agentPod, Judge: true}
	if n.claims != nil {
		options.Wipe = n.claims.wipe
		err = errors.Join(err, n.claims.begin(n))
	}
	if err == nil {
		n.kubelet, err = fakes.StartKubelet(options)
	}
	if err == nil {
		n.runtime, err = startRuntime(filepath.Join(n.dir, "cri.sock"), n.cdi)
	}
	if err == nil && n.object != nil {
		err = n.object.begin(n)
	}
	if err != nil {
		return errors.Join(err, n.close())
	}
	n.begin(0)
	return nil
}

// close ends everything of the node and removes its files.
func (n *node) close() error {
	n.end()
	if n.kubelet != nil {
		n.kubelet.Stop()
	}
	if n.runtime != nil {
		n.runtime.Stop()
	}
	var err error
	if n.claims != nil {
		err = n.claims.close()
	}
	if n.object != nil {
		err = n.object.close()
	}
	return errors.Join(err, lib.Unmount(n.state), os.RemoveAll(n.dir))
}

// edit writes the partition file anew, as n.modes has it. The file differs each
// time, so that each time the agent looks at everything.
func (n *node) edit() error {
	n.edits++
	var b strings.Builder
	fmt.Fprintf(&b, "# edit %d\nversion: v1\npartitions:\n  default:\n", n.edits)
	if n.excess {
		b.WriteString("    - devices: all\n      mode: shared\n      replicas: 30000\n")
	}
	for i := range n.modes {
		if n.excess {
			break
		}
		mode, geometry, fixed := strings.Cut(n.modes[i], " ")
		fmt.Fprintf(&b, "    - devices: [%d]\n      mode: %s\n", i, mode)
		if fixed {
			fmt.Fprintf(&b, "      geometry: %s\n", geometry)
		}
		if n.claims != nil {
			b.WriteString("      api: dra\n")
		}
	}
	path := filepath.Join(n.dir, "partitions.yaml")
	if err := os.WriteFile(path+".new", []byte(b.String()), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// begin starts the agent, to be killed at its kill-th change if kill is not 0,
// and starts it again when that has happened.
func (n *node) begin(kill int) *tracee {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ending = false
	return n.beginLocked(kill)
}

func (n *node) beginLocked(kill int) *tracee {
	n.starts++
	n.serves = ""
	args := []string{n.agent, "run", "--driver-root", n.root, "--config", filepath.Join(n.dir, "partitions.yaml"),
		"--kubelet-dir", filepath.Join(n.dir, "kubelet"), "--cdi-dir", n.cdi, "--state-dir", n.state, "--memory-unit", unit,
		"--pod", agentPod.Namespace + "/" + agentPod.Name, "--http", "127.0.0.1:0", "--log-format", "json"}
	for _, f := range []struct{ name, value string }{
		{"runtime-endpoint", "unix://" + filepath.Join(n.dir, "cri.sock")},
		{"proc-root", n.proc},
		{"host-root", "/"},
		// A GPU whose health could not be read is to be back while a test waits.
		{"health-hold", "1s"},
		{"health-probe", "500ms"},
	} {
		if n.flags[f.name] {
			args = append(args, "--"+f.name, f.value)
		}
	}
	if n.claims != nil {
		args = append(args, n.claims.flags()...)
	}
	if n.object != nil {
		args = append(args, n.object.flags()...)
	}
	p, err := n.launch(args, kill)
	if err != nil {
		n.wrong = append(n.wrong, err.Error())
		return n.process
	}
	n.process = p
	n.guard.Go(func() { n.watch(p) })
	return p
}

func (n *node) launch(args []string, kill int) (*tracee, error) {
	log, err := os.Create(n.logFile(n.starts))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if n.object != nil { // of which writes to the API server are counted alone
		return startTraced(args, log, kill, n.strike, nil)
	}
	return startTraced(args, log, kill, n.strike, &n.disk, n.cdi, n.state)
}

func (n *node) logFile(start int) string {
	return filepath.Join(n.dir, fmt.Sprintf("agent-%d.log", start))
}

// watch starts a successor of a process that was killed.
func (n *node) watch(p *tracee) {
	<-p.done
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending {
		return
	}
	if !p.mayEnd() && !n.disk.excuses(p) {
		n.wrong = append(n.wrong, fmt.Sprintf("the agent ended by itself: status %#x", p.status))
	}
	n.beginLocked(0)
}

// end ends the agent as kill -9 does.
func (n *node) end() {
	n.mu.Lock()
	n.ending = true
	p := n.process
	n.mu.Unlock()
	if p != nil {
		p.end()
	}
	n.guard.Wait()
}

// arm counts the present process's changes from now on.
func (n *node) arm(k int) *tracee {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.process.arm(k, n.strike)
	return n.process
}

// said is what the newest processes said last.
func (n *node) said() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var b strings.Builder
	for i := max(1, n.starts-1); i <= n.starts; i++ {
		data, _ := os.ReadFile(n.logFile(i))
		if cut := len(data) - 2500; cut > 0 {
			data = data[cut:]
		}
		fmt.Fprintf(&b, "process %d said:\n%s", i, data)
	}
	return b.String()
}

// address is where the newest process serves its pages, at its last start: for another
// driver it becomes another program.
func (n *node) address() (string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.serves != "" {
		return n.serves, nil
	}
	log, err := os.Open(n.logFile(n.starts))
	if err != nil {
		return "", err
	}
	defer log.Close()
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		var line struct{ Addr string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Addr != "" {
			n.serves = line.Addr
		}
	}
	if n.serves == "" {
		return "", errors.New("the agent serves no status yet")
	}
	return n.serves, nil
}

func (n *node) status(ctx context.Context) (status.Status, error) {
	addr, err := n.address()
	if err != nil {
		return status.Status{}, err
	}
	st, err := agentobs.Fetch(ctx, addr)
	if err != nil {
		n.mu.Lock()
		n.serves = ""
		n.mu.Unlock()
	}
	return st, err
}

// metrics are those of the present process.
func (n *node) metrics(ctx context.Context) (string, error) {
	addr, err := n.address()
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// rounds is how many rounds of its loop the present process has finished.
func (n *node) rounds(ctx context.Context) (float64, error) {
	text, err := n.metrics(ctx)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(name, "round_duration_seconds_count") {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, err
			}
			sum, found = sum+v, true
		}
	}
	if !found {
		return 0, errors.New("the agent counts no rounds")
	}
	return sum, nil
}

// poll waits until ok says nil. It asks less and less often, for there are many
// nodes and few processors.
func poll(ctx context.Context, what string, ok func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause := 50 * time.Millisecond; ; pause = min(pause*3/2, time.Second) {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("in vain awaited %s: %w", what, err)
		case <-time.After(pause):
		}
	}
}

// settle waits until the node is as its surroundings say, and is so after
// another look of the agent's at everything.
func (n *node) settle(ctx context.Context) error {
	if err := poll(ctx, "the node's state", func() error { return n.differs(ctx) }); err != nil {
		return err
	}
	before := -1.0
	// The process that is asked may be killed by what it is asked to do.
	if err := poll(ctx, "another round", func() error {
		now, err := n.rounds(ctx)
		switch {
		case err != nil:
			before = -1
			return err
		case before < 0 || now < before:
			before = now
			return errors.Join(errors.New("not asked yet"), n.edit())
		case now == before:
			return errors.New("none was finished")
		}
		return nil
	}); err != nil {
		return err
	}
	return poll(ctx, "the node's state after another round", func() error { return n.differs(ctx) })
}

// differs compares the node with what the kubelet, the runtime and the
// partition file say. It returns the first thing that is not as it should be.
func (n *node) differs(ctx context.Context) error {
	st, err := n.status(ctx)
	if err != nil {
		return err
	}
	held := n.held()
	if st.Allocations != len(held) {
		return fmt.Errorf("the agent has %d allocations, the kubelet and the runtime %d", st.Allocations, len(held))
	}
	var want, got []string
	for _, key := range slices.Sorted(maps.Keys(held)) {
		want = append(want, held[key].lines()...)
	}
	for i := range st.GPUs {
		for _, h := range st.GPUs[i].Holders {
			got = append(got, fmt.Sprintf("%s/%s %s %d on %s", h.Namespace, h.Pod, h.Resource, h.Units, st.GPUs[i].UUID))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("holders are %q, want %q", got, want)
	}
	if err := n.filesDiffer(held); err != nil {
		return err
	}
	if !n.fullJournal {
		if err := n.journalDiffers(held); err != nil {
			return err
		}
	}
	if n.claims != nil {
		return n.claims.differs(&st)
	}
	if n.object != nil {
		return n.object.differs(held)
	}
	return n.offerDiffers(held, st.Partition.State)
}

// holding is an allocation, by the word of others.
type holding struct {
	namespace, pod, resource string
	ids                      []string
}

func (h holding) gpu() string {
	gpu, _, _ := strings.Cut(h.ids[0], "::")
	return gpu
}

// lines are how the agent's status has it: one a GPU.
func (h holding) lines() (out []string) {
	on := map[string]int{}
	for _, id := range h.ids {
		gpu, _, _ := strings.Cut(id, "::")
		on[gpu]++
	}
	for gpu, n := range on {
		out = append(out, fmt.Sprintf("%s/%s %s %d on %s", h.namespace, h.pod, h.resource, n, gpu))
	}
	return out
}

// held is what the kubelet and the runtime hold, by key: the containers of a pod that
// was deleted by force have what the kubelet has forgotten.
func (n *node) held() map[string]holding {
	held := map[string]holding{}
	for _, a := range n.kubelet.Allocations() {
		held[cdi.Key(a.Resource, a.IDs)] = holding{a.Pod.Namespace, a.Pod.Name, a.Resource, a.IDs}
	}
	for _, c := range n.runtime.living(fakes.Pod{}) {
		for name := range c.Annotations {
			if key, ok := strings.CutPrefix(name, domain+"/gpu-allocation."); ok && held[key].pod == "" {
				var r ledger.Record
				if err := json.Unmarshal([]byte(c.Annotations[name]), &r); err != nil {
					r.Resource = err.Error() // which no status has
				}
				held[key] = holding{c.pod.Namespace, c.pod.Name, r.Resource, c.ids}
			}
		}
	}
	if n.claims != nil {
		maps.Copy(held, n.claims.held())
	}
	return held
}

// filesDiffer says what lies in the agent's directories and should not, or
// should and does not.
func (n *node) filesDiffer(held map[string]holding) error {
	var want []string
	for key := range held {
		want = append(want, cdi.FileName(domain, key))
	}
	slices.Sort(want)
	got, err := names(n.cdi)
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("CDI files are %q, want %q", got, want)
	}
	if err := n.capsDiffer(held); err != nil {
		return err
	}
	if err := n.instancesDiffer(); err != nil {
		return err
	}
	for _, c := range n.runtime.living(fakes.Pod{}) {
		for file, contents := range c.files {
			data, err := os.ReadFile(filepath.Join(n.cdi, file))
			if err != nil {
				return fmt.Errorf("container %s runs: %w", c.Id, err)
			}
			if string(data) != contents {
				return fmt.Errorf("container %s runs and its CDI file %s has changed, from\n%s\nto\n%s", c.Id, file, contents, data)
			}
		}
	}
	if got, err = names(n.state); err != nil {
		return err
	}
	for _, name := range got {
		if n.disk.left(name) {
			continue
		}
		if base := filepath.Base(name); strings.HasPrefix(base, ".") || strings.Contains(base, "tmp") || strings.Contains(base, "temp") {
			return fmt.Errorf("a temporary file is left in the state directory: %s", name)
		}
	}
	return nil
}

// capsDiffer says which allocations have no limit pages, or pages and no allocation, and
// which CDI files name files of the agent's that are not there.
func (n *node) capsDiffer(held map[string]holding) error {
	pages, err := lib.OpenPages(n.state)
	if err != nil {
		return err
	}
	keys, err := pages.List()
	if want := slices.Sorted(maps.Keys(held)); err != nil || !slices.Equal(keys, want) {
		return fmt.Errorf("limit pages of %q, want %q: %w", keys, want, err)
	}
	for key := range held {
		data, err := os.ReadFile(filepath.Join(n.cdi, cdi.FileName(domain, key)))
		if err != nil {
			return err
		}
		for _, word := range strings.Split(string(data), `"`) {
			if !strings.HasPrefix(word, n.state+"/") {
				continue
			}
			if _, err := os.Stat(word); err != nil {
				return fmt.Errorf("the CDI file of allocation %s: %w", key, err)
			}
		}
	}
	return nil
}

// names are the files below a directory, sorted, without the agent's socket, which the next one
// replaces.
func names(dir string) (out []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Type() == fs.ModeSocket {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		out = append(out, rel)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // a file came and went: look again, if it matters
	}
	slices.Sort(out)
	return out, err
}

// offerDiffers compares what the kubelet was told with what should be on offer:
// what is held, and all of each GPU that is cut as it should be.
func (n *node) offerDiffers(held map[string]holding, state string) error {
	healthy := map[string]map[string]bool{}
	offer := func(resource, id string) {
		if healthy[resource] == nil {
			healthy[resource] = map[string]bool{}
		}
		healthy[resource][id] = true
	}
	for _, h := range held {
		for _, id := range h.ids {
			offer(h.resource, id)
		}
	}
	wantState := "applied"
	for i, g := range n.gpus {
		if strings.HasPrefix(n.modes[i], "mig") {
			if n.waits[i] {
				wantState = "blocked"
				continue
			}
			ids, err := n.devices(i, held)
			if err != nil {
				return err
			}
			for _, id := range ids {
				offer(migResource(id), id)
			}
			continue
		}
		resource, ids := whole, []string{g.UUID}
		if n.modes[i] == "shared" {
			resource, ids = memory, nil
			for u := range units {
				ids = append(ids, fmt.Sprintf("%s::%d", g.UUID, u))
			}
		}
		blocked := false
		for _, h := range held {
			if h.gpu() == g.UUID && h.resource != resource {
				blocked, wantState = true, "blocked"
			}
		}
		for _, id := range ids {
			if !blocked {
				offer(resource, id)
			}
		}
	}
	if n.excess {
		wantState = "invalid"
	}
	if state != wantState {
		return fmt.Errorf("the partition is %s, want %s", state, wantState)
	}
	endpoints, _ := n.kubelet.Endpoints()
	for resource := range healthy {
		if _, ok := endpoints[resource]; !ok {
			endpoints[resource] = fakes.Endpoint{} // no plugin's
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(endpoints)) {
		e := endpoints[resource]
		if !e.Serves() {
			if len(healthy[resource]) > 0 {
				return fmt.Errorf("no plugin serves %s", resource)
			}
			continue
		}
		for _, id := range slices.Sorted(maps.Keys(healthy[resource])) {
			if !slices.Contains(e.Healthy(), id) {
				return fmt.Errorf("%s of %s is to be on offer or held, and is not Healthy (listed: %v)", id, resource, slices.Contains(e.Unhealthy(), id))
			}
		}
		for _, id := range e.Healthy() {
			if !healthy[resource][id] {
				return fmt.Errorf("%s of %s is withdrawn, and listed Healthy", id, resource)
			}
		}
	}
	return nil
}

// complaints returns what was wrong on the way since the last call.
func (n *node) complaints() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	wrong := append(n.wrong, n.kubelet.Complaints()...)
	n.wrong = nil
	return wrong
}

// pod makes one that has not been admitted.
func (n *node) pod(resource string, count int, containers ...string) *pod {
	n.serial++
	return &pod{fakes.Pod{UID: fmt.Sprintf("00000000-0000-4000-8000-%012d", n.serial), Namespace: "default", Name: fmt.Sprintf("pod-%d", n.serial)},
		containers, resource, count}
}

// admit brings a pod with shared memory onto the node. Where the agent ends
// meanwhile its admission fails for good, and a controller makes the next.
func (n *node) admit(ctx context.Context, count int, containers ...string) (*pod, error) {
	return n.admitWith(ctx, memory, count, containers...)
}

// admitWith is admit of a pod with devices of a resource.
func (n *node) admitWith(ctx context.Context, resource string, count int, containers ...string) (*pod, error) {
	for {
		p := n.pod(resource, count, containers...)
		err := n.bind(ctx, p)
		if err == nil {
			return p, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
	}
}

// begin starts a pod's containers one after the other, each as often as it takes,
// and returns when the last one runs.
func (n *node) run(ctx context.Context, p *pod) error {
	for i, name := range p.containers {
		a := n.allocation(p, name)
		for n.prepare(ctx, a) != nil {
			if ctx.Err() != nil {
				return fmt.Errorf("start container %s of %s: %w", name, p.Name, ctx.Err())
			}
		}
		id, err := n.runtime.create(a)
		if err != nil {
			return fmt.Errorf("PreStartContainer was answered for %s of %s, and then: %w", name, p.Name, err)
		}
		n.runtime.start(id)
		if i < len(p.containers)-1 {
			n.runtime.exit(id)
		}
	}
	return nil
}

// force deletes a pod by force, whose containers hang: its devices are free at once.
func (n *node) force(p *pod) { n.kubelet.Finish(p.UID) }

// stop ends a pod.
func (n *node) stop(p *pod) {
	for _, c := range n.runtime.living(p.Pod) {
		n.runtime.exit(c.Id)
	}
	n.kubelet.Finish(p.UID)
	n.runtime.remove(p.Pod)
}
