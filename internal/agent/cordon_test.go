// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

func TestWhichGPUsAreCordoned(t *testing.T) {
	inv := machine(3)
	for said, want := range map[string]string{
		"":                               " | ",
		"1":                              "1 | ",
		"0, 2":                           "02 | ",
		string(uuid(1)) + ",1,":          "1 | ",
		"all":                            "012 | ",
		"3":                              " | 3",
		"2,01,GPU-1,x":                   "2 | 01 GPU-1 x",
		"0 1":                            " | 0 1",
		"-1":                             " | -1",
		strings.Repeat("9,", 1000) + "0": "0 | " + strings.TrimSpace(strings.Repeat("9 ", 1000)),
	} {
		c, got := cordonsOf(said, inv), ""
		for i := range inv.GPUs {
			if c.gpus[uuid(i)] {
				got += string(rune('0' + i))
			}
		}
		if got += " | " + strings.Join(c.unknown, " "); got != want {
			t.Errorf("%.40q cordons %.80q, want %.80q", said, got, want)
		}
		for _, k := range c.conditions("example.com", inv) {
			if len(k.Message) > 4096 {
				t.Errorf("%.40q: a message of %d bytes", said, len(k.Message))
			}
		}
	}
}

// An annotation of the largest size costs no more than one of 2048 words: the rest is not read,
// and said not to be. What stands before it counts.
func TestCordonOfManyWords(t *testing.T) {
	inv := machine(3)
	work := func(words int) float64 {
		said := "1," + strings.Repeat("9,", words)
		c := cordonsOf(said, inv)
		if !c.gpus[uuid(1)] || len(c.gpus) != 1 {
			t.Errorf("of %d words %v are cordoned", words, c.gpus)
		}
		if told := c.conditions("example.com", inv); (words > mostCordons) != strings.Contains(told[1].Message, "has more than 2048 words") {
			t.Errorf("of %d words the node says %+v", words, told)
		}
		return testing.AllocsPerRun(3, func() { cordonsOf(said, inv) })
	}
	few, many := work(2000), work(120_000)
	if many > 2*few {
		t.Errorf("120,000 words take %v allocations, and 2000 take %v", many, few)
	}
}

// New pods are kept off a GPU that an operator has cordoned, at once and until the cordon
// is taken back; who has something of it keeps it. A process that starts knows of it before
// the API server answers.
func TestCordonKeepsNewPodsOffAGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		says := func(b *bench, cordon string) {
			b.SetNode(agentkube.Node{Annotations: map[string]string{"example.com/gpu.cordon": cordon}})
			synctest.Wait()
		}
		const all = 4
		is := func(b *bench, when string, free0, free1 int, reasons ...status.Reason) {
			t.Helper()
			s := b.Status()
			for i, want := range []int{free0, free1} {
				g := &s.GPUs[i]
				if g.Free != want || g.Total != all {
					t.Errorf("%s: GPU %d has %d of %d free, %d held; want %d free", when, i, g.Free, g.Total, g.Used, want)
				}
			}
			var got []status.Reason
			for _, k := range s.Conditions {
				got = append(got, k.Reason)
			}
			if !slices.Equal(got, reasons) || s.Partition.State != "applied" {
				t.Errorf("%s: the partition is %s, with the conditions %v; want %v", when, s.Partition.State, s.Conditions, reasons)
			}
			for i, want := range []int{free0, free1} {
				to := b.GPUNode(gpunode.InPods).GPUs[i]
				if to.Cordoned != (want == 0) || gpunode.Is(to.Conditions, gpunode.Available) != (want > 0) || to.Free != want {
					t.Errorf("%s: the GPUNode says %+v of GPU %d", when, to, i)
				}
			}
		}
		// offers checks what is on offer while the first GPU is cordoned.
		offers := func(b *bench, when string) {
			t.Helper()
			n := 0
			for _, r := range b.front.Offer().Resources {
				for _, dev := range r.Devices {
					n++
					held := dev.GPU == uuid(0) && (strings.HasSuffix(dev.ID, "::2") || strings.HasSuffix(dev.ID, "::3"))
					if dev.Healthy != (dev.GPU == uuid(1) || held) || dev.Leaving {
						t.Errorf("%s: %s is healthy: %v, leaving: %v", when, dev.ID, dev.Healthy, dev.Leaving)
					}
				}
			}
			if n != 2*all {
				t.Errorf("%s: there are %d devices", when, n)
			}
		}
		b := start(t, o, dir, allShared)
		says(b, "")
		b.hold("train-1", memResource, string(uuid(0))+"::2", string(uuid(0))+"::3")
		is(b, "without a cordon", all-2, all)
		says(b, "0")
		is(b, "one is cordoned", 0, all, status.GPUCordoned)
		offers(b, "one is cordoned")
		says(b, "0,7")
		is(b, "and one that is not there", 0, all, status.CordonUnknown, status.GPUCordoned)
		b.end()

		o.unheard = true // the API server does not answer
		b = start(t, o, dir, allShared)
		offers(b, "a new process")
		says(b, string(uuid(1)))
		is(b, "the other instead", all-2, 0, status.GPUCordoned)
		says(b, "")
		is(b, "taken back", all-2, all)
		b.end()
	})
}

// The same through DRA: a taint, for devices of every kind, and no word of it in the offer.
func TestCordonTaintsDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: mig"))
		defer b.end()
		tainted := func(want ...gpu.UUID) {
			t.Helper()
			synctest.Wait()
			seen := map[string]bool{}
			for _, s := range o.dra.Slices() {
				for _, d := range s.Devices {
					on := ""
					if a := d.Attributes["parentUUID"]; a.String != nil {
						on = *a.String
					}
					var taints []string
					for _, k := range d.Taints {
						taints = append(taints, k.Key+"="+k.Value)
					}
					seen[on] = true
					if is := slices.Equal(taints, []string{"example.com/withdrawn=GPUCordoned"}); is != slices.Contains(want, gpu.UUID(on)) {
						t.Errorf("%s of %s has the taints %v", d.Name, on, taints)
					}
				}
			}
			if len(seen) < 2 {
				t.Errorf("the slices have %v", seen)
			}
		}
		b.SetNode(agentkube.Node{Annotations: map[string]string{"example.com/gpu.cordon": "1"}})
		time.Sleep(time.Minute)
		tainted(uuid(1))
		b.SetNode(agentkube.Node{})
		time.Sleep(time.Minute)
		tainted()
	})
}
