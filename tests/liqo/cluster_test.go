// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/plane"
)

const (
	// system is the namespace of Liqo's programs.
	system = "liqo"

	authentication = "/apis/authentication.liqo.io/v1beta1"
	offloading     = "/apis/offloading.liqo.io/v1beta1"
)

type fields = map[string]any

// cluster is a control plane with Liqo: its controllers, its webhooks and what replicates
// objects to other clusters, as processes of this machine with the rights that its chart gives them.
type cluster struct {
	*plane.Server
	// id is the cluster's name for others.
	id string
	// authority is the certificate by which clients know the API server.
	authority []byte
	webhooks  func(t *testing.T, port int)
}

// start starts a control plane with Liqo, and Kubernetes' controllers of these names beside those
// that Liqo needs.
func start(t *testing.T, id string, controllers ...string) *cluster {
	t.Helper()
	c := &cluster{Server: plane.Start(t), id: id}
	c.webhooks = c.startWebhooks
	c.Controllers(t, strings.Join(append(controllers, "serviceaccount-controller", "garbage-collector-controller", "certificatesigningrequest-signing-controller"), ","))
	c.install(t)
	return c
}

// install makes Liqo's objects and starts its programs.
func (c *cluster) install(t *testing.T) {
	t.Helper()
	conn, err := tls.Dial("tcp", strings.TrimPrefix(c.URL, "https://"), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if c.authority == nil { // the server has signed for itself
		chain := conn.ConnectionState().PeerCertificates
		c.authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: chain[len(chain)-1].Raw})
	}
	dir, port := chart(t), freePort(t)
	c.kubectl(t, "", "apply", "--server-side", "-f", definitions(dir))
	object := func(kind, name string, more fields) fields {
		o := fields{"apiVersion": "v1", "kind": kind, "metadata": fields{"name": name, "namespace": system}}
		for key, value := range more {
			o[key] = value
		}
		return o
	}
	c.create(t, "/api/v1/namespaces", fields{"metadata": fields{"name": system}})
	c.create(t, "/api/v1/namespaces/"+system+"/configmaps", object("ConfigMap", "liqo-clusterid-configmap", fields{"data": fields{"CLUSTER_ID": c.id},
		"metadata": fields{"name": "liqo-clusterid-configmap", "labels": fields{"app.kubernetes.io/name": "clusterid-configmap"}}}))
	// The webhooks' Service leads to a process, not to a pod.
	c.create(t, "/api/v1/namespaces/"+system+"/services", object("Service", "liqo-webhook", fields{"spec": fields{"type": "ExternalName", "externalName": "127.0.0.1", "ports": []fields{{"port": port}}}}))
	c.Await(t, "Liqo's definitions are served", func() error { return c.get(t, offloading+"/vkoptionstemplates", nil) })
	c.create(t, offloading+"/namespaces/"+system+"/vkoptionstemplates", fields{"apiVersion": "offloading.liqo.io/v1beta1", "kind": "VkOptionsTemplate", "metadata": fields{"name": "virtual-kubelet-default"},
		"spec": fields{"createNode": true, "disableNetworkCheck": true, "containerImage": "none", "replicas": 1, "metricsEnabled": false,
			// There is no fabric, so pods have no address that leads to them.
			"extraArgs": []string{"--certificate-type=self-signed", "--listen-port=" + strconv.Itoa(freePort(t)), "--disable-ip-reflection", "--enable-apiserver-support=false"}}})
	c.kubectl(t, render(t, dir, port), "apply", "--server-side", "--namespace", system, "-f", "-")

	// A Deployment starts again what fails while the webhooks are not there yet; here they come
	// first. They write their authority into what calls them.
	c.webhooks(t, port)
	c.Await(t, "Liqo's webhooks answer", func() error {
		return c.Do(t, nil, http.MethodPost, "/apis/core.liqo.io/v1beta1/foreignclusters?dryRun=All", plane.JSON, fields{"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
			"metadata": fields{"name": "nobody"}, "spec": fields{"clusterID": "nobody"}}, nil)
	})
	probe := plane.FreeAddress(t)
	c.run(t, "liqo-controller-manager", "liqo-controller-manager", "--cluster-id="+c.id, "--liqo-namespace="+system, "--networking-enabled=false", "--enable-storage=false",
		"--enable-api-server-ip-remapping=false", "--api-server-address-override="+c.URL, "--default-limits-enforcement=None", "--default-node-resources=cpu=4,memory=8Gi,pods=110,ephemeral-storage=20Gi",
		"--metrics-address=0", "--health-probe-address="+probe)
	c.run(t, "liqo-crd-replicator", "crd-replicator", "--cluster-id="+c.id, "--metrics-address=0")
	c.Await(t, "Liqo's controllers run", func() error {
		answer, err := http.Get("http://" + probe + "/readyz")
		if err == nil {
			answer.Body.Close()
		}
		return err
	})
}

// program is one of Liqo's, as the test node's builder makes them.
func program(t *testing.T, name string) string {
	t.Helper()
	return plane.Program(t, "liqo/"+name)
}

// run starts one of Liqo's programs, in the name of its service account.
func (c *cluster) run(t *testing.T, account, name string, args ...string) {
	t.Helper()
	command := append([]string{"KUBECONFIG=" + c.as(t, system, account), program(t, name)}, args...)
	plane.Background(t, "/usr/bin/env", command...)
}

// startWebhooks starts Liqo's webhooks. Their files are at a fixed place below /tmp, which is
// another one for each of them.
func (c *cluster) startWebhooks(t *testing.T, port int) {
	t.Helper()
	const place = "/tmp/k8s-webhook-server"
	if err := os.MkdirAll(place, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(place) }) // empty, and perhaps in use for another
	plane.Background(t, "/usr/bin/unshare", append([]string{"--mount", "sh", "-c", `mount --bind "$0" ` + place + ` && exec "$@"`, t.TempDir(),
		"env", "KUBECONFIG=" + c.as(t, system, "liqo-webhook"), program(t, "webhook")}, webhookArgs(c.id, port)...)...)
}

func webhookArgs(id string, port int) []string {
	return []string{fmt.Sprintf("--webhook-port=%d", port), "--cluster-id=" + id, "--liqo-namespace=" + system, "--secret-name=liqo-webhook-certs",
		"--vk-options-default-template=" + system + "/virtual-kubelet-default", "--enable-resource-enforcement", "--metrics-address=0", "--health-probe-address=0"}
}

// as writes a kubeconfig for a service account.
func (c *cluster) as(t *testing.T, namespace, account string) string {
	t.Helper()
	text, err := json.Marshal(c.config(namespace, account))
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// config is the kubeconfig of a service account; of the administrator where account is empty.
func (c *cluster) config(namespace, account string) fields {
	user := fields{"token": c.Token}
	if account != "" {
		user["as"] = "system:serviceaccount:" + namespace + ":" + account
		user["as-groups"] = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
	}
	return fields{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": []fields{{"name": "c", "context": fields{"cluster": "c", "user": "u"}}},
		"clusters": []fields{{"name": "c", "cluster": fields{"server": c.URL, "certificate-authority-data": c.authority}}}, "users": []fields{{"name": "u", "user": user}}}
}

// kubectl runs kubectl as the administrator.
func (c *cluster) kubectl(t *testing.T, stdin string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), plane.Program(t, "kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.as(t, "", ""), "KUBECACHEDIR="+t.TempDir(), "KUBERC=off")
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// liqoctl runs the program that users of Liqo type.
func liqoctl(t *testing.T, args ...string) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program(t, "liqoctl"), args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := plane.StartTied(cmd) // it waits for minutes where it has to
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		t.Fatalf("liqoctl %s: %v\n%s", strings.Join(args, " "), err, out.Bytes())
	}
}

// peer makes a cluster a consumer of a provider.
func (c *cluster) peer(t *testing.T, provider *cluster) {
	t.Helper()
	liqoctl(t, "authenticate", "--kubeconfig", c.as(t, "", ""), "--remote-kubeconfig", provider.as(t, "", ""))
}

// startVirtualKubelet starts the virtual kubelet of a virtual node, as the Deployment says that Liqo has made.
func (c *cluster) startVirtualKubelet(t *testing.T, provider, node string) {
	t.Helper()
	namespace := "liqo-tenant-" + provider
	var d appsv1.Deployment
	c.Await(t, "Liqo makes a virtual kubelet for "+node, func() error {
		return c.get(t, "/apis/apps/v1/namespaces/"+namespace+"/deployments/vk-"+node, &d)
	})
	of := d.Spec.Template.Spec
	env := map[string]string{"POD_IP": "127.0.0.1", "POD_NAME": "vk-" + node, "POD_NAMESPACE": namespace, "KUBECONFIG": c.as(t, namespace, of.ServiceAccountName)}
	for _, e := range of.Containers[0].Env {
		if _, known := env[e.Name]; !known {
			env[e.Name] = e.Value
		}
	}
	var command []string
	for name, value := range env {
		command = append(command, name+"="+value)
	}
	command = append(command, program(t, "virtual-kubelet"), "--home-kubeconfig="+env["KUBECONFIG"])
	for _, arg := range of.Containers[0].Args {
		command = append(command, strings.ReplaceAll(arg, "$(POD_IP)", env["POD_IP"]))
	}
	plane.Background(t, "/usr/bin/env", command...)
}

func freePort(t *testing.T) int {
	t.Helper()
	_, port, _ := strings.Cut(plane.FreeAddress(t), ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (c *cluster) get(t *testing.T, path string, into any) error {
	return c.Do(t, nil, http.MethodGet, path, "", nil, into)
}

func (c *cluster) create(t *testing.T, path string, object any) {
	t.Helper()
	if err := c.Do(t, nil, http.MethodPost, path, plane.JSON, object, nil); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) patch(t *testing.T, path string, change fields) {
	t.Helper()
	if err := c.Do(t, nil, http.MethodPatch, path, plane.Merge, change, nil); err != nil {
		t.Fatal(err)
	}
}

// slice is a ResourceSlice as one of the two clusters has it.
type slice struct {
	Metadata struct{ Name, Namespace, ResourceVersion, UID string }
	Spec     struct {
		Class     string
		Resources corev1.ResourceList
	}
	Status struct {
		Resources  corev1.ResourceList
		NodeLabels map[string]string
		AuthParams *struct{ APIServer, ProxyURL string }
		Conditions []struct{ Type, Status, Reason, Message string }
	}
}

func (s *slice) has(resource string) int {
	n := s.Status.Resources[corev1.ResourceName(resource)]
	return int(n.Value())
}

// says is the condition of a type.
func (s *slice) says(kind string) (status, message string) {
	for _, c := range s.Status.Conditions {
		if c.Type == kind {
			return c.Status + " " + c.Reason, c.Message
		}
	}
	return "", ""
}

// request is what a consumer has asked a provider for.
type request struct {
	consumer, provider *cluster
	name               string
}

// ask has a consumer ask for resources in a slice of a class.
func (c *cluster) ask(t *testing.T, provider *cluster, name, class string, node bool, resources map[string]int) request {
	t.Helper()
	args := []string{"create", "resourceslice", name, "--kubeconfig", c.as(t, "", ""), "--remote-cluster-id", provider.id, "--class", class, "--cpu", "2", "--memory", "4Gi", "--pods", "10"}
	if !node {
		args = append(args, "--no-virtual-node")
	}
	for name, n := range resources {
		args = append(args, "--resource", fmt.Sprintf("%s=%d", name, n))
	}
	liqoctl(t, args...)
	return request{c, provider, name}
}

// askAsDocumented asks as the documentation shows it.
func (c *cluster) askAsDocumented(t *testing.T, provider *cluster) request {
	t.Helper()
	text, err := os.ReadFile("../../docs/bursting.md")
	if err != nil {
		t.Fatal(err)
	}
	for block := range strings.SplitSeq(string(text), "```") {
		manifest, ok := strings.CutPrefix(block, "yaml\n")
		if !ok || !strings.Contains(manifest, "kind: ResourceSlice\n") {
			continue
		}
		manifest = strings.NewReplacer("liqo-tenant-provider", "liqo-tenant-"+provider.id, ": provider", ": "+provider.id).Replace(manifest)
		c.kubectl(t, manifest, "create", "-f", "-")
		return request{c, provider, "gpus"}
	}
	t.Fatal("docs/bursting.md shows no ResourceSlice")
	return request{}
}

// there is its path at the provider, and here at the consumer.
func (r request) there() string {
	return authentication + "/namespaces/liqo-tenant-" + r.consumer.id + "/resourceslices/" + r.name
}

func (r request) here() string {
	return authentication + "/namespaces/liqo-tenant-" + r.provider.id + "/resourceslices/" + r.name
}

// wants has the consumer ask for another amount.
func (r request) wants(t *testing.T, resource string, n int) error {
	return r.consumer.Do(t, nil, http.MethodPatch, r.here(), plane.Merge, fields{"spec": fields{"resources": fields{resource: strconv.Itoa(n)}}}, nil)
}

func (r request) change(t *testing.T, resource string, n int) {
	t.Helper()
	if err := r.wants(t, resource, n); err != nil {
		t.Fatal(err)
	}
}

// answered waits until both clusters have it that the request is granted so much, and why.
func (r request) answered(t *testing.T, resource string, n int, condition, message string) {
	t.Helper()
	check := func(c *cluster, path string) error {
		var s slice
		if err := c.get(t, path, &s); err != nil {
			return err
		}
		is, says := s.says("Resources")
		if s.has(resource) != n || is != condition || !strings.Contains(says, message) {
			return fmt.Errorf("%s: it has %d, %s: %s", c.id, s.has(resource), is, says)
		}
		if who, _ := s.says("Authentication"); !strings.HasPrefix(who, "Accepted ") || s.Status.AuthParams == nil || s.Status.AuthParams.APIServer == "" {
			return fmt.Errorf("%s: what Liqo wrote is not there: %+v", c.id, s.Status)
		}
		return nil
	}
	r.provider.Await(t, fmt.Sprintf("%s of %s has %d of %s, %s", r.name, r.consumer.id, n, resource, condition), func() error {
		return errors.Join(check(r.provider, r.there()), check(r.consumer, r.here()))
	})
}

// following calls see with each version of each ResourceSlice of the provider, in order, until
// the test ends. It returns once the first has been seen.
func (c *cluster) following(t *testing.T, see func(event string, s slice)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	t.Cleanup(func() {
		cancel()
		<-done
	})
	go func() {
		done <- c.Watch(ctx, authentication+"/resourceslices?resourceVersion=0", func(event []byte) {
			var e struct {
				Type   string
				Object slice
			}
			if json.Unmarshal(event, &e) == nil {
				see(e.Type, e.Object)
			}
		})
	}()
}
