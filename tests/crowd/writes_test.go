// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"encoding/json"
	"fmt"
	"reflect"
	"time"

	resource "k8s.io/api/resource/v1"
)

// writes is what the API server has told of the slices.
type writes struct {
	version string // up to which it has told
	last    map[string]resource.ResourceSlice
	// Each of made, changed and gone is a slice that says something else than before, and
	// renumbered one that had to be written since its pool has more or fewer slices.
	made, changed, renumbered, gone int
	// needless are writes that said what was there already.
	needless []string
}

func (w *writes) String() string {
	return fmt.Sprintf("%d made, %d changed, %d renumbered, %d deleted, %d needless", w.made, w.changed, w.renumbered, w.gone, len(w.needless))
}

// watchWrites begins with the slices as they are now.
func (c *cluster) watchWrites() (*writes, error) {
	var list resource.ResourceSliceList
	if err := c.get(slicesAt, &list); err != nil {
		return nil, err
	}
	w := &writes{version: list.ResourceVersion, last: map[string]resource.ResourceSlice{}}
	for _, s := range list.Items {
		w.last[s.Name] = s
	}
	return w, nil
}

// read takes in what has happened since.
func (w *writes) read(c *cluster) error {
	events, err := c.Since(c.t, slicesAt, w.version)
	if err != nil {
		return err
	}
	for _, e := range events {
		var now resource.ResourceSlice
		if err := json.Unmarshal(e.Object, &now); err != nil {
			return err
		}
		w.take(e.Type, now)
	}
	return nil
}

func (w *writes) take(event string, now resource.ResourceSlice) {
	was := w.last[now.Name]
	w.version, w.last[now.Name] = now.ResourceVersion, now
	switch {
	case event == "ADDED":
		w.made++
	case event == "DELETED":
		w.gone++
		delete(w.last, now.Name)
	case !reflect.DeepEqual(content(now), content(was)):
		w.changed++
	case now.Spec.Pool.ResourceSliceCount != was.Spec.Pool.ResourceSliceCount:
		w.renumbered++
	default:
		w.needless = append(w.needless, fmt.Sprintf("%s at %s: generation %d, was %d", now.Name, now.ResourceVersion, now.Spec.Pool.Generation, was.Spec.Pool.Generation))
	}
}

// content is what a slice says of devices: all but the state of its pool, and when its
// taints began.
func content(s resource.ResourceSlice) resource.ResourceSliceSpec {
	spec := s.Spec.DeepCopy()
	spec.Pool = resource.ResourcePool{Name: spec.Pool.Name}
	for i := range spec.Devices {
		for j := range spec.Devices[i].Taints {
			spec.Devices[i].Taints[j].TimeAdded = nil
		}
	}
	return *spec
}

// follow reads again and again, before the server forgets; it stops when over is closed.
func (w *writes) follow(c *cluster, over <-chan struct{}) {
	for {
		if err := w.read(c); err != nil {
			c.breaks("the slices cannot be watched: %v", err)
			return
		}
		select {
		case <-over:
			return
		case <-c.t.Context().Done():
			return
		case <-time.After(5 * time.Second):
		}
	}
}
