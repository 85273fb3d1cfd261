// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// roleEnv in the environment makes a program a container's first process.
const roleEnv = "GPU_TESTS_CAPSULE"

// Main is what a program calls before anything else in order to use this
// package: in a container's first process it never returns.
func Main() {
	if os.Getenv(roleEnv) == "" {
		return
	}
	if err := firstProcess(); err != nil {
		fmt.Fprintln(os.Stderr, "container:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// layout is what the first process is told to lay.
type layout struct {
	Work  string // an empty folder of the machine, for mounts to start from
	Edits specs.ContainerEdits
	Files map[string][]byte // regular files of the image, by path
	Links map[string]string // target by path
}

// order asks the first process to start a program, whose standard input,
// output and errors come with the message, or to send a signal.
type order struct {
	Args   []string
	Env    []string
	PID    int
	Signal int
}

// report tells of the layout (PID 0), of a start, or of an end.
type report struct {
	PID    int
	Error  string
	Ended  bool
	Status uint32 // as wait(2) gives it
}

const maxOrder = 64 << 10

func firstProcess() error {
	const control = 3
	unix.CloseOnExec(control)
	buf := make([]byte, maxOrder)
	var sending sync.Mutex
	send := func(r report) error {
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		sending.Lock()
		defer sending.Unlock()
		return unix.Send(control, data, unix.MSG_NOSIGNAL)
	}
	// A layout can be longer than a message: it comes in a file.
	data, err := os.ReadFile("/proc/self/fd/4")
	if err != nil {
		return fmt.Errorf("read layout: %w", err)
	}
	unix.Close(4)
	var l layout
	if err := json.Unmarshal(data, &l); err != nil {
		return fmt.Errorf("read layout: %w", err)
	}
	if err := l.lay(); err != nil {
		return errors.Join(send(report{Error: err.Error()}))
	}
	if err := send(report{}); err != nil {
		return err
	}

	// Whoever waits for a PID must know it first.
	var starting sync.Mutex
	dead := make(chan os.Signal, 1)
	signal.Notify(dead, unix.SIGCHLD)
	go func() {
		for range dead {
			for {
				var status unix.WaitStatus
				starting.Lock()
				pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
				starting.Unlock()
				if err == unix.EINTR {
					continue
				}
				if err != nil || pid == 0 {
					break
				}
				send(report{PID: pid, Ended: true, Status: uint32(status)})
			}
		}
	}()
	oob := make([]byte, unix.CmsgSpace(3*4))
	for {
		n, on, _, _, err := unix.Recvmsg(control, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return nil // the test is over
		}
		var o order
		if err := json.Unmarshal(buf[:n], &o); err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		if o.Signal != 0 {
			// Gone already is as good.
			unix.Kill(o.PID, unix.Signal(o.Signal))
			continue
		}
		fds, err := descriptors(oob[:on])
		if err != nil {
			return err
		}
		starting.Lock()
		pid, err := syscall.ForkExec(o.Args[0], o.Args, &syscall.ProcAttr{
			Dir: "/", Env: o.Env, Files: []uintptr{uintptr(fds[0]), uintptr(fds[1]), uintptr(fds[2])},
		})
		r := report{PID: pid}
		if err != nil {
			r.Error = fmt.Sprintf("start %s: %v", o.Args[0], err)
		}
		err = send(r)
		starting.Unlock()
		for _, fd := range fds {
			unix.Close(fd)
		}
		if err != nil {
			return nil
		}
	}
}

func descriptors(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("read order: %w", err)
	}
	var fds []int
	for _, m := range messages {
		some, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, fmt.Errorf("read order: %w", err)
		}
		fds = append(fds, some...)
	}
	if len(fds) != 3 {
		return nil, fmt.Errorf("read order: %d descriptors, want 3", len(fds))
	}
	return fds, nil
}

// lay makes the container's root the process's own.
func (l *layout) lay() error {
	const old = "/.machine"
	root := filepath.Join(l.Work, "root")
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"keep the machine's mounts out of it", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"mount the changes", func() error { return unix.Mount("capsule", l.Work, "tmpfs", 0, "mode=0755") }},
		{"make folders", func() error {
			return errors.Join(os.Mkdir(root, 0o755), os.Mkdir(filepath.Join(l.Work, "upper"), 0o755), os.Mkdir(filepath.Join(l.Work, "work"), 0o755))
		}},
		{"mount the image", func() error {
			return unix.Mount("capsule", root, "overlay", 0, "lowerdir=/,upperdir="+l.Work+"/upper,workdir="+l.Work+"/work")
		}},
		{"mount /proc", func() error {
			return unix.Mount("proc", root+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}},
		{"bind /sys", func() error { return unix.Mount("/sys", root+"/sys", "", unix.MS_BIND|unix.MS_REC, "") }},
		{"mount /dev", func() error { return unix.Mount("dev", root+"/dev", "tmpfs", unix.MS_NOSUID, "mode=0755") }},
		{"mount /tmp", func() error {
			return unix.Mount("tmp", root+"/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
		}},
		{"mount /run", func() error {
			return unix.Mount("run", root+"/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
		}},
		{"make the usual devices", func() error { return devices(root + "/dev") }},
		{"change root", func() error {
			return errors.Join(os.Mkdir(root+old, 0o700), unix.PivotRoot(root, root+old), os.Chdir("/"))
		}},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	for name, data := range l.Files {
		if err := place(name); err != nil {
			return err
		}
		if err := os.WriteFile(name, data, 0o755); err != nil {
			return fmt.Errorf("put file into the image: %w", err)
		}
	}
	for _, d := range l.Edits.DeviceNodes {
		if err := place(d.Path); err != nil {
			return err
		}
		number, err := numberOf(old, d)
		if err != nil {
			return err
		}
		if err := unix.Mknod(d.Path, unix.S_IFCHR|0o666, number); err != nil {
			return fmt.Errorf("make device node %s: %w", d.Path, err)
		}
		if err := os.Chmod(d.Path, 0o666); err != nil {
			return fmt.Errorf("make device node: %w", err)
		}
	}
	for _, m := range l.Edits.Mounts {
		if err := mount(old, m); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.HostPath, m.ContainerPath, err)
		}
	}
	for name, target := range l.Links {
		if err := place(name); err != nil {
			return err
		}
		if err := os.Symlink(target, name); err != nil {
			return fmt.Errorf("make link: %w", err)
		}
	}
	if err := hooks(l.Edits.Hooks); err != nil {
		return err
	}
	if err := unix.Unmount(old, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the machine's root: %w", err)
	}
	return os.Remove(old)
}

// place makes room for a file. One that is mounted there stays below what comes.
func place(name string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("make room for %s: %w", name, err)
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("make room for %s: %w", name, err)
	}
	return nil
}

func devices(dev string) error {
	for name, minor := range map[string]uint32{"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9} {
		name = filepath.Join(dev, name)
		if err := unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))); err != nil {
			return err
		}
		if err := os.Chmod(name, 0o666); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	if err := os.Mkdir(filepath.Join(dev, "shm"), 0o1777); err != nil {
		return err
	}
	return unix.Mount("shm", filepath.Join(dev, "shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
}

var mountFlags = map[string]uintptr{
	"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC,
	"rw": 0, "bind": 0, "rbind": 0, "private": 0, "rprivate": 0,
}

// mount lays one mount of a CDI file; the machine's own root is at old.
func mount(old string, m *specs.Mount) error {
	var flags uintptr
	for _, o := range m.Options {
		f, ok := mountFlags[o]
		if !ok || m.Type != "" && m.Type != "bind" {
			return fmt.Errorf("options %q, type %q: not known here", m.Options, m.Type)
		}
		flags |= f
	}
	from := filepath.Join(old, m.HostPath)
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	if st.IsDir() {
		err = os.MkdirAll(m.ContainerPath, 0o755)
	} else if err = place(m.ContainerPath); err == nil {
		err = unix.Mknod(m.ContainerPath, unix.S_IFREG|0o644, 0)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	bind := uintptr(unix.MS_BIND)
	if slices.Contains(m.Options, "rbind") {
		bind |= unix.MS_REC
	}
	if err := unix.Mount(from, m.ContainerPath, "", bind, ""); err != nil {
		return err
	}
	if flags == 0 {
		return nil
	}
	return unix.Mount("", m.ContainerPath, "", unix.MS_BIND|unix.MS_REMOUNT|flags, "")
}
