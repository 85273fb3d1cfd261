// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// nodeOf is a Node with labels, in the API server's form.
func nodeOf(version int, labels map[string]string) map[string]any {
	return map[string]any{"metadata": map[string]any{"name": "n", "resourceVersion": fmt.Sprint(version), "labels": labels}}
}

func TestRecordLabels(t *testing.T) {
	events := make(chan any)
	a, _ := served(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/nodes/n" {
			_ = json.NewEncoder(w).Encode(nodeOf(7, map[string]string{"example.com/a": "1", "other.org/a": "1"}))
			return
		}
		if q := r.URL.Query(); q.Get("resourceVersion") != "7" || q.Get("fieldSelector") != "metadata.name=n" {
			t.Errorf("the watch is %s", r.URL)
		}
		w.(http.Flusher).Flush()
		for {
			select {
			case <-r.Context().Done():
				return
			case e, more := <-events:
				if !more {
					return
				}
				_ = json.NewEncoder(w).Encode(e)
				w.(http.Flusher).Flush()
			}
		}
	})
	n := &Node{Name: "n", api: a}
	ctx, cancel := context.WithCancel(t.Context())
	r, err := n.RecordLabels(ctx, "example.com", "nvidia.com")
	if err != nil {
		t.Fatal(err)
	}
	for i, labels := range []map[string]string{
		{"example.com/a": "1", "other.org/a": "2"},
		{"example.com/a": "2", "nvidia.com/b": "x"},
		{"nvidia.com/b": "x"},
		{"nvidia.com/b": "x", "example.com/a": "2"},
	} {
		events <- map[string]any{"type": "MODIFIED", "object": nodeOf(8+i, labels)}
	}
	if err := Await(t.Context(), time.Minute, "all turns", func(context.Context) error {
		if got := r.Turns(); len(got) < 4 {
			return fmt.Errorf("there are %v", got)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, turn := range r.Turns() {
		got = append(got, fmt.Sprintf("%s %s>%s @%s", turn.Name, turn.From, turn.To, turn.Version))
	}
	want := []string{"example.com/a 1>2 @9", "nvidia.com/b >x @9", "example.com/a 2> @10", "example.com/a >2 @11"}
	if !slices.Equal(got, want) {
		t.Errorf("the turns are %q, want %q", got, want)
	}
	if now := r.Labels(); !maps.Equal(now, map[string]string{"nvidia.com/b": "x", "example.com/a": "2"}) {
		t.Errorf("the labels are %v", now)
	}
	cancel()
	if err := r.Wait(); err != nil {
		t.Errorf("the end that was asked for is %v", err)
	}

	// An end that nobody asked for leaves a gap.
	r, err = n.RecordLabels(t.Context(), "example.com")
	if err != nil {
		t.Fatal(err)
	}
	close(events)
	if err := r.Wait(); err == nil || !strings.Contains(err.Error(), "the watch has ended") {
		t.Errorf("a recording with a gap says %v", err)
	}
}
