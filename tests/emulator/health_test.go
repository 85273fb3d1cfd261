// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

// What an Xid leaves behind on a card of today and on one from before Ampere.
func TestXidsComeWithTheirFaults(t *testing.T) {
	one := emulator.Errors{Volatile: 1, Aggregate: 1}
	for _, c := range []struct {
		model string
		xid   uint64
		want  emulator.Health
	}{
		{"H100-80GB", 13, emulator.Health{}},
		{"H100-80GB", 48, emulator.Health{Uncorrected: one}},
		{"H100-80GB", 63, emulator.Health{RemappedUncorrectable: 1, RemapPending: true}},
		{"H100-80GB", 64, emulator.Health{RemapFailed: true}},
		{"H100-80GB", 94, emulator.Health{Uncorrected: one}},
		{"H100-80GB", 95, emulator.Health{Uncorrected: one, Recovery: emulator.RecoveryReset}},
		{"V100-SXM2-32GB", 48, emulator.Health{Uncorrected: one}},
		{"V100-SXM2-32GB", 63, emulator.Health{RetiredDouble: 1, RetirePending: true}},
		{"V100-SXM2-32GB", 64, emulator.Health{}},
	} {
		w := newWorld(t, emulator.Spec{Model: c.model, Count: 2})
		if err := w.XidBare(1, c.xid); err != nil {
			t.Fatal(err)
		}
		want(t, c.model+" after a bare Xid", w.State().GPUs[1].Health, emulator.Health{})
		if err := w.Xid(1, c.xid); err != nil {
			t.Fatal(err)
		}
		want(t, c.model, w.State().GPUs[1].Health, c.want)
		want(t, c.model+", the other one", w.State().GPUs[0].Health, emulator.Health{})
	}

	w := newWorld(t, emulator.Spec{Count: 1, GPUs: []emulator.GPUSpec{{ECC: new(bool)}}})
	for _, xid := range []uint64{48, emulator.XidGPULost} {
		if err := w.Xid(0, xid); err != nil {
			t.Fatal(err)
		}
	}
	want(t, "counts without ECC", w.State().GPUs[0].Health, emulator.Health{})
	want(t, "lost by its Xid", w.State().GPUs[0].Lost, true)
	if err := w.Xid(0, 48); !errors.Is(err, emulator.GPUIsLost) {
		t.Errorf("an Xid of a lost GPU: %v", err)
	}
}

func TestAnUncorrectedErrorIsAnEventToo(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 1})
	s := open(t, w, emulator.Opening{})
	set := must[uint32](t, "set")(s.EventSetCreate())
	want(t, "register", s.RegisterEvents(0, emulator.EventXid|emulator.EventDoubleBitECC, set), emulator.Success)
	if err := w.Xid(0, 94); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []emulator.EventType{emulator.EventXid, emulator.EventDoubleBitECC} {
		want(t, "event", must[emulator.Event](t, "wait")(s.EventSetWait(set, time.Hour)).Type, kind)
	}
}

func TestHealthThatACardCannotHave(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 3, GPUs: []emulator.GPUSpec{{Index: 1, Model: "V100-SXM2-32GB"}, {Index: 2, ECC: new(bool)}}})
	for what, c := range map[string]struct {
		gpu int
		h   emulator.Health
	}{
		"retired pages of today":                    {0, emulator.Health{RetirePending: true}},
		"remapped rows before Ampere":               {1, emulator.Health{RemapFailed: true}},
		"more retired pages than there is room for": {1, emulator.Health{RetiredSingle: 60, RetiredDouble: 5}},
		"errors without ECC":                        {2, emulator.Health{Corrected: emulator.Errors{Aggregate: 1}}},
		"an action that no driver asks of":          {0, emulator.Health{Recovery: 99}},
		"no such GPU":                               {3, emulator.Health{}},
	} {
		if err := w.SetHealth(c.gpu, c.h); err == nil {
			t.Errorf("not refused: %s", what)
		}
	}
}

func TestHealthIsWrittenAndRead(t *testing.T) {
	h := emulator.Health{Corrected: emulator.Errors{Volatile: 1, Aggregate: 2}, RetiredSingle: 3, Recovery: emulator.RecoveryDrainReset}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	var again emulator.Health
	if err := json.Unmarshal(data, &again); err != nil {
		t.Fatal(err)
	}
	want(t, string(data), again, h)
	if err := json.Unmarshal([]byte(`{"recovery": "pray"}`), &again); err == nil {
		t.Error("an unknown recovery is not refused")
	}
}
