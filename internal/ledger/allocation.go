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

// FrontEnd names the protocol that an allocation was asked for through. The values are those of
// workload.API.
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
	// ErrNotOpen is the error of [Ledger.Prepare] while the container may not be created yet. The
	// caller may try again.
	ErrNotOpen = errors.New("the allocation is not ready")
	// ErrHeld is the error of a request for a piece that another holder has.
	ErrHeld = errors.New("another holder has it")
)

// Allocation is what one holder was given in one call, and how far it is.
type Allocation struct {
	// ID names the allocation's CDI device, limit pages and records. Its front-end chooses it.
	ID string
	// Owner is the front-end that took it, and the only one that may renew or release it.
	Owner FrontEnd
	Tier  Tier
	// Yield is why it gives its room back. Only a spot allocation has one.
	Yield Yield
	// Lending is true if spot allocations may have its room: it is guaranteed, and none of its processes
	// can use the GPU. Recalled is when lending last ended; zero if it never has. See Ledger.SetLending.
	Lending  bool
	Recalled time.Time
	// Parks is how often, and for how long, its container was parked. Only a spot allocation has any.
	Parks Parks
	// Resource is what was asked for, in the front-end's words: the name of an extended resource,
	// or of the DRA driver.
	Resource string
	// Ref is the front-end's own reference, which is kept in records. Only that front-end reads it.
	Ref string
	// Epoch is the ledger's counter at the last event that voids older news of the allocation:
	// Take, Renew, Supersede, Reinstate, or a Prepare that let one of two pods through (see Twice).
	// It is 0 if the ledger took the allocation over from a record.
	Epoch uint64
	// Grants are its pieces. The slice and its elements never change; the ledger replaces the
	// slice.
	Grants []Grant
	Phase  Phase
	// Cause is why its container's needs could not be met so far (see Ledger.SetCause); empty if
	// that is not known. It is for the allocation's own pod.
	Cause status.Cause
	// After names the holders that must end before it can open; empty if there are none. It is for
	// operators. A pod reads the words of Holder.Told instead.
	After string
	// Given is the time at which it was taken or last renewed. If it is Adopted, it is the time at
	// which the ledger learned of it.
	Given time.Time
	// Adopted is true if a process before this one took it, and no record tells when.
	Adopted bool
	// Fresh is true if the allocation's CDI file, where there is one, may be of the previous
	// holder.
	Fresh bool
	// Opened is true if the allocation has been open since Given.
	Opened bool
	// Asked is the time at which its container was first to start; zero if no container was to
	// start since Given, or since the allocation was last open.
	Asked time.Time
	// Entered is the time at which Prepare last let a container through, of this holder or of the
	// previous one.
	Entered time.Time
	// Back is the time at which the container that Prepare last let through was to start again: its
	// creation has failed by then, or it was created. It is zero before that. It is not set while the
	// kubelet may start a container of another pod, which says nothing of the first (see Twice).
	Back time.Time
	// Twice is true if the kubelet has given the allocation to two pods, as if each had it alone.
	// Then Prepare lets one container through, and closes the allocation again.
	Twice bool
	// Superseded is true if the allocation's name means something else at its front-end now, for
	// example after a claim was allocated anew. The allocation is Waiting until the containers that
	// have it have ended, and then it ends. See Ledger.Supersede.
	Superseded bool
	// Holder is the container that has it; zero if that is not known. Beside are the other pods
	// that have it, such as those of a shared claim.
	Holder Holder
	Beside []workload.Pod
	// For names what it was given to if that is not a pod, in words for people; otherwise empty.
	// Pods of that owner may come and go.
	For string
}

// Holder is a container, with its pod.
type Holder struct {
	workload.Pod
	Container string
	// Since is the time at which the container was created, the first of several; zero if that is
	// not known.
	Since time.Time
}

// String returns "namespace/pod", or a phrase for a pod that is not known yet.
func (h Holder) String() string {
	if h.Name == "" {
		return "a pod that the kubelet has not named yet"
	}
	return h.Pod.String()
}

// Told names the holder of the allocation with this ID to a pod of a namespace. The namespace is
// empty if it is not known. Tenants read this: the errors of a front-end end up in the status and
// the Events of the pod that asked. So a pod of another namespace is not named, and the
// allocation's ID is told instead. (The Node's annotation and Events, the log and `gpu-agent
// status` are for operators, and name pods.)
func (h Holder) Told(namespace, id string) string {
	if namespace != "" && h.Namespace == namespace && h.Name != "" {
		return h.String()
	}
	return "allocation " + id
}

// Who names the pods that have the allocation, or For if no pod is known.
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

// Pods returns the pods that are known to have the allocation.
func (a *Allocation) Pods() []workload.Pod {
	if a.Holder.Name == "" {
		return a.Beside
	}
	return append([]workload.Pod{a.Holder.Pod}, a.Beside...)
}

// Kind returns the kind of its pieces, which is the same for all of them.
func (a *Allocation) Kind() piece.Kind { return a.Grants[0].Kind() }

// IsOpen reports whether its container may be created.
func (a *Allocation) IsOpen() bool { return a.Phase == Open }

// GPUs returns the GPUs of its grants, each once, in the order of the grants.
func (a *Allocation) GPUs() (out []gpu.UUID) {
	for i := range a.Grants {
		if u := a.Grants[i].GPU; !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	return out
}

// On reports whether a grant is of this GPU.
func (a *Allocation) On(u gpu.UUID) bool {
	return slices.ContainsFunc(a.Grants, func(g Grant) bool { return g.GPU == u })
}

// Takes reports whether it has a grant of this GPU that takes room from others.
func (a *Allocation) Takes(u gpu.UUID) bool {
	return slices.ContainsFunc(a.Grants, func(g Grant) bool { return g.GPU == u && !g.NoRoom })
}

// Cap returns how much of a GPU's memory its holder may have. It is not known if one grant of that
// GPU has no known cap.
func (a *Allocation) Cap(u gpu.UUID) (cap piece.Cap) {
	for i := range a.Grants {
		switch g := &a.Grants[i]; {
		case g.GPU != u:
		case !g.Cap.Known:
			return piece.Cap{}
		default: // the kubelet may give several replicas of one GPU unasked: their caps add up
			cap = piece.CapOf(cap.Bytes + min(g.Cap.Bytes, memcap.None-cap.Bytes))
		}
	}
	return cap
}

// CapsKnown reports whether the cap of each grant is known.
func (a *Allocation) CapsKnown() bool {
	return !slices.ContainsFunc(a.Grants, func(g Grant) bool { return !g.Cap.Known })
}

// Record returns the allocation's record.
func (a *Allocation) Record() Record {
	return Record{Owner: a.Owner, Tier: a.Tier, Resource: a.Resource, Ref: a.Ref, Grants: a.Grants}
}

// Record is the part of an allocation that is written down: its grants and its owner. The ID is
// kept beside it.
type Record struct {
	Owner    FrontEnd `json:"frontEnd"`
	Tier     Tier     `json:"tier,omitempty"`
	Resource string   `json:"resource"`
	Ref      string   `json:"ref,omitempty"`
	Grants   []Grant  `json:"grants"`
}

// ReadRecord parses a record in JSON. The error wraps gpu.ErrInvalid.
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

// check returns an error if the record has no grants, grants of two kinds, or an unknown tier.
func (r *Record) check() error {
	if len(r.Grants) == 0 {
		return errors.New("it has no grants")
	}
	if !r.Tier.Known() {
		return fmt.Errorf("this version does not know the tier %q", string(r.Tier))
	}
	for i := range r.Grants {
		if first, k := r.Grants[0].Kind(), r.Grants[i].Kind(); k != first {
			return fmt.Errorf("pieces of two kinds, %s and %s, in one allocation", first, k)
		}
	}
	return nil
}
