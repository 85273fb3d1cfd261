// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"testing"
	"time"
)

func TestRegistrationDue(t *testing.T) {
	var (
		none    = sockID{}
		one     = sockID{ino: 1}
		two     = sockID{ino: 2}
		refused = errors.New("refused")
		t0      = time.Unix(0, 0)
		never   = time.Duration(-1)
		quiet   = streams{}
	)
	type try struct {
		with   sockID
		before streams
		at     time.Duration
		err    error
	}
	for _, c := range []struct {
		name  string
		tried []try
		sock  sockID
		now   streams
		at    time.Duration
		want  time.Duration // until it is due; never for not before something changes
		// suspected is when the kubelet was found without the resource; 0 is never.
		suspected time.Duration
	}{
		{"no kubelet", nil, none, quiet, 0, never, 0},
		{"a kubelet", nil, one, quiet, 0, 0, 0},
		{"its stream is on the way", []try{{one, quiet, 0, nil}}, one, quiet, time.Second, streamGrace - time.Second, 0},
		{"its stream does not come", []try{{one, quiet, 0, nil}}, one, quiet, streamGrace, 0, 0},
		{"all well", []try{{one, quiet, 0, nil}}, one, streams{open: 1, opened: 1}, time.Hour, never, 0},
		{"it opened a stream though the answer was lost", []try{{one, quiet, 0, refused}}, one, streams{open: 1, opened: 1}, 0, never, 0},
		{"its stream has ended", []try{{one, quiet, 0, nil}}, one, streams{open: 0, opened: 1}, time.Hour, 0, 0},
		{"its stream ended at once", []try{{one, quiet, 0, nil}}, one, streams{open: 0, opened: 1}, 0, firstBackoff, 0},
		{"another kubelet, the old stream still open", []try{{one, quiet, 0, nil}}, two, streams{open: 1, opened: 1}, 0, 0, 0},
		{"kubelet gone, the stream still open", []try{{one, quiet, 0, nil}}, none, streams{open: 1, opened: 1}, 0, never, 0},
		{"refused", []try{{one, quiet, 0, refused}}, one, quiet, 0, firstBackoff, 0},
		{"refused twice", []try{{one, quiet, 0, refused}, {one, quiet, 0, refused}}, one, quiet, 0, firstBackoff * 5 / 4, 0},
		{"refused, a stranger's stream open", []try{{one, streams{open: 1, opened: 1}, 0, refused}}, one, streams{open: 1, opened: 1}, 0, firstBackoff, 0},
		{"another kubelet refused, the old stream still open", []try{{one, quiet, 0, nil}, {two, streams{open: 1, opened: 1}, time.Hour, refused}}, two, streams{open: 1, opened: 1}, time.Hour, firstBackoff, 0},
		{"suspected", []try{{one, quiet, 0, nil}}, one, streams{open: 1, opened: 1}, time.Hour, 0, time.Hour},
		{"suspected just in time", []try{{one, quiet, 0, nil}}, one, streams{open: 1, opened: 1}, 30 * time.Second, 0, 30 * time.Second},
		{"suspected too early", []try{{one, quiet, 0, nil}}, one, streams{open: 1, opened: 1}, 30 * time.Second, never, 29 * time.Second},
		{"suspected too early, long ago", []try{{one, quiet, 0, nil}}, one, streams{open: 1, opened: 1}, time.Hour, never, 29 * time.Second},
		{"suspected, and registered since", []try{{one, quiet, 0, nil}, {one, streams{open: 1, opened: 1}, time.Hour, nil}}, one, streams{open: 1, opened: 1}, time.Hour, never, time.Hour},
		{"suspected, refused since", []try{{one, quiet, 0, nil}, {one, streams{open: 1, opened: 1}, time.Hour, refused}}, one, streams{open: 1, opened: 1}, time.Hour, firstBackoff, time.Hour},
		{"suspected without a kubelet", []try{{one, quiet, 0, nil}}, none, streams{open: 1, opened: 1}, time.Hour, never, time.Hour},
		{"a new kubelet starts anew", []try{{one, quiet, 0, refused}, {one, quiet, 0, refused}, {two, quiet, 0, refused}}, two, quiet, 0, firstBackoff, 0},
		{"the same after long", []try{{one, quiet, 0, refused}, {one, quiet, 0, refused}, {one, quiet, time.Hour, refused}}, one, quiet, time.Hour, firstBackoff, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := registration{suspectEvery: 30 * time.Second}
			var suspected time.Time
			if c.suspected > 0 {
				suspected = t0.Add(c.suspected)
			}
			for _, d := range c.tried {
				r.tried(d.with, d.before, t0.Add(d.at), d.err)
			}
			due, in := r.due(c.sock, c.now, suspected, t0.Add(c.at), false)
			if due != (c.want == 0) || !due && in != max(c.want, 0) {
				t.Errorf("due = %v, %v, want it in %v", due, in, c.want)
			}
		})
	}
	var r registration
	for range 100 {
		r.tried(one, quiet, t0, refused)
	}
	if _, in := r.due(one, quiet, time.Time{}, t0, false); in != lastBackoff {
		t.Errorf("after 100 refusals the next try is in %v, want %v", in, lastBackoff)
	}
}
