// SPDX-License-Identifier: Apache-2.0

package frameworks

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// Resource is what all shapes ask for: units of GPU memory of 1 GiB.
const Resource = "example.com/gpu-mem"

//go:embed shapes/*.yaml
var files embed.FS

// Object is a Kubernetes object.
type Object = map[string]any

// Shape is what one framework brings to a cluster.
type Shape struct {
	// Name is the file's, without its ending.
	Name string
	// Framework is the framework's name, as docs/frameworks.md has it.
	Framework string
	// Module is the module that defines the kind of Written, with its version, and Definitions are files of it.
	// They are empty if there is no such kind, or if the proxy serves no module of it.
	Module      string
	Definitions []string
	// Written is the user's object; nil if the user writes what is in Made.
	Written Object
	// Made are Pods, Jobs, StatefulSets and Deployments.
	Made []Object
}

// Shapes returns all shapes, by name. A file that cannot be read ends the test.
func Shapes(t testing.TB) (out []Shape) {
	t.Helper()
	entries, err := files.ReadDir("shapes")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text, err := files.ReadFile("shapes/" + e.Name())
		if err != nil {
			t.Fatal(err)
		}
		s, err := parse(text)
		if err != nil {
			t.Fatalf("%s: %v", e.Name(), err)
		}
		s.Name = strings.TrimSuffix(e.Name(), ".yaml")
		out = append(out, s)
	}
	return out
}

// made are the kinds that Kubernetes' own controllers know.
var made = []string{"Pod", "Job", "StatefulSet", "Deployment"}

func parse(text []byte) (s Shape, err error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	var head struct {
		Framework, Module string
		Definitions       []string
	}
	if err := d.Decode(&head); err != nil {
		return s, err
	}
	s = Shape{Framework: head.Framework, Module: head.Module, Definitions: head.Definitions}
	for {
		var o Object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return s, err
		}
		kind, _ := o["kind"].(string)
		switch {
		case slices.Contains(made, kind):
			s.Made = append(s.Made, o)
		case s.Written == nil:
			s.Written = o
		default:
			return s, fmt.Errorf("there are two objects of the user's, the second is a %s", kind)
		}
	}
	if s.Framework == "" || len(s.Made) == 0 || (s.Module == "") != (s.Written == nil) {
		return s, fmt.Errorf("it has no name, makes nothing, or has an object without a module: %+v", head)
	}
	return s, nil
}

// PodSpec returns the pod's spec in an object of Made, and how many such pods there are.
func PodSpec(o Object) (spec Object, pods int) {
	spec, _ = o["spec"].(Object)
	if o["kind"] == "Pod" {
		return spec, 1
	}
	pods = 1
	for _, field := range []string{"replicas", "parallelism"} {
		if n, ok := spec[field].(int); ok {
			pods = n
		}
	}
	template, _ := spec["template"].(Object)
	spec, _ = template["spec"].(Object)
	return spec, pods
}

// Containers returns the containers of a pod's spec, by field: initContainers or containers.
func Containers(spec Object, field string) (out []Object) {
	list, _ := spec[field].([]any)
	for _, c := range list {
		out = append(out, c.(Object))
	}
	return out
}

// Units is how many units a container asks for; 0 if it asks for none.
func Units(container Object) int {
	resources, _ := container["resources"].(Object)
	limits, _ := resources["limits"].(Object)
	n, _ := limits[Resource].(int)
	return n
}
