// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Options configure a Server. Addr and Pages may be left out.
type Options struct {
	// Addr is the address to listen on; ":9500" is every address. If it is empty, there is no
	// server, and Run only waits.
	Addr   string
	Logger *slog.Logger
	// Healthy and Ready return nil, or the reason why the program is not. They must return at once,
	// and may be called from several goroutines.
	Healthy, Ready func() error
	// Metrics are the metrics of /metrics.
	Metrics prometheus.Gatherer
	// Pages are further pages, by path, for GET; or by method and path: "POST /plan".
	Pages map[string]http.Handler
}

// Server serves the pages that the package comment lists.
type Server struct {
	options Options
}

// New prepares a server.
func New(o Options) *Server { return &Server{o} }

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

// Serve does what Run does with the caller's listener, and closes it.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	// Every pod of the cluster can reach the port. So a connection must cost little, and only for a
	// short time.
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
	s.options.Logger.Info("serving metrics and health", "addr", listener.Addr().String())
	return ServeUntil(ctx, server, listener, "metrics and health")
}

// ServeUntil serves until ctx ends; open requests then have three seconds to finish. It closes the
// listener and returns the error of ctx. If the server fails before, it returns an error that names
// what is served.
func ServeUntil(ctx context.Context, server *http.Server, listener net.Listener, what string) error {
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s on %s: %w", what, listener.Addr(), err)
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

// Handler returns the pages.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", InTurn(promhttp.HandlerFor(s.options.Metrics, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(s.options.Logger.Handler(), slog.LevelWarn),
		ErrorHandling: promhttp.ContinueOnError,
		// A compressor takes more memory than all series of a node.
		DisableCompression: true,
	})))
	mux.Handle("GET /healthz", probe(s.options.Healthy))
	mux.Handle("GET /readyz", probe(s.options.Ready))
	pages := "gpu-agent\n\n/metrics\n/healthz\n/readyz\n"
	for _, at := range slices.Sorted(maps.Keys(s.options.Pages)) {
		pages += at + "\n"
		pattern := at
		if strings.HasPrefix(at, "/") {
			pattern = "GET " + at
		}
		mux.Handle(pattern, s.options.Pages[at])
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, pages) })
	return mux
}

// InTurn makes one answer of a page at a time, so that clients with many requests use at most one
// processor. It makes the answer in memory, so that a slow client does not make others wait.
func InTurn(page http.Handler) http.Handler {
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
