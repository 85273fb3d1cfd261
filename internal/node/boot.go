// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"path/filepath"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// BootID returns the kernel's boot ID, which differs after each reboot and is the same in every
// container. procRoot is where the host's /proc is seen.
func BootID(procRoot string) (string, error) {
	path := filepath.Join(procRoot, "sys/kernel/random/boot_id")
	data, _, err := readRegular(path, 256)
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	id := strings.TrimSpace(string(data))
	if len(id) != 36 || strings.Trim(strings.ToLower(id), "0123456789abcdef-") != "" {
		return "", &failure{is: gpu.ErrInvalid, text: fmt.Sprintf("read the boot ID: %s has %.40q, which is no UUID",
			path, id)}
	}
	return id, nil
}
