// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/extender"
	"example.com/gpu-agent/internal/fleet"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/placerkube"
	"example.com/gpu-agent/internal/kueue"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/obs/placerobs"
)

// Doors, as --doors names them.
const (
	extenderDoor = "extender"
	liqoDoor     = "liqo"
	kueueDoor    = "kueue"
)

type runFlags struct {
	kubeconfig   string
	names        command.Domains
	doors        command.List
	listen, http string
	tls          extender.Files
	insecure     bool
	mpsApart     bool
	lease        string
	log          command.Log
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	command.Kubeconfig(fs, &f.kubeconfig, "the pod's service account")
	f.names.Register(fs)
	f.doors = command.List{Values: []string{extenderDoor}, Of: []string{extenderDoor, kueueDoor, liqoDoor}}
	fs.Var(&f.doors, "doors",
		"doors to open: extender (kube-scheduler's HTTP extender), kueue (admission checks), "+
			"liqo (GPU ResourceSlices of other clusters)")
	fs.StringVar(&f.listen, "listen", ":9890", "`address` of the extender's door")
	fs.StringVar(&f.http, "http", ":9500", "`address` of metrics and probes; empty for none")
	fs.StringVar(&f.tls.Cert, "tls-cert-file", "", "`file` with the extender's door's certificate (PEM)")
	fs.StringVar(&f.tls.Key, "tls-key-file", "", "`file` with the certificate's key (PEM)")
	fs.StringVar(&f.tls.ClientCA, "client-ca-file", "",
		"`file` with the authorities of clients' certificates (PEM): the door refuses other clients")
	fs.BoolVar(&f.insecure, "insecure-door", false,
		"serve schedulers without --client-ca-file, over plain HTTP without a certificate: "+
			"then any program that reaches the door can reserve room")
	fs.BoolVar(&f.mpsApart, "mps-apart", false,
		"prefer nodes whose MPS GPUs have no pods of other namespaces, where that costs no place")
	fs.StringVar(&f.lease, "lease", "gpu-placer/gpu-placer",
		"`namespace/name` of the Lease by which one of several processes leads; empty if there is only one process")
	f.log.Register(fs)
}

func (f *runFlags) complete() error {
	if err := f.names.Complete(); err != nil {
		return err
	}
	if _, _, ok := command.Namespaced(f.lease); f.lease != "" && !ok {
		return command.Usagef("--lease: %q is not NAMESPACE/NAME", f.lease)
	}
	switch {
	case (f.tls.Cert == "") != (f.tls.Key == ""):
		return command.Usagef("--tls-cert-file and --tls-key-file go together")
	case f.tls.ClientCA != "" && f.tls.Cert == "":
		return command.Usagef("--client-ca-file needs --tls-cert-file: without TLS, clients show no certificate")
	case f.doors.Has(extenderDoor) && f.tls.ClientCA == "" && !f.insecure:
		return command.Usagef("the door extender needs --client-ca-file, --tls-cert-file and --tls-key-file, " +
			"or any program that reaches it can reserve room: " +
			"make them with `gpu-placer certificates`, or set --insecure-door")
	}
	return nil
}

// books returns books that know nothing yet.
func (f *runFlags) books() *fleet.Fleet {
	books := fleet.New(f.names.ResourceDomain, time.Now)
	if f.mpsApart {
		books.KeepApart()
	}
	return books
}

// newRun makes `gpu-placer run`.
func newRun() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use:   "run",
		Short: "answer schedulers which node has room for a pod (the Deployment's program)",
		Long: `Tells schedulers which node has room for a pod, by the GPUNodes of the cluster. One process
serves a cluster; if there are several, one of them leads.`,
		Example: "gpu-placer run --kubeconfig ~/.kube/config --doors kueue",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			return run(c.Context(), f.log.Logger(c.ErrOrStderr()), &f)
		},
	}
	f.register(c.Flags())
	return c
}

// placer has the books, and all that they are connected to.
type placer struct {
	flags   *runFlags
	log     *slog.Logger
	books   *fleet.Fleet
	sites   *fleet.Sites
	metrics *placerobs.Metrics
	cluster *placerkube.Cluster
	// lent and admitted are nil if their doors are not in --doors.
	lent     *liqo.Door
	admitted *kueue.Door
}

// run serves schedulers until ctx ends.
func run(ctx context.Context, log *slog.Logger, f *runFlags) error {
	log.Info("gpu-placer", "version", build().Version(), "domain", f.names.Domain, "doors", f.doors.String())
	p := &placer{flags: f, log: log, books: f.books()}
	p.sites = fleet.CountSites(p.books, f.names.Domain+"/"+gpunode.Site)
	p.metrics = placerobs.NewMetrics(build().Version(), p.state,
		words(extender.Verbs), words(extender.Outcomes), liqo.States, kueue.States)
	var err error
	p.cluster, err = placerkube.New(kube.Options{
		Kubeconfig: f.kubeconfig, Domain: f.names.Domain,
		UserAgent: "gpu-placer", Logger: log, Failed: p.metrics.APIError, Answered: p.metrics.APIAnswered,
		Relist: time.Hour, // reading all pods of a cluster is much work
	})
	if err != nil {
		return err
	}
	p.metrics.APIAnswered() // so that a placer without an API server from its start on is overdue, too
	if f.doors.Has(liqoDoor) {
		lender := fleet.Lend(p.books, liqo.QuotaOf)
		p.lent = liqo.New(lender, liqo.Options{
			API: liqoAPI{p.cluster}, Domain: f.names.Domain, ResourceDomain: f.names.ResourceDomain,
			Leads: lender.Ready, Listed: lender.Listed, Logger: log, Now: time.Now,
		})
	}
	if f.doors.Has(kueueDoor) {
		holder := fleet.HoldFor(p.books, kueue.HoldOf(f.names.Domain))
		p.admitted = kueue.New(holder, kueue.Options{
			API: p.cluster, Domain: f.names.Domain,
			Leads: holder.Ready, Listed: holder.Listed, Logger: log, Now: time.Now,
		})
	}
	if err := p.serve(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("ended")
	return nil
}

// state returns what the metrics show of the books and the doors.
func (p *placer) state() (s placerobs.State) {
	s.Waiting, s.Reservations = p.books.State()
	s.PassedOver = p.books.PassedOver()
	s.Leads = p.books.Ready() == nil
	s.Sites = map[string]placerobs.SiteUse{}
	for site, use := range p.sites.Use() {
		s.Sites[site] = placerobs.SiteUse{GPUs: use.GPUs, Seconds: use.Time.Seconds()}
	}
	if p.lent != nil {
		s.Slices = p.lent.State()
	}
	if p.admitted != nil {
		s.Checks = p.admitted.State()
	}
	return s
}

// serve runs everything until ctx ends or a part of it fails.
func (p *placer) serve(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	if ns, name, elected := command.Namespaced(p.flags.lease); elected {
		lease := p.cluster.NewLease(ns, name, identity(), p.books.Lead)
		p.books.LeadBy(lease.Leads)
		g.Go(func() error {
			// A placer without the cluster's objects waits: it would only take the lease from
			// one that can answer.
			if err := p.books.WaitListed(ctx); err != nil {
				return err
			}
			return lease.Run(ctx)
		})
	}
	page := obs.New(obs.Options{
		Addr: p.flags.http, Logger: p.log, Metrics: p.metrics.Registry(), Ready: p.books.Ready,
		// State takes the books' lock: if it does not return, the placer hangs.
		Healthy: func() error { p.books.State(); return nil },
	})
	g.Go(func() error { return page.Run(ctx) })
	if p.lent != nil {
		g.Go(func() error { return p.lent.Run(ctx) })
		g.Go(func() error { return p.cluster.Follow(ctx, liqo.Slices, liqoObjects{p.lent, true}) })
		g.Go(func() error { return p.cluster.Follow(ctx, liqo.Tenants, liqoObjects{p.lent, false}) })
	}
	if p.admitted != nil {
		g.Go(func() error { return p.admitted.Run(ctx) })
		kinds := []schema.GroupVersionResource{kueue.Workloads, kueue.ResourceFlavors, kueue.AdmissionChecks}
		for _, of := range kinds {
			g.Go(func() error { return p.cluster.Follow(ctx, of, kueueObjects{p.admitted, of}) })
		}
	}
	if p.flags.doors.Has(extenderDoor) {
		p.books.TellUnguarded(func(u fleet.Unguarded) {
			p.metrics.Unguarded()
			p.log.Warn("a pod was bound without asking the placer",
				"namespace", u.Namespace, "pod", u.Name, "node", u.Node)
		})
		door := extender.New(p.books, extender.Options{
			Answered: func(v extender.Verb, how extender.Outcome, took time.Duration) {
				p.metrics.Answered(string(v), string(how), took)
			},
		})
		g.Go(func() error { return p.serveExtender(ctx, door) })
	}
	g.Go(func() error { return p.cluster.Watch(ctx, p.books) })
	g.Go(func() error {
		return p.books.Run(ctx, func(ctx context.Context, node string) error {
			err := p.cluster.Wake(ctx, node)
			p.metrics.Woke(err)
			return err
		})
	})
	return g.Wait()
}

// liqoAPI is the API server as the Liqo door calls it.
type liqoAPI struct{ *placerkube.Cluster }

func (a liqoAPI) Objects(ctx context.Context, slices bool, see func(*unstructured.Unstructured)) error {
	of := liqo.Tenants
	if slices {
		of = liqo.Slices
	}
	return a.Read(ctx, of, see)
}

func (a liqoAPI) Write(ctx context.Context, o *unstructured.Unstructured) (*unstructured.Unstructured, bool, error) {
	return a.WriteStatus(ctx, liqo.Slices, o)
}

// liqoObjects passes one of the two kinds of objects to the Liqo door.
type liqoObjects struct {
	*liqo.Door
	slices bool
}

func (o liqoObjects) Set(of *unstructured.Unstructured) { o.Door.Set(o.slices, of) }
func (o liqoObjects) Delete(uid string)                 { o.Door.Delete(o.slices, uid) }
func (o liqoObjects) Listed()                           { o.Door.Listed(o.slices) }

// kueueObjects passes one kind of objects to the Kueue door.
type kueueObjects struct {
	*kueue.Door
	of schema.GroupVersionResource
}

func (o kueueObjects) Set(of *unstructured.Unstructured) { o.Door.Set(o.of, of) }
func (o kueueObjects) Listed()                           { o.Door.Listed(o.of) }

// identity returns a name for this process. It is unique, even if another pod gets this pod's
// name.
func identity() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + "_" + rand.Text()
}

func words[T ~string](list []T) (out []string) {
	for _, word := range list {
		out = append(out, string(word))
	}
	return out
}

// serveExtender answers schedulers until ctx ends.
func (p *placer) serveExtender(ctx context.Context, door http.Handler) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", p.flags.listen)
	if err != nil {
		return fmt.Errorf("serve schedulers on %q (--listen): %w", p.flags.listen, err)
	}
	listener = obs.Bound(listener)
	secured := p.flags.tls.Cert != ""
	if secured {
		config, err := p.flags.tls.Config(p.log, p.metrics.Expires)
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		listener = tls.NewListener(listener, config)
	}
	server := extender.Server(door)
	server.ConnState = obs.Asks
	server.ErrorLog = slog.NewLogLogger(p.log.Handler(), slog.LevelDebug)
	p.log.Info("serving schedulers", "addr", listener.Addr().String(),
		"tls", secured, "client_certificates", p.flags.tls.ClientCA != "")
	return obs.ServeUntil(ctx, server, listener, "schedulers")
}
