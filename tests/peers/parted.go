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
	"syscall"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator/install"
)

// partedRole is set where this program was started to become mig-parted.
const partedRole = "GPU_AGENT_BECOME_PEER"

// BecomePeer is for the main function of a program that runs mig-parted, before
// all else: it returns in the program itself, and not in one that Parted started.
func BecomePeer() {
	if os.Getenv(partedRole) == "" {
		return
	}
	os.Unsetenv(partedRole)
	err := install.Modules()
	if err == nil {
		err = unix.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "become a peer:", err)
	os.Exit(126)
}

// Parted is mig-parted beside an emulated driver, whose kernel files are at their
// fixed places in this program's mount namespace (install.Mount).
type Parted struct {
	Program string // its path
	Root    string // the driver root, where it finds library and tool
}

// Run runs mig-parted in a mount namespace with a /proc/modules, and returns what
// it said on either stream. Its failure is an error with its exit status.
func (p Parted) Run(ctx context.Context, args ...string) (said string, err error) {
	// The death signal is that of a thread's death.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{p.Program}, args...)...)
	cmd.Env = append(os.Environ(), partedRole+"=1",
		"LD_LIBRARY_PATH="+filepath.Join(p.Root, "usr/lib/x86_64-linux-gnu"),
		"PATH="+filepath.Join(p.Root, "usr/bin")+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() != 126 {
		return string(out), fmt.Errorf("%s: %w", MIGParted.Name, exit)
	}
	if err != nil {
		return string(out), fmt.Errorf("run %s: %w\n%s", MIGParted.Name, err, out)
	}
	return string(out), nil
}
