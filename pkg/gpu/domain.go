// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"strings"
)

// ValidateDomain fails unless a domain can be the prefix of resources, labels, annotations, CDI
// names and file names. It must be a DNS name in lower case, of at most 253 characters, that
// begins with a letter (as CDI vendors must). The error wraps [ErrInvalid].
func ValidateDomain(domain string) error {
	bad := func(why string) error {
		return fmt.Errorf("domain %q: %s: %w", domain, why, ErrInvalid)
	}
	if domain == "" || len(domain) > 253 {
		return bad("must have 1 to 253 characters")
	}
	if domain[0] < 'a' || domain[0] > 'z' {
		return bad("must begin with a letter a-z")
	}
	for label := range strings.SplitSeq(domain, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return bad("each part between dots must begin and end with a letter or digit")
		}
		if strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return bad("may hold only a-z, 0-9, '-' and '.'")
		}
	}
	return nil
}
