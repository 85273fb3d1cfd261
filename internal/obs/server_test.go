// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

// serve runs a Server on a loopback port until the test ends.
func serve(t *testing.T, o Options) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, listener, o)
}

// serveOn is serve on a listener of the test's.
func serveOn(t *testing.T, listener net.Listener, o Options) string {
	t.Helper()
	if o.Metrics == nil {
		o.Metrics = Registry()
	}
	ok := func() error { return nil }
	if o.Healthy == nil {
		o.Healthy = ok
	}
	if o.Ready == nil {
		o.Ready = ok
	}
	o.Logger = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- New(o).Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("server ended with %v", err)
		}
	})
	return listener.Addr().String()
}

func get(t *testing.T, addr, page string) (int, string) {
	t.Helper()
	response, err := http.Get("http://" + addr + page)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func TestProbes(t *testing.T) {
	var sick, busy atomic.Bool
	check := func(b *atomic.Bool, reason string) func() error {
		return func() error {
			if b.Load() {
				return errors.New(reason)
			}
			return nil
		}
	}
	addr := serve(t, Options{Healthy: check(&sick, "loop stands still"), Ready: check(&busy, "no driver yet")})
	for _, test := range []struct {
		sick, busy bool
		page, body string
		code       int
	}{
		{false, false, "/healthz", "ok\n", 200},
		{false, false, "/readyz", "ok\n", 200},
		{true, false, "/healthz", "loop stands still\n", 503},
		{true, false, "/readyz", "ok\n", 200},
		{false, true, "/healthz", "ok\n", 200},
		{false, true, "/readyz", "no driver yet\n", 503},
	} {
		sick.Store(test.sick)
		busy.Store(test.busy)
		if code, body := get(t, addr, test.page); code != test.code || body != test.body {
			t.Errorf("%+v: %d %q", test, code, body)
		}
	}
	for _, page := range []string{"/debug/pprof/", "/nothing"} {
		if code, _ := get(t, addr, page); code != http.StatusNotFound {
			t.Errorf("%s: %d", page, code)
		}
	}
	response, err := http.Post("http://"+addr+"/healthz", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %s", response.Status)
	}
}

// What a program serves besides is listed on the first page.
func TestPagesAreListed(t *testing.T) {
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") })
	addr := serve(t, Options{Pages: map[string]http.Handler{"/b": page, "/a": page}})
	if _, body := get(t, addr, "/"); !strings.HasSuffix(body, "/readyz\n/a\n/b\n") {
		t.Errorf("the first page is %q", body)
	}
	if code, body := get(t, addr, "/b"); code != http.StatusOK || body != "here" {
		t.Errorf("/b: %d %q", code, body)
	}
}
