// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/status"
)

func TestWhoGetsThePage(t *testing.T) {
	const browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
	var page strings.Builder
	if err := status.WriteHTML(&page, sample(), noon); err != nil {
		t.Fatal(err)
	}
	addr := serve(t, Options{Now: func() time.Time { return noon }})
	for _, test := range []struct {
		query, accept string
		html          bool
	}{
		{"", "", false},
		{"", "*/*", false}, // curl
		{"", "application/json", false},
		{"", browser, true},
		{"", "TEXT/HTML", true},
		{"", "text/html;q=0.5, application/json", false},
		{"", "application/json;q=0.5, text/html", true},
		{"", "text/html;q=0", false},
		{"", "text/html;q=x", true},
		{"", ",;/,text", false},
		{"?format=json", browser, false},
		{"?format=html", "application/json", true},
		{"?format=xml", browser, true},
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/statusz"+test.query, nil)
		if err != nil {
			t.Fatal(err)
		}
		if test.accept != "" {
			request.Header.Set("Accept", test.accept)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%+v: %s, %v", test, response.Status, err)
		}
		h := response.Header
		if h.Get("Vary") != "Accept" || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cache-Control") != "no-store" {
			t.Errorf("%+v: headers %v", test, h)
		}
		if !test.html {
			if h.Get("Content-Type") != "application/json" || !json.Valid(body) {
				t.Errorf("%+v: got %s: %.100s", test, h.Get("Content-Type"), body)
			}
			continue
		}
		if string(body) != page.String() || h.Get("Content-Type") != "text/html; charset=utf-8" {
			t.Errorf("%+v: got %s: %.100s", test, h.Get("Content-Type"), body)
		}
		// Strict: no script, nothing from elsewhere, no style but the page's own.
		got := h.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none';", "style-src 'sha256-", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} {
			if !strings.Contains(got, want) {
				t.Errorf("the policy %q lacks %q", got, want)
			}
		}
		if strings.Contains(got, "unsafe") || strings.Contains(got, "*") || strings.Contains(got, "script-src") {
			t.Errorf("the policy %q is not strict", got)
		}
	}
}
