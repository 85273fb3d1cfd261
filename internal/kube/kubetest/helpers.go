// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Journal is a log in memory whose lines a test can count.
type Journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// Count returns how often part occurs in the log.
func (j *Journal) Count(part string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), part)
}

// Kubeconfig writes a kubeconfig for a server at url, and returns its path.
func Kubeconfig(t *testing.T, url string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: %q}}], users: [{name: u, user: {}}]}`, url)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Background runs f until the test ends, and then waits for it.
func Background(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != context.Canceled {
				t.Errorf("ended with %v, not with its context", err)
			}
		case <-time.After(Limit):
			t.Error("does not end with its context")
		}
	})
}

// Limit is how long the helpers wait before they fail the test.
const Limit = 20 * time.Second

// Receive returns the next value of a channel. It fails the test if none comes.
func Receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(Limit):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

// Await polls a condition until it is true. It fails the test after Limit.
func Await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(Limit)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// Log returns a logger that writes into j.
func (j *Journal) Log() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }
