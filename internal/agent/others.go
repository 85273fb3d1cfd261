// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
)

// migManagerLabel chooses what NVIDIA's MIG manager makes of a node's GPUs;
// migManagerIdle is what its operator sets where nobody has chosen.
const (
	migManagerLabel = "nvidia.com/mig.config"
	migManagerIdle  = "all-disabled"
)

// others is what the loop remembers of who else gives GPUs out, or cuts them.
type others struct {
	// gpus is why each of these GPUs is not the agent's to offer; nil before the
	// first look.
	gpus map[gpu.UUID]string
	// seen is when each was last seen to be somebody's, without a doubt.
	seen map[gpu.UUID]time.Time
	// at is when the kubelet last answered, due when it is to be asked again.
	at, due time.Time
	// migManager is what the node's label said then, known the GPUs that there were.
	migManager string
	known      map[gpu.UUID]bool
	// met is when each pod of the kubelet's checkpoint, by UID, was first seen there;
	// zero once it was seen to live.
	met     map[string]time.Time
	drivers drivers
}

// sightings is what one look has found: why GPUs are somebody else's. A GPU that is
// in doubt is not offered either, but as soon as the doubt is over it is.
type sightings struct {
	sure, doubt map[gpu.UUID]string
	// due is when to look again.
	due time.Time
}

// again asks for a look at that time, if none is due before.
func (s *sightings) again(at time.Time) {
	if at.Before(s.due) {
		s.due = at
	}
}

// add keeps the first reason for each GPU.
func add(to map[gpu.UUID]string, gpus []gpu.UUID, why string) {
	for _, u := range gpus {
		if to[u] == "" {
			to[u] = why
		}
	}
}

// lookAround finds the GPUs that somebody else gives out or cuts: two agents on one
// GPU would each promise all of it. It also finds out whether the kubelet knows
// what we offer.
func (a *Agent) lookAround(ctx context.Context, in *input) {
	now, o := time.Now(), &a.others
	unknown := func(d gpu.Device) bool { return !o.known[d.UUID] } // it may be others' already
	if o.gpus != nil && in.migManager == o.migManager && !slices.ContainsFunc(a.reader.inv.GPUs, unknown) && now.Before(o.due) &&
		!(a.askOthers.Load() && now.Sub(o.at) >= othersSoon-time.Second) {
		return
	}
	a.askOthers.Store(false)
	o.migManager, o.known = in.migManager, map[gpu.UUID]bool{}
	for i := range a.reader.inv.GPUs {
		o.known[a.reader.inv.GPUs[i].UUID] = true
	}
	cctx, cancel := context.WithTimeout(ctx, kubeletPatience)
	defer cancel()
	allocatable, err := a.kubelet.Allocatable(cctx)
	if err != nil {
		// A kubelet that is away gives nothing out; what it said last stands.
		a.log.Debug("cannot ask the kubelet what other device plugins offer", "err", err)
		if o.gpus == nil {
			o.gpus = map[gpu.UUID]string{}
		}
		o.due, a.unknown = now.Add(holdersEvery), nil
		return
	}
	o.at = now
	s := &sightings{sure: map[gpu.UUID]string{}, doubt: map[gpu.UUID]string{}, due: now.Add(othersEvery)}
	// Allocatable is short of devices that their plugin calls unhealthy, or whose
	// plugin is starting again; who has one is in the list, and after a restart of
	// the kubelet in its checkpoint alone.
	listing, err := a.kubelet.List(cctx)
	for _, h := range listing.Holdings {
		if _, ours := a.kind(h.Resource); !ours {
			add(s.sure, gpusOf(a.reader.inv, h.IDs...), heldAs(h.Namespace+"/"+h.Pod, h.Resource))
		}
	}
	trusted := err == nil && a.trusted(&listing)
	a.inCheckpoint(ctx, now, &listing, trusted, s)
	a.prepared(ctx, now, listing.Prepared, trusted, s)
	for _, resource := range sortedKeys(allocatable) {
		if _, ours := a.kind(resource); !ours {
			add(s.sure, gpusOf(a.reader.inv, allocatable[resource]...),
				fmt.Sprintf("the kubelet lists it as %s of another device plugin; end that one, or give the GPU mode off", resource))
		}
	}
	if in.migManager != "" && in.migManager != migManagerIdle {
		for i := range a.reader.inv.GPUs {
			if d := &a.reader.inv.GPUs[i]; d.MIG.Capable {
				add(s.sure, []gpu.UUID{d.UUID}, fmt.Sprintf("NVIDIA's MIG manager cuts it (the node's label %s is %s); remove that label, or give the GPU mode off",
					migManagerLabel, in.migManager))
			}
		}
	}
	o.conclude(s, now)
	if a.suspect(allocatable, now); len(a.unknown) > 0 && now.Add(holdersEvery).Before(o.due) {
		o.due = now.Add(holdersEvery)
	}
}

// conclude makes what was found what counts until the next look.
func (o *others) conclude(s *sightings, now time.Time) {
	gpus, seen := maps.Clone(s.doubt), map[gpu.UUID]time.Time{}
	for u, why := range o.gpus {
		// A plugin that starts again lists nothing for a moment, and so does a
		// kubelet.
		if at := o.seen[u]; now.Sub(at) < othersLinger {
			gpus[u], seen[u] = why, at
			if s.sure[u] == "" {
				s.again(at.Add(othersLinger))
			}
		}
	}
	for u, why := range s.sure {
		gpus[u], seen[u] = why, now
	}
	if len(gpus) > 0 {
		s.again(now.Add(othersPresent)) // nothing tells when they have gone
	}
	o.gpus, o.seen, o.due = gpus, seen, s.due
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
func (a *Agent) inCheckpoint(ctx context.Context, now time.Time, listing *node.Listing, trusted bool, s *sightings) {
	o := &a.others
	cp, ok, err := a.checkpoint()
	if err != nil {
		cp, ok = &a.seen.checkpoint, true // the last one that could be read
	}
	if !ok {
		return
	}
	met := map[string]time.Time{}
	var pods map[string]node.PodName
	asked, preparing := false, false
	for _, e := range cp.Entries {
		gpus := gpusOf(a.reader.inv, e.IDs...)
		if _, ours := a.kind(e.Resource); ours || len(gpus) == 0 {
			continue
		}
		if !asked {
			pods, err = a.livingPods(ctx)
			asked, preparing = true, !trusted || !allKnown(listing.Pods, pods)
		}
		first, known := o.met[e.PodUID]
		if !known {
			first = now
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
		case preparing && now.Sub(first) < othersLinger:
			add(s.doubt, gpus, why)
			s.again(first.Add(othersLinger))
			s.again(now.Add(othersSoon)) // the sandbox may be a moment away
		}
	}
	o.met = met
}

// allKnown reports whether the runtime knows every pod that the kubelet lists, by
// name.
func allKnown(listed []node.PodName, pods map[string]node.PodName) bool {
	known := map[node.PodName]bool{}
	for _, name := range pods {
		known[name] = true
	}
	return !slices.ContainsFunc(listed, func(name node.PodName) bool { return !known[name] })
}

// livingPods returns the pods that have a sandbox or a container, by UID.
func (a *Agent) livingPods(ctx context.Context) (map[string]node.PodName, error) {
	ctx, cancel := context.WithTimeout(ctx, runtimePatience)
	defer cancel()
	containers, err := a.runtime.Containers(ctx)
	if err != nil {
		return nil, err
	}
	if !a.knowsUs(containers) {
		return nil, a.strangerError()
	}
	pods, err := a.runtime.Pods(ctx)
	if err != nil {
		return nil, err
	}
	living := map[string]node.PodName{}
	maps.Copy(living, pods)
	for _, c := range containers {
		if _, ok := living[c.PodUID]; !ok {
			living[c.PodUID] = node.PodName{Namespace: c.Namespace, Name: c.Pod}
		}
	}
	return living, nil
}

// heldAs says who has a GPU by another device plugin.
func heldAs(pod, resource string) string {
	return fmt.Sprintf("%s has it as %s of another device plugin; end that pod and plugin, or give the GPU mode off", pod, resource)
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

// suspect looks whether the kubelet gives out what we offer it.
func (a *Agent) suspect(allocatable map[string][]string, now time.Time) {
	unknown := map[string]time.Time{}
	for _, r := range a.desk.View().Resources {
		healthy := 0
		for i := range r.Devices {
			if r.Devices[i].Healthy {
				healthy++
			}
		}
		if healthy > 0 && len(allocatable[r.Name]) == 0 && a.serving[r.Name] != nil {
			a.plugins.Suspect(r.Name)
			since, before := a.unknown[r.Name]
			if !before {
				since = now
			}
			unknown[r.Name] = since
		}
	}
	a.unknown = unknown
}
