// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// StartTied starts a command that dies with this process, however this process ends. What
// else the command's SysProcAttr asks for is kept.
//
// The kernel sends the death signal when the thread that started the command ends. A test's
// threads may end long before its process does: one that has entered a node's network does. So
// a thread that never ends starts all of them.
func StartTied(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started := make(chan error)
	starter() <- func() { started <- cmd.Start() }
	return <-started
}

// starter takes what the thread that never ends is to do.
var starter = sync.OnceValue(func() chan<- func() {
	todo := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range todo {
			f()
		}
	}()
	return todo
})
