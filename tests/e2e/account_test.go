// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/lab"
)

// accounted has a GPU for each kind of share.
const accounted = `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: shared}
    - {devices: [2], mode: shared, replicas: 4}
    - {devices: [3], mode: mig}
    - {devices: [4], mode: whole}
    - {devices: [5, 6, 7], mode: off}
`

var accountedOffers = map[string]int{lab.Memory: 2 * units, lab.Replicas: 4, lab.GPU: 1}

// line is a line of the usage journal, by the names that docs/usage.md promises.
type line struct {
	Time                                            time.Time
	Event, Resource, Op, Placement, GPU             string
	Namespace, Pod, UID, Container, Reason, Message string
	Grant                                           uint64
	Count                                           int
	Index                                           *int
	Labels                                          map[string]string
	Pieces                                          []struct {
		GPU   string
		Index int
		Share float64
	}
}

// journal reads the newest segment on the node, in which this test's lines are: a segment is
// full after many tests' worth.
func journal() (all []line, err error) {
	const dir = "/var/lib/gpu-agent/usage"
	names, err := node.ListFiles(dir)
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return filepath.Ext(name) != ".jsonl" })
	if len(names) == 0 {
		return nil, errors.New("there is no segment of the journal")
	}
	text, err := node.ReadFile(filepath.Join(dir, names[len(names)-1]))
	if err != nil {
		return nil, err
	}
	for one := range strings.Lines(string(text)) {
		var l line
		if !strings.HasSuffix(one, "\n") {
			break // it is being written
		}
		if err := json.Unmarshal([]byte(one), &l); err != nil {
			return nil, fmt.Errorf("the journal has the line %q: %w", one, err)
		}
		all = append(all, l)
	}
	return all, nil
}

// audited waits until the journal has a line that is so, of this test's time.
func (b *bench) audited(since time.Time, what string, is func(line) bool) (found line) {
	b.Helper()
	b.must(lab.Await(b.ctx, 30*time.Second, "the journal to have "+what, func(context.Context) error {
		all, err := journal()
		if err != nil {
			return err
		}
		lately := slices.DeleteFunc(all, func(l line) bool { return l.Time.Before(since) })
		i := slices.IndexFunc(lately, is)
		if i < 0 {
			return fmt.Errorf("it has %+v", lately)
		}
		found = lately[i]
		return nil
	}))
	return found
}

// asks is the agent's own word, as JSON.
func asks[T any](b *bench, args ...string) (out T) {
	b.Helper()
	text, err := agent.Command(b.ctx, append([]string{"usage", "-o", "json"}, args...)...)
	b.must(err)
	if err := json.Unmarshal(text, &out); err != nil {
		b.Fatalf("gpu-agent usage %v: %v: %s", args, err, text)
	}
	return out
}

// had is who had something of a GPU.
type had struct {
	Index          int
	Piece          string
	Share          float64
	Namespace, Pod string
	Since, Until   time.Time
}

// The account of pods that hold a share, an instance and a GPU: what is written down of them, and
// what is told of those that use nothing.
func TestAccount(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, accounted, accountedOffers)
	began := time.Now()
	b.redeploy(lab.DeployOptions{Partitions: accounted, Env: map[string]string{"GPU_AGENT_USAGE_LABELS": "team", "GPU_AGENT_IDLE_AFTER": "1s"}})
	b.offers(accountedOffers)
	share := map[string]float64{"quarter": .25, "instance": 1. / 8, "whole": 1, "units": 50. / units}
	on := map[string]int{"quarter": 2, "instance": 3, "whole": 4, "units": 0}
	create := func(name, resource string, n int) *lab.RunningPod {
		return b.create(lab.Pod{Name: name, Labels: map[string]string{"team": "vision"}, Containers: []lab.Container{{Resources: map[string]int{resource: n}}}})
	}
	quarter, parts := create("quarter", lab.Replicas, 1), create("units", lab.Memory, 50)
	pods := []*lab.RunningPod{quarter, parts, create("instance", lab.MIG("1g.10gb"), 1), create("whole", lab.GPU, 1)}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))

	b.sub("who has a GPU", func(b *bench) {
		for name, index := range on {
			b.must(lab.Await(b.ctx, waitLong, "the usage of GPU "+fmt.Sprint(index), func(context.Context) error {
				is := asks[[]had](b, "--at", "0s", "--gpu", fmt.Sprint(index))
				if len(is) != 1 || is[0].Pod != name || is[0].Namespace != lab.PodNamespace || math.Abs(is[0].Share-share[name]) > 1e-9 || is[0].Index != index || !is[0].Until.IsZero() {
					return fmt.Errorf("%+v has GPU %d now, want %s with %v of it", is, index, name, share[name])
				}
				return nil
			}))
		}
		if is := asks[[]had](b, "--at", began.UTC().Format(time.RFC3339), "--gpu", "2"); len(is) != 0 {
			b.Errorf("%+v had GPU 2 before there was a pod", is)
		}
	})
	b.sub("what is written down", func(b *bench) { b.writtenDown(began, quarter) })
	b.sub("who uses nothing", func(b *bench) {
		b.must(lab.Await(b.ctx, 3*time.Minute, "the GPUNode to have idle GPUs", func(ctx context.Context) error { // a sample is due each minute
			is, err := b.gpuNode(ctx)
			if err != nil {
				return err
			}
			idle := map[int]bool{}
			for _, g := range is.Status.GPUs {
				for _, c := range g.Conditions {
					if c.Type == gpunode.Idle && c.Status == gpunode.True && c.Reason == "GrantIdle" {
						idle[g.Index] = true
					}
				}
			}
			if want := map[int]bool{0: true, 1: true, 3: true, 4: true}; !maps.Equal(idle, want) {
				return fmt.Errorf("GPUs %v are idle, want %v", idle, want)
			}
			return nil
		}))
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, "whole", "says that it uses nothing", func(e lab.Event) bool {
			return e.Type == "Normal" && e.Reason == "GrantIdle" && strings.Contains(e.Message, "container main has had no process on its GPU since")
		}))
	})
}

// writtenDown reads the journal's lines about an allocation, its end, a cut and a refusal. What
// the watchdog does is TestWatchdog's.
func (b *bench) writtenDown(began time.Time, quarter *lab.RunningPod) {
	b.Helper()
	held := b.audited(began, "the holder of a quarter", func(l line) bool {
		return l.Event == "held" && l.Namespace == lab.PodNamespace && l.Pod == quarter.Name && l.Container == "main" && l.UID != "" && maps.Equal(l.Labels, map[string]string{"team": "vision"})
	})
	given := b.audited(began, "the allocation of a quarter", func(l line) bool { return l.Event == "allocated" && l.Grant == held.Grant })
	if p := given.Pieces; given.Resource != lab.Replicas || given.Count != 1 || len(p) != 1 || p[0].GPU != driver.GPUs[2].UUID || p[0].Index != 2 || p[0].Share != .25 {
		b.Errorf("a quarter was written down as %+v", given)
	}
	b.audited(began, "the instance that was made", func(l line) bool {
		return l.Event == "cut" && l.Op == "create" && strings.HasPrefix(l.Placement, "1g.10gb@") && l.Index != nil && *l.Index == 3 && l.GPU == driver.GPUs[3].UUID && l.Reason == ""
	})

	// On GPU 0 are 50 units; with 60 on GPU 1 no GPU has 40 of the 48 that are left.
	b.running("sixty", lab.Memory, 60)
	_, err := b.pod("forty", lab.Memory, 40).Refused(b.ctx)
	b.must(err)
	b.audited(began, "the refusal", func(l line) bool {
		return l.Event == "refused" && l.Resource == lab.Memory && l.Count == 40 && l.Reason == "NotOneGPU" && strings.Contains(l.Message, "the largest free block is 29 units")
	})

	b.must(quarter.Delete(b.ctx))
	end := b.audited(began, "the end of the quarter", func(l line) bool { return l.Event == "released" && l.Grant == held.Grant })
	if end.Message != "" {
		b.Errorf("the end of the quarter is not the ledger's: %+v", end)
	}
	between := given.Time.Add(end.Time.Sub(given.Time) / 2).Format(time.RFC3339Nano)
	if is := asks[[]had](b, "--at", between, "--gpu", "2"); len(is) != 1 || is[0].Pod != quarter.Name || !is[0].Since.Equal(given.Time) || !is[0].Until.Equal(end.Time) {
		b.Errorf("%+v had GPU 2 then, want the quarter from %s to %s", is, given.Time, end.Time)
	}
	if is := asks[[]had](b, "--at", "0s", "--gpu", "2"); len(is) != 0 {
		b.Errorf("%+v has GPU 2 now", is)
	}
	// What was granted is the ledger's times exactly.
	type sum struct {
		Name            string
		Grants          int
		GrantedGPUHours float64
	}
	all := asks[[]sum](b, "--by", "pod", "--since", began.UTC().Format(time.RFC3339))
	i := slices.IndexFunc(all, func(s sum) bool { return s.Name == lab.PodNamespace+"/"+quarter.Name })
	if want := .25 * end.Time.Sub(given.Time).Hours(); i < 0 || all[i].Grants != 1 || math.Abs(all[i].GrantedGPUHours-want) > 1e-9 {
		b.Errorf("the usage by pod is %+v, want %v GPU-hours of the quarter", all, want)
	}
	teams := asks[[]sum](b, "--by", "label=team", "--since", began.UTC().Format(time.RFC3339))
	if i := slices.IndexFunc(teams, func(s sum) bool { return s.Name == "vision" }); i < 0 || teams[i].Grants != 4 {
		b.Errorf("the usage by team is %+v, want 4 grants of vision's", teams)
	}
}
