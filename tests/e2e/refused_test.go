// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/room"
)

// demandClaims are demandPartitions through DRA.
var demandClaims = strings.Replace(demandPartitions, "mode: mig\n", "mode: mig\n      api: dra\n", 1)

// shares are the GiB of a GPU's memory that pods of a dynamic crowd ask for.
var shares = []int{4, 11, 18, 25, 32}

const (
	// backOff is how long the scheduler may leave a pod alone for which there is room, and
	// a little more.
	backOff = 15 * time.Second
	// creating is how long a pod may have a node and no container. A Prepare that fails is in an
	// Event; this is for one that nobody answers. On a busy machine the runtime alone took half
	// a minute for a sandbox, and another one for the container.
	creating = 3 * time.Minute
)

// template names the ResourceClaimTemplate by which a container asks for devices.
func template(want map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(want)) {
		parts = append(parts, fmt.Sprintf("%d-%s", want[name], strings.TrimPrefix(name, lab.Domain+"/")))
	}
	return strings.Join(parts, "-and-")
}

// byTemplate makes a pod's containers ask by claims.
func byTemplate(p *lab.Pod) {
	for _, list := range [][]lab.Container{p.Init, p.Containers} {
		for i := range list {
			list[i].Templates, list[i].Resources = []string{template(list[i].Resources)}, nil
		}
	}
}

// templates makes those by which pods ask, until the test's end.
func (b *bench) templates(wants ...map[string]int) {
	b.Helper()
	var items []any
	for _, want := range wants {
		var requests []any
		for i, name := range slices.Sorted(maps.Keys(want)) {
			ask := map[string]any{"deviceClassName": strings.TrimPrefix(name, lab.Domain+"/") + "." + lab.Domain, "count": want[name]}
			if name == lab.Memory {
				ask = map[string]any{"deviceClassName": "gpu-memory." + lab.Domain, "capacity": map[string]any{"requests": map[string]any{"memory": fmt.Sprintf("%dGi", want[name])}}}
			}
			requests = append(requests, map[string]any{"name": fmt.Sprintf("r-%d", i), "exactly": ask})
		}
		items = append(items, map[string]any{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
			"metadata": map[string]any{"name": template(want), "namespace": lab.PodNamespace, "labels": map[string]any{"dra": "test"}},
			"spec":     map[string]any{"spec": map[string]any{"devices": map[string]any{"requests": requests}}}})
	}
	b.apply(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	b.Cleanup(func() {
		if _, err := node.Kubectl(context.Background(), nil, "delete", "resourceclaimtemplates", "-n", lab.PodNamespace, "-l", "dra=test"); err != nil {
			b.Error(err)
		}
	})
}

// demandWants are what containers of a crowd ask for, and what those of atOnce do.
func demandWants() []map[string]int {
	one := lab.MIG("1g.10gb")
	wants := []map[string]int{{lab.GPU: 1}, {one: 2}, {one: 1, lab.MIG("2g.20gb"): 1}, {one: 1, lab.MIG("3g.40gb"): 1}}
	for _, name := range slices.Sorted(maps.Keys(tables())) {
		wants = append(wants, map[string]int{lab.MIG(name): 1})
	}
	for _, gib := range shares {
		wants = append(wants, map[string]int{lab.Memory: gib})
	}
	return wants
}

// readClaims says what claims have, in the words of the device plugin: so what containers
// see is held against either in the same way.
func (d *demand) readClaims(ctx context.Context) {
	var claims resource.ResourceClaimList
	var list resource.ResourceSliceList
	if errors.Join(node.Read(ctx, "/apis/resource.k8s.io/v1/namespaces/"+lab.PodNamespace+"/resourceclaims", &claims),
		node.Read(ctx, "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3D"+draDriver, &list)) != nil {
		return // asked again
	}
	attributes := map[string]map[resource.QualifiedName]resource.DeviceAttribute{}
	for i := range list.Items {
		for _, device := range list.Items[i].Spec.Devices {
			attributes[device.Name] = device.Attributes
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range claims.Items {
		a := claims.Items[i].Status.Allocation
		if a == nil {
			continue
		}
		n := map[string]int{}
		for _, r := range a.Devices.Results {
			key := cdi.Key("claim/"+string(claims.Items[i].UID), []string{fmt.Sprintf("%s#%d", r.Request, n[r.Request])})
			n[r.Request]++
			of := attributes[r.Device]
			profile, parent := of["profile"].StringValue, of["parentUUID"].StringValue
			if profile == nil || parent == nil {
				continue // the slices are being written
			}
			start := r.Device[strings.LastIndexByte(r.Device, '-')+1:]
			d.given[key] = walkAllocation{lab.MIG(*profile), []string{fmt.Sprintf("%s::%s@%s", *parent, *profile, start)}}
		}
	}
}

// waits follows how pods wait: for the scheduler, and then for the kubelet.
type waits struct {
	claims bool
	// bound is when a pod was first seen on a node without a container, and roomy since
	// when a search finds room for one that is pending.
	bound, roomy map[string]time.Time
	// longest are the longest of either.
	longest, longestRoom time.Duration
	searches             int
	// unasked are pods whose claims the driver was not asked for; see unasked.
	unasked map[string]bool
	// lost is how many pods had lost a claim; see giveBackClaims.
	lost int
}

func newWaits(claims bool) *waits {
	return &waits{claims: claims, bound: map[string]time.Time{}, roomy: map[string]time.Time{}, unasked: map[string]bool{}}
}

func (w *waits) String() string {
	text := fmt.Sprintf("at most %.1f s in ContainerCreating", w.longest.Seconds())
	if w.claims {
		text += fmt.Sprintf(", at most %.1f s pending while there was room, by %d searches", w.longestRoom.Seconds(), w.searches)
	}
	if w.lost > 0 {
		text += fmt.Sprintf(", %d claims that Kubernetes had lost were given back", w.lost)
	}
	return text
}

// giveBackClaims names a pod's claims in its status. Kubernetes' controller of claims (1.36.3)
// applies the names that its copy of the pod lacks, and those alone. So where a pod has several
// claims, and that copy comes to name one of them before another is made, it takes the name of
// the one away again, then that of the other, and so on: the kubelet can neither start the pod
// nor end it.
func giveBackClaims(ctx context.Context, p *core.Pod) error {
	var claims resource.ResourceClaimList
	if err := node.Read(ctx, "/apis/resource.k8s.io/v1/namespaces/"+p.Namespace+"/resourceclaims", &claims); err != nil {
		return err
	}
	var all []core.PodResourceClaimStatus
	for i := range claims.Items {
		c := &claims.Items[i]
		if slices.ContainsFunc(c.OwnerReferences, func(o meta.OwnerReference) bool { return o.UID == p.UID }) {
			all = append(all, core.PodResourceClaimStatus{Name: c.Annotations[resource.PodResourceClaimAnnotation], ResourceClaimName: &c.Name})
		}
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"resourceClaimStatuses": all}})
	if err == nil {
		_, err = node.Kubectl(ctx, nil, "patch", "pod", p.Name, "-n", p.Namespace, "--subresource=status", "--type=merge", "-p", string(patch))
	}
	return err
}

// follow looks until ctx ends. With claims nobody may wait for longer than there is a
// reason for.
func (w *waits) follow(ctx context.Context) error {
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (w *waits) look(ctx context.Context) error {
	var list core.PodList
	if node.Read(ctx, "/api/v1/namespaces/"+lab.PodNamespace+"/pods", &list) != nil {
		return nil // asked again
	}
	var pending []*core.Pod
	for i := range list.Items {
		p := &list.Items[i]
		switch {
		case p.DeletionTimestamp != nil || p.Status.Phase != core.PodPending || begun(p):
			if at, ok := w.bound[p.Name]; ok && !w.unasked[p.Name] {
				w.longest = max(w.longest, time.Since(at))
			}
			delete(w.bound, p.Name)
		case p.Spec.NodeName == "":
			pending = append(pending, p)
		case w.bound[p.Name].IsZero():
			w.bound[p.Name] = time.Now()
		default:
			if w.unasked[p.Name] {
				continue
			}
			if len(p.Status.ResourceClaimStatuses) < len(p.Spec.ResourceClaims) && time.Since(w.bound[p.Name]) > backOff {
				if err := giveBackClaims(ctx, p); err != nil {
					return err
				}
				w.bound[p.Name] = time.Now()
				w.lost++
			}
			if took := time.Since(w.bound[p.Name]); w.claims && took > creating {
				if _, late, err := failedPrepares(ctx); err != nil || late[p.Name] {
					w.unasked[p.Name] = err == nil
					continue
				}
				return fmt.Errorf("pod %s has had a node for %.0f s, and no container", p.Name, took.Seconds())
			}
		}
	}
	if !w.claims {
		return nil
	}
	maps.DeleteFunc(w.roomy, func(name string, _ time.Time) bool {
		return !slices.ContainsFunc(pending, func(p *core.Pod) bool { return p.Name == name })
	})
	return w.search(ctx, pending)
}

// begun reports whether a container of a pod has been started.
func begun(p *core.Pod) bool {
	return slices.ContainsFunc(slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses), func(c core.ContainerStatus) bool {
		return c.State.Waiting == nil || c.LastTerminationState.Terminated != nil
	})
}

// search looks for room for those that are pending.
func (w *waits) search(ctx context.Context, pending []*core.Pod) error {
	if len(pending) == 0 {
		return nil
	}
	world, err := room.Look(func(path string, into any) error { return node.Read(ctx, path, into) })
	if err != nil {
		return nil // asked again
	}
	specs := map[string]resource.DeviceClaim{}
	for i := range world.Claims {
		specs[world.Claims[i].Name] = world.Claims[i].Spec.Devices
	}
	for _, p := range pending {
		var asked []resource.DeviceClaim
		for _, s := range p.Status.ResourceClaimStatuses {
			if s.ResourceClaimName != nil {
				if of, ok := specs[*s.ResourceClaimName]; ok {
					asked = append(asked, of)
				}
			}
		}
		if len(asked) == 0 || len(asked) < len(p.Spec.ResourceClaims) {
			continue // its claims are being made
		}
		found, err := world.For(ctx, nodeName, asked...)
		if err != nil {
			return err
		}
		w.searches++
		if len(found) == 0 {
			delete(w.roomy, p.Name)
			continue
		}
		if w.roomy[p.Name].IsZero() {
			w.roomy[p.Name] = time.Now()
		}
		since := time.Since(w.roomy[p.Name])
		w.longestRoom = max(w.longestRoom, since)
		// For shares of memory that happens: see docs/dra.md, what DRA lacks.
		if since > backOff && !strings.Contains(p.Name, "dynamic") {
			return fmt.Errorf("pod %s is pending, and for %.0f s a search has found room for it, now %v", p.Name, since.Seconds(), found)
		}
	}
	return nil
}

// unasked reports whether the Event of a failed Prepare is of a kubelet that never came to
// ask the driver. The API server's own picture of what a node may read is a moment old, so a
// kubelet may be refused the claim of a pod that is its own. It tries again after a minute.
// A claim that Kubernetes has lost it does not know either; see giveBackClaims.
func unasked(message string) bool {
	return strings.Contains(message, "resourceclaims.resource.k8s.io") && strings.Contains(message, "no relationship found between node") ||
		strings.HasSuffix(message, "ResourceClaim not created yet")
}

// failedPrepares are the kubelet's Events of claims that it could not have prepared, and the
// pods for which it never came to ask the driver.
func failedPrepares(ctx context.Context) (failed []string, late map[string]bool, err error) {
	var list core.EventList
	if err := node.Read(ctx, "/api/v1/namespaces/"+lab.PodNamespace+"/events?fieldSelector=reason%3DFailedPrepareDynamicResources", &list); err != nil {
		return nil, nil, err
	}
	late = map[string]bool{}
	for _, e := range list.Items {
		if unasked(e.Message) {
			late[e.InvolvedObject.Name] = true
			continue
		}
		failed = append(failed, e.InvolvedObject.Name+": "+e.Message)
	}
	return failed, late, nil
}

// atOnce sends three Jobs, of 22 pods together, for what three GPUs can have in several
// turns, and returns what became of them.
func (b *bench) atOnce(claims bool) string {
	b.Helper()
	sizes := map[string]int{"1g.10gb": 8, "2g.20gb": 7, "3g.40gb": 7}
	w, began := newWaits(claims), time.Now()
	name := func(profile string) string { return strings.ReplaceAll(b.short()+"-"+profile, ".", "-") }
	b.Cleanup(func() {
		for profile := range sizes {
			if err := node.DeleteJob(context.Background(), name(profile)); err != nil {
				b.Error(err)
			}
		}
	})
	for _, profile := range slices.Sorted(maps.Keys(sizes)) {
		pod := lab.Pod{Name: name(profile), Containers: []lab.Container{{Resources: map[string]int{lab.MIG(profile): 1}, Then: "sleep 1; exit 0\n"}}}
		if claims {
			byTemplate(&pod)
		}
		b.must(node.CreateParallel(b.ctx, pod, sizes[profile], 100))
	}
	refused := 0
	b.must(lab.Await(b.ctx, 5*time.Minute, "three Jobs to be complete", func(ctx context.Context) error {
		if err := w.look(ctx); err != nil {
			return fmt.Errorf("%w: %w", err, lab.ErrNever)
		}
		refused = 0
		var open []string
		for _, profile := range slices.Sorted(maps.Keys(sizes)) {
			s, err := node.JobState(ctx, name(profile))
			if err != nil {
				return err
			}
			if refused += s.FailedPods; s.Ended != "Complete" {
				open = append(open, name(profile))
			}
		}
		if len(open) > 0 {
			return fmt.Errorf("%v are not", open)
		}
		return nil
	}))
	if claims && refused > 0 {
		b.Errorf("%d pods of three Jobs were refused", refused)
	}
	return fmt.Sprintf("%d of %d pods refused, complete after %.0f s, %s", refused, 22+refused, time.Since(began).Seconds(), w)
}

// refusals is a crowd that is sent through one front-end after the other.
type refusals struct {
	*bench
	// said is what became of it, by front-end.
	said map[string]string
}

// crowd sends so many pods, and then three Jobs.
func (r *refusals) crowd(name string, pods int, o crowdOptions) {
	r.sub(name, func(b *bench) {
		w := newWaits(o.byClaims)
		o.fails, o.disturb = true, w.follow
		d := b.crowd(pods, o)
		refused := d.refused()
		r.said[name] = fmt.Sprintf("%d of %d pods refused, %s", refused, d.done["pods"], w)
		if o.byClaims && refused > 0 {
			b.Errorf("%d pods were refused", refused)
		}
		r.said[name+", three Jobs at once"] = b.atOnce(o.byClaims)
	})
}

// whole waits until all GPUs of the crowd can be had whole, as MIG instances of a class.
func (b *bench) whole(class string) {
	b.Helper()
	// A name moves to DRA a minute after it was last used through the device plugin.
	b.must(lab.Await(b.ctx, 3*time.Minute, "the GPUs to be in the slices", func(ctx context.Context) error {
		w, err := room.Look(func(path string, into any) error { return node.Read(ctx, path, into) })
		if err != nil {
			return err
		}
		found, err := w.For(ctx, nodeName, room.Request(class+"."+lab.Domain, demandGPUs))
		if err == nil && len(found) < demandGPUs {
			s, _ := agent.Status(ctx)
			err = fmt.Errorf("there is no room for all in %d slices, with the taints %v; the agent says: %s", len(w.Slices), w.Taints(), s)
		}
		return err
	}))
}

// TestNobodyIsRefused sends the crowd of TestMIGOnDemand, of the same seed, and three Jobs
// at once, to the real scheduler and kubelet: through DRA, and with -long through the device
// plugin, whose node is asked after the scheduler has decided, and to GPUs that are whatever
// is asked first. By claims nobody is refused, every Prepare succeeds at once, and who is
// pending is so because there is no room.
func TestNobodyIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	world := migWorld
	world.World += "gpus:\n"
	for index := range demandGPUs {
		world.World += fmt.Sprintf("  - {index: %d, mig: true}\n", index)
	}
	b.swap(world)
	b.usersStatus()
	b.templates(demandWants()...)

	r := refusals{b, map[string]string{}}
	if *long {
		b.must(agent.Reset(b.ctx, demandPartitions))
		b.offersAll(placements(demandGPUs))
		r.crowd("by-the-device-plugin", 200, crowdOptions{})
		b.must(agent.SetPartitions(b.ctx, demandClaims))
	} else {
		b.Log("through the device plugin it is TestMIGOnDemand that sends a crowd; -long has both here")
		b.must(agent.Reset(b.ctx, demandClaims))
	}
	b.whole("mig-7g.80gb")
	r.crowd("by-claims", count(8, 200), crowdOptions{byClaims: true})
	if *long {
		b.must(agent.SetPartitions(b.ctx, strings.Replace(demandClaims, "mode: mig\n", "mode: dynamic\n", 1)))
		b.whole("gpu")
		r.crowd("by-claims-dynamic", 60, crowdOptions{byClaims: true, dynamic: true})
	}
	failed, late, err := failedPrepares(b.ctx)
	b.must(err)
	for _, line := range failed {
		b.Errorf("a Prepare has failed: %s", line)
	}
	if len(late) > 0 {
		b.Logf("%d pods have waited since the API server did not let the kubelet read their claims yet", len(late))
	}
	for _, name := range slices.Sorted(maps.Keys(r.said)) {
		b.Logf("%s: %s", name, r.said[name])
	}
}
