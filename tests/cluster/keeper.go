// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	keeperCommand = "node-keeper"
	initCommand   = "node-init"
)

// spawnKeeper starts the process that stays on the host for as long as the node
// runs, apart from the caller's terminal and process group.
func spawnKeeper(n Node) (*exec.Cmd, error) {
	log, err := os.OpenFile(n.log("keeper"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the keeper's log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"cluster", keeperCommand, n.dir}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the node's keeper: %w", err)
	}
	return cmd, nil
}

// keeperMain makes the cgroups, starts the node's first process, and takes both
// away again when that process, or the one that the node is bound to, has
// ended. It is all of the node that the host's PID namespace sees by itself.
func keeperMain(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: is started by 'cluster up' only", keeperCommand)
	}
	n := Node{name: filepath.Base(args[0]), dir: args[0]}
	spec, err := n.spec()
	if err != nil {
		return fmt.Errorf("read what to start: %w", err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)

	gone := make(chan identity, len(spec.EndsWith))
	for _, other := range spec.EndsWith {
		go func() {
			for !waitGone(other, time.Hour) {
			}
			gone <- other
		}()
	}
	if err := makeCgroups(spec.cgroup()); err != nil {
		return errors.Join(err, endCgroups(spec))
	}
	defer func() {
		_ = os.Remove(n.path("state.json"))
	}()
	first, port, err := startInit(n, spec)
	if err != nil {
		return errors.Join(err, endCgroups(spec))
	}
	ended := make(chan error, 1)
	go func() { ended <- first.Wait() }()

	err = recordState(n, first.Process.Pid, port)
	if err == nil {
		select {
		case <-stop:
		case other := <-gone:
			fmt.Fprintf(os.Stderr, "process %d, which the node is bound to, has ended\n", other.PID)
		case err = <-ended:
			ended <- err
			err = fmt.Errorf("the node's first process ended: %w", errors.Join(err, errors.New("nobody asked it to")))
		}
	}
	// The kernel ends all of a PID namespace with its first process, and Wait
	// returns only after the last of them is gone.
	_ = first.Process.Kill()
	<-ended
	return errors.Join(err, n.recordEnd(), tellUsage(n.name, first.ProcessState), endCgroups(spec))
}

// usageFile is the variable of the environment that names the file to which keepers append
// what their nodes have used of the processors. Unset, they tell nobody.
const usageFile = "GPU_TESTS_USAGE"

// tellUsage appends a line "NODE SECONDS" to the file that usageFile names: the processor
// time of a node's first process and of all that it has waited for, which is every process
// of its PID namespace.
func tellUsage(node string, first *os.ProcessState) error {
	name := os.Getenv(usageFile)
	if name == "" || first == nil {
		return nil
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("tell what the node used: %w", err)
	}
	_, err = fmt.Fprintf(file, "%s %.2f\n", node, (first.UserTime() + first.SystemTime()).Seconds())
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("tell what the node used: %w", err)
	}
	return nil
}

func endCgroups(spec Spec) error {
	left, err := sweepCgroups(spec.cgroup(), 10*time.Second)
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("remove cgroups: still there: %s", strings.Join(left, ", ")))
	}
	return err
}

// startInit starts the first process of new namespaces. It gets one file of the host's:
// see openDoor.
func startInit(n Node, spec Spec) (*exec.Cmd, int, error) {
	file, port, err := openDoor(spec)
	if err != nil {
		return nil, 0, err
	}
	defer file.Close()

	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"cluster", initCommand, n.dir}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	started := make(chan error)
	go func() {
		// The signal at the parent's death means the thread that forked.
		runtime.LockOSThread()
		started <- cmd.Start()
		select {}
	}()
	if err := <-started; err != nil {
		return nil, 0, fmt.Errorf("start the node's first process: %w", err)
	}
	return cmd, port, nil
}

// openDoor is what joins a node to the world outside: a listener on the host's loopback
// that leads to the node's API server, or, for a node that joins another, the other's
// network namespace. A socket belongs to the network namespace that it was made in, so no
// interface of the host is needed.
func openDoor(spec Spec) (file *os.File, port int, err error) {
	if spec.Join != nil {
		file, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", spec.Join.Init.PID))
		if err != nil {
			return nil, 0, fmt.Errorf("open the network of node %s: %w", spec.Join.Name, err)
		}
		return file, 0, nil
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, 0, fmt.Errorf("listen for the API server's clients: %w", err)
	}
	defer listener.Close()
	if file, err = listener.(*net.TCPListener).File(); err != nil {
		return nil, 0, fmt.Errorf("pass the listener on: %w", err)
	}
	return file, listener.Addr().(*net.TCPAddr).Port, nil
}

var namespaceKinds = []string{"ipc", "mnt", "net", "pid", "uts"}

func recordState(n Node, pid, port int) error {
	state := State{APIPort: port, Namespaces: map[string]string{}}
	var err error
	if state.Keeper, err = identify(os.Getpid()); err != nil {
		return fmt.Errorf("record the node: %w", err)
	}
	if state.Init, err = identify(pid); err != nil {
		return fmt.Errorf("record the node: %w", err)
	}
	for _, kind := range namespaceKinds {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			return fmt.Errorf("record the node's namespaces: %w", err)
		}
		state.Namespaces[kind] = link
	}
	// A second file outlives the keeper, so that down can look for leftovers
	// of a node whose keeper was killed.
	return errors.Join(writeJSON(n.path("namespaces.json"), state), writeJSON(n.path("state.json"), state))
}

// lastState is who runs a node or ran it last. It is zero for a node that never
// got as far as having processes.
func (n Node) lastState() (State, error) {
	var state State
	err := readJSON(n.path("namespaces.json"), &state)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return state, err
}

// recordEnd writes down that the node's first process has ended, once.
func (n Node) recordEnd() error {
	state, err := n.lastState()
	if err != nil || state.Ended != 0 || state.Init.PID == 0 {
		return err
	}
	state.Ended = ticksNow()
	return writeJSON(n.path("namespaces.json"), state)
}

// leftovers returns, in words, everything of an ended node that the host still
// has. others are the nodes that run.
func leftovers(n Node, spec Spec, others []State) ([]string, error) {
	state, err := n.lastState()
	if err != nil {
		return nil, err
	}
	ours := map[string]bool{}
	for _, link := range state.Namespaces {
		ours[link] = true
	}
	// The kernel uses a namespace's number again once it is free.
	for _, other := range others {
		for _, link := range other.Namespaces {
			delete(ours, link)
		}
	}
	// The kernel has ended all that was in the node's PID namespace, or in one below it. What
	// is left of the node can only have entered from here. A container of another node that
	// unshared at this moment has numbers that were the node's, and a PID namespace of its own.
	here, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return nil, fmt.Errorf("look for processes of the node: %w", err)
	}
	var out []string
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		pid, err := strconv.Atoi(filepath.Base(p))
		if err != nil {
			return nil, err
		}
		start, _, err := startTime(pid)
		if err != nil || start >= state.Ended {
			continue // it is gone, or it began later
		}
		if link, err := os.Readlink(filepath.Join(p, "ns", "pid")); err != nil || link != here && !ours[link] {
			continue
		}
		for _, kind := range namespaceKinds {
			if link, err := os.Readlink(filepath.Join(p, "ns", kind)); err == nil && ours[link] {
				out = append(out, fmt.Sprintf("process %d in namespace %s", pid, link))
			}
		}
	}
	if state.Keeper.alive() {
		out = append(out, fmt.Sprintf("process %d, the keeper", state.Keeper.PID))
	}
	mounts, err := readMounts()
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		if m.target == n.dir || strings.HasPrefix(m.target, n.dir+"/") || strings.HasPrefix(m.root, n.dir+"/") {
			out = append(out, "mount "+m.target)
		}
	}
	cgroups, err := findCgroups(spec.cgroup())
	if err != nil {
		return nil, err
	}
	for _, c := range cgroups {
		out = append(out, "cgroup "+c)
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, i := range interfaces {
		if i.Name == spec.link() || i.Name == spec.linkPeer() {
			out = append(out, "interface "+i.Name)
		}
	}
	if spec.Join != nil {
		there, err := spec.peerThere()
		if err != nil {
			return nil, err
		}
		if there {
			out = append(out, "interface "+spec.linkPeer()+" of node "+spec.Join.Name)
		}
	}
	return out, nil
}
