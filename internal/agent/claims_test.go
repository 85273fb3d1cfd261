// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	faked "example.com/gpu-agent/tests/fakes/claims"
	resourcev1 "k8s.io/api/resource/v1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

const draDriver = "gpus.example.com"

// scheduled is a cluster whose kubelet calls a front-end.
type scheduled struct {
	*faked.Cluster
	mu     sync.Mutex
	front  *dra.FrontEnd  // guarded by mu
	status kubelet.Status // guarded by mu
}

func newScheduled() *scheduled { return &scheduled{Cluster: &faked.Cluster{Driver: draDriver}} }

func (s *scheduled) driver() *dra.FrontEnd {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.front
}

// Run is the kubelet that has the driver.
func (s *scheduled) Run(ctx context.Context) error {
	s.driver().Publisher().Registered(true)
	<-ctx.Done()
	return ctx.Err()
}

// Status is the driver's at the kubelet.
func (s *scheduled) Status() kubelet.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// lose has the kubelet not have the driver any more, or have it again.
func (s *scheduled) lose(lost bool, why error) {
	s.mu.Lock()
	s.status = kubelet.Status{Registered: !lost, Since: time.Now(), Err: why}
	f := s.front
	s.mu.Unlock()
	f.Publisher().Registered(!lost)
	f.Wake()
}

// worlds are those of an agent.
func (s *scheduled) worlds() *DRA {
	if s == nil {
		return nil
	}
	return &DRA{API: s.Cluster, Kubelet: s.Cluster, Serve: func(f *dra.FrontEnd) (DRADriver, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.front = f
		return s, nil
	}}
}

// allocate makes a claim that has a device, of a memory of so many GiB if it is shared.
func (s *scheduled) allocate(t *testing.T, name, suffix string, gib int64) kubelet.Claim {
	t.Helper()
	c, err := s.Schedule("ns", name, faked.Request{Name: "gpu", Fits: faked.Named(suffix), Memory: gib << 30})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *scheduled) prepare(ctx context.Context, c kubelet.Claim) ([]kubelet.Device, error) {
	return s.Prepare(ctx, s.driver(), c)
}

func (s *scheduled) unprepare(t *testing.T, c kubelet.Claim) {
	t.Helper()
	if err := s.Unprepare(t.Context(), s.driver(), c); err != nil {
		t.Error(err)
	}
	synctest.Wait()
}

// key is the ID of what a claim of one device has.
func key(c kubelet.Claim) string { return cdi.Key("claim/"+c.UID, []string{"gpu#0"}) }

// partition is a file in which all GPUs are offered through DRA.
func throughDRA(entry string) string {
	return "version: v1\npartitions:\n  default:\n    - {devices: all, api: dra, " + entry + "}\n"
}

// specOf is the CDI file of an allocation, as it is on disk; nil where there is none.
func (b *bench) specOf(key string) *specs.Spec {
	b.t.Helper()
	spec, err := b.loop.gates.files.Read(key)
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		b.t.Error(err)
	}
	return spec
}

// A claim gets its CDI file and its pages as a container of the device plugin does, however
// its GPU is laid out, and they go with it.
func TestClaims(t *testing.T) {
	for name, c := range map[string]struct {
		entry, device string
		gib           int64
		limit         uint64 // of the GPU's page
	}{
		"whole":      {"mode: whole", "gpu-00000000", 0, memcap.None},
		"shared":     {"mode: shared", "-shared", 3, 3 << 30},
		"replicas":   {"mode: shared, replicas: 4", "-replicas", 0, 0},
		"on demand":  {"mode: mig", "-mig-3g40gb-4", 0, memcap.None},
		"a geometry": {"mode: mig, geometry: {3g.40gb: 2}", "-mig-3g40gb-4", 0, memcap.None},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := migMachine(1)
				if strings.Contains(c.entry, "mig") {
					o = migMachine(1, 0)
				}
				o.dra = newScheduled()
				b := start(t, o, t.TempDir(), throughDRA(c.entry))
				defer b.end()
				time.Sleep(time.Minute) // a geometry is cut
				synctest.Wait()
				for _, r := range b.front.Offer().Resources {
					if len(r.Devices) > 0 {
						t.Errorf("the kubelet is told of %s, too", r.Name)
					}
				}
				claim := o.dra.allocate(t, "a", c.device, c.gib)
				devices, err := o.dra.prepare(t.Context(), claim)
				if err != nil || len(devices) != 1 || devices[0].CDI[0] != "example.com/gpu="+key(claim) {
					t.Fatalf("%+v, %v", devices, err)
				}
				limit := c.limit
				if d := &o.inv.GPUs[0]; name == "replicas" {
					limit = memcap.Replica(d.Usable(), 4)
				}
				if bytes, err := o.caps.Limit(key(claim), uuid(0)); err != nil || bytes != limit || b.specOf(key(claim)) == nil {
					t.Errorf("%d, %v", bytes, err)
				}
				synctest.Wait() // the round ends
				if s := b.Status().GPUs[0]; s.MIG != nil && strings.Contains(c.entry, "mig") {
					i := slices.IndexFunc(s.MIG.Placements, func(p status.Placement) bool { return p.Profile == "3g.40gb" && p.Start == 4 })
					if i < 0 || s.MIG.Placements[i].State != status.PlacementHeld || s.Used != 1 || s.Free == 0 {
						t.Errorf("status says %+v of %+v", s.MIG, s)
					}
				}
				if in := mig.Find(o.inv.GPUs[0].MIG.Instances, placementOf(t, "3g.40gb", 4)); strings.Contains(c.entry, "mig") && in == nil {
					t.Errorf("no instance stands: %v", o.inv.GPUs[0].MIG.Instances)
				}
				o.dra.unprepare(t, claim)
				if b.ledger.Held() || b.specOf(key(claim)) != nil {
					t.Errorf("held: %v", b.ledger.Allocations())
				}
			})
		})
	}
}

// A claim that is allocated anew while a container has what it had before: that keeps its GPU and
// its page until it ends, and no other container is created with it, also where the kubelet asks for
// the claim no more and where the agent starts anew. Then the claim's name stands for what it was
// given.
func TestContainersOfAClaimThatIsAllocatedAnew(t *testing.T) {
	for name, c := range map[string]struct {
		entry         string
		before, after string // devices
		restart, asks bool
		limit, then   uint64
	}{
		"another GPU":                      {"mode: whole", "gpu-00000000", "gpu-00000001", false, true, memcap.None, memcap.None},
		"another GPU, not asked for":       {"mode: whole", "gpu-00000000", "gpu-00000001", false, false, memcap.None, memcap.None},
		"another GPU, and another agent":   {"mode: whole", "gpu-00000000", "gpu-00000001", true, true, memcap.None, memcap.None},
		"another GPU, another agent alone": {"mode: whole", "gpu-00000000", "gpu-00000001", true, false, memcap.None, memcap.None},
		"another amount":                   {"mode: shared", "gpu-00000000-shared", "gpu-00000000-shared", false, true, 3 << 30, 1 << 30},
		"another amount, not asked for":    {"mode: shared", "gpu-00000000-shared", "gpu-00000000-shared", true, false, 3 << 30, 1 << 30},
		"another instance":                 {"mode: mig", "gpu-00000000-mig-3g40gb-4", "gpu-00000001-mig-1g10gb-6", false, true, memcap.None, memcap.None},
		"another instance, not asked for":  {"mode: mig", "gpu-00000000-mig-3g40gb-4", "gpu-00000001-mig-1g10gb-6", false, false, memcap.None, memcap.None},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(2), t.TempDir()
				if c.entry == "mode: mig" {
					o = migMachine(2, 0, 1)
				}
				o.dra = newScheduled()
				b := start(t, o, dir, throughDRA(c.entry))
				defer func() { b.end() }()
				time.Sleep(time.Minute)
				claim := o.dra.allocate(t, "a", c.before, 3)
				if _, err := o.dra.prepare(t.Context(), claim); err != nil {
					t.Fatal(err)
				}
				mine, second := key(claim), workload.Pod{Namespace: "ns", Name: "p", UID: "second"}
				container := node.Container{ID: "c", PodUID: "first", Namespace: "ns", Pod: "p", Name: "main", Running: true, CDI: []string{cdi.DeviceName("example.com", mine)}}
				o.with(func() { o.old = append(o.old, container) })
				time.Sleep(time.Minute)
				of := func(device string) int { return int(device[len("gpu-0000000")] - '0') }
				o.dra.Edit("ns", "a", func(k *agentkube.Claim) {
					k.Pods, k.Results[0].Device = []workload.Pod{second}, c.after
					if c.entry == "mode: shared" {
						k.Results[0].ShareID, k.Results[0].ConsumedCapacity = faked.Share("another"), consumed("memory", 1<<30)
					}
				})
				prepared := make(chan error, 1)
				if c.asks {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					if devices, err := o.dra.prepare(ctx, claim); err == nil {
						t.Errorf("its container runs: %+v", devices)
					}
					cancel()
				} else {
					o.dra.Refer(claim)
				}
				synctest.Wait()
				if c.restart {
					b.end()
					b = start(t, o, dir, throughDRA(c.entry))
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				a, ok := b.ledger.Get(mine)
				if bytes, err := o.caps.Limit(mine, uuid(of(c.before))); !ok || !a.On(uuid(of(c.before))) || b.specOf(mine) != nil || err != nil || bytes != c.limit {
					t.Errorf("its container runs: %+v, %v; the file stands: %v; the page allows %d, %v", a, ok, b.specOf(mine) != nil, bytes, err)
				}
				if text := fmt.Sprint(b.Status().Conditions); !strings.Contains(text, "ns/p (with ") {
					t.Errorf("the status says %s", text)
				}
				if c.asks {
					go func() { _, err := o.dra.prepare(t.Context(), claim); prepared <- err }()
					synctest.Wait()
				}
				o.with(func() { o.old = nil })
				began := time.Now()
				o.container <- node.ContainerEvent{Kind: node.EventStopped, Container: container}
				if c.asks {
					if err := <-prepared; err != nil {
						t.Error(err)
					}
				}
				synctest.Wait()
				a, ok = b.ledger.Get(mine)
				spec := b.specOf(mine)
				if !ok || !a.IsOpen() || !a.On(uuid(of(c.after))) || spec == nil || time.Since(began) > 0 {
					t.Fatalf("after %s: %+v, %v; the file stands: %v", time.Since(began), a, ok, spec != nil)
				}
				minor := o.inv.ByUUID(uuid(of(c.after))).Minor
				if path := spec.Devices[0].ContainerEdits.DeviceNodes[0].Path; path != fmt.Sprint("/dev/nvidia", minor) && !strings.HasPrefix(path, fmt.Sprintf("/dev/nvidia-caps/gpu%d-", minor)) {
					t.Errorf("the file has %s", path)
				}
				if bytes, err := o.caps.Limit(mine, uuid(of(c.after))); err != nil || bytes != c.then {
					t.Errorf("the page allows %d bytes, %v", bytes, err)
				}
			})
		})
	}
}

func placementOf(t *testing.T, profile string, start int) mig.Placement {
	t.Helper()
	n, err := mig.Parse(profile)
	if err != nil {
		t.Fatal(err)
	}
	return mig.Placement{Profile: n, Start: start, Size: 4}
}

// An agent that starts again has the claims that its predecessor had, from records, and from
// API server and kubelet where no record is left.
func TestClaimsOutliveTheAgent(t *testing.T) {
	for _, records := range []bool{true, false} {
		t.Run(fmt.Sprintf("records: %v", records), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(1), t.TempDir()
				o.dra = newScheduled()
				b := start(t, o, dir, throughDRA("mode: shared"))
				claim := o.dra.allocate(t, "a", "-shared", 3)
				before, err := o.dra.prepare(t.Context(), claim)
				if err != nil {
					t.Fatal(err)
				}
				b.end()
				if !records {
					dir = t.TempDir()
				}
				b = start(t, o, dir, throughDRA("mode: shared"))
				defer b.end()
				if a, ok := b.ledger.Get(key(claim)); !ok || !a.IsOpen() || a.Cap(uuid(0)) != piece.CapOf(3<<30) {
					t.Errorf("%+v, %v", a, ok)
				}
				again, err := o.dra.prepare(t.Context(), claim)
				if err != nil || fmt.Sprint(again) != fmt.Sprint(before) {
					t.Errorf("%v, %v; want %v", again, err, before)
				}
				o.dra.unprepare(t, claim)
				if b.ledger.Held() {
					t.Errorf("held: %v", b.ledger.Allocations())
				}
			})
		})
	}
}

// An agent that has started and has not heard how the GPUs are to be laid out refused claims
// as those of an older layout, and took all devices out of the slices but those that were
// held.
func TestClaimBeforeThePartitionIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := migMachine(1), t.TempDir()
		o.dra = newScheduled()
		file := throughDRA("mode: mig")
		b := start(t, o, dir, file)
		if _, err := o.dra.prepare(t.Context(), o.dra.allocate(t, "a", "-mig-1g10gb-0", 0)); err != nil {
			t.Fatal(err)
		}
		listed := func() (out string) {
			for _, s := range o.dra.Slices() {
				for _, d := range s.Spec.Devices {
					out += fmt.Sprintln(d.Name, d.Taints)
				}
			}
			return out
		}
		before := listed()
		claim := o.dra.allocate(t, "b", "-mig-3g40gb-4", 0)
		b.end()
		// Who ends orderly has tainted all; who was killed has not.
		o.dra.Meddle(func(all []resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			for i := range all {
				all[i].Spec.Devices = slices.Clone(all[i].Spec.Devices)
				for j := range all[i].Spec.Devices {
					all[i].Spec.Devices[j].Taints = nil
				}
			}
			return all
		})
		b = start(t, o, dir, "")
		defer b.end()
		var prepared error
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, prepared = o.dra.prepare(t.Context(), claim)
		}()
		synctest.Wait()
		if now := listed(); now != before {
			t.Errorf("the slices are\n%s\nand were\n%s", now, before)
		}
		b.SetFile("p.yaml", []byte(file))
		<-done
		if prepared != nil {
			t.Error(prepared)
		}
		synctest.Wait()
		if now := listed(); now != before {
			t.Errorf("then the slices are\n%s\nand were\n%s", now, before)
		}
	})
}

// What a claim has been allocated and nobody has prepared yet is held: an edit waits for
// it, and for the word of the API server.
func TestEditWaitsForWhoWasPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: mig, geometry: {3g.40gb: 2}"))
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		ops := func() (n int) { o.with(func() { n = len(o.ops) }); return n }
		cut := ops()
		claim := o.dra.allocate(t, "a", "-mig-3g40gb-4", 0)
		o.dra.Away(errors.New("no route to host"))
		b.SetFile("p.yaml", []byte(throughDRA("mode: mig, geometry: {7g.80gb: 1}")))
		time.Sleep(time.Minute)
		if synctest.Wait(); ops() != cut {
			t.Fatalf("nobody knows who was promised what: %v", o.ops[cut:])
		}
		o.dra.Away(nil)
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); slices.Contains(o.ops[cut:], "destroy 3g.40gb@4") || b.state() != "blocked" {
			t.Fatalf("%s: %v", b.state(), o.ops[cut:])
		}
		if _, err := o.dra.prepare(t.Context(), claim); err != nil {
			t.Fatal("it was promised:", err)
		}
		o.dra.Remove("ns", "a")
		o.dra.unprepare(t, claim)
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); b.state() != "applied" {
			t.Errorf("%s: %s", b.state(), b.message())
		}
		if _, d := o.dra.Device("-mig-7g80gb-0"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}
		if _, d := o.dra.Device("-mig-3g40gb-4"); d != nil {
			t.Errorf("nobody has it, and it stays: %+v", d)
		}
	})
}

// A GPU that is laid out anew without a change of the hardware waits for the API server's
// word on claims, too.
func TestPromisedShareWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: shared"))
		defer b.end()
		claim := o.dra.allocate(t, "a", "00000000-shared", 3)
		o.dra.Away(errors.New("no route to host"))
		b.SetFile("p.yaml", []byte(throughDRA("mode: whole")))
		time.Sleep(time.Minute)
		if synctest.Wait(); b.state() != "failed" || !strings.Contains(b.message(), "which claims they were allocated to") {
			t.Errorf("%s: %s", b.state(), b.message())
		}
		if g := b.Status().GPUs; g[0].Mode != "shared" || g[1].Mode != "shared" {
			t.Errorf("laid out anew, and nobody knows who was promised what: %+v", g)
		}
		o.dra.Away(nil)
		time.Sleep(2 * time.Minute)
		if _, err := o.dra.prepare(t.Context(), claim); err != nil {
			t.Fatal("it was promised:", err)
		}
		if g := b.Status().GPUs; g[0].Mode != "shared" || g[1].Mode != "whole" || b.state() != "blocked" {
			t.Errorf("%s: %+v", b.state(), g)
		}
	})
}

// A dynamic GPU that is to be MIG alone gives up its shares, although no instance goes.
func TestPromisedShareOfADynamicGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		claim := o.dra.allocate(t, "a", "-shared", 3)
		b.SetFile("p.yaml", []byte(throughDRA("mode: mig")))
		time.Sleep(time.Minute)
		if _, err := o.dra.prepare(t.Context(), claim); err != nil || b.state() != "blocked" {
			t.Errorf("it was promised: %v; the partition is %s", err, b.state())
		}
	})
}

// A dynamic GPU keeps its shares for a claim that waits for an instance's holder, although
// that one could stay as it is.
func TestPromisedShareBehindAHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		before := o.dra.allocate(t, "before", "-mig-3g40gb-4", 0)
		if _, err := o.dra.prepare(t.Context(), before); err != nil {
			t.Fatal(err)
		}
		o.dra.Remove("ns", "before") // by force
		claim := o.dra.allocate(t, "a", "-shared", 3)
		b.SetFile("p.yaml", []byte(throughDRA("mode: mig")))
		time.Sleep(time.Minute)
		if !strings.Contains(b.message(), "that other pods still hold") {
			t.Errorf("%s: %s", b.state(), b.message())
		}
		o.dra.unprepare(t, before)
		time.Sleep(time.Minute)
		if _, err := o.dra.prepare(t.Context(), claim); err != nil || b.state() != "blocked" {
			t.Errorf("it was promised: %v; the partition is %s: %s", err, b.state(), b.message())
		}
	})
}

// What was promised before the agent started anew is held, also where it finds another
// partition: nothing is laid out anew before the claims are known.
func TestPromisedIsHeldByASuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(1), t.TempDir()
		o.dra = newScheduled()
		b := start(t, o, dir, throughDRA("mode: shared"))
		claim := o.dra.allocate(t, "a", "00000000-shared", 3)
		b.end()
		b = start(t, o, dir, throughDRA("mode: whole"))
		defer b.end()
		time.Sleep(time.Minute)
		if _, err := o.dra.prepare(t.Context(), claim); err != nil || b.state() != "blocked" {
			t.Errorf("it was promised: %v; the partition is %s", err, b.state())
		}
	})
}

// The kubelet's checkpoint names a pod of another device plugin, and while the runtime is silent nobody
// knows whether that pod lives. The agent keeps such a GPU's layout until it knows which claims there
// are: what was promised through DRA before its start is prepared when the runtime and the API server
// answer again.
func TestPromiseOutlivesADoubt(t *testing.T) {
	for entry, suffix := range map[string]string{"mode: shared": "-shared", "mode: shared, replicas: 3": "-replicas", "mode: whole": ""} {
		for _, known := range []bool{false, true} { // the partition, before the first look
			t.Run(fmt.Sprint(entry, ", the partition is known: ", known), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					o, dir := newOutside(1), t.TempDir()
					o.dra = newScheduled()
					file := throughDRA(entry)
					b := start(t, o, dir, file)
					claim := o.dra.allocate(t, "a", "00000000"+suffix, map[string]int64{"-shared": 3}[suffix])
					b.end()
					o.dra.Away(errors.New("no route to host"))
					o.with(func() {
						o.entries = []node.Entry{theirs("uid-of-an-ended-pod", string(uuid(0)))}
						o.runtimeErr = errors.New("the runtime starts")
						o.unheard = !known
					})
					b = start(t, o, dir, map[bool]string{true: file}[known])
					defer b.end()
					time.Sleep(10 * time.Second)
					if mode := b.Status().GPUs[0].Mode; mode == "off" {
						t.Errorf("the GPU is %s, and a claim was promised some of it", mode)
					}
					b.node(nil, false)
					b.SetFile("p.yaml", []byte(file))
					time.Sleep(10 * time.Second)
					o.with(func() { o.runtimeErr = nil })
					o.dra.Away(nil)
					time.Sleep(time.Minute)
					if _, err := o.dra.prepare(t.Context(), claim); err != nil {
						t.Errorf("%v (the node: %s %q)", err, b.state(), b.message())
					}
				})
			})
		}
	}
}

// GPUs of the device plugin are laid out anew without a word of the API server on claims.
func TestClaimsHoldUpNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = newScheduled()
		file := func(mode string) string {
			return "version: v1\npartitions:\n  default:\n    - {devices: [0], api: dra, mode: shared}\n    - {devices: [1], mode: " + mode + "}\n"
		}
		b := start(t, o, t.TempDir(), file("shared"))
		defer b.end()
		o.dra.Away(errors.New("no route to host"))
		began := time.Now()
		b.SetFile("p.yaml", []byte(file("whole")))
		if synctest.Wait(); listed(b.front.Offer(), wholeResource) != "1" || time.Since(began) > 0 {
			t.Errorf("%s after %v: %s", listed(b.front.Offer(), wholeResource), time.Since(began), b.message())
		}
		if text := b.log.String(); strings.Contains(text, "through DRA") {
			t.Errorf("the API server was asked for claims:\n%s", text)
		}
	})
}

// A GPU speaks through one front-end at a time, and through the other when nobody has
// anything of it by way of the first.
func TestGPUChangesItsAPI(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		id := string(uuid(0)) + "::1"
		b.hold("train-3", memResource, id)
		time.Sleep(time.Minute)
		b.SetFile("p.yaml", []byte(throughDRA("mode: shared")))
		b.want("blocked", firstIsHeldByOne, "")
		if m := b.message(); !strings.Contains(m, "ns/train-3") {
			t.Errorf("message %q does not name the holder", m)
		}
		if _, d := o.dra.Device("00000000-shared"); d != nil {
			t.Errorf("the GPU speaks twice: %+v", d)
		}
		claim := o.dra.allocate(t, "a", "00000001-shared", 3)
		if _, err := o.dra.prepare(t.Context(), claim); err != nil {
			t.Fatal(err)
		}
		if g := b.Status().GPUs[1]; g.API != "dra" || g.Resource != "" || g.Total != 4 || g.Used != 3 || g.Free != 1 || len(g.Holders) != 1 || g.Holders[0].Units != 3 {
			t.Errorf("status says %+v", g)
		}
		if g := b.Status().GPUs[0]; g.API != "" || g.Total != 4 || g.Used != 1 {
			t.Errorf("status says %+v", g)
		}
		b.with(func() { b.holdings = nil })
		time.Sleep(2 * time.Minute)
		b.want("applied", "", "")
		if _, d := o.dra.Device("00000000-shared"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}

		// And back, while somebody has a claim.
		b.SetFile("p.yaml", []byte(allShared))
		b.want("blocked", "0.0 0.1 0.2 0.3", "")
		if m := b.message(); !strings.Contains(m, "GPU 1") {
			t.Errorf("message %q", m)
		}
		o.dra.Remove("ns", "a")
		o.dra.unprepare(t, claim)
		time.Sleep(2 * time.Minute)
		b.want("applied", fourUnits, "")
		if _, d := o.dra.Device("-shared"); d != nil {
			t.Errorf("nobody has it, and it stays: %+v", d)
		}
	})
}

// TestNobodyIsSentWhereNobodyPrepares: a pod whose claim is to be prepared while the agent is
// away waits for a minute or more. So an agent that ends taints its devices first, and
// prepares what was allocated before that; the next one has the taints away.
func TestNobodyIsSentWhereNobodyPrepares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(1), t.TempDir()
		o.dra = newScheduled()
		b := start(t, o, dir, throughDRA("mode: shared"))
		first, second := o.dra.allocate(t, "a", "-shared", 1), o.dra.allocate(t, "b", "-shared", 1)
		o.dra.Edit("ns", "b", func(c *agentkube.Claim) { c.Pods = nil }) // its pod is still to come
		taints := func(want string) {
			t.Helper()
			_, d := o.dra.Device("-shared")
			got := ""
			for _, taint := range d.Taints {
				got += taint.Key + "=" + taint.Value
			}
			if got != want {
				t.Errorf("taints %q, want %q", got, want)
			}
		}
		ended := make(chan struct{})
		go func() { defer close(ended); b.end() }()
		synctest.Wait()
		taints("example.com/withdrawn=AgentEnds")
		select {
		case <-ended:
			t.Fatal("the agent has ended, and a claim is not prepared")
		default:
		}
		if _, err := o.dra.prepare(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		<-ended
		if time.Since(began) >= leavePatience {
			t.Error("everything was prepared, and the agent stayed")
		}
		taints("example.com/withdrawn=AgentEnds")

		b = start(t, o, dir, "")
		prepared := make(chan error, 1)
		go func() { _, err := o.dra.prepare(t.Context(), second); prepared <- err }()
		b.SetFile("p.yaml", []byte(throughDRA("mode: shared")))
		if err := <-prepared; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		taints("")

		// Without an API server it ends all the same.
		o.dra.Away(errors.New("no API server"))
		began = time.Now()
		b.end()
		if took := time.Since(began); took > leavePatience {
			t.Errorf("it took %s to end", took)
		}
	})
}

// TestKubeletWaitsForTheDriverOfGPUs: the kubelet could call the driver only when an agent
// that had started had read its GPUs, and pods waited for a minute or more.
func TestKubeletWaitsForTheDriverOfGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(1), t.TempDir()
		o.dra = newScheduled()
		b := start(t, o, dir, throughDRA("mode: shared"))
		before := o.dra.driver()
		claim := o.dra.allocate(t, "a", "-shared", 1)
		o.dra.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = nil }) // its pod is still to come
		b.end()

		hang := make(chan struct{})
		o.with(func() { o.hang = hang })
		b = start(t, o, dir, "")
		defer b.end()
		if o.dra.driver() == before {
			t.Fatal("the kubelet has no driver to call while the GPUs are read")
		}
		prepared := make(chan error, 1)
		go func() { _, err := o.dra.prepare(t.Context(), claim); prepared <- err }()
		synctest.Wait()
		select {
		case err := <-prepared:
			t.Fatalf("prepared before the GPUs are known: %v", err)
		default:
		}
		o.with(func() { o.hang = nil })
		close(hang)
		b.SetFile("p.yaml", []byte(throughDRA("mode: shared")))
		if err := <-prepared; err != nil {
			t.Error(err)
		}
	})
}

// TestNameMovesAsAWhole: the scheduler sends pods that ask for a resource by its name to the
// device plugin for as long as the API shows something of it there, and the kubelet refuses
// pods that have a claim of that name for as long as the plugin lists a device. So a GPU
// that has moved to DRA is tainted until both are over.
func TestNameMovesAsAWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole}\n")
		defer b.end()
		shows := func(names ...string) {
			b.SetNode(agentkube.Node{Allocatable: names})
			synctest.Wait()
		}
		is := func(when, suffix, want string) {
			t.Helper()
			_, d := o.dra.Device(suffix)
			got := "none"
			if d != nil {
				got = ""
				for _, taint := range d.Taints {
					got += taint.Key + "=" + taint.Value
				}
			}
			if got != want {
				t.Errorf("%s: device %s has the taints %q, want %q", when, suffix, got, want)
			}
		}
		const inUse = "example.com/withdrawn=NameInUse"
		shows("example.com/gpu", "example.com/other")
		b.hold("train-3", wholeResource, string(uuid(0)))
		time.Sleep(time.Minute)
		b.SetFile("p.yaml", []byte(throughDRA("mode: whole")))
		synctest.Wait()
		time.Sleep(5 * time.Minute)
		is("a pod holds another GPU by that name", "gpu-00000001", inUse)
		is("a pod holds it through the device plugin", "gpu-00000000", "none")
		b.with(func() { b.holdings = nil })
		time.Sleep(30 * time.Second)
		is("the kubelet lists devices of that name", "gpu-00000001", inUse)
		shows("example.com/other")
		is("the API shows none, the kubelet lists them", "gpu-00000001", inUse)
		shows("example.com/gpu", "example.com/other")
		time.Sleep(5 * time.Minute)
		is("the API is late", "gpu-00000001", inUse)
		is("the API is late", "gpu-00000000", inUse)
		shows("example.com/other")
		is("nobody has the name", "gpu-00000001", "")
		is("nobody has the name", "gpu-00000000", "")
	})
}

// A MIG GPU that changes its API under load hurts nobody: instances that pods or claims have
// stay, and the GPU takes nobody by the other API before they have ended. So it is there and
// back.
func TestMIGGPUChangesItsAPIUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		o.dra = newScheduled()
		file := func(api string) string {
			return "version: v1\npartitions:\n  default:\n    - {devices: all, mode: mig, api: " + api + "}\n"
		}
		b := start(t, o, t.TempDir(), file("device-plugin"))
		defer b.end()
		stands := func(when string, i int, profile string, at int) (in gpu.Instance) {
			t.Helper()
			o.with(func() {
				for _, s := range o.inv.GPUs[i].MIG.Instances {
					if s.Profile == profile && s.Start == at {
						in = s
					}
				}
			})
			if in.UUID == "" {
				t.Errorf("%s: GPU %d has no %s@%d", when, i, profile, at)
			}
			return in
		}
		settle := func() { time.Sleep(2 * time.Minute); synctest.Wait() }
		// prepares says whether a claim gets a device, if the scheduler gives it one.
		prepares := func(name, suffix string) (kubelet.Claim, bool) {
			t.Helper()
			c, err := o.dra.Schedule("ns", name, faked.Request{Name: "gpu", Fits: faked.Named(suffix)})
			if err != nil {
				return c, false
			}
			if _, err := o.dra.prepare(t.Context(), c); err != nil {
				t.Errorf("claim %s is allocated, and cannot be prepared: %v", name, err)
			}
			return c, true
		}
		settle()
		b.hold("train-3", large, migID(0, "3g.40gb@4"))
		if err := b.source(large).Prepare(t.Context(), []string{migID(0, "3g.40gb@4")}); err != nil {
			t.Fatal(err)
		}
		held := stands("a pod has it", 0, "3g.40gb", 4)
		b.SetFile("p.yaml", []byte(file("dra")))
		for n := range 5 { // pods with claims come all the time
			settle()
			if _, ok := prepares(fmt.Sprint("early-", n), "00000000-mig-1g10gb-0"); ok {
				t.Error("the GPU takes claims while a pod has an instance by the device plugin")
			}
		}
		if in := stands("the change waits", 0, "3g.40gb", 4); in.GI != held.GI || b.state() != "blocked" {
			t.Errorf("%s: %+v, was %+v", b.state(), in, held)
		}
		b.with(func() { b.holdings = nil })
		settle()
		settle()
		first, one := prepares("first", "00000000-mig-3g40gb-4")
		second, two := prepares("second", "00000001-mig-1g10gb-6")
		if !one || !two || b.state() != "applied" {
			t.Fatalf("nobody has anything by the device plugin, and claims find nothing: %s: %s", b.state(), b.message())
		}

		// And back, while claims are held.
		was, also := stands("a claim has it", 0, "3g.40gb", 4), stands("a claim has it", 1, "1g.10gb", 6)
		b.SetFile("p.yaml", []byte(file("device-plugin")))
		for n := range 5 {
			settle()
			if _, ok := prepares(fmt.Sprint("late-", n), "-mig-1g10gb-0"); ok {
				t.Error("a GPU takes claims that is to take none any more")
			}
			for _, r := range b.front.Offer().Resources {
				for _, d := range r.Devices {
					if d.Healthy {
						t.Errorf("%s is on offer to the kubelet while claims have the GPUs", d.ID)
					}
				}
			}
		}
		if stands("the change waits", 0, "3g.40gb", 4).GI != was.GI || stands("the change waits", 1, "1g.10gb", 6).GI != also.GI || b.state() != "blocked" {
			t.Errorf("%s: the instances of claims were made anew", b.state())
		}
		for _, c := range []kubelet.Claim{first, second} {
			if b.specOf(key(c)) == nil {
				t.Errorf("the file of %s is gone", c.Name)
			}
			o.dra.Remove("ns", c.Name)
			o.dra.unprepare(t, c)
		}
		settle()
		if n := len(o.dra.Slices()); n > 0 || b.state() != "applied" {
			t.Errorf("%s: %s; %d slices are left", b.state(), b.message(), n)
		}
		b.hold("train-4", large, migID(1, "3g.40gb@4"))
		if err := b.source(large).Prepare(t.Context(), []string{migID(1, "3g.40gb@4")}); err != nil {
			t.Error(err)
		}
	})
}

// The UUIDs of MIG instances that stand as the partition says are published. Those on demand
// are not: they come and go with claims, and no claim writes a slice.
func TestUUIDsOfInstances(t *testing.T) {
	for entry, want := range map[string]string{"mode: mig, geometry: {3g.40gb: 2}": "MIG-0-3g.40gb-4-0", "mode: mig": "", "mode: dynamic": ""} {
		t.Run(entry, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := migMachine(1, 0)
				o.dra = newScheduled()
				b := start(t, o, t.TempDir(), throughDRA(entry))
				defer b.end()
				time.Sleep(time.Minute)
				synctest.Wait()
				before := o.dra.Writes()
				if _, err := o.dra.prepare(t.Context(), o.dra.allocate(t, "a", "-mig-3g40gb-4", 0)); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				got := ""
				if _, d := o.dra.Device("-mig-3g40gb-4"); d.Attributes["uuid"].StringValue != nil {
					got = *d.Attributes["uuid"].StringValue
				}
				if got != want || o.dra.Writes() != before {
					t.Errorf("UUID %q, want %q; %d writes", got, want, o.dra.Writes()-before)
				}
			})
		})
	}
}

// A claim's time slice is the GPU's before a container of it may start, whatever the partition
// says, and as long as the claim has the GPU; also across a start of the agent.
func TestTimeSliceOfAClaim(t *testing.T) {
	for name, c := range map[string]struct{ entry, device, after string }{
		"shared":               {"mode: shared", "-shared", "default"},
		"replicas":             {"mode: shared, replicas: 2", "-replicas", "default"},
		"whole":                {"mode: whole", "gpu-00000000", "default"},
		"the partition's goes": {"mode: shared, timeSlice: short", "-shared", "short"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(1), t.TempDir()
				o.dra = newScheduled()
				b := start(t, o, dir, throughDRA(c.entry))
				defer func() { b.end() }()
				claim := func(name string) kubelet.Claim {
					gib := int64(0)
					if c.device == "-shared" {
						gib = 1
					}
					claim := o.dra.allocate(t, name, c.device, gib)
					o.dra.Edit("ns", name, func(k *agentkube.Claim) {
						k.Configs = configured(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`)
					})
					return claim
				}
				is := func(when, want string) {
					t.Helper()
					synctest.Wait()
					o.with(func() {
						if got := string(o.slices[uuid(0)]); got != want {
							t.Errorf("%s: the time slice is %q, want %q", when, got, want)
						}
					})
				}
				// While it cannot be set, the pod waits, and is told for what.
				o.with(func() { o.sliceErr = fmt.Errorf("no root: %w", gpu.ErrNoPermission) })
				first := claim("first")
				if _, err := o.dra.prepare(t.Context(), first); err == nil || !strings.Contains(err.Error(), "the time slice of its GPU is not set yet") || b.specOf(key(first)) != nil {
					t.Errorf("%v", err)
				}
				o.with(func() { o.sliceErr = nil })
				if _, err := o.dra.prepare(t.Context(), first); err != nil {
					t.Fatal(err)
				}
				is("prepared", "long")
				b.end()
				asks := o.sliceAsks
				b = start(t, o, dir, throughDRA(c.entry))
				time.Sleep(time.Minute)
				is("after a start", "long")
				if o.sliceAsks > asks+1 {
					t.Errorf("after a start the driver was asked %d times", o.sliceAsks-asks)
				}
				o.dra.Remove("ns", "first")
				o.dra.unprepare(t, first)
				time.Sleep(time.Minute)
				is("the claim has ended", c.after)

				// What a GPU cannot have keeps nobody off.
				o.with(func() { o.sliceErr = fmt.Errorf("no tool: %w", gpu.ErrNotSupported) })
				if _, err := o.dra.prepare(t.Context(), claim("second")); err != nil {
					t.Error(err)
				}
				if synctest.Wait(); !slices.ContainsFunc(b.Status().Conditions, func(k status.Condition) bool { return k.Reason == status.TimeSliceUnsupported }) {
					t.Errorf("the status says %+v", b.Status().Conditions)
				}
			})
		})
	}
}

// A pod whose claim was given a placement that the driver refuses to make waited there without
// end, while others were free. After three refusals the claim is one that can never be
// prepared, and no other is sent there, also when its neighbours can be made.
func TestClaimOfAPlacementThatTheDriverRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		says error
		ends bool // the claim's pod
	}{
		"no room":        {gpu.ErrNoRoom, true},
		"an argument":    {gpu.ErrInvalid, true},
		"unsaid":         {gpu.ErrDriver, true},
		"it hangs":       {gpu.ErrTimeout, false},
		"a reset is due": {gpu.ErrLost, false},
		"loaded anew":    {gpu.ErrNoDriver, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := migMachine(1, 0)
				o.dra = newScheduled()
				o.refuses = map[string]error{"create 3g.40gb@4": fmt.Errorf("create a GPU instance: %w", c.says)}
				b := start(t, o, t.TempDir(), throughDRA("mode: mig"))
				defer b.end()
				b.with(func() { o.pods = append(o.pods, workload.Pod{Namespace: "ns", Name: "p"}) })
				ends := func() bool {
					_, d := o.dra.Device("-mig-3g40gb-4")
					return slices.ContainsFunc(d.Taints, func(t resourcev1.DeviceTaint) bool { return t.Effect == agentkube.NoExecute })
				}
				claim := o.dra.allocate(t, "a", "-mig-3g40gb-4", 0)
				o.dra.Edit("ns", "a", func(k *agentkube.Claim) { k.Pods = []workload.Pod{{Namespace: "ns", Name: "p", UID: "uid-p"}} })
				for range 2 { // the kubelet comes again
					_, err := o.dra.prepare(t.Context(), claim)
					if err == nil || !strings.Contains(err.Error(), c.says.Error()) || strings.Contains(err.Error(), "make the claim anew") != c.ends {
						t.Errorf("%v", err)
					}
				}
				if synctest.Wait(); b.ledger.Held() == c.ends || o.dra.taint(t, "-mig-3g40gb-4") != "GPUInstanceFailed" {
					t.Errorf("held: %+v; withdrawn because of %q", b.ledger.Allocations(), o.dra.taint(t, "-mig-3g40gb-4"))
				}
				time.Sleep(40 * time.Second) // half a minute, and a few for the tries
				if synctest.Wait(); ends() != c.ends {
					t.Errorf("its pod is ended: %v, want %v", ends(), c.ends)
				}
				o.dra.Remove("ns", "a")
				o.dra.unprepare(t, claim)
				other := o.dra.allocate(t, "b", "-mig-3g40gb-0", 0)
				if _, err := o.dra.prepare(t.Context(), other); err != nil {
					t.Error(err)
				}
				if synctest.Wait(); (o.dra.taint(t, "-mig-3g40gb-4") == "GPUInstanceFailed") != c.ends || ends() {
					t.Errorf("when another one was made, it is withdrawn because of %q, and ends pods: %v", o.dra.taint(t, "-mig-3g40gb-4"), ends())
				}
				o.with(func() { o.refuses = nil })
				time.Sleep(failingFor)
				if synctest.Wait(); o.dra.taint(t, "-mig-3g40gb-4") != "" {
					t.Errorf("in time it is withdrawn because of %q", o.dra.taint(t, "-mig-3g40gb-4"))
				}
				if _, err := o.dra.prepare(t.Context(), o.dra.allocate(t, "c", "-mig-3g40gb-4", 0)); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// firstIsHeldByOne is what the kubelet is told while unit 1 of GPU 0 is held and all is
// withdrawn.
const firstIsHeldByOne = "0.0x 0.1~ 0.2x 0.3x 1.0x 1.1x 1.2x 1.3x"

// A fault of a GPU is a taint, and an idle hour writes nothing.
func TestFaultIsATaint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: shared"))
		defer b.end()
		o.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 79}
		synctest.Wait()
		if _, d := o.dra.Device("00000001-shared"); d == nil || len(d.Taints) != 1 || d.Taints[0].Key != "example.com/unhealthy" {
			t.Errorf("%+v", d)
		}
		if _, d := o.dra.Device("00000000-shared"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		before := o.dra.Writes()
		time.Sleep(time.Hour)
		if synctest.Wait(); o.dra.Writes() != before {
			t.Errorf("%d writes in an idle hour", o.dra.Writes()-before)
		}
	})
}
