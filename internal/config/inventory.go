// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// ReadInventory reads the output of `gpu-agent inventory -o json`, or a shorter document that a
// person wrote. Required are: index, uuid, memoryMiB and mig of each GPU; profile, start and
// size of each MIG instance; name of each profile; start and size of each placement. Unknown
// keys are skipped, since a newer agent writes more. The GPUs come back in index order.
//
// The error lists all that is missing or impossible, one fact a line.
func ReadInventory(data []byte) (*gpu.Inventory, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	inv := new(gpu.Inventory)
	err := dec.Decode(inv)
	if err == nil {
		if _, extra := dec.Token(); !errors.Is(extra, io.EOF) {
			return nil, fmt.Errorf("read inventory: line %d: something follows the inventory",
				lineAt(data, dec.InputOffset()))
		}
	}
	if err != nil {
		return nil, jsonError(data, err)
	}
	// encoding/json reads a missing key as zero, and accepts a key in other letter case. Both
	// would be mistaken for facts.
	var raw struct {
		GPUs []object `json:"gpus"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, jsonError(data, err)
	}
	var errs []error
	if raw.GPUs == nil {
		errs = append(errs, errors.New("read inventory: gpus is missing; without GPUs it is []"))
	}
	uuids, indices := make(map[gpu.UUID]int), make(map[int]int)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		bad := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("read inventory: gpus[%d]: "+format, append([]any{i}, args...)...))
		}
		has := require(bad, "", at(raw.GPUs, i), "index", "uuid", "memoryMiB", "mig")
		if d.Index < 0 {
			bad("index is negative: %d", d.Index)
		}
		if j, again := indices[d.Index]; again {
			bad("index %d is that of gpus[%d], too", d.Index, j)
		}
		indices[d.Index] = i
		// A GPU that fell off the bus has no memory, and sometimes no name.
		if has && d.UUID == "" && d.Fault == "" {
			bad("uuid is empty")
		}
		if j, again := uuids[d.UUID]; again && d.UUID != "" {
			bad("uuid %s is that of gpus[%d], too", d.UUID, j)
		}
		uuids[d.UUID] = i
		if d.Reserved > d.Memory {
			bad("reservedMiB %d is more than memoryMiB %d", d.Reserved, d.Memory)
		}
		m, _ := at(raw.GPUs, i)["mig"].(object)
		checkMIG(bad, &d.MIG, m)
		// A person may leave out what follows from the rest.
		d.MIG.Capable = d.MIG.Capable || d.MIG.Enabled || len(d.MIG.Profiles) > 0
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	slices.SortFunc(inv.GPUs, func(a, b gpu.Device) int { return cmp.Compare(a.Index, b.Index) })
	return inv, nil
}

// object is a JSON object as it was written.
type object = map[string]any

func checkMIG(bad func(string, ...any), m *gpu.MIG, raw object) {
	profiles, _ := raw["profiles"].([]any)
	for i, p := range m.Profiles {
		where := fmt.Sprintf("mig.profiles[%d]: ", i)
		if p.Name == "" {
			bad("%sname is missing", where)
		}
		profile, _ := at(profiles, i).(object)
		placements, _ := profile["placements"].([]any)
		for j, pl := range p.Placements {
			where := fmt.Sprintf("%splacements[%d]: ", where, j)
			checkPlacement(bad, where, pl, require(bad, where, at(placements, j), "start", "size"))
		}
	}
	instances, _ := raw["instances"].([]any)
	for i, in := range m.Instances {
		where := fmt.Sprintf("mig.instances[%d]: ", i)
		has := require(bad, where, at(instances, i), "profile", "start", "size")
		if has && in.Profile == "" {
			bad("%sprofile is empty", where)
		}
		checkPlacement(bad, where, in.Placement, has)
	}
	if len(m.Instances) > 0 && !m.Enabled {
		bad("mig has instances and is not enabled")
	}
}

func checkPlacement(bad func(string, ...any), where string, p gpu.Placement, has bool) {
	if p.Start < 0 || has && p.Size < 1 {
		bad("%sno run of memory slices starts at %d and has the size %d", where, p.Start, p.Size)
	}
}

// at returns list[i], or the zero value beyond its end. If a key is given twice, the two
// readings of the document can have lists of different lengths.
func at[T any](list []T, i int) (none T) {
	if i < len(list) {
		return list[i]
	}
	return none
}

// require adds a fault for each key that an object lacks, or has as null. It returns whether
// the object has all of them.
func require(bad func(string, ...any), where string, raw any, keys ...string) (all bool) {
	o, _ := raw.(object)
	all = true
	for _, k := range keys {
		if o[k] == nil {
			bad("%s%s is missing", where, k)
			all = false
		}
	}
	return all
}

func jsonError(data []byte, err error) error {
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("read inventory: line %d: %w", lineAt(data, syntax.Offset), err)
	case errors.As(err, &typ):
		return fmt.Errorf("read inventory: line %d: %s cannot be read from a JSON %s",
			lineAt(data, typ.Offset), cmp.Or(typ.Field, "the document"), typ.Value)
	case errors.Is(err, io.EOF):
		return errors.New("read inventory: it is empty")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("read inventory: line %d: it ends in the middle", lineAt(data, int64(len(data))))
	}
	return fmt.Errorf("read inventory: %w", err)
}

func lineAt(data []byte, offset int64) int {
	offset = min(offset, int64(len(data)))
	return 1 + bytes.Count(bytes.TrimRight(data[:offset], "\n"), []byte("\n"))
}
