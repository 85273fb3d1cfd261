// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// FuzzParse holds of any input:
//
//   - either there is a File or there are mistakes, never both;
//   - mistakes are in line order, each within the file, on one line of text,
//     and none is told twice;
//   - a File's Desire says the same each time, of every GPU once and in the
//     inventory's order, or it says why not, by the same rules;
//   - what it desires is something that this version delivers.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatalf("no seeds in testdata: %v", err)
	}
	for _, path := range files {
		f.Add([]byte(readFile(f, path)))
	}
	for _, tc := range broken {
		if len(tc.in) < 8<<10 {
			f.Add([]byte(tc.in))
		}
	}
	for _, tc := range accepted {
		f.Add([]byte(tc.in))
	}
	a100, a30 := cards(f, "a100-80"), cards(f, "a30")
	a100.GPUs, a30.GPUs = a100.GPUs[:2], a30.GPUs[:1]
	nodes := []*gpu.Inventory{
		node(),
		node("NVIDIA H100 80GB HBM3", "NVIDIA A30", "", "NVIDIA A30"),
		a100,
		a30,
		{GPUs: []gpu.Device{{Index: -1, Fault: "lost"}, {Index: 0, UUID: "GPU-0a", PCIDevice: "0x20B210DE"}, {Index: 0, PCIDevice: "?"}}},
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("f", data)
		if (file == nil) == (err == nil) {
			t.Fatalf("Parse returned %v and %v", file, err)
		}
		if err != nil {
			checkErrors(t, data, err)
			return
		}
		names := file.Names()
		if len(names) == 0 {
			t.Fatal("it parses and has no partition")
		}
		for _, name := range append(names, "no such name") {
			for _, inv := range nodes {
				d, err := file.Desire(name, inv, Node{Unit: 1024})
				again, err2 := file.Desire(name, inv, Node{Unit: 1024})
				if !cmp.Equal(d, again) || (err == nil) != (err2 == nil) || err != nil && err.Error() != err2.Error() {
					t.Fatalf("Desire is not deterministic: %+v, %v; %+v, %v", d, err, again, err2)
				}
				if err != nil {
					checkErrors(t, data, err)
					continue
				}
				if len(d.GPUs) != len(inv.GPUs) {
					t.Fatalf("%d wants for %d GPUs", len(d.GPUs), len(inv.GPUs))
				}
				for i, w := range d.GPUs {
					checkWant(t, data, w)
					if w.GPU != inv.GPUs[i].UUID {
						t.Fatalf("want %d is of %q, not of %q", i, w.GPU, inv.GPUs[i].UUID)
					}
				}
			}
		}
	})
}

func checkWant(t *testing.T, data []byte, w Want) {
	t.Helper()
	if w.Line < 0 || w.Line > lines(data) || (w.Line == 0) != (w.Mode == Keep) {
		t.Fatalf("%+v: that line is not where the file says so", w)
	}
	if offers := w.Mode != Keep && w.Mode != Off; offers != (w.API == ledger.DevicePlugin || w.API == ledger.DRA) {
		t.Fatalf("%+v: that is not the API of such a GPU", w)
	}
	if w.Spot.On && (w.API == ledger.DRA || w.Replicas > 0 || w.Mode == Dynamic || w.Mode == Off || w.Mode == Keep) ||
		w.Spot.Most != 0 && (!w.Spot.On || w.Mode != Shared) ||
		w.Spot.Lend != 0 && (!w.Spot.On || w.Spot.Lend < leastIdle || w.Spot.Lend > mostIdle) {
		t.Fatalf("%+v offers spot pods what it cannot", w)
	}
	w.Spot = ledger.Offering{}
	switch w.Mode {
	case Shared:
		if w.Replicas < 0 || w.Replicas > timeslice.MaxDevices || w.TimeSlice == "" {
			t.Fatalf("%+v cannot be delivered", w)
		}
		if w.Compute.Check() != nil || w.Compute != w.Compute.Normal() ||
			w.Compute.MPS && (w.TimeSlice != gpu.TimeSliceDefault || w.Replicas > compute.MostClients) {
			t.Fatalf("%+v has a share that cannot be delivered", w)
		}
	case Keep, Whole, Off:
		w.API = ""
		if !w.Equal(Want{GPU: w.GPU, Mode: w.Mode}) {
			t.Fatalf("%+v has what its mode does not know", w)
		}
	case MIG:
		checkMIGWant(t, w)
	default:
		t.Fatalf("%+v: that is no mode", w)
	}
}

func checkMIGWant(t *testing.T, w Want) {
	t.Helper()
	if !w.Equal(Want{GPU: w.GPU, Mode: MIG, API: w.API, OnDemand: w.OnDemand, Geometry: w.Geometry, Profiles: w.Profiles}) {
		t.Fatalf("%+v has what its mode does not know", w)
	}
	if w.OnDemand && len(w.Geometry) > 0 || !w.OnDemand && len(w.Profiles) > 0 {
		t.Fatalf("%+v is on demand and fixed", w)
	}
	for i, c := range w.Geometry {
		if c.N < 1 || i > 0 && mig.Compare(w.Geometry[i-1].Profile, c.Profile) >= 0 {
			t.Fatalf("the geometry %+v is not in order, or has a count of nothing", w.Geometry)
		}
	}
	for i, n := range w.Profiles {
		if n.Compute != 0 || i > 0 && mig.Compare(w.Profiles[i-1], n) >= 0 {
			t.Fatalf("the profiles %+v are not in order, or have a part of an instance", w.Profiles)
		}
	}
}

func checkErrors(t *testing.T, data []byte, err error) {
	t.Helper()
	var errs Errors
	if !errors.As(err, &errs) || len(errs) == 0 {
		t.Fatalf("%T is no Errors, or an empty one", err)
	}
	seen := make(map[Error]bool)
	for i, e := range errs {
		if e.Line < 1 || e.Line > lines(data) {
			t.Fatalf("%v: the file has %d lines", e, lines(data))
		}
		if i > 0 && e.Line < errs[i-1].Line {
			t.Fatalf("not in line order: %v", err)
		}
		if e.Msg == "" || strings.ContainsAny(e.Msg, "\n\r\t\x00\x1b") {
			t.Fatalf("the message %q is not one line of text", e.Msg)
		}
		if seen[*e] {
			t.Fatalf("%v is told twice", e)
		}
		seen[*e] = true
	}
}

// lines counts as an editor does: an empty file has one line, and a newline at
// the end begins no further one.
func lines(data []byte) int {
	return 1 + strings.Count(strings.TrimSuffix(string(data), "\n"), "\n")
}
