// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/gpu-agent/internal/brief"
)

// TestRefusalsFloodTheLog: a controller that makes a pod for each one that fails has as
// many refused as it likes. Each pod is still told why.
func TestRefusalsFloodTheLog(t *testing.T) {
	var log bytes.Buffer
	var over func()
	s := &service{observer: noObserver{}, resource: "example.com/gpu", ration: brief.NewRation(slog.New(slog.NewTextHandler(&log, nil)), time.Now,
		func(_ time.Duration, f func()) *time.Timer { over = f; return nil })}
	for range 10_000 {
		err := s.refuse("allocate", codes.FailedPrecondition, errors.New("device GPU-0 is leaving"))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "example.com/gpu: device GPU-0 is leaving") {
			t.Fatalf("refused with %v", err)
		}
	}
	if n := strings.Count(log.String(), "\n"); n != brief.Lines {
		t.Errorf("%d lines of 10,000 refusals", n)
	}
	over()
	if !strings.Contains(log.String(), "resource=example.com/gpu lines=9990") {
		t.Errorf("the log does not tell what it leaves out: %s", log.String())
	}
	if err := s.refuse("allocate", codes.FailedPrecondition, errors.New(strings.Repeat("held by ns/pod, ", 10_000))); len(err.Error()) > brief.Text+200 {
		t.Errorf("a pod is told %d bytes", len(err.Error()))
	}
}
