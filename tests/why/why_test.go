// SPDX-License-Identifier: Apache-2.0

package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
	"example.com/gpu-agent/tests/lab"
)

// says waits until `kubectl gpu why` names a cause, to the author and to the operator; a node is the
// operator's subject alone. code is the code, and each of words is in the first line.
func (b *bench) says(subject string, code diagnosis.Code, words ...string) {
	b.Helper()
	users := []string{author, operator}
	if strings.HasPrefix(subject, "node/") {
		users = users[1:]
	}
	for _, user := range users {
		text := ""
		b.must(lab.Await(b.Context(), time.Minute, "the cause that "+user+" is told", func(context.Context) error {
			a := b.plugin(user, "", "why", subject)
			text = a.out
			line, _, _ := strings.Cut(a.out, "\n")
			var d diagnosis.Diagnosis
			if err := json.Unmarshal([]byte(b.plugin(user, "", "why", subject, "-o", "json").out), &d); err != nil {
				return fmt.Errorf("%s%s: %w", a.out, a.errs, err)
			}
			missing := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return strings.Contains(line, w) })
			if a.code != 0 || d.Code != code || len(missing) > 0 {
				return fmt.Errorf("the code is %s, want %s, and the first line lacks %q:\n%s%s", d.Code, code, missing, a.out, a.errs)
			}
			return nil
		}))
		head, _, _ := strings.Cut(text, "\n\n")
		b.Logf("%s, of %s\n%s", user, subject, head)
	}
}

// The cause of each trouble is in the first line that the real program prints, for the author of the pod and
// for an operator.
func TestWhy(t *testing.T) {
	b := begin(t)
	ctx := t.Context()
	b.offers(map[string]int{lab.Memory: 2 * units, lab.GPU: 1})

	b.sub("a wrong resource name", func(b *bench) {
		b.pod("wrong-name", lab.Domain+"/gpu-memory", 8)
		b.says("pod/wrong-name", diagnosis.WrongResource, "container main asks for example.com/gpu-memory", "did you mean example.com/gpu-mem?")
	})
	b.sub("too many units", func(b *bench) {
		b.pod("too-many", lab.Memory, 2*units+1)
		b.says("pod/too-many", diagnosis.TooMuch, "asks for 159 of example.com/gpu-mem", "no GPU has more than 79")
		// The scheduler adds the GPUs up, so the kubelet refuses this one.
		refused := b.pod("too-many-for-one", lab.Memory, units+1)
		_, err := refused.Refused(ctx)
		b.must(err)
		b.says("pod/too-many-for-one", diagnosis.TooMuch, "80 units asked for", "no GPU of this node has more than 79")
	})
	b.sub("a fragmented node", func(b *bench) {
		b.running("left", lab.Memory, 45)
		b.running("right", lab.Memory, 45)
		refused := b.pod("whole-piece", lab.Memory, 50)
		_, err := refused.Refused(ctx)
		b.must(err)
		b.says("pod/whole-piece", diagnosis.Fragmented, "50 units asked for", "34")
	})
	b.sub("all is held", func(b *bench) {
		b.running("left", lab.Memory, 70)
		b.running("right", lab.Memory, 70)
		b.pod("no-room", lab.Memory, 30)
		b.says("pod/no-room", diagnosis.Full, "no node has 30 of example.com/gpu-mem free", "has 18 of 158")
	})
	b.sub("an image without CUDA", func(b *bench) {
		for name, c := range map[string]struct {
			lab.Container
			lacks string
		}{
			"no-runtime-library": {lab.Container{Then: "dlopen-check libcudart.so.12; exit 1\n"}, "libcudart.so.12"},
			"no-compiler":        {lab.Container{Then: "nvcc --version\n"}, "nvcc"},
		} {
			c.Resources = map[string]int{lab.Memory: 1}
			b.create(lab.Pod{Name: name, Containers: []lab.Container{c.Container}})
			b.says("pod/"+name, diagnosis.NoCUDA, "the image of container main lacks "+c.lacks)
		}
	})
	b.sub("killed over the cap", func(b *bench) {
		mount, err := lab.ProbeMount(ctx)
		b.must(err)
		pod := b.create(lab.Pod{Name: "greedy", Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 4}, Mounts: []lab.Mount{mount}}}})
		b.must(pod.Running(ctx))
		// Past the library that keeps the cap, as a libcuda.so of the image goes.
		probe, err := pod.Probe(ctx, "main", []string{"LIBCUDA=" + lib.RealCUDA}, "-door", "path")
		b.must(err)
		defer probe.Close()
		if a, err := probe.Ask("take cuMemAlloc_v2 %d 8", 1<<30); err == nil && a.Result() != lab.Success {
			b.Fatalf("past the library: %s", a)
		}
		b.says("pod/greedy", diagnosis.OverCap, "container main of pod work/greedy", "more than its cap of 4.00 GiB")
	})
	b.sub("a faulty GPU", func(b *bench) {
		has, err := b.running("on-it", lab.Memory, 8).Inside(ctx, "main")
		b.must(err)
		i := slices.IndexFunc(driver.GPUs, func(g lab.GPUInfo) bool { return slices.Contains(has.Devices, g.Device()) })
		if i < 0 {
			b.Fatalf("the pod has %q, and no GPU", has.Devices)
		}
		b.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			err := errors.Join(driver.Restore(ctx, 0), driver.Restore(ctx, 1), node.AwaitAllocatable(ctx, map[string]int{lab.Memory: 2 * units}))
			if err != nil {
				b.Errorf("clean up: %v", err)
			}
		})
		b.must(driver.Lose(ctx, i))
		b.says("pod/on-it", diagnosis.UnhealthyGPU, fmt.Sprintf("GPU %d (%s) of %s is unhealthy", i, driver.GPUs[i].UUID, nodeName))
		b.must(driver.Lose(ctx, 1-i))
		b.offers(map[string]int{lab.Memory: 0})
		b.pod("wants-one", lab.Memory, 8)
		b.says("pod/wants-one", diagnosis.UnhealthyGPU, "is unhealthy")
		b.says("node/"+nodeName, diagnosis.UnhealthyGPU, "is unhealthy")
	})
	b.sub("a cordoned node", func(b *bench) {
		b.Cleanup(func() {
			if err := node.Cordon(context.Background(), false); err != nil {
				b.Error(err)
			}
		})
		b.must(node.Cordon(ctx, true))
		b.pod("kept-away", lab.Memory, 8)
		b.says("pod/kept-away", diagnosis.NodeCordoned, nodeName+" has room for it and is cordoned")
	})
	b.sub("a foreign plugin", func(b *bench) {
		b.foreign(driver.GPUs[card].UUID)
		b.offers(map[string]int{lab.GPU: 0})
		b.pod("wants-whole", lab.GPU, 1)
		b.says("pod/wants-whole", diagnosis.OtherOwner, "nvidia.com/gpu of another device plugin")
	})
	b.sub("a blocked edit", func(b *bench) {
		b.running("holder", lab.Memory, 8)
		b.running("other", lab.Memory, units-4)
		b.partitions(strings.Replace(usual, "mode: shared", "mode: mig", 1), "blocked", nil)
		b.pod("wants-mig", lab.MIG("3g.40gb"), 1)
		b.says("pod/wants-mig", diagnosis.PartitionBlocked, "is blocked: GPU 0 (")
		b.says("node/"+nodeName, diagnosis.PartitionBlocked, "is blocked", "work/holder")
	})
	b.sub("MIG mode is off", func(b *bench) {
		// A process of no pod, such as a monitor's, keeps the agent from resetting the GPU.
		stranger, err := driver.Occupy(ctx, card, 512)
		b.must(err)
		b.partitions(strings.Replace(usual, "mode: whole", "mode: mig", 1), "pending", func(ctx context.Context) error {
			return driver.Vacate(ctx, stranger)
		})
		b.pod("wants-mig", lab.MIG("3g.40gb"), 1)
		b.says("pod/wants-mig", diagnosis.MIGOff, "a reset or a reboot is due", "MIG mode")
	})
	b.sub("no quota in Kueue", func(b *bench) { b.quota() })
	b.sub("no agent on the node", func(b *bench) {
		b.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			if err := errors.Join(agent.Start(ctx), node.AwaitAllocatable(ctx, map[string]int{lab.Memory: 2 * units, lab.GPU: 1})); err != nil {
				b.Errorf("clean up: %v", err)
			}
		})
		b.must(agent.Stop(ctx))
		b.pod("left-alone", lab.Memory, 8)
		b.says("pod/left-alone", diagnosis.NoAgent, "no agent runs on "+nodeName)
		b.says("node/"+nodeName, diagnosis.NoAgent, "no agent runs on "+nodeName, "lacks the label example.com/gpu.node=true")
	})
	b.sub("nothing is wrong", func(b *bench) {
		b.running("fine", lab.Memory, 8)
		b.says("pod/fine", diagnosis.Fine, "runs on "+nodeName)
		b.says("node/"+nodeName, diagnosis.Fine, "nothing is wrong on "+nodeName)
	})
}

// foreignPlugin offers one device, and gives a container nothing for it.
type foreignPlugin struct {
	devices []plugin.Device
	changed chan struct{} // never
}

func (p *foreignPlugin) List() ([]plugin.Device, <-chan struct{}) { return p.devices, p.changed }

func (p *foreignPlugin) Prefer(available, _ []string, n int) ([]string, error) {
	return slices.Clone(available[:n]), nil
}

func (p *foreignPlugin) Allocate([]string) (plugin.Grant, error) { return plugin.Grant{}, nil }
func (p *foreignPlugin) Prepare(context.Context, []string) error { return nil }

// foreign has another device plugin offer a GPU to the kubelet, as NVIDIA's does, until the test ends.
func (b *bench) foreign(uuid string) {
	b.Helper()
	k := plugin.NewKubelet(plugin.KubeletOptions{Dir: node.File("/var/lib/kubelet/device-plugins"), Logger: slog.New(slog.DiscardHandler)})
	b.must(k.Set(map[string]plugin.Source{
		"nvidia.com/gpu": &foreignPlugin{[]plugin.Device{{ID: uuid, Healthy: true}}, make(chan struct{})},
	}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			b.Errorf("the other plugin: %v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		err := node.DeletePods(ctx)
		if err := errors.Join(err, lab.Await(ctx, 3*time.Minute, "the GPU to come back", func(ctx context.Context) error {
			return node.AwaitAllocatable(ctx, map[string]int{lab.GPU: 1})
		})); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
}

// quota has the real Kueue hold a Job for which its queue has too little.
func (b *bench) quota() {
	ctx := b.Context()
	b.must(node.StartKueue(ctx, nil, nil))
	b.Cleanup(func() {
		// Its webhooks would refuse others' pods without it.
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		_, webhooks := node.Kubectl(ctx, nil, "delete", "mutatingwebhookconfigurations,validatingwebhookconfigurations", "--all")
		_, jobs := node.Kubectl(ctx, nil, "delete", "jobs", "--all", "-n", lab.PodNamespace, "--cascade=background")
		if err := errors.Join(webhooks, jobs, node.Stop(ctx, lab.KueueProcess)); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	const objects = `
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: on-prem}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: research}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [example.com/gpu-mem]
      flavors: [{name: on-prem, resources: [{name: example.com/gpu-mem, nominalQuota: 60}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: gpus, namespace: work}
spec: {clusterQueue: research}
---
`
	job := func(name string, n int) string {
		return fmt.Sprintf(`
apiVersion: batch/v1
kind: Job
metadata: {name: %s, namespace: work, labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      containers:
        - name: main
          image: %s
          command: [sleep, "1000000"]
          resources: {limits: {example.com/gpu-mem: %d}}
---
`, name, lab.TestImage, n)
	}
	_, err := node.Kubectl(ctx, strings.NewReader(objects+job("first", 40)), "apply", "-f", "-")
	b.must(err)
	b.must(lab.Await(ctx, time.Minute, "the first Job to run", func(ctx context.Context) error {
		pods, err := node.Pods(ctx, "job-name=first")
		if err == nil && (len(pods) != 1 || pods[0].Phase != "Running") {
			err = fmt.Errorf("its pods are %v", pods)
		}
		return err
	}))
	_, err = node.Kubectl(ctx, strings.NewReader(job("second", 40)+job("never", 100)), "apply", "-f", "-")
	b.must(err)
	b.says("job/second", diagnosis.Quota, "queue gpus has no quota left", "example.com/gpu-mem", "20 more needed")
	b.says("job/never", diagnosis.Quota, "queue gpus can never have as much quota")
}
