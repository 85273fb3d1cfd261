// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// server is a small API server on a real socket: objects with versions, lists,
// watches, merge patches, strategic ones of a node's status, applied ones of its
// metadata, and evictions, for the resources and verbs in Rules and no others. Faults are set by the tests.
type server struct {
	t    *testing.T
	addr string

	mu      sync.Mutex // guards what follows
	http    *http.Server
	version int
	// oldest is the version that a watch can still start after.
	oldest  int
	objects map[string]map[string]any // by "resource/namespace/name"
	// managers of a Node's labels and annotations: by the Node's name, by
	// "labels/key", as "name/operation".
	managers map[string]map[string][]string
	history  []change
	changed  chan struct{} // closed and replaced at every change
	// requests is everything that was asked: "watch configmaps
	// gpu/gpu-partitions rv=7".
	requests []string
	used     map[string]bool // "verb resource"
	// fault may answer a request instead of the server; verb is RBAC's.
	fault func(verb, resource string, w http.ResponseWriter) (handled bool)
	// dry may answer a request that is a dry run; without it, and where it does
	// not, that changes nothing and is answered as done.
	dry func(resource string, w http.ResponseWriter) (handled bool)
	// gated is a field of devices that the server drops, as it does where a feature is off.
	gated string
	// pruned are the fields of a GPUNode's status that its definition does not have.
	pruned []string
	// release is what the server says of itself; without one it does not tell.
	release string
	// mute watches get no events.
	mute bool
	// deaf watches do not end in the time that they were asked to.
	deaf bool
	cut  chan struct{} // closed to cut all streams
}

type change struct {
	version int
	kind    string
	key     string
	object  map[string]any
}

func newServer(t *testing.T) *server {
	s := &server{t: t, version: 1, objects: map[string]map[string]any{}, managers: map[string]map[string][]string{}, used: map[string]bool{},
		changed: make(chan struct{}), cut: make(chan struct{})}
	s.start("127.0.0.1:0")
	t.Cleanup(s.stop)
	return s
}

func (s *server) start(addr string) {
	s.t.Helper()
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addr = listener.Addr().String()
	s.http = &http.Server{Handler: s}
	go s.http.Serve(listener)
}

// stop takes the server away: nothing listens, open streams are reset.
func (s *server) stop() {
	s.mu.Lock()
	h := s.http
	s.mu.Unlock()
	h.Close()
}

func (s *server) back() { s.start(s.addr) }

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *server) cutStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// put makes or changes an object; nil deletes it.
func (s *server) put(resource, namespace, name string, object map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.updatedLocked(resource, name, object, "somebody")
	s.putLocked(resource, namespace, name, object)
}

func (s *server) putLocked(resource, namespace, name string, object map[string]any) map[string]any {
	key := resource + "/" + namespace + "/" + name
	kind := "MODIFIED"
	old, existed := s.objects[key]
	if !existed {
		kind = "ADDED"
	}
	s.version++
	if object == nil {
		kind = "DELETED"
		object = old
		delete(s.objects, key)
	}
	object = clone(object)
	metadata, _ := object["metadata"].(map[string]any)
	metadata = maps.Clone(metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	metadata["name"], metadata["resourceVersion"] = name, strconv.Itoa(s.version)
	if namespace != "" {
		metadata["namespace"] = namespace
	}
	if resource == "nodes" {
		metadata["managedFields"] = s.managedLocked(name)
	}
	object["metadata"], object["apiVersion"], object["kind"] = metadata, "v1", kinds[resource]
	if kind != "DELETED" {
		s.objects[key] = object
	}
	s.history = append(s.history, change{s.version, kind, key, object})
	close(s.changed)
	s.changed = make(chan struct{})
	return object
}

// foreignGroups are other projects', and follow the names of their resources.
var foreignGroups = []string{"authentication.liqo.io", "kueue.x-k8s.io"}

// stored is the resource's name in the server, with a subresource.
func (r Rule) stored() string {
	name, sub, _ := strings.Cut(r.Resource, "/")
	if slices.Contains(foreignGroups, r.APIGroup) {
		name += "." + r.APIGroup
	}
	return strings.TrimSuffix(name+"/"+sub, "/")
}

// updateStatus puts an object's status in its place, if the object is in that version.
func (s *server) updateStatus(w http.ResponseWriter, resource, namespace, name string, body []byte) {
	var sent struct {
		Metadata struct{ ResourceVersion string }
		Status   map[string]any
	}
	if err := json.Unmarshal(body, &sent); err != nil {
		refuse(w, 400, "BadRequest")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	object := s.objects[resource+"/"+namespace+"/"+name]
	switch {
	case object == nil:
		refuse(w, 404, "NotFound")
	case object["metadata"].(map[string]any)["resourceVersion"] != sent.Metadata.ResourceVersion:
		refuse(w, 409, "Conflict")
	default:
		object = clone(object)
		object["status"] = sent.Status
		answer(w, s.putLocked(resource, namespace, name, object))
	}
}

var kinds = map[string]string{"resourceslices.authentication.liqo.io": "ResourceSlice", "tenants.authentication.liqo.io": "Tenant",
	"workloads.kueue.x-k8s.io": "Workload", "resourceflavors.kueue.x-k8s.io": "ResourceFlavor", "admissionchecks.kueue.x-k8s.io": "AdmissionCheck",
	"gpunodes": "GPUNode", "resourceslices": "ResourceSlice", "configmaps": "ConfigMap", "nodes": "Node", "events": "Event", "pods": "Pod", "leases": "Lease"}

func clone(object map[string]any) map[string]any {
	body, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	var out map[string]any
	if err := json.Unmarshal(body, &out); err != nil {
		panic(err)
	}
	return out
}

func (s *server) config(namespace, name, content string) {
	s.put("configmaps", namespace, name, map[string]any{"data": map[string]any{"config.yaml": content}})
}

func (s *server) node(name string, labels, annotations map[string]any) {
	s.put("nodes", "", name, map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
}

func (s *server) pod(namespace, name, uid string) {
	s.put("pods", namespace, name, map[string]any{"metadata": map[string]any{"uid": uid}})
}

// all returns the objects of a resource, sorted by name.
func (s *server) all(resource string) []map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []map[string]any
	for _, key := range slices.Sorted(maps.Keys(s.objects)) {
		if strings.HasPrefix(key, resource+"/") {
			out = append(out, clone(s.objects[key]))
		}
	}
	return out
}

func (s *server) asked(prefix string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, r := range s.requests {
		if strings.HasPrefix(r, prefix) {
			out = append(out, r)
		}
	}
	return out
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.release == "" {
			refuse(w, 403, "Forbidden")
			return
		}
		answer(w, map[string]any{"major": "1", "gitVersion": s.release})
		return
	}
	path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/apis/resource.k8s.io/v1/")
	path = strings.TrimPrefix(path, "/apis/coordination.k8s.io/v1/")
	foreign := ""
	for _, group := range foreignGroups {
		if rest, is := strings.CutPrefix(path, "/apis/"+group+"/"); is {
			_, path, _ = strings.Cut(rest, "/") // after the version
			foreign = "." + group
		}
	}
	parts := strings.Split(strings.TrimPrefix(path, "/apis/example.com/v1alpha1/"), "/")
	namespace := ""
	if len(parts) > 2 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	parts[0] += foreign // two projects have ResourceSlices
	resource, name := parts[0], ""
	if len(parts) > 1 {
		name = parts[1]
	}
	if len(parts) > 2 {
		resource += "/" + parts[2]
	}
	query := r.URL.Query()
	if selector, ok := strings.CutPrefix(query.Get("fieldSelector"), "metadata.name="); ok {
		name = selector
	}
	verb := map[string]string{http.MethodGet: "list", http.MethodPost: "create", http.MethodPatch: "patch", http.MethodPut: "update", http.MethodDelete: "delete"}[r.Method]
	switch {
	case query.Get("watch") != "":
		verb = "watch"
	case verb == "list" && len(parts) > 1:
		verb = "get"
	}
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.requests = append(s.requests, fmt.Sprintf("%s %s %s/%s rv=%s%s %s", verb, resource, namespace, name, query.Get("resourceVersion"), query.Get("dryRun"), body))
	allowed := slices.ContainsFunc(slices.Concat(Rules, PlacerRules, LiqoRules, KueueRules), func(rule Rule) bool {
		return rule.stored() == resource && slices.Contains(rule.Verbs, verb)
	})
	s.used[verb+" "+resource] = true
	if verb == "patch" && resource == "resourceclaims/status" {
		s.used["associated-node:patch resourceclaims/driver"] = true // as the server asks besides
	}
	fault, dry := s.fault, s.dry
	s.mu.Unlock()
	switch {
	case !allowed:
		s.t.Errorf("request beyond Rules: %s %s", verb, resource)
		refuse(w, 403, "Forbidden")
	case fault != nil && fault(verb, resource, w):
	case query.Get("dryRun") == "All":
		if dry == nil || !dry(resource, w) {
			object := map[string]any{"apiVersion": "v1", "kind": kinds[parts[0]], "metadata": map[string]any{"name": name}}
			if sent := map[string]any{}; resource == "resourceslices" && json.Unmarshal(body, &sent) == nil {
				s.mu.Lock()
				object = s.ungated(sent)
				s.mu.Unlock()
			}
			answer(w, object)
		}
	case parts[0] == "gpunodes" && verb != "list" && verb != "watch":
		s.writeGPUNode(w, r, verb, resource, name, body)
	case resource == "resourceslices" && verb == "list":
		s.listSlices(w, query.Get("fieldSelector"))
	case resource == "resourceslices" && verb != "watch":
		s.writeSlice(w, verb, name, body)
	case parts[0] == "leases":
		s.serveLease(w, verb, namespace, name, body)
	case parts[0] == "resourceclaims":
		s.serveClaims(w, r, verb, namespace, name, body)
	case verb == "list" && name == "":
		s.listAll(w, r, resource)
	case verb == "list":
		s.list(w, resource, namespace, name)
	case verb == "watch":
		s.watch(w, r, resource, namespace, name)
	case resource == "pods/eviction":
		s.evict(w, namespace, name, body)
	case verb == "update" && foreign != "":
		s.updateStatus(w, parts[0], namespace, name, body)
	case verb == "create":
		s.create(w, resource, namespace, body)
	case verb == "patch":
		s.patch(w, r, resource, namespace, name, body)
	}
}

func refuse(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(failed(code, reason))
}

func failed(code int, reason string) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure",
		"code": code, "reason": reason, "message": "scripted: " + reason}
}

func answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(value)
}

func (s *server) list(w http.ResponseWriter, resource, namespace, name string) {
	s.mu.Lock()
	items := []any{}
	if o, ok := s.objects[resource+"/"+namespace+"/"+name]; ok {
		items = append(items, o)
	}
	version := strconv.Itoa(s.version)
	s.mu.Unlock()
	answer(w, map[string]any{"apiVersion": "v1", "kind": kinds[resource] + "List",
		"metadata": map[string]any{"resourceVersion": version}, "items": items})
}

func (s *server) watch(w http.ResponseWriter, r *http.Request, resource, namespace, name string) {
	query := r.URL.Query()
	at, err := strconv.Atoi(query.Get("resourceVersion"))
	s.mu.Lock()
	oldest, cut, deaf := s.oldest, s.cut, s.deaf
	s.mu.Unlock()
	if err != nil || at < oldest {
		refuse(w, 410, "Expired")
		return
	}
	var expired <-chan time.Time
	if seconds, err := strconv.Atoi(query.Get("timeoutSeconds")); err == nil && !deaf {
		timer := time.NewTimer(time.Duration(seconds) * time.Second)
		defer timer.Stop()
		expired = timer.C
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out, flush := json.NewEncoder(w), w.(http.Flusher)
	flush.Flush()
	for {
		s.mu.Lock()
		changed, mute := s.changed, s.mute
		var pending []change
		for _, c := range s.history {
			if c.version > at {
				pending = append(pending, c)
			}
		}
		s.mu.Unlock()
		for _, c := range pending {
			at = c.version
			if mute {
				continue
			}
			if all := name == "" && strings.HasPrefix(c.key, resource+"/"); all && ended(c.object) {
				out.Encode(map[string]any{"type": "DELETED", "object": c.object})
			} else if all && resource != "resourceslices" || c.key == resource+"/"+namespace+"/"+name || c.kind == "ERROR" {
				out.Encode(map[string]any{"type": c.kind, "object": c.object})
			} else {
				out.Encode(map[string]any{"type": "BOOKMARK", "object": map[string]any{"apiVersion": "v1",
					"kind": kinds[resource], "metadata": map[string]any{"resourceVersion": strconv.Itoa(at)}}})
			}
			flush.Flush()
		}
		select {
		case <-changed:
		case <-expired:
			return
		case <-cut:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		}
	}
}

func (s *server) create(w http.ResponseWriter, resource, namespace string, body []byte) {
	var object map[string]any
	if err := json.Unmarshal(body, &object); err != nil {
		refuse(w, 400, "BadRequest")
		return
	}
	metadata := object["metadata"].(map[string]any)
	name := metadata["name"].(string)
	s.mu.Lock()
	defer s.mu.Unlock()
	involved, _ := object["involvedObject"].(map[string]any)
	in, _ := involved["namespace"].(string)
	if in == "" {
		in = "default"
	}
	switch {
	case metadata["namespace"] != namespace, in != namespace: // as the API's validation has it
		refuse(w, 422, "Invalid")
	case s.objects[resource+"/"+namespace+"/"+name] != nil:
		refuse(w, 409, "AlreadyExists")
	default:
		answer(w, s.putLocked(resource, namespace, name, object))
	}
}

// evict deletes a pod at once. As at the real server, a precondition that does
// not hold is a conflict, and the object's name is the path's.
func (s *server) evict(w http.ResponseWriter, namespace, name string, body []byte) {
	var eviction struct {
		APIVersion, Kind string
		Metadata         struct{ Name, Namespace string }
		DeleteOptions    struct{ Preconditions struct{ UID string } }
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	pod, ok := s.objects["pods/"+namespace+"/"+name]
	metadata, _ := pod["metadata"].(map[string]any)
	uid, _ := metadata["uid"].(string)
	switch err := json.Unmarshal(body, &eviction); {
	case err != nil, eviction.APIVersion != "policy/v1", eviction.Kind != "Eviction",
		eviction.Metadata.Name != name, eviction.Metadata.Namespace != namespace:
		refuse(w, 400, "BadRequest")
	case !ok:
		refuse(w, 404, "NotFound")
	case eviction.DeleteOptions.Preconditions.UID != "" && eviction.DeleteOptions.Preconditions.UID != uid:
		refuse(w, 409, "Conflict")
	default:
		s.putLocked("pods", namespace, name, nil)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201})
	}
}

func (s *server) patch(w http.ResponseWriter, r *http.Request, resource, namespace, name string, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	whole, sub, _ := strings.Cut(resource, "/")
	object, ok := s.objects[whole+"/"+namespace+"/"+name]
	if !ok {
		refuse(w, 404, "NotFound")
		return
	}
	if r.Header.Get("Content-Type") == "application/json-patch+json" {
		s.jsonPatchLocked(w, whole, namespace, name, object, body)
		return
	}
	var patch, patched map[string]any
	err := json.Unmarshal(body, &patch)
	manager := r.URL.Query().Get("fieldManager")
	switch kind := r.Header.Get("Content-Type"); {
	case err != nil:
	case kind == "application/apply-patch+yaml" && resource == "nodes":
		patched = s.applyLocked(clone(object), patch, manager, r.URL.Query().Get("force") == "true")
		if patched == nil {
			refuse(w, 409, "Conflict")
			return
		}
	case kind == "application/merge-patch+json":
		if sent, is := versionOf(patch), versionOf(object); sent != "" && sent != is {
			refuse(w, 409, "Conflict")
			return
		}
		patched = merge(clone(object), patch)
	case kind == "application/strategic-merge-patch+json":
		patched, err = strategicMerge(clone(object), patch)
	default:
		refuse(w, 415, "UnsupportedMediaType")
		return
	}
	if err != nil {
		refuse(w, 400, "BadRequest")
		return
	}
	if tooLong(patched) {
		refuse(w, 422, "Invalid")
		return
	}
	// As the strategies of the API have it, a patch of the object leaves its
	// status alone, and one of its status what is wanted.
	keep := "status"
	if sub == "status" {
		keep = "spec"
	}
	if delete(patched, keep); object[keep] != nil {
		patched[keep] = object[keep]
	}
	if r.Header.Get("Content-Type") != "application/apply-patch+yaml" {
		s.updatedLocked(whole, name, patched, manager)
	}
	answer(w, s.putLocked(whole, namespace, name, patched))
}

// jsonPatchLocked tests and replaces texts of an object, and removes elements of lists. As
// at the real server, a test that fails and a path that is not there are the same refusal.
func (s *server) jsonPatchLocked(w http.ResponseWriter, resource, namespace, name string, object map[string]any, body []byte) {
	var steps []struct{ Op, Path, Value string }
	if json.Unmarshal(body, &steps) != nil {
		refuse(w, 400, "BadRequest")
		return
	}
	object = clone(object)
	for _, step := range steps {
		path := strings.Split(step.Path, "/")[1:]
		var at any = object
		var parent map[string]any
		for _, key := range path[:len(path)-1] {
			if list, ok := at.([]any); ok {
				if i, err := strconv.Atoi(key); err == nil && i < len(list) {
					at = list[i]
				} else {
					at = nil
				}
				continue
			}
			parent, _ = at.(map[string]any)
			at = parent[key]
		}
		key := strings.NewReplacer("~1", "/", "~0", "~").Replace(path[len(path)-1])
		if list, ok := at.([]any); ok && step.Op == "remove" {
			if i, err := strconv.Atoi(key); err == nil && i < len(list) {
				parent[path[len(path)-2]] = slices.Delete(list, i, i+1)
				continue
			}
		}
		in, _ := at.(map[string]any)
		if _, there := in[key]; !there || step.Op == "test" && in[key] != step.Value {
			refuse(w, 422, "Invalid")
			return
		}
		in[key] = step.Value
	}
	answer(w, s.putLocked(resource, namespace, name, object))
}

// tooLong says whether an object's annotations are more than the API takes.
func tooLong(object map[string]any) bool {
	metadata, _ := object["metadata"].(map[string]any)
	annotations, _ := metadata["annotations"].(map[string]any)
	total := 0
	for key, value := range annotations {
		text, _ := value.(string)
		total += len(key) + len(text)
	}
	return total > 256<<10
}

// strategicMerge is a merge patch but for status.conditions: as the API's type
// of a Node has it, elements are merged by their type, new ones come first, and
// one that is marked so goes. As there, nothing else may come in an element's
// stead.
func strategicMerge(object, patch map[string]any) (map[string]any, error) {
	patch = clone(patch)
	status, _ := patch["status"].(map[string]any)
	elements, _ := status["conditions"].([]any)
	delete(status, "conditions")
	object = merge(object, patch)
	if len(elements) == 0 {
		return object, nil
	}
	into, _ := object["status"].(map[string]any)
	list, _ := into["conditions"].([]any)
	for _, element := range elements {
		element, ok := element.(map[string]any)
		if !ok || element["type"] == nil {
			return nil, errors.New("map does not contain key: type")
		}
		i := slices.IndexFunc(list, func(have any) bool { return have.(map[string]any)["type"] == element["type"] })
		directive := element["$patch"]
		switch {
		case directive == "delete" && i >= 0:
			list = slices.Delete(list, i, i+1)
		case directive == "delete":
		case directive != nil:
			return nil, fmt.Errorf("unknown patch type %v", directive)
		case i >= 0:
			list[i] = merge(list[i].(map[string]any), element)
		default:
			list = slices.Insert(list, 0, any(element))
		}
	}
	into["conditions"] = list
	return object, nil
}

// merge is RFC 7386.
func merge(object, patch map[string]any) map[string]any {
	if object == nil {
		object = map[string]any{}
	}
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(object, key)
		case map[string]any:
			inner, _ := object[key].(map[string]any)
			object[key] = merge(inner, value)
		default:
			object[key] = value
		}
	}
	return object
}

// journal is a log that can be counted.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) count(part string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), part)
}

// connect returns a client of s whose waits are short.
func connect(t *testing.T, s *server, change ...func(*Options)) (*Client, *journal) {
	t.Helper()
	j := &journal{}
	o := Options{Kubeconfig: kubeconfig(t, "http://"+s.addr), NodeName: "node-1", Domain: "example.com",
		Logger: slog.New(slog.NewTextHandler(j, nil))}
	for _, f := range change {
		f(&o)
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	c.timing.pauseMin, c.timing.pauseMax = time.Millisecond, 5*time.Millisecond
	return c, j
}

func kubeconfig(t *testing.T, url string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: %q}}], users: [{name: u, user: {}}]}`, url)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// background runs f until the test ends and then waits for it.
func background(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != context.Canceled {
				t.Errorf("ended with %v, not with its context", err)
			}
		case <-time.After(limit):
			t.Error("does not end with its context")
		}
	})
}

// limit is for a test that fails; no test that passes waits for it.
const limit = 20 * time.Second

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(limit):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

// await polls a condition of another goroutine's making.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// versionOf is an object's, empty where it has none.
func versionOf(object map[string]any) string {
	metadata, _ := object["metadata"].(map[string]any)
	v, _ := metadata["resourceVersion"].(string)
	return v
}
