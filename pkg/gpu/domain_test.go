// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"errors"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestValidateDomain(t *testing.T) {
	for _, good := range []string{"example.com", "nvidia.com", "a", "gpu-1.k8s.internal"} {
		if err := gpu.ValidateDomain(good); err != nil {
			t.Errorf("%q is refused: %v", good, err)
		}
	}
	for _, bad := range []string{
		"", "Example.com", "3m.com", "example.com/x", "../etc", "a..b", ".a", "a.", "-a", "a-", "a-.b",
		"exam ple", "a_b", "a\x00b", "é.com", strings.Repeat("a", 254),
	} {
		if err := gpu.ValidateDomain(bad); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%q: got %v, want ErrInvalid", bad, err)
		}
	}
}
