// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	door "example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
)

var long = flag.Bool("long", false, "as often as the soak wants it")

const (
	model = "A100-SXM4-80GB"
	units = "example.com/gpu-mem"
	small = "example.com/mig-1g.10gb"
	large = "example.com/mig-3g.40gb"
	// offered is how many units there are: of two GPUs.
	offered = 2 * 79
)

// readies is the controller that lets pods on a Node once it is ready: a virtual one says so itself.
const readies = "node-lifecycle-controller"

// lending is a provider with GPUs and a placer, and two consumers.
type lending struct {
	// t is that of the test as a whole, with which what its parts start ends.
	t                     *testing.T
	provider, rome, milan *cluster
	node                  *hollow.Node
	program               string
	placer                *plane.Placer
}

// The placer's door, with Liqo's real controllers on both sides, and hollow nodes with the GPUs.
func TestLending(t *testing.T) {
	l := &lending{t: t}
	l.start(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"a consumer is granted what it asks for, and its virtual node shows it", l.grant},
		{"more than there is is denied with the reason", l.deny},
		{"Liqo's own class grants anything, which is reported", l.bypass},
		{"a consumer does not grant itself anything", l.itself},
		{"two consumers never get one unit twice, the placer killed in between", l.two},
		{"status writes beside Liqo's lose nothing", l.writes},
		{"a re-cut shows on the virtual node, a profile that went as zero", l.recut},
		{"a cordoned tenant keeps what it has and gets no more", l.cordon},
		{"a drained tenant stays drained", l.drain},
	} {
		if !t.Run(test.name, test.run) {
			return
		}
	}
}

// start starts all of it.
func (l *lending) start(t *testing.T) {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	program(t, "liqoctl") // skips
	l.program = plane.Program(t, "gpu-agent")
	began := time.Now()
	l.provider = start(t, "here")
	l.provider.kubectl(t, "", "apply", "--server-side", "-f", "../../deployments/base/crd.yaml")
	l.provider.kubectl(t, manifests(t), "apply", "--server-side", "-f", "-")
	address := plane.FreeAddress(t)
	l.node = hollow.Start(t, l.provider.Server, hollow.Options{Name: "gpu-1", Model: model, GPUs: 3, Agent: l.program, Kubelet: "v1.36.3", Args: []string{"--node-labels", "api"},
		Entries: []string{"{devices: [0, 1], mode: shared}", "{devices: [2], mode: mig, geometry: {1g.10gb: 7}}"}})
	l.provider.patch(t, "/api/v1/nodes/gpu-1", fields{"metadata": fields{"labels": fields{"example.com/gpu.node": "true"}}, "spec": fields{"taints": nil}})
	ctx, cancel := context.WithCancel(t.Context())
	var kubelet sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		kubelet.Wait()
	})
	kubelet.Go(func() {
		for ctx.Err() == nil {
			if _, err := l.node.Sync(t); err != nil && ctx.Err() == nil {
				t.Errorf("the kubelet: %v", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	l.provider.SchedulerAsking(t, "../../deployments/placer/scheduler-config.yaml", address, 0)
	l.startPlacer(address)
	l.provider.Await(t, "the node offers its GPUs", func() error { return l.provider.allocatable(t, "gpu-1", map[string]int{units: offered, small: 7}) })

	l.rome, l.milan = start(t, "rome", readies), start(t, "milan")
	l.rome.Scheduler(t, 0)
	l.rome.peer(t, l.provider)
	l.milan.peer(t, l.provider)
	t.Logf("three clusters with Liqo, peered: %.0f s", time.Since(began).Seconds())
}

func (l *lending) startPlacer(address string) {
	l.t.Helper()
	account := fields{"as": "system:serviceaccount:gpu-placer:gpu-placer", "as-groups": []string{"system:authenticated"}}
	l.placer = l.provider.StartPlacer(l.t, plane.Program(l.t, "gpu-placer"), l.provider.Kubeconfig(l.t, account), address, "--doors=extender,liqo", "--lease=")
}

// manifests are those of the placer with its door for Liqo.
func manifests(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	here, err := filepath.Abs("../../deployments")
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(dir, here) // kubectl takes no absolute path
	if err == nil {
		text := fmt.Sprintf("resources: [%s/placer]\ncomponents: [%[1]s/placer/liqo]\n", up)
		err = os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), plane.Program(t, "kubectl"), "kustomize", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl kustomize: %v\n%s", err, out)
	}
	return string(out)
}

// allocatable compares what a Node has to give, of the resources that are named.
func (c *cluster) allocatable(t *testing.T, node string, want map[string]int) error {
	var is corev1.Node
	if err := c.get(t, "/api/v1/nodes/"+node, &is); err != nil {
		return err
	}
	for name, n := range want {
		has, there := is.Status.Allocatable[corev1.ResourceName(name)]
		if !there || has.Value() != int64(n) {
			return fmt.Errorf("%s has %s of %s (there: %t), want %d", node, has.String(), name, there, n)
		}
	}
	return nil
}

func (l *lending) grant(t *testing.T) {
	r := l.rome.askAsDocumented(t, l.provider)
	r.answered(t, units, 40, "Accepted Granted", "40 of "+units)
	r.change(t, small, 2)
	r.answered(t, small, 2, "Accepted Granted", "2 of "+small)
	l.rome.startVirtualKubelet(l.t, l.provider.id, "gpus")
	l.rome.Await(t, "the virtual node has what was granted", func() error {
		return l.rome.allocatable(t, "gpus", map[string]int{units: 40, small: 2})
	})
	var virtual, real corev1.Node
	if err := errors.Join(l.rome.get(t, "/api/v1/nodes/gpus", &virtual), l.provider.get(t, "/api/v1/nodes/gpu-1", &real)); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"gpu.model", "gpu.memory", "gpu.mode", "gpu.driver-version", "gpu.cuda-version"} {
		key = "example.com/" + key
		if got, want := virtual.Labels[key], real.Labels[key]; got != want || want == "" {
			t.Errorf("the virtual node has the label %s=%q, the node %q", key, got, want)
		}
	}
	t.Run("a pod of the consumer's runs on the provider's node", l.offload)
}

// offload sends a pod through the virtual node.
func (l *lending) offload(t *testing.T) {
	l.rome.create(t, "/api/v1/namespaces", fields{"metadata": fields{"name": "train"}})
	liqoctl(t, "offload", "namespace", "train", "--kubeconfig", l.rome.as(t, "", ""), "--namespace-mapping-strategy", "EnforceSameName", "--pod-offloading-strategy", "Remote")
	amount := fields{units: "24", "cpu": "100m", "memory": "100Mi"}
	pod := fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": "job"}, "spec": fields{"automountServiceAccountToken": false,
		"containers": []fields{{"name": "main", "image": "none", "resources": fields{"limits": amount, "requests": amount}}}}}
	l.rome.Await(t, "pods can be made", func() error { return l.rome.get(t, "/api/v1/namespaces/train/serviceaccounts/default", nil) })
	l.rome.create(t, "/api/v1/namespaces/train/pods", pod)
	var here corev1.Pod
	l.provider.Await(t, "the scheduler binds the pod to the provider's node", func() error {
		if err := l.provider.get(t, "/api/v1/namespaces/train/pods/job", &here); err != nil {
			return err
		}
		if here.Spec.NodeName != "gpu-1" {
			return fmt.Errorf("it is on %q: %+v", here.Spec.NodeName, here.Status.Conditions)
		}
		return nil
	})
	if quota := door.QuotaOf(&here); quota == "" {
		t.Errorf("the pod is not known as the consumer's: labels %v, owners %v", here.Labels, here.OwnerReferences)
	}
	if got := here.Spec.Containers[0].Resources.Limits[units]; got.Value() != 24 {
		t.Errorf("the pod asks for %s units here", got.String())
	}
	p := fakes.Pod{UID: string(here.UID), Namespace: "train", Name: "job"}
	if err := l.node.Admit(t.Context(), p, map[string]int{units: 24}); err != nil {
		t.Fatal(err)
	}
	if err := l.provider.Do(t, nil, http.MethodPatch, "/api/v1/namespaces/train/pods/job/status", plane.Strategic, fields{"status": l.node.Status(p)}, nil); err != nil {
		t.Fatal(err)
	}
	l.rome.Await(t, "the consumer's pod runs", func() error {
		var pod corev1.Pod
		err := l.rome.get(t, "/api/v1/namespaces/train/pods/job", &pod)
		if err == nil && pod.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("it is %s: %+v", pod.Status.Phase, pod.Status)
		}
		return err
	})
}

func (l *lending) deny(t *testing.T) {
	r := l.rome.ask(t, l.provider, "more", door.Class, true, map[string]int{units: 200})
	r.answered(t, units, 0, "Denied NoRoom", "asked for 200 of "+units+": 118 are available now beyond those of pods and other clusters")
	if err := l.rome.get(t, offloading+"/namespaces/liqo-tenant-here/virtualnodes/more", nil); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("there is a virtual node for it: %v", err)
	}
	r.remove(t)
}

// remove takes a request back, and waits until the provider has heard of it.
func (r request) remove(t *testing.T) {
	t.Helper()
	if err := r.consumer.Do(t, nil, http.MethodDelete, r.here(), "", nil, nil); err != nil {
		t.Fatal(err)
	}
	r.provider.Await(t, r.name+" is gone", func() error {
		if err := r.provider.get(t, r.there(), nil); err == nil || !strings.Contains(err.Error(), "not found") {
			return fmt.Errorf("it is there, or not known: %v", err)
		}
		return nil
	})
}

func (l *lending) bypass(t *testing.T) {
	r := l.rome.ask(t, l.provider, "free", "default", false, map[string]int{units: 500})
	r.answered(t, units, 500, "Accepted ResourceSliceResourcesAccepted", "")
	l.counts(t, "bypassing", 1)
	r.remove(t)
	l.counts(t, "bypassing", 0)
}

func (l *lending) counts(t *testing.T, state string, want float64) {
	t.Helper()
	l.provider.Await(t, fmt.Sprintf("the placer counts %v slices as %s", want, state), func() error {
		if n := l.placer.Metric(t, fmt.Sprintf("gpu_agent_placer_liqo_slices{state=%q}", state)); n != want {
			return fmt.Errorf("it counts %v", n)
		}
		return nil
	})
}

// itself has a consumer write the status of its slice at the provider, with the very
// credentials that Liqo has given it, and which let it replicate its slices.
func (l *lending) itself(t *testing.T) {
	r := request{l.rome, l.provider, "gpus"}
	var secrets corev1.SecretList
	if err := l.rome.get(t, "/api/v1/namespaces/liqo-tenant-here/secrets", &secrets); err != nil {
		t.Fatal(err)
	}
	kubeconfig := ""
	for _, s := range secrets.Items {
		if s.Labels["liqo.io/identity-type"] == "ControlPlane" {
			kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
			if err := os.WriteFile(kubeconfig, s.Data["kubeconfig"], 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if kubeconfig == "" {
		t.Fatalf("%d secrets, and none with the credentials of the control plane", len(secrets.Items))
	}
	as := func(patch, what string) string {
		out, err := exec.CommandContext(t.Context(), plane.Program(t, "kubectl"), "--kubeconfig", kubeconfig, "--namespace", "liqo-tenant-rome",
			"patch", "resourceslices.authentication.liqo.io", r.name, "--type=merge", "--patch", patch, "--subresource="+what).CombinedOutput()
		if err == nil {
			return ""
		}
		return string(out)
	}
	for _, test := range []struct{ what, subresource, patch, want string }{
		{"more units", "status", `{"status":{"resources":{"` + units + `":"150"}}}`, "is for the GPU placer to say"},
		{"labels", "status", `{"status":{"nodeLabels":{"a":"b"}}}`, "is for the GPU placer to say"},
		{"that it was accepted", "status", `{"status":{"conditions":[]}}`, "is for the GPU placer to say"},
		// It may write the rest, or the test would not show why it may not write these.
		{"storage classes", "status", `{"status":{"storageClasses":[{"storageClassName":"a"}]}}`, ""},
		{"storage classes away", "status", `{"status":{"storageClasses":null}}`, ""},
	} {
		if got := as(test.patch, test.subresource); (test.want == "") != (got == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", test.what, got, test.want)
		}
	}
	r.answered(t, units, 40, "Accepted Granted", "40 of "+units)
}

// ledger sums what is granted in each version of the API server's history.
type ledger struct {
	mu      sync.Mutex
	granted map[string]int
	// most and writes are the largest sum there was, and how many changes made it.
	most, writes int
}

func (b *ledger) see(event string, s slice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if event == "DELETED" || s.Spec.Class != door.Class {
		delete(b.granted, s.Metadata.UID)
		return
	}
	before := b.granted[s.Metadata.UID]
	if b.granted[s.Metadata.UID] = s.has(units); before != s.has(units) {
		b.writes++
	}
	sum := 0
	for _, n := range b.granted {
		sum += n
	}
	b.most = max(b.most, sum)
}

// together does two things at the same moment.
func together(t *testing.T, one, other func() error) {
	t.Helper()
	failed := make(chan error, 1)
	go func() { failed <- other() }()
	if err := errors.Join(one(), <-failed); err != nil {
		t.Fatal(err)
	}
}

// two has two consumers change places again and again: one wants what the other has, and they
// ask at the same moment. What is granted is read from the history of the API server.
func (l *lending) two(t *testing.T) {
	rounds := 4
	if *long {
		rounds = 100
	}
	rome := request{l.rome, l.provider, "gpus"}
	milan := l.milan.ask(t, l.provider, "gpus-milan", door.Class, false, map[string]int{units: 118})
	milan.answered(t, units, 118, "Accepted Granted", "")
	book := &ledger{granted: map[string]int{}}
	l.provider.following(t, book.see)
	random := rand.New(rand.NewPCG(1, 2))
	few, many := 40, 118
	for range rounds {
		few, many = many, few
		together(t, func() error { return rome.wants(t, units, few) }, func() error { return milan.wants(t, units, many) })
		// Anywhere in between: before it has heard, while it writes, when all is done.
		time.Sleep(time.Duration(random.IntN(400)) * time.Millisecond)
		l.placer.Kill()
		l.startPlacer(l.placer.Door)
		rome.answered(t, units, few, "Accepted Granted", "")
		milan.answered(t, units, many, "Accepted Granted", "")
	}
	book.mu.Lock()
	defer book.mu.Unlock()
	if book.most > offered {
		t.Errorf("of %d units %d were granted at one moment", offered, book.most)
	}
	if book.most != offered || book.writes < 2*rounds {
		t.Errorf("the test has seen too little: at most %d units granted, %d changes", book.most, book.writes)
	}
	t.Logf("%d times, %d changes of what is granted, never more than %d of %d units", rounds, book.writes, book.most, offered)
	rome.change(t, units, 40)
	rome.answered(t, units, 40, "Accepted Granted", "")
}

// writes has Liqo and the placer write one slice's status at the same moment, each something
// that it alone writes. What Liqo writes is where the provider is reached, which it takes from the Tenant.
func (l *lending) writes(t *testing.T) {
	rounds := 25
	if *long {
		rounds = 200
	}
	r := request{l.milan, l.provider, "gpus-milan"}
	tenant := authentication + "/namespaces/liqo-tenant-milan/tenants/milan"
	seen := 0
	var mu sync.Mutex
	l.provider.following(t, func(_ string, s slice) {
		if s.Metadata.Name == r.name {
			mu.Lock()
			defer mu.Unlock()
			seen++
		}
	})
	for i := range rounds {
		proxy, n := fmt.Sprintf("http://proxy-%d", i), 20+i%90
		together(t, func() error { return r.wants(t, units, n) }, func() error {
			return l.provider.Do(t, nil, http.MethodPatch, tenant, plane.Merge, fields{"spec": fields{"proxyURL": proxy}}, nil)
		})
		r.answered(t, units, n, "Accepted Granted", fmt.Sprintf("%d of %s", n, units))
		l.provider.Await(t, "Liqo's write is there too", func() error {
			var s slice
			if err := l.provider.get(t, r.there(), &s); err != nil {
				return err
			}
			if s.Status.AuthParams == nil || s.Status.AuthParams.ProxyURL != proxy || s.has(units) != n || len(s.Status.Conditions) != 2 {
				return fmt.Errorf("%+v", s.Status)
			}
			return nil
		})
	}
	mu.Lock()
	defer mu.Unlock()
	if seen < 3*rounds {
		t.Errorf("%d versions of the slice in %d rounds: spec, Liqo's status and the placer's are three each", seen, rounds)
	}
	t.Logf("%d rounds, %d versions of the slice", rounds, seen)
	r.change(t, units, 50)
	r.answered(t, units, 50, "Accepted Granted", "")
}

func (l *lending) recut(t *testing.T) {
	r := request{l.rome, l.provider, "gpus"}
	if err := l.node.Partition([]string{"{devices: [0, 1], mode: shared}", "{devices: [2], mode: mig, geometry: {3g.40gb: 2}}"}); err != nil {
		t.Fatal(err)
	}
	r.answered(t, small, 0, "Accepted Reduced", "0 of "+small+" (asked for 2)")
	r.answered(t, units, 40, "Accepted Reduced", "")
	l.rome.Await(t, "the virtual node shows that the profile has gone", func() error {
		return l.rome.allocatable(t, "gpus", map[string]int{units: 40, small: 0})
	})
	// What it offers now can be had.
	r.change(t, small, 0)
	r.change(t, large, 1)
	r.answered(t, large, 1, "Accepted Granted", "1 of "+large)
	l.rome.Await(t, "the virtual node shows the new profile", func() error {
		return l.rome.allocatable(t, "gpus", map[string]int{units: 40, small: 0, large: 1})
	})
}

func (l *lending) cordon(t *testing.T) {
	liqoctl(t, "cordon", "--skip-confirm", "tenant", "milan", "--kubeconfig", l.provider.as(t, "", ""))
	r := request{l.milan, l.provider, "gpus-milan"}
	r.answered(t, units, 50, "Accepted Granted", "")
	r.change(t, units, 60)
	r.answered(t, units, 50, "Accepted NotMore", "50 of "+units+" (asked for 60)")
	late := l.milan.ask(t, l.provider, "late", door.Class, false, map[string]int{units: 1})
	late.answered(t, units, 0, "Denied ResourceSliceResourcesDenied", "")
	liqoctl(t, "uncordon", "--skip-confirm", "tenant", "milan", "--kubeconfig", l.provider.as(t, "", ""))
	r.answered(t, units, 60, "Accepted Granted", "")
	late.answered(t, units, 1, "Accepted Granted", "")
}

func (l *lending) drain(t *testing.T) {
	var before map[string]any
	r := request{l.milan, l.provider, "gpus-milan"}
	if err := l.provider.get(t, r.there(), &before); err != nil {
		t.Fatal(err)
	}
	liqoctl(t, "drain", "--skip-confirm", "tenant", "milan", "--kubeconfig", l.provider.as(t, "", ""))
	l.provider.Await(t, "Liqo takes the tenant's slices away", func() error {
		if err := l.provider.get(t, r.there(), nil); err == nil || !strings.Contains(err.Error(), "not found") {
			return fmt.Errorf("it is there, or not known: %v", err)
		}
		return nil
	})
	// What it had is free for others.
	rome := request{l.rome, l.provider, "gpus"}
	rome.change(t, units, offered)
	rome.answered(t, units, offered, "Accepted Granted", "")
	rome.change(t, units, 40)
	rome.answered(t, units, 40, "Accepted Granted", "")

	// A slice of the tenant's that comes all the same, as one would that was on its way: Liqo
	// denies it, and the placer leaves it at that, a new process too.
	again := fields{"apiVersion": "authentication.liqo.io/v1beta1", "kind": "ResourceSlice", "spec": before["spec"],
		"metadata": fields{"name": r.name, "labels": before["metadata"].(map[string]any)["labels"]}}
	l.provider.create(t, strings.TrimSuffix(r.there(), "/"+r.name), again)
	denied := func() error {
		var s slice
		if err := l.provider.get(t, r.there(), &s); err != nil {
			return err
		}
		if is, _ := s.says("Resources"); s.has(units) != 0 || is != "Denied ResourceSliceResourcesDenied" {
			return fmt.Errorf("it has %d, %s", s.has(units), is)
		}
		return nil
	}
	l.provider.Await(t, "Liqo denies it", denied)
	l.placer.Kill()
	l.startPlacer(l.placer.Door)
	// The placer has looked at all slices once it answers another one anew.
	rome.change(t, units, 41)
	rome.answered(t, units, 41, "Accepted Granted", "")
	if err := denied(); err != nil {
		t.Error(err)
	}
	l.counts(t, "denied", 1)
}
