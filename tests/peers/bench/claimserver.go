// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"example.com/gpu-agent/tests/plane"
)

// claimServer is the real API server, with the agent's manifests and a node.
type claimServer struct {
	*plane.Server
	t *scene
	// agent and root are kubeconfigs: of the agent's account with a token of its pod on
	// the node, under the manifests' rights and policies, and of who may do everything.
	agent, root string
	serial      int
}

type fields = map[string]any

// startClaimServer starts it and installs the manifests.
func (b *bench) startClaimServer(t *scene) (*claimServer, error) {
	s := &claimServer{Server: plane.Start(t), t: t}
	s.root = s.Kubeconfig(t, nil)
	s.agent = s.Kubeconfig(t, fields{"as": "system:serviceaccount:" + agentPod.Namespace + ":gpu-agent",
		"as-groups":     []string{"system:authenticated", "system:serviceaccounts", "system:serviceaccounts:" + agentPod.Namespace},
		"as-user-extra": fields{"authentication.kubernetes.io/node-name": []string{nodeName}}})
	dir := t.TempDir()
	manifests, err := filepath.Rel(dir, filepath.Join(b.kit.Root, "deployments"))
	if err != nil {
		return nil, err
	}
	kustomization := fmt.Sprintf("resources: [%[1]s/base]\ncomponents: [%[1]s/components/dra]\n", manifests)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(kustomization), 0o644); err != nil {
		return nil, err
	}
	if err := b.kit.Run(t.ctx, b.kit.Bin("kubectl"), "--kubeconfig", s.root, "apply", "--server-side", "-k", dir); err != nil {
		return nil, fmt.Errorf("install the agent's manifests: %w", err)
	}
	node := nodeObject(nodeName)
	if err := s.Do(t, nil, http.MethodPost, "/api/v1/nodes", plane.JSON, node, nil); err != nil {
		return nil, err
	}
	return s, s.Do(t, nil, http.MethodPatch, "/api/v1/nodes/"+nodeName+"/status", plane.Merge, fields{"status": node["status"]}, nil)
}

// setPartitions writes the ConfigMap that the agent watches.
func (s *claimServer) setPartitions(text string) error {
	return s.Do(s.t, nil, http.MethodPatch, "/api/v1/namespaces/"+agentPod.Namespace+"/configmaps/"+agentConfig, plane.Merge,
		fields{"data": fields{configKey: text}}, nil)
}

const slicesPath = "/apis/resource.k8s.io/v1/resourceslices"

func ofDriver(driver string) string {
	return "?fieldSelector=" + url.QueryEscape("spec.driver="+driver)
}

// forgetSlices removes a driver's slices, as a kubelet does when it starts.
func (s *claimServer) forgetSlices(driver string) error {
	return s.Do(s.t, nil, http.MethodDelete, slicesPath+ofDriver(driver), "", nil, nil)
}

// slices is how many a driver has.
func (s *claimServer) slices(driver string) (int, error) {
	var list struct{ Items []struct{} }
	err := s.Do(s.t, http.Header{"Accept": {"application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"}}, http.MethodGet, slicesPath+ofDriver(driver), "", nil, &list)
	return len(list.Items), err
}

// published is a device in a slice.
type published struct {
	pool, name string
	// kind is "gpu" or "mig", of both programs, or "shared"; gpu is the UUID of the GPU.
	kind, profile, gpu string
}

// devices are a driver's, in the order of their names; whole is false while a pool lacks
// slices.
func (s *claimServer) devices(driver string) (all []published, whole bool, err error) {
	type text struct{ String string }
	var list struct {
		Items []struct {
			Spec struct {
				Pool struct {
					Name               string
					ResourceSliceCount int
				}
				Devices []struct {
					Name       string
					Attributes map[string]text
				}
			}
		}
	}
	if err := s.Do(s.t, nil, http.MethodGet, slicesPath+ofDriver(driver), "", nil, &list); err != nil {
		return nil, false, err
	}
	whole = len(list.Items) > 0
	for _, slice := range list.Items {
		whole = whole && slice.Spec.Pool.ResourceSliceCount == len(list.Items)
		for _, d := range slice.Spec.Devices {
			a, kind := d.Attributes, d.Attributes["type"].String
			if a["sharing"].String != "" {
				kind = "shared"
			}
			all = append(all, published{slice.Spec.Pool.Name, d.Name, kind, a["profile"].String, cmp.Or(a["parentUUID"].String, a["uuid"].String)})
		}
	}
	slices.SortFunc(all, func(a, b published) int { return strings.Compare(a.name, b.name) })
	return all, whole, nil
}

const claimsPath = "/apis/resource.k8s.io/v1/namespaces/" + podNamespace + "/resourceclaims"

// allocate makes a claim and gives it a device, as the scheduler does, and returns its name
// and UID. Of a shared one it gets so much memory.
func (s *claimServer) allocate(driver string, d published, memory string) (name, uid string, err error) {
	s.serial++
	name = fmt.Sprintf("claim-%d", s.serial)
	var made struct{ Metadata struct{ UID string } }
	if err := s.Do(s.t, nil, http.MethodPost, claimsPath, plane.JSON, fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": name},
		"spec": fields{"devices": fields{"requests": []fields{{"name": "gpu", "exactly": fields{"deviceClassName": "any"}}}}}}, &made); err != nil {
		return "", "", err
	}
	result := fields{"request": "gpu", "driver": driver, "pool": d.pool, "device": d.name}
	if memory != "" {
		result["shareID"] = made.Metadata.UID // any UUID
		result["consumedCapacity"] = fields{"memory": memory}
	}
	return name, made.Metadata.UID, s.Do(s.t, nil, http.MethodPatch, claimsPath+"/"+name+"/status", plane.Merge, fields{"status": fields{
		"reservedFor": []fields{{"resource": "pods", "name": name, "uid": "pod-" + name}},
		"allocation": fields{"devices": fields{"results": []fields{result}},
			"nodeSelector": fields{"nodeSelectorTerms": []fields{{"matchFields": []fields{{"key": "metadata.name", "operator": "In", "values": []string{nodeName}}}}}}}}}, nil)
}

// remove removes a claim.
func (s *claimServer) remove(name string) error {
	return s.Do(s.t, nil, http.MethodDelete, claimsPath+"/"+name, "", nil, nil)
}
