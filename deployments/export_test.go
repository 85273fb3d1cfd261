// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/tests/plane"
)

// foreign are the modules whose objects are written or shown. Their directory has the checksums, and
// nothing but files is taken from them.
var foreign = []string{"sigs.k8s.io/kueue@v0.19.0", "sigs.k8s.io/karpenter@v1.8.0", "github.com/liqotech/liqo@v1.2.0", "github.com/ray-project/kuberay/ray-operator@v1.4.2",
	"github.com/prometheus-operator/prometheus-operator@v0.93.1", "github.com/openshift/api@v0.0.0-20260213204242-d34f11c515b3",
	"github.com/argoproj/argo-workflows/v3@v3.6.10", "github.com/kserve/kserve@v0.15.2", "github.com/kubeflow/mpi-operator@v0.8.2",
	"github.com/kubeflow/trainer/v2@v2.2.1", "github.com/kubeflow/training-operator@v1.9.3"}

// sourceOf is the directory of one of them in the module cache.
func sourceOf(t *testing.T, module string) string {
	t.Helper()
	if dir, ok := sources[module]; ok {
		return dir
	}
	i := slices.IndexFunc(foreign, func(m string) bool { return strings.HasPrefix(m, module+"@") })
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", foreign[i])
	cmd.Dir = "testdata/crds"
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	var said struct{ Dir, Sum string }
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	if err != nil || said.Dir == "" {
		t.Fatalf("go mod download %s: %v: %s", foreign[i], err, out)
	}
	if !strings.Contains(string(read(t, "testdata/crds/go.sum")), strings.ReplaceAll(foreign[i], "@", " ")+" "+said.Sum+"\n") {
		t.Fatalf("%s has the checksum %s, which is not in testdata/crds/go.sum", foreign[i], said.Sum)
	}
	sources[module] = said.Dir
	return said.Dir
}

var sources = map[string]string{} // the directories that were found

const exported = "../internal/export/testdata/"

// What is exported is what Kueue's and Karpenter's own definitions take, at the real API
// server, which refuses fields that it does not know.
func TestExportsAtTheAPIServer(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the definitions of others take long")
	}
	s := startAPIServer(t)
	kueue, karpenter := sourceOf(t, "sigs.k8s.io/kueue")+"/config/components/crd/bases/kueue.x-k8s.io_", sourceOf(t, "sigs.k8s.io/karpenter")+"/pkg/apis/crds/karpenter.sh_"
	for _, file := range []string{"base/crd.yaml", kueue + "clusterqueues.yaml", kueue + "localqueues.yaml", kueue + "resourceflavors.yaml", kueue + "topologies.yaml", kueue + "workloadpriorityclasses.yaml", karpenter + "nodeoverlays.yaml"} {
		for _, o := range documents(t, file, read(t, file)) {
			s.apply(t, o, false)
		}
	}
	for _, kind := range []string{"Topology", "ResourceFlavor", "ClusterQueue", "WorkloadPriorityClass", "NodeOverlay"} {
		s.await(t, kind+" is served", func() error { return s.do(t, nil, http.MethodGet, places[kind], "", nil, nil) })
	}
	s.await(t, "GPUNodes are served", func() error { return s.do(t, nil, http.MethodGet, gpuNodes, "", nil, nil) })
	for _, team := range []string{"research", "web", "records"} {
		s.namespace(t, team)
	}
	for _, name := range []string{"kueue", "kueue-checks", "kueue-zero", "kueue-spot", "kueue-dra", "claims", "karpenter"} {
		t.Run(name, func(t *testing.T) {
			for _, o := range documents(t, name, read(t, exported+name+".yaml")) {
				s.apply(t, o, true)
			}
		})
	}
	t.Run("the definitions are in force", func(t *testing.T) {
		for _, spoil := range []struct{ kind, old, new, want string }{
			{"ResourceFlavor", "nodeLabels:", "nodeLables:", "nodeLables"},
			{"Topology", "nodeLabel: example.com/gpu.site", "nodeLabel: kubernetes.io/hostname", "must be unique"},
			{"ClusterQueue", "whenCanBorrow: MayStopSearch", "whenCanBorrow: Perhaps", "Unsupported value"},
			{"ClusterQueue", "- example.com/gpu-mem\n", "", "same number of resources"},
			{"NodeOverlay", "operator: In", "operator: On", "Unsupported value"},
		} {
			text, n := "", 0
			for _, name := range []string{"kueue", "karpenter"} {
				for document := range strings.SplitSeq(string(read(t, exported+name+".yaml")), "---\n") {
					if strings.Contains(document, "\nkind: "+spoil.kind+"\n") && n == 0 {
						text, n = document, strings.Count(document, spoil.old)
					}
				}
			}
			if n == 0 {
				t.Fatalf("no %s has %q", spoil.kind, spoil.old)
			}
			var object fields
			if err := yaml.Unmarshal([]byte(strings.Replace(text, spoil.old, spoil.new, 1)), &object); err != nil {
				t.Fatal(err)
			}
			object["metadata"] = fields{"name": "spoilt"}
			err := s.do(t, nil, http.MethodPatch, places[spoil.kind]+"/spoilt?fieldManager=test&fieldValidation=Strict&dryRun=All", plane.Apply, object, nil)
			if err == nil || !strings.Contains(err.Error(), spoil.want) {
				t.Errorf("a %s with %q for %q: %v, want %q", spoil.kind, spoil.new, spoil.old, err, spoil.want)
			}
		}
	})
	t.Run("of a cluster", s.exportsCluster)
}

// exportsCluster runs the program against nodes with GPUNodes, and applies what it prints.
func (s *apiServer) exportsCluster(t *testing.T) {
	program := program(t)
	kubeconfig := s.Kubeconfig(t, nil)
	run := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), program, append([]string{"export"}, args...)...)
		cmd.Env = append(os.Environ(), "GPU_AGENT_KUBECONFIG="+kubeconfig)
		out, err := cmd.Output()
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return string(out), err
	}
	if _, err := run("kueue", "--cloud", "none", "--team", "research"); err == nil || !strings.Contains(err.Error(), "no node offers a GPU") {
		t.Errorf("an empty cluster: %v", err)
	}
	label := func(site, mode string) fields {
		return fields{"example.com/gpu.site": site, "example.com/gpu.model": "NVIDIA-A100-SXM4-80GB", "example.com/gpu.mode": mode, "node.kubernetes.io/instance-type": "p4de"}
	}
	shared := gpunode.GPU{UUID: "GPU-1", Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: "shared", API: "device-plugin", Kind: piece.KindUnits, Total: 79, Free: 79}
	divided := gpunode.GPU{UUID: "GPU-2", Model: shared.Model, MemoryMiB: 81920, Mode: "mig", API: "device-plugin", Kind: piece.KindPlacement,
		MIG: &gpunode.MIG{Card: "a", OnDemand: true, Offers: []gpunode.Offer{{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb", Placements: []string{"0", "4"}}}}}
	cards := []gpunode.Card{{Name: "a", MemorySlices: 8, Profiles: []gpunode.Profile{{Name: "3g.40gb", ComputeSlices: 3, MemorySlices: 4, Starts: []int{0, 4}, Max: 2}}}}
	for name, node := range map[string]struct {
		labels fields
		gpu    gpunode.GPU
	}{"a-1": {label("on-prem", "shared"), shared}, "a-2": {label("on-prem", "shared"), shared}, "c-1": {label("cloud", "mig"), divided}} {
		s.create(t, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": name, "labels": node.labels}})
		s.create(t, gpuNodes, aGPUNode(name))
		says := gpunode.Status{MemoryUnitMiB: 1024, Cards: cards, GPUs: []gpunode.GPU{node.gpu}}
		says.Sum()
		if err := s.do(t, nil, http.MethodPatch, gpuNodes+"/"+name+"/status", merge, fields{"status": says}, nil); err != nil {
			t.Fatal(err)
		}
	}
	s.create(t, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": "control-plane"}})

	out, err := run("kueue", "--cloud", "cloud=160GiB", "--team", "research")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range documents(t, "export", []byte(out)) {
		s.apply(t, o, false)
	}
	var queue struct {
		Spec struct {
			ResourceGroups []struct {
				Flavors []struct {
					Name      string
					Resources []struct{ Name, NominalQuota string }
				}
			}
		}
	}
	if err := s.do(t, nil, http.MethodGet, places["ClusterQueue"]+"/research", "", nil, &queue); err != nil || len(queue.Spec.ResourceGroups) != 1 {
		t.Fatalf("%v: %+v", err, queue)
	}
	var quotas []string
	for _, f := range queue.Spec.ResourceGroups[0].Flavors {
		for _, r := range f.Resources {
			if r.NominalQuota != "0" {
				quotas = append(quotas, f.Name+" "+strings.TrimPrefix(r.Name, "example.com/")+" "+r.NominalQuota)
			}
		}
	}
	want := []string{"on-prem-a100-sxm4-80gb-shared gpu-memory 158Gi", "on-prem-a100-sxm4-80gb-shared gpu-mem 158",
		"cloud-a100-sxm4-80gb-mig gpu-memory 160Gi", "cloud-a100-sxm4-80gb-mig mig-3g.40gb 4"}
	if !slices.Equal(quotas, want) {
		t.Errorf("quotas\n%q, want\n%q", quotas, want)
	}
	if out, err := run("karpenter"); err == nil || !strings.Contains(err.Error(), "are both p4de") {
		t.Errorf("two kinds of nodes of one type: %v\n%s", err, out)
	}
	if out, err = run("karpenter", "--selector", "example.com/gpu.site=cloud"); err != nil || !strings.Contains(out, `example.com/mig-3g.40gb: "2"`) {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, o := range documents(t, "export", []byte(out)) {
		s.apply(t, o, false)
	}
}

// Kueue reads its configuration strictly. What is exported for it has no key that its types
// lack. (Kueue itself is not built for this.)
func TestExportedConfigurationIsKueues(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), sourceOf(t, "sigs.k8s.io/kueue")+"/apis/config/v1beta2/configuration_types.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	types := map[string]map[string]string{} // of a type, what type each key is of
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			types[spec.Name.Name] = keysOf(t, s)
		}
		return true
	})
	checked := 0
	var check func(path, of string, v any)
	check = func(path, of string, v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				check(path+"[]", of, e)
			}
		case map[string]any:
			keys, known := types[of]
			if !known { // a map, or a type of Kubernetes's
				return
			}
			for key, value := range v {
				to, ok := keys[key]
				if checked++; !ok {
					t.Errorf("%s.%s: Kueue's %s has no such key", path, key, of)
				}
				check(path+"."+key, to, value)
			}
		}
	}
	for _, name := range []string{"kueue-configuration", "kueue-dra-configuration", "claims-configuration", "kueue-checks-configuration"} {
		var all map[string]any
		if err := yaml.Unmarshal(read(t, exported+name+".yaml"), &all); err != nil {
			t.Fatal(err)
		}
		if all["apiVersion"] != "config.kueue.x-k8s.io/v1beta2" || all["kind"] != "Configuration" {
			t.Errorf("%s is a %v of %v", name, all["kind"], all["apiVersion"])
		}
		delete(all, "apiVersion")
		delete(all, "kind")
		check(name, "Configuration", all)
	}
	if checked < 40 {
		t.Errorf("%d keys were looked up: this test looks at nothing", checked)
	}
	if to := types["Configuration"]["featureGates"]; to != "" {
		t.Errorf("feature gates are a %s", to)
	}
}

// keysOf are the JSON keys of a struct, and the names of their own types where those are of
// the same package.
func keysOf(t *testing.T, s *ast.StructType) map[string]string {
	out := map[string]string{}
	for _, f := range s.Fields.List {
		if f.Tag == nil {
			continue
		}
		tag, err := strconv.Unquote(f.Tag.Value)
		if err != nil {
			t.Fatal(err)
		}
		key, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		name := ""
		for e := f.Type; e != nil; {
			switch is := e.(type) {
			case *ast.StarExpr:
				e = is.X
			case *ast.ArrayType:
				e = is.Elt
			case *ast.Ident:
				name, e = is.Name, nil
			default:
				e = nil
			}
		}
		if key != "" {
			out[key] = name
		}
	}
	return out
}
