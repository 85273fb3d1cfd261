// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/mps/mpstest"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/memcap/probe"
)

var (
	long = flag.Bool("long", false, "the full counts: 1,000 kills, 1,000 spoilt pages, ten minutes for each program")
	each = flag.Duration("each", 0, "how long each program runs under its cap, under all behaviours of the driver together; 0 is ten seconds, with -long ten minutes")
	seed = flag.Uint64("seed", 0, "seed of what is random; 0 chooses one and prints it")
)

func TestMain(m *testing.M) {
	mpstest.Main()
	capsule.Main()
	flag.Parse()
	code := m.Run()
	if shareBuilt != "" {
		_ = os.RemoveAll(shareBuilt)
	}
	os.Exit(code)
}

// dice prints the seed and returns what a test throws.
func dice(t *testing.T) *rand.Rand {
	t.Helper()
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	t.Logf("-seed %d", s)
	return rand.New(rand.NewPCG(s, s))
}

// pick is short, or with -long the full count.
func pick(short, full int) int {
	if *long {
		return full
	}
	return short
}

const (
	MiB = 1 << 20
	GiB = 1 << 30
	// context is what a CUDA context takes on the emulated GPUs.
	context300 = 300 * MiB
	// every is how often readers read, much faster than the agent: what is
	// waited for here is waited for a thousand times. The pages promise no more
	// than the agent does, since on a busy machine readers are late.
	every    = 10 * time.Millisecond
	promised = 250 * time.Millisecond
)

// rig is a machine with a cap's library installed and the probe built.
type rig struct {
	t     *testing.T
	m     *capsule.Machine
	state emulator.State
	dir   string // the agent's state directory
	kit   lib.Kit
	pages *lib.Pages
	probe string // the folder of the probe's programs
}

func newRig(t *testing.T, spec emulator.Spec) *rig {
	t.Helper()
	r := bareRig(t, spec)
	var err error
	if r.kit, err = kit(t.Context(), r.dir); err != nil {
		t.Fatal(err)
	}
	if r.pages, err = lib.OpenPages(r.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lib.Unmount(r.dir); err != nil {
			t.Error(err)
		}
	})
	return r
}

// bareRig is a machine with the probe and without a cap.
func bareRig(t *testing.T, spec emulator.Spec) *rig {
	t.Helper()
	if lack := capsule.Missing(); lack != "" {
		t.Skip(lack)
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the libraries with")
	}
	if spec.ContextMiB == 0 {
		spec.ContextMiB = context300 / MiB
	}
	r := &rig{t: t, dir: t.TempDir()}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	r.m, err = capsule.Start(t.Context(), t.TempDir(), spec)
	must(err)
	t.Cleanup(func() {
		if err := r.m.Close(); err != nil {
			t.Error(err)
		}
	})
	r.state = r.m.World.State()
	r.probe, err = probe.Cached(t.Context())
	must(err)
	return r
}

// plain makes a container that has GPUs, by index, and no cap on them. Whoever
// makes it closes it.
func (r *rig) plain(t *testing.T, gpus ...int) *capsule.Container {
	t.Helper()
	edits, image := r.m.Plain(gpus...)
	capsule.Bind(&edits, r.probe, "/probe")
	c, err := r.m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (r *rig) uuid(gpuIndex int) gpu.UUID { return gpu.UUID(r.state.GPUs[gpuIndex].UUID) }

// used is what all processes have on a GPU, in bytes.
func (r *rig) used(index int) uint64 {
	var sum uint64
	for _, p := range r.m.World.State().Processes {
		if p.GPU == index {
			sum += p.Bytes
		}
	}
	return sum
}

func (r *rig) peak(index int) uint64 {
	r.t.Helper()
	peak, err := r.m.World.PeakUsed(index)
	if err != nil {
		r.t.Fatal(err)
	}
	return peak
}

// share is one GPU of a container's.
type share struct {
	gpu     int    // its index on the machine
	bytes   uint64 // lib.None is a whole one
	context uint64 // what the page says of contexts; 0 is what they take
	code    uint64 // what is held back for each; the agent's is lib.DefaultCode
	// instance is the MIG instance that the share is, which programs know by its own UUID.
	instance gpu.UUID
	lends    bool // it has a usage page also without a limit
}

// box is a container that holds an allocation, with a reader for each of its GPUs.
type box struct {
	*capsule.Container
	r       *rig
	key     string
	readers map[int]*capsule.Reader
	stop    context.CancelFunc
	done    []chan error
}

// allocate makes a container with an allocation, and readers for it. change may be nil; it
// sees the edits before they are laid.
func (r *rig) allocate(t *testing.T, key string, shares []share, open bool, change func(*specs.ContainerEdits, *capsule.Image)) *box {
	t.Helper()
	b := r.unread(t, key, shares, open, change)
	ctx, stop := context.WithCancel(t.Context())
	b.stop = stop
	for _, s := range shares {
		reader := &capsule.Reader{Driver: r.m, Container: b.Container, Pages: r.pages, Key: key, GPU: r.uuid(s.gpu), Every: every}
		b.readers[s.gpu] = reader
		done := make(chan error, 1)
		b.done = append(b.done, done)
		go func() { done <- reader.Run(ctx) }()
	}
	return b
}

// unread makes a container with an allocation that nobody reads yet.
func (r *rig) unread(t *testing.T, key string, shares []share, open bool, change func(*specs.ContainerEdits, *capsule.Image)) *box {
	t.Helper()
	var limits []lib.Limit
	var gpus []int
	for _, s := range shares {
		if s.context == 0 {
			s.context = context300
		}
		limits = append(limits, lib.Limit{GPU: r.uuid(s.gpu), Bytes: s.bytes, Context: s.context, Code: s.code, Waits: s.lends})
		if s.instance != "" {
			limits = append(limits, lib.Limit{GPU: s.instance, Bytes: lib.None})
		}
		gpus = append(gpus, s.gpu)
	}
	files, err := r.pages.Write(key, promised, limits)
	if err != nil {
		t.Fatal(err)
	}
	edits, image := r.m.Plain(gpus...)
	edits = capsule.Allocation{Kit: r.kit, Key: key, Pages: files, Open: open}.Apply(edits)
	capsule.Bind(&edits, r.probe, "/probe")
	if change != nil {
		change(&edits, &image)
	}
	c, err := r.m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	b := &box{Container: c, r: r, key: key, readers: map[int]*capsule.Reader{}}
	b.stop = func() {}
	t.Cleanup(func() { b.close(t) })
	return b
}

// undone is what a pool of the container had beyond its count for the moment of an
// undo, at most, as the usage page tells.
func (b *box) undone(index int) uint64 {
	b.r.t.Helper()
	u, err := b.r.pages.OpenUsage(b.key, b.r.uuid(index))
	if err != nil {
		b.r.t.Fatal(err)
	}
	defer u.Close()
	c, err := u.Read()
	if err != nil {
		b.r.t.Fatal(err)
	}
	return c.Undone
}

// last is the latest reading of a GPU.
func (b *box) last(index int) lib.Reading {
	last, _ := b.readers[index].Last()
	return last
}

// read waits until a whole reading of a GPU has begun and ended.
func (b *box) read(t *testing.T, index int) {
	t.Helper()
	_, before := b.readers[index].Last()
	await(t, "the reader", func() bool { _, n := b.readers[index].Last(); return n >= before+2 },
		func() any { return b.readers[index].Err() })
}

// close ends the container; it may be closed again.
func (b *box) close(t *testing.T) {
	t.Helper()
	if b.stop == nil {
		return
	}
	b.stop()
	b.stop = nil
	for _, done := range b.done {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := b.r.pages.Remove(b.key); err != nil {
		t.Error(err)
	}
}

// patience bounds waiting for what cannot take long unless it hangs.
const patience = 2 * time.Minute

// tool is a probe that runs.
type tool struct {
	t     *testing.T
	p     *capsule.Process
	in    *os.File
	out   *os.File
	lines *bufio.Reader
	said  []string
}

// tool starts a probe program in a container; env is its whole environment.
func (b *box) tool(t *testing.T, program string, env []string, args ...string) *tool {
	t.Helper()
	k, err := startTool(t, b.Container, program, env, args...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func startTool(t *testing.T, c *capsule.Container, program string, env []string, args ...string) (*tool, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirOut.Close()
	p, err := c.Start(capsule.Program{Args: append([]string{"/probe/" + program}, args...), Env: env, Stdin: theirIn, Stdout: theirOut})
	if err != nil {
		return nil, err
	}
	k := &tool{t: t, p: p, in: in, out: out, lines: bufio.NewReader(out)}
	t.Cleanup(k.shut)
	return k, nil
}

func (k *tool) shut() {
	k.in.Close()
	k.out.Close()
}

// fields are the words of an answer, key=value; its first word is at "".
type fields map[string]string

func (f fields) n(key string) uint64 {
	v, err := strconv.ParseUint(f[key], 10, 64)
	if err != nil {
		return ^uint64(0)
	}
	return v
}

// line reads one line.
func (k *tool) line() (fields, error) {
	if err := k.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	text, err := k.lines.ReadString('\n')
	if err != nil {
		if err == io.EOF {
			said, status, werr := k.wait()
			return nil, fmt.Errorf("the probe has ended: status %#x, %q, %w", uint32(status), said, werr)
		}
		return nil, fmt.Errorf("the probe says nothing (after %q): %w", k.said, err)
	}
	k.said = append(k.said, strings.TrimSpace(text))
	f := fields{}
	for i, w := range strings.Fields(text) {
		key, value, ok := strings.Cut(w, "=")
		if i == 0 {
			f[""] = w
		} else if ok {
			f[key] = value
		}
	}
	return f, nil
}

// tryAsk gives a command and reads the answer, which begins with verb.
func (k *tool) tryAsk(verb, format string, args ...any) (fields, error) {
	k.said = nil
	command := fmt.Sprintf(format, args...)
	if command != "" {
		if _, err := fmt.Fprintln(k.in, command); err != nil {
			return nil, fmt.Errorf("tell the probe to %s: %w", command, err)
		}
	}
	f, err := k.line()
	if err == nil && f[""] != verb {
		err = fmt.Errorf("the probe says %q", k.said)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	return f, nil
}

func (k *tool) ask(verb, format string, args ...any) fields {
	k.t.Helper()
	f, err := k.tryAsk(verb, format, args...)
	if err != nil {
		k.t.Fatal(err)
	}
	return f
}

// list gives a command and reads lines up to one that says end.
func (k *tool) list(command string) []fields {
	k.t.Helper()
	if _, err := fmt.Fprintln(k.in, command); err != nil {
		k.t.Fatal(err)
	}
	var all []fields
	for {
		f, err := k.line()
		if err != nil {
			k.t.Fatalf("%s: %v", command, err)
		}
		if f[""] == "end" {
			return all
		}
		all = append(all, f)
	}
}

// wait waits for the end of the probe.
func (k *tool) wait() (string, syscall.WaitStatus, error) {
	ctx, cancel := context.WithTimeout(k.t.Context(), patience)
	defer cancel()
	return k.p.Wait(ctx)
}

// quit ends the probe's input and waits for it.
func (k *tool) quit() {
	k.t.Helper()
	k.in.Close()
	if said, status, err := k.wait(); err != nil || status != 0 || said != "" {
		k.t.Errorf("the probe ended with %#x, %q, %v", uint32(status), said, err)
	}
}

// kit installs the cap's library as it is built from this checkout.
func kit(ctx context.Context, dir string) (lib.Kit, error) {
	built, err := capsule.Library(ctx, lib.Root)
	if err != nil {
		return lib.Kit{}, err
	}
	k := lib.Kit{
		CUDA: filepath.Join(built, "libcuda.so.1"), NVML: filepath.Join(built, "libnvidia-ml.so.1"),
		Hide: "/hide", Mark: filepath.Join(dir, "mark"), // package capsule hides by itself
	}
	return k, os.WriteFile(k.Mark, nil, 0o644)
}

func itoa(n int) string { return strconv.Itoa(n) }

func atoi(s string) uint64 {
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return v
}
