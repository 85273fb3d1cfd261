// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
)

// layoutFlags are the flags for devices and instances that are in the way of a layout, or idle.
type layoutFlags struct {
	whenBusy, foreign, reset command.Choice
	idleTTL                  time.Duration
}

func (f *layoutFlags) register(fs *pflag.FlagSet) {
	f.whenBusy = command.Choice{Value: "drain", Of: []string{"drain", "wait"}}
	fs.Var(&f.whenBusy, "when-busy",
		"what happens to the idle devices of a GPU whose change waits for holders: "+
			"drain (withdraw them) or wait (keep them on offer)")
	f.foreign = command.Choice{Value: "keep", Of: []string{"keep", "reclaim"}}
	fs.Var(&f.foreign, "foreign-instances",
		"idle MIG instances that the agent did not make and the partition does not name: keep or reclaim (destroy)")
	f.reset = command.Choice{Value: "auto", Of: []string{"auto", "never"}}
	fs.Var(&f.reset, "reset",
		"a GPU whose MIG mode needs a reset to change: auto (reset that GPU, once it is idle) "+
			"or never (an operator must do it)")
	fs.DurationVar(&f.idleTTL, "idle-instance-ttl", 0,
		"`time` after which an idle instance made on demand is destroyed; 0 keeps it until its room is needed")
}

func (f *layoutFlags) complete() error {
	if f.idleTTL < 0 {
		return command.Usagef("--idle-instance-ttl must not be negative")
	}
	return nil
}
