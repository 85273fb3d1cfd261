// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"

	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/timeslice"

	"go.yaml.in/yaml/v4"
)

// Keys of a configuration of NVIDIA's device plugin (v0.20, api/config/v1).
const (
	pluginFlags     = "flags"
	pluginResources = "resources"
	pluginSharing   = "sharing"
	pluginIMEX      = "imex"
	pluginTurns     = "timeSlicing"
	pluginMPS       = "mps"
)

// Translation is a configuration of NVIDIA's device plugin, as this program would do the same.
type Translation struct {
	// Text is a partition file with the one partition "default".
	Text string
	// Notes say what is different here, or what has no place in a partition file.
	Notes []string
}

// FromDevicePlugin reads a configuration of NVIDIA's device plugin: how it shares GPUs. is is false if data is
// none; then Parse says what it is. name begins messages, as in Parse. The error is an Errors: what cannot be
// done here.
func FromDevicePlugin(name string, data []byte) (t Translation, is bool, err error) {
	p := &parser{mistakes{file: name}}
	root := document(&p.mistakes, data)
	if root == nil || !isDevicePlugins(root) {
		return t, false, nil
	}
	keys, _ := p.fields(root, "a configuration of NVIDIA's device plugin", "version", pluginFlags, pluginResources,
		pluginSharing, pluginIMEX)
	if v, ok := keys["version"]; !ok || v.Kind != yaml.ScalarNode || v.Value != Version {
		p.at(root, "the version is not `version: %s`, the only one that NVIDIA's device plugin has", Version)
	}
	entry := "mode: whole"
	if s, ok := keys[pluginSharing]; ok && s.ShortTag() != "!!null" {
		entry = p.pluginSharing(s, &t)
	}
	for _, key := range []string{pluginFlags, pluginResources, pluginIMEX} {
		if _, has := keys[key]; has {
			t.Notes = append(t.Notes, key+" has no place in a partition file: see docs/migrate-from-nvidia.md and docs/helm.md")
		}
	}
	t.Text = "version: " + Version + "\npartitions:\n  default:\n    - devices: all\n      " + entry + "\n"
	return t, true, p.err()
}

// isDevicePlugins reports whether a file is a configuration of NVIDIA's device plugin.
func isDevicePlugins(root *yaml.Node) bool {
	return field(root, "partitions") == nil && field(root, "mig-configs") == nil &&
		(field(root, pluginSharing) != nil || field(root, pluginFlags) != nil)
}

// pluginSharing reads sharing, and returns the lines of the entry after its devices.
func (p *parser) pluginSharing(n *yaml.Node, t *Translation) string {
	entry := "mode: whole"
	keys, _ := p.fields(n, pluginSharing, pluginTurns, pluginMPS)
	turns, sliced := keys[pluginTurns]
	through, clients := keys[pluginMPS]
	switch {
	case sliced && clients:
		p.at(through, "sharing has %s or %s, not both", pluginTurns, pluginMPS)
	case sliced:
		if replicas := p.pluginReplicas(turns, pluginTurns, timeslice.MaxDevices, t); replicas > 0 {
			entry = fmt.Sprintf("mode: shared\n      replicas: %d", replicas)
		}
	case clients:
		if replicas := p.pluginReplicas(through, pluginMPS, compute.MostClients, t); replicas > 0 {
			entry = fmt.Sprintf("mode: shared\n      replicas: %d\n      compute: mps", replicas)
			t.Notes = append(t.Notes, fmt.Sprintf("each container may use %d %% of a GPU's multiprocessors, and 1/%d of its memory; "+
				"compute: {mps: {factor: 2}} gives twice as much of the former", compute.Sharing{MPS: true}.Largest(replicas).Ceiling, replicas),
				"each GPU has an MPS daemon of its own here, and needs the component mps")
		}
	}
	return entry
}

// pluginReplicas reads the resources of one way of sharing, and returns the number of replicas of a GPU; 0 after
// a mistake.
func (p *parser) pluginReplicas(n *yaml.Node, way string, most int, t *Translation) (replicas int) {
	keys, ok := p.fields(n, way, "renameByDefault", "failRequestsGreaterThanOne", "resources")
	if !ok {
		return 0
	}
	list, ok := keys["resources"]
	if !ok {
		p.at(n, "%s has no resources", way)
		return 0
	}
	nodes, _ := p.itemsUpTo(list, "resources", mostProfiles, "no node has so many resources: name those of a node")
	seen := map[string]int{}
	for _, r := range nodes {
		fields, ok := p.fields(r, "a resource", "name", "rename", "devices", "replicas")
		if !ok {
			continue
		}
		var name string
		if f, has := fields["name"]; has {
			name, _ = p.text(f, "name")
		} else {
			p.at(r, "the resource has no name")
		}
		if line, again := seen[name]; again {
			p.at(r, "the resource %s is already on line %d", quote(name), line)
			continue
		}
		seen[name] = r.Line
		if d, has := fields["devices"]; has && d.Value != "all" {
			p.at(d, "devices other than all are not translated: write an entry for each kind of GPUs")
		}
		count := 0
		if f, has := fields["replicas"]; has {
			count, _ = p.number(f, "replicas of "+quote(name), 1, most)
		} else {
			p.at(r, "the resource has no replicas")
		}
		switch _, short, _ := strings.Cut(name, "/"); {
		case short == "gpu":
			replicas = count
		case strings.HasPrefix(short, "mig-"):
			p.at(r, "replicas of MIG instances (%s) do not exist here: a container has an instance alone", quote(name))
		case name != "":
			p.at(r, "the resource %s is not one of NVIDIA's device plugin", quote(name))
		}
	}
	if replicas > 0 {
		t.Notes = append(t.Notes, "pods ask for gpu.shared, in the domain of --resource-domain; n of them are of n different GPUs")
	}
	return replicas
}
