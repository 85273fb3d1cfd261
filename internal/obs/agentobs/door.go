// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/socket"
	"example.com/gpu-agent/internal/status"
)

// Door is a server on a Unix socket that answers what partitions would make of the node. Only the
// agent's user can connect to the socket, since an answer names pods of every namespace. Every pod
// can reach the HTTP port, so the answers are not served there.
type Door struct {
	// Path is the path of the socket. If it is empty, there is no server, and Run only waits.
	Path   string
	Logger *slog.Logger
	// Foresee answers a question. It fails if the agent cannot answer yet. It is called for one
	// question at a time.
	Foresee func(status.Question) (status.Answer, error)
}

// Limits of a question. The file is at most as long as a ConfigMap, and a partition's name as a
// label's value.
const (
	maxQuestion   = 1<<20 + 1 // one byte over the limit for a file, so that a longer one is refused with its name
	maxName       = 63
	maxUnitMiB    = 1 << 32
	questionsPath = "/plan"
)

// ErrNoAgent means that no agent listens at the socket.
var ErrNoAgent = errors.New("no agent answers")

// Run serves until ctx ends, and returns the error of ctx. If it cannot make the socket, it logs
// that and waits: the agent goes on, and commands report that no agent answers.
func (d *Door) Run(ctx context.Context) error {
	if d.Path == "" {
		<-ctx.Done()
		return ctx.Err()
	}
	l, err := socket.Listen(d.Path, "."+filepath.Base(d.Path)+".tmp")
	if err != nil {
		d.Logger.Warn("gpu-agent plan and check cannot ask this agent", "err", err)
		<-ctx.Done()
		return ctx.Err()
	}
	defer l.Remove()
	server := &http.Server{
		Handler:           d.Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       10 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ConnState:         obs.Asks,
		ErrorLog:          slog.NewLogLogger(d.Logger.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(obs.Bound(l)) }()
	select {
	case err := <-failed:
		d.Logger.Warn("gpu-agent plan and check can no longer ask this agent", "err", err)
		<-ctx.Done()
	case <-ctx.Done():
		server.Close() // clients see that the agent has gone
		<-failed
	}
	return ctx.Err()
}

// Handler returns the handler of the socket.
func (d *Door) Handler() http.Handler {
	turn := make(chan struct{}, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+questionsPath, func(w http.ResponseWriter, r *http.Request) {
		q, err := readQuestion(w, r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		select { // the question has been read, so a slow client does not make others wait
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		answer, err := func() (status.Answer, error) {
			defer func() { <-turn }()
			return d.Foresee(q)
		}()
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer) // the client may have gone
	})
	return mux
}

// readQuestion reads a question. It fails if the question is over a limit or not valid.
func readQuestion(w http.ResponseWriter, r *http.Request) (q status.Question, err error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, fmt.Errorf("the question cannot be read: %w", err)
	}
	if q.Partitions = values["partition"]; len(q.Partitions) > status.MostAsked {
		return q, fmt.Errorf("%d partitions are asked for, and one question has at most %d", len(q.Partitions),
			status.MostAsked)
	}
	for _, name := range q.Partitions {
		if len(name) > maxName {
			return q, fmt.Errorf("a partition's name has at most %d bytes", maxName)
		}
	}
	if text := values.Get("unit"); text != "" {
		if q.UnitMiB, err = strconv.ParseUint(text, 10, 64); err != nil || q.UnitMiB == 0 || q.UnitMiB > maxUnitMiB {
			return q, fmt.Errorf("unit is %.20q: want MiB, at most %d", text, uint64(maxUnitMiB))
		}
	}
	if q.API = values.Get("api"); q.API != "" && q.API != "device-plugin" && q.API != "dra" {
		return q, fmt.Errorf("api is %.20q: want device-plugin or dra", q.API)
	}
	q.Brief = values.Get("brief") != ""
	if q.File, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxQuestion)); err != nil {
		return q, fmt.Errorf("read the partition file: %w", err)
	}
	return q, nil
}

// query returns the URL query of a question, which has all but its file.
func query(q *status.Question) string {
	values := url.Values{"partition": q.Partitions}
	if q.UnitMiB > 0 {
		values.Set("unit", strconv.FormatUint(q.UnitMiB, 10))
	}
	if q.API != "" {
		values.Set("api", q.API)
	}
	if q.Brief {
		values.Set("brief", "true")
	}
	return values.Encode()
}

// AskDoor asks the agent at the socket path. The error wraps ErrNoAgent if no agent listens there.
func AskDoor(ctx context.Context, path string, q status.Question) (answer status.Answer, err error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+questionsPath+"?"+query(&q),
		strings.NewReader(string(q.File)))
	if err != nil {
		return answer, fmt.Errorf("ask the agent: %w", err)
	}
	response, err := client.Do(request)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTDIR):
		return answer, fmt.Errorf("%w at %s", ErrNoAgent, path)
	case err != nil:
		return answer, fmt.Errorf("ask the agent at %s: %w", path, errors.Unwrap(err))
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxStatus))
	if err != nil {
		return answer, fmt.Errorf("read the answer of the agent at %s: %w", path, err)
	}
	if response.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("the agent at %s does not answer: %.500s", path, strings.TrimSpace(string(body)))
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return answer, fmt.Errorf("decode the answer of the agent at %s: %w", path, err)
	}
	return answer, nil
}
