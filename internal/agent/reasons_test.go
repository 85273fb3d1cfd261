// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// TestSlicesThatFailWereOnlyLogged: that the API server does not keep the node's
// ResourceSlices, that somebody deletes them, and that the kubelet does not have the
// driver, stood in the log alone.
func TestSlicesThatFailWereOnlyLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.dra = newScheduled()
		o.dra.Refuse(fmt.Errorf("publish: %w (consumesCounters)", agentkube.ErrDropped))
		b := start(t, o, t.TempDir(), throughDRA("mode: shared"))
		defer b.end()
		want := func(state string, reason status.Reason) {
			t.Helper()
			synctest.Wait()
			b.mu.Lock()
			onNode, events := b.annotations["example.com/gpu.partition.reason"], strings.Join(b.events, "\n")
			b.mu.Unlock()
			s := b.Status()
			known := slices.ContainsFunc(s.Conditions, func(c status.Condition) bool { return c.Reason == reason && c.Subject == draDriver })
			if b.state() != state || s.Partition.Reason != reason || onNode != string(reason) || known != (reason != "") {
				t.Errorf("%s for %q, on the node %q; want %s for %q: %+v", b.state(), s.Partition.Reason, onNode, state, reason, s.Conditions)
			}
			if !strings.Contains(events, string(reason)) {
				t.Errorf("no Event has %s:\n%s", reason, events)
			}
		}
		want("failed", status.APIServerUnfit)
		o.dra.Refuse(nil)
		time.Sleep(2 * time.Minute)
		want("applied", "")
		o.dra.Wipe()
		want("applied", status.SlicesChanged)
		if _, d := o.dra.Device("-shared"); d == nil {
			t.Error("they are not written again")
		}
		time.Sleep(time.Minute)
		want("applied", "")
		o.dra.lose(true, errors.New("another process listens at …-reg.sock"))
		want("failed", status.NotRegistered)
		o.dra.lose(false, nil)
		want("applied", "")
		o.dra.lose(true, nil) // as a kubelet does that starts
		time.Sleep(20 * time.Second)
		want("applied", "")
		time.Sleep(20 * time.Second)
		want("failed", status.NotRegistered)
		o.dra.lose(false, nil)
		o.dra.Refuse(errors.New("no route to host"))
		o.dra.Wipe()
		time.Sleep(2 * time.Minute)
		want("failed", status.SlicesFailed)
		o.dra.Refuse(nil)
		time.Sleep(time.Minute)
		want("applied", "")
	})
}

// TestReasonsWereSentences: what kept a partition from being in force was told as a
// sentence and nothing else, so that a program could not tell a GPU that pods hold from a
// file that is wrong. Now it is a condition with a code, in the status, on the Node and
// in the Event, and it keeps its time for as long as it lasts.
func TestReasonsWereSentences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		want := func(state string, reason status.Reason) {
			t.Helper()
			synctest.Wait()
			b.mu.Lock()
			onNode := b.annotations["example.com/gpu.partition.reason"]
			b.mu.Unlock()
			s := b.Status()
			if b.state() != state || s.Partition.Reason != reason || onNode != string(reason) {
				t.Errorf("%s for %q, on the node %q; want %s for %q (%s)", b.state(), s.Partition.Reason, onNode, state, reason, s.Partition.Message)
			}
			i := slices.IndexFunc(s.Conditions, func(c status.Condition) bool { return c.Reason == reason })
			if reason != "" && (i != 0 || s.Conditions[0].Message == "") {
				t.Errorf("no condition has the reason %s first: %+v", reason, s.Conditions)
			}
			if reason == "" && len(s.Conditions) > 0 {
				t.Errorf("conditions %+v, want none", s.Conditions)
			}
		}
		want("applied", "")
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		b.hold("train-3", memResource, ids...)
		time.Sleep(time.Minute) // the kubelet is asked, and names the holder
		edited := time.Now()
		b.SetFile("p.yaml", []byte(allWhole))
		want("blocked", status.HeldByPods)
		time.Sleep(time.Hour)
		synctest.Wait()
		if c := b.Status().Conditions[0]; c.Type != status.Blocked || c.Subject != string(uuid(0)) || c.Since.Before(edited) || c.Since.Sub(edited) > time.Minute ||
			!strings.Contains(c.Message, "ns/train-3") {
			t.Errorf("an hour later: %+v, want what blocks GPU 0 since %s", c, edited)
		}
		if events := strings.Join(b.events, "\n"); strings.Count(events, "is blocked (HeldByPods): GPU 0") != 1 {
			t.Errorf("no Event has the reason:\n%s", events)
		}
		_, err := b.source(memResource).Allocate(ids[:1])
		if err == nil || status.CauseOf(err, "").Reason != status.NotOffered {
			t.Errorf("a leaving device: %v, for %q", err, status.CauseOf(err, "").Reason)
		}
		for _, c := range []struct {
			file   string
			reason status.Reason
		}{
			{"version: v1\npartitions:\n  default:\n    - devices: all\n      mode: quarter\n", status.PartitionsInvalid},
			{"version: v1\npartitions:\n  default:\n    - devices: [7]\n      mode: whole\n", status.PartitionUnfit},
		} {
			b.SetFile("p.yaml", []byte(c.file))
			want("invalid", c.reason)
		}
		b.SetFileMissing(errors.New("there is no ConfigMap"))
		want("invalid", status.PartitionsMissing)
		b.SetFile("p.yaml", []byte(allWhole))
		want("blocked", status.HeldByPods)
		b.with(func() { b.holdings = nil })
		time.Sleep(deviceplugin.LookSoon)
		want("applied", "")
	})
}

// What is told of a round is what must be seen to first, under the code of the gravest
// condition; the status has all.
func TestOutcomeFollowsFromConditions(t *testing.T) {
	cond := func(kind status.Type, reason status.Reason) []status.Condition {
		return []status.Condition{{Type: kind, Cause: status.Why(reason, "m%s", reason)}}
	}
	blocked := plan.Changes{Blocked: []plan.Blocked{{GPU: "GPU-1", Reason: status.BusyProcess, Holders: []string{"p"}}}}
	forbidden := cond(status.Failed, status.APIForbidden)
	for _, c := range []struct {
		name    string
		f       findings
		trouble []status.Condition
		inForce bool
		hangs   string
		want    Outcome
		all     int
	}{
		{name: "nothing", want: Outcome{State: Applied}},
		{name: "an error without a code", f: findings{errs: []error{nil, errors.New("a")}}, want: Outcome{State: Failed, Reason: status.RoundFailed, Message: "a"}, all: 1},
		{name: "two errors", f: findings{errs: []error{status.Because(status.HoldersUnknown, errors.New("a")), fmt.Errorf("b: %w; c: %w", gpu.ErrInUse, gpu.ErrNoRoom)}},
			want: Outcome{State: Failed, Reason: status.HoldersUnknown, Message: "a; b: " + gpu.ErrInUse.Error() + "; c: " + gpu.ErrNoRoom.Error()}, all: 2},
		{name: "a bad file, and an error", f: findings{configErr: errors.New("line 4"), errs: []error{errors.New("a")}}, inForce: true,
			want: Outcome{State: Invalid, Reason: status.PartitionsInvalid, Message: "line 4; the last good partition stays in force"}, all: 2},
		{name: "a bad file, and the API server refuses", f: findings{configErr: errors.New("line 4")}, trouble: forbidden,
			want: Outcome{State: Invalid, Reason: status.PartitionsInvalid, Message: "mAPIForbidden; line 4"}, all: 2},
		{name: "refused", f: findings{changes: &plan.Changes{Conditions: slices.Concat(cond(status.Refused, status.OtherOwner), cond(status.Noted, status.ForeignInstance))}},
			want: Outcome{State: Failed, Reason: status.OtherOwner, Message: "mOtherOwner"}, all: 2},
		{name: "blocked, and a reset is due", f: findings{changes: &blocked, work: cond(status.Pending, status.ResetDue)},
			want: Outcome{State: Blocked, Reason: status.BusyProcess, Message: blocked.Blocked[0].String() + "; mResetDue"}, all: 2},
		{name: "work failed, and another GPU is blocked", f: findings{changes: &blocked, work: cond(status.Failed, status.GPUChangeFailed)},
			want: Outcome{State: Failed, Reason: status.GPUChangeFailed, Message: "mGPUChangeFailed; " + blocked.Blocked[0].String()}, all: 2},
		{name: "blocked, and a resource is not registered", f: findings{changes: &blocked}, trouble: cond(status.Failed, status.NotRegistered),
			want: Outcome{State: Failed, Reason: status.NotRegistered, Message: "mNotRegistered; " + blocked.Blocked[0].String()}, all: 2},
		{name: "no partition", f: findings{note: status.Why(status.PartitionUnset, "n"), work: cond(status.Pending, status.GPUChange)},
			want: Outcome{State: Pending, Reason: status.PartitionUnset, Message: "n"}, all: 2},
		{name: "the driver hangs", hangs: "since noon", f: findings{hwNote: "no time slices"},
			want: Outcome{State: Applied, Reason: status.GPUDriverHangs, Message: "hardware work waits: since noon; no time slices"}, all: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.f.changes == nil {
				c.f.changes = &plan.Changes{}
			}
			s := &Snapshot{hardware: readout{Hangs: c.hangs}}
			if c.inForce {
				s.asked.Wanted = []config.Want{}
			}
			if c.f.judge(s, c.trouble); s.Outcome != c.want || len(s.Conditions) != c.all {
				t.Errorf("%+v with %d conditions, want %+v with %d", s.Outcome, len(s.Conditions), c.want, c.all)
			}
		})
	}
}
