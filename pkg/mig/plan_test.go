// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// stand reads what stands: "1g.10gb@0 3g.40gb@4!pod" (a "!" pins, with a
// holder; "?" is a GPU instance without a compute instance).
func stand(t testing.TB, c *Card, s string) []Standing {
	t.Helper()
	var out []Standing
	for _, f := range strings.Fields(s) {
		var o Standing
		f, o.Holder, o.Pinned = strings.Cut(f, "!")
		f, o.Empty = strings.CutSuffix(f, "?")
		o.Slot = at(t, c, f)
		out = append(out, o)
	}
	return out
}

// counts reads a geometry: "7x1g.10gb 1x3g.40gb".
func counts(t testing.TB, s string) []Count {
	t.Helper()
	var out []Count
	for _, f := range strings.Fields(s) {
		n, p, _ := strings.Cut(f, "x")
		k, err := strconv.Atoi(n)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, Count{name(t, p), k})
	}
	return out
}

// text prints a plan on one line.
func (p Plan) text() string {
	var b strings.Builder
	for _, s := range p.Steps {
		fmt.Fprintf(&b, "%s; ", s)
	}
	if len(p.Blocked) > 0 {
		b.WriteString("blocked by")
		for _, o := range p.Blocked {
			fmt.Fprintf(&b, " %s!%s", o.Slot, o.Holder)
		}
		b.WriteString("; ")
	}
	fmt.Fprintf(&b, "keep %v; result %v", p.Keep, p.Result)
	return b.String()
}

func TestPlanSmoke(t *testing.T) {
	c := card(t, seven)
	for _, tc := range []struct{ standing, want string }{
		{"", "2x1g.10gb 1x2g.20gb 1x3g.40gb"},
		{"1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5!a 1g.10gb@6", "2x3g.40gb"},
		{"1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5!a 1g.10gb@6", "1x3g.40gb 1x1g.10gb"},
		{"", "4x1c.3g.40gb 1x2c.3g.40gb"},
		{"1c.3g.40gb@0.0 1c.3g.40gb@4.2!x", "4x1c.3g.40gb 1x2c.3g.40gb"},
		{"7g.80gb@0?", "1x7g.80gb"},
		{"3g.40gb@0?", "1x7g.80gb"},
	} {
		p, err := c.Plan(stand(t, c, tc.standing), counts(t, tc.want))
		t.Logf("%s -> %s:\n  %s %v", tc.standing, tc.want, p.text(), err)
	}
	for _, w := range []string{"8x1g.10gb", "1x1g.5gb", "2x3g.40gb 1x1g.20gb", "3x2g.20gb 1x1g.20gb", "3x2g.20gb 2x1g.10gb", "2x1g.10gb+me", "1x3c.4g.40gb", "7x1c.3g.40gb"} {
		t.Logf("%s: %v", w, c.Feasible(counts(t, w)))
	}
}

func BenchmarkPlan(b *testing.B) {
	c := card(b, seven)
	standing := stand(b, c, "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5!a 1g.10gb@6")
	want := counts(b, "2x1g.10gb 1x2g.20gb 1x3g.40gb")
	for b.Loop() {
		if _, err := c.Plan(standing, want); err != nil {
			b.Fatal(err)
		}
	}
}
