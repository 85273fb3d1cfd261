// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/shown"
)

// domain is the one that README chooses, and candidate the version that docs/install.md publishes.
const (
	domain    = "gpus.your-company.example"
	candidate = "v0.1.0-rc.1"
)

// notRun are the commands of documents that TestFirstDay does not run, and why.
var notRun = map[string]map[string]string{
	"README.md": {
		"make demo":      "the stage demo runs it",
		"make demo-down": "the stage demo runs it",
		"make test":      "it would run all other tests; what it runs is among the stages of this run",
		"make burst":     "the stage burst has its jobs and nodes, and looks at what comes of them",
		"make publish":   "docs/install.md shows it with its arguments, and so it is run",
		"make bench":     "the stage bench runs it, with few repetitions",
	},
	"docs/install.md": {
		"git checkout v0.1.0":               "what is tested is this checkout",
		"helm registry login":               "the registry of this test asks for no credentials",
		"docker login registry.example.com": "the registry of this test asks for no credentials, and a test machine has no Docker",
		"gpu-agent check":                   "README shows it with its arguments, and so it is run",
	},
}

// stays is what the containers of pods do that are to run on: they end when they are asked to.
const stays = "trap 'exit 0' TERM; nvidia-smi; sleep 1000000 & wait"

// day is a first day with the documents: their commands are run on a node, in the order in which a reader
// runs them.
type day struct {
	*bench
	began time.Time
	// dir is the reader's working directory. The node has it at the same path.
	dir string
	// prelude and vars come before each command: what this node is like, and what the reader has assigned.
	prelude string
	vars    []string
	// names are the reader's in place of those in the documents.
	names *strings.Replacer
	pages map[string]*shown.Page
	// lines are the transcript: each command with the seconds.
	lines []string
}

// newDay starts a node with a registry, and reads documents.
func newDay(t *testing.T, files ...string) *day {
	t.Helper()
	b := newBench(t)
	d := &day{bench: b, pages: map[string]*shown.Page{}}
	for _, file := range files {
		page, err := shown.Read(file)
		must(t, err)
		d.pages[file] = page
	}
	b.registry()
	d.dir = b.folder("day")
	for _, dir := range []string{"helm", "bin", "cleanup"} {
		must(t, os.MkdirAll(filepath.Join(d.dir, dir), 0o755))
	}
	must(t, os.Symlink(b.kit.Root, filepath.Join(d.dir, "gpu-agent"))) // a checkout
	must(t, os.Symlink(filepath.Join(b.kit.Root, "deployments"), filepath.Join(d.dir, "deployments")))
	b.Cleanup(func() { os.RemoveAll(d.dir) })
	access, err := b.node.ReadFile("/etc/kubernetes/admin.conf") // as it is within the node's network
	must(t, err)
	must(t, os.WriteFile(filepath.Join(d.dir, "config"), access, 0o600))
	r := b.makeFor(registry, candidate, filepath.Join(b.kit.Cache, "bin"))
	must(t, b.kit.BuildPlugin(t.Context()))
	home, err := os.UserHomeDir()
	must(t, err)
	// The registry speaks plain HTTP, the emulated driver's files of /proc are the node's alone, and what is
	// built must not take the place of what other tests use.
	d.prelude = fmt.Sprintf(`set -euo pipefail
cd %[1]s
export HOME=%[2]s PATH=%[3]s:$PATH KUBECONFIG=%[1]s/config DOCKER_CONFIG=%[1]s KUBECTL_GPU_DOMAIN=%[4]s
export HELM_CACHE_HOME=%[1]s/helm HELM_CONFIG_HOME=%[1]s/helm HELM_DATA_HOME=%[1]s/helm
helm() {
	if [ "$1" = install ]; then
		set -- "$@" --set-json 'flags={"proc-root":"/host/proc"}'
	fi
	case "$3" in oci://*) set -- "$@" --plain-http;; esac
	command helm "$@"
}
make() {
	command make -s --no-print-directory -C %[5]s "$@" CACHE=%[6]s BIN=%[1]s/bin DIST=%[7]s ARCHIVE=%[1]s/gpu-agent.tar PLACER_ARCHIVE=%[1]s/gpu-placer.tar
}
`, d.dir, home, filepath.Dir(b.kit.Bin("helm")), domain, b.kit.Root, b.kit.Cache, r.dir)
	d.names = strings.NewReplacer("registry.example.com/team", registry,
		"VERSION=0.1.0", "VERSION="+strings.TrimPrefix(candidate, "v"), "VERSION=v0.1.0", "VERSION="+candidate,
		"newTag: v0.1.0", "newTag: "+candidate, " NODE", " "+nodeName, "YOUR-REGISTRY", listen+"/mine", "NAME", "notebook-16",
		"CHART -n", "oci://"+registry+"/charts/gpu-agent --version "+strings.TrimPrefix(candidate, "v")+" -n", "example.com/gpu", domain+"/gpu")
	d.began = time.Now()
	return d
}

// registry starts a registry on the node's loopback.
func (b *bench) registry() {
	b.Helper()
	ctx := b.Context()
	must(b.T, b.node.Start(ctx, "registry", b.kit.Bin("cluster"), "registry", "--listen", listen))
	must(b.T, lab.Await(ctx, time.Minute, "the registry to listen", func(ctx context.Context) error {
		said, err := b.node.LogEnd(ctx, "registry")
		if err == nil && !strings.Contains(said, "the registry listens on "+listen) {
			err = fmt.Errorf("it says %q", said)
		}
		return err
	}))
}

// assignments is a line that only gives variables their values.
var assignments = regexp.MustCompile(`^(?:[A-Z_]+=\S+ ?)+$`)

// reads runs commands of a document, each chosen by its beginning, and returns what the last one prints.
// The same commands in other documents count as run, too.
func (d *day) reads(file string, begins ...string) (out string) {
	d.Helper()
	for _, begin := range begins {
		c, err := d.pages[file].Take(begin)
		must(d.T, err)
		for _, page := range d.pages {
			_, _ = page.Take(c.Text) // if it is there
		}
		out = d.shell(c.Text)
	}
	return out
}

// shell runs a command as a reader types it, and notes how long it takes.
func (d *day) shell(command string) string {
	d.Helper()
	command = d.names.Replace(command)
	began := time.Now()
	script := d.prelude + strings.Join(d.vars, "\n") + "\n" + command + "\n"
	if assignments.MatchString(command) {
		d.vars = append(d.vars, command)
	}
	// The reader is at this machine, with the node's network, where the registry is; the runtime's own
	// program is on the node.
	ctx, cancel := context.WithTimeout(d.Context(), 4*time.Minute) // a rollout that never ends
	defer cancel()
	out, err := []byte(nil), error(nil)
	if strings.HasPrefix(command, "ctr ") {
		out, err = d.node.Exec(ctx, "bash", "-c", script)
	} else {
		network := filepath.Join(filepath.Dir(d.node.File("")), "ns", "net")
		out, err = exec.CommandContext(ctx, "nsenter", "--net="+network, "bash", "-c", script).CombinedOutput()
	}
	d.note("(%5.1f s)  $ %s", time.Since(began).Seconds(), command)
	d.Logf("%s", strings.TrimSpace(string(out)))
	if err != nil {
		said, _ := d.node.Kubectl(d.Context(), nil, "describe", "pods", "-A")
		d.Fatalf("%s\n%v\n%s", command, err, said)
	}
	return string(out)
}

// note adds a line to the transcript.
func (d *day) note(format string, args ...any) {
	d.Helper()
	line := fmt.Sprintf("%6.1f s  ", time.Since(d.began).Seconds()) + fmt.Sprintf(format, args...)
	d.lines = append(d.lines, line)
	d.Log(line)
}

// file writes one of the reader's files, as a document shows it, and with what this node takes besides.
func (d *day) file(name, file, with, more string) {
	d.Helper()
	found := d.pages[file].Manifests(with)
	if len(found) == 0 {
		d.Fatalf("%s shows no YAML with %q", file, with)
	}
	must(d.T, os.WriteFile(filepath.Join(d.dir, name), []byte(d.names.Replace(found[0])+more), 0o644))
}

// pod makes a file of a pod or a Job, as a document shows it, with an image that is on the node.
func (d *day) pod(name, file, with, image, command string) {
	d.Helper()
	d.file(name, file, with, "")
	path := filepath.Join(d.dir, name)
	text, err := os.ReadFile(path)
	must(d.T, err)
	written := strings.Replace(string(text), "image: "+image, "image: "+lab.TestImage, 1)
	written = strings.Replace(written, "name: main", `command: [sh, -c, "`+command+`"]`+separator(written)+"name: main", 1)
	must(d.T, os.WriteFile(path, []byte(written), 0o644))
}

// separator is what stands between two fields of the container main: it is written on one line, or on
// several.
func separator(text string) string {
	if strings.Contains(text, "{name: main") {
		return ", "
	}
	return "\n      "
}

// has fails unless a text has all words.
func (d *day) has(text string, words ...string) {
	d.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			d.Errorf("%q is not in\n%s", w, text)
		}
	}
}

// The commands that README, docs/install.md and docs/pods.md show work, in the order in which a reader comes
// to them: on a bare node, with a registry on its loopback. Those of the removal do, too, and leave nothing.
func TestFirstDay(t *testing.T) {
	const readme, install, pods, helm, life = "README.md", "docs/install.md", "docs/pods.md", "docs/helm.md", "docs/lifecycle.md"
	const frameworks = "docs/frameworks.md"
	d := newDay(t, readme, install, pods, frameworks, helm, life)
	before := d.everything()

	// A release is published, and installed by README.
	d.began = time.Now()
	d.reads(install, "make publish")
	d.file("partitions.yaml", readme, "kind: ConfigMap", "")
	d.reads(readme, "REGISTRY=", "kubectl create namespace", "kubectl label namespace", "helm install", "kubectl label node", "kubectl rollout status")
	status := d.reads(readme, "kubectl exec -n gpu-agent ds/gpu-agent -- gpu-agent status")
	d.has(status, domain+"/gpu-mem", "applied")
	d.note("the agent runs")
	d.pod("notebook.yaml", readme, "kind: Pod", "your-cuda-image", stays)
	d.shell("kubectl apply -f notebook.yaml")
	d.shell("kubectl wait --for=condition=Ready pod/notebook --timeout=2m")
	d.has(d.shell("kubectl exec notebook -- nvidia-smi"), "24576MiB")
	d.note("a pod with a cap of 24 GiB runs")
	t.Logf("transcript, in seconds since the registry is there and the release is built:\n%s", strings.Join(d.lines, "\n"))

	// The rest of README.
	d.has(d.reads(readme, "kubectl exec -i -n gpu-agent ds/gpu-agent -- gpu-agent check"), "default")
	for _, command := range []string{"gpu-agent plan --config -", "gpu-agent status"} { // the agent's own
		c, err := d.pages[readme].Take(command)
		must(t, err)
		d.has(d.shell("kubectl exec -i -n gpu-agent ds/gpu-agent -- "+c.Text+" <partitions.yaml"), domain+"/gpu-mem")
	}
	d.has(d.reads(readme, "kubectl get gpunodes"), nodeName, "/158")
	d.has(d.reads(readme, "kubectl gpu"), nodeName, "/158")

	// What the authors of pods read.
	d.reads(pods, "kubectl describe node")
	d.pod("notebook-16.yaml", pods, "name: notebook-16", "your-cuda-image", stays)
	d.pod("train-20.yaml", pods, "name: train-20", "your-training-image", "nvidia-smi")
	d.shell("kubectl apply -f notebook-16.yaml -f train-20.yaml")
	d.shell("kubectl wait --for=condition=Ready pod/notebook-16 --timeout=2m")
	d.shell("kubectl wait --for=condition=Complete job/train-20 --timeout=2m")
	d.has(d.shell("kubectl logs job/train-20"), "24576MiB")
	find, err := d.pages[pods].Take("find / -name")
	must(t, err)
	d.shell(`kubectl exec notebook-16 -- sh -c "` + find.Text + ` 2>/dev/null || true"`)
	d.has(d.reads(pods, "kubectl describe pod"), "notebook-16")
	d.has(d.reads(pods, "kubectl gpu why"), "the pod runs on "+nodeName)
	d.shell("kubectl delete --wait -f notebook.yaml -f notebook-16.yaml -f train-20.yaml")

	// By Helm it goes as docs/helm.md says.
	d.reads(helm, "helm upgrade gpu-agent CHART -n gpu-agent --reset-then-reuse-values --set cleanup=true", "kubectl -n gpu-agent rollout status", "helm uninstall gpu-agent", "kubectl delete namespace")
	d.gone(before, domain)

	// From source, without a registry.
	d.file("partitions.yaml", install, "kind: ConfigMap", "")
	d.reads(install, "make image", "ctr -n k8s.io images import")
	d.reads(install, "kubectl create namespace", "kubectl label namespace", "helm install gpu-agent deployments/chart", "kubectl label node NODE $DOMAIN", "kubectl rollout status")
	d.has(d.shell("kubectl get pods -n gpu-agent -o wide"), "Running")
	d.has(d.shell("kubectl exec -n gpu-agent ds/gpu-agent -- gpu-agent status"), "applied")
	d.has(d.reads(install, "kubectl gpu"), nodeName)
	d.shell("helm upgrade gpu-agent deployments/chart -n gpu-agent --reset-then-reuse-values --set cleanup=true")
	d.reads(helm, "kubectl -n gpu-agent rollout status", "helm uninstall gpu-agent", "kubectl delete namespace")
	d.gone(before, domain)

	// By kustomize, whose manifests have another domain.
	d.names = strings.NewReplacer("registry.example.com/team", registry, "newTag: v0.1.0", "newTag: "+candidate, " NODE", " "+nodeName)
	d.file("kustomization.yaml", install, "# kustomization.yaml", emulated)
	d.file("cleanup/kustomization.yaml", life, "# cleanup/kustomization.yaml", "")
	d.reads(install, "kubectl apply -k .", "kubectl label node NODE example.com", "kubectl rollout status")
	d.has(d.reads(install, "kubectl exec -n gpu-agent ds/gpu-agent"), "example.com/gpu-mem", "applied")
	d.reads(life, "kubectl -n gpu-agent delete daemonset", "kubectl apply -k cleanup", "kubectl -n gpu-agent rollout status", "kubectl delete -k cleanup", "kubectl delete -k .",
		"kubectl label nodes --all", "kubectl annotate nodes --all")
	d.gone(before, "")

	for _, file := range []string{readme, install, pods, frameworks} {
		because := notRun[file]
		for _, c := range d.pages[file].Left() {
			if because[c.Text] == "" {
				t.Errorf("%s is shown, and no test runs it", c)
			} else {
				t.Logf("not run: %s: %s", c, because[c.Text])
			}
			delete(because, c.Text)
		}
		for command := range because {
			t.Errorf("%s does not show %q, or it was run: it needs no reason not to be", file, command)
		}
	}
}

// emulated has the agent look where the emulated driver has the files of /proc.
const emulated = `  - target: {kind: DaemonSet, name: gpu-agent}
    patch: |
      apiVersion: apps/v1
      kind: DaemonSet
      metadata: {name: gpu-agent}
      spec: {template: {spec: {containers: [{name: gpu-agent, env: [{name: GPU_AGENT_PROC_ROOT, value: /host/proc}]}]}}}
`

// gone checks that nothing of an installation is left but the label by which an operator has chosen the
// node, which is taken away if its domain is not empty.
func (d *day) gone(before map[string]bool, domain string) {
	d.Helper()
	if domain != "" {
		d.shell("kubectl label node NODE " + domain + "/gpu.node-")
	}
	if err := lab.Await(d.Context(), time.Minute, "everything to be as it was before", func(context.Context) error {
		if left := differences(before, d.everything()); len(left) > 0 {
			return errors.New(strings.Join(left, "\n"))
		}
		return nil
	}); err != nil {
		d.Error(err)
	}
}
