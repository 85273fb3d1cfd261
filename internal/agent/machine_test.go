// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const unit = gpu.MiB(1024)

var names = deviceplugin.ResourceNames("example.com")

// Names of the resources that every node has.
const (
	wholeResource  = "example.com/gpu"
	memResource    = "example.com/gpu-mem"
	sharedResource = "example.com/gpu.shared"
)

func uuid(i int) gpu.UUID { return gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)) }

// machine has n GPUs of four memory units each.
func machine(n int) *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.1"}
	for i := range n {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, Minor: n - i, UUID: uuid(i), Memory: 4500, Reserved: 400})
	}
	return inv
}

// allocated makes an allocation; ids are "GPU" or "GPU::unit" by index.
func allocated(resource, pod string, short ...string) ledger.Allocation {
	var ids []string
	for _, id := range short {
		var i, n int
		if at, unit, shared := strings.Cut(id, "::"); shared {
			fmt.Sscan(at, &i)
			fmt.Sscan(unit, &n)
			ids = append(ids, timeslice.ID(uuid(i), n))
		} else {
			fmt.Sscan(id, &i)
			ids = append(ids, string(uuid(i)))
		}
	}
	return ledger.Allocation{ID: cdi.Key(resource, ids), Owner: ledger.DevicePlugin, Resource: resource, Grants: grantsOf(resource, ids...),
		Holder: ledger.Holder{Pod: workload.Pod{Namespace: "ns", Name: pod}, Container: "c"}}
}

// recordFor is the record of devices, as far as their IDs say.
func recordFor(resource string, ids ...string) ledger.Record {
	return ledger.Record{Owner: ledger.DevicePlugin, Resource: resource, Grants: grantsOf(resource, ids...)}
}

// grantsOf is what devices stand for, as far as their IDs say.
func grantsOf(resource string, ids ...string) []ledger.Grant {
	r, err := deviceplugin.RecordOf(resource, ids)
	if err != nil {
		panic(err)
	}
	return r.Grants
}

func replicaLayout(n int) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: n}}
}

// listed is a resource's list, a word a device.
func listed(v *deviceplugin.Offer, resource string) string {
	var out []string
	for _, r := range v.Resources {
		if r.Name != resource {
			continue
		}
		for _, dev := range r.Devices {
			i := 0
			fmt.Sscanf(dev.ID, "GPU-%08d", &i)
			_, n, _ := strings.Cut(dev.ID, "::")
			word := fmt.Sprint(i)
			if n != "" {
				word += "." + n
			}
			switch {
			case dev.Leaving && dev.Healthy:
				word += "~"
			case !dev.Healthy:
				word += "x"
			}
			if (dev.Reason == "") != (dev.Healthy && !dev.Leaving) {
				word += "(reason: " + dev.Reason + ")"
			}
			out = append(out, word)
		}
	}
	return strings.Join(out, " ")
}
