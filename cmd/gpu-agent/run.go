// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/deviceplugin"
	frontend "example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
)

// configKey is the ConfigMap's key with the partition file.
const configKey = "config.yaml"

type runFlags struct {
	driver            driverFlags
	config, configMap string
	nameFlags
	pod string
	partitionFlags
	node                     nodeFlags
	cap                      capFlags
	http                     string
	ignoredXids              xids
	healthHold, healthProbe  time.Duration
	linksEvery               time.Duration
	faultTaint               command.Choice
	schedulers               schedulerFlags
	whenBusy, foreign, reset command.Choice
	numaHints                command.Choice
	nodeLabels, nvidiaLabels command.Choice
	idleTTL                  time.Duration
	usage                    usageFlags
	log                      command.Log
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	f.driver.register(fs)
	configFlag(fs, &f.config)
	fs.StringVar(&f.configMap, "configmap", "", "partition ConfigMap, `namespace/name`; its key is "+configKey)
	f.nameFlags.register(fs)
	fs.StringVar(&f.pod, "pod", "", "this agent's own pod, `namespace/name`: the kubelet's list of holders is believed once it has it")
	f.partitionFlags.register(fs)
	f.node.register(fs)
	f.cap.register(fs)
	f.ignoredXids = slices.Clone(health.DefaultIgnored)
	fs.Var(&f.ignoredXids, "ignored-xids", "Xid `numbers` that do not speak against a GPU: errors of applications")
	fs.DurationVar(&f.healthHold, "health-hold", health.DefaultHold, "`time` that a faulty GPU must be without complaint before it is offered again")
	fs.DurationVar(&f.healthProbe, "health-probe", health.DefaultProbe, "`time` between looks at a faulty GPU")
	fs.DurationVar(&f.linksEvery, "links-every", time.Minute, "`time` between looks at NVLinks, whose lanes fail and return without a word")
	f.faultTaint = command.Choice{Value: string(agentkube.NoSchedule), Of: []string{string(agentkube.NoSchedule), string(agentkube.NoExecute)}}
	fs.Var(&f.faultTaint, "fault-taint", "what the taint of a faulty GPU that is offered through dra does: NoSchedule (it gets no new claims) or NoExecute (the pods on it are ended, too)")
	f.schedulers.register(fs)
	httpFlag(fs, &f.http)
	f.whenBusy = command.Choice{Value: "drain", Of: []string{"drain", "wait"}}
	fs.Var(&f.whenBusy, "when-busy", "what a GPU whose change waits for holders does with its idle devices: drain (withdraw) or wait (keep on offer)")
	f.foreign = command.Choice{Value: "keep", Of: []string{"keep", "reclaim"}}
	fs.Var(&f.foreign, "foreign-instances", "idle MIG instances that the agent did not make and the partition does not name: keep or reclaim (destroy)")
	f.reset = command.Choice{Value: "auto", Of: []string{"auto", "never"}}
	fs.Var(&f.reset, "reset", "a GPU whose MIG mode needs a reset to change: auto (reset that GPU, once it is idle) or never (wait for somebody to do it)")
	f.nodeLabels = command.Choice{Value: "api", Of: []string{"api", "nfd", "none"}}
	fs.Var(&f.nodeLabels, "node-labels", "how the node gets labels of what its GPUs are: api (the agent writes them), nfd (a features file for Node Feature Discovery, in --nfd-dir) or none")
	f.nvidiaLabels = command.Choice{Value: "absent", Of: []string{"absent", "never"}}
	fs.Var(&f.nvidiaLabels, "nvidia-labels", "the nvidia.com labels that GPU Feature Discovery writes: absent (each where nobody else has written it) or never")
	f.numaHints = command.Choice{Value: string(deviceplugin.AlignFixed), Of: []string{string(deviceplugin.AlignNone), string(deviceplugin.AlignFixed), string(deviceplugin.AlignAll)}}
	fs.Var(&f.numaHints, "numa-hints", "which devices the kubelet is told the NUMA node of: none, fixed (whole GPUs and MIG devices of fixed geometries) or all (memory units, replicas and MIG on demand too, of which it may then refuse requests that would fit)")
	fs.DurationVar(&f.idleTTL, "idle-instance-ttl", 0, "`time` after which an instance made on demand goes when nobody has it; 0 keeps it until its room is wanted")
	f.usage.register(fs)
	f.log.Register(fs)
}

// schedulerFlags are what schedulers and autoscalers are told beside the offer.
type schedulerFlags struct {
	lowerAllocatable, holdScaleDown bool
	gpuNode                         command.Choice
	startupTaint                    string
}

func (f *schedulerFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.lowerAllocatable, "lower-allocatable", true, "tell the scheduler at once of devices that cannot be had any more, in the Node's status.allocatable; otherwise it hears of them up to ten seconds later, from the kubelet")
	f.gpuNode = command.Choice{Value: "auto", Of: []string{"auto", "pods", "holders", "off"}}
	fs.Var(&f.gpuNode, "gpunode", "the node's GPUNode object: auto (it names holders where the kubelet is older than 1.36), pods (it never does; pods' own status does), holders (it always does, and is written at every change) or off")
	fs.BoolVar(&f.holdScaleDown, "hold-scale-down", false, "keep Cluster Autoscaler from taking the node away while pods have something of its GPUs, by its annotation scale-down-disabled")
	fs.StringVar(&f.startupTaint, "startup-taint", "", "`key` of a taint that the node is registered with: the agent takes it away once pods that ask for GPUs can be sent to the node; needs deployments/components/startup-taint")
}

// complete checks what the flags say together and fills in what follows.
func (f *runFlags) complete() error {
	if err := f.Complete(); err != nil {
		return err
	}
	if f.Domain == "nvidia.com" {
		return command.Usagef("--domain: nvidia.com is the domain of NVIDIA's own labels, which mean other things; --resource-domain nvidia.com gives the resources its names")
	}
	if f.idleTTL < 0 {
		return command.Usagef("--idle-instance-ttl must not be negative")
	}
	if f.healthHold <= 0 || f.healthProbe <= 0 {
		return command.Usagef("--health-hold and --health-probe must be positive")
	}
	if f.linksEvery <= 0 {
		return command.Usagef("--links-every must be positive")
	}
	if err := f.cap.complete(); err != nil {
		return err
	}
	if err := f.usage.complete(); err != nil {
		return err
	}
	switch {
	case f.config != "" && f.configMap != "":
		return command.Usagef("--config and --configmap are both set: partitions come from one place")
	case f.config == "" && f.configMap == "":
		return command.Usagef("no partitions: set --configmap NAMESPACE/NAME or --config FILE")
	case f.api.Value == string(ledger.DRA) && f.nodeName == "":
		return command.Usagef("--api dra needs an API server, and so --node-name (in a pod: NODE_NAME from spec.nodeName)")
	case f.schedulers.startupTaint != "" && f.nodeName == "":
		return command.Usagef("--startup-taint needs --node-name (in a pod: NODE_NAME from spec.nodeName)")
	case f.configMap != "" && f.nodeName == "":
		return command.Usagef("--configmap needs --node-name (in a pod: NODE_NAME from spec.nodeName)")
	}
	for _, named := range []struct{ flag, value string }{{"--configmap", f.configMap}, {"--pod", f.pod}} {
		if _, _, ok := command.Namespaced(named.value); named.value != "" && !ok {
			return command.Usagef("%s: %q is not NAMESPACE/NAME", named.flag, named.value)
		}
	}
	return nil
}

// newRun makes `gpu-agent run`.
func newRun() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use:   "run",
		Short: "own this node's GPUs: lay out, offer, account (the DaemonSet's program)",
		Long: `Owns this node's GPUs until it is told to end: lays them out as the partition file says,
offers the pieces to the kubelet, and keeps an account of who has them.`,
		Example: "gpu-agent run --config partitions.yaml --node-name node-1",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			return run(c.Context(), consoleOf(c), &f)
		},
	}
	f.register(c.Flags())
	return c
}

// run opens the worlds and ties them to the loop.
func run(ctx context.Context, c console, f *runFlags) error {
	agent.LimitHeap()
	log := f.log.Logger(c.err)
	log.Info("gpu-agent", "version", version(), "domain", f.Domain, "memory_unit", f.unit.String())

	files, err := dir.Open(f.node.cdiDir, f.Domain)
	if err != nil {
		return err
	}
	store, err := state.Wait(ctx, f.node.stateDir, log)
	if err != nil {
		return err
	}
	defer store.Close()
	caps, err := lib.OpenFiles(f.node.stateDir, f.cap.every, f.driver.options(log).Seen)
	if err != nil {
		return err
	}
	if f.cap.labels {
		if err := lib.Relabel(f.node.stateDir); err != nil {
			return fmt.Errorf("--cap-labels: %w", err)
		}
	}
	boot, err := node.BootID(f.driver.proc)
	if err != nil {
		log.Warn("cannot tell one boot of the machine from the next; of what was laid out and withdrawn before, nothing is believed", "err", err)
	}
	kubelet := node.NewPodResources(f.node.kubeletDir)
	defer kubelet.Close()
	var loop *agent.Agent
	runtime := f.node.runtime(f.Domain, func() bool { return loop.Claims() }, log)
	defer runtime.Close()
	metrics := agentobs.NewMetrics(version())
	driver := nvml.NewLate(func(ctx context.Context) (*nvml.Driver, error) {
		o := f.driver.options(log)
		program, err := nvml.FindHook()
		if err != nil {
			return nil, err
		}
		if o.Hook, err = nvml.InstallHook(program, f.node.stateDir); err != nil {
			return nil, err
		}
		// A GPU that is lost comes back to a driver that is initialised anew.
		o.Rearm = max(f.healthProbe, time.Second)
		return nvml.Open(ctx, o)
	}, metrics.DriverCall)

	var watchdog *guard.Guard
	var cluster *agentkube.Client
	options := agent.Options{
		Domain:         f.Domain,
		ResourceDomain: f.ResourceDomain,
		MemoryUnit:     gpu.MiB(f.unit),
		API:            ledger.FrontEnd(f.api.Value),
		KeepOffering:   f.whenBusy.Value == "wait",
		IdleTTL:        f.idleTTL,
		LinksEvery:     f.linksEvery,
		HoldScaleDown:  f.schedulers.holdScaleDown,
		FaultTaint:     agentkube.TaintEffect(f.faultTaint.Value),
		HoldersIn:      map[string]gpunode.HoldersIn{"pods": gpunode.InPods, "holders": gpunode.InObject}[f.schedulers.gpuNode.Value],
		Labels:         agent.Labels{Own: f.nodeLabels.Value != "none", Guest: f.nvidiaLabels.Value == "absent"},
		Align:          deviceplugin.Alignment(f.numaHints.Value),
		ReclaimForeign: f.foreign.Value == "reclaim",
		NeverReset:     f.reset.Value == "never",
		OpenCaps:       f.cap.policy.Value == "open",
		Boot:           boot,
		Node:           f.nodeName,
		Health:         health.Options{Ignored: f.ignoredXids, Hold: f.healthHold, Probe: f.healthProbe},
		Log:            log,
	}
	worlds := agent.Worlds{Driver: driver, Files: files, Caps: caps, Kubelet: kubelet, Runtime: runtime, Store: store,
		Observer: &agent.HeapLimit{Observer: metrics, Listed: func() int { return loop.Listed() }},
		Account:  f.usage.account(f.node.stateDir, runtime, func() *guard.Guard { return watchdog })}
	if ns, name, ok := command.Namespaced(f.pod); ok {
		options.Pod = workload.Pod{Namespace: ns, Name: name}
	}
	if f.nodeName != "" {
		cluster, err = agentkube.New(agentkube.Options{
			Options: kube.Options{Kubeconfig: f.kubeconfig, Domain: f.Domain, Logger: log,
				Failed:   metrics.APIError,
				Answered: metrics.APIAnswered,
				Refused:  func(request string, err error) { loop.SetRefused(request, err) },
			},
			NodeName: f.nodeName, ResourceDomain: f.ResourceDomain, StartupTaint: f.schedulers.startupTaint,
			EventDone: func(o agentkube.EventOutcome) { metrics.Event(string(o)) },
			Allocatable: func(amounts map[string]int64) {
				if worlds.Lowering != nil {
					worlds.Lowering.See(amounts)
				}
			},
		})
		if err != nil {
			return err
		}
		metrics.APIAnswered() // an agent that is cut off from its start on is overdue, too
		worlds.Cluster = cluster
		if f.schedulers.lowerAllocatable {
			worlds.Lowering = agent.NewLowering(cluster, metrics.Lowered, log)
		}
		if f.schedulers.gpuNode.Value != "off" {
			worlds.GPUNodes = cluster
		}
		worlds.DRA = &agent.DRA{API: cluster, Kubelet: frontend.KubeletDir(filepath.Join(f.node.hostRoot, f.node.kubeletDir)), Serve: func(front *frontend.FrontEnd) (agent.DRADriver, error) {
			return serveDRA(front, dra.Options{Name: front.Driver, Driver: front, Dir: filepath.Join(f.node.kubeletDir, "plugins_registry"), Logger: log, Observer: metrics})
		}}
		if f.cap.evictAfter > 0 {
			worlds.DRA.Evict = cluster.Evict
		}
	}
	if f.nodeLabels.Value == "nfd" {
		worlds.Features = features(f.node.nfdDir)
	}
	var sent func(resource string, healthy int)
	if worlds.Lowering != nil {
		sent = worlds.Lowering.Sent
	}
	plugins := plugin.NewKubelet(plugin.KubeletOptions{
		Dir: filepath.Join(f.node.kubeletDir, "device-plugins"), Logger: log, Observer: metrics,
		Looked: func() { loop.LookAtCheckpoint() }, Changed: func() { loop.LookAtPlugins() }, Sent: sent,
	})
	worlds.Plugins = plugins
	loop = agent.New(options, worlds)
	proc := node.NewProc(f.driver.proc)
	defer proc.Close()
	watch := guard.Worlds{
		Driver: driver, Allocations: loop, Proc: guard.Processes{Proc: proc, Runtime: runtime}, Runtime: runtime,
		Pages: guard.Counters{Pages: caps.Pages}, Observer: agent.Offences{Metrics: metrics, Account: worlds.Account}, Limiter: guard.ByCgroup{Driver: driver, Runtime: runtime},
	}
	if cluster != nil {
		watch.Cluster = cluster
	}
	watchdog = guard.New(guard.Options{
		Domain: f.Domain, Every: f.cap.every, EndIntruders: f.cap.intruders.Value == "end", EvictAfter: f.cap.evictAfter,
		Own: options.Pod, Log: log,
	}, watch)
	var policies atomic.Pointer[[]status.Policy]
	show := func() status.Status {
		s := loop.Status()
		s.Node, s.Version = f.nodeName, version()
		watchdog.State().Show(&s)
		if p := policies.Load(); p != nil {
			s.Policies = *p
		}
		return s
	}
	page := agentobs.New(agentobs.Options{Addr: f.http, Logger: log, Metrics: metrics, Healthy: loop.Healthy, Ready: loop.Ready, Status: show, Account: f.usage.metrics(f.nodeName, worlds.Account, show)})

	door := agentobs.Door{Path: filepath.Join(f.node.stateDir, state.Socket), Logger: log, Foresee: loop.Foresee}

	services := []func(context.Context) error{
		plugins.Run, page.Run, door.Run,
		func(ctx context.Context) error { return followPartitions(ctx, f, cluster, loop) },
	}
	if cluster != nil {
		o := agentkube.PolicyOptions{Evictions: f.cap.evictAfter > 0, DRA: loop.Claims, GPUNodes: f.schedulers.gpuNode.Value != "off", Pod: workload.Pod{Namespace: options.Pod.Namespace, Name: options.Pod.Name}}
		services = append(services, cluster.Run,
			func(ctx context.Context) error { return cluster.WatchNode(ctx, loop.SetNode) },
			func(ctx context.Context) error {
				return cluster.WatchPolicies(ctx, o, func(list []status.Policy) { policies.Store(&list) })
			})
	}
	if f.cap.every > 0 {
		services = append(services, watchdog.Run)
	}
	if err := around(ctx, loop.Run, services...); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("ended; devices stay with their containers")
	return nil
}

// around runs the loop with its services around it. When ctx ends the loop ends first, and
// the services with it: it takes its leave while the kubelet is still served.
func around(ctx context.Context, loop func(context.Context) error, services ...func(context.Context) error) error {
	g, outside := errgroup.WithContext(context.WithoutCancel(ctx))
	inside, stop := context.WithCancel(outside)
	defer stop()
	defer context.AfterFunc(ctx, stop)()
	for _, run := range services {
		g.Go(func() error { return run(outside) })
	}
	g.Go(func() error { return loop(inside) })
	return g.Wait()
}

// serveDRA has the kubelet call a front-end, and the front-end publish while the kubelet is
// there: one that starts deletes what was published.
func serveDRA(front *frontend.FrontEnd, o dra.Options) (agent.DRADriver, error) {
	var server *dra.Server
	o.Registered = func() { front.Publisher().Registered(true) }
	o.Changed = func() {
		front.Publisher().Registered(server.Status().Registered)
		front.Wake() // it is told where the kubelet does not have the driver
	}
	var err error
	server, err = dra.New(o)
	return server, err
}

// features is Node Feature Discovery's directory.
type features string

func (dir features) Write(f nfd.Features) error { return nfd.Write(string(dir), f) }

// followPartitions hands the partition file to the loop whenever it changes.
func followPartitions(ctx context.Context, f *runFlags, cluster *agentkube.Client, loop *agent.Agent) error {
	if f.config != "" {
		return node.WatchFile(ctx, f.config, func(data []byte, err error) {
			if err != nil {
				loop.SetFileMissing(fmt.Errorf("read the partitions: %w", err))
				return
			}
			loop.SetFile(f.config, data)
		})
	}
	ns, name, _ := command.Namespaced(f.configMap)
	return cluster.WatchKey(ctx, ns, name, configKey, func(data []byte, err error) {
		if err != nil {
			loop.SetFileMissing(err)
			return
		}
		loop.SetFile("configmap "+f.configMap+" "+configKey, data)
	})
}
