// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
)

// schedulerFlags are the flags for what schedulers and autoscalers are told beside the offer.
type schedulerFlags struct {
	lowerAllocatable, holdScaleDown bool
	gpuNode                         command.Choice
	startupTaint                    string
}

func (f *schedulerFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.lowerAllocatable, "lower-allocatable", true,
		"tell the scheduler at once of devices that cannot be had any more, in the Node's status.allocatable; "+
			"otherwise it hears of them up to ten seconds later, from the kubelet")
	f.gpuNode = command.Choice{Value: "auto", Of: []string{"auto", "pods", "holders", "off"}}
	fs.Var(&f.gpuNode, "gpunode",
		"the node's GPUNode object: auto (it names holders where the kubelet is older than 1.36), "+
			"pods (it never does; pods' own status does), "+
			"holders (it always does, and is written at every change) or off")
	fs.BoolVar(&f.holdScaleDown, "hold-scale-down", false,
		"keep Cluster Autoscaler from taking the node away while pods have something of its GPUs, "+
			"by its annotation scale-down-disabled")
	fs.StringVar(&f.startupTaint, "startup-taint", "",
		"`key` of a taint that the node is registered with: "+
			"the agent takes it away once pods that ask for GPUs can be sent to the node; "+
			"needs deployments/components/startup-taint")
}

// labelFlags are the flags for the node's labels, and for who writes them.
type labelFlags struct {
	node, nvidia command.Choice
}

func (f *labelFlags) register(fs *pflag.FlagSet) {
	f.node = command.Choice{Value: "api", Of: []string{"api", "nfd", "none"}}
	fs.Var(&f.node, "node-labels",
		"how the node gets labels of what its GPUs are: api (the agent writes them), "+
			"nfd (a features file for Node Feature Discovery, in --nfd-dir) or none")
	f.nvidia = command.Choice{Value: "absent", Of: []string{"absent", "never"}}
	fs.Var(&f.nvidia, "nvidia-labels",
		"the nvidia.com labels that GPU Feature Discovery writes: "+
			"absent (each where nobody else has written it) or never")
}
