// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	neturl "net/url"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"example.com/gpu-agent/internal/status"
)

// Options configure a Server. Addr and Now may be left out.
type Options struct {
	// Addr is the address to listen on; ":9500" is every address. If it is empty
	// there is no server, and Run only waits.
	Addr   string
	Logger *slog.Logger
	// Healthy and Ready return nil, or the reason why not. They must return at once
	// and may be called from several goroutines.
	Healthy, Ready func() error
	// Status returns the current status, under the same terms. The server does not
	// change the value. A placer has none.
	Status  func() status.Status
	Metrics Source
	// Account is what is granted and used, for one scrape; nil where no account is kept.
	Account *Account
	// Now is the clock for the ages on the page; nil means time.Now.
	Now func() time.Time
}

// Source is a program's metrics: [Metrics] for an agent, [Placer] for a placer.
type Source interface {
	registry(*Options) *prometheus.Registry
}

// Server serves the pages that the package comment lists.
type Server struct {
	options  Options
	registry *prometheus.Registry
}

// New prepares a server.
func New(o Options) *Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Server{options: o, registry: o.Metrics.registry(&o)}
}

// Run listens and serves until ctx ends, and returns the error of ctx. It fails if it
// cannot listen on the address.
func (s *Server) Run(ctx context.Context) error {
	if s.options.Addr == "" {
		<-ctx.Done()
		return ctx.Err()
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.options.Addr)
	if err != nil {
		return fmt.Errorf("serve metrics and health on %q (--http): %w", s.options.Addr, err)
	}
	return s.Serve(ctx, listener)
}

// Serve is Run with the caller's listener, which it closes.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	// Every pod of the cluster can reach the port: a connection must cost little, and
	// not for long.
	listener = Bound(listener)
	server := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    8 << 10,
		ConnState:         Asks,
		ErrorLog:          slog.NewLogLogger(s.options.Logger.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	s.options.Logger.Info("serving metrics and health", "addr", listener.Addr().String())
	select {
	case err := <-failed:
		return fmt.Errorf("serve metrics and health on %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		server.Close()
	}
	<-failed
	return ctx.Err()
}

// Handler returns the pages. /statusz needs the local address that an http.Server
// puts into a request's context, and refuses requests without it.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", inTurn(promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(s.options.Logger.Handler(), slog.LevelWarn),
		ErrorHandling: promhttp.ContinueOnError,
		// A compressor takes more memory than all series of a node.
		DisableCompression: true,
	})))
	mux.Handle("GET /healthz", probe(s.options.Healthy))
	mux.Handle("GET /readyz", probe(s.options.Ready))
	pages := "gpu-agent\n\n/metrics\n/healthz\n/readyz\n"
	if s.options.Status != nil {
		pages += "/statusz\n"
		mux.Handle("GET /statusz", onlyFromHere(inTurn(http.HandlerFunc(s.status))))
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, pages) })
	return mux
}

// status serves the Status, as a page or as JSON.
func (s *Server) status(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Vary", "Accept")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	if wantsHTML(r) {
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Security-Policy", status.PagePolicy)
		header.Set("Referrer-Policy", "no-referrer")
		if err := status.WriteHTML(w, s.options.Status(), s.options.Now()); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
		return
	}
	body, err := json.MarshalIndent(s.options.Status(), "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header.Set("Content-Type", "application/json")
	w.Write(append(body, '\n'))
}

// onlyFromHere refuses a page to the network. The Status has the names of namespaces,
// pods and containers; the port is open to every pod of the cluster, and a pod has
// nothing but its address to identify it.
func onlyFromHere(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !fromHere(r) {
			http.Error(w, "this page is not served to the network: run `gpu-agent status` in the agent's pod, by kubectl exec, "+
				"or open the page in a browser through kubectl port-forward to that pod", http.StatusForbidden)
			return
		}
		page.ServeHTTP(w, r)
	})
}

// inTurn makes one answer of a page at a time, so that clients that ask again and again
// take one processor at most. The answer is made in memory, so that a client that reads
// slowly keeps no other one waiting.
func inTurn(page http.Handler) http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		a := answer{header: w.Header(), code: http.StatusOK}
		func() {
			defer func() { <-turn }()
			page.ServeHTTP(&a, r)
		}()
		w.WriteHeader(a.code)
		io.WriteString(w, a.body.String())
	})
}

// answer is an http.ResponseWriter that keeps what is written to it.
type answer struct {
	header http.Header
	code   int
	body   strings.Builder
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }

// wantsHTML reports whether a client asks for the page: by ?format=html, or as browsers
// do by the Accept header. Without an Accept header: JSON.
func wantsHTML(r *http.Request) bool {
	switch r.URL.Query().Get("format") {
	case "html":
		return true
	case "json":
		return false
	}
	var html, json float64
	for _, field := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(field, ",") {
			kind, parameters, err := mime.ParseMediaType(part)
			if err != nil {
				continue
			}
			weight := 1.0
			if q, err := strconv.ParseFloat(parameters["q"], 64); err == nil {
				weight = q
			}
			switch kind {
			case "text/html":
				html = max(html, weight)
			case "application/json":
				json = max(json, weight)
			}
		}
	}
	return html > json
}

func probe(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if err := check(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, err)
			return
		}
		io.WriteString(w, "ok\n")
	})
}

// maxStatus is the longest answer that Fetch reads, in bytes.
const maxStatus = 16 << 20

// Fetch reads the Status of the agent that serves on addr, which has the form of
// Options.Addr; without a host it is this machine. Errors name the address and what to
// check.
func Fetch(ctx context.Context, addr string) (status.Status, error) {
	var s status.Status
	if strings.HasPrefix(addr, ":") {
		addr = "localhost" + addr
	}
	url := "http://" + addr + "/statusz"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return s, fmt.Errorf("read the agent's status: %w", err)
	}
	// Without the environment's proxy, which is not meant for this.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return s, fmt.Errorf("read the agent's status: %w; does the agent run here, with this --http?", unwrapURL(err))
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxStatus))
	if err != nil {
		return s, fmt.Errorf("read %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		return s, fmt.Errorf("read %s: %s: %.200s", url, response.Status, body)
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return s, fmt.Errorf("decode %s: %w", url, err)
	}
	return s, nil
}

// unwrapURL removes net/http's wrapper, which quotes method and address.
func unwrapURL(err error) error {
	var wrapped *neturl.Error
	if errors.As(err, &wrapped) {
		return fmt.Errorf("%s: %w", wrapped.URL, wrapped.Err)
	}
	return err
}
