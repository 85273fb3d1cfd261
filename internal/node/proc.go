// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// Owner is the container of a process.
type Owner struct {
	// ID is the runtime's ID of the container, as in Container.ID, and PodUID the kubelet's ID of
	// its pod, as in Container.PodUID.
	ID, PodUID string
	// Cgroup is the path of the container's own cgroup below its hierarchy's root, as the host sees
	// it; empty if it cannot be told. V2 is true if that is the unified hierarchy.
	Cgroup string
	V2     bool
	// Start is when the process began, in clock ticks since boot. PID and Start together identify a
	// process.
	Start uint64
}

// Proc is the host's /proc. It is safe for several goroutines.
type Proc struct {
	root string

	mu sync.Mutex // guards what follows
	// entries has the processes that were asked for lately, by PID.
	entries map[int]*entry
	swept   uint64 // the tick at which the unused ones were last dropped
}

// entry is what was found about a process. Reading the files of /proc costs some 25 µs, and the
// watchdog asks for the same processes several times a second. Checking whether a process still
// lives costs a tenth of that. No process leaves its container.
type entry struct {
	dir   int // its directory, which becomes empty when it is reaped
	owner Owner
	err   error // set if the process is in no pod's container
	asked uint64
}

const (
	// keepFor is how long a process is remembered after it was last asked for, in ticks. maxEntries
	// is the most that are remembered: each keeps a descriptor open.
	keepFor    = 10 * ticksPerSecond
	maxEntries = 1024
)

// NewProc returns the /proc at root, which it does not read yet; empty means "/proc". It must be
// that of the caller's own PID namespace.
func NewProc(root string) *Proc {
	return &Proc{root: cmp.Or(root, "/proc"), entries: map[int]*entry{}}
}

// Close forgets all processes and closes their descriptors. A later question remembers them again.
func (p *Proc) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweepLocked(func(*entry) bool { return true })
	return nil
}

func (p *Proc) sweepLocked(drop func(*entry) bool) {
	for pid, l := range p.entries {
		if drop(l) {
			unix.Close(l.dir)
			delete(p.entries, pid)
		}
	}
}

// ticksPerSecond is the kernel's USER_HZ, the same on all platforms that have a driver.
const ticksPerSecond = 100

// Ticks returns the time since boot in the unit of Owner.Start; zero if the clock fails.
func Ticks() uint64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return uint64(now.Sec)*ticksPerSecond + uint64(now.Nsec)/(1e9/ticksPerSecond)
}

// Container returns the container of a process. The error wraps gpu.ErrNotFound if there is no such
// process, or if it is in no pod's container. In the latter case Owner.Start is set, and also
// Owner.PodUID if the process is in a pod's cgroup.
//
// The whole answer is about one process, which existed at the call: its directory is opened once,
// and becomes empty when the process is reaped.
func (p *Proc) Container(pid int) (Owner, error) {
	now := Ticks()
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.entries[pid]; l != nil {
		// The directory of a reaped process is empty. Until it is reaped, no other process has its
		// PID.
		if unix.Faccessat(l.dir, "stat", unix.F_OK, 0) == nil {
			l.asked = now
			return l.owner, l.err
		}
		unix.Close(l.dir)
		delete(p.entries, pid)
	}
	l, err := p.read(pid)
	if err != nil {
		return Owner{}, err
	}
	if now-p.swept > keepFor {
		p.sweepLocked(func(l *entry) bool { return now-l.asked > keepFor })
		p.swept = now
	}
	if len(p.entries) >= maxEntries {
		p.sweepLocked(func(*entry) bool { return true })
	}
	l.asked = now
	p.entries[pid] = l
	return l.owner, l.err
}

// read asks /proc about a process.
func (p *Proc) read(pid int) (*entry, error) {
	dir, err := p.open(pid)
	if err != nil {
		return nil, err
	}
	l := &entry{dir: dir}
	start, err := startTime(dir)
	if err == nil {
		var list []byte
		if list, err = readAt(dir, "cgroup"); err == nil {
			l.owner, l.err = ownerOf(list)
		}
	}
	if err != nil {
		unix.Close(dir)
		return nil, p.failed(pid, err)
	}
	if l.err != nil {
		l.err = fmt.Errorf("container of process %d: %w", pid, l.err)
	}
	l.owner.Start = start
	return l, nil
}

// Same reports whether a process is still the one that Container found, and still in that
// container. Callers ask it just before a kill. It does not use remembered answers.
func (p *Proc) Same(pid int, o Owner) bool {
	l, err := p.read(pid)
	if err != nil {
		return false
	}
	unix.Close(l.dir)
	return l.err == nil && o.Start != 0 && l.owner.Start == o.Start && l.owner.ID == o.ID
}

// open returns a descriptor of a process's directory. When the process is gone, the directory is
// empty, also if another process has got its PID.
func (p *Proc) open(pid int) (int, error) {
	dir, err := ignoringEINTR(func() (int, error) {
		return unix.Open(p.root+"/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return -1, p.failed(pid, err)
	}
	return dir, nil
}

func (p *Proc) failed(pid int, err error) error {
	// ESRCH: the process ended after its directory was opened.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("process %d: not in %s", pid, p.root)}
	}
	return fmt.Errorf("look at process %d in %s: %w", pid, p.root, err)
}

// maxProcFile is the most that is read of a process's file, in bytes. Cgroup v1 has a path for each
// of a dozen hierarchies.
const maxProcFile = 64 << 10

// readAt reads a file of a directory.
func readAt(dir int, name string) ([]byte, error) {
	fd, err := ignoringEINTR(func() (int, error) {
		return unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	})
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), name)
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxProcFile+1))
	if err == nil && len(data) > maxProcFile {
		err = fmt.Errorf("%s has more than %d bytes", name, maxProcFile)
	}
	return data, err
}

func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}

// startTime reads field 22 of a process's stat, as in proc(5).
func startTime(dir int) (uint64, error) {
	stat, err := readAt(dir, "stat")
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may itself have parentheses and spaces. The third field follows it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= 22-3 {
		return 0, io.ErrUnexpectedEOF
	}
	start, err := strconv.ParseUint(string(fields[22-3]), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("stat has no start time: %w", err)
	}
	return start, nil
}

// ofNoPod returns the error for a process that is in no container of a pod.
func ofNoPod(why string) error {
	return &failure{is: gpu.ErrNotFound, text: "of no pod: " + why}
}

// ownerOf finds the container in a process's cgroup file. It prefers the unified hierarchy. All
// hierarchies that name a container must name the same.
func ownerOf(list []byte) (Owner, error) {
	var found Owner
	var line, last []byte
	named, pod := false, ""
	for len(list) > 0 {
		line, list, _ = bytes.Cut(list, []byte{'\n'})
		// hierarchy ID, controllers, and a path that may contain colons
		id, rest, ok := bytes.Cut(line, []byte{':'})
		if !ok {
			continue
		}
		_, path, ok := bytes.Cut(rest, []byte{':'})
		v2 := string(id) == "0"
		if !ok || bytes.Equal(path, last) && !v2 { // v1 repeats one path a dozen times
			continue
		}
		last = path
		o, ok := ownerByPath(path)
		if !ok {
			pod = cmp.Or(pod, o.PodUID)
			continue
		}
		o.V2 = v2
		if named && (o.ID != found.ID || o.PodUID != found.PodUID) {
			return Owner{}, ofNoPod(fmt.Sprintf("its cgroups are of container %s and of %s", found.ID, o.ID))
		}
		// The paths of v1 may differ by hierarchy; any of them will do.
		if !named || o.V2 {
			found, named = o, true
		}
	}
	if !named && pod != "" {
		return Owner{PodUID: pod}, ofNoPod("it is in a cgroup of pod " + pod + " and in no container's")
	}
	if !named {
		return Owner{}, ofNoPod("none of its cgroups is that of a pod's container")
	}
	return found, nil
}

// ownerByPath finds pod and container in the path of a cgroup. It trusts only the first pod's
// segment from the root, which the kubelet made, and the segment right below it, which the runtime
// made. The container named everything further down.
func ownerByPath(path []byte) (Owner, bool) {
	if !bytes.Contains(path, []byte("pod")) {
		return Owner{}, false
	}
	// A cgroup that was deleted under its last process has this suffix.
	segments := strings.Split(strings.TrimSuffix(string(path), " (deleted)"), "/")
	upTo := func(i int) string { return strings.Join(segments[:i+1], "/") }
	kubelets := false // the segment before is one of the kubelet's own
	for i, segment := range segments {
		uid := ""
		switch {
		case strings.Contains(segment, ".slice:"):
			// runc with the path of the systemd driver but without that driver: slice, prefix and
			// container in one segment.
			slice, rest, _ := strings.Cut(segment, ":")
			uid = podOfSlice(slice)
			_, name, _ := strings.Cut(rest, ":")
			if uid != "" {
				return owner(uid, containerID(name), upTo(i))
			}
		case strings.HasSuffix(segment, ".slice"):
			uid = podOfSlice(segment)
		case kubelets && strings.HasPrefix(segment, "pod"):
			uid = podUID(segment[len("pod"):])
		}
		if uid != "" && i+1 < len(segments) {
			return owner(uid, containerID(segments[i+1]), upTo(i+1))
		}
		if uid != "" {
			return Owner{PodUID: uid}, false // in the pod's cgroup and in no container
		}
		kubelets = segment == "kubepods" || kubelets && (segment == "burstable" || segment == "besteffort")
	}
	return Owner{}, false
}

func owner(uid, id, path string) (Owner, bool) {
	if id == "" {
		return Owner{PodUID: uid}, false
	}
	// In a cgroup namespace, the paths of other cgroups begin with "..". From where is unknown.
	if strings.HasPrefix(path, "/..") {
		path = ""
	}
	return Owner{ID: id, PodUID: uid, Cgroup: path}, true
}

// podOfSlice returns the pod's UID in the name of one of the kubelet's slices, such as
// kubepods-burstable-pod1234_5678.slice; empty for any other slice. If the kubelet has a cgroup
// root of its own, its name comes first. In names the kubelet writes - as _.
func podOfSlice(slice string) string {
	name, ok := strings.CutSuffix(slice, ".slice")
	if !ok {
		return ""
	}
	i := strings.LastIndex(name, "-pod")
	if i < 0 {
		return ""
	}
	parent, uid := name[:i], name[i+len("-pod"):]
	parent = strings.TrimSuffix(strings.TrimSuffix(parent, "-burstable"), "-besteffort")
	if parent != "kubepods" && !strings.HasSuffix(parent, "-kubepods") {
		return ""
	}
	return podUID(strings.ReplaceAll(uid, "_", "-"))
}

// podUID returns uid if it can be one, else "". The API server's are UUIDs. Those of static pods
// are 32 hex digits, or what their author wrote.
func podUID(uid string) string {
	if len(uid) == 0 || len(uid) > 64 {
		return ""
	}
	for _, c := range []byte(uid) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' {
			return ""
		}
	}
	return uid
}

// idLength is the length of a container's ID with all runtimes that speak the CRI: 32 random bytes
// in hex.
const idLength = 64

// containerID returns the container's ID in the name of its cgroup, or "": <id>,
// cri-containerd-<id>.scope, docker-<id>.scope, crio-<id>. CRI-O's crio-conmon-<id>.scope is that
// of the process that watches the container.
func containerID(name string) string {
	name = strings.TrimSuffix(name, ".scope")
	if len(name) < idLength {
		return ""
	}
	prefix, id := name[:len(name)-idLength], name[len(name)-idLength:]
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return ""
		}
	}
	if prefix != "" && !strings.HasSuffix(prefix, "-") || strings.HasSuffix(prefix, "conmon-") {
		return ""
	}
	return id
}

// initialPIDNamespace is the inode of the kernel's first PID namespace: PROC_PID_INIT_INO of
// include/linux/proc_ns.h. User space has no other sign of it.
const initialPIDNamespace = "pid:[4026531836]"

// SeesNode returns nil if the agent sees all processes of the node. It does so in the kernel's
// first PID namespace, and in that of the container runtime; a node that is itself a container has
// its own. The driver reports nothing about processes outside the namespace, as if there were none.
//
// An error that wraps gpu.ErrNotSupported says what to set.
func (p *Proc) SeesNode(r *Runtime) error {
	own, err := os.Readlink(filepath.Join(p.root, "self/ns/pid"))
	if err != nil {
		return fmt.Errorf("find the PID namespace of this process: %w", err)
	}
	if own == initialPIDNamespace {
		return nil
	}
	pid, socket, err := r.peer()
	if err != nil {
		return fmt.Errorf("find whether the container runtime is in this PID namespace: %w", err)
	}
	const remedy = "set hostPID: true in the agent's pod, and let its --proc-root be the /proc that it sees there"
	if pid == 0 {
		return &failure{is: gpu.ErrNotSupported,
			text: fmt.Sprintf("%s is not the node's: the container runtime at %s is outside of it; %s",
				own, socket, remedy)}
	}
	for _, name := range []string{"self", strconv.Itoa(pid)} {
		depth, err := p.depth(name)
		if err != nil {
			return fmt.Errorf("find whether the container runtime is in this PID namespace: %w", err)
		}
		if depth != 1 {
			return &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf(
				"%s is not the one of %s in %s (the container runtime's process is %d); %s",
				own, name, p.root, pid, remedy)}
		}
	}
	return nil
}

// Inside returns a process's PID namespace, by its number, and its PID there. That needs the right
// to trace the process; otherwise the error wraps gpu.ErrNoPermission.
func (p *Proc) Inside(pid int) (namespace, inner uint64, err error) {
	dir, err := p.open(pid)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(dir)
	var st unix.Stat_t
	if err := unix.Fstatat(dir, "ns/pid", &st, 0); errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return 0, 0, &failure{gpu.ErrNoPermission, fmt.Sprintf("find the PID namespace of process %d", pid), err}
	} else if err != nil {
		return 0, 0, p.failed(pid, err)
	}
	status, err := readAt(dir, "status")
	if err != nil {
		return 0, 0, p.failed(pid, err)
	}
	pids := nsPIDs(status)
	if len(pids) == 0 {
		return 0, 0, &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf("process %d has no NSpid: "+
			"Linux 4.1 or later is needed", pid)}
	}
	if inner, err = strconv.ParseUint(string(pids[len(pids)-1]), 10, 32); err != nil {
		return 0, 0, fmt.Errorf("NSpid of process %d: %w", pid, err)
	}
	return st.Ino, inner, nil
}

// nsPIDs returns a process's PIDs in its namespaces, from the namespace of this /proc downwards.
func nsPIDs(status []byte) [][]byte {
	for line := range bytes.Lines(status) {
		if pids, ok := bytes.CutPrefix(line, []byte("NSpid:")); ok {
			return bytes.Fields(pids)
		}
	}
	return nil
}

// depth returns the number of PID namespaces that a process is in, from the namespace of this /proc
// downwards: 1 means only that one. Unlike the link in ns/, every user may read it.
func (p *Proc) depth(process string) (int, error) {
	path := filepath.Join(p.root, process, "status")
	status, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	if pids := nsPIDs(status); len(pids) > 0 {
		return len(pids), nil
	}
	return 0, &failure{is: gpu.ErrNotSupported, text: path + " has no NSpid: Linux 4.1 or later is needed"}
}
