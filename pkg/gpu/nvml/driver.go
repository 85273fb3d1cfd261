// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
)

const (
	// closeWait bounds how long Close waits for calls that hang.
	closeWait = 5 * time.Second
	// mostShutdowns bounds how often Close shuts the driver down. A driver that never answers
	// "uninitialized" would keep it there.
	mostShutdowns = 16
)

// Options say where the driver is. The zero value is a driver installed on this machine, seen
// directly.
type Options struct {
	// Library is the driver's management library. If it is empty, Open looks for
	// libnvidia-ml.so.1 below DriverRoot, where distributions put it. If that fails and
	// DriverRoot is "/", the dynamic linker looks for it.
	Library string
	// DriverRoot is the directory that the driver is installed in, as the agent sees it: the
	// libraries are below it, at usr/lib64 and the like. Empty is "/".
	DriverRoot string
	// HostDriverRoot is the same directory as the host sees it. CDI files need the host's paths.
	// Empty is DriverRoot.
	HostDriverRoot string
	// DevRoot is the directory below which the agent sees the host's device nodes, at dev/. Empty
	// is DriverRoot if that has dev/nvidiactl, and "/" otherwise.
	DevRoot string
	// SysRoot is the host's sysfs. Empty is "/sys".
	SysRoot string
	// ProcRoot is the host's procfs, where the driver lists its GPUs at
	// driver/nvidia/gpus. Empty is "/proc".
	ProcRoot string
	// Hook is the host's path of NVIDIA's program nvidia-cdi-hook, which containers need at their
	// start (InstallHook). Parts fails if it is empty.
	Hook string
	// Rearm is how often Events tries again to watch GPUs that it could not watch, and how often
	// it initialises a driver anew that has lost a GPU. Zero is a minute.
	Rearm time.Duration
	// Look is how often Events reads the kernel's list of GPUs for changes (some 20 µs each
	// time). If the kernel reports changes of device nodes, Events learns of those at once. Zero
	// is 15 s.
	Look time.Duration
	// EventWait is how long one wait for events inside the driver takes if nothing happens. Zero
	// is 5 s. Events and Close may need as long to end, Reset to begin, and a GPU that was added
	// to be taken up. For a minute after SetMIGMode or Reset, waits are short.
	//
	// Each wait costs about 0.2 ms of processor time. Most of that is the Go runtime's, for a
	// thread that comes back from a call. It is the greater part of what an idle agent costs.
	EventWait time.Duration
	// Logger gets the messages of NVIDIA's libraries (level debug), and warnings of GPUs that
	// cannot be watched. Nil logs nothing.
	Logger *slog.Logger
}

// Seen returns the path at which this process sees a file of the driver. host is the host's path
// of it.
func (o Options) Seen(host string) string {
	return rebase(host, o.HostDriverRoot, o.DriverRoot)
}

// withDefaults fills in empty fields and cleans the paths. It fails if a path is not absolute.
func (o Options) withDefaults() (Options, error) {
	o.DriverRoot = cmp.Or(o.DriverRoot, "/")
	o.HostDriverRoot = cmp.Or(o.HostDriverRoot, o.DriverRoot)
	o.SysRoot = cmp.Or(o.SysRoot, "/sys")
	o.ProcRoot = cmp.Or(o.ProcRoot, "/proc")
	o.Look = cmp.Or(max(o.Look, 0), 15*time.Second)
	o.Rearm = cmp.Or(max(o.Rearm, 0), time.Minute)
	o.EventWait = cmp.Or(max(o.EventWait, 0), 5*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.DevRoot == "" {
		o.DevRoot = "/"
		if _, err := os.Lstat(filepath.Join(o.DriverRoot, "dev/nvidiactl")); err == nil {
			o.DevRoot = o.DriverRoot
		}
	}
	for name, path := range map[string]*string{
		"driver root": &o.DriverRoot, "host's driver root": &o.HostDriverRoot,
		"root of device nodes": &o.DevRoot, "root of sysfs": &o.SysRoot, "root of procfs": &o.ProcRoot,
	} {
		if !filepath.IsAbs(*path) {
			return o, fmt.Errorf("the %s %q must be an absolute path: %w", name, *path, gpu.ErrInvalid)
		}
		*path = filepath.Clean(*path)
	}
	// NVIDIA's generator resolves links before it compares prefixes.
	for _, path := range []*string{&o.DriverRoot, &o.DevRoot} {
		if real, err := filepath.EvalSymlinks(*path); err == nil {
			*path = real
		}
	}
	return o, nil
}

// session is the driver's library as this process has it open. All components of a Driver make
// their calls through it.
type session struct {
	opts    Options
	library string  // the file that is loaded
	loaded  content // its content when it was loaded
	lib     nvml.Interface
	log     *slog.Logger
	ration  *brief.Ration // limits the log lines that a program on a GPU can cause without end
	locks   *locks

	// stale is true while a GPU is lost, or is in the machine but not in the driver's list. Only
	// a new initialisation can bring it back.
	stale atomic.Bool
	// renewals is how often the driver was initialised anew.
	renewals atomic.Uint64

	stopped context.Context // ends at Close
	stop    context.CancelFunc
}

// inFlight describes the calls that keep the library from being shut down or initialised anew.
func (l *locks) inFlight() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var calls []string
	for _, own := range l.gpus {
		if call := own.UnderWay(); call != "" {
			calls = append(calls, call)
		}
	}
	if len(calls) == 0 {
		return "the check for lost GPUs, or a run of nvidia-smi, has not returned"
	}
	slices.Sort(calls)
	return strings.Join(calls, "; ")
}

// process is the driver's library as this process has it, for one Driver after the other. The
// dynamic linker binds each symbol of the driver once, to the first library opened, and never
// unloads that library. go-nvml also keeps the versions of functions that it found in global
// variables.
var process struct {
	sync.Mutex
	// Guarded by the mutex:
	library string  // the library that symbols are bound to
	loaded  content // its content when it was loaded
	*locks          // the same for all Drivers
	driver  *Driver // the one that is open, or was last
	open    bool
}

// locks are the locks for this process's calls of the driver's library. A call that hangs since
// an earlier Driver still holds its lock, so it blocks the next Driver too.
//
// Lock order: the lock of a GPU, handles, waiting, eventSets, calls.
type locks struct {
	calls     *ctxlock.Mutex // for calls that need no other lock
	eventSets *ctxlock.Mutex // for calls on event sets
	// handles is held together by those who use the library's handles without the locks above.
	// Initialising the library and shutting it down make the handles invalid, and take it alone.
	handles *ctxlock.RWMutex
	// waiting is held together while Events waits for events. Work that cannot run meanwhile takes
	// it alone.
	waiting *ctxlock.RWMutex

	mu sync.Mutex
	// Guarded by mu:
	gpus map[gpu.UUID]*ctxlock.Mutex // by GPU, for work on its MIG side
}

func newLocks() *locks {
	return &locks{
		calls: ctxlock.NewMutex(), eventSets: ctxlock.NewMutex(),
		handles: ctxlock.NewRWMutex(), waiting: ctxlock.NewRWMutex(),
		gpus: map[gpu.UUID]*ctxlock.Mutex{},
	}
}

// ofGPU returns the lock for work on one GPU's MIG side.
func (l *locks) ofGPU(u gpu.UUID) *ctxlock.Mutex {
	l.mu.Lock()
	defer l.mu.Unlock()
	own, ok := l.gpus[u]
	if !ok {
		own = ctxlock.NewPatientMutex()
		l.gpus[u] = own
	}
	return own
}

// Open loads the driver's library and initialises it. The error wraps
//
//   - gpu.ErrNoDriver if there is no library, or no driver is loaded,
//   - gpu.ErrNotSupported if the library is older than R470,
//   - gpu.ErrTimeout if the driver does not answer before ctx ends,
//   - gpu.ErrReloaded if this process has had another library open,
//   - gpu.ErrInvalid if the options are wrong, or a Driver is open already.
func Open(ctx context.Context, opts Options) (*Driver, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open NVIDIA driver: %w", err)
	}
	ration := brief.NewRation(opts.Logger, time.Now, time.AfterFunc)
	s := &session{opts: opts, log: opts.Logger, ration: ration}
	if s.library, err = findLibrary(opts, s.log); err != nil {
		return nil, fmt.Errorf("open NVIDIA driver: %w", err)
	}
	s.stopped, s.stop = context.WithCancel(context.Background())

	process.Lock()
	defer process.Unlock()
	if process.open {
		return nil, fmt.Errorf("open NVIDIA driver: this process has it open already; close that first: %w",
			gpu.ErrInvalid)
	}
	if process.locks == nil {
		process.locks = newLocks()
	}
	s.locks = process.locks
	named := !filepath.IsAbs(s.library) // the path is known only once the library is loaded
	if !named {
		if err := s.identifyLocked(); err != nil {
			return nil, fmt.Errorf("open NVIDIA driver: %w", err)
		}
	}
	library := s.library
	load := func() (string, error) { return check(library) }
	if s.library, err = ctxlock.Do(ctx, s.locks.calls, "load "+library, load, nil); err != nil {
		return nil, fmt.Errorf("open NVIDIA driver: %w", err)
	}
	if named {
		if err := s.identifyLocked(); err != nil {
			return nil, fmt.Errorf("open NVIDIA driver: %w", err)
		}
	}
	process.library, process.loaded = s.library, s.loaded // the next call binds the symbols of this library
	seen := (&presence{s}).hardware()
	letGo := func(lib nvml.Interface) { lib.Shutdown() }
	s.lib, err = ctxlock.Do(ctx, s.locks.calls, "initialise "+s.library, s.initialise, letGo)
	if err != nil {
		return nil, fmt.Errorf("open NVIDIA driver: %w", err)
	}
	d := newDriver(s, seen)
	process.driver, process.open = d, true
	return d, nil
}

// identifyLocked identifies the content of s.library. The error wraps gpu.ErrReloaded if this
// process is bound to a library with another content. process must be locked.
func (s *session) identifyLocked() error {
	if !filepath.IsAbs(s.library) {
		s.log.Warn("cannot find the path of the driver's library; its replacement would go unnoticed",
			"library", s.library)
	} else if same, err := process.loaded.is(s.library); err == nil && same {
		s.loaded = process.loaded
	} else if s.loaded, err = identify(s.library); err != nil {
		return fmt.Errorf("read the driver's library: %w: %w", gpu.ErrNoDriver, err)
	}
	if process.library != "" && process.loaded.sum != s.loaded.sum {
		return fmt.Errorf("%s differs from %s, which this process has loaded; start a new process: %w",
			s.library, process.library, gpu.ErrReloaded)
	}
	return nil
}

// check fails if a library cannot be loaded or is older than R470. It returns the library's path:
// for a name without a slash, the one that the dynamic linker found.
func check(library string) (string, error) {
	probe := dl.New(library, dl.RTLD_LAZY)
	if err := probe.Open(); err != nil {
		return "", fmt.Errorf("load the driver's library: %w: %w", gpu.ErrNoDriver, err)
	}
	defer probe.Close()
	for _, f := range functions {
		if !f.newer && probe.Lookup(f.symbol) != nil {
			return "", fmt.Errorf("%s has no %s: install driver R470 or later: %w",
				library, f.symbol, gpu.ErrNotSupported)
		}
	}
	if !filepath.IsAbs(library) {
		return mapped(), nil
	}
	return library, nil
}

func (s *session) initialise() (nvml.Interface, error) {
	lib := nvml.New(nvml.WithLibraryPath(s.library))
	return lib, nvmlInit.failed("initialise the driver", lib.Init())
}

// exclusive runs f with both eventSets and calls held. It calls release exactly once: after f,
// which may end after the caller has left, or when it is certain that f will not run. The caller
// takes the locks that release gives back before it calls exclusive.
func (s *session) exclusive(ctx context.Context, what string, release func(), f func() error) error {
	var began atomic.Int32 // 1: f has begun; 2: f will never run
	// This is Lock and not Do: everything until Unlock ends with ctx. So eventSets never counts as
	// hung here.
	err := s.locks.eventSets.Lock(ctx, what)
	if err == nil {
		_, err = ctxlock.Do(ctx, s.locks.calls, what, func() (none struct{}, _ error) {
			if !began.CompareAndSwap(0, 1) {
				return none, fmt.Errorf("%s: %w", what, gpu.ErrTimeout)
			}
			defer release()
			return none, f()
		}, nil)
		s.locks.eventSets.Unlock()
	}
	if began.CompareAndSwap(0, 2) {
		release()
	}
	return err
}

// shutdown shuts the driver down until the driver answers that it is not initialised. Once may
// not be enough, since an initialisation may have followed a shutdown that failed.
func (s *session) shutdown(what string) error {
	for range mostShutdowns {
		ret := s.lib.Shutdown()
		if ret == nvml.ERROR_UNINITIALIZED {
			return nil
		}
		if err := nvmlShutdown.failed(what, ret); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s: %w: it is still initialised after %d shutdowns", what, gpu.ErrDriver, mostShutdowns)
}

// initialised initialises the driver again after a shutdown.
func (s *session) initialised() error {
	if err := nvmlInit.failed("initialise the driver", s.lib.Init()); err != nil {
		return err
	}
	s.stale.Store(false)
	s.renewals.Add(1)
	return nil
}

// errClosed is the error of a Driver that was closed.
var errClosed = fmt.Errorf("the driver has been closed: %w", gpu.ErrNoDriver)

// call runs f with locks.calls held.
func call[T any](ctx context.Context, s *session, what string, f func() (T, error)) (T, error) {
	value, err := ctxlock.Do(ctx, s.locks.calls, what, open(s, what, f), nil)
	return value, s.explained(err)
}

// open returns f, which fails with errClosed once the session is closed. what is the prefix of
// its errors.
func open[T any](s *session, what string, f func() (T, error)) func() (T, error) {
	return func() (value T, err error) {
		if err = errClosed; s.stopped.Err() == nil {
			value, err = f()
		}
		return value, in(what, err)
	}
}

// ask is call for a function that needs the handle of one GPU.
func ask[T any](ctx context.Context, s *session, what string, u gpu.UUID, f func(nvml.Device) (T, error)) (T, error) {
	return call(ctx, s, what+" "+string(u), onGPU(s, u, f))
}

// onGPU finds the handle of a GPU and passes it to f.
func onGPU[T any](s *session, u gpu.UUID, f func(nvml.Device) (T, error)) func() (T, error) {
	return func() (value T, err error) {
		h, err := s.handle(u)
		if err != nil {
			return value, err
		}
		return f(h)
	}
}

// has reports whether the library exports a function. Ask it before any call that R470 may lack:
// go-nvml ends the process if a symbol is missing.
func (s *session) has(f *function) bool {
	return s.lib.Extensions().LookupSymbol(f.symbol) == nil
}

// handle finds a GPU by its UUID. For a UUID that the driver calls malformed, the error wraps
// gpu.ErrNotFound too.
func (s *session) handle(u gpu.UUID) (nvml.Device, error) {
	h, ret := s.lib.DeviceGetHandleByUUID(string(u))
	return h, nvmlDeviceGetHandleByUUID.failed("find "+string(u), sought(ret))
}

// byIndex finds the GPU at an index. If it fails, the UUID is empty.
func (s *session) byIndex(index int) (nvml.Device, gpu.UUID, error) {
	h, ret := s.lib.DeviceGetHandleByIndex(index)
	if err := nvmlDeviceGetHandleByIndex.failed(fmt.Sprintf("find GPU %d", index), ret); err != nil {
		return h, "", err
	}
	uuid, ret := h.GetUUID()
	return h, gpu.UUID(uuid), nvmlDeviceGetUUID.failed(fmt.Sprintf("read the UUID of GPU %d", index), ret)
}

// readings reads what changes all the time: memory, processes, utilization, health.
type readings struct{ *session }

func (r *readings) Memory(ctx context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error) {
	return call(ctx, r.session, "read the memory of GPUs", func() (map[gpu.UUID]gpu.Memory, error) {
		of, errs := map[gpu.UUID]gpu.Memory{}, []error(nil)
		for _, u := range gpus {
			if ctx.Err() != nil {
				break // the caller has left, and others wait for the lock
			}
			h, err := r.handle(u)
			if err == nil {
				var m gpu.Memory
				var told bool
				if m, told, err = r.memory(h); told {
					of[u] = m
				}
			}
			errs = append(errs, in(string(u), err))
		}
		return of, errors.Join(errs...)
	})
}

const mebibyte = 1 << 20

// memory reads the memory of a GPU. told is false if the driver has no figures, because the GPU
// has no memory of its own.
func (r *readings) memory(h nvml.Device) (m gpu.Memory, told bool, err error) {
	const what = "read the memory"
	if r.has(nvmlDeviceGetMemoryInfoV2) {
		v2, ret := h.GetMemoryInfo_v2()
		if told, err = nvmlDeviceGetMemoryInfoV2.told(what, ret); err != nil {
			return m, false, err
		}
		if told && v2.Total > 0 {
			return gpu.Memory{
				Total:    gpu.MiB(v2.Total / mebibyte),
				Reserved: gpu.MiB((v2.Reserved + mebibyte - 1) / mebibyte),
				Used:     gpu.MiB(v2.Used / mebibyte),
				Free:     gpu.MiB(v2.Free / mebibyte),
			}, true, nil
		}
	}
	v1, ret := h.GetMemoryInfo()
	told, err = nvmlDeviceGetMemoryInfo.told(what, ret)
	return gpu.Memory{
		Total: gpu.MiB(v1.Total / mebibyte),
		Used:  gpu.MiB(v1.Used / mebibyte),
		Free:  gpu.MiB(v1.Free / mebibyte),
	}, told && v1.Total > 0, err
}

func (r *readings) Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error) {
	return ask(ctx, r.session, "list the processes on", u, r.processes)
}

func (r *readings) processes(h nvml.Device) ([]gpu.Process, error) {
	var all []gpu.Process
	for _, list := range []struct {
		kind gpu.ProcessKind
		call *function
		read func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{gpu.Compute, nvmlDeviceGetComputeProcesses, h.GetComputeRunningProcesses},
		{gpu.Graphics, nvmlDeviceGetGraphicProcesses, h.GetGraphicsRunningProcesses},
		{gpu.MPS, nvmlDeviceGetMPSProcesses, h.GetMPSComputeRunningProcesses},
	} {
		if list.call.newer && !r.has(list.call) {
			continue
		}
		infos, ret := list.read()
		if _, err := list.call.told("list those of kind "+string(list.kind), ret); err != nil {
			return nil, err
		}
		for _, info := range infos {
			p := gpu.Process{
				PID: int(info.Pid), Kind: list.kind,
				GI: instance(info.GpuInstanceId), CI: instance(info.ComputeInstanceId),
			}
			if info.UsedGpuMemory != notAvailable {
				p.Bytes, p.Known = info.UsedGpuMemory, true
			}
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b gpu.Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.Kind, b.Kind))
	})
	return all, nil
}

// notAvailable is NVML_VALUE_NOT_AVAILABLE as the unsigned 64-bit number that process lists
// contain.
const notAvailable = ^uint64(0)

// instance returns the number of a GPU or compute instance, or -1 if the driver names none.
func instance(id uint32) int {
	if id == ^uint32(0) {
		return -1
	}
	return int(id)
}

// logger passes on what NVIDIA's libraries log. They warn of each optional file that a node
// lacks, so only errors keep their level; all else is debug.
type logger struct{ *slog.Logger }

func (l logger) Errorf(f string, a ...any)   { l.Error(fmt.Sprintf(f, a...)) }
func (l logger) Warningf(f string, a ...any) { l.debugf(f, a...) }
func (l logger) Infof(f string, a ...any)    { l.debugf(f, a...) }
func (l logger) Debugf(f string, a ...any)   { l.debugf(f, a...) }
func (l logger) Tracef(f string, a ...any)   { l.debugf(f, a...) }

func (l logger) debugf(f string, a ...any) {
	if l.Enabled(context.Background(), slog.LevelDebug) {
		l.Debug(fmt.Sprintf(f, a...))
	}
}
