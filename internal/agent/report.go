// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"example.com/gpu-agent/internal/kube"
)

// Cluster is where the outcome is written for people and schedulers.
// internal/kube has it.
type Cluster interface {
	PatchNode(ctx context.Context, labels, annotations map[string]*string) error
	Event(regarding kube.Regarding, kind kube.EventType, reason, message string)
}

// Keys of the node's label and annotation, below the domain.
const (
	StateLabel        = "gpu.partition.state"
	MessageAnnotation = "gpu.partition.message"
	// PartitionLabel is set by operators and chooses the partition.
	PartitionLabel = "gpu.partition"
)

// reasons are the Events' reasons.
var reasons = map[State]string{
	Applied: "GPUPartitionApplied",
	Pending: "GPUPartitionPending",
	Waiting: "GPUPartitionBlocked",
	Failed:  "GPUPartitionFailed",
	Invalid: "GPUPartitionInvalid",
}

// report keeps the node's label and annotation equal to the outcome, and sends
// an Event for each new one. It runs beside the loop, since the API server may
// be slow or away; the newest outcome is all it needs. It says nothing before the
// loop has heard what is wanted, so that a restart of the agent does not make the
// label flicker.
func (a *Agent) report(ctx context.Context, c Cluster) error {
	var told Outcome
	pause := backOffMin
	for {
		for !a.snapshot.Load().Heard {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-a.news:
			}
		}
		o := a.snapshot.Load().Outcome
		if o != told {
			kind := kube.Normal
			if o.State == Failed || o.State == Invalid || o.State == Applied && o.Message != "" {
				kind = kube.Warning
			}
			message := o.Message
			if o.Partition != "" {
				message = "partition " + o.Partition + " is " + string(o.State) + ": " + o.Message
				if o.Message == "" {
					message = "partition " + o.Partition + " is applied"
				}
			}
			c.Event(kube.Regarding{}, kind, reasons[o.State], message)
			told = o
		}
		state := string(o.State)
		annotations := map[string]*string{a.opts.Domain + "/" + MessageAnnotation: nil}
		if o.Message != "" {
			annotations[a.opts.Domain+"/"+MessageAnnotation] = &o.Message
		}
		err := c.PatchNode(ctx, map[string]*string{a.opts.Domain + "/" + StateLabel: &state}, annotations)
		var again <-chan time.Time
		if err != nil {
			again, pause = time.After(pause), min(2*pause, backOffMax)
		} else {
			pause = backOffMin
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.news:
		case <-again:
		}
	}
}

// tell wakes report.
func (a *Agent) tell() {
	select {
	case a.news <- struct{}{}:
	default:
	}
}
