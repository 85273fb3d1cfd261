// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/fakes"
)

const gpuMem = "example.com/gpu-mem"

var (
	a1 = Device{ID: "a", Healthy: true}
	b1 = Device{ID: "b", Healthy: true}
	b0 = Device{ID: "b"}
)

func lastIs(resource, want string) func(seen) bool {
	return func(s seen) bool { return s[resource].Lists > 0 && shape(s[resource].Devices) == want }
}

func TestListsReachTheKubelet(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1, b1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "first list", lastIs(gpuMem, "a b"))
	src.list.set([]Device{a1, b0})
	k.await(t, "withdrawal", lastIs(gpuMem, "a !b"))
	src.list.set(nil) // Not known: the last list stands.
	src.list.set([]Device{a1})
	k.await(t, "fewer devices", lastIs(gpuMem, "a"))

	// The same slice again is a list again: it makes the kubelet write its
	// checkpoint.
	before := k.seen()
	src.list.update(func(ds []Device) []Device { return ds })
	k.await(t, "same list again", func(s seen) bool { return s[gpuMem].Lists == before[gpuMem].Lists+1 })

	if e := k.seen()[gpuMem]; e.Registrations != 1 || !e.Options.GetPreStartRequired() || !e.Options.GetGetPreferredAllocationAvailable() {
		t.Errorf("registered %d times with options %v, want once, with both", e.Registrations, e.Options)
	}
	st := a.Status()
	if len(st) != 1 || st[0] != (Status{Resource: gpuMem, Registered: true, Devices: 1, Bytes: st[0].Bytes}) || st[0].Bytes == 0 {
		t.Errorf("Status = %+v", st)
	}
	if !strings.Contains(a.log.String(), `msg="sent list" resource=example.com/gpu-mem devices=2 bytes=`) {
		t.Error("the size of lists is not logged")
	}
}

// Who counts what can be had is told of each list once the kubelet has been sent it, and
// of none that it has not.
func TestSentTellsWhatCanBeHad(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	told := make(chan string, 16)
	src := sourceOf(a1, b1)
	startAgent(t, dir, map[string]Source{gpuMem: src}, func(k *Kubelet) {
		k.opts.Sent = func(resource string, healthy int) { told <- fmt.Sprint(resource, " ", healthy) }
	})
	if len(told) > 0 {
		t.Errorf("%s, and there is no kubelet", <-told)
	}
	k := startKubelet(t, dir)
	for _, step := range []struct {
		list []Device
		want string
	}{{nil, "2"}, {[]Device{a1, b0}, "1"}, {[]Device{b0}, "0"}, {[]Device{}, "0"}, {[]Device{b1}, "1"}} {
		if step.list != nil {
			src.list.set(step.list)
		}
		// A resource that is registered again has its list sent again.
		for got := ""; got != gpuMem+" "+step.want; {
			select {
			case got = <-told:
			case <-time.After(10 * time.Second):
				t.Fatalf("after the list %v: told %q last, want %s", step.list, got, step.want)
			}
		}
	}
	k.await(t, "the last list", lastIs(gpuMem, "b"))
}

// TestWithhold: the kubelet's stream ends, and so does each that somebody opens; then the
// resource is registered anew, with the newest list. No list says that a device is unhealthy.
func TestWithhold(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "the device", lastIs(gpuMem, "a"))
	for i := range 3 {
		a.Withhold(true)
		k.await(t, "no stream", func(s seen) bool { return !s.connected(gpuMem) })
		if _, err := openStream(t, filepath.Join(dir, "example.com_gpu-mem.sock")).Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("a stream that was opened meanwhile: %v", err)
		}
		src.list.set([]Device{a1, b1})
		time.Sleep(50 * time.Millisecond)
		if s := k.seen()[gpuMem]; s.Registrations != i+1 || strings.Contains(shape(s.Devices), "!") {
			t.Errorf("registered %d times, with %q", s.Registrations, shape(s.Devices))
		}
		a.Withhold(false)
		k.await(t, "the devices", func(s seen) bool { return s.connected(gpuMem) && lastIs(gpuMem, "a b")(s) })
		src.list.set([]Device{a1})
		k.await(t, "the next list", lastIs(gpuMem, "a"))
	}
}

// TestPodsByNameAfterTheLastDevice: a kubelet that has to call before each start refuses
// every container that wants the resource and has no device of it, also one that has a
// device by a claim ("no devices found allocated in local cache"). So it must not have to
// where the resource has no device; where it has one, it must be told before it hears of
// the device.
func TestPodsByNameAfterTheLastDevice(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "the device", lastIs(gpuMem, "a"))
	for range 3 {
		src.list.set([]Device{})
		k.await(t, "no call without devices", func(s seen) bool {
			return lastIs(gpuMem, "")(s) && !s[gpuMem].Options.GetPreStartRequired()
		})
		// While the kubelet does not listen, it is not shown what it would start.
		k.refuse(errors.New("not now"))
		src.list.set([]Device{a1})
		eventually(t, "the plugin says why", func() bool { return a.Status()[0].Err != nil })
		if s := k.seen()[gpuMem]; shape(s.Devices) != "" {
			t.Fatalf("the kubelet was shown %q before it was told to call", shape(s.Devices))
		}
		k.refuse(nil)
		k.await(t, "the device, and a call", func(s seen) bool {
			return lastIs(gpuMem, "a")(s) && s[gpuMem].Options.GetPreStartRequired()
		})
	}
}

// TestNothingBeforeTheFirstList: a resource whose devices are not known yet is
// not shown to the kubelet as one without devices.
func TestNothingBeforeTheFirstList(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src, other := &source{}, sourceOf(b1)
	startAgent(t, dir, map[string]Source{gpuMem: src, "example.com/gpu": other})
	k.await(t, "the other resource", lastIs("example.com/gpu", "b"))
	if s := k.seen(); s[gpuMem].Registrations != 0 {
		t.Error("registered before the source knew its devices")
	}
	src.list.set([]Device{a1})
	s := k.await(t, "first list", lastIs(gpuMem, "a"))
	if s[gpuMem].Lists != 1 {
		t.Errorf("%d lists, want one", s[gpuMem].Lists)
	}
}

func TestKubeletRestarts(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	a, b := sourceOf(a1), sourceOf(b1)
	startAgent(t, dir, map[string]Source{gpuMem: a, "example.com/gpu": b})
	for i := range 20 {
		k := startKubelet(t, dir)
		k.await(t, fmt.Sprintf("first lists, start %d", i), func(s seen) bool {
			return lastIs(gpuMem, "a")(s) && lastIs("example.com/gpu", "b")(s)
		})
		// The stream must also be the one that changes come by.
		a.list.set([]Device{a1, b0})
		k.await(t, "a change", lastIs(gpuMem, "a !b"))
		a.list.set([]Device{a1})
		k.await(t, "a change back", lastIs(gpuMem, "a"))
		if i%2 == 0 {
			k.Stop()
		} else {
			k.Kill()
		}
	}
}

func TestKubeletComesLater(t *testing.T) {
	leakCheck(t)
	dir := filepath.Join(tempDir(t), "device-plugins") // which nobody has made yet
	a := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) { k.poll = time.Millisecond })
	eventually(t, "the plugin says why", func() bool {
		st := a.Status()
		return len(st) == 1 && st[0].Err != nil
	})
	k := startKubelet(t, dir)
	k.await(t, "first list", lastIs(gpuMem, "a"))
	eventually(t, "the reason is gone", func() bool { return a.Status()[0].Err == nil })
}

func TestDeadSocketsAreNoObstacle(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	// What a predecessor and a kubelet leave when they are killed.
	for _, name := range []string{"example.com_gpu-mem.sock", kubeletSocket, "." + hash(gpuMem)} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		_ = l.Close()
	}
	a := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)})
	eventually(t, "the plugin says why", func() bool {
		st := a.Status()
		return len(st) == 1 && st[0].Err != nil && strings.Contains(st[0].Err.Error(), "register with the kubelet")
	})
	k := startKubelet(t, dir)
	k.await(t, "first list", lastIs(gpuMem, "a"))
}

func TestSocketDeletedUnderUs(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "first list", lastIs(gpuMem, "a"))
	// The list may come before the answer to Register. A socket that goes until
	// then is registered again, and must be: a kubelet that starts removes it.
	eventually(t, "the registration's answer", func() bool { return strings.Contains(a.log.String(), "msg=registered") })
	path := filepath.Join(dir, "example.com_gpu-mem.sock")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the socket is back", func() bool { _, err := os.Stat(path); return err == nil })
	// The kubelet still has its connection and needs no other: a second one
	// would be cut off when the first one ends.
	src.list.set([]Device{b1})
	k.await(t, "a change", lastIs(gpuMem, "b"))
	if s := k.seen(); s[gpuMem].Registrations != 1 {
		t.Errorf("registered %d times, want once", s[gpuMem].Registrations)
	}
}

// TestStreamLost: without a stream the kubelet counts all devices as unhealthy,
// and nothing in the directory shows it.
func TestStreamLost(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)})
	for n := 1; n <= 5; n++ {
		k.await(t, "a list", func(s seen) bool { return s[gpuMem].Lists == n && s.connected(gpuMem) })
		_ = k.seen()[gpuMem].Conn.Close()
	}
}

// TestStrangersStream: whoever can reach the socket can open a stream, and so
// make a lost registration look well. The kubelet's own word settles it.
func TestStrangersStream(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src}, func(k *Kubelet) { k.suspectEvery = 0 })
	k.await(t, "first list", lastIs(gpuMem, "a"))
	stranger := openStream(t, filepath.Join(dir, "example.com_gpu-mem.sock"))
	stranger.next(t, "a")
	_ = k.seen()[gpuMem].Conn.Close()
	k.await(t, "the kubelet's stream lost", func(s seen) bool { return !s.connected(gpuMem) })
	eventually(t, "the stranger's stream alone", func() bool {
		p := a.served[gpuMem].plugin.(*Plugin)
		n, _ := p.service.streams.get()
		return n.open == 1
	})

	// A list without a healthy device is one that the kubelet does not name.
	src.list.set([]Device{b0})
	stranger.next(t, "!b")
	a.Suspect(gpuMem)
	src.list.set([]Device{a1, b0})
	stranger.next(t, "a !b")
	if s := k.seen(); s[gpuMem].Registrations != 1 {
		t.Errorf("registered %d times though nothing was healthy, or nobody suspected anything", s[gpuMem].Registrations)
	}
	a.Suspect("example.com/unknown")
	k.refuse(errors.New("not now"))
	eventually(t, "the refusal", func() bool {
		a.Suspect(gpuMem) // as at each look: one that comes while a registration is under way is dropped
		err := a.Status()[0].Err
		return err != nil && strings.Contains(err.Error(), "not now")
	})
	k.refuse(nil)
	k.await(t, "a list again", lastIs(gpuMem, "a !b"))
	if s := k.seen(); s[gpuMem].Registrations != 2 {
		t.Errorf("registered %d times, want twice", s[gpuMem].Registrations)
	}
	src.list.set([]Device{b1})
	k.await(t, "a change", lastIs(gpuMem, "b"))
	stranger.next(t, "b")
}

// TestListWhileAnotherResourceHangs: no resource waits for another one's
// registration, nor for a kubelet that refuses connections at first.
func TestListWhileAnotherResourceHangs(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	a := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1), "example.com/gpu": sourceOf(b1)})
	k := startKubelet(t, dir, func(o *fakes.KubeletOptions) {
		o.Deaf = func(k *fakes.Kubelet) {
			hang("example.com/gpu")(k)
			eventually(t, "a refusal", func() bool {
				for _, st := range a.Status() {
					if st.Resource == gpuMem && st.Err != nil && strings.Contains(st.Err.Error(), "connection refused") {
						return true
					}
				}
				return false
			})
		}
	})
	k.await(t, "the other list", lastIs(gpuMem, "a"))
	if s := k.seen(); s["example.com/gpu"].Lists != 0 {
		t.Error("the registration did not hang")
	}
}

// TestWithdrawalDuringAllocate: the list goes out while the call is in flight,
// with the device in it.
func TestWithdrawalDuringAllocate(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1, b1)
	called, release := make(chan struct{}), make(chan struct{})
	src.allocate = func([]string) (Grant, error) {
		close(called)
		<-release
		return Grant{CDI: []string{"example.com/gpu=1"}}, nil
	}
	startAgent(t, dir, map[string]Source{gpuMem: src})
	c := k.client(t, gpuMem)
	k.await(t, "first list", lastIs(gpuMem, "a b"))
	answered := make(chan error, 1)
	go func() {
		_, err := c.Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"b"}}}})
		answered <- err
	}()
	<-called
	src.list.set([]Device{a1, b0})
	k.await(t, "withdrawal", lastIs(gpuMem, "a !b"))
	select {
	case err := <-answered:
		t.Errorf("Allocate was answered: %v", err)
	default:
	}
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("Allocate: %v", err)
	}
}

// TestNewestListWins: streams get lists in the order in which the source had
// them, without any that the source did not have, and each ends with the last.
// One that reads slowly skips some; one that keeps up gets all.
func TestNewestListWins(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	// A list is of one generation; 200 of them fill a stream that nobody reads.
	const last, many = 200, 300
	list := func(generation int) []Device {
		ds := make([]Device, many)
		for i := range ds {
			ds[i] = Device{ID: fmt.Sprintf("%04d-%04d", generation, i), Healthy: generation%2 == 0}
		}
		return ds
	}
	src := &source{}
	src.list.set(list(0))
	startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "first list", func(s seen) bool { return s[gpuMem].Lists == 1 })
	path := filepath.Join(dir, "example.com_gpu-mem.sock")
	quick, slow := openStream(t, path), openStream(t, path)
	generation := func(ds []*api.Device) int {
		var g int
		if _, err := fmt.Sscanf(ds[0].ID, "%04d-", &g); err != nil || len(ds) != many {
			t.Fatalf("%d devices, the first %q", len(ds), ds[0].ID)
		}
		for i, d := range ds {
			if want := health(&Device{Healthy: g%2 == 0}); d.ID != fmt.Sprintf("%04d-%04d", g, i) || d.Health != want {
				t.Fatalf("in list %d: %v", g, d)
			}
		}
		return g
	}
	if g := generation(quick.recv(t)); g != 0 {
		t.Fatalf("the first list is %d", g)
	}
	for g := 1; g <= last; g++ {
		src.list.set(list(g))
		if g <= 20 {
			if got := generation(quick.recv(t)); got != g {
				t.Fatalf("a stream that keeps up got list %d, want %d", got, g)
			}
		}
	}
	for _, s := range []*stream{quick, slow} {
		lists, before := 0, -1
		for before < last {
			g := generation(s.recv(t))
			if g <= before {
				t.Fatalf("list %d after %d", g, before)
			}
			before = g
			lists++
		}
		t.Logf("%d of %d lists", lists, last+1)
	}
	k.await(t, "the last list", func(s seen) bool {
		return len(s[gpuMem].Devices) == many && s[gpuMem].Devices[0].ID == fmt.Sprintf("%04d-0000", last)
	})

	// The same slice again, on each open stream.
	before := k.seen()
	src.list.update(func(ds []Device) []Device { return ds })
	for _, s := range []*stream{quick, slow} {
		if g := generation(s.recv(t)); g != last {
			t.Errorf("sent again: list %d, want %d", g, last)
		}
	}
	k.await(t, "the same list again", func(s seen) bool { return s[gpuMem].Lists == before[gpuMem].Lists+1 })
}

func TestRegistrationRefused(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	k.refuse(errors.New("the kubelet is not in the mood"))
	var changes atomic.Int32
	a := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) { k.opts.Changed = func() { changes.Add(1) } })
	eventually(t, "the reason", func() bool {
		st := a.Status()
		return len(st) == 1 && st[0].Err != nil && strings.Contains(st[0].Err.Error(), "not in the mood")
	})
	if st := a.Status()[0]; st.Registered || st.Since.IsZero() || changes.Load() == 0 {
		t.Errorf("Status = %+v, after %d changes", st, changes.Load())
	}
	before := changes.Load()
	k.refuse(nil)
	k.await(t, "first list", lastIs(gpuMem, "a"))
	eventually(t, "all is well", func() bool { return a.Status()[0].Registered })
	if st := a.Status()[0]; st.Err != nil || !st.Since.IsZero() || changes.Load() == before {
		t.Errorf("Status = %+v, after %d changes", st, changes.Load()-before)
	}
}

// TestRegistrationRefusedInOtherWords: errors were compared by their text, so that one
// which differs each time (it names a port, or a time) was news each time.
func TestRegistrationRefusedInOtherWords(t *testing.T) {
	log, lines := logger(t)
	changes := 0
	p := &Plugin{kubelet: &directory{opts: KubeletOptions{Logger: log, Changed: func() { changes++ }}}, resource: gpuMem}
	for i, step := range []struct {
		err     error
		changes int
	}{
		{fmt.Errorf("register: %w", status.Error(codes.Unknown, "no, at 12:00:01")), 1},
		{fmt.Errorf("register: %w", status.Error(codes.Unknown, "no, at 12:00:02")), 1},
		{fmt.Errorf("register: %w", status.Error(codes.Unavailable, "away")), 2},
		{fmt.Errorf("listen: %w", syscall.ENOSPC), 3},
		{fmt.Errorf("listen again: %w", syscall.ENOSPC), 3},
		{fmt.Errorf("listen again: %w", syscall.EACCES), 4},
		{nil, 5},
		{nil, 5},
	} {
		if p.report(step.err, 1); changes != step.changes {
			t.Errorf("step %d (%v): %d changes, want %d", i, step.err, changes, step.changes)
		}
	}
	if n := strings.Count(lines.String(), "level=WARN"); n != 4 {
		t.Errorf("%d warnings, want 4:\n%s", n, lines)
	}
}

// TestListThatTheKubeletCannotReceive: a kubelet that cannot takes each registration
// and ends each stream, and only the log told.
func TestListThatTheKubeletCannotReceive(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir, func(o *fakes.KubeletOptions) { o.MaxList = 100 })
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src}, func(k *Kubelet) { k.stood = time.Hour })
	k.await(t, "first list", lastIs(gpuMem, "a"))
	if st := a.Status()[0]; !st.Registered {
		t.Errorf("Status = %+v", st)
	}
	// The first stream has stood for less than an hour. From its end on it is a matter
	// of what comes next.
	src.list.set(devices(100))
	k.await(t, "three tries", func(s seen) bool { return s[gpuMem].Registrations >= 4 })
	eventually(t, "the reason", func() bool {
		err := a.Status()[0].Err
		return err != nil && strings.Contains(err.Error(), "ends its stream of lists as soon as") && strings.Contains(err.Error(), "of 100 devices")
	})
	since := a.Status()[0].Since
	k.await(t, "three more", func(s seen) bool { return s[gpuMem].Registrations >= 7 })
	if st := a.Status()[0]; st.Registered || since.IsZero() || !st.Since.Equal(since) {
		t.Errorf("Status = %+v, want it since %v", st, since)
	}
	a.mu.Lock()
	s := a.served[gpuMem].plugin.(*Plugin).service
	a.mu.Unlock()
	src.list.set([]Device{b1})
	k.await(t, "what it can", lastIs(gpuMem, "b"))
	s.streams.update(func(n streams) streams { // two hours later
		n.since = n.since.Add(-2 * time.Hour)
		return n
	})
	if st := a.Status()[0]; !st.Registered || st.Err != nil || !st.Since.IsZero() {
		t.Errorf("Status = %+v, want all well", st)
	}
}

// TestStreamsStand: a stream that ends does not hide how long the kubelet has had
// none that stood.
func TestStreamsStand(t *testing.T) {
	t0 := time.Unix(0, 0)
	at := func(s int) time.Time { return t0.Add(time.Duration(s) * time.Second) }
	n := streams{lost: t0}
	check := func(when int, stands bool, lost int) {
		t.Helper()
		if n.stands(at(when), streamStood) != stands || !stands && !n.lost.Equal(at(lost)) {
			t.Errorf("after %d s: %+v, want %v, lost at %d s", when, n, stands, lost)
		}
	}
	check(5, false, 0)
	n = n.begun(at(5))
	check(5, true, 0) // the first is believed
	n = n.ended(at(100), streamStood)
	check(100, false, 100)
	n = n.begun(at(120)) // a kubelet that has restarted
	check(120, true, 0)
	n = n.ended(at(121), streamStood)
	check(121, false, 121)
	for s := 122; s < 200; s += 3 { // and can receive nothing
		n = n.begun(at(s))
		check(s, false, 121)
		n = n.ended(at(s+1), streamStood)
		check(s+1, false, 121)
	}
	n = n.begun(at(200))
	check(209, false, 121)
	check(210, true, 0)
	n = n.begun(at(211)).ended(at(212), streamStood) // somebody else's, beside it
	check(212, true, 0)
	n = n.ended(at(213), streamStood)
	check(213, false, 213)
	n = n.begun(at(214))
	check(214, true, 0)
}

// TestRegistrationOvertaken: a kubelet that starts removes our socket just when
// it is told of it, and then looks for it for 10 s. The plugin does not wait for
// that.
func TestRegistrationOvertaken(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	var once atomic.Bool
	k.Answer("Register", func(ctx context.Context, r any) (any, error) {
		if once.Swap(true) {
			return nil, nil
		}
		if err := os.Remove(filepath.Join(dir, r.(*api.RegisterRequest).Endpoint)); err != nil {
			t.Error(err)
		}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	// No time limit helps out: only what has become of the socket can.
	startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) { k.answer = time.Hour })
	k.await(t, "first list", lastIs(gpuMem, "a"))
}

func TestInotifyExhausted(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	var tries cell[int]
	a := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) {
		k.poll, k.every = time.Millisecond, 50*time.Millisecond
		k.opts.Watch = func(ctx context.Context, dir string) (<-chan struct{}, error) {
			tries.update(func(n int) int { return n + 1 })
			return nil, errors.New("too many open files")
		}
	})
	for range 3 {
		k := startKubelet(t, dir)
		k.await(t, "first list", lastIs(gpuMem, "a"))
		k.Stop()
	}
	await(t, "another try to watch", &tries, func(n int) bool { return n > 1 })
	if n := strings.Count(a.log.String(), "too many open files"); n != 1 {
		t.Errorf("the same reason logged %d times", n)
	}
}

// TestEventsLost: a watch that tells nothing costs time, not the registration.
func TestEventsLost(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) {
		k.every = time.Millisecond
		k.opts.Watch = func(ctx context.Context, dir string) (<-chan struct{}, error) { return make(chan struct{}), nil }
	})
	for range 3 {
		k := startKubelet(t, dir)
		k.await(t, "first list", lastIs(gpuMem, "a"))
		k.Stop()
	}
}

func TestDirectoryReplaced(t *testing.T) {
	leakCheck(t)
	dir := filepath.Join(tempDir(t), "device-plugins")
	k := startKubelet(t, dir)
	startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)}, func(k *Kubelet) { k.poll = time.Millisecond })
	for i := range 3 {
		k.await(t, "first list", lastIs(gpuMem, "a"))
		k.Stop()
		if err := os.Rename(dir, fmt.Sprintf("%s-%d", dir, i)); err != nil {
			t.Fatal(err)
		}
		k = startKubelet(t, dir)
	}
	k.await(t, "first list", lastIs(gpuMem, "a"))
}

func TestEndLeavesNothing(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	waiting := make(chan struct{})
	src := sourceOf(a1)
	src.prepare = func(ctx context.Context, ids []string) error {
		close(waiting)
		<-ctx.Done()
		return ctx.Err()
	}
	a := startAgent(t, dir, map[string]Source{gpuMem: src, "example.com/gpu": sourceOf(b1)})
	c := k.client(t, gpuMem)
	k.client(t, "example.com/gpu")
	if got, want := sockets(t, dir), []string{"example.com_gpu-mem.sock", "example.com_gpu.sock"}; !slices.Equal(got, want) {
		t.Errorf("sockets %q, want %q", got, want)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := c.PreStartContainer(context.Background(), &api.PreStartContainerRequest{DevicesIds: []string{"a"}})
		answered <- err
	}()
	<-waiting
	a.stop()
	if err := <-answered; err == nil {
		t.Error("a container was prepared, though the end cut it off")
	}
	if got := sockets(t, dir); len(got) != 0 {
		t.Errorf("left in the directory: %q", got)
	}
}

// TestSet: resources come and go by one call, and one that comes back is served
// again.
func TestSet(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	gpu, memory := sourceOf(a1), sourceOf(b1)
	a := startAgent(t, dir, nil)
	set := func(want map[string]Source) {
		t.Helper()
		if err := a.Set(want); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		set(map[string]Source{gpuMem: memory})
		k.await(t, "gpu-mem alone", func(s seen) bool { return s.connected(gpuMem) && !s.connected("example.com/gpu") })
		set(map[string]Source{gpuMem: memory, "example.com/gpu": gpu})
		k.await(t, "both", func(s seen) bool { return s.connected(gpuMem) && s.connected("example.com/gpu") })
		set(map[string]Source{"example.com/gpu": gpu})
		k.await(t, "gpu alone", func(s seen) bool { return !s.connected(gpuMem) && s.connected("example.com/gpu") })
		eventually(t, "its socket alone", func() bool { return slices.Equal(sockets(t, dir), []string{"example.com_gpu.sock"}) })
		set(nil)
		k.await(t, "none", func(s seen) bool { return !s.connected(gpuMem) && !s.connected("example.com/gpu") })
		eventually(t, "no socket", func() bool { return len(sockets(t, dir)) == 0 })
	}
	set(map[string]Source{gpuMem: memory})
	if err := a.Set(map[string]Source{"gpu": gpu}); err == nil {
		t.Error("a resource without domain was accepted")
	}
	k.await(t, "what was set before", func(s seen) bool { return s.connected(gpuMem) })
}

// TestSuccessor: a rolling update may start the next agent before this one has
// ended. The newer one serves, they do not fight over the socket, and the end
// of the older one, which makes the kubelet drop the newer one's connection,
// does not cut off the newer one for good.
func TestSuccessor(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	older := startAgent(t, dir, map[string]Source{gpuMem: sourceOf(a1)})
	k.await(t, "the older one", lastIs(gpuMem, "a"))
	startAgent(t, dir, map[string]Source{gpuMem: sourceOf(b1)})
	k.await(t, "the newer one", lastIs(gpuMem, "b"))
	eventually(t, "the older one yields", func() bool {
		st := older.Status()
		return len(st) == 1 && st[0].Err != nil && strings.Contains(st[0].Err.Error(), "another process listens")
	})
	file, err := os.Stat(filepath.Join(dir, "example.com_gpu-mem.sock"))
	if err != nil {
		t.Fatal(err)
	}
	older.stop()
	// Two ends are under way, of the older one's stream and of the newer one's first. The
	// second may close the connection of the third registration before its stream is
	// opened: the newer one registers a fourth time then, when that has not come.
	k.await(t, "the newer one again", func(s seen) bool {
		e := s[gpuMem]
		return e.Registrations >= 3 && s.connected(gpuMem) && !e.Listed.IsZero() && lastIs(gpuMem, "b")(s)
	})
	now, err := os.Stat(filepath.Join(dir, "example.com_gpu-mem.sock"))
	if err != nil || !os.SameFile(file, now) {
		t.Errorf("the newer one's socket was replaced: %v", err)
	}
}

func TestOversizeListIsNotSent(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	a := startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "first list", lastIs(gpuMem, "a"))
	src.list.set(devices(100_000))
	eventually(t, "the reason", func() bool {
		err := a.Status()[0].Err
		return err != nil && strings.Contains(err.Error(), "a list of 100000 devices takes")
	})
	src.list.set(devices(60_000))
	k.await(t, "as many as may be", func(s seen) bool { return len(s[gpuMem].Devices) == 60_000 })
	if s := k.seen(); s[gpuMem].Registrations != 1 || s[gpuMem].Lists != 2 {
		t.Errorf("registered %d times with %d lists, want once with 2", s[gpuMem].Registrations, s[gpuMem].Lists)
	}
	if err := a.Status()[0].Err; err != nil {
		t.Errorf("the reason stands: %v", err)
	}
}

func TestCalls(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1, b1)
	seen := &observed{}
	startAgent(t, dir, map[string]Source{gpuMem: src}, func(k *Kubelet) { k.opts.Observer = seen })
	k.await(t, "first list", lastIs(gpuMem, "a b"))
	c := k.client(t, gpuMem)
	await(t, "the start observed", &seen.calls, func(calls []string) bool { return len(calls) == 2 })
	ctx := t.Context()

	src.prefer = func(available, must []string, n int) ([]string, error) {
		if !slices.Equal(available, []string{"b", "a"}) || !slices.Equal(must, []string{"a"}) || n != 2 {
			return nil, fmt.Errorf("asked for %d of %q with %q", n, available, must)
		}
		return []string{"a", "b"}, nil
	}
	pref, err := c.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: []string{"b", "a"}, MustIncludeDeviceIDs: []string{"a"}, AllocationSize: 2}}})
	if err != nil || len(pref.ContainerResponses) != 1 || !slices.Equal(pref.ContainerResponses[0].DeviceIDs, []string{"a", "b"}) {
		t.Errorf("GetPreferredAllocation = %v, %v", pref, err)
	}
	_, err = c.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AllocationSize: 7}}})
	wantStatus(t, err, codes.FailedPrecondition, "example.com/gpu-mem: asked for 7 of [] with []")

	src.allocate = func(ids []string) (Grant, error) {
		if ids[0] == "b" {
			return Grant{}, errors.New("b has left")
		}
		return Grant{CDI: []string{"example.com/gpu=1", "example.com/gpu=2"}, Annotations: map[string]string{"k": "v"}}, nil
	}
	alloc, err := c.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"a"}}}})
	if err != nil || len(alloc.ContainerResponses) != 1 {
		t.Fatalf("Allocate = %v, %v", alloc, err)
	}
	r := alloc.ContainerResponses[0]
	if len(r.CdiDevices) != 2 || r.CdiDevices[0].Name != "example.com/gpu=1" || r.CdiDevices[1].Name != "example.com/gpu=2" || r.Annotations["k"] != "v" || len(r.Annotations) != 1 {
		t.Errorf("Allocate = %v", r)
	}
	_, err = c.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"a"}}, {DevicesIds: []string{"b"}}}})
	wantStatus(t, err, codes.FailedPrecondition, "example.com/gpu-mem: b has left")

	src.prepare = func(ctx context.Context, ids []string) error {
		if _, ok := ctx.Deadline(); !ok {
			return errors.New("no deadline")
		}
		if ids[0] == "b" {
			return errors.New("previous holder still ending")
		}
		return nil
	}
	long, cancel := context.WithTimeout(ctx, time.Hour)
	defer cancel()
	if _, err = c.PreStartContainer(long, &api.PreStartContainerRequest{DevicesIds: []string{"a"}}); err != nil {
		t.Errorf("PreStartContainer: %v", err)
	}
	_, err = c.PreStartContainer(long, &api.PreStartContainerRequest{DevicesIds: []string{"b"}})
	wantStatus(t, err, codes.Unavailable, "example.com/gpu-mem: previous holder still ending")

	calls := await(t, "all calls observed", &seen.calls, func(calls []string) bool { return len(calls) == 8 })
	if refused, _ := seen.refused.get(); !slices.Equal(refused, []string{"asked for 7 of [] with []", "b has left", "previous holder still ending"}) {
		t.Errorf("refusals observed: %q", refused)
	}
	slices.Sort(calls[:2]) // They happen at once.
	if want := []string{
		"GetDevicePluginOptions", "Registered",
		"GetPreferredAllocation", "GetPreferredAllocation failed", "Allocate", "Allocate failed", "PreStartContainer", "PreStartContainer failed",
	}; !slices.Equal(calls, want) {
		t.Errorf("observed %q, want %q", calls, want)
	}
}

// TestWhyItWaited: the kubelet stops waiting after 30 s, and what it waited for has to
// arrive before.
func TestWhyItWaited(t *testing.T) {
	leakCheck(t)
	dir := pluginDir(t)
	k := startKubelet(t, dir)
	src := sourceOf(a1)
	src.prepare = func(ctx context.Context, _ []string) error {
		<-ctx.Done()
		return fmt.Errorf("previous holder still ending: %w", ctx.Err())
	}
	startAgent(t, dir, map[string]Source{gpuMem: src})
	k.await(t, "first list", lastIs(gpuMem, "a"))
	c := k.client(t, gpuMem)
	var err error
	// The longer one where the machine stands still just when the shorter one ends:
	// the answer has a tenth of the time, at most a second.
	for _, patience := range []time.Duration{2 * time.Second, 20 * time.Second} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err = c.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: []string{"a"}})
		cancel()
		if status.Convert(err).Message() != context.DeadlineExceeded.Error() {
			break
		}
	}
	wantStatus(t, err, codes.DeadlineExceeded, "example.com/gpu-mem: previous holder still ending: context deadline exceeded")
}

func wantStatus(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if s := status.Convert(err); s.Code() != code || s.Message() != text {
		t.Errorf("got %v %q, want %v %q", s.Code(), s.Message(), code, text)
	}
}

type observed struct{ calls, refused cell[[]string] }

func (o *observed) add(s string, err error) {
	if err != nil {
		s += " failed"
	}
	o.calls.update(func(old []string) []string { return append(slices.Clip(old), s) })
}

func (o *observed) Called(_, method string, _ time.Duration, err error) { o.add(method, err) }
func (o *observed) Refused(_ string, err error) {
	o.refused.update(func(old []string) []string { return append(slices.Clip(old), err.Error()) })
}
func (o *observed) Registered(_ string, err error) { o.add("Registered", err) }

// TestPanicEndsTheProcess, loudly: a process of its own has the panic.
func TestPanicEndsTheProcess(t *testing.T) {
	if os.Getenv("PLUGIN_TEST_PANIC") != "" {
		dir := pluginDir(t)
		k := startKubelet(t, dir)
		src := sourceOf(a1)
		src.allocate = func([]string) (Grant, error) { panic("a bug") }
		log, _ := logger(t)
		a := startAgent(t, dir, map[string]Source{gpuMem: src}, func(k *Kubelet) { k.opts.Logger = log })
		c := k.client(t, gpuMem)
		a.opts.Logger.Info("about to call")
		_, err := c.Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{}}})
		fmt.Println("the process goes on:", err)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestPanicEndsTheProcess$")
	cmd.Env = append(os.Environ(), "PLUGIN_TEST_PANIC=1", "TMPDIR="+tempDir(t))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(string(out), "panic: a bug") || !strings.Contains(string(out), "TestPanicEndsTheProcess.func") {
		t.Errorf("want the process to end with the panic and its stack, got %v:\n%s", err, out)
	}
}

// What was set and is not served yet is not registered: who asks between the two must not
// believe that the kubelet has everything.
func TestStatusOfWhatIsNotServedYet(t *testing.T) {
	k := NewKubelet(KubeletOptions{Dir: t.TempDir()})
	if st := k.Status(); len(st) != 0 {
		t.Errorf("before Set there are %+v", st)
	}
	if err := k.Set(map[string]Source{"example.com/gpu-mem": nil}); err != nil {
		t.Fatal(err)
	}
	if st := k.Status(); len(st) != 1 || st[0] != (Status{Resource: "example.com/gpu-mem"}) {
		t.Errorf("before Run there are %+v", st)
	}
}
