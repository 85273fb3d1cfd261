// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// unpackProc lays out a tree of /proc from a file that has it in one piece: a
// comment, what is expected, and the files, each after a line with its name.
func unpackProc(t testing.TB, file string) (root string, want []string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	root = t.TempDir()
	name, content := "", ""
	put := func() {
		switch {
		case name == "":
		case name == "want":
			want = strings.Split(strings.TrimSpace(content), "\n")
		default:
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		content = ""
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "-- "); ok {
			put()
			name = strings.TrimSuffix(rest, " --\n")
		} else {
			content += line
		}
	}
	put()
	if len(want) == 0 {
		t.Fatalf("%s expects nothing", file)
	}
	return root, want
}

// TestContainerTrees reads trees as runtimes make them; each names the runtime,
// its version and its cgroup driver.
func TestContainerTrees(t *testing.T) {
	files, err := filepath.Glob("testdata/cgroup/*.txt")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d trees, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			root, want := unpackProc(t, file)
			p := NewProc(root)
			defer p.Close()
			for _, line := range want {
				number, _, _ := strings.Cut(line, " ")
				pid, err := strconv.Atoi(number)
				if err != nil {
					t.Fatal(err)
				}
				o, err := p.Container(pid)
				got := fmt.Sprintf("%d start=%d pod=%s container=%s v2=%t cgroup=%s", pid, o.Start, o.PodUID, o.ID, o.V2, o.Cgroup)
				if err != nil {
					got = fmt.Sprintf("%d start=%d of no pod", pid, o.Start)
					if !errors.Is(err, gpu.ErrNotFound) || !strings.Contains(err.Error(), "of no pod") {
						t.Errorf("%d: %v", pid, err)
					}
				}
				if got != line {
					t.Errorf("got  %s\nwant %s\n%v", got, line, err)
				}
				if same := p.Same(pid, o); same != (err == nil) {
					t.Errorf("%d is the same: %t", pid, same)
				}
			}
		})
	}
}

func TestContainerID(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	for name, want := range map[string]string{
		id:                                id,
		"cri-containerd-" + id + ".scope": id,
		"docker-" + id + ".scope":         id,
		"crio-" + id:                      id,
		"crio-" + id + ".scope":           id,
		"crio-conmon-" + id + ".scope":    "",
		"crio-conmon-" + id:               "",
		"libpod-conmon-" + id + ".scope":  "",
		"x" + id:                          "",
		id + "-x":                         "",
		strings.ToUpper(id):               "",
		id[1:]:                            "",
		"cri-containerd-" + id[1:]:        "",
		"":                                "",
		".scope":                          "",
		id + ".slice":                     "",
	} {
		if got := containerID(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestPodOfSlice(t *testing.T) {
	for slice, want := range map[string]string{
		"kubepods-burstable-pod1_2.slice":                    "1-2",
		"kubepods-besteffort-pod1_2.slice":                   "1-2",
		"kubepods-pod1_2.slice":                              "1-2",
		"a-b_c-kubepods-pod1.slice":                          "1",
		"kubepods-pod0123456789abcdef0123456789abcdef.slice": "0123456789abcdef0123456789abcdef",
		"kubepods.slice":                                     "",
		"kubepods-burstable.slice":                           "",
		"kubepods-pod.slice":                                 "",
		"kubepods-pod1":                                      "",
		"notkubepods-pod1.slice":                             "",
		"machine-pod1.slice":                                 "",
		"kubepods-pod1.x.slice":                              "",
		"kubepods-pod" + strings.Repeat("1", 65) + ".slice":  "",
	} {
		if got := podOfSlice(slice); got != want {
			t.Errorf("%q: %q, want %q", slice, got, want)
		}
	}
}

// FuzzOwner holds what is found in any cgroup file against the file: a container
// that no line names right behind a pod's segment is nobody's.
func FuzzOwner(f *testing.F) {
	files, _ := filepath.Glob("testdata/cgroup/*.txt")
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, part := range strings.Split(string(data), "/cgroup --\n")[1:] {
			list, _, _ := strings.Cut(part, "-- ")
			f.Add([]byte(list))
		}
	}
	f.Fuzz(func(t *testing.T, list []byte) {
		o, err := ownerOf(list)
		if err != nil {
			if !errors.Is(err, gpu.ErrNotFound) || o != (Owner{PodUID: podUID(o.PodUID)}) {
				t.Fatalf("%+v, %v", o, err)
			}
			return
		}
		if containerID(o.ID) != o.ID || podUID(o.PodUID) != o.PodUID || o.ID == "" || o.PodUID == "" {
			t.Fatalf("%+v", o)
		}
		if o.Cgroup != "" {
			if !bytes.Contains(list, []byte(o.Cgroup)) {
				t.Fatalf("%+v has a path of its own", o)
			}
			// The path alone says the same, and so does anything below it.
			for _, path := range []string{o.Cgroup, o.Cgroup + "/x", o.Cgroup + "/kubepods/pod1/" + strings.Repeat("0", idLength)} {
				again, ok := ownerByPath([]byte(path))
				if again.V2 = o.V2; !ok || again != o {
					t.Fatalf("%q is of %+v, want %+v", path, again, o)
				}
			}
		}
		// Another container in another hierarchy makes it nobody's.
		torn := append(slices.Clone(list), "\n99:x:/kubepods/pod1/"+strings.Repeat("0", idLength)...)
		if o, err := ownerOf(torn); err == nil && (o.ID != strings.Repeat("0", idLength) || o.PodUID != "1") {
			t.Fatalf("%+v of two containers", o)
		}
	})
}

// TestContainerOfThisProcess asks of what is real: this process, one that is
// gone, one that never was.
func TestContainerOfThisProcess(t *testing.T) {
	p := NewProc("")
	defer p.Close()
	before := Ticks()
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	pid := child.Process.Pid
	o, err := p.Container(pid)
	if again, err2 := p.Container(pid); again != o || err2 != err {
		t.Errorf("%+v, %v, and then %+v, %v", o, err, again, err2)
	}
	child.Process.Kill()
	child.Wait()
	after := Ticks()
	// Whether it is of a pod depends on where this test runs; when it began does not.
	if err != nil && !errors.Is(err, gpu.ErrNotFound) || o.Start < before || o.Start > after {
		t.Errorf("%+v, %v; began within %d and %d", o, err, before, after)
	}
	for _, pid := range []int{pid, 0, -1, 1 << 30} {
		o, err := p.Container(pid)
		if !errors.Is(err, gpu.ErrNotFound) || strings.Contains(err.Error(), "of no pod") || o != (Owner{}) {
			t.Errorf("of process %d: %+v, %v", pid, o, err)
		}
	}
	if p.Same(pid, o) {
		t.Error("a process that is gone is the same")
	}
}

// TestInside asks how processes name themselves.
func TestInside(t *testing.T) {
	p := NewProc("")
	defer p.Close()
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		t.Fatal(err)
	}
	if namespace, inner, err := p.Inside(os.Getpid()); err != nil || namespace != st.Ino || inner != uint64(os.Getpid()) {
		t.Errorf("%d, %d, %v, want %d and %d", namespace, inner, err, st.Ino, os.Getpid())
	}
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "7", "ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(root, "7", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("ns/pid", "")
	other := NewProc(root)
	defer other.Close()
	write("status", "Name:\tx\nNSpid:\t7\t1\nNSpgid:\t7\t3\n")
	if namespace, inner, err := other.Inside(7); err != nil || namespace == 0 || inner != 1 {
		t.Errorf("in a namespace of its own: %d, %d, %v", namespace, inner, err)
	}
	write("status", "Name:\tx\n")
	if _, _, err := other.Inside(7); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("of an old kernel: %v", err)
	}
	if _, _, err := p.Inside(1 << 30); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("of no process: %v", err)
	}
}

// TestProcessEnds has a process end between the two looks at it.
func TestProcessEnds(t *testing.T) {
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	dir, err := NewProc("").open(child.Process.Pid)
	child.Process.Kill()
	child.Wait()
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(dir)
	for _, name := range []string{"stat", "cgroup"} {
		_, err := readAt(dir, name)
		if err = NewProc("").failed(1, err); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("%s of a dead process: %v", name, err)
		}
	}
}

func TestBrokenProcess(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	fields := strings.Repeat("1 ", 19)
	cgroup := "0::/kubepods/pod1/" + id + "\n"
	for name, tc := range map[string]struct {
		stat, cgroup string
		want         Owner
		bad          string
	}{
		"well":                      {"7 (x) S " + fields[2:] + "42 0\n", cgroup, Owner{ID: id, PodUID: "1", Cgroup: cgroup[3 : len(cgroup)-1], V2: true, Start: 42}, ""},
		"a name of parentheses":     {"7 () S 1 2 3) 4 () S " + fields[2:] + "42 0\n", cgroup, Owner{ID: id, PodUID: "1", Cgroup: cgroup[3 : len(cgroup)-1], V2: true, Start: 42}, ""},
		"a long list":               {"7 (x) S " + fields[2:] + "42 0\n", strings.Repeat("5:name=x:/"+strings.Repeat("y", 255)+"\n", 60) + cgroup, Owner{ID: id, PodUID: "1", Cgroup: cgroup[3 : len(cgroup)-1], V2: true, Start: 42}, ""},
		"too long a list":           {"7 (x) S " + fields[2:] + "42 0\n", strings.Repeat("x\n", maxProcFile), Owner{}, "more than"},
		"a short stat":              {"7 (x) S 1 2 3\n", cgroup, Owner{}, "unexpected EOF"},
		"no stat":                   {"", cgroup, Owner{}, "unexpected EOF"},
		"a start that is no number": {"7 (x) S " + fields[2:] + "-1 0\n", cgroup, Owner{}, "no start time"},
		"no list":                   {"7 (x) S " + fields[2:] + "42 0\n", "", Owner{Start: 42}, "of no pod"},
		"no list at all":            {"7 (x) S " + fields[2:] + "42 0\n", "0:\n:::\n0::\n", Owner{Start: 42}, "of no pod"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			os.Mkdir(filepath.Join(root, "7"), 0o755)
			for file, content := range map[string]string{"stat": tc.stat, "cgroup": tc.cgroup} {
				if err := os.WriteFile(filepath.Join(root, "7", file), []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			o, err := NewProc(root).Container(7)
			if o != tc.want || (err == nil) != (tc.bad == "") || err != nil && !strings.Contains(err.Error(), tc.bad) {
				t.Errorf("%+v, %v\nwant %+v, %q", o, err, tc.want, tc.bad)
			}
		})
	}
}

// BenchmarkContainer looks up processes of this machine, a hundred in a round.
func BenchmarkContainer(b *testing.B) {
	for _, remembered := range []bool{true, false} {
		b.Run(fmt.Sprintf("remembered=%t", remembered), func(b *testing.B) {
			p, pid := NewProc(""), os.Getpid()
			defer p.Close()
			b.ReportAllocs()
			for b.Loop() {
				for range 100 {
					if !remembered {
						p.Close()
					}
					if _, err := p.Container(pid); err != nil && !errors.Is(err, gpu.ErrNotFound) {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// TestLooksAreBounded asks for more processes than are remembered.
func TestLooksAreBounded(t *testing.T) {
	root := t.TempDir()
	for pid := 1; pid <= maxEntries+10; pid++ {
		os.Mkdir(filepath.Join(root, strconv.Itoa(pid)), 0o755)
		for file, content := range map[string]string{"stat": "7 (x) S " + strings.Repeat("1 ", 18) + "42 0\n", "cgroup": "0::/\n"} {
			if err := os.WriteFile(filepath.Join(root, strconv.Itoa(pid), file), []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := NewProc(root)
	for pid := 1; pid <= maxEntries+10; pid++ {
		if o, err := p.Container(pid); o.Start != 42 || !errors.Is(err, gpu.ErrNotFound) {
			t.Fatalf("%d: %+v, %v", pid, o, err)
		}
	}
	if len(p.entries) != 10 {
		t.Errorf("%d are remembered, want 10", len(p.entries))
	}
	p.entries[maxEntries+1].asked -= keepFor + 1
	p.swept -= keepFor + 1
	if _, err := p.Container(1); !errors.Is(err, gpu.ErrNotFound) || len(p.entries) != 10 || p.entries[maxEntries+1] != nil {
		t.Errorf("%d are remembered, %v, want one dropped and one new", len(p.entries), err)
	}
	os.RemoveAll(filepath.Join(root, "1"))
	if o, err := p.Container(1); !errors.Is(err, gpu.ErrNotFound) || o.Start != 0 || p.entries[1] != nil {
		t.Errorf("of one that is gone: %+v, %v", o, err)
	}
	p.Close()
	if descriptors, err := os.ReadDir("/proc/self/fd"); err != nil || len(p.entries) != 0 || len(descriptors) > maxEntries/2 {
		t.Errorf("%d are remembered after Close, %d descriptors are open, %v", len(p.entries), len(descriptors), err)
	}
}

// BenchmarkOwner is what it costs to understand a cgroup file of v1.
func BenchmarkOwner(b *testing.B) {
	list := []byte(strings.Repeat("1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f5b3c1e_7d1a_4c53_8a0d_6f5f2c3d4e5f.slice/cri-containerd-"+strings.Repeat("0123456789abcdef", 4)+".scope\n", 12))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ownerOf(list); err != nil {
			b.Fatal(err)
		}
	}
}
