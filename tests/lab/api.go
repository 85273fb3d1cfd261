// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

// api speaks to the node's API server as its administrator. Waiting looks ten
// times a second, which a kubectl for each look would be too heavy for.
type api struct {
	server, token string
	client        *http.Client
	// header is sent with each request.
	header http.Header
}

// statusError is what the API server answers when it refuses.
type statusError struct {
	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func (e *statusError) Error() string { return e.Message }

func isNotFound(err error) bool {
	var s *statusError
	return errors.As(err, &s) && s.Code == http.StatusNotFound
}

// newAPI reads a kubeconfig in kubectl's JSON form.
func newAPI(kubeconfig []byte) (*api, error) {
	var c struct {
		Clusters []struct {
			Cluster struct {
				Server string
				CA     []byte `json:"certificate-authority-data"`
			}
		}
		Users []struct{ User struct{ Token string } }
	}
	if err := json.Unmarshal(kubeconfig, &c); err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	if len(c.Clusters) != 1 || len(c.Users) != 1 {
		return nil, fmt.Errorf("read the kubeconfig: %d clusters and %d users, want one of each", len(c.Clusters), len(c.Users))
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(c.Clusters[0].Cluster.CA) {
		return nil, errors.New("read the kubeconfig: no authority in it")
	}
	return &api{
		server: c.Clusters[0].Cluster.Server,
		token:  c.Users[0].User.Token,
		client: &http.Client{
			Timeout:   10 * time.Second,
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, MaxIdleConnsPerHost: 16},
		},
	}, nil
}

// do sends in, if it is not nil, and decodes the answer into out: JSON, or as
// it is where out is a *[]byte, or not at all where it is nil.
func (a *api) do(ctx context.Context, method, path, kind string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode %s %s: %w", method, path, err)
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.server+path, body)
	if err != nil {
		return err
	}
	maps.Copy(req.Header, a.header)
	req.Header.Set("Authorization", "Bearer "+a.token)
	if in != nil {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := a.client.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) {
		// The port is held by the node's first process, whatever becomes of
		// the API server behind it.
		return fmt.Errorf("the node has ended: %w: %w", err, ErrNever)
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if resp.StatusCode >= 300 {
		refused := &statusError{Code: resp.StatusCode}
		if json.Unmarshal(data, refused) != nil || refused.Message == "" {
			refused.Message = fmt.Sprintf("%s: %.300s", resp.Status, data)
		}
		refused.Code = resp.StatusCode
		return fmt.Errorf("%s %s: %w", method, path, refused)
	}
	switch out := out.(type) {
	case nil:
		return nil
	case *[]byte:
		*out = data
		return nil
	default:
		if err := json.Unmarshal(data, out); err != nil {
			return fmt.Errorf("%s %s: read the answer: %w", method, path, err)
		}
		return nil
	}
}

// As asks for something in the name of a service account, as its pod on a node
// would ("" for a token that names no node). body is nil or a merge patch.
func (n *Node) As(ctx context.Context, namespace, account, onNode, method, path string, body any) error {
	other := *n.api
	other.header = http.Header{
		"Impersonate-User":  {"system:serviceaccount:" + namespace + ":" + account},
		"Impersonate-Group": {"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
	}
	if onNode != "" {
		other.header["Impersonate-Extra-Authentication.kubernetes.io%2fnode-Name"] = []string{onNode}
	}
	return other.do(ctx, method, path, mergePatch, body, nil)
}

// Read reads an object, or a list, by its path at the API server.
func (n *Node) Read(ctx context.Context, path string, into any) error {
	return n.api.get(ctx, path, into)
}

// watch follows what becomes of a list's objects since a version of it, until ctx
// ends: one JSON object for each change. Whoever reads it closes it.
func (a *api) watch(ctx context.Context, path, version string, query url.Values) (io.ReadCloser, error) {
	all := url.Values{"watch": {"1"}, "resourceVersion": {version}, "timeoutSeconds": {"3600"}}
	maps.Copy(all, query)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.server+path+"?"+all.Encode(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+a.token)
	resp, err := (&http.Client{Transport: a.client.Transport}).Do(req) // without the limit of other requests
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("watch %s: the API server answers %s", path, resp.Status)
	}
	return resp.Body, nil
}

const (
	jsonBody   = "application/json"
	mergePatch = "application/merge-patch+json"
)

func (a *api) get(ctx context.Context, path string, out any) error {
	return a.do(ctx, http.MethodGet, path, "", nil, out)
}

func (a *api) create(ctx context.Context, path string, in any) error {
	return a.do(ctx, http.MethodPost, path, jsonBody, in, nil)
}

func (a *api) patch(ctx context.Context, path string, in any) error {
	return a.do(ctx, http.MethodPatch, path, mergePatch, in, nil)
}

// remove deletes; that there is nothing to delete is no error.
func (a *api) remove(ctx context.Context, path string) error {
	if err := a.do(ctx, http.MethodDelete, path, "", nil, nil); err != nil && !isNotFound(err) {
		return err
	}
	return nil
}
