// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Decode reads a part of an object, such as its spec, into a type of k8s.io/api. What the type
// does not know is left out, and where there is no such part the type is left empty. Amounts are
// parsed, so whoever reads an object that the API server has not put into canonical form checks
// them before (internal/amount).
func Decode(o *unstructured.Unstructured, part string, into any) error {
	fields, ok := o.Object[part].(map[string]any)
	if !ok && o.Object[part] != nil {
		return fmt.Errorf("its %s is not an object", part)
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(fields, into)
}
