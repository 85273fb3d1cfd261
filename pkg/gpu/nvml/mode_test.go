// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
)

// mocked is a driver of one GPU, "GPU-0", whose every call is the test's.
func mocked(t *testing.T, card nvml.Device, missing ...string) *components {
	t.Helper()
	lib := &mock.Interface{
		ExtensionsFunc: func() nvml.ExtendedInterface { return without(missing) },
		DeviceGetHandleByUUIDFunc: func(u string) (nvml.Device, nvml.Return) {
			if u != "GPU-0" {
				return nil, nvml.ERROR_NOT_FOUND
			}
			return card, nvml.SUCCESS
		},
	}
	d := newComponents(&session{lib: lib, library: "libnvidia-ml.so.1", locks: newLocks(), stopped: t.Context(), log: slog.New(slog.DiscardHandler)})
	three := gpu.Profile{Name: "3g.40gb", ID: 9, Slices: 3, Max: 2, Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}
	d.profiles.whole = map[board][]gpu.Profile{{model: "GPU-0"}: {three}}
	return d
}

func TestSetMIGModeAnswers(t *testing.T) {
	type answer struct{ activation, ret nvml.Return }
	for _, c := range []struct {
		name    string
		answers []answer
		pending int
		want    error
		again   bool // events are registered again
	}{
		{"at once", []answer{{nvml.SUCCESS, nvml.SUCCESS}}, nvml.DEVICE_MIG_ENABLE, nil, true},
		{"a reset is due", []answer{{nvml.ERROR_RESET_REQUIRED, nvml.SUCCESS}}, nvml.DEVICE_MIG_ENABLE, nil, false},
		{"our own events are in the way", []answer{{nvml.ERROR_IN_USE, nvml.SUCCESS}, {nvml.SUCCESS, nvml.SUCCESS}}, nvml.DEVICE_MIG_ENABLE, nil, true},
		{"others are in the way, it is pending", []answer{{nvml.ERROR_IN_USE, nvml.SUCCESS}, {nvml.ERROR_IN_USE, nvml.SUCCESS}}, nvml.DEVICE_MIG_ENABLE, nil, false},
		{"others are in the way, it is not", []answer{{nvml.ERROR_IN_USE, nvml.SUCCESS}, {nvml.ERROR_IN_USE, nvml.SUCCESS}}, nvml.DEVICE_MIG_DISABLE, gpu.ErrInUse, false},
		{"refused as in use", []answer{{0, nvml.ERROR_IN_USE}, {0, nvml.ERROR_IN_USE}}, nvml.DEVICE_MIG_DISABLE, gpu.ErrInUse, false},
		{"refused at first", []answer{{0, nvml.ERROR_IN_USE}, {0, nvml.SUCCESS}}, nvml.DEVICE_MIG_ENABLE, nil, true},
		{"no MIG", []answer{{0, nvml.ERROR_NOT_SUPPORTED}}, nvml.DEVICE_MIG_DISABLE, gpu.ErrNotSupported, false},
		{"not root", []answer{{0, nvml.ERROR_NO_PERMISSION}}, nvml.DEVICE_MIG_DISABLE, gpu.ErrNoPermission, false},
		{"it fails to come into force", []answer{{nvml.ERROR_UNKNOWN, nvml.SUCCESS}}, nvml.DEVICE_MIG_DISABLE, gpu.ErrDriver, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			var d *components
			card := &mock.Device{
				SetMigModeFunc: func(mode int) (nvml.Return, nvml.Return) {
					if mode != nvml.DEVICE_MIG_ENABLE {
						t.Errorf("mode %d", mode)
					}
					if waiting := d.locks.waiting.TryRLock(); waiting {
						d.locks.waiting.RUnlock()
						if calls > 0 {
							t.Error("tried again while events may be waited for")
						}
					}
					a := c.answers[calls]
					calls++
					return a.activation, a.ret
				},
				GetMigModeFunc: func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_DISABLE, c.pending, nvml.SUCCESS },
			}
			d = mocked(t, card)
			err := d.SetMIGMode(t.Context(), "GPU-0", true)
			if !errors.Is(err, c.want) || calls != len(c.answers) || (len(d.again) > 0) != c.again {
				t.Errorf("%v after %d calls, events again %v; want %v after %d, %v", err, calls, len(d.again) > 0, c.want, len(c.answers), c.again)
			}
			if err != nil && !strings.Contains(err.Error(), "switch MIG on on GPU-0") {
				t.Errorf("%v does not say what was tried", err)
			}
			if !d.locks.handles.TryLock() || !d.locks.waiting.TryLock() {
				t.Error("a room is kept")
			}
		})
	}
}

// standingMock is a GPU instance with one compute slice taken, whose driver puts
// compute instances where it likes.
func standingMock(t *testing.T, lands uint32, destroyed *[]string, undo nvml.Return) *mock.GpuInstance {
	return &mock.GpuInstance{
		GetInfoFunc: func() (nvml.GpuInstanceInfo, nvml.Return) {
			return nvml.GpuInstanceInfo{Id: 2, ProfileId: 9, Placement: nvml.GpuInstancePlacement{Start: 4, Size: 4}}, nvml.SUCCESS
		},
		GetComputeInstanceProfileInfoFunc: func(number, engines int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			switch number {
			case 0, 1, 2:
				return nvml.ComputeInstanceProfileInfo{Id: uint32(number), SliceCount: uint32(number + 1), InstanceCount: uint32(3 / (number + 1))}, nvml.SUCCESS
			case 7: // of one slice too, with all that the GPU instance has
				return nvml.ComputeInstanceProfileInfo{Id: 7, SliceCount: 1, InstanceCount: 1, SharedDecoderCount: 1}, nvml.SUCCESS
			case 9:
				return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
			}
			return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
		},
		CreateComputeInstanceFunc: func(kind *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
			if kind.Id != 7 {
				t.Errorf("compute profile %d, want that of one slice with the engines", kind.Id)
			}
			return &mock.ComputeInstance{
				GetInfoFunc: func() (nvml.ComputeInstanceInfo, nvml.Return) {
					return nvml.ComputeInstanceInfo{Id: 5, Placement: nvml.ComputeInstancePlacement{Start: lands, Size: 1}}, nvml.SUCCESS
				},
				DestroyFunc: func() nvml.Return {
					*destroyed = append(*destroyed, "compute")
					return nvml.SUCCESS
				},
			}, nvml.SUCCESS
		},
		DestroyFunc: func() nvml.Return {
			*destroyed = append(*destroyed, "gpu")
			return undo
		},
	}
}

// A driver that cannot be told the compute slice is taken at its luck.
func TestCreateWithoutComputePlacements(t *testing.T) {
	for _, c := range []struct {
		lands     uint32
		undo      nvml.Return
		want      error
		destroyed string
		said      string
	}{
		{1, nvml.SUCCESS, nil, "", ""},
		{0, nvml.SUCCESS, gpu.ErrNotSupported, "compute gpu", "compute slice 0"},
		{0, nvml.ERROR_UNKNOWN, gpu.ErrNotSupported, "compute gpu", "left behind"},
	} {
		var destroyed []string
		card := &mock.Device{
			CreateGpuInstanceWithPlacementFunc: func(p *nvml.GpuInstanceProfileInfo, at *nvml.GpuInstancePlacement) (nvml.GpuInstance, nvml.Return) {
				if p.Id != 9 || *at != (nvml.GpuInstancePlacement{Start: 4, Size: 4}) {
					t.Errorf("profile %d at %+v", p.Id, *at)
				}
				return standingMock(t, c.lands, &destroyed, c.undo), nvml.SUCCESS
			},
		}
		d := mocked(t, card, "nvmlGpuInstanceCreateComputeInstanceWithPlacement")
		in, err := d.CreateInstance(t.Context(), "GPU-0", "1c.3g.40gb", gpu.Placement{Start: 4, Size: 4}, 1)
		if !errors.Is(err, c.want) || strings.Join(destroyed, " ") != c.destroyed {
			t.Errorf("lands at %d: %+v, %v, destroyed %v; want %v, %q", c.lands, in, err, destroyed, c.want, c.destroyed)
		}
		if want := (gpu.Instance{Profile: "1c.3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, GI: 2, CI: 5, CIStart: 1}); err == nil && in != want {
			t.Errorf("made %+v, want %+v", in, want)
		}
		if err != nil && (!strings.Contains(err.Error(), "create 1c.3g.40gb@4.1 on GPU-0") || !strings.Contains(err.Error(), c.said)) {
			t.Errorf("%v does not say what was tried, and %q", err, c.said)
		}
	}
}

// Work waits its turn on its own GPU, and one who leaves does not end it.
func TestWorkIsOnePerGPU(t *testing.T) {
	d := mocked(t, &mock.Device{})
	in, out := make(chan struct{}), make(chan struct{})
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := work(ctx, d.session, "GPU-0", "create 3g.40gb@4 on GPU-0", func() (int, error) {
			close(in)
			<-out
			return 1, nil
		})
		left <- err
	}()
	<-in
	next := make(chan error, 1)
	go func() {
		_, err := work(t.Context(), d.session, "GPU-0", "read GPU-0", answer(2))
		next <- err
	}()
	// Another GPU and readings go on.
	if n, err := work(t.Context(), d.session, "GPU-1", "read GPU-1", answer(3)); n != 3 || err != nil {
		t.Errorf("another GPU: %d, %v", n, err)
	}
	if n, err := call(t.Context(), d.session, "read the inventory", answer(4)); n != 4 || err != nil {
		t.Errorf("a reading: %d, %v", n, err)
	}
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("the one that left: %v", err)
	}
	// However long it lasts it is not taken for hung, and nobody gets the library
	// alone meanwhile.
	short, cancel := context.WithTimeout(t.Context(), ctxlock.HungAfter+ctxlock.HungAfter/2)
	defer cancel()
	if _, err := work(short, d.session, "GPU-0", "read GPU-0", answer(5)); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "create 3g.40gb@4 on GPU-0") {
		t.Errorf("refused, before its own time was over: %v", err)
	}
	if d.locks.handles.TryLock() {
		t.Error("the library can be initialised anew under the work")
	}
	close(out)
	if err := <-next; err != nil {
		t.Errorf("the one in line: %v", err)
	}
	if err := d.locks.handles.Lock(t.Context()); err != nil {
		t.Error(err)
	}
}

// Who has to wait for a wait for events has to do so once.
func TestHurry(t *testing.T) {
	d := newComponents(&session{opts: Options{EventWait: time.Hour}})
	if got := d.eventWait(); got != time.Hour {
		t.Errorf("waits %s for events", got)
	}
	d.hurry()
	if got := d.eventWait(); got != hurriedWait {
		t.Errorf("waits %s for events, want %s", got, hurriedWait)
	}
	d.opts.EventWait = time.Millisecond
	if got := d.eventWait(); got != time.Millisecond {
		t.Errorf("waits %s for events, longer than it ever would", got)
	}
	d.hurried.Store(time.Now().UnixNano() - 1)
	d.opts.EventWait = time.Hour
	if got := d.eventWait(); got != time.Hour {
		t.Errorf("waits %s for events for ever", got)
	}
}
