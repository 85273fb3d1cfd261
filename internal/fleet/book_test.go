// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// lastGPU is a fleet with one GPU, and its doors.
type lastGPU struct {
	*Fleet
	lender *Lender
	holder *Holder
}

func newLastGPU() *lastGPU {
	w := &lastGPU{Fleet: New("example.com", func() time.Time { return start })}
	w.lender = Lend(w.Fleet, func(p *corev1.Pod) string { return p.Labels["quota"] })
	w.holder = HoldFor(w.Fleet, func(p *corev1.Pod) string { return p.Labels["hold"] })
	w.SetNode(node("a", corev1.ConditionTrue))
	s := says(first)
	s.Sum()
	w.SetGPUNode("a", s)
	return w
}

// listed says that all is known.
func (w *lastGPU) listed() {
	w.lender.Listed()
	w.holder.Listed()
	for _, k := range []Kind{Nodes, Pods, GPUNodes} {
		w.Listed(k)
	}
}

func allOfIt() []placer.Group {
	return []placer.Group{{
		Containers: []placer.Container{{Requests: map[string]int{memory: 79}}}, N: 1, Among: []string{"a"},
	}}
}

// race has all doors ask for all of the GPU at the same moment, and returns who has got it.
func (w *lastGPU) race(t *testing.T, round string) (got []string) {
	var ready, done sync.WaitGroup
	var mu sync.Mutex
	begin := make(chan struct{})
	for who, ask := range map[string]func() bool{
		"extender": func() bool {
			at, _, err := place(t.Context(), w.Fleet, asks("pod-"+round, "79"), []string{"a"})
			if err != nil {
				t.Error(err)
			}
			return at != ""
		},
		"kueue": func() bool {
			_, no := w.holder.Hold("kueue/"+round, "a job", allOfIt())
			return no == nil
		},
		"liqo": func() bool {
			short := w.lender.Keep("liqo/"+round, map[string]int{memory: 79})
			if short != nil {
				w.lender.Drop("liqo/" + round)
			}
			return short == nil
		},
	} {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-begin
			if ask() {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, who)
			}
		})
	}
	ready.Wait()
	close(begin)
	done.Wait()
	return got
}

// TestOneBook has all doors ask for the last piece at the same moment, 1,000 times: it is given
// once. In between the process is killed, and knows from what was written down who has it.
func TestOneBook(t *testing.T) {
	won := map[string]int{}
	for i := range 1000 {
		w := newLastGPU()
		w.listed()
		round := fmt.Sprint(i)
		got := w.race(t, round)
		if len(got) != 1 {
			t.Fatalf("round %d: %v have got the only GPU", i, got)
		}
		won[got[0]]++
		if i%2 == 1 {
			w = newLastGPU()
			switch got[0] {
			case "extender":
				w.SetPod(bound(asks("pod-"+round, "79"), "a", first, 0))
			case "kueue":
				w.holder.SetHold("kueue/"+round, "a job", allOfIt(), [][]string{{"a"}})
			case "liqo":
				w.lender.Keep("liqo/"+round, map[string]int{memory: 79})
			}
			w.listed()
		}
		if again := w.race(t, round+"-again"); len(again) != 0 {
			t.Fatalf("round %d: %s has the only GPU, and %v got it too", i, got[0], again)
		}
		if _, short, _ := w.lender.Kept("liqo/" + round); short != nil {
			t.Fatalf("round %d: the other cluster lacks %v", i, short)
		}
		if lost := w.holder.Lost("kueue/" + round); lost != nil {
			t.Fatalf("round %d: the workload has lost its room on %v", i, lost)
		}
	}
	t.Log(won)
	for _, who := range []string{"extender", "kueue", "liqo"} {
		if won[who] < 50 {
			t.Errorf("%s has got it %d times of 1000: they do not ask at the same moment", who, won[who])
		}
	}
}
