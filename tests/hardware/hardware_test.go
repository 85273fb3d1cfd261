// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

var (
	onHardware = flag.Bool("hardware", false, "test this machine's NVIDIA driver, not the emulated one")
	library    = flag.String("library", "", "with -hardware: the driver's libnvidia-ml; empty looks below -driver-root")
	driverRoot = flag.String("driver-root", "/", "with -hardware: where the driver is installed")
	partial    = flag.Bool("partial", false, "with -hardware: this is a container that has only some of the driver's files")
	programs   = flag.String("programs", "", "a folder with the suite's programs and the cap's libraries, where nothing can be compiled; empty compiles them")
	setMIG     = flag.Bool("instances", false, "with -hardware: make MIG instances where nothing stands, on GPUs that are in MIG mode and idle, and destroy them again")
	setSlices  = flag.Bool("time-slices", false, "with -hardware: change GPUs' time slices too, and put them back to the default")
)

func TestHardware(t *testing.T) {
	if !*onHardware {
		t.Skip("skipped: -hardware is not given (make test-gpu gives it)")
	}
	opts := realDriver()
	d, err := nvml.Open(wait(t), opts)
	if errors.Is(err, gpu.ErrNoDriver) {
		t.Fatalf("-hardware is given, and this machine has no NVIDIA driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	h := &holder{dir: t.TempDir(), root: *driverRoot}
	Conformance(t, opts, Caps{Hold: h.hold, Busy: h.busy, TimeSlice: *setSlices, Instances: *setMIG, Partial: *partial})
}

// realDriver is this machine's driver, as the flags have it.
func realDriver() nvml.Options {
	opts := OptionsOf(*driverRoot)
	opts.Library, opts.EventWait = *library, time.Second
	return opts
}

// programOf is the path of one of the suite's programs, compiled into dir unless -programs has it.
func programOf(name, dir string) (string, error) {
	if *programs != "" {
		return filepath.Join(*programs, name), nil
	}
	path := filepath.Join(dir, name)
	out, err := exec.Command("cc", "-O2", "-Wall", "-Wno-strict-prototypes", "-o", path, "testdata/"+name+".c", "-ldl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compile the program %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// holder runs a CUDA program that holds memory.
type holder struct {
	dir, root string
	build     sync.Once
	program   string
	err       error
}

func (h *holder) hold(ctx context.Context, u gpu.UUID, amount gpu.MiB) (int, func(), error) {
	return h.start(ctx, u, amount)
}

func (h *holder) busy(ctx context.Context, u gpu.UUID) (int, func(), error) {
	return h.start(ctx, u, 64, "busy")
}

func (h *holder) start(ctx context.Context, u gpu.UUID, amount gpu.MiB, more ...string) (int, func(), error) {
	h.build.Do(func() { h.program, h.err = programOf("hold", h.dir) })
	if h.err != nil {
		return 0, nil, h.err
	}
	cmd := exec.CommandContext(ctx, h.program, append([]string{"libcuda.so.1", fmt.Sprint(uint64(amount))}, more...)...)
	cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+string(u))
	if h.root != "/" {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Join(h.root, "usr/lib64")+":"+filepath.Join(h.root, "usr/lib/x86_64-linux-gnu"))
	}
	var said strings.Builder
	cmd.Stderr = &said
	pid, end, err := startHolder(cmd)
	if err != nil {
		return 0, nil, fmt.Errorf("CUDA does not run here: %w: %s", err, said.String())
	}
	return pid, end, nil
}

// startHolder starts a program that says "ready" and then waits for the end of
// its input.
func startHolder(cmd *exec.Cmd) (pid int, end func(), err error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil && line != "ready\n" {
		err = fmt.Errorf("it says %q", line)
	}
	end = sync.OnceFunc(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	if err != nil {
		end()
		if errors.Is(err, io.EOF) {
			err = errors.New("it ended")
		}
		return 0, nil, err
	}
	return cmd.Process.Pid, end, nil
}
