// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// nodeFlags are the directories and sockets of the node.
type nodeFlags struct {
	kubeletDir, cdiDir, stateDir, hostRoot, runtimeEndpoint, nfdDir string
}

func (n *nodeFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&n.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's `directory`")
	fs.StringVar(&n.cdiDir, "cdi-dir", "/var/run/cdi", "`directory` that the container runtime reads CDI files from")
	command.StateDir(fs, &n.stateDir)
	fs.StringVar(&n.hostRoot, "host-root", "/",
		"`directory` where the agent sees the host's files: the runtime's socket is looked for below it")
	fs.StringVar(&n.nfdDir, "nfd-dir", nfd.Dir,
		"`directory` that Node Feature Discovery reads features files from")
	fs.StringVar(&n.runtimeEndpoint, "runtime-endpoint", "",
		"the container runtime's `socket`, unix:///… as the kubelet names it "+
			"(default: the first of the usual ones that exists)")
}

// runtime returns a client that asks the container runtime which containers have allocations of
// a domain. claims reports whether allocations of ResourceClaims count, too.
func (n *nodeFlags) runtime(domain string, claims func() bool, log *slog.Logger) *node.Runtime {
	return node.NewRuntime(node.RuntimeOptions{
		Endpoint: n.runtimeEndpoint, Root: n.hostRoot, AnnotationPrefix: cdi.AnnotationName(domain, ""), Logger: log,
		Cgroups: filepath.Join(n.hostRoot, "sys/fs/cgroup"),
		DRA:     claims,
		DeviceOf: func(source string) string {
			if key, ok := lib.KeyOf(n.stateDir, source); ok && cdi.ValidKey(key) {
				return cdi.DeviceName(domain, key)
			}
			return ""
		},
	})
}

// noKubeconfig is what counts without --kubeconfig. People run export from where they run kubectl; the
// other commands run in a pod.
const noKubeconfig = "the pod's service account; export reads $KUBECONFIG first"

// nameFlags are the flags for this Node's name, the API server, and the domains that the agent
// uses.
type nameFlags struct {
	kubeconfig, nodeName string
	command.Domains
}

func (n *nameFlags) register(fs *pflag.FlagSet) {
	command.Kubeconfig(fs, &n.kubeconfig, noKubeconfig)
	n.Register(fs)
	nodeNameFlag(fs, &n.nodeName)
}

// nodeNameFlag adds --node-name.
func nodeNameFlag(fs *pflag.FlagSet, name *string) {
	fs.StringVar(name, "node-name", "",
		"`name` of this Node; without it run and cleanup do not speak to the API server, "+
			"and advise takes that of the journal's pods")
}

// xids is a list of error numbers, written "13,31,43".
type xids []uint64

// Type returns the value's name in help.
func (x *xids) Type() string { return "numbers" }

func (x *xids) String() string {
	out := make([]string, len(*x))
	for i, n := range *x {
		out[i] = strconv.FormatUint(n, 10)
	}
	return strings.Join(out, ",")
}

func (x *xids) Set(s string) error {
	*x = xids{} // not nil: an empty list ignores none
	for word := range strings.SplitSeq(s, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		n, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return errors.New("want Xid numbers with commas between them, such as 13,31,43")
		}
		*x = append(*x, n)
	}
	return nil
}
