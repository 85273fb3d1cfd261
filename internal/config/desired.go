// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Mode is the layout of a GPU.
type Mode string

// Modes. Keep, the zero value, is never written in a file: the partition has no entry for the
// GPU, which stays as it is.
const (
	Keep   Mode = ""
	Whole  Mode = "whole"
	Shared Mode = "shared"
	MIG    Mode = "mig"
	// Dynamic offers a GPU whole, as memory and as every MIG placement at once, only through
	// DRA: the first holder decides its layout.
	Dynamic Mode = "dynamic"
	Off     Mode = "off"
)

// Want is the wanted layout of one GPU.
type Want struct {
	GPU  gpu.UUID
	Mode Mode
	// API is the front-end that offers the GPU; empty if the GPU offers nothing, and for Keep.
	API ledger.FrontEnd
	// Replicas is how many equal shares a Shared GPU has; 0 means units of memory.
	Replicas int
	// TimeSlice is empty if the mode is not Shared, and the default under MPS.
	TimeSlice gpu.TimeSlice
	// Compute is how the containers of a Shared GPU share its SMs. It is zero if they take turns, and
	// if the mode is not Shared.
	Compute compute.Sharing
	// Spot is how the GPU's room is offered a second time. It is zero if the mode is Dynamic or Off, and
	// for replicas.
	Spot ledger.Offering
	// OnDemand is true if the instances of a MIG or Dynamic GPU are made for requests.
	// Otherwise exactly those of Geometry exist, which may be none.
	OnDemand bool
	// Geometry is in mig.Compare order, with each profile once and counts of at least 1. The
	// GPU has placements for all of it, unless Unproven is true.
	Geometry []mig.Count
	// Profiles limits what is offered on demand, in mig.Compare order. Empty means every
	// profile of the GPU.
	Profiles []mig.Name
	// Unproven is true if it is not known yet whether a MIG GPU can have this layout: some
	// drivers report placements only while MIG is on, and a faulty GPU may not be described at
	// all. No known fact rules it out. Equal ignores Unproven, since it does not change what is
	// wanted.
	Unproven bool
	// Line is the entry's line in the partition file, for messages; 0 for Keep. Equal ignores
	// it, since an entry that moved has not changed.
	Line int
}

// Equal reports whether two wants are the same layout of the same GPU.
func (w Want) Equal(o Want) bool {
	return w.GPU == o.GPU && w.Mode == o.Mode && w.API == o.API && w.Replicas == o.Replicas &&
		w.TimeSlice == o.TimeSlice && w.Compute == o.Compute && w.Spot == o.Spot && w.OnDemand == o.OnDemand &&
		slices.Equal(w.Geometry, o.Geometry) && slices.Equal(w.Profiles, o.Profiles)
}

// Desired is the wanted layout of a node's GPUs.
type Desired struct {
	// Partition is the name of the chosen partition.
	Partition string
	// GPUs has one element for each GPU of the inventory, in its order.
	GPUs []Want
}

// File is a parsed partition file. It does not change.
type File struct {
	name string
	// line is that of the key that holds the partitions.
	line int
	// nvidia is true if the file was written for NVIDIA's MIG manager: the last match wins.
	nvidia     bool
	partitions []partition
}

type partition struct {
	name    string
	line    int
	entries []entry
}

// entry is one item of a partition: which GPUs, and their wanted layout.
type entry struct {
	line    int
	devices selector
	// want has no API if the entry names none. apiLine and computeLine are the lines of the API and
	// of compute.
	want Want
	// spotLine is the line of spot.
	apiLine, computeLine, spotLine int
}

// selector selects GPUs. One of all, model, indices and uuids is set. filter, if it is not
// empty, narrows the selection.
type selector struct {
	all     bool
	model   string
	indices []indexAt
	uuids   []uuidAt
	filter  []board
	// capable narrows the selection to GPUs that can do MIG. In an item that turns MIG on, the
	// MIG manager's all means these.
	capable bool
}

// board is a PCI id in a MIG manager's filter. device has the device and the vendor in one
// number. subsystem tells boards of one device apart, if the filter names it.
type board struct {
	device, subsystem uint32
	exact             bool // subsystem counts
}

type indexAt struct{ index, line int }

type uuidAt struct {
	uuid gpu.UUID
	line int
}

// Names returns the names of the file's partitions, in their order in the file.
func (f *File) Names() []string {
	names := make([]string, len(f.partitions))
	for i, p := range f.partitions {
		names[i] = p.name
	}
	return names
}

// Node is what Desire must know of a node beside its GPUs.
type Node struct {
	// Unit is the size of a unit of GPU memory.
	Unit gpu.MiB
	// API is the front-end of entries that name none; empty means the device plugin.
	API ledger.FrontEnd
	// NoDRA is why nothing can be offered through DRA; empty if it can.
	NoDRA string
	// NoMPS is why no GPU can be shared through MPS; empty if GPUs can.
	NoMPS string
}

// Desire returns the wanted layout of the GPUs of inv under the named partition. It depends
// only on its arguments. The error is an Errors: why the node cannot have the partition.
func (f *File) Desire(partition string, inv *gpu.Inventory, on Node) (Desired, error) {
	m := &mistakes{file: f.name}
	p := f.find(partition)
	if p == nil {
		m.add(f.line, "no partition is named %s: the file has %s", quote(partition), list(f.Names(), "and"))
		return Desired{}, m.err()
	}
	f.checkPresent(m, p, inv)

	cannot := byLine{}
	makes, names := make(map[int]*entryDevices), &offers{}
	var unmatched []int
	d := Desired{Partition: partition, GPUs: make([]Want, 0, len(inv.GPUs))}
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		match := -1
		for e := range p.entries {
			if !p.entries[e].devices.matches(dev) {
				continue
			}
			if match >= 0 && !f.nvidia {
				why := fmt.Sprintf("the entry on line %d matches too, and exactly one must match each GPU",
					p.entries[match].line)
				cannot.add(p.entries[e].line, why, dev.Index)
				continue
			}
			match = e
		}
		w := Want{}
		switch {
		case match >= 0:
			e := &p.entries[match]
			w = e.want
			cannot.add(e.computeLine, throughMPS(&w, dev, &on), dev.Index)
			reason := ""
			w.Unproven, reason = prove(&w, dev)
			cannot.add(e.line, reason, dev.Index)
			cannot.add(e.line, memoryUnits(&w, dev, on.Unit), dev.Index)
			if w.Mode != Off {
				w.API = cmp.Or(w.API, on.API, ledger.DevicePlugin)
			}
			cannot.add(cmp.Or(e.apiLine, e.line), throughDRA(&w, &on), dev.Index)
			cannot.add(e.spotLine, spotThrough(&w), dev.Index)
			names.add(&w, dev, cmp.Or(e.apiLine, e.line))
			makes[match] = makes[match].add(&w, dev, on.Unit)
		case !f.nvidia && dev.Fault == "":
			unmatched = append(unmatched, dev.Index)
		}
		w.GPU = dev.UUID
		w.Geometry, w.Profiles = slices.Clone(w.Geometry), slices.Clone(w.Profiles)
		d.GPUs = append(d.GPUs, w)
	}

	if len(unmatched) > 0 {
		m.add(p.line, "partition %s has no entry for %s of this node: exactly one must match each GPU%s",
			quote(p.name), gpus(unmatched), p.strangeModels(inv))
	}
	cannot.tell(m)
	names.check(m)
	checkSum(m, p, makes, on.Unit)
	if err := m.err(); err != nil {
		return Desired{}, err
	}
	return d, nil
}

func (f *File) find(name string) *partition {
	for i := range f.partitions {
		if f.partitions[i].name == name {
			return &f.partitions[i]
		}
	}
	return nil
}

// Elsewhere reports whether a partition is for other nodes than one with inv: each of its entries names a
// model, and no GPU of inv is of any of them. A file for a fleet has such partitions, and Desire refuses
// them on this node.
func (f *File) Elsewhere(partition string, inv *gpu.Inventory) bool {
	p := f.find(partition)
	if p == nil || len(p.entries) == 0 {
		return false
	}
	for i := range p.entries {
		of := &p.entries[i].devices
		if of.model == "" || slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return of.matches(&d) }) {
			return false
		}
	}
	return true
}

// strangeModels names the model patterns that match none of inv, with the models that are there; empty if
// there are no such patterns. A GPU without an entry is most often meant by one of them.
func (p *partition) strangeModels(inv *gpu.Inventory) string {
	var strange, there []string
	for i := range p.entries {
		e := &p.entries[i]
		if e.devices.model != "" &&
			!slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return e.devices.matches(&d) }) {
			strange = append(strange, fmt.Sprintf("%s on line %d", quote(e.devices.model), e.line))
		}
	}
	if len(strange) == 0 {
		return ""
	}
	for i := range inv.GPUs {
		if name := quote(inv.GPUs[i].Model); !slices.Contains(there, name) {
			there = append(there, name)
		}
	}
	return fmt.Sprintf("; the models of this node are %s, and no GPU matches the model %s",
		list(there, "and"), list(strange, "or"))
}

// checkPresent refuses each index and UUID that the node lacks.
func (f *File) checkPresent(m *mistakes, p *partition, inv *gpu.Inventory) {
	for i := range p.entries {
		s := &p.entries[i].devices
		if len(s.filter) > 0 && !slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return s.admits(&d) }) {
			continue
		}
		for _, x := range s.indices {
			if !slices.ContainsFunc(inv.GPUs, func(d gpu.Device) bool { return d.Index == x.index }) {
				m.add(x.line, "this node has no GPU with index %d: %s", x.index, present(inv))
			}
		}
		for _, u := range s.uuids {
			if inv.ByUUID(u.uuid) == nil {
				m.add(u.line, "this node has no GPU %s: %s", u.uuid, presentUUIDs(inv))
			}
		}
	}
}

func (s *selector) matches(d *gpu.Device) bool {
	switch {
	case !s.admits(d):
		return false
	case s.all:
		return true
	case s.model != "":
		ok, _ := path.Match(s.model, d.Model) // Parse has checked the pattern
		return ok
	default:
		return slices.ContainsFunc(s.indices, func(x indexAt) bool { return x.index == d.Index }) ||
			d.UUID != "" && slices.ContainsFunc(s.uuids, func(u uuidAt) bool { return u.uuid == d.UUID })
	}
}

// admits reports whether a MIG manager's item is meant for a GPU, apart from devices.
func (s *selector) admits(d *gpu.Device) bool {
	if s.capable && !d.MIG.Capable && d.Fault == "" {
		return false
	}
	if len(s.filter) == 0 {
		return true
	}
	device, err := pciID(d.PCIDevice)
	if err != nil {
		return false
	}
	subsystem, err := pciID(d.PCISubsystem)
	known := err == nil
	return slices.ContainsFunc(s.filter, func(b board) bool {
		return b.device == device && (!b.exact || known && b.subsystem == subsystem)
	})
}

// pciID parses a PCI id such as 0x20B210DE.
func pciID(s string) (uint32, error) {
	id, err := strconv.ParseUint(s, 0, 32)
	return uint32(id), err
}

func present(inv *gpu.Inventory) string {
	if len(inv.GPUs) == 0 {
		return "it has none"
	}
	var indices []int
	for i := range inv.GPUs {
		indices = append(indices, inv.GPUs[i].Index)
	}
	return "it has " + gpus(indices)
}

func presentUUIDs(inv *gpu.Inventory) string {
	var uuids []string
	for i := range inv.GPUs {
		if u := inv.GPUs[i].UUID; u != "" {
			uuids = append(uuids, string(u))
		}
	}
	if len(uuids) == 0 {
		return "it has none"
	}
	return "it has " + list(uuids, "and")
}

// gpus names GPUs by index: "GPU 3", "GPUs 0-3 and 7".
func gpus(indices []int) string {
	if len(indices) == 1 {
		return fmt.Sprintf("GPU %d", indices[0])
	}
	indices = slices.Clone(indices)
	slices.Sort(indices)
	var runs []string
	for i := 0; i < len(indices); {
		j := i
		for j+1 < len(indices) && indices[j+1] == indices[j]+1 {
			j++
		}
		switch j - i {
		case 0:
			runs = append(runs, strconv.Itoa(indices[i]))
		case 1:
			runs = append(runs, strconv.Itoa(indices[i]), strconv.Itoa(indices[j]))
		default:
			runs = append(runs, fmt.Sprintf("%d-%d", indices[i], indices[j]))
		}
		i = j + 1
	}
	return "GPUs " + list(runs, "and")
}
