// SPDX-License-Identifier: Apache-2.0

package emulator

import "fmt"

// Return is the outcome of a driver call, with the numbers of nvmlReturn_t in
// nvml.h. It is an error value except for Success, which callers compare
// against before they wrap it.
type Return int32

// The outcomes that the world gives. Faults may carry any other number.
const (
	Success               Return = 0
	Uninitialized         Return = 1
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	OperatingSystem       Return = 17
	LibraryMismatch       Return = 18
	InUse                 Return = 19
	OutOfMemory           Return = 20
	InsufficientResources Return = 23
	VersionMismatch       Return = 25
	Unknown               Return = 999
)

var returnNames = map[Return]string{
	Success:               "success",
	Uninitialized:         "uninitialized",
	InvalidArgument:       "invalid argument",
	NotSupported:          "not supported",
	NoPermission:          "no permission",
	NotFound:              "not found",
	InsufficientSize:      "insufficient size",
	DriverNotLoaded:       "driver not loaded",
	Timeout:               "timeout",
	GPUIsLost:             "GPU is lost",
	ResetRequired:         "reset required",
	OperatingSystem:       "the operating system refused",
	LibraryMismatch:       "driver/library version mismatch",
	InUse:                 "in use",
	OutOfMemory:           "insufficient memory",
	InsufficientResources: "insufficient resources",
	VersionMismatch:       "argument version mismatch",
	Unknown:               "unknown error",
}

// Error names the outcome in lower case.
func (r Return) Error() string {
	if s, ok := returnNames[r]; ok {
		return s
	}
	return fmt.Sprintf("driver error %d", int32(r))
}
