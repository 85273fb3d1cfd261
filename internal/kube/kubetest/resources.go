// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/fields"
)

// serve answers a request that is allowed and that no Fault has answered.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, verb, resource, namespace, name string, body []byte) {
	switch of, _, _ := strings.Cut(resource, "/"); {
	case of == "gpunodes" && verb != "list" && verb != "watch" && verb != "get":
		s.writeGPUNode(w, r, verb, resource, name, body)
	case resource == "resourceslices" && verb == "list":
		s.listSlices(w, r.URL.Query().Get("fieldSelector"))
	case resource == "resourceslices" && verb != "watch":
		s.writeSlice(w, verb, name, body)
	case of == "leases":
		s.serveLease(w, verb, namespace, name, body)
	case of == "resourceclaims" && verb != "create" && verb != "delete":
		s.serveClaims(w, r, verb, namespace, name, body)
	case resource == "pods/log":
		s.log(w, r, namespace, name)
	case resource == "pods/portforward":
		s.forward(w, r, namespace, name)
	case verb == "get":
		s.get(w, resource, namespace, name)
	case verb == "delete" && (resource == "pods" || resource == "resourceclaims"):
		s.Put(resource, namespace, name, nil)
		Answer(w, Failed(200, ""))
	case verb == "list" && name == "":
		s.listAll(w, r, resource, namespace)
	case verb == "list":
		s.list(w, resource, namespace, name)
	case verb == "watch":
		s.watch(w, r, resource, namespace, name)
	case resource == "pods/eviction":
		s.evict(w, namespace, name, body)
	case verb == "update" && strings.Contains(of, "."): // of Liqo or Kueue
		s.updateStatus(w, of, namespace, name, body)
	case verb == "create":
		s.create(w, resource, namespace, body)
	case verb == "patch":
		s.patch(w, r, resource, namespace, name, body)
	}
}

// listAll answers with all objects of a resource, page by page. It keeps no snapshots: if an object
// has changed between two pages, the continue token has expired.
func (s *Server) listAll(w http.ResponseWriter, r *http.Request, resource, namespace string) {
	query := r.URL.Query()
	picks := namespace != "" || query.Get("labelSelector") != "" || ofNode(r)
	want := map[string]string{"pods": "status.phase!=Succeeded"}[resource]
	if !picks && query.Get("fieldSelector") != want {
		Refuse(w, 400, "BadRequest")
		return
	}
	chosen, err := selection(query.Get("labelSelector"), query.Get("fieldSelector"), namespace)
	if err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	s.Mu.Lock()
	version := strconv.Itoa(s.Version)
	s.Mu.Unlock()
	items := slices.DeleteFunc(s.All(resource), func(o map[string]any) bool {
		return !picks && ended(o) || picks && !chosen(o)
	})
	metadata := map[string]any{"resourceVersion": version}
	first, at, more := strings.Cut(query.Get("continue"), "@")
	if more && at != version {
		Refuse(w, 410, "Expired")
		return
	}
	from, _ := strconv.Atoi(first)
	to := len(items)
	if limit, _ := strconv.Atoi(query.Get("limit")); limit > 0 && from+limit < to {
		to = from + limit
		metadata["continue"] = strconv.Itoa(to) + "@" + version
	}
	items = items[from:to]
	for i := range items {
		items[i] = partial(r, items[i])
	}
	Answer(w, map[string]any{"apiVersion": "v1", "kind": kinds[resource] + "List", "metadata": metadata,
		"items": items})
}

// ofNode reports whether a request is for the pods of one node.
func ofNode(r *http.Request) bool {
	return strings.Contains(r.URL.Query().Get("fieldSelector"), "spec.nodeName=")
}

// partial returns the part of an object that a request asks for.
func partial(r *http.Request, object map[string]any) map[string]any {
	if !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
		return object
	}
	return map[string]any{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]}
}

// kindFor returns the kind of event by which a watch with this selection tells of a change; empty if it does not.
func (s *Server) kindFor(c Change, chosen func(map[string]any) bool) string {
	if c.Kind == "DELETED" || chosen(c.Object) {
		return c.Kind
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, before := range slices.Backward(s.History) {
		if before.Key == c.Key && before.Version < c.Version {
			if chosen(before.Object) {
				return "DELETED"
			}
			break
		}
	}
	return ""
}

// ended reports whether an object is a pod that has succeeded.
func ended(object map[string]any) bool {
	status, _ := object["status"].(map[string]any)
	return object["kind"] == "Pod" && status["phase"] == "Succeeded"
}

// writeGPUNode applies or deletes a GPUNode as the API server does with the definition in the
// manifests. An apply of the object creates it and leaves the status alone. An apply of the status
// replaces the status and creates nothing.
func (s *Server) writeGPUNode(w http.ResponseWriter, r *http.Request, verb, resource, name string, body []byte) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	object, there := s.Objects["gpunodes//"+name]
	var sent map[string]any
	switch {
	case verb == "delete" && there:
		s.PutLocked("gpunodes", "", name, nil)
		Answer(w, Failed(200, ""))
		return
	case verb == "delete", resource == "gpunodes/status" && !there:
		Refuse(w, 404, "NotFound")
		return
	case verb != "patch" || r.Header.Get("Content-Type") != "application/apply-patch+yaml" ||
		r.URL.Query().Get("fieldManager") == "":
		Refuse(w, 415, "UnsupportedMediaType")
		return
	case json.Unmarshal(body, &sent) != nil || sent["apiVersion"] != "example.com/v1alpha1" ||
		sent["kind"] != "GPUNode" || sent["metadata"].(map[string]any)["name"] != name:
		Refuse(w, 400, "BadRequest")
		return
	}
	if !there {
		s.Used["create gpunodes"] = true // the server also checks this permission
	}
	if object = Clone(object); object == nil {
		object = map[string]any{}
	}
	if resource == "gpunodes/status" {
		status := Clone(sent["status"].(map[string]any))
		for _, field := range s.Pruned {
			delete(status, field)
		}
		object["status"] = status
	} else {
		metadata, _ := object["metadata"].(map[string]any)
		object["metadata"] = Merge(metadata, sent["metadata"].(map[string]any))
	}
	Answer(w, s.PutLocked("gpunodes", "", name, object))
}

// serveLease reads and writes Leases. Like the real server, it refuses an update of another version
// than the stored one.
func (s *Server) serveLease(w http.ResponseWriter, verb, namespace, name string, body []byte) {
	var sent map[string]any
	if verb != "get" && json.Unmarshal(body, &sent) != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	metadata, _ := sent["metadata"].(map[string]any)
	if verb == "create" {
		name, _ = metadata["name"].(string)
	}
	object := s.Objects["leases/"+namespace+"/"+name]
	switch {
	case verb == "create" && object != nil:
		Refuse(w, 409, "AlreadyExists")
	case verb != "create" && object == nil:
		Refuse(w, 404, "NotFound")
	case verb == "get":
		Answer(w, object)
	case verb == "update" && metadata["resourceVersion"] != object["metadata"].(map[string]any)["resourceVersion"]:
		Refuse(w, 409, "Conflict")
	default:
		Answer(w, s.PutLocked("leases", namespace, name, sent))
	}
}

// serveClaims reads like the real server, and stores what is applied to a status as it is. Which
// elements of the list an apply changes is tested with a real server (deployments).
func (s *Server) serveClaims(w http.ResponseWriter, r *http.Request, verb, namespace, name string, body []byte) {
	query := r.URL.Query()
	if verb == "list" {
		items, from := s.All("resourceclaims"), 0
		limit, _ := strconv.Atoi(query.Get("limit"))
		from, _ = strconv.Atoi(query.Get("continue"))
		metadata, to := map[string]any{"resourceVersion": "1"}, len(items)
		if limit > 0 && from+limit < to {
			to = from + limit
			metadata["continue"], metadata["remainingItemCount"] = strconv.Itoa(to), len(items)-to
		}
		for _, item := range items[from:to] {
			item["kind"], item["apiVersion"] = "ResourceClaim", "resource.k8s.io/v1"
		}
		Answer(w, map[string]any{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList", "metadata": metadata,
			"items": items[from:to]})
		return
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	object, ok := s.Objects["resourceclaims/"+namespace+"/"+name]
	if !ok {
		Refuse(w, 404, "NotFound")
		return
	}
	object = Clone(object)
	if verb == "patch" {
		var patch struct {
			Metadata struct{ UID string }
			Status   struct{ Devices []any }
		}
		err := json.Unmarshal(body, &patch)
		switch {
		case err != nil, r.Header.Get("Content-Type") != "application/apply-patch+yaml",
			query.Get("fieldManager") != "gpu-agent", query.Get("force") != "true":
			Refuse(w, 400, "BadRequest")
			return
		case patch.Metadata.UID != object["metadata"].(map[string]any)["uid"]:
			body := Failed(422, "Invalid")
			body["details"] = map[string]any{"causes": []any{map[string]any{"reason": "FieldValueInvalid",
				"field": "metadata.uid"}}}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(422)
			json.NewEncoder(w).Encode(body)
			return
		}
		object["status"].(map[string]any)["devices"] = patch.Status.Devices
		object = s.PutLocked("resourceclaims", namespace, name, object)
	}
	object["kind"], object["apiVersion"] = "ResourceClaim", "resource.k8s.io/v1"
	Answer(w, object)
}

// listSlices knows the field selectors that the real server has for ResourceSlices.
func (s *Server) listSlices(w http.ResponseWriter, selector string) {
	chosen, err := fields.ParseSelector(selector)
	if err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	items := []any{}
	for _, object := range s.All("resourceslices") {
		spec := object["spec"].(map[string]any)
		node, _ := spec["nodeName"].(string)
		if chosen.Matches(fields.Set{"spec.nodeName": node, "spec.driver": spec["driver"].(string)}) {
			items = append(items, object)
		}
	}
	Answer(w, map[string]any{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSliceList",
		"metadata": map[string]any{"resourceVersion": "1"}, "items": items})
}

// writeSlice creates, updates and deletes like the real server, but without validation.
func (s *Server) writeSlice(w http.ResponseWriter, verb, name string, body []byte) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if verb == "delete" {
		s.PutLocked("resourceslices", "", name, nil)
		Answer(w, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success"})
		return
	}
	var object map[string]any
	if err := json.Unmarshal(body, &object); err != nil {
		Refuse(w, 400, "BadRequest")
		return
	}
	s.ungated(object)
	name = object["metadata"].(map[string]any)["name"].(string)
	object = s.PutLocked("resourceslices", "", name, object)
	object["kind"] = "ResourceSlice"
	Answer(w, object)
}

// ungated removes the field of each device that is behind a disabled feature gate.
func (s *Server) ungated(object map[string]any) map[string]any {
	spec, _ := object["spec"].(map[string]any)
	devices, _ := spec["devices"].([]any)
	for _, d := range devices {
		delete(d.(map[string]any), s.Gated)
	}
	return object
}
