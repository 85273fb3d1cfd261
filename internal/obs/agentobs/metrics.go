// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"errors"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	grpcstatus "google.golang.org/grpc/status"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

// Metrics counts what happens between two scrapes. Its methods may be called from several
// goroutines and never block.
type Metrics struct {
	version string
	own     *prometheus.Registry // has the metrics below

	plugin, driver, round, steps, wishes *prometheus.HistogramVec
	yields                               *prometheus.HistogramVec
	parks, restores                      *prometheus.HistogramVec
	parkedTime                           prometheus.Counter
	parked, parkedBytes                  prometheus.Gauge
	answered                             *prometheus.GaugeVec
	api, events, gpus, kills             *prometheus.CounterVec
	unregistered, refusals, lowered      *prometheus.CounterVec
	evicted                              prometheus.Counter
	breach                               prometheus.Histogram
}

// KillReasons are the reasons why the watchdog ends a container: it uses more than its cap, or it
// uses a GPU without an allocation on it.
var KillReasons = []memcap.Kind{memcap.Over, memcap.Intruder}

// YieldWays are the ways in which a pod of the spot tier gives its room back.
var YieldWays = []string{"evicted", "ended", "left", "parked"}

// refusalReasons are the reasons of refusals after which the kubelet does not ask again.
var refusalReasons = []status.Reason{status.NotOffered, status.NotOneGPU, status.TooFewGPUs, status.MPSOneGPU,
	status.NoRoom, status.BadRequest, status.SpotRefused}

// NewMetrics returns metrics with all counters at 0. version is the agent's.
func NewMetrics(version string) *Metrics {
	own := prometheus.NewRegistry()
	auto := promauto.With(own)
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return auto.NewHistogramVec(prometheus.HistogramOpts{Name: obs.Prefix + name, Help: help, Buckets: buckets},
			labels)
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: obs.Prefix + name, Help: help}, labels)
	}
	m := &Metrics{
		version: version,
		own:     own,
		// A call usually takes less than a millisecond. PreStartContainer may wait for up to 30 s,
		// the kubelet's limit.
		plugin: histogram("plugin_request_duration_seconds",
			"Time to answer a call of the kubelet's device-plugin API.",
			[]float64{.00005, .0001, .00025, .0005, .001, .0025, .01, .1, 1, 10, 30}, "resource", "method", "code"),
		// Creating a MIG instance takes up to 1 s, and 5 s on a busy node.
		driver: histogram("driver_request_duration_seconds",
			"Time that a call of the GPU driver took.",
			[]float64{.0001, .001, .01, .1, 1, 10}, "call", "code"),
		round: histogram("round_duration_seconds",
			"Time that a round of the loop took, from reading the node to publishing the offer.",
			[]float64{.001, .01, .1, 1, 10, 60}, "result"),
		answered: obs.AnsweredIn(auto),
		api: counter("api_errors_total",
			"Requests to the API server that failed.", "verb", "resource"),
		events: counter("events_total",
			"Kubernetes Events by outcome: sent, merged into an earlier one, or dropped.", "outcome"),
		gpus: counter("gpu_events_total",
			"Events that the driver reported of a GPU; xid is the error's number, 0 for other kinds.",
			"gpu", "kind", "xid"),
		refusals: counter("plugin_refusals_total",
			"Requests of the kubelet that were refused, by reason. The kubelet asks again for a container "+
				"that cannot start yet (NotReady).", "resource", "reason"),
		lowered: counter("allocatable_writes_total",
			"Times that the Node's allocatable of a resource was lowered: after a list with fewer devices (list), "+
				"because the kubelet had written more than the list says (kubelet), or because the agent ended (end).",
			"cause"),
		unregistered: counter("plugin_registration_errors_total",
			"Registrations of a resource that the kubelet refused, or did not answer.", "resource"),
		kills: counter("cap_kills_total",
			"Containers that the watchdog has ended: they were over their memory cap (over), or used a GPU without "+
				"an allocation on it (intruder).", "reason"),
		evicted: auto.NewCounter(prometheus.CounterOpts{Name: obs.Prefix + "cap_evictions_total",
			Help: "Pods that were evicted since they exceeded their memory cap again and again."}),
		// The watchdog reads four times a second, and acts on the second breach.
		breach: auto.NewHistogram(prometheus.HistogramOpts{Name: obs.Prefix + "cap_breach_to_end_seconds",
			Help:    "Time from the reading that first showed a container over its cap to the end of its processes.",
			Buckets: []float64{.1, .25, .5, .75, 1, 2, 5, 10, 30}}),
		// A container that is ended has given its room back a moment after its grace, which is 20 s by default.
		yields: histogram("spot_yield_seconds",
			"Time from the request for room that a pod of the spot tier had until the room was free, by the way it "+
				"was given back: its pod was evicted (evicted), its container was ended after the grace (ended), or had "+
				"ended before (left), or its memory was moved to the host (parked).",
			[]float64{.5, 1, 2.5, 5, 10, 15, 20, 22.5, 25, 30, 60, 300}, "way"),
		// Memory is copied at some GiB a second, and a card has up to 192 GiB.
		parks: histogram("spot_park_seconds",
			"Time that it took to move the GPU memory of a container of the spot tier to the host, by outcome: it is parked, "+
				"nothing has changed (refused), or its processes may be broken.",
			[]float64{.25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160}, "outcome"),
		restores: histogram("spot_restore_seconds",
			"Time that it took to move the memory of a parked container back to its GPUs, by outcome: it is restored, the "+
				"GPU had no room, the driver did not answer (failed), or its processes may be broken.",
			[]float64{.25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160}, "outcome"),
		parkedTime: auto.NewCounter(prometheus.CounterOpts{Name: obs.Prefix + "spot_parked_seconds_total",
			Help: "Time that containers of the spot tier were parked, together, of those that were restored."}),
		parked: auto.NewGauge(prometheus.GaugeOpts{Name: obs.Prefix + "spot_parked_containers",
			Help: "Containers of the spot tier whose processes are parked."}),
		parkedBytes: auto.NewGauge(prometheus.GaugeOpts{Name: obs.Prefix + "spot_parked_bytes",
			Help: "Host memory with what parked containers had on GPUs."}),
		// An instance takes 0.1 to 1 s, or 5 s on a busy node, and a reset takes 10 s or more. The
		// last bucket shows a driver that hangs.
		steps: histogram("mig_step_duration_seconds",
			"Time that a step of a change to a GPU's MIG instances took, by its outcome.",
			[]float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}, "op", "profile", "outcome"),
		// The kubelet asks again after 30 s; the work continues meanwhile.
		wishes: histogram("mig_wish_duration_seconds",
			"Time from a container's request for a MIG instance until the container could start.",
			[]float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}, "profile"),
	}
	for _, way := range YieldWays {
		m.yields.WithLabelValues(way)
	}
	for _, outcome := range []string{"parked", "refused", "broken"} {
		m.parks.WithLabelValues(outcome)
	}
	for _, outcome := range []string{"restored", "no room", "failed", "broken"} {
		m.restores.WithLabelValues(outcome)
	}
	for _, reason := range KillReasons {
		m.kills.WithLabelValues(string(reason)) // rate() needs a 0 to start from
	}
	return m
}

// APIAnswered sets the time of the API server's last answer to now. The agent also calls it when it
// begins to ask.
func (m *Metrics) APIAnswered() { m.answered.WithLabelValues().SetToCurrentTime() }

// Called counts a call of the kubelet. resource is the full resource name, and method the RPC's
// ("Allocate"). The label code is the gRPC code of err ("OK").
func (m *Metrics) Called(resource, method string, took time.Duration, err error) {
	m.plugin.WithLabelValues(resource, method, grpcstatus.Code(err).String()).Observe(took.Seconds())
}

// Lowered counts a lowering of a resource in the Node's allocatable. cause is "list", "kubelet" or
// "end".
func (m *Metrics) Lowered(cause string) { m.lowered.WithLabelValues(cause).Inc() }

// Registered counts a registration at the kubelet if it failed.
func (m *Metrics) Registered(resource string, err error) {
	for _, reason := range refusalReasons { // rate() needs a 0 to start from
		m.refusals.WithLabelValues(resource, string(reason))
	}
	if err != nil {
		m.unregistered.WithLabelValues(resource).Inc()
	}
}

// Refused counts a request of the kubelet that was refused, by the reason of err.
func (m *Metrics) Refused(resource string, err error) {
	m.refusals.WithLabelValues(resource, string(status.CauseOf(err, status.NotOffered).Reason)).Inc()
}

// DriverCall counts a call of the driver. code is "ok" or the kind of the failure.
func (m *Metrics) DriverCall(call, code string, took time.Duration) {
	m.driver.WithLabelValues(call, code).Observe(took.Seconds())
}

// Round counts a round of the loop.
func (m *Metrics) Round(err error, took time.Duration) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.round.WithLabelValues(result).Observe(took.Seconds())
}

// GPUEvent counts an event of the driver.
func (m *Metrics) GPUEvent(e gpu.Event) {
	m.gpus.WithLabelValues(string(e.GPU), string(e.Kind), strconv.FormatUint(e.Xid, 10)).Inc()
}

// APIError counts a failed request to the API server. verb and resource are RBAC's.
func (m *Metrics) APIError(verb, resource string) { m.api.WithLabelValues(verb, resource).Inc() }

// Event counts an Event by its outcome: "sent", "merged" or "dropped".
func (m *Metrics) Event(outcome string) { m.events.WithLabelValues(outcome).Inc() }

// Ended counts a container that the watchdog has ended. kind is one of KillReasons. took is the
// time from the first reading that showed the offence to the end of the container's processes.
func (m *Metrics) Ended(kind memcap.Kind, took time.Duration) {
	m.kills.WithLabelValues(string(kind)).Inc()
	if kind == memcap.Over {
		m.breach.Observe(took.Seconds())
	}
}

// Evicted counts a pod that was evicted for its offences.
func (m *Metrics) Evicted() { m.evicted.Inc() }

// Yielded counts a spot allocation that has given its room back. way is one of YieldWays, and took the time since
// its room was wanted.
func (m *Metrics) Yielded(way string, took time.Duration) {
	m.yields.WithLabelValues(way).Observe(took.Seconds())
}

// Parked is as agent.ParkObserver has it.
func (m *Metrics) Parked(outcome string, _ uint64, took time.Duration) {
	m.parks.WithLabelValues(outcome).Observe(took.Seconds())
}

// Restored is as agent.ParkObserver has it.
func (m *Metrics) Restored(outcome string, took, parked time.Duration) {
	m.restores.WithLabelValues(outcome).Observe(took.Seconds())
	if outcome == "restored" {
		m.parkedTime.Add(parked.Seconds())
	}
}

// ParkedNow is as agent.ParkObserver has it.
func (m *Metrics) ParkedNow(containers int, bytes uint64) {
	m.parked.Set(float64(containers))
	m.parkedBytes.Set(float64(bytes))
}

// MIGStep counts a step of a change to a GPU's MIG instances. op is one of
// "destroy", "create", "enable", "disable", "reset" and "undo"; profile is empty
// if the step concerns the whole GPU.
func (m *Metrics) MIGStep(op, profile string, took time.Duration, err error) {
	m.steps.WithLabelValues(op, profile, outcome(err)).Observe(took.Seconds())
}

// outcome returns the outcome of a step. A step that found a process or no room differs from one
// that the driver refused.
func outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, gpu.ErrInUse):
		return "in_use"
	case errors.Is(err, gpu.ErrNoRoom):
		return "no_room"
	}
	return "error"
}

// Wish counts a container's request for a MIG instance; took is the time from the
// request until the container could start.
func (m *Metrics) Wish(profile string, took time.Duration) {
	m.wishes.WithLabelValues(profile).Observe(took.Seconds())
}

// registry returns all that /metrics shows.
func (m *Metrics) registry(o *Options) *prometheus.Registry {
	all := []prometheus.Collector{m.own, view{version: m.version, status: o.Status}}
	if o.Account != nil {
		all = append(all, o.Account)
	}
	return obs.Registry(all...)
}

// described are all descriptions that Collect can send.
var described []*prometheus.Desc

func gauge(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(obs.Prefix+name, help, labels, nil)
	described = append(described, d)
	return d
}

var (
	buildInfo = gauge("build_info", "The agent's version and the Go version it was built with; always 1.", "version",
		"goversion")
	driverInfo = gauge("driver_info", "The GPU driver's version and the newest CUDA version it serves; always 1.",
		"driver", "cuda")
	gpuInfo = gauge("gpu_info", "A GPU's index, model and mode (whole, shared, mig, off); always 1.", "gpu", "index",
		"model", "mode")
	gpuMemory = gauge("gpu_memory_bytes", "Size of the GPU's memory, including what the driver keeps for itself.",
		"gpu")
	gpuHealthy = gauge("gpu_healthy", "Whether the GPU is healthy: 1 or 0.", "gpu")
	gpuFault   = gauge("gpu_fault", "A fault of the GPU by its class; 1 while there is one.", "gpu", "class")
	left       = gauge("left_behind", "What an earlier owner has left on a GPU, by its code, and whether it keeps the "+
		"partition from working (matters); 1 while it is there. The empty GPU is the node.", "gpu", "code", "matters")
	registered = gauge("plugin_registered", "Whether the kubelet receives the list of the resource's devices and "+
		"knows them: 1 or 0.", "resource")
	hangs      = gauge("driver_hangs", "Whether the driver does not answer, so that hardware work waits: 1 or 0.")
	gpuBlocked = gauge("gpu_blocked", "Whether the wanted change of the GPU waits for holders: 1 or 0.", "gpu")
	devices    = gauge("devices", "Devices on offer to the kubelet: free, held, or unhealthy and not held.",
		"gpu", "resource", "state")
	canBeHad = gauge("resource_free", "Devices of a resource that a container can get now. MIG devices on demand "+
		"exclude each other.", "resource")
	largest = gauge("resource_largest_request", "The largest request for a resource by one container that fits on "+
		"the node now.", "resource")
	saturation = gauge("saturation_ratio", "The part of the memory of the node's GPUs that is held or not available, "+
		"0 to 1. GPUs with mode off do not count.")
	allocated = gauge("allocations", "Allocations: sets of devices that were given together and have not ended.")
	partition = gauge("partition_state", "State of the node's partition: 1 for the present one, 0 for the others.",
		"partition", "state")
	generation = gauge("partition_generation", "How many partitions were accepted since the agent started.")

	migEnabled = gauge("mig_enabled",
		"Whether MIG is in force on a GPU that has or should have MIG instances: 1 or 0.", "gpu")
	migPending    = gauge("mig_pending", "Whether a change of the GPU's MIG mode waits for a reset: 1 or 0.", "gpu")
	migPlacements = gauge("mig_slots",
		"MIG devices of a GPU, by profile, that are "+strings.Join(status.PlacementStates, ", ")+
			". Those that overlap exclude each other.",
		"gpu", "profile", "state")
	// These label names are dcgm-exporter's, so that a query can join by them.
	deviceInfo = gauge("device_info",
		"A device that a container holds, or an existing MIG instance; always 1. UUID, GPU_I_ID and GPU_I_PROFILE "+
			"are as dcgm-exporter writes them.",
		"device", "resource", "UUID", "GPU_I_ID", "GPU_I_PROFILE", "mig_uuid", "namespace", "pod", "container")

	containerCap = gauge("container_memory_cap_bytes",
		"GPU memory that a container may use; the label guarantee names what enforces it. None for a whole GPU.",
		"namespace", "pod", "container", "gpu", "guarantee")
	containerUsed = gauge("container_memory_used_bytes",
		"GPU memory of a container that counts against its cap, as the watchdog read it last; none while it is "+
			"unknown. Managed memory in it is the container's own figure.",
		"namespace", "pod", "container", "gpu")
	containerPeak = gauge("container_memory_peak_bytes",
		"The most GPU memory that the watchdog has seen a container use. Managed memory in it is the container's "+
			"own figure.",
		"namespace", "pod", "container", "gpu")
	containerRefusals = gauge("container_memory_refusals_total",
		"Allocations that a container's cap has refused, by the container's own counter.",
		"namespace", "pod", "container", "gpu")
	containerUncounted = gauge("container_memory_uncounted_total",
		"Allocations of a kind that the cap's library does not know and has let pass under the open policy, by the "+
			"container's own counter.",
		"namespace", "pod", "container", "gpu")
	containerUndone = gauge("container_memory_undone_bytes",
		"The most that a memory pool of a container has taken beyond the cap and given back at once, by the "+
			"container's own counter.",
		"namespace", "pod", "container", "gpu")
	containerCompute = gauge("container_compute_percent",
		"A container's share of a GPU's multiprocessors, in percent; the label guarantee is ceiling if the watchdog "+
			"sees that it is held, and otherwise none. None for containers without a share of their own.",
		"namespace", "pod", "container", "gpu", "guarantee")
	detaches = gauge("mps_detaches_total",
		"Clients of MPS that the watchdog was about to end: detached before that (detached), or not, since the daemon "+
			"did not answer in time (unanswered).", "outcome")
	watchdogUp = gauge("watchdog_up", "Whether the watchdog over memory caps runs: 1 or 0.")
	policyHeld = gauge("policy_in_force",
		"Whether an admission policy that limits the agent to its own node refuses what it must: 1 or 0. None while "+
			"that is not known.", "policy")
	unallocated = gauge("unallocated_processes",
		"Processes that use a GPU without an allocation on it: of a container (intruder), of no pod (no-pod), or of "+
			"a container that the runtime does not list (unlisted). None while the watchdog is off.",
		"gpu", "kind")
)

// view collects the metrics that are computed from a Status.
type view struct {
	version string
	status  func() status.Status
}

// Describe sends all descriptions, so that a clash of names is found at the start.
func (v view) Describe(out chan<- *prometheus.Desc) {
	for _, d := range described {
		out <- d
	}
}

// sender sends a metric with its labels.
type sender func(d *prometheus.Desc, value float64, labels ...string)

// Collect sends the metrics of one Status.
func (v view) Collect(out chan<- prometheus.Metric) {
	as := func(kind prometheus.ValueType) sender {
		return func(d *prometheus.Desc, value float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, kind, value, valid(labels)...)
		}
	}
	send := as(prometheus.GaugeValue)
	s := v.status()
	send(buildInfo, 1, v.version, runtime.Version())
	if s.Driver != "" {
		send(driverInfo, 1, s.Driver, s.CUDA)
	}
	send(allocated, float64(s.Allocations))
	send(hangs, obs.Truth(s.Hardware != ""))
	for _, r := range s.Resources {
		send(registered, obs.Truth(r.Registered), r.Name)
		send(canBeHad, float64(r.Free), r.Name)
		send(largest, float64(r.Largest), r.Name)
	}
	if s.SaturationPercent != nil {
		send(saturation, float64(*s.SaturationPercent)/100)
	}
	send(generation, float64(s.Partition.Generation))
	if s.Partition.State != "" {
		for _, state := range status.PartitionStates {
			send(partition, obs.Truth(state == s.Partition.State), s.Partition.Name, state)
		}
	}
	watched := s.Watchdog.State == status.WatchdogRunning
	send(watchdogUp, obs.Truth(watched))
	as(prometheus.CounterValue)(detaches, float64(s.Watchdog.Detached), "detached")
	as(prometheus.CounterValue)(detaches, float64(s.Watchdog.Undetached), "unanswered")
	for _, p := range s.Policies {
		if p.State != status.PolicyUnknown {
			send(policyHeld, obs.Truth(p.State == status.PolicyHeld), p.Name)
		}
	}
	found := map[string]bool{} // two of a kind would make the whole scrape fail
	for _, c := range s.Found {
		if key := c.Subject + " " + string(c.Reason); !found[key] {
			found[key] = true
			send(left, 1, c.Subject, string(c.Reason), strconv.FormatBool(c.Type != status.Noted))
		}
	}
	// Two GPUs with the same UUID would make the whole scrape fail.
	seen := map[string]bool{}
	for i := range s.GPUs {
		if g := &s.GPUs[i]; !seen[g.UUID] {
			seen[g.UUID] = true
			sendGPU(send, g, watched)
		}
	}
	sendContainers(send, as(prometheus.CounterValue), s.Containers)
}

func sendGPU(send sender, g *status.GPU, watched bool) {
	send(gpuInfo, 1, g.UUID, strconv.Itoa(g.Index), g.Model, string(g.Mode))
	if g.MemoryMiB > 0 { // otherwise it has no memory of its own
		send(gpuMemory, bytes(g.MemoryMiB), g.UUID)
	}
	send(gpuHealthy, obs.Truth(g.Health == status.Healthy), g.UUID)
	if g.Class != "" {
		send(gpuFault, 1, g.UUID, g.Class)
	}
	send(gpuBlocked, obs.Truth(g.Blocked != ""), g.UUID)
	for _, o := range g.Offers() {
		send(devices, float64(o.Free), g.UUID, o.Resource, "free")
		send(devices, float64(o.Held), g.UUID, o.Resource, "held")
		send(devices, float64(o.Unhealthy), g.UUID, o.Resource, "unhealthy")
	}
	if watched {
		send(unallocated, float64(g.Intruders), g.UUID, "intruder")
		send(unallocated, float64(g.NoPod), g.UUID, "no-pod")
		send(unallocated, float64(g.Unlisted), g.UUID, "unlisted")
	}
	if m := g.MIG; m != nil {
		send(migEnabled, obs.Truth(m.Enabled), g.UUID)
		send(migPending, obs.Truth(m.Pending != nil && *m.Pending != m.Enabled), g.UUID)
		placements := map[string]map[string]int{} // by profile and state
		for _, s := range m.Placements {
			profile := strings.ToValidUTF8(s.Profile, "\uFFFD")
			if placements[profile] == nil {
				placements[profile] = map[string]int{}
			}
			placements[profile][s.State]++
		}
		for profile, n := range placements {
			for _, state := range status.PlacementStates { // alerts need the zeros, too
				send(migPlacements, float64(n[state]), g.UUID, profile, state)
			}
		}
	}
	sendDevices(send, g)
}

// sendContainers sends the series of the containers that exist now. So no series has to be deleted
// when a container ends.
func sendContainers(send, count sender, containers []status.Container) {
	once := map[[4]string]bool{}
	for _, c := range containers {
		labels := [4]string(valid([]string{c.Namespace, c.Pod, c.Container, c.GPU}))
		if c.Pod == "" || once[labels] {
			continue // not named yet, or a duplicate
		}
		once[labels] = true
		if c.CapMiB != nil {
			send(containerCap, bytes(*c.CapMiB), append(labels[:], c.Guarantee)...)
			count(containerRefusals, float64(c.Refusals), labels[:]...)
			count(containerUncounted, float64(c.Uncounted), labels[:]...)
			send(containerUndone, bytes(c.UndoneMiB), labels[:]...)
		}
		if c.Compute != nil {
			send(containerCompute, float64(c.ComputePercent), append(labels[:], string(c.Compute.Guarantee))...)
		}
		if c.UsedMiB != nil {
			send(containerUsed, bytes(*c.UsedMiB), labels[:]...)
		}
		if c.HasPeak() {
			send(containerPeak, bytes(c.PeakMiB), labels[:]...)
		}
	}
}

// sendDevices sends device_info: one for each GPU and each container that holds devices of it, and
// one for each MIG instance. It leaves out a MIG device without an instance, which would join with
// the figures of the whole GPU.
func sendDevices(send sender, g *status.GPU) {
	once := map[[9]string]bool{}
	note := func(labels ...string) {
		if l := [9]string(valid(labels)); !once[l] {
			once[l] = true
			send(deviceInfo, 1, l[:]...)
		}
	}
	if g.MIG != nil {
		for i := range g.MIG.Placements {
			if s := &g.MIG.Placements[i]; s.UUID != "" {
				note(s.Device, s.Resource, g.UUID, strconv.Itoa(s.GI), s.GPUInstance(), s.UUID, s.Namespace, s.Pod,
					s.Container)
			}
		}
	}
	for _, h := range g.Others() {
		if h.Pod != "" && !h.Instances {
			note(g.UUID, h.Resource, g.UUID, "", "", "", h.Namespace, h.Pod, h.Container)
		}
	}
}

func bytes(mib uint64) float64 { return float64(mib) * (1 << 20) }

// valid replaces invalid UTF-8, which Prometheus does not allow in a label.
func valid(labels []string) []string {
	for i, l := range labels {
		labels[i] = strings.ToValidUTF8(l, "\uFFFD")
	}
	return labels
}
