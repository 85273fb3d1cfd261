// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// The types below have the fields that the manifests use and no others, and are
// decoded strictly: a mistyped field is an unknown one.

type metadata struct {
	Name, Namespace     string
	Labels, Annotations map[string]string
}

// header is what every object has.
type header struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
}

type daemonSet struct {
	header `yaml:",inline"`
	Spec   struct {
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		UpdateStrategy struct {
			Type          string
			RollingUpdate struct {
				MaxUnavailable string `yaml:"maxUnavailable"`
				MaxSurge       int    `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		} `yaml:"updateStrategy"`
		Template struct {
			Metadata metadata
			Spec     podSpec
		}
	}
}

type podSpec struct {
	ServiceAccountName string `yaml:"serviceAccountName"`
	AutomountToken     bool   `yaml:"automountServiceAccountToken"`
	RuntimeClassName   string `yaml:"runtimeClassName"`
	PriorityClassName  string `yaml:"priorityClassName"`
	HostPID            bool   `yaml:"hostPID"`
	GracePeriod        int    `yaml:"terminationGracePeriodSeconds"`
	Affinity           struct {
		NodeAffinity struct {
			Required struct {
				Terms []struct {
					Expressions []expression `yaml:"matchExpressions"`
				} `yaml:"nodeSelectorTerms"`
			} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
		} `yaml:"nodeAffinity"`
		PodAntiAffinity struct {
			Required []struct {
				TopologyKey   string `yaml:"topologyKey"`
				LabelSelector struct {
					MatchLabels map[string]string `yaml:"matchLabels"`
				} `yaml:"labelSelector"`
			} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
		} `yaml:"podAntiAffinity"`
	}
	Tolerations    []struct{ Operator string }
	InitContainers []container `yaml:"initContainers"`
	Containers     []container
	Volumes        []struct {
		Name      string
		HostPath  struct{ Path, Type string } `yaml:"hostPath"`
		Projected struct {
			DefaultMode int `yaml:"defaultMode"`
			Sources     []struct {
				Token struct {
					Path   string
					Expiry int `yaml:"expirationSeconds"`
				} `yaml:"serviceAccountToken"`
				ConfigMap struct {
					Name  string
					Items []struct{ Key, Path string }
				} `yaml:"configMap"`
			}
		}
	}
}

type expression struct {
	Key, Operator string
	Values        []string
}

type container struct {
	Name, Image     string
	ImagePullPolicy string `yaml:"imagePullPolicy"`
	Command, Args   []string
	Env             []struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				APIVersion string `yaml:"apiVersion"`
				FieldPath  string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	Ports []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
		HostPort      int `yaml:"hostPort"`
	}
	LivenessProbe   probe `yaml:"livenessProbe"`
	ReadinessProbe  probe `yaml:"readinessProbe"`
	Resources       struct{ Requests, Limits map[string]string }
	SecurityContext struct {
		Privileged               bool
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		Capabilities             struct{ Drop, Add []string }
		SeccompProfile           struct{ Type string } `yaml:"seccompProfile"`
		SELinuxOptions           struct{ Type string } `yaml:"seLinuxOptions"`
	} `yaml:"securityContext"`
	TerminationMessagePath   string  `yaml:"terminationMessagePath"`
	TerminationMessagePolicy string  `yaml:"terminationMessagePolicy"`
	VolumeMounts             []mount `yaml:"volumeMounts"`
}

type mount struct {
	Name             string
	MountPath        string `yaml:"mountPath"`
	ReadOnly         bool   `yaml:"readOnly"`
	MountPropagation string `yaml:"mountPropagation"`
}

type probe struct {
	HTTPGet          struct{ Path, Port string } `yaml:"httpGet"`
	PeriodSeconds    int                         `yaml:"periodSeconds"`
	TimeoutSeconds   int                         `yaml:"timeoutSeconds"`
	FailureThreshold int                         `yaml:"failureThreshold"`
}

// env returns the container's variables that have a plain value.
func (c *container) env() map[string]string {
	out := map[string]string{}
	for _, e := range c.Env {
		if e.ValueFrom.FieldRef.FieldPath == "" {
			out[e.Name] = e.Value
		}
	}
	return out
}

type role struct {
	header `yaml:",inline"`
	Rules  []struct {
		APIGroups     []string `yaml:"apiGroups"`
		Resources     []string
		ResourceNames []string `yaml:"resourceNames"`
		Verbs         []string
	}
}

type binding struct {
	header  `yaml:",inline"`
	RoleRef struct {
		APIGroup   string `yaml:"apiGroup"`
		Kind, Name string
	} `yaml:"roleRef"`
	Subjects []struct{ Kind, Name, Namespace string }
}

// object is one document of a manifest.
type object struct {
	header
	file string
	node *yaml.Node
}

// as decodes the object strictly.
func as[T any](t *testing.T, o object) T {
	t.Helper()
	text, err := yaml.Marshal(o.node)
	if err != nil {
		t.Fatal(err)
	}
	var out T
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&out); err != nil {
		t.Fatalf("%s: %s %s: %v", o.file, o.Kind, o.Metadata.Name, err)
	}
	return out
}

// documents decodes all objects of a manifest.
func documents(t *testing.T, name string, text []byte) []object {
	t.Helper()
	var out []object
	d := yaml.NewDecoder(bytes.NewReader(text))
	for {
		node := new(yaml.Node)
		err := d.Decode(node)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		o := object{file: name, node: node}
		// A map refuses a key that is there twice, which a node does not.
		var all map[string]any
		if err := errors.Join(node.Decode(&o.header), node.Decode(&all)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if o.Kind == "" || o.APIVersion == "" {
			t.Fatalf("%s:%d: not a Kubernetes object", name, node.Line)
		}
		out = append(out, o)
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

type kustomization struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Resources  []string
	Components []string
	Patches    []struct {
		// One of the two: a file, or the patch itself.
		Path, Patch string
		// Target chooses what a patch is for; none that it fits is no error.
		Target struct{ Kind, Name string }
	}
	ConfigMapGenerator []struct {
		Name, Namespace string
		Files           []string
		Options         struct {
			DisableNameSuffixHash bool `yaml:"disableNameSuffixHash"`
			Labels                map[string]string
		}
	} `yaml:"configMapGenerator"`
}

func readKustomization(t *testing.T, dir string) kustomization {
	t.Helper()
	var k kustomization
	d := yaml.NewDecoder(bytes.NewReader(read(t, filepath.Join(dir, "kustomization.yaml"))))
	d.KnownFields(true)
	if err := d.Decode(&k); err != nil {
		t.Fatalf("%s: %v", dir, err)
	}
	return k
}

// base returns the base's objects.
func base(t *testing.T) []object { return resources(t, "base") }

// resources returns the objects of a kustomization that stands alone.
func resources(t *testing.T, dir string) []object {
	t.Helper()
	var out []object
	for _, r := range readKustomization(t, dir).Resources {
		out = append(out, documents(t, filepath.Join(dir, r), read(t, filepath.Join(dir, r)))...)
	}
	return out
}

// one finds the only object of a kind with that name.
func one(t *testing.T, objects []object, kind, name string) object {
	t.Helper()
	i := slices.IndexFunc(objects, func(o object) bool { return o.Kind == kind && o.Metadata.Name == name })
	if i < 0 {
		t.Fatalf("there is no %s %s", kind, name)
	}
	return objects[i]
}

// kustomizations are the directories of all that can be applied.
func kustomizations(t *testing.T) []string {
	t.Helper()
	return append(overlays(t), "base", "cleanup", "placer")
}

// doors are the directories of all parts that the placer does without: its other doors, and its
// monitoring.
func doors(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("placer/*/kustomization.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("find the placer's doors: %v, %v", files, err)
	}
	for i := range files {
		files[i] = filepath.Dir(files[i])
	}
	return files
}

// components are the directories of all parts that the base does without.
func components(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob("components/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("find the components: %v, %v", dirs, err)
	}
	return dirs
}

// overlays are the directories of all overlays.
func overlays(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob("overlays/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("find the overlays: %v, %v", dirs, err)
	}
	return dirs
}

// walk calls visit for each key and each list item below a node, with the keys
// that lead there; "[]" stands for an item.
func walk(n *yaml.Node, path []string, visit func(path []string, key, value *yaml.Node)) {
	switch n.Kind {
	case yaml.DocumentNode:
		walk(n.Content[0], path, visit)
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			at := append(slices.Clone(path), n.Content[i].Value)
			visit(at, n.Content[i], n.Content[i+1])
			walk(n.Content[i+1], at, visit)
		}
	case yaml.SequenceNode:
		for _, item := range n.Content {
			at := append(slices.Clone(path), "[]")
			visit(at, item, item)
			walk(item, at, visit)
		}
	}
}

// headComment returns the comment lines right above a key or an item. Where an
// item is a map, the decoder may leave the comment at its first key.
func headComment(n *yaml.Node) string {
	for {
		if n.HeadComment != "" || n.Kind != yaml.MappingNode || len(n.Content) == 0 {
			return strings.ReplaceAll(n.HeadComment, "# ", "")
		}
		n = n.Content[0]
	}
}
