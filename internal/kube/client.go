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
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/gpunode"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/flowcontrol"
)

var (
	configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	nodes      = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	events     = schema.GroupVersionResource{Version: "v1", Resource: "events"}
	pods       = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	leases     = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}

	resourceSlices = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}
	resourceClaims = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"}
)

// Rule is a permission that the package needs, in the words of RBAC.
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

// Rules is every permission that a Client uses. A manifest may narrow the
// rule for ConfigMaps by resource name, since each list and watch selects one
// object by name, and the one for resourceclaims/driver, where the name is a DRA
// driver's; it cannot narrow the one for Nodes, which differs per node.
var Rules = []Rule{
	{Resource: "configmaps", Verbs: []string{"list", "watch"},
		Why: "follow the partitions"},
	{Resource: "events", Verbs: []string{"create", "patch"}, Cluster: true,
		Why: "report on the node, whose Events are in the namespace default, and on pods in theirs"},
	{Resource: "nodes", Verbs: []string{"list", "patch", "watch"}, Cluster: true,
		Why: "follow the label that chooses a partition; write the outcome"},
	{Resource: "nodes/status", Verbs: []string{"patch"}, Cluster: true,
		Why: "say by conditions of its own how the node's GPUs are; lower what the scheduler may give out of its own resources"},
	{APIGroup: manifestDomain, Resource: gpunode.Plural, Verbs: []string{"create", "delete", "list", "patch", "watch"}, Cluster: true,
		Why: "tell schedulers and people what the node's GPUs have left; make and follow that object, and take it away with the agent"},
	{APIGroup: manifestDomain, Resource: gpunode.Plural + "/status", Verbs: []string{"patch"}, Cluster: true,
		Why: "the same: all that the object says is its status"},
	{APIGroup: "resource.k8s.io", Resource: "resourceslices", Verbs: []string{"list"}, Cluster: true,
		Why: "tell which GPU a device is that another DRA driver has prepared for a pod of this node"},
	{APIGroup: "resource.k8s.io", Resource: "resourceslices", Verbs: []string{"create", "delete", "update", "watch"}, Cluster: true, Component: "dra",
		Why: "publish what the node has for dynamic resource allocation"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims", Verbs: []string{"get", "list"}, Cluster: true, Component: "dra",
		Why: "learn which devices the scheduler gave a claim; find the claims of the node again after a restart"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims/status", Verbs: []string{"patch"}, Cluster: true, Component: "dra",
		Why: "say in a claim which instance and cap it has; alone it allows nothing"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims/driver", Verbs: []string{"associated-node:patch"}, Cluster: true, Component: "dra",
		Why: "the same, of the driver's own devices in claims of the agent's node"},
	{Resource: "pods/eviction", Verbs: []string{"create"}, Cluster: true, Component: "evict",
		Why: "end pods that go over their memory caps again and again, or whose claims can never be prepared, where that is on"},
}

// PlacerRules is every permission that a [Cluster] uses. They are another account's than the
// agents', and a manifest grants them in a part of its own. It may narrow the first rule for
// leases by the Lease's name.
var PlacerRules = []Rule{
	{Resource: "nodes", Verbs: []string{"list", "patch", "watch"}, Cluster: true,
		Why: "know which nodes are ready; make the scheduler look again at one where room has appeared, by an annotation"},
	{Resource: "pods", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which devices pods have, and which pods are still to get some"},
	{APIGroup: manifestDomain, Resource: gpunode.Plural, Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know what each node's GPUs have left"},
	{APIGroup: "coordination.k8s.io", Resource: leases.Resource, Verbs: []string{"get", "update"},
		Why: "agree on one of several processes that answers"},
	{APIGroup: "coordination.k8s.io", Resource: leases.Resource, Verbs: []string{"create"},
		Why: "the same: make that Lease; RBAC cannot narrow this by its name"},
}

// LiqoRules is what a [Cluster] needs besides for the placer's door for Liqo.
var LiqoRules = []Rule{
	{APIGroup: "authentication.liqo.io", Resource: "resourceslices", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know what other clusters ask for, and what they have been granted"},
	{APIGroup: "authentication.liqo.io", Resource: "resourceslices/status", Verbs: []string{"update"}, Cluster: true,
		Why: "say what they are granted"},
	{APIGroup: "authentication.liqo.io", Resource: "tenants", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which clusters are drained or cordoned"},
}

// KueueRules is what a [Cluster] needs besides for the placer's door for Kueue.
var KueueRules = []Rule{
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which workloads wait for an answer, and for which room is held"},
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads", Verbs: []string{"patch"}, Cluster: true,
		Why: "keep them from flavors that have no room for them, by an annotation"},
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads/status", Verbs: []string{"update"}, Cluster: true,
		Why: "answer them"},
	{APIGroup: "kueue.x-k8s.io", Resource: "resourceflavors", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know on which nodes a workload may run"},
	{APIGroup: "kueue.x-k8s.io", Resource: "admissionchecks", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which checks are its own"},
	{APIGroup: "kueue.x-k8s.io", Resource: "admissionchecks/status", Verbs: []string{"update"}, Cluster: true,
		Why: "say that they are answered"},
}

// Options configure a Client.
type Options struct {
	// Kubeconfig is a file's path. Empty means the pod's own service account.
	Kubeconfig string
	// NodeName is the Node that the agent runs on. Required, but for a Cluster.
	NodeName string
	// Domain is the agent's label prefix, for example "example.com". Required.
	// WatchNode reports annotations and conditions below it alone, and Events
	// carry it in the name of their reporter.
	Domain string
	// ResourceDomain is the prefix of the agent's resources. LowerAllocatable writes
	// those below it alone. Empty means Domain.
	ResourceDomain string
	// StartupTaint is the key of the taint that RemoveStartupTaint takes off the Node.
	// Empty is none.
	StartupTaint string
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
	// Refused, if set, is told when the server will not let the agent follow an
	// object (401, 403), and with nil when it does again; request is like "list
	// configmaps gpu-agent/gpu-partitions". Watches report nothing of the object
	// meanwhile. It must not block.
	Refused func(request string, err error)
	// Allocatable, if set, is told how much the scheduler may give out of each extended
	// resource, by every word of the server about the Node that WatchNode follows. It
	// must not block.
	Allocatable func(map[string]int64)
	// EventDone, if set, is told what became of every Event. It must not block.
	EventDone func(EventOutcome)
}

// Client speaks to one API server for one node. Its methods may be called from
// several goroutines.
type Client struct {
	*apiServer
	*ourNode
	*ourSlices
	*ourGPUNode
	*eventQueue
}

// apiServer is the API server as every part of a Client asks it.
type apiServer struct {
	options Options
	log     *slog.Logger
	api     dynamic.Interface
	// serverVersion is the server's word for its release, such as "v1.36.3".
	serverVersion func(context.Context) (string, error)
	timing        timing
	now           func() time.Time
	// ration is the log for what an unreachable server, or a storm of Events, repeats.
	ration *brief.Ration

	mu sync.Mutex // guards what follows
	// failing has the start of each outage, by operation.
	failing map[string]time.Time
	// refused has the requests of which Refused was told.
	refused map[string]bool
}

// timing is apart so that tests need not wait.
type timing struct {
	relist time.Duration
	// recheck is how often admission policies that are in force are tried.
	recheck time.Duration
	// watch is how long the server is asked to keep one watch open.
	watch time.Duration
	// grace is how much longer than watch an unresponsive one is kept.
	grace time.Duration
	// request bounds every request that is not a watch.
	request time.Duration
	// lived is how long a watch without an event must have stood for the next
	// attempt to count as the first.
	lived              time.Duration
	pauseMin, pauseMax time.Duration
	// An Event repeated within quiet of its last write is only counted; within
	// window, its count is written; later, it is a new Event.
	quiet, window time.Duration
	// claimPage is for how long Claims may pause, for each page that is left.
	claimPage time.Duration
}

// New prepares a client. It reads the credentials but makes no request, so it
// succeeds while the API server is unreachable.
func New(o Options) (*Client, error) {
	if o.NodeName == "" {
		return nil, errors.New("the node's name is empty: set --node-name, or NODE_NAME from spec.nodeName")
	}
	// Requests are few, but when a GPU fails each of its pods gets an Event, and a node
	// full of new pods has two requests for each of their claims, which must not wait;
	// the limit is there for a mistake of ours.
	up, err := prepare(o, 20)
	if err != nil {
		return nil, err
	}
	node := &ourNode{apiServer: up, writes: flowcontrol.NewTokenBucketRateLimiter(1.0/3, 50)}
	return &Client{
		apiServer:  up,
		ourNode:    node,
		ourSlices:  &ourSlices{ourNode: node, unkept: map[string]exchange{}},
		ourGPUNode: &ourGPUNode{ourNode: node},
		eventQueue: &eventQueue{
			apiServer: up,
			// One fault may concern every pod of a node, 110 by default.
			queue:  make(chan event, 256),
			onNode: flowcontrol.NewTokenBucketRateLimiter(1.0/30, 25),
			onPods: flowcontrol.NewTokenBucketRateLimiter(1.0/10, 120),
		},
	}, nil
}

// prepare is what clients of all kinds begin with. So many requests a second are sent, after
// the first 300.
func prepare(o Options, perSecond float32) (*apiServer, error) {
	switch {
	case o.Domain == "":
		return nil, errors.New("the domain is empty: set --domain")
	case o.Logger == nil:
		return nil, errors.New("kube: no logger")
	}
	if wrong := validation.IsQualifiedName(o.StartupTaint); o.StartupTaint != "" && wrong != nil {
		return nil, fmt.Errorf("%q is not the key of a taint: %s", o.StartupTaint, strings.Join(wrong, "; "))
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
	if o.ResourceDomain == "" {
		o.ResourceDomain = o.Domain
	}
	if o.Relist <= 0 {
		o.Relist = 10 * time.Minute
	}
	up := &apiServer{
		options:       o,
		log:           o.Logger,
		api:           api,
		serverVersion: func(ctx context.Context) (string, error) { return askVersion(ctx, config, web) },
		timing: timing{
			relist: o.Relist, recheck: time.Hour, watch: 5 * time.Minute, grace: 30 * time.Second,
			request: 30 * time.Second, lived: 5 * time.Second,
			pauseMin: 200 * time.Millisecond, pauseMax: 30 * time.Second,
			quiet: time.Minute, window: 10 * time.Minute, claimPage: 50 * time.Millisecond,
		},
		now:     time.Now,
		failing: map[string]time.Time{},
		refused: map[string]bool{},
	}
	up.ration = brief.NewRation(up.log, func() time.Time { return up.now() }, time.AfterFunc)
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

// note logs outages: one line when an operation begins to fail, one when it works
// again, none between.
func (s *apiServer) note(ctx context.Context, verb, resource, name string, err error) {
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
				s.log.Info("API server answers again", "operation", op, "after", s.now().Sub(since).Round(time.Millisecond))
			}
		}
		return
	}
	if s.options.Failed != nil {
		s.options.Failed(verb, resource)
	}
	if !answered(err) {
		operation = unreachable
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.failing[operation]; ok {
		return
	}
	s.failing[operation] = s.now()
	s.log.Warn("API server request fails; retrying", "operation", operation, "err", err)
}

// backOff draws each pause from the upper half of a bound that doubles up to most.
func (s *apiServer) backOff(most time.Duration) wait.Backoff {
	return wait.Backoff{Duration: s.timing.pauseMin / 2, Factor: 2, Jitter: 1, Cap: most / 2, Steps: math.MaxInt}
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// around draws from ±25 % of d.
func around(d time.Duration) time.Duration {
	return d*3/4 + rand.N(d/2+1)
}
