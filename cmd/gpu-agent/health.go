// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
)

// healthFlags are the flags for health: which errors count, and what happens to a faulty GPU.
type healthFlags struct {
	ignored     xids
	hold, probe time.Duration
	linksEvery  time.Duration
	taint       command.Choice
}

func (f *healthFlags) register(fs *pflag.FlagSet) {
	f.ignored = slices.Clone(health.DefaultIgnored)
	fs.Var(&f.ignored, "ignored-xids", "Xid `numbers` that do not make a GPU unhealthy: errors of applications")
	fs.DurationVar(&f.hold, "health-hold", health.DefaultHold,
		"`time` that a faulty GPU must be without a complaint before it is offered again")
	fs.DurationVar(&f.probe, "health-probe", health.DefaultProbe, "`time` between looks at a faulty GPU")
	fs.DurationVar(&f.linksEvery, "links-every", time.Minute,
		"`time` between looks at NVLinks, whose lanes fail and return without an event")
	noSchedule, noExecute := string(agentkube.NoSchedule), string(agentkube.NoExecute)
	f.taint = command.Choice{Value: noSchedule, Of: []string{noSchedule, noExecute}}
	fs.Var(&f.taint, "fault-taint",
		"what the taint of a faulty GPU that is offered through dra does: NoSchedule (it gets no new claims) "+
			"or NoExecute (the pods on it are ended, too)")
}

func (f *healthFlags) complete() error {
	if f.hold <= 0 || f.probe <= 0 {
		return command.Usagef("--health-hold and --health-probe must be positive")
	}
	if f.linksEvery <= 0 {
		return command.Usagef("--links-every must be positive")
	}
	return nil
}

func (f *healthFlags) options() health.Options {
	return health.Options{Ignored: f.ignored, Hold: f.hold, Probe: f.probe}
}
