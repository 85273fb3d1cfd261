// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// Checkpoints as kubelet 1.36.3 writes them, to the byte.
const (
	neverAllocated = `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`
	allReleased    = `{"Data":{"PodDeviceEntries":[],"RegisteredDevices":null},"Checksum":3252601439}`
	threeHolders   = `{"Data":{"PodDeviceEntries":[` +
		`{"PodUID":"5f8ae0a4-1111-2222-3333-444455556666","ContainerName":"main","ResourceName":"example.com/gpu-mem","DeviceIDs":{"0":["GPU-a::1","GPU-a::0"],"1":["GPU-a::7","GPU-a::1"]},"AllocResp":"Ij0KJmV4YW1wbGUuY29tL2dwdS1jbGFpbS4wMTIzNDU2Nzg5YWJjZGVmEhNleGFtcGxlLmNvbS9ncHUtbWVtKiIKIGV4YW1wbGUuY29tL2dwdT0wMTIzNDU2Nzg5YWJjZGVm"},` +
		`{"PodUID":"5f8ae0a4-1111-2222-3333-444455556666","ContainerName":"init","ResourceName":"example.com/gpu","DeviceIDs":{"-1":["GPU-b"]},"AllocResp":null},` +
		`{"PodUID":"0123abcd","ContainerName":"main","ResourceName":"example.com/gpu","DeviceIDs":null,"AllocResp":""}],` +
		`"RegisteredDevices":{"example.com/gpu":null,"example.com/gpu-mem":["GPU-a::0"]}},"Checksum":2433020717}`
	// Before Kubernetes 1.20.
	plainLists = `{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r/x","DeviceIDs":["b","a","b"],"AllocResp":"AA=="}],"RegisteredDevices":{"r/x":["a","b"]}},"Checksum":1}`
)

var heldByThree = []Entry{
	{"0123abcd", "main", "example.com/gpu", []string{}},
	{"5f8ae0a4-1111-2222-3333-444455556666", "init", "example.com/gpu", []string{"GPU-b"}},
	{"5f8ae0a4-1111-2222-3333-444455556666", "main", "example.com/gpu-mem", []string{"GPU-a::0", "GPU-a::1", "GPU-a::7"}},
}

// kubeletDir returns a kubelet's directory and the path of its checkpoint, which
// does not exist yet.
func kubeletDir(t testing.TB) (dir, path string) {
	t.Helper()
	dir = t.TempDir()
	path = filepath.Join(dir, "device-plugins", "kubelet_internal_checkpoint")
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir, path
}

func TestCheckpoint(t *testing.T) {
	entry := func(fields string) string { return `{"Data":{"PodDeviceEntries":[{` + fields + `}]}}` }
	for _, test := range []struct {
		name, data string
		want       []Entry // nil: gpu.ErrInvalid
	}{
		{"kubelet 1.36.3, nothing yet", neverAllocated, []Entry{}},
		{"kubelet 1.36.3, nothing left", allReleased, []Entry{}},
		{"kubelet 1.36.3", threeHolders, heldByThree},
		{"before 1.20", plainLists, []Entry{{"u", "c", "r/x", []string{"a", "b"}}}},
		{"a later kubelet's fields", `{"Version":"v9","Data":{"Extra":[1],"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":["a"]},"Claims":{"x":1},"AllocResp":{"not":"bytes"}}]},"Checksum":"crc32c:00"}`,
			[]Entry{{"u", "c", "r", []string{"a"}}}},
		{"twice the same", `{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["b"]},{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["a"]}]}}`,
			[]Entry{{"u", "c", "r", []string{"a"}}, {"u", "c", "r", []string{"b"}}}},

		{"empty", "", nil},
		{"zeros, as after a power loss", strings.Repeat("\x00", 300), nil},
		{"null", "null", nil},
		{"another file", `{"kind":"Pod"}`, nil},
		{"no account", `{"Data":{"RegisteredDevices":{}},"Checksum":1}`, nil},
		{"two values", neverAllocated + neverAllocated, nil},
		{"a null entry", `{"Data":{"PodDeviceEntries":[null]}}`, nil},
		{"entries are no list", `{"Data":{"PodDeviceEntries":{}}}`, nil},
		{"no pod", entry(`"ContainerName":"c","ResourceName":"r","DeviceIDs":["a"]`), nil},
		{"no container", entry(`"PodUID":"u","ResourceName":"r","DeviceIDs":["a"]`), nil},
		{"no resource", entry(`"PodUID":"u","ContainerName":"c","DeviceIDs":["a"]`), nil},
		{"no devices", entry(`"PodUID":"u","ContainerName":"c","ResourceName":"r"`), nil},
		{"devices are a string", entry(`"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":"a"`), nil},
		{"devices are numbers", entry(`"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":[1]`), nil},
		{"a device is null", entry(`"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":["a",null]}`), nil},
		{"devices by node by node", entry(`"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"0":{"1":["a"]}}`), nil},
		{"nested without end", `{"Data":{"PodDeviceEntries":` + strings.Repeat("[", 1<<20), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, path := kubeletDir(t)
			write(t, path, test.data)
			got, err := ReadCheckpoint(dir)
			if test.want == nil {
				if !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), path) {
					t.Errorf("%+v, %v, want gpu.ErrInvalid and the path", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got.Entries, test.want) {
				t.Errorf("got  %+v\nwant %+v", got.Entries, test.want)
			}
			if got.Stamp != CheckpointStamp(dir) || got.Stamp.Size != int64(len(test.data)) {
				t.Errorf("stamp %+v, and the file's is %+v", got.Stamp, CheckpointStamp(dir))
			}
		})
	}
}

// TestRegisteredDevices: which devices a plugin's list has can be compared, in whatever order
// the kubelet writes them, and what cannot be understood spoils nothing else.
func TestRegisteredDevices(t *testing.T) {
	registered := func(text string) map[string]Registered {
		t.Helper()
		cp, err := decodeCheckpoint([]byte(`{"Data":{"PodDeviceEntries":null` + text + `},"Checksum":1}`))
		if err != nil {
			t.Fatal(err)
		}
		return cp.Registered
	}
	of := func(ids string) Registered { return registered(`,"RegisteredDevices":{"r":` + ids + `}`)["r"] }
	if a, b := of(`["a","b","c"]`), of(`["c","a","b"]`); a != b || a.N != 3 {
		t.Errorf("%+v and %+v in another order", a, b)
	}
	for _, other := range []string{`["a","b","d"]`, `["a","b"]`, `["a","b","c","c"]`, `[]`, `null`} {
		if of(other) == of(`["a","b","c"]`) {
			t.Errorf("%s is taken for a, b, c", other)
		}
	}
	for text, known := range map[string]bool{``: false, `,"RegisteredDevices":null`: true, `,"RegisteredDevices":{}`: true, `,"RegisteredDevices":{"r":"all"}`: false} {
		if got := registered(text); len(got) > 0 || (got != nil) != known {
			t.Errorf("%q: %v, want known %v", text, got, known)
		}
	}
}

// A file that is being written in place is never taken for a shorter account.
func TestHalfACheckpoint(t *testing.T) {
	for n := range len(threeHolders) {
		if got, err := decodeCheckpoint([]byte(threeHolders[:n])); err == nil {
			t.Fatalf("%d of %d bytes are taken for %+v", n, len(threeHolders), got)
		}
	}
}

func TestNoCheckpoint(t *testing.T) {
	dir, path := kubeletDir(t)
	for _, dir := range []string{dir, filepath.Join(dir, "no-kubelet-here")} {
		if _, err := ReadCheckpoint(dir); !errors.Is(err, gpu.ErrNotFound) || errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%v, want gpu.ErrNotFound", err)
		}
		if got := CheckpointStamp(dir); got != (Stamp{}) {
			t.Errorf("stamp %+v of no file", got)
		}
	}

	must(t, os.Mkdir(path, 0o755))
	if _, err := ReadCheckpoint(dir); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a directory: %v", err)
	}
	must(t, os.Remove(path))
	must(t, syscall.Mkfifo(path, 0o600)) // reading it would wait for ever
	if _, err := ReadCheckpoint(dir); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a FIFO: %v", err)
	}
	must(t, os.Remove(path))
	write(t, path, "")
	must(t, os.Truncate(path, 1<<40)) // sparse
	if _, err := ReadCheckpoint(dir); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("1 TiB: %v", err)
	}
}

func TestCheckpointStamp(t *testing.T) {
	dir, path := kubeletDir(t)
	seen := []Stamp{{}}
	differs := func(what string) {
		t.Helper()
		stamp := CheckpointStamp(dir)
		if slices.Contains(seen, stamp) {
			t.Errorf("%s: the stamp is one seen before, %+v", what, stamp)
		}
		if again := CheckpointStamp(dir); again != stamp {
			t.Errorf("%s: %+v, and without a change %+v", what, stamp, again)
		}
		seen = append(seen, stamp)
	}
	write(t, path, neverAllocated)
	differs("first writing")
	replace(t, path, neverAllocated) // the same content, and often the same time
	differs("second writing")
	write(t, path, threeHolders)
	differs("written in place")
}

// replace writes a file as the kubelet does.
func replace(t testing.TB, path, data string) {
	file, err := os.CreateTemp(filepath.Dir(path), ".")
	if err == nil {
		_, err = file.WriteString(data)
		err = errors.Join(err, file.Close(), os.Rename(file.Name(), path))
	}
	if err != nil {
		t.Error(err)
	}
}

// Whoever reads while the kubelet writes sees one account or the other.
func TestCheckpointReplacedWhileRead(t *testing.T) {
	dir, path := kubeletDir(t)
	write(t, path, neverAllocated)
	var writer sync.WaitGroup
	done := make(chan struct{})
	writer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				replace(t, path, []string{threeHolders, neverAllocated}[i%2])
			}
		}
	})
	sizes := map[int]bool{}
	for i := 0; i < 500 || len(sizes) < 2 && i < 1e6; i++ {
		got, err := ReadCheckpoint(dir)
		if err != nil {
			t.Error(err)
			break
		}
		if len(got.Entries) != 0 && !reflect.DeepEqual(got.Entries, heldByThree) {
			t.Errorf("neither account: %+v", got.Entries)
			break
		}
		if want := int64(len(neverAllocated)); len(got.Entries) == 0 && got.Stamp.Size != want {
			t.Errorf("the stamp of a file of %d bytes with the content of one of %d", got.Stamp.Size, want)
			break
		}
		sizes[len(got.Entries)] = true
	}
	close(done)
	writer.Wait()
	if len(sizes) < 2 && !t.Failed() {
		t.Error("the file never changed: nothing was tested")
	}
}

// FuzzCheckpoint: what is accepted is in order and names every holder whole, and
// reads the same when it is written in today's form.
func FuzzCheckpoint(f *testing.F) {
	for _, seed := range []string{neverAllocated, allReleased, threeHolders, plainLists} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decodeCheckpoint(data)
		if err != nil {
			if got.Entries != nil || got.Registered != nil {
				t.Fatalf("%+v beside %v", got, err)
			}
			return
		}
		var again strings.Builder
		again.WriteString(`{"Data":{"PodDeviceEntries":[`)
		for i, e := range got.Entries {
			if e.PodUID == "" || e.Container == "" || e.Resource == "" || e.IDs == nil || slices.Contains(e.IDs, "") {
				t.Fatalf("half an entry: %+v", e)
			}
			if !slices.IsSorted(e.IDs) || len(slices.Compact(slices.Clone(e.IDs))) != len(e.IDs) {
				t.Fatalf("IDs %q are not sorted or not once", e.IDs)
			}
			if i > 0 {
				again.WriteByte(',')
			}
			fmt.Fprintf(&again, `{"PodUID":%s,"ContainerName":%s,"ResourceName":%s,"DeviceIDs":{"0":%s}}`,
				quote(t, e.PodUID), quote(t, e.Container), quote(t, e.Resource), quote(t, e.IDs))
		}
		again.WriteString(`]}}`)
		if second, err := decodeCheckpoint([]byte(again.String())); err != nil || !reflect.DeepEqual(second.Entries, got.Entries) {
			t.Fatalf("%+v reads as %+v, %v when written again", got, second, err)
		}
	})
}

func quote(t *testing.T, v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func BenchmarkCheckpoint(b *testing.B) {
	// 16 GPUs of 80 units, all held, four units a pod.
	dir, path := kubeletDir(b)
	var entries, registered []string
	for pod := range 320 {
		var ids []string
		for unit := range 4 {
			ids = append(ids, fmt.Sprintf(`"GPU-5e0f8c1a-0000-1111-2222-%012d::%d"`, pod/20, pod%20*4+unit))
		}
		registered = append(registered, ids...)
		entries = append(entries, fmt.Sprintf(`{"PodUID":"5f8ae0a4-1111-2222-3333-%012d","ContainerName":"main","ResourceName":"example.com/gpu-mem","DeviceIDs":{"0":[%s]},"AllocResp":"%s"}`,
			pod, strings.Join(ids, ","), strings.Repeat("QUFB", 40)))
	}
	replace(b, path, `{"Data":{"PodDeviceEntries":[`+strings.Join(entries, ",")+`],"RegisteredDevices":{"example.com/gpu-mem":[`+strings.Join(registered, ",")+`]}},"Checksum":1}`)
	b.ReportAllocs()
	for b.Loop() {
		if got, err := ReadCheckpoint(dir); err != nil || len(got.Entries) != 320 {
			b.Fatal(len(got.Entries), err)
		}
	}
}
