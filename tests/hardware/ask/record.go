// SPDX-License-Identifier: Apache-2.0

package ask

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

// Line is one of a question's file.
type Line struct {
	// At is when, in seconds since the question began.
	At float64 `json:"at"`
	// Call is what was called, with the version in its name, as
	// nvmlDeviceGetComputeRunningProcesses_v3, or what was run. Return is what it returned.
	Call   string `json:"call,omitempty"`
	Return int    `json:"return,omitempty"`
	Value  any    `json:"value,omitempty"`
	// Answer is in the last line of a question that was answered.
	Answer *Answer `json:"answer,omitempty"`
	// Ended is in the last line of one that was not: what ended it.
	Ended string `json:"ended,omitempty"`
}

// Room is what a question is asked with.
type Room struct {
	// Dir is a folder of its own, for sockets and the like, which goes with the question.
	Dir string

	began time.Time
	mu    sync.Mutex
	file  *os.File
	scrub *Scrub
}

// Note writes down what a call returned, at once.
func (r *Room) Note(call string, ret int, value any) {
	r.write(Line{Call: call, Return: ret, Value: value})
}

func (r *Room) write(l Line) {
	l.At = float64(time.Since(r.began).Microseconds()) / 1e6
	data, err := json.Marshal(l)
	if err != nil { // of a value that JSON has not, such as a NaN
		l.Value = fmt.Sprint(l.Value)
		if data, err = json.Marshal(l); err != nil {
			return
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// In one call, so that another process that ends this one leaves whole lines.
	_, _ = r.file.Write(append(r.scrub.Bytes(data), '\n'))
}

// Read is what the file of a question has, without a last line in which its process was ended.
func Read(folder, name string) ([]Line, error) {
	data, err := os.ReadFile(filepath.Join(folder, name+ending))
	if err != nil {
		return nil, fmt.Errorf("read what was learned: %w", err)
	}
	var out []Line
	for text := range bytes.Lines(data[:bytes.LastIndexByte(data, '\n')+1]) {
		var l Line
		if err := json.Unmarshal(text, &l); err != nil {
			return out, fmt.Errorf("read %s of %s, line %d: %w", name, folder, len(out)+1, err)
		}
		out = append(out, l)
	}
	return out, nil
}

// AnswerIn is the answer among the lines of a question's file.
func AnswerIn(lines []Line) (Answer, error) {
	for _, l := range lines {
		if l.Answer != nil {
			return *l.Answer, nil
		}
		if l.Ended != "" {
			return Answer{}, errors.New(l.Ended)
		}
	}
	return Answer{}, errors.New("it was cut off")
}

const ending = ".jsonl"

// Scrub takes out of text what tells whose card it was. The same thing has the same name in
// all that one Scrub has seen, so what was one GPU in two lines stays one. The zero value can
// be used, by several goroutines at once.
type Scrub struct {
	mu    sync.Mutex
	names map[string]string
	kinds map[string]int
}

// secret finds UUIDs of GPUs and MIG instances. Serial numbers are not asked for.
var secret = regexp.MustCompile(`(GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`)

// Bytes returns text without them: GPU-1 is the first one that was met.
func (s *Scrub) Bytes(text []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names == nil {
		s.names, s.kinds = map[string]string{}, map[string]int{}
		if host, err := os.Hostname(); err == nil && len(host) > 3 {
			s.names[host] = "this-machine"
		}
	}
	text = secret.ReplaceAllFunc(text, func(found []byte) []byte {
		key := strings.ToLower(string(found[4:]))
		if s.names[key] == "" {
			kind := string(found[:3])
			s.kinds[kind]++
			s.names[key] = fmt.Sprintf("%s-%d", kind, s.kinds[kind])
		}
		return []byte(s.names[key])
	})
	for name, instead := range s.names {
		if instead == "this-machine" {
			text = bytes.ReplaceAll(text, []byte(name), []byte(instead))
		}
	}
	return text
}
