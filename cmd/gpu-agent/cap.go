// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/guard"
)

// capFlags are the flags for memory caps and the watchdog.
type capFlags struct {
	policy, intruders command.Choice
	evictAfter        int
	every             time.Duration
	labels            bool
	detachEnding      bool
}

func (f *capFlags) register(fs *pflag.FlagSet) {
	f.policy = command.Choice{Value: "closed", Of: []string{"closed", "open"}}
	fs.Var(&f.policy, "cap-policy",
		"what happens to an allocation that the cap's library cannot count: closed (out of memory) or open (uncounted)")
	f.intruders = command.Choice{Value: "report", Of: []string{"report", "end"}}
	fs.Var(&f.intruders, "intruders",
		"what happens to containers that use a GPU without an allocation on it: report or end")
	fs.IntVar(&f.evictAfter, "evict-after", 0,
		"`number` of offences within an hour after which a pod is evicted; 0 is never; "+
			"needs deployments/components/evict")
	fs.DurationVar(&f.every, "watch-every", guard.DefaultEvery,
		"`time` between the watchdog's looks at a shared GPU; 0 turns it off")
	fs.BoolVar(&f.detachEnding, "mps-detach-ending", false,
		"detach the clients of MPS of pods that are deleted two seconds before their grace period ends, "+
			"so that their end harms no neighbour; needs deployments/components/mps-detach")
	fs.BoolVar(&f.labels, "cap-labels", false,
		"give the files that memory caps need the SELinux labels that let containers use them; "+
			"without SELinux in the kernel this does nothing")
}

func (f *capFlags) complete() error {
	switch {
	case f.evictAfter < 0:
		return command.Usagef("--evict-after must not be negative")
	case f.every < 0 || f.every > 0 && f.every < 10*time.Millisecond:
		return command.Usagef("--watch-every must be 10ms or more, or 0 for none")
	}
	return nil
}
