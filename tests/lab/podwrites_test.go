// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"slices"
	"testing"
	"time"
)

func TestPodWrites(t *testing.T) {
	version := func(phase string, devices ...string) []byte {
		var list []any
		for _, id := range devices {
			list = append(list, object{"resourceID": id, "health": "Healthy"})
		}
		data, err := json.Marshal(object{"metadata": object{"name": "p"}, "status": object{"phase": phase, "containerStatuses": []any{
			object{"name": "main", "allocatedResourcesStatus": []any{object{"name": Memory, "resources": list}}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	r := &PodRecording{last: map[string]podVersion{}}
	for _, step := range []struct {
		event string
		data  []byte
	}{
		{"ADDED", version("Pending")},
		{"MODIFIED", version("Running", "a", "b", "c")},
		{"MODIFIED", version("Running", "b", "c", "a")},
		{"MODIFIED", version("Running", "b", "c", "a")}, // of the metadata
		{"MODIFIED", version("Running", "b", "c")},
		{"MODIFIED", version("Failed", "c", "b")},
		{"DELETED", version("Failed", "c", "b")},
	} {
		if err := r.take(step.event, step.data); err != nil {
			t.Fatal(err)
		}
	}
	var got []bool
	for _, w := range r.Writes("p", time.Time{}) {
		got = append(got, w.OrderOnly)
		if w.Bytes < 100 {
			t.Errorf("a pod of %d bytes", w.Bytes)
		}
	}
	if want := []bool{false, true, false, false, false}; !slices.Equal(got, want) {
		t.Errorf("writes of the order only: %v, want %v", got, want)
	}
	if err := r.take("ERROR", []byte(`{"reason": "Expired"}`)); err == nil {
		t.Error("a watch that has failed is no error")
	}
}
