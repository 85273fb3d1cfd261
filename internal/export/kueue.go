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

// Kueue exports to Kueue 0.19: quotas of on-prem sites, which come first, and of clouds.
type Kueue struct {
	// Domain is the prefix of labels and DeviceClasses, ResourceDomain the prefix of resources.
	Domain, ResourceDomain string
	Nodes                  []Node
	// Clouds are the sites that cost money, in the order of use. All other sites are on-prem.
	Clouds []Cloud
	Teams  []Team
	// Topology is true if Kueue is to check what single nodes have left. If that cannot work, the
	// export has no topology, and a comment with the reason.
	Topology bool
	// Checks is true if Kueue is to ask the placer whether a workload has room. Then there is no
	// topology, since both would choose nodes.
	Checks bool
	// Patience is how long a workload waits for room on-prem before it may use a cloud. Zero means
	// not at all. It needs Checks.
	Patience time.Duration
	// Claims is true if pods ask for DRA devices through ResourceClaimTemplates. Otherwise they ask
	// through the names of extended resources. Kueue counts only one of these.
	Claims bool
}

// Cloud is the limit on the use of a cloud at one time.
type Cloud struct {
	Site string
	// Model and Mode are the values of the nodes' labels. Both may be empty if the site has nodes
	// of one kind only, or none yet.
	Model, Mode string
	// Limit is the largest amount of GPU memory that all teams may have there together.
	Limit gpu.MiB
}

// Team gets a ClusterQueue, and a LocalQueue in the namespace of its name.
type Team struct {
	Name string
	// Share is its part of each quota, relative to the other teams' shares; at least 1.
	Share int
	// OnPrem is true if the team's work must not use clouds.
	OnPrem bool
	// Urgent is true if the team may send jobs that take the room of others on-prem. It needs
	// Checks.
	Urgent bool
}

// Names of objects.
const (
	cohort     = "gpus"
	topology   = "gpus"
	localQueue = "gpus"
	hostname   = "kubernetes.io/hostname"
	// urgent names the ClusterQueue of urgent jobs, the LocalQueue for it, and their priority
	// class.
	urgent      = "gpus-urgent"
	urgentValue = 1000
	currency    = "gpu-memory"
	kueueAPI    = "kueue.x-k8s.io/v1beta2"
)

func (k *Kueue) siteLabel() string { return k.Domain + "/" + gpunode.Site }

// resource returns a resource's full name.
func (k *Kueue) resource(name string) string { return k.ResourceDomain + "/" + name }

const kueueHead = `GPU quotas for Kueue 0.19 (objects of kueue.x-k8s.io/v1beta2), by "gpu-agent export kueue".
Kueue counts GPUs like this only with what "gpu-agent export kueue --configuration" says in
its configuration: apply that first. Export again when nodes or partitions change.
Format: sigs.k8s.io/kueue v0.19.0, config/components/crd/bases.`

// Objects returns the ResourceFlavors, the Topology, ClusterQueues and LocalQueues to apply. The
// error has all that cannot be exported.
func (k *Kueue) Objects() ([]byte, error) {
	b, err := k.book()
	if err != nil {
		return nil, err
	}
	var out []any
	tas := k.Topology && !k.Checks && b.noTopology == ""
	if tas {
		levels := []object{{{"nodeLabel", k.siteLabel(), ""}}, {{"nodeLabel", hostname, ""}}}
		out = append(out, document(kueueAPI, "Topology", object{{"name", topology, ""}}, object{
			{"levels", levels, "Down to the hostname, so that Kueue compares a pod with what one node has\n" +
				"allocatable. Of gpu-mem that is still a sum over the node's GPUs."},
		}))
	}
	for i := range b.flavors {
		out = append(out, k.flavor(&b.flavors[i], tas, b.noTopology))
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

// urgent returns the objects for jobs that take the room of others; nil if no team may send such
// jobs.
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
		if f := &b.flavors[i]; !f.cloud && !f.spot {
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
			"placer's checks.\nA job that names no class has 0."},
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
			"All on-prem devices a second time, in no cohort: so Kueue always has quota, and ends no job\n" +
				"by its own choice."},
		{"admissionChecksStrategy", object{{"admissionChecks", checks, ""}},
			"Answered by the placer (deployments/placer/kueue), which ends the jobs that are in the way."},
	}))
	for _, name := range teams {
		meta := object{{"namespace", name, ""}, {"name", urgent, ""}}
		out = append(out, document(kueueAPI, "LocalQueue", meta, object{{"clusterQueue", urgent, ""}}))
	}
	return out
}

// covered returns the resources that queues have quotas of.
func (k *Kueue) covered(b *book) []string {
	resources := []string{k.resource(currency)}
	for _, name := range b.covered {
		resources = append(resources, k.resource(name))
	}
	return resources
}

// quotas returns a flavor's quotas for a queue. part returns the queue's part of a count.
func (k *Kueue) quotas(b *book, part func(count int) int, memory gpu.MiB, counts map[string]int) []object {
	out := []object{{{"name", k.resource(currency), ""}, {"nominalQuota", memory, ""}}}
	for _, name := range b.covered {
		out = append(out, object{{"name", k.resource(name), ""}, {"nominalQuota", fmt.Sprint(part(counts[name])), ""}})
	}
	return out
}

// flavor returns a ResourceFlavor.
func (k *Kueue) flavor(f *flavor, tas bool, noTopology string) object {
	labels := object{{k.siteLabel(), f.site, ""}}
	if f.model != "" {
		labels = append(labels, field{k.Domain + "/gpu.model", f.model, ""}, field{k.Domain + "/gpu.mode", f.mode, ""})
	}
	comment := fmt.Sprintf("%d nodes: %s", len(f.nodes), names(f.nodes))
	switch len(f.nodes) {
	case 0:
		comment = "No node yet: the nodes that an autoscaler makes need these labels from the start."
	case 1:
		comment = "One node: " + f.nodes[0]
	}
	spec := object{{"nodeLabels", labels, comment}}
	switch {
	case tas:
		spec = append(spec, field{"topologyName", topology, ""})
	case k.Topology && !k.Checks:
		spec[0].comment += "\nNo topology, since the flavors of a queue must all have one, or none:\n" +
			noTopology + "."
	}
	if f.spot {
		spec[0].comment += "\nThe same nodes as of the flavor without -spot, for spot pods."
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
			"A job waits this long for room on-prem before it uses this.",
		})
	}
	return document(kueueAPI, "ResourceFlavor", meta, spec)
}

// document returns a Kubernetes object.
func document(api, kind string, meta, spec object) object {
	return object{{"apiVersion", api, ""}, {"kind", kind, ""}, {"metadata", meta, ""}, {"spec", spec, ""}}
}

// queue returns the ClusterQueue of a team.
func (k *Kueue) queue(b *book, team int) object {
	t := k.Teams[team]
	var flavors []object
	on := map[bool][]string{} // the names of flavors; true has those of clouds
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
		comment := fmt.Sprintf("On-prem: %s in all.", quantity(f.memory))
		if f.spot {
			comment = fmt.Sprintf("On-prem a second time, for spot pods (resources with .spot): what guaranteed pods "+
				"leave\nfree of %s. They give it back when it is wanted.", quantity(f.memory))
		}
		if f.cloud {
			comment = fmt.Sprintf("Cloud: all teams together have %s at most, "+
				"which is the spending limit. A GPU is\npaid for while any piece of it is held.", quantity(f.memory))
		}
		flavors = append(flavors, object{{"name", f.name, comment}, {"resources", inlined(quotas), ""}})
		on[f.cloud] = append(on[f.cloud], f.name)
	}
	spec := object{
		{"cohortName", cohort, "Queues of a cohort lend each other what they do not use. Kueue takes nothing back " +
			"from jobs\nthat run (spec.preemption)."},
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

// checks returns the placer's admission checks, each with its flavors.
func checks(on map[bool][]string) (out []object) {
	for _, cloud := range []bool{false, true} {
		if name := map[bool]string{false: "gpu-placer", true: "gpu-placer-cloud"}[cloud]; len(on[cloud]) > 0 {
			out = append(out, object{{"name", name, ""}, {"onFlavors", on[cloud], ""}})
		}
	}
	return out
}

// inlined puts each object on one line.
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

// Configuration returns the part of Kueue's own configuration that Objects needs. The error has all
// that cannot be exported.
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
	// Do not set quotaCheckStrategy: IgnoreUndeclared. With it Kueue 0.19 cannot admit a workload
	// whose first pods ask for no covered resource, such as the head of a Ray cluster. Its
	// scheduler leaves the other pods out of the admission. The API server refuses that, and Kueue
	// tries again and again.
	resources := object{{
		"excludeResourcePrefixes", inline{[]string{"cpu", "memory", "ephemeral-storage", "hugepages-"}},
		"Resources that have no quota. Add other devices that your pods ask for: a queue admits no\n" +
			"pod that asks for a resource without quota.",
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
			"The placer keeps a workload from flavors without room by an annotation. Kueue reads it only\n" +
				"with this gate. No queue has a concurrentAdmissionPolicy.",
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

// mappings returns what claims count as, nil if Kueue counts no claims.
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

// ParseCloud parses SITE or SITE/MODEL/MODE.
func ParseCloud(s string, limit gpu.MiB) (Cloud, error) {
	words := strings.Split(s, "/")
	if n := len(words); n != 1 && n != 3 || slices.Contains(words, "") {
		return Cloud{}, fmt.Errorf("%q is neither SITE nor SITE/MODEL/MODE", s)
	}
	words = append(words, "", "")
	return Cloud{Site: words[0], Model: words[1], Mode: words[2], Limit: limit}, nil
}
