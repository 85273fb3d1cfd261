// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	loop "example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
)

var long = flag.Bool("long", false, "1,000 interleavings of kubelet and agent, and 1,000 rounds of all doors, not a sample")

// kubeletPeriod stands for the ten seconds between two statuses of a kubelet.
const kubeletPeriod = 150 * time.Millisecond

// TestAllocatableCanOnlyFall: allocations, ends, syncs and restarts of a kubelet, ends of
// the agent and lists that are held back, in random order, at the real API server and
// under the admission policy. What the scheduler may give out is never more than both the
// newest list and the kubelet's last word say, whoever wrote it, and it is what the list
// says once the kubelet has had its time.
func TestAllocatableCanOnlyFall(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	runs, side := 40, 8
	switch {
	case *long:
		runs = 1000
	case testing.Short():
		runs = side
	}
	seeds := make(chan uint64)
	var all sync.WaitGroup
	var mu sync.Mutex
	total := tally{}
	for i := range side {
		all.Go(func() {
			name := fmt.Sprintf("walk-%d", i)
			s.create(t, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": name}})
			for seed := range seeds {
				got := walkAllocatable(t, s, name, seed)
				mu.Lock()
				total.add(got)
				mu.Unlock()
			}
		})
	}
	for seed := range runs {
		if t.Failed() {
			break
		}
		seeds <- uint64(seed)
	}
	close(seeds)
	all.Wait()
	t.Logf("%d interleavings: %d lists fell, %d times the Node was lowered after a list and %d times after the kubelet's word; the kubelet wrote %d times",
		runs, total.fell, total.byList, total.byKubelet, total.syncs)
	if total.byList == 0 || *long && total.byKubelet == 0 {
		t.Error("one of the two ways to lower was never taken: the walks do not meet what they are for")
	}
}

type tally struct{ fell, byList, byKubelet, syncs int }

func (c *tally) add(d tally) {
	c.fell, c.byList, c.byKubelet, c.syncs = c.fell+d.fell, c.byList+d.byList, c.byKubelet+d.byKubelet, c.syncs+d.syncs
}

type amounts = map[string]int64

// simulated is a node: its kubelet and its agent, as the API server sees them.
type simulated struct {
	t          *testing.T
	s          *apiServer
	name, path string
	draw       *rand.Rand // of the events; the kubelet has one of its own

	mu sync.Mutex // guards what follows
	tally
	// list is what the agent has to give out, and got what of that the kubelet has taken
	// in: nothing while no plugin is registered.
	list, got amounts
	// lists has each amount that a list ever said, by resource.
	lists map[string]map[int64]bool
	// words are the versions of the Node that the kubelet wrote, or the test for it.
	words map[string]bool
	// seen is all that a watch showed of the Node, in order.
	seen []sight
	// lowering is the agent's, nil while there is none.
	lowering *loop.Lowering
	end      func()
}

// sight is the Node at one moment.
type sight struct {
	version string
	amounts amounts
}

var walked = []string{"example.com/gpu-mem", "example.com/mig-3g.40gb"}

// walkAllocatable is one interleaving on one node.
func walkAllocatable(t *testing.T, s *apiServer, node string, seed uint64) tally {
	n := &simulated{t: t, s: s, name: node, path: "/api/v1/nodes/" + node, draw: rand.New(rand.NewPCG(seed, 17)),
		list: amounts{}, got: amounts{}, lists: map[string]map[int64]bool{}, words: map[string]bool{}}
	for _, name := range walked {
		n.list[name], n.got[name], n.lists[name] = 79, 79, map[int64]bool{79: true}
	}
	if err := n.write(n.list); err != nil { // as a kubelet has left it
		t.Error(err)
		return tally{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var kubelet sync.WaitGroup
	kubelet.Go(func() { n.watch(ctx) })
	kubelet.Go(func() { n.sync(ctx, rand.New(rand.NewPCG(seed, 18))) })
	n.startAgent()
	for range 12 {
		n.event()
		time.Sleep(time.Duration(n.draw.IntN(60)) * time.Millisecond)
	}
	n.startAgent()
	n.tell(n.late())
	n.settle(seed)
	n.endAgent()
	cancel()
	kubelet.Wait()
	n.judge(seed)
	return n.tally
}

// settle waits until what the scheduler may give out is what the list says: two periods
// are enough, and a busy machine may need more.
func (n *simulated) settle(seed uint64) {
	var is string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(kubeletPeriod / 10) {
		n.mu.Lock()
		is = "nothing"
		if len(n.seen) > 0 {
			is = fmt.Sprint(n.seen[len(n.seen)-1].amounts)
		}
		want := fmt.Sprint(n.list)
		n.mu.Unlock()
		if is == want {
			return
		}
	}
	n.t.Errorf("seed %d: allocatable is %s a minute after the last event, want what the list says, %v", seed, is, n.list)
}

// judge looks at all that the Node has been: what rises is the kubelet's word, and what
// somebody else wrote is lower than before and what a list has said.
func (n *simulated) judge(seed uint64) {
	for i := 1; i < len(n.seen); i++ {
		if n.words[n.seen[i].version] {
			continue
		}
		for name, is := range n.seen[i].amounts {
			was := n.seen[i-1].amounts[name]
			if is > was || is < was && !n.lists[name][is] {
				n.t.Errorf("seed %d: the agent made %s of %s from %d, and lists have said %v", seed, fmt.Sprint(is), name, was, n.lists[name])
			}
		}
	}
}

// event is one thing that happens.
func (n *simulated) event() {
	name := walked[n.draw.IntN(len(walked))]
	switch n.draw.IntN(10) {
	case 0, 1, 2, 3: // an allocation
		n.change(name, func(now int64) int64 { return now - int64(n.draw.IntN(30)) })
		n.tell(n.late())
	case 4, 5, 6: // an end
		n.change(name, func(now int64) int64 { return now + int64(n.draw.IntN(60)) })
		n.tell(n.late())
	case 7: // a list that is held back until the next one
		n.change(name, func(now int64) int64 { return now - int64(n.draw.IntN(30)) })
	case 8: // the kubelet starts anew, and knows no plugin
		n.unregister()
		late := n.late()
		time.AfterFunc(time.Duration(n.draw.IntN(100))*time.Millisecond, func() { n.tell(late) })
	case 9: // the agent is killed, things happen, and it starts anew
		n.endAgent()
		n.unregister()
		n.change(name, func(now int64) int64 { return now - int64(n.draw.IntN(30)) })
		time.Sleep(time.Duration(n.draw.IntN(100)) * time.Millisecond)
		n.startAgent()
		n.tell(n.late())
	}
}

// change changes what there is to give out.
func (n *simulated) change(name string, f func(int64) int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := min(max(f(n.list[name]), 0), 79)
	if now < n.list[name] {
		n.fell++
	}
	n.list[name], n.lists[name][now] = now, true
}

// late is how long the kubelet takes to take a list in.
func (n *simulated) late() time.Duration { return time.Duration(n.draw.IntN(30)) * time.Millisecond }

// tell sends the lists, and the kubelet takes them in a moment later.
func (n *simulated) tell(late time.Duration) {
	n.mu.Lock()
	lowering := n.lowering
	for _, name := range walked {
		if lowering != nil {
			lowering.Sent(name, int(n.list[name]))
		}
	}
	n.mu.Unlock()
	time.AfterFunc(late, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.lowering == nil || n.lowering != lowering {
			return // its stream has ended
		}
		for _, name := range walked {
			n.got[name] = n.list[name]
		}
	})
}

// unregister is what a kubelet knows that has started, or has lost the plugin.
func (n *simulated) unregister() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range walked {
		n.got[name] = 0
	}
}

// startAgent starts one, with a client of its own, if there is none.
func (n *simulated) startAgent() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lowering != nil {
		return
	}
	var lowering *loop.Lowering
	log := slog.New(slog.DiscardHandler)
	client, err := agentkube.New(agentkube.Options{NodeName: n.name, Options: kube.Options{Kubeconfig: n.s.Kubeconfig(n.t, asOn(name, name, n.name)), Domain: "example.com", Logger: log},
		Allocatable: func(now map[string]int64) { lowering.See(now) }})
	if err != nil {
		n.t.Error(err)
		return
	}
	lowering = loop.NewLowering(client, func(cause string) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if cause == loop.ByList {
			n.byList++
		} else {
			n.byKubelet++
		}
	}, log)
	ctx, cancel := context.WithCancel(n.t.Context())
	var agent sync.WaitGroup
	agent.Go(func() { client.WatchNode(ctx, func(agentkube.Node) {}) })
	agent.Go(func() { lowering.Run(ctx) })
	n.lowering, n.end = lowering, func() { cancel(); agent.Wait() }
}

func (n *simulated) endAgent() {
	n.mu.Lock()
	end := n.end
	n.lowering, n.end = nil, nil
	n.mu.Unlock()
	if end != nil {
		end()
	}
}

// sync is the kubelet's loop: what it would say that differs from what its informer shows
// is written, a moment after it was worked out.
func (n *simulated) sync(ctx context.Context, draw *rand.Rand) {
	for ctx.Err() == nil {
		time.Sleep(kubeletPeriod*3/4 + time.Duration(draw.Int64N(int64(kubeletPeriod/2))))
		n.mu.Lock()
		differs := amounts{}
		if len(n.seen) > 0 {
			for _, name := range walked {
				if n.got[name] != n.seen[len(n.seen)-1].amounts[name] {
					differs[name] = n.got[name]
				}
			}
		}
		n.mu.Unlock()
		time.Sleep(time.Duration(draw.IntN(20)) * time.Millisecond)
		if len(differs) == 0 || ctx.Err() != nil {
			continue
		}
		if err := n.write(differs); err != nil && ctx.Err() == nil {
			n.t.Errorf("the kubelet's word: %v", err)
		}
	}
}

// write is a word of the kubelet.
func (n *simulated) write(of amounts) error {
	text := fields{}
	for name, amount := range of {
		text[name] = fmt.Sprint(amount)
	}
	var object struct {
		Metadata struct{ ResourceVersion string }
	}
	err := n.s.do(n.t, nil, http.MethodPatch, n.path+"/status", strategic, fields{"status": fields{"capacity": text, "allocatable": text}}, &object)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.words[object.Metadata.ResourceVersion] = true
	n.syncs++
	return err
}

// watch is the kubelet's informer.
func (n *simulated) watch(ctx context.Context) {
	err := n.s.Watch(ctx, "/api/v1/nodes?fieldSelector=metadata.name%3D"+n.name, func(line []byte) {
		var e struct {
			Object struct {
				Metadata struct{ ResourceVersion string }
				Status   struct{ Allocatable map[string]string }
			}
		}
		if err := json.Unmarshal(line, &e); err != nil {
			n.t.Error(err)
			return
		}
		now := sight{e.Object.Metadata.ResourceVersion, amounts{}}
		for _, name := range walked {
			now.amounts[name], _ = strconv.ParseInt(e.Object.Status.Allocatable[name], 10, 64)
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.seen = append(n.seen, now)
	})
	if err != nil && ctx.Err() == nil {
		n.t.Errorf("the watch of %s: %v", n.name, err)
	}
}
