// SPDX-License-Identifier: Apache-2.0

package dir_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/gpu"
)

const domain = "example.com"

func spec(t *testing.T, key string, minor int) *specs.Spec {
	t.Helper()
	s, err := cdi.Spec(domain, key, cdi.Parts{Devices: map[gpu.UUID]specs.ContainerEdits{
		"GPU-a": {DeviceNodes: []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", minor)}}},
	}}, []gpu.UUID{"GPU-a"}, cdi.Overlay{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path, domain)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func entries(t *testing.T, path string) []string {
	t.Helper()
	list, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestWriteListRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "cdi")
	d := open(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Fatalf("the directory was made as %v, %v", info, err)
	}
	keys := []string{cdi.Key("r", []string{"1"}), cdi.Key("r", []string{"2"})}
	slices.Sort(keys)
	for _, key := range slices.Backward(keys) {
		if err := d.Write(key, spec(t, key, 3)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := d.List(); err != nil || !slices.Equal(got, keys) {
		t.Errorf("List = %q, %v, want %q", got, err, keys)
	}

	// A runtime finds the device by the name that Allocate gives out.
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(path), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if cache.GetDevice(cdi.DeviceName(domain, key)) == nil {
			t.Errorf("the CDI library does not find %s; errors %v", cdi.DeviceName(domain, key), cache.GetErrors())
		}
		info, err := os.Stat(filepath.Join(path, cdi.FileName(domain, key)))
		if err != nil || info.Mode() != 0o644 {
			t.Errorf("file of %s: %v, %v", key, info, err)
		}
	}

	for range 2 {
		if err := d.Remove(keys[0]); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := d.List(); err != nil || !slices.Equal(got, keys[1:]) {
		t.Errorf("after a removal List = %q, %v", got, err)
	}
	if got := entries(t, path); len(got) != 1 {
		t.Errorf("the directory holds %q", got)
	}
}

func TestRead(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	key := cdi.Key("r", []string{"1"})
	if _, err := d.Read(key); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("no file: %v, want ErrNotFound", err)
	}
	want := spec(t, key, 5)
	if err := d.Write(key, want); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Read(key); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read back %+v, %v", got, err)
	}
	file := filepath.Join(path, cdi.FileName(domain, key))
	for _, torn := range []string{"", "{", "null", `{"cdiVersion": "0.5.0", "colour": "red"}`} {
		if err := os.WriteFile(file, []byte(torn), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Read(key); !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), file) {
			t.Errorf("of %q read %+v, %v; want ErrInvalid and the file's name", torn, got, err)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", file); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Read(key); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a link: %v, want ErrInvalid", err)
	}
	if _, err := d.Read("../x"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("no key: %v, want ErrInvalid", err)
	}
}

func TestEqualContentIsNotWrittenAgain(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	key := cdi.Key("r", []string{"1"})
	file := filepath.Join(path, cdi.FileName(domain, key))
	stat := func() os.FileInfo {
		t.Helper()
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	write := func(minor int) os.FileInfo {
		t.Helper()
		if err := d.Write(key, spec(t, key, minor)); err != nil {
			t.Fatal(err)
		}
		return stat()
	}
	first := write(1)
	if !os.SameFile(first, write(1)) {
		t.Error("the same content was written again")
	}
	second := write(2)
	if os.SameFile(first, second) {
		t.Error("other content was written into the file that runtimes may be reading")
	}
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if info := write(2); info.Mode() != 0o644 {
		t.Errorf("a file that others cannot read was left as %v", info.Mode())
	}
}

func TestOtherFilesStayUntouched(t *testing.T) {
	path := t.TempDir()
	key := cdi.Key("r", []string{"1"})
	own := "." + cdi.FileName(domain, key) + ".abc.tmp"
	foreign := []string{
		"nvidia.yaml", "example.com-gpu.json", ".hidden.tmp", "." + cdi.FileName("other.org", key) + ".abc.tmp",
		cdi.FileName("other.org", key), cdi.FileName(domain, key) + ".tmp", own + ".bak",
	}
	for _, name := range append(foreign, own) {
		if err := os.WriteFile(filepath.Join(path, name), []byte("left"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	linked := "." + cdi.FileName(domain, key) + ".link.tmp"
	if err := os.Symlink("nvidia.yaml", filepath.Join(path, linked)); err != nil {
		t.Fatal(err)
	}
	d := open(t, path)
	if keys, err := d.List(); err != nil || len(keys) != 0 {
		t.Errorf("List = %q, %v", keys, err)
	}
	want := append(slices.Clone(foreign), linked)
	slices.Sort(want)
	if got := entries(t, path); !slices.Equal(got, want) {
		t.Errorf("the directory holds\n%q, want\n%q", got, want)
	}
	for _, name := range foreign {
		if data, err := os.ReadFile(filepath.Join(path, name)); err != nil || string(data) != "left" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

func TestLinksAreNotFollowed(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(outside, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := t.TempDir()
	key := cdi.Key("r", []string{"1"})
	file := filepath.Join(path, cdi.FileName(domain, key))
	link := func() {
		t.Helper()
		if err := os.Symlink(outside, file); err != nil {
			t.Fatal(err)
		}
	}
	link()
	d := open(t, path)
	if keys, err := d.List(); err != nil || len(keys) != 0 {
		t.Errorf("List counts a link: %q, %v", keys, err)
	}
	if err := d.Write(key, spec(t, key, 1)); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(file); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link still stands: %v, %v", info, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	link()
	if err := d.Remove(key); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(outside); err != nil || string(data) != "precious" {
		t.Errorf("the file behind the link: %q, %v", data, err)
	}
}

func TestDirectoryThatVanishesIsMadeAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi")
	d := open(t, path)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	key := cdi.Key("r", []string{"1"})
	if err := d.Write(key, spec(t, key, 1)); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, path); len(got) != 1 {
		t.Errorf("the directory holds %q", got)
	}
}

func TestRefusals(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	key := cdi.Key("r", []string{"1"})

	bad := spec(t, key, 1)
	bad.Devices[0].ContainerEdits.Hooks = []*specs.Hook{{HookName: "whenever", Path: "/hook"}}
	if err := d.Write(key, bad); !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), cdi.FileName(domain, key)) {
		t.Errorf("an invalid spec: %v; want ErrInvalid and the file's name", err)
	}
	if err := d.Write("../../etc/passwd", spec(t, key, 1)); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a key with slashes: %v", err)
	}
	if err := d.Remove("nvidia"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("removing what is no key: %v", err)
	}
	if got := entries(t, path); len(got) != 0 {
		t.Errorf("refused writes left %q", got)
	}

	blocked := filepath.Join(path, cdi.FileName(domain, key))
	if err := os.MkdirAll(filepath.Join(blocked, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := d.Write(key, spec(t, key, 1)); err == nil || !strings.Contains(err.Error(), blocked) {
		t.Errorf("a directory in the way: %v; want its name", err)
	}
	if got := entries(t, path); len(got) != 1 {
		t.Errorf("a failed write left %q", got)
	}

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Open(file, domain); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file instead of a directory: %v", err)
	}
	if _, err := dir.Open("relative", domain); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a relative path: %v", err)
	}
	if _, err := dir.Open(path, "3m.com"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a bad domain: %v", err)
	}
}

// A reader that looks all the time must see whole files only, and a runtime
// that lists the directory no half-written name.
func TestReadersSeeWholeFiles(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	key := cdi.Key("r", []string{"1"})
	file := filepath.Join(path, cdi.FileName(domain, key))
	done := make(chan struct{})
	var writers, reader sync.WaitGroup
	reader.Add(1)
	go func() {
		defer reader.Done()
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := cdilib.ReadSpec(file, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
				return
			}
			list, err := os.ReadDir(path)
			if err != nil {
				t.Error(err)
				return
			}
			for _, e := range list {
				if ext := filepath.Ext(e.Name()); (ext == ".json" || ext == ".yaml") && e.Name() != filepath.Base(file) {
					t.Errorf("a runtime would read %s", e.Name())
				}
			}
		}
	}()
	for w := range 2 {
		writers.Add(1)
		go func() {
			defer writers.Done()
			for i := range 100 {
				if err := d.Write(key, spec(t, key, 100*w+i)); err != nil {
					t.Error(err)
				}
				if i%10 == 9 {
					if err := d.Remove(key); err != nil {
						t.Error(err)
					}
				}
			}
		}()
	}
	writers.Wait()
	close(done)
	reader.Wait()
}
