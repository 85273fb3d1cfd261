// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const (
	labelsName, noLabelsName = "gpu-agent-labels", "gpu-agent-no-labels"
	labelsNode, noLabelsNode = "bench-labels", "bench-no-labels"
	labelsHTTP, noLabelsHTTP = ":9505", ":9506"
)

// telling measures what it costs to tell what a node has: the labels, by an agent
// that writes them beside one that does not, and the page, which the first is asked
// for many times.
func (b *bench) telling(ctx context.Context) error {
	b.api.putNode(labelsNode)
	b.api.putNode(noLabelsNode)
	return b.onBoard(boards[0], func(m *machine, _ *world) error {
		return all(ctx, 0, func(rs []*running) error {
			if err := b.labelled(ctx, rs[0]); err != nil {
				return err
			}
			// What a start leaves to be done is not rest.
			if err := sleep(ctx, min(b.window, 3*time.Second)); err != nil {
				return err
			}
			before, worse := b.api.writes(), map[string]float64{}
			for range 2 { // the links are read once a minute
				spent, err := b.spent(ctx, rs)
				if err != nil {
					return err
				}
				for name, cpu := range spent {
					worse[name] = max(worse[name], cpu)
				}
			}
			b.figure("labels_writes_at_rest", float64(b.api.writes()-before), "requests", target{0, "0"})
			for i, r := range rs {
				b.figure("labels_idle_cpu_30s/"+r.name, worse[r.name], "ms", only(i == 0, mostIdleCPU, "10 ms")...)
			}
			if err := b.residents(rs, "labels_resident/"); err != nil {
				return err
			}
			if err := b.pages(ctx, rs[0]); err != nil {
				return err
			}
			return b.residents(rs[:1], "page_resident_after/")
		}, m.newAgentOf(labelsNode, labelsName, labelsHTTP, b.agent.kubelet),
			m.newAgentOf(noLabelsNode, noLabelsName, noLabelsHTTP, b.file.kubelet, "--node-labels", "none"))
	})
}

func (b *bench) residents(rs []*running, what string) error {
	for _, r := range rs {
		m, err := r.proc.memory()
		if err != nil {
			return err
		}
		b.figure(what+r.name, mb(m.resident), "MB", only(r.name == labelsName, mostResident, "40 MB")...)
	}
	return nil
}

// labelled waits for the labels of both nodes to be what they are to be.
func (b *bench) labelled(ctx context.Context, r *running) error {
	want := map[string]string{"nvidia.com/gpu.count": "8", lab.Domain + "/gpu.joined": "8"}
	return r.proc.explain(await(ctx, "the labels of both nodes", func() (bool, error) {
		with, without := b.api.labels(labelsNode), b.api.labels(noLabelsNode)
		for key, value := range want {
			if with[key] != value || without[key] != nil {
				return false, fmt.Errorf("%s is %v on one and %v on the other, want %s and none", key, with[key], without[key], value)
			}
		}
		return with[lab.StateLabel] == "applied" && without[lab.StateLabel] == "applied", fmt.Errorf("the labels are %v and %v", with, without)
	}))
}

// pages asks for the page as a browser does.
func (b *bench) pages(ctx context.Context, r *running) error {
	var took sample
	size := 0
	for range b.calls {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1"+labelsHTTP+"/statusz", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8")
		began := time.Now()
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return r.proc.explain(fmt.Errorf("ask for the page: %w", err))
		}
		page, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		took = append(took, time.Since(began))
		if err != nil || resp.StatusCode != http.StatusOK || !bytes.Contains(page, []byte("<svg")) {
			return r.proc.explain(fmt.Errorf("ask for the page: status %s, %d bytes, a drawing: %v (%w)", resp.Status, len(page), bytes.Contains(page, []byte("<svg")), err))
		}
		size = len(page)
	}
	b.figure("page_bytes/"+r.name, float64(size), "bytes")
	b.figure("page_p50/"+r.name, took.quantile(0.5), "ms")
	b.figure("page_p99/"+r.name, took.quantile(0.99), "ms")
	return nil
}
