// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
	"testing/synctest"
)

// The node's label chooses the partition, and its change is followed at once. A name that
// the file lacks leaves what was in force.
func TestLabelChoosesThePartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared+"  research:\n    - {devices: [0], mode: whole}\n    - {devices: [1], mode: off}\n")
		defer b.end()
		choose := func(partition string) { b.node(map[string]string{"example.com/gpu.partition": partition}, false) }
		b.want("applied", fourUnits, "")
		choose("research")
		b.want("applied", fourUnitsX, "0")
		choose("nowhere")
		b.want("invalid", fourUnitsX, "0")
		if m := b.message(); !strings.Contains(m, "nowhere") {
			t.Errorf("message %q does not name the partition that there is not", m)
		}
		b.node(nil, false)
		b.want("applied", fourUnits, "0x")
		choose("research")
		b.want("applied", fourUnitsX, "0")
	})
}
