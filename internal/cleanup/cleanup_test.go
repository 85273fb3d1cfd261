// SPDX-License-Identifier: Apache-2.0

package cleanup

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/internal/node"
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

// While anybody knows of a pod that holds devices, everything stays, and the pod is named.
// When it has ended, nothing of the agent is left.
func TestHoldersKeepEverything(t *testing.T) {
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), CDIDir: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		NFDDir: filepath.Join(root, "nfd"), Domain: "example.com", ResourceDomain: "example.com"}
	touched := 0
	n.Object = func(context.Context) error { touched++; return nil }
	k, err := fakes.StartKubelet(fakes.KubeletOptions{Dir: n.KubeletDir})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	socket := filepath.Join(root, "containerd.sock")
	r, err := fakes.StartRuntime(socket, fakes.Pod{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Stop()
	n.Runtime = node.NewRuntime(node.RuntimeOptions{Endpoint: socket, AnnotationPrefix: cdi.AnnotationName(n.Domain, ""), Logger: slog.New(slog.DiscardHandler)})
	defer n.Runtime.Close()
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
				Annotations: map[string]string{cdi.AnnotationName(n.Domain, "0123456789abcdef"): resource}})
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
		if err := n.Run(t.Context()); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), "train/job (example.com/gpu)") {
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
