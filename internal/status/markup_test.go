// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestPut(t *testing.T) {
	var m markup
	m.put(`<p class="{}">{}</p>`, `"{}"`, "<{}> & 'a+b'")
	m.given(`<b>{}</b>`, "")
	m.given(`<b>{}</b>`, "{}")
	m.broken(".", "1c.3g<")
	const want = `<p class="&#34;{}&#34;">&lt;{}&gt; &amp; &#39;a&#43;b&#39;</p><b>{}</b>1c.<wbr/>3g&lt;`
	if got := m.b.String(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// misplaced says which hole of a constant is where escaping is not enough; it is empty if none is.
func misplaced(s string) string {
	for at := 0; ; at += len(hole) {
		next := strings.Index(s[at:], hole)
		if next < 0 {
			return ""
		}
		at += next
		before := s[:at]
		tag := before[strings.LastIndexByte(before, '>')+1:]
		name, value := "", ""
		if i := strings.LastIndex(tag, `="`); i >= 0 {
			name, value = tag[strings.LastIndexByte(tag[:i], ' ')+1:i], tag[i+2:]
		}
		switch quoted := strings.Count(tag, `"`)%2 == 1; {
		case strings.Count(before, "<style") > strings.Count(before, "</style"), strings.Contains(before, "<script"):
			return "in a style or a script: " + before
		case quoted && name == "href" && value != "#gpu-":
			return "in an address: " + before
		case quoted && (name == "" || name == "style" || name == "src" || strings.HasPrefix(name, "on")):
			return "in an attribute that is not for values: " + before
		case !quoted && strings.ContainsAny(tag, `<="`):
			return "in a tag and outside quotes: " + before
		}
	}
}

// literal is the text of a literal, or of some that are joined by +.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		x, ok := literal(e.X)
		y, also := literal(e.Y)
		return x + y, ok && also && e.Op == token.ADD
	}
	return "", false
}

// TestHoles reads every constant of the page: it has as many holes as there are values for it, and
// each is where escaping is enough. Nothing but the style sheet is made a constant by a conversion.
func TestHoles(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			isLiteral, wrong := judge(call)
			if isLiteral {
				seen++
			}
			if wrong != "" {
				t.Errorf("%s: %s", set.Position(call.Pos()), wrong)
			}
			return true
		})
	}
	if seen < 50 {
		t.Errorf("found %d constants, want 50 at least", seen)
	}
	for s, want := range map[string]string{
		`<p class="{}">{}</p>`: "", ` class="x {}"`: "", `>{}.</li>`: "", `{}`: "",
		`<a href="#gpu-{}">`: "", `<a href="?x" class="{}">`: "", `<a href="{}">`: "address", `<a href="/{}">`: "address",
		`<p {}>`: "quotes", `<p class={}>`: "quotes", `<p class='{}'>`: "quotes", `<{}>`: "quotes",
		`<p onload="{}">`: "not for values", `<p style="{}">`: "not for values",
		`<style>{}`: "style", `<p>{}</p><script>x{}`: "script",
	} {
		if got := misplaced(s); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", s, got, want)
		}
	}
}

// judge says whether a call puts a literal, and what is wrong with it, or with a conversion.
func judge(call *ast.CallExpr) (isLiteral bool, wrong string) {
	if to, ok := call.Fun.(*ast.Ident); ok && to.Name == "constant" {
		if x, ok := call.Args[0].(*ast.Ident); !ok || x.Name != "style" {
			return false, "makes a constant of what is none"
		}
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != "put" && f.Sel.Name != "given" {
		return false, ""
	}
	s, ok := literal(call.Args[0])
	if !ok {
		// A constant that is written elsewhere has a name: color, constant(style), the s of given.
		switch call.Args[0].(type) {
		case *ast.Ident, *ast.CallExpr:
			return false, ""
		}
		return false, "puts what this test cannot read"
	}
	if holes := strings.Count(s, hole); holes != len(call.Args)-1 {
		return true, fmt.Sprintf("%d holes and %d values", holes, len(call.Args)-1)
	}
	return true, misplaced(s)
}
