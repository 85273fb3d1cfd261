// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"reflect"
	"testing"
	"time"
)

func TestLoadIsAlwaysTheSame(t *testing.T) {
	l := Load{Seed: 7, Jobs: 30, Within: 90 * time.Second, Shortest: 10 * time.Second, Longest: time.Minute, Checkpoint: 5, Longer: time.Hour}
	jobs := l.Draw()
	if !reflect.DeepEqual(jobs, l.Draw()) {
		t.Error("one load gave two lists of Jobs")
	}
	l.Seed++
	if reflect.DeepEqual(jobs, l.Draw()) {
		t.Error("two seeds gave the same Jobs")
	}
	kinds, checkpoints := map[*Kind]int{}, 0
	for i, j := range jobs {
		kinds[j.Kind]++
		if j.Checkpoints {
			checkpoints++
			j.Runs -= time.Hour
		}
		if j.Arrives > l.Within || j.Runs < l.Shortest || j.Runs > l.Longest || i > 0 && j.Arrives < jobs[i-1].Arrives {
			t.Errorf("%+v is not of its load, or out of order", j)
		}
		for d, holds := range j.Kind.Holds {
			if j.Takes[d] < 1 || j.Takes[d] > holds {
				t.Errorf("%v takes %d of the %d that a GPU has", j.Piece, j.Takes[d], holds)
			}
		}
	}
	if kinds[Shares] != 15 || kinds[Instances] != 15 || checkpoints != 6 {
		t.Errorf("of 30 Jobs %d ask for memory, %d for instances, and %d checkpoint", kinds[Shares], kinds[Instances], checkpoints)
	}
}

func TestCount(t *testing.T) {
	const s = time.Second
	job := Job{Piece: Piece{GiB: 40}}
	r := Record{Ended: 200 * s, Jobs: []*History{
		// It ran on-prem for 36 s.
		{Job: job, Came: 1 * s, Done: 41 * s, Admissions: []Admission{{OnPrem, 2 * s, 0}}, Pods: []Pod{{Site: OnPrem, From: 4 * s, Until: 40 * s}}},
		// It was refused twice, and then ran, still in time.
		{Job: job, Came: 2 * s, Done: 80 * s, Admissions: []Admission{{OnPrem, 2 * s, 0}}, Pods: []Pod{
			{Refused: "UnexpectedAdmissionError"}, {Refused: "UnexpectedAdmissionError"}, {Site: OnPrem, From: 60 * s, Until: 78 * s}}},
		// It ran too late.
		{Job: job, Came: 3 * s, Done: 90 * s, Admissions: []Admission{{OnPrem, 3 * s, 0}}, Pods: []Pod{{Site: OnPrem, From: 70 * s, Until: 88 * s}}},
		// Its admission was taken back before that could be said; it ran in the cloud.
		{Job: job, Came: 3 * s, Done: 90 * s, Admissions: []Admission{{OnPrem, 3 * s, 50 * s}, {Cloud, 51 * s, 0}}, Pods: []Pod{{Site: Cloud, From: 55 * s, Until: 88 * s}}},
		// It was in the cloud, and came back.
		{Job: job, Came: 3 * s, Done: 150 * s, Admissions: []Admission{{Cloud, 3 * s, 100 * s}, {OnPrem, 101 * s, 0}},
			Pods: []Pod{{Site: Cloud, From: 5 * s, Until: 100 * s}, {Site: OnPrem, From: 104 * s, Until: 140 * s}}},
		// It never ran at all, though it was admitted.
		{Job: job, Came: 4 * s, Admissions: []Admission{{OnPrem, 5 * s, 0}}},
	}, Samples: []Sample{
		{At: 0}, {At: 5 * s, Sites: [2]Use{Cloud: {GPUs: 1}}}, {At: 55 * s, Sites: [2]Use{Cloud: {GPUs: 2}}},
		{At: 90 * s, Sites: [2]Use{Cloud: {GPUs: 1}}}, {At: 100 * s}, {At: 200 * s},
	}}
	got := r.Count()
	want := Counts{Stuck: 2, Refused: 2, Unfinished: 1, Ran: [2]int{4, 2}, Moved: 1, Paid: (50 + 2*35 + 10) * s,
		Held: 40 * (36 + 18 + 18 + 36) * s.Hours(), LongestWait: 196 * s, MedianWait: 58 * s}
	if diff := got.Held - want.Held; diff > 1e-9 || diff < -1e-9 {
		t.Errorf("on-prem %v GiB-hours were held, want %v", got.Held, want.Held)
	}
	if got.Held = want.Held; got != want {
		t.Errorf("counted %+v\nwant    %+v", got, want)
	}
}
