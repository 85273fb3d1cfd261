// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// says is a GPUNode in a few lines: a GPU in each, then the summary.
func says(s *gpunode.Status) string {
	var b strings.Builder
	for i := range s.GPUs {
		g := &s.GPUs[i]
		fmt.Fprintf(&b, "%d %s", g.Index, g.Mode)
		if g.API != "" {
			fmt.Fprintf(&b, " %s %s", g.API, g.Kind)
		}
		if g.Guarantee != "" {
			fmt.Fprintf(&b, " by %s", g.Guarantee)
		}
		if g.Total > 0 {
			used, _ := g.Used.MarshalText()
			fmt.Fprintf(&b, " used [%s] free %d/%d largest %d", used, g.Free, g.Total, g.Largest)
		}
		for _, c := range g.Conditions {
			if c.Status != gpunode.True {
				fmt.Fprintf(&b, " not %s: %s", c.Type, c.Reason)
			}
		}
		if m := g.MIG; m != nil {
			for _, o := range m.Offers {
				fmt.Fprintf(&b, " %s@%s free [%s] largest %d", o.Profile, strings.Join(o.Placements, ","), strings.Join(o.Free, ","), o.Largest)
			}
			fmt.Fprintf(&b, " used %v blocked %v warm %v largest %q", m.Used, m.Blocked, m.Warm, m.Largest)
		}
		if s := g.Spot; s != nil {
			used, _ := s.Used.MarshalText()
			fmt.Fprintf(&b, " spot used [%s]%v free %d/%d largest %d", used, s.UsedPlacements, s.Free, s.Total, s.Largest)
			if yielding, _ := s.Yielding.MarshalText(); len(yielding) > 0 || s.YieldingPlacements != nil {
				fmt.Fprintf(&b, " yielding [%s]%v", yielding, s.YieldingPlacements)
			}
			if lent, _ := s.Lent.MarshalText(); len(lent) > 0 {
				fmt.Fprintf(&b, " lent [%s]", lent)
			}
			for _, o := range s.Offers {
				fmt.Fprintf(&b, " %s@%s free [%s] largest %d", o.Profile, strings.Join(o.Placements, ","), strings.Join(o.Free, ","), o.Largest)
			}
		}
		for _, h := range g.Holders {
			devices, _ := h.Devices.MarshalText()
			fmt.Fprintf(&b, " held by %s/%s/%s [%s]%v", h.Namespace, h.Pod, h.Container, devices, h.Placements)
		}
		b.WriteString("\n")
	}
	for _, c := range s.Conditions {
		if c.Status != gpunode.True {
			fmt.Fprintf(&b, "not %s: %s\n", c.Type, c.Reason)
		}
	}
	for _, r := range s.Resources {
		fmt.Fprintf(&b, "%s free %d/%d largest %d\n", strings.TrimPrefix(r.Name, "example.com/"), r.Free, r.Total, r.Largest)
	}
	fmt.Fprintf(&b, "%s | %s | %s | %d%%", s.Summary.Modes, s.Summary.Free, s.Summary.Largest, s.Summary.SaturationPercent)
	return b.String()
}

func (b *bench) wantGPUNode(want ...string) {
	b.t.Helper()
	synctest.Wait()
	if got := says(b.GPUNode(gpunode.InPods)); got != strings.Join(want, "\n") {
		b.t.Errorf("the object says\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

// What the object says of a node, mode by mode.
func TestGPUNodeOfEachMode(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		mig  bool
		dra  bool
		do   func(*bench)
		want []string
	}{
		"no partition": {do: func(b *bench) { b.SetFile("p.yaml", []byte("version: v1\npartitions:\n  x: []\n")) },
			want: []string{"0  not Available: PartitionUnset", "1  not Available: PartitionUnset", "not Ready: Starting", "not Applied: PartitionsInvalid", "2 unset |  |  | 100%"}},
		"off": {file: "version: v1\npartitions:\n  default:\n    - devices: [0]\n      mode: off\n    - devices: [1]\n      mode: whole\n",
			want: []string{"0 off not Available: NotOffered", "1 whole device-plugin whole used [] free 1/1 largest 1",
				"gpu free 1/1 largest 1", "1 whole, 1 off | gpu 1/1 | gpu 1 | 0%"}},
		"whole": {file: allWhole, do: func(b *bench) { b.hold("a", wholeResource, string(uuid(1))) },
			want: []string{"0 whole device-plugin whole used [] free 1/1 largest 1", "1 whole device-plugin whole used [0] free 0/1 largest 0",
				"gpu free 1/2 largest 1", "2 whole | gpu 1/2 | gpu 1 | 50%"}},
		"units": {file: allShared, do: func(b *bench) {
			b.hold("a", memResource, string(uuid(0))+"::0", string(uuid(0))+"::1", string(uuid(0))+"::3")
		},
			want: []string{"0 shared device-plugin units by api used [0-1,3] free 1/4 largest 1", "1 shared device-plugin units by api used [] free 4/4 largest 4",
				"gpu-mem free 5/8 largest 4", "2 shared | gpu-mem 5/8 | gpu-mem 4 | 37%"}},
		"replicas": {file: "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, replicas: 3}\n",
			do: func(b *bench) { b.hold("a", sharedResource, string(uuid(0))+"::2") },
			want: []string{"0 shared device-plugin replica by api used [2] free 2/3 largest 1", "1 shared device-plugin replica by api used [] free 3/3 largest 1",
				"gpu.shared free 5/6 largest 2", "2 shared | gpu.shared 5/6 | gpu.shared 2 | 16%"}},
		"spot units": {file: "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: shared, spot: {most: 2}}\n    - {devices: [1], mode: shared, spot: true}\n", do: func(b *bench) {
			b.hold("a", memResource, string(uuid(1))+"::0")
			b.hold("s", memResource+".spot", string(uuid(1))+"::2", string(uuid(1))+"::3")
		}, want: []string{
			`0 shared device-plugin units by api used [] free 4/4 largest 4 spot used [][] free 2/2 largest 2`,
			`1 shared device-plugin units by api used [0] free 3/4 largest 3 spot used [2-3][] free 1/4 largest 1`,
			`gpu-mem free 7/8 largest 4`,
			`gpu-mem.spot free 3/6 largest 2`,
			`2 shared | gpu-mem 7/8, gpu-mem.spot 3/6 | gpu-mem 4, gpu-mem.spot 2 | 12%`,
		}},
		"spot lent": {file: "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: shared, spot: true, lend: {after: 1h}}\n    - {devices: [1], mode: shared}\n", do: func(b *bench) {
			b.hold("a", memResource, string(uuid(0))+"::0", string(uuid(0))+"::1")
			if a := b.Allocations()[0]; !b.front.SetLending(a.ID, a.Epoch, true) {
				b.t.Fatal("it does not lend")
			}
		}, want: []string{
			`0 shared device-plugin units by api used [0-1] free 2/4 largest 2 spot used [][] free 4/4 largest 4 lent [0-1]`,
			`1 shared device-plugin units by api used [] free 4/4 largest 4`,
			`gpu-mem free 6/8 largest 4`,
			`gpu-mem.spot free 4/4 largest 4`,
			`2 shared | gpu-mem 6/8, gpu-mem.spot 4/4 | gpu-mem 4, gpu-mem.spot 4 | 25%`,
		}},
		"spot lent, whole": {file: "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: whole, spot: true, lend: {after: 1h}}\n    - {devices: [1], mode: off}\n", do: func(b *bench) {
			b.hold("a", wholeResource, string(uuid(0)))
			if a := b.Allocations()[0]; !b.front.SetLending(a.ID, a.Epoch, true) {
				b.t.Fatal("it does not lend")
			}
		}, want: []string{
			`0 whole device-plugin whole used [0] free 0/1 largest 0 spot used [][] free 1/1 largest 1 lent [0]`,
			`1 off not Available: NotOffered`,
			`gpu free 0/1 largest 0`,
			`gpu.spot free 1/1 largest 1`,
			`1 whole, 1 off | gpu 0/1, gpu.spot 1/1 | gpu 0, gpu.spot 1 | 100%`,
		}},
		"spot whole": {file: "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole, spot: true}\n", do: func(b *bench) {
			b.hold("s", wholeResource+".spot", string(uuid(0)))
		}, want: []string{
			`0 whole device-plugin whole used [] free 1/1 largest 1 spot used [0][] free 0/1 largest 0`,
			`1 whole device-plugin whole used [] free 1/1 largest 1 spot used [][] free 1/1 largest 1`,
			`gpu free 2/2 largest 2`,
			`gpu.spot free 1/2 largest 1`,
			`2 whole | gpu 2/2, gpu.spot 1/2 | gpu 2, gpu.spot 1 | 0%`,
		}},
		"spot taken over": {file: "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole, spot: true}\n", do: func(b *bench) {
			b.hold("s", wholeResource+".spot", string(uuid(0)))
			if _, err := b.source(wholeResource).Allocate([]string{string(uuid(0))}); err != nil {
				b.t.Fatal(err)
			}
		}, want: []string{
			`0 whole device-plugin whole used [0] free 0/1 largest 0 spot used [][] free 0/1 largest 0 yielding [0][]`,
			`1 whole device-plugin whole used [] free 1/1 largest 1 spot used [][] free 1/1 largest 1`,
			`gpu free 1/2 largest 1`,
			`gpu.spot free 1/2 largest 1`,
			`2 whole | gpu 1/2, gpu.spot 1/2 | gpu 1, gpu.spot 1 | 50%`,
		}},
		"spot units taken over": {file: "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, spot: true}\n", do: func(b *bench) {
			b.hold("s", memResource+".spot", string(uuid(1))+"::1", string(uuid(1))+"::2")
			if _, err := b.source(memResource).Allocate([]string{string(uuid(1)) + "::0", string(uuid(1)) + "::1"}); err != nil {
				b.t.Fatal(err)
			}
		}, want: []string{
			`0 shared device-plugin units by api used [] free 4/4 largest 4 spot used [][] free 4/4 largest 4`,
			`1 shared device-plugin units by api used [0-1] free 2/4 largest 2 spot used [][] free 1/4 largest 1 yielding [1-2][]`,
			`gpu-mem free 6/8 largest 4`,
			`gpu-mem.spot free 5/8 largest 4`,
			`2 shared | gpu-mem 6/8, gpu-mem.spot 5/8 | gpu-mem 4, gpu-mem.spot 4 | 25%`,
		}},
		"spot on demand": {file: migFile("mode: mig\n      spot: true", "mode: mig\n      geometry: {3g.40gb: 2}\n      spot: true"), mig: true, do: func(b *bench) {
			b.hold("s", small+".spot", migID(0, "1g.10gb@1"))
			b.hold("r", large+".spot", migID(1, "3g.40gb@4"))
		}, want: []string{
			`0 mig device-plugin placement by hardware 1g.10gb@0,1,2,3,4,5,6 free [0,1,2,3,4,5,6] largest 7 1g.10gb+me@0,1,2,3,4,5,6 free [0,1,2,3,4,5,6] largest 1 2g.20gb@0,2,4 free [0,2,4] largest 3 3g.40gb@0,4 free [0,4] largest 2 4g.40gb@0 free [0] largest 1 7g.80gb@0 free [0] largest 1 used [] blocked [] warm [1g.10gb@1] largest "7g.80gb" spot used [][1g.10gb@1] free 0/0 largest 0 1g.10gb@0,1,2,3,4,5,6 free [0,2,3,4,5,6] largest 6 1g.10gb+me@0,1,2,3,4,5,6 free [0,2,3,4,5,6] largest 1 2g.20gb@0,2,4 free [2,4] largest 2 3g.40gb@0,4 free [4] largest 1 4g.40gb@0 free [] largest 0 7g.80gb@0 free [] largest 0`,
			`1 mig device-plugin placement by hardware 3g.40gb@0,4 free [0,4] largest 2 used [] blocked [] warm [3g.40gb@0 3g.40gb@4] largest "3g.40gb" spot used [][3g.40gb@4] free 0/0 largest 0 3g.40gb@0,4 free [0] largest 1`,
			`mig-1g.10gb free 7/7 largest 7`,
			`mig-1g.10gb.me free 7/7 largest 1`,
			`mig-1g.10gb.me.spot free 6/7 largest 1`,
			`mig-1g.10gb.spot free 6/7 largest 6`,
			`mig-2g.20gb free 3/3 largest 3`,
			`mig-2g.20gb.spot free 2/3 largest 2`,
			`mig-3g.40gb free 4/4 largest 4`,
			`mig-3g.40gb.spot free 2/4 largest 2`,
			`mig-4g.40gb free 1/1 largest 1`,
			`mig-4g.40gb.spot free 0/1 largest 0`,
			`mig-7g.80gb free 1/1 largest 1`,
			`mig-7g.80gb.spot free 0/1 largest 0`,
			`2 mig | mig 16/16 memory slices, mig.spot 11/16 memory slices | mig 7g.80gb, mig.spot 3g.40gb | 0%`,
		}},
		"drained": {file: allShared, do: func(b *bench) {
			b.hold("a", memResource, string(uuid(0))+"::1")
			b.SetFile("p.yaml", []byte(allWhole))
		}, want: []string{"0 shared device-plugin units by api used [1] free 0/4 largest 0 not Available: HeldByPods", "1 whole device-plugin whole used [] free 1/1 largest 1",
			"not Applied: HeldByPods", "gpu free 1/1 largest 1", "gpu-mem free 0/4 largest 0", "1 whole, 1 shared | gpu 1/1, gpu-mem 0/4 | gpu 1, gpu-mem 0 | 50%"}},
		"unhealthy": {file: allShared, do: func(b *bench) {
			b.hold("a", memResource, string(uuid(1))+"::1")
			b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 79, GI: -1, CI: -1}
		}, want: []string{"0 shared device-plugin units by api used [] free 4/4 largest 4",
			"1 shared device-plugin units by api used [1] free 0/4 largest 0 not Available: GPUUnhealthy not Healthy: GPUUnhealthy",
			"gpu-mem free 4/8 largest 4", "2 shared | gpu-mem 4/8 | gpu-mem 4 | 50%"}},
		"a geometry": {file: migPartition(twoLarge, "{mode: mig, geometry: {3g.40gb: 1, 1g.10gb: 1}}"), mig: true, do: func(b *bench) { b.hold("a", large, migID(0, "3g.40gb@4")) },
			want: []string{
				`0 mig device-plugin placement by hardware 3g.40gb@0,4 free [0] largest 1 used [3g.40gb@4] blocked [] warm [3g.40gb@0] largest "3g.40gb"`,
				`1 mig device-plugin placement by hardware 1g.10gb@0 free [0] largest 1 3g.40gb@4 free [4] largest 1 used [] blocked [] warm [1g.10gb@0 3g.40gb@4] largest "3g.40gb"`,
				"mig-1g.10gb free 1/1 largest 1", "mig-3g.40gb free 2/3 largest 2", "2 mig | mig 9/16 memory slices | mig 3g.40gb | 43%"}},
		"on demand": {file: migPartition(demand, demand), mig: true, do: func(b *bench) {
			b.hold("a", small, migID(0, "1g.10gb@1"))
			b.hold("b", large, migID(1, "3g.40gb@0"))
			b.hold("c", small, migID(1, "1g.10gb@4"))
			b.drop("b")
		}, want: []string{
			`0 mig device-plugin placement by hardware ` + onDemand("1g.10gb@0,2,3,4,5,6:6", "1g.10gb+me@0,2,3,4,5,6:1", "2g.20gb@2,4:2", "3g.40gb@4:1", "4g.40gb@:0", "7g.80gb@:0") + ` used [1g.10gb@1] blocked [] warm [] largest "3g.40gb"`,
			`1 mig device-plugin placement by hardware ` + onDemand("1g.10gb@0,1,2,3,5,6:6", "1g.10gb+me@0,1,2,3,5,6:1", "2g.20gb@0,2:2", "3g.40gb@0:1", "4g.40gb@0:1", "7g.80gb@:0") + ` used [1g.10gb@4] blocked [] warm [3g.40gb@0] largest "3g.40gb"`,
			"mig-1g.10gb free 12/14 largest 12", "mig-1g.10gb.me free 12/14 largest 2", "mig-2g.20gb free 4/6 largest 4", "mig-3g.40gb free 2/4 largest 2",
			"mig-4g.40gb free 1/2 largest 1", "mig-7g.80gb free 0/2 largest 0", "2 mig | mig 13/16 memory slices | mig 3g.40gb | 18%"}},
		"claims": {file: throughDRA("mode: shared"), dra: true, do: func(b *bench) {
			claim := b.dra.allocate(b.t, "a", "-shared", 3)
			if _, err := b.dra.prepare(b.t.Context(), claim); err != nil {
				b.t.Fatal(err)
			}
		}, want: []string{"0 shared dra units by api used [] free 1/4 largest 1", "1 shared dra units by api used [] free 4/4 largest 4", "2 shared | gpu-memory 5Gi/8Gi | gpu-memory 4Gi | 37%"}},
		"dynamic": {file: throughDRA("mode: dynamic"), mig: true, dra: true, want: []string{
			`0 dynamic dra placement by api used [] free 4/4 largest 4 ` + emptyA100 + ` used [] blocked [] warm [] largest "7g.80gb"`,
			`1 dynamic dra placement by api used [] free 4/4 largest 4 ` + emptyA100 + ` used [] blocked [] warm [] largest "7g.80gb"`, "2 dynamic | gpu-memory 8Gi/8Gi | gpu-memory 4Gi | 0%"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(2)
				if c.mig {
					o = migMachine(2, 0, 1)
				}
				if c.dra {
					o.dra = newScheduled()
				}
				b := start(t, o, t.TempDir(), c.file)
				defer b.end()
				time.Sleep(time.Minute)
				if c.do != nil {
					synctest.Wait()
					c.do(b)
				}
				b.wantGPUNode(c.want...)
			})
		})
	}
}

var emptyA100 = onDemand("1g.10gb@0,1,2,3,4,5,6:7", "1g.10gb+me@0,1,2,3,4,5,6:1", "2g.20gb@0,2,4:3", "3g.40gb@0,4:2", "4g.40gb@0:1", "7g.80gb@0:1")

// onDemand are the offers of an A100 on demand, as profile@free:largest.
func onDemand(of ...string) string {
	var out []string
	for _, text := range of {
		profile, rest, _ := strings.Cut(text, "@")
		free, largest, _ := strings.Cut(rest, ":")
		i := slices.IndexFunc(a100().Profiles, func(p gpu.Profile) bool { return p.Name == profile })
		var all []string
		for _, at := range a100().Profiles[i].Placements {
			all = append(all, fmt.Sprint(at.Start))
		}
		out = append(out, fmt.Sprintf("%s@%s free [%s] largest %s", profile, strings.Join(all, ","), free, largest))
	}
	return strings.Join(out, " ")
}

// An instance that somebody else made takes its room, and where nobody may have it blocks it.
func TestGPUNodeOfForeignInstances(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 0, Size: 1}, GI: 9, UUID: "MIG-y"}}
		b := start(t, o, t.TempDir(), migPartition(twoLarge))
		defer b.end()
		time.Sleep(time.Minute)
		b.wantGPUNode(`0 mig device-plugin placement by hardware used [] blocked [1g.10gb@0] warm [] largest ""`, "not Applied: ForeignInstance",
			"1 mig | mig 0/8 memory slices | mig 0 | 100%")
	})
}

// Any user of the API may read the object, so what a change waits for is named on the Node alone.
func TestGPUNodeSaysThatAPartitionWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		applied := func() (out []gpunode.Condition) {
			synctest.Wait()
			for _, c := range b.GPUNode(gpunode.InPods).Conditions {
				if c.Type == gpunode.Applied {
					out = append(out, c)
				}
			}
			return out
		}
		time.Sleep(time.Minute)
		if c := applied(); c != nil {
			t.Errorf("a partition in force has the condition %+v", c)
		}
		b.hold("a", memResource, string(uuid(0))+"::1")
		b.SetFile("p.yaml", []byte(allWhole))
		c := applied()
		if len(c) != 1 || c[0].Status != gpunode.False || c[0].Reason != status.HeldByPods ||
			c[0].Message != "partition default is blocked: the Node's annotation gpu.partition.message says why" {
			t.Errorf("a blocked one has %+v", c)
		}
		b.drop("a")
		time.Sleep(time.Minute)
		if c := applied(); c != nil {
			t.Errorf("after the end of its holder it has %+v", c)
		}
	})
}

// What the driver says may be of any length, and the API server takes an object whose texts are short.
func TestGPUNodeIsShortWhateverTheDriverSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.err = errors.New(strings.Repeat("no driver ", 10_000))
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		time.Sleep(time.Minute)
		is := b.GPUNode(gpunode.InPods)
		if n := len(is.Conditions[0].Message); gpunode.Is(is.Conditions, gpunode.Ready) || n > brief.Text || n < brief.Text-4 {
			t.Errorf("it is ready: %t, and says so in %d bytes, want %d", gpunode.Is(is.Conditions, gpunode.Ready), n, brief.Text)
		}
	})
}

// Where pods do not tell what they have, the object does.
func TestGPUNodeNamesHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, migMachine(2, 0), t.TempDir(), migPartition(demand, "{mode: shared}"))
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		b.hold("a", large, migID(0, "3g.40gb@4"))
		b.hold("b", memResource, string(uuid(1))+"::1", string(uuid(1))+"::2")
		time.Sleep(holdersEvery)
		synctest.Wait()
		text := says(b.GPUNode(gpunode.InObject))
		for _, want := range []string{"held by ns/a/c [][3g.40gb@4]\n", "held by ns/b/c [1-2][]\n"} {
			if !strings.Contains(text, want) {
				t.Errorf("%q is not in\n%s", want, text)
			}
		}
	})
}

// TestGPUNodeSaysWhatFits asks the front-end, which knows nothing of the object, whether
// the largest request fits and a larger one does not, on every recorded machine with
// devices taken at random.
func TestGPUNodeSaysWhatFits(t *testing.T) {
	files, err := filepath.Glob("../../tests/testdata/*.json")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d recorded inventories: %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, mode := range []string{"mode: whole", "mode: shared", "mode: shared, replicas: 5", "mode: mig"} {
			inv := new(gpu.Inventory)
			if err := json.Unmarshal(text, inv); err != nil {
				t.Fatal(err)
			}
			for i := range inv.GPUs {
				inv.GPUs[i].MIG.Pending = nil // it would be for the fake driver to change that
			}
			if mode == "mode: mig" && !slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return len(d.MIG.Profiles) > 0 }) {
				continue
			}
			t.Run(filepath.Base(file)+" "+mode, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					o := newOutside(0)
					o.inv, o.unit = inv, 1024
					b := start(t, o, t.TempDir(), "version: v1\npartitions:\n  default:\n    - {devices: all, "+mode+"}\n")
					defer b.end()
					time.Sleep(5 * time.Minute) // MIG mode is turned on
					synctest.Wait()
					random := rand.New(rand.NewPCG(1, 2))
					for step := range 4 {
						s := b.GPUNode(gpunode.InPods)
						if len(s.Resources) == 0 {
							t.Fatalf("nothing is on offer: %s", says(s))
						}
						for _, r := range s.Resources {
							b.wantLargest(r)
						}
						// Of whatever is left some more is taken.
						r := s.Resources[random.IntN(len(s.Resources))]
						if r.Largest == 0 {
							continue
						}
						ids, err := b.front.Prefer(r.Name, b.listedHealthy(r.Name), nil, 1+random.IntN(min(r.Largest, 9)))
						if err != nil {
							t.Fatal(err)
						}
						b.hold(fmt.Sprint("p", step), r.Name, ids...)
					}
				})
			})
		}
	}
}

// listedHealthy are the devices that the kubelet could give out: those that are healthy and
// that nobody has.
func (b *bench) listedHealthy(resource string) (out []string) {
	held := b.display.(*display).scene().held[resource]
	for _, r := range b.front.Offer().Resources {
		for _, dev := range r.Devices {
			if r.Name == resource && dev.Healthy && !held[dev.ID] {
				out = append(out, dev.ID)
			}
		}
	}
	return out
}

// wantLargest asks for the largest request of a resource, and for one more.
func (b *bench) wantLargest(r gpunode.Resource) {
	b.t.Helper()
	free := b.listedHealthy(r.Name)
	if len(free) != r.Free {
		b.t.Errorf("%s: %d are free, told are %d", r.Name, len(free), r.Free)
	}
	if _, err := b.front.Prefer(r.Name, free, nil, r.Largest); r.Largest > 0 && err != nil {
		b.t.Errorf("%s: %d are told to fit: %v", r.Name, r.Largest, err)
	}
	if got, err := b.front.Prefer(r.Name, free, nil, r.Largest+1); err == nil {
		b.t.Errorf("%s: %d are told to fit, and %d do: %v", r.Name, r.Largest, r.Largest+1, got)
	}
}

// TestGPUNodeMessagesNameNoPods: any user of the API may read the object, so who blocks a change is
// named on the Node alone.
func TestGPUNodeMessagesNameNoPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		time.Sleep(time.Minute)
		b.hold("secret-a", memResource, string(uuid(0))+"::1")
		b.SetFile("p.yaml", []byte(allWhole))
		time.Sleep(time.Minute)
		synctest.Wait()
		if m := b.message(); !strings.Contains(m, "secret-a") {
			t.Fatalf("the Node is told %q: this test blocks nothing", m)
		}
		s := b.GPUNode(gpunode.InPods)
		conditions := s.Conditions
		for i := range s.GPUs {
			conditions = append(conditions, s.GPUs[i].Conditions...)
		}
		for _, c := range conditions {
			if strings.Contains(c.Message, "secret") {
				t.Errorf("%s: %s", c.Type, c.Message)
			}
		}
	})
}
