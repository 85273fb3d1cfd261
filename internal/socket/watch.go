// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
)

// Watch reports that sockets come or go in a directory: something can be received from
// the channel after it, once for many changes. The channel is
// closed when the watch is over, because ctx ended or the directory went. An
// error means that the directory cannot be watched now, for want of inotify
// instances perhaps, or because it does not exist yet.
type Watch func(ctx context.Context, dir string) (<-chan struct{}, error)

// Inotify is the Watch by the kernel's inotify.
func Inotify(ctx context.Context, dir string) (<-chan struct{}, error) {
	dir = filepath.Clean(dir)
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	if err := w.Add(dir); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	told := make(chan struct{}, 1)
	go func() {
		defer close(told)
		defer w.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case e, ok := <-w.Events:
				if !ok || e.Name == dir && e.Op&(fsnotify.Remove|fsnotify.Rename) != 0 {
					return
				}
				// The kubelet writes its checkpoint in the same directory at
				// every Allocate.
				if filepath.Ext(e.Name) != ".sock" || e.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename) == 0 {
					continue
				}
			case _, ok := <-w.Errors:
				if !ok {
					return
				}
				// Events were lost: whoever is told looks at everything anyway.
			}
			select {
			case told <- struct{}{}:
			default:
			}
		}
	}()
	return told, nil
}
