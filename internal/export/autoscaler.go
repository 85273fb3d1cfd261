// SPDX-License-Identifier: Apache-2.0

package export

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
)

// InstanceType is the label by which autoscalers tell kinds of nodes apart.
const InstanceType = "node.kubernetes.io/instance-type"

// Autoscaler exports to programs that create nodes what a new node will offer.
type Autoscaler struct {
	// Domain is the prefix of labels, ResourceDomain the prefix of resources.
	Domain, ResourceDomain string
	// Nodes are examples, at least one of each instance type. Nodes without an instance type are
	// left out, since an autoscaler cannot create more of them.
	Nodes []Node
	// NodePool limits NodeOverlays to one of Karpenter's NodePools. Empty means all.
	NodePool string
}

// template is what a node of an instance type offers.
type template struct {
	instance, example string
	// counts are the numbers of devices that the kubelet lists on an idle node, by full name.
	// labels are those that the node must have from the start.
	counts []object
	labels []object
}

// templates works out what each instance type offers. The error has all that cannot be exported.
func (a *Autoscaler) templates() ([]template, error) {
	var out []template
	var errs []error
	var lack []string
	for _, n := range sorted(a.Nodes) {
		instance := n.Labels[InstanceType]
		if instance == "" {
			lack = append(lack, n.Name)
			continue
		}
		counts := map[string]int{}
		for i := range n.GPUs {
			g := &n.GPUs[i]
			if g.offers() && g.API == ledger.DRA {
				errs = append(errs, fmt.Errorf("%s: GPU %d is offered with api dra, and an autoscaler cannot count "+
					"such devices before the node exists: give the partition of nodes that it makes api device-plugin",
					n.Name, g.Index))
				break
			}
			for name, p := range g.resources() {
				if g.offers() && p.Devices > 0 {
					counts[a.ResourceDomain+"/"+name] += p.Devices
				}
			}
		}
		t := template{instance: instance, example: n.Name}
		for _, name := range slices.Sorted(maps.Keys(counts)) {
			t.counts = append(t.counts, object{{name, fmt.Sprint(counts[name]), ""}})
		}
		t.labels = append(t.labels, object{{a.Domain + "/gpu.node", "true", ""}})
		for _, name := range []string{"gpu.mode", "gpu.model", "gpu.partition", gpunode.Site} {
			if v := n.Labels[a.Domain+"/"+name]; v != "" {
				t.labels = append(t.labels, object{{a.Domain + "/" + name, v, ""}})
			}
		}
		if i := slices.IndexFunc(out, func(o template) bool { return o.instance == instance }); i < 0 {
			out = append(out, t)
		} else if !same(out[i].counts, t.counts) || !same(out[i].labels, t.labels) {
			errs = append(errs, fmt.Errorf("%s and %s are both %s and differ in what they offer or in labels: "+
				"choose the nodes of one pool with --selector", out[i].example, n.Name, instance))
		}
	}
	if len(a.Nodes) == 0 {
		errs = append(errs, errors.New("no node has a GPUNode: does the agent run there? "+
			"Otherwise name recorded inventories as TYPE=FILE"))
	} else if len(out) == 0 && errs == nil {
		errs = append(errs, fmt.Errorf("no node has the label %s (not %s): name recorded inventories as TYPE=FILE",
			InstanceType, names(lack)))
	}
	for _, t := range out {
		if t.counts == nil {
			errs = append(errs, fmt.Errorf("%s, a %s, offers nothing: is a partition in force?", t.example, t.instance))
		}
	}
	slices.SortFunc(out, func(a, b template) int { return strings.Compare(a.instance, b.instance) })
	return out, errors.Join(errs...)
}

// same compares lists of objects with one field.
func same(a, b []object) bool {
	return slices.EqualFunc(a, b, func(a, b object) bool { return a[0] == b[0] })
}

const karpenterHead = `What nodes will offer, for Karpenter 1.8 (NodeOverlay, karpenter.sh/v1alpha1), by
"gpu-agent export karpenter". It takes Karpenter's feature gate NodeOverlay=true.
MIG on demand: the counts are those of an idle node, and not all devices fit at the same time.
Format: sigs.k8s.io/karpenter v1.8.0, pkg/apis/crds/karpenter.sh_nodeoverlays.yaml.`

// Karpenter returns a NodeOverlay for each instance type. The error has all that cannot be
// exported.
func (a *Autoscaler) Karpenter() ([]byte, error) {
	templates, err := a.templates()
	if err != nil {
		return nil, err
	}
	var out []any
	for _, t := range templates {
		is := func(key, value string) object {
			return object{{"key", key, ""}, {"operator", "In", ""}, {"values", []string{value}, ""}}
		}
		name, requirements := flavorName("gpu-agent", t.instance), []object{is(InstanceType, t.instance)}
		if a.NodePool != "" {
			name = flavorName("gpu-agent", a.NodePool, t.instance)
			requirements = append(requirements, is("karpenter.sh/nodepool", a.NodePool))
		}
		comment := "As on " + t.example +
			".\nThe NodePool gives its nodes these labels (spec.template.metadata.labels):"
		for _, l := range t.labels {
			comment += fmt.Sprintf("\n  %s: %q", l[0].key, l[0].value)
		}
		out = append(out, document("karpenter.sh/v1alpha1", "NodeOverlay", object{{"name", name, ""}}, object{
			{"requirements", inlined(requirements), ""}, {"capacity", slices.Concat(t.counts...), comment},
		}))
	}
	return write(karpenterHead, out...)
}

// Form is a place where Cluster Autoscaler reads what a node will offer.
type Form string

// Forms.
const (
	AWS        Form = "aws"
	Azure      Form = "azure"
	ClusterAPI Form = "cluster-api"
)

// Forms are all forms.
var Forms = []string{string(AWS), string(Azure), string(ClusterAPI)}

const autoscalerHead = `What nodes of an empty group will offer, for Cluster Autoscaler, by
"gpu-agent export cluster-autoscaler":
%s.
MIG on demand: the counts are those of an idle node, and not all devices fit at the same time.
Format: github.com/kubernetes/autoscaler at 55c37cd5eb55 (2026-08-22),
cluster-autoscaler/cloudprovider/%s.`

// ClusterAutoscaler returns the tags for each group of nodes, in a form. The error has all that
// cannot be exported.
func (a *Autoscaler) ClusterAutoscaler(form Form) ([]byte, error) {
	templates, err := a.templates()
	if err != nil {
		return nil, err
	}
	var out []any
	var errs []error
	var where, source string
	for _, t := range templates {
		comment := fmt.Sprintf("%s, as on %s", t.instance, t.example)
		var o object
		switch form {
		case AWS:
			where, source = "tags of Auto Scaling groups", "aws/aws_manager.go"
			o = tags(t, "k8s.io/cluster-autoscaler/node-template/", "/", func(key string) string { return key })
		case Azure:
			// In resource names Azure reads "~2" as "/", too, and so cannot express "_".
			where, source = "tags of Virtual Machine Scale Sets", "azure/azure_template.go"
			if i := slices.IndexFunc(t.counts, func(o object) bool { return strings.Contains(o[0].key, "_") }); i >= 0 {
				errs = append(errs, fmt.Errorf("%s: Azure's tags cannot name %s, since they read \"_\" as \"/\"",
					t.instance, t.counts[i][0].key))
			}
			o = tags(t, "k8s.io_cluster-autoscaler_node-template_", "_",
				strings.NewReplacer("/", "_", "_", "~2").Replace)
		default:
			where = "annotations of MachineDeployments (cpu and memory are yours to add)"
			source = "clusterapi/clusterapi_utils.go"
			if len(t.counts) > 1 {
				errs = append(errs, fmt.Errorf("%s: Cluster API's annotations name one extended resource, "+
					"and these nodes offer %d (%s and others): give their GPUs one mode and one profile, "+
					"or let the provider say the capacity in its machine template",
					t.instance, len(t.counts), t.counts[0][0].key))
			}
			var labels []string
			for _, l := range t.labels {
				labels = append(labels, fmt.Sprintf("%s=%s", l[0].key, l[0].value))
			}
			const prefix = "capacity.cluster-autoscaler.kubernetes.io/"
			o = object{
				{prefix + "gpu-count", t.counts[0][0].value, ""}, {prefix + "gpu-type", t.counts[0][0].key, ""},
				{prefix + "labels", strings.Join(labels, ","), ""},
			}
		}
		o[0].comment = comment
		out = append(out, o)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return write(fmt.Sprintf(autoscalerHead, where, source), out...)
}

// tags returns a template's tags, in a form whose keys permit few characters.
func tags(t template, prefix, between string, key func(string) string) (out object) {
	for _, l := range t.labels {
		out = append(out, field{prefix + "label" + between + key(l[0].key), l[0].value, ""})
	}
	for _, c := range t.counts {
		out = append(out, field{prefix + "resources" + between + key(c[0].key), c[0].value, ""})
	}
	return out
}
