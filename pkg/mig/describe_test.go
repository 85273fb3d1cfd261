// SPDX-License-Identifier: Apache-2.0

package mig

import "testing"

func TestParseResourceUndoesResource(t *testing.T) {
	for _, s := range []string{"1g.10gb", "1g.10gb+me", "1g.24gb-me", "1g.24gb+me.all", "1c.3g.40gb", "4g.96gb+gfx"} {
		n, err := Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ParseResource(n.Resource()); err != nil || got != n {
			t.Errorf("ParseResource(%q) = %v, %v, want %v", n.Resource(), got, err, n)
		}
	}
	for _, s := range []string{"", "1g.10gb", "mig-", "mig-1g.10gb+me", "mig-3c.3g.40gb", "mig-gpu", "mig-1g.10gb..me"} {
		if got, err := ParseResource(s); err == nil {
			t.Errorf("ParseResource(%q) = %v, want an error", s, got)
		}
	}
}

func TestDescribe(t *testing.T) {
	placement := func(p string, start, size int) Placement {
		n, err := Parse(p)
		if err != nil {
			t.Fatal(err)
		}
		return Placement{Profile: n, Start: start, Size: size}
	}
	got := Describe([]Placement{placement("3g.40gb", 4, 4), placement("1g.10gb", 0, 1), placement("1g.10gb", 1, 1)})
	if want := "2x1g.10gb 1x3g.40gb"; got != want {
		t.Errorf("Describe: %q, want %q", got, want)
	}
	if got := Describe(nil); got != "no instance" {
		t.Errorf("Describe of nothing: %q", got)
	}
}
