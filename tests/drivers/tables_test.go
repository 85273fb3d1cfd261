// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestTable: names.txt says of the real drivers what they do.
func TestTable(t *testing.T) {
	b := open(t)
	program := judge(t)
	all, err := names()
	if err != nil {
		t.Fatal(err)
	}
	table := map[string]name{}
	for _, n := range all {
		if _, twice := table[n.symbol]; twice {
			t.Errorf("names.txt has %s twice", n.symbol)
		}
		table[n.symbol] = n
	}
	for _, d := range judges {
		t.Run(d.version, func(t *testing.T) {
			cuda, _ := b.install(t, d)
			var input strings.Builder
			for _, symbol := range exports(t, cuda.file) {
				n, listed := table[symbol]
				switch {
				case !listed:
					t.Errorf("names.txt lacks %s", symbol)
				case n.since == 0:
					fmt.Fprintf(&input, "%s %s\n", symbol, base(symbol))
				default:
					fmt.Fprintf(&input, "%s %s\n", symbol, n.base)
				}
			}
			for _, line := range say(t, input.String(), nil, program, "since", cuda.cap, cuda.real) {
				var symbol, asked string
				var since int
				if _, err := fmt.Sscan(line, &symbol, &asked, &since); err != nil || since != table[symbol].since {
					t.Errorf("the driver says %q, names.txt %d", line, table[symbol].since)
				}
			}
		})
	}
}

// TestClasses: each function that any driver has is counted, which is to say that
// the cap stands in front of it, or classes.txt says why it need not be.
func TestClasses(t *testing.T) {
	b := open(t)
	overrides := b.overrides(t, cudaName)
	all, err := names()
	if err != nil {
		t.Fatal(err)
	}
	list, err := classes()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	counted := 0
	for _, n := range all {
		classed := false
		for _, c := range list {
			for _, p := range c.patterns {
				if ok, _ := path.Match(p, base(n.symbol)); ok {
					classed, found[p] = true, true
				}
			}
		}
		if _, is := slices.BinarySearch(overrides, n.symbol); is {
			counted++
		} else if !classed {
			t.Errorf("%s is neither counted nor in classes.txt: does it take or give GPU memory?", n.symbol)
		}
	}
	for _, c := range list {
		for _, p := range c.patterns {
			if !found[p] {
				t.Errorf("classes.txt: no driver has %s (%q)", p, c.reason)
			}
		}
	}
	t.Logf("%d names, of which %d are counted", len(all), counted)
}

// TestDoors: what the cap, and the emulated driver, take for the driver's choice is
// what drivers choose.
func TestDoors(t *testing.T) {
	all, err := names()
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range []struct{ file, line string }{
		{"../../pkg/memcap/lib/c/driver.h", `(?m)^ {4}X\((\w+), (\d+), (\w+),`},
		{"../emulator/lib/c/cuda_names.h", `(?m)^[VT]\((\w+), (\d+), (\w+)`},
	} {
		data, err := os.ReadFile(list.file)
		if err != nil {
			t.Fatal(err)
		}
		lines := regexp.MustCompile(list.line).FindAllStringSubmatch(string(data), -1)
		for _, d := range lines {
			listed := slices.ContainsFunc(all, func(n name) bool { return n.base == d[1] && strconv.Itoa(n.since) == d[2] && n.symbol == d[3] })
			if !listed && !strings.HasPrefix(d[3], "cuEmulator") {
				t.Errorf("%s says that drivers give %s for %s as of %s; names.txt does not", filepath.Base(list.file), d[3], d[1], d[2])
			}
		}
		if len(lines) == 0 {
			t.Errorf("%s has no lines", list.file)
		}
	}
}

// TestModels: drivers of CUDA 12.8, 13.0 and 13.4, which no archive of packages has,
// as names.txt describes them, in three kinds: as the real ones are; with forms that
// have a number of their own given by their whole names too, by which NVIDIA's
// bindings ask; and with functions that are looked up by their names within the
// driver itself, which so come upon the cap's.
func TestModels(t *testing.T) {
	b := open(t)
	program := judge(t)
	all, err := names()
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string][]string{"plain": {"-Wl,-Bsymbolic", "-DWHOLE=0"}, "whole": {"-Wl,-Bsymbolic", "-DWHOLE=1"}, "by name": {"-DWHOLE=0"}}
	for _, version := range []int{12080, 13000, 13040} {
		dir := t.TempDir()
		var rows strings.Builder
		for _, n := range all {
			if n.since > version || n.base == "cuGetProcAddress" {
				continue
			}
			is := 0
			if twin(n.symbol) {
				is = 1
			}
			fmt.Fprintf(&rows, "FUNCTION(%d, %q, %d, %s)\n", n.since, n.base, is, n.symbol)
		}
		write(t, filepath.Join(dir, "model.h"), rows.String())
		for kind, args := range kinds {
			t.Run(fmt.Sprintf("%d.%d, %s", version/1000, version%1000/10, kind), func(t *testing.T) {
				model := filepath.Join(t.TempDir(), cudaName)
				build(t, "model.c", model, append([]string{"-O0", "-shared", "-fPIC", "-I" + dir, "-Wl,-soname," + cudaName}, args...)...)
				s := b.put(t, cudaName, model)
				b.judgeNames(t, program, s)
				b.judgeAddresses(t, program, s)
			})
		}
	}
}
