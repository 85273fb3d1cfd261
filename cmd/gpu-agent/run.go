// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	frontend "example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/guard"
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
const configKey = config.ManifestKey

type runFlags struct {
	driver            driverFlags
	config, configMap string
	nameFlags
	pod string
	partitionFlags
	node       nodeFlags
	cap        capFlags
	http       string
	health     healthFlags
	schedulers schedulerFlags
	layout     layoutFlags
	tier       tierFlags
	labels     labelFlags
	numaHints  command.Choice
	usage      usageFlags
	log        command.Log
	// flags are all of these, as they were given.
	flags *pflag.FlagSet
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	f.driver.register(fs)
	configFlag(fs, &f.config)
	fs.StringVar(&f.configMap, "configmap", "", "partition ConfigMap, `namespace/name`; its key is "+configKey)
	f.nameFlags.register(fs)
	fs.StringVar(&f.pod, "pod", "",
		"this agent's own pod, `namespace/name`: the agent trusts the kubelet's list of holders once it has this pod")
	f.partitionFlags.register(fs)
	f.node.register(fs)
	f.cap.register(fs)
	f.health.register(fs)
	f.schedulers.register(fs)
	httpFlag(fs, &f.http)
	f.layout.register(fs)
	f.tier.register(fs)
	f.labels.register(fs)
	none, fixed, all := string(deviceplugin.AlignNone), string(deviceplugin.AlignFixed), string(deviceplugin.AlignAll)
	f.numaHints = command.Choice{Value: fixed, Of: []string{none, fixed, all}}
	fs.Var(&f.numaHints, "numa-hints",
		"devices whose NUMA node the kubelet is told: none, "+
			"fixed (whole GPUs and MIG devices of fixed geometries) or "+
			"all (memory units, replicas and MIG on demand too; it may then refuse requests for these that would fit)")
	f.usage.register(fs)
	f.log.Register(fs)
}

// complete checks the flags together and sets defaults.
func (f *runFlags) complete() error {
	if err := f.Complete(); err != nil {
		return err
	}
	if f.Domain == "nvidia.com" {
		return command.Usagef("--domain: nvidia.com is the domain of NVIDIA's own labels, which mean other things; " +
			"--resource-domain nvidia.com gives the resources its names")
	}
	for _, part := range []interface{ complete() error }{&f.layout, &f.tier, &f.health, &f.cap, &f.usage} {
		if err := part.complete(); err != nil {
			return err
		}
	}
	switch {
	case f.config != "" && f.configMap != "":
		return command.Usagef("--config and --configmap are both set: partitions come from one place")
	case f.config == "" && f.configMap == "":
		return command.Usagef("no partitions: set --configmap NAMESPACE/NAME or --config FILE")
	case f.api.Value == string(ledger.DRA) && f.nodeName == "":
		return command.Usagef("--api dra needs an API server, and so --node-name " +
			"(in a pod: NODE_NAME from spec.nodeName)")
	case f.schedulers.startupTaint != "" && f.nodeName == "":
		return command.Usagef("--startup-taint needs --node-name (in a pod: NODE_NAME from spec.nodeName)")
	case f.cap.detachEnding && f.nodeName == "":
		return command.Usagef("--mps-detach-ending needs --node-name (in a pod: NODE_NAME from spec.nodeName)")
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
	f.flags = c.Flags()
	return c
}

// daemon is the agent of a node: the loop, the watchdog, and what they are connected to. Some
// parts are made before those that they call, so they call them through the daemon.
type daemon struct {
	log     *slog.Logger
	options agent.Options
	worlds  agent.Worlds
	driver  *nvml.Late
	caps    *lib.Files
	runtime *node.Runtime
	metrics *agentobs.Metrics
	// cluster is nil without an API server.
	cluster  *cluster
	loop     *agent.Agent
	watchdog *guard.Guard
	policies atomic.Pointer[[]status.Policy]
}

// cluster is the API server's client and the Events that the agent writes.
type cluster struct {
	*agentkube.Client
	*agentkube.Events
}

// run opens the outside worlds and connects them to the loop.
func run(ctx context.Context, c console, f *runFlags) error {
	agent.LimitHeap()
	log := f.log.Logger(c.err)
	log.Info("gpu-agent", "version", version(), "domain", f.Domain, "memory_unit", f.unit.String())
	d := &daemon{log: log}

	files, err := dir.Open(f.node.cdiDir, f.Domain)
	if err != nil {
		return err
	}
	store, err := state.Wait(ctx, f.node.stateDir, log)
	if err != nil {
		return err
	}
	defer store.Close()
	if d.caps, err = lib.OpenFiles(f.node.stateDir, f.cap.every, f.driver.options(log).Seen); err != nil {
		return err
	}
	if f.cap.labels {
		if err := lib.Relabel(f.node.stateDir); err != nil {
			return fmt.Errorf("--cap-labels: %w", err)
		}
	}
	boot, err := node.BootID(f.driver.proc)
	if err != nil {
		log.Warn("cannot tell one boot of the machine from the next; "+
			"of what was laid out and withdrawn before, nothing is believed", "err", err)
	}
	kubelet := node.NewPodResources(f.node.kubeletDir)
	defer kubelet.Close()
	d.runtime = f.node.runtime(f.Domain, func() bool { return d.loop.Claims() }, log)
	defer d.runtime.Close()
	d.metrics = agentobs.NewMetrics(version())
	d.driver = nvml.NewLate(func(ctx context.Context) (*nvml.Driver, error) {
		return openDriver(ctx, f, log)
	}, d.metrics.DriverCall)

	d.options = f.options(boot, log)
	d.worlds = agent.Worlds{
		Driver: d.driver, Files: files, Caps: d.caps, Kubelet: kubelet, Runtime: d.runtime, Store: store,
		Observer:   &agent.HeapLimit{Observer: d.metrics, Listed: func() int { return d.loop.Listed() }},
		Account:    f.usage.account(f.node.stateDir, d.runtime, func() *guard.Guard { return d.watchdog }),
		Containers: func() []status.Container { return d.watchdog.State().Containers },
		End:        func(ctx context.Context, c *node.Container) (string, error) { return d.watchdog.End(ctx, c) },
		Detach:     func(ctx context.Context, c *node.Container) { d.watchdog.Detach(ctx, c) },
		Yields:     d.metrics,
	}
	d.worlds.Lending = &agent.Lending{Pages: d.caps.Pages, Annotations: d.runtime.PodAnnotations,
		Presence: func(u gpu.UUID) (guard.Presence, bool) { return d.watchdog.Presence(u) }}
	limiter := guard.ByCgroup{Driver: d.driver, Runtime: d.runtime}
	d.worlds.Limits = limiter
	if f.nodeName != "" {
		if err := d.connect(f); err != nil {
			return err
		}
	}
	if f.labels.node.Value == "nfd" {
		d.worlds.Features = features(f.node.nfdDir)
	}
	proc := node.NewProc(f.driver.proc)
	defer proc.Close()
	d.worlds.Setups, d.worlds.PodOf = guard.Setups{Driver: d.driver, Limits: limiter}, func(pid int) string {
		o, err := proc.Container(pid)
		if err != nil {
			return "" // it has ended, or is in no pod's container
		}
		return o.PodUID
	}
	if d.worlds.Parking, err = newParking(f, d.driver, d.runtime, proc, d.caps.Pages, d.metrics, log); err != nil {
		return err
	}
	d.worlds.MPS = newMPSWorld(f.node.stateDir, f.driver.root, log)
	plugins := d.newPlugins(f.node.kubeletDir)
	d.worlds.Plugins = plugins
	d.loop = agent.New(d.options, d.worlds)
	d.watchdog = d.newWatchdog(&f.cap, proc, limiter, lib.OpenOutcomes(f.node.stateDir))
	if err := d.serve(ctx, f, plugins); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("ended; devices stay with their containers")
	return nil
}

// options returns the loop's options. boot is empty if it is not known.
func (f *runFlags) options(boot string, log *slog.Logger) agent.Options {
	o := agent.Options{
		Domain:         f.Domain,
		ResourceDomain: f.ResourceDomain,
		MemoryUnit:     gpu.MiB(f.unit),
		API:            ledger.FrontEnd(f.api.Value),
		KeepOffering:   f.layout.whenBusy.Value == "wait",
		IdleTTL:        f.layout.idleTTL,
		LinksEvery:     f.health.linksEvery,
		HoldScaleDown:  f.schedulers.holdScaleDown,
		FaultTaint:     agentkube.TaintEffect(f.health.taint.Value),
		HoldersIn:      holdersIn[f.schedulers.gpuNode.Value],
		Labels:         agent.Labels{Own: f.labels.node.Value != "none", Guest: f.labels.nvidia.Value == "absent"},
		Align:          deviceplugin.Alignment(f.numaHints.Value),
		ReclaimForeign: f.layout.foreign.Value == "reclaim",
		NeverReset:     f.layout.reset.Value == "never",
		OpenCaps:       f.cap.policy.Value == "open",
		MPS:            true,
		YieldGrace:     f.tier.grace,
		StateDir:       f.node.stateDir,
		Boot:           boot,
		Node:           f.nodeName,
		Health:         f.health.options(),
		Log:            log,
	}
	if ns, name, ok := command.Namespaced(f.pod); ok {
		o.Pod = workload.Pod{Namespace: ns, Name: name}
	}
	return o
}

// holdersIn maps values of --gpunode to where holders are named. For the others, the loop
// decides.
var holdersIn = map[string]gpunode.HoldersIn{"pods": gpunode.InPods, "holders": gpunode.InObject}

// openDriver opens the driver. It first installs the hook program where the host can run it.
func openDriver(ctx context.Context, f *runFlags, log *slog.Logger) (*nvml.Driver, error) {
	o := f.driver.options(log)
	program, err := nvml.FindHook()
	if err != nil {
		return nil, err
	}
	if o.Hook, err = nvml.InstallHook(program, f.node.stateDir); err != nil {
		return nil, err
	}
	// A lost GPU comes back only to a driver that is initialised again.
	o.Rearm = max(f.health.probe, time.Second)
	return nvml.Open(ctx, o)
}

// connect adds the API server to the worlds.
func (d *daemon) connect(f *runFlags) error {
	client, err := agentkube.New(agentkube.Options{
		Options: kube.Options{
			Kubeconfig: f.kubeconfig, Domain: f.Domain, Logger: d.log,
			Failed:   d.metrics.APIError,
			Answered: d.metrics.APIAnswered,
			Refused:  func(request string, err error) { d.loop.SetRefused(request, err) },
		},
		NodeName: f.nodeName, ResourceDomain: f.ResourceDomain, StartupTaint: f.schedulers.startupTaint,
		Allocatable: func(amounts map[string]int64) {
			if d.worlds.Lowering != nil {
				d.worlds.Lowering.See(amounts)
			}
		},
	})
	if err != nil {
		return err
	}
	d.cluster = &cluster{client, agentkube.NewEvents(client, func(o agentkube.EventOutcome) { d.metrics.Event(string(o)) })}
	d.metrics.APIAnswered() // so that an agent without an API server from its start on is overdue, too
	d.worlds.Cluster = d.cluster
	if f.schedulers.lowerAllocatable {
		d.worlds.Lowering = agent.NewLowering(d.cluster, d.metrics.Lowered, d.log)
	}
	if f.schedulers.gpuNode.Value != "off" {
		d.worlds.GPUNodes = d.cluster
	}
	d.worlds.DRA = &agent.DRA{
		API:     d.cluster,
		Kubelet: frontend.KubeletDir(filepath.Join(f.node.hostRoot, f.node.kubeletDir)),
		Serve: func(front *frontend.FrontEnd) (agent.DRADriver, error) {
			return serveDRA(front, dra.Options{
				Name: front.Driver, Driver: front, Dir: filepath.Join(f.node.kubeletDir, "plugins_registry"),
				Logger: d.log, Observer: d.metrics,
			})
		},
	}
	if f.cap.evictAfter > 0 {
		d.worlds.DRA.Evict, d.worlds.Evict = d.cluster.Evict, d.cluster.EvictWithin
	}
	return nil
}

// newPlugins makes the part that offers devices to the kubelet.
func (d *daemon) newPlugins(kubeletDir string) *plugin.Kubelet {
	var sent func(resource string, healthy int)
	if d.worlds.Lowering != nil {
		sent = d.worlds.Lowering.Sent
	}
	return plugin.NewKubelet(plugin.KubeletOptions{
		Dir: filepath.Join(kubeletDir, "device-plugins"), Logger: d.log, Observer: d.metrics,
		Looked:  func() { d.loop.LookAtCheckpoint() },
		Changed: func() { d.loop.LookAtPlugins() },
		Sent:    sent,
	})
}

func (d *daemon) newWatchdog(f *capFlags, proc *node.Proc, limiter guard.Limiter, outcomes *lib.Outcomes) *guard.Guard {
	watch := guard.Worlds{
		Driver:      d.driver,
		Allocations: d.loop,
		Proc:        guard.Processes{Proc: proc, Runtime: d.runtime},
		Runtime:     d.runtime,
		Pages:       guard.Counters{Pages: d.caps.Pages},
		Observer:    agent.Offences{Metrics: d.metrics, Account: d.worlds.Account},
		Limiter:     limiter,
		Outcomes:    &guard.HookOutcomes{All: outcomes, Runtime: d.runtime},
		Shares:      agent.Shares{Agent: d.loop},
	}
	if d.cluster != nil {
		watch.Cluster = d.cluster
	}
	return guard.New(guard.Options{
		Domain: d.options.Domain, Every: f.every, EndIntruders: f.intruders.Value == "end", EvictAfter: f.evictAfter,
		Own: d.options.Pod, Log: d.log,
	}, watch)
}

// status returns the status of the loop, the watchdog and the policies.
func (d *daemon) status() status.Status {
	s := d.loop.Status()
	s.Node, s.Version = d.options.Node, version()
	d.watchdog.State().Show(&s)
	if p := d.policies.Load(); p != nil {
		s.Policies = *p
	}
	return s
}

// serve runs the loop and its services until ctx ends or one of them fails.
func (d *daemon) serve(ctx context.Context, f *runFlags, plugins *plugin.Kubelet) error {
	page := agentobs.New(agentobs.Options{
		Addr: f.http, Logger: d.log, Metrics: d.metrics, Healthy: d.loop.Healthy, Ready: d.loop.Ready, Status: d.status,
		Account: f.usage.metrics(f.nodeName, d.worlds.Account, d.status),
		Within:  f.within(agentobs.Within{Foresee: d.loop.Foresee}),
	})
	door := agentobs.Door{Path: filepath.Join(f.node.stateDir, state.Socket), Logger: d.log, Foresee: d.loop.Foresee}
	services := []func(context.Context) error{
		plugins.Run, page.Run, door.Run,
		func(ctx context.Context) error { return followPartitions(ctx, f, d.cluster, d.loop) },
	}
	if d.cluster != nil {
		o := agentkube.PolicyOptions{
			Evictions: f.cap.evictAfter > 0, DRA: d.loop.Claims, GPUNodes: f.schedulers.gpuNode.Value != "off",
			Pod: workload.Pod{Namespace: d.options.Pod.Namespace, Name: d.options.Pod.Name},
		}
		services = append(services, d.cluster.Run,
			func(ctx context.Context) error { return d.cluster.WatchNode(ctx, d.loop.SetNode) },
			func(ctx context.Context) error {
				return d.cluster.WatchPolicies(ctx, o, func(list []status.Policy) { d.policies.Store(&list) })
			})
	}
	if f.cap.detachEnding {
		services = append(services, func(ctx context.Context) error { return d.cluster.WatchEndings(ctx, d.watchdog) })
	}
	if f.cap.every > 0 {
		services = append(services, d.watchdog.Run)
	}
	return around(ctx, d.loop.Run, services...)
}

// around runs the loop and its services. When ctx ends, the loop ends first and the services
// after it, so that the kubelet is still served while the loop shuts down.
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

// serveDRA serves a front-end to the kubelet. The front-end publishes only while the kubelet
// knows the driver: a kubelet that starts deletes what was published.
func serveDRA(front *frontend.FrontEnd, o dra.Options) (agent.DRADriver, error) {
	var server *dra.Server
	o.Registered = func() { front.Publisher().Registered(true) }
	o.Changed = func() {
		front.Publisher().Registered(server.Status().Registered)
		front.Wake() // the loop reports a kubelet that does not have the driver
	}
	var err error
	server, err = dra.New(o)
	return server, err
}

// features is the directory of Node Feature Discovery.
type features string

func (dir features) Write(f nfd.Features) error { return nfd.Write(string(dir), f) }

// followPartitions passes the partition file to the loop at each change.
func followPartitions(ctx context.Context, f *runFlags, cluster *cluster, loop *agent.Agent) error {
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
