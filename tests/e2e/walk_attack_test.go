// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/plugin"
	"example.com/gpu-agent/tests/lab"
)

// The walk attacks with what has been found to give way: another device plugin
// whose entry in the kubelet's checkpoint goes stale, a container that hangs after
// its pod was deleted by force, and partitions with more devices than fit. Clocks
// that jump are left to TestStorm of internal/agent: the node has this machine's
// clock, and no namespace has a wall clock of its own.

// foreignResource is what NVIDIA's device plugin and HAMi's offer.
const foreignResource = "nvidia.com/gpu"

// tooMany is a partition with more devices than a list to the kubelet can hold.
const tooMany = allShared + "      replicas: 30000\n"

// walkAttack is what the goroutine that steps remembers of its attacks.
type walkAttack struct {
	// foreign are the GPUs by UUID that another plugin has given out since the last
	// calm.
	foreign map[string]bool
	hung    []*hung
	// edited is when the partitions were last edited, other than to what is refused.
	edited time.Time
}

// foreignPlugin offers one device, and gives a container nothing for it.
type foreignPlugin struct {
	devices []plugin.Device
	changed chan struct{} // never
}

func (p *foreignPlugin) List() ([]plugin.Device, <-chan struct{}) { return p.devices, p.changed }

func (p *foreignPlugin) Prefer(available, _ []string, n int) ([]string, error) {
	var out []string
	for _, id := range available[:n] {
		out = append(out, strings.Clone(id))
	}
	return out, nil
}

func (p *foreignPlugin) Allocate([]string) (plugin.Grant, error) { return plugin.Grant{}, nil }
func (p *foreignPlugin) Prepare(context.Context, []string) error { return nil }

// giveAway has another device plugin give a GPU to a pod, and removes the plugin while
// the pod lives. The pod is one of the walk's from then on and ends as any other. The
// other plugin does not ask who has the GPU, so no rule says who else may be on it; but
// in the calm it must be on offer again. What is returned is empty where none was given.
func (w *walk) giveAway() (gpu string) {
	g, hami := driver.GPUs[w.rng.IntN(6)], w.some(50) // mixed has the other two off
	if slices.ContainsFunc(w.live, func(p *walkPod) bool { return p.foreign }) {
		return ""
	}
	id := g.UUID
	if hami {
		id += "-0"
	}
	w.next++
	p := &walkPod{ends: map[string]bool{"main": true}, foreign: true}
	spec := lab.Pod{Name: fmt.Sprintf("p-%d", w.next), Pinned: true, Containers: []lab.Container{{Resources: map[string]int{foreignResource: 1}}}}
	w.say("another plugin gives %s, GPU %d, to %s and is removed", id, g.Index, spec.Name)
	w.attack.foreign[g.UUID] = true

	k := plugin.NewKubelet(plugin.KubeletOptions{Dir: node.File("/var/lib/kubelet/device-plugins"), Logger: slog.New(slog.DiscardHandler)})
	w.must(k.Set(map[string]plugin.Source{
		foreignResource: &foreignPlugin{[]plugin.Device{{ID: id, Healthy: true}}, make(chan struct{})},
	}))
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			w.Errorf("the other plugin: %v", err)
		}
	}()
	w.must(lab.Await(ctx, time.Minute, "the kubelet to offer "+id, func(ctx context.Context) error {
		offer, err := node.Offer(ctx)
		if err == nil && !slices.Contains(offer[foreignResource], id) {
			err = fmt.Errorf("it offers %v", offer[foreignResource])
		}
		return err
	}))
	w.put(p, spec)
	if err := p.InState(w.ctx, 30*time.Second, "to run", func(s lab.PodState) error {
		if !s.Containers["main"].Running {
			return errors.New("it does not")
		}
		return nil
	}); err != nil {
		w.say("  %v", err)
		return ""
	}
	w.count("pods of another plugin")
	return g.UUID
}

// backFromOthers waits in the calm until the GPUs are on offer again that another
// plugin had given out. One is given out only now, and taken off: when its pod ends
// nothing else happens that would make the kubelet write its checkpoint, which goes on
// naming that pod.
func (w *walk) backFromOthers() {
	w.Helper()
	w.allocationsBecome(0)
	if u := w.giveAway(); u != "" {
		w.must(lab.Await(w.ctx, time.Minute, "GPU "+u+", which another plugin has given out, to be taken off", func(ctx context.Context) error {
			offer, err := node.Offer(ctx)
			if err == nil && offers(offer, u) {
				err = errors.New("it is on offer")
			}
			return err
		}))
	}
	w.clear(w.ctx)
	file, err := witness.ReadCheckpoint(node.File("/var/lib/kubelet"))
	if err != nil {
		w.say("  %v", err) // it is being written
	}
	for _, e := range file.Entries {
		if e.Resource == foreignResource {
			w.say("  the kubelet's checkpoint has %v of %s for pod %s, which has ended", e.IDs, e.Resource, e.PodUID)
			w.count("stale entries in a calm")
		}
	}
	seen := map[string]bool{}
	w.must(lab.Await(w.ctx, 2*time.Minute, "the GPUs that another plugin had to be on offer again", func(ctx context.Context) error {
		offer, err := node.Offer(ctx)
		if err != nil {
			return err
		}
		for u := range w.attack.foreign {
			if !offers(offer, u) {
				if !seen[u] {
					seen[u] = true
					w.say("  GPU %s is not on offer yet", u)
					w.count("GPUs that came back from another plugin")
				}
				return fmt.Errorf("GPU %s is not", u)
			}
		}
		return nil
	}))
	clear(w.attack.foreign)
}

// ownDevices are those of the agent's resources.
func ownDevices(offer map[string][]string) []string {
	return slices.Concat(offer[lab.GPU], offer[lab.Replicas], offer[lab.Memory])
}

// offers says whether a GPU is on offer, or a part of it.
func offers(offer map[string][]string, uuid string) bool {
	return slices.ContainsFunc(ownDevices(offer), func(id string) bool { return gpuOf(id) == uuid })
}

// hung is a pod that was deleted by force while its container hangs, and the pod that
// was made next and asks for the same.
type hung struct {
	pod         string
	container   *walkContainer
	allocations []walkAllocation
	next        *walkPod
	// idle are the GPUs by resource that were nobody's when next had nothing yet.
	idle map[string][]string
}

// hang freezes a pod and deletes it by force. The runtime's SIGKILL then stays pending
// until the thaw, and the container runs for all that anybody can tell; unlike one
// whose shim is stopped it has a runtime that answers for it. The next pod asks for
// the same.
func (w *walk) hang() {
	steps := 2 + w.rng.IntN(4)
	p := w.pick(func(p *walkPod) bool { return len(p.ends) == 0 && !p.judged })
	if p == nil {
		return
	}
	w.doom(p)
	h := &hung{pod: p.Name, container: w.container(p), idle: w.idle()}
	if h.container != nil {
		thaw, err := freeze(w.ctx, h.container.ID)
		if err != nil {
			w.say("cannot freeze %s: %v", p.Name, err)
			h.container = nil
		} else {
			w.held = append(w.held, heldContainer{w.step + steps, thaw})
			w.say("freeze %s for %d steps", p.Name, steps)
			w.count("frozen")
		}
	}
	w.say("delete %s by force", p.Name)
	w.must(p.ForceDelete(w.ctx))

	w.next++
	next := &walkPod{ends: map[string]bool{}, asks: p.asks}
	spec := lab.Pod{Name: fmt.Sprintf("p-%d", w.next), Pinned: true, Containers: []lab.Container{{Resources: p.asks}}}
	w.say("make %s, which asks for the same", spec.Name)
	w.put(next, spec)
	if h.container == nil {
		return
	}
	h.next = next
	w.mu.Lock()
	for _, key := range h.container.keys {
		h.allocations = append(h.allocations, w.allocations[key])
	}
	w.mu.Unlock()
	w.attack.hung = append(w.attack.hung, h)
}

// freeze stops all of a container's pod. It is the pod's control group because runc
// thaws the container's own with each SIGKILL, which does nothing where its parent is
// frozen. Version 2 is of no use: there SIGKILL ends what is frozen.
func freeze(ctx context.Context, container string) (thaw func(context.Context) error, err error) {
	dirs, err := node.Cgroups()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(dirs, func(dir string) bool {
		return strings.HasPrefix(dir, "/sys/fs/cgroup/freezer/") && filepath.Base(dir) == container
	})
	if i < 0 {
		return nil, fmt.Errorf("container %s has no control group in the freezer of version 1", container)
	}
	file := filepath.Join(filepath.Dir(dirs[i]), "freezer.state")
	thaw = func(context.Context) error {
		if err := os.WriteFile(file, []byte("THAWED"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if err = os.WriteFile(file, []byte("FROZEN"), 0); err == nil {
		err = lab.Await(ctx, 10*time.Second, "container "+container+" to be frozen", func(context.Context) error {
			state, err := os.ReadFile(file)
			if word := strings.TrimSpace(string(state)); err == nil && word != "FROZEN" {
				err = errors.New(word)
			}
			return err
		})
	}
	if err != nil {
		return nil, errors.Join(err, thaw(ctx))
	}
	return thaw, nil
}

// idle are, by resource, the GPUs of which nobody has anything: neither a container by
// the kubelet's list nor an allocation by the agent's. It has none where either does not say.
func (w *walk) idle() map[string][]string {
	ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
	defer cancel()
	s, err := agent.Status(ctx)
	offer, offerErr := node.Offer(ctx)
	holdings, holdErr := node.Holdings(ctx)
	out := map[string][]string{}
	if errors.Join(err, offerErr, holdErr) != nil {
		return out
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range s.GPUs {
		has := func(id string) bool { return strings.HasPrefix(id, g.UUID) }
		offered := 0
		for _, id := range offer[g.Resource] {
			if has(id) {
				offered++
			}
		}
		held := slices.ContainsFunc(holdings, func(h lab.Holding) bool { return slices.ContainsFunc(h.IDs, has) })
		if offered > 0 && offered == g.Total && g.Used == 0 && g.Health == "healthy" && !held && time.Now().After(w.sick[g.UUID]) {
			out[g.Resource] = append(out[g.Resource], g.UUID)
		}
	}
	return out
}

// nextAfterHung looks what those have been given who came after a container that
// hangs: nothing of its devices, as long as enough GPUs are idle that the kubelet
// offers too. That nobody runs beside it is looked for all the time.
func (w *walk) nextAfterHung() {
	w.attack.hung = slices.DeleteFunc(w.attack.hung, func(h *hung) bool {
		if !node.Lives(h.container.process) {
			return true
		}
		holdings, err := node.Holdings(w.ctx)
		if err != nil {
			return false
		}
		idle := w.idle()
		given := false
		for _, got := range holdings {
			if got.Pod == h.next.Name {
				given = true
				w.betterThan(h, got, idle[got.Resource])
			}
		}
		h.idle = idle
		return given
	})
}

// betterThan judges what the pod after a hanging container was given of a resource,
// with GPUs that are idle now. Those that were idle before, too, could have been had.
func (w *walk) betterThan(h *hung, got lab.Holding, idle []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var could []string
	for _, u := range idle {
		if slices.Contains(h.idle[got.Resource], u) {
			could = append(could, u)
		}
	}
	needs := len(got.IDs)
	if got.Resource == lab.Memory {
		needs = 1
	}
	for _, c := range h.allocations {
		shared := slices.ContainsFunc(got.IDs, func(id string) bool { return slices.Contains(c.ids, id) })
		switch {
		case c.resource != got.Resource:
		case !shared:
			w.done["next pods on other devices"]++
			w.sayLocked("  %s, after %s which hangs, has other devices of %s than it", got.Pod, h.pod, got.Resource)
		case len(could) >= needs:
			w.breakLocked("%s was given %v of %s, on which %s hangs, and GPUs %v are idle", got.Pod, got.IDs, got.Resource, h.pod, could)
		default:
			w.sayLocked("  %s was given %v of %s, on which %s hangs: too few others are idle", got.Pod, got.IDs, got.Resource, h.pod)
		}
	}
}

// edit gives the node other partitions.
func (w *walk) edit() {
	i := w.rng.IntN(len(walkFiles))
	w.say("edit the partitions: file %d", i)
	w.partitions(walkFiles[i])
	if i < len(walkFiles)-walkRefused {
		w.attack.edited = time.Now()
	}
	w.count("edits")
}

// askTooMuch edits the partitions to more devices than fit: they are refused, and what
// is on offer stays. Where something else may just have changed that, nobody looks.
func (w *walk) askTooMuch() {
	const enough = 10 * time.Second
	w.mu.Lock()
	quiet := time.Since(w.agentSince) > enough
	w.mu.Unlock()
	quiet = quiet && time.Since(w.restarted) > enough && time.Since(w.attack.edited) > enough
	s, err := node.State(w.ctx)
	w.must(err)
	before, err := node.Offer(w.ctx)
	w.must(err)
	w.say("edit the partitions: more devices than fit; quiet: %v, %s", quiet, s.Labels[lab.StateLabel])
	w.partitions(tooMany)
	w.count("edits with too many devices")
	if len(w.faults) > 0 {
		return // a driver that does not answer may keep the agent from saying so
	}
	// The edit before may have been refused too, for another reason.
	_, err = agent.AwaitWord(w.ctx, "invalid", "30000 replicas each")
	w.must(err)
	after, err := node.Offer(w.ctx)
	w.must(err)
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(ownDevices(after)); n > gpus*units {
		w.breakLocked("with partitions of more devices than fit the kubelet offers %d devices", n)
	}
	if !quiet || s.Labels[lab.StateLabel] != "applied" {
		return
	}
	w.done["offers that stayed"]++
	for resource := range before {
		for _, id := range before[resource] {
			u := gpuOf(id)
			if !slices.Contains(after[resource], id) && resource != foreignResource && !w.attack.foreign[u] && time.Now().After(w.sick[u]) {
				w.breakLocked("partitions with more devices than fit have taken %s of %s off", id, resource)
			}
		}
	}
}
