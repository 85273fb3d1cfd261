// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

const (
	// workPauseMax bounds the pause after work that failed: it begins with
	// backOffMin and doubles.
	workPauseMax = 5 * time.Minute
	// wishPauseMax is the same for an instance that a container waits for: some
	// tries for each of the kubelet's, which comes back after half a minute.
	wishPauseMax = 10 * time.Second
	// mostFailures is after how many failures in a row a slot is withdrawn, and
	// failingFor for how long, unless something is made on its GPU meanwhile.
	mostFailures = 3
	failingFor   = 10 * time.Minute
	// busySoon is how often GPUs are read while a change or a container waits for
	// processes that no claim covers, and busyLook the same while such processes
	// merely keep instances from being given out: nothing tells when they end.
	busySoon = 2 * time.Second
	busyLook = 15 * time.Second
)

// Reasons of Events that speak of work on the hardware.
const (
	changeReason = "GPUChange"
	failedReason = "GPUChangeFailed"
	slotReason   = "GPUInstanceFailed"
)

// errResetDue says that a GPU's mode is set and comes into force with a reset or a
// reboot, which somebody else has to see to.
var errResetDue = errors.New("a reset or a reboot is due")

// errPlanAgain says that a GPU is not any more what the plan was made for. Nothing
// has been done to it.
var errPlanAgain = errors.New("the GPU has changed since the plan")

// job is work under way.
type job struct {
	plan.Work
	// now is the step under way, for status.
	now atomic.Pointer[string]
}

// destroys reports whether the job takes an instance away.
func (j *job) destroys(s mig.Slot) bool {
	return j != nil && slices.Contains(j.Steps, mig.Step{Op: mig.Destroy, Slot: s})
}

// result is what became of a job.
type result struct {
	*job
	// mig is what is true of the GPU now, if read is nil.
	mig  gpu.MIG
	read error
	// err is the step that failed; undone is what was put back then, and stuck why
	// that was not all.
	err    error
	undone []mig.Step
	stuck  error
}

// rest is a pause after work that failed.
type rest struct {
	until time.Time
	pause wait.Backoff
	// gen is the partition that it was for: another one is tried at once.
	gen uint64
	err error
}

func (r *rest) fail(err error, gen uint64, most time.Duration, now time.Time) {
	if r.err == nil {
		r.pause = backOff(most)
	}
	r.until, r.gen, r.err = now.Add(r.pause.Step()), gen, err
}

// backOff begins with backOffMin and doubles up to most.
func backOff(most time.Duration) wait.Backoff {
	return wait.Backoff{Duration: backOffMin, Factor: 2, Cap: most, Steps: math.MaxInt}
}

// failing is a slot that could not be made.
type failing struct {
	n     int
	until time.Time
	why   string
}

// own notes that an instance is the agent's.
func (a *Agent) own(u gpu.UUID, s mig.Slot) {
	if a.mine[u] == nil {
		a.mine[u] = map[mig.Slot]bool{}
	}
	a.mine[u][s] = true
}

// disown forgets the instances of a GPU that do not stand any more: what comes to
// their places by another hand is somebody else's.
func (a *Agent) disown(d *gpu.Device) {
	maps.DeleteFunc(a.mine[d.UUID], func(s mig.Slot, _ bool) bool {
		return !slices.ContainsFunc(d.MIG.Instances, func(in gpu.Instance) bool {
			at, err := mig.SlotOf(&in)
			// An empty GPU instance is what is left of a device that was in it.
			return err == nil && (at == s || in.CI < 0 && at.GPUInstance() == s.GPUInstance())
		})
	})
}

// forget drops the pauses of GPUs that have become what they shall be.
func (a *Agent) forget(changes *plan.Changes) {
	maps.DeleteFunc(a.rests, func(u gpu.UUID, _ *rest) bool {
		return a.jobs[u] == nil && !slices.ContainsFunc(changes.Work, func(w plan.Work) bool { return w.GPU == u })
	})
}

// due picks the work that is to be begun now. Before the witnesses have been heard
// once, nothing is taken away: what this process has read of its predecessor's may
// be short of a holder.
func (a *Agent) due(work []plan.Work, now time.Time) []plan.Work {
	if a.letGo != "" || a.letting || !a.driverAnswers() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(work), func(w plan.Work) bool {
		if !a.seen.heard && w.Takes() {
			return true
		}
		r := a.rests[w.GPU]
		return w.Claim == "" && r != nil && r.gen == a.wantedGen && now.Before(r.until)
	})
}

// withdraws reports whether work takes something away that is on offer: then that
// is withdrawn first, and everybody is asked again.
func withdraws(work []plan.Work) bool {
	return slices.ContainsFunc(work, func(w plan.Work) bool { return w.Claim == "" })
}

// begin has work done beside the loop, on each GPU for itself. What is to be made is
// the agent's before it is made, and written down: a successor must not take it for
// somebody else's.
func (a *Agent) begin(ctx context.Context, work []plan.Work) {
	if plan := a.planText(work); plan != "" && a.cluster != nil {
		a.cluster.Event(kube.Regarding{}, kube.Normal, changeReason, plan)
	}
	for _, w := range work {
		d := a.inv.ByUUID(w.GPU)
		j := &job{Work: w}
		a.jobs[w.GPU] = j
		a.log.Info("work begins", "gpu", w.GPU, "claim", w.Claim, "steps", w.String())
		go func() {
			r := a.execute(ctx, j, *d)
			a.resultsMu.Lock()
			a.results = append(a.results, r)
			a.resultsMu.Unlock()
			a.wake()
		}()
	}
}

// planText is what is to be done for the partition, in words. Events are few: GPUs
// of which the same is to be said share a sentence.
func (a *Agent) planText(work []plan.Work) string {
	var gpus map[string][]string
	var texts []string
	for _, w := range work {
		d := a.inv.ByUUID(w.GPU)
		if w.Claim != "" || d == nil {
			continue
		}
		if gpus == nil {
			gpus = map[string][]string{}
		}
		text := w.String()
		if gpus[text] == nil {
			texts = append(texts, text)
		}
		gpus[text] = append(gpus[text], strconv.Itoa(d.Index))
	}
	for i, text := range texts {
		name := "GPU "
		if len(gpus[text]) > 1 {
			name = "GPUs "
		}
		texts[i] = name + strings.Join(gpus[text], ", ") + ": " + text
	}
	return strings.Join(texts, "; ")
}

// execute does a job's steps in order. Where one fails, what was done is undone: the
// GPU is as it was, or as near to that as the driver lets it be.
func (a *Agent) execute(ctx context.Context, j *job, d gpu.Device) result {
	r := result{job: j}
	// Others may have been at the GPU since it was read, and numbers of instances
	// come back: what the plan is of is looked at once more.
	m, err := a.driver.MIG(ctx, d.UUID)
	if err != nil {
		r.err = fmt.Errorf("look at %s before the change: %w", d.Name(), err)
		r.mig, r.read = m, err
		return r
	}
	at := m.Instances
	if !sameInstances(at, d.MIG.Instances) || onItsWay(at, j.Steps) {
		r.mig, r.err = m, errPlanAgain
		return r
	}
	var done []mig.Step
	var failed *mig.Step
	for _, s := range j.Steps {
		if r.err = ctx.Err(); r.err != nil {
			return r // the process ends: its successor looks at what there is
		}
		if r.err = a.step(ctx, j, &d, at, s); r.err != nil {
			failed = &s
			break
		}
		done = append(done, s)
	}
	if failed != nil {
		if m, err := a.driver.MIG(ctx, d.UUID); err == nil && happened(&m, failed) {
			done = append(done, *failed)
		}
	}
	if r.err != nil && !errors.Is(r.err, errResetDue) && ctx.Err() == nil {
		for _, s := range slices.Backward(done) {
			back := inverse(s)
			m, err := a.driver.MIG(ctx, d.UUID)
			if err == nil {
				err = a.step(ctx, j, &d, m.Instances, back)
			}
			if err != nil {
				r.stuck = errors.Join(r.stuck, err)
				continue
			}
			r.undone = append(r.undone, back)
		}
	}
	r.mig, r.read = a.driver.MIG(ctx, d.UUID)
	return r
}

// sameInstances reports whether the same instances stand.
func sameInstances(a, b []gpu.Instance) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Instance) bool {
		return x.Profile == y.Profile && x.Placement == y.Placement && x.GI == y.GI && x.CI == y.CI && x.CIStart == y.CIStart
	})
}

// onItsWay reports whether a process has come onto an instance that is to go.
func onItsWay(at []gpu.Instance, steps []mig.Step) bool {
	return slices.ContainsFunc(steps, func(s mig.Step) bool {
		in := find(at, s.Slot)
		return s.Op == mig.Destroy && in != nil && in.Busy
	})
}

// happened reports whether a step that failed has had an effect all the same: it
// failed half way, or what failed was the look at what it came to.
func happened(m *gpu.MIG, s *mig.Step) bool {
	in := find(m.Instances, s.Slot)
	switch s.Op {
	case mig.Destroy:
		return in == nil || in.CI < 0
	case mig.Create:
		return in != nil && in.CI < 0
	default:
		on := m.Enabled
		if m.Pending != nil {
			on = *m.Pending
		}
		return on == (s.Op == mig.Enable)
	}
}

// find returns the instance at a place, or nil.
func find(at []gpu.Instance, s mig.Slot) *gpu.Instance {
	for i := range at {
		if slot, err := mig.SlotOf(&at[i]); err == nil && slot == s {
			return &at[i]
		}
	}
	return nil
}

func inverse(s mig.Step) mig.Step {
	s.Op = map[mig.Op]mig.Op{mig.Create: mig.Destroy, mig.Destroy: mig.Create, mig.Enable: mig.Disable, mig.Disable: mig.Enable}[s.Op]
	return s
}

// step does one thing to a GPU on which at stands.
func (a *Agent) step(ctx context.Context, j *job, d *gpu.Device, at []gpu.Instance, s mig.Step) error {
	began := time.Now()
	text := fmt.Sprintf("%s since %s", s.String(), began.UTC().Format(time.RFC3339))
	j.now.Store(&text)
	var err error
	switch s.Op {
	case mig.Destroy:
		in := find(at, s.Slot)
		if in == nil {
			return nil // gone already
		}
		err = a.driver.DestroyInstance(ctx, d.UUID, *in)
		if errors.Is(err, gpu.ErrNotFound) {
			err = nil
		}
	case mig.Create:
		_, err = a.driver.CreateInstance(ctx, d.UUID, s.Slot.Profile.String(), gpu.Placement{Start: s.Slot.Start, Size: s.Slot.Size}, s.Slot.CI)
	default:
		err = a.switchMIG(ctx, d, s.Op == mig.Enable)
	}
	profile := ""
	if s.Slot != (mig.Slot{}) {
		profile = s.Slot.Profile.String()
	}
	a.observer.MIGStep(string(s.Op), profile, time.Since(began), err)
	if err != nil {
		return fmt.Errorf("GPU %d: %w", d.Index, err)
	}
	return nil
}

// switchMIG brings a GPU into MIG mode or out of it, with a reset of that GPU alone
// where one is due.
func (a *Agent) switchMIG(ctx context.Context, d *gpu.Device, on bool) error {
	if err := a.driver.SetMIGMode(ctx, d.UUID, on); err != nil {
		return err
	}
	m, err := a.driver.MIG(ctx, d.UUID)
	if err != nil || m.Enabled == on {
		return err
	}
	if a.opts.NeverReset {
		return fmt.Errorf("%w: the mode comes into force with a reset of the GPU (nvidia-smi --gpu-reset -i %d) or a reboot; --reset is never", errResetDue, d.Index)
	}
	if err := a.driver.Reset(ctx, d.UUID); err != nil {
		return fmt.Errorf("%w: the mode comes into force with a reset of the GPU, or a reboot: %w", errResetDue, err)
	}
	if m, err = a.driver.MIG(ctx, d.UUID); err == nil && m.Enabled != on {
		err = fmt.Errorf("%w: a reset was not enough", errResetDue)
	}
	return err
}

// takeResults takes in what jobs came to: what is true of their GPUs now, and when
// what failed is tried again.
func (a *Agent) takeResults(now time.Time) {
	a.resultsMu.Lock()
	results := a.results
	a.results = nil
	a.resultsMu.Unlock()
	for i := range results {
		r := &results[i]
		u := r.GPU
		delete(a.jobs, u)
		a.migAt[u] = now
		d := a.inv.ByUUID(u)
		if d == nil {
			continue
		}
		if r.read == nil {
			inv := *a.inv
			inv.GPUs = slices.Clone(inv.GPUs)
			a.inv = &inv
			d = a.inv.ByUUID(u)
			d.MIG = r.mig
			a.instances.Store(a.inv)
			a.setCards()
			if slices.ContainsFunc(a.health.Verdicts(), func(v health.Verdict) bool { return v.GPU == u && v.GI >= 0 }) {
				a.stale.Store(true) // what is gone is not ill any more
			}
			a.disown(d)
		} else {
			a.stale.Store(true)
		}
		if r.err == nil {
			a.log.Info("work done", "gpu", u, "claim", r.Claim, "steps", r.String())
			delete(a.rests, u)
			delete(a.failing, u)
			delete(a.wishRests, r.Want())
			continue
		}
		if errors.Is(r.err, errPlanAgain) {
			a.log.Info("work is planned again", "gpu", u, "claim", r.Claim, "steps", r.String())
			continue
		}
		a.failed(r, d, now)
	}
}

// failed notes that a job did not come to its end.
func (a *Agent) failed(r *result, d *gpu.Device, now time.Time) {
	if len(r.undone) > 0 {
		back := plan.Work{Steps: r.undone}
		r.err = fmt.Errorf("%w; put back: %s", r.err, back.String())
	}
	if r.stuck != nil {
		r.err = fmt.Errorf("%w; not put back: %w", r.err, r.stuck)
	}
	a.log.Warn("work failed", "gpu", r.GPU, "claim", r.Claim, "steps", r.String(), "err", r.err)
	if r.Claim == "" {
		if a.rests[r.GPU] == nil {
			a.rests[r.GPU] = &rest{}
		}
		again := a.rests[r.GPU].err != nil && a.rests[r.GPU].err.Error() == r.err.Error()
		a.rests[r.GPU].fail(r.err, a.wantedGen, workPauseMax, now)
		if a.cluster != nil && !again {
			a.cluster.Event(kube.Regarding{}, kube.Warning, failedReason, r.err.Error())
		}
		return
	}
	if a.wishRests[r.Want()] == nil {
		a.wishRests[r.Want()] = &rest{}
	}
	a.wishRests[r.Want()].fail(r.err, 0, wishPauseMax, now)
	a.desk.SetTrouble(r.Claim, r.err.Error())
	if a.failing[r.GPU] == nil {
		a.failing[r.GPU] = map[mig.Slot]*failing{}
	}
	f := a.failing[r.GPU][r.Slot]
	if f == nil {
		f = &failing{}
		a.failing[r.GPU][r.Slot] = f
	}
	f.n++
	f.until, f.why = now.Add(failingFor), r.err.Error()
	if f.n != mostFailures || a.cluster == nil {
		return
	}
	message := fmt.Sprintf("%s: %s could not be made %d times and is withdrawn for %s: %v", d.Name(), r.Slot, f.n, failingFor, r.err)
	a.cluster.Event(kube.Regarding{}, kube.Warning, slotReason, message)
	for _, c := range a.desk.Claims() {
		if pod := (kube.Regarding{Namespace: c.Holder.Namespace, Pod: c.Holder.Pod}); c.Key == r.Claim && pod.Pod != "" {
			if len(c.PodUIDs) > 0 {
				pod.UID = c.PodUIDs[0]
			}
			a.cluster.Event(pod, kube.Warning, slotReason, message)
		}
	}
}

// failedFor reports whether something that a claim waits for could not be made and
// is tried again later.
func (a *Agent) failedFor(claim string) bool {
	for w := range a.wishRests {
		if w.Claim == claim {
			return true
		}
	}
	return false
}

// failingSlots are those that are withdrawn, with the reason.
func (a *Agent) failingSlots(now time.Time) map[gpu.UUID]map[mig.Slot]string {
	out := map[gpu.UUID]map[mig.Slot]string{}
	for u, slots := range a.failing {
		maps.DeleteFunc(slots, func(_ mig.Slot, f *failing) bool { return !now.Before(f.until) })
		for s, f := range slots {
			if f.n < mostFailures {
				continue
			}
			if out[u] == nil {
				out[u] = map[mig.Slot]string{}
			}
			out[u][s] = "it could not be made: " + f.why
		}
	}
	return out
}

// migInput is what the plan must know.
func (a *Agent) migInput(claims []desk.Claim, now time.Time) plan.MIGInput {
	in := plan.MIGInput{Cards: a.cards, Made: a.mine, Reclaim: a.opts.ReclaimForeign, Working: map[gpu.UUID]*plan.Work{}, Expired: map[gpu.UUID][]mig.Slot{},
		Deferred: map[plan.Want]bool{}}
	for u, j := range a.jobs {
		in.Working[u] = &j.Work
	}
	for w, r := range a.wishRests {
		if !slices.ContainsFunc(claims, func(c desk.Claim) bool { return c.Key == w.Claim }) {
			delete(a.wishRests, w)
		} else if now.Before(r.until) {
			in.Deferred[w] = true
		}
	}
	if a.opts.IdleTTL > 0 {
		for u, slots := range a.idle {
			for s, since := range slots {
				if now.Sub(since) >= a.opts.IdleTTL {
					in.Expired[u] = append(in.Expired[u], s)
				}
			}
		}
	}
	return in
}

// noteIdle remembers since when instances have been idle.
func (a *Agent) noteIdle(changes *plan.Changes, now time.Time) {
	idle := map[gpu.UUID]map[mig.Slot]time.Time{}
	for u, v := range changes.MIG {
		for _, s := range v.Warm {
			since, known := a.idle[u][s]
			if !known {
				since = now
			}
			if idle[u] == nil {
				idle[u] = map[mig.Slot]time.Time{}
			}
			idle[u][s] = since
		}
	}
	a.idle = idle
}

// nextWork is when work that rests, a slot that is withdrawn or an instance that
// is idle wants a round.
func (a *Agent) nextWork(now time.Time) (wait time.Duration, ok bool) {
	wait = inventoryEvery
	soon := func(at time.Time) {
		if !at.IsZero() {
			wait, ok = min(wait, max(at.Sub(now), leastSleep)), true
		}
	}
	for _, r := range a.rests {
		if now.Before(r.until) {
			soon(r.until)
		}
	}
	for _, r := range a.wishRests {
		if now.Before(r.until) {
			soon(r.until)
		}
	}
	for _, slots := range a.failing {
		for _, f := range slots {
			soon(f.until)
		}
	}
	if a.opts.IdleTTL > 0 {
		for _, slots := range a.idle {
			for _, since := range slots {
				if at := since.Add(a.opts.IdleTTL); now.Before(at) {
					soon(at)
				}
			}
		}
	}
	if a.busyLook > 0 {
		soon(now.Add(a.busyLook))
	}
	return wait, ok
}

// resting says what failed on the hardware and is tried again later.
func (a *Agent) resting() string {
	return a.restsWhere(func(err error) bool { return !errors.Is(err, errResetDue) })
}

// resetsDue says which GPUs wait for a reset or a reboot.
func (a *Agent) resetsDue() string {
	return a.restsWhere(func(err error) bool { return errors.Is(err, errResetDue) })
}

func (a *Agent) restsWhere(is func(error) bool) string {
	var out []string
	for i := range a.inv.GPUs {
		if r := a.rests[a.inv.GPUs[i].UUID]; r != nil && r.gen == a.wantedGen && is(r.err) {
			out = append(out, r.err.Error())
		}
	}
	return strings.Join(out, "; ")
}

// working says what is being done for the partition.
func (a *Agent) working() string {
	var out []string
	for i := range a.inv.GPUs {
		d := &a.inv.GPUs[i]
		if j := a.jobs[d.UUID]; j != nil && j.Claim == "" {
			out = append(out, d.Name()+": "+j.String())
		}
	}
	return strings.Join(out, "; ")
}

// busyLookOf is how often GPUs are to be read for the sake of processes that no claim
// covers, 0 where there are none.
func busyLookOf(c *plan.Changes) time.Duration {
	switch {
	case c.Process:
		return busySoon
	case c.Busy:
		return busyLook
	default:
		return 0
	}
}

// setCards keeps what can stand on each GPU in step with what its driver says.
func (a *Agent) setCards() {
	cards := map[gpu.UUID]*mig.Card{}
	for i := range a.inv.GPUs {
		d := &a.inv.GPUs[i]
		if !d.MIG.Capable {
			continue
		}
		if old, ok := a.cards[d.UUID]; ok && sameProfiles(a.profiles[d.UUID], d.MIG.Profiles) {
			cards[d.UUID] = old
			continue
		}
		c, err := mig.NewCard(&d.MIG)
		if err != nil { // the profiles that are understood may be had
			a.log.Warn("the driver has MIG profiles that this version does not understand", "gpu", d.UUID, "err", err)
		}
		cards[d.UUID] = c
		a.profiles[d.UUID] = d.MIG.Profiles
	}
	a.cards = cards
}

func sameProfiles(a, b []gpu.Profile) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Profile) bool {
		return x.Name == y.Name && x.ID == y.ID && x.Max == y.Max && x.Slices == y.Slices && slices.Equal(x.Placements, y.Placements)
	})
}

// instancesOf finds the instances of a claim of MIG devices. ok is false where one
// of them does not stand, or is about to go: the claim's container cannot start.
func (a *Agent) instancesOf(c *desk.Claim) (out []instance, ok bool) {
	for j := range c.Grants {
		g := &c.Grants[j]
		d := a.inv.ByUUID(g.GPU)
		if d == nil || !d.MIG.Enabled {
			return nil, false
		}
		i := slices.IndexFunc(d.MIG.Instances, func(in gpu.Instance) bool {
			return in.Profile == g.Slot.Profile.String() && in.Start == g.Slot.Start && in.CIStart == g.Slot.CI && in.CI >= 0
		})
		if i < 0 {
			return nil, false
		}
		in := &d.MIG.Instances[i]
		if slot, err := mig.SlotOf(in); err != nil || a.jobs[g.GPU].destroys(slot) {
			return nil, false
		}
		out = append(out, instance{d, in})
	}
	return out, true
}

// instance is a MIG instance and the GPU that it is on.
type instance struct {
	gpu *gpu.Device
	in  *gpu.Instance
}

// gateOf names what a claim's CDI file depends on, so that it can be told when that
// has become something else.
func gateOf(instances []instance) string {
	var b strings.Builder
	for _, i := range instances {
		fmt.Fprintf(&b, "%s %d %d %s\n", i.gpu.UUID, i.in.GI, i.in.CI, i.in.UUID)
	}
	return b.String()
}
