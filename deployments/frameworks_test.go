// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/frameworks"
	"example.com/gpu-agent/tests/plane"
)

// written are where the API has the kinds of frameworks' objects.
var written = map[string]string{
	"TrainJob":         "/apis/trainer.kubeflow.org/v1alpha1/namespaces/%s/trainjobs",
	"PyTorchJob":       "/apis/kubeflow.org/v1/namespaces/%s/pytorchjobs",
	"MPIJob":           "/apis/kubeflow.org/v2beta1/namespaces/%s/mpijobs",
	"InferenceService": "/apis/serving.kserve.io/v1beta1/namespaces/%s/inferenceservices",
	"Workflow":         "/apis/argoproj.io/v1alpha1/namespaces/%s/workflows",
}

// TestFrameworkShapes has a real API server with the product's policies take what frameworks bring, by their own
// definitions and strictly. The quota of the namespace counts the pieces that the pods ask for, the scheduler asks the
// placer about each of them, and all are bound.
func TestFrameworkShapes(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the definitions of others take long")
	}
	s := startAPIServer(t)
	s.install(t)
	for _, o := range render(t, "placer") {
		s.apply(t, o, false)
	}
	const team = "train"
	s.namespace(t, team)
	s.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "110", unitsName: "237"})
	s.create(t, gpuNodes, aGPUNode("gpu-1"))
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True), sharedGPU(1, gpunode.True), sharedGPU(2, gpunode.True))
	program := placerProgram(t)
	dir, secured := plane.Secured(t, program)
	p := s.startPlacer(t, program, plane.FreeAddress(t), secured...)
	s.SchedulerAskingSecurely(t, schedulerConfig, p.Door, dir)

	pods, units := map[string]fields{}, 0 // pods by name
	asking := 0
	for _, shape := range frameworks.Shapes(t) {
		for _, file := range shape.Definitions {
			module, _, _ := strings.Cut(shape.Module, "@")
			for _, o := range documents(t, file, read(t, sourceOf(t, module)+"/"+file)) {
				s.apply(t, o, false)
			}
		}
		if shape.Written != nil {
			kind := shape.Written["kind"].(string)
			place := fmt.Sprintf(written[kind], team)
			s.await(t, kind+" is served", func() error { return s.do(t, nil, http.MethodGet, place, "", nil, nil) })
			s.dry(t, shape.Name, place, shape.Written)
		}
		for i, o := range shape.Made {
			kind := o["kind"].(string)
			s.dry(t, shape.Name, fmt.Sprintf(places[kind], team), o)
			spec, n := frameworks.PodSpec(o)
			for k := range n { // no controllers run here
				pod := maps.Clone(spec)
				pod["automountServiceAccountToken"] = false
				pod["tolerations"] = []fields{{"operator": "Exists"}}
				name := fmt.Sprintf("%s-%d-%d", shape.Name, i, k)
				pods[name] = fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name}, "spec": pod}
				of := 0
				for _, c := range frameworks.Containers(spec, "containers") {
					of += frameworks.Units(c)
				}
				if units += of; of > 0 {
					asking++
				}
			}
		}
	}

	// The quota's own controller would fill in its status.
	const counted = "requests." + unitsName
	quota := fmt.Sprintf(places["ResourceQuota"], team)
	hard := fields{counted: fmt.Sprint(units)}
	s.create(t, quota, fields{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": fields{"name": "gpus"},
		"spec": fields{"hard": hard}})
	if err := s.do(t, nil, http.MethodPatch, quota+"/gpus/status", merge,
		fields{"status": fields{"hard": hard, "used": fields{counted: "0"}}}, nil); err != nil {
		t.Fatal(err)
	}
	in := strings.TrimSuffix(trainPods, "/")
	s.await(t, "the quota is in force", func() error { // and no pod fits into nothing
		limits := fields{"limits": fields{unitsName: units + 1}}
		more := fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": "too-much"}, "spec": fields{
			"automountServiceAccountToken": false,
			"containers":                   []fields{{"name": "main", "image": "none", "resources": limits}}}}
		err := s.do(t, nil, http.MethodPost, in+"?dryRun=All", asJSON, more, nil)
		if err == nil || !strings.Contains(err.Error(), "exceeded quota") {
			return fmt.Errorf("a pod of %d units beyond it: %v", units+1, err)
		}
		return nil
	})
	for _, name := range slices.Sorted(maps.Keys(pods)) {
		s.create(t, in, pods[name])
	}
	for name := range pods {
		s.awaitPlaced(t, name, "gpu-1")
	}
	var is struct {
		Status struct{ Used map[string]string }
	}
	if err := s.do(t, nil, http.MethodGet, quota+"/gpus", "", nil, &is); err != nil {
		t.Fatal(err)
	}
	if used := is.Status.Used[counted]; used != fmt.Sprint(units) {
		t.Errorf("the quota has counted %q units, want %d", used, units)
	}
	if n := p.Metric(t, `gpu_agent_placer_answers_total{outcome="placed",verb="filter"}`); n != float64(asking) {
		t.Errorf("the placer has placed %v pods, want %d", n, asking)
	}
	t.Logf("%d pods, %d of which ask for %d units together", len(pods), asking, units)
}

// dry has the API server take an object, and keep nothing. It refuses fields that it does not know.
func (s *apiServer) dry(t *testing.T, of, place string, o fields) {
	t.Helper()
	name := o["metadata"].(fields)["name"].(string)
	if err := s.do(t, nil, http.MethodPatch, place+"/"+name+"?fieldManager=test&fieldValidation=Strict&dryRun=All",
		plane.Apply, o, nil); err != nil {
		t.Errorf("%s: %s %s: %v", of, o["kind"], name, err)
	}
}

// TestWithFrameworks holds the table of frameworks against the shapes and the tests that it names: each shape has a
// row, each row says what shows it or that it was not tried, and what it names is there.
func TestWithFrameworks(t *testing.T) {
	text := string(read(t, frameworksDoc))
	_, table, found := strings.Cut(text, "## With frameworks")
	if !found {
		t.Fatalf("%s has no table", frameworksDoc)
	}
	table, _, _ = strings.Cut(table, "\n## ")
	const five = `(?m)^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$`
	rows := regexp.MustCompile(five).FindAllStringSubmatch(table, -1)[1:]
	var names []string
	for _, r := range rows {
		names = append(names, r[1])
		row := strings.Join(r[2:], " ")
		tests := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(row, -1)
		if len(tests) == 0 && !strings.Contains(row, "not tried") {
			t.Errorf("the row %q names no test, and does not say that it was not tried", r[1])
		}
		for _, m := range tests {
			if !isTest(t, m[1]) {
				t.Errorf("the row %q names %s, which is no test", r[1], m[1])
			}
		}
	}
	for _, shape := range frameworks.Shapes(t) {
		if !slices.Contains(names, shape.Framework) {
			t.Errorf("%s is not in the table: %q", shape.Framework, names)
		}
		if shape.Module != "" && !slices.Contains(foreign, shape.Module) {
			t.Errorf("%s is of %s, which has no checksum", shape.Name, shape.Module)
		}
	}
}

// isTest reports whether there is a test of this name in the checkout.
func isTest(t *testing.T, name string) bool {
	t.Helper()
	found := false
	for _, dir := range []string{"../tests", "../internal", "../pkg", "."} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") || found {
				return err
			}
			found = strings.Contains(string(read(t, path)), "\nfunc "+name+"(")
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}
