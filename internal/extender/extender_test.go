// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extender "k8s.io/kube-scheduler/extender/v1"
)

// shelf is books with room for one pod on each node that has any.
type shelf struct {
	mu   sync.Mutex
	room map[string]bool
	// hang, if set, is closed when questions may be answered; inside has one value for each
	// question that has come so far.
	hang   chan struct{}
	inside chan struct{}
	err    error
	// unknown is the UID of a pod that is not known, and waits is closed when it is waited for.
	unknown string
	waits   chan struct{}
	asked   int
	within  int
}

func (s *shelf) enter() func() {
	s.mu.Lock()
	s.asked++
	if s.within++; s.within > 1 {
		panic("two requests are at the books")
	}
	s.mu.Unlock()
	if s.hang != nil {
		s.inside <- struct{}{}
		<-s.hang
	}
	return func() {
		s.mu.Lock()
		s.within--
		s.mu.Unlock()
	}
}

func (s *shelf) Known(ctx context.Context, uid string) error {
	if uid != s.unknown {
		return nil
	}
	if s.waits != nil {
		close(s.waits)
	}
	<-ctx.Done()
	return errors.New("who is it?")
}

func (s *shelf) Place(_ context.Context, uid string, among []string) (string, map[string]string, error) {
	defer s.enter()()
	if s.err != nil {
		return "", nil, s.err
	}
	refused := map[string]string{}
	for _, name := range among {
		if s.room[name] {
			s.room[name] = false
			return name, nil, nil
		}
		refused[name] = "there is no room for " + uid
	}
	return "", refused, nil
}

func (s *shelf) Fits(_ context.Context, _, node string, without []string) (bool, error) {
	defer s.enter()()
	return s.room[node] || slices.Contains(without, "large"), s.err
}

// door is an extender that is served, and what became of its requests.
type door struct {
	t   *testing.T
	url string
	// how has the outcome of each request.
	how chan Outcome
}

func open(t *testing.T, b Books, deadline time.Duration) *door {
	t.Helper()
	d := &door{t: t, how: make(chan Outcome, 100)}
	handler := New(b, Options{Deadline: deadline, Answered: func(_ Verb, how Outcome, took time.Duration) {
		if took < 0 {
			t.Errorf("a request took %s", took)
		}
		d.how <- how
	}})
	srv := httptest.NewUnstartedServer(nil)
	srv.Config = Server(handler)
	srv.Start()
	t.Cleanup(srv.Close)
	d.url = srv.URL
	return d
}

// post sends a request, and returns the status and what came back.
func (d *door) post(path, body string) (int, string) {
	d.t.Helper()
	res, err := http.Post(d.url+path, "application/json", strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

func (d *door) want(how Outcome) {
	d.t.Helper()
	if got := <-d.how; got != how {
		d.t.Errorf("counted as %q, want %q", got, how)
	}
}

func podOf(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name, UID: types.UID("uid-" + name)}}
}

// jsonOf writes as kube-scheduler does.
func jsonOf(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func filterArgs(t *testing.T, name string, nodes ...string) string {
	t.Helper()
	return jsonOf(t, &extender.ExtenderArgs{Pod: podOf(name), NodeNames: &nodes})
}

func TestFilterNamesTheOneNode(t *testing.T) {
	d := open(t, &shelf{room: map[string]bool{"b": true, "c": true}}, time.Minute)
	for _, want := range []string{"b", "c", ""} {
		code, text := d.post("/filter", filterArgs(t, "p", "a", "b", "c"))
		var got extender.ExtenderFilterResult
		if err := json.Unmarshal([]byte(text), &got); code != http.StatusOK || err != nil || got.NodeNames == nil ||
			got.Error != "" {
			t.Fatalf("%d %s: %v", code, text, err)
		}
		if names := strings.Join(*got.NodeNames, ","); names != want {
			t.Errorf("nodes %q, want %q", names, want)
		}
		if want != "" {
			d.want(Placed)
			continue
		}
		d.want(Refused)
		if len(got.FailedNodes) != 3 || got.FailedNodes["a"] != "there is no room for uid-p" ||
			len(got.FailedAndUnresolvableNodes) > 0 {
			t.Errorf("%+v", got)
		}
	}
}

func TestPreemptDropsNodesWhoseVictimsOpenNoRoom(t *testing.T) {
	d := open(t, &shelf{room: map[string]bool{"roomy": true}}, time.Minute)
	victims := func(uids ...string) *extender.MetaVictims {
		v := &extender.MetaVictims{NumPDBViolations: 2}
		for _, uid := range uids {
			v.Pods = append(v.Pods, &extender.MetaPod{UID: uid})
		}
		return v
	}
	for _, c := range []struct {
		nodes map[string]*extender.MetaVictims
		want  []string
		how   Outcome
	}{
		{map[string]*extender.MetaVictims{"a": victims("small", "large"), "b": victims("small"), "c": victims(),
			"roomy": nil}, []string{"a", "roomy"}, Placed},
		{map[string]*extender.MetaVictims{"b": victims("small")}, nil, Refused},
		{map[string]*extender.MetaVictims{}, nil, Refused},
	} {
		code, text := d.post("/preempt",
			jsonOf(t, &extender.ExtenderPreemptionArgs{Pod: podOf("p"), NodeNameToMetaVictims: c.nodes}))
		var got extender.ExtenderPreemptionResult
		if err := json.Unmarshal([]byte(text), &got); code != http.StatusOK || err != nil ||
			got.NodeNameToMetaVictims == nil {
			t.Fatalf("%d %s: %v", code, text, err)
		}
		if names := slices.Sorted(maps.Keys(got.NodeNameToMetaVictims)); !slices.Equal(names, c.want) {
			t.Errorf("kept %v, want %v", names, c.want)
		}
		if v := got.NodeNameToMetaVictims["a"]; v != nil && (len(v.Pods) != 2 || v.NumPDBViolations != 2) {
			t.Errorf("the victims of a are %+v", v)
		}
		d.want(c.how)
	}
}

// TestBrokenRequests are errors to the scheduler, which goes on without an answer, and
// never reach the books.
func TestBrokenRequests(t *testing.T) {
	books := &shelf{}
	d := open(t, books, time.Minute)
	nodes := &corev1.NodeList{Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}}}
	for _, c := range []struct{ name, path, body, want string }{
		{"nothing", "/filter", "", "unexpected end of JSON"},
		{"not JSON", "/filter", "pod", "invalid character"},
		{"cut off", "/filter", filterArgs(t, "p", "a")[:50], "unexpected end of JSON"},
		{"another type", "/filter", `{"Pod": 7}`, "cannot unmarshal"},
		{"no pod", "/filter", `{"NodeNames": ["a"]}`, "no pod with a UID"},
		{"a pod without UID", "/filter", `{"Pod": {"metadata": {"name": "p"}}, "NodeNames": ["a"]}`,
			"no pod with a UID"},
		{"whole nodes", "/filter", jsonOf(t, &extender.ExtenderArgs{Pod: podOf("p"), Nodes: nodes}),
			"nodeCacheCapable: true"},
		{"whole victims", "/preempt", jsonOf(t, &extender.ExtenderPreemptionArgs{
			Pod: podOf("p"), NodeNameToVictims: map[string]*extender.Victims{"a": {}},
		}), "nodeCacheCapable: true"},
		{"no pod to preempt for", "/preempt", `{"NodeNameToMetaVictims": {}}`, "no pod with a UID"},
		{"too long", "/filter", `{"Pod": "` + strings.Repeat("x", most) + `"}`, "too large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if code, text := d.post(c.path, c.body); code != http.StatusBadRequest || !strings.Contains(text, c.want) {
				t.Errorf("%d %s, want 400 and %q", code, text, c.want)
			}
			d.want(Broken)
		})
	}
	res, err := http.Post(d.url+"/filter", "text/plain", strings.NewReader(filterArgs(t, "p", "a")))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if d.want(Broken); res.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("text/plain: %s", res.Status)
	}
	if code, _ := d.post("/bind", "{}"); code != http.StatusNotFound {
		t.Errorf("bind: %d", code)
	}
	res, err = http.Get(d.url + "/filter")
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %s", res.Status)
	}
	if books.asked != 0 {
		t.Errorf("the books were asked %d times", books.asked)
	}
}

// TestBooksThatHang: each request has its answer, and afterwards all is as before.
func TestBooksThatHang(t *testing.T) {
	books := &shelf{room: map[string]bool{"a": true, "b": true}, hang: make(chan struct{}),
		inside: make(chan struct{}, 10)}
	d := open(t, books, 50*time.Millisecond)
	for more := 3; len(books.inside) == 0 || more > 0; { // on a busy machine some come too late to get there
		if len(books.inside) > 0 {
			more--
		}
		if code, text := d.post("/filter", filterArgs(t, "p", "a", "b")); code != http.StatusServiceUnavailable ||
			!strings.Contains(text, "no answer within 50ms") {
			t.Errorf("%d %s", code, text)
		}
		d.want(Late)
	}
	if n := len(books.inside); n != 1 {
		t.Errorf("%d requests have come to books that hang, want the first alone", n)
	}
	close(books.hang)
	for { // the machine may be busy: what is late now says nothing
		code, text := d.post("/filter", filterArgs(t, "p", "a", "b"))
		if how := <-d.how; how == Late {
			continue
		}
		if code != http.StatusOK || !strings.Contains(text, `"b"`) { // the first had a
			t.Errorf("%d %s", code, text)
		}
		break
	}
}

// TestBooksThatCannotTell let the scheduler go on.
func TestBooksThatCannotTell(t *testing.T) {
	d := open(t, &shelf{err: errors.New("the pods have not been listed yet")}, time.Minute)
	for path, body := range map[string]string{
		"/filter": filterArgs(t, "p", "a"),
		"/preempt": jsonOf(t, &extender.ExtenderPreemptionArgs{Pod: podOf("p"),
			NodeNameToMetaVictims: map[string]*extender.MetaVictims{"a": {}}}),
	} {
		if code, text := d.post(path, body); code != http.StatusServiceUnavailable || !strings.Contains(text, "x/p") ||
			!strings.Contains(text, "not been listed yet") {
			t.Errorf("%s: %d %s", path, code, text)
		}
		d.want(Failed)
	}
}

// TestSlowRequestsKeepNobody has clients that send half a request, and wait.
func TestSlowRequestsKeepNobody(t *testing.T) {
	d := open(t, &shelf{room: map[string]bool{"a": true}}, 200*time.Millisecond)
	for range 20 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const start = "POST /filter HTTP/1.1\r\nHost: x\r\n" +
			"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
		if _, err := io.WriteString(conn, start); err != nil {
			t.Fatal(err)
		}
	}
	placed, late := 0, 0
	for placed == 0 { // on a busy machine it may be late itself
		code, text := d.post("/filter", filterArgs(t, "p", "a"))
		if code == http.StatusOK {
			placed++
		} else if code != http.StatusServiceUnavailable {
			t.Fatalf("%d %s", code, text)
		}
	}
	for late < 20 {
		if how := <-d.how; how == Late {
			late++
		} else if how == Broken || how == Failed {
			t.Errorf("counted as %q", how)
		}
	}
}

// TestManyAtOnce: no two are at the books, and no room is given twice.
func TestManyAtOnce(t *testing.T) {
	room := map[string]bool{}
	var nodes []string
	for i := range 26 {
		nodes = append(nodes, string(rune('a'+i)))
		room[nodes[i]] = true
	}
	d := open(t, &shelf{room: room}, time.Minute)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			res, err := http.Post(d.url+"/filter", "application/json",
				bytes.NewReader([]byte(filterArgs(t, "p", nodes...))))
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
		})
	}
	wg.Wait()
	count := map[Outcome]int{}
	for range 40 {
		count[<-d.how]++
	}
	if count[Placed] != 26 || count[Refused] != 14 {
		t.Errorf("%v", count)
	}
}

// TestAPodThatIsNotKnown: who asks for pods that are not there holds nobody up, and the scheduler
// is to ask again.
func TestAPodThatIsNotKnown(t *testing.T) {
	waits := make(chan struct{})
	s := &shelf{room: map[string]bool{"a": true}, unknown: "uid-ghost", waits: waits}
	d := open(t, s, 2*time.Second)
	said := make(chan string)
	go func() {
		code, text := d.post("/filter", filterArgs(t, "ghost", "a"))
		said <- fmt.Sprint(code, " ", text)
	}()
	<-waits
	if code, text := d.post("/filter", filterArgs(t, "p", "a")); code != http.StatusOK {
		t.Errorf("beside it another request is answered %d %s", code, text)
	}
	d.want(Placed)
	if text := <-said; !strings.HasPrefix(text, "503 who is it?") {
		t.Errorf("it is answered %s", text)
	}
	d.want(Unknown)
	if s.asked != 1 {
		t.Errorf("the books were asked %d times, want once", s.asked)
	}
}

// TestAPodOfAGroup is refused for now where another one would get no answer: the scheduler must not go
// on without one, or the group is bound in part.
func TestAPodOfAGroup(t *testing.T) {
	p, name := podOf("p"), "train"
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
	hangs := &shelf{hang: make(chan struct{}), inside: make(chan struct{}, 1000)}
	for _, c := range []struct {
		name     string
		books    *shelf
		deadline time.Duration
		want     string
	}{
		{"the books hang", hangs, 50 * time.Millisecond, "no answer within 50ms"},
		{"they cannot tell", &shelf{err: errors.New("not listed yet")}, time.Minute, "not listed yet"},
		{"they do not know it", &shelf{unknown: "uid-p"}, 50 * time.Millisecond, "who is it?"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, c.books, c.deadline)
			// On a busy machine a request may be late before it has been read.
			post := func(path, body string) (text string) {
				for how := Late; how == Late; how = <-d.how {
					_, text = d.post(path, body)
				}
				return text
			}
			text := post("/filter", jsonOf(t, &extender.ExtenderArgs{Pod: p, NodeNames: &[]string{"a", "b"}}))
			var got extender.ExtenderFilterResult
			if err := json.Unmarshal([]byte(text), &got); err != nil || got.NodeNames == nil ||
				len(*got.NodeNames) > 0 ||
				len(got.FailedNodes) != 2 || !strings.Contains(got.FailedNodes["a"], c.want) {
				t.Errorf("it is told %s, %v; want a refusal with %q", text, err, c.want)
			}
			victims := map[string]*extender.MetaVictims{"a": {}}
			text = post("/preempt", jsonOf(t, &extender.ExtenderPreemptionArgs{Pod: p, NodeNameToMetaVictims: victims}))
			if strings.TrimSpace(text) != `{"NodeNameToMetaVictims":{}}` {
				t.Errorf("that others end for it is answered %s", text)
			}
		})
	}
	close(hangs.hang)
}
