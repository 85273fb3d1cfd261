// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"encoding/binary"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/emulator"
)

// fields reads field values as programs do, each with its own outcome.
func fields(t *testing.T, d nvml.Device, ids ...uint32) []nvml.FieldValue {
	t.Helper()
	values := make([]nvml.FieldValue, len(ids))
	for i, id := range ids {
		values[i].FieldId = id
	}
	ok(t, d.GetFieldValues(values), "field values")
	return values
}

func TestHealth(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	d := device(t, api, 1)
	read := func(f uint32) (uint64, nvml.Return) {
		t.Helper()
		v := fields(t, d, f)[0]
		return binary.LittleEndian.Uint64(v.Value[:]), nvml.Return(v.NvmlReturn)
	}
	current, pending, r := d.GetEccMode()
	ok(t, r, "ECC mode")
	want(t, "ECC mode", [2]nvml.EnableState{current, pending}, [2]nvml.EnableState{nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED})
	for _, xid := range []uint64{48, 63, 64, 94, 95} {
		if err := n.world.Xid(1, xid); err != nil {
			t.Fatal(err)
		}
	}
	h := n.world.State().GPUs[1].Health
	h.Corrected = emulator.Errors{Volatile: 5, Aggregate: 7}
	h.Uncorrected.Aggregate = 9
	h.RemappedCorrectable = 2
	if err := n.world.SetHealth(1, h); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		kind        nvml.MemoryErrorType
		counter     nvml.EccCounterType
		field, want uint64
	}{
		{nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, nvml.FI_DEV_ECC_SBE_VOL_TOTAL, 5},
		{nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC, nvml.FI_DEV_ECC_DBE_VOL_TOTAL, 3},
		{nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.AGGREGATE_ECC, nvml.FI_DEV_ECC_SBE_AGG_TOTAL, 7},
		{nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC, nvml.FI_DEV_ECC_DBE_AGG_TOTAL, 9},
	} {
		total, r := d.GetTotalEccErrors(c.kind, c.counter)
		ok(t, r, "total")
		want(t, "total", total, c.want)
		dram, r := d.GetMemoryErrorCounter(c.kind, c.counter, nvml.MEMORY_LOCATION_DRAM)
		ok(t, r, "DRAM")
		want(t, "DRAM", dram, c.want)
		field, r := read(uint32(c.field))
		ok(t, r, "field")
		want(t, "field", field, c.want)
	}
	sram, r := d.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_SRAM)
	ok(t, r, "SRAM")
	want(t, "SRAM", sram, 0)
	correctable, uncorrectable, waits, failed, r := d.GetRemappedRows()
	ok(t, r, "remapped rows")
	want(t, "remapped rows", [2]int{correctable, uncorrectable}, [2]int{2, 1})
	want(t, "pending, failed", [2]bool{waits, failed}, [2]bool{true, true})
	for f, value := range map[uint32]uint64{
		nvml.FI_DEV_ECC_CURRENT: 1, nvml.FI_DEV_REMAPPED_COR: 2, nvml.FI_DEV_REMAPPED_UNC: 1, nvml.FI_DEV_REMAPPED_PENDING: 1,
		nvml.FI_DEV_REMAPPED_FAILURE: 1, nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: uint64(nvml.GPU_RECOVERY_ACTION_GPU_RESET),
	} {
		got, r := read(f)
		ok(t, r, "field")
		want(t, "field", got, value)
	}
	// What another GPU has is its own.
	other, r := device(t, api, 0).GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	ok(t, r, "another GPU's total")
	want(t, "another GPU's total", other, 0)

	// More fields than one request has room for, in their order.
	var many []uint32
	for len(many) < 250 {
		many = append(many, nvml.FI_DEV_ECC_SBE_VOL_TOTAL, nvml.FI_DEV_RETIRED_PENDING, 0)
	}
	for i, v := range fields(t, d, many...) {
		got := nvml.Return(v.NvmlReturn)
		if w := []nvml.Return{nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT}[i%3]; got != w {
			t.Fatalf("field %d of many: %v, want %v", i, got, w)
		}
		if i%3 == 0 && (v.Value[0] != 5 || v.Timestamp == 0 || v.ValueType != uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG)) {
			t.Fatalf("field %d of many: %+v", i, v)
		}
	}

	if err := n.world.Lose(1); err != nil {
		t.Fatal(err)
	}
	for what, r := range map[string]nvml.Return{
		"errors": second(d.GetTotalEccErrors(0, 0)),
		"fields": d.GetFieldValues(make([]nvml.FieldValue, 1)),
	} {
		want(t, what+" of a lost GPU", r, nvml.ERROR_GPU_IS_LOST)
	}
}

// What a card lacks, its driver says so.
func TestHealthThatACardLacks(t *testing.T) {
	const none = nvml.ERROR_NOT_SUPPORTED
	n := start(t, emulator.Spec{Count: 3, Driver: "535.1.2", GPUs: []emulator.GPUSpec{
		{Index: 1, Model: "V100-SXM2-32GB"}, {Index: 2, ECC: new(bool)},
	}})
	if err := n.world.Xid(1, 63); err != nil {
		t.Fatal(err)
	}
	api := n.open(t)
	hopper, volta, off := device(t, api, 0), device(t, api, 1), device(t, api, 2)
	waits, r := volta.GetRetiredPagesPendingStatus()
	ok(t, r, "pages that wait")
	want(t, "pages that wait", waits, nvml.FEATURE_ENABLED)
	if pages, r := volta.GetRetiredPages(nvml.PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR); r != nvml.SUCCESS || len(pages) != 1 || pages[0] == 0 {
		t.Errorf("retired pages: %v, %v", pages, r)
	}
	want(t, "retired pages on Hopper", second(hopper.GetRetiredPages(0)), none)
	mode, _, r := off.GetEccMode()
	ok(t, r, "ECC mode")
	want(t, "ECC mode", mode, nvml.FEATURE_DISABLED)
	_, _, _, _, rows := volta.GetRemappedRows()
	for what, c := range map[string]struct{ got, want nvml.Return }{
		"rows before Ampere":          {rows, none},
		"retired pages on Hopper":     {second(hopper.GetRetiredPagesPendingStatus()), none},
		"errors without ECC":          {second(off.GetTotalEccErrors(1, 0)), none},
		"errors of an L2 on Hopper":   {second(hopper.GetMemoryErrorCounter(1, 0, nvml.MEMORY_LOCATION_L2_CACHE)), none},
		"errors of an L2 on Volta":    {second(volta.GetMemoryErrorCounter(1, 0, nvml.MEMORY_LOCATION_L2_CACHE)), nvml.SUCCESS},
		"errors of the SRAM on Volta": {second(volta.GetMemoryErrorCounter(1, 0, nvml.MEMORY_LOCATION_SRAM)), none},
		"errors of no kind":           {second(hopper.GetTotalEccErrors(2, 0)), nvml.ERROR_INVALID_ARGUMENT},
		"errors of no counter":        {second(hopper.GetTotalEccErrors(0, 2)), nvml.ERROR_INVALID_ARGUMENT},
		"errors of no place":          {second(hopper.GetMemoryErrorCounter(0, 0, 8)), nvml.ERROR_INVALID_ARGUMENT},
		"recovery of an old driver":   {nvml.Return(fields(t, hopper, nvml.FI_DEV_GET_GPU_RECOVERY_ACTION)[0].NvmlReturn), none},
		"field of remaps on Volta":    {nvml.Return(fields(t, volta, nvml.FI_DEV_REMAPPED_PENDING)[0].NvmlReturn), none},
		"field of errors, ECC off":    {nvml.Return(fields(t, off, nvml.FI_DEV_ECC_DBE_VOL_TOTAL)[0].NvmlReturn), none},
		"field of pages on Volta":     {nvml.Return(fields(t, volta, nvml.FI_DEV_RETIRED_DBE)[0].NvmlReturn), nvml.SUCCESS},
	} {
		want(t, what, c.got, c.want)
	}
}
