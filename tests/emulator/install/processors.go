// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/tests/emulator"
)

// Distances between NUMA nodes as firmware's tables give them: to itself, to another
// one of the socket, and to another socket.
const (
	distanceSelf   = 10
	distanceSocket = 12
	distanceOther  = 21
)

// processors are what the kernel shows of a machine's CPUs and NUMA nodes below
// sys/devices/system, of which a kubelet learns where it may place containers:
// files by their text, and links by their targets. A node's cores have two threads
// each: the first half of its CPUs, and the second. An odd number is of cores with
// one.
func processors(nodes []emulator.NUMASpec) (files, links map[string]string, err error) {
	const system = "sys/devices/system/"
	files, links = map[string]string{}, map[string]string{}
	var online, numbers, withCPUs []int
	socket := func(n int) int {
		if s := nodes[n].Socket; s != nil {
			return *s
		}
		return n
	}
	packages, cores := map[int][]int{}, map[int]int{}
	for n := range nodes {
		cpus, err := parseList(nodes[n].CPUs)
		if err != nil {
			return nil, nil, fmt.Errorf("CPUs of NUMA node %d: %w", n, err)
		}
		numbers = append(numbers, n)
		if len(cpus) > 0 {
			withCPUs = append(withCPUs, n)
		}
		packages[socket(n)] = append(packages[socket(n)], cpus...)
	}
	for n := range nodes {
		cpus, _ := parseList(nodes[n].CPUs) // as just before
		online = append(online, cpus...)
		node := fmt.Sprintf("%snode/node%d/", system, n)
		var distances []string
		for _, other := range numbers {
			d := distanceOther
			switch {
			case other == n:
				d = distanceSelf
			case socket(other) == socket(n):
				d = distanceSocket
			}
			distances = append(distances, strconv.Itoa(d))
		}
		files[node+"cpulist"] = formatList(cpus) + "\n"
		files[node+"distance"] = strings.Join(distances, " ") + "\n"
		files[node+"cpumap"] = formatMask(cpus) + "\n"
		kib := nodes[n].MemoryMiB << 10
		files[node+"meminfo"] = fmt.Sprintf("Node %d MemTotal:       %d kB\nNode %d MemFree:        %d kB\n", n, kib, n, kib)
		own := len(cpus)
		if own%2 == 0 {
			own /= 2
		}
		first := cores[socket(n)] // of the socket's cores
		cores[socket(n)] += own
		family := slices.Sorted(slices.Values(packages[socket(n)]))
		for i, cpu := range cpus {
			siblings := []int{cpus[i%own]}
			if own < len(cpus) {
				siblings = append(siblings, cpus[i%own+own])
			}
			at := fmt.Sprintf("%scpu/cpu%d/topology/", system, cpu)
			files[at+"core_id"] = fmt.Sprintln(first + i%own)
			files[at+"physical_package_id"] = fmt.Sprintln(socket(n))
			files[at+"thread_siblings_list"] = formatList(siblings) + "\n"
			files[at+"core_siblings_list"] = formatList(family) + "\n"
			links[fmt.Sprintf("%scpu%d", node, cpu)] = fmt.Sprintf("../../cpu/cpu%d", cpu)
			links[fmt.Sprintf("%scpu/cpu%d/node%d", system, cpu, n)] = fmt.Sprintf("../../node/node%d", n)
		}
	}
	slices.Sort(online)
	if unique := slices.Compact(slices.Clone(online)); len(unique) != len(online) {
		return nil, nil, fmt.Errorf("a CPU belongs to two of the NUMA nodes %v", numbers)
	}
	for _, name := range []string{"online", "possible", "present"} {
		files[system+"cpu/"+name] = formatList(online) + "\n"
	}
	for _, name := range []string{"online", "possible", "has_memory", "has_normal_memory"} {
		files[system+"node/"+name] = formatList(numbers) + "\n"
	}
	files[system+"node/has_cpu"] = formatList(withCPUs) + "\n"
	return files, links, nil
}

// parseList reads numbers as the kernel lists them, in ascending order.
func parseList(list string) ([]int, error) {
	var out []int
	if list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		low, high, ok := strings.Cut(part, "-")
		if !ok {
			high = low
		}
		from, err := strconv.Atoi(low)
		if err != nil {
			return nil, fmt.Errorf("list %q: %w", list, err)
		}
		to, err := strconv.Atoi(high)
		if err != nil {
			return nil, fmt.Errorf("list %q: %w", list, err)
		}
		if from < 0 || to < from || to >= 1<<13 || len(out) > 0 && from <= out[len(out)-1] {
			return nil, fmt.Errorf("list %q: %q is out of order or range", list, part)
		}
		for n := from; n <= to; n++ {
			out = append(out, n)
		}
	}
	return out, nil
}

// formatList is numbers, in ascending order, as the kernel lists them.
func formatList(numbers []int) string {
	var parts []string
	for i := 0; i < len(numbers); {
		end := i + 1
		for end < len(numbers) && numbers[end] == numbers[end-1]+1 {
			end++
		}
		part := strconv.Itoa(numbers[i])
		if end > i+1 {
			part += "-" + strconv.Itoa(numbers[end-1])
		}
		parts = append(parts, part)
		i = end
	}
	return strings.Join(parts, ",")
}
