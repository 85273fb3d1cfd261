// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

const gpuNodes = "/apis/example.com/v1alpha1/gpunodes"

// aGPUNode is an object of a node, as it is made.
func aGPUNode(node string) fields {
	return fields{"apiVersion": "example.com/v1alpha1", "kind": "GPUNode", "metadata": fields{"name": node}}
}

// schema is what is read of one.
type schema struct {
	Type       string
	Format     string
	Required   []string
	Properties map[string]*schema
	Items      *schema
	ListType   string   `yaml:"x-kubernetes-list-type"`
	MapType    string   `yaml:"x-kubernetes-map-type"`
	ListKeys   []string `yaml:"x-kubernetes-list-map-keys"`
	MaxItems   int      `yaml:"maxItems"`
	MaxLength  int      `yaml:"maxLength"`
	Minimum    *int
	Maximum    *int
	Enum       []string
}

// The schema has the fields that the program writes and no others, of the same types, and
// requires those that are always there. Nothing in it is without bounds, which are those that
// readers hold an object to.
func TestGPUNodeSchemaIsTheProgramsTypes(t *testing.T) {
	var crd struct {
		Metadata struct{ Name string }
		Spec     struct {
			Group    string
			Names    struct{ Kind, Plural string }
			Versions []struct {
				Name   string
				Schema struct {
					OpenAPIV3Schema schema `yaml:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := one(t, base(t), "CustomResourceDefinition", "gpunodes.example.com").node.Decode(&crd); err != nil {
		t.Fatal(err)
	}
	domain := programFlags(t)["domain"]
	if s := crd.Spec; s.Group != domain || s.Names.Kind != gpunode.Kind || s.Names.Plural != gpunode.Plural || len(s.Versions) != 1 || s.Versions[0].Name != gpunode.Version {
		t.Fatalf("%+v", s)
	}
	is := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"]
	if is.MapType != "atomic" {
		t.Error("the status is written as a whole, and the schema does not say so")
	}
	compareSchema(t, "status", is, reflect.TypeFor[gpunode.Status](), "", "")
	// The API server refuses all that a node says if it lacks one of its words.
	of := is.Properties["gpus"].Items.Properties
	for _, k := range piece.Kinds() {
		if !slices.Contains(of["kind"].Enum, string(k)) || !slices.Contains(of["mode"].Enum, k.Mode()) {
			t.Errorf("the schema lacks the kind %s, or its mode %s: it has %v and %v",
				k, k.Mode(), of["kind"].Enum, of["mode"].Enum)
		}
	}
}

// compareSchema compares a schema with a type, a field of which has the bounds most and each.
func compareSchema(t *testing.T, path string, s *schema, is reflect.Type, most, each string) {
	t.Helper()
	if s == nil {
		t.Errorf("%s is not in the schema", path)
		return
	}
	if is.Kind() == reflect.Pointer {
		is = is.Elem()
	}
	want := map[reflect.Kind]string{reflect.Struct: "object", reflect.Slice: "array", reflect.String: "string", reflect.Int: "integer", reflect.Bool: "boolean"}[is.Kind()]
	if is == reflect.TypeFor[time.Time]() || is == reflect.TypeFor[piece.Set]() {
		want = "string"
	}
	switch {
	case s.Type != want:
		t.Errorf("%s is of type %q, want %q", path, s.Type, want)
	case is == reflect.TypeFor[piece.Set](): // as text it has another bound
		if s.MaxLength == 0 || most == "" {
			t.Errorf("%s: maxLength %d, at most %q ranges", path, s.MaxLength, most)
		}
	case want == "string" && s.Format != "date-time" && fmt.Sprint(s.MaxLength) != most:
		t.Errorf("%s: maxLength %d, want %q", path, s.MaxLength, most)
	case want == "integer":
		if s.Minimum == nil || *s.Minimum != 0 || s.Maximum == nil || fmt.Sprint(*s.Maximum) != most {
			t.Errorf("%s: minimum %v, maximum %v, want 0 and %q", path, s.Minimum, s.Maximum, most)
		}
	case want == "array":
		if fmt.Sprint(s.MaxItems) != most || s.ListType == "" || s.ListType == "map" && len(s.ListKeys) != 1 {
			t.Errorf("%s: at most %d elements, want %q, list type %q with keys %q", path, s.MaxItems, most, s.ListType, s.ListKeys)
		}
		compareSchema(t, path+"[]", s.Items, is.Elem(), each, "")
	case want == "object":
		seen := map[string]bool{}
		var required []string
		for i := range is.NumField() {
			tag := is.Field(i).Tag
			name, options, _ := strings.Cut(tag.Get("json"), ",")
			seen[name] = true
			if options == "" {
				required = append(required, name)
			}
			compareSchema(t, path+"."+name, s.Properties[name], is.Field(i).Type, tag.Get("max"), tag.Get("each"))
		}
		for name := range s.Properties {
			if !seen[name] {
				t.Errorf("%s.%s is in the schema, and the program does not write it", path, name)
			}
		}
		slices.Sort(required)
		if slices.Sort(s.Required); !slices.Equal(required, s.Required) {
			t.Errorf("%s requires %q, want %q, which the program always writes", path, s.Required, required)
		}
	}
}

// fullGPUNode has every field.
func fullGPUNode(t *testing.T) *gpunode.Status {
	condition := func(kind string, is gpunode.ConditionStatus) gpunode.Condition {
		return gpunode.Condition{Type: kind, Status: is, Reason: status.HeldByPods, Message: "m", LastTransitionTime: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	}
	out := &gpunode.Status{
		MemoryUnitMiB: 1024, HoldersIn: gpunode.InObject, Conditions: []gpunode.Condition{condition(gpunode.Ready, gpunode.True)},
		GPUs: []gpunode.GPU{{
			UUID: "GPU-a", Index: 1, Model: "M", MemoryMiB: 81920, Mode: "shared", API: "device-plugin", Guarantee: "api", Compute: gpunode.Through, ComputeGuarantee: "ceiling", Namespaces: 2, Cordoned: true,
			Conditions: []gpunode.Condition{condition(gpunode.Healthy, gpunode.True), condition(gpunode.Available, gpunode.False)},
			Resource:   "example.com/gpu-mem", Kind: piece.KindUnits, Total: 79, Used: piece.SetOf([]int{0, 1, 2, 9}), Free: 75, Largest: 75,
			MIG: &gpunode.MIG{Card: "c", OnDemand: true, Used: []string{"1g.10gb@0"}, Blocked: []string{"1g.10gb@1"}, Warm: []string{"3g.40gb@4"},
				Offers: []gpunode.Offer{{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb", Placements: []string{"0", "4"}, Free: []string{"4"}}}},
			Spot: &gpunode.Spot{Resource: "example.com/gpu-mem.spot", Total: 40, Used: piece.SetOf([]int{3}), UsedPlacements: []string{"1g.10gb@2"}, Lent: piece.SetOf([]int{9}), LentPlacements: []string{"3g.40gb@4"},
				Yielding: piece.SetOf([]int{5}), YieldingPlacements: []string{"1g.10gb@3"}, Free: 38, Largest: 38,
				Offers: []gpunode.Offer{{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb.spot", Placements: []string{"0", "4"}, Free: []string{"4"}}}},
			Holders: []gpunode.Holder{{Namespace: "n", Pod: "p", Container: "c", Resource: "example.com/gpu-mem", Devices: piece.SetOf([]int{0, 9}), Placements: []string{"3g.40gb@4"}, ComputePercent: 26}},
		}},
		Cards: []gpunode.Card{{Name: "c", MemorySlices: 8, Profiles: []gpunode.Profile{{Name: "3g.40gb", ComputeSlices: 3, MemorySlices: 4, Starts: []int{0, 4}, Max: 2,
			Engines: &gpunode.Engines{Decode: 1, Encode: 1, JPEG: 1, OFA: 1}}}}},
	}
	out.Sum()
	out.Summary.Unhealthy = 1
	unset(t, "status", reflect.ValueOf(out).Elem())
	return out
}

// unset reports fields that are zero: what is not there is not tried.
func unset(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	switch {
	case v.Kind() == reflect.Int && strings.HasSuffix(path, "[]"): // of a list of numbers, 0 is one
	case v.IsZero():
		t.Errorf("%s is not set, and so not tried", path)
	case v.Kind() == reflect.Pointer:
		unset(t, path, v.Elem())
	case v.Kind() == reflect.Slice && v.Len() > 0 && v.Type() != reflect.TypeFor[piece.Set]():
		unset(t, path+"[]", v.Index(0))
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]():
		for i := range v.NumField() {
			unset(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	}
}

// tryGPUNodes has the agent's client write what there is to write, with the rights that it
// has, and tries what must be refused.
func (s *apiServer) tryGPUNodes(t *testing.T) {
	client := s.agentClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := make(chan *gpunode.Status, 100)
	ended := make(chan error, 2)
	go func() { ended <- client.WatchNode(ctx, func(agentkube.Node) {}) }()
	go func() {
		ended <- client.WatchGPUNode(ctx, func(is *gpunode.Status, err error) {
			if err != nil {
				t.Error(err)
			}
			told <- is
		})
	}()
	if is := <-told; is != nil {
		t.Errorf("told of %+v", is)
	}
	write := func(want *gpunode.Status) {
		t.Helper()
		if is, err := client.WriteGPUNode(t.Context(), want); err != nil || !reflect.DeepEqual(is, want) {
			t.Fatalf("the server has\n%+v, %v, want\n%+v", is, err, want)
		}
	}
	full := fullGPUNode(t)
	write(full)
	version := func() string {
		var object struct {
			Metadata struct {
				ResourceVersion string
				OwnerReferences []struct{ Kind, Name string }
				ManagedFields   []any
			}
		}
		if err := s.do(t, nil, http.MethodGet, gpuNodes+"/node-1", "", nil, &object); err != nil {
			t.Fatal(err)
		}
		if o := object.Metadata.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != "node-1" {
			t.Errorf("it belongs to %v", o)
		}
		if text, _ := json.Marshal(object.Metadata.ManagedFields); len(text) > 800 {
			t.Errorf("%d bytes say who manages what: %s", len(text), text)
		}
		return object.Metadata.ResourceVersion
	}
	before := version()
	write(full) // the same again is no new version
	if after := version(); after != before {
		t.Errorf("version %s, was %s", after, before)
	}
	for _, file := range recorded(t) { // each kind of card, and as many GPUs as there are
		var inv gpu.Inventory
		if err := json.Unmarshal(read(t, file), &inv); err != nil {
			t.Fatal(err)
		}
		want := &gpunode.Status{}
		for i := range inv.GPUs {
			d := &inv.GPUs[i]
			want.GPUs = append(want.GPUs, gpunode.GPU{UUID: string(d.UUID), Index: d.Index, Model: d.Model, MemoryMiB: int(d.Memory)})
			if c := gpunode.CardOf(d); c != nil && want.Cards == nil {
				want.Cards = []gpunode.Card{*c}
			}
		}
		want.Sum()
		write(want)
	}
	write(full)

	var table struct {
		ColumnDefinitions []struct{ Name string }
		Rows              []struct{ Cells []any }
	}
	if err := s.do(t, http.Header{"Accept": {"application/json;as=Table;v=v1;g=meta.k8s.io"}}, http.MethodGet, gpuNodes, "", nil, &table); err != nil {
		t.Fatal(err)
	}
	var cells []string
	for i, c := range table.Rows[0].Cells {
		if name := table.ColumnDefinitions[i].Name; name != "Age" {
			cells = append(cells, fmt.Sprintf("%s=%v", name, c))
		}
	}
	if got, want := strings.Join(cells, "; "), "Name=node-1; GPUs=1; Modes=1 shared; Free=gpu-mem 75/79, gpu-mem.spot 38/40; Largest=gpu-mem 75, gpu-mem.spot 38; Used%=5; Unhealthy=1; Ready=True; Holders=GPUNode"; got != want {
		t.Errorf("kubectl get gpunodes shows\n%s, want\n%s", got, want)
	}
	s.refuseGPUNodes(t)

	// Somebody changes it, and deletes it: the agent is told.
	drain(told)
	if err := s.do(t, nil, http.MethodPatch, gpuNodes+"/node-1/status", merge, fields{"status": fields{"memoryUnitMiB": 7}}, nil); err != nil {
		t.Fatal(err)
	}
	if is := <-told; is == nil || is.MemoryUnitMiB != 7 {
		t.Errorf("told of %+v", is)
	}
	write(full)
	drain(told)
	if err := client.RemoveGPUNode(t.Context()); err != nil {
		t.Fatal(err)
	}
	if is := <-told; is != nil {
		t.Errorf("told of %+v", is)
	}
	write(full)
	if err := client.RemoveGPUNode(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-ended
	<-ended
}

// drain empties a channel, once nothing has come for a while that is longer than a watch takes.
func drain(told chan *gpunode.Status) {
	for {
		select {
		case <-told:
		case <-time.After(time.Second):
			return
		}
	}
}

// refuseGPUNodes tries what the schema and the policy must refuse.
func (s *apiServer) refuseGPUNodes(t *testing.T) {
	const own, other = gpuNodes + "/node-1", gpuNodes + "/node-2"
	s.create(t, gpuNodes, aGPUNode("node-2"))
	entry := func(change fields) fields {
		g := fields{"uuid": "GPU-a", "index": 0, "memoryMiB": 1, "total": 0, "free": 0, "largest": 0}
		for k, v := range change {
			g[k] = v
		}
		return fields{"status": fields{"summary": fields{"gpus": 1, "unhealthy": 0, "saturationPercent": 0}, "gpus": []fields{g}}}
	}
	tries := func(list ...try) (out []try) {
		for _, y := range list {
			y.method, y.kind = http.MethodPatch, merge
			out = append(out, y)
		}
		return out
	}
	is := func(name string, body fields, refused string) try {
		return try{name: name, path: own + "/status?fieldValidation=Strict&dryRun=All", body: body, refused: refused}
	}
	s.try(t, nil, tries(
		is("as it should be", entry(nil), ""),
		is("a mode that there is not", entry(fields{"mode": "half"}), "Unsupported value"),
		is("fewer than none", entry(fields{"free": -1}), "should be greater than or equal to 0"),
		is("no UUID", fields{"status": fields{"gpus": []fields{{"index": 0, "memoryMiB": 1, "total": 0, "free": 0, "largest": 0}}}}, "uuid"),
		is("numbers that are none", entry(fields{"used": "a-b"}), "should match"),
		is("a field that there is not", entry(fields{"colour": "red"}), "unknown field"),
		is("one GPU twice", fields{"status": fields{"gpus": []any{entry(nil)["status"].(fields)["gpus"].([]fields)[0], entry(nil)["status"].(fields)["gpus"].([]fields)[0]}}}, "Duplicate value"),
		is("a condition without its time", entry(fields{"conditions": []fields{{"type": "Healthy", "status": "True", "reason": "R", "message": ""}}}), "lastTransitionTime"),
		is("no summary", fields{"status": fields{"summary": nil}}, "summary"),
		is("more than all", fields{"status": fields{"summary": fields{"saturationPercent": 101}}}, "should be less than or equal to 100"),
	))
	metadata := func(change fields) fields { return fields{"metadata": change} }
	owner := func(kind, name string) fields {
		return metadata(fields{"ownerReferences": []fields{{"apiVersion": "v1", "kind": kind, "name": name, "uid": "u"}}})
	}
	s.try(t, agentOn("node-1"), append(tries(
		try{name: "another node's status", path: other + "/status", body: entry(nil), refused: "GPUNode of the node that it runs on"},
		try{name: "another node's object", path: other, body: metadata(fields{"labels": fields{"a": "b"}}), refused: "GPUNode of the node that it runs on"},
		try{name: "a label", path: own, body: metadata(fields{"labels": fields{"a": "b"}}), refused: "no labels, annotations or finalizers"},
		try{name: "an annotation", path: own, body: metadata(fields{"annotations": fields{"a": "b"}}), refused: "no labels, annotations or finalizers"},
		try{name: "a finalizer", path: own, body: metadata(fields{"finalizers": []string{"example.com/x"}}), refused: "no labels, annotations or finalizers"},
		try{name: "another Node's", path: own, body: owner("Node", "node-2"), refused: "belong to its own Node"},
		try{name: "a Pod's", path: own, body: owner("Pod", "node-1"), refused: "belong to its own Node"},
		try{name: "its own Node's", path: own + "?dryRun=All", body: owner("Node", "node-1")},
	),
		try{"another node's away", http.MethodDelete, other, asJSON, nil, "GPUNode of the node that it runs on"},
		try{"all of them", http.MethodDelete, gpuNodes, asJSON, nil, "cannot deletecollection"},
		try{"read one by its name alone", http.MethodGet, own, "", nil, "cannot get"},
		try{"written over", http.MethodPut, own + "/status", asJSON, aGPUNode("node-1"), "cannot update"},
	))
	// An operator's label stays, and does not keep the agent from writing.
	if err := s.do(t, nil, http.MethodPatch, own, merge, metadata(fields{"labels": fields{"team": "blue"}}), nil); err != nil {
		t.Fatal(err)
	}
	s.try(t, agentOn("node-1"), tries(try{name: "beside an operator's label", path: own + "/status?dryRun=All", body: entry(nil)},
		try{name: "an operator's label away", path: own, body: metadata(fields{"labels": nil}), refused: "no labels, annotations or finalizers"}))
}

// The object goes with its Node: the garbage collector takes what belongs to nobody.
func TestGPUNodeGoesWithItsNode(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.Controllers(t, "garbage-collector-controller")
	client := s.agentClient(t)
	if _, err := client.WriteGPUNode(t.Context(), fullGPUNode(t)); err != nil {
		t.Fatal(err)
	}
	if err := s.do(t, nil, http.MethodDelete, "/api/v1/nodes/node-1", asJSON, nil, nil); err != nil {
		t.Fatal(err)
	}
	s.await(t, "the object goes", func() error {
		if err := s.do(t, nil, http.MethodGet, gpuNodes+"/node-1", "", nil, nil); err == nil || !strings.Contains(err.Error(), "not found") {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
}
