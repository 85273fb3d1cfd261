// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/tests/fakes/claims"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func publishing(t *testing.T) (*Publisher, *claims.Cluster) {
	s := &claims.Cluster{Driver: driver}
	p := NewPublisher(driver, s, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	synctest.Wait()
	return p, s
}

// slicesNamed makes slices of which the name is all that counts.
func slicesNamed(names ...string) func() []resourcev1.ResourceSlice {
	return func() (out []resourcev1.ResourceSlice) {
		for _, name := range names {
			out = append(out, resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		return out
	}
}

// Nothing is written before the kubelet has the driver, and everything at once then.
func TestNoSlicesBeforeRegistration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		p.Set(slicesNamed("a"))
		time.Sleep(time.Hour)
		if synctest.Wait(); s.Writes() > 0 {
			t.Error("slices of a driver that the kubelet does not have")
		}
		p.Registered(true)
		if synctest.Wait(); len(s.Slices()) != 1 {
			t.Error("no slices at the registration")
		}
		p.Registered(false)
		p.Set(slicesNamed("a", "b"))
		if synctest.Wait(); len(s.Slices()) != 1 {
			t.Error("slices while the kubelet is away")
		}
	})
}

// A kubelet that starts deletes the slices, also long after it has registered the driver.
func TestSlicesThatVanish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		p.Set(slicesNamed("a"))
		p.Registered(true)
		for range 3 {
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			before := s.Writes()
			s.Wipe()
			if synctest.Wait(); len(s.Slices()) != 1 || s.Writes() != before+1 {
				t.Errorf("%v after %d writes", s.Slices(), s.Writes()-before)
			}
		}
		// Somebody who does it all the time gets no flood of writes.
		before := s.Writes()
		for range 10_000 {
			s.Wipe()
			time.Sleep(time.Millisecond)
		}
		if synctest.Wait(); s.Writes()-before > 10*5+20+1 {
			t.Errorf("%d writes in 10 s", s.Writes()-before)
		}
	})
}

// What fails is tried again, less and less often; where the server cannot do it, each
// minute. It is told what is wrong, and no longer when it has been mended.
func TestFailuresOfTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		says := func(want ...status.Reason) {
			t.Helper()
			synctest.Wait()
			var got []status.Reason
			for _, c := range p.Conditions(time.Now()) {
				got = append(got, c.Reason)
			}
			if !slices.Equal(got, want) {
				t.Errorf("it is said %v, want %v: %+v", got, want, p.Conditions(time.Now()))
			}
		}
		s.Refuse(errors.New("no route to host"))
		p.Set(slicesNamed("a"))
		p.Registered(true)
		says()
		time.Sleep(10 * time.Minute)
		says(status.SlicesFailed)
		if s.Writes() < 10 || s.Writes() > 40 {
			t.Errorf("%d tries", s.Writes())
		}
		s.Refuse(nil)
		time.Sleep(2 * lastPause)
		says()
		if len(s.Slices()) != 1 {
			t.Errorf("%v", s.Slices())
		}
		s.Refuse(fmt.Errorf("slice a: %w", agentkube.ErrDropped))
		before := s.Writes()
		p.Set(slicesNamed("b"))
		says(status.APIServerUnfit)
		time.Sleep(time.Hour)
		says(status.APIServerUnfit)
		if n := s.Writes() - before; n != 61 {
			t.Errorf("%d tries in an hour", n)
		}
		s.Refuse(nil)
		time.Sleep(unfitPause)
		says()
	})
}

// Slices that somebody deletes are written again, which is told for a minute; a kubelet
// that has started is nobody.
func TestSlicesThatSomebodyDeletesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		var told atomic.Int64
		p.changed = func() { told.Add(1) }
		p.Set(slicesNamed("a"))
		p.Registered(true)
		says := func(want int) {
			t.Helper()
			if synctest.Wait(); len(p.Conditions(time.Now())) != want || len(s.Slices()) != 1 {
				t.Errorf("%+v; %v", p.Conditions(time.Now()), s.Slices())
			}
		}
		says(0)
		s.Wipe()
		says(1)
		if c := p.Conditions(time.Now())[0]; c.Type != status.Noted || c.Reason != status.SlicesChanged || told.Load() != 1 {
			t.Errorf("%+v, told %d times", c, told.Load())
		}
		time.Sleep(meddledFor)
		says(0)
		if told.Load() != 2 {
			t.Errorf("told %d times; want it to be told that it is over", told.Load())
		}
		p.Registered(false)
		s.Wipe()
		p.Registered(true)
		says(0)
	})
}
