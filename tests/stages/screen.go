// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"sync"
)

// screen is shared by stages that run at the same time. What one of them prints
// stands together: the one that began first prints as it goes, what the others
// print is kept until it has ended.
type screen struct {
	w io.Writer

	mu sync.Mutex
	// parts are those of stages that have not been shown whole, in the order in
	// which they began; the first is on the screen. Guarded by mu.
	parts []*part
	// midLine: the last that was written did not end a line. Guarded by mu.
	midLine bool
}

// part is what one stage prints. The screen's mutex guards it.
type part struct {
	on    *screen
	kept  bytes.Buffer
	ended bool
}

func (s *screen) begin() *part {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &part{on: s}
	s.parts = append(s.parts, p)
	return p
}

// writeLocked needs mu held. A screen that takes nothing any more is no reason to
// end tests: the logs have all of it.
func (s *screen) writeLocked(text []byte) {
	if len(text) == 0 {
		return
	}
	_, _ = s.w.Write(text)
	s.midLine = text[len(text)-1] != '\n'
}

func (p *part) Write(text []byte) (int, error) {
	s := p.on
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.parts[0] == p {
		s.writeLocked(text)
		return len(text), nil
	}
	return p.kept.Write(text)
}

// end is called once, after the last Write.
func (p *part) end() {
	s := p.on
	s.mu.Lock()
	defer s.mu.Unlock()
	p.ended = true
	for len(s.parts) > 0 && s.parts[0].ended {
		s.parts = s.parts[1:]
		if len(s.parts) > 0 {
			s.writeLocked(s.parts[0].kept.Bytes())
			s.parts[0].kept = bytes.Buffer{}
		}
	}
}

// failed says at once that a stage failed whose output has to wait.
func (p *part) failed(name, log string) {
	s := p.on
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.parts[0] == p {
		return
	}
	if s.midLine {
		s.writeLocked([]byte("\n"))
	}
	s.writeLocked(fmt.Appendf(nil, "!!! beside this, the stage %q failed; see %s, or below when this has ended\n", name, log))
}
