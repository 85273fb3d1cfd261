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
	// Options are what every client has. WatchNode reports annotations and conditions below
	// their Domain alone, and Events carry it in the name of their reporter.
	kube.Options
	// NodeName is the Node that the agent runs on. Required.
	NodeName string
	// ResourceDomain is the prefix of the agent's resources. LowerAllocatable writes
	// those below it alone. Empty means Domain.
	ResourceDomain string
	// StartupTaint is the key of the taint that RemoveStartupTaint takes off the Node.
	// Empty is none.
	StartupTaint string
	// Allocatable, if set, is told how much the scheduler may give out of each extended
	// resource, by every word of the server about the Node that WatchNode follows. It
	// must not block.
	Allocatable func(map[string]int64)
}

// Client speaks to one API server for one node. Its methods may be called from
// several goroutines.
type Client struct {
	*apiServer
	*ourNode
	*ourSlices
	*ourGPUNode
}

// apiServer is the API server as every part of a Client asks it.
type apiServer struct {
	server  *kube.Server
	options Options
	timing  timing
}

// timing is apart so that tests need not wait.
type timing struct {
	// recheck is how often admission policies that are in force are tried.
	recheck time.Duration
	// claimPage is for how long Claims may pause, for each page that is left.
	claimPage time.Duration
}

// New prepares a client. It reads the credentials but makes no request, so it
// succeeds while the API server is unreachable.
func New(o Options) (*Client, error) {
	if o.NodeName == "" {
		return nil, errors.New("the node's name is empty: set --node-name, or NODE_NAME from spec.nodeName")
	}
	if wrong := validation.IsQualifiedName(o.StartupTaint); o.StartupTaint != "" && wrong != nil {
		return nil, fmt.Errorf("%q is not the key of a taint: %s", o.StartupTaint, strings.Join(wrong, "; "))
	}
	// Requests are few, but when a GPU fails each of its pods gets an Event, and a node
	// full of new pods has two requests for each of their claims, which must not wait;
	// the limit is there for a mistake of ours.
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
