// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"path/filepath"

	"example.com/gpu-agent/tests/kueue"
)

// KueueProcess is Kueue's manager as a process of the node, by the name that Kill and StartAgain
// take.
const KueueProcess = "kueue"

// StartKueue starts the real Kueue in the node, with a configuration that is merged into its own
// and with feature gates. The kit needs [Kit.BuildKueue].
func (n *Node) StartKueue(ctx context.Context, configuration []byte, gates map[string]bool) error {
	dir, err := n.Dir("kueue")
	if err != nil {
		return err
	}
	return kueue.Start(ctx, kueueCluster{n}, kueue.Options{Bin: filepath.Dir(n.kit.Bin(kueue.Program)), Dir: dir, Kubeconfig: "/etc/kubernetes/admin.conf",
		Webhooks: 9443, Health: 8081, Configuration: configuration, Gates: gates})
}

// BuildKueue builds Kueue, which takes minutes where the cache has none.
func (k *Kit) BuildKueue(ctx context.Context) error {
	return k.Run(ctx, k.Bin("cluster"), "build", "--with", "kueue")
}

// kueueCluster is a node as Kueue's installation wants it.
type kueueCluster struct{ node *Node }

func (c kueueCluster) Do(ctx context.Context, method, path, kind string, body, into any) error {
	return c.node.api.do(ctx, method, path, kind, body, into)
}

func (c kueueCluster) Run(ctx context.Context, program string, args ...string) error {
	return c.node.Start(ctx, KueueProcess, append([]string{program}, args...)...)
}
