// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Server is a small API server on a real socket. It has objects with versions, lists, watches and
// evictions. It takes merge patches, strategic merge patches of a Node's status, and server-side
// applies of a Node's metadata. It refuses resources and verbs that Allow does not name. Tests set
// faults while they hold Mu.
type Server struct {
	T    *testing.T
	Addr string

	Mu      sync.Mutex // guards what follows
	http    *http.Server
	Version int
	// Oldest is the oldest version from which a watch can still start.
	Oldest  int
	Objects map[string]map[string]any // by "resource/namespace/name"
	// Managers are those of a Node's labels and annotations: by the Node's name, by "labels/key",
	// as "name/operation".
	Managers map[string]map[string][]string
	History  []Change
	changed  chan struct{} // closed and replaced at every change
	// requests are all requests so far, such as "watch configmaps gpu/gpu-partitions rv=7".
	requests []string
	allowed  map[string]bool // "verb resource"
	Used     map[string]bool // "verb resource"
	// Fault, if set, may answer a request instead of the server. Verb is RBAC's.
	Fault func(verb, resource string, w http.ResponseWriter) (handled bool)
	// Dry, if set, may answer a dry run. Otherwise the server answers a dry run with success and
	// changes nothing.
	Dry func(resource string, w http.ResponseWriter) (handled bool)
	// Gated is a field of devices that the server drops, as if its feature gate were off.
	Gated string
	// Pruned are fields of a GPUNode's status that the server drops, as if the definition lacked
	// them.
	Pruned []string
	// Release is the server's version. If empty, the server refuses to tell it.
	Release string
	// Mute is true if watches get no events.
	Mute bool
	// Deaf is true if watches do not end after the time that they asked for.
	Deaf bool
	cut  chan struct{} // closed to cut all streams
	// Forbidden are requests that the server refuses without failing the test: "list nodes".
	Forbidden map[string]bool
	// Logs are the logs of containers, by "namespace/pod/container", and with "/previous" those of
	// the run before.
	Logs map[string]string
	// Ports are what listens in pods, by "namespace/pod": the address that a forwarded connection
	// is connected to.
	Ports map[string]string
}

// Change is an event of a watch. Its kind is ADDED, MODIFIED, DELETED or ERROR; its key has the
// form of those of Objects.
type Change struct {
	Version int
	Kind    string
	Key     string
	Object  map[string]any
}

// New starts a server, and stops it when the test ends. The server refuses all requests until Allow
// is called.
func New(t *testing.T) *Server {
	s := &Server{T: t, Version: 1, Objects: map[string]map[string]any{}, Managers: map[string]map[string][]string{},
		Used: map[string]bool{}, allowed: map[string]bool{},
		changed: make(chan struct{}), cut: make(chan struct{})}
	s.start("127.0.0.1:0")
	t.Cleanup(s.Stop)
	return s
}

func (s *Server) start(addr string) {
	s.T.Helper()
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		s.T.Fatal(err)
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Addr = listener.Addr().String()
	s.http = &http.Server{Handler: s}
	go s.http.Serve(listener)
}

// Stop closes the listener and resets open streams.
func (s *Server) Stop() {
	s.Mu.Lock()
	h := s.http
	s.Mu.Unlock()
	h.Close()
}

// Back starts the server again at the same address, after Stop.
func (s *Server) Back() { s.start(s.Addr) }

// Set calls f with Mu held.
func (s *Server) Set(f func()) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	f()
}

// CutStreams breaks off every watch.
func (s *Server) CutStreams() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// Put creates or changes an object; nil deletes it.
func (s *Server) Put(resource, namespace, name string, object map[string]any) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.UpdatedLocked(resource, name, object, "somebody")
	s.PutLocked(resource, namespace, name, object)
}

// PutLocked does what Put does, for a caller that holds Mu. It does not update the managers. It
// returns the object as it is stored.
func (s *Server) PutLocked(resource, namespace, name string, object map[string]any) map[string]any {
	key := resource + "/" + namespace + "/" + name
	kind := "MODIFIED"
	old, existed := s.Objects[key]
	if !existed {
		kind = "ADDED"
	}
	s.Version++
	if object == nil {
		kind = "DELETED"
		object = old
		delete(s.Objects, key)
	}
	object = Clone(object)
	metadata, _ := object["metadata"].(map[string]any)
	metadata = maps.Clone(metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	metadata["name"], metadata["resourceVersion"] = name, strconv.Itoa(s.Version)
	if namespace != "" {
		metadata["namespace"] = namespace
	}
	if resource == "nodes" {
		metadata["managedFields"] = s.managedLocked(name)
	}
	object["metadata"], object["apiVersion"], object["kind"] = metadata, "v1", kinds[resource]
	if kind != "DELETED" {
		s.Objects[key] = object
	}
	s.History = append(s.History, Change{s.Version, kind, key, object})
	close(s.changed)
	s.changed = make(chan struct{})
	return object
}

// foreignGroups are the API groups of Liqo and Kueue. Such a group is appended to the names of its
// resources.
var foreignGroups = []string{"authentication.liqo.io", "kueue.x-k8s.io"}

// Allow permits requests with these verbs for a resource, named as in RBAC. Any other request fails
// the test.
func (s *Server) Allow(group, resource string, verbs ...string) {
	name, sub, _ := strings.Cut(resource, "/")
	if slices.Contains(foreignGroups, group) {
		name += "." + group
	}
	name = strings.TrimSuffix(name+"/"+sub, "/")
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, verb := range verbs {
		s.allowed[verb+" "+name] = true
	}
}

// WantAllUsed waits until each allowed verb of each resource has been requested. It fails the test
// after Limit.
func (s *Server) WantAllUsed() {
	s.T.Helper()
	Await(s.T, "all rules are used", func() bool {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		return maps.Equal(s.Used, s.allowed)
	})
}

// updateStatus replaces an object's status, if the request names the object's present version.
func (s *Server) updateStatus(w http.ResponseWriter, resource, namespace, name string, body []byte) {
	var sent struct {
		Metadata struct{ ResourceVersion string }
		Status   map[string]any
	}
	if err := json.Unmarshal(body, &sent); err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	object := s.Objects[resource+"/"+namespace+"/"+name]
	switch {
	case object == nil:
		Refuse(w, 404, "NotFound")
	case object["metadata"].(map[string]any)["resourceVersion"] != sent.Metadata.ResourceVersion:
		Refuse(w, 409, "Conflict")
	default:
		object = Clone(object)
		object["status"] = sent.Status
		Answer(w, s.PutLocked(resource, namespace, name, object))
	}
}

var kinds = map[string]string{
	"resourceslices.authentication.liqo.io": "ResourceSlice", "tenants.authentication.liqo.io": "Tenant",
	"workloads.kueue.x-k8s.io": "Workload", "resourceflavors.kueue.x-k8s.io": "ResourceFlavor",
	"admissionchecks.kueue.x-k8s.io": "AdmissionCheck", "gpunodes": "GPUNode", "resourceslices": "ResourceSlice",
	"resourceclaims": "ResourceClaim", "configmaps": "ConfigMap", "nodes": "Node", "events": "Event", "pods": "Pod", "leases": "Lease", "jobs": "Job",
}

// Clone returns a deep copy.
func Clone(object map[string]any) map[string]any {
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

// Config stores a ConfigMap with the key config.yaml.
func (s *Server) Config(namespace, name, content string) {
	s.Put("configmaps", namespace, name, map[string]any{"data": map[string]any{"config.yaml": content}})
}

// Node stores a Node.
func (s *Server) Node(name string, labels, annotations map[string]any) {
	s.Put("nodes", "", name, map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
}

// Pod stores a pod.
func (s *Server) Pod(namespace, name, uid string) {
	s.Put("pods", namespace, name, map[string]any{"metadata": map[string]any{"uid": uid}})
}

// All returns the objects of a resource, sorted by name.
func (s *Server) All(resource string) []map[string]any {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var out []map[string]any
	for _, key := range slices.Sorted(maps.Keys(s.Objects)) {
		if strings.HasPrefix(key, resource+"/") {
			out = append(out, Clone(s.Objects[key]))
		}
	}
	return out
}

// Asked returns the requests that begin with prefix, such as "list nodes /node-1 rv= ".
func (s *Server) Asked(prefix string) []string {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var out []string
	for _, r := range s.requests {
		if strings.HasPrefix(r, prefix) {
			out = append(out, r)
		}
	}
	return out
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		if s.Release == "" {
			Refuse(w, 403, "Forbidden")
			return
		}
		Answer(w, map[string]any{"major": "1", "gitVersion": s.Release})
		return
	}
	path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/apis/resource.k8s.io/v1/")
	path = strings.TrimPrefix(strings.TrimPrefix(path, "/apis/coordination.k8s.io/v1/"), "/apis/batch/v1/")
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
	parts[0] += foreign // Kubernetes and Liqo both have ResourceSlices
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
	verb := map[string]string{http.MethodGet: "list", http.MethodPost: "create", http.MethodPatch: "patch",
		http.MethodPut: "update", http.MethodDelete: "delete"}[r.Method]
	switch {
	case query.Get("watch") != "":
		verb = "watch"
	case verb == "list" && len(parts) > 1:
		verb = "get"
	}
	body, _ := io.ReadAll(r.Body)
	s.Mu.Lock()
	s.requests = append(s.requests, fmt.Sprintf("%s %s %s/%s rv=%s%s %s", verb, resource, namespace, name,
		query.Get("resourceVersion"), query.Get("dryRun"), body))
	allowed := s.allowed[verb+" "+resource]
	s.Used[verb+" "+resource] = true
	if verb == "patch" && resource == "resourceclaims/status" {
		s.Used["associated-node:patch resourceclaims/driver"] = true // the server also checks this permission
	}
	fault, dry, forbidden := s.Fault, s.Dry, s.Forbidden[verb+" "+resource]
	s.Mu.Unlock()
	switch {
	case forbidden:
		Refuse(w, 403, "Forbidden")
	case !allowed:
		s.T.Errorf("request beyond what is allowed: %s %s", verb, resource)
		Refuse(w, 403, "Forbidden")
	case fault != nil && fault(verb, resource, w):
	case query.Get("dryRun") == "All":
		if dry == nil || !dry(resource, w) {
			object := map[string]any{"apiVersion": "v1", "kind": kinds[parts[0]],
				"metadata": map[string]any{"name": name}}
			if sent := map[string]any{}; resource == "resourceslices" && json.Unmarshal(body, &sent) == nil {
				s.Mu.Lock()
				object = s.ungated(sent)
				s.Mu.Unlock()
			}
			Answer(w, object)
		}
	default:
		s.serve(w, r, verb, resource, namespace, name, body)
	}
}

// Refuse answers with an error.
func Refuse(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(Failed(code, reason))
}

// Failed returns a Status with this code and reason.
func Failed(code int, reason string) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure",
		"code": code, "reason": reason, "message": "scripted: " + reason}
}

// Answer answers with a value as JSON.
func Answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(value)
}

func (s *Server) list(w http.ResponseWriter, resource, namespace, name string) {
	s.Mu.Lock()
	items := []any{}
	if o, ok := s.Objects[resource+"/"+namespace+"/"+name]; ok {
		items = append(items, o)
	}
	version := strconv.Itoa(s.Version)
	s.Mu.Unlock()
	Answer(w, map[string]any{"apiVersion": "v1", "kind": kinds[resource] + "List",
		"metadata": map[string]any{"resourceVersion": version}, "items": items})
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource, namespace, name string) {
	query := r.URL.Query()
	at, err := strconv.Atoi(query.Get("resourceVersion"))
	s.Mu.Lock()
	oldest, cut, deaf := s.Oldest, s.cut, s.Deaf
	s.Mu.Unlock()
	if err != nil || at < oldest {
		Refuse(w, 410, "Expired")
		return
	}
	var expired <-chan time.Time
	if seconds, err := strconv.Atoi(query.Get("timeoutSeconds")); err == nil && !deaf {
		timer := time.NewTimer(time.Duration(seconds) * time.Second)
		defer timer.Stop()
		expired = timer.C
	}
	chosen := func(map[string]any) bool { return true }
	if ofNode(r) {
		if chosen, err = selection("", query.Get("fieldSelector"), ""); err != nil {
			Refuse(w, 400, "BadRequest")
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out, flush := json.NewEncoder(w), w.(http.Flusher)
	flush.Flush()
	for {
		s.Mu.Lock()
		changed, mute := s.changed, s.Mute
		var pending []Change
		for _, c := range s.History {
			if c.Version > at {
				pending = append(pending, c)
			}
		}
		s.Mu.Unlock()
		for _, c := range pending {
			at = c.Version
			if mute {
				continue
			}
			if all := name == "" && strings.HasPrefix(c.Key, resource+"/"); all && ofNode(r) {
				if kind := s.kindFor(c, chosen); kind != "" {
					out.Encode(map[string]any{"type": kind, "object": partial(r, c.Object)})
				}
			} else if all && ended(c.Object) {
				out.Encode(map[string]any{"type": "DELETED", "object": c.Object})
			} else if all && resource != "resourceslices" || c.Key == resource+"/"+namespace+"/"+name ||
				c.Kind == "ERROR" {
				out.Encode(map[string]any{"type": c.Kind, "object": c.Object})
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

func (s *Server) create(w http.ResponseWriter, resource, namespace string, body []byte) {
	var object map[string]any
	if err := json.Unmarshal(body, &object); err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	metadata := object["metadata"].(map[string]any)
	name := metadata["name"].(string)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	involved, _ := object["involvedObject"].(map[string]any)
	in, _ := involved["namespace"].(string)
	if in == "" {
		in = "default"
	}
	switch {
	case metadata["namespace"] != namespace, resource == "events" && in != namespace: // like the API's validation
		Refuse(w, 422, "Invalid")
	case s.Objects[resource+"/"+namespace+"/"+name] != nil:
		Refuse(w, 409, "AlreadyExists")
	default:
		Answer(w, s.PutLocked(resource, namespace, name, object))
	}
}

// evict deletes a pod at once. Like the real server, it answers a failed precondition with a
// conflict, and requires the object to have the name that is in the path.
func (s *Server) evict(w http.ResponseWriter, namespace, name string, body []byte) {
	var eviction struct {
		APIVersion, Kind string
		Metadata         struct{ Name, Namespace string }
		DeleteOptions    struct{ Preconditions struct{ UID string } }
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	pod, ok := s.Objects["pods/"+namespace+"/"+name]
	metadata, _ := pod["metadata"].(map[string]any)
	uid, _ := metadata["uid"].(string)
	switch err := json.Unmarshal(body, &eviction); {
	case err != nil, eviction.APIVersion != "policy/v1", eviction.Kind != "Eviction",
		eviction.Metadata.Name != name, eviction.Metadata.Namespace != namespace:
		Refuse(w, 400, "BadRequest")
	case !ok:
		Refuse(w, 404, "NotFound")
	case eviction.DeleteOptions.Preconditions.UID != "" && eviction.DeleteOptions.Preconditions.UID != uid:
		Refuse(w, 409, "Conflict")
	default:
		s.PutLocked("pods", namespace, name, nil)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success",
			"code": 201})
	}
}

func (s *Server) patch(w http.ResponseWriter, r *http.Request, resource, namespace, name string, body []byte) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	whole, sub, _ := strings.Cut(resource, "/")
	object, ok := s.Objects[whole+"/"+namespace+"/"+name]
	if !ok {
		Refuse(w, 404, "NotFound")
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
		patched = s.applyLocked(Clone(object), patch, manager, r.URL.Query().Get("force") == "true")
		if patched == nil {
			Refuse(w, 409, "Conflict")
			return
		}
	case kind == "application/merge-patch+json":
		if sent, is := versionOf(patch), versionOf(object); sent != "" && sent != is {
			Refuse(w, 409, "Conflict")
			return
		}
		patched = Merge(Clone(object), patch)
	case kind == "application/strategic-merge-patch+json":
		patched, err = strategicMerge(Clone(object), patch)
	default:
		Refuse(w, 415, "UnsupportedMediaType")
		return
	}
	if err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	if tooLong(patched) {
		Refuse(w, 422, "Invalid")
		return
	}
	// Like the API server: a patch of the object leaves its status alone, and a patch of the status
	// leaves the spec alone.
	keep := "status"
	if sub == "status" {
		keep = "spec"
	}
	if delete(patched, keep); object[keep] != nil {
		patched[keep] = object[keep]
	}
	if r.Header.Get("Content-Type") != "application/apply-patch+yaml" {
		s.UpdatedLocked(whole, name, patched, manager)
	}
	Answer(w, s.PutLocked(whole, namespace, name, patched))
}

// jsonPatchLocked tests and replaces strings of an object, and removes elements of lists. Like the
// real server, it answers a failed test and a missing path with the same refusal.
func (s *Server) jsonPatchLocked(w http.ResponseWriter, resource, namespace, name string, object map[string]any,
	body []byte) {
	var steps []struct{ Op, Path, Value string }
	if json.Unmarshal(body, &steps) != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	object = Clone(object)
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
			Refuse(w, 422, "Invalid")
			return
		}
		in[key] = step.Value
	}
	Answer(w, s.PutLocked(resource, namespace, name, object))
}

// tooLong reports whether an object's annotations are larger than the API allows.
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

// strategicMerge is a merge patch except for status.conditions. Those it merges by type, as the
// API's Node type defines: it inserts new elements first, and removes those that are marked for it.
// It returns an error for an element without a type.
func strategicMerge(object, patch map[string]any) (map[string]any, error) {
	patch = Clone(patch)
	status, _ := patch["status"].(map[string]any)
	elements, _ := status["conditions"].([]any)
	delete(status, "conditions")
	object = Merge(object, patch)
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
			list[i] = Merge(list[i].(map[string]any), element)
		default:
			list = slices.Insert(list, 0, any(element))
		}
	}
	into["conditions"] = list
	return object, nil
}

// Merge implements RFC 7386 (JSON merge patch).
func Merge(object, patch map[string]any) map[string]any {
	if object == nil {
		object = map[string]any{}
	}
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(object, key)
		case map[string]any:
			inner, _ := object[key].(map[string]any)
			object[key] = Merge(inner, value)
		default:
			object[key] = value
		}
	}
	return object
}

// versionOf returns an object's resourceVersion; empty if it has none.
func versionOf(object map[string]any) string {
	metadata, _ := object["metadata"].(map[string]any)
	v, _ := metadata["resourceVersion"].(string)
	return v
}
