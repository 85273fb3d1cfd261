// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// A driver that hangs while it is opened keeps nobody beyond his own deadline:
// not a reading, and not the loop that is to let it go.
func TestOpenHangs(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	opening := make(chan struct{}, 1)
	l := NewLate(func(ctx context.Context) (*Driver, error) {
		opening <- struct{}{}
		<-ctx.Done() // as under the lock: no longer than its context
		return nil, gpu.ErrTimeout
	}, func(string, string, time.Duration) {})
	go func() { _ = l.Events(ctx, func(gpu.Event) {}) }() // followDriver's, whose context has no end
	<-opening
	done := make(chan struct{})
	go func() {
		defer close(done)
		bounded, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		_, _ = l.Inventory(bounded)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("Inventory with 10 ms of patience waits for as long as the open of Events hangs")
	}
	cancel()
	<-done
}

func TestWhereTheDriverIsSeen(t *testing.T) {
	for _, c := range []struct{ root, hostRoot, host, want string }{
		{"/", "", "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"},
		{"/host", "/", "/usr/lib/libcuda.so.1", "/host/usr/lib/libcuda.so.1"},
		{"/driver", "/run/nvidia/driver", "/run/nvidia/driver/usr/lib/libcuda.so.1", "/driver/usr/lib/libcuda.so.1"},
		{"/driver", "/run/nvidia/driver", "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"},
	} {
		o := Options{DriverRoot: c.root, HostDriverRoot: c.hostRoot}
		if got := o.Seen(c.host); got != c.want {
			t.Errorf("%s, below %s for the agent and %s for the host: %s, want %s", c.host, c.root, c.hostRoot, got, c.want)
		}
	}
}
