// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/extender"
	"example.com/gpu-agent/internal/fleet"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/placerkube"
	"example.com/gpu-agent/internal/kueue"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/obs/placerobs"
	"example.com/gpu-agent/tests/plane"
)

const (
	placer          = "gpu-placer" // of everything, its namespace included
	schedulerConfig = "placer/scheduler-config.yaml"
)

func TestPlacersRBACIsWhatItUses(t *testing.T) {
	for _, test := range []struct {
		dir, name string
		uses      []kube.Rule
	}{
		{"placer", placer, placerkube.Rules},
		{"placer/liqo", placer + "-liqo", placerkube.LiqoRules},
		{"placer/kueue", placer + "-kueue", placerkube.KueueRules},
	} {
		have := grants(t, resources(t, test.dir), test.name, placer)
		var want []rule
		for _, r := range test.uses {
			resource := r.Resource
			if r.APIGroup != "" {
				resource += "." + r.APIGroup
			}
			want = append(want, rule{resource, strings.Join(r.Verbs, " "), r.Cluster})
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s grants\n%+v\nplacerkube uses\n%+v", test.dir, have, want)
		}
	}
}

// deployment has what the manifest uses.
type deployment struct {
	header `yaml:",inline"`
	Spec   struct {
		Replicas int
		Strategy struct {
			Type          string
			RollingUpdate struct {
				MaxUnavailable string `yaml:"maxUnavailable"`
				MaxSurge       int    `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		}
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		Template struct {
			Metadata metadata
			Spec     yaml.Node
		}
	}
}

// The placer's pod has nothing of the host, and the program's ports, pages and flags.
func TestPlacersDeployment(t *testing.T) {
	objects := resources(t, "placer")
	d := as[deployment](t, one(t, objects, "Deployment", placer))
	if d.Spec.Replicas != 2 || d.Spec.Strategy.RollingUpdate.MaxUnavailable != "100%" || !maps.Equal(d.Spec.Selector.MatchLabels, d.Spec.Template.Metadata.Labels) {
		t.Errorf("%+v", d.Spec)
	}
	var spec struct {
		ServiceAccountName           string `yaml:"serviceAccountName"`
		AutomountServiceAccountToken *bool  `yaml:"automountServiceAccountToken"`
		HostPID, HostIPC             bool
		HostNetwork                  bool `yaml:"hostNetwork"`
		Containers                   []container
		Volumes                      []map[string]any
	}
	if err := d.Spec.Template.Spec.Decode(&spec); err != nil {
		t.Fatal(err)
	}
	one(t, objects, "ServiceAccount", spec.ServiceAccountName)
	if len(spec.Containers) != 1 || len(spec.Volumes) != 2 || spec.Volumes[0]["projected"] == nil || spec.Volumes[1]["secret"] == nil || spec.HostPID || spec.HostIPC || spec.HostNetwork ||
		spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken {
		t.Errorf("%+v", spec)
	}
	c := spec.Containers[0]
	if !slices.Equal(c.Args, []string{"run"}) || !c.SecurityContext.ReadOnlyRootFilesystem || c.SecurityContext.Privileged {
		t.Errorf("%+v", c)
	}
	flags := placerFlags(t)
	var ports []string
	for _, p := range c.Ports {
		ports = append(ports, fmt.Sprintf("%s :%d", p.Name, p.ContainerPort))
	}
	if want := []string{"extender " + flags["listen"], "http " + flags["http"]}; !slices.Equal(ports, want) {
		t.Errorf("ports %q, and the program has %q", ports, want)
	}
	if want := strings.ReplaceAll(flags["lease"], placer+"/", "$(POD_NAMESPACE)/"); c.env()["GPU_PLACER_LEASE"] != want {
		t.Errorf("the lease is %s, want %s", c.env()["GPU_PLACER_LEASE"], want)
	}
	for flag, file := range map[string]string{"TLS_CERT_FILE": extender.CertFile, "TLS_KEY_FILE": extender.KeyFile, "CLIENT_CA_FILE": extender.CAFile} {
		if have, want := c.env()["GPU_PLACER_"+flag], c.VolumeMounts[1].MountPath+"/"+file; have != want {
			t.Errorf("%s is %s, want %s, which `gpu-placer certificates` makes", flag, have, want)
		}
		if name := strings.ReplaceAll(strings.ToLower(flag), "_", "-"); !maps.Equal(map[string]string{name: flags[name]}, map[string]string{name: ""}) {
			t.Errorf("--%s has the default %q", name, flags[name])
		}
	}
	good := func() error { return nil }
	metrics := placerobs.NewMetrics("test", func() placerobs.State { return placerobs.State{} }, nil, nil, nil, nil)
	pages := obs.New(obs.Options{Logger: slog.New(slog.DiscardHandler), Healthy: good, Ready: good, Metrics: metrics.Registry()}).Handler()
	for path, p := range map[string]probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
		answer := httptest.NewRecorder()
		pages.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, p.HTTPGet.Path, nil))
		if p.HTTPGet.Path != path || p.HTTPGet.Port != "http" || answer.Code != http.StatusOK {
			t.Errorf("probe %+v: %d", p, answer.Code)
		}
	}
}

// What kube-scheduler is shown has every resource of an agent's, and kube-scheduler takes it.
func TestShownSchedulerConfiguration(t *testing.T) {
	var config struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Percentage int `yaml:"percentageOfNodesToScore"`
		Extenders  []struct {
			URL         string `yaml:"urlPrefix"`
			Filter      string `yaml:"filterVerb"`
			Preempt     string `yaml:"preemptVerb"`
			Ignorable   bool
			Timeout     string `yaml:"httpTimeout"`
			NodesByName bool   `yaml:"nodeCacheCapable"`
			HTTPS       bool   `yaml:"enableHTTPS"`
			TLS         struct {
				CA   string `yaml:"caFile"`
				Cert string `yaml:"certFile"`
				Key  string `yaml:"keyFile"`
			} `yaml:"tlsConfig"`
			ManagedOfItems []struct {
				Name    string
				Ignored bool `yaml:"ignoredByScheduler"`
			} `yaml:"managedResources"`
		}
	}
	text := read(t, schedulerConfig)
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&config); err != nil || len(config.Extenders) != 1 {
		t.Fatal(err, config)
	}
	e := config.Extenders[0]
	if config.Percentage != 100 || !e.Ignorable || e.Timeout != "250ms" || !e.NodesByName || e.Filter != "filter" || e.Preempt != "preempt" {
		t.Errorf("%+v", config)
	}
	if want := "https://" + placer + "." + placer + ".svc" + placerFlags(t)["listen"]; e.URL != want || !e.HTTPS {
		t.Errorf("the placer is at %s, want %s", e.URL, want)
	}
	for have, want := range map[string]string{e.TLS.CA: extender.CAFile, e.TLS.Cert: extender.SchedulerCertFile, e.TLS.Key: extender.SchedulerKeyFile} {
		if filepath.Base(have) != want {
			t.Errorf("the scheduler reads %s, want %s, which `gpu-placer certificates` makes", have, want)
		}
	}
	domain := programFlags(t)["domain"]
	want := []string{domain + "/gpu", domain + "/gpu-mem", domain + "/gpu.shared"}
	for _, m := range regexp.MustCompile(`extendedResourceName: (\S+/mig-\S+)`).FindAllStringSubmatch(string(read(t, classesFile)), -1) {
		want = append(want, m[1])
	}
	var have []string
	for _, r := range e.ManagedOfItems {
		if have = append(have, r.Name); r.Ignored {
			t.Errorf("the scheduler does not count %s", r.Name)
		}
	}
	if !slices.Equal(have, want) {
		t.Errorf("the scheduler asks for\n%q\nthe agents have\n%q", have, want)
	}

	program := plane.Program(t, "kube-scheduler")
	dir := t.TempDir()
	files, err := extender.Certificates([]string{"placer"}, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for file, data := range files {
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	text = bytes.ReplaceAll(text, []byte(filepath.Dir(e.TLS.CA)), []byte(dir))
	kubeconfig, shown, taken := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "shown"), filepath.Join(dir, "taken")
	for path, text := range map[string]string{
		kubeconfig: `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: u, user: {}}]}`,
		shown:      string(text) + fmt.Sprintf("\nclientConnection: {kubeconfig: %q}\n", kubeconfig),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), program, "--config", shown, "--write-config-to", taken).CombinedOutput(); err != nil {
		t.Errorf("kube-scheduler: %v\n%s", err, out)
	}
	if strings.Count(string(read(t, taken)), "name: "+domain+"/") != len(want) {
		t.Errorf("kube-scheduler has made of it:\n%s", read(t, taken))
	}
}

// The flags and metrics of the placer are in the docs.
func TestDocsNameThePlacersFlagsAndMetrics(t *testing.T) {
	text := string(read(t, "../docs/placer.md"))
	if have, want := names("(?m)^\\| `--([a-z-]+)", text), slices.Sorted(maps.Keys(placerFlags(t))); !slices.Equal(have, want) {
		t.Errorf("the docs have the flags\n%q, the program\n%q", have, want)
	}
	if have, want := names("(?m)^\\| `(gpu_agent_\\w+)", text), names(`(?m)^# HELP (gpu_agent_\w+)`, placerPage(t)); !slices.Equal(have, want) {
		t.Errorf("the docs have the metrics\n%q, the program\n%q", have, want)
	}
}

// placerPage is a placer's /metrics with every metric.
func placerPage(t *testing.T) string {
	t.Helper()
	metrics := placerobs.NewMetrics("test", func() placerobs.State { return placerobs.State{} }, []string{"filter"}, []string{"placed"}, liqo.States, kueue.States)
	metrics.APIError("list", "pods")
	metrics.APIAnswered()
	metrics.Expires(time.Now())
	return page(t, obs.New(obs.Options{Logger: slog.New(slog.DiscardHandler), Metrics: metrics.Registry()}))
}

// asPlacer is the placer's service account.
func asPlacer() map[string]any {
	return fields{"as": "system:serviceaccount:" + placer + ":" + placer, "as-groups": []string{"system:authenticated"}}
}

// The placer's rights suffice for all that it does, and the policy for nothing else: with the
// base's policies beside it, which are not about it.
func TestPlacerAtTheAPIServer(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	for _, o := range render(t, "placer") {
		s.apply(t, o, false)
	}
	s.namespace(t, "train")
	s.do(t, nil, http.MethodPatch, "/api/v1/nodes/node-1", merge, fields{"metadata": fields{"annotations": fields{"a": "b"}}}, nil)

	cluster, err := placerkube.New(kube.Options{Kubeconfig: s.Kubeconfig(t, asPlacer()), Domain: "example.com", Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	t.Cleanup(func() { cancel(); done.Wait() })
	books := fleet.New("example.com", time.Now)
	done.Go(func() { cluster.Watch(ctx, books) })
	if err := books.WaitListed(ctx); err != nil {
		t.Fatal(err)
	}
	t.Run("follows pods", func(t *testing.T) { s.tryPlacersPods(t, ctx, books) })
	t.Run("wakes", func(t *testing.T) {
		s.await(t, "the placer may write its annotation", func() error { return cluster.Wake(ctx, "node-1") })
		var node struct {
			Metadata struct{ Annotations map[string]string }
		}
		if err := s.do(t, nil, http.MethodGet, "/api/v1/nodes/node-1", "", nil, &node); err != nil || node.Metadata.Annotations["a"] != "b" || node.Metadata.Annotations["example.com/"+placerkube.RoomAnnotation] == "" {
			t.Errorf("%v, %v", node, err)
		}
	})
	t.Run("leads", func(t *testing.T) { tryLeases(t, cluster) })

	as := http.Header{"Impersonate-User": {"system:serviceaccount:" + placer + ":" + placer}, "Impersonate-Group": {"system:authenticated"}}
	s.await(t, "the policy is in force", func() error {
		if err := s.do(t, as, http.MethodPatch, "/api/v1/nodes/node-1?dryRun=All", merge, fields{"metadata": fields{"labels": fields{"a": "b"}}}, nil); err == nil || !strings.Contains(err.Error(), "nothing of a Node but") {
			return fmt.Errorf("it may write a label: %v", err)
		}
		return nil
	})
	annotate := func(key string, value any) fields {
		return fields{"metadata": fields{"annotations": fields{key: value}}}
	}
	const node, room, own, only, forbidden = "/api/v1/nodes/node-2", "example.com/gpu.room", "no annotation but its own", "nothing of a Node but an annotation", "forbidden"
	const now = "2026-01-02T03:04:05.678Z"
	s.try(t, as, []try{
		{"that there is room", http.MethodPatch, node, merge, annotate(room, now), ""},
		{"once more", http.MethodPatch, node, merge, annotate(room, "2026-01-02T03:04:06.678Z"), ""},
		{"nothing", http.MethodPatch, node, merge, fields{}, ""},
		{"a text", http.MethodPatch, node, merge, annotate(room, "now"), "is a time"},
		{"a long text", http.MethodPatch, node, merge, annotate(room, now+strings.Repeat(" ", 99)), "is a time"},
		{"away", http.MethodPatch, node, merge, annotate(room, nil), own},
		{"another annotation", http.MethodPatch, node, merge, annotate("example.com/gpu.cordon", "all"), own},
		{"what keeps it from being scaled down", http.MethodPatch, node, merge, annotate("cluster-autoscaler.kubernetes.io/scale-down-disabled", "true"), own},
		{"a label", http.MethodPatch, node, merge, fields{"metadata": fields{"labels": fields{"example.com/gpu.partition": "x"}}}, only},
		{"a cordon", http.MethodPatch, node, merge, fields{"spec": fields{"unschedulable": true}}, only},
		{"a taint", http.MethodPatch, node, merge, fields{"spec": fields{"taints": []fields{aTaint("a", "NoExecute")}}}, only},
		{"a finalizer", http.MethodPatch, node, merge, fields{"metadata": fields{"finalizers": []string{"example.com/x"}}}, only},
		{"the status", http.MethodPatch, node + "/status", merge, fields{"status": fields{"allocatable": fields{"cpu": "1"}}}, forbidden},
		{"a Node away", http.MethodDelete, node, "", nil, forbidden},
		{"a GPUNode", http.MethodPost, gpuNodes, asJSON, aGPUNode("node-2"), forbidden},
		{"a pod away", http.MethodDelete, "/api/v1/namespaces/train/pods/one", "", nil, forbidden},
		{"a Secret", http.MethodGet, "/api/v1/namespaces/" + placer + "/secrets/x", "", nil, forbidden},
		{"another Lease", http.MethodGet, "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler", "", nil, forbidden},
	})
	// The namespace takes the pod of the Deployment, and none with more rights.
	var made struct{ Spec struct{ Template fields } }
	if err := s.do(t, nil, http.MethodGet, fmt.Sprintf(places["Deployment"], placer)+"/"+placer, "", nil, &made); err != nil {
		t.Fatal(err)
	}
	pod := made.Spec.Template
	pod["apiVersion"], pod["kind"] = "v1", "Pod"
	pod["metadata"].(fields)["name"] = "p"
	pod["spec"].(fields)["priorityClassName"] = ""
	if err := s.do(t, nil, http.MethodPost, fmt.Sprintf(places["Pod"], placer)+"?dryRun=All", asJSON, pod, nil); err != nil {
		t.Error(err)
	}
	pod["spec"].(fields)["hostNetwork"] = true
	if err := s.do(t, nil, http.MethodPost, fmt.Sprintf(places["Pod"], placer)+"?dryRun=All", asJSON, pod, nil); err == nil || !strings.Contains(err.Error(), "PodSecurity") {
		t.Errorf("a pod on the host's network: %v", err)
	}
}

// tryPlacersPods makes a node known, and binds a pod that nobody placed; one that has ended is
// not there any more.
func (s *apiServer) tryPlacersPods(t *testing.T, ctx context.Context, books *fleet.Fleet) {
	told := make(chan fleet.Unguarded, 10)
	books.TellUnguarded(func(u fleet.Unguarded) { told <- u })
	ask := func(name string) *corev1.Pod {
		var pod corev1.Pod
		err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/train/pods", asJSON, fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name},
			"spec": fields{"automountServiceAccountToken": false, "containers": []fields{{"name": "main", "image": "none", "resources": fields{"limits": fields{"example.com/gpu": "1"}}}}}}, &pod)
		if err != nil {
			t.Fatal(err)
		}
		return &pod
	}
	s.create(t, gpuNodes, aGPUNode("node-1"))
	status := fields{"summary": fields{"gpus": 1, "unhealthy": 0, "saturationPercent": 0}, "holdersIn": "Pods",
		"conditions": []fields{{"type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}},
		"gpus": []fields{{"uuid": "GPU-00000000-0000-0000-0000-000000000001", "index": 0, "model": "M", "memoryMiB": 81920, "mode": "whole", "api": "device-plugin",
			"resource": "example.com/gpu", "kind": "whole", "total": 1, "free": 1, "largest": 1,
			"conditions": []fields{{"type": "Healthy", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}, {"type": "Available", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}}}
	if err := s.do(t, nil, http.MethodPatch, gpuNodes+"/node-1/status", merge, fields{"status": status}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/node-1/status", strategic, fields{"status": fields{"conditions": []fields{{"type": "Ready", "status": "True"}}}}, nil); err != nil {
		t.Fatal(err)
	}
	one := ask("one")
	s.await(t, "the node can take a pod", func() error {
		on, refused, err := books.Place(ctx, string(one.UID), []string{"node-1", "node-2"})
		if on != "node-1" {
			return fmt.Errorf("%v, %v", refused, err)
		}
		return nil
	})
	two := ask("two")
	if err := books.Known(ctx, string(two.UID)); err != nil {
		t.Fatal(err)
	}
	if on, _, err := books.Place(ctx, string(two.UID), []string{"node-1"}); on != "" || err != nil {
		t.Errorf("two pods have one GPU: %v", err)
	}
	for _, name := range []string{"one", "two"} {
		if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/train/pods/"+name+"/binding", asJSON, fields{"apiVersion": "v1", "kind": "Binding", "metadata": fields{"name": name},
			"target": fields{"apiVersion": "v1", "kind": "Node", "name": "node-1"}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case u := <-told:
		if want := (fleet.Unguarded{Namespace: "train", Name: "two", Node: "node-1"}); u != want {
			t.Errorf("told of %+v, want %+v", u, want)
		}
	case <-time.After(time.Minute):
		t.Fatal("a pod that nobody placed is not told of")
	}
	for _, name := range []string{"one", "two"} {
		if err := s.do(t, nil, http.MethodPatch, "/api/v1/namespaces/train/pods/"+name+"/status", merge, fields{"status": fields{"phase": "Succeeded"}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	three := ask("three")
	s.await(t, "pods have ended", func() error {
		if on, refused, err := books.Place(ctx, string(three.UID), []string{"node-1"}); on != "node-1" {
			return fmt.Errorf("%v, %v", refused, err)
		}
		return nil
	})
	if len(told) > 0 {
		t.Errorf("told of %+v besides", <-told)
	}
}

// tryLeases has two processes follow each other.
func tryLeases(t *testing.T, cluster *placerkube.Cluster) {
	run := func(identity string) (led chan time.Time, lease *placerkube.Lease, end func()) {
		led = make(chan time.Time, 10)
		lease = cluster.NewLease(placer, placer, identity, func(before time.Time, _ bool) { led <- before })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); lease.Run(ctx) }()
		return led, lease, func() { cancel(); <-done }
	}
	wait := func(led chan time.Time) time.Time {
		select {
		case before := <-led:
			return before
		case <-time.After(2 * time.Minute):
			t.Fatal("nobody leads")
			return time.Time{}
		}
	}
	first, one, end := run("first")
	if before := wait(first); !before.IsZero() {
		t.Errorf("before the first one led somebody at %s", before)
	}
	second, other, endOther := run("second")
	defer endOther()
	end()
	if before := wait(second); before.IsZero() || one.Leads() == nil {
		t.Errorf("the first one was last heard of at %s, and leads: %v", before, one.Leads())
	}
	deadline := time.Now().Add(time.Minute)
	for other.Leads() != nil && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if err := other.Leads(); err != nil || len(first)+len(second) > 0 {
		t.Errorf("%v; and others led besides: %d", err, len(first)+len(second))
	}
}
