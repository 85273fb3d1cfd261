// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// DriverName returns the driver's name for a domain.
func DriverName(domain string) string { return "gpus." + domain }

// Device is what one device of a ResourceSlice is made of.
type Device struct {
	GPU  gpu.UUID
	Kind piece.Kind
	// Placement is the device's placement if its kind is Placement; otherwise zero.
	Placement mig.Placement
}

// shorts returns a short name for each GPU: the first digits of its UUID, eight or as many as tell
// it from all others. An index would mean another GPU after a card was taken out, and claims
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

// digits returns the digits of a UUID, without prefix and hyphens.
func digits(u gpu.UUID) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(string(u)), "gpu-"), "-", "")
}

// name returns the device's name in its pool, a DNS label. short is the short name of its GPU.
func (d *Device) name(short string) string { return rows[d.Kind].name(d, short) }

func compareDevices(a, b Device) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Kind, b.Kind),
		mig.ComparePlacements(a.Placement, b.Placement))
}

func compareNames(a, b DeviceName) int {
	return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name))
}

// everyDevice returns all devices that a node's GPUs can be published as, in any layout.
func everyDevice(node string, inv *gpu.Inventory, cards map[gpu.UUID]*mig.Card) map[DeviceName]Device {
	out := map[DeviceName]Device{}
	var all []gpu.UUID
	for i := range inv.GPUs {
		all = append(all, inv.GPUs[i].UUID)
	}
	short := shorts(all)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		all := everyPiece(d.UUID, func(k piece.Kind) (piece.Division, bool) {
			of := piece.Division{Kind: k}
			if card := cards[d.UUID]; k.InMIG() && card != nil {
				of.Placements = card.Placements()
			}
			return of, true
		})
		for _, of := range all {
			out[DeviceName{poolName(node, d.Model), of.name(short[d.UUID])}] = of
		}
	}
	return out
}

// poolName returns "<node>/<model>". It is never the bare node name: a scheduler before Kubernetes
// 1.36.4 mixes the counters of two drivers whose pools have the same name.
func poolName(node, model string) string { return node + "/" + dnsLabel(model) }

// dnsLabel makes a DNS label of a model's name: "NVIDIA A100-SXM4-80GB" becomes a100-sxm4-80gb.
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

// maxName is the most characters that an object's name can have.
const maxName = 253

// sliceName names the nth slice of a pool. The number is in front, since the scheduler takes the
// slices of a pool in the order of their names.
func sliceName(n int, driver, pool string) string {
	name := fmt.Sprintf("%05d-%s-%s", n, driver, strings.ReplaceAll(pool, "/", "-"))
	if len(name) <= maxName {
		return name
	}
	sum := sha256.Sum256([]byte(pool))
	end := "-" + hex.EncodeToString(sum[:5])
	return strings.TrimRight(name[:maxName-len(end)], "-.") + end
}
