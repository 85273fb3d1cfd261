// SPDX-License-Identifier: Apache-2.0

package export

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/pkg/gpu"
)

// Kueue is an export to Kueue 0.19: quotas of on-prem sites, which come first, and of clouds.
type Kueue struct {
	// Domain is that of labels and DeviceClasses, ResourceDomain that of resources.
	Domain, ResourceDomain string
	Nodes                  []Node
	// Clouds are the sites that cost money, in the order in which they are tried. All other
	// sites are on-prem.
	Clouds []Cloud
	Teams  []Team
	// Topology lets Kueue look at what single nodes have left. It is left out, and the text
	// says why, where that cannot work.
	Topology bool
	// Checks has the placer asked whether a workload has room. There is no topology then: both
	// would choose nodes.
	Checks bool
	// Patience is how long a workload waits for room on-prem before a cloud is paid, 0 for not at all.
	// It needs Checks.
	Patience time.Duration
	// Claims says that pods ask for what goes through DRA by ResourceClaimTemplates, and not
	// by the names of extended resources. Kueue takes one or the other.
	Claims bool
}

// Cloud is how much of a cloud may be used at a time.
type Cloud struct {
	Site string
	// Model and Mode are the values of the nodes' labels; both may be empty where the site
	// has nodes of one kind only, or none yet.
	Model, Mode string
	// Limit is the most GPU memory that all teams may have there together.
	Limit gpu.MiB
}

// Team is who gets a ClusterQueue, and a LocalQueue in the namespace of its name.
type Team struct {
	Name string
	// Share is its part of every quota, against the others'.
	Share int
	// OnPrem keeps the team's work off the clouds.
	OnPrem bool
	// Urgent lets the team send jobs that take the room of others on-prem. It needs Checks.
	Urgent bool
}

// Names of objects.
const (
	cohort     = "gpus"
	topology   = "gpus"
	localQueue = "gpus"
	hostname   = "kubernetes.io/hostname"
	// urgent is the ClusterQueue of urgent jobs, the LocalQueue that leads there, and their class.
	urgent      = "gpus-urgent"
	urgentValue = 1000
	currency    = "gpu-memory"
	kueueAPI    = "kueue.x-k8s.io/v1beta2"
)

func (k *Kueue) siteLabel() string { return k.Domain + "/" + gpunode.Site }

// resource is a resource's full name.
func (k *Kueue) resource(name string) string { return k.ResourceDomain + "/" + name }

const kueueHead = `GPU quotas for Kueue 0.19 (objects of kueue.x-k8s.io/v1beta2), by "gpu-agent export kueue".
Kueue counts GPUs like this only with what "gpu-agent export kueue --configuration" says in
its configuration: apply that first. Export again when nodes or partitions change.
Format: sigs.k8s.io/kueue v0.19.0, config/components/crd/bases.`

// Objects are the ResourceFlavors, the Topology, ClusterQueues and LocalQueues, to be
// applied. The error has all that cannot be said.
func (k *Kueue) Objects() ([]byte, error) {
	b, err := k.book()
	if err != nil {
		return nil, err
	}
	var out []any
	tas := k.Topology && !k.Checks && b.apart == ""
	if tas {
		levels := []object{{{"nodeLabel", k.siteLabel(), ""}}, {{"nodeLabel", hostname, ""}}}
		out = append(out, document(kueueAPI, "Topology", object{{"name", topology, ""}}, object{
			{"levels", levels, "Down to the hostname, so that Kueue compares a pod with what one node has\n" +
				"allocatable. Of gpu-mem that is still a sum over the node's GPUs."},
		}))
	}
	for i := range b.flavors {
		out = append(out, k.flavor(&b.flavors[i], tas, b.apart))
	}
	for i := range k.Teams {
		team := k.Teams[i].Name
		out = append(out, k.queue(b, i), document(kueueAPI, "LocalQueue", object{
			{"namespace", team, ""},
			{"name", localQueue, "Jobs name it in the label kueue.x-k8s.io/queue-name."},
		}, object{{"clusterQueue", team, ""}}))
	}
	return write(kueueHead, append(out, k.urgent(b)...)...)
}

// urgent is what jobs need that take the room of others; nothing where no team may send any.
func (k *Kueue) urgent(b *book) (out []any) {
	var teams []string
	for _, t := range k.Teams {
		if t.Urgent {
			teams = append(teams, t.Name)
		}
	}
	if teams == nil {
		return nil
	}
	var flavors []object
	for i := range b.flavors {
		if f := &b.flavors[i]; !f.cloud {
			flavors = append(flavors, object{
				{"name", f.name, ""},
				{"resources", inlined(k.quotas(b, func(n int) int { return n }, f.memory, f.counts)), ""},
			})
		}
	}
	out = append(out, object{
		{"apiVersion", kueueAPI, ""}, {"kind", "WorkloadPriorityClass", ""},
		{"metadata", object{{"name", urgent, "Jobs name it in the label kueue.x-k8s.io/priority-class."}}, ""},
		{"value", urgentValue, "Jobs of a lower priority make room, if they came through queues with the " +
			"placer's checks.\nWho names no class has 0."},
		{"description", "takes the room of other jobs", ""},
	})
	theirs := []object{
		{{"key", "kubernetes.io/metadata.name", ""}, {"operator", "In", ""}, {"values", inline{teams}, ""}},
	}
	checks := []object{{{"name", "gpu-placer-urgent", ""}}}
	out = append(out, document(kueueAPI, "ClusterQueue", object{{"name", urgent, ""}}, object{
		{"namespaceSelector", object{{"matchExpressions", theirs, ""}}, ""},
		{"queueingStrategy", "BestEffortFIFO", ""},
		{"resourceGroups", []object{{{"coveredResources", k.covered(b), ""}, {"flavors", flavors, ""}}},
			"All that there is on-prem, once more, and in no cohort: so Kueue always has quota, and ends\n" +
				"nobody by its own choice."},
		{"admissionChecksStrategy", object{{"admissionChecks", checks, ""}},
			"Answered by the placer (deployments/placer/kueue), which ends those who are in the way."},
	}))
	for _, name := range teams {
		meta := object{{"namespace", name, ""}, {"name", urgent, ""}}
		out = append(out, document(kueueAPI, "LocalQueue", meta, object{{"clusterQueue", urgent, ""}}))
	}
	return out
}

// covered are the resources that queues have quotas of.
func (k *Kueue) covered(b *book) []string {
	resources := []string{k.resource(currency)}
	for _, name := range b.covered {
		resources = append(resources, k.resource(name))
	}
	return resources
}

// quotas are those of a flavor, of whose counts a queue has a part.
func (k *Kueue) quotas(b *book, part func(count int) int, memory gpu.MiB, counts map[string]int) []object {
	out := []object{{{"name", k.resource(currency), ""}, {"nominalQuota", memory, ""}}}
	for _, name := range b.covered {
		out = append(out, object{{"name", k.resource(name), ""}, {"nominalQuota", fmt.Sprint(part(counts[name])), ""}})
	}
	return out
}

// flavor is a ResourceFlavor.
func (k *Kueue) flavor(f *flavor, tas bool, apart string) object {
	labels := object{{k.siteLabel(), f.site, ""}}
	if f.model != "" {
		labels = append(labels, field{k.Domain + "/gpu.model", f.model, ""}, field{k.Domain + "/gpu.mode", f.mode, ""})
	}
	says := fmt.Sprintf("%d nodes: %s", len(f.nodes), names(f.nodes))
	switch len(f.nodes) {
	case 0:
		says = "No node yet: the nodes that an autoscaler makes need these labels from the start."
	case 1:
		says = "One node: " + f.nodes[0]
	}
	spec := object{{"nodeLabels", labels, says}}
	switch {
	case tas:
		spec = append(spec, field{"topologyName", topology, ""})
	case k.Topology && !k.Checks:
		spec[0].says += "\nNo topology, since all flavors of a queue have one, or none:\n" + apart + "."
	}
	meta := object{{"name", f.name, ""}}
	if f.cloud {
		meta = append(meta, field{
			"labels", object{{k.Domain + "/gpu.cloud", "true", ""}},
			"It costs money: room here is no reason to keep a job off another cloud.",
		})
	}
	if f.cloud && k.Patience > 0 {
		meta = append(meta, field{
			"annotations", object{{k.Domain + "/gpu.patience", k.Patience.String(), ""}},
			"A job waits for room on-prem for so long before this is paid.",
		})
	}
	return document(kueueAPI, "ResourceFlavor", meta, spec)
}

// document is an object of Kubernetes.
func document(api, kind string, meta, spec object) object {
	return object{{"apiVersion", api, ""}, {"kind", kind, ""}, {"metadata", meta, ""}, {"spec", spec, ""}}
}

// queue is the ClusterQueue of a team.
func (k *Kueue) queue(b *book, team int) object {
	t := k.Teams[team]
	var flavors []object
	on := map[bool][]string{} // the names of flavors, of those of clouds where true
	for i := range b.flavors {
		f := &b.flavors[i]
		if f.cloud && t.OnPrem {
			continue
		}
		shares := make([]int, len(k.Teams))
		for j, o := range k.Teams {
			if !f.cloud || !o.OnPrem {
				shares[j] = o.Share
			}
		}
		step := gpu.MiB(1)
		if f.memory%1024 == 0 {
			step = 1024
		}
		quotas := k.quotas(b, func(n int) int { return split(n, 1, shares)[team] },
			split(f.memory, step, shares)[team], f.counts)
		says := fmt.Sprintf("On-prem: %s in all.", quantity(f.memory))
		if f.cloud {
			says = fmt.Sprintf("Cloud: all teams together have %s at most, "+
				"which is the spending limit. A GPU is\npaid for while any piece of it is held.", quantity(f.memory))
		}
		flavors = append(flavors, object{{"name", f.name, says}, {"resources", inlined(quotas), ""}})
		on[f.cloud] = append(on[f.cloud], f.name)
	}
	spec := object{
		{"cohortName", cohort, "Queues of a cohort lend each other what they do not use. Nobody takes it back from " +
			"jobs\nthat run (spec.preemption)."},
		{"namespaceSelector", object{{"matchLabels", object{{"kubernetes.io/metadata.name", t.Name, ""}}, ""}}, ""},
		{"queueingStrategy", "BestEffortFIFO", "A job that does not fit does not hold up those behind it."},
		{"flavorFungibility", object{{"whenCanBorrow", "MayStopSearch", ""}, {"whenCanPreempt", "TryNextFlavor", ""}},
			"On-prem first, also what other teams leave idle there; then the cloud."},
		{"resourceGroups", []object{{{"coveredResources", k.covered(b), ""}, {"flavors", flavors, ""}}},
			"Each pod counts by what it asks for and by its GPU memory. A team can borrow beyond its 0\n" +
				"of a resource, unless all teams have 0: then these nodes do not offer it."},
	}
	if checks := checks(on); k.Checks && len(checks) > 0 {
		spec = append(spec, field{
			"admissionChecksStrategy", object{{"admissionChecks", checks, ""}},
			"Answered by the placer (deployments/placer/kueue): on-prem has room for every pod of a\n" +
				"workload, and a cloud is used where on-prem has none.",
		})
	}
	return document(kueueAPI, "ClusterQueue", object{{"name", t.Name, ""}}, spec)
}

// checks are the placer's, each with its flavors.
func checks(on map[bool][]string) (out []object) {
	for _, cloud := range []bool{false, true} {
		if name := map[bool]string{false: "gpu-placer", true: "gpu-placer-cloud"}[cloud]; len(on[cloud]) > 0 {
			out = append(out, object{{"name", name, ""}, {"onFlavors", on[cloud], ""}})
		}
	}
	return out
}

// inlined puts each on a line.
func inlined(list []object) []any {
	out := make([]any, len(list))
	for i, o := range list {
		out[i] = inline{o}
	}
	return out
}

const configurationHead = `For Kueue's Configuration (the ConfigMap kueue-manager-config, key
controller_manager_config.yaml), by "gpu-agent export kueue --configuration": merge it into
yours, and restart Kueue. It holds for all queues of the cluster.
Format: sigs.k8s.io/kueue v0.19.0, apis/config/v1beta2/configuration_types.go.`

// Configuration is what Kueue's own configuration needs, by which Objects make sense. The
// error has all that cannot be said.
func (k *Kueue) Configuration() ([]byte, error) {
	b, err := k.book()
	if err != nil {
		return nil, err
	}
	var sizes []object
	for _, name := range b.covered {
		if size := b.sizes[name]; size > 0 {
			sizes = append(sizes, object{
				{"input", k.resource(name), ""}, {"strategy", "Retain", ""},
				{"outputs", inline{object{{k.resource(currency), size, ""}}}, ""},
			})
		}
	}
	// Not quotaCheckStrategy: IgnoreUndeclared. With it Kueue 0.19 admits no workload whose first
	// pods ask for nothing that the queue covers, such as the head of a Ray cluster: its scheduler
	// leaves the others out of the admission, which the API server refuses, again and again.
	resources := object{{
		"excludeResourcePrefixes", inline{[]string{"cpu", "memory", "ephemeral-storage", "hugepages-"}},
		"What queues have no quota of. Add other devices that your pods ask for: a queue admits\n" +
			"nothing that asks for what it does not know.",
	}}
	if len(sizes) > 0 {
		resources = append(resources, field{
			"transformations", sizes, "What a request counts as in GPU memory, beside itself.",
		})
	}
	if mappings := k.mappings(b); mappings != nil {
		resources = append(resources, field{"deviceClassMappings", mappings, ""})
	}
	out := object{
		{"apiVersion", "config.kueue.x-k8s.io/v1beta2", ""}, {"kind", "Configuration", ""},
		{"resources", resources, ""},
	}
	var gates object
	if b.shares {
		gates = append(gates, field{
			"KueueDRAIntegrationConsumableCapacity", true,
			"Without it Kueue does not start with the mapping above.",
		})
	}
	if k.Checks {
		gates = append(gates, field{
			"ConcurrentAdmission", true,
			"The placer keeps a workload from flavors without room by an annotation, which Kueue goes\n" +
				"by with this gate alone. No queue has a concurrentAdmissionPolicy.",
		})
	}
	if gates == nil {
		return write(configurationHead, out)
	}
	out = append(out, field{
		"featureGates", gates,
		"Alpha in Kueue 0.19. Gates are named either here or in Kueue's --feature-gates, not in both.",
	})
	return write(configurationHead, out)
}

// mappings are what claims count as, nil where Kueue counts none.
func (k *Kueue) mappings(b *book) (mappings []object) {
	driver := "gpus." + k.Domain
	ours := object{{"cel", object{{"expression", fmt.Sprintf("device.driver == %q", driver), ""}}, ""}}
	source := func(kind, name string) []object {
		of := object{{"name", name, ""}, {"driver", driver, ""}, {"deviceSelector", ours, ""}}
		return []object{{{kind, of, ""}}}
	}
	if len(b.classes) > 0 {
		var classes []string
		for _, name := range b.classes {
			classes = append(classes, name+"."+k.Domain)
		}
		mappings = append(mappings, object{
			{"name", k.resource(currency), "Claims count as the GPU memory that their device takes. " +
				"Pods that ask for these classes by\nthe name of an extended resource are refused by Kueue then."},
			{"deviceClassNames", classes, ""}, {"sources", source("counter", "memory"), ""},
		})
	}
	if b.shares {
		mappings = append(mappings, object{
			{"name", k.resource(currency), "Claims of GPU memory count as what they ask for."},
			{"deviceClassNames", []string{currency + "." + k.Domain}, ""},
			{"sources", source("capacity", "memory"), ""},
		})
	}
	return mappings
}

// ParseCloud reads SITE or SITE/MODEL/MODE.
func ParseCloud(s string, limit gpu.MiB) (Cloud, error) {
	words := strings.Split(s, "/")
	if n := len(words); n != 1 && n != 3 || slices.Contains(words, "") {
		return Cloud{}, fmt.Errorf("%q is neither SITE nor SITE/MODEL/MODE", s)
	}
	words = append(words, "", "")
	return Cloud{Site: words[0], Model: words[1], Mode: words[2], Limit: limit}, nil
}
