// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Claims with configuration that the driver does not have were made, allocated and refused on
// the node, and their pods ended and made anew, again and again. The API server refuses them,
// and templates of them, when they are made. What is there already is left alone.
func TestConfigurationIsRefusedWhenAClaimIsMade(t *testing.T) {
	s := startAPIServer(t)
	s.namespace(t, "train")
	const all = "/apis/resource.k8s.io/v1/namespaces/train/"
	kinds := map[string]string{"resourceclaims": "ResourceClaim", "resourceclaimtemplates": "ResourceClaimTemplate"}
	object := func(resource, name string, configs ...fields) fields {
		spec := fields{"devices": fields{"requests": []fields{{"name": "gpu", "exactly": fields{"deviceClassName": "any"}}}, "config": configs}}
		if resource == "resourceclaimtemplates" {
			spec = fields{"spec": spec}
		}
		return fields{"apiVersion": "resource.k8s.io/v1", "kind": kinds[resource], "metadata": fields{"name": name}, "spec": spec}
	}
	config := func(driver, parameters string) fields {
		return fields{"requests": []string{"gpu"}, "opaque": fields{"driver": driver, "parameters": json.RawMessage(parameters)}}
	}
	const driver, other = "gpus.example.com", "gpu.nvidia.com"
	ours := func(parameters string) fields { return config(driver, parameters) }
	const head = `"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"`
	slicing := func(interval string) string {
		return fmt.Sprintf(`{%s,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":%q}}}`, head, interval)
	}
	const mps = `{` + head + `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}}`
	// From before the policy.
	for resource := range kinds {
		s.create(t, all+resource, object(resource, "older", ours(mps)))
	}
	for _, o := range resources(t, "components/dra") {
		if strings.HasPrefix(o.Kind, "ValidatingAdmissionPolicy") {
			s.apply(t, o, false)
		}
	}
	const refused = "configuration for gpus.example.com may set time slices alone"
	s.await(t, "the policy is in force", func() error {
		err := s.do(t, nil, http.MethodPost, all+"resourceclaims?dryRun=All", asJSON, object("resourceclaims", "a", ours(mps)), nil)
		if err == nil || !strings.Contains(err.Error(), refused) {
			return fmt.Errorf("%v, want a refusal that says %q", err, refused)
		}
		return nil
	})
	for resource := range kinds {
		var tries []try
		for _, y := range []struct {
			name    string
			configs []fields
			refused string
		}{
			{"none", nil, ""},
			{"another driver's", []fields{config(other, mps), config(other, `{"a":{"b":[1]}}`)}, ""},
			{"default", []fields{ours(slicing("Default"))}, ""},
			{"short", []fields{ours(slicing("Short"))}, ""},
			{"medium", []fields{ours(slicing("Medium"))}, ""},
			{"long", []fields{ours(slicing("Long"))}, ""},
			{"no interval", []fields{ours(`{"kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"},"apiVersion":"resource.nvidia.com/v1beta1"}`)}, ""},
			{"of two drivers", []fields{config(other, mps), ours(slicing("Long"))}, ""},

			{"MPS", []fields{ours(mps)}, refused},
			{"MPS beside a time slice", []fields{ours(slicing("Long")), ours(mps)}, refused},
			{"another interval", []fields{ours(slicing("long"))}, refused},
			{"no words", []fields{ours(`{}`)}, refused},
			{"no sharing", []fields{ours(`{` + head + `}`)}, refused},
			{"sharing of another type", []fields{ours(`{` + head + `,"sharing":["TimeSlicing"]}`)}, refused},
			{"an interval of another type", []fields{ours(`{` + head + `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":3}}}`)}, refused},
			{"more fields", []fields{ours(`{` + head + `,"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}}`)}, refused},
			{"another kind", []fields{ours(strings.Replace(slicing("Long"), "GpuConfig", "MigDeviceConfig", 1))}, refused},
			{"another version", []fields{ours(strings.Replace(slicing("Long"), "v1beta1", "v1", 1))}, refused},
		} {
			tries = append(tries, try{resource + ": " + y.name, http.MethodPost, all + resource + "?dryRun=All", asJSON, object(resource, "a", y.configs...), y.refused})
		}
		older := all + resource + "/older"
		tries = append(tries,
			try{resource + ": a label of an older one", http.MethodPatch, older, merge, fields{"metadata": fields{"labels": fields{"a": "b"}}}, ""},
			try{resource + ": a finalizer of it", http.MethodPatch, older, merge, fields{"metadata": fields{"finalizers": []string{"example.com/x"}}}, ""})
		if resource == "resourceclaims" {
			tries = append(tries, try{"the status of an older claim", http.MethodPatch, older + "/status", merge, fields{"status": fields{
				"reservedFor": []fields{{"resource": "pods", "name": "p", "uid": "u"}},
				"allocation": fields{"devices": fields{"results": []fields{{"request": "gpu", "driver": driver, "pool": "node-1/a100", "device": "gpu-1"}},
					"config": []fields{{"source": "FromClass", "requests": []string{"gpu"}, "opaque": fields{"driver": driver, "parameters": json.RawMessage(mps)}}}}}}}, ""},
				try{"and once more", http.MethodPatch, older + "/status", merge, fields{"status": fields{"reservedFor": nil}}, ""})
		}
		tries = append(tries,
			try{resource + ": its end", http.MethodDelete, older, asJSON, nil, ""},
			try{resource + ": its last finalizer", http.MethodPatch, older, merge, fields{"metadata": fields{"finalizers": nil}}, ""})
		s.try(t, nil, tries)
	}
	// An administrator's class may have it; the agent judges that.
	s.try(t, nil, []try{{"a class", http.MethodPost, places["DeviceClass"] + "?dryRun=All", asJSON, fields{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": fields{"name": "c"},
		"spec": fields{"config": []fields{{"opaque": fields{"driver": driver, "parameters": json.RawMessage(mps)}}}}}, ""}})
}
