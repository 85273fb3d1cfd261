// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"regexp"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// ours finds an admission policy of the agent's manifests in the API server's
// words, also under a prefix and with a suffix that an overlay gave it.
var ours = regexp.MustCompile(`ValidatingAdmissionPolicy '[^']*gpu-agent[^']*'`)

// byPolicy says whether err is a refusal by one of the agent's admission
// policies that has these words.
func byPolicy(err error, words string) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code/100 != 4 {
		return false
	}
	message := status.Status().Message
	return ours.MatchString(message) && strings.Contains(message, words)
}
