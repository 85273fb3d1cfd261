// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/command"
)

const recordedNodes = "../../tests/testdata/inventories/"

func TestExport(t *testing.T) {
	config := write(t, "partitions.yaml", "version: v1\npartitions:\n  default: [{devices: all, mode: shared}]\n  mig: [{devices: all, mode: mig}]\n  whole: [{devices: all, mode: whole}]\n")
	const a100, small = recordedNodes + "a100-80gb.json", recordedNodes + "a100-40gb.json"
	kueue := func(args ...string) []string {
		return append([]string{"export", "kueue", "--config", config, "--team", "research=2"}, args...)
	}
	for _, tt := range []struct {
		args []string
		ok   bool
		says string // on standard output, or in the error
	}{
		{kueue("--cloud", "none", "on-prem="+a100), true, "nominalQuota: 632Gi"},
		{kueue("--cloud", "none", "on-prem="+a100, "--memory-unit", "2GiB"), true, `{name: example.com/gpu-mem, nominalQuota: "312"}`},
		{kueue("--cloud", "none", "on-prem/mig="+a100, "--resource-domain", "res.example.com"), true, "res.example.com/mig-3g.40gb"},
		{kueue("--cloud", "none", "on-prem/mig="+a100, "--api", "dra"), true, "No topology"},
		{kueue("--cloud", "none", "on-prem/mig="+a100, "--api", "dra", "--dra", "claims", "--configuration"), true, "name: memory"},
		{kueue("--cloud", "none", "on-prem/mig="+a100, "--configuration"), true, "{example.com/gpu-memory: 40Gi}"},
		{kueue("--cloud", "none", "on-prem/mig="+a100, "--topology=false", "--team", "web,on-prem"), true, "name: web"},
		{kueue("--cloud", "a/b/c=100GiB", "--cloud", "d=1GiB", "on-prem="+a100), true, "gpu.model: b"},
		{kueue("on-prem=" + a100), false, "--cloud is missing"},
		{kueue("--cloud", "none", "--cloud", "a=1GiB", "on-prem="+a100), false, "--cloud is missing"},
		{kueue("--cloud", "none", "on-prem="+a100, "on-prem/whole="+small, "on-prem/whole="+a100), false, "40Gi on a100-40gb and 80Gi on a100-80gb"},
		{kueue("--cloud", "none", "on-prem/none="+a100), false, "no partition is named"},
		{kueue("--cloud", "none", "on-prem"), false, "WORD[/PARTITION]=FILE"},
		{kueue("--cloud", "none", "on-prem=nowhere.json"), false, "nowhere.json"},
		{kueue("--cloud", "none", "on-prem="+a100, "--domain", "Example_com"), false, "--domain"},
		{[]string{"export", "kueue", "--cloud", "none", "--team", "a", "on-prem=" + a100}, false, "--config is missing"},
		{[]string{"export", "karpenter", "--config", config, "--site", "cloud", "--nodepool", "p", "p4de=" + a100}, true, `example.com/gpu-mem: "632"`},
		{[]string{"export", "karpenter", "--config", config, "p4de/mig=" + a100}, true, `example.com/gpu.partition: "mig"`},
		{[]string{"export", "cluster-autoscaler", "--config", config, "--form", "azure", "p4de=" + a100}, true, "resources_example.com_gpu-mem"},
		{[]string{"export", "cluster-autoscaler", "--config", config, "p4de=" + a100}, false, "--form is missing"},
		{[]string{"export", "cluster-autoscaler", "--kubeconfig", "nowhere", "--form", "aws"}, false, "nowhere"},
	} {
		out, _, err := execute(t, tt.args...)
		said := out
		if err != nil {
			said = err.Error()
		}
		if (err == nil) != tt.ok || !strings.Contains(said, tt.says) || err != nil && out != "" {
			t.Errorf("%q: %v\n%s\nwant ok %v and %q", tt.args, err, out, tt.ok, tt.says)
		}
	}
	for _, args := range [][]string{{"export"}, {"export", "slurm"}, kueue("--cloud", "a"), kueue("--cloud", "a=x"), kueue("--cloud", "a/b=1GiB"), kueue("--team", "a=b"), kueue("--team", "a,cloud"), kueue("--dra", "both"),
		{"export", "cluster-autoscaler", "--form", "gce"}} {
		if _, _, err := execute(t, args...); command.ExitOf(err) != command.Usage {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// An export reads $KUBECONFIG, as kubectl does, unless a flag names another file.
func TestExportReadsKUBECONFIG(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBECONFIG", "/nowhere/of-the-environment")
	for _, args := range [][]string{{"karpenter"}, {"kueue", "--cloud", "none", "--team", "a"}} {
		if _, _, err := execute(t, append([]string{"export"}, args...)...); err == nil || !strings.Contains(err.Error(), "/nowhere/of-the-environment") {
			t.Errorf("%q: %v", args, err)
		}
		args = append(args, "--kubeconfig", "/nowhere/of-the-flag")
		if _, _, err := execute(t, append([]string{"export"}, args...)...); err == nil || !strings.Contains(err.Error(), "/nowhere/of-the-flag") {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// TestShownExports runs the commands that docs/bursting.md shows, and looks for all flags there.
func TestShownExports(t *testing.T) {
	manual := string(read(t, "../../docs/bursting.md"))
	dir := t.TempDir()
	files := map[string]string{"partitions.yaml": "version: v1\npartitions:\n  default: [{devices: all, mode: shared}]\n  mig: [{devices: all, mode: mig}]\n"}
	for _, name := range []string{"node-1.json", "node-2.json", "node-3.json"} {
		files[name] = string(read(t, recordedNodes+"a100-80gb.json"))
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	shown := regexp.MustCompile(`(?m)^    \$ gpu-agent (export .*)$`).FindAllStringSubmatch(manual, -1)
	if len(shown) < 3 {
		t.Errorf("%d commands are shown", len(shown))
	}
	for _, m := range shown {
		if out, said, err := execute(t, strings.Fields(m[1])...); err != nil || said != "" || out == "" {
			t.Errorf("%s: %v: %s", m[1], err, said)
		}
	}
	for _, format := range []string{"kueue", "karpenter", "cluster-autoscaler"} {
		help, _, err := execute(t, "export", format, "-h")
		flags := regexp.MustCompile(`(?m)^ {2}(?:-o, | {4})--([a-z-]+)`).FindAllStringSubmatch(help, -1)
		if len(flags) < 8 || err != nil {
			t.Errorf("export %s -h: %v\n%s", format, err, help)
		}
		for _, f := range flags {
			if !strings.Contains(manual, "`--"+f[1]) {
				t.Errorf("docs/bursting.md does not name --%s", f[1])
			}
		}
	}
}
