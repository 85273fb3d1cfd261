// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/cleanup"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
)

// cleanUp is `gpu-agent cleanup`.
func cleanUp(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "cleanup", "", "Takes away what agents have left on this node and its Node object: labels, annotations,\n"+
		"conditions, GPUNode, CDI files, sockets and the state directory. It refuses while an agent runs, and\n"+
		"while pods hold devices. What operators have set stays.")
	var n nodeFlags
	var names nameFlags
	n.register(fs)
	names.register(fs)
	wait := fs.Bool("wait", false, "where it is refused, try again until it is not; then stay until told to end")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	if err := names.complete(); err != nil {
		return fmt.Errorf("gpu-agent cleanup: %w", err)
	}
	log := slog.New(slog.NewTextHandler(c.err, nil))
	runtime := n.runtime(names.domain, func() bool { return true }, log)
	defer runtime.Close()
	job := cleanup.Node{KubeletDir: n.kubeletDir, CDIDir: n.cdiDir, StateDir: n.stateDir, NFDDir: n.nfdDir,
		Domain: names.domain, ResourceDomain: names.resourceDomain, Runtime: runtime}
	if names.nodeName != "" {
		job.Object = func(ctx context.Context) error {
			client, err := agentkube.New(agentkube.Options{Options: kube.Options{Kubeconfig: names.kubeconfig, Domain: names.domain, Logger: log}, NodeName: names.nodeName})
			if err != nil {
				return err
			}
			errs := []error{client.Mark(ctx, agentkube.Marks{}), client.RemoveGPUNode(ctx)}
			for _, kind := range agent.Written.Conditions {
				errs = append(errs, client.RemoveCondition(ctx, names.domain+"/"+kind))
			}
			return errors.Join(errs...)
		}
	}
	var err error
	if *wait {
		err = job.Wait(ctx, func(err error) { fmt.Fprintln(c.err, err) })
	} else {
		err = job.Run(ctx)
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(c.out, "nothing of gpu-agent is left on this node")
	if *wait {
		<-ctx.Done()
	}
	return nil
}
