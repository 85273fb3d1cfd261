// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// The module that is built is the version that is shown and asked for.
func TestVersions(t *testing.T) {
	for module, want := range map[string]string{
		"kubernetes": "\tk8s.io/kubernetes " + kubernetesVersion + "\n",
		"etcd":       "\tgo.etcd.io/etcd/server/v3 " + etcdVersion + " ",
		"containerd": "\tgithub.com/containerd/containerd/v2 " + containerdVersion + " ",
		"kueue":      "require sigs.k8s.io/kueue " + kueueVersion + "\n",
		"liqo":       "require github.com/liqotech/liqo " + liqoVersion + "\n",
		"kuberay":    "require github.com/ray-project/kuberay/ray-operator " + kuberayVersion + "\n",
		"jobset":     "require sigs.k8s.io/jobset " + jobsetVersion + "\n",
		"helm":       "\thelm.sh/helm/v3 " + helmVersion + " ",

		"kubernetes/v1.34": "\tk8s.io/kubernetes " + kubernetes134 + "\n",
		"kubernetes/v1.37": "\tk8s.io/kubernetes " + kubernetes137 + "\n",
		"containerd/v1.7":  "\tgithub.com/containerd/containerd " + containerd17 + " ",
		"crio":             "\tgithub.com/cri-o/cri-o " + crioVersion + " ",
	} {
		b, err := os.ReadFile(filepath.Join(module, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(b), want) {
			t.Errorf("%s/go.mod has no line with %q", module, want)
		}
	}
}

// The kubelet has Kubernetes' own settings of how often it looks at its node: what
// is measured on another is a figure of nobody's. Another is for who asks for it.
func TestKubeletIsPromptOnlyWhereAsked(t *testing.T) {
	for line := range strings.Lines(kubeletConfig(Spec{Name: "n"})) {
		if strings.HasPrefix(line, "nodeStatus") {
			t.Errorf("every node's kubelet is told %q", strings.TrimSpace(line))
		}
	}
	for _, prompt := range []bool{false, true} {
		n := Node{name: "n", dir: t.TempDir()}
		if _, err := writeConfig(n, Layout{cache: t.TempDir()}, Spec{Name: "n", PromptStatus: prompt}); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(n.path("etc", promptFile))
		if prompt && !strings.Contains(string(b), "nodeStatusUpdateFrequency: 1s\n") || !prompt && err == nil {
			t.Errorf("asked for a prompt kubelet: %v; beside its configuration it reads %q (%v)", prompt, b, err)
		}
	}
}

func TestStampFollowsWhatAPartIsMadeFrom(t *testing.T) {
	dir := t.TempDir()
	source := writeTestFile(t, filepath.Join(dir, "main.go"), "one", 0o644)
	p := part{name: "p", inputs: []string{dir}, args: []string{"go1"}, outputs: []string{"bin/p"}}
	stamp := func(p part) string {
		t.Helper()
		s, err := p.stamp()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := stamp(p)
	writeTestFile(t, filepath.Join(dir, "main_test.go"), "test", 0o644)
	if stamp(p) != first {
		t.Error("a test changed the stamp")
	}
	release := p
	release.args = []string{"go2"}
	if stamp(release) == first {
		t.Error("another Go release left the stamp as it was")
	}
	writeTestFile(t, source, "two", 0o644)
	if stamp(p) == first {
		t.Error("another source left the stamp as it was")
	}

	l := Layout{cache: t.TempDir()}
	if err := os.MkdirAll(l.path("bin", ".stamps"), 0o755); err != nil {
		t.Fatal(err)
	}
	now := stamp(p)
	writeTestFile(t, l.stampFile(p), now+"\n", 0o644)
	if l.upToDate(p, now) {
		t.Error("a part without its output is up to date")
	}
	writeTestFile(t, l.bin("p"), "", 0o755)
	if !l.upToDate(p, now) || l.upToDate(p, first) {
		t.Error("a part is up to date by another stamp than its own")
	}
}

func TestBuildSaysWhatItLacks(t *testing.T) {
	l := Layout{cache: t.TempDir()}
	err := checkBuild(l, []part{{name: "x", gib: 1 << 20}}, nil)
	if err == nil || !strings.Contains(err.Error(), "takes 1048576 GiB") {
		t.Errorf("no disk has a pebibyte: got %v", err)
	}
	err = checkBuild(l, []part{{name: "x", needs: []string{"no-such-program"}}}, nil)
	if err == nil || !strings.Contains(err.Error(), "building x needs no-such-program") {
		t.Errorf("a program that is not there: got %v", err)
	}
	if err := checkBuilt(l); err == nil || !strings.Contains(err.Error(), "'cluster build' makes it") {
		t.Errorf("an empty cache: got %v", err)
	}
}

func TestPartsThatANodeDoesWithout(t *testing.T) {
	l := Layout{cache: t.TempDir()}
	node, err := l.partsWith("", "", nil)
	if err != nil || !reflect.DeepEqual(names(node), names(l.parts("", ""))) {
		t.Errorf("a plain build makes %q, %v", names(node), err)
	}
	more, err := l.partsWith("", "", []string{"kueue"})
	if want := append(names(node), "Kueue "+kueueVersion); err != nil || !reflect.DeepEqual(names(more), want) {
		t.Errorf("with Kueue it makes %q, %v, want %q", names(more), err, want)
	}
	if _, err := l.partsWith("", "", []string{"x"}); err == nil || !strings.Contains(err.Error(), `no part "x"`) {
		t.Errorf("with an unknown part: %v", err)
	}
}

func names(parts []part) (out []string) {
	for _, p := range parts {
		out = append(out, p.name)
	}
	return out
}

func TestCacheThatMountOptionsCannotCarry(t *testing.T) {
	t.Setenv("GPU_TESTS_CACHE", "/tmp/a,b")
	if _, err := findLayout(); err == nil || !strings.Contains(err.Error(), "GPU_TESTS_CACHE") {
		t.Errorf("got %v, want an error that says what to set", err)
	}
}

func TestParseMounts(t *testing.T) {
	got := parseMounts(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
37 35 0:4 net:[4026532001] /run/a\040b rw shared:2 master:1 - nsfs nsfs rw
broken
`)
	want := []mount{{"/mnt1", "/mnt2", "ext3"}, {"net:[4026532001]", "/run/a b", "nsfs"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestWithEnv(t *testing.T) {
	got := withEnv([]string{"A=1", "B=2", "A=3"}, "A=4", "C=5=6")
	if want := []string{"B=2", "A=4", "C=5=6"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestIdentity(t *testing.T) {
	self, err := identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !self.alive() {
		t.Error("this process does not run")
	}
	if other := (identity{self.PID, self.Start + 1}); other.alive() {
		t.Error("a process that had this PID before runs still")
	}
	if (identity{}).alive() {
		t.Error("no process runs")
	}
}

func TestSlots(t *testing.T) {
	l := Layout{cache: t.TempDir()}
	take := func(name string) int {
		t.Helper()
		n := l.node(name)
		if err := os.MkdirAll(n.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		spec := Spec{Name: name}
		if err := takeSlot(l, n, &spec); err != nil {
			t.Fatal(err)
		}
		return spec.Slot
	}
	if got := []int{take("a"), take("b"), take("c"), take("b")}; !reflect.DeepEqual(got, []int{0, 1, 2, 1}) {
		t.Errorf("got slots %v", got)
	}
	if err := os.Remove(l.node("b").path("spec.json")); err != nil {
		t.Fatal(err)
	}
	if got := take("d"); got != 1 {
		t.Errorf("got slot %d, want the one that b gave back", got)
	}
}

func TestUsageErrors(t *testing.T) {
	t.Setenv("GPU_TESTS_CACHE", t.TempDir())
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"fly"}, `no command "fly"`},
		{[]string{"exec", "--name", "x"}, "usage: cluster exec"},
		{[]string{"exec", "--name", "x", "--", "true"}, `node "x" does not run; 'cluster up --name x' starts it`},
		{[]string{"kubectl", "get", "pods"}, "does not run"},
		{[]string{"up", "--name", "Upper"}, "lower-case"},
		{[]string{"up", "--bind", "/no/such/place"}, "bind /no/such/place"},
		{[]string{"up", "--kubernetes", "1.2"}, "there are 1.34, 1.37"},
		{[]string{"up", "--runtime", "rkt"}, "there are containerd-1.7, crio-1.34"},
		{[]string{"down", "--name", "../x"}, "no node is called so"},
		{[]string{"path", "moon"}, `no path "moon"`},
		{[]string{"cpusets", "lose"}, "it is keep or drop"},
		{[]string{"pid", "--wrong", "x"}, "flag provided but not defined"},
	} {
		t.Run(fmt.Sprint(test.args), func(t *testing.T) {
			if err := run(test.args); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestRuncCommand(t *testing.T) {
	for _, test := range []struct{ args, command, value string }{
		{"--root /run/containerd/runc/k8s.io --log /create/log.json --log-format json create --bundle /b --pid-file /b/pid id", "create", "/b"},
		{"--root /r create --bundle=/b id", "create", "/b"},
		{"run id", "run", ""},
		{"--root /r update --resources=- id", "update", "-"},
		{"--root /r update --resources - id", "update", "-"},
		{"--root /r kill id 9", "", ""},
	} {
		if command, value := runcCommand(strings.Fields(test.args)); command != test.command || value != test.value {
			t.Errorf("runc %s is %q of %q, want %q of %q", test.args, command, value, test.command, test.value)
		}
	}
}

func TestWithoutCPUs(t *testing.T) {
	for _, test := range []struct {
		in, want string
		path     []string
	}{
		{`{"cpu":{"shares":18446744073709551615,"cpus":"8-11","mems":"1"},"memory":{"limit":-1}}`,
			`{"cpu":{"shares":18446744073709551615},"memory":{"limit":-1}}`, []string{"cpu"}},
		{`{"linux":{"resources":{"cpu":{"cpus":"8"}},"x":[1]}}`, `{"linux":{"resources":{"cpu":{}},"x":[1]}}`, []string{"linux", "resources", "cpu"}},
		{`{"linux":{"resources":{}}}`, `{"linux":{"resources":{}}}`, []string{"linux", "resources", "cpu"}},
		{`{"linux":null}`, `{"linux":null}`, []string{"linux", "resources", "cpu"}},
	} {
		got, err := without([]byte(test.in), test.path...)
		if err != nil || string(got) != test.want {
			t.Errorf("%s without CPUs is %s (%v), want %s", test.in, got, err, test.want)
		}
	}
	if _, err := without([]byte(`{"linux":7}`), "linux", "resources"); err == nil {
		t.Error("a number was taken for an object")
	}
}

// A long build says how far it is.
func TestCompiled(t *testing.T) {
	c := compiled{progress: newProgress("Kubernetes"), every: time.Hour, last: time.Now()}
	for _, text := range []string{"go: downloading k8s.io/api v0.36.3\nk8s.io/a", "pi/core/v1\n", "# k8s.io/broken\nfile.go:1: no\n\nio\n", "unfinished"} {
		if n, err := c.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatalf("Write: %d, %v", n, err)
		}
	}
	if c.done != 2 {
		t.Errorf("%d packages, want k8s.io/api/core/v1 and io", c.done)
	}
}
