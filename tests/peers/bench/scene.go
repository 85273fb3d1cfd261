// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
)

// scene is what tests/plane takes for a test. What would end a test ends the function
// that stage was given.
type scene struct {
	testing.TB // nil: what is not below is not called
	ctx        context.Context
	dir        string
	undo       []func()
	failed     bool
}

// failure of a scene is what Fatal panics with.
type sceneFailure struct{ error }

// stage calls f with a scene whose files are below dir, and undoes then what was begun in
// it.
func stage(ctx context.Context, dir string, f func(*scene) error) (err error) {
	s := &scene{ctx: ctx, dir: dir}
	defer func() {
		switch e := recover().(type) {
		case nil:
		case sceneFailure:
			err = e.error
		default:
			panic(e)
		}
		s.failed = err != nil && ctx.Err() == nil
		for _, undo := range slices.Backward(s.undo) {
			undo()
		}
	}()
	return f(s)
}

func (s *scene) Helper()                         {}
func (s *scene) Context() context.Context        { return s.ctx }
func (s *scene) Failed() bool                    { return s.failed }
func (s *scene) Cleanup(undo func())             { s.undo = append(s.undo, undo) }
func (s *scene) Fatal(args ...any)               { panic(sceneFailure{errors.New(fmt.Sprint(args...))}) }
func (s *scene) Fatalf(text string, args ...any) { panic(sceneFailure{fmt.Errorf(text, args...)}) }
func (s *scene) Skipf(text string, args ...any)  { s.Fatalf(text, args...) }
func (s *scene) Logf(text string, args ...any)   { fmt.Fprintf(os.Stderr, text+"\n", args...) }

func (s *scene) TempDir() string {
	dir, err := os.MkdirTemp(s.dir, "")
	if err != nil {
		s.Fatal(err)
	}
	return dir
}
