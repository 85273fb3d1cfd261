// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"example.com/gpu-agent/pkg/topology"
)

// showTopology prints what people know from `nvidia-smi topo -m`.
func showTopology(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "topology", "", "Prints how near this node's GPUs, CPUs and RDMA network cards are to each other, as\n`nvidia-smi topo -m` does.")
	var d driverFlags
	d.register(fs)
	var from string
	fs.StringVar(&from, "inventory", "", inventoryUsage)
	format := choice{"table", []string{"table", "json"}}
	fs.Var(&format, "o", "output `format`: table or json")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	inv, err := inventoryFrom(ctx, c, &d, from)
	if err != nil {
		return err
	}
	m := topology.New(inv).Matrix()
	if format.value == "json" {
		return printJSON(c.out, m)
	}
	return m.WriteText(c.out)
}
