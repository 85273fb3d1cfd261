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

// Doors, by what --doors calls them.
const (
	extenderDoor = "extender"
	liqoDoor     = "liqo"
	kueueDoor    = "kueue"
)

type placerFlags struct {
	names        nameFlags
	doors        command.List
	listen, http string
	tls          extender.Files
	insecure     bool
	lease        string
	log          logFlags
}

func (f *placerFlags) register(fs *pflag.FlagSet) {
	f.names.registerCluster(fs)
	f.doors = command.List{Values: []string{extenderDoor}, Of: []string{extenderDoor, kueueDoor, liqoDoor}}
	fs.Var(&f.doors, "doors", "for whom: extender (kube-scheduler's HTTP extender), kueue (admission checks), liqo (GPU ResourceSlices of other clusters)")
	fs.StringVar(&f.listen, "listen", ":9890", "`address` of the extender's door")
	httpFlag(fs, &f.http)
	fs.StringVar(&f.tls.Cert, "tls-cert-file", "", "`file` with the extender's door's certificate (PEM)")
	fs.StringVar(&f.tls.Key, "tls-key-file", "", "`file` with the certificate's key (PEM)")
	fs.StringVar(&f.tls.ClientCA, "client-ca-file", "", "`file` with the authorities of clients' certificates (PEM): the door refuses everybody else")
	fs.BoolVar(&f.insecure, "insecure-door", false, "serve schedulers without --client-ca-file, over plain HTTP without a certificate: then whoever reaches the door can reserve room")
	fs.StringVar(&f.lease, "lease", "gpu-placer/gpu-placer", "`namespace/name` of the Lease by which one of several processes leads; empty where there is one process")
	f.log.register(fs)
}

func (f *placerFlags) complete() error {
	if err := f.names.complete(); err != nil {
		return err
	}
	if _, _, ok := splitName(f.lease); f.lease != "" && !ok {
		return command.Usagef("--lease: %q is not NAMESPACE/NAME", f.lease)
	}
	switch {
	case (f.tls.Cert == "") != (f.tls.Key == ""):
		return command.Usagef("--tls-cert-file and --tls-key-file go together")
	case f.tls.ClientCA != "" && f.tls.Cert == "":
		return command.Usagef("--client-ca-file needs --tls-cert-file: without TLS nobody shows a certificate")
	case f.doors.Has(extenderDoor) && f.tls.ClientCA == "" && !f.insecure:
		return command.Usagef("the door extender needs --client-ca-file, --tls-cert-file and --tls-key-file, or everybody who reaches it can reserve room: make them with `gpu-agent certificates`, or say --insecure-door")
	}
	return nil
}

// newPlacer makes `gpu-agent placer`.
func newPlacer() *cobra.Command {
	var f placerFlags
	c := &cobra.Command{
		Use:   "placer",
		Short: "answer schedulers which node has room for a pod (a Deployment's program)",
		Long: `Tells schedulers which node has room for a pod, by the GPUNodes of the cluster. One process
serves a cluster; of several, one leads.`,
		Example: "gpu-agent placer --kubeconfig ~/.kube/config --doors kueue",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			return place(c.Context(), consoleOf(c), &f)
		},
	}
	f.register(c.Flags())
	return c
}

func place(ctx context.Context, c console, f *placerFlags) error {
	log := f.log.logger(c)
	log.Info("gpu-agent placer", "version", version(), "domain", f.names.domain, "doors", f.doors.String())

	books := fleet.New(f.names.resourceDomain, time.Now)
	sites := fleet.CountSites(books, f.names.domain+"/"+gpunode.Site)
	var lent *liqo.Door
	var admitted *kueue.Door
	metrics := placerobs.NewMetrics(version(), func() (s placerobs.State) {
		s.Waiting, s.Reservations = books.State()
		s.PassedOver = books.PassedOver()
		s.Leads = books.Ready() == nil
		s.Sites = map[string]placerobs.SiteUse{}
		for site, use := range sites.Use() {
			s.Sites[site] = placerobs.SiteUse{GPUs: use.GPUs, Seconds: use.Time.Seconds()}
		}
		if lent != nil {
			s.Slices = lent.State()
		}
		if admitted != nil {
			s.Checks = admitted.State()
		}
		return s
	}, words(extender.Verbs), words(extender.Outcomes), liqo.States, kueue.States)
	cluster, err := placerkube.New(kube.Options{
		Kubeconfig: f.names.kubeconfig, Domain: f.names.domain,
		UserAgent: "gpu-placer", Logger: log, Failed: metrics.APIError, Answered: metrics.APIAnswered,
		Relist: time.Hour, // all pods of a cluster are much to read again
	})
	if err != nil {
		return err
	}
	metrics.APIAnswered() // as in an agent
	if f.doors.Has(liqoDoor) {
		lent = openToLiqo(books, cluster, f, log)
	}
	if f.doors.Has(kueueDoor) {
		holder := fleet.HoldFor(books, kueue.HoldOf(f.names.domain))
		admitted = kueue.New(holder, kueue.Options{API: cluster, Domain: f.names.domain, Leads: holder.Ready, Listed: holder.Listed, Logger: log, Now: time.Now})
	}
	page := obs.New(obs.Options{Addr: f.http, Logger: log, Metrics: metrics.Registry(), Ready: books.Ready,
		// Who cannot even say this hangs.
		Healthy: func() error { books.State(); return nil },
	})

	g, ctx := errgroup.WithContext(ctx)
	if ns, name, elected := splitName(f.lease); elected {
		lease := cluster.NewLease(ns, name, identity(), books.Lead)
		books.LeadBy(lease.Leads)
		g.Go(func() error {
			// Who knows nothing yet would only take the lease from who could answer.
			if err := books.WaitListed(ctx); err != nil {
				return err
			}
			return lease.Run(ctx)
		})
	}
	g.Go(func() error { return page.Run(ctx) })
	if lent != nil {
		g.Go(func() error { return lent.Run(ctx) })
		g.Go(func() error { return cluster.Follow(ctx, liqo.Slices, liqoObjects{lent, true}) })
		g.Go(func() error { return cluster.Follow(ctx, liqo.Tenants, liqoObjects{lent, false}) })
	}
	if admitted != nil {
		g.Go(func() error { return admitted.Run(ctx) })
		for _, of := range []schema.GroupVersionResource{kueue.Workloads, kueue.ResourceFlavors, kueue.AdmissionChecks} {
			g.Go(func() error { return cluster.Follow(ctx, of, kueueObjects{admitted, of}) })
		}
	}
	if f.doors.Has(extenderDoor) {
		books.TellUnguarded(func(p fleet.Unguarded) {
			metrics.Unguarded()
			log.Warn("a pod was bound without the placer's word", "namespace", p.Namespace, "pod", p.Name, "node", p.Node)
		})
		door := extender.New(books, extender.Options{Answered: func(v extender.Verb, how extender.Outcome, took time.Duration) {
			metrics.Answered(string(v), string(how), took)
		}})
		g.Go(func() error { return serveExtender(ctx, f, door, log) })
	}
	g.Go(func() error { return cluster.Watch(ctx, books) })
	g.Go(func() error {
		return books.Run(ctx, func(ctx context.Context, node string) error {
			err := cluster.Wake(ctx, node)
			metrics.Woke(err)
			return err
		})
	})
	if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("ended")
	return nil
}

// openToLiqo has the books keep what other clusters are granted through Liqo.
func openToLiqo(books *fleet.Fleet, cluster *placerkube.Cluster, f *placerFlags, log *slog.Logger) *liqo.Door {
	lender := fleet.Lend(books, liqo.QuotaOf)
	return liqo.New(lender, liqo.Options{
		API: liqoAPI{cluster}, Domain: f.names.domain, ResourceDomain: f.names.resourceDomain,
		Leads: lender.Ready, Listed: lender.Listed, Logger: log, Now: time.Now,
	})
}

// liqoAPI is the API server as the door for Liqo asks it.
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

// liqoObjects tells the door of one of the two kinds of objects.
type liqoObjects struct {
	*liqo.Door
	slices bool
}

func (o liqoObjects) Set(of *unstructured.Unstructured) { o.Door.Set(o.slices, of) }
func (o liqoObjects) Delete(uid string)                 { o.Door.Delete(o.slices, uid) }
func (o liqoObjects) Listed()                           { o.Door.Listed(o.slices) }

// kueueObjects tells the door of one kind of objects.
type kueueObjects struct {
	*kueue.Door
	of schema.GroupVersionResource
}

func (o kueueObjects) Set(of *unstructured.Unstructured) { o.Door.Set(o.of, of) }
func (o kueueObjects) Listed()                           { o.Door.Listed(o.of) }

// identity is this process's alone, also where its pod's name is given to another one.
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
func serveExtender(ctx context.Context, f *placerFlags, door http.Handler, log *slog.Logger) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", f.listen)
	if err != nil {
		return fmt.Errorf("serve schedulers on %q (--listen): %w", f.listen, err)
	}
	listener = obs.Bound(listener)
	secured := f.tls.Cert != ""
	if secured {
		config, err := f.tls.Config(log)
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		listener = tls.NewListener(listener, config)
	}
	server := extender.Server(door)
	server.ConnState = obs.Asks
	server.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	log.Info("serving schedulers", "addr", listener.Addr().String(), "tls", secured, "client_certificates", f.tls.ClientCA != "")
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve schedulers on %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		server.Close()
	}
	<-failed
	return ctx.Err()
}
