// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net"
	"net/http"
	"net/netip"
	neturl "net/url"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
)

// Options configure a Server. Addr and Now may be left out.
type Options struct {
	// These are those of obs.Options.
	Addr           string
	Logger         *slog.Logger
	Healthy, Ready func() error
	// Status returns the present status. It must return at once, and may be called from several
	// goroutines. The server does not change the value. If it is nil, there is no status page.
	Status  func() status.Status
	Metrics *Metrics
	// Account has the metrics of what containers are granted and use; nil if no account is kept.
	Account *Account
	// Within are further pages for connections from within the pod.
	Within Within
	// Now is the clock for the ages on the page; nil means time.Now.
	Now func() time.Time
}

// New prepares the server of an agent's pages.
func New(o Options) *obs.Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	pages := map[string]http.Handler{}
	if o.Status != nil {
		pages["/statusz"] = onlyFromHere(obs.InTurn(http.HandlerFunc(o.status)))
	}
	maps.Copy(pages, o.Within.pages())
	return obs.New(obs.Options{Addr: o.Addr, Logger: o.Logger, Healthy: o.Healthy, Ready: o.Ready,
		Metrics: o.Metrics.registry(&o), Pages: pages})
}

// status serves the Status, as a page or as JSON.
func (o *Options) status(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Vary", "Accept")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	if wantsHTML(r) {
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Security-Policy", status.PagePolicy)
		header.Set("Referrer-Policy", "no-referrer")
		if err := status.WriteHTML(w, o.Status(), o.Now()); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
		return
	}
	body, err := json.MarshalIndent(o.Status(), "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header.Set("Content-Type", "application/json")
	w.Write(append(body, '\n'))
}

// onlyFromHere refuses a page to clients on the network. The Status has the names of namespaces,
// pods and containers. The port is open to every pod of the cluster, and only its address
// identifies a pod.
func onlyFromHere(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !fromHere(r) {
			http.Error(w, "this page is not served to the network: run `gpu-agent status` in the agent's pod, "+
				"by kubectl exec, or open the page in a browser through kubectl port-forward to that pod; `kubectl gpu` does so",
				http.StatusForbidden)
			return
		}
		page.ServeHTTP(w, r)
	})
}

// fromHere reports whether a request comes from the server's own network namespace: over
// loopback, or from the same address that it was sent to. The kernel drops such packets
// if they come from outside.
func fromHere(r *http.Request) bool {
	own, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return false
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	to, from := own.AddrPort().Addr().Unmap().WithZone(""), peer.Addr().Unmap().WithZone("")
	return to.IsLoopback() && from.IsLoopback() || to.IsValid() && to == from
}

// wantsHTML reports whether a client asks for the HTML page: by ?format=html, or by the Accept
// header as browsers do. A client without an Accept header gets JSON.
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

// maxStatus is the longest answer that Fetch reads, in bytes.
const maxStatus = 16 << 20

// Fetch reads the Status of the agent at addr, which has the form of Options.Addr; without a host
// it is this machine. Errors name the address and what to check.
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
	// The environment's proxy is not meant for this.
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
