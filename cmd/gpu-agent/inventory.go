// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// driverFlags are the flags of every command that opens the driver.
type driverFlags struct {
	library, root, hostRoot, proc, sys string
}

func (d *driverFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&d.library, "nvml-library", "", "NVML's library `file` (default: sought below --driver-root)")
	command.DriverRoot(fs, &d.root)
	fs.StringVar(&d.hostRoot, "host-driver-root", "",
		"the same `directory` as the host sees it, for CDI files (default: --driver-root)")
	fs.StringVar(&d.proc, "proc-root", "/proc", "the host's /proc as the agent sees it, a `directory`")
	fs.StringVar(&d.sys, "sys-root", "/sys",
		"the host's /sys as the agent sees it, a `directory`: NUMA nodes, the PCI bus, network cards")
}

func (d *driverFlags) options(log *slog.Logger) nvml.Options {
	host := d.hostRoot
	if host == "" {
		host = d.root
	}
	return nvml.Options{
		Library: d.library, DriverRoot: d.root, HostDriverRoot: host, ProcRoot: d.proc, SysRoot: d.sys, Logger: log,
	}
}

// readDriver reads the driver once.
func readDriver(ctx context.Context, c console, d *driverFlags) (*gpu.Inventory, error) {
	ctx, cancel := context.WithTimeout(ctx, commandPatience)
	defer cancel()
	driver, err := openOnce(ctx, c, d)
	if err != nil {
		return nil, err
	}
	defer driver.Close()
	inv, err := driver.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	return &inv, nil
}

// commandPatience bounds how long a command that is not the agent waits for the driver.
const commandPatience = 30 * time.Second

// openOnce opens the driver for a command.
func openOnce(ctx context.Context, c console, d *driverFlags) (*nvml.Driver, error) {
	return nvml.Open(ctx, d.options(slog.New(slog.NewTextHandler(c.err, nil))))
}

// newInventory makes `gpu-agent inventory`.
func newInventory() *cobra.Command {
	var d driverFlags
	var output *command.Choice
	c := &cobra.Command{
		Use:   "inventory",
		Short: "print this node's GPUs, as the driver reports them",
		Long: `Prints this node's GPUs, as the driver reports them, and below them what earlier owners have
left on them. As JSON it is a recorded inventory, which other commands read with --inventory.`,
		Example: "gpu-agent inventory -o json > node-1.json",
		RunE: func(c *cobra.Command, _ []string) error {
			if output.Value == "json" {
				inv, err := readDriver(c.Context(), consoleOf(c), &d)
				if err != nil {
					return err
				}
				return command.PrintJSON(c.OutOrStdout(), inv)
			}
			inv, findings, err := look(c.Context(), consoleOf(c), &d, noModes)
			if err != nil {
				return err
			}
			if err := printInventory(c.OutOrStdout(), inv); err != nil {
				return err
			}
			printFound(c.OutOrStdout(), findings)
			return nil
		},
	}
	d.register(c.Flags())
	output = outputFlag(c.Flags(), "text", "json")
	return c
}

func printInventory(out io.Writer, inv *gpu.Inventory) error {
	fmt.Fprintf(out, "driver %s, CUDA %s, %d GPUs\n", inv.Driver, inv.CUDA, len(inv.GPUs))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "INDEX\tMODEL\tMEMORY\tRESERVED\tPCI\tNUMA\tMIG\tDEVICE\tUUID")
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if d.Fault != "" {
			fmt.Fprintf(w, "%d\t%s\t\t\t\t\t\t\t%s\tFAULT: %s\n", d.Index, d.Model, d.UUID, d.Fault)
			continue
		}
		numa := "-"
		if d.NUMA != nil {
			numa = fmt.Sprint(*d.NUMA)
		}
		mig := "no"
		if d.MIG.Capable {
			mig = "off"
		}
		if d.MIG.Enabled {
			mig = "on"
		}
		memory, reserved := fmt.Sprintf("%d MiB", d.Memory), fmt.Sprintf("%d MiB", d.Reserved)
		if d.Memory == 0 { // it uses the machine's memory
			memory, reserved = "-", "-"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t/dev/nvidia%d\t%s\n",
			d.Index, d.Model, memory, reserved, d.PCI, numa, mig, d.Minor, d.UUID)
	}
	return w.Flush()
}

// inventoryFlag adds --inventory.
func inventoryFlag(fs *pflag.FlagSet, file *string) {
	fs.StringVar(file, "inventory", "",
		"recorded inventory `file` (from gpu-agent inventory -o json) instead of this node's driver")
}

// errNoInventory explains that this node's driver could not be read.
func errNoInventory(err error) error {
	return fmt.Errorf("read this node's GPUs (or name a recorded inventory with --inventory): %w", err)
}

// inventoryFrom reads a recorded inventory. If file is empty, it reads this node's driver.
func inventoryFrom(ctx context.Context, c console, d *driverFlags, file string) (*gpu.Inventory, error) {
	if file == "" {
		inv, err := readDriver(ctx, c, d)
		if err != nil {
			return nil, errNoInventory(err)
		}
		return inv, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	inv, err := config.ReadInventory(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return inv, nil
}
