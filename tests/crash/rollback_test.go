// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/lab"
)

var beforeProgram = flag.String("before", "", "the gpu-agent that TestRollback rolls back to, with nvidia-cdi-hook "+
	"beside it (default, with -long alone: the commit before is built)")

// TestRollback goes back to the agent of the commit before, and forth again, while pods come and go. Each agent
// comes to the truth with what the other has left. What runs has the pages and the CDI file that it began with.
func TestRollback(t *testing.T) {
	if !*long && *beforeProgram == "" {
		t.Skip("-long is not set, nor -before: the program of the commit before takes a minute to build")
	}
	older := *beforeProgram
	if older == "" {
		older = buildBefore(t)
	}
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	newer := m.agent
	ctx := inOrder(t)
	n, err := settled(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	held, err := n.admit(ctx, 1, "init", "main")
	if err == nil {
		err = n.run(ctx, held)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, agent := range slices.Repeat([]string{older, newer}, 4) {
		// The load goes on while the one agent ends and the other one starts.
		loaded, cancel := context.WithCancel(ctx)
		var runs atomic.Int64
		over := make(chan []*pod, 1)
		go func() { over <- n.load(loaded, &runs) }()
		if err := poll(ctx, "a pod of the load to run", func() error { return least(&runs, 1) }); err != nil {
			t.Error(err)
		}
		n.end()
		m.agent = agent
		n.begin(0)
		before := runs.Load()
		err := poll(ctx, "two pods more", func() error { return least(&runs, before+2) })
		cancel()
		pods := <-over
		n.forgetUnborn()
		if err == nil {
			err = n.settle(ctx)
		}
		if err != nil {
			t.Fatalf("turn %d, %s: %v\n%s", i, agent, err, n.said())
		}
		for _, p := range pods {
			n.stop(p)
		}
		if err := n.settle(ctx); err != nil {
			t.Fatalf("turn %d, %s, when the load has ended: %v\n%s", i, agent, err, n.said())
		}
	}
	if wrong := n.complaints(); len(wrong) > 0 {
		t.Error(strings.Join(wrong, "\n"))
	}
}

func least(have *atomic.Int64, want int64) error {
	if n := have.Load(); n < want {
		return fmt.Errorf("there were %d, want %d", n, want)
	}
	return nil
}

// load lets pods come and go until ctx ends, two at a time, and returns those that are there then.
func (n *node) load(ctx context.Context, runs *atomic.Int64) (pods []*pod) {
	for ctx.Err() == nil {
		if len(pods) > 1 {
			n.stop(pods[0])
			pods = pods[1:]
		}
		p, err := n.admit(ctx, 1, "main")
		if err == nil && n.run(ctx, p) == nil {
			pods = append(pods, p)
			runs.Add(1)
		}
	}
	return pods
}

// buildBefore builds the programs of the commit before the one that is checked out.
func buildBefore(t *testing.T) string {
	t.Helper()
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	sources, err := git(kit.Root, "archive", "--format=tar", "HEAD^")
	if err != nil {
		t.Skip("the commit before is not to be had: ", err)
	}
	dir, cache := t.TempDir(), t.TempDir()
	if err := untar(dir, sources); err != nil {
		t.Fatal(err)
	}
	err = kit.Run(t.Context(), "make", "--no-print-directory", "-s", "-C", dir, "build", "CACHE="+cache)
	if err != nil {
		t.Fatal("build the commit before: ", err)
	}
	return filepath.Join(cache, "bin", "gpu-agent")
}

// untar unpacks the files of an archive of git's.
func untar(dir string, archive []byte) error {
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(dir, filepath.Clean("/"+h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeReg:
			var data []byte
			if data, err = io.ReadAll(r); err == nil {
				err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
					os.WriteFile(path, data, h.FileInfo().Mode().Perm()))
			}
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		}
		if err != nil {
			return err
		}
	}
}
