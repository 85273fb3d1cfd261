// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

func within() Within {
	return Within{
		Foresee: func(q status.Question) (status.Answer, error) {
			return status.Answer{Plans: []status.Plan{{Partition: string(q.File) + "!"}}}, nil
		},
		Usage: func(q url.Values) (any, error) {
			if q.Get("by") == "bad" {
				return nil, fmt.Errorf("by is bad: %w", gpu.ErrInvalid)
			}
			if q.Get("by") == "broken" {
				return nil, errors.New("no disk")
			}
			return map[string]string{"by": q.Get("by"), "tenant": "train"}, nil
		},
		Journal:  func(most int) ([]byte, error) { return fmt.Appendf(nil, "{\"train\":%d}\n", most), nil },
		Settings: func() map[string]string { return map[string]string{"http": ":9500"} },
	}
}

// ask sends a request and returns the status and the body.
func ask(t *testing.T, method, address, at, body string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+address+at, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(said)
}

func TestPagesWithinThePod(t *testing.T) {
	address := serve(t, Options{Within: within()})
	for _, test := range []struct {
		method, at, body string
		code             int
		want             string
	}{
		{http.MethodPost, "/plan?brief=true", "file", 200, `{"plans":[{"partition":"file!"`},
		{http.MethodPost, "/plan?unit=x", "file", 400, "unit is"},
		{http.MethodGet, "/plan", "", 405, ""},
		{http.MethodGet, "/usage?by=pod", "", 200, `{"by":"pod","tenant":"train"}`},
		{http.MethodGet, "/usage?by=bad", "", 400, "by is bad"},
		{http.MethodGet, "/usage?by=broken", "", 503, "no disk"},
		{http.MethodGet, "/journal", "", 200, `{"train":1000}`},
		{http.MethodGet, "/journal?records=7", "", 200, `{"train":7}`},
		{http.MethodGet, "/journal?records=5001", "", 400, "want 1 to 5000"},
		{http.MethodGet, "/settings", "", 200, `{"http":":9500"}`},
		{http.MethodPost, "/settings", "", 405, ""},
	} {
		if code, said := ask(t, test.method, address, test.at, test.body); code != test.code || !strings.Contains(said, test.want) {
			t.Errorf("%s %s: %d %s, want %d %s", test.method, test.at, code, said, test.code, test.want)
		}
	}
	if code, _ := ask(t, http.MethodGet, serve(t, Options{}), "/usage", ""); code != 404 {
		t.Errorf("without an account /usage gives %d", code)
	}
}

// The pages name pods of every namespace, so the network gets none of them.
func TestPagesWithinThePodAreNotForTheNetwork(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := within()
	w.Foresee = func(status.Question) (status.Answer, error) {
		t.Error("the agent was asked")
		return status.Answer{}, nil
	}
	address := serveOn(t, elsewhere{l, "10.244.1.8:4000", "10.244.1.7:9500"}, Options{Within: w})
	for _, page := range []string{"POST /plan", "GET /usage", "GET /journal", "GET /settings"} {
		method, at, _ := strings.Cut(page, " ")
		if code, said := ask(t, method, address, at, "x"); code != http.StatusForbidden || strings.Contains(said, "train") {
			t.Errorf("%s: %d %s", page, code, said)
		}
	}
}
