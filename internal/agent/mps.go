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
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// mpsEvery is how often the supervisor of MPS daemons is asked what is, and mpsSayEvery how
	// often it is told what shall be, also if that is as before. mpsTimeout bounds a question.
	mpsEvery    = 250 * time.Millisecond
	mpsSayEvery = 10 * time.Second
	mpsTimeout  = 5 * time.Second
	// mpsProbe bounds a probe of a server, which takes 5 seconds if the server hangs.
	mpsProbe = 20 * time.Second
	// mpsFresh is how old a daemon's last answer may be for a container to start. The library in
	// containers has the same bound for programs.
	mpsFresh = 2 * time.Second
	// mpsPatience is how long a daemon may be silent, or the supervisor away, before devices are
	// withdrawn for it, and the compute mode closes the GPU. A busy node is late by a second or two.
	mpsPatience = 5 * time.Second
	// mpsAlone is how long no supervisor may listen before the agent itself ends what is left of
	// daemons that no GPU is to have.
	mpsAlone = 10 * time.Second
	// mpsCrowded is the number of clients of one GPU from which that is reported. A server refuses
	// more than compute.MostClients.
	mpsCrowded = 40
)

// mpsDaemons has a daemon of MPS kept for each GPU that is laid out for it, and sets the compute
// modes of these GPUs. The loop never waits for the supervisor: follow asks it beside the loop, and
// wakes the loop when a judgement has changed. Use newMPSDaemons.
type mpsDaemons struct {
	supervisor MPS // nil if there is none to ask
	driver     Setups
	log        *slog.Logger
	event      func(workload.Pod, agentkube.EventType, string, string)
	wake       func()
	began      time.Time
	// said holds a token if there is something new to tell the supervisor.
	said chan struct{}

	// modes are the compute modes that this process has set, by GPU. They belong to the loop.
	modes map[gpu.UUID]computeMode

	mu sync.Mutex // guards what follows
	// inherited are the GPUs that the last process had laid out for MPS: their daemons may serve pods.
	inherited map[gpu.UUID]bool
	// wants are the daemons' percentages, by GPU; names are the GPUs' names for people. settled is
	// false until the loop has said what it wants.
	wants   map[gpu.UUID]int
	names   map[gpu.UUID]string
	settled bool
	// serve has the GPUs whose compute mode lets a server start.
	serve map[gpu.UUID]bool
	// retiring are the daemons that are to be replaced, and why.
	retiring map[gpu.UUID]retiring
	// orphans are the GPUs whose servers without a daemon may be ended.
	orphans map[gpu.UUID]bool
	seen    sight
}

// retiring is a daemon that is to be replaced, and why.
type retiring struct {
	daemon mps.Identity
	why    string
}

// sight is what the supervisor has answered.
type sight struct {
	// at is the time of its last answer; zero before the first. err is why it did not answer the
	// last question; nil if it did.
	at  time.Time
	err error
	of  map[gpu.UUID]daemonSeen
}

// daemonSeen is a daemon with the time at which it last answered; zero if it never has.
type daemonSeen struct {
	mps.Daemon
	answered time.Time
}

func newMPSDaemons(o *Options, w *Worlds, wake func()) *mpsDaemons {
	m := &mpsDaemons{supervisor: w.MPS, driver: w.Setups, log: o.Log, wake: wake, began: time.Now(),
		event: func(workload.Pod, agentkube.EventType, string, string) {},
		said:  make(chan struct{}, 1), modes: map[gpu.UUID]computeMode{}, wants: map[gpu.UUID]int{},
		inherited: map[gpu.UUID]bool{}, names: map[gpu.UUID]string{}, serve: map[gpu.UUID]bool{}, retiring: map[gpu.UUID]retiring{}, orphans: map[gpu.UUID]bool{}}
	if w.Cluster != nil {
		m.event = w.Cluster.Event
	}
	return m
}

// underMPS reports whether the containers of a GPU with this layout are clients of MPS.
func underMPS(l plan.Layout) bool { return l.Known && l.Offers && l.Compute.MPS }

// restore notes that the last process may have set compute modes: of the GPUs that it had laid out
// for MPS.
func (m *mpsDaemons) restore(layouts map[gpu.UUID]plan.Layout) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for u, l := range layouts {
		if underMPS(l) {
			m.modes[u], m.inherited[u] = computeMode{}, true
		}
	}
}

// want has the supervisor told which daemons there shall be, by the layouts of the GPUs.
func (m *mpsDaemons) want(inv *gpu.Inventory, layouts map[gpu.UUID]plan.Layout) {
	wants, names := map[gpu.UUID]int{}, map[gpu.UUID]string{}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if l := layouts[d.UUID]; underMPS(l) {
			wants[d.UUID], names[d.UUID] = l.Compute.Largest(l.Parts()).Ceiling, d.Name()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.settled && maps.Equal(wants, m.wants) {
		return
	}
	m.wants, m.names, m.settled = wants, names, true
	forget(m.retiring, wants)
	forget(m.orphans, wants)
	forget(m.inherited, wants)
	poke(m.said)
}

// forget drops the GPUs that are not wanted.
func forget[V any](of map[gpu.UUID]V, wants map[gpu.UUID]int) {
	maps.DeleteFunc(of, func(u gpu.UUID, _ V) bool { return wants[u] == 0 })
}

// trouble returns why a daemon and its server cannot be relied on now; zero if they can, or if the
// GPU has none. soft is true while that may be a delay of a busy node.
func (m *mpsDaemons) trouble(u gpu.UUID) (why status.Cause, soft bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.troubleLocked(u, time.Now())
}

func (m *mpsDaemons) troubleLocked(u gpu.UUID, now time.Time) (why status.Cause, soft bool) {
	if why, soft = m.daemonTroubleLocked(u, now); why != (status.Cause{}) {
		return why, soft
	}
	if d, wanted := m.seen.of[u], m.wants[u] != 0; wanted && !d.Serving {
		text := "the MPS server is started when the GPU's compute mode is set"
		if d.Problem != nil {
			text = d.Problem.Text
		}
		return status.Why(status.MPSNotReady, "%s: MPS daemon: %s: %s", m.names[u], mps.NoServer, text), false
	}
	return why, false
}

// daemonTrouble is trouble for the daemon alone.
func (m *mpsDaemons) daemonTrouble(u gpu.UUID) (why status.Cause, soft bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.daemonTroubleLocked(u, time.Now())
}

func (m *mpsDaemons) daemonTroubleLocked(u gpu.UUID, now time.Time) (why status.Cause, soft bool) {
	percent, wanted := m.wants[u]
	if !wanted {
		return why, false
	}
	s := &m.seen
	old := func(at time.Time) bool { return now.Sub(at) >= mpsPatience }
	// Of a GPU that is new to MPS no daemon can be late: its devices are offered once its server stands.
	first := m.inherited[u] && !old(m.began)
	if m.supervisor == nil {
		return status.Why(status.MPSNoSupervisor, "%s: no MPS daemons are kept on this node", m.names[u]), false
	}
	if s.at.IsZero() || now.Sub(s.at) > mpsFresh {
		late := first
		if !s.at.IsZero() {
			late = !old(s.at)
		}
		if s.err == nil {
			return status.Why(status.MPSNotReady, "%s: the supervisor of the MPS daemons has not been asked yet", m.names[u]), late
		}
		return status.Why(status.MPSNoSupervisor, "%s: %v; the pods of the DaemonSet gpu-agent-mps are to keep MPS daemons",
			m.names[u], s.err), late
	}
	d, has := s.of[u]
	notYet := func(code mps.Code, text string) status.Cause {
		reason := status.MPSNotReady
		if code == mps.NoMultiUser {
			reason = status.MPSNoMultiUser
		}
		return status.Why(reason, "%s: MPS daemon: %s: %s", m.names[u], code, text)
	}
	switch r := m.retiring[u]; {
	case !has:
		return notYet(mps.Starting, "the supervisor has not begun to keep it"), first
	case r.daemon != (mps.Identity{}) && r.daemon == d.Identity():
		return status.Why(status.MPSFault, "%s: %s; new pods wait until its %d clients have ended and the MPS server "+
			"is started anew", m.names[u], r.why, d.Clients()), false
	case d.Problem != nil && d.Problem.Code == mps.Silent:
		return notYet(d.Problem.Code, d.Problem.Text), !old(d.answered)
	case d.Problem != nil && d.Problem.Code != mps.NoServer:
		return notYet(d.Problem.Code, d.Problem.Text), false
	case !d.Open:
		return notYet(mps.Starting, "it does not take clients yet"), false
	case math.Abs(d.Percent-float64(percent)) > 0.05:
		return notYet(mps.Starting, fmt.Sprintf("its percentage is %.1f, and is to be %d", d.Percent, percent)), false
	case now.Sub(d.answered) > mpsFresh:
		return notYet(mps.Silent, fmt.Sprintf("it last answered %v ago", now.Sub(d.answered).Round(time.Second))),
			!old(d.answered)
	}
	return why, false
}

// gate returns why no container may start with a share of a GPU under MPS; zero if one may. known is
// false until it is known how the daemon is: then the CDI files of the last process are to stay.
func (m *mpsDaemons) gate(u gpu.UUID) (why status.Cause, known bool) {
	why, soft := m.daemonTrouble(u)
	mode := m.modes[u]
	switch {
	case why != (status.Cause{}):
		return why, !soft || mode.is != gpu.ComputeUnknown
	case m.driver != nil && mode.is != gpu.ComputeExclusiveProcess && m.serverDue(u):
		return status.Why(status.ComputeModeFailed, "the GPU's compute mode is not EXCLUSIVE_PROCESS yet"), true
	}
	why, _ = m.trouble(u)
	return why, true
}

// closed returns the GPUs whose devices are withdrawn because of their daemons.
func (m *mpsDaemons) closed() map[gpu.UUID]status.Cause {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[gpu.UUID]status.Cause{}
	for u := range m.wants {
		if why, soft := m.troubleLocked(u, time.Now()); why != (status.Cause{}) && !soft {
			out[u] = why
		}
	}
	return out
}

// conditions returns what is wrong with daemons, and the GPUs that have nearly as many clients as a
// server takes.
func (m *mpsDaemons) conditions() (deciding, others []status.Condition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range sortedKeys(m.wants) {
		why, soft := m.troubleLocked(u, time.Now())
		switch {
		case why == (status.Cause{}) || soft:
		case why.Reason == status.MPSFault:
			deciding = append(deciding, why.Condition(status.Pending, string(u)))
		case why.Reason == status.MPSNoMultiUser:
			deciding = append(deciding, why.Condition(status.Refused, string(u)))
		default:
			deciding = append(deciding, why.Condition(status.Failed, string(u)))
		}
		d := m.seen.of[u]
		if n := d.Clients(); n >= mpsCrowded {
			others = append(others, status.Why(status.MPSCrowded,
				"%s: %d processes are clients of its MPS server, which refuses more than %d", m.names[u], n, compute.MostClients).
				Condition(status.Noted, string(u)))
		}
	}
	return deciding, others
}

// latest returns the daemons as they were last seen, by GPU, with what keeps each from being relied
// on.
func (m *mpsDaemons) latest() map[gpu.UUID]guard.Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[gpu.UUID]guard.Daemon{}
	for u := range m.wants {
		out[u] = m.daemonLocked(u)
	}
	return out
}

// daemon is latest for one GPU. ok is false if it is not under MPS.
func (m *mpsDaemons) daemon(u gpu.UUID) (d guard.Daemon, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok = m.wants[u]; ok {
		d = m.daemonLocked(u)
	}
	return d, ok
}

func (m *mpsDaemons) daemonLocked(u gpu.UUID) guard.Daemon {
	why, _ := m.troubleLocked(u, time.Now())
	seen := m.seen.of[u]
	d := guard.Daemon{Percent: m.wants[u], Trouble: why.Message, At: seen.answered, PID: seen.PID, Clients: map[int]bool{}}
	for _, s := range seen.Servers {
		d.Servers = append(d.Servers, s.PID)
		for _, pid := range s.Clients {
			d.Clients[pid] = true
		}
	}
	return d
}

// Shares implements guard.Shares for an agent with a supervisor.
type Shares struct{ *Agent }

// Daemon returns the daemon of a GPU as it was last seen.
func (s Shares) Daemon(u gpu.UUID) (d guard.Daemon, ok bool) { return s.mps.daemon(u) }

// Daemons returns the daemons as they were last seen.
func (s Shares) Daemons() map[gpu.UUID]guard.Daemon { return s.mps.latest() }

// Detach is as in guard.Shares.
func (s Shares) Detach(ctx context.Context, u gpu.UUID, clients []int) (detached, timedOut int, err error) {
	done, err := s.mps.supervisor.Detach(ctx, mps.Detach{GPU: u, Clients: clients})
	for _, c := range done {
		switch c.Outcome {
		case mps.Gone:
			detached++
		case mps.Listed, mps.Unanswered:
			timedOut++
		case mps.NoClient: // it has ended by itself, or another call has detached it
		}
	}
	return detached, timedOut, err
}

// Refresh has the supervisor told again what shall be: it then asks the daemons at once.
func (s Shares) Refresh() { poke(s.mps.said) }

// Suspect has a GPU's server probed, and replaced if a program of the node's own hangs in it, too.
func (s Shares) Suspect(u gpu.UUID, why string) { go s.mps.probe(u, why) }

// probe probes a server. If that cannot be done, a server that does not say that it is active is replaced
// all the same.
func (m *mpsDaemons) probe(u gpu.UUID, why string) {
	ctx, cancel := context.WithTimeout(context.Background(), mpsProbe)
	defer cancel()
	m.mu.Lock()
	before := m.seen.of[u]
	m.mu.Unlock()
	outcome, err := m.supervisor.Probe(ctx, u)
	if err != nil {
		m.log.Warn("cannot find out whether an MPS server serves", "gpu", u, "why", why, "err", err)
	}
	m.mu.Lock()
	d := m.seen.of[u]
	_, wanted := m.wants[u]
	active := slices.ContainsFunc(d.Servers, func(s mps.Server) bool { return s.Status == mps.Active })
	if wanted && d.Identity() == before.Identity() && (outcome == mps.Hangs || err != nil && !active) {
		m.faultLocked(u, why)
	}
	m.mu.Unlock()
}

// Now returns the time since boot.
func (s Shares) Now() time.Duration { return s.mps.supervisor.Now() }

// ours reports whether a process is one of the daemons that the supervisor keeps, or of their servers.
func (m *mpsDaemons) ours() func(pid int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	pids := map[int]bool{}
	for _, d := range m.seen.of {
		pids[d.PID] = true
		for _, s := range d.Servers {
			pids[s.PID] = true
		}
	}
	return func(pid int) bool { return pids[pid] }
}

// fault reports that a program has had a fatal fault on a GPU, or that its server does not answer.
// If the GPU is under MPS, its daemon takes no new clients and is replaced when the last one
// has ended. It reports whether the GPU is under MPS. Any goroutine may call it.
func (m *mpsDaemons) fault(u gpu.UUID, why string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, wanted := m.wants[u]; !wanted {
		return false
	}
	m.faultLocked(u, why)
	return true
}

func (m *mpsDaemons) faultLocked(u gpu.UUID, why string) {
	d := m.seen.of[u]
	if d.PID == 0 || m.retiring[u].daemon == d.Identity() {
		return // without a daemon there is none to replace
	}
	m.retiring[u] = retiring{d.Identity(), why}
	m.log.Warn("the MPS server of a GPU is drained, and then started anew", "gpu", u, "why", why, "clients", d.Clients())
	m.event(workload.Pod{}, agentkube.Warning, string(status.MPSFault), brief.Cut(fmt.Sprintf(
		"%s: %s; under MPS that is the fault of all its %d clients: new pods wait until these have ended and the MPS server "+
			"is started anew", m.names[u], why, d.Clients()), brief.Message))
	poke(m.said)
	m.wake()
}

// follow asks the supervisor as long as a GPU is under MPS, or something is left of one that was.
func (m *mpsDaemons) follow(ctx context.Context) error {
	if m.supervisor == nil {
		return nil
	}
	var told time.Time    // when the supervisor was last told what shall be; zero if that has changed since
	var missing time.Time // since when no supervisor listens; zero if one does
	judged := m.judgements()
	for {
		rest := m.due(told)
		var timer <-chan time.Time
		if rest > 0 {
			timer = time.After(rest)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.said:
			told = time.Time{}
		case <-timer:
		}
		err := m.turn(ctx, time.Since(told) >= mpsSayEvery, &told)
		switch {
		case !errors.Is(err, gpu.ErrNotFound):
			missing = time.Time{}
		case missing.IsZero():
			missing = time.Now()
		case time.Since(missing) >= mpsAlone && !m.any():
			if err := m.supervisor.End(ctx); err != nil {
				m.log.Warn("cannot end what is left of MPS daemons", "err", err)
			} else {
				told = time.Now()
			}
			missing = time.Time{}
		}
		if now := m.judgements(); !maps.Equal(judged, now) {
			judged = now
			m.wake()
		}
	}
}

// any reports whether a GPU is under MPS.
func (m *mpsDaemons) any() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.settled || len(m.wants) > 0
}

// due returns the time until the next question; 0 if there is none to ask before there is news.
func (m *mpsDaemons) due(told time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case !m.settled:
		return 0
	case len(m.wants) > 0:
		return mpsEvery
	case told.IsZero() && m.supervisor.Left():
		return mpsPatience
	}
	return 0
}

// turn asks the supervisor once. It tells it what shall be if say is true, and notes that in told.
func (m *mpsDaemons) turn(ctx context.Context, say bool, told *time.Time) error {
	m.mu.Lock()
	settled, empty := m.settled, len(m.wants) == 0
	m.mu.Unlock()
	if !settled || empty && !m.supervisor.Left() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	// What is comes first: a daemon that a former process of the agent has had replaced is not
	// wanted again before that is known.
	state, err := m.supervisor.State(ctx)
	m.note(ctx, state, err)
	if err != nil || !say {
		return err
	}
	if state, err = m.supervisor.Sync(ctx, m.whole()); err == nil {
		*told = time.Now()
	}
	m.note(ctx, state, err)
	return err
}

// whole returns all that shall be.
func (m *mpsDaemons) whole() []mps.Want {
	m.mu.Lock()
	defer m.mu.Unlock()
	wants := []mps.Want{}
	for _, u := range sortedKeys(m.wants) {
		wants = append(wants, mps.Want{GPU: u, Percent: m.wants[u], Serve: m.serve[u], Retire: m.retiring[u].daemon,
			EndOrphans: m.orphans[u]})
	}
	return wants
}

// note takes in an answer.
func (m *mpsDaemons) note(ctx context.Context, state mps.State, err error) {
	now := time.Now()
	idle := m.idleOrphans(ctx, state)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.seen.err = err; err != nil {
		return
	}
	m.seen.at, m.seen.of = now, map[gpu.UUID]daemonSeen{}
	clock := m.supervisor.Now()
	for _, d := range state.Daemons {
		seen := daemonSeen{Daemon: d}
		if d.Answered > 0 {
			seen.answered = now.Add(min(0, d.Answered-clock))
		}
		m.seen.of[d.GPU] = seen
	}
	for u := range m.wants {
		d := m.seen.of[u]
		switch r := m.retiring[u]; {
		case d.Problem != nil && d.Problem.Code == mps.Retiring && d.PID != 0 && r.daemon != d.Identity():
			m.retiring[u] = retiring{d.Identity(), "the former agent has had its MPS daemon replaced"}
		case r.daemon != (mps.Identity{}) && d.PID != 0 && r.daemon != d.Identity():
			m.log.Info("the MPS server of a GPU is started anew", "gpu", u)
			delete(m.retiring, u)
			poke(m.said)
		}
		if slices.ContainsFunc(d.Servers, func(s mps.Server) bool { return s.Status == mps.Fault }) {
			m.faultLocked(u, "a program has had a fatal fault")
		}
		if m.orphans[u] != idle[u] {
			m.orphans[u] = idle[u]
			poke(m.said)
		}
	}
}

// idleOrphans returns the GPUs whose servers have no clients although no daemon tells that: the driver
// lists no other process.
func (m *mpsDaemons) idleOrphans(ctx context.Context, state mps.State) map[gpu.UUID]bool {
	out := map[gpu.UUID]bool{}
	for i := range state.Daemons {
		d := &state.Daemons[i]
		switch {
		case m.driver == nil || d.Problem == nil:
			continue
		case d.Problem.Code != mps.Orphans && d.Problem.Code != mps.Unreachable && d.Problem.Code != mps.Retiring:
			continue
		}
		s, err := m.driver.Setup(ctx, d.GPU)
		out[d.GPU] = err == nil && !slices.ContainsFunc(s.Processes, func(c gpu.Client) bool {
			return !slices.ContainsFunc(d.Servers, func(s mps.Server) bool { return s.PID == c.PID })
		})
	}
	return out
}

// judgement is what the loop has to know of a daemon.
type judgement struct {
	reason  status.Reason
	soft    bool
	crowded bool
	// daemon is true if the daemon is right, and due if a server may start: the compute mode follows
	// from both.
	daemon, due bool
}

func (m *mpsDaemons) judgements() map[gpu.UUID]judgement {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[gpu.UUID]judgement{}
	for u := range m.wants {
		why, soft := m.troubleLocked(u, time.Now())
		d := m.seen.of[u]
		daemon, _ := m.daemonTroubleLocked(u, time.Now())
		out[u] = judgement{why.Reason, soft, d.Clients() >= mpsCrowded, daemon == (status.Cause{}), m.serverDueLocked(u)}
	}
	return out
}
