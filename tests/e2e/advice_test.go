// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// request is a pod of the trace: when it comes, and what it asks for.
type request struct {
	at       time.Duration
	resource string
	n        int
}

// held is for how long a pod runs. All run for as long, since nobody can know that of those that
// were refused.
const held = 90 * time.Second

// half of the node's GPUs are whole, and nobody asks for them.
const half = `version: v1
partitions:
  default:
    - {devices: [0, 1, 2, 3], mode: shared}
    - {devices: [4, 5, 6, 7], mode: whole}
`

// tenMinutes are requests for large and small shares of a GPU, so many that the large ones are
// refused now and then: the scheduler adds up what small ones leave on several GPUs.
func tenMinutes() (out []request) {
	const pods = 100
	random := rand.New(rand.NewPCG(1, 19))
	for range pods {
		r := request{at: time.Duration(random.Int64N(int64(10 * time.Minute))), resource: lab.Memory, n: 18 + random.IntN(5)}
		if random.IntN(2) == 0 {
			r.n = 48 + random.IntN(5)
		}
		out = append(out, r)
	}
	return out
}

// serve has the pods of a trace come, asking for what it is called on this partition, and returns how
// many were refused.
func (b *bench) serve(name string, trace []request, called func(request) (resource string, n int)) (refused int) {
	b.Helper()
	began := time.Now()
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	failed := make(chan error, len(trace))
	for i, r := range trace {
		go func() {
			select {
			case <-ctx.Done():
				failed <- ctx.Err()
				return
			case <-time.After(r.at - time.Since(began)):
			}
			resource, n := called(r)
			_, err := node.CreatePod(ctx, lab.Pod{Name: fmt.Sprintf("%s-%d", name, i), Once: true,
				Containers: []lab.Container{{Resources: map[string]int{resource: n}, Then: fmt.Sprintf("sleep %.0f", held.Seconds())}}})
			failed <- err
		}()
	}
	for range trace {
		b.must(<-failed)
	}
	b.must(lab.Await(b.ctx, 10*time.Minute, "all pods of the trace to have ended", func(ctx context.Context) error {
		pods, err := node.Pods(ctx, "")
		if err != nil {
			return err
		}
		refused = 0
		for _, p := range pods {
			switch {
			case !strings.HasPrefix(p.Name, name+"-"):
			case p.Reason == "UnexpectedAdmissionError":
				refused++
			case p.Phase != "Succeeded":
				return fmt.Errorf("%s", p)
			}
		}
		return nil
	}))
	return refused
}

// advice is what `gpu-agent advise -o json` prints, as far as it matters here.
type advice struct {
	Demand       struct{ Requests, Granted, Refused int }
	Alternatives []struct {
		Name            string
		Present         bool
		Served, Refused int
		Never, Waited   int
		Names           []struct{ From, To string }
	}
	Partition string
}

// advised asks the program for advice on what was asked of the node since a time.
func (b *bench) advised(since time.Time) (out advice) {
	b.Helper()
	dir := b.TempDir()
	inventory, err := agent.Command(b.ctx, "inventory", "-o", "json")
	b.must(err)
	pods, err := node.Kubectl(b.ctx, nil, "get", "pods,events", "-A", "-o", "json")
	b.must(err)
	for name, text := range map[string][]byte{"inventory.json": inventory, "trace.json": pods} {
		b.must(os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	cmd := exec.CommandContext(b.ctx, kit.Bin("gpu-agent"), "advise", "-o", "json", "--state-dir", node.File("/var/lib/gpu-agent"), "--since", since.Format(time.RFC3339),
		"--inventory", filepath.Join(dir, "inventory.json"), "--trace", filepath.Join(dir, "trace.json"), "--tries", "200")
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	b.must(err)
	if err := json.Unmarshal(text, &out); err != nil || len(out.Alternatives) == 0 {
		b.Fatalf("the advice is %s: %v", text, err)
	}
	return out
}

// TestAdvice records ten minutes of requests, asks which partition would have served them best, and has
// the same pods come again on that one. As many are refused as the advice says, on the partition that
// there was and on the best, within one in a hundred.
func TestAdvice(t *testing.T) {
	if !*long {
		t.Skip("-long is not set: the trace takes ten minutes, twice; internal/advise has a short form without a node")
	}
	b := prepare(t)
	trace := tenMinutes()
	within := len(trace) / 100
	b.must(agent.Reset(b.ctx, half))
	b.offersAll(map[string]int{lab.Memory: 4 * units, lab.GPU: 4})
	since := time.Now().UTC().Truncate(time.Second).Add(time.Second)
	time.Sleep(time.Until(since)) // the API server's times are whole seconds: no pod may seem older
	seen := b.serve("first", trace, func(r request) (string, int) { return r.resource, r.n })
	a := b.advised(since)
	best := a.Alternatives[0]
	for _, one := range a.Alternatives {
		b.Logf("%+v", one)
		if one.Present && (a.Demand.Requests != len(trace) || max(one.Refused-seen, seen-one.Refused) > within) {
			b.Errorf("of %d pods %d were refused, and a replay of %d requests has %d refused", len(trace), seen, a.Demand.Requests, one.Refused)
		}
	}
	b.Logf("%d of %d were refused; the best partition is\n%s", seen, len(trace), a.Partition)
	if best.Present || best.Served < a.Demand.Granted {
		b.Errorf("nothing is better than what there is: %+v", best)
	}
	names := map[string]string{}
	for _, n := range best.Names {
		names[n.From] = n.To
	}
	b.must(agent.Reset(b.ctx, a.Partition))
	b.state("applied")
	seen = b.serve("again", trace, func(r request) (string, int) {
		to, renamed := names[fmt.Sprintf("gpu-mem of %d GiB", r.n)]
		if !renamed {
			return r.resource, r.n
		}
		name, count, _ := strings.Cut(to, ": ")
		n, err := strconv.Atoi(count)
		if err != nil {
			b.Errorf("%q is no number of a resource: %v", to, err)
		}
		return "example.com/" + name, n
	})
	b.Logf("on the best partition %d were refused, and %d foreseen", seen, best.Refused)
	if max(best.Refused-seen, seen-best.Refused) > within {
		b.Errorf("on the best partition %d of %d pods were refused, and the advice says %d", seen, len(trace), best.Refused)
	}
}
