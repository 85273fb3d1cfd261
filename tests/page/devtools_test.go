// SPDX-License-Identifier: Apache-2.0

package page

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// browser is a running Chromium. It is spoken to over two pipes: messages are
// JSON, and end with a zero byte.
type browser struct {
	cmd   *exec.Cmd
	to    io.WriteCloser
	log   string        // a file with what it has to say for itself
	ended chan struct{} // the browser says nothing more

	mu      sync.Mutex // guards all below, and writing
	next    int
	waiting map[int]chan message
	events  []message
	news    chan struct{} // closed at the next event
}

type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
		Data    string `json:"data"`
	} `json:"error,omitempty"`
}

// start runs the browser with home for everything that it writes, and a
// typeface as the system's.
func (c *chromium) start(home, typeface string) (*browser, error) {
	fonts := filepath.Join(home, "fonts.conf")
	if err := os.WriteFile(fonts, []byte(c.fontsConf(typeface)), 0o644); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(home, "stderr"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	commandsOut, commandsIn, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	answersOut, answersIn, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, commandsOut.Close(), commandsIn.Close())
	}
	b := &browser{to: commandsIn, log: log.Name(), waiting: map[int]chan message{}, ended: make(chan struct{}), news: make(chan struct{})}
	b.cmd = exec.Command(c.program,
		"--remote-debugging-pipe",
		// The sandbox does not work for root; the pages are our own.
		"--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-breakpad", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
		"--hide-scrollbars", "--force-color-profile=srgb", "--font-render-hinting=none", "--disable-lcd-text",
		"--user-data-dir="+home, "about:blank")
	b.cmd.Env = append(c.env[:len(c.env):len(c.env)], "FONTCONFIG_FILE="+fonts, "HOME="+home, "TMPDIR="+home, "XDG_CACHE_HOME="+home, "XDG_CONFIG_HOME="+home)
	b.cmd.Stderr = log
	b.cmd.ExtraFiles = []*os.File{commandsOut, answersIn} // 3 and 4
	// A group of its own, so that its helpers can be ended with it.
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = b.cmd.Start()
	commandsOut.Close()
	answersIn.Close()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the browser: %w", err), commandsIn.Close(), answersOut.Close())
	}
	go b.read(answersOut)
	return b, nil
}

// stop ends the browser and all that it has started.
func (b *browser) stop() {
	b.to.Close() // it ends by itself when nobody speaks to it
	select {
	case <-b.ended:
	case <-time.After(5 * time.Second):
	}
	syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
	<-b.ended
	b.cmd.Wait()
}

func (b *browser) read(from io.ReadCloser) {
	defer close(b.ended)
	defer from.Close()
	in := bufio.NewReader(from)
	for {
		line, err := in.ReadBytes(0)
		if err != nil {
			return
		}
		var m message
		if json.Unmarshal(line[:len(line)-1], &m) != nil {
			return
		}
		b.mu.Lock()
		if m.ID != 0 {
			if answer := b.waiting[m.ID]; answer != nil {
				delete(b.waiting, m.ID)
				answer <- m
			}
		} else {
			b.events = append(b.events, m)
			close(b.news)
			b.news = make(chan struct{})
		}
		b.mu.Unlock()
	}
}

// call sends a command and decodes its answer into result, if that is not nil.
func (b *browser) call(ctx context.Context, session, method string, params, result any) error {
	text, err := json.Marshal(params)
	if err != nil {
		return err
	}
	answer := make(chan message, 1)
	b.mu.Lock()
	b.next++
	b.waiting[b.next] = answer
	line, err := json.Marshal(message{ID: b.next, Session: session, Method: method, Params: text})
	if err == nil {
		_, err = b.to.Write(append(line, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case m := <-answer:
		switch {
		case m.Error != nil:
			return fmt.Errorf("%s: %s %s", method, m.Error.Message, m.Error.Data)
		case result != nil:
			return json.Unmarshal(m.Result, result)
		}
		return nil
	case <-b.ended:
		said, _ := os.ReadFile(b.log)
		return fmt.Errorf("%s: the browser has ended:\n%s", method, said)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// wait returns when the session has had an event.
func (b *browser) wait(ctx context.Context, session, method string) error {
	for {
		b.mu.Lock()
		news := b.news
		for _, e := range b.events {
			if e.Session == session && e.Method == method {
				b.mu.Unlock()
				return nil
			}
		}
		b.mu.Unlock()
		select {
		case <-news:
		case <-b.ended:
			return fmt.Errorf("wait for %s: the browser has ended", method)
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", method, ctx.Err())
		}
	}
}

// tab is one page in the browser.
type tab struct {
	b               *browser
	target, session string
}

// view is how a page is looked at.
type view struct {
	width  int
	dark   bool
	forced bool    // the system's few colours instead of the page's
	scale  float64 // pixels of the picture for one of the page
}

func (v view) String() string {
	return fmt.Sprintf("%dpx-%s%s", v.width, v.scheme(), map[bool]string{true: "-forced"}[v.forced])
}

func (v view) scheme() string {
	if v.dark {
		return "dark"
	}
	return "light"
}

// open loads a page. The window is as high as it has to be to show all of it.
func (b *browser) open(ctx context.Context, url string, v view) (*tab, error) {
	t := &tab{b: b}
	var target struct{ TargetID string }
	if err := b.call(ctx, "", "Target.createTarget", map[string]any{"url": "about:blank"}, &target); err != nil {
		return nil, err
	}
	t.target = target.TargetID
	var session struct{ SessionID string }
	if err := b.call(ctx, "", "Target.attachToTarget", map[string]any{"targetId": t.target, "flatten": true}, &session); err != nil {
		return nil, err
	}
	t.session = session.SessionID
	features := []map[string]string{{"name": "prefers-color-scheme", "value": v.scheme()}}
	if v.forced {
		features = append(features, map[string]string{"name": "forced-colors", "value": "active"})
	}
	for _, c := range []struct {
		method string
		params any
	}{
		{"Page.enable", nil}, {"Runtime.enable", nil}, {"Log.enable", nil}, {"Network.enable", nil}, {"Accessibility.enable", nil},
		{"Emulation.setFocusEmulationEnabled", map[string]any{"enabled": true}},
		{"Emulation.setEmulatedMedia", map[string]any{"features": features}},
		{"Emulation.setDeviceMetricsOverride", v.metrics(800)},
	} {
		if c.params == nil {
			c.params = struct{}{}
		}
		if err := t.call(ctx, c.method, c.params, nil); err != nil {
			return nil, err
		}
	}
	var went struct{ ErrorText string }
	if err := t.call(ctx, "Page.navigate", map[string]any{"url": url}, &went); err != nil {
		return nil, err
	}
	if went.ErrorText != "" {
		return nil, fmt.Errorf("load %s: %s", url, went.ErrorText)
	}
	if err := b.wait(ctx, t.session, "Page.loadEventFired"); err != nil {
		return nil, err
	}
	var height int
	if err := t.evaluate(ctx, "document.documentElement.scrollHeight", &height); err != nil {
		return nil, err
	}
	return t, t.call(ctx, "Emulation.setDeviceMetricsOverride", v.metrics(max(height, 200)), nil)
}

func (v view) metrics(height int) map[string]any {
	return map[string]any{"width": v.width, "height": height, "deviceScaleFactor": max(v.scale, 1), "mobile": false}
}

func (t *tab) close(ctx context.Context) error {
	return t.b.call(ctx, "", "Target.closeTarget", map[string]any{"targetId": t.target}, nil)
}

func (t *tab) call(ctx context.Context, method string, params, result any) error {
	return t.b.call(ctx, t.session, method, params, result)
}

// evaluate runs a script in the page, which the page's own policy does not
// bind, and decodes its value.
func (t *tab) evaluate(ctx context.Context, script string, result any) error {
	var answer struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	err := t.call(ctx, "Runtime.evaluate", map[string]any{"expression": script, "returnByValue": true, "awaitPromise": true}, &answer)
	if err != nil {
		return err
	}
	if e := answer.ExceptionDetails; e != nil {
		return fmt.Errorf("the script in the page: %s %s", e.Text, e.Exception.Description)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(answer.Result.Value, result)
}

// complaints is what the browser has to say about the page: on its console, and
// every request but that for the page and for what it carries itself.
func (t *tab) complaints(url string) []string {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	var list []string
	for _, e := range t.b.events {
		if e.Session != t.session {
			continue
		}
		switch e.Method {
		case "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded":
			list = append(list, e.Method+": "+string(e.Params))
		case "Network.requestWillBeSent":
			var r struct{ Request struct{ URL string } }
			if err := json.Unmarshal(e.Params, &r); err != nil || r.Request.URL != url && !strings.HasPrefix(r.Request.URL, "data:") {
				list = append(list, "a request for "+r.Request.URL)
			}
		}
	}
	return list
}

// picture is the top of the page as PNG, or all of it for a height of 0.
func (t *tab) picture(ctx context.Context, v view, height int) ([]byte, error) {
	params := map[string]any{"format": "png"}
	if height > 0 {
		params["clip"] = map[string]any{"x": 0, "y": 0, "width": v.width, "height": height, "scale": 1}
	}
	var shot struct{ Data []byte }
	err := t.call(ctx, "Page.captureScreenshot", params, &shot)
	return shot.Data, err
}
