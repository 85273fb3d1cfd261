// SPDX-License-Identifier: Apache-2.0

package install

import (
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

func TestProcessors(t *testing.T) {
	files, links, err := processors([]emulator.NUMASpec{{CPUs: "0-3,8-11"}, {CPUs: "4-7,12-15"}})
	if err != nil {
		t.Fatal(err)
	}
	const system = "sys/devices/system/"
	for name, want := range map[string]string{
		"cpu/online":                              "0-15\n",
		"node/online":                             "0-1\n",
		"node/node0/cpulist":                      "0-3,8-11\n",
		"node/node0/distance":                     "10 21\n",
		"node/node1/distance":                     "21 10\n",
		"cpu/cpu13/topology/core_id":              "1\n",
		"cpu/cpu5/topology/core_id":               "1\n",
		"cpu/cpu13/topology/physical_package_id":  "1\n",
		"cpu/cpu13/topology/thread_siblings_list": "5,13\n",
		"cpu/cpu3/topology/thread_siblings_list":  "3,11\n",
		"cpu/cpu3/topology/core_siblings_list":    "0-3,8-11\n",
	} {
		if got := files[system+name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]string{
		"node/node1/cpu13": "../../cpu/cpu13",
		"cpu/cpu13/node1":  "../../node/node1",
	} {
		if got := links[system+name]; got != want {
			t.Errorf("%s leads to %q, want %q", name, got, want)
		}
	}
	if len(links) != 32 {
		t.Errorf("there are %d links, want two for each CPU", len(links))
	}
	for _, nodes := range [][]string{{"x"}, {"3-1"}, {"1,1"}, {"0-99999999"}, {"0-3", "3-4"}} {
		var specs []emulator.NUMASpec
		for _, cpus := range nodes {
			specs = append(specs, emulator.NUMASpec{CPUs: cpus})
		}
		if _, _, err := processors(specs); err == nil {
			t.Errorf("the nodes %v are no machine's", nodes)
		}
	}

	// Two nodes of one socket, and memory without processors.
	one := new(int)
	files, _, err = processors([]emulator.NUMASpec{{CPUs: "0-1", Socket: one}, {CPUs: "2-3", Socket: one}, {MemoryMiB: 1}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"node/node0/distance":                   "10 12 21\n",
		"node/node1/cpumap":                     "0000000c\n",
		"node/node2/cpulist":                    "\n",
		"node/node2/meminfo":                    "Node 2 MemTotal:       1024 kB\nNode 2 MemFree:        1024 kB\n",
		"node/has_cpu":                          "0-1\n",
		"node/online":                           "0-2\n",
		"cpu/cpu3/topology/physical_package_id": "0\n",
		"cpu/cpu3/topology/core_id":             "1\n",
		"cpu/cpu3/topology/core_siblings_list":  "0-3\n",
	} {
		if got := files[system+name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
