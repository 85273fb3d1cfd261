// SPDX-License-Identifier: Apache-2.0

package capsule_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

func TestMain(m *testing.M) {
	capsule.Main()
	os.Exit(m.Run())
}

func machine(t *testing.T) *capsule.Machine {
	t.Helper()
	if lack := capsule.Missing(); lack != "" {
		t.Skip(lack)
	}
	m, err := capsule.Start(t.Context(), t.TempDir(), emulator.Spec{Count: 3, Minors: "reversed"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// mounts are those of containers that this machine sees: each is in a directory whose name
// has "capsule" in it. Others' mounts come and go beside this test.
func mounts(t *testing.T) (found string) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, "capsule") {
			found += line
		}
	}
	return found
}

func TestContainer(t *testing.T) {
	m := machine(t)
	edits, image := m.Plain(1)
	host := filepath.Join(t.TempDir(), "host")
	if err := os.WriteFile(host, []byte("of the host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	capsule.Bind(&edits, host, "/opt/bound")
	image.Files = map[string][]byte{"/opt/file": []byte("of the image\n")}
	c, err := m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sh := func(script string) string {
		t.Helper()
		out, status, err := c.Run(t.Context(), capsule.Program{Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}})
		if err != nil || !status.Exited() {
			t.Fatalf("%s: %v, status %v", script, err, status)
		}
		return out
	}
	for script, want := range map[string]string{
		"cat /opt/bound /opt/file; echo x >/opt/bound || exit 3": "of the host\nof the image\n",
		"ls /dev/nvidia*": "/dev/nvidia1\n/dev/nvidiactl\n",
		"readlink " + capsule.Libraries + "/libcuda.so.1":                          "libcuda.so." + m.World.DriverVersion() + "\n",
		"nvidia-smi -L | wc -l":                                                    "1\n",
		"echo $PPID; head -c1 /dev/zero | wc -c; touch /usr/lib/mine /tmp/a; ls /": "",
	} {
		out := sh(script)
		if want != "" && !strings.HasPrefix(out, want) {
			t.Errorf("%s: %q, want %q", script, out, want)
		}
	}
	if _, err := os.Stat("/usr/lib/mine"); err == nil {
		t.Error("a change in the container came through to the machine")
	}
	if _, err := c.Start(capsule.Program{Args: []string{"/no/such/program"}}); err == nil {
		t.Error("a program that is not there was started")
	}
	p, err := c.Start(capsule.Program{Args: []string{"/bin/sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	pid := c.HostPID(p.PID)
	if pid == 0 || !c.Has(pid) || c.Has(os.Getpid()) {
		t.Errorf("process %d of the container is %d here; has it %t, and this one %t", p.PID, pid, c.Has(pid), c.Has(os.Getpid()))
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, status, err := p.Wait(t.Context()); err != nil || !status.Signaled() {
		t.Errorf("after a kill: %v, status %v", err, status)
	}
	left, err := c.Start(capsule.Program{Args: []string{"/bin/sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	pid = c.HostPID(left.PID)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join("/proc", "self")); err == nil && c.Has(pid) {
		t.Errorf("process %d outlives its container", pid)
	}
	if left := mounts(t); left != "" {
		t.Errorf("mounts of the container are left:\n%s", left)
	}
}

func TestContainerThatCannotBe(t *testing.T) {
	m := machine(t)
	edits, image := m.Plain(0)
	capsule.Bind(&edits, "/no/such/file", "/opt/file")
	if c, err := m.Open(t.Context(), edits, image); err == nil {
		c.Close()
		t.Error("a mount of nothing was laid")
	} else if !strings.Contains(err.Error(), "/no/such/file") {
		t.Error(err)
	}
}
