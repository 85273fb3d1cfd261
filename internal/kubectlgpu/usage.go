// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/usage"
)

// Account is who was granted what on nodes, and used it; or with a moment, who held what then.
type Account struct {
	// Sums are over all nodes that were asked, those with the most granted first.
	Sums []usage.Sum `json:"sums,omitempty"`
	// Had is sorted by node, GPU and time.
	Had []Had `json:"had,omitempty"`
	// Notes are on what the nodes' journals lack.
	Notes []string `json:"notes,omitempty"`

	by string
}

// Had is a piece of a GPU of a node, and the container that had it.
type Had struct {
	Node string `json:"node"`
	usage.Had
}

// AccountQuery is what to account for. The texts are as `gpu-agent usage` takes them.
type AccountQuery struct{ By, Since, Until, At, GPU string }

// ReadAccount asks the agents of nodes, or of all nodes if there are none. Errors are of single nodes,
// and the Account has the others.
func ReadAccount(ctx context.Context, c *pluginkube.Client, nodes []string, q AccountQuery) (*Account, error) {
	agents, failed, err := Agents(ctx, c, nodes)
	if err != nil {
		return nil, err
	}
	query := url.Values{}
	asked := map[string]string{"by": q.By, "since": q.Since, "until": q.Until, "at": q.At, "gpu": q.GPU}
	for key, value := range asked {
		if value != "" {
			query.Set(key, value)
		}
	}
	parts := make([]usage.Answer, len(agents))
	failed = append(failed, each(ctx, c, agents, func(i int, p *Pages) error {
		body, err := p.ask(ctx, http.MethodGet, "/usage", query, nil)
		if err == nil {
			if err = decode(body, &parts[i]); err != nil {
				err = fmt.Errorf("read the account of the agent %s: %w", p.Agent.Name, err)
			}
		}
		return err
	})...)
	out := &Account{by: q.By}
	type line struct{ name, tier string }
	sums := map[line]*usage.Sum{}
	for i := range parts {
		for _, s := range parts[i].Sums {
			of := line{s.Name, cmp.Or(s.Tier, usage.Guaranteed)} // agents without tiers name none
			if sums[of] == nil {
				sums[of] = &usage.Sum{Name: of.name, Tier: of.tier}
			}
			add(sums[of], &s)
		}
		for _, h := range parts[i].Had {
			out.Had = append(out.Had, Had{agents[i].Node, h})
		}
		for _, n := range parts[i].Notes {
			out.Notes = append(out.Notes, agents[i].Node+": "+n)
		}
	}
	for _, s := range sums {
		out.Sums = append(out.Sums, *s)
	}
	slices.SortFunc(out.Sums, func(a, b usage.Sum) int {
		return cmp.Or(cmp.Compare(b.GrantedGPUHours, a.GrantedGPUHours), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.Tier, b.Tier))
	})
	return out, errors.Join(failed...)
}

// add adds to s what another node has accounted. Of what is not known on one node, the sum is that of the
// others.
func add(s, o *usage.Sum) {
	s.Grants += o.Grants
	s.GrantedGPUHours += o.GrantedGPUHours
	s.GrantedGiBHours += o.GrantedGiBHours
	s.LentGPUHours += o.LentGPUHours
	s.LentGiBHours += o.LentGiBHours
	s.Parks += o.Parks
	s.ParkedHours += o.ParkedHours
	s.ParkedGiBHours += o.ParkedGiBHours
	for _, pair := range []struct{ to, from **float64 }{{&s.UsedGPUHours, &o.UsedGPUHours},
		{&s.UsedGiBHours, &o.UsedGiBHours}, {&s.SMHours, &o.SMHours}} {
		switch to, from := *pair.to, *pair.from; {
		case from == nil:
		case to == nil:
			*pair.to = new(*from)
		default:
			*to += *from
		}
	}
}

// Write writes the account as a table.
func (a *Account) Write(out io.Writer) error {
	var rows [][]string
	if a.Had != nil {
		rows = append(rows, []string{"NODE", "GPU", "PIECE", "SHARE", "NAMESPACE", "POD", "CONTAINER", "SINCE",
			"UNTIL"})
		for i := range a.Had {
			h := &a.Had[i]
			until := ""
			if !h.Until.IsZero() {
				until = h.Until.UTC().Format(time.RFC3339)
			}
			share := strconv.FormatFloat(h.Share, 'g', 4, 64)
			rows = append(rows, []string{h.Node, strconv.Itoa(h.Index), h.Piece, share, h.Namespace,
				h.Pod, h.Container, h.Since.UTC().Format(time.RFC3339), until})
		}
	} else {
		rows = append(rows, []string{strings.ToUpper(cmp.Or(a.by, "namespace")), "GRANTS", "GPU-HOURS GRANTED", "USED",
			"GiB-HOURS GRANTED", "USED", "SM-HOURS"})
		tiers := slices.ContainsFunc(a.Sums, func(s usage.Sum) bool { return s.Tier == usage.Spot })
		if tiers { // otherwise all lines are of one tier, and nothing is lent
			rows[0] = append(rows[0], "TIER", "GiB-HOURS LENT")
		}
		parks := slices.ContainsFunc(a.Sums, func(s usage.Sum) bool { return s.ParkedHours > 0 })
		if parks {
			rows[0] = append(rows[0], "PARKS", "HOURS PARKED", "GiB-HOURS ON HOST")
		}
		for i := range a.Sums {
			s := &a.Sums[i]
			rows = append(rows, []string{s.Name, strconv.Itoa(s.Grants), hours(&s.GrantedGPUHours),
				hours(s.UsedGPUHours), hours(&s.GrantedGiBHours), hours(s.UsedGiBHours), hours(s.SMHours)})
			if tiers {
				rows[len(rows)-1] = append(rows[len(rows)-1], s.Tier, hours(&s.LentGiBHours))
			}
			if parks {
				rows[len(rows)-1] = append(rows[len(rows)-1], strconv.Itoa(s.Parks), hours(&s.ParkedHours), hours(&s.ParkedGiBHours))
			}
		}
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i := range row {
			row[i] = cmp.Or(printable(row[i]), "-")
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

func hours(h *float64) string {
	if h == nil {
		return ""
	}
	return strconv.FormatFloat(*h, 'f', 2, 64)
}
