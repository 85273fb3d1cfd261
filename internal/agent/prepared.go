// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
)

// slicesPatience bounds a request for ResourceSlices: the loop waits for it.
const slicesPatience = 2 * time.Second

// otherHardware are DRA drivers whose devices are known not to be GPUs, even if their
// ResourceSlices cannot be read. NVIDIA's driver for compute domains prepares channels between
// GPUs.
var otherHardware = []string{"compute-domain.nvidia.com", "dra.cpu", "dra.net"}

// drivers has the devices that other DRA drivers have prepared for pods.
type drivers struct {
	// listed are those of the last trusted listing, and newer ones.
	listed []node.Prepared
	// known maps a device to its GPU, "" if it is none. It stays while the device is prepared,
	// since ResourceSlices are gone for a while after each start of the kubelet or of the driver.
	known map[node.Prepared]gpu.UUID
	// unknown is why the GPU of the other devices cannot be found.
	unknown map[node.Prepared]string
	// due is when the ResourceSlices are read again for these. pause is the delay after that.
	due   time.Time
	pause wait.Backoff
}

// prepared finds the GPUs that other DRA drivers have prepared for pods. The kubelet names a device
// by driver, pool and name. Its ResourceSlice says which GPU that is (see whichGPU). If that cannot
// be found out, it may be any GPU, and the agent offers none.
func (c *coexistence) prepared(ctx context.Context, s *sightings) {
	d := &c.drivers
	listed := slices.DeleteFunc(slices.Clone(s.listing.Prepared), func(p node.Prepared) bool {
		return p.Driver == c.own || slices.Contains(otherHardware, p.Driver)
	})
	if !s.trusted { // it may lack pods, so keep the earlier devices
		listed = append(listed, slices.DeleteFunc(slices.Clone(d.listed), func(p node.Prepared) bool {
			return slices.Contains(listed, p)
		})...)
	}
	d.listed = listed
	gone := func(p node.Prepared) bool { return !slices.Contains(listed, p) }
	maps.DeleteFunc(d.known, func(p node.Prepared, _ gpu.UUID) bool { return gone(p) })
	maps.DeleteFunc(d.unknown, func(p node.Prepared, _ string) bool { return gone(p) })
	isNew := func(p node.Prepared) bool {
		_, known := d.known[p]
		return !known && d.unknown[p] == ""
	}
	switch fresh := slices.ContainsFunc(listed, isNew); {
	case fresh:
		d.pause = wait.Backoff{Duration: othersPresent, Factor: 2, Cap: othersEvery, Steps: math.MaxInt}
		c.askDrivers(ctx, s)
	case len(d.unknown) > 0 && !s.now.Before(d.due):
		c.askDrivers(ctx, s)
	}
	for _, p := range listed {
		switch u, why := d.known[p], d.unknown[p]; {
		case why != "":
			for i := range s.inv.GPUs {
				add(s.doubt, []gpu.UUID{s.inv.GPUs[i].UUID}, fmt.Sprintf(
					"%s, and that may be this GPU: %s; end that pod, or give the GPU mode off",
					describePrepared(p), why))
			}
			c.soon(d.due)
		case u != "":
			add(s.sure, []gpu.UUID{u},
				describePrepared(p)+"; end that pod and keep that driver off the GPU, or give the GPU mode off")
		}
	}
}

func describePrepared(p node.Prepared) string {
	return fmt.Sprintf("%s/%s has device %s of pool %s of the DRA driver %s by the claim %s",
		p.Namespace, p.Pod, p.Device, p.Pool, p.Driver, p.Claim)
}

// askDrivers reads the ResourceSlices, and looks up the GPUs of the devices that are not known.
func (c *coexistence) askDrivers(ctx context.Context, s *sightings) {
	d := &c.drivers
	d.due, d.unknown = s.now.Add(d.pause.Step()), map[node.Prepared]string{}
	if d.known == nil {
		d.known = map[node.Prepared]gpu.UUID{}
	}
	var ask []node.Prepared
	names := map[string]bool{}
	for _, p := range d.listed {
		if _, known := d.known[p]; !known {
			ask = append(ask, p)
			names[p.Driver] = true
		}
	}
	ctx, cancel := context.WithTimeout(ctx, slicesPatience)
	defer cancel()
	var offered []agentkube.Device
	err := errors.New("the agent has no API server to ask (--node-name)")
	if c.cluster != nil {
		offered, err = c.cluster.Devices(ctx, sortedKeys(names)...)
	}
	for _, p := range ask {
		if err != nil {
			d.unknown[p] = fmt.Sprintf("the ResourceSlices of this node, which have that, cannot be read "+
				"(the agent needs permission to list resourceslices of resource.k8s.io): %v", err)
		} else if u, why := whichGPU(s.inv, p, offered); why != "" {
			d.unknown[p] = why
		} else {
			d.known[p] = u
		}
	}
}

// whichGPU returns the node's GPU that a device of a DRA driver is, or is a part of, according to
// the ResourceSlices of drivers; "" if it is none. If that cannot be decided, why is the reason,
// and the device may be any GPU. It is pure. The rules:
//
//   - If an attribute is the UUID or PCI address of one of the GPUs, the device is that GPU. The
//     attributes are uuid and parentUUID, in any domain, and pciBusID or the names that drivers had
//     for it before.
//   - If an attribute is the UUID of an NVIDIA GPU that the node does not have, or the PCI address
//     of something else, the device is none of the GPUs.
//   - A device with neither is other hardware, unless it or its driver mentions GPUs, or another
//     device of the driver is one of the GPUs.
//   - A device that is in no ResourceSlice may be any GPU.
func whichGPU(inv *gpu.Inventory, p node.Prepared, offered []agentkube.Device) (u gpu.UUID, why string) {
	i := slices.IndexFunc(offered, func(d agentkube.Device) bool {
		return d.Driver == p.Driver && d.Pool == p.Pool && d.Name == p.Device
	})
	if i < 0 {
		return "", "no ResourceSlice of this node has that device; check whether that driver still runs here"
	}
	u, elsewhere := identity(inv, &offered[i])
	switch {
	case u != "" || elsewhere:
		return u, ""
	case speaksOfGPUs(&offered[i]) || slices.ContainsFunc(offered, func(d agentkube.Device) bool {
		of, _ := identity(inv, &d)
		return d.Driver == p.Driver && of != ""
	}):
		return "", "its ResourceSlice has no uuid and no resource.kubernetes.io/pciBusID that identifies it; " +
			"install a version of that driver that publishes one"
	}
	return "", ""
}

// identity looks for an attribute that identifies a device. It returns the GPU that it is; or it
// returns that the device is surely other hardware.
func identity(inv *gpu.Inventory, d *agentkube.Device) (u gpu.UUID, elsewhere bool) {
	instance := false
	for _, name := range sortedKeys(d.Attributes) {
		value := d.Attributes[name]
		switch strings.ToLower(name[strings.LastIndex(name, "/")+1:]) {
		case "uuid", "parentuuid":
			if ours := gpusOf(inv, value, "GPU-"+value); len(ours) > 0 {
				u = ours[0]
			}
			whole := len(value) == len("GPU-01234567-89ab-cdef-0123-456789abcdef")
			elsewhere = elsewhere || strings.HasPrefix(value, "GPU-") && whole
			// The instance was made after the last reading, or is on a GPU that could not be read.
			instance = instance || strings.HasPrefix(value, "MIG-")
		case "pcibusid", "pciebusid", "pciaddress", "pciaddr":
			at, ok := pciSlot(value)
			for i := range inv.GPUs {
				if own, has := pciSlot(inv.GPUs[i].PCI); ok && has && own == at {
					u = cmp.Or(u, inv.GPUs[i].UUID)
				}
			}
			elsewhere = elsewhere || ok
		}
	}
	return u, elsewhere && !instance && u == ""
}

// pciSlot returns a PCI address without its function. Another function in the same slot, as a
// virtual function can have, is on the same card.
func pciSlot(address string) (slot [3]uint64, ok bool) {
	var function uint64
	n, err := fmt.Sscanf(address, "%x:%x:%x.%x", &slot[0], &slot[1], &slot[2], &function)
	return slot, n == 4 && err == nil
}

// speaksOfGPUs reports whether a device without an identity may be a GPU, by its words. Its pool's
// name is ignored, since most are named after the node.
func speaksOfGPUs(d *agentkube.Device) bool {
	words := []string{d.Driver, d.Name}
	for name, value := range d.Attributes {
		words = append(words, name, value)
	}
	return slices.ContainsFunc(words, func(word string) bool {
		word = strings.ToLower(word)
		return strings.Contains(word, "gpu") || strings.Contains(word, "nvidia") || strings.Contains(word, "cuda")
	})
}
