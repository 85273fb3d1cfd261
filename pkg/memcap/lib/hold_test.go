// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	emuinstall "example.com/gpu-agent/tests/emulator/install"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"tags.cncf.io/container-device-interface/specs-go"
)

// holdNode is a node with an emulated driver, on which the program hold runs as a hook.
type holdNode struct {
	*testing.T
	world    *emulator.World
	kit      Kit
	outcomes *Outcomes
	cgroups  string // of the test, below the root of the unified hierarchy
}

// hierarchyOf finds the unified hierarchy of this machine.
func hierarchyOf(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(mount, &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
			return mount
		}
	}
	t.Skip("skipped: needs a cgroup v2 hierarchy at /sys/fs/cgroup or its unified")
	return ""
}

func newHoldNode(t *testing.T, spec emulator.Spec) *holdNode {
	t.Helper()
	programs := installed(t)
	libraries, err := emulib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := emuinstall.Driver(root, libraries, w); err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(filepath.Join(root, emuinstall.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&daemon.Server{World: w, Driver: root}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	found, err := filepath.Glob(root + "/usr/lib/*/libnvidia-ml.so." + spec.Driver)
	if err != nil || len(found) != 1 {
		t.Fatalf("the driver's libraries: %v, %v", found, err)
	}
	// The program writes beside the directory that it was installed to.
	state := t.TempDir()
	hold := filepath.Join(state, "cap", "0123456789abcdef", holdName)
	data, err := os.ReadFile(filepath.Join(programs, holdName))
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Dir(hold), 0o755), os.WriteFile(hold, data, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	return &holdNode{T: t, world: w, kit: Kit{Hold: hold, Driver: found[0]}, outcomes: OpenOutcomes(state),
		cgroups: fmt.Sprintf("/gpu-agent-hold-%d", os.Getpid())}
}

// holdContainer is a container with one process.
type holdContainer struct {
	id, cgroup, dir string
	pid             int
}

// container starts a process in a cgroup that is called by a form of the container's ID, or in one below that.
func (n *holdNode) container(id, name, below string) *holdContainer {
	n.Helper()
	mount := hierarchyOf(n.T)
	c := &holdContainer{id: id, cgroup: n.cgroups + "/kubepods/besteffort/pod1/" + name}
	c.dir = mount + c.cgroup
	if err := os.MkdirAll(filepath.Join(c.dir, below), 0o755); err != nil {
		n.Skipf("skipped: needs a cgroup v2 hierarchy that can be written: %v", err)
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		n.Fatal(err)
	}
	c.pid = cmd.Process.Pid
	n.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for dir := filepath.Join(c.dir, below); dir != mount; dir = filepath.Dir(dir) {
			for err := unix.Rmdir(dir); errors.Is(err, unix.EBUSY) && dir == filepath.Join(c.dir, below); err = unix.Rmdir(dir) {
				time.Sleep(time.Millisecond) // until the process has left it
			}
		}
		if _, err := os.Stat(c.dir); err == nil {
			n.Errorf("%s is left behind", c.dir)
		}
	})
	if err := os.WriteFile(filepath.Join(c.dir, below, "cgroup.procs"), []byte(strconv.Itoa(c.pid)), 0); err != nil {
		n.Fatal(err)
	}
	return c
}

func (c *holdContainer) state() string {
	return fmt.Sprintf(`{"ociVersion":"1.2.1","id":%q,"status":"created","pid":%d,"bundle":"/nowhere"}`, c.id, c.pid)
}

// run runs a hook, and returns what it writes to standard error, and its exit status.
func (n *holdNode) run(hook specs.Hook, state string) (says string, status int) {
	n.Helper()
	cmd := exec.Command(hook.Path)
	cmd.Args, cmd.Stdin, cmd.Env = hook.Args, strings.NewReader(state), []string{"NVIDIA_GPU_MEMORY_LIMIT=1"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) || out.Len() > 0 {
		n.Fatalf("%v: %q", err, out.String())
	}
	return errs.String(), cmd.ProcessState.ExitCode()
}

func (n *holdNode) uuid(i int) gpu.UUID { return gpu.UUID(n.world.State().GPUs[i].UUID) }

// limits returns the limits that the driver has, by the directory of the cgroup and the GPU's index: "soft/hard" in MiB.
func (n *holdNode) limits(dirs ...string) map[string]string {
	n.Helper()
	out := map[string]string{}
	for _, l := range n.world.State().Limits {
		for _, dir := range dirs {
			var st unix.Stat_t
			if err := unix.Stat(dir, &st); err == nil && fmt.Sprintf("%d:%d", st.Dev, st.Ino) == l.Cgroup {
				out[fmt.Sprintf("%s %d", filepath.Base(dir), l.GPU)] = fmt.Sprintf("%d/%d", l.Soft>>20, l.Hard>>20)
			}
		}
	}
	return out
}

func (n *holdNode) all() map[string]Outcome {
	n.Helper()
	list, err := n.outcomes.All()
	if err != nil {
		n.Fatal(err)
	}
	out := map[string]Outcome{}
	for _, o := range list {
		out[o.Container[:min(4, len(o.Container))]+"/"+o.Key[:4]] = o
	}
	return out
}

const (
	holdA = "aaaa456789abcdef"
	holdB = "bbbb456789abcdef"
)

// longID returns a container's ID that begins like this.
func longID(begins string) string { return begins + strings.Repeat("0", 64-len(begins)) }

// TestHold: the driver has the limits when the hook has ended, with every form of a container's cgroup, and the
// outcome says so. A container's environment and annotations change nothing.
func TestHold(t *testing.T) {
	n := newHoldNode(t, emulator.Spec{Driver: "615.11", Count: 2})
	gpu0, gpu1 := n.uuid(0), n.uuid(1)
	one := func(key string, mib0, mib1 uint64) specs.Hook {
		h := Hold{Key: key, Limits: map[gpu.UUID]uint64{gpu0: mib0 << 20}}
		if mib1 > 0 {
			h.Limits[gpu1] = mib1 << 20
		}
		return n.kit.HoldHook(h)
	}
	ok := func(what string, hook specs.Hook, state string) {
		t.Helper()
		if says, status := n.run(hook, state); says != "" || status != 0 {
			t.Fatalf("%s: status %d, %q", what, status, says)
		}
	}
	equal := func(what string, c *holdContainer, below string, want map[string]string) {
		t.Helper()
		if got := n.limits(c.dir, filepath.Join(c.dir, below)); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: the driver has %v, want %v", what, got, want)
		}
	}

	first := n.container(longID("1"), longID("1"), "")
	ok("cgroupfs", one(holdA, 512, 256), first.state())
	equal("cgroupfs", first, "x", map[string]string{longID("1") + " 0": "0/512", longID("1") + " 1": "0/256"})
	o := n.all()["1000/aaaa"]
	wantLimits := []Held{{gpu0, 512 << 20, 512 << 20}, {gpu1, 256 << 20, 256 << 20}}
	slices.SortFunc(wantLimits, func(a, b Held) int { return strings.Compare(string(a.GPU), string(b.GPU)) })
	if o.Failed != "" || o.Cgroup != first.cgroup || !slices.Equal(o.Limits, wantLimits) || o.Key != holdA || o.Container != first.id ||
		time.Since(o.At) > time.Minute {
		t.Errorf("outcome %+v, want the limits %+v of %s", o, wantLimits, first.cgroup)
	}

	// A second allocation of the same container: the driver's limit is for both.
	ok("second allocation", one(holdB, 100, 0), first.state())
	equal("second allocation", first, "x", map[string]string{longID("1") + " 0": "0/612", longID("1") + " 1": "0/256"})
	if o := n.all()["1000/bbbb"]; !slices.Equal(o.Limits, []Held{{gpu0, 100 << 20, 612 << 20}}) {
		t.Errorf("second allocation: outcome %+v", o)
	}
	ok("the same again", one(holdB, 100, 0), first.state())
	equal("the same again", first, "x", map[string]string{longID("1") + " 0": "0/612", longID("1") + " 1": "0/256"})

	// The next start of the allocation has another container, and its own limit; another pod of the claim, too.
	scope := n.container(longID("2"), "cri-containerd-"+longID("2")+".scope", "")
	ok("scope", one(holdA, 512, 0), scope.state())
	equal("scope", scope, "x", map[string]string{"cri-containerd-" + longID("2") + ".scope 0": "0/512"})
	equal("the first one still", first, "x", map[string]string{longID("1") + " 0": "0/612", longID("1") + " 1": "0/256"})

	// crun has a cgroup below the container's for its processes.
	below := n.container(longID("3"), "crio-"+longID("3")+".scope", "container")
	ok("below", one(holdA, 512, 0), below.state())
	equal("below", below, "container", map[string]string{"crio-" + longID("3") + ".scope 0": "0/512", "container 0": "0/512"})

	// A name of ours among the annotations, before and after, is a pod author's.
	said := n.container(longID("4"), longID("4"), "")
	ok("annotations", one(holdA, 512, 0), fmt.Sprintf(`{"annotations":{"id":"x","pid":1,"a\"id":["pid",{"id":"y"}]}, "id" : %q ,`+
		`"pid":%d,"status":"creating","more":{"pid":7,"id":"z"}}`, said.id, said.pid))
	equal("annotations", said, "x", map[string]string{longID("4") + " 0": "0/512"})

	// A soft limit of another program's hook goes: what it guarantees is not the agent's to give.
	soft := n.container(longID("5"), longID("5"), "")
	setSoft(t, n.world, soft.dir, 128<<20, 256<<20)
	ok("soft", one(holdA, 512, 0), soft.state())
	equal("soft", soft, "x", map[string]string{longID("5") + " 0": "0/512"})

	// Outcomes of containers that are gone are removed after a while, and no others.
	gone := func(id, _ string) bool { return id == first.id }
	if err := n.outcomes.Sweep(time.Now(), gone); err != nil || len(n.all()) != 6 {
		t.Errorf("%v: %d outcomes right after the start, want 6", err, len(n.all()))
	}
	if err := n.outcomes.Sweep(time.Now().Add(outcomeStays), gone); err != nil || len(n.all()) != 4 {
		t.Errorf("%v: %d outcomes later, want 4", err, len(n.all()))
	}
}

// setSoft limits a cgroup as another program does.
func setSoft(t *testing.T, w *emulator.World, dir string, soft, hard uint64) {
	t.Helper()
	s := w.Open(emulator.Opening{PID: os.Getpid(), Cgroup: func(int) (emulator.Cgroup, error) { return fileGroup{dir}, nil }})
	defer s.Close()
	if r := s.Init(); r != emulator.Success {
		t.Fatal(r)
	}
	if r := s.SetMemoryLimits(0, 0, soft, hard); r != emulator.Success {
		t.Fatal(r)
	}
}

// fileGroup is a cgroup by its directory; nobody is in it.
type fileGroup struct{ dir string }

func (g fileGroup) Name() string {
	var st unix.Stat_t
	_ = unix.Stat(g.dir, &st)
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}
func (g fileGroup) Members() (map[int]bool, bool) { return nil, true }
func (g fileGroup) Dmem() bool                    { return false }
func (g fileGroup) Above() []string               { return nil }
func (g fileGroup) Close() error                  { return nil }

// TestHoldFails: where the driver does not limit the container, the hook fails with one sentence, and the outcome has
// it. With the policy open its status is 0 all the same.
func TestHoldFails(t *testing.T) {
	n := newHoldNode(t, emulator.Spec{Driver: "615.11", Count: 1})
	u := n.uuid(0)
	c := n.container(longID("1"), longID("1"), "")
	stray := n.container(longID("2"), "somebody", "")
	elsewhere := *c
	elsewhere.pid = stray.pid
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	dead := *c
	dead.pid = ended.Process.Pid
	huge := *c
	for name, f := range map[string]struct {
		c     *holdContainer
		fault emulator.Fault
		limit uint64
		key   string
		lib   string
		want  string
	}{
		"the GPU cannot":         {c, emulator.Fault{Call: "nvmlDeviceSetMemoryLimits_v1", Code: emulator.NotSupported}, 1, holdA, "", "the GPU cannot limit memory by cgroup"},
		"no controller":          {c, emulator.Fault{Call: "nvmlDeviceSetMemoryLimits_v1", Code: emulator.NotFound}, 1, holdA, "", "dmem"},
		"the driver fails":       {c, emulator.Fault{Call: "nvmlDeviceSetMemoryLimits_v1", Code: emulator.Unknown}, 1, holdA, "", "NVML error 999"},
		"it cannot be read back": {c, emulator.Fault{Call: "nvmlDeviceGetMemoryLimits_v1", Code: emulator.Unknown}, 1, holdA, "", "back"},
		"no driver":              {c, emulator.Fault{Call: "nvmlInit_v2", Code: emulator.DriverNotLoaded}, 1, holdA, "", "start the driver's library"},
		"no such GPU":            {c, emulator.Fault{Call: "nvmlDeviceGetHandleByUUID", Code: emulator.NotFound}, 1, holdA, "", "find " + string(u)},
		"more than the card has": {&huge, emulator.Fault{}, 1 << 60, holdA, "", "NVML error 2"},
		"no library":             {c, emulator.Fault{}, 1, holdA, "/nowhere/libnvidia-ml.so", "load the driver's library: /nowhere/libnvidia-ml.so"},
		"an older driver":        {c, emulator.Fault{}, 1, holdA, "libc.so.6", "driver R615 is the first"},
		"no cgroup of its name":  {stray, emulator.Fault{}, 1, holdA, "", "is called after container"},
		"another's cgroup":       {&elsewhere, emulator.Fault{}, 1, holdA, "", "is called after container"},
		"a process that ended":   {&dead, emulator.Fault{}, 1, holdA, "", "read /proc/"},
	} {
		t.Run(name, func(t *testing.T) {
			if f.fault.Call != "" {
				if err := n.world.Inject(f.fault); err != nil {
					t.Fatal(err)
				}
				defer n.world.Clear()
			}
			kit := n.kit
			if f.lib != "" {
				kit.Driver = f.lib
			}
			for _, open := range []bool{false, true} {
				says, status := n.run(kit.HoldHook(Hold{Key: f.key, Limits: map[gpu.UUID]uint64{u: f.limit}, Open: open}), f.c.state())
				if want := map[bool]int{false: 1}[open]; status != want || !strings.Contains(says, f.want) || strings.Count(says, "\n") != 1 {
					t.Errorf("open: %v: status %d, want %d, says %q, want %q in one line", open, status, want, says, f.want)
				}
				o := n.all()[f.c.id[:4]+"/aaaa"]
				if o.Failed == "" || !strings.Contains(says, o.Failed) || len(o.Limits) != 0 {
					t.Errorf("outcome %+v, and the hook says %q", o, says)
				}
				if _, err := n.outcomes.All(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestHoldDistrusts: what is no state of a container, or no argument of the agent's, ends the hook with status 1. It
// writes nowhere but below its own directory.
func TestHoldDistrusts(t *testing.T) {
	n := newHoldNode(t, emulator.Spec{Driver: "615.11", Count: 1})
	hook := n.kit.HoldHook(Hold{Key: holdA, Limits: map[gpu.UUID]uint64{n.uuid(0): 1}})
	deep := strings.Repeat("[", 100_000)
	for _, state := range []string{
		"", "{", "[]", "null", "7", `"id"`, "{}", `{"id":"x"}`, `{"pid":1}`, `{"id":"x","pid":0}`, `{"id":"x","pid":-1}`,
		`{"id":"x","pid":"1"}`, `{"id":"x","pid":1e3}`, `{"id":"x","pid":99999999999999999999999}`, `{"id":7,"pid":1}`,
		`{"id":"","pid":1}`, `{"id":"..","pid":1}`, `{"id":"../x","pid":1}`, `{"id":"a/b","pid":1}`, `{"id":"a\u002fb","pid":1}`,
		`{"id":"` + strings.Repeat("x", 300) + `","pid":1}`, `{"id":"x","pid":1`, `{"id":"x","pid":1,}`, `{"id":"x" "pid":1}`,
		`{"id":"x","pid":1,"a":` + deep, `{"a":` + deep + `,"id":"x","pid":1}`, `{"id":"x\`, `{"id":"x","pid":1,"a":"` + strings.Repeat("y", 2<<20) + `"}`,
		"\x00\xff", `{"id":"x` + "\n" + `","pid":1}`, `{"id":"x","pid":` + strconv.Itoa(os.Getpid()) + "}",
	} {
		says, status := n.run(hook, state)
		if len(state) > 80 {
			state = state[:80]
		}
		if status != 1 || !strings.HasPrefix(says, "gpu-agent: limit GPU memory in the driver: ") {
			t.Errorf("%q: status %d, %q", state, status, says)
		}
	}
	for _, args := range [][]string{
		nil, {"closed"}, {"closed", "/nowhere", holdA, "lib"}, {"ajar", "/nowhere", holdA, "lib", "GPU-0=1"}, {"closed", "/nowhere", holdA, "lib", "GPU-0"},
		{"closed", "/nowhere", holdA, "lib", "GPU-0=0"}, {"closed", "/nowhere", holdA, "lib", "GPU-0=-1"}, {"closed", "/nowhere", holdA, "lib", "=1"},
		{"closed", "/nowhere/a/b", holdA, "lib", "GPU-0=1"}, {"closed", t.TempDir(), "../" + holdA, "lib", "GPU-0=1"},
		{"closed", t.TempDir(), holdA, "lib", "GPU-0=18446744073709551616"},
	} {
		h := hook
		h.Args = append([]string{holdName}, args...)
		if says, status := n.run(h, `{"id":"x","pid":1}`); status != 1 {
			t.Errorf("%q: status %d, %q", args, status, says)
		}
	}
	for key, o := range n.all() {
		if o.Failed == "" {
			t.Errorf("%s: %+v", key, o)
		}
	}
}

// TestHoldInTime: a driver that does not answer does not keep a container for ever.
func TestHoldInTime(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it takes ten seconds")
	}
	n := newHoldNode(t, emulator.Spec{Driver: "615.11", Count: 1})
	c := n.container(longID("1"), longID("1"), "")
	if err := n.world.Inject(emulator.Fault{Call: "nvmlDeviceSetMemoryLimits_v1", Hang: true}); err != nil {
		t.Fatal(err)
	}
	says, status := n.run(n.kit.HoldHook(Hold{Key: holdA, Limits: map[gpu.UUID]uint64{n.uuid(0): 1 << 20}}), c.state())
	if o := n.all()["1000/aaaa"]; status != 1 || !strings.Contains(says, "has not answered in time") || o.Failed == "" || o.Cgroup != c.cgroup {
		t.Errorf("status %d, %q, outcome %+v", status, says, o)
	}
	n.world.Clear()
}

// TestHoldStartsAnywhere: the program needs no function of a C library newer than the oldest in use, and only these
// two libraries by name.
func TestHoldStartsAnywhere(t *testing.T) {
	f := open(t, holdName)
	if needed, err := f.ImportedLibraries(); err != nil || !slices.Equal(needed, []string{dlName, "libc.so.6"}) {
		t.Errorf("it needs %v, %v", needed, err)
	}
	imported, err := f.ImportedSymbols()
	if err != nil || len(imported) == 0 {
		t.Fatal(imported, err)
	}
	version := regexp.MustCompile(`^GLIBC_2\.(\d+)(\.\d+)?$`)
	for _, s := range imported {
		m := version.FindStringSubmatch(s.Version)
		if m == nil {
			t.Errorf("%s has version %q", s.Name, s.Version)
			continue
		}
		if minor, _ := strconv.Atoi(m[1]); minor > 17 {
			t.Errorf("%s needs %s; the oldest system in use has GLIBC_2.17", s.Name, s.Version)
		}
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_GNU_STACK && p.Flags&elf.PF_X != 0 {
			t.Error("its stack can be run")
		}
	}
}

// TestHoldLoader: where the host has no loader of glibc, that of the driver's root starts the program, also where it is
// an absolute link, and where there is none either, there is no hook.
func TestHoldLoader(t *testing.T) {
	const driver = "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.615.11"
	p := platforms[map[elf.Machine]string{elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64"}[open(t, holdName).Machine]]
	fit := func(files map[string]string) Kit {
		host := t.TempDir()
		for name, link := range files {
			at := filepath.Join(host, name)
			err := os.MkdirAll(filepath.Dir(at), 0o755)
			if link != "" {
				err = errors.Join(err, os.Symlink(link, at))
			} else {
				err = errors.Join(err, os.WriteFile(at, nil, 0o755))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		f := &Files{seen: func(name string) string { return filepath.Join(host, name) }}
		k := Kit{Hold: "/state/cap/0/hold"}
		f.fitHold(&k, driver)
		return k
	}
	limits := Hold{Key: holdA, Limits: map[gpu.UUID]uint64{"GPU-1": 7, "GPU-0": 8}}
	args := []string{"closed", "/state/cap/set", holdA, driver, "GPU-0=8", "GPU-1=7"}
	own := fit(map[string]string{p.loader: "", "/run/nvidia/driver" + p.loader: ""}).HoldHook(limits)
	if own.HookName != "createRuntime" || own.Path != "/state/cap/0/hold" || !slices.Equal(own.Args, slices.Concat([]string{"hold"}, args)) {
		t.Errorf("with a loader of its own: %+v", own)
	}
	k := fit(map[string]string{"/run/nvidia/driver" + p.loader: "/opt/ld.so", "/run/nvidia/driver/opt/ld.so": ""})
	hook := k.HoldHook(limits)
	if want := []string{"ld.so", "--library-path"}; hook.Path != "/run/nvidia/driver/opt/ld.so" || !slices.Equal(hook.Args[:2], want) ||
		!strings.HasPrefix(hook.Args[2], filepath.Dir(driver)+":") || !slices.Equal(hook.Args[3:], slices.Concat([]string{"/state/cap/0/hold"}, args)) {
		t.Errorf("with the driver's: %+v", hook)
	}
	if k := fit(map[string]string{"/opt/ld.so": "", "/run/nvidia/driver" + p.loader: "../../../../../opt/ld.so"}); k.Hold != "" || !strings.Contains(k.NoHold, p.loader) {
		t.Errorf("with none: %+v", k)
	}
	if k := fit(nil); k.Hold != "" || k.NoHold == "" {
		t.Errorf("with none at all: %+v", k)
	}
}

// TestHoldByAnotherLoader: a loader that is told its libraries starts the program, as in the image of a driver container.
func TestHoldByAnotherLoader(t *testing.T) {
	n := newHoldNode(t, emulator.Spec{Driver: "615.11", Count: 1})
	c := n.container(longID("1"), longID("1"), "")
	f := &Files{seen: func(name string) string { return name }}
	f.fitHold(&n.kit, n.kit.Driver)
	for _, p := range platforms {
		if at, err := filepath.EvalSymlinks(p.loader); err == nil {
			n.kit.Loader, n.kit.LoaderDirs = at, "/lib/"+p.triple
		}
	}
	if n.kit.Loader == "" {
		t.Skip("skipped: no loader of glibc on this machine")
	}
	says, status := n.run(n.kit.HoldHook(Hold{Key: holdA, Limits: map[gpu.UUID]uint64{n.uuid(0): 1 << 20}}), c.state())
	if status != 0 || says != "" || n.all()["1000/aaaa"].Failed != "" {
		t.Errorf("status %d, %q, %+v", status, says, n.all())
	}
}

// TestOutcome: what is no outcome is an error, and takes no other outcome away.
func TestOutcome(t *testing.T) {
	const good = "limit v1\ncgroup /a\ngpu GPU-0 5 7 6\ndone\n"
	for text, want := range map[string]string{
		good: "{[{GPU-0 5 7}] }",
		"limit v1\ncgroup \ngpu GPU-0 5 7 0\nfailed it is so\n": "{[] it is so}",
		"limit v1\ncgroup /a\ngpu GPU-0 5 7 6\nfailed late\n":   "{[] late}",
		"limit v1\ncgroup /a\ngpu GPU-0 5 7 8\ndone\n":          "{[] }", // more than was asked for
		"": "invalid", "limit v2\ndone\n": "invalid", "limit v1\n": "invalid", "limit v1\ndone": "invalid",
		"limit v1\ndone\ndone\n":        "invalid",
		"limit v1\ngpu GPU-0 5\ndone\n": "invalid", "limit v1\ngpu GPU-0 5 7 -1\ndone\n": "invalid",
		"limit v1\nother\ndone\n": "invalid", "limit v1\nfailed \n": "invalid",
		"limit v1\n" + strings.Repeat("cgroup /a\n", 10_000) + "done\n": "invalid",
	} {
		o, err := parseOutcome([]byte(text))
		got := fmt.Sprintf("{%v %s}", o.Limits, o.Failed)
		if errors.Is(err, gpu.ErrInvalid) {
			got = "invalid"
		}
		if got != want {
			t.Errorf("%.60q: %s, %v, want %s", text, got, err, want)
		}
	}
	state := t.TempDir()
	dir := filepath.Join(OutcomesDir(state), "c")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"0000": good, "1111": "x", ".2222.tmp": "half"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(dir, "3333"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := OpenOutcomes(state).All()
	if len(all) != 1 || err == nil || !strings.Contains(err.Error(), "1111") {
		t.Errorf("%+v, %v", all, err)
	}
	if all, err := OpenOutcomes(t.TempDir()).All(); len(all) != 0 || err != nil {
		t.Errorf("without a directory: %+v, %v", all, err)
	}
}

// TestFitNamesTheDriver: the hook loads the driver's own library, by the host's path.
func TestFitNamesTheDriver(t *testing.T) {
	f := &Files{dir: t.TempDir(), seen: func(host string) string { return "/host" + host },
		install: func(string) (Kit, error) { return Kit{Hold: "/h"}, nil }}
	kit, _ := f.Fit(cdi.Parts{Common: specs.ContainerEdits{Mounts: []*specs.Mount{
		{HostPath: "/opt/lib/libnvidia-ml.so.615.11", ContainerPath: "/usr/lib/libnvidia-ml.so.615.11"}}}})
	if kit.Driver != "/opt/lib/libnvidia-ml.so.615.11" {
		t.Errorf("%+v", kit)
	}
}
