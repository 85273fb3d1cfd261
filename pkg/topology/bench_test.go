// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// BenchmarkChoose is what the kubelet waits for, for every size of a request on
// an idle node, which is when there is most to choose from.
func BenchmarkChoose(b *testing.B) {
	for _, m := range []struct {
		name string
		inv  *gpu.Inventory
	}{
		{"switch/8", switched(twoSockets(8), 18)},
		{"mesh/8", cubeMesh()},
		{"switch/16", switched(twoSockets(16), 6)},
		{"mesh/16", cubeMesh16()},
		{"pcie/16", twoSockets(16)},
	} {
		g := New(m.inv)
		r := Request{Available: all(m.inv)}
		for n := 1; n <= len(r.Available); n++ {
			r.N = n
			b.Run(fmt.Sprintf("%s/%d", m.name, n), func(b *testing.B) {
				for b.Loop() {
					if _, err := g.Choose(r); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkNew is what a new inventory costs.
func BenchmarkNew(b *testing.B) {
	inv := switched(twoSockets(16), 6)
	for b.Loop() {
		New(inv)
	}
}

func BenchmarkSpare(b *testing.B) {
	inv := cubeMesh16()
	g, free := New(inv), all(inv)
	for b.Loop() {
		g.Spare(free)
	}
}
