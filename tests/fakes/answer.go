// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"io"
	"path"
	"sync"

	"google.golang.org/grpc"
)

// Answer is what a test says in a fake's place. Without an answer and an error the
// fake answers itself.
type Answer func(ctx context.Context, request any) (answer any, err error)

// answers are what a test says in a fake's place, by the name of the call.
type answers struct {
	mu sync.Mutex
	by map[string]Answer
}

// Answer lets f answer calls of a name, such as "List", until another is set; nil
// leaves them to the fake again. A stream's request is nil, and its answer counts
// for nothing: an error ends it, io.EOF without one.
func (a *answers) Answer(call string, f Answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.by == nil {
		a.by = map[string]Answer{}
	}
	a.by[call] = f
}

func (a *answers) of(method string) Answer {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.by[path.Base(method)]; f != nil {
		return f
	}
	return func(context.Context, any) (any, error) { return nil, nil }
}

// options are a server's whose answers these are, and which when it stops waits for
// calls to end.
func (a *answers) options(more ...grpc.UnaryServerInterceptor) []grpc.ServerOption {
	unary := func(ctx context.Context, request any, info *grpc.UnaryServerInfo, own grpc.UnaryHandler) (any, error) {
		if answer, err := a.of(info.FullMethod)(ctx, request); answer != nil || err != nil {
			return answer, err
		}
		return own(ctx, request)
	}
	stream := func(server any, s grpc.ServerStream, info *grpc.StreamServerInfo, own grpc.StreamHandler) error {
		if _, err := a.of(info.FullMethod)(s.Context(), nil); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		return own(server, s)
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(append([]grpc.UnaryServerInterceptor{unary}, more...)...),
		grpc.StreamInterceptor(stream), grpc.WaitForHandlers(true)}
}
