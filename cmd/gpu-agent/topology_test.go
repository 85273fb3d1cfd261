// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/topology"
)

func TestTopology(t *testing.T) {
	const node = "../../tests/testdata/h100-80.json"
	text, _, err := execute(t, "topology", "--inventory", node)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(text, "\n")
	head := strings.Fields(lines[0])
	row := strings.Fields(lines[4])
	if head[7] != "GPU7" || row[0] != "GPU3" || row[4] != "X" || row[8] != "NV18" || !strings.Contains(text, "mlx5_0") {
		t.Errorf("the head %q, the row %q of\n%s", head, row, text)
	}
	text, _, err = execute(t, "topology", "-o", "json", "--inventory", node)
	if err != nil {
		t.Fatal(err)
	}
	var m topology.Matrix
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		t.Fatal(err)
	}
	if len(m.GPUs) != 8 || len(m.Cells) != 8+len(m.NICs) || m.Cells[3][7] != "NV18" || !slices.Equal(m.Switched, []int{0, 1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("as JSON: %+v", m)
	}
	if _, _, err = execute(t, "topology", "--inventory", node, "extra"); err == nil {
		t.Error("an argument too many is taken")
	}
}
