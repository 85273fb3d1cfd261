// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// noPromise returns the sentences of README and docs/README.md that promise nothing, with the reason. In the file
// each is a paragraph: the reason in the first line, then the sentence.
func noPromise(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for part := range strings.SplitSeq(strings.TrimSpace(string(read(t, "testdata/no-promise.txt"))), "\n\n") {
		reason, sentence, _ := strings.Cut(part, "\n")
		out[unmarked(sentence)] = reason
	}
	return out
}

// whereTestsRun says of each package what its tests run on, in the words of docs/promises.md. The first entry that
// is the package, or a folder above it, counts.
var whereTestsRun = []place{
	{"tests/e2e", "node"}, {"tests/burst", "node"}, {"tests/why", "node"}, {"tests/release", "node"},
	{"tests/cluster", "node"}, {"tests/emulator/deploy", "node"},
	{"tests/queues", "hollow"}, {"tests/crowd", "hollow"}, {"tests/fleet", "hollow"}, {"tests/liqo", "hollow"},
	{"tests/peers", "NVIDIA"}, {"tests/drivers", "NVIDIA"},
	{"deployments", "API"}, {"tests/autoscalers", "API"}, {"tests/monitoring", "API"},
	{"tests/memcap", "emulated"}, {"tests/hardware", "emulated"}, {"tests/emulator", "emulated"},
	{"tests/crash", "emulated"}, {"tests/foreign", "emulated"}, {"pkg/gpu/nvml", "emulated"},
	{"internal", "code"}, {"pkg", "code"}, {"cmd", "code"}, {"tests/order", "code"},
}

type place struct{ dir, on string }

// onInOrder are the words of whereTestsRun as a row has them.
var onInOrder = []string{"node", "hollow", "NVIDIA", "API", "emulated", "code"}

// unmarked returns text without links' addresses, bold and runs of spaces.
func unmarked(text string) string {
	text = regexp.MustCompile(`!?\[((?:[^\]\\]|\\.)*)\]\([^)]*\)`).ReplaceAllString(text, "$1")
	return strings.Join(strings.Fields(strings.ReplaceAll(text, "**", "")), " ")
}

// sentences returns the sentences of a Markdown text, without code, headings and pictures. A table's row is one
// sentence, its cells joined by " · ".
func sentences(text string) []string {
	text = regexp.MustCompile("(?ms)^```.*?^```\n").ReplaceAllString(text, "\n")
	text = regexp.MustCompile(`(?m)^(    .*|#.*|!\[.*|\|[-|]+)$`).ReplaceAllString(text, "")
	text = regexp.MustCompile(`(?m)^(- |\|)`).ReplaceAllString(text, "\n$1")
	var out []string
	for _, block := range regexp.MustCompile(`\n\s*\n`).Split(text, -1) {
		block = unmarked(strings.TrimPrefix(strings.TrimSpace(block), "- "))
		if row, ok := strings.CutPrefix(block, "|"); ok {
			cells := strings.Split(strings.TrimSuffix(row, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			if cells[0] != "" { // else it is the head
				out = append(out, strings.Join(cells, " · "))
			}
			continue
		}
		for _, end := range regexp.MustCompile("[.?!] [A-Z`]").FindAllStringIndex(block, -1) {
			from := len(block) - len(strings.TrimLeft(block, "\x00"))
			out = append(out, strings.ReplaceAll(block[from:end[0]+1], "\x00", ""))
			block = strings.Repeat("\x00", end[1]-1) + block[end[1]-1:]
		}
		if block = strings.Trim(block, "\x00"); block != "" {
			out = append(out, block)
		}
	}
	return out
}

// promised returns the sentences of README, but for its limits, and of the beginning of docs/README.md.
func promised(t *testing.T) []string {
	t.Helper()
	before, after, ok := strings.Cut(readme(t), "\n## Limits\n")
	_, after, ok2 := strings.Cut(after, "\n## ")
	start, _, ok3 := strings.Cut(string(read(t, "../docs/README.md")), "\n**")
	if !ok || !ok2 || !ok3 {
		t.Fatal("README has no section Limits with another one behind it, or docs/README.md no first list")
	}
	return append(append(sentences(before), sentences("## "+after)...), sentences(start)...)
}

// A promise is a row of the table in docs/promises.md.
type promise struct {
	says  string
	tests map[string][]string // by package
	on    []string
	card  string
}

func promises(t *testing.T) (rows []promise) {
	t.Helper()
	cell := regexp.MustCompile("^`([a-z0-9/-]+)` (Test\\w+(?:, Test\\w+)*)$")
	for line := range strings.Lines(string(read(t, "../docs/promises.md"))) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if says, ok := strings.CutPrefix(strings.TrimSpace(cells[0]), "“"); ok {
			if len(cells) != 4 || !strings.HasSuffix(says, "”") {
				t.Errorf("docs/promises.md: a row has four cells, the first in quotes: %s", line)
				continue
			}
			p := promise{says: unmarked(strings.TrimSuffix(says, "”")), card: strings.TrimSpace(cells[3]),
				on: strings.Split(strings.TrimSpace(cells[2]), ", "), tests: map[string][]string{}}
			for part := range strings.SplitSeq(cells[1], "; ") {
				m := cell.FindStringSubmatch(strings.TrimSpace(part))
				if m == nil {
					t.Errorf("docs/promises.md: %q is not `PACKAGE` Test…, Test…", part)
					continue
				}
				p.tests[m[1]] = strings.Split(m[2], ", ")
			}
			rows = append(rows, p)
		}
	}
	if len(rows) < 40 {
		t.Fatalf("docs/promises.md has %d promises: this test does not look where they are", len(rows))
	}
	return rows
}

// Each sentence of README that promises something is in the table of promises, word for word, and the table has
// no other.
func TestEachPromiseIsInTheTable(t *testing.T) {
	rows := map[string]bool{}
	for _, p := range promises(t) {
		if rows[p.says] {
			t.Errorf("docs/promises.md has two rows of %q", p.says)
		}
		rows[p.says] = true
	}
	said, none := map[string]bool{}, noPromise(t)
	for _, s := range promised(t) {
		said[s] = true
		switch {
		case rows[s] && none[s] != "":
			t.Errorf("docs/promises.md has a row of %q, which promises nothing: %s", s, none[s])
		case !rows[s] && none[s] == "":
			t.Errorf("docs/promises.md has no row of this sentence, and testdata/no-promise.txt no reason:\n%s", s)
		}
	}
	for s := range rows {
		if !said[s] {
			t.Errorf("docs/promises.md quotes what README does not say:\n%s", s)
		}
	}
	for s := range none {
		if !said[s] {
			t.Errorf("testdata/no-promise.txt has what README does not say:\n%s", s)
		}
	}
	if len(said) < 60 {
		t.Errorf("README has %d sentences: this test does not look where they are", len(said))
	}
}

// testsOf returns the names of a package's tests.
func testsOf(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("docs/promises.md names %s, which has no tests", dir)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				names = append(names, f.Name.Name)
			}
		}
	}
	return names
}

// Each test that the table names exists, and runs on what the row says. What a card is to show has been tried on
// one, or the row says never.
func TestEachPromiseNamesItsTests(t *testing.T) {
	known := map[string][]string{}
	for _, p := range promises(t) {
		on := map[string]bool{}
		for dir, names := range p.tests {
			if known[dir] == nil {
				known[dir] = testsOf(t, dir)
			}
			for _, name := range names {
				if !slices.Contains(known[dir], name) {
					t.Errorf("docs/promises.md names %s of %s, which is not there, for\n%s", name, dir, p.says)
				}
			}
			i := slices.IndexFunc(whereTestsRun, func(w place) bool { return strings.HasPrefix(dir+"/", w.dir+"/") })
			if i < 0 {
				t.Errorf("whereTestsRun does not have %s", dir)
				continue
			}
			on[whereTestsRun[i].on] = true
		}
		want := slices.DeleteFunc(slices.Clone(onInOrder), func(word string) bool { return !on[word] })
		if !slices.Equal(p.on, want) {
			t.Errorf("docs/promises.md says that the tests of this run on %q, want %q:\n%s", p.on, want, p.says)
		}
		cards := []string{"–", "never", "H200", "H200, in part"}
		if card, _, _ := strings.Cut(p.card, "; "); !slices.Contains(cards, card) {
			t.Errorf("docs/promises.md says of a card %q, want one of %q, and after a semicolon what is open:\n%s",
				p.card, cards, p.says)
		} else if tried := strings.HasPrefix(card, "H200"); tried != (p.tests["tests/hardware"] != nil) {
			t.Errorf("what was tried on a card names a test of tests/hardware, and nothing else does:\n%s", p.says)
		}
	}
}

// Where what is written about tests lies in folders that are gone, nothing of it is checked.
func TestWhereTestsRunNamesFolders(t *testing.T) {
	for _, w := range whereTestsRun {
		found := false
		err := filepath.WalkDir(filepath.Join("..", w.dir), func(path string, _ fs.DirEntry, err error) error {
			found = found || strings.HasSuffix(path, "_test.go")
			return err
		})
		if err != nil || !found {
			t.Errorf("%s has no tests: %v", w.dir, err)
		}
		if !slices.Contains(onInOrder, w.on) {
			t.Errorf("%s: %q is no word of the table", w.dir, w.on)
		}
	}
}
