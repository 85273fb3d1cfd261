// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	// mostHeld is how many devices the holders of a node may name, all together. The init
	// containers of a pod also name devices of its other containers.
	mostHeld = 4 * timeslice.MaxListed
	// mostPlacements is how many placements a card may have. Cards of 2026 have about 30.
	mostPlacements = 128
)

// Check returns an error if a status cannot be a node's. A stolen node's token can write any
// numbers into it, and readers compute with them. So no reader uses a status that Check refuses.
// The error wraps gpu.ErrInvalid and names the first wrong field.
//
// The bounds of a field are in its tags, and are the same as in the schema. max is the largest
// number, or the most bytes or elements. each is the same for the elements of a list.
func (s *Status) Check() error {
	if err := within(reflect.ValueOf(s).Elem(), ""); err != nil {
		return err
	}
	listed, used, inSpot, named := 0, 0, 0, 0
	seen := map[string]bool{}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		at := fmt.Sprintf("gpus[%d]", i)
		if seen[g.UUID] {
			return refuse(at+".uuid", "%q is there twice", g.UUID)
		}
		seen[g.UUID] = true
		if g.API == string(workload.DRA) {
			continue // its devices have no numbers
		}
		if !g.Kind.InMIG() {
			listed += g.Total
		}
		used += g.Used.Len()
		most := g.Used.Most()
		if g.Spot != nil {
			inSpot += g.Spot.Used.Len() + g.Spot.Lent.Len() + g.Spot.Yielding.Len()
			most = max(most, g.Spot.Used.Most(), g.Spot.Lent.Most(), g.Spot.Yielding.Most())
		}
		for j := range g.Holders {
			named += g.Holders[j].Devices.Len()
			most = max(most, g.Holders[j].Devices.Most())
		}
		if most >= timeslice.MaxListed {
			return refuse(at, "a device has the number %d, and there are at most %d", most, timeslice.MaxListed)
		}
	}
	for _, sum := range []struct {
		what     string
		is, most int
	}{{"total", listed, timeslice.MaxListed}, {"used", used, timeslice.MaxListed}, {"spot.used, .lent and .yielding", inSpot, 3 * timeslice.MaxListed}, {"holders", named, mostHeld}} {
		if sum.is > sum.most {
			return refuse("gpus[]."+sum.what, "%d devices in all, and a node has at most %d", sum.is, sum.most)
		}
	}
	for i := range s.Cards {
		n := 0
		for j := range s.Cards[i].Profiles {
			n += len(s.Cards[i].Profiles[j].Starts)
		}
		if n > mostPlacements {
			return refuse(fmt.Sprintf("cards[%d]", i), "%d placements, and a card has at most %d", n, mostPlacements)
		}
	}
	return nil
}

func refuse(field, format string, args ...any) error {
	return fmt.Errorf("status.%s: %s: %w", field, fmt.Sprintf(format, args...), gpu.ErrInvalid)
}

// within checks a value against the bounds of its fields.
func within(v reflect.Value, path string) error {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return nil
		}
		return within(v.Elem(), path)
	case reflect.Slice:
		for i := range v.Len() {
			if err := within(v.Index(i), path+"["+strconv.Itoa(i)+"]"); err != nil {
				return err
			}
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() || v.Type() == reflect.TypeFor[piece.Range]() {
			return nil
		}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if path != "" {
				name = path + "." + name
			}
			if err := bounded(v.Field(i), name, bound(f, "max")); err != nil {
				return err
			}
			if f.Tag.Get("each") != "" {
				for j := range v.Field(i).Len() {
					if err := bounded(v.Field(i).Index(j), name+"["+strconv.Itoa(j)+"]", bound(f, "each")); err != nil {
						return err
					}
				}
			}
			if err := within(v.Field(i), name); err != nil {
				return err
			}
		}
	}
	return nil
}

// bound returns the number in a tag, or -1 without the tag.
func bound(f reflect.StructField, tag string) int {
	n, err := strconv.Atoi(f.Tag.Get(tag))
	if err != nil {
		return -1
	}
	return n
}

// bounded checks one value against one bound.
func bounded(v reflect.Value, path string, most int) error {
	is := int64(0)
	switch v.Kind() {
	case reflect.Int:
		is = v.Int()
		if is < 0 {
			return refuse(path, "%d is less than 0", is)
		}
	case reflect.String, reflect.Slice:
		is = int64(v.Len())
	default:
		return nil
	}
	if most >= 0 && is > int64(most) {
		return refuse(path, "%d, and the most is %d", is, most)
	}
	return nil
}

// OutOfBounds returns the status that a node writes instead of one that readers would refuse: the
// node is not ready, and why.
func OutOfBounds(err error) *Status {
	why := brief.Cut(err.Error(), brief.Text)
	s := &Status{Conditions: []Condition{{Type: Ready, Status: False, Reason: status.OutOfBounds, Message: why}}}
	s.Sum()
	return s
}
