// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// maxFile is the largest file that WatchFile reads, in bytes. A ConfigMap has at most 1 MiB.
const maxFile = 4 << 20

// follower is the state of one WatchFile. Tests set its fields.
type follower struct {
	path string
	fn   func([]byte, error)
	// settle is how long the directory must be quiet before the file is read. One save makes
	// several events, and the file is empty between truncation and write.
	settle time.Duration
	// sweep is the period between reads without an event, and poll that without inotify.
	sweep, poll time.Duration
	newWatcher  func() (*fsnotify.Watcher, error)

	watcher *fsnotify.Watcher
	watched map[string]bool

	told    bool
	data    []byte
	problem string
}

// WatchFile calls fn with the file's content, and again whenever it differs from the last call's,
// until ctx ends; it returns the error of ctx. If the file cannot be read, it calls fn with the
// error, once for each reason. The error wraps fs.ErrNotExist if the file is missing. Calls never
// overlap.
//
// WatchFile waits for a missing directory. It sees changes at once if inotify works, and otherwise
// within two seconds.
func WatchFile(ctx context.Context, path string, fn func(data []byte, err error)) error {
	return (&follower{
		path: path, fn: fn,
		settle: 50 * time.Millisecond, sweep: 30 * time.Second, poll: 2 * time.Second,
		newWatcher: fsnotify.NewWatcher,
	}).run(ctx)
}

func (f *follower) run(ctx context.Context) error {
	path, err := filepath.Abs(f.path)
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.path, err)
	}
	f.path = path
	defer f.drop()

	var settled *time.Timer
	tick := time.NewTimer(0)
	defer tick.Stop()
	var quiet <-chan time.Time
	for {
		var events <-chan fsnotify.Event
		var errs <-chan error
		if f.watcher != nil {
			events, errs = f.watcher.Events, f.watcher.Errors
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-events:
			if !ok {
				f.drop()
				tick.Reset(0)
			} else if f.concerns(e.Name) && quiet == nil {
				settled = time.NewTimer(f.settle)
				quiet = settled.C
			} else if f.concerns(e.Name) {
				settled.Reset(f.settle)
			}
			continue
		case <-errs:
			// An overflowing queue has lost events. Starting over also recovers from any other
			// error.
			f.drop()
			tick.Reset(0)
			continue
		case <-quiet:
			quiet = nil
		case <-tick.C:
		}
		// Watch before reading: a change after the read is then an event.
		hears := f.watch()
		f.read()
		if hears {
			tick.Reset(f.sweep)
		} else {
			tick.Reset(f.poll)
		}
	}
}

// concerns reports whether an event may mean a new content. The kubelet swaps the link "..data" and
// leaves the file's own link as it is.
func (f *follower) concerns(name string) bool {
	base := filepath.Base(name)
	return base == filepath.Base(f.path) || base == "..data" || f.watched[name] || name == f.resolved()
}

func (f *follower) resolved() string {
	resolved, err := filepath.EvalSymlinks(f.path)
	if err != nil {
		return f.path
	}
	return resolved
}

// watch watches the directory of the file and, if the file is a link, that of its target. It
// reports whether it watches both.
func (f *follower) watch() bool {
	if f.watcher == nil {
		watcher, err := f.newWatcher()
		if err != nil {
			return false // no instance left (EMFILE): poll, and try again at the next poll
		}
		f.watcher = watcher
	}
	wanted := map[string]bool{filepath.Dir(f.path): true, filepath.Dir(f.resolved()): true}
	for dir := range f.watched {
		if !wanted[dir] {
			f.watcher.Remove(dir) // fails if the directory itself is gone
		}
	}
	f.watched = wanted
	hears := true
	for dir := range wanted {
		// Adding a directory again costs one system call. It also watches a new directory that has
		// replaced one of the same name.
		if err := f.watcher.Add(dir); err != nil {
			hears = false // no such directory, or no watch left (ENOSPC)
		}
	}
	return hears
}

func (f *follower) drop() {
	if f.watcher != nil {
		f.watcher.Close()
	}
	f.watcher, f.watched = nil, nil
}

// read reads the file, and calls fn if the result differs from the last.
func (f *follower) read() {
	data, _, err := readRegular(f.path, maxFile)
	if err != nil {
		if f.told && f.problem == err.Error() {
			return
		}
		f.told, f.data, f.problem = true, nil, err.Error()
		f.fn(nil, err)
		return
	}
	if f.told && f.problem == "" && bytes.Equal(f.data, data) {
		return
	}
	f.told, f.data, f.problem = true, data, ""
	f.fn(bytes.Clone(data), nil)
}
