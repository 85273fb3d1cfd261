// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// keptPages are pages as versions have made them, byte by byte. A container keeps the library and the pages of the
// version that it was started by, and a later agent reads and writes these pages under it. So no place of a
// released version's pages may come to mean something else. The numbers are places, and not today's constants.
var keptPages = []struct {
	version           string
	limit, usage      string
	limits, used      map[int]uint64
	percent           int
	bytes, bound      uint64
	asks, waits, peak uint64
}{{
	version: "v0.1.0", limit: "GPUCAP02", usage: "GPUUSE05",
	limits: map[int]uint64{8: 5 << 30, 16: 364 << 20, 24: 250, 96: 77, 104: 1_700_000_000_000_000_000, 112: 64 << 20,
		136: 5 << 30, 240: 26},
	used:  map[int]uint64{8: 77, 64: 3 << 30 / 512, 128: 4, 144: 4 << 30, 224: 6},
	bytes: 5 << 30, percent: 26, bound: 3 << 30, asks: 4, waits: 6, peak: 4 << 30,
}}

func TestPagesOfEarlierVersions(t *testing.T) {
	for _, v := range keptPages {
		t.Run(v.version, func(t *testing.T) {
			dir := t.TempDir()
			pages, err := OpenPages(dir)
			if err != nil {
				t.Fatal(err)
			}
			made := func(magic string, size int, values map[int]uint64) []byte {
				b := make([]byte, size)
				copy(b, magic)
				for at, value := range values {
					binary.LittleEndian.PutUint64(b[at:], value)
				}
				return b
			}
			b := made(v.limit, 4096, v.limits)
			copy(b[32:], aGPU)
			limit := filepath.Join(dir, "cap/limits", aKey, string(aGPU))
			usage := filepath.Join(dir, "cap/usage", aKey, string(aGPU))
			err = errors.Join(os.MkdirAll(filepath.Dir(limit), 0o755), os.MkdirAll(filepath.Dir(usage), 0o755),
				os.WriteFile(limit, b, 0o644), os.WriteFile(usage, made(v.usage, 4096+16384*128, v.used), 0o666))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := pages.Limit(aKey, aGPU); got != v.bytes || err != nil {
				t.Errorf("the limit is read as %d, %v, want %d", got, err, v.bytes)
			}
			if got, err := pages.Percent(aKey, aGPU); got != v.percent || err != nil {
				t.Errorf("the share is read as %d, %v, want %d", got, err, v.percent)
			}
			u, err := pages.OpenUsage(aKey, aGPU)
			if err != nil {
				t.Fatal(err)
			}
			defer u.Close()
			c, err := u.Read()
			if err != nil || c.Bound != v.bound || c.Asks != v.asks || c.Waits != v.waits || c.Peak != v.peak {
				t.Errorf("the counters are read as %+v, %v", c, err)
			}
			// The agent writes the same limit again, as at each start. The page that containers have mapped
			// stays, and every byte of it.
			before := inodeOfFile(t, limit)
			since := time.Unix(0, 1_700_000_000_000_000_000)
			again := Limit{GPU: aGPU, Bytes: v.bytes, Context: 300 << 20, Code: 64 << 20, Percent: v.percent,
				Since: since}
			if err := writeLimit(limit, 250*time.Millisecond, again, true, 0); err != nil {
				t.Fatal(err)
			}
			after, err := os.ReadFile(limit)
			if err != nil {
				t.Fatal(err)
			}
			if inodeOfFile(t, limit) != before || string(after) != string(b) {
				t.Errorf("the page was replaced or changed:\n%x\n%x", b[:256], after[:256])
			}
		})
	}
}

func inodeOfFile(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}
