// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/status"
)

// Pages are the pages of one agent, by a forwarded port.
type Pages struct {
	// Agent is the agent's pod.
	Agent  pluginkube.Agent
	tunnel *pluginkube.Tunnel
}

// mostAnswer bounds an answer in bytes, and patience is how long one may take. An agent plans for up
// to half a minute.
const (
	mostAnswer = 16 << 20
	patience   = time.Minute
)

// OpenPages forwards a port to the agent of a node. The caller closes the pages.
func OpenPages(ctx context.Context, c *pluginkube.Client, node string) (*Pages, error) {
	agent, err := c.AgentOn(ctx, node)
	if err != nil {
		return nil, err
	}
	return openPages(ctx, c, agent)
}

func openPages(ctx context.Context, c *pluginkube.Client, agent pluginkube.Agent) (*Pages, error) {
	tunnel, err := c.Tunnel(ctx, agent)
	if err != nil {
		return nil, err
	}
	return &Pages{agent, tunnel}, nil
}

// Close ends the forwarding.
func (p *Pages) Close() error { return p.tunnel.Close() }

// ask sends a request to a page, and returns the answer's body.
func (p *Pages) ask(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	at := url.URL{Scheme: "http", Host: "agent", Path: path, RawQuery: query.Encode()}
	request, err := http.NewRequestWithContext(ctx, method, at.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	response, err := p.tunnel.HTTP.Do(request)
	if err != nil {
		var wrapped *url.Error
		if errors.As(err, &wrapped) {
			err = wrapped.Err // it would quote an address that means nothing here
		}
		return nil, fmt.Errorf("ask the agent %s for %s: %w", p.Agent.Name, path, err)
	}
	defer response.Body.Close()
	said, err := io.ReadAll(io.LimitReader(response.Body, mostAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s of the agent %s: %w", path, p.Agent.Name, err)
	case response.StatusCode == http.StatusNotFound, response.StatusCode == http.StatusMethodNotAllowed:
		return nil, fmt.Errorf("the agent %s has no page %s: it is older than this program, or keeps no account",
			p.Agent.Name, path)
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("the agent %s does not answer %s: %s", p.Agent.Name, path,
			printable(strings.TrimSpace(string(said[:min(len(said), 500)]))))
	case len(said) > mostAnswer:
		return nil, fmt.Errorf("%s of the agent %s is longer than %d MiB", path, p.Agent.Name, mostAnswer>>20)
	}
	return said, nil
}

// decode reads JSON of a node. It first replaces, in all texts, what could move a terminal's cursor.
func decode(body []byte, into any) error {
	numbers := json.NewDecoder(bytes.NewReader(body))
	numbers.UseNumber()
	var v any
	if err := numbers.Decode(&v); err != nil {
		return err
	}
	clean, err := json.Marshal(scrub(v))
	if err != nil {
		return err
	}
	return json.Unmarshal(clean, into)
}

func scrub(v any) any {
	switch v := v.(type) {
	case string:
		return strings.Map(func(r rune) rune {
			if r != '\n' && !strconv.IsPrint(r) {
				return '?'
			}
			return r
		}, v)
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, of := range v {
			out[printable(key)] = scrub(of)
		}
		return out
	case []any:
		for i := range v {
			v[i] = scrub(v[i])
		}
	}
	return v
}

// Status returns the agent's status.
func (p *Pages) Status(ctx context.Context) (s status.Status, err error) {
	body, err := p.ask(ctx, http.MethodGet, "/statusz", url.Values{"format": {"json"}}, nil)
	if err == nil {
		if err = decode(body, &s); err != nil {
			err = fmt.Errorf("read the status of the agent %s: %w", p.Agent.Name, err)
		}
	}
	return s, err
}

// Ask asks what partitions would come to.
func (p *Pages) Ask(ctx context.Context, q status.Question) (a status.Answer, err error) {
	query := url.Values{"partition": q.Partitions}
	if q.Brief {
		query.Set("brief", "true")
	}
	body, err := p.ask(ctx, http.MethodPost, "/plan", query, q.File)
	if err == nil {
		if err = decode(body, &a); err != nil {
			err = fmt.Errorf("read the plan of the agent %s: %w", p.Agent.Name, err)
		}
	}
	return a, err
}

// Settings returns the agent's flags.
func (p *Pages) Settings(ctx context.Context) ([]byte, error) {
	return p.ask(ctx, http.MethodGet, "/settings", nil, nil)
}

// Journal returns the last records of the agent's usage journal, a line each.
func (p *Pages) Journal(ctx context.Context, records int) ([]byte, error) {
	return p.ask(ctx, http.MethodGet, "/journal", url.Values{"records": {strconv.Itoa(records)}}, nil)
}

// atOnce is how many agents are asked at a time.
const atOnce = 8

// Agents returns the agents of these nodes, or of all nodes if there are none. failed names nodes
// without one.
func Agents(
	ctx context.Context, c *pluginkube.Client, nodes []string,
) (out []pluginkube.Agent, failed []error, err error) {
	all, err := c.Agents(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	best := map[string]pluginkube.Agent{}
	for _, a := range all {
		if old, ok := best[a.Node]; a.Node != "" && (!ok || old.NotReady != "") {
			best[a.Node] = a
		}
	}
	if len(nodes) == 0 {
		for node := range best {
			nodes = append(nodes, node)
		}
		slices.Sort(nodes)
	}
	for _, node := range nodes {
		a, ok := best[node]
		if !ok {
			failed = append(failed, fmt.Errorf("node %s has no pod of the agent", node))
			continue
		}
		out = append(out, a)
	}
	if len(out) == 0 && len(failed) == 0 {
		return nil, nil, errors.New("no node has an agent; is it in another namespace (--agent-namespace)?")
	}
	return out, failed, nil
}

// each calls do for the pages of each agent, several at a time, and returns the errors, each with its
// node. do is called with the agent's index, and may be called at the same time for several.
func each(ctx context.Context, c *pluginkube.Client, agents []pluginkube.Agent, do func(int, *Pages) error) []error {
	errs := make([]error, len(agents))
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i := range agents {
		all.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; all.Done() }()
			errs[i] = func() error {
				p, err := openPages(ctx, c, agents[i])
				if err != nil {
					return err
				}
				defer p.Close()
				return do(i, p)
			}()
		}()
	}
	all.Wait()
	var out []error
	for i, err := range errs {
		if err != nil {
			out = append(out, fmt.Errorf("node %s: %w", agents[i].Node, err))
		}
	}
	return out
}
