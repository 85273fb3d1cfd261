// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"context"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/tests/kueue"
)

// Kueue starts the real Kueue, with a configuration that is merged into its own and with
// feature gates, and returns its process. Jobs need the controller "job-controller", too.
func (s *Server) Kueue(t testing.TB, configuration []byte, gates map[string]bool) (pid int) {
	t.Helper()
	ports := freePorts(t, 2)
	c := &cluster{s, t, 0}
	err := kueue.Start(t.Context(), c, kueue.Options{Bin: filepath.Dir(Program(t, kueue.Program)), Dir: t.TempDir(), Kubeconfig: s.Kubeconfig(t, nil),
		Webhooks: ports[0], Health: ports[1], Configuration: configuration, Gates: gates})
	if err != nil {
		t.Fatal(err)
	}
	return c.pid
}

// cluster is a server as Kueue's installation wants it.
type cluster struct {
	*Server
	t   testing.TB
	pid int
}

func (c *cluster) Do(_ context.Context, method, path, kind string, body, into any) error {
	return c.Server.Do(c.t, nil, method, path, kind, body, into)
}

func (c *cluster) Run(_ context.Context, program string, args ...string) error {
	c.pid = Background(c.t, program, args...)
	return nil
}
