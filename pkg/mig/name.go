// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// maxName limits "mig-" and the name together to 63 characters, as in the name part of a
// Kubernetes resource.
const maxName = 63 - len("mig-")

// Name is a parsed profile name. Equal names compare equal with ==, so a Name can be a map key.
// The zero Name is no profile.
type Name struct {
	// Compute is the number of compute slices of a compute instance that is smaller than its GPU
	// instance; 0 if it has all of them.
	Compute int
	// Slices is the number of compute slices of the GPU instance.
	Slices int
	// GB is the memory figure of the name. It is rounded: use it for people and for comparing,
	// never as a size. It is 0 on a GPU without memory of its own.
	GB int
	// Attr is "+me", "-me", "+me.all", "+gfx" or any other that the driver appends, with its
	// sign; empty for most profiles.
	Attr string
}

// Parse reads a profile's name. It fails for any other spelling of the same profile. String gives
// back exactly the same text.
func Parse(s string) (Name, error) {
	n, reason := parse(s)
	if reason != "" {
		return Name{}, fmt.Errorf("%s is not a MIG profile name: %s", quote(s), reason)
	}
	return n, nil
}

// Canonical drops the compute part of a name if it equals the GPU instance's ("1c.1g.5gb+me" is
// "1g.5gb+me"). NVIDIA's MIG manager accepts that spelling. All other strings are returned
// unchanged.
func Canonical(s string) string {
	c, rest, ok := strings.Cut(s, "c.")
	if !ok || c == "" || !strings.HasPrefix(rest, c+"g.") {
		return s
	}
	if _, reason := parse(rest); reason != "" {
		return s
	}
	return rest
}

// String returns the name as Parse reads it.
func (n Name) String() string {
	var b strings.Builder
	if n.Compute != 0 {
		fmt.Fprintf(&b, "%dc.", n.Compute)
	}
	fmt.Fprintf(&b, "%dg.%dgb%s", n.Slices, n.GB, n.Attr)
	return b.String()
}

// MarshalText returns String, for records.
func (n Name) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalText is Parse.
func (n *Name) UnmarshalText(text []byte) (err error) {
	*n, err = Parse(string(text))
	return err
}

// Resource returns the name part of the profile's extended resource: "mig-1g.10gb.me". A resource
// name cannot have "+", so that becomes ".". Different profiles have different resources.
func (n Name) Resource() string {
	return "mig-" + strings.Replace(n.String(), "+", ".", 1)
}

// GPUInstance returns the profile of the GPU instance that the compute instance is in: 3g.40gb
// for 1c.3g.40gb, and the name itself if it is not split.
func (n Name) GPUInstance() Name {
	n.Compute = 0
	return n
}

// Compare is a total order: by compute slices of the GPU instance, then memory, then compute
// slices of a split, then attribute.
func Compare(a, b Name) int {
	return cmp.Or(
		cmp.Compare(a.Slices, b.Slices),
		cmp.Compare(a.GB, b.GB),
		cmp.Compare(a.Compute, b.Compute),
		cmp.Compare(a.Attr, b.Attr),
	)
}

// grammar is [<c>c.]<g>g.<gb>gb[(+|-)<attribute>]. Numbers have one spelling, and only the memory
// may be 0. An attribute is words of small letters and digits; the driver chooses them.
var grammar = regexp.MustCompile(`^(?:([1-9][0-9]?)c\.)?([1-9][0-9]?)g\.(0|[1-9][0-9]{0,3})gb` +
	`([+-][a-z][a-z0-9]*(?:\.[a-z][a-z0-9]*)*)?$`)

// parse returns a reason instead of an error, so that callers choose the words around it.
func parse(s string) (n Name, reason string) {
	switch {
	case s == "":
		return n, "it is empty"
	case len(s) > maxName:
		return n, fmt.Sprintf("it is longer than %d characters", maxName)
	}
	part := grammar.FindStringSubmatch(s)
	if part == nil {
		return n, "a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb"
	}
	// The grammar admits only numbers and the empty string, which becomes 0.
	n.Compute, _ = strconv.Atoi(part[1])
	n.Slices, _ = strconv.Atoi(part[2])
	n.GB, _ = strconv.Atoi(part[3])
	n.Attr = part[4]
	switch {
	case n.Compute == n.Slices:
		return n, fmt.Sprintf("%dc of %dg is all of it: leave out %dc.", n.Compute, n.Slices, n.Compute)
	case n.Compute > n.Slices:
		return n, fmt.Sprintf("%dg has no %d compute slices", n.Slices, n.Compute)
	}
	return n, ""
}

// quote quotes s for a message, without unprintable characters and shortened to 40.
func quote(s string) string {
	if r := []rune(s); len(r) > 40 {
		s = string(r[:40]) + "…"
	}
	return strconv.Quote(s)
}
