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
	"example.com/gpu-agent/pkg/cdi"
)

// cleanUp is `gpu-agent cleanup`.
func cleanUp(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "cleanup", "", "Takes away what agents have left on this node and its Node object: labels, annotation,\n"+
		"condition, CDI files, sockets and the state directory. It refuses while an agent runs, and\n"+
		"while pods hold devices. What operators have set stays.")
	var n nodeFlags
	var kubeconfig, nodeName, domain, resourceDomain string
	n.register(fs)
	fs.StringVar(&kubeconfig, "kubeconfig", "", "`file` with the API server's address and credentials (default: the pod's service account)")
	fs.StringVar(&nodeName, "node-name", "", "`name` of the Node; without it the API server is not spoken to")
	fs.StringVar(&domain, "domain", "example.com", "`domain` of labels, annotations and the CDI vendor")
	fs.StringVar(&resourceDomain, "resource-domain", "", "`domain` of the resources (default: --domain)")
	wait := fs.Bool("wait", false, "where it is refused, try again until it is not; then stay until told to end")
	rest, err := parse(fs, args)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return fmt.Errorf("gpu-agent cleanup: unexpected argument %q", rest[0])
	}
	if resourceDomain == "" {
		resourceDomain = domain
	}
	for flag, domain := range map[string]string{"--domain": domain, "--resource-domain": resourceDomain} {
		if err := cdi.ValidateDomain(domain); err != nil {
			return fmt.Errorf("gpu-agent cleanup: %s: %w", flag, err)
		}
	}
	log := slog.New(slog.NewTextHandler(c.err, nil))
	runtime := n.runtime(domain, log)
	defer runtime.Close()
	job := cleanup.Node{KubeletDir: n.kubeletDir, CDIDir: n.cdiDir, StateDir: n.stateDir, NFDDir: n.nfdDir,
		Domain: domain, ResourceDomain: resourceDomain, Runtime: runtime}
	if nodeName != "" {
		job.Object = func(ctx context.Context) error {
			client, err := kube.New(kube.Options{Kubeconfig: kubeconfig, NodeName: nodeName, Domain: domain, Logger: log})
			if err != nil {
				return err
			}
			return errors.Join(client.Mark(ctx, kube.Marks{}), client.RemoveCondition(ctx, domain+"/"+agent.HealthCondition))
		}
	}
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
