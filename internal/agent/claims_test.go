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
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

const draDriver = "gpus.example.com"

// scheduled is an API server with claims and slices, and the kubelet's account of the
// claims.
type scheduled struct {
	mu       sync.Mutex
	claims   []kube.Claim         // guarded by mu
	slices   []kube.ResourceSlice // guarded by mu
	writes   int                  // guarded by mu
	away     error                // guarded by mu: why the API server does not answer
	prepared []node.PreparedClaim // guarded by mu
	front    *dra.FrontEnd        // guarded by mu: that the kubelet calls
}

func (s *scheduled) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *scheduled) Claim(_ context.Context, _, namespace, name string) (*kube.Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.claims {
		if c.Namespace == namespace && c.Name == name && s.away == nil {
			return &c, nil
		}
	}
	if s.away != nil {
		return nil, s.away
	}
	return nil, fmt.Errorf("claim %s/%s: %w", namespace, name, gpu.ErrNotFound)
}

func (s *scheduled) Claims(context.Context, string) ([]kube.Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.claims), s.away
}

func (s *scheduled) SetClaimDevices(context.Context, string, *kube.Claim, []kube.ClaimDevice) error {
	return nil
}

func (s *scheduled) DRAState() (node.DRAState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return node.DRAState{Claims: slices.Clone(s.prepared)}, nil
}

func (s *scheduled) PublishSlices(_ context.Context, _ string, want []kube.ResourceSlice) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away == nil {
		s.slices = want
		s.writes++
	}
	return s.away
}

func (s *scheduled) WatchSlices(ctx context.Context, _ string, _ func()) error {
	<-ctx.Done()
	return ctx.Err()
}

// Run is the kubelet that has the driver.
func (s *scheduled) Run(ctx context.Context) error {
	s.with(func() { s.front.Publisher().Registered(true) })
	<-ctx.Done()
	return ctx.Err()
}

// worlds are those of an agent.
func (s *scheduled) worlds() *DRA {
	if s == nil {
		return nil
	}
	return &DRA{API: s, Kubelet: s, Serve: func(f *dra.FrontEnd) (DRADriver, error) {
		s.with(func() { s.front = f })
		return s, nil
	}}
}

// device is what the slices have of a device, by the end of its name.
func (s *scheduled) device(suffix string) (pool string, d *kube.PoolDevice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.slices {
		for j := range s.slices[i].Devices {
			if strings.HasSuffix(s.slices[i].Devices[j].Name, suffix) {
				return s.slices[i].Pool.Name, &s.slices[i].Devices[j]
			}
		}
	}
	return "", nil
}

// allocate makes a claim that has a device, of a memory of so many GiB if it is shared.
func (s *scheduled) allocate(t *testing.T, name, suffix string, gib kube.Quantity) kubelet.Claim {
	t.Helper()
	pool, d := s.device(suffix)
	if d == nil {
		t.Fatalf("no slice has a device %s", suffix)
	}
	r := kube.Result{Request: "gpu", Driver: draDriver, Pool: pool, Device: d.Name}
	if gib > 0 {
		r.Share, r.Capacity = "share-"+name, map[string]kube.Quantity{"memory": gib << 30}
	}
	c := kube.Claim{Namespace: "ns", Name: name, UID: "uid-" + name, Results: []kube.Result{r}}
	s.with(func() { s.claims = append(s.claims, c) })
	return kubelet.Claim{Namespace: "ns", Name: name, UID: c.UID}
}

func (s *scheduled) remove(name string) {
	s.with(func() {
		s.claims = slices.DeleteFunc(s.claims, func(c kube.Claim) bool { return c.Name == name })
	})
}

func (s *scheduled) prepare(ctx context.Context, c kubelet.Claim) ([]kubelet.Device, error) {
	s.mu.Lock()
	f := s.front
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, kubelet.Patience)
	defer cancel()
	return f.Prepare(ctx, c)
}

func (s *scheduled) unprepare(t *testing.T, c kubelet.Claim) {
	t.Helper()
	s.mu.Lock()
	f := s.front
	s.mu.Unlock()
	if err := f.Unprepare(t.Context(), c); err != nil {
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
	spec, err := b.gates.files.Read(key)
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
		gib           kube.Quantity
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
				o.dra = &scheduled{}
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
					limit = memcap.Replica(d, 4)
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
				o.dra = &scheduled{}
				b := start(t, o, dir, throughDRA("mode: shared"))
				claim := o.dra.allocate(t, "a", "-shared", 3)
				before, err := o.dra.prepare(t.Context(), claim)
				if err != nil {
					t.Fatal(err)
				}
				b.end()
				o.dra.with(func() { o.dra.prepared = []node.PreparedClaim{{Namespace: "ns", Name: "a", UID: claim.UID}} })
				if !records {
					dir = t.TempDir()
				}
				b = start(t, o, dir, throughDRA("mode: shared"))
				defer b.end()
				if a, ok := b.ledger.Get(key(claim)); !ok || !a.IsOpen() || a.Cap(uuid(0)) != ledger.CapOf(3<<30) {
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

// What a claim has been allocated and nobody has prepared yet is held: an edit waits for
// it, and for the word of the API server.
func TestEditWaitsForWhoWasPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.dra = &scheduled{}
		b := start(t, o, t.TempDir(), throughDRA("mode: mig, geometry: {3g.40gb: 2}"))
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		ops := func() (n int) { o.with(func() { n = len(o.ops) }); return n }
		cut := ops()
		claim := o.dra.allocate(t, "a", "-mig-3g40gb-4", 0)
		o.dra.with(func() { o.dra.away = errors.New("no route to host") })
		b.SetFile("p.yaml", []byte(throughDRA("mode: mig, geometry: {7g.80gb: 1}")))
		time.Sleep(time.Minute)
		if synctest.Wait(); ops() != cut {
			t.Fatalf("nobody knows who was promised what: %v", o.ops[cut:])
		}
		o.dra.with(func() { o.dra.away = nil })
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); slices.Contains(o.ops[cut:], "destroy 3g.40gb@4") || b.state() != "blocked" {
			t.Fatalf("%s: %v", b.state(), o.ops[cut:])
		}
		if _, err := o.dra.prepare(t.Context(), claim); err != nil {
			t.Fatal("it was promised:", err)
		}
		o.dra.remove("a")
		o.dra.unprepare(t, claim)
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); b.state() != "applied" {
			t.Errorf("%s: %s", b.state(), b.message())
		}
		if _, d := o.dra.device("-mig-7g80gb-0"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}
		if _, d := o.dra.device("-mig-3g40gb-4"); d != nil {
			t.Errorf("nobody has it, and it stays: %+v", d)
		}
	})
}

// GPUs of the device plugin are laid out anew without a word of the API server on claims.
func TestClaimsHoldUpNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = &scheduled{}
		file := func(mode string) string {
			return "version: v1\npartitions:\n  default:\n    - {devices: [0], api: dra, mode: shared}\n    - {devices: [1], mode: " + mode + "}\n"
		}
		b := start(t, o, t.TempDir(), file("shared"))
		defer b.end()
		o.dra.with(func() { o.dra.away = errors.New("no route to host") })
		began := time.Now()
		b.SetFile("p.yaml", []byte(file("whole")))
		if synctest.Wait(); listed(b.front.Offer(), names.Whole) != "1" || time.Since(began) > 0 {
			t.Errorf("%s after %v: %s", listed(b.front.Offer(), names.Whole), time.Since(began), b.message())
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
		o.dra = &scheduled{}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		id := string(uuid(0)) + "::1"
		b.hold("train-3", names.Units, id)
		time.Sleep(time.Minute)
		b.SetFile("p.yaml", []byte(throughDRA("mode: shared")))
		b.want("blocked", firstIsHeldByOne, "")
		if m := b.message(); !strings.Contains(m, "ns/train-3") {
			t.Errorf("message %q does not name the holder", m)
		}
		if _, d := o.dra.device("00000000-shared"); d != nil {
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
		if _, d := o.dra.device("00000000-shared"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}

		// And back, while somebody has a claim.
		b.SetFile("p.yaml", []byte(allShared))
		b.want("blocked", "0.0 0.1 0.2 0.3", "")
		if m := b.message(); !strings.Contains(m, "GPU 1") {
			t.Errorf("message %q", m)
		}
		o.dra.remove("a")
		o.dra.unprepare(t, claim)
		time.Sleep(2 * time.Minute)
		b.want("applied", fourUnits, "")
		if _, d := o.dra.device("-shared"); d != nil {
			t.Errorf("nobody has it, and it stays: %+v", d)
		}
	})
}

// firstIsHeldByOne is what the kubelet is told while unit 1 of GPU 0 is held and all is
// withdrawn.
const firstIsHeldByOne = "0.0x 0.1~ 0.2x 0.3x 1.0x 1.1x 1.2x 1.3x"

// A fault of a GPU is a taint, and an idle hour writes nothing.
func TestFaultIsATaint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.dra = &scheduled{}
		b := start(t, o, t.TempDir(), throughDRA("mode: shared"))
		defer b.end()
		o.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 79}
		synctest.Wait()
		if _, d := o.dra.device("00000001-shared"); d == nil || len(d.Taints) != 1 || d.Taints[0].Key != "example.com/unhealthy" {
			t.Errorf("%+v", d)
		}
		if _, d := o.dra.device("00000000-shared"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		before := o.dra.writes
		time.Sleep(time.Hour)
		if synctest.Wait(); o.dra.writes != before {
			t.Errorf("%d writes in an idle hour", o.dra.writes-before)
		}
	})
}
