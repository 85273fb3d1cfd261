// SPDX-License-Identifier: Apache-2.0

package kube

import (
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

// Target is what is followed: one object by its name, or several.
type Target struct {
	Resource schema.GroupVersionResource
	// Namespace is empty for a resource of the cluster.
	Namespace, Name string
	// Chosen, if set, are fields by which several objects are selected in place of one by
	// its name.
	Chosen fields.Set
	// All, if set, is told of each object instead: then the target is a whole resource.
	All *Census
	// Missing, if set, is told why the object cannot be followed where the server does not
	// know the resource, or does not allow it: nothing else depends on it. It is tried again
	// when an object would be read anew.
	Missing func(error)
}

func (t Target) in(api dynamic.Interface) dynamic.ResourceInterface {
	if t.Namespace == "" {
		return api.Resource(t.Resource)
	}
	return api.Resource(t.Resource).Namespace(t.Namespace)
}

func (t Target) String() string {
	if t.All != nil {
		return "of the cluster"
	}
	if t.Chosen != nil {
		return t.Selector()
	}
	if t.Namespace == "" {
		return t.Name
	}
	return t.Namespace + "/" + t.Name
}

// Selector is the target as a field selector.
func (t Target) Selector() string {
	if t.All != nil {
		return t.All.Chosen
	}
	if t.Chosen != nil {
		return fields.SelectorFromSet(t.Chosen).String()
	}
	return fields.OneTermEqualSelector("metadata.name", t.Name).String()
}

// Ends of a watch that are not failures of the server.
var (
	errPeriod = errors.New("time to list again")
	// errShort: the stream ended at once and empty. The client library makes
	// such a stream of a connection that timed out, so only a list can tell
	// whether the server is there.
	errShort = errors.New("watch ended at once")
)

// Follow calls see with the object after every list and every event, and with
// nil when it is not there, until ctx ends, which is the only error that it returns. Of
// several objects it tells each event, and with nil each list; of a census, that is told
// instead.
func (s *Server) Follow(ctx context.Context, t Target, see func(*unstructured.Unstructured)) error {
	retry := s.BackOff(s.Timing.PauseMax)
	for {
		version, err := s.List(ctx, t, see)
		if t.Missing != nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
			if t.Missing(err); !Sleep(ctx, Around(s.Timing.Relist)) {
				return ctx.Err()
			}
			continue
		}
		s.Note(ctx, "list", t.Resource.Resource, t.String(), err)
		until := s.Now().Add(Around(s.Timing.Relist))
		for err == nil {
			began, events := s.Now(), 0
			version, events, err = s.watch(ctx, t, version, until, see)
			stood := events > 0 || s.Now().Sub(began) >= s.Timing.Lived
			switch {
			case failure(err) != nil:
				s.Note(ctx, "watch", t.Resource.Resource, t.String(), err)
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

// allowed tells Options.Refused where the server has changed its mind about a
// request. An error of another kind says nothing about that.
func (s *Server) allowed(verb string, t Target, err error) {
	refused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	if s.Options.Refused == nil || t.Missing != nil || err != nil && !refused {
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

// failure is nil for the ends of a watch that belong to its life.
func failure(err error) error {
	if errors.Is(err, errPeriod) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return nil
	}
	return err
}

// List reads the target once, tells of it as Follow does, and returns the version to watch from.
func (s *Server) List(ctx context.Context, t Target, see func(*unstructured.Unstructured)) (string, error) {
	if t.All != nil {
		return s.listAll(ctx, t)
	}
	ctx, cancel := context.WithTimeout(ctx, s.Timing.Request)
	defer cancel()
	list, err := t.in(s.API).List(ctx, metav1.ListOptions{FieldSelector: t.Selector()})
	s.allowed("list", t, err)
	if err != nil {
		return "", err
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

// watch follows one stream to its end and returns the version to resume from
// and the number of events that came. A nil error means that the stream ended
// without a complaint, as a server does after the time it was asked for, and
// as a cut connection looks.
func (s *Server) watch(
	ctx context.Context, t Target, version string, until time.Time, see func(*unstructured.Unstructured),
) (string, int, error) {
	left := until.Sub(s.Now())
	if left <= 0 {
		return version, 0, errPeriod
	}
	span := min(left, s.Timing.Watch)
	// The server ends the watch; the context is for one that does not.
	ctx, cancel := context.WithTimeout(ctx, span+s.Timing.Grace)
	defer cancel()
	seconds := int64(span/time.Second) + 1
	stream, err := t.in(s.API).Watch(ctx, metav1.ListOptions{
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

// Answered tells an error that the server gave from one of reaching it.
func Answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}
