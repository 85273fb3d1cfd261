// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// Arm is a way to have Kueue decide where a Job runs.
type Arm struct {
	Name string
	// Flags are those of `gpu-agent export kueue` beside the sites and the team.
	Flags []string
	// Checks says that the placer answers admission checks, and kube-scheduler's extender too.
	Checks bool
	// DRA says that GPUs have api: dra. Memory is asked for by claims then.
	DRA bool
}

// The arms that are compared.
var (
	Quota    = Arm{Name: "quota", Flags: []string{"--topology=false"}}
	Topology = Arm{Name: "topology"}
	Checks   = Arm{Name: "checks", Flags: []string{"--checks"}, Checks: true}
	Claims   = Arm{Name: "dra", Flags: []string{"--topology=false"}, DRA: true}
)

// Set makes the cluster one where Kueue decides in the arm's way, and where nothing is left of
// another's Jobs.
func (c *Cluster) Set(ctx context.Context, arm Arm) error {
	if err := c.clear(ctx); err != nil {
		return err
	}
	if arm.DRA != c.dra {
		c.dra = arm.DRA
		if err := c.Agents[OnPrem].SetPartitions(ctx, partitions(c.dra)); err != nil {
			return err
		}
	}
	if err := c.offered(ctx); err != nil {
		return err
	}
	if c.dra {
		if err := c.templates(ctx); err != nil {
			return err
		}
	}
	export := func(more ...string) ([]byte, error) {
		args := append([]string{c.kit.Bin("gpu-agent"), "export", "kueue", "--kubeconfig", "/etc/kubernetes/admin.conf", "--cloud", Sites[Cloud] + "=" + limit, "--team", Team}, arm.Flags...)
		return c.Nodes[OnPrem].Exec(ctx, append(args, more...)...)
	}
	configuration, err := export("--configuration")
	if err != nil {
		return err
	}
	if err := c.Nodes[OnPrem].StartKueue(ctx, configuration, nil); err != nil {
		return err
	}
	c.kueue = true
	// The placer lists Kueue's objects before it answers, so that it knows what is held.
	if err := c.scheduler(ctx, arm); err != nil {
		return err
	}
	if arm.Checks {
		checks, err := os.ReadFile(filepath.Join(c.kit.Root, "deployments", "placer", "kueue", "checks.yaml"))
		if err != nil {
			return err
		}
		if err := c.apply(ctx, checks); err != nil {
			return err
		}
	}
	objects, err := export()
	if err != nil {
		return err
	}
	if err := c.apply(ctx, objects); err != nil {
		return err
	}
	return lab.Await(ctx, time.Minute, "the queue to be active", c.active)
}

// active says what keeps the team's queues from admitting anything.
func (c *Cluster) active(ctx context.Context) error {
	var list struct {
		Items []struct {
			Metadata meta
			Status   struct {
				Conditions []struct{ Type, Status, Message string }
			}
		}
	}
	if err := c.Nodes[OnPrem].Read(ctx, "/apis/kueue.x-k8s.io/v1beta2/clusterqueues", &list); err != nil {
		return err
	}
	for _, q := range list.Items {
		ok, says := false, "it has no condition yet"
		for _, c := range q.Status.Conditions {
			if c.Type == "Active" {
				ok, says = c.Status == "True", c.Message
			}
		}
		if !ok {
			return fmt.Errorf("queue %s is not active: %s", q.Metadata.Name, says)
		}
	}
	if len(list.Items) == 0 {
		return fmt.Errorf("there is no queue")
	}
	return nil
}

// clear ends Kueue and what another arm has left: Jobs, queues and all that they are made of.
func (c *Cluster) clear(ctx context.Context) error {
	n := c.Nodes[OnPrem]
	if _, err := n.Kubectl(ctx, nil, "delete", "jobs", "--all", "-n", Team, "--cascade=foreground"); err != nil {
		return err
	}
	if c.kueue {
		kinds := "localqueues.kueue.x-k8s.io,clusterqueues.kueue.x-k8s.io,resourceflavors.kueue.x-k8s.io,topologies.kueue.x-k8s.io,admissionchecks.kueue.x-k8s.io"
		if _, err := n.Kubectl(ctx, nil, "delete", kinds, "--all", "--all-namespaces", "--timeout=60s"); err != nil {
			return err
		}
		if err := n.Stop(ctx, lab.KueueProcess); err != nil {
			return err
		}
	}
	dir := c.checkpoints()
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.MkdirAll(dir, 0o755)
}

// checkpoints is where Jobs write down how far they are. It is the same place on both nodes, as
// shared storage would be.
func (c *Cluster) checkpoints() string {
	return filepath.Join(c.kit.Cache, "run", c.Nodes[OnPrem].Name, "checkpoints")
}

// scheduler starts the scheduler as the arm wants it.
func (c *Cluster) scheduler(ctx context.Context, arm Arm) (err error) {
	n := c.Nodes[OnPrem]
	switch {
	case arm.Checks && c.placer == nil:
		if c.placer, err = n.StartPlacer(ctx, "--doors=extender,kueue"); err != nil {
			return err
		}
		config, err := n.SchedulerConfig()
		if err != nil {
			return err
		}
		c.restore, err = n.SetScheduler(ctx, "--config", config)
		return err
	case !arm.Checks && c.placer != nil:
		if err := c.restore(ctx); err != nil {
			return err
		}
		placer := c.placer
		c.placer = nil
		return placer.Stop(ctx)
	}
	return nil
}

// templates are what Jobs make their claims of memory from.
func (c *Cluster) templates(ctx context.Context) error {
	var all strings.Builder
	for _, p := range pieces[Shares] {
		fmt.Fprintf(&all, `---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s, namespace: %s}
spec:
  spec:
    devices:
      requests:
      - name: memory
        exactly: {deviceClassName: gpu-memory.%s, capacity: {requests: {memory: %dGi}}}
`, template(p.GiB), Team, lab.Domain, p.GiB)
	}
	return c.apply(ctx, []byte(all.String()))
}
