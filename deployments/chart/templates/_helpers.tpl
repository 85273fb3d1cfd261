{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /*
The objects are kustomize's: files/ links to its directories, whose comments give the
reasons. These templates read a directory as kustomization.yaml says, apply the patches of
what is switched on, and write the values into the objects. Of kustomize they know what is
used here: resources, ConfigMaps of files, and patches that add variables, mounts, volumes
and to the security context. A test holds what comes out equal to what kubectl makes.
*/ -}}

{{- /* The directories that are switched on, as JSON: each adds objects, or patches others. */ -}}
{{- define "gpu-agent.parts" -}}
{{- $parts := list -}}
{{- $switches := dict "components/dra" .Values.dra "components/evict" .Values.evict "components/gke" .Values.gke "components/monitoring" .Values.monitoring "components/mps" .Values.mps "components/mps-detach" .Values.mpsDetach "components/network-policy" .Values.networkPolicy "components/nfd" .Values.nfd "components/openshift" .Values.openshift "components/selinux" .Values.selinux "components/startup-taint" .Values.startupTaint "components/stays" .Values.stays "overlays/driver-container" .Values.driverContainer -}}
{{- range $dir, $of := $switches -}}
{{- if $of.enabled -}}{{- $parts = append $parts $dir -}}{{- end -}}
{{- end -}}
{{- toJson $parts -}}
{{- end -}}

{{- /* What the kustomization of a directory makes by itself: (root, directory, parts). */ -}}
{{- define "gpu-agent.print" -}}
{{- $root := index . 0 -}}{{- $dir := index . 1 -}}{{- $parts := index . 2 -}}{{- $objects := list -}}
{{- $made := $root.Files.Get (printf "files/%s/kustomization.yaml" $dir) | fromYaml -}}
{{- range $file := $made.resources -}}
{{- range $text := ternary (list) (regexSplit "(?m)^---\n" ($root.Files.Get (printf "files/%s/%s" $dir $file)) -1) (hasPrefix "../" $file) -}}
{{- $objects = append $objects ($text | replace "example.com" $root.Values.domain | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- range $map := $made.configMapGenerator -}}
{{- $data := dict -}}
{{- range $file := $map.files -}}{{- $_ := set $data $file ($root.Files.Get (printf "files/%s/%s" $dir $file)) -}}{{- end -}}
{{- $metadata := dict "name" $map.name "namespace" $map.namespace "labels" $map.options.labels -}}
{{- $objects = append $objects (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" $data) -}}
{{- end -}}
{{- range $object := $objects -}}
{{- $is := printf "%s %s" $object.kind $object.metadata.name -}}
{{- /* The release's namespace is Helm's, and the cleanup comes in place of the agent. */ -}}
{{- if not (or (eq $is "Namespace gpu-agent") (and $root.Values.cleanup (has $is (list "DaemonSet gpu-agent" "DaemonSet gpu-agent-mps")))) -}}
{{- include "gpu-agent.fill" (list $root $object $parts) }}
---
{{ toYaml $object }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Writes the values into an object: (root, object, parts). */ -}}
{{- define "gpu-agent.fill" -}}
{{- $root := index . 0 -}}{{- $object := index . 1 -}}{{- $values := $root.Values -}}
{{- $resourceDomain := default $values.domain $values.resourceDomain -}}
{{- range $at := prepend ($object.subjects | default list) $object.metadata -}}
{{- if eq (get $at "namespace") "gpu-agent" -}}{{- $_ := set $at "namespace" $root.Release.Namespace -}}{{- end -}}
{{- end -}}
{{- if has $object.kind (list "DaemonSet" "Deployment") -}}
{{- include "gpu-agent.workload" . -}}
{{- else if and (eq $object.metadata.name "gpu-partitions") $values.partitions -}}
{{- $_ := set $object.data "config.yaml" (include "gpu-agent.partitions" $values.partitions) -}}
{{- else if eq $object.kind "DeviceClass" -}}
{{- with $object.spec.extendedResourceName -}}
{{- $_ := set $object.spec "extendedResourceName" (printf "%s/%s" $resourceDomain (base .)) -}}
{{- end -}}
{{- else if eq $object.kind "NetworkPolicy" -}}
{{- /* The last rule is Prometheus's; before it the placer has one for schedulers. That of MPS has none. */ -}}
{{- with $object.spec.ingress -}}
{{- $from := index (last .).from 0 -}}
{{- $_ := set $from.namespaceSelector.matchLabels "kubernetes.io/metadata.name" $values.networkPolicy.namespace -}}
{{- end -}}
{{- if eq $object.metadata.name "gpu-placer" -}}
{{- $door := first $object.spec.ingress -}}{{- $hosts := list -}}
{{- range $values.networkPolicy.schedulers -}}{{- $hosts = append $hosts (dict "ipBlock" (dict "cidr" .)) -}}{{- end -}}
{{- $_ := set $door "from" (concat $hosts (rest $door.from)) -}}
{{- end -}}
{{- else if has $object.kind (list "PodMonitor" "PrometheusRule") -}}
{{- $_ := set $object.metadata "labels" (merge (dict) $values.monitoring.labels $object.metadata.labels) -}}
{{- range $group := get $object.spec "groups" | default list -}}
{{- range $rule := $group.rules -}}
{{- with dig "annotations" "runbook_url" "" $rule -}}
{{- $_ := set $rule.annotations "runbook_url" (. | replace "docs/runbooks.md" $values.monitoring.runbooks) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- else if eq $object.kind "ValidatingAdmissionPolicy" -}}
{{- range $object.spec.variables -}}
{{- if eq .name "resourceDomain" -}}
{{- $_ := set . "expression" (printf "'%s/'" $resourceDomain) -}}
{{- else if and (eq .name "startupTaint") $values.startupTaint.enabled -}}
{{- $_ := set . "expression" (printf "'%s'" $values.startupTaint.key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The same for a DaemonSet or a Deployment, with what the parts add to it. */ -}}
{{- define "gpu-agent.workload" -}}
{{- $root := index . 0 -}}{{- $object := index . 1 -}}{{- $values := $root.Values -}}
{{- $name := $object.metadata.name -}}{{- $pod := $object.spec.template.spec -}}
{{- range $dir := index . 2 -}}
{{- range $patch := ($root.Files.Get (printf "files/%s/kustomization.yaml" $dir) | fromYaml).patches -}}
{{- $add := $root.Files.Get (printf "files/%s/%s" $dir (default "" $patch.path)) | fromYaml -}}
{{- if and (eq (get $add "kind") $object.kind) (eq (dig "metadata" "name" "" $add) $name) -}}
{{- $more := $add.spec.template.spec -}}
{{- $_ := set $pod "volumes" (concat $pod.volumes ($more.volumes | default list)) -}}
{{- range $from := concat ($more.initContainers | default list) ($more.containers | default list) -}}
{{- range $to := concat ($pod.initContainers | default list) $pod.containers -}}
{{- if eq $from.name $to.name -}}
{{- $_ := set $to "volumeMounts" (concat $to.volumeMounts ($from.volumeMounts | default list)) -}}
{{- with $from.securityContext -}}{{- $_ := set $to "securityContext" (merge . $to.securityContext) -}}{{- end -}}
{{- range $from.env -}}{{- include "gpu-agent.env" (list $to .name .value) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* The placer has values of its own, and the cleanup the agent's. */ -}}
{{- $of := ternary $values.placer $values (eq $name "gpu-placer") -}}
{{- range $key := list "nodeSelector" "tolerations" -}}
{{- $_ := unset $pod $key -}}
{{- with get $of $key -}}{{- $_ := set $pod $key . -}}{{- end -}}
{{- end -}}
{{- with $values.image.pullSecrets -}}
{{- $secrets := list -}}{{- range . -}}{{- $secrets = append $secrets (dict "name" .) -}}{{- end -}}
{{- $_ := set $pod "imagePullSecrets" $secrets -}}
{{- end -}}
{{- range $container := concat ($pod.initContainers | default list) $pod.containers -}}
{{- $image := ternary $values.placer.image $values.image (eq $name "gpu-placer") -}}
{{- $_ := set $container "image" (include "gpu-agent.image" (list $root $image)) -}}
{{- $_ := set $container "imagePullPolicy" $values.image.pullPolicy -}}
{{- $prefix := ternary "GPU_PLACER_" "GPU_AGENT_" (eq $name "gpu-placer") -}}
{{- if ne $values.domain "example.com" -}}{{- include "gpu-agent.env" (list $container (printf "%sDOMAIN" $prefix) $values.domain) -}}{{- end -}}
{{- with $values.resourceDomain -}}{{- include "gpu-agent.env" (list $container (printf "%sRESOURCE_DOMAIN" $prefix) .) -}}{{- end -}}
{{- if not (has $name (list "gpu-agent-cleanup" "gpu-agent-mps")) -}}{{- $_ := set $container "resources" $of.resources -}}{{- end -}}
{{- if eq $name "gpu-placer" -}}
{{- with without $values.placer.doors "extender" -}}{{- include "gpu-agent.env" (list $container "GPU_PLACER_DOORS" ($values.placer.doors | join ",")) -}}{{- end -}}
{{- if $values.placer.mpsApart -}}{{- include "gpu-agent.env" (list $container "GPU_PLACER_MPS_APART" "true") -}}{{- end -}}
{{- else -}}
{{- range $flag, $value := $values.flags -}}
{{- $text := ternary ($value | int64 | toString) ($value | toString) (kindIs "float64" $value) -}}
{{- include "gpu-agent.env" (list $container (printf "GPU_AGENT_%s" ($flag | upper | replace "-" "_")) $text) -}}
{{- end -}}
{{- end -}}
{{- if eq $name "gpu-agent" -}}
{{- if ne $values.memoryUnit "1GiB" -}}{{- include "gpu-agent.env" (list $container "GPU_AGENT_MEMORY_UNIT" $values.memoryUnit) -}}{{- end -}}
{{- if $values.evict.enabled -}}{{- include "gpu-agent.env" (list $container "GPU_AGENT_EVICT_AFTER" ($values.evict.after | int64 | toString)) -}}{{- end -}}
{{- if $values.startupTaint.enabled -}}{{- include "gpu-agent.env" (list $container "GPU_AGENT_STARTUP_TAINT" $values.startupTaint.key) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The text of a partition file, which may be in a ConfigMap. What is no YAML is for the agent to refuse. */ -}}
{{- define "gpu-agent.partitions" -}}
{{- $file := fromYaml . -}}
{{- if not (hasKey $file "kind") -}}
{{- . -}}
{{- else if ne (toString $file.kind) "ConfigMap" -}}
{{- fail (printf "partitions: it is of kind %v; a partition file is taken, or a ConfigMap with one" $file.kind) -}}
{{- else -}}
{{- $text := get (ternary $file.data (dict) (kindIs "map" $file.data)) "config.yaml" -}}
{{- if or (not (kindIs "string" $text)) (empty $text) -}}
{{- fail "partitions: the ConfigMap has no text in its data under the key config.yaml" -}}
{{- end -}}
{{- $text -}}
{{- end -}}
{{- end -}}

{{- /* Sets a variable of a container: (container, name, value). */ -}}
{{- define "gpu-agent.env" -}}
{{- $container := index . 0 -}}{{- $name := index . 1 -}}
{{- $others := list -}}
{{- range $container.env -}}{{- if ne .name $name -}}{{- $others = append $others . -}}{{- end -}}{{- end -}}
{{- $_ := set $container "env" (append $others (dict "name" $name "value" (index . 2))) -}}
{{- end -}}

{{- /* The name of an image: (root, image). */ -}}
{{- define "gpu-agent.image" -}}
{{- $root := index . 0 -}}
{{- with index . 1 -}}
{{- .repository -}}
{{- if .digest }}@{{ .digest }}{{- else }}:{{ default $root.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}
