// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Input is what slices are built from.
type Input struct {
	// Node is the node's name, and Driver the driver's.
	Node, Driver string
	Inventory    *gpu.Inventory
	// Layouts has the GPUs that are offered through DRA.
	Layouts map[gpu.UUID]plan.Layout
	Cards   map[gpu.UUID]*mig.Card
	// Guarantee is how strong the cap on a share is: "driver", "api" or "watchdog".
	Guarantee string
	// Fixed are the GPUs whose MIG instances stay as the partition lays them out, with any holder.
	// Only the UUIDs of these instances are published: an instance on demand gets another one each
	// time.
	Fixed map[gpu.UUID]bool
	// Departing are devices that no layout has any longer, and that a claim may still name. They
	// stay in their slices.
	Departing []Device
	// Taints returns the taints of a device, which keep claims off it or end its holders; may be
	// nil.
	Taints func(Device) []resourcev1.DeviceTaint
}

// Published is what a node publishes.
type Published struct {
	Slices []resourcev1.ResourceSlice
	// Devices are the devices in the slices.
	Devices map[DeviceName]Device
}

// DeviceName is what a claim's allocation names a device by.
type DeviceName struct{ Pool, Name string }

// Build makes a node's slices. It is a pure function.
//
// A node has a pool for each model of GPU. The first slices of a pool have the counters, those of
// eight GPUs each. After them comes a slice of devices for each GPU, in an order that puts
// neighbouring GPUs beside each other: the scheduler takes the first devices that fit. Devices that
// cannot exist side by side take the same counters, also if they are of different layouts. So a
// device that is still held keeps claims off the devices of the next layout in its place.
func Build(in Input) *Published {
	out := &Published{Devices: map[DeviceName]Device{}}
	var all []gpu.UUID
	pools := map[string][]*gpu.Device{}
	for i := range in.Inventory.GPUs {
		d := &in.Inventory.GPUs[i]
		all = append(all, d.UUID)
		_, offered := in.Layouts[d.UUID]
		if offered || slices.ContainsFunc(in.Departing, func(o Device) bool { return o.GPU == d.UUID }) {
			pool := poolName(in.Node, d.Model)
			pools[pool] = append(pools[pool], d)
		}
	}
	short := shorts(all)
	for pool, gpus := range pools {
		slices.SortFunc(gpus, near)
		list := counterSlices(&in, gpus, short)
		for _, d := range gpus {
			var devices []resourcev1.Device
			for _, of := range in.devices(d) {
				device := in.device(d, of, short[d.UUID])
				devices = append(devices, device)
				out.Devices[DeviceName{pool, device.Name}] = of
			}
			for part := range slices.Chunk(devices, resourcev1.ResourceSliceMaxDevicesWithAdvancedFeatures) {
				list = append(list, resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{Devices: part}})
			}
		}
		for i := range list {
			list[i].Name, list[i].Spec.Driver, list[i].Spec.NodeName =
				sliceName(i, in.Driver, pool), in.Driver, &in.Node
			list[i].Spec.Pool = resourcev1.ResourcePool{Name: pool, ResourceSliceCount: int64(len(list))}
		}
		out.Slices = append(out.Slices, list...)
	}
	slices.SortFunc(out.Slices, func(a, b resourcev1.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// basis is the input that the slices follow from: the slices change only if it does. It is much
// smaller than the slices, and each round of the agent compares it to decide whether to build them.
type basis struct {
	inventory *gpu.Inventory
	layouts   map[gpu.UUID]plan.Layout
	cards     map[gpu.UUID]*mig.Card
	guarantee string
	fixed     map[gpu.UUID]bool
	// taints has the taints of every listed device.
	taints map[Device][]resourcev1.DeviceTaint
}

func (in *Input) basis() basis {
	out := basis{in.Inventory, in.Layouts, in.Cards, in.Guarantee, in.Fixed, map[Device][]resourcev1.DeviceTaint{}}
	for i := range in.Inventory.GPUs {
		for _, of := range in.devices(&in.Inventory.GPUs[i]) {
			out.taints[of] = in.Taints(of)
		}
	}
	return out
}

// withdraws reports whether now taints a listed device that b does not taint in the same way.
func (b *basis) withdraws(now *basis) bool {
	for d, taints := range now.taints {
		if was, listed := b.taints[d]; listed && len(taints) > 0 && !slices.Equal(was, taints) {
			return true
		}
	}
	return false
}

// near orders GPUs so that neighbours are beside each other.
func near(a, b *gpu.Device) int {
	numa := func(d *gpu.Device) int {
		if d.NUMA == nil {
			return -1
		}
		return *d.NUMA
	}
	return cmp.Or(cmp.Compare(numa(a), numa(b)), cmp.Compare(a.PCI, b.PCI), cmp.Compare(a.Index, b.Index))
}

// counterSlices returns the slices with the GPUs' counters.
func counterSlices(in *Input, gpus []*gpu.Device, short map[gpu.UUID]string) []resourcev1.ResourceSlice {
	var out []resourcev1.ResourceSlice
	for part := range slices.Chunk(gpus, resourcev1.ResourceSliceMaxCounterSets) {
		var sets []resourcev1.CounterSet
		for _, d := range part {
			if len(in.counters(d)) == 0 {
				continue // its one device needs none
			}
			sets = append(sets, resourcev1.CounterSet{Name: "gpu-" + short[d.UUID], Counters: in.counters(d)})
		}
		if len(sets) > 0 {
			out = append(out, resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{SharedCounters: sets}})
		}
	}
	return out
}

// memory is the counter of a GPU's memory. It never decides what fits: on a GPU with MIG the memory
// slices do, and on others each device takes all of it. Quotas count by it.
const memory = "memory"

// counters returns all counters of a GPU.
func (in *Input) counters(d *gpu.Device) map[string]resourcev1.Counter {
	out := map[string]resourcev1.Counter{}
	if d.Memory > 0 { // zero if the GPU has no memory of its own
		out[memory] = resourcev1.Counter{Value: bytes(d.Memory)}
	}
	if card := in.Cards[d.UUID]; card != nil {
		for _, c := range card.Counters() {
			out[c.Name] = resourcev1.Counter{Value: count(c.Value)}
		}
	}
	return out
}

// takes returns the counters that a device takes: all of its GPU's, or the parts of a MIG
// placement.
func (in *Input) takes(d *gpu.Device, of Device) map[string]resourcev1.Counter {
	if !of.Kind.InMIG() {
		return in.counters(d)
	}
	out := map[string]resourcev1.Counter{}
	if p := profile(d, of.Placement.Profile); p != nil && p.Memory > 0 {
		out[memory] = resourcev1.Counter{Value: bytes(p.Memory)}
	}
	if card := in.Cards[d.UUID]; card != nil {
		for _, c := range card.Takes(of.Placement) {
			out[c.Name] = resourcev1.Counter{Value: count(c.Value)}
		}
	}
	return out
}

// bytes and count return an amount in the form that the API server sends it back in.
func bytes(m gpu.MiB) resource.Quantity {
	return *resource.NewQuantity(int64(m)<<20, resource.BinarySI)
}
func count(n int) resource.Quantity { return *resource.NewQuantity(int64(n), resource.DecimalSI) }

func profile(d *gpu.Device, name mig.Name) *gpu.Profile {
	i := slices.IndexFunc(d.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == name.GPUInstance().String() })
	if i < 0 {
		return nil
	}
	return &d.MIG.Profiles[i]
}

// devices returns the devices that are listed of a GPU: first those of its layout, then those that
// are departing.
func (in *Input) devices(d *gpu.Device) []Device {
	out := everyPiece(d.UUID, in.Layouts[d.UUID].Of)
	for _, o := range in.Departing {
		if o.GPU == d.UUID && !slices.Contains(out, o) {
			out = append(out, o)
		}
	}
	return out
}

// has reports whether a layout has the device.
func (in *Input) has(d Device) bool {
	l := in.Layouts[d.GPU]
	return l.Has(d.Kind) && (!d.Kind.InMIG() || slices.Contains(l.Placements, d.Placement))
}

// device returns a device as it is published.
func (in *Input) device(d *gpu.Device, of Device, short string) resourcev1.Device {
	out := resourcev1.Device{Name: of.name(short), Attributes: in.attributes(d, of), Capacity: capacities{}}
	if takes := in.takes(d, of); len(takes) > 0 {
		out.ConsumesCounters = []resourcev1.DeviceCounterConsumption{{CounterSet: "gpu-" + short, Counters: takes}}
	}
	if in.Taints != nil {
		out.Taints = in.Taints(of)
	}
	layout := in.Layouts[d.UUID]
	division, has := layout.Of(of.Kind)
	rows[of.Kind].capacity(d, of, division, &out)
	if has && of.Kind.Shared() && layout.Compute.MPS {
		out.Capacity[computeShare] = computeCapacity(layout.Compute)
	}
	return out
}

// capacities are how much a device has of each thing, by name.
type capacities = map[resourcev1.QualifiedName]resourcev1.DeviceCapacity

// capacity returns what a device has, by NVIDIA's names: this memory, and of the rest the most that
// one of these profiles has.
func capacity(of gpu.MiB, profiles ...gpu.Profile) capacities {
	out := capacities{}
	most := func(name resourcev1.QualifiedName, n int) {
		now := out[name].Value
		out[name] = resourcev1.DeviceCapacity{Value: count(max(int(now.Value()), n))}
	}
	if of > 0 {
		out[memory] = resourcev1.DeviceCapacity{Value: bytes(of)}
	}
	for i := range profiles {
		p := &profiles[i]
		if p.SMs > 0 {
			most("multiprocessors", p.SMs)
		}
		if e := p.Engines; e != nil {
			most("copyEngines", e.Copy)
			most("decoders", e.Decode)
			most("encoders", e.Encode)
			most("jpegEngines", e.JPEG)
			most("ofaEngines", e.OFA)
		}
	}
	return out
}

// attributes returns what selectors see of a device. The names are NVIDIA's, besides index,
// guarantee, nvlinkDomain and, of a shared GPU, sharing.
func (in *Input) attributes(d *gpu.Device, of Device) map[resourcev1.QualifiedName]resourcev1.DeviceAttribute {
	out := map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}
	text := func(name resourcev1.QualifiedName, value string) {
		if value != "" {
			if len(value) > resourcev1.DeviceAttributeMaxValueLength {
				value = value[:resourcev1.DeviceAttributeMaxValueLength]
			}
			out[name] = resourcev1.DeviceAttribute{StringValue: &value}
		}
	}
	number := func(name resourcev1.QualifiedName, value int) {
		out[name] = resourcev1.DeviceAttribute{IntValue: new(int64(value))}
	}
	release := func(name resourcev1.QualifiedName, value string) {
		if v := semver(value); v != "" {
			out[name] = resourcev1.DeviceAttribute{VersionValue: &v}
		}
	}
	row := rows[of.Kind]
	text("type", row.kind)
	if text("guarantee", "hardware"); of.Kind.Shared() {
		text("guarantee", in.Guarantee)
	}
	for name, value := range row.attributes(in, d, of) {
		text(name, value)
	}
	number("index", d.Index)
	text("productName", d.Model)
	text("brand", "Nvidia")
	major, minor, _ := strings.Cut(d.ComputeCapability, ".")
	text("architecture", architecture(major, minor))
	release("cudaComputeCapability", d.ComputeCapability)
	release("driverVersion", in.Inventory.Driver)
	release("cudaDriverVersion", in.Inventory.CUDA)
	if f := d.Fabric; f != nil {
		text("nvlinkDomain", f.Cluster+"."+strconv.FormatUint(uint64(f.Clique), 10))
	}
	if len(d.PCI) > len("0000:bb:dd.f") {
		text("resource.kubernetes.io/pciBusID", d.PCI[len(d.PCI)-len("0000:bb:dd.f"):])
	}
	if len(d.Path) > 0 {
		text("resource.kubernetes.io/pcieRoot", d.Path[0])
	}
	if d.NUMA != nil && *d.NUMA >= 0 {
		number("resource.kubernetes.io/numaNode", *d.NUMA)
	}
	return out
}

// architecture returns a GPU's architecture in NVIDIA's spelling: "Ampere", "Ada Lovelace".
func architecture(major, minor string) string {
	word := label.Family(major, minor)
	if word == "undefined" {
		return ""
	}
	words := strings.Split(word, "-")
	for i, w := range words {
		words[i] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, " ")
}

// semver makes a version of three numbers of a driver's: "580.159.03" becomes 580.159.3, and "8.0"
// becomes 8.0.0. It returns "" for other texts.
func semver(s string) string {
	parts := strings.Split(s, ".")
	if len(parts) > 3 {
		return ""
	}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 10, 32)
		if err != nil {
			return ""
		}
		parts[i] = strconv.FormatUint(n, 10)
	}
	for len(parts) < 3 {
		parts = append(parts, "0")
	}
	return strings.Join(parts, ".")
}
