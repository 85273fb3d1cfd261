// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/pkg/gpu"
)

// testLinks is how often NVLinks are looked at.
const testLinks = time.Minute

// joinedPair is two GPUs with four NVLink lanes between them.
func joinedPair() *outside {
	o := newOutside(2)
	for i := range o.inv.GPUs {
		o.inv.GPUs[i].Model = "NVIDIA A30"
		o.inv.GPUs[i].Lanes = 4
		o.inv.GPUs[i].Links = []gpu.Link{{To: 1 - i, NVLink: 4}}
	}
	return o
}

// history is each different value that a label has had, "-" where it was not there.
func (o *outside) history(key string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	for _, labels := range o.marked {
		v, there := labels[key]
		if !there {
			v = "-"
		}
		if len(out) == 0 || out[len(out)-1] != v {
			out = append(out, v)
		}
	}
	return strings.Join(out, " ")
}

func wantHistory(t *testing.T, o *outside, want map[string]string) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if got := o.history(key); got != want[key] {
			t.Errorf("%s was %s, want %s", key, got, want[key])
		}
	}
}

// Over the life of a node a label changes when the machine or the partition does,
// and is never taken back in between.
func TestLabelsDoNotFlicker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := joinedPair(), t.TempDir()
		b := start(t, o, dir, allShared)
		b.SetFile("p.yaml", []byte("version: v1\npartitions: {default: [{devices: all, mode: wrong}]}"))
		synctest.Wait()
		b.end()

		// The next process finds a driver that does not answer, and the mistake still
		// there.
		o.with(func() { o.err = errors.New("not yet") })
		b = start(t, o, dir, "version: v1\npartitions: {default: [{devices: all, mode: wrong}]}")
		time.Sleep(time.Minute)
		o.with(func() { o.err = nil })
		time.Sleep(time.Minute)
		synctest.Wait()
		same := map[string]string{
			"example.com/gpu.mode": "shared", "example.com/gpu.count": "2", "example.com/gpu.partition.active": "default",
			"example.com/gpu.model": "NVIDIA-A30", "example.com/gpu.joined": "2",
			"nvidia.com/gpu.count": "2", "nvidia.com/gpu.product": "NVIDIA-A30", "nvidia.com/gpu.replicas": "1",
		}
		wantHistory(t, o, same)
		b.SetFile("p.yaml", []byte(allShared))
		synctest.Wait()
		wantHistory(t, o, same)

		// Another partition: at once, and once.
		b.SetFile("p.yaml", []byte("version: v1\npartitions: {default: [{devices: all, mode: shared, replicas: 2}]}"))
		synctest.Wait()
		time.Sleep(10 * time.Minute)
		wantHistory(t, o, map[string]string{"example.com/gpu.mode": "shared", "nvidia.com/gpu.replicas": "1 2",
			"nvidia.com/gpu.product": "NVIDIA-A30 NVIDIA-A30-SHARED"})
		b.end()
	})
}

// A lane that fails is no event. It is seen all the same, and its return, and no
// device turns for it.
func TestALinkFailsAndReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := joinedPair()
		b := start(t, o, t.TempDir(), "version: v1\npartitions: {default: [{devices: all, mode: whole}]}")
		defer b.end()
		link := func(lanes int) {
			o.with(func() {
				for i := range o.inv.GPUs {
					o.inv.GPUs[i].Links = nil
					if lanes > 0 {
						o.inv.GPUs[i].Links = []gpu.Link{{To: 1 - i, NVLink: lanes}}
					}
				}
			})
			time.Sleep(testLinks + time.Second)
			synctest.Wait()
		}
		before := o.readings
		link(4)
		link(4)
		if n := o.readings - before; n > 0 {
			t.Errorf("nothing changed, and all was read %d times in two minutes", n)
		}
		link(3)
		link(0)
		link(4)
		wantHistory(t, o, map[string]string{"example.com/gpu.joined": "2 1 2", "example.com/gpu.nvlink": "4 3 - 4"})
		if got, want := listed(b.front.Offer(), wholeResource), "0 1"; got != want {
			t.Errorf("devices %s, want %s", got, want)
		}
		if p := b.front.Offer().Topology.Between(uuid(0), uuid(1)); p.NVLink != 4 {
			t.Errorf("the chooser has %d lanes between them", p.NVLink)
		}
	})
}

// features is a features file.
type features struct{ wrote []nfd.Features }

func (f *features) Write(now nfd.Features) error {
	f.wrote = append(f.wrote, now)
	return nil
}

// By way of Node Feature Discovery the agent writes its state alone to the Node.
func TestLabelsByFeaturesFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, f := joinedPair(), &features{}
		b := startWith(t, o, t.TempDir(), allShared, f)
		defer b.end()
		synctest.Wait()
		if len(f.wrote) == 0 {
			t.Fatal("nothing is written")
		}
		last := f.wrote[len(f.wrote)-1]
		if last.Keep || last.Labels["example.com/gpu.count"] != "2" || last.Guests["nvidia.com/gpu.count"] != "2" {
			t.Errorf("written: %+v", last)
		}
		o.with(func() {
			if want := map[string]string{"example.com/gpu.partition.state": "applied"}; !maps.Equal(o.labels, want) {
				t.Errorf("labels of the Node: %v, want %v", o.labels, want)
			}
		})
	})
}

// GPUs that the driver numbers anew, since one has gone, keep the peers of their
// links.
func TestLinksOfRenumberedGPUs(t *testing.T) {
	before := machine(4)
	for i := range before.GPUs {
		before.GPUs[i].Links = []gpu.Link{{To: i ^ 1, NVLink: 4}, {Switch: true, NVLink: 2}}
	}
	a := &reader{inv: before}
	now := machine(4)
	now.GPUs = slices.Delete(now.GPUs, 0, 1) // and 1, 2, 3 are 0, 1, 2 now
	for i := range now.GPUs {
		now.GPUs[i].Index = i
	}
	now.GPUs[0].Links = []gpu.Link{{Switch: true, NVLink: 2}}
	now.GPUs[1].Links = []gpu.Link{{To: 2, NVLink: 4}}
	now.GPUs[2].Links = []gpu.Link{{To: 1, NVLink: 4}, {To: 9, NVLink: 1}}
	got := ""
	for _, d := range a.withMissing(*now).GPUs {
		got += fmt.Sprint(d.Index, d.Links, " ")
	}
	if want := "0 [] 1 [{0 2 true 0 0}] 2 [{3 4 false 0 0}] 3 [{2 4 false 0 0}] "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
