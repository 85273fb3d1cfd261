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
