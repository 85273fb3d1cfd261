// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestVersion(t *testing.T) {
	release, commit, date = "v1.2.3", "0123456789ab", "2026-01-02"
	defer func() { release, commit, date = "", "", "" }()
	out, _, err := execute(t, "version")
	if err != nil || !strings.HasPrefix(out, "v1.2.3 (commit 0123456789ab of 2026-01-02, go1.") {
		t.Errorf("%q, %v", out, err)
	}
}
