// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// The kubelet reads what ends in .conf here, in the order of the names, beside its
// configuration.
const (
	settingsDir = "/etc/kubernetes/kubelet.d/"
	// promptFile is there on a node with NodeOptions.PromptStatus.
	promptFile = settingsDir + "10-prompt-status.conf"
	asideFile  = promptFile + ".aside"
	ownFile    = settingsDir + "50-lab.conf"
)

// KubeletSettings are what a kubelet runs with.
type KubeletSettings struct {
	// NodeStatusUpdate is how often it looks at its node, and writes what has
	// changed; NodeStatusReport is how often it writes in any case.
	NodeStatusUpdate, NodeStatusReport time.Duration
	// FeatureGates are those that its configuration names.
	FeatureGates map[string]bool
}

// KubeletSettings asks the kubelet what it runs with, whatever its files say.
func (n *Node) KubeletSettings(ctx context.Context) (KubeletSettings, error) {
	var o struct {
		KubeletConfig struct {
			NodeStatusUpdateFrequency, NodeStatusReportFrequency string
			FeatureGates                                         map[string]bool
		}
	}
	if err := n.api.get(ctx, n.path()+"/proxy/configz", &o); err != nil {
		return KubeletSettings{}, fmt.Errorf("ask the kubelet for its settings: %w", err)
	}
	c := o.KubeletConfig
	update, err := time.ParseDuration(c.NodeStatusUpdateFrequency)
	report, err2 := time.ParseDuration(c.NodeStatusReportFrequency)
	if err := errors.Join(err, err2); err != nil {
		return KubeletSettings{}, fmt.Errorf("read the kubelet's settings: %w", err)
	}
	return KubeletSettings{NodeStatusUpdate: update, NodeStatusReport: report, FeatureGates: c.FeatureGates}, nil
}

// SetKubelet starts the kubelet anew with settings beside its configuration, as
// lines of a KubeletConfiguration; "" takes those of an earlier call away.
func (n *Node) SetKubelet(ctx context.Context, settings string) error {
	return n.changeKubelet(ctx, func() error {
		if settings == "" {
			return removeAll(n.File(ownFile))
		}
		const kind = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
		return os.WriteFile(n.File(ownFile), []byte(kind+settings), 0o600)
	})
}

// UsersStatus starts the kubelet anew as one that looks at its node as often as
// users' kubelets do, on a node that was started with PromptStatus.
func (n *Node) UsersStatus(ctx context.Context) error {
	return n.changeKubelet(ctx, func() error { return os.Rename(n.File(promptFile), n.File(asideFile)) })
}

// PromptStatus is the opposite of UsersStatus. That it was never called is no
// error.
func (n *Node) PromptStatus(ctx context.Context) error {
	if _, err := os.Stat(n.File(promptFile)); err == nil {
		return nil
	}
	return n.changeKubelet(ctx, func() error { return os.Rename(n.File(asideFile), n.File(promptFile)) })
}

// changeKubelet starts the kubelet anew, and calls change while there is none.
func (n *Node) changeKubelet(ctx context.Context, change func() error) error {
	return n.restartKubelet(ctx, func(ctx context.Context, process string) error {
		if err := n.Stop(ctx, process); err != nil {
			return err
		}
		// A kubelet refuses to start upon the state of one with another policy, or
		// on another machine.
		err := removeAll(n.File("/var/lib/kubelet/cpu_manager_state"), n.File("/var/lib/kubelet/memory_manager_state"))
		if err := errors.Join(err, change()); err != nil {
			return fmt.Errorf("set the kubelet: %w", err)
		}
		return nil
	})
}

// removeAll removes files. That one is not there is no error.
func removeAll(files ...string) error {
	var errs []error
	for _, file := range files {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
