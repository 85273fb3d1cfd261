// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

// named is the first object of a kind.
func (b *bench) named(objects []object, kind string) object {
	b.Helper()
	i := slices.IndexFunc(objects, func(o object) bool { return o["kind"] == kind })
	if i < 0 {
		b.Fatalf("the story %s has no %s", b.name, kind)
	}
	return objects[i]
}

// TestStoryNotebooks: batch fills what notebooks leave free and what idle notebooks lend. The kernel of a notebook
// that comes back waits, and has its memory. What gave way comes back when the notebook has gone.
func TestStoryNotebooks(t *testing.T) {
	b := begin(t, "notebooks", twoH100, []string{"evict"}, "after: 15m", "after: 1m")
	const notebooks, night = "component=singleuser-server", "app=night"
	work := b.work()
	b.apply(work...)
	notebook := b.named(work, "Pod")
	for _, user := range []string{"bob", "cem", "dana"} { // as the hub does
		other := maps.Clone(notebook)
		other["metadata"] = maps.Clone(notebook["metadata"].(object))
		other["metadata"].(object)["name"] = "jupyter-" + user
		b.apply(other)
	}
	users := b.run("the notebooks", notebooks, 4)
	ada := users[slices.IndexFunc(users, func(p lab.ListedPod) bool { return p.Name == "jupyter-ada" })]
	b.held("api", 16, users...)
	out, err := ada.Exec(b.ctx, "notebook", "nvidia-smi")
	b.must(err)
	if !strings.Contains(string(out), "16384MiB") {
		b.Errorf("nvidia-smi in a notebook does not show 16 GiB:\n%s", out)
	}
	kernel := b.probe(ada, "notebook", nil)
	b.succeeds(kernel, 14)
	if is := b.takes(kernel, 2); is != lab.OutOfMemory {
		b.Errorf("CUDA answers %s to what is beyond the notebook's share", is)
	}
	// The values by which the hub makes it say the same.
	var hub struct {
		Singleuser struct {
			ExtraResource struct{ Limits map[string]string } `yaml:"extraResource"`
		}
	}
	b.must(yaml.Unmarshal([]byte(b.file("hub.yaml")), &hub))
	if is := hub.Singleuser.ExtraResource.Limits[lab.Memory]; is != "16" {
		b.Errorf("hub.yaml asks for %q units", is)
	}
	// The quota is of all notebooks together.
	greedy := lab.Container{Resources: map[string]int{lab.Memory: 33}}
	text, err := json.Marshal(node.PodObject(lab.Pod{Name: "greedy", Containers: []lab.Container{greedy}}))
	b.must(err)
	err = b.kubectl(string(text), "create", "-n", lab.PodNamespace, "-f", "-")
	if err == nil || !strings.Contains(err.Error(), "exceeded quota") {
		b.Errorf("33 units beside 64 of 96: %v", err)
	}

	// Evening: the kernel is culled, and the night begins.
	b.runs("kubectl create job")
	first := b.run("the batch in free room", night, 2)
	b.held("api", 39, first...)
	b.must(kernel.Close())
	b.run("the batch in free and lent room", night, 4)
	b.says([]string{"status"}, "its idle room is lent")

	// Ada comes back at night.
	came := time.Now()
	kernel = b.probe(ada, "notebook", nil)
	b.succeeds(kernel, 14)
	b.Logf("her kernel had its memory after %v", time.Since(came).Round(100*time.Millisecond))
	b.must(lab.Await(b.ctx, time.Minute, "batch to give way, on one GPU alone", func(ctx context.Context) error {
		left, all, err := ready(ctx, night)
		if err == nil && (len(left) < 2 || len(left) > 3) {
			err = fmt.Errorf("%d run: %s", len(left), all)
		}
		return err
	}))
	b.must(lab.Await(b.ctx, time.Minute, "the Event of a pod that gave its room back", func(ctx context.Context) error {
		events, err := node.Kubectl(ctx, nil, "get", "events", "-n", lab.PodNamespace, "-o", "name",
			"--field-selector", "reason=Yielded")
		if err == nil && len(strings.Fields(string(events))) == 0 {
			err = errors.New("there is none")
		}
		return err
	}))
	b.run("the notebooks still", notebooks, 4)
	b.says([]string{"usage", "--price", "2", "--spot-price", "0.5"}, "guaranteed", "spot")

	// Her server is culled.
	b.must(kernel.Close())
	b.must(ada.Delete(b.ctx))
	b.run("the batch in her room", night, 4)
}

// TestStoryFraud: scorers and batch have shares of memory and compute. At the peak all batch gives way, and the
// scorers that run notice nothing; after it the batch comes back.
func TestStoryFraud(t *testing.T) {
	b := begin(t, "fraud", twoH100, []string{"evict", "mps"})
	b.Cleanup(func() { // the next story's GPUs are without MPS
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if b.Failed() {
			b.tell(ctx)
		}
		turns := strings.ReplaceAll(partitionsIn(t, b.file("partitions.yaml")), "compute: mps", "compute: timeslice")
		err := errors.Join(clearWork(ctx), b.agent.SetPartitions(ctx, turns))
		if err == nil {
			_, err = b.agent.AwaitState(ctx, "applied")
		}
		if err := errors.Join(err, node.RemoveComponent(ctx, "mps")); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	const scorers, batch = "app=scorer", "app=rescore"
	b.apply(b.work()...)
	few := b.run("the scorers of the trough", scorers, 2)
	old := b.run("the batch of the trough", batch, 3)
	b.held("api", 19, few...)
	b.held("api", 38, old...)
	probes := map[string]*lab.Probe{}
	for _, p := range slices.Concat(few, old) {
		container := "scorer"
		if slices.ContainsFunc(old, func(o lab.ListedPod) bool { return o.Name == p.Name }) {
			container = "rescore"
		}
		probes[p.Name] = b.probe(p, container, nil)
		b.succeeds(probes[p.Name], 10)
	}
	b.must(b.agent.AwaitStatus(b.ctx, time.Minute, "the ceilings to be held", func(s lab.Status) error {
		var errs []error
		for _, c := range s.Containers {
			want := map[string]int{"scorer": 25, "rescore": 49}[c.Container]
			if c.Compute.Guarantee != "ceiling" || c.Compute.Ceiling != want {
				errs = append(errs, fmt.Errorf("%s is held by %+v, want a ceiling of %d", c.Pod, c.Compute, want))
			}
		}
		return errors.Join(errs...)
	}))
	b.says([]string{"status"}, "25 %  ceiling", "49 %  ceiling")

	came := time.Now()
	b.runs(`kubectl patch hpa scorer --patch '{"spec":{"minReplicas":8`)
	b.run("the scorers of the peak", scorers, 8)
	b.Logf("the peak's scorers ran after %v", time.Since(came).Round(100*time.Millisecond))
	b.yielded(old...)
	if left, all, err := ready(b.ctx, batch); err != nil || len(left) > 0 {
		b.Errorf("%d pods of the batch run beside the peak: %s, %v", len(left), all, err)
	}
	for _, p := range few { // each still has its context and its memory
		b.succeeds(probes[p.Name], 1)
	}

	// The autoscaler goes down when its metric says so, and has none here.
	b.runs(`kubectl patch hpa scorer --patch '{"spec":{"minReplicas":2`)
	b.must(b.kubectl("", "scale", "deployment", "scorer", "--replicas=2", "-n", lab.PodNamespace))
	b.run("the scorers after the peak", scorers, 2)
	b.run("the batch after the peak", batch, 3)
}

// TestStoryStudio: what draws has a card or an instance of its own, tools that use CUDA share one under caps. An artist
// gets a card from the farm at once. A program in a share that goes past the library is ended, and its neighbours live
// on.
func TestStoryStudio(t *testing.T) {
	b := begin(t, "studio", fourRTX, []string{"evict"})
	const farm, desk = "app=frames", "app=workstation"
	work := b.work()
	artist := b.named(work, "Pod")
	b.apply(slices.DeleteFunc(slices.Clone(work), func(o object) bool { return o["kind"] == "Pod" })...)
	frames := b.run("the farm on both cards", farm, 2)
	reviews := b.run("the reviews", "app=review", 2)
	tools := b.run("the tools", "app=denoise", 3)
	b.held("hardware", -1, reviews...)
	b.held("api", 24, tools...)

	came := time.Now()
	b.apply(artist)
	desks := b.run("the artist's card", desk, 1)
	b.Logf("the artist had a card after %v", time.Since(came).Round(100*time.Millisecond))
	b.held("hardware", -1, desks...)
	left := b.run("the farm on the other card", farm, 1)
	b.yielded(slices.DeleteFunc(frames, func(p lab.ListedPod) bool { return p.Name == left[0].Name })...)
	b.says([]string{"status"}, "2g.48gb+gfx@0  held", "2g.48gb+gfx@6  held")

	neighbour := b.probe(tools[1], "denoise", nil)
	b.succeeds(neighbour, 20)
	// As a renderer does, which knows the driver by other libraries than libcuda.
	past := b.probe(tools[0], "denoise", []string{"LIBCUDA=" + lib.RealCUDA}, "-door", "path")
	if a, err := past.Ask("take cuMemAlloc_v2 %d 30", gib); err == nil && a.Result() != lab.Success {
		b.Fatalf("past the library: %s", a)
	}
	b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, tools[0].Name, "says that it was ended",
		func(e lab.Event) bool { return e.Reason == "CapExceeded" }))
	b.succeeds(neighbour, 2)
	if is := b.takes(neighbour, 6); is != lab.OutOfMemory {
		b.Errorf("CUDA answers %s to what is beyond the tool's share", is)
	}

	b.must(desks[0].Delete(b.ctx))
	b.run("the farm on both cards again", farm, 2)
}

// TestStoryLab: a group's sweep runs in what the others leave idle, beyond its share. Guaranteed jobs of the others
// have their room at once, and go to the cloud when the lab has none. The sweep comes back, and never costs money. It is
// the last story: a second node joins.
func TestStoryLab(t *testing.T) {
	b := begin(t, "lab", twoH100, []string{"evict"})
	cloud, err := kit.Up(b.ctx, lab.NodeOptions{
		Name: nodeName + "-cloud", Join: nodeName, WithParent: true, PromptStatus: true})
	b.must(err)
	b.must(cloud.Load(b.ctx, kit.AgentArchive()))
	_, err = cloud.LayDriver(b.ctx, twoH100)
	b.must(err)
	const site = lab.Domain + "/gpu.site"
	b.must(node.Label(b.ctx, map[string]string{site: "on-prem"}))
	b.must(cloud.Label(b.ctx, map[string]string{site: "cloud", lab.PartitionLabel: "cloud"}))
	partitions := partitionsIn(t, b.file("partitions.yaml"))
	other, err := cloud.Deploy(b.ctx, lab.DeployOptions{Components: []string{"evict"}, Partitions: partitions})
	b.must(err)
	_, err = other.AwaitState(b.ctx, "applied")
	b.must(err)
	b.must(node.AwaitAllocatable(b.ctx, map[string]int{lab.Memory: 2 * units, spot: 2 * units}))
	b.must(cloud.AwaitAllocatable(b.ctx, map[string]int{lab.Memory: 2 * units, spot: 0}))
	for _, group := range []string{"vision", "language", "physics"} {
		b.must(node.Namespace(b.ctx, group))
	}
	b.kueue()

	// at are the sites where pods of a Job run.
	at := func(ctx context.Context, group, job string) (sites []string, all string, err error) {
		var list struct {
			Items []struct {
				Metadata struct{ Name, DeletionTimestamp string }
				Spec     struct{ NodeName string }
				Status   struct{ Phase string }
			}
		}
		err = node.Read(ctx, "/api/v1/namespaces/"+group+"/pods?labelSelector=job-name="+job, &list)
		for _, p := range list.Items {
			all += fmt.Sprintf(" %s: %s on %q", p.Metadata.Name, p.Status.Phase, p.Spec.NodeName)
			if p.Status.Phase == "Running" && p.Metadata.DeletionTimestamp == "" {
				sites = append(sites, map[string]string{node.Name: "on-prem", cloud.Name: "cloud"}[p.Spec.NodeName])
			}
		}
		return sites, all, err
	}
	run := func(group, job, site string, n int) {
		t.Helper()
		what := fmt.Sprintf("%d pods of %s/%s %s", n, group, job, site)
		b.must(lab.Await(b.ctx, 4*time.Minute, what, func(ctx context.Context) error {
			sites, all, err := at(ctx, group, job)
			if err == nil && (len(sites) != n || slices.ContainsFunc(sites, func(s string) bool { return s != site })) {
				err = fmt.Errorf("they run at %q:%s", sites, all)
			}
			return err
		}))
	}
	jobs := map[string]object{}
	for _, o := range b.work() {
		jobs[o["metadata"].(object)["name"].(string)] = o
	}
	b.apply(jobs["sweep"])
	run("physics", "sweep", "on-prem", 4)
	for _, job := range []struct{ group, name string }{{"vision", "train"}, {"language", "finetune"}} {
		came := time.Now()
		b.apply(jobs[job.name])
		run(job.group, job.name, "on-prem", 1)
		t.Logf("%s ran after %v", job.name, time.Since(came).Round(100*time.Millisecond))
	}
	run("physics", "sweep", "on-prem", 0)
	b.apply(jobs["evaluate"])
	run("vision", "evaluate", "cloud", 1)
	const columns = "GROUP:.metadata.namespace,JOB:.metadata.ownerReferences[0].name," +
		`WHERE:.status.admission.podSetAssignments[*].flavors['example\.com/gpu-memory']`
	out, err := node.Kubectl(b.ctx, nil, "get", "workloads", "-A", "-o", "custom-columns="+columns)
	b.must(err)
	t.Logf("where each job is:\n%s", out)
	says, err := node.Kubectl(b.ctx, nil, "get", "workloads", "-n", "vision", "-o", "custom-columns="+
		"JOB:.metadata.ownerReferences[0].name,SAYS:.status.admissionChecks[*].message")
	b.must(err)
	t.Logf("what the checks say:\n%s", says)
	if !strings.Contains(string(says), "the largest free block of "+lab.Memory+" is 19") {
		t.Error("the job in the cloud is not there for want of room")
	}
	b.must(b.kubectl("", "delete", "job", "finetune", "-n", "language"))
	run("physics", "sweep", "on-prem", 2)
	run("vision", "train", "on-prem", 1)
}

// kueue starts Kueue and the placer, and applies the quotas by the command that the page shows.
func (b *bench) kueue() {
	b.Helper()
	args, err := fields(strings.TrimSuffix(b.shown("gpu-agent export kueue"), " >queues.yaml"))
	b.must(err)
	export := func(more ...string) []byte {
		b.Helper()
		command := append([]string{kit.Bin("gpu-agent")}, args[1:]...)
		out, err := node.Exec(b.ctx, append(append(command, "--kubeconfig", "/etc/kubernetes/admin.conf"), more...)...)
		b.must(err)
		return out
	}
	b.must(node.StartKueue(b.ctx, export("--configuration"), nil))
	placer, err := node.StartPlacer(b.ctx, "--doors=extender,kueue")
	b.must(err)
	config, err := node.SchedulerConfig()
	b.must(err)
	restore, err := node.SetScheduler(b.ctx, "--config", config)
	b.must(err)
	b.Cleanup(func() {
		// Kueue's webhooks would refuse others' pods without it.
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		_, jobs := node.Kubectl(ctx, nil, "delete", "jobs", "-A", "--all", "--cascade=foreground")
		const kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
		_, webhooks := node.Kubectl(ctx, nil, "delete", kinds, "--all")
		err := errors.Join(jobs, webhooks, node.Stop(ctx, lab.KueueProcess), restore(ctx), placer.Stop(ctx))
		if err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	checks, err := os.ReadFile(filepath.Join(kit.Root, "deployments", "placer", "kueue", "checks.yaml"))
	b.must(err)
	for _, text := range []string{string(checks), string(export())} {
		b.must(b.kubectl(text, "apply", "--server-side", "--force-conflicts", "-f", "-"))
	}
}
