// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// counts are results of tests and subtests.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(o counts) {
	c.passed += o.passed
	c.failed += o.failed
	c.skipped += o.skipped
}

func (c counts) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", c.passed, c.failed, c.skipped)
}

// reason is why tests were skipped, and how many by it.
type reason struct {
	text  string
	tests []string
}

// event is a line of `go test -json` (see `go doc test2json`).
type event struct {
	Action, Package, Test, Output string
	// ImportPath is set instead of Package while something is built.
	ImportPath string
	// Elapsed is in seconds.
	Elapsed float64
}

// slow is how long a test takes that gets a line of its own.
const slow = 5 * time.Second

// gotest reads the output of one `go test -json`.
type gotest struct {
	// screen is told what people want to see while tests run.
	screen io.Writer

	counts
	skips  []reason
	failed []failure

	// output holds what each running test and package has printed, by name.
	output map[[2]string]*bytes.Buffer
	// inPackage counts results of each package that is not done yet.
	inPackage map[string]*counts
}

func newGotest(screen io.Writer) *gotest {
	return &gotest{screen: screen, output: map[[2]string]*bytes.Buffer{}, inPackage: map[string]*counts{}}
}

// read takes the events until r ends. A line that is no event is shown as it
// is: a tool between has something to say.
func (g *gotest) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				g.screen.Write(line)
			} else {
				g.take(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the results of go test: %w", err)
		}
	}
}

func (g *gotest) take(e event) {
	pkg := strings.TrimPrefix(e.Package, "example.com/gpu-agent/")
	key := [2]string{e.Package, e.Test}
	name := strings.TrimSpace(pkg + " " + e.Test)
	in := g.inPackage[e.Package]
	if in == nil {
		in = &counts{}
		g.inPackage[e.Package] = in
	}
	took := time.Duration(e.Elapsed * float64(time.Second))
	switch e.Action {
	case "build-output":
		io.WriteString(g.screen, e.Output)
		return
	case "output":
		if g.output[key] == nil {
			g.output[key] = new(bytes.Buffer)
		}
		g.output[key].WriteString(e.Output)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	said := g.output[key]
	delete(g.output, key)
	if e.Test == "" {
		g.endPackage(e, pkg, took, said, *in)
		return
	}
	switch e.Action {
	case "pass":
		in.passed++
		if took >= slow && !strings.Contains(e.Test, "/") {
			fmt.Fprintf(g.screen, "  %-60s %6.1f s\n", e.Test, took.Seconds())
		}
	case "skip":
		in.skipped++
		g.skip(why(said), name)
	case "fail":
		in.failed++
		g.failed = append(g.failed, failure{pkg: pkg, test: e.Test})
		fmt.Fprintf(g.screen, "FAILED %s\n", name)
		g.show(said)
	}
}

// endPackage counts a package. One that fails without a failing test did not
// build, panicked or ran out of time.
func (g *gotest) endPackage(e event, pkg string, took time.Duration, said *bytes.Buffer, in counts) {
	delete(g.inPackage, e.Package)
	word := "ok"
	switch {
	case e.Action == "fail" && in.failed == 0:
		word = "FAILED"
		in.failed++
		g.failed = append(g.failed, failure{pkg: pkg})
		// Tests that were running when it ended have not been shown.
		for _, key := range g.running(e.Package) {
			fmt.Fprintf(g.screen, "while running %s:\n", key[1])
			g.show(g.output[key])
			delete(g.output, key)
		}
		g.show(said)
	case e.Action == "fail":
		word = "FAILED"
	case e.Action == "skip" || in == (counts{}):
		return // a package without tests
	}
	g.counts.add(in)
	fmt.Fprintf(g.screen, "%-6s %-45s %6.1f s  %s\n", word, pkg, took.Seconds(), in)
}

func (g *gotest) running(pkg string) [][2]string {
	var keys [][2]string
	for key := range g.output {
		if key[0] == pkg && key[1] != "" {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b [2]string) int { return cmp.Compare(a[1], b[1]) })
	return keys
}

func (g *gotest) skip(text, name string) {
	for i := range g.skips {
		if g.skips[i].text == text {
			g.skips[i].tests = append(g.skips[i].tests, name)
			return
		}
	}
	g.skips = append(g.skips, reason{text, []string{name}})
}

// show prints what a test printed, set in, without the lines that every test
// has.
func (g *gotest) show(said *bytes.Buffer) {
	if said == nil {
		return
	}
	for _, line := range strings.Split(strings.TrimRight(said.String(), "\n"), "\n") {
		if !framing(line) {
			fmt.Fprintf(g.screen, "    %s\n", line)
		}
	}
}

func framing(line string) bool {
	line = strings.TrimSpace(line)
	for _, prefix := range []string{"=== RUN", "=== PAUSE", "=== CONT", "=== NAME"} {
		if strings.HasPrefix(line, prefix) {
			return true
		}
	}
	return false
}

// why finds the words of a skip: the last line that a test printed as
// "file.go:12: words", and what follows it.
func why(said *bytes.Buffer) string {
	if said == nil {
		return "no reason given"
	}
	var text []string
	for _, line := range strings.Split(said.String(), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || framing(line) || strings.HasPrefix(line, "--- SKIP") {
			continue
		}
		if file, rest, ok := strings.Cut(line, ".go:"); ok && !strings.ContainsAny(file, " \t") {
			if _, words, ok := strings.Cut(rest, ": "); ok {
				text = []string{words}
				continue
			}
		}
		text = append(text, line)
	}
	if len(text) == 0 {
		return "no reason given"
	}
	return strings.Join(text, " ")
}
