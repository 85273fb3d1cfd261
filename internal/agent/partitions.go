// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// mailbox holds the news of the partition file and the Node for the loop. Any goroutine may use it.
type mailbox struct {
	domain string
	// wake starts a round.
	wake func()
	// told is called with each Node.
	told func(*agentkube.Node)

	mu    sync.Mutex
	input input // guarded by mu
}

// partitions works out what the mailbox's news means for the GPUs. It belongs to the loop's
// goroutine.
type partitions struct {
	domain string
	// on has the facts about the node, beside its GPUs, that a partition depends on.
	on config.Node
	// wanted is the meaning of the partition active: the last valid one. gen counts its changes.
	wanted []config.Want
	gen    uint64
	active string
	chosen string // the partition that should be in force
	// judged is true once it was known how to lay out the GPUs, or why that cannot be known.
	judged bool
	// cordons are those of the newest annotation.
	cordons cordons
	// resets are those of the newest WasResetAnnotation.
	resets resets
	// desired is the last question to the partition file, with its answer.
	desired struct {
		of  question
		is  config.Desired
		err error
	}
}

// input is the news from outside. It is passed by value.
type input struct {
	// source is the newest file's name, whether it parsed or not.
	source string
	// file is the newest partition file that parsed; nil before the first.
	file *config.File
	// fileErr is why the newest file did not parse, or is missing; nil if it parsed.
	fileErr error
	// chosen is the value of the node's partition label; "" if there is none.
	chosen string
	// labelKnown is true once the Node was seen, or if there is no cluster.
	labelKnown bool
	// cordon and reset are the values of CordonAnnotation and WasResetAnnotation.
	cordon, reset string
	// letGo is why the driver must be let go; "" if it may be used.
	letGo string
	// migManager is the configuration that NVIDIA's MIG manager is to apply to this node; "" if
	// there is none.
	migManager string
	// podsTell is true if the status of pods names their devices.
	podsTell bool
	// allocatable are the extended resources with a nonzero amount in the Node's allocatable.
	allocatable []string
	// refused has the requests that the API server refuses. The map is replaced, never changed.
	refused map[string]refusal
}

// heard reports whether the partition file and the Node are known, or known not to exist.
func (in *input) heard() bool { return in.labelKnown && (in.file != nil || in.fileErr != nil) }

// refusal is the API server's refusal of a request.
type refusal struct {
	err   error
	since time.Time
}

// refusals returns conditions for the requests that the API server has refused for at least that
// long.
func (in *input) refusals(now time.Time, least time.Duration) (out []status.Condition) {
	for _, request := range sortedKeys(in.refused) {
		if r := in.refused[request]; now.Sub(r.since) >= least {
			c := status.Why(status.APIForbidden, "the API server refuses to %s: %v; give the agent's ServiceAccount "+
				"the rights of deployments/base/rbac.yaml", request, r.err).Condition(status.Failed, "")
			c.Since = r.since
			out = append(out, c)
		}
	}
	return out
}

// hear applies a change to the input and starts a round.
func (m *mailbox) hear(change func(*input)) {
	m.mu.Lock()
	change(&m.input)
	m.mu.Unlock()
	m.wake()
}

// latest returns the newest input.
func (m *mailbox) latest() input {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.input
}

// choice returns the partition of a file that the node follows, or why there is none.
func (m *mailbox) choice(f *config.File) (name string, unset status.Cause) {
	in := m.latest()
	if !in.labelKnown {
		return "", status.Why(status.NodeUnknown, "the node's labels are not known yet")
	}
	return in.choice(f, m.domain)
}

// setFile is Agent.SetFile.
func (m *mailbox) setFile(name string, data []byte) {
	f, err := config.Parse(name, data)
	m.hear(func(in *input) {
		in.source, in.fileErr = name, err
		if err == nil {
			in.file = f
		}
	})
}

// setFileMissing is Agent.SetFileMissing.
func (m *mailbox) setFileMissing(err error) {
	m.hear(func(in *input) { in.fileErr = status.Because(status.PartitionsMissing, err) })
}

// setNode takes in the parts of the Node that the loop needs.
func (m *mailbox) setNode(n *agentkube.Node) {
	m.hear(func(in *input) {
		in.chosen, in.labelKnown = n.Labels[m.domain+"/"+PartitionLabel], true
		in.letGo = letGoReason(n, m.domain)
		in.cordon = n.Annotations[m.domain+"/"+CordonAnnotation]
		in.reset = n.Annotations[m.domain+"/"+WasResetAnnotation]
		in.migManager = n.Labels[migManagerLabel]
		in.allocatable = n.Allocatable
		in.podsTell = n.PodsTellDevices
	})
	m.told(n)
}

// setRefused is Agent.SetRefused.
func (m *mailbox) setRefused(request string, err error) {
	m.hear(func(in *input) {
		refused := maps.Clone(in.refused)
		if refused == nil {
			refused = map[string]refusal{}
		}
		if delete(refused, request); err != nil {
			refused[request] = refusal{err, time.Now()}
		}
		in.refused = refused
	})
}

func newPartitions(o *Options, w *Worlds) *partitions {
	p := &partitions{domain: o.Domain, on: config.Node{Unit: o.MemoryUnit, API: o.API}}
	if w.DRA == nil {
		p.on.NoDRA = "the agent runs without an API server (--node-name)"
	}
	if !o.MPS {
		p.on.NoMPS = "no supervisor keeps MPS daemons on this node; timeslice works"
	}
	return p
}

// conditions returns remarks on the operators' annotations.
func (p *partitions) conditions(inv *gpu.Inventory) []status.Condition {
	return slices.Concat(p.cordons.conditions(p.domain, inv), p.resets.conditions(p.domain))
}

// resolve works out what is wanted of the GPUs in inv. answered is true if this process has read
// inv itself. note is a remark for the outcome. err is why the newest partitions are not in force,
// nil if they are.
func (p *partitions) resolve(in *input, inv *gpu.Inventory, answered bool) (note status.Cause, err error) {
	if in.file == nil {
		p.judged = p.judged || in.heard()
		return status.Why(status.PartitionsMissing, "no partition file yet: nothing changes"), in.fileErr
	}
	if !in.labelKnown {
		return status.Why(status.NodeUnknown, "waiting for the node's labels"), nil
	}
	name, unset := in.choice(in.file, p.domain)
	if unset != (status.Cause{}) {
		p.judged = true
		return unset, in.fileErr
	}
	p.chosen = name
	if q := (question{in.file, name, inv}); q != p.desired.of {
		d, err := in.file.Desire(name, inv, p.on)
		p.desired.of, p.desired.is, p.desired.err = q, d, err
	}
	d, err := p.desired.is, p.desired.err
	p.judged = p.judged || err == nil || answered
	switch {
	case err != nil && in.fileErr != nil:
		return note, in.fileErr // the operator must mend this first
	case err != nil && !answered:
		// The saved inventory has no MIG state.
		return status.Why(status.DriverUnread, "waiting for the driver's first answer"), nil
	case err != nil:
		return note, status.Because(status.PartitionUnfit, err)
	}
	if !slices.EqualFunc(p.wanted, d.GPUs, config.Want.Equal) {
		p.gen++
	}
	p.wanted, p.active = d.GPUs, name
	return note, in.fileErr
}

// asked returns what the partitions ask for now, without Source.
func (p *partitions) asked() asked {
	return asked{Wanted: p.wanted, Active: p.active, Generation: p.gen}
}

// choice returns the partition of a file that the node follows, or why there is none.
func (in *input) choice(f *config.File, domain string) (name string, unset status.Cause) {
	name = cmp.Or(in.chosen, DefaultPartition)
	if in.chosen != "" || slices.Contains(f.Names(), name) {
		return name, unset
	}
	unset = status.Why(status.PartitionUnset, "the node has no label %s/%s, and the file no partition %q: "+
		"nothing changes; set the label to one of the file's partitions: %s",
		domain, PartitionLabel, name, brief.List(f.Names(), mostPartitions))
	if in.migManager != "" && in.migManager != migManagerIdle {
		unset.Message += fmt.Sprintf(" (the node's label %s=%s is for NVIDIA's MIG manager, and chooses none here)",
			migManagerLabel, in.migManager)
	}
	return name, unset
}

// mostPartitions is the number of partitions that a message names. The file of NVIDIA's MIG manager
// has some 60.
const mostPartitions = 20

// DefaultPartition is the partition of a node without a label.
const DefaultPartition = "default"

// question asks what a partition means on an inventory. Files and inventories are immutable, so the
// answer can be kept. It takes a while if geometries must be proven.
type question struct {
	file *config.File
	name string
	inv  *gpu.Inventory
}

// onDemand reports whether a GPU's MIG instances are made for the pods that ask. Before the
// partitions are known it returns true, since that is possible.
func (p *partitions) onDemand(u gpu.UUID) bool {
	for _, w := range p.wanted {
		if w.GPU == u {
			return w.OnDemand
		}
	}
	return p.wanted == nil
}
