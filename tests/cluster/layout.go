// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Layout is where everything lies that is built, downloaded or run:
//
//	bin/           programs, with a stamp each below bin/.stamps
//	debian/        unpacked Debian packages
//	images/        image archives
//	apt/           apt's lists and cache, apart from the host's
//	run/<name>/    one node
type Layout struct{ cache string }

func findLayout() (Layout, error) {
	cache := os.Getenv("GPU_TESTS_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return Layout{}, fmt.Errorf("find the cache: %w; set GPU_TESTS_CACHE", err)
		}
		cache = filepath.Join(dir, "gpu-agent")
	}
	cache, err := filepath.Abs(cache)
	if err != nil {
		return Layout{}, fmt.Errorf("find the cache: %w", err)
	}
	if strings.ContainsAny(cache, ":,\\ \n") {
		return Layout{}, fmt.Errorf("cache %q: mount options cannot carry a colon, comma, backslash or space; set GPU_TESTS_CACHE to another place", cache)
	}
	return Layout{cache: cache}, nil
}

func (l Layout) path(elem ...string) string {
	return filepath.Join(append([]string{l.cache}, elem...)...)
}

func (l Layout) bin(program string) string { return l.path("bin", program) }

func (l Layout) node(name string) Node { return Node{name: name, dir: l.path("run", name)} }

// nodes returns every node with a directory, by name.
func (l Layout) nodes() ([]Node, error) {
	entries, err := os.ReadDir(l.path("run"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var out []Node
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, l.node(e.Name()))
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].name < out[j].name })
	return out, nil
}

// running returns the node if it runs now.
func (l Layout) running(name string) (Node, error) {
	n := l.node(name)
	state, err := n.state()
	if err != nil || !state.alive() {
		return Node{}, fmt.Errorf("node %q does not run; 'cluster up --name %s' starts it", name, name)
	}
	return n, nil
}

// lock takes the named lock, waiting for whoever holds it. It is let go by the
// returned function or by the process's end.
func (l Layout) lock(name string) (unlock func(), err error) {
	dir := l.path("run")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", dir, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "."+name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the lock %s: %w", name, err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("take the lock %s: %w", name, err)
	}
	return func() { f.Close() }, nil
}

// Node is one node's directory:
//
//	spec.json    what was asked for
//	state.json   who runs it; there while the keeper lives
//	kubeconfig   administrator, by a port on the host's loopback
//	control      unix socket of the node's first process
//	logs/        a log for each process, and pods/
//	etc/         configuration, bind-mounted into the node's /etc
//	runtime/     the container runtime's layers, on the cache's own file system
//	root/        empty on the host; inside, where the node's root is put together
type Node struct{ name, dir string }

var nodeName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

func (n Node) path(elem ...string) string {
	return filepath.Join(append([]string{n.dir}, elem...)...)
}

func (n Node) log(process string) string { return n.path("logs", process+".log") }

// Spec is what a node was asked to be. It is written before anything starts.
type Spec struct {
	Name    string
	Cache   string
	Slot    int      // tells this node's subnets from other nodes': 0 to 254
	Binds   []string // directories of the host that are there inside too
	Labels  string   // k=v,...
	MaxPods int
	// PromptStatus has the kubelet look at its node every second, not every ten.
	PromptStatus bool
	// Kubernetes and Runtime are parts of other versions that the node is made of; "" is the
	// usual one.
	Kubernetes, Runtime string
	// EndsWith are processes with whose end, of the first of them, the node ends.
	EndsWith []identity
	// Join is the node whose control plane this one has; nil for one of its own.
	Join *Joined
	// Links maps paths in the node to what they point to: programs of other versions, and
	// libraries of programs in the cache that the host has not installed.
	Links map[string]string
}

// Joined is a node with a control plane, as one that joins it needs to know it.
type Joined struct {
	Name, NodeIP string
	Init         identity
	APIPort      int // as in State
}

// apiIP is the API server's address for the node.
func (s Spec) apiIP() string {
	if s.Join != nil {
		return s.Join.NodeIP
	}
	return s.nodeIP()
}

func (s Spec) nodeIP() string     { return fmt.Sprintf("10.200.%d.2", s.Slot) }
func (s Spec) gatewayIP() string  { return fmt.Sprintf("10.200.%d.1", s.Slot) }
func (s Spec) podCIDR() string    { return fmt.Sprintf("10.201.%d.0/24", s.Slot) }
func (s Spec) podGateway() string { return fmt.Sprintf("10.201.%d.1", s.Slot) }

const (
	serviceCIDR = "10.96.0.0/16"
	serviceIP   = "10.96.0.1" // that of the Service "kubernetes"
)

// cgroup is the node's parent in every hierarchy, relative to its mount point.
// The cache is part of its name: two of them may each have a node of one name.
func (s Spec) cgroup() string {
	return fmt.Sprintf("/gpu-agent-%s-%08x", s.Name, crc32.ChecksumIEEE([]byte(s.Cache)))
}

// identity names a process for as long as the machine runs, as PIDs are used again.
type identity struct {
	PID   int
	Start uint64 // clock ticks since boot, field 22 of /proc/PID/stat
}

func (id identity) alive() bool {
	if id.PID == 0 {
		return false
	}
	start, zombie, err := startTime(id.PID)
	return err == nil && !zombie && start == id.Start
}

func startTime(pid int) (ticks uint64, zombie bool, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false, err
	}
	// The command's name may hold anything, so count from its closing bracket.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 20 {
		return 0, false, fmt.Errorf("read /proc/%d/stat: %d fields after the name", pid, len(fields))
	}
	ticks, err = strconv.ParseUint(fields[19], 10, 64)
	return ticks, fields[0] == "Z", err
}

// ticksPerSecond is USER_HZ, in which /proc counts; it is the same on every
// machine that Go runs on.
const ticksPerSecond = 100

// ticksNow is the present in the ticks of identity.Start.
func ticksNow() uint64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		panic(err) // Linux has this clock since 2.6.39
	}
	return uint64(now.Nano() / (int64(time.Second) / ticksPerSecond))
}

func identify(pid int) (identity, error) {
	start, _, err := startTime(pid)
	return identity{PID: pid, Start: start}, err
}

// State is who runs a node, as the host sees it.
type State struct {
	Keeper, Init identity
	// Namespaces holds the links of /proc/<init>/ns by kind: "pid:[4026532201]".
	Namespaces map[string]string
	APIPort    int // on the host's loopback; 0 for a node that has joined another
	// Ended is when Init was first seen to have ended, in clock ticks since
	// boot; 0 while it runs. The kernel may give its namespaces' numbers to
	// others from then on.
	Ended uint64
}

// alive reports whether both processes that make a node run.
func (s State) alive() bool { return s.Keeper.alive() && s.Init.alive() }

func (n Node) state() (State, error) {
	var s State
	err := readJSON(n.path("state.json"), &s)
	return s, err
}

func (n Node) spec() (Spec, error) {
	var s Spec
	err := readJSON(n.path("spec.json"), &s)
	return s, err
}

func readJSON(file string, v any) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("parse %s: %w", file, err)
	}
	return nil
}

// writeJSON replaces file as a whole: readers see the old or the new one.
func writeJSON(file string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	temporary := file + ".new"
	if err := os.WriteFile(temporary, append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, file)
}

// waitGone waits until the process has ended, and reports whether it has.
func waitGone(id identity, limit time.Duration) bool {
	fd, err := unix.PidfdOpen(id.PID, 0)
	if err != nil {
		return !id.alive()
	}
	defer unix.Close(fd)
	if !id.alive() {
		return true
	}
	for deadline := time.Now().Add(limit); ; {
		left := time.Until(deadline)
		if left <= 0 {
			return !id.alive()
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if n > 0 {
			return true
		}
		if err != nil && err != unix.EINTR {
			return !id.alive()
		}
	}
}

// signal sends sig if the process is still the one that was meant.
func (id identity) signal(sig syscall.Signal) {
	fd, err := unix.PidfdOpen(id.PID, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if id.alive() {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // ended meanwhile: as wanted
	}
}
