// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/tests/plane"
)

const authentication = "/apis/authentication.liqo.io/v1beta1"

// lent is a ResourceSlice of another cluster's, as Liqo copies it here.
type lent struct {
	*apiServer
	consumer, name string
}

func (l lent) path() string {
	return authentication + "/namespaces/liqo-tenant-" + l.consumer + "/resourceslices/" + l.name
}

// consumer makes a cluster known, as Liqo does once it has been authenticated.
func (s *apiServer) consumer(t *testing.T, name string) {
	t.Helper()
	s.namespace(t, "liqo-tenant-"+name)
	s.create(t, authentication+"/namespaces/liqo-tenant-"+name+"/tenants", fields{"apiVersion": "authentication.liqo.io/v1beta1", "kind": "Tenant", "metadata": fields{"name": name},
		"spec": fields{"clusterID": name, "tenantCondition": "Active"}})
}

// slice has a cluster ask for so many units, in a slice of a class.
func (s *apiServer) slice(t *testing.T, consumer, class string, units int) lent {
	t.Helper()
	l := lent{s, consumer, "gpus"}
	l.request(t, class, units)
	if err := l.authenticate(t); err != nil {
		t.Fatal(err)
	}
	return l
}

// request makes a slice that Liqo has not looked at yet.
func (l lent) request(t *testing.T, class string, units int) {
	t.Helper()
	l.create(t, strings.TrimSuffix(l.path(), "/"+l.name), fields{"apiVersion": "authentication.liqo.io/v1beta1", "kind": "ResourceSlice",
		"metadata": fields{"name": l.name, "labels": fields{"liqo.io/replicated": "true", "liqo.io/originID": l.consumer, "liqo.io/remoteID": l.consumer}},
		"spec":     fields{"class": class, "consumerClusterID": l.consumer, "providerClusterID": "here", "resources": fields{unitsName: fmt.Sprint(units), "cpu": "2", "memory": "4Gi"}}})
}

// authenticate says of a slice, as Liqo does, that it is who it says.
func (l lent) authenticate(t *testing.T) error {
	status := fields{"status": fields{"authParams": fields{"apiServer": "https://here", "signedCRT": "eA=="},
		"conditions": []fields{{"type": "Authentication", "status": "Accepted", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}}
	return l.do(t, nil, http.MethodPatch, l.path()+"/status", merge, status, nil)
}

// serveLiqo has the API server serve what the placer reads and writes of Liqo's.
func (s *apiServer) serveLiqo(t *testing.T) {
	t.Helper()
	source := sourceOf(t, "github.com/liqotech/liqo") + "/deployments/liqo/charts/liqo-crds/crds/authentication.liqo.io_"
	kinds := []string{"resourceslices", "tenants"}
	for _, kind := range kinds {
		for _, o := range documents(t, kind, read(t, source+kind+".yaml")) {
			s.apply(t, o, false)
		}
	}
	s.await(t, "slices are served", func() error {
		for _, kind := range kinds {
			if err := s.do(t, nil, http.MethodGet, authentication+"/"+kind, "", nil, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// says is what the slice was told: how many units it is granted, and why.
func (l lent) says(t *testing.T) (units int, condition, message string) {
	t.Helper()
	var is struct {
		Status struct {
			Resources  corev1.ResourceList
			AuthParams struct{ APIServer string }
			Conditions []struct{ Type, Status, Reason, Message string }
		}
	}
	if err := l.do(t, nil, http.MethodGet, l.path(), "", nil, &is); err != nil {
		t.Fatal(err)
	}
	n := is.Status.Resources[corev1.ResourceName(unitsName)]
	authenticated := false
	for _, c := range is.Status.Conditions {
		if authenticated = authenticated || c.Type == "Authentication" && c.Status == "Accepted"; c.Type == "Resources" {
			condition, message = c.Status+" "+c.Reason, c.Message
		}
	}
	if !authenticated || is.Status.AuthParams.APIServer == "" {
		t.Errorf("%s lost what Liqo wrote: %+v", l.consumer, is.Status)
	}
	return int(n.Value()), condition, message
}

func (l lent) await(t *testing.T, units int, condition, message string) {
	t.Helper()
	l.Await(t, fmt.Sprintf("%s is told %q, and has %d", l.consumer, condition, units), func() error {
		if n, is, says := l.says(t); n != units || is != condition || !strings.Contains(says, message) {
			return fmt.Errorf("it has %d, %s: %s", n, is, says)
		}
		return nil
	})
}

// question makes a pod of so many units, of which of tells more, and asks the placer's door for a
// node. On a busy machine the answer may come too late: then it asks again.
func (s *apiServer) question(t *testing.T, p *plane.Placer, units int64, of func(*corev1.Pod)) (placed bool) {
	t.Helper()
	pod := podOf("", "", units)
	of(pod)
	s.show(t, pod)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		placed, err := filter(t.Context(), p.Door, pod)
		if err == nil {
			return placed
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// podOf is a pod of so many units, as kube-scheduler shows it to the placer.
func podOf(name, uid string, units int64) *corev1.Pod {
	amount := corev1.ResourceList{unitsName: *resource.NewQuantity(units, resource.DecimalSI)}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "train", UID: types.UID(uid)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: amount, Limits: amount}}}}}
}

// show makes a pod that no scheduler looks at, and that may not be bound yet: so a placer that
// begins does not wait for it.
func (s *apiServer) show(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	pod.GenerateName, pod.UID = cmp.Or(pod.GenerateName, "asks-"), ""
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "test.example.com/never"}}
	pod.Spec.AutomountServiceAccountToken, pod.Spec.Containers[0].Image = new(bool), "none"
	var made corev1.Pod
	if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/"+pod.Namespace+"/pods", asJSON, pod, &made); err != nil {
		t.Fatal(err)
	}
	pod.UID = made.UID
}

// filter asks as kube-scheduler does; an error is no answer.
func filter(ctx context.Context, door string, pod *corev1.Pod) (placed bool, err error) {
	var answer extender.ExtenderFilterResult
	if err := askDoor(ctx, door, "filter", extender.ExtenderArgs{Pod: pod, NodeNames: &[]string{"gpu-1"}}, &answer); err != nil {
		return false, err
	}
	if answer.Error != "" {
		return false, errors.New(answer.Error)
	}
	return answer.NodeNames != nil && len(*answer.NodeNames) > 0, nil
}

func askDoor(ctx context.Context, door, verb string, args, answer any) error {
	body, err := json.Marshal(args)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+door+"/"+verb, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, text)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, answer)
}

// userOf is what Liqo calls the user of a cluster's slice.
func userOf(consumer string) string {
	return fmt.Sprintf("gpus-%x", sha256.Sum256([]byte(consumer)))[:len("gpus-")+12]
}

// shadowOf makes a pod one that Liqo has made for a consumer's slice.
func shadowOf(consumer string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		yes := true
		p.Labels = map[string]string{"liqo.io/managed-by": "shadowpod", "liqo.io/creator-user": userOf(consumer)}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "offloading.liqo.io/v1beta1", Kind: "ShadowPod", Name: cmp.Or(p.Name, "shadow"), UID: "u", Controller: &yes}}
	}
}

// TestLiqoDoor has the program, with the rights that are shipped, answer clusters at the real API
// server with Liqo's own definitions. What is granted follows the GPUs, nobody else gets it, and
// a process that was killed knows it again. There is no lease, so that the next one begins at once.
func TestLiqoDoor(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.serveLiqo(t)
	for _, o := range render(t, withComponent(t, "placer", "placer/liqo")) {
		s.apply(t, o, false)
	}
	s.namespace(t, "train")
	s.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "1000", "ephemeral-storage": "1Ti", unitsName: "237"})
	s.create(t, gpuNodes, aGPUNode("gpu-1"))
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True), sharedGPU(1, gpunode.True), sharedGPU(2, gpunode.True))
	for _, name := range []string{"milan", "paris", "rome", "rome-2"} {
		s.consumer(t, name)
	}
	program := placerProgram(t)
	p := s.startPlacer(t, program, plane.FreeAddress(t), "--doors=extender,liqo", "--lease=")

	milan := s.slice(t, "milan", liqo.Class, 40)
	milan.await(t, 40, "Accepted Granted", "40 of "+unitsName)
	paris := s.slice(t, "paris", liqo.Class, 150)
	paris.await(t, 150, "Accepted Granted", "in blocks of 79 and 71")
	rome := s.slice(t, "rome", liqo.Class, 50)
	rome.await(t, 0, "Denied NoRoom", "asked for 50 of "+unitsName+": 47 are available now")
	bypass := s.slice(t, "rome-2", "default", 50)
	if n, is, _ := bypass.says(t); n != 0 || is != "" {
		t.Errorf("a slice of another class was told %q, and has %d", is, n)
	}

	local := func(*corev1.Pod) {}
	for i, test := range []struct {
		units int64
		of    func(*corev1.Pod)
		want  bool
	}{
		{40, local, false}, {39, local, true},
		{40, shadowOf("milan"), true}, {71, shadowOf("paris"), true},
	} {
		if got := s.question(t, p, test.units, test.of); got != test.want {
			t.Errorf("pod %d, of %d units, is placed: %t, want %t", i, test.units, got, test.want)
		}
	}

	// Killed, it knows what was granted; the reservations of pods that were never bound are
	// gone with it.
	p.Kill()
	p = s.startPlacer(t, program, p.Door, "--doors=extender,liqo", "--lease=")
	if s.question(t, p, 40, local) || !s.question(t, p, 39, local) {
		t.Error("after a kill this cluster's own pods do not have what is left, or have more")
	}
	milan.await(t, 40, "Accepted Granted", "")
	paris.await(t, 150, "Accepted Granted", "")

	// Once more, so that nothing is reserved for pods that were never bound. Then a GPU is cut anew, so
	// that it offers nothing of this.
	p.Kill()
	p = s.startPlacer(t, program, p.Door, "--doors=extender,liqo", "--lease=")
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True), sharedGPU(1, gpunode.True))
	paris.Await(t, "paris is granted less", func() error {
		if n, is, says := paris.says(t); n != 118 || is != "Accepted Reduced" {
			return fmt.Errorf("it has %d, %s: %s", n, is, says)
		}
		return nil
	})
	milan.await(t, 40, "Accepted Granted", "")
	if n := p.Metric(t, `gpu_agent_placer_liqo_slices{state="accepted"}`); n != 2 {
		t.Errorf("%v slices are accepted", n)
	}
	t.Run("policies", func(t *testing.T) { s.tryLiqoPolicies(t, milan, bypass) })
}

// tryLiqoPolicies writes what neither the placer nor another cluster may.
func (s *apiServer) tryLiqoPolicies(t *testing.T, granted, bypass lent) {
	for kind, object := range map[string]fields{
		"clusterroles": {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": fields{"name": "liqo-remote-controlplane"},
			"rules": []fields{{"apiGroups": []string{"authentication.liqo.io"}, "resources": []string{"resourceslices", "resourceslices/status"}, "verbs": []string{"*"}}}},
		"clusterrolebindings": {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": fields{"name": "liqo-remote-controlplane"},
			"roleRef":  fields{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "liqo-remote-controlplane"},
			"subjects": []fields{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "milan"}, {"kind": "ServiceAccount", "name": "liqo-controller-manager", "namespace": "liqo"}}},
	} {
		s.create(t, "/apis/rbac.authorization.k8s.io/v1/"+kind, object)
	}
	as := func(user string, groups ...string) http.Header {
		return http.Header{"Impersonate-User": {user}, "Impersonate-Group": append(groups, "system:authenticated")}
	}
	var is map[string]any
	read := func(l lent) fields {
		t.Helper()
		is = nil
		if err := s.do(t, nil, http.MethodGet, l.path(), "", nil, &is); err != nil {
			t.Fatal(err)
		}
		return is
	}
	status := func(l lent, change func(status fields)) fields {
		object := read(l)
		of, _ := object["status"].(map[string]any)
		if of == nil {
			of = fields{}
		}
		change(of)
		object["status"] = of
		return object
	}
	more := func(status fields) { status["resources"] = fields{unitsName: "79"} }
	credentials := func(status fields) { status["authParams"] = fields{"apiServer": "https://there"} }
	denied := func(kind string) func(fields) {
		return func(status fields) {
			var out []any
			for _, c := range status["conditions"].([]any) {
				if c.(map[string]any)["type"] == kind {
					c.(map[string]any)["status"] = "Denied"
				}
				out = append(out, c)
			}
			status["conditions"] = out
		}
	}
	own, mine, placerOnly := as("system:serviceaccount:"+placer+":"+placer), as("milan", "liqo.io"), "is for the GPU placer to say"
	s.await(t, "the policies are in force", func() error {
		for who, header := range map[string]http.Header{"the placer": own, "a cluster": mine} {
			change := credentials
			if who == "a cluster" {
				change = more
			}
			if err := s.do(t, header, http.MethodPut, granted.path()+"/status?dryRun=All", asJSON, status(granted, change), nil); err == nil || !strings.Contains(err.Error(), "Liqo's to say") && !strings.Contains(err.Error(), placerOnly) {
				return fmt.Errorf("%s may write it: %v", who, err)
			}
		}
		return nil
	})
	for _, test := range []struct {
		who    http.Header
		what   string
		of     lent
		change func(fields)
		want   string
	}{
		{own, "what is granted", granted, func(status fields) { status["resources"] = fields{unitsName: "39", "cpu": "2"} }, ""},
		{own, "its condition", granted, denied("Resources"), ""},
		{own, "credentials", granted, credentials, "Liqo's to say"},
		{own, "who it is", granted, denied("Authentication"), "Liqo's to say"},
		{own, "a slice of Liqo's class", bypass, more, "of the class gpu-agent alone"},
		{mine, "more for itself", granted, more, placerOnly},
		{mine, "that it has it", granted, denied("Resources"), placerOnly},
		{mine, "other credentials, which Liqo does not keep it from", granted, credentials, ""},
		{mine, "a slice of Liqo's class", bypass, more, ""},
		{as("system:serviceaccount:liqo:liqo-controller-manager"), "that it is drained", granted, denied("Resources"), ""},
	} {
		err := s.do(t, test.who, http.MethodPut, test.of.path()+"/status?dryRun=All", asJSON, status(test.of, test.change), nil)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s writes %s: %v, want %q", test.who["Impersonate-User"], test.what, err, test.want)
		}
	}
	other := read(bypass)
	other["spec"].(map[string]any)["class"] = liqo.Class
	if err := s.do(t, mine, http.MethodPut, bypass.path()+"?dryRun=All", asJSON, other, nil); err == nil || !strings.Contains(err.Error(), "does not become one") {
		t.Errorf("a cluster changes the class: %v", err)
	}
	s.try(t, own, []try{
		{"a slice", http.MethodPatch, granted.path(), merge, fields{"spec": fields{"resources": fields{unitsName: "1"}}}, "forbidden"},
		{"a slice away", http.MethodDelete, granted.path(), "", nil, "forbidden"},
		{"a Tenant", http.MethodPatch, authentication + "/namespaces/liqo-tenant-milan/tenants/milan", merge, fields{"spec": fields{"tenantCondition": "Drained"}}, "forbidden"},
	})
}
