// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/command/commandtest"
)

const h100 = "../../tests/testdata/inventories/h100-80gb.json"

// execute runs a command line.
func execute(t *testing.T, args ...string) (out, err string, failure error) {
	t.Helper()
	return executeWith(t, "", args...)
}

// executeWith runs one that finds text at its standard input.
func executeWith(t *testing.T, text string, args ...string) (out, err string, failure error) {
	t.Helper()
	var o, e bytes.Buffer
	failure = within(t.Context(), console{strings.NewReader(text), &o, &e}, args)
	return o.String(), e.String(), failure
}

// within runs a command line in this process.
func within(ctx context.Context, c console, args []string) error {
	root := newRoot()
	root.SetIn(c.in)
	root.SetOut(c.out)
	root.SetErr(c.err)
	return command.New(root, prefix).Execute(ctx, args, os.Environ())
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCheck(t *testing.T) {
	good := write(t, "good.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n  fleet:\n    - devices: {model: \"NVIDIA H100*\"}\n      mode: whole\n")
	bad := write(t, "bad.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n  absent:\n    - devices: [99]\n      mode: whole\n")
	many := write(t, "many.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 10000\n  units:\n    - devices: all\n      mode: shared\n")
	manifest := write(t, "manifest.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: gpu-partitions, namespace: gpu-agent}\ndata:\n  config.yaml: |\n"+
		"    version: v1\n    partitions:\n      default:\n        - devices: all\n          mode: shared\n      absent:\n        - devices: [99]\n          mode: whole\n")
	typo := write(t, "typo.yaml", "version: v1\npartitions:\n  default:\n    - devices: {model: H100}\n      mode: shared\n")
	fleet := write(t, "fleet.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n  old:\n    - devices: {model: NVIDIA A30}\n      mode: whole\n")
	broken := write(t, "broken.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 0\n")
	theirs := write(t, "plugin.yaml", "version: v1\nsharing:\n  mps:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n")
	wrong := write(t, "plugin.yaml", "version: v1\nsharing:\n  mps:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 400}\n")
	for _, tt := range []struct {
		args []string
		ok   bool
		out  string
		err  string // in what goes to standard error, the final error included
	}{
		{[]string{"check", "--config", good, "--inventory", h100}, true, "partition default fits", ""},
		{[]string{"check", "--inventory", h100, "--config", good}, true, "partition fleet fits", ""},
		{[]string{"check", "--config", bad, "--inventory", h100}, false, "partition default fits", bad + ":7: "},
		{[]string{"check", "--config", good, "--inventory", h100}, true, good + ": read as a partition file\n", ""},
		{[]string{"check", "--config", manifest, "--inventory", h100}, false, manifest + ": read as a manifest: the key config.yaml of the ConfigMap gpu-agent/gpu-partitions\n", manifest + ":12: "},
		{[]string{"check", "--config", theirs, "--inventory", h100}, true, theirs + ": read as a configuration of NVIDIA's device plugin; as a partition file it is\n" +
			"version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 4\n      compute: mps\nnote: ", ""},
		{[]string{"check", "--config", theirs, "--inventory", h100}, true, theirs + ": partition default fits\n", ""},
		{[]string{"check", "--config", theirs, "--inventory", h100}, true, "; whether a supervisor keeps MPS daemons on the node\n", ""},
		{[]string{"check", "--config", wrong, "--inventory", h100}, false, "", wrong + ":5: replicas of \"nvidia.com/gpu\" is at most 48"},
		{[]string{"plan", "--config", theirs, "--inventory", h100}, false, "", "this is a configuration of NVIDIA's device plugin: `gpu-agent check --config` says what it becomes here"},
		{[]string{"check", "--config", fleet, "--inventory", h100}, true, "partition old is for other nodes (line 6: ", ""},
		{[]string{"check", "--config", fleet, "--inventory", h100, "--partition", "old"}, false, "", fleet + ":6: "},
		{[]string{"check", "--config", typo, "--inventory", h100}, false, `the models of this node are "NVIDIA H100 80GB HBM3", and no GPU matches the model "H100" on line 4`, ""},
		{[]string{"check", "--config", bad, "--inventory", h100, "--partition", "default"}, true, "partition default fits", ""},
		{[]string{"check", "--config", bad, "--inventory", h100, "--partition", "none"}, false, "", "none"},
		{[]string{"check", "--config", broken, "--inventory", h100}, false, "", broken + ":6: "},
		{[]string{"check", "--config", many, "--inventory", h100}, false, "partition units fits", many + `:4: partition "default" gives this node 80000 devices`},
		{[]string{"check", "--config", many, "--inventory", h100, "--partition", "units", "--memory-unit", "16MiB"}, false, "", "set --memory-unit to 32 MiB or more"},
		{[]string{"check", "--config", many, "--inventory", h100, "--api", "dra"}, true, "partition default fits (8 of 8 GPUs through dra)", ""},
		{[]string{"plan", "--config", many, "--inventory", h100}, false, "", "gives this node 80000 devices"},
		{[]string{"check", "--config", good, "--inventory", good}, false, "", good},
		{[]string{"check", "--config", filepath.Join(t.TempDir(), "nowhere")}, false, "", "nowhere"},
	} {
		out, e, err := execute(t, tt.args...)
		if err != nil {
			e += err.Error()
		}
		if (err == nil) != tt.ok || !strings.Contains(out, tt.out) || !strings.Contains(e, tt.err) {
			t.Errorf("%q: %v\nout: %s\nerr: %s\nwant ok %v, %q and %q", tt.args, err, out, e, tt.ok, tt.out, tt.err)
		}
	}
}

// Wrong usage is one line, which says what to write instead.
func TestWrongUsage(t *testing.T) {
	for _, test := range []struct {
		args string
		want string // after the command's name
	}{
		{"", "gpu-agent: a command is missing, one of advise, "},
		{"fly", `gpu-agent: there is no command "fly": the commands are advise, `},
		{"statsu -o json", `gpu-agent: there is no command "statsu": write status`},
		{"export", "gpu-agent export: a command is missing, one of cluster-autoscaler, karpenter, kueue"},
		{"export slurm", `gpu-agent export: there is no command "slurm"`},
		{"check", "gpu-agent check: --config is missing: write --config FILE"},
		{"check partitions.yaml", `gpu-agent check: unexpected argument "partitions.yaml"`},
		{"plan", "gpu-agent plan: --config is missing: write --config FILE"},
		{"plan --config a --domain Example_com", "gpu-agent plan: --domain: "},
		{"run --no-such-flag", "gpu-agent run: there is no flag --no-such-flag: gpu-agent run --help lists"},
		{"run -node-name n", "gpu-agent run: -node-name: write --node-name"},
		{"run -host-root=/host", "gpu-agent run: -host-root: write --host-root"},
		{"status -o xml", `gpu-agent status: --output "xml": want one of text, json`},
		{"placer", "gpu-agent placer: the placer is a program of its own, with an image of its own: write gpu-placer run"},
		{"placer --lease x -listen :1", "gpu-agent placer: the placer is a program of its own"},
		{"certificates --out door", "gpu-agent certificates: the placer's program makes them: write gpu-placer certificates"},
		{"run", "gpu-agent run: no partitions: set --configmap NAMESPACE/NAME or --config FILE"},
		{"run --config a --configmap b/c", "gpu-agent run: --config and --configmap are both set"},
		{"run --configmap b/c", "gpu-agent run: --configmap needs --node-name"},
		{"run --config a --api dra", "gpu-agent run: --api dra needs"},
		{"run --config a --mps-detach-ending", "gpu-agent run: --mps-detach-ending needs --node-name"},
		{"run --configmap b --node-name n", `gpu-agent run: --configmap: "b" is not NAMESPACE/NAME`},
		{"run --config a --domain Example_com", "gpu-agent run: --domain: "},
		{"run --config a --domain nvidia.com", "gpu-agent run: --domain: nvidia.com is the domain of NVIDIA's own"},
		{"run --config a --health-hold 0s", "gpu-agent run: --health-hold and"},
		{"run --config a --yield-grace -1s", "gpu-agent run: --yield-grace must not be negative"},
		{"run --config a --park-memory much", "gpu-agent run: "},
		{"run --config a --evict-after -1", "gpu-agent run: --evict-after must not be negative"},
		{"run --config a --usage-labels =", "gpu-agent run: --usage-labels: "},
		{"run --config a extra", `gpu-agent run: unexpected argument "extra"`},
		{"usage --gpu 3", "gpu-agent usage: --gpu goes with --at: write --at TIME --gpu 3"},
		{"usage --since yesterday", `gpu-agent usage: --since "yesterday" is not a time: write 24h`},
		{"usage --by pods", `gpu-agent usage: --by "pods": write namespace, pod or label=KEY`},
		{"completion tcsh", "gpu-agent completion: write one shell: bash, zsh, fish or powershell"},
	} {
		out, said, err := execute(t, strings.Fields(test.args)...)
		if command.ExitOf(err) != command.Usage || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") || out+said != "" {
			t.Errorf("%q: exit code %d, %v, and it prints %q%q; want %q", test.args, command.ExitOf(err), err, out, said, test.want)
		}
	}
}

// Every flag has an environment variable; the command line wins. What an agent's pod has set
// does not count as asked for on a command line.
func TestEnvironment(t *testing.T) {
	t.Setenv("GPU_AGENT_NODE_NAME", "from-env")
	t.Setenv("GPU_AGENT_MEMORY_UNIT", "256MiB")
	t.Setenv("GPU_AGENT_DOMAIN", "env.example")
	var f runFlags
	var a planFlags
	root := &cobra.Command{Use: "gpu-agent"}
	for name, register := range map[string]func(*pflag.FlagSet){"run": f.register, "plan": a.register} {
		c := &cobra.Command{Use: name, RunE: func(*cobra.Command, []string) error { return nil }}
		register(c.Flags())
		root.AddCommand(c)
	}
	program := command.New(root, prefix)
	if err := program.Execute(t.Context(), []string{"run", "--domain", "flag.example", "--config", "p"}, os.Environ()); err != nil {
		t.Fatal(err)
	}
	if f.nodeName != "from-env" || f.unit != 256 || f.Domain != "flag.example" || f.config != "p" {
		t.Errorf("%+v", f)
	}
	if err := f.complete(); err != nil || f.ResourceDomain != "flag.example" {
		t.Errorf("%v, resource domain %q", err, f.ResourceDomain)
	}
	if err := program.Execute(t.Context(), []string{"plan", "--api", "dra"}, os.Environ()); err != nil {
		t.Fatal(err)
	}
	if a.of.unit != 256 || a.flags.Changed("memory-unit") || !a.flags.Changed("api") {
		t.Errorf("unit %v; said on the command line: %v, %v", a.of.unit, a.flags.Changed("memory-unit"), a.flags.Changed("api"))
	}

	t.Setenv("GPU_AGENT_OUTPUT", "xml")
	if _, _, err := execute(t, "inventory"); command.ExitOf(err) != command.Usage || !strings.Contains(err.Error(), `GPU_AGENT_OUTPUT="xml": want one of`) {
		t.Errorf("a wrong value: %v", err)
	}
}

// A pod's environment has what Kubernetes sets for the Services of its namespace. No command
// minds that, and every one a variable that is misspelt.
func TestServicesVariables(t *testing.T) {
	for _, entry := range []string{
		"GPU_AGENT_SERVICE_HOST=10.96.0.7", "GPU_AGENT_SERVICE_PORT=9500", "GPU_AGENT_SERVICE_PORT_METRICS=9500", "GPU_AGENT_PORT=tcp://10.96.0.7:9500",
		"GPU_AGENT_PORT_9500_TCP=tcp://10.96.0.7:9500", "GPU_AGENT_PORT_9500_TCP_PROTO=tcp", "GPU_AGENT_PORT_9500_TCP_PORT=9500", "GPU_AGENT_PORT_9500_TCP_ADDR=10.96.0.7",
		"GPU_AGENT_HTTP_SERVICE_HOST=10.96.0.8", "GPU_AGENT_HTTP_PORT=tcp://10.96.0.8:80",
	} {
		name, value, _ := strings.Cut(entry, "=")
		t.Setenv(name, value)
	}
	if _, _, err := execute(t, "version"); err != nil {
		t.Errorf("with a Service's variables: %v", err)
	}
	t.Setenv("GPU_AGENT_NODENAME", "n")
	if _, _, err := execute(t, "version"); command.ExitOf(err) != command.Usage || !strings.Contains(err.Error(), "GPU_AGENT_NODENAME: write GPU_AGENT_NODE_NAME") {
		t.Errorf("a misspelt variable: %v", err)
	}
	// Of a placer's manifest of before: what has moved is said, not which variable is in the way.
	t.Setenv("GPU_AGENT_LEASE", "a/b")
	if _, _, err := execute(t, "placer"); command.ExitOf(err) != command.Usage || !strings.Contains(err.Error(), "write gpu-placer run") {
		t.Errorf("the placer of before: %v", err)
	}
	for _, args := range [][]string{{"run", "--help"}, {"help", "run"}, {"completion", "bash"}} {
		if out, _, err := execute(t, args...); err != nil || out == "" {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// Every command is described with an example, and a name means one thing.
func TestCommands(t *testing.T) {
	for _, flaw := range command.New(newRoot(), prefix).Flaws() {
		t.Error(flaw)
	}
	for _, path := range []string{"", "run", "inventory", "check", "plan", "topology", "status", "usage", "advise", "cleanup", "completion", "version",
		"export", "export kueue", "export karpenter", "export cluster-autoscaler"} {
		asked, _, err := execute(t, append(strings.Fields(path), "--help")...)
		shown, _, failed := execute(t, append([]string{"help"}, strings.Fields(path)...)...)
		if err != nil || failed != nil || asked != shown || !strings.Contains(asked, "\nFlags:\n") || !strings.Contains(asked, "Usage:\n  gpu-agent "+path) {
			t.Errorf("the help of %q: %v, %v\n%s", path, err, failed, asked)
		}
	}
}

// The reference is what the commands say.
func TestReference(t *testing.T) {
	commandtest.Reference(t, *update, map[string]string{"gpu-agent": command.New(newRoot(), prefix).Reference(), "exit-codes": command.ExitCodes()})
}

// Values are completed: of few, of files, of what a file has.
func TestCompletion(t *testing.T) {
	for _, test := range []struct{ line, want string }{
		{"inv", "inventory :4"},
		{"export ka", "karpenter :4"},
		{"advise --tr", "--trace --tries :4"},
		{"status --output ", "text json :4"},
		{"usage --output=", "text csv json :4"},
		{"run --log-level w", "warn :4"},
		{"run --config ", ":0"},
		{"run --state-dir ", ":16"},
		{"run --node-name ", ":4"},
		{"run ", ":4"},
		{"usage --by ", "namespace pod label= :6"},
		{"plan --config " + plans + " --partition o", "on-demand :4"},
		{"plan --partition ", ":4"},
		{"completion ", "bash zsh fish powershell :4"},
		{"help export k", "kueue karpenter cluster-autoscaler :4"},
	} {
		args := append([]string{cobra.ShellCompNoDescRequestCmd}, strings.Split(test.line, " ")...)
		out, _, err := execute(t, args...)
		got, want := strings.Fields(out), strings.Fields(test.want)
		slices.Sort(got)
		slices.Sort(want)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q is completed with %q, want %q: %v", test.line, got, want, err)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	script, _, err := execute(t, "completion", "bash")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bash, "-n")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("bash: %v: %s", err, out)
	}
}

func TestMemoryFlag(t *testing.T) {
	for in, want := range map[string]memoryFlag{"1GiB": 1024, "2Gi": 2048, "512MiB": 512, "256Mi": 256, "100": 100} {
		var m memoryFlag
		if err := m.Set(in); err != nil || m != want {
			t.Errorf("%s: %d MiB, %v; want %d", in, m, err, want)
		}
		again := memoryFlag(0)
		if err := again.Set(m.String()); err != nil || again != m {
			t.Errorf("%s: printed as %s, which reads as %d, %v", in, m.String(), again, err)
		}
	}
	for _, in := range []string{"", "0", "-1GiB", "1TB", "GiB", "1.5GiB", "99999999999999"} {
		var m memoryFlag
		if err := m.Set(in); err == nil {
			t.Errorf("%q was read as %d", in, m)
		}
	}
}

// The README's example passes the README's check on every kind of node, as the ConfigMap that it is,
// and as the file in it.
func TestReadmePartitionsPassItsCheck(t *testing.T) {
	text := string(read(t, "../../README.md"))
	shown := regexp.MustCompile("(?s)```yaml\n(apiVersion: v1\nkind: ConfigMap\n.*?  config.yaml: \\|\n(.*?))```").FindStringSubmatch(text)
	if shown == nil || !strings.Contains(text, "gpu-agent check --config - <partitions.yaml") {
		t.Fatal("the README shows no partitions, or not how to check them")
	}
	bare := strings.ReplaceAll("\n"+shown[2], "\n    ", "\n")
	nodes, err := filepath.Glob("../../tests/testdata/inventories/*.json")
	if err != nil || len(nodes) < 5 {
		t.Fatalf("find the inventories: %v, %v", nodes, err)
	}
	for _, node := range nodes {
		for _, file := range []string{shown[1], bare} {
			out, says, err := executeWith(t, file, "check", "--config", "-", "--inventory", node)
			if err != nil || says != "" || !strings.Contains(out, "partition default fits") {
				t.Errorf("%s: %v\n%s%s", node, err, out, says)
			}
		}
	}
}
