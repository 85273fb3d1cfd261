// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
)

// cleanEvery is how often --wait tries again.
const cleanEvery = 5 * time.Second

// cleaner takes away what agents have left on a node.
type cleaner struct {
	node                                         nodeFlags
	kubeconfig, nodeName, domain, resourceDomain string
	names                                        *desk.Names
	log                                          *slog.Logger
}

// cleanup is `gpu-agent cleanup`.
func cleanup(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "cleanup", "", "Takes away what agents have left on this node and its Node object: labels, annotation,\n"+
		"condition, CDI files, sockets and the state directory. It refuses while an agent runs, and\n"+
		"while pods hold devices. What operators have set stays.")
	var cl cleaner
	cl.node.register(fs)
	fs.StringVar(&cl.kubeconfig, "kubeconfig", "", "`file` with the API server's address and credentials (default: the pod's service account)")
	fs.StringVar(&cl.nodeName, "node-name", "", "`name` of the Node; without it the API server is not spoken to")
	fs.StringVar(&cl.domain, "domain", "example.com", "`domain` of labels, annotations and the CDI vendor")
	fs.StringVar(&cl.resourceDomain, "resource-domain", "", "`domain` of the resources (default: --domain)")
	wait := fs.Bool("wait", false, "where it is refused, try again until it is not; then stay until told to end")
	rest, err := parse(fs, args)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return fmt.Errorf("gpu-agent cleanup: unexpected argument %q", rest[0])
	}
	if cl.resourceDomain == "" {
		cl.resourceDomain = cl.domain
	}
	for flag, domain := range map[string]string{"--domain": cl.domain, "--resource-domain": cl.resourceDomain} {
		if err := cdi.ValidateDomain(domain); err != nil {
			return fmt.Errorf("gpu-agent cleanup: %s: %w", flag, err)
		}
	}
	cl.names = desk.ResourceNames(cl.resourceDomain)
	cl.log = slog.New(slog.NewTextHandler(c.err, nil))
	said := ""
	for {
		err := cl.clean(ctx)
		if err == nil {
			fmt.Fprintln(c.out, "nothing of gpu-agent is left on this node")
		}
		if !*wait {
			return err
		}
		again := (<-chan time.Time)(nil) // done: stay
		if err != nil {
			if err.Error() != said {
				said = err.Error()
				fmt.Fprintln(c.err, err)
			}
			again = time.After(cleanEvery)
		}
		select {
		case <-ctx.Done():
			return err
		case <-again:
		}
	}
}

// clean takes everything away, or says what stands in the way. It may be
// repeated.
func (cl *cleaner) clean(ctx context.Context) error {
	holders, err := cl.holders(ctx)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if len(holders) > 0 {
		return fmt.Errorf("clean up: these pods still hold devices: %s; delete them first", strings.Join(holders, ", "))
	}
	// First, since it is refused while an agent runs.
	if err := state.Remove(cl.node.stateDir); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	// What an agent has left mounted, as its containers ran on, has kept its
	// directories. A process that may not unmount leaves empty ones, until the next
	// boot.
	var errs []error
	if err := lib.Unmount(cl.node.stateDir); err == nil {
		errs = append(errs, state.Remove(cl.node.stateDir))
	} else if !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	files, err := dir.Open(cl.node.cdiDir, cl.domain)
	if err == nil {
		var keys []string
		if keys, err = files.List(); err == nil {
			for _, key := range keys {
				errs = append(errs, files.Remove(key))
			}
		}
	}
	sockets := filepath.Join(cl.node.kubeletDir, "device-plugins")
	resources := append(cl.names.Fixed(), plugin.Left(sockets, func(r string) bool { return cl.names.Ours(r) && !slices.Contains(cl.names.Fixed(), r) })...)
	errs = append(errs, err, plugin.RemoveSockets(sockets, resources), nfd.Remove(cl.node.nfdDir))
	if cl.nodeName != "" {
		errs = append(errs, cl.object(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// holders names the pods that have devices, by the kubelet and by the runtime.
func (cl *cleaner) holders(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	kubelet := node.NewPodResources(cl.node.kubeletDir)
	defer kubelet.Close()
	l, err := kubelet.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, h := range l.Holdings {
		if cl.names.Ours(h.Resource) {
			out = append(out, fmt.Sprintf("%s/%s (%s)", h.Namespace, h.Pod, h.Resource))
		}
	}
	runtime := cl.node.runtime(cl.domain, cl.log)
	defer runtime.Close()
	containers, err := runtime.Containers(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		for _, resource := range c.Annotations {
			out = append(out, fmt.Sprintf("%s/%s (%s)", c.Namespace, c.Pod, resource))
		}
	}
	// A pod whose init container has not been made yet is in neither.
	pods, err := runtime.Pods(ctx)
	if err != nil {
		return nil, err
	}
	checkpoint, err := node.ReadCheckpoint(cl.node.kubeletDir)
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return nil, err
	}
	for _, e := range checkpoint.Entries {
		if p, alive := pods[e.PodUID]; alive && cl.names.Ours(e.Resource) {
			out = append(out, fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, e.Resource))
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// object takes away what the agent wrote on its Node object.
func (cl *cleaner) object(ctx context.Context) error {
	client, err := kube.New(kube.Options{Kubeconfig: cl.kubeconfig, NodeName: cl.nodeName, Domain: cl.domain, Logger: cl.log})
	if err != nil {
		return err
	}
	return errors.Join(
		client.Mark(ctx, kube.Marks{}),
		client.RemoveCondition(ctx, cl.domain+"/"+agent.HealthCondition))
}
