// SPDX-License-Identifier: Apache-2.0

package install

import "testing"

func TestProcessors(t *testing.T) {
	files, links, err := processors(map[int]string{0: "0-3,8-11", 1: "4-7,12-15"})
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
	for _, nodes := range []map[int]string{{0: "x"}, {0: ""}, {0: "3-1"}, {0: "1,1"}, {0: "0-99999999"}, {0: "0-3", 1: "3-4"}} {
		if _, _, err := processors(nodes); err == nil {
			t.Errorf("the nodes %v are no machine's", nodes)
		}
	}
}
