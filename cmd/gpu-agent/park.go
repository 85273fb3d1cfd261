// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"os/exec"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// parkCommand is the name of the command that loads the CUDA driver for one step of a park.
const parkCommand = "park-process"

// spareMemory is how many bytes of the node's available memory parks leave alone. The kubelet evicts pods below
// 100 MiB unless it is configured otherwise.
const spareMemory = 2 << 30

// newParkProcess makes `gpu-agent park-process`, which the agent starts.
func newParkProcess() *cobra.Command {
	var driverRoot, proc string
	c := &cobra.Command{
		Use: parkCommand, Hidden: true, Args: cobra.NoArgs,
		Short: "make one step of a container's park, which standard input names (the agent starts it)",
		RunE: func(c *cobra.Command, _ []string) error {
			return park.Serve(c.InOrStdin(), c.OutOrStdout(), proc, func() (park.Library, error) {
				return park.OpenCUDA(mps.DriverBelow(driverRoot).Libraries)
			})
		},
	}
	command.DriverRoot(c.Flags(), &driverRoot)
	c.Flags().StringVar(&proc, "proc-root", "/proc", "the host's /proc as the agent sees it, a `directory`")
	return c
}

// newParking makes what the agent parks containers with; nil if it is to park none.
func newParking(f *runFlags, driver guard.Driver, runtime *node.Runtime, proc *node.Proc, pages *lib.Pages,
	metrics *agentobs.Metrics, log *slog.Logger) (*agent.Parking, error) {
	if f.tier.parkMemory.memoryFlag == 0 {
		return nil, nil
	}
	k, err := park.Open(park.Options{
		Dir: f.node.stateDir, Most: uint64(f.tier.parkMemory.memoryFlag) << 20, Spare: spareMemory, ProcRoot: f.driver.proc, Logger: log,
		Command: func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "/proc/self/exe", parkCommand, "--driver-root", f.driver.root, "--proc-root", f.driver.proc)
		},
	})
	if err != nil {
		return nil, err
	}
	find := guard.Parkables{Driver: driver, Proc: guard.Processes{Proc: proc, Runtime: runtime}, Cgroups: runtime, Counters: pages}
	return &agent.Parking{Keeper: k, Find: find.Find, Seen: metrics}, nil
}
