// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestAwait(t *testing.T) {
	t.Run("until it is so", func(t *testing.T) {
		looks := 0
		err := Await(t.Context(), time.Minute, "three looks", func(context.Context) error {
			if looks++; looks < 3 {
				return errors.New("not yet")
			}
			return nil
		})
		if err != nil || looks != 3 {
			t.Errorf("after %d looks: %v, want none after 3", looks, err)
		}
	})
	t.Run("says what was seen last", func(t *testing.T) {
		looks := 0
		err := Await(t.Context(), time.Nanosecond, "the end", func(ctx context.Context) error {
			looks++
			return fmt.Errorf("look %d", looks)
		})
		if err == nil || !strings.Contains(err.Error(), "wait for the end") || !strings.Contains(err.Error(), "last seen: look 1") {
			t.Errorf("Await: %v, want what was waited for and what was seen", err)
		}
	})
	t.Run("longer on a starved machine", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			err := await(t.Context(), 10*time.Second, lookEvery, "the end", func(context.Context) error {
				return errors.New("not yet")
			}, func() float64 {
				if time.Since(began) > 9*time.Second {
					return 2.5
				}
				return 1
			})
			if took := time.Since(began); took < 25*time.Second || took > 26*time.Second || !strings.Contains(err.Error(), "limit of 10 s stretched 2.5 times") {
				t.Errorf("after %v: %v; want the limit of 10 s stretched 2.5 times", took, err)
			}
		})
	})
	t.Run("a look that hangs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			err := await(t.Context(), 10*time.Second, lookEvery, "the end", func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			}, func() float64 { return 1 })
			if !errors.Is(err, context.Canceled) {
				t.Errorf("await: %v", err)
			}
		})
	})
	t.Run("not for what cannot be", func(t *testing.T) {
		looks := 0
		err := Await(t.Context(), time.Minute, "a miracle", func(context.Context) error {
			looks++
			return fmt.Errorf("it has failed: %w", ErrNever)
		})
		if !errors.Is(err, ErrNever) || looks != 1 {
			t.Errorf("after %d looks: %v, want ErrNever after one", looks, err)
		}
	})
}

func TestPace(t *testing.T) {
	at := time.Now()
	for _, c := range []struct {
		name   string
		sleeps []time.Duration
		want   float64
	}{
		{"nothing has been slept", nil, 1},
		{"in time", []time.Duration{tick, tick, tick}, 1},
		{"twice as long", []time.Duration{3 * tick, tick, 2 * tick}, 2},
		{"stopped", []time.Duration{100 * tick, tick}, mostStretch},
	} {
		p := &pace{began: at}
		asked, slept := p.read(at)
		now := at
		for _, s := range c.sleeps {
			now = now.Add(s)
			p.add(now)
		}
		if got := factor(p, asked, slept, now); got != c.want {
			t.Errorf("%s: a factor of %g, want %g", c.name, got, c.want)
		}
	}
	// A stop that goes on counts before it is over.
	p := &pace{began: at}
	if got := factor(p, 0, 0, at.Add(4*tick)); got != 4 {
		t.Errorf("four times as long by now: a factor of %g", got)
	}
}

func TestExtended(t *testing.T) {
	got, err := extended(map[string]string{"cpu": "2", "memory": "24Gi", "example.com/gpu-mem": "632", "example.com/gpu": "0", "example.com/x": "2k"})
	want := map[string]int{"example.com/gpu-mem": 632, "example.com/gpu": 0, "example.com/x": 2000}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("extended: %v, %v, want %v", got, err, want)
	}
	if _, err := extended(map[string]string{"example.com/gpu": "many"}); err == nil {
		t.Error("extended takes many for a number")
	}
}

func TestParseAnswer(t *testing.T) {
	a := ParseAnswer("took id=0 count=12 result=2 failure=cuMemAlloc_v2\nanother line\n")
	if a.Verb != "took" || a.Bytes("count") != 12 || a.Result() != OutOfMemory || a.Values["failure"] != "cuMemAlloc_v2" {
		t.Errorf("it is %+v", a)
	}
	if a.Bytes("failure") != ^uint64(0) || a.Bytes("never") != ^uint64(0) {
		t.Errorf("what is no number is %d, what is not there %d", a.Bytes("failure"), a.Bytes("never"))
	}
	if a := ParseAnswer(""); a.Verb != "" || a.String() != "" {
		t.Errorf("an empty line is %+v", a)
	}
}

// served returns a client of a server that answers with handler.
func served(t *testing.T, handler http.HandlerFunc) (*api, *httptest.Server) {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	config, err := json.Marshal(map[string]any{
		"clusters": []any{map[string]any{"cluster": map[string]any{"server": server.URL, "certificate-authority-data": authority}}},
		"users":    []any{map[string]any{"user": map[string]any{"token": "secret"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := newAPI(config)
	if err != nil {
		t.Fatal(err)
	}
	return a, server
}

func TestAPI(t *testing.T) {
	a, server := served(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("%s %s without the token", r.Method, r.URL)
		}
		switch r.URL.Path {
		case "/there":
			fmt.Fprint(w, `{"name": "a"}`)
		case "/plain":
			fmt.Fprint(w, "text")
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind": "Status", "reason": "NotFound", "message": "pods \"b\" not found", "code": 404}`)
		}
	})
	var o struct{ Name string }
	if err := a.get(t.Context(), "/there", &o); err != nil || o.Name != "a" {
		t.Errorf("get: %+v, %v, want the name a", o, err)
	}
	var text []byte
	if err := a.get(t.Context(), "/plain", &text); err != nil || string(text) != "text" {
		t.Errorf("get: %q, %v, want text", text, err)
	}
	if err := a.get(t.Context(), "/b", &o); !isNotFound(err) || !strings.Contains(err.Error(), `pods "b" not found`) {
		t.Errorf("get of what is not there: %v, want the server's word", err)
	}
	if err := a.remove(t.Context(), "/b"); err != nil {
		t.Errorf("remove of what is not there: %v, want none", err)
	}
	server.Close()
	if err := a.get(t.Context(), "/there", &o); !errors.Is(err, ErrNever) {
		t.Errorf("get from a node that has ended: %v, want ErrNever", err)
	}
}

func TestInsideMinors(t *testing.T) {
	in := Inside{Devices: []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia10", "/dev/nvidia7", "/dev/nvidiactl"}}
	if got := fmt.Sprint(in.GPUMinors()); got != "[7 10]" {
		t.Errorf("the minors are %s, want [7 10]", got)
	}
}
