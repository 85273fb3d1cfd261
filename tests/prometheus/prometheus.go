// SPDX-License-Identifier: Apache-2.0

package prometheus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/loopback"
)

// Program is promtool or prometheus: the one that is installed, or else of Debian's package,
// which is downloaded once and not installed.
func Program(ctx context.Context, name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	cache, err := emulib.Cache()
	if err != nil {
		return "", err
	}
	root := filepath.Join(cache, "prometheus")
	path := filepath.Join(root, "usr/bin", name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(cache, "prometheus-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	get := exec.CommandContext(ctx, "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "prometheus")
	get.Dir = work
	if out, err := get.CombinedOutput(); err != nil {
		return "", fmt.Errorf("download Debian's prometheus: %w: %.2000s", err, out)
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get left %q: %w", debs, err)
	}
	tree := filepath.Join(work, "tree")
	if out, err := exec.CommandContext(ctx, "dpkg", "-x", debs[0], tree).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack Debian's prometheus: %w: %.2000s", err, out)
	}
	if err := os.Rename(tree, root); err != nil && !errors.Is(err, os.ErrExist) {
		if _, there := os.Stat(path); there != nil { // of another test
			return "", err
		}
	}
	return path, nil
}

// Job is what is scraped under one name.
type Job struct {
	Name string
	// Page is served for it. Without one, Extra says what is scraped.
	Page []byte
	// Extra are lines of YAML for the job's configuration, such as metric_relabel_configs.
	Extra string
}

// Server is a Prometheus that scrapes pages.
type Server struct {
	url   string
	tool  string
	cmd   *exec.Cmd
	said  bytes.Buffer
	pages []*httptest.Server
}

// Start runs a Prometheus whose files are in dir, with rule files by their absolute paths, and
// waits until it has scraped each job twice.
func Start(ctx context.Context, dir string, jobs []Job, rules ...string) (_ *Server, err error) {
	program, err := Program(ctx, "prometheus")
	if err != nil {
		return nil, err
	}
	s := new(Server)
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%.3000s", err, s.said.String())
			s.Stop()
		}
	}()
	if s.tool, err = Program(ctx, "promtool"); err != nil {
		return nil, err
	}
	var config strings.Builder
	config.WriteString("global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files:\n")
	for _, file := range rules {
		fmt.Fprintf(&config, "  - %q\n", file)
	}
	config.WriteString("scrape_configs:\n")
	for _, j := range jobs {
		fmt.Fprintf(&config, "  - job_name: %s\n", j.Name)
		if j.Page != nil {
			page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/plain; version=0.0.4")
				_, _ = w.Write(j.Page)
			}))
			s.pages = append(s.pages, page)
			fmt.Fprintf(&config, "    static_configs: [{targets: [%q]}]\n", strings.TrimPrefix(page.URL, "http://"))
		}
		for line := range strings.Lines(j.Extra) {
			config.WriteString("    " + line)
		}
		config.WriteString("\n")
	}
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		return nil, err
	}
	free, err := loopback.FreePorts(1)
	if err != nil {
		return nil, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", free[0])
	s.url = "http://" + address
	s.cmd = exec.CommandContext(ctx, program, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	s.cmd.Stdout, s.cmd.Stderr = &s.said, &s.said
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	for {
		up, err := s.Query(ctx, "min_over_time(up[1m]) * 0 + count_over_time(up[1m])", "job")
		if err == nil && len(up) == len(jobs) {
			all := true
			for _, n := range up {
				all = all && n >= 2
			}
			if all {
				return s, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("await Prometheus: %w: %w", ctx.Err(), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Sample is one value of an answer.
type Sample struct {
	Labels map[string]string
	Value  float64
}

// Samples has promtool ask for the samples of now.
func (s *Server) Samples(ctx context.Context, expr string) ([]Sample, error) {
	out, err := exec.CommandContext(ctx, s.tool, "query", "instant", "-o", "json", s.url, expr).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("promtool query %s: %w: %.500s", expr, err, out)
	}
	var samples []struct {
		Metric map[string]string
		Value  [2]any
	}
	if err := json.Unmarshal(out, &samples); err != nil {
		return nil, fmt.Errorf("read what promtool says: %w: %.500s", err, out)
	}
	all := make([]Sample, len(samples))
	for i, sample := range samples {
		text, _ := sample.Value[1].(string)
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, err
		}
		all[i] = Sample{sample.Metric, v}
	}
	return all, nil
}

// Query is Samples by the value of a label.
func (s *Server) Query(ctx context.Context, expr, label string) (map[string]float64, error) {
	all, err := s.Samples(ctx, expr)
	if err != nil {
		return nil, err
	}
	by := map[string]float64{}
	for _, sample := range all {
		if _, twice := by[sample.Labels[label]]; twice {
			return nil, fmt.Errorf("%s has two samples with %s %q", expr, label, sample.Labels[label])
		}
		by[sample.Labels[label]] = sample.Value
	}
	return by, nil
}

// Firing are the alerts that fire now, by their names.
func (s *Server) Firing(ctx context.Context) (map[string]bool, error) {
	var answer struct {
		Alerts []struct {
			State  string
			Labels map[string]string
		}
	}
	if err := s.ask(ctx, "alerts", nil, &answer); err != nil {
		return nil, err
	}
	firing := map[string]bool{}
	for _, a := range answer.Alerts {
		if a.State == "firing" {
			firing[a.Labels["alertname"]] = true
		}
	}
	return firing, nil
}

// Shown is how many numbers an expression has had since a time, as a board shows it. NaN is
// none.
func (s *Server) Shown(ctx context.Context, expr string, since time.Time) (n int, err error) {
	now := time.Now()
	var answer struct {
		Result []struct{ Values [][2]any }
	}
	err = s.ask(ctx, "query_range", url.Values{
		"query": {expr}, "step": {"1"}, "start": {stamp(since)}, "end": {stamp(now)},
	}, &answer)
	for _, r := range answer.Result {
		for _, v := range r.Values {
			if v[1] != "NaN" {
				n++
			}
		}
	}
	return n, err
}

func stamp(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }

// ask reads what the server's interface answers.
func (s *Server) ask(ctx context.Context, what string, query url.Values, data any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/api/v1/"+what+"?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer := struct {
		Error string
		Data  any
	}{Data: data}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return fmt.Errorf("read Prometheus' %s: %w", what, err)
	}
	if answer.Error != "" {
		return fmt.Errorf("ask Prometheus for %s: %s", what, answer.Error)
	}
	return nil
}

// Stop ends it.
func (s *Server) Stop() {
	if s.cmd != nil && s.cmd.Process != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	}
	for _, p := range s.pages {
		p.Close()
	}
}
