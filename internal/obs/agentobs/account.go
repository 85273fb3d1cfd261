// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
)

// Account collects the metrics of what containers are granted and use.
type Account struct {
	// Node is the Node's name.
	Node string
	// Usage is called once for each scrape.
	Usage func() usage.Shown
	// Status is the source of the metrics with dcgm-exporter's names. It is nil if those are off.
	Status func() status.Status
}

var (
	// accounted are all descriptions that an Account can send.
	accounted []*prometheus.Desc

	ofContainer = []string{"namespace", "pod", "container", "gpu"}
	ofTier      = append(slices.Clone(ofContainer), "tier")

	grantedGPU = desc(obs.Prefix+"container_granted_gpu_seconds_total",
		"GPUs that a container was granted, times seconds: a quarter of one for four seconds is 1.", ofTier...)
	usedGPU = desc(obs.Prefix+"container_used_gpu_seconds_total",
		"The same, while a process of the container was on the GPU. None while that is not known.", ofTier...)
	grantedMemory = desc(obs.Prefix+"container_granted_memory_byte_seconds_total",
		"GPU memory that a container was granted, times seconds.", ofTier...)
	usedMemory = desc(obs.Prefix+"container_used_memory_byte_seconds_total",
		"GPU memory that a container used, times seconds. None while that is not known.", ofTier...)
	lentGPU = desc(obs.Prefix+"container_lent_gpu_seconds_total",
		"GPUs that a container was granted and spot pods had meanwhile, times seconds. None while there are none.",
		ofContainer...)
	lentMemory = desc(obs.Prefix+"container_lent_memory_byte_seconds_total",
		"GPU memory that a container was granted and spot pods had meanwhile, times seconds. None while there is none.",
		ofContainer...)
	smTime = desc(obs.Prefix+"container_sm_seconds_total",
		"Share of a GPU's streaming multiprocessors that a container used, times seconds, by the driver's figures "+
			"for its processes. None if the driver has no figures (MIG).", ofTier...)
	idleFor = desc(obs.Prefix+"container_idle_seconds",
		"How long a container has had no process on a GPU that it holds, in whole or in part; 0 while it has "+
			"one. None while that is not known.", ofContainer...)
	journalUp   = desc(obs.Prefix+"usage_journal_up", "Whether the last write to the usage journal succeeded: 1 or 0.")
	recordsLost = desc(obs.Prefix+"usage_records_lost_total",
		"Records of the usage journal that could not be written, since the start.")
	recordsDropped = desc(obs.Prefix+"usage_records_dropped_total",
		"Records that the usage journal had no room for, since the start: of use, or of refused requests.", "of")

	// OpenCost and Kubecost look for this name.
	allocation = desc("container_gpu_allocation", "The part of physical GPUs that a container holds: 0.25 for a "+
		"quarter of one, 2 for two.", "namespace", "pod", "container", "node")
	// dcgm-exporter has this name.
	framebuffer = desc("DCGM_FI_DEV_FB_USED", "GPU memory that a container uses, in MiB.", "gpu", "UUID", "device",
		"modelName", "Hostname", "namespace", "pod", "container")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	accounted = append(accounted, d)
	return d
}

// Describe implements prometheus.Collector.
func (a *Account) Describe(out chan<- *prometheus.Desc) {
	for _, d := range accounted {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (a *Account) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, value, valid(slices.Clone(labels))...)
	}
	u := a.Usage()
	send(journalUp, prometheus.GaugeValue, obs.Truth(u.Written))
	send(recordsLost, prometheus.CounterValue, float64(u.Lost))
	send(recordsDropped, prometheus.CounterValue, float64(u.Dropped.Use), "use")
	send(recordsDropped, prometheus.CounterValue, float64(u.Dropped.Refused), "refused")
	for i := range u.Series {
		s := &u.Series[i]
		of := append(labelsOf(&s.Key), s.Tier.Word())
		send(grantedGPU, prometheus.CounterValue, s.GrantedGPU, of...)
		send(grantedMemory, prometheus.CounterValue, s.GrantedMiB*(1<<20), of...)
		if s.Known {
			send(usedGPU, prometheus.CounterValue, s.UsedGPU, of...)
			send(usedMemory, prometheus.CounterValue, s.UsedMiB*(1<<20), of...)
		}
		if s.SMKnown {
			send(smTime, prometheus.CounterValue, s.SM, of...)
		}
		if s.LentMiB > 0 || s.LentGPU > 0 {
			send(lentGPU, prometheus.CounterValue, s.LentGPU, labelsOf(&s.Key)...)
			send(lentMemory, prometheus.CounterValue, s.LentMiB*(1<<20), labelsOf(&s.Key)...)
		}
	}
	for i := range u.Idle {
		send(idleFor, prometheus.GaugeValue, u.Idle[i].For.Seconds(), labelsOf(&u.Idle[i].Key)...)
	}
	held := map[[3]string]float64{}
	for i := range u.Now {
		p := &u.Now[i]
		held[[3]string{p.Namespace, p.Pod, p.Container}] += p.Share
	}
	for who, share := range held {
		send(allocation, prometheus.GaugeValue, share, append(who[:], a.Node)...)
	}
	if a.Status != nil {
		a.collectFramebuffer(send)
	}
}

func labelsOf(k *usage.Key) []string {
	return []string{k.Namespace, k.Pod, k.Container, string(k.GPU)}
}

// collectFramebuffer sends how much of a GPU's memory each container uses, if that is known.
func (a *Account) collectFramebuffer(send func(*prometheus.Desc, prometheus.ValueType, float64, ...string)) {
	s := a.Status()
	models := map[string]string{}
	for i := range s.GPUs {
		models[s.GPUs[i].UUID] = s.GPUs[i].Model
	}
	type place struct{ namespace, pod, container, gpu string }
	at := map[place]status.Container{}
	for _, c := range s.Containers {
		if c.Pod == "" || c.UsedMiB == nil {
			continue
		}
		k := place{c.Namespace, c.Pod, c.Container, c.GPU}
		if old, ok := at[k]; ok { // two allocations of one GPU
			c.UsedMiB = new(*c.UsedMiB + *old.UsedMiB)
		}
		at[k] = c
	}
	for _, c := range at {
		index := strconv.Itoa(c.Index)
		send(framebuffer, prometheus.GaugeValue, float64(*c.UsedMiB), index, c.GPU, "nvidia"+index, models[c.GPU],
			a.Node, c.Namespace, c.Pod, c.Container)
	}
}
