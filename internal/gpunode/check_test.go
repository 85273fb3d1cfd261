// SPDX-License-Identifier: Apache-2.0

package gpunode_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// node is one with something in every list.
func node() *gpunode.Status {
	condition := []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True, Reason: "R", Message: "m"}}
	s := &gpunode.Status{
		MemoryUnitMiB: 1024, HoldersIn: gpunode.InObject, Conditions: condition,
		GPUs: []gpunode.GPU{{
			UUID: "GPU-a", Index: 1, Model: "M", MemoryMiB: 81920, Mode: "shared", API: "device-plugin", Guarantee: "api", Conditions: slices.Clone(condition),
			Resource: "example.com/gpu-mem", Kind: piece.KindUnits, Total: 79, Used: piece.SetOf([]int{0, 9}), Free: 75, Largest: 75,
			MIG: &gpunode.MIG{Card: "c", Used: []string{"1g.10gb@0"}, Blocked: []string{"1g.10gb@1"}, Warm: []string{"3g.40gb@4"},
				Offers: []gpunode.Offer{{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb", Placements: []string{"0", "4"}, Free: []string{"4"}}}},
			Spot: &gpunode.Spot{Resource: "example.com/gpu-mem.spot", Total: 40, Used: piece.SetOf([]int{3}), UsedPlacements: []string{"1g.10gb@2"}, Lent: piece.SetOf([]int{9}), LentPlacements: []string{"3g.40gb@4"}, Yielding: piece.SetOf([]int{5}), YieldingPlacements: []string{"1g.10gb@3"}, Free: 39, Largest: 39,
				Offers: []gpunode.Offer{{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb.spot", Placements: []string{"0", "4"}, Free: []string{"4"}}}},
			Holders: []gpunode.Holder{{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: piece.SetOf([]int{0}), Placements: []string{"3g.40gb@4"}}},
		}},
		Cards: []gpunode.Card{{Name: "c", MemorySlices: 8, Profiles: []gpunode.Profile{{Name: "3g.40gb", ComputeSlices: 3, MemorySlices: 4, Starts: []int{0, 4}, Max: 2,
			Engines: &gpunode.Engines{Decode: 1}}}}},
	}
	s.Sum()
	return s
}

// TestCheckHoldsEachField makes each field larger than its bound, and less than nothing.
// A GPU of a kind that only a newer version knows can be had by nobody.
func TestGPUOfAnUnknownKind(t *testing.T) {
	var s gpunode.Status
	text := `{"gpus":[{"uuid":"GPU-a","kind":"slot","total":4,"free":4,"largest":4,"conditions":[{"type":"Healthy","status":"True"},{"type":"Available","status":"True"}]},
		{"uuid":"GPU-b","kind":"units","total":4,"free":4,"largest":4,"conditions":[{"type":"Available","status":"True"}]}]}`
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	if c := s.GPUs[0].Conditions; gpunode.Is(c, gpunode.Available) || !gpunode.Is(c, gpunode.Healthy) || len(c) != 2 || c[1].Reason != status.UnknownKind || !strings.Contains(c[1].Message, "slot") {
		t.Errorf("its conditions are %+v", c)
	}
	if !gpunode.Is(s.GPUs[1].Conditions, gpunode.Available) {
		t.Errorf("the other is %+v", s.GPUs[1])
	}
}

func TestCheckHoldsEachField(t *testing.T) {
	if err := node().Check(); err != nil {
		t.Fatal(err)
	}
	tried := 0
	refused := func(path string, s *gpunode.Status) {
		t.Helper()
		tried++
		if err := s.Check(); !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), "status."+path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	// Each field is reached by its path in a status of its own.
	var fields func(of func(*gpunode.Status) reflect.Value, path string)
	fields = func(of func(*gpunode.Status) reflect.Value, path string) {
		v := of(node())
		for i := range v.NumField() {
			f := v.Type().Field(i)
			field := func(s *gpunode.Status) reflect.Value { return of(s).Field(i) }
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if path != "" {
				name = path + "." + name
			}
			most, err := strconv.Atoi(f.Tag.Get("max"))
			switch kind := f.Type.Kind(); {
			case kind == reflect.Bool || f.Type.String() == "time.Time":
			case kind == reflect.Pointer:
				fields(func(s *gpunode.Status) reflect.Value { return field(s).Elem() }, name)
			case kind == reflect.Struct:
				fields(field, name)
			case err != nil:
				t.Errorf("%s has no bound", name)
			case kind == reflect.Int:
				for _, n := range []int{most + 1, -1} {
					s := node()
					field(s).SetInt(int64(n))
					refused(name, s)
				}
			case kind == reflect.String:
				s := node()
				field(s).SetString(strings.Repeat("x", most+1))
				refused(name, s)
			case kind == reflect.Slice:
				s := node()
				field(s).Set(reflect.MakeSlice(f.Type, most+1, most+1))
				refused(name, s)
				element := func(s *gpunode.Status) reflect.Value { return field(s).Index(0) }
				switch each, err := strconv.Atoi(f.Tag.Get("each")); {
				case f.Type == reflect.TypeFor[piece.Set]():
				case f.Type.Elem().Kind() == reflect.Struct:
					fields(element, name+"[0]")
				case err != nil:
					t.Errorf("%s has no bound for each", name)
				case f.Type.Elem().Kind() == reflect.Int:
					s := node()
					element(s).SetInt(int64(each) + 1)
					refused(name+"[0]", s)
				default:
					s := node()
					element(s).SetString(strings.Repeat("x", each+1))
					refused(name+"[0]", s)
				}
			default:
				t.Errorf("%s is a %v", name, kind)
			}
		}
	}
	fields(func(s *gpunode.Status) reflect.Value { return reflect.ValueOf(s).Elem() }, "")
	if tried < 80 {
		t.Errorf("tried %d fields, want some 90", tried)
	}
}

// TestCheckHoldsSums: what each GPU may have, all of them may not.
func TestCheckHoldsSums(t *testing.T) {
	set := func(text string) (s piece.Set) {
		if err := s.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	for name, change := range map[string]func(*gpunode.Status){
		"two GPUs of as many as a node": func(s *gpunode.Status) { s.GPUs[0].Total, s.GPUs[1].Total = 60_000, 1 },
		"numbers beyond any list":       func(s *gpunode.Status) { s.GPUs[0].Holders[0].Devices = set("0-60000") },
		"more used than listed":         func(s *gpunode.Status) { s.GPUs[0].Used, s.GPUs[1].Used = set("0-59999"), set("0") },
		"all held five times": func(s *gpunode.Status) {
			for range 5 {
				s.GPUs[0].Holders = append(s.GPUs[0].Holders, gpunode.Holder{Devices: set("0-59999")})
			}
		},
		"one GPU twice": func(s *gpunode.Status) { s.GPUs[1].UUID = s.GPUs[0].UUID },
		"a card of 32 × 64 placements": func(s *gpunode.Status) {
			for range 32 {
				s.Cards[0].Profiles = append(s.Cards[0].Profiles, gpunode.Profile{Name: "1g", MemorySlices: 1, Starts: make([]int, 64)})
			}
		},
	} {
		s := node()
		s.GPUs = append(s.GPUs, gpunode.GPU{UUID: "GPU-b", API: "device-plugin", Kind: piece.KindUnits})
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		if change(s); !errors.Is(s.Check(), gpu.ErrInvalid) {
			t.Errorf("%s: %v", name, s.Check())
		}
	}
	// Through DRA nobody counts devices by number, and a unit may be a MiB.
	s := node()
	s.GPUs[0].API, s.GPUs[0].Total = "dra", 294_912
	if err := s.Check(); err != nil {
		t.Error(err)
	}
}

// Each machine that was recorded is one that readers believe.
func TestCheckBelievesRealMachines(t *testing.T) {
	files, err := filepath.Glob("../../tests/testdata/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	cards := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var inv gpu.Inventory
		if json.Unmarshal(text, &inv) != nil {
			continue
		}
		s := &gpunode.Status{}
		for i := range inv.GPUs {
			if c := gpunode.CardOf(&inv.GPUs[i]); c != nil && s.Cards == nil {
				s.Cards = append(s.Cards, *c)
				cards++
			}
		}
		if err := s.Check(); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	if cards == 0 {
		t.Error("no file has a card with MIG")
	}
}

// What an agent writes instead says which field it was.
func TestOutOfBounds(t *testing.T) {
	s := node()
	s.GPUs[0].Total = 1 << 30
	out := gpunode.OutOfBounds(s.Check())
	if err := out.Check(); err != nil {
		t.Fatal(err)
	}
	if len(out.Conditions) != 1 || out.Conditions[0].Status != gpunode.False || !strings.Contains(out.Conditions[0].Message, "gpus[0].total") {
		t.Errorf("%+v", out.Conditions)
	}
}
