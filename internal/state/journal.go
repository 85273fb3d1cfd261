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
	// Key names the allocation: two records with one key are of the same devices.
	Key string `json:"key"`
	ledger.Record
	// Allocated is when the last Allocate of the devices was answered.
	Allocated time.Time `json:"allocated"`
}

// valid reports whether an allocation says what it must.
func (c *Allocation) valid() bool {
	return c.Key != "" && c.Resource != "" && len(c.Grants) > 0 && utf8.ValidString(c.Key) &&
		utf8.ValidString(c.Resource)
}

// A line is "v<version> <checksum> <payload>\n". The checksum, 8 hexadecimal
// digits of CRC-32C, is over all but itself. That much stays the same in every
// version; the payload of version 1 is a Allocation in JSON, which has no newline and
// of which no beginning is JSON.

// castagnoli is made when the first line is: a start has no time to lose.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

const sumDigits = 8

func checksum(version, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(version, castagnoli()), castagnoli(), payload)
}

// encodeLine refuses an allocation that would not come back as it is.
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

// journal is what a journal's bytes say.
type journal struct {
	// lines is the whole lines of this version, each with its newline.
	lines []string
	// allocations is what the lines say, oldest first; of several lines for the same
	// devices only the last counts.
	allocations []Allocation
	// dropped counts lines that are torn, damaged or of no known version.
	dropped int
	// open says that the last line has no newline, so that whatever is appended
	// must bring one.
	open bool
	// newer is the highest version found above Version, else 0.
	newer int
}

func decodeJournal(data []byte) journal {
	j := journal{open: len(data) > 0 && data[len(data)-1] != '\n'}
	for raw := range bytes.Lines(data) {
		raw = bytes.TrimSuffix(raw, []byte("\n"))
		if len(raw) == 0 {
			continue // A newline that ends a torn line, after which there was none.
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

// checkLine is not ok with a line whose checksum is not its own.
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
