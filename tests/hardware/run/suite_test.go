// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"example.com/gpu-agent/tests/hardware/ask"
)

func TestJudge(t *testing.T) {
	pass := func(name string) verdict { return verdict{how: "PASS", name: name} }
	for _, c := range []struct {
		list []verdict
		want ask.Answer
	}{
		{nil, ask.CouldNotTell("")},
		{[]verdict{pass("T/A"), pass("T")}, ask.Tell(true, "1 tests pass, 0 are skipped")},
		{[]verdict{pass("T/A"), {how: "SKIP", name: "T/B"}, pass("T/C/D"), pass("T/C"), pass("T")}, ask.Tell(true, "2 tests pass, 1 are skipped")},
		// What has parts that were all skipped has not passed.
		{[]verdict{{how: "SKIP", name: "T/A", said: []string{"at 3", "x.go:7: skipped: there is no Python"}}, pass("T")}, ask.CouldNotTell("A: there is no Python")},
		{[]verdict{pass("T/A"), {how: "FAIL", name: "T/B", said: []string{"x.go:7: it is 3"}}, {how: "FAIL", name: "T"}}, ask.Tell(false, "1 pass; these do not: B x.go:7: it is 3")},
		{[]verdict{pass("T/A"), {how: "FAIL", name: "T", said: []string{"it does not end"}}}, ask.Tell(false, "1 pass; these do not:  it does not end")},
	} {
		if got := judge(c.list); got != c.want {
			t.Errorf("%v: it is %v, want %v", c.list, got, c.want)
		}
	}
}
