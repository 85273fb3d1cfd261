// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// A property is an allocation type and a location, with its id.
type property struct{ kind, location, id int }

func (p property) poke(what string, at int) string {
	return fmt.Sprintf("poke %[1]s 0 4 %d; poke %[1]s %[3]d 4 %[4]d; poke %[1]s %[5]d 4 %[6]d", what, p.kind, at, p.location, at+4, p.id)
}

const (
	pinned, managed                           = 1, 2
	none, onDevice, onHost, onNode, onCurrent = 0, 1, 2, 3, 4
	invisible, inDomain                       = 5, 6
	poolNone, poolCard, poolRefused           = 0, 32, -1
	domain1                                   = 1 << 8 // locality domain of device 0
)

// TestCUDAProperties: which allocation types and locations cuMemCreate and pools
// take, by CUDA version, and what of them is charged to the card, in MiB.
func TestCUDAProperties(t *testing.T) {
	for _, c := range []struct {
		cuda         string
		p            property
		create, pool int // MiB of 2 MiB; poolRefused
	}{
		{"12.8", property{pinned, onDevice, 0}, 2, poolCard},
		{"12.8", property{pinned, onDevice, 1}, poolRefused, poolRefused},
		{"12.8", property{pinned, none, 0}, poolRefused, poolRefused},
		{"12.8", property{pinned, onHost, 0}, poolNone, poolNone},
		{"12.8", property{pinned, onHost, 77}, poolNone, poolNone}, // the id is ignored
		{"12.8", property{pinned, onNode, 0}, poolNone, poolNone},
		{"12.8", property{pinned, onNode, -1}, poolRefused, poolRefused},
		{"12.8", property{pinned, onCurrent, 0}, poolRefused, poolRefused},
		{"12.8", property{managed, none, 0}, poolRefused, poolRefused},
		{"12.8", property{managed, onDevice, 0}, poolRefused, poolRefused},
		{"13.0", property{managed, none, 5}, poolRefused, poolNone},
		{"13.0", property{managed, onDevice, 0}, poolRefused, poolNone},
		{"13.0", property{managed, onDevice, 1}, poolRefused, poolRefused},
		{"13.0", property{managed, onHost, 0}, poolRefused, poolNone},
		{"13.0", property{managed, onNode, 1}, poolRefused, poolNone},
		{"13.0", property{managed, onCurrent, 0}, poolRefused, poolRefused},
		{"13.0", property{pinned, inDomain, 0}, poolRefused, poolRefused},
		{"13.0", property{3, onDevice, 0}, poolRefused, poolRefused},
		{"13.4", property{pinned, onDevice, 0}, 2, poolCard},
		{"13.4", property{pinned, inDomain, 0}, 2, poolCard},
		{"13.4", property{pinned, inDomain, domain1}, 2, poolCard},
		{"13.4", property{pinned, inDomain, domain1 | 7<<16}, 2, poolCard}, // the id has two bytes
		{"13.4", property{pinned, inDomain, 2 * domain1}, poolRefused, poolRefused},
		{"13.4", property{pinned, inDomain, 1}, poolRefused, poolRefused}, // of device 1, which is not there
		{"13.4", property{managed, inDomain, 0}, poolRefused, poolRefused},
		{"13.4", property{pinned, invisible, 0}, poolRefused, poolRefused},
		{"13.4", property{managed, invisible, 0}, poolRefused, poolRefused},
	} {
		t.Run(fmt.Sprintf("%s/%d-%d-%d", c.cuda, c.p.kind, c.p.location, c.p.id), func(t *testing.T) {
			n := start(t, emulator.Spec{Count: 1, CUDA: c.cuda})
			p := startProbe(t, probeWith{})
			p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
			p.must(c.p.poke("prop", 8))
			held := func() int { return int(n.world.State().GPUs[0].UsedMiB) - 300 }
			if c.create == poolRefused {
				want(t, "cuMemCreate", p.do("cuMemCreate &h 2097152 &prop 0"), cudaInvalid)
				want(t, "its granularity", p.do("cuMemGetAllocationGranularity &n &prop 0"), cudaInvalid)
			} else {
				p.must("cuMemGetAllocationGranularity &n &prop 0; cuMemCreate &h 2097152 &prop 0")
				want(t, "MiB by cuMemCreate", held(), c.create)
				p.must("cuMemRelease h")
			}
			p.must(c.p.poke("props", 8))
			if c.pool == poolRefused {
				want(t, "cuMemPoolCreate", p.do("cuMemPoolCreate &p &props"), cudaInvalid)
				return
			}
			p.must("cuMemPoolCreate &p &props; cuMemAllocFromPoolAsync &a 2097152 p 0; cuMemsetD8Async a 0 2097152 0; cuPointerGetAttribute &is 8 a")
			want(t, "MiB by the pool", held(), c.pool)
			want(t, "IS_MANAGED", p.vars["is"]&1 == 1, c.p.kind == managed)
			p.must("cuMemFreeAsync a 0; cuMemPoolDestroy p")
			want(t, "MiB at the end", held(), 0)
		})
	}
}

// TestCUDAPoolsThatCannotBeExported: host and managed pools have no handle types,
// and managed ones no size either.
func TestCUDAPoolsThatCannotBeExported(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	p.must("cuInit 0; poke host 0 4 1; poke host 8 4 2; poke host 4 4 1; poke m 0 4 2; poke m 8 4 1; poke m 4 4 1; poke d 0 4 1; poke d 8 4 1; poke d 4 4 8")
	want(t, "a host pool with a handle type", p.do("cuMemPoolCreate &p &host"), cudaInvalid)
	want(t, "host memory with a handle type", p.do("cuMemCreate &h 2097152 &host 0"), cudaInvalid)
	want(t, "a managed pool with a handle type", p.do("cuMemPoolCreate &p &m"), cudaInvalid)
	p.must("poke m 4 4 0; cuMemPoolCreate &p &m; poke m 24 8 1073741824")
	want(t, "a managed pool with a size", p.do("cuMemPoolCreate &p &m"), cudaInvalid)
	p.must("poke m 24 8 0; poke m 32 2 1")
	want(t, "a managed pool with a usage", p.do("cuMemPoolCreate &p &m"), cudaInvalid)
	want(t, "a pool for a fabric that is not there", p.do("cuMemPoolCreate &p &d"), cudaNotSupported)
}

// TestCUDAPoolsOfLocations: each location and type has a default pool and a
// current one, which a pool of the same properties can take the place of until
// it is destroyed.
func TestCUDAPoolsOfLocations(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1, CUDA: "13.4"})
	p := startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuDeviceGetDefaultMemPool &device 0")
	location := func(kind, id int) { p.must(fmt.Sprintf("poke l 0 4 %d; poke l 4 4 %d", kind, id)) }
	seen := map[uint64]property{}
	for _, c := range []property{
		{pinned, onDevice, 0}, {pinned, onHost, 0}, {pinned, onNode, 1}, {pinned, inDomain, domain1},
		{managed, none, 0}, {managed, onDevice, 0}, {managed, onHost, 0}, {managed, onNode, 0},
	} {
		location(c.location, c.id)
		p.must(fmt.Sprintf("cuMemGetDefaultMemPool &p &l %d; cuMemGetMemPool &q &l %[1]d", c.kind))
		want(t, fmt.Sprint("the current pool of ", c), p.vars["q"], p.vars["p"])
		if other, is := seen[p.vars["p"]]; is {
			t.Errorf("%v and %v have one pool", c, other)
		}
		seen[p.vars["p"]] = c
		want(t, fmt.Sprint("the pool of the device is that of ", c), p.vars["p"] == p.vars["device"], c == property{pinned, onDevice, 0})
		want(t, "destroy a default pool", p.do("cuMemPoolDestroy p"), cudaInvalid)
		p.must("cuMemPoolGetAttribute p 9 &kind; cuMemPoolGetAttribute p 12 &where; cuMemPoolGetAttribute p 11 &id")
		want(t, fmt.Sprint("attributes of ", c), property{int(p.vars["kind"]), int(p.vars["where"]), int(p.vars["id"])}, property{c.kind, c.location, c.id % domain1})

		p.must("cuMemAllocFromPoolAsync &a 2097152 p 0")
		charged := uint64(0)
		if c.kind == pinned && (c.location == onDevice || c.location == inDomain) {
			charged = 32
		}
		want(t, fmt.Sprint("MiB of ", c), n.world.State().GPUs[0].UsedMiB, 300+charged)
		p.must("cuMemFreeAsync a 0; cuStreamSynchronize 0; cuMemPoolTrimTo p 0")

		p.must(c.poke("props", 8) + fmt.Sprintf("; cuMemPoolCreate &own &props; cuMemSetMemPool &l %d own; cuMemGetMemPool &q &l %[1]d", c.kind))
		want(t, fmt.Sprint("the pool that was set for ", c), p.vars["q"], p.vars["own"])
		p.must(fmt.Sprintf("cuMemPoolDestroy own; cuMemGetMemPool &q &l %d", c.kind))
		want(t, fmt.Sprint("the pool after it was destroyed, of ", c), p.vars["q"], p.vars["p"])
	}
	location(onDevice, 0)
	p.must("cuMemPoolCreate &own &props") // of the last, managed one
	want(t, "a managed pool for pinned memory", p.do("cuMemSetMemPool &l 1 own"), cudaInvalid)
	want(t, "a managed pool for the device", p.do("cuDeviceSetMemPool 0 own"), cudaInvalid)
}

// TestCUDAGraphsInLocalityDomains: an allocation node's memory is the device's,
// whichever of its domains it is in.
func TestCUDAGraphsInLocalityDomains(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1, CUDA: "13.4"})
	p := startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuGraphCreate &g 0; poke n 104 8 8388608")
	add := func(of property) int {
		p.must(of.poke("n", 8))
		return p.do("cuGraphAddMemAllocNode &a g 0 0 &n")
	}
	want(t, "in the second domain", add(property{pinned, inDomain, domain1}), 0)
	want(t, "in a domain that is not there", add(property{pinned, inDomain, 2 * domain1}), cudaInvalid)
	want(t, "on the host", add(property{pinned, onHost, 0}), cudaInvalid)
	want(t, "managed", add(property{managed, onDevice, 0}), cudaInvalid)
	p.must("cuGraphInstantiateWithFlags &e g 0; cuGraphLaunch e 0")
	want(t, "MiB of the graph", n.world.State().GPUs[0].UsedMiB, 308)
}
