// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

var levelNames = map[emulator.Level]string{
	emulator.LevelSame: "X", emulator.LevelSwitch: "PIX", emulator.LevelSwitches: "PXB",
	emulator.LevelHost: "PHB", emulator.LevelNode: "NODE", emulator.LevelSystem: "SYS",
}

// row is how GPU 0 stands to each of the others: over how many links of its own, to
// an NVSwitch or the GPU, and on the PCI bus.
func row(t *testing.T, s *emulator.Session, w *emulator.World) string {
	t.Helper()
	n := must[int](t, "count")(s.DeviceCount())
	lanes, switched := map[emulator.PCI]int{}, 0
	for link := range 36 {
		l, r := s.NVLink(0, link)
		switch {
		case r != emulator.Success || !l.Active:
		case l.Switch:
			switched++
		default:
			lanes[l.Remote]++
		}
	}
	var out []string
	for i := 1; i < n; i++ {
		h := emulator.Handle(i)
		level := levelNames[must[emulator.Level](t, "level")(s.CommonAncestor(0, h))]
		k := lanes[must[emulator.PCI](t, "PCI")(s.PCI(h))]
		if k+switched > 0 {
			level = fmt.Sprintf("NV%d/%s", k+switched, level)
		}
		out = append(out, level)
	}
	return strings.Join(out, " ")
}

// What people see in the first row of nvidia-smi topo -m and of the PCI bus, machine
// by machine.
func TestTopologies(t *testing.T) {
	rows := map[string]struct{ row, numa string }{
		"dgx-h100":   {"NV18/NODE NV18/NODE NV18/NODE NV18/SYS NV18/SYS NV18/SYS NV18/SYS", "0 0 0 0 1 1 1 1"},
		"dgx-a100":   {"NV12/PXB NV12/SYS NV12/SYS NV12/SYS NV12/SYS NV12/SYS NV12/SYS", "3 3 1 1 7 7 5 5"},
		"dgx-1":      {"NV1/PIX NV1/PHB NV2/PHB NV2/SYS SYS SYS SYS", "0 0 0 0 1 1 1 1"},
		"dgx-2":      {"NV6/PIX NV6/PXB NV6/PXB" + strings.Repeat(" NV6/NODE", 4) + strings.Repeat(" NV6/SYS", 8), "0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1"},
		"hgx-h100-4": {"NV6/NODE NV6/SYS NV6/SYS", "0 0 1 1"},
		"p5":         {"NV18/NODE NV18/NODE NV18/NODE NV18/SYS NV18/SYS NV18/SYS NV18/SYS", "0 0 0 0 1 1 1 1"},
		"nvl72":      {"NV18/NODE NV18/SYS NV18/SYS", "0 0 1 1"},
		"pcie":       {"PIX PHB PHB SYS SYS SYS SYS", "0 0 0 0 1 1 1 1"},
		"pairs":      {"NV4/NODE NODE NODE SYS SYS SYS SYS", "0 0 0 0 1 1 1 1"},
		"asymmetric": {"NV4/NODE NV2/NODE SYS", "0 0 0 1"},
		"one-node":   {"NV4/NODE NV4/NODE NV4/NODE", "0 0 0 0"},
	}
	for _, name := range emulator.Topologies() {
		want, ok := rows[name]
		if !ok {
			t.Errorf("topology %s is not tried here", name)
			continue
		}
		w := newWorld(t, emulator.Spec{Topology: name})
		s := open(t, w, emulator.Opening{})
		if got := row(t, s, w); got != want.row {
			t.Errorf("%s: GPU 0\n%s, want\n%s", name, got, want.row)
		}
		var numa []string
		for _, g := range w.State().GPUs {
			numa = append(numa, fmt.Sprint(g.NUMA))
		}
		if got := strings.Join(numa, " "); got != want.numa {
			t.Errorf("%s: GPUs on nodes %s, want %s", name, got, want.numa)
		}
	}
	if n := len(emulator.Topologies()); n != len(rows) {
		t.Errorf("%d topologies, want %d", n, len(rows))
	}
}

// Links are the same from both ends, but for those that a world says disagree.
func TestLinksHaveTwoEnds(t *testing.T) {
	for _, name := range emulator.Topologies() {
		w := newWorld(t, emulator.Spec{Topology: name})
		s := open(t, w, emulator.Opening{})
		gpus := w.State().GPUs
		at := func(p emulator.PCI) int {
			return slices.IndexFunc(gpus, func(g emulator.GPUState) bool { return g.PCI == p.String() })
		}
		disagree := 0
		for i := range gpus {
			for link := range 36 {
				l, r := s.NVLink(emulator.Handle(i), link)
				if r != emulator.Success || !l.Active || l.Switch {
					continue
				}
				peer := at(l.Remote)
				if peer < 0 || peer == i {
					t.Fatalf("%s: link %d of GPU %d leads to %s", name, link, i, l.Remote)
				}
				back := must[emulator.Link](t, "back")(s.NVLink(emulator.Handle(peer), l.Far))
				if !back.Active {
					disagree++
					continue
				}
				if at(back.Remote) != i || back.Far != link {
					t.Errorf("%s: link %d of GPU %d leads to link %d of GPU %d, and back to %d of %d", name, link, i, l.Far, peer, back.Far, at(back.Remote))
				}
			}
		}
		want := 0
		if name == "asymmetric" {
			want = 3
		}
		if disagree != want {
			t.Errorf("%s: %d links work at one end only, want %d", name, disagree, want)
		}
	}
}

func TestWhatAWorldSaysWinsOverItsTopology(t *testing.T) {
	spec, err := emulator.ParseSpec([]byte(`
topology: dgx-h100
count: 4
model: A100-SXM4-40GB
numa: [{cpus: "0-7"}, {cpus: "8-15", memoryMiB: 5}]
nics: []
gpus: [{index: 3, numa: 1, uuid: GPU-mine}]
`))
	if err != nil {
		t.Fatal(err)
	}
	st := newWorld(t, spec).State()
	want(t, "GPUs", len(st.GPUs), 4)
	want(t, "model", st.GPUs[0].Model, "NVIDIA A100-SXM4-40GB")
	want(t, "UUID of GPU 3", st.GPUs[3].UUID, "GPU-mine")
	want(t, "node of GPU 3", st.GPUs[3].NUMA, 1)
	want(t, "PCI of GPU 3", st.GPUs[3].PCI, "00000000:61:00.0")
	want(t, "CPUs of node 1", st.Board.NUMA[1].CPUs, "8-15")
	want(t, "network cards", len(st.Board.NICs), 0)
	want(t, "machine", st.Board.Machine, "DGXH100")

	spec = emulator.Spec{Topology: "dgx-1", NVLink: "none"}
	s := open(t, newWorld(t, spec), emulator.Opening{})
	want(t, "a link that there is not", must[emulator.Link](t, "link")(s.NVLink(0, 0)).Active, false)
}

func TestMachinesThatCannotBe(t *testing.T) {
	for text, reason := range map[string]string{
		"topology: dgx-9":                                       "dgx-a100",
		"{topology: dgx-h100, count: 9}":                        "has 8 GPUs",
		"{topology: dgx-h100, numa: [{cpus: 0-7}]}":             "node",
		"numa: [{cpus: 0-7}, {cpus: 7-9}]":                      "CPU 7",
		"numa: [{cpus: \"8-9,0-7\"}, {}]":                       "list such as",
		"numa: [{cpus: 7-0}, {}]":                               "list such as",
		"numa: [{}, {}]":                                        "has CPUs",
		"gpus: [{index: 0, path: there}]":                       "host bridge",
		"gpus: [{index: 0, path: \"pci0000:15/0000:15:00.1\"}]": "GPU",
		"gpus: [{index: 0, path: \"pci0000:05/0000:05:00.0/0000:1b:00.0\"}, {index: 1, path: \"pci0000:05/0000:1b:00.0\"}]": "one PCI address",
		"gpus: [{index: 0, path: \"pci0000:05/0000:1b:00.0/0000:33:00.0\"}, {index: 1, path: \"pci0000:05/0000:1b:00.0\"}]": "bridge",
		"{nvlink: mesh, links: [{gpu: 0, to: 1, lanes: 1}]}":                                                                "one of them",
		"links: [{gpu: 0, to: 8, lanes: 1}]":                                                                                "0 to 7",
		"links: [{gpu: 0, to: 0, lanes: 1}]":                                                                                "itself",
		"links: [{gpu: 0, to: 1, lanes: 19}]":                                                                               "only 18",
		"links: [{gpu: 0, to: 1, lanes: 2, back: 3}]":                                                                       "back",
		"{model: A30, links: [{gpu: 0, switch: true, lanes: 1}]}":                                                           "no NVSwitch",
		"{model: V100-SXM2-32GB, count: 16, nvlink: cube}":                                                                  "8 GPUs",
		"nics: [{name: a, kind: token-ring}]":                                                                               "infiniband",
		"nics: [{name: a, kind: efa, path: \"pci0000:15\"}]":                                                                "path",
		"nics: [{kind: efa}]":                                                                                               "one name",
		"nics: [{name: a, kind: efa, numa: 2, path: \"pci0000:15/0000:16:00.0\"}]":                                          "nodes 0 to 1",
		"nics: [{name: a, kind: efa, path: \"pci0000:15/0000:07:00.0\"}]":                                                   "GPU 0",
		"switches: [there]":                       "host bridge",
		"switches: [\"pci0000:01/0000:03:00.1\"]": "function 0",
		"fabric: {cluster: mine}":                 "UUID",
		"fabric: {state: knitting}":               "completed",
	} {
		spec, err := emulator.ParseSpec([]byte(text))
		if err == nil {
			_, err = emulator.New(spec)
		}
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want a word on %q", text, err, reason)
		}
	}
}

func TestLinksFail(t *testing.T) {
	w := newWorld(t, emulator.Spec{Topology: "dgx-1"})
	s := open(t, w, emulator.Opening{})
	set := must[uint32](t, "event set")(s.EventSetCreate())
	want(t, "listen", s.RegisterEvents(0, emulator.EventXid, set), emulator.Success)
	before := row(t, s, w)
	if err := w.SetLink(3, 0, false); err != nil { // of the two to GPU 0
		t.Fatal(err)
	}
	want(t, "GPU 0 with one link down", row(t, s, w), strings.Replace(before, "NV2", "NV1", 1))
	if _, r := s.EventSetWait(set, 0); r != emulator.Timeout {
		t.Errorf("a link that failed comes with an event: %v", r)
	}
	if err := w.SetLink(0, -1, false); err != nil {
		t.Fatal(err)
	}
	want(t, "GPU 0 with all links down", row(t, s, w), "PIX PHB PHB SYS SYS SYS SYS")
	up := func() (n int) {
		for _, links := range w.State().Board.Links {
			for _, l := range links {
				if l.Up {
					n++
				}
			}
		}
		return n
	}
	want(t, "ends that work", up(), 8*6-2*6)
	if err := w.SetLink(0, -1, true); err != nil {
		t.Fatal(err)
	}
	want(t, "GPU 0 with all links back", row(t, s, w), before)
	if err := w.Lose(4); err != nil {
		t.Fatal(err)
	}
	want(t, "links to a lost GPU", up(), 8*6-6-6)
	for _, bad := range [][2]int{{8, 0}, {0, 6}, {0, -2}} {
		if err := w.SetLink(bad[0], bad[1], false); err == nil {
			t.Errorf("link %d of GPU %d failed", bad[1], bad[0])
		}
	}
	if err := newWorld(t, emulator.Spec{Topology: "pcie"}).SetLink(0, -1, false); err == nil {
		t.Error("a link failed on a machine without any")
	}
}

// FuzzSpec holds that a world that is not refused is one: it can be shown, and every
// GPU of it asked for all that there is of topology.
func FuzzSpec(f *testing.F) {
	for _, name := range emulator.Topologies() {
		f.Add("topology: " + name)
	}
	f.Add("{count: 3, links: [{gpu: 0, to: 1, lanes: 2, back: 1}], numa: [{cpus: 0-3}, {}], gpus: [{index: 1, numa: -1}]}")
	f.Add("{count: 2, gpus: [{index: 1, pci: \"0001:02:00.0\", model: A30}], nvlink: mesh, nics: [{name: a, kind: efa, path: \"pci0000:15/0000:16:00.0\"}]}")
	f.Fuzz(func(t *testing.T, text string) {
		spec, err := emulator.ParseSpec([]byte(text))
		if err != nil {
			return
		}
		w, err := emulator.New(spec)
		if err != nil {
			return
		}
		s := w.Open(emulator.Opening{Initialised: 1})
		defer s.Close()
		st := w.State()
		if len(st.Board.Paths) != len(st.GPUs) || len(st.Board.Links) != len(st.GPUs) {
			t.Fatalf("%d paths and %d lists of links for %d GPUs", len(st.Board.Paths), len(st.Board.Links), len(st.GPUs))
		}
		for i := range st.GPUs {
			h := emulator.Handle(i)
			for link := range 36 {
				s.NVLink(h, link)
			}
			for j := range st.GPUs {
				there, r := s.CommonAncestor(h, emulator.Handle(j))
				back, r2 := s.CommonAncestor(emulator.Handle(j), h)
				if r == emulator.Success && r2 == emulator.Success && there != back {
					t.Errorf("GPU %d is at %d of GPU %d, and that at %d", i, there, j, back)
				}
				s.P2PStatus(h, emulator.Handle(j), 2)
			}
			s.CPUAffinity(h, true)
			s.MemoryAffinity(h, true)
			s.Fields(h, []emulator.FieldID{{ID: 90}, {ID: 164, Scope: uint32(i)}})
			if err := w.SetLink(i, -1, false); err == nil {
				w.SetLink(i, -1, true)
			}
		}
		s.Matrix()
	})
}

func TestMachine(t *testing.T) {
	for word, want := range map[string]emulator.Spec{
		"8xH100-80GB":    {Count: 8, Model: "H100-80GB"},
		"1xRTX-PRO-6000": {Count: 1, Model: "RTX-PRO-6000"},
		"dgx-2":          {Topology: "dgx-2"},
	} {
		got, err := emulator.Machine(word)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %+v, %v; want %+v", word, got, err, want)
		}
	}
	for _, word := range []string{"", "8", "xH100-80GB", "0xH100-80GB", "17xH100-80GB", "8xH900", "H100-80GB"} {
		if got, err := emulator.Machine(word); err == nil {
			t.Errorf("%q is %+v", word, got)
		}
	}
}
