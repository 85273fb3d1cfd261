// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/pkg/gpu"
)

// Domains are the flags for the domains in names. Call Register on a zero value.
type Domains struct {
	// Domain is the domain of labels, annotations, GPUNodes and resources.
	Domain string
	// ResourceDomain is the domain of resources only. If it is empty, Complete sets it to
	// Domain.
	ResourceDomain string
}

// Register adds --domain and --resource-domain.
func (d *Domains) Register(fs *pflag.FlagSet) {
	fs.StringVar(&d.Domain, "domain", "example.com",
		"`domain` of labels, annotations, the CDI vendor and resources; the manifests have it too, "+
			"in daemonset.yaml, admission.yaml, crd.yaml, rbac.yaml, people.yaml, components/dra and placer")
	fs.StringVar(&d.ResourceDomain, "resource-domain", "",
		"`domain` of resources only, in admission.yaml too (default: --domain)")
}

// Complete checks the domains and sets defaults.
func (d *Domains) Complete() error {
	d.ResourceDomain = cmp.Or(d.ResourceDomain, d.Domain)
	if err := gpu.ValidateDomain(d.Domain); err != nil {
		return Usagef("--domain: %w", err)
	}
	if err := gpu.ValidateDomain(d.ResourceDomain); err != nil {
		return Usagef("--resource-domain: %w", err)
	}
	return nil
}

// Kubeconfig adds --kubeconfig. otherwise is what counts without it, in words.
func Kubeconfig(fs *pflag.FlagSet, file *string, otherwise string) {
	fs.StringVar(file, "kubeconfig", "",
		"`file` with the API server's address and credentials (default: "+otherwise+")")
}

// DriverRoot adds --driver-root.
func DriverRoot(fs *pflag.FlagSet, root *string) {
	fs.StringVar(root, "driver-root", "/", "`directory` where the agent sees the driver's files")
}

// StateDir adds --state-dir, also to commands that only read it.
func StateDir(fs *pflag.FlagSet, dir *string) {
	fs.StringVar(dir, "state-dir", "/var/lib/gpu-agent",
		"`directory` of the agent's own files: its socket, the usage journal and others; the same path on the host")
}

// Log are the flags of a program that writes a log. Call Register on a zero value.
type Log struct {
	format, level Choice
}

// Register adds --log-format and --log-level.
func (l *Log) Register(fs *pflag.FlagSet) {
	l.format = Choice{Value: "text", Of: []string{"text", "json"}}
	fs.Var(&l.format, "log-format", "how the log is written")
	l.level = Choice{Value: "info", Of: []string{"debug", "info", "warn", "error"}}
	fs.Var(&l.level, "log-level", "level of the least severe lines that are logged")
}

// Logger returns a logger that writes to w as the flags say.
func (l *Log) Logger(w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.level.Value)) // one of four known words
	options := &slog.HandlerOptions{Level: level}
	if l.format.Value == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// Namespaced splits NAMESPACE/NAME; ok is false if s has another form.
func Namespaced(s string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(s, "/")
	return namespace, name, ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}
