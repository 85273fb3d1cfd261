// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"sync"
	"time"
)

// NodeRecording is every version of a Node, as a watch has brought it.
type NodeRecording struct {
	ended chan struct{}

	mu    sync.Mutex // guards what follows
	words []NodeWord
	err   error
}

// NodeWord is one version of a Node.
type NodeWord struct {
	At time.Time
	// Allocatable is what the scheduler may give out of extended resources.
	Allocatable map[string]int
}

// RecordNode begins a recording of the Node, until ctx ends.
func (n *Node) RecordNode(ctx context.Context) (*NodeRecording, error) {
	var list struct {
		Metadata struct{ ResourceVersion string }
		Items    []json.RawMessage
	}
	only := url.Values{"fieldSelector": {"metadata.name=" + n.Name}}
	if err := n.api.get(ctx, "/api/v1/nodes?"+only.Encode(), &list); err != nil {
		return nil, fmt.Errorf("record the node: %w", err)
	}
	r := &NodeRecording{ended: make(chan struct{})}
	for _, object := range list.Items {
		if err := r.take(object); err != nil {
			return nil, err
		}
	}
	events, err := n.api.watch(ctx, "/api/v1/nodes", list.Metadata.ResourceVersion, only)
	if err != nil {
		return nil, fmt.Errorf("record the node: %w", err)
	}
	go func() {
		defer close(r.ended)
		defer events.Close()
		err := r.follow(events)
		r.mu.Lock()
		defer r.mu.Unlock()
		if ctx.Err() == nil {
			r.err = err
		}
	}()
	return r, nil
}

func (r *NodeRecording) follow(events io.Reader) error {
	for decoder := json.NewDecoder(events); ; {
		var event struct{ Object json.RawMessage }
		if err := decoder.Decode(&event); err != nil {
			return fmt.Errorf("record the node: the watch has ended: %w", err)
		}
		if err := r.take(event.Object); err != nil {
			return err
		}
	}
}

func (r *NodeRecording) take(data []byte) error {
	var o struct {
		Status struct{ Allocatable map[string]string }
	}
	err := json.Unmarshal(data, &o)
	word := NodeWord{At: time.Now()}
	if err == nil {
		word.Allocatable, err = extended(o.Status.Allocatable)
	}
	if err != nil {
		return fmt.Errorf("record the node: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.words = append(r.words, word)
	return nil
}

// Wait waits for the end of the recording and returns why it ended before its context.
func (r *NodeRecording) Wait() error {
	<-r.ended
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Words are the versions so far, in order; the first is the Node as it was at the start.
func (r *NodeRecording) Words() []NodeWord {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.words)
}
