// SPDX-License-Identifier: Apache-2.0

package gpu

import "errors"

// Kinds of failures that callers distinguish. Errors of pkg/gpu/nvml wrap one of these, so that
// no other package needs the driver's return codes.
var (
	// ErrNoDriver: the driver's library is absent, or no driver is loaded. Retrying later can
	// help.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrNotFound: there is no GPU, instance or process of that name.
	ErrNotFound = errors.New("not found")
	// ErrNotSupported: this card or driver cannot do it. Retrying is useless.
	ErrNotSupported = errors.New("not supported by this GPU or driver")
	// ErrNoPermission: the agent lacks a privilege.
	ErrNoPermission = errors.New("no permission")
	// ErrInUse: clients of the GPU, or its instances, prevent it.
	ErrInUse = errors.New("in use")
	// ErrNoRoom: the card has no room for the requested instance.
	ErrNoRoom = errors.New("insufficient resources")
	// ErrInvalid: an argument is wrong.
	ErrInvalid = errors.New("invalid argument")
	// ErrLost: the GPU fell off the bus or must be reset.
	ErrLost = errors.New("GPU is lost")
	// ErrTimeout: the driver did not answer in time.
	ErrTimeout = errors.New("driver did not answer in time")
	// ErrReloaded: the driver's library on disk is not the one that this process has loaded. Only
	// a new process can use the new driver.
	ErrReloaded = errors.New("the driver was replaced under this process")
	// ErrDriver: any other failure that the driver reported.
	ErrDriver = errors.New("driver error")
)

// ErrorKind returns the error of this package that err wraps, or nil if it wraps none. Callers
// compare errors by it, since their texts contain GPUs, processes and times. If err wraps
// several, it returns the most specific one.
func ErrorKind(err error) error {
	for _, kind := range []error{
		ErrTimeout, ErrReloaded, ErrNoDriver, ErrLost, ErrInUse, ErrNoRoom,
		ErrNotSupported, ErrNoPermission, ErrNotFound, ErrInvalid, ErrDriver,
	} {
		if errors.Is(err, kind) {
			return kind
		}
	}
	return nil
}
