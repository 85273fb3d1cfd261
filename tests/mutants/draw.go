// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// class is a kind of defect, with the paths of the product where such defects are mended. A
// commit may be a candidate of several classes.
type class struct {
	name  string
	paths *regexp.Regexp
}

var classes = []class{
	{"allocations", regexp.MustCompile(`^(internal/(ledger|deviceplugin|node|workload)|pkg/(plugin|cdi|timeslice))/`)},
	{"caps", regexp.MustCompile(`^(internal/guard|pkg/memcap)/`)},
	{"mig", regexp.MustCompile(`^(internal/plan|pkg/mig|pkg/gpu)/`)},
	{"dra", regexp.MustCompile(`^(internal/(dra|agent|kube|node|ledger)|pkg/dra|deployments/components/dra)/`)},
	{"security", regexp.MustCompile(`^(deployments|internal/(kube|obs|socket|guard|extender|fleet|config|node)|pkg/(memcap|plugin|cdi)|cmd)/`)},
	{"loop", regexp.MustCompile(`^internal/(agent|state|desk|health)/`)},
	{"other", regexp.MustCompile(`^(internal/(placer|kueue|fleet|liqo|extender|export|status|config|label|kube|obs|meter|advise|usage|nfd)|pkg/topology|cmd)/`)},
}

// candidate is a commit that may have mended a defect.
type candidate struct {
	commit, subject string
	lines           int // of the product, added and removed
	files           []string
	rank            [sha256.Size]byte
}

// mostLines is the largest change of the product in a candidate. A larger commit is a feature.
const mostLines = 400

var (
	productFile = regexp.MustCompile(`^(?:(?:cmd|internal|pkg)/.*\.(?:go|c|h)|deployments/.*\.ya?ml)$`)
	noProduct   = regexp.MustCompile(`(?:_test|/doc)\.go$|/testdata/`)
	noDefect    = regexp.MustCompile(`(?i)^docs|^README|^CONTRIBUTING|plain(?:er)? (?:words|English|comments)|^tests?[/:]`)
)

// draw prints the candidates of each class among the ancestors of a commit, in the order that the seed gives them: by the
// SHA-256 sum of seed and commit. Equal seeds give equal orders.
func draw(ctx context.Context, w io.Writer, seed, until string) error {
	out, err := exec.CommandContext(ctx, "git", "log", "--no-merges", "--numstat", "--no-renames", "--format=@%H%x09%s", until).Output()
	if err != nil {
		return fmt.Errorf("read the history until %s: %w", until, err)
	}
	list, err := candidates(out, seed)
	if err != nil {
		return err
	}
	for _, c := range classes {
		fmt.Fprintf(w, "\n# %s\n", c.name)
		n := 0
		for _, one := range list {
			if !slices.ContainsFunc(one.files, c.paths.MatchString) {
				continue
			}
			n++
			fmt.Fprintf(w, "%3d %s %4d  %s\n", n, one.commit[:7], one.lines, one.subject)
		}
	}
	return nil
}

// candidates reads what `git log --numstat` prints.
func candidates(log []byte, seed string) ([]candidate, error) {
	var list []candidate
	lines := bufio.NewScanner(bytes.NewReader(log))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if head, ok := strings.CutPrefix(line, "@"); ok {
			commit, subject, _ := strings.Cut(head, "\t")
			list = append(list, candidate{commit: commit, subject: subject, rank: sha256.Sum256([]byte(seed + ":" + commit))})
			continue
		}
		f := strings.SplitN(line, "\t", 3)
		if len(f) != 3 || !productFile.MatchString(f[2]) || noProduct.MatchString(f[2]) {
			continue
		}
		c := &list[len(list)-1]
		for _, n := range f[:2] {
			count, err := strconv.Atoi(n)
			if err != nil {
				return nil, fmt.Errorf("commit %s: %q is no number of lines of %s", c.commit, n, f[2])
			}
			c.lines += count
		}
		c.files = append(c.files, f[2])
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the history: %w", err)
	}
	list = slices.DeleteFunc(list, func(c candidate) bool {
		return len(c.files) == 0 || c.lines > mostLines || noDefect.MatchString(c.subject)
	})
	slices.SortFunc(list, func(a, b candidate) int { return cmp.Compare(string(a.rank[:]), string(b.rank[:])) })
	return list, nil
}
