// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/placerkube"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/tests/plane"
)

// watched is the API server, and how much it had written down of others' requests.
type watched struct {
	*apiServer
	from int64
}

func watch(t *testing.T, s *apiServer) watched {
	t.Helper()
	is, err := os.Stat(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	return watched{s, is.Size()}
}

// rights are verbs by resource, with its group, as "update resourceslices/status.authentication.liqo.io".
type rights map[string]bool

func (r rights) String() string { return strings.Join(slices.Sorted(maps.Keys(r)), "\n") }

func right(verb, group, resource string) string {
	if group != "" {
		resource += "." + group
	}
	return verb + " " + resource
}

// rightsOf are those of rules, those in one namespace left out where inside is false.
func rightsOf(inside bool, of ...[]kube.Rule) rights {
	out := rights{}
	for _, r := range slices.Concat(of...) {
		for _, verb := range r.Verbs {
			if r.Cluster || inside {
				out[right(verb, r.APIGroup, r.Resource)] = true
			}
		}
	}
	return out
}

// placersAccount is the placer's service account with all of its groups.
func placersAccount() http.Header {
	const all = "system:serviceaccounts"
	return http.Header{"Impersonate-User": {"system:serviceaccount:" + placer + ":" + placer}, "Impersonate-Group": {all, all + ":" + placer, "system:authenticated"}}
}

// granted are the rights that the server says the placer has in a namespace, but for those of
// everybody: to ask who they are, and what they may do.
func (w watched) granted(t *testing.T, namespace string) rights {
	t.Helper()
	var review struct {
		Status struct {
			Incomplete    bool
			ResourceRules []struct{ Verbs, APIGroups, Resources, ResourceNames []string }
		}
	}
	if err := w.do(t, placersAccount(), http.MethodPost, "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", asJSON,
		fields{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": fields{"namespace": namespace}}, &review); err != nil {
		t.Fatal(err)
	}
	if review.Status.Incomplete {
		t.Fatal("the server does not say what the placer may do")
	}
	out := rights{}
	for _, r := range review.Status.ResourceRules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					if strings.HasPrefix(resource, "selfsubject") && (group == "authorization.k8s.io" || group == "authentication.k8s.io") {
						continue
					}
					out[right(verb, group, resource)] = true
					if resource == "leases" && verb != "create" && !slices.Equal(r.ResourceNames, []string{placer}) {
						t.Errorf("the placer may %s other leases: %q", verb, r.ResourceNames)
					}
				}
			}
		}
	}
	return out
}

// used are the rights that the placer has made use of, and refused what it had none for.
func (w watched) used(t *testing.T) (used, refused rights) {
	t.Helper()
	log, err := os.Open(w.audit)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	text, err := io.ReadAll(io.NewSectionReader(log, w.from, 1<<40))
	if err != nil {
		t.Fatal(err)
	}
	used, refused = rights{}, rights{}
	for line := range bytes.Lines(text) {
		var e struct {
			Verb, RequestURI string
			ImpersonatedUser struct{ Username string }
			ObjectRef        struct{ Resource, Subresource, APIGroup string }
			ResponseStatus   struct{ Code int }
		}
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // it is being written
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		resource := e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			resource += "/" + e.ObjectRef.Subresource
		}
		switch {
		case e.ImpersonatedUser.Username != placersAccount().Get("Impersonate-User"), strings.HasPrefix(resource, "selfsubject"):
		case resource == "":
			refused[e.Verb+" "+e.RequestURI] = true // it has no business there
		case e.ResponseStatus.Code == http.StatusForbidden:
			refused[right(e.Verb, e.ObjectRef.APIGroup, resource)] = true
		default:
			used[right(e.Verb, e.ObjectRef.APIGroup, resource)] = true
		}
	}
	return used, refused
}

// TestEachDoorsRights opens the doors one by one, each with the rights of its own part of the
// manifests. By the API server's word the placer has those and no others, in its namespace and
// elsewhere; by the server's audit log the program needs every one of them, and nothing else.
func TestEachDoorsRights(t *testing.T) {
	w := watch(t, startAPIServer(t))
	w.install(t)
	w.serveKueue(t)
	w.serveLiqo(t)
	w.namespace(t, "train")
	w.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "1000", "ephemeral-storage": "1Ti", unitsName: "79"})
	w.create(t, gpuNodes, aGPUNode("gpu-1"))
	if err := w.do(t, nil, http.MethodPatch, "/api/v1/nodes/gpu-1", merge, fields{"metadata": fields{"labels": fields{"example.com/gpu.site": "on-prem"}}}, nil); err != nil {
		t.Fatal(err)
	}
	w.flavor(t, "on-prem")
	program, door := placerProgram(t), plane.FreeAddress(t)
	// What a door's part grants is taken away again, so that the next one has its own alone. What was
	// used is never forgotten.
	seen := [][]kube.Rule{placerkube.Rules}
	for _, test := range []struct {
		door, part string
		rules      []kube.Rule
		ask        func()
	}{
		{"extender", "", nil, func() { w.askExtender(t, door) }},
		{"liqo", "placer/liqo", placerkube.LiqoRules, func() {
			w.consumer(t, "milan")
			w.slice(t, "milan", liqo.Class, 40).await(t, 40, "Accepted Granted", "")
		}},
		{"kueue", "placer/kueue", placerkube.KueueRules, func() {
			w.workload(t, "one", "on-prem", "gpu-placer", 1, 30)
			w.awaitCheck(t, "one", "Ready", "there is room: gpu-1 × 1")
			w.workload(t, "large", "on-prem", "gpu-placer", 1, 79)
			w.awaitCheck(t, "large", "Retry", "none of 1 nodes has room")
		}},
	} {
		dir := "placer"
		if test.part != "" {
			dir = withComponent(t, "placer", test.part)
		}
		for _, o := range render(t, dir) {
			w.apply(t, o, false)
		}
		seen = append(seen, test.rules)
		w.await(t, "the rights are in force", func() error {
			for namespace, want := range map[string]rights{placer: rightsOf(true, placerkube.Rules, test.rules), "train": rightsOf(false, placerkube.Rules, test.rules)} {
				if have := w.granted(t, namespace); have.String() != want.String() {
					return fmt.Errorf("in %s the placer with the door %s may\n%s\nwant\n%s", namespace, test.door, have, want)
				}
			}
			return nil
		})
		w.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True))
		doors := "extender"
		if test.part != "" {
			doors += "," + test.door
		}
		p := w.startPlacer(t, program, door, "--doors="+doors)
		test.ask()
		want := rightsOf(true, seen...).String()
		w.await(t, "the door "+test.door+" has used all of its rights", func() error {
			used, refused := w.used(t)
			if len(refused) > 0 {
				t.Fatalf("the placer with the door %s has asked for\n%s", test.door, refused)
			}
			if used.String() != want {
				return fmt.Errorf("it has used\n%s\nand has\n%s", used, want)
			}
			return nil
		})
		p.End(t)
		if test.part != "" {
			if err := w.do(t, nil, http.MethodDelete, places["ClusterRoleBinding"]+"/"+placer+"-"+test.door, "", nil, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// askExtender has a pod refused, and room appear for it, of which the scheduler is told.
func (w watched) askExtender(t *testing.T, door string) {
	t.Helper()
	w.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.False))
	pod := podOf("", "", 79)
	w.show(t, pod)
	w.await(t, "a pod is refused", func() error {
		placed, err := filter(t.Context(), door, pod)
		if placed {
			err = fmt.Errorf("it is placed")
		}
		return err
	})
	w.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True))
	w.await(t, "the scheduler is told", func() error {
		var node corev1.Node
		if err := w.do(t, nil, http.MethodGet, "/api/v1/nodes/gpu-1", "", nil, &node); err != nil {
			return err
		}
		if node.Annotations["example.com/"+placerkube.RoomAnnotation] == "" {
			return fmt.Errorf("it is not")
		}
		return nil
	})
}
