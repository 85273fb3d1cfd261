// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/lab"
)

// insideArg marks the second start of this program, in namespaces of its own.
const insideArg = "inside"

// workDir is where the tmpfs with all files of a run is mounted. The directory
// below it is empty, and stays.
func workDir(k *lab.Kit) string { return filepath.Join(k.Cache, "bench") }

// runInside starts this program again, as the first process of namespaces of
// its own. Whatever that one starts ends with it, and it ends with us.
func runInside(ctx context.Context, k *lab.Kit, args []string) error {
	if err := os.MkdirAll(workDir(k), 0o755); err != nil {
		return fmt.Errorf("make the bench's directory: %w", err)
	}
	// The death signal is that of a thread's death.
	runtime.LockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{insideArg}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "GPU_TESTS_CACHE="+k.Cache)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start in namespaces of its own: %w", err)
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return &insideError{exit.ExitCode()}
	}
	return err
}

// insideError is the failure of the run in the namespaces, which has said why.
type insideError struct{ code int }

func (e *insideError) Error() string { return fmt.Sprintf("the run ended with status %d", e.code) }

// settle makes the namespaces fit for a run: nothing travels back to the host,
// /proc is that of the new PIDs, the kubelet's directory is ours, and loopback
// is up.
func settle(work string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := coverKubelet(work); err != nil {
		return err
	}
	// Device nodes are made here, and need only be there.
	if err := unix.Mount("bench", work, "tmpfs", unix.MS_NOSUID, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", work, err)
	}
	return loopback()
}

// kubeletDir is compiled into the peer.
const kubeletDir = "/var/lib/kubelet"

// coverKubelet makes an empty /var/lib/kubelet. Where the host has none, an
// overlay makes room for it that leaves /var/lib as it looks.
func coverKubelet(work string) error {
	if _, err := os.Stat(kubeletDir); errors.Is(err, fs.ErrNotExist) {
		if err := unix.Mount("bench", work, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount a tmpfs on %s: %w", work, err)
		}
		parent, upper, at := filepath.Dir(kubeletDir), filepath.Join(work, "upper"), filepath.Join(work, "work")
		if err := errors.Join(os.MkdirAll(filepath.Join(upper, filepath.Base(kubeletDir)), 0o755), os.Mkdir(at, 0o755)); err != nil {
			return fmt.Errorf("make room for %s: %w", kubeletDir, err)
		}
		if err := unix.Mount("bench", parent, "overlay", 0, "lowerdir="+parent+",upperdir="+upper+",workdir="+at); err != nil {
			return fmt.Errorf("lay an overlay over %s: %w", parent, err)
		}
	}
	if err := unix.Mount("bench", kubeletDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", kubeletDir, err)
	}
	return nil
}

func loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	return nil
}
