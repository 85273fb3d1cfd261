// SPDX-License-Identifier: Apache-2.0

package gpu

import "errors"

// Ways of failing that callers act on. Errors that leave pkg/gpu/nvml wrap
// one of these where the driver's answer means it, so that no room but that
// one knows the driver's return codes.
var (
	// ErrNoDriver: the driver's library is absent, or it says that no driver
	// is loaded. Retrying later can help.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrNotFound: no GPU, instance or process of that name.
	ErrNotFound = errors.New("not found")
	// ErrNotSupported: this card or driver cannot do it; retrying is useless.
	ErrNotSupported = errors.New("not supported by this GPU or driver")
	// ErrNoPermission: the agent lacks a privilege.
	ErrNoPermission = errors.New("no permission")
	// ErrInUse: a client of the GPU stands in the way.
	ErrInUse = errors.New("in use")
	// ErrNoRoom: the card has no room for the instance asked for.
	ErrNoRoom = errors.New("insufficient resources")
	// ErrInvalid: the driver refused an argument.
	ErrInvalid = errors.New("invalid argument")
	// ErrLost: the GPU fell off the bus or must be reset.
	ErrLost = errors.New("GPU is lost")
	// ErrTimeout: the driver did not answer in time.
	ErrTimeout = errors.New("driver did not answer in time")
	// ErrReloaded: the driver's library on disk is not the one that this process
	// has loaded. Only a new process can speak to the new driver.
	ErrReloaded = errors.New("the driver was replaced under this process")
	// ErrDriver: any other failure that the driver reported.
	ErrDriver = errors.New("driver error")
)

// ErrorKind returns the error of this package that err wraps, nil where it wraps none:
// a value to compare errors by, whose texts name GPUs, processes and times. Of several
// it is the one that says most.
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
