// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	nodeName     = "bench"
	agentConfig  = "gpu-partitions"
	configKey    = "config.yaml"
	bookmarkMean = time.Minute
)

// apiServer is what the agent meets of an API server: lists and watches of one
// object by name, patches and new objects, as JSON over TLS and HTTP/2
// like the real one's, which is what the client's memory goes to. It sends a
// bookmark about once a minute, as the real one does.
type apiServer struct {
	http *httptest.Server

	mu      sync.Mutex
	version int                       // guarded by mu
	objects map[string]map[string]any // guarded by mu; by resource/namespace/name
	changed chan struct{}             // guarded by mu; closed and replaced at every change
	watches map[string]int            // guarded by mu; open now, by resource
}

// startAPIServer serves a node and the ConfigMap with a partition file.
func startAPIServer(partitions string) *apiServer {
	s := &apiServer{objects: map[string]map[string]any{}, changed: make(chan struct{}), watches: map[string]int{}}
	s.putNode(nodeName)
	s.setPartitions(partitions)
	s.http = httptest.NewUnstartedServer(s)
	s.http.EnableHTTP2 = true
	s.http.Config.ErrorLog = log.New(io.Discard, "", 0) // of connections that a killed client leaves
	s.http.StartTLS()
	return s
}

func (s *apiServer) stop() {
	s.http.CloseClientConnections()
	s.http.Close()
}

func (s *apiServer) setPartitions(text string) {
	s.put("configmaps/"+agentPod.Namespace+"/"+agentConfig, map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": agentConfig, "namespace": agentPod.Namespace},
		"data":     map[string]any{configKey: text},
	})
}

// nodeObject is a Node as a kubelet makes it. Most of it is the list of images,
// 50 of them on a node that has been up for a while.
func nodeObject(name string) map[string]any {
	var images []any
	for i := range 50 {
		images = append(images, map[string]any{
			"names":     []any{fmt.Sprintf("registry.example/team-%d/some-workload@sha256:%064x", i, i), fmt.Sprintf("registry.example/team-%d/some-workload:v1.%d", i, i)},
			"sizeBytes": 100000000 + i,
		})
	}
	var conditions []any
	for _, c := range []string{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		conditions = append(conditions, map[string]any{"type": c, "status": "False", "reason": "Kubelet" + c, "message": "kubelet has " + c,
			"lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"})
	}
	quantities := map[string]any{"cpu": "2", "memory": "24676544Ki", "pods": "110", "example.com/gpu-mem": "640"}
	return map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": name, "labels": map[string]any{
			"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux", "example.com/gpu.node": "true"}},
		"spec":   map[string]any{"podCIDR": "10.244.0.0/24"},
		"status": map[string]any{"capacity": quantities, "allocatable": quantities, "conditions": conditions, "images": images},
	}
}

// kubeconfig writes the file that leads a client here.
func (s *apiServer) kubeconfig(path string) error {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.http.Certificate().Raw})
	text, err := json.Marshal(map[string]any{ // JSON is YAML too
		"apiVersion": "v1", "kind": "Config", "current-context": "bench",
		"contexts": []any{map[string]any{"name": "bench", "context": map[string]any{"cluster": "bench", "user": "bench"}}},
		"clusters": []any{map[string]any{"name": "bench", "cluster": map[string]any{"server": s.http.URL, "certificate-authority-data": ca}}},
		"users":    []any{map[string]any{"name": "bench", "user": map[string]any{"token": "bench"}}},
	})
	if err != nil {
		return fmt.Errorf("write a kubeconfig: %w", err)
	}
	return os.WriteFile(path, text, 0o600)
}

// putNode makes a node anew, without what anybody has written on it.
func (s *apiServer) putNode(name string) { s.put("nodes//"+name, nodeObject(name)) }

// nodeLabel is a label of the node, "" where it has none.
func (s *apiServer) nodeLabel(key string) string {
	value, _ := s.labels(nodeName)[key].(string)
	return value
}

// labels are a node's, for reading.
func (s *apiServer) labels(node string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	metadata, _ := s.objects["nodes//"+node]["metadata"].(map[string]any)
	labels, _ := metadata["labels"].(map[string]any)
	return labels
}

// writes is how often an object was made or changed.
func (s *apiServer) writes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// watched says whether a ConfigMap and a Node are being watched.
func (s *apiServer) watched() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches["configmaps"] > 0 && s.watches["nodes"] > 0
}

func (s *apiServer) put(key string, object map[string]any) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.putLocked(key, object)
}

// putLocked keeps an object under a new version. Objects are never changed
// afterwards.
func (s *apiServer) putLocked(key string, object map[string]any) map[string]any {
	s.version++
	object = maps.Clone(object)
	metadata, _ := object["metadata"].(map[string]any)
	metadata = maps.Clone(metadata)
	metadata["resourceVersion"] = strconv.Itoa(s.version)
	object["metadata"] = metadata
	s.objects[key] = object
	close(s.changed)
	s.changed = make(chan struct{})
	return object
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/")
	namespace := ""
	if len(parts) > 2 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	query := r.URL.Query()
	resource, name := parts[0], strings.TrimPrefix(query.Get("fieldSelector"), "metadata.name=")
	if len(parts) > 1 {
		name = parts[1]
	}
	key := resource + "/" + namespace + "/" + name
	switch {
	case query.Get("dryRun") != "":
		// The agent tries so whether it is held to its admission policies. It is,
		// or it would go on trying while it is measured.
		refusal := failure(http.StatusUnprocessableEntity, "Invalid")
		refusal["message"] = "ValidatingAdmissionPolicy 'gpu-agent' denied request"
		answer(w, http.StatusUnprocessableEntity, refusal)
	case r.Method == http.MethodGet && query.Get("watch") != "":
		s.watch(w, r, resource, key)
	case r.Method == http.MethodGet && query.Get("fieldSelector") != "":
		s.mu.Lock()
		version, items := s.version, []any{}
		if o, ok := s.objects[key]; ok {
			items = append(items, o)
		}
		s.mu.Unlock()
		answer(w, http.StatusOK, map[string]any{"apiVersion": "v1", "kind": "List",
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(version)}, "items": items})
	case r.Method == http.MethodPost, r.Method == http.MethodPatch:
		var body map[string]any
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			answer(w, http.StatusBadRequest, failure(http.StatusBadRequest, "BadRequest"))
			return
		}
		if strings.HasPrefix(r.Header.Get("Content-Type"), "application/apply-patch") {
			s.apply(w, key, body, query.Get("fieldManager"), query.Get("force") == "true")
			return
		}
		s.write(w, r.Method, key, body)
	default:
		answer(w, http.StatusNotFound, failure(http.StatusNotFound, "NotFound"))
	}
}

func (s *apiServer) write(w http.ResponseWriter, method, key string, body map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if method == http.MethodPatch {
		old, ok := s.objects[key]
		if !ok {
			answer(w, http.StatusNotFound, failure(http.StatusNotFound, "NotFound"))
			return
		}
		answer(w, http.StatusOK, s.putLocked(key, merge(old, body)))
		return
	}
	metadata, _ := body["metadata"].(map[string]any)
	name, _ := metadata["name"].(string)
	answer(w, http.StatusCreated, s.putLocked(key+name, body))
}

// apply is a server-side apply to an object's labels and annotations, which is all
// that is applied here: what a manager applied before and does not now goes, what
// somebody else wrote is taken with force alone, and the object says whose is what.
func (s *apiServer) apply(w http.ResponseWriter, key string, body map[string]any, manager string, force bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	object, ok := s.objects[key]
	if !ok {
		answer(w, http.StatusNotFound, failure(http.StatusNotFound, "NotFound"))
		return
	}
	metadata, _ := object["metadata"].(map[string]any)
	wanted, _ := body["metadata"].(map[string]any)
	if at, ok := wanted["resourceVersion"]; ok && at != metadata["resourceVersion"] {
		answer(w, http.StatusConflict, failure(http.StatusConflict, "Conflict"))
		return
	}
	metadata = maps.Clone(metadata)
	fields := map[string]any{}
	for _, field := range []string{"labels", "annotations"} {
		had, _ := metadata[field].(map[string]any)
		want, _ := wanted[field].(map[string]any)
		now := maps.Clone(had)
		if now == nil {
			now = map[string]any{}
		}
		mine := appliedBy(metadata, manager, field)
		for name := range mine {
			delete(now, name)
		}
		owned := map[string]any{}
		for name, value := range want {
			if old, there := now[name]; there && old != value && !force {
				answer(w, http.StatusConflict, failure(http.StatusConflict, "Conflict"))
				return
			}
			now[name] = value
			owned["f:"+name] = map[string]any{}
		}
		metadata[field], fields["f:"+field] = now, owned
	}
	managed := []any{}
	entries, _ := metadata["managedFields"].([]any)
	for _, e := range entries {
		if e.(map[string]any)["manager"] != manager {
			managed = append(managed, e)
		}
	}
	metadata["managedFields"] = append(managed, map[string]any{"manager": manager, "operation": "Apply", "apiVersion": "v1",
		"fieldsType": "FieldsV1", "fieldsV1": map[string]any{"f:metadata": fields}})
	object = maps.Clone(object)
	object["metadata"] = metadata
	answer(w, http.StatusOK, s.putLocked(key, object))
}

// appliedBy are the names in a field of an object's metadata that a manager applied.
func appliedBy(metadata map[string]any, manager, field string) map[string]bool {
	names := map[string]bool{}
	entries, _ := metadata["managedFields"].([]any)
	for _, e := range entries {
		entry := e.(map[string]any)
		if entry["manager"] != manager {
			continue
		}
		fields, _ := entry["fieldsV1"].(map[string]any)["f:metadata"].(map[string]any)["f:"+field].(map[string]any)
		for name := range fields {
			names[strings.TrimPrefix(name, "f:")] = true
		}
	}
	return names
}

// merge is RFC 7386, without touching object, but that conditions are merged by their type, as
// in a strategic merge patch.
func merge(object, patch map[string]any) map[string]any {
	out := maps.Clone(object)
	if out == nil {
		out = map[string]any{}
	}
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(out, key)
		case map[string]any:
			inner, _ := out[key].(map[string]any)
			out[key] = merge(inner, value)
		case []any:
			if out[key] = value; key == "conditions" {
				old, _ := object[key].([]any)
				out[key] = mergeByType(old, value)
			}
		default:
			out[key] = value
		}
	}
	return out
}

// mergeByType puts the newer of two conditions of a type in the older one's place.
func mergeByType(old, patch []any) []any {
	out := slices.Clone(old)
	for _, c := range patch {
		c, _ := c.(map[string]any)
		at := slices.IndexFunc(out, func(is any) bool {
			was, _ := is.(map[string]any)
			return was["type"] == c["type"]
		})
		if at < 0 {
			out = append(out, c)
		} else {
			was, _ := out[at].(map[string]any)
			out[at] = merge(was, c)
		}
	}
	return out
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, resource, key string) {
	query := r.URL.Query()
	seen, _ := strconv.Atoi(query.Get("resourceVersion"))
	seconds, err := strconv.Atoi(query.Get("timeoutSeconds"))
	if err != nil {
		seconds = 1800
	}
	end := time.NewTimer(time.Duration(seconds) * time.Second)
	defer end.Stop()
	bookmark := time.NewTicker(bookmarkMean*3/4 + rand.N(bookmarkMean/2))
	defer bookmark.Stop()
	s.count(resource, 1)
	defer s.count(resource, -1)

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out, flush := json.NewEncoder(w), http.NewResponseController(w)
	for {
		s.mu.Lock()
		object, changed, version := s.objects[key], s.changed, s.version
		s.mu.Unlock()
		metadata, _ := object["metadata"].(map[string]any)
		at, _ := metadata["resourceVersion"].(string)
		if n, _ := strconv.Atoi(at); n > seen {
			seen = n
			if out.Encode(map[string]any{"type": "MODIFIED", "object": object}) != nil {
				return
			}
		}
		if flush.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-bookmark.C:
			if out.Encode(map[string]any{"type": "BOOKMARK", "object": map[string]any{"apiVersion": "v1", "kind": object["kind"],
				"metadata": map[string]any{"resourceVersion": strconv.Itoa(version)}}}) != nil {
				return
			}
		case <-end.C:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func (s *apiServer) count(resource string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[resource] += n
}

func answer(w http.ResponseWriter, code int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(value) // a client that went needs no answer
}

func failure(code int, reason string) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason}
}
