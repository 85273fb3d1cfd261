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
	// By is who wrote it, as far as the version tells.
	By NodeWriter
	// heartbeat is the kubelet's, in whole seconds.
	heartbeat time.Time
}

// NodeWriter is who wrote a version of a Node.
type NodeWriter string

// Writers of a Node, by what differs from the version before: the kubelet sets its
// heartbeat whenever it writes its status, and whoever else lowers an extended resource is
// the agent. The rest writes labels, annotations and conditions of others.
const (
	ByTheKubelet NodeWriter = "kubelet"
	ByLowering   NodeWriter = "agent, lowering allocatable"
	ByOthers     NodeWriter = "others"
)

// writer tells who has made a version out of another.
func (w *NodeWord) writer(before *NodeWord) NodeWriter {
	if !w.heartbeat.Equal(before.heartbeat) {
		return ByTheKubelet
	}
	for name, was := range before.Allocatable {
		if w.Allocatable[name] < was {
			return ByLowering
		}
	}
	return ByOthers
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
		Status struct {
			Allocatable map[string]string
			Conditions  []struct {
				Type              string
				LastHeartbeatTime time.Time
			}
		}
	}
	err := json.Unmarshal(data, &o)
	word := NodeWord{At: time.Now(), By: ByOthers}
	for _, c := range o.Status.Conditions {
		if c.Type == "Ready" {
			word.heartbeat = c.LastHeartbeatTime
		}
	}
	if err == nil {
		word.Allocatable, err = extended(o.Status.Allocatable)
	}
	if err != nil {
		return fmt.Errorf("record the node: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.words); n > 0 {
		word.By = word.writer(&r.words[n-1])
	}
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
