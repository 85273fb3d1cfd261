// SPDX-License-Identifier: Apache-2.0

package pluginkube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // credentials of kubeconfigs that need a program's help
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"example.com/gpu-agent/internal/kube"
)

// Options say how to connect. The domains are required; the rest may be empty.
type Options struct {
	// Kubeconfig, Context and Namespace are kubectl's flags of these names. Empty means what kubectl
	// would take: $KUBECONFIG or ~/.kube/config, its current context, and the context's namespace.
	Kubeconfig, Context, Namespace string
	// As is a user to act as, and AsGroups are groups.
	As       string
	AsGroups []string
	// Domain is the prefix of the agent's labels and the group of GPUNodes, and ResourceDomain the
	// domain of its resources.
	Domain, ResourceDomain string
	// AgentNamespace is where the agent's pods are. Empty means "gpu-agent".
	AgentNamespace string
	// Timeout is the limit of one request. Zero means 15 seconds.
	Timeout time.Duration
}

// Client asks an API server as one person.
type Client struct {
	o         Options
	config    *rest.Config
	web       *http.Client
	api       dynamic.Interface
	namespace string
}

// The resources that the plugin reads besides kube.Nodes and kube.Pods.
var (
	eventsResource = schema.GroupVersionResource{Version: "v1", Resource: "events"}
	jobsResource   = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}
	claims         = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"}
	configMaps     = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	// workloads are in the two versions that Kueue's releases serve, the newer one first.
	workloads = []schema.GroupVersionResource{
		{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: "workloads"},
		{Group: "kueue.x-k8s.io", Version: "v1beta1", Resource: "workloads"}}
)

// Open reads the kubeconfig and prepares the connection. It makes no request.
func Open(o Options) (*Client, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.Kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: o.Context}
	overrides.Context.Namespace = o.Namespace
	overrides.AuthInfo.Impersonate, overrides.AuthInfo.ImpersonateGroups = o.As, o.AsGroups
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	config, err := loaded.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	namespace, _, err := loaded.Namespace()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	config.UserAgent, config.QPS, config.Burst = "kubectl-gpu", 50, 100
	config.WarningHandler = rest.NoWarnings{}
	o.Timeout = cmp.Or(o.Timeout, 15*time.Second)
	o.AgentNamespace = cmp.Or(o.AgentNamespace, "gpu-agent")
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("prepare the API client for %s: %w", config.Host, err)
	}
	api, err := dynamic.NewForConfigAndClient(config, web)
	if err != nil {
		return nil, fmt.Errorf("prepare the API client for %s: %w", config.Host, err)
	}
	return &Client{o, config, web, api, cmp.Or(namespace, metav1.NamespaceDefault)}, nil
}

// Namespace returns the namespace of names without one.
func (c *Client) Namespace() string { return c.namespace }

// Domain and ResourceDomain return those of the options.
func (c *Client) Domain() string         { return c.o.Domain }
func (c *Client) ResourceDomain() string { return c.o.ResourceDomain }

// ErrNotFound means that there is no such object.
var ErrNotFound = errors.New("not found")

// get reads one object. The error wraps ErrNotFound if there is none.
func (c *Client) get(
	ctx context.Context, of schema.GroupVersionResource, namespace, name string,
) (*unstructured.Unstructured, error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	o, err := c.in(of, namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%s %s: %w", of.Resource, named(namespace, name), ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("get %s %s: %w", of.Resource, named(namespace, name), err)
	}
	return o, nil
}

func (c *Client) in(of schema.GroupVersionResource, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return c.api.Resource(of)
	}
	return c.api.Resource(of).Namespace(namespace)
}

func named(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// selectors choose the objects of a list, in kubectl's syntax.
type selectors struct{ labels, fields string }

// most is how many objects a list may have: more than a cluster has nodes, and more pods than a Job
// that a person asks about.
const most = 20_000

// list reads all objects that are chosen, in pages.
func (c *Client) list(
	ctx context.Context, of schema.GroupVersionResource, namespace string, s selectors,
) ([]unstructured.Unstructured, error) {
	var out []unstructured.Unstructured
	for o := (metav1.ListOptions{LabelSelector: s.labels, FieldSelector: s.fields, Limit: kube.Page}); ; {
		bounded, cancel := context.WithTimeout(ctx, c.o.Timeout)
		page, err := c.in(of, namespace).List(bounded, o)
		cancel()
		if apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("%s: %w", of.Resource, ErrNotFound)
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", of.Resource, err)
		}
		out = append(out, page.Items...)
		if o.Continue = page.GetContinue(); o.Continue == "" || len(out) > most {
			return out, nil
		}
	}
}

// Object reads one object as it is, for a bundle: a "gpunode", "node", "pod" or "configmap".
func (c *Client) Object(ctx context.Context, kind, namespace, name string) (map[string]any, error) {
	of, ok := map[string]schema.GroupVersionResource{"gpunode": kube.GPUNodes(c.o.Domain), "node": kube.Nodes,
		"pod": kube.Pods, "configmap": configMaps}[kind]
	if !ok {
		return nil, fmt.Errorf("there are no objects %q", kind)
	}
	o, err := c.get(ctx, of, namespace, name)
	if err != nil {
		return nil, err
	}
	unstructured.RemoveNestedField(o.Object, "metadata", "managedFields")
	return o.Object, nil
}

// ServerVersion asks the server for its release.
func (c *Client) ServerVersion(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	response, err := c.ask(ctx, "version", nil)
	if err != nil {
		return "", fmt.Errorf("ask for the server's version: %w", err)
	}
	defer response.Close()
	var said struct{ GitVersion string }
	if err := json.NewDecoder(io.LimitReader(response, 1<<16)).Decode(&said); err != nil {
		return "", fmt.Errorf("read the server's version: %w", err)
	}
	return said.GitVersion, nil
}

// ask sends a GET for something that is no object, and returns the body of the answer. The caller
// closes it.
func (c *Client) ask(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	base, _, err := rest.DefaultServerUrlFor(c.config)
	if err != nil {
		return nil, err
	}
	at := base.JoinPath(path)
	at.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	response, err := c.web.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(response.Body, 4<<10))
	var said metav1.Status
	if json.Unmarshal(body, &said) == nil && said.Message != "" {
		return nil, &apierrors.StatusError{ErrStatus: said}
	}
	return nil, fmt.Errorf("%s: %.200s", response.Status, body)
}

// LogOptions choose a part of a log.
type LogOptions struct {
	Container string
	// Previous means the log of the run before.
	Previous bool
	// Follow means to go on with new lines until the context ends.
	Follow bool
	// Tail is the number of last lines; 0 means all. Since leaves out what is older; 0 means nothing.
	Tail  int
	Since time.Duration
	// Most is the largest number of bytes; 0 means no bound.
	Most int64
}

// Log returns the log of a container. The caller closes it.
func (c *Client) Log(ctx context.Context, namespace, pod string, o LogOptions) (io.ReadCloser, error) {
	query := url.Values{"container": {o.Container}}
	if o.Container == "" {
		query.Del("container")
	}
	for name, on := range map[string]bool{"previous": o.Previous, "follow": o.Follow} {
		if on {
			query.Set(name, "true")
		}
	}
	if o.Tail > 0 {
		query.Set("tailLines", strconv.Itoa(o.Tail))
	}
	if o.Since > 0 {
		query.Set("sinceSeconds", strconv.Itoa(int(max(1, o.Since/time.Second))))
	}
	if o.Most > 0 {
		query.Set("limitBytes", strconv.FormatInt(o.Most, 10))
	}
	body, err := c.ask(ctx, "api/v1/namespaces/"+url.PathEscape(namespace)+"/pods/"+url.PathEscape(pod)+"/log", query)
	if err != nil {
		return nil, fmt.Errorf("read the log of pod %s: %w", named(namespace, pod), err)
	}
	return body, nil
}

// CreatePod creates a pod.
func (c *Client) CreatePod(ctx context.Context, pod *corev1.Pod) error {
	pod.APIVersion, pod.Kind = "v1", "Pod"
	return c.create(ctx, kube.Pods, pod)
}

// CreateClaim creates a ResourceClaim.
func (c *Client) CreateClaim(ctx context.Context, claim *resourcev1.ResourceClaim) error {
	claim.APIVersion, claim.Kind = "resource.k8s.io/v1", "ResourceClaim"
	return c.create(ctx, claims, claim)
}

// create creates an object that says what it is.
func (c *Client) create(ctx context.Context, of schema.GroupVersionResource, object metav1.Object) error {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err == nil {
		_, err = c.in(of, object.GetNamespace()).Create(ctx, &unstructured.Unstructured{Object: fields},
			metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("create %s %s: %w", of.Resource, named(object.GetNamespace(), object.GetName()), err)
	}
	return nil
}

// DeletePod deletes a pod. One that does not exist is no error.
func (c *Client) DeletePod(ctx context.Context, namespace, name string) error {
	return c.delete(ctx, kube.Pods, namespace, name)
}

// DeleteClaim deletes a ResourceClaim. One that does not exist is no error.
func (c *Client) DeleteClaim(ctx context.Context, namespace, name string) error {
	return c.delete(ctx, claims, namespace, name)
}

func (c *Client) delete(ctx context.Context, of schema.GroupVersionResource, namespace, name string) error {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	err := c.in(of, namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s %s: %w", of.Resource, named(namespace, name), err)
	}
	return nil
}

// PodPhase returns the phase of a pod.
func (c *Client) PodPhase(ctx context.Context, namespace, name string) (string, error) {
	o, err := c.get(ctx, kube.Pods, namespace, name)
	if err != nil {
		return "", err
	}
	phase, _, err := unstructured.NestedString(o.Object, "status", "phase")
	return phase, err
}
