// SPDX-License-Identifier: Apache-2.0

package amount

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/cost"
)

// TestCheck finds a text at any depth, and lets through amounts and what is none.
func TestCheck(t *testing.T) {
	for text, good := range map[string]bool{
		"79Gi": true, "1e3": true, "1E-9": true, "0.5": true, "-3": true, "1e-9999": true, "9E": true, "": true, "much": true, "1e5.5": true,
		"1e-9999999": false, "-.5E+99999": false, "1e-00009": false, "1e+10000": false, "0." + strings.Repeat("0", 1<<20) + "1": false, strings.Repeat("9", 300) + "Ki": false,
		"e2e-12345": true, "1e12345x": true, strings.Repeat("0123456789abcdef", 100): true, "2026-11-28": true,
	} {
		err := Check(map[string]any{"spec": []any{7, nil, map[string]any{"cpu": text}}})
		if (err == nil) != good || err != nil && !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%.30q: %v", text, err)
		}
	}
}

// FuzzCheck has a text that passes read as a quantity, which costs little.
func FuzzCheck(f *testing.F) {
	for _, text := range []string{"1", "79Gi", "1e-999999999", "1.5e3", "-0.0001u", "1e-9999", "1e9999", "+.e+", "1e5.5"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if Check(text) != nil {
			return
		}
		if took := cost.Allocated(func() {
			if q, err := resource.ParseQuantity(text); err == nil {
				q.Value()
				_ = q.String()
			}
		}); took > 4<<20 {
			t.Errorf("%.40q cost %d KiB", text, took>>10)
		}
	})
}
