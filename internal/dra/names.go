// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// DriverName is the driver's, below a domain.
func DriverName(domain string) string { return "gpus." + domain }

// Device is what one device of a ResourceSlice stands for.
type Device struct {
	GPU  gpu.UUID
	Kind ledger.Kind
	// Placement is what a device of kind Placement stands for.
	Placement mig.Placement
}

// shorts gives every GPU a short name: the first digits of its UUID, as many as tell it
// from all others. An index would mean another GPU after a card was taken out, and claims
// outlive that.
func shorts(gpus []gpu.UUID) map[gpu.UUID]string {
	out := make(map[gpu.UUID]string, len(gpus))
	for _, u := range gpus {
		own := digits(u)
		n := min(8, len(own))
		for _, o := range gpus {
			for o != u && n < len(own) && strings.HasPrefix(digits(o), own[:n]) {
				n++
			}
		}
		out[u] = own[:n]
	}
	return out
}

// digits are those of a UUID, without what stands between them.
func digits(u gpu.UUID) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(string(u)), "gpu-"), "-", "")
}

// name is the device's in its pool, a DNS label; short is its GPU's.
func (d *Device) name(short string) string {
	switch d.Kind {
	case ledger.Units:
		return "gpu-" + short + "-shared"
	case ledger.Replica:
		return "gpu-" + short + "-replicas"
	case ledger.Placement:
		// As in NVIDIA's names: 1g.10gb+me at memory slice 3 is mig-1g10gb-me-3.
		p := d.Placement.Profile
		attr := strings.NewReplacer("+", "-", "-", "-no-", ".", "-", "_", "-").Replace(p.Attr)
		return fmt.Sprintf("gpu-%s-mig-%dg%dgb%s-%d", short, p.Slices, p.GB, attr, d.Placement.Start)
	default:
		return "gpu-" + short
	}
}

// compareDevices orders devices.
func compareDevices(a, b Device) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Kind, b.Kind), mig.ComparePlacements(a.Placement, b.Placement))
}

func compareNames(a, b DeviceName) int {
	return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name))
}

// everyDevice is what a node's GPUs can be published as, whatever their layout.
func everyDevice(node string, inv *gpu.Inventory, cards map[gpu.UUID]*mig.Card) map[DeviceName]Device {
	out := map[DeviceName]Device{}
	var all []gpu.UUID
	for i := range inv.GPUs {
		all = append(all, inv.GPUs[i].UUID)
	}
	short := shorts(all)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		add := func(of Device) { out[DeviceName{poolName(node, d.Model), of.name(short[d.UUID])}] = of }
		for _, kind := range []ledger.Kind{ledger.Whole, ledger.Units, ledger.Replica} {
			add(Device{GPU: d.UUID, Kind: kind})
		}
		if card := cards[d.UUID]; card != nil {
			for _, p := range card.Placements() {
				add(Device{GPU: d.UUID, Kind: ledger.Placement, Placement: p})
			}
		}
	}
	return out
}

// poolName is "<node>/<model>": never the bare node name, since counters of two drivers'
// pools of one name mix in a scheduler before Kubernetes 1.36.4.
func poolName(node, model string) string { return node + "/" + dnsLabel(model) }

// dnsLabel makes a model's name a DNS label: "NVIDIA A100-SXM4-80GB" is a100-sxm4-80gb.
func dnsLabel(model string) string {
	var b strings.Builder
	for _, word := range strings.FieldsFunc(strings.ToLower(strings.TrimPrefix(model, "NVIDIA ")), func(r rune) bool {
		return !(r >= '0' && r <= '9' || r >= 'a' && r <= 'z')
	}) {
		if b.Len()+1+len(word) > 63 {
			break
		}
		if b.Len() > 0 {
			b.WriteByte('-')
		}
		b.WriteString(word)
	}
	if b.Len() == 0 {
		return "gpu"
	}
	return b.String()
}

// maxName is the longest name of an object.
const maxName = 253

// sliceName names the nth slice of a pool. The number is in front: the scheduler takes
// the slices of a pool by their names.
func sliceName(n int, driver, pool string) string {
	name := fmt.Sprintf("%05d-%s-%s", n, driver, strings.ReplaceAll(pool, "/", "-"))
	if len(name) <= maxName {
		return name
	}
	sum := sha256.Sum256([]byte(pool))
	end := "-" + hex.EncodeToString(sum[:5])
	return strings.TrimRight(name[:maxName-len(end)], "-.") + end
}
