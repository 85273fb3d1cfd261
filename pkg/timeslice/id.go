// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	separator = "::"
	prefix    = "GPU-"
)

// ID returns the name of piece n of a GPU: "GPU-<uuid>::<n>". Other tools (dcgm-exporter) cut it at
// "::" to find the GPU.
func ID(uuid gpu.UUID, n int) string {
	return string(uuid) + separator + strconv.Itoa(n)
}

// ParseID is the inverse of [ID]. It accepts only what ID returns: the number is below [MaxListed],
// without sign or leading zeros. For other IDs the error wraps gpu.ErrInvalid.
func ParseID(id string) (gpu.UUID, int, error) {
	uuid, n, ok := split(id)
	if !ok || !validUUID(uuid) {
		return "", 0, idError(id)
	}
	return gpu.UUID(uuid), n, nil
}

func idError(id string) error {
	return fmt.Errorf("device ID %q is not of the form GPU-<uuid>::<number below %d>: %w",
		id, MaxListed, gpu.ErrInvalid)
}

// split cuts an ID at its last "::". It checks the number only. Whether the rest names a GPU is
// checked by validUUID. That is expensive, so callers check it once for each GPU and not for each
// ID.
func split(id string) (uuid string, n int, ok bool) {
	i, scale := len(id), 1
	for i > 0 && id[i-1]-'0' <= 9 {
		i--
		n += int(id[i]-'0') * scale
		scale *= 10
		if n >= MaxListed || scale > MaxListed*10 {
			return "", 0, false
		}
	}
	digits := len(id) - i
	if digits == 0 || digits > 1 && id[i] == '0' {
		return "", 0, false
	}
	if i < len(separator) || id[i-1] != ':' || id[i-2] != ':' {
		return "", 0, false
	}
	return id[:i-2], n, true
}

func validUUID(s string) bool {
	rest, ok := strings.CutPrefix(s, prefix)
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return ok && rest != "" && strings.Trim(rest, "-0123456789"+letters) == ""
}
