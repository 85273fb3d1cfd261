// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// limit is for tests that fail: on a machine with other work a step may take a minute.
const limit = 5 * time.Minute

type word struct {
	data string
	err  error
}

// follow runs a follower until the test ends. Its sweeps are rare, so that what
// is told came by an event, unless the test changes that.
func follow(t *testing.T, path string, change func(*follower)) <-chan word {
	t.Helper()
	told := make(chan word, 100)
	f := &follower{path: path, fn: func(data []byte, err error) { told <- word{string(data), err} },
		settle: 5 * time.Millisecond, sweep: time.Hour, poll: 5 * time.Millisecond, newWatcher: fsnotify.NewWatcher}
	if change != nil {
		change(f)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != context.Canceled {
				t.Errorf("ended with %v", err)
			}
		case <-time.After(limit):
			t.Error("does not end with its context")
		}
	})
	return told
}

// want waits for a content. A reader may see a file between truncation and
// write, so what comes before it may be empty or absent, and nothing else.
func want(t *testing.T, told <-chan word, data string) {
	t.Helper()
	deadline := time.After(limit)
	for {
		select {
		case w := <-told:
			if w.err == nil && w.data == data {
				return
			}
			if w.data != "" || w.err != nil && !errors.Is(w.err, fs.ErrNotExist) {
				t.Fatalf("told %q, %v, want %q", w.data, w.err, data)
			}
		case <-deadline:
			t.Fatalf("never told %q", data)
		}
	}
}

func wantAbsent(t *testing.T, told <-chan word) {
	t.Helper()
	select {
	case w := <-told:
		if !errors.Is(w.err, fs.ErrNotExist) {
			t.Fatalf("told %q, %v, want an absent file", w.data, w.err)
		}
	case <-time.After(limit):
		t.Fatal("never told of an absent file")
	}
}

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFileLife(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	told := follow(t, path, nil)
	wantAbsent(t, told)
	write(t, path, "one")
	want(t, told, "one")
	write(t, path, "two")
	want(t, told, "two")
	// An editor's way: a new file renamed over the old one.
	write(t, path+".swp", "three")
	must(t, os.Rename(path+".swp", path))
	want(t, told, "three")
	must(t, os.Remove(path))
	wantAbsent(t, told)
	write(t, path, "three") // the same as before it was gone, yet news
	want(t, told, "three")
}

// mount lays a ConfigMap out as the kubelet does and returns a function that
// changes its content as the kubelet does.
func mount(t *testing.T, dir string) func(generation, data string) {
	return func(generation, data string) {
		t.Helper()
		old, _ := os.Readlink(filepath.Join(dir, "..data"))
		must(t, os.Mkdir(filepath.Join(dir, "..gen"+generation), 0o755))
		write(t, filepath.Join(dir, "..gen"+generation, "config.yaml"), data)
		must(t, os.Symlink("..gen"+generation, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		if old != "" {
			must(t, os.RemoveAll(filepath.Join(dir, old)))
		}
	}
}

func TestFileOfConfigMapMount(t *testing.T) {
	dir := t.TempDir()
	update := mount(t, dir)
	update("1", "one")
	must(t, os.Symlink("..data/config.yaml", filepath.Join(dir, "config.yaml")))
	told := follow(t, filepath.Join(dir, "config.yaml"), nil)
	want(t, told, "one")
	update("2", "two")
	want(t, told, "two")
	update("3", "two") // the same content: no news
	update("4", "three")
	want(t, told, "three")
}

func TestFileBehindLink(t *testing.T) {
	real := filepath.Join(t.TempDir(), "real.yaml")
	link := filepath.Join(t.TempDir(), "config.yaml")
	write(t, real, "one")
	must(t, os.Symlink(real, link))
	told := follow(t, link, nil)
	want(t, told, "one")
	write(t, real, "two")
	want(t, told, "two")
	write(t, real+".new", "three")
	must(t, os.Rename(real+".new", real))
	want(t, told, "three")
}

func TestFileOfMissingDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	told := follow(t, filepath.Join(dir, "config.yaml"), nil)
	wantAbsent(t, told)
	must(t, os.Mkdir(dir, 0o755))
	write(t, filepath.Join(dir, "config.yaml"), "one")
	want(t, told, "one")
	// Another directory of the same name, as an atomic deployment makes it.
	must(t, os.Rename(dir, dir+".old"))
	must(t, os.Mkdir(dir, 0o755))
	write(t, filepath.Join(dir, "config.yaml"), "two")
	want(t, told, "two")
}

func TestFileWithoutInotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	var tries atomic.Int32
	told := follow(t, path, func(f *follower) {
		f.newWatcher = func() (*fsnotify.Watcher, error) {
			tries.Add(1)
			return nil, syscall.EMFILE
		}
	})
	want(t, told, "one")
	write(t, path, "two")
	want(t, told, "two")
	if tries.Load() < 2 {
		t.Error("never tried again for a watch")
	}
}

// inotify that comes back is used again: polling stops.
func TestFileInotifyComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	var tries atomic.Int32
	watching := make(chan struct{}, 1)
	told := follow(t, path, func(f *follower) {
		f.newWatcher = func() (*fsnotify.Watcher, error) {
			if tries.Add(1) < 3 {
				return nil, syscall.EMFILE
			}
			watching <- struct{}{}
			return fsnotify.NewWatcher()
		}
	})
	want(t, told, "one")
	select {
	case <-watching:
	case <-time.After(limit):
		t.Fatal("never watches")
	}
	write(t, path, "two")
	want(t, told, "two")
}

// What inotify does not tell, the sweep finds.
func TestFileSwept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	told := follow(t, path, func(f *follower) {
		f.sweep = 5 * time.Millisecond
		f.settle = time.Hour // no event is ever acted on
	})
	want(t, told, "one")
	write(t, path, "two")
	want(t, told, "two")
}

func TestFileTooLarge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(path, nil, 0o644))
	must(t, os.Truncate(path, maxFile+1))
	told := follow(t, path, nil)
	select {
	case w := <-told:
		if w.err == nil || !strings.Contains(w.err.Error(), "larger than") {
			t.Fatalf("told %v", w.err)
		}
	case <-time.After(limit):
		t.Fatal("nothing told")
	}
	write(t, path, "one")
	want(t, told, "one")
}

func TestWatchFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got []string
	err := WatchFile(ctx, path, func(data []byte, err error) {
		if err != nil {
			return // between truncation and write
		}
		got = append(got, string(data))
		switch string(data) {
		case "one":
			write(t, path, "two")
		case "two":
			cancel()
		}
	})
	if err != context.Canceled || len(got) < 2 {
		t.Errorf("told %q and ended with %v", got, err)
	}
}
