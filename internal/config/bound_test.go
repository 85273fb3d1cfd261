// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/cost"
)

// listed is n elements with commas between.
func listed(n int, of func(i int) string) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(of(i))
	}
	return b.String()
}

func zero(int) string { return "0" }

// Files of the largest size with too much of something are refused before the YAML library has
// them, which allocated 800 bytes for each of their bytes.
func TestFilesOfTooMuchCostLittle(t *testing.T) {
	const n = 500_000
	for _, tt := range []struct{ name, in, want string }{
		{"zeros alone", "[" + listed(n, zero) + "]", "f:1: the list or mapping in brackets that is on this line, or begins here, has more than 10000 values"},
		{"zeros for devices", head + "    - devices: [" + listed(n, zero) + "]\n      mode: whole\n", "f:4: the list or mapping in brackets"},
		{"zeros in an entry in brackets", head + "    - {devices: [" + listed(n, zero) + "], mode: whole}\n", "f:4: the list or mapping in brackets"},
		{"zeros on lines of their own", head + "    - devices: [\n" + strings.Repeat("0,\n", n/2) + "0]\n      mode: whole\n", "f:4: the list or mapping in brackets"},
		{"zeros of the MIG manager", migHead + "  - {devices: [" + listed(n, zero) + "], mig-enabled: false}\n", "f:4: the list or mapping in brackets"},
		{"numbers", head + "    - {devices: [" + listed(n/4, func(i int) string { return fmt.Sprint(i) }) + "], mode: whole}\n", "f:4: the list or mapping in brackets"},
		{"a million entries", "[" + listed(1_000_000, zero) + "]", "f:1: the file has 2000001 bytes: at most 1048576 are read"},
		{"texts without commas", "[" + strings.Repeat(`""`, n) + "]", "f:1: the list or mapping in brackets"},
		{"tags", "[" + strings.Repeat("!a ", n/2) + "]", "f:1: the list or mapping in brackets"},
		{"keys", "[" + strings.Repeat("? ", n) + "]", "f:1: the list or mapping in brackets"},
		{"brackets", strings.Repeat("[", n) + strings.Repeat("]", n), "f:1: the list or mapping in brackets"},
		{"a quote that stays open in brackets", `['` + strings.Repeat("0,", n) + "\n", "f:1: the list or mapping in brackets"},
		{"a list of lines", head + strings.Repeat("    - 0\n", 120_000), "f:110001: up to here the file has more than 110000 keys, values and lines"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var err error
			in := []byte(tt.in)
			if got := cost.Allocated(func() { _, err = Parse("f", in) }); got > uint64(20*len(in)) {
				t.Errorf("%d bytes are allocated for a file of %d", got, len(in))
			}
			if lines := told(t, err); !strings.HasPrefix(lines[0], tt.want) || len(lines) != 1 {
				t.Errorf("it says %.300q, want %q", lines, tt.want)
			}
		})
	}
}

// What is read costs in proportion to its size, or no more from some size on, whatever there
// is much of.
func TestWorkGrowsWithTheFile(t *testing.T) {
	count := func(i int) string { return fmt.Sprintf("%dg.%dgb: 2147483647", 1+i%7, 1+i) }
	long := strings.Repeat("x", 1<<18)
	for _, tt := range []struct {
		name string
		in   func(n int) string
		want string
	}{
		{"devices", func(n int) string { return head + "    - {devices: [" + listed(n, zero) + "], mode: whole}\n" }, "f:4: devices has 4000 elements: at most 256 are read, since no node has so many GPUs: name those of a node, or all"},
		{"devices on lines", func(n int) string {
			return head + "    - devices:\n" + strings.Repeat("      - 0\n", n) + "      mode: whole\n"
		}, "f:5: devices has 4000 elements"},
		{"UUIDs", func(n int) string {
			return head + "    - {devices: [" + listed(n, func(i int) string { return fmt.Sprintf("GPU-%x", i) }) + "], mode: whole}\n"
		}, "f:4: devices has 4000 elements"},
		{"devices of the MIG manager", func(n int) string {
			return migHead + "  - {devices: [" + listed(n, zero) + "], mig-enabled: false}\n"
		}, "f:4: devices has 4000 elements"},
		{"filters", func(n int) string {
			return migHead + "  - {device-filter: [" + listed(n, func(int) string { return "'0x20B210DE'" }) + "], devices: all, mig-enabled: false}\n"
		}, "f:4: device-filter has 4000 elements: at most 1024 are read"},
		{"counts", func(n int) string {
			return head + "    - {devices: all, mode: mig, geometry: {" + listed(n, count) + "}}\n"
		}, `f:4: the count of "1g.1gb" is at most 30000, not 2147483647`},
		{"counts of the MIG manager", func(n int) string {
			return migHead + "  - {devices: all, mig-enabled: true, mig-devices: {" + listed(n, count) + "}}\n"
		}, `f:4: the count of "1g.1gb" is at most 30000, not 2147483647`},
		{"replicas", func(n int) string {
			return head + strings.Repeat("    - {devices: all, mode: shared, replicas: 99999999999}\n", n)
		}, `f:4: replicas is at most 30000, not 99999999999`},
		{"profiles", func(n int) string {
			return head + "    - {devices: all, mode: mig, profiles: [" + listed(2*n, func(i int) string { return fmt.Sprintf("1g.%dgb", i+1) }) + "]}\n"
		}, "f:4: profiles has 8000 elements: at most 4096 are read, since no GPU has so many MIG profiles: name those of a model"},
		{"keys that there are not", func(n int) string {
			return head + "    - {" + listed(n, func(i int) string { return fmt.Sprintf("mod%d: 1", i) }) + "}\n"
		}, "f:4: an entry has 4000 elements: at most 64 are read, since it has devices, mode"},
		{"entries", func(n int) string { return head + strings.Repeat("    - {devices: all, mode: x}\n", n) }, "f:4: mode is whole"},
		{"partitions", func(n int) string {
			return "version: v1\npartitions:\n" + strings.ReplaceAll(listed(n, func(i int) string { return fmt.Sprintf("  p%d: []", i) }), ",", "\n")
		}, `f:3: partition "p0" is an empty list`},
		{"depth in brackets", func(n int) string { return head + "    - devices: " + strings.Repeat("[", n) + strings.Repeat("]", n) }, "f:4: the file is not YAML: values are nested more than 64 levels deep, and a partition file needs six"},
		{"depth in lines", func(n int) string { return head + "    " + strings.Repeat("- ", n) + "x\n" }, "f:4: the file is not YAML: values are nested more than 64 levels deep"},
		{"aliases of a long text", func(n int) string {
			return head + "    - {devices: [" + listed(n, func(i int) string {
				if i == 0 {
					return "&a " + long
				}
				return "*a"
			}) + "], mode: whole}\n"
		}, "f:4: a text of 262144 bytes: at most 4096 are read, and no name, pattern or number is longer"},
		{"a pattern of stars", func(n int) string {
			return head + "    - {devices: {model: '" + strings.Repeat("*a", n) + "'}, mode: whole}\n"
		}, "f:4: a text of 8000 bytes"},
		{"a text in many lines", func(n int) string { return head + "    - devices: |\n" + strings.Repeat("        a\n", n) }, "f:4: a text of 8000 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			work := func(n int) (uint64, error) {
				var err error
				in := []byte(tt.in(n))
				return cost.Allocated(func() {
					var f *File
					if f, err = Parse("f", in); err == nil {
						_, err = f.Desire("default", node("NVIDIA A30"), Node{Unit: 1024})
					}
				}), err
			}
			_, _ = work(1000)
			few, _ := work(1000)
			many, err := work(4000)
			if lines := told(t, err); !strings.HasPrefix(lines[0], tt.want) {
				t.Errorf("it says %.300q, want %q", lines, tt.want)
			}
			if many > 6*few+1<<20 {
				t.Errorf("4000 allocate %d bytes, and 1000 allocate %d", many, few)
			}
		})
	}
}

// What honest files have much of is read: a partition for each of thousands of nodes, a file
// that is nearly all comments, one that a program wrote in brackets.
func TestLargeHonestFiles(t *testing.T) {
	var nodes, brackets []string
	for i := range 6000 {
		nodes = append(nodes, fmt.Sprintf("  node-%d.example.com: # it's one, of many: [see \"the list\", there\n    - devices: [0, 1, 2, 3]\n      mode: mig\n      geometry: {\"1g.5gb\": 7}\n", i))
	}
	for i := range 300 {
		brackets = append(brackets, fmt.Sprintf("    \"node-%d\": [\n      {\"devices\": [0, 1, 2, 3], \"mode\": \"shared\", \"replicas\": 4}\n    ]", i))
	}
	for name, in := range map[string]string{
		"a partition for each node": "version: v1\npartitions:\n" + strings.Join(nodes[:5400], ""),
		"comments":                  strings.Repeat("# It's a comment: with commas, quotes \" and [brackets.\n", 15_000) + head + "    - {devices: all, mode: whole}\n",
		"JSON":                      "{\n  \"version\": \"v1\",\n  \"partitions\": {\n" + strings.Join(brackets, ",\n") + "\n  }\n}\n",
		"a long text is no bracket": head + "    - devices: {model: 'NVIDIA [AH]100*'}\n      mode: whole\n" + strings.Repeat("    - devices: [GPU-0a]\n      mode: off\n", 9000),
	} {
		if f, err := Parse("f", []byte(in)); err != nil {
			t.Errorf("%s (%d bytes): %v", name, len(in), err)
		} else if len(f.Names()) == 0 {
			t.Errorf("%s has no partition", name)
		}
	}
}

// Counts as large as may be written are refused by arithmetic, not by trying.
func TestHugeCountsCostLittle(t *testing.T) {
	inv := cards(t, "a100-80")
	work := func(n int) uint64 {
		f := mustParse(t, head+fmt.Sprintf("    - {devices: all, mode: mig, geometry: {1g.10gb: %d, 2g.20gb: %d, 1c.3g.40gb: %d}}\n", n, n, n))
		return cost.Allocated(func() {
			if _, err := f.Desire("default", inv, Node{Unit: 1024}); err == nil {
				t.Errorf("a geometry with %d of each fits", n)
			}
		})
	}
	_ = work(100)
	if few, many := work(100), work(30_000); many > 2*few+1<<20 {
		t.Errorf("counts of 30,000 allocate %d bytes, of 100 %d", many, few)
	}
}
