// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/emulator/mps"
)

const usage = `gpu-emulator: an emulated NVIDIA driver

  build [--out DIR] [--header nvml.h]     compile the driver's libraries (quick when nothing changed), into the
                                          project's cache without --out; prints the folder
  install --root DIR [--prefix /] --libraries DIR [--world FILE] [--dev PATH] [--proc]
                                          lay the driver down under root+prefix, its device nodes under root+dev;
                                          --proc mounts its /proc and /sys files (own mount namespace only)
  serve --socket PATH [--world FILE]      serve a world until SIGTERM
  node --libraries DIR [--root /run/nvidia/driver] [--machine 8xH100-80GB | --world FILE] [--seed WORD]
                                          a node's driver as a driver container brings one: lay it down, serve its
                                          world, and take all of it away at SIGTERM; refused where a real driver is.
                                          GPU_EMULATOR_MACHINE and GPU_EMULATOR_SEED stand for the flags of that name
  models                                  list the GPU models that a world may name
  topologies                              list the machines that a world may name

on a running world (all take --socket PATH):
  show                                    the whole world, as JSON
  calls [--pid N] [--reset] [--total] [--json]
  proc start --gpu I --memory MiB [--kind compute|graphics|mps] [-- CMD...]
                                          a process that holds GPU memory until it ends; prints its PID
  proc hold ...                           the same in the foreground
  proc stop PID
  xid --gpu I [--bare] CODE               raise an Xid; it also counts the ECC error, remaps the row or loses the GPU
                                          that such a fault comes with (48, 63, 64, 79, 94, 95), but for --bare; with
                                          the UUID of a MIG device the Xid alone, on its instances
  health --gpu I JSON                     set figures of a GPU's health, as show prints them: '{"remapFailed": false}'
  setup --gpu I JSON                      change what an earlier owner would have set, as show prints it: '{"compute": "exclusive-process"}'
  fault --pid PID [--xid 31]              a fatal fault of a process with a context; under MPS also of its server's clients
  busy --pid PID --gpu I PERCENT          the process keeps the GPU busy from now on; killed then, it takes MPS's other
                                          clients with it
  peak [--reset] I                        the most bytes that processes had on the GPU together, since the last reset
  lose --gpu I | restore --gpu I          off the bus with Xid 79 | back again
  link --gpu I [--link N] down|up         an NVLink of the GPU, at both of its ends, or all of them; no Xid comes with it
  reset --gpu I                           as nvidia-smi --gpu-reset: volatile counters and what is pending; refused
                                          while processes use the GPU
  mig --gpu I on|off                      MIG mode, at once and whatever the card needs for it otherwise
  mig-create --gpu I --profile P --start N [--empty]
                                          an instance at a memory slice, a split (1c.3g.40gb) too; --empty is a GPU
                                          instance without a compute instance
  mig-destroy --gpu I --start N           the GPU instance at a memory slice, with all in it; refused while processes use it
  reboot [--force]                        no instance stands, MIG modes are what the cards keep; refused while any
                                          process uses the driver
  unplug --gpu I | plug --gpu I           out of the machine, with its device node and its entries in /proc and
                                          /sys | back; running programs see either by a new nvmlInit
  unload                                  the driver, with its device nodes and /proc/driver/nvidia; refused, with their
                                          PIDs, while processes have it initialised or memory on a GPU
  load [--driver VERSION]                 again, or another version: its libraries take the place of the old ones
  fail --call NAME --code N [--count N] [--skip N] [--every N] [--late] [--gpu I]
                                          so many calls after so many that pass, or the last of every N; --late: after
                                          they have done their work
  slow --call NAME --for 2s|forever [--count N] [--skip N] [--every N] [--gpu I]
                                          so many calls, after so many, of so many each one
  clear                                   end all faults

A GPU is an index, a UUID, or own: the one whose device node this container has.
For proc it may also be the UUID of a MIG device, and own is the MIG device of the
container, where it has one.
`

func main() {
	mps.Main()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
	case err != nil:
		fmt.Fprintln(os.Stderr, "gpu-emulator:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return flag.ErrHelp
	}
	name, args := args[0], args[1:]
	switch name {
	case "build":
		return build(ctx, args, out)
	case "install":
		return lay(args)
	case "serve":
		return serve(ctx, args, out)
	case "node":
		return onNode(ctx, args, out)
	case "models":
		fmt.Fprintln(out, strings.Join(emulator.Models(), "\n"))
		return nil
	case "topologies":
		fmt.Fprintln(out, strings.Join(emulator.Topologies(), "\n"))
		return nil
	case "proc":
		return proc(ctx, args, out)
	case "show", "calls", "peak", "fault", "busy", "xid", "health", "setup", "lose", "restore", "link", "reset", "mig", "mig-create", "mig-destroy", "reboot",
		"unplug", "plug", "unload", "load", "fail", "slow", "clear":
		return control(name, args, out)
	case "help", "-h", "--help":
		return flag.ErrHelp
	}
	return fmt.Errorf("no such command: %q; see gpu-emulator help", name)
}

// parse reads flags, which may stand before and after the other arguments.
func parse(f *flag.FlagSet, args []string) ([]string, error) {
	f.SetOutput(io.Discard)
	var rest []string
	for {
		if err := f.Parse(args); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		if f.NArg() == 0 {
			return rest, nil
		}
		rest = append(rest, f.Arg(0))
		args = f.Args()[1:]
	}
}

func none(f *flag.FlagSet, args []string) error {
	rest, err := parse(f, args)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%s: what is %q?", f.Name(), rest[0])
	}
	return err
}

func build(ctx context.Context, args []string, out io.Writer) error {
	f := flag.NewFlagSet("build", flag.ContinueOnError)
	dir := f.String("out", "", "folder to build into; default: one in the project's cache")
	header := f.String("header", "", "nvml.h; default: that of the go-nvml module of the module here")
	if err := none(f, args); err != nil {
		return err
	}
	var err error
	if *header == "" {
		if *header, err = lib.Header(ctx); err != nil {
			return err
		}
	}
	if *dir == "" {
		*dir, err = lib.CachedWith(ctx, *header)
	} else {
		err = lib.Build(ctx, *dir, *header)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, *dir)
	return err
}

func lay(args []string) error {
	f := flag.NewFlagSet("install", flag.ContinueOnError)
	root := f.String("root", "", "root of the machine to install on")
	prefix := f.String("prefix", "/", "the driver's root on it")
	dev := f.String("dev", "", "folder of the device nodes on it; default: dev below the prefix")
	built := f.String("libraries", "", "folder that build filled")
	world := f.String("world", "", "the world's YAML file; default: 8 H100-80GB")
	kernel := f.Bool("proc", false, "mount the driver's files over /proc and /sys of this mount namespace")
	if err := none(f, args); err != nil {
		return err
	}
	if *root == "" || *built == "" {
		return errors.New("install: --root and --libraries are needed")
	}
	w, err := load(*world)
	if err != nil {
		return err
	}
	if *dev == "" {
		*dev = filepath.Join(*prefix, "dev")
	}
	driver := filepath.Join(*root, *prefix)
	if filepath.Clean(driver) == "/" || filepath.Clean(filepath.Join(*root, *dev)) == "/dev" {
		if err := install.Guard(); err != nil {
			return fmt.Errorf("install at %s: %w", driver, err)
		}
	}
	if err := install.Driver(driver, *built, w); err != nil {
		return err
	}
	if err := mps.Lay(filepath.Join(driver, install.Programs), w.DriverVersion()); err != nil {
		return err
	}
	if err := install.Nodes(filepath.Join(*root, *dev), w); err != nil {
		return err
	}
	m := install.Machine{}
	if m.Driver, err = filepath.Abs(driver); err != nil {
		return err
	}
	if m.Dev, err = filepath.Abs(filepath.Join(*root, *dev)); err != nil {
		return err
	}
	switch {
	case *kernel:
		m.Kernel = "/"
		err = install.Mount(w)
	case filepath.Clean(*root) != "/":
		if m.Kernel, err = filepath.Abs(*root); err != nil {
			return err
		}
		var devices []byte
		if devices, err = os.ReadFile("/proc/devices"); err != nil {
			return fmt.Errorf("read device numbers: %w", err)
		}
		err = install.Kernel(*root, string(devices), w)
	}
	if err != nil {
		return err
	}
	return m.Save()
}

func load(file string) (*emulator.World, error) {
	var spec emulator.Spec
	if file != "" {
		var err error
		if spec, err = emulator.LoadSpec(file); err != nil {
			return nil, err
		}
	}
	w, err := emulator.New(spec)
	if err != nil {
		return nil, fmt.Errorf("world %s: %w", file, err)
	}
	return w, nil
}

func serve(ctx context.Context, args []string, out io.Writer) error {
	f := flag.NewFlagSet("serve", flag.ContinueOnError)
	world := f.String("world", "", "the world's YAML file; default: 8 H100-80GB")
	socket := f.String("socket", "", "where to listen")
	if err := none(f, args); err != nil {
		return err
	}
	if *socket == "" {
		return errors.New("serve: --socket is missing")
	}
	w, err := load(*world)
	if err != nil {
		return err
	}
	return answer(ctx, w, *socket, out)
}

// answer serves a world on a socket.
func answer(ctx context.Context, w *emulator.World, socket string, out io.Writer) error {
	l, err := daemon.Listen(socket)
	if err != nil {
		return err
	}
	defer os.Remove(socket)
	// What an earlier daemon did to the files is not so in this world.
	driver := install.Root(socket)
	if err := install.Follow(driver, w); err != nil {
		l.Close()
		return err
	}
	// Whoever started this may wait for the line.
	fmt.Fprintf(out, "serving %d GPUs on %s\n", len(w.State().GPUs), socket)
	s := &daemon.Server{World: w, Driver: driver, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	return s.Serve(ctx, l)
}

// onNode is a node's driver from its beginning to its end.
func onNode(ctx context.Context, args []string, out io.Writer) (err error) {
	f := flag.NewFlagSet("node", flag.ContinueOnError)
	root := f.String("root", "/run/nvidia/driver", "the driver's root, a directory that is not there or empty")
	built := f.String("libraries", "", "folder that build filled")
	machine := f.String("machine", os.Getenv("GPU_EMULATOR_MACHINE"), "GPUs and their model, or a machine; default: 8xH100-80GB")
	world := f.String("world", "", "the world's YAML file, in place of --machine")
	seed := f.String("seed", os.Getenv("GPU_EMULATOR_SEED"), "decides the UUIDs: each node wants its own")
	if err := none(f, args); err != nil {
		return err
	}
	if *built == "" {
		return errors.New("node: --libraries is missing")
	}
	var spec emulator.Spec
	switch {
	case *world != "":
		spec, err = emulator.LoadSpec(*world)
	case *machine != "":
		spec, err = emulator.Machine(*machine)
	}
	if err != nil {
		return err
	}
	spec.Seed = cmp.Or(spec.Seed, *seed)
	w, err := emulator.New(spec)
	if err != nil {
		return fmt.Errorf("world: %w", err)
	}
	if *root, err = filepath.Abs(*root); err != nil {
		return err
	}
	if err := install.NoReal("/"); err != nil {
		return err
	}
	socket := filepath.Join(*root, install.Socket)
	if c, err := daemon.Dial(socket); err == nil {
		c.Close()
		return fmt.Errorf("node: an emulated driver at %s is running; end that first", *root)
	}
	if err := install.LayRoot(*root, *built, w); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, install.RemoveRoot(*root)) }()
	if err := mps.Lay(filepath.Join(*root, install.Programs), w.DriverVersion()); err != nil {
		return err
	}
	return answer(ctx, w, socket, out)
}

// socketFlag adds --socket to a command that acts on a running world.
func socketFlag(f *flag.FlagSet) *string {
	where := os.Getenv("GPU_EMULATOR_SOCKET")
	if where == "" {
		where = "/" + install.Socket
	}
	return f.String("socket", where, "the daemon's socket")
}

// gpuIndex reads how an operator names a GPU.
func gpuIndex(c *daemon.Client, id string) (int, error) {
	if i, err := strconv.Atoi(id); err == nil {
		return i, nil
	}
	st, err := c.State()
	if err != nil {
		return 0, err
	}
	var own []int
	for _, g := range st.GPUs {
		if g.UUID == id {
			return g.Index, nil
		}
		if _, err := os.Stat(fmt.Sprintf("/dev/nvidia%d", g.Minor)); err == nil {
			own = append(own, g.Index)
		}
	}
	if id == "own" && len(own) == 1 {
		return own[0], nil
	}
	if id == "own" {
		return 0, fmt.Errorf("GPU own: this container has the nodes of %d GPUs", len(own))
	}
	return 0, fmt.Errorf("GPU %q: want an index, a UUID of this world, or own", id)
}

func control(name string, args []string, out io.Writer) error {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	socket := socketFlag(f)
	var gpu, call, hold, driver, profile string
	var code, count, skip, every, pid, start, lane int
	var reset, total, asJSON, bare, empty, force, late bool
	switch name {
	case "mig-create", "mig-destroy":
		f.StringVar(&gpu, "gpu", "", "GPU")
		f.IntVar(&start, "start", -1, "first memory slice")
		if name == "mig-create" {
			f.StringVar(&profile, "profile", "", "profile")
			f.BoolVar(&empty, "empty", false, "without a compute instance")
		}
	case "reboot":
		f.BoolVar(&force, "force", false, "also if processes use the driver, which end")
	case "xid", "health", "setup", "lose", "restore", "link", "reset", "mig", "unplug", "plug":
		f.StringVar(&gpu, "gpu", "", "GPU")
		if name == "link" {
			f.IntVar(&lane, "link", -1, "number of the link; default: all")
		}
		if name == "xid" {
			f.BoolVar(&bare, "bare", false, "the Xid alone, without what the fault does")
		}
	case "fault":
		f.IntVar(&pid, "pid", 0, "the process, by the daemon's PID for it")
		f.IntVar(&code, "xid", 31, "what its GPU raises")
	case "busy":
		f.IntVar(&pid, "pid", 0, "the process, by the daemon's PID for it")
		f.StringVar(&gpu, "gpu", "", "GPU")
	case "peak":
		f.BoolVar(&reset, "reset", false, "begin anew after printing")
	case "load":
		f.StringVar(&driver, "driver", "", "version; default: the one there was")
	case "fail", "slow":
		f.StringVar(&gpu, "gpu", "", "only calls about this GPU")
		f.StringVar(&call, "call", "", "exported name, or a pattern such as nvmlDevice*")
		f.IntVar(&count, "count", 0, "so many calls; 0 is until cleared")
		f.IntVar(&skip, "skip", 0, "so many calls pass before")
		f.IntVar(&every, "every", 0, "one of so many calls, the last of them")
		if name == "fail" {
			f.IntVar(&code, "code", 0, "what the call answers, a nvmlReturn_t")
			f.BoolVar(&late, "late", false, "the call does its work first")
		} else {
			f.StringVar(&hold, "for", "", "a duration, or forever")
		}
	case "calls":
		f.IntVar(&pid, "pid", 0, "only the calls of this process, by the daemon's PID for it")
		f.BoolVar(&reset, "reset", false, "count anew after printing")
		f.BoolVar(&total, "total", false, "print only the sum")
		f.BoolVar(&asJSON, "json", false, "print as JSON")
	}
	rest, err := parse(f, args)
	if err != nil {
		return err
	}
	if want := map[string]int{"busy": 1, "xid": 1, "health": 1, "setup": 1, "peak": 1, "mig": 1, "link": 1}[name]; len(rest) != want {
		return fmt.Errorf("%s: %d arguments, want %d", name, len(rest), want)
	}
	c, err := daemon.Dial(*socket)
	if err != nil {
		return err
	}
	defer c.Close()
	var index *int
	on := emulator.Process{GI: -1, CI: -1}
	if name == "xid" && strings.HasPrefix(gpu, "MIG-") {
		if err := place(c, gpu, &on); err != nil {
			return err
		}
		index = &on.GPU
	} else if gpu != "" {
		i, err := gpuIndex(c, gpu)
		if err != nil {
			return err
		}
		index = &i
	} else if slices.Contains([]string{"busy", "xid", "health", "setup", "lose", "restore", "link", "reset", "mig", "mig-create", "mig-destroy", "unplug", "plug"}, name) {
		return fmt.Errorf("%s: --gpu is missing", name)
	}
	switch name {
	case "show":
		st, err := c.State()
		if err != nil {
			return err
		}
		if st.MIGOps, err = c.MIGOps(0); err != nil {
			return err
		}
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(st)
	case "fault":
		return c.Fail(pid, uint64(code))
	case "busy":
		percent, err := strconv.Atoi(rest[0])
		if err != nil {
			return fmt.Errorf("busy: %q is no percentage", rest[0])
		}
		return c.KeepBusy(pid, *index, percent)
	case "calls":
		list, err := c.Calls(pid)
		if err != nil {
			return err
		}
		if err := printCalls(out, list, total, asJSON); err != nil || !reset {
			return err
		}
		return c.ResetCalls()
	case "peak":
		i, err := gpuIndex(c, rest[0])
		if err != nil {
			return err
		}
		bytes, err := c.PeakUsed(i, reset)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, bytes)
		return err
	case "xid":
		xid, err := strconv.ParseUint(rest[0], 10, 64)
		if err != nil {
			return fmt.Errorf("xid: %w", err)
		}
		if on.GI >= 0 {
			return c.XidOn(on.GPU, on.GI, on.CI, xid)
		}
		if bare {
			return c.XidBare(*index, xid)
		}
		return c.Xid(*index, xid)
	case "health":
		return change(c, name, *index, rest[0], func(g *emulator.GPUState) *emulator.Health { return &g.Health }, c.SetHealth)
	case "setup":
		return change(c, name, *index, rest[0], func(g *emulator.GPUState) *emulator.Setup { return &g.Setup }, c.SetSetup)
	case "lose":
		return c.Lose(*index)
	case "restore":
		return c.Restore(*index)
	case "link":
		if rest[0] != "down" && rest[0] != "up" {
			return fmt.Errorf("link: %q: down or up?", rest[0])
		}
		return c.SetLink(*index, lane, rest[0] == "up")
	case "reset":
		return c.Reset(*index)
	case "mig":
		if rest[0] != "on" && rest[0] != "off" {
			return fmt.Errorf("mig: %q: on or off?", rest[0])
		}
		return c.SetMIG(*index, rest[0] == "on")
	case "mig-create":
		return c.CreateInstance(*index, profile, start, empty)
	case "mig-destroy":
		return c.DestroyInstance(*index, start)
	case "reboot":
		return c.Reboot(force)
	case "unplug":
		return c.Unplug(*index)
	case "plug":
		return c.Plug(*index)
	case "unload":
		return c.Unload()
	case "load":
		return c.Load(driver)
	case "clear":
		return c.Clear()
	}
	fault := emulator.Fault{Call: call, GPU: index, Code: emulator.Return(code), Late: late, Count: count, Skip: skip, Every: every}
	if name == "slow" {
		if fault.Hang = hold == "forever"; !fault.Hang {
			if fault.Delay, err = time.ParseDuration(hold); err != nil {
				return fmt.Errorf("slow: --for: %w", err)
			}
		}
	}
	return c.Inject(fault)
}

// change changes the figures of a GPU that text names, and no other.
func change[T any](c *daemon.Client, name string, index int, text string, of func(*emulator.GPUState) *T, set func(int, T) error) error {
	st, err := c.State()
	if err != nil {
		return err
	}
	if index < 0 || index >= len(st.GPUs) {
		return fmt.Errorf("%s: no GPU %d", name, index)
	}
	figures := of(&st.GPUs[index])
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(figures); err != nil {
		return fmt.Errorf("%s: %q: %w", name, text, err)
	}
	return set(index, *figures)
}

func printCalls(out io.Writer, list []emulator.CallCount, total, asJSON bool) error {
	if total {
		var sum uint64
		for _, c := range list {
			sum += c.Count
		}
		_, err := fmt.Fprintln(out, sum)
		return err
	}
	if asJSON {
		if list == nil {
			list = []emulator.CallCount{}
		}
		return json.NewEncoder(out).Encode(list)
	}
	tw := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	for _, c := range list {
		fmt.Fprintf(tw, "%d\t %s\n", c.Count, c.Call)
	}
	return tw.Flush()
}

func proc(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("proc: start, hold or stop?")
	}
	switch args[0] {
	case "start":
		return procStart(args[1:], out)
	case "hold":
		return procHold(ctx, args[1:])
	case "stop":
		return procStop(ctx, args[1:])
	}
	return fmt.Errorf("proc %s: want start, hold or stop", args[0])
}

// heldFD is where a process says to the one that started it that it holds its
// memory and is what it is to be: it closes the descriptor without a word.
const heldFD = 3

// procStart runs proc hold in the background, in a session of its own.
func procStart(args []string, out io.Writer) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe, append([]string{"proc", "hold", "--started"}, args...)...)
	// Nothing that waits for our output should wait for a process that stays.
	if null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0); err == nil {
		defer null.Close()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = null, null, null
	}
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("proc start: %w", err)
	}
	w.Close()
	said, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("proc start: %w", err)
	}
	if len(said) > 0 {
		cmd.Wait()
		return fmt.Errorf("proc start: %s", said)
	}
	fmt.Fprintln(out, cmd.Process.Pid)
	return cmd.Process.Release()
}

func procHold(ctx context.Context, args []string) error {
	var command []string
	for i, a := range args {
		if a == "--" {
			args, command = args[:i], args[i+1:]
			break
		}
	}
	f := flag.NewFlagSet("proc hold", flag.ContinueOnError)
	socket := socketFlag(f)
	gpu := f.String("gpu", "", "GPU or MIG device")
	mib := f.Uint64("memory", 0, "MiB")
	kind := f.String("kind", string(emulator.Compute), "compute, graphics or mps")
	mps := f.Bool("mps", false, "the same as --kind mps")
	unknown := f.Bool("unknown", false, "the driver cannot tell the process's memory")
	started := f.Bool("started", false, "report to the process that started this one")
	err := none(f, args)
	var report *os.File
	if *started { // the first flag: read whatever comes after it
		report = os.NewFile(heldFD, "report")
		unix.CloseOnExec(heldFD) // a command that runs is report enough
	}
	if err == nil {
		if *mps {
			*kind = string(emulator.MPS)
		}
		err = hold(*socket, *gpu, emulator.Process{Kind: emulator.Kind(*kind), MiB: *mib, Unknown: *unknown})
	}
	if err == nil && len(command) > 0 {
		err = become(command) // the memory is the process's: it stays
	}
	if report != nil {
		if err != nil {
			fmt.Fprint(report, err)
		}
		report.Close()
	}
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// become replaces this program by a command; it returns only if it cannot.
func become(command []string) error {
	exe, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	return unix.Exec(exe, command, os.Environ())
}

func hold(socket, gpu string, p emulator.Process) error {
	c, err := daemon.Dial(socket)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := place(c, gpu, &p); err != nil {
		return err
	}
	return c.Hold(p)
}

// place reads where an operator wants a process: on a GPU, or a MIG device.
func place(c *daemon.Client, id string, p *emulator.Process) error {
	p.GI, p.CI = -1, -1
	st, err := c.State()
	if err != nil {
		return err
	}
	there := func(minor int) bool {
		_, err := os.Stat(filepath.Join("/dev", install.CapabilityNode(minor)))
		return err == nil
	}
	everything := there(install.CapabilityConfig)
	for _, g := range st.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, gi := range g.MIG.Instances {
			for _, ci := range gi.Compute {
				if ci.UUID == id || id == "own" && !everything && there(gi.Minor) && there(ci.Minor) {
					p.GPU, p.GI, p.CI = g.Index, gi.ID, ci.ID
					return nil
				}
			}
		}
	}
	p.GPU, err = gpuIndex(c, id)
	return err
}

// procStop ends a process that holds memory, and no other, and waits until it
// is dead and its memory free.
func procStop(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("proc stop", flag.ContinueOnError)
	socket := socketFlag(f)
	rest, err := parse(f, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return errors.New("proc stop: want one PID")
	}
	pid, err := strconv.Atoi(rest[0])
	if err != nil {
		return fmt.Errorf("proc stop: %w", err)
	}
	c, err := daemon.Dial(*socket)
	if err != nil {
		return err
	}
	defer c.Close()
	if ok, err := c.Holds(pid); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("proc stop: process %d holds no GPU memory", pid))
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("proc stop %d: %w", pid, err)
	}
	for {
		if ok, err := c.Holds(pid); err != nil || !ok {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}
