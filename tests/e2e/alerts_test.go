// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"html"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/extender"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/prometheus"
)

// draw is where the pictures of the boards go.
var draw = flag.String("draw", "", "`FOLDER` for pictures of Grafana's boards, with what TestAlerts has made")

// speed is by how many times the alerts are faster here than the shipped ones: each wait (`for`),
// each range, and each number of seconds that a metric in seconds is compared with is so much
// shorter. deployments/testdata/rules has them at their own pace.
const speed = 120

// alerted has two GPUs of units, so that a request can be too large for one of them.
const alerted = `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: shared}
    - {devices: [2], mode: mig}
    - {devices: [3, 4, 5, 6, 7], mode: whole}
`

var alertedOffers = map[string]int{lab.Memory: 2 * units, lab.GPU: 5}

var manifests = filepath.Join("..", "..", "deployments")

// shippedRules is a PrometheusRule, as far as it is to be changed.
type shippedRules struct {
	Spec struct {
		Groups []struct {
			Name  string           `yaml:"name"`
			Rules []map[string]any `yaml:"rules"`
		} `yaml:"groups"`
	}
}

// rules writes the shipped rules into files, with alerts that are so many times faster, and
// returns the files and the names of all alerts.
func (b *bench) rules(dir string, speed int) (files, alerts []string) {
	b.Helper()
	for _, component := range []string{"components", "placer"} {
		text, err := os.ReadFile(filepath.Join(manifests, component, "monitoring", "rules.yaml"))
		b.must(err)
		var rules shippedRules
		b.must(yaml.Unmarshal(text, &rules))
		for _, g := range rules.Spec.Groups {
			for _, r := range g.Rules {
				name, ok := r["alert"].(string)
				if !ok {
					continue
				}
				alerts = append(alerts, name)
				r["expr"] = fasterExpr(fmt.Sprint(r["expr"]), speed)
				if wait, ok := r["for"].(string); ok {
					r["for"] = fasterSpan(wait, speed)
				}
			}
		}
		text, err = yaml.Marshal(rules.Spec)
		b.must(err)
		files = append(files, filepath.Join(dir, component+".yaml"))
		b.must(os.WriteFile(files[len(files)-1], text, 0o600))
	}
	slices.Sort(alerts)
	return files, alerts
}

var (
	ranges = regexp.MustCompile(`\[\d+[smh]\]`)
	clocks = regexp.MustCompile(`(_seconds\b[^>]* > )(\d+(?: \* \d+)*)$`)
)

func fasterExpr(expr string, speed int) string {
	expr = ranges.ReplaceAllStringFunc(expr, func(s string) string { return "[" + fasterSpan(strings.Trim(s, "[]"), speed) + "]" })
	return fasterClocks(expr, speed)
}

func fasterClocks(expr string, speed int) string {
	return clocks.ReplaceAllString(expr, "${1}(${2}) / "+strconv.Itoa(speed))
}

func fasterSpan(span string, speed int) string {
	d, err := time.ParseDuration(span)
	if err != nil {
		return span // Prometheus refuses it
	}
	return fmt.Sprintf("%dms", int(d.Milliseconds())/speed)
}

func TestFaster(t *testing.T) {
	for expr, want := range map[string]string{
		`max by (job) (time() - a_timestamp_seconds) > 900`:         `max by (job) (time() - a_timestamp_seconds) > (900) / 120`,
		`min by (pod) (a_idle_seconds{n=~"x"}) > 4 * 3600`:          `min by (pod) (a_idle_seconds{n=~"x"}) > (4 * 3600) / 120`,
		`sum by (node) (increase(a_total{reason="over"}[15m])) > 0`: `sum by (node) (increase(a_total{reason="over"}[7500ms])) > 0`,
		`a:ratio > 0.9`: `a:ratio > 0.9`,
	} {
		if got := fasterExpr(expr, 120); got != want {
			t.Errorf("%s becomes %s, want %s", expr, got, want)
		}
	}
}

// alarms is a Prometheus that scrapes the node's agent and placer, in a test.
type alarms struct {
	*bench
	*heard
}

// of is the same in a subtest.
func (a *alarms) of(b *bench) *alarms { return &alarms{b, a.heard} }

// heard is what fires there.
type heard struct {
	server *prometheus.Server
	placer *lab.Placer

	mu sync.Mutex
	// may are the alerts that may fire, and when at the earliest.
	may map[string]time.Time
	// now are those that fire, fired when each did so last, and wrong what should not have.
	now   map[string]bool
	fired map[string]time.Time
	wrong []string
}

// podMonitor is whom Prometheus scrapes, and how.
type podMonitor struct {
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		Endpoints []struct {
			Port        string
			HonorLabels bool `yaml:"honorLabels"`
			Relabelings []struct {
				SourceLabels []string `yaml:"sourceLabels"`
				TargetLabel  string   `yaml:"targetLabel"`
			}
		} `yaml:"podMetricsEndpoints"`
	}
}

// shippedMonitor is the agents'.
func (b *bench) shippedMonitor() (m podMonitor) {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, "components", "monitoring", "podmonitor.yaml"))
	b.must(err)
	b.must(yaml.Unmarshal(text, &m))
	if len(m.Spec.Endpoints) != 1 || len(m.Spec.Selector.MatchLabels) == 0 {
		b.Fatalf("the PodMonitor chooses %v and has %d endpoints, want one", m.Spec.Selector.MatchLabels, len(m.Spec.Endpoints))
	}
	return m
}

// scrape is what the Prometheus Operator makes of it, with the pods' addresses in a file.
func (m podMonitor) scrape(file, proxy string) string {
	e := m.Spec.Endpoints[0]
	out := fmt.Sprintf("honor_labels: %v\nproxy_url: %q\nfile_sd_configs: [{files: [%q]}]\nrelabel_configs:\n", e.HonorLabels, proxy, file)
	for _, r := range e.Relabelings {
		out += fmt.Sprintf("  - {source_labels: [%s], target_label: %s}\n", strings.Join(r.SourceLabels, ", "), r.TargetLabel)
	}
	return out
}

// find writes the addresses of the pods that have any, as Prometheus reads them.
func (m podMonitor) find(ctx context.Context, file string) error {
	var selector []string
	for key, value := range m.Spec.Selector.MatchLabels {
		selector = append(selector, key+"="+value)
	}
	var list core.PodList
	if err := node.Read(ctx, "/api/v1/namespaces/"+lab.AgentNamespace+"/pods?labelSelector="+url.QueryEscape(strings.Join(selector, ",")), &list); err != nil {
		return err
	}
	type group struct {
		Targets []string          `json:"targets"`
		Labels  map[string]string `json:"labels"`
	}
	groups := []group{}
	for _, p := range list.Items {
		if p.Status.PodIP == "" || p.Status.Phase == core.PodFailed || p.Status.Phase == core.PodSucceeded {
			continue
		}
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				if port.Name == m.Spec.Endpoints[0].Port {
					groups = append(groups, group{[]string{net.JoinHostPort(p.Status.PodIP, fmt.Sprint(port.ContainerPort))}, map[string]string{
						"__meta_kubernetes_pod_node_name": p.Spec.NodeName, "namespace": p.Namespace, "pod": p.Name, "container": c.Name}})
				}
			}
		}
	}
	text, err := json.Marshal(groups)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(file); err == nil && string(old) == string(text) {
		return nil
	}
	if err := os.WriteFile(file+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// inNode is a proxy into the node's network.
func (b *bench) inNode() (address string) {
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(*httputil.ProxyRequest) {}, // the request names the target
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return node.Dial(ctx, lab.Process{PID: 1}, address)
		}},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	})
	b.Cleanup(proxy.Close)
	return proxy.URL
}

// beside runs fn again and again, until the test ends.
func (b *bench) beside(every time.Duration, fn func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				fn(ctx)
			}
		}
	}()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
}

// alarms starts a Prometheus beside the node, with rules.
func (b *bench) alarms(dir string, rules []string) *alarms {
	b.Helper()
	a := &alarms{b, &heard{may: map[string]time.Time{}, now: map[string]bool{}, fired: map[string]time.Time{}}}
	var err error
	a.placer, err = node.StartPlacer(b.ctx)
	b.must(err)
	b.Cleanup(func() {
		if err := a.placer.Stop(context.Background()); err != nil {
			b.Error(err)
		}
	})
	monitor, targets, proxy := b.shippedMonitor(), filepath.Join(dir, "agents.json"), b.inNode()
	b.must(monitor.find(b.ctx, targets))
	b.beside(500*time.Millisecond, func(ctx context.Context) { _ = monitor.find(ctx, targets) }) // the API server is away at times
	a.server, err = prometheus.Start(b.ctx, dir, []prometheus.Job{
		{Name: "gpu-agent", Extra: monitor.scrape(targets, proxy)},
		{Name: "gpu-placer", Extra: fmt.Sprintf("proxy_url: %q\nstatic_configs: [{targets: [%q], labels: {node: %s}}]\n", proxy, "127.0.0.1:9501", node.Name)},
	}, rules...)
	b.must(err)
	b.Cleanup(a.server.Stop)
	b.beside(500*time.Millisecond, a.look)
	return a
}

// look notes what fires.
func (a *heard) look(ctx context.Context) {
	firing, err := a.server.Firing(ctx)
	if err != nil {
		return // the next look is soon
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	for name := range firing {
		a.fired[name] = now
		if from, ok := a.may[name]; (!ok || now.Before(from)) && !a.now[name] {
			a.wrong = append(a.wrong, name)
		}
	}
	a.now = firing
}

// allow says which alerts may fire from now on, and forbid that they may not.
func (a *heard) allow(names ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, name := range names {
		a.may[name] = time.Now()
	}
}

func (a *heard) forbid(names ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, name := range names {
		delete(a.may, name)
	}
}

// fire waits until each of some alerts has fired since a time.
func (a *alarms) fire(since time.Time, names ...string) {
	a.Helper()
	a.must(lab.Await(a.ctx, time.Minute, strings.Join(names, ", "), func(context.Context) error {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, name := range names {
			if !a.fired[name].After(since) {
				return fmt.Errorf("%s does not fire; there fire %v", name, slices.Sorted(maps.Keys(a.now)))
			}
		}
		return nil
	}))
}

// silent waits until none of some alerts fires.
func (a *alarms) silent(names ...string) {
	a.Helper()
	a.must(lab.Await(a.ctx, time.Minute, "the end of "+strings.Join(names, ", "), func(context.Context) error {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, name := range names {
			if a.now[name] {
				return fmt.Errorf("%s fires", name)
			}
		}
		return nil
	}))
}

// before waits until some alerts that have no cause yet are silent. For that the agent is made to
// ask the API server: it writes its label again.
func (a *alarms) before(names ...string) {
	a.Helper()
	if slices.Contains(names, cutOff) {
		a.must(node.Label(a.ctx, map[string]string{lab.StateLabel: ""}))
	}
	a.silent(names...)
}

// placerWith starts the placer anew, with these arguments.
func (a *alarms) placerWith(args ...string) {
	a.Helper()
	a.must(a.placer.Stop(a.ctx))
	var err error
	a.placer, err = node.StartPlacer(a.ctx, args...)
	a.must(err)
}

func (a *heard) firing() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.now))
}

// quiet is at an end of a cause: nothing fires that may not, and the agent and the placer answer.
func (a *alarms) quiet() {
	a.Helper()
	a.mu.Lock()
	wrong := a.wrong
	a.wrong = nil
	a.mu.Unlock()
	if len(wrong) > 0 {
		a.Errorf("without a cause there fires %v", wrong)
	}
	a.must(lab.Await(a.ctx, time.Minute, "agent and placer to answer Prometheus", func(ctx context.Context) error {
		up, err := a.server.Query(ctx, "min by (job) (up)", "job")
		if err == nil && !maps.Equal(up, map[string]float64{"gpu-agent": 1, "gpu-placer": 1}) {
			err = fmt.Errorf("it has %v", up)
		}
		return err
	}))
}

// cause is what makes alerts fire on a node.
type cause struct {
	what string
	// fires are those that have to, and also those that may, beside.
	fires, also []string
	begin       func(*alarms)
	// end takes the cause away; nil where it passes by itself.
	end func(*alarms)
}

// idle is the alert of a pod that holds a GPU for the whole test, and refused fires again when it
// is looked for.
const (
	idle    = "GPUGrantIdle"
	cutOff  = "GPUAgentCutOff"
	refused = "GPURequestsRefused"
)

// unheard may fire at any time, and are only seen to be silent before their cause comes: their
// faster waits are shorter than a busy machine may be late with an answer, and the one of cutOff is
// shorter than the five minutes that an agent without work is silent for.
var unheard = []string{cutOff, "GPUAgentAbsent", "GPUAgentDown", "GPUPlacerAbsent"}

// causes are of each alert one; those of a row are there at the same time.
func causes() [][]cause {
	var offender, intruder *lab.RunningPod
	var full []*lab.RunningPod
	usual := lab.DeployOptions{Partitions: alerted}
	return [][]cause{{
		{
			what: "a GPU that is lost", fires: []string{"GPUUnhealthy"},
			begin: func(a *alarms) { a.must(driver.Lose(a.ctx, 7)) },
			end: func(a *alarms) {
				a.must(driver.Restore(a.ctx, 7))
				a.must(driver.Xid(a.ctx, 7, 13)) // the GPU's return alone makes no event
			},
		}, {
			what: "a partition that no GPU can have", fires: []string{"GPUPartitionNotInForce"},
			begin: func(a *alarms) { a.partitions(strings.Replace(alerted, "[0, 1]", "[0, 1, 8]", 1)) },
			end:   func(a *alarms) { a.partitions(alerted) },
		}, {
			what: "a pod that asks for more than a GPU has", fires: []string{refused},
			begin: func(a *alarms) {
				_, err := a.pod("huge", lab.Memory, 100).Refused(a.ctx)
				a.must(err)
			},
		}, {
			what: "a program that goes round the library", fires: []string{"GPUCapExceeded"},
			begin: func(a *alarms) {
				offender = a.tenant("offender", 4)
				a.breach(offender, "main", 4*giB)
			},
			end: func(a *alarms) { a.must(offender.Delete(a.ctx)) },
		}, {
			what: "a container that was given no GPU and uses one", fires: []string{"GPUIntruder"},
			begin: func(a *alarms) {
				c := a.container("main", nil)
				c.Privileged = true
				c.Mounts = append(c.Mounts,
					lab.Mount{Host: "/usr/lib/x86_64-linux-gnu/libcuda.so." + driver.Version, Path: "/usr/lib/x86_64-linux-gnu/libcuda.so.1"},
					lab.Mount{Host: "/run/nvidia-persistenced", Path: "/run/nvidia-persistenced"})
				intruder = a.create(lab.Pod{Name: "intruder", Containers: []lab.Container{c}})
				a.must(intruder.Running(a.ctx))
				a.take(a.probe(intruder, "main", []string{"CUDA_VISIBLE_DEVICES=" + driver.GPUs[1].UUID}), giB, 1)
			},
			end: func(a *alarms) { a.must(intruder.Delete(a.ctx)) },
		},
	}, {
		{
			what: "a driver that does not answer", fires: []string{"GPUDriverHangs"},
			also: []string{"GPUUnhealthy", "GPUWatchdogDown", "GPUPartitionPending"},
			begin: func(a *alarms) {
				// While a GPU is unfit the agent looks often, so it soon meets the call.
				a.must(driver.Xid(a.ctx, 7, 94))
				a.must(driver.Hang(a.ctx, "nvmlDevice*", -1))
			},
			end: func(a *alarms) { a.must(driver.ClearFaults(a.ctx)) },
		},
	}, {
		{
			what: "pods on every GPU", fires: []string{"GPUsSaturated"},
			begin: func(a *alarms) {
				a.offers(alertedOffers)
				full = nil
				for i := range 4 { // the fifth is held already
					full = append(full, a.pod(fmt.Sprintf("whole-%d", i), lab.GPU, 1))
				}
				full = append(full, a.pod("a-gpu-of-units", lab.Memory, units), a.pod("units-beside-8", lab.Memory, units-8),
					a.pod("instance-2", lab.MIG("1g.10gb"), 1), a.pod("half", lab.MIG("3g.40gb"), 1))
				a.must(each(full, func(p *lab.RunningPod) error { return p.Running(a.ctx) }))
			},
			end: func(a *alarms) {
				a.must(each(full, func(p *lab.RunningPod) error { return p.Delete(a.ctx) }))
			},
		},
	}, {
		{
			what: "an agent that answers nobody", fires: []string{"GPUAgentDown", "GPUAgentAbsent"},
			begin: func(a *alarms) {
				p, err := agent.Process()
				a.must(err)
				a.Cleanup(func() { _ = node.Signal(context.Background(), p, "CONT") }) // it is gone by then, or goes on already
				a.must(node.Signal(a.ctx, p, "STOP"))
			},
			end: func(a *alarms) {
				p, err := agent.Process()
				a.must(err)
				a.must(node.Signal(a.ctx, p, "CONT"))
			},
		},
	}, {
		{
			what: "a door whose certificate expires in a week", fires: []string{"GPUPlacerCertificate"},
			also: []string{"GPUPlacerAbsent"}, // between two placers
			begin: func(a *alarms) {
				door, err := node.Dir("door") // in what the node sees of this machine
				a.must(err)
				a.must(exec.CommandContext(a.ctx, kit.Bin("gpu-placer"), "certificates", "--days", "7", "--out", door).Run())
				a.placerWith("--tls-cert-file", filepath.Join(door, extender.CertFile), "--tls-key-file", filepath.Join(door, extender.KeyFile))
			},
			end: func(a *alarms) { a.placerWith() },
		},
	}, {
		{
			what: "no placer", fires: []string{"GPUPlacerAbsent"},
			begin: func(a *alarms) { a.must(a.placer.Stop(a.ctx)) },
			end:   func(a *alarms) { a.placerWith() },
		}, {
			what: "no API server", fires: []string{cutOff},
			begin: func(a *alarms) {
				a.Cleanup(func() {
					if _, err := node.State(context.Background()); err == nil {
						return
					}
					if err := node.StartAPI(context.Background()); err != nil {
						a.Error(err)
					}
				})
				began := time.Now()
				a.must(node.Stop(a.ctx, lab.APIServer))
				// It answers until it has ended, and a board shows how often the agent asks in vain.
				a.must(lab.Await(a.ctx, time.Minute, "the agent to ask in vain", func(ctx context.Context) error {
					n, err := a.server.Shown(ctx, "rate(gpu_agent_api_errors_total[1m])", began)
					if err == nil && n == 0 {
						err = errors.New("no request has failed")
					}
					return err
				}))
			},
			end: func(a *alarms) { a.must(node.StartAPI(a.ctx)) },
		},
	}, {
		{
			what: "no partition for a node without a label", fires: []string{"GPUPartitionPending"},
			begin: func(a *alarms) { a.partitions(strings.Replace(alerted, "default:", "night:", 1)) },
			end:   func(a *alarms) { a.partitions(alerted) },
		},
	}, {
		{
			what: "a watchdog that was turned off, and a policy that is gone", fires: []string{"GPUWatchdogDown", "GPUPolicyNotInForce"},
			also: []string{"GPUPartitionPending"}, // while the agent is deployed anew
			begin: func(a *alarms) {
				a.redeploy(lab.DeployOptions{Partitions: alerted, Env: map[string]string{"GPU_AGENT_WATCH_EVERY": "0"}})
				_, err := node.Kubectl(a.ctx, nil, "delete", "validatingadmissionpolicybinding", "gpu-agent")
				a.must(err)
				a.must(lab.Await(a.ctx, time.Minute, "the API server to let the agent write what it must not", func(ctx context.Context) error {
					return node.As(ctx, "gpu-agent", "gpu-agent", nodeName, http.MethodPatch, "/api/v1/nodes/"+nodeName+"?dryRun=All",
						map[string]any{"metadata": map[string]any{"labels": map[string]string{"team": "red"}}})
				}))
				a.must(agent.Crash(a.ctx)) // it looks at its policies when it starts
			},
			end: func(a *alarms) {
				var err error
				agent, err = deploy(a.ctx, usual)
				a.must(err)
			},
		},
	}}
}

// Every alert is silent until its cause is there, fires with it, and goes with it. In the end every
// question of both boards has an answer.
func TestAlerts(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	if _, err := prometheus.Program(t.Context(), "prometheus"); err != nil {
		t.Skipf("no Prometheus, and Debian's archive has none for us: %v", err)
	}
	prepare(t).swap(lab.DriverOptions{Model: model, Count: gpus}) // whatever is left of faults and instances goes
	b := begin(t, alerted, alertedOffers)
	dir := b.TempDir()
	rules, alerts := b.rules(dir, speed)
	rows, caused := causes(), []string{idle}
	for _, row := range rows {
		for _, c := range row {
			caused = append(caused, c.fires...)
		}
	}
	slices.Sort(caused)
	if !slices.Equal(caused, alerts) {
		b.Fatalf("the rules have the alerts %v, and this test causes %v", alerts, caused)
	}

	began := time.Now()
	held := b.pod("holds-a-gpu", lab.GPU, 1)
	first := b.pod("instance-1", lab.MIG("1g.10gb"), 1)
	b.must(first.Running(b.ctx))
	b.take(b.probe(b.tenant("uses-its-own", 8), "main", nil), giB, 2)
	b.must(held.Running(b.ctx))
	a := b.alarms(dir, rules)
	const idleAfter = 4 * time.Hour / speed
	a.mu.Lock()
	a.may[idle] = began.Add(idleAfter)
	a.mu.Unlock()
	a.allow(unheard...)

	for _, row := range rows {
		var fires, also []string
		for _, c := range row {
			fires, also = append(fires, c.fires...), append(also, c.also...)
		}
		b.sub(strings.Join(fires, " "), func(b *bench) {
			a := a.of(b)
			a.quiet()
			since := time.Now()
			for _, c := range row {
				a.before(c.fires...)
				a.allow(slices.Concat(c.fires, c.also)...)
				b.Logf("%5.1f s  %s", time.Since(began).Seconds(), c.what)
				c.begin(a)
			}
			a.fire(since, fires...)
			b.Logf("%5.1f s  there fire %v", time.Since(began).Seconds(), a.firing())
			for _, c := range slices.Backward(row) {
				if c.end != nil {
					c.end(a)
				}
			}
			a.silent(append(fires, also...)...)
			b.Logf("%5.1f s  silent", time.Since(began).Seconds())
			a.quiet()
			a.forbid(append(fires, also...)...)
			a.allow(unheard...)
		})
		if b.Failed() {
			return
		}
	}
	b.sub(idle, func(b *bench) {
		a := a.of(b)
		// The agent samples once a minute, and at once where it has something to write down.
		time.Sleep(time.Until(began.Add(idleAfter)))
		a.allow(refused)
		_, err := b.pod("huge-again", lab.Memory, 100).Refused(b.ctx)
		b.must(err)
		a.fire(began.Add(idleAfter), idle)
		b.must(node.DeletePods(b.ctx))
		a.silent(idle, refused)
		a.quiet()
	})
	b.sub("boards", func(b *bench) { a.of(b).boards(began) })
}

// boards asks what every panel asks, about the time since the test began.
func (a *alarms) boards(began time.Time) {
	a.Helper()
	boards, err := prometheus.Boards(filepath.Join(manifests, "components", "monitoring"))
	a.must(err)
	if n, err := a.server.Shown(a.ctx, "gpu_agent_gpu_healthy > 1", began); err != nil || n > 0 {
		a.Fatalf("what is nowhere is shown %d times: %v", n, err)
	}
	asked, folder := 0, cmp.Or(*draw, a.TempDir())
	for _, file := range slices.Sorted(maps.Keys(boards)) {
		for _, p := range boards[file].Panels {
			for _, q := range p.Targets {
				asked++
				expr := fasterClocks(prometheus.Filled(q.Expr), speed)
				n, err := a.server.Shown(a.ctx, expr, began)
				a.must(err)
				if n == 0 {
					a.Errorf("%s: %s shows nothing: %s", boards[file].Title, p.Title, expr)
				}
			}
		}
		a.picture(boards[file], filepath.Join(folder, strings.Replace(strings.TrimSuffix(filepath.Base(file), ".json"), "gpu-agent-", "board-", 1)+".svg"), began)
	}
	if asked < 40 {
		a.Errorf("the boards ask %d questions: this test does not look where they are", asked)
	}
}

// picture draws a board into a file.
func (a *alarms) picture(board prometheus.Board, file string, began time.Time) {
	a.Helper()
	picture, err := a.server.Picture(a.ctx, &board, began, func(expr string) string { return fasterClocks(prometheus.Filled(expr), speed) })
	a.must(err)
	a.must(xml.Unmarshal(picture, new(struct{})))
	for _, p := range board.Panels {
		if !strings.Contains(string(picture), html.EscapeString(p.Title)) {
			a.Errorf("the picture of %s lacks %s", board.Title, p.Title)
		}
	}
	if n := strings.Count(string(picture), "No data"); n > 0 {
		a.Errorf("in the picture of %s %d panels have no data", board.Title, n)
	}
	a.must(os.WriteFile(file, picture, 0o644)) //nolint:gosec // it is part of the documents
}

// churned are the alerts that a walk causes, which kills agents, hangs the driver, breaks GPUs and
// asks for too much.
var churned = []string{"GPUAgentDown", "GPUCapExceeded", "GPUDriverHangs", "GPUIntruder", "GPUPartitionNotInForce", refused, "GPUUnhealthy", "GPUsSaturated"}

// unalarmed has a Prometheus with the alerts at their own pace beside a walk, in which no other alert
// than those that it causes may fire.
func (b *bench) unalarmed() {
	b.Helper()
	if _, err := prometheus.Program(b.ctx, "prometheus"); err != nil {
		b.Logf("no alert is looked at: no Prometheus, and Debian's archive has none for us: %v", err)
		return
	}
	dir := b.TempDir()
	rules, _ := b.rules(dir, 1)
	a := b.alarms(dir, rules)
	a.allow(churned...)
	b.Cleanup(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		b.Logf("there fired %v", slices.Sorted(maps.Keys(a.fired)))
		if len(a.wrong) > 0 {
			b.Errorf("without a cause there fired %v", a.wrong)
		}
	})
}
