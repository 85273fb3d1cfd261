// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/mps/cuinit"
)

// self is this program, as its processes start it.
const self = "/proc/self/exe"

// Names of the commands that this program starts itself with.
const (
	superviseCommand = "supervise"
	probeCommand     = "probe"
)

// daemonFlags are the flags of the commands that start and end daemons.
type daemonFlags struct {
	driverRoot, stateDir string
	log                  command.Log
	// flags are all of these, as they were given.
	flags *pflag.FlagSet
}

func (f *daemonFlags) register(fs *pflag.FlagSet) {
	command.DriverRoot(fs, &f.driverRoot)
	command.StateDir(fs, &f.stateDir)
	f.log.Register(fs)
	f.flags = fs
}

// options returns the options of package mps. With siblings, daemons are children of this process's parent.
func (f *daemonFlags) options(siblings bool, log *slog.Logger) mps.Options {
	return mps.Options{StateDir: f.stateDir, Siblings: siblings, Logger: log, Driver: mps.DriverBelow(f.driverRoot),
		Probe: []string{self, probeCommand}}
}

// again returns the command line of the supervisor: this program with the same flags.
func (f *daemonFlags) again() []string {
	args := []string{self, superviseCommand}
	f.flags.Visit(func(flag *pflag.Flag) { args = append(args, fmt.Sprintf("--%s=%s", flag.Name, flag.Value)) })
	return args
}

// newRun makes `gpu-agent-mps run`.
func newRun() *cobra.Command {
	var f daemonFlags
	c := &cobra.Command{
		Use:   "run",
		Short: "be the parent of the MPS daemons and of their supervisor (the DaemonSet's program)",
		Long: `Starts the supervisor, and starts it again whenever it ends. The end of this process ends the
daemons, and with them all programs that compute on their GPUs.`,
		Example: name + " run --driver-root /host",
		RunE: func(c *cobra.Command, _ []string) error {
			return f.run(c.Context(), f.log.Logger(c.ErrOrStderr()))
		},
	}
	f.register(c.Flags())
	return c
}

// run runs the first process, until it is told to end.
func (f *daemonFlags) run(ctx context.Context, log *slog.Logger) error {
	if os.Getpid() == 1 {
		return errors.New("keep the MPS daemons: this is the first process of a PID namespace, and a daemon sees the " +
			"clients of its own namespace alone: set hostPID: true for the pod")
	}
	log.Info(name, "version", build().Version())
	return mps.Init(ctx, mps.InitOptions{
		Supervisor: f.again(), Logger: log,
		Last: func(ctx context.Context) error { return mps.Stop(ctx, f.options(false, log)) },
	})
}

// newSupervise makes `gpu-agent-mps supervise`.
func newSupervise() *cobra.Command {
	var f daemonFlags
	c := &cobra.Command{
		Use:   superviseCommand,
		Short: "start MPS daemons and answer the agent, and leave daemons alone at the end (run starts it)",
		Long: `Keeps an MPS control daemon for each GPU, as the agent asks. The daemons are children of the process
that starts this one, so that they outlive it. The next supervisor finds them.`,
		Example: name + " supervise --driver-root /host",
		RunE: func(c *cobra.Command, _ []string) error {
			return f.supervise(c.Context(), f.log.Logger(c.ErrOrStderr()))
		},
	}
	f.register(c.Flags())
	return c
}

// supervise runs the second process, until it is told to end.
func (f *daemonFlags) supervise(ctx context.Context, log *slog.Logger) (err error) {
	s, err := mps.New(f.options(true, log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return s.Run(ctx)
}

// newProbe makes `gpu-agent-mps probe`.
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:   probeCommand,
		Short: "begin CUDA, print its result and end (the supervisor starts it)",
		Long: `Calls cuInit and prints its result: 0, or CUDA's number of an error. It waits as long as that takes:
an MPS server that hangs never answers.`,
		Example: name + " probe",
		RunE: func(c *cobra.Command, _ []string) error {
			result, err := cuinit.Call()
			if err != nil {
				return fmt.Errorf("probe an MPS server: %w", err)
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), result)
			return err
		},
	}
}
