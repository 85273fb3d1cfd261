// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
)

// class is the second half of the CDI kind, <domain>/gpu.
const class = "gpu"

// keyDigits is the length of a key in hexadecimal digits. They are 64 bits, so that two allocations
// of a node do not get the same key by chance.
const keyDigits = 16

// Key returns the key of an allocation: the first 16 hexadecimal digits, in lower case, of a
// SHA-256. It is over the resource's full name and the device IDs, sorted by bytes, each after one
// NUL:
//
//	resource NUL id NUL id …
//
// Neither contains NUL, so no two allocations have the same bytes. The order of ids does not
// matter, and ids is not changed.
func Key(resource string, ids []string) string {
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	h := sha256.New()
	h.Write([]byte(resource))
	for _, id := range sorted {
		h.Write([]byte{0})
		h.Write([]byte(id))
	}
	return hex.EncodeToString(h.Sum(nil))[:keyDigits]
}

// ValidKey reports whether key has the form that Key returns.
func ValidKey(key string) bool {
	return len(key) == keyDigits && strings.Trim(key, "0123456789abcdef") == ""
}

// Kind returns the CDI kind of every spec of a domain, "example.com/gpu".
func Kind(domain string) string { return domain + "/" + class }

// DeviceName returns the allocation's fully qualified CDI device, "example.com/gpu=<key>". Allocate
// returns it to the kubelet.
func DeviceName(domain, key string) string { return Kind(domain) + "=" + key }

// FileName returns the base name of the allocation's file, "example.com-gpu-<key>.json". It is the
// same in every version of the agent, so that one version can remove what another has written. The
// domain must be valid (gpu.ValidateDomain).
func FileName(domain, key string) string { return filePrefix(domain) + key + fileSuffix }

// ParseFileName returns the key in a file name. ok is false if the file is not one of the domain's
// allocations.
func ParseFileName(domain, name string) (key string, ok bool) {
	key, ok = strings.CutPrefix(name, filePrefix(domain))
	if !ok {
		return "", false
	}
	key, ok = strings.CutSuffix(key, fileSuffix)
	if !ok || !ValidKey(key) {
		return "", false
	}
	return key, true
}

const fileSuffix = ".json"

func filePrefix(domain string) string { return domain + "-" + class + "-" }

// AnnotationName returns the name of the annotation that marks an allocation's container at the
// runtime, "example.com/gpu-allocation.<key>". The name has the key, and not the value, since the
// kubelet keeps only one value for a name if a container uses two resources.
func AnnotationName(domain, key string) string { return domain + "/gpu-allocation." + key }

// Keys returns the keys of a domain's allocations that a container has, sorted, each once. It finds
// them in two places: in the names of the annotations that the device plugin's answer to Allocate
// has added, and among the CDI devices that the container was created with. A container with a
// ResourceClaim has only the latter. Other annotations and devices are ignored.
func Keys(domain string, annotations map[string]string, devices []string) (keys []string) {
	add := func(name, prefix string) {
		if key, ok := strings.CutPrefix(name, prefix); ok && ValidKey(key) {
			keys = append(keys, key)
		}
	}
	annotation, device := AnnotationName(domain, ""), DeviceName(domain, "")
	for name := range annotations {
		add(name, annotation)
	}
	for _, name := range devices {
		add(name, device)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}
