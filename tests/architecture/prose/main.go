// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// hard are the constructions. The first group stands in for a noun that the writer did not
// name, the second gives a thing a mouth ("the file says whether …").
var hard = regexp.MustCompile(`(?i)\b(?:nobody|somebody|whoever|anybody|whatever|of which|of whom|in whose|among whose|` +
	`with which|for which|in which|that which|by way of|the one before|no more|any more|be had|` +
	`stands? (?:by|for|in|there|below|alone))\b` +
	`|(?i:\b(?:says|tells) (?:that|who|whether|why|what|how|of)\b)`)

// A passage is one comment or one string, and where it begins.
type passage struct {
	where string
	text  string
}

// A count is what one package has of one kind of text.
type count struct {
	dir   string
	words int
	hard  int
	lines []string // "file:line: construction: its surroundings", one for each that was counted
}

// rate returns the constructions per 1,000 words, and zero where there are no words.
func (c count) rate() float64 {
	if c.words == 0 {
		return 0
	}
	return 1000 * float64(c.hard) / float64(c.words)
}

func (c *count) add(p passage) {
	c.words += len(strings.Fields(p.text))
	for _, at := range hard.FindAllStringIndex(p.text, -1) {
		c.hard++
		around := p.text[max(0, at[0]-40):min(len(p.text), at[1]+40)]
		c.lines = append(c.lines, fmt.Sprintf("%s: %s: …%s…", p.where, p.text[at[0]:at[1]], strings.ToValidUTF8(around, "")))
	}
}

// total adds up counts.
func total(counts []count) count {
	sum := count{dir: "all"}
	for _, c := range counts {
		sum.words += c.words
		sum.hard += c.hard
	}
	return sum
}

// measure returns, for each directory below the roots that has source files, what its
// comments and its texts have. Tests and their data are left out.
func measure(roots ...string) (comments, texts []count, err error) {
	byDir := map[string][2]*count{}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() {
				if slices.Contains([]string{"testdata", "tests", "vendor"}, entry.Name()) {
					return filepath.SkipDir
				}
				return nil
			}
			said, written, err := read(name)
			if err != nil || said == nil && written == nil {
				return err
			}
			dir := filepath.Dir(name)
			if byDir[dir] == [2]*count{} {
				byDir[dir] = [2]*count{{dir: dir}, {dir: dir}}
			}
			for _, p := range said {
				byDir[dir][0].add(p)
			}
			for _, p := range written {
				byDir[dir][1].add(p)
			}
			return nil
		})
		if err != nil {
			return nil, nil, fmt.Errorf("read the sources below %s: %w", root, err)
		}
	}
	for _, both := range byDir {
		comments, texts = append(comments, *both[0]), append(texts, *both[1])
	}
	worstFirst := func(a, b count) int {
		return cmp.Or(cmp.Compare(b.rate(), a.rate()), strings.Compare(a.dir, b.dir))
	}
	slices.SortFunc(comments, worstFirst)
	slices.SortFunc(texts, worstFirst)
	return comments, texts, nil
}

// read returns the comments and the texts of one file, and nothing for a file that is not a
// source file of the product.
func read(name string) (comments, texts []passage, err error) {
	switch ext := filepath.Ext(name); {
	case strings.HasSuffix(name, "_test.go"):
		return nil, nil, nil
	case ext == ".go":
		return readGo(name)
	case ext == ".c" || ext == ".h":
		src, err := os.ReadFile(name)
		if err != nil {
			return nil, nil, err
		}
		comments, texts = readC(name, src)
		return comments, texts, nil
	}
	return nil, nil, nil
}

func readGo(name string) (comments, texts []passage, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	place := func(at token.Pos) string {
		return name + ":" + strconv.Itoa(files.Position(at).Line)
	}
	for _, group := range file.Comments {
		if text := group.Text(); text != "" && !strings.HasPrefix(text, "SPDX-") {
			comments = append(comments, passage{place(group.Pos()), join(text)})
		}
	}
	var tag ast.Expr
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Field:
			tag = n.Tag // a machine reads it
		case ast.Expr:
			text, ok := literal(n)
			if !ok || n == tag {
				return true
			}
			if len(strings.Fields(text)) >= 3 {
				texts = append(texts, passage{place(n.Pos()), join(text)})
			}
			return false
		}
		return true
	})
	return comments, texts, nil
}

// literal returns the text of a string that is written out in the code, in one piece or in
// pieces that are added up.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		left, ok := literal(e.X)
		right, too := literal(e.Y)
		return left + right, e.Op == token.ADD && ok && too
	}
	return "", false
}

// join makes one line of a text, without the examples in it, which begin with a tab.
func join(text string) string {
	var kept []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "\t") {
			kept = append(kept, strings.TrimSpace(line))
		}
	}
	return strings.Join(kept, " ")
}

// cToken is what a comment or a string of C can be mistaken for: whichever begins first counts.
var cToken = regexp.MustCompile(`(?s)/\*.*?\*/|(?://[^\n]*\n[ \t]*)+|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`)

var cEdge = regexp.MustCompile(`(?m)^\s*(?:\*/?|//+|/\*+) ?`)

func readC(name string, src []byte) (comments, texts []passage) {
	for _, at := range cToken.FindAllIndex(src, -1) {
		token := string(src[at[0]:at[1]])
		where := name + ":" + strconv.Itoa(1+bytes.Count(src[:at[0]], []byte("\n")))
		switch {
		case strings.HasPrefix(token, "/"):
			text := strings.TrimSpace(cEdge.ReplaceAllString(strings.TrimSuffix(token, "*/"), ""))
			if !strings.HasPrefix(text, "SPDX-") {
				comments = append(comments, passage{where, strings.Join(strings.Fields(text), " ")})
			}
		case token[0] == '"' && len(strings.Fields(token)) >= 3:
			texts = append(texts, passage{where, token[1 : len(token)-1]})
		}
	}
	return comments, texts
}

func main() {
	verbose := flag.Bool("v", false, "print each place that was counted")
	flag.Parse()
	roots := flag.Args()
	if len(roots) == 0 {
		roots = product
	}
	comments, texts, err := measure(roots...)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(1)
	}
	for _, kind := range []struct {
		name   string
		counts []count
	}{{"comments", comments}, {"texts", texts}} {
		sum := total(kind.counts)
		fmt.Printf("%s: %.1f per 1,000 words (%d words)\n", kind.name, sum.rate(), sum.words)
		for _, c := range kind.counts {
			if c.hard > 0 {
				fmt.Printf("  %5.1f %s (%d in %d words)\n", c.rate(), c.dir, c.hard, c.words)
			}
			for _, line := range c.lines {
				if *verbose {
					fmt.Printf("        %s\n", line)
				}
			}
		}
	}
}

// product is what the bars are about.
var product = []string{"cmd", "internal", "pkg"}
