// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// TestBadRequestsTakeNothing: a request that cannot be understood changes nothing, and says why.
func TestBadRequestsTakeNothing(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	ask := func(line string) (r reply) {
		t.Helper()
		c, err := net.Dial("unix", filepath.Join(w.state, socketName))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = io.WriteString(c, line) // it may be refused before it is whole
		answer, err := readLine(c, mostReply)
		if err != nil {
			return r // an over-long request may find the connection reset
		}
		if err := json.Unmarshal(answer, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	var many []string
	for i := range mostGPUs + 1 {
		many = append(many, fmt.Sprintf(`{"gpu":"GPU-%08x-2222-3333-4444-555555555555","percent":5}`, i))
	}
	for _, c := range []struct{ line, says string }{
		{`{}` + "\n", "version 0"},
		{`{"version":2,"want":[]}` + "\n", "version 2"},
		{`{"version":1,"want":[{"gpu":"GPU-1","percent":5}]}` + "\n", "want the UUID"},
		{`{"version":1,"want":[{"gpu":"../../etc","percent":5}]}` + "\n", "want the UUID"},
		{`{"version":1,"want":[{"gpu":"` + string(gpuA) + `","percent":0}]}` + "\n", "want 1 to 100"},
		{`{"version":1,"want":[{"gpu":"` + string(gpuA) + `","percent":101}]}` + "\n", "want 1 to 100"},
		{`{"version":1,"want":[{"gpu":"` + string(gpuA) + `","percent":5},{"gpu":"` + string(gpuA) + `","percent":5}]}` + "\n", "twice"},
		{`{"version":1,"want":[],"more":1}` + "\n", "unknown field"},
		{`{"version":1,"want":[]} {}` + "\n", "more than one"},
		{`{"version":1,"want":[],"detach":{"gpu":"` + string(gpuA) + `","clients":[1]}}` + "\n", "more than one"},
		{`{"version":1,"want":[` + strings.Join(many, ",") + "]}\n", "at most 64"},
		{`want` + "\n", "invalid character"},
		{strings.Repeat(" ", mostRequest+1), ""},
	} {
		if r := ask(c.line); c.says != "" && !strings.Contains(r.Error, c.says) {
			t.Errorf("%.60q: it says %q, want %q", c.line, r.Error, c.says)
		} else if c.says != "" && (len(r.State.Daemons) != 1 || r.State.Daemons[0].PID != d.PID) {
			t.Errorf("%.60q: the answer is not what is: %+v", c.line, r.State)
		}
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
}

// TestClientErrors: no supervisor, and one that does not answer.
func TestClientErrors(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "mps")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	c := NewClient(dir)
	if _, err := c.Sync(t.Context(), nil); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("without a supervisor: %v", err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Sync(ctx, nil); !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("without an answer: %v", err)
	}
}

// TestNothingIsKnown: a supervisor to which no agent has spoken touches nothing, nor does one that
// cannot read what an agent has said.
func TestNothingIsKnown(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	stop()
	path := filepath.Join(w.state, rootDir, wantFile)
	for _, text := range []string{"", "{", `{"version":9,"want":[]}`, `{"version":1,"want":[{"gpu":"x","percent":1}]}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, stop := w.run(w.options())
		time.Sleep(50 * time.Millisecond)
		if st := s.State(); st.Known || len(st.Daemons) != 0 {
			t.Errorf("%q: %+v", text, st)
		}
		stop()
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
	s, _ := w.run(w.options())
	if now := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); now.PID != d.PID || !s.State().Known {
		t.Errorf("an agent has said it again: %+v", now)
	}
}

// TestVersion: the driver's version is in a program once, as a string of its own, wherever it stands. A
// program that has none, or several, is known by its content.
func TestVersion(t *testing.T) {
	const window = 64 << 10
	for text, want := range map[string]string{
		"a|550.163.01|b": "550.163.01", "|580.65|": "580.65", "|580.065|": "580.065", "550.163.01|": "", "|550.163.01": "",
		"|550.163.01| |550.163.01|": "", "|550.163.01|550.163.01|": "", "|1550.163.01|": "", "|550.163.01.1|": "", "|55.163.01|": "",
		"": "", ".": "", "|555.": "", "|%d.%d|555.58.02|": "555.58.02",
	} {
		text = strings.ReplaceAll(text, "|", "\x00") // or the emulated programs, which are this one, have them
		places := []int{0, 1, 3 * window}
		for before := range 30 { // the program is read in windows
			places = append(places, window-before)
		}
		for _, before := range places {
			for _, behind := range []int{0, 30} {
				data := strings.Repeat("-", before) + text + strings.Repeat("-", behind)
				whole := want
				if whole == "" {
					sum := sha256.Sum256([]byte(data))
					whole = "sha256:" + hex.EncodeToString(sum[:6])
				}
				if got, err := versionOf(iotest.HalfReader(strings.NewReader(data))); err != nil || got != whole {
					t.Fatalf("%q after %d bytes and before %d: %q, %v, want %q", text, before, behind, got, err, whole)
				}
			}
		}
	}
	if _, err := versionOf(iotest.ErrReader(io.ErrClosedPipe)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a program that cannot be read: %v", err)
	}
}

// TestSplit: only whole answers count.
func TestSplit(t *testing.T) {
	marks := []string{"end-a", "end-b"}
	mark := func(m string) string { return fmt.Sprintf("Unknown command %q\n", m) }
	for _, c := range []struct {
		said string
		want [][]string
	}{
		{mark("end-a") + mark("end-b"), [][]string{nil, nil}},
		{"1\n2\n" + mark("end-a") + "3\n" + mark("end-b"), [][]string{{"1", "2"}, {"3"}}},
		{"1\n" + mark("end-a") + "3\n", nil},
		{"1\n" + mark("end-b") + mark("end-a"), nil},
		{mark("end-a") + mark("end-b") + "more\n", nil},
		{mark("end-a") + "1" + mark("end-b"), nil},
		{"", nil},
	} {
		got, err := split(c.said, marks)
		if (err == nil) != (c.want != nil) || !slices.EqualFunc(got, c.want, slices.Equal[[]string]) {
			t.Errorf("%q: %q, %v; want %q", c.said, got, err, c.want)
		}
		if err != nil && !errors.Is(err, Unreadable) {
			t.Errorf("%q: %v", c.said, err)
		}
	}
}

// FuzzAnswers: whatever a control program prints, what is read of it is in bounds.
func FuzzAnswers(f *testing.F) {
	f.Add("26.0\n", "12\n13\n", "ACTIVE\n")
	f.Add("1e2\n", "1\n", "Unknown command \"get_server_status\"\n")
	f.Fuzz(func(t *testing.T, percent, clients, how string) {
		lines := func(s string) []string {
			if s == "" {
				return nil
			}
			return strings.Split(strings.TrimSuffix(s, "\n"), "\n")
		}
		s, err := read(7, [][]string{lines(percent), lines(clients), lines(how)})
		if err != nil {
			if !errors.Is(err, Unreadable) {
				t.Errorf("%v", err)
			}
			return
		}
		if !(s.Percent > 0 && s.Percent <= 100) || len(s.Clients) > mostClients || !slices.IsSorted(s.Clients) {
			t.Errorf("%+v", s)
		}
		for i, pid := range s.Clients {
			if pid < 1 || pid > mostPID || i > 0 && pid == s.Clients[i-1] {
				t.Errorf("%+v", s)
			}
		}
		if !slices.Contains([]Status{"", Initializing, Active, Fault}, s.Status) {
			t.Errorf("%+v", s)
		}
	})
}
