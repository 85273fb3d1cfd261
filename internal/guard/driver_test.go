// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	driverlib "example.com/gpu-agent/tests/emulator/lib"
)

// containerCgroup makes the cgroup of a container below the machine's unified
// hierarchy, which goes with the test.
func containerCgroup(t *testing.T, id string) (hierarchy, path string) {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(mount, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		path = fmt.Sprintf("/gpu-agent-limit-%d/kubepods/besteffort/pod1/%s", os.Getpid(), id)
		if err := os.MkdirAll(mount+path, 0o755); err != nil {
			t.Skipf("skipped: needs a cgroup v2 hierarchy that can be written: %v", err)
		}
		t.Cleanup(func() {
			for dir := path; dir != "/"; dir = filepath.Dir(dir) {
				if err := unix.Rmdir(mount + dir); err != nil && !errors.Is(err, unix.ENOENT) {
					t.Errorf("remove %s: %v", mount+dir, err)
				}
			}
		})
		return mount, path
	}
	t.Skip("skipped: needs a cgroup v2 hierarchy at /sys/fs/cgroup or its unified")
	return "", ""
}

var driverOpened bool

// TestLimiter: from the owner of a process to the driver's limit on its cgroup.
func TestLimiter(t *testing.T) {
	if driverOpened {
		// go-nvml binds the driver's functions once in a process.
		t.Skip("skipped: this process has opened the emulated driver of an earlier run (-count)")
	}
	driverOpened = true
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: the emulated driver's libraries need gcc: %v", err)
	}
	libraries, err := driverlib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("0123456789abcdef", 4)
	hierarchy, path := containerCgroup(t, id)
	w, err := emulator.New(emulator.Spec{Driver: "615.11", Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := install.Driver(root, libraries, w); err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- (&daemon.Server{World: w, Driver: root}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	var calls []string
	driver := nvml.NewLate(
		func(ctx context.Context) (*nvml.Driver, error) {
			return nvml.Open(ctx, nvml.Options{DriverRoot: root})
		},
		func(call, code string, _ time.Duration) { calls = append(calls, call+" "+code) })
	defer func() {
		if err := driver.LetGo(); err != nil {
			t.Error(err)
		}
	}()
	runtime := node.NewRuntime(node.RuntimeOptions{Cgroups: hierarchy})
	defer runtime.Close()
	lim := ByCgroup{driver, runtime}
	u := gpu.UUID(w.State().GPUs[0].UUID)
	own := node.Owner{ID: id, Cgroup: path, V2: true}

	if err := lim.Limit(ctx, u, own, 4<<30); err != nil {
		t.Fatal(err)
	}
	if m, err := driver.MemoryLimit(ctx, u, hierarchy+path); err != nil || m.Bytes != 4<<30 || m.Guaranteed != 0 {
		t.Errorf("%+v, %v, want 4 GiB, and no guarantee: it would stay with the cgroups above", m, err)
	}
	// A limit of another owner on the cgroup above, and none of the container's own.
	made := slices.Clone(calls)
	above := filepath.Dir(filepath.Dir(path))
	if err := driver.SetMemoryLimit(ctx, u, hierarchy+above, 8<<30); err != nil {
		t.Fatal(err)
	}
	others, err := lim.Others(ctx, u)
	others = slices.DeleteFunc(others, func(c gpu.CgroupLimit) bool { return !strings.HasPrefix(c.Cgroup, path[:20]) })
	if err != nil || len(others) != 1 || others[0].Cgroup != above || others[0].Limit.Bytes != 8<<30 || !others[0].Pods {
		t.Errorf("others' limits are %+v, %v", others, err)
	}
	if err := driver.SetMemoryLimit(ctx, u, hierarchy+above, lib.None); err != nil {
		t.Error(err)
	}
	calls = made
	if err := lim.Limit(ctx, u, own, lib.None); err != nil {
		t.Error(err)
	}
	if m, err := driver.MemoryLimit(ctx, u, hierarchy+path); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("%+v, %v, want none", m, err)
	}
	for name, c := range map[string]struct {
		o    node.Owner
		want error
	}{
		"of v1":     {node.Owner{ID: id, Cgroup: path}, gpu.ErrNotSupported},
		"gone":      {node.Owner{ID: id, Cgroup: filepath.Dir(path) + "/cri-containerd-" + id + ".scope", V2: true}, gpu.ErrNotFound},
		"not owned": {node.Owner{ID: id, Cgroup: filepath.Dir(path), V2: true}, gpu.ErrInvalid},
	} {
		if err := lim.Limit(ctx, u, c.o, 4<<30); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if err := lim.Limit(ctx, u, own, 1<<50); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("more than the card has: %v, want ErrInvalid", err)
	}
	want := []string{"set_memory_limit ok", "memory_limit ok", "memory_limit ok", "set_memory_limit ok", "memory_limit not_found", "set_memory_limit error"}
	if !slices.Equal(calls, want) {
		t.Errorf("calls %q, want %q", calls, want)
	}
}

// TestHookOutcomes: an outcome counts as long as its container's cgroup has processes, and a failure always.
func TestHookOutcomes(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	hierarchy, path := containerCgroup(t, id)
	runtime := node.NewRuntime(node.RuntimeOptions{Cgroups: hierarchy})
	defer runtime.Close()
	state := t.TempDir()
	for at, text := range map[string]string{
		id + "/aaaa":                      "limit v1\ncgroup " + path + "\ngpu GPU-0 1 1 1\ndone\n",
		strings.Repeat("1", 64) + "/bbbb": "limit v1\ncgroup \nfailed it is so\n",
		strings.Repeat("2", 64) + "/cccc": "limit v1\ncgroup /kubepods/pod1/" + strings.Repeat("2", 64) + "\ngpu GPU-0 1 1 1\ndone\n",
	} {
		file := filepath.Join(lib.OutcomesDir(state), at)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	h := &HookOutcomes{All: lib.OpenOutcomes(state), Runtime: runtime}
	keys := func() string {
		t.Helper()
		all, err := h.Outcomes()
		if err != nil {
			t.Error(err)
		}
		var out []string
		for _, o := range all {
			out = append(out, o.Key)
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	if got := keys(); got != "bbbb" {
		t.Errorf("without processes: %s", got)
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hierarchy+path+"/cgroup.procs", fmt.Append(nil, cmd.Process.Pid), 0); err != nil {
		t.Error(err)
	}
	if got := keys(); got != "aaaa bbbb" {
		t.Errorf("with a process: %s", got)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for got := keys(); got != "bbbb"; got = keys() {
		time.Sleep(time.Millisecond) // until the kernel has taken it out
	}
}
