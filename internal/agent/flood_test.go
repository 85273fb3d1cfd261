// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"example.com/gpu-agent/internal/plan"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/pkg/gpu"
)

// lines counts those of the log that hold a text.
func (b *bench) lines(part string) (n int) {
	for line := range strings.Lines(b.log.String()) {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// TestXidsFloodTheLog: a program can have the driver report an Xid of applications in a
// loop, and one that is not ignored nearly so.
func TestXidsFloodTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		const many = 10_000
		flood := func(u gpu.UUID, xid uint64) {
			for range many {
				b.event <- gpu.Event{Kind: gpu.EventXid, GPU: u, Xid: xid, GI: -1, CI: -1}
			}
			synctest.Wait()
		}
		flood(b.outside.inv.GPUs[0].UUID, 13)
		if n := b.lines("GPU event"); n != 0 {
			t.Fatalf("%d lines of an Xid that is ignored", n)
		}
		flood(b.outside.inv.GPUs[0].UUID, 94)
		// The first one condemns the GPU; the others change nothing.
		if n := b.lines("GPU event"); n != 1+brief.Lines {
			t.Fatalf("%d lines of %d events on one GPU", n, many)
		}
		// What happens to another GPU is not left out for that.
		flood(b.outside.inv.GPUs[1].UUID, 94)
		if n := b.lines("GPU event"); n != 2*(1+brief.Lines) {
			t.Fatalf("%d lines of events on two GPUs", n)
		}
		time.Sleep(brief.Window)
		synctest.Wait()
		left := fmt.Sprintf("lines=%d", many-1-brief.Lines)
		for i := range 2 {
			if told := fmt.Sprintf("left out\" kind=xid gpu=%s %s", b.outside.inv.GPUs[i].UUID, left); b.lines(told) != 1 {
				t.Errorf("the log does not tell that %q", told)
			}
		}
	})
}

// TestFileOfMistakes: 30,000 mistakes made an outcome of megabytes, and the label stayed
// applied.
func TestFileOfMistakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		b.want("applied", fourUnits, "")
		b.SetFile("p.yaml", []byte("version: v1\npartitions:\n  default:\n"+strings.Repeat("    - {devices: all, mode: x}\n", 30_000)))
		b.want("invalid", fourUnits, "")
		m := b.message()
		if len(m) > brief.Text || !utf8.ValidString(m) || !strings.HasPrefix(m, "p.yaml:4: mode is") ||
			!strings.HasSuffix(m, "there are 29980 more mistakes; the last good partition stays in force") {
			t.Errorf("a message of %d bytes that ends in %q", len(m), m[max(0, len(m)-200):])
		}
		if n := len(b.log.String()); n > 32<<10 {
			t.Errorf("the log has %d bytes", n)
		}
	})
}

// TestHundredsOfHolders: a GPU that 200 pods hold names some of them.
func TestHundredsOfHolders(t *testing.T) {
	var holders []string
	for i := range 200 {
		holders = append(holders, fmt.Sprintf("train/job-%03d", i))
	}
	text := plan.Blocked{GPU: "GPU-0", From: "shared", To: "whole", Holders: holders}.String()
	if !strings.Contains(text, "train/job-000") || !strings.HasSuffix(text, "and 190 more") {
		t.Errorf("got %q", text)
	}
}
