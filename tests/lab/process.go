// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a process of the node: PIDs are used again, and the two together
// are not.
type Process struct {
	// PID is in the node's PID namespace.
	PID int
	// Start is in clock ticks since the machine's boot.
	Start uint64
}

func (p Process) String() string { return fmt.Sprintf("PID %d, started at tick %d", p.PID, p.Start) }

// End waits for the process's end and returns its moment, late by two
// milliseconds and a look at a file at most. Before is a moment at which it was
// still seen.
func (n *Node) End(ctx context.Context, limit time.Duration, p Process) (before, ended time.Time, err error) {
	ended, err = Moment(ctx, limit, 2*time.Millisecond, "the end of "+p.String(), func(context.Context) error {
		now := time.Now()
		if !n.Lives(p) {
			return nil
		}
		before = now
		return errors.New("it lives")
	})
	return before, ended, err
}

// StartTime is when the process started, in steps of a hundredth of a second.
func (n *Node) StartTime(p Process) (time.Time, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return time.Time{}, fmt.Errorf("read the clock: %w", err)
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 wherever Go runs
	return time.Now().Add(time.Duration(p.Start)*tick - time.Duration(now.Nano())), nil
}

// Lives says whether the process still runs. It looks at one file.
func (n *Node) Lives(p Process) bool {
	now, err := n.process(p.PID)
	return err == nil && now == p
}

// Shim is the process by which the runtime holds a container: the parent of its
// first process. Stopped by a signal it makes a container that cannot be ended,
// as one is whose process is stuck inside a driver.
func (n *Node) Shim(p Process) (Process, error) {
	fields, err := n.stat(p.PID)
	if err != nil {
		return Process{}, err
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return Process{}, err
	}
	return n.process(parent)
}

// process reads one from the node's /proc. One that has ended and waits for its
// parent's word counts as ended.
func (n *Node) process(pid int) (Process, error) {
	fields, err := n.stat(pid)
	if err != nil {
		return Process{}, err
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return Process{}, fmt.Errorf("process %d has ended", pid)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	return Process{PID: pid, Start: start}, err
}

// stat are the fields of /proc/PID/stat behind the command's name: state, parent
// and so on.
func (n *Node) stat(pid int) ([]string, error) {
	data, err := os.ReadFile(n.File(fmt.Sprintf("/proc/%d/stat", pid)))
	if err != nil {
		return nil, err
	}
	// The name may hold anything, so count from its closing bracket.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 {
		return nil, fmt.Errorf("read /proc/%d/stat: %d fields after the name", pid, len(fields))
	}
	return fields, nil
}

// Containers are the first processes of all containers that the runtime has
// running now, by container ID; sandboxes are among them.
func (n *Node) Containers(ctx context.Context) (map[string]Process, error) {
	out, err := n.Exec(ctx, "ctr", "--namespace", "k8s.io", "tasks", "list")
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	all := map[string]Process{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "RUNNING" {
			continue
		}
		pid, err := strconv.Atoi(f[1])
		if err != nil {
			return nil, fmt.Errorf("list containers: line %q: %w", line, err)
		}
		p, err := n.process(pid)
		if errors.Is(err, os.ErrNotExist) {
			continue // it has ended since
		}
		if err != nil {
			return nil, fmt.Errorf("list containers: %w", err)
		}
		all[f[0]] = p
	}
	return all, nil
}

// InitProcess is the first process of a container, by the ID that the runtime
// has for it. Unlike Containers it asks nobody, not even a runtime that is away.
func (n *Node) InitProcess(container string) (Process, error) {
	file := "/run/containerd/io.containerd.runtime.v2.task/k8s.io/" + container + "/init.pid"
	if n.runtime == CRIO {
		file = "/run/containers/storage/overlay-containers/" + container + "/userdata/pidfile"
	}
	data, err := os.ReadFile(n.File(file))
	if err != nil {
		return Process{}, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return Process{}, fmt.Errorf("read the first process of container %s: %w", container, err)
	}
	return n.process(pid)
}

// ServerProcess is the process behind a name such as Kubelet, and how often it
// was started. PID 0 says that it does not run.
func (n *Node) ServerProcess(ctx context.Context, name string) (p Process, starts int, err error) {
	out, err := n.cluster(ctx, nil, "pid", name)
	if err != nil {
		return Process{}, 0, err
	}
	var pid int
	if _, err := fmt.Sscan(string(out), &pid, &starts); err != nil {
		return Process{}, 0, fmt.Errorf("read the PID of %s: %w", name, err)
	}
	if pid == 0 {
		return Process{}, starts, nil
	}
	p, err = n.process(pid)
	return p, starts, err
}

// Process is the first process of a container, which must run. It is the
// runtime's word, and there without the API server.
func (p *RunningPod) Process(ctx context.Context, container string) (Process, error) {
	if container == "" {
		container = "main"
	}
	out, err := p.node.Exec(ctx, "ctr", "--namespace", "k8s.io", "containers", "list", "--quiet", fmt.Sprintf(
		`labels."io.kubernetes.pod.namespace"==%q,labels."io.kubernetes.pod.name"==%q,labels."io.kubernetes.container.name"==%q`,
		PodNamespace, p.Name, container))
	if err != nil {
		return Process{}, fmt.Errorf("find container %s of pod %s: %w", container, p.Name, err)
	}
	all, err := p.node.Containers(ctx)
	if err != nil {
		return Process{}, err
	}
	ids := strings.Fields(string(out))
	for _, id := range ids {
		if found, ok := all[id]; ok {
			return found, nil
		}
	}
	return Process{}, fmt.Errorf("container %s of pod %s does not run; the runtime has %d of that name, ended", container, p.Name, len(ids))
}

// Processes are all processes of a container that run a program, by its path as
// the container has it; without one, all of the container's.
func (p *RunningPod) Processes(ctx context.Context, container, program string) ([]Process, error) {
	if container == "" {
		container = "main"
	}
	s, err := p.State(ctx)
	if err != nil {
		return nil, err
	}
	id := s.Containers[container].ID
	if id == "" {
		return nil, fmt.Errorf("find the processes of container %s of pod %s: it was never started", container, p.Name)
	}
	dirs, err := filepath.Glob(p.node.File("/proc/[0-9]*"))
	if err != nil {
		return nil, err
	}
	var out []Process
	for _, dir := range dirs {
		// A process may end while it is looked at.
		groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		exe, _ := os.Readlink(filepath.Join(dir, "exe"))
		if !strings.Contains(string(groups), id) || program != "" && exe != program {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, err
		}
		if found, err := p.node.process(pid); err == nil {
			out = append(out, found)
		}
	}
	return out, nil
}

// IntoSandbox moves a process of the pod into the cgroups of the pod's sandbox, which
// the container runtime does not list among its containers.
func (p *RunningPod) IntoSandbox(ctx context.Context, of Process) error {
	out, err := p.node.Exec(ctx, "ctr", "--namespace", "k8s.io", "containers", "list", "--quiet", fmt.Sprintf(
		`labels."io.cri-containerd.kind"==sandbox,labels."io.kubernetes.pod.namespace"==%q,labels."io.kubernetes.pod.name"==%q`, PodNamespace, p.Name))
	if err != nil {
		return fmt.Errorf("find the sandbox of pod %s: %w", p.Name, err)
	}
	ids := strings.Fields(string(out))
	if len(ids) != 1 {
		return fmt.Errorf("find the sandbox of pod %s: the runtime has %q", p.Name, ids)
	}
	script := fmt.Sprintf(`set -e; n=0; for d in $(find /sys/fs/cgroup -type d -name '*%s*'); do echo %d > "$d/cgroup.procs"; n=$((n+1)); done; test $n -gt 0`, ids[0], of.PID)
	if out, err := p.node.Exec(ctx, "sh", "-c", script); err != nil {
		return fmt.Errorf("move %s into the sandbox of pod %s: %w: %s", of, p.Name, err, out)
	}
	return nil
}

// Signal sends a process of the node a signal by its name, such as STOP.
func (n *Node) Signal(ctx context.Context, p Process, signal string) error {
	if !n.Lives(p) {
		return fmt.Errorf("signal %s: there is no process of %s any more", signal, p)
	}
	_, err := n.Exec(ctx, "kill", "-"+signal, strconv.Itoa(p.PID))
	return err
}

// PodResourcesPace is how often the kubelet may be asked, by Offer and Holdings
// together, without taking the agent's turns: it limits PodResources to a hundred
// calls a second in all.
const PodResourcesPace = 25 * time.Millisecond

// Offer is, by resource, the IDs of the devices that the kubelet would hand out
// or has handed out: what it has understood of the plugins' lists, and holds for
// healthy. Its checkpoint, which says the same, may be older: two writers of it
// overtake each other.
func (n *Node) Offer(ctx context.Context) (map[string][]string, error) {
	return n.pods.Allocatable(ctx)
}

// Holdings are the devices that the kubelet says containers have.
func (n *Node) Holdings(ctx context.Context) ([]Holding, error) {
	l, err := n.pods.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []Holding
	for _, h := range l.Holdings {
		out = append(out, Holding{Pod: h.Pod, Container: h.Container, Resource: h.Resource, IDs: h.IDs})
	}
	return out, nil
}

// Holding is what a container has of one resource.
type Holding struct {
	Pod, Container, Resource string
	IDs                      []string
}
