// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Distances between NUMA nodes as firmware's tables give them: to itself, and to
// another socket.
const (
	distanceSelf  = 10
	distanceOther = 21
)

// nodeMemory is what a NUMA node has, in KiB.
const nodeMemory = 512 << 20

// processors are what the kernel shows of a machine's CPUs and NUMA nodes below
// sys/devices/system, of which a kubelet learns where it may place containers:
// files by their text, and links by their targets. nodes are the NUMA nodes by
// number, each with its CPUs as the kernel lists them, such as "0-55,112-167". A
// node is a socket, and its cores have two threads each: the first half of its
// CPUs, and the second. An odd number is of cores with one.
func processors(nodes map[int]string) (files, links map[string]string, err error) {
	const system = "sys/devices/system/"
	files, links = map[string]string{}, map[string]string{}
	var online []int
	numbers := slices.Sorted(maps.Keys(nodes))
	for _, n := range numbers {
		cpus, err := parseList(nodes[n])
		if err != nil {
			return nil, nil, fmt.Errorf("CPUs of NUMA node %d: %w", n, err)
		}
		online = append(online, cpus...)
		node := fmt.Sprintf("%snode/node%d/", system, n)
		var distances []string
		for _, other := range numbers {
			d := distanceOther
			if other == n {
				d = distanceSelf
			}
			distances = append(distances, strconv.Itoa(d))
		}
		files[node+"cpulist"] = formatList(cpus) + "\n"
		files[node+"distance"] = strings.Join(distances, " ") + "\n"
		files[node+"meminfo"] = fmt.Sprintf("Node %d MemTotal:       %d kB\nNode %d MemFree:        %d kB\n", n, nodeMemory, n, nodeMemory)
		cores := len(cpus)
		if cores%2 == 0 {
			cores /= 2
		}
		for i, cpu := range cpus {
			siblings := []int{cpus[i%cores]}
			if cores < len(cpus) {
				siblings = append(siblings, cpus[i%cores+cores])
			}
			at := fmt.Sprintf("%scpu/cpu%d/topology/", system, cpu)
			files[at+"core_id"] = fmt.Sprintln(i % cores)
			files[at+"physical_package_id"] = fmt.Sprintln(n)
			files[at+"thread_siblings_list"] = formatList(siblings) + "\n"
			files[at+"core_siblings_list"] = formatList(cpus) + "\n"
			links[fmt.Sprintf("%scpu%d", node, cpu)] = fmt.Sprintf("../../cpu/cpu%d", cpu)
			links[fmt.Sprintf("%scpu/cpu%d/node%d", system, cpu, n)] = fmt.Sprintf("../../node/node%d", n)
		}
	}
	slices.Sort(online)
	if unique := slices.Compact(slices.Clone(online)); len(unique) != len(online) {
		return nil, nil, fmt.Errorf("a CPU belongs to two of the NUMA nodes %v", nodes)
	}
	for _, name := range []string{"online", "possible", "present"} {
		files[system+"cpu/"+name] = formatList(online) + "\n"
	}
	for _, name := range []string{"online", "possible", "has_cpu", "has_memory", "has_normal_memory"} {
		files[system+"node/"+name] = formatList(numbers) + "\n"
	}
	return files, links, nil
}

// parseList reads numbers as the kernel lists them, in ascending order.
func parseList(list string) ([]int, error) {
	var out []int
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
