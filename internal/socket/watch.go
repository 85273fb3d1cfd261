// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
)

// Watch watches a directory for sockets that come or go. It sends a value on the channel
// afterwards, once for many changes. The channel is closed when the watch ends, because ctx has
// ended or the directory has gone. Watch fails if the directory cannot be watched now: it does not
// exist yet, or there are too few inotify instances.
type Watch func(ctx context.Context, dir string) (<-chan struct{}, error)

// Inotify is a Watch that uses the kernel's inotify.
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
				// The kubelet's checkpoint is in the same directory and changes at every Allocate.
				if filepath.Ext(e.Name) != ".sock" || e.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename) == 0 {
					continue
				}
			case _, ok := <-w.Errors:
				if !ok {
					return
				}
				// Events were lost. The receiver looks at everything anyway.
			}
			select {
			case told <- struct{}{}:
			default:
			}
		}
	}()
	return told, nil
}
