// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// What the GPUs of both sites are: an A100-80GB reports 81,920 MiB, of which some are the
// driver's own, so 79 whole units of 1 GiB can be given away.
const (
	Model       = "A100-SXM4-80GB"
	UnitsPerGPU = 79
)

// The two kinds of GPUs that both sites have: one is shared by memory, the other makes MIG
// instances on demand, of seven compute slices and eight memory slices.
var (
	Shares    = &Kind{"shares", []int{UnitsPerGPU}, UnitsPerGPU}
	Instances = &Kind{"instances", []int{7, 8}, 80}
)

// Own is how many GPUs of each kind on-prem has.
var Own = map[*Kind]int{Shares: 1, Instances: 1}

// Piece is what a Job asks for.
type Piece struct {
	Kind *Kind
	// Resource is the name without the domain, Count how many of it.
	Resource string
	Count    int
	// GiB is how much GPU memory the piece is.
	GiB int
	// Takes is what it takes of a GPU, by Kind's dimensions.
	Takes []int
	// Starts are the places in the last dimension where it may begin; none for a piece that may lie anywhere.
	Starts []int
}

func (p Piece) String() string {
	if p.Kind == Shares {
		return fmt.Sprintf("%d GiB", p.GiB)
	}
	return p.Resource[len("mig-"):]
}

// Job is one that will come.
type Job struct {
	Name string
	Piece
	Arrives, Runs time.Duration
	// Checkpoints says that it goes on where it was when it is moved, and may be.
	Checkpoints bool
}

// pieces are what Jobs ask for, instances as NVIDIA's tables of the A100-80GB have them.
var pieces = map[*Kind][]Piece{
	Shares: {
		units(10), units(20), units(30), units(40), units(60),
	},
	Instances: {
		{Instances, "mig-1g.10gb", 1, 10, []int{1, 1}, []int{6, 5, 4, 3, 2, 1, 0}},
		{Instances, "mig-2g.20gb", 1, 20, []int{2, 2}, []int{4, 2, 0}},
		{Instances, "mig-3g.40gb", 1, 40, []int{3, 4}, []int{4, 0}},
		{Instances, "mig-4g.40gb", 1, 40, []int{4, 4}, []int{0}},
	},
}

func units(n int) Piece { return Piece{Shares, "gpu-mem", n, n, []int{n}, nil} }

// Load is how much comes, and for how long.
type Load struct {
	Seed uint64
	Jobs int
	// Within is the time in which they come, and each runs between Shortest and Longest.
	Within, Shortest, Longest time.Duration
	// Checkpoint is of how many Jobs one checkpoints; none where it is zero. Such a Job runs
	// so much longer than others.
	Checkpoint int
	Longer     time.Duration
}

// Draw makes the Jobs of a load, in the order in which they come. The same load is always
// the same Jobs.
func (l Load) Draw() []Job {
	random := rand.New(rand.NewPCG(l.Seed, 0))
	between := func(low, high time.Duration) time.Duration {
		return low + time.Duration(random.Int64N(int64((high-low)/time.Second)+1))*time.Second
	}
	jobs := make([]Job, l.Jobs)
	for i := range jobs {
		kind := []*Kind{Shares, Instances}[i%2]
		jobs[i] = Job{Piece: pieces[kind][random.IntN(len(pieces[kind]))], Arrives: between(0, l.Within), Runs: between(l.Shortest, l.Longest)}
	}
	slices.SortStableFunc(jobs, func(a, b Job) int { return cmp.Compare(a.Arrives, b.Arrives) })
	for i := range jobs {
		jobs[i].Name = fmt.Sprintf("job-%02d", i+1)
		if l.Checkpoint > 0 && i%l.Checkpoint == l.Checkpoint-1 {
			jobs[i].Checkpoints = true
			jobs[i].Runs += l.Longer
		}
	}
	return jobs
}

// Full is the load by which arms are compared, and that is shown: more than on-prem can hold,
// though each Job may wait for a minute.
var Full = Load{Seed: 1, Jobs: 30, Within: 90 * time.Second, Shortest: 15 * time.Second, Longest: time.Minute, Checkpoint: 5, Longer: 90 * time.Second}

// Hours is a load like Full in which pods take no part of a Job's time that matters.
var Hours = Load{Seed: 1, Jobs: 60, Within: 8 * time.Hour, Shortest: 3 * time.Minute, Longest: 2 * time.Hour,
	Checkpoint: 5, Longer: 2 * time.Hour}

// Seeds are a load and those that only differ in their seed, n in all.
func (l Load) Seeds(n int) (all []Load) {
	for i := range n {
		next := l
		next.Seed += uint64(i)
		all = append(all, next)
	}
	return all
}

// Short are the few Jobs of the short form: on-prem is filled by the first, the third has no room
// there and checkpoints, and the last comes when there is room again.
func Short() []Job {
	s, m, p := time.Second, pieces[Shares], pieces[Instances]
	jobs := []Job{
		{Piece: m[4], Arrives: 1 * s, Runs: 45 * s},                    // 60 GiB of 79
		{Piece: p[2], Arrives: 2 * s, Runs: 45 * s},                    // 3g.40gb
		{Piece: m[3], Arrives: 4 * s, Runs: 75 * s, Checkpoints: true}, // 40 GiB: to the cloud
		{Piece: p[2], Arrives: 5 * s, Runs: 25 * s},                    // 3g.40gb beside the other
		{Piece: p[3], Arrives: 9 * s, Runs: 20 * s},                    // 4g.40gb: quota admits it, and no GPU holds it
		{Piece: m[0], Arrives: 10 * s, Runs: 20 * s},                   // 10 GiB, into what is left
		{Piece: m[1], Arrives: 14 * s, Runs: 15 * s},                   // 20 GiB: to the cloud
		{Piece: p[1], Arrives: 60 * s, Runs: 10 * s},                   // 2g.20gb, when there is room again
		{Piece: m[1], Arrives: 62 * s, Runs: 10 * s},                   // 20 GiB likewise
	}
	for i := range jobs {
		jobs[i].Name = fmt.Sprintf("job-%02d", i+1)
	}
	return jobs
}

// Demands are Jobs for Bound and Planned.
func Demands(jobs []Job) (out []Demand) {
	for i, j := range jobs {
		out = append(out, Demand{j.Kind, j.Takes, j.Arrives, j.Runs, j.GiB, j.Starts, i})
	}
	return out
}
