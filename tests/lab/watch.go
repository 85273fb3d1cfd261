// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// LabelRecording is every change of some of the Node's labels, by a watch: no
// state of the Node between two others is missed.
type LabelRecording struct {
	domains []string
	ended   chan struct{}

	mu     sync.Mutex // guards what follows
	labels map[string]string
	turns  []LabelTurn
	err    error
}

// LabelTurn is a label that was changed.
type LabelTurn struct {
	At   time.Time
	Name string
	// From and To are empty where the label is not there: nobody of ours writes
	// an empty value.
	From, To string
	// Version is the Node's that has it.
	Version string
}

func (t LabelTurn) String() string {
	name := func(v string) string { return cmp.Or(v, "(absent)") }
	return fmt.Sprintf("%s %s: %s, then %s", t.At.Format("15:04:05.000"), t.Name, name(t.From), name(t.To))
}

// RecordLabels begins a recording of the labels of some domains, such as
// example.com, until ctx ends; then Wait says whether it is complete.
func (n *Node) RecordLabels(ctx context.Context, domains ...string) (*LabelRecording, error) {
	var now nodeLabels
	if err := n.api.get(ctx, n.path(), &now); err != nil {
		return nil, fmt.Errorf("record labels: %w", err)
	}
	r := &LabelRecording{domains: domains, ended: make(chan struct{})}
	r.labels = r.ours(now.Metadata.Labels)
	events, err := n.api.watch(ctx, "/api/v1/nodes", now.Metadata.ResourceVersion, url.Values{"fieldSelector": {"metadata.name=" + n.Name}})
	if err != nil {
		return nil, fmt.Errorf("record labels: %w", err)
	}
	go func() {
		defer close(r.ended)
		defer events.Close()
		err := r.follow(events)
		if ctx.Err() != nil {
			err = nil
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.err = err
	}()
	return r, nil
}

type nodeLabels struct {
	Metadata struct {
		ResourceVersion string
		Labels          map[string]string
	}
}

func (r *LabelRecording) ours(labels map[string]string) map[string]string {
	out := map[string]string{}
	for name, value := range labels {
		if domain, _, ok := strings.Cut(name, "/"); ok && slices.Contains(r.domains, domain) {
			out[name] = value
		}
	}
	return out
}

func (r *LabelRecording) follow(events io.Reader) error {
	for decoder := json.NewDecoder(events); ; {
		var event struct {
			Type   string
			Object nodeLabels
		}
		if err := decoder.Decode(&event); err != nil {
			return fmt.Errorf("the watch has ended: %w", err)
		}
		if event.Type != "MODIFIED" {
			return fmt.Errorf("the watch has an event %s", event.Type)
		}
		r.take(event.Object)
	}
}

func (r *LabelRecording) take(o nodeLabels) {
	now, at := r.ours(o.Metadata.Labels), time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	names := maps.Clone(now)
	maps.Copy(names, r.labels)
	for _, name := range sortedKeys(names) {
		if r.labels[name] != now[name] {
			r.turns = append(r.turns, LabelTurn{at, name, r.labels[name], now[name], o.Metadata.ResourceVersion})
		}
	}
	r.labels = now
}

// Labels are the labels as the watch has seen them last.
func (r *LabelRecording) Labels() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.labels)
}

// Turns are the changes so far, in their order.
func (r *LabelRecording) Turns() []LabelTurn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.turns)
}

// Err says why nothing is recorded any more, while something should be.
func (r *LabelRecording) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Wait waits for the end of the recording, whose context has ended, and says
// whether it was complete.
func (r *LabelRecording) Wait() error {
	<-r.ended
	if err := r.Err(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
