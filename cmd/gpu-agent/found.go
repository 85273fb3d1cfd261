// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// modesOf returns the layouts that GPUs are to have. A GPU without one has remarks only.
type modesOf func(*gpu.Inventory) map[gpu.UUID]status.Mode

// look reads the driver once, and what earlier owners have left on the node.
func look(ctx context.Context, c console, d *driverFlags, modes modesOf) (*gpu.Inventory, []found.Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, commandPatience)
	defer cancel()
	driver, err := openOnce(ctx, c, d)
	if err != nil {
		return nil, nil, err
	}
	defer driver.Close()
	inv, err := driver.Inventory(ctx)
	if err != nil {
		return nil, nil, err
	}
	around := driver.Surroundings()
	limits := guard.ByCgroup{Driver: driver, Runtime: node.NewRuntime(node.RuntimeOptions{Cgroups: filepath.Join(d.sys, "fs/cgroup")})}
	n := found.Node{Driver: inv.Driver, Modeset: around.Modeset, MPS: around.MPS, MPSDirs: around.MPSDirs}
	of := modes(&inv)
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		g := found.GPU{Device: *dev, Mode: of[dev.UUID]}
		if dev.Fault == "" {
			g.Setup, err = driver.Setup(ctx, dev.UUID)
			if err == nil {
				g.Setup.Limits, err = limits.Others(ctx, dev.UUID)
			}
			if err != nil {
				fmt.Fprintf(c.err, "not all is known of %s: %v\n", dev.Name(), err)
			}
			// Which pod a process belongs to is the agent's to find out.
			g.Owners = g.Setup.Processes
			if found.Resets(&g) {
				// An agent lets go of the GPU before it resets it.
				g.Clients = slices.DeleteFunc(driver.Clients(dev.Minor), func(c gpu.Client) bool { return c.Name == "gpu-agent" })
			}
		}
		n.GPUs = append(n.GPUs, g)
	}
	return &inv, found.Look(n), nil
}

// noModes is modesOf if no partition is known.
func noModes(*gpu.Inventory) map[gpu.UUID]status.Mode { return nil }

// wholeGPUs is modesOf if the GPUs are to be given out, and it is not known how.
func wholeGPUs(inv *gpu.Inventory) map[gpu.UUID]status.Mode {
	out := map[gpu.UUID]status.Mode{}
	for i := range inv.GPUs {
		out[inv.GPUs[i].UUID] = status.Whole
	}
	return out
}

// modes returns the layouts of the partition of --partition, or default. GPUs that the file does
// not lay out have none; neither has any if the partition does not fit.
func (a *planFlags) modes(f *config.File) modesOf {
	return func(inv *gpu.Inventory) map[gpu.UUID]status.Mode {
		out := map[gpu.UUID]status.Mode{}
		want, err := f.Desire(cmp.Or(a.partition, agent.DefaultPartition), inv, a.of.node())
		if err != nil {
			return out // check prints the mistakes
		}
		for _, w := range want.GPUs {
			out[w.GPU] = status.Mode(w.Mode)
		}
		return out
	}
}

// printFound prints findings, each with what to do.
func printFound(out io.Writer, findings []found.Finding) {
	for _, f := range findings {
		fmt.Fprintf(out, "%s: %s\n    do: %s\n", f.Reason, f.What(), f.Do)
	}
}

// printConditions prints what an agent has found.
func printConditions(out io.Writer, of []status.Condition) {
	for _, f := range of {
		fmt.Fprintf(out, "%s: %s\n", f.Reason, f.Message)
	}
}

// checkNode is check --node.
func (a *planFlags) checkNode(ctx context.Context, c console) error {
	modes := modesOf(wholeGPUs)
	if a.config != "" {
		f, err := a.read(c)
		if err != nil {
			return err
		}
		modes = a.modes(f.File)
	}
	inv, findings, err := look(ctx, c, &a.driver, modes)
	if err != nil {
		return fmt.Errorf("read this node's GPUs: %w", err)
	}
	printFound(c.out, findings)
	if len(findings) == 0 {
		fmt.Fprintf(c.out, "%d GPUs: earlier owners have left nothing\n", len(inv.GPUs))
	}
	if slices.ContainsFunc(findings, func(f found.Finding) bool { return f.Type != status.Noted }) {
		return errNotApplied
	}
	return nil
}
