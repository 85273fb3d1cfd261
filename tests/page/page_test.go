// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
)

var (
	update = flag.Bool("update", false, "draw docs/status.png anew")
	shots  = flag.String("shots", "", "a directory for a picture of each page")
)

// limit bounds the installation, and each page: a guard against a browser that
// hangs.
const limit = 5 * time.Minute

// The typefaces that the pages are looked at in.
const inter, wide = "Inter", "DejaVu Sans"

//go:embed check.js
var checkScript string

//go:embed tab.js
var tabScript string

// starts is how often the browser is started for a test.
const starts = 3

// chrome starts the browser for a test, with a typeface of packages as the
// system's.
func chrome(t *testing.T, typeface string) (context.Context, *browser) {
	t.Helper()
	ctx := guarded(t)
	c, err := install(ctx, func(format string, args ...any) { fmt.Printf(format+"\n", args...) })
	if err != nil {
		t.Fatal(err)
	}
	// Now and then Chromium ends right after its start.
	for try := 1; ; try++ {
		b, err := c.start(t.TempDir(), typeface)
		if err == nil {
			var blank *tab
			if blank, err = b.open(ctx, "about:blank", view{width: 360}); err == nil {
				blank.close(ctx)
				t.Cleanup(b.stop)
				return ctx, b
			}
			b.stop()
		}
		if try == starts {
			t.Fatalf("after %d starts: %v", starts, err)
		}
		t.Logf("the browser is started again: %v", err)
	}
}

// guarded is a context for one page: on a busy machine all of them together take
// longer than any one should.
func guarded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// serve shows the Status as the agent does, and returns the page's address.
func serve(t *testing.T, s status.Status) string {
	t.Helper()
	server := httptest.NewServer(agentobs.New(agentobs.Options{Logger: slog.New(slog.DiscardHandler), Metrics: agentobs.NewMetrics("v0.1.0"),
		Status: func() status.Status { return s }, Now: func() time.Time { return noon }, Healthy: func() error { return nil }, Ready: func() error { return nil }}).Handler())
	t.Cleanup(server.Close)
	return server.URL + "/statusz"
}

// look opens a page and returns what is wrong with it.
func look(ctx context.Context, t *testing.T, b *browser, url string, v view) (*tab, []string) {
	t.Helper()
	tab, err := b.open(ctx, url, v)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tab.close(context.WithoutCancel(ctx)) })
	var problems []string
	if err := tab.evaluate(ctx, checkScript, &problems); err != nil {
		t.Fatal(err)
	}
	return tab, append(problems, tab.complaints(url)...)
}

func TestPage(t *testing.T) {
	_, b := chrome(t, inter)
	all := nodes(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		url := serve(t, all[name])
		views := []view{{width: 360}, {width: 768}, {width: 1280}}
		if slices.Contains([]string{"busy", "hostile", "rich"}, name) {
			// These have every colour and every kind of text.
			views = append(views, view{width: 320}, view{width: 360, dark: true}, view{width: 768, forced: true}, view{width: 1280, dark: true})
		}
		for _, v := range views {
			t.Run(name+"-"+v.String(), func(t *testing.T) {
				ctx := guarded(t)
				tab, problems := look(ctx, t, b, url, v)
				for _, p := range problems {
					t.Error(p)
				}
				if *shots != "" {
					png, err := tab.picture(ctx, v, 0)
					if err == nil {
						err = os.WriteFile(filepath.Join(*shots, name+"-"+v.String()+".png"), png, 0o644)
					}
					if err != nil {
						t.Error(err)
					}
				}
				if v.dark || v.width == 320 {
					return // the way through the page is the same
				}
				for _, p := range tour(ctx, t, tab) {
					t.Error(p)
				}
			})
		}
	}
}

// Where the system's typeface has wide letters there is still room for them.
func TestPageInWideLetters(t *testing.T) {
	_, b := chrome(t, wide)
	all := nodes(t)
	for _, name := range []string{"busy", "rich", "sixteen"} {
		url := serve(t, all[name])
		for _, v := range []view{{width: 360}, {width: 1280}} {
			t.Run(name+"-"+v.String(), func(t *testing.T) {
				ctx := guarded(t)
				tab, problems := look(ctx, t, b, url, v)
				var used struct{ Fonts []struct{ FamilyName string } }
				var root struct{ Root struct{ NodeID int } }
				var head struct{ NodeID int }
				for _, c := range []struct {
					method         string
					params, result any
				}{
					{"DOM.enable", struct{}{}, nil}, {"CSS.enable", struct{}{}, nil}, {"DOM.getDocument", struct{}{}, &root},
				} {
					if err := tab.call(ctx, c.method, c.params, c.result); err != nil {
						t.Fatal(err)
					}
				}
				if err := tab.call(ctx, "DOM.querySelector", map[string]any{"nodeId": root.Root.NodeID, "selector": "h1"}, &head); err != nil {
					t.Fatal(err)
				}
				if err := tab.call(ctx, "CSS.getPlatformFontsForNode", map[string]any{"nodeId": head.NodeID}, &used); err != nil {
					t.Fatal(err)
				}
				if len(used.Fonts) != 1 || used.Fonts[0].FamilyName != wide {
					t.Errorf("the page is set in %v, not in %s", used.Fonts, wide)
				}
				for _, p := range problems {
					t.Error(p)
				}
			})
		}
	}
}

// tour goes through the page with the Tab key, and returns what a person
// without a mouse would miss.
func tour(ctx context.Context, t *testing.T, tab *tab) []string {
	t.Helper()
	var problems []string
	for want := 0; ; want++ {
		for _, kind := range []string{"rawKeyDown", "keyUp"} {
			if err := tab.call(ctx, "Input.dispatchKeyEvent", map[string]any{"type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}, nil); err != nil {
				t.Fatal(err)
			}
		}
		var focus struct {
			At, Of  int
			Visible bool
			Text    string
		}
		if err := tab.evaluate(ctx, tabScript, &focus); err != nil {
			t.Fatal(err)
		}
		switch {
		case want == focus.Of:
			return problems
		case focus.At != want:
			return append(problems, fmt.Sprintf("the Tab key goes to stop %d of %d (%q), not to stop %d", focus.At, focus.Of, focus.Text, want))
		case !focus.Visible:
			problems = append(problems, fmt.Sprintf("nobody sees that the focus is on %q", focus.Text))
		}
	}
}

// A screen reader's view: what can be followed or looked into has a name.
func TestNames(t *testing.T) {
	ctx, b := chrome(t, inter)
	tab, err := b.open(ctx, serve(t, rich(t)), view{width: 1280})
	if err != nil {
		t.Fatal(err)
	}
	var tree struct {
		Nodes []struct {
			Ignored bool
			Role    struct{ Value string }
			Name    struct{ Value string }
		}
	}
	if err := tab.call(ctx, "Accessibility.getFullAXTree", struct{}{}, &tree); err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	names := map[string]bool{}
	for _, n := range tree.Nodes {
		if n.Ignored {
			continue
		}
		switch role := n.Role.Value; role {
		case "link", "heading", "table", "region", "article", "navigation", "group", "image", "img":
			count[role]++
			names[role+" "+n.Name.Value] = true
			if strings.TrimSpace(n.Name.Value) == "" {
				t.Errorf("a %s has no name", role)
			}
		}
	}
	for role, least := range map[string]int{"link": 11, "heading": 13, "table": 8, "article": 8, "region": 5, "navigation": 1} {
		if count[role] < least {
			t.Errorf("there are %d of %s, want %d at least", count[role], role, least)
		}
	}
	for _, want := range []string{"heading gpu-node-1", "heading Needs attention", "article GPU 3", "table Memory slices of GPU 0"} {
		if !names[want] {
			t.Errorf("there is no %s among %v", want, slices.Sorted(maps.Keys(names)))
		}
	}
}

// What the checks are to find, they find.
func TestChecksFind(t *testing.T) {
	ctx, b := chrome(t, inter)
	const bad = `<!DOCTYPE html><html><head><meta name="viewport" content="width=device-width"></head><body>
<h1>one</h1><h3>three</h3><main><p style="color:#bbb;background:#fff">pale</p><p style="font-size:8px">tiny</p>
<p style="position:absolute;top:300px;left:10px;margin:0">first words</p><p style="position:absolute;top:302px;left:12px;margin:0">second words</p>
<div style="width:2000px;height:9px">wide</div><table><tr><th>x</th></tr></table><a href="#nowhere">lost</a><a href="/" style="outline:none">unseen</a>
<svg width="100" height="30" viewBox="0 0 100 30"><rect width="100" height="30" fill="#333"/><text y="20" x="2" fill="#444">dark</text><text x="80" y="20" fill="#fff">outside</text></svg>
<img src="/missing.png"><i id="a"></i><i id="a"></i><script>console.log("noise")</script></main></body></html>`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, bad)
	}))
	defer server.Close()
	tab, problems := look(ctx, t, b, server.URL+"/", view{width: 360})
	problems = append(problems, tour(ctx, t, tab)...)
	for _, want := range []string{
		"px wide in a window of 360", `"pale" stands out`, `"dark" stands out`, `"tiny" is 8.0 px`, "cover each other", "goes beyond its drawing", "skips a level",
		"no caption", "does not say of what", "leads nowhere", "no role, title or description", "things are called a", "no language", "no title",
		"a style attribute", "a script", "consoleAPICalled", "a request for", "nobody sees",
	} {
		if !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, want) }) {
			t.Errorf("nothing says %q among:\n%s", want, strings.Join(problems, "\n"))
		}
	}
}
