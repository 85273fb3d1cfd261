// SPDX-License-Identifier: Apache-2.0

package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// Version is the version of both files that this package writes.
const Version = 1

// Document is what the agent remembers beside its claims.
type Document struct {
	// Boot is the boot of the machine that the rest was seen in.
	Boot string `json:"boot,omitempty"`
	// GPUs is the inventory last seen. Save leaves MIG profiles out: the driver
	// tells them again, and they are most of an inventory's bytes.
	GPUs []gpu.Device `json:"gpus,omitempty"`
	// Faults is the health monitor's memory, in its own words.
	Faults json.RawMessage `json:"faults,omitempty"`
	// Layouts are what is listed to the kubelet.
	Layouts []Layout `json:"layouts,omitempty"`
	// TimeSlices is what the agent last set, by GPU.
	TimeSlices map[gpu.UUID]gpu.TimeSlice `json:"timeSlices,omitempty"`
	// Made are the MIG instances that the agent has made or taken over, and those
	// that it was about to make.
	Made []Made `json:"made,omitempty"`
}

// Made is a MIG instance by its place, which is all that tells it from others: its
// UUID and numbers may come back when another one is made there.
type Made struct {
	GPU gpu.UUID `json:"gpu"`
	Placement
}

// Placement is where a MIG device is.
type Placement struct {
	Profile string `json:"profile"`
	gpu.Placement
	CIStart int `json:"ciStart,omitempty"`
}

// Layout is how a GPU is divided: the way in force, or one that is not any more and
// whose devices are still listed.
type Layout struct {
	GPU gpu.UUID `json:"gpu"`
	// Kind is what its devices stand for; N is how many the GPU had.
	Kind ledger.Kind `json:"kind"`
	N    int         `json:"n"`
	// Unit is the size of a device that is an amount of memory.
	Unit gpu.MiB `json:"unitMiB,omitempty"`
	// Placements are its MIG devices.
	Placements []Placement `json:"slots,omitempty"`
	// Alone are the numbers of the units or replicas that it had; empty for the first N.
	Alone ledger.UnitSet `json:"alone,omitempty"`
	// Until is when it leaves the list, if nobody holds any of it; zero for the
	// one in force.
	Until time.Time `json:"until"`
}

// file is state.json. It has no newline at its end, so that nothing can be cut
// off it unnoticed.
type file struct {
	Version int `json:"version"`
	Document
}

func encodeDocument(d Document) ([]byte, error) {
	d.GPUs = slices.Clone(d.GPUs)
	for i := range d.GPUs {
		d.GPUs[i].MIG.Profiles = nil
	}
	data, err := json.MarshalIndent(file{Version, d}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the state: %w", err)
	}
	return data, nil
}

// errNewer is for what a newer agent has written.
type errNewer int

func (v errNewer) Error() string {
	return fmt.Sprintf("it is of version %d, and this agent reads up to %d: run the agent that wrote it or a newer one, or remove its state with gpu-agent cleanup", int(v), Version)
}

func decodeDocument(data []byte) (Document, error) {
	var head struct{ Version int }
	if err := json.Unmarshal(data, &head); err != nil {
		return Document{}, err
	}
	switch {
	case head.Version > Version:
		return Document{}, errNewer(head.Version)
	case head.Version < 1:
		return Document{}, errors.New("it names no version")
	}
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		return Document{}, err
	}
	return f.Document, nil
}
