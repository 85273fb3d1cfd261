// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/tests/lab"
)

var built = flag.Bool("built", false, "everything that the nodes need stands in the cache already")

const (
	nodeName = "stories"
	spot     = lab.Memory + ".spot"
	gib      = 1 << 30
	// units are those of an H100-80GB.
	units = 79
)

// Machines of the stories.
var (
	twoH100 = lab.DriverOptions{Root: "/", Model: "H100-80GB", Count: 2}
	fourRTX = lab.DriverOptions{Root: "/", Model: "RTX-PRO-6000", Count: 4}
)

// The one node of all stories; set by start, once.
var (
	kit    *lab.Kit
	node   *lab.Node
	driver *lab.Driver
	// machine is what the driver has now.
	machine lab.DriverOptions
)

var start = sync.OnceValue(func() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if kit, err = lab.NewKit(os.Stderr); err != nil {
		return err
	}
	if !*built {
		for _, s := range append(kit.Steps(), lab.Step{Name: "Kueue", Run: kit.BuildKueue}) {
			if err := s.Run(ctx); err != nil {
				return fmt.Errorf("%s: %w", s.Name, err)
			}
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
	machine = twoH100
	driver, err = node.LayDriver(ctx, machine)
	return err
})

func TestMain(m *testing.M) {
	flag.Parse()
	status := m.Run()
	if kit != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		if err := kit.Down(ctx, nodeName); err != nil { // with the node that has joined it
			fmt.Fprintln(os.Stderr, "stories: end the node:", err)
			status = 1
		}
		cancel()
	}
	os.Exit(status)
}

// bench is a story's place on the node.
type bench struct {
	*testing.T
	ctx   context.Context
	name  string // of the story's directory
	agent *lab.Agent
}

// begin gives a story its machine, and the agent with the components that its page names and the story's partitions.
// In its files every text of lab is replaced by the one behind it.
func begin(t *testing.T, name string, of lab.DriverOptions, components []string, replace ...string) *bench {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it: a node takes a minute to start, and the stories some more")
	}
	if missing := lab.Missing(); missing != "" {
		t.Skip("this machine lacks ", missing)
	}
	if err := start(); err != nil {
		t.Fatalf("start the node of all stories: %v", err)
	}
	b := &bench{T: t, ctx: t.Context(), name: name}
	if machine.Model != of.Model {
		b.must(driver.Swap(b.ctx, of))
		machine = of
	}
	text := strings.NewReplacer(replace...).Replace(b.file("partitions.yaml"))
	var err error
	b.agent, err = node.Deploy(b.ctx, lab.DeployOptions{Components: components, Partitions: partitionsIn(t, text)})
	b.must(err)
	b.Cleanup(b.end)
	b.must(b.agent.Reset(b.ctx, partitionsIn(t, text))) // the GPUs of the story before are not lost
	b.must(b.kubectl(text, "apply", "-f", "-"))
	_, err = b.agent.AwaitState(b.ctx, "applied")
	b.must(err)
	return b
}

// end takes the story's pods and the agent away, so that the next one finds the GPUs free.
func (b *bench) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if b.Failed() {
		b.tell(ctx)
	}
	if err := errors.Join(clearWork(ctx), b.agent.Stop(ctx)); err != nil {
		b.Errorf("clean up: %v", err)
	}
}

// clearWork deletes what a story has made in the namespace of the test's pods, and waits until it is gone.
func clearWork(ctx context.Context) error {
	const kinds = "cronjobs,jobs,deployments,horizontalpodautoscalers,poddisruptionbudgets,services,resourcequotas"
	_, err := node.Kubectl(ctx, nil, "delete", "-n", lab.PodNamespace, kinds, "--all", "--cascade=foreground")
	return errors.Join(err, node.DeletePods(ctx))
}

// tell logs what helps to understand a failure.
func (b *bench) tell(ctx context.Context) {
	if s, err := b.agent.Status(ctx); err == nil {
		b.Logf("the agent says: %s", s)
	}
	if log, err := b.agent.Log(ctx); err == nil {
		b.Logf("the agent's log ends:\n%s", log)
	}
	if out, err := node.Kubectl(ctx, nil, "get", "pods,jobs,events", "-A", "-o", "wide"); err == nil {
		b.Logf("the cluster has\n%s", out)
	}
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// kubectl runs a command, with an input if it is not empty.
func (b *bench) kubectl(in string, args ...string) error {
	var stdin io.Reader
	if in != "" {
		stdin = strings.NewReader(in)
	}
	_, err := node.Kubectl(b.ctx, stdin, args...)
	return err
}

// file is one of the story's.
func (b *bench) file(name string) string {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(kit.Root, "deployments", "examples", "stories", b.name, name))
	b.must(err)
	return string(text)
}

// shown is the line of the story's page that shows a command which begins with a text, without its indentation.
func (b *bench) shown(begins string) string {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(kit.Root, "docs", "story-"+b.name+".md"))
	b.must(err)
	found := ""
	for line := range strings.Lines(string(text)) {
		command, indented := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if indented && strings.HasPrefix(command, begins) {
			found = command
		}
	}
	if found == "" {
		b.Fatalf("docs/story-%s.md shows no command that begins with %q", b.name, begins)
	}
	return found
}

// runs runs the command of kubectl that the page shows, in the namespace of the test's pods.
func (b *bench) runs(begins string) {
	b.Helper()
	words, err := fields(b.shown(begins))
	b.must(err)
	b.must(b.kubectl("", append(words[1:], "-n", lab.PodNamespace)...))
}

// fields are the words of a command as a shell has them; a word in single quotes is one.
func fields(line string) (words []string, err error) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			words = append(words, part)
		} else {
			words = append(words, strings.Fields(part)...)
		}
	}
	if strings.Count(line, "'")%2 == 1 {
		err = fmt.Errorf("%q has a quote that does not end", line)
	}
	return words, err
}

// partitionsIn is the partition file in a ConfigMap.
func partitionsIn(t *testing.T, text string) string {
	t.Helper()
	var o struct{ Data map[string]string }
	if err := yaml.Unmarshal([]byte(text), &o); err != nil || o.Data["config.yaml"] == "" {
		t.Fatalf("there are no partitions in\n%s: %v", text, err)
	}
	return o.Data["config.yaml"]
}

// object is one of Kubernetes', in JSON.
type object = map[string]any

// work is what is in the story's work.yaml, with stand-ins for its programs.
func (b *bench) work() (out []object) {
	b.Helper()
	mount, err := lab.ProbeMount(b.ctx)
	b.must(err)
	d := yaml.NewDecoder(strings.NewReader(b.file("work.yaml")))
	for {
		var o object
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			return out
		} else if err != nil {
			b.Fatal(err)
		}
		standIn(o, mount)
		out = append(out, o)
	}
}

// standIn puts the test's image and a wait into the place of the programs in all pod specs below a value. They end as a
// program that is told to, without success, so that its Job goes on.
func standIn(value any, probe lab.Mount) {
	switch v := value.(type) {
	case []any:
		for _, e := range v {
			standIn(e, probe)
		}
	case object:
		for _, e := range v {
			standIn(e, probe)
		}
		containers, ok := v["containers"].([]any)
		if !ok {
			return
		}
		for _, e := range containers {
			c := e.(object)
			c["image"], c["imagePullPolicy"] = lab.TestImage, "Never"
			c["command"] = []string{"/bin/sh", "-c", "trap 'exit 3' TERM\n" + lab.Wait}
			c["volumeMounts"] = []object{{"name": "probe", "mountPath": probe.Path}}
			for _, field := range []string{"args", "readinessProbe", "livenessProbe"} {
				delete(c, field)
			}
			resources := c["resources"].(object)
			delete(resources, "requests")
			limits := resources["limits"].(object)
			delete(limits, "memory")
		}
		v["volumes"] = []object{{"name": "probe", "hostPath": object{"path": probe.Host}}}
	}
}

// apply applies objects in the namespace of the test's pods, if they name no other.
func (b *bench) apply(objects ...object) {
	b.Helper()
	for _, o := range objects {
		text, err := json.Marshal(o)
		b.must(err)
		args := []string{"apply", "-f", "-"}
		if o["metadata"].(object)["namespace"] == nil {
			args = append(args, "-n", lab.PodNamespace)
		}
		b.must(b.kubectl(string(text), args...))
	}
}

// ready are the pods with a label that are there and do their work.
func ready(ctx context.Context, label string) (out []lab.ListedPod, all string, err error) {
	pods, err := node.Pods(ctx, label)
	for _, p := range pods {
		states := slices.Collect(maps.Values(p.Containers))
		waits := slices.ContainsFunc(states, func(c lab.ContainerState) bool { return !c.Ready })
		if p.Phase == "Running" && len(states) > 0 && !waits {
			out = append(out, p)
		}
	}
	return out, fmt.Sprint(pods), err
}

// run waits until exactly so many pods with a label do their work.
func (b *bench) run(what, label string, n int) (pods []lab.ListedPod) {
	b.Helper()
	b.must(lab.Await(b.ctx, 4*time.Minute, what, func(ctx context.Context) error {
		found, all, err := ready(ctx, label)
		if err == nil && len(found) != n {
			err = fmt.Errorf("%d run, want %d: %s", len(found), n, all)
		}
		pods = found
		return err
	}))
	return pods
}

// yielded waits until a pod's Events say that it gave its room back.
func (b *bench) yielded(pods ...lab.ListedPod) {
	b.Helper()
	for _, p := range pods {
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, p.Name, "says that it gave its room back",
			func(e lab.Event) bool { return e.Reason == "Yielded" }))
	}
}

// probe starts a program that uses the GPU in a pod's container.
func (b *bench) probe(pod lab.ListedPod, container string, env []string, args ...string) *lab.Probe {
	b.Helper()
	k, err := pod.Probe(b.ctx, container, env, args...)
	b.must(err)
	b.Cleanup(func() { _ = k.Close() }) // by then its container may have been ended
	return k
}

// takes has a program take so many GiB, and returns what CUDA answers.
func (b *bench) takes(k *lab.Probe, n int) (result string) {
	b.Helper()
	a, err := k.Ask("take cuMemAlloc_v2 %d %d", gib, n)
	b.must(err)
	return a.Result()
}

// succeeds has a program take so many GiB.
func (b *bench) succeeds(k *lab.Probe, n int) {
	b.Helper()
	if is := b.takes(k, n); is != lab.Success {
		b.Fatalf("CUDA answers %s to %d GiB", is, n)
	}
}

// held waits until the agent says of each container that it has a cap of so many GiB (0 is none), held by guarantee.
func (b *bench) held(guarantee string, capGiB int, pods ...lab.ListedPod) {
	b.Helper()
	b.must(b.agent.AwaitStatus(b.ctx, time.Minute, "the caps to be held", func(s lab.Status) error {
		var errs []error
		for _, p := range pods {
			i := slices.IndexFunc(s.Containers, func(c lab.ContainerStatus) bool { return c.Pod == p.Name })
			if i < 0 {
				errs = append(errs, fmt.Errorf("%s has nothing", p.Name))
				continue
			}
			c := s.Containers[i]
			is := 0
			if c.CapMiB != nil {
				is = *c.CapMiB
			}
			if c.Guarantee != guarantee || capGiB >= 0 && is != capGiB<<10 {
				errs = append(errs, fmt.Errorf("want %q and a cap of %d GiB: %s", guarantee, capGiB, c))
			}
		}
		return errors.Join(errs...)
	}))
}

// says logs what a command of the agent prints, and fails unless it has each of the words.
func (b *bench) says(args []string, words ...string) {
	b.Helper()
	out, err := b.agent.Command(b.ctx, args...)
	b.must(err)
	b.Logf("gpu-agent %s\n%s", strings.Join(args, " "), bytes.TrimSpace(out))
	for _, w := range words {
		if !bytes.Contains(out, []byte(w)) {
			b.Errorf("gpu-agent %s does not say %q", strings.Join(args, " "), w)
		}
	}
}
