// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// configured is a PCI configuration space with a vendor's capability, behind one
// of another kind.
func configured(capability ...byte) []byte {
	config := make([]byte, 256)
	config[configStatus] = statusCapabilities
	config[configCapabilities] = 0x60
	copy(config[0x60:], []byte{0x01, 0x80, 0x08})
	copy(config[0x80:], append([]byte{vendorSpecific, 0, byte(3 + len(capability))}, capability...))
	return config
}

// record0 is the record of a virtual GPU's capability that has the host's driver.
func record0(version, branch string) []byte {
	record := make([]byte, 22)
	record[1] = 22
	copy(record[2:], version)
	copy(record[12:], branch)
	return record
}

func TestVGPU(t *testing.T) {
	signature := []byte("VF")
	circle := configured(append(signature, record0("1", "2")...)...)
	circle[0x61] = 0x60
	at := configured(append(signature, record0("1", "2")...)...)
	at[configCapabilities] = 0xff
	for _, c := range []struct {
		name   string
		config []byte
		want   *gpu.VGPU
	}{
		{"virtual", configured(append(signature, record0("570.133.20", "r570_00")...)...), &gpu.VGPU{HostDriver: "570.133.20", HostBranch: "r570_00"}},
		{"another record first", configured(append(append(signature, 7, 4, 1, 2), record0("460.16", "r460_00")...)...), &gpu.VGPU{HostDriver: "460.16", HostBranch: "r460_00"}},
		{"without the record", configured(append(signature, 7, 4, 1, 2)...), &gpu.VGPU{}},
		{"a record of no length", configured(append(signature, 7, 0, 7, 0, 7)...), &gpu.VGPU{}},
		{"half a record", configured(append(signature, record0("1", "2")[:9]...)...), &gpu.VGPU{}},
		{"another capability of the vendor's", configured(0x00, 0x14, 0x01), nil},
		{"none", make([]byte, 256), nil},
		{"for the unprivileged", configured(append(signature, record0("1", "2")...)...)[:64], nil},
		{"fallen off the bus", []byte(strings.Repeat("\xff", 256)), nil},
		{"a list that runs in circles", circle, nil},
		{"a list that ends outside", at, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := vgpu(c.config); !reflect.DeepEqual(got, c.want) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func FuzzVGPU(f *testing.F) {
	f.Add(configured(append([]byte("VF"), record0("570.133.20", "r570_00")...)...))
	f.Add([]byte(strings.Repeat("\xff", 300)))
	f.Fuzz(func(t *testing.T, config []byte) {
		if v := vgpu(config); v != nil && (len(v.HostDriver) > 10 || len(v.HostBranch) > 10) {
			t.Errorf("%+v", v)
		}
	})
}

func TestReadPCI(t *testing.T) {
	sys := fstest.MapFS{
		"bus/pci/devices/0000:07:00.0/class":   {Data: []byte("0x030200\n")},
		"bus/pci/devices/0000:07:00.0/config":  {Data: configured(append([]byte("VF"), record0("1", "2")...)...)},
		"bus/pci/devices/10000:07:00.0/class":  {Data: []byte("0x030000\n")},
		"bus/pci/devices/0000:08:00.0/nothing": {},
	}
	for _, c := range []struct {
		dev, want gpu.Device
	}{
		{gpu.Device{PCI: "00000000:07:00.0"}, gpu.Device{PCI: "00000000:07:00.0", PCIClass: "0x030200", VGPU: &gpu.VGPU{HostDriver: "1", HostBranch: "2"}}},
		{gpu.Device{PCI: "00010000:07:00.0"}, gpu.Device{PCI: "00010000:07:00.0", PCIClass: "0x030000"}},
		{gpu.Device{PCI: "00000000:08:00.0"}, gpu.Device{PCI: "00000000:08:00.0"}},
		{gpu.Device{PCI: "00000000:07:00.0", PCIClass: "known"}, gpu.Device{PCI: "00000000:07:00.0", PCIClass: "known"}},
		{gpu.Device{PCI: "../../07:00.0"}, gpu.Device{PCI: "../../07:00.0"}},
		{gpu.Device{}, gpu.Device{}},
	} {
		got := c.dev
		readPCI(sys, &got)
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%+v, want %+v", got, c.want)
		}
	}
}

// laySysfs lays down what the kernel says of one GPU; what is given as files is
// below that GPU's directory, and "" removes one.
func laySysfs(t *testing.T, root string, files map[string]string) {
	t.Helper()
	dir := filepath.Join(root, "bus/pci/devices/0000:07:00.0")
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	try(os.MkdirAll(dir, 0o755))
	for name, content := range files {
		path := filepath.Join(dir, name)
		try(os.RemoveAll(path))
		if content != "" {
			try(os.WriteFile(path, []byte(content), 0o644))
		}
	}
}

// placed is an inventory of one GPU, with what the kernel says.
func placed(t *testing.T, d *components, fault string) gpu.Inventory {
	t.Helper()
	node := 2 // the driver's word
	inv := gpu.Inventory{GPUs: []gpu.Device{{UUID: "GPU-0", PCI: "00000000:07:00.0", NUMA: &node, Fault: fault}}}
	if err := d.place(t.Context(), &inv); err != nil {
		t.Error(err)
	}
	return inv
}

func expectPlace(t *testing.T, name string, inv gpu.Inventory, numa int, cpus, class string) {
	t.Helper()
	got := inv.GPUs[0]
	if got.NUMA == nil || *got.NUMA != numa || got.CPUs != cpus || got.PCIClass != class {
		t.Errorf("%s: NUMA node %v, CPUs %q, class %q; want %d, %q, %q", name, got.NUMA, got.CPUs, got.PCIClass, numa, cpus, class)
		return
	}
	*got.NUMA = -7 // a caller may do with its copy what it likes
}

func sysfsDriver(t *testing.T) (*components, string) {
	root := t.TempDir()
	return newComponents(&session{opts: Options{SysRoot: root}, log: slog.New(slog.NewTextHandler(t.Output(), nil))}), root
}

// What the kernel said of a GPU that fell off the bus stays; of one that sysfs does
// not know the driver's word counts.
func TestPlaceRemembers(t *testing.T) {
	d, root := sysfsDriver(t)
	expectPlace(t, "without sysfs", placed(t, d, ""), 2, "", "")
	laySysfs(t, root, map[string]string{"numa_node": "1\n", "local_cpulist": "8-15\n", "class": "0x030200\n"})
	expectPlace(t, "with it", placed(t, d, ""), 1, "8-15", "0x030200")
	laySysfs(t, root, map[string]string{"numa_node": "", "local_cpulist": "", "class": ""})
	expectPlace(t, "off the bus", placed(t, d, "it fell off the bus"), 1, "8-15", "0x030200")
	laySysfs(t, root, map[string]string{"numa_node": "0\n", "local_cpulist": "0-7\n"})
	expectPlace(t, "back in another slot", placed(t, d, ""), 0, "0-7", "0x030200")
	ended, end := context.WithCancel(t.Context())
	end()
	underWay := func() string { return d.machine.all.UnderWay() + d.machine.cardless.UnderWay() }
	for underWay() != "" { // the reading before has answered, and is about to leave
		time.Sleep(time.Millisecond)
	}
	for range 100 { // a reading that ends at once would be no sign
		if err := d.place(ended, &gpu.Inventory{}); !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
			t.Fatalf("for one who has left: %v, want ErrTimeout", err)
		}
		if what := underWay(); what != "" {
			t.Fatalf("for one who has left: %s", what)
		}
	}
}

// A network card whose firmware hangs keeps nobody from knowing where GPUs are, from
// the beginning or later; of the cards what was known goes on, until it answers.
func TestPlaceBesideACardThatHangs(t *testing.T) {
	for _, known := range []bool{false, true} {
		d, root := sysfsDriver(t)
		laySysfs(t, root, map[string]string{"numa_node": "1\n", "local_cpulist": "8-15\n"})
		card, port := filepath.Join(root, "devices/pci0000:16/0000:18:00.0"), filepath.Join(root, "class/infiniband/mlx5_0/ports/1")
		if err := errors.Join(os.MkdirAll(card, 0o755), os.MkdirAll(port, 0o755),
			os.Symlink("../../../devices/pci0000:16/0000:18:00.0", filepath.Join(root, "class/infiniband/mlx5_0/device"))); err != nil {
			t.Fatal(err)
		}
		state := filepath.Join(port, "state")
		for name, content := range map[string]string{state: "4: ACTIVE\n", filepath.Join(port, "link_layer"): "InfiniBand\n"} {
			if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		cards := 0
		if known {
			if cards = len(placed(t, d, "").NICs); cards != 1 {
				t.Fatalf("%d network cards, want one", cards)
			}
		}
		// A file whose reading hangs: a pipe that nobody writes to.
		if err := errors.Join(os.Remove(state), unix.Mkfifo(state, 0o644)); err != nil {
			t.Fatal(err)
		}
		for i := range 2 {
			laySysfs(t, root, map[string]string{"numa_node": fmt.Sprintf("%d\n", i)})
			inv := placed(t, d, "")
			expectPlace(t, "while a card hangs", inv, i, "8-15", "")
			if len(inv.NICs) != cards {
				t.Errorf("network cards %+v, want %d", inv.NICs, cards)
			}
		}
		patience, end := context.WithTimeout(t.Context(), 2*time.Minute) // no expectation
		defer end()
		open := func() (*os.File, error) { return os.OpenFile(state, os.O_WRONLY|unix.O_NONBLOCK, 0) }
		writer, err := open() // the reader is there: it hung
		for errors.Is(err, unix.ENXIO) && patience.Err() == nil {
			time.Sleep(time.Millisecond) // where all was stopped, it begins to read anew
			writer, err = open()
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Remove(state), os.WriteFile(state, []byte("1: DOWN\n"), 0o644), writer.Close()); err != nil {
			t.Fatal(err)
		}
		for {
			if inv := placed(t, d, ""); len(inv.NICs) == 1 && !inv.NICs[0].Active {
				break
			}
			if patience.Err() != nil {
				t.Fatal("in vain awaited that the card is read again")
			}
		}
	}
}
