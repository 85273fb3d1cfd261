// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// Allocation is what Allocate has granted to a container.
type Allocation struct {
	// Key identifies the allocation. Two records with one key are of the same devices.
	Key string `json:"key"`
	ledger.Record
	// Allocated is the time at which the last Allocate of the devices was answered.
	Allocated time.Time `json:"allocated"`
}

// valid reports whether an allocation has its required fields.
func (c *Allocation) valid() bool {
	return c.Key != "" && c.Resource != "" && len(c.Grants) > 0 && utf8.ValidString(c.Key) &&
		utf8.ValidString(c.Resource)
}

// A line is "v<version> <checksum> <payload>\n". The checksum is CRC-32C of the version and the
// payload, as 8 hexadecimal digits. That much is the same in every version. In version 1 the
// payload is an Allocation in JSON. It has no newline, and a truncated payload is not JSON.

// castagnoli is made for the first line, since a start must be quick.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

const sumDigits = 8

func checksum(version, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(version, castagnoli()), castagnoli(), payload)
}

// encodeLine returns an allocation's line. It fails if the allocation would not be read back as
// it is.
func encodeLine(c Allocation) ([]byte, error) {
	if !c.valid() {
		return nil, fmt.Errorf("allocation %q of %q: want a key, a resource and grants, of valid UTF-8: %w",
			c.Key, c.Resource, gpu.ErrInvalid)
	}
	c.Allocated = c.Allocated.UTC()
	payload, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("allocation of %s: %w", c.Resource, err)
	}
	version := fmt.Appendf(nil, "v%d", Version)
	return fmt.Appendf(nil, "%s %0*x %s\n", version, sumDigits, checksum(version, payload), payload), nil
}

// journal is the content of a journal.
type journal struct {
	// lines are the whole lines of this version, each with its newline.
	lines []string
	// allocations are those of the lines, oldest first. Of several lines for the same devices,
	// only the last counts.
	allocations []Allocation
	// dropped counts lines that are torn, damaged or of no known version.
	dropped int
	// open is true if the last line has no newline. The next line must then begin with one.
	open bool
	// newer is the highest version found above Version, else 0.
	newer int
}

func decodeJournal(data []byte) journal {
	j := journal{open: len(data) > 0 && data[len(data)-1] != '\n'}
	for raw := range bytes.Lines(data) {
		raw = bytes.TrimSuffix(raw, []byte("\n"))
		if len(raw) == 0 {
			continue // A newline that was written to end a torn line.
		}
		version, payload, ok := checkLine(raw)
		var c Allocation
		switch {
		case ok && version > Version:
			j.newer = max(j.newer, version)
		case ok && version == Version && json.Unmarshal(payload, &c) == nil && c.valid():
			j.lines = append(j.lines, string(raw)+"\n")
			j.allocations = append(j.allocations, c)
		default:
			j.dropped++
		}
	}
	j.allocations = lastOfEach(j.allocations)
	return j
}

// checkLine splits a line. ok is false if the line's checksum is wrong.
func checkLine(raw []byte) (version int, payload []byte, ok bool) {
	v, rest, _ := bytes.Cut(raw, []byte(" "))
	sum, payload, _ := bytes.Cut(rest, []byte(" "))
	want := fmt.Appendf(nil, "%0*x", sumDigits, checksum(v, payload))
	digits, isVersion := bytes.CutPrefix(v, []byte("v"))
	version, err := strconv.Atoi(string(digits))
	return version, payload, isVersion && err == nil && bytes.Equal(sum, want)
}

func lastOfEach(allocations []Allocation) []Allocation {
	seen := map[string]bool{}
	var last []Allocation
	for _, c := range slices.Backward(allocations) {
		if !seen[c.Key] {
			seen[c.Key] = true
			last = append(last, c)
		}
	}
	slices.SortFunc(last, func(a, b Allocation) int {
		return cmp.Or(a.Allocated.Compare(b.Allocated), cmp.Compare(a.Key, b.Key))
	})
	return last
}
