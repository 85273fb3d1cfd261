// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	"context"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

var (
	onCaps = flag.Bool("caps", false, "with -hardware: hold programs to memory caps on an idle GPU too; needs root, gcc and overlay in the kernel")
	python = flag.String("python", "python3", "with -caps: the Python whose PyTorch, JAX and CuPy are held to caps, those of them that it has")
)

const (
	capBytes = 8 << 30
	// agentReads is how often the agent reads the driver.
	agentReads = 250 * time.Millisecond
	// late is how much code a program may load beyond its cap until the next reading.
	late = 32 << 20
	// block is what the driver gives at once.
	block = 2 << 20
)

//go:embed testdata/caps.py
var capsPython []byte

// capped is a GPU on which programs are held to caps, by the library that the agent puts into
// containers, with the edits that the agent writes.
type capped struct {
	opts   nvml.Options
	driver *nvml.Driver
	gpu    gpu.Device
	parts  cdi.Parts
	files  string // what programs are, for containers to bind
	kit    lib.Kit
	pages  *lib.Pages
	extra  []string // folders of this machine that containers need
	env    []string
}

func newCapped(t *testing.T, opts nvml.Options) *capped {
	t.Helper()
	if lack := capsule.Missing(); lack != "" {
		t.Skipf("skipped: %s", lack)
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: the cap's library needs gcc: %v", err)
	}
	opts.Hook = "/usr/bin/nvidia-cdi-hook" // which no container here runs: capsule does as it would
	r := &capped{opts: opts, driver: Open(t, opts), files: t.TempDir()}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, dev := range read(t, r.driver).GPUs {
		m, err := memoryOf(t, r.driver, dev.UUID)
		must(err)
		if running, err := r.driver.Processes(wait(t), dev.UUID); !dev.MIG.Enabled && err == nil && len(running) == 0 && m.Free > capBytes>>20*3/2 {
			r.gpu = dev
			break
		}
	}
	if r.gpu.UUID == "" {
		t.Skip("skipped: no GPU is idle and not in MIG mode, with 12 GiB free")
	}
	var err error
	r.parts, err = r.driver.Parts(wait(t))
	must(err)
	out, err := exec.Command("gcc", "-O2", "-Wall", "-Wno-strict-prototypes", "-o", filepath.Join(r.files, "caps"), "testdata/caps.c", "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("compile the program that takes memory: %v\n%s", err, out)
	}
	writeTo(t, r.files, "caps.py", capsPython)
	dir := t.TempDir()
	r.kit = r.install(t, dir)
	r.pages, err = lib.OpenPages(dir)
	must(err)
	t.Cleanup(func() {
		if err := lib.Unmount(dir); err != nil {
			t.Error(err)
		}
	})
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "LD_LIBRARY_PATH=") { // the machine's own way to its driver
			r.env = append(r.env, e)
		}
	}
	return r
}

func writeTo(t *testing.T, dir, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// install builds the cap's library from this checkout and fits it to the driver.
func (r *capped) install(t *testing.T, dir string) lib.Kit {
	t.Helper()
	built, err := capsule.Library(t.Context(), lib.Root)
	if err != nil {
		t.Fatal(err)
	}
	kit := lib.Kit{Empty: filepath.Join(dir, "empty"), Mark: writeTo(t, dir, "mark", nil)}
	if err := os.Mkdir(kit.Empty, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]*string{"libcuda.so": &kit.CUDA, "libnvidia-ml.so": &kit.NVML} {
		data, err := os.ReadFile(filepath.Join(built, name+".1"))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range r.parts.Common.Mounts {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), name+".") {
				if data, err = lib.Hide(data, r.opts.Seen(m.HostPath)); err != nil {
					t.Fatal(err)
				}
			}
		}
		*to = writeTo(t, dir, name+".1", data)
	}
	return kit
}

// Used is capsule.Driver of the real driver.
func (r *capped) Used(u gpu.UUID, containers ...*capsule.Container) (uint64, bool) {
	list, err := r.driver.Processes(context.Background(), u)
	if err != nil {
		return 0, false
	}
	var used uint64
	for _, p := range list {
		if slices.ContainsFunc(containers, func(c *capsule.Container) bool { return c.Has(p.PID) }) {
			if !p.Known {
				return 0, false
			}
			used += p.Bytes
		}
	}
	return used, true
}

// room is a container on the GPU, with a cap or without one.
type room struct {
	*capsule.Container
	r    *capped
	key  string // empty without a cap
	env  []string
	stop []func()

	mu      sync.Mutex
	peak    uint64 // the most that its processes had; guarded by mu
	samples int    // guarded by mu
	others  bool   // another's process was on the GPU; guarded by mu
}

// open makes a container, which goes with the test.
func (r *capped) open(t *testing.T, withCap bool) *room {
	t.Helper()
	o := &room{r: r}
	var over cdi.Overlay
	key := cdi.Key("example.com/gpu-mem", []string{t.Name()})
	if withCap {
		o.key = key
		pages, err := r.pages.Write(key, agentReads, []lib.Limit{{GPU: r.gpu.UUID, Bytes: capBytes}})
		if err != nil {
			t.Fatal(err)
		}
		ro := []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}
		over = cdi.Overlay{
			Overrides: []cdi.Override{
				{Library: "libcuda.so", HostPath: r.kit.CUDA, Real: lib.RealCUDA},
				{Library: "libnvidia-ml.so", HostPath: r.kit.NVML, Real: lib.RealNVML},
			},
			Mounts: append(lib.Mounts(key, pages), specs.Mount{HostPath: r.kit.Empty, ContainerPath: lib.CompatDir, Options: ro}),
		}
	}
	spec, err := cdi.Spec("example.com", key, r.parts, []gpu.UUID{r.gpu.UUID}, over)
	if err != nil {
		t.Fatal(err)
	}
	edits := spec.Devices[0].ContainerEdits
	capsule.Bind(&edits, r.files, "/caps")
	for _, dir := range r.extra {
		capsule.Bind(&edits, dir, dir)
	}
	o.env = slices.Concat(r.env, edits.Env)
	if o.Container, err = capsule.Open(t.Context(), edits, capsule.Image{}); err != nil {
		t.Fatal(err)
	}
	o.run(t, o.sample)
	if withCap {
		reader := &capsule.Reader{Driver: r, Container: o.Container, Pages: r.pages, Key: key, GPU: r.gpu.UUID, Every: agentReads}
		o.run(t, func(ctx context.Context) {
			if err := reader.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { o.close(t) })
	return o
}

// run has something done beside the container until its end.
func (o *room) run(t *testing.T, do func(context.Context)) {
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { do(ctx) })
	o.stop = append(o.stop, func() { cancel(); done.Wait() })
}

// sample looks all the time at what the container's processes have.
func (o *room) sample(ctx context.Context) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		list, err := o.r.driver.Processes(ctx, o.r.gpu.UUID)
		if err == nil {
			var used uint64
			others := false
			for _, p := range list {
				if o.Has(p.PID) {
					used += p.Bytes
				} else if p.Bytes > 0 && alive(p.PID) {
					others = true
				}
			}
			o.note(used, others)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (o *room) note(used uint64, others bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.peak, o.samples, o.others = max(o.peak, used), o.samples+1, o.others || others
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// close ends the container, once, and judges what was seen of it.
func (o *room) close(t *testing.T) {
	t.Helper()
	if o.stop == nil {
		return
	}
	for _, stop := range o.stop {
		stop()
	}
	o.stop = nil
	var undone uint64
	if o.key != "" {
		c, err := o.counters()
		if err != nil {
			t.Error(err)
		}
		undone = c.Undone
		t.Logf("the usage page: %d refusals, %d readings asked for, %.1f MiB undone by pools, %d allocations uncounted", c.Refusals, c.Asks, mib(c.Undone), c.Uncounted)
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	t.Logf("at most %.1f MiB in %d samples", mib(o.peak), o.samples)
	if o.others {
		t.Log("meanwhile others' processes were on the GPU")
	}
	if o.key == "" {
		return
	}
	if o.peak > capBytes {
		t.Logf("%.1f MiB more than the cap, of which pools explain %.1f", mib(o.peak-capBytes), mib(undone))
	}
	// Code that is loaded when the cap is full is seen by the next reading.
	if o.peak > capBytes+undone+late {
		t.Errorf("the processes had %.1f MiB under a cap of %.1f", mib(o.peak), mib(capBytes))
	}
	if err := o.r.pages.Remove(o.key); err != nil {
		t.Error(err)
	}
}

func (o *room) counters() (lib.Counters, error) {
	u, err := o.r.pages.OpenUsage(o.key, o.r.gpu.UUID)
	if err != nil {
		return lib.Counters{}, err
	}
	defer u.Close()
	return u.Read()
}

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

// program is one that runs in a container and says what it does.
type program struct {
	o     *room
	p     *capsule.Process
	in    *os.File
	out   *os.File
	lines *bufio.Reader
	errs  *os.File
}

func (o *room) start(t *testing.T, env []string, args ...string) *program {
	t.Helper()
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer theirOut.Close()
	errs, err := os.Create(filepath.Join(t.TempDir(), "errors"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := o.Start(capsule.Program{Args: args, Env: slices.Concat(o.env, env), Stdin: theirIn, Stdout: theirOut, Stderr: errs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); out.Close(); errs.Close() })
	return &program{o: o, p: p, in: in, out: out, lines: bufio.NewReader(out), errs: errs}
}

// line is the next line of a program that is a word and values.
func (p *program) line(t *testing.T) (word string, values map[string]string) {
	t.Helper()
	if err := p.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	text, err := p.lines.ReadString('\n')
	if err != nil {
		said, _ := os.ReadFile(p.errs.Name())
		t.Fatalf("the program ends or says nothing: %v\n%s", err, said[max(0, len(said)-3000):])
	}
	fields := strings.Fields(text)
	values = map[string]string{}
	for _, f := range fields[1:] {
		key, value, _ := strings.Cut(f, "=")
		values[key] = value
	}
	return fields[0], values
}

func (p *program) goOn(t *testing.T) {
	t.Helper()
	if _, err := p.in.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
}

// until reads lines up to one with the word, and judges those on the way.
func (p *program) until(t *testing.T, last string) map[string]string {
	t.Helper()
	for {
		word, values := p.line(t)
		if word == last {
			return values
		}
		switch word {
		case "lacks":
			p.goOn(t)
			said, _ := os.ReadFile(p.errs.Name())
			t.Skipf("skipped: %s lacks it: %s", *python, strings.TrimSpace(string(said)))
		case "end":
			t.Fatalf("the program ended before it said %q", last)
		default:
			p.judge(t, word, values)
		}
		p.goOn(t)
	}
}

// judge holds what a program says against the driver and the cap.
func (p *program) judge(t *testing.T, word string, values map[string]string) {
	t.Helper()
	used, known := p.o.r.Used(p.o.r.gpu.UUID, p.o.Container)
	if !known {
		t.Fatal("the driver does not say what processes have")
	}
	p.o.note(used, false)
	t.Logf("%s %v: the driver says %.1f MiB", word, values, mib(used))
	if p.o.key == "" {
		return
	}
	number := func(key string) uint64 {
		n, err := strconv.ParseUint(values[key], 10, 64)
		if err != nil {
			t.Errorf("%s: %v", word, err)
		}
		return n
	}
	switch word {
	case "sees":
		// Until the first reading a context counts as much as is expected of one.
		if total, free := number("total"), number("free"); total != capBytes || free > capBytes-used+lib.LeastContext {
			t.Errorf("it sees %.1f MiB, %.1f of them free, of a cap of %.1f with %.1f in use", mib(total), mib(free), mib(capBytes), mib(used))
		}
	case "holds":
		if bytes := number("bytes"); bytes > capBytes {
			t.Errorf("it takes %.1f MiB for its own, of a cap of %.1f", mib(bytes), mib(capBytes))
		}
	case "full":
		if request := number("request"); used+request+2*block <= capBytes {
			t.Errorf("%.1f MiB were refused with %.1f of %.1f MiB in use", mib(request), mib(used), mib(capBytes))
		}
	}
}

// end has a program run to its end.
func (p *program) end(t *testing.T) {
	t.Helper()
	p.until(t, "end")
	p.goOn(t)
	if _, status, err := p.p.Wait(wait(t)); err != nil || status != 0 {
		said, _ := os.ReadFile(p.errs.Name())
		t.Errorf("the program ended with %#x, %v\n%s", uint32(status), err, said[max(0, len(said)-3000):])
	}
}

// both runs a program under the cap, and without one up to most of what the cap is.
func (r *capped) both(t *testing.T, env []string, args ...string) {
	t.Helper()
	for _, withCap := range []bool{false, true} { // what is read from disk first is no cost of the cap's
		stop, name := "0", "capped"
		if !withCap {
			stop, name = strconv.Itoa(capBytes-1<<30), "free"
		}
		t.Run(name, func(t *testing.T) {
			o := r.open(t, withCap)
			if withCap {
				r.smi(t, o)
			}
			began := time.Now()
			o.start(t, env, append(slices.Clone(args), stop)...).end(t)
			t.Logf("in all %v", time.Since(began).Round(time.Millisecond))
		})
	}
}

// smi holds that nvidia-smi in the container shows the cap.
func (r *capped) smi(t *testing.T, o *room) {
	t.Helper()
	out, status, err := o.Run(wait(t), capsule.Program{Args: []string{"/usr/bin/env", "nvidia-smi"}, Env: o.env})
	total := regexp.MustCompile(fmt.Sprintf(`/ +%dMiB `, capBytes>>20))
	if err != nil || status != 0 || !total.MatchString(out) {
		t.Errorf("nvidia-smi in the container ends with %#x, %v, and does not show the cap:\n%s", uint32(status), err, out)
	}
}

// TestCapsOfTheEmulator is for the test: what it asks of hardware it finds here.
func TestCapsOfTheEmulator(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 1})
	newCapped(t, n.opts).both(t, nil, "/caps/caps")
}

// TestCapsOfHardware holds programs to a cap on this machine's GPU. Times are printed and
// held against nothing.
func TestCapsOfHardware(t *testing.T) {
	if !*onHardware || !*onCaps {
		t.Skip("skipped: -hardware and -caps are not given (make test-gpu TEST_GPU_FLAGS=-caps gives both)")
	}
	r := newCapped(t, nvml.Options{Library: *library, DriverRoot: *driverRoot, EventWait: time.Second})
	t.Run("Driver", func(t *testing.T) { r.both(t, nil, "/caps/caps") })
	interpreter := r.findPython(t)
	for _, c := range []struct{ name, framework, env string }{
		{"PyTorch", "torch", ""},
		{"PyTorchExpandable", "torch", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
		{"PyTorchAsync", "torch", "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"},
		{"JAX", "jax", ""},
		{"CuPy", "cupy", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.both(t, []string{c.env, "PYTHONDONTWRITEBYTECODE=1"}, interpreter, "/caps/caps.py", c.framework)
		})
	}
	t.Run("TwoPyTorch", func(t *testing.T) {
		o := r.open(t, true)
		var both []*program
		for range 2 {
			both = append(both, o.start(t, nil, interpreter, "/caps/caps.py", "two", "0"))
		}
		for _, word := range []string{"ready", "full"} {
			var last map[string]string
			for _, p := range both {
				last = p.until(t, word)
			}
			both[0].judge(t, word, last)
			for _, p := range both {
				p.goOn(t)
			}
		}
		for _, p := range both {
			p.end(t)
		}
	})
}

// findPython is the path of the Python, whose folders containers get where they are on
// other file systems than the root's.
func (r *capped) findPython(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath(*python)
	if err != nil {
		t.Skipf("skipped: -python: %v", err)
	}
	out, err := exec.Command(path, "-c", "import sys, sysconfig; print(sys.prefix, sys.base_prefix, sysconfig.get_path('purelib'), sep='\\n')").Output()
	if err != nil {
		t.Skipf("skipped: %s does not run: %v", path, err)
	}
	for dir := range strings.Lines(string(out)) {
		dir = strings.TrimSpace(dir)
		if device(dir) != device("/") && !slices.Contains(r.extra, dir) {
			r.extra = append(r.extra, dir)
		}
	}
	return path
}

// device is the file system that a folder is on.
func device(dir string) uint64 {
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return 0
	}
	return st.Dev
}
