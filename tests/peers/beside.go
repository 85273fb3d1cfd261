// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator/install"
)

// peerRole is set where this program was started to become a peer, featuresRole
// beside it to the directory of features files that the peer is to find.
const (
	peerRole     = "GPU_TESTS_BECOME_PEER"
	featuresRole = "GPU_TESTS_PEER_FEATURES"
)

// BecomePeer is for the main function of a program that runs peers, before all
// else: it returns in the program itself, and not in one that was started to
// become a peer.
func BecomePeer() {
	if os.Getenv(peerRole) == "" {
		return
	}
	os.Unsetenv(peerRole)
	err := install.Modules()
	if dir := os.Getenv(featuresRole); dir != "" && err == nil {
		err = layFeatures(dir)
	}
	if err == nil {
		err = unix.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "become a peer:", err)
	os.Exit(126)
}

// beside runs a program beside the emulated driver below root, in a mount
// namespace of its own with a /proc/modules, and returns what it said on either
// stream. Its failure is an error with its exit status.
func (p Peer) beside(ctx context.Context, program, root string, args ...string) (said string, err error) {
	return p.become(ctx, []string{
		"LD_LIBRARY_PATH=" + filepath.Join(root, "usr/lib/x86_64-linux-gnu"),
		"PATH=" + filepath.Join(root, "usr/bin") + ":" + os.Getenv("PATH"),
	}, program, args...)
}

// become runs a program in a mount namespace of its own.
func (p Peer) become(ctx context.Context, env []string, program string, args ...string) (said string, err error) {
	// The death signal is that of a thread's death.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{program}, args...)...)
	cmd.Env = slices.Concat(os.Environ(), []string{peerRole + "=1"}, env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() != 126 {
		return string(out), fmt.Errorf("%s: %w", p.Name, exit)
	}
	if err != nil {
		return string(out), fmt.Errorf("run %s: %w\n%s", p.Name, err, out)
	}
	return string(out), nil
}
