// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/status"
)

// BundleOptions say what goes into a bundle.
type BundleOptions struct {
	// Redact hides the names of tenants.
	Redact bool
	// Version is this program's, and Now the time of the files in the archive.
	Version string
	Now     time.Time
}

// Bounds of what a bundle has of a log and of the usage journal.
const (
	bundleLog     = 8 << 20
	bundleLines   = 20_000
	bundleRecords = 5_000
)

// WriteBundle writes an archive (.tar.gz) with what a report about a node needs. The
// archive's missing.txt and the returned notes name what could not be read: a node in trouble is
// what bundles are for. It fails if the archive cannot be written, or if a part cannot be redacted.
func WriteBundle(
	ctx context.Context, c *pluginkube.Client, node string, o BundleOptions, out io.Writer,
) (notes []string, err error) {
	b := &bundle{ctx: ctx, c: c, node: node}
	b.collect(o.Version)
	missing := strings.Join(b.missing, "\n")
	if missing != "" {
		b.add("missing.txt", []byte(missing+"\n"), nil)
	}
	if o.Redact {
		keep := []string{node, b.agent.Namespace, b.agent.Name, "gpu-agent", "gpu-partitions", "kube-system", "default",
			c.Domain(), c.ResourceDomain()}
		if err := newRedactor(keep...).redact(b.parts); err != nil {
			return b.missing, err
		}
	}
	if err := b.draw(); err != nil {
		return b.missing, err
	}
	return b.missing, writeArchive(out, "gpu-"+node, b.parts, o.Now)
}

// draw adds the status in text, made from the part status.json: its table cuts long names, which
// would be no names to a redactor any longer.
func (b *bundle) draw() error {
	for i := range b.parts {
		if b.parts[i].name != "status.json" {
			continue
		}
		var s status.Status
		if err := json.Unmarshal(b.parts[i].data, &s); err != nil {
			return fmt.Errorf("read status.json: %w", err)
		}
		var text bytes.Buffer
		err := status.WriteText(&text, s, status.TextOptions{Width: 160})
		b.add("status.txt", text.Bytes(), err)
		return err
	}
	return nil
}

// partitionsName is the ConfigMap with the partitions, as in the agent's manifests.
const partitionsName = "gpu-partitions"

// bundle collects the parts.
type bundle struct {
	ctx     context.Context
	c       *pluginkube.Client
	node    string
	agent   pluginkube.Agent
	parts   []part
	missing []string
}

// add adds a part, or notes why it is missing.
func (b *bundle) add(name string, data []byte, err error) {
	if err != nil {
		b.missing = append(b.missing, printable(name+": "+err.Error()))
		return
	}
	b.parts = append(b.parts, part{name, data})
}

// addJSON adds a value.
func (b *bundle) addJSON(name string, v any, err error) {
	var data []byte
	if err == nil {
		data, err = json.MarshalIndent(v, "", "  ")
	}
	b.add(name, append(data, '\n'), err)
}

// versions is the part versions.json.
type versions struct {
	Plugin string `json:"plugin"`
	Server string `json:"server,omitempty"`
	Agent  string `json:"agent,omitempty"`
	Image  string `json:"image,omitempty"`
	Driver string `json:"driver,omitempty"`
	CUDA   string `json:"cuda,omitempty"`
}

func (b *bundle) collect(version string) {
	is := versions{Plugin: version}
	facts, err := b.c.Look(b.ctx, pluginkube.Subject{Kind: "node", Name: b.node})
	if err == nil {
		d := facts.Explain()
		var text bytes.Buffer
		err = d.Write(&text)
		b.addJSON("why.json", d, nil)
		b.add("why.txt", text.Bytes(), err)
		b.addJSON("events.json", facts.Events, nil)
	} else {
		b.add("why.txt", nil, err)
	}
	if server, err := b.c.ServerVersion(b.ctx); err == nil {
		is.Server = server
	} else {
		b.missing = append(b.missing, printable("the server's version: "+err.Error()))
	}
	o, err := b.c.Object(b.ctx, "gpunode", "", b.node)
	b.addJSON("gpunode.json", o, err)
	o, err = b.c.Object(b.ctx, "node", "", b.node)
	if of := asMap(o["status"]); of != nil {
		delete(of, "images") // tenants' images, and long
	}
	b.addJSON("node.json", o, err)
	if b.agent, err = b.c.AgentOn(b.ctx, b.node); err != nil {
		b.add("the agent's pod, log, status and journal", nil, err)
	} else {
		is.Image = b.agent.Image
		b.ofAgent(&is)
	}
	b.addJSON("versions.json", is, nil)
}

// ofAgent adds what is had from the agent's pod.
func (b *bundle) ofAgent(is *versions) {
	a := b.agent
	o, err := b.c.Object(b.ctx, "pod", a.Namespace, a.Name)
	b.addJSON("agent-pod.json", o, err)
	o, err = b.c.Object(b.ctx, "configmap", a.Namespace, partitionsName)
	text, _ := asMap(o["data"])[config.ManifestKey].(string)
	if err == nil && text == "" {
		err = fmt.Errorf("the ConfigMap %s/%s has no key %s", a.Namespace, partitionsName, config.ManifestKey)
	}
	b.add("partitions.yaml", []byte(text), err)
	data, err := b.log(false)
	b.add("log.txt", data, err)
	if a.Restarts > 0 {
		data, err = b.log(true)
		b.add("log-previous.txt", data, err)
	}
	p, err := openPages(b.ctx, b.c, a)
	if err != nil {
		b.add("the agent's status, settings and journal", nil, err)
		return
	}
	defer p.Close()
	s, err := p.Status(b.ctx)
	b.addJSON("status.json", s, err)
	if err == nil {
		is.Agent, is.Driver, is.CUDA = s.Version, s.Driver, s.CUDA
	}
	settings, err := p.Settings(b.ctx)
	b.add("settings.json", settings, err)
	journal, err := p.Journal(b.ctx, bundleRecords)
	b.add("journal.jsonl", journal, err)
}

// log returns the end of the agent's log.
func (b *bundle) log(previous bool) ([]byte, error) {
	body, err := b.c.Log(b.ctx, b.agent.Namespace, b.agent.Name, pluginkube.LogOptions{Container: agentContainer,
		Previous: previous, Tail: bundleLines, Most: bundleLog})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, bundleLog))
}

// writeArchive writes parts below one folder.
func writeArchive(out io.Writer, folder string, parts []part, now time.Time) error {
	z := gzip.NewWriter(out)
	w := tar.NewWriter(z)
	for _, p := range parts {
		h := &tar.Header{Name: folder + "/" + p.name, Mode: 0o600, Size: int64(len(p.data)),
			ModTime: now.Truncate(time.Second)}
		if err := w.WriteHeader(h); err != nil {
			return fmt.Errorf("write %s into the bundle: %w", p.name, err)
		}
		if _, err := w.Write(p.data); err != nil {
			return fmt.Errorf("write %s into the bundle: %w", p.name, err)
		}
	}
	return errors.Join(w.Close(), z.Close())
}
