// SPDX-License-Identifier: Apache-2.0

package export

import (
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

var update = flag.Bool("update", false, "write the golden files anew")

const domain = "example.com"

const partitions = `version: v1
partitions:
  whole: [{devices: all, mode: whole}]
  shared: [{devices: all, mode: shared}]
  replicas: [{devices: all, mode: shared, replicas: 4}]
  mig: [{devices: all, mode: mig}]
  fixed: [{devices: all, mode: mig, geometry: {3g.40gb: 1, 1g.10gb: 3}}]
  halves: [{devices: all, mode: mig, profiles: [3g.40gb]}]
  mixed: [{devices: [0, 1], mode: shared}, {devices: [2], mode: "off"}, {devices: [3, 4, 5, 6, 7], mode: whole}]
  whole-dra: [{devices: all, mode: whole, api: dra}]
  mig-dra: [{devices: all, mode: mig, api: dra}]
  shared-dra: [{devices: all, mode: shared, api: dra}]
  dynamic: [{devices: all, mode: dynamic, api: dra}]
  gone: [{devices: all, mode: "off"}]
  spot: [{devices: [0, 1, 2, 3], mode: shared, spot: {most: 40}}, {devices: [4, 5, 6, 7], mode: shared}]
  mig-spot: [{devices: all, mode: mig, profiles: [3g.40gb], spot: true}]
`

// recorded is a node with the GPUs of a recorded inventory in a partition, and labels "a=b"
// below the domain but for those with a slash.
func recorded(t *testing.T, name, inventory, partition string, labels ...string) Node {
	t.Helper()
	file, err := config.Parse("partitions.yaml", []byte(partitions))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../tests/testdata/inventories/" + inventory + ".json")
	if err != nil {
		t.Fatal(err)
	}
	inv, err := config.ReadInventory(text)
	if err != nil {
		t.Fatal(err)
	}
	want, err := file.Desire(partition, inv, config.Node{Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	more := map[string]string{}
	for _, l := range labels {
		key, value, _ := strings.Cut(l, "=")
		if !strings.Contains(key, "/") {
			key = domain + "/" + key
		}
		more[key] = value
	}
	n, err := FromInventory(name, domain, inv, want, 1024, more)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

const onPrem, cloud = "gpu.site=on-prem", "gpu.site=cloud"

func quotas(nodes ...Node) *Kueue {
	return &Kueue{Domain: domain, ResourceDomain: domain, Nodes: nodes, Teams: []Team{{Name: "research", Share: 1}}, Topology: true}
}

// TestGolden compares whole exports with what they were, whatever the order of the nodes.
func TestGolden(t *testing.T) {
	two := quotas(recorded(t, "a-1", "a100-80gb", "mig", onPrem), recorded(t, "a-2", "a100-80gb", "mig", onPrem), recorded(t, "a-3", "a100-80gb", "shared", onPrem),
		recorded(t, "c-1", "h100-80gb", "fixed", cloud))
	two.Clouds = []Cloud{{Site: "cloud", Limit: 320 * 1024}}
	two.Teams = []Team{{Name: "research", Share: 2}, {Name: "web", Share: 1}, {Name: "records", Share: 1, OnPrem: true}}
	checked := *two
	checked.Checks, checked.Patience, checked.Teams = true, 2*time.Minute, slices.Clone(two.Teams)
	checked.Teams[0].Urgent, checked.Teams[2].Urgent = true, true
	zero := quotas(recorded(t, "a-1", "a100-80gb", "mixed", onPrem))
	zero.Clouds = []Cloud{{Site: "cloud", Model: "NVIDIA-A100-SXM4-80GB", Mode: "whole", Limit: 640 * 1024}}
	tiers := quotas(recorded(t, "a-1", "a100-80gb", "spot", onPrem), recorded(t, "a-2", "a100-80gb", "mig-spot", onPrem), recorded(t, "a-3", "a100-80gb", "shared", onPrem),
		recorded(t, "c-1", "h100-80gb", "mig-spot", cloud))
	tiers.Clouds = []Cloud{{Site: "cloud", Limit: 320 * 1024}, {Site: "cloud-2", Model: "NVIDIA-A100-SXM4-80GB", Mode: "shared", Limit: 160 * 1024}}
	tiers.Teams = []Team{{Name: "research", Share: 2, Urgent: true}, {Name: "web", Share: 1, OnPrem: true}}
	tiers.Checks = true
	names := quotas(recorded(t, "d-1", "a100-80gb", "mig-dra", onPrem), recorded(t, "d-2", "a100-80gb", "shared-dra", onPrem), recorded(t, "d-3", "h100-80gb", "dynamic", onPrem))
	claims := quotas(recorded(t, "d-1", "a100-80gb", "mig-dra", onPrem), recorded(t, "d-2", "a100-80gb", "mig-dra", onPrem))
	claims.Claims = true
	const instance = InstanceType + "=p4de.24xlarge"
	scaler := &Autoscaler{Domain: domain, ResourceDomain: "res." + domain, NodePool: "gpus", Nodes: []Node{
		recorded(t, "c-1", "a100-80gb", "mixed", cloud, instance, "gpu.partition=mixed"), recorded(t, "c-2", "a100-80gb", "mixed", cloud, instance, "gpu.partition=mixed"),
		recorded(t, "c-3", "h100-80gb", "mig", cloud, InstanceType+"=p5.48xlarge"), recorded(t, "a-1", "a100-80gb", "whole", onPrem)}}
	one := &Autoscaler{Domain: domain, ResourceDomain: domain, Nodes: []Node{recorded(t, "c-1", "a100-80gb", "shared", cloud, InstanceType+"=Standard_ND96amsr_A100_v4")}}
	for name, c := range map[string]struct {
		nodes []Node
		text  func() ([]byte, error)
	}{
		"kueue":                      {two.Nodes, two.Objects},
		"kueue-configuration":        {two.Nodes, two.Configuration},
		"kueue-checks":               {checked.Nodes, checked.Objects},
		"kueue-checks-configuration": {checked.Nodes, checked.Configuration},
		"kueue-zero":                 {zero.Nodes, zero.Objects},
		"kueue-spot":                 {tiers.Nodes, tiers.Objects},
		"kueue-spot-configuration":   {tiers.Nodes, tiers.Configuration},
		"kueue-dra":                  {names.Nodes, names.Objects},
		"kueue-dra-configuration":    {names.Nodes, names.Configuration},
		"claims-configuration":       {claims.Nodes, claims.Configuration},
		"claims":                     {claims.Nodes, claims.Objects},
		"karpenter":                  {scaler.Nodes, scaler.Karpenter},
		"aws":                        {scaler.Nodes, func() ([]byte, error) { return scaler.ClusterAutoscaler(AWS) }},
		"azure":                      {one.Nodes, func() ([]byte, error) { return one.ClusterAutoscaler(Azure) }},
		"cluster-api":                {one.Nodes, func() ([]byte, error) { return one.ClusterAutoscaler(ClusterAPI) }},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := c.text()
			if err != nil {
				t.Fatal(err)
			}
			for range 5 {
				rand.Shuffle(len(c.nodes), func(i, j int) { c.nodes[i], c.nodes[j] = c.nodes[j], c.nodes[i] })
				if again, err := c.text(); err != nil || string(again) != string(got) {
					t.Fatalf("in another order: %v\n%s", err, cmp.Diff(string(got), string(again)))
				}
			}
			path := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil { //nolint:gosec // it is part of the source
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s, -want +got (-update writes it anew):\n%s", path, diff)
			}
		})
	}
}

// TestRefused has what cannot be said. Each reason says what to do.
func TestRefused(t *testing.T) {
	a := func(partition string) Node { return recorded(t, "a-1", "a100-80gb", partition, onPrem) }
	unlabelled := a("mig")
	unlabelled.Labels = nil
	other := a("shared")
	other.Name, other.Unit = "a-2", 512
	many := quotas()
	for i := range 17 {
		n := a("mig")
		n.Labels[domain+"/gpu.site"] = "site-" + string(rune('a'+i))
		many.Nodes = append(many.Nodes, n)
	}
	crowded := a("mig")
	for i := range 60 {
		crowded.GPUs[0].Profiles = append(crowded.GPUs[0].Profiles, Profile{Name: mig.Name{Slices: 1, GB: 100 + i}, Slices: 1, Most: 1, Devices: 1})
	}
	twins := a("mig")
	twins.Labels[domain+"/gpu.site"] = "on.prem"
	unified := a("whole")
	unified.GPUs = slices.Clone(unified.GPUs)
	unified.GPUs[0].Memory = 0
	dra := func(k *Kueue) { k.Claims = true }
	at := func(clouds ...Cloud) func(*Kueue) { return func(k *Kueue) { k.Clouds = clouds } }
	elsewhere := []Node{recorded(t, "c-1", "h100-80gb", "mig", cloud), recorded(t, "c-2", "h100-80gb", "shared", cloud)}
	for name, c := range map[string]struct {
		k      *Kueue
		change func(*Kueue)
		want   []string // nothing: it is no mistake
	}{
		"one node":                {quotas(a("mig")), nil, nil},
		"A100 and H100 of 80 GB":  {quotas(a("whole"), recorded(t, "h-1", "h100-80gb", "whole", onPrem)), nil, nil},
		"whole GPUs of two sizes": {quotas(a("whole"), recorded(t, "a-2", "a100-40gb", "whole", onPrem)), nil, []string{"gpu is of 40Gi on a-2 and 80Gi on a-1", "mode shared or mig"}},
		"two sizes at two sites":  {quotas(a("whole"), recorded(t, "c-1", "a100-40gb", "whole", cloud)), at(Cloud{Site: "cloud", Limit: 1024}), []string{"gpu is of 40Gi on c-1"}},
		"replicas of two sizes":   {quotas(a("replicas"), recorded(t, "a-2", "a100-40gb", "replicas", onPrem)), nil, []string{"gpu.shared is of 10Gi on a-2 and 20Gi on a-1"}},
		"units of two sizes":      {quotas(a("shared"), other), nil, []string{"gpu-mem is of 512Mi on a-2 and 1Gi on a-1", "--memory-unit"}},
		"17 flavors":              {many, nil, []string{"17 kinds of nodes", "the 16 flavors", "--selector"}},
		"memory of the machine's": {quotas(unified), nil, []string{"a-1 have GPUs without memory of their own", "--selector"}},
		"65 resources":            {quotas(crowded), nil, []string{"more than the 64"}},
		"two flavors of a name":   {quotas(a("mig"), twins), nil, []string{"would both be called on-prem-a100-sxm4-80gb-mig", "gpu.site"}},
		"no labels":               {quotas(unlabelled), nil, []string{"no label example.com/gpu.site", "kubectl label node", "no label example.com/gpu.model"}},
		"no nodes":                {quotas(), nil, []string{"no node offers a GPU"}},
		"all off":                 {quotas(a("gone")), nil, []string{"no node offers a GPU"}},
		"all somebody else's":     {quotas(taken(a("whole"))), nil, []string{"no node offers a GPU"}},
		"a cloud of two kinds":    {quotas(elsewhere...), at(Cloud{Site: "cloud", Limit: 1024}), []string{"--cloud cloud/NVIDIA-H100-80GB-HBM3/mig=LIMIT", "--cloud cloud/NVIDIA-H100-80GB-HBM3/shared=LIMIT"}},
		"half of a cloud":         {quotas(elsewhere...), at(Cloud{"cloud", "NVIDIA-H100-80GB-HBM3", "mig", 1024}), []string{"--cloud cloud/NVIDIA-H100-80GB-HBM3/shared=LIMIT"}},
		"both halves":             {quotas(elsewhere...), at(Cloud{"cloud", "NVIDIA-H100-80GB-HBM3", "mig", 1024}, Cloud{"cloud", "NVIDIA-H100-80GB-HBM3", "shared", 1024}), nil},
		"one limit twice":         {quotas(a("mig")), at(Cloud{Site: "cloud", Limit: 1}, Cloud{Site: "cloud", Limit: 2}), []string{"two limits"}},
		"no team":                 {quotas(a("mig")), func(k *Kueue) { k.Teams = nil }, []string{"no team"}},
		"a team twice":            {quotas(a("mig")), func(k *Kueue) { k.Teams = append(k.Teams, k.Teams[0]) }, []string{`team "research"`}},
		"no share":                {quotas(a("mig")), func(k *Kueue) { k.Teams[0].Share = 0 }, []string{"share 0"}},
		"no namespace's name":     {quotas(a("mig")), func(k *Kueue) { k.Teams[0].Name = "Research!" }, []string{`team "Research!"`}},
		"a cloud for nobody": {quotas(a("mig")), func(k *Kueue) { k.Teams[0].OnPrem = true; k.Clouds = []Cloud{{Site: "cloud", Limit: 1}} },
			[]string{"all teams stay on-prem"}},
		"patience without the placer": {quotas(a("mig")), func(k *Kueue) { k.Patience = time.Minute }, []string{"wait for 1m0s", "--checks"}},
		"patience below zero":         {quotas(a("mig")), func(k *Kueue) { k.Checks, k.Patience = true, -time.Minute }, []string{"0 or more"}},
		"urgent without the placer":   {quotas(a("mig")), func(k *Kueue) { k.Teams[0].Urgent = true }, []string{"--checks"}},
		"urgent in a cloud": {quotas(elsewhere[0]), func(k *Kueue) {
			k.Teams[0].Urgent, k.Checks, k.Clouds = true, true, []Cloud{{Site: "cloud", Limit: 1024}}
		}, []string{"no node is on-prem"}},
		"a team called like the queue": {quotas(a("mig")), func(k *Kueue) {
			k.Checks, k.Teams = true, []Team{{Name: "gpus-urgent", Share: 1, Urgent: true}}
		}, []string{"give it another"}},
		"claims of the plugin's":         {quotas(a("mig")), dra, []string{"a-1 have GPUs with api device-plugin"}},
		"claims of shares":               {quotas(a("shared-dra")), dra, []string{"capacity", "--dra names"}},
		"claims of anything":             {quotas(a("dynamic")), dra, []string{"counters", "--dra names"}},
		"claims of two modes":            {quotas(a("mig-dra"), recorded(t, "a-2", "a100-80gb", "whole-dra", onPrem)), dra, []string{"modes mig on a-1 and whole on a-2", "--dra names"}},
		"claims of two sizes":            {quotas(a("whole-dra"), recorded(t, "h-1", "h100-80gb", "whole-dra", onPrem)), dra, []string{"gpu is of 81559Mi on h-1 and 80Gi on a-1"}},
		"claims of more than 8 profiles": {quotas(a("mig-dra"), recorded(t, "a-2", "a100-40gb", "mig-dra", onPrem)), dra, []string{"8 DeviceClasses", "profiles"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.change != nil {
				c.change(c.k)
			}
			text, err := c.k.Objects()
			_, second := c.k.Configuration()
			if (err == nil) != (c.want == nil) || (text == nil) != (err != nil) || (err == nil) != (second == nil) {
				t.Fatalf("%v, and of the configuration %v; want %q\n%s", err, second, c.want, text)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the reason lacks %q: %v", want, err)
				}
			}
		})
	}
}

func TestRefusedOfAutoscalers(t *testing.T) {
	const p4, p5 = InstanceType + "=p4", InstanceType + "=p5"
	odd := recorded(t, "c-1", "a100-80gb", "shared", p4)
	for name, c := range map[string]struct {
		nodes []Node
		form  Form
		want  string
	}{
		"unlike nodes of a type": {[]Node{odd, recorded(t, "c-2", "a100-80gb", "mig", p4)}, AWS, "c-1 and c-2 are both p4"},
		"unlike labels":          {[]Node{odd, recorded(t, "c-2", "a100-80gb", "shared", p4, cloud)}, AWS, "--selector"},
		"no type":                {[]Node{recorded(t, "a-1", "a100-80gb", "mig", onPrem)}, AWS, "TYPE=FILE"},
		"through DRA":            {[]Node{recorded(t, "c-1", "a100-80gb", "mig-dra", p4)}, Azure, "api device-plugin"},
		"nothing":                {[]Node{recorded(t, "c-1", "a100-80gb", "gone", p4)}, AWS, "offers nothing"},
		"two resources":          {[]Node{recorded(t, "c-1", "a100-80gb", "mixed", p4), recorded(t, "c-2", "a100-80gb", "shared", p5)}, ClusterAPI, "p4: Cluster API's annotations name one"},
	} {
		t.Run(name, func(t *testing.T) {
			a := Autoscaler{Domain: domain, ResourceDomain: domain, Nodes: c.nodes}
			text, err := a.ClusterAutoscaler(c.form)
			if err == nil || text != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v\n%s", err, text)
			}
			if _, err := a.Karpenter(); (err == nil) != (c.form == ClusterAPI) {
				t.Errorf("to Karpenter: %v", err)
			}
		})
	}
	under := Autoscaler{Domain: domain, ResourceDomain: domain, Nodes: []Node{odd}}
	under.ResourceDomain = "a_b"
	if _, err := under.ClusterAutoscaler(Azure); err == nil || !strings.Contains(err.Error(), `"_" as "/"`) {
		t.Errorf("an underscore in a resource for Azure: %v", err)
	}
}

// taken is a node whose GPUs have a mode and offer nothing, since another program gives them out.
func taken(n Node) Node {
	n.GPUs = slices.Clone(n.GPUs)
	for i := range n.GPUs {
		n.GPUs[i].N, n.GPUs[i].API = 0, ""
	}
	return n
}

// A GPU that has a mode and offers nothing adds no memory to a quota.
func TestGPUsThatOfferNothingDoNotCount(t *testing.T) {
	some := recorded(t, "a-1", "a100-80gb", "whole", onPrem)
	half := taken(some)
	copy(half.GPUs[:4], some.GPUs[:4])
	text, err := (&Kueue{Domain: domain, ResourceDomain: domain, Nodes: []Node{half}, Teams: []Team{{Name: "a", Share: 1}}}).Objects()
	if err != nil || !strings.Contains(string(text), "gpu-memory, nominalQuota: 320Gi}") {
		t.Errorf("%v\n%s", err, text)
	}
	if _, err := (&Autoscaler{Domain: domain, ResourceDomain: domain}).Karpenter(); err == nil || !strings.Contains(err.Error(), "no node has a GPUNode") {
		t.Errorf("of no nodes: %v", err)
	}
}

// TestBothSourcesAgree has a node's GPUNode and its inventory: what the cluster says and what
// was recorded export alike.
func TestBothSourcesAgree(t *testing.T) {
	for _, partition := range []string{"whole", "shared", "replicas", "mig", "fixed", "halves", "mixed", "spot", "mig-spot", "mig-dra", "dynamic", "gone"} {
		t.Run(partition, func(t *testing.T) {
			want := recorded(t, "a-1", "a100-80gb", partition, onPrem)
			text, err := os.ReadFile("../../tests/testdata/inventories/a100-80gb.json")
			if err != nil {
				t.Fatal(err)
			}
			inv, err := config.ReadInventory(text)
			if err != nil {
				t.Fatal(err)
			}
			card := gpunode.CardOf(&inv.GPUs[0])
			status := &gpunode.Status{MemoryUnitMiB: 1024, Cards: []gpunode.Card{*card}}
			for _, g := range want.GPUs {
				status.GPUs = append(status.GPUs, says(t, card, g))
			}
			if diff := cmp.Diff(want, FromStatus("a-1", want.Labels, status), cmp.AllowUnexported(GPU{})); diff != "" {
				t.Errorf("-inventory +GPUNode:\n%s", diff)
			}
		})
	}
}

// says is what an agent writes of a GPU.
func says(t *testing.T, card *gpunode.Card, g GPU) gpunode.GPU {
	t.Helper()
	out := gpunode.GPU{Index: g.Index, Model: g.Model, MemoryMiB: int(g.Memory), Mode: string(g.Mode), API: string(g.API)}
	if out.Kind, out.Total = g.Kind, g.N; g.Mode == config.Dynamic {
		out.Kind = piece.KindPlacement
	}
	if g.Spot {
		out.Spot = &gpunode.Spot{Total: g.N}
		if g.SpotMost > 0 {
			out.Spot.Total = g.SpotMost
		}
	}
	if g.Profiles == nil {
		return out
	}
	rules, err := card.Read()
	if err != nil {
		t.Fatal(err)
	}
	out.Kind, out.MIG = piece.KindPlacement, &gpunode.MIG{Card: card.Name}
	for _, p := range g.Profiles {
		if p.Devices == 0 {
			continue
		}
		out.MIG.OnDemand = out.MIG.OnDemand || p.Devices != p.Most
		o := gpunode.Offer{Profile: p.Name.String()}
		for _, at := range rules.Placements() {
			if at.Profile == p.Name && len(o.Placements) < p.Devices {
				o.Placements = append(o.Placements, strings.TrimPrefix(at.String(), p.Name.String()+"@"))
			}
		}
		out.MIG.Offers = append(out.MIG.Offers, o)
	}
	return out
}

// TestSizes has what things count as, and that a full GPU never counts as more than itself.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		inventory, partition, name string
		want                       gpu.MiB
	}{
		{"a100-80gb", "whole", "gpu", 80 * 1024},
		{"h100-80gb", "whole", "gpu", 80 * 1024},
		{"a100-80gb", "shared", "gpu-mem", 1024},
		{"a100-80gb", "replicas", "gpu.shared", 20 * 1024},
		{"a100-80gb", "mig", "mig-3g.40gb", 40 * 1024},
		{"a100-80gb", "mig", "mig-1g.20gb", 20 * 1024},
		{"a30-24gb", "mig", "mig-2g.12gb", 12 * 1024},
		{"h200-141gb", "mig", "mig-3g.71gb", 141 * 512},
		{"rtx-pro-6000-96gb", "mig", "mig-1g.24gb", 24 * 1024},
	} {
		n := recorded(t, "n", c.inventory, c.partition, onPrem)
		g := &n.GPUs[0]
		if got := g.size(c.name, g.resources()[c.name], n.Unit); got != c.want {
			t.Errorf("%s, %s: one %s counts as %d MiB, want %d", c.inventory, c.partition, c.name, got, c.want)
		}
		for name, p := range g.resources() {
			if all := g.size(name, p, n.Unit) * gpu.MiB(p.Most); all > g.memory(n.Unit) {
				t.Errorf("%s, %s: %d of %s count as %d MiB, and the quota of the GPU is %d", c.inventory, c.partition, p.Most, name, all, g.memory(n.Unit))
			}
		}
	}
	split3 := Profile{Name: mig.Name{Compute: 1, Slices: 3, GB: 40}, Slices: 4}
	if got := (&GPU{Memory: 81920, Slices: 8}).size(split3.Name.Resource(), split3, 1024); got != 40*1024/3 {
		t.Errorf("one of three parts of half a GPU counts as %d MiB", got)
	}
}

func TestSplit(t *testing.T) {
	for _, c := range []struct {
		total, step int
		shares      []int
		want        []int
	}{
		{10, 1, []int{1}, []int{10}},
		{10, 1, []int{1, 1, 1}, []int{4, 3, 3}},
		{2, 1, []int{1, 1, 1}, []int{1, 1, 0}},
		{10 * 1024, 1024, []int{2, 1}, []int{7 * 1024, 3 * 1024}},
		{9, 1, []int{1, 0, 2}, []int{3, 0, 6}},
		{8, 1, []int{0, 1, 2}, []int{0, 3, 5}},
		{0, 1, []int{1, 2}, []int{0, 0}},
	} {
		if got := split(c.total, c.step, c.shares); !slices.Equal(got, c.want) {
			t.Errorf("%d in steps of %d by %v: %v, want %v", c.total, c.step, c.shares, got, c.want)
		}
	}
}

func TestParseCloud(t *testing.T) {
	for text, want := range map[string]Cloud{"cloud": {Site: "cloud", Limit: 7}, "a/b/c": {"a", "b", "c", 7}, "": {}, "a/b": {}, "a//c": {}, "a/b/c/d": {}} {
		got, err := ParseCloud(text, 7)
		if got != want || (err == nil) != (want.Site != "") {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

// TestUnknownPlacements has an inventory of a driver that tells placements only with MIG on.
func TestUnknownPlacements(t *testing.T) {
	inv := &gpu.Inventory{GPUs: []gpu.Device{{UUID: "GPU-1", Model: "M", Memory: 1024, MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{{Name: "1g.10gb"}}}}}}
	want := config.Desired{GPUs: []config.Want{{GPU: "GPU-1", Mode: config.MIG, OnDemand: true}}}
	if _, err := FromInventory("n", domain, inv, want, 1024, nil); err == nil || !strings.Contains(err.Error(), "record the inventory again") {
		t.Error(err)
	}
}
