// SPDX-License-Identifier: Apache-2.0

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

const (
	// listen is where the node's registry is: containerd takes plain HTTP from the loopback.
	listen   = "127.0.0.1:5000"
	registry = listen + "/team"
	// published is a partition file as README and docs/install.md show one.
	published = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: gpu-partitions, namespace: gpu-agent}\ndata:\n  config.yaml: |\n    version: v1\n" +
		"    partitions:\n      default:\n        - {devices: all, mode: shared}\n"
)

// A release that is published to a registry is installed by the registry's name: nothing of it is on the
// node before.
func TestPublishedRelease(t *testing.T) {
	b := newBench(t)
	ctx, kit, node := t.Context(), b.kit, b.node
	b.registry()
	key := filepath.Join(b.home, "release.key")
	must(t, exec.Command("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key).Run())
	r := b.makeFor(registry, "v0.1.0-rc.1", filepath.Join(kit.Cache, "bin"), "--key", key, "--chart-repository", registry+"/charts/gpu-agent")
	for i, want := range []string{"tagged    " + r.chartReference(), "is there  " + r.chartReference()} {
		if said := b.publish(r); !strings.Contains(said, want) || i == 1 && strings.Contains(said, "pushed ") {
			t.Fatalf("published %d times, it does not say %q:\n%s", i+1, want, said)
		}
	}
	b.signed(r)
	if there := b.exec("ctr", "-n", "k8s.io", "images", "list", "-q"); strings.Contains(there, registry) {
		t.Fatalf("the node has an image of the registry before a pod asked for it:\n%s", there)
	}

	home := b.folder("helm")
	must(t, os.MkdirAll(home, 0o755))
	file := filepath.Join(home, "partitions.yaml")
	must(t, os.WriteFile(file, []byte(published), 0o644))
	b.kubectl("create", "namespace", name)
	b.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=privileged")
	// In the node, where the registry is.
	b.exec("env", "KUBECONFIG=/etc/kubernetes/admin.conf", "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home,
		kit.Bin("helm"), "install", name, "oci://"+registry+"/charts/gpu-agent", "--version", strings.TrimPrefix(r.version, "v"), "--plain-http",
		"--namespace", name, "--set-file", "partitions="+file, "--set-json", `flags={"proc-root":"/host/proc"}`, "--set", "placer.enabled=true")
	b.certificates()
	b.kubectl("label", "node", nodeName, lab.NodeLabel+"=true")
	b.runs(r)
	must(t, node.AwaitAllocatable(ctx, map[string]int{lab.Memory: gpus * units}))
	b.tenant("a", 16).unhurt()
}

// signed looks for the signatures of a release in the registry, as the node sees it: those of both images and the chart, and
// the statements. That they are good is for deployments/image.
func (b *bench) signed(r *madeRelease) {
	b.Helper()
	for repository, digest := range map[string]string{"gpu-agent": r.digest, "gpu-placer": r.placer, "charts/gpu-agent": r.text("gpu-agent-chart-digest")} {
		tag := "sha256-" + strings.TrimPrefix(digest, "sha256:")
		for suffix, kind := range map[string]string{".sig": "simplesigning", ".att": "dsse.envelope"} {
			if suffix == ".att" && repository == "charts/gpu-agent" {
				continue
			}
			if said := b.exec("busybox", "wget", "-q", "-O", "-", "http://"+listen+"/v2/team/"+repository+"/manifests/"+tag+suffix); !strings.Contains(said, kind) {
				b.Errorf("%s%s of %s is\n%s", tag, suffix, repository, said)
			}
		}
	}
}

// text is a file of the release.
func (r *madeRelease) text(name string) string {
	data, _ := os.ReadFile(filepath.Join(r.dir, name))
	return strings.TrimSpace(string(data))
}

// chartReference is the chart's name in the registry, with its tag.
func (r *madeRelease) chartReference() string {
	return r.registry + "/charts/gpu-agent:" + strings.TrimPrefix(r.version, "v")
}

// publish brings a release to the node's registry as `make publish` does, and returns what is said.
func (b *bench) publish(r *madeRelease) string {
	b.Helper()
	return b.exec("env", "DOCKER_CONFIG="+r.dir, b.kit.Bin("image"), "publish", "--from", r.dir, "--version", r.version,
		"--gpu-agent-repository", r.registry+"/gpu-agent", "--gpu-placer-repository", r.registry+"/gpu-placer",
		"--chart-repository", r.registry+"/charts/gpu-agent")
}

// exec runs a command in the node, and returns its output.
func (b *bench) exec(command ...string) string {
	b.Helper()
	out, err := b.node.Exec(b.Context(), command...)
	must(b.T, err)
	b.Logf("%s\n%s", strings.Join(command, " "), out)
	return string(out)
}
