// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/extender"
)

type certificateFlags struct {
	out, names string
	days       int
}

func (f *certificateFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.out, "out", "door",
		"`directory` for the files; it is made if it is missing, and none of the files may exist")
	fs.StringVar(&f.names, "names", "gpu-placer.gpu-placer.svc",
		"`names` and addresses by which the scheduler reaches the door, separated by commas")
	fs.IntVar(&f.days, "days", 365, "for how many `days` they are valid")
}

// newCertificates makes `gpu-placer certificates`.
func newCertificates() *cobra.Command {
	var f certificateFlags
	c := &cobra.Command{
		Use:   "certificates",
		Short: "make the certificates of kube-scheduler and the placer's door",
		Long: `Makes the certificates by which kube-scheduler and the placer's door know each other, and
prints where each file belongs. The authority's key is not kept.`,
		Example: "gpu-placer certificates --out door --names gpu-placer.gpu-placer.svc,10.96.0.20",
		RunE:    func(c *cobra.Command, _ []string) error { return f.make(c.OutOrStdout()) },
	}
	f.register(c.Flags())
	return c
}

func (f *certificateFlags) make(out io.Writer) error {
	blank := func(name string) bool { return strings.TrimSpace(name) == "" }
	names := slices.DeleteFunc(strings.Split(f.names, ","), blank)
	if f.days < 1 {
		return command.Usagef("--days %d: at least 1", f.days)
	}
	now := time.Now()
	files, err := extender.Certificates(names, now.Add(-time.Hour), now.AddDate(0, 0, f.days))
	if err != nil {
		return command.Usagef("--names %q: %w", f.names, err)
	}
	if err := os.MkdirAll(f.out, 0o700); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := writeNew(filepath.Join(f.out, name), files[name]); err != nil {
			return err
		}
	}
	path := func(name string) string { return filepath.Join(f.out, name) }
	fmt.Fprintf(out, "for the placer, in its namespace:\n"+
		"  kubectl -n gpu-placer create secret generic gpu-placer-door --from-file=%s --from-file=%s --from-file=%s\n",
		path(extender.CAFile), path(extender.CertFile), path(extender.KeyFile))
	fmt.Fprintf(out, "for kube-scheduler's host, "+
		"in the folder that its configuration names (/etc/kubernetes/placer):\n"+
		"  %s %s %s\n",
		path(extender.CAFile), path(extender.SchedulerCertFile), path(extender.SchedulerKeyFile))
	fmt.Fprintf(out, "valid until %s\n", now.AddDate(0, 0, f.days).Format(time.DateOnly))
	return nil
}

// writeNew writes a new file that only its owner can read. It fails if the file exists.
func writeNew(path string, data []byte) (err error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = file.Write(data)
	return err
}
