// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
)

// PodRecording is every write of a pod that changed it, by a watch: the API server
// gives each a resourceVersion of its own, and sends it to all who watch.
type PodRecording struct {
	ended chan struct{}

	mu     sync.Mutex // guards what follows
	last   map[string]podVersion
	writes []PodWrite
	err    error
}

// PodWrite is one version of a pod that has replaced another.
type PodWrite struct {
	At  time.Time
	Pod string
	// Bytes is the length of the whole pod in JSON, as the watch has brought it.
	Bytes int
	// OrderOnly says that nothing of the status differs from the version before but
	// the order of a container's devices in allocatedResourcesStatus.
	OrderOnly bool
	// Differs names the status' fields that differ otherwise, sorted.
	Differs []string
}

// podVersion is a pod's status, as it was written and with its devices sorted.
type podVersion struct{ written, sorted map[string]any }

// RecordPods begins a recording of the pods of PodNamespace, until ctx ends.
func (n *Node) RecordPods(ctx context.Context) (*PodRecording, error) {
	var now struct {
		Metadata struct{ ResourceVersion string }
		Items    []json.RawMessage
	}
	if err := n.api.get(ctx, podsPath, &now); err != nil {
		return nil, fmt.Errorf("record pods: %w", err)
	}
	r := &PodRecording{ended: make(chan struct{}), last: map[string]podVersion{}}
	for _, pod := range now.Items {
		if err := r.take("ADDED", pod); err != nil {
			return nil, err
		}
	}
	events, err := n.api.watch(ctx, podsPath, now.Metadata.ResourceVersion, url.Values{})
	if err != nil {
		return nil, fmt.Errorf("record pods: %w", err)
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

func (r *PodRecording) follow(events io.Reader) error {
	for decoder := json.NewDecoder(events); ; {
		var event struct {
			Type   string
			Object json.RawMessage
		}
		if err := decoder.Decode(&event); err != nil {
			return fmt.Errorf("record pods: the watch has ended: %w", err)
		}
		if err := r.take(event.Type, event.Object); err != nil {
			return err
		}
	}
}

func (r *PodRecording) take(event string, data []byte) error {
	var pod struct {
		Metadata struct{ Name string }
		Status   map[string]any
	}
	if err := json.Unmarshal(data, &pod); err != nil {
		return fmt.Errorf("record pods: %w", err)
	}
	// Decoded a second time, since sorting changes what lies inside.
	var again struct{ Status map[string]any }
	if err := json.Unmarshal(data, &again); err != nil {
		return fmt.Errorf("record pods: %w", err)
	}
	sortDevices(again.Status)
	now := podVersion{pod.Status, again.Status}
	r.mu.Lock()
	defer r.mu.Unlock()
	name := pod.Metadata.Name
	old, known := r.last[name]
	switch event {
	case "ADDED":
	case "MODIFIED":
		differs := differing(old.sorted, now.sorted)
		r.writes = append(r.writes, PodWrite{At: time.Now(), Pod: name, Bytes: len(data), Differs: differs,
			OrderOnly: known && len(differs) == 0 && !reflect.DeepEqual(old.written, now.written)})
	case "DELETED":
		delete(r.last, name)
		return nil
	default:
		return fmt.Errorf("record pods: the watch has an event %s: %.300s", event, data)
	}
	r.last[name] = now
	return nil
}

// differing names the fields that differ.
func differing(a, b map[string]any) []string {
	names := maps.Clone(b)
	maps.Copy(names, a)
	return slices.DeleteFunc(sortedKeys(names), func(name string) bool { return reflect.DeepEqual(a[name], b[name]) })
}

// sortDevices sorts the devices of each resource of each container by their IDs.
func sortDevices(status map[string]any) {
	containers, _ := status["containerStatuses"].([]any)
	for _, c := range containers {
		container, _ := c.(map[string]any)
		resources, _ := container["allocatedResourcesStatus"].([]any)
		for _, r := range resources {
			resource, _ := r.(map[string]any)
			devices, _ := resource["resources"].([]any)
			slices.SortFunc(devices, func(a, b any) int { return strings.Compare(deviceID(a), deviceID(b)) })
		}
	}
}

func deviceID(device any) string {
	d, _ := device.(map[string]any)
	id, _ := d["resourceID"].(string)
	return id
}

// Writes are those of a pod since a moment, in their order.
func (r *PodRecording) Writes(pod string, since time.Time) []PodWrite {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []PodWrite
	for _, w := range r.writes {
		if w.Pod == pod && !w.At.Before(since) {
			out = append(out, w)
		}
	}
	return out
}

// Err says why nothing is recorded any more, while something should be.
func (r *PodRecording) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Wait waits for the end of the recording, whose context has ended.
func (r *PodRecording) Wait() { <-r.ended }
