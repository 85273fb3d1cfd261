// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// A pod on each of two nodes that serves its node's name. They are bound to their nodes,
// so that one of a node that is not reached does not come up elsewhere.
const pairOfPods = `
apiVersion: v1
kind: Pod
metadata: {name: on-%[1]s}
spec:
  nodeName: %[1]s
  terminationGracePeriodSeconds: 0
  containers:
  - name: web
    image: localhost/busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "echo from %[1]s; mkdir /www; echo served by %[1]s > /www/index.html; exec httpd -f -p 8080 -h /www"]
`

// A node that has joined another is one of its cluster, and ends with it.
func TestJoinedNode(t *testing.T) {
	l := needNode(t)
	const first, second = "cluster-one", "cluster-two"
	_, control := startNode(t, l, first)
	joined, state := startNode(t, l, second, "--join", first, "--label", "site=elsewhere")
	kubectl := func(node string, args ...string) string {
		t.Helper()
		return strings.TrimSpace(mustCluster(t, "", append([]string{"kubectl", "--name", node, "--"}, args...)...))
	}
	for _, node := range []string{first, second} { // both speak to the one API server
		if got, want := kubectl(node, "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"), first+" "+second; got != want {
			t.Errorf("by the kubeconfig of %s the nodes are %q, want %q", node, got, want)
		}
	}
	if got := kubectl(first, "get", "nodes", "-l", "site=elsewhere", "-o", "name"); got != "node/"+second {
		t.Errorf("the label is that of %q", got)
	}
	if got := mustCluster(t, "", "ps", "--name", second); strings.Contains(got, procAPI) || !strings.Contains(got, procKubelet) {
		t.Errorf("the joined node runs\n%s", got)
	}
	if out, err := cluster(t, "", "up", "--name", "cluster-three", "--join", second); err == nil || !strings.Contains(out, "join "+first) {
		t.Errorf("joining a node that has joined another gave %v\n%s", err, out)
	}
	address := map[string]string{}
	for _, node := range []string{first, second} {
		mustCluster(t, fmt.Sprintf(pairOfPods, node), "kubectl", "--name", first, "--", "apply", "-f", "-")
		kubectl(first, "wait", "pod/on-"+node, "--for=condition=Ready", "--timeout=120s")
		address[node] = kubectl(first, "get", "pod", "on-"+node, "-o", "jsonpath={.status.podIP}")
		if got := kubectl(first, "logs", "on-"+node); got != "from "+node {
			t.Errorf("the log of the pod on %s is %q", node, got)
		}
	}
	for _, from := range []string{first, second} {
		for _, to := range []string{first, second} {
			ask := fmt.Sprintf(`printf 'GET / HTTP/1.0\r\n\r\n' | busybox nc -w 3 %s 8080`, address[to])
			for who, got := range map[string]string{
				"pod":  kubectl(first, "exec", "on-"+from, "--", "sh", "-c", ask),
				"node": mustCluster(t, "", "exec", "--name", from, "--", "sh", "-c", ask),
			} {
				if want := "served by " + to; !strings.Contains(got, want) {
					t.Errorf("the %s of %s has %q from the pod on %s, want %q", who, from, got, to, want)
				}
			}
		}
		// The API server, as in-cluster clients find it.
		kubectl(first, "exec", "on-"+from, "--", "sh", "-c", `nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null`)
	}

	spec, err := joined.spec()
	if err != nil {
		t.Fatal(err)
	}
	links := func() string { return mustCluster(t, "", "exec", "--name", first, "--", "ls", "/sys/class/net") }
	if got := links(); !strings.Contains(got, spec.linkPeer()) {
		t.Errorf("the network of the node that was joined has no %s:\n%s", spec.linkPeer(), got)
	}
	mustCluster(t, "", "down", "--name", second)
	if err := traces(second, state, ticksNow()); err != nil {
		t.Errorf("the joined node left\n%v", err)
	}
	if got := links(); strings.Contains(got, spec.linkPeer()) {
		t.Errorf("the network of the node that was joined still has %s:\n%s", spec.linkPeer(), got)
	}
	// The cluster knows it from before, and it comes back. It ends with the other,
	// however that does.
	joined, state = startNode(t, l, second, "--join", first)
	withPod(t, second)
	control.Init.signal(syscall.SIGKILL)
	ended := ticksNow()
	await(t, "both nodes go by themselves", func() error {
		if err := traces(first, control, ended); err != nil {
			return err
		}
		return traces(joined.name, state, ended)
	})
	mustCluster(t, "", "down", "--name", first)
	if _, err := joined.spec(); err == nil {
		t.Error("down of the node that was joined has not looked after the other")
	}
}
