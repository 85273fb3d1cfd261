// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"

	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/plane"
)

// podsPerNode have devices of each node that TestSize writes.
const podsPerNode = 5

// world is what the API server has of nodes that nobody runs.
type world struct {
	*fleet
	names []string
	// says is what the GPUNode of each says.
	says map[string]map[string]any
}

// template is what an agent writes of a node with eight GPUs, four of them shared.
func (f *fleet) template() map[string]any {
	f.t.Helper()
	const name = "template"
	n := hollow.Start(f.t, f.Server, hollow.Options{
		Name: name, Model: "A100-SXM4-80GB", GPUs: 8, Kubelet: "v1.36.3", Agent: plane.Program(f.t, "gpu-agent"),
		Entries: []string{"{devices: [4, 5, 6, 7], mode: mig}", "{devices: [0, 1, 2, 3], mode: shared}"},
	})
	var is struct{ Status map[string]any }
	f.Await(f.t, "an agent writes its GPUNode", func() error {
		is.Status = nil
		if err := f.get(gpuNodes+"/"+name, &is); err != nil {
			return err
		}
		resources, _ := is.Status["resources"].([]any)
		for _, r := range resources {
			if is := r.(map[string]any); is["name"] == "example.com/mig-7g.80gb" && is["total"] == 4. && n.Offered()["example.com/gpu-mem"] > 0 {
				return nil
			}
		}
		return fmt.Errorf("it has %v", resources)
	})
	return is.Status
}

// write is a request to the API server.
type write struct {
	method, path, kind string
	body               map[string]any
}

// uuid is that of a GPU.
func uuid(node, gpu int) string { return fmt.Sprintf("GPU-00000000-0000-0000-%04d-%012d", gpu, node) }

// populate writes nodes, what their agents would say, and pods that have a part of them.
func (f *fleet) populate(count int) *world {
	f.t.Helper()
	w := &world{fleet: f, says: map[string]map[string]any{}}
	text, err := json.Marshal(f.template())
	if err != nil {
		f.t.Fatal(err)
	}
	for i := range count {
		name := fmt.Sprintf("size-%05d", i)
		var says map[string]any
		if err := json.Unmarshal(text, &says); err != nil {
			f.t.Fatal(err)
		}
		for g, gpu := range says["gpus"].([]any) {
			gpu.(map[string]any)["uuid"] = uuid(i, g)
		}
		w.names, w.says[name] = append(w.names, name), says
	}
	began := time.Now()
	w.each(func(i int) error {
		name := w.names[i]
		has := map[string]any{"cpu": "64", "memory": "64Gi", "pods": "110"}
		for _, r := range w.says[name]["resources"].([]any) {
			has[r.(map[string]any)["name"].(string)] = fmt.Sprint(r.(map[string]any)["total"])
		}
		ready := []any{map[string]any{"type": "Ready", "status": "True"}}
		steps := []write{
			{http.MethodPost, allNodes, plane.JSON, map[string]any{"metadata": map[string]any{"name": name}}},
			{http.MethodPatch, allNodes + "/" + name + "/status", plane.Merge, map[string]any{"status": map[string]any{"capacity": has, "allocatable": has, "conditions": ready}}},
			{http.MethodPost, gpuNodes, plane.JSON, map[string]any{"apiVersion": "example.com/v1alpha1", "kind": "GPUNode", "metadata": map[string]any{"name": name}}},
			{http.MethodPatch, gpuNodes + "/" + name + "/status", plane.Merge, map[string]any{"status": w.says[name]}},
		}
		for p := range podsPerNode {
			of, ids := w.devices(i, p)
			pod := fmt.Sprintf("%s-%d", name, p)
			steps = append(steps, write{http.MethodPost, pods, plane.JSON, map[string]any{"metadata": map[string]any{"name": pod}, "spec": spec(map[string]int{of: len(ids)}, name)}},
				write{http.MethodPatch, pods + "/" + pod + "/status", plane.Strategic, map[string]any{"status": running(of, ids)}})
		}
		for _, s := range steps {
			if err := f.Do(f.t, nil, s.method, s.path, s.kind, s.body, nil); err != nil {
				return err
			}
		}
		return nil
	})
	f.t.Logf("%d nodes and %d pods written in %.0f s", count, count*podsPerNode, time.Since(began).Seconds())
	return w
}

// each calls do for each node, some at a time.
func (w *world) each(do func(i int) error) {
	w.t.Helper()
	var group sync.WaitGroup
	next := make(chan int)
	for range 8 {
		group.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					w.t.Errorf("%s: %v", w.names[i], err)
				}
			}
		})
	}
	for i := range w.names {
		next <- i
	}
	close(next)
	group.Wait()
	if w.t.Failed() {
		w.t.FailNow()
	}
}

// devices are what a pod of a node has: some of it memory, some of it instances.
func (w *world) devices(node, pod int) (of string, ids []string) {
	rng := rand.New(rand.NewPCG(uint64(node), uint64(pod)))
	if pod%2 == 1 {
		profile := []string{"1g.10gb@0", "2g.20gb@2", "3g.40gb@4"}[rng.IntN(3)]
		name, _, _ := strings.Cut(profile, "@")
		return "example.com/mig-" + name, []string{uuid(node, 4+pod/2) + "::" + profile}
	}
	for i := range 8 + rng.IntN(40) {
		ids = append(ids, fmt.Sprintf("%s::%d", uuid(node, pod/2), i))
	}
	return "example.com/gpu-mem", ids
}

func running(of string, ids []string) map[string]any {
	var has []any
	for _, id := range ids {
		has = append(has, map[string]any{"resourceID": id, "health": "Healthy"})
	}
	return map[string]any{"phase": "Running", "containerStatuses": []any{map[string]any{"name": "main", "image": "none", "imageID": "", "ready": true, "started": true, "restartCount": 0,
		"allocatedResourcesStatus": []any{map[string]any{"name": of, "resources": has}}}}}
}

// change has GPUNodes written as often as agents may in the mean, until over is closed.
func (w *world) change(over <-chan struct{}) (writes int) {
	rng := rand.New(rand.NewPCG(1, 1))
	tick := time.NewTicker(time.Hour / mostWrites / time.Duration(len(w.names)))
	defer tick.Stop()
	for ; ; writes++ {
		select {
		case <-over:
			return writes
		case <-w.t.Context().Done():
			return writes
		case <-tick.C:
		}
		name := w.names[rng.IntN(len(w.names))]
		gpus := w.says[name]["gpus"].([]any)
		gpus[0].(map[string]any)["used"] = fmt.Sprintf("0-%d", 8+rng.IntN(60))
		if err := w.Do(w.t, nil, http.MethodPatch, gpuNodes+"/"+name+"/status", plane.Merge, map[string]any{"status": map[string]any{"gpus": gpus}}, nil); err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	}
}

// kinds are what pods ask for in TestSize and beside a hostile node, and kindNames their names.
var (
	kinds = map[string]map[string]int{
		"24 units":     {"example.com/gpu-mem": 24},
		"an instance":  {"example.com/mig-2g.20gb": 1},
		"no such room": {"example.com/gpu-mem": 79 + 1},
	}
	kindNames = []string{"24 units", "an instance", "no such room"}
)

// asker is a pod that waits in the API for a node, and that no scheduler looks at.
type asker struct{ uid, kind string }

// askers makes so many, by turns of each kind.
func (w *world) askers(count int) []asker {
	w.t.Helper()
	out := make([]asker, count)
	for i := range out {
		kind := kindNames[i%len(kindNames)]
		of := spec(kinds[kind], "")
		of["schedulerName"] = "nobody"
		var made struct{ Metadata struct{ UID string } }
		if err := w.Do(w.t, nil, http.MethodPost, pods, plane.JSON, map[string]any{"metadata": map[string]any{"name": fmt.Sprint("asks-", i)}, "spec": of}, &made); err != nil {
			w.t.Fatal(err)
		}
		out[i] = asker{made.Metadata.UID, kind}
	}
	return out
}

// question is one that kube-scheduler asks of a pod.
func question(of asker, names []string) ([]byte, error) {
	return json.Marshal(extender.ExtenderArgs{Pod: &core.Pod{ObjectMeta: meta.ObjectMeta{Name: "asks", Namespace: namespace, UID: types.UID(of.uid)}}, NodeNames: &names})
}

// TestSize asks the placer's door about many nodes, one question after the other, as
// kube-scheduler does, while GPUNodes change.
func TestSize(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it measures")
	}
	count, questions := 100, 2000
	if *long {
		count, questions = 1000, 10000
	}
	if *nodes > 0 {
		count = *nodes
	}
	f := start(t)
	w := f.populate(count)
	began := time.Now()
	f.schedule()
	knows := time.Since(began)
	over := make(chan struct{})
	var writes int
	f.work.Go(func() { writes = w.change(over) })
	took, outcomes := map[string][]time.Duration{}, map[string]map[bool]int{}
	rng := rand.New(rand.NewPCG(17, 17))
	late := 0
	// As many pods as there are nodes, again and again: each gives up what it had before.
	pods := w.askers(count)
	for n := range questions {
		pod := pods[rng.IntN(len(pods))]
		kind := pod.kind
		body, err := question(pod, w.names)
		if err != nil {
			t.Fatal(err)
		}
		answer, in, err := ask(f.placer.Door, body)
		took[kind] = append(took[kind], in)
		if errors.Is(err, errLate) {
			late++
			continue
		} else if err != nil {
			t.Fatalf("question %d, %s: %v", n, kind, err)
		}
		if outcomes[kind] == nil {
			outcomes[kind] = map[bool]int{}
		}
		outcomes[kind][answer.NodeNames != nil && len(*answer.NodeNames) > 0]++
	}
	close(over)
	f.work.Wait()
	if late > questions/2 {
		t.Errorf("%d of %d questions were not answered in time", late, questions)
	}
	var all []time.Duration
	for _, kind := range kindNames {
		all = append(all, took[kind]...)
		t.Logf("%d nodes, %d pods, %s: %d questions, p50 %.1f ms, p99 %.1f ms, most %.1f ms; placed %d",
			count, count*podsPerNode, kind, len(took[kind]), at(took[kind], 0.5), at(took[kind], 0.99), at(took[kind], 1), outcomes[kind][true])
		if wrong := outcomes[kind][kind == "no such room"]; wrong > 0 {
			t.Errorf("%s: %d answers of %d say the opposite", kind, wrong, len(took[kind]))
		}
	}
	t.Logf("%d nodes, all: p50 %.1f ms, p99 %.1f ms, %d not in time; %d GPUNodes were written meanwhile; the placer knew them after %.1f s, and has %.1f MB resident",
		count, at(all, 0.5), at(all, 0.99), late, writes, knows.Seconds(), resident(t, f.placer.PID()))
}

// errLate says that the door had no answer in its time; then kube-scheduler goes on without.
var errLate = errors.New("no answer in time")

// ask asks the door, and returns the answer and how long it took to come.
func ask(door string, body []byte) (answer extender.ExtenderFilterResult, took time.Duration, err error) {
	began := time.Now()
	response, err := http.Post("http://"+door+"/filter", "application/json", bytes.NewReader(body))
	if err != nil {
		return answer, 0, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if took = time.Since(began); err != nil {
		return answer, took, err
	}
	if response.StatusCode == http.StatusServiceUnavailable {
		return answer, took, errLate
	} else if response.StatusCode != http.StatusOK {
		return answer, took, fmt.Errorf("%s: %s", response.Status, text)
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return answer, took, err
	}
	if answer.Error != "" {
		return answer, took, errors.New(answer.Error)
	}
	return answer, took, nil
}

// at is a quantile in milliseconds.
func at(of []time.Duration, q float64) float64 {
	if len(of) == 0 {
		return 0
	}
	slices.Sort(of)
	return float64(of[min(len(of)-1, int(q*float64(len(of))))].Microseconds()) / 1000
}
