// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

// A container with a share of the SMs is shown with it, and as not held until a look has seen that it is. One
// without a share, and the same one on another GPU, has none to be held to.
func TestSharesAreNotHeldUnseen(t *testing.T) {
	grant := func(u gpu.UUID, percent int) ledger.Grant {
		return ledger.Grant{GPU: u, Piece: piece.Replica{Of: 4}, Cap: piece.CapOf(1 << 30), Compute: compute.Share{Ceiling: percent}}
	}
	held := allocations{"share": {Grants: []ledger.Grant{grant(gpu0, 26)}}, "turns": {Grants: []ledger.Grant{grant(gpu0, 0), grant(gpu1, 0)}}}
	n := 0
	for _, c := range containers([]gpu.Device{{UUID: gpu0}, {Index: 1, UUID: gpu1}}, held, func(*status.Container, gpu.UUID, uint64) {}) {
		n++
		switch {
		case c.Allocation != "share" && c.Compute == nil && c.ComputePercent == 0:
		case c.Allocation == "share" && c.GPU == string(gpu0) && c.ComputePercent == 26 && c.Compute != nil && c.Compute.Guarantee == compute.None && c.Compute.Reason != "":
		default:
			t.Errorf("%+v, %v", c, c.Compute)
		}
	}
	if n != 3 {
		t.Errorf("%d containers", n)
	}
}
