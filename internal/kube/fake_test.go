// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/kube/kubetest"
)

var configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}

func newServer(t *testing.T) *kubetest.Server {
	s := kubetest.New(t)
	s.Allow("", "configmaps", "list", "watch")
	s.Allow("", "nodes", "list", "watch")
	return s
}

// connect returns a client of s whose waits are short.
func connect(t *testing.T, s *kubetest.Server, change ...func(*Options)) (*Server, *kubetest.Journal) {
	t.Helper()
	j := &kubetest.Journal{}
	o := Options{Kubeconfig: kubetest.Kubeconfig(t, "http://"+s.Addr), Domain: "example.com", Logger: j.Log()}
	for _, f := range change {
		f(&o)
	}
	c, err := Connect(o, 20)
	if err != nil {
		t.Fatal(err)
	}
	c.Timing.PauseMin, c.Timing.PauseMax = time.Millisecond, 5*time.Millisecond
	return c, j
}
