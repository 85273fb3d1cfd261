// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/flowcontrol"

	"example.com/gpu-agent/internal/kube"
)

var (
	configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	events     = schema.GroupVersionResource{Version: "v1", Resource: "events"}

	resourceSlices = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}
	resourceClaims = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"}
)

// Options configure a Client.
type Options struct {
	// Options are those of the connection. WatchNode reports only annotations and conditions below
	// their Domain. Events carry the Domain in the name of their reporter.
	kube.Options
	// NodeName is the name of the Node that the agent runs on. Required.
	NodeName string
	// ResourceDomain is the prefix of the agent's resources. LowerAllocatable writes only resources
	// below it. Empty means Domain.
	ResourceDomain string
	// StartupTaint is the key of the taint that RemoveStartupTaint removes. Empty means none.
	StartupTaint string
	// Allocatable, if set, is called with the amount of each extended resource that the scheduler
	// may give out, each time that WatchNode receives the Node. It must not block.
	Allocatable func(map[string]int64)
}

// Client is a client of the API server for one node. Its methods may be called from several
// goroutines.
type Client struct {
	*apiServer
	*ourNode
	*ourSlices
	*ourGPUNode
}

// apiServer is the connection that all parts of a Client share. It has only the dynamic client, whose
// objects are read into the types of k8s.io/api: the typed clients cost 18 MB.
type apiServer struct {
	server  *kube.Server
	options Options
	timing  timing
}

// timing holds the times of a Client; tests shorten them.
type timing struct {
	// recheck is the pause between checks of admission policies that are all in force.
	recheck time.Duration
	// claimPage is the longest pause that Claims makes for each page that is left.
	claimPage time.Duration
}

// New prepares a client. It reads the credentials but makes no request, so it succeeds while the
// API server is unreachable. It fails if an option is missing or not valid, or if the credentials
// cannot be read.
func New(o Options) (*Client, error) {
	if o.NodeName == "" {
		return nil, errors.New("the node's name is empty: set --node-name, or NODE_NAME from spec.nodeName")
	}
	if wrong := validation.IsQualifiedName(o.StartupTaint); o.StartupTaint != "" && wrong != nil {
		return nil, fmt.Errorf("%q is not the key of a taint: %s", o.StartupTaint, strings.Join(wrong, "; "))
	}
	// The agent makes few requests. But when a GPU fails, each of its pods gets an Event, and a
	// node full of new pods makes two requests for each claim. These must not wait. The limit
	// guards against a bug of the agent.
	server, err := kube.Connect(o.Options, 20)
	if err != nil {
		return nil, err
	}
	o.Options = server.Options
	if o.ResourceDomain == "" {
		o.ResourceDomain = o.Domain
	}
	up := &apiServer{server, o, timing{recheck: time.Hour, claimPage: 50 * time.Millisecond}}
	node := &ourNode{apiServer: up, writes: flowcontrol.NewTokenBucketRateLimiter(1.0/3, 50)}
	return &Client{
		apiServer:  up,
		ourNode:    node,
		ourSlices:  &ourSlices{ourNode: node, unkept: map[string]exchange{}},
		ourGPUNode: &ourGPUNode{ourNode: node},
	}, nil
}
