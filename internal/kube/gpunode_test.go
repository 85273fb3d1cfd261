// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
)

// writeGPUNode makes, changes or deletes a GPUNode as the API server does with the
// definition in the manifests: an apply of the object makes it and leaves the status alone,
// one of the status replaces that and makes nothing, and a create has no status.
func (s *server) writeGPUNode(w http.ResponseWriter, r *http.Request, verb, resource, name string, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	object, there := s.objects["gpunodes//"+name]
	var sent map[string]any
	switch {
	case verb == "delete" && there:
		s.putLocked("gpunodes", "", name, nil)
		answer(w, failed(200, ""))
		return
	case verb == "delete", resource == "gpunodes/status" && !there:
		refuse(w, 404, "NotFound")
		return
	case verb != "patch" || r.Header.Get("Content-Type") != "application/apply-patch+yaml" || r.URL.Query().Get("fieldManager") == "":
		refuse(w, 415, "UnsupportedMediaType")
		return
	case json.Unmarshal(body, &sent) != nil || sent["apiVersion"] != "example.com/v1alpha1" || sent["kind"] != "GPUNode" || sent["metadata"].(map[string]any)["name"] != name:
		refuse(w, 400, "BadRequest")
		return
	}
	if !there {
		s.used["create gpunodes"] = true // as the server asks besides
	}
	if object = clone(object); object == nil {
		object = map[string]any{}
	}
	if resource == "gpunodes/status" {
		status := clone(sent["status"].(map[string]any))
		for _, field := range s.pruned {
			delete(status, field)
		}
		object["status"] = status
	} else {
		metadata, _ := object["metadata"].(map[string]any)
		object["metadata"] = merge(metadata, sent["metadata"].(map[string]any))
	}
	answer(w, s.putLocked("gpunodes", "", name, object))
}

// gpuNodes is a client that follows its GPUNode, and what it is told.
func gpuNodes(t *testing.T, s *server, change ...func(*Options)) (*Client, <-chan string) {
	t.Helper()
	c, _ := connect(t, s, change...)
	told := make(chan string, 100)
	background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(Node) {}) })
	await(t, "the Node is known", func() bool { node, err := c.lastNode(t.Context()); return err == nil && node != nil })
	background(t, func(ctx context.Context) error {
		return c.WatchGPUNode(ctx, func(is *gpunode.Status, err error) {
			switch {
			case err != nil:
				told <- "error " + err.Error()
			case is == nil:
				told <- "none"
			default:
				told <- fmt.Sprintf("%d GPUs", is.Summary.GPUs)
			}
		})
	})
	return c, told
}

func withUID(uid string) map[string]any {
	return map[string]any{"metadata": map[string]any{"uid": uid}}
}

func summed(n int) *gpunode.Status { return &gpunode.Status{Summary: gpunode.Summary{GPUs: n}} }

// ownerOf is the UID of the Node that a GPUNode belongs to.
func ownerOf(t *testing.T, s *server) string {
	t.Helper()
	objects := s.all("gpunodes")
	if len(objects) != 1 {
		t.Fatalf("%d GPUNodes", len(objects))
	}
	owners, _ := objects[0]["metadata"].(map[string]any)["ownerReferences"].([]any)
	if len(owners) != 1 {
		t.Fatalf("owners %v", owners)
	}
	o := owners[0].(map[string]any)
	if o["kind"] != "Node" || o["name"] != "node-1" || o["apiVersion"] != "v1" {
		t.Errorf("owner %v", o)
	}
	return o["uid"].(string)
}

// The object is made with its owner, then written in one request each time, and made again
// where somebody has deleted it.
func TestGPUNodeIsMadeAndWritten(t *testing.T) {
	s := newServer(t)
	s.put("nodes", "", "node-1", withUID("u-1"))
	c, told := gpuNodes(t, s)
	if got := receive(t, told); got != "none" {
		t.Fatalf("told %q", got)
	}
	for n := range 3 {
		is, err := c.WriteGPUNode(t.Context(), summed(n))
		if err != nil || !reflect.DeepEqual(is, summed(n)) {
			t.Fatalf("%+v, %v", is, err)
		}
	}
	if got := len(s.asked("patch gpunodes")); got != 4 || ownerOf(t, s) != "u-1" {
		t.Errorf("%d requests for three writes, want one to make it and three of the status", got)
	}
	await(t, "the watch tells of it", func() bool { return receive(t, told) == "2 GPUs" })
	s.put("gpunodes", "", "node-1", nil)
	await(t, "the watch tells of the end", func() bool { return receive(t, told) == "none" })
	if _, err := c.WriteGPUNode(t.Context(), summed(7)); err != nil || ownerOf(t, s) != "u-1" {
		t.Fatal(err)
	}
	await(t, "the watch tells of it", func() bool { return receive(t, told) == "7 GPUs" })
	if err := errors.Join(c.RemoveGPUNode(t.Context()), c.RemoveGPUNode(t.Context())); err != nil || len(s.all("gpunodes")) != 0 {
		t.Errorf("removed twice: %v", err)
	}
}

// A write that finds that somebody has deleted the object, of which the watch has not
// heard, makes it.
func TestGPUNodeThatIsGoneIsMadeByTheWrite(t *testing.T) {
	s := newServer(t)
	s.put("nodes", "", "node-1", withUID("u-1"))
	c, told := gpuNodes(t, s)
	receive(t, told)
	if _, err := c.WriteGPUNode(t.Context(), summed(1)); err != nil {
		t.Fatal(err)
	}
	s.set(func() { s.mute = true })
	s.put("gpunodes", "", "node-1", nil)
	if is, err := c.WriteGPUNode(t.Context(), summed(2)); err != nil || is.Summary.GPUs != 2 || ownerOf(t, s) != "u-1" {
		t.Errorf("%+v, %v", is, err)
	}
}

// An object of a Node that was deleted, and made again by its kubelet, becomes the new
// Node's: otherwise the garbage collector takes it.
func TestGPUNodeFollowsItsNode(t *testing.T) {
	s := newServer(t)
	s.put("nodes", "", "node-1", withUID("u-2"))
	s.put("gpunodes", "", "node-1", map[string]any{"status": map[string]any{"summary": map[string]any{"gpus": 5}},
		"metadata": map[string]any{"ownerReferences": []any{map[string]any{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "u-1"}}}})
	c, told := gpuNodes(t, s)
	if got := receive(t, told); got != "5 GPUs" {
		t.Fatalf("told %q", got)
	}
	if _, err := c.WriteGPUNode(t.Context(), summed(5)); err != nil || ownerOf(t, s) != "u-2" {
		t.Errorf("it belongs to %s: %v", ownerOf(t, s), err)
	}
}

// Where the cluster has no such resource, or does not allow it, that is told, asked again
// rarely, and nothing else is harmed.
func TestGPUNodeIsOptional(t *testing.T) {
	for reason, code := range map[string]int{"NotFound": 404, "Forbidden": 403} {
		t.Run(reason, func(t *testing.T) {
			s := newServer(t)
			s.put("nodes", "", "node-1", withUID("u-1"))
			missing := true
			s.set(func() {
				s.fault = func(verb, resource string, w http.ResponseWriter) bool {
					var is bool
					s.set(func() { is = missing })
					if is = is && strings.HasPrefix(resource, "gpunodes"); is {
						refuse(w, code, reason)
					}
					return is
				}
			})
			refused := make(chan string, 10)
			c, told := gpuNodes(t, s, func(o *Options) {
				o.Relist = 50 * time.Millisecond
				o.Refused = func(request string, err error) {
					if err != nil {
						refused <- request
					}
				}
			})
			want := "error the cluster has no resource gpunodes.example.com: apply deployments/base/crd.yaml"
			if code == 403 {
				want = "error "
			}
			if got := receive(t, told); !strings.HasPrefix(got, want) {
				t.Errorf("told %q, want %q", got, want)
			}
			if _, err := c.WriteGPUNode(t.Context(), summed(1)); err == nil {
				t.Error("it is written")
			}
			if err := c.RemoveGPUNode(t.Context()); (err == nil) != (code == 404) {
				t.Errorf("removed: %v", err)
			}
			s.set(func() { missing = false })
			await(t, "it is there", func() bool { return receive(t, told) == "none" })
			select {
			case r := <-refused:
				t.Errorf("the agent is told that it cannot do without: %s", r)
			default:
			}
		})
	}
}

// A server whose definition is older keeps less, and the answer says so.
func TestGPUNodeOfAnOlderDefinition(t *testing.T) {
	s := newServer(t)
	s.put("nodes", "", "node-1", withUID("u-1"))
	s.pruned = []string{"memoryUnitMiB"}
	c, told := gpuNodes(t, s)
	receive(t, told)
	want := summed(1)
	want.MemoryUnitMiB = 1024
	if is, err := c.WriteGPUNode(t.Context(), want); err != nil || !reflect.DeepEqual(is, summed(1)) {
		t.Errorf("%+v, %v", is, err)
	}
}

// Which kubelets tell in the status of pods which devices they have.
func TestPodsTellDevicesByVersion(t *testing.T) {
	s := newServer(t)
	c, _ := connect(t, s)
	var got []string
	for _, version := range []string{"", "nonsense", "v1.33.1", "v1.35.9", "v1.36.0", "v1.36.3-eks-1a2b", "v1.37.0-alpha.1", "v2.0.0"} {
		s.put("nodes", "", "node-1", map[string]any{"status": map[string]any{"nodeInfo": map[string]any{"kubeletVersion": version}}})
		node, err := c.listNode(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if node.PodsTellDevices {
			got = append(got, version)
		}
	}
	if want := []string{"v1.36.0", "v1.36.3-eks-1a2b", "v1.37.0-alpha.1", "v2.0.0"}; !slices.Equal(got, want) {
		t.Errorf("%q do, want %q", got, want)
	}
}
