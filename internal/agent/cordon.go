// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// CordonAnnotation is the Node's annotation, below Options.Domain, by which an operator keeps new
// pods off GPUs. It has indices and UUIDs with commas between, or "all". The agent reads it and
// never writes it.
const CordonAnnotation = "gpu.cordon"

// cordons are the GPUs that new pods are kept off.
type cordons struct {
	gpus map[gpu.UUID]bool
	// unknown are the words of the annotation that name no GPU of this node.
	unknown []string
	// more is the number of words that were not read.
	more int
}

// mostCordons is the number of words of the annotation that are read. A node has up to 16 GPUs, and
// each round reads the annotation again.
const mostCordons = 2048

// cordonsOf parses the annotation's value. It ignores empty words.
func cordonsOf(said string, inv *gpu.Inventory) cordons {
	c := cordons{gpus: map[gpu.UUID]bool{}}
	for range mostCordons {
		word, rest, more := strings.Cut(said, ",")
		said = rest
		if word = strings.TrimSpace(word); word != "" && !c.add(word, inv) {
			c.unknown = append(c.unknown, word)
		}
		if !more {
			return c
		}
	}
	if said != "" {
		c.more = 1 + strings.Count(said, ",")
	}
	return c
}

// add cordons the GPUs that a word names. It reports whether there are any.
func (c *cordons) add(word string, inv *gpu.Inventory) (known bool) {
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; word == "all" || word == string(d.UUID) || word == strconv.Itoa(d.Index) {
			c.gpus[d.UUID], known = true, true
		}
	}
	return known
}

// conditions returns remarks only: a cordon is no fault, and the partition does not wait for it.
func (c *cordons) conditions(domain string, inv *gpu.Inventory) (out []status.Condition) {
	key := domain + "/" + CordonAnnotation
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; c.gpus[d.UUID] {
			out = append(out, status.Why(status.GPUCordoned, "%s is cordoned by the node's annotation %s: "+
				"pods keep what they have of it, and new pods get nothing of it", d.Name(), key).
				Condition(status.Noted, string(d.UUID)))
		}
	}
	if c.more > 0 {
		out = append(out, status.Why(status.CordonUnknown, "the node's annotation %s has more than %d words: "+
			"the last %d are not read; name GPUs once each, or write all", key, mostCordons, c.more).
			Condition(status.Noted, ""))
	}
	if len(c.unknown) > 0 {
		slices.Sort(c.unknown)
		out = append(out, status.Why(status.CordonUnknown, "the node's annotation %s names %s, "+
			"and there is no such GPU here: it takes indices and UUIDs, with commas between, or all", key,
			brief.Cut(strings.Join(c.unknown, ", "), brief.Text)).Condition(status.Noted, ""))
	}
	return out
}
