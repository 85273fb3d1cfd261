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
	"path/filepath"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// The resources that both client packages use.
var (
	Nodes = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	Pods  = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
)

// Rule is a permission that a client package needs, in RBAC's terms.
type Rule struct {
	APIGroup, Resource string
	// Verbs are sorted.
	Verbs []string
	// Cluster is true if a Role in one namespace is not enough.
	Cluster bool
	// Why is the reason, for readers of the manifest.
	Why string
	// Component is the manifests' component that grants the permission, for one that not every
	// cluster wants to grant. Empty is the base.
	Component string
}

// Options configure a Server.
type Options struct {
	// Kubeconfig is the path of a kubeconfig, or a list of paths as $KUBECONFIG has it, which are
	// merged as kubectl does. Empty means the pod's own service account.
	Kubeconfig string
	// Domain is the agent's label prefix, for example "example.com", and the API group of GPUNodes.
	// Required.
	Domain string
	// UserAgent is the name of this client in the API server's audit log. Empty means "gpu-agent".
	UserAgent string
	// Relist is the period after which an object is listed again although its watch is open. Zero
	// means 10 minutes. Each period varies by ±25 % at random, so that the nodes of a cluster do
	// not list at the same moment.
	Relist time.Duration
	// Logger is required.
	Logger *slog.Logger
	// Failed, if set, is called for every request that failed. Verb and resource are RBAC's names
	// ("watch", "configmaps"). It must not block.
	Failed func(verb, resource string)
	// Answered, if set, is called for every answer of the server, also for refusals. While nothing
	// changes that is at least one in five minutes, since watches are renewed. It must not block.
	Answered func()
	// Refused, if set, is called when the server refuses to let the process follow an object (401,
	// 403), and with a nil error once it allows that again. Request is like "list configmaps
	// gpu-agent/gpu-partitions". Meanwhile watches report nothing of the object. It must not block.
	Refused func(request string, err error)
}

// Server is the connection to the API server that both client packages share. [Connect] sets its
// fields, and only tests change them. Its methods may be called from several goroutines.
type Server struct {
	// Options are those of Connect, with Relist filled in.
	Options Options
	Log     *slog.Logger
	API     dynamic.Interface
	// metadata is API for objects without spec and status.
	metadata dynamic.Interface
	// Version asks the server for its release, such as "v1.36.3".
	Version func(context.Context) (string, error)
	Timing  Timing
	Now     func() time.Time
	// Ration limits log lines that repeat, as while the server is unreachable or in a storm of
	// Events.
	Ration *brief.Ration

	mu sync.Mutex // guards what follows
	// failing maps each operation that fails to the time at which it began to fail.
	failing map[string]time.Time
	// refused is true for each request whose refusal was reported to Refused.
	refused map[string]bool
}

// Timing holds the times of a Server; tests shorten them.
type Timing struct {
	Relist time.Duration
	// Watch is the time after which the server is asked to end a watch.
	Watch time.Duration
	// Grace is the time after Watch at which the client ends a watch that the server has not ended.
	Grace time.Duration
	// Request is the time limit of every request that is not a watch.
	Request time.Duration
	// Lived is the age at which a watch without an event counts as a success, so that the pauses
	// between retries start again at PauseMin.
	Lived              time.Duration
	PauseMin, PauseMax time.Duration
}

// Connect prepares the connection. It reads the credentials but makes no request, so it succeeds
// while the API server is unreachable. It fails if an option is missing or the credentials cannot
// be read. After the first 300 requests the client sends at most perSecond.
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
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return answerNotifier{next, o.Answered} })
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
	metadata, err := dynamic.NewForConfigAndClient(config, &http.Client{Transport: metadataOnly{web.Transport}})
	if err != nil {
		return nil, fmt.Errorf("prepare the API client for %s: %w", config.Host, err)
	}
	if o.Relist <= 0 {
		o.Relist = 10 * time.Minute
	}
	up := &Server{
		Options: o,
		Log:     o.Logger,
		API:     api, metadata: metadata,
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

// answerNotifier calls answered for every request that got an answer.
type answerNotifier struct {
	http.RoundTripper
	answered func()
}

func (a answerNotifier) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := a.RoundTripper.RoundTrip(r)
	if err == nil {
		a.answered()
	}
	return response, err
}

// metadataOnly asks for objects of which the server leaves out all but the metadata.
type metadataOnly struct{ http.RoundTripper }

func (m metadataOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	kind := "PartialObjectMetadataList"
	if r.URL.Query().Has("watch") {
		kind = "PartialObjectMetadata"
	}
	r = r.Clone(r.Context())
	r.Header.Set("Accept", "application/json;as="+kind+";g=meta.k8s.io;v=v1")
	return m.RoundTripper.RoundTrip(r)
}

// askVersion asks a server for its release. By default every client with a token may ask.
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
		files := clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}
		if paths := filepath.SplitList(kubeconfig); len(paths) > 1 {
			files = clientcmd.ClientConfigLoadingRules{Precedence: paths}
		}
		loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&files, &clientcmd.ConfigOverrides{})
		config, err := loader.ClientConfig()
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

// unreachable is the operation under which all outages are noted while the server does not answer
// at all.
const unreachable = "reach the API server"

// Note records the outcome of a request. It logs one line when an operation begins to fail, and one
// when it works again. A failure after ctx ended does not count.
func (s *Server) Note(ctx context.Context, verb, resource, name string, err error) {
	if ctx.Err() != nil && err != nil {
		return // this process has stopped the request
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

// BackOff returns pauses between retries. Each is drawn from the upper half of a bound, which
// doubles up to most.
func (s *Server) BackOff(most time.Duration) wait.Backoff {
	return wait.Backoff{Duration: s.Timing.PauseMin / 2, Factor: 2, Jitter: 1, Cap: most / 2, Steps: math.MaxInt}
}

// Sleep waits for d. It returns false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// Around returns a random duration within ±25 % of d.
func Around(d time.Duration) time.Duration {
	return d*3/4 + rand.N(d/2+1)
}
