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
}

func (f *tierFlags) register(fs *pflag.FlagSet) {
	fs.DurationVar(&f.grace, "yield-grace", agent.DefaultYieldGrace,
		"`time` that a pod of the spot tier keeps room that a guaranteed pod was given; then its container is ended")
}

func (f *tierFlags) complete() error {
	if f.grace < 0 {
		return command.Usagef("--yield-grace must not be negative")
	}
	return nil
}
