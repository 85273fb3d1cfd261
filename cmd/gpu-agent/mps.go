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
	"example.com/gpu-agent/internal/mps/cuinit"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// driverContainer is where NVIDIA's GPU Operator has the files of a driver in a container, below
// the host's root.
const driverContainer = "run/nvidia/driver"

type mpsFlags struct {
	driverRoot, stateDir string
	supervise, probe     bool
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
			if f.probe {
				return runProbe(consoleOf(c))
			}
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
	c.Flags().BoolVar(&f.probe, "probe", false, "be a program that begins CUDA, says what came of it, and ends")
	f.log.Register(c.Flags())
	f.flags = c.Flags()
	return c
}

// options returns the options of package mps.
func (f *mpsFlags) options(log *slog.Logger) mps.Options {
	return mps.Options{StateDir: f.stateDir, Siblings: f.supervise, Logger: log, Driver: mpsDriver(f.driverRoot),
		Probe: []string{"/proc/self/exe", "mps", "--probe"}}
}

// mpsDriver returns the places where the driver's programs for MPS may be.
func mpsDriver(driverRoot string) (d mps.Driver) {
	for _, root := range []string{driverRoot, filepath.Join(driverRoot, driverContainer)} {
		programs, libraries := nvml.Places(root)
		d.Programs = append(d.Programs, programs...)
		if driverRoot != "/" { // otherwise the dynamic linker finds them by itself
			d.Libraries = append(d.Libraries, libraries...)
		}
	}
	return d
}

// mpsWorld is the agent's way to MPS daemons.
type mpsWorld struct {
	*mps.Client
	options mps.Options
}

func newMPSWorld(stateDir, driverRoot string, log *slog.Logger) mpsWorld {
	return mpsWorld{mps.NewClient(stateDir), mps.Options{StateDir: stateDir, Driver: mpsDriver(driverRoot), Logger: log}}
}

// End ends what a supervisor that is gone has left.
func (w mpsWorld) End(ctx context.Context) error { return mps.End(ctx, w.options) }

// endMPS ends the MPS daemons that are left below a state directory, and sets the compute mode of GPUs
// that had one to DEFAULT. It fails while a supervisor runs.
func endMPS(ctx context.Context, stateDir, driverRoot string, gpus []gpu.UUID, log *slog.Logger) error {
	if w := newMPSWorld(stateDir, driverRoot, log); w.Left() {
		err := w.End(ctx)
		if errors.Is(err, gpu.ErrInUse) {
			err = fmt.Errorf("%w; delete the DaemonSet gpu-agent-mps first", err)
		}
		if err != nil {
			return err
		}
	}
	if len(gpus) == 0 {
		return nil
	}
	driver, err := nvml.Open(ctx, nvml.Options{DriverRoot: driverRoot, Logger: log})
	if err != nil {
		return fmt.Errorf("set compute modes to DEFAULT: %w", err)
	}
	defer driver.Close()
	var errs []error
	for _, u := range gpus {
		// A GPU that has gone took its mode with it.
		if err := driver.SetComputeMode(ctx, u, gpu.ComputeDefault); err != nil && !errors.Is(err, gpu.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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

// runProbe begins CUDA and prints what came of it: 0, or CUDA's error.
func runProbe(c console) error {
	result, err := cuinit.Call()
	if err != nil {
		return fmt.Errorf("probe an MPS server: %w", err)
	}
	_, err = fmt.Fprintln(c.out, result)
	return err
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
