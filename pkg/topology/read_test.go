// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"

	"example.com/gpu-agent/pkg/gpu"
)

// sysfs is a tree of files, by name, and of symbolic links, "name -> target".
func sysfs(lines ...string) fstest.MapFS {
	tree := make(fstest.MapFS)
	for _, l := range lines {
		if name, target, ok := strings.Cut(l, " -> "); ok {
			tree[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
			continue
		}
		name, text, _ := strings.Cut(l, ": ")
		tree[name] = &fstest.MapFile{Data: []byte(text + "\n"), Mode: 0o444}
	}
	return tree
}

// onDisk lays a tree down as files; links lead out of it in vain.
func onDisk(t *testing.T, tree fstest.MapFS) fs.FS {
	t.Helper()
	dir := t.TempDir()
	for name, f := range tree {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if f.Mode&fs.ModeSymlink != 0 {
			err = os.Symlink(string(f.Data), file)
		} else {
			err = os.WriteFile(file, f.Data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root.FS()
}

// inMemory is a tree whose links may go in circles, which those of a MapFS may
// not.
type inMemory struct{ tree fstest.MapFS }

func (m inMemory) ReadLink(name string) (string, error)   { return m.tree.ReadLink(name) }
func (m inMemory) Lstat(name string) (fs.FileInfo, error) { return m.tree.Lstat(name) }

func (m inMemory) Open(name string) (fs.File, error) {
	real := resolve(m.tree, name)
	if real == "" {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return m.tree.Open(real)
}

const (
	switch1 = "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
	gpu0    = switch1 + "/0000:18:00.0/0000:19:00.0"
	ib0     = switch1 + "/0000:18:04.0/0000:1a:00.0"
	behind  = "devices/LNXSYSTM:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0"
)

// machine is a sysfs with two GPUs and cards of all kinds.
func machine() fstest.MapFS {
	return sysfs(
		"class/dmi/id -> ../../devices/virtual/dmi/id",
		"devices/virtual/dmi/id/product_name: DGXH100 ",
		"devices/system/node/node0/cpulist: 0-55,112-167",
		"devices/system/node/node0/distance: 10 21 32",
		"devices/system/node/node1/distance: 21 10",
		"devices/system/node/node10/distance: 32 far 10",
		"devices/system/node/node10/cpulist: ",
		"devices/system/node/node1/cpulist: 56-111,168-223",
		"devices/system/node/possible: 0-10",
		"devices/system/node/nodes/cpulist: 7",

		"bus/pci/devices/0000:19:00.0 -> ../../../"+gpu0,
		gpu0+"/numa_node: 0",
		gpu0+"/local_cpulist: 0-55,112-167",
		"bus/pci/devices/0001:00:00.0 -> ../../../"+behind,
		behind+"/numa_node: -1",
		behind+"/local_cpulist: 0-223",

		"class/infiniband/mlx5_10 -> ../../"+ib0+"/infiniband/mlx5_10",
		ib0+"/numa_node: 0",
		ib0+"/vendor: 0x15b3",
		ib0+"/infiniband/mlx5_10/device -> ../../../0000:1a:00.0",
		ib0+"/infiniband/mlx5_10/node_type: 1: CA",
		ib0+"/infiniband/mlx5_10/ports/1/link_layer: InfiniBand",
		ib0+"/infiniband/mlx5_10/ports/1/state: 4: ACTIVE",
		ib0+"/infiniband/mlx5_10/ports/2/link_layer: Ethernet",
		ib0+"/infiniband/mlx5_10/ports/2/state: 1: DOWN",
		"class/infiniband/mlx5_2 -> ../../devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2",
		"devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2/device -> ../../../0000:40:00.0",
		"devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2/ports/1/link_layer: Ethernet",
		"devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2/ports/1/state: 1: DOWN",
		"devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2/ports/2/link_layer: Ethernet",
		"devices/pci0000:40/0000:40:00.0/infiniband/mlx5_2/ports/2/state: 2: INIT",
		"class/infiniband/rdmap0s6/device -> ../../../devices/pci0000:00/0000:00:06.0",
		"class/infiniband/rdmap0s6/node_type: 7: <unknown>",
		"class/infiniband/rdmap0s6/ports/1/link_layer: Unspecified",
		"class/infiniband/rdmap0s6/ports/1/state: 4: ACTIVE",
		"devices/pci0000:00/0000:00:06.0/vendor: 0x1d0f",
		"devices/pci0000:00/0000:00:06.0/numa_node: 1",
		// A virtual function of a card that is here, software, iWARP, no card at all.
		"class/infiniband/host/device -> ../../../devices/pci0000:40",
		"class/infiniband/host/ports/1/link_layer: Ethernet",
		"class/infiniband/mlx5_11/device -> ../../../devices/pci0000:40/0000:40:00.1",
		"class/infiniband/mlx5_11/ports/1/link_layer: Ethernet",
		"devices/pci0000:40/0000:40:00.1/physfn -> ../0000:40:00.0",
		"class/infiniband/rxe0 -> ../../devices/virtual/infiniband/rxe0",
		"devices/virtual/infiniband/rxe0/ports/1/link_layer: Ethernet",
		"class/infiniband/irdma0/device -> ../../../devices/pci0000:40/0000:40:02.0",
		"class/infiniband/irdma0/node_type: 4: RNIC",
		"class/infiniband/irdma0/ports/1/link_layer: Ethernet",
	)
}

func TestRead(t *testing.T) {
	want := gpu.Inventory{
		Driver:  "580",
		Machine: "DGXH100",
		NUMA:    []gpu.NUMANode{{ID: 0, CPUs: "0-55,112-167", Distances: []int{10, 21, 32}}, {ID: 1, CPUs: "56-111,168-223"}, {ID: 10}},
		NICs: []gpu.NIC{
			{Name: "mlx5_2", Kind: gpu.RoCE, PCI: "00000000:40:00.0", Path: []string{"pci0000:40"}},
			{
				Name: "mlx5_10", Kind: gpu.InfiniBand, PCI: "00000000:1a:00.0", NUMA: numaNode(0), Active: true,
				Path: []string{"pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:04.0"},
			},
			{Name: "rdmap0s6", Kind: gpu.EFA, PCI: "00000000:00:06.0", NUMA: numaNode(1), Path: []string{"pci0000:00"}, Active: true},
		},
		GPUs: []gpu.Device{
			{
				UUID: "0", PCI: "00000000:19:00.0", NUMA: numaNode(0), CPUs: "0-55,112-167",
				Path: []string{"pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0"},
			},
			{Index: 1, UUID: "1", PCI: "00000001:00:00.0", CPUs: "0-223", Path: []string{"pci0001:00"}},
			{Index: 2, UUID: "2", PCI: "00000000:99:00.0", NUMA: numaNode(1), CPUs: "56-111,168-223"},
			{Index: 3, UUID: "3", NUMA: numaNode(5), CPUs: "5"},
		},
	}
	given := func() *gpu.Inventory {
		return &gpu.Inventory{Driver: "580", Machine: "old", GPUs: []gpu.Device{
			{UUID: "0", PCI: "00000000:19:00.0", NUMA: numaNode(7), CPUs: "7", Path: []string{"old"}},
			{Index: 1, UUID: "1", PCI: "00000001:00:00.0", NUMA: numaNode(7)}, // the kernel says that it has none
			{Index: 2, UUID: "2", PCI: "00000000:99:00.0", NUMA: numaNode(1)}, // the kernel knows nothing
			{Index: 3, UUID: "3", NUMA: numaNode(5), CPUs: "5"},               // nobody knows where it is
		}}
	}
	tree := machine()
	check := func(t *testing.T, sys fs.FS) {
		t.Helper()
		got := given()
		Read(sys, got)
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("got\n%+v\nwant\n%+v", *got, want)
		}
	}
	t.Run("in memory", func(t *testing.T) { check(t, tree) })
	t.Run("on disk", func(t *testing.T) {
		check(t, onDisk(t, tree))
	})
}

func TestByNumber(t *testing.T) {
	want := []string{"", "a", "b", "mlx5_0", "mlx5_2", "mlx5_010", "mlx5_10", "mlx5_10f", "mlx6_0", "mlx6_bond_0", "rdmap79s0", "rdmap113s0", "rdmap113s2"}
	for i, a := range want {
		for j, b := range want {
			if c := byNumber(a, b); (c < 0) != (i < j) || (c > 0) != (i > j) {
				t.Errorf("byNumber(%q, %q) = %d", a, b, c)
			}
		}
	}
}

// Whatever is missing or broken, what was known before stays.
func TestReadStrangeSysfs(t *testing.T) {
	given := gpu.Inventory{
		Machine: "m", NUMA: []gpu.NUMANode{{ID: 3, CPUs: "1"}}, NICs: []gpu.NIC{{Name: "n"}},
		GPUs: []gpu.Device{{PCI: "00000000:19:00.0", NUMA: numaNode(3), CPUs: "1", Path: []string{"p"}}},
	}
	const device = "bus/pci/devices/0000:19:00.0"
	for name, tree := range map[string]fstest.MapFS{
		"nothing":               {},
		"empty files":           sysfs("class/dmi/id/product_name: ", device+"/numa_node: ", device+"/local_cpulist: "),
		"nonsense":              sysfs("class/dmi/id/product_name/x: ", device+"/numa_node: many", device+"/local_cpulist: <all>", "devices/system/node/nodeX/cpulist: 1", "devices/system/node/node-1/cpulist: 1"),
		"files for directories": sysfs("class: ", "bus: ", "devices: "),
		"a circle":              sysfs(device + " -> ../devices/0000:19:00.0"),
		"out of the tree":       sysfs(device + " -> ../../../../../../../../etc"),
		"too far up":            sysfs(device+" -> ../../../../../devices/pci0000:00/0000:19:00.0", "devices/pci0000:00/0000:19:00.0/x: "),
		"an absolute link":      sysfs(device + " -> /sys/devices/pci0000:00/0000:19:00.0"),
		"another device":        sysfs(device+" -> ../../../devices/pci0000:00/0000:20:00.0", "devices/pci0000:00/0000:20:00.0/x: "),
		"not on a PCI bus":      sysfs(device+" -> ../../../devices/platform/0000:19:00.0", "devices/platform/0000:19:00.0/x: "),
		"something on a device": sysfs(device+" -> ../../../devices/pci0000:00/0000:00:01.0/usb1/0000:19:00.0", "devices/pci0000:00/0000:00:01.0/usb1/0000:19:00.0/x: "),
	} {
		t.Run(name, func(t *testing.T) {
			got := given
			got.GPUs = []gpu.Device{given.GPUs[0]}
			Read(onDisk(t, tree), &got)
			if !reflect.DeepEqual(got, given) {
				t.Errorf("got\n%+v\nwant\n%+v", got, given)
			}
		})
	}
}

// A kernel that knows of RDMA cards but has none is one that says so.
func TestReadNoNICs(t *testing.T) {
	inv := &gpu.Inventory{NICs: []gpu.NIC{{Name: "gone"}}}
	Read(sysfs("class/infiniband/rxe0/ports/1/link_layer: Ethernet"), inv)
	if len(inv.NICs) > 0 {
		t.Errorf("there are %+v", inv.NICs)
	}
}

// Where links cannot be read the path stays unknown, and the rest is known.
func TestReadWithoutLinks(t *testing.T) {
	dir := "bus/pci/devices/0000:19:00.0"
	inv := &gpu.Inventory{GPUs: []gpu.Device{{PCI: "00000000:19:00.0"}}}
	Read(struct{ fs.FS }{sysfs(dir+"/numa_node: 1", dir+"/local_cpulist: 4-7")}, inv)
	if d := inv.GPUs[0]; d.NUMA == nil || *d.NUMA != 1 || d.CPUs != "4-7" || d.Path != nil {
		t.Errorf("%+v", d)
	}
}

// TestReadThisMachine reads the sysfs of the machine that the test runs on, which
// has at least a processor.
func TestReadThisMachine(t *testing.T) {
	const sys = "/sys"
	nodes, err := filepath.Glob(path.Join(sys, "devices/system/node/node[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	var inv gpu.Inventory
	Read(os.DirFS(sys), &inv)
	if len(inv.NUMA) != len(nodes) {
		t.Errorf("NUMA nodes %+v, the kernel has %v", inv.NUMA, nodes)
	}
	for i, n := range inv.NUMA {
		if i == 0 && n.CPUs == "" {
			t.Errorf("node %d has no CPUs", n.ID)
		}
	}
}

// FuzzRead holds that no name of a link and no text of a file does more than say
// less, and that what is taken for a path looks like one.
func FuzzRead(f *testing.F) {
	f.Add("00000000:19:00.0", "../../../devices/pci0000:16/0000:16:01.0/0000:19:00.0", "0", "0-3", "InfiniBand")
	f.Add("0000:19:00.0", "../../../devices/pci0000:16/pci0000:17/0000:19:00.0", "-1", "", "Ethernet")
	f.Add("ffffffff:ff:ff.f", "/", "9999999999999999999", "<b>", "")
	f.Fuzz(func(t *testing.T, pci, target, numa, cpus, layer string) {
		addr, ok := SysfsAddress(pci)
		if !ok {
			addr = "0000:00:00.0"
		}
		tree := sysfs(
			"devices/pci0000:16/0000:16:01.0/0000:19:00.0/numa_node: "+numa,
			"devices/pci0000:16/0000:16:01.0/0000:19:00.0/local_cpulist: "+cpus,
			"devices/system/node/node0/cpulist: "+cpus,
			"class/infiniband/x/ports/1/link_layer: "+layer,
		)
		link := &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
		tree["bus/pci/devices/"+addr] = link
		tree["class/infiniband/x/device"] = link
		inv := &gpu.Inventory{GPUs: []gpu.Device{{PCI: pci}}}
		Read(inMemory{tree}, inv)
		d := &inv.GPUs[0]
		if d.NUMA != nil && *d.NUMA < 0 || strings.Trim(d.CPUs, "0123456789,-") != "" {
			t.Errorf("%+v", d)
		}
		for i, part := range d.Path {
			if !isHostBridge(part) && (i == 0 || !isAddress(part)) {
				t.Errorf("path %v", d.Path)
			}
		}
		for _, n := range inv.NICs {
			if _, ok := SysfsAddress(n.PCI); !ok || len(n.Path) == 0 || n.Kind == "" {
				t.Errorf("%+v", n)
			}
		}
		New(inv).Matrix()
	})
}
