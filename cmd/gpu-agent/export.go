// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/export"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"
)

// newExport makes `gpu-agent export`.
func newExport() *cobra.Command {
	c := &cobra.Command{
		Use:   "export",
		Short: "print what nodes offer in the form that Kueue, Karpenter or Cluster Autoscaler needs",
		Long: `Prints what nodes offer to pods, in the form that another program needs. They are the nodes of the
cluster of --kubeconfig or $KUBECONFIG, by what their GPUNodes tell, or those of recorded inventories
(gpu-agent inventory -o json). Each inventory is one node of that site or instance type, laid out as
--config says. GPUs that offer nothing do not count: those that are off, that have no partition, or
that another program gives out.`,
	}
	c.AddCommand(newExportKueue(), newExportKarpenter(), newExportClusterAutoscaler())
	return c
}

// kubeconfig returns the kubeconfigs to read: as kubectl does, those of the flag before those of the
// environment. It is empty if there are none, and then the pod's service account counts.
func kubeconfig(flag string) string { return cmp.Or(flag, os.Getenv("KUBECONFIG")) }

// sourceFlags select the nodes that are exported.
type sourceFlags struct {
	names                  nameFlags
	config, selector, site string
	of                     partitionFlags
}

func (s *sourceFlags) register(fs *pflag.FlagSet) {
	command.Kubeconfig(fs, &s.names.kubeconfig, noKubeconfig)
	s.names.Register(fs)
	fs.StringVar(&s.selector, "selector", "",
		"only nodes with these `labels`, in the form of kubectl -l; not for recorded inventories")
	configFlag(fs, &s.config)
	s.of.register(fs)
}

// read returns the nodes: those in recorded inventories, or without files those of the cluster.
// recorded returns a node's labels from the first word of a file's argument.
func (s *sourceFlags) read(
	ctx context.Context, c console, files []string, recorded func(word string) map[string]string,
) ([]export.Node, error) {
	if err := s.names.Complete(); err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return s.cluster(ctx, c)
	}
	if s.config == "" {
		return nil, command.Usagef("--config is missing: write --config FILE, " +
			"the partition file for the GPUs of recorded inventories")
	}
	partitions, err := readPartitions(c, s.config)
	if err != nil {
		return nil, err
	}
	var out []export.Node
	for _, arg := range files {
		what, file, ok := strings.Cut(arg, "=")
		word, partition, _ := strings.Cut(what, "/")
		if !ok || word == "" || file == "" {
			return nil, command.Usagef("%q is not WORD[/PARTITION]=FILE, with an inventory in the file", arg)
		}
		inv, err := inventoryFrom(ctx, c, nil, file)
		if err != nil {
			return nil, err
		}
		want, err := partitions.Desire(cmp.Or(partition, agent.DefaultPartition), inv, s.of.node())
		if err != nil {
			return nil, invalid(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		n, err := export.FromInventory(name, s.names.Domain, inv, want, gpu.MiB(s.of.unit), recorded(word))
		if err != nil {
			return nil, err
		}
		if partition != "" {
			n.Labels[s.names.Domain+"/gpu.partition"] = partition
		}
		out = append(out, n)
	}
	return out, nil
}

// cluster returns the nodes of a cluster that have a GPUNode.
func (s *sourceFlags) cluster(ctx context.Context, c console) ([]export.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	found, err := agentkube.List(ctx, kube.Options{
		Kubeconfig: kubeconfig(s.names.kubeconfig), Domain: s.names.Domain,
		Logger: slog.New(slog.NewTextHandler(c.err, nil)),
	}, s.selector)
	if err != nil {
		return nil, err
	}
	out := make([]export.Node, len(found))
	for i, n := range found {
		out[i] = export.FromStatus(n.Name, n.Labels, n.Status)
	}
	return out, nil
}

// repeated is a flag that may be given several times.
type repeated struct {
	set func(string) error
}

func (r repeated) String() string     { return "" }
func (r repeated) Set(s string) error { return r.set(s) }

// Type returns the value's name in help.
func (r repeated) Type() string { return "value" }

// kueueFlags are the flags of `gpu-agent export kueue`, and the export that they make.
type kueueFlags struct {
	source sourceFlags
	out    export.Kueue
	// none is true if --cloud is none: there is no cloud.
	none, configuration bool
	how                 command.Choice
}

func (k *kueueFlags) register(fs *pflag.FlagSet) {
	k.source.register(fs)
	fs.Var(repeated{k.addCloud}, "cloud",
		"`site=limit`: the most GPU memory that may be used at a site that costs money, or none; "+
			"SITE/MODEL/MODE=LIMIT if it has nodes of several kinds; required, may be repeated")
	fs.Var(repeated{k.addTeam}, "team",
		"`name[=share][,on-prem][,urgent]`: a team, which is a namespace too, its share of the quotas (1), "+
			"whether its work stays on-prem, and whether it may send jobs that take the room of others; "+
			"may be repeated")
	fs.BoolVar(&k.out.Topology, "topology", true, "let Kueue check what each node has left, where it can")
	fs.BoolVar(&k.out.Checks, "checks", false,
		"let Kueue ask the placer whether a workload has room (deployments/placer/kueue), instead of a topology")
	fs.DurationVar(&k.out.Patience, "patience", 0,
		"how long a job waits for room on-prem before a cloud is paid, with --checks")
	k.how = command.Choice{Value: "names", Of: []string{"names", "claims"}}
	fs.Var(&k.how, "dra",
		"how pods ask for whole GPUs and MIG with api dra: by the names of resources, or by ResourceClaimTemplates")
	fs.BoolVar(&k.configuration, "configuration", false,
		"print the part of Kueue's configuration instead of objects")
}

// addCloud adds a value of --cloud.
func (k *kueueFlags) addCloud(v string) error {
	if v == "none" {
		k.none = true
		return nil
	}
	site, amount, ok := strings.Cut(v, "=")
	var limit memoryFlag
	if !ok {
		return errors.New("want SITE=LIMIT, such as cloud=640GiB")
	}
	if err := limit.Set(amount); err != nil {
		return err
	}
	cloud, err := export.ParseCloud(site, gpu.MiB(limit))
	k.out.Clouds = append(k.out.Clouds, cloud)
	return err
}

// addTeam adds a value of --team.
func (k *kueueFlags) addTeam(v string) error {
	words := strings.Split(v, ",")
	name, share, ok := strings.Cut(words[0], "=")
	t := export.Team{Name: name, Share: 1}
	for _, word := range words[1:] {
		switch word {
		case "on-prem":
			t.OnPrem = true
		case "urgent":
			t.Urgent = true
		default:
			return fmt.Errorf("%q is neither on-prem nor urgent", word)
		}
	}
	if ok {
		n, err := strconv.Atoi(share)
		if err != nil {
			return fmt.Errorf("share %q is not a number", share)
		}
		t.Share = n
	}
	k.out.Teams = append(k.out.Teams, t)
	return nil
}

// newExportKueue makes `gpu-agent export kueue`.
func newExportKueue() *cobra.Command {
	var k kueueFlags
	c := &cobra.Command{
		Use:   "kueue --cloud SITE=LIMIT --team NAME [SITE[/PARTITION]=FILE]...",
		Short: "print what Kueue needs to give out GPUs",
		Long: `Prints what Kueue 0.19 needs to give out GPUs: objects to apply, or with --configuration a
part of its own configuration. A node's site is its label DOMAIN/` + gpunode.Site + `.`,
		Example: "gpu-agent export kueue --cloud cloud=640GiB --checks --team research,urgent --team records,on-prem",
		Args:    cobra.ArbitraryArgs,
		RunE:    k.print,
	}
	k.register(c.Flags())
	return c
}

func (k *kueueFlags) print(c *cobra.Command, files []string) error {
	names := &k.source.names
	nodes, err := k.source.read(c.Context(), consoleOf(c), files, func(site string) map[string]string {
		return map[string]string{names.Domain + "/" + gpunode.Site: site}
	})
	if err != nil {
		return err
	}
	if k.none == (len(k.out.Clouds) > 0) {
		return command.Usagef("--cloud is missing: say how much of a cloud may be used (--cloud cloud=640GiB), " +
			"or that there is none (--cloud none)")
	}
	k.out.Domain, k.out.ResourceDomain = names.Domain, names.ResourceDomain
	k.out.Nodes, k.out.Claims = nodes, k.how.Value == "claims"
	if k.configuration {
		return printText(c, k.out.Configuration)
	}
	return printText(c, k.out.Objects)
}

// printText prints what an export makes.
func printText(c *cobra.Command, of func() ([]byte, error)) error {
	text, err := of()
	if err == nil {
		_, err = c.OutOrStdout().Write(text)
	}
	return err
}

// instances returns an export to autoscalers, with its nodes.
func (s *sourceFlags) instances(c *cobra.Command, files []string) (*export.Autoscaler, error) {
	nodes, err := s.read(c.Context(), consoleOf(c), files, func(instance string) map[string]string {
		labels := map[string]string{export.InstanceType: instance}
		if s.site != "" {
			labels[s.names.Domain+"/"+gpunode.Site] = s.site
		}
		return labels
	})
	if err != nil {
		return nil, err
	}
	return &export.Autoscaler{Domain: s.names.Domain, ResourceDomain: s.names.ResourceDomain, Nodes: nodes}, nil
}

// registerInstances registers the flags of an export to autoscalers.
func (s *sourceFlags) registerInstances(fs *pflag.FlagSet) {
	s.register(fs)
	fs.StringVar(&s.site, "site", "", "`name` of the site that nodes of recorded inventories are at")
}

// newExportKarpenter makes `gpu-agent export karpenter`.
func newExportKarpenter() *cobra.Command {
	var s sourceFlags
	var pool string
	c := &cobra.Command{
		Use:     "karpenter [TYPE[/PARTITION]=FILE]...",
		Short:   "print NodeOverlays, by which Karpenter 1.8 knows what a node will offer",
		Example: "gpu-agent export karpenter --config partitions.yaml --nodepool gpus p4de.24xlarge/mig=node-2.json",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, files []string) error {
			a, err := s.instances(c, files)
			if err != nil {
				return err
			}
			a.NodePool = pool
			return printText(c, a.Karpenter)
		},
	}
	s.registerInstances(c.Flags())
	c.Flags().StringVar(&pool, "nodepool", "", "`name` of the only NodePool that they are for")
	return c
}

// newExportClusterAutoscaler makes `gpu-agent export cluster-autoscaler`.
func newExportClusterAutoscaler() *cobra.Command {
	var s sourceFlags
	form := command.Choice{Of: export.Forms}
	c := &cobra.Command{
		Use:   "cluster-autoscaler --form FORM [TYPE[/PARTITION]=FILE]...",
		Short: "print tags or annotations that tell Cluster Autoscaler what a node of an empty group will offer",
		Long: `Prints the tags or annotations by which Cluster Autoscaler knows what a node of an empty group
will offer.`,
		Example: "gpu-agent export cluster-autoscaler --form aws --config partitions.yaml p4de.24xlarge=node-1.json",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, files []string) error {
			if form.Value == "" {
				return command.Usagef("--form is missing: write --form and one of %s", strings.Join(export.Forms, ", "))
			}
			a, err := s.instances(c, files)
			if err != nil {
				return err
			}
			return printText(c, func() ([]byte, error) { return a.ClusterAutoscaler(export.Form(form.Value)) })
		},
	}
	s.registerInstances(c.Flags())
	c.Flags().Var(&form, "form", "whose groups they are; required")
	return c
}
