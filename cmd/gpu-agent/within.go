// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/obs/agentobs"
	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
	"example.com/gpu-agent/pkg/gpu"
)

// within adds the pages about the journal and the flags to those of the loop.
func (f *runFlags) within(w agentobs.Within) agentobs.Within {
	dir := filepath.Join(f.node.stateDir, usageDir)
	if f.usage.size > 0 {
		w.Usage = func(query url.Values) (any, error) { return usagePage(dir, query, time.Now()) }
		w.Journal = func(most int) ([]byte, error) { return journalTail(dir, most, time.Now()) }
	}
	w.Settings = func() map[string]string { return settings(f.flags) }
	return w
}

// usagePage answers a query of /usage, whose keys are the flags of `gpu-agent usage`.
func usagePage(dir string, query url.Values, now time.Time) (any, error) {
	r := usageReport{dir: dir, now: now, by: cmp.Or(query.Get("by"), "namespace"), since: query.Get("since"),
		until: query.Get("until"), at: query.Get("at"), gpu: query.Get("gpu")}
	var notes strings.Builder
	var a account.Answer
	var err error
	if r.at != "" {
		a.Had, err = r.had(&notes)
	} else {
		a.Sums, err = r.granted(&notes)
	}
	if command.ExitOf(err) == command.Usage {
		return nil, fmt.Errorf("%w: %w", err, gpu.ErrInvalid)
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(notes.String()) {
		a.Notes = append(a.Notes, strings.TrimSpace(line))
	}
	return a, nil
}

// journalBytes bounds the tail of the journal, and journalTime is how old its records may be, about:
// it begins with a segment.
const (
	journalBytes = 4 << 20
	journalTime  = 24 * time.Hour
)

// journalTail returns the last records of the usage journal, a line of JSON each. It leaves out the
// books, which repeat what was open at the beginning of each segment.
func journalTail(dir string, most int, now time.Time) ([]byte, error) {
	ring := make([][]byte, 0, most)
	next := 0
	var failed error
	err := segments.Read(dir, now.Add(-journalTime), func(r *account.Record) {
		if r.Book != nil {
			return
		}
		line, err := json.Marshal(r)
		switch {
		case err != nil:
			failed = err
		case len(ring) < most:
			ring = append(ring, line)
		default:
			ring[next] = line
			next = (next + 1) % most
		}
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // an agent that has just begun
	}
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, line := range append(ring[next:len(ring):len(ring)], ring[:next]...) {
		out.Write(line)
		out.WriteByte('\n')
	}
	body := out.Bytes()
	if over := len(body) - journalBytes; over > 0 {
		body = body[over+bytes.IndexByte(body[over:], '\n')+1:]
	}
	return body, nil
}

// settings returns the values of all flags.
func settings(fs *pflag.FlagSet) map[string]string {
	out := map[string]string{}
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			out[f.Name] = f.Value.String()
		}
	})
	return out
}
