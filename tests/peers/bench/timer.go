// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// timing is the program that times calls of CUDA (c/timing.c), here and in
// containers.
const (
	timingName = "bench-timing"
	timingPath = "/bench/timing"
)

// inProcess lets the emulated libcuda count memory by itself, so that a call of
// it takes nanoseconds and not a daemon's answer.
const inProcess = "GPU_EMULATOR_ACCOUNTING=process"

// laid are an allocation's edits as a container of this machine can have them.
func (b *bench) laid(edits specs.ContainerEdits) (specs.ContainerEdits, capsule.Image) {
	image := capsule.Image{Links: map[string]string{}}
	var mounts []*specs.Mount
	for _, m := range edits.Mounts {
		mounts = append(mounts, m)
		// As NVIDIA's hooks do inside the container.
		dir, name := filepath.Split(m.ContainerPath)
		if base, _, ok := strings.Cut(name, ".so."); ok && (base == "libcuda" || base == "libnvidia-ml") && dir == capsule.Libraries+"/" {
			image.Links[dir+base+".so.1"] = name
		}
	}
	edits.Mounts = mounts
	// A runtime has that from the node itself.
	for _, n := range edits.DeviceNodes {
		n.Type, n.Major, n.Minor = "c", 195, 255
		if i, err := strconv.ParseInt(strings.TrimPrefix(n.Path, "/dev/nvidia"), 10, 64); err == nil {
			n.Minor = i
		}
	}
	capsule.Bind(&edits, b.kit.Bin(timingName), timingPath)
	return edits, image
}

// without is an allocation's edits without what the cap has put there: the driver's
// own libraries stand at their own paths.
func without(edits specs.ContainerEdits) (specs.ContainerEdits, error) {
	real := map[string]string{}
	for _, m := range edits.Mounts {
		if m.ContainerPath == lib.RealCUDA || m.ContainerPath == lib.RealNVML {
			real[strings.TrimSuffix(filepath.Base(m.ContainerPath), "1")] = m.HostPath
		}
	}
	if len(real) != 2 {
		return edits, fmt.Errorf("an allocation's CDI file has the driver's libraries at %v, want them at %s and %s", real, lib.RealCUDA, lib.RealNVML)
	}
	var mounts []*specs.Mount
	for _, m := range edits.Mounts {
		if strings.HasPrefix(m.ContainerPath, lib.Root+"/") {
			continue
		}
		for prefix, host := range real {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), prefix) {
				copied := *m
				copied.HostPath = host
				m = &copied
			}
		}
		mounts = append(mounts, m)
	}
	edits.Mounts = mounts
	return edits, nil
}

// timer is a program that times calls in a container.
type timer struct {
	proc    *capsule.Process
	in, out *os.File
	answers *bufio.Scanner
}

func startTimer(c *capsule.Container, env ...string) (*timer, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		in.Close()
		return nil, err
	}
	defer theirOut.Close()
	t := &timer{in: in, out: out, answers: bufio.NewScanner(out)}
	t.proc, err = c.Start(capsule.Program{Args: []string{timingPath}, Env: env, Stdin: theirIn, Stdout: theirOut})
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// close ends the program, which lives as long as it can read.
func (t *timer) close() {
	t.in.Close()
	t.out.Close()
}

func (t *timer) tell(command string) error {
	_, err := t.in.WriteString(command + "\n")
	return err
}

func (t *timer) answer() (string, error) {
	if err := t.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if !t.answers.Scan() {
		return "", fmt.Errorf("it says nothing more: %w", t.answers.Err())
	}
	return t.answers.Text(), nil
}

// timers are some that do the same at the same time.
type timers []*timer

func startTimers(n int, c *capsule.Container, env ...string) (ts timers, err error) {
	for range n {
		t, err := startTimer(c, env...)
		if err != nil {
			ts.close()
			return nil, err
		}
		ts = append(ts, t)
	}
	return ts, nil
}

func (ts timers) close() {
	for _, t := range ts {
		t.close()
	}
}

// ask tells all of them something and waits for their answers.
func (ts timers) ask(command string) ([]string, error) {
	for _, t := range ts {
		if err := t.tell(command); err != nil {
			return nil, fmt.Errorf("tell a program to %s: %w", command, err)
		}
	}
	answers := make([]string, len(ts))
	for i, t := range ts {
		var err error
		if answers[i], err = t.answer(); err != nil {
			return nil, fmt.Errorf("a program that should %s: %w", command, err)
		}
	}
	return answers, nil
}

// ready is ask for what is answered by that word.
func (ts timers) ready(command string) error {
	answers, err := ts.ask(command)
	for _, a := range answers {
		if a != "ready" {
			return fmt.Errorf("a program that should %s says %q", command, a)
		}
	}
	return err
}

// cost is what a repeat costs, in nanoseconds: of the processor, and of the
// machine's time, which is that of the clock by as many processors as could work
// on it.
type cost struct{ cpu, wall float64 }

func (ts timers) measure(command string, repeats int) (cost, error) {
	answers, err := ts.ask(command)
	if err != nil {
		return cost{}, err
	}
	var sum, longest float64
	for _, a := range answers {
		var cpu, wall float64
		if _, err := fmt.Sscan(a, &cpu, &wall); err != nil {
			return cost{}, fmt.Errorf("a program that should %s says %q", command, a)
		}
		sum, longest = sum+cpu, max(longest, wall)
	}
	n := float64(len(ts) * repeats)
	return cost{sum / n, longest * float64(min(len(ts), runtime.NumCPU())) / n}, nil
}

// round is what two sides cost, one after the other.
type round struct{ bare, capped cost }

// compare has two sides do the same in turn, each first in every other round, so
// that drift meets both alike.
func compare(ctx context.Context, rounds int, bare, capped timers, command string, repeats int) (comparison, error) {
	var all comparison
	// The first round puts code and data into caches.
	for i := range rounds + 1 {
		var r round
		sides := []struct {
			timers
			*cost
		}{{bare, &r.bare}, {capped, &r.capped}}
		if i%2 == 1 {
			slices.Reverse(sides)
		}
		for _, s := range sides {
			var err error
			if *s.cost, err = s.measure(command, repeats); err != nil {
				return nil, err
			}
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if i > 0 {
			all = append(all, r)
		}
	}
	return all, nil
}

// comparison is several rounds.
type comparison []round

// quiet is the quarter of the rounds in which the machine had least else to do,
// which is seen by the bare side alone: a neighbour on the same core makes
// everything slower, and differences too.
func (c comparison) quiet(of func(cost) float64) comparison {
	sorted := slices.SortedFunc(slices.Values(c), func(a, b round) int { return cmp.Compare(of(a.bare), of(b.bare)) })
	return sorted[:(len(sorted)+3)/4]
}

// difference is by how much the capped side costs more, in the median of the
// quiet rounds, and bare what the other costs there.
func (c comparison) difference(of func(cost) float64) (more, bare float64) {
	var differences, bares []float64
	for _, r := range c.quiet(of) {
		differences, bares = append(differences, of(r.capped)-of(r.bare)), append(bares, of(r.bare))
	}
	return median(differences), median(bares)
}

// spread is what the differences of nine of ten rounds do not exceed, either way.
func (c comparison) spread(of func(cost) float64) float64 {
	var sizes []float64
	for _, r := range c {
		sizes = append(sizes, math.Abs(of(r.capped)-of(r.bare)))
	}
	slices.Sort(sizes)
	return sizes[min(len(sizes)*9/10, len(sizes)-1)]
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func byCPU(c cost) float64  { return c.cpu }
func byWall(c cost) float64 { return c.wall }
