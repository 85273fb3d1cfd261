// SPDX-License-Identifier: Apache-2.0

package gpunode_test

import (
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
)

// TestWhatIsFreeAgainIsNews: only the object says it, so a scheduler would not know of the room for a minute, if the
// largest request stayed the same.
func TestWhatIsFreeAgainIsNews(t *testing.T) {
	set := func(text string) (out piece.Set) {
		if text != "" {
			if err := out.UnmarshalText([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	units := func(first, second string) *gpunode.Status {
		s := &gpunode.Status{HoldersIn: gpunode.InPods, GPUs: []gpunode.GPU{
			{UUID: "a", API: "device-plugin", Kind: piece.KindUnits, Resource: "example.com/gpu-mem", Total: 79, Used: set(first)},
			{UUID: "b", API: "device-plugin", Kind: piece.KindUnits, Resource: "example.com/gpu-mem", Total: 79, Used: set(second)},
		}}
		s.Sum()
		return s
	}
	instances := func(used ...string) *gpunode.Status {
		return &gpunode.Status{HoldersIn: gpunode.InPods, GPUs: []gpunode.GPU{{UUID: "a", MIG: &gpunode.MIG{Used: used}}}}
	}
	through := func(guarantee string) *gpunode.Status {
		s := units("0-9", "")
		s.GPUs[0].Compute, s.GPUs[0].ComputeGuarantee = gpunode.Through, guarantee
		return s
	}
	spot := func(used string, total int) *gpunode.Status {
		s := units("0-9", "")
		s.GPUs[0].Spot = &gpunode.Spot{Resource: "example.com/gpu-mem.spot", Total: total, Used: set(used), Free: total - set(used).Len()}
		s.Sum()
		return s
	}
	yields := func(used, yielding string) *gpunode.Status {
		s := spot(used, 79)
		s.GPUs[0].Spot.Yielding = set(yielding)
		return s
	}
	placed := func(used, yielding []string) *gpunode.Status {
		return &gpunode.Status{GPUs: []gpunode.GPU{{UUID: "a", Spot: &gpunode.Spot{UsedPlacements: used, YieldingPlacements: yielding}}}}
	}
	mixed := func(namespaces int) *gpunode.Status {
		s := through("none")
		s.GPUs[0].Namespaces = namespaces
		return s
	}
	for name, c := range map[string]struct {
		before, now *gpunode.Status
		want        gpunode.Change
	}{
		"the same":                  {units("0-9", ""), units("0-9", ""), gpunode.Same},
		"more is held":              {units("0-9", ""), units("0-19", ""), gpunode.Occupancy},
		"a whole GPU is free again": {units("", "0-78"), units("", ""), gpunode.News},
		"some of one GPU is":        {units("", "0-19"), units("", "0-9"), gpunode.News},
		"some others are held":      {units("", "0-9"), units("", "10-19"), gpunode.News},
		"an instance more":          {instances("1g.10gb@0"), instances("1g.10gb@0", "1g.10gb@1"), gpunode.Occupancy},
		"its first process comes":   {through("none"), through("ceiling"), gpunode.Occupancy},
		"its daemon dies":           {through("ceiling"), through("none"), gpunode.Occupancy},
		"through MPS from now on":   {units("0-9", ""), through(""), gpunode.News},
		"a spot pod more":           {spot("", 79), spot("20-29", 79), gpunode.Occupancy},
		"a spot pod less":           {spot("20-29", 79), spot("", 79), gpunode.News},
		"spot pods may have less":   {spot("", 79), spot("", 40), gpunode.News},
		"spot pods may have some":   {units("0-9", ""), spot("", 79), gpunode.News},
		"a spot pod yields":         {yields("20-29", ""), yields("", "20-29"), gpunode.News},
		"it has its room again":     {yields("", "20-29"), yields("20-29", ""), gpunode.Occupancy},
		"it has gone":               {yields("", "20-29"), yields("", ""), gpunode.News},
		"another one yields, too":   {yields("", "20-29"), yields("", "10-29"), gpunode.Occupancy},
		"an instance's pod is back": {placed(nil, []string{"1g.10gb@0"}), placed([]string{"1g.10gb@0"}, nil), gpunode.Occupancy},
		"an instance's pod is gone": {placed(nil, []string{"1g.10gb@0"}), placed(nil, nil), gpunode.News},
		"another namespace comes":   {mixed(1), mixed(2), gpunode.Occupancy},
		"an instance less":          {instances("1g.10gb@0", "1g.10gb@1"), instances("1g.10gb@1"), gpunode.News},
	} {
		if got := c.now.Since(c.before, time.Now()); got != c.want {
			t.Errorf("%s: it is %v, want %v", name, got, c.want)
		}
	}
}
