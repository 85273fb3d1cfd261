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
		"lower the Node's status.allocatable at once when devices are withdrawn, for the scheduler; "+
			"otherwise the kubelet does so up to ten seconds later")
	f.gpuNode = command.Choice{Value: "auto", Of: []string{"auto", "pods", "holders", "off"}}
	fs.Var(&f.gpuNode, "gpunode",
		"the node's GPUNode object: auto (it names holders if the kubelet is older than 1.36), "+
			"pods (only the pods' own status names them), "+
			"holders (it always names them, and is written at every change) or off")
	fs.BoolVar(&f.holdScaleDown, "hold-scale-down", false,
		"keep Cluster Autoscaler from removing the node while pods hold devices of its GPUs, "+
			"with its annotation scale-down-disabled")
	fs.StringVar(&f.startupTaint, "startup-taint", "",
		"`key` of a taint that the node is registered with: "+
			"the agent removes it once the node can take pods that ask for GPUs; "+
			"needs deployments/components/startup-taint")
}

// labelFlags are the flags for the node's labels, and for who writes them.
type labelFlags struct {
	node, nvidia command.Choice
}

func (f *labelFlags) register(fs *pflag.FlagSet) {
	f.node = command.Choice{Value: "api", Of: []string{"api", "nfd", "none"}}
	fs.Var(&f.node, "node-labels",
		"how the node gets labels that describe its GPUs: api (the agent writes them), "+
			"nfd (a features file for Node Feature Discovery, in --nfd-dir) or none")
	f.nvidia = command.Choice{Value: "absent", Of: []string{"absent", "never"}}
	fs.Var(&f.nvidia, "nvidia-labels",
		"the nvidia.com labels that GPU Feature Discovery writes: "+
			"absent (each one that no other program has written) or never")
}
