// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
)

// A partition file of a ConfigMap's size with nothing but zeros is refused at once, and what was
// in force stays.
func TestAFileOfZerosChangesNothing(t *testing.T) {
	p := &mailbox{wake: func() {}}
	p.setFile("f", []byte("version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole}\n"))
	good := p.latest().file
	if good == nil {
		t.Fatal(p.latest().fileErr)
	}
	zeros := []byte("version: v1\npartitions:\n  default:\n    - devices: [" + strings.Repeat("0,", 500_000) + "0]\n      mode: whole\n")
	spent := testing.AllocsPerRun(1, func() { p.setFile("f", zeros) })
	if in := p.latest(); in.file != good || in.fileErr == nil || !strings.Contains(in.fileErr.Error(), "f:4: ") {
		t.Errorf("the file in force is %p, was %p; the newest one: %v", in.file, good, in.fileErr)
	}
	if spent > 100 {
		t.Errorf("it takes %v allocations", spent)
	}
}
