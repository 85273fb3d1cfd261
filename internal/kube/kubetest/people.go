// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// get answers with one object.
func (s *Server) get(w http.ResponseWriter, resource, namespace, name string) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	object, ok := s.Objects[resource+"/"+namespace+"/"+name]
	if !ok {
		Refuse(w, 404, "NotFound")
		return
	}
	Answer(w, object)
}

// selection returns what a list asks for. It knows the fields that the real server has for pods and
// Events.
func selection(ofLabels, ofFields, namespace string) (func(map[string]any) bool, error) {
	byLabel, err := labels.Parse(ofLabels)
	if err != nil {
		return nil, err
	}
	byField, err := fields.ParseSelector(ofFields)
	if err != nil {
		return nil, err
	}
	return func(o map[string]any) bool {
		text := func(path ...string) string {
			var at any = o
			for _, key := range path {
				in, _ := at.(map[string]any)
				at = in[key]
			}
			out, _ := at.(string)
			return out
		}
		has := labels.Set{}
		metadata, _ := o["metadata"].(map[string]any)
		marks, _ := metadata["labels"].(map[string]any)
		for key, value := range marks {
			has[key], _ = value.(string)
		}
		return byLabel.Matches(has) && (namespace == "" || text("metadata", "namespace") == namespace) &&
			byField.Matches(fields.Set{
				"metadata.name": text("metadata", "name"), "spec.nodeName": text("spec", "nodeName"),
				"status.phase":        text("status", "phase"),
				"involvedObject.uid":  text("involvedObject", "uid"),
				"involvedObject.name": text("involvedObject", "name"),
				"involvedObject.kind": text("involvedObject", "kind"),
			})
	}, nil
}

// log answers with the log of a container.
func (s *Server) log(w http.ResponseWriter, r *http.Request, namespace, name string) {
	key := namespace + "/" + name + "/" + r.URL.Query().Get("container")
	if r.URL.Query().Get("previous") == "true" {
		key += "/previous"
	}
	s.Mu.Lock()
	text, ok := s.Logs[key]
	s.Mu.Unlock()
	if !ok {
		Refuse(w, 400, "BadRequest")
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	io.WriteString(w, text)
}

// forward connects streams to what listens in a pod, as the kubelet does: a pair of streams for each
// connection, of which one carries errors. It speaks SPDY alone, so clients that try a WebSocket
// first have to fall back.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, namespace, name string) {
	if strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		Refuse(w, 400, "BadRequest")
		return
	}
	s.Mu.Lock()
	address := s.Ports[namespace+"/"+name]
	s.Mu.Unlock()
	if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
		return
	}
	streams := make(chan httpstream.Stream, 16)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(one httpstream.Stream, sent <-chan struct{}) error {
		streams <- one
		return nil
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	pairs := map[string]httpstream.Stream{} // error streams, by the ID of the request
	for {
		select {
		case <-conn.CloseChan():
			return
		case one := <-streams:
			id := one.Headers().Get("requestID")
			if one.Headers().Get("streamType") == "error" {
				pairs[id] = one
				continue
			}
			go join(one, pairs[id], address)
		}
	}
}

// join copies between a stream and an address until one of them ends.
func join(data, failed httpstream.Stream, address string) {
	defer data.Reset()
	to, err := net.Dial("tcp", address)
	if err != nil {
		io.WriteString(failed, "an error occurred forwarding: "+err.Error())
		failed.Close()
		return
	}
	defer to.Close()
	failed.Close()
	var both sync.WaitGroup
	both.Add(1)
	go func() {
		defer both.Done()
		io.Copy(data, to)
		data.Close()
	}()
	io.Copy(to, data)
	if half, ok := to.(*net.TCPConn); ok {
		half.CloseWrite()
	}
	both.Wait()
}
