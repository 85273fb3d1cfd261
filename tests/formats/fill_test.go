// SPDX-License-Identifier: Apache-2.0

package formats

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"
)

// when is the time in all samples.
var when = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// fill gives each field below v a value that is not zero: numbers and texts that differ, lists and maps of one
// element. A type that is in samples gets that value.
func fill(v reflect.Value, samples map[reflect.Type]any, n *int) {
	if s, ok := samples[v.Type()]; ok {
		v.Set(reflect.ValueOf(s).Convert(v.Type()))
		return
	}
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), samples, n)
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), samples, n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), samples, n)
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), samples, n)
		}
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, samples, n)
		fill(value, samples, n)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString(fmt.Sprintf("text-%d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n%100 + 1))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n%100 + 1))
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(*n%100) + 0.5)
	default:
		panic(fmt.Sprintf("no sample of %s", v.Type()))
	}
}

// filled returns a T with a value in each field.
func filled[T any](samples map[reflect.Type]any) (out T) {
	n := 0
	fill(reflect.ValueOf(&out).Elem(), samples, &n)
	return out
}

var (
	ownJSON = reflect.TypeFor[json.Marshaler]()
	ownText = reflect.TypeFor[encoding.TextMarshaler]()
)

// fieldsOf returns the names of the fields of a type and of those below it, as JSON has them.
func fieldsOf(of reflect.Type, seen map[reflect.Type]bool) (names []string) {
	if of.Implements(ownJSON) || of.Implements(ownText) || seen[of] {
		return nil
	}
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return fieldsOf(of.Elem(), seen)
	case reflect.Struct:
	default:
		return nil
	}
	seen[of] = true
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported() && !f.Anonymous:
			continue
		case f.Anonymous && name == "":
		case name == "":
			names = append(names, f.Name)
		default:
			names = append(names, name)
		}
		names = append(names, fieldsOf(f.Type, seen)...)
	}
	return names
}
