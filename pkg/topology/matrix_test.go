// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

var update = flag.Bool("update", false, "write the golden files anew")

// withCards adds network cards: one beside GPU 0 on its switch, one on the host
// bridge of GPU 2, one on the second socket.
func withCards(inv *gpu.Inventory) *gpu.Inventory {
	inv.NICs = []gpu.NIC{
		{Name: "mlx5_0", Kind: gpu.InfiniBand, PCI: "00000000:06:00.0", NUMA: numaNode(0), Path: []string{"pci0000:00", "0000:00:01.0", "0000:02:00.0", "0000:03:02.0"}, Active: true},
		{Name: "mlx5_1", Kind: gpu.RoCE, PCI: "00000000:17:00.0", NUMA: numaNode(0), Path: []string{"pci0000:10", "0000:10:05.0"}},
		{Name: "rdmap9s0", Kind: gpu.EFA, PCI: "00000000:99:00.0", NUMA: numaNode(1), Active: true},
	}
	return inv
}

func TestMatrixText(t *testing.T) {
	pairs := withCards(unlink(bridged(twoSockets(8), 4), 2, 3, 1))
	unknown := switched(node(make([][]gpu.Link, 3)...), 0)
	unknown.GPUs[2] = gpu.Device{Index: 12, UUID: "2"}
	for name, inv := range map[string]*gpu.Inventory{
		"switch": withCards(switched(twoSockets(4), 18)), "pairs": pairs, "unknown": unknown, "none": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			if err := New(inv).Matrix().WriteText(&b); err != nil {
				t.Fatal(err)
			}
			file := "testdata/matrix-" + name + ".txt"
			if *update {
				if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got := b.String(); got != string(want) {
				t.Errorf("%s differs (-update writes it anew); got\n%s", file, got)
			}
			for line := range strings.Lines(b.String()) {
				if strings.TrimRight(line, " \n") != strings.TrimRight(line, "\n") {
					t.Errorf("%q ends in spaces", line)
				}
			}
		})
	}
}

func TestMatrix(t *testing.T) {
	inv := withCards(switched(twoSockets(2), 18))
	inv.NICs = inv.NICs[1:]
	inv.GPUs[1].Index = 5
	inv.GPUs[1].Links[0].NVLink = 17
	m := New(inv).Matrix()
	want := Matrix{
		GPUs: []MatrixGPU{
			{Index: 0, UUID: "0", PCI: "00000000:04:00.0", NUMA: numaNode(0), CPUs: "0-55,112-167"},
			{Index: 5, UUID: "1", PCI: "00000000:05:00.0", NUMA: numaNode(1), CPUs: "56-111,168-223"},
		},
		NICs: []MatrixNIC{
			{Name: "mlx5_1", Kind: gpu.RoCE, PCI: "00000000:17:00.0", NUMA: numaNode(0)},
			{Name: "rdmap9s0", Kind: gpu.EFA, PCI: "00000000:99:00.0", NUMA: numaNode(1), Active: true},
		},
		NUMA: inv.NUMA,
		Cells: [][]string{
			{"X", "NV17", "NODE", "SYS"},
			{"NV17", "X", "SYS", "NODE"},
			{"NODE", "SYS", "X", "SYS"},
			{"SYS", "NODE", "SYS", "X"},
		},
		Joined:   [][]int{{0, 5}},
		Switched: []int{0, 5},
		Weak:     []string{"GPU 5 has 17 of 18 NVLink lanes to the NVSwitch"},
	}
	if !reflect.DeepEqual(m, want) {
		t.Errorf("got\n%+v\nwant\n%+v", m, want)
	}
	data, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var back Matrix
	if err := json.Unmarshal(data, &back); err != nil || !reflect.DeepEqual(back, m) {
		t.Errorf("%s is read back as %+v (%v)", data, back, err)
	}
	if data, _ := json.Marshal(New(nil).Matrix()); string(data) != `{"gpus":[],"cells":[]}` {
		t.Errorf("of nothing: %s", data)
	}
}

// Who does not answer has no links that are known.
func TestMatrixOfFaults(t *testing.T) {
	inv := switched(twoSockets(4), 18)
	inv.GPUs[1].Fault = "no answer"
	inv.GPUs[3].Fault, inv.GPUs[3].Gone = "gone", true
	m := New(inv).Matrix()
	if want := []int{0, 2}; !slices.Equal(m.Switched, want) || len(m.Joined) != 1 || !slices.Equal(m.Joined[0], want) || len(m.Weak) > 0 {
		t.Errorf("%+v", m)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestMatrixWriteFails(t *testing.T) {
	if err := New(nil).Matrix().WriteText(full{}); err == nil {
		t.Error("an error of the writer is lost")
	}
}
