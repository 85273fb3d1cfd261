// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/cleanup"
	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"
)

// newCleanup makes `gpu-agent cleanup`.
func newCleanup() *cobra.Command {
	var n nodeFlags
	var names nameFlags
	var wait bool
	var driverRoot string
	c := &cobra.Command{
		Use:   "cleanup",
		Short: "remove what agents have left on this node and its Node object",
		Long: `Removes what agents have left on this node and its Node object: labels, annotations,
conditions, GPUNode, CDI files, sockets, MPS daemons with their compute modes, and the state
directory. It refuses while an agent or gpu-agent-mps runs, and while pods hold devices. What
operators have set stays.`,
		Example: "gpu-agent cleanup --node-name node-1 --wait",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := names.Complete(); err != nil {
				return err
			}
			return cleanUp(c.Context(), consoleOf(c), &n, &names, driverRoot, wait)
		},
	}
	n.register(c.Flags())
	names.register(c.Flags())
	command.DriverRoot(c.Flags(), &driverRoot)
	c.Flags().BoolVar(&wait, "wait", false,
		"if it is refused, try again until it succeeds; then stay until told to end")
	return c
}

func cleanUp(ctx context.Context, c console, n *nodeFlags, names *nameFlags, driverRoot string, wait bool) error {
	log := slog.New(slog.NewTextHandler(c.err, nil))
	runtime := n.runtime(names.Domain, func() bool { return true }, log)
	defer runtime.Close()
	job := cleanup.Node{KubeletDir: n.kubeletDir, CDIDir: n.cdiDir, StateDir: n.stateDir, NFDDir: n.nfdDir,
		Domain: names.Domain, ResourceDomain: names.ResourceDomain, Runtime: runtime,
		MPS: func(ctx context.Context, gpus []gpu.UUID) error {
			return endMPS(ctx, n.stateDir, driverRoot, gpus, log)
		}}
	if names.nodeName != "" {
		job.Object = func(ctx context.Context) error {
			client, err := agentkube.New(agentkube.Options{
				Options:  kube.Options{Kubeconfig: names.kubeconfig, Domain: names.Domain, Logger: log},
				NodeName: names.nodeName,
			})
			if err != nil {
				return err
			}
			errs := []error{client.Mark(ctx, agentkube.Marks{}), client.RemoveGPUNode(ctx)}
			for _, kind := range agent.Written.Conditions {
				errs = append(errs, client.RemoveCondition(ctx, names.Domain+"/"+kind))
			}
			return errors.Join(errs...)
		}
	}
	var err error
	if wait {
		err = job.Wait(ctx, func(err error) { fmt.Fprintln(c.err, err) })
	} else {
		err = job.Run(ctx)
	}
	if errors.Is(err, cleanup.ErrHeld) {
		return &command.Error{Exit: command.Blocked, Err: err}
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(c.out, "nothing of gpu-agent is left on this node")
	if wait {
		<-ctx.Done()
	}
	return nil
}
