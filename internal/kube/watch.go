// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
)

// Target selects what Follow follows: one object by its name, several by fields, or all of a
// resource.
type Target struct {
	Resource schema.GroupVersionResource
	// Namespace is empty for a resource without namespaces.
	Namespace, Name string
	// Chosen, if set, selects several objects by their fields, in place of one by its name.
	Chosen fields.Set
	// All, if set, receives each object of the whole resource.
	All *Census
	// Metadata is true if the server is asked for the objects' metadata alone, which is a small part of a
	// pod. The objects then lack all else.
	Metadata bool
	// Grant, if set, names what grants the right to follow the target, for one that not every cluster
	// grants. A refusal is then logged with it, and not reported to Options.Refused.
	Grant string
	// Missing, if set, is called if the server does not know the resource or does not allow the
	// request. Such an error is then not logged or reported to Options.Refused. Follow tries again
	// with growing pauses, up to Options.Relist: an API server that has just started refuses what it allows
	// a moment later.
	Missing func(error)
	// Listed, if set, is called before each call with what a list has found, but for a whole resource. Versions
	// that were seen before tell nothing any longer: the server may have been put back to a backup.
	Listed func()
}

// in returns the client for the target.
func (s *Server) in(t Target) dynamic.ResourceInterface {
	api := s.API
	if t.Metadata {
		api = s.metadata
	}
	if t.Namespace == "" {
		return api.Resource(t.Resource)
	}
	return api.Resource(t.Resource).Namespace(t.Namespace)
}

func (t Target) String() string {
	if t.All != nil {
		return cmp.Or(t.All.Of, "of the cluster")
	}
	if t.Chosen != nil {
		return t.Selector()
	}
	if t.Namespace == "" {
		return t.Name
	}
	return t.Namespace + "/" + t.Name
}

// Selector returns the target's field selector; empty selects all.
func (t Target) Selector() string {
	if t.All != nil {
		return t.All.Chosen
	}
	if t.Chosen != nil {
		return fields.SelectorFromSet(t.Chosen).String()
	}
	return fields.OneTermEqualSelector("metadata.name", t.Name).String()
}

// Reasons to list again that are not failures of the server.
var (
	errPeriod = errors.New("time to list again")
	// errShort means that the stream ended at once and was empty. The client library also returns
	// such a stream for a connection that timed out. So only a list can show whether the server
	// answers.
	errShort = errors.New("watch ended at once")
)

// Follow calls see with the object after every list and every event, and with nil if it does not
// exist. It returns when ctx ends, with the error of ctx, and for no other reason.
//
// For several objects (Chosen) it calls see with the object of each event, and with nil after each
// list. For a whole resource it calls the functions of the Census, and not see.
func (s *Server) Follow(ctx context.Context, t Target, see func(*unstructured.Unstructured)) error {
	retry, missing := s.BackOff(s.Timing.PauseMax), s.BackOff(s.Timing.Relist)
	for {
		version, err := s.List(ctx, t, see)
		if t.Missing != nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
			if t.Missing(err); !Sleep(ctx, missing.Step()) {
				return ctx.Err()
			}
			continue
		}
		missing = s.BackOff(s.Timing.Relist)
		s.Note(ctx, "list", t.Resource.Resource, t.String(), t.refused(err))
		until := s.Now().Add(Around(s.Timing.Relist))
		for err == nil {
			began, events := s.Now(), 0
			version, events, err = s.watch(ctx, t, version, until, see)
			stood := events > 0 || s.Now().Sub(began) >= s.Timing.Lived
			switch {
			case failure(err) != nil:
				s.Note(ctx, "watch", t.Resource.Resource, t.String(), t.refused(err))
			case stood:
				s.Note(ctx, "watch", t.Resource.Resource, t.String(), nil)
				retry = s.BackOff(s.Timing.PauseMax)
			case err == nil:
				err = errShort
			}
			if err == nil && !Sleep(ctx, retry.Step()) {
				return ctx.Err()
			}
		}
		if !Sleep(ctx, retry.Step()) {
			return ctx.Err()
		}
	}
}

// allowed calls Options.Refused if the server now refuses a request that it allowed before, or the
// reverse. An error of another kind shows neither.
func (s *Server) allowed(verb string, t Target, err error) {
	refused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	if s.Options.Refused == nil || t.Missing != nil || t.Grant != "" || err != nil && !refused {
		return
	}
	request := verb + " " + t.Resource.Resource + " " + t.String()
	s.mu.Lock()
	news := s.refused[request] != refused
	s.refused[request] = refused
	s.mu.Unlock()
	if news {
		s.Options.Refused(request, err)
	}
}

// refused adds to a refusal what grants the right.
func (t Target) refused(err error) error {
	if t.Grant == "" || !apierrors.IsForbidden(err) {
		return err
	}
	return fmt.Errorf("%w; %s grants the right", err, t.Grant)
}

// failure returns err, or nil if err is a normal end of a watch.
func failure(err error) error {
	if errors.Is(err, errPeriod) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return nil
	}
	return err
}

// List reads the target once and reports it as Follow does. It returns the version from which to
// watch.
func (s *Server) List(ctx context.Context, t Target, see func(*unstructured.Unstructured)) (string, error) {
	if t.All != nil {
		return s.listAll(ctx, t)
	}
	ctx, cancel := context.WithTimeout(ctx, s.Timing.Request)
	defer cancel()
	list, err := s.in(t).List(ctx, metav1.ListOptions{FieldSelector: t.Selector()})
	s.allowed("list", t, err)
	if err != nil {
		return "", err
	}
	if t.Listed != nil {
		t.Listed()
	}
	for i := range list.Items {
		if t.Chosen == nil && list.Items[i].GetName() == t.Name {
			see(&list.Items[i])
			return list.GetResourceVersion(), nil
		}
	}
	see(nil)
	return list.GetResourceVersion(), nil
}

// watch reads one stream until it ends. It returns the version to resume from and the number of
// events. The error is nil if the stream ended without one. The server ends it so after the time
// that it was asked for. A cut connection looks the same.
func (s *Server) watch(
	ctx context.Context, t Target, version string, until time.Time, see func(*unstructured.Unstructured),
) (string, int, error) {
	left := until.Sub(s.Now())
	if left <= 0 {
		return version, 0, errPeriod
	}
	span := min(left, s.Timing.Watch)
	// The server should end the watch; the context ends one that the server does not.
	ctx, cancel := context.WithTimeout(ctx, span+s.Timing.Grace)
	defer cancel()
	seconds := int64(span/time.Second) + 1
	stream, err := s.in(t).Watch(ctx, metav1.ListOptions{
		FieldSelector: t.Selector(), ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
	s.allowed("watch", t, err)
	if err != nil {
		return version, 0, err
	}
	defer stream.Stop()
	for count := 0; ; {
		select {
		case <-ctx.Done():
			return version, count, nil
		case e, ok := <-stream.ResultChan():
			if !ok {
				return version, count, nil
			}
			if e.Type == watch.Error {
				return version, count, apierrors.FromObject(e.Object)
			}
			object, ok := e.Object.(*unstructured.Unstructured)
			if !ok {
				return version, count, fmt.Errorf("watch event of unexpected type %T", e.Object)
			}
			if v := object.GetResourceVersion(); v != "" {
				version = v
			}
			count++
			if t.All != nil {
				t.All.saw(e.Type, object)
				continue
			}
			if e.Type == watch.Bookmark || t.Chosen == nil && object.GetName() != t.Name {
				continue
			}
			if e.Type == watch.Deleted {
				object = nil
			}
			see(object)
		}
	}
}

// Answered reports whether the server returned the error, so that it was reached.
func Answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}
