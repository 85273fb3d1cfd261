// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

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
	rest, err := parse(fs, args)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return fmt.Errorf("gpu-agent topology: unexpected argument %q", rest[0])
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
