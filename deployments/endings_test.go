// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/workload"
)

// podEnds notes what the agent learns of these pods when they end. Other tests' pods end at the same server.
type podEnds struct {
	uids map[string]string // by name
	told chan string
}

func (e *podEnds) PodEnds(_ context.Context, p workload.Pod, by time.Time) {
	if e.uids[p.Name] == p.UID {
		e.told <- fmt.Sprintf("%s ends in %s", p, time.Until(by).Round(10*time.Second))
	}
}

func (e *podEnds) PodGone(_ context.Context, uid string) {
	if slices.Contains(slices.Collect(maps.Values(e.uids)), uid) {
		e.told <- uid
	}
}

// tryEndings lets internal/kube/agentkube follow the ends of pods at the real server: with the base alone it
// learns of none, with the component it does, of those of its own node.
func (s *apiServer) tryEndings(t *testing.T) {
	const pods = "/api/v1/namespaces/endings/pods"
	create := func(path string, object fields) (uid string) {
		t.Helper()
		var made struct{ Metadata struct{ UID string } }
		if err := s.do(t, nil, http.MethodPost, path, asJSON, object, &made); err != nil {
			t.Fatal(err)
		}
		return made.Metadata.UID
	}
	create("/api/v1/namespaces", fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": "endings"}})
	create("/api/v1/namespaces/endings/serviceaccounts",
		fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": "default"}})
	uids := map[string]string{}
	for name, node := range map[string]string{"first": "node-1", "second": "node-1", "third": "node-1", "other": "node-2"} {
		spec := fields{"nodeName": node,
			"automountServiceAccountToken": false, "containers": []fields{{"name": "main", "image": "none"}}}
		uids[name] = create(pods, fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name}, "spec": spec})
	}
	remove := func(name string, grace int) {
		t.Helper()
		if err := s.do(t, nil, http.MethodDelete, pods+"/"+name, asJSON,
			fields{"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace}, nil); err != nil {
			t.Fatal(err)
		}
	}
	remove("first", 120)
	told := make(chan string, 100)
	client := s.agentClient(t)
	kubetest.Background(t, func(ctx context.Context) error { return client.WatchEndings(ctx, &podEnds{uids, told}) })
	select {
	case says := <-told:
		t.Fatalf("with the base alone the agent is told %q", says)
	case <-time.After(time.Second):
	}
	for _, o := range resources(t, "components/mps-detach") {
		s.apply(t, o, false)
	}
	says := func(want string) {
		t.Helper()
		if got := kubetest.Receive(t, told); got != want {
			t.Fatalf("told %q, want %q", got, want)
		}
	}
	says("endings/first ends in 2m0s")
	remove("other", 60)
	remove("second", 60)
	says("endings/second ends in 1m0s")
	remove("first", 30)
	says("endings/first ends in 30s")
	remove("other", 0)
	for _, name := range []string{"second", "third"} { // one that ends already, and one that does not
		remove(name, 0)
		says("endings/" + name + " ends in 0s")
		says(uids[name])
	}
}
