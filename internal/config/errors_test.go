// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
)

// told checks what every error of a file keeps to, and returns its lines.
func told(t *testing.T, err error) []string {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	var all Errors
	if !errors.As(err, &all) {
		t.Fatalf("%T is no Errors", err)
	}
	text := err.Error()
	if len(text) > brief.Text-200 || !utf8.ValidString(text) {
		t.Errorf("a text of %d bytes, valid %v", len(text), utf8.ValidString(text))
	}
	lines := strings.Split(text, "\n")
	if len(lines) > maxMistakes+1 || len(all) != len(lines) {
		t.Errorf("%d lines of %d mistakes", len(lines), len(all))
	}
	for i := range all[1:] {
		if all[i].Line > all[i+1].Line && i+2 < len(all) {
			t.Errorf("line %d comes before line %d", all[i].Line, all[i+1].Line)
		}
	}
	return lines
}

// TestThirtyThousandMistakes: they made a message of megabytes, which the API server
// refused.
func TestThirtyThousandMistakes(t *testing.T) {
	const n = 30_000
	var b strings.Builder
	b.WriteString(head)
	for range n {
		b.WriteString("    - {devices: all, mode: x}\n")
	}
	_, err := Parse("f", []byte(b.String()))
	lines := told(t, err)
	if len(lines) != maxMistakes+1 || lines[0] != `f:4: mode is whole, shared, mig, dynamic or off, not the text "x"` ||
		lines[maxMistakes] != fmt.Sprintf("f:%d: from here on there are %d more mistakes", 4+maxMistakes, n-maxMistakes) {
		t.Errorf("got %q", lines)
	}
}

// TestMistakesDoNotFillTheMemory: what is kept of a file of the largest size that
// consists of mistakes is no more than what is told of it.
func TestMistakesDoNotFillTheMemory(t *testing.T) {
	in := []byte(head + "    [" + strings.Repeat("1,\n", (maxFile-100)/3) + "1]\n")
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	_, err := Parse("f", in)
	after := heap()
	runtime.KeepAlive(in)
	told(t, err)
	if kept := int64(after) - int64(before); kept > 1<<20 {
		t.Errorf("%d KiB are kept of a file with nothing but mistakes", kept>>10)
	}
}

// TestLongMistakes: one mistake can be long by itself, and 20 of them longer than a
// message may be.
func TestLongMistakes(t *testing.T) {
	inv := &gpu.Inventory{GPUs: []gpu.Device{{UUID: "GPU-0", MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{{Name: "1g.10gb"}}}}}}
	profiles := func(from int) string {
		var names []string
		for i := range 3000 {
			names = append(names, fmt.Sprintf("1g.%dgb: 1", from+i))
		}
		return strings.Join(names, ", ")
	}
	t.Run("names of partitions", func(t *testing.T) {
		var b strings.Builder
		b.WriteString("version: v1\npartitions:\n")
		for i := range 5000 {
			fmt.Fprintf(&b, "  partition-with-a-long-name-%d: [{devices: all, mode: whole}]\n", i)
		}
		_, err := mustParse(t, b.String()).Desire("no", inv, Node{Unit: 1024})
		if lines := told(t, err); len(lines) != 1 || !strings.HasSuffix(lines[0], "and 4980 more") {
			t.Errorf("got %q", lines)
		}
	})
	t.Run("profiles", func(t *testing.T) {
		_, err := mustParse(t, head+"    - {devices: all, mode: mig, geometry: {"+profiles(100)+"}}\n").Desire("default", inv, Node{Unit: 1024})
		if lines := told(t, err); len(lines) != 1 || !strings.Contains(lines[0], "and 2980 more") {
			t.Errorf("got %q", lines)
		}
	})
	t.Run("twenty long ones", func(t *testing.T) {
		key := strings.Repeat("日", 60)
		_, err := Parse("f", []byte(head+strings.Repeat("    - {devices: all, mode: whole, "+key+": 1}\n", 30)))
		lines := told(t, err)
		if n := len(lines); n == maxMistakes+1 || !strings.HasSuffix(lines[n-1], fmt.Sprintf("there are %d more mistakes", 30-(n-1))) {
			t.Errorf("%d lines, the last is %q", n, lines[n-1])
		}
	})
	t.Run("a long path", func(t *testing.T) {
		_, err := Parse(strings.Repeat("/日", 2000), []byte("version: v2\n"))
		if text := err.Error(); len(text) > brief.Text || !utf8.ValidString(text) {
			t.Errorf("%d bytes, valid %v", len(text), utf8.ValidString(text))
		}
	})
}

// TestMistakesOutOfOrder: which mistakes are told does not depend on the order in which
// they are found, and one that is found again is not counted again. No more of them are kept
// on the way than are told at the end.
func TestMistakesOutOfOrder(t *testing.T) {
	m := &mistakes{file: "f"}
	for range 2 {
		for line := 100; line > 0; line-- {
			if m.add(line, "wrong"); len(m.errs) > maxMistakes {
				t.Fatalf("%d mistakes are kept", len(m.errs))
			}
		}
	}
	lines := told(t, m.err())
	if len(lines) != maxMistakes+1 || lines[0] != "f:1: wrong" || lines[maxMistakes-1] != "f:20: wrong" ||
		lines[maxMistakes] != "f:21: from here on there are 80 more mistakes" {
		t.Errorf("got %q", lines)
	}
}
