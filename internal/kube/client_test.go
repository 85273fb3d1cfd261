// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/kube/kubetest"
)

func TestConnectRefuses(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	broken := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, want string
		options    Options
	}{
		{"no domain", "--domain", Options{Logger: log}},
		{"no logger", "logger", Options{Domain: "example.com"}},
		{"outside a cluster", "--kubeconfig", Options{Domain: "example.com", Logger: log}},
		{"no such file", "nowhere", Options{Domain: "example.com", Logger: log, Kubeconfig: "/nowhere"}},
		{"broken file", broken, Options{Domain: "example.com", Logger: log, Kubeconfig: broken}},
	} {
		if _, err := Connect(test.options, 20); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want an error that names %q", test.name, err, test.want)
		}
	}
}

// $KUBECONFIG may have several paths, which are one configuration together.
func TestKubeconfigsAreMerged(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for _, text := range []string{"{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}]}",
		"{apiVersion: v1, kind: Config, clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}"} {
		paths = append(paths, filepath.Join(dir, strconv.Itoa(len(paths))))
		if err := os.WriteFile(paths[len(paths)-1], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config, err := credentials(strings.Join(append(paths, "/nowhere"), string(os.PathListSeparator)))
	if err != nil || config.Host != "http://127.0.0.1:1" {
		t.Errorf("%+v, %v", config, err)
	}
}

func TestStopsWhileServerHangs(t *testing.T) {
	s := newServer(t)
	asked := make(chan struct{}, 10)
	release := make(chan struct{})
	s.Set(func() {
		s.Fault = func(string, string, http.ResponseWriter) bool {
			asked <- struct{}{}
			<-release
			return true
		}
	})
	t.Cleanup(func() { close(release) })
	c, j := connect(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- c.Follow(ctx, Target{Resource: Nodes, Name: "node-1"}, func(*unstructured.Unstructured) { t.Error("told of a node that no one sent") })
	}()
	kubetest.Receive(t, asked)
	cancel()
	if err := kubetest.Receive(t, done); err != context.Canceled {
		t.Errorf("ended with %v", err)
	}
	if n := j.Count("level=WARN"); n != 0 {
		t.Errorf("%d warnings about our own end", n)
	}
}
