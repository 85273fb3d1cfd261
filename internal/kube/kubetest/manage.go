// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"maps"
	"slices"
	"strings"
)

// fieldsOf returns a Node's labels and annotations, by "labels/key" and "annotations/key".
func fieldsOf(object map[string]any) map[string]any {
	metadata, _ := object["metadata"].(map[string]any)
	out := map[string]any{}
	for _, field := range []string{"labels", "annotations"} {
		entries, _ := metadata[field].(map[string]any)
		for key, value := range entries {
			out[field+"/"+key] = value
		}
	}
	return out
}

// UpdatedLocked updates the managers of a Node's fields for a write other than an apply, before the
// Node is stored. The writer becomes the only manager of each value that it changes.
func (s *Server) UpdatedLocked(resource, name string, object map[string]any, manager string) {
	if resource != "nodes" {
		return
	}
	before, after := fieldsOf(s.Objects["nodes//"+name]), fieldsOf(object)
	have := s.Managers[name]
	if have == nil {
		have = map[string][]string{}
		s.Managers[name] = have
	}
	for field := range have {
		if _, there := after[field]; !there {
			delete(have, field)
		}
	}
	for field, value := range after {
		if was, there := before[field]; !there || was != value {
			have[field] = []string{manager + "/Update"}
		}
	}
}

// applyLocked does a server-side apply of labels and annotations. It returns nil on a conflict: the
// patch names another version than the Node has, or, without force, it changes a value of another
// manager.
func (s *Server) applyLocked(object, patch map[string]any, manager string, force bool) map[string]any {
	metadata := object["metadata"].(map[string]any)
	wanted := patch["metadata"].(map[string]any)
	if v, ok := wanted["resourceVersion"]; ok && v != metadata["resourceVersion"] {
		return nil
	}
	name, me := metadata["name"].(string), manager+"/Apply"
	have := s.Managers[name]
	before, want := fieldsOf(object), fieldsOf(patch)
	for field, value := range want {
		others := slices.DeleteFunc(slices.Clone(have[field]), func(m string) bool { return m == me })
		if was, there := before[field]; there && was != value {
			if len(others) > 0 && !force {
				return nil
			}
			others = nil
		}
		have[field] = append(others, me)
		before[field] = value
	}
	for field, managers := range have {
		if _, wanted := want[field]; wanted || !slices.Contains(managers, me) {
			continue
		}
		if have[field] = slices.DeleteFunc(managers, func(m string) bool { return m == me }); len(have[field]) == 0 {
			delete(have, field)
			delete(before, field)
		}
	}
	for _, field := range []string{"labels", "annotations"} {
		entries := map[string]any{}
		for key, value := range before {
			if key, ok := strings.CutPrefix(key, field+"/"); ok {
				entries[key] = value
			}
		}
		metadata[field] = entries
	}
	return object
}

// managedLocked returns a Node's metadata.managedFields.
func (s *Server) managedLocked(name string) []any {
	by := map[string]map[string]any{}
	for path, managers := range s.Managers[name] {
		field, key, _ := strings.Cut(path, "/")
		for _, m := range managers {
			if by[m] == nil {
				by[m] = map[string]any{}
			}
			if by[m]["f:"+field] == nil {
				by[m]["f:"+field] = map[string]any{".": map[string]any{}}
			}
			by[m]["f:"+field].(map[string]any)["f:"+key] = map[string]any{}
		}
	}
	var out []any
	for _, m := range slices.Sorted(maps.Keys(by)) {
		manager, operation, _ := strings.Cut(m, "/")
		out = append(out, map[string]any{"manager": manager, "operation": operation, "apiVersion": "v1",
			"fieldsType": "FieldsV1", "fieldsV1": map[string]any{"f:metadata": by[m]}})
	}
	return out
}
