// SPDX-License-Identifier: Apache-2.0

package cuinit

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

// begin returns 1 and cuInit's result, or 0 and why it could not be called.
static int begin(const char *library, int *result, char *why, size_t room)
{
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = opened ? (int (*)(unsigned))dlsym(opened, "cuInit") : NULL;
    if (!init) {
        const char *said = dlerror();
        snprintf(why, room, "%s", said ? said : "it has no cuInit");
        return 0;
    }
    *result = init(0);
    return 1;
}
*/
import "C"

import (
	"fmt"
	"unsafe"

	"example.com/gpu-agent/pkg/gpu"
)

// library is the CUDA driver's.
const library = "libcuda.so.1"

// Call calls cuInit and returns its result: 0, or CUDA's number of an error. The error wraps
// gpu.ErrNoDriver if the library cannot be loaded.
func Call() (int, error) {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var result C.int
	why := make([]C.char, 512)
	if C.begin(name, &result, &why[0], C.size_t(len(why))) == 0 {
		return 0, fmt.Errorf("load %s: %s: %w", library, C.GoString(&why[0]), gpu.ErrNoDriver)
	}
	return int(result), nil
}
