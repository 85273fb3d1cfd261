// SPDX-License-Identifier: Apache-2.0

package why

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

var built = flag.Bool("built", false, "everything that the node needs stands in the cache already")

const (
	nodeName = "why"
	// units are those of an H100-80GB.
	units = 79
	// card is the index of the A100, whose MIG mode takes a reset to change.
	card = 2
)

// machine has two GPUs that are shared, and one for MIG.
var machine = lab.DriverOptions{Root: "/", Model: "H100-80GB", Count: 3, World: "gpus: [{index: 2, model: A100-SXM4-80GB}]\n"}

// usual are the partitions between two troubles.
const usual = `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: shared}
    - {devices: [2], mode: whole}
`

// Users of the cluster. What they may do is what the manifests' roles allow.
const (
	author   = "author"
	operator = "operator"
)

// The one node of all tests; set by start, once.
var (
	kit    *lab.Kit
	node   *lab.Node
	driver *lab.Driver
	agent  *lab.Agent
	// config is the file by which programs on this machine reach the API server as an administrator,
	// who may act as the users.
	config string
)

var start = sync.OnceValue(func() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if kit, err = lab.NewKit(os.Stderr); err != nil {
		return err
	}
	if !*built {
		for _, s := range kit.Steps() {
			if err := s.Run(ctx); err != nil {
				return fmt.Errorf("%s: %w", s.Name, err)
			}
		}
		if err := errors.Join(kit.BuildKueue(ctx), kit.BuildPlugin(ctx)); err != nil {
			return err
		}
	}
	if err := kit.Down(ctx, nodeName); err != nil {
		return err
	}
	if node, err = kit.Up(ctx, lab.NodeOptions{Name: nodeName, WithParent: true, PromptStatus: true}); err != nil {
		return err
	}
	if err := errors.Join(node.Load(ctx, kit.AgentArchive()), node.Namespace(ctx, lab.PodNamespace)); err != nil {
		return err
	}
	if driver, err = node.LayDriver(ctx, machine); err != nil {
		return err
	}
	if agent, err = deploy(ctx); err != nil {
		return err
	}
	dir, err := node.Dir("home")
	if err != nil {
		return err
	}
	text, err := node.Kubectl(ctx, nil, "config", "view", "--raw")
	if err != nil {
		return err
	}
	config = filepath.Join(dir, "config")
	if err := os.WriteFile(config, text, 0o600); err != nil {
		return err
	}
	return people(ctx)
})

// deploy deploys the agent. A GPU need not be without complaint for a minute before it is offered again.
func deploy(ctx context.Context, components ...string) (*lab.Agent, error) {
	return node.Deploy(ctx, lab.DeployOptions{Partitions: usual, Components: components,
		Env: map[string]string{"GPU_AGENT_HEALTH_HOLD": "2s", "GPU_AGENT_HEALTH_PROBE": "500ms"}})
}

// people gives users their rights: authors of pods what Kubernetes and Kueue give them in their own
// namespace, and both the roles of the manifests, by the commands of docs/kubectl.md.
func people(ctx context.Context) error {
	page, err := os.ReadFile(filepath.Join(kit.Root, "docs", "kubectl.md"))
	if err != nil {
		return err
	}
	n := 0
	for line := range strings.Lines(string(page)) {
		words := strings.Fields(strings.ReplaceAll(line, "OPERATORS", operator))
		if len(words) < 3 || words[0] != "kubectl" || words[1] != "create" {
			continue
		}
		n++
		if _, err := node.Kubectl(ctx, nil, words[1:]...); err != nil {
			return err
		}
	}
	if n != 3 {
		return fmt.Errorf("docs/kubectl.md has %d commands that give people their roles, want 3", n)
	}
	// What Kueue's chart gives to all who may edit a namespace.
	const workloads = `{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: workloads},
rules: [{apiGroups: [kueue.x-k8s.io], resources: [workloads], verbs: [get, list]}]}`
	if _, err := node.Kubectl(ctx, strings.NewReader(workloads), "apply", "-n", lab.PodNamespace, "-f", "-"); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"create", "rolebinding", "authors", "--clusterrole=edit", "--group=" + author},
		{"create", "rolebinding", "workloads", "--role=workloads", "--group=" + author, "--group=" + operator},
		// For verify, which makes pods.
		{"create", "rolebinding", "operators", "--clusterrole=edit", "--group=" + operator},
	} {
		if _, err := node.Kubectl(ctx, nil, append(args, "-n", lab.PodNamespace)...); err != nil {
			return err
		}
	}
	return nil
}

func TestMain(m *testing.M) {
	flag.Parse()
	status := m.Run()
	if kit != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		if err := kit.Down(ctx, nodeName); err != nil {
			fmt.Fprintln(os.Stderr, "why: end the node:", err)
			status = 1
		}
		cancel()
	}
	os.Exit(status)
}

// bench is a test on the node.
type bench struct{ *testing.T }

// begin has the node as all tests want it.
func begin(t *testing.T) *bench {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skip("this machine lacks ", missing)
	}
	b := &bench{t}
	b.must(start())
	return b
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// sub runs a subtest, and has the node as it was at its end.
func (b *bench) sub(name string, run func(*bench)) {
	b.Helper()
	b.Run(name, func(t *testing.T) {
		inner := &bench{t}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			if t.Failed() {
				inner.tell(ctx)
			}
			if err := node.DeletePods(ctx); err != nil {
				t.Errorf("clean up: %v", err)
			}
		})
		run(inner)
	})
}

// tell logs what helps to understand a failure.
func (b *bench) tell(ctx context.Context) {
	if log, err := agent.Log(ctx); err == nil {
		b.Logf("the agent's log ends:\n%s", log)
	}
	if out, err := node.Kubectl(ctx, nil, "get", "pods,events,gpunodes", "-A", "-o", "wide"); err == nil {
		b.Logf("the cluster has\n%s", out)
	}
}

// offers waits until the node offers exactly so much.
func (b *bench) offers(want map[string]int) {
	b.Helper()
	b.must(node.AwaitAllocatable(b.Context(), want))
}

// partitions edits the ConfigMap, and has the usual ones again at the test's end, with what undo does
// before.
func (b *bench) partitions(file, state string, undo func(context.Context) error) {
	b.Helper()
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		err := node.DeletePods(ctx)
		if undo != nil {
			err = errors.Join(err, undo(ctx))
		}
		if err = errors.Join(err, agent.SetPartitions(ctx, usual)); err == nil {
			_, err = agent.AwaitState(ctx, "applied")
		}
		if err == nil {
			err = node.AwaitAllocatable(ctx, map[string]int{lab.Memory: 2 * units, lab.GPU: 1})
		}
		if err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	b.must(agent.SetPartitions(b.Context(), file))
	_, err := agent.AwaitState(b.Context(), state)
	b.must(err)
}

// pod makes a pod of one container that asks for one resource.
func (b *bench) pod(name, resource string, n int) *lab.RunningPod {
	b.Helper()
	return b.create(lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{resource: n}}}})
}

func (b *bench) create(p lab.Pod) *lab.RunningPod {
	b.Helper()
	pod, err := node.CreatePod(b.Context(), p)
	b.must(err)
	return pod
}

func (b *bench) running(name, resource string, n int) *lab.RunningPod {
	b.Helper()
	pod := b.pod(name, resource, n)
	b.must(pod.Running(b.Context()))
	return pod
}

// ran are the commands of the plugin that tests have run; the empty one is the table.
var ran = map[string]bool{}

// answer is what a command has printed.
type answer struct {
	out, errs string
	code      int
}

// plugin runs `kubectl gpu` as a user. kubectl finds it on the PATH, and starts it. The input may be empty.
func (b *bench) plugin(user, input string, args ...string) answer {
	b.Helper()
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	ran[name] = true
	args = append(append([]string{"gpu"}, args...), "--as", user, "--as-group", user, "--as-group", "system:authenticated", "-n", lab.PodNamespace)
	cmd := exec.CommandContext(b.Context(), kit.Bin("kubectl"), args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(kit.Bin("kubectl"))+":"+os.Getenv("PATH"), "KUBECONFIG="+config)
	cmd.Dir = b.TempDir()
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		b.Fatal(err)
	}
	return answer{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// works is plugin for a command that must end well.
func (b *bench) works(user string, args ...string) string {
	b.Helper()
	a := b.plugin(user, "", args...)
	if a.code != 0 {
		b.Fatalf("kubectl gpu %s, as %s, ends with %d:\n%s%s", strings.Join(args, " "), user, a.code, a.out, a.errs)
	}
	return a.out
}
