// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// generated is the list in the API's own types.
func generated(devices []Device) *api.ListAndWatchResponse {
	resp := &api.ListAndWatchResponse{}
	for i := range devices {
		d := &api.Device{ID: devices[i].ID, Health: health(&devices[i])}
		if len(devices[i].NUMA) > 0 {
			d.Topology = &api.TopologyInfo{}
			for _, n := range devices[i].NUMA {
				d.Topology.Nodes = append(d.Topology.Nodes, &api.NUMANode{ID: int64(n)})
			}
		}
		resp.Devices = append(resp.Devices, d)
	}
	return resp
}

func TestEncodeAsGenerated(t *testing.T) {
	check := func(devices []Device) {
		t.Helper()
		l, err := encode(devices)
		if err != nil {
			t.Fatal(err)
		}
		want := generated(devices)
		var got api.ListAndWatchResponse
		if err := proto.Unmarshal(l.message, &got); err != nil {
			t.Fatalf("%v: %v", devices, err)
		}
		if !proto.Equal(&got, want) {
			t.Fatalf("got  %v\nwant %v", &got, want)
		}
		if len(l.message) != proto.Size(want) || cap(l.message) > len(l.message) && len(l.message) > 0 && cap(l.message) != len(l.message) {
			t.Fatalf("%d bytes in %d, want %d", len(l.message), cap(l.message), proto.Size(want))
		}
	}
	check(nil)
	check([]Device{{}})
	check([]Device{{ID: strings.Repeat("x", 200), Healthy: true, NUMA: []int{0, 1, 127, 128, 1 << 40}}})
	r := rand.New(rand.NewPCG(1, 1))
	rounds := 2000
	if testing.Short() {
		rounds = 400 // make test-all has all
	}
	for range rounds {
		devices := make([]Device, r.IntN(5))
		for i := range devices {
			devices[i] = Device{ID: strings.Repeat("i", r.IntN(140)), Healthy: r.IntN(2) == 0}
			for range r.IntN(80) {
				devices[i].NUMA = append(devices[i].NUMA, r.IntN(1<<r.IntN(20)))
			}
		}
		check(devices)
	}
}

// TestSixtyThousandFit: the limit that memory units are held to leaves room for
// the longest device.
func TestSixtyThousandFit(t *testing.T) {
	ds := devices(60_000)
	for i := range ds {
		ds[i].ID = fmt.Sprintf("GPU-5a2f0c11-9a3e-4f57-8d57-2f7d5b1c9e01::%05d", i)
		ds[i].Healthy, ds[i].NUMA = false, []int{1}
	}
	l, err := encode(ds)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(l.message))
}

// TestEncodedOnce: streams that open again and a list that is sent again cost
// no encoding.
func TestEncodedOnce(t *testing.T) {
	src := sourceOf(a1, b1)
	s := &service{source: src}
	ds, _ := src.List()
	s.take(ds)
	first, _ := s.list.get()
	s.take(ds)
	second, _ := s.list.get()
	if first == second {
		t.Error("the same list again is not a new value: it would not be sent")
	}
	if &first.message[0] != &second.message[0] {
		t.Error("the same list was encoded twice")
	}
}

func BenchmarkEncode(b *testing.B) {
	for _, n := range []int{80, 640, 2560, 60_000} {
		ds := devices(n)
		b.Run(fmt.Sprintf("devices=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := encode(ds); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
