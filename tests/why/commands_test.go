// SPDX-License-Identifier: Apache-2.0

package why

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kubectlgpu"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/shown"
)

// each has one GPU of each kind.
const each = `version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1], mode: whole}
    - {devices: [2], mode: mig}
`

// has fails unless a text has all words.
func (b *bench) has(what, text string, words ...string) {
	b.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			b.Errorf("%s lacks %q:\n%s", what, w, text)
		}
	}
}

// Every command works on a real node, for an operator with the manifests' roles alone.
func TestCommands(t *testing.T) {
	b := begin(t)
	b.sub("commands", func(b *bench) { b.commands() })
}

func (b *bench) commands() {
	ctx := b.Context()
	b.partitions(each, "applied", nil)
	b.offers(map[string]int{lab.Memory: units, lab.GPU: 1, lab.MIG("1g.10gb"): 7})
	mount, err := lab.ProbeMount(ctx)
	b.must(err)
	tenant := b.create(lab.Pod{Name: "tenant", Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 8}, Mounts: []lab.Mount{mount}}}})
	b.must(tenant.Running(ctx))
	probe, err := tenant.Probe(ctx, "main", nil)
	b.must(err)
	defer probe.Close()
	if a, err := probe.Ask("take cuMemAlloc_v2 %d 2", 1<<30); err != nil || a.Result() != lab.Success {
		b.Fatalf("take memory: %s, %v", a, err)
	}

	// The node's object follows what happens by a moment.
	b.must(lab.Await(ctx, time.Minute, "the table to tell of the pod", func(context.Context) error {
		if text := b.works(operator); !strings.Contains(text, "gpu-mem 71/79") {
			return fmt.Errorf("it is\n%s", text)
		}
		return nil
	}))
	b.has("the table", b.works(operator), nodeName, "1 whole, 1 shared, 1 mig", "gpu-mem 71/79", "gpu 1/1", "-\n")
	b.has("the table for an author", b.works(author), nodeName, "gpu-mem 71/79", "not seen: Nodes, pods of the agent")

	status := b.works(operator, "status", nodeName)
	for _, g := range driver.GPUs {
		b.has("status", status, g.UUID)
	}
	b.has("status", status, "work/tenant", "gpu-mem")
	if a := b.plugin(author, "", "status", nodeName); a.code == 0 || !strings.Contains(a.errs, "pods is forbidden") {
		b.Errorf("an author may ask for the status: %d\n%s%s", a.code, a.out, a.errs)
	}

	b.must(lab.Await(ctx, time.Minute, "top to show what the pod has taken", func(ctx context.Context) error {
		var top kubectlgpu.Top
		if err := json.Unmarshal([]byte(b.works(operator, "top", "-o", "json")), &top); err != nil {
			return err
		}
		i := slices.IndexFunc(top.Containers, func(u kubectlgpu.Usage) bool { return u.Pod == "tenant" })
		if i < 0 {
			return errors.New("it does not list the pod")
		}
		u := top.Containers[i]
		if u.Node != nodeName || u.UsedMiB == nil || *u.UsedMiB < 2048 || u.CapMiB == nil || *u.CapMiB != 8<<10 || u.Guarantee != "api" {
			return fmt.Errorf("it has %+v", u)
		}
		return nil
	}))
	b.has("top", b.works(operator, "top", nodeName), "tenant", "8.0 GiB", "api")

	b.usage()
	b.judged()

	b.has("logs", b.works(operator, "logs", nodeName), "msg=partition", "state=applied")
	if lines := strings.Count(b.works(operator, "logs", nodeName, "--tail", "3"), "\n"); lines != 3 {
		b.Errorf("logs --tail 3 prints %d lines", lines)
	}
	b.bundles()
	b.completes()

	b.verifies(map[string]string{lab.Memory: "one GPU of 1024 MiB", lab.GPU: driver.GPUs[1].UUID, lab.MIG("1g.10gb"): "one MIG 1g.10gb (MIG-",
		lab.MIG("7g.80gb"): "one MIG 7g.80gb (MIG-", lab.MIG("1g.10gb+me"): "one MIG 1g.10gb+me (MIG-"})

	ran["why"] = true // TestWhy
	page, err := shown.Read("docs/kubectl.md")
	b.must(err)
	for _, c := range page.Commands {
		words := append(strings.Fields(c.Text), "")
		if words[0] == "kubectl" && words[1] == "gpu" && !ran[words[2]] {
			b.Errorf("%s is shown, and this test does not run it", c)
		}
	}
}

// claimed has GPUs that are offered through DRA: by memory, whole, and as what is asked first.
const claimed = `version: v1
partitions:
  default:
    - {devices: [0], mode: shared, api: dra}
    - {devices: [1], mode: whole, api: dra}
    - {devices: [2], mode: dynamic, api: dra, profiles: [1g.10gb, 3g.40gb]}
`

// What a node offers to claims is verified by claims.
func TestVerifyClaims(t *testing.T) {
	b := begin(t)
	ctx := t.Context()
	var err error
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		err := agent.SetPartitions(ctx, usual)
		if err == nil {
			agent, err = deploy(ctx)
		}
		if err := errors.Join(err, node.RemoveComponent(ctx, "dra"), node.AwaitAllocatable(ctx, map[string]int{lab.Memory: 2 * units, lab.GPU: 1})); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	agent, err = deploy(ctx, "dra")
	b.must(err)
	b.sub("claims", func(b *bench) {
		b.must(agent.SetPartitions(ctx, claimed))
		_, err := agent.AwaitState(ctx, "applied")
		b.must(err)
		// A name moves to DRA once the kubelet lists no device of it.
		b.must(lab.Await(ctx, 3*time.Minute, "the whole GPU to be on offer to claims", func(ctx context.Context) error {
			list, err := node.Slices(ctx, "gpus."+lab.Domain)
			if err != nil {
				return err
			}
			for _, s := range list {
				for _, d := range s.Devices {
					if len(d.Taints) > 0 {
						return fmt.Errorf("device %s has the taints %v", d.Name, d.Taints)
					}
				}
			}
			if len(list) == 0 {
				return errors.New("there is no ResourceSlice")
			}
			return nil
		}))
		b.verifies(map[string]string{"gpu." + lab.Domain: "it sees NVIDIA", "gpu-memory." + lab.Domain: "one GPU of 1024 MiB",
			"mig-1g.10gb." + lab.Domain: "one MIG 1g.10gb (MIG-", "mig-3g.40gb." + lab.Domain: "one MIG 3g.40gb (MIG-"})
		out, err := node.Kubectl(ctx, nil, "get", "resourceclaims", "-n", lab.PodNamespace, "-o", "name")
		if err != nil || len(out) > 0 {
			b.Errorf("the claims of verify are left: %s, %v", out, err)
		}
	})
}

// verifies runs verify. Each example must work; those of want must be among them, and say so.
func (b *bench) verifies(want map[string]string) {
	b.Helper()
	var v kubectlgpu.Verification
	b.must(json.Unmarshal([]byte(b.works(operator, "verify", nodeName, "-o", "json")), &v))
	for _, e := range v.Examples {
		name := e.Resource + e.DeviceClass
		b.Logf("%s %s: %s", name, e.Outcome, e.Says)
		if e.Outcome != kubectlgpu.Works || !strings.Contains(e.Says, want[name]) {
			b.Errorf("the example of %s %s: %s; want that it sees %s", name, e.Outcome, e.Says, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		b.Errorf("there is no example of %v", want)
	}
	b.must(lab.Await(b.Context(), time.Minute, "the pods of verify to be gone", func(ctx context.Context) error {
		pods, err := node.Pods(ctx, "app.kubernetes.io/managed-by=kubectl-gpu")
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("there are %v", pods)
		}
		return err
	}))
}

// usage has the account of the tenant.
func (b *bench) usage() {
	b.Helper()
	b.must(lab.Await(b.Context(), time.Minute, "the account to have the pod", func(context.Context) error {
		var a kubectlgpu.Account
		if err := json.Unmarshal([]byte(b.works(operator, "usage", "--by", "pod", "-o", "json")), &a); err != nil {
			return err
		}
		for _, s := range a.Sums {
			if strings.HasSuffix(s.Name, "work/tenant") && s.Grants == 1 && s.GrantedGiBHours > 0 {
				return nil
			}
		}
		return fmt.Errorf("it has %+v", a.Sums)
	}))
	b.has("usage", b.works(operator, "usage", nodeName), "NAMESPACE", lab.PodNamespace)
	b.has("usage --at", b.works(operator, "usage", "--at", "1s"), nodeName, "tenant", "units 0-7")
}

// judged has partition files judged that do nothing, wait, and are wrong.
func (b *bench) judged() {
	b.Helper()
	dir := b.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		b.must(os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: gpu-partitions, namespace: gpu-agent}\ndata:\n  config.yaml: |\n    " +
		strings.ReplaceAll(strings.TrimSpace(each), "\n", "\n    ") + "\n"
	same, waits := file("same.yaml", manifest), file("waits.yaml", strings.Replace(each, "mode: shared", "mode: whole", 1))
	odd := file("odd.yaml", strings.Replace(each, "mode: mig", "mode: sliced", 1))
	large := file("large.yaml", strings.Replace(each, "devices: [2]", "devices: [9]", 1))

	b.has("a plan of what is there", b.works(operator, "plan", same, "--node", nodeName), "would be applied", "nothing to do", "71 of 79 free")
	a := b.plugin(operator, "", "plan", waits, "--all")
	if b.has("a plan that waits", a.out, "work/tenant"); a.code != 3 {
		b.Errorf("a plan that waits for a holder ends with %d", a.code)
	}
	b.has("a check of what is there", b.works(operator, "check", same), nodeName)
	for path, words := range map[string][]string{odd: {odd + ":6:", "sliced"}, large: {large + ":6:", "9"}} {
		a = b.plugin(operator, "", "check", path)
		if b.has("a check of "+filepath.Base(path), a.out+a.errs, words...); a.code != 5 {
			b.Errorf("a check of %s ends with %d", filepath.Base(path), a.code)
		}
	}
	if a = b.plugin(operator, manifest, "check", "-"); a.code != 0 {
		b.Errorf("a check of the standard input ends with %d: %s%s", a.code, a.out, a.errs)
	}
}

// bundles reads archives.
func (b *bench) bundles() {
	b.Helper()
	for _, redact := range []bool{false, true} {
		path := filepath.Join(b.TempDir(), "bundle.tar.gz")
		args := []string{"bundle", nodeName, "--file", path}
		if redact {
			args = append(args, "--redact")
		}
		b.works(operator, args...)
		f, err := os.Open(path)
		b.must(err)
		defer f.Close()
		z, err := gzip.NewReader(f)
		b.must(err)
		parts := map[string]string{}
		for r := tar.NewReader(z); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			b.must(err)
			text, err := io.ReadAll(r)
			b.must(err)
			parts[strings.TrimPrefix(h.Name, "gpu-"+nodeName+"/")] = string(text)
		}
		for name, words := range map[string][]string{"why.txt": {nodeName}, "why.json": {`"code"`}, "events.json": {"["}, "gpunode.json": {driver.GPUs[0].UUID},
			"node.json": {nodeName}, "agent-pod.json": {"gpu-agent"}, "partitions.yaml": {"mode: shared"}, "log.txt": {"msg=partition"},
			"status.json": {driver.GPUs[0].UUID}, "status.txt": {"gpu-mem"}, "settings.json": {"health-hold"}, "journal.jsonl": {"gpu-mem"}, "versions.json": {`"agent"`}} {
			b.has("the bundle's "+name, parts[name], words...)
		}
		if parts["missing.txt"] != "" {
			b.Errorf("the bundle lacks %s", parts["missing.txt"])
		}
		named := strings.Contains(parts["status.json"]+parts["journal.jsonl"], "tenant")
		if named == redact {
			b.Errorf("with redact %v the bundle names the tenant's pod: %v", redact, named)
		}
	}
}

// completes has kubectl ask the plugin for names.
func (b *bench) completes() {
	b.Helper()
	for line, want := range map[string]string{"gpu status ": nodeName, "gpu why pod/t": "pod/tenant", "gpu ver": "verify"} {
		words := strings.Split(line, " ")
		cmd := exec.CommandContext(b.Context(), kit.Bin("kubectl"), append([]string{"__complete"}, words...)...)
		cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(kit.Bin("kubectl"))+":"+os.Getenv("PATH"), "KUBECONFIG="+config, "KUBECTL_GPU_NAMESPACE="+lab.PodNamespace)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil || !strings.Contains("\n"+out.String(), "\n"+want) {
			b.Errorf("kubectl completes %q with %q, want %s: %v %s", line, out.String(), want, err, errs.String())
		}
	}
}
