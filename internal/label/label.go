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

// Node is what labels are made of.
type Node struct {
	Inventory *gpu.Inventory
	// Graph is how the inventory's GPUs are linked; nil leaves those labels out.
	Graph *topology.Graph
	// Partition is the name of the one that is followed; empty where there is
	// none.
	Partition string
	// Wanted is what the partition makes of the GPUs, in any order. It says nothing
	// about a GPU without an element. Nil: no partition is in force, and gpu.mode is
	// left out.
	Wanted []config.Want
}

// Names are those of all labels that Own may return, sorted, without the domain.
// An admission policy allows the agent these and no others, so whoever adds one
// adds it to deployments/base/admission.yaml, too; a test compares.
var Names = []string{
	"gpu.count", "gpu.cuda-version", "gpu.driver-version", "gpu.joined", "gpu.memory", "gpu.mode", "gpu.model",
	"gpu.nvlink", "gpu.nvlink-domain", "gpu.partition.active", "gpu.rdma",
}

// Own returns the agent's own labels, below a domain. It returns nil where no GPU is
// known; labels that were written before should then stay.
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

// card is a GPU and what the partition makes of it.
type card struct {
	*gpu.Device
	want config.Want
}

// mig reports whether the GPU has, or is to have, MIG instances. What is
// wanted counts: the mode in force comes and goes while a change is under way.
func (c card) mig() bool {
	if c.want.Mode == config.Keep {
		return c.MIG.Enabled
	}
	return c.want.Mode == config.MIG
}

// gpus are those that the driver lists and has described, by index.
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

// most returns the first GPU of the model that most are of; of two models with
// as many, that of the lower index.
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

// mode is the one word for all GPUs that somebody has decided on.
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

// rdma is the best kind among the cards that have a network, or where none has
// one now, among all.
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

// clique names the one NVLink fabric that GPUs of the node belong to, and their
// part of it; empty where there is none, or more than one.
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

// joined is the size of the largest set of GPUs that NVLink connects, directly or
// over each other, and that a pod can have together; and the fewest lanes that
// work at one of them. GPUs with a fault do not count, nor do those in MIG mode,
// since MIG instances have no NVLink. The size is at least 1; lanes is 0 if there are
// none.
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

// lanes are the NVLink lanes of a GPU that work.
func (c card) lanes() int {
	sum := 0
	for _, l := range c.Links {
		sum += max(l.NVLink, 0)
	}
	return sum
}

// number prints what is not 0; nothing else is known by 0.
func number(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// maxValue is what the API takes of a label's value.
const maxValue = 63

// value makes s a label's value: letters, digits, "-", "_" and ".", beginning
// and ending with a letter or digit, 63 characters at most. Blanks become "-",
// all else that is not allowed goes.
func value(s string) string {
	return trim(clean(s), maxValue)
}

// clean is GPU Feature Discovery's own way, so that values come out the same.
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
