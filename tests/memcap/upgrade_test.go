// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// A newer library is installed while a process runs under the one before. It
// keeps the file that it has mapped, untouched, and its cap; the next container
// has the new one; and the two of one allocation count together.
func TestUpgrade(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	const limit = 2 * GiB
	before := r.kit.CUDA
	old := r.allocate(t, "old", []share{{gpu: 0, bytes: limit}}, false, nil)
	k := old.tool(t, "probe", nil)
	if f := k.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "0" {
		t.Fatalf("%q", k.said)
	}
	bytes, inode := read(t, before), inodeOf(t, before)
	if got := mapped(t, old.Container, k); got != inode {
		t.Fatalf("the process has inode %d mapped, %s is %d", got, before, inode)
	}

	// The next version: the same code, other bytes, so another name.
	next := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(next, append([]byte(bytes), "the next version\n"...), 0o755); err != nil {
		t.Fatal(err)
	}
	r.kit.CUDA = next
	fresh := r.allocate(t, "new", []share{{gpu: 0, bytes: limit}}, false, nil)
	n := fresh.tool(t, "probe", nil)
	if f := n.ask("took", "take cuMemAlloc_v2 %d", 512*MiB); f["result"] != "0" {
		t.Fatalf("%q", n.said)
	}
	if got := mapped(t, fresh.Container, n); got != inodeOf(t, next) {
		t.Errorf("a new container's process has inode %d mapped, want %d", got, inodeOf(t, next))
	}
	// The old one: same file, same bytes, same cap, and programs that start
	// there now have what the container has.
	if got := mapped(t, old.Container, k); got != inode || inodeOf(t, before) != inode || read(t, before) != bytes {
		t.Errorf("the old library was touched, or the process has another one mapped (inode %d, was %d)", got, inode)
	}
	second := old.tool(t, "probe", nil)
	if got := mapped(t, old.Container, second); got != 0 {
		t.Errorf("the library is mapped before anybody asked for it")
	}
	f := second.ask("took", "take cuMemAlloc_v2 %d 1000", 16*MiB)
	left := uint64(limit - 1*GiB - 2*context300)
	if got := f.n("count") * 16 * MiB; f["result"] != "2" || got > left || left-got >= 16*MiB {
		t.Errorf("%q: %d MiB granted, %d were left", second.said, got/MiB, left/MiB)
	}
	if got := mapped(t, old.Container, second); got != inode {
		t.Errorf("a program that starts in the old container maps inode %d, want %d", got, inode)
	}
	k.ask("gave", "give 0")
	for _, x := range []*tool{k, n, second} {
		x.quit()
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func inodeOf(t *testing.T, name string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// mapped is the inode that a program has mapped at the driver library's path,
// 0 if none.
func mapped(t *testing.T, c *capsule.Container, k *tool) uint64 {
	t.Helper()
	f, err := os.Open(filepath.Join("/proc", itoa(c.HostPID(k.p.PID)), "maps"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		if len(w) == 6 && strings.HasPrefix(w[5], capsule.Libraries+"/libcuda.so.") {
			return atoi(w[4])
		}
	}
	return 0
}
