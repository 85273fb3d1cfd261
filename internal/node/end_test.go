// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/fakes"
)

// endServer is a runtime with one container, and what it was asked to end that.
type endServer struct {
	name        string
	asked       []string
	killRequest *tasks.KillRequest
	killed      error // the tasks service's answer
	stopped     error // the CRI's
	hasNoTasks  bool
	namespace   []string
	stopRequest *cri.StopContainerRequest
}

func (s *endServer) serve(t testing.TB) *Runtime {
	t.Helper()
	fake := newCRI(t, filepath.Join(t.TempDir(), "runtime.sock"))
	fake.Put(fakes.Pod{UID: "u", Namespace: "train", Name: "job"}, &cri.Container{Id: offender, State: cri.ContainerState_CONTAINER_RUNNING})
	fake.called(s.name, "v2.0.0")
	fake.Answer("StopContainer", func(_ context.Context, r any) (any, error) {
		s.asked, s.stopRequest = append(s.asked, "stop"), r.(*cri.StopContainerRequest)
		return nil, s.stopped
	})
	fake.Answer("Kill", func(ctx context.Context, r any) (any, error) {
		if s.hasNoTasks {
			return nil, status.Error(codes.Unimplemented, "unknown service containerd.services.tasks.v1.Tasks")
		}
		incoming, _ := metadata.FromIncomingContext(ctx)
		s.asked, s.killRequest, s.namespace = append(s.asked, "kill"), r.(*tasks.KillRequest), incoming.Get("containerd-namespace")
		return nil, s.killed
	})
	r := NewRuntime(RuntimeOptions{Endpoint: fake.path})
	t.Cleanup(func() {
		if got := fake.State(offender); (got == cri.ContainerState_CONTAINER_EXITED) != (slices.Contains(s.asked, "kill") && s.killed == nil ||
			slices.Contains(s.asked, "stop") && s.stopped == nil) {
			t.Errorf("asked to %q, the container is %s", s.asked, got)
		}
		r.Close()
	})
	return r
}

const (
	offender  = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	neighbour = "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"
)

func TestEndByRuntime(t *testing.T) {
	away := status.Error(codes.Internal, "shim is stuck")
	none := status.Error(codes.NotFound, "no such container")
	for _, tc := range []struct {
		name   string
		server endServer
		how    string
		asked  []string
		is     error
		says   string
	}{
		{"containerd", endServer{name: "containerd"}, EndedByContainerd, []string{"kill"}, nil, ""},
		{"containerd without its tasks service", endServer{name: "containerd", hasNoTasks: true}, EndedByCRI, []string{"stop"}, nil, ""},
		{"containerd whose task cannot be killed", endServer{name: "containerd", killed: away}, EndedByCRI, []string{"kill", "stop"}, nil, ""},
		{"containerd, gone", endServer{name: "containerd", killed: none}, "", []string{"kill"}, gpu.ErrNotFound, "has ended"},
		{"containerd, nothing helps", endServer{name: "containerd", killed: away, stopped: errors.New("no")}, "", []string{"kill", "stop"}, nil, "shim is stuck"},
		{"CRI-O", endServer{name: "cri-o", hasNoTasks: true}, EndedByCRI, []string{"stop"}, nil, ""},
		{"CRI-O, gone", endServer{name: "cri-o", stopped: none}, "", []string{"stop"}, gpu.ErrNotFound, offender},
		{"cri-dockerd", endServer{name: "docker"}, EndedByCRI, []string{"stop"}, nil, ""},
		{"no name", endServer{}, EndedByCRI, []string{"stop"}, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &tc.server
			r := s.serve(t)
			how, err := r.End(t.Context(), Owner{ID: offender})
			if how != tc.how || (err == nil) != (tc.how != "") {
				t.Fatalf("%q, %v, want %q", how, err, tc.how)
			}
			if err != nil && (tc.is != nil && !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), offender)) {
				t.Errorf("%v, want %v with %q", err, tc.is, tc.says)
			}
			if !slices.Equal(s.asked, tc.asked) {
				t.Errorf("asked to %q, want %q", s.asked, tc.asked)
			}
			if slices.Contains(s.asked, "stop") && (s.stopRequest.GetContainerId() != offender || s.stopRequest.GetTimeout() != 0) {
				t.Errorf("asked for %v", s.stopRequest)
			}
			if slices.Contains(s.asked, "kill") {
				if !slices.Equal(s.namespace, []string{"k8s.io"}) {
					t.Errorf("asked in namespace %q", s.namespace)
				}
				if want := (&tasks.KillRequest{ContainerID: offender, Signal: 9, All: true}); !proto.Equal(s.killRequest, want) {
					t.Errorf("asked for %v, want %v", s.killRequest, want)
				}
			}
		})
	}
}

// TestEndRefuses has owners that End must not touch, and roots without a
// hierarchy, where the runtime is asked instead.
func TestEndRefuses(t *testing.T) {
	own := "/kubepods/besteffort/pod1/" + offender
	for name, o := range map[string]Owner{
		"no ID":                        {},
		"a prefix of an ID":            {ID: offender[:12]},
		"the name of its cgroup":       {ID: "cri-containerd-" + offender},
		"a neighbour's cgroup":         {ID: offender, V2: true, Cgroup: "/kubepods/besteffort/pod1/" + neighbour},
		"its pod's":                    {ID: offender, V2: true, Cgroup: "/kubepods/besteffort/pod1"},
		"one below its own":            {ID: offender, V2: true, Cgroup: own + "/x"},
		"a neighbour's by way of dots": {ID: offender, V2: true, Cgroup: own + "/../" + neighbour},
		"dots before":                  {ID: offender, V2: true, Cgroup: "/.." + own},
		"a path that is not clean":     {ID: offender, V2: true, Cgroup: "/" + own},
		"a relative path":              {ID: offender, V2: true, Cgroup: own[1:]},
		"of no pod":                    {ID: offender, V2: true, Cgroup: "/system.slice/docker-" + offender + ".scope"},
		"the root":                     {ID: offender, V2: true, Cgroup: "/"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &endServer{name: "containerd"}
			r := s.serve(t)
			r.o.Cgroups = "/sys/fs/cgroup"
			if how, err := r.End(t.Context(), o); !errors.Is(err, gpu.ErrInvalid) || how != "" || len(s.asked) > 0 {
				t.Errorf("%q, %v, asked %q, want a refusal", how, err, s.asked)
			}
		})
	}
	directory := t.TempDir()
	if err := os.MkdirAll(filepath.Join(directory, own), 0o755); err != nil {
		t.Fatal(err)
	}
	trap := filepath.Join(directory, own, "cgroup.kill")
	if err := os.WriteFile(trap, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, root := range map[string]string{"no such place": filepath.Join(directory, "none"), "no hierarchy": directory, "not given": ""} {
		s := &endServer{name: "containerd"}
		r := s.serve(t)
		r.o.Cgroups = root
		if how, err := r.End(t.Context(), Owner{ID: offender, V2: true, Cgroup: own}); how != EndedByContainerd || err != nil {
			t.Errorf("%s: %q, %v", name, how, err)
		}
	}
	if data, err := os.ReadFile(trap); err != nil || len(data) > 0 {
		t.Errorf("a file that is of no hierarchy was written: %q, %v", data, err)
	}
	// What was wrong with the hierarchy is told if the runtime is away, too.
	r := NewRuntime(RuntimeOptions{Endpoint: filepath.Join(directory, "none.sock"), Cgroups: directory})
	defer r.Close()
	if _, err := r.End(t.Context(), Owner{ID: offender, V2: true, Cgroup: own}); err == nil ||
		!strings.Contains(err.Error(), "not a cgroup v2 hierarchy") || !strings.Contains(err.Error(), "none.sock") {
		t.Errorf("%v", err)
	}
}

// hierarchy returns where this machine has its unified hierarchy, and a cgroup
// in it for the test, which is removed with all below it.
func hierarchy(t *testing.T) (mount, top string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to make cgroups")
	}
	base, mount, err := unified("/sys/fs/cgroup")
	if err != nil {
		t.Skipf("needs a cgroup v2 hierarchy at /sys/fs/cgroup or its unified: %v", err)
	}
	defer unix.Close(base)
	top = fmt.Sprintf("/gpu-agent-test-%d", os.Getpid())
	if err := os.Mkdir(mount+top, 0o755); err != nil {
		t.Skipf("needs a cgroup v2 hierarchy that can be written: %v", err)
	}
	t.Cleanup(func() {
		var all []string
		filepath.WalkDir(mount+top, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, path)
			}
			return nil
		})
		slices.Reverse(all) // the deepest first
		for _, path := range all {
			if err := unix.Rmdir(path); err != nil {
				t.Errorf("remove %s: %v", path, err)
			}
		}
	})
	if _, err := os.Stat(mount + top + "/cgroup.kill"); err != nil {
		t.Skipf("needs Linux 5.14 or later, for cgroup.kill: %v", err)
	}
	return mount, top
}

// inCgroup starts a process in a cgroup, which it makes. The process ignores
// what can be ignored, and has a child.
func inCgroup(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	c := exec.Command("sh", "-c", `trap "" TERM INT HUP; sleep 1000 & echo up; wait`)
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd, Setpgid: true}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		c.Wait()
		// Its cgroup can be removed once its child is gone, which is init's.
		for {
			events, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
			if err != nil || strings.Contains(string(events), "populated 0") {
				return
			}
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return c
}

// TestEndByCgroup ends a container, for real, whose processes it finds by
// themselves: all of them, those in cgroups below too, and no neighbour.
func TestEndByCgroup(t *testing.T) {
	mount, top := hierarchy(t)
	pod := top + "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1111_2222.slice"
	first := inCgroup(t, mount+pod+"/cri-containerd-"+offender+".scope")
	below := inCgroup(t, mount+pod+"/cri-containerd-"+offender+".scope/below")
	other := inCgroup(t, mount+pod+"/cri-containerd-"+neighbour+".scope")

	p := NewProc("")
	defer p.Close()
	o, err := p.Container(first.Process.Pid)
	want := Owner{ID: offender, PodUID: "1111-2222", Cgroup: pod + "/cri-containerd-" + offender + ".scope", V2: true, Start: o.Start}
	if err != nil || o != want {
		t.Fatalf("%+v, %v, want %+v", o, err, want)
	}
	if also, err := p.Container(below.Process.Pid); err != nil || also.ID != o.ID || also.Cgroup != o.Cgroup {
		t.Fatalf("%+v, %v, want it in %+v", also, err, o)
	}
	if !p.Same(first.Process.Pid, o) || p.Same(other.Process.Pid, o) {
		t.Error("a process is not taken for itself, or for its neighbour")
	}

	s := &endServer{name: "containerd"}
	r := s.serve(t)
	r.o.Cgroups = "/sys/fs/cgroup"
	how, err := r.End(t.Context(), o)
	if how != EndedByCgroup || err != nil || len(s.asked) > 0 {
		t.Fatalf("%q, %v, asked %q", how, err, s.asked)
	}
	for _, c := range []*exec.Cmd{first, below} {
		err := c.Wait()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Errorf("it ended with %v", err)
		}
		if _, err := p.Container(c.Process.Pid); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("of one that was ended: %v", err)
		}
	}
	if now, err := p.Container(other.Process.Pid); err != nil || now.ID != neighbour {
		t.Errorf("the neighbour is %+v, %v", now, err)
	}

	// Once the cgroup is gone, the runtime is asked.
	if how, err := r.End(t.Context(), Owner{ID: offender, V2: true, Cgroup: pod + "/gone/" + offender}); how != "" || !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a cgroup that is not right below its pod's: %q, %v", how, err)
	}
	if how, err := r.End(t.Context(), Owner{ID: offender, V2: true, Cgroup: pod + "/" + offender}); how != EndedByContainerd || err != nil {
		t.Errorf("%q, %v", how, err)
	}
}

// TestSeesNode asks from this PID namespace and from others, which it makes.
func TestSeesNode(t *testing.T) {
	if how := os.Getenv("SEES_NODE"); how != "" {
		seesNodeInside(t, how)
		return
	}
	if own, err := os.Readlink("/proc/self/ns/pid"); err == nil && own == initialPIDNamespace {
		nobody := NewRuntime(RuntimeOptions{Endpoint: filepath.Join(t.TempDir(), "none.sock")})
		if err := NewProc("").SeesNode(nobody); err != nil {
			t.Errorf("in the first PID namespace: %v", err)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to make PID namespaces")
	}
	outside := (&endServer{}).serve(t)
	if _, err := outside.socket(); err != nil {
		t.Fatal(err)
	}
	for how, want := range map[string]string{
		"runtime inside":  "sees the node",
		"runtime outside": "not supported: ",
		"runtime away":    "error: ",
		"host's proc":     "not supported: ",
	} {
		t.Run(how, func(t *testing.T) {
			c := exec.Command("/proc/self/exe", "-test.run=^TestSeesNode$")
			c.Env = append(os.Environ(), "SEES_NODE="+how, "SEES_NODE_SOCKET="+outside.Endpoint())
			c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			out, err := c.CombinedOutput()
			_, said, _ := strings.Cut(string(out), "SAID ")
			if err != nil || !strings.HasPrefix(said, want) || strings.HasPrefix(want, "not") && !strings.Contains(said, "hostPID: true") {
				t.Errorf("%v: %s\nwant %q", err, out, want)
			}
		})
	}
}

// seesNodeInside runs in a PID and mount namespace of its own.
func seesNodeInside(t *testing.T, how string) {
	proc := t.TempDir()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", proc, "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(proc, unix.MNT_DETACH)
	if how == "host's proc" {
		proc = ""
	}
	r := NewRuntime(RuntimeOptions{Endpoint: os.Getenv("SEES_NODE_SOCKET")})
	switch how {
	case "runtime inside", "host's proc":
		r = (&endServer{}).serve(t)
	case "runtime away":
		r = NewRuntime(RuntimeOptions{Endpoint: filepath.Join(t.TempDir(), "none.sock")})
	}
	switch err := NewProc(proc).SeesNode(r); {
	case err == nil:
		fmt.Println("SAID sees the node")
	case errors.Is(err, gpu.ErrNotSupported):
		fmt.Println("SAID not supported:", err)
	default:
		fmt.Println("SAID error:", err)
	}
}
