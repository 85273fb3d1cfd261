// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/tests/plane"
)

// hostile are ways in which a node lies, or a tenant asks: what is changed of a GPUNode's status,
// or a pod that is bound there.
var hostile = []struct {
	name string
	says string
	pod  map[string]int
}{
	{name: "a total of 2³¹−1", says: `{"gpus":[{"uuid":"GPU-1","index":0,"memoryMiB":1,"total":2147483647,"free":1,"largest":1,"api":"device-plugin","kind":"units","resource":"example.com/gpu-mem"}]}`},
	{name: "a total of 16,777,216", says: `{"gpus":[{"uuid":"GPU-1","index":0,"memoryMiB":1,"total":16777216,"free":1,"largest":1,"api":"device-plugin","kind":"units","resource":"example.com/gpu-mem"}]}`},
	{name: "holders of all numbers", says: `{"holdersIn":"GPUNode","gpus":[{"uuid":"GPU-1","index":0,"memoryMiB":1,"total":79,"free":1,"largest":1,"api":"device-plugin","kind":"units","resource":"example.com/gpu-mem","holders":[{"namespace":"x","pod":"y","devices":"0-16777216"}]}]}`},
	{name: "60,000 units", says: `{"gpus":[{"uuid":"GPU-1","index":0,"memoryMiB":1,"total":60000,"free":60000,"largest":60000,"api":"device-plugin","kind":"units","resource":"example.com/gpu-mem"}]}`},
	{name: "no GPUs", says: `{"gpus":[],"resources":[],"cards":[]}`},
	{name: "words for numbers", says: `{"gpus":[{"uuid":"GPU-1","index":"zero"}]}`},
	{name: "a pod of 2³¹ units", pod: map[string]int{"example.com/gpu-mem": 1 << 31}},
	{name: "a pod of 4·10⁹ instances", pod: map[string]int{"example.com/mig-1g.10gb": 4_000_000_000}},
	{name: "a pod of 60,000 of each", pod: map[string]int{"example.com/gpu-mem": 60_000, "example.com/mig-1g.10gb": 60_000, "example.com/mig-2g.20gb": 60_000}},
}

// tables is a status with a card of so many profiles and placements on so many GPUs.
func tables(gpus, profiles, starts, memory int) map[string]any {
	var of, offers []map[string]any
	for i := range profiles {
		name := fmt.Sprintf("%dg.%dgb", i%7+1, i+1)
		var at []int
		var text []string
		for s := range min(starts, memory) {
			at, text = append(at, s), append(text, fmt.Sprint(s))
		}
		of = append(of, map[string]any{"name": name, "computeSlices": i%7 + 1, "memorySlices": 1, "starts": at})
		offers = append(offers, map[string]any{"profile": name, "resource": "example.com/mig-" + []string{"2g.20gb", name}[min(i, 1)], "placements": text, "free": text, "largest": 1})
	}
	var list []map[string]any
	ready := []map[string]any{{"type": "Available", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}
	for i := range gpus {
		list = append(list, map[string]any{"uuid": fmt.Sprint("GPU-h-", i), "index": i, "memoryMiB": 1, "total": 0, "free": 0, "largest": 0, "api": "device-plugin", "kind": "placement",
			"conditions": ready, "mig": map[string]any{"card": "c", "onDemand": true, "offers": offers}})
	}
	return map[string]any{"cards": []any{map[string]any{"name": "c", "memorySlices": memory, "profiles": of}}, "gpus": list}
}

// TestOneHostileNode has one of many nodes lie in a hundred ways, and a tenant ask for what there
// is not, while the placer, with 256 MiB, is asked about all of them. The others are served as
// before.
func TestOneHostileNode(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it measures")
	}
	count, questions, lies := 60, 1000, 100
	if *long {
		count, questions, lies = 200, 10_000, 1000
	}
	// The process inherits it.
	t.Setenv("GOMEMLIMIT", "200MiB")
	f := start(t)
	w := f.populate(count)
	f.placer = f.StartPlacer(t, plane.Program(t, "gpu-placer"), f.Kubeconfig(t, nil), plane.FreeAddress(t), "--lease", namespace+"/gpu-placer")
	pods := w.askers(count)
	rng := rand.New(rand.NewPCG(34, 34))
	// A phase has so many questions, and goes on until more says no.
	phase := func(name string, more func() bool) (took []time.Duration, late int) {
		t.Helper()
		for n := 0; n < questions || more(); n++ {
			pod := pods[rng.IntN(len(pods))]
			body, err := question(pod, w.names)
			if err != nil {
				t.Fatal(err)
			}
			answer, in, err := ask(f.placer.Door, body)
			took = append(took, in)
			switch placed := answer.NodeNames != nil && len(*answer.NodeNames) > 0; {
			case errors.Is(err, errLate):
				late++
			case err != nil:
				t.Fatalf("%s, question %d: %v", name, n, err)
			case placed == (pod.kind == "no such room"):
				// On the hostile node there may be anything.
				if !placed || (*answer.NodeNames)[0] != w.names[0] {
					t.Errorf("%s, %s: placed %v on %v", name, pod.kind, placed, answer.NodeNames)
				}
			}
		}
		t.Logf("%d nodes, %s: p50 %.1f ms, p99 %.1f ms, %d of %d not in time", count, name, at(took, 0.5), at(took, 0.99), late, len(took))
		return took, late
	}
	quiet := make(chan struct{})
	f.work.Go(func() { w.change(quiet) })
	without, lateWithout := phase("all of them honest", func() bool { return false })
	close(quiet)
	f.work.Wait()

	over := make(chan struct{})
	var written, refused atomic.Int32
	f.work.Go(func() { w.change(over) })
	f.work.Go(func() { w.lie(over, &written, &refused) })
	with, lateWith := phase("one of them hostile", func() bool { return int(written.Load()+refused.Load()) < lies })
	close(over)
	f.work.Wait()
	passed := f.placer.Metric(t, "gpu_agent_placer_passed_over_nodes")
	peak := memory(t, f.placer.PID(), "VmHWM") / (1 << 20)
	t.Logf("one node lied %d times, %d times more the API server refused it; p99 %.2f times that without; at most %.0f MiB resident; passed over at the end: %.0f",
		written.Load(), refused.Load(), at(with, 0.99)/at(without, 0.99), peak, passed)
	if int(written.Load()) < lies/4 {
		t.Errorf("the API server took %d of %d lies, which shows nothing", written.Load(), lies)
	}
	if lateWith > lateWithout+len(with)/100 {
		t.Errorf("%d of %d questions were not answered in time, and %d of %d without it", lateWith, len(with), lateWithout, len(without))
	}
	if peak > 256 {
		t.Errorf("the placer had %.0f MiB", peak)
	}
}

// lie has the first node say what is not so, a hundred ways by turns, and pods ask it for what
// there is not, until over is closed.
func (w *world) lie(over <-chan struct{}, written, refused *atomic.Int32) {
	rng := rand.New(rand.NewPCG(35, 35))
	node := w.names[0]
	honest, err := json.Marshal(w.says[node]) // of which others write while we do
	if err != nil {
		w.t.Error(err)
	}
	for i := 0; ; i++ {
		select {
		case <-over:
			return
		case <-w.t.Context().Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
		way := hostile[i%len(hostile)]
		text := []byte(way.says)
		var says map[string]any
		switch {
		case way.pod != nil:
			if err := w.Do(w.t, nil, http.MethodPost, pods, plane.JSON, map[string]any{"metadata": map[string]any{"name": fmt.Sprint("lies-", i)}, "spec": spec(way.pod, node)}, nil); err != nil {
				refused.Add(1)
			} else {
				written.Add(1)
			}
			continue
		case i%3 == 0:
			// As large as is believed, and somewhat larger.
			says = tables(1+rng.IntN(16), 1+rng.IntN(20), 1+rng.IntN(10), 1+rng.IntN(64))
		case i%7 == 0:
			text = honest // and makes up for it
		}
		if says == nil {
			if err := json.Unmarshal(text, &says); err != nil {
				w.t.Error(err)
				return
			}
		}
		if err := w.Do(w.t, nil, http.MethodPatch, gpuNodes+"/"+node+"/status", plane.Merge, map[string]any{"status": says}, nil); err != nil {
			refused.Add(1)
		} else {
			written.Add(1)
		}
	}
}
