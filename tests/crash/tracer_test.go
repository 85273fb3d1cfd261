// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

const writerEnv = "GPU_TESTS_WRITER"

// writer is a program with known changes, on several threads and beside others
// that do not count.
func writer(dir string) error {
	for range 8 {
		go func() {
			for {
				_ = os.WriteFile(filepath.Join(filepath.Dir(dir), "elsewhere"), []byte("x"), 0o644)
			}
		}()
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, "temp")
	var f *os.File
	for _, step := range []func() error{
		func() (err error) { f, err = root.Create("temp"); return err },
		func() error { _, err := f.WriteString("one"); return err },
		func() error { return f.Sync() },
		func() error { return root.Rename("temp", "file") },
		func() error { _, err := f.WriteString(" two"); return err },
		func() error { return f.Truncate(3) },
		func() error { return os.WriteFile(temp, nil, 0o644) },
		func() error { return os.Remove(temp) },
		func() error { _ = os.Remove(temp); return nil }, // it is gone, which changes nothing
	} {
		failed := make(chan error)
		go func() { failed <- step() }()
		if err := <-failed; err != nil {
			return err
		}
	}
	return nil
}

// What the tracer counts is what was done, and a program that is killed at its
// k-th change has done k-1.
func TestTheTracerKillsBeforeTheKthChange(t *testing.T) {
	trace(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	states := []string{"", "temp=", "temp=one", "temp=one", "file=one", "file=one two", "file=one", "file=one temp=", "file=one temp=", "file=one"}
	calls := "openat write fsync renameat write ftruncate openat write unlinkat"
	for k := 1; k <= len(states); k++ {
		dir := filepath.Join(t.TempDir(), "watched")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		log, err := os.Create(filepath.Join(t.TempDir(), "log"))
		if err != nil {
			t.Fatal(err)
		}
		p, err := startTraced([]string{"/usr/bin/env", writerEnv + "=" + dir, self}, log, k, nil, nil, dir)
		if err != nil {
			t.Fatal(err)
		}
		<-p.done
		changes, killed := p.seen()
		if text, err := os.ReadFile(log.Name()); err != nil || len(text) > 0 {
			t.Errorf("k = %d: it says %q, %v", k, text, err)
		}
		log.Close()
		var names []string
		for _, c := range changes {
			names = append(names, c.call)
		}
		if k < len(states) && (!killed || p.status.Signal() != syscall.SIGKILL) || k == len(states) && (killed || p.status != 0) {
			t.Errorf("k = %d: killed: %v, status %#x", k, killed, p.status)
		}
		want := strings.Fields(calls)
		if want = want[:min(k, len(want))]; !slices.Equal(names, want) {
			t.Errorf("k = %d: saw %v, want %v", k, changes, want)
		}
		if got := content(t, dir); got != states[k-1] {
			t.Errorf("k = %d: it leaves %q, want %q", k, got, states[k-1])
		}
	}
}

func content(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e.Name()+"="+string(data))
	}
	return strings.Join(out, " ")
}

var canTrace = sync.OnceValue(func() error {
	log, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer log.Close()
	p, err := startTraced([]string{"/bin/true"}, log, 0, nil, nil)
	if err != nil {
		return err
	}
	<-p.done
	if p.status != 0 {
		return errors.New("a traced program cannot filter its own system calls")
	}
	return nil
})

// trace skips the test where programs cannot be traced.
func trace(t *testing.T) {
	t.Helper()
	err := canTrace()
	for _, lack := range []error{errors.ErrUnsupported, fs.ErrPermission} {
		if errors.Is(err, lack) {
			t.Skipf("skipped: this machine does not allow ptrace with a filter of system calls: %v", err)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}
