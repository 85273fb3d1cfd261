// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"example.com/gpu-agent/internal/usage"
)

// What an agent accounts for has no field that this program does not know, and no other name for one.
func TestAccountIsTheAgents(t *testing.T) {
	figure := 1.5
	for _, pair := range []struct{ from, into any }{
		{usage.Sum{Name: "n", Grants: 1, GrantedGPUHours: 1, UsedGPUHours: &figure, GrantedGiBHours: 2, UsedGiBHours: &figure, SMHours: &figure}, new(Sum)},
		{usage.Had{Index: 1, GPU: "g", Piece: "p", Share: .5, Resource: "r", Allocation: "a", Since: time.Unix(1, 0), Until: time.Unix(2, 0),
			Holder: usage.Holder{Namespace: "n", Pod: "p", UID: "u", Container: "c", Labels: map[string]string{"a": "b"}}}, new(Had)},
	} {
		text, err := json.Marshal(pair.from)
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(text))
		d.DisallowUnknownFields()
		if err := d.Decode(pair.into); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		var sent, kept map[string]any
		back, err := json.Marshal(pair.into)
		if err != nil || json.Unmarshal(text, &sent) != nil || json.Unmarshal(back, &kept) != nil {
			t.Fatal(err)
		}
		for key := range sent {
			if kept[key] == nil {
				t.Errorf("%s is lost: %s", key, back)
			}
		}
	}
}
