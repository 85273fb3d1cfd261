// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNames: each name of a real library is found through the cap's, by dlsym on
// its handle: an override of ours, and for all others the real one's. What the
// driver lacks is not found, whoever has a function of that name.
func TestNames(t *testing.T) {
	b := open(t)
	program := judge(t)
	for _, d := range judges {
		t.Run(d.version, func(t *testing.T) {
			cuda, nvml := b.install(t, d)
			b.judgeNames(t, program, cuda)
			b.judgeNames(t, program, nvml)
		})
	}
}

func (b *bench) judgeNames(t *testing.T, program string, s stand) {
	t.Helper()
	overrides, theirs := b.overrides(t, s.name), exports(t, s.file)
	all := slices.Concat(overrides, theirs)
	slices.Sort(all)
	for _, line := range say(t, strings.Join(slices.Compact(all), "\n")+"\n", nil, program, "names", s.cap, s.real) {
		symbol, whose, _ := strings.Cut(line, " ")
		want := "real"
		if _, is := slices.BinarySearch(overrides, symbol); is {
			want = "cap"
		}
		if _, has := slices.BinarySearch(theirs, symbol); !has {
			want = "none"
		}
		if whose != want {
			t.Errorf("%s: dlsym finds %s: %s; want %s", s.name, symbol, whose, want)
		}
	}
	t.Logf("%s has %d names, of which the cap has %d", s.name, len(theirs), len(overrides))
}

// TestLinked: a program that is linked against the cap's library, as fitted to a driver, finds
// every function of the driver's there, and gets what dlsym would find.
func TestLinked(t *testing.T) {
	b := open(t)
	for _, d := range judges {
		t.Run(d.version, func(t *testing.T) {
			cuda, _ := b.install(t, d)
			dir, theirs, ours := t.TempDir(), functions(t, cuda.file), b.overrides(t, cuda.name)
			write(t, filepath.Join(dir, "linked.h"), "NAME("+strings.Join(theirs, ")\nNAME(")+")\n")
			program := filepath.Join(dir, "linked")
			build(t, "linked.c", program, "-I"+dir, "-fPIC", "-Wl,--allow-shlib-undefined", cuda.cap)
			lines := say(t, "", []string{"LD_BIND_NOW=1", "LD_LIBRARY_PATH=" + filepath.Dir(cuda.cap)}, program, cuda.real)
			if len(lines) != len(theirs) {
				t.Errorf("%d lines of %d names", len(lines), len(theirs))
			}
			for _, line := range lines {
				symbol, whose, _ := strings.Cut(line, " ")
				want := "real"
				if _, is := slices.BinarySearch(ours, symbol); is {
					want = "cap"
				}
				if whose != want {
					t.Errorf("%s is linked to: %s; want %s", symbol, whose, want)
				}
			}
		})
	}
}

// TestAddresses: cuGetProcAddress makes the bare driver's choice, for every name,
// version and flag.
func TestAddresses(t *testing.T) {
	b := open(t)
	program := judge(t)
	for _, d := range judges {
		t.Run(d.version, func(t *testing.T) {
			cuda, _ := b.install(t, d)
			if sum := b.judgeAddresses(t, program, cuda); strings.Contains(sum, " 0 of the cap") {
				t.Errorf("nothing is counted: %s", sum)
			}
		})
	}
}

// judgeAddresses returns how many questions there were, and what came of them.
func (b *bench) judgeAddresses(t *testing.T, program string, s stand) string {
	t.Helper()
	var input strings.Builder
	overrides := b.overrides(t, s.name)
	for _, name := range overrides {
		fmt.Fprintf(&input, "over %s\n", name)
	}
	asked := slices.Concat(overrides, exports(t, s.file), []string{"", "cuNothing", "cuMemAlloc_v", "cuMemAllo", "cuMemAlloc_v9"})
	all, err := names()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range all {
		asked = append(asked, n.symbol)
	}
	for _, name := range asked {
		asked = append(asked, base(name))
	}
	slices.Sort(asked)
	for _, name := range slices.Compact(asked) {
		fmt.Fprintf(&input, "ask %s\n", name)
	}
	lines := say(t, input.String(), nil, program, "addresses", s.cap, s.real)
	sum := lines[len(lines)-1]
	t.Log(sum)
	if !strings.HasSuffix(sum, " 0 wrong") {
		t.Error(strings.Join(lines, "\n"))
	}
	return sum
}
