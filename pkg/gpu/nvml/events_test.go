// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// TestLastWait ends a watch while a wait for events is under way: what comes with that wait
// is reported, and on a busy machine the wait returns late.
func TestLastWait(t *testing.T) {
	const wait = 10 * time.Second
	for _, c := range []struct {
		name  string
		takes time.Duration // the rest of the wait
		xid   uint64        // what the driver reports then, 0 for nothing
		hung  bool
	}{
		{"nothing comes", wait, 0, false},
		{"an error comes", wait / 2, 79, false},
		{"late", wait + 4*time.Second, 0, false},
		{"an error comes late", wait + 4*time.Second, 79, false},
		{"it hangs", time.Hour, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var told []gpu.Event
				w := &watch{
					events: newComponents(&session{opts: Options{EventWait: wait}, locks: newLocks()}).events,
					report: func(e gpu.Event) { told = append(told, e) },
				}
				if !w.events.locks.waiting.TryRLock() { // as who waits for events
					t.Fatal("there is no place")
				}
				l := &listener{heard: make(chan news), stop: make(chan struct{}), left: make(chan struct{}), done: make(chan struct{})}
				go func() {
					defer close(l.done)
					time.Sleep(c.takes)
					if c.xid > 0 {
						select {
						case l.heard <- news{data: nvml.EventData{EventData: c.xid}, ret: nvml.SUCCESS}:
						case <-l.left:
						}
					}
				}()
				err := w.end(t.Context(), l)
				l.leave()
				if hung := errors.Is(err, gpu.ErrTimeout); hung != c.hung || !hung && err != nil {
					t.Errorf("%v", err)
				}
				if heard := len(told) == 1 && told[0].Xid == c.xid; heard != (c.xid > 0) {
					t.Errorf("reported: %+v", told)
				}
				<-l.done
			})
		})
	}
}
