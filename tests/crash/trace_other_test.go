// SPDX-License-Identifier: Apache-2.0

//go:build !(linux && amd64)

package crash

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
)

type change struct{ call, path string }

func (c change) String() string { return c.call + " " + c.path }

var errArch = fmt.Errorf("system calls are read on linux/amd64 only, not on %s/%s: %w", runtime.GOOS, runtime.GOARCH, errors.ErrUnsupported)

type tracee struct {
	pid    int
	pidfd  int
	done   chan struct{}
	status syscall.WaitStatus
}

func startTraced([]string, *os.File, int, func(), *disk, ...string) (*tracee, error) {
	return nil, errArch
}

func (t *tracee) arm(int, func())        {}
func (t *tracee) mayEnd() bool           { return false }
func (t *tracee) note(change) bool       { return false }
func (t *tracee) seen() ([]change, bool) { return nil, false }
func (t *tracee) end()                   {}
