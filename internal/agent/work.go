// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
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
	// mostFailures is after how many failures in a row a placement is withdrawn, and
	// failingFor for how long, unless something is made on its GPU meanwhile. A placement
	// that the driver has refused so often stays withdrawn then, too: that others can be
	// made says nothing of it.
	mostFailures = 3
	failingFor   = 10 * time.Minute
	// busySoon is how often GPUs are read while a change or a container waits for
	// processes that no allocation covers, and busyLook the same while such processes
	// merely keep instances from being given out: nothing tells when they end.
	busySoon = 2 * time.Second
	busyLook = 15 * time.Second
)

// errResetDue says that a GPU's mode is set and comes into force with a reset or a
// reboot, which somebody else has to see to.
var errResetDue = errors.New("a reset or a reboot is due")

// errPlanAgain says that a GPU has changed since the plan was made. Nothing has been
// done to it.
var errPlanAgain = errors.New("the GPU has changed since the plan")

// job is work under way.
type job struct {
	plan.Work
	// now is the step under way, for status.
	now atomic.Pointer[string]
}

// destroys reports whether work, nil for none, takes an instance away.
func destroys(w *plan.Work, s mig.Placement) bool {
	return w != nil && slices.Contains(w.Steps, mig.Step{Op: mig.Destroy, Placement: s})
}

// switches reports whether work, nil for none, changes the MIG mode.
func switches(w *plan.Work) bool {
	return w != nil && slices.ContainsFunc(w.Steps, func(s mig.Step) bool {
		return s.Op == mig.Enable || s.Op == mig.Disable
	})
}

// result is what became of a job.
type result struct {
	*job
	// mig is what is true of the GPU now, if read is nil.
	mig  gpu.MIG
	read error
	// err is why the step failed; undone is what was put back then, and stuck why
	// that was not all.
	err    error
	failed mig.Step
	undone []mig.Step
	stuck  error
}

// failure tells one failure from another, so that the same is said once: the step, the
// kind of error, and whether the GPU could be put back.
type failure struct {
	step  mig.Step
	kind  error
	stuck bool
}

func (r *result) failure() failure {
	f := failure{r.failed, gpu.ErrorKind(r.err), r.stuck != nil}
	if errors.Is(r.err, errResetDue) {
		f.kind = errResetDue
	}
	return f
}

// refused reports whether the driver has refused what an instance needs that an allocation
// waits for: to make it, or to destroy another one. The driver has answered, and what it
// said is not of itself or the whole GPU. To refuse another MIG mode is none of that, since
// a reset may be due.
func (r *result) refused() bool {
	if r.Placement == (mig.Placement{}) || r.failed.Op != mig.Create && r.failed.Op != mig.Destroy {
		return false
	}
	switch gpu.ErrorKind(r.err) {
	case gpu.ErrInUse, gpu.ErrNoRoom, gpu.ErrNotSupported, gpu.ErrNoPermission, gpu.ErrInvalid, gpu.ErrDriver:
		return true
	}
	return false // it did not answer, was lost or loaded anew, or the process ends
}

// rest is a pause after work that failed.
type rest struct {
	until time.Time
	pause wait.Backoff
	// gen is the partition that it was for: another one is tried at once.
	gen uint64
	err error
	of  failure // tells err from the one before
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

// failing is a placement that could not be made, or without one the MIG mode of a dynamic
// GPU.
type failing struct {
	n int
	// refusals are those failures that were refusals of the driver.
	refusals int
	until    time.Time
	why      status.Cause
}

// executor does on the hardware what was planned, on each GPU one job at a time, and
// remembers what came of it. A job has a goroutine of its own, which calls execute
// and what that calls; everything else is for the loop's goroutine. Use newExecutor.
type executor struct {
	driver   Driver
	observer Observer
	ledger   *ledger.Ledger
	log      *slog.Logger
	// cut is told of each step that was tried.
	cut func(gpu.UUID, mig.Step, error)
	// event sends an Event, and wake has a round come when a job has ended.
	event func(workload.Pod, agentkube.EventType, string, string)
	wake  func()
	// wasReset tells that a GPU has been reset.
	wasReset func(gpu.UUID)
	// neverReset, reclaim and idleTTL are Options.NeverReset, ReclaimForeign and IdleTTL.
	neverReset, reclaim bool
	idleTTL             time.Duration

	mu      sync.Mutex
	results []result // guarded by mu; of jobs that have ended

	// The rest belongs to the loop's goroutine.

	// jobs are under way; endedAt is when the last one of a GPU ended: what was read
	// of it before is out of date.
	jobs    map[gpu.UUID]*job
	endedAt map[gpu.UUID]time.Time
	// rests are pauses after work that failed, for an allocation's wish or, where that names
	// no allocation, for the partition; failing are the placements that could not be made.
	rests   map[plan.Want]*rest
	failing map[mig.Place]*failing
	// mine are the MIG instances that are the agent's, and idle is since when
	// nobody has those on demand.
	mine map[gpu.UUID]map[mig.Placement]bool
	idle map[mig.Place]time.Time
	// busyLook is how often GPUs are read for the sake of processes that no allocation
	// covers, 0 where there are none.
	busyLook time.Duration
}

func newExecutor(o *Options, w *Worlds, l *ledger.Ledger, cut func(gpu.UUID, mig.Step, error),
	wasReset func(gpu.UUID), wake func()) *executor {
	e := &executor{
		driver: w.Driver, observer: w.Observer, ledger: l, log: o.Log, cut: cut, wasReset: wasReset, wake: wake,
		neverReset: o.NeverReset, reclaim: o.ReclaimForeign, idleTTL: o.IdleTTL,
		event:   func(workload.Pod, agentkube.EventType, string, string) {},
		jobs:    map[gpu.UUID]*job{},
		endedAt: map[gpu.UUID]time.Time{},
		rests:   map[plan.Want]*rest{},
		failing: map[mig.Place]*failing{},
		mine:    map[gpu.UUID]map[mig.Placement]bool{},
	}
	if w.Cluster != nil {
		e.event = w.Cluster.Event
	}
	return e
}

// seen takes in a reading: an instance that is gone is forgotten.
func (e *executor) seen(inv *gpu.Inventory) {
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; d.Fault == "" && d.MIG.Capable && e.jobs[d.UUID] == nil {
			e.disown(d)
		}
	}
}

// unsettled reports whether something is being done to a GPU, or was after began: who
// read it then may have seen it in the middle of that.
func (e *executor) unsettled(u gpu.UUID, began time.Time) bool {
	return e.jobs[u] != nil || e.endedAt[u].After(began)
}

// own notes that an instance is the agent's.
func (e *executor) own(u gpu.UUID, s mig.Placement) {
	if e.mine[u] == nil {
		e.mine[u] = map[mig.Placement]bool{}
	}
	e.mine[u][s] = true
}

// disown forgets the instances of a GPU that are gone: what somebody else makes in
// their places is foreign.
func (e *executor) disown(d *gpu.Device) {
	maps.DeleteFunc(e.mine[d.UUID], func(s mig.Placement, _ bool) bool {
		return !slices.ContainsFunc(d.MIG.Instances, func(in gpu.Instance) bool {
			at, err := mig.PlacementOf(&in)
			// An empty GPU instance is what is left of a device that was in it.
			return err == nil && (at == s || in.CI < 0 && at.GPUInstance() == s.GPUInstance())
		})
	})
}

// due picks the work that is to be begun now; gen counts the partitions. Before the
// witnesses have been heard once, nothing is taken away: what this process has read
// of its predecessor's may be short of a holder.
func (e *executor) due(work []plan.Work, gen uint64, heard bool, now time.Time) []plan.Work {
	return slices.DeleteFunc(slices.Clone(work), func(w plan.Work) bool {
		if !heard && w.Takes() {
			return true
		}
		r := e.rests[plan.Want{GPU: w.GPU}]
		return w.Allocation == "" && r != nil && r.gen == gen && now.Before(r.until)
	})
}

// withdraws reports whether work takes something away that is on offer: then that
// is withdrawn first, and everybody is asked again.
func withdraws(work []plan.Work) bool {
	return slices.ContainsFunc(work, func(w plan.Work) bool { return w.Allocation == "" })
}

// ownMade makes what is to be made the agent's own. That is done and written down
// before it is made: a successor must not take it for somebody else's.
func (e *executor) ownMade(work []plan.Work) {
	for _, w := range work {
		for _, s := range w.Steps {
			if s.Op == mig.Create {
				e.own(w.GPU, s.Placement)
			}
		}
	}
}

// begin has work done beside the loop, on each GPU for itself.
func (e *executor) begin(ctx context.Context, inv *gpu.Inventory, work []plan.Work) {
	if plan := workText(inv, work); plan != "" {
		e.event(workload.Pod{}, agentkube.Normal, string(status.GPUChange), plan)
	}
	for _, w := range work {
		d := inv.ByUUID(w.GPU)
		j := &job{Work: w}
		e.jobs[w.GPU] = j
		e.log.Info("work begins", "gpu", w.GPU, "allocation", w.Allocation, "steps", w.String())
		go func() {
			r := e.execute(ctx, j, *d)
			e.mu.Lock()
			e.results = append(e.results, r)
			e.mu.Unlock()
			e.wake()
		}()
	}
}

// execute does a job's steps in order. Where one fails, what was done is undone: the
// GPU is as it was, or as near to that as the driver lets it be.
func (e *executor) execute(ctx context.Context, j *job, d gpu.Device) result {
	r := result{job: j}
	// Others may have been at the GPU since it was read, and numbers of instances
	// come back: what the plan is of is looked at once more.
	m, err := e.driver.MIG(ctx, d.UUID)
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
	for _, s := range j.Steps {
		if r.err = ctx.Err(); r.err != nil {
			return r // the process ends: its successor looks at what there is
		}
		if r.err = e.step(ctx, j, &d, at, s); r.err != nil {
			r.failed = s
			break
		}
		done = append(done, s)
	}
	if r.err != nil {
		if m, err := e.driver.MIG(ctx, d.UUID); err == nil && happened(&m, &r.failed) {
			done = append(done, r.failed)
		}
	}
	if r.err != nil && !errors.Is(r.err, errResetDue) {
		for _, s := range slices.Backward(done) {
			if ctx.Err() != nil {
				break // the process ends, as above
			}
			back := inverse(s)
			m, err := e.driver.MIG(ctx, d.UUID)
			if err == nil {
				err = e.step(ctx, j, &d, m.Instances, back)
			}
			if err != nil {
				r.stuck = errors.Join(r.stuck, err)
				continue
			}
			r.undone = append(r.undone, back)
		}
	}
	r.mig, r.read = e.driver.MIG(ctx, d.UUID)
	return r
}

// sameInstances reports whether the same instances stand.
func sameInstances(a, b []gpu.Instance) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Instance) bool {
		return x.Profile == y.Profile && x.Placement == y.Placement &&
			x.GI == y.GI && x.CI == y.CI && x.CIStart == y.CIStart
	})
}

// onItsWay reports whether a process has come onto an instance that is to go.
func onItsWay(at []gpu.Instance, steps []mig.Step) bool {
	return slices.ContainsFunc(steps, func(s mig.Step) bool {
		in := mig.Find(at, s.Placement)
		return s.Op == mig.Destroy && in != nil && in.Busy
	})
}

// happened reports whether a step that failed has had an effect all the same: it
// failed half way, or what failed was the look at what it came to.
func happened(m *gpu.MIG, s *mig.Step) bool {
	in := mig.Find(m.Instances, s.Placement)
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

func inverse(s mig.Step) mig.Step {
	s.Op = map[mig.Op]mig.Op{
		mig.Create: mig.Destroy, mig.Destroy: mig.Create,
		mig.Enable: mig.Disable, mig.Disable: mig.Enable,
	}[s.Op]
	return s
}

// step does one thing to a GPU on which at stands.
func (e *executor) step(ctx context.Context, j *job, d *gpu.Device, at []gpu.Instance, s mig.Step) error {
	began := time.Now()
	text := fmt.Sprintf("%s since %s", s.String(), began.UTC().Format(time.RFC3339))
	j.now.Store(&text)
	var err error
	switch s.Op {
	case mig.Destroy:
		in := mig.Find(at, s.Placement)
		if in == nil {
			return nil // gone already
		}
		err = e.driver.DestroyInstance(ctx, d.UUID, *in)
		if errors.Is(err, gpu.ErrNotFound) {
			err = nil
		}
	case mig.Create:
		_, err = e.driver.CreateInstance(ctx, d.UUID, s.Placement.Profile.String(),
			gpu.Placement{Start: s.Placement.Start, Size: s.Placement.Size}, s.Placement.CI)
	default:
		err = e.switchMIG(ctx, d, s.Op == mig.Enable)
	}
	profile := ""
	if s.Placement != (mig.Placement{}) {
		profile = s.Placement.Profile.String()
	}
	e.observer.MIGStep(string(s.Op), profile, time.Since(began), err)
	e.cut(d.UUID, s, err)
	if err != nil {
		return fmt.Errorf("GPU %d: %w", d.Index, err)
	}
	return nil
}

// switchMIG brings a GPU into MIG mode or out of it, with a reset of that GPU alone
// where one is due.
func (e *executor) switchMIG(ctx context.Context, d *gpu.Device, on bool) error {
	if err := e.driver.SetMIGMode(ctx, d.UUID, on); err != nil {
		return err
	}
	m, err := e.driver.MIG(ctx, d.UUID)
	if err != nil || m.Enabled == on {
		return err
	}
	if e.neverReset {
		return fmt.Errorf("%w: the mode comes into force with a reset of the GPU (nvidia-smi --gpu-reset -i %d) "+
			"or a reboot; --reset is never", errResetDue, d.Index)
	}
	if err := e.driver.Reset(ctx, d.UUID); err != nil {
		return fmt.Errorf("%w: the mode comes into force with a reset of the GPU, or a reboot: %w", errResetDue, err)
	}
	e.wasReset(d.UUID)
	if m, err = e.driver.MIG(ctx, d.UUID); err == nil && m.Enabled != on {
		err = fmt.Errorf("%w: a reset was not enough", errResetDue)
	}
	return err
}

// ended takes the results of the jobs that have ended.
func (e *executor) ended(now time.Time) []result {
	e.mu.Lock()
	results := e.results
	e.results = nil
	e.mu.Unlock()
	for i := range results {
		delete(e.jobs, results[i].GPU)
		e.endedAt[results[i].GPU] = now
	}
	return results
}

// learn takes in what a job came to: when what failed is tried again. d is the GPU as
// it is now, and gen counts the partitions.
func (e *executor) learn(r *result, d *gpu.Device, gen uint64, now time.Time) {
	if r.read == nil {
		e.disown(d)
	}
	switch {
	case r.err == nil:
		e.log.Info("work done", "gpu", r.GPU, "allocation", r.Allocation, "steps", r.String())
		delete(e.rests, plan.Want{GPU: r.GPU})
		delete(e.rests, r.Want())
		maps.DeleteFunc(e.failing, func(at mig.Place, f *failing) bool {
			made := slices.Contains(r.Steps, mig.Step{Op: mig.Create, Placement: at.Placement})
			return at.GPU == r.GPU && (made || f.refusals < mostFailures)
		})
	case errors.Is(r.err, errPlanAgain):
		e.log.Info("work is planned again", "gpu", r.GPU, "allocation", r.Allocation, "steps", r.String())
	default:
		e.failed(r, d, gen, now)
	}
}

// failed notes that a job did not come to its end.
func (e *executor) failed(r *result, d *gpu.Device, gen uint64, now time.Time) {
	refused := r.refused() // what is added to the error is of other steps
	if len(r.undone) > 0 {
		back := plan.Work{Steps: r.undone}
		r.err = fmt.Errorf("%w; put back: %s", r.err, back.String())
	}
	if r.stuck != nil {
		r.err = fmt.Errorf("%w; not put back: %w", r.err, r.stuck)
	}
	e.log.Warn("work failed", "gpu", r.GPU, "allocation", r.Allocation, "steps", r.String(), "err", r.err)
	if r.Allocation == "" {
		rest, what := orNew(e.rests, plan.Want{GPU: r.GPU}), r.failure()
		if rest.err == nil || rest.of != what {
			e.event(workload.Pod{}, agentkube.Warning, string(status.GPUChangeFailed), r.err.Error())
		}
		rest.of = what
		rest.fail(r.err, gen, workPauseMax, now)
		return
	}
	orNew(e.rests, r.Want()).fail(r.err, 0, wishPauseMax, now)
	e.ledger.SetCause(r.Allocation, status.CauseOf(r.err, status.GPUInstanceFailed))
	f := orNew(e.failing, mig.Place{GPU: r.GPU, Placement: r.Placement})
	had := f.n
	f.n++
	if refused {
		f.refusals++
	}
	f.until, f.why = now.Add(failingFor), status.Why(status.GPUInstanceFailed, "it could not be made: %v", r.err)
	message := fmt.Sprintf("%s: %s could not be made %d times and is withdrawn for %s: %v",
		d.Name(), r.Placement, f.n, failingFor, r.err)
	if r.Placement == (mig.Placement{}) { // the MIG mode of a dynamic GPU
		reason := status.GPUChangeFailed
		if errors.Is(r.err, errResetDue) {
			reason, f.n = status.ResetDue, mostFailures // once tells what stands against it
		}
		f.why = status.Why(reason, "the MIG mode of %s could not be changed: %v", d.Name(), r.err)
		message = fmt.Sprintf("%s; what needs the other mode is withdrawn for %s", f.why.Message, failingFor)
	}
	if had >= mostFailures || f.n < mostFailures {
		return
	}
	e.event(workload.Pod{}, agentkube.Warning, string(status.GPUInstanceFailed), message)
	for _, c := range e.ledger.Allocations() {
		if pod := c.Holder.Pod; c.ID == r.Allocation && pod.Name != "" {
			e.event(pod, agentkube.Warning, string(status.GPUInstanceFailed), message)
		}
	}
}

// orNew returns what a map has for a key, and puts a zero value there first where it
// has nothing.
func orNew[K comparable, V any](m map[K]*V, key K) *V {
	if m[key] == nil {
		m[key] = new(V)
	}
	return m[key]
}

// failedFor reports whether something that an allocation waits for could not be made and
// is tried again later.
func (e *executor) failedFor(allocation string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(e.rests)), func(w plan.Want) bool {
		return w.Allocation == allocation
	})
}

// failingPlacements are those that are withdrawn, with the reason.
func (e *executor) failingPlacements(now time.Time) map[mig.Place]status.Cause {
	maps.DeleteFunc(e.failing, func(_ mig.Place, f *failing) bool { return !now.Before(f.until) })
	out := map[mig.Place]status.Cause{}
	for at, f := range e.failing {
		if f.n >= mostFailures {
			out[at] = f.why
		}
	}
	return out
}

// refusedPlacements are those of failingPlacements that the driver has refused so often
// that what waits for them is to be had elsewhere.
func (e *executor) refusedPlacements(now time.Time) map[mig.Place]status.Cause {
	out := e.failingPlacements(now)
	maps.DeleteFunc(out, func(at mig.Place, _ status.Cause) bool { return e.failing[at].refusals < mostFailures })
	return out
}

// working is the work under way.
func (e *executor) working() map[gpu.UUID]*plan.Work {
	out := map[gpu.UUID]*plan.Work{}
	for u, j := range e.jobs {
		out[u] = &j.Work
	}
	return out
}

// input is what the plan must know of the work.
func (e *executor) input(allocations []ledger.Allocation, now time.Time) plan.MIGInput {
	in := plan.MIGInput{Made: e.mine, Working: e.working(), Expired: map[gpu.UUID][]mig.Placement{},
		Deferred: map[plan.Want]bool{}, Stuck: map[gpu.UUID]status.Cause{},
		NeverReset: e.neverReset, Reclaim: e.reclaim}
	for w, r := range e.rests {
		switch {
		case w.Allocation == "":
		case !slices.ContainsFunc(allocations, func(c ledger.Allocation) bool { return c.ID == w.Allocation }):
			delete(e.rests, w)
		case now.Before(r.until):
			in.Deferred[w] = true
		}
	}
	for at, why := range e.failingPlacements(now) {
		if at.Placement == (mig.Placement{}) {
			in.Stuck[at.GPU] = why
		}
	}
	for at, since := range e.idle {
		if e.idleTTL > 0 && now.Sub(since) >= e.idleTTL {
			in.Expired[at.GPU] = append(in.Expired[at.GPU], at.Placement)
		}
	}
	return in
}

// planned takes in a plan: whose instances are, since when they have been idle, which
// pauses are over since their GPU is what it shall be, and how often GPUs are to be read.
func (e *executor) planned(changes *plan.Changes, now time.Time) {
	for u, placements := range changes.Made {
		for _, s := range placements {
			e.own(u, s)
		}
	}
	maps.DeleteFunc(e.rests, func(of plan.Want, _ *rest) bool {
		planned := func(w plan.Work) bool { return w.GPU == of.GPU }
		return of.Allocation == "" && e.jobs[of.GPU] == nil && !slices.ContainsFunc(changes.Work, planned)
	})
	idle := map[mig.Place]time.Time{}
	for u, v := range changes.MIG {
		for _, s := range v.Warm {
			at := mig.Place{GPU: u, Placement: s}
			if idle[at] = now; !e.idle[at].IsZero() {
				idle[at] = e.idle[at]
			}
		}
	}
	switch e.idle, e.busyLook = idle, 0; {
	case changes.Process:
		e.busyLook = busySoon
	case changes.Busy:
		e.busyLook = busyLook
	}
}

// nextWork is when work that rests, a placement that is withdrawn or an instance that
// is idle wants a round.
func (e *executor) nextWork(now time.Time) (wait time.Duration, ok bool) {
	wait = inventoryEvery
	soon := func(at time.Time) { wait, ok = min(wait, max(at.Sub(now), leastSleep)), true }
	for _, r := range e.rests {
		if now.Before(r.until) {
			soon(r.until)
		}
	}
	for _, f := range e.failing {
		soon(f.until)
	}
	for _, since := range e.idle {
		if at := since.Add(e.idleTTL); now.Before(at) { // never where it is zero
			soon(at)
		}
	}
	if e.busyLook > 0 {
		soon(now.Add(e.busyLook))
	}
	return wait, ok
}
