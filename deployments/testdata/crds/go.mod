module example.com/gpu-agent/deployments/testdata/crds

go 1.26

require (
	github.com/liqotech/liqo v1.2.0
	github.com/openshift/api v0.0.0-20260213204242-d34f11c515b3
	github.com/prometheus-operator/prometheus-operator v0.93.1
	github.com/ray-project/kuberay/ray-operator v1.4.2
	sigs.k8s.io/karpenter v1.8.0
	sigs.k8s.io/kueue v0.19.0
)
