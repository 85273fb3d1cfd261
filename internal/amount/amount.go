// SPDX-License-Identifier: Apache-2.0

package amount

import (
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// mostDigits bounds the length of a text, in bytes. A canonical amount has at most 26.
	mostDigits = 256
	// mostExponent bounds the digits of an exponent: parsing 1e-9999 takes 0.1 ms.
	mostExponent = 4
)

// Check returns an error if decoded JSON has a text that would take long to parse as an amount. It
// checks every text, without regard to which are amounts: such a text has no other use. The error
// wraps gpu.ErrInvalid.
func Check(value any) error {
	switch v := value.(type) {
	case string:
		if long(v) {
			return fmt.Errorf("the amount %q has too many digits: %w", brief.Cut(v, 40), gpu.ErrInvalid)
		}
	case map[string]any:
		for _, of := range v {
			if err := Check(of); err != nil {
				return err
			}
		}
	case []any:
		for _, of := range v {
			if err := Check(of); err != nil {
				return err
			}
		}
	}
	return nil
}

// long reports whether a text is a number with too many digits or too large an exponent.
func long(text string) bool {
	rest := strings.TrimLeft(text, "+-")
	number := strings.TrimLeft(rest, "0123456789.")
	if len(rest) == len(number) {
		return false
	}
	if exponent, ok := strings.CutPrefix(strings.ToLower(number), "e"); ok {
		digits := strings.TrimLeft(exponent, "+-")
		after := strings.TrimLeft(digits, "0123456789")
		return after == "" && (len(digits) > mostExponent || len(text) > mostDigits)
	}
	return len(number) <= 2 && len(text) > mostDigits // a suffix such as Ki
}
