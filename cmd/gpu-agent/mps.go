// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// driverContainer is where NVIDIA's GPU Operator has the files of a driver in a container, below
// the host's root.
const driverContainer = "run/nvidia/driver"

type mpsFlags struct {
	driverRoot, stateDir string
	supervise            bool
	log                  command.Log
	// flags are all of these, as they were given.
	flags *pflag.FlagSet
}

// newMPS makes `gpu-agent mps`.
func newMPS() *cobra.Command {
	var f mpsFlags
	c := &cobra.Command{
		Use:   "mps",
		Short: "keep the MPS daemons of this node's GPUs (the program of the DaemonSet gpu-agent-mps)",
		Long: `Keeps an MPS control daemon for each GPU whose partition has compute: mps, as the agent asks.
It is the parent of the daemons and starts a second process of itself, the supervisor, again
whenever that ends. The end of this program ends the daemons, and with them all programs that
compute on those GPUs.`,
		Example: "gpu-agent mps --driver-root /host",
		RunE: func(c *cobra.Command, _ []string) error {
			if f.supervise {
				return f.runSupervisor(c.Context(), consoleOf(c))
			}
			return f.runInit(c.Context(), consoleOf(c))
		},
	}
	driverRootFlag(c.Flags(), &f.driverRoot)
	stateDirFlag(c.Flags(), &f.stateDir)
	c.Flags().BoolVar(&f.supervise, "supervise", false,
		"be the second process: start daemons and answer the agent, and leave daemons alone at the end")
	f.log.Register(c.Flags())
	f.flags = c.Flags()
	return c
}

// options returns the options of package mps.
func (f *mpsFlags) options(log *slog.Logger) mps.Options {
	o := mps.Options{StateDir: f.stateDir, Siblings: f.supervise, Logger: log}
	for _, root := range []string{f.driverRoot, filepath.Join(f.driverRoot, driverContainer)} {
		programs, libraries := nvml.Places(root)
		o.Driver.Programs = append(o.Driver.Programs, programs...)
		if f.driverRoot != "/" { // otherwise the dynamic linker finds them by itself
			o.Driver.Libraries = append(o.Driver.Libraries, libraries...)
		}
	}
	return o
}

// runInit runs the first process, until it is told to end.
func (f *mpsFlags) runInit(ctx context.Context, c console) error {
	if os.Getpid() == 1 {
		return errors.New("keep the MPS daemons: this is the first process of a PID namespace, and a daemon sees the " +
			"clients of its own namespace alone: set hostPID: true for the pod")
	}
	log := f.log.Logger(c.err)
	log.Info("gpu-agent mps", "version", version())
	return mps.Init(ctx, mps.InitOptions{
		Supervisor: f.again(), Logger: log,
		Last: func(ctx context.Context) error { return mps.Stop(ctx, f.options(log)) },
	})
}

// again returns the arguments of the supervisor's process: the same program with the same flags.
func (f *mpsFlags) again() []string {
	args := []string{"/proc/self/exe", "mps", "--supervise"}
	f.flags.Visit(func(flag *pflag.Flag) {
		if flag.Name != "supervise" {
			args = append(args, fmt.Sprintf("--%s=%s", flag.Name, flag.Value))
		}
	})
	return args
}

// runSupervisor runs the second process, until it is told to end.
func (f *mpsFlags) runSupervisor(ctx context.Context, c console) (err error) {
	s, err := mps.New(f.options(f.log.Logger(c.err)))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return s.Run(ctx)
}
