// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/export"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"
)

const exportUsage = `usage: gpu-agent export kueue [FLAGS] --cloud SITE=LIMIT --team NAME [SITE[/PARTITION]=FILE]...
       gpu-agent export karpenter [FLAGS] [TYPE[/PARTITION]=FILE]...
       gpu-agent export cluster-autoscaler [FLAGS] --form FORM [TYPE[/PARTITION]=FILE]...

Prints what a cluster's GPUs are for another program: of the cluster that --kubeconfig leads
to, by its Nodes and GPUNodes, or of recorded inventories (gpu-agent inventory -o json), each
one node of that site or instance type, laid out as --config says.
`

// exportTo is `gpu-agent export`.
func exportTo(ctx context.Context, c console, args []string) error {
	formats := map[string]func(context.Context, console, []string) ([]byte, error){
		"kueue": exportKueue, "karpenter": exportKarpenter, "cluster-autoscaler": exportClusterAutoscaler,
	}
	if len(args) == 0 || formats[args[0]] == nil {
		fmt.Fprint(c.err, exportUsage)
		return errUsage
	}
	text, err := formats[args[0]](ctx, c, args[1:])
	if err == nil {
		_, err = c.out.Write(text)
	}
	return err
}

// sourceFlags say whose GPUs are exported.
type sourceFlags struct {
	names                  nameFlags
	config, selector, site string
	of                     partitionFlags
}

// exportFlags are those of one format.
func exportFlags(c console, name, args, what string, s *sourceFlags) *flag.FlagSet {
	fs := newFlags(c, "export "+name, args, what)
	fs.StringVar(&s.names.kubeconfig, "kubeconfig", "", "`file` with the API server's address and credentials (default: the pod's service account)")
	fs.StringVar(&s.names.domain, "domain", "example.com", "`domain` of labels and DeviceClasses")
	fs.StringVar(&s.names.resourceDomain, "resource-domain", "", "`domain` of resources (default: --domain)")
	fs.StringVar(&s.selector, "selector", "", "only nodes with these `labels`, as kubectl -l has them; not of recorded inventories")
	fs.StringVar(&s.config, "config", "", "partition `file` for recorded inventories")
	s.of.register(fs)
	return fs
}

// read returns the nodes, by what is recorded in files, or by the cluster. recorded makes
// labels of a file's first word.
func (s *sourceFlags) read(ctx context.Context, c console, fs *flag.FlagSet, args []string, recorded func(word string) map[string]string) ([]export.Node, error) {
	files, err := parse(fs, args)
	if err != nil {
		return nil, err
	}
	if err := s.names.complete(); err != nil {
		return nil, fmt.Errorf("%s: %w", fs.Name(), err)
	}
	if len(files) == 0 {
		return s.cluster(ctx, c)
	}
	if s.config == "" {
		return nil, fmt.Errorf("%s: --config is missing: it says how the GPUs of recorded inventories are laid out", fs.Name())
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
			return nil, fmt.Errorf("%s: %q is not WORD[/PARTITION]=FILE, with an inventory in the file", fs.Name(), arg)
		}
		inv, err := inventoryFrom(ctx, c, nil, file)
		if err != nil {
			return nil, err
		}
		want, err := partitions.Desire(cmp.Or(partition, agent.DefaultPartition), inv, s.of.node())
		if err != nil {
			return nil, err
		}
		n, err := export.FromInventory(strings.TrimSuffix(filepath.Base(file), ".json"), s.names.domain, inv, want, gpu.MiB(s.of.unit), recorded(word))
		if err != nil {
			return nil, err
		}
		if partition != "" {
			n.Labels[s.names.domain+"/gpu.partition"] = partition
		}
		out = append(out, n)
	}
	return out, nil
}

// cluster reads the nodes of a cluster that have a GPUNode.
func (s *sourceFlags) cluster(ctx context.Context, c console) ([]export.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	found, err := agentkube.List(ctx, kube.Options{Kubeconfig: s.names.kubeconfig, Domain: s.names.domain, Logger: slog.New(slog.NewTextHandler(c.err, nil))}, s.selector)
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

func exportKueue(ctx context.Context, c console, args []string) ([]byte, error) {
	var s sourceFlags
	var k export.Kueue
	fs := exportFlags(c, "kueue", " [SITE[/PARTITION]=FILE]...", "Prints what Kueue 0.19 needs to give out GPUs: objects to apply, or with\n--configuration a part of its own configuration. Sites are by the label DOMAIN/"+gpunode.Site+".", &s)
	none := false
	fs.Var(repeated{func(v string) error {
		if v == "none" {
			none = true
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
		k.Clouds = append(k.Clouds, cloud)
		return err
	}}, "cloud", "`SITE=LIMIT`: the most GPU memory that may be used at a site that costs money, or none; SITE/MODEL/MODE=LIMIT where it has nodes of several kinds; required, may be repeated")
	fs.Var(repeated{func(v string) error {
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
		k.Teams = append(k.Teams, t)
		return nil
	}}, "team", "`NAME[=SHARE][,on-prem][,urgent]`: a team, which is a namespace too, its share of the quotas (1), whether its work stays on-prem, and whether it may send jobs that take the room of others; may be repeated")
	fs.BoolVar(&k.Topology, "topology", true, "let Kueue look at what single nodes have left, where it can")
	fs.BoolVar(&k.Checks, "checks", false, "have the placer asked whether a workload has room (deployments/placer/kueue), instead of a topology")
	how := choice{"names", []string{"names", "claims"}}
	fs.Var(&how, "dra", "how pods ask for whole GPUs and MIG with api dra: by the names of resources, or by ResourceClaimTemplates; names or claims")
	configuration := fs.Bool("configuration", false, "print the part of Kueue's configuration instead of objects")
	nodes, err := s.read(ctx, c, fs, args, func(site string) map[string]string {
		return map[string]string{s.names.domain + "/" + gpunode.Site: site}
	})
	if err != nil {
		return nil, err
	}
	if none == (len(k.Clouds) > 0) {
		return nil, errors.New("gpu-agent export kueue: --cloud is missing: say how much of a cloud may be used (--cloud cloud=640GiB), or that there is none (--cloud none)")
	}
	k.Domain, k.ResourceDomain, k.Nodes, k.Claims = s.names.domain, s.names.resourceDomain, nodes, how.value == "claims"
	if *configuration {
		return k.Configuration()
	}
	return k.Objects()
}

// instances are the flags of the exports to autoscalers, and their nodes.
func instances(ctx context.Context, c console, fs *flag.FlagSet, s *sourceFlags, args []string) (*export.Autoscaler, error) {
	fs.StringVar(&s.site, "site", "", "`name` of the site that nodes of recorded inventories are at")
	nodes, err := s.read(ctx, c, fs, args, func(instance string) map[string]string {
		labels := map[string]string{export.InstanceType: instance}
		if s.site != "" {
			labels[s.names.domain+"/"+gpunode.Site] = s.site
		}
		return labels
	})
	if err != nil {
		return nil, err
	}
	return &export.Autoscaler{Domain: s.names.domain, ResourceDomain: s.names.resourceDomain, Nodes: nodes}, nil
}

func exportKarpenter(ctx context.Context, c console, args []string) ([]byte, error) {
	var s sourceFlags
	fs := exportFlags(c, "karpenter", " [TYPE[/PARTITION]=FILE]...", "Prints NodeOverlays, by which Karpenter 1.8 knows what a node will offer.", &s)
	pool := fs.String("nodepool", "", "`name` of the only NodePool that they are for")
	a, err := instances(ctx, c, fs, &s, args)
	if err != nil {
		return nil, err
	}
	a.NodePool = *pool
	return a.Karpenter()
}

func exportClusterAutoscaler(ctx context.Context, c console, args []string) ([]byte, error) {
	var s sourceFlags
	fs := exportFlags(c, "cluster-autoscaler", " --form FORM [TYPE[/PARTITION]=FILE]...", "Prints the tags or annotations by which Cluster Autoscaler knows what a node of an\nempty group will offer.", &s)
	form := choice{"", export.Forms}
	fs.Var(&form, "form", "whose groups: aws, azure or cluster-api; required")
	a, err := instances(ctx, c, fs, &s, args)
	if err != nil {
		return nil, err
	}
	if form.value == "" {
		return nil, fmt.Errorf("gpu-agent export cluster-autoscaler: --form is missing: one of %s", strings.Join(export.Forms, ", "))
	}
	return a.ClusterAutoscaler(export.Form(form.value))
}
