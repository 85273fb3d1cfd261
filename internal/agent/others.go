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

// migManagerLabel selects the MIG configuration that NVIDIA's MIG manager applies to a node.
// migManagerIdle is the value that its operator sets if no user has chosen one.
const (
	migManagerLabel = "nvidia.com/mig.config"
	migManagerIdle  = "all-disabled"
)

// coexistence finds GPUs that others give out or lay out: other device plugins, other DRA drivers,
// and NVIDIA's MIG manager. Two agents on one GPU would each give out all of it. The kubelet lists
// the devices of other plugins and drivers. It is asked every othersEvery, and soon after its
// checkpoint has something new about others. Any goroutine may call lookAtCheckpoint, whose timer
// calls newlyWritten; everything else belongs to the loop's goroutine. Use newCoexistence.
type coexistence struct {
	kubelet Kubelet
	runtime deviceplugin.Runtime
	cluster Cluster // nil if there is no API server
	witness *deviceplugin.Witnesses
	// own is the name of the agent's own DRA driver.
	own string
	log *slog.Logger
	// wake starts a round.
	wake func()

	// asked is true if the kubelet must be asked before due. later is true while a timer is set to
	// read its checkpoint. stamp is the stamp of the checkpoint that lookAtCheckpoint saw last.
	asked, later atomic.Bool
	stamp        atomic.Pointer[node.Stamp]
	// told is what the checkpoint said of others before the kubelet last answered; nil if it could
	// not be read. mine are the agent's resources that should have devices at the kubelet.
	told atomic.Pointer[account]
	mine atomic.Pointer[[]string]

	// The rest belongs to the loop's goroutine.

	// gpus is why each of these GPUs is not the agent's to offer; nil before the first look.
	gpus map[gpu.UUID]string
	// seen is when each of them was last surely another owner's.
	seen map[gpu.UUID]time.Time
	// due is when the kubelet is to be asked again.
	due time.Time
	// migManager is the node's label at the last look, and known the GPUs that it covered.
	migManager string
	known      map[gpu.UUID]bool
	// firstSeen is when each pod, by UID, was first seen in the kubelet's checkpoint; zero once it
	// was seen alive.
	firstSeen map[string]time.Time
	drivers   drivers
}

func newCoexistence(o *Options, w *Worlds, of *deviceplugin.Witnesses, wake func()) *coexistence {
	return &coexistence{kubelet: w.Kubelet, runtime: w.Runtime, cluster: w.Cluster, witness: of,
		own: "gpus." + o.Domain, log: o.Log, wake: wake}
}

func (c *coexistence) theirs() map[gpu.UUID]string { return c.gpus }

func (c *coexistence) next() time.Time { return c.due }

// lookAtCheckpoint reads the kubelet's checkpoint if it was written again, after othersSoon and
// once for all calls until then. If it has news, the loop asks the kubelet.
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

// account is what the kubelet's checkpoint has about other device plugins: the holders of their
// devices, and the devices of each resource.
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

// ofOthers returns the part of a checkpoint about others' resources, or nil if it cannot be read.
// ok is true if there is a checkpoint.
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

// newlyWritten reports whether the kubelet's checkpoint has something new about others since the
// kubelet was last asked, or lacks a resource of ours. Most writings are about the agent's own
// devices: the kubelet writes for every list of any plugin, and for every Allocate.
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

// sightings is what one look has found: why GPUs are another owner's. A GPU in doubt is not offered
// either, but it is offered again as soon as the doubt is over.
type sightings struct {
	inv *gpu.Inventory
	now time.Time
	// listing is the kubelet's. If it is not trusted, it may lack pods.
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

// look searches for others' GPUs if that is due. It returns the device IDs that the kubelet can
// give out, by resource; nil if the kubelet did not answer. asked is true if it was asked. mine are
// the agent's resources that should have devices at the kubelet.
func (c *coexistence) look(ctx context.Context, inv *gpu.Inventory, migManager string,
	mine []string) (allocatable map[string][]string, asked bool) {
	now := time.Now()
	c.mine.Store(&mine)
	unknown := func(d gpu.Device) bool { return !c.known[d.UUID] } // others may have it already
	if !c.asked.Swap(false) && c.gpus != nil && migManager == c.migManager &&
		!slices.ContainsFunc(inv.GPUs, unknown) && now.Before(c.due) {
		return nil, false
	}
	// Read this before asking, so that the kubelet's answer is not older.
	told := c.ofOthers(c.witness.Checkpoint())
	c.migManager, c.known = migManager, map[gpu.UUID]bool{}
	for i := range inv.GPUs {
		c.known[inv.GPUs[i].UUID] = true
	}
	cctx, cancel := context.WithTimeout(ctx, deviceplugin.KubeletPatience)
	defer cancel()
	allocatable, err := c.kubelet.Allocatable(cctx)
	if err != nil {
		// A kubelet that is away gives nothing out, so its last answer remains valid.
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
	// Allocatable lacks devices that are unhealthy or whose plugin is restarting. The listing has
	// those that pods hold. After a restart of the kubelet, only its checkpoint has them.
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

// soon makes the next question to the kubelet due no later than at.
func (c *coexistence) soon(at time.Time) {
	if at.Before(c.due) {
		c.due = at
	}
}

// conclude puts the findings in force until the next look.
func (c *coexistence) conclude(s *sightings) {
	gpus, seen := maps.Clone(s.doubt), map[gpu.UUID]time.Time{}
	for u, why := range c.gpus {
		// A plugin that restarts lists nothing for a moment, and so does a kubelet.
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
		c.soon(s.now.Add(othersPresent)) // no event tells when they have gone
	}
	c.gpus, c.seen = gpus, seen
}

// inCheckpoint finds the GPUs that pods hold according to the kubelet's checkpoint. The kubelet
// writes that file when it gives devices out, when a plugin sends its list, and when a plugin has
// been gone for five minutes, but not when a pod ends. If no plugin is left, the file names pods
// that ended days ago. So an entry counts in three cases:
//
//   - The runtime knows its pod. (Pods in the kubelet's list were found already.)
//   - The runtime does not answer. The pod may be alive, since the list lacks plain init
//     containers.
//   - The entry is new, and the kubelet lists a pod that the runtime does not know, or the list is
//     not trusted. Between Allocate and its sandbox a pod is only a name in the list, and the entry
//     has no name. Such an entry counts for othersLinger.
//
// How often the file is written tells nothing: dead pods stay in it as long as the kubelet does not
// know its pods.
func (c *coexistence) inCheckpoint(ctx context.Context, s *sightings) {
	cp, ok, err := c.witness.Checkpoint()
	if !ok {
		return
	}
	firstSeen := map[string]time.Time{}
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
		first, known := c.firstSeen[e.PodUID]
		if !known {
			first = s.now
		}
		name, lives := pods[e.PodUID]
		if lives {
			first = time.Time{}
		}
		firstSeen[e.PodUID] = first
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
			c.soon(s.now.Add(othersSoon)) // the sandbox may come in a moment
		}
	}
	c.firstSeen = firstSeen
}

// allKnown reports whether the runtime knows every pod that the kubelet lists, by name.
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

// heldAs describes a holder of a GPU through another device plugin.
func heldAs(pod, resource string) string {
	return fmt.Sprintf("%s has it as %s of another device plugin; end that pod and plugin, or give the GPU mode off",
		pod, resource)
}

// gpuName is a name of a GPU that device IDs may begin with.
type gpuName struct {
	name string
	of   gpu.UUID
}

// gpuNames returns the names of a node's GPUs: their UUIDs, those of their MIG instances, and their
// device nodes' names. The longest comes first.
func gpuNames(inv *gpu.Inventory) []gpuName {
	var names []gpuName
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		names = append(names, gpuName{string(d.UUID), d.UUID})
		if !d.Gone { // otherwise the number may be another GPU's
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

// gpusOf returns the GPUs that the device IDs of any plugin refer to, each once. An ID begins with
// a name of the GPU, which ends with the ID or before a character that is neither a letter nor a
// digit: GPU-…, GPU-…::3 (NVIDIA's), GPU-…-3 (HAMi's and Volcano's), GPU-…-_-3 (gpushare's),
// nvidia0/gi1 (GKE's).
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
