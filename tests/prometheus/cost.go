// SPDX-License-Identifier: Apache-2.0

package prometheus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
)

// What OpenCost asks of Prometheus about GPUs (opencost, metricsquerier.go), for a stretch and
// without a label for the cluster.
const Allocated = `avg(avg_over_time(container_gpu_allocation{container!="", container!="POD", node!=""}[1m])) by (container, pod, namespace, node)`

// Zeros is the page that an OpenCost has for containers that request no nvidia.com/gpu, which
// series of the agent's page are about.
func Zeros(agent []byte) []byte {
	var b strings.Builder
	b.WriteString("# TYPE container_gpu_allocation gauge\n")
	for _, m := range regexp.MustCompile(`(?m)^container_gpu_allocation\{([^}]*)\}`).FindAllSubmatch(agent, -1) {
		fmt.Fprintf(&b, "container_gpu_allocation{%s} 0\n", m[1])
	}
	return []byte(b.String())
}

// Rule is what docs/usage.md says of how a job is to be scraped, but for where it is found.
func Rule(docs, job string) (string, error) {
	text, err := os.ReadFile(docs)
	if err != nil {
		return "", err
	}
	_, config, _ := strings.Cut(string(text), "```yaml\nscrape_configs:\n")
	config, _, _ = strings.Cut(config, "```")
	for _, part := range strings.Split("\n"+config, "\n  - job_name: ")[1:] {
		name, rest, _ := strings.Cut(part, "\n")
		if name != job {
			continue
		}
		var out strings.Builder
		found := false
		for line := range strings.Lines(rest) {
			line = strings.TrimPrefix(line, "    ")
			if !strings.HasPrefix(line, " ") {
				found = strings.HasPrefix(line, "honor_labels") || strings.HasPrefix(line, "metric_relabel_configs")
			}
			if found {
				out.WriteString(strings.TrimRight(line, "\n") + "\n")
			}
		}
		return out.String(), nil
	}
	return "", fmt.Errorf("%s shows no job %s", docs, job)
}

// Costs is what OpenCost reads of a page of the agent's beside its own zeros, by pod: without
// the rule that docs has for them, and with it.
func Costs(ctx context.Context, dir, docs string, agent []byte) (without, with map[string]float64, err error) {
	ours, err := Rule(docs, "gpu-agent")
	if err != nil {
		return nil, nil, err
	}
	drop, err := Rule(docs, "opencost")
	if err != nil {
		return nil, nil, err
	}
	if !strings.Contains(drop, "drop") {
		return nil, nil, errors.New("the job of OpenCost has no rule that drops anything")
	}
	read := func(rule string) (map[string]float64, error) {
		sub, err := os.MkdirTemp(dir, "")
		if err != nil {
			return nil, err
		}
		s, err := Start(ctx, sub, []Job{{Name: "gpu-agent", Page: agent, Extra: ours}, {Name: "opencost", Page: Zeros(agent), Extra: rule}})
		if err != nil {
			return nil, err
		}
		defer s.Stop()
		return s.Query(ctx, Allocated, "pod")
	}
	if without, err = read("honor_labels: true\n"); err == nil {
		with, err = read(drop)
	}
	return without, with, err
}
