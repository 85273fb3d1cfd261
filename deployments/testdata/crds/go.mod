module example.com/gpu-agent/deployments/testdata/crds

go 1.26

require (
	github.com/argoproj/argo-workflows/v3 v3.6.10
	github.com/kserve/kserve v0.15.2
	github.com/kubeflow/mpi-operator v0.8.2
	github.com/kubeflow/trainer/v2 v2.2.1
	github.com/kubeflow/training-operator v1.9.3
	github.com/liqotech/liqo v1.2.0
	github.com/openshift/api v0.0.0-20260213204242-d34f11c515b3
	github.com/prometheus-operator/prometheus-operator v0.93.1
	github.com/ray-project/kuberay/ray-operator v1.4.2
	sigs.k8s.io/karpenter v1.8.0
	sigs.k8s.io/kueue v0.19.0
)
