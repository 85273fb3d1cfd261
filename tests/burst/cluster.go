// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// Team is the namespace of the Jobs, and their team.
const Team = "research"

const (
	podsPath      = "/api/v1/namespaces/" + Team + "/pods"
	jobsPath      = "/apis/batch/v1/namespaces/" + Team + "/jobs"
	workloadsPath = "/apis/kueue.x-k8s.io/v1beta2/namespaces/" + Team + "/workloads"
)

// gpus are how many GPUs a site has.
var gpus = [...]int{OnPrem: 2, Cloud: 8}

// Has is the GPU memory of each site in GiB: of a GPU that is shared what can be given away,
// of one in MIG mode all.
var Has = [2]int{OnPrem: UnitsPerGPU + 80, Cloud: 4*UnitsPerGPU + 4*80}

// limit is the spending limit: the most GPU memory that may be used in the cloud at a time. It
// is half of what the cloud has, so that it is the limit, and not the cloud's size, that keeps
// Jobs out.
const (
	cloudLimit = 320 // GiB
	limit      = "320GiB"
)

// partitions lay out half of each site's GPUs for memory, and half for MIG on demand.
func partitions(dra bool) string {
	api := "device-plugin"
	if dra {
		api = "dra"
	}
	return fmt.Sprintf(`version: v1
partitions:
  on-prem:
    - {devices: [0], mode: shared, api: %[1]s}
    - {devices: [1], mode: mig, api: %[1]s}
  cloud:
    - {devices: [0, 1, 2, 3], mode: shared, api: %[1]s}
    - {devices: [4, 5, 6, 7], mode: mig, api: %[1]s}
`, api)
}

// Cluster is two nodes of one Kubernetes, which stand for two sites, with the agent on both.
type Cluster struct {
	Nodes   [2]*lab.Node
	Drivers [2]*lab.Driver
	Agents  [2]*lab.Agent

	kit     *lab.Kit
	restore func(context.Context) error // of the scheduler
	placer  *lab.Placer
	kueue   bool // it runs
	dra     bool // the partitions that are in force
}

// NodeNames are those of the nodes of the cluster of a name. The node of on-prem has the
// control plane.
func NodeNames(name string) [2]string { return [2]string{OnPrem: name, Cloud: name + "-cloud"} }

// Steps start a cluster of a name, which ends with this process if it is to.
func (c *Cluster) Steps(kit *lab.Kit, name string, withParent bool) []lab.Step {
	c.kit = kit
	names := NodeNames(name)
	return []lab.Step{
		{Name: "Start a Kubernetes node in namespaces of its own: on-prem", Run: func(ctx context.Context) error {
			return c.start(ctx, OnPrem, lab.NodeOptions{Name: names[OnPrem], WithParent: withParent})
		}},
		{Name: "Start another one, which joins its cluster: the cloud", Run: func(ctx context.Context) error {
			return c.start(ctx, Cloud, lab.NodeOptions{Name: names[Cloud], Join: names[OnPrem], WithParent: withParent})
		}},
		{Name: fmt.Sprintf("Lay down an emulated NVIDIA driver on both: %d and %d × %s", gpus[OnPrem], gpus[Cloud], Model), Run: func(ctx context.Context) (err error) {
			for site := range Sites {
				c.Drivers[site], err = c.Nodes[site].LayDriver(ctx, lab.DriverOptions{Root: "/", Model: Model, Count: gpus[site]})
				if err != nil {
					return err
				}
			}
			return nil
		}},
		{Name: "Deploy the agent as its DaemonSet: half of each site's GPUs shared, half MIG on demand", Run: func(ctx context.Context) error {
			return c.deploy(ctx)
		}},
	}
}

func (c *Cluster) start(ctx context.Context, site Site, o lab.NodeOptions) error {
	n, err := c.kit.Up(ctx, o)
	if err != nil {
		return err
	}
	c.Nodes[site] = n
	labels := map[string]string{lab.Domain + "/gpu.site": Sites[site], lab.PartitionLabel: Sites[site]}
	return errors.Join(n.Load(ctx, c.kit.AgentArchive()), n.Label(ctx, labels))
}

func (c *Cluster) deploy(ctx context.Context) (err error) {
	for site := range Sites {
		c.Agents[site], err = c.Nodes[site].Deploy(ctx, lab.DeployOptions{Components: []string{"dra"}, Partitions: partitions(false)})
		if err != nil {
			return err
		}
	}
	return errors.Join(c.offered(ctx), c.Nodes[OnPrem].Namespace(ctx, Team))
}

// offered waits until both nodes offer what their partitions say.
func (c *Cluster) offered(ctx context.Context) error {
	for site, n := range c.Nodes {
		half := gpus[site] / 2
		want := map[string]int{lab.Memory: half * UnitsPerGPU, lab.MIG("1g.10gb"): half * 7, lab.MIG("3g.40gb"): half * 2}
		if c.dra {
			want = map[string]int{lab.Memory: 0, lab.MIG("1g.10gb"): 0}
		}
		if err := n.AwaitAllocatable(ctx, want); err != nil {
			return err
		}
		if _, err := c.Agents[site].AwaitState(ctx, "applied"); err != nil {
			return err
		}
	}
	if !c.dra {
		return nil
	}
	// What had a name before is tainted until the kubelets have forgotten the name.
	return lab.Await(ctx, 3*time.Minute, "devices without taints", func(ctx context.Context) error {
		slices, err := c.Nodes[OnPrem].Slices(ctx, "gpus."+lab.Domain)
		if err != nil {
			return err
		}
		devices := 0
		for _, s := range slices {
			for _, d := range s.Devices {
				if devices++; len(d.Taints) > 0 {
					return fmt.Errorf("device %s has the taints %q", d.Name, d.Taints)
				}
			}
		}
		if devices == 0 {
			return errors.New("there is no device")
		}
		return nil
	})
}

// object is one of Kubernetes', in JSON.
type object = map[string]any

// apply applies objects, as `kubectl apply --server-side -f -` does.
func (c *Cluster) apply(ctx context.Context, manifests []byte) error {
	_, err := c.Nodes[OnPrem].Kubectl(ctx, strings.NewReader(string(manifests)), "apply", "--server-side", "--force-conflicts", "-f", "-")
	return err
}

// create makes a Job.
func (c *Cluster) create(ctx context.Context, j Job) error {
	data, err := json.Marshal(c.manifest(j))
	if err != nil {
		return err
	}
	if _, err := c.Nodes[OnPrem].Kubectl(ctx, strings.NewReader(string(data)), "create", "-f", "-"); err != nil {
		return fmt.Errorf("make job %s: %w", j.Name, err)
	}
	return nil
}

// Run has the Jobs come, each when it is its time, and returns the record once all have
// succeeded, or once the last has been there for so long without that. see, if not nil, is told
// of each sample and what is known of the Jobs then.
func (c *Cluster) Run(ctx context.Context, jobs []Job, longest time.Duration, see func(*Record)) (*Record, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// What Kubernetes says of times is in whole seconds; none is to be before the beginning.
	o := c.observe(time.Now().Truncate(time.Second).Add(-time.Second), jobs)
	made := make(chan struct {
		*History
		error
	}, len(jobs))
	go func() {
		for _, h := range o.Jobs {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(o.began.Add(h.Arrives))):
			}
			made <- struct {
				*History
				error
			}{h, c.create(ctx, h.Job)}
		}
	}()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	looked := time.Now()
	last := jobs[len(jobs)-1].Arrives
	for {
		select {
		case <-ctx.Done():
			return &o.Record, ctx.Err()
		case m := <-made:
			if m.error != nil {
				return &o.Record, m.error
			}
			m.Came = time.Since(o.began)
			continue
		case <-tick.C:
		}
		done, err := o.look(ctx)
		if err != nil && time.Since(looked) < time.Minute {
			continue // a busy machine answers late now and then
		}
		if err != nil {
			return &o.Record, err
		}
		looked = time.Now()
		if see != nil {
			see(&o.Record)
		}
		if done || o.Ended > last+longest {
			return &o.Record, nil
		}
	}
}

// manifest is a Job whose container runs as long as it is to. One that checkpoints writes down
// how far it is, where both sites find it, and goes on from there.
func (c *Cluster) manifest(j Job) object {
	seconds := int(j.Runs / time.Second)
	const obedient = "trap 'exit 143' TERM\n"
	script := obedient + fmt.Sprintf("sleep %d & wait $!\n", seconds)
	labels, volumes, mounts := object{}, []object{}, []object{}
	if j.Checkpoints {
		script = obedient + fmt.Sprintf(`n=$(cat /checkpoints/%[1]s 2>/dev/null || echo 0)
echo "begins at $n of %[2]d"
while [ "$n" -lt %[2]d ]; do sleep 1 & wait $!; n=$((n + 1)); echo $n > /checkpoints/%[1]s.new; mv /checkpoints/%[1]s.new /checkpoints/%[1]s; done
`, j.Name, seconds)
		labels[lab.Domain+"/gpu.checkpoints"] = "true"
		volumes = append(volumes, object{"name": "checkpoints", "hostPath": object{"path": c.checkpoints()}})
		mounts = append(mounts, object{"name": "checkpoints", "mountPath": "/checkpoints"})
	}
	resources := object{"limits": object{lab.Domain + "/" + j.Resource: j.Count}}
	spec := object{"restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "automountServiceAccountToken": false, "enableServiceLinks": false, "volumes": volumes}
	if c.dra && j.Kind == Shares { // by DRA memory has no name but that of a claim
		resources = object{"claims": []object{{"name": "memory"}}}
		spec["resourceClaims"] = []object{{"name": "memory", "resourceClaimTemplateName": template(j.GiB)}}
	}
	spec["containers"] = []object{{"name": "main", "image": lab.TestImage, "imagePullPolicy": "Never", "command": []string{"/bin/sh", "-c", script},
		"resources": resources, "volumeMounts": mounts}}
	return object{"apiVersion": "batch/v1", "kind": "Job",
		"metadata": object{"name": j.Name, "namespace": Team, "labels": object{"kueue.x-k8s.io/queue-name": "gpus"}},
		"spec":     object{"suspend": true, "backoffLimit": 20, "template": object{"metadata": object{"labels": labels}, "spec": spec}}}
}

// template is the name of the ResourceClaimTemplate of so much memory.
func template(gib int) string { return fmt.Sprintf("memory-%d", gib) }
