// SPDX-License-Identifier: Apache-2.0

package nfd

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func write(t *testing.T, dir string, f Features) {
	t.Helper()
	if err := Write(dir, f); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, dir string, want ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(text)); !slices.Equal(got, want) {
		t.Errorf("the file says %q, want %q", got, want)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	labels := map[string]string{"example.com/b": "2", "example.com/a": "1", "example.com/empty": ""}
	write(t, dir, Features{Labels: labels})
	expect(t, dir, "example.com/a=1", "example.com/b=2", "example.com/empty=")
	before, err := os.Stat(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	if before.Mode().Perm() != 0o644 {
		t.Errorf("mode %v: the worker may not be root", before.Mode())
	}
	write(t, dir, Features{Labels: labels})
	if after, err := os.Stat(filepath.Join(dir, file)); err != nil || !os.SameFile(before, after) {
		t.Errorf("the same labels wrote another file (%v)", err)
	}
	delete(labels, "example.com/a")
	write(t, dir, Features{Labels: labels})
	expect(t, dir, "example.com/b=2", "example.com/empty=")
	if after, err := os.Stat(filepath.Join(dir, file)); err != nil || os.SameFile(before, after) {
		t.Errorf("the file was changed in its place, where a reader may see half of it (%v)", err)
	}
	write(t, dir, Features{Labels: map[string]string{"example.com/new": "1"}, Keep: true})
	expect(t, dir, "example.com/b=2", "example.com/empty=", "example.com/new=1")
	write(t, dir, Features{})
	expect(t, dir)
}

func TestGuests(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "gfd", "# +no-feature\nnvidia.com/gpu.count=7\n\nflag\n")
	put(t, dir, ".hidden", "nvidia.com/gpu.family=theirs\n")
	guests := map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/gpu.family": "ours", "nvidia.com/gpu.memory": "1", "flag": "no"}
	on := map[string]string{"nvidia.com/gpu.memory": "2"}
	write(t, dir, Features{Guests: guests, Node: on})
	expect(t, dir, "nvidia.com/gpu.family=ours")
	// What is in the file already is on the Node because of it.
	on["nvidia.com/gpu.family"] = "ours"
	guests["nvidia.com/gpu.family"] = "other"
	write(t, dir, Features{Guests: guests, Node: on})
	expect(t, dir, "nvidia.com/gpu.family=other")
	// They become free.
	put(t, dir, "gfd", "")
	delete(on, "nvidia.com/gpu.memory")
	write(t, dir, Features{Guests: guests, Node: on})
	expect(t, dir, "flag=no", "nvidia.com/gpu.count=8", "nvidia.com/gpu.family=other", "nvidia.com/gpu.memory=1")
	// One is taken while nothing else is known.
	put(t, dir, "gfd", "nvidia.com/gpu.count=7\n")
	write(t, dir, Features{Guests: guests, Keep: true})
	expect(t, dir, "flag=no", "nvidia.com/gpu.family=other", "nvidia.com/gpu.memory=1")
	// The agent's own is not left to anybody.
	put(t, dir, "gfd", "example.com/a=theirs\n")
	write(t, dir, Features{Labels: map[string]string{"example.com/a": "ours"}, Guests: map[string]string{"example.com/a": "guest"}})
	expect(t, dir, "example.com/a=ours")
}

// Files that Node Feature Discovery does not read take nothing.
func TestOthersThatAreNotRead(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "large", "nvidia.com/a=1\n"+strings.Repeat("#", maxSize))
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, t.TempDir(), "elsewhere", "")
	elsewhere := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(elsewhere, []byte("nvidia.com/b=1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere", filepath.Join(dir, "dangling")); err != nil {
		t.Fatal(err)
	}
	write(t, dir, Features{Guests: map[string]string{"nvidia.com/a": "2", "nvidia.com/b": "2"}})
	expect(t, dir, "nvidia.com/a=2") // b is theirs, behind a link
}

func TestWriteRefuses(t *testing.T) {
	dir := t.TempDir()
	many := map[string]string{}
	for i := range 2000 {
		many[fmt.Sprintf("example.com/%06d", i)] = strings.Repeat("x", 63)
	}
	for what, labels := range map[string]map[string]string{
		"a line in a value": {"example.com/a": "1\nexample.com/b=2"},
		"a line in a key":   {"example.com/a\n": "1"},
		"a comment":         {"#a": "1"},
		"no key":            {"": "1"},
		"too much":          many,
	} {
		if err := Write(dir, Features{Labels: labels}); err == nil {
			t.Errorf("%s is written", what)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v is left (%v)", entries, err)
	}
	if err := Write(filepath.Join(dir, "nowhere"), Features{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the directory: %v", err)
	}
	// What cannot be replaced leaves nothing beside it.
	if err := os.MkdirAll(filepath.Join(dir, file, "in", "the", "way"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, Features{Labels: map[string]string{"example.com/a": "1"}}); err == nil {
		t.Error("a directory was written to")
	}
	if _, err := os.Stat(filepath.Join(dir, temporary)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a temporary file is left (%v)", err)
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "gfd", "nvidia.com/a=1\n")
	write(t, dir, Features{Labels: map[string]string{"example.com/a": "1"}})
	put(t, dir, temporary, "half")
	for range 2 {
		if err := Remove(dir); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 || entries[0].Name() != "gfd" {
			t.Errorf("%v is left (%v)", entries, err)
		}
	}
	if err := Remove(filepath.Join(dir, "nowhere")); err != nil {
		t.Errorf("without the directory: %v", err)
	}
}

// What is written is read back the same, by whoever reads it.
func FuzzParse(f *testing.F) {
	f.Add("example.com/a", "1")
	f.Add("a b", "#")
	f.Add("x", "\r")
	f.Fuzz(func(t *testing.T, key, value string) {
		text, err := render(map[string]string{key: value})
		if err != nil {
			return
		}
		if got := parse(text); !maps.Equal(got, map[string]string{key: value}) {
			t.Errorf("%q=%q is read as %q", key, value, got)
		}
	})
}
