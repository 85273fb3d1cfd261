// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// Cluster is an API server, a scheduler and a kubelet, as far as claims go. The zero value
// with a Driver has nothing. Its methods may be called from several goroutines.
type Cluster struct {
	// Driver is the one whose slices there are.
	Driver string
	// Called, if set, is called at the beginning and at the end of each question of the
	// driver's.
	Called func()

	mu sync.Mutex
	// Guarded by mu:
	claims   []agentkube.Claim
	slices   []resourcev1.ResourceSlice
	meddled  []string
	told     map[string][]agentkube.ClaimDevice
	prepared map[string]*node.PreparedClaim
	watchers map[*watcher]bool
	readers  map[*watcher]bool // of the kubelet's account
	// writes counts the publications; away and refuses are why the server does not answer,
	// and why it takes no slices.
	writes        int
	away, refuses error
	made          int
}

type watcher struct{ changed func() }

// called is the beginning of a question; what it returns is its end.
func (c *Cluster) called() (end func()) {
	if c.Called == nil {
		return func() {}
	}
	c.Called()
	return c.Called
}

// Away has the API server answer nothing but err; nil has it back.
func (c *Cluster) Away(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = err
}

// Refuse has the API server refuse slices with err, or take them again. With an error that
// wraps agentkube.ErrUnfit it has none.
func (c *Cluster) Refuse(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refuses = err
}

// Claim is the API server's.
func (c *Cluster) Claim(_ context.Context, driver, namespace, name string) (*agentkube.Claim, error) {
	defer c.called()()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away != nil {
		return nil, c.away
	}
	for i := range c.claims {
		if o := c.ofLocked(&c.claims[i], driver); o.Namespace == namespace && o.Name == name {
			return &o, nil
		}
	}
	return nil, fmt.Errorf("claim %s/%s: %w", namespace, name, gpu.ErrNotFound)
}

// Claims is the API server's: those with a device of the driver.
func (c *Cluster) Claims(_ context.Context, driver string) (out []agentkube.Claim, err error) {
	defer c.called()()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away != nil {
		return nil, c.away
	}
	for i := range c.claims {
		if o := c.ofLocked(&c.claims[i], driver); len(o.Results) > 0 {
			out = append(out, o)
		}
	}
	return out, nil
}

// ofLocked is what a claim says to a driver.
func (c *Cluster) ofLocked(claim *agentkube.Claim, driver string) agentkube.Claim {
	out := *claim
	out.Told = len(c.told[claim.UID]) > 0
	out.Results = slices.DeleteFunc(slices.Clone(claim.Results), func(r resourcev1.DeviceRequestAllocationResult) bool { return r.Driver != driver })
	return out
}

// SetClaimDevices is the API server's.
func (c *Cluster) SetClaimDevices(_ context.Context, _ string, claim *agentkube.Claim, devices []agentkube.ClaimDevice) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.told == nil {
		c.told = map[string][]agentkube.ClaimDevice{}
	}
	c.told[claim.UID] = devices
	return c.away
}

// PublishSlices is the API server's.
func (c *Cluster) PublishSlices(_ context.Context, _ string, want []resourcev1.ResourceSlice) (meddled []string, err error) {
	defer c.called()()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes++
	if c.away != nil {
		return nil, c.away
	}
	switch meddled, c.meddled = c.meddled, nil; {
	case errors.Is(c.refuses, agentkube.ErrUnfit):
		c.slices = nil
	case c.refuses == nil:
		c.slices = slices.Clone(want)
	}
	return meddled, c.refuses
}

// WatchSlices is the API server's.
func (c *Cluster) WatchSlices(ctx context.Context, _ string, changed func()) error {
	w := &watcher{changed}
	c.mu.Lock()
	if c.watchers == nil {
		c.watchers = map[*watcher]bool{}
	}
	c.watchers[w] = true
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	delete(c.watchers, w)
	c.mu.Unlock()
	return ctx.Err()
}

// Wipe deletes all slices, as a kubelet does that starts, and has the watches tell of it.
func (c *Cluster) Wipe() {
	c.Meddle(func([]resourcev1.ResourceSlice) []resourcev1.ResourceSlice { return nil })
}

// Meddle is somebody who changes, deletes or adds slices; the watches tell of it. The
// slices that are handed in must not be changed in place.
func (c *Cluster) Meddle(change func([]resourcev1.ResourceSlice) []resourcev1.ResourceSlice) {
	c.mu.Lock()
	was := map[string]*resourcev1.ResourceSlice{}
	for i := range c.slices {
		was[c.slices[i].Name] = &c.slices[i]
	}
	c.slices = change(slices.Clone(c.slices))
	for i := range c.slices {
		if old := was[c.slices[i].Name]; old == nil || !equality.Semantic.DeepEqual(old, &c.slices[i]) {
			c.meddled = append(c.meddled, c.slices[i].Name)
		}
		delete(was, c.slices[i].Name)
	}
	c.meddled = append(c.meddled, slices.Collect(maps.Keys(was))...)
	all := slices.Collect(maps.Keys(c.watchers))
	c.mu.Unlock()
	for _, w := range all {
		w.changed()
	}
}

// Slices are those at the API server.
func (c *Cluster) Slices() []resourcev1.ResourceSlice {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.slices)
}

// Writes is how often slices have been published.
func (c *Cluster) Writes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writes
}

// Device is what the slices have of a device, by the end of its name; nil where there is
// none.
func (c *Cluster) Device(suffix string) (pool string, d *resourcev1.Device) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.slices {
		of := &c.slices[i].Spec
		for j := range of.Devices {
			if d := &of.Devices[j]; strings.HasSuffix(d.Name, suffix) {
				return of.Pool.Name, d
			}
		}
	}
	return "", nil
}

// Told is what the driver has said of a claim's devices.
func (c *Cluster) Told(uid string) []agentkube.ClaimDevice {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.told[uid]
}

// Untell takes away what drivers have written into a claim's status.
func (c *Cluster) Untell(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.told, uid)
}

// Put makes a claim, as somebody has allocated it. Without a UID it gets "uid-" and its name.
func (c *Cluster) Put(claim agentkube.Claim) dra.Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.putLocked(claim)
}

func (c *Cluster) putLocked(claim agentkube.Claim) dra.Claim {
	if claim.UID == "" {
		claim.UID = "uid-" + claim.Name
	}
	c.claims = append(c.claims, claim)
	return dra.Claim{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
}

// Edit changes a claim, if there is one of that name.
func (c *Cluster) Edit(namespace, name string, change func(*agentkube.Claim)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.claims {
		if o := &c.claims[i]; o.Namespace == namespace && o.Name == name {
			change(o)
		}
	}
}

// Remove deletes a claim, whoever uses it.
func (c *Cluster) Remove(namespace, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims = slices.DeleteFunc(c.claims, func(o agentkube.Claim) bool { return o.Namespace == namespace && o.Name == name })
}

// DRAState is the kubelet's account.
func (c *Cluster) DRAState() (s node.DRAState, err error) {
	defer c.called()()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(c.prepared)) {
		s.Claims = append(s.Claims, *c.prepared[uid])
	}
	return s, nil
}

// FollowDRAState tells when the kubelet writes its account.
func (c *Cluster) FollowDRAState(ctx context.Context, changed func()) error {
	w := &watcher{changed}
	c.mu.Lock()
	if c.readers == nil {
		c.readers = map[*watcher]bool{}
	}
	c.readers[w] = true
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	delete(c.readers, w)
	c.mu.Unlock()
	return ctx.Err()
}

// wrote has the account's readers know that it was written.
func (c *Cluster) wrote() {
	c.mu.Lock()
	all := slices.Collect(maps.Keys(c.readers))
	c.mu.Unlock()
	for _, w := range all {
		w.changed()
	}
}

// Know has the kubelet's account say that these claims are prepared as they are allocated
// now, and no others.
func (c *Cluster) Know(all ...dra.Claim) {
	defer c.wrote()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prepared = nil
	for i := range all {
		known := c.knowLocked(all[i])
		for j := range c.claims {
			if c.claims[j].UID == known.UID {
				for _, r := range c.claims[j].Results {
					d := node.PreparedDevice{Requests: []string{r.Request}, Pool: r.Pool, Device: r.Device, Share: ShareOf(&r)}
					known.Devices[c.Driver] = append(known.Devices[c.Driver], d)
				}
			}
		}
	}
}

// knowLocked writes a claim into the account, for the pods that it is reserved for.
func (c *Cluster) knowLocked(claim dra.Claim) *node.PreparedClaim {
	if c.prepared == nil {
		c.prepared = map[string]*node.PreparedClaim{}
	}
	p := c.prepared[claim.UID]
	if p == nil {
		p = &node.PreparedClaim{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, Devices: map[string][]node.PreparedDevice{c.Driver: nil}}
	} else {
		p = new(*p) // others read the account: it is replaced, not changed
	}
	p.PodUIDs = slices.Clone(p.PodUIDs)
	for i := range c.claims {
		for _, pod := range c.claims[i].Pods {
			if c.claims[i].UID == claim.UID && pod.UID != "" && !slices.Contains(p.PodUIDs, pod.UID) {
				p.PodUIDs = append(p.PodUIDs, pod.UID)
			}
		}
	}
	slices.Sort(p.PodUIDs)
	c.prepared[claim.UID] = p
	return p
}

// Prepare is the kubelet's call to a driver for a pod. The claim is in the account from
// then on, also where the call fails.
func (c *Cluster) Prepare(ctx context.Context, driver dra.Driver, claim dra.Claim) ([]dra.Device, error) {
	c.mu.Lock()
	c.knowLocked(claim)
	c.mu.Unlock()
	c.wrote()
	ctx, cancel := context.WithTimeout(ctx, dra.Patience)
	defer cancel()
	devices, err := driver.Prepare(ctx, claim)
	if err != nil {
		return nil, err
	}
	defer c.wrote()
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.knowLocked(claim)
	known.Devices = map[string][]node.PreparedDevice{}
	for _, d := range devices {
		known.Devices[c.Driver] = append(known.Devices[c.Driver], node.PreparedDevice{Requests: d.Requests, Pool: d.Pool, Device: d.Name, Share: d.Share, CDI: d.CDI})
	}
	return devices, nil
}

// Refer is the kubelet that has a claim for another pod, and takes it for prepared: it asks no
// driver. The pod is one of those that the claim is reserved for.
func (c *Cluster) Refer(claim dra.Claim) {
	c.mu.Lock()
	c.knowLocked(claim)
	c.mu.Unlock()
	c.wrote()
}

// Unprepare is the kubelet's call to a driver when no pod has a claim any more.
func (c *Cluster) Unprepare(ctx context.Context, driver dra.Driver, claim dra.Claim) error {
	if err := driver.Unprepare(ctx, claim); err != nil {
		return err
	}
	defer c.wrote()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.prepared, claim.UID)
	return nil
}
