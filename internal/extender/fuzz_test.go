// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"

	"example.com/gpu-agent/tests/cost"
)

// FuzzDoor posts anything. Each request is answered by one of the protocol's numbers, and costs no
// more than a few times its length.
func FuzzDoor(f *testing.F) {
	f.Add(true, []byte(`{"Pod":{"metadata":{"uid":"uid-p"}},"NodeNames":["a","b"]}`))
	f.Add(true, []byte(`{"Pod":{"metadata":{"uid":"uid-p"}},"Nodes":{"items":[]}}`))
	f.Add(false, []byte(`{"Pod":{"metadata":{"uid":"uid-p"}},
		"NodeNameToMetaVictims":{"a":{"Pods":[{"UID":"large"},null]},"b":null}}`))
	f.Add(false, []byte(`{"Pod":null}`))
	f.Add(true, []byte(`{"Pod":{"metadata":{"uid":"uid-p"},
		"spec":{"containers":[{"resources":{"requests":{"cpu":"1e-999999999"}}}]}},"NodeNames":["a","b"]}`))
	f.Add(true, []byte(`[[[[[[`))
	f.Fuzz(func(t *testing.T, filter bool, body []byte) {
		path := "/preempt"
		if filter {
			path = "/filter"
		}
		took := cost.Allocated(func() {
			r := httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			New(&shelf{room: map[string]bool{"a": true}}, Options{}).ServeHTTP(w, r)
			switch w.Code {
			case http.StatusOK, http.StatusBadRequest, http.StatusServiceUnavailable:
			default:
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
		if took > 8<<20+uint64(200*len(body)) {
			t.Errorf("%d bytes cost %d KiB", len(body), took>>10)
		}
	})
}
