// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// gpuNodes is a client that follows its GPUNode, and what it is told.
func gpuNodes(t *testing.T, s *server, change ...func(*Options)) (*Client, <-chan string) {
	t.Helper()
	c, _ := connect(t, s, change...)
	told := make(chan string, 100)
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(Node) {}) })
	kubetest.Await(t, "the watch tells of the Node", func() bool {
		c.ourNode.mu.Lock()
		defer c.ourNode.mu.Unlock()
		return c.ourNode.last != nil
	})
	kubetest.Background(t, func(ctx context.Context) error {
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
	objects := s.All("gpunodes")
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
	s.Put("nodes", "", "node-1", withUID("u-1"))
	c, told := gpuNodes(t, s)
	if got := kubetest.Receive(t, told); got != "none" {
		t.Fatalf("told %q", got)
	}
	for n := range 3 {
		is, err := c.WriteGPUNode(t.Context(), summed(n))
		if err != nil || !reflect.DeepEqual(is, summed(n)) {
			t.Fatalf("%+v, %v", is, err)
		}
	}
	if got := len(s.Asked("patch gpunodes")); got != 4 || ownerOf(t, s) != "u-1" {
		t.Errorf("%d requests for three writes, want one to make it and three of the status", got)
	}
	kubetest.Await(t, "the watch tells of it", func() bool { return kubetest.Receive(t, told) == "2 GPUs" })
	s.Put("gpunodes", "", "node-1", nil)
	kubetest.Await(t, "the watch tells of the end", func() bool { return kubetest.Receive(t, told) == "none" })
	if _, err := c.WriteGPUNode(t.Context(), summed(7)); err != nil || ownerOf(t, s) != "u-1" {
		t.Fatal(err)
	}
	kubetest.Await(t, "the watch tells of it", func() bool { return kubetest.Receive(t, told) == "7 GPUs" })
	if err := errors.Join(c.RemoveGPUNode(t.Context()), c.RemoveGPUNode(t.Context())); err != nil || len(s.All("gpunodes")) != 0 {
		t.Errorf("removed twice: %v", err)
	}
}

// A write that finds that somebody has deleted the object, of which the watch has not
// heard, makes it.
func TestGPUNodeThatIsGoneIsMadeByTheWrite(t *testing.T) {
	s := newServer(t)
	s.Put("nodes", "", "node-1", withUID("u-1"))
	c, told := gpuNodes(t, s)
	kubetest.Receive(t, told)
	if _, err := c.WriteGPUNode(t.Context(), summed(1)); err != nil {
		t.Fatal(err)
	}
	s.Set(func() { s.Mute = true })
	s.Put("gpunodes", "", "node-1", nil)
	if is, err := c.WriteGPUNode(t.Context(), summed(2)); err != nil || is.Summary.GPUs != 2 || ownerOf(t, s) != "u-1" {
		t.Errorf("%+v, %v", is, err)
	}
}

// An object of a Node that was deleted, and made again by its kubelet, becomes the new
// Node's: otherwise the garbage collector takes it.
func TestGPUNodeFollowsItsNode(t *testing.T) {
	s := newServer(t)
	s.Put("nodes", "", "node-1", withUID("u-2"))
	s.Put("gpunodes", "", "node-1", map[string]any{"status": map[string]any{"summary": map[string]any{"gpus": 5}},
		"metadata": map[string]any{"ownerReferences": []any{map[string]any{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "u-1"}}}})
	c, told := gpuNodes(t, s)
	if got := kubetest.Receive(t, told); got != "5 GPUs" {
		t.Fatalf("told %q", got)
	}
	if _, err := c.WriteGPUNode(t.Context(), summed(5)); err != nil || ownerOf(t, s) != "u-2" {
		t.Errorf("it belongs to %s: %v", ownerOf(t, s), err)
	}
}

// Where the cluster has no such resource, or does not allow it, that is told, asked again with growing pauses, and
// nothing else is harmed. An API server that has just started refuses what it allows a moment later.
func TestGPUNodeIsOptional(t *testing.T) {
	for reason, code := range map[string]int{"NotFound": 404, "Forbidden": 403} {
		t.Run(reason, func(t *testing.T) {
			s := newServer(t)
			s.Put("nodes", "", "node-1", withUID("u-1"))
			missing := true
			s.Set(func() {
				s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
					var is bool
					s.Set(func() { is = missing })
					if is = is && strings.HasPrefix(resource, "gpunodes"); is {
						kubetest.Refuse(w, code, reason)
					}
					return is
				}
			})
			refused := make(chan string, 10)
			c, told := gpuNodes(t, s, func(o *Options) {
				o.Relist = time.Hour
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
			if got := kubetest.Receive(t, told); !strings.HasPrefix(got, want) {
				t.Errorf("told %q, want %q", got, want)
			}
			if _, err := c.WriteGPUNode(t.Context(), summed(1)); err == nil {
				t.Error("it is written")
			}
			if err := c.RemoveGPUNode(t.Context()); (err == nil) != (code == 404) {
				t.Errorf("removed: %v", err)
			}
			s.Set(func() { missing = false })
			kubetest.Await(t, "it is there", func() bool { return kubetest.Receive(t, told) == "none" })
			select {
			case r := <-refused:
				t.Errorf("the agent is told that it cannot do without: %s", r)
			default:
			}
		})
	}
}

// A server that was put back to a snapshot has an object that is older than what was written. That is told, also if
// the server did not know GPUNodes for a moment after its start.
func TestGPUNodeOfARestoredServer(t *testing.T) {
	for _, missing := range []bool{false, true} {
		t.Run(fmt.Sprintf("missing for a moment: %v", missing), func(t *testing.T) {
			s := newServer(t)
			s.Put("nodes", "", "node-1", withUID("u-1"))
			c, told := gpuNodes(t, s)
			write := func(n int) {
				t.Helper()
				if _, err := c.WriteGPUNode(t.Context(), summed(n)); err != nil {
					t.Fatal(err)
				}
				kubetest.Await(t, "the watch tells of it", func() bool { return kubetest.Receive(t, told) == fmt.Sprintf("%d GPUs", n) })
			}
			write(1)
			var version, history int
			var then map[string]map[string]any
			s.Set(func() { version, history, then = s.Version, len(s.History), maps.Clone(s.Objects) })
			write(2)
			write(3)
			s.Stop()
			refuse, listed := missing, false
			s.Set(func() {
				s.Version, s.History, s.Objects = version, s.History[:history:history], then
				s.Fault = func(verb, resource string, w http.ResponseWriter) (handled bool) {
					s.Set(func() {
						switch {
						case !strings.HasPrefix(resource, "gpunodes"):
						case refuse:
							kubetest.Refuse(w, 404, "NotFound")
							handled = true
						case verb == "list":
							listed = true
						case !listed: // servers are away for longer than the pause before the next watch
							kubetest.Refuse(w, 503, "ServiceUnavailable")
							handled = true
						}
					})
					return handled
				}
			})
			s.Back()
			if missing {
				kubetest.Await(t, "it is missing", func() bool { return strings.HasPrefix(kubetest.Receive(t, told), "error ") })
				s.Set(func() { refuse = false })
			}
			kubetest.Await(t, "the watch tells of the older one", func() bool { return kubetest.Receive(t, told) == "1 GPUs" })
			write(4)
		})
	}
}

// A server whose definition is older keeps less, and the answer says so.
func TestGPUNodeOfAnOlderDefinition(t *testing.T) {
	s := newServer(t)
	s.Put("nodes", "", "node-1", withUID("u-1"))
	s.Pruned = []string{"memoryUnitMiB"}
	c, told := gpuNodes(t, s)
	kubetest.Receive(t, told)
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
		s.Put("nodes", "", "node-1", map[string]any{"status": map[string]any{"nodeInfo": map[string]any{"kubeletVersion": version}}})
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
