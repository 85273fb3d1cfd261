// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain lets the test program be the cluster program too, under its names,
// so that the tests run it as anyone would: as processes.
func TestMain(m *testing.M) {
	if name := filepath.Base(os.Args[0]); name == "cluster" || name == execHelper || os.Args[0] == runtimeLink {
		main()
	}
	var err error
	if before, err = sharedThings(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// before holds the interfaces and namespace mounts that the host had when the
// tests began: those of a Docker or a Kubernetes that it runs itself.
var before map[string]bool

func sharedThings() (map[string]bool, error) {
	out := map[string]bool{}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range interfaces {
		out["interface "+i.Name] = true
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.HasPrefix(line, "nsfs ") {
			out["mount "+line] = true
		}
	}
	return out, nil
}

// cluster runs the program and returns what it printed.
func cluster(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = append([]string{"cluster"}, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func mustCluster(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	out, err := cluster(t, stdin, args...)
	if err != nil {
		t.Fatalf("cluster %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// await returns when the condition holds, or fails the test with what it said last.
func await(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func needNode(t *testing.T) Layout {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	if err := checkRights(); err != nil {
		t.Skip(err)
	}
	mustCluster(t, "", "build", "--source", ".")
	l, err := findLayout()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// startNode starts a node that ends with this test, or with this process.
func startNode(t *testing.T, l Layout, name string, args ...string) (Node, State) {
	t.Helper()
	t.Cleanup(func() {
		// The test's context has ended by now.
		cmd := exec.Command("/proc/self/exe")
		cmd.Args = []string{"cluster", "down", "--name", name}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("cluster down: %v\n%s", err, out)
		}
	})
	t.Log(mustCluster(t, "", append([]string{"up", "--name", name, "--with-parent"}, args...)...))
	n := l.node(name)
	state, err := n.state()
	if err != nil {
		t.Fatal(err)
	}
	return n, state
}

// traces looks for what a node that ended at the given tick would leave on the
// host. It shares nothing with what down looks at, but for the names of the
// namespaces, which the kernel may have given to others since.
func traces(name string, state State, ended uint64) error {
	var found []error
	links, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/*")
	if err != nil {
		return err
	}
	for _, link := range links {
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		if err != nil {
			return err
		}
		start, _, err := startTime(pid)
		if err != nil || start >= ended {
			continue
		}
		if target, err := os.Readlink(link); err == nil {
			for _, ours := range state.Namespaces {
				if target == ours {
					found = append(found, fmt.Errorf("%s is %s", link, target))
				}
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, "/run/"+name) {
			found = append(found, fmt.Errorf("mount %s", line))
		}
	}
	cgroup := regexp.MustCompile("^gpu-agent-" + name + "-[0-9a-f]{8}$")
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && cgroup.MatchString(d.Name()) {
			found = append(found, fmt.Errorf("cgroup %s", path))
		}
		return nil // cgroups of others come and go under the walk
	})
	if err != nil {
		return err
	}
	now, err := sharedThings()
	if err != nil {
		return err
	}
	for thing := range now {
		if !before[thing] {
			found = append(found, fmt.Errorf("%s was not there before", thing))
		}
	}
	for _, id := range []identity{state.Keeper, state.Init} {
		if id.alive() {
			found = append(found, fmt.Errorf("process %d runs", id.PID))
		}
	}
	return errors.Join(found...)
}

// tunables returns the machine's settings that a kubelet would change.
func tunables(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys"} {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			continue // this kernel has no such setting
		}
		fmt.Fprintf(&out, "%s %s", name, b)
	}
	return out.String()
}

const testPods = `
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: web
    image: localhost/busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "echo says hello; mkdir /www; echo over the bridge > /www/index.html; exec httpd -f -p 8080 -h /www"]
---
apiVersion: v1
kind: Pod
metadata: {name: libc}
spec:
  terminationGracePeriodSeconds: 0
  hostPID: true
  containers:
  - name: libc
    image: localhost/glibc:test
    imagePullPolicy: Never
    command: [sleep, "3600"]
`

func TestNode(t *testing.T) {
	l := needNode(t)
	const name = "cluster-test"
	settings := tunables(t)
	shared := t.TempDir()
	n, state := startNode(t, l, name, "--bind", shared, "--label", "example.com/gpu=true,tier=test", "--max-pods", "17")
	in := func(command string, args ...string) string {
		t.Helper()
		return mustCluster(t, "", append([]string{command, "--name", name}, args...)...)
	}
	kubectl := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(in("kubectl", append([]string{"--"}, args...)...))
	}
	t.Run("the Node is as asked for", func(t *testing.T) {
		got := kubectl("get", "node", name, "-o", `jsonpath={.metadata.labels.tier} {.metadata.labels.example\.com/gpu} {.status.capacity.pods} {.status.nodeInfo.kubeletVersion} {.status.nodeInfo.containerRuntimeVersion}`)
		if want := "test true 17 " + kubernetesVersion + " containerd://" + strings.TrimPrefix(containerdVersion, "v"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	mustCluster(t, testPods, "kubectl", "--name", name, "--", "apply", "-f", "-")
	kubectl("wait", "pod/web", "pod/libc", "--for=condition=Ready", "--timeout=120s")
	t.Run("logs, exec and their exit status", func(t *testing.T) {
		if got := kubectl("logs", "web"); got != "says hello" {
			t.Errorf("logs gave %q", got)
		}
		out, err := cluster(t, "to the pod\n", "kubectl", "--name", name, "--", "exec", "-i", "web", "--", "sh", "-c", "cat; exit 3")
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.HasPrefix(out, "to the pod\n") {
			t.Errorf("exec gave %q, %v; want its input and exit status 3", out, err)
		}
	})
	t.Run("pods and node reach one another", func(t *testing.T) {
		ip := kubectl("get", "pod", "web", "-o", "jsonpath={.status.podIP}")
		if got := in("exec", "--", "busybox", "wget", "-q", "-O", "-", "http://"+ip+":8080/"); got != "over the bridge\n" {
			t.Errorf("the node got %q from the pod", got)
		}
		// The API server, as in-cluster clients find it.
		kubectl("exec", "web", "--", "sh", "-c", `nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null`)
	})
	t.Run("a library's name leads to its file in a pod", func(t *testing.T) {
		if got := kubectl("exec", "libc", "--", "dlopen-check", "libm.so.6"); !strings.HasPrefix(got, "libm.so.6 => /usr/lib/") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("a pod on the host's PID namespace sees the node's", func(t *testing.T) {
		if got := kubectl("exec", "libc", "--", "cat", "/proc/1/cmdline"); !strings.Contains(got, initCommand) {
			t.Errorf("its PID 1 is %q", got)
		}
	})
	t.Run("exec runs a command inside", func(t *testing.T) {
		out, err := cluster(t, "from outside\n", "exec", "--name", name, "--env", "K=v", "--", "sh", "-c", `cat; echo "$K $(hostname)"; exit 7`)
		var exit *exec.ExitError
		if want := "from outside\nv " + name + "\n"; !errors.As(err, &exit) || exit.ExitCode() != 7 || out != want {
			t.Errorf("got %q, %v; want %q and exit status 7", out, err, want)
		}
		out, err = cluster(t, "", "exec", "--name", name, "--", "no-such-program")
		if !errors.As(err, &exit) || exit.ExitCode() != 127 {
			t.Errorf("a program that is not there gave %q, %v; want exit status 127", out, err)
		}
	})
	t.Run("a command inside ends with its caller", func(t *testing.T) {
		caller := exec.Command("/proc/self/exe")
		caller.Args = []string{"cluster", "exec", "--name", name, "--", "sh", "-c", "echo $$ > /tmp/pid; exec sleep 3600"}
		if err := caller.Start(); err != nil {
			t.Fatal(err)
		}
		runs := func() bool {
			_, err := cluster(t, "", "exec", "--name", name, "--", "sh", "-ec", `p=$(cat /tmp/pid); test "$p"; kill -0 "$p"`)
			return err == nil
		}
		await(t, "the command starts", func() error {
			if !runs() {
				return errors.New("it does not run")
			}
			return nil
		})
		if err := caller.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = caller.Wait() // it was killed
		await(t, "the command ends", func() error {
			if runs() {
				return errors.New("it still runs")
			}
			return nil
		})
	})
	t.Run("what is written inside stays inside", func(t *testing.T) {
		mark := filepath.Join("etc", "gpu-agent-cluster-test")
		in("exec", "--", "sh", "-ec", "for d in /"+mark+" /usr/x /opt/x /run/x /dev/x /var/lib/kubelet/x /etc/cdi/x; do echo > $d; done; echo y > "+shared+"/x; "+
			"mknod /dev/nvidia0 c 195 0; mkdir /tmp/modules; echo nvidia > /tmp/modules/f; mount --bind /tmp/modules /proc/driver; cat /proc/driver/f")
		for _, path := range []string{"/" + mark, "/usr/x", "/opt/x", "/run/x", "/dev/x", "/var/lib/kubelet/x", "/etc/cdi/x", "/dev/nvidia0", "/proc/driver/f"} {
			if _, err := os.Lstat(path); err == nil {
				t.Errorf("the host has %s", path)
			}
		}
		if b, err := os.ReadFile(filepath.Join(shared, "x")); err != nil || string(b) != "y\n" {
			t.Errorf("the bound directory has %q, %v", b, err)
		}
		if after := tunables(t); after != settings {
			t.Errorf("the machine's settings were\n%sand are\n%s", settings, after)
		}
	})
	t.Run("an image of one's own", func(t *testing.T) {
		archive := filepath.Join(t.TempDir(), "own.tar")
		mustCluster(t, "", "image", "--out", archive, "--name", "localhost/own:test", "--entrypoint", "/bin/true,x",
			"--file", l.bin("busybox")+":/bin/true", "--user", "1000")
		in("load", archive)
		kubectl("run", "own", "--image=localhost/own:test", "--image-pull-policy=Never", "--restart=Never")
		kubectl("wait", "pod/own", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
	})
	t.Run("processes of one's own", func(t *testing.T) { ownProcess(t, n) })
	t.Run("the kubelet ends and comes back under running pods", func(t *testing.T) {
		status := `jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}`
		container := kubectl("get", "pod", "web", "-o", status)
		in("kill", procKubelet)
		if got := in("pid", procKubelet); got != "0 1\n" {
			t.Errorf("after kill, pid gives %q", got)
		}
		if got := in("exec", "--", "busybox", "pidof", "httpd"); strings.TrimSpace(got) == "" {
			t.Error("the pod ended with the kubelet")
		}
		in("start", procKubelet)
		in("restart", procKubelet)
		if got := in("pid", procKubelet); !strings.HasSuffix(got, " 3\n") || strings.HasPrefix(got, "0 ") {
			t.Errorf("after start and restart, pid gives %q", got)
		}
		kubectl("run", "later", "--image=localhost/busybox:test", "--image-pull-policy=Never", "--restart=Never", "--", "true")
		kubectl("wait", "pod/later", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
		if got := kubectl("get", "pod", "web", "-o", status); got != container {
			t.Errorf("the pod's container was %s and is %s", container, got)
		}
	})
	t.Run("a kubelet that ends by itself is started again", func(t *testing.T) {
		pid, starts, _ := strings.Cut(strings.TrimSpace(in("pid", procKubelet)), " ")
		in("exec", "--", "busybox", "kill", "-KILL", pid)
		await(t, "another kubelet", func() error {
			now, after, _ := strings.Cut(strings.TrimSpace(in("pid", procKubelet)), " ")
			if now == pid || now == "0" || after == starts {
				return fmt.Errorf("it is %s, started %s times; before it was %s, started %s times", now, after, pid, starts)
			}
			return nil
		})
		if got := in("ps"); !strings.Contains(got, "ended by itself: killed") {
			t.Errorf("ps does not say that it ended:\n%s", got)
		}
	})
	t.Run("a kubelet that is shown CPUs which are not there", func(t *testing.T) { absentCPUs(t, n, state) })
	t.Run("the others come back under running pods", func(t *testing.T) {
		status := `jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}`
		container := kubectl("get", "pod", "web", "-o", status)
		for _, process := range []string{procEtcd, procAPI, procContainerd, procController, procScheduler} {
			in("restart", process)
		}
		await(t, "the API server answers", func() error {
			_, err := cluster(t, "", "kubectl", "--name", name, "--", "get", "--raw=/readyz")
			return err
		})
		kubectl("run", "after", "--image=localhost/busybox:test", "--image-pull-policy=Never", "--restart=Never", "--", "true")
		kubectl("wait", "pod/after", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
		if got := kubectl("get", "pod", "web", "-o", status); got != container {
			t.Errorf("the pod's container was %s and is %s", container, got)
		}
	})
	t.Run("a second node stands beside", func(t *testing.T) {
		const other = name + "-2"
		_, second := startNode(t, l, other)
		if got := strings.TrimSpace(mustCluster(t, "", "kubectl", "--name", other, "--", "get", "nodes", "-o", "name")); got != "node/"+other {
			t.Errorf("the second API server knows %q", got)
		}
		mustCluster(t, "", "down", "--name", other)
		if err := traces(other, second, ticksNow()); err != nil {
			t.Errorf("the second node left\n%v", err)
		}
		kubectl("get", "--raw=/readyz")
	})
	if out, err := cluster(t, "", "up", "--name", name); err == nil || !strings.Contains(out, "runs already") {
		t.Errorf("a second up of the same name gave %v\n%s", err, out)
	}
	if out := in("down"); !strings.Contains(out, "is left") {
		t.Errorf("down said %q", out)
	}
	if err := traces(name, state, ticksNow()); err != nil {
		t.Errorf("the node left\n%v", err)
	}
	if out := in("down"); !strings.Contains(out, "did not run") {
		t.Errorf("a second down said %q", out)
	}
}

// absentCPUs gives a pod CPUs of its own that no machine has, and goes back to the
// machine's.
func absentCPUs(t *testing.T, n Node, state State) {
	in := func(command string, args ...string) string {
		t.Helper()
		return mustCluster(t, "", append([]string{command, "--name", n.name}, args...)...)
	}
	inside := func(path string) string { return fmt.Sprintf("/proc/%d/root%s", state.Init.PID, path) }
	write := func(path, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	const first, last, places = 5000, 5007, "/run/processors"
	for cpu := first; cpu <= last; cpu++ {
		at := fmt.Sprintf("%s/node/node%d/cpu%d/topology/", places, (cpu-first)/4, cpu)
		write(inside(at+"core_id"), fmt.Sprintln(cpu))
		write(inside(at+"physical_package_id"), fmt.Sprintln((cpu-first)/4))
	}
	write(inside(places+"/cpu/online"), fmt.Sprintf("%d-%d\n", first, last))
	settings := n.path("etc", "kubernetes", "kubelet.d", "50-test.conf")
	restart := func(prepare func()) {
		t.Helper()
		in("stop", procKubelet)
		prepare()
		in("exec", "--", "rm", "-f", "/var/lib/kubelet/cpu_manager_state", "/var/lib/kubelet/memory_manager_state")
		in("start", procKubelet)
	}
	defer func() { // not Cleanup: by then the test's context has ended
		restart(func() {
			in("exec", "--", "umount", "/sys/devices/system/cpu", "/sys/devices/system/node")
			if err := os.Remove(settings); err != nil {
				t.Error(err)
			}
		})
		in("cpusets", "keep")
		if link, err := os.Readlink(inside(runtimeLink)); err != nil || filepath.Base(link) != "runc" {
			t.Errorf("containers are made by %s (%v), want runc", link, err)
		}
	}()
	restart(func() {
		for _, name := range []string{"cpu", "node"} {
			in("exec", "--", "mount", "--bind", places+"/"+name, "/sys/devices/system/"+name)
		}
		write(settings, fmt.Sprintf("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"+
			"cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node\nreservedSystemCPUs: \"%d\"\n", first))
		in("cpusets", "drop")
	})
	mustCluster(t, `
apiVersion: v1
kind: Pod
metadata: {name: pinned}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: pinned
    image: localhost/busybox:test
    imagePullPolicy: Never
    command: [sleep, "3600"]
    resources: {limits: {cpu: 4, memory: 64Mi}}
`, "kubectl", "--name", n.name, "--", "apply", "-f", "-")
	in("kubectl", "--", "wait", "pod/pinned", "--for=condition=Ready", "--timeout=60s")
	kubelet, err := os.ReadFile(inside("/var/lib/kubelet/cpu_manager_state"))
	if err != nil || !strings.Contains(string(kubelet), fmt.Sprintf(`"pinned":"%d-%d"`, first+4, last)) {
		t.Errorf("the kubelet has given CPUs as %s (%v), want those of the second node to the pod", kubelet, err)
	}
	in("kubectl", "--", "delete", "pod", "pinned")
}

// ownProcess starts one, lets it end by itself, and stops it.
func ownProcess(t *testing.T, n Node) {
	in := func(command string, args ...string) string {
		t.Helper()
		return mustCluster(t, "", append([]string{command, "--name", n.name}, args...)...)
	}
	running := func(starts int) (pid string) {
		t.Helper()
		await(t, fmt.Sprintf("start %d", starts), func() error {
			fields := strings.Fields(in("pid", "own"))
			if len(fields) != 2 || fields[0] == "0" || fields[1] != strconv.Itoa(starts) {
				return fmt.Errorf("pid gives %q", fields)
			}
			pid = fields[0]
			return nil
		})
		return pid
	}
	in("start", "--restart", "--env", "WORD=spoken", "own", "--", "sh", "-c", "echo $WORD; exec sleep 1000")
	in("exec", "--", "kill", "-9", running(1))
	running(2) // started again by the node
	in("stop", "own")
	if got := in("pid", "own"); got != "0 2\n" {
		t.Errorf("after stop, pid gives %q", got)
	}
	in("start", "own")
	running(3)
	if out, err := cluster(t, "", "start", "--name", n.name, "own"); err == nil || !strings.Contains(out, "runs already") {
		t.Errorf("a second start gave %v\n%s", err, out)
	}
	if got := in("logs", "own"); strings.Count(got, "spoken\n") != 3 {
		t.Errorf("three starts logged %q", got)
	}
	in("kill", "own")
	in("start", "once", "--", "sh", "-c", "exit 5")
	await(t, "a process that ends by itself shows", func() error {
		if out := in("ps"); !strings.Contains(out, "ended by itself: exit status 5") {
			return errors.New(out)
		}
		return nil
	})
	if out, err := cluster(t, "", "start", "--name", n.name, "unknown"); err == nil || !strings.Contains(out, "never started") {
		t.Errorf("starting what has no command gave %v\n%s", err, out)
	}
}

// However a node ends, nothing of it is left.
func TestNodeEnds(t *testing.T) {
	l := needNode(t)
	for _, test := range []struct {
		name string
		// end ends the node without asking the program to.
		end func(t *testing.T, state State)
		// alone says that nobody needs to call down for the rest to go.
		alone bool
	}{
		{"its first process is killed", func(t *testing.T, s State) { s.Init.signal(syscall.SIGKILL) }, true},
		{"its keeper is killed", func(t *testing.T, s State) { s.Keeper.signal(syscall.SIGKILL) }, false},
		{"its keeper is asked to end", func(t *testing.T, s State) { s.Keeper.signal(syscall.SIGTERM) }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			const name = "cluster-end"
			_, state := startNode(t, l, name)
			withPod(t, name)
			test.end(t, state)
			ended := ticksNow()
			if test.alone {
				await(t, "everything goes by itself", func() error { return traces(name, state, ended) })
			}
			mustCluster(t, "", "down", "--name", name)
			if err := traces(name, state, ended); err != nil {
				t.Errorf("left behind:\n%v", err)
			}
		})
	}
	t.Run("its caller is killed", func(t *testing.T) {
		const name = "cluster-end"
		// A shell between us and the program is the process to which the node
		// is bound; it says when the node is up and then waits to be killed.
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		caller := exec.Command("bash", "-c", `bash -c 'exec -a cluster "$0" up --name `+name+` --with-parent' "$0"; echo status $?; read forever`, self)
		stdin, err := caller.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		out, err := caller.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := caller.Start(); err != nil {
			t.Fatal(err)
		}
		defer caller.Process.Kill()
		var said bytes.Buffer
		for !strings.Contains(said.String(), "status ") {
			chunk := make([]byte, 4096)
			k, err := out.Read(chunk)
			said.Write(chunk[:k])
			if err != nil {
				t.Fatalf("the caller ended: %v\n%s", err, said.String())
			}
		}
		state, err := l.node(name).state()
		if err != nil || !strings.Contains(said.String(), "status 0") {
			t.Fatalf("no node came up: %v\n%s", err, said.String())
		}
		withPod(t, name)
		if err := caller.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = caller.Wait() // it was killed
		ended := ticksNow()
		await(t, "everything goes by itself", func() error { return traces(name, state, ended) })
		mustCluster(t, "", "down", "--name", name)
	})
	t.Run("it cannot start", func(t *testing.T) {
		const name = "cluster-end"
		// The kubelet refuses to set such a label and ends.
		out, err := cluster(t, "", "up", "--name", name, "--with-parent", "--label", "kubernetes.io/own=x")
		if err == nil {
			t.Fatal("a node with a label that the kubelet refuses came up")
		}
		for _, want := range []string{"kubelet: ended by itself: exit status 1", "--node-labels", "end of"} {
			if !strings.Contains(out, want) {
				t.Errorf("the error does not say %q:\n%s", want, out)
			}
		}
		var state State
		if err := traces(name, state, ticksNow()); err != nil {
			t.Errorf("left behind:\n%v", err)
		}
		if _, err := os.Stat(l.node(name).log(procKubelet)); err != nil {
			t.Errorf("its logs are gone: %v", err)
		}
	})
}

// withPod has a pod run on the node.
func withPod(t *testing.T, name string) {
	t.Helper()
	k := []string{"kubectl", "--name", name, "--"}
	mustCluster(t, "", append(k, "run", "p", "--image=localhost/busybox:test", "--image-pull-policy=Never", "--", "sleep", "3600")...)
	mustCluster(t, "", append(k, "wait", "pod/p", "--for=condition=Ready", "--timeout=120s")...)
}
