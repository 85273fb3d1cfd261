// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// maxName keeps "mig-" and the name within the 63 characters that the name
// part of a Kubernetes resource may have.
const maxName = 63 - len("mig-")

// Name is a profile's name, taken apart. Equal names compare equal with ==, so
// a Name can be a map key. The zero Name is no profile.
type Name struct {
	// Compute is the number of compute slices of a compute instance that is
	// smaller than its GPU instance; 0 where it has all of them.
	Compute int
	// Slices is the number of compute slices of the GPU instance.
	Slices int
	// GB is the memory figure of the name, which is rounded: for people and for
	// comparing, never for sizes.
	GB int
	// Attr is "+me", "-me", "+me.all", "+gfx" or what else the driver appends,
	// sign included; empty for most profiles.
	Attr string
}

// Parse reads a profile's name. It refuses every other spelling of the same
// profile and says why; String undoes it exactly.
func Parse(s string) (Name, error) {
	n, reason := parse(s)
	if reason != "" {
		return Name{}, fmt.Errorf("%s is not a MIG profile name: %s", quote(s), reason)
	}
	return n, nil
}

// Canonical drops the compute part of a name where it says what is said
// anyway ("1c.1g.5gb+me" is "1g.5gb+me"), a spelling that NVIDIA's MIG manager
// accepts. All other strings are returned as they are.
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

// String prints the name as Parse reads it.
func (n Name) String() string {
	var b strings.Builder
	if n.Compute != 0 {
		fmt.Fprintf(&b, "%dc.", n.Compute)
	}
	fmt.Fprintf(&b, "%dg.%dgb%s", n.Slices, n.GB, n.Attr)
	return b.String()
}

// MarshalText is String, for records.
func (n Name) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalText is Parse.
func (n *Name) UnmarshalText(text []byte) (err error) {
	*n, err = Parse(string(text))
	return err
}

// Resource is the name part of the extended resource that stands for the
// profile: "mig-1g.10gb.me". A resource name has no "+", so that becomes ".".
// Different profiles have different resources.
func (n Name) Resource() string {
	return "mig-" + strings.Replace(n.String(), "+", ".", 1)
}

// GPUInstance is the profile of the GPU instance that a compute instance lives
// in: 3g.40gb for 1c.3g.40gb, and the name itself where it is not split.
func (n Name) GPUInstance() Name {
	n.Compute = 0
	return n
}

// Compare is a total order: smaller instances first, then less memory, then
// splits by their size, then attributes by their letters.
func Compare(a, b Name) int {
	return cmp.Or(
		cmp.Compare(a.Slices, b.Slices),
		cmp.Compare(a.GB, b.GB),
		cmp.Compare(a.Compute, b.Compute),
		cmp.Compare(a.Attr, b.Attr),
	)
}

// parse returns a reason instead of an error, so that Parse alone words it.
func parse(s string) (n Name, reason string) {
	switch {
	case s == "":
		return n, "it is empty"
	case len(s) > maxName:
		return n, fmt.Sprintf("it is longer than %d characters", maxName)
	}
	rest := s
	if i := strings.IndexAny(s, "+-"); i >= 0 {
		rest, n.Attr = s[:i], s[i:]
	}
	parts := strings.Split(rest, ".")
	if len(parts) == 3 {
		if n.Compute, reason = number(parts[0], "c", 2); reason != "" {
			return n, reason
		}
		parts = parts[1:]
	}
	if len(parts) != 2 {
		return n, "a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb"
	}
	if n.Slices, reason = number(parts[0], "g", 2); reason != "" {
		return n, reason
	}
	if n.GB, reason = number(parts[1], "gb", 4); reason != "" {
		return n, reason
	}
	switch {
	case n.Compute == n.Slices:
		return n, fmt.Sprintf("%dc of %dg is all of it: leave out %dc.", n.Compute, n.Slices, n.Compute)
	case n.Compute > n.Slices:
		return n, fmt.Sprintf("%dg has no %d compute slices", n.Slices, n.Compute)
	}
	return n, attribute(n.Attr)
}

// number reads a count of at most digits digits that has one spelling only.
func number(s, unit string, digits int) (v int, reason string) {
	num, ok := strings.CutSuffix(s, unit)
	if !ok {
		return 0, fmt.Sprintf("%s does not end in %q", quote(s), unit)
	}
	for _, c := range num {
		if c < '0' || c > '9' {
			return 0, fmt.Sprintf("%s does not begin with a number", quote(s))
		}
	}
	switch {
	case num == "":
		return 0, fmt.Sprintf("%s has no number", quote(s))
	case num[0] == '0':
		return 0, fmt.Sprintf("the number of %s begins with 0", quote(s))
	case len(num) > digits:
		return 0, fmt.Sprintf("the number of %s is too large", quote(s))
	}
	v, _ = strconv.Atoi(num)
	return v, ""
}

// attribute checks what follows the memory: a sign, then words of small letters
// and digits joined by dots. The words themselves are the driver's business.
func attribute(s string) (reason string) {
	if s == "" {
		return ""
	}
	for word := range strings.SplitSeq(s[1:], ".") {
		if word == "" {
			return fmt.Sprintf("%s lacks a word", quote(s))
		}
		if word[0] < 'a' || word[0] > 'z' {
			return fmt.Sprintf("a word of %s does not begin with a small letter", quote(s))
		}
		for _, c := range word {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
				return fmt.Sprintf("%s has more than one sign, or a character other than small letters and digits", quote(s))
			}
		}
	}
	return ""
}

// quote keeps an overlong or unprintable input from flooding a message.
func quote(s string) string {
	if r := []rune(s); len(r) > 40 {
		s = string(r[:40]) + "…"
	}
	return strconv.Quote(s)
}
