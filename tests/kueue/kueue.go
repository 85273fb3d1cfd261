// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v4"
)

// Cluster is an API server, and where programs run beside it.
type Cluster interface {
	// Do makes one request as an administrator. Body and into may be nil; kind is the body's.
	Do(ctx context.Context, method, path, kind string, body, into any) error
	// Run starts a program that runs until somebody ends it.
	Run(ctx context.Context, program string, args ...string) error
}

// Options are what a manager is started with.
type Options struct {
	// Bin is the directory of the programs kueue and kubectl.
	Bin string
	// Dir is for the manager's files, at the same path where it runs, and Kubeconfig has its
	// credentials there.
	Dir, Kubeconfig string
	// Webhooks and Health are ports of loopback, where it runs.
	Webhooks, Health int
	// Configuration, if there is any, is merged into what Kueue's manifests have, as YAML.
	Configuration []byte
	// Gates are feature gates beside those of the configuration.
	Gates map[string]bool
}

// Program is the manager's.
const Program = "kueue"

const (
	namespace = "kueue-system"
	webhooks  = "kueue-webhook-service"
	secret    = "kueue-webhook-server-cert"
)

type object = map[string]any

// Start installs Kueue, starts its manager, and returns when its webhooks answer. Started again
// at the same API server, it leaves what is there.
func Start(ctx context.Context, c Cluster, o Options) error {
	objects, err := o.manifests(ctx)
	if err != nil {
		return fmt.Errorf("start Kueue: %w", err)
	}
	var configuration string
	for _, one := range objects {
		path, wanted := place(one)
		if name, _ := one["metadata"].(object)["name"].(string); one["kind"] == "ConfigMap" && name == "kueue-manager-config" {
			configuration, _ = one["data"].(object)["controller_manager_config.yaml"].(string)
		}
		if !wanted {
			continue
		}
		o.reroute(one)
		if err := c.Do(ctx, http.MethodPatch, path+"?fieldManager=install&force=true", "application/apply-patch+yaml", one, nil); err != nil {
			return fmt.Errorf("start Kueue: install %v: %w", one["kind"], err)
		}
	}
	file, err := o.configure(configuration)
	if err != nil {
		return fmt.Errorf("start Kueue: %w", err)
	}
	if err := c.Run(ctx, filepath.Join(o.Bin, Program), "--config", file, "--kubeconfig", o.Kubeconfig, "--zap-log-level", "2"); err != nil {
		return fmt.Errorf("start Kueue: %w", err)
	}
	if err := await(ctx, func() error { return o.mount(ctx, c) }); err != nil {
		return fmt.Errorf("start Kueue: its certificates: %w", err)
	}
	flavor := object{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": object{"name": "is-kueue-there"}}
	err = await(ctx, func() error {
		return c.Do(ctx, http.MethodPost, "/apis/kueue.x-k8s.io/v1beta2/resourceflavors?dryRun=All", "application/json", flavor, nil)
	})
	if err != nil {
		return fmt.Errorf("start Kueue: its webhooks: %w", err)
	}
	return nil
}

// Source is the directory of Kueue's module.
func Source(ctx context.Context) (string, error) {
	top, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "sigs.k8s.io/kueue")
	cmd.Dir = filepath.Join(filepath.Dir(string(top)), "tests", "cluster", "kueue")
	out, err := cmd.Output()
	var said struct{ Dir, Error string }
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	if err != nil || said.Dir == "" {
		return "", fmt.Errorf("find Kueue's module: %w: %s", err, out)
	}
	return said.Dir, nil
}

// manifests are those of Kueue's release.
func (o *Options) manifests(ctx context.Context) (out []object, err error) {
	source, err := Source(ctx)
	if err != nil {
		return nil, err
	}
	text, err := exec.CommandContext(ctx, filepath.Join(o.Bin, "kubectl"), "kustomize", filepath.Join(source, "config", "default")).Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("put its manifests together: %w", err)
	}
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var one object
		if err := d.Decode(&one); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("read its manifests: %w", err)
		}
		out = append(out, one)
	}
}

// place is where the API has an object that is installed. The others are about a manager in a
// pod, and about who may do what.
func place(o object) (path string, wanted bool) {
	name, _ := o["metadata"].(object)["name"].(string)
	switch o["kind"] {
	case "Namespace":
		return "/api/v1/namespaces/" + name, true
	case "CustomResourceDefinition":
		return "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + name, true
	case "MutatingWebhookConfiguration":
		return "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name, true
	case "ValidatingWebhookConfiguration":
		return "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/" + name, true
	case "Secret":
		return "/api/v1/namespaces/" + namespace + "/secrets/" + name, true
	case "Service":
		return "/api/v1/namespaces/" + namespace + "/services/" + name, name == webhooks
	}
	return "", false
}

// reroute has webhooks called on loopback.
func (o *Options) reroute(one object) {
	if one["kind"] == "Service" {
		one["spec"] = object{"type": "ExternalName", "externalName": "localhost"}
		return
	}
	var walk func(any)
	walk = func(value any) {
		switch value := value.(type) {
		case object:
			if service, ok := value["service"].(object); ok && service["name"] == webhooks {
				service["port"] = o.Webhooks
			}
			for _, inner := range value {
				walk(inner)
			}
		case []any:
			for _, inner := range value {
				walk(inner)
			}
		}
	}
	walk(one)
}

// configure writes the manager's configuration, and returns the file's path.
func (o *Options) configure(shipped string) (path string, err error) {
	var all, more object
	if err := errors.Join(yaml.Unmarshal([]byte(shipped), &all), yaml.Unmarshal(o.Configuration, &more)); err != nil {
		return "", fmt.Errorf("read the configuration: %w", err)
	}
	if all == nil {
		return "", errors.New("its manifests have no configuration")
	}
	merge(all, more)
	gates := object{"VisibilityOnDemand": false}
	for name, on := range o.Gates {
		gates[name] = on
	}
	merge(all, object{
		"health":         object{"healthProbeBindAddress": fmt.Sprintf("127.0.0.1:%d", o.Health)},
		"metrics":        object{"bindAddress": "0"},
		"webhook":        object{"host": "127.0.0.1", "port": o.Webhooks, "certDir": o.certificates()},
		"leaderElection": object{"leaderElect": false},
		"featureGates":   gates,
	})
	text, err := json.Marshal(all)
	if err != nil {
		return "", fmt.Errorf("write the configuration: %w", err)
	}
	path = filepath.Join(o.Dir, "kueue.yaml")
	return path, errors.Join(os.MkdirAll(o.certificates(), 0o755), os.WriteFile(path, text, 0o600))
}

// merge puts what an object says into another one. Lists are replaced.
func merge(into, from object) {
	for key, value := range from {
		inner, ok := value.(object)
		if was, there := into[key].(object); ok && there {
			merge(was, inner)
			continue
		}
		into[key] = value
	}
}

func (o *Options) certificates() string { return filepath.Join(o.Dir, "certificates") }

// mount writes the certificates' Secret as files, once the manager has made them, as a kubelet
// would.
func (o *Options) mount(ctx context.Context, c Cluster) error {
	var s struct{ Data map[string][]byte }
	if err := c.Do(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/secrets/"+secret, "", nil, &s); err != nil {
		return err
	}
	if len(s.Data["tls.crt"]) == 0 || len(s.Data["tls.key"]) == 0 {
		return errors.New("it has made none")
	}
	for _, name := range []string{"tls.key", "tls.crt"} { // the manager looks for the second
		if err := os.WriteFile(filepath.Join(o.certificates(), name), s.Data[name], 0o600); err != nil {
			return err
		}
	}
	return nil
}

// await tries until something is so.
func await(ctx context.Context, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute) // a busy machine takes one
	defer cancel()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(200 * time.Millisecond):
		}
	}
}
