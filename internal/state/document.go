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

// Version is the version of the files that this package writes.
const Version = 1

// Document is the agent's state without its allocations.
type Document struct {
	// Boot is the ID of the machine's boot; the rest was seen since that boot.
	Boot string `json:"boot,omitempty"`
	// GPUs is the inventory last seen. Save leaves out MIG profiles: the driver reports them
	// again, and they are most of an inventory's bytes.
	GPUs []gpu.Device `json:"gpus,omitempty"`
	// Faults are the records of the health monitor.
	Faults []health.Record `json:"faults,omitempty"`
	// Cordoned are the GPUs that an operator keeps new pods off.
	Cordoned []gpu.UUID `json:"cordoned,omitempty"`
	// Layouts are the layouts that are listed to the kubelet.
	Layouts []Layout `json:"layouts,omitempty"`
	// TimeSlices are the time slices that the agent last set, by GPU.
	TimeSlices map[gpu.UUID]gpu.TimeSlice `json:"timeSlices,omitempty"`
	// Made are the MIG instances that the agent has made or taken over, and those that it was
	// about to make.
	Made []Made `json:"made,omitempty"`
}

// Made is a MIG instance, identified only by its place: another instance that is made there may
// have the same UUID and IDs.
type Made struct {
	GPU gpu.UUID `json:"gpu"`
	mig.Placement
}

// Layout is a layout of a GPU. Until is zero for the layout in force. For a former one, whose
// devices are still listed, it is the time at which they leave the list.
type Layout struct {
	GPU gpu.UUID `json:"gpu"`
	plan.Past
}

// file is the content of state.json. It does not end in a newline, so a truncated file is never
// valid.
type file struct {
	Version int `json:"version"`
	Document
}

// encodeDocument returns d as one line of JSON, without MIG profiles.
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

// errNewer is the version of a file that a newer agent has written.
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
