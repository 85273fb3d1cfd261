// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"slices"
	"strings"
)

// ParseResource reads the name part of an extended resource as [Name.Resource] writes it:
// "mig-1g.10gb.me" is 1g.10gb+me. It fails for all other strings.
func ParseResource(s string) (Name, error) {
	profile, ok := strings.CutPrefix(s, "mig-")
	if !ok {
		return Name{}, fmt.Errorf("%s is not the resource of a MIG profile: it does not begin with mig-", quote(s))
	}
	// The first "gb" ends the memory figure. A word of the attribute may contain another.
	if size, attr, ok := strings.Cut(profile, "gb"); ok && strings.HasPrefix(attr, ".") {
		profile = size + "gb+" + attr[1:]
	}
	n, err := Parse(profile)
	if err == nil && n.Resource() != s {
		err = fmt.Errorf("%s is not the resource of a MIG profile: that of %s is %s", quote(s), n, n.Resource())
	}
	if err != nil {
		return Name{}, err
	}
	return n, nil
}

// DescribeCounts returns a geometry in words: "4x1g.10gb 1x3g.40gb", or "no instance".
func DescribeCounts(counts []Count) string {
	var words []string
	for _, c := range counts {
		if c.N > 0 {
			words = append(words, fmt.Sprintf("%dx%s", c.N, c.Profile))
		}
	}
	if len(words) == 0 {
		return "no instance"
	}
	return strings.Join(words, " ")
}

// Describe returns the existing placements in the words of [DescribeCounts].
func Describe(placements []Placement) string {
	var counts []Count
	for _, s := range placements {
		if i := slices.IndexFunc(counts, func(c Count) bool { return c.Profile == s.Profile }); i >= 0 {
			counts[i].N++
		} else {
			counts = append(counts, Count{s.Profile, 1})
		}
	}
	slices.SortFunc(counts, func(a, b Count) int { return Compare(a.Profile, b.Profile) })
	return DescribeCounts(counts)
}
