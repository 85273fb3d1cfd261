// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/fleet"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
)

// A placer that cannot serve ends with the flag to change; one that cannot reach the API
// server goes on, answers nobody, and ends when it is told to.
func TestRun(t *testing.T) {
	kubeconfig := write(t, "kubeconfig", `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: u, user: {}}]}`)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	common := []string{"run", "--kubeconfig", kubeconfig, "--lease", "", "--insecure-door", "--http"}
	for want, args := range map[string][]string{
		"--listen":             {"127.0.0.1:0", "--listen", taken.Addr().String()},
		"--http":               {taken.Addr().String(), "--listen", "127.0.0.1:0"},
		"read the certificate": {"127.0.0.1:0", "--listen", "127.0.0.1:0", "--tls-cert-file", kubeconfig, "--tls-key-file", kubeconfig},
	} {
		if _, err := execute(t, append(common[:len(common):len(common)], args...)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", args, err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said := &lines{to: make(chan string, 100)}
	done := make(chan error, 1)
	go func() {
		done <- within(ctx, said, append(common[:len(common):len(common)], "127.0.0.1:0", "--listen", "127.0.0.1:0"))
	}()
	for _, want := range []string{"serving schedulers", "request fails"} {
		said.until(t, want)
	}
	_, addr, _ := strings.Cut(said.seen.String(), "msg=\"serving schedulers\" addr=")
	addr, _, _ = strings.Cut(addr, " ")
	idleConnectionsGo(t, addr)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("told to end, it ended with %v", err)
	}
}

// With --mps-apart, a pod goes to the node without pods of another namespace.
func TestMPSApart(t *testing.T) {
	const shared = "example.com/gpu.shared"
	asks := func(namespace, node string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p", UID: types.UID("p-" + namespace)}}
		p.Spec.NodeName = node
		p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{shared: resource.MustParse("1")}}}}
		return p
	}
	for want, args := range map[string][]string{"a": nil, "b": {"--mps-apart"}} {
		var f runFlags
		set := pflag.NewFlagSet("run", pflag.ContinueOnError)
		f.register(set)
		if err := errors.Join(set.Parse(append(args, "--insecure-door")), f.complete()); err != nil {
			t.Fatal(err)
		}
		books := f.books()
		for _, name := range []string{"a", "b"} {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			books.SetNode(n)
			says := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}},
				GPUs: []gpunode.GPU{{UUID: "GPU-" + name, API: "device-plugin", Compute: gpunode.Through, Resource: shared, Kind: piece.KindReplica, Total: 4,
					Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}}}}
			if err := books.SetGPUNode(name, says); err != nil {
				t.Fatal(err)
			}
		}
		books.SetPod(asks("one", "a"))
		books.SetPod(asks("other", ""))
		for _, kind := range []fleet.Kind{fleet.Nodes, fleet.Pods, fleet.GPUNodes} {
			books.Listed(kind)
		}
		if node, _, err := books.Place(t.Context(), "p-other", []string{"a", "b"}); err != nil || node != want {
			t.Errorf("%q: the pod is on %q, want %q: %v", args, node, want, err)
		}
	}
}

// Certificates are for their owner alone, and none is written over.
func TestCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "door")
	out, err := execute(t, "certificates", "--out", dir, "--names", "placer.test,10.0.0.1", "--days", "7")
	if err != nil || !strings.Contains(out, "create secret generic gpu-placer-door") {
		t.Fatalf("%s, %v", out, err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 5 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		if info, err := f.Info(); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", f.Name(), info.Mode(), err)
		}
	}
	for _, args := range [][]string{{"--out", dir}, {"--out", dir + "2", "--names", " ,"}, {"--out", dir + "3", "--days", "0"}} {
		if _, err := execute(t, append([]string{"certificates"}, args...)...); err == nil {
			t.Errorf("%q makes certificates", args)
		}
	}
}

// idleConnectionsGo has one client ask on many connections, of which the server keeps some.
func idleConnectionsGo(t *testing.T, addr string) {
	t.Helper()
	var first net.Conn
	for range 100 {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if first == nil {
			first = conn
		}
		if _, err := conn.Write([]byte("GET / HTTP/1.1\r\nHost: placer\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
	}
	// An idle connection lasts five minutes.
	if err := first.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a client keeps 100 connections: reading from the first: %v", err)
	}
}

// lines is a log of which a test waits for lines.
type lines struct {
	to   chan string
	seen strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.to <- string(p)
	return len(p), nil
}

// until waits for a line with some words; those before it count too.
func (l *lines) until(t *testing.T, words string) {
	t.Helper()
	for !strings.Contains(l.seen.String(), words) {
		select {
		case line := <-l.to:
			l.seen.WriteString(line)
		case <-time.After(20 * time.Second):
			t.Fatalf("it never says %q:\n%s", words, l.seen.String())
		}
	}
}
