// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"
)

// stands is a Job at a moment, in a test.
type stands struct {
	Piece
	Stage
	Site
	// from is where its piece begins, 0 for one that may lie anywhere.
	from        int
	checkpoints bool
}

// moment makes a record of one sample.
func moment(all ...stands) *Record {
	r := &Record{Samples: []Sample{{}}}
	for _, is := range all {
		at := is.from
		if is.Kind == Shares {
			at = -1
		}
		r.Jobs = append(r.Jobs, &History{Job: Job{Piece: is.Piece, Checkpoints: is.checkpoints}})
		r.Samples[0].Jobs = append(r.Samples[0].Jobs, Standing{is.Stage, is.Site, at})
	}
	return r
}

func instance(name string) Piece {
	for _, p := range pieces[Instances] {
		if p.Resource == "mig-"+name {
			return p
		}
	}
	panic(name)
}

func TestWhatKeepsRoomIdle(t *testing.T) {
	g1, g2, g3, g4 := instance("1g.10gb"), instance("2g.20gb"), instance("3g.40gb"), instance("4g.40gb")
	type want map[Cause]float64
	for _, test := range []struct {
		name string
		jobs []stands
		want want
	}{
		{"nobody", nil, want{idleUnwanted: 159}},
		{"who is over or has not come asks for nothing", []stands{{Piece: units(10)}}, want{idleUnwanted: 159}},
		{"what runs is not idle", []stands{{Piece: units(60), Stage: Running}}, want{idleUnwanted: 99}},
		{"each kind by itself", []stands{{Piece: units(60), Stage: Running}, {Piece: units(40), Stage: Kept}},
			want{idleSmall: 19, idleUnwanted: 80}},
		{"a pod begins", []stands{{Piece: units(40), Stage: Starting}}, want{idleBegins: 40, idleUnwanted: 119}},
		{"a pod has ended", []stands{{Piece: g3, Stage: Leaving}}, want{idleEnds: 40, idleUnwanted: 119}},
		{"a pod is being ended", []stands{{Piece: g3, Stage: Evicted}}, want{idleEnds: 40, idleUnwanted: 119}},
		{"what ends in the cloud wants nothing", []stands{{Piece: g3, Stage: Leaving, Site: Cloud}},
			want{idleUnwanted: 159}},
		{"held for one that waits", []stands{{Piece: units(20), Stage: Called}},
			want{idleAwaited: 20, idleUnwanted: 139}},
		{"held for one that comes back", []stands{{Piece: units(20), Stage: Evicted, Site: Cloud}},
			want{idleReturns: 20, idleUnwanted: 139}},
		{"an answer is missing", []stands{{Piece: g4, Stage: Asking}}, want{idleAsked: 40, idleUnwanted: 119}},
		{"others that wait have its quota", []stands{
			{Piece: units(40), Stage: Running}, {Piece: units(60), Stage: Asking}, {Piece: units(30), Stage: Queued},
		}, want{idleQuota: 30, idleSmall: 9, idleUnwanted: 80}},
		{"it counts once", []stands{
			{Piece: units(20), Stage: Running}, {Piece: units(60), Stage: Asking}, {Piece: units(10), Stage: Queued},
		}, want{idleQuota: 10, idleSmall: 49, idleUnwanted: 80}},
		{"others of the other kind have its quota", []stands{
			{Piece: units(40), Stage: Running}, {Piece: units(60), Stage: Asking}, {Piece: g4, Stage: Running},
			{Piece: g3, Stage: Queued},
		}, want{idleQuota: 40, idleSmall: 39}},
		{"no quota is missing", []stands{
			{Piece: units(40), Stage: Running}, {Piece: units(60), Stage: Kept}, {Piece: units(30), Stage: Queued},
		}, want{idleUntried: 30, idleSmall: 9, idleUnwanted: 80}},
		{"a time is waited for", []stands{{Piece: g1, Stage: Delayed}}, want{idleLater: 10, idleUnwanted: 149}},
		{"it is kept away", []stands{{Piece: g1, Stage: Kept}}, want{idleBarred: 10, idleUnwanted: 149}},
		{"it is not tried", []stands{{Piece: g1, Stage: Queued}}, want{idleUntried: 10, idleUnwanted: 149}},
		{"it goes to the cloud", []stands{
			{Piece: g1, Stage: Asking, Site: Cloud}, {Piece: g2, Stage: Starting, Site: Cloud},
		}, want{idleGoing: 30, idleUnwanted: 129}},
		{"it is in the cloud", []stands{
			{Piece: units(20), Stage: Running, Site: Cloud},
			{Piece: units(60), Stage: Running, Site: Cloud, checkpoints: true},
		}, want{idleMovable: 60, idleSmall: 19, idleUnwanted: 80}},
		{"and stays there", []stands{{Piece: units(20), Stage: Running, Site: Cloud}},
			want{idleSettled: 20, idleUnwanted: 139}},
		{"who waits is looked at first", []stands{
			{Piece: units(60), Stage: Running, Site: Cloud}, {Piece: units(30), Stage: Kept},
		}, want{idleBarred: 30, idleSmall: 49, idleUnwanted: 80}},
		{"pieces lie apart", []stands{
			{Piece: g1, Stage: Running}, {Piece: g1, Stage: Running, from: 4}, {Piece: g3, Stage: Kept},
		}, want{idleApart: 60, idleUnwanted: 79}},
		{"pieces lie together", []stands{
			{Piece: g1, Stage: Running}, {Piece: g1, Stage: Running, from: 1}, {Piece: g3, Stage: Kept},
		}, want{idleBarred: 40, idleUnwanted: 20 + 79}},
		{"no compute is left", []stands{
			{Piece: g4, Stage: Running}, {Piece: g2, Stage: Running, from: 4},
			{Piece: g2, Stage: Kept}, {Piece: g1, Stage: Kept},
		}, want{idleBarred: 10, idleSmall: 10, idleUnwanted: 79}},
	} {
		got := moment(test.jobs...).IdleAt(&moment(test.jobs...).Samples[0])
		var want Idle
		for cause, n := range test.want {
			want[cause] = n
		}
		if got != want {
			t.Errorf("%s: got  %v\nwant %v", test.name, got, want)
		}
	}
}

// Each GiB that no pod on-prem has is idle for one cause, whatever the Jobs do.
func TestEachGiBHasOneCause(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	seen := Idle{}
	for range 3000 {
		var all []stands
		b, held := newBoard(), 0
		for range random.IntN(10) {
			kind := []*Kind{Shares, Instances}[random.IntN(2)]
			is := stands{Piece: pieces[kind][random.IntN(len(pieces[kind]))], checkpoints: random.IntN(2) == 0,
				Stage: Stage(random.IntN(int(Evicted) + 1)), Site: Site(random.IntN(2))}
			if len(is.Starts) > 0 {
				is.from = is.Starts[random.IntN(len(is.Starts))]
			}
			if is.Site == OnPrem && is.Stage >= Starting {
				if at := map[bool]int{true: -1, false: is.from}[is.Kind == Shares]; !b.place(is.Piece, at) {
					continue // no two have the same piece
				}
				if is.Stage == Running {
					held += is.GiB
				}
			}
			all = append(all, is)
		}
		r := moment(all...)
		got := r.IdleAt(&r.Samples[0])
		if got.Sum() != float64(Has[OnPrem]-held) {
			t.Fatalf("%d GiB are held, and %v are idle, with %+v", held, got, all)
		}
		for cause, n := range got {
			if seen[cause] += n; n < 0 {
				t.Fatalf("%v is %v, with %+v", Cause(cause), n, all)
			}
		}
	}
	for cause, n := range seen {
		if n == 0 {
			t.Errorf("nothing was ever idle since %s: %s", causes[cause].name, causes[cause].means)
		}
	}
}

func TestIdleOverTime(t *testing.T) {
	const s = time.Second
	r := moment(stands{Piece: units(60), Stage: Running}, stands{Piece: units(40), Stage: Kept})
	first := r.Samples[0]
	paid, last := first, Sample{At: 15 * s, Jobs: first.Jobs}
	paid.At, paid.Sites[Cloud].GPUs = 10*s, 2
	r.Samples = []Sample{first, paid, last}
	while, whole := r.Idle()
	want := func(seconds float64) (i Idle) {
		i[idleSmall], i[idleUnwanted] = 19*seconds, 80*seconds
		return i
	}
	if while != want(5) || whole != want(15) {
		t.Errorf("got  %v and %v\nwant %v and %v", while, whole, want(5), want(15))
	}
	lines := strings.Split(string(r.IdleCSV()), "\n")
	if want := "10.0,0,2,0,0,0,0,0,0,0,0,0,0,0,0,0,0,19,80"; len(lines) != 5 || lines[2] != want {
		t.Errorf("the lines of moments are %q, want %q as the third", lines, want)
	}
}

// How a Job stands is read from its pods, its workload and the agent's word.
func TestStanding(t *testing.T) {
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	now := began.Add(time.Minute)
	at := func(d time.Duration) string { return began.Add(d).Format(time.RFC3339) }
	condition := func(kind, reason string, when time.Duration) string {
		const text = `{"type": %q, "status": "True", "reason": %q, "lastTransitionTime": %q}`
		return fmt.Sprintf(text, kind, reason, at(when))
	}
	quota := func(flavor string, more ...string) string {
		all := condition("QuotaReserved", "", 0)
		for _, one := range more {
			all += "," + condition(one, "", 0)
		}
		const text = `{"status": {"conditions": [%s], "admission": {"podSetAssignments": [{"flavors": {"x": %q}}]}}}`
		return fmt.Sprintf(text, all, flavor)
	}
	runs := Pod{Site: OnPrem, From: time.Second}
	over := Pod{Site: OnPrem, From: time.Second, Until: 2 * time.Second}
	left := Pod{Site: Cloud, From: time.Second, Until: 2 * time.Second}
	ended := Pod{Site: OnPrem, From: time.Second, Until: 2 * time.Second, Succeeded: true}
	kept := func(flavors string) string {
		return fmt.Sprintf(`{"metadata": {"annotations": {"example.com/gpu.refused-flavors": %q}}}`, flavors)
	}
	again := func(when time.Duration) string {
		return fmt.Sprintf(`{"status": {"requeueState": {"requeueAt": %q}}}`, at(when))
	}
	woken := func(when time.Duration) string {
		return fmt.Sprintf(`{"status": {"conditions": [%s]}}`, condition("Requeued", "GPUPlacer", when))
	}
	const here, there = "on-prem-x", "cloud-x"
	for _, test := range []struct {
		name     string
		workload string
		pods     []Pod
		has      int // one more than where its piece begins
		want     Standing
	}{
		{"it has no workload yet", "", nil, 0, Standing{Queued, OnPrem, -1}},
		{"it waits", `{}`, nil, 0, Standing{Queued, OnPrem, -1}},
		{"it is kept", kept(here), nil, 0, Standing{Kept, OnPrem, -1}},
		{"it is kept from nothing", kept(""), nil, 0, Standing{Queued, OnPrem, -1}},
		{"it is tried later", again(2 * time.Minute), nil, 0, Standing{Delayed, OnPrem, -1}},
		{"that time has come", again(0), nil, 0, Standing{Queued, OnPrem, -1}},
		{"it is called", woken(55 * time.Second), nil, 0, Standing{Called, OnPrem, -1}},
		{"it was called, and is no more", woken(45 * time.Second), nil, 0, Standing{Queued, OnPrem, -1}},
		{"it asks", quota(here), nil, 0, Standing{Asking, OnPrem, -1}},
		{"it asks for the cloud", quota(there), nil, 0, Standing{Asking, Cloud, -1}},
		{"it starts", quota(here, "Admitted"), nil, 5, Standing{Starting, OnPrem, 4}},
		{"it runs", quota(here, "Admitted"), []Pod{runs}, 5, Standing{Running, OnPrem, 4}},
		{"it is evicted, and runs", quota(here, "Admitted", "Evicted"), []Pod{runs}, 5, Standing{Running, OnPrem, 4}},
		{"so in the cloud", quota(there, "Evicted"), []Pod{{Site: Cloud, From: 1}}, 0, Standing{Evicted, Cloud, -1}},
		{"it is evicted", quota(there, "Evicted"), nil, 0, Standing{Evicted, Cloud, -1}},
		{"its pod has ended", quota(here, "Admitted"), []Pod{ended}, 5, Standing{Leaving, OnPrem, 4}},
		{"its pod has ended, and says no more", quota(here, "Admitted"), []Pod{over}, 5, Standing{Leaving, OnPrem, 4}},
		{"it comes back", quota(here, "Admitted"), []Pod{left}, 0, Standing{Starting, OnPrem, -1}},
		{"the agent has not heard", quota(here, "Admitted", "Finished"), []Pod{ended}, 5, Standing{Leaving, OnPrem, 4}},
		{"it is over", quota(here, "Admitted", "Finished"), []Pod{ended}, 0, Standing{Away, OnPrem, -1}},
	} {
		h := &History{Job: Job{Name: "job-01"}, Pods: test.pods, Came: time.Second}
		var w *workloadObject
		if test.workload != "" {
			if err := json.Unmarshal([]byte(test.workload), &w); err != nil {
				t.Fatal(err)
			}
		}
		has := map[string]int{"job-02": 0}
		if test.has > 0 {
			has["job-01"] = test.has - 1
		}
		if got := h.standing(w, has, now); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: it stands as %+v, want %+v", test.name, got, test.want)
		}
	}
}
