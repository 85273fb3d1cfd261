// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// server is a server that allows what is in Rules, with more words of the tests.
type server struct{ *kubetest.Server }

func newServer(t *testing.T) *server {
	s := kubetest.New(t)
	for _, r := range Rules {
		s.Allow(r.APIGroup, r.Resource, r.Verbs...)
	}
	return &server{s}
}

// connect returns a client of s whose waits are short.
func connect(t *testing.T, s *server, change ...func(*Options)) (*Client, *kubetest.Journal) {
	t.Helper()
	j := &kubetest.Journal{}
	o := Options{Options: kube.Options{Kubeconfig: kubetest.Kubeconfig(t, "http://"+s.Addr), Domain: "example.com", Logger: j.Log()}, NodeName: "node-1"}
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
