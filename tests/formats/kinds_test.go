// SPDX-License-Identifier: Apache-2.0

package formats

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/mig"
)

const (
	domain = "example.com"
	card   = gpu.UUID("GPU-11111111-2222-3333-4444-555555555555")
)

// kinds are all kinds, in the order in which they are written and read. The agent's store comes first: others
// have folders in its directory.
var kinds = []kind{
	{"state", writeState, readState,
		[]reflect.Type{reflect.TypeFor[state.Document](), reflect.TypeFor[ledger.Record]()}},
	{"usage", writeUsage, readUsage, []reflect.Type{reflect.TypeFor[usage.Record]()}},
	{"park", writePark, readPark, []reflect.Type{reflect.TypeFor[park.Record]()}},
	{"mps", writeMPS, readMPS, nil},
	{"outcomes", writeOutcomes, readOutcomes, []reflect.Type{reflect.TypeFor[lib.Outcome]()}},
	{"cdi", writeCDI, readCDI, nil},
	{"gpunode", writeGPUNode, readGPUNode, []reflect.Type{reflect.TypeFor[gpunode.Status]()}},
	{"partitions", writePartitions, readPartitions, nil},
}

// complains is a logger that fails the test on a warning.
func complains(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(failing{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type failing struct{ t *testing.T }

func (f failing) Write(line []byte) (int, error) {
	f.t.Errorf("a reader complains: %s", line)
	return len(line), nil
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func instance(t *testing.T, profile string, start, size, ci int) mig.Placement {
	t.Helper()
	name, err := mig.Parse(profile)
	must(t, err)
	return mig.Placement{Profile: name, Start: start, Size: size, CI: ci}
}

// pieces are a piece of each kind, with something in each of its fields.
func pieces(t *testing.T) []piece.Piece {
	t.Helper()
	all := []piece.Piece{piece.Whole{},
		piece.Units{Set: piece.Set{{First: 0, Last: 3}, {First: 7, Last: 7}}, Unit: 1024},
		piece.Replica{Number: 2, Of: 4}, piece.Placement{At: instance(t, "1c.3g.40gb", 4, 4, 1)}}
	for i, k := range piece.Kinds() {
		if i >= len(all) || all[i].Kind() != k {
			t.Fatalf("the samples lack a piece of kind %s in its place", k)
		}
	}
	return all
}

// allocations are one of each kind of piece through each front-end, in each tier that can be.
func allocations(t *testing.T) (all []state.Allocation) {
	t.Helper()
	for i, p := range pieces(t) {
		g := ledger.Grant{GPU: card, Piece: p, Cap: piece.NoCap}
		if p.Kind().Shared() {
			g.Cap, g.TimeSlice, g.Compute = piece.CapOf(5<<30), gpu.TimeSliceShort, compute.Share{Ceiling: 26}
		}
		watch := g
		watch.NoRoom, watch.TimeSlice, watch.Compute = true, "", compute.Share{}
		unknown := g
		unknown.Cap = piece.Cap{}
		resource := domain + "/gpu-" + string(p.Kind())
		uid, request := "7d1e2f3a-0000-1111-2222-33334444000"+string(rune('0'+i)), "gpu"
		ref, err := json.Marshal(map[string]any{"namespace": "work", "name": "claim", "uid": uid, "request": request,
			"n": 0, "of": 1, "pool": "node/card", "device": "gpu-0", "share": "5f8a0000-0000-1111-2222-333344440000"})
		must(t, err)
		for j, r := range []ledger.Record{
			{Owner: ledger.DevicePlugin, Resource: resource, Grants: []ledger.Grant{g}},
			{Owner: ledger.DevicePlugin, Tier: ledger.Spot, Resource: resource + ".spot", Grants: []ledger.Grant{g}},
			{Owner: ledger.DevicePlugin, Resource: resource, Grants: []ledger.Grant{unknown}},
			{Owner: ledger.DRA, Resource: "gpus." + domain, Ref: string(ref), Grants: []ledger.Grant{watch}},
		} {
			key := cdi.Key(r.Resource, []string{string(rune('a' + j))})
			if r.Owner == ledger.DRA {
				key = cdi.Key("claim/"+uid, []string{request + "#0"})
			}
			given := when.Add(time.Duration(4*i+j) * time.Second)
			all = append(all, state.Allocation{Key: key, Record: r, Allocated: given})
		}
	}
	return all
}

// samples are values of types in which not everything goes.
func samples(t *testing.T) map[reflect.Type]any {
	t.Helper()
	at := instance(t, "3g.40gb", 4, 4, 0)
	return map[reflect.Type]any{
		reflect.TypeFor[gpu.UUID]():        card,
		reflect.TypeFor[time.Time]():       when,
		reflect.TypeFor[mig.Placement]():   at,
		reflect.TypeFor[mig.Name]():        at.Profile,
		reflect.TypeFor[piece.Kind]():      piece.KindUnits,
		reflect.TypeFor[piece.Set]():       piece.Set{{First: 0, Last: 3}},
		reflect.TypeFor[piece.Piece]():     pieces(t)[1],
		reflect.TypeFor[ledger.FrontEnd](): ledger.DRA,
		reflect.TypeFor[ledger.Tier]():     ledger.Spot,
		reflect.TypeFor[gpu.TimeSlice]():   gpu.TimeSliceShort,
	}
}

func writeState(t *testing.T, to string) {
	doc := filled[state.Document](samples(t))
	s, err := state.Open(filepath.Join(abs(t, to), "state"), complains(t))
	must(t, err)
	must(t, s.Save(doc))
	for _, a := range allocations(t) {
		must(t, s.Append(a))
	}
	must(t, s.Close())
}

func readState(t *testing.T, from string) any {
	s, err := state.Open(filepath.Join(abs(t, from), "state"), complains(t))
	must(t, err)
	defer s.Close()
	return map[string]any{"document": s.Document(), "allocations": s.Allocations()}
}

func writeUsage(t *testing.T, to string) {
	s, err := segments.Open(filepath.Join(to, "state", "usage"), segments.Options{})
	must(t, err)
	kept := samples(t)
	line := func(change func(r *usage.Record)) []byte {
		r := filled[usage.Record](kept)
		change(&r)
		out, err := r.Append(nil)
		must(t, err)
		return out
	}
	began := line(func(r *usage.Record) { r.Event, r.Book.Version = usage.Began, usage.Version })
	must(t, s.Next(began))
	for _, e := range []usage.Event{usage.Started, usage.Allocated, usage.Named, usage.Used, usage.Yielded,
		usage.Restored, usage.Released, usage.Refused, usage.Cut, usage.Killed, usage.Evicted, usage.Lost, usage.Left} {
		for i, p := range pieces(t) {
			kept[reflect.TypeFor[piece.Piece]()] = p
			_, err := s.Append(line(func(r *usage.Record) {
				r.Event, r.Time, r.Book = e, when.Add(time.Duration(i)*time.Second), nil
			}))
			must(t, err)
		}
	}
	must(t, s.Next(began)) // the first segment is packed
	must(t, s.Tidy())
	must(t, s.Close())
}

func readUsage(t *testing.T, from string) any {
	var all []*usage.Record
	folder := filepath.Join(from, "state", "usage")
	must(t, segments.Read(folder, time.Time{}, func(r *usage.Record) { all = append(all, r) }))
	// The agent goes on writing there.
	s, err := segments.Open(folder, segments.Options{})
	must(t, err)
	must(t, s.Close())
	return all
}

func writePark(t *testing.T, to string) {
	for _, phase := range []park.Phase{park.Locking, park.Saving, park.Parked, park.Restoring, park.Broken} {
		r := filled[park.Record](samples(t))
		r.Version, r.Key, r.Phase = 1, "key-"+string(phase), phase
		data, err := json.Marshal(r)
		must(t, err)
		write(t, filepath.Join(to, "state", "park", r.Key+".json"), data)
	}
}

func readPark(t *testing.T, from string) any {
	k, err := park.Open(park.Options{Dir: filepath.Join(from, "state"), Logger: complains(t)})
	must(t, err)
	defer k.Close()
	return k.Sets()
}

// wants is what MPS daemons shall be.
var wants = []mps.Want{{GPU: card, Percent: 26, Serve: true, Retire: mps.Identity{PID: 12, Start: 34}, EndOrphans: true}}

func supervisor(t *testing.T, folder string) *mps.Supervisor {
	t.Helper()
	s, err := mps.New(mps.Options{StateDir: filepath.Join(abs(t, folder), "state"), Logger: complains(t)})
	must(t, err)
	return s
}

func writeMPS(t *testing.T, to string) {
	s := supervisor(t, to)
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // it has no keepers, which would answer
	_, err := s.Sync(ctx, wants)
	must(t, err)
	must(t, s.Close())
	must(t, os.Remove(filepath.Join(to, "state", "mps", "lock")))
}

// readMPS reads strictly: a supervisor says so if the file has a field that it does not know.
func readMPS(t *testing.T, from string) any {
	s := supervisor(t, from)
	before := s.State()
	must(t, s.Close())
	file := filepath.Join(from, "state", "mps", "want.json")
	var said struct{ Want []mps.Want }
	must(t, json.Unmarshal(read(t, file), &said))
	return map[string]any{"known": before.Known, "daemons": before.Daemons, "want": said.Want}
}

// writeOutcomes writes what the hook hold writes, which is a program in C and needs a driver: TestHold of
// pkg/memcap/lib has the program and this reader.
func writeOutcomes(t *testing.T, to string) {
	const good = "limit v1\ncgroup /kubepods/pod1/c1\ngpu " + string(card) + " 5368709120 6442450944 6442450944\ndone\n"
	const bad = "limit v1\ncgroup /kubepods/pod1/c2\nfailed the driver did not confirm the limit\n"
	for name, text := range map[string]string{"c1/aaaaaaaaaaaaaaaa": good, "c2/bbbbbbbbbbbbbbbb": bad} {
		write(t, filepath.Join(lib.OutcomesDir(filepath.Join(to, "state")), name), []byte(text))
	}
}

func readOutcomes(t *testing.T, from string) any {
	all, err := lib.OpenOutcomes(filepath.Join(from, "state")).All()
	must(t, err)
	for i := range all {
		all[i].At = when // the file's own time, which git does not keep
	}
	slices.SortFunc(all, func(a, b lib.Outcome) int { return strings.Compare(a.Key, b.Key) })
	return all
}

func writeCDI(t *testing.T, to string) {
	must(t, os.MkdirAll(filepath.Join(to, "cdi"), 0o755))
	d, err := dir.Open(filepath.Join(abs(t, to), "cdi"), domain)
	must(t, err)
	for _, a := range allocations(t) {
		text, err := json.Marshal(a.Record)
		must(t, err)
		spec := &specs.Spec{Kind: domain + "/gpu", Devices: []specs.Device{{Name: a.Key,
			ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0"}}}}}}
		must(t, cdi.Record(spec, domain, string(text)))
		must(t, d.Write(a.Key, spec))
	}
}

func readCDI(t *testing.T, from string) any {
	d, err := dir.Open(filepath.Join(abs(t, from), "cdi"), domain)
	must(t, err)
	keys, err := d.List()
	must(t, err)
	out := map[string]any{}
	for _, key := range keys {
		spec, err := d.Read(key)
		must(t, err)
		of, text, err := cdi.ReadRecord(spec, domain)
		must(t, err)
		r, err := ledger.ReadRecord(text)
		must(t, err)
		out[of] = r
	}
	return out
}

func writeGPUNode(t *testing.T, to string) {
	data, err := json.MarshalIndent(filled[gpunode.Status](samples(t)), "", "  ")
	must(t, err)
	write(t, filepath.Join(to, "gpunode.json"), append(data, '\n'))
}

func readGPUNode(t *testing.T, from string) any {
	var s gpunode.Status
	must(t, json.Unmarshal(read(t, filepath.Join(from, "gpunode.json")), &s))
	return s
}

func writePartitions(t *testing.T, to string) {
	write(t, filepath.Join(to, "partitions.yaml"), read(t, "partitions.yaml"))
}

// readPartitions returns what each partition of the file means for two recorded nodes, in the words of the file.
func readPartitions(t *testing.T, from string) any {
	path := filepath.Join(from, "partitions.yaml")
	file, err := config.Parse(path, read(t, path))
	must(t, err)
	out := map[string]any{}
	for _, node := range []string{"a30-24gb", "a100-80gb"} {
		inv, err := config.ReadInventory(read(t, "../testdata/inventories/"+node+".json"))
		must(t, err)
		for _, name := range file.Names() {
			d, err := file.Desire(name, inv, config.Node{Unit: 1024})
			must(t, err)
			for _, w := range d.GPUs {
				out[node+"/"+name+"/"+string(w.GPU)] = map[string]any{"mode": w.Mode, "api": w.API,
					"replicas": w.Replicas, "timeSlice": w.TimeSlice, "compute": config.ComputeText(w.Compute), "spot": config.SpotText(w.Spot),
					"lend": config.LendText(w.Spot), "onDemand": w.OnDemand, "geometry": fmt.Sprint(w.Geometry),
					"profiles": fmt.Sprint(w.Profiles)}
			}
		}
	}
	return out
}

func abs(t *testing.T, path string) string {
	t.Helper()
	out, err := filepath.Abs(path)
	must(t, err)
	return out
}
