// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// GFD is GPU Feature Discovery beside an emulated driver, as Parted is mig-parted.
type GFD struct {
	Program string
	Root    string
}

// Labels has it write its features file once, into dir, and returns what stands
// there.
func (g GFD) Labels(ctx context.Context, dir string, args ...string) (map[string]string, error) {
	file := filepath.Join(dir, "gfd")
	said, err := GPUFeatureDiscovery.beside(ctx, g.Program, g.Root, append([]string{
		"--oneshot", "--use-node-feature-api=false", "--output-file", file}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, said)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, said)
	}
	labels := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok {
			return nil, fmt.Errorf("%s wrote %q", GPUFeatureDiscovery.Name, line)
		}
		labels[key] = value
	}
	return labels, nil
}
