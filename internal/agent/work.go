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
	// workPauseMax bounds the pause after work for the partition failed. The pause begins with
	// backOffMin and doubles.
	workPauseMax = 5 * time.Minute
	// wishPauseMax is the same for an instance that a container waits for. The kubelet starts the
	// container again after half a minute, so there are some tries for each of its starts.
	wishPauseMax = 10 * time.Second
	// mostFailures is the number of failures in a row after which a placement is withdrawn, with
	// an Event.
	// failingFor is how long it stays withdrawn. It ends earlier if work on its GPU succeeds. If
	// the driver itself refused the placement that often, only making this placement ends it
	// earlier: that others can be made is no sign that it can.
	mostFailures = 3
	failingFor   = 10 * time.Minute
	// busySoon is the age at which a reading of the GPUs is renewed while a change or a container
	// waits for processes without an allocation to end. busyLook is the same while such processes
	// only keep instances from being given out. No event tells when they end.
	busySoon = 2 * time.Second
	busyLook = 15 * time.Second
)

// errResetDue means that a GPU's MIG mode is set, but comes into force only with a reset or reboot,
// which the operator has to do.
var errResetDue = errors.New("a reset or a reboot is due")

// errPlanAgain means that a GPU has changed since the plan was made. The job has not touched it.
var errPlanAgain = errors.New("the GPU has changed since the plan")

// job is work that runs now.
type job struct {
	plan.Work
	// now is the present step, for the status; nil before the first.
	now atomic.Pointer[string]
}

// destroys reports whether work destroys the instance at s. Work may be nil.
func destroys(w *plan.Work, s mig.Placement) bool {
	return w != nil && slices.Contains(w.Steps, mig.Step{Op: mig.Destroy, Placement: s})
}

// switches reports whether work changes the MIG mode. Work may be nil.
func switches(w *plan.Work) bool {
	return w != nil && slices.ContainsFunc(w.Steps, func(s mig.Step) bool {
		return s.Op == mig.Enable || s.Op == mig.Disable
	})
}

// result is the outcome of a job.
type result struct {
	*job
	// mig is the GPU's state after the job, valid if read is nil. read is why it could not be read.
	mig  gpu.MIG
	read error
	// err is why the job failed, nil if it did not, and failed is the step that failed. undone are
	// the steps that were taken to put the GPU back, and stuck is why some of these failed.
	err    error
	failed mig.Step
	undone []mig.Step
	stuck  error
}

// failure identifies a kind of failure, so that a repeated one causes no second Event: the failed
// step, the kind of error, and whether the GPU could not be put back.
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

// refused reports whether the driver refused to make the instance that an allocation waits for, or
// to destroy one that is in its way. An error that concerns the driver itself or the whole GPU is
// no refusal. Neither is a failed change of the MIG mode, since it may only wait for a reset.
func (r *result) refused() bool {
	if r.Placement == (mig.Placement{}) || r.failed.Op != mig.Create && r.failed.Op != mig.Destroy {
		return false
	}
	switch gpu.ErrorKind(r.err) {
	case gpu.ErrInUse, gpu.ErrNoRoom, gpu.ErrNotSupported, gpu.ErrNoPermission, gpu.ErrInvalid, gpu.ErrDriver:
		return true
	}
	return false // no answer, GPU lost, driver reloaded, or the process ends
}

// rest is a pause after work that failed.
type rest struct {
	until time.Time
	pause wait.Backoff
	// gen is the generation of the partition that the work was for. Another one is tried at once.
	gen uint64
	err error
	of  failure // the kind of err
}

func (r *rest) fail(err error, gen uint64, most time.Duration, now time.Time) {
	if r.err == nil {
		r.pause = backOff(most)
	}
	r.until, r.gen, r.err = now.Add(r.pause.Step()), gen, err
}

// backOff returns pauses that begin with backOffMin and double up to most.
func backOff(most time.Duration) wait.Backoff {
	return wait.Backoff{Duration: backOffMin, Factor: 2, Cap: most, Steps: math.MaxInt}
}

// failing is a placement that could not be made. A zero placement means the MIG mode of a dynamic
// GPU.
type failing struct {
	n int
	// refusals is the number of the n failures that were refusals of the driver.
	refusals int
	until    time.Time
	why      status.Cause
}

// executor does the planned work on the hardware, one job at a time on each GPU, and remembers the
// results. While a job runs, the GPU's offer stays as it was published, without the withdrawn
// devices. execute and what it calls run in the goroutine of a job; everything else belongs to the
// loop's goroutine. Use newExecutor.
type executor struct {
	driver   Driver
	observer Observer
	ledger   *ledger.Ledger
	log      *slog.Logger
	// recordStep records each step that was tried.
	recordStep func(gpu.UUID, mig.Step, error)
	// event sends an Event. wake starts a round when a job has ended.
	event func(workload.Pod, agentkube.EventType, string, string)
	wake  func()
	// wasReset is called when the executor has reset a GPU.
	wasReset func(gpu.UUID)
	// neverReset, reclaim and idleTTL are Options.NeverReset, ReclaimForeign and IdleTTL.
	neverReset, reclaim bool
	idleTTL             time.Duration

	mu      sync.Mutex
	results []result // guarded by mu; of ended jobs that the loop has not taken in

	// The rest belongs to the loop's goroutine.

	// jobs are those that run now. endedAt is when the last job of a GPU ended; earlier readings of
	// the GPU are out of date.
	jobs    map[gpu.UUID]*job
	endedAt map[gpu.UUID]time.Time
	// rests are pauses after failed work. The key names the placement of an allocation, or only the
	// GPU for the partition's work. failing are the placements that could not be made.
	rests   map[plan.Want]*rest
	failing map[mig.Place]*failing
	// mine are the agent's own MIG instances: those that it made, those that an allocation has, and
	// those that the partition's geometry keeps. idle is since when an instance on demand has had
	// no holder.
	mine map[gpu.UUID]map[mig.Placement]bool
	idle map[mig.Place]time.Time
	// busyLook is the age at which GPUs are read again because of processes without an allocation;
	// 0 if there are none.
	busyLook time.Duration
}

func newExecutor(o *Options, w *Worlds, l *ledger.Ledger, recordStep func(gpu.UUID, mig.Step, error),
	wasReset func(gpu.UUID), wake func()) *executor {
	e := &executor{
		driver: w.Driver, observer: w.Observer, ledger: l, log: o.Log, recordStep: recordStep, wasReset: wasReset, wake: wake,
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

// seen takes in a reading. It drops instances that no longer exist from mine.
func (e *executor) seen(inv *gpu.Inventory) {
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; d.Fault == "" && d.MIG.Capable && e.jobs[d.UUID] == nil {
			e.disown(d)
		}
	}
}

// unsettled reports whether a job on a GPU runs, or ended after began. A reading that began then
// may show the GPU in the middle of a change.
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

// disown drops the instances of a GPU that no longer exist from mine. What others make at the same
// placements is foreign.
func (e *executor) disown(d *gpu.Device) {
	maps.DeleteFunc(e.mine[d.UUID], func(s mig.Placement, _ bool) bool {
		return !slices.ContainsFunc(d.MIG.Instances, func(in gpu.Instance) bool {
			at, err := mig.PlacementOf(&in)
			// An empty GPU instance is what is left of a compute instance that was in it.
			return err == nil && (at == s || in.CI < 0 && at.GPUInstance() == s.GPUInstance())
		})
	})
}

// due returns the work that may begin now. gen is the generation of the partition. Before the
// witnesses have answered once, nothing is taken away: the saved state of the last process may lack
// a holder.
func (e *executor) due(work []plan.Work, gen uint64, heard bool, now time.Time) []plan.Work {
	return slices.DeleteFunc(slices.Clone(work), func(w plan.Work) bool {
		if !heard && w.Takes() {
			return true
		}
		r := e.rests[plan.Want{GPU: w.GPU}]
		return w.Allocation == "" && r != nil && r.gen == gen && now.Before(r.until)
	})
}

// withdraws reports whether work takes devices away that are on offer. Then the round first
// withdraws them and plans again. Work for the partition counts as such.
func withdraws(work []plan.Work) bool {
	return slices.ContainsFunc(work, func(w plan.Work) bool { return w.Allocation == "" })
}

// ownMade marks the instances that work will create as the agent's. The round saves this before
// they are made, or the next process could take them for foreign ones.
func (e *executor) ownMade(work []plan.Work) {
	for _, w := range work {
		for _, s := range w.Steps {
			if s.Op == mig.Create {
				e.own(w.GPU, s.Placement)
			}
		}
	}
}

// begin starts a job for each GPU, beside the loop.
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

// execute does a job's steps in order. If one fails, it undoes the earlier ones in reverse order,
// as far as the driver permits. It undoes nothing if only a reset is missing. At the end it reads
// the GPU.
func (e *executor) execute(ctx context.Context, j *job, d gpu.Device) result {
	r := result{job: j}
	// Others may have changed the GPU since it was read, and instance numbers are reused. So check
	// that the GPU is still as it was planned for.
	m, err := e.driver.MIG(ctx, d.UUID)
	if err != nil {
		r.err = fmt.Errorf("look at %s before the change: %w", d.Name(), err)
		r.mig, r.read = m, err
		return r
	}
	at := m.Instances
	if !sameInstances(at, d.MIG.Instances) || becameBusy(at, j.Steps) {
		r.mig, r.err = m, errPlanAgain
		return r
	}
	var done []mig.Step
	for _, s := range j.Steps {
		if r.err = ctx.Err(); r.err != nil {
			return r // the process ends, and the next one reads the GPU
		}
		if r.err = e.step(ctx, j, &d, at, s); r.err != nil {
			r.failed = s
			break
		}
		done = append(done, s)
	}
	if r.err != nil {
		if m, err := e.driver.MIG(ctx, d.UUID); err == nil && tookEffect(&m, &r.failed) {
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

// sameInstances reports whether two readings of a GPU have the same instances.
func sameInstances(a, b []gpu.Instance) bool {
	return slices.EqualFunc(a, b, func(x, y gpu.Instance) bool {
		return x.Profile == y.Profile && x.Placement == y.Placement &&
			x.GI == y.GI && x.CI == y.CI && x.CIStart == y.CIStart
	})
}

// becameBusy reports whether a process runs on an instance that the steps destroy.
func becameBusy(at []gpu.Instance, steps []mig.Step) bool {
	return slices.ContainsFunc(steps, func(s mig.Step) bool {
		in := mig.Find(at, s.Placement)
		return s.Op == mig.Destroy && in != nil && in.Busy
	})
}

// tookEffect reports whether a failed step has had an effect: the driver failed half way, or failed
// only to read the result.
func tookEffect(m *gpu.MIG, s *mig.Step) bool {
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

// step does one step on a GPU with the instances at. To destroy an instance that does not exist is
// no error.
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
	e.recordStep(d.UUID, s, err)
	if err != nil {
		return fmt.Errorf("GPU %d: %w", d.Index, err)
	}
	return nil
}

// switchMIG turns a GPU's MIG mode on or off, and resets that GPU if the mode needs it. The error
// wraps errResetDue if the mode is set but a reset or reboot is still needed.
func (e *executor) switchMIG(ctx context.Context, d *gpu.Device, on bool) error {
	if err := e.driver.SetMIGMode(ctx, d.UUID, on); err != nil {
		return err
	}
	m, err := e.driver.MIG(ctx, d.UUID)
	if err != nil || m.Enabled == on {
		return err
	}
	if e.neverReset {
		return fmt.Errorf("%w: the MIG mode comes into force with a reset of the GPU (nvidia-smi --gpu-reset -i %d) "+
			"or a reboot; --reset is never", errResetDue, d.Index)
	}
	if err := e.driver.Reset(ctx, d.UUID); err != nil {
		return fmt.Errorf("%w: the MIG mode comes into force with a reset of the GPU, or a reboot: %w", errResetDue, err)
	}
	e.wasReset(d.UUID)
	if m, err = e.driver.MIG(ctx, d.UUID); err == nil && m.Enabled != on {
		err = fmt.Errorf("%w: a reset was not enough", errResetDue)
	}
	return err
}

// ended returns the results of the jobs that have ended since the last call.
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

// learn takes in the result of a job, and decides when failed work is tried again. d is the present
// GPU, and gen the generation of the partition.
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

// failed notes that a job has failed.
func (e *executor) failed(r *result, d *gpu.Device, gen uint64, now time.Time) {
	refused := r.refused() // before the errors of other steps are added
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
			reason, f.n = status.ResetDue, mostFailures // a second try would tell nothing new
		}
		f.why = status.Why(reason, "the MIG mode of %s could not be changed: %v", d.Name(), r.err)
		message = fmt.Sprintf("%s; devices that need the other mode are withdrawn for %s", f.why.Message, failingFor)
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

// orNew returns the value of a key in a map. If there is none it first inserts a zero value.
func orNew[K comparable, V any](m map[K]*V, key K) *V {
	if m[key] == nil {
		m[key] = new(V)
	}
	return m[key]
}

// failedFor reports whether something that an allocation waits for could not be made, and will be
// tried again.
func (e *executor) failedFor(allocation string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(e.rests)), func(w plan.Want) bool {
		return w.Allocation == allocation
	})
}

// failingPlacements returns the placements that are withdrawn, with the reason.
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

// refusedPlacements returns the failing placements that the driver itself refused mostFailures
// times. What waits for them needs another placement or GPU.
func (e *executor) refusedPlacements(now time.Time) map[mig.Place]status.Cause {
	out := e.failingPlacements(now)
	maps.DeleteFunc(out, func(at mig.Place, _ status.Cause) bool { return e.failing[at].refusals < mostFailures })
	return out
}

// working returns the work that runs now, by GPU.
func (e *executor) working() map[gpu.UUID]*plan.Work {
	out := map[gpu.UUID]*plan.Work{}
	for u, j := range e.jobs {
		out[u] = &j.Work
	}
	return out
}

// input returns the plan's input about MIG work.
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

// planned takes in a plan: the agent's own instances, since when idle ones have been idle, and how
// often to read the GPUs. It ends the pauses of GPUs that need no work for the partition.
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

// nextWork returns how long the loop may sleep before paused work, a withdrawn placement or an idle
// instance needs a round. ok is false if none does.
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
		if at := since.Add(e.idleTTL); now.Before(at) { // never if idleTTL is zero
			soon(at)
		}
	}
	if e.busyLook > 0 {
		soon(now.Add(e.busyLook))
	}
	return wait, ok
}
