// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// migManagerLabel chooses what NVIDIA's MIG manager makes of a node's GPUs;
// migManagerIdle is what its operator sets where nobody has chosen.
const (
	migManagerLabel = "nvidia.com/mig.config"
	migManagerIdle  = "all-disabled"
)

// coexistence finds the GPUs that somebody else gives out or lays out: other device
// plugins, other DRA drivers, NVIDIA's MIG manager. Two agents on one GPU would each
// promise all of it. Use newCoexistence. lookAtCheckpoint may be called by anybody, and
// newlyWritten by what that begins; all else is for the loop's goroutine.
type coexistence struct {
	kubelet Kubelet
	runtime deviceplugin.Runtime
	cluster Cluster // nil where there is none
	witness *deviceplugin.Witnesses
	// own is our own DRA driver's name.
	own string
	log *slog.Logger
	// wake has a round come.
	wake func()

	// asked says that the kubelet is to be asked before due, and later that its
	// checkpoint is about to be read; stamp is the one that lookAtCheckpoint saw last.
	asked, later atomic.Bool
	stamp        atomic.Pointer[node.Stamp]
	// told is what the checkpoint said of others before the kubelet last answered, nil where
	// it could not be read; mine are the resources of which it should have devices.
	told atomic.Pointer[account]
	mine atomic.Pointer[[]string]

	// The rest belongs to the loop's goroutine.

	// gpus is why each of these GPUs is not the agent's to offer; nil before the
	// first look.
	gpus map[gpu.UUID]string
	// seen is when each was last seen to be somebody's, without a doubt.
	seen map[gpu.UUID]time.Time
	// due is when the kubelet is to be asked again.
	due time.Time
	// migManager is what the node's label said then, known the GPUs that there were.
	migManager string
	known      map[gpu.UUID]bool
	// met is when each pod of the kubelet's checkpoint, by UID, was first seen there;
	// zero once it was seen to live.
	met     map[string]time.Time
	drivers drivers
}

func newCoexistence(o *Options, w *Worlds, of *deviceplugin.Witnesses, wake func()) *coexistence {
	return &coexistence{kubelet: w.Kubelet, runtime: w.Runtime, cluster: w.Cluster, witness: of,
		own: "gpus." + o.Domain, log: o.Log, wake: wake}
}

func (c *coexistence) theirs() map[gpu.UUID]string { return c.gpus }

func (c *coexistence) next() time.Time { return c.due }

// lookAtCheckpoint has the kubelet's checkpoint read, in a while and for all who ask until
// then, where it has been written again, and the kubelet asked where that is news.
func (c *coexistence) lookAtCheckpoint() {
	now := c.kubelet.Stamp()
	if old := c.stamp.Swap(&now); old != nil && *old == now {
		return
	}
	if c.later.CompareAndSwap(false, true) {
		time.AfterFunc(othersSoon, func() {
			if c.later.Store(false); c.newlyWritten() {
				c.asked.Store(true)
				c.wake()
			}
		})
	}
}

// account is what the kubelet's checkpoint says of other device plugins: who has what of
// them, and what each resource's plugin offers.
type account struct {
	entries    []node.Entry
	registered map[string]node.Registered
}

func (a *account) equal(b *account) bool {
	return maps.Equal(a.registered, b.registered) && slices.EqualFunc(a.entries, b.entries, func(x, y node.Entry) bool {
		return x.PodUID == y.PodUID && x.Container == y.Container && x.Resource == y.Resource &&
			slices.Equal(x.IDs, y.IDs)
	})
}

// ofOthers is what a checkpoint says that is not about our own resources, nil where it
// cannot be read; ok says that there is one.
func (c *coexistence) ofOthers(cp *node.Checkpoint, ok bool, err error) *account {
	if ok && (err != nil || cp.Registered == nil) {
		return nil
	}
	a := &account{registered: map[string]node.Registered{}}
	for _, e := range cp.Entries {
		if !c.witness.Owns(e.Resource) {
			a.entries = append(a.entries, e)
		}
	}
	for resource, devices := range cp.Registered {
		if devices.N > 0 && !c.witness.Owns(resource) {
			a.registered[resource] = devices
		}
	}
	return a
}

// newlyWritten reports whether the kubelet's checkpoint says anything of others that it did
// not say when the kubelet was last asked, or lacks a resource of ours. Most writings are for
// our own devices: the kubelet writes with every list of any plugin, and every Allocate.
func (c *coexistence) newlyWritten() bool {
	told, mine := c.told.Load(), c.mine.Load()
	if told == nil || mine == nil {
		return true
	}
	cp, err := c.kubelet.Checkpoint()
	now := c.ofOthers(&cp, !errors.Is(err, gpu.ErrNotFound), err)
	lacking := func(resource string) bool { return cp.Registered[resource].N == 0 }
	return now == nil || !now.equal(told) || slices.ContainsFunc(*mine, lacking)
}

// sightings is what one look has found: why GPUs are somebody else's. A GPU that is
// in doubt is not offered either, but as soon as the doubt is over it is.
type sightings struct {
	inv *gpu.Inventory
	now time.Time
	// listing is the kubelet's; one that is not trusted may lack pods.
	listing node.Listing
	trusted bool

	sure, doubt map[gpu.UUID]string
}

// add keeps the first reason for each GPU.
func add(to map[gpu.UUID]string, gpus []gpu.UUID, why string) {
	for _, u := range gpus {
		if to[u] == "" {
			to[u] = why
		}
	}
}

// look looks for others' GPUs where that is due, and returns the devices of all
// resources that the kubelet would give out. asked is whether it was asked; it was away
// where there are none. mine are the resources of which the kubelet should have devices.
func (c *coexistence) look(ctx context.Context, inv *gpu.Inventory, migManager string,
	mine []string) (allocatable map[string][]string, asked bool) {
	now := time.Now()
	c.mine.Store(&mine)
	unknown := func(d gpu.Device) bool { return !c.known[d.UUID] } // it may be others' already
	if !c.asked.Swap(false) && c.gpus != nil && migManager == c.migManager &&
		!slices.ContainsFunc(inv.GPUs, unknown) && now.Before(c.due) {
		return nil, false
	}
	// First: what the kubelet says is no older than what it wrote before.
	told := c.ofOthers(c.witness.Checkpoint())
	c.migManager, c.known = migManager, map[gpu.UUID]bool{}
	for i := range inv.GPUs {
		c.known[inv.GPUs[i].UUID] = true
	}
	cctx, cancel := context.WithTimeout(ctx, deviceplugin.KubeletPatience)
	defer cancel()
	allocatable, err := c.kubelet.Allocatable(cctx)
	if err != nil {
		// A kubelet that is away gives nothing out; what it said last stands.
		c.log.Debug("cannot ask the kubelet what other device plugins offer", "err", err)
		if c.gpus == nil {
			c.gpus = map[gpu.UUID]string{}
		}
		c.due = now.Add(holdersEvery)
		return nil, true
	}
	c.due = now.Add(othersEvery)
	c.told.Store(told)
	s := &sightings{inv: inv, now: now, sure: map[gpu.UUID]string{}, doubt: map[gpu.UUID]string{}}
	// Allocatable is short of devices that their plugin calls unhealthy, or whose
	// plugin is starting again; who has one is in the list, and after a restart of
	// the kubelet in its checkpoint alone.
	s.listing, err = c.kubelet.List(cctx)
	for _, h := range s.listing.Holdings {
		if !c.witness.Owns(h.Resource) {
			add(s.sure, gpusOf(inv, h.IDs...), heldAs(h.Namespace+"/"+h.Pod, h.Resource))
		}
	}
	s.trusted = err == nil && c.witness.Trusted(&s.listing)
	c.inCheckpoint(ctx, s)
	c.prepared(ctx, s)
	for _, resource := range sortedKeys(allocatable) {
		if !c.witness.Owns(resource) {
			add(s.sure, gpusOf(inv, allocatable[resource]...), fmt.Sprintf(
				"the kubelet lists it as %s of another device plugin; end that one, or give the GPU mode off",
				resource))
		}
	}
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; d.MIG.Capable && migManager != "" && migManager != migManagerIdle {
			add(s.sure, []gpu.UUID{d.UUID}, fmt.Sprintf("NVIDIA's MIG manager partitions it "+
				"(the node's label %s is %s); remove that label, or give the GPU mode off",
				migManagerLabel, migManager))
		}
	}
	c.conclude(s)
	return allocatable, true
}

// soon has the kubelet asked again at that time, if that is not due before.
func (c *coexistence) soon(at time.Time) {
	if at.Before(c.due) {
		c.due = at
	}
}

// conclude makes what was found what counts until the next look.
func (c *coexistence) conclude(s *sightings) {
	gpus, seen := maps.Clone(s.doubt), map[gpu.UUID]time.Time{}
	for u, why := range c.gpus {
		// A plugin that starts again lists nothing for a moment, and so does a
		// kubelet.
		if at := c.seen[u]; s.now.Sub(at) < othersLinger {
			gpus[u], seen[u] = why, at
			if s.sure[u] == "" {
				c.soon(at.Add(othersLinger))
			}
		}
	}
	for u, why := range s.sure {
		gpus[u], seen[u] = why, s.now
	}
	if len(gpus) > 0 {
		c.soon(s.now.Add(othersPresent)) // nothing tells when they have gone
	}
	c.gpus, c.seen = gpus, seen
}

// inCheckpoint finds the GPUs that pods have by the kubelet's checkpoint. The kubelet
// writes that file when it gives devices out, when a plugin sends its list and when
// one has been gone for five minutes, and not when a pod ends: where no plugin is
// left, it names pods that ended days ago. So an entry counts while the runtime
// knows its pod (who is in the kubelet's list has been found already). Where the
// runtime does not answer, every entry may be of a pod that lives, since the list
// lacks plain init containers. And between Allocate and its sandbox a pod is nothing
// but a name in the kubelet's list, of which the entry does not tell: as long as
// there is such a name, or may be, an entry counts that was not there before. How
// often the file is written says nothing: dead pods stay in it while the kubelet
// does not know its pods.
func (c *coexistence) inCheckpoint(ctx context.Context, s *sightings) {
	cp, ok, err := c.witness.Checkpoint()
	if !ok {
		return
	}
	met := map[string]time.Time{}
	var pods map[string]workload.Pod
	asked, preparing := false, false
	for _, e := range cp.Entries {
		gpus := gpusOf(s.inv, e.IDs...)
		if c.witness.Owns(e.Resource) || len(gpus) == 0 {
			continue
		}
		if !asked {
			pods, err = c.livingPods(ctx)
			asked, preparing = true, !s.trusted || !allKnown(s.listing.Pods, pods)
		}
		first, known := c.met[e.PodUID]
		if !known {
			first = s.now
		}
		name, lives := pods[e.PodUID]
		if lives {
			first = time.Time{}
		}
		met[e.PodUID] = first
		switch why := heldAs("pod "+e.PodUID, e.Resource); {
		case lives && name.Name != "":
			add(s.sure, gpus, heldAs(name.Namespace+"/"+name.Name, e.Resource))
		case lives:
			add(s.sure, gpus, why)
		case err != nil:
			add(s.doubt, gpus, fmt.Sprintf("%s (whether that pod lives is not known: %v)", why, err))
		case preparing && s.now.Sub(first) < othersLinger:
			add(s.doubt, gpus, why)
			c.soon(first.Add(othersLinger))
			c.soon(s.now.Add(othersSoon)) // the sandbox may be a moment away
		}
	}
	c.met = met
}

// allKnown reports whether the runtime knows every pod that the kubelet lists, by
// name.
func allKnown(listed []workload.Pod, pods map[string]workload.Pod) bool {
	known := map[workload.Pod]bool{}
	for _, name := range pods {
		known[name] = true
	}
	return !slices.ContainsFunc(listed, func(name workload.Pod) bool { return !known[name] })
}

// livingPods returns the pods that have a sandbox or a container, by UID.
func (c *coexistence) livingPods(ctx context.Context) (map[string]workload.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, deviceplugin.RuntimePatience)
	defer cancel()
	containers, err := c.runtime.Containers(ctx)
	if err != nil {
		return nil, err
	}
	if !c.witness.Knows(containers) {
		return nil, c.witness.Stranger()
	}
	pods, err := c.runtime.Pods(ctx)
	if err != nil {
		return nil, err
	}
	living := map[string]workload.Pod{}
	maps.Copy(living, pods)
	for _, o := range containers {
		if _, ok := living[o.PodUID]; !ok {
			living[o.PodUID] = workload.Pod{Namespace: o.Namespace, Name: o.Pod}
		}
	}
	return living, nil
}

// heldAs says who has a GPU by another device plugin.
func heldAs(pod, resource string) string {
	return fmt.Sprintf("%s has it as %s of another device plugin; end that pod and plugin, or give the GPU mode off",
		pod, resource)
}

// gpuName is a name that stands for a GPU at the beginning of device IDs.
type gpuName struct {
	name string
	of   gpu.UUID
}

// gpuNames are the names of a node's GPUs: their UUIDs, those of their MIG instances,
// and their device nodes'. The longest comes first.
func gpuNames(inv *gpu.Inventory) []gpuName {
	var names []gpuName
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		names = append(names, gpuName{string(d.UUID), d.UUID})
		if !d.Gone { // else the number may be another's
			names = append(names, gpuName{fmt.Sprintf("nvidia%d", d.Minor), d.UUID})
		}
		for j := range d.MIG.Instances {
			if u := d.MIG.Instances[j].UUID; u != "" {
				names = append(names, gpuName{string(u), d.UUID})
			}
		}
	}
	slices.SortStableFunc(names, func(a, b gpuName) int { return cmp.Compare(len(b.name), len(a.name)) })
	return names
}

// gpusOf returns the GPUs that device IDs of any plugin speak of, each once. An ID
// begins with a name of the GPU, which ends with the ID or before a character that
// is neither a letter nor a digit: GPU-…, GPU-…::3 (NVIDIA's), GPU-…-3 (HAMi's and
// Volcano's), GPU-…-_-3 (gpushare's), nvidia0/gi1 (GKE's).
func gpusOf(inv *gpu.Inventory, ids ...string) []gpu.UUID {
	var gpus []gpu.UUID
	names := gpuNames(inv)
	for _, id := range ids {
		i := slices.IndexFunc(names, func(n gpuName) bool {
			rest, ok := strings.CutPrefix(id, n.name)
			return ok && (rest == "" || !alphanumeric(rest[0]))
		})
		if i >= 0 && !slices.Contains(gpus, names[i].of) {
			gpus = append(gpus, names[i].of)
		}
	}
	return gpus
}

func alphanumeric(b byte) bool {
	return '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || b >= 0x80
}
