// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// parkNode is a node with two containers' processes on two GPUs.
type parkNode struct {
	on     map[gpu.UUID][]gpu.Process
	owners map[int]node.Owner
	err    error
}

func (n parkNode) Processes(_ context.Context, u gpu.UUID) ([]gpu.Process, error) {
	return n.on[u], n.err
}
func (n parkNode) Memory(context.Context, ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error) {
	return nil, gpu.ErrNotSupported
}
func (n parkNode) Container(pid int) (node.Owner, error) {
	o, ok := n.owners[pid]
	if !ok {
		return node.Owner{}, gpu.ErrNotFound
	}
	return o, nil
}
func (n parkNode) Inside(int) (uint64, uint64, error) { return 0, 0, gpu.ErrNotSupported }
func (n parkNode) Check() error                       { return nil }
func (n parkNode) MemoryCgroup(o node.Owner) (dir, root string, err error) {
	return "/sys/fs/cgroup" + o.Cgroup, "/sys/fs/cgroup", nil
}
func (n parkNode) parkables(p *lib.Pages) Parkables {
	return Parkables{Driver: n, Proc: n, Cgroups: n, Counters: p}
}
func process(pid int, bytes uint64) gpu.Process {
	return gpu.Process{PID: pid, Bytes: bytes, Known: true}
}
func someParkNode() parkNode {
	mine, other := node.Owner{ID: "c", Cgroup: "/kubepods/c", Start: 70, V2: true}, node.Owner{ID: "d", Cgroup: "/kubepods/d", Start: 80, V2: true}
	second := mine
	second.Start = 90
	return parkNode{
		on: map[gpu.UUID][]gpu.Process{
			"GPU-a": {process(9, 300), process(7, 100), process(8, 1000), process(66, 5), process(7, 100)},
			"GPU-b": {process(7, 20)}, "GPU-c": {process(7, 4000)},
		},
		owners: map[int]node.Owner{7: mine, 8: other, 9: second},
	}
}

// A set has the container's own processes on the allocation's GPUs, each once, with all that they have there.
func TestParkables(t *testing.T) {
	pages, err := lib.OpenPages(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	n, c := someParkNode(), &node.Container{ID: "c"}
	gpus := []gpu.UUID{"GPU-a", "GPU-b"}
	got, err := n.parkables(pages).Find(t.Context(), "key", c, gpus)
	want := park.Set{Key: "key", Processes: []park.Process{{PID: 7, Start: 70}, {PID: 9, Start: 90}}, Bytes: 420,
		Cgroup: "/sys/fs/cgroup/kubepods/c", CgroupRoot: "/sys/fs/cgroup"}
	if err != nil || !slices.Equal(got.Processes, want.Processes) || got.Bytes != want.Bytes || got.Cgroup != want.Cgroup || got.CgroupRoot != want.CgroupRoot {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if _, err := n.parkables(pages).Find(t.Context(), "key", &node.Container{ID: "none"}, gpus); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a container without a process: %v", err)
	}
	n.on["GPU-b"][0].Known = false
	if _, err := n.parkables(pages).Find(t.Context(), "key", c, gpus); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("a process of unknown size: %v", err)
	}
	n.err = gpu.ErrTimeout
	if _, err := n.parkables(pages).Find(t.Context(), "key", c, gpus); !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("a driver that does not answer: %v", err)
	}
}

// A container whose counters cannot be trusted is not parked.
func TestParkablesOfASpoiltPage(t *testing.T) {
	dir := t.TempDir()
	pages, err := lib.OpenPages(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lib.Unmount(dir) })
	paths, err := pages.Write("key", time.Second, []lib.Limit{{GPU: "GPU-a", Bytes: 1 << 30}})
	if err != nil {
		t.Skipf("usage pages cannot be made here: %v", err)
	}
	n, c := someParkNode(), &node.Container{ID: "c"}
	if _, err := n.parkables(pages).Find(t.Context(), "key", c, []gpu.UUID{"GPU-a"}); err != nil {
		t.Errorf("ordinary memory: %v", err)
	}
	f, err := os.OpenFile(paths["GPU-a"].Usage, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// More is bound than any GPU has.
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, 1<<40-1), 64); err != nil {
		t.Fatal(err)
	}
	if _, err := n.parkables(pages).Find(t.Context(), "key", c, []gpu.UUID{"GPU-a"}); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a spoilt page: %v", err)
	}
}
