// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// mostAgain is the most tests of a run that are run again. One test that fails and then
// passes may be told of as flaky; two are a failure of the run already.
const mostAgain = 2

// failure is a test that failed, or with no test a package that failed by itself.
type failure struct {
	pkg, test string
	// command is the place of the command among those of its stage.
	command int
}

func (f failure) String() string { return strings.TrimSpace(f.pkg + " " + f.test) }

// top is the test that a subtest is part of.
func (f failure) top() failure {
	f.test, _, _ = strings.Cut(f.test, "/")
	return f
}

// flake is a test that failed beside other lanes and passed alone.
type flake struct {
	failure
	logs [2]string // of the first run, and of the second
}

// tops are the tests of a stage that may be run again: those that failed, if nothing else
// failed in it.
func (o *outcome) tops() []failure {
	if !o.stage.again || o.err == nil {
		return nil
	}
	var tops []failure
	for _, f := range o.failed {
		if f.test == "" {
			return nil // it did not build, or ended in the middle
		}
		if !slices.Contains(tops, f.top()) {
			tops = append(tops, f.top())
		}
	}
	return tops
}

// again runs tests that failed in stages that allow it once more, when all lanes are done:
// nothing runs beside them. What passes then is flaky.
func (r *runner) again(ctx context.Context, done []outcome) {
	count := 0
	for i := range done {
		count += len(done[i].tops())
	}
	if count == 0 || count > mostAgain || ctx.Err() != nil {
		return
	}
	for i := range done {
		o := &done[i]
		tops := o.tops()
		if len(tops) == 0 {
			continue
		}
		first := r.log(o.stage.name)
		passed := 0
		for n, top := range tops {
			name := fmt.Sprintf("%s again %d", o.stage.name, n+1)
			second := r.stage(ctx, stage{
				name: name, what: fmt.Sprintf("%s once more, alone", top), lane: o.stage.lane,
				commands: []command{onlyTest(o.stage.commands[top.command], top.test)},
			}, nil)
			o.took += second.took
			o.cpu += second.cpu
			o.nodes += second.nodes
			if second.err != nil || second.counts.passed == 0 {
				continue
			}
			passed++
			o.flakes = append(o.flakes, flake{top, [2]string{first, r.log(name)}})
			before := len(o.failed)
			o.failed = slices.DeleteFunc(o.failed, func(f failure) bool { return f.top() == top })
			o.counts.failed -= before - len(o.failed)
			o.counts.passed += before - len(o.failed)
		}
		if passed == len(tops) {
			o.err = nil
		}
	}
}

// onlyTest is a command of `go test` for one of its tests.
func onlyTest(c command, test string) command {
	c.args = slices.DeleteFunc(slices.Clone(c.args), func(arg string) bool {
		return strings.HasPrefix(arg, "-run=") || strings.HasPrefix(arg, "-skip=")
	})
	// What go test does not know itself, it hands on to the test with all that follows.
	at := slices.IndexFunc(c.args, func(arg string) bool { return strings.HasPrefix(arg, "./") || arg == "." })
	c.args = slices.Insert(c.args, max(at, 0), "-run=^"+test+"$")
	return c
}
