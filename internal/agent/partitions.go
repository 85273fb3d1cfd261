// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// mailbox is what was heard of the partition file and of the node. All of it may be used by
// several goroutines.
type mailbox struct {
	domain string
	// wake has a round come.
	wake func()
	// told is told of each Node.
	told func(*agentkube.Node)

	mu    sync.Mutex
	input input // guarded by mu
}

// partitions is what that means for the GPUs. It belongs to the loop's goroutine.
type partitions struct {
	domain string
	// on is what counts of the node beside its GPUs.
	on config.Node
	// wanted is what the partition active means: the last good one. gen counts the
	// changes of it.
	wanted []config.Want
	gen    uint64
	active string
	chosen string // the one that is to be in force
	// judged says that it has been known once how the GPUs are to be laid out, or why that
	// cannot be known.
	judged bool
	// cordons are of the newest annotation that was heard.
	cordons cordons
	// resets are of the newest WasResetAnnotation.
	resets resets
	// desired is the last answer of the partition file.
	desired struct {
		of  question
		is  config.Desired
		err error
	}
}

// input is the news from outside, by value.
type input struct {
	// source is the newest file's name, whether it parsed or not.
	source string
	// file is the newest partition file that parsed; nil before the first.
	file *config.File
	// fileErr is why the newest one did not.
	fileErr error
	// chosen is the node label's value; "" where there is none.
	chosen string
	// labelKnown is false until the node has been seen, where there is one.
	labelKnown bool
	// cordon and reset are the values of CordonAnnotation and WasResetAnnotation.
	cordon, reset string
	// letGo is why the driver is to be let go; "" where it is not.
	letGo string
	// migManager is the configuration that NVIDIA's MIG manager is to keep on this
	// node; "" where it has none.
	migManager string
	// podsTell says that pods' own status names the devices that they have.
	podsTell bool
	// allocatable are the extended resources of which the scheduler may give out something
	// on this node, as the API server has it.
	allocatable []string
	// refused is what the API server refuses to show, by request; the map is not
	// changed but replaced.
	refused map[string]refusal
}

// heard says that partitions and label have been heard of, if only that there are
// none.
func (in *input) heard() bool { return in.labelKnown && (in.file != nil || in.fileErr != nil) }

// refusal is a request that the API server does not permit.
type refusal struct {
	err   error
	since time.Time
}

// refusals says what the API server has refused for at least that long.
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

// hear takes in news.
func (m *mailbox) hear(change func(*input)) {
	m.mu.Lock()
	change(&m.input)
	m.mu.Unlock()
	m.wake()
}

// latest returns what has been heard so far.
func (m *mailbox) latest() input {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.input
}

// choice is which partition of a file the node follows, and why none, as far as is known now.
func (m *mailbox) choice(f *config.File) (name string, unset status.Cause) {
	in := m.latest()
	if !in.labelKnown {
		return "", status.Why(status.NodeUnknown, "the node's labels are not known yet")
	}
	return in.choice(f)
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

// setNode takes in what counts for the loop of the Node object.
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
	return p
}

// conditions are remarks on the annotations by which operators speak of GPUs.
func (p *partitions) conditions(inv *gpu.Inventory) []status.Condition {
	return slices.Concat(p.cordons.conditions(p.domain, inv), p.resets.conditions(p.domain))
}

// resolve works out what is wanted of an inventory, which this process has read itself
// if answered says so. note is a remark for the outcome; err says why the newest word is
// not in force.
func (p *partitions) resolve(in *input, inv *gpu.Inventory, answered bool) (note status.Cause, err error) {
	if in.file == nil {
		p.judged = p.judged || in.heard()
		return status.Why(status.PartitionsMissing, "no partition file yet: nothing changes"), in.fileErr
	}
	if !in.labelKnown {
		return status.Why(status.NodeUnknown, "waiting for the node's labels"), nil
	}
	name, unset := in.choice(in.file)
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
		return note, in.fileErr // it is what to mend first
	case err != nil && !answered:
		// What the process before this one wrote down says nothing of MIG.
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

// asked is what the partitions ask for now; where the newest file is from, the input says.
func (p *partitions) asked() asked {
	return asked{Wanted: p.wanted, Active: p.active, Generation: p.gen}
}

// choice is which partition of a file the node follows, and why none.
func (in *input) choice(f *config.File) (name string, unset status.Cause) {
	if name = in.chosen; name == "" {
		if name = DefaultPartition; !slices.Contains(f.Names(), name) {
			unset = status.Why(status.PartitionUnset,
				"the node has no partition label and the file no partition %q: nothing changes", name)
		}
	}
	return name, unset
}

// DefaultPartition is the one that a node without a label follows.
const DefaultPartition = "default"

// question is what a partition means on what there is; neither a file nor an
// inventory changes. To answer it takes a while where geometries are proven.
type question struct {
	file *config.File
	name string
	inv  *gpu.Inventory
}

// onDemand says whether a GPU's MIG instances are made for the pods that ask, as
// far as is known: before the partitions have been heard it may be so.
func (p *partitions) onDemand(u gpu.UUID) bool {
	for _, w := range p.wanted {
		if w.GPU == u {
			return w.OnDemand
		}
	}
	return p.wanted == nil
}
