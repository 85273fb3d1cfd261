// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"
)

const (
	meteredName, unmeteredName = "gpu-agent-meter-on", "gpu-agent-meter-off"

	// What the account may cost, beyond an agent that keeps none.
	mostMeterResident = 1.0 // MB
	mostMeterCPU      = 1.0 // ms in 30 s
)

// metering measures what the account costs: an agent that keeps one beside one that does not,
// with containers that come and go, and then stay. A process's memory is not the same from one
// start to the next by about as much as is asked for here, so both are started several times,
// and the figures are medians. Nor is its time: two that keep no account, measured in the same
// way, say by how much alone.
func (b *bench) metering(ctx context.Context) error {
	cpu, resident := map[string][]float64{}, map[string][]float64{}
	allocate := map[string]sample{}
	// The watchdog's looks, four a second, take a hundred times what is measured here, and not
	// the same twice. With few of them the account still learns what containers use.
	const seldom = "--watch-every=5s"
	const none = "--usage-size=0"
	control := false
	pair := func() error {
		flags := []string{seldom}
		if control {
			flags = append(flags, none)
		}
		return all(ctx, usual, func(rs []*running) error {
			of := allocate
			if control {
				of = map[string]sample{}
			}
			for range b.counted {
				if _, err := b.turn(ctx, rs, of); err != nil {
					return err
				}
			}
			// What work leaves to be done is not rest.
			if err := sleep(ctx, min(b.window, 3*time.Second)); err != nil {
				return err
			}
			for range 2 { // a sample is taken once a minute
				spent, err := b.spent(ctx, rs)
				if err != nil {
					return err
				}
				for name, ms := range spent {
					if control {
						name = "control/" + name
					}
					cpu[name] = append(cpu[name], ms)
				}
			}
			if control {
				return nil
			}
			for _, r := range rs {
				m, err := r.proc.memory()
				if err != nil {
					return err
				}
				resident[r.name] = append(resident[r.name], mb(m.resident))
			}
			return nil
		}, b.newFileAgent(meteredName, ":9507", b.watch.kubelet, flags...), b.newFileAgent(unmeteredName, ":9508", b.unwatched.kubelet, seldom, none))
	}
	for range b.pairs {
		for _, control = range []bool{false, true} {
			if err := pair(); err != nil {
				return err
			}
		}
	}
	spent := map[string]float64{}
	for _, name := range []string{meteredName, unmeteredName} {
		// The sample is in one of two windows, so it is the mean that counts.
		spent[name] = mean(cpu[name])
		b.figure("meter_holding_cpu_30s/"+name, spent[name], "ms")
		b.figure("meter_resident/"+name, median(resident[name]), "MB")
		b.figure("meter_allocate_p50/"+name, allocate[name].quantile(0.5), "ms")
		b.figure("meter_allocate_p99/"+name, allocate[name].quantile(0.99), "ms")
	}
	b.figure("meter_holding_cpu_30s/difference", spent[meteredName]-spent[unmeteredName], "ms", target{mostMeterCPU, "1 ms"})
	b.figure("meter_holding_cpu_30s/difference of two without", mean(cpu["control/"+meteredName])-mean(cpu["control/"+unmeteredName]), "ms")
	b.figure("meter_resident/difference", median(resident[meteredName])-median(resident[unmeteredName]), "MB", target{mostMeterResident, "1 MB"})
	b.note("residents were %s of the one that keeps an account, %s of the other", fmt.Sprintf("%.1f", resident[meteredName]), fmt.Sprintf("%.1f", resident[unmeteredName]))
	return nil
}

func mean(of []float64) (sum float64) {
	for _, x := range of {
		sum += x / float64(len(of))
	}
	return sum
}
