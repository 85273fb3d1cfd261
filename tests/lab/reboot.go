// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const bootID = "/proc/sys/kernel/random/boot_id"

// volatile is what a machine's start finds empty, of all that pods, the runtime
// and the agent leave there.
var volatile = []string{"/run/containerd", "/run/cdi", "/run/netns", "/dev/nvidia-caps"}

// Reboot does to the node what a loss of power and a new start do to a machine
// whose cluster goes on without it: the kubelet, the runtime and all containers
// end at once, what is on disk stays, what is in /run goes, and the kernel has
// another boot ID. off is called while nothing of it runs, for whatever loses its
// state too, such as the GPUs. It returns when the new kubelet has spoken.
func (n *Node) Reboot(ctx context.Context, off func(context.Context) error) error {
	old, err := n.State(ctx)
	if err != nil {
		return fmt.Errorf("reboot the node: %w", err)
	}
	for _, step := range []func(context.Context) error{
		func(ctx context.Context) error { return n.Kill(ctx, Kubelet) },
		func(ctx context.Context) error { return n.Kill(ctx, Containerd) },
		n.endContainers,
		n.emptyRun,
		n.removeCgroups,
		n.newBoot,
		off,
		func(ctx context.Context) error { return n.StartAgain(ctx, Containerd) },
		n.runtimeAnswers,
		func(ctx context.Context) error { return n.StartAgain(ctx, Kubelet) },
		func(ctx context.Context) error { return n.newWord(ctx, old.Heartbeat) },
	} {
		if err := step(ctx); err != nil {
			return fmt.Errorf("reboot the node: %w", err)
		}
	}
	return nil
}

// runtimeAnswers waits for the container runtime's socket: a kubelet that does not
// find it ends, and nobody here starts it again as a user's machine would.
func (n *Node) runtimeAnswers(ctx context.Context) error {
	return Await(ctx, time.Minute, "the container runtime", func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", n.File("/run/"+n.runtime+"/"+n.runtime+".sock"))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// endContainers kills every process of a pod's, and those that hold them.
func (n *Node) endContainers(ctx context.Context) error {
	return Await(ctx, 30*time.Second, "the end of all containers", func(ctx context.Context) error {
		dirs, err := filepath.Glob(n.File("/proc/[0-9]*"))
		if err != nil {
			return err
		}
		var pids []string
		for _, dir := range dirs {
			pid, err := strconv.Atoi(filepath.Base(dir))
			if err != nil {
				return err
			}
			// A process may end while it is looked at.
			program, _ := os.Readlink(filepath.Join(dir, "exe"))
			groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
			if filepath.Base(program) != "containerd-shim-runc-v2" && !strings.Contains(string(groups), "kubepods") {
				continue
			}
			if _, err := n.process(pid); err == nil {
				pids = append(pids, strconv.Itoa(pid))
			}
		}
		if len(pids) == 0 {
			return nil
		}
		_, err = n.Exec(ctx, append([]string{"kill", "-KILL"}, pids...)...)
		return errors.Join(fmt.Errorf("there are the processes %s", strings.Join(pids, " ")), err)
	})
}

// emptyRun takes away what does not outlive a machine's end: what containers had
// mounted, and the files of volatile.
func (n *Node) emptyRun(ctx context.Context) error {
	mounts, err := os.ReadFile(n.File("/proc/1/mountinfo"))
	if err != nil {
		return err
	}
	var at []string
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) > 4 && (strings.HasPrefix(f[4], "/var/lib/kubelet/pods/") || inVolatile(f[4])) {
			at = append(at, f[4])
		}
	}
	if len(at) > 0 {
		// Lazily: one may be mounted upon another.
		if _, err := n.Exec(ctx, append([]string{"umount", "--lazy"}, at...)...); err != nil {
			return err
		}
	}
	for _, dir := range volatile {
		names, err := n.ListFiles(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := os.RemoveAll(n.File(filepath.Join(dir, name))); err != nil {
				return err
			}
		}
	}
	return nil
}

// Cgroups are the directories of the pods' cgroups, in every hierarchy, parents
// first.
func (n *Node) Cgroups() (dirs []string, err error) {
	tops, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/gpu-agent-%s-%08x/kubepods", n.Name, crc32.ChecksumIEEE([]byte(n.kit.Cache))))
	for _, top := range tops {
		err = errors.Join(err, filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // gone since its parent was read
			}
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		}))
	}
	return dirs, err
}

func (n *Node) removeCgroups(context.Context) error {
	dirs, err := n.Cgroups()
	if err != nil {
		return err
	}
	for _, dir := range slices.Backward(dirs) {
		if err := os.Remove(dir); err != nil {
			return err
		}
	}
	return nil
}

func inVolatile(path string) bool {
	for _, dir := range volatile {
		if strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

// newBoot lays a boot ID of the node's own over the machine's, or another in its
// place.
func (n *Node) newBoot(ctx context.Context) error {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	id := fmt.Sprintf("%x-%x-%x-%x-%x\n", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	const file = "/run/boot_id"
	_, err := os.Stat(n.File(file))
	if werr := os.WriteFile(n.File(file), []byte(id), 0o444); werr != nil {
		return werr
	}
	if errors.Is(err, os.ErrNotExist) {
		if _, err := n.Exec(ctx, "mount", "--bind", file, bootID); err != nil {
			return err
		}
	}
	now, err := n.ReadFile(bootID)
	if err == nil && string(now) != id {
		err = fmt.Errorf("%s says %q, want %q", bootID, now, id)
	}
	return err
}
