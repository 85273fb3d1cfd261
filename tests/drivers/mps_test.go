// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/drivers/archive"
)

// ownDev runs a program with an empty /dev, since NVIDIA's programs make the device nodes that they
// miss, and with the files of $MOUNTS over others, "from:to:options" each.
const ownDev = `mount --make-rprivate / && mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 || exit 98
for m in $MOUNTS; do from=${m%%:*}; rest=${m#*:}; mount --bind "$from" "${rest%:*}" && mount -o "remount,bind,${rest##*:}" "${rest%:*}" || exit 98; done
unset MOUNTS; exec "$@"`

func withOwnDev(cmd *exec.Cmd, mounts ...string) *exec.Cmd {
	cmd.Args = append([]string{"/bin/sh", "-c", ownDev, "sh", cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	cmd.Env = append(cmd.Env, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "MOUNTS="+strings.Join(mounts, " "))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// TestMPS: NVIDIA's own libcuda and control daemon of one version, with the cap's library in front of
// the former. Without a card that goes as far as the server, which cannot start: a client is told
// 805, and a program that has missed its daemon 100, that there is no device.
func TestMPS(t *testing.T) {
	b := open(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, for mounts")
	}
	if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil {
		t.Skip("this machine has an NVIDIA driver: its programs would use it")
	}
	program := filepath.Join(t.TempDir(), "share")
	build(t, "share.c", program, "-ldl")
	for _, d := range judges {
		deb, ok := archive.MPS[d.version]
		if !ok {
			continue
		}
		t.Run(d.version, func(t *testing.T) {
			tree, err := deb.Tree(t.Context())
			switch {
			case errors.Is(err, archive.ErrHash):
				t.Fatal(err)
			case err != nil:
				t.Skipf("no judge: %v", err)
			}
			cuda, _ := b.install(t, d)
			n := &mpsBench{t: t, pipe: filepath.Join(b.root, "mps"), programs: filepath.Join(tree, "usr"), program: program}
			n.lay(b.root)
			n.run(cuda)
		})
	}
}

// mpsBench is the pipe directory of the bench, and a container's pages.
type mpsBench struct {
	t              *testing.T
	pipe, programs string
	program        string
	mounts         []string // of the pages
	pages          *lib.Pages
	key            string
	daemon         *exec.Cmd
	output         string
}

const benchGPU = gpu.UUID("GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a")

// lay makes the pages and the places where the library looks for them.
func (n *mpsBench) lay(root string) {
	t := n.t
	t.Helper()
	state := t.TempDir()
	t.Cleanup(func() { try(t, lib.Unmount(state)) })
	var err error
	n.pages, err = lib.OpenPages(state)
	try(t, err)
	n.key = "0123456789abcdef"
	files := n.percent(26)
	dir := filepath.Join(root, "allocations", string(benchGPU), n.key)
	try(t, os.MkdirAll(dir, 0o755))
	t.Cleanup(func() {
		try(t, os.RemoveAll(filepath.Join(root, "allocations")))
		try(t, os.RemoveAll(n.pipe))
	})
	for name, from := range map[string]string{"limit": files.Limit + "%ro", "usage": files.Usage + "%rw"} {
		at := filepath.Join(dir, name)
		try(t, os.WriteFile(at, nil, 0o644))
		from, how, _ := strings.Cut(from, "%")
		n.mounts = append(n.mounts, from+":"+at+":"+how)
	}
}

// percent writes the container's pages.
func (n *mpsBench) percent(p int) lib.Page {
	n.t.Helper()
	files, err := n.pages.Write(n.key, 0, []lib.Limit{{GPU: benchGPU, Bytes: 8 << 30, Percent: p}})
	try(n.t, err)
	return files[benchGPU]
}

func try(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func bootTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// beat writes the heartbeat of a daemon that has answered so long ago.
func (n *mpsBench) beat(ago time.Duration) {
	n.t.Helper()
	page := make([]byte, 4096)
	copy(page, "GPUMPS01")
	binary.NativeEndian.PutUint64(page[8:], uint64(bootTime()-ago))
	try(n.t, os.MkdirAll(n.pipe, 0o755))
	try(n.t, os.WriteFile(filepath.Join(n.pipe, "beat"), page, 0o644))
}

// start starts NVIDIA's own daemon in the pipe directory.
func (n *mpsBench) start(cuda stand) {
	t := n.t
	t.Helper()
	try(t, os.RemoveAll(n.pipe))
	try(t, os.MkdirAll(n.pipe, 0o755))
	logs := t.TempDir()
	n.output = filepath.Join(logs, "output")
	out, err := os.Create(n.output)
	try(t, err)
	libraries := filepath.Join(logs, "lib")
	try(t, os.Mkdir(libraries, 0o755))
	try(t, os.Symlink(cuda.file, filepath.Join(libraries, cudaName)))
	control, err := exec.LookPath(filepath.Join(n.programs, "bin/nvidia-cuda-mps-control"))
	try(t, err)
	n.daemon = exec.Command(control, "-f")
	n.daemon.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe, "CUDA_MPS_LOG_DIRECTORY=" + logs, "LD_LIBRARY_PATH=" + libraries}
	withOwnDev(n.daemon)
	// It finds its server beside itself, or by PATH.
	n.daemon.Env = append(n.daemon.Env, fmt.Sprintf("PATH=%s/bin:%[1]s/sbin:/usr/sbin:/usr/bin:/sbin:/bin", n.programs))
	n.daemon.Stdout, n.daemon.Stderr = out, out
	try(t, n.daemon.Start())
	try(t, out.Close())
	d := n.daemon
	t.Cleanup(func() { _ = d.Process.Kill(); _ = d.Wait() })
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if c, err := dialPacket(filepath.Join(n.pipe, "control")); err == nil {
			unix.Close(c)
			return
		}
		if time.Now().After(end) {
			said, _ := os.ReadFile(n.output)
			t.Fatalf("the daemon does not listen: %s", said)
		}
	}
}

func dialPacket(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// startServer has the daemon start a server that no client has asked for: so the server could be the
// first process of a card in exclusive-process mode. Without a card it ends at once.
func (n *mpsBench) startServer() {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(n.programs, "bin/nvidia-cuda-mps-control"))
	cmd.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe}
	cmd.Stdin = strings.NewReader("start_server -uid 0\n")
	if out, err := withOwnDev(cmd).CombinedOutput(); err != nil || len(out) != 0 {
		n.t.Errorf("start_server: %v: %s", err, out)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		said, err := os.ReadFile(n.output)
		try(n.t, err)
		if strings.Contains(string(said), "Starting new server") && strings.Contains(string(said), "exited with status") {
			return
		}
		if time.Now().After(end) {
			n.t.Fatalf("no server has started and ended: %s", said)
		}
	}
}

// clients is how many programs have asked the daemon.
func (n *mpsBench) clients() int {
	n.t.Helper()
	said, err := os.ReadFile(n.output)
	try(n.t, err)
	return strings.Count(string(said), "NEW CLIENT")
}

const hangs = "hangs"

// begin runs the program with a library, and returns what it says.
func (n *mpsBench) begin(library string, env ...string) string {
	n.t.Helper()
	cmd := exec.Command(n.program, library)
	cmd.Env = env
	withOwnDev(cmd, n.mounts...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	try(n.t, cmd.Start())
	late := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	err := cmd.Wait()
	if !late.Stop() {
		return hangs
	}
	if err != nil {
		n.t.Fatalf("%v: %s", err, out.String())
	}
	return strings.TrimSpace(out.String())
}

func (n *mpsBench) run(cuda stand) {
	t := n.t
	right := fmt.Sprintf("%s 26", n.pipe)
	is := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: it says %q, want %q", what, got, want)
		}
	}
	environments := map[string][]string{
		"nothing set":     nil,
		"another place":   {"CUDA_MPS_PIPE_DIRECTORY=/nowhere", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"},
		"set twice":       {"CUDA_MPS_PIPE_DIRECTORY=/nowhere", "CUDA_MPS_PIPE_DIRECTORY=" + n.pipe, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=abc"},
		"as it was given": {"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=26"},
	}
	n.start(cuda)
	n.startServer()
	for name, env := range environments {
		before := n.clients()
		n.beat(0)
		is(name, n.begin(cuda.cap, env...), "805 "+right)
		if n.clients() != before+1 {
			t.Errorf("%s: the daemon has seen %d clients more", name, n.clients()-before)
		}
	}
	before := n.clients()
	if got := n.begin(cuda.file); !strings.HasPrefix(got, "100 ") || n.clients() != before {
		t.Errorf("without the cap, nothing set: %q, and the daemon has seen %d clients", got, n.clients()-before)
	}
	n.beat(3 * time.Second)
	if got := n.begin(cuda.cap); !strings.HasPrefix(got, "805 ") || n.clients() != before {
		t.Errorf("an old heartbeat: %q, and the daemon has seen %d clients", got, n.clients()-before)
	}
	n.percent(0)
	is("no share", n.begin(cuda.cap), "100 - -")
	if n.clients() != before {
		t.Errorf("no share: the daemon has seen %d clients", n.clients()-before)
	}
	n.percent(26)

	// The daemon hangs. It answered a moment ago, so the program waits with it; the page says so.
	try(t, unix.Kill(n.daemon.Process.Pid, unix.SIGSTOP))
	n.beat(0)
	began, ended := bootTime(), make(chan string, 1)
	go func() { ended <- n.begin(cuda.cap) }()
	u, err := n.pages.OpenUsage(n.key, benchGPU)
	try(t, err)
	defer u.Close()
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		at, err := u.Compute(nil)
		if err == nil && at >= began && at <= bootTime() {
			break
		}
		if time.Now().After(end) {
			t.Errorf("the page says that a program has been in cuInit since %v, %v", at, err)
			break
		}
	}
	n.beat(3 * time.Second)
	is("a daemon that hangs, an old heartbeat", n.begin(cuda.cap), "805 "+right)
	try(t, unix.Kill(n.daemon.Process.Pid, unix.SIGCONT))
	is("a daemon that goes on", <-ended, "805 "+right)

	// It is dead, and its socket stands. NVIDIA's library says nothing of that.
	try(t, n.daemon.Process.Kill())
	_ = n.daemon.Wait()
	n.beat(0)
	if got := n.begin(cuda.file, environments["as it was given"]...); !strings.HasPrefix(got, "100 ") {
		t.Errorf("a dead daemon, without the cap: %q", got)
	}
	n.beat(3 * time.Second)
	is("a dead daemon", n.begin(cuda.cap), "805 "+right)
}
