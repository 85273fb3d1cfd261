// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/command"
)

// tierFlags are the flags for pods of the spot tier.
type tierFlags struct {
	grace time.Duration
	// parkMemory is how much parked containers may have on the host, in MiB; 0: none is parked.
	parkMemory parkMemory
}

func (f *tierFlags) register(fs *pflag.FlagSet) {
	fs.DurationVar(&f.grace, "yield-grace", agent.DefaultYieldGrace,
		"`time` that a pod of the spot tier keeps room that a guaranteed pod was given; then its container is ended")
	fs.Var(&f.parkMemory, "park-memory",
		"`size` of the host memory that parked containers of the spot tier may have together, for what they had on GPUs; 0 parks none")
}

// parkMemory is a memoryFlag that may be 0.
type parkMemory struct{ memoryFlag }

func (m *parkMemory) String() string {
	if m.memoryFlag == 0 {
		return "0"
	}
	return m.memoryFlag.String()
}

func (m *parkMemory) Set(s string) error {
	if s == "0" {
		m.memoryFlag = 0
		return nil
	}
	return m.memoryFlag.Set(s)
}

func (f *tierFlags) complete() error {
	if f.grace < 0 {
		return command.Usagef("--yield-grace must not be negative")
	}
	return nil
}
