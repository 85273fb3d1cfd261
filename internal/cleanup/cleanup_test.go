// SPDX-License-Identifier: Apache-2.0

package cleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/fakes"
)

// Where nobody can say who holds devices, everything stays, and it is said once
// however often it is tried.
func TestUnknownHoldersKeepEverything(t *testing.T) {
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), CDIDir: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		NFDDir: filepath.Join(root, "nfd"), Domain: "example.com", ResourceDomain: "example.com",
		Object: func(context.Context) error { t.Error("the Node object is touched"); return nil }}
	files := []string{filepath.Join(n.CDIDir, "example.com-gpu-0123456789abcdef.json"), filepath.Join(n.StateDir, "state.json")}
	for _, f := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, []byte("{}"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*retry/2)
		defer cancel()
		n.Runtime = node.NewRuntime(node.RuntimeOptions{Root: root, Logger: slog.New(slog.DiscardHandler)})
		defer n.Runtime.Close()
		said := 0
		if err := n.Wait(ctx, func(error) { said++ }); err == nil || said != 1 {
			t.Errorf("%v, said %d times", err, said)
		}
	})
	for _, f := range files {
		if _, err := os.Stat(f); err != nil {
			t.Error(err)
		}
	}
}

// beside starts a kubelet and a runtime, and has n ask them, until the test ends.
func (n *Node) beside(t *testing.T, root string) (*fakes.Kubelet, *fakes.Runtime) {
	t.Helper()
	k, err := fakes.StartKubelet(fakes.KubeletOptions{Dir: n.KubeletDir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	socket := filepath.Join(root, "containerd.sock")
	r, err := fakes.StartRuntime(socket, fakes.Pod{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	n.Runtime = node.NewRuntime(node.RuntimeOptions{Endpoint: socket, AnnotationPrefix: cdi.AnnotationName(n.Domain, ""), Logger: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { n.Runtime.Close() })
	return k, r
}

// While anybody knows of a pod that holds devices, everything stays, and the pod is named.
// When it has ended, nothing of the agent is left.
func TestHoldersKeepEverything(t *testing.T) {
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), CDIDir: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		NFDDir: filepath.Join(root, "nfd"), Domain: "example.com", ResourceDomain: "example.com"}
	touched := 0
	n.Object = func(context.Context) error { touched++; return nil }
	k, r := n.beside(t, root)
	files := []string{filepath.Join(n.CDIDir, "example.com-gpu-0123456789abcdef.json"), filepath.Join(n.StateDir, "state.json")}
	for _, f := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, []byte("{}"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}

	const resource = "example.com/gpu"
	give := func(p fakes.Pod, container string) {
		if err := k.Give(p, container, resource, []string{"GPU-" + p.UID}, &api.ContainerAllocateResponse{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		by    string
		holds func(fakes.Pod)
	}{
		{"the kubelet", func(p fakes.Pod) { give(p, "main") }},
		{"the runtime", func(p fakes.Pod) {
			r.Put(p, &cri.Container{Id: "c", Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING,
				Annotations: map[string]string{cdi.AnnotationName(n.Domain, "0123456789abcdef"): record(t, resource)}})
		}},
		// Its init container has not been made: the kubelet's list leaves that out.
		{"the checkpoint", func(p fakes.Pod) {
			k.Bind(p, "main")
			give(p, "init")
			r.Run(p)
		}},
	} {
		p := fakes.Pod{UID: c.by, Namespace: "train", Name: "job"}
		c.holds(p)
		if err := n.Run(t.Context()); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), ": train/job (example.com/gpu); delete them first") {
			t.Errorf("held by the word of %s: %v, want the holder named", c.by, err)
		}
		for _, f := range files {
			if _, err := os.Stat(f); err != nil {
				t.Errorf("held by the word of %s: %v", c.by, err)
			}
		}
		k.Finish(p.UID)
		r.Remove(p.UID)
	}
	if touched > 0 {
		t.Errorf("the Node object was touched %d times while pods held devices", touched)
	}

	if err := n.Run(t.Context()); err != nil || touched != 1 {
		t.Errorf("when the holders have ended: %v, the Node object was touched %d times", err, touched)
	}
	for _, f := range files {
		if _, err := os.Stat(f); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", f, err)
		}
	}
}

// record is what Allocate has written into a container's annotation.
func record(t *testing.T, resource string) string {
	t.Helper()
	text, err := json.Marshal(ledger.Record{Owner: ledger.DevicePlugin, Resource: resource,
		Grants: []ledger.Grant{{GPU: "GPU-0", Piece: piece.Whole{}, Cap: piece.NoCap}}})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A container's annotation names the resource. Other programs can write annotations too: whatever
// they have written, the pod holds something, and the message stays short.
func TestHoldersNameTheResource(t *testing.T) {
	const key = "0123456789abcdef"
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), Domain: "example.com", ResourceDomain: "example.com"}
	_, r := n.beside(t, root)

	for _, c := range []struct{ what, key, value, want string }{
		{"what Allocate wrote", key, record(t, "example.com/gpu-mem"), "train/job (example.com/gpu-mem)"},
		{"a MIG profile's", key, record(t, "example.com/mig-3g.40gb"), "train/job (example.com/mig-3g.40gb)"},
		{"of another domain", key, record(t, "example.org/gpu"), "train/job (allocation " + key + ")"},
		{"a name without end", key, record(t, "example.com/mig-"+strings.Repeat("9", 1<<20)), "train/job (allocation " + key + ")"},
		{"another without end", key, record(t, "example.com/mig-1g.5gb."+strings.Repeat("x", 1<<16)), "train/job (allocation " + key + ")"},
		{"no record", key, `{"x":` + strings.Repeat("[", 1<<16), "train/job (allocation " + key + ")"},
		{"no key", strings.Repeat("x", 1<<16), record(t, "example.com/gpu"), "train/job (example.com/gpu)"},
		{"neither", strings.Repeat("x", 1<<16), "x", "train/job (an allocation)"},
	} {
		p := fakes.Pod{UID: "u", Namespace: "train", Name: "job"}
		r.Put(p, &cri.Container{Id: "c", Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING,
			Annotations: map[string]string{cdi.AnnotationName(n.Domain, c.key): c.value}})
		if err := n.Run(t.Context()); !errors.Is(err, ErrHeld) || err.Error() != "clean up: "+ErrHeld.Error()+": "+c.want+"; delete them first" {
			t.Errorf("%s: %.300v, want one of %q", c.what, err, c.want)
		}
		r.Remove(p.UID)
	}

	// Of many pods the first are named.
	for i := range 300 {
		p := fakes.Pod{UID: fmt.Sprint(i), Namespace: "train", Name: fmt.Sprintf("job-%03d-%s", i, strings.Repeat("x", 40))}
		r.Put(p, &cri.Container{Id: p.UID, Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING,
			Annotations: map[string]string{cdi.AnnotationName(n.Domain, key): record(t, "example.com/gpu")}})
	}
	if err := n.Run(t.Context()); !errors.Is(err, ErrHeld) || len(err.Error()) > 5<<10 || !strings.Contains(err.Error(), "train/job-000-") || !strings.Contains(err.Error(), " and 280 more; delete them first") {
		t.Errorf("of 300 pods: %.200v, %d bytes", err, len(fmt.Sprint(err)))
	}
}
