// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// Within are pages that are served only to connections from within the pod, as the status is: they
// name pods of every namespace. `kubectl gpu` reads them. A page whose function is nil does not
// exist. The functions are called for one request at a time, and an error that wraps gpu.ErrInvalid
// is one of the request.
type Within struct {
	// Foresee answers what partitions would come to, as [Door] does.
	Foresee func(status.Question) (status.Answer, error)
	// Usage returns a report of what was granted and used, for the query of the request. It is
	// encoded as JSON.
	Usage func(url.Values) (any, error)
	// Journal returns the last records of the usage journal, at most so many, a line of JSON each.
	Journal func(most int) ([]byte, error)
	// Settings returns the value of each flag, by name.
	Settings func() map[string]string
}

// mostRecords is the largest number of records in one answer.
const mostRecords = 5_000

// pages returns the pages by method and path.
func (w *Within) pages() map[string]http.Handler {
	out := map[string]http.Handler{}
	add := func(at string, make func(r *http.Request) ([]byte, string, error)) {
		out[at] = onlyFromHere(obs.InTurn(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, kind, err := make(r)
			switch {
			case errors.Is(err, gpu.ErrInvalid):
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			case err != nil:
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			header := w.Header()
			header.Set("Cache-Control", "no-store")
			header.Set("X-Content-Type-Options", "nosniff")
			header.Set("Content-Type", kind)
			w.Write(body) //nolint:errcheck // the client may have gone
		})))
	}
	object := func(v any, err error) ([]byte, string, error) {
		if err != nil {
			return nil, "", err
		}
		body, err := json.Marshal(v)
		return append(body, '\n'), "application/json", err
	}
	if w.Foresee != nil {
		// The question is read before its turn, so that a slow client does not make others wait.
		out["POST "+questionsPath] = onlyFromHere((&Door{Foresee: w.Foresee}).Handler())
	}
	if w.Usage != nil {
		add("/usage", func(r *http.Request) ([]byte, string, error) {
			query, err := url.ParseQuery(r.URL.RawQuery)
			if err != nil {
				return nil, "", fmt.Errorf("the query cannot be read: %w: %w", err, gpu.ErrInvalid)
			}
			return object(w.Usage(query))
		})
	}
	if w.Journal != nil {
		add("/journal", func(r *http.Request) ([]byte, string, error) {
			most := 1_000
			if text := r.URL.Query().Get("records"); text != "" {
				n, err := strconv.Atoi(text)
				if err != nil || n < 1 || n > mostRecords {
					return nil, "", fmt.Errorf("records is %.20q: want 1 to %d: %w", text, mostRecords, gpu.ErrInvalid)
				}
				most = n
			}
			body, err := w.Journal(most)
			return body, "application/jsonl", err
		})
	}
	if w.Settings != nil {
		add("/settings", func(*http.Request) ([]byte, string, error) { return object(w.Settings(), nil) })
	}
	return out
}
