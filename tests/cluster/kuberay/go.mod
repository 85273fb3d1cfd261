module example.com/gpu-agent/tests/cluster/kuberay

go 1.26.0

require github.com/ray-project/kuberay/ray-operator v1.4.2
