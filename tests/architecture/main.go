// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"html"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	module    = "example.com/gpu-agent/"
	picture   = "docs/architecture.svg"
	tableFile = "deps_test.go"
)

func main() {
	if err := write(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func write() error {
	svg, err := render(".")
	if err != nil {
		return err
	}
	text, err := drawnPage(".")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(picture, svg, 0o644), os.WriteFile(page, text, 0o644)) //nolint:gosec // files of the repository
}

// entry is a row of deps_test.go's table.
type entry struct {
	path  string
	floor int
	half  string
	what  string
}

// halves are the columns of the picture, from the left to the right, and what stands above
// them. What both have stands in the middle.
var halves = []struct{ half, title string }{{"agent", "the agent"}, {"both", "both"}, {"placer", "the placer"},
	{"plugin", "kubectl gpu"}}

func column(half string) int {
	for i, h := range halves {
		if h.half == half {
			return i
		}
	}
	return 1
}

// pack is a package of the product.
type pack struct {
	entry
	imports map[string]bool // of the product, by path
	row     int             // 0 is the lowest of all
	x, w    float64         // its left edge and its width
	cell    *cell
}

// render draws the program whose source is below root.
func render(root string) ([]byte, error) {
	table, err := readTable(filepath.Join(root, tableFile))
	if err != nil {
		return nil, err
	}
	packs, err := readPackages(root, table)
	if err != nil {
		return nil, err
	}
	reduce(packs)
	rows, edges := arrange(packs)
	return draw(packs, rows, edges), nil
}

// readTable reads the table of packages. Those that are not part of the product have a
// name in place of a floor, and are left out.
func readTable(file string) ([]entry, error) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		return nil, err
	}
	var out []entry
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || spec.Names[0].Name != "packages" {
			return true
		}
		for _, e := range spec.Values[0].(*ast.CompositeLit).Elts {
			fields := e.(*ast.CompositeLit).Elts
			floor, ok := fields[1].(*ast.BasicLit)
			if !ok {
				continue
			}
			n, _ := strconv.Atoi(floor.Value)
			out = append(out, entry{text(fields[0]), n, fields[2].(*ast.Ident).Name, text(fields[3])})
		}
		return false
	})
	if len(out) == 0 {
		return nil, fmt.Errorf("%s has no table of packages", file)
	}
	return out, nil
}

func text(e ast.Expr) string {
	s, _ := strconv.Unquote(e.(*ast.BasicLit).Value)
	return s
}

// readPackages reads which packages there are and whom each imports.
func readPackages(root string, table []entry) (map[string]*pack, error) {
	packs := map[string]*pack{}
	for _, top := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || path.Ext(p) != ".go" || strings.HasSuffix(p, "_test.go") {
				return err
			}
			rel, err := filepath.Rel(root, p)
			if err != nil {
				return err
			}
			dir := filepath.ToSlash(filepath.Dir(rel))
			r, ok := entryOf(table, dir)
			if !ok {
				return nil // TestFloors says so
			}
			if packs[dir] == nil {
				r.path = dir
				packs[dir] = &pack{entry: r, imports: map[string]bool{}}
			}
			f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			for _, spec := range f.Imports {
				if target, ok := strings.CutPrefix(text(spec.Path), module); ok {
					packs[dir].imports[target] = true
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if packs["cmd/gpu-agent"] == nil {
		return nil, errors.New("there is no cmd/gpu-agent here: run it in the repository's root")
	}
	for _, p := range packs {
		maps.DeleteFunc(p.imports, func(target string, _ bool) bool { return packs[target] == nil })
	}
	return packs, nil
}

func entryOf(table []entry, dir string) (entry, bool) {
	for _, r := range table {
		if r.path == dir {
			return r, true
		}
	}
	for _, r := range table {
		if above, ok := strings.CutSuffix(r.path, "/..."); ok && strings.HasPrefix(dir, above+"/") && dir != "pkg/memcap/lib/build" {
			return r, true
		}
	}
	return entry{}, false
}

// reduce leaves out the imports that follow from others.
func reduce(packs map[string]*pack) {
	below := map[string]map[string]bool{} // what a package brings along
	var all func(p string) map[string]bool
	all = func(p string) map[string]bool {
		if below[p] == nil {
			below[p] = map[string]bool{}
			for target := range packs[p].imports {
				below[p][target] = true
				maps.Copy(below[p], all(target))
			}
		}
		return below[p]
	}
	for p := range packs {
		all(p)
	}
	for _, p := range packs {
		direct := slices.Collect(maps.Keys(p.imports))
		maps.DeleteFunc(p.imports, func(target string, _ bool) bool {
			return slices.ContainsFunc(direct, func(via string) bool { return via != target && below[via][target] })
		})
	}
}

// Measures of the picture, in pixels.
const (
	width, margin    = 1800, 60
	between          = 30
	rowHeight        = 84
	boxHeight        = 30
	perLetter, inner = 8, 20
	titles           = 30 // above the rows
	sweeps           = 8
)

// cell is a part of a row: one half's.
type cell struct {
	packs  []*pack
	column int
}

// arrange gives each package a row and a place in its half's part of it, and returns the rows
// from the lowest up. Then it returns where the columns begin, and where the last one ends.
func arrange(packs map[string]*pack) (rows [][]*pack, edges []float64) {
	depth := map[string]int{} // within its floor
	var deep func(p string) int
	deep = func(p string) int {
		if d, ok := depth[p]; ok {
			return d
		}
		d := 0
		for target := range packs[p].imports {
			if packs[target].floor == packs[p].floor {
				d = max(d, deep(target)+1)
			}
		}
		depth[p] = d
		return d
	}
	byRow := map[[2]int][]*pack{}
	for _, name := range slices.Sorted(maps.Keys(packs)) {
		p := packs[name]
		p.w = float64(len(label(name)))*perLetter + inner
		at := [2]int{p.floor, deep(name)}
		byRow[at] = append(byRow[at], p)
	}
	var cells []*cell
	most := make([]float64, len(halves)) // the widest cell of each column
	for _, at := range slices.SortedFunc(maps.Keys(byRow), func(a, b [2]int) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }) {
		row := make([]*cell, len(halves))
		needs := make([]float64, len(halves))
		for i := range row {
			row[i] = &cell{column: i}
		}
		for _, p := range byRow[at] {
			p.row = len(rows)
			p.cell = row[column(p.half)]
			p.cell.packs = append(p.cell.packs, p)
			needs[p.cell.column] += p.w + inner
		}
		for i := range most {
			most[i] = max(most[i], needs[i])
		}
		cells = append(cells, row...)
		rows = append(rows, byRow[at])
	}
	edges = []float64{margin}
	total := 0.0
	for _, w := range most {
		total += w
	}
	for i, w := range most {
		edges = append(edges, edges[i]+w/total*(width-margin-between))
	}
	for _, c := range cells {
		place(c, edges)
	}
	neighbours := map[*pack][]*pack{}
	for _, name := range slices.Sorted(maps.Keys(packs)) {
		for _, target := range slices.Sorted(maps.Keys(packs[name].imports)) {
			neighbours[packs[name]] = append(neighbours[packs[name]], packs[target])
			neighbours[packs[target]] = append(neighbours[packs[target]], packs[name])
		}
	}
	for range sweeps {
		for _, c := range cells {
			middle := map[*pack]float64{}
			for _, p := range c.packs {
				middle[p] = p.x + p.w/2
				if n := neighbours[p]; len(n) > 0 {
					middle[p] = 0
					for _, o := range n {
						middle[p] += (o.x + o.w/2) / float64(len(n))
					}
				}
			}
			slices.SortStableFunc(c.packs, func(a, b *pack) int {
				return cmp.Or(cmp.Compare(middle[a], middle[b]), strings.Compare(a.path, b.path))
			})
			place(c, edges)
		}
	}
	return rows, edges
}

// place spreads the packages of a cell over its column.
func place(c *cell, edges []float64) {
	left, right := edges[c.column], edges[c.column+1]
	free := right - left
	for _, p := range c.packs {
		free -= p.w
	}
	gap := free / float64(len(c.packs)+1)
	x := left + gap
	for _, p := range c.packs {
		p.x = x
		x += p.w + gap
	}
}

func label(path string) string { return strings.TrimPrefix(path, "internal/") }

// draw writes the picture. The rows are the lowest first.
func draw(packs map[string]*pack, rows [][]*pack, edges []float64) []byte {
	var b bytes.Buffer
	height := len(rows)*rowHeight + 40 + titles
	y := func(row int) int { return height - 20 - (row+1)*rowHeight + (rowHeight-boxHeight)/2 }
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="14" fill="#1f2933" role="img" aria-labelledby="t d">
  <!-- SPDX-License-Identifier: Apache-2.0 -->
  <!-- Written by go run ./tests/architecture -->
  <title id="t">The packages of gpu-agent by floor</title>
  <desc id="d">Each box is a package, each arrow an import. Imports go downward only, from floor 5, the command, to floor 0, the words. On the left is the agent, on the right the placer, between them what both have, and at the right edge the kubectl plugin. Names without pkg or cmd before them are below internal.</desc>
  <rect width="%[1]d" height="%[2]d" rx="8" fill="#fff"/>
`, width, height)
	for low := 0; low < len(rows); {
		high, floor := low, rows[low][0].floor
		for high+1 < len(rows) && rows[high+1][0].floor == floor {
			high++
		}
		shade := [2]string{"#f4f7fa", "#e9eff5"}[floor%2]
		top, span := y(high)-(rowHeight-boxHeight)/2, (high-low+1)*rowHeight
		fmt.Fprintf(&b, "  <rect x=\"10\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\" fill=\"%s\"/>\n  <text x=\"24\" y=\"%d\" font-size=\"20\" font-weight=\"600\" fill=\"#52606d\">%d</text>\n",
			top+2, width-20, span-4, shade, top+span/2+7, floor)
		low = high + 1
	}
	for i, h := range halves {
		fmt.Fprintf(&b, "  <text x=\"%.0f\" y=\"%d\" font-size=\"20\" font-weight=\"600\" text-anchor=\"middle\" fill=\"#52606d\">%s</text>\n", (edges[i]+edges[i+1])/2, titles, h.title)
		if i > 0 {
			fmt.Fprintf(&b, "  <path d=\"M%.0f %dV%d\" stroke=\"#9aa5b1\" stroke-dasharray=\"6 6\"/>\n", edges[i], titles-16, height-20)
		}
	}
	names := slices.Sorted(maps.Keys(packs))
	for _, name := range names {
		p := packs[name]
		targets := slices.SortedFunc(maps.Keys(p.imports), func(a, b string) int {
			return cmp.Or(cmp.Compare(packs[a].x+packs[a].w/2, packs[b].x+packs[b].w/2), strings.Compare(a, b))
		})
		for i, target := range targets {
			t := packs[target]
			x1, y1 := p.x+p.w*float64(i+1)/float64(len(targets)+1), float64(y(p.row)+boxHeight)
			x2, y2 := t.x+t.w/2, float64(y(t.row))
			bend := (y2 - y1) / 2
			fmt.Fprintf(&b, "  <path d=\"M%.0f %.0fC%.0f %.0f %.0f %.0f %.0f %.0fl-3 -6m3 6l3 -6\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.2\"/>\n",
				x1, y1, x1, y1+bend, x2, y2-bend, x2, y2, []string{"#486581", "#7b8794", "#2f8f46", "#8a6d1f", "#9b2c6f", "#2b6cb0"}[p.floor])
		}
	}
	for _, name := range names {
		p := packs[name]
		fmt.Fprintf(&b, "  <g><title>%s: %s</title><rect x=\"%.0f\" y=\"%d\" width=\"%.0f\" height=\"%d\" rx=\"5\" fill=\"#fff\" stroke=\"#52606d\"/><text x=\"%.0f\" y=\"%d\" text-anchor=\"middle\">%s</text></g>\n",
			html.EscapeString(p.path), html.EscapeString(p.what), p.x, y(p.row), p.w, boxHeight, p.x+p.w/2, y(p.row)+boxHeight/2+4, html.EscapeString(label(p.path)))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
