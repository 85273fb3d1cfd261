// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package crash

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// change is a system call that changes what lies in a watched directory, or
// makes sure that it stays.
type change struct {
	call, path string
}

func (c change) String() string { return c.call + " " + c.path }

// shape says where a system call names what it changes.
type shape struct {
	name string
	// fd is the number of the argument that is an open file, path that of the
	// one that is a name, relative to the directory in argument at. -1: none;
	// at -1 is the working directory.
	fd, at, path int
	// flags is the argument with the flags of an open, which counts if they
	// create or empty a file; -1 for calls that always count.
	flags int
}

func onFile(name string, fd int) shape     { return shape{name, fd, -1, -1, -1} }
func onName(name string, at, p int) shape  { return shape{name, -1, at, p, -1} }
func opening(name string, at, p int) shape { return shape{name, -1, at, p, p + 1} }

// changing are the calls by which a program of this architecture changes a
// directory. Of the two names of a rename the new one counts, which is in the
// same directory for every file that is replaced at once.
var changing = map[uint32]shape{
	unix.SYS_OPEN:            opening("open", -1, 0),
	unix.SYS_OPENAT:          opening("openat", 0, 1),
	unix.SYS_CREAT:           onName("creat", -1, 0),
	unix.SYS_WRITE:           onFile("write", 0),
	unix.SYS_PWRITE64:        onFile("pwrite64", 0),
	unix.SYS_WRITEV:          onFile("writev", 0),
	unix.SYS_PWRITEV:         onFile("pwritev", 0),
	unix.SYS_PWRITEV2:        onFile("pwritev2", 0),
	unix.SYS_SENDFILE:        onFile("sendfile", 0),
	unix.SYS_SPLICE:          onFile("splice", 2),
	unix.SYS_COPY_FILE_RANGE: onFile("copy_file_range", 2),
	unix.SYS_FTRUNCATE:       onFile("ftruncate", 0),
	unix.SYS_FALLOCATE:       onFile("fallocate", 0),
	unix.SYS_FSYNC:           onFile("fsync", 0),
	unix.SYS_FDATASYNC:       onFile("fdatasync", 0),
	unix.SYS_FCHMOD:          onFile("fchmod", 0),
	unix.SYS_TRUNCATE:        onName("truncate", -1, 0),
	unix.SYS_CHMOD:           onName("chmod", -1, 0),
	unix.SYS_FCHMODAT:        onName("fchmodat", 0, 1),
	unix.SYS_MKDIR:           onName("mkdir", -1, 0),
	unix.SYS_MKDIRAT:         onName("mkdirat", 0, 1),
	unix.SYS_RMDIR:           onName("rmdir", -1, 0),
	unix.SYS_UNLINK:          onName("unlink", -1, 0),
	unix.SYS_UNLINKAT:        onName("unlinkat", 0, 1),
	unix.SYS_RENAME:          onName("rename", -1, 1),
	unix.SYS_RENAMEAT:        onName("renameat", 2, 3),
	unix.SYS_RENAMEAT2:       onName("renameat2", 2, 3),
	unix.SYS_LINK:            onName("link", -1, 1),
	unix.SYS_LINKAT:          onName("linkat", 2, 3),
	unix.SYS_SYMLINK:         onName("symlink", -1, 1),
	unix.SYS_SYMLINKAT:       onName("symlinkat", 1, 2),
	unix.SYS_MOUNT:           onName("mount", -1, 1),
	unix.SYS_UMOUNT2:         onName("umount2", -1, 0),
	unix.SYS_OPENAT2:         {"openat2", -1, 0, 1, 2},
}

// callFilter lets all calls pass but those of changing, which the tracer is
// asked about: a program under plain ptrace stops twice at each of its calls, which for a Go
// program with its many threads is slow enough to change what it does. Of opens the tracer is
// asked only about those that create or empty.
func callFilter() []unix.SockFilter {
	const (
		number  = 0  // offsets into struct seccomp_data
		arch    = 4  //
		args    = 16 // eight bytes each, the lower four first
		x86_64  = 0xc000003e
		bpfLoad = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		bpfIs   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		bpfHas  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	)
	allow := unix.SockFilter{Code: unix.BPF_RET, K: unix.SECCOMP_RET_ALLOW}
	trace := unix.SockFilter{Code: unix.BPF_RET, K: unix.SECCOMP_RET_TRACE}
	f := []unix.SockFilter{
		{Code: bpfLoad, K: arch},
		{Code: bpfIs, K: x86_64, Jt: 1},
		allow,
		{Code: bpfLoad, K: number},
	}
	for nr, s := range changing {
		if s.flags < 0 || nr == unix.SYS_OPENAT2 {
			f = append(f, unix.SockFilter{Code: bpfIs, K: nr, Jf: 1}, trace)
			continue
		}
		f = append(f,
			unix.SockFilter{Code: bpfIs, K: nr, Jf: 4},
			unix.SockFilter{Code: bpfLoad, K: uint32(args + 8*s.flags)},
			unix.SockFilter{Code: bpfHas, K: createsOrEmpties, Jf: 1},
			trace,
			allow)
	}
	return append(f, allow)
}

const createsOrEmpties = unix.O_CREAT | unix.O_TRUNC

// tracee is a program whose changes of some directories are counted.
type tracee struct {
	pid  int
	dirs []string
	// done is closed when the program and all that it started have ended;
	// status is then how it did.
	done   chan struct{}
	status syscall.WaitStatus
	pidfd  int

	mu sync.Mutex
	// Guarded by mu:
	changes []change // since arm, the one that was prevented included
	kill    int      // at the entry of which change to kill; 0: none
	killed  bool     // that has happened
	// strike, if set, is what happens at the change to kill at, instead of this program's
	// end: somebody else's.
	strike func()

	// disk is what the directories lie on; nil is one that never fails.
	disk *disk
}

// startTraced starts a program. Its output goes to a file. kill is as in arm, and strike and disk as
// in tracee: whoever starts a program to kill it may not be late.
func startTraced(argv []string, output *os.File, kill int, strike func(), on *disk, dirs ...string) (*tracee, error) {
	t := &tracee{done: make(chan struct{}), kill: kill, strike: strike, disk: on}
	for _, dir := range dirs {
		// The kernel names open files by their real paths.
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return nil, fmt.Errorf("watch a directory: %w", err)
		}
		t.dirs = append(t.dirs, real)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	started := make(chan error)
	go func() {
		// All requests to a tracee must come from the thread that started it,
		// and at that thread's end the kernel ends the tracee. So the thread is
		// never given back.
		runtime.LockOSThread()
		defer close(t.done)
		var err error
		t.pid, err = syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
			Env:   []string{"PATH=" + os.Getenv("PATH"), "HOME=/"},
			Files: []uintptr{null.Fd(), output.Fd(), output.Fd()},
			Sys:   &syscall.SysProcAttr{Ptrace: true, PidFD: &t.pidfd},
		})
		if err == nil {
			err = t.adopt()
		}
		started <- err
		if err == nil {
			t.follow()
			_ = unix.Close(t.pidfd)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s under ptrace: %w", argv[0], err)
	}
	return t, nil
}

// adopt waits for the program's first stop and says what it is to be stopped at.
func (t *tracee) adopt() error {
	var status unix.WaitStatus
	if _, err := unix.Wait4(t.pid, &status, unix.WALL, nil); err != nil {
		return fmt.Errorf("wait for its first stop: %w", err)
	}
	if !status.Stopped() {
		return fmt.Errorf("it ended before its first stop: status %#x", status)
	}
	const options = unix.PTRACE_O_EXITKILL | unix.PTRACE_O_TRACESECCOMP | unix.PTRACE_O_TRACEEXEC |
		unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK
	if err := unix.PtraceSetOptions(t.pid, options); err != nil {
		return fmt.Errorf("set ptrace's options: %w", err)
	}
	if err := filterCalls(t.pid); err != nil {
		_ = unix.Kill(t.pid, unix.SIGKILL) // it stands still
		_, _ = unix.Wait4(t.pid, &status, unix.WALL, nil)
		return fmt.Errorf("filter its system calls: %w", err)
	}
	return unix.PtraceCont(t.pid, 0)
}

// filterCalls has a program that has just been started, and has one thread yet, make the calls
// that filter its system calls: they are written over what it would do first, and that is put
// back.
func filterCalls(pid int) error {
	var before unix.PtraceRegsAmd64
	if err := unix.PtraceGetRegsAmd64(pid, &before); err != nil {
		return err
	}
	// syscall, and int3, at which it stops.
	call, code := []byte{0x0f, 0x05, 0xcc}, make([]byte, 3)
	if _, err := unix.PtracePeekText(pid, uintptr(before.Rip), code); err != nil {
		return err
	}
	if _, err := unix.PtracePokeText(pid, uintptr(before.Rip), call); err != nil {
		return err
	}
	// Below its stack, and what lies within reach below that: struct sock_fprog, and the filter.
	var data []byte
	filter := callFilter()
	at := (before.Rsp - 4096 - uint64(len(filter))*unix.SizeofSockFilter) &^ 15
	data = binary.LittleEndian.AppendUint64(data, uint64(len(filter)))
	data = binary.LittleEndian.AppendUint64(data, at+unix.SizeofSockFprog)
	for _, f := range filter {
		data = binary.LittleEndian.AppendUint16(data, f.Code)
		data = append(data, f.Jt, f.Jf)
		data = binary.LittleEndian.AppendUint32(data, f.K)
	}
	if _, err := unix.PtracePokeData(pid, uintptr(at), data); err != nil {
		return err
	}
	for _, args := range [][3]uint64{{unix.PR_SET_NO_NEW_PRIVS, 1, 0}, {unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, at}} {
		regs := before
		regs.Rax, regs.Rdi, regs.Rsi, regs.Rdx, regs.R10, regs.R8 = unix.SYS_PRCTL, args[0], args[1], args[2], 0, 0
		regs.Orig_rax = ^uint64(0) // it is in no call that could begin anew
		if err := unix.PtraceSetRegsAmd64(pid, &regs); err != nil {
			return err
		}
		if err := unix.PtraceCont(pid, 0); err != nil {
			return err
		}
		var status unix.WaitStatus
		if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
			return err
		}
		if status.StopSignal() != unix.SIGTRAP {
			return fmt.Errorf("it has the status %#x", status)
		}
		if err := unix.PtraceGetRegsAmd64(pid, &regs); err != nil {
			return err
		}
		if regs.Rax != 0 {
			return syscall.Errno(-regs.Rax)
		}
	}
	if _, err := unix.PtracePokeText(pid, uintptr(before.Rip), code); err != nil {
		return err
	}
	before.Orig_rax = ^uint64(0)
	return unix.PtraceSetRegsAmd64(pid, &before)
}

// follow passes the program's threads, and the programs that it starts, on from
// stop to stop until all have ended.
func (t *tracee) follow() {
	known := map[int]bool{t.pid: true}
	for {
		var status unix.WaitStatus
		// Of this thread's children alone: others belong to others.
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return // ECHILD: nothing is left
		}
		if !status.Stopped() {
			if delete(known, tid); tid == t.pid {
				t.status = syscall.WaitStatus(status)
			}
			continue
		}
		signal := int(status.StopSignal())
		switch {
		case status.TrapCause() == unix.PTRACE_EVENT_SECCOMP:
			t.meet(tid, known)
			signal = 0
		case status.TrapCause() > 0:
			signal = 0
		case status.StopSignal() == unix.SIGSTOP && !known[tid]:
			signal = 0 // how a new thread presents itself
		}
		known[tid] = true
		// A thread may have been killed meanwhile, and says so at the next wait.
		_ = unix.PtraceCont(tid, signal)
	}
}

// meet is told of a thread that stands before a call of changing.
func (t *tracee) meet(tid int, known map[int]bool) {
	var regs unix.PtraceRegsAmd64
	if err := unix.PtraceGetRegsAmd64(tid, &regs); err != nil {
		return // killed meanwhile
	}
	s := changing[uint32(regs.Orig_rax)]
	path, ok := where(tid, s, &regs)
	if !ok || !t.watched(path) || idle(s, path) {
		return
	}
	c := change{s.name, path}
	if t.note(c) {
		for other := range known {
			_ = unix.Kill(other, unix.SIGKILL) // it may have ended
		}
	} else if errno := t.disk.refuses(c); errno != 0 {
		regs.Orig_rax, regs.Rax = ^uint64(0), -uint64(errno) // the call is not made, and returns this
		_ = unix.PtraceSetRegsAmd64(tid, &regs)              // it may have been killed
	}
}

// idle reports whether a call changes nothing, since what it is to remove is not there. Such
// are those that make sure of that before another call.
func idle(s shape, path string) bool {
	switch s.name {
	case "unlink", "unlinkat", "rmdir":
		_, err := os.Lstat(path)
		return errors.Is(err, fs.ErrNotExist)
	}
	return false
}

// note counts a change, and reports whether it is this program's last: the one to kill it
// at. Where somebody else is to be struck instead, it does that. After the one to kill at
// nothing is counted.
func (t *tracee) note(c change) (last bool) {
	t.mu.Lock()
	if t.killed {
		t.mu.Unlock()
		return false
	}
	t.changes = append(t.changes, c)
	t.killed = len(t.changes) == t.kill
	hit, strike := t.killed, t.strike
	t.mu.Unlock()
	if hit && strike != nil {
		strike()
	}
	return hit && strike == nil
}

// where works out what a call is about. ok is false where it is nothing that
// could be watched.
func where(tid int, s shape, regs *unix.PtraceRegsAmd64) (path string, ok bool) {
	args := [...]uint64{regs.Rdi, regs.Rsi, regs.Rdx, regs.R10, regs.R8, regs.R9}
	link := func(name string) (string, bool) {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", tid, name))
		return strings.TrimSuffix(to, " (deleted)"), err == nil && filepath.IsAbs(to)
	}
	if s.fd >= 0 {
		return link(fmt.Sprintf("fd/%d", int32(args[s.fd])))
	}
	if s.name == "openat2" {
		// struct open_how starts with 64 bits of flags.
		how := make([]byte, 8)
		if n, err := unix.PtracePeekData(tid, uintptr(args[s.flags]), how); err != nil || n != len(how) ||
			binary.LittleEndian.Uint64(how)&createsOrEmpties == 0 {
			return "", false
		}
	}
	name := text(tid, uintptr(args[s.path]))
	if name == "" {
		return "", false
	}
	if filepath.IsAbs(name) {
		return filepath.Clean(name), true
	}
	base, ok := "", false
	if s.at < 0 || int32(args[s.at]) == unix.AT_FDCWD {
		base, ok = link("cwd")
	} else {
		base, ok = link(fmt.Sprintf("fd/%d", int32(args[s.at])))
	}
	return filepath.Join(base, name), ok
}

// text reads a string of C's out of a stopped thread.
func text(tid int, at uintptr) string {
	var out []byte
	word := make([]byte, 8)
	for len(out) < unix.PathMax {
		if n, err := unix.PtracePeekData(tid, at, word); err != nil || n != len(word) {
			return ""
		}
		if end := slices.Index(word, 0); end >= 0 {
			return string(append(out, word[:end]...))
		}
		out, at = append(out, word...), at+uintptr(len(word))
	}
	return ""
}

func (t *tracee) watched(path string) bool {
	return slices.ContainsFunc(t.dirs, func(dir string) bool {
		return path == dir || strings.HasPrefix(path, dir+"/")
	})
}

// arm counts from now on, and kills at the entry of the k-th change; at none
// with k = 0. strike, if it is given, happens then instead.
func (t *tracee) arm(k int, strike func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// After its own end it is another process that counts.
	t.killed = t.killed && t.strike == nil
	t.changes, t.kill, t.strike = nil, k, strike
}

// mayEnd reports whether the program's end is what its kill has made of it.
func (t *tracee) mayEnd() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.killed && t.strike == nil
}

// seen returns the changes since arm, and whether the last of them was the one
// to kill at.
func (t *tracee) seen() (changes []change, killed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.changes), t.killed
}

// end ends the program at once and waits for that.
func (t *tracee) end() {
	select {
	case <-t.done:
		return
	default:
	}
	_ = unix.PidfdSendSignal(t.pidfd, unix.SIGKILL, nil, 0) // it may have ended
	<-t.done
}
