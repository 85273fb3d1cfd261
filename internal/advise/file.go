// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

// File returns a partition as a partition file, with comments. It parses that text again, and fails
// if the result is not the same partition.
func File(name string, best *Alternative, comments []string, on Node) (string, error) {
	var b strings.Builder
	for _, c := range comments {
		for line := range strings.SplitSeq(wrap(c, 97), "\n") {
			fmt.Fprintf(&b, "# %s\n", line)
		}
	}
	fmt.Fprintf(&b, "version: %s\npartitions:\n  %s:\n", config.Version, name)
	var done []int
	for i := range best.Wants {
		if slices.Contains(done, i) {
			continue
		}
		var at []int
		for j := i; j < len(best.Wants); j++ {
			w := best.Wants[j]
			if w.GPU = best.Wants[i].GPU; w.Equal(best.Wants[i]) {
				at, done = append(at, on.Inventory.GPUs[j].Index), append(done, j)
			}
		}
		if best.Wants[i].Mode != config.Keep {
			devices := "all"
			if len(at) < len(best.Wants) {
				devices = strings.Join(strings.Fields(fmt.Sprint(at)), ", ")
			}
			b.WriteString(entry(devices, &best.Wants[i]))
		}
	}
	text := b.String()
	f, err := config.Parse("advice", []byte(text))
	if err != nil {
		return "", fmt.Errorf("write the partition: %w", err)
	}
	want, err := f.Desire(name, on.Inventory, config.Node{Unit: on.Unit})
	if err != nil {
		return "", fmt.Errorf("write the partition: %w", err)
	}
	for i := range want.GPUs {
		if w := best.Wants[i]; !w.Equal(want.GPUs[i]) {
			return "", fmt.Errorf("write the partition: GPU %d would be %+v instead of %+v",
				on.Inventory.GPUs[i].Index, want.GPUs[i], w)
		}
	}
	return text, nil
}

// entry returns one entry of a partition.
func entry(devices string, w *config.Want) string {
	var b strings.Builder
	line := func(key, value string) { fmt.Fprintf(&b, "      %s: %s\n", key, value) }
	fmt.Fprintf(&b, "    - devices: %s\n", devices)
	line("mode", string(w.Mode))
	if w.API == ledger.DRA {
		line("api", string(w.API))
	}
	if w.Replicas > 0 {
		line("replicas", fmt.Sprint(w.Replicas))
	}
	if w.TimeSlice != "" && w.TimeSlice != gpu.TimeSliceDefault {
		line("timeSlice", string(w.TimeSlice))
	}
	if w.Compute != (compute.Sharing{}) {
		line("compute", config.ComputeText(w.Compute))
	}
	words := func(of []string) string { return strings.Join(of, ", ") }
	switch {
	case w.Mode == config.MIG && !w.OnDemand:
		var counts []string
		for _, c := range w.Geometry {
			counts = append(counts, fmt.Sprintf("%s: %d", c.Profile, c.N))
		}
		line("geometry", "{"+words(counts)+"}")
	case len(w.Profiles) > 0:
		var of []string
		for _, p := range w.Profiles {
			of = append(of, p.String())
		}
		line("profiles", "["+words(of)+"]")
	}
	return b.String()
}

// wrap breaks a text into lines.
func wrap(text string, width int) string {
	var b strings.Builder
	at := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case at == 0:
		case at+1+len(word) > width:
			b.WriteString("\n  ")
			at = 2
		default:
			b.WriteString(" ")
			at++
		}
		b.WriteString(word)
		at += len(word)
	}
	return b.String()
}

// Assumed returns sentences about what an alternative assumes of the pods and of the cluster.
func Assumed(a *Alternative, d *Demand, rules Rules) []string {
	out := []string{
		"Pods come at their recorded times, and hold what they get for as long as they did.",
		"A pod gets all that it asks for or nothing. Waiting pods are tried in the order of their arrival, " +
			"and one without room does not delay those behind it.",
	}
	switch {
	case slices.ContainsFunc(a.Wants, func(w config.Want) bool { return w.Mode == config.Dynamic }):
		out = append(out, "The cluster supports dynamic resource allocation. The scheduler knows what fits, "+
			"and packs as the agent would.")
	case rules.Placer:
		out = append(out, "Pods are placed through the placer: what does not fit waits.")
	default:
		out = append(out, fmt.Sprintf("The scheduler counts devices. A pod is refused if the scheduler counts "+
			"enough devices that do not fit together, or has not learned yet what other pods have taken, "+
			"which takes %v.", rules.Lag))
	}
	if rules.Back {
		out = append(out,
			"A refused pod comes back after 10 s, 20 s, 40 s and so on up to 10 minutes, as a Job's does.")
	} else {
		out = append(out, "A refused pod does not come back.")
	}
	const listed = 8
	for i, n := range a.Names {
		if i == listed {
			out = append(out, fmt.Sprintf("%d more kinds of requests ask for something else.", len(a.Names)-listed))
			break
		}
		out = append(out, fmt.Sprintf("Pods that asked for %s (%d) ask for %s.", n.From, n.Count, n.To))
	}
	return append(out, d.Notes...)
}

// Told returns a summary of the demand in one line.
func (d *Demand) Told() string {
	return fmt.Sprintf("%d requests from %s to %s (%s)", len(d.Requests), d.Begin.UTC().Format(time.RFC3339),
		d.End.UTC().Format(time.RFC3339), d.Span().Round(time.Second))
}
