// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// mounting skips where no file system can be mounted.
func mounting(t *testing.T) *Pages {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("to mount takes root")
	}
	return somePages(t)
}

func written(t *testing.T, p *Pages, limits ...Limit) map[gpu.UUID]Page {
	t.Helper()
	pages, err := p.Write(aKey, time.Second, limits)
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// TestUsagePageIsBounded: who may write to a page may make it longer, and gets no
// more of the host's memory than the allocation's pages take.
func TestUsagePageIsBounded(t *testing.T) {
	p := mounting(t)
	pages := written(t, p, Limit{GPU: aGPU, Bytes: aGiB}, Limit{GPU: "GPU-1", Bytes: aGiB})
	f, err := os.OpenFile(pages[aGPU].Usage, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	total := 0
	for block := make([]byte, 1<<20); err == nil; {
		var n int
		n, err = f.WriteAt(block, int64(total))
		if total += n; total > 1<<30 {
			t.Fatal("a page grows without end")
		}
	}
	if most := 2 * usageSize; !errors.Is(err, unix.ENOSPC) || total > most {
		t.Errorf("a container's page took %d bytes, then %v; want at most %d", total, err, most)
	}
	for i := range 100 {
		if err = unix.Fsetxattr(int(f.Fd()), "user."+string(rune('a'+i)), make([]byte, 4096), 0); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("a page takes attributes without end")
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(pages[aGPU].Usage), "another"), nil, 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("there is room for another file: %v", err)
	}
}

// TestUsagePageStays: an allocation goes on with its page, whatever an agent that starts
// writes, as long as processes can count on it and nobody else has the allocation.
func TestUsagePageStays(t *testing.T) {
	began := time.Now()
	one := Limit{GPU: aGPU, Bytes: aGiB, Since: began}
	other := Limit{GPU: "GPU-1", Bytes: aGiB, Since: began}
	for _, c := range []struct {
		name   string
		change func(p *Pages, page Page) error
		limit  Limit
		stays  bool
	}{
		{"written again", nil, one, true},
		{"another limit", nil, Limit{GPU: aGPU, Bytes: 2 * aGiB, Since: began}, true},
		{"nobody knows since when", nil, Limit{GPU: aGPU, Bytes: aGiB}, true},
		{"counters that say anything", func(_ *Pages, page Page) error { return at(page.Usage, useBound, "\xff\xff\xff") }, one, true},
		{"given to somebody else", nil, Limit{GPU: aGPU, Bytes: aGiB, Since: began.Add(time.Nanosecond)}, false},
		{"no longer a page", func(_ *Pages, page Page) error { return at(page.Usage, 0, "x") }, one, false},
		{"another nonce", func(_ *Pages, page Page) error { return at(page.Usage, useNonce, "12345678") }, one, false},
		{"cut short", func(_ *Pages, page Page) error { return os.Truncate(page.Usage, usageSize-1) }, one, false},
		{"grown", func(_ *Pages, page Page) error { return os.Truncate(page.Usage, usageSize+1) }, one, false},
		{"nobody may write it", func(_ *Pages, page Page) error { return os.Chmod(page.Usage, 0) }, one, false},
		{"killed before it was there", func(_ *Pages, page Page) error { return os.Remove(page.Usage) }, one, false},
		{"killed before the limit page named it", func(p *Pages, page Page) error { return at(page.Limit, atUsage, "12345678") }, one, false},
		{"killed before it was mounted, or a reboot", func(p *Pages, _ Page) error { return unix.Unmount(filepath.Join(p.usage, aKey), unix.MNT_DETACH) }, one, false},
		{"no limit page", func(_ *Pages, page Page) error { return os.Remove(page.Limit) }, one, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := mounting(t)
			page := written(t, p, one, other)[aGPU]
			before, disk := inode(t, page.Usage), device(t, page.Usage)
			// A container that has the page, and all of its room.
			held, err := os.OpenFile(page.Usage, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer held.Close()
			if err := unix.Fallocate(int(held.Fd()), 0, 0, usageSize); err != nil {
				t.Fatal(err)
			}
			if c.change != nil {
				if err := c.change(p, page); err != nil {
					t.Fatal(err)
				}
			}
			if sound, _ := p.Sound(aKey); sound != (c.stays || c.change == nil) && c.name != "no limit page" {
				t.Errorf("sound: %v", sound)
			}
			again := written(t, p, c.limit, other)[aGPU]
			if same := inode(t, again.Usage) == before && device(t, again.Usage) == disk; same != c.stays {
				t.Errorf("the page is the one of before: %v", same)
			}
			before, disk = inode(t, again.Usage), device(t, again.Usage)
			written(t, p, c.limit, other)
			if inode(t, again.Usage) != before || device(t, again.Usage) != disk {
				t.Error("what was written is written anew")
			}
			if sound, err := p.Sound(aKey); err != nil || !sound {
				t.Errorf("what was written is sound: %v, %v", sound, err)
			}
			if c.stays {
				return
			}
			u, err := p.OpenUsage(aKey, aGPU)
			if err != nil {
				t.Fatal(err)
			}
			defer u.Close()
			m, err := p.Meter(aKey, aGPU, u)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if err := m.Begin(); err != nil {
				t.Error(err)
			}
			// There is room for all of it, whoever has the one of before.
			f, err := os.OpenFile(again.Usage, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, usageSize), f.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestMeterOfAnAllocationGivenAgain: an allocation that has ended and is given out again has new
// pages. Who reads those of before, which are still there for whoever has them open,
// must learn of it, or the new ones are never read.
func TestMeterOfAnAllocationGivenAgain(t *testing.T) {
	p := somePages(t)
	meter := func() *Meter {
		t.Helper()
		u, err := p.OpenUsage(aKey, aGPU)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { u.Close() })
		m, err := p.Meter(aKey, aGPU, u)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	limits := []Limit{{GPU: aGPU, Bytes: aGiB}}
	if _, err := p.Write(aKey, time.Second, limits); err != nil {
		t.Fatal(err)
	}
	before := meter()
	if err := before.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(aKey); err != nil {
		t.Fatal(err)
	}
	if err := before.Begin(); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("the pages of an allocation that has ended are read: %v", err)
	}
	if _, err := p.Write(aKey, time.Second, limits); err != nil {
		t.Fatal(err)
	}
	if err := before.Begin(); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("the pages of the allocation before are read: %v", err)
	}
	if err := meter().Begin(); err != nil {
		t.Error(err)
	}
}

func device(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Dev
}

// at writes a few bytes into a page.
func at(path string, where int64, what string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(what), where)
	return errors.Join(err, f.Close())
}

// TestUsagePagesLeaveNothing: what an allocation's pages were mounted on goes with the
// allocation, also where a killed agent has left it half done.
func TestUsagePagesLeaveNothing(t *testing.T) {
	p := mounting(t)
	written(t, p, Limit{GPU: aGPU, Bytes: aGiB})
	if _, err := p.Write("fedcba9876543210", 0, []Limit{{GPU: aGPU, Bytes: aGiB}}); err != nil {
		t.Fatal(err)
	}
	// Killed while it removed: there are counters and no limit, or twice the mount.
	if err := errors.Join(os.RemoveAll(filepath.Join(p.dir, aKey)), unix.Mount("again", filepath.Join(p.usage, aKey), "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	if keys, err := p.List(); err != nil || !slices.Equal(keys, []string{aKey, "fedcba9876543210"}) {
		t.Errorf("%v, %v", keys, err)
	}
	for range 2 {
		if err := p.Remove(aKey); err != nil {
			t.Error(err)
		}
	}
	if err := Unmount(filepath.Dir(filepath.Dir(p.dir))); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(p.usage)
	if err != nil || len(left) != 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	if err := Unmount(t.TempDir()); err != nil {
		t.Errorf("where nothing was ever mounted: %v", err)
	}
}

// TestUsagePagesWithoutMounting: an agent that may not mount uses what somebody has
// mounted for it, and takes all of a page's room when it makes it, so that whoever
// fills the rest leaves that; elsewhere it says what is missing.
func TestUsagePagesWithoutMounting(t *testing.T) {
	const at = "GPU_TESTS_DIRECTORY"
	if dir := os.Getenv(at); dir != "" {
		p, err := OpenPages(dir)
		if err != nil {
			t.Fatal(err)
		}
		limit := Limit{GPU: aGPU, Bytes: aGiB, Since: time.Unix(1, 0)}
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			t.Fatal(err)
		}
		if fs.Type != unix.TMPFS_MAGIC {
			_, err := p.Write(aKey, 0, []Limit{limit})
			if !errors.Is(err, gpu.ErrNoPermission) || !strings.Contains(err.Error(), p.usage+" before") {
				t.Errorf("where nothing bounds a page: %v", err)
			}
			return
		}
		page := written(t, p, limit)[aGPU]
		first := inode(t, page.Usage)
		var st unix.Stat_t
		if err := unix.Stat(page.Usage, &st); err != nil || st.Blocks*512 < usageSize {
			t.Errorf("of %d bytes %d are there, %v", usageSize, st.Blocks*512, err)
		}
		if written(t, p, limit); inode(t, page.Usage) != first {
			t.Error("the page was made anew")
		}
		limit.Since = time.Unix(2, 0)
		if written(t, p, limit); inode(t, page.Usage) == first {
			t.Error("the next holder has the page of the one before")
		}
		if err := p.Remove(aKey); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(p.usage); err != nil || len(left) > 0 {
			t.Errorf("%v is left, %v", left, err)
		}
		return
	}
	shared := somePages(t)
	disk, err := os.MkdirTemp("/var/tmp", "gpu-agent-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(disk)
	for _, dir := range []string{filepath.Dir(filepath.Dir(shared.dir)), disk} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestUsagePagesWithoutMounting$")
		cmd.Env = append(os.Environ(), at+"="+dir)
		if os.Geteuid() == 0 {
			const nobody = 65534
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			for _, d := range []string{dir, filepath.Join(dir, "cap"), filepath.Join(dir, "cap", "limits"), filepath.Join(dir, "cap", usageName)} {
				if err := os.Chown(d, nobody, nobody); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
			}
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

// TestMounts: nothing but the two files of each GPU comes into a container, and one
// alone can be written.
func TestMounts(t *testing.T) {
	got := map[string]string{}
	for _, m := range Mounts(aKey, map[gpu.UUID]Page{aGPU: {"/l", "/u"}, "GPU-1": {"/m", ""}}) {
		got[m.ContainerPath] = m.Options[0] + " " + m.HostPath
		for _, o := range []string{"nosuid", "nodev", "noexec"} {
			if !slices.Contains(m.Options, o) {
				t.Errorf("%s is mounted without %s", m.ContainerPath, o)
			}
		}
	}
	dir := "/usr/lib/gpu-agent/allocations/"
	want := map[string]string{dir + "GPU-0/" + aKey + "/limit": "ro /l", dir + "GPU-0/" + aKey + "/usage": "rw /u", dir + "GPU-1/" + aKey + "/limit": "ro /m"}
	if !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
