// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that enters a node's network must end, or it holds that network; the main one
// does not.
func TestOnThread(t *testing.T) {
	const calls = 2000
	threads := make(chan int, calls)
	for range calls {
		onThread(func() { threads <- unix.Gettid() })
	}
	for range calls {
		if thread := <-threads; thread == unix.Getpid() {
			t.Fatal("it was called on the main thread")
		}
	}
}
