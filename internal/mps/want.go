// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Want is what shall be on one GPU: a daemon with this percentage.
type Want struct {
	GPU gpu.UUID `json:"gpu"`
	// Percent is the default active thread percentage, 1 to 100: the largest share of the GPU's
	// multiprocessors that a client can have.
	Percent int `json:"percent"`
	// Serve says that the GPU takes a server now: its compute mode is set. The supervisor then starts
	// one and keeps one, so that no other process is the first on the card. Without it only a
	// client's coming starts a server.
	Serve bool `json:"serve,omitempty"`
	// Retire is the daemon that is to be replaced as soon as its servers have no client: after a
	// fault, for example. Until then it takes no new clients. Zero, or a daemon that has ended, is
	// none.
	Retire Identity `json:"retire,omitzero"`
	// EndOrphans says that servers may be ended although no daemon tells their clients, so that
	// another daemon is started: those of a daemon that is dead, has lost its socket, or is to be
	// retired and does not answer. The caller has seen that they have no clients.
	EndOrphans bool `json:"endOrphans,omitempty"`
}

// Identity tells a daemon from any other: its PID and its start in clock ticks since boot.
type Identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// State is what is, at one moment.
type State struct {
	// Known is true if an agent has said what shall be since this state directory exists. Until
	// then the supervisor starts and ends nothing.
	Known bool `json:"known"`
	// Daemons has an entry for each GPU that is wanted or has a daemon, in the order of the UUIDs.
	Daemons []Daemon `json:"daemons"`
}

// Daemon is one GPU's control daemon as it was last read. PID, Start, Open, Serving, ServeAt and Problem are of the
// end of the last round; the rest may be newer while a round is made.
type Daemon struct {
	GPU gpu.UUID `json:"gpu"`
	// PID and Start identify the daemon. Start is in clock ticks since boot. Both are zero without
	// a daemon. A new pair means that the former daemon has ended, with its clients.
	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"`
	// Version is that of the daemon's program: the driver's, for example "555.58.02", or a hash of
	// the program if that does not tell. Empty without a daemon.
	Version string `json:"version,omitempty"`
	// Percent is the default active thread percentage as read back in the last round; zero if it
	// could not be read.
	Percent float64 `json:"percent,omitempty"`
	// Servers is what the daemon lists. With the problems Orphans and Unreachable, it has the servers
	// of a daemon that is dead, or has lost its socket, by PID alone.
	Servers []Server `json:"servers,omitempty"`
	// Answered is the heartbeat: when the daemon last answered a control command, as time since
	// boot (CLOCK_BOOTTIME); zero if it never has.
	Answered time.Duration `json:"answered,omitempty"`
	// Open is true if containers can reach the daemon: its socket is linked into PipeDir.
	Open bool `json:"open,omitempty"`
	// Serving is true if a server stood at the end of the last round, which takes clients as far as
	// the daemon tells. ServeAt is when the next try to start one is due, as time since boot, after a
	// try that failed; zero if none has, or a server stands.
	Serving bool          `json:"serving,omitempty"`
	ServeAt time.Duration `json:"serveAt,omitempty"`
	// Starts counts the daemons that this supervisor has started for the GPU. Detached and
	// TimedOut count clients that it has detached, and detaches without an answer in time.
	Starts   int `json:"starts,omitempty"`
	Detached int `json:"detached,omitempty"`
	TimedOut int `json:"timedOut,omitempty"`
	// Problem is why the GPU is not as wanted; nil if it is.
	Problem *Problem `json:"problem,omitempty"`
}

// Identity returns the daemon's identity; zero without a daemon.
func (d *Daemon) Identity() Identity { return Identity{d.PID, d.Start} }

// Clients returns how many clients the daemon's servers have.
func (d *Daemon) Clients() (n int) {
	for _, s := range d.Servers {
		n += len(s.Clients)
	}
	return n
}

// Err returns the daemon's problem, or nil. errors.Is tells its Code.
func (d *Daemon) Err() error {
	if d.Problem == nil {
		return nil
	}
	return d.Problem
}

// Server is one MPS server of a daemon.
type Server struct {
	PID int `json:"pid"`
	// Percent is the server's active thread percentage as read back, which new contexts get.
	Percent float64 `json:"percent,omitempty"`
	Status  Status  `json:"status,omitempty"`
	// Clients is the PIDs of the server's clients, in ascending order.
	Clients []int `json:"clients,omitempty"`
}

// stands reports whether the server is past its start.
func (s *Server) stands() bool { return s.Status != Initializing }

// Status is the daemon's own word for how a server is; empty if the daemon does not know the
// question (535).
type Status string

// Statuses.
const (
	Initializing Status = "INITIALIZING"
	Active       Status = "ACTIVE"
	// Fault: a client has had a fatal fault, and the server takes no new client until all have
	// gone.
	Fault Status = "FAULT"
)

// Detach names clients of one GPU to be detached before they are ended.
type Detach struct {
	GPU     gpu.UUID `json:"gpu"`
	Clients []int    `json:"clients"`
}

// Detached is what became of one client of a Detach.
type Detached struct {
	Client  int     `json:"client"`
	Outcome Outcome `json:"outcome"`
}

// Outcome is what became of one client that was to be detached.
type Outcome string

// Outcomes.
const (
	// Gone: the daemon answered, and has ceased to list the client.
	Gone Outcome = "gone"
	// Listed: the daemon answered, and still listed the client at the end of the deadline.
	Listed Outcome = "listed"
	// NoClient: no server of the GPU has such a client.
	NoClient Outcome = "no client"
	// Unanswered: no answer that could be read within the deadline.
	Unanswered Outcome = "unanswered"
)

// Code is the stable name of a kind of problem, and an error that errors.Is finds.
type Code string

// Codes.
const (
	NoProgram   Code = "NoProgram"   // the driver has no MPS control program
	NoMultiUser Code = "NoMultiUser" // the driver's daemon has no multi-user mode
	NotStarted  Code = "NotStarted"  // a daemon was started and does not listen
	NoServer    Code = "NoServer"    // the daemon is right, and has no server yet, or none that could start
	Starting    Code = "Starting"    // another process has started a daemon, which does not listen yet
	Foreign     Code = "Foreign"     // a process listens that is not the daemon that this package would start
	Outdated    Code = "Outdated"    // the daemon runs, and the driver's program is another version
	Orphans     Code = "Orphans"     // servers of a dead daemon live
	Unreachable Code = "Unreachable" // the daemon lives without its socket, and has servers
	Silent      Code = "Silent"      // no answer within the deadline
	Unreadable  Code = "Unreadable"  // an answer that cannot be read
	NotTaken    Code = "NotTaken"    // a value that was set was not read back
	NotEnded    Code = "NotEnded"    // the daemon, or a server, lives although it was to end
	Retiring    Code = "Retiring"    // the daemon is replaced when its last client has ended, as wanted
	Files       Code = "Files"       // the state directory cannot be written
)

func (c Code) Error() string { return string(c) }

// Problem is a failure with its code.
type Problem struct {
	Code Code `json:"code"`
	// Text is what failed and what to do, in at most brief.Text bytes.
	Text string `json:"text"`
}

func (p *Problem) Error() string { return p.Text }

// Unwrap returns the code.
func (p *Problem) Unwrap() error { return p.Code }

// mostGPUs bounds what an agent can want, and mostDetached the clients of one Detach.
const (
	mostGPUs     = 64
	mostDetached = 512
)

// uuid is a GPU's, not a MIG instance's. It names a directory, so it is checked before any use.
var uuid = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// check returns wants in the order of their GPUs, or why they are no set of wants.
func check(wants []Want) ([]Want, error) {
	if len(wants) > mostGPUs {
		return nil, fmt.Errorf("%d GPUs: want at most %d: %w", len(wants), mostGPUs, gpu.ErrInvalid)
	}
	wants = slices.SortedFunc(slices.Values(wants), func(a, b Want) int { return cmp.Compare(a.GPU, b.GPU) })
	for i, w := range wants {
		switch {
		case !uuid.MatchString(string(w.GPU)):
			return nil, fmt.Errorf("GPU %.64q: want the UUID of a GPU: %w", w.GPU, gpu.ErrInvalid)
		case w.Percent < 1 || w.Percent > 100:
			return nil, fmt.Errorf("%s: %d %%: want 1 to 100: %w", w.GPU, w.Percent, gpu.ErrInvalid)
		case w.Retire.PID < 0 || w.Retire.PID > mostPID:
			return nil, fmt.Errorf("%s: the daemon to retire has PID %d: %w", w.GPU, w.Retire.PID, gpu.ErrInvalid)
		case i > 0 && wants[i-1].GPU == w.GPU:
			return nil, fmt.Errorf("%s is there twice: %w", w.GPU, gpu.ErrInvalid)
		}
	}
	return wants, nil
}

func (d Detach) check() error {
	switch {
	case !uuid.MatchString(string(d.GPU)):
		return fmt.Errorf("GPU %.64q: want the UUID of a GPU: %w", d.GPU, gpu.ErrInvalid)
	case len(d.Clients) == 0 || len(d.Clients) > mostDetached:
		return fmt.Errorf("%s: %d clients to detach: want 1 to %d: %w",
			d.GPU, len(d.Clients), mostDetached, gpu.ErrInvalid)
	}
	for _, pid := range d.Clients {
		if pid < 1 || pid > mostPID {
			return fmt.Errorf("%s: client %d is no PID: %w", d.GPU, pid, gpu.ErrInvalid)
		}
	}
	return nil
}
