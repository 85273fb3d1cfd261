// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/hardware/capped"
	"example.com/gpu-agent/tests/memcap/capsule"
)

var (
	onCaps = flag.Bool("caps", false, "with -hardware: hold programs to memory caps on an idle GPU too; needs root, gcc and overlay in the kernel")
	python = flag.String("python", "python3", "with -caps: the Python whose PyTorch, JAX and CuPy are held to caps, those of them that it has")
)

const (
	capBytes = 8 << 30
	// late is how much code a program may load beyond its cap until the next reading.
	late = 32 << 20
	// block is what the driver gives at once.
	block = 2 << 20
)

//go:embed testdata/caps.py
var capsPython []byte

// capSuite is a GPU on which programs are held to caps.
type capSuite struct {
	*capped.Card
	files string         // what programs are, for containers to bind
	extra []capped.Mount // folders of this machine that containers need
}

func newCapSuite(t *testing.T, opts nvml.Options) *capSuite {
	t.Helper()
	if lack := capsule.Missing(); lack != "" {
		t.Skipf("skipped: %s", lack)
	}
	config := capped.Config{Driver: opts, Libraries: *programs, Dir: t.TempDir(), Least: capBytes >> 20 * 3 / 2}
	if *programs == "" {
		if _, err := exec.LookPath("gcc"); err != nil {
			t.Skipf("skipped: the cap's library needs gcc: %v", err)
		}
		var err error
		if config.Libraries, err = capsule.Library(t.Context(), lib.Root); err != nil {
			t.Fatal(err)
		}
	}
	r := &capSuite{files: t.TempDir()}
	take, err := programOf("caps", r.files)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(take)
	if err == nil {
		err = errors.Join(os.WriteFile(filepath.Join(r.files, "caps"), data, 0o755), os.WriteFile(filepath.Join(r.files, "caps.py"), capsPython, 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Card, err = capped.Open(wait(t), config)
	if errors.Is(err, capped.ErrNoGPU) {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// room is a container on the GPU, with a cap or without one.
type room struct {
	*capped.Room
	capped bool
}

// open makes a container, which goes with the test.
func (r *capSuite) open(t *testing.T, withCap bool) *room {
	t.Helper()
	bytes := uint64(0)
	if withCap {
		bytes = capBytes
	}
	inside, err := r.Room(t.Context(), t.Name(), bytes, append(slices.Clip(r.extra), capped.Mount{From: r.files, To: "/caps"})...)
	if err != nil {
		t.Fatal(err)
	}
	o := &room{inside, withCap}
	t.Cleanup(func() { o.close(t) })
	return o
}

// close ends the container and judges what was seen of it.
func (o *room) close(t *testing.T) {
	t.Helper()
	var undone uint64
	if o.capped {
		c, err := o.Counters()
		if err != nil {
			t.Error(err)
		}
		undone = c.Undone
		t.Logf("the usage page: %d refusals, %d readings asked for, %.1f MiB undone by pools, %d allocations uncounted", c.Refusals, c.Asks, mib(c.Undone), c.Uncounted)
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	seen := o.Seen()
	t.Logf("at most %.1f MiB in %d samples", mib(seen.Peak), seen.Samples)
	if seen.Others {
		t.Log("meanwhile others' processes were on the GPU")
	}
	if !o.capped {
		return
	}
	if seen.Peak > capBytes {
		t.Logf("%.1f MiB more than the cap, of which pools explain %.1f", mib(seen.Peak-capBytes), mib(undone))
	}
	// Code that is loaded when the cap is full is seen by the next reading.
	if seen.Peak > capBytes+undone+late {
		t.Errorf("the processes had %.1f MiB under a cap of %.1f", mib(seen.Peak), mib(capBytes))
	}
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
	p, err := o.Start(capsule.Program{Args: args, Env: slices.Concat(o.Env, env), Stdin: theirIn, Stdout: theirOut, Stderr: errs})
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
	used, err := p.o.Used()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s %v: the driver says %.1f MiB", word, values, mib(used))
	if !p.o.capped {
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
func (r *capSuite) both(t *testing.T, env []string, args ...string) {
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
func (r *capSuite) smi(t *testing.T, o *room) {
	t.Helper()
	out, status, err := o.Run(wait(t), capsule.Program{Args: []string{"/usr/bin/env", "nvidia-smi"}, Env: o.Env})
	total := regexp.MustCompile(fmt.Sprintf(`/ +%dMiB `, capBytes>>20))
	if err != nil || status != 0 || !total.MatchString(out) {
		t.Errorf("nvidia-smi in the container ends with %#x, %v, and does not show the cap:\n%s", uint32(status), err, out)
	}
}

// TestCapsOfTheEmulator is for the test: what it asks of hardware it finds here.
func TestCapsOfTheEmulator(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 1})
	newCapSuite(t, n.opts).both(t, nil, "/caps/caps")
}

// TestCapsOfHardware holds programs to a cap on this machine's GPU. Times are printed and
// held against nothing.
func TestCapsOfHardware(t *testing.T) {
	if !*onHardware || !*onCaps {
		t.Skip("skipped: -hardware and -caps are not given (make test-gpu TEST_GPU_FLAGS=-caps gives both)")
	}
	r := newCapSuite(t, realDriver())
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
func (r *capSuite) findPython(t *testing.T) string {
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
		if m := (capped.Mount{From: dir, To: dir}); device(dir) != device("/") && !slices.Contains(r.extra, m) {
			r.extra = append(r.extra, m)
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
