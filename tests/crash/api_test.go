// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	resource "k8s.io/api/resource/v1"

	"example.com/gpu-agent/tests/plane"
)

type fields = map[string]any

const (
	slicesPath = "/apis/resource.k8s.io/v1/resourceslices"
	namespace  = "work"
	claimsPath = "/apis/resource.k8s.io/v1/namespaces/" + namespace + "/resourceclaims"
)

// atServer are the tests at an API server, which they share: one after the other, and the last
// ends it.
const atServer = 2

// shared is that server. Its tests do not run at the same time.
var shared struct {
	server *plane.Server
	users  int
	ends   []func()
}

// outliving is a test whose server goes on after it.
type outliving struct{ testing.TB }

func (outliving) Cleanup(f func()) { shared.ends = append(shared.ends, f) }

// Logf is called when the test is long over.
func (outliving) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (o outliving) TempDir() string {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		o.Fatal(err)
	}
	o.Cleanup(func() { _ = os.RemoveAll(dir) }) // a program that was ended may just make a file there
	return dir
}

// startPlane starts a real API server, or returns the one that another test has started. The
// calling goroutine, the test's, keeps its thread: a process ends with the thread that
// started it, and a tracer on that thread would take it for its own.
func startPlane(t *testing.T) *plane.Server {
	t.Helper()
	runtime.LockOSThread()
	if shared.server == nil {
		s := plane.Start(outliving{t})
		if err := s.Do(t, nil, http.MethodPost, "/api/v1/namespaces", plane.JSON, fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": namespace}}, nil); err != nil {
			t.Fatal(err)
		}
		shared.server = s
	}
	t.Cleanup(func() {
		if shared.users++; shared.users == atServer {
			endPlane()
		}
	})
	return shared.server
}

// endPlane ends the shared server, if there is one.
func endPlane() {
	for len(shared.ends) > 0 {
		last := len(shared.ends) - 1
		end := shared.ends[last]
		shared.ends = shared.ends[:last]
		end()
	}
	shared.server = nil
}

// door is the way from one node's agent to the API server. What the agent changes there
// are changes as those of its files are: it may be killed before a request goes out, and
// when the server has done it and the answer is on its way.
type door struct {
	server *http.Server
	served chan error
	url    string
}

// changes says which requests change what other programs go by, of those to paths that
// count.
func changes(r *http.Request, counts func(path string) bool) bool {
	return r.Method != http.MethodGet && r.URL.Query().Get("dryRun") == "" && counts(r.URL.Path)
}

// ofClaims are the paths of ResourceSlices and claims.
func ofClaims(path string) bool {
	return strings.HasPrefix(path, slicesPath) || strings.Contains(path, "/resourceclaims/")
}

// doorway is what a door does with requests.
type doorway struct {
	// as is in whose name they go on; empty is root's.
	as http.Header
	// counts says which paths do. meets is told of each change there, and says whether
	// whoever made it is no more; sees, if set, is told before.
	counts func(path string) bool
	sees   func(*http.Request)
	meets  func(change) bool
}

// openDoor serves on a port of loopback.
func openDoor(s *plane.Server, w doorway) (*door, error) {
	counts, sees, meets := w.counts, w.sees, w.meets
	to, err := url.Parse(s.URL)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Header.Set("Authorization", "Bearer "+s.Token)
			for key, values := range w.as {
				r.Out.Header[key] = values
			}
		},
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, // see plane
		// Watches are told at once.
		FlushInterval: -1,
		// A killed agent's requests end in the middle.
		ErrorLog: log.New(io.Discard, "", 0),
		ModifyResponse: func(r *http.Response) error {
			if changes(r.Request, counts) && meets(change{"done " + strings.ToLower(r.Request.Method), r.Request.URL.Path}) {
				return errors.New("nobody hears it")
			}
			return nil
		},
	}
	d := &door{url: "http://" + l.Addr().String(), served: make(chan error, 1)}
	d.server = &http.Server{ErrorLog: proxy.ErrorLog, Handler: http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		if changes(r, counts) {
			if sees != nil {
				sees(r)
			}
			if meets(change{strings.ToLower(r.Method), r.URL.Path}) {
				panic(http.ErrAbortHandler)
			}
		}
		proxy.ServeHTTP(to, r)
	})}
	go func() { d.served <- d.server.Serve(l) }()
	return d, nil
}

func (d *door) close() error {
	err := d.server.Close()
	if served := <-d.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// kubeconfig writes how to get through the door, and returns the file's path.
func (d *door) kubeconfig(dir string) (string, error) {
	text, err := json.Marshal(fields{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": []fields{{"name": "c", "context": fields{"cluster": "c", "user": "u"}}},
		"clusters": []fields{{"name": "c", "cluster": fields{"server": d.url}}},
		"users":    []fields{{"name": "u", "user": fields{}}}})
	path := filepath.Join(dir, "kubeconfig")
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	return path, err
}

// wipe deletes the node's slices, as its kubelet does at each start.
func (c *claimSide) wipe() {
	if err := c.Do(c.t, nil, http.MethodDelete, slicesPath+"?fieldSelector=spec.nodeName%3D"+c.name, plane.JSON, fields{}, nil); err != nil && c.t.Context().Err() == nil {
		c.node.breaks("delete the slices as a kubelet does: %v", err)
	}
}

// slices are the node's at the API server.
func (c *claimSide) slices() ([]resource.ResourceSlice, error) {
	var list resource.ResourceSliceList
	err := c.Do(c.t, nil, http.MethodGet, slicesPath+"?fieldSelector=spec.nodeName%3D"+c.name, "", nil, &list)
	return list.Items, err
}

// allocate makes a claim and gives it what is asked for, as the scheduler does, when all of
// that is in the slices without a taint.
func (c *claimSide) allocate(ctx context.Context, p *claimPod) error {
	var requests, results []fields
	if err := poll(ctx, "devices that can be allocated", func() error {
		all, err := c.slices()
		if err != nil {
			return err
		}
		requests, results = nil, nil
		for _, a := range p.asks {
			result := c.result(all, a)
			if result == nil {
				return fmt.Errorf("no slice of %s has %s without a taint", c.name, c.device(a.gpu, a.suffix()))
			}
			requests = append(requests, fields{"name": a.request, "exactly": fields{"deviceClassName": "any"}})
			results = append(results, result)
		}
		return nil
	}); err != nil {
		return err
	}
	var made struct{ Metadata struct{ UID string } }
	if err := c.Do(c.t, nil, http.MethodPost, claimsPath, plane.JSON, fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": p.claim.Name},
		"spec": fields{"devices": fields{"requests": requests}}}, &made); err != nil {
		return err
	}
	p.claim.Uid = made.Metadata.UID
	for _, r := range results {
		if r["consumedCapacity"] != nil {
			r["shareID"] = p.claim.Uid // any UUID
		}
	}
	return c.Do(c.t, nil, http.MethodPatch, claimsPath+"/"+p.claim.Name+"/status", plane.Merge, fields{"status": fields{
		"reservedFor": []fields{{"resource": "pods", "name": p.Name, "uid": p.UID}},
		"allocation": fields{"devices": fields{"results": results},
			"nodeSelector": fields{"nodeSelectorTerms": []fields{{"matchFields": []fields{{"key": "metadata.name", "operator": "In", "values": []string{c.name}}}}}}}}}, nil)
}

// result is what a request is allocated, nil where there is no such device for anybody new.
func (c *claimSide) result(all []resource.ResourceSlice, a ask) fields {
	for i := range all {
		for _, d := range all[i].Spec.Devices {
			if d.Name != c.device(a.gpu, a.suffix()) || len(d.Taints) > 0 {
				continue
			}
			r := fields{"request": a.request, "driver": draDriver, "pool": all[i].Spec.Pool.Name, "device": d.Name}
			if a.gib > 0 {
				r["consumedCapacity"] = fields{"memory": fmt.Sprintf("%dGi", a.gib)}
			}
			return r
		}
	}
	return nil
}

// remove removes a claim, as is done when its pod has ended.
func (c *claimSide) remove(p *claimPod) error {
	return c.Do(c.t, nil, http.MethodDelete, claimsPath+"/"+p.claim.Name, "", nil, nil)
}
