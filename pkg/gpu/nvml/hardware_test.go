// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

func TestIsGPUNode(t *testing.T) {
	for name, want := range map[string]bool{
		"nvidia0": true, "nvidia15": true, "nvidia": false, "nvidiactl": false, "nvidia-uvm": false,
		"nvidia0x": false, "nvidia-1": false, "xnvidia0": false, "": false, "nvidia-caps": false,
	} {
		if got := isGPUNode(name); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}

// inotifyEvent is an event as the kernel writes it.
func inotifyEvent(mask uint32, name string) []byte {
	b := make([]byte, unix.SizeofInotifyEvent+(len(name)+16)/16*16)
	binary.NativeEndian.PutUint32(b[4:], mask)
	binary.NativeEndian.PutUint32(b[12:], uint32(len(b)-unix.SizeofInotifyEvent))
	copy(b[unix.SizeofInotifyEvent:], name)
	return b
}

func TestNodeChanges(t *testing.T) {
	join := func(events ...[]byte) (all []byte) {
		for _, e := range events {
			all = append(all, e...)
		}
		return all
	}
	for _, c := range []struct {
		name       string
		events     []byte
		gpus, over bool
	}{
		{"nothing", nil, false, false},
		{"others' nodes", join(inotifyEvent(unix.IN_CREATE, "loop0"), inotifyEvent(unix.IN_DELETE, "nvidia-modeset")), false, false},
		{"a GPU's among them", join(inotifyEvent(unix.IN_CREATE, "loop0"), inotifyEvent(unix.IN_CREATE, "nvidia3"), inotifyEvent(unix.IN_CREATE, "loop1")), true, false},
		{"too many", inotifyEvent(unix.IN_Q_OVERFLOW, ""), true, false},
		{"the directory is gone", inotifyEvent(unix.IN_DELETE_SELF, ""), false, true},
		{"a torn one", inotifyEvent(unix.IN_CREATE, "nvidia3")[:20], false, false},
	} {
		if gpus, over := nodeChanges(c.events); gpus != c.gpus || over != c.over {
			t.Errorf("%s: %v, %v, want %v, %v", c.name, gpus, over, c.gpus, c.over)
		}
	}
}

// tree is a machine of plain files.
type tree struct{ *components }

func newTree(t *testing.T, look time.Duration) tree {
	root := t.TempDir()
	d := tree{newComponents(&session{opts: Options{DevRoot: root, ProcRoot: filepath.Join(root, "proc"), Look: look}})}
	d.set(t, "dev/nvidiactl")
	return d
}

func (d tree) set(t *testing.T, path string) {
	t.Helper()
	path = filepath.Join(d.opts.DevRoot, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (d tree) remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(d.opts.DevRoot, path)); err != nil {
		t.Fatal(err)
	}
}

func TestFollow(t *testing.T) {
	const never = time.Hour
	for _, c := range []struct {
		name string
		look time.Duration
		// do changes the machine, and returns how it is then. It may await
		// changes in between.
		do func(t *testing.T, d tree, next func(want string))
	}{
		{"a node comes and goes", never, func(t *testing.T, d tree, next func(string)) {
			d.set(t, "dev/nvidia0")
			next("nvidia0")
			d.set(t, "dev/nvidia-uvm") // nobody's business
			d.set(t, "dev/nvidia1")
			next("nvidia0 nvidia1")
			d.remove(t, "dev/nvidia0")
			next("nvidia1")
		}},
		{"the kernel's list", time.Millisecond, func(t *testing.T, d tree, next func(string)) {
			d.set(t, "proc/driver/nvidia/gpus/0000:07:00.0")
			next("0000:07:00.0")
			d.set(t, "proc/driver/nvidia/gpus/0000:0a:00.0")
			next("0000:07:00.0 0000:0a:00.0")
			d.remove(t, "proc/driver/nvidia")
			next("")
		}},
		{"a directory of nodes that is made anew", time.Millisecond, func(t *testing.T, d tree, next func(string)) {
			d.set(t, "dev/nvidia0")
			next("nvidia0")
			d.remove(t, "dev")
			next("")
			d.set(t, "dev/nvidia1")
			next("nvidia1")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newTree(t, c.look)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			changes := d.follow(ctx, d.hardware())
			c.do(t, d, func(want string) {
				t.Helper()
				for { // removal of a tree may show in parts
					now, ok := <-changes
					if !ok {
						t.Fatalf("in vain awaited %q", want)
					}
					if now == want {
						return
					}
				}
			})
			cancel()
			for range changes { // it ends
			}
		})
	}
}

// What changed before anybody followed is told too, and what did not is not.
func TestFollowFromBefore(t *testing.T) {
	d := newTree(t, time.Hour)
	last := d.hardware()
	d.set(t, "dev/nvidia7")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if now := <-d.follow(ctx, last); now != "nvidia7" {
		t.Errorf("changed to %q, want nvidia7", now)
	}
	quiet, stop := context.WithCancel(t.Context())
	changes := d.follow(quiet, d.hardware())
	d.set(t, "dev/null")
	stop()
	for now := range changes {
		t.Errorf("changed to %q, and has not", now)
	}
}

func TestPresent(t *testing.T) {
	d := newTree(t, time.Hour)
	dev := gpu.Device{Minor: 2, PCI: "00000000:0a:00.0"}
	if d.present(dev) {
		t.Error("there without a node")
	}
	d.set(t, "dev/nvidia2")
	if !d.present(dev) {
		t.Error("not there with a node and no list")
	}
	d.set(t, "proc/driver/nvidia/gpus/0000:07:00.0")
	if d.present(dev) {
		t.Error("there, and not in the kernel's list: a node outlives its GPU")
	}
	d.set(t, "proc/driver/nvidia/gpus/0000:0A:00.0")
	if !d.present(dev) {
		t.Error("not there, and in the kernel's list")
	}
}

func TestIdentity(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path+".tmp", []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	lib := write("lib.so", "one")
	id, err := identify(lib)
	if err != nil {
		t.Fatal(err)
	}
	is := func(want bool, what string) {
		t.Helper()
		if got, err := id.is(lib); got != want || err != nil {
			t.Errorf("%s: %v, %v, want %v", what, got, err, want)
		}
	}
	is(true, "the same file")
	write("lib.so", "one")
	is(true, "the same content in another file")
	write("lib.so", "two")
	is(false, "another content of the same length")
	if err := os.Remove(lib); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(write("lib.so.1", "one"), lib); err != nil {
		t.Fatal(err)
	}
	is(true, "a link to the same content")
	write("lib.so.1", "two")
	is(false, "a link to another")
	if _, err := id.is(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// The linker's libraries are found in the memory map by their paths.
func TestMapped(t *testing.T) {
	if got := mapped(); got != libraryName && !strings.HasSuffix(got, "/"+libraryName) {
		t.Errorf("mapped at %s", got)
	}
}

func TestRecovery(t *testing.T) {
	value := func(n uint32) (v [8]byte) {
		binary.NativeEndian.PutUint32(v[:], n)
		return v
	}
	unsigned := uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
	for _, c := range []struct {
		name  string
		field nvml.FieldValue
		call  nvml.Return
		want  gpu.Recovery
		ret   nvml.Return
	}{
		{"none", nvml.FieldValue{ValueType: unsigned}, nvml.SUCCESS, gpu.RecoveryNone, nvml.SUCCESS},
		{"reset", nvml.FieldValue{ValueType: unsigned, Value: value(1)}, nvml.SUCCESS, gpu.RecoveryReset, nvml.SUCCESS},
		{"of the bus", nvml.FieldValue{ValueType: unsigned, Value: value(6)}, nvml.SUCCESS, gpu.RecoveryReset, nvml.SUCCESS},
		{"of the system", nvml.FieldValue{ValueType: unsigned, Value: value(7)}, nvml.SUCCESS, gpu.RecoveryReboot, nvml.SUCCESS},
		{"a newer one", nvml.FieldValue{ValueType: unsigned, Value: value(99)}, nvml.SUCCESS, "recovery action 99 of the driver", nvml.SUCCESS},
		{"a driver without the field", nvml.FieldValue{NvmlReturn: uint32(nvml.ERROR_INVALID_ARGUMENT)}, nvml.SUCCESS, gpu.RecoveryUnknown, nvml.ERROR_NOT_SUPPORTED},
		{"a card without it", nvml.FieldValue{NvmlReturn: uint32(nvml.ERROR_NOT_SUPPORTED)}, nvml.SUCCESS, gpu.RecoveryUnknown, nvml.ERROR_NOT_SUPPORTED},
		{"the field fails", nvml.FieldValue{NvmlReturn: uint32(nvml.ERROR_GPU_IS_LOST)}, nvml.SUCCESS, gpu.RecoveryUnknown, nvml.ERROR_GPU_IS_LOST},
		{"a value of another type", nvml.FieldValue{Value: value(1)}, nvml.SUCCESS, gpu.RecoveryUnknown, nvml.ERROR_NOT_SUPPORTED},
		{"the call fails", nvml.FieldValue{}, nvml.ERROR_UNKNOWN, gpu.RecoveryUnknown, nvml.ERROR_UNKNOWN},
	} {
		h := &mock.Device{GetFieldValuesFunc: func(fields []nvml.FieldValue) nvml.Return {
			if len(fields) != 1 || fields[0].FieldId != nvml.FI_DEV_GET_GPU_RECOVERY_ACTION {
				t.Errorf("%s: asked for %+v", c.name, fields)
			}
			fields[0] = c.field
			return c.call
		}}
		if got, ret := recovery(h); got != c.want || ret != c.ret {
			t.Errorf("%s: %q, %v, want %q, %v", c.name, got, ret, c.want, c.ret)
		}
	}
}

// BenchmarkGlance is what each Options.Look costs.
func BenchmarkGlance(b *testing.B) {
	root := b.TempDir()
	d := newComponents(&session{opts: Options{DevRoot: root, ProcRoot: root}})
	for _, name := range []string{"07", "0a", "44", "4a", "84", "8a", "c0", "c3"} {
		if err := os.MkdirAll(filepath.Join(d.opts.procDir(), "0000:"+name+":00.0"), 0o755); err != nil {
			b.Fatal(err)
		}
	}
	if err := os.Mkdir(d.opts.devDir(), 0o755); err != nil {
		b.Fatal(err)
	}
	nodes := watchNodes(d.opts.devDir())
	defer nodes.close()
	for b.Loop() {
		d.glance(nodes)
	}
}
