// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	front "example.com/gpu-agent/internal/dra"
	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/lab"
)

const draDriver = "gpus.example.com"

// preparer is a driver that remembers what the kubelet prepares, and gives each claim a
// CDI device of its own.
type preparer struct {
	cdiDir   string
	mu       sync.Mutex
	prepared map[string]dra.Claim // by UID; guarded by mu
	watched  bool                 // the kubelet has asked for healths; guarded by mu
}

func (p *preparer) Prepare(_ context.Context, of dra.Claim) ([]dra.Device, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepared[of.UID] = of
	key := claimKey(of.UID)
	spec := fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": %q, "devices": [{"name": %q, "containerEdits": {"env": ["DRA_TEST=%s"]}}]}`, cdi.Kind(lab.Domain), key, of.Name)
	_, request := podOf(of.Name)
	return []dra.Device{{Requests: []string{request}, Pool: "pool", Name: "device", CDI: []string{cdi.DeviceName(lab.Domain, key)}}},
		os.WriteFile(p.file(key), []byte(spec), 0o600)
}

// podOf is the pod that a claim is of, and the claim's only request: the test's own, or of
// a claim that the scheduler made for a resource's name.
func podOf(claim string) (pod, request string) {
	pod, _, made := strings.Cut(claim, "-extended-resources-")
	if made {
		return pod, "container-0-request-0"
	}
	return pod, "gpu"
}

func claimKey(uid string) string { return cdi.Key("claim/"+uid, []string{"gpu"}) }

func (p *preparer) file(key string) string { return filepath.Join(p.cdiDir, "dra-test-"+key+".json") }

func (p *preparer) Unprepare(_ context.Context, of dra.Claim) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.prepared, of.UID)
	return os.Remove(p.file(claimKey(of.UID)))
}

// keys are the allocations of the claims that are prepared, by the pod's name.
func (p *preparer) keys() map[string][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string][]string{}
	for _, of := range p.prepared {
		pod, _ := podOf(of.Name)
		out[pod] = []string{claimKey(of.UID)}
	}
	return out
}

func (p *preparer) Health() ([]dra.Health, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watched = true
	return nil, nil
}

// names are those of the claims that are prepared, sorted.
func (p *preparer) names() (out []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, of := range p.prepared {
		out = append(out, of.Namespace+"/"+of.Name)
	}
	slices.Sort(out)
	return out
}

// apply gives objects to the API server.
func (b *bench) apply(objects ...map[string]any) {
	b.Helper()
	for _, o := range objects {
		text, err := json.Marshal(o)
		b.must(err)
		_, err = node.Kubectl(b.ctx, bytes.NewReader(text), "apply", "-f", "-")
		b.must(err)
	}
}

// draSlices are the objects of what a node with two GPUs publishes: the first has MIG on
// demand, the second is shared.
func draSlices(t *testing.T) (out []map[string]any) {
	inv := &gpu.Inventory{Driver: "580.159.03", CUDA: "13.0"}
	table := gpu.MIG{Capable: true, Enabled: true, Profiles: []gpu.Profile{
		{Name: "1g.10gb", Slices: 1, Max: 7, Memory: 9728, Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}, {Start: 2, Size: 1}, {Start: 3, Size: 1}}},
		{Name: "3g.71gb", Slices: 3, Max: 2, Memory: 40192, Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}}}
	card, err := mig.NewCard(&table)
	if err != nil {
		t.Fatal(err)
	}
	in := front.Input{Node: nodeName, Driver: draDriver, Inventory: inv, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{}, Cards: map[gpu.UUID]*mig.Card{}}
	for i, layout := range []plan.Layout{
		{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindPlacement, N: len(card.Placements()), Placements: card.Placements()}},
		{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 79, Unit: 1024}}} {
		u := gpu.UUID(fmt.Sprintf("GPU-%d0000000-0000-4000-8000-000000000000", i+1))
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: u, Model: "NVIDIA H100 80GB HBM3", ComputeCapability: "9.0", Memory: 81559, PCI: fmt.Sprintf("00000000:0%d:00.0", i), MIG: table})
		in.Layouts[u], in.Cards[u] = layout, card
	}
	for _, s := range front.Build(in).Slices {
		s.Spec.Pool.Generation = 1
		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&s)
		if err != nil {
			t.Fatal(err)
		}
		object["apiVersion"], object["kind"] = "resource.k8s.io/v1", "ResourceSlice"
		out = append(out, object)
	}
	return out
}

// TestDRAOnTheRealKubelet has the real scheduler place claims by the slices that
// internal/dra builds, and the real kubelet prepare them through pkg/dra: what fits runs,
// what does not waits, and a kubelet that restarts finds the driver again. What the real
// kubelet and containerd then say of who has what is what internal/node reads.
func TestDRAOnTheRealKubelet(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepare(t)
	registered := make(chan struct{}, 9)
	driver := &preparer{cdiDir: node.File("/run/cdi"), prepared: map[string]dra.Claim{}}
	b.must(os.MkdirAll(driver.cdiDir, 0o755))
	server, err := dra.New(dra.Options{Name: draDriver, Driver: driver, Dir: node.File("/var/lib/kubelet/plugins_registry"),
		Logger: slog.New(slog.DiscardHandler), Registered: func() { registered <- struct{}{} }})
	b.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	await := func(what string, ok func() error) {
		t.Helper()
		b.must(lab.Await(b.ctx, 2*time.Minute, what, func(context.Context) error { return ok() }))
	}
	isRegistered := func() {
		t.Helper()
		select {
		case <-registered:
		case <-time.After(2 * time.Minute):
			t.Fatal("the kubelet does not register the driver")
		}
	}
	isRegistered()

	published := draSlices(t)
	b.apply(published...)
	const memory = "gpu-memory.example.com"
	classes, err := os.ReadFile(filepath.Join(kit.Root, "deployments", "components", "dra", "classes.yaml"))
	b.must(err)
	_, err = node.Kubectl(b.ctx, bytes.NewReader(classes), "apply", "-f", "-")
	b.must(err)
	t.Cleanup(func() {
		for _, what := range [][]string{{"pods,resourceclaims", "-n", lab.PodNamespace, "-l", "dra=test"}, {"resourceslices", "--field-selector", "spec.driver=" + draDriver}} {
			if _, err := node.Kubectl(context.Background(), nil, append([]string{"delete", "--ignore-not-found"}, what...)...); err != nil {
				t.Error(err)
			}
		}
		if _, err := node.Kubectl(context.Background(), bytes.NewReader(classes), "delete", "--ignore-not-found", "-f", "-"); err != nil {
			t.Error(err)
		}
	})
	// run makes a pod that has a device by its container's resources.
	run := func(name string, resources map[string]any, claims ...any) map[string]any {
		return map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name, "namespace": lab.PodNamespace, "labels": map[string]any{"dra": "test"}}, "spec": map[string]any{
			"terminationGracePeriodSeconds": 1, "resourceClaims": claims,
			"containers": []any{map[string]any{"name": "main", "image": lab.TestImage, "imagePullPolicy": "Never", "command": []any{"/bin/sh", "-c", "trap 'exit 0' TERM; " + lab.Wait}, "resources": resources}}}}
	}
	pod := func(name, class string, gib int) {
		request := map[string]any{"deviceClassName": class}
		if gib > 0 {
			request["capacity"] = map[string]any{"requests": map[string]any{"memory": fmt.Sprintf("%dGi", gib)}}
		}
		of := run(name, map[string]any{"claims": []any{map[string]any{"name": "gpu"}}}, map[string]any{"name": "gpu", "resourceClaimName": name})
		b.apply(map[string]any{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": of["metadata"],
			"spec": map[string]any{"devices": map[string]any{"requests": []any{map[string]any{"name": "gpu", "exactly": request}}}}}, of)
	}
	running := func() []string {
		t.Helper()
		out, err := node.Kubectl(b.ctx, nil, "get", "pods", "-n", lab.PodNamespace, "-l", "dra=test", "-o", `jsonpath={range .items[?(@.status.phase=="Running")]}{.metadata.name} {end}`)
		b.must(err)
		return strings.Fields(string(out))
	}

	// Two instances of half the card, which a pod can also ask for as it asks a device
	// plugin, and shares of 79 GiB. No other test has this kubelet offer this profile: pods
	// that ask for a resource of which it had devices once do not run by a claim.
	pod("dra-a", "mig-3g.71gb.example.com", 0)
	for _, name := range []string{"dra-b", "dra-c"} {
		b.apply(run(name, map[string]any{"limits": map[string]any{"example.com/mig-3g.71gb": "1"}}))
	}
	pod("dra-d", memory, 40)
	pod("dra-e", memory, 39)
	await("what fits runs", func() error {
		if got := running(); len(got) != 4 || !slices.Contains(got, "dra-d") || !slices.Contains(got, "dra-e") {
			return fmt.Errorf("%v run, want the two shares and two of three instances", got)
		}
		return nil
	})
	pod("dra-f", memory, 1)
	if got := driver.names(); len(got) != 4 {
		t.Errorf("prepared: %v", got)
	}
	checkHolders(b, driver)

	// The kubelet wipes the node's slices when it starts, and registers the driver anew.
	b.must(node.RestartKubelet(b.ctx))
	isRegistered()
	await("the slices are gone", func() error {
		out, err := node.Kubectl(b.ctx, nil, "get", "resourceslices", "--field-selector", "spec.driver="+draDriver, "-o", "name")
		b.must(err)
		if len(bytes.TrimSpace(out)) > 0 {
			return fmt.Errorf("there are %s", out)
		}
		return nil
	})
	b.apply(published...)
	await("the kubelet listens to healths", func() error {
		driver.mu.Lock()
		defer driver.mu.Unlock()
		if !driver.watched {
			return errors.New("it has not asked")
		}
		return nil
	})

	// Room that is given back goes to whoever waits for it.
	_, err = node.Kubectl(b.ctx, nil, "delete", "pod,resourceclaim", "dra-d", "-n", lab.PodNamespace)
	b.must(err)
	await("the share that waited runs", func() error {
		if got, names := running(), driver.names(); !slices.Contains(got, "dra-f") || len(names) != 4 || slices.Contains(names, lab.PodNamespace+"/dra-d") {
			return fmt.Errorf("%v run, %v are prepared", got, names)
		}
		return nil
	})
	if got := running(); len(got) != 4 {
		t.Errorf("%v run: beside what fits", got)
	}
}

// checkHolders compares what the container runtime and the kubelet's account of claims say
// with what a driver has prepared, for pods that are named like their claims.
func checkHolders(b *bench, driver *preparer) {
	b.Helper()
	runtime := witness.NewRuntime(witness.RuntimeOptions{Endpoint: node.File("/run/containerd/containerd.sock"), DRA: func() bool { return true }})
	defer runtime.Close()
	containers, err := runtime.Containers(b.ctx)
	b.must(err)
	want, has := driver.keys(), map[string][]string{}
	for _, c := range containers {
		if c.CDIUnknown {
			b.Errorf("the runtime has not told the CDI devices of %+v", c)
		}
		if c.Namespace == lab.PodNamespace && strings.HasPrefix(c.Pod, "dra-") {
			has[c.Pod] = append(has[c.Pod], cdi.Keys(lab.Domain, c.Annotations, c.CDI)...)
		}
	}
	if !reflect.DeepEqual(has, want) {
		b.Errorf("by the runtime, containers have %v, want %v", has, want)
	}
	state, err := witness.ReadDRAState(node.File("/var/lib/kubelet"))
	b.must(err)
	for _, c := range state.Claims {
		devices := c.Devices[draDriver]
		pod, request := podOf(c.Name)
		if len(devices) != 1 || !slices.Equal(devices[0].Requests, []string{request}) || devices[0].Pool != "pool" || len(c.PodUIDs) != 1 ||
			!slices.Equal(cdi.Keys(lab.Domain, nil, devices[0].CDI), want[pod]) || !slices.Equal(want[pod], []string{claimKey(c.UID)}) {
			b.Errorf("the kubelet's account has %+v, want the device of %v", c, want[pod])
		}
		delete(want, pod)
	}
	if len(want) > 0 {
		b.Errorf("the kubelet's account lacks %v", want)
	}
}

// claimPod makes a pod with a claim of its own, of one device of a class, and of so many GiB
// of its memory where that is not zero.
func (b *bench) claimPod(name, class string, gib int) *lab.RunningPod {
	b.Helper()
	b.must(node.CreateClaim(b.ctx, lab.Claim{Name: name, Class: class, GiB: gib}))
	return b.create(lab.Pod{Name: name, Containers: []lab.Container{{Claims: []string{name}}}})
}

// comes waits until a pod runs, for as long as the kubelet takes to try again where the
// driver was not there: 60 to 90 s.
func (b *bench) comes(pod *lab.RunningPod) {
	b.Helper()
	b.must(pod.InState(b.ctx, 4*time.Minute, "to run", func(s lab.PodState) error {
		if s.Phase != "Running" {
			return errors.New(s.String())
		}
		return nil
	}))
}

// prepareDRA is prepare for a test with the agent's component for DRA, which goes with the
// test.
func prepareDRA(t *testing.T) *bench {
	b := prepare(t)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		err := node.DeletePods(ctx)
		if err == nil {
			err = node.DeleteClaims(ctx)
		}
		if err == nil {
			agent, err = deploy(ctx, lab.DeployOptions{Partitions: allShared})
		}
		if err == nil {
			err = node.RemoveComponent(ctx, "dra")
		}
		if err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	var err error
	agent, err = deploy(b.ctx, lab.DeployOptions{Components: []string{"dra"}, Partitions: allShared})
	b.must(err)
	return b
}

// TestResourceClaims is DRA from end to end: the real scheduler places claims by what the
// agent publishes, the real kubelet has it prepare them, and containers have what was
// promised, whatever restarts meanwhile.
func TestResourceClaims(t *testing.T) {
	b := prepareDRA(t)
	b.must(agent.Reset(b.ctx, `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: whole, api: dra}
    - {devices: [2], mode: mig, api: dra}
    - {devices: [3], mode: shared, api: dra}
    - {devices: [4, 5, 6, 7], mode: shared}
`))
	b.state("applied")
	b.offers(map[string]int{lab.Memory: 4 * units})
	soon := func() {
		if testing.Short() { // a kubelet that does not have the driver yet tries again after a minute
			b.lastRegistered()
		}
	}
	soon()

	share, other := b.claimPod("share", "gpu-memory.example.com", 24), b.claimPod("other", "gpu-memory.example.com", 50)
	whole, instance := b.claimPod("whole", "gpu.example.com", 0), b.claimPod("instance", "mig-3g.40gb.example.com", 0)
	for _, pod := range []*lab.RunningPod{share, other, whole, instance} {
		b.comes(pod)
	}
	if got := indexes(b.inside(share, "")); !slices.Equal(got, []int{3}) {
		t.Errorf("a share is of %v", got)
	}
	if got := b.one(b.inside(whole, "")).Index; got > 1 {
		t.Errorf("a whole GPU is %d", got)
	}
	caps := func(s lab.Status) error {
		for pod, want := range map[string]int{"share": 24 << 10, "other": 50 << 10} {
			i := slices.IndexFunc(s.Containers, func(c lab.ContainerStatus) bool { return c.Pod == pod })
			if i < 0 || s.Containers[i].CapMiB == nil || *s.Containers[i].CapMiB != want {
				return fmt.Errorf("%s has not its cap: %v", pod, s.Containers)
			}
		}
		return nil
	}
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "each share has its cap", caps))

	// One more does not fit, and runs as soon as there is room.
	waits := b.claimPod("waits", "gpu-memory.example.com", 20)
	_, err := waits.Unschedulable(b.ctx)
	b.must(err)
	before := b.life(share, whole, instance)
	b.must(agent.Kill(b.ctx))
	soon()
	b.must(other.Delete(b.ctx))
	b.comes(waits)
	was := b.slices()
	b.must(node.RestartKubelet(b.ctx))
	if testing.Short() {
		b.published("the slices are there again", again(was))
	}
	after := b.claimPod("after", "gpu.example.com", 0)
	b.comes(after)
	b.lives(before, share, whole, instance)
}
