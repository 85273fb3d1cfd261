// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// wired is sample with a topology: two pairs by NVLink, of which one has lost
// lanes, and two network cards.
func wired() Status {
	s := sample()
	zero, one := 0, 1
	s.Machine = "PowerEdge R750xa"
	m := &topology.Matrix{
		NUMA: []gpu.NUMANode{{ID: 0, CPUs: "0-31"}, {ID: 1, CPUs: "32-63"}},
		NICs: []topology.MatrixNIC{{Name: "mlx5_0", Kind: gpu.RoCE, NUMA: &zero, Active: true}, {Name: "mlx5_1", Kind: gpu.InfiniBand, NUMA: &one}},
		Cells: [][]string{
			{"X", "NV12", "SYS", "SYS", "SYS", "SYS", "PIX", "SYS"},
			{"NV12", "X", "SYS", "SYS", "SYS", "SYS", "NODE", "SYS"},
			{"SYS", "SYS", "X", "NV8", "NODE", "NODE", "SYS", "PHB"},
			{"SYS", "SYS", "NV8", "X", "NODE", "NODE", "SYS", "NODE"},
			{"SYS", "SYS", "NODE", "NODE", "X", "PXB", "SYS", "NODE"},
			{"SYS", "SYS", "NODE", "NODE", "PXB", "X", "SYS", "NODE"},
			{"PIX", "NODE", "SYS", "SYS", "SYS", "SYS", "X", "SYS"},
			{"SYS", "SYS", "PHB", "NODE", "NODE", "NODE", "SYS", "X"},
		},
		Joined: [][]int{{0, 1}, {2, 3}},
		Weak:   []string{"GPU 2 has 8 of 12 NVLink lanes to GPU 3"},
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		g.PCI, g.NUMA = "0000000"+string(rune('0'+i))+":81:00.0", &zero
		if i > 1 {
			g.NUMA = &one
		}
		m.GPUs = append(m.GPUs, topology.MatrixGPU{Index: g.Index, UUID: gpu.UUID(g.UUID), PCI: g.PCI, NUMA: g.NUMA, CPUs: m.NUMA[*g.NUMA].CPUs})
	}
	s.Topology = m
	return s
}

func htmlOf(t *testing.T, s Status) string {
	t.Helper()
	var out strings.Builder
	if err := WriteHTML(&out, s, noon); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestPage(t *testing.T) {
	for name, s := range map[string]Status{"status.html": wired(), "status-mig.html": cards(), "status-nothing.html": {Node: "gpu-node-1", Version: "v0.1.0"}} {
		got := htmlOf(t, s)
		sound(t, got)
		got = strings.Replace(got, style, "", 1)
		golden(t, name, got)
	}
}

func TestTopologyText(t *testing.T) {
	got := text(t, wired(), TextOptions{Color: true})
	for _, want := range []string{"\nNVLink joins GPUs 0, 1 and GPUs 2, 3\n", "\n\x1b[33mGPU 2 has 8 of 12 NVLink lanes to GPU 3\x1b[0m\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestSpans(t *testing.T) {
	for want, list := range map[string][]int{"": nil, "7": {7}, "0, 1": {0, 1}, "0-3, 5": {0, 1, 2, 3, 5}, "0, 2, 4-6": {0, 2, 4, 5, 6}} {
		if got := spans(list); got != want {
			t.Errorf("%v is %q, want %q", list, got, want)
		}
	}
}

// allowed is all that the page is made of: elements, and their attributes.
var allowed = map[string]string{
	"html": "lang xmlns", "head": "", "meta": "charset name content", "title": "id", "link": "rel href", "style": "", "body": "", "header": "",
	"nav": "aria-label", "main": "", "footer": "", "section": "class aria-labelledby", "article": "class id aria-labelledby",
	"div": "class role aria-labelledby tabindex", "figure": "", "figcaption": "class", "h1": "", "h2": "id", "h3": "id", "p": "class", "span": "class", "b": "",
	"strong": "", "code": "", "time": "datetime", "wbr": "", "a": "href", "ul": "class", "li": "class", "dl": "class", "dt": "class", "dd": "",
	"table": "class", "caption": "class", "colgroup": "", "col": "span", "thead": "", "tbody": "", "tr": "", "th": "scope class colspan", "td": "class colspan",
	"svg": "class width height viewBox preserveAspectRatio role aria-hidden aria-labelledby focusable", "desc": "id", "g": "class",
	"rect": "class x y width height", "path": "class d", "text": "class x y transform",
}

// sound reads a page as XML, which is stricter than a browser, and makes sure
// that it has nothing but what a page is made of. It returns its text.
func sound(t *testing.T, page string) string {
	t.Helper()
	in := xml.NewDecoder(strings.NewReader(page))
	var out strings.Builder
	for {
		token, err := in.Token()
		if errors.Is(err, io.EOF) {
			return out.String()
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, page)
		}
		switch token := token.(type) {
		case xml.CharData:
			out.Write(token)
		case xml.Comment, xml.ProcInst:
			t.Errorf("the page has %v", token)
		case xml.StartElement:
			attributes, ok := allowed[token.Name.Local]
			if !ok {
				t.Errorf("the page has an element %s", token.Name.Local)
			}
			for _, a := range token.Attr {
				if !slices.Contains(strings.Fields(attributes), a.Name.Local) {
					t.Errorf("%s has an attribute %s", token.Name.Local, a.Name.Local)
				}
				icon := token.Name.Local == "link" && strings.HasPrefix(a.Value, "data:image/svg+xml,")
				if a.Name.Local == "href" && a.Value != "?format=json" && !strings.HasPrefix(a.Value, "#") && !icon {
					t.Errorf("%s leads to %q", token.Name.Local, a.Value)
				}
			}
		}
	}
}

// texts goes through the strings of a Status. A string is called by its field, "GPU.Model", and is
// the same field in every GPU.
func texts(s *Status, visit func(field string, text reflect.Value)) {
	var walk func(field string, v reflect.Value)
	walk = func(field string, v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() && v.Type() != reflect.TypeFor[*time.Time]() {
				walk(field, v.Elem())
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(field, v.Index(i))
			}
		case reflect.Struct:
			for i := range v.NumField() {
				walk(v.Type().Name()+"."+v.Type().Field(i).Name, v.Field(i))
			}
		case reflect.String:
			visit(field, v)
		}
	}
	walk("", reflect.ValueOf(s).Elem())
}

// say puts a text into every string of a Status.
func say(s *Status, text string) {
	texts(s, func(_ string, v reflect.Value) { v.SetString(text) })
}

// full is a Status that has something in every list and behind every pointer.
func full() Status {
	s := wired()
	s.GPUs = append(s.GPUs, cards().GPUs...)
	s.Partition = Partition{Name: "cut", State: "blocked", Message: "why", Source: "configmap a/b"}
	s.Watchdog = Watchdog{State: WatchdogOff, Reason: "no right"}
	s.Policies = []Policy{{State: PolicyMissing, Reason: "none"}, {State: PolicyUnknown, Reason: "no answer"}}
	s.Resources, s.Conditions = []Resource{{}}, []Condition{{}}
	s.GPUs[0].MPS = &MPS{Percent: 50, Clients: 3, Trouble: "it is silent"}
	for i := range s.GPUs {
		for j := range s.GPUs[i].Holders {
			s.GPUs[i].Holders[j].Beside = []string{"a/b"}
			s.GPUs[i].Holders[j].Tier, s.GPUs[i].Holders[j].Yield = "spot", &Yield{To: "a/c"}
		}
	}
	return s
}

// skeleton is a page without its texts: its elements, and the names of their attributes. words
// are its texts and the values of its attributes.
func skeleton(t *testing.T, page string) (bones, words string) {
	t.Helper()
	sound(t, page)
	in := xml.NewDecoder(strings.NewReader(page))
	var b, w strings.Builder
	for {
		token, err := in.Token()
		if err != nil {
			return b.String(), w.String()
		}
		switch token := token.(type) {
		case xml.CharData:
			w.Write(append(token, '\n'))
		case xml.StartElement:
			b.WriteString("<" + token.Name.Local)
			for _, a := range token.Attr {
				b.WriteString(" " + a.Name.Local)
				w.WriteString(a.Value + "\n")
			}
			b.WriteString(">")
		}
	}
}

// TestEveryField puts two texts of one length into each string of a Status, one field after the
// other: a word, and markup. The two pages differ in nothing but that text.
func TestEveryField(t *testing.T) {
	// Markup without a slash or a full stop, behind which the page may break a line, and a word that
	// is sorted as markup is: before what the others say.
	const tags = `"'><b onload="x" onclick='x'>&lt;+<!-- ]]>{}`
	word := strings.Repeat("a", len(tags))
	fields := map[string]int{} // how often the page shows it
	of := full()
	texts(&of, func(field string, _ reflect.Value) { fields[field] = 0 })
	for field := range fields {
		page := func(text string) (bones, words string) {
			s := full()
			texts(&s, func(name string, v reflect.Value) {
				if name == field {
					v.SetString(text)
				}
			})
			return skeleton(t, htmlOf(t, s))
		}
		plain, words := page(word)
		odd, marked := page(tags)
		if plain != odd {
			t.Errorf("%s with markup makes other elements", field)
		}
		fields[field] = strings.Count(words, word)
		if n := strings.Count(marked, tags); n != fields[field] {
			t.Errorf("%s is shown %d times as a word and %d times as markup", field, fields[field], n)
		}
	}
	for _, field := range []string{"Status.Node", "Status.Machine", "GPU.Model", "GPU.UUID", "Placement.Profile",
		"Holder.Pod", "Holder.Beside", "Holder.Waits", "Holder.Tier", "Yield.To", "Holder.Lending", "Matrix.Cells", "MatrixNIC.Name", "Policy.Reason",
		"Watchdog.Reason", "Partition.Message"} {
		if fields[field] == 0 {
			t.Errorf("%s is not shown, or there is no such field", field)
		}
	}
	for _, field := range textFields(reflect.TypeFor[Status](), "") {
		if _, met := fields[field]; !met {
			t.Errorf("%s is not tried", field)
		}
	}
}

// textFields are the fields of a type, and of all that it is made of, that hold strings.
func textFields(of reflect.Type, field string) []string {
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice:
		return textFields(of.Elem(), field)
	case reflect.Struct:
		var out []string
		for i := range of.NumField() {
			if f := of.Field(i); f.IsExported() {
				out = append(out, textFields(f.Type, of.Name()+"."+f.Name)...)
			}
		}
		return out
	case reflect.String, reflect.Map, reflect.Interface: // a map may hold some, and no test goes through it
		return []string{field}
	}
	return nil
}

// No text of a Status is ever taken for markup, whatever it is.
func FuzzPage(f *testing.F) {
	for _, seed := range []string{
		"", "x", "<script>alert(1)</script>", `"><img src=x onerror=alert(1)>`, "' onload='x", "]]>", "<!--", "</style>", "</title><script>", "&#x0;&amp;",
		"\x00\x1b[31m\r\n\t", "\xff\xfe\xc3", "\ufffe\uffff", "\u202eevil\u2066", "javascript:alert(1)", "{}{}", "NV99999999999999999999", "NV-1",
		"held", "shared", "mig", "whole", "PIX", "1c.3g.40gb", strings.Repeat("W", 3000),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, word string) {
		s := wired()
		s.GPUs = append(s.GPUs, cards().GPUs...)
		say(&s, word)
		// The ages and the words that choose what is shown are kept in half of them.
		for _, g := range wired().GPUs[:3] {
			g.Model, g.Reason, g.Blocked, g.Resource, g.Holders = word, word, word, word, s.GPUs[0].Holders
			s.GPUs = append(s.GPUs, g)
		}
		for _, g := range cards().GPUs {
			for i := range g.MIG.Placements {
				g.MIG.Placements[i].Reason, g.MIG.Placements[i].Pod = word, word
			}
			g.MIG.Work = word
			s.GPUs = append(s.GPUs, g)
		}
		s.Partition.State, s.Watchdog.State = "blocked", WatchdogOff
		got := sound(t, htmlOf(t, s))
		if !strings.Contains(got, sanitize(word)) && !strings.Contains(sanitize(word), "\u00a0") {
			t.Errorf("the page does not say %q", word)
		}
	})
}

// What the hardware, a broken file or an old agent can say makes a page.
func TestPageOfOddStatus(t *testing.T) {
	far, minus := math.MaxInt, -1
	odd := wired()
	for i := range odd.GPUs {
		g := &odd.GPUs[i]
		g.Total, g.Used, g.Unhealthy, g.Index = -5+i, far, -far, minus
		g.UnitMiB, g.MemoryMiB = math.MaxUint64, math.MaxUint64
		g.NUMA = &minus
		for j := range g.Holders {
			g.Holders[j].Units = -far + j
		}
	}
	for i := range odd.Containers {
		c := &odd.Containers[i]
		c.CapMiB, c.UsedMiB, c.PeakMiB = mib(0), mib(math.MaxUint64), math.MaxUint64
	}
	ragged := wired()
	ragged.Topology.Cells = [][]string{nil, {"NV4"}, {"PIX", "PXB", "X", "?", "", "", "", "", "", "", ""}}
	ragged.Topology.Joined = [][]int{{}, {99}, {5, 1}}
	ragged.Topology.Switched = []int{0, 15, 99}
	for i := range ragged.Topology.GPUs {
		ragged.Topology.GPUs[i].NUMA = []*int{nil, &minus, &far}[i%3]
	}
	alone := wired()
	alone.GPUs = nil
	twins := cards()
	for i := range twins.GPUs {
		twins.GPUs[i].UUID, twins.GPUs[i].Index = "GPU-a", 0
		if m := twins.GPUs[i].MIG; m != nil {
			m.Size = far
			for j := range m.Placements {
				m.Placements[j].Start, m.Placements[j].CI = []int{minus, far, 3, 63}[j%4], minus
				m.Placements[j].Size = []int{far, 0, minus, 1}[j%4]
			}
		}
	}
	nics := wired()
	nics.Topology.GPUs = nics.Topology.GPUs[:1]
	for name, s := range map[string]Status{"zero": {}, "odd": odd, "ragged": ragged, "alone": alone, "twins": twins, "nics": nics,
		"empty matrix": {Topology: &topology.Matrix{}}, "no memory": {GPUs: []GPU{{}, {MIG: &MIG{Enabled: true}}}}} {
		t.Run(name, func(t *testing.T) {
			sound(t, htmlOf(t, s))
			if len(htmlOf(t, s)) > 1<<20 {
				t.Errorf("the page has %d bytes", len(htmlOf(t, s)))
			}
		})
	}
}

// The same Status is the same page.
func TestPageHasOneForm(t *testing.T) {
	first := htmlOf(t, wired())
	for range 20 {
		if again := htmlOf(t, wired()); again != first {
			t.Fatal("the page differs from the one before")
		}
	}
}

// A page that cannot be written was tried once, and whole.
func TestPageNotWritten(t *testing.T) {
	w := &broken{}
	if err := WriteHTML(w, wired(), noon); !errors.Is(err, io.ErrClosedPipe) || w.writes != 1 {
		t.Errorf("%v after %d writes", err, w.writes)
	}
}

// broken takes nothing.
type broken struct{ writes int }

func (b *broken) Write([]byte) (int, error) {
	b.writes++
	return 0, io.ErrClosedPipe
}
