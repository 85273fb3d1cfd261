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

// keyDigits is the length of a key, in hexadecimal digits: 64 bits, so that
// two allocations of one node never meet by chance.
const keyDigits = 16

// Key names an allocation: the first 16 hexadecimal digits, in lower case, of
// SHA-256 over the resource's full name followed by each device ID, sorted by
// bytes and preceded by one NUL:
//
//	resource NUL id NUL id …
//
// NUL occurs in neither, so no two allocations spell the same bytes. The order of
// ids does not matter, and ids is left as it is.
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

// ValidKey reports whether key has the form that Key gives.
func ValidKey(key string) bool {
	return len(key) == keyDigits && strings.Trim(key, "0123456789abcdef") == ""
}

// Kind is the CDI kind of every spec of a domain, "example.com/gpu".
func Kind(domain string) string { return domain + "/" + class }

// DeviceName is what Allocate answers with: the allocation's fully qualified CDI
// device, "example.com/gpu=<key>".
func DeviceName(domain, key string) string { return Kind(domain) + "=" + key }

// FileName is the base name of the allocation's file, "example.com-gpu-<key>.json".
// It is the same in every version of the agent, so that one can end what
// another began. The domain must be valid (gpu.ValidateDomain).
func FileName(domain, key string) string { return filePrefix(domain) + key + fileSuffix }

// ParseFileName is FileName backwards; ok says whether the file is one of the
// domain's allocations.
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

// AnnotationName is the name of the annotation that marks an allocation's container
// at the runtime, "example.com/gpu-allocation.<key>". The name carries the key, not
// the value, because the kubelet keeps only one value of a name when a
// container uses two resources.
func AnnotationName(domain, key string) string { return domain + "/gpu-allocation." + key }

// Keys are the allocations of a domain that a container has, sorted, each once: those
// that its annotations are named for, which the device plugin's answer to Allocate put
// there, and those among the CDI devices that it was created with, which are all that a
// container with a ResourceClaim has. Other annotations and devices are passed over.
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
