// SPDX-License-Identifier: Apache-2.0

package formats

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// working is the version that is being worked on.
const working = "v0.2.0"

var record = flag.Bool("record", false, "write the folder of the version in work anew")

// kind is a kind of what is written.
type kind struct {
	name string
	// write writes it into a version's folder, by the product's own writer where that needs no driver.
	write func(t *testing.T, dir string)
	// read reads it by the product's own reader. It fails the test on an error, and on whatever the reader logs.
	read func(t *testing.T, dir string) any
	// whole are types of which a sample has to have each field: what is read has it nowhere empty.
	whole []reflect.Type
}

// TestEarlierVersionsAreRead: what each version wrote is read by today's, without a complaint and without loss.
func TestEarlierVersionsAreRead(t *testing.T) {
	if *record {
		recordWorking(t)
	}
	versions, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(versions, func(e fs.DirEntry) bool { return e.Name() == working }) {
		t.Fatalf("testdata has no folder %s: go test ./tests/formats -record", working)
	}
	for _, v := range versions {
		t.Run(v.Name(), func(t *testing.T) {
			copied := short(t)
			if err := os.CopyFS(copied, os.DirFS(filepath.Join("testdata", v.Name()))); err != nil {
				t.Fatal(err)
			}
			found, err := filepath.Glob(filepath.Join("testdata", v.Name(), "read", "*.json"))
			if err != nil || len(found) == 0 {
				t.Fatalf("it has nothing that was read: %v", err)
			}
			for _, path := range found {
				name := strings.TrimSuffix(filepath.Base(path), ".json")
				i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
				if i < 0 {
					t.Errorf("this version reads no %s any more", name)
					continue
				}
				var want any
				if err := json.Unmarshal(read(t, path), &want); err != nil {
					t.Fatal(path, ": ", err)
				}
				for _, lost := range lost(name, want, plain(t, kinds[i].read(t, copied))) {
					t.Error(lost)
				}
			}
		})
	}
}

// TestTodayIsRecorded: the folder of the version in work is what today's program writes and reads.
func TestTodayIsRecorded(t *testing.T) {
	dir := short(t)
	writeAll(t, dir)
	kept := filepath.Join("testdata", working)
	for _, side := range [][2]string{{dir, kept}, {kept, dir}} {
		err := filepath.WalkDir(side[0], func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			name, err := filepath.Rel(side[0], path)
			if err != nil {
				return err
			}
			other, err := os.ReadFile(filepath.Join(side[1], name))
			if errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is in %s alone", name, side[0])
			} else if err != nil {
				return err
			} else if !bytes.Equal(unpacked(t, name, other), unpacked(t, name, read(t, path))) {
				t.Errorf("%s differs from what today's program writes or reads", name)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if t.Failed() {
		t.Log("if that is meant: go test ./tests/formats -record, and look at the difference")
	}
}

// TestSamplesAreWhole: each field that is kept has a value in what is recorded, so that its loss would be seen.
func TestSamplesAreWhole(t *testing.T) {
	for _, k := range kinds {
		text := string(read(t, filepath.Join("testdata", working, "read", k.name+".json")))
		for _, of := range k.whole {
			// The state has no MIG profiles: Save leaves them out.
			for _, name := range fieldsOf(of, map[reflect.Type]bool{reflect.TypeFor[gpu.Profile](): true}) {
				if name != "profiles" && !strings.Contains(text, `"`+name+`": `) {
					t.Errorf("the sample of %s has no value of %q, a field of %s or below it", k.name, name, of)
				}
			}
		}
	}
}

// unpacked returns the content of a file. How small gzip makes it may change with Go.
func unpacked(t *testing.T, name string, data []byte) []byte {
	t.Helper()
	if filepath.Ext(name) != ".gz" {
		return data
	}
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(name, ": ", err)
	}
	data, err = io.ReadAll(r)
	if err != nil {
		t.Fatal(name, ": ", err)
	}
	return data
}

// recordWorking writes the folder of the version in work. The folder of a version with a tag stays.
func recordWorking(t *testing.T) {
	t.Helper()
	tag := exec.CommandContext(t.Context(), "git", "rev-parse", "-q", "--verify", "refs/tags/"+working)
	if tag.Run() == nil {
		t.Fatalf("%s has its tag, so what it wrote never changes: name the next version in working", working)
	}
	made := short(t)
	writeAll(t, made)
	dir := filepath.Join("testdata", working)
	err := errors.Join(os.RemoveAll(dir), os.MkdirAll("testdata", 0o755), os.CopyFS(dir, os.DirFS(made)))
	if err != nil {
		t.Fatal(err)
	}
}

// writeAll writes what there is of all kinds, and what is read from it.
func writeAll(t *testing.T, dir string) {
	t.Helper()
	for _, k := range kinds {
		k.write(t, dir)
	}
	copied := short(t) // readers may change what they read
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds {
		data, err := json.MarshalIndent(plain(t, k.read(t, copied)), "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "read", k.name+".json"), append(data, '\n'))
	}
}

// plain returns a value as JSON has it.
func plain(t *testing.T, v any) (out any) {
	t.Helper()
	data, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(data, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// lost returns what of want is not in have: a field that is gone, a value that is another, a list of another
// length. have may have more fields.
func lost(path string, want, have any) (out []string) {
	switch want := want.(type) {
	case map[string]any:
		have, ok := have.(map[string]any)
		if !ok {
			return []string{path + " is lost"}
		}
		for name, v := range want {
			h, ok := have[name]
			if !ok {
				out = append(out, path+"."+name+" is lost")
				continue
			}
			out = append(out, lost(path+"."+name, v, h)...)
		}
	case []any:
		have, ok := have.([]any)
		if !ok || len(have) != len(want) {
			return []string{fmt.Sprintf("%s has another length", path)}
		}
		for i := range want {
			out = append(out, lost(fmt.Sprintf("%s[%d]", path, i), want[i], have[i])...)
		}
	default:
		if want != have {
			return []string{fmt.Sprintf("%s was %v and is read as %v", path, want, have)}
		}
	}
	slices.Sort(out)
	return out
}

func TestLostFindsEachLoss(t *testing.T) {
	want := map[string]any{"a": 1.0, "b": []any{map[string]any{"c": "x"}}}
	for _, test := range []struct {
		have any
		lost int
	}{
		{map[string]any{"a": 1.0, "b": []any{map[string]any{"c": "x", "new": true}}, "more": 1.0}, 0},
		{map[string]any{"b": []any{map[string]any{"c": "x"}}}, 1},
		{map[string]any{"a": 2.0, "b": []any{map[string]any{}}}, 2},
		{map[string]any{"a": 1.0, "b": []any{}}, 1},
		{"text", 1},
	} {
		if got := lost("it", want, test.have); len(got) != test.lost {
			t.Errorf("%v: %q, want %d losses", test.have, got, test.lost)
		}
	}
}

// short returns a folder for the test whose path is short enough for sockets below it.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "f")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o644)); err != nil {
		t.Fatal(err)
	}
}
