// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// window is what the agent says to the kubelet, beside what the API server shows.
type window struct {
	*bench
	lists *lab.Recording
	node  *lab.NodeRecording
	// had is what the lists said at first.
	had   map[string]int
	began time.Time
	// taken is how many versions of the Node the scheduler had taken in, and passed how often
	// it had passed over its extender.
	taken, passed int
}

// beginWindow has a node with three GPUs on demand, whose kubelet is as users have it.
func beginWindow(t *testing.T) *bench {
	t.Helper()
	world := migWorld
	world.World += "gpus:\n"
	for index := range demandGPUs {
		world.World += fmt.Sprintf("  - {index: %d, mig: true}\n", index)
	}
	b := beginMIG(t, world, demandPartitions, placements(demandGPUs))
	b.usersStatus()
	b.offersAll(placements(demandGPUs))
	return b
}

// watchWindow begins to watch both.
func (b *bench) watchWindow() *window {
	b.Helper()
	w := &window{bench: b, lists: b.record()}
	for name := range placements(demandGPUs) {
		b.hears(w.lists, name)
	}
	w.watchNode()
	w.had, w.began = w.listed(), time.Now()
	return w
}

// watchNode begins to watch the Node alone, and the scheduler's log.
func (w *window) watchNode() {
	w.Helper()
	ctx, cancel := context.WithCancel(w.ctx)
	var err error
	w.node, err = node.RecordNode(ctx)
	w.must(err)
	log, err := node.SchedulerLog()
	w.must(err)
	w.taken, w.passed = len(log.Nodes), log.Unguarded
	w.Cleanup(func() {
		cancel()
		if err := w.node.Wait(); err != nil {
			w.Error(err)
		}
	})
}

// listed is how many healthy devices of each resource the newest lists have.
func (w *window) listed() map[string]int {
	out := map[string]int{}
	for name, devices := range w.lists.Devices() {
		out[name] = 0
		for _, health := range devices {
			if health == "Healthy" {
				out[name]++
			}
		}
	}
	return out
}

// onlyLowered checks that nobody but the kubelet has raised a count: so the scheduler was never
// told of more than the kubelet had said last.
func (w *window) onlyLowered() {
	w.Helper()
	words := w.node.Words()
	for i := 1; i < len(words); i++ {
		if words[i].By == lab.ByTheKubelet {
			continue
		}
		for name, n := range words[i].Allocatable {
			if was := words[i-1].Allocatable[name]; n > was {
				w.Errorf("at %s %s was raised from %d to %d, and not by the kubelet", words[i].At.Format("15:04:05.000"), name, was, n)
			}
		}
	}
}

// fall is a list with fewer devices of a resource than the one before, of which the API
// server said more.
type fall struct {
	at time.Time
	// toAPI and toScheduler are how long after it each said no more than the lists do;
	// toScheduler is negative where that cannot be told.
	toAPI, toScheduler time.Duration
	// back says that it ended by a list with more devices again.
	back bool
}

// falls are the lists so far that had fewer devices of a resource, and those of them that
// the API server had to hear of. It does not while the kubelet has not yet said that counts
// had risen before.
func (w *window) falls() (lists []time.Time, out []fall) {
	turns := slices.DeleteFunc(w.lists.Turns(w.began), func(t lab.Turn) bool { return t.Resource == lab.GPU })
	words, now, scheduler := w.node.Words(), maps.Clone(w.had), w.scheduler()
	type list struct {
		at       time.Time
		resource string
		was, n   int
	}
	var all []list
	for i := 0; i < len(turns); {
		l := list{turns[i].At, turns[i].Resource, now[turns[i].Resource], 0}
		for ; i < len(turns) && turns[i].Resource == l.resource && turns[i].At.Equal(l.at); i++ {
			if turns[i].From == "Healthy" {
				now[l.resource]--
			}
			if turns[i].To == "Healthy" {
				now[l.resource]++
			}
		}
		l.n = now[l.resource]
		all = append(all, l)
	}
	for i, l := range all {
		if l.n >= l.was {
			continue
		}
		lists = append(lists, l.at)
		next := all[i+1:]
		// A list may reach the agent's writer before it reaches this recording.
		early := l.at.Add(-50 * time.Millisecond)
		first := slices.IndexFunc(words, func(word lab.NodeWord) bool { return word.At.After(early) })
		if first < 0 {
			first = len(words)
		}
		shown, said := words[max(0, first-1)].Allocatable[l.resource], l.n
		for n := first; shown > said && (n < len(words) || len(next) > 0); {
			switch {
			case len(next) > 0 && next[0].resource != l.resource:
				next = next[1:]
			case len(next) > 0 && (n == len(words) || next[0].at.Before(words[n].At)):
				if said = next[0].n; shown <= said {
					took := next[0].at.Sub(l.at)
					out = append(out, fall{l.at, took, took, true})
				}
				next = next[1:]
			default:
				if shown = words[n].Allocatable[l.resource]; shown <= said {
					f := fall{l.at, max(0, words[n].At.Sub(l.at)), -1, false}
					if n > 0 && scheduler != nil {
						f.toScheduler = max(0, scheduler[n-1].Sub(l.at))
					}
					out = append(out, f)
				}
				n++
			}
		}
	}
	return lists, out
}

// scheduler is when the scheduler took in each version of the Node but the first; nil where
// its log does not tell.
func (w *window) scheduler() []time.Time {
	w.Helper()
	log, err := node.SchedulerLog()
	w.must(err)
	if times := log.Nodes[w.taken:]; len(times) == len(w.node.Words())-1 {
		return times
	}
	return nil
}

// took are the times of falls of which there is one, sorted.
func took(falls []fall, of func(fall) time.Duration) (out []time.Duration) {
	for _, f := range falls {
		if d := of(f); d >= 0 {
			out = append(out, d)
		}
	}
	slices.Sort(out)
	return out
}

func quantiles(took []time.Duration) string {
	if len(took) == 0 {
		return "none"
	}
	at := func(share float64) time.Duration {
		return took[int(share*float64(len(took)-1))].Round(time.Millisecond)
	}
	return fmt.Sprintf("p50 %v, p95 %v, at most %v", at(0.5), at(0.95), at(1))
}

func tell(falls []fall) string {
	back := 0
	for _, f := range falls {
		if f.back {
			back++
		}
	}
	return fmt.Sprintf("of %d counts that fell the API said too much for %s, and the scheduler for %s; %d had risen again first", len(falls),
		quantiles(took(falls, func(f fall) time.Duration { return f.toAPI })), quantiles(took(falls, func(f fall) time.Duration { return f.toScheduler })), back)
}

// jobs sends pods that ask for a profile each, one after every gap, and returns how many
// were refused. A refused one is not sent again: its Job would wait ever longer before.
func (b *bench) jobs(pods []lab.Pod, gap time.Duration, claims bool) (refused int) {
	b.Helper()
	b.Cleanup(func() {
		for _, pod := range pods {
			if err := node.DeleteJob(context.Background(), pod.Name); err != nil {
				b.Error(err)
			}
		}
	})
	for i := range pods {
		next := time.After(gap)
		if claims {
			byTemplate(&pods[i])
		}
		b.must(node.CreateRetried(b.ctx, pods[i], 0))
		<-next
	}
	b.must(lab.Await(b.ctx, 5*time.Minute, "every pod to have run or been refused", func(ctx context.Context) error {
		refused = 0
		for _, pod := range pods {
			s, err := node.JobState(ctx, pod.Name)
			if err != nil {
				return err
			}
			if s.Ended == "" {
				return fmt.Errorf("%s has not", pod.Name)
			}
			refused += s.FailedPods
		}
		return nil
	}))
	return refused
}

// job is a pod that ends by itself.
func (b *bench) job(n int, profile string, seconds int) lab.Pod {
	return lab.Pod{Name: fmt.Sprintf("%s-%d", b.short(), n), Containers: []lab.Container{{
		Resources: map[string]int{lab.MIG(profile): 1}, Then: fmt.Sprintf("sleep %d; exit 0\n", seconds)}}}
}

// some are so many pods that run for some seconds, always the same.
func (b *bench) some(pods int) (out []lab.Pod) {
	draw := rand.New(rand.NewPCG(17, 9))
	profiles := []string{"1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb", "2g.20gb", "3g.40gb", "3g.40gb", "7g.80gb"}
	for n := range pods {
		out = append(out, b.job(n, profiles[draw.IntN(len(profiles))], 4+draw.IntN(12)))
	}
	return out
}

// crush is 22 pods for what three GPUs can have in several turns.
func (b *bench) crush() (out []lab.Pod) {
	profiles := []string{"1g.10gb", "2g.20gb", "3g.40gb"}
	for n := range 22 {
		out = append(out, b.job(n, profiles[n%len(profiles)], 1))
	}
	return out
}

// windowArm is a way by which the scheduler hears of what can be had.
type windowArm struct {
	name string
	// env and kubelet are settings of the agent's and of the kubelet's.
	env     map[string]string
	kubelet string
	// period is how often the kubelet looks at its node.
	period time.Duration
	// patch says that the agent lowers allocatable.
	patch bool
	// extender has the scheduler ask the placer.
	extender bool
	// claims has pods ask by claims.
	claims bool
}

func windowArms() []windowArm {
	off := map[string]string{"GPU_AGENT_LOWER_ALLOCATABLE": "false"}
	return []windowArm{
		{name: "ten-seconds", env: off, period: usersUpdate},
		{name: "one-second", env: off, kubelet: "nodeStatusUpdateFrequency: 1s\nnodeStatusReportFrequency: 5m\n", period: time.Second},
		{name: "patch", period: usersUpdate, patch: true},
		{name: "extender", period: usersUpdate, patch: true, extender: true},
		{name: "claims", period: usersUpdate, patch: true, claims: true},
	}
}

// Patterns are how pods come.
const (
	atRandom  = "at random"
	everyTwo  = "one every 2 s"
	allAtOnce = "22 at once"
)

// patterns are those of an arm. Without -long it leaves out what other tests send.
func (a *windowArm) patterns() []string {
	switch {
	case *long:
		return []string{atRandom, everyTwo, allAtOnce}
	case a.extender:
		return []string{everyTwo, allAtOnce}
	default:
		return []string{everyTwo}
	}
}

// figures are what was counted while pods came in one way, in any number of runs.
type figures struct {
	pods, refused int
	// passed is how often the scheduler passed over its extender.
	passed int
	// lists are those with fewer devices, and falls what the API server had to hear of.
	lists  []time.Time
	falls  []fall
	writes map[lab.NodeWriter]int
	span   time.Duration
}

func (f *figures) add(o figures) {
	f.pods, f.refused, f.passed, f.span = f.pods+o.pods, f.refused+o.refused, f.passed+o.passed, f.span+o.span
	f.lists, f.falls = append(f.lists, o.lists...), append(f.falls, o.falls...)
	if f.writes == nil {
		f.writes = map[lab.NodeWriter]int{}
	}
	for by, n := range o.writes {
		f.writes[by] += n
	}
}

// moments is how often counts fell: the lists of an allocation's resources come together,
// and the agent gathers them for longer than this.
func (f *figures) moments() (n int) {
	const together = 5 * time.Millisecond
	first := time.Time{}
	for _, at := range f.lists {
		if at.Sub(first) > together {
			n, first = n+1, at
		}
	}
	return n
}

func (f *figures) String() string {
	return fmt.Sprintf("%d of %d pods refused, %.1f per 100; the extender passed over %d times; %s; "+
		"the Node was written %d times by the kubelet, %d by the agent to lower it, %d by others, in %.0f s in which lists fell at %d moments",
		f.refused, f.pods, 100*float64(f.refused)/float64(max(1, f.pods)), f.passed, tell(f.falls),
		f.writes[lab.ByTheKubelet], f.writes[lab.ByLowering], f.writes[lab.ByOthers], f.span.Seconds(), f.moments())
}

// schedulerAsks has the scheduler ask the placer, as the documentation says, or nobody.
func (b *bench) schedulerAsks(extender bool) {
	b.Helper()
	flags := []string{lab.SchedulerVerbose}
	if extender {
		placer, err := node.StartPlacer(b.ctx)
		b.must(err)
		b.Cleanup(func() {
			if err := placer.Stop(context.Background()); err != nil {
				b.Error(err)
			}
		})
		config, err := node.SchedulerConfig()
		b.must(err)
		flags = append(flags, "--config="+config)
	}
	restore, err := node.SetScheduler(b.ctx, flags...)
	if restore != nil {
		b.Cleanup(func() {
			if err := restore(context.Background()); err != nil {
				b.Error(err)
			}
		})
	}
	b.must(err)
}

// allFree waits until everything can be had.
func (a *windowArm) allFree(b *bench) {
	b.Helper()
	if a.claims {
		b.whole("mig-7g.80gb")
	} else {
		b.offersAll(placements(demandGPUs))
	}
}

// watched sends pods in one way.
func (a *windowArm) watched(b *bench, send func() (pods, refused int)) (f figures) {
	b.Helper()
	a.allFree(b)
	w := &window{bench: b, began: time.Now()}
	var before map[string]float64
	if a.claims {
		w.watchNode()
	} else {
		w = b.watchWindow()
		var err error
		before, err = agent.Metrics(b.ctx)
		b.must(err)
	}
	f.pods, f.refused = send()
	a.allFree(b) // the kubelet has said its last word
	f.span = time.Since(w.began)
	log, err := node.SchedulerLog()
	b.must(err)
	f.passed = log.Unguarded - w.passed
	f.writes = map[lab.NodeWriter]int{}
	for _, word := range w.node.Words()[1:] {
		f.writes[word.By]++
	}
	if a.claims {
		return f
	}
	w.onlyLowered()
	f.lists, f.falls = w.falls()
	after, err := agent.Metrics(b.ctx)
	b.must(err)
	const again = `gpu_agent_allocatable_writes_total{cause="kubelet"}`
	// One write for each time that counts fell, be it in a list or, once more, since the
	// kubelet had written back what it saw before. A few lists may have come to this recorder
	// together, and to the agent's writer apart.
	most := f.moments() + int(after[again]-before[again])
	if n := f.writes[lab.ByLowering]; n > most+most/10+1 {
		b.Errorf("the agent has lowered allocatable %d times, and counts fell %d times", n, most)
	}
	if !a.patch && f.writes[lab.ByLowering] > 0 {
		b.Errorf("allocatable was lowered %d times by somebody else than the kubelet", f.writes[lab.ByLowering])
	}
	// A kubelet writes once a period at most, and that is all it does without the patch too.
	if most = int(f.span/a.period) + 2; f.writes[lab.ByTheKubelet] > most {
		b.Errorf("the kubelet has written the Node %d times in %v, want at most %d, once every %v", f.writes[lab.ByTheKubelet], f.span, most, a.period)
	}
	return f
}

// run sends pods in each way.
func (a *windowArm) run(b *bench) map[string]figures {
	b.Helper()
	out := map[string]figures{}
	for _, pattern := range a.patterns() {
		b.sub(strings.ReplaceAll(pattern, " ", "-"), func(b *bench) {
			out[pattern] = a.watched(b, func() (pods, refused int) {
				switch pattern {
				case atRandom:
					d := b.crowd(16, crowdOptions{fails: true, byClaims: a.claims, seed: 17})
					return d.sent(), d.refused()
				case everyTwo:
					pods = count(8, 20)
					return pods, b.jobs(b.some(pods), 2*time.Second, a.claims)
				default:
					pods := b.crush()
					return len(pods), b.jobs(pods, 0, a.claims)
				}
			})
			f := out[pattern]
			b.Logf("%s, %s: %v", a.name, pattern, &f)
			if a.extender && f.refused > f.passed || a.claims && f.refused > 0 {
				b.Errorf("%d pods were refused, and the extender was passed over %d times", f.refused, f.passed)
			}
		})
	}
	return out
}

// TestWindow measures what it costs that the scheduler hears late of an allocation: how
// many pods the kubelet refuses, and how often the Node is written. It has the agent's own
// ways alone, patch and extender; -long compares them with kubelets that look
// every ten seconds and every second, and with claims, in five runs of each.
func TestWindow(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := beginWindow(t)
	for _, a := range windowArms() {
		if !*long && (!a.patch || a.claims) {
			continue
		}
		b.sub(a.name, func(b *bench) {
			if a.claims {
				b = prepareDRA(b.T)
				b.templates(demandWants()...)
				b.must(agent.Reset(b.ctx, demandClaims))
			} else if *long {
				b.redeploy(lab.DeployOptions{Partitions: demandPartitions, Env: a.env})
				b.Cleanup(func() {
					if err := node.SetKubelet(context.Background(), ""); err != nil {
						b.Error(err)
					}
				})
				b.must(node.SetKubelet(b.ctx, a.kubelet))
				b.kubeletLooks(a.period, usersReport)
			}
			b.schedulerAsks(a.extender)
			all := map[string]*figures{}
			for run := range count(1, 5) {
				b.sub(fmt.Sprint(run), func(b *bench) {
					for pattern, f := range a.run(b) {
						if all[pattern] == nil {
							all[pattern] = &figures{}
						}
						all[pattern].add(f)
					}
				})
			}
			for _, pattern := range a.patterns() {
				b.Logf("%s, %s, all runs: %v", a.name, pattern, all[pattern])
			}
		})
	}
}
