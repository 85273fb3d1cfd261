// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is one that the node's first process looks after.
type Process struct {
	Name    string
	Command []string // none: the command it was started with before
	Env     []string // K=V, above the node's own environment
	Restart bool     // start it again whenever it ends by itself
}

// ProcessState is how a Process stands.
type ProcessState struct {
	Name   string
	PID    int // in the node's PID namespace; 0 when it does not run
	Starts int // how often it was started, 1 the first time
	State  string
	// Unexpected says that it ended though nobody asked for it.
	Unexpected bool
}

// request is what a client sends over the control socket, one in a connection.
type request struct {
	Op      string // start, stop, kill, restart, supervise, ps
	Process Process
}

// reply answers a request.
type reply struct {
	Error  string
	States []ProcessState // all processes, by the order of their first start
}

// viaDirectory calls f with a name for dir's entry that fits into a socket
// address, which holds 107 bytes only: it goes through a descriptor of dir.
func viaDirectory(path string, f func(address string) error) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}

// ask sends one request to the node's first process.
func (n Node) ask(req request) ([]ProcessState, error) {
	var conn net.Conn
	err := viaDirectory(n.path("control"), func(address string) (err error) {
		conn, err = net.Dial("unix", address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reach node %s: %w", n.name, err)
	}
	defer conn.Close()
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return nil, fmt.Errorf("ask node %s to %s: %w", n.name, req.Op, err)
	}
	var rep reply
	if err := json.NewDecoder(conn).Decode(&rep); err != nil {
		return nil, fmt.Errorf("ask node %s to %s: %w", n.name, req.Op, err)
	}
	if rep.Error != "" {
		return rep.States, errors.New(rep.Error)
	}
	return rep.States, nil
}

// process returns the state of one process.
func (n Node) process(name string) (ProcessState, error) {
	states, err := n.ask(request{Op: "ps"})
	if err != nil {
		return ProcessState{}, err
	}
	for _, s := range states {
		if s.Name == name {
			return s, nil
		}
	}
	return ProcessState{}, fmt.Errorf("node %s has no process %q; 'cluster ps' lists them", n.name, name)
}

// kubectlEnv is what makes kubectl speak to this node and leave no file
// outside its directory.
func (n Node) kubectlEnv() []string {
	return []string{"KUBECONFIG=" + n.path("kubeconfig"), "KUBECACHEDIR=" + n.path("kubectl"), "KUBERC=off"}
}

// nodeEnv is base as a process inside a node should see it.
func nodeEnv(l Layout, base []string) []string {
	return withEnv(base, "PATH="+kubernetesLink+":"+programsLink+":"+l.path("bin")+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"KUBECONFIG=/etc/kubernetes/admin.conf", "KUBECACHEDIR=/run/kubectl", "KUBERC=off", "TMPDIR=/tmp")
}

// command returns cmd that will run argv inside the node; start it with run.
func (n Node) command(ctx context.Context, l Layout, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = append([]string{execHelper}, argv...)
	cmd.Env = nodeEnv(l, os.Environ())
	// The command has more time to end than this one has patience.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	return cmd
}

// enter runs cmd, made by command, in all the node's namespaces.
func (n Node) enter(cmd *exec.Cmd) error {
	state, err := n.state()
	if err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	directory, err := os.Getwd()
	if err != nil {
		directory = "/"
	}
	done := make(chan error)
	go func() {
		// A thread that has entered other namespaces is of no other use: it is
		// never unlocked, so it ends with this goroutine.
		runtime.LockOSThread()
		done <- func() error {
			if err := setns(state.Init.PID); err != nil {
				return fmt.Errorf("enter node %s: %w", n.name, err)
			}
			if _, err := os.Stat(directory); err != nil {
				directory = "/"
			}
			cmd.Dir = directory
			return cmd.Run()
		}()
	}()
	return <-done
}

// setns moves the calling thread into the namespaces of a process; of the PID
// namespace, that is its children.
func setns(pid int) error {
	kinds := []string{"ipc", "uts", "net", "pid", "mnt"} // mnt last: it takes /proc away
	var fds []int
	for _, kind := range kinds {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, kind), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open its %s namespace: %w", kind, err)
		}
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	// Threads of a process share root and working directory, and a mount
	// namespace cannot be entered while they do.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	for i, fd := range fds {
		if err := unix.Setns(fd, 0); err != nil {
			return fmt.Errorf("join its %s namespace: %w", kinds[i], err)
		}
	}
	return nil
}

// execHelper is the name under which this program, already inside the node,
// turns into the wanted command.
const execHelper = "node-exec"

// execHelperMain asks for its own end when whoever entered the node ends, which
// a parent in another PID namespace cannot ask for it, and becomes argv.
func execHelperMain(argv []string) error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("bind to the caller's life: %w", err)
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	if err := syscall.Exec(path, argv, os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", path, err)
	}
	return nil
}

// load imports an image archive into containerd's namespace of the kubelet, or into the storage
// of CRI-O.
func (n Node) load(ctx context.Context, l Layout, file string) error {
	spec, err := n.spec()
	if err != nil {
		return fmt.Errorf("load image %s: %w", file, err)
	}
	commands := [][]string{{"ctr", "--namespace", "k8s.io", "images", "import", "--local", "-"}}
	if spec.Runtime == crioPart {
		if commands, err = crioLoad(file); err != nil {
			return fmt.Errorf("load image %s: %w", file, err)
		}
	}
	for _, command := range commands {
		if err := n.loadBy(ctx, l, file, command); err != nil {
			return fmt.Errorf("load image %s: %w", file, err)
		}
	}
	return nil
}

// loadBy gives an archive to a command inside the node.
func (n Node) loadBy(ctx context.Context, l Layout, file string, command []string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := n.command(ctx, l, command...)
	cmd.Stdin = f
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.enter(cmd); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(out.String()))
	}
	return nil
}
