// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	_ "embed"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
)

//go:embed names.txt
var namesText string

//go:embed classes.txt
var classesText string

// name is an export of a driver's library.
type name struct {
	since  int    // the version of CUDA as of which cuGetProcAddress gives it; 0 is never
	base   string // what it is asked by there
	symbol string
}

// names reads names.txt.
func names() ([]name, error) {
	var all []name
	for i, line := range strings.Split(namesText, "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		f := strings.Fields(line)
		if len(f) != 3 {
			return nil, fmt.Errorf("names.txt:%d: want three words, have %q", i+1, line)
		}
		since, err := strconv.Atoi(f[0])
		if err != nil || (since == 0) != (f[1] == "-") {
			return nil, fmt.Errorf("names.txt:%d: want a version of CUDA and a base, or 0 and -: %q", i+1, line)
		}
		all = append(all, name{since, f[1], f[2]})
	}
	return all, nil
}

// forms is what tells the forms of one function apart.
var forms = regexp.MustCompile(`(_v\d)?(_ptsz|_ptds)?$`)

// base is a name without that.
func base(symbol string) string { return forms.ReplaceAllString(symbol, "") }

// twin reports whether a name is for the per-thread default stream.
func twin(symbol string) bool {
	return strings.HasSuffix(symbol, "_ptsz") || strings.HasSuffix(symbol, "_ptds")
}

// class is why some functions need not be counted.
type class struct {
	reason   string
	patterns []string
}

// tooWide is what a pattern of classes.txt must be longer than, without its stars:
// one for every name that begins with "cuMem" would say yes to what nobody has
// looked at.
const tooWide = 5

// classes reads classes.txt.
func classes() ([]class, error) {
	var all []class
	seen := map[string]bool{}
	for i, line := range strings.Split(classesText, "\n") {
		fail := func(what string) error { return fmt.Errorf("classes.txt:%d: %s: %q", i+1, what, line) }
		switch {
		case line == "" || line[0] == '#':
		case line[0] != ' ':
			kind, reason, _ := strings.Cut(line, ": ")
			if kind != "harmless" && kind != "read" || len(reason) < 10 {
				return nil, fail(`want "harmless: " or "read: " and a reason`)
			}
			all = append(all, class{reason: line})
		default:
			if len(all) == 0 {
				return nil, fail("a name before the first reason")
			}
			for _, p := range strings.Fields(line) {
				if _, err := path.Match(p, ""); err != nil || seen[p] || len(strings.ReplaceAll(p, "*", "")) <= tooWide {
					return nil, fail("no pattern, there already, or too wide: " + p)
				}
				seen[p] = true
				c := &all[len(all)-1]
				c.patterns = append(c.patterns, p)
			}
		}
	}
	return all, nil
}
