// SPDX-License-Identifier: Apache-2.0

package park

// #cgo LDFLAGS: -ldl
// #include <dlfcn.h>
// #include <stdint.h>
// #include <stdlib.h>
// #include <string.h>
//
// // The structures of the calls' arguments all have 64 bytes, which are 0 but for the lock's timeout.
// struct arguments { unsigned int timeout_ms, reserved[15]; };
//
// static int gpu_agent_init(void *f) { return ((int (*)(unsigned int))f)(0); }
// static int gpu_agent_state(void *f, int pid, int *state) { return ((int (*)(int, int *))f)(pid, state); }
// static int gpu_agent_change(void *f, int pid, unsigned int timeout_ms)
// {
//     struct arguments a;
//     memset(&a, 0, sizeof a);
//     a.timeout_ms = timeout_ms;
//     return ((int (*)(int, struct arguments *))f)(pid, &a);
// }
import "C"

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"
	"unsafe"
)

// cudaLibrary is the driver's library.
const cudaLibrary = "libcuda.so.1"

// cuda is the driver's library in this process. It is never unloaded.
type cuda struct{ state, lock, checkpoint, restore, unlock unsafe.Pointer }

// OpenCUDA loads the CUDA driver from the first of the directories that has it, or with none from where the
// dynamic linker finds it. Only a process that calls Serve may do that.
func OpenCUDA(directories []string) (Library, error) {
	path := cudaLibrary
	for _, dir := range directories {
		if _, err := os.Stat(filepath.Join(dir, cudaLibrary)); err == nil {
			path = filepath.Join(dir, cudaLibrary)
			break
		}
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	h := C.dlopen(name, C.RTLD_NOW)
	if h == nil {
		return nil, fmt.Errorf("load the CUDA driver: %s", C.GoString(C.dlerror()))
	}
	var missing error
	find := func(name string) unsafe.Pointer {
		c := C.CString(name)
		defer C.free(unsafe.Pointer(c))
		f := C.dlsym(h, c)
		if f == nil {
			missing = errors.Join(missing, fmt.Errorf("%s has no %s: containers can be parked with drivers of R570 and later", path, name))
		}
		return f
	}
	l := cuda{
		state: find("cuCheckpointProcessGetState"), lock: find("cuCheckpointProcessLock"),
		checkpoint: find("cuCheckpointProcessCheckpoint"), restore: find("cuCheckpointProcessRestore"),
		unlock: find("cuCheckpointProcessUnlock"),
	}
	init := find("cuInit")
	if missing != nil {
		return nil, missing
	}
	if code := C.gpu_agent_init(init); code != 0 {
		return nil, fmt.Errorf("begin with the CUDA driver %s: cuInit answers %d", path, int(code))
	}
	return l, nil
}

func (l cuda) State(pid int) (State, int) {
	var state C.int
	code := C.gpu_agent_state(l.state, C.int(pid), &state)
	return State(state), int(code)
}

func (l cuda) Lock(pid int, timeout time.Duration) int {
	ms := min(max(1, timeout.Milliseconds()), math.MaxInt32) // 0 would be without end
	return int(C.gpu_agent_change(l.lock, C.int(pid), C.uint(ms)))
}

func (l cuda) Checkpoint(pid int) int { return int(C.gpu_agent_change(l.checkpoint, C.int(pid), 0)) }
func (l cuda) Restore(pid int) int    { return int(C.gpu_agent_change(l.restore, C.int(pid), 0)) }
func (l cuda) Unlock(pid int) int     { return int(C.gpu_agent_change(l.unlock, C.int(pid), 0)) }
