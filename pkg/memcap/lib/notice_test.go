// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"os"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// A container has the notice's file mounted: so it keeps its inode, is empty until there is something to tell, and
// goes with the allocation's pages.
func TestNotice(t *testing.T) {
	p, err := OpenPages(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	by := time.Date(2026, 11, 30, 1, 2, 3, 999, time.FixedZone("x", 3600))
	if err := p.SetNotice("k", by); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("without a notice: %v", err)
	}
	path, err := p.Notice("k")
	if err != nil {
		t.Fatal(err)
	}
	mounted, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer mounted.Close()
	says := func() string {
		b := make([]byte, 100)
		n, _ := mounted.ReadAt(b, 0)
		return string(b[:n])
	}
	written := func() time.Time {
		i, err := mounted.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return i.ModTime()
	}
	const text = "2026-11-30T00:02:03Z\n"
	for _, step := range []struct {
		name string
		do   func() error
		want string
	}{
		{"at first", func() error { return nil }, ""},
		{"a time", func() error { return p.SetNotice("k", by) }, text},
		{"a later time", func() error { return p.SetNotice("k", by.Add(7*time.Second)) }, "2026-11-30T00:02:10Z\n"},
		{"taken back", func() error { return p.SetNotice("k", time.Time{}) }, ""},
		{"a time again", func() error { return p.SetNotice("k", by) }, text},
		{"the next container", func() error { _, err := p.Notice("k"); return err }, ""},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if got := says(); got != step.want {
			t.Errorf("%s: it says %q, want %q", step.name, got, step.want)
		}
	}
	// A program that looks all the time sees a whole line or nothing.
	stop, looked := make(chan struct{}), make(chan map[string]bool)
	go func() {
		seen := map[string]bool{}
		defer func() { looked <- seen }()
		for {
			select {
			case <-stop:
				return
			default:
				seen[says()] = true
			}
		}
	}()
	for i := range 2000 {
		at := by
		if i%2 == 0 {
			at = time.Time{}
		}
		if err := p.SetNotice("k", at); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	for word := range <-looked {
		if word != "" && word != text {
			t.Errorf("a program reads %q", word)
		}
	}
	if i, _ := os.Stat(path); i.Mode().Perm() != 0o644 {
		t.Errorf("mode %v: a container's users cannot read it", i.Mode())
	}
	if err := p.SetNotice("k", by); err != nil {
		t.Fatal(err)
	}
	at := written()
	time.Sleep(20 * time.Millisecond)
	if err := p.SetNotice("k", by); err != nil || !written().Equal(at) {
		t.Errorf("the same words are written again: %v", err)
	}
	if err := p.Remove("k"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := p.Notice("../k"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a key with a path: %v", err)
	}
}
