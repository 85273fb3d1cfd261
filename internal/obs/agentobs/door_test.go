// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/status"
)

// serve has a door answer, and returns where, and what ends it.
func serveDoor(t *testing.T, foresee func(status.Question) (status.Answer, error)) (path string, end func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "door") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "agent.sock")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- (&Door{Path: path, Logger: slog.New(slog.DiscardHandler), Foresee: foresee}).Run(ctx)
	}()
	var once sync.Once
	end = func() {
		once.Do(func() {
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(func() { end(); os.RemoveAll(dir) })
	for {
		if _, err := os.Lstat(path); err == nil {
			return path, end
		}
		select {
		case err := <-done:
			t.Fatalf("Run: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

// A question arrives as it was asked, and its answer as it was given. The socket is its
// owner's alone, and goes with the agent.
func TestDoor(t *testing.T) {
	want := status.Answer{Plans: []status.Plan{{Partition: "a", State: "blocked", GPUs: []status.PlannedGPU{}, Offers: []status.PlannedOffer{}}}}
	var asked status.Question
	path, end := serveDoor(t, func(q status.Question) (status.Answer, error) {
		asked = q
		if len(q.File) == 0 {
			return status.Answer{}, errors.New("ask again in a while")
		}
		return want, nil
	})
	if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	for _, q := range []status.Question{
		{File: []byte("version: v1\n")},
		{File: []byte(strings.Repeat("#", 1<<20)), Partitions: []string{"a", "b c&d=e"}, UnitMiB: 1 << 32, API: "dra", Brief: true},
	} {
		got, err := AskDoor(t.Context(), path, q)
		if err != nil || !cmp.Equal(got, want) || !cmp.Equal(asked, q) {
			t.Errorf("%v: asked %.200v, answered %+v", err, asked, got)
		}
	}
	if _, err := AskDoor(t.Context(), path, status.Question{}); err == nil || errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), "ask again in a while") {
		t.Errorf("an agent that cannot answer yet: %v", err)
	}
	end()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if _, err := AskDoor(t.Context(), path, status.Question{}); !errors.Is(err, ErrNoAgent) {
		t.Errorf("no agent: %v", err)
	}
	// An agent that was killed leaves its socket.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := AskDoor(t.Context(), path, status.Question{}); !errors.Is(err, ErrNoAgent) {
		t.Errorf("nobody listens: %v", err)
	}
}

// What is too large or makes no sense is refused before the agent hears of it, and no other
// page or method leads there.
func TestDoorIsBounded(t *testing.T) {
	path, _ := serveDoor(t, func(status.Question) (status.Answer, error) {
		t.Error("the agent was asked")
		return status.Answer{}, nil
	})
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
	defer client.CloseIdleConnections()
	many := "?partition=a"
	for i := range status.MostAsked {
		many += fmt.Sprint("&partition=", i)
	}
	for _, c := range []struct {
		name, method, at string
		body             int
		want             int
	}{
		{"a file that no ConfigMap holds", http.MethodPost, "/plan", 8 << 20, http.StatusBadRequest},
		{"more partitions than one answer has", http.MethodPost, "/plan" + many, 1, http.StatusBadRequest},
		{"a name that no label has", http.MethodPost, "/plan?partition=" + strings.Repeat("a", maxName+1), 1, http.StatusBadRequest},
		{"no unit", http.MethodPost, "/plan?unit=0", 1, http.StatusBadRequest},
		{"a unit beyond all bounds", http.MethodPost, "/plan?unit=18446744073709551615", 1, http.StatusBadRequest},
		{"an unknown API", http.MethodPost, "/plan?api=other", 1, http.StatusBadRequest},
		{"a question that cannot be read", http.MethodPost, "/plan?%zz", 1, http.StatusBadRequest},
		{"headers without end", http.MethodPost, "/plan?partition=" + strings.Repeat("a", 1<<20), 1, http.StatusRequestHeaderFieldsTooLarge},
		{"another method", http.MethodGet, "/plan", 0, http.StatusMethodNotAllowed},
		{"another page", http.MethodPost, "/statusz", 1, http.StatusNotFound},
	} {
		request, err := http.NewRequest(c.method, "http://agent"+c.at, strings.NewReader(strings.Repeat("#", c.body)))
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		response.Body.Close()
		if response.StatusCode != c.want {
			t.Errorf("%s: %s, want %d", c.name, response.Status, c.want)
		}
	}
	// The port, which every pod can reach, has no such page.
	if err := func() error {
		o := Options{Logger: slog.New(slog.DiscardHandler), Metrics: NewMetrics("v"), Healthy: func() error { return nil }, Ready: func() error { return nil }, Status: func() status.Status { return status.Status{} }}
		w := httptest.NewRecorder()
		r, err := http.NewRequest(http.MethodPost, "/plan", strings.NewReader("x"))
		if err == nil {
			New(o).Handler().ServeHTTP(w, r)
			if w.Code != http.StatusNotFound && w.Code != http.StatusMethodNotAllowed {
				err = fmt.Errorf("the port answers %d", w.Code)
			}
		}
		return err
	}(); err != nil {
		t.Error(err)
	}
}

// One question is answered at a time, and one that is sent slowly keeps no other waiting.
func TestDoorAnswersInTurn(t *testing.T) {
	var mu sync.Mutex
	at, most := 0, 0
	path, _ := serveDoor(t, func(status.Question) (status.Answer, error) {
		mu.Lock()
		at++
		most = max(most, at)
		mu.Unlock()
		time.Sleep(time.Millisecond)
		mu.Lock()
		at--
		mu.Unlock()
		return status.Answer{}, nil
	})
	slow, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	fmt.Fprint(slow, "POST /plan HTTP/1.1\r\nHost: agent\r\nContent-Length: 1000\r\n\r\nversion")
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := AskDoor(t.Context(), path, status.Question{File: []byte("x")}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if most != 1 {
		t.Errorf("%d questions were answered at a time", most)
	}
}

// An agent that cannot have a door goes on without, and says so.
func TestNoDoor(t *testing.T) {
	for name, path := range map[string]string{"no path": "", "a path that is too long": "/" + strings.Repeat("a", 200), "no directory": "/nowhere/agent.sock"} {
		var log strings.Builder
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		err := (&Door{Path: path, Logger: slog.New(slog.NewTextHandler(&log, nil))}).Run(ctx)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || (path != "") != strings.Contains(log.String(), "cannot ask this agent") {
			t.Errorf("%s: %v, log %s", name, err, &log)
		}
	}
}
