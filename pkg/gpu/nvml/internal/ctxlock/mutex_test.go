// SPDX-License-Identifier: Apache-2.0

package ctxlock

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func answer(n int) func() (int, error) {
	return func() (int, error) { return n, nil }
}

func TestDoorLetsOneIn(t *testing.T) {
	d := NewMutex()
	var inside, most atomic.Int32
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			got, err := Do(t.Context(), d, "count", func() (int, error) {
				most.Store(max(most.Load(), inside.Add(1)))
				defer inside.Add(-1)
				return i, nil
			}, nil)
			if got != i || err != nil {
				t.Errorf("call %d got %d, %v", i, got, err)
			}
		}()
	}
	wg.Wait()
	if most.Load() != 1 {
		t.Errorf("%d were inside at once", most.Load())
	}
}

// hang sends a call in that stays until release, and returns once its caller
// has left.
func hang(t *testing.T, d *Mutex) (release func()) {
	t.Helper()
	in, out := make(chan struct{}), make(chan struct{})
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := Do(ctx, d, "sleep for ever", func() (int, error) {
			close(in)
			<-out
			return 0, nil
		}, nil)
		left <- err
	}()
	<-in
	leave()
	err := <-left
	if !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Fatalf("the caller that left got %v", err)
	}
	return sync.OnceFunc(func() { close(out) })
}

func TestDoorStaysShutWhileACallHangs(t *testing.T) {
	d := NewMutex()
	release := hang(t, d)
	defer release()
	for range 3 {
		// A context without an end: the answer must come at once all the same.
		_, err := Do(context.Background(), d, "read memory", answer(1), nil)
		if !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "sleep for ever") {
			t.Fatalf("got %v, want ErrTimeout that names the call inside", err)
		}
	}
	release()
	for {
		got, err := Do(context.Background(), d, "read memory", answer(1), nil)
		if errors.Is(err, gpu.ErrTimeout) {
			continue // the call is on its way out
		}
		if got != 1 || err != nil {
			t.Fatalf("after the driver answered: %d, %v", got, err)
		}
		return
	}
}

func TestDoorTellsThoseInLine(t *testing.T) {
	d := NewMutex()
	in, out := make(chan struct{}), make(chan struct{})
	defer close(out)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := Do(ctx, d, "sleep for ever", func() (int, error) {
			close(in)
			<-out
			return 0, nil
		}, nil)
		left <- err
	}()
	<-in
	waiting := make(chan error, 1)
	go func() {
		_, err := Do(context.Background(), d, "wait in line", answer(1), nil)
		waiting <- err
	}()
	leave()
	<-left
	if err := <-waiting; !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("the one in line got %v", err)
	}
}

func TestDoorWithAnEndedContext(t *testing.T) {
	d := NewMutex()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// Whether such a call goes in is open; that it leaves the lock usable is not.
	for range 100 {
		if _, err := Do(ctx, d, "come late", answer(1), nil); err != nil && !errors.Is(err, gpu.ErrTimeout) {
			t.Fatal(err)
		}
	}
	for {
		got, err := Do(t.Context(), d, "come in time", answer(2), nil)
		if errors.Is(err, gpu.ErrTimeout) {
			continue
		}
		if got != 2 || err != nil {
			t.Fatalf("got %d, %v", got, err)
		}
		return
	}
}

// A caller that leaves early does not make those in line fail, if its call
// ends soon.
func TestDoorWaitsForACallThatEnds(t *testing.T) {
	d := NewMutex()
	release := hang(t, d)
	waiting := make(chan error, 1)
	go func() {
		_, err := Do(t.Context(), d, "wait in line", answer(1), nil)
		waiting <- err
	}()
	release()
	if err := <-waiting; err != nil {
		t.Error(err)
	}
}

func TestDoorUndoesWhatNobodyWaitsFor(t *testing.T) {
	d := NewMutex()
	in, out := make(chan struct{}), make(chan struct{})
	ctx, leave := context.WithCancel(t.Context())
	undone := make(chan int, 1)
	go func() {
		<-in
		leave()
	}()
	_, err := Do(ctx, d, "open", func() (int, error) {
		close(in)
		<-out
		return 7, nil
	}, func(n int) { undone <- n })
	if !errors.Is(err, gpu.ErrTimeout) {
		t.Fatal(err)
	}
	close(out)
	if n := <-undone; n != 7 {
		t.Errorf("undone %d, want 7", n)
	}
	// What is taken is not undone.
	if n, err := Do(t.Context(), d, "open", answer(8), func(int) { t.Error("undone all the same") }); n != 8 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
}
