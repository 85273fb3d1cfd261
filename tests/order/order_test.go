// SPDX-License-Identifier: Apache-2.0

package order

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func stated(t *testing.T) map[string]order {
	t.Helper()
	orders := map[string]order{}
	for _, k := range tokens {
		o, err := k.order()
		if err != nil {
			t.Fatal(err)
		}
		orders[k.name] = o
	}
	return orders
}

func TestCounter(t *testing.T) {
	orders := stated(t)
	m := &model{orders: orders, used: map[string]bool{}}
	for _, p := range m.programs() {
		if bad := p.explore(); bad != nil {
			t.Errorf("%s:\n%s", p.name, strings.Join(bad, "\n"))
		}
	}
	for name := range orders {
		if !m.used[name] {
			t.Errorf("no program has %s", name)
		}
	}
}

// TestEveryOrderIsNeeded takes each order out of the model, one at a time.
func TestEveryOrderIsNeeded(t *testing.T) {
	orders, left := stated(t), map[string]bool{}
	for _, k := range tokens {
		less := k.less(orders[k.name])
		for _, part := range slices.Sorted(maps.Keys(less)) {
			changed := maps.Clone(orders)
			changed[k.name] = less[part]
			m := &model{orders: changed, used: map[string]bool{}}
			what := k.name + " without " + part
			found := slices.IndexFunc(m.programs(), func(p program) bool { return p.explore() != nil })
			switch why := kept[what]; {
			case found < 0 && why == "":
				t.Errorf("%s: %s: no program goes wrong; either the source may leave it out or the model lacks something", k.file, what)
			case found < 0:
				t.Logf("%s: nothing goes wrong, and it stays: %s", what, why)
				left[what] = true
			case why != "":
				t.Errorf("%s: %s: %s goes wrong, so Arm needs it", k.file, what, m.programs()[found].name)
			default:
				t.Logf("%s: %s", what, m.programs()[found].name)
			}
		}
	}
	if len(left) != len(kept) {
		t.Errorf("of what is kept for C alone, the source has %d orders, want %d", len(left), len(kept))
	}
}

// TestSteps holds the model's steps to the source.
func TestSteps(t *testing.T) {
	for _, s := range steps {
		text, err := read(s.file)
		if err != nil {
			t.Fatal(err)
		}
		in, err := body(text, s.function)
		if err != nil {
			t.Errorf("%s: %v", s.file, err)
			continue
		}
		for _, what := range s.does {
			_, rest, ok := strings.Cut(in, what)
			if !ok {
				t.Errorf("%s: %s does not do %q, or not after what precedes it in the model (%q)", s.file, s.function, what, s.does)
				break
			}
			in = rest
		}
	}
}

// TestNothingIsLeftOut: each order that the counter's files state is a token's, or there is
// a reason why not.
func TestNothingIsLeftOut(t *testing.T) {
	stronger := regexp.MustCompile(`__ATOMIC_(ACQUIRE|RELEASE|ACQ_REL|SEQ_CST|CONSUME)|__sync_|atomic_thread_fence`)
	used := make([]bool, len(outside))
	for _, file := range []string{"c/page.h", "c/count.h", "c/count.c", "c/loan.c", "c/attempt.c"} {
		text, err := read(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range tokens {
			in, err := body(text, k.function)
			if k.file != file || err != nil {
				continue
			}
			expr := strings.Replace(regexp.QuoteMeta(k.text), "ORDER", `[\w., ]+`, 1)
			text = strings.Replace(text, in, regexp.MustCompile(expr).ReplaceAllString(in, ""), 1)
		}
		for n, line := range strings.Split(text, "\n") {
			if !stronger.MatchString(line) {
				continue
			}
			known := false
			for i, o := range outside {
				if o.file == file && strings.Contains(line, o.text) {
					known, used[i] = true, true
				}
			}
			if !known {
				t.Errorf("%s: line %d after the tokens' texts were taken out: neither a token nor a reason why not:\n%s", file, n+1, line)
			}
		}
	}
	for i, o := range outside {
		if !used[i] {
			t.Errorf("%s has no %q any more", o.file, o.text)
		}
	}
}
