// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kubectlgpu"
)

// newBundle makes `kubectl gpu bundle`.
func newBundle() *cobra.Command {
	var to connection
	var redact bool
	var file string
	c := &cobra.Command{
		Use:   "bundle NODE",
		Short: "write all that a report needs about a node into one archive",
		Long: `Writes an archive about a node: what is wrong there, status, the agent's log, Events, partitions and
flags, the usage journal's tail, the node's objects, and versions. --redact hides the names of tenants:
namespaces, pods, containers, and the values of pods' labels. Names of nodes, GPUs and resources stay.
Look through it before you send it. Its missing.txt names what could not be read. It takes the role
gpu-agent-operator.`,
		Example: "kubectl gpu bundle node-1 --redact",
		Args:    oneNode,
		RunE: func(c *cobra.Command, args []string) (err error) {
			client, err := to.open()
			if err != nil {
				return err
			}
			now := time.Now()
			o := kubectlgpu.BundleOptions{Redact: redact, Version: build().String(), Now: now}
			if file == "-" {
				notes, err := kubectlgpu.WriteBundle(c.Context(), client, args[0], o, c.OutOrStdout())
				printNotes(c, notes)
				return err
			}
			name := cmp.Or(file, fmt.Sprintf("gpu-%s-%s.tar.gz", args[0], now.UTC().Format("20060102T150405Z")))
			// It names all tenants' pods, so no other user of this machine may read it.
			f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return err
			}
			notes, err := kubectlgpu.WriteBundle(c.Context(), client, args[0], o, f)
			if err = errors.Join(err, f.Close()); err != nil {
				return errors.Join(err, os.Remove(name))
			}
			printNotes(c, notes)
			_, err = fmt.Fprintln(c.OutOrStdout(), name)
			return err
		},
	}
	to.register(c.Flags())
	c.Flags().BoolVar(&redact, "redact", false,
		"hide the names of namespaces, pods and containers, and the values of pods' labels")
	c.Flags().StringVar(&file, "file", "",
		"`file` to write, which must not exist yet; - is the standard output (default: gpu-NODE-TIME.tar.gz)")
	c.ValidArgsFunction = completeNodes(&to, 1)
	return c
}

// printNotes prints what a bundle lacks.
func printNotes(c *cobra.Command, notes []string) {
	for _, note := range notes {
		fmt.Fprintln(c.ErrOrStderr(), "missing:", note)
	}
}

// newVerify makes `kubectl gpu verify`.
func newVerify() *cobra.Command {
	var to connection
	var o kubectlgpu.VerifyOptions
	var output *command.Choice
	c := &cobra.Command{
		Use:   "verify NODE",
		Short: "start an example pod of each resource that a node offers, and judge what it sees",
		Long: `Starts one small pod for each resource and each DeviceClass that a node offers and has free, one after
the other, and judges what nvidia-smi shows in it: one GPU, the cap's memory, or the MIG device. The pods,
and the ResourceClaims of those that ask for a DeviceClass, are in the namespace of -n, and are deleted
again. Without --image the pods have the agent's image, which the node has already. You need the right to
make pods and ResourceClaims there beside the role gpu-agent-operator. The exit code is 1 if an example
fails.`,
		Example: "kubectl gpu verify node-1 -n default",
		Args:    oneNode,
		RunE: func(c *cobra.Command, args []string) error {
			if o.Timeout <= 0 {
				return command.Usagef("--timeout must be longer than 0")
			}
			client, err := to.open()
			if err != nil {
				return err
			}
			o.Unique = strings.ToLower(rand.Text()[:8])
			v, err := kubectlgpu.Verify(c.Context(), client, args[0], o)
			if v == nil || len(v.Examples) == 0 {
				return err
			}
			if failed := show(c.OutOrStdout(), output, v, v.Write); failed != nil {
				return failed
			}
			if err != nil {
				return err
			}
			return v.Err()
		},
	}
	fs := c.Flags()
	to.register(fs)
	fs.StringVar(&o.Image, "image", "", "`image` of the pods; any that runs programs of glibc (default: the agent's)")
	fs.DurationVar(&o.Timeout, "timeout", 2*time.Minute, "`time` limit of one pod")
	output = outputFlag(fs)
	c.ValidArgsFunction = completeNodes(&to, 1)
	return c
}
