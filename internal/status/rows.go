// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/brief"
)

// note is a remark that needs attention.
type note struct {
	Tone string // "bad" or "warn"
	Text string
	Card *link // its link on the page; nil if it does not concern one GPU
}

// stateTone returns how serious a partition's state is.
func stateTone(state string) string {
	switch state {
	case "applied":
		return "ok"
	case "failed", "invalid":
		return "bad"
	}
	return "warn"
}

// placementTone returns the tone for a MIG device in a state.
func placementTone(state string) string {
	switch state {
	case PlacementHeld:
		return "held"
	case PlacementWarm, PlacementFree:
		return "ok"
	case PlacementFailed:
		return "bad"
	case PlacementCovered:
		return "none"
	}
	return "warn"
}

// notes returns what needs attention on the node as a whole, without its partition.
func (s *Status) notes() []note {
	var all []note
	if s.Hardware != "" {
		all = append(all, note{Tone: "bad", Text: "hardware work waits: " + s.Hardware})
	}
	if s.Watchdog.State == WatchdogOff {
		all = append(all, note{Tone: "warn", Text: "watchdog off: " + s.Watchdog.Reason})
	}
	for _, p := range s.Policies {
		switch p.State {
		case PolicyMissing:
			all = append(all, note{Tone: "bad", Text: p.Reason})
		case PolicyUnknown:
			all = append(all, note{Tone: "warn", Text: p.Reason})
		}
	}
	for _, c := range s.Found {
		switch c.Type {
		case Noted:
			all = append(all, note{Tone: "warn", Text: string(c.Reason) + ": " + c.Message})
		case Unhealthy:
			all = append(all, note{Tone: "bad", Text: string(c.Reason) + ": " + c.Message})
		case Invalid, Failed, Refused, Blocked, Pending, Waiting, Leaving: // the partition's message has it
		}
	}
	if s.Topology != nil {
		for _, w := range s.Topology.Weak {
			all = append(all, note{Tone: "warn", Text: w})
		}
	}
	return all
}

// notes returns what needs attention about the GPU.
func (g *GPU) notes(now time.Time) []note {
	var all []note
	if g.Health != Healthy {
		text := cmp.Or(g.Reason, g.Health)
		if at := since(g.Since, now); at != "" {
			text += ", since " + at
		}
		if g.Needs != "" {
			text += "; needs a " + g.Needs
		}
		all = append(all, note{Tone: "bad", Text: text})
	}
	if m := g.MPS; m != nil {
		tone, text := "ok", fmt.Sprintf("%s of its MPS server, which end with its pod", count(m.Clients, "process is a client", "processes are clients"))
		if m.Namespaces > 1 {
			text += fmt.Sprintf("; pods of %d namespaces share it, and a fault of one may end all", m.Namespaces)
		}
		if m.Trouble != "" {
			tone, text = "bad", text+"; "+m.Trouble
		}
		all = append(all, note{Tone: tone, Text: text})
	}
	if g.Blocked != "" {
		all = append(all, note{Tone: "warn", Text: "blocked: " + g.Blocked})
	}
	for _, processes := range []struct {
		tone  string
		n     int
		whose string
	}{
		{"bad", g.Intruders, "without an allocation"},
		{"bad", g.Unlisted, "of containers that the runtime does not list"},
		{"warn", g.NoPod, "of no pod"},
	} {
		if n := processes.n; n > 0 {
			all = append(all, note{
				Tone: processes.tone, Text: "used by " + count(n, "process", "processes") + " " + processes.whose,
			})
		}
	}
	if text := g.MIG.switches(); text != "" {
		all = append(all, note{Tone: "warn", Text: text})
	}
	return all
}

// tenant is a line of a GPU's tables: a MIG device or the devices of a container, with the
// container's memory.
type tenant struct {
	Placement  *Placement // nil if it is not a MIG device
	Name       string     // of the container; empty if the MIG device has no holder
	Holds      string     // empty for a MIG device, and if only the watchdog knows the container
	Age, Waits string
	Beside     string  // the pods that share it
	Kept       string  // why it is held though nothing uses it, its tier unless that is guaranteed, and whether it is lent
	Yields     string  // to whom it gives its room back, and by when
	Parked     string  // for how long it was parked, how often, and how much it had on GPUs
	Memory     *memory // nil if the watchdog has not seen the container, or another line has it
}

// mostBeside is how many of the pods that share a claim are listed: a claim may have 256.
const mostBeside = 5

// kept returns why a holder keeps devices that nothing uses, its tier unless that is guaranteed, and whether it lends
// them.
func (h *Holder) kept() string {
	why, tier := "", ""
	if h.Over {
		why = "kept until the pod ends: its init container has ended"
	}
	if h.Tier != "" {
		tier = "in the " + h.Tier + " tier"
	}
	return join("; ", tier, why, h.Lending)
}

// yields returns to whom a holder gives its room back, and by when; it is empty if it keeps its room.
func (h *Holder) yields(now time.Time) string {
	y := h.Yield
	if y == nil {
		return ""
	}
	to := "to " + y.To
	if y.To == "" {
		to = "back, since the GPU's layout changes"
	}
	if y.Out && h.Parks != nil && h.Parks.Since != nil {
		return "has given its room " + to + "; it goes on when its room is free"
	}
	if y.Out {
		return "has given its room " + to + "; it starts again when its room is free"
	}
	if now.IsZero() {
		return "gives its room " + to
	}
	return "gives its room " + to + ", within " + age(y.By.Sub(now))
}

// parked returns whether a holder is parked, for how long and how often it was, and how much it had on GPUs; it is empty if
// it never was.
func (h *Holder) parked(now time.Time) string {
	p := h.Parks
	if p == nil {
		return ""
	}
	total, size := age(time.Duration(p.Seconds*float64(time.Second))), gib(&p.MiB)+" GiB"
	times := fmt.Sprintf("%d times", p.Times)
	if p.Times == 1 {
		times = "once"
	}
	switch {
	case p.Since == nil:
		return fmt.Sprintf("was parked %s, for %s in all, with %s the last time", times, total, size)
	case now.IsZero():
		return fmt.Sprintf("is parked, with %s on the host", size)
	case p.Times == 1:
		return fmt.Sprintf("is parked for %s, with %s on the host", age(now.Sub(*p.Since)), size)
	}
	return fmt.Sprintf("is parked for %s, with %s on the host; %s so far, for %s in all", age(now.Sub(*p.Since)), size, times, total)
}

// tenants joins the holders of a GPU with what the watchdog knows about their memory.
// It returns the lines of two tables: MIG devices that exist, are held or could not be
// created, and everything else.
func (s *Status) tenants(g *GPU, now time.Time) (devices, others []tenant) {
	containers := slices.DeleteFunc(slices.Clone(s.Containers), func(c Container) bool { return c.GPU != g.UUID })
	var most *uint64 // MiB that a container without a cap can use; nil if unknown
	if g.MIG == nil && g.MemoryMiB > 0 {
		most = &g.MemoryMiB
	}
	take := func(namespace, pod, container string) *memory {
		at := slices.IndexFunc(containers, func(c Container) bool {
			return c.Namespace == namespace && c.Pod == pod && c.Container == container
		})
		if at < 0 {
			return nil
		}
		m := containers[at].memory(most)
		containers = slices.Delete(containers, at, at+1)
		return m
	}
	for _, p := range g.MIG.shown() {
		d := tenant{Placement: p}
		if p.Held() {
			d.Name, d.Memory = who(p.Namespace, p.Pod, p.Container), take(p.Namespace, p.Pod, p.Container)
			if h := g.holder(p); h != nil {
				d.Age, d.Waits = since(h.Since, now), h.Waits
				d.Beside, d.Kept, d.Yields, d.Parked = brief.List(h.Beside, mostBeside), h.kept(), h.yields(now), h.parked(now)
			}
		}
		devices = append(devices, d)
	}
	for _, h := range g.Others() {
		others = append(others, tenant{
			Name: who(h.Namespace, h.Pod, h.Container), Holds: h.holds(g), Age: since(h.Since, now), Waits: h.Waits,
			Beside: brief.List(h.Beside, mostBeside), Kept: h.kept(), Yields: h.yields(now), Parked: h.parked(now), Memory: take(h.Namespace, h.Pod, h.Container),
		})
	}
	for _, c := range containers {
		others = append(others, tenant{Name: who(c.Namespace, c.Pod, c.Container), Memory: c.memory(most)})
	}
	return devices, others
}

// memory is a container's use of GPU memory, in words and as a gauge.
type memory struct {
	Text  string
	Tone  string // "held" or "over"; empty if there is no gauge
	Width int    // of the gauge, in thousandths
	More  string
}

// memory describes the container's memory. most is how many MiB it can use if it has
// no cap; nil if that is unknown.
func (c *Container) memory(most *uint64) *memory {
	m := &memory{Text: "use not known"}
	if c.CapMiB != nil {
		most = c.CapMiB
	}
	var more []string
	switch {
	case c.UsedMiB == nil && c.CapMiB != nil:
		m.Text = "cap " + gib(c.CapMiB) + " GiB"
		more = append(more, "use not known")
	case c.UsedMiB == nil:
	case most == nil:
		m.Text = gib(c.UsedMiB) + " GiB"
	default:
		m.Text, m.Tone = gib(c.UsedMiB)+" of "+gib(most)+" GiB", "held"
		if c.over() {
			m.Tone = "over"
		}
		m.Width = share(int(min(*c.UsedMiB, 1<<40)), int(min(*most, 1<<40)), 1000)
	}
	if c.PeakMiB > 0 {
		more = append(more, "peak "+gib(&c.PeakMiB)+" GiB")
	}
	if c.Refusals > 0 {
		more = append(more, c.refused()+" refused")
	}
	if c.Uncounted > 0 {
		more = append(more, strconv.FormatUint(c.Uncounted, 10)+" not counted")
	}
	if c.CapMiB != nil && c.Guarantee != "" {
		more = append(more, "cap by "+c.Guarantee)
	}
	if c.Compute != nil {
		more = append(more, "compute: "+c.Compute.String())
	}
	m.More = strings.Join(more, ", ")
	return m
}
