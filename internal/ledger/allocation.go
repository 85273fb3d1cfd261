// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

// FrontEnd names the protocol through which an allocation was asked for. The words
// are those of workload.API.
type FrontEnd string

// Front-ends.
const (
	// DevicePlugin is the kubelet's device-plugin API: internal/deviceplugin.
	DevicePlugin = FrontEnd(workload.DevicePlugin)
	// DRA is dynamic resource allocation: internal/dra.
	DRA = FrontEnd(workload.DRA)
)

// Errors of a ledger.
var (
	// ErrNotOpen says that an allocation's container may not be created yet. It may be
	// asked again.
	ErrNotOpen = errors.New("the allocation is not ready")
	// ErrHeld says that a piece is somebody else's.
	ErrHeld = errors.New("somebody else has it")
)

// Allocation is what was given together, and how far it is.
type Allocation struct {
	// ID names its CDI device, pages and records; its front-end chooses it.
	ID string
	// Owner may renew and release it.
	Owner FrontEnd
	// Resource is what it was asked for as, in its front-end's words.
	Resource string
	// Ref is its front-end's own word for it, which is kept in records and which nobody
	// else reads.
	Ref string
	// Epoch grows with every Take and Renew of the ledger, and where an allocation is
	// superseded or reinstated: what is said of an older one is not heard.
	Epoch uint64
	// Grants are its pieces. They are not changed but replaced.
	Grants []Grant
	Phase  Phase
	// Cause is why it is not open, by SetCause, empty where that is not known: its own
	// pod reads it.
	Cause status.Cause
	// After is who has to end before it can open, empty if nobody, for operators: a pod
	// is told by way of Holder.Told.
	After string
	// Given is when it was given or last renewed, or of one that is Adopted when the
	// ledger came to know it.
	Given time.Time
	// Adopted says that it is older than this process, and nobody knows since when.
	Adopted bool
	// Fresh says that a CDI file that stands for it may be of the holder before.
	Fresh bool
	// Opened says that it has been open since Given.
	Opened bool
	// Asked is when its container was first to start; zero where it has not been since
	// Given, or since the allocation was last open.
	Asked time.Time
	// Entered is when a container was last let in, by this holder or the one before.
	Entered time.Time
	// Twice says that the kubelet has given it to two pods, each of which it believes to
	// have it alone: then a Prepare lets one container through, and shuts it again.
	Twice bool
	// Superseded says that its name stands for something else at its front-end now, as that of
	// a claim does that was allocated anew: it is Waiting until the containers that have it
	// have ended, and then it ends. See Ledger.Supersede.
	Superseded bool
	// Holder is who has it, where that is known, and Beside the other pods that have it
	// too, as those of a claim do.
	Holder Holder
	Beside []workload.Pod
	// For is whom it was given to where that is no pod, in words for people; empty where it
	// is. What stands there has pods that may come and go.
	For string
}

// Holder is a container.
type Holder struct {
	workload.Pod
	Container string
	// Since is when the container was created, of several the first; zero where that is
	// not known.
	Since time.Time
}

// String is "namespace/pod", or says that nobody has named one.
func (h Holder) String() string {
	if h.Name == "" {
		return "a pod that the kubelet has not named yet"
	}
	return h.Pod.String()
}

// Told says who has the allocation with this ID in words for a pod of a namespace; an
// empty one is not known. The errors of a front-end end up in the status and the Events
// of the pod that asked, which its tenant reads. So a pod of another namespace is not
// named: its allocation's ID stands for it. (The Node's annotation and Events, the log
// and `gpu-agent status` are for operators, and name pods.)
func (h Holder) Told(namespace, id string) string {
	if namespace != "" && h.Namespace == namespace && h.Name != "" {
		return h.String()
	}
	return "allocation " + id
}

// Who names the pods that have it, or what it was given to where no pod is known.
func (a *Allocation) Who() string {
	if a.For != "" && len(a.Pods()) == 0 {
		return a.For
	}
	names := []string{a.Holder.String()}
	for _, p := range a.Beside {
		names = append(names, p.String())
	}
	return brief.List(names, 3)
}

// Pods are those that have it, as far as they are known.
func (a *Allocation) Pods() []workload.Pod {
	if a.Holder.Name == "" {
		return a.Beside
	}
	return append([]workload.Pod{a.Holder.Pod}, a.Beside...)
}

// Kind is what its pieces are.
func (a *Allocation) Kind() piece.Kind { return a.Grants[0].Kind() }

// IsOpen reports whether its container may be created.
func (a *Allocation) IsOpen() bool { return a.Phase == Open }

// GPUs returns the GPUs that it has something of, each once, in the order of its
// grants.
func (a *Allocation) GPUs() (out []gpu.UUID) {
	for i := range a.Grants {
		if u := a.Grants[i].GPU; !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	return out
}

// On reports whether it has something of a GPU.
func (a *Allocation) On(u gpu.UUID) bool {
	return slices.ContainsFunc(a.Grants, func(g Grant) bool { return g.GPU == u })
}

// Takes reports whether it takes something of a GPU from others.
func (a *Allocation) Takes(u gpu.UUID) bool {
	return slices.ContainsFunc(a.Grants, func(g Grant) bool { return g.GPU == u && !g.NoRoom })
}

// Cap is what its holder may have of a GPU's memory.
func (a *Allocation) Cap(u gpu.UUID) (cap piece.Cap) {
	for i := range a.Grants {
		switch g := &a.Grants[i]; {
		case g.GPU != u:
		case !g.Cap.Known:
			return piece.Cap{}
		default: // of several replicas of one GPU, which the kubelet gives though nobody asked it to, all count
			cap = piece.CapOf(cap.Bytes + min(g.Cap.Bytes, memcap.None-cap.Bytes))
		}
	}
	return cap
}

// CapsKnown reports whether a record says of each grant how much its holder may have.
func (a *Allocation) CapsKnown() bool {
	return !slices.ContainsFunc(a.Grants, func(g Grant) bool { return !g.Cap.Known })
}

// Record is what is written down of it.
func (a *Allocation) Record() Record {
	return Record{Owner: a.Owner, Resource: a.Resource, Ref: a.Ref, Grants: a.Grants}
}

// Record is what is written down of an allocation, wherever that is: its grants and
// whose they are. Beside it stands the ID.
type Record struct {
	Owner    FrontEnd `json:"frontEnd"`
	Resource string   `json:"resource"`
	Ref      string   `json:"ref,omitempty"`
	Grants   []Grant  `json:"grants"`
}

// ReadRecord reads a record. The error wraps gpu.ErrInvalid.
func ReadRecord(text string) (Record, error) {
	var r Record
	err := json.Unmarshal([]byte(text), &r)
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return Record{}, fmt.Errorf("read the record of an allocation: %w: %w", gpu.ErrInvalid, err)
	}
	return r, nil
}

// check says what no allocation can be like.
func (r *Record) check() error {
	if len(r.Grants) == 0 {
		return errors.New("nothing was granted")
	}
	for i := range r.Grants {
		if first, k := r.Grants[0].Kind(), r.Grants[i].Kind(); k != first {
			return fmt.Errorf("pieces of two kinds, %s and %s, in one allocation", first, k)
		}
	}
	return nil
}
