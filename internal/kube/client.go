// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// What both halves ask for.
var (
	Nodes = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	Pods  = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
)

// Rule is a permission that a half needs, in the words of RBAC.
type Rule struct {
	APIGroup, Resource string
	// Verbs are sorted.
	Verbs []string
	// Cluster says that a Role in one namespace is not enough.
	Cluster bool
	// Why is the reason, for the manifest's reader.
	Why string
	// Component is the part of the manifests that grants it, for a permission
	// that not every cluster wants to give; empty is the base.
	Component string
}

// Options configure a Server.
type Options struct {
	// Kubeconfig is a file's path. Empty means the pod's own service account.
	Kubeconfig string
	// Domain is the agent's label prefix, for example "example.com". Required. GPUNodes
	// are of the group of this name.
	Domain string
	// UserAgent is what the API server's audit log shows; empty means
	// "gpu-agent".
	UserAgent string
	// Relist is how often an object is read anew although its watch is open.
	// Zero means 10 minutes. Each period is drawn from ±25 % of it, so that the
	// nodes of a cluster do not ask in step.
	Relist time.Duration
	// Logger is required.
	Logger *slog.Logger
	// Failed, if set, is told of every request that failed: verb and resource
	// are RBAC's words ("watch", "configmaps"). It must not block.
	Failed func(verb, resource string)
	// Answered, if set, is told of every answer of the server, refusals included: while
	// nothing happens, of one in five minutes at least, when a watch is renewed. It must
	// not block.
	Answered func()
	// Refused, if set, is told when the server will not let the process follow an
	// object (401, 403), and with nil when it does again; request is like "list
	// configmaps gpu-agent/gpu-partitions". Watches report nothing of the object
	// meanwhile. It must not block.
	Refused func(request string, err error)
}

// Server is the API server as both halves ask it. Its fields are set by [Connect]; what is
// not a test leaves them as they are. Its methods may be called from several goroutines.
type Server struct {
	// Options are those of Connect, with Relist filled in.
	Options Options
	Log     *slog.Logger
	API     dynamic.Interface
	// Version is the server's word for its release, such as "v1.36.3".
	Version func(context.Context) (string, error)
	Timing  Timing
	Now     func() time.Time
	// Ration is the log for what an unreachable server, or a storm of Events, repeats.
	Ration *brief.Ration

	mu sync.Mutex // guards what follows
	// failing has the start of each outage, by operation.
	failing map[string]time.Time
	// refused has the requests of which Refused was told.
	refused map[string]bool
}

// Timing is apart so that tests need not wait.
type Timing struct {
	Relist time.Duration
	// Watch is how long the server is asked to keep one watch open.
	Watch time.Duration
	// Grace is how much longer than Watch an unresponsive one is kept.
	Grace time.Duration
	// Request bounds every request that is not a watch.
	Request time.Duration
	// Lived is how long a watch without an event must have stood for the next
	// attempt to count as the first.
	Lived              time.Duration
	PauseMin, PauseMax time.Duration
}

// Connect prepares what the clients of both halves begin with. So many requests a second are
// sent, after the first 300. It reads the credentials but makes no request, so it succeeds
// while the API server is unreachable.
func Connect(o Options, perSecond float32) (*Server, error) {
	switch {
	case o.Domain == "":
		return nil, errors.New("the domain is empty: set --domain")
	case o.Logger == nil:
		return nil, errors.New("kube: no logger")
	}
	config, err := credentials(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = o.UserAgent
	if config.UserAgent == "" {
		config.UserAgent = "gpu-agent"
	}
	config.WarningHandler = rest.NoWarnings{}
	if o.Answered != nil {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return answers{next, o.Answered} })
	}
	config.QPS, config.Burst = perSecond, 300
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("prepare the API client for %s: %w", config.Host, err)
	}
	api, err := dynamic.NewForConfigAndClient(config, web)
	if err != nil {
		return nil, fmt.Errorf("prepare the API client for %s: %w", config.Host, err)
	}
	if o.Relist <= 0 {
		o.Relist = 10 * time.Minute
	}
	up := &Server{
		Options: o,
		Log:     o.Logger,
		API:     api,
		Version: func(ctx context.Context) (string, error) { return askVersion(ctx, config, web) },
		Timing: Timing{
			Relist: o.Relist, Watch: 5 * time.Minute, Grace: 30 * time.Second,
			Request: 30 * time.Second, Lived: 5 * time.Second,
			PauseMin: 200 * time.Millisecond, PauseMax: 30 * time.Second,
		},
		Now:     time.Now,
		failing: map[string]time.Time{},
		refused: map[string]bool{},
	}
	up.Ration = brief.NewRation(up.Log, func() time.Time { return up.Now() }, time.AfterFunc)
	return up, nil
}

// answers tells of every request that was answered.
type answers struct {
	http.RoundTripper
	answered func()
}

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := a.RoundTripper.RoundTrip(r)
	if err == nil {
		a.answered()
	}
	return response, err
}

// askVersion asks a server for its release, which it tells everybody who has a token.
func askVersion(ctx context.Context, config *rest.Config, web *http.Client) (string, error) {
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return "", err
	}
	response, err := web.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var said struct{ GitVersion string }
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<16)).Decode(&said); err != nil {
		return "", err
	}
	return said.GitVersion, nil
}

func credentials(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read kubeconfig %s: %w", kubeconfig, err)
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("no service account here, and no --kubeconfig: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("read the pod's service account: %w", err)
	}
	return config, nil
}

// unreachable is the one outage that all operations share while no answer
// comes at all.
const unreachable = "reach the API server"

// Note logs outages: one line when an operation begins to fail, one when it works
// again, none between.
func (s *Server) Note(ctx context.Context, verb, resource, name string, err error) {
	if ctx.Err() != nil && err != nil {
		return // stopped by ourselves
	}
	operation := verb + " " + resource + " " + name
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, op := range []string{unreachable, operation} {
			if since, ok := s.failing[op]; ok {
				delete(s.failing, op)
				s.Log.Info("API server answers again",
					"operation", op, "after", s.Now().Sub(since).Round(time.Millisecond))
			}
		}
		return
	}
	if s.Options.Failed != nil {
		s.Options.Failed(verb, resource)
	}
	if !Answered(err) {
		operation = unreachable
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.failing[operation]; ok {
		return
	}
	s.failing[operation] = s.Now()
	s.Log.Warn("API server request fails; retrying", "operation", operation, "err", err)
}

// BackOff draws each pause from the upper half of a bound that doubles up to most.
func (s *Server) BackOff(most time.Duration) wait.Backoff {
	return wait.Backoff{Duration: s.Timing.PauseMin / 2, Factor: 2, Jitter: 1, Cap: most / 2, Steps: math.MaxInt}
}

// Sleep returns false when ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// Around draws from ±25 % of d.
func Around(d time.Duration) time.Duration {
	return d*3/4 + rand.N(d/2+1)
}
