// SPDX-License-Identifier: Apache-2.0

package export

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
)

// Limits of Kueue 0.19.0: apis/kueue/v1beta2/clusterqueue_types.go (64 resources in a group),
// pkg/webhooks/clusterqueue_webhook.go (16 flavors with ConcurrentAdmission) and
// pkg/config/validation.go (8 classes in a mapping).
const (
	maxResources = 64
	maxFlavors   = 16
	maxClasses   = 8
)

// flavor is a kind of nodes with a quota of its own.
type flavor struct {
	name              string
	site, model, mode string
	cloud             bool
	// spot is true for the room of on-prem nodes that guaranteed pods leave free. The nodes have another flavor
	// for guaranteed pods.
	spot  bool
	nodes []string
	// memory is the quota of GPU memory. counts are the quotas of resources, by short name.
	memory gpu.MiB
	counts map[string]int
}

// book has the content of an export to Kueue.
type book struct {
	// flavors has those on-prem first: for guaranteed pods, then for spot pods. Then come the clouds in the order
	// of their limits.
	flavors []flavor
	// sizes is the memory that a device of a resource counts as, by short name. covered are all
	// resources with a quota beside memory.
	sizes   map[string]gpu.MiB
	covered []string
	// shares is true if claims get memory of some GPUs.
	shares bool
	// classes are the DeviceClasses that Kueue counts by counters, without the domain.
	classes []string
	// noTopology is why Kueue cannot use a topology; empty if it can.
	noTopology string
	errs       []error
}

func (b *book) refuse(format string, args ...any) {
	b.errs = append(b.errs, fmt.Errorf(format, args...))
}

// names lists nodes in a message.
func names(list []string) string {
	slices.Sort(list)
	return brief.List(slices.Compact(list), 5)
}

// book works out the content. The error has all that cannot be exported.
func (k *Kueue) book() (*book, error) {
	b := &book{sizes: map[string]gpu.MiB{}}
	nodes := sorted(k.Nodes)
	for i := range nodes {
		nodes[i].GPUs = slices.Clone(nodes[i].GPUs)
		for j := range nodes[i].GPUs {
			nodes[i].GPUs[j].exact = k.Claims
		}
	}
	b.measure(nodes)
	if k.Claims {
		b.claims(nodes)
	}
	b.group(k, nodes)
	b.limit(k.Clouds)
	b.check(k)
	return b, errors.Join(b.errs...)
}

// measure finds the size of each resource.
func (b *book) measure(nodes []Node) {
	by := map[string]map[gpu.MiB][]string{} // name, size, nodes
	var unsized []string
	for i := range nodes {
		n := &nodes[i]
		for j := range n.GPUs {
			g := &n.GPUs[j]
			if !g.offers() {
				continue
			}
			all := g.resources()
			maps.Copy(all, g.spot())
			for name, p := range all {
				if by[name] == nil {
					by[name] = map[gpu.MiB][]string{}
				}
				size := g.size(name, p, n.Unit)
				if g.Memory == 0 {
					unsized = append(unsized, n.Name)
				}
				by[name][size] = append(by[name][size], n.Name)
			}
		}
	}
	if len(unsized) > 0 {
		b.refuse("%s have GPUs without memory of their own, which a quota of GPU memory cannot count: "+
			"keep those nodes out of the export (--selector)", names(unsized))
	}
	for _, name := range slices.Sorted(maps.Keys(by)) {
		sizes := slices.Sorted(maps.Keys(by[name]))
		b.sizes[name] = sizes[0]
		if len(sizes) == 1 || strings.HasPrefix(name, "mig-") {
			continue
		}
		var have []string
		for _, size := range sizes {
			have = append(have, quantity(size)+" on "+names(by[name][size]))
		}
		todo := "give the GPUs of one size the mode shared or mig, so that pods ask for them by size, " +
			"or keep those nodes out of the export (--selector)"
		if kindOf(name).Together() {
			todo = "start all agents with the same --memory-unit"
		}
		b.refuse("%s is of %s, and Kueue counts a name as one size in the whole cluster: %s",
			name, strings.Join(have, " and "), todo)
	}
}

// claims applies the rules for pods that ask through claims. Kueue counts their devices by the
// counters of the GPU, and only replicas by name.
func (b *book) claims(nodes []Node) {
	var plugin, shared []string
	modes := map[string][]string{}
	for i := range nodes {
		for j := range nodes[i].GPUs {
			switch g := &nodes[i].GPUs[j]; {
			case !g.offers():
			case g.API != ledger.DRA:
				plugin = append(plugin, nodes[i].Name)
			case g.Kind.Together() && g.N > 0:
				shared = append(shared, nodes[i].Name)
			default:
				modes[string(g.Mode)] = append(modes[string(g.Mode)], nodes[i].Name)
			}
		}
	}
	if len(plugin) > 0 {
		b.refuse("--dra claims: %s have GPUs with api device-plugin, to which Kueue could admit a claim, "+
			"since it counts claims as memory and nothing else: give all GPUs api dra, or export with --dra names",
			names(plugin))
	}
	if len(shared) > 0 {
		b.refuse("--dra claims: %s offer memory by claims, and Kueue 0.19 cannot count that (a capacity) together "+
			"with whole GPUs and MIG (counters): export with --dra names, where those are asked for by name",
			names(shared))
	}
	if len(modes) > 1 {
		var have []string
		for _, mode := range slices.Sorted(maps.Keys(modes)) {
			have = append(have, mode+" on "+names(modes[mode]))
		}
		b.refuse("--dra claims: GPUs have the modes %s, and Kueue could admit a claim to nodes that do not offer it, "+
			"since it counts claims as memory and nothing else: export nodes of one mode, with --selector, "+
			"or export with --dra names", strings.Join(have, " and "))
	}
	for _, name := range slices.Sorted(maps.Keys(b.sizes)) {
		if k := kindOf(name); !k.Shared() || k.Together() {
			b.classes = append(b.classes, name)
			delete(b.sizes, name)
		}
	}
	if len(b.classes) > maxClasses {
		b.refuse("--dra claims: Kueue 0.19 counts %d DeviceClasses as one resource at most, "+
			"and these GPUs have %d (%s): name fewer in profiles of the partition "+
			"and keep other cards out of the export, or export with --dra names",
			maxClasses, len(b.classes), strings.Join(b.classes, ", "))
	}
}

// group makes flavors of nodes with the same labels.
func (b *book) group(k *Kueue, nodes []Node) {
	keys := []string{k.siteLabel(), k.Domain + "/gpu.model", k.Domain + "/gpu.mode"}
	lacks := map[string][]string{}
	by := map[[3]string]*flavor{}
	spot := map[[3]string]*flavor{}
	for i := range nodes {
		n := &nodes[i]
		if !slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.offers() }) {
			continue // switched off, or without a layout yet
		}
		var of [3]string
		complete := true
		for i, key := range keys {
			if of[i] = n.Labels[key]; of[i] == "" {
				lacks[key], complete = append(lacks[key], n.Name), false
			}
		}
		if !complete {
			continue
		}
		f := by[of]
		if f == nil {
			f = &flavor{name: flavorName(of[:]...), site: of[0], model: of[1], mode: of[2], counts: map[string]int{}}
			by[of] = f
		}
		f.nodes = append(f.nodes, n.Name)
		for j := range n.GPUs {
			b.add(f, n, &n.GPUs[j])
		}
		if !slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.Spot && g.offers() }) {
			continue
		}
		// What a cloud's nodes offer to spot pods is paid for like the rest, and counts for the same limit.
		second := f
		if !slices.ContainsFunc(k.Clouds, func(c Cloud) bool { return c.Site == f.site }) {
			if second = spot[of]; second == nil {
				second = &flavor{name: f.name + "-spot", site: f.site, model: f.model, mode: f.mode, spot: true,
					counts: map[string]int{}}
				spot[of] = second
			}
			second.nodes = append(second.nodes, n.Name)
		}
		for j := range n.GPUs {
			b.addSpot(second, n, &n.GPUs[j])
		}
	}
	if some := lacks[keys[0]]; len(some) > 0 {
		b.refuse("%s have no label %s, which says where they are: kubectl label node NODE %[2]s=on-prem",
			names(some), keys[0])
	}
	for _, key := range keys[1:] {
		if some := lacks[key]; len(some) > 0 {
			b.refuse("%s have no label %s: the agent writes it unless it runs with --node-labels none",
				names(some), key)
		}
	}
	for _, of := range []map[[3]string]*flavor{by, spot} {
		var tier []flavor
		for _, f := range of {
			tier = append(tier, *f)
		}
		slices.SortFunc(tier, func(a, b flavor) int {
			return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.model, b.model), cmp.Compare(a.site, b.site))
		})
		b.flavors = append(b.flavors, tier...)
	}
}

// add adds a GPU to a flavor.
func (b *book) add(f *flavor, n *Node, g *GPU) {
	if !g.offers() {
		return
	}
	f.memory += g.memory(n.Unit)
	for name, p := range g.resources() {
		f.counts[name] += p.Most
	}
	if g.API == ledger.DRA {
		b.shares = b.shares || g.Kind.Together() && g.N > 0
		b.noTopology = "a topology has what nodes have allocatable, and GPUs with api dra are not in there"
	}
}

// addSpot adds what a GPU offers to spot pods to a flavor.
func (b *book) addSpot(f *flavor, n *Node, g *GPU) {
	if !g.offers() {
		return
	}
	if f.spot {
		f.memory += g.spotMemory(n.Unit)
	}
	for name, p := range g.spot() {
		f.counts[name] += p.Most
	}
}

// limit applies the limits of the clouds.
func (b *book) limit(clouds []Cloud) {
	given := map[string]bool{}
	var inCloud []flavor
	for _, c := range clouds {
		var at []int
		for i, f := range b.flavors {
			if f.site == c.Site && (c.Model == "" || c.Model == f.model && c.Mode == f.mode) {
				at = append(at, i)
			}
		}
		f := flavor{name: flavorName(c.Site, c.Model, c.Mode), site: c.Site, model: c.Model, mode: c.Mode}
		switch len(at) {
		case 0:
			b.noTopology = cmp.Or(b.noTopology, fmt.Sprintf(
				"%s has no node yet, and a topology has only existing nodes", f.name))
		case 1:
			f = b.flavors[at[0]]
		default:
			var each []string
			for _, i := range at {
				each = append(each, fmt.Sprintf("--cloud %s/%s/%s=LIMIT",
					c.Site, b.flavors[i].model, b.flavors[i].mode))
			}
			b.refuse("site %s has nodes of %d kinds, and Kueue limits each by itself: %s",
				c.Site, len(at), strings.Join(each, " "))
			continue
		}
		if given[f.name] {
			b.refuse("%s has two limits", f.name)
			continue
		}
		given[f.name] = true
		f.cloud, f.memory = true, c.Limit
		offered := f.counts
		f.counts = map[string]int{}
		for name, size := range b.sizes {
			_, spot := piece.OfSpot(name) // whether nodes to come offer it is their partition's to say
			if offered[name] > 0 || f.nodes == nil && !spot && may(f.mode, name) {
				f.counts[name] = int(c.Limit / max(size, 1))
			}
		}
		inCloud = append(inCloud, f)
	}
	b.flavors = slices.DeleteFunc(b.flavors, func(f flavor) bool { return given[f.name] })
	for _, f := range b.flavors {
		if len(b.errs) == 0 && slices.ContainsFunc(clouds, func(c Cloud) bool { return c.Site == f.site }) {
			b.refuse("site %s has nodes of model %s and mode %s, too: limit them with --cloud %[1]s/%[2]s/%[3]s=LIMIT",
				f.site, f.model, f.mode)
		}
	}
	b.flavors = append(b.flavors, inCloud...)
}

// may reports whether nodes of a mode could offer a resource. Nodes with no mode or another one
// could offer anything.
func may(mode, name string) bool {
	switch config.Mode(mode) {
	case config.Whole, config.Shared:
		return kindOf(name).Mode() == mode
	case config.MIG:
		return strings.HasPrefix(name, "mig-")
	case config.Keep, config.Off, config.Dynamic:
	}
	return true
}

// check checks the limits of Kueue and the arguments.
func (b *book) check(k *Kueue) {
	b.covered = slices.Sorted(maps.Keys(b.sizes))
	if !k.Claims {
		for _, k := range piece.Kinds() {
			if name := k.Short(); name != "" && !slices.Contains(b.covered, name) {
				b.covered = append(b.covered, name) // with quota 0, since Kueue counts only covered resources
			}
		}
		slices.Sort(b.covered)
	}
	seen := map[string]bool{}
	for _, f := range b.flavors {
		if seen[f.name] {
			b.refuse("two kinds of nodes would both be called %s: change the label %s of one", f.name, k.siteLabel())
		}
		seen[f.name] = true
	}
	if len(b.flavors) == 0 && len(b.errs) == 0 {
		b.refuse("no node offers a GPU: does the agent run there, and is a partition in force?")
	}
	if n := len(b.flavors); n > maxFlavors {
		b.refuse("%d kinds of nodes (%s and others) are more than the %d flavors that Kueue tries for a job at a "+
			"time: lay nodes of a model out alike, or export a part of them with --selector",
			n, b.flavors[0].name, maxFlavors)
	}
	if n := len(b.covered) + 1; n > maxResources {
		b.refuse("%d resources are more than the %d that Kueue counts in a group: "+
			"export cards of fewer kinds, with --selector", n, maxResources)
	}
	if len(k.Teams) == 0 {
		b.refuse("no team is named: each gets a ClusterQueue")
	}
	teams := map[string]bool{}
	for _, t := range k.Teams {
		if teams[t.Name] || t.Name != flavorName(t.Name) || t.Share < 1 {
			b.refuse("team %q with share %d: a name is the team's namespace, named once, and a share is at least 1",
				t.Name, t.Share)
		}
		teams[t.Name] = true
	}
	if k.Patience < 0 || k.Patience > 0 && !k.Checks {
		b.refuse("jobs are to wait for %s, and the placer is not asked: say --checks, since Kueue by itself waits for "+
			"quota and not for room; the time is 0 or more", k.Patience)
	}
	if slices.ContainsFunc(k.Teams, func(t Team) bool { return t.Urgent }) {
		if !k.Checks {
			b.refuse("a team's jobs may be urgent, and the placer is not asked: say --checks, " +
				"since Kueue by itself ends jobs even if that makes no room")
		}
		if teams[urgent] {
			b.refuse("a team has the name %s, which is that of the queue of urgent jobs: give it another", urgent)
		}
		if !slices.ContainsFunc(b.flavors, func(f flavor) bool { return !f.cloud }) {
			b.refuse("a team's jobs may be urgent, and no node is on-prem, where they would take the room of others")
		}
	}
	if !slices.ContainsFunc(k.Teams, func(t Team) bool { return !t.OnPrem }) && len(k.Clouds) > 0 && len(k.Teams) > 0 {
		b.refuse("all teams stay on-prem, and the cloud has a limit that no team can use: " +
			"let one go there, or say --cloud none")
	}
}

// flavorName makes a name from the values of labels: "on-prem-a100-sxm4-80gb-mig".
func flavorName(values ...string) string {
	var words []string
	for _, v := range values {
		words = append(words, strings.FieldsFunc(strings.ToLower(strings.TrimPrefix(v, "NVIDIA-")), func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < '0' || r > '9')
		})...)
	}
	return strings.Join(words, "-")
}

// split divides a quota by shares, in whole steps. What is left over goes to the first teams with a
// share, one step each.
func split[N ~int | ~uint64](total, step N, shares []int) []N {
	sum := 0
	for _, s := range shares {
		sum += s
	}
	out := make([]N, len(shares))
	left := total / step
	for i, s := range shares {
		out[i] = total / step * N(s) / N(sum)
		left -= out[i]
	}
	for i, s := range shares {
		if left > 0 && s > 0 {
			out[i], left = out[i]+1, left-1
		}
		out[i] *= step
	}
	return out
}
