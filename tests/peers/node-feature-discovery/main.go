// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"

	"sigs.k8s.io/node-feature-discovery/pkg/apis/nfd/validate"
	"sigs.k8s.io/node-feature-discovery/source"
	"sigs.k8s.io/node-feature-discovery/source/local"
)

// verdict is what Node Feature Discovery makes of the features files of a node.
type verdict struct {
	// Labels are those that its master would set, Refused the others, with its
	// reason.
	Labels  map[string]string `json:"labels"`
	Refused map[string]string `json:"refused"`
}

func main() {
	v, err := judge()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(v)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "node-feature-discovery:", err)
		os.Exit(1)
	}
}

func judge() (verdict, error) {
	v := verdict{Labels: map[string]string{}, Refused: map[string]string{}}
	files := source.GetFeatureSource(local.Name)
	if err := files.Discover(); err != nil {
		return v, err
	}
	labels, err := source.GetLabelSource(local.Name).GetLabels()
	if err != nil {
		return v, err
	}
	for key, value := range labels {
		text := fmt.Sprint(value)
		if err := validate.Label(key, text); err != nil {
			v.Refused[key] = err.Error()
			continue
		}
		v.Labels[key] = text
	}
	return v, nil
}
