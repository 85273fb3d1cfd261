// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// The page of usage says what the command says.
func TestUsagePage(t *testing.T) {
	dir := filepath.Join(journal(t), usageDir)
	now := time.Date(2026, 3, 1, 20, 0, 0, 0, time.UTC)
	ask := func(query string) (account.Answer, error) {
		t.Helper()
		values, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		v, err := usagePage(dir, values, now)
		a, _ := v.(account.Answer)
		return a, err
	}
	if a, err := ask("until=2026-03-01T19:00"); err != nil || len(a.Sums) != 2 || a.Sums[0].Name != "dev" || a.Sums[0].GrantedGPUHours != 2.5 || a.Had != nil {
		t.Errorf("%+v: %v", a, err)
	}
	if a, err := ask("by=pod&since=2026-03-01T12:00&until=2026-03-01T13:00"); err != nil || len(a.Sums) != 2 || a.Sums[0].Name != "train/job-1" {
		t.Errorf("%+v: %v", a, err)
	}
	if a, err := ask("at=2026-03-01T12:00:00Z&gpu=3"); err != nil || len(a.Had) != 2 || a.Had[0].Pod == "" || a.Sums != nil {
		t.Errorf("%+v: %v", a, err)
	}
	for _, bad := range []string{"by=colour", "since=yesterday", "at=x", "since=1h&until=2h"} {
		if _, err := ask(bad); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// The journal's tail has the last records, the newest last, and no books.
func TestJournalTail(t *testing.T) {
	dir := filepath.Join(journal(t), usageDir)
	events := func(most int) (out []string) {
		t.Helper()
		body, err := journalTail(dir, most, time.Date(2026, 3, 1, 20, 0, 0, 0, time.UTC))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(body)) {
			var r struct{ Event string }
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatal(err)
			}
			out = append(out, r.Event)
		}
		return out
	}
	if got := strings.Join(events(100), " "); got != "allocated held allocated held used released" {
		t.Errorf("all: %s", got)
	}
	if got := strings.Join(events(4), " "); got != "allocated held used released" {
		t.Errorf("four: %s", got)
	}
	if got := strings.Join(events(5), " "); got != "held allocated held used released" {
		t.Errorf("five: %s", got)
	}
	if body, err := journalTail(t.TempDir(), 5, time.Now()); err != nil || len(body) != 0 {
		t.Errorf("of no journal: %q, %v", body, err)
	}
}

// The page of settings has each flag that the agent was given.
func TestSettings(t *testing.T) {
	c := newRun()
	if err := c.Flags().Parse([]string{"--memory-unit", "2GiB"}); err != nil {
		t.Fatal(err)
	}
	s := settings(c.Flags())
	if s["memory-unit"] != "2GiB" || s["http"] != ":9500" || len(s) < 30 {
		t.Errorf("%v", s)
	}
}
