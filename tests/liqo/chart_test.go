// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
)

// version is the Liqo that tests/cluster builds, as its go.mod there says.
const version = "v1.2.0"

// installed are the templates of Liqo's chart that are applied: what its programs may do, what
// other clusters may, and the webhooks. The rest makes Deployments, which processes stand in for,
// and the network fabric, which is off.
var installed = []string{
	"liqo-controller-manager-rbac.yaml", "liqo-crd-replicator-rbac.yaml", "liqo-webhook-rbac.yaml",
	"liqo-controlplane-rbac.yaml", "liqo-remote-controlplane-rbac.yaml", "liqo-virtual-kubelet-local.yaml", "liqo-virtual-kubelet-remote.yaml",
	"webhooks/liqo-mutating-webhook.yaml", "webhooks/liqo-validating-webhook.yaml", "webhooks/liqo-webhook-secret.yaml",
}

// chart is where Liqo's chart is: in its module, which the test node's builder has by its checksum.
func chart(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", "github.com/liqotech/liqo@"+version)
	cmd.Dir = "../cluster/liqo"
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	var said struct{ Dir, Sum string }
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	sums, missing := os.ReadFile("../cluster/liqo/go.sum")
	if err != nil || missing != nil || said.Dir == "" {
		t.Fatalf("go mod download: %v, %v: %s", err, missing, out)
	}
	if !strings.Contains(string(sums), "github.com/liqotech/liqo "+version+" "+said.Sum+"\n") {
		t.Fatalf("Liqo's module has the checksum %s, which is not in tests/cluster/liqo/go.sum", said.Sum)
	}
	return filepath.Join(said.Dir, "deployments", "liqo")
}

// definitions is where Liqo's resources are defined.
func definitions(chart string) string { return filepath.Join(chart, "charts", "liqo-crds", "crds") }

// values are those that the templates ask for, as Liqo installs itself.
func values(webhookPort int) map[string]any {
	return map[string]any{
		"Release": map[string]any{"Namespace": system},
		"Values": map[string]any{
			"webhook":         map[string]any{"port": webhookPort, "failurePolicy": "Fail"},
			"openshiftConfig": map[string]any{"enabled": false},
		},
	}
}

// helpers are what the templates ask of Liqo's _helpers.tpl.
const helpers = `
{{- define "liqo.prefixedName" -}}liqo-{{ .name }}{{- end }}
{{- define "liqo.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .module }}
app.kubernetes.io/part-of: liqo
{{- end }}
{{- define "liqo.role-filename" -}}files/{{ .prefix }}-Role.yaml{{- end }}
{{- define "liqo.cluster-role-filename" -}}files/{{ .prefix }}-ClusterRole.yaml{{- end }}
`

// files are what templates read of the chart.
type files string

func (f files) Get(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(string(f), name))
	if os.IsNotExist(err) {
		return "", nil // as Helm has it
	}
	return string(text), err
}

// render fills in the chart's templates, with those of Helm's functions that they use.
func render(t *testing.T, chart string, webhookPort int) string {
	t.Helper()
	all := template.New("")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var out bytes.Buffer
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
		"dict": func(pairs ...any) map[string]any {
			out := map[string]any{}
			for i := 0; i+1 < len(pairs); i += 2 {
				out[pairs[i].(string)] = pairs[i+1]
			}
			return out
		},
		"merge": func(over, under map[string]any) map[string]any {
			out := maps.Clone(under)
			maps.Copy(out, over)
			return out
		},
		"nindent": func(n int, text string) string {
			return "\n" + strings.Repeat(" ", n) + strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", n))
		},
	})
	template.Must(all.Parse(helpers))
	data := values(webhookPort)
	data["Files"] = files(chart)
	var out strings.Builder
	for _, name := range installed {
		text, err := os.ReadFile(filepath.Join(chart, "templates", name))
		if err != nil {
			t.Fatal(err)
		}
		one, err := all.New(name).Parse(string(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := one.Execute(&out, data); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		fmt.Fprint(&out, "\n---\n")
	}
	return out.String()
}
