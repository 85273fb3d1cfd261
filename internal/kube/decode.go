// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Decode reads one part of an object, such as its spec, into a type of k8s.io/api. It ignores
// fields that the type does not know. If the object has no such part, into stays empty. It fails if
// a field has the wrong type.
//
// Decode parses amounts, which can take long for malicious ones. If the API server has not put the
// amounts into canonical form, the caller checks them first (internal/amount).
func Decode(o *unstructured.Unstructured, part string, into any) error {
	fields, ok := o.Object[part].(map[string]any)
	if !ok && o.Object[part] != nil {
		return fmt.Errorf("its %s is not an object", part)
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(fields, into)
}
