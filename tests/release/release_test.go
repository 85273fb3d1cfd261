// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/lab"
)

var (
	built = flag.Bool("built", false, "everything that the node needs stands in the cache already")
	from  = flag.String("from", "", "`FOLDER` of the older release; empty makes it of the first release's tag, or of today's programs without that")
)

const (
	nodeName = "release"
	// name is the Helm release's, its namespace's and the DaemonSet's.
	name = "gpu-agent"
	// placer is the namespace of the placer, and all that is its own.
	placer = "gpu-placer"
	gpus   = 2
	// units are those of a GPU: an H100-80GB has 81,559 MiB, of which the driver keeps some.
	units      = 79
	partitions = "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared}\n"
)

// bench is a test with a node on which Helm is at work.
type bench struct {
	*testing.T
	kit  *lab.Kit
	node *lab.Node
	// home is where Helm keeps what is its own, config how it reaches the API server.
	home, config string
}

// newBench starts a node with an emulated driver. Whatever becomes of the test, the node is ended.
func newBench(t *testing.T) *bench {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skip("this machine lacks ", missing)
	}
	ctx := t.Context()
	kit, err := lab.NewKit(t.Output())
	must(t, err)
	if !*built {
		for _, s := range kit.Steps() {
			must(t, s.Run(ctx))
		}
		must(t, kit.Run(ctx, kit.Bin("cluster"), "build", "--with", "helm"))
	}
	must(t, kit.Down(ctx, nodeName))
	t.Cleanup(func() {
		if err := kit.Down(context.Background(), nodeName); err != nil {
			t.Error(err)
		}
	})
	node, err := kit.Up(ctx, lab.NodeOptions{Name: nodeName, WithParent: true, PromptStatus: true})
	must(t, err)
	b := &bench{T: t, kit: kit, node: node, home: t.TempDir()}
	b.config = filepath.Join(b.home, "config")
	must(t, os.WriteFile(b.config, []byte(b.kubectl("config", "view", "--raw")), 0o600))
	_, err = node.LayDriver(ctx, lab.DriverOptions{Root: "/", Model: "H100-80GB", Count: gpus})
	must(t, err)
	must(t, node.Namespace(ctx, lab.PodNamespace))
	return b
}

// A release is installed, upgraded and rolled back while pods use GPUs, and uninstalled.
func TestLifeOfARelease(t *testing.T) {
	b := newBench(t)
	ctx, kit, node := t.Context(), b.kit, b.node
	before := b.everything()

	older := b.older()
	must(t, kit.BuildNext(ctx))
	newer := b.make("v0.2.0-rc.1", filepath.Join(kit.Cache, "next", "bin"))
	b.load(older)
	b.load(newer)

	// As docs/helm.md has it. The emulated driver's files of /proc are the node's alone.
	file := filepath.Join(b.home, "partitions.yaml")
	must(t, os.WriteFile(file, []byte(partitions), 0o644))
	b.kubectl("create", "namespace", name)
	b.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=privileged")
	b.helm("install", name, older.chart(), "--set-file", "partitions="+file, "--set-json", `flags={"proc-root":"/host/proc"}`, "--set", "placer.enabled=true")
	b.certificates()
	b.kubectl("label", "node", nodeName, lab.NodeLabel+"=true")
	b.runs(older)
	must(t, node.AwaitAllocatable(ctx, map[string]int{lab.Memory: gpus * units}))

	tenants := []*tenant{b.tenant("a", 16), b.tenant("b", units), b.tenant("c", 40)}
	churn := b.churn(4)
	for _, step := range []struct {
		do   []string
		then *madeRelease
	}{
		{[]string{"upgrade", name, newer.chart(), "--reset-then-reuse-values"}, newer},
		{[]string{"rollback", name}, older},
		{[]string{"upgrade", name, newer.chart(), "--reset-then-reuse-values"}, newer},
	} {
		since := churn.done.Load()
		b.helm(step.do...)
		b.runs(step.then)
		must(t, lab.Await(ctx, time.Minute, "new pods to run after helm "+step.do[0], func(context.Context) error {
			if n := churn.done.Load() - since; n < 3 {
				return fmt.Errorf("%d did", n)
			}
			return nil
		}))
		for _, x := range tenants {
			x.unhurt()
		}
	}
	churn.end()

	b.uninstall(newer)
	err := lab.Await(ctx, time.Minute, "everything to be as it was before", func(context.Context) error {
		if left := differences(before, b.everything()); len(left) > 0 {
			return errors.New(strings.Join(left, "\n"))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// uninstall goes docs/helm.md's way.
func (b *bench) uninstall(r *madeRelease) {
	must(b.T, b.node.DeletePods(b.Context()))
	b.helm("upgrade", name, r.chart(), "--reset-then-reuse-values", "--set", "cleanup=true")
	b.kubectl("rollout", "status", "-n", name, "daemonset/gpu-agent-cleanup", "--timeout=3m")
	b.helm("uninstall", name)
	b.kubectl("delete", "namespace", name, "--timeout=2m")
	b.kubectl("label", "node", nodeName, lab.NodeLabel+"-") // which the operator has set
}

// madeRelease is a release's folder, and where its chart finds the images.
type madeRelease struct{ dir, version, registry, digest, placer string }

func (r *madeRelease) chart() string {
	return filepath.Join(r.dir, "gpu-agent-"+strings.TrimPrefix(r.version, "v")+".tgz")
}

// older is the release that is upgraded from: that of the folder, or the first one, as its tag builds it.
func (b *bench) older() *madeRelease {
	if *from == "" {
		dir := b.folder("sources")
		err := b.kit.Sources(b.Context(), lab.FirstRelease, dir)
		if errors.Is(err, gpu.ErrNotFound) {
			b.Log("the upgrade is not from a release, but from today's programs: ", err)
			return b.make("v0.1.0-rc.1", filepath.Join(b.kit.Cache, "bin"))
		}
		must(b.T, err)
		bin := b.folder("bin")
		must(b.T, b.kit.Run(b.Context(), "make", "--no-print-directory", "-s", "-C", dir, "build", "BIN="+bin, "VERSION="+lab.FirstRelease))
		return b.makeOf(dir, "localhost", lab.FirstRelease, bin)
	}
	archives, err := filepath.Glob(filepath.Join(*from, "gpu-agent-*.oci.tar"))
	must(b.T, err)
	if len(archives) != 1 {
		b.Fatalf("%s has the archives %q of the agent, want the one of a release", *from, archives)
	}
	v := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(archives[0]), "gpu-agent-"), ".oci.tar")
	// The node sees the cache, at the same path.
	dir := b.folder(v)
	must(b.T, os.CopyFS(dir, os.DirFS(*from)))
	return b.read(dir, v)
}

// make makes a release of programs.
func (b *bench) make(version, bin string) *madeRelease { return b.makeFor("localhost", version, bin) }

// makeFor makes a release for a registry.
func (b *bench) makeFor(registry, version, bin string, flags ...string) *madeRelease {
	return b.makeOf(b.kit.Root, registry, version, bin, flags...)
}

// makeOf makes a release of the sources in a folder.
func (b *bench) makeOf(sources, registry, version, bin string, flags ...string) *madeRelease {
	dir := b.folder(version)
	must(b.T, b.kit.Run(b.Context(), b.kit.Bin("image"), append([]string{"release", "--out", dir, "--checkout", sources, "--version", version,
		"--gpu-agent-repository", registry + "/gpu-agent", "--gpu-placer-repository", registry + "/gpu-placer",
		"--bin", runtime.GOARCH + "=" + bin, "--cache", filepath.Join(b.kit.Cache, "images", "debian"), "--newer"}, flags...)...))
	r := b.read(dir, version)
	r.registry = registry
	return r
}

// folder is a new one's name.
func (b *bench) folder(version string) string {
	parent, err := b.node.Dir("releases")
	must(b.T, err)
	dir := filepath.Join(parent, version)
	must(b.T, os.RemoveAll(dir))
	b.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (b *bench) read(dir, version string) *madeRelease {
	digest, err := os.ReadFile(filepath.Join(dir, "gpu-agent-digest"))
	must(b.T, err)
	placer, err := os.ReadFile(filepath.Join(dir, "gpu-placer-digest"))
	must(b.T, err)
	return &madeRelease{dir, version, "localhost", strings.TrimSpace(string(digest)), strings.TrimSpace(string(placer))}
}

// load brings a release's images onto the node, as docs/release.md says.
func (b *bench) load(r *madeRelease) {
	for _, of := range []string{name, placer} {
		_, err := b.node.Exec(b.Context(), "ctr", "-n", "k8s.io", "images", "import", filepath.Join(r.dir, of+"-"+r.version+".oci.tar"))
		must(b.T, err)
	}
}

// certificates gives the placer what its door takes, as docs/placer.md says of Helm. Until
// then its pods say what is missing, and are started again.
func (b *bench) certificates() {
	dir := b.folder("door")
	must(b.T, b.kit.Run(b.Context(), b.kit.Bin(placer), "certificates", "--out", dir))
	args := []string{"-n", placer, "create", "secret", "generic", "gpu-placer-door"}
	for _, file := range []string{"ca.crt", "tls.crt", "tls.key"} {
		args = append(args, "--from-file="+filepath.Join(dir, file))
	}
	b.kubectl(args...)
}

// runs waits until the agent that runs is a release's, by the digest of its image, and one placer
// leads that is.
func (b *bench) runs(r *madeRelease) {
	b.Helper()
	b.kubectl("rollout", "status", "-n", name, "daemonset/"+name, "--timeout=3m")
	must(b.T, lab.Await(b.Context(), time.Minute, "the agent of "+r.version+" alone", func(context.Context) error {
		said := b.kubectl("get", "pods", "-n", name, "-o", "jsonpath={range .items[*]}{.spec.containers[0].image} {.status.containerStatuses[0].ready} {.status.containerStatuses[0].restartCount}{end}")
		if want := r.registry + "/gpu-agent@" + r.digest + " true 0"; said != want {
			return fmt.Errorf("there are %q, want %q", said, want)
		}
		return nil
	}))
	must(b.T, lab.Await(b.Context(), 3*time.Minute, "a placer of "+r.version, func(context.Context) error {
		said := b.kubectl("get", "pods", "-n", placer, "-o", "jsonpath={range .items[*]}{.spec.containers[0].image} {.status.containerStatuses[0].ready},{end}")
		if want := r.registry + "/gpu-placer@" + r.placer; strings.Count(said, want) != 2 || strings.Count(said, want+" true,") != 1 {
			return fmt.Errorf("there are %q, want two of %s, one of them ready", said, want)
		}
		return nil
	}))
}

func (b *bench) helm(args ...string) {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), b.kit.Bin("helm"), append(args, "--namespace", name)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+b.config, "HELM_CACHE_HOME="+b.home, "HELM_CONFIG_HOME="+b.home, "HELM_DATA_HOME="+b.home)
	out, err := cmd.CombinedOutput()
	b.Logf("helm %s\n%s", strings.Join(args, " "), bytes.TrimSpace(out))
	if err != nil {
		b.Fatalf("helm %s: %v", args[0], err)
	}
}

func (b *bench) kubectl(args ...string) string {
	b.Helper()
	out, err := b.node.Kubectl(b.Context(), nil, args...)
	if err != nil {
		said, _ := b.node.Kubectl(b.Context(), nil, "describe", "pods", "-n", name)
		b.Fatalf("%v\n%s", err, said)
	}
	return string(out)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
