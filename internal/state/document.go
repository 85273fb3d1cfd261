// SPDX-License-Identifier: Apache-2.0

package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Version is the version of both files that this package writes.
const Version = 1

// Document is what the agent remembers beside its allocations.
type Document struct {
	// Boot is the boot of the machine that the rest was seen in.
	Boot string `json:"boot,omitempty"`
	// GPUs is the inventory last seen. Save leaves MIG profiles out: the driver
	// tells them again, and they are most of an inventory's bytes.
	GPUs []gpu.Device `json:"gpus,omitempty"`
	// Faults is the health monitor's memory.
	Faults []health.Record `json:"faults,omitempty"`
	// Cordoned are the GPUs that an operator keeps new pods off.
	Cordoned []gpu.UUID `json:"cordoned,omitempty"`
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
	mig.Placement
}

// Layout is how a GPU is divided: the way in force, whose Until is zero, or a former one
// whose devices are still listed.
type Layout struct {
	GPU gpu.UUID `json:"gpu"`
	plan.Past
}

// file is state.json. It has no newline at its end, so that a truncated file is never
// valid.
type file struct {
	Version int `json:"version"`
	Document
}

// encodeDocument returns it in one line.
func encodeDocument(d Document) ([]byte, error) {
	d.GPUs = slices.Clone(d.GPUs)
	for i := range d.GPUs {
		d.GPUs[i].MIG.Profiles = nil
	}
	data, err := json.Marshal(file{Version, d})
	if err != nil {
		return nil, fmt.Errorf("encode the state: %w", err)
	}
	return data, nil
}

// errNewer is for what a newer agent has written.
type errNewer int

func (v errNewer) Error() string {
	return fmt.Sprintf("it is of version %d, and this agent reads up to %d: "+
		"run the agent that wrote it or a newer one, or remove its state with gpu-agent cleanup", int(v), Version)
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
