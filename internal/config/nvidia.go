// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"

	"example.com/gpu-agent/pkg/mig"

	"go.yaml.in/yaml/v4"
)

// item reads one item of a config of NVIDIA's MIG manager: which GPUs, MIG on or off, and which
// instances. It accepts what the MIG manager accepts, except for some faults that the MIG
// manager ignores: a list of devices with a repeated or negative index, a filter that is no PCI
// id and so matches no GPU, a mig-enabled without a value, and a profile in two spellings.
func (p *parser) item(n *yaml.Node) (entry, bool) {
	e := entry{line: n.Line}
	keys, ok := p.fields(n, "an item", "device-filter", "devices", "mig-enabled", "mig-devices")
	if !ok {
		return e, false
	}
	if f, ok := keys["device-filter"]; ok {
		e.devices.filter = p.deviceFilter(f)
	}
	if d, ok := keys["devices"]; !ok {
		p.at(n, "the item has no devices: all or a list of indices")
	} else if d.Kind == yaml.SequenceNode {
		p.indices(&e.devices, d)
	} else if d.ShortTag() == "!!str" && d.Value == "all" {
		e.devices.all = true
	} else {
		p.at(d, "devices is all or a list of indices, not %s", kind(d))
	}

	var enabled, known bool
	if m, ok := keys["mig-enabled"]; !ok {
		p.at(n, "the item has no mig-enabled: true or false")
	} else {
		enabled, known = p.boolean(m, "mig-enabled")
	}
	devices, ok := keys["mig-devices"]
	if ok && devices.ShortTag() == "!!null" {
		ok = false
	}
	if ok {
		e.want.Geometry = p.geometry(devices, "mig-devices", 0, mig.Canonical)
		if devices.Kind == yaml.MappingNode && len(devices.Content) > 0 {
			if len(e.want.Geometry) == 0 && allZero(devices) {
				p.at(devices, "all counts of mig-devices are 0: no instance is written {}")
			}
			if known && !enabled {
				p.at(devices, "mig-devices names instances while mig-enabled is false")
			}
		}
	} else if enabled {
		p.at(n, "the item has mig-enabled: true and no mig-devices: no instance is written {}")
	}

	e.want.Mode = Whole
	if enabled {
		e.want.Mode = MIG
		e.devices.capable = e.devices.all
	} else {
		e.want.Geometry = nil
	}
	return e, true
}

func allZero(counts *yaml.Node) bool {
	for i := 1; i < len(counts.Content); i += 2 {
		if counts.Content[i].Value != "0" {
			return false
		}
	}
	return true
}

// indices reads the MIG manager's list of devices, which may be empty.
func (p *parser) indices(s *selector, n *yaml.Node) {
	if p.tooMany(n, "devices", len(n.Content), mostGPUs, noSuchNode) {
		return
	}
	lines := make(map[int]int)
	for _, c := range n.Content {
		p.index(s, c, lines)
	}
}

// deviceFilter reads PCI ids: "0x20B210DE", or with the subsystem's (MIG manager v0.15)
// "0x20B210DE:0x147F10DE". A single id, or none, needs no list.
func (p *parser) deviceFilter(n *yaml.Node) []board {
	nodes := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		const remedy = "there are not so many models: name those that the nodes have"
		if p.tooMany(n, "device-filter", len(n.Content), mostFilters, remedy) {
			return nil
		}
		nodes = n.Content
	} else if n.ShortTag() == "!!null" {
		return nil
	}
	var boards []board
	for _, c := range nodes {
		s, ok := p.text(c, "device-filter")
		if !ok || s == "" && n.Kind != yaml.SequenceNode {
			continue
		}
		var b board
		device, subsystem, exact := strings.Cut(s, ":")
		id, err := pciID(device)
		b.device, b.exact = id, exact
		if exact && err == nil {
			b.subsystem, err = pciID(subsystem)
		}
		if err != nil {
			p.at(c, "device-filter %s is not a PCI id such as \"0x20B210DE\", "+
				"or with the subsystem's \"0x20B210DE:0x147F10DE\"", quote(s))
			continue
		}
		boards = append(boards, b)
	}
	return boards
}

// boolean accepts the spellings of YAML 1.1, as the MIG manager does.
func (p *parser) boolean(n *yaml.Node, what string) (value, ok bool) {
	if n.Kind == yaml.ScalarNode && n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 {
		switch strings.ToLower(n.Value) {
		case "true", "yes", "on", "y":
			return true, true
		case "false", "no", "off", "n":
			return false, true
		}
	}
	p.at(n, "%s is true or false, not %s", what, kind(n))
	return false, false
}
