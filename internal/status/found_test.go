// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strings"
	"testing"
)

// What earlier owners have left is shown with its code, but for what the partition's message has already.
func TestFoundIsShownOnce(t *testing.T) {
	s := Status{Node: "node-1", Partition: Partition{State: "failed", Reason: ComputeModeSet, Message: "GPU 3 is in another mode"},
		Found: []Condition{
			Why(ComputeModeSet, "GPU 3 is in another mode").Condition(Failed, "GPU-3"),
			Why(FabricNotReady, "GPU 2 has not joined").Condition(Unhealthy, "GPU-2"),
			Why(ModesetOn, "the node has loaded it").Condition(Noted, ""),
		}}
	var b strings.Builder
	if err := WriteText(&b, s, TextOptions{Width: 120}); err != nil {
		t.Fatal(err)
	}
	for word, times := range map[string]int{
		"GPU 3 is in another mode": 1, "FabricNotReady: GPU 2 has not joined": 1, "ModesetOn: the node has loaded it": 1,
	} {
		if n := strings.Count(b.String(), word); n != times {
			t.Errorf("%q is there %d times in\n%s", word, n, b.String())
		}
	}
}
