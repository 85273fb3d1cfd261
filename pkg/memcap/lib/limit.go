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

// Percent returns the share of a GPU's SMs in an allocation's page, in percent; 0 if it has none of its own.
// Its errors are those of Limit; gpu.ErrInvalid also means that the page has no percentage there.
func (p *Pages) Percent(key string, u gpu.UUID) (int, error) {
	if _, err := p.Limit(key, u); err != nil {
		return 0, err
	}
	page, err := mapPage(filepath.Join(p.dir, key, string(u)))
	if err != nil {
		return 0, err
	}
	percent := page.load(atPercent)
	if percent > 100 {
		return 0, errors.Join(fmt.Errorf("the limit page of allocation %s for %s has a share of %d percent: %w",
			key, u, percent, gpu.ErrInvalid), page.unmap())
	}
	return int(percent), page.unmap()
}
