// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/placer"
)

func one(name string, n int) map[string]any { return map[string]any{name: fmt.Sprint(n)} }

// TestAFirstRequest goes through what a consumer may be told at first, on a node with two GPUs
// of 79 units and one card on demand.
func TestAFirstRequest(t *testing.T) {
	for _, c := range []struct {
		name string
		ask  map[string]any
		want string
		says string
	}{
		{"memory", one(memory, 40), "Accepted Granted gpu-mem=40", "granted: 40 of example.com/gpu-mem"},
		{"of two GPUs", one(memory, 100), "Accepted Granted gpu-mem=100", "in blocks of 79 and 21"},
		{"all", one(memory, 158), "Accepted Granted gpu-mem=158", "in blocks of 79 and 79"},
		{"more than there is", one(memory, 159), "Denied NoRoom", "asked for 159 of example.com/gpu-mem: 158 are available now"},
		{"profiles together", map[string]any{half: "1", small: "4"}, "Accepted Granted mig-1g.10gb=4 mig-3g.40gb=1", ""},
		{"profiles that exclude each other", map[string]any{full: "1", small: "1"}, "Denied NoRoom", "asked for 1 of example.com/mig-1g.10gb: 0 are available now"},
		{"a profile that is not offered", one("example.com/mig-2g.20gb", 1), "Denied NoRoom", "0 are available now"},
		{"and cpu", map[string]any{memory: "1", "cpu": "8", "memory": "16Gi"}, "Accepted Granted gpu-mem=1", ""},
		{"and more cpu than there is", map[string]any{memory: "1", "cpu": "65"}, "Denied NoRoom", "asked for 65 of cpu: the nodes with GPUs have 64"},
		{"somebody else's", map[string]any{memory: "1", "nvidia.com/gpu": "1"}, "Denied NotOffered", "does not grant nvidia.com/gpu"},
		{"none of somebody else's", map[string]any{memory: "1", "nvidia.com/gpu": "0"}, "Accepted Granted gpu-mem=1", ""},
		{"no GPUs", map[string]any{"cpu": "1"}, "Denied NotOffered", "nothing below example.com/ is asked for"},
		{"less than nothing", map[string]any{memory: "1", "cpu": "-1"}, "Denied NotOffered", "cpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPeers(t)
			p.cluster.units("a", 79, 79)
			p.cluster.onDemand("b", "1g.10gb", "3g.40gb", "7g.80gb")
			p.ask("one", c.ask)
			p.rest()
			p.wants("one", c.want)
			s := p.read("one")
			if !strings.Contains(s.Resources.Message, c.says) {
				t.Errorf("the message is %q, want %q", s.Resources.Message, c.says)
			}
			if s.Authentication.Status != accepted || s.object.Object["status"].(map[string]any)["authParams"] == nil {
				t.Errorf("what Liqo wrote is lost: %v", s.object.Object["status"])
			}
			if cpu := s.Granted["cpu"]; s.Resources.Status == accepted && (cpu.IsZero() || s.Selector["example.com/gpu.node"] != "true" || s.Labels["example.com/gpu.model"] == "") {
				t.Errorf("granted is %v, labels %v, selector %v", s.Granted, s.Labels, s.Selector)
			}
		})
	}
}

// TestALongWordIsSaidOnce: a cluster may ask for anything, by any name. It is told in a length that
// the API server takes, and not again and again.
func TestALongWordIsSaidOnce(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	ask := map[string]any{memory: "1"}
	for i := range 1000 {
		ask[fmt.Sprintf("other.org/%d", i)] = "1"
	}
	p.ask("one", ask)
	p.rest()
	p.wants("one", "Denied NotOffered")
	if n := len(p.read("one").Resources.Message); n > brief.Message || n < brief.Message-4 {
		t.Errorf("the message has %d bytes, want %d", n, brief.Message)
	}
	s := p.read("one")
	if again := p.grants.Decide([]*Slice{s}, []*Tenant{p.tenants["one"]}, p.now); len(again) > 0 {
		t.Errorf("it is told again: %+v", again[0].Status.Resources)
	}
}

// TestBlocksAreThoseOfTheGrant: what is given back is kept until the status says so, in
// blocks that are not those of what is left.
func TestBlocksAreThoseOfTheGrant(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79, 79)
	p.ask("one", one(memory, 118))
	p.rest()
	if says := p.read("one").Resources.Message; !strings.Contains(says, "118 of example.com/gpu-mem in blocks of 79 and 39") {
		t.Errorf("the message is %q", says)
	}
	p.ask("one", one(memory, 40))
	p.rest()
	if says := p.read("one").Resources.Message; !strings.HasSuffix(says, "40 of example.com/gpu-mem") {
		t.Errorf("the message is %q", says)
	}
}

// TestWhatIsGrantedToOneIsNotGrantedToTheOther has one GPU of 79 units.
func TestWhatIsGrantedToOneIsNotGrantedToTheOther(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	p.ask("one", one(memory, 40))
	p.ask("two", one(memory, 40))
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=40")
	p.wants("two", "Denied NoRoom")
	// The consumer gives some back. Nobody gets it before its status says so.
	p.ask("one", one(memory, 30))
	p.now = p.now.Add(again)
	todo := p.decide()
	if todo["two"] != nil || todo["one"] == nil {
		t.Fatalf("one's 10 are granted before it has given them back: %v", todo)
	}
	p.write("one", todo["one"])
	p.later(again)
	p.wants("one", "Accepted Granted gpu-mem=30")
	p.wants("two", "Accepted Granted gpu-mem=40")
	// It is taken away.
	delete(p.slices, "two")
	p.ask("one", one(memory, 79))
	p.later(again)
	p.wants("one", "Accepted Granted gpu-mem=79")
}

func TestMoreIsAskedFor(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	p.ask("one", one(memory, 40))
	p.ask("two", one(memory, 30))
	p.rest()
	p.ask("one", one(memory, 60))
	p.rest()
	p.wants("one", "Accepted NotMore gpu-mem=40")
	if got := p.read("one").Resources.Message; !strings.Contains(got, "no room now for all that it asks for; it keeps 40 of example.com/gpu-mem (asked for 60)") {
		t.Error(got)
	}
	// Meanwhile what is left is for others.
	p.ask("three", one(memory, 9))
	p.rest()
	p.wants("three", "Accepted Granted gpu-mem=9")
	delete(p.slices, "two")
	p.later(again)
	p.wants("one", "Accepted Granted gpu-mem=60")
	p.ask("one", map[string]any{memory: "60", "nvidia.com/gpu": "1"})
	p.later(again)
	p.wants("one", "Accepted NotMore gpu-mem=60")
}

func TestAGrantFollowsTheInventory(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	p.cluster.units("b", 79)
	p.cluster.onDemand("c", "1g.10gb", "7g.80gb")
	p.ask("one", map[string]any{memory: "100", small: "2"})
	p.ask("two", one(memory, 50))
	p.rest()
	p.cluster.gone("b")
	p.rest()
	p.wants("one", "Accepted Reduced gpu-mem=79 mig-1g.10gb=2")
	p.wants("two", "Accepted Reduced gpu-mem=0")
	p.cluster.units("b", 79)
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=100 mig-1g.10gb=2")
	p.wants("two", "Accepted Granted gpu-mem=50")
	// The card is cut in another way: a profile that went is zero, since the virtual node would
	// keep a name that is left out.
	p.cluster.onDemand("c", "7g.80gb")
	p.rest()
	p.wants("one", "Accepted Reduced gpu-mem=100 mig-1g.10gb=0")
	p.ask("one", one(memory, 100))
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=100 mig-1g.10gb=0")
}

// TestRoomThatComesBackIsFirstWhoseStatusSaysSo: of two GPUs that went one is back. Who was reduced
// has been there for longer, and does not get what the other one is said to have.
func TestRoomThatComesBackIsFirstWhoseStatusSaysSo(t *testing.T) {
	p := newPeers(t)
	for _, node := range []string{"a", "b", "c"} {
		p.cluster.units(node, 79)
	}
	p.ask("one", one(memory, 158))
	p.rest()
	p.ask("two", one(memory, 79))
	p.rest()
	p.cluster.gone("b")
	p.rest()
	p.wants("one", "Accepted Reduced gpu-mem=79")
	p.cluster.gone("c")
	p.cluster.units("b", 79)
	p.rest()
	p.wants("one", "Accepted Reduced gpu-mem=79")
	p.wants("two", "Accepted Granted gpu-mem=79")
	p.cluster.units("c", 79)
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=158")
	p.wants("two", "Accepted Granted gpu-mem=79")
}

// TestAPodOfThisClustersThatTakesGrantedRoom is what can happen where kube-scheduler does not
// ask the placer.
func TestAPodOfThisClustersThatTakesGrantedRoom(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	p.ask("one", one(memory, 79))
	p.rest()
	stray := placer.Pod{UID: "stray", Node: "a", Containers: []placer.Container{{Requests: map[string]int{memory: 20}}}}
	p.cluster.SetPod(stray)
	p.rest()
	p.later(patience - time.Second)
	p.wants("one", "Accepted Granted gpu-mem=79")
	p.later(time.Second)
	p.wants("one", "Accepted Reduced gpu-mem=59")
	p.cluster.DeletePod("stray")
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=79")
	// The consumer's own pods are part of what it has.
	own := stray
	own.UID, own.Hold = "own", p.read("one").Quota()
	p.cluster.SetPod(own)
	p.later(patience * 2)
	p.wants("one", "Accepted Granted gpu-mem=79")
}

// TestAConsumerIsNamedLate has the slice come before Liqo has written whose it is, as it does
// where Liqo's controllers are slow. Its pods are part of what it was granted all the same.
func TestAConsumerIsNamedLate(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79, 79)
	name := func(consumer string) {
		p.change("one", func(o map[string]any) { o["spec"].(map[string]any)["consumerClusterID"] = consumer })
	}
	p.ask("one", one(memory, 40))
	name("")
	p.rest()
	p.wants("one", " ")
	name("one")
	p.rest()
	p.wants("one", "Accepted Granted gpu-mem=40")
	p.cluster.SetPod(placer.Pod{UID: "own", Node: "a", Hold: p.read("one").Quota(), Containers: []placer.Container{{Requests: map[string]int{memory: 24}}}})
	p.ask("two", one(memory, 200))
	p.rest()
	p.wants("two", "Denied NoRoom")
	if is, want := p.read("two").Resources.Message, "asked for 200 of "+memory+": 118 are available now beyond those of pods and other clusters"; is != want {
		t.Errorf("the other is told %q, want %q", is, want)
	}
}

// TestLiqosWord leaves slices alone that Liqo, or nobody, has a word on.
func TestLiqosWord(t *testing.T) {
	for _, c := range []struct {
		name   string
		before func(*peers) // a word
		after  func(*peers)
		want   string
	}{
		{"a tenant that is drained", func(p *peers) { p.tenants["one"].Condition = drained }, func(p *peers) { p.tenants["one"].Condition = active }, " "},
		{"a tenant that is cordoned", func(p *peers) { p.tenants["one"].Condition = cordoned }, func(p *peers) { p.tenants["one"].Condition = active }, " "},
		{"no tenant", func(p *peers) { p.tenants["one"].Cluster = "other" }, func(p *peers) { p.tenants["one"].Cluster = "one" }, " "},
		{"a tenant of another namespace", func(p *peers) { p.tenants["one"].Namespace = "other" }, func(p *peers) { p.tenants["one"].Namespace = "liqo-tenant-one" }, " "},
		{"no authentication", func(p *peers) {
			p.change("one", func(o map[string]any) { delete(o["status"].(map[string]any), "conditions") })
		}, func(p *peers) {
			p.change("one", func(o map[string]any) {
				o["status"] = map[string]any{"conditions": []any{map[string]any{"type": authentication, "status": accepted}}}
			})
		}, " "},
		{"another class", func(p *peers) {
			p.change("one", func(o map[string]any) { o["spec"].(map[string]any)["class"] = "default" })
		}, func(p *peers) {
			p.change("one", func(o map[string]any) { o["spec"].(map[string]any)["class"] = Class })
		}, " "},
		{"this cluster's own", func(p *peers) {
			p.change("one", func(o map[string]any) {
				delete(o["metadata"].(map[string]any)["labels"].(map[string]any), originLabel)
			})
		}, func(p *peers) {
			p.change("one", func(o map[string]any) {
				o["metadata"].(map[string]any)["labels"].(map[string]any)[originLabel] = "one"
			})
		}, " "},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPeers(t)
			p.cluster.units("a", 79)
			p.ask("one", one(memory, 40))
			c.before(p)
			p.ask("two", one(memory, 79))
			p.later(time.Minute)
			p.wants("one", c.want)
			p.wants("two", "Accepted Granted gpu-mem=79") // nothing is kept for one
			p.ask("two", one(memory, 10))
			p.rest()
			c.after(p)
			p.later(time.Minute)
			p.wants("one", "Accepted Granted gpu-mem=40")
		})
	}
}

// TestATenantIsDrainedAndCordoned has what was granted stay for it while its status says so.
func TestATenantIsDrainedAndCordoned(t *testing.T) {
	p := newPeers(t)
	p.cluster.units("a", 79)
	p.ask("one", one(memory, 40))
	p.rest()
	p.tenants["one"].Condition = drained
	p.change("one", func(o map[string]any) { // as Liqo does
		list := o["status"].(map[string]any)["conditions"].([]any)
		list[1].(map[string]any)["status"], list[1].(map[string]any)["reason"] = denied, "ResourceSliceResourcesDenied"
	})
	p.ask("two", one(memory, 40))
	p.later(time.Hour)
	p.wants("one", "Denied ResourceSliceResourcesDenied gpu-mem=40")
	p.wants("two", "Denied NoRoom")
	p.tenants["one"].Condition = active
	p.later(again)
	p.wants("one", "Accepted Granted gpu-mem=40")
	p.tenants["one"].Condition = cordoned
	p.ask("one", one(memory, 50))
	p.later(again)
	p.wants("one", "Accepted NotMore gpu-mem=40")
	p.ask("one", one(memory, 30))
	p.later(again)
	p.wants("one", "Accepted Granted gpu-mem=30")
}

// TestARequestOfLiqosOwnClassIsReported is what gets around the books.
func TestARequestOfLiqosOwnClassIsReported(t *testing.T) {
	for class, want := range map[string]bool{"default": true, "": true, "other": false, Class: false} {
		p := newPeers(t)
		p.cluster.units("a", 79)
		p.ask("one", one(memory, 40))
		p.change("one", func(o map[string]any) { o["spec"].(map[string]any)["class"] = class })
		got := slices.ContainsFunc(p.grants.Decide([]*Slice{p.read("one")}, nil, p.now), func(d Decision) bool { return d.Bypass })
		if got != want {
			t.Errorf("class %q is reported: %v", class, got)
		}
	}
}

// TestRandomGrants lets consumers ask, give back and go, nodes come and go and processes end,
// with some of what was decided never written. Each time, what statuses say is compared
// with what the nodes have; and when all is quiet, with a sum that is simple for memory on GPUs:
// whoever is denied does not fit.
func TestRandomGrants(t *testing.T) {
	count := map[string]int{}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 3))
		p := newPeers(t)
		sizes := map[string][]int{}
		add := func(name string) {
			for range 1 + r.IntN(3) {
				sizes[name] = append(sizes[name], 8)
			}
			p.cluster.units(name, sizes[name]...)
		}
		add("a")
		lost := false // a node, since all was quiet
		for range 60 {
			who := fmt.Sprintf("c%d", r.IntN(4))
			switch r.IntN(8) {
			case 0, 1, 2:
				p.ask(who, one(memory, r.IntN(20)))
			case 3:
				delete(p.slices, who)
			case 4:
				if name := string('a' + rune(r.IntN(3))); sizes[name] == nil {
					add(name)
				} else {
					delete(sizes, name)
					lost = true
					p.cluster.gone(name)
				}
			case 5: // another process takes over, with books of its own
				c := newCluster(t)
				for name, s := range p.cluster.status {
					c.set(name, s)
				}
				p.cluster, p.grants = c, NewGrants("example.com", "example.com", c)
				count["restarts"]++
			default:
				p.now = p.now.Add(again)
			}
			for consumer, w := range p.decide() {
				if r.IntN(3) > 0 { // the others fail
					p.write(consumer, w)
					count[w.Resources.Reason]++
				}
			}
			if r.IntN(4) == 0 {
				p.later(patience)
				p.later(patience)
				p.verify(sizes)
				lost = false
				count["quiet"]++
			}
			if room, given := p.sums(sizes); !lost && given > room {
				t.Fatalf("seed %d: %d units are granted, and there are %d", seed, given, room)
			}
		}
	}
	t.Log(count)
	for _, k := range []string{"restarts", Granted, Reduced, NotMore, NoRoom, "quiet"} {
		if count[k] < 50 {
			t.Errorf("the walks have %d of %q: they look at nothing", count[k], k)
		}
	}
}

// sums are how many units there are, and how many statuses grant.
func (p *peers) sums(sizes map[string][]int) (room, given int) {
	for _, gpus := range sizes {
		for _, n := range gpus {
			room += n
		}
	}
	for name := range p.slices {
		given += p.grants.ours(p.read(name).Granted)[memory]
	}
	return room, given
}

// verify compares statuses with what there is.
func (p *peers) verify(sizes map[string][]int) {
	p.t.Helper()
	room, given := p.sums(sizes)
	if given > room {
		p.t.Fatalf("%d units are granted, and there are %d", given, room)
	}
	for _, name := range slices.Sorted(maps.Keys(p.slices)) {
		s := p.read(name)
		ask, has := p.grants.ours(s.Ask)[memory], p.grants.ours(s.Granted)[memory]
		if has > ask {
			p.t.Fatalf("%s asked for %d and has %d", name, ask, has)
		}
		if missing := ask - has; missing > 0 && missing <= room-given {
			p.t.Fatalf("%s lacks %d of %d, %d are left, and it is told %v", name, missing, ask, room-given, s.Resources)
		}
	}
}
