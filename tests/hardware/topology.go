// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/topology"
)

// links holds each GPU's account of its NVLinks against its peers'.
func links(t *testing.T, opts nvml.Options) {
	inv := read(t, Open(t, opts))
	linked := false
	for _, dev := range inv.GPUs {
		up := 0
		for _, l := range dev.Links {
			up += l.NVLink
		}
		if up > dev.Lanes {
			t.Errorf("GPU %d has %d lanes, of which %d are up", dev.Index, dev.Lanes, up)
		}
		for _, l := range dev.Links {
			linked = true
			if l.NVLink <= 0 || l.Version < 0 || l.LaneMBps < 0 {
				t.Errorf("GPU %d has a link of %d lanes: %+v", dev.Index, l.NVLink, l)
			}
			// From NVLink 1's 20 GB/s on; the bounds are for a figure in another unit.
			if l.LaneMBps > 0 && (l.LaneMBps < 10_000 || l.LaneMBps > 1_000_000) {
				t.Errorf("GPU %d has lanes of %d MB/s", dev.Index, l.LaneMBps)
			}
			if l.Switch {
				continue
			}
			if l.To < 0 || l.To >= len(inv.GPUs) || l.To == dev.Index {
				t.Errorf("GPU %d is linked to GPU %d", dev.Index, l.To)
				continue
			}
			back := l
			back.To = dev.Index
			if !slices.Contains(inv.GPUs[l.To].Links, back) {
				t.Errorf("GPU %d has %+v to GPU %d, which has %+v", dev.Index, l, l.To, inv.GPUs[l.To].Links)
			}
		}
		t.Logf("GPU %d has the links %+v, fabric %+v", dev.Index, dev.Links, dev.Fabric)
		if dev.Fabric != nil && !fabricForm.MatchString(dev.Fabric.Cluster) {
			t.Errorf("GPU %d is in the fabric %q", dev.Index, dev.Fabric.Cluster)
		}
	}
	if !linked {
		t.Skip("skipped: no GPU has an active NVLink")
	}
}

var (
	fabricForm = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	cpusForm   = regexp.MustCompile(`^\d+(-\d+)?(,\d+(-\d+)?)*$`)
	hostForm   = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
	bridgeForm = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	classForm  = regexp.MustCompile(`^0x03[0-9a-f]{4}$`)
)

// places holds what the kernel says of GPUs and network cards against itself.
func places(t *testing.T, opts nvml.Options) {
	inv := read(t, Open(t, opts))
	t.Logf("%q has the NUMA nodes %+v and the RDMA network cards %+v", inv.Machine, inv.NUMA, inv.NICs)
	nodes := map[int]bool{}
	for i, node := range inv.NUMA {
		if node.ID < 0 || nodes[node.ID] || i > 0 && node.ID < inv.NUMA[i-1].ID || node.CPUs != "" && !cpusForm.MatchString(node.CPUs) {
			t.Errorf("NUMA nodes %+v", inv.NUMA)
		}
		nodes[node.ID] = true
	}
	check := func(what string, numa *int, path []string) {
		if numa != nil && len(nodes) > 0 && !nodes[*numa] {
			t.Errorf("%s is on NUMA node %d, and there are %+v", what, *numa, inv.NUMA)
		}
		for i, step := range path {
			if i == 0 && !hostForm.MatchString(step) || i > 0 && !bridgeForm.MatchString(step) {
				t.Errorf("%s has the path %q", what, path)
			}
		}
	}
	for _, dev := range inv.GPUs {
		what := fmt.Sprintf("GPU %d", dev.Index)
		check(what, dev.NUMA, dev.Path)
		if dev.CPUs != "" && !cpusForm.MatchString(dev.CPUs) {
			t.Errorf("%s is near to the processors %q", what, dev.CPUs)
		}
		if dev.PCIClass != "" && !classForm.MatchString(dev.PCIClass) {
			t.Errorf("%s is a PCI device of class %q", what, dev.PCIClass)
		}
		t.Logf("%s: processors %s, path %q, class %s, virtual %+v", what, dev.CPUs, dev.Path, dev.PCIClass, dev.VGPU)
	}
	names := map[string]bool{}
	for _, nic := range inv.NICs {
		check(nic.Name, nic.NUMA, nic.Path)
		if nic.Name == "" || names[nic.Name] {
			t.Errorf("network cards %+v", inv.NICs)
		}
		names[nic.Name] = true
	}
}

// topo holds the agent's matrix against that of the driver's own nvidia-smi: how
// each pair of GPUs is joined, how far each is from the network cards that both
// know, and the processors and NUMA node that each is near to.
func topo(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	inv := read(t, d)
	theirs, err := smiMatrix(t, d, opts)
	if err != nil {
		t.Skipf("skipped: %v", err)
	}
	ours := topology.New(&inv).Matrix()
	gpus := len(ours.GPUs)
	// By name, since each numbers network cards in its own order.
	names := make([]string, 0, len(ours.Cells))
	for _, g := range ours.GPUs {
		names = append(names, fmt.Sprintf("GPU%d", g.Index))
	}
	for _, n := range ours.NICs {
		names = append(names, n.Name)
	}
	compared := 0
	for i, row := range names[:gpus] {
		their, ok := theirs[row]
		if !ok {
			t.Errorf("nvidia-smi topo -m has no %s", row)
			continue
		}
		for j, column := range names {
			cell, ok := their.cells[column]
			if !ok && j >= gpus {
				continue // a network card that one of the two leaves out
			}
			compared++
			if cell != ours.Cells[i][j] {
				t.Errorf("%s to %s is %q, and nvidia-smi says %q", row, column, ours.Cells[i][j], cell)
			}
		}
		// In a virtual machine one of the two may say nothing.
		g, numa := ours.GPUs[i], "none"
		if g.NUMA != nil {
			numa = strconv.Itoa(*g.NUMA)
		}
		t.Logf("%s is near to the processors %q, NUMA node %s; nvidia-smi says %q, %q", row, g.CPUs, numa, their.cpus, their.numa)
		if cpusForm.MatchString(g.CPUs) && cpusForm.MatchString(their.cpus) && g.CPUs != their.cpus {
			t.Errorf("%s is near to the processors %q, and nvidia-smi says %q", row, g.CPUs, their.cpus)
		}
		if isNumber(numa) && isNumber(their.numa) && numa != their.numa {
			t.Errorf("%s is near to NUMA node %s, and nvidia-smi says %s", row, numa, their.numa)
		}
	}
	t.Logf("compared %d cells", compared)
}

func isNumber(s string) bool { _, err := strconv.Atoi(s); return err == nil }

// smiRow is a GPU's row in the matrix of nvidia-smi: cells by the names of columns,
// where a network card has the kernel's name.
type smiRow struct {
	cells      map[string]string
	cpus, numa string
}

// smiMatrix runs the driver's nvidia-smi topo -m. An error says what is missing.
func smiMatrix(t *testing.T, d *nvml.Driver, opts nvml.Options) (map[string]smiRow, error) {
	t.Helper()
	tool := ""
	for _, dir := range []string{"usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin", "opt/bin"} {
		path := filepath.Join(opts.DriverRoot, dir, "nvidia-smi")
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			tool = path
			break
		}
	}
	if tool == "" {
		return nil, fmt.Errorf("there is no nvidia-smi below %s", opts.DriverRoot)
	}
	cmd := exec.CommandContext(wait(t), tool, "topo", "-m")
	if filepath.IsAbs(d.Library()) {
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(d.Library()))
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("this nvidia-smi has no topo -m: %w: %s", err, out)
	}
	t.Logf("nvidia-smi topo -m:\n%s", out)
	return parseMatrix(string(out))
}

// parseMatrix reads what nvidia-smi topo -m prints: columns between tabs, network
// cards as NIC0 and so on with their names in a legend below (or, by older
// versions, with their names at once).
func parseMatrix(text string) (map[string]smiRow, error) {
	lines := strings.Split(escapes.ReplaceAllString(text, ""), "\n")
	names := map[string]string{} // of network cards, from the legend
	for _, line := range lines {
		if m := legendForm.FindStringSubmatch(line); m != nil {
			names[m[1]] = m[2]
		}
	}
	rows := map[string]smiRow{}
	var columns []string
	for _, line := range lines {
		words := strings.Split(line, "\t")
		for i := range words {
			words[i] = strings.TrimSpace(words[i])
		}
		if columns == nil {
			if len(words) < 2 || words[1] != "GPU0" {
				continue
			}
			for _, word := range words[1:] {
				if strings.HasSuffix(word, "Affinity") || word == "" {
					break
				}
				if name, ok := names[word]; ok {
					word = name
				}
				columns = append(columns, word)
			}
			continue
		}
		if !strings.HasPrefix(words[0], "GPU") || len(words) < 1+len(columns) {
			continue
		}
		row := smiRow{cells: map[string]string{}}
		for i, column := range columns {
			row.cells[column] = words[1+i]
		}
		if rest := words[1+len(columns):]; len(rest) > 0 {
			row.cpus = rest[0]
			if len(rest) > 1 {
				row.numa = rest[1]
			}
		}
		rows[words[0]] = row
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("there is no matrix in what nvidia-smi topo -m says: %q", text)
	}
	return rows, nil
}

var (
	escapes    = regexp.MustCompile("\x1b\\[[0-9;]*m") // the headline is underlined
	legendForm = regexp.MustCompile(`^\s*(NIC\d+):\s+(\S+)\s*$`)
)
