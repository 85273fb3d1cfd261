// SPDX-License-Identifier: Apache-2.0

package label

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// Node is the input from which labels are computed.
type Node struct {
	Inventory *gpu.Inventory
	// Graph has the links between the inventory's GPUs. If it is nil, the labels about links are
	// left out.
	Graph *topology.Graph
	// Partition is the name of the partition that the node follows; empty if there is none.
	Partition string
	// Wanted has an element for each GPU that the partition names, in any order. Nil means that no
	// partition is in force; then gpu.mode is left out.
	Wanted []config.Want
}

// Names are the names of all labels that Own may return, without the domain, sorted. An admission
// policy allows the agent only these. A new name must also go into deployments/base/admission.yaml,
// which a test checks.
var Names = []string{
	"gpu.count", "gpu.cuda-version", "gpu.driver-version", "gpu.joined", "gpu.memory", "gpu.mode", "gpu.model",
	"gpu.nvlink", "gpu.nvlink-domain", "gpu.partition.active", "gpu.rdma",
}

// Own returns the agent's own labels, below a domain. It returns nil if no GPU is known; the caller
// then keeps the labels that it wrote before.
func Own(domain string, in Node) map[string]string {
	gpus := in.gpus()
	if len(gpus) == 0 {
		return nil
	}
	of := most(gpus)
	out := map[string]string{
		"gpu.model":            value(of.Model),
		"gpu.memory":           number(uint64(of.Memory)),
		"gpu.count":            strconv.Itoa(len(gpus)),
		"gpu.partition.active": value(in.Partition),
		"gpu.rdma":             rdma(in.Inventory.NICs),
		"gpu.nvlink-domain":    clique(gpus),
		"gpu.driver-version":   value(in.Inventory.Driver),
		"gpu.cuda-version":     value(in.Inventory.CUDA),
	}
	if in.Wanted != nil {
		out["gpu.mode"] = mode(gpus)
	}
	if in.Graph != nil {
		size, lanes := joined(in.Graph, gpus)
		out["gpu.joined"], out["gpu.nvlink"] = strconv.Itoa(size), number(uint64(lanes))
	}
	labels := make(map[string]string, len(out))
	for name, v := range out {
		if v != "" {
			labels[domain+"/"+name] = v
		}
	}
	return labels
}

// card is a GPU together with what the partition wants of it.
type card struct {
	*gpu.Device
	want config.Want
}

// mig reports whether the GPU has, or should have, MIG instances. The wanted mode counts, because
// the mode in force changes while a change is under way.
func (c card) mig() bool {
	if c.want.Mode == config.Keep {
		return c.MIG.Enabled
	}
	return c.want.Mode == config.MIG
}

// gpus returns the GPUs that the driver lists and has described, by index.
func (in Node) gpus() []card {
	if in.Inventory == nil {
		return nil
	}
	var out []card
	for i := range in.Inventory.GPUs {
		d := &in.Inventory.GPUs[i]
		if d.Gone || d.Model == "" {
			continue
		}
		c := card{Device: d}
		if j := slices.IndexFunc(in.Wanted, func(w config.Want) bool { return w.GPU == d.UUID }); j >= 0 {
			c.want = in.Wanted[j]
		}
		out = append(out, c)
	}
	slices.SortStableFunc(out, func(a, b card) int { return cmp.Compare(a.Index, b.Index) })
	return out
}

// most returns the first GPU of the most frequent model. Of two models that are equally frequent,
// it returns that of the lower index.
func most(gpus []card) card {
	count := map[string]int{}
	for _, c := range gpus {
		count[c.Model]++
	}
	best := gpus[0]
	for _, c := range gpus {
		if count[c.Model] > count[best.Model] {
			best = c
		}
	}
	return best
}

// mode returns the wanted mode of the GPUs, or "mixed" if they differ. A GPU without a wanted mode
// counts only if it has MIG mode on. It returns "" if no GPU counts.
func mode(gpus []card) string {
	word := ""
	for _, c := range gpus {
		m := string(c.want.Mode)
		if c.want.Mode == config.Keep && c.mig() {
			m = string(config.MIG)
		}
		switch {
		case m == "" || m == word:
		case word == "":
			word = m
		default:
			return "mixed"
		}
	}
	return word
}

// rdma returns the best kind among the cards with an active network. If there are none, it returns
// the best kind among all cards.
func rdma(nics []gpu.NIC) string {
	for _, active := range []bool{true, false} {
		for _, kind := range []gpu.RDMA{gpu.InfiniBand, gpu.EFA, gpu.RoCE} {
			if slices.ContainsFunc(nics, func(n gpu.NIC) bool { return n.Kind == kind && n.Active == active }) {
				return string(kind)
			}
		}
	}
	return "none"
}

// clique returns the NVLink fabric of the node's GPUs and their part of it; empty if there is none,
// or more than one.
func clique(gpus []card) string {
	name := ""
	for _, c := range gpus {
		if c.Fabric == nil {
			continue
		}
		one := c.Fabric.Cluster + "." + strconv.FormatUint(uint64(c.Fabric.Clique), 10)
		if name != "" && name != one {
			return ""
		}
		name = one
	}
	return value(name)
}

// joined finds the largest set of GPUs that NVLink connects, directly or through each other, and
// that one pod can have. It returns the size of the set, and the fewest working lanes at one of its
// GPUs. GPUs with a fault do not count, nor those in MIG mode, since MIG instances have no NVLink.
// The size is at least 1; lanes is 0 if there are none.
func joined(g *topology.Graph, gpus []card) (size, lanes int) {
	size = 1
	rest := slices.DeleteFunc(slices.Clone(gpus), func(c card) bool { return c.Fault != "" || c.mig() })
	for len(rest) > 0 {
		var set []card
		set, rest = rest[:1:1], rest[1:]
		for k := 0; k < len(set); k++ {
			var apart []card
			for _, c := range rest {
				if g.Between(set[k].UUID, c.UUID).Linked() {
					set = append(set, c)
				} else {
					apart = append(apart, c)
				}
			}
			rest = apart
		}
		if len(set) > size {
			size, lanes = len(set), set[0].lanes()
			for _, c := range set {
				lanes = min(lanes, c.lanes())
			}
		}
	}
	return size, lanes
}

// lanes returns the number of working NVLink lanes of a GPU.
func (c card) lanes() int {
	sum := 0
	for _, l := range c.Links {
		sum += max(l.NVLink, 0)
	}
	return sum
}

// number returns n as text, or "" for 0, which means that the figure is unknown.
func number(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// maxValue is the greatest length of a label's value in the API.
const maxValue = 63

// value turns s into a label's value: letters, digits, "-", "_" and ".", with a letter or digit at
// both ends, and at most 63 characters. Blanks become "-". It removes all other characters.
func value(s string) string {
	return trim(clean(s), maxValue)
}

// clean does what GPU Feature Discovery does, so that the values are equal.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == ' ' || r == '-' || r == '_' || r == '.' || alphanumeric(r) {
			return r
		}
		return -1
	}, s)
	return strings.Join(strings.Fields(s), "-")
}

func trim(s string, most int) string {
	s = strings.TrimLeftFunc(s, func(r rune) bool { return !alphanumeric(r) })
	s = s[:min(len(s), most)]
	return strings.TrimRightFunc(s, func(r rune) bool { return !alphanumeric(r) })
}

func alphanumeric(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
}
