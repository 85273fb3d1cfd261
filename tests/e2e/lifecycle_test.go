// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// broken is a partition file with one mistake, and where it is.
type broken struct {
	name, file string
	// line and reason are what the node must say: the line that a person has to
	// change, counted from 1, and a part of why.
	line   int
	reason string
}

const (
	head  = "version: v1\npartitions:\n  default:\n" // three lines
	entry = head + "    - devices: all\n"            // four
)

// brokenPartitions are ways to get a partition file wrong, each by another rule.
var brokenPartitions = []broken{
	{"an empty file", "", 1, "the file is empty"},
	{"no version", "partitions:\n  default:\n    - {devices: all, mode: whole}\n", 1, "the version is missing"},
	{"another version", "version: v2\npartitions:\n  default:\n    - {devices: all, mode: whole}\n", 1, "this program knows v1"},
	{"no partitions", "version: v1\n", 1, "the file has no partitions"},
	{"an unknown key at the top", "version: v1\npartition:\n  default:\n    - {devices: all, mode: whole}\n", 2, `did you mean "partitions"?`},
	{"both schemas", head + "    - {devices: all, mode: whole}\nmig-configs:\n  a:\n    - {devices: all, mig-enabled: false}\n", 6, "not both"},
	{"the manifest around it", "apiVersion: v1\nkind: ConfigMap\ndata: {}\n", 1, "this is a Kubernetes manifest"},
	{"a second document", entry + "      mode: whole\n---\nversion: v1\n", 6, "a second YAML document"},
	{"a tab", head + "\t- devices: all\n", 4, "a tab cannot indent YAML"},
	{"a bracket left open", head + "    - devices: [0, 1\n      mode: whole\n", 4, "the file is not YAML"},
	{"a control character", entry + "      mode: whole\x07\n", 5, "the control character U+0007"},
	{"partitions as a list", "version: v1\npartitions:\n  - devices: all\n    mode: whole\n", 3, "partitions is a mapping, not a list"},
	{"no partition", "version: v1\npartitions: {}\n", 2, "partitions is empty"},
	{"a name that is no label's value", "version: v1\npartitions:\n  \"all of them\":\n    - {devices: all, mode: whole}\n", 3, "chosen by the value of a node label"},
	{"a name that is a number", "version: v1\npartitions:\n  8:\n    - {devices: all, mode: whole}\n", 3, "put it in quotes"},
	{"a partition that is a word", "version: v1\npartitions:\n  default: whole\n", 3, "is a list, not the text"},
	{"a partition without entries", "version: v1\npartitions:\n  default: []\n", 3, "is an empty list"},
	{"an unknown key of an entry", entry + "      mode: shared\n      replica: 4\n", 6, `did you mean "replicas"?`},
	{"a key twice", entry + "      mode: shared\n      mode: whole\n", 6, "is already on line 5"},
	{"no devices", head + "    - mode: whole\n", 4, "the entry has no devices"},
	{"no mode", head + "    - devices: all\n      replicas: 2\n", 4, "the entry has no mode"},
	{"an unknown mode", entry + "      mode: exclusive\n", 5, "mode is whole, shared, mig, dynamic or off"},
	{"no replica", entry + "      mode: shared\n      replicas: 0\n", 6, "replicas is at least 1, not 0"},
	{"half a replica", entry + "      mode: shared\n      replicas: 2.5\n", 6, "replicas is a whole number"},
	{"an octal number", entry + "      mode: shared\n      replicas: 010\n", 6, "in decimal digits"},
	{"a key of another mode", entry + "      mode: whole\n      replicas: 2\n", 6, "replicas belongs to mode shared"},
	{"an unknown time slice", entry + "      mode: shared\n      timeSlice: forever\n", 6, "timeSlice is default, short, medium or long"},
	{"devices as a number", head + "    - devices: 3\n      mode: whole\n", 4, "devices is all, a list of indices or UUIDs"},
	{"a negative index", head + "    - devices: [0, -1]\n      mode: whole\n", 4, "an index is at least 0, not -1"},
	{"an index twice", head + "    - devices:\n        - 0\n        - 0\n      mode: whole\n", 6, "is in this list already, on line 5"},
	{"indices and UUIDs", head + "    - devices: [0, GPU-1]\n      mode: whole\n", 4, "the list mixes indices and UUIDs"},
	{"a MIG instance", head + "    - devices: [MIG-1]\n      mode: whole\n", 4, "names a MIG instance"},
	{"a pattern left open", head + "    - devices: {model: \"NVIDIA [H\"}\n      mode: whole\n", 4, "is not a pattern"},
	{"no such index", head + "    - devices: [0, 1, 2, 3, 4, 5, 6, 7]\n      mode: shared\n    - devices: [8]\n      mode: whole\n", 6, "no GPU with index 8"},
	{"no such UUID", head + "    - devices: all\n      mode: shared\n    - devices: [GPU-0000]\n      mode: whole\n", 6, "no GPU GPU-0000"},
	{"a GPU twice", head + "    - devices: all\n      mode: shared\n    - devices: [3]\n      mode: whole\n", 6, "exactly one must match each GPU"},
	{"a GPU left out", head + "    - devices: [0, 1, 2, 3, 4, 5, 6]\n      mode: shared\n", 3, "has no entry for GPU 7"},
	{"a profile that is none", entry + "      mode: mig\n      geometry: {9gb.large: 1}\n", 6, "9gb.large"},
	{"both ways of MIG", entry + "      mode: mig\n      geometry: {1g.10gb: 1}\n      profiles: [1g.10gb]\n", 7, "an entry has one of the two"},
	{"a merge of no mapping", "version: v1\nx: &x 1\npartitions:\n  default:\n    - <<: *x\n      devices: all\n      mode: whole\n", 5, "the merge key"},
	{"NVIDIA's schema, MIG neither on nor off", "version: v1\nmig-configs:\n  default:\n    - devices: all\n      mig-enabled: perhaps\n", 5, "mig-enabled"},
}

// Whatever is wrong with the file, the node names the line and the reason, and
// the last good partitions stay in force: no device goes off the offer, not for
// a moment.
func TestBrokenPartitions(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	pod, _ := b.running("a", lab.Memory, 8)
	before := b.processes(pod)
	w := b.watch()
	seen := map[string]string{}
	for _, c := range brokenPartitions {
		want := fmt.Sprintf("config.yaml:%d: ", c.line)
		b.partitions(c.file)
		var says string
		err := lab.Await(b.ctx, 20*time.Second, "the node to say what is wrong with "+c.name, func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err != nil {
				return err
			}
			says = s.Annotations[lab.MessageAnnotation]
			if state := s.Labels[lab.StateLabel]; state != "invalid" || !strings.Contains(says, want) || !strings.Contains(says, c.reason) {
				return fmt.Errorf("it says %s: %q, want invalid, %q and %q", state, says, want, c.reason)
			}
			return nil
		})
		if err != nil {
			b.Error(err)
			continue
		}
		if other, again := seen[says]; again {
			b.Errorf("%s and %s are told alike: %s", c.name, other, says)
		}
		seen[says] = c.name
		turned, _, err := w.account()
		b.must(err)
		if len(turned) > 0 {
			b.Fatalf("%s has taken devices of the GPUs %v off the offer", c.name, indexesOf(turned))
		}
		b.Logf("%-40s %s", c.name, says)
	}
	if len(brokenPartitions) < 30 {
		b.Errorf("there are %d ways, want 30", len(brokenPartitions))
	}
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	b.running("b", lab.Memory, 8)
	b.partitions(allShared)
	b.state("applied")
	b.offers(map[string]int{lab.Memory: gpus * units})
}

// NVIDIA's device plugin, as it is, lists the same GPUs: a GPU must have one
// master, so the agent offers none of them and says why, and offers them again
// when the other is gone.
func TestCoexistence(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const peer, theirs = "nvidia-device-plugin", "nvidia.com/gpu"
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	program, err := kit.BuildPeer(b.ctx)
	b.must(err)
	pod, _ := b.running("a", lab.Memory, 8)
	before := b.processes(pod)

	b.must(node.Start(b.ctx, peer, program, "--driver-root-ctr-path", "/", "--nvidia-driver-root", "/"))
	running := true
	stop := func(ctx context.Context) error {
		if !running {
			return nil
		}
		running = false
		return node.Stop(ctx, peer)
	}
	b.Cleanup(func() {
		if err := stop(context.Background()); err != nil {
			b.Error(err)
		}
	})
	b.must(node.AwaitAllocatable(b.ctx, map[string]int{theirs: gpus}))
	// What the pod has stays its own, and listed.
	b.offers(map[string]int{lab.Memory: 8})
	b.must(agent.AwaitStatus(b.ctx, waitLong, "the reason on each GPU", func(s lab.Status) error {
		for _, g := range s.GPUs {
			if !strings.Contains(g.Reason+g.Blocked+s.Partition.Message, theirs) || g.Free > 0 {
				return fmt.Errorf("GPU %d has %d free devices, and says %q %q", g.Index, g.Free, g.Reason, g.Blocked)
			}
		}
		return nil
	}))
	b.must(lab.Await(b.ctx, time.Minute, "the node to say why", func(ctx context.Context) error {
		s, err := node.State(ctx)
		if says := s.Annotations[lab.MessageAnnotation] + s.Conditions[condition].Message; err == nil && !strings.Contains(says, theirs) {
			err = fmt.Errorf("it says %s: %q", s.Labels[lab.StateLabel], says)
		}
		return err
	}))
	if _, err := b.pod("late", lab.Memory, 1).Unschedulable(b.ctx); err != nil {
		b.Error(err)
	}
	// The pod's container is served all the same.
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	b.must(pod.RestartContainer(b.ctx, ""))
	b.one(b.inside(pod, ""))

	b.must(stop(b.ctx))
	b.offers(map[string]int{lab.Memory: gpus * units})
	b.state("applied")
}

// A node moves from NVIDIA's device plugin to the agent (docs/migrate-from-nvidia.md):
// the GPUs come over a while after the plugin has gone, those that its pods have
// when these end. The kubelet rewrites its checkpoint for neither: its entry of a
// pod that has ended stays for five minutes, or for good.
func TestMigration(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const peer, theirs = "nvidia-device-plugin", "nvidia.com/gpu"
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	program, err := kit.BuildPeer(b.ctx)
	b.must(err)
	b.must(node.Start(b.ctx, peer, program, "--driver-root-ctr-path", "/", "--nvidia-driver-root", "/"))
	stop := sync.OnceValue(func() error { return node.Stop(context.Background(), peer) })
	b.Cleanup(func() {
		if err := stop(); err != nil {
			b.Error(err)
		}
	})
	b.must(node.AwaitAllocatable(b.ctx, map[string]int{theirs: gpus}))
	ended, stays := b.pod("ended", theirs, 2), b.pod("stays", theirs, 1)
	b.must(ended.Running(b.ctx))
	b.must(stays.Running(b.ctx))
	b.offers(nil)
	b.must(ended.Delete(b.ctx))
	b.must(ended.Gone(b.ctx))

	comeOver := func(after string, want int) {
		b.Helper()
		began := time.Now()
		at, err := lab.Moment(b.ctx, 4*time.Minute, time.Second, "the GPUs to come over", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err == nil && s.Allocatable[lab.Memory] != want*units {
				err = fmt.Errorf("the node offers %d units, want %d", s.Allocatable[lab.Memory], want*units)
			}
			return err
		})
		b.must(err)
		b.Logf("%s, the node offers the units of %d GPUs after %.0f s", after, want, at.Sub(began).Seconds())
	}
	b.must(stop())
	comeOver("after the end of NVIDIA's plugin", gpus-1)
	if message := b.state("failed"); !strings.Contains(message, stays.String()+" has it as "+theirs) {
		b.Errorf("the node says %q, want whose GPU the last one is", message)
	}
	b.must(stays.Delete(b.ctx))
	b.must(stays.Gone(b.ctx))
	comeOver("after the end of the pod that was left", gpus)
	b.state("applied")
}

// While pods hold GPUs the agent is replaced by another form of itself, twice,
// and once by one that cannot read what its predecessor has written: containers
// run on, claims are known, new pods are placed beside the old.
func TestRollingUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	pods := b.tenants()
	before := b.processes(pods...)
	usual := lab.DeployOptions{Partitions: mixed}
	old, err := agent.Process()
	b.must(err)
	b.Cleanup(func() {
		var err error
		if agent, err = deploy(context.Background(), usual); err != nil {
			b.Errorf("deploy the agent as it was: %v", err)
		}
	})
	next := usual
	next.Env = map[string]string{"GPU_AGENT_LOG_FORMAT": "json"}
	for _, o := range []lab.DeployOptions{next, usual} {
		agent, err = deploy(b.ctx, o)
		b.must(err)
		now, err := agent.Process()
		b.must(err)
		if now == old {
			b.Fatalf("the agent is still %s: nothing was rolled", now)
		}
		old = now
		b.claimsBecome(len(pods))
		b.offers(mixedOffers)
		if err := hurt(before); err != nil {
			b.Error(err)
		}
	}
	b.newTenants()

	b.sub("a newer version's state", func(b *bench) {
		const state = lab.StateDir + "state.json"
		b.must(agent.Stop(b.ctx))
		had, err := node.ReadFile(state)
		b.must(err)
		b.must(node.WriteFile(state, []byte(`{"version": 99}`)))
		b.must(node.Label(b.ctx, map[string]string{lab.NodeLabel: "true"}))
		b.must(lab.Await(b.ctx, time.Minute, "the agent to refuse it", func(ctx context.Context) error {
			says, err := agent.Complaint(ctx)
			if err == nil && (!strings.Contains(says, "version 99") || !strings.Contains(says, "newer")) {
				err = fmt.Errorf("it says %q", says)
			}
			return err
		}))
		if now, err := node.ReadFile(state); err != nil || string(now) != `{"version": 99}` {
			b.Errorf("the agent has changed a newer one's state to %q (%v)", now, err)
		}
		if err := hurt(before); err != nil {
			b.Error(err)
		}
		b.must(agent.Stop(b.ctx))
		b.must(node.WriteFile(state, had))
		b.must(agent.Start(b.ctx))
		b.offers(mixedOffers)
		b.restarts(pods)
	})
}

// The agent is uninstalled: refused while a pod holds devices, by its name; then
// nothing of it is left on the node or the Node but what its operator has set.
func TestCleanup(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	pod, _ := b.running("holder", lab.Memory, 8)
	before := b.processes(pod)
	b.must(driver.Xid(b.ctx, 7, 94)) // something to leave behind
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "a GPU to be unfit", func(s lab.Status) error {
		if s.GPUs[7].Health == "healthy" {
			return fmt.Errorf("GPU 7 is %s", s.GPUs[7].Health)
		}
		return nil
	}))
	b.choose("default")
	b.state("applied")

	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		err := node.DeletePods(ctx)
		if err == nil {
			err = agent.EndUninstall(ctx)
		}
		if err == nil {
			agent, err = deploy(ctx, lab.DeployOptions{Partitions: allShared})
		}
		if err != nil {
			b.Errorf("deploy the agent again: %v", err)
		}
	})
	b.must(agent.Uninstall(b.ctx))
	b.must(lab.Await(b.ctx, time.Minute, "the clean-up to be refused", func(ctx context.Context) error {
		clean, says, err := agent.Uninstalled(ctx)
		switch {
		case err != nil:
			return err
		case clean:
			return fmt.Errorf("it was done while %s holds devices: %w", pod, lab.ErrNever)
		case !strings.Contains(says, pod.String()):
			return fmt.Errorf("it says %q, want the holder's name", says)
		}
		return nil
	}))
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	if files, err := agent.CDIFiles(b.ctx); err != nil || len(files) != 1 {
		b.Errorf("the CDI files are %v (%v), want the holder's", files, err)
	}

	b.must(pod.Delete(b.ctx))
	b.cleanedUp()
}

// cleanedUp waits for the clean-up, which must leave nothing of the agent but what its
// operator has set.
func (b *bench) cleanedUp() {
	b.Helper()
	b.must(lab.Await(b.ctx, waitLong, "the clean-up", func(ctx context.Context) error {
		clean, says, err := agent.Uninstalled(ctx)
		if err == nil && !clean {
			err = fmt.Errorf("it says %q", says)
		}
		return err
	}))
	if files, err := agent.CDIFiles(b.ctx); err != nil || len(files) > 0 {
		b.Errorf("the CDI files are %v (%v), want none", files, err)
	}
	for _, dir := range []string{lab.StateDir, "/var/lib/kubelet/device-plugins/"} {
		names, err := node.ListFiles(dir)
		b.must(err)
		for _, name := range names {
			if dir == lab.StateDir || strings.HasPrefix(name, lab.Domain) {
				b.Errorf("%s%s is left behind", dir, name)
			}
		}
	}
	s, err := node.State(b.ctx)
	b.must(err)
	operators := map[string]bool{lab.NodeLabel: true, lab.PartitionLabel: true}
	for key, value := range s.Labels {
		if strings.HasPrefix(key, lab.Domain+"/") != operators[key] {
			b.Errorf("the node has the label %s=%s: of ours only the operator's should be there", key, value)
		}
	}
	for key, value := range s.Annotations {
		if strings.HasPrefix(key, lab.Domain+"/") {
			b.Errorf("the node has the annotation %s=%s", key, value)
		}
	}
	for kind, c := range s.Conditions {
		if strings.HasPrefix(kind, lab.Domain+"/") {
			b.Errorf("the node has the condition %s: %s", kind, c)
		}
	}
}
