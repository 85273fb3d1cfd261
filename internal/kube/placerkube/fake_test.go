// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// newServer is a server that allows what is in the rules.
func newServer(t *testing.T) *kubetest.Server {
	s := kubetest.New(t)
	for _, r := range slices.Concat(Rules, LiqoRules, KueueRules) {
		s.Allow(r.APIGroup, r.Resource, r.Verbs...)
	}
	return s
}

// connect returns a client of s whose waits are short.
func connect(t *testing.T, s *kubetest.Server, change ...func(*kube.Options)) (*Cluster, *kubetest.Journal) {
	t.Helper()
	j := &kubetest.Journal{}
	o := kube.Options{Kubeconfig: kubetest.Kubeconfig(t, "http://"+s.Addr), Domain: "example.com", Logger: j.Log()}
	for _, f := range change {
		f(&o)
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	c.server.Timing.PauseMin, c.server.Timing.PauseMax = time.Millisecond, 5*time.Millisecond
	return c, j
}
