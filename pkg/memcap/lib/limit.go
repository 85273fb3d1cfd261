// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"example.com/gpu-agent/pkg/gpu"
)

// Limit returns the limit on a GPU in an allocation's page, in bytes. The error wraps
// gpu.ErrNotFound if there is no page, and gpu.ErrInvalid if the file is not a page.
func (p *Pages) Limit(key string, u gpu.UUID) (uint64, error) {
	if !plainName(key) || !plainName(string(u)) {
		return 0, fmt.Errorf("read the limit page of allocation %q on GPU %q: %w", key, u, gpu.ErrInvalid)
	}
	page, err := mapPage(filepath.Join(p.dir, key, string(u)))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("allocation %s has no limit page for %s: %w", key, u, gpu.ErrNotFound)
	} else if err != nil {
		return 0, err
	}
	bytes := page.load(atLimit)
	return bytes, page.unmap()
}
